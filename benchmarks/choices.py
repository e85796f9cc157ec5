"""What the layer with experts chose, against what it could have been: where the routing weights multiply, and whether
gate and up are one product.

    python -m benchmarks.choices [--out benchmarks/results/choices.json] [--rows 32768 --d_model 4096 --d_expert 14336]

The experts' part of one layer, forward and backward, all that its backward pass reads kept unless the name says
otherwise; bf16, in one process, by turns.
"""

import argparse
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

from benchmarks import grouped

MERGED = "gate and up in one product"  # whose halves are copied: a leaf is contiguous
CHOICES = ("weights on act", "weights on fc2, kept", "weights on fc2, recomputed", MERGED)  # the first is the layer's


def main() -> None:
    options = parse()
    if options.backend == "te":  # before JAX's first computation
        importlib.import_module("transformer_engine.jax")
    import jax
    import jax.numpy as jnp

    import jaxoffload

    runs, facts = {}, {}
    for choice in CHOICES:
        layer = experts(choice, options.backend)
        given = jax.jit(functools.partial(operands, options, choice))()
        run = jax.jit(both(layer)).lower(*given).compile()
        runs[choice] = functools.partial(lambda run, given: jax.block_until_ready(run(*given)), run, given)
        loss = lambda *args, layer=layer: jnp.sum(layer(*args).astype(jnp.float32))
        kept, memory = jaxoffload.residuals(loss, *given[:-1]).device_bytes, run.memory_analysis()
        facts[choice] = {
            "kept_gib": round(kept / 2**30, 4),
            "temp_gib": round(memory.temp_size_in_bytes / 2**30, 4),
        }
    flops = 18 * options.rows * options.d_model * options.d_expert
    spent = grouped.by_turns(runs, options.rounds)
    lines = [{"choice": choice} | grouped.line_of(spent[choice], flops) | facts[choice] for choice in CHOICES]
    shape = {name: getattr(options, name) for name in ("rows", "d_model", "d_expert", "experts", "backend")}
    grouped.write("choices", options, shape, lines)


def parse() -> argparse.Namespace:
    parser = grouped.arguments(__doc__, "choices", rows=32768, rounds=15)
    parser.add_argument("--d_model", type=int, default=4096)
    parser.add_argument("--d_expert", type=int, default=14336)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--backend", default="mosaic", choices=("te", "mosaic", "ragged"))
    return parser.parse_args()


def operands(options: argparse.Namespace, choice: str) -> tuple[Any, ...]:
    """Rows, each row's weight, matrices, group sizes and the result's cotangent."""
    import jax
    import jax.numpy as jnp

    R, D, F, E = options.rows, options.d_model, options.d_expert, options.experts
    normal = lambda number, *shape: jax.random.normal(jax.random.key(number), shape, jnp.bfloat16)
    w = {"gate": normal(0, E, D, F) / math.sqrt(D), "up": normal(1, E, D, F) / math.sqrt(D)}
    w = {"gate and up": jnp.concatenate([w["gate"], w["up"]], axis=2)} if choice == MERGED else w
    w["down"] = normal(2, E, F, D) / math.sqrt(F)
    sizes = jnp.asarray(grouped.divisions(R, E)["falling"])
    return normal(3, R, D), jax.nn.sigmoid(normal(4, R, 1).astype(jnp.float32)), w, sizes, normal(5, R, D)


def experts(choice: str, backend: str) -> Callable[..., Any]:
    """(rows, weights, matrices, group sizes) -> the experts' rows, as `models.moe` computes them."""
    import jax.numpy as jnp

    from jaxoffload import Policy, checkpoint, grouped_matmul, tag
    from models.mlp import activate

    def weighted(rows: Any, weight: Any) -> Any:
        return (rows.astype(jnp.float32) * weight).astype(rows.dtype)

    def run(x_RxD: Any, weight_Rx1: Any, w: Any, sizes_E: Any) -> Any:
        product = functools.partial(grouped_matmul, group_sizes=sizes_E, backend=backend, full=True)
        if choice == MERGED:
            gate_RxF, up_RxF = jnp.split(product(x_RxD, w["gate and up"], name="fc1_input"), 2, axis=1)
        else:
            gate_RxF, up_RxF = product(x_RxD, [w["gate"], w["up"]], name="fc1_input")
        act_RxF = activate(tag({"gate": gate_RxF, "up": up_RxF}, "fc1"), "swiglu")
        if "fc2" not in choice:
            return tag(product(weighted(act_RxF, weight_Rx1), w["down"], name="act"), "fc2")
        return weighted(tag(product(act_RxF, w["down"], name="act"), "fc2"), weight_Rx1)

    fc2 = "recompute" if "recomputed" in choice else "save"
    return checkpoint(run, policy=Policy({"fc1_input": "save", "fc1": "save", "act": "save", "fc2": fc2}))


def both(f: Callable[..., Any]) -> Callable[..., Any]:
    """The forward and the backward pass."""
    import jax

    def run(x: Any, weight: Any, w: Any, sizes: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda x, weight, w: f(x, weight, w, sizes), x, weight, w)
        return y, pull(dy)

    return run


if __name__ == "__main__":
    main()
