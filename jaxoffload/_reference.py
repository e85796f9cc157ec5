"""The reference of a function: plain `lax.scan` and `jax.checkpoint` that keep the same values, on the device.

`scan`, `chain` and `checkpoint` ask here, when they are differentiated, whether the reference is being traced. It has a
plan's names and decisions, but not our loops, copies and ordering. Where one call stands inside another, the outer plan
decides on the inner one's names too, as JAX's own checkpoints do. A reference that does not fit on the device runs only
the first layers of each scan.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

# Part of every trace cache's key: a function jitted for one is traced again for the other.
_tracing = jax.make_user_context(False)
_most = jax.make_user_context(None)

REASON = "the reference keeps it on the device"


def is_reference() -> bool:
    """Whether the reference is being traced."""
    return _tracing.value


def as_reference(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, traced as its own reference."""
    return _traced(f, lambda: _tracing(True))


def most_layers() -> int | None:
    """How many layers a `scan` runs at most; None for all."""
    return _most.value


def with_layers(f: Callable[..., Any], layers: int) -> Callable[..., Any]:
    """Return `f` with every `scan` truncated to its first `layers` layers; nested limits take the minimum.

    The `ys` of the layers that are skipped are zeros.
    """

    return _traced(f, lambda: _most(layers if _most.value is None else min(layers, _most.value)))


def _traced(f: Callable[..., Any], context: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with context():
            return f(*args, **kwargs)

    return traced
