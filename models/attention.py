"""Causal grouped-query attention with rotary positions."""

import contextlib
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxoffload import scope, tag
from models import flash
from models.config import Model
from models.layers import RMSNorm, rms_norm, weight
from models.sharding import RULES, VALUES, constrain, on_each_device

Rotation = tuple[jax.Array, jax.Array]  # cos and sin of RoPE's angles


def rotations(seq_len: int, head_dim: int, theta: float, scaling: tuple[float, ...] | None = None) -> Rotation:
    """Return cos and sin of RoPE's angles, each (seq_len, head_dim / 2) float32. `scaling`: as `model.rope_scaling`."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        factor, low, high, length = scaling
        turns = length * frequencies / (2 * jnp.pi)  # in a sequence of the original length
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        frequencies *= kept + (1 - kept) / factor
    angles = jnp.outer(jnp.arange(seq_len, dtype=jnp.float32), frequencies)
    return jnp.cos(angles), jnp.sin(angles)


def rope(x_BxSxNxH: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate the pair (i, i + H/2) of each head by position * frequency[i], in float32 (Su et al., 2021)."""
    cos, sin = (part[None, :, None, :] for part in rotation)
    first, second = jnp.split(x_BxSxNxH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BxSxNxH.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention. Residuals: attn/norm, attn/q, attn/k, attn/v, attn/context, attn/out.

    q and k are tagged after RoPE: the backward pass of attention reads them there, and RoPE's reads neither.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs):
        D, N, K, H = config.d_model, config.heads, config.kv_heads, config.d_head
        self.norm = RMSNorm(D, config.norm_eps)
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
        with scope("attn"):
            norm_BxSxD = tag(self.norm(x_BxSxD), "norm")
            q_BxSxNxH = constrain(matmul("BSD,DNH->BSNH", norm_BxSxD, self.q_DxNxH), "attn/q")
            k_BxSxKxH = constrain(matmul("BSD,DKH->BSKH", norm_BxSxD, self.k_DxKxH), "attn/k")
            if self.config.qk_norm:
                q_BxSxNxH = rms_norm(q_BxSxNxH, self.q_norm_H[None, None, None], self.config.norm_eps)
                k_BxSxKxH = rms_norm(k_BxSxKxH, self.k_norm_H[None, None, None], self.config.norm_eps)
            q_BxSxNxH = constrain(tag(rope(q_BxSxNxH, rotation), "q"), "attn/q")
            k_BxSxKxH = constrain(tag(rope(k_BxSxKxH, rotation), "k"), "attn/k")
            v_BxSxKxH = constrain(tag(matmul("BSD,DKH->BSKH", norm_BxSxD, self.v_DxKxH), "v"), "attn/v")
            if self.config.attention == "te":
                context_BxSxNxH = transformer_engine(q_BxSxNxH, k_BxSxKxH, v_BxSxKxH)
            else:
                qkv = q_BxSxNxH, k_BxSxKxH, v_BxSxKxH
                context_BxSxNxH = attend(*qkv, documents_BxS, self.config.attention)
            context_BxSxNxH = constrain(context_BxSxNxH, "attn/context")
            out_BxSxD = tag(matmul("BSNH,NHD->BSD", context_BxSxNxH, self.out_NxHxD), "out")
            return constrain(out_BxSxD, "attn/out")


def attend(
    q_BxSxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, documents_BxS: jax.Array | None, kind: str
) -> jax.Array:
    """Causal attention by JAX, (batch, sequence, heads, head_dim), within documents if they are numbered.

    `kind` is "cudnn" or "xla". Without a GPU, "cudnn" has the same kernels and residuals, computed by XLA; but with a
    mask of documents it is "xla".
    """
    args = [q_BxSxNxH, k_BxSxKxH, v_BxSxKxH]
    args += [] if documents_BxS is None else [documents_BxS]

    def named(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None = None) -> jax.Array:
        mask = None if documents is None else documents[:, None, :, None] == documents[:, None, None, :]
        with jax.named_scope("attention"):
            if kind == "cudnn" and jax.default_backend() != "gpu" and documents is None:
                context = flash.attention(q, k, v)
            else:
                here = kind if jax.default_backend() == "gpu" else "xla"
                context = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=here)
        return tag(context, "context")

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and mesh.auto_axes:
        # In a pipeline stage. JAX cannot divide cuDNN's kernel there (docs/upstream.md#partly-manual), so we do: each
        # device has whole sequences and heads.
        specs = *(_spec(name) for name in "qkv"), RULES.spec("batch", "sequence")
        named = on_each_device(named, specs[: len(args)], _spec("context"))
    return named(*args)


