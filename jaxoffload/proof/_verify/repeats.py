"""The claim `repeats`: equal arguments give equal results, and no run leaves memory behind."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import jax

from ..._text import readable
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program.exact import not_exact
from .._program.target import Target
from .bits import differences, numbers
from .capacity import has_room_for, need
from .shared import VISIBLE, in_any_process


def repeats(target: Target) -> Found:
    """Run the program several times, as users compile it."""
    if not has_room_for(target.fast_program):
        return NOT_CHECKED, f"arguments are not given away here, and so {need(target.fast_program, 'it')}"
    runs = _Runs(target.fast_program, target.arrays)
    runs.run(target.repeats)
    grown, left = runs.resident[-1] - runs.resident[1], runs.in_use[-1] - runs.in_use[1]  # the first may still allocate
    # A pool grows now and then, and a device frees what is deleted a moment later. A leak grows each time.
    if in_any_process(grown > VISIBLE or left > 0):
        runs.run(target.repeats - 2)
        grown = min(grown, runs.resident[-1] - runs.resident[target.repeats - 1])
        left = min(left, runs.in_use[-1] - runs.in_use[target.repeats - 1])
    later = f"after {target.repeats - 2} more run(s)"
    if left > 0:
        return FAILS, f"{readable(left)} more are in use {later}"
    if grown > VISIBLE:
        return FAILS, f"the process takes {readable(grown)} more of the host's memory {later}"
    equal = f"{target.repeats} runs are equal"
    if in_any_process(bool(runs.wrong)):  # perhaps a kernel adds in whatever order its threads come
        again = _Runs(target.program, target.arrays)
        again.run(target.repeats)
        if in_any_process(bool(again.wrong)):
            differ, why = "; ".join([*again.wrong, *runs.wrong][:3]), not_exact(target.jaxpr)
            return (NOT_CHECKED, f"{differ}; {why}") if why else (FAILS, differ)
        equal += f" if compiled to be deterministic, not as compiled for speed ({'; '.join(runs.wrong[:1])})"
    in_use = f"{readable(runs.in_use[-1])} are in use after each"
    return HOLDS, f"{equal}, and {in_use}; the process grows by less than {readable(VISIBLE)}"


class _Runs:
    """Runs of a program: how each differs from the first, and the bytes in use and of the process after each."""

    def __init__(self, program: Any, arguments: tuple[Any, ...]):
        self.program, self.arguments = program, arguments
        self.first: Any = None
        self.wrong: list[str] = []
        self.in_use: list[int] = []
        self.resident: list[int] = []

    def run(self, times: int) -> None:
        for _ in range(times):
            results = numbers(self.program(*self.arguments))
            self.first = results if self.first is None else self.first
            differ = differences(results, self.first)
            self.wrong += [f"run {len(self.in_use) + 1} differs from the first: {text}" for text in differ]
            del results, differ
            self.in_use.append(_bytes_in_use())
            self.resident.append(_bytes_of_the_process())


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
