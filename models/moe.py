"""A mixture of experts: each token passes k of E MLPs; tokens and experts can be split over devices.

    norm -> router_logits -> routing -> fc1_input -> fc1 -> act -> fc2 -> each token's sum
                                           |                          |
                                     (to the experts'           (and back; both only
                                      devices)                   with an expert axis)

Where a token goes is decided by integers tagged `moe/routing`, which a policy always saves. If top-k were recomputed in
the backward pass, rounding could choose other experts than in the forward pass, and saved rows would belong to other
tokens. So only the indices of top-k are used: scores are gathered by the tagged integers.

The scores multiply `act`, not the outputs: the backward pass then does not need the output of fc2. Gate and up are two
grouped GEMMs, because each has a decision of its own; the halves of one result would be copied for that
(benchmarks/results/choices.json).
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxoffload import scope, tag
from jaxoffload.grouped import grouped_matmul, te
from models.config import Model
from models.sharding import RULES, on_each_device

ALIGN = {None: 1, "fp8": te.FP8_MULTIPLE}  # `model.quantize` -> each expert's rows are padded to a multiple of this

# ---- the layer ----


class Balance(NamedTuple):
    """How evenly a layer's tokens are spread over experts, on all devices; float32."""

    load_E: jax.Array  # the share of rows that each expert gets
    aux: jax.Array  # () Switch's load-balancing loss: 1 if even (Fedus et al., 2021)
    z: jax.Array  # () mean of logsumexp(logits)^2 (Zoph et al., 2022)
    dropped: jax.Array  # () the share of rows dropped, over capacity


