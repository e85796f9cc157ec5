"""The source of a residual: its variable is followed back through calls and loops to the equation that defines it."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import cond_p, name_p, scan_p

from ..._jax import BARRIER, CALLS, FORWARD, VIEWS, nbytes
from ..._names import PlanName, read_names
from .values import keeps_all_bits
from .walk import bodies

Kind = Literal[
    "value",  # of an equation; if it has a name, it is where its plan put it
    "argument",  # of the whole function
    "input",  # of something that is not looked into
    "constant",
    "once",  # the same in every layer, so saved once, whatever its plan says
    "overridden",  # its plan says offload, but its layers do not
]


class Source(NamedTuple):
    """The origin of a residual."""

    name: PlanName | None  # None for an untagged value
    where: str  # words for the table; empty where the plan's reason says it
    kind: Kind = "value"
    layers: int = 1  # how many layers' values it holds
    empty: int = 0  # and how many empty rows
    axes: int = 0  # leading axes that these lie along
    others: tuple[PlanName, ...] = ()  # of values from other branches of a `cond` that share its place
    tags: tuple[str, ...] = ()  # what the user named it, where no plan of ours did

    @property
    def names(self) -> tuple[PlanName, ...]:
        """All of the plans' names, `name` first."""
        return (self.name, *self.others) if self.name else ()

    @property
    def by_plan(self) -> bool:
        """True if the value is where its plan put it."""
        return self.name is not None and self.kind == "value"


def is_its_operand(eqn: JaxprEqn) -> bool:
    """Return if an equation's result is its operand, bit by bit."""
    return eqn.primitive is name_p or keeps_all_bits(eqn)


PassesOn = Callable[[JaxprEqn], bool]


def is_a_view(eqn: JaxprEqn) -> bool:
    """Return if an equation's result has all bytes of its operand, in another shape, memory or type."""
    if eqn.primitive.name == BARRIER:
        return True
    return eqn.primitive.name in VIEWS and nbytes(eqn.invars[0].aval) == nbytes(eqn.outvars[0].aval)


def source_of(jaxpr: Jaxpr, var: Any) -> Source:
    """Return the source of a variable of `jaxpr`."""
    *views, earliest = _back(jaxpr, var, is_a_view)
    source = _source_at(jaxpr, earliest)
    if source.name:
        return source
    named = {eqn.outvars[0]: eqn.params["name"] for eqn in jaxpr.eqns if eqn.primitive is name_p}
    tags = (name.text for v in reversed(views) if v in named for name in read_names(named[v]))
    return source._replace(tags=tuple(dict.fromkeys([*source.tags, *tags])))


def _source_at(jaxpr: Jaxpr, var: Any) -> Source:
    """Return the source of a variable that is no view."""
    eqn = next((eqn for eqn in jaxpr.eqns if isinstance(var, Var) and var in eqn.outvars), None)
    if eqn is None:
        return Source(None, "an input", "input") if isinstance(var, Var) else Source(None, "a constant", "constant")
    if name := _plan_name(eqn):
        return Source(name, "")
    index = eqn.outvars.index(var)
    if eqn.primitive.name == FORWARD:
        return eqn.params["loops"].source_of(index)
    inside = [(body, source_of(body, body.outvars[index])) for body in bodies(eqn)]
    if eqn.primitive is cond_p:
        return _source_of_slot([source for _, source in inside])
    if not inside:
        return Source(None, f"output of {eqn.primitive.name}")
    body, source = inside[0]
    return _source_of_scan(eqn, body, index, source) if eqn.primitive is scan_p else source


def _source_of_scan(scan: JaxprEqn, body: Jaxpr, index: int, inside: Source) -> Source:
    is_stack = _is_stack(scan, body, index)
    source = inside
    if not inside.by_plan:
        stacked = "the carry of a scan" if inside.kind == "input" else f"{inside.where}, in a scan"
        where = stacked if is_stack else "the last carry of a scan"
        source = inside._replace(where=where, kind=inside.kind if inside.name else "value")
    if not is_stack:
        return source
    length = scan.params["length"]
    return source._replace(layers=inside.layers * length, empty=inside.empty * length, axes=inside.axes + 1)


def _source_of_slot(branches: list[Source]) -> Source:
    """Return the source of a result of a `cond`, which partial evaluation may share among several branches."""
    named = [source for source in branches if source.name]
    if not named:
        return Source(None, "output of cond")
    names = dict.fromkeys(name for source in named for name in source.names)
    return named[0]._replace(others=tuple(names)[1:])


def _plan_name(eqn: JaxprEqn) -> PlanName | None:
    name = eqn.params["name"] if eqn.primitive is name_p else None
    return name if isinstance(name, PlanName) else None


def follow(jaxpr: Jaxpr, var: Any, passes_on: PassesOn) -> Any:
    """Return the earliest variable with the value of `var`: before what `passes_on` it, but behind a plan's name.

    Calls and loops are followed too, as far as a result of theirs is an operand or an earlier result.
    """
    *_, earliest = _back(jaxpr, var, passes_on)
    return earliest


def _back(jaxpr: Jaxpr, var: Any, passes_on: PassesOn) -> Iterator[Any]:
    """Yield `var`, and the variables before it that have its value."""
    producer: dict[Var, JaxprEqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    while var is not None:
        yield var
        eqn = producer.get(var) if isinstance(var, Var) else None
        var = _operand(eqn, eqn.outvars.index(var), passes_on) if eqn else None


def _operand(eqn: JaxprEqn, index: int, passes_on: PassesOn) -> Any:
    """Return the operand or earlier result of an equation that the result at `index` is too; None if there is none.

    Two stacks of one value that a scan returns are one; its carries are not followed.
    """
    if passes_on(eqn) and not _plan_name(eqn):
        return eqn.invars[index if eqn.primitive.name == BARRIER else 0]
    is_scan = eqn.primitive is scan_p
    if not is_scan and eqn.primitive.name not in CALLS:
        return None
    body = bodies(eqn)[0]
    results = [k for k in range(index + 1) if not is_scan or _is_stack(eqn, body, k)]
    if index not in results:
        return None
    inside = [follow(body, body.outvars[k], passes_on) for k in results]
    pairs: list[tuple[Any, Any]] = [*zip(inside[:-1], (eqn.outvars[k] for k in results), strict=False)]
    pairs += [] if is_scan else zip(body.invars, eqn.invars, strict=True)
    return next((outer for inner, outer in pairs if inner is inside[-1]), None)


def _is_stack(scan: JaxprEqn, body: Jaxpr, index: int) -> bool:
    """Return if a result holds a row of each iteration, and not the last carry."""
    whole: Any = scan.outvars[index].aval
    row: Any = body.outvars[index].aval
    return whole.ndim > row.ndim
