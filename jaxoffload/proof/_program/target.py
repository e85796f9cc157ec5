"""A function to verify: what it computes, its arguments, and the programs that are made of it."""

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.extend.core.primitives import remat_p

from ..._checkpoint import checkpoint
from ..._compiler_options import compiler_options
from ..._engine.layer import plan_of
from ..._engine.loops import backward_p, forward_p, where_twice
from ..._engine.reference import as_reference, with_layers
from ..._engine.values import nested
from ..._policy import Policy
from ..._residuals import Plans
from .host_transfers import HostTransfer, host_transfers

_CUDNN_CONFIG = "create_dot_product_attention_backend_config_base"  # what JAX says to XLA of cuDNN's attention
_MAY_BE_ATOMIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"  # TransformerEngine's variable


@dataclasses.dataclass(frozen=True)
class Target:
    """A loss, with its gradient, or a step.

    Attributes:
      run: the function of `args` that is verified: all results, by name.
      loss: what is differentiated in it; None for a step.
      jaxpr, plans, host_transfers: of `run`.
      policies: those of JAX's own checkpoints in it.
      has_reference: whether anything in it is differentiated by jaxoffload.
      repeats: how often it is run to see that the same comes from the same.
      peaks: as `_peaks` measured them, why it could not, or None where nobody did.
      most: of how many layers of each scan the first run; None for all.
      strict: whether products with group sizes on the host fail.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    loss: Callable[..., Any] | None
    jaxpr: Jaxpr
    plans: Plans
    policies: tuple[Any, ...]
    host_transfers: tuple[HostTransfer, ...]
    has_reference: bool
    repeats: int
    peaks: Any = None
    most: int | None = None
    strict: bool = False

    def with_layers(self, most: int) -> "Target":
        """The same, of so many layers of each scan, with the same arrays: there is no room for others."""
        run, loss = with_layers(self.run, most), self.loss and with_layers(self.loss, most)
        fewer = tuple(host_transfers(jax.make_jaxpr(run)(*self.args)))
        return dataclasses.replace(self, run=run, args=self.arrays, loss=loss, host_transfers=fewer, most=most)

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        """The arguments, with arrays in place of abstract values."""
        leaves, tree = jax.tree.flatten(self.args)
        return jax.tree.unflatten(tree, map(_array, leaves, range(len(leaves))))

    @functools.cached_property
    def reference_jaxpr(self) -> Jaxpr:
        return jax.make_jaxpr(as_reference(self.run))(*self.args)

    @functools.cached_property
    def program(self) -> Any:
        """`run`, compiled under `repeatable_options`."""
        return compiled(self.run, self.arrays, repeatable_options())

    @functools.cached_property
    def reference_program(self) -> Any:
        """The same of its reference."""
        return compiled(as_reference(self.run), self.arrays, repeatable_options())

    def exact_programs(self) -> tuple[Any, Any]:
        """`run` and its reference, compiled under `exact_options`; slower."""
        mine, reference = (compiled(run, self.arrays, exact_options()) for run in (self.run, as_reference(self.run)))
        return mine, reference

    @functools.cached_property
    def fast_program(self) -> Any:
        """`run`, compiled as a user's step is."""
        return compiled(self.run, self.arrays, compiler_options())

    @functools.cached_property
    def devices(self) -> set[Any]:
        """That the arguments say; empty where they say nothing."""
        shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(self.args)]
        return {device for sharding in shardings if sharding is not None for device in sharding.device_set}


