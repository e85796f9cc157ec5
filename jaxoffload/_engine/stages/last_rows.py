"""Residuals of the last layer of a chunk on their way to the host and back: in pieces, one with each layer of a tick.

While a tick's layers run, each writes a piece of what the last layer of the tick before left, and fetches a piece of
what the next tick's cotangents begin with. So a tick copies one row more, no copy is waited for, and only rows that a
loop writes or reads travel, which is what XLA can do by DMA inside a branch.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..layers.layer import Layer
from ..layers.passes import BackwardState, Cotangents, ForwardState
from ..layers.rows import filled, opaque_zero, put_row, take_row
from ..layers.segments import Segment, SegmentResiduals
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


class Writing(NamedTuple):
    """A `ForwardState`, and stacks of pieces."""

    carry: list[Any]
    ys: list[Any]
    saved: SegmentResiduals[Any]
    pieces: list[Any]


def writing(
    run: Callable[..., ForwardState], state: ForwardState, rows: list[Any], stacks: list[Any], segment: Segment
) -> tuple[Callable[..., Writing], Writing]:
    """Let layer i of a forward pass also write piece i of each of these rows to row i of its stack."""
    cuts = [cut(row.shape, segment.layers) for row in rows]
    zero = opaque_zero()

    def layer(i: Any, state: Writing, inlined: bool) -> Writing:
        stacks = []
        for stack, row, c, copy in zip(state.pieces, rows, cuts, segment.copies, strict=True):
            with copy:
                stacks.append(put_row(stack, to_host(_piece(row, c, (i + zero) % c.pieces)), i))
        return Writing(*run(i, ForwardState(state.carry, state.ys, state.saved), inlined), stacks)

    return layer, Writing(*state, stacks)


def in_place_of(old: list[Any], new: list[Any], segment: Segment) -> list[Any]:
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
    return joined_rows(rows, old)


class Fetching(NamedTuple):
    """A `BackwardState`, and the rows that are fetched, each cut."""

    cotangents: Cotangents
    fetched: list[Any]
    ahead: list[Any]


def fetching(
    run: Callable[..., BackwardState], state: BackwardState, rows: list[Any], stacks: list[Any], segment: Segment
) -> tuple[Callable[..., Fetching], Fetching]:
    """Let iteration i of a backward pass also fetch piece i of a row from row i of its stack, into these rows."""
    cuts = [cut(row.shape, segment.layers) for row in rows]
    zero = opaque_zero()

    def layer(i: Any, state: Fetching, inlined: bool) -> Fetching:
        ahead = []
        for row, stack, c, copy in zip(state.ahead, stacks, cuts, segment.copies, strict=True):
            with copy:
                piece = to_device(take_row(stack, i))
            ahead.append(lax.dynamic_update_index_in_dim(row, piece, (i + zero) % c.pieces, c.axis + 1))
        return Fetching(*run(i, BackwardState(state.cotangents, state.fetched), inlined), ahead)

    return layer, Fetching(*state, [row.reshape(c.split(row.shape)) for row, c in zip(rows, cuts, strict=True)])


def joined_rows(ahead: list[Any], rows: list[Any]) -> list[Any]:
    """Rows like these, from rows that are cut."""
    return [cut_row.reshape(row.shape) for cut_row, row in zip(ahead, rows, strict=True)]
