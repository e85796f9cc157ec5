"""The reference model against plain references, and the bytes of its residuals at full size, by hand."""

import dataclasses
import functools
import json
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ROOT, assert_close, equations, fast_compiles, normal
from flax import nnx

import jaxoffload
from jaxoffload import Policy, proof
from jaxoffload.grouped import _backend, te
from jaxoffload.proof import Bus, Machine
from models import flash, step, transformer
from models.attention import rope, rotations
from models.config import Config, Mesh, Model, Train
from models.loading import load
from models.needs import fit_to_host_pool, residuals_at_once
from models.reading import ConfigError
from models.report import backend_lines, report, summary
from models.sharding import abstract_mesh
from models.step import program, traceable
from models.text import readable
from models.train import main
from models.transformer import Transformer, flops_per_token, matmul_params, next_token_loss

CONFIGS = ROOT / "configs"
TINY = Model(vocab_size=300, layers=2, d_model=32, heads=4, kv_heads=2, d_ff=48, dtype="float32", tied_embeddings=False)


def model_and_tokens(config: Model, seq_len: int = 12) -> tuple[Transformer, jax.Array]:
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (3, seq_len + 1), np.int32))
    with fast_compiles():  # XLA compiles the draws of each shape
        return Transformer(config, nnx.Rngs(params=jax.random.key(0))), tokens


# ---- a plain reference: numpy in float64, one loop per head, nothing of models/ except its parameters ----


