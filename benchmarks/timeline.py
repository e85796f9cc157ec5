"""When the GPU computes, and when it copies: a step of layers that offload, by JAX and by ours.

    python -m benchmarks.timeline [--layers 6] [--out FILE]

Each mode runs, and then a step of it is traced. `lanes`: when kernels run and copies go each way, in milliseconds since
the step's first event; what is nearer to each other than `APART` is one.
"""

import argparse
from collections.abc import Iterable

import jax

from benchmarks import bench
from benchmarks.cases import SIZES, group_of, shape_of
from benchmarks.dense import CASE, modes_of
from jaxoffload.proof._program.trace import Event, merged, traced

MODES = {"jax_offload": "defaults", "ours": "overlap"}
LANES = {"compute": None, "to the host": "d2h", "back": "h2d"}
APART = 0.1e6  # ns: between the kernels of a layer


def parse() -> argparse.Namespace:
    return bench.parser(__doc__, "timeline", **SIZES | {"layers": 6}).parse_args()


def lanes_of(events: Iterable[Event]) -> dict[str, list[tuple[float, float]]]:
    """Return the spans of each lane."""
    events = list(events)
    first = min(e.start for e in events)
    ms = lambda ns: round((ns - first) / 1e6, 2)
    of = lambda way: merged((e.start, e.end + APART) for e in events if e.direction == way)
    return {lane: [(ms(start), ms(end - APART)) for start, end in of(way)] for lane, way in LANES.items()}


def main(options: argparse.Namespace) -> None:
    result = bench.provenance("timeline", options) | {"shape": shape_of(options), "modes": {}}
    group = group_of(CASE, options, {(mode, ""): modes_of(CASE)[mode][name] for mode, name in MODES.items()})
    for mode in MODES:
        state, run = group.initial(), group.steps[mode, ""].run
        for _ in range(2):  # the first fills the pinned pool
            state = jax.block_until_ready(run(*state))
        events = traced(lambda run=run, state=state: jax.block_until_ready(run(*state)))
        lanes = lanes_of(events)
        step_ms = round(max(end for spans in lanes.values() for _, end in spans), 2)
        result["modes"][mode] = {"step_ms": step_ms, "lanes": lanes}
    bench.write(options, result)


if __name__ == "__main__":
    options = parse()
    bench.prepare(options.attention)
    main(options)
