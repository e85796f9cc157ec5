"""`jax.checkpoint` keeps float8 residuals bit for bit.

Behind a residual that is read twice JAX puts a `reduce_precision` to the residual's own dtype, to have it rounded in
both passes (https://github.com/jax-ml/jax/pull/22244). XLA reads its two numbers as an IEEE format's, which for
float8_e4m3fn has neither the values above 240 nor the subnormal ones: on CPU the former become NaN and the latter zero,
in the forward pass too. A float8 is never held in higher precision, so nothing is lost without.
"""

from typing import Any

import jax.numpy as jnp
from jax.extend.core.primitives import reduce_precision_p
from jax.extend.mlir import lower_with_sharding_in_types
from jax.extend.mlir.dialects import stablehlo

from .._jax import i32_attr, register_lowering
from ._tensor import is_float8


def _reduce_precision(ctx: Any, operand: Any, *, exponent_bits: int, mantissa_bits: int) -> list[Any]:
    (aval,) = ctx.avals_out
    info = jnp.finfo(aval.dtype)
    if is_float8(aval.dtype) and (exponent_bits, mantissa_bits) == (info.nexp, info.nmant):
        return [operand]
    # For all others JAX's own rule.
    out = stablehlo.reduce_precision(operand, i32_attr(exponent_bits), i32_attr(mantissa_bits))
    return [lower_with_sharding_in_types(ctx, out, aval)]


register_lowering(reduce_precision_p, _reduce_precision)