def norm_reference(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rope_reference(x_SxH, theta):
    """Rotate each pair (i, i + H/2), as a complex number, by position / theta^(2i/H)."""
    S, H = x_SxH.shape
    pairs = x_SxH[:, : H // 2] + 1j * x_SxH[:, H // 2 :]
    rotated = pairs * np.exp(1j * np.outer(np.arange(S), theta ** (-2.0 * np.arange(H // 2) / H)))
    return np.concatenate([rotated.real, rotated.imag], axis=1)


def attention_reference(x_SxD, p, config):
    x_SxD = norm_reference(x_SxD, p["norm"]["scale_D"], config.norm_eps)
    S, out = len(x_SxD), 0.0
    for head in range(config.heads):
        shared = head // (config.heads // config.kv_heads)
        q = rope_reference(x_SxD @ p["q_DxNxH"][:, head], config.rope_theta)
        k = rope_reference(x_SxD @ p["k_DxKxH"][:, shared], config.rope_theta)
        scores = np.where(np.tri(S, dtype=bool), q @ k.T / math.sqrt(config.d_head), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out += weights @ (x_SxD @ p["v_DxKxH"][:, shared]) @ p["out_NxHxD"][head]
    return out


def mlp_reference(x_SxD, p, config):
    x_SxD = norm_reference(x_SxD, p["norm"]["scale_D"], config.norm_eps)
    gate, up = x_SxD @ p["gate_DxF"], x_SxD @ p["up_DxF"]
    return gate / (1 + np.exp(-gate)) * up @ p["down_FxD"]


def loss_reference(params, tokens, config):
    """The mean over all tokens of -log softmax, sequence by sequence, all logits at once."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    table = params["embedding_VxD" if config.tied_embeddings else "unembedding_VxD"]
    losses = []
    for row in np.asarray(tokens):
        x = params["embedding_VxD"][row[:-1]]
        for i in range(config.layers):
            layer = jax.tree.map(lambda a, i=i: a[i], params["layers"])
            x = x + attention_reference(x, layer["attention"], config)
            x = x + mlp_reference(x, layer["mlp"], config)
        logits = norm_reference(x, params["norm"]["scale_D"], config.norm_eps) @ table.T
        log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        losses += list(log_z - logits[np.arange(len(logits)), row[1:]])
    return np.mean(losses)


@pytest.mark.parametrize("tied, kv_heads", [(False, 2), (True, 1), (False, 4)])
def test_the_loss_is_the_plain_reference(tied, kv_heads):
    config = dataclasses.replace(TINY, tied_embeddings=tied, kv_heads=kv_heads)
    model, tokens = model_and_tokens(config)
    graph, params = nnx.split(model)
    # Weights far from their initial values, so that every term of the model matters.
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda x: x + 0.2 * draw(x.shape, np.float32), params)
    got = jax.jit(lambda params: next_token_loss(nnx.merge(graph, params), tokens, Policy(), chunk=4))(params)
    want = loss_reference(nnx.to_pure_dict(params), tokens, config)
    assert_close(got, want)


def test_chunks_of_the_loss_change_neither_value_nor_gradient():
    model, tokens = model_and_tokens(TINY)
    graph, params = nnx.split(model)

    def loss(chunk):
        return jax.jit(jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graph, p), tokens, Policy(), chunk)))(
            params
        )

    with fast_compiles():
        whole, chunked = loss(12), loss(3)
    assert_close(chunked, whole)


def test_logits_exist_for_one_chunk_only():
    made = program(tiny_config(loss_chunk=4), abstract_mesh(Mesh()))
    jaxpr = jax.make_jaxpr(jax.grad(made.loss))(made.state.params, made.microbatch)
    shapes = {v.aval.shape for eqn in equations(jaxpr) for v in eqn.outvars if TINY.vocab_size in v.aval.shape}
    assert (1, 4, 4, TINY.vocab_size) in shapes  # shards of the batch, batch, chunk, vocabulary
    sizes = [math.prod(shape) for shape in shapes if TINY.d_model not in shape]
    assert max(sizes) == 4 * 4 * TINY.vocab_size


def tiny_config(model: Model = TINY, residuals=None, **train) -> Config:
    policy = Policy(residuals=residuals or {}, min_offload_bytes=0)
    train = {"seq_len": 12, "batch_size": 4, "loss_chunk": 12, "steps": 10, "warmup_steps": 2} | train
    return Config(model=model, remat=policy, train=Train(**train))


def test_rope_is_the_complex_reference():
    x = normal(0, (2, 7, 3, 10))
    got = rope(x, rotations(7, 10, theta=100.0))
    want = [[rope_reference(np.asarray(x[b, :, n], np.float64), 100.0) for n in range(3)] for b in range(2)]
    assert_close(got, np.swapaxes(want, 1, 2))


def test_the_compute_is_bfloat16_and_the_parameters_float32():
    config = dataclasses.replace(TINY, dtype="bfloat16")
    model, tokens = model_and_tokens(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    assert nnx.eval_shape(lambda: model(tokens, Policy())[0]).dtype == jnp.bfloat16
    full, _ = model_and_tokens(TINY)
    with fast_compiles():
        got, want = (next_token_loss(each, tokens, Policy(), 12) for each in (model, full))
    np.testing.assert_allclose(got, want, rtol=2e-3)


def test_layers_start_different_and_the_loss_near_ln_vocab():
    model, tokens = model_and_tokens(TINY)
    q = model.layers.attention.q_DxNxH[...]
    assert q.shape == (2, 32, 4, 8)
    assert not np.array_equal(q[0], q[1])
    assert abs(float(next_token_loss(model, tokens, Policy(), 12)) - math.log(300)) < 0.1


# ---- counts, from the published figures ----


@functools.cache
def abstract(name: str, *overrides: str):
    config = traceable(load(CONFIGS / f"{name}.yaml", overrides))
    return config, program(config, abstract_mesh(config.mesh))


def test_attention_without_cudnn_is_attention():
    """`flash.attention`, compiled and not, against JAX's own; fewer heads of k and v than of q."""
    q, k, v = (normal(i, (2, 16, heads, 8)) for i, heads in enumerate((4, 2, 2)))

    def values(attend):
        return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(attend(*args))), (0, 1, 2))

    want = values(functools.partial(jax.nn.dot_product_attention, is_causal=True))(q, k, v)
    for got in (values(flash.attention)(q, k, v), jax.jit(values(flash.attention))(q, k, v)):
        assert_close(got, want)


@pytest.mark.claim("configs")
def test_llama3_8b_has_its_published_parameters():
    config, made = abstract("llama3-8b")
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made.state.params))
    assert count == 8_030_261_248
    matrices = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    assert matmul_params(config.model) == matrices == count - 128256 * 4096 - (2 * 32 + 1) * 4096
    assert flops_per_token(config.model, 8192) == 6 * matrices + 32 * 6 * 8192 * 4096


def test_gpt_124m_has_124m_parameters():
    _, made = abstract("gpt-124m")
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made.state.params))
    assert count == 50304 * 768 + 12 * (4 * 768 * 768 + 3 * 768 * 2048 + 2 * 768) + 768 == 123_587_328


# ---- residuals, in bytes written by hand ----


def test_the_model_has_the_names_of_the_design():
    made = program(tiny_config(), abstract_mesh(Mesh()))
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    assert {name for row in table for name in row.names} == {
        "layer_input",
        *("attn/norm", "attn/q", "attn/k", "attn/v", "attn/context", "attn/out"),
        "mlp_input",
        *("mlp/norm", "mlp/fc1.gate", "mlp/fc1.up", "mlp/act", "mlp/fc2"),
    }


MIB = 2**20


def layer_bytes(stream: int, kv: int, wide: int) -> dict[str, int]:
    """Bytes of one layer's values: as wide as the residual stream, as the shared heads, as the MLP."""
    of_stream = "layer_input attn/norm attn/q attn/context attn/out mlp_input mlp/norm mlp/fc2"
    return {
        **dict.fromkeys(of_stream.split(), stream),
        **dict.fromkeys(["attn/k", "attn/v"], kv),
        **dict.fromkeys(["mlp/fc1.gate", "mlp/fc1.up", "mlp/act"], wide),
        "(matmul)": stream + kv,  # q and k before RoPE
    }


def context_bytes(context: int, statistics: int) -> dict[str, int]:
    """Bytes of what flash attention keeps: its result, and a float32 for each token and head."""
    return {"attn/context.0": context, "attn/context.1": 4 * statistics}


# 8 sequences of 8192 tokens, 2 bytes: 4096 wide, 8 heads of 128, 14336 wide.
LLAMA = layer_bytes(512 * MIB, 128 * MIB, 1792 * MIB) | context_bytes(512 * MIB, 8 * 8192 * 32)
# 4 sequences of 8192 tokens, 2 bytes: 2048 wide, 8 heads of 64, 8192 wide.
SMALL_LLAMA = layer_bytes(128 * MIB, 32 * MIB, 512 * MIB) | context_bytes(128 * MIB, 4 * 8192 * 32)
# A microbatch of 32 sequences of 1024 tokens, 2 bytes: 768 wide, 12 heads of 64, 2048 wide.
GPT = layer_bytes(48 * MIB, 48 * MIB, 128 * MIB) | context_bytes(48 * MIB, 32 * 1024 * 12)
# 8 sequences of 256 tokens, 4 bytes: 192 wide, 2 heads of 32, 512 wide.
TINY_BYTES = layer_bytes(1_572_864, 524_288, 4_194_304)


def expert_bytes(
    stream: int, devices: int, tokens: int, k: int, rows: int, experts: int, d: int, f: int
) -> dict[str, int]:
    """Bytes of one layer with experts. Each device has `tokens` with k rows each, and room for `rows` that arrive at
    its experts; bfloat16, `d` and `f` wide."""
    routing = {
        "ids_Txk": k * tokens,
        "order_R": k * tokens,
        "place_Tk": k * tokens,
        "sizes_E": experts,
        "slot_R": k * tokens,
    }
    routing |= {"sent_PC": rows, "sorted_S": rows, "arrived_PC": rows, "sizes_L": experts // 8}
    return {
        "moe/norm": stream,
        "moe/router_logits": devices * 4 * tokens * experts,
        **{f"moe/routing.{name}": devices * 4 * count for name, count in routing.items()},
        "moe/fc1_input.weight": devices * 4 * rows,
        **dict.fromkeys(["moe/fc1_input", "moe/fc2"], devices * 2 * rows * d),
        **dict.fromkeys(["moe/fc1.gate", "moe/fc1.up", "moe/act"], devices * 2 * rows * f),
    }


ROUTED = [
    f"moe/routing.{name}"
    for name in ["ids_Txk", "order_R", "place_Tk", "sizes_E", "sent_PC", "slot_R", "sorted_S", "arrived_PC", "sizes_L"]
] + ["moe/fc1_input.weight"]
# 64 devices with a sequence of 4096 tokens each, 2 experts per token; room for 1.5 times 8192 rows.
MIXTRAL = layer_bytes(2048 * MIB, 512 * MIB, 0) | expert_bytes(2048 * MIB, 64, 4096, 2, 12288, 8, 4096, 14336)
MIXTRAL |= context_bytes(2048 * MIB, 64 * 4096 * 32)
# 32 devices, a sequence of 4096 tokens each, 8 experts per token; queries are twice as wide as the residual stream.
QWEN = layer_bytes(512 * MIB, 128 * MIB, 0) | expert_bytes(512 * MIB, 32, 4096, 8, 49152, 128, 2048, 768)
QWEN |= {"attn/q": 1024 * MIB} | context_bytes(1024 * MIB, 32 * 4096 * 32)
MOVED_OF_MIXTRAL = "layer_input attn/q attn/k attn/v attn/context.0 attn/context.1 mlp_input moe/fc1_input moe/fc1.gate"
# A microbatch on the 4 devices of a stage, a sequence each; on all 8 the loss alone computes its experts twice.
MOVED_ON_STAGES = (
    "layer_input attn/norm attn/q attn/k attn/v attn/context.0 attn/context.1 moe/fc1_input moe/fc1.gate moe/fc1.up"
)
QWEN_STAGES = layer_bytes(64 * MIB, 16 * MIB, 0) | expert_bytes(64 * MIB, 8, 4096, 8, 49152, 128, 2048, 768)
QWEN_STAGES |= {"attn/q": 128 * MIB, "moe/routing.sizes_L": 8 * 4 * 32} | context_bytes(128 * MIB, 4 * 4096 * 32)
# 16 devices with a sequence of 4096 tokens each, 6 experts per token.
DEEPSEEK = layer_bytes(256 * MIB, 256 * MIB, 2 * 16 * 4096 * 10944)
DEEPSEEK |= expert_bytes(256 * MIB, 16, 4096, 6, 36864, 64, 2048, 1408)
DEEPSEEK |= context_bytes(256 * MIB, 16 * 4096 * 16)
DEEPSEEK |= dict.fromkeys(["shared/fc1.gate", "shared/fc1.up", "shared/act"], 2 * 16 * 4096 * 2816) | {
    "shared/fc2": 256 * MIB
}
# 8 sequences of 256 tokens, 4 bytes: 192 wide, 2 of 4 experts of 160 per token, and a shared one.
TINY_MOE = TINY_BYTES | {
    "moe/norm": 1_572_864,
    "moe/router_logits": 4 * 2048 * 4,
    **{f"moe/routing.{name}": 4 * 4096 for name in ("ids_Txk", "order_R", "place_Tk")},
    "moe/routing.sizes_E": 16,
    **dict.fromkeys(["moe/fc1_input", "moe/fc2"], 2 * 1_572_864),
    **dict.fromkeys(["moe/fc1.gate", "moe/fc1.up", "moe/act"], 4 * 4096 * 160),
    **dict.fromkeys(["shared/fc1.gate", "shared/fc1.up", "shared/act"], 4 * 2048 * 160),
    "shared/fc2": 1_572_864,
}

# config: bytes per layer, bytes on the host, {state: {rows: residuals}}. The last of 32 layers is resident; its row on
# the host stays empty.
BY_HAND = {
    "llama3-8b": (
        LLAMA,
        32 * (4 * 512 + 8 + 2 * 128 + 2 * 1792) * MIB,
        {
            "offloaded": {
                32: "layer_input attn/q attn/k attn/v attn/context.0 attn/context.1 mlp_input mlp/fc1.gate mlp/fc1.up"
            },
            "saved": {
                1: "layer_input attn/q attn/k attn/v attn/context.0 attn/context.1 mlp_input mlp/fc1.gate mlp/fc1.up"
            },
            "recomputed": {32: "attn/norm mlp/norm mlp/act"},
            "not needed": {0: "attn/out mlp/fc2"},
        },
    ),
    "mission": (
        LLAMA,
        32 * 3 * 1792 * MIB,
        {
            "offloaded": {32: "mlp/fc1.gate mlp/fc1.up mlp/act"},
            "saved": {32: "layer_input", 1: "mlp/fc1.gate mlp/fc1.up mlp/act"},
            "recomputed": {
                32: "attn/norm attn/q attn/k attn/v attn/context.0 attn/context.1 attn/out mlp_input mlp/norm"
            },
            "not needed": {0: "mlp/fc2"},
        },
    ),
    "mlp-offload": (
        LLAMA,
        32 * (512 + 3 * 1792) * MIB,
        {
            "offloaded": {32: "mlp/norm mlp/fc1.gate mlp/fc1.up mlp/act"},
            "saved": {32: "layer_input", 1: "mlp/norm mlp/fc1.gate mlp/fc1.up mlp/act"},
            "recomputed": {32: "attn/norm attn/q attn/k attn/v attn/context.0 attn/context.1 attn/out mlp_input"},
            "not needed": {0: "mlp/fc2"},
        },
    ),
    "dots-offload": (
        LLAMA,
        32 * (512 + 128 + 128 + 512 + 2 * 1792) * MIB,
        {
            "offloaded": {32: "(matmul) attn/v attn/out mlp/fc1.gate mlp/fc1.up"},
            "saved": {32: "layer_input", 1: "(matmul) attn/v attn/out mlp/fc1.gate mlp/fc1.up"},
            "recomputed": {32: "attn/norm attn/q attn/k attn/context.0 attn/context.1 mlp_input mlp/norm mlp/act"},
            "not needed": {0: "mlp/fc2"},
        },
    ),
    "llama-1b": (
        SMALL_LLAMA,
        16 * (3 * 128 + 4) * MIB,
        {
            "offloaded": {16: "layer_input attn/context.0 attn/context.1 mlp_input"},
            "saved": {1: "layer_input attn/context.0 attn/context.1 mlp_input"},
            "recomputed": {16: "attn/norm attn/q attn/k attn/v mlp/norm mlp/fc1.gate mlp/fc1.up mlp/act"},
            "not needed": {0: "attn/out mlp/fc2"},
        },
    ),
    "mixtral-8x7b": (
        MIXTRAL,
        32 * (4 * 2048 + 32 + 2 * 512 + 64 * (96 + 336)) * MIB,
        {
            "offloaded": {
                32: MOVED_OF_MIXTRAL,
            },
            "saved": {
                1: MOVED_OF_MIXTRAL,
                32: " ".join(["moe/router_logits", *ROUTED]),
            },
            "recomputed": {32: "attn/norm moe/norm moe/fc1.up moe/act"},
            "not needed": {0: "attn/out moe/fc2"},
        },
    ),
    "qwen3-30b-a3b": (
        QWEN,
        48 * 32 * 2 * 72 * MIB,
        {
            "offloaded": {48: "moe/fc1.gate moe/fc1.up"},
            "saved": {
                48: " ".join(
                    [
                        "layer_input attn/q attn/k attn/v attn/context.0 attn/context.1 attn/out moe/fc1_input moe/act",
                        *ROUTED,
                    ]
                ),
                1: "moe/fc1.gate moe/fc1.up",
            },
            "recomputed": {48: "attn/norm mlp_input moe/norm moe/router_logits"},
            "not needed": {0: "moe/fc2"},
        },
    ),
    "qwen3-30b-a3b-pp2": (
        QWEN_STAGES,
        48 * (2 * 64 + 2 * 128 + 2 + 2 * 16 + 8 * (192 + 72 + 72)) * MIB,
        {
            "offloaded": {48: MOVED_ON_STAGES},
            "saved": {1: MOVED_ON_STAGES, 48: " ".join(ROUTED)},
            "recomputed": {48: "attn/out mlp_input moe/norm moe/router_logits moe/act"},
            "not needed": {0: "moe/fc2"},
        },
    ),
    "deepseek-moe-16b": (
        DEEPSEEK,
        27 * (256 + 256 + 4) * MIB,
        {
            "offloaded": {27: "layer_input attn/context.0 attn/context.1"},
            "saved": {2: "layer_input attn/context.0 attn/context.1", 27: " ".join(["moe/fc1_input", *ROUTED])},
            "recomputed": {
                28: "attn/norm attn/q attn/k attn/v attn/out mlp_input",
                27: "moe/norm moe/router_logits moe/fc1.gate moe/fc1.up moe/act "
                "shared/fc1.gate shared/fc1.up shared/act",
                1: "mlp/norm mlp/fc1.gate mlp/fc1.up mlp/act",
            },
            "not needed": {0: "moe/fc2 shared/fc2 mlp/fc2"},
        },
    ),
    "tiny-moe": (
        TINY_MOE,
        3 * 2 * 4 * 4096 * 160,
        {
            "offloaded": {3: "moe/fc1.gate moe/fc1.up"},
            "saved": {
                4: "layer_input attn/norm attn/q attn/k attn/v attn/context attn/out",
                3: "moe/fc1_input shared/fc1.gate shared/fc1.up shared/act moe/routing.ids_Txk moe/routing.order_R "
                "moe/routing.place_Tk moe/routing.sizes_E",
                1: "moe/fc1.gate moe/fc1.up",
            },
            "recomputed": {
                4: "mlp_input",
                3: "moe/norm moe/router_logits moe/act",
                1: "mlp/norm mlp/fc1.gate mlp/fc1.up mlp/act",
            },
            "not needed": {0: "moe/fc2 shared/fc2 mlp/fc2"},
        },
    ),
    "gpt-124m": (
        GPT,
        0,
        {
            "saved": {
                12: "layer_input attn/q attn/k attn/v attn/context.0 attn/context.1 mlp_input mlp/fc1.gate mlp/fc1.up"
            },
            "recomputed": {12: "attn/norm mlp/norm mlp/act"},
            "not needed": {0: "attn/out mlp/fc2"},
        },
    ),
    "tiny": (
        TINY_BYTES,
        4 * 2 * 4 * MIB,
        {
            "offloaded": {4: "mlp/fc1.gate mlp/fc1.up"},
            "saved": {
                4: "layer_input attn/norm attn/q attn/k attn/v attn/context attn/out",
                1: "mlp/fc1.gate mlp/fc1.up",
            },
            "recomputed": {4: "mlp_input mlp/norm mlp/act"},
            "not needed": {0: "mlp/fc2"},
        },
    ),
}


@pytest.mark.claim("configs")
def test_every_config_is_weighed():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == BY_HAND.keys()


@pytest.mark.claim("report-at-full-size")
@pytest.mark.parametrize("name", BY_HAND)
def test_the_residuals_of_each_config_weigh_what_the_hand_says(name):
    _, made = abstract(name)
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    got = Counter()
    for row in table:
        if row.names:
            got[row.state, ", ".join(row.names)] += row.bytes
    a_layer, host, states = BY_HAND[name]
    want = {
        (state, residual): rows * a_layer[residual]
        for state, groups in states.items()
        for rows, residuals in groups.items()
        for residual in residuals.split()
    }
    assert dict(got) == want
    assert table.host_bytes == host


@pytest.mark.claim("report-at-full-size")
def test_the_report_needs_no_gpu_for_kernels_of_gpus():
    assert "moe/fc1.gate" in report(load(CONFIGS / "qwen3-30b-a3b.yaml", ["model.grouped=mosaic"]))


def test_a_backend_that_cannot_run_here_is_a_line_about_the_config():
    config = load(CONFIGS / "tiny-moe.yaml", ["model.grouped=te"])
    with pytest.raises(ConfigError, match=r"model\.grouped: grouped_matmul: backend 'te' needs TransformerEngine"):
        summary(config, program(config, abstract_mesh(config.mesh)))


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["model.grouped=auto"], "grouped GEMMs: ragged (auto)"),
        (["model.grouped=auto", "model.quantize=fp8"], "grouped GEMMs: ragged (auto)"),
        ([], "grouped GEMMs: ragged"),
        (["model.grouped=te"], "(model.grouped = 'te' was traced as ragged: no CUDA here.)"),
    ],
)
def test_the_report_names_the_backend(overrides, line):
    assert line in report(load(CONFIGS / "tiny-moe.yaml", overrides)).splitlines()


