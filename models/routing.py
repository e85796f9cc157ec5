"""Which token goes to which expert: scores, top-k, the permutation that sorts by expert, and the balance of the load.

Where a token goes is decided by integers tagged `moe/routing`, which a policy always saves. If top-k were recomputed in
the backward pass, rounding could choose other experts than in the forward pass, and saved rows would belong to other
tokens. So only the indices of top-k are used: weights are gathered from the scores by the tagged integers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxoffload import tag


class Routing(NamedTuple):
    """The k experts of each of T tokens, and R rows sorted by expert: T * k, or more with alignment. All int32."""

    ids_Txk: jax.Array  # the experts of each token
    order_R: jax.Array  # sorted row -> t * k + j; T * k for padding
    place_Tk: jax.Array  # t * k + j -> sorted row
    sizes_E: jax.Array  # tokens of each expert


class Balance(NamedTuple):
    """How evenly a layer's tokens are spread over experts, on all devices; float32."""

    load_E: jax.Array  # the share of rows that each expert gets
    aux: jax.Array  # () Switch's load-balancing loss: 1 if even (Fedus et al., 2021)
    z: jax.Array  # () mean of logsumexp(logits)^2 (Zoph et al., 2022)
    dropped: jax.Array  # () the share of rows dropped, over capacity


def scores(logits_TxE: jax.Array, kind: str) -> jax.Array:
    """Return the experts' scores, from float32 logits. `kind`: as `model.router`."""
    return jax.nn.softmax(logits_TxE, axis=-1) if kind == "softmax" else jax.nn.sigmoid(logits_TxE)


def choose(scores_TxE: jax.Array, bias_E: jax.Array | None, k: int, align: int = 1) -> Routing:
    """Return the k experts of each token with the greatest scores. `bias_E` is added for the choice only.

    The rows of each expert begin at a multiple of `align`, and are padded to one. The result is tagged `routing` in
    the scope of the caller.
    """
    by = lax.stop_gradient(scores_TxE if bias_E is None else scores_TxE + bias_E[None])
    ids_Txk = lax.top_k(by, k)[1].astype(jnp.int32)
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


def aligned(sizes: jax.Array, align: int) -> jax.Array:
    """Return each size, rounded up to a multiple of `align`."""
    return -(-sizes // align) * align


def aligned_rows(rows: int, groups: int, align: int) -> int:
    """Return a multiple of `align` that is enough for `rows` in this many groups, each of them aligned."""
    return -(-(rows + groups * (align - 1)) // align) * align


def starts(lengths: jax.Array) -> jax.Array:
    """Return where each of several consecutive blocks begins."""
    return jnp.cumsum(lengths) - lengths


def weights(scores_TxE: jax.Array, routing: Routing, renormalize: bool, scale: float) -> jax.Array:
    """Return (T, k): the scores of the chosen experts, divided by their sum if `renormalize`, times `scale`."""
    chosen_Txk = jnp.take_along_axis(scores_TxE, routing.ids_Txk, axis=1)
    if renormalize:
        chosen_Txk /= jnp.sum(chosen_Txk, axis=1, keepdims=True) + 1e-20
    return scale * chosen_Txk


def balance(
    logits_TxE: jax.Array, scores_TxE: jax.Array, routing: Routing, dropped: jax.Array, axes: tuple[str, ...]
) -> Balance:
    """Return the balance over the devices along `axes`, which have the same number of tokens each."""
    mean = lambda x: lax.pmean(x, axes) if axes else x
    E, rows = logits_TxE.shape[1], routing.ids_Txk.size
    load_E = mean(routing.sizes_E.astype(jnp.float32) / rows)
    shares_TxE = scores_TxE / (jnp.sum(scores_TxE, axis=1, keepdims=True) + 1e-20)
    aux = E * jnp.sum(load_E * mean(jnp.mean(shares_TxE, axis=0)))
    z = mean(jnp.mean(jnp.square(jax.nn.logsumexp(logits_TxE, axis=1))))
    return Balance(load_E, aux, z, mean(dropped.astype(jnp.float32) / rows))


# ---- rows in another order; the transpose of each function is a gather too, never a scatter ----


@jax.custom_vjp
def dispatch(x_TxD: jax.Array, routing: Routing) -> jax.Array:
    """Return (R, D): the token of each row; zeros for padding."""
    token_R = routing.order_R // _k(routing)
    if len(token_R) == routing.ids_Txk.size:
        return x_TxD[token_R]
    return x_TxD.at[token_R].get(mode="fill", fill_value=0)


@jax.custom_vjp
def combine(rows_RxD: jax.Array, routing: Routing) -> jax.Array:
    """Return (T, D): the sum of each token's rows, computed in float32, in the dtype of the rows."""
    rows_TxkxD = rows_RxD[routing.place_Tk].reshape(-1, _k(routing), rows_RxD.shape[1])
    return jnp.sum(rows_TxkxD.astype(jnp.float32), axis=1).astype(rows_RxD.dtype)


@jax.custom_vjp
def moved(x_NxD: jax.Array, there_M: jax.Array, back_N: jax.Array) -> jax.Array:
    """Return (M, D): rows `there_M` of x; zeros where that is N. `back_N`: where each row went; M if nowhere."""
    return x_NxD.at[there_M].get(mode="fill", fill_value=0)


def _k(routing: Routing) -> int:
    return routing.ids_Txk.shape[1]


dispatch.defvjp(lambda x, routing: (dispatch(x, routing), routing), lambda routing, dy: (combine(dy, routing), None))
combine.defvjp(lambda y, routing: (combine(y, routing), routing), lambda routing, dx: (dispatch(dx, routing), None))
moved.defvjp(
    lambda x, there, back: (moved(x, there, back), (there, back)),
    lambda moves, dy: (moved(dy, moves[1], moves[0]), None, None),
)


def lookup(starts_B: jax.Array, sources_B: jax.Array, lengths_B: jax.Array, size: int, missing: Any) -> jax.Array:
    """Return (size,) int32: for each place, the index of the row that belongs there.

    Block b puts lengths_B[b] rows, from sources_B[b] on, at the places from starts_B[b] on. `starts_B` is sorted.
    Places that no block fills are `missing`.
    """
    place_N = jnp.arange(size, dtype=jnp.int32)
    block_N = jnp.sum(starts_B[None] <= place_N[:, None], axis=1) - 1
    offset_N = place_N - starts_B[block_N]
    return jnp.where(offset_N < lengths_B[block_N], sources_B[block_N] + offset_N, missing).astype(jnp.int32)
