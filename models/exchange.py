"""Expert parallelism: rows go to the devices that hold their experts, and back.

Buffers have static shapes. By default they hold the worst case, in which a device gets all R rows of each of the P
devices, so no row is dropped. With a capacity they are smaller; rows over it are dropped, and counted. What is sent is
either whole buffers or, on GPUs, only the rows in them (a ragged all-to-all).
"""

import functools
import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxoffload import tag
from models.routing import aligned, aligned_rows, lookup, moved, starts


class Exchange(NamedTuple):
    """Where the rows of one of P devices go, and where those that it receives come from. All int32.

    There are E = P * L experts, L on each device. A row has four places, one after the other:

    - one of R: sorted by expert, on the device that it comes from;
    - one of P * C: in the buffer that is sent, C places for each device. A ragged exchange sends from R places;
    - one of P * C: in the buffer that arrives;
    - one of S: sorted by the experts of the device that it arrives at. S is P * C, or more where groups are aligned.
    """

    sent_PC: jax.Array | None  # place in the sent buffer -> row; R if empty. None: rows are sent as sorted
    slot_R: jax.Array | None  # row -> place in the sent buffer; the size of the buffer if dropped
    # Ragged only, for each device: the first row sent to it, their number; the number received from it, their first.
    ragged_4xP: jax.Array | None
    sorted_S: jax.Array  # place by expert -> place in the arrived buffer; P * C if empty
    arrived_PC: jax.Array  # the inverse; S if empty
    sizes_L: jax.Array  # rows of each expert here, aligned


def capacity_rows(rows: int, parts: int, capacity: float | None) -> int:
    """Return C, the most rows that one device sends to another; `capacity` is in multiples of an even share."""
    if capacity is None or capacity >= parts:
        return rows
    return math.ceil(Fraction(str(capacity)) * rows / parts)  # in floats the product is rounded, perhaps to a row more


class Route(NamedTuple):
    """The static part of an exchange: how many rows go where at most, and how."""

    rows: int  # R: rows per device
    parts: int  # P: devices
    room: int  # C: most rows that one device sends to another
    axis: str  # mesh axis along which they are sent
    align: int = 1  # the rows of each expert are padded to a multiple of this where they arrive
    ragged: bool = False  # only rows are sent, not whole buffers


def make_exchange(sizes_E: jax.Array, route: Route) -> tuple[Exchange, jax.Array]:
    """Return the exchange of rows sorted by expert, of which expert e has sizes_E[e], and the number of dropped rows.

    Where a device would get more than `room` rows from another, each of its experts keeps the same share of its
    rows, and the last are dropped. The exchange is tagged `routing` in the scope of the caller.
    """
    rows, parts, room, axis, align, ragged = route
    sizes_PxL, first_PxL = (x_E.reshape(parts, -1) for x_E in (sizes_E, starts(sizes_E)))
    kept_PxL = _kept_sizes(sizes_PxL, room)
    first_P, sent_P = first_PxL[:, 0], _total(kept_PxL, axis=1)
    arrived_PxL = lax.all_to_all(kept_PxL, axis, 0, 0)  # from each device, for each expert here
    sorted_S, arrived_PC, sizes_L = _by_expert(arrived_PxL, room, align)
    sent_PC = slot_R = ragged_4xP = None
    if ragged:
        there_P = lax.all_to_all(first_P, axis, 0, 0)
        ragged_4xP = jnp.stack([first_P, sent_P, _total(arrived_PxL, axis=1), there_P])
    if not ragged or room < rows:
        begin_P, places = (first_P, rows) if ragged else (_buffers(parts, room), parts * room)
        place_PxL = begin_P[:, None] + jnp.cumsum(kept_PxL, axis=1) - kept_PxL
        place_E, first_E, kept_E = (x_PxL.reshape(-1) for x_PxL in (place_PxL, first_PxL, kept_PxL))
        sent_PC = lookup(place_E, first_E, kept_E, places, rows)
        slot_R = lookup(first_E, place_E, kept_E, rows, places)
    exchange = Exchange(sent_PC, slot_R, ragged_4xP, sorted_S, arrived_PC, sizes_L)
    return tag(exchange, "routing"), _total(sizes_E) - _total(sent_P)


# Without a dtype, a sum of int32 would be int64 under jax_enable_x64.
_total = functools.partial(jnp.sum, dtype=jnp.int32)


def _buffers(parts: int, room: int) -> jax.Array:
    """Return (P,): where each device's part of a buffer begins."""
    return room * jnp.arange(parts, dtype=jnp.int32)


