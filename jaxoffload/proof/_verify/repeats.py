"""The claim `repeats`: equal arguments give equal results, and no run leaves memory behind."""

import contextlib
import ctypes
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import jax

from ..._compiler_options import compiler_options
from ..._text import readable
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program.exact import repeatable_options
from .._program.memory import VISIBLE, too_large
from .._program.target import Target
from .gradients import differences, in_any_process, numbers

RUNS = 4  # the first may still allocate, and a pool grows now and then; a leak grows each time


def repeats(target: Target) -> Found:
    """Run the program several times, as users compile it."""
    program = target.compiled(compiler_options)
    if why := too_large(program):
        return NOT_CHECKED, f"arguments are not given away here, and so it {why}"
    differ, in_use, resident = _run(program, target.arrays)
    left, grown = (min(b - a for a, b in itertools.pairwise(sizes[1:])) for sizes in (in_use, resident))
    if left > 0:
        return FAILS, f"{readable(left)} more are in use after each run"
    if grown > VISIBLE:
        return FAILS, f"the process takes {readable(grown)} more of the host's memory in each run"
    equal = f"{RUNS} runs are equal"
    if in_any_process(bool(differ)):  # perhaps a kernel adds in whatever order its threads come
        again, *_ = _run(target.compiled(repeatable_options), target.arrays)
        if in_any_process(bool(again)):
            return FAILS, "; ".join([*again, *differ][:3])
        equal += f" if compiled to be deterministic, not as compiled for speed ({'; '.join(differ[:1])})"
    detail = f"{equal}, and {readable(in_use[-1])} are in use after each"
    return HOLDS, f"{detail}; the process grows by less than {readable(VISIBLE)}"


def _run(program: Any, args: tuple[Any, ...]) -> tuple[list[str], list[int], list[int]]:
    """Return how runs differ from the first, and after each the bytes in use and those of the process."""
    first, wrong, in_use, resident = None, [], [], []
    for number in range(1, RUNS + 1):
        results = numbers(program(*args))
        first = results if first is None else first
        wrong += [f"run {number} differs from the first: {text}" for text in differences(results, first)]
        del results
        in_use.append(_bytes_in_use())
        resident.append(_bytes_of_the_process())
    return wrong, in_use, resident


def _bytes_in_use() -> int:
    """Return the bytes on the devices, where they tell, and of live arrays on the host; else of all live arrays."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_in_use" in s for s in stats):
        on_the_host = sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind == "pinned_host")
        return on_the_host + sum(s["bytes_in_use"] for s in stats)
    return sum(array.nbytes for array in jax.live_arrays())


def _bytes_of_the_process() -> int:
    """Return the bytes of the host's memory, except what malloc keeps for later; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
