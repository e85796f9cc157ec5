"""Layers that Flax scans: JAX's offload, `jaxoffload.offload` around the same loss, and `jaxoffload.scan` by hand.

    python -m benchmarks.frameworks [--frameworks linen nnx] [--out benchmarks/results/frameworks.json]

The layers have the shapes of Llama 3's 8B. Linen's are written as MaxText writes its decoder, under its names: a
`nn.scan` of a `nn.remat`, whose policy offloads `decoder_layer_input` and `mlpwi_0`. NNX's are the example model's, in
a `nnx.scan` of a `nnx.remat`. A step is the gradient of the stack and an SGD update in place. One process times all
variants alternately; the fastest of JAX's tuned ones counts. Tracing and compilation are timed with XLA's choices of
kernels in its cache, and JAX's caches empty.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

import jaxoffload
from benchmarks import dense
from benchmarks.cases import OVERLAP, PIPELINED, Options
from benchmarks.peers import arguments, markdown, provenance, say
from benchmarks.steps import NO_PLAN, initial, jax_policy, mean_square, planned_gib
from jaxoffload import Policy
from models.attention import rope, rotations
from models.config import Model
from models.transformer import Layer

Loss = Callable[[Any, Any], Any]


class Framework(NamedTuple):
    """A stack of layers, as a framework's users write it."""

    offloaded: tuple[str, ...]
    start: Callable[[], tuple[Any, Any]]  # the stacked weights, and the input
    scanned: Callable[[Any], Loss]  # the loss with the framework's scan under a policy of jax.checkpoint
    layer: Callable[[Any, Any], tuple[Any, None]]  # for jaxoffload.scan
    stack: Callable[[Any], Any]  # the weights that jaxoffload.scan divides among the layers


class Variant(NamedTuple):
    """How the layers are scanned, and XLA's options."""

    how: str  # "jax", "offload" or "scan"
    options: Options


VARIANTS = {
    "jax": Variant("jax", {}),
    "jax, overlap": Variant("jax", OVERLAP),
    "jax, overlap and pipelined": Variant("jax", PIPELINED),
    "offload": Variant("offload", OVERLAP),
    "scan": Variant("scan", OVERLAP),
}
TUNED = ("jax, overlap", "jax, overlap and pipelined")


def main() -> None:
    options = parse()
    result = provenance("frameworks", options.commit, 1) | {"shape": dense.CASE.shape(options), "frameworks": {}}
    for name in options.frameworks:
        modes = measured(FRAMEWORKS[name](options), options)
        result["frameworks"][name] = {"variants": modes, "ratios": ratios(modes)}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    for name, found in result["frameworks"].items():
        print(name, json.dumps(found["ratios"]))


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.set_defaults(out=Path("benchmarks/results/frameworks.json"))
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--rounds", type=int, default=4, help="rounds in which every variant is timed")
    return parser.parse_args()


# --------------------------------------------------------------------------------------------------------- frameworks


class DecoderLayer(linen.Module):
    """A Llama layer in Flax Linen, (x, rotation) -> (x, None)."""

    shape: Model

    @linen.compact
    def __call__(self, x_BxSxD: jax.Array, rotation: Any) -> tuple[jax.Array, None]:
        shape, dtype = self.shape, x_BxSxD.dtype
        norm = lambda name: linen.RMSNorm(dtype=dtype, name=name)
        dense = lambda name, size, axis=-1: linen.DenseGeneral(size, axis, use_bias=False, dtype=dtype, name=name)
        heads, kv_heads = (shape.heads, shape.d_head), (shape.kv_heads, shape.d_head)

        x_BxSxD = checkpoint_name(x_BxSxD, "decoder_layer_input")
        y_BxSxD = norm("pre_self_attention_norm")(x_BxSxD)
        q_BxSxNxH = checkpoint_name(rope(dense("query", heads)(y_BxSxD), rotation), "query_proj")
        k_BxSxKxH = checkpoint_name(rope(dense("key", kv_heads)(y_BxSxD), rotation), "key_proj")
        v_BxSxKxH = checkpoint_name(dense("value", kv_heads)(y_BxSxD), "value_proj")
        context_BxSxNxH = jax.nn.dot_product_attention(
            q_BxSxNxH, k_BxSxKxH, v_BxSxKxH, is_causal=True, implementation=shape.attention
        )
        context_BxSxNxH = checkpoint_name(context_BxSxNxH, "context")
        x_BxSxD += checkpoint_name(dense("out", shape.d_model, (-2, -1))(context_BxSxNxH), "out_proj")

        y_BxSxD = norm("post_self_attention_norm")(x_BxSxD)
        gate_BxSxF = checkpoint_name(dense("wi_0", shape.d_ff)(y_BxSxD), "mlpwi_0")
        up_BxSxF = checkpoint_name(dense("wi_1", shape.d_ff)(y_BxSxD), "mlpwi_1")
        return x_BxSxD + checkpoint_name(dense("wo", shape.d_model)(jax.nn.silu(gate_BxSxF) * up_BxSxF), "mlpwo"), None


