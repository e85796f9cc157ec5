"""Llama-3-8B-shaped layers: saving, recomputing and offloading the same residuals, with plain JAX and with ours.

python -m benchmarks.dense [--out benchmarks/results/dense.json] [--layers 16 --batch 2 --seq 8192] [--commit ID]
python -m benchmarks.dense --d_model 8192 --layers 10 --batch 1 --out benchmarks/results/dense-70b.json
python -m benchmarks.dense --fsdp 2 --modes remat saved jax_offload ours --out benchmarks/results/dense-fsdp.json
"""

import argparse
from typing import Any

from benchmarks import bench
from benchmarks.bench import Variant, cells, markdown
from benchmarks.cases import OVERLAP, PIPELINED, SIZES, Case, best, group_of, ours, shape_of

GATE, UP, CONTEXT, KV = "mlp/fc1.gate ", "mlp/fc1.up ", "attn/context ", "attn/k attn/v "


CASE = Case(
    program="dense",
    names=("layer_input", "mlp/fc1.gate"),
    all_names=(
        *("layer_input", "attn/norm", "attn/q", "attn/k", "attn/v", "attn/context", "attn/out"),
        *("mlp_input", "mlp/norm", "mlp/fc1.gate", "mlp/fc1.up", "mlp/act"),
    ),
    always=(),
    fc1=("mlp/fc1.gate", "mlp/fc1.up"),
    best={
        "gate moved": best(GATE),
        "gate moved, k and v kept": best(GATE, KV),
        "gate and context moved": best(GATE + CONTEXT),
        "gate and context moved, 3 resident layers": best(GATE + CONTEXT, resident_layers=3),
        "gate and context moved, k and v kept": best(GATE + CONTEXT, KV),
        "context, q and mlp_input moved, k and v kept": best(CONTEXT + "attn/q mlp_input", KV),
        "gate, context and q moved, k and v kept": best(GATE + CONTEXT + "attn/q", KV),
        "gate, context, q and mlp_input moved, k and v kept": best(GATE + CONTEXT + "attn/q mlp_input", KV),
        "gate, up and context moved, late": best(GATE + UP + CONTEXT, copy_ms=30),
        "gate, up, context and mlp_input moved, late": best(GATE + UP + CONTEXT + "mlp_input", copy_ms=30),
        "gate, up, context and mlp_input moved, k and v kept": best(GATE + UP + CONTEXT + "mlp_input", KV),
        "gate, up, context, mlp_input and q moved, k and v kept": best(GATE + UP + CONTEXT + "mlp_input attn/q", KV),
    },
    fields={"experts": 0, "rope_theta": 500000.0},
)


def modes_of(case: Case) -> dict[str, dict[str, Variant]]:
    """Return mode -> name -> variant. Of JAX's own there is each set of XLA's options, with barriers and without."""
    save, offload = dict.fromkeys(case.names, "save"), dict.fromkeys(case.names, "offload")
    save_all = dict.fromkeys(case.all_names, "save")

    def jax(residuals: dict[str, str], **options: dict[str, Any]) -> dict[str, Variant]:
        of = {name.replace("_", " "): xla for name, xla in options.items()}
        peers = {"": "jax", " no barriers": "jax in scan"}
        return {name + end: Variant(peer, residuals, xla) for name, xla in of.items() for end, peer in peers.items()}

    return {
        "remat": jax({}, defaults={}, overlap=OVERLAP),
        "saved": jax(save, defaults={}, overlap=OVERLAP),
        "saved_all": {
            "no checkpoint": Variant("no remat", {}, {}),
            "all names": Variant("jax in scan", save_all, {}),
            "all names, overlap": Variant("jax in scan", save_all, OVERLAP),
        },
        "jax_offload": {"defaults": Variant("jax", offload, {})},
        "jax_offload_tuned": jax(offload, overlap=OVERLAP, overlap_and_pipelined=PIPELINED),
        "ours": {"overlap": ours(offload)},
        "ours_saved": {"overlap": ours(save)},
        "ours_saved_context": {"overlap": ours(save | {"attn/context": "save"})},
        "ours_saved_all": {"defaults": ours(save_all, {}), "overlap": ours(save_all)},
        "ours_best": case.best,
    }


def parse(case: Case = CASE, description: str | None = __doc__, **sizes: int) -> argparse.Namespace:
    more = {"modes": [*modes_of(case)], "variants": [], "profile": ["ours", "ours_best"]}
    return bench.parser(description, case.program, **SIZES | sizes, **more).parse_args()


def main(case: Case, options: argparse.Namespace) -> None:
    bench.prepare(options.attention, options.grouped)
    groups = lambda options: [group_of(case, options, bench.chosen(modes_of(case), options))]
    print(table(bench.main(case.program, options, groups, ratios, shape=shape_of(options), residuals=case.names)))


RATIOS = (
    *(("ours", "saved"), ("remat", "ours"), ("remat", "ours_best"), ("ours_best", "remat"), ("remat", "saved")),
    *(("jax_offload", other) for other in ("ours", "saved", "remat")),
    *(("jax_offload_tuned", other) for other in ("ours", "saved", "remat")),
)


def ratios(modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Return `bench.ratios`, and the device memory that offload frees by what is predicted: the stacks less two rows,
    because at the peak one layer reads its row while the next row arrives."""
    found = bench.ratios(modes, RATIOS, "ours_best", "remat", ("saved_all", "ours_saved_all"))
    moved, saved = (modes.get(mode, {}) for mode in ("ours", "ours_saved"))
    if moved.get("host_gib") and "temp_gib" in moved.keys() & saved.keys():
        predicted = moved["host_gib"] * (1 - 2 / options.layers)
        found["freed/predicted by temp_gib"] = round((saved["temp_gib"] - moved["temp_gib"]) / predicted, 4)
    return found


WHAT = {
    "ours_saved_all": "**jaxoffload**, nothing recomputed",
    "saved_all": "JAX, all names saved; attention runs again",
    "saved": "JAX, the two residuals saved, the rest recomputed",
    "remat": "JAX, everything recomputed",
    "jax_offload": "JAX, the two residuals offloaded, XLA's defaults",
    "jax_offload_tuned": "JAX, the two residuals offloaded, the best options found",
    "ours": "**jaxoffload**, the two residuals offloaded, the rest recomputed",
    "ours_best": "**jaxoffload**, as much as fits in the memory that full recomputation takes",
}


def table(result: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    ran = {mode: of for mode, of in result["modes"].items() if "step_ms" in of}
    head = ("", "step", "temporary device memory", "model FLOP utilisation")
    return markdown(head, *([what, *cells(ran[mode])] for mode, what in WHAT.items() if mode in ran))


if __name__ == "__main__":
    main(CASE, parse())
