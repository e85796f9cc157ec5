"""Memory: bytes of an array, and whether it lives on the host or the device."""

import math
from typing import Any

import jax

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def nbytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def on_host(aval: Any) -> bool:
    """Whether an abstract value lives in host memory (`f32<host>[...]` in a jaxpr)."""
    return getattr(aval, "memory_space", None) == HOST
