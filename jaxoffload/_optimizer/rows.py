"""Evaluate a jaxpr on some rows of its arrays: find whether that can be done, and do it.

An equation treats the rows along an axis alike, and each by itself, if a row of its results is computed from the same
row of its operands. An elementwise one does so along each axis, a sum along those that it does not add up, a matmul
along batch axes. `jax.vmap` makes the function of all rows from that of one. This is the way back, which JAX does not
have: an optimizer's update is written, and its masks are decided, for whole arrays.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import broadcast_in_dim_p, cond_p, scan_p

from .._engine.jaxprs.inline import evaluate_equations, read
from .._engine.jaxprs.walk import nested, operands_of
from .._jax import CALLS, CUSTOM_RULES, ELEMENTWISE, IDENTITIES, REDUCTIONS

Axes = list[int | None]  # of each value the axis along which it is rows; None for a value that is whole


Take = Callable[[Any, int], Any]  # a whole value, and the axis -> the rows of it that are evaluated


class Size(NamedTuple):
    """How many rows there are along the axis, and how many of them are taken at once."""

    whole: int
    part: int

    def replaced(self, shape: Sequence[int], axis: int) -> tuple[int, ...]:
        """Return a whole value's shape with as many rows as are taken."""
        return (*shape[:axis], self.part, *shape[axis + 1 :])


class Mixed(Exception):
    """The rows of an equation's results depend on other rows, or nothing is known of its primitive."""

    def __init__(self, eqn: JaxprEqn):
        super().__init__(eqn)
        self.eqn = eqn


class Rule(NamedTuple):
    """How to evaluate an equation on rows.

    Attributes:
      operands: the axes along which it needs rows of its operands, also of those that are whole.
      results: those of its results.
      run: what takes rows of a whole value, and the operands -> the results.
    """

    operands: Axes
    results: Axes
    run: Callable[[Take, Sequence[Any]], list[Any]]


def rule_of(eqn: JaxprEqn, axes: Axes, size: Size) -> Rule:
    """Return how to evaluate an equation whose operands are rows along these axes, one at least.

    Raises:
      Mixed: it cannot be done.
    """
    if eqn.primitive is cond_p:
        return _cond(eqn, axes, size)
    if eqn.primitive is scan_p:
        return _scan(eqn, axes, size)
    if eqn.primitive.name in CALLS | CUSTOM_RULES:
        part = through(nested(eqn)[0], axes, size)
        return Rule(axes, part.axes, part.run)
    if not (found := _of_one_kernel(eqn, axes, size)):
        raise Mixed(eqn)
    operands, axis, changed = found

    def run(_: Take, values: Sequence[Any]) -> list[Any]:
        out = eqn.primitive.bind(*values, **(eqn.params | changed))
        return list(out) if eqn.primitive.multiple_results else [out]

    return Rule(operands, [axis] * len(eqn.outvars), run)


def _of_one_kernel(eqn: JaxprEqn, axes: Axes, size: Size) -> tuple[Axes, int, dict[str, Any]] | None:
    """Return the axes of operands, that of results, and parameters for fewer rows; None if rows are mixed."""
    name, params = eqn.primitive.name, eqn.params
    avals: list[Any] = [v.aval for v in eqn.invars]
    shapes = [aval.shape for aval in avals]
    of, at = next((n, a) for n, a in enumerate(axes) if a is not None)
    if name in ELEMENTWISE | IDENTITIES:
        alike = all(a in (None, at) for a in axes) and all(len(s) in (0, len(shapes[of])) for s in shapes)
        return ([at if s and s[at] == size.whole else None for s in shapes], at, {}) if alike else None
    if name == "dot_general":
        return _matmul(params["dimension_numbers"], axes, list(map(len, shapes)))
    if name == "broadcast_in_dim":
        axis = params["broadcast_dimensions"][at]
        return axes, axis, {"shape": size.replaced(params["shape"], axis)}
    if name == "reshape" and params["dimensions"] is None:
        sizes, before = params["new_sizes"], math.prod(shapes[0][:at])
        for axis, length in enumerate(sizes):
            if length == size.whole and math.prod(sizes[:axis]) == before:
                return axes, axis, {"new_sizes": size.replaced(sizes, axis)}
    if name == "transpose":
        return axes, params["permutation"].index(at), {}
    if name == "squeeze" or (name in REDUCTIONS and "axes" in params):
        gone = params["dimensions"] if name == "squeeze" else params["axes"]
        return None if at in gone else (axes, at - sum(axis < at for axis in gone), {})
    return None


