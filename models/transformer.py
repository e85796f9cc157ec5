"""A Llama-style decoder: embedding, scanned layers under a policy, and the loss in chunks of tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import jaxoffload
from jaxoffload import Policy, tag
from models.attention import Attention, rotations
from models.config import Model
from models.layers import RMSNorm, weight
from models.mlp import MLP
from models.sharding import constrain


class Layer(nnx.Module):
    """One decoder layer. Residuals: layer_input, mlp_input, and those of attention and MLP."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BxSxD: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_BxSxD = tag(x_BxSxD, "layer_input")
        x_BxSxD = tag(x_BxSxD + self.attention(x_BxSxD, rotation), "mlp_input")
        return x_BxSxD + self.mlp(x_BxSxD)


class Transformer(nnx.Module):
    """Each parameter of `layers` has a leading axis of layers."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.d_model
        self.config = config
        self.embedding_VxD = weight(rngs, (V, D), ("vocab", "embed"), 0.02)
        self.layers = stacked(config.layers, lambda rngs: Layer(config, rngs), rngs)
        self.norm = RMSNorm(D, config.norm_eps)
        if not config.tied_embeddings:
            self.unembedding_VxD = weight(rngs, (V, D), ("vocab", "embed"), 0.02)

    def __call__(self, tokens_BxS: jax.Array, policy: Policy) -> jax.Array:
        """The residual stream behind the last layer, (batch, sequence, d_model) in the compute dtype."""
        x_BxSxD = self.embedding_VxD[tokens_BxS].astype(self.config.dtype)
        x_BxSxD = constrain(x_BxSxD, "batch", "sequence", "residual")
        rotation = rotations(tokens_BxS.shape[1], self.config.d_head, self.config.rope_theta)
        graph, params = nnx.split(self.layers)

        def layer(x_BxSxD: jax.Array, params: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graph, params)(x_BxSxD, rotation), None

        x_BxSxD, _ = jaxoffload.scan(layer, x_BxSxD, params, policy=policy, strict=False)
        return x_BxSxD

    def logits(self, x_BxSxD: jax.Array) -> jax.Array:
        """Float32 logits (batch, sequence, vocabulary) of the residual stream."""
        table_VxD = self.embedding_VxD if self.config.tied_embeddings else self.unembedding_VxD
        logits_BxSxV = jnp.einsum("BSD,VD->BSV", self.norm(x_BxSxD), table_VxD.astype(x_BxSxD.dtype))
        return constrain(logits_BxSxV, "batch", "sequence", "vocab").astype(jnp.float32)


def stacked(count: int, make: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules with different random numbers as one, a leading axis on each parameter."""
    return nnx.split_rngs(splits=count)(nnx.vmap(make))(rngs)


def next_token_loss(model: Transformer, tokens_BxS1: jax.Array, policy: Policy, chunk: int) -> jax.Array:
    """Mean cross-entropy, in nats a token, of each token but the first given those before it.

    Logits exist for `chunk` positions of each sequence at a time, in the backward pass too; `chunk` divides
    the sequence length. Chunks are cut along the sequence, so that each holds the batch split as it is.
    """
    x_BxSxD = model(tokens_BxS1[:, :-1], policy)
    B, S, D = x_BxSxD.shape
    chunks = (
        jnp.swapaxes(x_BxSxD.reshape(B, S // chunk, chunk, D), 0, 1),
        jnp.swapaxes(tokens_BxS1[:, 1:].reshape(B, S // chunk, chunk), 0, 1),
    )

    @jax.checkpoint
    def add(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x_BxCxD, targets_BxC = chunk
        logits_BxCxV = model.logits(x_BxCxD)
        target_BxC = jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], axis=-1)[..., 0]
        return total + jnp.sum(jax.nn.logsumexp(logits_BxCxV, axis=-1) - target_BxC), None

    total, _ = jax.lax.scan(add, jnp.float32(0), chunks)
    return total / (B * S)


def matmul_params(config: Model) -> int:
    """Parameters that multiply each token: all matrices, the embedding's lookup not counted."""
    D, N, K, H, F = config.d_model, config.heads, config.kv_heads, config.d_head, config.d_ff
    layer = D * N * H + 2 * D * K * H + N * H * D + 3 * D * F
    return config.layers * layer + config.vocab_size * D


def flops_per_token(config: Model, seq_len: int) -> int:
    """Model FLOPs of a training step per token, forward and backward; nothing recomputed is counted.

    6 a matmul parameter, and causal attention: 6·B·S²·(heads·head_dim) a layer for B·S tokens.
    """
    attention = 6 * seq_len * config.heads * config.d_head * config.layers
    return 6 * matmul_params(config) + attention
