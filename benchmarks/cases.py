"""The layers that benchmarks run, the example model's, and the ways to run them: with ours, or with plain JAX.

A step is the gradient of a stack of layers, in bf16 and by default on float32 weights, and an SGD update in place.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import checkpoint_policies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxoffload
from benchmarks.bench import GIB, Group, Key, Variant, compile_all, lowered
from jaxoffload import compiler_options
from jaxoffload.proof import scheduling_options
from models import config
from models.attention import rotations
from models.config import Model
from models.sharding import RULES, make_mesh, on_mesh, param_shardings
from models.step import in_dtype
from models.transformer import Layer, flops_per_token, stacked

OVERLAP = compiler_options("gpu")
PIPELINED = {**OVERLAP, "xla_gpu_enable_pipelined_host_offloading": True}


# Options of all benchmarks of layers. By default layers are those of Llama 3's 8B, and experts those of Mixtral.
SIZES: dict[str, Any] = {
    "layers": 16,
    "batch": 2,
    "seq": 8192,
    "d_model": 4096,
    "heads": 0,  # of queries; 0: d_model / head_dim
    "kv_heads": 8,
    "head_dim": 128,
    "qk_norm": False,
    "attention": "cudnn",
    "experts": 8,
    "experts_per_token": 2,
    "d_expert": 14336,
    "grouped": "mosaic",
    "capacity": 0.0,  # rows per expert device, as a multiple of an even share; 0: all
    "fsdp": 1,  # GPUs that split batch and weights
    "expert": 1,  # GPUs that split batch and experts
    "param_dtype": "float32",  # of the weights, and of the sums of their gradients
}


class Case(NamedTuple):
    """The layers on which a benchmark compares the peers."""

    program: str  # the module in this package
    names: tuple[str, ...]  # residuals that modes save or offload; the others are recomputed
    all_names: tuple[str, ...]  # with all of these saved, no named value is recomputed
    always: tuple[str, ...]  # residuals that every peer saves: routing must not be recomputed
    fc1: tuple[str, str]  # gate and up
    best: dict[str, Variant]  # what may be the fastest without more memory than recomputing everything
    fields: dict[str, Any]  # of the model

    @property
    def moved(self) -> tuple[str, ...]:
        """What autodiff wants of a layer, except what an elementwise function of it gives again."""
        return ("layer_input", "attn/q", "attn/k", "attn/v", "attn/context", "mlp_input", *self.fc1)


def ours(residuals: dict[str, str], options: dict[str, Any] = OVERLAP, **fields: Any) -> Variant:
    """Return `jaxoffload.scan` under a policy."""
    return Variant("ours", residuals, options, tuple(fields.items()))


def best(offloaded: str, saved: str = "", copy_ms: float | None = None, **fields: Any) -> Variant:
    """Return a candidate for `Case.best`: names to offload besides `layer_input`, and to save, separated by spaces."""
    residuals = dict.fromkeys(["layer_input", *offloaded.split()], "offload") | dict.fromkeys(saved.split(), "save")
    return ours(residuals, compiler_options("gpu", copy_ms=copy_ms), **fields)


def shape_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what every result file records about its layers."""
    more = {"case": options.case} if "case" in options else {}
    sizes = {key: getattr(options, key) for key in SIZES}
    dtype = sizes.pop("param_dtype")
    return more | sizes | {"dtype": f"bfloat16 on {dtype}"}


def model_of(case: Case, options: argparse.Namespace) -> Model:
    keys = ("layers", "d_model", "kv_heads", "head_dim", "qk_norm", "attention", "param_dtype")
    keys += ("experts", "experts_per_token", "d_expert", "grouped", "capacity")
    fields = {key: getattr(options, key) or None for key in keys} | {"d_ff": options.d_model * 7 // 2}
    heads = options.heads or options.d_model // options.head_dim
    return Model(**fields | {"qk_norm": options.qk_norm, "heads": heads} | case.fields)


def model_flops(case: Case, options: argparse.Namespace) -> float:
    """Return the FLOPs of a step, forward and backward, on each device; causal attention counts, recomputation does
    not."""
    shape = model_of(case, options)
    unembedding = 6 * shape.vocab_size * shape.d_model  # which this step does not have
    of_all = options.batch * options.seq * (flops_per_token(shape, options.seq) - unembedding)
    return of_all / options.fsdp / options.expert


def start(case: Case, options: argparse.Namespace) -> Callable[[], tuple[Any, Any]]:
    """Return the function that makes the stacked weights and the bf16 activations (batch, seq, d_model)."""
    shape = model_of(case, options)

    def make() -> tuple[Any, Any]:
        weights = nnx.state(stacked(shape.layers, lambda rngs: Layer(shape, rngs), nnx.Rngs(params=0)))
        weights = in_dtype(weights, shape.param_dtype)
        x = jax.random.normal(jax.random.key(1), (options.batch, options.seq, options.d_model), jnp.bfloat16)
        return weights, x

    return make


def mesh_of(options: argparse.Namespace) -> Any:
    """Return a mesh as the training program makes it; None for one device."""
    count = options.fsdp * options.expert
    sizes = config.Mesh(fsdp=options.fsdp, expert=options.expert)
    return make_mesh(sizes, jax.devices()[:count]) if count > 1 else None


def state_of(case: Case, options: argparse.Namespace, microbatches: int = 1) -> tuple[Any, Callable[[], Any]]:
    """Return the abstract arguments of a step, with shardings, and the function that makes them. Several microbatches
    have a leading axis."""
    mesh = mesh_of(options)

    def initial() -> tuple[Any, Any]:
        weights, x = start(case, options)()
        return weights, x if microbatches == 1 else in_microbatches(x, microbatches)

    weights, x = jax.eval_shape(initial)
    if mesh is None:
        where = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), (weights, x))
    else:
        leading = [None] * (microbatches > 1)
        where = param_shardings(weights, mesh), NamedSharding(mesh, PartitionSpec(*leading, *RULES.spec("batch")))
    return placed((weights, x), where), jax.jit(initial, out_shardings=where)


