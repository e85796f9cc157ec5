"""Llama-3-8B-shaped layers: saving, recomputing and offloading the same residuals, with plain JAX and with ours.

    python -m benchmarks.dense [--out benchmarks/results/dense.json] [--layers 16 --batch 2 --seq 8192] [--commit ID]
    python -m benchmarks.dense --d_model 8192 --layers 6 --out benchmarks/results/dense-70b.json
    python -m benchmarks.dense --fsdp 2 --modes remat saved jax_offload ours --out benchmarks/results/dense-fsdp.json

A step is the forward and backward pass of a stack of `models.transformer.Layer`, bf16 on float32 weights, and SGD in
place. All modes are timed in one process, in turn, so that they share the machine's state; each peer that has options
of its own is timed under all of them, and the fastest counts. Then each mode runs in a process of its own for its peak
memory. The parent never touches the GPU.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import streams
from jaxoffload import compiler_options

NAMES = ("layer_input", "mlp/fc1.gate")
ALL_NAMES = (
    *("layer_input", "attn/norm", "attn/q", "attn/k", "attn/v", "attn/context", "attn/out"),
    *("mlp_input", "mlp/norm", "mlp/fc1.gate", "mlp/fc1.up", "mlp/act"),
)


class Variant(NamedTuple):
    """One way to run a mode: who keeps which residuals where, and XLA's options."""

    # "ours": jaxoffload.scan; "jax": lax.scan(jax.checkpoint(f)); "loop": the same with prevent_cse=False, as JAX
    # advises in a scan; "nobody": lax.scan(f)
    who: str
    residuals: dict[str, str]
    options: dict[str, Any]
    fields: tuple[tuple[str, Any], ...] = ()  # of the policy of "ours": others than its residuals


OVERLAP = compiler_options("gpu")
PIPELINED = {**OVERLAP, "xla_gpu_enable_pipelined_host_offloading": True}


def _each(residuals: dict[str, str], **variants: tuple[str, dict[str, Any]]) -> dict[str, Variant]:
    return {name.replace("_", " "): Variant(who, residuals, xla) for name, (who, xla) in variants.items()}


def _jax(residuals: dict[str, str], **options: dict[str, Any]) -> dict[str, Variant]:
    """With each of XLA's options, as `jax.checkpoint` is by default, and as JAX advises it in a scan."""
    hows = {"": "jax", "_no_barriers": "loop"}
    return _each(residuals, **{name + how: (who, xla) for name, xla in options.items() for how, who in hows.items()})


def _best(moved: str, kept: str = "", **fields: int) -> Variant:
    decisions = {
        "layer_input": "offload",
        **dict.fromkeys(moved.split(), "offload"),
        **dict.fromkeys(kept.split(), "save"),
    }
    return Variant("ours", decisions, OVERLAP, tuple(fields.items()))


