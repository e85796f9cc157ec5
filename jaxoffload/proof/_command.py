"""The command line: python -m jaxoffload COMMAND, of which most take MODULE:FUNCTION [ARGUMENT ...]"""

import argparse
import importlib
import importlib.metadata
import io
import itertools
import os
import platform
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from .. import proof
from .._engine.host.limit import host_pool_bytes
from .._errors import UserError
from .._text import nearest, readable
from ._check import FAILS
from ._predict import numa
from ._program.memory import device_bytes
from ._program.results import run_of
from ._residuals.residuals import residuals
from ._verify.verify import checks

USAGE = """\
  python -m jaxoffload verify models.train:step_for configs/tiny.yaml train.batch_size=2
  python -m jaxoffload machine > h200.json
  python -m jaxoffload report models.train:step_for configs/llama3-8b.yaml --machine h200.json
  python -m jaxoffload plan models.train:step_for configs/llama3-8b.yaml --budget 70GiB --machine h200.json

report and plan allocate nothing and run on any machine; the others run here. For a machine that was measured, report
also predicts the step, and says whether each residual's copies fit behind its layer.

MODULE:FUNCTION is called with the ARGUMENTs, which are strings. It returns (f, args), a loss or a training step and a
tuple of its arguments, arrays or jax.ShapeDtypeStructs; or (step, args, loss, loss_args), where the step differentiates
the loss.

exit codes: 0 all that was checked holds; 1 a claim fails; 2 it cannot run, or the function raised"""


Made = tuple[Any, tuple[Any, ...], Any, tuple[Any, ...]]  # f, args, loss, loss_args


class CannotRun(Exception):
    """The command cannot run; the message says what is allowed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    options = parse(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for a terminal that cannot show "·"
    try:
        return options.run(options)
    except Exception as why:
        if isinstance(why, (CannotRun, UserError, MemoryError, NotImplementedError)) and why.args:
            print(f"python -m jaxoffload: {why}", file=sys.stderr)
        else:  # the function's own fault
            traceback.print_exc()
        return 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m jaxoffload", description=USAGE, formatter_class=raw)
    of_functions, alone = (report, plan, verify, profile), (machine, about)
    names = " | ".join(command.__name__ for command in (*of_functions, *alone))
    commands = parser.add_subparsers(required=True, dest="command", metavar=names)
    for command in (*of_functions, *alone):
        one = commands.add_parser(command.__name__, help=command.__doc__, description=command.__doc__)
        one.set_defaults(run=command)
        if command in of_functions:
            one.add_argument("function", metavar="MODULE:FUNCTION")
            one.add_argument("arguments", nargs="*", default=[], metavar="ARGUMENT")
        if command is plan:
            text = "bytes per device, such as 70GiB; by default what JAX may use of this GPU, less 5 %%"
            one.add_argument("--budget", metavar="BYTES", help=text)
            text = "bytes of pinned host memory per device; by default what the pinned pool holds"
            one.add_argument("--host-budget", metavar="BYTES", help=text)
            text = "guess memory from shapes, where XLA could be asked"
            one.add_argument("--no-compile", dest="compile", action="store_false", help=text)
        if command in (report, plan):
            text = "what `machine` printed"
            one.add_argument("--machine", type=_machine, metavar="FILE", help=text, required=command is plan)
    options, rest = parser.parse_known_args(arguments)  # an ARGUMENT may stand behind an option
    if wrong := [text for text in rest if text.startswith("-") or options.run in alone]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    options.arguments = [*getattr(options, "arguments", []), *rest]
    return options


def _machine(path: str) -> proof.Machine:
    try:
        return proof.Machine.from_json(Path(path).read_text())
    except (OSError, ValueError) as why:
        raise argparse.ArgumentTypeError(f"{path}: {why}") from why


def made_by(options: argparse.Namespace) -> Made:
    """Call MODULE:FUNCTION; the loss that it returns is `f` where it returns only one function.

    Raises:
      CannotRun: there is no such function, or it returns something else.
    """
    where = options.function
    module_name, colon, name = where.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise CannotRun(f"{where!r} is not MODULE:FUNCTION, such as models.train:step_for")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as why:
        if not f"{module_name}.".startswith(f"{why.name}."):  # something that it imports is missing
            raise
        raise CannotRun(f"{where}: {why}; the module must be importable from this folder") from why
    if not callable(make := getattr(module, name, None)):
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise CannotRun(f"{where}: {module_name} has no function {name!r}{nearest(name, defined)}")
    made = make(*options.arguments)
    is_right = isinstance(made, tuple) and len(made) in (2, 4)
    if not is_right or not all(callable(f) and isinstance(args, tuple) for f, args in itertools.batched(made, 2)):
        raise CannotRun(f"{where} must return (f, args) or (step, args, loss, loss_args), where the args are tuples")
    return (*made[:2], *made[-2:])


def report(options: argparse.Namespace) -> int:
    """Print where the backward pass finds each residual, and why, without allocating anything."""
    f, args, loss, loss_args = made_by(options)
    print(residuals(loss, *loss_args))
    if options.machine:
        print(proof.predict(f, *args, machine=options.machine))
    return 0


def plan(options: argparse.Namespace) -> int:
    """Choose the policy whose predicted step is the fastest of those that fit, without allocating anything."""
    f, args, *_ = made_by(options)
    sizes = {"budget": options.budget, "host_budget": options.host_budget}
    print(proof.plan(f, *args, machine=options.machine, compile=options.compile, **sizes))
    return 0


def verify(options: argparse.Namespace) -> int:
    """Run the function here and check what is claimed of it."""
    step, step_args, loss, loss_args = made_by(options)
    is_loss = step is not loss or run_of(loss, loss_args)[1]
    functions = {"loss" if is_loss else "step": (loss, loss_args)}
    functions |= {"step": (step, step_args)} if step is not loss else {}
    failed = False
    for what, (f, args) in functions.items():
        for check in checks(f, *args):
            print(f"{what}: {check}", flush=True)
            failed |= check.verdict == FAILS
    return int(failed)


def profile(options: argparse.Namespace) -> int:
    """Run the step on a GPU and print how long each residual's copies take, and how much of that is exposed."""
    f, args, *_ = made_by(options)
    print(proof.profile(f, *args))
    return 0


def machine(options: argparse.Namespace) -> int:
    """Measure the GPUs of this machine, and print what --machine takes, and to stderr where pinned memory lies."""
    print(proof.machine().to_json())
    print(numa.summary(numa.places(jax.local_devices())), file=sys.stderr)
    return 0


def about(options: argparse.Namespace) -> int:
    """Print what to paste into an issue: versions, devices, memory, and the variables that XLA and JAX read."""
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print(", ".join(f"{name} {version}" for name in PACKAGES if (version := version_of(name))))
    print(f"host memory: {readable(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}")
    for name in sorted(name for name in os.environ if name.startswith(("XLA_", "JAX_", "CUDA_"))):
        print(f"{name}={os.environ[name]}")
    try:
        of_kind = Counter(device.device_kind for device in jax.devices())
        print("devices:", ", ".join(f"{count} {kind}" for kind, count in of_kind.items()))
        for name, size in (("device memory that JAX may use", device_bytes()), ("pinned host pool", host_pool_bytes())):
            print(f"{name}: {readable(size) if size else 'not known'} per device")
    except Exception as why:  # JAX finds no device, say, or a variable is wrong: that is what to paste
        print(f"devices: {type(why).__name__}: {why}")
    return 0


PACKAGES = (
    *("jaxoffload", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "flax", "optax", "equinox"),
    "transformer-engine-jax",
)


def version_of(name: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