def experts(config: Model, x_BxSxD: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, Balance]:
    """Compute the routed experts of a layer, on the mesh in use if there is one.

    Args:
      config: the model's.
      x_BxSxD: the normalised tokens.
      weights: router (D, E), gate and up (E, D, F), and down (E, F, D).

    Returns:
      (B, S, D), and the balance.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _experts_on_device(config, {}, x_BxSxD, weights)
    stream, wide = RULES.spec("batch", "sequence", "residual"), RULES.spec("experts", None, "mlp")
    specs = {"router": PartitionSpec(), "gate": wide, "up": wide, "down": RULES.spec("experts", "mlp", None)}
    on_device = functools.partial(_experts_on_device, config, dict(mesh.shape))
    return on_each_device(on_device, (stream, specs), (stream, PartitionSpec()))(x_BxSxD, weights)


def _experts_on_device(
    config: Model, sizes: dict[str, int], x_BxSxD: jax.Array, weights: dict[str, jax.Array]
) -> tuple[jax.Array, Balance]:
    """As `experts`, on one device, with its tokens, its L experts, and its part of F if there is a tensor axis.

    `sizes`: of each mesh axis; empty without a mesh.
    """
    B, S, D = x_BxSxD.shape
    x_TxD = x_BxSxD.reshape(B * S, D)
    with scope("moe"):
        # GPUs would round float32 to TF32's 10 bits.
        logits_TxE = jnp.matmul(x_TxD.astype(jnp.float32), weights["router"], precision=lax.Precision.HIGHEST)
        logits_TxE = tag(logits_TxE, "router_logits")
        scores_TxE = jax.nn.softmax(logits_TxE, axis=-1)
        parts, align = sizes.get("expert", 1), ALIGN[config.quantize]
        # Aligned on the device that runs the grouped GEMMs: this one, or the one that the rows are sent to.
        routing = choose(scores_TxE, config.experts_per_token, align if parts == 1 else 1)
        weight_Txk = row_weights(scores_TxE, routing, config.renormalize)
        # A row is one token for one expert.
        weight_Rx1 = moved(weight_Txk.reshape(-1, 1), routing.order_R, routing.place_Tk)
        rows_RxD, dropped = dispatch(x_TxD, routing), jnp.int32(0)
        if parts > 1:
            rows_RxD, dropped = _apply_remote_experts(config, rows_RxD, weight_Rx1, routing.sizes_E, weights)
        else:
            sizes_E = aligned(routing.sizes_E, align)
            rows_RxD = _apply_experts(config, rows_RxD, weight_Rx1, sizes_E, weights, full=align == 1)
        out_TxD = combine(rows_RxD, routing)
        if sizes.get("tensor", 1) > 1:  # each device has a part of F
            out_TxD = lax.psum(out_TxD, "tensor")
        balance = balance_of(logits_TxE, scores_TxE, routing, dropped, tuple(a for a in RULES.batch if a in sizes))
    return out_TxD.reshape(B, S, D), balance


def _apply_experts(
    config: Model,
    rows_RxD: jax.Array,
    weight_Rx1: jax.Array,
    sizes_L: jax.Array,
    weights: dict[str, jax.Array],
    full: bool,
) -> jax.Array:
    """Return (R, D): the experts' outputs, each times the weight of its row.

    The rows are sorted by expert; expert l has sizes_L[l]. `full`: every row belongs to an expert.
    """
    how: dict[str, Any] = {"backend": config.grouped, "quantize": config.quantize, "full": full}
    gemm = lambda x, w, name: grouped_matmul(x, w, sizes_L, name=name, **how)
    gate_RxF, up_RxF = gemm(rows_RxD, [weights["gate"], weights["up"]], name="fc1_input")
    fc1 = tag({"gate": gate_RxF, "up": up_RxF}, "fc1")
    act_RxF = swiglu(fc1).astype(jnp.float32) * weight_Rx1
    return tag(gemm(act_RxF.astype(rows_RxD.dtype), weights["down"], name="act"), "fc2")


def _apply_remote_experts(
    config: Model, rows_RxD: jax.Array, weight_Rx1: jax.Array, sizes_E: jax.Array, weights: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """As `_apply_experts`, but on the devices that have the experts; return the number of dropped rows, too."""
    R, parts = len(rows_RxD), lax.axis_size("expert")
    room = R if config.capacity is None else min(R, math.ceil(config.capacity * R / parts))
    exchange, dropped = make_exchange(sizes_E, R, room, ALIGN[config.quantize])
    there_SxD, weight_Sx1 = (to_experts(x, exchange) for x in (rows_RxD, weight_Rx1))
    # A leaf of fc1_input, so that it is kept if the rows are; otherwise it is sent again in the backward pass.
    weight_Sx1 = tag({"weight": weight_Sx1}, "fc1_input")["weight"]
    computed_SxD = _apply_experts(config, there_SxD, weight_Sx1, exchange.sizes_L, weights, full=False)
    return from_experts(computed_SxD, exchange), dropped


def swiglu(fc1: Mapping[str, jax.Array]) -> jax.Array:
    """Return (..., F), the input of fc2 (Shazeer, 2020)."""
    return jax.nn.silu(fc1["gate"]) * fc1["up"]


# ---- routing: which token goes to which expert ----


class Routing(NamedTuple):
    """The k experts of each of T tokens, and R rows sorted by expert: T * k, or more with alignment. All int32."""

    ids_Txk: jax.Array  # the experts of each token
    order_R: jax.Array  # sorted row -> t * k + j; T * k for padding
    place_Tk: jax.Array  # t * k + j -> sorted row
    sizes_E: jax.Array  # tokens of each expert


def choose(scores_TxE: jax.Array, k: int, align: int = 1) -> Routing:
    """Return the k experts of each token with the greatest scores.

    The rows of each expert begin at a multiple of `align`, and are padded to one. The result is tagged `routing` in
    the scope of the caller.
    """
    ids_Txk = lax.top_k(lax.stop_gradient(scores_TxE), k)[1].astype(jnp.int32)
    flat_Tk = ids_Txk.reshape(-1)
    order_R = jnp.argsort(flat_Tk, stable=True).astype(jnp.int32)
    place_Tk = jnp.zeros_like(order_R).at[order_R].set(jnp.arange(len(flat_Tk), dtype=jnp.int32))
    sizes_E = jnp.zeros(scores_TxE.shape[1], jnp.int32).at[flat_Tk].add(1)
    if align > 1:
        from_E, to_E = starts(sizes_E), starts(aligned(sizes_E, align))
        size = aligned_rows(len(flat_Tk), len(sizes_E), align)
        sorted_R = lookup(to_E, from_E, sizes_E, size, len(flat_Tk))
        order_R = order_R.at[sorted_R].get(mode="fill", fill_value=len(flat_Tk))
        place_Tk += (to_E - from_E)[flat_Tk]
    return tag(Routing(ids_Txk, order_R, place_Tk, sizes_E), "routing")


def row_weights(scores_TxE: jax.Array, routing: Routing, renormalize: bool) -> jax.Array:
    """Return (T, k): the scores of the chosen experts, divided by their sum if `renormalize`."""
    chosen_Txk = jnp.take_along_axis(scores_TxE, routing.ids_Txk, axis=1)
    if renormalize:
        chosen_Txk /= jnp.sum(chosen_Txk, axis=1, keepdims=True) + 1e-20
    return chosen_Txk


def balance_of(
    logits_TxE: jax.Array, scores_TxE: jax.Array, routing: Routing, dropped: jax.Array, axes: tuple[str, ...]
) -> Balance:
    """Return the balance over the devices along `axes`, which have the same number of tokens each."""
    mean = lambda x: lax.pmean(x, axes) if axes else x
    E, rows = logits_TxE.shape[1], routing.ids_Txk.size
    load_E = mean(routing.sizes_E.astype(jnp.float32) / rows)
    aux = E * jnp.sum(load_E * mean(jnp.mean(scores_TxE, axis=0)))
    z = mean(jnp.mean(jnp.square(jax.nn.logsumexp(logits_TxE, axis=1))))
    return Balance(load_E, aux, z, mean(dropped.astype(jnp.float32) / rows))


def aligned(sizes: jax.Array, align: int) -> jax.Array:
    """Return each size, rounded up to a multiple of `align`."""
    return -(-sizes // align) * align


def aligned_rows(rows: int, groups: int, align: int) -> int:
    """Return a multiple of `align` that is enough for `rows` in this many groups, each of them aligned."""
    return -(-(rows + groups * (align - 1)) // align) * align


def starts(lengths: jax.Array) -> jax.Array:
    """Return where each of several consecutive blocks begins."""
    return jnp.cumsum(lengths) - lengths


def lookup(starts: jax.Array, sources: jax.Array, lengths: jax.Array, size: int, missing: int) -> jax.Array:
    """Return (size,) int32: for each place, the index of the row that belongs there.

    Block b of B, flattened, puts lengths[b] rows, from sources[b] on, at the places from starts[b] on. `starts` is
    sorted. Places that no block fills are `missing`.
    """
    starts_B, sources_B, lengths_B = starts.reshape(-1), sources.reshape(-1), lengths.reshape(-1)
    place_N = jnp.arange(size, dtype=jnp.int32)
    block_N = jnp.sum(starts_B[None] <= place_N[:, None], axis=1) - 1
    offset_N = place_N - starts_B[block_N]
    return jnp.where(offset_N < lengths_B[block_N], sources_B[block_N] + offset_N, missing).astype(jnp.int32)


# ---- rows in another order; the transpose of each function is a gather too, never a scatter ----


@jax.custom_vjp
def dispatch(x_TxD: jax.Array, routing: Routing) -> jax.Array:
    """Return (R, D): the token of each row; zeros for padding."""
    token_R = routing.order_R // routing.ids_Txk.shape[1]
    if len(token_R) == routing.ids_Txk.size:
        return x_TxD[token_R]
    return x_TxD.at[token_R].get(mode="fill", fill_value=0)


@jax.custom_vjp
def combine(rows_RxD: jax.Array, routing: Routing) -> jax.Array:
    """Return (T, D): the sum of each token's rows, computed in float32, in the dtype of the rows."""
    rows_TxkxD = rows_RxD[routing.place_Tk].reshape(*routing.ids_Txk.shape, -1)
    return jnp.sum(rows_TxkxD.astype(jnp.float32), axis=1).astype(rows_RxD.dtype)


