"""The backend "te": TransformerEngine's grouped GEMMs (cuBLAS), imported when they are first asked for.

TransformerEngine has two kinds of kernels and chooses by dtype, GPU and the cuBLAS that it was compiled with. V2
(bfloat16) reads the group sizes on the device and does not write the rows past all groups. V1 makes the host read the
sizes and wait in each grouped GEMM, supports one GPU per process, and needs `sum(group_sizes)` to be M: the last group
gets the rows past all groups.
"""

import copy
import dataclasses
import importlib
import importlib.metadata
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._interface import FP8, Backend, BackendMissing, QuantizedCopy, Shape, in_groups, known, unbatched
from ._ragged_fp8 import E4M3, E5M2, amax_of_groups
from ._tensor import GroupedTensor

# FP8: each group's number of rows, K and N must be multiples of this.
FP8_MULTIPLE = 16

# V2: K and N must be multiples of this, so that rows begin at multiples of 16 bytes. With others the kernels give wrong
# numbers or stop the process (measured).
V2_MULTIPLE = 8

# The first cuBLAS with which V2 is right on all of its GPUs; TransformerEngine checks it only when a GEMM runs
# (https://github.com/NVIDIA/TransformerEngine/pull/3475).
V2_CUBLAS = (13, 8, 1)

# The first release whose tensors have group sizes of their own: GroupedNoScaleTensor and first_dims
# (https://github.com/NVIDIA/TransformerEngine/pull/2749). All else that we use, in models/attention.py too, is older.
NEEDED = (2, 15)


def too_old() -> str | None:
    """Return what is wrong with the installed TransformerEngine if it is too old. Reads its metadata: an old one may
    fail to import with this jax."""
    try:
        version = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= NEEDED:
        return None
    return f"TransformerEngine {version} is too old; must be at least {'.'.join(map(str, NEEDED))}"


def load(module: str) -> types.ModuleType:
    """Return a module of TransformerEngine.

    Raises:
      ImportError: TransformerEngine or a CUDA library that it needs is missing, or TransformerEngine is too old.
    """
    if why_not := too_old():
        extras = "as the extra jaxoffload[te] installs it, or with CUDA 13 jaxoffload[te-cuda13]"
        raise BackendMissing(f"backend 'te': {why_not}, {extras}")
    try:
        return importlib.import_module(f"transformer_engine.jax.{module}")
    except (ImportError, OSError, RuntimeError, AttributeError) as why:  # by what is missing
        said = str(why).partition("\n")[0]
        raise BackendMissing(
            f"backend 'te' needs TransformerEngine, which cannot be imported ({said}): "
            "install the extra jaxoffload[te], or with CUDA 13 jaxoffload[te-cuda13], as README says; or, where it is "
            "installed, import transformer_engine.jax before JAX's first computation"
        ) from why


def importable() -> bool:
    try:
        load("cpp_extensions")
    except ImportError:
        return False
    return True


def sizes_stay(dtype: Any) -> bool:
    """Return if grouped GEMMs of plain operands leave the group sizes on the device (V2). V1 copies them to the host,
    and that copy waits for all copies to the host before it: milliseconds where residuals are offloaded."""
    no_scaling = load("quantize").ScalingMode.NO_SCALING
    return load("cpp_extensions").is_v2_grouped_gemm_supported(no_scaling, dtype, False)[0]


def _cublas() -> tuple[int, int, int]:
    version = importlib.import_module("transformer_engine_jax").get_cublasLt_version()
    return version // 10000, version // 100 % 100, version % 100


def from_te(rowwise: Any, columnwise: Any = None) -> GroupedTensor:
    """Return the `GroupedTensor` of the same buffers.

    Args:
      rowwise: a `GroupedNoScaleTensor`, or a row-wise `GroupedScaledTensor1x`.
      columnwise: the column-wise `GroupedScaledTensor1x` of the same values, if there is one.

    Raises:
      ValueError: an argument is not such a tensor or has no group sizes, or their group sizes differ. A trace has no
        values, so there only the number of groups is compared.
    """
    if wrong := _not_allowed(rowwise, columnwise):
        raise ValueError(
            f"from_te: {wrong}; allowed are a GroupedNoScaleTensor, or a row-wise GroupedScaledTensor1x alone or with "
            "the column-wise one of the same group sizes (first_dims)"
        )
    sizes = rowwise.first_dims
    scale_inv = getattr(rowwise, "scale_inv", None)
    fields = {"group_sizes": sizes, "data": rowwise.data.reshape(rowwise.original_shape)}
    if scale_inv is not None:
        fields["scale_inv"] = _unpacked(scale_inv, sizes, 1.0)
    # An amax that TransformerEngine does not know is an array of one element.
    if rowwise.amax is not None and rowwise.amax.shape == sizes.shape:
        fields["amax"] = _unpacked(rowwise.amax, sizes, 0.0)
    if columnwise is not None:
        fields["columnwise_data"] = columnwise.data.reshape(columnwise.original_shape)
        # TransformerEngine shares one array; a leaf with a decision of its own must be a value of its own.
        fields["columnwise_scale_inv"] = jnp.copy(_unpacked(columnwise.scale_inv, sizes, 1.0))
    return GroupedTensor(**fields)


