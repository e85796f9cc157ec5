"""A Llama-style decoder, dense or with experts: embedding, layers scanned under a policy, and the loss in chunks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import jaxoffload
from jaxoffload import Policy, tag
from models.attention import Attention, Rotation, rotations
from models.config import Model
from models.layers import RMSNorm, rms_norm, weight
from models.mlp import MLP, first_leaves
from models.moe import MoE
from models.routing import Balance
from models.sharding import batch_parts, constrain


class Layer(nnx.Module):
    """A decoder layer. Residuals: layer_input, mlp_input, and those of Attention and MLP."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BxSxD: jax.Array, rotation: Rotation, documents_BxS: jax.Array | None = None) -> jax.Array:
        x_BxSxD = tag(x_BxSxD, "layer_input")
        x_BxSxD = tag(x_BxSxD + self.attention(x_BxSxD, rotation, documents_BxS), "mlp_input")
        return x_BxSxD + self.mlp(x_BxSxD)


class ExpertLayer(nnx.Module):
    """A decoder layer with experts. Residuals: layer_input, mlp_input, and those of Attention and MoE."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.moe = MoE(config, rngs)

    def __call__(
        self, x_BxSxD: jax.Array, rotation: Rotation, documents_BxS: jax.Array | None = None
    ) -> tuple[jax.Array, Balance]:
        x_BxSxD = tag(x_BxSxD, "layer_input")
        x_BxSxD = tag(x_BxSxD + self.attention(x_BxSxD, rotation, documents_BxS), "mlp_input")
        out_BxSxD, balance = self.moe(x_BxSxD)
        return x_BxSxD + out_BxSxD, balance


class Transformer(nnx.Module):
    """The decoder. `first` (dense layers before those with experts) and `layers` have stacked parameters."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.d_model
        self.config = config
        self.embedding_VxD = weight(rngs, (V, D), ("vocab", "embed"), 0.02)
        dense = lambda rngs: Layer(config, rngs)
        if config.experts:
            if config.dense_layers:
                self.first = stacked(config.dense_layers, dense, rngs)
            self.layers = stacked(config.layers - config.dense_layers, lambda rngs: ExpertLayer(config, rngs), rngs)
        else:
            self.layers = stacked(config.layers, dense, rngs)
        self.norm = RMSNorm(D, config.norm_eps)
        if not config.tied_embeddings:
            self.unembedding_VxD = weight(rngs, (V, D), ("vocab", "embed"), 0.02)

    def __call__(
        self, tokens_BxS: jax.Array, policy: Policy, end: int | None = None
    ) -> tuple[jax.Array, Balance | None]:
        """Return the output of the last layer, (B, S, D) in `model.dtype`, and the Balance of the layers with experts.

        The leaves of the Balance have a leading axis of layers; it is None if the model is dense. `end`: the token with
        which a document begins, that attention does not leave; None: attention sees all tokens before. The positions
        of a document need not begin at 0, because RoPE's scores depend on differences of positions only.
        """
        config = self.config
        x_BxSxD = self.embedding_VxD[tokens_BxS].astype(config.dtype)
        x_BxSxD = constrain(x_BxSxD, "layer_input")
        rotation = rotations(tokens_BxS.shape[1], config.d_head, config.rope_theta, config.rope_scaling)
        documents_BxS = None if end is None else jnp.cumsum(tokens_BxS == end, axis=1, dtype=jnp.int32)

        def through(layers: nnx.Module, x_BxSxD: jax.Array) -> tuple[jax.Array, Balance | None]:
            graph, params = nnx.split(layers)

            def layer(x_BxSxD: jax.Array, params: nnx.State) -> tuple[jax.Array, Balance | None]:
                out = nnx.merge(graph, params)(x_BxSxD, rotation, documents_BxS)
                return out if isinstance(out, tuple) else (out, None)

            return jaxoffload.scan(layer, x_BxSxD, params, policy=policy, strict=False)

        if config.experts and config.dense_layers:
            x_BxSxD, _ = through(self.first, x_BxSxD)
        x_BxSxD, balance = through(self.layers, x_BxSxD)
        return constrain(x_BxSxD, "layer_input"), balance


