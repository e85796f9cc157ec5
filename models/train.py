"""The training program: python -m models.train configs/NAME.yaml section.key=value ... [--report]"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from models import signals

    signals.install()

import argparse
import dataclasses
import io
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

import jaxoffload
import models.config
from jaxoffload import proof
from models import checkpoints, data, metrics, progress, signals, tensorboard
from models.config import Config
from models.failures import machine_failure
from models.loading import parse
from models.needs import fit_to_host_pool
from models.planning import plan_of_run, planned
from models.preflight import check_names, checked_run
from models.processes import global_max, hard_exit, say
from models.profiling import Step, profiled
from models.reading import ConfigError, config_error
from models.report import compiled_memory, report, summary
from models.report_json import report_json
from models.sharding import abstract_mesh, make_mesh, process_block, regroup
from models.step import Program, State, learning_rate, program, shardings_of, traceable
from models.transformer import flops_per_token

USAGE = """\
Trains a Llama-style decoder under a config that saves, offloads or recomputes each residual.

  python -m models.train configs/tiny.yaml
  python -m models.train configs/tiny.yaml train.steps=600 'remat.residuals[act]=offload'
  python -m models.train configs/llama3-8b.yaml --report

The same command continues from the last checkpoint in train.out. models/config.py has all sections and
keys, with their meanings and defaults."""

EXIT_CODES = """\
exit codes: 0 finished; 1 the loss is not finite, or a check of train.verify fails; 2 the config cannot run;
3 a file cannot be written, because the disk or a quota is full; 4 out of memory, on a device or the host;
5 another process of the run was lost; 130 and 143 stopped by Ctrl-C and SIGTERM"""


class Diverged(Exception):
    """The loss or its gradient is not finite."""


class VerificationFailed(Exception):
    """A check of train.verify fails."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (None: the command line), and return the exit code; see EXIT_CODES."""
    print_in_any_encoding()
    parser = argparse.ArgumentParser(
        prog="python -m models.train",
        description=USAGE,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="a YAML file, such as configs/tiny.yaml")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="replaces the file's value; the value is YAML; section.key[entry]=value adds to a mapping",
    )
    parser.add_argument("--report", action="store_true", help="print residuals and bytes, on any machine; run nothing")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object, in bytes")
    options = parser.parse_intermixed_args(arguments)
    if options.json and not options.report:
        parser.error("--json is a form of --report; give both")
    config = None
    try:
        with signals.handled():
            config, problems = parse(options.config, options.overrides)
            if not options.report:
                with checked_run(config, problems) as mesh:
                    return train(config, mesh)
            check_names(config, problems)
            if problems:
                raise ConfigError(problems)
            print(report_json(config) if options.json else report(config))
            return 0
    except (ConfigError, models.config.ConfigError) as error:
        print(f"{options.config} cannot run:\n{error}", file=sys.stderr)
        return 2
    except (Diverged, VerificationFailed) as error:
        print(error, file=sys.stderr)
        return 1
    except signals.Stopped as stopped:
        return 128 + stopped.number
    except Exception as error:
        if (failure := machine_failure(error, Path(config.train.out) if config else None)) is None:
            raise
        print(failure.line, file=sys.stderr)
        return failure.status