_SAVE, _MOVE = dict.fromkeys(NAMES, "save"), dict.fromkeys(NAMES, "offload")
_ALL = dict.fromkeys(ALL_NAMES, "save")
_GATE, _UP, _CONTEXT, _KV = "mlp/fc1.gate ", "mlp/fc1.up ", "attn/context ", "attn/k attn/v "
_BEST = {
    "gate moved": _best(_GATE),
    "gate moved, k and v kept": _best(_GATE, _KV),
    "gate and context moved": _best(_GATE + _CONTEXT),
    "gate and context moved, 3 resident layers": _best(_GATE + _CONTEXT, resident_layers=3),
    "gate and context moved, k and v kept": _best(_GATE + _CONTEXT, _KV),
    "context, q and mlp_input moved, k and v kept": _best(_CONTEXT + "attn/q mlp_input", _KV),
    "gate, context and q moved, k and v kept": _best(_GATE + _CONTEXT + "attn/q", _KV),
    "gate, up, context and mlp_input moved, k and v kept": _best(_GATE + _UP + _CONTEXT + "mlp_input", _KV),
    "gate, up, context, mlp_input and q moved, k and v kept": _best(_GATE + _UP + _CONTEXT + "mlp_input attn/q", _KV),
}
# Of each mode the fastest variant counts; of ours_best, the fastest that needs no more memory than remat.
MODES: dict[str, dict[str, Variant]] = {
    "remat": _jax({}, defaults={}) | _each({}, overlap=("jax", OVERLAP)),
    "saved": _jax(_SAVE, defaults={}, overlap=OVERLAP),
    "saved_all": {
        "no checkpoint": Variant("nobody", {}, {}),
        "all names": Variant("loop", _ALL, {}),
    },
    "jax_offload": _each(_MOVE, defaults=("jax", {})),
    "jax_offload_tuned": _jax(_MOVE, overlap=OVERLAP, overlap_and_pipelined=PIPELINED),
    "ours": _each(_MOVE, overlap=("ours", OVERLAP)),
    "ours_saved": _each(_SAVE, overlap=("ours", OVERLAP)),
    "ours_saved_all": _each(_ALL, defaults=("ours", {}), overlap=("ours", OVERLAP)),
    "ours_best": _BEST,
}
RATIOS = (
    ("ours", "saved"),
    ("remat", "ours"),
    ("remat", "ours_best"),
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
        write(timed, options)
        for mode in options.fresh:
            timed["modes"][mode] |= worker(options, "peak", cache, mode, timed["modes"][mode]["options"])
            write(timed, options)
    print(table(timed))


def write(timed: dict[str, Any], options: argparse.Namespace) -> None:
    """What there is so far, with its ratios: a process that fails later takes nothing with it."""
    step = {mode: result["step_ms"] for mode, result in timed["modes"].items()}
    timed["ratios"] = {f"{a}/{b}": round(step[a] / step[b], 4) for a, b in RATIOS if {a, b} <= step.keys()}
    if {"remat", "saved", "saved_all", "ours", "ours_saved", "ours_saved_all", "ours_best"} <= step.keys():
        timed["ratios"] |= shares(timed["modes"], options)
    options.out.write_text(json.dumps(timed, indent=1) + "\n")


def shares(modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """`won_back`: of the time that recomputation costs, what offload wins back at no more memory; its limit is the
    bus's. `freed/predicted`: device bytes, against the twin that saves. `exposed`: copies that nothing hides."""
    ms = {mode: m["step_ms"] for mode, m in modes.items()}
    ours, twin = modes["ours"], modes["ours_saved"]
    won = ms["remat"] - ms["ours_best"]
    found = {
        # JAX's own policies cannot keep all of cuDNN's attention: with all names saved its forward pass runs again.
        "won_back": won / (ms["remat"] - min(ms["saved_all"], ms["ours_saved_all"])),
        "won_back against JAX's saved_all": won / (ms["remat"] - ms["saved_all"]),
        "ours_best/remat by temp_gib": modes["ours_best"]["temp_gib"] / modes["remat"]["temp_gib"],
        "compile_ours/compile_scan": ours["compile_s"] / modes["saved"]["compile_s"],
    }
    on_host = ours["residuals_host_gib"] / options.fsdp  # of a device
    moved = on_host * (options.layers - 1) / options.layers  # a row of the stacks stays empty
    if moved:
        for key in ("temp_gib", "peak_gib") if "peak_gib" in ours and "peak_gib" in twin else ("temp_gib",):
            found[f"freed/predicted by {key}"] = (twin[key] - ours[key]) / moved
    if profile := ours.get("profile"):
        found["exposed/copies"] = profile["exposed_ms"] / profile["copies_ms"]
        found["exposed/step"] = profile["exposed_ms"] / profile["step_ms"]
        rate = 2 * on_host * 2**30 / profile["copies_ms"]
        found["won_back_limit"] = won_back_limit(options, ms, rate)
        found["won_back/won_back_limit"] = found["won_back"] / found["won_back_limit"]
    return {name: round(ratio, 4) for name, ratio in found.items()}


def won_back_limit(options: argparse.Namespace, ms: dict[str, float], bytes_a_ms: float) -> float:
    """The share of recomputation's cost that the bus lets offload win back.

    Of each layer `layer_input` moves, and then the residuals that take the longest to compute again per byte, a part of
    the last of them, until the copies take as long as the layer's forward pass. What the device can keep at
    recomputation's memory is not counted. Times are measured: of a product, by what the gate's costs (remat - saved);
    of attention, by what its second run costs (saved_all - ours_saved_all).
    """
    tokens, shape = options.batch * options.seq, model(options)
    D, KV, F = shape.d_model, shape.kv_heads * shape.d_head, shape.d_ff
    widths = {"fc1.gate": (D, F), "fc1.up": (D, F), "q": (D, D), "k": (D, KV), "v": (D, KV), "mlp_input": (D, D)}
    product_ms = (ms["remat"] - ms["saved"]) / options.layers / (D * F)
    cost = {name: product_ms * into * out for name, (into, out) in widths.items()}
    size = {name: 2 * tokens * out for name, (_, out) in widths.items()}
    cost["context"] = max(0.0, ms["saved_all"] - ms["ours_saved_all"]) / options.layers
    size["context"] = tokens * (2 * D + 4 * shape.heads)  # with float32 softmax statistics
    room = min(ms["saved_all"], ms["ours_saved_all"]) / options.layers / 3 * bytes_a_ms - 2 * tokens * D
    won = 0.0
    for name in sorted(cost, key=lambda name: size[name] / max(cost[name], 1e-9)):
        part = min(1.0, max(0.0, room / size[name]))
        won, room = won + part * cost[name], room - part * size[name]
    return won / sum(cost.values())


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Of the layers' shape, and of what else the benchmarks of a step share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/dense.json"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--d_model", type=int, default=4096)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--fsdp", type=int, default=1, help="GPUs that share batch and weights")
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "xla"))
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed, a turn")
    parser.add_argument("--commit", default=head(), help="recorded beside the numbers")
    return parser


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--best", nargs="+", choices=_BEST, default=list(_BEST), help="candidates for ours_best")
    parser.add_argument("--fresh", nargs="*", choices=MODES, default=list(MODES), help="also in a process of their own")
    parser.add_argument("--rounds", type=int, default=4, help="times each mode's turn comes")
    parser.add_argument("--worker", choices=("times", "peak"), help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.fresh = [mode for mode in options.fresh if mode in options.modes]
    if "ours_best" in options.modes and "remat" not in options.modes:
        parser.error("--modes: ours_best is the best at no more memory than remat; add remat")
    return options


def head() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def worker(options: argparse.Namespace, what: str, cache: str, mode: str = "", variant: str = "") -> dict[str, Any]:
    """What a fresh process of this program measures."""
    say(f"{what} {mode}")
    command = [sys.executable, "-m", "benchmarks.dense", *sys.argv[1:], "--worker", what]
    command += ["--mode", mode, "--variant", variant] if mode else []
    done = subprocess.run(command, env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"benchmarks.dense: {what} {mode} failed with exit status {done.returncode}")
    return json.loads(done.stdout.decode().splitlines()[-1])


def say(what: str) -> None:
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ in a worker


def times(options: argparse.Namespace) -> dict[str, Any]:
    """Step times of all modes under all their options, the fastest options' kept."""
    import jax

    compiled, facts = {}, {}
    state = initial(options)
    chosen = {mode: MODES[mode] for mode in MODES if mode in options.modes}
    if "ours_best" in chosen:
        chosen["ours_best"] = {name: _BEST[name] for name in options.best}
    for mode, variants in chosen.items():
        for name, variant in variants.items():
            compiled[mode, name], host, seconds = compile_step(options, variant)
            memory = compiled[mode, name].memory_analysis()
            facts[mode, name] = {
                "options": name,
                "compile_s": round(seconds, 2),
                "temp_gib": round(memory.temp_size_in_bytes / 2**30, 4),
                "host_temp_gib": round(memory.host_temp_size_in_bytes / 2**30, 4),
                "residuals_host_gib": round(host / 2**30, 4),
            }
            say(f"compiled {mode}, {name}")

    def turn(key: Any) -> list[float]:
        nonlocal state
        state, spent = jax.block_until_ready(compiled[key](*state)), []
        for _ in range(options.steps):
            begin = time.perf_counter()
            state = jax.block_until_ready(compiled[key](*state))
            spent.append(1e3 * (time.perf_counter() - begin))
        return spent

    # The first turn warms up (pinned memory, clocks) and is not counted, but what is far behind there is out.
    first = {}
    for key in compiled:
        first[key] = statistics.median(turn(key))
        say(f"{', '.join(key)}: {first[key]:.1f} ms")
    fits = {mode: list(variants) for mode, variants in chosen.items()}
    if "ours_best" in fits:
        room = min(facts["remat", variant]["temp_gib"] for variant in fits["remat"])
        small = [v for v in fits["ours_best"] if facts["ours_best", v]["temp_gib"] <= room]
        fits["ours_best"] = small or fits["ours_best"]
    fastest = {mode: min(first[mode, v] for v in variants) for mode, variants in fits.items()}
    spent = {(mode, v): [] for mode in fits for v in fits[mode] if first[mode, v] < 1.03 * fastest[mode]}
    for _ in range(options.rounds):
        for key in spent:
            spent[key] += turn(key)
    median = {key: round(statistics.median(spent.get(key) or [first[key]]), 2) for key in compiled}
    modes = {}
    for mode, variants in chosen.items():
        best = min((v for m, v in spent if m == mode), key=lambda variant: median[mode, variant])
        step_ms = median[mode, best]
        modes[mode] = {
            "step_ms": step_ms,
            "spread_ms": [round(min(spent[mode, best]), 2), round(max(spent[mode, best]), 2)],
            "mfu": round(model_flops(options) / options.fsdp / step_ms / 1e-3 / 989e12, 4),
            **facts[mode, best],
            "other_options": {
                v: {"step_ms": median[mode, v], "temp_gib": facts[mode, v]["temp_gib"]} for v in variants if v != best
            },
        }
    shape = {**shape_of(options), "residuals": list(NAMES)}
    return {**provenance("dense", options.commit, options.fsdp), "shape": shape, "modes": modes}


def peak(options: argparse.Namespace) -> dict[str, Any]:
    """The peak of allocated device memory over three steps, in a process that did nothing else; then a profile."""
    import jax

    step, _, _ = compile_step(options, MODES[options.mode][options.variant])
    state = initial(options)
    for _ in range(3):
        state = step(*state)
    jax.block_until_ready(state)
    measured = {"peak_gib": round((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30, 4)}
    if not options.mode.startswith("ours"):
        return measured
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(*state))
        gpus = streams.read(Path(folder))
    return measured | ({"profile": streams.summary(next(iter(gpus.values())))} if gpus else {})  # of one of them


WORKERS = {"times": times, "peak": peak}


def model(options: argparse.Namespace) -> Any:
    """Llama 3's layer, 8B's by default, as `models.config.Model`; 70B's with `--d_model 8192`."""
    from models.config import Model

    D = options.d_model
    return Model(
        layers=options.layers,
        d_model=D,
        heads=D // 128,
        kv_heads=options.kv_heads,
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
    """Stacked float32 weights and bf16 activations (batch, seq, d_model), as `shardings` says."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from models.transformer import Layer, stacked

    shape = model(options)

    def make() -> tuple[Any, Any]:
        weights = nnx.state(stacked(shape.layers, lambda rngs: Layer(shape, rngs), nnx.Rngs(params=0)))
        x = jax.random.normal(jax.random.key(1), (options.batch, options.seq, options.d_model), jnp.bfloat16)
        return weights, x

    return jax.jit(make, out_shardings=shardings(options))()


def shardings(options: argparse.Namespace) -> tuple[Any, Any]:
    """Of the weights (layers, in, ...), by their second axis, and of the batch."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh(
        (options.fsdp,), ("fsdp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[: options.fsdp]
    )
    return NamedSharding(mesh, PartitionSpec(None, "fsdp")), NamedSharding(mesh, PartitionSpec("fsdp"))


def compile_step(options: argparse.Namespace, variant: Variant) -> tuple[Any, int, float]:
    """One training step, compiled, (weights, x) -> (weights, x) with the weights updated in place; the bytes that it
    keeps on the host by the jaxpr; and the seconds that tracing and compiling took."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jaxoffload
    from models.attention import rotations
    from models.transformer import Layer

    shape = model(options)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Layer(shape, nnx.Rngs(params=0))))
    rotation = rotations(options.seq, shape.d_head, shape.rope_theta)
    who, residuals, xla, fields = variant

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        return nnx.merge(graph, weights)(x, rotation), None

    def loss(weights: Any, x: Any) -> Any:
        if who == "ours":
            y, _ = jaxoffload.scan(layer, x, weights, policy=jaxoffload.Policy(residuals, **dict(fields)))
        elif who in ("jax", "loop"):
            body = jax.checkpoint(layer, policy=jax_policy(residuals), prevent_cse=who == "jax")
            y, _ = jax.lax.scan(body, x, weights)
        else:
            y, _ = jax.lax.scan(layer, x, weights)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    def step(weights: Any, x: Any) -> tuple[Any, Any]:
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-4 * g, weights, gradients), x

    given, where = jax.eval_shape(lambda: initial(options)), shardings(options)
    jitted = jax.jit(step, in_shardings=where, out_shardings=where, donate_argnums=0, compiler_options=xla)
    begin = time.perf_counter()
    compiled = jitted.lower(*given).compile()
    seconds = time.perf_counter() - begin
    return compiled, jaxoffload.residuals(loss, *given).host_bytes, seconds


def jax_policy(residuals: dict[str, str]) -> Any:
    """JAX's own policy; nothing of jaxoffload decides here."""
    from jax import checkpoint_policies as policies

    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name, decision in residuals.items() if decision == "save"],
        names_which_can_be_offloaded=[name for name, decision in residuals.items() if decision == "offload"],
        offload_src="device",
        offload_dst="pinned_host",
    )


