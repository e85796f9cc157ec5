"""The training step that is measured: a stack of the reference model's layers, with plain JAX or with ours."""

import argparse
import importlib
import time
from typing import Any

from benchmarks.cases import Case, Variant


def import_te(options: argparse.Namespace) -> None:
    """Before JAX's first computation, as TransformerEngine asks for; `auto` takes it where it is there."""
    grouped = getattr(options, "grouped", None)
    if "te" in (options.attention, grouped):
        importlib.import_module("transformer_engine.jax")
    elif grouped == "auto":
        from jaxoffload.grouped import te

        te.importable()


def model_flops(case: Case, options: argparse.Namespace) -> int:
    """FLOPs of a step, forward and backward, causal attention counted, nothing recomputed counted."""
    from models.transformer import flops_per_token

    shape = case.model(options)
    unembedding = 6 * shape.vocab_size * shape.d_model  # this step has none
    return options.batch * options.seq * (flops_per_token(shape, options.seq) - unembedding)


def initial(case: Case, options: argparse.Namespace) -> tuple[Any, Any]:
    """Stacked float32 weights and bf16 activations (batch, seq, d_model), as `shardings` says."""
    import jax

    return jax.jit(start(case, options), out_shardings=shardings(case, options))()


def start(case: Case, options: argparse.Namespace) -> Any:
    """What makes them."""
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

    return make


def mesh_of(options: argparse.Namespace) -> Any:
    """As the training program makes it; None for one device."""
    import jax

    from models import config
    from models.sharding import make_mesh

    count = options.fsdp * options.expert
    sizes = config.Mesh(fsdp=options.fsdp, expert=options.expert)
    return make_mesh(sizes, jax.devices()[:count]) if count > 1 else None


def shardings(case: Case, options: argparse.Namespace) -> tuple[Any, Any]:
    """Of the weights and of the batch."""
    import jax
    from jax.sharding import NamedSharding, SingleDeviceSharding

    from models.sharding import RULES, param_shardings

    mesh, weights = mesh_of(options), jax.eval_shape(start(case, options))[0]
    if mesh is None:
        return (SingleDeviceSharding(jax.devices()[0]),) * 2
    return param_shardings(weights, mesh), NamedSharding(mesh, RULES.spec("batch"))


def loss_of(case: Case, options: argparse.Namespace, variant: Variant) -> Any:
    """(weights, x) -> the loss of a stack of layers; on a mesh, if the options have one."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jaxoffload
    from models.attention import rotations
    from models.sharding import on_mesh
    from models.transformer import ExpertLayer, Layer

    shape = case.model(options)
    kind = ExpertLayer if shape.experts else Layer
    graph = nnx.graphdef(nnx.eval_shape(lambda: kind(shape, nnx.Rngs(params=0))))
    who, residuals, _, fields = variant
    saved = residuals | dict.fromkeys(case.always, "save")

    def loss(weights: Any, x: Any) -> Any:
        rotation = rotations(options.seq, shape.d_head, shape.rope_theta)

        def layer(x: Any, weights: Any) -> tuple[Any, None]:
            out = nnx.merge(graph, weights)(x, rotation)
            return (out[0] if shape.experts else out), None

        if who == "ours":
            y, _ = jaxoffload.scan(layer, x, weights, policy=jaxoffload.Policy(residuals, **dict(fields)))
        elif who in ("jax", "loop"):
            body = jax.checkpoint(layer, policy=jax_policy(saved), prevent_cse=who == "jax")
            y, _ = jax.lax.scan(body, x, weights)
        else:
            y, _ = jax.lax.scan(layer, x, weights)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    mesh = mesh_of(options)
    return loss if mesh is None else on_mesh(mesh, loss)


def compile_step(case: Case, options: argparse.Namespace, variant: Variant) -> tuple[Any, int, float]:
    """One training step, compiled, (weights, x) -> (weights, x) with the weights updated in place; the bytes that it
    keeps on the host by the jaxpr; and the seconds that tracing and compiling took."""
    import jax

    import jaxoffload

    loss = loss_of(case, options, variant)

    def step(weights: Any, x: Any) -> tuple[Any, Any]:
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-4 * g, weights, gradients), x

    given, where = jax.eval_shape(start(case, options)), shardings(case, options)
    jitted = jax.jit(step, in_shardings=where, out_shardings=where, donate_argnums=0, compiler_options=variant.options)
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
