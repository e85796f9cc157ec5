"""The command line: python -m jaxoffload report | verify | profile MODULE:FUNCTION [ARGUMENT ...]"""

import argparse
import difflib
import importlib
import importlib.metadata
import inspect
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from . import proof
from ._residuals import Residuals, residuals

USAGE = """\
  python -m jaxoffload report models.train:step_for configs/llama3-8b.yaml
  python -m jaxoffload verify models.train:step_for configs/tiny.yaml train.batch_size=2

report prints where the backward pass finds each residual, and why; nothing is allocated, and any machine will do.
verify runs the function, here, and checks what is claimed of it.
profile runs the step on a GPU, and prints how long each residual's copies take and what of them nothing hides.

MODULE:FUNCTION is called with the ARGUMENTs, which are strings, and returns (f, args): a loss or a training step, and a
tuple of its arguments, arrays or jax.ShapeDtypeStructs; or (step, args, loss, loss_args), where loss is what the step
differentiates."""

EXIT_CODES = "exit codes: 0 all that was checked holds; 1 a claim fails; 2 it cannot be done"


class CannotRun(Exception):
    """What was asked for cannot be done; the message says what is allowed."""


Done = tuple[dict[str, Any], int]  # what a page shows of it, and the exit code


class Made(NamedTuple):
    """What MODULE:FUNCTION returned. Of a step without its loss, `loss` is the step."""

    f: Any
    args: tuple[Any, ...]
    loss: Any
    loss_args: tuple[Any, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; see EXIT_CODES."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxoffload",
        description=USAGE,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("function", metavar="MODULE:FUNCTION")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one self-contained page")
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.html and not options.html.parent.is_dir():  # before anything runs
            raise CannotRun(f"--html {options.html}: there is no folder {options.html.parent}")
        of = made_by(options.function, options.arguments)
        found, code = COMMANDS[options.command](of, options.json)
    except (CannotRun, MemoryError, NotImplementedError) as why:
        print(f"python -m jaxoffload: {why}", file=sys.stderr)
        return 2
    except Exception as why:
        if not hasattr(why, "problems"):  # of a config or a policy; all others are the function's own faults
            raise
        print("\n".join((f"{options.function} cannot run:", *why.problems)), file=sys.stderr)
        return 2
    if options.html:
        title = " ".join((options.function, *options.arguments))
        options.html.write_text(proof.page(title, about(), **({"table": table_of(of)} | found)))
    return code


def made_by(where: str, arguments: Sequence[str]) -> Made:
    """What the function returns.

    Raises:
      CannotRun: there is none, or it returns something else.
    """
    module, colon, name = where.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise CannotRun(f"{where!r} is not MODULE:FUNCTION, such as models.train:step_for")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as why:
        raise CannotRun(f"{where}: {why}; the module must be found from this folder") from why
    if not callable(make := getattr(found, name, None)):
        own = [key for key, value in vars(found).items() if getattr(value, "__module__", "") == module]
        near = difflib.get_close_matches(name, own, 1)
        nearest = f"; the nearest is {near[0]!r}" if near else ""
        raise CannotRun(f"{where}: {module} has no function {name!r}{nearest}")
    try:
        inspect.signature(make).bind(*arguments)
    except TypeError as why:
        raise CannotRun(f"{where} cannot be called with {len(arguments)} argument(s): {why}") from why
    made = make(*arguments)
    if not isinstance(made, tuple) or len(made) not in (2, 4) or not all(isinstance(a, tuple) for a in made[1::2]):
        raise CannotRun(f"{where} must return (f, args) or (step, args, loss, loss_args), args being tuples")
    return Made(*made[:2], *made[-2:])


def about() -> dict[str, str]:
    """Machine and versions."""
    devices = jax.devices()
    kept = {"jax", "jaxlib", "jaxoffload", "jax-cuda12-plugin", "jax-cuda13-plugin", "transformer_engine"}
    versions = {p.name: p.version for p in importlib.metadata.distributions() if p.name in kept}
    device = f"{len(devices)} {devices[0].device_kind}"
    return {"device": device, **dict(sorted(versions.items())), "python": platform.python_version()}


def table_of(of: Made) -> Residuals | None:
    """None for a step that came without its loss."""
    try:
        return residuals(of.loss, *of.loss_args)
    except NotImplementedError:
        return None


def report(of: Made, as_json: bool) -> Done:
    if (table := table_of(of)) is None:
        raise CannotRun(
            "this is a step, whose residuals are inside of it; return its loss and the loss's arguments too"
        )
    print(table.to_json() if as_json else table)
    return {"table": table}, 0


def verify(of: Made, as_json: bool) -> Done:
    functions = {"loss": (of.loss, of.loss_args)}
    if of.f is not of.loss:
        functions["step"] = (of.f, of.args)
    found = []
    for what, (f, args) in functions.items():
        for check in proof.checks(f, *args):
            found.append((what, check))
            print(f"{what}: {check}", file=sys.stderr if as_json else sys.stdout, flush=True)
    if as_json:
        of_each = {what: proof.Verification(tuple(c for w, c in found if w == what)) for what in functions}
        print(json.dumps({what: json.loads(of_one.to_json()) for what, of_one in of_each.items()}))
    return {"checks": found}, int(any(check.verdict == "fails" for _, check in found))


def profile(of: Made, as_json: bool) -> Done:
    found = proof.profile(of.f, *of.args)
    print(found.to_json() if as_json else found)
    return {"profile": found}, 0


COMMANDS = {"report": report, "verify": verify, "profile": profile}

if __name__ == "__main__":
    sys.exit(main())