def provenance(program: str, commit: str, devices: int = 1) -> dict[str, Any]:
    """Device, versions, command and commit."""
    import importlib.metadata

    import jax

    kept = ("jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cublas")
    versions = {p.name: p.version for p in importlib.metadata.distributions() if p.name in kept}
    return {
        "device": f"{devices} {jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        "versions": dict(sorted(versions.items())),
        "command": " ".join([f"python -m benchmarks.{program}", *itertools.takewhile("--worker".__ne__, sys.argv[1:])]),
        "commit": commit,
    }


def shape_of(options: argparse.Namespace) -> dict[str, Any]:
    shape = {key: getattr(options, key) for key in ("layers", "batch", "seq", "d_model", "kv_heads", "attention")}
    return {**shape, "d_ff": model(options).d_ff, "dtype": "bfloat16 on float32"}


# ------------------------------------------------------------------------------------------------ the README's table

WHAT = {
    "ours_saved_all": "**jaxoffload**, nothing recomputed",
    "saved_all": "JAX, all names saved; attention runs again",
    "saved": "JAX, the two residuals saved, the rest recomputed",
    "remat": "JAX, everything recomputed",
    "jax_offload": "JAX, the two residuals offloaded, XLA's defaults",
    "jax_offload_tuned": "JAX, the two residuals offloaded, the best options found",
    "ours": "**jaxoffload**, the two residuals offloaded",
    "ours_best": "**jaxoffload**, what fits in the memory of recomputing everything",
}


def table(result: dict[str, Any]) -> str:
    """Results as Markdown."""
    modes = result["modes"]
    lines = ["| | step | temporary device memory | model FLOP utilisation |", "|---|---|---|---|"]
    for mode, what in WHAT.items():
        if m := modes.get(mode):
            lines.append(f"| {what} | {m['step_ms']:.0f} ms | {m['temp_gib']:.1f} GiB | {100 * m['mfu']:.1f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
