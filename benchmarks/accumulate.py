"""Gradients over microbatches: interleaved, and one after another by plain JAX and by ours.

    python -m benchmarks.accumulate [--microbatches 2 4 8] [--out benchmarks/results/accumulate.json]
    python -m benchmarks.accumulate --case moe --layers 4 --out benchmarks/results/accumulate-moe.json
    python -m benchmarks.accumulate --fsdp 2 --out benchmarks/results/accumulate-fsdp.json
    python -m benchmarks.accumulate --case moe --expert 2 --batch 4 --layers 4 --capacity 1.25 --times \\
        --modes one_by_one interleaved --out benchmarks/results/accumulate-experts.json

The gradient is summed over microbatches of `--batch` sequences each; `ms` is the time of one. With `--times` XLA
compiles twice, and then knows how long kernels take.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks import bench
from benchmarks.bench import Variant, cells, markdown
from benchmarks.cases import SIZES, Case, group_of, ours, shape_of
from benchmarks.dense import modes_of
from benchmarks.moe import CASES

LOOPS = ("remat", "saved_all", "ours_saved_all", "one_by_one")
MODES = (*LOOPS, "in_turn_recomputed", "in_turn_saved", "interleaved")


def variants_of(case: Case) -> dict[str, dict[str, Variant]]:
    """Return mode -> name -> variant."""
    modes, moved = modes_of(case), dict.fromkeys(case.moved, "offload")
    kept = moved | dict.fromkeys(("attn/k", "attn/v"), "save")
    less = kept | dict.fromkeys(("attn/q", "mlp_input"), "recompute")
    gate = dict.fromkeys(case.moved, "save") | {case.fc1[0]: "offload"}
    return {
        **{mode: modes[mode] for mode in ("remat", "saved_all", "ours_saved_all")},
        "one_by_one": case.best,
        "in_turn_recomputed": {"everything": ours({})},
        "in_turn_saved": {"all names": ours(dict.fromkeys(case.all_names, "save"))},
        "interleaved": {
            "all moved": ours(moved),
            "k and v kept, the rest moved": ours(kept),
            # Where several GPUs copy both ways at once, the bus has room for fewer; behind four, for the gate.
            "k and v kept, q and mlp_input recomputed, the rest moved": ours(less),
            "gate moved, the rest saved": ours(gate),
            # The keys are small; of gates alone jaxlib 0.11.2 tells no memory (docs/upstream.md#memory-analysis).
            "gate and keys moved, the rest saved": ours(gate | {"attn/k": "offload"}),
        },
    }


def parse() -> argparse.Namespace:
    more = {"modes": [*MODES], "variants": [], "rounds": 2, "profile": ["interleaved", "one_by_one"]}
    more |= {"case": "dense", "microbatches": [8], "times": False}
    return bench.parser(__doc__, "accumulate", **SIZES, **more).parse_args()


def groups(options: argparse.Namespace) -> Iterator[bench.Group]:
    case = CASES[options.case]
    for count in options.microbatches:
        variants, path = bench.chosen(variants_of(case), options), ("microbatches", str(count))
        yield group_of(case, options, variants, path, count, loops=LOOPS)


RATIOS = (
    *(("interleaved", "saved_all"), ("interleaved", "remat"), ("interleaved", "one_by_one")),
    *(("in_turn_recomputed", "remat"), ("in_turn_saved", "ours_saved_all")),
)


def ratios(modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    return bench.ratios(modes, RATIOS, "interleaved", "remat", ("saved_all", "ours_saved_all"))


WHAT = {
    "remat": "JAX, everything recomputed",
    "saved_all": "JAX, all names saved; attention runs again",
    "ours_saved_all": "**jaxoffload**, one after another, all saved",
    "one_by_one": "**jaxoffload**, one after another, what fits in the memory of full recomputation",
    "in_turn_recomputed": "**jaxoffload**, `accumulate`, everything recomputed",
    "in_turn_saved": "**jaxoffload**, `accumulate`, all saved",
    "interleaved": "**jaxoffload**, interleaved; norms and activation recomputed",
}


def table(result: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    counts = sorted(result["microbatches"].items(), key=lambda item: int(item[0]))
    each = ((count, what, found["modes"].get(mode, {})) for count, found in counts for mode, what in WHAT.items())
    head = ("microbatches", "", "step per microbatch", "temporary device memory", "model FLOP utilisation")
    return markdown(head, *([count, what, *cells(of)] for count, what, of in each if "ms" in of))


if __name__ == "__main__":
    options = parse()
    bench.prepare(options.attention, options.grouped)
    print(table(bench.main("accumulate", options, groups, ratios, shape=shape_of(options))))
