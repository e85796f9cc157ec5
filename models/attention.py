"""Causal grouped-query attention with rotary positions: XLA's, cuDNN's or TransformerEngine's."""

import contextlib
import importlib
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxoffload import tag
from models.sharding import RULES, VALUES, on_each_device

Kind = Literal["xla", "cudnn", "te"]
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


def attend(
    q_BxSxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, documents_BxS: jax.Array | None, kind: Kind
) -> jax.Array:
    """Causal attention, (batch, sequence, heads, head_dim), within documents if they are numbered.

    `kind` is "xla", "cudnn" or "te", which has no documents. The residual is attn/context; of flash attention
    attn/context.0 is the output and attn/context.1 the softmax statistics.
    """
    args = [q_BxSxNxH, k_BxSxKxH, v_BxSxKxH]
    if kind == "te":
        return transformer_engine(*args)
    args += [] if documents_BxS is None else [documents_BxS]

    def named(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None = None) -> jax.Array:
        mask = None if documents is None else documents[:, None, :, None] == documents[:, None, None, :]
        with jax.named_scope("attention"), traced_without_cudnn():
            return tag(jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=kind), "context")

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and mesh.auto_axes:
        # In a pipeline stage. JAX cannot divide cuDNN's kernel there (docs/upstream.md#partly-manual), so we do: each
        # device has whole sequences and heads.
        specs = *(_spec(name) for name in "qkv"), RULES.spec("batch", "sequence")
        named = on_each_device(named, specs[: len(args)], _spec("context"))
    return named(*args)


def _spec(name: str) -> PartitionSpec:
    return RULES.spec(*VALUES[f"attn/{name}"])


def traced_without_cudnn() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which JAX traces cuDNN's attention where there is none, to weigh or compile it for a GPU.

    JAX asks cuDNN for its version as it traces; only newer features depend on the answer.
    """
    if jax.default_backend() == "gpu":
        return contextlib.nullcontext()
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    return mock.patch.object(module, "check_cudnn_version", lambda: 91000)


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
    """Return TransformerEngine's context for sharding over no mesh axis."""
    sharding = importlib.import_module("transformer_engine.jax.sharding")
    return sharding.global_shard_guard(sharding.MeshResource())
