"""Failures of the machine, a full disk or no memory left: one line, and an exit status of their own."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from models import signals
from models.files import FULL, Unwritable
from models.reading import ConfigError, one_line

UNWRITABLE, OUT_OF_MEMORY = 3, 4  # exit statuses

# By their text: tensorstore raises ValueError, and XLA reports some failed allocations (CUDA_ERROR_OUT_OF_MEMORY) as
# INTERNAL, as if they were faults of its own.
_TENSORSTORE = re.compile(r"os_error_code='(\d+)'|OS error (\d+)")
_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|OUT_OF_MEMORY|failed to allocate", re.IGNORECASE)


class Failure(NamedTuple):
    """What the program prints, and its exit status."""

    status: int
    line: str


def machine_failure(error: BaseException, out: Path | None) -> Failure | None:
    """Return the failure of the machine behind an error; None if there is none. `out`: the run's folder, if known."""
    errors = list(_chain(error))
    for each in errors:
        if unwritable := _unwritable(each, out):
            number, file = unwritable
            full = "free some space there, or raise the quota or limit; " if number in FULL else ""
            why = os.strerror(number)
            return Failure(UNWRITABLE, f"stopped: {file} cannot be written ({why}); {full}{_recovery(out)}")
    for each in errors:
        if isinstance(each, MemoryError) or (
            isinstance(each, jax.errors.JaxRuntimeError) and _MEMORY.search(str(each))
        ):
            return Failure(
                OUT_OF_MEMORY,
                f"stopped: out of memory ({one_line(each)[:200]}); a smaller train.batch_size, more "
                "train.grad_accumulation, more residuals recomputed or offloaded under remat, or a greater mesh.fsdp "
                f"need less, and --report says how much; {_recovery(out)}",
            )
    return None


def exit_code(what: str, run: Callable[[], None]) -> int:
    """Run it and return 0; or print the error of a config, a signal or the machine, and return its exit status."""
    try:
        with signals.handled():
            run()
        return 0
    except ConfigError as error:
        print(f"{what}:\n{error}", file=sys.stderr)
        return 2
    except signals.Stopped as stopped:
        return 128 + stopped.number
    except Exception as error:
        if (failure := machine_failure(error, None)) is None:
            raise
        print(failure.line, file=sys.stderr)
        return failure.status


def _recovery(out: Path | None) -> str:
    steps = sorted(int(path.name) for path in out.glob("checkpoints/[0-9]*") if path.name.isdigit()) if out else []
    return f"the same command continues from step {steps[-1]}" if steps else "nothing is saved yet"


def _unwritable(error: BaseException, out: Path | None) -> tuple[int, str] | None:
    """Return errno, and the file that could not be written; None if the error is another."""
    if isinstance(error, OSError):
        file = error.filename and Path(os.fsdecode(error.filename))
        inside = out is not None and file and file.absolute().is_relative_to(out.absolute())
        if isinstance(error, Unwritable) or error.errno in FULL or inside:
            return error.errno or 0, str(file or "a file")
    text = one_line(error)
    if match := _TENSORSTORE.search(text):
        paths = re.findall(r'"(/[^"]+)"', text)
        return int(match[1] or match[2]), paths[-1] if paths else "a file"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, those in its group, and their causes and contexts."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        each = waiting.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [*getattr(each, "exceptions", ()), each.__cause__, each.__context__]
