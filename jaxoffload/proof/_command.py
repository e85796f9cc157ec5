"""The command line: python -m jaxoffload report | plan | verify | profile | machine MODULE:FUNCTION [ARGUMENT ...]"""

import argparse
import contextlib
import errno
import importlib
import inspect
import io
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .. import proof
from .._engine.layers.loops import DifferentiatedTwice
from .._errors import Problem, UserError
from .._text import nearest
from ._program.results import run_of
from ._residuals.residuals import residuals
from ._residuals.table import Residuals
from ._verify.peaks import measured

USAGE = """\
  python -m jaxoffload report models.train:step_for configs/llama3-8b.yaml
  python -m jaxoffload verify models.train:step_for configs/tiny.yaml train.batch_size=2
  python -m jaxoffload machine --out h200.json
  python -m jaxoffload report models.train:step_for configs/llama3-8b.yaml --machine h200.json
  python -m jaxoffload plan models.train:step_for configs/llama3-8b.yaml --budget 70GiB --machine h200.json

report prints where the backward pass finds each residual, and why. It allocates nothing and runs on any machine. For
a machine that was measured, here or elsewhere, it also says whether each residual's copies fit behind its layer.
plan chooses the policy whose predicted step is the fastest of those that fit in a budget of device memory. It
allocates nothing and runs on any machine.
verify runs the function here and checks what is claimed of it.
profile runs the step on a GPU and prints how long each residual's copies take, and how much of that is exposed.
machine measures the GPUs of this machine, or prints what it measured before; it takes no function.

MODULE:FUNCTION is called with the ARGUMENTs, which are strings. It returns (f, args), a loss or a training step and a
tuple of its arguments, arrays or jax.ShapeDtypeStructs; or (step, args, loss, loss_args), where the step differentiates
the loss."""

EXIT_CODES = "exit codes: 0 all that was checked holds; 1 a claim fails; 2 it cannot run, or the function raised"


class CannotRun(UserError):
    """The command cannot run; the message says what is allowed."""

    def __init__(self, why: str):
        super().__init__([Problem("jaxoffload", why)])


