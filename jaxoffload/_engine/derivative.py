"""The derivative of a function's jaxpr, and the plan that a policy makes of it; both remembered."""

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.interpreters import ad

from .._errors import NOT_THE_USERS
from .._policy import Policy
from .names import outside_scopes
from .plan import Override, Plan, decide, dots_matched_nothing, make_plan
from .reference import is_reference
from .values import mark_dots


def looks_for_nans() -> bool:
    """Whether JAX looks for NaNs or infinities in what is computed eagerly; they must not be in what nobody filled."""
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


def cached[T](make: Callable[..., T]) -> Callable[..., T]:
    """`make(of, *key)`, remembered while `of` lives: an eager loop over layers then plans and traces once, and once for
    its reference, and where JAX looks for NaNs.

    `of`: a jaxpr, or something else that is hashed by its identity. The result must not refer to it.
    """
    memory: weakref.WeakKeyDictionary[Any, dict[Any, T]] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def remembered(of: Any, *key: Any) -> T:
        made = memory.setdefault(of, {})
        traced = is_reference(), looks_for_nans(), *key
        if traced not in made:
            made[traced] = make(of, *key)
        return made[traced]

    return remembered


def plan_of_jvp(
    jaxpr: Jaxpr, roles: tuple[str, ...], jvp: Jaxpr, policy: Policy, strict: bool, layers: Override | None
) -> tuple[Plan, Jaxpr]:
    """As `make_plan` of a derivative, with the names and notes that the function has whatever is perturbed."""
    whole = full_plan(jaxpr, roles, policy, strict)
    plan, planned = make_plan(jvp, policy, _roles_of(jvp, roles), layers, False)
    return dataclasses.replace(plan, seen=whole.seen, notes=whole.notes), planned


@cached
def derivative(
    jaxpr: Jaxpr, perturbed: tuple[bool, ...], through: bool | tuple[bool, ...], dots: bool
) -> tuple[Jaxpr, tuple[bool, ...]]:
    """The JVP, and which results have tangents: those in `through` always. `dots`: matrix products are marked."""
    with outside_scopes():
        jvp, out_perturbed = ad.jvp_jaxpr(mark_dots(jaxpr) if dots else jaxpr, perturbed, through)
    return jvp, tuple(out_perturbed)


def _roles_of(jvp: Jaxpr, roles: tuple[str, ...]) -> tuple[str | None, ...]:
    return roles + (None,) * (len(jvp.invars) - len(roles))


@cached
def full_plan(jaxpr: Jaxpr, roles: tuple[str, ...], policy: Policy, strict: bool) -> Plan:
    """What is true of a function whatever is perturbed: the plan where all floating-point inputs are that can be.

    Custom rules are expanded then, so all names are there. With fewer perturbed, as the first steps of `lax.scan`'s
    JVP have it, names could be missing that this program's derivative does have.

    Raises:
      PolicyError: a pattern matches nothing (if `strict`), or two names of one value have different decisions.
    """
    dots = policy.dots != "recompute"
    jvp, _ = derivative(jaxpr, _differentiable(jaxpr, dots), False, dots)
    plan, _ = decide(jvp, policy, _roles_of(jvp, roles), None, strict, jaxpr)
    if (note := dots_matched_nothing(policy)) in plan.notes:
        warnings.warn(f"jaxoffload: {note}", skip_file_prefixes=NOT_THE_USERS)
    return plan


@cached
def _differentiable(jaxpr: Jaxpr, dots: bool) -> tuple[bool, ...]:
    """The floating-point inputs that a program can perturb: all, except those that reach what has no derivative, such
    as a callback.

    What has none raises as soon as one of its operands is perturbed. So the inputs that can be perturbed alone can be
    perturbed together, and what the program does perturb is among them.
    """
    floating = tuple(jnp.issubdtype(a.dtype, jnp.inexact) for a in jaxpr.in_avals)

    def has_derivative(perturbed: tuple[bool, ...]) -> bool:
        try:
            derivative(jaxpr, perturbed, False, dots)
        except Exception:  # a user's rule may raise anything; where the program needs it, it is raised again there
            return False
        return True

    if has_derivative(floating):
        return floating
    inputs = range(len(floating))
    return tuple(floating[i] and has_derivative(tuple(k == i for k in inputs)) for i in inputs)
