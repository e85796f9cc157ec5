"""A model without this library's API: a plain JAX transformer, its layers under `lax.scan`, with `checkpoint_name`."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxoffload
from jaxoffload import Policy, proof
from jaxoffload.proof._command import main

pytestmark = pytest.mark.usefixtures("compiled_fast")
LAYERS, BATCH, SEQ, DIM, HEADS, VOCAB = 4, 2, 16, 16, 2, 32
SHAPES = {
    "qkv": (DIM, 3, HEADS, DIM // HEADS),
    "out": (HEADS, DIM // HEADS, DIM),
    "up": (DIM, 4 * DIM),
    "down": (4 * DIM, DIM),
}
RULES = {"block_in": "offload", "attn_out": "offload", "mlp_up": "offload"}


def norm(x):
    return x * lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6).astype(x.dtype)


def block(x, w):
    x = checkpoint_name(x, "block_in")
    q, k, v = jnp.unstack(jnp.einsum("bsd,dnhe->bsnhe", norm(x), w["qkv"]), axis=2)
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    seen = jax.nn.softmax(jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)).astype(x.dtype)
    attended = checkpoint_name(jnp.einsum("bhqk,bkhe->bqhe", seen, v), "attn_out")
    x += jnp.einsum("bshe,hed->bsd", attended, w["out"])
    up = checkpoint_name(norm(x) @ w["up"], "mlp_up")
    return x + jax.nn.gelu(up) @ w["down"], None


def loss_with(layers):
    """Return the loss; `layers(x, weights)` runs the stack."""

    def loss(params, tokens):
        x = layers(params["embedding"][tokens[:, :-1]], params["layers"])
        logits = jnp.einsum("bsd,vd->bsv", norm(x), params["embedding"]).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -jnp.mean(picked)

    return loss


def by_jax(x, w):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(RULES),
        offload_src="device",
        offload_dst="pinned_host",
    )
    return lax.scan(jax.checkpoint(block, policy=policy), x, w)[0]


def by_us(x, w):
    return jaxoffload.scan(block, x, w, policy=Policy(RULES, min_offload_bytes=0))[0]


def arguments(batch=BATCH, seq=SEQ, dtype=jnp.float32):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    layers = {name: of(LAYERS, *shape) for name, shape in SHAPES.items()}
    return {"embedding": of(VOCAB, DIM), "layers": layers}, jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32)


def made():
    """Return what `python -m jaxoffload report test_foreign:made` expects."""
    return loss_with(by_us), arguments()


def test_as_it_was_it_is_verified_as_far_as_it_can_be():
    found = proof.verify(loss_with(by_jax), *arguments())
    assert found.ok and found["moves"].verdict == found["repeats"].verdict == "holds", found
    assert found["gradients"].verdict == "not checked" and "no reference" in found["gradients"].detail


def test_with_scan_for_lax_scan_all_holds():
    found = proof.verify(loss_with(by_us), *arguments())
    assert {check.claim for check in found if check.verdict != "holds"} == {"copies", "placement"}, found


def test_its_residuals_are_reported(capsys):
    table = jaxoffload.residuals(loss_with(by_us), *arguments())
    moved = {row.names: row.bytes for row in table if row.state == "offloaded" and row.layers}
    rows, there = BATCH * SEQ * 4, LAYERS - 1  # float32; the last layer is resident
    assert moved == {
        ("block_in",): there * rows * DIM,
        ("attn_out",): there * rows * DIM,
        ("mlp_up",): there * rows * 4 * DIM,
    }
    assert main(["report", "test_foreign:made"]) == 0
    assert set(RULES) < set(capsys.readouterr().out.split())


@pytest.mark.gpu
def test_its_copies_are_profiled():
    found = proof.verify(loss_with(by_us), *arguments(8, 1024, jnp.bfloat16))
    assert found.ok and found["copies"].verdict == "holds", found
    seen = jaxoffload.profile(loss_with(by_us), *arguments(8, 1024, jnp.bfloat16))
    assert {move.residual for move in seen.moves} == set(RULES), seen
