"""The same residuals saved, recomputed and offloaded, with plain JAX and with ours, side by side: `dense` and `moe`.

A step is the forward and backward pass of a stack of the reference model's layers, bf16 on float32 weights, and SGD in
place. All modes are timed in one process, in turn, so that they share the machine's state; each peer that has options
of its own is timed under all of them, and the fastest counts. Then each mode runs in a process of its own for its peak
memory. The parent never touches the GPU.
"""

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import streams
from jaxoffload import compiler_options
from models.metrics import PEAK_FLOPS


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


def best(moved: str, kept: str = "", copy_ms: float | None = None, **fields: int) -> Variant:
    """A candidate for `ours_best`: names that go to the host with `layer_input`, names that stay, how long before the
    end of its turn a copy begins, other fields."""
    decisions = dict.fromkeys(["layer_input", *moved.split()], "offload") | dict.fromkeys(kept.split(), "save")
    return Variant("ours", decisions, compiler_options("gpu", copy_ms=copy_ms), tuple(fields.items()))


class Case(NamedTuple):
    """What a benchmark compares the peers on."""

    program: str  # of this package
    description: str
    names: tuple[str, ...]  # that are saved, or offloaded; the rest is computed again
    all_names: tuple[str, ...]  # with which nothing that has a name is computed again
    always: tuple[str, ...]  # that every peer saves: routing, which must not be computed again
    best: dict[str, Variant]  # candidates for ours_best
    model: Callable[[argparse.Namespace], Any]  # as `models.config.Model`
    costs: Callable[[argparse.Namespace], dict[str, tuple[int, int]]]  # name -> FLOPs and bytes of a layer
    shape: Callable[[argparse.Namespace], dict[str, Any]]  # what is recorded of it
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def _each(residuals: dict[str, str], **variants: tuple[str, dict[str, Any]]) -> dict[str, Variant]:
    return {name.replace("_", " "): Variant(who, residuals, xla) for name, (who, xla) in variants.items()}


def _jax(residuals: dict[str, str], **options: dict[str, Any]) -> dict[str, Variant]:
    """With each of XLA's options, as `jax.checkpoint` is by default, and as JAX advises it in a scan."""
    hows = {"": "jax", "_no_barriers": "loop"}
    return _each(residuals, **{name + how: (who, xla) for name, xla in options.items() for how, who in hows.items()})


def modes_of(case: Case) -> dict[str, dict[str, Variant]]:
    """Of each mode the fastest variant counts; of ours_best, the fastest that needs no more memory than remat."""
    save, move = dict.fromkeys(case.names, "save"), dict.fromkeys(case.names, "offload")
    everything = dict.fromkeys(case.all_names, "save")
    return {
        "remat": _jax({}, defaults={}, overlap=OVERLAP),
        "saved": _jax(save, defaults={}, overlap=OVERLAP),
        "saved_all": {
            "no checkpoint": Variant("nobody", {}, {}),
            "all names": Variant("loop", everything, {}),
            "all names, overlap": Variant("loop", everything, OVERLAP),
        },
        "jax_offload": _each(move, defaults=("jax", {})),
        "jax_offload_tuned": _jax(move, overlap=OVERLAP, overlap_and_pipelined=PIPELINED),
        "ours": _each(move, overlap=("ours", OVERLAP)),
        "ours_saved": _each(save, overlap=("ours", OVERLAP)),
        "ours_saved_context": _each(save | {"attn/context": "save"}, overlap=("ours", OVERLAP)),
        "ours_saved_all": _each(everything, defaults=("ours", {}), overlap=("ours", OVERLAP)),
        "ours_best": case.best,
    }


MODES = ("remat", "saved", "saved_all", "jax_offload", "jax_offload_tuned")
MODES += ("ours", "ours_saved", "ours_saved_context", "ours_saved_all", "ours_best")
NEEDED = {"remat", "saved", "saved_all", "ours", "ours_saved", "ours_saved_context", "ours_saved_all", "ours_best"}
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


def main(case: Case) -> dict[str, Any] | None:
    """The results, also written to `--out`; None in a worker."""
    options = parse(case)
    if options.worker:
        print(json.dumps(WORKERS[options.worker](case, options)))
        return None
    with tempfile.TemporaryDirectory() as cache:  # compiled once, by the timing process
        timed = worker(case, options, "times", cache)
        write(case, timed, options)
        for mode in (mode for mode in options.fresh if mode in timed["modes"]):
            timed["modes"][mode] |= worker(case, options, "peak", cache, mode, timed["modes"][mode]["options"])
            write(case, timed, options)
    return timed