def in_microbatches(x: jax.Array, count: int) -> jax.Array:
    return jnp.stack([jnp.roll(x, n) for n in range(count)])


def placed(avals: Any, where: Any) -> Any:
    """Return abstract arrays with shardings."""
    return jax.tree.map(lambda x, of: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of), avals, where)


def layer_of(case: Case, options: argparse.Namespace) -> Callable[[Any, Any], tuple[Any, None]]:
    """Return one of the layers, (x, weights) -> (x, None)."""
    shape = model_of(case, options)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Layer(shape, nnx.Rngs(params=0))))
    rotation = rotations(options.seq, shape.d_head, shape.rope_theta)

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        return nnx.merge(graph, weights)(x, rotation)[0], None

    return layer


def scan_of(case: Case, variant: Variant) -> Callable[..., Any]:
    """Return the variant's (layer, x, weights) -> (y, ys).

    "ours": jaxoffload.scan. "jax": lax.scan(jax.checkpoint(f)). "jax in scan": the same with prevent_cse=False, as JAX
    recommends inside a scan. "no remat": lax.scan(f).
    """
    peer, residuals, _, fields = variant
    if peer == "ours":
        return functools.partial(jaxoffload.scan, policy=jaxoffload.Policy(residuals, **dict(fields)))
    if peer == "no remat":
        return jax.lax.scan
    policy = jax_policy(residuals | dict.fromkeys(case.always, "save"))
    remat = functools.partial(jax.checkpoint, policy=policy, prevent_cse=peer == "jax")
    return lambda layer, x, weights: jax.lax.scan(remat(layer), x, weights)


def jax_policy(residuals: dict[str, str]) -> Any:
    """Return JAX's own policy for these decisions; it uses nothing of jaxoffload."""
    return checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name, decision in residuals.items() if decision == "save"],
        names_which_can_be_offloaded=[name for name, decision in residuals.items() if decision == "offload"],
        offload_src="device",
        offload_dst="pinned_host",
    )


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


def update(gradients: Callable[[Any, Any], Any], microbatches: int = 1) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a step, (weights, x) -> (weights, x), that descends along these gradients."""

    def step(weights: Any, x: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda w, g: w - 1e-4 / microbatches * g, weights, gradients(weights, x)), x

    return step


def accumulated(loss: Callable[[Any, Any], Any], **how: Any) -> Callable[[Any, Any], Any]:
    """Return the gradient of the sum of a loss over microbatches, by `jaxoffload.accumulate`."""
    return lambda weights, batch: jaxoffload.accumulate(loss, reduction="sum", **how)(weights, batch)[1]


def in_a_loop(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the gradient of the sum of a loss over microbatches, by plain JAX."""

    def gradients(weights: Any, batch: Any) -> Any:
        add = lambda sums, x: (jax.tree.map(jnp.add, sums, jax.grad(loss)(weights, x)), None)
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), batch)[0]

    return gradients


def step_of(
    case: Case, options: argparse.Namespace, variant: Variant, microbatches: int = 1, loop: bool = False
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a step, (weights, x) -> (weights, x).

    Over several microbatches, gradients are accumulated by `jaxoffload.accumulate`, or in a loop by plain JAX.
    """
    gradients = jax.grad if microbatches == 1 else in_a_loop if loop else accumulated
    return update(gradients(loss_of(case, options, variant)), microbatches)


def group_of(
    case: Case,
    options: argparse.Namespace,
    variants: dict[Key, Variant],
    path: tuple[str, ...] = (),
    microbatches: int = 1,
    loops: Sequence[str] = (),
) -> Group:
    """Return compiled steps, with the GiB per device that each keeps on the host for a microbatch, by its jaxpr. The
    modes `loops` accumulate gradients in a loop by plain JAX."""
    (args, initial), one = state_of(case, options, microbatches), state_of(case, options)[0]
    traced = {}
    for (mode, name), variant in variants.items():
        step, xla = step_of(case, options, variant, microbatches, mode in loops), variant.options
        if getattr(options, "times", False) and xla == OVERLAP:
            xla = scheduling_options(lowered(step, args, xla).compile())
        traced[mode, name] = lowered(step, args, xla)
    steps = compile_all(traced)
    for key, step in steps.items():
        on_host = jaxoffload.residuals(loss_of(case, options, variants[key]), *one).host_bytes
        step.facts["host_gib"] = round(on_host / options.fsdp / options.expert / GIB, 4)
    return Group(path, steps, initial, microbatches * model_flops(case, options), microbatches)
