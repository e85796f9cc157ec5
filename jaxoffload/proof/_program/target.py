"""The function under test: what it computes, its arguments, and the programs that are made of it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from ..._compiler_options import compiler_options
from ..._policy import Policy
from ..._tracing import as_reference
from .._residuals.plans import Plans
from .._residuals.residuals import where_twice
from .exact import compiled
from .hlo import Module, parse
from .host_transfers import STATE, host_transfers
from .results import LIKE_A_LOSS, run_of, spread


@dataclasses.dataclass(frozen=True)
class Target:
    """A loss, with its gradient, or a step.

    Attributes:
      run: the function of `args` that is verified: all results, by name.
      loss: what `run` differentiates; None for a step.
      jaxpr, plans: those of `run`.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    loss: Callable[..., Any] | None
    jaxpr: Jaxpr
    plans: Plans
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def no_reference(self) -> str:
        """The message that no policy of jaxoffload applies in `run`, its reference being `run`; empty if one does."""
        has_policy = any(isinstance(policy, Policy) for policy in self.plans.policies)
        return "" if self.plans.plans or has_policy or self.has_state_on_host else _NO_REFERENCE

    @functools.cached_property
    def has_state_on_host(self) -> bool:
        """True if a `host_optimizer` updates state there."""
        return any(source is STATE for source, _ in host_transfers(self.jaxpr))

    @property
    def moved_by_others(self) -> str:
        """The message that the reference moves values to the host too; empty if it does not."""
        count = len(list(host_transfers(self.reference_jaxpr)))
        others = "value(s) also go to the host in the reference, so jaxoffload is not what moves them"
        return f"{count} {others}" if count else ""

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        """The arguments, with arrays in place of abstract values."""
        leaves, tree = jax.tree.flatten(self.args)
        return jax.tree.unflatten(tree, map(_array, leaves, range(len(leaves))))

    @functools.cached_property
    def reference_jaxpr(self) -> Jaxpr:
        return jax.make_jaxpr(as_reference(self.run))(*self.args)

    def compiled(self, options: Callable[[], dict[str, Any]], reference: bool = False) -> Any:
        """Return `run`, or its reference, compiled under what `options` returns; each once."""
        if (key := (options, reference)) not in self.programs:
            run = as_reference(self.run) if reference else self.run
            self.programs[key] = compiled(run, self.arrays, options())
        return self.programs[key]

    @functools.cached_property
    def module(self) -> Module:
        """The instructions that XLA compiles of `run` for its users."""
        return parse(self.compiled(compiler_options).as_text())

    @property
    def device_count(self) -> int:
        return spread(self.args)


def target_of(f: Callable[..., Any], args: tuple[Any, ...]) -> Target:
    """Trace a function as `verify` takes it.

    Raises:
      NotImplementedError: the arguments lie on an abstract mesh, or a step looks like a loss.
    """
    for leaf in jax.tree.leaves(args):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, jax.sharding.AbstractMesh):
            raise NotImplementedError(
                f"the arguments lie on a mesh of {mesh.size} devices ({dict(mesh.shape)}) that are not here "
                f"({jax.device_count()} are); give it a mesh of these; on a CPU there are as many with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}"
            )
    run, is_loss = run_of(f, args)
    with where_twice("verify", LIKE_A_LOSS):
        jaxpr = jax.make_jaxpr(run)(*args)
    return Target(run, args, f if is_loss else None, jaxpr, Plans(jaxpr))


_NO_REFERENCE = (
    "nothing in the function is differentiated by jaxoffload, so it has no reference; give a loss, which returns one "
    "floating-point scalar, or a step, which call jaxoffload's scan, chain, checkpoint or host_optimizer"
)


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
