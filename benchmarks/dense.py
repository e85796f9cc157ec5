"""Llama-3-8B-shaped layers: saving, recomputing and offloading the same residuals, with plain JAX and with ours.

    python -m benchmarks.dense [--out benchmarks/results/dense.json] [--layers 16 --batch 2 --seq 8192] [--commit ID]

A step is the forward and backward pass of a stack of `models.transformer.Layer`, bf16 on float32 weights, and SGD in
place. All modes are timed in one process, in turn, so that they share the machine's state; each peer that has options
of its own is timed under all of them, and the fastest counts. Then each mode runs in a process of its own for its peak
memory. The parent never touches the GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("layer_input", "mlp/fc1.gate")

# XLA's options of each peer. "jax_offload" is what one gets; "jax_offload_tuned" the best found for plain JAX. "ours"
# is `jaxoffload.scan` with `compiler_options()`, which are the overlapping ones, and without.
_OVERLAP = {
    "xla_gpu_enable_command_buffer": "",
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_latency_hiding_scheduler": True,
}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "saved": {"defaults": {}, "overlap": _OVERLAP},
    "remat": {"defaults": {}, "overlap": _OVERLAP},
    "jax_offload": {"defaults": {}},
    "jax_offload_tuned": {
        "overlap": _OVERLAP,
        "overlap and pipelined": {**_OVERLAP, "xla_gpu_enable_pipelined_host_offloading": True},
    },
}
OPTIONS["ours"] = {"overlap": _OVERLAP, "defaults": {}}
RATIOS = (
    ("ours", "saved"),
    ("remat", "ours"),
    ("jax_offload", "ours"),
    ("jax_offload_tuned", "ours"),
    ("remat", "saved"),
    ("jax_offload", "saved"),
    ("jax_offload", "remat"),
    ("jax_offload_tuned", "saved"),
    ("jax_offload_tuned", "remat"),
)


def main() -> None:
    options = parse()
    if options.worker:
        print(json.dumps(WORKERS[options.worker](options)))
        return
    with tempfile.TemporaryDirectory() as cache:  # compiled once, by the timing process
        timed = worker(options, "times", cache)
        for mode, result in timed["modes"].items():
            result |= worker(options, "peak", cache, mode, result["options"])
    step = {mode: result["step_ms"] for mode, result in timed["modes"].items()}
    timed["ratios"] = {f"{a}/{b}": round(step[a] / step[b], 4) for a, b in RATIOS}
    options.out.write_text(json.dumps(timed, indent=1) + "\n")
    print(table(timed))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/dense.json"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--d_model", type=int, default=4096)
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "xla"))
    parser.add_argument("--rounds", type=int, default=4, help="times each mode's turn comes")
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--commit", default=head(), help="recorded beside the numbers")
    parser.add_argument("--worker", choices=("times", "peak"), help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=OPTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    return parser.parse_args()


def head() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def worker(options: argparse.Namespace, what: str, cache: str, mode: str = "", variant: str = "") -> dict[str, Any]:
    """What a fresh process of this program measures."""
    command = [sys.executable, "-m", "benchmarks.dense", *sys.argv[1:], "--worker", what]
    command += ["--mode", mode, "--variant", variant] if mode else []
    done = subprocess.run(command, env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"benchmarks.dense: {what} {mode} failed with exit status {done.returncode}")
    return json.loads(done.stdout.decode().splitlines()[-1])


# ------------------------------------------------------------------------------------------------ in a worker


def times(options: argparse.Namespace) -> dict[str, Any]:
    """Step times of all modes under all their options, the fastest options' kept."""
    import jax

    compiled, facts = {}, {}
    state = initial(options)
    for mode, variants in OPTIONS.items():
        for variant in variants:
            begin = time.perf_counter()
            compiled[mode, variant] = compile_step(options, mode, variant)
            seconds = time.perf_counter() - begin
            memory = compiled[mode, variant].memory_analysis()
            facts[mode, variant] = {
                "options": variant,
                "compile_s": round(seconds, 2),
                "temp_gib": round(memory.temp_size_in_bytes / 2**30, 4),
                "host_temp_gib": round(memory.host_temp_size_in_bytes / 2**30, 4),
            }
    spent: dict[Any, list[float]] = {key: [] for key in compiled}
    for turn in range(1 + options.rounds):  # the first turn warms up: pinned memory, autotuning, clocks
        for key, step in compiled.items():
            state = jax.block_until_ready(step(*state))
            for _ in range(options.steps):
                begin = time.perf_counter()
                state = jax.block_until_ready(step(*state))
                if turn:
                    spent[key].append(1e3 * (time.perf_counter() - begin))
    modes = {}
    for mode, variants in OPTIONS.items():
        best = min(variants, key=lambda variant: statistics.median(spent[mode, variant]))
        step_ms = statistics.median(spent[mode, best])
        modes[mode] = {
            "step_ms": round(step_ms, 2),
            "spread_ms": [round(min(spent[mode, best]), 2), round(max(spent[mode, best]), 2)],
            "mfu": round(model_flops(options) / step_ms / 1e-3 / 989e12, 4),
            **facts[mode, best],
            "other_options_ms": {v: round(statistics.median(spent[mode, v]), 2) for v in variants if v != best},
        }
    return {**provenance(options), "modes": modes}