def in_linen(options: argparse.Namespace) -> Framework:
    shape = dense.model(options)
    rotation = rotations(options.seq, shape.d_head, shape.rope_theta)
    one = DecoderLayer(shape)

    def stack(policy: Any) -> linen.Module:
        layer = linen.remat(DecoderLayer, policy=policy, prevent_cse=False)
        lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": linen.broadcast}
        return linen.scan(layer, length=shape.layers, **lifted)(shape, name="layers")

    def start() -> tuple[Any, Any]:
        x = jax.random.normal(jax.random.key(1), (options.batch, options.seq, options.d_model), jnp.bfloat16)
        return stack(None).init(jax.random.key(0), x[:1, :8], rotations(8, shape.d_head, shape.rope_theta)), x

    return Framework(
        offloaded=("decoder_layer_input", "mlpwi_0"),
        start=start,
        scanned=lambda policy: lambda weights, x: mean_square(stack(policy).apply(weights, x, rotation)[0]),
        layer=lambda x, weights: one.apply({"params": weights}, x, rotation),
        stack=lambda weights: weights["params"],
    )


def in_nnx(options: argparse.Namespace) -> Framework:
    shape = dense.model(options)
    rotation = rotations(options.seq, shape.d_head, shape.rope_theta)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Layer(shape, nnx.Rngs(params=0))))

    def scanned(policy: Any) -> Loss:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat(policy=policy, prevent_cse=False)
        def run(layer: Layer, x: jax.Array) -> jax.Array:
            return layer(x, rotation)

        return lambda weights, x: mean_square(run(nnx.merge(graph, weights), x))

    return Framework(
        offloaded=("layer_input", "mlp/fc1.gate"),
        start=lambda: initial(dense.CASE, options),
        scanned=scanned,
        layer=lambda x, weights: (nnx.merge(graph, weights)(x, rotation), None),
        stack=lambda weights: weights,
    )


FRAMEWORKS = {"linen": in_linen, "nnx": in_nnx}


def loss_of(framework: Framework, how: str) -> Loss:
    """Return (weights, x) -> loss."""
    offloaded = dict.fromkeys(framework.offloaded, "offload")
    if how == "jax":
        return framework.scanned(jax_policy(offloaded))
    if how == "offload":
        return jaxoffload.offload(framework.scanned(Policy(offloaded)))

    def loss(weights: Any, x: Any) -> Any:
        return mean_square(jaxoffload.scan(framework.layer, x, framework.stack(weights), policy=Policy(offloaded))[0])

    return loss


# ------------------------------------------------------------------------------------------------------------ measure


class Step(NamedTuple):
    """A compiled step, (weights, x) -> (weights, x), and what is known of it before it runs."""

    run: Callable[..., Any]
    facts: dict[str, Any]


def lowered(framework: Framework, variant: Variant, state: tuple[Any, Any]) -> jax.stages.Lowered:
    """Trace a step: the gradient, and an SGD update in place."""
    loss = loss_of(framework, variant.how)

    def step(weights: Any, x: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda w, g: w - 1e-4 * g, weights, jax.grad(loss)(weights, x)), x

    return jax.jit(step, donate_argnums=0, compiler_options=variant.options).lower(*state)


