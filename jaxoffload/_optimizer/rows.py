"""Evaluate a jaxpr that was traced for whole arrays on some of their rows.

A value is rows if its shape is not that of its variable in the jaxpr; they lie along the axis on which the two differ.
An elementwise equation makes rows of rows along any axis, a sum along those that it does not add up, a matmul along
batch axes. `jax.vmap` makes the function of all rows from that of one. This is the way back, which JAX does not have:
an optimizer's update is written, and its masks are decided, for whole arrays.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import cond_p, scan_p

from .._engine.jaxprs.inline import Values, evaluate_equations, read
from .._engine.jaxprs.walk import nested, operands_of
from .._jax import CALLS, CUSTOM_RULES, ELEMENTWISE, IDENTITIES, REDUCTIONS

Shape = tuple[int, ...]
Take = Callable[[Any, int], Any]  # a whole value, and the axis -> the rows of it that are evaluated


class Mixed(Exception):
    """The results of an equation on rows depend on other rows, or nothing is known of its primitive."""

    def __init__(self, eqn: JaxprEqn | None):
        super().__init__(eqn)
        self.eqn = eqn


def on_rows(jaxpr: Jaxpr, operands: Sequence[Any], take: Take, shapes: Sequence[Shape] | None = None) -> list[Any]:
    """Return the results of a jaxpr, in these shapes if they are given.

    Raises:
      Mixed: an equation mixes rows.
    """
    values = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*operands, *jaxpr.consts], strict=True))
    rows = Rows(jaxpr, values, take)
    rows.evaluate(jaxpr.eqns)
    return read(jaxpr.outvars, values) if shapes is None else list(map(rows.in_shape, jaxpr.outvars, shapes))


class Rows(NamedTuple):
    """The values of a jaxpr's variables so far, each whole or rows. `take` takes rows of a whole one."""

    jaxpr: Jaxpr
    values: Values
    take: Take

    def evaluate(self, eqns: Sequence[JaxprEqn]) -> None:
        """Evaluate some of the jaxpr's equations, and add their results."""
        for eqn in eqns:
            if rows := [n for n, v in enumerate(eqn.invars) if self._shape(v) != _whole(v)]:
                self.values.update(zip(eqn.outvars, self._results(eqn, rows[0]), strict=True))
            else:
                evaluate_equations(self.jaxpr, [eqn], self.values)

    def in_shape(self, atom: Any, shape: Shape, reader: JaxprEqn | None = None) -> Any:
        """Return a value that has this shape already, or such rows of a whole one, for an equation that reads it."""
        if self._shape(atom) == shape:
            return read([atom], self.values)[0]
        axes = _differing(shape, _whole(atom))
        if self._shape(atom) != _whole(atom) or len(axes) != 1:
            raise Mixed(reader)
        return self.take(self.values[atom], axes[0])

    def _shape(self, atom: Any) -> Shape:
        return np.shape(read([atom], self.values)[0])

    def _results(self, eqn: JaxprEqn, of: int) -> list[Any]:
        """Return the results of an equation whose operand number `of` is rows."""
        if eqn.primitive is cond_p:
            return self._cond(eqn)
        if eqn.primitive is scan_p:
            return self._scan(eqn)
        if eqn.primitive.name in CALLS | CUSTOM_RULES:
            return on_rows(nested(eqn)[0], read(eqn.invars, self.values), self.take)
        shapes, changed = self._of_kernel(eqn, of)
        operands = [self.in_shape(v, shape, eqn) for v, shape in zip(eqn.invars, shapes, strict=True)]
        outs = eqn.primitive.bind(*operands, **eqn.params | changed)
        outs = list(outs) if eqn.primitive.multiple_results else [outs]
        if any(len(_differing(x.shape, _whole(v))) != 1 for x, v in zip(outs, eqn.outvars, strict=True)):
            raise Mixed(eqn)  # a sum of rows has the shape of that of all; rows times rows differ on two axes
        return outs

    def _of_kernel(self, eqn: JaxprEqn, of: int) -> tuple[list[Shape], dict[str, Any]]:
        """Return the shapes of operands and the changed parameters with which an equation computes rows."""
        name, params, whole = eqn.primitive.name, eqn.params, _whole(eqn.invars[of])
        shapes = list(map(self._shape, eqn.invars))
        axis = _differing(shapes[of], whole)[0]
        rows = shapes[of][axis]
        if name in ELEMENTWISE | IDENTITIES:
            repeats = lambda shape: shape[axis : axis + 1] != (whole[axis],)  # a scalar, or an axis of size 1
            return [s if repeats(s) else _replaced(s, axis, rows) for s in map(_whole, eqn.invars)], {}
        if name == "dot_general":
            contracted, batch = params["dimension_numbers"]
            for one, other in zip(*batch, strict=True):
                fewer = min(shapes[0][one], shapes[1][other])
                shapes = [_replaced(shapes[0], one, fewer), _replaced(shapes[1], other, fewer)]
            if all(shapes[0][one] == shapes[1][other] for one, other in zip(*contracted, strict=True)):
                return shapes, {}
        if name == "broadcast_in_dim":
            return shapes, {"shape": _replaced(params["shape"], params["broadcast_dimensions"][axis], rows)}
        if name == "reshape" and params["dimensions"] is None:
            sizes = params["new_sizes"]
            for new, size in enumerate(sizes):
                if size == whole[axis] and math.prod(sizes[:new]) == math.prod(whole[:axis]):
                    return shapes, {"new_sizes": _replaced(sizes, new, rows)}
        if name in ("transpose", "squeeze") or (name in REDUCTIONS and "axes" in params):
            return shapes, {}
        raise Mixed(eqn)

    def _cond(self, eqn: JaxprEqn) -> list[Any]:
        """Return the results of a cond: what is rows in one branch is rows in all."""
        index, *operands = read(eqn.invars, self.values)
        run = lambda branch, shapes=None: lambda *xs: on_rows(branch, xs, self.take, shapes)
        branches = eqn.params["branches"]
        found = [[x.shape for x in jax.eval_shape(run(branch), *operands)] for branch in branches]
        fewest = [tuple(map(min, *shapes)) for shapes in zip(*found, strict=True)]
        return list(lax.switch(index, [run(branch, fewest) for branch in branches], *operands))

    def _scan(self, eqn: JaxprEqn) -> list[Any]:
        """Return the results of a scan: rows may be among the constants, the carry and the ys, but not the xs."""
        params, body = eqn.params, eqn.params["jaxpr"]
        carried = [n for n, operand in enumerate(operands_of(eqn, body)) if operand is None]
        first, end = (carried[0], carried[-1] + 1) if carried else (0, 0)
        if not carried or any(self._shape(v) != _whole(v) for v in eqn.invars[end:]):
            raise Mixed(eqn)
        consts, xs = read(eqn.invars[:first], self.values), read(eqn.invars[end:], self.values)
        run = lambda carry, x, shapes=None: on_rows(body, [*consts, *carry, *x], self.take, shapes)
        shapes, fewer = list[Shape](), list(map(self._shape, eqn.invars[first:end]))
        while shapes != fewer:  # a carry that begins whole may become rows
            shapes, carry = fewer, list(map(self.in_shape, eqn.invars[first:end], fewer))
            found = [x.shape for x in jax.eval_shape(run, carry, [v.aval for v in body.invars[end:]])]
            fewer = [tuple(map(min, *pair)) for pair in zip(shapes, found, strict=False)]

        def iteration(carry: Any, x: Any) -> tuple[Any, Any]:
            outs = run(carry, x, shapes + found[len(shapes) :])
            return outs[: len(shapes)], outs[len(shapes) :]

        carry, ys = lax.scan(iteration, carry, xs, params["length"], params["reverse"], params["unroll"])
        return [*carry, *ys]


def _whole(atom: Any) -> Shape:
    """Return the shape of a whole value."""
    return atom.aval.shape


def _differing(shape: Shape, whole: Shape) -> list[int]:
    """Return the axes on which shapes differ."""
    return [axis for axis, (n, of) in enumerate(zip(shape, whole, strict=True)) if n != of]


def _replaced(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])
