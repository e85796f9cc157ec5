"""Which rows of its operands an equation needs for some rows of its result.

An elementwise equation needs the same rows, along any axis; a sum those along an axis that it does not add up; a matmul
those of a batch axis, or those of one operand and the other whole. `jax.vmap` makes the function of all rows from that
of one. This is the way back, which JAX does not have: an optimizer's update is written, and its masks are decided, for
whole arrays.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from .._jax import ELEMENTWISE, IDENTITIES, REDUCTIONS

Axis = int | None  # along which a value is rows; None if it is whole


def axes_needed(eqn: JaxprEqn, axis: int) -> Sequence[Axis] | None:
    """Return the axis of each operand along which it is rows where the result is rows along `axis`. Return None if rows
    of the result need other rows, or nothing is known of the primitive."""
    if len(eqn.outvars) != 1:
        return None
    name, params = eqn.primitive.name, eqn.params
    *shapes, result = (_shape(v) for v in [*eqn.invars, *eqn.outvars])
    if name in ELEMENTWISE | IDENTITIES or (name == "concatenate" and params["dimension"] != axis):
        return [axis if shape[axis : axis + 1] == result[axis : axis + 1] else None for shape in shapes]
    if name == "dot_general":
        (left, right), batch = params["dimension_numbers"]
        of_left, of_right = (_others(*each) for each in zip(shapes, (left, right), batch, strict=True))
        return [*zip(*batch, strict=True), *((n, None) for n in of_left), *((None, n) for n in of_right)][axis]
    if name == "broadcast_in_dim":
        kept = {new: old for old, new in enumerate(params["broadcast_dimensions"]) if shapes[0][old] == result[new]}
        return [kept.get(axis)]
    if name == "reshape" and params["dimensions"] is None:
        place = lambda shape, n: (shape[n], math.prod(shape[:n]))
        return [n for n in range(len(shapes[0])) if place(shapes[0], n) == place(result, axis)][:1] or None
    if name == "transpose":
        return [params["permutation"][axis]]
    if name == "squeeze" or (name in REDUCTIONS and "axes" in params):
        return [_others(shapes[0], params["dimensions" if name == "squeeze" else "axes"])[axis]]
    return None


def block_of(eqn: JaxprEqn, axis: int, blocks: int, operands: Sequence[Any]) -> Any:
    """Return one of so many blocks of rows of a result, from those of the operands that `axes_needed` says."""
    params = dict(eqn.params)
    if key := {"broadcast_in_dim": "shape", "reshape": "new_sizes"}.get(eqn.primitive.name):
        shape = params[key]
        params[key] = (*shape[:axis], shape[axis] // blocks, *shape[axis + 1 :])
    return eqn.primitive.bind(*operands, **params)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _others(shape: Sequence[int], *axes: Sequence[int]) -> list[int]:
    """Return the axes that are not among these."""
    return [n for n in range(len(shape)) if not any(n in some for some in axes)]