def _spec(name: str) -> PartitionSpec:
    return RULES.spec(*VALUES[f"attn/{name}"])


def transformer_engine(q_BxSxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array) -> jax.Array:
    """Causal attention by TransformerEngine, (batch, sequence, heads, head_dim), on the mesh in use if there is one.

    TransformerEngine names its residuals itself: attn/context.0 is the output, attn/context.1 the softmax statistics,
    and attn/context.2 the state of the random number generator, which nothing uses.

    Raises:
      ImportError: TransformerEngine, or a CUDA library that it needs, is missing.
    """
    importlib.import_module("transformer_engine.jax.attention")
    if jax.sharding.get_abstract_mesh().empty:
        return _on_one_device(q_BxSxNxH, k_BxSxKxH, v_BxSxKxH)
    # TransformerEngine also keeps empty arrays (no bias, no offsets). On two or more devices XLA:GPU crashes on the
    # gradient of a shard_map that returns any (jaxlib 0.11.2, Shardy's canonicalizer), so they are recomputed.
    named = jax.checkpoint_policies.save_only_these_names("attn/context")
    # Each device has whole sequences and heads.
    kept = jax.checkpoint(_on_one_device, policy=named, prevent_cse=False)
    mapped = on_each_device(kept, tuple(_spec(name) for name in "qkv"), _spec("context"))
    return mapped(q_BxSxNxH, k_BxSxKxH, v_BxSxKxH)


@jax.custom_vjp
def _on_one_device(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`_fused` in a context that tells TransformerEngine to shard over no mesh axis.

    TransformerEngine reads the context again when the derivative is traced, after this function has returned. So each
    rule opens the context itself, and none stays open.
    """
    with _no_mesh_axes():
        return _fused(q, k, v)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    with _no_mesh_axes():
        return jax.vjp(_fused, q, k, v)


def _backward(vjp: Any, cotangent: jax.Array) -> Any:
    with _no_mesh_axes():
        return vjp(cotangent)


_on_one_device.defvjp(_forward, _backward)


def _fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    te = importlib.import_module("transformer_engine.jax.attention")
    lengths_B = jnp.full(q.shape[:1], q.shape[1], jnp.int32)
    return te.fused_attn(
        (q, k, v),
        bias=None,
        sequence_descriptor=te.SequenceDescriptor.from_seqlens((lengths_B, lengths_B)),
        seed=None,
        attn_bias_type=te.AttnBiasType.NO_BIAS,
        attn_mask_type=te.AttnMaskType.CAUSAL_MASK,
        qkv_layout=te.QKVLayout.BSHD_BSHD_BSHD,
        softmax_type=te.AttnSoftmaxType.VANILLA_SOFTMAX,
        scaling_factor=q.shape[-1] ** -0.5,
        dropout_probability=0.0,
        is_training=True,
        context_checkpoint_name="attn/context",
    )


def _no_mesh_axes() -> contextlib.AbstractContextManager[Any]:
    """Return TransformerEngine's context for sharding over no mesh axis. A context of the caller's is left as it is."""
    sharding = importlib.import_module("transformer_engine.jax.sharding")
    try:
        sharding.global_mesh_resource()
    except AssertionError:  # no context is open
        return sharding.global_shard_guard(sharding.MeshResource())
    return contextlib.nullcontext()
