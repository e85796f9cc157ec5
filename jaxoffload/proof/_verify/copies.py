"""The claim `copies`: copies are asynchronous DMA, in range, on streams that do not compute; all else leaves host
memory alone."""

from collections.abc import Iterable
from typing import Any

import jax

from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program import hlo
from .._program.target import Target
from .._program.trace import Event, first_gpu, in_the_way, traced
from .capacity import has_room_for, need
from .shared import first


def copies(target: Target) -> Found:
    """Look at what XLA compiled for a GPU, and at the streams on which it runs."""
    if jax.default_backend() != "gpu":
        return NOT_CHECKED, "needs an NVIDIA GPU: it is what XLA compiles for one"
    module = target.module
    wrong = [f"{line.opcode} {line.name} touches host memory" for line in hlo.kernels_on_host_memory(module)]
    wrong += [f"{line.name} copies out of range" for line in hlo.out_of_range(module)]
    count = sum(line.starts_host_copy for line in module)
    unseen, as_it_ran = _on_streams(target) if count or hlo.of_unknown_length(module) else ("", [])
    wrong += as_it_ran
    listed = []
    if count and (waits := sorted(hlo.with_sizes_on_the_host(module))):
        listed = [f"TransformerEngine has the host read group sizes, and wait for the copies, in {first(waits)}"]
        wrong += listed if target.strict else []
    if wrong:
        return FAILS, first(wrong, "; ")
    detail = f"{count} asynchronous copies, all in range" if count else "no copies"
    if unseen:
        return NOT_CHECKED, "; ".join((detail, unseen, *listed))
    detail += " and on no stream that computes" if count else ""
    return HOLDS, "; ".join((f"{detail}, and nothing else touches host memory", *listed))


def _on_streams(target: Target) -> tuple[str, list[str]]:
    """Return why the streams that the copies run on are unknown, if they are; and what is wrong with them in a run."""
    program = target.fast_program
    if loops := hlo.of_unknown_length(target.module):
        return f"the trip count of {first([loop.name for loop in loops])} is unknown", []
    if not has_room_for(program):
        return f"streams unknown, because the program was not run: {need(program, 'it')}", []
    run = lambda: jax.block_until_ready(program(*target.arrays))
    run()
    events = first_gpu(traced(run))
    if not events:
        return "streams unknown, because the profiler saw nothing of the GPU", []
    return "", wrong_as_it_ran(events, target.module, program.runtime_executable().hlo_modules())


def wrong_as_it_ran(events: list[Event], module: hlo.Module, modules: Iterable[Any]) -> list[str]:
    """Return what is wrong with the copies in a trace of one run, on one device."""
    ignored, waiting = hlo.collective_kernels(modules) | hlo.decided_on_host(module), hlo.with_sizes_on_the_host(module)
    events = [e for e in events if not (e.direction and e.op in waiting)]
    shared = in_the_way(events, ignored).items()
    wrong = [f"copies run on a stream that computes, {stream}: {what}" for stream, what in shared]
    ran = sum(e.direction is not None and e.op not in ignored for e in events)
    has_branches = any(line.opcode == "conditional" for line in module)  # of which one is taken
    fewest = 1 if has_branches else sum(module.runs[copy.loop] for copy in hlo.host_copies(module).values())
    return wrong if ran >= fewest else [*wrong, f"{ran} of {fewest} copies ran as copies"]
