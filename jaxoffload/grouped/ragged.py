"""The backend "ragged": `jax.lax.ragged_dot`. It runs everywhere and is the baseline; on GPUs it does G
times the FLOPs."""

from collections.abc import Callable

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


def _forward(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, w, group_sizes, preferred_element_type=jnp.float32)


def _dx(dy: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _forward(dy, w.swapaxes(1, 2), group_sizes)


def _dw(x: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot_general(x, dy, group_sizes, _OVER_ROWS, preferred_element_type=jnp.float32)


def _rounded(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Round the result to the first operand's dtype within the call, so that a trace shows what kernels store."""
    return batched_alike(lambda x, *others: f(x, *others).astype(x.dtype))


forward_float32, dx_float32, dw_float32 = map(batched_alike, (_forward, _dx, _dw))
forward, dx, dw = map(_rounded, (_forward, _dx, _dw))

RAGGED = Backend("ragged", refuses, forward, dx, dw)
