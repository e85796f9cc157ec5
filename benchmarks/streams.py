"""Host copies of a profiled GPU step: how long they take, and how much of that time is exposed.

    with jax.profiler.trace(FOLDER):
        jax.block_until_ready(step(...))
    python -m benchmarks.streams FOLDER

A copy is exposed while no kernel runs beside it, as in `jaxoffload.profile`, which reads traces with the same code.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from jaxoffload.proof._program.trace import DIRECTIONS, Event, length, merged, ms_of, overlap, read
from jaxoffload.proof._program.trace import traced as traced

COLLECTIVES = ("all-to-all", "ragged-all-to-all", "all-gather", "reduce-scatter", "all-reduce", "collective-permute")


def summary(events: list[Event]) -> dict[str, Any]:
    """Return the milliseconds of the step and of the copies each way, in all and exposed, and the longest `waits`.

    Collectives hide copies; what hides a collective is other kernels.
    """
    compute = merged((e.start, e.end) for e in events if not e.direction)
    collectives = merged((e.start, e.end) for e in events if is_collective(e))
    others = merged((e.start, e.end) for e in events if not e.direction and not is_collective(e))
    copies = {way: merged((e.start, e.end) for e in events if e.direction == way) for way in DIRECTIONS}
    exposed = {way: length(spans) - overlap(spans, compute) for way, spans in copies.items()}
    return {
        "step_ms": ms_of(max(e.end for e in events) - min(e.start for e in events)),
        **{f"{way}_ms": ms_of(length(spans)) for way, spans in copies.items()},
        **{f"{way}_exposed_ms": ms_of(spent) for way, spent in exposed.items()},
        "copies_ms": ms_of(sum(map(length, copies.values()))),
        "exposed_ms": ms_of(sum(exposed.values())),
        "collectives_ms": ms_of(length(collectives)),
        "collectives_exposed_ms": ms_of(length(collectives) - overlap(collectives, others)),
        "waits": waits(events),
    }


def is_collective(event: Event) -> bool:
    return event.name.startswith("nccl") or event.op.startswith(COLLECTIVES)


def by_kernel(events: list[Event], count: int = 12) -> dict[str, float]:
    """Return the kernels that take the longest, with the milliseconds of all their runs."""
    spent: dict[str, float] = {}
    for e in events:
        spent[e.name] = spent.get(e.name, 0.0) + e.end - e.start
    return {name: ms_of(spent[name]) for name in sorted(spent, key=spent.__getitem__, reverse=True)[:count]}


def waits(events: list[Event], count: int = 5) -> list[dict[str, Any]]:
    """Return the longest gaps of the busiest stream, each with the copy that ends nearest to its end."""
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
    parser.add_argument("folder", type=Path, help="the folder given to jax.profiler.trace")
    try:
        gpus = read(parser.parse_args().folder)
    except FileNotFoundError as error:
        sys.exit(f"benchmarks.streams: {error}")
    print(json.dumps({gpu: summary(events) for gpu, events in gpus.items()}, indent=1))