def target_of(
    f: Callable[..., Any], args: tuple[Any, ...], policy: Policy | None = None, has_aux: bool = False, repeats: int = 3
) -> Target:
    """As `verify` takes it."""
    for leaf in jax.tree.leaves(args):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, jax.sharding.AbstractMesh):
            raise NotImplementedError(
                f"the arguments lie on a mesh of {mesh.size} devices ({dict(mesh.shape)}) that are not here "
                f"({jax.device_count()} are); give it a mesh of these; on a CPU there are as many with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}"
            )
    fun = checkpoint(f, policy=policy) if policy else f
    run, is_loss = run_of(fun, args, has_aux)

    def loss(*args: Any) -> Any:
        return fun(*args)[0] if has_aux else fun(*args)

    with where_twice("verify", _LIKE_A_LOSS):
        jaxpr = jax.make_jaxpr(run)(*args)
    plans, policies = Plans(jaxpr), tuple(dict.fromkeys(filter(None, _policies(jaxpr))))
    has_reference = bool(plans.plans) or any(isinstance(policy, Policy) for policy in policies)
    transfer = tuple(host_transfers(jaxpr))
    return Target(run, args, loss if is_loss else None, jaxpr, plans, policies, transfer, has_reference, repeats)


_LIKE_A_LOSS = (
    "the function returns one floating-point scalar, as a loss does, but differentiates what is in it; give its loss, "
    "or return the new state too, as a training step does"
)


def run_of(f: Callable[..., Any], args: tuple[Any, ...], has_aux: bool = False) -> tuple[Callable[..., Any], bool]:
    """What is verified of a function, as a function of its arguments that returns all results by name; and whether it
    is a loss, which is differentiated for that."""
    out = jax.eval_shape(f, *args)
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(f"has_aux: the function must return (loss, other results), not {type(out).__name__}")
    if has_aux or _is_scalar(out):
        return _differentiated(f, has_aux), True
    return lambda *args: {"result": f(*args)}, False


def _is_scalar(out: Any) -> bool:
    return isinstance(out, jax.ShapeDtypeStruct) and not out.shape and jnp.issubdtype(out.dtype, jnp.floating)


def _policies(jaxpr: Jaxpr) -> Iterator[Any]:
    """Of JAX's own checkpoints, where what they stand on is differentiated."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is remat_p and eqn.params["differentiated"] and plan_of(eqn.params["policy"]) is None:
            yield eqn.params["policy"]
        for body in nested(eqn):
            yield from _policies(body)


def has_loops(jaxpr: Jaxpr) -> bool:
    """Whether a loop of ours is in it."""
    return any(eqn.primitive in (forward_p, backward_p) or any(map(has_loops, nested(eqn))) for eqn in jaxpr.eqns)


def rows_read_beyond(jaxpr: Jaxpr) -> int:
    """By all loops of ours, of their stacks on the host: each stack's empty row, once a pass."""
    own = sum(
        len(segment.copies)
        for eqn in jaxpr.eqns
        if eqn.primitive is backward_p
        for segment in eqn.params["loops"].segments
    )
    inside = ((eqn.params.get("length", 1), body) for eqn in jaxpr.eqns for body in nested(eqn))
    return own + sum(turns * rows_read_beyond(body) for turns, body in inside)


def most_layers_of(jaxpr: Jaxpr) -> int:
    """Of the longest loop of ours."""
    own = [eqn.params["loops"].length for eqn in jaxpr.eqns if eqn.primitive is forward_p]
    return max([*own, *(most_layers_of(body) for eqn in jaxpr.eqns for body in nested(eqn))], default=0)


def _array(x: Any, number: int) -> Any:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    key = jax.random.fold_in(jax.random.key(0), number)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        key = jax.random.key(number, impl=jax.random.key_impl(jnp.zeros((), x.dtype)))
        array = jax.random.split(key, x.shape) if x.shape else key
    elif jnp.issubdtype(x.dtype, jnp.inexact):  # positive, for there may be squares among them
        array = 0.02 * jnp.abs(jax.random.normal(key, x.shape, x.dtype))
    else:
        array = jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)
    return array if x.sharding is None else jax.device_put(array, x.sharding)


