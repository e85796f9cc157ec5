"""Memory: bytes of an array, and what the pinned host pool can hold."""

import contextlib
import math
import os
import warnings
from typing import Any

import jax

GIB = 2**30

# Directories of code that a warning must not point to: it is the user's line that it is about.
NOT_THE_USERS = (os.path.dirname(__file__), os.path.dirname(jax.__file__), contextlib.__file__.removesuffix(".py"))


def nbytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def on_host(aval: Any) -> bool:
    """Whether an abstract value lives in host memory (`f32<host>[...]` in a jaxpr)."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def host_pool_bytes() -> int | None:
    """What XLA's pinned host pool holds, in bytes a device; None where there is none (CPU).

    `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` sets it, in units of 2**30 bytes; 64 is XLA's default.
    """
    limit = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    if limit is None and jax.default_backend() != "gpu":
        return None
    return int(float(limit or 64) * GIB)


def per_device(total: int) -> int:
    """Bytes a device of `total` traced bytes, if they are spread evenly.

    Inside `shard_map` sizes are a device's own. Elsewhere they are global; where no mesh is set the compiler divides
    them over a mesh that cannot be known yet, and all devices of the process group are assumed.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return total // jax.device_count()
    return total // math.prod(size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)


def layers_that_fit(who: str, layers: int, bytes_per_layer: int, on_host_full: str) -> int:
    """How many of `layers` the pinned host pool holds; where not all fit, an error or a warning, as the policy says.

    Raises:
      MemoryError: they do not fit and `on_host_full` is "error".
    """
    pool, a_layer = host_pool_bytes(), per_device(bytes_per_layer)
    if pool is None or a_layer * layers <= pool:
        return layers
    fit = pool // a_layer
    need = (
        f"{who}: {layers} layer(s) would offload {a_layer * layers / GIB:.4g} GiB a device, and the pinned host pool "
        f"holds {pool / GIB:.4g} GiB, enough for {fit}"
    )
    if on_host_full == "error":
        raise MemoryError(
            f"{need}; offload less (offload_layers: {fit}), set on_host_full: save, "
            "or set a larger XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB before JAX starts"
        )
    warnings.warn(f"jaxoffload: {need}, which offload (on_host_full: save)", skip_file_prefixes=NOT_THE_USERS)
    return fit
