"""Functions that read or write a `jax.new_ref` run under JAX's own checkpoint, with the policy as its `policy=`.

They have effects on something outside, which our derivative would have to carry from layer to layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jax.ref import AbstractRef

from ..._jax import has_vjp_rule
from ..._policy import Policy, PolicyError
from ..jaxprs.walk import walk
from .plan import all_names


def takes_refs(jaxpr: Jaxpr) -> bool:
    """Return if a function takes references, or closes over them."""
    return any(isinstance(var.aval, AbstractRef) for var in [*jaxpr.constvars, *jaxpr.invars])


def passes_refs(jaxpr: Jaxpr) -> bool:
    """Return if a function takes references, closes over them, or makes some that its equations pass on."""
    made = (v for eqn in jaxpr.eqns for v in eqn.outvars)
    return takes_refs(jaxpr) or any(isinstance(v.aval, AbstractRef) for v in made)


def by_jax(jaxprs: Sequence[Jaxpr], policy: Policy, strict: bool, prevent_cse: bool) -> Callable[..., Any]:
    """JAX's own checkpoint for functions with these jaxprs.

    It does not check patterns. So a strict policy is checked here, and raises when JAX asks it: in the derivative. A
    custom rule's names are not known here; with one in a function, nothing is checked.
    """
    seen = set().union(*map(all_names, jaxprs))
    rules = any(has_vjp_rule(site.eqn) for jaxpr in jaxprs for site in walk(jaxpr))
    problems = policy.unmatched(seen) if strict and not rules else []

    def refuse(*_: Any, **__: Any) -> Any:
        raise PolicyError(problems)

    asked: Any = refuse if problems else policy
    return lambda f: jax.checkpoint(f, policy=asked, prevent_cse=prevent_cse)
