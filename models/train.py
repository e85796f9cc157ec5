"""The training program: python -m models.train configs/NAME.yaml section.key=value ... [--report]"""

import argparse
import contextlib
import functools
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxoffload
from models import checkpoints, data, metrics
from models.config import Config, Distributed, load
from models.reading import ConfigError
from models.report import compiled_memory, report, summary
from models.sharding import MESH_AXES, make_mesh, process_block
from models.step import Program, State, learning_rate, program, shardings_of
from models.transformer import flops_per_token


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for a config error, 128 + the signal's number after Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m models.train", description="Trains a transformer.")
    parser.add_argument("config", help="a YAML file, such as configs/tiny.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value; values are YAML")
    parser.add_argument("--report", action="store_true", help="print residuals and memory; allocate nothing")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load(options.config, options.overrides)
        if options.report:
            print(report(config))
            return 0
        join(config.distributed)
        return train(config)
    except ConfigError as error:
        print("\n".join((f"{options.config} cannot run:", *error.problems)), file=sys.stderr)
        return 2


def join(distributed: Distributed) -> None:
    """Makes this process one of several, where the config or the launcher (Slurm, Open MPI) says so."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    tasks = (os.environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    if distributed.coordinator is not None:
        jax.distributed.initialize(distributed.coordinator, distributed.num_processes, distributed.process_id)
    elif any(int(count) > 1 for count in tasks):
        jax.distributed.initialize()


def train(config: Config) -> int:
    """Trains, from the last checkpoint if there is one; returns the exit code."""
    mesh = make_mesh(config.mesh)
    platform = mesh.devices.flat[0].platform
    if config.model.attention == "cudnn" and platform != "gpu":
        raise ConfigError([f"model.attention = 'cudnn': needs NVIDIA GPUs, and this is a {platform}; use xla"])
    made = program(config, mesh)
    out, steps = Path(config.train.out), config.train.steps
    with checkpoints.open_manager(out) as manager:
        start = manager.latest_step() or 0
        if start >= steps:
            say(f"{out} is finished, at step {start} of {steps}; train.steps={2 * start} would continue it")
            return 0
        say(summary(config, made))
        source = open_source(config, made)
        step = compile_step(made)
        say(compiled_memory(step))
        if start:
            state, position = checkpoints.restore(manager, start, made.state, config)
            source.batches.set_state(position)
            say(f"continuing {out} from its checkpoint at step {start}")
        else:
            state = jax.jit(made.init, out_shardings=shardings_of(made.state))()
        journal = metrics.Journal(out / "metrics.jsonl", config, source.unigram)
        journal.begin(start)
        return loop(Run(config, made, mesh, step, source, manager, journal), state, start)


class Source(NamedTuple):
    """The data, this process's rows of each batch only."""

    batches: Any  # grain's iterator: endless, with get_state and set_state
    validation: Callable[[], Iterable[np.ndarray]]  # the same held-out batches each time, of a microbatch's size
    unigram: float  # cross-entropy of a model that knows no context, on the held-out tokens


def open_source(config: Config, made: Program) -> Source:
    train = config.train

    def rows(tokens: jax.ShapeDtypeStruct) -> dict[str, int]:
        index, count = process_block(tokens.sharding, tokens.shape)
        shape = {"batch_size": tokens.shape[0], "seq_len": train.seq_len}
        return shape | {"process_index": index, "process_count": count}

    try:
        corpus = data.load(
            path=config.data.path,
            tokenizer=config.data.tokenizer,
            text_field=config.data.text_field,
            vocab_size=config.model.vocab_size,
            valid_fraction=config.data.valid_fraction,
            cache_dir=Path(config.data.cache_dir).expanduser(),
        )
        batches = data.batches(corpus.train, seed=train.seed, **rows(made.tokens))
        held_out = data.fixed_batches(corpus.valid, **rows(made.microbatch))
    except (ValueError, ImportError) as error:
        raise ConfigError([str(error)]) from error
    unigram = data.unigram_entropy(corpus.train, corpus.valid, vocab_size=corpus.vocab_size)
    say(
        f"{len(corpus.train):,} tokens to train on, {len(corpus.valid):,} held out; baselines: "
        f"ln(vocab) {math.log(config.model.vocab_size):.3f}, unigram {unigram:.3f}"
    )
    return Source(batches, lambda: itertools.islice(held_out, train.eval_batches), unigram)


