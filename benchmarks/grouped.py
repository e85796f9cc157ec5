"""Grouped GEMMs: `jaxoffload.grouped.grouped_matmul` with each backend, and the same kernels without it, against one
dense GEMM of as many FLOPs.

    python -m benchmarks.grouped [--out benchmarks/results/grouped.json] [--rows 16384 --d_in 4096 --d_out 14336]

Forward and backward pass (dx, dw) in bf16. All contenders run in one process, interleaved, because the clock of a GPU
under load drifts by more than some of them differ. This repeats for each way to divide the rows among the groups.
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

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers, streams
from jaxoffload.grouped import grouped_matmul, mosaic

# "full": `grouped_matmul(full=True)`. "stock": the kernels without `grouped_matmul`, which by default also defines the
# rows past all groups.
KINDS = ("te", "te, full", "te, stock", "mosaic", "mosaic, full", "mosaic, stock", "ragged")


def main() -> None:
    options = parse()
    # TransformerEngine wants to be imported before JAX's first computation. Without it, its lines say "cannot".
    with contextlib.suppress(ImportError, OSError, RuntimeError, AttributeError):
        importlib.import_module("transformer_engine.jax")
    M, K, N, G = options.rows, options.d_in, options.d_out, options.groups
    x, dy = (jax.random.normal(jax.random.key(i), (M, width), jnp.bfloat16) for i, width in enumerate((K, N)))
    w = jax.random.normal(jax.random.key(2), (G, K, N), jnp.bfloat16) * K**-0.5
    lines = []
    for division, sizes in divisions(M, G).items():
        runs, failed = compile_all(x, w, dy, jnp.asarray(sizes))
        lines += [{"backend": kind, "groups": division, "cannot": why} for kind, why in failed.items()]
        times = interleaved(runs, options.rounds)
        ms = {kind: statistics.median(each) for kind, each in times.items()}
        for kind, run in runs.items():
            line = {"backend": kind, "groups": division, **timing(times[kind], 6 * M * K * N)}
            lines.append(line | speedups(kind, ms) | {"kernels": kernel_ms(run)})
    shape = {"rows": M, "d_in": K, "d_out": N, "groups": G, "dtype": "bfloat16"}
    write("grouped", options, shape, lines)


def compile_all(x: Any, w: Any, dy: Any, sizes: Any) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return kind -> a function that runs it, and kind -> why it cannot run here."""
    runs, failed = {"dense": compiled(lambda x, w, sizes: x @ w, x, w[0], dy, sizes)}, {}
    for kind in KINDS:
        try:
            runs[kind] = compiled(matmul_of(kind), x, w, dy, sizes)
        except Exception as error:  # each backend raises its own
            failed[kind] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return runs, failed


def write(program: str, options: argparse.Namespace, shape: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Write the results to `--out`, and print the lines."""
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
    """Return a parser of the arguments that `grouped` and `choices` share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{program}.json"))
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds in which every contender runs")
    parser.add_argument("--commit", default=peers.head(), help="the commit to record")
    return parser


def divisions(rows: int, groups: int) -> dict[str, np.ndarray]:
    """Return name -> group sizes, int32: all equal; each a quarter less than the one before; one empty, one with half
    of the rows."""
    falling = 0.75 ** np.arange(groups)
    skewed = np.zeros(groups)
    skewed[0], skewed[2:] = 0.5, 0.5 / (groups - 2)
    shares = {"even": np.ones(groups) / groups, "falling": falling / falling.sum(), "skewed": skewed}
    return {name: _whole(share, rows) for name, share in shares.items()}


def _whole(shares: np.ndarray, rows: int) -> np.ndarray:
    sizes = np.floor(shares * rows).astype(np.int32)
    sizes[0] += rows - sizes.sum()
    return sizes


def matmul_of(kind: str) -> Callable[..., Any]:
    """Return (x, w, group_sizes) -> y."""
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


def compiled(matmul: Callable[..., Any], x: Any, w: Any, dy: Any, sizes: Any) -> Callable[[], Any]:
    """Return a function that runs the forward and the backward pass, after it has run once."""

    def both(x: Any, w: Any, dy: Any, sizes: Any) -> Any:
        y, vjp = jax.vjp(lambda x, w: matmul(x, w, sizes), x, w)
        return y, vjp(dy)

    run = jax.jit(both).lower(x, w, dy, sizes).compile()
    jax.block_until_ready(run(x, w, dy, sizes))
    return lambda: jax.block_until_ready(run(x, w, dy, sizes))


def interleaved(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the times of each contender in milliseconds.

    Every round runs all contenders in a new random order. Each runs three times in a row, and the first is not timed.
    """
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for kind in shuffled.sample(list(runs), len(runs)):
            for repetition in range(3):
                begin = time.perf_counter()
                runs[kind]()
                if repetition:
                    times[kind].append(1e3 * (time.perf_counter() - begin))
    return times


def timing(times: list[float], flops: int) -> dict[str, Any]:
    """Return the median in milliseconds, the middle half of the times, and TFLOP/s."""
    first, ms, third = statistics.quantiles(times, n=4)
    spread = [round(first, 3), round(third, 3)]
    return {"ms": round(ms, 3), "middle half": spread, "tflops": round(flops / ms / 1e9, 1)}


def speedups(kind: str, ms: dict[str, float]) -> dict[str, float]:
    """Return the speed as a share of the dense GEMM's and of the stock kernels'."""
    found = {"of dense": round(ms["dense"] / ms[kind], 4)}
    stock = f"{kind.partition(',')[0]}, stock"
    if stock in ms and kind != stock:
        found["of stock"] = round(ms[stock] / ms[kind], 4)
    return found


def kernel_ms(run: Callable[[], Any]) -> dict[str, float]:
    """Return kernel -> milliseconds in one forward and backward pass."""
    gpus = streams.traced(run)
    return {kernel: ms for events in gpus.values() for kernel, ms in streams.by_kernel(events).items()}


if __name__ == "__main__":
    main()
