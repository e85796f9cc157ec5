"""`jax.checkpoint` keeps float8 residuals bit for bit, from the first float8 residual that the process has.

Behind a residual that is read twice JAX puts a `reduce_precision` to the residual's own dtype, so that both passes see
it rounded (https://github.com/jax-ml/jax/pull/22244). XLA takes the two numbers for those of an IEEE format. A
float8_e4m3fn of that many bits has neither values above 240 nor subnormal ones: on CPU the former become NaN and the
latter zero, in the forward pass too. XLA never holds a float8 in higher precision, so leaving it out loses nothing.
docs/upstream.md has a reproduction.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import reduce_precision_p
from jax.extend.mlir import lower_with_sharding_in_types
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir


def is_float8(dtype: Any) -> bool:
    return str(dtype).startswith("float8")


@functools.cache
def keep_float8_bits() -> None:
    """Register a lowering of `reduce_precision` that leaves out those from a float8 to itself."""
    traced = jax.make_jaxpr(lambda x: jax.lax.reduce_precision(x, 4, 3))(jnp.float32(0))
    # Before anything is registered: the rule below, which is for all dtypes, must know every parameter.
    assert traced.eqns[0].params.keys() == {"exponent_bits", "mantissa_bits"}, traced
    mlir.register_lowering(reduce_precision_p, _reduce_precision)


def _reduce_precision(ctx: Any, operand: Any, *, exponent_bits: int, mantissa_bits: int) -> list[Any]:
    (aval,) = ctx.avals_out
    info = jnp.finfo(aval.dtype)
    if is_float8(aval.dtype) and (exponent_bits, mantissa_bits) == (info.nexp, info.nmant):
        return [operand]
    # For all others JAX's own rule.
    out = stablehlo.reduce_precision(operand, mlir.i32_attr(exponent_bits), mlir.i32_attr(mantissa_bits))
    return [lower_with_sharding_in_types(ctx, out, aval)]
