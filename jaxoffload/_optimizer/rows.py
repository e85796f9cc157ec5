"""Evaluate equations that were traced for whole arrays on some of their rows.

A value is rows if its shape is not that of its variable; they lie along the axis on which the two differ. An
elementwise equation makes rows of rows along any axis, a sum along those that it does not add up, a matmul along batch
axes. `jax.vmap` makes the function of all rows from that of one. This is the way back, which JAX does not have: an
optimizer's update is written, and its masks are decided, for whole arrays.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from .._engine.jaxprs.inline import Values, evaluate_equations, read
from .._jax import ELEMENTWISE, IDENTITIES, REDUCTIONS

Shape = tuple[int, ...]
Take = Callable[[Any, int], Any]  # a whole value, and the axis -> the rows of it that are evaluated


class Mixed(Exception):
    """The results of an equation on rows depend on other rows, or nothing is known of its primitive."""


class Rows(NamedTuple):
    """The values of a jaxpr's variables so far, each whole or rows. `take` takes rows of a whole one."""

    jaxpr: Jaxpr
    values: Values
    take: Take

    def evaluate(self, eqn: JaxprEqn) -> None:
        """Evaluate an equation of the jaxpr, and add its results.

        Raises:
          Mixed: it mixes rows.
        """
        if all(self._shape(v) == _whole(v) for v in eqn.invars):
            evaluate_equations(self.jaxpr, [eqn], self.values)
            return
        shapes, changed = self._on_rows(eqn)
        operands = list(map(self.in_shape, eqn.invars, shapes))
        found = eqn.primitive.bind(*operands, **eqn.params | changed)
        outs = found if eqn.primitive.multiple_results else [found]
        if any(len(_differing(x.shape, _whole(v))) != 1 for x, v in zip(outs, eqn.outvars, strict=True)):
            raise Mixed  # a sum of rows has the shape of that of all; rows times rows differ on two axes
        self.values.update(zip(eqn.outvars, outs, strict=True))

    def in_shape(self, atom: Any, shape: Shape) -> Any:
        """Return a value that has this shape already, or such rows of a whole one."""
        if self._shape(atom) == shape:
            return read([atom], self.values)[0]
        axes = _differing(shape, _whole(atom))
        if self._shape(atom) != _whole(atom) or len(axes) != 1:
            raise Mixed
        return self.take(self.values[atom], axes[0])

    def _shape(self, atom: Any) -> Shape:
        return np.shape(read([atom], self.values)[0])

    def _on_rows(self, eqn: JaxprEqn) -> tuple[list[Shape], dict[str, Any]]:
        """Return the shapes of operands and the changed parameters with which an equation computes rows."""
        name, params, wholes = eqn.primitive.name, eqn.params, list(map(_whole, eqn.invars))
        shapes = list(map(self._shape, eqn.invars))
        of, whole = next(pair for pair in zip(shapes, wholes, strict=True) if pair[0] != pair[1])
        axis = _differing(of, whole)[0]
        rows = of[axis]
        if name in ELEMENTWISE | IDENTITIES or (name == "concatenate" and params["dimension"] != axis):
            repeats = lambda shape: shape[axis : axis + 1] != (whole[axis],)  # a scalar, or an axis of size 1
            return [s if repeats(s) else _replaced(s, axis, rows) for s in wholes], {}
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
        raise Mixed


def _whole(atom: Any) -> Shape:
    """Return the shape of a whole value."""
    return atom.aval.shape


def _differing(shape: Shape, whole: Shape) -> list[int]:
    """Return the axes on which shapes differ."""
    return [axis for axis, (n, of) in enumerate(zip(shape, whole, strict=True)) if n != of]


def _replaced(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])
