"""The training program: python -m models.train configs/NAME.yaml section.key=value ... [--report]"""

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from tqdm import tqdm

import jaxoffload
from jaxoffload import UserError, proof
from models import budget, checkpoints, data, metrics
from models.config import Config, ConfigError, Distributed, Model, flat, load
from models.metrics import say
from models.sharding import abstract_mesh, batch_sharding, make_mesh, process_block
from models.step import Program, State, learning_rate, program, shardings_of, traceable
from models.transformer import flops_per_token

USAGE = """\
Trains a Llama-style decoder under a config that saves, offloads or recomputes each residual.

  python -m models.train configs/tiny.yaml
  python -m models.train configs/tiny.yaml train.steps=600 'remat.residuals[act]=offload'
  python -m models.train configs/llama3-8b.yaml --report

The same command continues from the last checkpoint in train.out. models/config.py has all sections and
keys, with their meanings and defaults.

exit codes: 0 finished; 2 the config cannot run; 143 stopped by SIGTERM, with a checkpoint; 1 any other error"""


_DRIVER = Path("/proc/driver/nvidia/gpus")  # has a folder for each GPU of the machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (None: the command line), and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m models.train", description=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a YAML file, such as configs/tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces the file's value; YAML")
    parser.add_argument("--report", action="store_true", help="print residuals and bytes, on any machine; run nothing")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load(options.config, options.overrides)
        if options.report:
            print(budget.report(config))
            return 0
        limit_pinned_memory()
        join(config.distributed)
        import_te(config.model)
        return train(config)
    except UserError as error:
        print(f"{options.config} cannot run:\n{error}", file=sys.stderr)
        return 2