def test_the_report_of_a_dense_model_has_no_grouped_gemms():
    assert "grouped" not in report(load(CONFIGS / "tiny.yaml"))


@pytest.mark.claim("one-gpu-of-a-process")
@pytest.mark.parametrize(
    "gpus_of_a_process, overrides, sizes_stay, line",
    [
        (8, [], False, "mosaic (auto)"),
        (8, [], True, "te (auto)"),  # of several devices too: a layer runs in shard_map
        (8, ["model.quantize=fp8"], True, "ragged (auto; te with a process for each GPU)"),
        (8, ["model.quantize=fp8", "mesh.fsdp=4"], True, "te (auto)"),  # a mesh of another machine
        (1, ["model.quantize=fp8"], False, "te (auto)"),
        (8, ["model.d_expert=80"], False, "ragged (auto; te with a process for each GPU)"),
        (1, ["model.d_expert=80"], False, "te (auto)"),
        (1, ["model.d_expert=72", "model.quantize=fp8"], False, "ragged (auto)"),
        (8, ["model.grouped=te"], False, "te"),
    ],
)
def test_the_backend_on_a_hopper_gpu(monkeypatch, gpus_of_a_process, overrides, sizes_stay, line):
    monkeypatch.setattr(jax, "local_device_count", lambda: gpus_of_a_process)
    monkeypatch.setattr(_backend, "_gpu_generation", lambda: 9)
    monkeypatch.setattr(te, "importable", lambda: True)
    monkeypatch.setattr(te, "sizes_stay", lambda dtype: sizes_stay)
    monkeypatch.setattr(te, "_cublas", lambda: te.V2_CUBLAS)
    config = load(CONFIGS / "mixtral-8x7b.yaml", ["mesh.fsdp=1", "mesh.expert=8", "mesh.tensor=1", *overrides])
    assert backend_lines(config) == [f"grouped GEMMs: {line}"]