def _plain(data: jax.Array, group_sizes: jax.Array | None) -> Any:
    """Return TransformerEngine's tensor of unquantised rows (M, K) in groups, or matrices (G, K, N) without sizes."""
    no_scale = load("quantize").GroupedNoScaleTensor
    return no_scale(data=data, amax=None, first_dims=group_sizes, last_dims=None, original_shape=data.shape)


def _scaled(half: QuantizedCopy, dtype: Any, columnwise: bool = False) -> Any:
    quantize, sizes = load("quantize"), half.group_sizes
    return quantize.ScaledTensorFactory.create_1x(
        half.data.reshape(-1),
        _packed(half.scale_inv, sizes),
        None,  # amax
        scaling_mode=quantize.ScalingMode.CURRENT_TENSOR_SCALING,
        dq_dtype=dtype,
        is_colwise=columnwise,
        data_layout="T" if columnwise else "N",
        flatten_axis=-1,
        first_dims=sizes,
        original_shape=half.data.shape[::-1] if columnwise else half.data.shape,
    )


# TransformerEngine omits the scale and amax of empty groups, both when writing and when reading, and does so even for
# the weights, whose entries all exist
# (https://github.com/NVIDIA/TransformerEngine/blob/025f598/transformer_engine/jax/csrc/extensions/gemm.cpp).


def _places(group_sizes: jax.Array) -> jax.Array:
    """Return (G,) int32: the index of each group's entry in TransformerEngine's arrays; G for an empty group."""
    there = group_sizes > 0
    return jnp.where(there, jnp.cumsum(there, dtype=jnp.int32) - 1, group_sizes.size)


