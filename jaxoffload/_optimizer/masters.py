"""float32 masters of bfloat16 weights, in two bytes beside each weight.

A weight is its master, rounded. What rounding took away fits in a signed integer of 16 bits, if a tie is always rounded
to the larger number of bits: master = weight * 2**16 + remainder, as integers. So nothing is lost, and the master's
upper half need not travel. Source: `store_param_remainders` of NVIDIA Apex's DistributedFusedAdam.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax


def join_masters(weight: Any, remainder: Any) -> Any:
    """Return the float32 masters of bfloat16 weights and int16 remainders, arrays of one shape, elementwise.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload import join_masters, split_masters
      >>> join_masters(*split_masters(jnp.float32(0.1))) == jnp.float32(0.1)
      Array(True, dtype=bool)
    """
    upper = lax.bitcast_convert_type(weight, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(upper + remainder.astype(jnp.uint32), jnp.float32)  # wraps below zero


def split_masters(master: Any) -> tuple[Any, Any]:
    """Return float32 masters as bfloat16 weights and int16 remainders, as `host_optimizer` stores them. `join_masters`
    returns them bit for bit; of a NaN, a NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload import split_masters
      >>> weight, remainder = split_masters(jnp.float32(1 + 2**-20))
      >>> float(weight), int(remainder)
      (1.0, 8)
    """
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(master), jnp.nan, master), jnp.uint32)
    upper = (bits + 0x8000) >> 16
    weight = lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return weight, lax.bitcast_convert_type((bits - (upper << 16)).astype(jnp.uint16), jnp.int16)
