"""Grouped GEMMs: `jaxoffload.grouped.grouped_matmul` with each backend, and the same kernels without it, against one
dense GEMM of as many FLOPs.

    python -m benchmarks.grouped [--out benchmarks/results/grouped.json] [--rows 16384 --d_in 4096 --d_out 14336]

Forward and backward pass (dx, dw) in bf16, for each way to divide the rows among the groups.
"""

import argparse
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import bench
from jaxoffload.grouped import grouped_matmul, mosaic

# "full": `grouped_matmul(full=True)`. "stock": the kernels without `grouped_matmul`, which by default also defines the
# rows past all groups.
SIZES = {"rows": 16384, "d_in": 4096, "d_out": 14336, "groups": 8}
KINDS = ("dense", "te", "te, full", "te, stock", "mosaic", "mosaic, full", "mosaic, stock", "ragged")


def parse() -> argparse.Namespace:
    return bench.parser(__doc__, "grouped", rounds=25, **SIZES).parse_args()


def groups(options: argparse.Namespace) -> Iterator[bench.Group]:
    for division, sizes in divisions(options.rows, options.groups).items():
        initial = jax.jit(functools.partial(operands, options, sizes))
        steps = {(kind, ""): step_of(kind, jax.eval_shape(initial)) for kind in KINDS}
        flops = 6 * options.rows * options.d_in * options.d_out
        yield bench.Group(("groups", division), steps, initial, flops)


def ratios(modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Return the time as a share of the dense GEMM's and of the stock kernels'."""
    stock = lambda kind: f"{kind.partition(',')[0]}, stock"
    return bench.ratios(modes, [(kind, other) for kind in KINDS for other in ("dense", stock(kind)) if kind != other])


def divisions(rows: int, groups: int) -> dict[str, np.ndarray]:
    """Return name -> group sizes, int32: all equal; each a quarter less than the one before; one empty, one with half
    of the rows."""
    falling = 0.75 ** np.arange(groups)
    skewed = np.zeros(groups)
    skewed[0], skewed[2:] = 0.5, 0.5 / (groups - 2)
    shares = {"even": np.ones(groups) / groups, "falling": falling / falling.sum(), "skewed": skewed}
    sizes = {name: np.floor(share * rows).astype(np.int32) for name, share in shares.items()}
    for each in sizes.values():
        each[0] += rows - each.sum()
    return sizes


def operands(options: argparse.Namespace, sizes: np.ndarray) -> tuple[Any, ...]:
    """Return rows, a matrix for each group, the group sizes, and the cotangent of the result."""
    M, K, N, G = options.rows, options.d_in, options.d_out, options.groups
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    return normal(0, M, K), normal(1, G, K, N) * K**-0.5, jnp.asarray(sizes), normal(2, M, N)


def matmul_of(kind: str) -> Callable[..., Any]:
    """Return (x, w, group_sizes) -> y."""
    if kind == "dense":
        return lambda x, w, sizes: x @ w[0]
    if kind == "te, stock":
        dense = importlib.import_module("transformer_engine.jax.dense")
        return lambda x, w, sizes: dense.grouped_dense(x, w, sizes, contracting_dims=((1,), (1,)))
    if kind == "mosaic, stock":  # JAX has the kernels, but no derivative
        matmul = jax.custom_vjp(mosaic.forward)
        matmul.defvjp(
            lambda *args: (mosaic.forward(*args), args),
            lambda kept, dy: (mosaic.dx(dy, *kept[1:]), mosaic.dw(kept[0], dy, kept[2]), None),
        )
        return matmul
    backend, _, full = kind.partition(", ")
    return lambda x, w, sizes: grouped_matmul(x, w, sizes, backend=backend, full=bool(full))


def step_of(kind: str, avals: tuple[Any, ...]) -> bench.Step:
    """Return the compiled forward and backward pass."""

    def both(x: Any, w: Any, sizes: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(lambda x, w: matmul_of(kind)(x, w, sizes), x, w)
        return y, vjp(dy)

    def run(*operands: Any) -> Any:
        jax.block_until_ready(step.run(*operands))
        return operands

    try:
        step = bench.compiled(jax.jit(both).lower(*avals))
    except Exception as error:  # each backend raises its own
        return bench.Step(None, {"cannot": f"{type(error).__name__}: {error}".partition("\n")[0]})
    return step._replace(run=step.run and run)


if __name__ == "__main__":
    options = parse()
    with contextlib.suppress(ImportError, OSError, RuntimeError, AttributeError):  # then its steps say "cannot"
        bench.prepare("te")
    bench.main("grouped", options, groups, ratios, shape={name: getattr(options, name) for name in SIZES})
