"""The dense MLP: SwiGLU, GeGLU (Shazeer, "GLU Variants Improve Transformer", 2020), squared ReLU (So et al., 2021)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxoffload import scope, tag
from models.config import Model
from models.layers import RMSNorm, weight
from models.sharding import constrain


def first_leaves(activation: str) -> tuple[str, ...]:
    """Return the leaves of fc1; each is the output of a matmul of its own."""
    return ("up",) if activation == "relu2" else ("gate", "up")


def activate(fc1: Mapping[str, jax.Array], activation: str) -> jax.Array:
    """Return (..., F), the input of the second matmul."""
    match activation:
        case "swiglu":
            return jax.nn.silu(fc1["gate"]) * fc1["up"]
        case "geglu":
            return jax.nn.gelu(fc1["gate"]) * fc1["up"]
        case _:
            return jnp.square(jax.nn.relu(fc1["up"]))


class FeedForward(nnx.Module):
    """Two matmuls with an activation between them. Residuals: SCOPE/fc1.gate, SCOPE/fc1.up, SCOPE/act, SCOPE/fc2."""

    def __init__(self, config: Model, rngs: nnx.Rngs, d_ff: int):
        D, F = config.d_model, d_ff
        self.activation = config.activation
        if self.activation != "relu2":
            self.gate_DxF = weight(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.up_DxF = weight(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.down_FxD = weight(rngs, (F, D), ("mlp", "embed"), (2 * config.layers * F) ** -0.5)

    def feed(self, x_BxSxD: jax.Array, name: str) -> jax.Array:
        """Return (B, S, D). `name` is the scope of the residuals."""
        dtype = x_BxSxD.dtype
        with scope(name):
            # Two arrays, not halves of one: each leaf is contiguous, and has a decision of its own.
            leaves = first_leaves(self.activation)
            fc1 = tag({leaf: x_BxSxD @ getattr(self, f"{leaf}_DxF").astype(dtype) for leaf in leaves}, "fc1")
            fc1 = {leaf: constrain(fc1[leaf], f"{name}/fc1.{leaf}") for leaf in leaves}
            act_BxSxF = constrain(tag(activate(fc1, self.activation), "act"), f"{name}/act")
            fc2_BxSxD = tag(act_BxSxF @ self.down_FxD.astype(dtype), "fc2")
            return constrain(fc2_BxSxD, f"{name}/fc2")


class MLP(FeedForward):
    """The dense MLP of a layer. Residuals: mlp/norm, and those of FeedForward under mlp/."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        super().__init__(config, rngs, config.d_ff)

    def __call__(self, x_BxSxD: jax.Array) -> jax.Array:
        return self.feed(tag(self.norm(x_BxSxD), "mlp/norm"), "mlp")