@pytest.mark.claim("configs")
@pytest.mark.parametrize(
    "name, count, billions_a_token",
    [
        ("llama-1b", 1_235_814_400, 1.2),
        ("mixtral-8x7b", 46_702_792_704, 12.9),
        ("qwen3-30b-a3b", 30_532_122_624, 3.3),
        ("deepseek-moe-16b", 16_375_728_128, 2.8),
    ],
)
def test_parameters_are_as_many_as_published(name, count, billions_a_token):
    """In all, and those that one token uses; the embedding counts as the publications count it."""
    config, made = abstract(name)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made.state.params)) == count
    lookup = 0 if config.model.tied_embeddings else config.model.vocab_size * config.model.d_model
    assert (matmul_params(config.model) + lookup) / 1e9 == pytest.approx(billions_a_token, abs=0.06)


@pytest.mark.claim("report-at-full-size")
def test_the_report_of_8b_tells_bytes_and_allocates_nothing():
    before = len(jax.live_arrays())
    text = report(load(CONFIGS / "llama3-8b.yaml"))
    assert len(jax.live_arrays()) == before
    assert "8,030,261,248 parameters" in text
    lines = {line[:24].strip(): line[24:].split() for line in text.splitlines()}
    # 8,030,261,248 parameters of 4 bytes; an eighth on each device, except the norms' 266,240, which are on each.
    assert lines["parameters"][:4] == ["29.92", "GiB", "3.74", "GiB"]
    assert lines["optimizer"][:4] == ["59.83", "GiB", "7.48", "GiB"]  # two moments
    # One sum, and a microbatch's gradients of the embedding and the unembedding: 2 * 128256 * 4096 * 4 bytes.
    assert lines["gradients"][:4] == ["33.83", "GiB", "4.23", "GiB"]
    # 32 * (5888 + 8) MiB, twice.
    assert lines["residuals on the host"][:4] == ["368.50", "GiB", "46.06", "GiB"]
    assert "8 microbatches interleaved; the table is of one" in text.splitlines()
    assert "the first forward pass runs alone: it copies at most 23.03 GiB per device to the host" in text.splitlines()
    assert "mlp/fc2" in text and "attn/context.1" in text and "was traced as" not in text