def stacked(count: int, make: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> nnx.Module:
    """Return `count` modules with different initial parameters, as one with a leading axis on each parameter."""
    return nnx.split_rngs(splits=count)(nnx.vmap(make))(rngs)


def next_token_loss(
    model: Transformer, tokens_BxS1: jax.Array, policy: Policy, chunk: int, end: int | None = None
) -> jax.Array:
    """Return the mean cross-entropy, in nats per token, of all tokens but the first, each given those before it.

    `end`: as for `Transformer`; each token is then given those before it in its document.
    """
    return cross_entropy(model, model(tokens_BxS1[:, :-1], policy, end)[0], tokens_BxS1[:, 1:], chunk)


def training_loss(
    model: Transformer, tokens_BxS1: jax.Array, policy: Policy, chunk: int, end: int | None = None
) -> tuple[jax.Array, tuple[jax.Array, Balance | None]]:
    """Return the loss to minimise, and (`next_token_loss`, the layers' Balance).

    With experts, the loss includes the means of the layers' auxiliary losses.
    """
    x_BxSxD, balance = model(tokens_BxS1[:, :-1], policy, end)
    loss = total = cross_entropy(model, x_BxSxD, tokens_BxS1[:, 1:], chunk)
    if balance is not None:
        total += model.config.aux_loss * jnp.mean(balance.aux) + model.config.z_loss * jnp.mean(balance.z)
    return total, (loss, balance)


def cross_entropy(model: Transformer, x_BxSxD: jax.Array, targets_BxS: jax.Array, chunk: int) -> jax.Array:
    """Return the mean cross-entropy over all tokens, float32.

    Only the logits of `chunk` positions of each sequence are in memory at a time, in the backward pass too; `chunk`
    divides the sequence length. Chunks are cut along the sequence, so that the sharding of the batch stays.
    """
    B, S, D = x_BxSxD.shape
    P, C = batch_parts(), chunk
    scale_PxD, table_PxVxD = head(model, P, x_BxSxD.dtype)
    chunks = (
        jnp.moveaxis(x_BxSxD.reshape(P, B // P, S // C, C, D), 2, 0),
        jnp.moveaxis(targets_BxS.reshape(P, B // P, S // C, C), 2, 0),
    )

    @jax.checkpoint
    def add(total_P: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x_PxBxCxD, targets_PxBxC = chunk
        x_PxBxCxD = rms_norm(x_PxBxCxD, scale_PxD[:, None, None], model.config.norm_eps)
        logits_PxBxCxV = jnp.einsum("PBCD,PVD->PBCV", x_PxBxCxD, table_PxVxD.astype(x_PxBxCxD.dtype))
        logits_PxBxCxV = constrain(logits_PxBxCxV, "logits").astype(jnp.float32)
        target_PxBxC = jnp.take_along_axis(logits_PxBxCxV, targets_PxBxC[..., None], axis=-1)[..., 0]
        return total_P + jnp.sum(jax.nn.logsumexp(logits_PxBxCxV, axis=-1) - target_PxBxC, axis=(1, 2)), None

    total_P, _ = jax.lax.scan(add, jnp.zeros(P, jnp.float32), chunks)
    return jnp.sum(total_P) / (B * S)


def logits(model: Transformer, x_BxSxD: jax.Array) -> jax.Array:
    """Return the logits of each position's next token, (B, S, V) float32, from the output of the last layer."""
    table_VxD = unembedding(model).astype(x_BxSxD.dtype)
    return jnp.einsum("BSD,VD->BSV", model.norm(x_BxSxD), table_VxD).astype(jnp.float32)


def unembedding(model: Transformer) -> jax.Array:
    return (model.embedding_VxD if model.config.tied_embeddings else model.unembedding_VxD)[...]


def head(model: Transformer, parts: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Return the last norm's scale and the unembedding, copied for each part of the batch: (parts, ...) float32.

    So each part has weights of its own, which are gathered once, here. Their gradients are summed over the chunks part
    by part, and over the parts once, at the end: within the loop over chunks only the tensor axis communicates.
    """
    table_VxD = unembedding(model)
    # Rounded before it is gathered, which halves what is sent; then float32, in which the chunks' gradients are summed.
    table_PxVxD = jnp.broadcast_to(table_VxD.astype(dtype)[None], (parts, *table_VxD.shape))
    scale_PxD = jnp.broadcast_to(model.norm.scale_D[None], (parts, *model.norm.scale_D.shape))
    return constrain(scale_PxD, "last_norm"), constrain(table_PxVxD, "unembedding").astype(jnp.float32)


def matmul_params(config: Model) -> int:
    """Return the number of parameters that multiply each token: those of all matrices.

    The unembedding counts, and the lookup of embeddings does not. With experts, the router and the chosen and shared
    experts count.
    """
    D, N, K, H, F = config.d_model, config.heads, config.kv_heads, config.d_head, config.d_ff
    matmuls = len(first_leaves(config.activation)) + 1
    attention = D * N * H + 2 * D * K * H + N * H * D
    dense, mixed = config.layers, 0
    if config.experts:
        dense, mixed = config.dense_layers, config.layers - config.dense_layers
    chosen = (config.experts_per_token + config.shared_experts) * config.d_expert
    expert_layer = matmuls * D * chosen + D * config.experts
    return config.layers * attention + dense * matmuls * D * F + mixed * expert_layer + config.vocab_size * D


def flops_per_token(config: Model, seq_len: int) -> int:
    """Return the model FLOPs per token of a training step, forward and backward; recomputation is not counted.

    6 per matmul parameter, and for causal attention 6·B·S²·(heads·head_dim) per layer and B·S tokens.
    """
    attention = 6 * seq_len * config.heads * config.d_head * config.layers
    return 6 * matmul_params(config) + attention
