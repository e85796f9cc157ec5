"""The training step that the benchmarks time: a stack of the example model's layers, with plain JAX or with ours."""

import argparse
import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import checkpoint_policies
from jax.sharding import NamedSharding, SingleDeviceSharding

import jaxoffload
from benchmarks.cases import Case, Variant
from jaxoffload.grouped import te
from jaxoffload.proof import memory_plan
from models import config, metrics
from models.attention import rotations
from models.sharding import RULES, make_mesh, on_mesh, param_shardings
from models.transformer import ExpertLayer, Layer, flops_per_token, stacked


def import_te(options: argparse.Namespace) -> None:
    """Import TransformerEngine if it may be used; it wants to be imported before JAX's first computation."""
    grouped = getattr(options, "grouped", None)
    if "te" in (options.attention, grouped):
        importlib.import_module("transformer_engine.jax")
    elif grouped == "auto":
        te.importable()


def model_flops(case: Case, options: argparse.Namespace) -> int:
    """Return the FLOPs of a step, forward and backward; causal attention counts, recomputation does not."""
    shape = case.model(options)
    unembedding = 6 * shape.vocab_size * shape.d_model  # which this step does not have
    return options.batch * options.seq * (flops_per_token(shape, options.seq) - unembedding)


def mfu(flops: float, ms: float) -> float | None:
    """Return the model FLOP utilisation of a step with so many FLOPs per device; None where no peak is known."""
    share = metrics.mfu(1e3 * flops / ms, jax.devices()[0].device_kind)
    return None if share is None else round(share, 4)


def planned_gib(program: jax.stages.Compiled) -> dict[str, float] | None:
    """Return the GiB per device that XLA planned, of temporaries here and on the host, and with the arguments; None
    where it does not say."""
    if (memory := memory_plan(program)) is None:
        return None
    temp = memory.temp_size_in_bytes
    sizes = {
        "temp_gib": temp,
        "all_gib": memory.argument_size_in_bytes + temp,
        "host_temp_gib": memory.host_temp_size_in_bytes,
    }
    return {name: round(size / 2**30, 4) for name, size in sizes.items()}


NO_PLAN = "XLA does not say what memory it planned"


def initial(case: Case, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the stacked float32 weights and the bf16 activations (batch, seq, d_model), placed as `shardings` says."""
    return jax.jit(start(case, options), out_shardings=shardings(case, options))()


def start(case: Case, options: argparse.Namespace) -> Callable[[], tuple[Any, Any]]:
    """Return the function that computes `initial`."""
    shape = case.model(options)
    kind = ExpertLayer if shape.experts else Layer

    def make() -> tuple[Any, Any]:
        weights = nnx.state(stacked(shape.layers, lambda rngs: kind(shape, rngs), nnx.Rngs(params=0)))
        x = jax.random.normal(jax.random.key(1), (options.batch, options.seq, options.d_model), jnp.bfloat16)
        return weights, x

    return make


def mesh_of(options: argparse.Namespace) -> Any:
    """Return a mesh as the training program makes it; None for one device."""
    count = options.fsdp * options.expert
    sizes = config.Mesh(fsdp=options.fsdp, expert=options.expert)
    return make_mesh(sizes, jax.devices()[:count]) if count > 1 else None


def shardings(case: Case, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the shardings of the weights and of the batch."""
    mesh, weights = mesh_of(options), jax.eval_shape(start(case, options))[0]
    if mesh is None:
        return (SingleDeviceSharding(jax.devices()[0]),) * 2
    return param_shardings(weights, mesh), NamedSharding(mesh, RULES.spec("batch"))


def loss_of(case: Case, options: argparse.Namespace, variant: Variant) -> Callable[[Any, Any], Any]:
    """Return (weights, x) -> the loss of a stack of layers, on a mesh if there are several devices."""
    scan = scan_of(case, variant)

    def loss(weights: Any, x: Any) -> Any:
        y, _ = scan(layer_of(case, options), x, weights)
        return mean_square(y)

    mesh = mesh_of(options)
    return loss if mesh is None else on_mesh(mesh, loss)


def mean_square(y: Any) -> Any:
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def layer_of(case: Case, options: argparse.Namespace) -> Callable[[Any, Any], tuple[Any, None]]:
    """Return one of the layers, (x, weights) -> (x, None)."""
    shape = case.model(options)
    kind = ExpertLayer if shape.experts else Layer
    graph = nnx.graphdef(nnx.eval_shape(lambda: kind(shape, nnx.Rngs(params=0))))
    rotation = rotations(options.seq, shape.d_head, shape.rope_theta)

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        out = nnx.merge(graph, weights)(x, rotation)
        return (out[0] if shape.experts else out), None

    return layer


def scan_of(case: Case, variant: Variant) -> Callable[..., Any]:
    """Return the variant's (layer, x, weights) -> (y, ys)."""
    peer, residuals, _, fields = variant
    if peer == "ours":
        return functools.partial(jaxoffload.scan, policy=jaxoffload.Policy(residuals, **dict(fields)))
    if peer == "no remat":
        return jax.lax.scan
    policy = jax_policy(residuals | dict.fromkeys(case.always, "save"))
    remat = functools.partial(jax.checkpoint, policy=policy, prevent_cse=peer == "jax")
    return lambda layer, x, weights: jax.lax.scan(remat(layer), x, weights)


def compile_step(case: Case, options: argparse.Namespace, variant: Variant) -> tuple[Any, int, float]:
    """Compile one training step: (weights, x) -> (weights, x), with the weights updated in place.

    Returns:
      The compiled step, the bytes that it keeps on the host by the jaxpr, and the seconds to trace and compile it.
    """
    loss = loss_of(case, options, variant)

    def step(weights: Any, x: Any) -> tuple[Any, Any]:
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-4 * g, weights, gradients), x

    avals, where = jax.eval_shape(start(case, options)), shardings(case, options)
    jitted = jax.jit(step, in_shardings=where, out_shardings=where, donate_argnums=0, compiler_options=variant.options)
    begin = time.perf_counter()
    compiled = jitted.lower(*avals).compile()
    seconds = time.perf_counter() - begin
    return compiled, jaxoffload.residuals(loss, *avals).host_bytes, seconds


def jax_policy(residuals: dict[str, str]) -> Any:
    """Return JAX's own policy for these decisions; it uses nothing of jaxoffload."""
    return checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name, decision in residuals.items() if decision == "save"],
        names_which_can_be_offloaded=[name for name, decision in residuals.items() if decision == "offload"],
        offload_src="device",
        offload_dst="pinned_host",
    )
