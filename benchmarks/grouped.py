"""Grouped GEMMs: `jaxoffload.grouped_matmul` with each backend, and the same kernels as others give them to users,
against one dense GEMM of the same FLOPs.

    python -m benchmarks.grouped [--out benchmarks/results/grouped.json] [--rows 16384 --d_in 4096 --d_out 14336]

Forward and backward (dx, dw), bf16, in one process; for each way to divide the rows among the groups, the contenders by
turns, as the clock of a GPU under load drifts by more than some of them differ.
"""

import argparse
import contextlib
import importlib
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers, streams

# "full": `grouped_matmul(full=True)`. "stock": without `grouped_matmul`, which by default says of the rows past all
# groups what they are.
KINDS = ("te", "te, full", "te, stock", "mosaic", "mosaic, full", "mosaic, stock", "ragged")


def main() -> None:
    options = parse()
    with contextlib.suppress(ImportError, OSError, RuntimeError, AttributeError):  # "cannot", below
        importlib.import_module("transformer_engine.jax")
    import jax
    import jax.numpy as jnp

    M, K, N, G = options.rows, options.d_in, options.d_out, options.groups
    x, dy = (jax.random.normal(jax.random.key(i), (M, width), jnp.bfloat16) for i, width in enumerate((K, N)))
    w = jax.random.normal(jax.random.key(2), (G, K, N), jnp.bfloat16) * K**-0.5
    lines = []
    for division, sizes in divisions(M, G).items():
        runs: dict[str, Any] = {"dense": compiled(lambda x, w, sizes: x @ w, x, w[0], dy, jnp.asarray(sizes))}
        for kind in KINDS:
            try:
                runs[kind] = compiled(product_of(kind), x, w, dy, jnp.asarray(sizes))
            except Exception as cannot:  # whatever a kernel says of this machine
                why = f"{type(cannot).__name__}: {cannot}".partition("\n")[0]
                lines.append({"backend": kind, "groups": division, "cannot": why})
        spent = by_turns(runs, options.rounds)
        ms = {kind: statistics.median(times) for kind, times in spent.items()}
        for kind, times in spent.items():
            line = {"backend": kind, "groups": division, **line_of(times, 6 * M * K * N)}
            line["of dense"] = round(ms["dense"] / ms[kind], 4)
            stock = f"{kind.partition(',')[0]}, stock"
            if stock in ms and kind != stock:
                line["of stock"] = round(ms[stock] / ms[kind], 4)
            lines.append(line | {"kernels": kernels_of(runs[kind])})
    shape = {"rows": M, "d_in": K, "d_out": N, "groups": G, "dtype": "bfloat16"}
    write("grouped", options, shape, lines)


def write(program: str, options: argparse.Namespace, shape: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """To `--out`, and the lines to the terminal."""
    result = {**peers.provenance(program, options.commit), "shape": shape, "lines": lines}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for line in lines:
        print(line)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "grouped", rows=16384, rounds=25)
    parser.add_argument("--d_in", type=int, default=4096)
    parser.add_argument("--d_out", type=int, default=14336)
    parser.add_argument("--groups", type=int, default=8)
    return parser.parse_args()


def arguments(description: str | None, program: str, rows: int, rounds: int) -> argparse.ArgumentParser:
    """Of what is measured by turns."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{program}.json"))
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each contender")
    parser.add_argument("--commit", default=peers.head(), help="recorded beside the numbers")
    return parser


def divisions(rows: int, groups: int) -> dict[str, np.ndarray]:
    """Sizes of the groups, int32: all equal; falling by a quarter from one to the next; one empty, one with half."""
    falling = 0.75 ** np.arange(groups)
    skewed = np.zeros(groups)
    skewed[0], skewed[2:] = 0.5, 0.5 / (groups - 2)
    shares = {"even": np.ones(groups) / groups, "falling": falling / falling.sum(), "skewed": skewed}
    return {name: _whole(share, rows) for name, share in shares.items()}


def _whole(shares: np.ndarray, rows: int) -> np.ndarray:
    sizes = np.floor(shares * rows).astype(np.int32)
    sizes[0] += rows - sizes.sum()
    return sizes


def product_of(kind: str) -> Callable[..., Any]:
    """(x, w, group_sizes) -> y."""
    import jax

    from jaxoffload import grouped_matmul
    from jaxoffload.grouped import mosaic

    if kind == "te, stock":
        dense = importlib.import_module("transformer_engine.jax.dense")
        return lambda x, w, sizes: dense.grouped_dense(x, w, sizes, contracting_dims=((1,), (1,)))
    if kind == "mosaic, stock":  # jax has the kernels, and no derivative
        product = jax.custom_vjp(mosaic.forward)
        product.defvjp(
            lambda *args: (mosaic.forward(*args), args),
            lambda kept, dy: (mosaic.dx(dy, *kept[1:]), mosaic.dw(kept[0], dy, kept[2]), None),
        )
        return product
    backend, _, full = kind.partition(", ")
    return lambda x, w, sizes: grouped_matmul(x, w, sizes, backend=backend, full=bool(full))


def compiled(product: Callable[..., Any], x: Any, w: Any, dy: Any, sizes: Any) -> Callable[[], Any]:
    """Runs a forward and backward pass."""
    import jax

    def both(x: Any, w: Any, dy: Any, sizes: Any) -> Any:
        y, back = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
        return y, back(dy)

    run = jax.jit(both).lower(x, w, dy, sizes).compile()
    jax.block_until_ready(run(x, w, dy, sizes))
    return lambda: jax.block_until_ready(run(x, w, dy, sizes))


def by_turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each, which runs three times in its turn, the first of them untimed; each round has another
    order."""
    spent: dict[str, list[float]] = {kind: [] for kind in runs}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for kind in shuffled.sample(list(runs), len(runs)):
            for number in range(3):
                begin = time.perf_counter()
                runs[kind]()
                if number:
                    spent[kind].append(1e3 * (time.perf_counter() - begin))
    return spent


def line_of(times: list[float], flops: int) -> dict[str, Any]:
    """Median milliseconds, the middle half of them, and TFLOP/s."""
    first, ms, third = statistics.quantiles(times, n=4)
    spread = [round(first, 3), round(third, 3)]
    return {"ms": round(ms, 3), "middle half": spread, "tflops": round(flops / ms / 1e9, 1)}


def kernels_of(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds by kernel, of one pass."""
    gpus = streams.traced(run)
    return {kernel: ms for events in gpus.values() for kernel, ms in streams.by_kernel(events).items()}


if __name__ == "__main__":
    main()
