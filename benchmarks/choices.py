"""Time and memory of two design choices of the MoE layer: where the routing weights multiply, and whether gate and up
are one grouped GEMM.

    python -m benchmarks.choices [--out benchmarks/results/choices.json] [--rows 32768 --d_model 4096 --d_expert 14336]

Each alternative runs the forward and backward pass of one layer's experts in bf16, and saves all residuals unless its
name says otherwise.
"""

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxoffload
from benchmarks import bench, grouped
from jaxoffload import Policy, checkpoint, tag
from jaxoffload.grouped import grouped_matmul
from models.mlp import activate

SIZES = {"rows": 32768, "d_model": 4096, "d_expert": 14336, "experts": 8, "backend": "mosaic"}
MERGED = "gate and up in one product"  # its halves are copied, because a leaf is contiguous
CHOICES = ("weights on act", "weights on fc2, kept", "weights on fc2, recomputed", MERGED)  # the layer has the first


def parse() -> argparse.Namespace:
    return bench.parser(__doc__, "choices", rounds=15, **SIZES).parse_args()


def groups(options: argparse.Namespace) -> list[bench.Group]:
    steps = {(choice, ""): step_of(choice, options) for choice in CHOICES}
    return [bench.Group((), steps, 18 * options.rows * options.d_model * options.d_expert)]


def ratios(modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    return bench.ratios(modes, [(choice, CHOICES[0]) for choice in CHOICES[1:]])


def step_of(choice: str, options: argparse.Namespace) -> bench.Step:
    """Return one choice, compiled, with the GiB that it keeps for the backward pass."""
    layer, initial = experts(choice, options.backend), jax.jit(functools.partial(operands, options, choice))
    loss = lambda *args: jnp.sum(layer(*args).astype(jnp.float32))
    kept = jaxoffload.residuals(loss, *jax.eval_shape(initial)[:-1]).device_bytes
    return grouped.step_of(layer, initial, kept_gib=round(kept / bench.GIB, 4))


def operands(options: argparse.Namespace, choice: str) -> tuple[Any, ...]:
    """Return rows, a weight per row, the experts' matrices, group sizes and the cotangent of the result."""
    R, D, F, E = options.rows, options.d_model, options.d_expert, options.experts
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    w = {"gate": normal(0, E, D, F) / math.sqrt(D), "up": normal(1, E, D, F) / math.sqrt(D)}
    w = {"gate and up": jnp.concatenate([w["gate"], w["up"]], axis=2)} if choice == MERGED else w
    w["down"] = normal(2, E, F, D) / math.sqrt(F)
    sizes = jnp.asarray(grouped.divisions(R, E)["falling"])
    return normal(3, R, D), jax.nn.sigmoid(normal(4, R, 1).astype(jnp.float32)), w, sizes, normal(5, R, D)


def experts(choice: str, backend: str) -> Callable[..., Any]:
    """Return (rows, weight per row, matrices, group sizes) -> the experts' output rows, as `models.moe` computes it."""

    def weighted(rows: Any, weight: Any) -> Any:
        return (rows.astype(jnp.float32) * weight).astype(rows.dtype)

    def run(x_RxD: Any, weight_Rx1: Any, w: Any, sizes_E: Any) -> Any:
        matmul = functools.partial(grouped_matmul, group_sizes=sizes_E, backend=backend, full=True)
        if choice == MERGED:
            gate_RxF, up_RxF = jnp.split(matmul(x_RxD, w["gate and up"], name="fc1_input"), 2, axis=1)
        else:
            gate_RxF, up_RxF = matmul(x_RxD, [w["gate"], w["up"]], name="fc1_input")
        act_RxF = activate(tag({"gate": gate_RxF, "up": up_RxF}, "fc1"), "swiglu")
        if "fc2" not in choice:
            return tag(matmul(weighted(act_RxF, weight_Rx1), w["down"], name="act"), "fc2")
        return weighted(tag(matmul(act_RxF, w["down"], name="act"), "fc2"), weight_Rx1)

    fc2 = "recompute" if "recomputed" in choice else "save"
    return checkpoint(run, policy=Policy({"fc1_input": "save", "fc1": "save", "act": "save", "fc2": fc2}))


if __name__ == "__main__":
    options = parse()
    bench.prepare(options.backend)
    bench.main("choices", options, groups, ratios, shape={name: getattr(options, name) for name in SIZES})
