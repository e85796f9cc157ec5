"""The claim `copies`: copies are asynchronous DMA, in range, on streams that do not compute; all else leaves host
memory alone."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import jax

from ..._compiler_options import compiler_options
from ..._text import first
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program import hlo
from .._program.memory import too_large
from .._program.target import Target
from .._program.trace import Event, traced


def copies(target: Target) -> Found:
    """Look at what XLA compiled for a GPU, and at the streams on which it runs."""
    if jax.default_backend() != "gpu":
        return NOT_CHECKED, "needs an NVIDIA GPU: it is what XLA compiles for one"
    module = target.module
    wrong = [f"{line.opcode} {line.name} touches host memory" for line in hlo.kernels_on_host_memory(module)]
    wrong += [f"{line.name} copies out of range" for line in hlo.out_of_range(module)]
    count = sum(line.starts_host_copy for line in module)
    unseen, as_it_ran = _on_streams(target) if count else ("", [])
    if wrong := wrong + as_it_ran:
        return FAILS, first(wrong, "; ")
    detail = f"{count} asynchronous copies, all in range" if count else "no copies"
    if unseen:
        detail += f"; {unseen}"
    else:
        detail += " and on no stream that computes" * (count > 0) + ", and nothing else touches host memory"
    if count and (waits := sorted(hlo.with_sizes_on_the_host(module))):
        detail += f"; TransformerEngine has the host read group sizes, and wait for the copies, in {first(waits)}"
    return NOT_CHECKED if unseen else HOLDS, detail


def _on_streams(target: Target) -> tuple[str, list[str]]:
    """Return why the streams that the copies run on are unknown, if they are; and what is wrong with them in a run."""
    program = target.compiled(compiler_options)
    if loops := hlo.of_unknown_length(target.module):
        return f"the trip count of {first([loop.name for loop in loops])} is unknown", []
    if why := too_large(program):
        return f"streams unknown, because the program was not run: it {why}", []
    run = lambda: jax.block_until_ready(program(*target.arrays))
    run()
    if not (events := traced(run)):
        return "streams unknown, because the profiler saw nothing of the GPU", []
    return "", wrong_as_it_ran(events, target.module, program.runtime_executable().hlo_modules())


def wrong_as_it_ran(events: list[Event], module: hlo.Module, modules: Iterable[Any]) -> list[str]:
    """Return what is wrong with the copies in a trace of one run, on one device."""
    decided_on_host = {line.name for line in module if line.opcode in ("while", "conditional")}  # their conditions are
    ignored, waiting = hlo.collective_kernels(module, modules) | decided_on_host, hlo.with_sizes_on_the_host(module)
    events = [e for e in events if e.op not in ignored and not (e.direction and e.op in waiting)]
    copies, kernels = defaultdict[str, list[str]](list), defaultdict[str, set[str]](set)
    for e in events:
        if e.direction:
            copies[e.stream].append(e.op)
        elif not e.name.startswith(("Memcpy", "Memset")):
            kernels[e.stream].add(e.name)
    wrong = [
        f"copies run on a stream that computes, {stream}: {len(ops)} copies by {first(sorted(set(ops)))} beside "
        f"{first(sorted(kernels[stream]))}"
        for stream, ops in copies.items()
        if stream in kernels
    ]
    ran = sum(map(len, copies.values()))
    has_branches = any(line.opcode == "conditional" for line in module)  # of which one is taken
    fewest = 1 if has_branches else sum(module.runs[copy.loop] for copy in hlo.host_copies(module).values())
    return wrong if ran >= fewest else [*wrong, f"{ran} of {fewest} copies ran as copies"]
