"""Layers that Flax scans: JAX's offload, `jaxoffload.offload` around the same loss, and `jaxoffload.scan` by hand.

    python -m benchmarks.frameworks [--frameworks linen nnx] [--out benchmarks/results/frameworks.json]

The layers have the shapes of Llama 3's 8B. Linen's are written as MaxText writes its decoder, under its names: a
`nn.scan` of a `nn.remat`, whose policy offloads `decoder_layer_input` and `mlpwi_0`. NNX's are the example model's, in
a `nnx.scan` of a `nnx.remat`. A step is the gradient of the stack and an SGD update in place. Tracing and compilation
are timed with XLA's choices of kernels in its cache, and JAX's caches empty.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

import jaxoffload
from benchmarks import bench, cases, dense
from benchmarks.bench import Variant, cells, markdown
from benchmarks.cases import OVERLAP, PIPELINED, jax_policy, mean_square, update
from jaxoffload import Policy
from models.attention import rope, rotations
from models.config import Model
from models.transformer import Layer


class Framework(NamedTuple):
    """A stack of layers, as a framework's users write it."""

    offloaded: tuple[str, ...]
    start: Callable[[], tuple[Any, Any]]  # the stacked weights, and the input
    scanned: Callable[[Any], Callable[[Any, Any], Any]]  # a policy of jax.checkpoint -> the loss, with its scan
    layer: Callable[[Any, Any], tuple[Any, None]]  # for jaxoffload.scan


MODES = {
    "jax": {"defaults": Variant("jax", {}, {})},
    "jax, tuned": {"overlap": Variant("jax", {}, OVERLAP), "pipelined": Variant("jax", {}, PIPELINED)},
    "offload": {"overlap": Variant("offload", {}, OVERLAP)},
    "scan": {"overlap": Variant("scan", {}, OVERLAP)},
}


def parse() -> argparse.Namespace:
    more = {"modes": [*MODES], "variants": [], "frameworks": [*FRAMEWORKS]}
    return bench.parser(__doc__, "frameworks", **cases.SIZES, **more).parse_args()


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
    shape = cases.model_of(dense.CASE, options)
    rotation = rotations(options.seq, shape.d_head, shape.rope_theta)
    one = DecoderLayer(shape)

    def stack(policy: Any) -> linen.Module:
        layer = linen.remat(DecoderLayer, policy=policy, prevent_cse=False)
        lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": linen.broadcast}
        return linen.scan(layer, length=shape.layers, **lifted)(shape, name="layers")

    def start() -> tuple[Any, Any]:
        x = jax.random.normal(jax.random.key(1), (options.batch, options.seq, options.d_model), jnp.bfloat16)
        made = stack(None).init(jax.random.key(0), x[:1, :8], rotations(8, shape.d_head, shape.rope_theta))
        return made["params"], x

    return Framework(
        offloaded=("decoder_layer_input", "mlpwi_0"),
        start=start,
        scanned=lambda policy: lambda weights, x: mean_square(stack(policy).apply({"params": weights}, x, rotation)[0]),
        layer=lambda x, weights: one.apply({"params": weights}, x, rotation),
    )


def in_nnx(options: argparse.Namespace) -> Framework:
    shape = cases.model_of(dense.CASE, options)
    rotation = rotations(options.seq, shape.d_head, shape.rope_theta)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Layer(shape, nnx.Rngs(params=0))))

    def scanned(policy: Any) -> Callable[[Any, Any], Any]:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat(policy=policy, prevent_cse=False)
        def run(layer: Layer, x: jax.Array) -> jax.Array:
            return layer(x, rotation)[0]

        return lambda weights, x: mean_square(run(nnx.merge(graph, weights), x))

    return Framework(
        offloaded=("layer_input", "mlp/fc1.gate"),
        start=cases.start(dense.CASE, options),
        scanned=scanned,
        layer=lambda x, weights: nnx.merge(graph, weights)(x, rotation),
    )


FRAMEWORKS = {"linen": in_linen, "nnx": in_nnx}


def loss_of(framework: Framework, how: str) -> Callable[[Any, Any], Any]:
    """Return (weights, x) -> loss."""
    offloaded = dict.fromkeys(framework.offloaded, "offload")
    if how == "jax":
        return framework.scanned(jax_policy(offloaded))
    if how == "offload":
        return jaxoffload.offload(framework.scanned(Policy(offloaded)))

    def loss(weights: Any, x: Any) -> Any:
        return mean_square(jaxoffload.scan(framework.layer, x, weights, policy=Policy(offloaded))[0])

    return loss


def groups(options: argparse.Namespace) -> Iterator[bench.Group]:
    """Yield the steps of each framework, with the seconds to trace and to compile each."""
    for name in options.frameworks:
        framework, wanted, steps = FRAMEWORKS[name](options), bench.chosen(MODES, options), {}
        shapes = jax.eval_shape(framework.start)
        for key, variant in [*wanted.items(), *wanted.items()]:  # first so that XLA knows which kernels are fastest
            jax.clear_caches()
            begin = time.perf_counter()
            traced = bench.lowered(update(jax.grad(loss_of(framework, variant.peer))), shapes, variant.options)
            steps[key] = bench.compiled(traced, trace_s=round(time.perf_counter() - begin, 3))
        yield bench.Group(("frameworks", name), steps, jax.jit(framework.start))


def ratios(modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    return bench.ratios(modes, [("offload", other) for other in ("jax, tuned", "jax", "scan")])


NAMES = {"linen": "Flax Linen", "nnx": "Flax NNX"}
WHAT = {
    "jax": "JAX's offload, XLA's defaults",
    "jax, tuned": "JAX's offload, the best options found",
    "offload": "**jaxoffload.offload**",
    "scan": "**jaxoffload.scan**, by hand",
}


def table(result: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    each = ((name, mode, of) for name, found in result["frameworks"].items() for mode, of in found["modes"].items())
    seconds = lambda of: f"{of['trace_s'] + of['compile_s']:.1f} s"
    rows = [[NAMES[name], WHAT[mode], *cells(of), seconds(of)] for name, mode, of in each if "step_ms" in of]
    return markdown(("", "", "step", "temporary device memory", "traced and compiled in"), *rows)


if __name__ == "__main__":
    options = parse()
    bench.prepare(options.attention)
    print(table(bench.main("frameworks", options, groups, ratios, shape=cases.shape_of(options))))
