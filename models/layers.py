"""What the blocks share: initialised weights with logical axes, and RMSNorm."""

import jax
import jax.numpy as jnp
from flax import nnx


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], stddev: float) -> nnx.Param:
    """A float32 parameter, normally distributed, with the logical axes that `sharding.Rules` maps."""
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis; the statistics in float32, the result in x's dtype.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(self, width: int, eps: float):
        self.scale_D = nnx.Param(jnp.ones(width, jnp.float32), axes=("residual",))
        self.eps = eps

    def __call__(self, x_BxSxD: jax.Array) -> jax.Array:
        x = x_BxSxD.astype(jnp.float32)
        rstd = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (x * rstd * self.scale_D[None, None]).astype(x_BxSxD.dtype)
