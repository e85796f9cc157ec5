"""Llama-3-8B-shaped layers: saving, recomputing and offloading the same residuals, with plain JAX and with ours.

    python -m benchmarks.dense [--out benchmarks/results/dense.json] [--layers 16 --batch 2 --seq 8192] [--commit ID]
    python -m benchmarks.dense --d_model 8192 --layers 10 --batch 1 --out benchmarks/results/dense-70b.json
    python -m benchmarks.dense --fsdp 2 --modes remat saved jax_offload ours --out benchmarks/results/dense-fsdp.json

`benchmarks.peers` says what a step and a mode are, and what is written.
"""

import argparse
from typing import Any

from benchmarks.cases import Case, attention_costs, best, layers_of
from benchmarks.peers import main, markdown, percent
from models.config import Model

GATE, UP, CONTEXT, KV = "mlp/fc1.gate ", "mlp/fc1.up ", "attn/context ", "attn/k attn/v "


def model(options: argparse.Namespace) -> Model:
    """Return the shape of Llama 3's layer: 8B's by default, 70B's with `--d_model 8192`."""
    D = options.d_model
    return Model(
        layers=options.layers,
        d_model=D,
        heads=D // options.head_dim,
        kv_heads=options.kv_heads,
        d_ff=D * 7 // 2,
        rope_theta=500000.0,
        attention=options.attention,
    )


def costs(options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    shape, tokens = model(options), options.batch * options.seq
    half = (2 * tokens * shape.d_model * shape.d_ff, 2 * tokens * shape.d_ff)
    return attention_costs(shape, tokens) | {"mlp/fc1.gate": half, "mlp/fc1.up": half}


CASE = Case(
    program="dense",
    description=__doc__,
    names=("layer_input", "mlp/fc1.gate"),
    all_names=(
        *("layer_input", "attn/norm", "attn/q", "attn/k", "attn/v", "attn/context", "attn/out"),
        *("mlp_input", "mlp/norm", "mlp/fc1.gate", "mlp/fc1.up", "mlp/act"),
    ),
    always=(),
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
    model=model,
    costs=costs,
    shape=lambda options: {**layers_of(options), "d_ff": model(options).d_ff},
)

# ----------------------------------------------------------------------------------------------- the table in the docs

WHAT = {
    "ours_saved_all": "**jaxoffload**, nothing recomputed",
    "saved_all": "JAX, all names saved; attention runs again",
    "saved": "JAX, the two residuals saved, the rest recomputed",
    "remat": "JAX, everything recomputed",
    "jax_offload": "JAX, the two residuals offloaded, XLA's defaults",
    "jax_offload_tuned": "JAX, the two residuals offloaded, the best options found",
    "ours": "**jaxoffload**, the two residuals offloaded",
    "ours_best": "**jaxoffload**, as much as fits in the memory that full recomputation takes",
}


def table(result: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    modes = result["modes"]
    rows = [("", "step", "temporary device memory", "model FLOP utilisation")]
    for mode, what in WHAT.items():
        if m := modes.get(mode):
            rows.append((what, f"{m['step_ms']:.0f} ms", f"{m['temp_gib']:.1f} GiB", percent(m["mfu"])))
    return markdown(*rows)


if __name__ == "__main__":
    if (result := main(CASE)) is not None:
        print(table(result))
