"""The interface of a `grouped_matmul` backend: three grouped GEMMs and what it refuses, for plain and FP8 operands.

Shapes: x (M, K), w (G, K, N), dy (M, N), group_sizes (G,) int32. A backend may write anything to the rows past
`sum(group_sizes)`: `grouped_matmul` sets them to zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import Problem, UserError
from .._tracing import alike_everywhere
from ._tensor import GroupedTensor


class GroupedMatmulError(UserError):
    """`grouped_matmul` cannot do what it is asked; also a ValueError or an ImportError.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload.grouped import GroupedMatmulError, grouped_matmul
      >>> try:
      ...     grouped_matmul(jnp.ones((5, 2)), jnp.ones((2, 2, 3)), jnp.array([2, 3]), backend="tee")
      ... except GroupedMatmulError as error:
      ...     print(isinstance(error, ValueError))
      True
    """

    def __init__(self, why: str):
        super().__init__([Problem("grouped_matmul", f"grouped_matmul: {why}")])


class ArgumentError(GroupedMatmulError, ValueError):
    """An argument is wrong, or the backend cannot compute with arguments like these."""


class BackendMissing(GroupedMatmulError, ImportError):
    """The backend "te", and TransformerEngine cannot be imported or is too old."""


class Shape(NamedTuple):
    """The sizes of one grouped GEMM, (M, K) rows times (G, K, N), and of the mesh, as far as it is known."""

    M: int
    K: int
    N: int
    dtype: Any
    devices: int

    def not_a_multiple(self, of: int, *names: str) -> str | None:
        """Return a message about the first dimension that is not a multiple of `of`; None if all are."""
        wrong = (
            f"{name} = {getattr(self, name)} is not a multiple of {of}" for name in names if getattr(self, name) % of
        )
        return next(wrong, None)


class Backend(NamedTuple):
    """The grouped GEMMs of plain operands; results have x's dtype and are accumulated in float32.

    Attributes:
      name: the name in `backend=`.
      refuses: why the backend cannot compute a GEMM of this shape; None if it can.
      forward: (x, w, group_sizes) -> (M, N).
      dx: (dy, w, group_sizes) -> (M, K).
      dw: (x, dy, group_sizes) -> (G, K, N), zero for an empty group.
      dw_full: a cheaper dw for sizes that sum to M, if there is one.
    """

    name: str
    refuses: Callable[[Shape], str | None]
    forward: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    dx: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    dw: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    dw_full: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None


class QuantizedCopy(NamedTuple):
    """The row-wise or the column-wise copy in a quantised `GroupedTensor`: all that one GEMM reads of it."""

    data: Any  # (M, K) or (K, M) float8
    scale_inv: Any  # (G,) float32
    group_sizes: Any  # (G,) int32


def row_wise(x: GroupedTensor) -> QuantizedCopy:
    return QuantizedCopy(x.data, x.scale_inv, x.group_sizes)


def column_wise(x: GroupedTensor) -> QuantizedCopy:
    return QuantizedCopy(x.columnwise_data, x.columnwise_scale_inv, x.group_sizes)


class FP8(NamedTuple):
    """The grouped GEMMs of quantised operands: row-wise copies for `forward` and `dx`, column-wise ones for `dw`.
    The last argument is the result's dtype.

    Attributes:
      quantize: (x, group_sizes, float8 dtype) -> a `GroupedTensor` with both copies. Its last group may include the
        rows past all groups, which are zero.
      weights: w -> the copy that `forward` reads, the copy that `dx` reads.
    """

    name: str
    refuses: Callable[[Shape], str | None]
    quantize: Callable[[jax.Array, jax.Array, Any], GroupedTensor]
    weights: Callable[[jax.Array], tuple[Any, Any]]
    forward: Callable[[QuantizedCopy, Any, Any], jax.Array]
    dx: Callable[[QuantizedCopy, Any, Any], jax.Array]
    dw: Callable[[QuantizedCopy, QuantizedCopy, Any], jax.Array]


def known(group_sizes: Any) -> np.ndarray | None:
    """Return the values of the group sizes; None in a trace, or if another process holds some of them."""
    if isinstance(group_sizes, jax.core.Tracer) or not getattr(group_sizes, "is_fully_addressable", True):
        return None
    return np.asarray(group_sizes)


def in_groups(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return the rows (M, N), with zeros past `sum(group_sizes)`."""
    numbers = lax.broadcasted_iota(jnp.int32, (rows.shape[0], 1), 0)
    return jnp.where(numbers < jnp.sum(group_sizes), rows, jnp.zeros((), rows.dtype))


def batched_alike(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make vmap batch every operand at axis 0, the only case `lax.ragged_dot` supports."""
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
    """Return `f`, whose kernel is traced once for all layers and policies, with an error under vmap that names the
    backend instead of what the kernel would raise."""
    guarded = jax.custom_batching.custom_vmap(alike_everywhere(f))

    @guarded.def_vmap
    def refuse(axis_size: int, in_batched: Any, *args: Any) -> Any:
        raise NotImplementedError(f"grouped_matmul: backend {name!r} cannot be vmapped; backend 'ragged' can")

    return guarded
