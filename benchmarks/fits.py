"""Whether copies fit behind their layers: the prediction from FLOPs and bytes against a profile, for ten shapes.

    python -m benchmarks.fits [--out benchmarks/results/fits.json]

It measures the machine (`jaxoffload.machine`), predicts each shape's step, and then runs and profiles it. Copies fit if
at most 1 % of the step is exposed; of a predicted step, 1 % of the time that the layers compute. The exit status is 1
if prediction and measurement disagree on a shape.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import bench, cases
from benchmarks.cases import group_of, loss_of, ours
from benchmarks.moe import CASES
from jaxoffload import proof
from jaxoffload.proof import Machine

FREE = 0.01
FC1 = "mlp/fc1.gate mlp/fc1.up"
EXPERTS = "moe/fc1.gate moe/fc1.up"
SHORT, LONG = {"batch": 1, "seq": 4096}, {"batch": 1, "seq": 32768}
SHAPES: tuple[tuple[str, str, dict[str, int]], ...] = (  # the case, what is offloaded, and sizes
    ("dense", "layer_input mlp/fc1.gate", {}),
    ("dense", f"layer_input {FC1}", {}),
    ("dense", "layer_input", SHORT),
    ("dense", f"layer_input mlp_input attn/q attn/context {FC1}", SHORT),
    ("dense", f"layer_input {FC1}", LONG),
    ("dense", "layer_input", {"d_model": 2048}),
    ("dense", "layer_input mlp/fc1.gate", {"d_model": 2048}),
    ("dense", f"layer_input {FC1}", {"d_model": 8192, "batch": 1}),
    ("moe", "layer_input moe/fc1.gate", {}),
    ("moe", f"layer_input moe/fc1_input {EXPERTS}", {}),
)


def parse() -> argparse.Namespace:
    return bench.parser(__doc__, "fits", rounds=1, profile=["ours"]).parse_args()


def groups(options: argparse.Namespace, machine: Machine) -> Iterator[bench.Group]:
    for name, moved, sizes in SHAPES:
        of = argparse.Namespace(**cases.SIZES | {"layers": 4 if name == "moe" else 6} | sizes)
        variants = {("ours", moved): ours(dict.fromkeys(moved.split(), "offload"))}
        label = f"{name}, batch {of.batch}, seq {of.seq}, d_model {of.d_model}: {moved}"
        group = group_of(CASES[name], of, variants, ("shapes", label))
        loss, args = loss_of(CASES[name], of, variants["ours", moved]), cases.state_of(CASES[name], of)[0]
        group.steps["ours", moved].facts["predicted"] = predicted(loss, args, machine)
        yield group


def predicted(loss: Callable[..., Any], args: Any, machine: Machine) -> float:
    """Return the share of the layers' time in which copies are predicted to be exposed."""
    (loop,) = proof.fits(loss, *args, machine=machine).loops
    return round(loop.exposed_ms(loop.together) / loop.computing_ms, 4)


def ratios(modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    return {"predicted": modes["ours"]["predicted"], **bench.ratios(modes, [], "ours")}


if __name__ == "__main__":
    bench.prepare()
    machine = proof.machine()
    result = bench.main(
        "fits", parse(), functools.partial(groups, machine=machine), ratios, machine=json.loads(machine.to_json())
    )
    shares = [of["ratios"] for of in result["shapes"].values()]
    sys.exit(any((of["predicted"] <= FREE) != (of["exposed/step"] <= FREE) for of in shares))
