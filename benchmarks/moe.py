r"""Mixture-of-experts layers: saving, recomputing and offloading the same residuals, with plain JAX and with ours.

    python -m benchmarks.moe [--out benchmarks/results/moe.json]              # Mixtral's shapes: 8 experts, 2 per token
    python -m benchmarks.moe --experts 64 --experts_per_token 8 --d_model 2048 --d_expert 768 --layers 12 \
        --out benchmarks/results/moe-small-experts.json                       # Qwen3's, with 64 of its 128 experts
"""

import argparse

from benchmarks import dense
from benchmarks.cases import Case, best
from models.moe import Exchange, Routing

GATE, UP, INPUT, CONTEXT, KV = "moe/fc1.gate ", "moe/fc1.up ", "moe/fc1_input ", "attn/context ", "attn/k attn/v "


CASE = Case(
    program="moe",
    names=("layer_input", "moe/fc1.gate"),
    all_names=(
        *("layer_input", "attn/norm", "attn/q", "attn/k", "attn/v", "attn/context", "attn/out"),
        *("mlp_input", "moe/norm", "moe/router_logits", "moe/fc1_input", "moe/fc1.gate", "moe/fc1.up", "moe/act"),
    ),
    always=tuple(f"moe/routing.{field}" for field in (*Routing._fields, *Exchange._fields)),
    fc1=("moe/fc1.gate", "moe/fc1.up"),
    best={
        "gate moved": best(GATE),
        "gate and context moved": best(GATE + CONTEXT),
        "gate and context moved, k and v kept": best(GATE + CONTEXT, KV),
        "gate, context, q and mlp_input moved, k and v kept": best(GATE + CONTEXT + "attn/q mlp_input", KV),
        "fc1 and context moved": best(GATE + UP + CONTEXT),
        "fc1, fc1_input and context moved": best(GATE + UP + INPUT + CONTEXT),
        "fc1, context, q and mlp_input moved, k and v kept": best(GATE + UP + CONTEXT + "attn/q mlp_input", KV),
    },
    fields={"rope_theta": 1e6},
)
CASES = {"dense": dense.CASE, "moe": CASE}


def parse() -> argparse.Namespace:
    return dense.parse(CASE, __doc__, layers=4)


if __name__ == "__main__":
    dense.main(CASE, parse())
