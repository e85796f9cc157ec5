"""Residuals of the last layer of a chunk on their way to the host and back: in pieces, one with each layer of a tick.

While a tick's layers run, each writes a piece of what the last layer of the tick before left, and fetches a piece of
what the next tick's cotangents begin with. So a tick copies one row more, no copy is waited for, and only rows that a
loop writes or reads travel, which is what XLA can do by DMA inside a branch.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..layers.layer import Layer
from ..layers.passes import BackwardState, ForwardState, Pass
from ..layers.rows import filled, opaque_zero, put_row, take_row
from ..layers.segments import Segment
from ..layers.transport import to_device, to_host


class Cut(NamedTuple):
    """How a row is cut: along an axis, in so many pieces. Element n of the axis is in piece n mod `pieces`.

    So a device has a part of each piece if the axis is sharded, and cutting communicates nothing.
    """

    axis: int
    pieces: int

    def split(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with an axis more, behind the one that is cut: that of the pieces."""
        shape, axis = shape or (1,), self.axis
        return (*shape[:axis], shape[axis] // self.pieces, self.pieces, *shape[axis + 1 :])


def cut(shape: tuple[int, ...], layers: int) -> Cut:
    """In as many pieces as there are layers, or in fewer if the shape does not divide so; along the longest axis."""
    shape = shape or (1,)
    most = [max(n for n in range(1, layers + 1) if size % n == 0) for size in shape]
    axis = max(range(len(shape)), key=lambda axis: (most[axis], shape[axis]))
    return Cut(axis, most[axis])


def beyond_a_row(layer: Layer, layers: int) -> int:
    """Bytes per device that the pieces of a layer's residuals take, one for each of so many layers, beyond a row."""
    rows = zip(layer.layout.split(layer.forward.out_avals).host, layer.sizes.host, strict=True)
    return sum(more_than_a_row(aval.shape, size, layers) for aval, size in rows)


def more_than_a_row(shape: tuple[int, ...], size: int, layers: int) -> int:
    """Return these bytes of one residual of this shape and so many bytes per device."""
    pieces = cut(shape, layers).pieces
    return size * (layers - pieces) // pieces


def empty_pieces(segment: Segment, rows: Sequence[Any]) -> list[Any]:
    """A stack of pieces on the host for each of these rows (shapes and dtypes): one for each layer of a segment.

    If there are fewer pieces than layers, some are there twice.
    """
    first = jax.make_jaxpr(lambda: [_piece(row, cut(row.shape, segment.layers), 0) for row in rows])()
    return [to_host(safely_filled(aval, (segment.layers,))) for aval in first.out_avals]


def safely_filled(aval: Any, lead: tuple[int, ...] = ()) -> Any:
    """An array that may be computed with, though nobody reads the result: no integer in it is out of range."""
    return filled(aval, None if jnp.issubdtype(aval.dtype, jnp.inexact) else 0, lead)


def _piece(row: Any, cut: Cut, number: Any) -> Any:
    return lax.dynamic_index_in_dim(row.reshape(cut.split(row.shape)), number, cut.axis + 1, keepdims=False)


def travels(segment: Segment) -> bool:
    """Return if the residuals of its last layer go to the host too. Only the first segment of a chunk can be so."""
    return 0 < segment.on_host == segment.layers


def writing(steps: Pass, segment: Segment, rows: list[Any], stacks: list[Any]) -> Pass:
    """Let layer i of a forward pass also write piece i of each of these rows to row i of its stack.

    Return what the pass returns, the last rows that its first segment leaves in place of these, and the stacks.
    """
    if not travels(segment):
        return (yield from steps), [], []
    loop = next(steps)
    run, zero, cuts = loop.layer, opaque_zero(), [cut(row.shape, segment.layers) for row in rows]

    def layer(i: Any, state: ForwardState, inlined: bool) -> ForwardState:
        stacks = []
        for stack, row, c, copy in zip(state.beside, rows, cuts, segment.copies, strict=True):
            with copy:
                stacks.append(put_row(stack, to_host(_piece(row, c, (i + zero) % c.pieces)), i))
        return run(i, state, inlined)._replace(beside=stacks)

    loop.layer, loop.state = layer, loop.state._replace(beside=stacks)
    yield loop
    state: ForwardState = loop.state
    left = _in_place_of(rows, state.saved.last, segment)
    loop.state = state._replace(saved=state.saved._replace(last=[]), beside=())
    return (yield from steps), left, state.beside


def _in_place_of(old: list[Any], new: list[Any], segment: Segment) -> list[Any]:
    """The new rows, copied to where the old ones were.

    XLA plans branches as if they ran one after another. A result of the first is held while the second runs, unless it
    is an operand that both update in place. So that XLA does not see that nothing is left of the old rows, they are
    replaced in two parts, at offsets that it cannot compute.
    """
    zero, rows = opaque_zero(), []
    for row, x in zip(old, new, strict=True):
        c = cut(row.shape, segment.layers)
        row, x = row.reshape(c.split(row.shape)), x.reshape(c.split(row.shape))
        for begin, end in itertools.pairwise(sorted({0, c.pieces // 2, c.pieces})):
            part = lax.slice_in_dim(x, begin, end, axis=c.axis + 1)
            row = lax.dynamic_update_slice_in_dim(row, part, begin + zero, c.axis + 1, allow_negative_indices=False)
        rows.append(row)
    return _joined(rows, old)


def fetching(steps: Pass, segments: Sequence[Segment], last: list[Any], into: list[Any], stacks: list[Any]) -> Pass:
    """Let a backward pass begin its first segment, which is the last to run, with these last rows.

    Iteration i there also fetches piece i of each row of the next tick from row i of its stack. Return what the pass
    returns, and the rows that are fetched, in place of `into`; none if last rows do not travel.
    """
    for _ in segments[1:]:
        yield next(steps)
    loop = next(steps)
    run, zero, cuts = loop.layer, opaque_zero(), [cut(row.shape, segments[0].layers) for row in into]

    def layer(i: Any, state: BackwardState, inlined: bool) -> BackwardState:
        ahead = []
        for row, stack, c, copy in zip(state.beside, stacks, cuts, segments[0].copies, strict=False):
            with copy:
                piece = to_device(take_row(stack, i))
            ahead.append(lax.dynamic_update_index_in_dim(row, piece, (i + zero) % c.pieces, c.axis + 1))
        return run(i, state, inlined)._replace(beside=ahead)

    in_pieces = [row.reshape(c.split(row.shape)) for row, c in zip(into, cuts, strict=True)]
    loop.layer, loop.state = layer, loop.state._replace(fetched=last, beside=in_pieces)
    yield loop
    return (yield from steps), _joined(loop.state.beside, into)


def _joined(in_pieces: Sequence[Any], rows: list[Any]) -> list[Any]:
    """Rows like these, from rows that are cut."""
    return [x.reshape(row.shape) for x, row in zip(in_pieces, rows, strict=True)]
