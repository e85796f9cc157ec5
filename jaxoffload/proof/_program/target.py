"""The function under test: what it computes, its arguments, and the programs that are made of it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.extend.core.primitives import remat_p

from ..._checkpoint import checkpoint
from ..._compiler_options import compiler_options
from ..._engine.jaxprs.walk import walk
from ..._engine.layers.layer import plan_of
from ..._engine.layers.loops import backward_p, loops_of
from ..._engine.microbatches.interleaved import interleaved_p
from ..._jax import nbytes
from ..._policy import Policy
from ..._tracing import as_reference
from .._residuals.plans import Plans
from .._residuals.residuals import where_twice
from .exact import compiled, exact_options, repeatable_options
from .hlo import Module, parse
from .host_transfers import HostTransfer, host_transfers
from .results import run_of


@dataclasses.dataclass(frozen=True)
class Target:
    """A loss, with its gradient, or a step.

    Attributes:
      run: the function of `args` that is verified: all results, by name.
      loss: what `run` differentiates; None for a step.
      jaxpr, plans, host_transfers: those of `run`.
      policies: those of JAX's own checkpoints in it.
      has_reference: whether a jaxoffload policy applies in `run`, so that its reference is another program.
      repeats: how often it runs to see whether equal arguments give equal results.
      strict: whether grouped GEMMs with group sizes on the host fail.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    loss: Callable[..., Any] | None
    jaxpr: Jaxpr
    plans: Plans
    policies: tuple[Any, ...]
    host_transfers: tuple[HostTransfer, ...]
    has_reference: bool
    repeats: int = 3
    strict: bool = False

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
        """The reference of `run`, compiled likewise."""
        return compiled(as_reference(self.run), self.arrays, repeatable_options())

    def exact_programs(self) -> tuple[Any, Any]:
        """Return `run` and its reference, compiled under `exact_options`; slower."""
        ours, reference = (compiled(run, self.arrays, exact_options()) for run in (self.run, as_reference(self.run)))
        return ours, reference

    @functools.cached_property
    def fast_program(self) -> Any:
        """`run`, compiled as a user's step is."""
        return compiled(self.run, self.arrays, compiler_options())

    @functools.cached_property
    def fast_reference(self) -> Any:
        """The reference of `run`, compiled likewise."""
        return compiled(as_reference(self.run), self.arrays, compiler_options())

    @functools.cached_property
    def module(self) -> Module:
        """The instructions that XLA compiled for `fast_program`."""
        return parse(self.fast_program.as_text())

    @functools.cached_property
    def devices(self) -> set[Any]:
        """The devices of the arguments' shardings; empty where they have none."""
        shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(self.args)]
        return {device for sharding in shardings if sharding is not None for device in sharding.device_set}


def target_of(
    f: Callable[..., Any], args: tuple[Any, ...], policy: Policy | None = None, has_aux: bool = False
) -> Target:
    """Trace a function as `verify` takes it.

    Raises:
      NotImplementedError: the arguments lie on an abstract mesh, or a step looks like a loss.
      ValueError: `has_aux`, and `f` returns something else than a pair.
    """
    for leaf in jax.tree.leaves(args):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, jax.sharding.AbstractMesh):
            raise NotImplementedError(
                f"the arguments lie on a mesh of {mesh.size} devices ({dict(mesh.shape)}) that are not here "
                f"({jax.device_count()} are); give it a mesh of these; on a CPU there are as many with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}"
            )
    fun = f if policy is None else checkpoint(f, policy=policy)
    run, is_loss = run_of(fun, args, has_aux)

    def loss(*args: Any) -> Any:
        return fun(*args)[0] if has_aux else fun(*args)

    with where_twice("verify", _LIKE_A_LOSS):
        jaxpr = jax.make_jaxpr(run)(*args)
    plans, policies = Plans(jaxpr), tuple(dict.fromkeys(filter(None, _policies(jaxpr))))
    has_reference = bool(plans.plans) or any(isinstance(policy, Policy) for policy in policies)
    return Target(
        run=run,
        args=args,
        loss=loss if is_loss else None,
        jaxpr=jaxpr,
        plans=plans,
        policies=policies,
        host_transfers=tuple(host_transfers(jaxpr)),
        has_reference=has_reference,
    )


_LIKE_A_LOSS = (
    "the function returns one floating-point scalar, as a loss does, but differentiates what is in it; give its loss, "
    "or return the new state too, as a training step does"
)


def _policies(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the policies of JAX's own checkpoints that are differentiated."""
    for eqn, *_ in walk(jaxpr):
        if eqn.primitive is remat_p and eqn.params["differentiated"] and plan_of(eqn.params["policy"]) is None:
            yield eqn.params["policy"]


def has_loops(jaxpr: Jaxpr) -> bool:
    """Return if the jaxpr contains a jaxoffload loop."""
    return any(loops_of(site.eqn) for site in walk(jaxpr))


def padding_read(jaxpr: Jaxpr) -> int:
    """Return the bytes of the padding rows that our backward loops read from host stacks: one per stack and pass."""
    sites = [site for site in walk(jaxpr) if site.eqn.primitive in (backward_p, interleaved_p)]
    segments = lambda eqn: (segment for loops in loops_of(eqn) for segment in loops.segments if segment.copies)
    rows = lambda eqn: (aval for s in segments(eqn) for aval in s.layout.split(s.layer.forward.out_avals).host)
    return sum(s.runs * s.eqn.params.get("microbatches", 1) * sum(map(nbytes, rows(s.eqn))) for s in sites)


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
