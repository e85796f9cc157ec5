"""staying(): what `accumulate` keeps on the device in the first and in the last microbatch."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from ..._engine.jaxprs.walk import walk
from ..._engine.layers.passes import Loops
from ..._engine.microbatches.interleaved import interleaved_p
from ..._jax import without_remat3


@without_remat3
def staying(f: Callable[..., Any], *args: Any) -> int:
    """Return how many bytes of residuals marked offload stay on each device at once. Nothing runs.

    `accumulate` keeps them there in the first and in the last microbatch, so that the others fit behind the pass that
    runs alone.

    Args:
      f: a training step.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s.

    Returns:
      Bytes per device; 0 if nothing stays, or if `f` does not accumulate.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, accumulate, scan, tag
      >>> from jaxoffload.proof import staying
      >>> policy = Policy({"fc1": "offload"}, min_offload_bytes=0)
      >>> layer = lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None)
      >>> loss = lambda w, x: jnp.sum(scan(layer, x, w, policy=policy)[0])
      >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
      >>> staying(accumulate(loss), shape(8, 1024, 1024), shape(4, 256, 1024)) // (8 * 256 * 1024 * 2)
      1
    """
    sites = walk(jax.make_jaxpr(f)(*args))
    return max((_bytes(site.eqn) for site in sites if site.eqn.primitive is interleaved_p), default=0)


def _bytes(eqn: JaxprEqn) -> int:
    others, *of_ends = (_on_device(eqn.params[of]) for of in ("loops", "first", "last"))
    more = [here - others for here in of_ends]
    return sum(more) if eqn.params["microbatches"] == 2 else max(more)


def _on_device(loops: tuple[Loops, ...]) -> int:
    segments = [segment for each in loops for segment in each.segments]
    return sum(segment.layers * sum(segment.layer.sizes.device) for segment in segments)
