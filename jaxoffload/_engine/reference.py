"""The reference twin of a function: plain `lax.scan` and `jax.checkpoint` that keep the same values, on the device; and
a function with fewer layers, for a twin that does not fit there.

`scan`, `chain` and `checkpoint` ask here, when they are differentiated, whether it is the twin that is traced. The twin
has a plan's names and decisions, and nothing of our loops, copies and ties. Where one stands inside another, the outer
plan decides on all of the inner one's names too, as JAX's own checkpoints do.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

# Part of every trace cache's key: a jitted function that was traced for the one is traced anew for the other.
_tracing = jax.make_user_context(False)
_most = jax.make_user_context(None)

REASON = "the twin keeps it on the device"


def is_twin() -> bool:
    """Whether the twin is being traced."""
    return _tracing.value


def twin(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, traced as the twin of itself."""

    @functools.wraps(f)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with _tracing(True):
            return f(*args, **kwargs)

    return traced


def most_layers() -> int | None:
    """Of how many layers a `scan` runs the first; None for all."""
    return _most.value


def with_layers(f: Callable[..., Any], layers: int) -> Callable[..., Any]:
    """`f`, of each of whose `scan`s only the first so many layers run, or fewer if it says so itself; ys of the others
    are zeros."""

    @functools.wraps(f)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with _most(layers if _most.value is None else min(layers, _most.value)):
            return f(*args, **kwargs)

    return traced