def _differentiated(f: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The value and the gradient with respect to all floating-point leaves, by name."""

    def run(*args: Any) -> dict[str, Any]:
        leaves, tree = jax.tree.flatten(args)
        moving = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]

        def of_moving(xs: list[Any]) -> Any:
            whole = list(leaves)
            for i, x in zip(moving, xs, strict=True):
                whole[i] = x
            return f(*jax.tree.unflatten(tree, whole))

        value, found = jax.value_and_grad(of_moving, has_aux=has_aux)([leaves[i] for i in moving])
        gradient: list[Any] = [None] * len(leaves)
        for i, g in zip(moving, found, strict=True):
            gradient[i] = g
        return {"value": value, "gradient": jax.tree.unflatten(tree, gradient)}

    return run


def compiled(run: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    # A function of its own: JAX would take the one program for the other otherwise.
    with deterministic_attention() if options.get("xla_gpu_deterministic_ops") else contextlib.nullcontext():
        return jax.jit(lambda *args: run(*args), compiler_options=options).lower(*args).compile()


@contextlib.contextmanager
def deterministic_attention() -> Iterator[None]:
    """What one thread traces and lowers meanwhile asks for attention's derivative without atomics.

    TransformerEngine is told by its own variable. cuDNN is told by XLA's deterministic options, but of equal calls the
    first alone, and with two, as of layers in two loops, the program then lacks the other's graph (jaxlib 0.11.2:
    "IndexError: absl::container_internal::raw_hash_map<>::at"). So here JAX tells it at each call.
    Source: HandleCustomCall in XLA's service/gpu/transforms/cudnn_custom_call_compiler.cc.
    """
    lowering, name = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo"), _CUDNN_CONFIG
    config_of, before = getattr(lowering, name), os.environ.get(_MAY_BE_ATOMIC)

    def deterministic(*args: Any, **kwargs: Any) -> dict[str, Any]:
        config: dict[str, Any] = config_of(*args, **kwargs)
        config["cudnn_fmha_backend_config"]["force_deterministic"] = True
        return config

    try:
        os.environ[_MAY_BE_ATOMIC] = "0"
        setattr(lowering, name, deterministic)
        yield
    finally:
        setattr(lowering, name, config_of)
        if before is None:
            del os.environ[_MAY_BE_ATOMIC]
        else:
            os.environ[_MAY_BE_ATOMIC] = before


def repeatable_options() -> dict[str, Any]:
    """`exact_options`, except for what costs time or memory and is rarely needed: on a GPU cuBLAS may add what follows
    a product before it rounds, in one program and not in the other, but a large program without it takes minutes; on a
    CPU XLA may fuse the two differently, but without fusion they are slower and larger."""
    slow = {"xla_gpu_gemm_rewrite_size_threshold"} if jax.default_backend() == "gpu" else _ONE_KERNEL_EACH
    return {key: value for key, value in exact_options().items() if key not in slow}


# XLA:CPU makes a kernel of what it fuses, and of a small loop; LLVM contracts a product and a sum in a kernel into one
# rounding, and vectorizes its sums. What is in one kernel depends on the loop around it. Unoptimised code also compiles
# in half the time.
_ONE_KERNEL_EACH = {"xla_disable_hlo_passes": "fusion,small-while-loop-hoisting", "xla_backend_optimization_level": 0}


def exact_options(backend: str | None = None) -> dict[str, Any]:
    """The options under which two programs of the same arithmetic give the same bits, if they are lowered under
    `deterministic_attention`: by XLA's names, for `jax.jit(f, compiler_options=...)`. `backend`: JAX's default if None.
    """
    if (backend or jax.default_backend()) != "gpu":
        return {"xla_allow_excess_precision": False, **_ONE_KERNEL_EACH}
    return {
        "xla_allow_excess_precision": False,
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_autotune_level": 0,
        # Programs that differ only in what they offload fuse differently around their matrix products, and bfloat16
        # then differs in the last bits (measured on an H200: with these two options none does).
        "xla_gpu_enable_triton_gemm": False,
        "xla_disable_hlo_passes": "priority-fusion,multi-output-fusion",
        # No cuBLAS: the small products are kernels of XLA's, which are the same in both programs.
        "xla_gpu_gemm_rewrite_size_threshold": 10**9,
        "xla_disable_automatic_host_compute_offload": True,  # an error instead of silent compute on the host
    }
