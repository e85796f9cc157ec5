"""What the blocks share: weights with logical axes, and RMSNorm."""

import jax
import jax.numpy as jnp
from flax import nnx


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], stddev: float) -> nnx.Param:
    """Return a normally distributed float32 parameter, with the logical axes that `sharding.Rules` maps."""
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Return x / rms(x) * scale, over the last axis; statistics are float32, the result has the dtype of x.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. `scale` has the rank of x.
    """
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * rstd * scale).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` on (batch, sequence, width), with the scale as its parameter."""

    def __init__(self, width: int, eps: float):
        self.scale_D = nnx.Param(jnp.ones(width, jnp.float32), axes=("residual",))
        self.eps = eps

    def __call__(self, x_BxSxD: jax.Array) -> jax.Array:
        return rms_norm(x_BxSxD, self.scale_D[None, None], self.eps)
