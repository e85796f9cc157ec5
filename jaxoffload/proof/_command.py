"""The command line: python -m jaxoffload report | plan | verify | profile | machine MODULE:FUNCTION [ARGUMENT ...]"""

import argparse
import contextlib
import importlib
import inspect
import io
import itertools
import json
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
        for path in filter(None, (options.html, options.out)):
            with written(path):  # before anything runs
                path.open("a").close()
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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m jaxoffload", description=USAGE, epilog=EXIT_CODES, formatter_class=raw
    )
    commands = parser.add_subparsers(
        required=True, dest="command", metavar="report | plan | verify | profile | machine"
    )
    for command in (report, plan, verify, profile, machine):
        one = commands.add_parser(command.__name__, help=command.__doc__, description=command.__doc__)
        one.set_defaults(run=command, html=None, out=None)
        one.add_argument("--json", action="store_true", help="print one JSON object instead")
        if command is not machine:
            one.add_argument("function", metavar="MODULE:FUNCTION")
            one.add_argument("arguments", nargs="*", default=[], metavar="ARGUMENT")
        if command in (report, verify, profile):
            one.add_argument("--html", type=Path, metavar="FILE", help="also write a self-contained page")
        if command is plan:
            text = "bytes per device, such as 70GiB; by default what JAX may use of this GPU, less 5 %%"
            one.add_argument("--budget", metavar="BYTES", help=text)
            text = "bytes of pinned host memory per device; by default what the pinned pool holds"
            one.add_argument("--host-budget", metavar="BYTES", help=text)
            one.add_argument("--compile", action=argparse.BooleanOptionalAction, help="whether XLA is asked for memory")
        if command in (report, plan):
            text = "what `machine --out` wrote; by default what was measured here, if anything"
            one.add_argument("--machine", type=Path, metavar="FILE", help=text)
        if command is machine:
            one.add_argument("--again", action="store_true", help="measure, whatever was measured before")
            one.add_argument("--out", type=Path, metavar="FILE", help="also write it for --machine, as JSON")
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


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Raise CannotRun where a file cannot be written."""
    try:
        yield
    except OSError as why:
        raise CannotRun(f"{path}: {why.strerror}; must be a file that can be written") from why


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
    if not callable(make := getattr(module, name, None)):
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise CannotRun(f"{where}: {module_name} has no function {name!r}{nearest(name, defined)}")
    check_arguments(where, make, arguments)
    made = make(*arguments)
    is_right = isinstance(made, tuple) and len(made) in (2, 4)
    if not is_right or not all(callable(f) and isinstance(args, tuple) for f, args in itertools.batched(made, 2)):
        raise CannotRun(f"{where} must return (f, args) or (step, args, loss, loss_args), where the args are tuples")
    for f, args in itertools.batched(made, 2):
        check_arguments(f"{where} returns {getattr(f, '__name__', repr(f))}, which", f, args)
        for path, leaf in jax.tree_util.tree_leaves_with_path(args):
            if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
                at = f"args{jax.tree_util.keystr(path)}"
                raise CannotRun(f"{where} returns {at} = {leaf!r:.60}; allowed are arrays and jax.ShapeDtypeStructs")
    return Made(*made[:2], *made[-2:])


def check_arguments(what: str, f: Any, args: Sequence[Any]) -> None:
    """Raise CannotRun if a function does not take these arguments."""
    with contextlib.suppress(ValueError):  # it has no signature
        try:
            inspect.signature(f).bind(*args)
        except TypeError as why:
            raise CannotRun(f"{what} cannot be called with {len(args)} argument(s): {why}") from why


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
    step = proof.predict(made.f, *made.args, machine=known) if known else None
    if options.json:
        print(json.dumps(json.loads(table.to_json()) | ({"step": json.loads(step.to_json())} if step else {})))
    else:
        print(table, *([step] if step else []), sep="\n")
    write_page(options, made)
    return 0


def plan(options: argparse.Namespace) -> int:
    """Choose the policy whose predicted step is the fastest of those that fit, without allocating anything."""
    made = made_by(options.function, options.arguments)
    known = read_machine(options.machine) if options.machine else None
    sizes = {"budget": options.budget, "host_budget": options.host_budget}
    found = proof.plan(made.f, *made.args, machine=known, compile=options.compile, **sizes)
    print(found.to_json() if options.json else found)
    return 0


def read_machine(path: Path) -> proof.Machine:
    try:
        return proof.Machine.from_json(path.read_text())
    except (OSError, ValueError) as why:
        raise CannotRun(f"--machine {path}: {why}") from why


def verify(options: argparse.Namespace) -> int:
    """Run the function here and check what is claimed of it."""
    made = made_by(options.function, options.arguments)
    is_loss = made.f is not made.loss or run_of(made.loss, made.loss_args)[1]
    functions = {"loss" if is_loss else "step": (made.loss, made.loss_args)}
    if made.f is not made.loss:
        functions["step"] = (made.f, made.args)
    checks: list[tuple[str, proof.Check]] = []
    for what, (f, args) in functions.items():
        for check in proof.checks(f, *args):
            checks.append((what, check))
            print(f"{what}: {check}", file=sys.stderr if options.json else sys.stdout, flush=True)
    found = {what: proof.Verification(tuple(check for of, check in checks if of == what)) for what in functions}
    if options.json:
        print(json.dumps({what: json.loads(each.to_json()) for what, each in found.items()}))
    runs = options.html and jax.default_backend() == "gpu"
    write_page(options, made, checks=checks, profile=proof.profile(made.f, *made.args) if runs else None)
    return int(not all(each.ok for each in found.values()))


def profile(options: argparse.Namespace) -> int:
    """Run the step on a GPU and print how long each residual's copies take, and how much of that is exposed."""
    made = made_by(options.function, options.arguments)
    profiled = proof.profile(made.f, *made.args)
    print(profiled.to_json() if options.json else profiled)
    write_page(options, made, profile=profiled)
    return 0


def machine(options: argparse.Namespace) -> int:
    """Measure the GPUs of this machine, or print what was measured before."""
    measured_here = proof.machine(options.again)
    print(measured_here.to_json() if options.json else measured_here)
    if options.out:
        options.out.write_text(measured_here.to_json() + "\n")
    return 0


def write_page(options: argparse.Namespace, made: Made, **shown: Any) -> None:
    """Write the page, if it was asked for."""
    if options.html:
        title = " ".join((options.function, *options.arguments))
        text = proof.page(title, proof.about(), table_of(made), **shown)
        with written(options.html):
            options.html.write_text(text, encoding="utf-8")