class Made(NamedTuple):
    """The functions and arguments that MODULE:FUNCTION returned; `loss` is `f` where it returned only one function."""

    f: Any
    args: tuple[Any, ...]
    loss: Any
    loss_args: tuple[Any, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; see EXIT_CODES."""
    options = parse(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for a terminal that cannot show "·"
    try:
        for name in ("html", "out"):  # before anything runs
            if path := getattr(options, name):
                can_write(f"--{name}", path)
        if options.png:
            can_draw(options.png)
        with progress(options.command):
            return options.run(options)
    except Exception as why:
        if isinstance(why, (CannotRun, MemoryError, NotImplementedError)) and why.args:
            print(f"python -m jaxoffload: {why}", file=sys.stderr)
        elif isinstance(why, UserError):  # as of a config or a policy
            print(f"{options.function} cannot run:\n{why}", file=sys.stderr)
        else:  # the function's own fault
            traceback.print_exc()
        return 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxoffload",
        description=USAGE,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        required=True, dest="command", metavar="report | plan | verify | profile | machine"
    )
    for command in (report, plan, verify, profile, machine):
        of_command = commands.add_parser(command.__name__, help=command.__doc__, description=command.__doc__)
        of_command.set_defaults(run=command, html=None, png=None, out=None)
        of_command.add_argument("--json", action="store_true", help="print one JSON object instead")
        if command is not machine:
            of_command.add_argument("function", metavar="MODULE:FUNCTION")
            of_command.add_argument("arguments", nargs="*", default=[], metavar="ARGUMENT")
            of_command.add_argument("--html", type=Path, metavar="FILE", help="also write a self-contained page")
            of_command.add_argument("--png", type=Path, metavar="FOLDER", help="also write its pictures")
        if command is verify:
            text = "fail where TransformerEngine has the host read group sizes, which is only listed otherwise"
            of_command.add_argument("--strict", action="store_true", help=text)
            text = "the loss returns a pair: the scalar and other results"
            of_command.add_argument("--has-aux", action="store_true", help=text)
            # For the fresh processes that it starts.
            of_command.add_argument("--peak", choices=("ours", "reference"), help=argparse.SUPPRESS)
            of_command.add_argument("--layers", type=int, help=argparse.SUPPRESS)
        if command is plan:
            sizes = {"budget": "bytes per device, such as 70GiB; by default what JAX may use of this GPU, less 5 %%"}
            sizes["host-budget"] = "bytes of pinned host memory per device; by default what the pinned pool holds"
            for name, text in sizes.items():
                of_command.add_argument(f"--{name}", metavar="BYTES", help=text)
            of_command.add_argument("--compile", action="store_true", help="compile, and correct by XLA's own plan")
        if command in (report, plan):
            text = "what `machine --out` wrote; by default what was measured here, if anything"
            of_command.add_argument("--machine", type=Path, metavar="FILE", help=text)
        if command is machine:
            of_command.add_argument("--again", action="store_true", help="measure, whatever was measured before")
            of_command.add_argument("--out", type=Path, metavar="FILE", help="also write it for --machine, as JSON")
    options, rest = parser.parse_known_args(arguments)  # an ARGUMENT may stand behind an option
    if wrong := [text for text in rest if text.startswith("-") or options.command == "machine"]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    options.arguments = [*getattr(options, "arguments", []), *rest]
    return options


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Print how long a command has run, once that is more than 2 seconds."""
    done, begin = threading.Event(), time.monotonic()

    def tell() -> None:
        seconds, every, end = (2, 1, "\r") if sys.stderr.isatty() else (2, 30, "\n")
        while not done.wait(seconds):
            print(f"{what}: {time.monotonic() - begin:.0f} s", end=end, file=sys.stderr, flush=True)
            seconds = every

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def made_by(where: str, arguments: Sequence[str]) -> Made:
    """Call MODULE:FUNCTION.

    Raises:
      CannotRun: there is no such function, or it returns something else.
    """
    module_name, colon, name = where.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise CannotRun(f"{where!r} is not MODULE:FUNCTION, such as models.train:step_for")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as why:
        if not f"{module_name}.".startswith(f"{why.name}."):  # something that it imports is missing
            raise
        raise CannotRun(f"{where}: {why}; the module must be importable from this folder") from why
    if (make := getattr(module, name, None)) is None:
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise CannotRun(f"{where}: {module_name} has no function {name!r}{nearest(name, defined)}")
    if not callable(make):
        raise CannotRun(f"{where} is not a function: {make!r:.60}")
    try:
        inspect.signature(make).bind(*arguments)
    except (TypeError, ValueError) as why:
        raise CannotRun(f"{where} cannot be called with {len(arguments)} argument(s): {why}") from why
    made = make(*arguments)
    is_right = isinstance(made, tuple) and len(made) in (2, 4)
    if not is_right or not all(callable(f) and isinstance(args, tuple) for f, args in itertools.batched(made, 2)):
        raise CannotRun(f"{where} must return (f, args) or (step, args, loss, loss_args), where the args are tuples")
    for f, args in itertools.batched(made, 2):
        check_arguments(where, f, args)
    return Made(*made[:2], *made[-2:])


def check_arguments(where: str, f: Any, args: tuple[Any, ...]) -> None:
    """Check that a function takes these arguments.

    Raises:
      CannotRun: it does not, or a leaf is not an array.
    """
    name = getattr(f, "__name__", repr(f))
    with contextlib.suppress(ValueError):  # it has no signature
        try:
            inspect.signature(f).bind(*args)
        except TypeError as why:
            raise CannotRun(f"{where} returns {name} with {len(args)} argument(s): {why}") from why
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        try:
            jax.typeof(leaf)
        except TypeError as why:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                at = f"args{jax.tree_util.keystr(path)}"
                raise CannotRun(
                    f"{where} returns {name} with {at} = {leaf!r:.60}; allowed are arrays and jax.ShapeDtypeStructs"
                ) from why


def can_write(option: str, file: Path) -> None:
    """Check that a file can be written, and leave everything as it is.

    Raises:
      CannotRun: it cannot.
    """
    if not file.parent.is_dir():
        raise CannotRun(f"{option} {file}: there is no folder {file.parent}")
    was_there = file.exists()
    try:
        file.open("a").close()
        if not was_there:
            file.unlink()
    except OSError as why:
        raise CannotRun(f"{option} {file}: {why.strerror}; must be a file that can be written") from why


def can_draw(folder: Path) -> None:
    """Make the folder for pictures.

    Raises:
      CannotRun: it cannot be made, or matplotlib is missing.
    """
    try:
        folder.mkdir(exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        importlib.import_module("matplotlib.figure")
    except OSError as why:
        raise CannotRun(f"--png {folder}: {why.strerror}; must be a folder, or a new one in one that exists") from why
    except ImportError as why:
        raise CannotRun(f"--png {folder}: matplotlib cannot be imported ({why}): pip install matplotlib") from why


def table_of(made: Made) -> Residuals | None:
    """Return the residuals; None for a step that came without its loss."""
    try:
        return residuals(made.loss, *made.loss_args)
    except DifferentiatedTwice:
        return None


def report(options: argparse.Namespace) -> int:
    """Print where the backward pass finds each residual, and why, without allocating anything."""
    made = made_by(options.function, options.arguments)
    if (table := table_of(made)) is None:
        raise CannotRun(
            "this is a step, whose residuals are internal to it; return its loss too, and the loss's arguments, of one "
            "microbatch if there are several"
        )
    known = read_machine(options.machine) if options.machine else proof.known_machine()
    fits = proof.fits(made.f, *made.args, machine=known) if known else None
    if options.json:
        print(json.dumps(json.loads(table.to_json()) | ({"fits": json.loads(fits.to_json())} if fits else {})))
    else:
        print(table, *([fits] if fits else []), sep="\n")
    return paged(options, made, 0)


def plan(options: argparse.Namespace) -> int:
    """Choose the policy whose predicted step is the fastest of those that fit, without allocating anything."""
    made = made_by(options.function, options.arguments)
    known = read_machine(options.machine) if options.machine else None
    sizes = {"budget": options.budget, "host_budget": options.host_budget}
    found = proof.plan(made.f, *made.args, machine=known, compile=options.compile, **sizes)
    print(found.to_json() if options.json else found)
    if options.png:
        (options.png / "plan.png").write_bytes(found.png())
        print(f"{options.png}: plan.png", file=sys.stderr)
    if options.html:
        write_page(options, plan=found)
    return 0


def read_machine(path: Path) -> proof.Machine:
    try:
        return proof.Machine.from_json(path.read_text())
    except (OSError, ValueError) as why:
        raise CannotRun(f"--machine {path}: {why}") from why


def verify(options: argparse.Namespace) -> int:
    """Run the function here and check what is claimed of it."""
    if options.peak:
        made = made_by(options.function, options.arguments)
        print(json.dumps(measured(made.loss, made.loss_args, options.peak, options.layers, options.has_aux)))
        return 0
    # Before this process touches a GPU.
    aux = ["--has-aux"] * options.has_aux
    peaks = proof.peaks_of(["jaxoffload", "verify", options.function, *options.arguments, *aux])
    made = made_by(options.function, options.arguments)
    is_loss = made.f is not made.loss or run_of(made.loss, made.loss_args, options.has_aux)[1]
    functions = {"loss" if is_loss else "step": (made.loss, made.loss_args)}
    if made.f is not made.loss:
        functions["step"] = (made.f, made.args)
    checks: dict[str, list[proof.Check]] = {what: [] for what in functions}
    for what, (f, args) in functions.items():
        has_aux = options.has_aux and f is made.loss
        for check in proof.checks(f, *args, has_aux=has_aux, strict=options.strict, peaks=peaks):
            checks[what].append(check)
            print(f"{what}: {check}", file=sys.stderr if options.json else sys.stdout, flush=True)
    verifications = {what: proof.Verification(tuple(each)) for what, each in checks.items()}
    if options.json:
        print(json.dumps({what: json.loads(each.to_json()) for what, each in verifications.items()}))
    shown: dict[str, Any] = {"checks": [(what, check) for what, each in checks.items() for check in each]}
    if (options.html or options.png) and jax.default_backend() == "gpu":
        shown["profile"] = proof.profile(made.f, *made.args)
    return paged(options, made, int(not all(each.ok for each in verifications.values())), **shown)


def profile(options: argparse.Namespace) -> int:
    """Run the step on a GPU and print how long each residual's copies take, and how much of that is exposed."""
    made = made_by(options.function, options.arguments)
    profiled = proof.profile(made.f, *made.args)
    print(profiled.to_json() if options.json else profiled)
    return paged(options, made, 0, profile=profiled)


def machine(options: argparse.Namespace) -> int:
    """Measure the GPUs of this machine, or print what was measured before."""
    measured_here = proof.machine(options.again)
    print(measured_here.to_json() if options.json else measured_here)
    if options.out:
        options.out.write_text(measured_here.to_json() + "\n")
    return 0


def paged(options: argparse.Namespace, made: Made, code: int, **shown: Any) -> int:
    """Write the page and the pictures that were asked for, and return the exit code."""
    if options.html or options.png:
        shown = {"table": table_of(made)} | shown
    if options.html:
        write_page(options, **shown)
    if options.png:
        drawn = proof.pictures(shown["table"], shown.get("profile"))
        for name, png in drawn.items():
            (options.png / name).write_bytes(png)
        print(f"{options.png}: {', '.join(drawn) or 'nothing to draw'}", file=sys.stderr)
    return code


def write_page(options: argparse.Namespace, **shown: Any) -> None:
    title = " ".join((options.function, *options.arguments))
    try:
        options.html.write_text(proof.page(title, proof.about(), **shown), encoding="utf-8")
    except OSError as why:
        raise CannotRun(f"--html {options.html}: {why.strerror}") from why
