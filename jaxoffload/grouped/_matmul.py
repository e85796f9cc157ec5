"""`grouped_matmul`: one matmul per group of rows, and its derivative from a backend's three grouped GEMMs."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._jax import as_array
from .._tag import tag
from .._text import array_type, nearest, short
from .._tracing import tracing, under
from . import te
from ._backend import NAMES, backend_for, chosen_backend, refuse, wrong_operands
from ._interface import FP8, ArgumentError, Backend, column_wise, in_groups, known, row_wise
from ._ragged_fp8 import E4M3, E5M2


def grouped_matmul(
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
    group_sizes: jax.Array,
    *,
    backend: Literal["auto", "ragged", "mosaic", "te"] = "auto",
    quantize: Literal["fp8"] | None = None,
    full: bool = False,
    name: str = "",
) -> Any:
    """Compute `x[rows of group g] @ w[g]` for each group g. Differentiable once, in reverse mode, in x and w.

    The groups' rows follow one another. Rows past `sum(group_sizes)` are zero in the result and in x's cotangent, and
    have no influence as long as they are finite. An empty group's part of w's cotangent is zero.

    Plain operands are accumulated in float32. The residuals are x, w and group_sizes themselves, so a `tag` on x is all
    that a policy needs. With `quantize="fp8"` each group of x and each matrix of w is rounded to float8_e4m3fn with its
    own scale, and each group of the result's cotangent to float8_e5m2. The backward pass reads only rounded copies: the
    column-wise one of x, and one of w, which is made again if it was not kept. x's copies are the leaves of one
    `GroupedTensor`, tagged `NAME.data`, `NAME.scale_inv`, `NAME.columnwise_data`, ...; the backward pass needs `data`
    and `scale_inv` only to recompute the result. Saving, offloading or recomputing any of them changes no bit.
    Compared with unrounded, normally distributed operands, the relative error in the Frobenius norm is at most 4 % in
    the result and 7 % in either cotangent (measured: 3.7 % in the result, 5.9 % in x's cotangent, 5.9 % in w's).

    Args:
      x: (M, K) float32, bfloat16 or float16.
      w: (G, K, N) of x's dtype; or several such arrays, as for a gate and its values, for which x is quantised once.
      group_sizes: (G,) int32, the number of rows in each group, at least 0; their sum is at most M.
      backend: which kernels to use. "ragged": `jax.lax.ragged_dot`, everywhere; FP8 is emulated. "mosaic": JAX's
        kernels for Hopper GPUs; 16-bit operands, K and N multiples of 64, M a multiple of 8 and at least 64, no FP8.
        "te": TransformerEngine; FP8 needs K, N, M and each group's size to be multiples of 16. For bfloat16 it can
        leave the group sizes on the device; K and N must then be multiples of 8. All its other kernels support only one
        GPU per process, and are refused on a mesh of several. "auto": the one that `chosen_backend` names.
      quantize: "fp8", or None for plain operands.
      full: promise that the sizes sum to M, so that no rows of plain operands have to be set to zero. In a trace, where
        the promise cannot be checked, a smaller sum leaves arbitrary rows past all groups and a wrong cotangent of w.
      name: the tag of x inside the open scope or, if x is quantised, of its copies.

    Returns:
      (M, N) of x's dtype; for several w a list of them.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value, or the backend cannot compute with it.
      ImportError: backend "te", and TransformerEngine cannot be imported or is too old.
      NotImplementedError: under vmap, with a backend other than "ragged"; differentiated twice.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload.grouped import grouped_matmul
      >>> x, w = jnp.ones((5, 2)), jnp.stack([jnp.ones((2, 3)), jnp.full((2, 3), 10.0)])
      >>> grouped_matmul(x, w, jnp.array([2, 3], jnp.int32))[:, 0].tolist()
      [2.0, 2.0, 20.0, 20.0, 20.0]
    """
    matrices = w if isinstance(w, Sequence) else (w,)
    if not matrices:
        raise ArgumentError("w: no matrices; give one (G, K, N), or several")
    for one in matrices:
        _check_arguments(x, one, group_sizes, backend, quantize, full)
        refuse(list(_explicitly_sharded(x=x, w=one, group_sizes=group_sizes)))
    names = [chosen_backend(x, one, quantize=quantize) if backend == "auto" else backend for one in matrices]
    if quantize and len(set(names)) > 1:
        names = ["ragged"] * len(names)  # one quantised copy of x serves all
    chosen = [backend_for(one_name, x, one, quantize) for one_name, one in zip(names, matrices, strict=True)]
    _check_values(group_sizes, x.shape[0], te.FP8_MULTIPLE if te.TE_FP8 in chosen else 1, full)
    x, group_sizes, *ws = _varying_alike(*map(as_array, (x, group_sizes, *matrices)))
    if quantize is None:
        x = tag(x, name) if name else x
        ys = [_grouped_gemm(one, full, x, w, group_sizes) for one, w in zip(chosen, ws, strict=True)]
    else:  # the forward rule is traced outside all scopes
        ys = _grouped_gemm_fp8(chosen[0], tracing().scope + name if name else "", x, tuple(ws), group_sizes)
    return list(ys) if isinstance(w, Sequence) else ys[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_gemm(backend: Backend, full: bool, x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _grouped_gemm_forward(backend, full, x, w, group_sizes)[0]


@jax.custom_jvp
def _once[T](operands: T) -> T:
    """Return the operands of a part of a derivative, which refuses to be differentiated again."""
    return operands


@_once.defjvp
def _refuse_twice(*_: Any) -> Any:
    # A backend's kernels have no derivative, and that of a `custom_vmap` calls its rule without end.
    raise NotImplementedError(
        "grouped_matmul cannot be differentiated twice (jax.hessian, a gradient of a gradient): its derivative is "
        "defined in reverse mode, once; use jax.lax.ragged_dot where you need second derivatives"
    )


def _grouped_gemm_forward(backend: Backend, full: bool, x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> Any:
    y = backend.forward(*_once((x, w, group_sizes)))
    return y if full else in_groups(y, group_sizes), (x, w, group_sizes)


def _grouped_gemm_backward(backend: Backend, full: bool, kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    (x, w, group_sizes), dy = _once((kept, dy))
    dx = backend.dx(dy, w, group_sizes)
    if full:
        return dx, (backend.dw_full or backend.dw)(x, dy, group_sizes), None
    return in_groups(dx, group_sizes), backend.dw(x, dy, group_sizes), None


_grouped_gemm.defvjp(_grouped_gemm_forward, _grouped_gemm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_gemm_fp8(backend: FP8, name: str, x: jax.Array, ws: tuple[jax.Array, ...], group_sizes: jax.Array) -> Any:
    return _grouped_gemm_fp8_forward(backend, name, x, ws, group_sizes)[0]


def _grouped_gemm_fp8_forward(
    backend: FP8, name: str, x: jax.Array, ws: tuple[jax.Array, ...], group_sizes: Any
) -> Any:
    x, ws = _once((x, ws))
    quantised = backend.quantize(x, group_sizes, E4M3)
    if name:
        with under(scope=""):
            quantised = tag(quantised, name)
    for_forward, for_dx = zip(*map(backend.weights, ws), strict=True)
    rows = row_wise(quantised)
    ys = tuple(in_groups(backend.forward(rows, w, x.dtype), group_sizes) for w in for_forward)
    return ys, (column_wise(quantised), for_dx, group_sizes)


def _grouped_gemm_fp8_backward(backend: FP8, name: str, kept: Any, dys: tuple[jax.Array, ...]) -> tuple[Any, Any, None]:
    (x, ws, group_sizes), dys = _once((kept, dys))
    quantised = [backend.quantize(dy, group_sizes, E5M2) for dy in dys]
    dtype = dys[0].dtype
    dxs = [in_groups(backend.dx(row_wise(q), w, dtype), group_sizes) for q, w in zip(quantised, ws, strict=True)]
    dws = tuple(backend.dw(x, column_wise(q), dtype) for q in quantised)
    return functools.reduce(jnp.add, dxs), dws, None


_grouped_gemm_fp8.defvjp(_grouped_gemm_fp8_forward, _grouped_gemm_fp8_backward)


def _varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Return the arrays, all varying over the same axes of a `shard_map` that checks this, so that their cotangents are
    summed over the right axes."""
    axes: list[frozenset[str]] = [frozenset(jax.typeof(a).manual_axis_type.varying) for a in arrays]
    missing = [tuple(sorted(frozenset().union(*axes) - own)) for own in axes]
    return [lax.pcast(a, m, to="varying") if m else a for a, m in zip(arrays, missing, strict=True)]


