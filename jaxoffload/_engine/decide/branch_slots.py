"""Residuals of a `cond`'s branches: those for the host and those for the device get separate slots.

Partial evaluation gives residuals of different branches one slot (a result of the `cond`) if their types are equal. In
a `jax.checkpoint` that offloads, memory spaces make the types differ. A layer's residuals all stay on the device until
a loop moves them, so there `weak_type`, which says how a type promotes, is set on those for the host alone.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var, new_jaxpr_eqn
from jax.extend.core.primitives import cond_p, name_p

from ..._jax import define
from ..._names import PlanName
from ..jaxprs.walk import map_bodies, with_eqns
from .plan import Plan


def separate_slots(jaxpr: Jaxpr, plan: Plan, in_branch: bool = False) -> Jaxpr:
    """Return `jaxpr` with a retyped residual behind each value in a branch that the plan keeps as another type."""
    return with_eqns(jaxpr, [new for eqn in jaxpr.eqns for new in _retyped(eqn, plan, in_branch)])


def _retyped(eqn: JaxprEqn, plan: Plan, in_branch: bool) -> Iterator[JaxprEqn]:
    eqn = map_bodies(eqn, lambda _, body: separate_slots(body, plan, in_branch or eqn.primitive is cond_p))
    name = _kept_by(plan, eqn) if in_branch else None
    aval: Any = eqn.outvars[0].aval if name else None
    if name is None or aval.weak_type == (name.decision == "offload"):
        yield eqn
        return
    (out,) = eqn.outvars
    named, residual = Var(aval), Var(_other_type(aval))
    yield eqn.replace(outvars=[named])
    for taken, made, is_residual in ((named, residual, True), (residual, out, False)):
        params = {"name": name, "is_residual": is_residual}
        yield new_jaxpr_eqn([taken], [made], retyped_p, params, set(), eqn.source_info, eqn.ctx)


def _kept_by(plan: Plan, eqn: JaxprEqn) -> PlanName | None:
    """Return the plan's name that an equation writes, if the plan keeps the value."""
    name = eqn.params["name"] if eqn.primitive is name_p else None
    return name if name in plan.plan_names and name.decision != "recompute" else None


def _other_type(aval: Any, **_: Any) -> Any:
    return aval.update(weak_type=not aval.weak_type)


def _batch(_: Any, args: Any, dims: Any, **params: Any) -> Any:
    return retyped_p.bind(*args, **params), *dims


def is_residual(prim: Any, params: dict[str, Any]) -> bool:
    """Return if an equation makes a retyped residual."""
    return prim is retyped_p and params["is_residual"]


# A value with the plan's `name`, with the other `weak_type`: as a residual (`is_residual`), or back as it was.
retyped_p = define(
    Primitive("jaxoffload_retyped"),
    eager=lambda x, **_: x,
    results=_other_type,
    lower=lambda _, x, **__: [x],
    batch=_batch,
)
