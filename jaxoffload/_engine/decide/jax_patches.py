"""Fix three JAX rules, on first use (docs/upstream.md).

Nothing else in jaxoffload changes JAX for good, and nothing changes it on import. Each new rule does as JAX's own did,
except in the case that its docstring names. The residuals of a `cond`, and of a `jax.checkpoint` that offloads, are
handled by JAX's rules, which therefore must support host memory.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import cond_p, device_put_p, reduce_precision_p
from jax.extend.mlir import lower_with_sharding_in_types
from jax.extend.mlir.dialects import stablehlo

from ..._jax import (
    DEVICE,
    HOST,
    Zero,
    fancy_primitive_batchers,
    i32_attr,
    on_host,
    primitive_transposes,
    register_lowering,
)


@functools.cache
def let_residuals_be_on_the_host() -> None:
    """Replace the batching of `cond` and the transpose of `device_put`: the first plan that offloads needs both."""
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


def is_float8(dtype: Any) -> bool:
    return str(dtype).startswith("float8")


@functools.cache
def keep_float8_bits() -> None:
    """Replace the lowering of `reduce_precision`: the first float8 residual needs it.

    Behind a residual that is read twice, `jax.checkpoint` puts a `reduce_precision` to the residual's own dtype, so
    that both passes see it rounded (https://github.com/jax-ml/jax/pull/22244). XLA takes the two numbers for those of
    an IEEE format. A float8_e4m3fn of that many bits has neither values above 240 nor subnormal ones: on CPU the former
    become NaN and the latter zero, in the forward pass too.
    """
    traced = jax.make_jaxpr(lambda x: jax.lax.reduce_precision(x, 4, 3))(jnp.float32(0))
    # Before anything is registered: the rule below, which is for all dtypes, must know every parameter.
    if traced.eqns[0].params.keys() != {"exponent_bits", "mantissa_bits"}:
        raise NotImplementedError(
            f"jaxoffload: jax {jax.__version__} has a reduce_precision of another form ({traced.eqns[0]}); "
            "keep no float8 residual, or install an older jax"
        )
    register_lowering(reduce_precision_p, _reduce_precision)


def _reduce_precision(ctx: Any, operand: Any, *, exponent_bits: int, mantissa_bits: int) -> list[Any]:
    """Leave out a `reduce_precision` from a float8 to itself: XLA never holds a float8 in higher precision."""
    (aval,) = ctx.avals_out
    info = jnp.finfo(aval.dtype)
    if is_float8(aval.dtype) and (exponent_bits, mantissa_bits) == (info.nexp, info.nmant):
        return [operand]
    # For all others JAX's own rule.
    out = stablehlo.reduce_precision(operand, i32_attr(exponent_bits), i32_attr(mantissa_bits))
    return [lower_with_sharding_in_types(ctx, out, aval)]
