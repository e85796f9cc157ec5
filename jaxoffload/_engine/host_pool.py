"""The pinned host pool: how much it holds, and what is said where more would be offloaded."""

import math
import os
import re
import warnings
from collections.abc import Sequence

import jax

from .._errors import NOT_THE_USERS, Problem, UserError
from .._text import GIB, readable


class HostPoolError(UserError, ValueError):
    """What the environment says of the pinned host pool is not a size."""

    def __init__(self, why: str):
        super().__init__([Problem(_POOL, f"{_POOL}: {why}")])


def host_pool_bytes() -> int | None:
    """What XLA's pinned host pool holds, in bytes a device; None where there is none (CPU).

    `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` sets it, in units of 2**30 bytes; 64 is XLA's default, and 16 where
    `XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE` is true.

    Raises:
      HostPoolError: that variable is not a number above 0, or on a GPU not a whole one.
    """
    limit, on_gpu = os.environ.get(_POOL), jax.default_backend() == "gpu"
    if not limit:
        whole = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", "").lower() in ("1", "true")
        return (16 if whole else 64) * GIB if on_gpu else None
    try:
        size = float(limit) * GIB
    except ValueError:
        size = math.nan
    if not 0 < size < 2**63:  # XLA's pool of 0 holds nothing, and one below 0 is taken for a very large one
        raise HostPoolError(f"{limit!r} is not a number of GiB above 0, such as 64")
    if on_gpu and not re.fullmatch(r"\s*\d+\s*", limit):
        # GetGpuHostAllocator in xla/pjrt/gpu/gpu_helpers.cc: the error is logged, and the default is taken.
        raise HostPoolError(f"{limit!r} is not a whole number of GiB, such as 64; XLA would ignore it")
    return int(size)


_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class HostPoolFull(UserError, MemoryError):
    """More would be offloaded than the pinned host pool holds. `layers`: how many layers of each scan would fit, the
    first ones; None where that mends nothing."""

    def __init__(self, caller: str, need: str, layers: int | None, whole: bool = False, instead: str = ""):
        less = f" (offload_layers: {layers})" if layers is not None else ""
        advice = f"offload less{less}{instead}, or set a larger {_POOL} before JAX starts{_CONSTRAIN if whole else ''}"
        super().__init__([Problem(caller, f"{caller}: {need}; {advice}")])
        self.layers = layers


_CONSTRAIN = (
    "; if a mesh divides these values, say so in the layer with jax.lax.with_sharding_constraint: what no constraint "
    "divides counts whole"
)


# Whether the whole program is judged once it is traced. Part of every trace cache's key, as is `scope`.
whole_program = jax.make_user_context(False)


def layers_that_fit(caller: str, needs: Sequence[int], on_host_full: str) -> int:
    """How many layers can offload, if the first one, two, ... need `needs` bytes a device in the pinned host pool.

    Where not all fit, an error or a warning, as the policy says. One call of `scan`, `chain` or `checkpoint` knows
    itself alone; what a program's calls need together `residuals` and `check` judge (`_pool`).

    Raises:
      HostPoolFull: they do not fit and `on_host_full` is "error".
    """
    pool, layers = host_pool_bytes(), len(needs)
    if pool is None or needs[-1] <= pool or (whole_program.value and on_host_full == "error"):
        return layers
    fit = sum(need <= pool for need in needs)
    of_layers = caller != "checkpoint"
    need = (
        f"{f'{layers} layer(s) would offload' if of_layers else 'would offload'} {readable(needs[-1])} "
        f"a device, and the pinned host pool holds {readable(pool)}{f', enough for {fit}' if of_layers else ''}"
    )
    if on_host_full == "error":
        raise HostPoolFull(caller, need, fit if of_layers else None, auto_axes(), ", set on_host_full: save")
    instead = "which offload" if of_layers else "all stays on the device"
    warnings.warn(f"jaxoffload: {caller}: {need}, {instead} (on_host_full: save)", skip_file_prefixes=NOT_THE_USERS)
    return fit


def auto_axes() -> bool:
    """Whether a mesh may divide what is traced here without the trace knowing."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() > 1 if mesh.empty else any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)