@jax.custom_vjp
def moved(x_NxD: jax.Array, there_M: jax.Array, back_N: jax.Array) -> jax.Array:
    """Return (M, D): rows `there_M` of x; zeros where that is N. `back_N`: where each row went; M if nowhere."""
    return x_NxD.at[there_M].get(mode="fill", fill_value=0)


dispatch.defvjp(lambda x, routing: (dispatch(x, routing), routing), lambda routing, dy: (combine(dy, routing), None))
combine.defvjp(lambda y, routing: (combine(y, routing), routing), lambda routing, dx: (dispatch(dx, routing), None))
moved.defvjp(
    lambda x, there, back: (moved(x, there, back), (there, back)),
    lambda moves, dy: (moved(dy, moves[1], moves[0]), None, None),
)


# ---- exchange: rows go to the devices that hold their experts, and back ----


class Exchange(NamedTuple):
    """Where the rows of one of P devices go, and where those that it receives come from. All int32.

    There are E = P * L experts, L on each device. Buffers have static shapes: each device sends at most C rows to
    another, all R in the worst case, or fewer with a capacity. A row has four places, one after the other:

    - one of R: sorted by expert, on the device that it comes from;
    - one of P * C: in the buffer that is sent, C places for each device;
    - one of P * C: in the buffer that arrives;
    - one of S: sorted by the experts of the device that it arrives at. S is P * C, or more where groups are aligned.
    """

    sent_PC: jax.Array  # place in the sent buffer -> row; R if empty
    slot_R: jax.Array  # row -> place in the sent buffer; the size of the buffer if dropped
    sorted_S: jax.Array  # place by expert -> place in the arrived buffer; P * C if empty
    arrived_PC: jax.Array  # the inverse; S if empty
    sizes_L: jax.Array  # rows of each expert here, aligned