FOUR = ["train.grad_accumulation=4"]


@pytest.mark.parametrize(
    "overrides, way, gradients, stacks",
    [
        ([], None, 7.51, 1),  # MiB
        (FOUR, "interleaved", 7.51 + 1.5, 2),  # the sum, and a microbatch's of the embedding: 2048 * 192 * 4 bytes
        ([*FOUR, "train.interleave=false"], "one after another (train.interleave = False)", 2 * 7.51, 1),
        ([*FOUR, "remat.residuals[fc1]=save"], "one after another (nothing is offloaded)", 2 * 7.51, 1),
    ],
)
def test_the_report_says_how_microbatches_run_and_what_exists_at_once(overrides, way, gradients, stacks):
    lines = report(load(CONFIGS / "tiny.yaml", overrides)).splitlines()
    said = [line for line in lines if "microbatches" in line and "per device" not in line]
    assert said == ([f"4 microbatches {way}; the table is of one"] if way else [])
    (total,) = (line.split() for line in lines if line.startswith("device "))  # device A MiB (untagged B MiB) ...
    device, untagged, host = float(total[1]), float(total[4]), float(total[8])
    mib = {line[:24].strip(): float(line[24:].split()[0]) for line in lines if line.endswith(END[stacks])}
    assert mib["residuals on the host"] == stacks * host
    assert mib["residuals on the device"] == pytest.approx(untagged + stacks * (device - untagged), abs=0.02)
    (found,) = (float(line.split()[1]) for line in lines if line.startswith("gradients"))
    assert found == pytest.approx(gradients, abs=0.02)


