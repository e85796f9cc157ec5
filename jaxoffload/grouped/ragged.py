"""The backend "ragged": `jax.lax.ragged_dot`. It runs everywhere and is the baseline; on GPUs it does G
times the FLOPs."""

import jax
import jax.numpy as jnp
from jax import lax

from ._interface import Backend, Shape, batched_alike

# dw contracts the rows of each group.
_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def refuses(shape: Shape) -> None:
    """Refuse nothing."""


@batched_alike
def forward_float32(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, w, group_sizes, preferred_element_type=jnp.float32)


def dx_float32(dy: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return forward_float32(dy, w.swapaxes(1, 2), group_sizes)


@batched_alike
def dw_float32(x: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot_general(x, dy, group_sizes, _OVER_ROWS, preferred_element_type=jnp.float32)


def forward(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return forward_float32(x, w, group_sizes).astype(x.dtype)


def dx(dy: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return dx_float32(dy, w, group_sizes).astype(dy.dtype)


def dw(x: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return dw_float32(x, dy, group_sizes).astype(x.dtype)


RAGGED = Backend("ragged", refuses, forward, dx, dw)
