"""The SwiGLU MLP (Shazeer, "GLU Variants Improve Transformer", 2020)."""

import jax
from flax import nnx

from jaxoffload import scope, tag
from models.config import Model
from models.layers import RMSNorm, weight
from models.sharding import constrain


class MLP(nnx.Module):
    """Residuals: mlp/norm, mlp/fc1.gate, mlp/fc1.up, mlp/act, mlp/fc2."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        D, F = config.d_model, config.d_ff
        self.norm = RMSNorm(D, config.norm_eps)
        self.gate_DxF = weight(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.up_DxF = weight(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.down_FxD = weight(rngs, (F, D), ("mlp", "embed"), (2 * config.layers * F) ** -0.5)

    def __call__(self, x_BxSxD: jax.Array) -> jax.Array:
        dtype = x_BxSxD.dtype
        with scope("mlp"):
            norm_BxSxD = tag(self.norm(x_BxSxD), "norm")
            # Two arrays, not halves of one: each leaf is contiguous, and is kept or recomputed by itself.
            fc1 = tag(
                {
                    "gate": norm_BxSxD @ self.gate_DxF.astype(dtype),
                    "up": norm_BxSxD @ self.up_DxF.astype(dtype),
                },
                "fc1",
            )
            gate_BxSxF, up_BxSxF = (constrain(fc1[leaf], f"mlp/fc1.{leaf}") for leaf in ("gate", "up"))
            act_BxSxF = tag(jax.nn.silu(gate_BxSxF) * up_BxSxF, "act")
            fc2_BxSxD = tag(act_BxSxF @ self.down_FxD.astype(dtype), "fc2")
            return constrain(fc2_BxSxD, "mlp/fc2")