def _packed(of_groups: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return jnp.ones_like(of_groups).at[_places(group_sizes)].set(of_groups, mode="drop")


def _unpacked(of_groups: jax.Array, group_sizes: jax.Array, of_empty: float) -> jax.Array:
    return of_groups.at[_places(group_sizes)].get(mode="fill", fill_value=of_empty)


def _not_allowed(rowwise: Any, columnwise: Any) -> str | None:
    """Return the first argument of `from_te` that is wrong, and why."""
    for name, tensor, is_columnwise in (("rowwise", rowwise, False), ("columnwise", columnwise, True)):
        if tensor is None and is_columnwise:
            return None
        kind = type(tensor).__name__
        if getattr(tensor, "first_dims", None) is None:
            return f"{name}: {kind} without group sizes"
        if bool(getattr(tensor, "is_colwise", False)) != is_columnwise:
            return f"{name}: {kind}, which is {'row' if is_columnwise else 'column'}-wise"
        if getattr(tensor, "last_dims", None) is not None:
            return f"{name}: {kind} with column counts (last_dims)"
        scales = getattr(tensor, "scale_inv", None)
        if scales is not None and scales.shape != tensor.first_dims.shape:
            return f"{name}: {kind} with {scales.shape} scales, not one for each of {tensor.first_dims.size} groups"
    sizes, others = columnwise.first_dims, rowwise.first_dims
    if sizes is others:  # as TransformerEngine returns them: no values need to be fetched
        return None
    if sizes.shape != others.shape:
        return f"columnwise: {sizes.size} group sizes, but rowwise has {others.size}"
    values, other_values = known(sizes), known(others)
    if values is None or other_values is None or np.array_equal(values, other_values):
        return None
    return f"columnwise: group sizes {values.tolist()}, but rowwise's are {other_values.tolist()}"


def _whole(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Return the group sizes with the rows past all groups added to the last group."""
    return group_sizes.at[-1].add(rows - jnp.sum(group_sizes, dtype=jnp.int32))


_FORWARD, _DX, _DW = ((1,), (1,)), ((1,), (2,)), ((0,), (0,))  # contracting dimensions


def _sizes(group_sizes: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the group sizes that the kernels for these rows need."""
    return group_sizes if sizes_stay(rows.dtype) else _whole(group_sizes, rows.shape[0])


def _gemm(lhs: Any, rhs: Any, contracted: Any) -> jax.Array:
    return load("cpp_extensions").grouped_gemm(lhs, rhs, contracting_dims=contracted)


def refuses(shape: Shape) -> str | None:
    if (wrong := _refuses_dtype(shape)) or not importable():
        return wrong
    if not sizes_stay(shape.dtype):
        return _refuses_several_gpus(shape)
    if (have := _cublas()) < V2_CUBLAS:
        need, found = (".".join(map(str, version)) for version in (V2_CUBLAS, have))
        return f"its kernels need cuBLAS {need}, and this is {found}: upgrade nvidia-cublas, or use another backend"
    wrong = shape.not_a_multiple(V2_MULTIPLE, "K", "N")
    return f"{wrong}, which its kernels for {jnp.dtype(shape.dtype).name} need" if wrong else None


def _refuses_dtype(shape: Shape) -> str | None:
    if shape.dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        return None
    return f"{jnp.dtype(shape.dtype).name} operands; allowed are bfloat16, float16 and float32"


def _refuses_several_gpus(shape: Shape) -> str | None:
    """Return why V1 cannot run here: its CUDA streams belong to the process and are created on the first GPU that uses
    them. A GEMM on another GPU fails, the others wait for it, and a minute later XLA ends the process with a message
    about collectives (measured;
    https://github.com/NVIDIA/TransformerEngine/blob/d0067d0/transformer_engine/common/util/multi_stream.cpp)."""
    if shape.devices < 2 or (gpus := jax.local_device_count()) == 1 or shape.devices > jax.device_count():
        return None  # a mesh of more devices than exist here describes another machine
    return (
        f"its kernels for these operands support only one GPU per process, and this process has {gpus}: "
        "start one process per GPU, or use another backend"
    )


def forward(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _gemm(_plain(x, _sizes(group_sizes, x)), _plain(w, None), _FORWARD)


def dx(dy: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _gemm(_plain(dy, _sizes(group_sizes, dy)), _plain(w, None), _DX)


def dw(x: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    if sizes_stay(x.dtype):
        return dw_full(x, dy, group_sizes)
    # The last group's GEMM must not see the rows past all groups; zeros in the narrower operand are enough.
    if x.shape[1] < dy.shape[1]:
        x = in_groups(x, group_sizes)
    else:
        dy = in_groups(dy, group_sizes)
    return dw_full(x, dy, _whole(group_sizes, x.shape[0]))


def dw_full(x: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _gemm(_plain(x, group_sizes), _plain(dy, group_sizes), _DW)


TE = Backend("te", refuses, *(unbatched("te", f) for f in (forward, dx, dw, dw_full)))


def refuses_fp8(shape: Shape) -> str | None:
    wrong = shape.not_a_multiple(FP8_MULTIPLE, "K", "N", "M")
    wrong = f"{wrong}, which FP8 needs" if wrong else _refuses_dtype(shape)
    return wrong if wrong or not importable() else _refuses_several_gpus(shape)


def _quantizers(groups: int) -> Any:
    quantize = load("quantize")
    return quantize.QuantizerFactory.create_set(
        scaling_mode=quantize.ScalingMode.CURRENT_TENSOR_SCALING,
        fwd_dtype=E4M3,
        bwd_dtype=E5M2,
        is_2x2x=True,
        n_groups=groups,
    )


def quantize(x: jax.Array, group_sizes: jax.Array, dtype: Any) -> GroupedTensor:
    x, sizes = in_groups(x, group_sizes), _whole(group_sizes, x.shape[0])
    both = _quantizers(sizes.size)
    quantizer = both.x if dtype == E4M3 else both.dgrad
    found = load("cpp_extensions").grouped_quantize(x, quantizer, sizes, flatten_axis=-1)
    both_copies = from_te(found.rowwise_tensor, found.colwise_tensor)
    return dataclasses.replace(both_copies, amax=amax_of_groups(x, sizes))  # TransformerEngine does not return its own


def weights(w: jax.Array) -> tuple[Any, Any]:
    found = load("cpp_extensions").grouped_quantize(w, _quantizers(w.shape[0]).kernel, flatten_axis=-1)
    usage = load("quantize").TensorUsage
    return found.get_tensor(usage=usage.RHS), found.get_tensor(usage=usage.RHS_TRANS)


def _matrices(w: Any, group_sizes: jax.Array) -> Any:
    packed = copy.copy(w)  # the constructor does not take every field
    packed.scale_inv = _packed(w.scale_inv, group_sizes)
    return packed


def forward_fp8(x: QuantizedCopy, w: Any, dtype: Any) -> jax.Array:
    return _gemm(_scaled(x, dtype), _matrices(w, x.group_sizes), _FORWARD)


def dx_fp8(dy: QuantizedCopy, w: Any, dtype: Any) -> jax.Array:
    return _gemm(_scaled(dy, dtype), _matrices(w, dy.group_sizes), _DX)


def dw_fp8(x: QuantizedCopy, dy: QuantizedCopy, dtype: Any) -> jax.Array:
    return _gemm(_scaled(x, dtype, columnwise=True), _scaled(dy, dtype, columnwise=True), _DW)


TE_FP8 = FP8("te", refuses_fp8, quantize, weights, forward_fp8, dx_fp8, dw_fp8)
