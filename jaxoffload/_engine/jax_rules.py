"""Two rules of JAX's that lack a case where they meet residuals in host memory (docs/upstream.md).

The residuals of a `cond`, and of a `jax.checkpoint` that offloads, are JAX's: no rule of ours is asked about them. The
first plan that offloads wraps the two rules; both do as before whatever they could do before.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core.primitives import cond_p, device_put_p

from .._jax import Zero, fancy_primitive_batchers, primitive_transposes
from .memory import DEVICE, HOST, on_host


@functools.cache
def mend_jax_rules() -> None:
    """Wrap both rules, once per process."""
    batch, transpose = fancy_primitive_batchers[cond_p], primitive_transposes[device_put_p]
    fancy_primitive_batchers[cond_p] = functools.partial(_batch_cond, batch)
    primitive_transposes[device_put_p] = functools.partial(_transpose_device_put, transpose)


def _batch_cond(rule: Any, axis: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Raise where the predicate is batched: JAX would choose between the branches' results with `select_n`, which takes
    none in host memory."""
    by_platform = "branches_platforms" in params  # then the predicate is the same for all
    avals = [aval for branch in params["branches"] for aval in (*branch.in_avals, *branch.out_avals)]
    if dims[0] is not None and not by_platform and any(map(on_host, avals)):
        raise NotImplementedError(
            "jaxoffload: a residual that a scan, chain or checkpoint offloads cannot come from a branch of lax.cond or "
            "lax.switch whose predicate jax.vmap batches: all branches run then, and JAX cannot choose between values "
            "in host memory; mark it save or recompute, or use jax.lax.map instead of jax.vmap"
        )
    return rule(axis, args, dims, **params)


def _transpose_device_put(rule: Any, cotangents: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
    """Return the cotangent of a copy to the host to the device. JAX leaves it on the host in a trace, and then what is
    offloaded cannot be differentiated twice in reverse."""

    def back(ct: Any, arg: Any) -> Any:
        in_place = ct is None or type(ct) is Zero or on_host(arg.aval) or not on_host(jax.typeof(ct))
        return ct if in_place else jax.device_put(ct, DEVICE, src=HOST)

    return list(map(back, rule(cotangents, *args, **params), args))
