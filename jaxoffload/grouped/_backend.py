"""Which backend computes a grouped GEMM: `chosen_backend` for "auto", and whether a named one can."""

import re
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._text import array_type
from . import te
from ._interface import FP8, ArgumentError, Backend, Shape
from ._ragged_fp8 import RAGGED_FP8
from .mosaic import MOSAIC
from .ragged import RAGGED

_PLAIN = {"ragged": RAGGED, "mosaic": MOSAIC, "te": te.TE}
_FP8 = {"ragged": RAGGED_FP8, "te": te.TE_FP8}
NAMES = ("auto", *_PLAIN)
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def chosen_backend(x: Any, w: Any, *, quantize: Literal["fp8"] | None = None) -> Literal["ragged", "mosaic", "te"]:
    """Return the backend that `grouped_matmul(..., backend="auto")` uses for arguments like these.

    The first of these that applies:

    1. "te", if it leaves the group sizes on the device: for plain bfloat16, on Hopper or newer GPUs, if it was compiled
       for that and runs with cuBLAS 13.8.1 or later.
    2. "mosaic": plain 16-bit operands on Hopper GPUs.
    3. "te" on Hopper or newer GPUs, if the mesh or the process has one GPU. The host then reads the group sizes and
       waits in each grouped GEMM; while residuals are offloaded, it waits for their copies too.
    4. "ragged".

    XLA cannot partition TransformerEngine's kernels: with several devices, "te" applies only inside a `shard_map` over
    all axes. The GPU is the first of `jax.devices()`. "te" is also skipped if TransformerEngine is too old or cannot be
    imported; import `transformer_engine.jax` before JAX's first computation to make it available.

    Args:
      x: (M, K), an array or anything else with a shape and a dtype, such as a `jax.ShapeDtypeStruct`.
      w: (G, K, N) of x's dtype, the same.
      quantize: "fp8", or None for plain operands.

    Raises:
      ValueError: an argument has a shape or dtype that `grouped_matmul` refuses.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload.grouped import chosen_backend
      >>> chosen_backend(jnp.ones((5, 2)), jnp.ones((2, 2, 3)))
      'ragged'
    """
    refuse(wrong_operands(x, w, quantize))
    generation, shape = _gpu_generation(), _shape(x, w)
    candidate = te.TE if quantize is None else te.TE_FP8
    te_can = generation >= 9 and te.importable() and not candidate.refuses(shape) and _is_of_one_device()
    if te_can and quantize is None and te.sizes_stay(shape.dtype):
        return "te"
    if quantize is None and generation == 9 and not MOSAIC.refuses(shape):  # wgmma is Hopper's alone
        return "mosaic"
    return "te" if te_can else "ragged"


def backend_for(name: str, x: Any, w: Any, quantize: str | None) -> Backend | FP8:
    table: dict[str, Any] = _PLAIN if quantize is None else _FP8
    if name not in table:
        raise ArgumentError(f"backend {name!r} has no FP8; allowed are {', '.join(map(repr, table))}")
    if why := table[name].refuses(_shape(x, w)):
        raise ArgumentError(f"backend {name!r} cannot do this: {why}")
    if name == "mosaic" and _gpu_generation() != 9:
        raise ArgumentError(f"backend 'mosaic' has kernels for Hopper GPUs only; this is {jax.devices()[0]}")
    return table[name]


def _is_of_one_device() -> bool:
    """Return if the traced code is for one device, so that XLA has nothing to partition."""
    return jax.device_count() == 1 or jax.sharding.get_abstract_mesh().are_all_axes_manual


def _gpu_generation() -> int:
    """Return the major number of the compute capability, 9 for Hopper; 0 where there is no NVIDIA GPU."""
    capability = getattr(jax.devices()[0], "compute_capability", "")
    number = re.fullmatch(r"(\d+)\.\d+", str(capability))
    return int(number[1]) if number else 0


def _shape(x: Any, w: Any) -> Shape:
    of_arrays = (jax.typeof(a).sharding.mesh for a in (x, w) if isinstance(a, jax.Array))
    meshes = (jax.sharding.get_abstract_mesh(), *of_arrays)
    return Shape(x.shape[0], x.shape[1], w.shape[2], x.dtype, max(mesh.size for mesh in meshes))


def wrong_operands(x: Any, w: Any, quantize: str | None) -> list[str]:
    if not_arrays := [name for name, a in (("x", x), ("w", w)) if not hasattr(a, "dtype")]:
        refuse([f"{not_arrays[0]} is not an array; x, w and group_sizes must be"])
    checks = (
        (x.ndim == 2, f"x: {array_type(x)} is not (M, K)"),
        (w.ndim == 3, f"w: {array_type(w)} is not (G, K, N)"),
        (w.ndim != 3 or x.shape[-1:] == w.shape[1:2], f"x: {array_type(x)} and w: {array_type(w)} differ in K"),
        (x.dtype == w.dtype, f"x: {array_type(x)} and w: {array_type(w)} must have one dtype"),
        (x.dtype in _DTYPES, f"x: {array_type(x)}; allowed are float32, bfloat16, float16"),
        (quantize in (None, "fp8"), f"quantize: {quantize!r}; allowed are None and 'fp8'"),
        (quantize is None or 0 not in w.shape, f"w: {array_type(w)}; FP8 needs G, K and N of at least 1"),
    )
    return [message for ok, message in checks if not ok]


def refuse(wrong: list[str]) -> None:
    if wrong:
        raise ArgumentError("; ".join(wrong))