def compile_step(made: Program) -> jax.stages.Compiled:
    state = shardings_of(made.state)
    step = jax.jit(
        made.step,
        in_shardings=(state, made.tokens.sharding),
        out_shardings=(state, None),
        donate_argnums=0,
        compiler_options=jaxoffload.compiler_options(),
    )
    return step.lower(made.state, made.tokens).compile()


class Run(NamedTuple):
    config: Config
    made: Program
    mesh: Mesh
    step: jax.stages.Compiled
    source: Source
    manager: ocp.CheckpointManager
    journal: metrics.Journal


def loop(run: Run, state: State, start: int) -> int:
    """Steps from `start` to the end or to a signal, with a checkpoint there; returns the exit code."""
    train = run.config.train
    evaluate = jax.jit(run.made.loss, compiler_options=jaxoffload.compiler_options())

    def validate(step: int) -> None:
        rows = run.source.validation()
        losses = [evaluate(state.params, place(some, run.made.microbatch)) for some in rows]
        run.journal.write({"step": step, "valid_loss": sum(map(float, losses)) / len(losses)})

    def due(step: int, every: int) -> bool:
        return step == train.steps or step % every == 0

    with noted_signals() as received:
        if start == 0:
            validate(0)
        agreed, mark = greatest(run.mesh, 0), (start, time.monotonic())
        for step in range(start + 1, train.steps + 1):
            state, result = run.step(state, place(next(run.source.batches), run.made.tokens))
            # Read one step late: then the host need not wait for the step that it has just started.
            stop, agreed = int(agreed), greatest(run.mesh, received())
            if log := due(step, train.log_every) or step == 1:
                run.journal.write(measured(run, step, result, mark))
            if judge := due(step, train.eval_every):
                validate(step)
            if save := due(step, train.checkpoint_every) or bool(stop):
                checkpoints.save(run.manager, step, state, run.source.batches.get_state(), run.config)
                run.journal.draw()
            if stop and step < train.steps:
                run.manager.wait_until_finished()
                say(
                    f"stopped by {signal.Signals(stop).name}; step {step} of {train.steps} is saved, "
                    "and the same command continues"
                )
                return 128 + stop
            if log or judge or save:
                mark = (step, time.monotonic())
    run.manager.wait_until_finished()
    say(f"finished; the loss curve is {run.journal.path.with_name('loss.png')}")
    return 0


def measured(run: Run, step: int, result: dict[str, jax.Array], mark: tuple[int, float]) -> metrics.Record:
    """The record of a step; waits for it. `mark`: a step before it, and when that one ended."""
    train, device = run.config.train, run.mesh.devices.flat[0]
    loss, grad_norm = float(result["loss"]), float(result["grad_norm"])
    rate = (step - mark[0]) * train.batch_size * train.seq_len / (time.monotonic() - mark[1])
    peak = metrics.PEAK_FLOPS.get(device.device_kind)
    return {
        "step": step,
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": float(learning_rate(train)(step - 1)),
        "tokens_per_second": rate,
        "mfu": peak and rate * flops_per_token(run.config.model, train.seq_len) / (peak * run.mesh.size),
        "device_peak_bytes": metrics.device_peak_bytes(run.mesh.local_devices[0]),
        "host_peak_bytes": metrics.host_peak_bytes(),
    }


def place(rows: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The global batch of which this process has these rows."""
    return jax.make_array_from_process_local_data(like.sharding, rows, like.shape)


def greatest(mesh: Mesh, number: int) -> jax.Array:
    """The greatest of all processes' numbers, as an array to read when it is needed."""
    each = NamedSharding(mesh, PartitionSpec(MESH_AXES))
    here = np.full(len(mesh.local_devices), number, np.int32)
    return _max(mesh)(jax.make_array_from_process_local_data(each, here))


@functools.cache
def _max(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))


@contextlib.contextmanager
def noted_signals() -> Iterator[Callable[[], int]]:
    """Yields a function that says which of SIGINT and SIGTERM came, or 0; a second one acts as usual."""
    received = [0]

    def note(number: int, frame: Any) -> None:
        received[0] = number
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0]
    finally:
        restore()


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