def write(case: Case, timed: dict[str, Any], options: argparse.Namespace) -> None:
    """What there is so far, with its ratios: a process that fails later takes nothing with it."""
    step = {mode: result["step_ms"] for mode, result in timed["modes"].items()}
    timed["ratios"] = {f"{a}/{b}": round(step[a] / step[b], 4) for a, b in RATIOS if {a, b} <= step.keys()}
    if step.keys() >= NEEDED:
        timed["ratios"] |= shares(case, timed["modes"], options)
    options.out.write_text(json.dumps(timed, indent=1) + "\n")


def shares(case: Case, modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
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
    # Of the rows of the stacks one stays empty, and what another holds is on its way back, on the device.
    moved = on_host * (options.layers - 2) / options.layers
    if moved:
        for key in ("temp_gib", "peak_gib") if "peak_gib" in ours and "peak_gib" in twin else ("temp_gib",):
            found[f"freed/predicted by {key}"] = (twin[key] - ours[key]) / moved
    if profile := ours.get("profile"):
        found["exposed/copies"] = profile["exposed_ms"] / profile["copies_ms"]
        found["exposed/step"] = profile["exposed_ms"] / profile["step_ms"]
        rate = 2 * on_host * 2**30 / profile["copies_ms"]
        found["won_back_limit"] = won_back_limit(case, options, modes, rate)
        found["won_back/won_back_limit"] = found["won_back"] / found["won_back_limit"]
    return {name: round(ratio, 4) for name, ratio in found.items()}


def won_back_limit(case: Case, options: argparse.Namespace, modes: dict[str, Any], bytes_a_ms: float) -> float:
    """The share of recomputation's cost that bus and device let offload win back.

    Of each layer `layer_input` moves, and then the residuals that take the longest to compute again per byte, a part of
    the last of them: until the copies take as long as the layer's forward pass, and then on the device, until it is as
    full as with recomputation. Times are measured: of products, by what those of the case's names cost (remat - saved);
    of attention, by what its second run costs (ours_saved - ours_saved_context).
    """
    ms = {mode: m["step_ms"] for mode, m in modes.items()}
    flops, size = ({name: pair[i] for name, pair in case.costs(options).items()} for i in (0, 1))
    a_flop = (ms["remat"] - ms["saved"]) / options.layers / sum(flops[name] for name in case.names)
    cost = {name: count * a_flop for name, count in flops.items()}
    cost["attn/context"] = max(0.0, ms["ours_saved"] - ms["ours_saved_context"]) / options.layers
    forward_ms = min(ms["saved_all"], ms["ours_saved_all"]) / options.layers / 3
    spare_gib = max(0.0, modes["remat"]["temp_gib"] - modes["ours"]["temp_gib"])
    room = max(0.0, forward_ms * bytes_a_ms - size.pop("layer_input")) + spare_gib * 2**30 / options.layers
    won = 0.0
    for name in sorted(size, key=lambda name: size[name] / max(cost[name], 1e-9)):
        part = min(1.0, max(0.0, room / size[name]))
        won, room = won + part * cost[name], room - part * size[name]
    return won / sum(cost.values())


def attention_costs(shape: Any, tokens: int) -> dict[str, tuple[int, int]]:
    """Of the residuals before the MLP, bf16: FLOPs (attention's are timed instead) and bytes."""
    D, KV = shape.d_model, shape.kv_heads * shape.d_head
    product = lambda into, out: (2 * tokens * into * out, 2 * tokens * out)
    return {
        "layer_input": (0, 2 * tokens * D),
        "attn/q": product(D, shape.heads * shape.d_head),
        "attn/k": product(D, KV),
        "attn/v": product(D, KV),
        "attn/context": (0, tokens * (2 * D + 4 * shape.heads)),  # with float32 softmax statistics
        "mlp_input": product(shape.heads * shape.d_head, D),
    }


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Of the layers' shape, and of what else the benchmarks of a step share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--d_model", type=int, default=4096)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--fsdp", type=int, default=1, help="GPUs that share batch and weights")
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "te", "xla"))
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed, a turn")
    parser.add_argument("--commit", default=head(), help="recorded beside the numbers")
    return parser


def parse(case: Case) -> argparse.Namespace:
    parser = arguments(case.description)
    parser.set_defaults(out=Path(f"benchmarks/results/{case.program}.json"))
    case.arguments(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--best", nargs="+", choices=case.best, default=list(case.best), help="candidates for ours_best"
    )
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


def worker(
    case: Case, options: argparse.Namespace, what: str, cache: str, mode: str = "", variant: str = ""
) -> dict[str, Any]:
    """What a fresh process of this program measures."""
    say(f"{what} {mode}")
    command = [sys.executable, "-m", f"benchmarks.{case.program}", *sys.argv[1:], "--worker", what]
    command += ["--mode", mode, "--variant", variant] if mode else []
    done = subprocess.run(command, env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"benchmarks.{case.program}: {what} {mode} failed with exit status {done.returncode}")
    return json.loads(done.stdout.decode().splitlines()[-1])


def say(what: str) -> None:
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ in a worker


