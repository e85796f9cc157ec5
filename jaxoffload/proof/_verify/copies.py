"""The claim `copies`: copies are asynchronous DMA, in range, on streams that do not compute; all else leaves host
memory alone."""

from collections import defaultdict
from collections.abc import Collection, Iterable
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
    kernels = hlo.kernels_on_host_memory(module)
    at_ends = [line for line in kernels if target.has_state_on_host and copies_one_block(line, module)]
    wrong = [f"{line.opcode} {line.name} touches host memory" for line in kernels if line not in at_ends]
    wrong += [f"{line.name} copies out of range" for line in hlo.out_of_range(module)]
    count = sum(line.starts_host_copy for line in module)
    by_kernels = {hlo.name_in_a_profile(line.computation) for line in at_ends}
    unseen, as_it_ran = _on_streams(target, by_kernels) if count else ("", [])
    if wrong := wrong + as_it_ran:
        return FAILS, first(wrong, "; ")
    detail = f"{count} asynchronous copies, all in range" if count else "no copies"
    if unseen:
        detail += f"; {unseen}"
    else:
        detail += " and on no stream that computes" * (count > 0) + ", and nothing else touches host memory"
    detail += f", except {len(at_ends)} blocks of an optimizer's state that kernels copy" * bool(at_ends)
    if count and (waits := sorted(hlo.with_sizes_on_the_host(module))):
        detail += f"; TransformerEngine has the host read group sizes, and wait for the copies, in {first(waits)}"
    return NOT_CHECKED if unseen else HOLDS, detail


def copies_one_block(line: hlo.Instruction, module: hlo.Module) -> bool:
    """Return if a kernel copies rows outside of a loop, where XLA:GPU does not by DMA."""
    return line.opcode in ("dynamic-slice", "dynamic-update-slice") and module.runs[line.computation] == 1


def _on_streams(target: Target, by_kernels: set[str]) -> tuple[str, list[str]]:
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
    return "", wrong_as_it_ran(events, target.module, program.runtime_executable().hlo_modules(), by_kernels)


def wrong_as_it_ran(
    events: list[Event], module: hlo.Module, modules: Iterable[Any], by_kernels: Collection[str] = ()
) -> list[str]:
    """Return what is wrong with the copies in a trace of one run, on one device, except those `by_kernels`."""
    decided_on_host = {line.name for line in module if line.opcode in ("while", "conditional")}  # their conditions are
    ignored, waiting = hlo.collective_kernels(module, modules) | decided_on_host, hlo.with_sizes_on_the_host(module)
    ignored |= set(by_kernels)
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
    by_dma = (copy for name, copy in hlo.host_copies(module).items() if name not in by_kernels)
    fewest = 1 if has_branches else sum(module.runs[copy.loop] for copy in by_dma)
    return wrong if ran >= fewest else [*wrong, f"{ran} of {fewest} copies ran as copies"]
