"""The reference model against plain references, and the bytes of its residuals at full size, by hand."""

import dataclasses
import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import equations
from common import ROOT, assert_close, fast_compiles, normal
from flax import nnx

import jaxoffload
from jaxoffload import Policy
from models.attention import rope, rotations
from models.config import Config, Mesh, Model, Train, load
from models.sharding import RULES, abstract_mesh, constrain
from models.step import program, traceable
from models.transformer import Transformer, flops_per_token, training_loss

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
    got = jax.jit(lambda params: training_loss(nnx.merge(graph, params), tokens, Policy(), chunk=4)[0])(params)
    want = loss_reference(nnx.to_pure_dict(params), tokens, config)
    assert_close(got, want)


@pytest.mark.slow
def test_chunks_of_the_loss_change_neither_value_nor_gradient():
    model, tokens = model_and_tokens(TINY)
    graph, params = nnx.split(model)

    def loss(chunk):
        of_params = lambda p: training_loss(nnx.merge(graph, p), tokens, Policy(), chunk)[0]
        return jax.jit(jax.value_and_grad(of_params))(params)

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
    # A scatter into the logits' gradients would be one into an array of its own.
    scattered = [eqn.outvars[0].aval.shape for eqn in equations(jaxpr) if "scatter" in eqn.primitive.name]
    assert scattered == [(TINY.vocab_size, TINY.d_model)]


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
        got, want = (training_loss(each, tokens, Policy(), 12)[0] for each in (model, full))
    np.testing.assert_allclose(got, want, rtol=2e-3)


def test_layers_start_different_and_the_loss_near_ln_vocab():
    model, tokens = model_and_tokens(TINY)
    q = model.layers.attention.q_DxNxH[...]
    assert q.shape == (2, 32, 4, 8)
    assert not np.array_equal(q[0], q[1])
    assert abs(float(training_loss(model, tokens, Policy(), 12)[0]) - math.log(300)) < 0.1


# ---- counts, from the published figures ----


@functools.cache
def abstract(name: str, *overrides: str):
    config = traceable(load(CONFIGS / f"{name}.yaml", overrides))
    return config, program(config, abstract_mesh(config.mesh))


@pytest.mark.claim("configs")
def test_llama3_8b_has_its_published_parameters():
    config, made = abstract("llama3-8b")
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made.state.params))
    assert count == 8_030_261_248
    matrices = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    assert matrices == count - 128256 * 4096 - (2 * 32 + 1) * 4096
    assert flops_per_token(config.model, 8192) == 6 * matrices + 32 * 6 * 8192 * 4096


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


# 8 sequences of 8192 tokens, 2 bytes: 4096 wide, 8 heads of 128, 14336 wide. Flash attention keeps its result, and a
# float32 for each token and head.
LLAMA = layer_bytes(512 * MIB, 128 * MIB, 1792 * MIB)
LLAMA |= {"attn/context.0": 512 * MIB, "attn/context.1": 4 * 8 * 8192 * 32}
# 8 sequences of 256 tokens, 4 bytes: 192 wide, 2 heads of 32, 512 wide.
TINY_BYTES = layer_bytes(1_572_864, 524_288, 4_194_304)


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
}


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


@pytest.mark.claim("configs")
@pytest.mark.parametrize(
    "name, count, billions_a_token",
    [
        ("gpt-124m", 123_587_328, 0.12),
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
    assert (flops_per_token(config.model, 0) / 6 + lookup) / 1e9 == pytest.approx(billions_a_token, abs=0.06)


@pytest.mark.claim("unknown-axes")
def test_names_that_no_rule_knows_are_said_with_those_that_are_allowed():
    with pytest.raises(
        ValueError, match=r"'mlp/atc' is not in models.sharding.VALUES: must be one of .*; the nearest is mlp/act"
    ):
        constrain(jnp.ones((1, 2, 3)), "mlp/atc")
    with pytest.raises(
        ValueError, match=r"'vocabs' is not in models.sharding.Rules: must be one of .*; the nearest is vocab"
    ):
        RULES.spec("batch", None, "vocabs")