def _by_expert(arrived_PxL: jax.Array, room: int, align: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `sorted_S`, `arrived_PC` and `sizes_L` of an exchange, from the rows that each device sends each expert.

    The rows of one device for one expert are a block. Blocks arrive in the order of devices, and are computed in the
    order of experts.
    """
    size = len(arrived_PxL) * room
    begin_PxL = _buffers(len(arrived_PxL), room)[:, None] + jnp.cumsum(arrived_PxL, axis=1) - arrived_PxL
    sizes_L = aligned(_total(arrived_PxL, axis=0), align)
    target_PxL = starts(sizes_L)[None] + jnp.cumsum(arrived_PxL, axis=0) - arrived_PxL
    by_expert = [x_PxL.T.reshape(-1) for x_PxL in (target_PxL, begin_PxL, arrived_PxL)]
    by_device = [x_PxL.reshape(-1) for x_PxL in (begin_PxL, target_PxL, arrived_PxL)]
    room_S = aligned_rows(size, len(sizes_L), align)
    return lookup(*by_expert, room_S, size), lookup(*by_device, size, room_S), sizes_L


def _kept_sizes(sizes_PxL: jax.Array, room: int) -> jax.Array:
    """Return (P, L): how many rows of each expert are sent, at most `room` to each device."""
    ends_PxL = jnp.cumsum(sizes_PxL, axis=1)
    total_Px1 = ends_PxL[:, -1:]
    # GPUs round quotients differently: so the last expert gets what is left, and none more than it has.
    share_PxL = jnp.floor(ends_PxL * (room / jnp.maximum(total_Px1, 1))).astype(jnp.int32)
    cut_PxL = jnp.minimum(share_PxL, room).at[:, -1].set(room)
    kept_PxL = jnp.where(total_Px1 <= room, ends_PxL, cut_PxL)
    return jnp.minimum(jnp.diff(kept_PxL, axis=1, prepend=0), sizes_PxL)


def to_experts(rows_RxD: jax.Array, exchange: Exchange, parts: int, axis: str) -> jax.Array:
    """Return (S, D): the rows of all devices for the experts here, sorted by expert; all other places are zero."""
    if exchange.sent_PC is not None:
        rows_RxD = moved(rows_RxD, exchange.sent_PC, exchange.slot_R)
    if exchange.ragged_4xP is None:
        buffer = _all_to_all(rows_RxD, parts, axis)
    else:
        buffer = sent(rows_RxD, exchange.ragged_4xP, len(exchange.arrived_PC), len(rows_RxD), axis)
    return moved(buffer, exchange.sorted_S, exchange.arrived_PC)


def from_experts(rows_SxD: jax.Array, exchange: Exchange, rows: int, parts: int, axis: str) -> jax.Array:
    """Return (R, D), R being `rows`: each row back on the device that it came from; zeros for dropped rows."""
    buffer = moved(rows_SxD, exchange.arrived_PC, exchange.sorted_S)
    if exchange.ragged_4xP is None:
        back = _all_to_all(buffer, parts, axis)
    else:
        back = returned(buffer, exchange.ragged_4xP, rows, len(buffer), axis)
    return back if exchange.sent_PC is None else moved(back, exchange.slot_R, exchange.sent_PC)


# Each is the transpose of the other. JAX's own derivative would exchange the offsets once more.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def sent(rows_RxD: jax.Array, ragged_4xP: jax.Array, size: int, rows: int, axis: str) -> jax.Array:
    """Return (P * C, D), P * C being `size`: the rows of all devices for the experts here, device p's from p * C on."""
    first_P, sent_P, received_P, _ = ragged_4xP
    place_P = jnp.full_like(first_P, size // len(first_P) * lax.axis_index(axis))
    return _ragged(rows_RxD, size, axis, first_P, sent_P, place_P, received_P)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def returned(buffer_PCxD: jax.Array, ragged_4xP: jax.Array, rows: int, size: int, axis: str) -> jax.Array:
    """Return (R, D), R being `rows`: each row back on the device that it came from."""
    _, sent_P, received_P, there_P = ragged_4xP
    place_P = size // len(sent_P) * jnp.arange(len(sent_P), dtype=jnp.int32)
    return _ragged(buffer_PCxD, rows, axis, place_P, received_P, there_P, sent_P)


sent.defvjp(
    lambda x, moves, *static: (sent(x, moves, *static), moves),
    lambda size, rows, axis, moves, dy: (returned(dy, moves, rows, size, axis), None),
)
returned.defvjp(
    lambda x, moves, *static: (returned(x, moves, *static), moves),
    lambda rows, size, axis, moves, dy: (sent(dy, moves, size, rows, axis), None),
)


def _ragged(x: jax.Array, size: int, axis: str, *moves_P: jax.Array) -> jax.Array:
    """`moves_P`: for each device, the first row sent to it, their number, their place there; the number received."""
    return lax.ragged_all_to_all(x, jnp.zeros((size, x.shape[1]), x.dtype), *moves_P, axis_name=axis)


def _all_to_all(buffer_PCxD: jax.Array, parts: int, axis: str) -> jax.Array:
    """Send part p of each device's buffer to device p, where it becomes the part with the sender's index."""
    C, D = buffer_PCxD.shape[0] // parts, buffer_PCxD.shape[1]
    return lax.all_to_all(buffer_PCxD.reshape(parts, C, D), axis, 0, 0).reshape(parts * C, D)