END = {1: "per device", 2: "per device, of two microbatches"}


@pytest.mark.parametrize("overrides, times", [([], 1), (FOUR, 1), ([*FOUR, "mesh.stage=2"], 1 + 2)])
def test_the_report_traces_the_model_once(monkeypatch, overrides, times):
    """On stages `accumulate` traces it too, for each of two predictions."""
    traces = []
    training_loss = lambda *args: traces.append(args) or transformer.training_loss(*args)
    monkeypatch.setattr(step, "training_loss", training_loss)
    monkeypatch.setattr(proof, "known_machine", lambda: H200)
    assert "copies on" in report(load(CONFIGS / "tiny.yaml", overrides))
    assert len(traces) == times


def test_interleave_true_where_nothing_moves_is_a_line_about_the_config(capsys):
    asked = [str(CONFIGS / "tiny.yaml"), *FOUR, "train.interleave=true"]
    assert main([*asked, "remat.residuals[fc1]=save", "--report"]) == 2
    _, line = capsys.readouterr().err.splitlines()
    assert line == "train.interleave = True: must be auto or false where remat offloads nothing"
    assert main([*asked, "--report"]) == 0


BUS = Bus(d2h=50.0, h2d=50.0, together=40.0)
H200 = Machine("H200", 1, "0.12", BUS, BUS, gemm_tflops=700.0, attention_tflops=(500.0, 400.0), hbm_gb_s=4000.0)


def test_the_report_says_whether_copies_fit_where_the_gpus_rates_are_known(monkeypatch):
    plain = load(CONFIGS / "llama3-8b.yaml", ["train.interleave=false"])
    assert "copies on" not in report(plain)
    monkeypatch.setattr(proof, "known_machine", lambda: H200)
    text = report(plain)
    assert "copies on 8 H200, predicted" in text and "does not fit" in text


