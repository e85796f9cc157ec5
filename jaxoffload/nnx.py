"""scan(): `flax.nnx.scan` under a `Policy`. The one module for Flax NNX; `import jaxoffload` does not import it."""

import functools
from collections.abc import Callable
from typing import Any

from ._offload import with_its_scan_ours
from ._policy import Policy, check_arguments

try:
    from flax import nnx
except ImportError as missing:
    raise ImportError(f"jaxoffload.nnx needs Flax (pip install flax): {missing}") from missing


def scan(f: Callable[..., Any] | None = None, *, policy: Policy, strict: bool = True, **kwargs: Any) -> Any:
    """`flax.nnx.scan` under a `Policy`: layers of Flax NNX, scanned by `jaxoffload.scan`.

    It computes what `nnx.scan(nnx.remat(f), ...)` does, bit for bit. Flax splits and merges the modules, and what the
    layers change in them is changed: the counts of random numbers, batch statistics, sown values. An array that the
    layers carry, and that no layer names, is named "layer_input".

    Args:
      f: the function that is scanned, as for `flax.nnx.scan`; a decorator if it is left out.
      kwargs: as for `flax.nnx.scan`: in_axes, out_axes, length, reverse, unroll and so on.
      policy, strict: as for `jaxoffload.scan`.

    Returns:
      As `flax.nnx.scan`: a function with the arguments and results of `f`.

    Raises:
      ImportError: (when this module is imported) Flax is not installed.
      TypeError: policy is not a Policy, or strict not a bool; and what `flax.nnx.scan` raises.
      NotImplementedError (when called): the layers read or write a `jax.new_ref`, or change more of a module than its
        variables.

    Raises (when differentiated): as `jaxoffload.scan`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxoffload.nnx
      >>> from jaxoffload import Policy, residuals, tag
      >>> make = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
      >>> layers = nnx.split_rngs(splits=3)(nnx.vmap(make))(nnx.Rngs(0))
      >>> policy = Policy({"fc1": "offload"}, min_offload_bytes=0)
      >>> @jaxoffload.nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, policy=policy)
      ... def run(layer, x):
      ...     return jnp.sin(tag(layer(x), "fc1"))
      >>> nnx.grad(lambda layers, x: jnp.sum(run(layers, x)))(layers, jnp.ones((4, 8))).kernel.shape
      (3, 8, 8)
    """
    check_arguments("jaxoffload.nnx.scan", policy, strict)
    if f is None:
        return functools.partial(scan, policy=policy, strict=strict, **kwargs)
    return with_its_scan_ours(nnx.scan(f, **kwargs), policy, strict, "jaxoffload.nnx.scan")
