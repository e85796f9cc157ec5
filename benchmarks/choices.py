"""Time and memory of two design choices of the MoE layer: where the routing weights multiply, and whether gate and up
are one grouped GEMM.

    python -m benchmarks.choices [--out benchmarks/results/choices.json] [--rows 32768 --d_model 4096 --d_expert 14336]

Each alternative runs the forward and backward pass of one layer's experts in bf16, and saves all residuals unless its
name says otherwise. All run in one process, interleaved.
"""

import argparse
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxoffload
from benchmarks import grouped
from benchmarks.steps import planned_gib
from jaxoffload import Policy, checkpoint, tag
from jaxoffload.grouped import grouped_matmul
from models.moe import activate

MERGED = "gate and up in one product"  # its halves are copied, because a leaf is contiguous
CHOICES = ("weights on act", "weights on fc2, kept", "weights on fc2, recomputed", MERGED)  # the layer has the first


def main() -> None:
    options = parse()
    if options.backend == "te":  # TransformerEngine must be imported before JAX's first computation
        importlib.import_module("transformer_engine.jax")
    runs, memory = {}, {}
    for choice in CHOICES:
        runs[choice], memory[choice] = prepared(choice, options)
    flops = 18 * options.rows * options.d_model * options.d_expert
    times = grouped.interleaved(runs, options.rounds)
    lines = [{"choice": choice} | grouped.timing(times[choice], flops) | memory[choice] for choice in CHOICES]
    shape = {name: getattr(options, name) for name in ("rows", "d_model", "d_expert", "experts", "backend")}
    grouped.write("choices", options, shape, lines)


def parse() -> argparse.Namespace:
    parser = grouped.arguments(__doc__, "choices", rows=32768, rounds=15)
    parser.add_argument("--d_model", type=int, default=4096)
    parser.add_argument("--d_expert", type=int, default=14336)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--backend", default="mosaic", choices=("te", "mosaic", "ragged"))
    return parser.parse_args()


def prepared(choice: str, options: argparse.Namespace) -> tuple[Callable[[], Any], dict[str, float]]:
    """Return a function that runs one choice, compiled, and the GiB that it needs."""
    layer = experts(choice, options.backend)
    args = jax.jit(functools.partial(operands, options, choice))()
    compiled = jax.jit(forward_and_backward(layer)).lower(*args).compile()
    loss = lambda *args: jnp.sum(layer(*args).astype(jnp.float32))
    saved_bytes = jaxoffload.residuals(loss, *args[:-1]).device_bytes
    memory = {"kept_gib": round(saved_bytes / 2**30, 4)}
    if planned := planned_gib(compiled):
        memory["temp_gib"] = planned["temp_gib"]
    return lambda: jax.block_until_ready(compiled(*args)), memory


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


def forward_and_backward(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, weight: Any, w: Any, sizes: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(lambda x, weight, w: f(x, weight, w, sizes), x, weight, w)
        return y, vjp(dy)

    return run


if __name__ == "__main__":
    main()