@pytest.mark.claim("report-at-full-size")
def test_the_report_counts_what_a_layer_and_a_chunk_of_logits_need():
    """XLA plans 22.8 GiB for the step on an H200; only the compiler knows all of it."""
    text = report(load(CONFIGS / "llama-1b.yaml")).splitlines()
    lines = {line[:24].strip(": "): line[24:].split() for line in text}
    layer, logits = (float(lines[name][0]) for name in ("working set of a layer", "or of a chunk of logits"))
    # GiB: gate, up, the activation's cotangent and theirs; three residuals for this layer and the next. Never scores.
    assert 4 * 0.5 + 2 * 3 * 0.125 < layer < 5 * 0.5 + 2
    # Logits and their cotangent, bfloat16 and float32, of 4 x 1024 positions and 128256 words.
    assert 1 + 2 < logits < 1 + 2 + 1 + 2
    (said,) = (line for line in text if line.startswith("expected on"))
    assert abs(float(said.split()[4]) / 22.8 - 1) < 0.1


def test_a_kernels_results_are_divided_as_their_name_says():
    """Heads over `tensor`; the statistics, which have no constraint, like the batch."""
    config = traceable(load(CONFIGS / "llama3-8b.yaml", ["mesh.fsdp=4", "mesh.tensor=2"]))
    made = program(config, abstract_mesh(config.mesh))
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    parts = {row.names: row.bytes / row.bytes_per_device for row in table if row.state == "offloaded" and row.layers}
    assert parts["attn/context.0",] == parts["attn/q",] == 8 and parts["attn/context.1",] == 4


def test_a_tensor_axis_splits_heads_and_d_ff_but_not_the_residual_stream():
    lines = report(load(CONFIGS / "llama3-8b.yaml", ["mesh.fsdp=4", "mesh.tensor=2"])).splitlines()
    (host,) = (line for line in lines if line.startswith("residuals on the host"))
    # layer_input, mlp_input and the statistics of attention, which have no constraint, over fsdp; the others over both:
    # 32 * ((2 * 512 + 8) / 4 + 4864 / 8) MiB, twice.
    assert host.split()[6:8] == ["54.12", "GiB"]


POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
EVERYTHING = ["remat.default=offload", "remat.dots=offload", "remat.min_offload_bytes=0"]


@pytest.mark.claim("host-pool")
@pytest.mark.parametrize(
    "name, overrides",
    [
        # the stream is whole on both devices of the tensor axis
        pytest.param("llama3-8b", ["mesh.fsdp=4", "mesh.tensor=2"], marks=pytest.mark.slow),
        ("llama3-8b", ["train.interleave=false"]),
        pytest.param("llama3-8b", ["mesh.fsdp=2", "mesh.tensor=4", *EVERYTHING], marks=pytest.mark.slow),
        pytest.param(
            "tiny-moe", ["mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2", *EVERYTHING], marks=pytest.mark.slow
        ),
    ],
)
def test_the_host_pool_is_judged_by_the_bytes_that_the_report_gives_a_device(monkeypatch, name, overrides):
    config = traceable(load(CONFIGS / f"{name}.yaml", overrides))
    mesh = abstract_mesh(config.mesh)
    made = program(config, mesh)
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    rows = residuals_at_once(config, table)
    need = sum(row.bytes_per_device for row in rows if row.state == "offloaded")
    monkeypatch.setenv(POOL, str(need / 2**30))
    jaxoffload.check(made.step, made.state, made.tokens, policy=config.remat)
    summary(config, made)
    monkeypatch.setenv(POOL, str((need - 8) / 2**30))
    with pytest.raises(MemoryError, match=r"check: all together|accumulate: two microbatches"):
        jaxoffload.check(made.step, made.state, made.tokens, policy=config.remat)
    with pytest.raises(ConfigError, match=r"remat: residuals: all together .* \(offload_layers: "):
        summary(config, made)


# Two dense layers, then three with experts; gate and up of both are offloaded.
TWO_STACKS = ["model.layers=5", "model.dense_layers=2", "remat.residuals[fc1]=offload"]


@pytest.mark.claim("host-pool")
def test_two_stacks_that_fit_one_by_one_are_refused_before_anything_is_compiled(monkeypatch, capsys):
    config = load(CONFIGS / "tiny-moe.yaml", ["remat.resident_layers=0", *TWO_STACKS])
    made = program(config, abstract_mesh(config.mesh))
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    dense = sum(row.bytes for row in table if row.state == "offloaded" and row.names[0].startswith("mlp"))
    experts = table.host_bytes - dense
    monkeypatch.setenv(POOL, str((table.host_bytes - 8) / 2**30))
    assert max(dense, experts) < table.host_bytes - 8
    jax.make_jaxpr(jax.grad(made.loss))(made.state.params, made.microbatch)
    command = [str(CONFIGS / "tiny-moe.yaml"), "remat.resident_layers=0", *TWO_STACKS, "--report"]
    assert main(command) == 2
    _, problem = capsys.readouterr().err.splitlines()
    assert "all together would offload" in problem and "offload_layers: 2" in problem


