"""FP8 in plain JAX for the backend "ragged": what TransformerEngine's tensor scaling computes. Runs everywhere.

A group is scaled by the largest float8 over its largest magnitude and rounded to nearest (TransformerEngine's "current
scaling"). A GEMM multiplies the float8 values, accumulates in float32, and multiplies the sum by both operands'
`scale_inv`. Where a group's values are so small that its scale would be infinite, the scale is a finite one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import ragged
from ._interface import FP8, QuantizedCopy, Shape, in_groups
from ._tensor import GroupedTensor

# The usual pair: cotangents need more range than precision.
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

# The largest scale whose reciprocal is not subnormal: XLA on CPU flushes subnormal numbers to zero.
_LARGEST_SCALE = 2.0**126


class Weights(NamedTuple):
    data: jax.Array  # (G, K, N) float8
    scale_inv: jax.Array  # (G,) float32


def refuses(shape: Shape) -> str | None:
    size = shape.M * max(shape.K, shape.N)
    return f"{size} elements an operand; without TransformerEngine at most 2**31 - 1" if size >= 2**31 else None


def group_of(numbers: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return (M,) int32: the group of each row number; G past all groups."""
    return jnp.sum(numbers[:, None] >= jnp.cumsum(group_sizes)[None], 1, dtype=jnp.int32)


def amax_of_groups(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return (G,) float32: the largest magnitude of each group; 0 for an empty group."""
    group = group_of(jnp.arange(x.shape[0], dtype=jnp.int32), group_sizes)
    of_rows = jnp.max(jnp.abs(x), 1, initial=0).astype(jnp.float32)
    return jnp.zeros(group_sizes.shape, jnp.float32).at[group].max(of_rows, mode="drop")


def _scale(amax: jax.Array, dtype: Any) -> jax.Array:
    """Return the scale of each group, finite and above zero. For an infinite quotient TransformerEngine's kernels take
    the largest float32 (`compute_scale_from_amax`,
    https://github.com/NVIDIA/TransformerEngine/blob/v2.18/transformer_engine/common/recipe/recipe_common.cuh)."""
    usable = (amax > 0) & jnp.isfinite(amax)
    scale = jnp.where(usable, float(jnp.finfo(dtype).max) / jnp.where(usable, amax, 1), 1)
    return jnp.minimum(scale, _LARGEST_SCALE)


def _of_rows(of_groups: jax.Array, group: jax.Array) -> jax.Array:
    """Return (M, 1): the value of each row's group; the last group's for rows past all groups, which are zero."""
    return of_groups.at[group].get(mode="clip")[:, None]


def _places(group_sizes: jax.Array, M: int, K: int) -> jax.Array:
    """Return (M, K) int32: each element's index in the flat column-wise buffer of groups, each transposed."""
    rows = jnp.arange(M, dtype=jnp.int32)
    sizes = jnp.concatenate([group_sizes, (M - jnp.sum(group_sizes, dtype=jnp.int32))[None]])
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    group = group_of(rows, group_sizes)
    start, size = _of_rows(starts, group), _of_rows(sizes, group)
    return start * K + jnp.arange(K, dtype=jnp.int32)[None] * size + (rows[:, None] - start)


def to_columns(data: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return `columnwise_data` (K, M) of `data` (M, K)."""
    places = _places(group_sizes, *data.shape)
    return jnp.zeros(data.size, data.dtype).at[places].set(data, unique_indices=True).reshape(data.shape[::-1])


def from_columns(columnwise: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return `data` (M, K) of `columnwise_data` (K, M)."""
    return columnwise.reshape(-1)[_places(group_sizes, *columnwise.shape[::-1])]


def quantize(x: jax.Array, group_sizes: jax.Array, dtype: Any) -> GroupedTensor:
    x = in_groups(x, group_sizes)
    amax = amax_of_groups(x, group_sizes)
    scale = _scale(amax, dtype)
    group = group_of(jnp.arange(x.shape[0], dtype=jnp.int32), group_sizes)
    data = (x.astype(jnp.float32) * _of_rows(scale, group)).astype(dtype)
    # Divided twice: two leaves with separate decisions must be two values.
    return GroupedTensor(data, group_sizes, 1 / scale, to_columns(data, group_sizes), 1 / scale, amax)


def weights(w: jax.Array) -> tuple[Weights, Weights]:
    scale = _scale(jnp.max(jnp.abs(w), (1, 2)).astype(jnp.float32), E4M3)
    both = Weights((w.astype(jnp.float32) * scale[:, None, None]).astype(E4M3), 1 / scale)
    return both, both


def _exact(data: jax.Array) -> jax.Array:
    """Return the float8 values as bfloat16, which holds them exactly. The barrier keeps XLA:GPU from dropping the
    rounding between two conversions (xla_allow_excess_precision)."""
    return jax.lax.optimization_barrier(data).astype(jnp.bfloat16)


def _scaled(sums: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
    """Return the sums times both operands' `scale_inv`, the smaller first: the product of both can underflow where the
    result does not, and with the larger first the sums can overflow."""
    return sums * jnp.minimum(one, other) * jnp.maximum(one, other)


def _rows_scaled(rows: jax.Array, half: QuantizedCopy, w: Weights) -> jax.Array:
    group = group_of(jnp.arange(rows.shape[0], dtype=jnp.int32), half.group_sizes)
    return _scaled(rows, _of_rows(half.scale_inv, group), _of_rows(w.scale_inv, group))


def forward(x: QuantizedCopy, w: Weights, dtype: Any) -> jax.Array:
    y = ragged.forward_float32(_exact(x.data), _exact(w.data), x.group_sizes)
    return _rows_scaled(y, x, w).astype(dtype)


def dx(dy: QuantizedCopy, w: Weights, dtype: Any) -> jax.Array:
    dx = ragged.dx_float32(_exact(dy.data), _exact(w.data), dy.group_sizes)
    return _rows_scaled(dx, dy, w).astype(dtype)


def dw(x: QuantizedCopy, dy: QuantizedCopy, dtype: Any) -> jax.Array:
    rows = lambda half: _exact(from_columns(half.data, half.group_sizes))
    dw = ragged.dw_float32(rows(x), rows(dy), x.group_sizes)
    return _scaled(dw, x.scale_inv[:, None, None], dy.scale_inv[:, None, None]).astype(dtype)


RAGGED_FP8 = FP8("ragged", refuses, quantize, weights, forward, dx, dw)
