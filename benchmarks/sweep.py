"""Step time and device memory as more residuals per layer are offloaded, and as more layers offload.

    python -m benchmarks.sweep [--out benchmarks/results/sweep.json] [--layers 16 --batch 2 --seqs 2048 8192]

The residuals of `benchmarks.dense`'s layer are offloaded one after another, those first that take longest to recompute
per byte; the others are recomputed. Then a share of the layers offloads the first three, and the other layers save
them. Offload is free until a layer's copies take as long as its forward pass; a trace in the same run measures the
bandwidth for that.
"""

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks import bench, dense
from benchmarks.bench import Variant
from benchmarks.cases import PIPELINED, SIZES, group_of, ours, shape_of

ORDER = (
    *("layer_input", "attn/context", "mlp/fc1.gate", "attn/q", "attn/k", "attn/v"),
    *("mlp_input", "mlp/fc1.up", "mlp/act"),
)
RECOMPUTED, SHARE = "everything recomputed", "jaxoffload, in a share of the layers"


def parse() -> argparse.Namespace:
    return bench.parser(__doc__, "sweep", **SIZES, rounds=0, seqs=[2048, 8192]).parse_args()


def variants() -> Iterator[tuple[str, Variant]]:
    """Yield full recomputation, each set of residuals with each series, and each share of the layers."""
    yield RECOMPUTED, Variant("jax in scan", {}, {})
    for number in range(len(ORDER)):
        residuals = dict.fromkeys(ORDER[: number + 1], "offload")
        yield "jaxoffload", ours(residuals)
        yield "JAX", Variant("jax in scan", residuals, PIPELINED)
    for share in (0.25, 0.5, 0.75):
        yield SHARE, ours(dict.fromkeys(ORDER[:3], "offload"), offload_layers=share)


def groups(options: argparse.Namespace) -> Iterator[bench.Group]:
    each = {(f"{number}, {how}", ""): variant for number, (how, variant) in enumerate(variants())}
    options.profile = [mode for (mode, _), variant in each.items() if variant.peer == "ours"]
    for seq in options.seqs:
        group = group_of(dense.CASE, argparse.Namespace(**vars(options) | {"seq": seq}), each, ("seq", str(seq)))
        for (how, variant), step in zip(variants(), group.steps.values(), strict=True):
            step.facts.update(how=how, moved=list(variant.residuals))
        yield group


def free_gib(modes: dict[str, Any]) -> float | None:
    """Return the GiB whose copies take as long as the forward pass, a quarter of the step that recomputes everything;
    None if nothing was traced."""
    rates = [of["host_gib"] / of["profile"]["d2h_ms"] for of in modes.values() if "profile" in of]
    (recomputed,) = (of for of in modes.values() if of["how"] == RECOMPUTED)
    return recomputed["step_ms"] / 4 * statistics.median(rates) if rates else None


if __name__ == "__main__":
    options = parse()
    bench.prepare(options.attention)
    bench.main("sweep", options, groups, lambda *_: {}, shape=shape_of(options))
