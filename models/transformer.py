"""A Llama-style decoder, dense or with experts: its blocks, layers scanned under a policy, and the loss in chunks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import jaxoffload
from jaxoffload import Policy, scope, tag
from models.attention import Rotation, attend, rope, rotations
from models.config import Model
from models.moe import Balance, experts, swiglu
from models.sharding import batch_parts, constrain


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], stddev: float) -> nnx.Param:
    """Return a normally distributed float32 parameter, with the logical axes that `sharding.Rules` maps."""
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Return x / rms(x) * scale, over the last axis; statistics are float32, the result has the dtype of x.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. `scale` is broadcast from the last axes.
    """
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * rstd * jnp.expand_dims(scale, range(x.ndim - scale.ndim))).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` with the scale as its parameter."""

    def __init__(self, config: Model):
        self.scale_D = nnx.Param(jnp.ones(config.d_model, jnp.float32), axes=("residual",))
        self.eps = config.norm_eps

    def __call__(self, x_BxSxD: jax.Array) -> jax.Array:
        return rms_norm(x_BxSxD, self.scale_D[...], self.eps)


class Attention(nnx.Module):
    """Causal grouped-query attention. Residuals: attn/norm, attn/q, attn/k, attn/v, attn/context, attn/out.

    q and k are tagged after RoPE: the backward pass of attention reads them there, and RoPE's reads neither.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs):
        D, N, K, H = config.d_model, config.heads, config.kv_heads, config.d_head
        self.norm = RMSNorm(config)
        self.q_DxNxH = weight(rngs, (D, N, H), ("embed", "heads", "head"), D**-0.5)
        self.k_DxKxH = weight(rngs, (D, K, H), ("embed", "kv_heads", "head"), D**-0.5)
        self.v_DxKxH = weight(rngs, (D, K, H), ("embed", "kv_heads", "head"), D**-0.5)
        self.out_NxHxD = weight(rngs, (N, H, D), ("heads", "head", "embed"), (2 * config.layers * N * H) ** -0.5)
        if config.qk_norm:
            self.q_norm_H, self.k_norm_H = (nnx.Param(jnp.ones(H, jnp.float32), axes=("head",)) for _ in "qk")
        self.config = config

    def __call__(self, x_BxSxD: jax.Array, rotation: Rotation, documents_BxS: jax.Array | None = None) -> jax.Array:
        """Return (B, S, D). `documents_BxS`: the number of each token's document, which alone it sees; None: all."""
        matmul = lambda spec, x, weight: jnp.einsum(spec, x, weight.astype(x.dtype))
        config = self.config
        with scope("attn"):
            norm_BxSxD = tag(self.norm(x_BxSxD), "norm")
            q_BxSxNxH = constrain(matmul("BSD,DNH->BSNH", norm_BxSxD, self.q_DxNxH), "attn/q")
            k_BxSxKxH = constrain(matmul("BSD,DKH->BSKH", norm_BxSxD, self.k_DxKxH), "attn/k")
            if config.qk_norm:
                q_BxSxNxH = rms_norm(q_BxSxNxH, self.q_norm_H[...], config.norm_eps)
                k_BxSxKxH = rms_norm(k_BxSxKxH, self.k_norm_H[...], config.norm_eps)
            q_BxSxNxH = constrain(tag(rope(q_BxSxNxH, rotation), "q"), "attn/q")
            k_BxSxKxH = constrain(tag(rope(k_BxSxKxH, rotation), "k"), "attn/k")
            v_BxSxKxH = constrain(tag(matmul("BSD,DKH->BSKH", norm_BxSxD, self.v_DxKxH), "v"), "attn/v")
            context_BxSxNxH = attend(q_BxSxNxH, k_BxSxKxH, v_BxSxKxH, documents_BxS, config.attention)
            context_BxSxNxH = constrain(context_BxSxNxH, "attn/context")
            out_BxSxD = tag(matmul("BSNH,NHD->BSD", context_BxSxNxH, self.out_NxHxD), "out")
            return constrain(out_BxSxD, "attn/out")


class FeedForward(nnx.Module):
    """Two matmuls with SwiGLU between them. Residuals: SCOPE/fc1.gate, SCOPE/fc1.up, SCOPE/act, SCOPE/fc2."""

    def __init__(self, config: Model, rngs: nnx.Rngs, d_ff: int):
        D, F = config.d_model, d_ff
        self.gate_DxF = weight(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.up_DxF = weight(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.down_FxD = weight(rngs, (F, D), ("mlp", "embed"), (2 * config.layers * F) ** -0.5)

    def feed(self, x_BxSxD: jax.Array, name: str) -> jax.Array:
        """Return (B, S, D). `name` is the scope of the residuals."""
        dtype = x_BxSxD.dtype
        with scope(name):
            # Two arrays, not halves of one: each leaf is contiguous, and has a decision of its own.
            fc1 = tag({"gate": x_BxSxD @ self.gate_DxF.astype(dtype), "up": x_BxSxD @ self.up_DxF.astype(dtype)}, "fc1")
            fc1 = {leaf: constrain(value, f"{name}/fc1.{leaf}") for leaf, value in fc1.items()}
            act_BxSxF = constrain(tag(swiglu(fc1), "act"), f"{name}/act")
            fc2_BxSxD = tag(act_BxSxF @ self.down_FxD.astype(dtype), "fc2")
            return constrain(fc2_BxSxD, f"{name}/fc2")


class MLP(FeedForward):
    """The dense MLP of a layer. Residuals: mlp/norm, and those of FeedForward under mlp/."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        self.norm = RMSNorm(config)
        super().__init__(config, rngs, config.d_ff)

    def __call__(self, x_BxSxD: jax.Array) -> jax.Array:
        return self.feed(tag(self.norm(x_BxSxD), "mlp/norm"), "mlp")


class MoE(nnx.Module):
    """The experts of a layer; returns their output and their Balance.

    Residuals: moe/norm, moe/router_logits, moe/routing.*, moe/fc1_input, moe/fc1.gate, moe/fc1.up, moe/act, moe/fc2.
    Shared experts have shared/fc1.gate, shared/fc1.up, shared/act, shared/fc2. With FP8, moe/fc1_input and moe/act are
    quantised, as in moe/act.data, moe/act.scale_inv, moe/act.columnwise_data, moe/act.columnwise_scale_inv. With an
    expert axis there is moe/fc1_input.weight too, which is sent with the rows: the factor of each in moe/act.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs):
        D, E, F = config.d_model, config.experts, config.d_expert
        self.config = config
        self.norm = RMSNorm(config)
        self.router_DxE = weight(rngs, (D, E), ("residual", "router"), D**-0.5)
        self.gate_ExDxF = weight(rngs, (E, D, F), ("experts", "expert_embed", "mlp"), D**-0.5)
        self.up_ExDxF = weight(rngs, (E, D, F), ("experts", "expert_embed", "mlp"), D**-0.5)
        self.down_ExFxD = weight(rngs, (E, F, D), ("experts", "mlp", "expert_embed"), (2 * config.layers * F) ** -0.5)
        if config.shared_experts:
            self.shared = FeedForward(config, rngs, config.shared_experts * F)

    def __call__(self, x_BxSxD: jax.Array) -> tuple[jax.Array, Balance]:
        config, dtype = self.config, x_BxSxD.dtype
        norm_BxSxD = tag(self.norm(x_BxSxD), "moe/norm")
        # Rounded before they are gathered, which halves what is sent; the router is float32.
        weights = {"gate": self.gate_ExDxF.astype(dtype), "up": self.up_ExDxF.astype(dtype)}
        weights |= {"down": self.down_ExFxD.astype(dtype), "router": self.router_DxE[...]}
        out_BxSxD, balance = experts(config, norm_BxSxD, weights)
        if config.shared_experts:
            out_BxSxD += self.shared.feed(norm_BxSxD, "shared")
        return out_BxSxD, balance


class Layer(nnx.Module):
    """A decoder layer, with experts unless the model or this layer is dense.

    Residuals: layer_input, mlp_input, those of Attention, and those of MoE or MLP.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs, dense: bool = False):
        self.attention = Attention(config, rngs)
        self.has_experts = config.experts > 0 and not dense
        if self.has_experts:
            self.moe = MoE(config, rngs)
        else:
            self.mlp = MLP(config, rngs)

    def __call__(
        self, x_BxSxD: jax.Array, rotation: Rotation, documents_BxS: jax.Array | None = None
    ) -> tuple[jax.Array, Balance | None]:
        x_BxSxD = tag(x_BxSxD, "layer_input")
        x_BxSxD = tag(x_BxSxD + self.attention(x_BxSxD, rotation, documents_BxS), "mlp_input")
        out_BxSxD, balance = self.moe(x_BxSxD) if self.has_experts else (self.mlp(x_BxSxD), None)
        return x_BxSxD + out_BxSxD, balance


class Transformer(nnx.Module):
    """The decoder. `first` (dense layers before those with experts) and `layers` have stacked parameters.

    Those of `layers` can be made in groups, (groups, layers / groups, ...), as virtual stages have them.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs, groups: int = 1):
        V, D = config.vocab_size, config.d_model
        self.config = config
        self.embedding_VxD = weight(rngs, (V, D), ("vocab", "embed"), 0.02)
        if config.dense_layers:
            self.first = stacked(config.dense_layers, lambda rngs: Layer(config, rngs, dense=True), rngs)
        count = config.layers - config.dense_layers
        shape = (groups, count // groups) if groups > 1 else count
        self.layers = stacked(shape, lambda rngs: Layer(config, rngs), rngs)
        self.norm = RMSNorm(config)
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
        # In float32 the gradients of a token's many places are summed.
        x_BxSxD = self.embedding_VxD.astype(jnp.float32)[tokens_BxS].astype(config.dtype)
        x_BxSxD = constrain(x_BxSxD, "layer_input")
        rotation = rotations(tokens_BxS.shape[1], config.d_head, config.rope_theta, config.rope_scaling)
        documents_BxS = None if end is None else jnp.cumsum(tokens_BxS == end, axis=1, dtype=jnp.int32)

        def through(layers: nnx.Module, x_BxSxD: jax.Array) -> tuple[jax.Array, Balance | None]:
            graph, params = nnx.split(layers)

            def layer(x_BxSxD: jax.Array, params: nnx.State) -> tuple[jax.Array, Balance | None]:
                return nnx.merge(graph, params)(x_BxSxD, rotation, documents_BxS)

            return jaxoffload.scan(layer, x_BxSxD, params, policy=policy, strict=False)

        if config.dense_layers:
            x_BxSxD, _ = through(self.first, x_BxSxD)
        x_BxSxD, balance = through(self.layers, x_BxSxD)
        return constrain(x_BxSxD, "layer_input"), balance


def stacked(shape: int | tuple[int, ...], make: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> nnx.Module:
    """Return modules with different initial parameters, as one with these leading axes on each parameter."""
    for _ in (shape,) if isinstance(shape, int) else shape:
        make = nnx.vmap(make)
    return nnx.split_rngs(splits=shape)(make)(rngs)


def training_loss(
    model: Transformer, tokens_BxS1: jax.Array, policy: Policy, chunk: int, end: int | None = None
) -> tuple[jax.Array, tuple[jax.Array, Balance | None]]:
    """Return the loss to minimise, and (the cross-entropy, the layers' Balance).

    The cross-entropy is the mean, in nats per token, of all tokens but the first, each given those before it, in its
    document if there is an `end`, as for `Transformer`. With experts, the loss to minimise includes the means of the
    layers' auxiliary losses.
    """
    x_BxSxD, balance = model(tokens_BxS1[:, :-1], policy, end)
    loss = total = cross_entropy(model, x_BxSxD, tokens_BxS1[:, 1:], chunk)
    if balance is not None:
        total += model.config.aux_loss * jnp.mean(balance.aux) + model.config.z_loss * jnp.mean(balance.z)
    return total, (loss, balance)


def cross_entropy(model: Transformer, x_BxSxD: jax.Array, targets_BxS: jax.Array, chunk: int) -> jax.Array:
    """Return the mean cross-entropy over all tokens, float32.

    `targets_BxS`: int32, less than the vocabulary. Only the logits of `chunk` positions of each sequence are in memory
    at a time, in the backward pass too; `chunk` divides the sequence length. Chunks are cut along the sequence, so that
    the sharding of the batch stays.
    """
    B, S, D = x_BxSxD.shape
    P, C = batch_parts(), chunk
    scale_PxD, table_PxVxD = head(model, P, x_BxSxD.dtype)
    if C < S or P > 1:  # the gradients of chunks and parts are summed, in float32
        table_PxVxD = table_PxVxD.astype(jnp.float32)
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
        # A gather's gradient is a scatter: XLA would write the logits' gradients in float32.
        is_target_PxBxCxV = jax.nn.one_hot(targets_PxBxC, logits_PxBxCxV.shape[-1], dtype=bool)
        target_PxBxC = jnp.sum(logits_PxBxCxV, axis=-1, where=is_target_PxBxCxV)
        return total_P + jnp.sum(jax.nn.logsumexp(logits_PxBxCxV, axis=-1) - target_PxBxC, axis=(1, 2)), None

    total_P, _ = jax.lax.scan(add, jnp.zeros(P, jnp.float32), chunks)
    return jnp.sum(total_P) / (B * S)


def head(model: Transformer, parts: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Return the last norm's scale, float32, and the unembedding in `dtype`, copied for each part of the batch.

    So each part has weights of its own, which are gathered once, here. Their gradients are summed over the chunks part
    by part, and over the parts once, at the end: within the loop over chunks only the tensor axis communicates.
    """
    table_VxD = (model.embedding_VxD if model.config.tied_embeddings else model.unembedding_VxD)[...]
    # Rounded before it is gathered, which halves what is sent.
    table_PxVxD = jnp.broadcast_to(table_VxD.astype(dtype)[None], (parts, *table_VxD.shape))
    scale_PxD = jnp.broadcast_to(model.norm.scale_D[None], (parts, *model.norm.scale_D.shape))
    return constrain(scale_PxD, "last_norm"), constrain(table_PxVxD, "unembedding")


def flops_per_token(config: Model, seq_len: int) -> int:
    """Return the model FLOPs per token of a training step, forward and backward; recomputation is not counted.

    6 per parameter that multiplies each token, which are those of all matrices: the unembedding counts, the lookup of
    embeddings does not, and of experts the router and the chosen and shared ones do. For causal attention,
    6·B·S²·(heads·head_dim) per layer and B·S tokens. `seq_len` 0: matrices only.
    """
    D = config.d_model
    projections = 2 * D * config.d_head * (config.heads + config.kv_heads)
    dense = config.dense_layers if config.experts else config.layers
    chosen = (config.experts_per_token + config.shared_experts) * config.d_expert
    mixed = (config.layers - dense) * D * (3 * chosen + config.experts)
    matrices = config.layers * projections + dense * 3 * D * config.d_ff + mixed + config.vocab_size * D
    return 6 * matrices + 6 * seq_len * config.heads * config.d_head * config.layers
