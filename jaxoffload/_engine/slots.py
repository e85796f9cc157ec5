"""Residuals of a `cond`'s branches: those for the host and those for the device get slots of their own.

Partial evaluation gives residuals of different branches one slot, one result of the `cond`, where their types are
equal. In a `jax.checkpoint` that offloads they differ in their memory space. A layer's residuals are all on the device
until a loop moves them, so there they differ in `weak_type`, which says how a type promotes: it is set of those for
the host, and of no other.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var, new_jaxpr_eqn
from jax.extend.core.primitives import cond_p, name_p

from .._jax import define
from .names import PlanName, read_plan_name
from .plan import Plan
from .values import map_bodies, with_eqns


def apart_in_branches(jaxpr: Jaxpr, plan: Plan, in_branch: bool = False) -> Jaxpr:
    """`jaxpr` where a value in a branch that the plan keeps has a residual behind it, if its type must be another."""
    return with_eqns(jaxpr, [new for eqn in jaxpr.eqns for new in _apart(eqn, plan, in_branch)])


def _apart(eqn: JaxprEqn, plan: Plan, in_branch: bool) -> Iterator[JaxprEqn]:
    eqn = map_bodies(eqn, lambda _, body: apart_in_branches(body, plan, in_branch or eqn.primitive is cond_p))
    name = _kept_by(plan, eqn) if in_branch else None
    aval: Any = eqn.outvars[0].aval if name else None
    if name is None or aval.weak_type == (name.decision == "offload"):
        yield eqn
        return
    (out,) = eqn.outvars
    named, residual = Var(aval), Var(_other_type(aval))
    yield eqn.replace(outvars=[named])
    for taken, made, is_residual in ((named, residual, True), (residual, out, False)):
        params = {"name": str(name), "is_residual": is_residual}
        yield new_jaxpr_eqn([taken], [made], retyped_p, params, set(), eqn.source_info, eqn.ctx)


def _kept_by(plan: Plan, eqn: JaxprEqn) -> PlanName | None:
    """The plan's name of a value that it keeps, where an equation writes it."""
    name = read_plan_name(eqn.params["name"]) if eqn.primitive is name_p else None
    return name if name and name.decision != "recompute" and str(name) in plan.plan_names else None


def _other_type(aval: Any, **_: Any) -> Any:
    return aval.update(weak_type=not aval.weak_type)


def is_residual_of(plan: Plan, prim: Any, params: dict[str, Any]) -> bool:
    """Whether an equation makes such a residual."""
    return prim is retyped_p and params["is_residual"] and params["name"] in plan.plan_names


def _batch(_: Any, args: Any, dims: Any, **params: Any) -> Any:
    return retyped_p.bind(*args, **params), *dims


# A value that has the plan's `name`: as a residual, or as what it was again.
retyped_p = define(
    Primitive("jaxoffload_retyped"),
    eager=lambda x, **_: x,
    results=_other_type,
    lower=lambda _, x, **__: [x],
    batch=_batch,
)