def make_exchange(sizes_E: jax.Array, rows: int, room: int, align: int = 1) -> tuple[Exchange, jax.Array]:
    """Return the exchange of R `rows` sorted by expert, tagged `routing` in the caller's scope, and the number dropped.

    Expert e has sizes_E[e] rows. At most C, `room`, go to one device; of more, each of its experts keeps the same
    share. Where they arrive, those of an expert are padded to a multiple of `align`.
    """
    parts = lax.axis_size("expert")
    sizes_PxL = sizes_E.reshape(parts, -1)
    kept_PxL = _kept_sizes(sizes_PxL, room)
    place_PxL, first_E = _places(kept_PxL, room), starts(sizes_E)
    sent_PC = lookup(place_PxL, first_E, kept_PxL, parts * room, missing=rows)
    slot_R = lookup(first_E, place_PxL, kept_PxL, rows, missing=parts * room)
    arrived_PxL = lax.all_to_all(kept_PxL, "expert", 0, 0)  # from each device, for each expert here
    exchange = Exchange(sent_PC, slot_R, *_by_expert(arrived_PxL, room, align))
    return tag(exchange, "routing"), _total(sizes_E) - _total(kept_PxL)


# Without a dtype, a sum of int32 would be int64 under jax_enable_x64.
_total = functools.partial(jnp.sum, dtype=jnp.int32)


def _places(sizes_PxL: jax.Array, room: int) -> jax.Array:
    """Return (P, L): where in a buffer with `room` for each device the rows of each expert begin."""
    first_P = room * jnp.arange(len(sizes_PxL), dtype=jnp.int32)
    return first_P[:, None] + jnp.cumsum(sizes_PxL, axis=1) - sizes_PxL


def _by_expert(arrived_PxL: jax.Array, room: int, align: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `sorted_S`, `arrived_PC` and `sizes_L` of an exchange, from the rows that each device sends each expert.

    The rows of one device for one expert are a block. Blocks arrive in the order of devices, and are computed in the
    order of experts.
    """
    size = len(arrived_PxL) * room
    begin_PxL = _places(arrived_PxL, room)
    sizes_L = aligned(_total(arrived_PxL, axis=0), align)
    target_PxL = starts(sizes_L)[None] + jnp.cumsum(arrived_PxL, axis=0) - arrived_PxL
    room_S = aligned_rows(size, len(sizes_L), align)
    sorted_S = lookup(target_PxL.T, begin_PxL.T, arrived_PxL.T, room_S, missing=size)
    return sorted_S, lookup(begin_PxL, target_PxL, arrived_PxL, size, missing=room_S), sizes_L


def _kept_sizes(sizes_PxL: jax.Array, room: int) -> jax.Array:
    """Return (P, L): how many rows of each expert are sent, at most `room` to each device."""
    ends_PxL = jnp.cumsum(sizes_PxL, axis=1)
    total_Px1 = ends_PxL[:, -1:]
    # GPUs round quotients differently: so the last expert gets what is left, and none more than it has.
    share_PxL = jnp.floor(ends_PxL * (room / jnp.maximum(total_Px1, 1))).astype(jnp.int32)
    cut_PxL = jnp.minimum(share_PxL, room).at[:, -1].set(room)
    kept_PxL = jnp.where(total_Px1 <= room, ends_PxL, cut_PxL)
    return jnp.minimum(jnp.diff(kept_PxL, axis=1, prepend=0), sizes_PxL)


def to_experts(rows_RxD: jax.Array, exchange: Exchange) -> jax.Array:
    """Return (S, D): the rows of all devices for the experts here, sorted by expert; all other places are zero."""
    buffer = _all_to_all(moved(rows_RxD, exchange.sent_PC, exchange.slot_R))
    return moved(buffer, exchange.sorted_S, exchange.arrived_PC)


def from_experts(rows_SxD: jax.Array, exchange: Exchange) -> jax.Array:
    """Return (R, D): each row back on the device that it came from; zeros for dropped rows."""
    buffer = _all_to_all(moved(rows_SxD, exchange.arrived_PC, exchange.sorted_S))
    return moved(buffer, exchange.slot_R, exchange.sent_PC)


def _all_to_all(buffer_PCxD: jax.Array) -> jax.Array:
    """Send part p of each device's buffer to device p, where it becomes the part with the sender's index."""
    parts = buffer_PCxD.reshape(lax.axis_size("expert"), -1, buffer_PCxD.shape[1])
    return lax.all_to_all(parts, "expert", 0, 0).reshape(buffer_PCxD.shape)