def join(distributed: Distributed) -> None:
    """Join the other processes, if the config or the launcher (Slurm, Open MPI) says that there are any.

    From then on JAX ends all processes once one is lost for 100 seconds, and its preemption service takes SIGTERM.
    """
    launched = any(int(os.environ.get(name, 1)) > 1 for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    _, processes, number = given = astuple(distributed)
    if not launched and None in given and any(value is not None for value in given):
        raise ConfigError(f"distributed = {distributed}: give all three, or none and a launcher: Slurm or Open MPI")
    if None not in (processes, number) and number >= processes:
        raise ConfigError(f"distributed.process_id = {number}: must be less than num_processes = {processes}")
    if launched or distributed.coordinator:
        # After an error a process waits for the others, before it leaves: they may wait for it in a collective.
        jax.distributed.initialize(*astuple(distributed), shutdown_timeout_seconds=60)  # type: ignore[misc]


def limit_pinned_memory() -> None:
    """Let XLA pin up to three quarters of the machine's memory for its GPUs, unless the environment has a limit.

    XLA's own is 64 GiB for each GPU, too little for the state of a large model. Of more than a machine has, the kernel
    ends the process, without a message. XLA reads it when JAX finds the GPUs.
    """
    if gpus := len([*_DRIVER.glob("*")]):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(1, 3 * memory // 4 // gpus // 2**30)))


def import_te(model: Model) -> None:
    """Import TransformerEngine where the model may use it, before JAX's first computation loads another cuDNN."""
    if "te" in (model.attention, model.grouped) or (model.experts and model.grouped == "auto"):
        with contextlib.suppress(ImportError, OSError, RuntimeError, AttributeError):
            importlib.import_module("transformer_engine.jax")


def step_for(path: str, *overrides: str) -> tuple[Any, tuple[Any, ...], Any, tuple[Any, ...]]:
    """Return the training step of a config and the loss that it differentiates, each with its abstract arguments.

    For `python -m jaxoffload`, on the mesh of the config, whatever this machine has.

    Raises:
      UserError: the config cannot run.
    """
    config = load(path, overrides)
    join(config.distributed)
    config = traceable(config)
    enough = math.prod(astuple(config.mesh)) == jax.device_count()
    mesh = make_mesh(config.mesh) if enough else abstract_mesh(config.mesh)
    config, _ = budget.planned(config, mesh)
    made = program(config, mesh)
    jaxoffload.check(made.step, made.state, made.tokens, policy=config.remat)
    return made.step, (made.state, made.tokens), made.loss, (made.state.params, made.microbatch)


def train(config: Config) -> int:
    """Train, from the last checkpoint if there is one; return the exit code.

    Raises:
      UserError: the run cannot start, or continue.
    """
    out, steps, mesh = Path(config.train.out), config.train.steps, make_mesh(config.mesh)
    if config.model.attention != "xla" and jax.default_backend() != "gpu":
        raise ConfigError(f"model.attention = {config.model.attention!r}: needs NVIDIA GPUs; must be xla here")
    check_same({**flat(config), "distributed.process_id": None}, "the config")
    config, plan = budget.planned(config, mesh)  # which is that of process 0 in all
    if plan is not None:
        say(str(plan))
    source = data.open_data(config, *process_block(batch_sharding(mesh), (config.train.batch_size, 1)))
    check_same(source.fingerprint, "what is found at data.path, or data.tokenizer,")
    made = program(config, mesh, source.end)
    say(budget.summary(config, made))
    with checkpoints.open_manager(out) as manager:
        last = manager.latest_step() or 0
        if last:
            checkpoints.checked(manager, last, config, mesh, source)
        if last >= steps:
            say(f"{out} is finished, at step {last} of {steps}")
            return 0
        compiled, fits = compile_step(made)
        if not fits and (moved := budget.with_state_on_host(config)):
            say("so the optimizer's state goes to the host")
            config, made = moved, program(moved, mesh, source.end)
            say(budget.summary(config, made))
            compiled, _ = compile_step(made)
        state = checkpoints.resume(manager, config, made, source)
        say(f"continuing {out} from its checkpoint at step {last}" if last else f"metrics and checkpoints go to {out}")
        return loop(config, made, compiled, source, manager, state)


def check_same(values: Any, what: str) -> None:
    """Raise AssertionError unless all processes have the same values."""
    if jax.process_count() > 1:
        digest = hashlib.blake2b(json.dumps(values).encode(), digest_size=16).digest()
        multihost_utils.assert_equal(np.frombuffer(digest, np.uint8), f"{what} differs between the processes")


def lowered_step(made: Program, options: dict[str, Any]) -> jax.stages.Lowered:
    """Lower the training step, which takes over the memory of its state."""
    state = shardings_of(made.state)
    where: dict[str, Any] = {"in_shardings": (state, made.tokens.sharding), "out_shardings": (state, None)}
    step = jax.jit(made.step, **where, donate_argnums=0, compiler_options=options)
    return step.lower(made.state, made.tokens)


def compile_step(made: Program) -> tuple[jax.stages.Compiled, bool]:
    """Compile the training step, and print what it needs; return it, and whether a device has so much."""
    compiled = lowered_step(made, jaxoffload.compiler_options()).compile()
    if (plan := proof.memory_plan(compiled)) is None:
        return compiled, True
    outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
    device = plan.argument_size_in_bytes + outputs + plan.temp_size_in_bytes
    host = plan.host_argument_size_in_bytes + plan.host_temp_size_in_bytes
    say(f"the compiled step needs {budget.in_mib(device)} on each device")
    if host:
        once = f"; starting takes about {host / 2**30:.0f} s longer, in which it is pinned" if host > 2**30 else ""
        say(f"and {budget.in_mib(host)} of host memory for it{once}")
    if device > (limit := metrics.memory_limit(made.tokens.sharding.mesh.local_devices[0])):
        say(f"a device has {budget.in_mib(limit)}")
    check_same(device <= limit, "whether the step fits on a device")
    return compiled, device <= limit


def loop(
    config: Config,
    made: Program,
    compiled: jax.stages.Compiled,
    source: data.Source,
    manager: ocp.CheckpointManager,
    state: State,
) -> int:
    """Train from a state to the last step, or to SIGTERM, with a checkpoint there; return the exit code."""
    train, start = config.train, int(state.step)
    to_devices = functools.partial(jax.make_array_from_process_local_data, made.tokens.sharding)
    evaluate = jax.jit(made.evaluate, compiler_options=jaxoffload.compiler_options())
    due = lambda step, every: step == train.steps or step % every == 0
    log = metrics.Metrics(config, start)

    def validate(step: int) -> None:
        losses = [float(evaluate(state.params, to_devices(rows))) for rows in source.held_out]
        log.write({"step": step, "valid_loss": sum(losses) / len(losses)})

    hidden = True if jax.process_index() else None  # None: unless stderr is a terminal
    steps = tqdm(range(start + 1, train.steps + 1), initial=start, total=train.steps, disable=hidden, leave=False)
    with preemption(manager) as preempted, steps:
        if start == 0:
            validate(0)
        mark = start, time.monotonic()
        for step in steps:
            state, result = compiled(state, to_devices(next(source.batches)))
            stop = preempted(step)
            save, evaluated = stop or due(step, train.checkpoint_every), due(step, train.eval_every)
            if logged := save or step == 1 or due(step, train.log_every):
                record = step_record(config, made, step, result, mark)
                log.write(record)
                if not math.isfinite(record["loss"] + record["grad_norm"]):
                    sys.exit(f"stopped: step {step} is not finite, and not saved; try a smaller train.learning_rate")
            if evaluated:
                validate(step)
            if save:
                checkpoints.save(manager, step, state, config, source)
            if stop:
                break
            if logged or evaluated:
                mark = step, time.monotonic()
    manager.wait_until_finished()
    if step < train.steps:
        say(f"stopped by SIGTERM; step {step} of {train.steps} is saved, and the same command continues")
        return 128 + signal.SIGTERM
    say(f"finished; {config.train.out} has the checkpoint of step {step}")
    return 0


@contextlib.contextmanager
def preemption(manager: ocp.CheckpointManager) -> Iterator[Callable[[int], bool]]:
    """Yield what says after each step whether to save and stop, because of SIGTERM.

    Of several processes any can get it; JAX's preemption service has all of them stop at one step.
    """
    if jax.process_count() > 1:
        yield manager.reached_preemption
        return
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield lambda step: told.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


def step_record(
    config: Config, made: Program, step: int, result: dict[str, jax.Array], mark: tuple[int, float]
) -> metrics.Record:
    """Wait for a step, and return its record. `mark`: an earlier step, and when it ended."""
    train, mesh = config.train, made.tokens.sharding.mesh
    values = {key: float(value) for key, value in result.items()}
    rate = (step - mark[0]) * train.batch_size * train.seq_len / (time.monotonic() - mark[1])
    flops = rate * flops_per_token(config.model, train.seq_len) / mesh.size
    return {
        "step": step,
        "loss": values.pop("loss"),
        **values,
        "learning_rate": float(learning_rate(train)(step - 1)),
        "tokens_per_second": rate,
        "mfu": metrics.mfu(flops, mesh.devices.flat[0].device_kind),
        **metrics.peak_memory(mesh.local_devices[0]),
    }


if __name__ == "__main__":
    sys.exit(main())
