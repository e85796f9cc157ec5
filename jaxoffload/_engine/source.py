"""Where a residual comes from: a variable of a jaxpr, followed back through calls and loops to what defines it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import cond_p, name_p, scan_p

from .._jax import BARRIER, CALLS, VIEWS
from .memory import nbytes
from .names import PlanName, read_plan_name
from .values import bodies, keeps_all_bits


class Source(NamedTuple):
    """Where a residual comes from: the plan's name, if it has one; words; how many layers' values it holds, and empty
    rows; along how many leading axes; the plans' names of other values that take the same place, from other branches
    of a `cond`."""

    name: PlanName | None
    where: str
    layers: int = 1
    empty: int = 0
    axes: int = 0
    others: tuple[PlanName, ...] = ()

    @property
    def names(self) -> tuple[PlanName, ...]:
        """All of the plans' names, `name` first."""
        return (self.name, *self.others) if self.name else ()


def is_its_operand(eqn: JaxprEqn) -> bool:
    return eqn.primitive is name_p or keeps_all_bits(eqn)


def is_a_view(eqn: JaxprEqn) -> bool:
    """Whether what it makes is its operand, seen otherwise."""
    if eqn.primitive.name == BARRIER:
        return True
    return eqn.primitive.name in VIEWS and nbytes(eqn.invars[0].aval) == nbytes(eqn.outvars[0].aval)


def source_of(jaxpr: Jaxpr, var: Any) -> Source:
    """Follows a variable to the equation that defines the value."""
    var = follow(jaxpr, var, is_a_view)
    eqn = next((eqn for eqn in jaxpr.eqns if isinstance(var, Var) and var in eqn.outvars), None)
    if eqn is None:
        return Source(None, "an input" if isinstance(var, Var) else "a constant")
    if name := _plan_name(eqn):
        return Source(name, "")
    return _inner_origin(eqn, eqn.outvars.index(var))


def _plan_name(eqn: JaxprEqn) -> PlanName | None:
    return read_plan_name(eqn.params["name"]) if eqn.primitive is name_p else None


def follow(jaxpr: Jaxpr, var: Any, passes_on: Callable[[JaxprEqn], bool]) -> Any:
    """The variable that `var` is too, before calls and other equations that pass it on; not before a plan's name."""
    producer: dict[Var, JaxprEqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    while isinstance(var, Var) and var in producer:
        passed_on = _operand(producer[var], producer[var].outvars.index(var), passes_on)
        if passed_on is None:
            break
        var = passed_on
    return var


def _operand(eqn: JaxprEqn, index: int, passes_on: Callable[[JaxprEqn], bool]) -> Any:
    """The operand, or earlier result, that a result of an equation is too; None if there is none."""
    if passes_on(eqn) and not _plan_name(eqn):
        return eqn.invars[index if eqn.primitive.name == BARRIER else 0]
    is_scan = eqn.primitive is scan_p
    for _, body in bodies(eqn) if is_scan or eqn.primitive.name in CALLS else ():
        inside = [follow(body, v, passes_on) for v in body.outvars[: index + 1]]
        outside: list[tuple[Any, Any]] = list(zip(inside[:-1], eqn.outvars, strict=False))
        if is_scan:  # two stacks of one value are one
            is_stack = [_is_stack(eqn, body, k) for k in range(len(eqn.outvars))]
            outside = [pair for k, pair in enumerate(outside) if is_stack[k] and is_stack[index]]
        else:
            outside += zip(body.invars, eqn.invars, strict=True)
        return next((there for here, there in outside if here is inside[-1]), None)
    return None


def _is_stack(scan: JaxprEqn, body: Jaxpr, index: int) -> bool:
    """Whether a result holds a row of each turn, and not the last carry."""
    whole: Any = scan.outvars[index].aval
    row: Any = body.outvars[index].aval
    return whole.ndim > row.ndim


def _inner_origin(eqn: JaxprEqn, index: int) -> Source:
    prim = eqn.primitive.name
    if prim == "jaxoffload_forward":
        return eqn.params["loops"].source_of(index)
    inside = [(body, source_of(body, body.outvars[index])) for _, body in bodies(eqn)]
    if eqn.primitive is cond_p:
        return _of_one_slot([found for _, found in inside])
    for body, found in inside:
        if eqn.primitive is not scan_p:
            return found
        if not _is_stack(eqn, body, index):
            return found._replace(where=found.where and "the last carry of a scan")
        where = "the carry of a scan" if found.where == "an input" else f"{found.where}, in a scan"
        length = eqn.params["length"]
        layers, empty = found.layers * length, found.empty * length
        return found._replace(where=found.where and where, layers=layers, empty=empty, axes=found.axes + 1)
    return Source(None, f"output of {prim}")


def _of_one_slot(branches: list[Source]) -> Source:
    """Of a result of a `cond`, which partial evaluation may give to residuals of several branches."""
    named = [found for found in branches if found.name]
    if not named:
        return Source(None, "output of cond")
    names = dict.fromkeys(name for found in named for name in found.names)
    return named[0]._replace(others=tuple(names)[1:])