def _check_arguments(x: Any, w: Any, group_sizes: Any, backend: str, quantize: str | None, full: bool) -> None:
    if not hasattr(group_sizes, "dtype"):
        raise ArgumentError("group_sizes is not an array; x, w and group_sizes must be")
    wrong = wrong_operands(x, w, quantize)
    if group_sizes.dtype != jnp.int32 or group_sizes.shape != w.shape[:1]:
        wrong.append(f"group_sizes: {array_type(group_sizes)}; w: {array_type(w)} needs int32{list(w.shape[:1])}")
    if not isinstance(full, bool):
        wrong.append(f"full: {full!r}; allowed are True and False")
    if backend not in NAMES:
        allowed = ", ".join(map(repr, NAMES))
        wrong.append(f"backend: {short(backend)}; allowed are {allowed}{nearest(backend, NAMES)}")
    refuse(wrong)


def _explicitly_sharded(**operands: Any) -> Iterator[str]:
    for name, a in operands.items():
        aval = jax.typeof(a)
        if any(aval.sharding.spec):
            yield f"{name}: {aval.str_short()} is sharded over explicit axes; call it in a jax.shard_map"


def _check_values(group_sizes: Any, rows: int, multiple: int, full: bool) -> None:
    """Check what only values show; a trace has none."""
    if (sizes := known(group_sizes)) is None:
        return
    if sizes.min(initial=0) < 0 or sizes.sum() > rows:
        raise ArgumentError(f"group_sizes: {sizes.tolist()}; none may be negative, and the sum may not exceed {rows}")
    if full and sizes.sum() != rows:
        raise ArgumentError(f"full: True, but group_sizes: {sizes.tolist()} sum to {sizes.sum()} of {rows} rows")
    if (sizes % multiple).any():
        raise ArgumentError(
            f"backend 'te' cannot do this: group_sizes: {sizes.tolist()}; FP8 needs multiples of {multiple}"
        )
