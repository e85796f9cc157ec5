"""What JAX's own rules lack where they meet residuals in host memory.

A `cond`'s residuals, and those of a `jax.checkpoint` that offloads, are JAX's: no rule of ours is asked about them. So
two rules of JAX's are wrapped here. Both are as before for all that they can do.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core.primitives import cond_p, device_put_p
from jax.interpreters import ad, batching

from ._memory import DEVICE, HOST, on_host

_batch_cond, _transpose_device_put = batching.fancy_primitive_batchers[cond_p], ad.primitive_transposes[device_put_p]


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """One message where the predicate is batched: `select_n` then chooses between the branches' results, and takes none
    in host memory."""
    branches = params["branches"]
    platform = "branches_platforms" in params  # the predicate is the platform, the same for all
    avals = [aval for branch in branches for aval in (*branch.in_avals, *branch.out_avals)]
    if dims[0] is not None and not platform and any(map(on_host, avals)):
        raise NotImplementedError(
            "jaxoffload: a residual that a scan, chain or checkpoint offloads cannot come from a branch of lax.cond or "
            "lax.switch whose predicate jax.vmap batches: all branches run then, and JAX cannot choose between values "
            "in host memory; mark it save or recompute, or take jax.lax.map instead of jax.vmap"
        )
    return _batch_cond(axis, args, dims, **params)


def _transpose(cotangents: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
    """The cotangent of a copy to the host goes back to the device. In a trace JAX leaves it on the host; what is
    offloaded cannot be differentiated twice in reverse."""

    def back(ct: Any, arg: Any) -> Any:
        was_there = ct is None or type(ct) is ad.Zero or on_host(arg.aval)
        return ct if was_there or not on_host(jax.typeof(ct)) else jax.device_put(ct, DEVICE, src=HOST)

    return list(map(back, _transpose_device_put(cotangents, *args, **params), args))


batching.fancy_primitive_batchers[cond_p] = _batch
ad.primitive_transposes[device_put_p] = _transpose