def test_on_host_full_save_offloads_fewer_layers_of_each_stack(monkeypatch):
    overrides = ["remat.resident_layers=0", "remat.on_host_full=save", *TWO_STACKS]
    config = load(CONFIGS / "tiny-moe.yaml", overrides)
    mesh = abstract_mesh(config.mesh)
    assert fit_to_host_pool(config, mesh) == config
    made = program(config, mesh)
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    monkeypatch.setenv(POOL, str((table.host_bytes - 8) / 2**30))
    with pytest.warns(UserWarning, match="all together .* offload_layers = 2 instead of all") as seen:
        fewer = fit_to_host_pool(config, mesh)
    assert len(seen) == 1 and fewer.remat.offload_layers == 2
    made = program(fewer, mesh)
    rows = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    moved = {row.names[0].partition("/")[0]: row.layers for row in rows if row.state == "offloaded" and row.layers}
    assert moved == {"mlp": 2, "moe": 2, "shared": 2}


@pytest.mark.slow
@pytest.mark.claim("host-pool")
def test_the_stacks_of_two_microbatches_must_fit(monkeypatch):
    config = load(CONFIGS / "tiny.yaml", ["remat.resident_layers=0", "remat.on_host_full=save", *FOUR])
    mesh = abstract_mesh(config.mesh)
    made = program(config, mesh)
    stacks = 2 * jaxoffload.residuals(made.loss, made.state.params, made.microbatch).host_bytes
    monkeypatch.setenv(POOL, str(stacks / 2**30))
    assert fit_to_host_pool(config, mesh) == config
    monkeypatch.setenv(POOL, str((stacks - 8) / 2**30))
    with pytest.warns(UserWarning, match="two microbatches would offload .* offload_layers = 3 instead of all"):
        fewer = fit_to_host_pool(config, mesh)
    made = program(fewer, mesh)
    jax.eval_shape(made.step, made.state, made.tokens)  # accumulate itself admits them
    asked = [str(CONFIGS / "tiny.yaml"), "remat.resident_layers=0", *FOUR, "--report"]
    assert main([*asked, "train.interleave=false"]) == 0
    assert main(asked) == 2


def test_a_small_run_is_not_judged_by_the_batch_that_names_are_looked_up_with(monkeypatch):
    monkeypatch.setenv(POOL, str(4 * 4 * 32 * 2 * 512 / 2**30))  # 3 layers and a padding row of gate and up
    small = ["train.batch_size=1", "train.seq_len=32", "train.loss_chunk=32"]
    assert main([str(CONFIGS / "tiny.yaml"), *small, "--report"]) == 0
    assert main([str(CONFIGS / "tiny.yaml"), *small, "train.batch_size=2", "--report"]) == 2


@pytest.mark.claim("report-as-json")
@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.fsdp=4", "model.attention=te", "model.dtype=bfloat16"],
        pytest.param(FOUR, marks=pytest.mark.slow),
        [*FOUR, "mesh.stage=2"],
    ],
)
def test_the_report_as_json_has_the_numbers_of_the_text(overrides, capsys, monkeypatch):
    monkeypatch.setattr(proof, "known_machine", lambda: H200)
    asked = [str(CONFIGS / "tiny.yaml"), *overrides, "--report"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    found, config = json.loads(capsys.readouterr().out), load(CONFIGS / "tiny.yaml", overrides)
    lines = {line[:24].strip(": "): line[24:].split() for line in text.splitlines()}
    for kind, sizes in found["memory"].items():
        shown = " ".join(lines.get(kind.replace("_", " "), ()))
        shown = shown or " ".join(lines.get("or of a chunk of logits", ())) * ("logits" in kind)
        assert not shown or readable(sizes["per_device"]) in shown, kind
        assert "total" not in sizes or shown.startswith(readable(sizes["total"])), kind
    expected = found["memory"]["expected"]
    host = readable(expected["host_per_device"])
    assert f": {readable(expected['per_device'])}, and {host} of host memory" in text
    assert text.startswith(f"{found['parameters']:,} parameters")
    assert found["mesh"] == dataclasses.asdict(config.mesh)
    count = config.train.grad_accumulation
    assert found["microbatches"] == {"count": count, "interleaved": count > 1}
    assert found["traced_as"] == ({"model.attention": "cudnn"} if config.model.attention == "te" else {})
    table = found["residuals"]
    assert f"host {readable(table['host_bytes'])} · recomputed" in text
    one = [row["bytes_per_device"] for row in table["residuals"] if row["state"] == "offloaded"]
    if config.mesh.stage == 1:
        stacks = 2 if found["microbatches"]["interleaved"] else 1
        assert stacks * sum(one) == expected["host_per_device"]
        assert "pipeline" not in found
    else:
        assert [stage["layers"] for stage in found["pipeline"]["stages"]] == [["0-1"], ["2-3"]]
        assert f"{found['pipeline']['ticks']} ticks; each stage is idle for {found['pipeline']['bubble']:.1%}" in text
    assert found["fits"]["machine"]["device"] == "H200"


def test_json_is_a_form_of_the_report(capsys):
    with pytest.raises(SystemExit) as left:
        main([str(CONFIGS / "tiny.yaml"), "--json"])
    assert left.value.code == 2 and "--json is a form of --report; give both" in capsys.readouterr().err
    assert main([str(CONFIGS / "tiny.yaml"), "--report", "--json", "train.step=3"]) == 2
    said = capsys.readouterr()
    assert not said.out and "train.step = 3" in said.err
