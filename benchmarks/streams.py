"""Host copies of a profiled GPU step: how long they take, and how much of that nothing hides.

    with jax.profiler.trace(FOLDER):
        jax.block_until_ready(step(...))
    python -m benchmarks.streams FOLDER

A copy is hidden while a kernel runs beside it, as for `jaxoffload.profile`, whose reader of traces this is too.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from jaxoffload.proof._program.trace import DIRECTIONS, Event, length, merged, ms_of, overlap, read
from jaxoffload.proof._program.trace import traced as traced


def summary(events: list[Event]) -> dict[str, Any]:
    """Milliseconds of the step, and of each direction's copies, all and exposed; and the longest `waits`."""
    compute = merged((e.start, e.end) for e in events if not e.direction)
    copies = {
        direction: merged((e.start, e.end) for e in events if e.direction == direction) for direction in DIRECTIONS
    }
    exposed = {direction: length(spans) - overlap(spans, compute) for direction, spans in copies.items()}
    return {
        "step_ms": ms_of(max(e.end for e in events) - min(e.start for e in events)),
        **{f"{d}_ms": ms_of(length(spans)) for d, spans in copies.items()},
        **{f"{d}_exposed_ms": ms_of(spent) for d, spent in exposed.items()},
        "copies_ms": ms_of(sum(map(length, copies.values()))),
        "exposed_ms": ms_of(sum(exposed.values())),
        "waits": waits(events),
    }


def by_kernel(events: list[Event], count: int = 12) -> dict[str, float]:
    """The kernels that take the longest, with the milliseconds of all their runs."""
    spent: dict[str, float] = {}
    for e in events:
        spent[e.name] = spent.get(e.name, 0.0) + e.end - e.start
    return {name: ms_of(spent[name]) for name in sorted(spent, key=spent.__getitem__, reverse=True)[:count]}


def waits(events: list[Event], count: int = 5) -> list[dict[str, Any]]:
    """The longest gaps of the busiest stream, and the copy on another stream whose end is nearest to each gap's."""
    kernels = sorted((e for e in events if not e.name.startswith("Memcpy")), key=lambda e: e.start)
    busy = dict.fromkeys((e.stream for e in kernels), 0.0)
    for e in kernels:
        busy[e.stream] += e.end - e.start
    busiest = max(busy, key=busy.__getitem__)
    main = [e for e in kernels if e.stream == busiest]
    copies = [e for e in events if e.name.startswith("Memcpy")]
    gaps = sorted(itertools.pairwise(main), key=lambda pair: pair[0].end - pair[1].start)[:count]
    longest = []
    for before, after in gaps:
        last = min(copies, key=lambda e: abs(e.end - after.start), default=None)
        copy = f"{last.name} {last.op}".strip() if last else None
        longest.append({"ms": ms_of(after.start - before.end), "before": after.op or after.name, "copy": copy})
    return longest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of jax.profiler.trace")
    try:
        gpus = read(parser.parse_args().folder)
    except FileNotFoundError as why:
        sys.exit(f"streams: {why}")
    print(json.dumps({gpu: summary(events) for gpu, events in gpus.items()}, indent=1))