def print_in_any_encoding() -> None:
    """Print characters that the terminal's encoding lacks as escapes: with PYTHONIOENCODING=ascii a dot as \\xb7."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def train(config: Config, mesh: Mesh) -> int:
    """Train, from the last checkpoint if there is one; return the exit code.

    Raises:
      ConfigError: the run cannot start, or continue.
      Diverged, VerificationFailed: the run must not continue.
    """
    with checkpoints.open_manager(config.train.out) as manager:
        start = manager.latest_step() or 0
        if start >= config.train.steps:
            steps = f"at step {start} of {config.train.steps}"
            say(f"{config.train.out} is finished, {steps}; train.steps={2 * start} would continue it")
            return 0
        return train_from(manager, config, mesh)


def train_from(manager: ocp.CheckpointManager, config: Config, mesh: Mesh) -> int:
    """As `train`, from the last checkpoint."""
    out, start = Path(config.train.out), manager.latest_step() or 0
    config = fit_to_host_pool(plan_of_run(config, mesh, manager.latest_step() is not None), mesh)
    made = program(config, mesh)
    say(summary(config, made))
    source = open_source(config, made)
    made = program(config, mesh, source.end)
    compiled = compile_step(made)
    say(compiled_memory(compiled))
    kind = mesh.devices.flat[0].device_kind
    if jax.default_backend() == "gpu" and metrics.mfu(0.0, kind) is None:
        say(f"no MFU is shown: the peak FLOP/s of a {kind} is not known (models/metrics.py)")
    if config.train.verify and not start:
        verify_claims(made, mesh)
    with (
        profiled(config, made, compiled, start) as step,
        tensorboard.events(config, start) as events,
    ):
        state = checkpoints.resume(manager, config, made, source)
        if start:
            say(f"continuing {out} from its checkpoint at step {start}")
        state = regroup(state, made.state)
        journal = metrics.Journal(out / "metrics.jsonl", config, source.unigram, events)
        journal.begin(start)
        return loop(Run(config, made, mesh, step, source, manager, journal), state, start)


def verify_claims(made: Program, mesh: Mesh) -> None:
    """Check the loss and the step, on random arguments, and print each check.

    Raises:
      VerificationFailed: a check fails, in this process or another.
    """
    failed = []
    for what, f, args in (
        ("loss", made.loss, (made.state.params, made.microbatch)),
        ("step", made.step, (made.state, made.tokens)),
    ):
        for check in proof.checks(f, *args):
            say(f"{what}: {check}")
            failed += [f"{what}: {check}"] if check.verdict == "fails" else []
    if global_max(mesh, len(failed)):
        raise VerificationFailed("\n".join(("train.verify = True: nothing is trained, because a check fails", *failed)))


def step_for(path: str, *overrides: str) -> tuple[Any, tuple[Any, ...], Any, tuple[Any, ...]]:
    """Return the training step of a config and the loss that it differentiates, each with its abstract arguments.

    For `python -m jaxoffload`, on the mesh of the config, whatever this machine has.

    Raises:
      ConfigError: the config cannot run.
    """
    config, problems = parse(path, overrides)
    check_names(config, problems)
    if problems:
        raise ConfigError(problems)
    config = traceable(config)
    enough = math.prod(dataclasses.asdict(config.mesh).values()) == jax.device_count()
    mesh = make_mesh(config.mesh) if enough else abstract_mesh(config.mesh)
    config, _ = planned(config, mesh)
    made = program(fit_to_host_pool(config, mesh), mesh)
    return made.step, (made.state, made.tokens), made.loss, (made.state.params, made.microbatch)


def open_source(config: Config, made: Program) -> data.Source:
    """Open the data of a config, and print its baselines.

    Raises:
      ConfigError: the data cannot be used.
    """
    source = data.open_data(config, *process_block(made.tokens.sharding, made.tokens.shape))
    say(f"baselines: ln(vocab) {math.log(config.model.vocab_size):.3f}, unigram {source.unigram:.3f}")
    return source


def compile_step(made: Program) -> jax.stages.Compiled:
    """Compile the training step, which takes over the memory of its state.

    Raises:
      ConfigError: XLA has the stages of this mesh wait for each other for ever.
    """
    state = shardings_of(made.state)
    step = jax.jit(
        made.step,
        in_shardings=(state, made.tokens.sharding),
        out_shardings=(state, None),
        donate_argnums=0,
        compiler_options=jaxoffload.compiler_options(),
    )
    try:
        return step.lower(made.state, made.tokens).compile()
    except NotImplementedError as why:
        raise config_error("mesh", dict(made.tokens.sharding.mesh.shape), f"cannot run: {why}") from why


class Run(NamedTuple):
    """What the training loop uses."""

    config: Config
    made: Program
    mesh: Mesh
    step: Step
    source: data.Source
    manager: ocp.CheckpointManager
    journal: metrics.Journal


def loop(run: Run, state: State, start: int) -> int:
    """Train from step `start` to the end or to a signal, with a checkpoint there; return the exit code.

    Raises:
      Diverged: the loss or its gradient is not finite; raised before that state is saved.
    """
    train = run.config.train
    evaluate = jax.jit(run.made.evaluate, compiler_options=jaxoffload.compiler_options())
    due = lambda step, every: step == train.steps or step % every == 0
    with signals.noted() as received, progress.bar(start, train.steps) as advance:
        if start == 0:
            validate(run, evaluate, state, 0)
        stop_in_all, mark = global_max(run.mesh, 0), (start, time.monotonic())
        for step in range(start + 1, train.steps + 1):
            state, result = run.step(state, global_batch(next(run.source.batches), run.made.tokens.sharding))
            # Read one step late: then the host does not wait for the step that it has just started.
            stop, stop_in_all = int(stop_in_all), global_max(run.mesh, received())
            log = due(step, train.log_every) or step == 1
            save = due(step, train.checkpoint_every) or bool(stop)
            if log:
                run.manager.check_for_errors()
            if log or save:
                check_finite(run, step_record(run, step, result, mark), log)
            if evaluated := due(step, train.eval_every):
                validate(run, evaluate, state, step)
            if save:
                state = regroup(state, run.made.saved)
                checkpoints.save(run.manager, step, state, run.config, run.source)
                state = regroup(state, run.made.state)
                run.journal.draw()
            if stop and step < train.steps:
                run.manager.wait_until_finished()
                saved = f"step {step} of {train.steps} is saved, and the same command continues"
                say(f"stopped by {signal.Signals(stop).name}; {saved}")
                return 128 + stop
            if log or evaluated or save:
                mark = (step, time.monotonic())
            advance()
    run.manager.wait_until_finished()
    say(f"finished; the loss curve is {run.journal.path.with_name('loss.png')}")
    return 0


def validate(run: Run, evaluate: Callable[[Any, jax.Array], jax.Array], state: State, step: int) -> None:
    """Write the mean loss over the held-out batches to the journal."""
    losses = [evaluate(state.params, global_batch(rows, run.made.tokens.sharding)) for rows in run.source.held_out]
    run.journal.write({"step": step, "valid_loss": sum(map(float, losses)) / len(losses)})


def check_finite(run: Run, record: metrics.Record, log: bool) -> None:
    """Write the record to the journal if `log` says so, or if it is not finite.

    Raises:
      Diverged: the loss or its gradient is not finite.
    """
    finite = math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
    if log or not finite:
        run.journal.write(record)
    if not finite:
        raise Diverged(divergence_message(run, record))


def divergence_message(run: Run, record: metrics.Record) -> str:
    """Return why the run stopped, and what can help."""
    saved = run.manager.latest_step()
    again = "nothing is saved" if saved is None else f"the same command would continue from step {saved}"
    return (
        f"stopped: at step {record['step']} the loss is {record['loss']} and the norm of its gradient "
        f"{record['grad_norm']}; {again}. A smaller train.learning_rate, a smaller train.clip_norm or more "
        "train.warmup_steps can help"
    )


def step_record(run: Run, step: int, result: dict[str, jax.Array], mark: tuple[int, float]) -> metrics.Record:
    """Wait for a step, and return its record. `mark`: an earlier step, and when it ended."""
    train, device = run.config.train, run.mesh.devices.flat[0]
    loss, grad_norm = float(result["loss"]), float(result["grad_norm"])
    rate = (step - mark[0]) * train.batch_size * train.seq_len / (time.monotonic() - mark[1])
    flops = rate * flops_per_token(run.config.model, train.seq_len) / run.mesh.size
    return {
        "step": step,
        "loss": loss,
        "grad_norm": grad_norm,
        **{key: float(result[key]) for key in ("aux_loss", "z_loss", "expert_load", "dropped") if key in result},
        "learning_rate": float(learning_rate(train)(step - 1)),
        "tokens_per_second": rate,
        "mfu": metrics.mfu(flops, device.device_kind),
        "device_peak_bytes": metrics.device_peak_bytes(run.mesh.local_devices[0]),
        "host_peak_bytes": metrics.host_peak_bytes(),
    }


def global_batch(rows: np.ndarray, sharding: jax.sharding.NamedSharding) -> jax.Array:
    """Return the global batch, of which `rows` are this process's."""
    return jax.make_array_from_process_local_data(sharding, rows)


if __name__ == "__main__":
    with hard_exit():
        sys.exit(main())
