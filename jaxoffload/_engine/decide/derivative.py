"""The derivative of a function's jaxpr, and the plan that a policy makes for it; both are cached."""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from ..._errors import warn
from ..._jax import jvp_jaxpr
from ..._policy import Policy
from ..._tracing import tracing, under
from ..jaxprs.values import mark_dots
from .plan import Override, Plan, decide, make_plan, matched_nothing


def looks_for_nans() -> bool:
    """Return if JAX looks for NaNs or infinities in eager results: then uninitialised arrays must not hold any."""
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


def cached[T](make: Callable[..., T]) -> Callable[..., T]:
    """Cache `make` per first argument, by weak reference, so that an eager loop over layers plans and traces once.

    The reference, programs in which JAX looks for NaNs, and what is inside of layers have results of their own.

    The first argument is a jaxpr, something else that is hashed by its identity, or a tuple that begins with one, such
    as a `Body`. The result must not refer to it.
    """
    memory: weakref.WeakKeyDictionary[Any, dict[Any, T]] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def cached_make(of: Any, *args: Any, **kwargs: Any) -> T:
        lives, *rest = of if isinstance(of, tuple) else (of,)
        results = memory.setdefault(lives, {})
        now = tracing()
        ambient = now.reference, now.around, now.around_layers, looks_for_nans()
        key = *ambient, *rest, *args, *sorted(kwargs.items())
        if key not in results:
            results[key] = make(of, *args, **kwargs)
        return results[key]

    return cached_make


def plan_of_jvp(
    jaxpr: Jaxpr, roles: tuple[str, ...], jvp: Jaxpr, policy: Policy, strict: bool, override: Override | None
) -> tuple[Plan, Jaxpr]:
    """Plan a derivative, with the names and notes of the full plan: those do not depend on what is perturbed."""
    whole = full_plan(jaxpr, roles, policy, strict)
    plan, planned = make_plan(jvp, policy, roles, override, False)
    return dataclasses.replace(plan, seen=whole.seen, notes=whole.notes), planned


@cached
def derivative(
    jaxpr: Jaxpr, perturbed: tuple[bool, ...], through: bool | tuple[bool, ...], dots: bool
) -> tuple[Jaxpr, tuple[bool, ...]]:
    """The JVP, and which results have tangents: those in `through` always do. `dots`: matmuls are marked."""
    with under(scope=""):
        jvp, out_perturbed = jvp_jaxpr(mark_dots(jaxpr) if dots else jaxpr, perturbed, through)
    return jvp, tuple(out_perturbed)


@cached
def full_plan(jaxpr: Jaxpr, roles: tuple[str, ...], policy: Policy, strict: bool) -> Plan:
    """Return the plan if every differentiable input is perturbed.

    Custom rules are then expanded, so all names are there. With fewer inputs perturbed, as in the first steps of
    `lax.scan`'s JVP, names could be missing that the program's derivative does have.

    Raises:
      PolicyError: a pattern matches nothing (if `strict`), or two names of one value have different decisions.
    """
    dots = policy.dots != "recompute"
    jvp, _ = derivative(jaxpr, _differentiable(jaxpr, dots), False, dots)
    plan, _ = decide(jvp, policy, roles, None, strict, jaxpr)
    for note in matched_nothing(policy).values():
        if note in plan.notes:
            warn(note)
    return plan


@cached
def _differentiable(jaxpr: Jaxpr, dots: bool) -> tuple[bool, ...]:
    """Find the floating-point inputs that reach no equation, such as a callback, without a derivative, which raises."""
    floating = tuple(jnp.issubdtype(a.dtype, jnp.inexact) for a in jaxpr.in_avals)

    def has_derivative(perturbed: tuple[bool, ...]) -> bool:
        try:
            derivative(jaxpr, perturbed, False, dots)
        except Exception:  # a user's rule may raise anything; it raises again where the program needs it
            return False
        return True

    if has_derivative(floating):
        return floating
    # Such an equation raises for any operand that is perturbed, so inputs that pass alone also pass together.
    inputs = range(len(floating))
    return tuple(floating[i] and has_derivative(tuple(k == i for k in inputs)) for i in inputs)
