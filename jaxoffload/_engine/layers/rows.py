"""Rows of stacks of layers: take, put and add one, and make empty stacks."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from ..._jax import UNINITIALISED, add_jaxvals, define, lower_fun, lowers_for_one_device, on_device
from ..decide.derivative import looks_for_nans


def opaque_zero() -> Any:
    """0, added to a layer's number so that XLA cannot compute the offsets in stacks on the device.

    XLA:GPU makes a DMA copy of each slice whose offset it can compute, on four streams in turn. For the host that is
    what we want. But a slice of the weights may wait in its stream behind a host copy, and the compute waits for the
    slice; and a matmul whose result goes into a stack at such an offset runs again for its other readers. At an offset
    that XLA cannot compute, fused kernels read a slice from the stack themselves. Before cuBLAS and other kernels XLA
    copies it; `read_in_place` in passes.py says for which of them the offset has no such zero.
    """
    # https://github.com/openxla/xla: DynamicSliceCopyFusionAsyncWrapper, ExecutionStreamAssignment
    return lax.optimization_barrier(jnp.int32(0))


def take_row(stack: Any, i: Any) -> Any:
    return lax.dynamic_index_in_dim(stack, i, keepdims=False, allow_negative_indices=False)


def put_row(stack: Any, x: Any, i: Any) -> Any:
    return lax.dynamic_update_index_in_dim(stack, x, i, 0, allow_negative_indices=False)


def add_to_row(stack: Any, x: Any, i: Any) -> Any:
    """The stack with `x` added to row i, which keeps its leading axis: XLA:GPU would not fuse a reshaped row with the
    sum, but copy it first."""
    # https://github.com/openxla/xla: InstructionFusion::ShouldFuseInPlaceOp
    row = lax.dynamic_slice_in_dim(stack, i, 1, allow_negative_indices=False)
    total = add_jaxvals(row, jnp.expand_dims(summand(x, stack), 0))
    return lax.dynamic_update_slice_in_dim(stack, total, i, 0, allow_negative_indices=False)


def summand(x: Any, total: Any) -> Any:
    """Return `x` on the device and in the dtype of a sum, to add to it."""
    x = on_device(x)
    return x if x.dtype == total.dtype else x.astype(total.dtype)


def empty_stack(aval: Any, rows: int, after: Sequence[Any] = ()) -> Any:
    """Return a stack of uninitialised rows like `aval`, allocated after these arrays are computed."""
    return filled(aval, lead=(rows,), after=after)


def _lower_uninitialised(ctx: Any, *after: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """XLA divides no array that it only allocates: each of several devices would make all of it. What it can divide,
    full of one uninitialised number, is written once.

    XLA may allocate what has no operands at the start of the program.
    """
    alone = lowers_for_one_device(ctx)
    if alone and after and ctx.module_context.platforms == ("cuda",):
        # JAX lowers `lax.empty` to a call of this target without operands. With some XLA:GPU emits no code for it
        # either, but merges equal calls: hence an operand of its own for each.
        allocate = jax.ffi.ffi_call("AllocateBuffer", jax.ShapeDtypeStruct(shape, dtype))
        make = lambda *after: allocate(lax.empty((), dtype), *after)
    elif alone:
        make = lambda *_: lax.empty(shape, dtype)
    else:
        make = lambda *after: lax.broadcast(_computed_after(lax.empty((), dtype), after), shape)
    return lower_fun(make, multiple_results=False)(ctx, *after)


def _computed_after(x: Any, others: Sequence[Any]) -> Any:
    return lax.optimization_barrier((x, *others))[0] if others else x


_uninitialised_p = Primitive(UNINITIALISED)
define(
    _uninitialised_p,
    eager=lambda *_, shape, dtype: lax.empty(shape, dtype),
    results=lambda *_, shape, dtype: jax.core.ShapedArray(shape, dtype),
    lower=_lower_uninitialised,
    batch=lambda _, after, axes, **of: (_uninitialised_p.bind(*after, **of), None),
)


def filled(
    aval: Any, fill: int | jax.Array | None = None, lead: tuple[int, ...] = (), after: Sequence[Any] = ()
) -> Any:
    """An array for values like `aval`, sharded and varying over mesh axes as they are, and full of `fill` if given.

    Otherwise it is uninitialised, or on several devices full of one uninitialised number. XLA would merge arrays that
    are full of the same constant, and then copy one stack on the host to another. `after`: see `empty_stack`.
    """
    mesh, spec = aval.sharding.mesh, aval.sharding.spec
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * len(lead), *spec)) if mesh.explicit_axes else None
    shape = (*lead, *aval.shape)
    fill = 0 if fill is None and looks_for_nans() else fill
    if fill is None and sharding is None:
        array = _uninitialised_p.bind(*after, shape=shape, dtype=aval.dtype)
    else:
        one = lax.empty((), aval.dtype) if fill is None else lax.full((), fill, aval.dtype)
        # Explicit axes count where their mesh is set, which the caller's arguments alone may say.
        with jax.sharding.use_abstract_mesh(mesh) if sharding else contextlib.nullcontext():
            array = lax.broadcast(_computed_after(one, after), shape, out_sharding=sharding)
    varying = tuple(aval.manual_axis_type.varying)
    return lax.pcast(array, varying, to="varying") if varying else array
