"""Do the copies fit behind their layers? What FLOPs and bytes predict, and what a profile says, for ten shapes.

    python -m benchmarks.fits [--out benchmarks/results/fits.json]

Measures the machine (`jaxoffload.machine`), predicts (`jaxoffload.proof.fits`) before anything runs, and then profiles
each shape's step. Copies fit where what nothing hides of them is no more than 1 %: measured, of the step; predicted,
and as `report` says, of what its layers compute.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import dense, moe, peers, streams
from benchmarks.cases import OVERLAP, Case, Variant
from benchmarks.steps import compile_step, initial, loss_of, start
from jaxoffload import proof
from jaxoffload.proof._predict.fit import FREE


class Shape(NamedTuple):
    """Layers of a case, with other sizes than its own, and the residuals that move."""

    case: Case
    moved: str
    sizes: dict[str, int]


SMALL, WIDE = {"d_model": 2048, "kv_heads": 8}, {"d_model": 8192, "kv_heads": 8}
FC1 = "mlp/fc1.gate mlp/fc1.up"
SHAPES = (
    Shape(dense.CASE, "layer_input mlp/fc1.gate", {}),
    Shape(dense.CASE, f"layer_input {FC1}", {}),
    Shape(dense.CASE, "layer_input", {"batch": 1, "seq": 4096}),
    Shape(dense.CASE, f"layer_input mlp_input attn/q attn/context {FC1}", {"batch": 1, "seq": 4096}),
    Shape(dense.CASE, f"layer_input {FC1}", {"batch": 1, "seq": 32768}),
    Shape(dense.CASE, "layer_input", SMALL),
    Shape(dense.CASE, "layer_input mlp/fc1.gate", SMALL),
    Shape(dense.CASE, f"layer_input {FC1}", WIDE | {"batch": 1}),
    Shape(moe.CASE, "layer_input moe/fc1.gate", {}),
    Shape(moe.CASE, "layer_input moe/fc1_input moe/fc1.gate moe/fc1.up", {}),
)


def main() -> None:
    options = parse()
    machine = proof.machine()
    print(machine, file=sys.stderr)
    lines = []
    for shape in SHAPES:
        lines.append(line_of(shape, machine))
        print(lines[-1], file=sys.stderr, flush=True)
        agree = sum(line["fits"] == line["measured to fit"] for line in lines)
        result = {
            **peers.provenance("fits", options.commit),
            "machine": json.loads(machine.to_json()),
            "lines": lines,
            "agree": agree,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if agree == len(lines) else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fits.json"))
    parser.add_argument("--commit", default=peers.head(), help="recorded beside the numbers")
    return parser.parse_args()


def options_of(shape: Shape) -> argparse.Namespace:
    """As the case's own benchmark takes them."""
    parser = peers.arguments("")
    shape.case.arguments(parser)
    parser.set_defaults(**{"layers": 4 if shape.case is moe.CASE else 6} | shape.sizes)
    return parser.parse_args([])


def line_of(shape: Shape, machine: proof.Machine) -> dict[str, Any]:
    """What is predicted of a shape, and what is measured."""
    import jax

    options = options_of(shape)
    variant = Variant("ours", dict.fromkeys(shape.moved.split(), "offload"), OVERLAP)
    given = jax.eval_shape(start(shape.case, options))
    predicted = proof.fits(loss_of(shape.case, options, variant), *given, machine=machine)
    (loop,) = predicted.loops
    step, _, _ = compile_step(shape.case, options, variant)
    state, begin = initial(shape.case, options), time.monotonic()
    while time.monotonic() - begin < 2.5:  # until the clocks are those of a long run
        state = jax.block_until_ready(step(*state))
    (events,) = streams.traced(lambda: jax.block_until_ready(step(*state))).values()
    measured = streams.summary(events)
    known = ("layers", "batch", "seq", "d_model")
    return {
        "case": shape.case.program,
        **{key: getattr(options, key) for key in known},
        "moved": shape.moved,
        "predicted": {
            "forward_ms": round(loop.forward_ms, 2),
            "backward_ms": round(loop.backward_ms, 2),
            "d2h_ms": round(loop.together.d2h_ms, 2),
            "h2d_ms": round(loop.together.h2d_ms, 2),
            "exposed_ms": round(predicted.exposed_ms, 2),
            "exposed/step": round(predicted.exposed_ms / loop.computing_ms, 4),
        },
        "measured": {
            "forward_ms": layer_ms(events, "d2h"),
            "backward_ms": layer_ms(events, "h2d"),
            **{key: measured[key] for key in ("step_ms", "d2h_ms", "h2d_ms", "exposed_ms")},
            "exposed/step": (share := round(measured["exposed_ms"] / measured["step_ms"], 4)),
        },
        "fits": loop.fits(loop.together),
        "measured to fit": share <= FREE,
    }


def layer_ms(events: list[streams.Event], direction: str) -> float:
    """From one layer's copies to the next layer's: a layer, or its copies where they take longer."""
    starts: dict[str, list[float]] = {}
    for e in events:
        if e.direction == direction:
            starts.setdefault(e.op, []).append(e.start)
    # XLA has two copies of a loop's body, so that one instruction copies every other layer's.
    between = [(b - a) / 2e6 for of_one in starts.values() for a, b in itertools.pairwise(sorted(of_one))]
    return round(statistics.median(between), 2) if between else 0.0


if __name__ == "__main__":
    main()