def _matmul(numbers: Any, axes: Axes, ndims: list[int]) -> tuple[Axes, int, dict[str, Any]] | None:
    """Rows are those along a batch axis, or along one that one operand alone has."""
    contracted, batch = numbers
    of, at = next((n, a) for n, a in enumerate(axes) if a is not None)
    if at in batch[of]:
        place = batch[of].index(at)
        wanted: Axes = [batch[0][place], batch[1][place]]
        return (wanted, place, {}) if all(a in (None, w) for a, w in zip(axes, wanted, strict=True)) else None
    if at in contracted[of] or axes[1 - of] is not None:
        return None
    free = [[d for d in range(n) if d not in (*c, *b)] for n, c, b in zip(ndims, contracted, batch, strict=True)]
    return axes, len(batch[0]) + of * len(free[0]) + free[of].index(at), {}


def _cond(eqn: JaxprEqn, axes: Axes, size: Size) -> Rule:
    if axes[0] is not None:
        raise Mixed(eqn)
    parts = [through(branch, axes[1:], size) for branch in eqn.params["branches"]]
    results = [next((a for a in each if a is not None), None) for each in zip(*(p.axes for p in parts), strict=True)]

    def run(take: Take, operands: Sequence[Any]) -> list[Any]:
        branches = [lambda *xs, part=part: part.run(take, xs, results) for part in parts]
        return list(lax.switch(operands[0], branches, *operands[1:]))

    return Rule(axes, results, run)


def _scan(eqn: JaxprEqn, axes: Axes, size: Size) -> Rule:
    """Rows may be constants and carried; what a scan goes through and what it stacks is whole."""
    params = eqn.params
    body = params["jaxpr"]
    is_carried = [operand is None for operand in operands_of(eqn, body)]
    consts, carried = is_carried.index(True) if any(is_carried) else 0, sum(is_carried)
    while True:
        part = through(body, axes, size)
        before, after = axes[consts : consts + carried], part.axes[:carried]
        if after == before:
            break
        if any(a is not None and a != b for a, b in zip(before, after, strict=True)):
            raise Mixed(eqn)
        axes = [*axes[:consts], *after, *axes[consts + carried :]]
    if any(a is not None for a in axes[consts + carried :] + part.axes[carried:]):
        raise Mixed(eqn)

    def run(take: Take, operands: Sequence[Any]) -> list[Any]:
        def iteration(carry: Any, x: Any) -> tuple[Any, Any]:
            outs = part.run(take, [*operands[:consts], *carry, *x])
            return outs[:carried], outs[carried:]

        init, xs = list(operands[consts : consts + carried]), list(operands[consts + carried :])
        carry, ys = lax.scan(iteration, init, xs, params["length"], params["reverse"], params["unroll"])
        return [*carry, *ys]

    return Rule(axes, part.axes, run)


class Part(NamedTuple):
    """A jaxpr on rows: the axes of its results; and its function, of `Take`, the inputs, and the axes along which rows
    of the results are wanted, also of those that are whole."""

    axes: Axes
    run: Callable[..., list[Any]]


def through(jaxpr: Jaxpr, axes: Axes, size: Size) -> Part:
    """Return how to evaluate a jaxpr whose inputs are rows along these axes.

    Raises:
      Mixed: it cannot be done.
    """
    known = dict(zip(jaxpr.invars, axes, strict=True))
    axis_of = lambda atom: known.get(atom) if isinstance(atom, Var) else None
    rules: list[Rule | None] = []
    for eqn in jaxpr.eqns:
        taken = list(map(axis_of, eqn.invars))
        rules.append(rule_of(eqn, taken, size) if any(a is not None for a in taken) else None)
        if rule := rules[-1]:
            known |= zip(eqn.outvars, rule.results, strict=True)
    results = list(map(axis_of, jaxpr.outvars))
    repeats = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive is broadcast_in_dim_p}

    def run(take: Take, operands: Sequence[Any], wanted: Axes = results) -> list[Any]:
        values = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*operands, *jaxpr.consts], strict=True))

        def rows(atom: Any, axis: int | None) -> Any:
            if axis is None or axis_of(atom) is not None:
                return read([atom], values)[0]
            eqn = repeats.get(atom) if isinstance(atom, Var) else None
            if eqn and axis not in eqn.params["broadcast_dimensions"]:  # so the whole value need not exist
                params = eqn.params | {"shape": size.replaced(eqn.params["shape"], axis)}
                return broadcast_in_dim_p.bind(*read(eqn.invars, values), **params)
            return take(read([atom], values)[0], axis)

        for eqn, rule in zip(jaxpr.eqns, rules, strict=True):
            if rule:
                outs = rule.run(take, list(map(rows, eqn.invars, rule.operands)))
                values |= zip(eqn.outvars, outs, strict=True)
            else:
                evaluate_equations(jaxpr, [eqn], values)
        return list(map(rows, jaxpr.outvars, wanted))

    return Part(results, run)
