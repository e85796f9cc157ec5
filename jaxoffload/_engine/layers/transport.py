"""Copy between device and host: all copies of residuals are made here, except those of `jax.checkpoint`."""

from typing import Any

import jax

from ..._jax import DEVICE, HOST


def to_host(x: Any) -> Any:
    """Return a residual, or a stack for it, in host memory."""
    return jax.device_put(x, HOST)


def to_device(x: Any) -> Any:
    """Return a residual in device memory."""
    return jax.device_put(x, DEVICE)