def peak(options: argparse.Namespace) -> dict[str, float]:
    """The peak of allocated device memory over three steps, in a process that did nothing else."""
    import jax

    step = compile_step(options, options.mode, options.variant)
    state = initial(options)
    for _ in range(3):
        state = step(*state)
    jax.block_until_ready(state)
    return {"peak_gib": round((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30, 4)}


WORKERS = {"times": times, "peak": peak}


def model(options: argparse.Namespace) -> Any:
    """Llama 3 8B's layer, as `models.config.Model`."""
    from models.config import Model

    D = options.d_model
    return Model(
        layers=options.layers,
        d_model=D,
        heads=D // 128,
        kv_heads=D // 512,
        d_ff=D * 7 // 2,
        rope_theta=500000.0,
        attention=options.attention,
    )


def model_flops(options: argparse.Namespace) -> int:
    """FLOPs of a step, forward and backward, causal attention counted, nothing recomputed counted."""
    from models.transformer import flops_per_token

    shape = model(options)
    unembedding = 6 * shape.vocab_size * shape.d_model  # this step has none
    return options.batch * options.seq * (flops_per_token(shape, options.seq) - unembedding)


def initial(options: argparse.Namespace) -> tuple[Any, Any]:
    """Stacked float32 weights and bf16 activations (batch, seq, d_model)."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from models.transformer import Layer, stacked

    shape = model(options)
    make = lambda: nnx.state(stacked(shape.layers, lambda rngs: Layer(shape, rngs), nnx.Rngs(params=0)))
    x = jax.random.normal(jax.random.key(1), (options.batch, options.seq, options.d_model), jnp.bfloat16)
    return jax.jit(make)(), x


def compile_step(options: argparse.Namespace, mode: str, variant: str) -> Any:
    """One training step, compiled: (weights, x) -> (weights, x), the weights updated in place."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jaxoffload
    from models.attention import rotations
    from models.transformer import Layer

    shape = model(options)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Layer(shape, nnx.Rngs(params=0))))
    rotation = rotations(options.seq, shape.d_head, shape.rope_theta)

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        return nnx.merge(graph, weights)(x, rotation), None

    def loss(weights: Any, x: Any) -> Any:
        if mode == "ours":
            y, _ = jaxoffload.scan(layer, x, weights, policy=jaxoffload.Policy(dict.fromkeys(NAMES, "offload")))
        else:
            y, _ = jax.lax.scan(jax.checkpoint(layer, policy=jax_policy(mode)), x, weights)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    def step(weights: Any, x: Any) -> tuple[Any, Any]:
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-4 * g, weights, gradients), x

    jitted = jax.jit(step, donate_argnums=0, compiler_options=OPTIONS[mode][variant])
    return jitted.lower(*jax.eval_shape(lambda: initial(options))).compile()


def jax_policy(mode: str) -> Any:
    """JAX's own policy of a mode; nothing of jaxoffload decides here."""
    from jax import checkpoint_policies as policies

    if mode == "remat":
        return policies.nothing_saveable
    if mode == "saved":
        return policies.save_only_these_names(*NAMES)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(NAMES),
        offload_src="device",
        offload_dst="pinned_host",
    )


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    import importlib.metadata

    import jax

    kept = ("jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cublas")
    versions = {p.name: p.version for p in importlib.metadata.distributions() if p.name in kept}
    shape = {key: getattr(options, key) for key in ("layers", "batch", "seq", "d_model", "attention")}
    return {
        "device": f"{jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        "versions": dict(sorted(versions.items())),
        "command": " ".join(["python -m benchmarks.dense", *sys.argv[1 : sys.argv.index("--worker")]]),
        "commit": options.commit,
        "shape": {**shape, "d_ff": model(options).d_ff, "residuals": list(NAMES), "dtype": "bfloat16 on float32"},
    }


# ------------------------------------------------------------------------------------------------ the README's table

WHAT = {
    "saved": "the two residuals saved, the rest recomputed",
    "remat": "everything recomputed",
    "jax_offload": "the two residuals offloaded, XLA's defaults",
    "jax_offload_tuned": "the two residuals offloaded, the best options found",
    "ours": "the two residuals offloaded by `jaxoffload.scan`, all layers but the last",
}


def table(result: dict[str, Any]) -> str:
    """Results as Markdown."""
    modes = result["modes"]
    lines = ["| plain JAX | step | device peak | model FLOP utilisation |", "|---|---|---|---|"]
    for mode, what in WHAT.items():
        m = modes[mode]
        lines.append(f"| {what} | {m['step_ms']:.0f} ms | {m['peak_gib']:.1f} GiB | {100 * m['mfu']:.1f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
