"""Memory: bytes of an array, and what the pinned host pool can hold."""

import contextlib
import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import jax

GIB = 2**30

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

# Directories of code that a warning must not point to: it is the user's line that it is about.
NOT_THE_USERS = (os.path.dirname(__file__), os.path.dirname(jax.__file__), contextlib.__file__.removesuffix(".py"))


def nbytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def on_host(aval: Any) -> bool:
    """Whether an abstract value lives in host memory (`f32<host>[...]` in a jaxpr)."""
    return getattr(aval, "memory_space", None) == HOST


def readable(size: int) -> str:
    """Bytes in the largest unit that they reach: "1.50 GiB", "96 B"."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


class HostPoolError(ValueError):
    """What the environment says of the pinned host pool is no size."""

    @property
    def problems(self) -> tuple[str]:
        """As a PolicyError's."""
        return (str(self),)


def host_pool_bytes() -> int | None:
    """What XLA's pinned host pool holds, in bytes a device; None where there is none (CPU).

    `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` sets it, in units of 2**30 bytes; 64 is XLA's default.

    Raises:
      HostPoolError: that variable is no number.
    """
    limit = os.environ.get(_POOL)
    if limit is None and jax.default_backend() != "gpu":
        return None
    try:
        return int(float(limit or 64) * GIB)
    except (ValueError, OverflowError):
        raise HostPoolError(f"{_POOL}: {limit!r} is not a number of GiB, such as 64") from None


_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def per_device(total: int) -> int:
    """Bytes a device of `total` traced bytes: divided evenly over the mesh that is set, but for `shard_map`'s axes.

    Inside `shard_map` sizes are a device's own; elsewhere they are global. Where no mesh is set, a trace does not tell
    one device's function from one that `jit`'s `in_shardings` spread, and nothing is divided: too much is then refused
    rather than too little, and `jax.set_mesh` mends that.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return total // math.prod(size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)


def layers_that_fit(who: str, needs: Sequence[int], on_host_full: str) -> int:
    """How many layers can offload, if the first one, two, ... need `needs` bytes in the pinned host pool.

    Where not all fit, an error or a warning, as the policy says.

    One call of `scan`, `chain` or `checkpoint` is judged alone: what others of the same step hold is not known yet.

    Raises:
      MemoryError: they do not fit and `on_host_full` is "error".
    """
    pool, layers = host_pool_bytes(), len(needs)
    needs = list(map(per_device, needs))
    if pool is None or needs[-1] <= pool:
        return layers
    fit = sum(need <= pool for need in needs)
    of_layers = who != "checkpoint"
    need = (
        f"{who}: {f'{layers} layer(s) would offload' if of_layers else 'would offload'} {readable(needs[-1])} "
        f"a device, and the pinned host pool holds {readable(pool)}{f', enough for {fit}' if of_layers else ''}"
    )
    if on_host_full == "error":
        whole = jax.sharding.get_abstract_mesh().empty and jax.device_count() > 1
        raise MemoryError(
            f"{need}; offload less{f' (offload_layers: {fit})' if of_layers else ''}, set on_host_full: save, "
            f"or set a larger {_POOL} before JAX starts"
            + ("; if a mesh divides these arrays, call this under jax.set_mesh(mesh)" if whole else "")
        )
    instead = "which offload" if of_layers else "all stays on the device"
    warnings.warn(f"jaxoffload: {need}, {instead} (on_host_full: save)", skip_file_prefixes=NOT_THE_USERS)
    return fit
