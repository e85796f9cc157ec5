"""What ends a run from outside, a full disk or used up memory: a line, and an exit status of its own."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from models import checkpoints
from models.files import FULL, Unwritable
from models.reading import ConfigError, one_line

UNWRITABLE, OUT_OF_MEMORY = 3, 4  # exit statuses

_TENSORSTORE = re.compile(r"os_error_code='(\d+)'|OS error (\d+)")  # how it tells of errno
_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|OUT_OF_MEMORY|failed to allocate", re.IGNORECASE)


class Failure(NamedTuple):
    status: int
    line: str


def machine_failure(error: BaseException, out: Path | None) -> Failure | None:
    """What to say of an error that is the machine's; None if it is another. `out`: the run's folder, if it is known."""
    errors = list(_chain(error))
    for each in errors:
        if (found := _unwritable(each, out)) is not None:
            number, file = found
            full = "free some space there, or raise the quota or limit; " if number in FULL else ""
            why = os.strerror(number)
            return Failure(UNWRITABLE, f"stopped: {file} cannot be written ({why}); {full}{_again(out)}")
    for each in errors:
        if isinstance(each, MemoryError) or (
            isinstance(each, jax.errors.JaxRuntimeError) and _MEMORY.search(str(each))
        ):
            return Failure(
                OUT_OF_MEMORY,
                f"stopped: out of memory ({one_line(each)[:200]}); a smaller train.batch_size, more "
                "train.grad_accumulation, more residuals recomputed or offloaded under remat, or a greater mesh.fsdp "
                f"need less, and --report says how much; {_again(out)}",
            )
    return None


def _again(out: Path | None) -> str:
    steps = []
    with contextlib.suppress(ConfigError):  # the folder cannot be read either
        steps = checkpoints.steps(out) if out else []
    return f"the same command goes on from step {steps[0]}" if steps else "nothing is saved yet"


def _unwritable(error: BaseException, out: Path | None) -> tuple[int, str] | None:
    """errno, and what could not be written."""
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
    """An error, those in its group, and those that it came of."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        each = waiting.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [*getattr(each, "exceptions", ()), each.__cause__, each.__context__]