def compiled(framework: Framework, variant: Variant, state: tuple[Any, Any]) -> Step | None:
    """Trace and compile a step, with JAX's caches empty; None where XLA does not say what memory it planned."""
    jax.clear_caches()
    begin = time.perf_counter()
    traced = lowered(framework, variant, state)
    middle = time.perf_counter()
    program = traced.compile()
    seconds = {"trace_s": round(middle - begin, 3), "compile_s": round(time.perf_counter() - middle, 3)}
    if (planned := planned_gib(program)) is None:
        return None
    return Step(program, {**seconds, "temp_gib": planned["temp_gib"], "host_temp_gib": planned["host_temp_gib"]})


def measured(framework: Framework, options: argparse.Namespace) -> dict[str, Any]:
    """Return variant -> results."""
    shapes = jax.eval_shape(framework.start)
    with ThreadPoolExecutor(max_workers=8) as threads:  # so that XLA knows which kernels are fastest
        list(threads.map(jax.stages.Lowered.compile, [lowered(framework, v, shapes) for v in VARIANTS.values()]))
    steps: dict[str, Step] = {}
    for name, variant in VARIANTS.items():
        if step := compiled(framework, variant, shapes):
            steps[name] = step
        else:
            say(f"{name}: left out; {NO_PLAN}")
    state = jax.jit(framework.start)()
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + options.rounds):
        for name, (run, facts) in steps.items():
            for _ in range(options.steps):
                begin = time.perf_counter()
                state = jax.block_until_ready(run(*state))
                spent[name].append(1e3 * (time.perf_counter() - begin))
            say(f"{name}: {spent[name][-1]:.1f} ms, {facts}")
    times = {name: of[options.steps :] for name, of in spent.items()}  # the first round fills the pinned pool
    return {
        name: {
            "step_ms": round(statistics.median(times[name]), 2),
            "spread_ms": [round(min(times[name]), 2), round(max(times[name]), 2)],
            **facts,
        }
        for name, (_, facts) in steps.items()
    }


# ------------------------------------------------------------------------------------------------------------- report


def ratios(variants: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of step times, of memory, and of the seconds until a step is compiled, of what was measured."""
    known = with_tuned(variants)
    until_compiled = lambda of: of["trace_s"] + of["compile_s"]
    key = lambda name: lambda of: of[name]
    pairs = {
        "offload/jax, tuned": ("tuned", key("step_ms")),
        "offload/jax": ("jax", key("step_ms")),
        "offload/scan": ("scan", key("step_ms")),
        "offload/jax, tuned, by temp_gib": ("tuned", key("temp_gib")),
        "offload/scan by temp_gib": ("scan", key("temp_gib")),
        "offload/jax, tuned, by trace_s": ("tuned", key("trace_s")),
        "offload/jax, tuned, until compiled": ("tuned", until_compiled),
    }
    return {
        name: round(of(known["offload"]) / of(known[other]), 4)
        for name, (other, of) in pairs.items()
        if {"offload", other} <= known.keys()
    }


def with_tuned(variants: dict[str, Any]) -> dict[str, Any]:
    """Return the variants, with the fastest of JAX's own under other options as "tuned"."""
    tuned = [variants[name] for name in TUNED if name in variants]
    return variants | ({"tuned": min(tuned, key=lambda of: of["step_ms"])} if tuned else {})


NAMES = {"linen": "Flax Linen", "nnx": "Flax NNX"}
WHAT = {
    "jax": "JAX's offload, XLA's defaults",
    "tuned": "JAX's offload, the best options found",
    "offload": "**jaxoffload.offload**",
    "scan": "**jaxoffload.scan**, by hand",
}


def table(result: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    rows = [("", "", "step", "temporary device memory", "traced and compiled in")]
    for name, found in result["frameworks"].items():
        variants = with_tuned(found["variants"])
        for what, text in ((what, text) for what, text in WHAT.items() if what in variants):
            m = variants[what]
            seconds = m["trace_s"] + m["compile_s"]
            rows.append((NAMES[name], text, f"{m['step_ms']:.0f} ms", f"{m['temp_gib']:.1f} GiB", f"{seconds:.1f} s"))
    return markdown(*rows)


if __name__ == "__main__":
    sys.exit(main())
