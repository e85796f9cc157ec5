"""What a backend of `grouped_matmul` is: three products and what it cannot do, for plain and for FP8 operands.

Shapes: x (M, K), w (G, K, N), dy (M, N), group_sizes (G,) int32. What a backend writes to rows past `sum(group_sizes)`
does not matter: `grouped_matmul` sets them to zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import Problem, UserError
from ._tensor import GroupedTensor


class GroupedMatmulError(UserError):
    """`grouped_matmul` cannot do what it is asked; also a ValueError or an ImportError."""

    def __init__(self, why: str):
        super().__init__([Problem("grouped_matmul", f"grouped_matmul: {why}")])


class ArgumentError(GroupedMatmulError, ValueError):
    """An argument is wrong, or the backend cannot compute with arguments like these."""


class BackendMissing(GroupedMatmulError, ImportError):
    """The backend "te", and TransformerEngine cannot be imported or is too old."""


class Shape(NamedTuple):
    """Of one product: (M, K) rows times (G, K, N), on a mesh of so many devices, as far as one is known."""

    M: int
    K: int
    N: int
    dtype: Any
    devices: int

    def not_a_multiple(self, of: int, *names: str) -> str | None:
        """What is wrong with the first of these dimensions that is no multiple of `of`."""
        wrong = (
            f"{name} = {getattr(self, name)} is not a multiple of {of}" for name in names if getattr(self, name) % of
        )
        return next(wrong, None)


class Backend(NamedTuple):
    """Attributes:
    name: what `backend=` calls it.
    refuses: why it cannot do a product of this shape, None if it can.
    forward: (x, w, group_sizes) -> (M, N); dx: (dy, w, group_sizes) -> (M, K);
    dw: (x, dy, group_sizes) -> (G, K, N), zero for an empty group. All of x's dtype, accumulated in float32.
    dw_full: dw where the sizes sum up to M, if that is less to do.
    """

    name: str
    refuses: Callable[[Shape], str | None]
    forward: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    dx: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    dw: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    dw_full: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None


class Half(NamedTuple):
    """Of a quantised `GroupedTensor` the row-wise or the column-wise copy: all that one GEMM reads of it."""

    data: Any  # (M, K) or (K, M) float8
    scale_inv: Any  # (G,) float32
    group_sizes: Any  # (G,) int32


def row_wise(x: GroupedTensor) -> Half:
    return Half(x.data, x.scale_inv, x.group_sizes)


def column_wise(x: GroupedTensor) -> Half:
    return Half(x.columnwise_data, x.columnwise_scale_inv, x.group_sizes)


class FP8(NamedTuple):
    """The same three products of quantised operands: row-wise ones for `forward` and `dx`, column-wise ones for `dw`.
    The last argument is the result's dtype.

    Attributes:
      quantize: (x, group_sizes, float8 dtype) -> a `GroupedTensor` of both copies. Its group sizes may count the rows
        past all groups, which are zeros, to the last one.
      weights: w -> what `forward` needs of it, what `dx` needs.
    """

    name: str
    refuses: Callable[[Shape], str | None]
    quantize: Callable[[jax.Array, jax.Array, Any], GroupedTensor]
    weights: Callable[[jax.Array], tuple[Any, Any]]
    forward: Callable[[Half, Any, Any], jax.Array]
    dx: Callable[[Half, Any, Any], jax.Array]
    dw: Callable[[Half, Half, Any], jax.Array]


def known(group_sizes: Any) -> np.ndarray | None:
    """Their values; None in a trace, and where some are another process's."""
    if isinstance(group_sizes, jax.core.Tracer) or not getattr(group_sizes, "is_fully_addressable", True):
        return None
    return np.asarray(group_sizes)


def in_groups(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """The rows (M, N), with zeros past `sum(group_sizes)`, whatever was there."""
    numbers = lax.broadcasted_iota(jnp.int32, (rows.shape[0], 1), 0)
    return jnp.where(numbers < jnp.sum(group_sizes), rows, jnp.zeros((), rows.dtype))


def batched_alike(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`f` under vmap with all operands batched, on one leading axis: of others `lax.ragged_dot` has no batch."""
    alike, many = jax.custom_batching.custom_vmap(f), jax.custom_batching.custom_vmap(jax.vmap(f))

    def whole(size: int, in_batched: Any, args: Any) -> list[jax.Array]:
        return [a if b else lax.broadcast(a, (size,)) for a, b in zip(args, in_batched, strict=True)]

    @alike.def_vmap
    def all_batched(axis_size: int, in_batched: Any, *args: Any) -> Any:
        return many(*whole(axis_size, in_batched, args)), True

    @many.def_vmap
    def two_axes_as_one(axis_size: int, in_batched: Any, *args: Any) -> Any:
        out = many(*(a.reshape(-1, *a.shape[2:]) for a in whole(axis_size, in_batched, args)))
        return out.reshape(axis_size, -1, *out.shape[1:]), True

    return alike


def unbatched(name: str, f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`f` with a sentence instead of what its kernel says under vmap."""
    guarded = jax.custom_batching.custom_vmap(f)

    @guarded.def_vmap
    def refuse(axis_size: int, in_batched: Any, *args: Any) -> Any:
        raise NotImplementedError(f"grouped_matmul: backend {name!r} cannot be vmapped; backend 'ragged' can")

    return guarded