def times(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Step times of all modes under all their options, the fastest options' kept."""
    _import_te(options)
    import jax

    compiled, facts = {}, {}
    state = initial(case, options)
    chosen = {mode: variants for mode, variants in modes_of(case).items() if mode in options.modes}
    if "ours_best" in chosen:
        chosen["ours_best"] = {name: case.best[name] for name in options.best}
    for mode, variants in chosen.items():
        for name, variant in variants.items():
            compiled[mode, name], host, seconds = compile_step(case, options, variant)
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
        if small:
            fits["ours_best"] = small
        else:
            say(f"ours_best is left out: no candidate needs remat's {room} GiB or less")
            del fits["ours_best"], chosen["ours_best"]
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
            "mfu": round(model_flops(case, options) / options.fsdp / step_ms / 1e-3 / PEAK_FLOPS["NVIDIA H200"], 4),
            **facts[mode, best],
            "other_options": {
                v: {"step_ms": median[mode, v], "temp_gib": facts[mode, v]["temp_gib"]} for v in variants if v != best
            },
        }
    shape = {**case.shape(options), "residuals": list(case.names)}
    return {**provenance(case.program, options.commit, options.fsdp), "shape": shape, "modes": modes}


def peak(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """The peak of allocated device memory over three steps, in a process that did nothing else; then a profile."""
    _import_te(options)
    import jax

    step, _, _ = compile_step(case, options, modes_of(case)[options.mode][options.variant])
    state = initial(case, options)
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


def _import_te(options: argparse.Namespace) -> None:
    """Before JAX's first computation, as TransformerEngine asks for."""
    if "te" in (options.attention, getattr(options, "grouped", None)):
        importlib.import_module("transformer_engine.jax")


def model_flops(case: Case, options: argparse.Namespace) -> int:
    """FLOPs of a step, forward and backward, causal attention counted, nothing recomputed counted."""
    from models.transformer import flops_per_token

    shape = case.model(options)
    unembedding = 6 * shape.vocab_size * shape.d_model  # this step has none
    return options.batch * options.seq * (flops_per_token(shape, options.seq) - unembedding)


def initial(case: Case, options: argparse.Namespace) -> tuple[Any, Any]:
    """Stacked float32 weights and bf16 activations (batch, seq, d_model), as `shardings` says."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from models.transformer import ExpertLayer, Layer, stacked

    shape = case.model(options)
    kind = ExpertLayer if shape.experts else Layer

    def make() -> tuple[Any, Any]:
        weights = nnx.state(stacked(shape.layers, lambda rngs: kind(shape, rngs), nnx.Rngs(params=0)))
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


def compile_step(case: Case, options: argparse.Namespace, variant: Variant) -> tuple[Any, int, float]:
    """One training step, compiled, (weights, x) -> (weights, x) with the weights updated in place; the bytes that it
    keeps on the host by the jaxpr; and the seconds that tracing and compiling took."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jaxoffload
    from models.attention import rotations
    from models.transformer import ExpertLayer, Layer

    shape = case.model(options)
    kind = ExpertLayer if shape.experts else Layer
    graph = nnx.graphdef(nnx.eval_shape(lambda: kind(shape, nnx.Rngs(params=0))))
    rotation = rotations(options.seq, shape.d_head, shape.rope_theta)
    who, residuals, xla, fields = variant
    saved = residuals | dict.fromkeys(case.always, "save")

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        out = nnx.merge(graph, weights)(x, rotation)
        return (out[0] if shape.experts else out), None

    def loss(weights: Any, x: Any) -> Any:
        if who == "ours":
            y, _ = jaxoffload.scan(layer, x, weights, policy=jaxoffload.Policy(residuals, **dict(fields)))
        elif who in ("jax", "loop"):
            body = jax.checkpoint(layer, policy=jax_policy(saved), prevent_cse=who == "jax")
            y, _ = jax.lax.scan(body, x, weights)
        else:
            y, _ = jax.lax.scan(layer, x, weights)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    def step(weights: Any, x: Any) -> tuple[Any, Any]:
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-4 * g, weights, gradients), x

    given, where = jax.eval_shape(lambda: initial(case, options)), shardings(options)
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

    kept = {"jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cublas"}
    kept |= {"transformer_engine"}
    versions = {p.name: p.version for p in importlib.metadata.distributions() if p.name in kept}
    return {
        "device": f"{devices} {jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        "versions": dict(sorted(versions.items())),
        "command": " ".join([f"python -m benchmarks.{program}", *itertools.takewhile("--worker".__ne__, sys.argv[1:])]),
        "commit": commit,
    }


def layers_of(options: argparse.Namespace) -> dict[str, Any]:
    """What is recorded of the layers of any case."""
    kept = ("layers", "batch", "seq", "d_model", "kv_heads", "attention", "fsdp")
    return {**{key: getattr(options, key) for key in kept}, "dtype": "bfloat16 on float32"}
