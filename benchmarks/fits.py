"""Whether copies fit behind their layers: the prediction from FLOPs and bytes against a profile, for ten shapes.

    python -m benchmarks.fits [--out benchmarks/results/fits.json]

It measures the machine (`jaxoffload.machine`), predicts each shape's step (`jaxoffload.proof.fits`), and then runs and
profiles it. Copies fit if at most 1 % of the step is exposed. The prediction takes 1 % of the time that the layers
compute, as `report` does. The exit status is 1 if prediction and measurement disagree on a shape.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import dense, moe, peers, streams
from benchmarks.cases import OVERLAP, Case, Variant
from benchmarks.steps import compile_step, initial, loss_of, start
from jaxoffload import proof
from jaxoffload.proof._predict.fit import FREE


class Shape(NamedTuple):
    """A case with sizes of its own, and the residuals to offload."""

    case: Case
    offloaded: str  # names, separated by spaces
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
        lines.append(compare(shape, machine))
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
    parser.add_argument("--commit", default=peers.head(), help="the commit to record")
    return parser.parse_args()


def options_of(shape: Shape) -> argparse.Namespace:
    """Return the options of the case's own benchmark, with these sizes."""
    parser = peers.arguments("")
    shape.case.arguments(parser)
    parser.set_defaults(**{"layers": 4 if shape.case is moe.CASE else 6} | shape.sizes)
    return parser.parse_args([])


def compare(shape: Shape, machine: proof.Machine) -> dict[str, Any]:
    """Return what is predicted for a shape, and what is measured."""
    options = options_of(shape)
    variant = Variant("ours", dict.fromkeys(shape.offloaded.split(), "offload"), OVERLAP)
    avals = jax.eval_shape(start(shape.case, options))
    predicted = proof.fits(loss_of(shape.case, options, variant), *avals, machine=machine)
    (loop,) = predicted.loops
    measured = measure(shape.case, options, variant)
    return {
        "case": shape.case.program,
        **{key: getattr(options, key) for key in ("layers", "batch", "seq", "d_model")},
        "moved": shape.offloaded,
        "predicted": {
            "forward_ms": round(loop.forward_ms, 2),
            "backward_ms": round(loop.backward_ms, 2),
            "d2h_ms": round(loop.together.d2h_ms, 2),
            "h2d_ms": round(loop.together.h2d_ms, 2),
            "exposed_ms": round(predicted.exposed_ms, 2),
            "exposed/step": round(predicted.exposed_ms / loop.computing_ms, 4),
        },
        "measured": measured,
        "fits": loop.fits(loop.together),
        "measured to fit": measured["exposed/step"] <= FREE,
    }


def measure(case: Case, options: argparse.Namespace, variant: Variant) -> dict[str, float]:
    step, _, _ = compile_step(case, options, variant)
    state, begin = initial(case, options), time.monotonic()
    while time.monotonic() - begin < 2.5:  # until the GPU's clocks are those of a long run
        state = jax.block_until_ready(step(*state))
    (events,) = streams.traced(lambda: jax.block_until_ready(step(*state))).values()
    profile = streams.summary(events)
    return {
        "forward_ms": layer_ms(events, "d2h"),
        "backward_ms": layer_ms(events, "h2d"),
        **{key: profile[key] for key in ("step_ms", "d2h_ms", "h2d_ms", "exposed_ms")},
        "exposed/step": round(profile["exposed_ms"] / profile["step_ms"], 4),
    }


def layer_ms(events: list[streams.Event], direction: str) -> float:
    """Return the time between one layer's copies and the next layer's: of the computation, or of longer copies."""
    starts: dict[str, list[float]] = {}
    for e in events:
        if e.direction == direction:
            starts.setdefault(e.op, []).append(e.start)
    # XLA duplicates a loop's body, so one instruction copies for every second layer.
    between = [(b - a) / 2e6 for same_op in starts.values() for a, b in itertools.pairwise(sorted(same_op))]
    return round(statistics.median(between), 2) if between else 0.0


if __name__ == "__main__":
    main()
