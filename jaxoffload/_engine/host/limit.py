"""The capacity of the pinned host pool, and how many layers of one `scan`, `chain` or `checkpoint` fit in it."""

import math
import os
import re
from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Jaxpr

from ..._errors import Problem, UserError, warn
from ..._refusals import refuse_ordered_effects, refuse_wrong_offload
from ..._text import GIB, readable
from ..._tracing import tracing


class HostPoolError(UserError, ValueError):
    """The environment gives the pinned host pool a size that is not one."""

    def __init__(self, why: str):
        super().__init__([Problem(POOL, f"{POOL}: {why}")])


def host_pool_bytes() -> int | None:
    """How many bytes per device XLA's pinned host pool holds; None where there is no pool (CPU).

    `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` sets it, in units of 2**30 bytes. XLA's default is 64, or 16 if
    `XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE` is true.

    Raises:
      HostPoolError: that variable is not a number above 0, or, on a GPU, not a whole one.
    """
    limit, on_gpu = os.environ.get(POOL), jax.default_backend() == "gpu"
    if not limit:
        preallocate = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", "").lower() in ("1", "true")
        return (16 if preallocate else 64) * GIB if on_gpu else None
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


POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class HostPoolFull(UserError, MemoryError):
    """More would be offloaded than the pinned host pool holds.

    Attributes:
      need, pool: bytes per device that would be offloaded, and those that the pool holds.
      layers: how many layers of each scan could offload; None where offloading fewer does not help.

    Example:
      >>> import os, jax, jax.numpy as jnp
      >>> from unittest import mock
      >>> from jaxoffload import HostPoolFull, Policy, residuals, scan, tag
      >>> policy = Policy({"h": "offload"}, resident_layers=0)
      >>> f = lambda x: scan(lambda x, _: (jnp.sin(tag(2 * x, "h")), None), x, length=12, policy=policy)[0]
      >>> with mock.patch.dict(os.environ, XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="2"):
      ...     try:
      ...         residuals(f, jax.ShapeDtypeStruct((1024, 131072), jnp.float32))
      ...     except HostPoolFull as full:
      ...         print(full.need // 2**20, full.pool // 2**20, full.layers)
      6656 2048 3
    """

    def __init__(
        self, caller: str, what: str, need: int, pool: int, layers: int | None, whole: bool, *, instead: str = ""
    ):
        less = f" (offload_layers: {layers})" if layers is not None else ""
        advice = f"offload less{less}{instead}, or set a larger {POOL} before JAX starts{_CONSTRAIN if whole else ''}"
        super().__init__([Problem(caller, f"{caller}: {what}; {advice}")])
        self.need, self.pool, self.layers = need, pool, layers


_CONSTRAIN = (
    "; if a mesh divides these values, say so in the layer with jax.lax.with_sharding_constraint: a value without a "
    "constraint counts whole"
)


def admitted(
    caller: str, jaxprs: Sequence[Jaxpr], layers: int, need: Callable[[int], int], on_host_full: str, of: str = ""
) -> int:
    """How many of the first `layers` layers, of these `jaxprs`, may offload. `need(n)`: bytes per device that n take.

    `of`: what layers these are, for the message.

    One call of `scan`, `chain` or `checkpoint` (the `caller`) knows only its own need; `host_pool_need` adds up
    those of a program.

    Raises:
      NotImplementedError: offloading would fail or give wrong gradients.
      HostPoolFull: they do not fit and `on_host_full` is "error". If it is "save", this warns.
    """
    refuse_wrong_offload()
    for jaxpr in jaxprs:
        refuse_ordered_effects(caller, jaxpr)
    pool = host_pool_bytes()
    if pool is None or need(layers) <= pool or (tracing().whole_program and on_host_full == "error"):
        return layers
    fit = sum(need(n) <= pool for n in range(1, layers + 1))
    of_layers = caller != "checkpoint"
    message = (
        f"{f'{layers} layer(s){of} ' if of_layers else ''}would offload {readable(need(layers))} per device, "
        f"and the pinned host pool holds {readable(pool)}{f', enough for {fit}' if of_layers else ''}"
    )
    if on_host_full == "error":
        fewer, or_save = fit if of_layers else None, ", set on_host_full: save"
        raise HostPoolFull(caller, message, need(layers), pool, fewer, auto_axes(), instead=or_save)
    instead = "which offload" if of_layers else "so all of it stays on the device"
    warn(f"{caller}: {message}, {instead} (on_host_full: save)")
    return fit


def auto_axes() -> bool:
    """Return if the compiler may divide what is traced here over a mesh, which the trace does not show."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() > 1 if mesh.empty else any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)
