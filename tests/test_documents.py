"""data.document_mask: packed documents have the loss and the gradients that they have alone."""

import dataclasses
import functools
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close
from flax import nnx

import jaxoffload
from jaxoffload import Policy
from models import train
from models.config import Config, Data, Mesh, Model, Train, load
from models.sharding import abstract_mesh, make_mesh
from models.step import program, shardings_of
from models.transformer import Transformer, training_loss

pytestmark = pytest.mark.usefixtures("compiled_fast")
END = 7
TINY = Model(vocab_size=300, layers=2, d_model=32, heads=4, kv_heads=2, d_ff=48, dtype="float32")
EXPERTS = replace(TINY, experts=4, d_expert=24, grouped="ragged")
LENGTHS = ((6, 6, 6), (1, 1, 1, 15), (15, 1, 1, 1), (6, 6, 6))  # each row has 18 inputs: document after document


def packed(lengths=LENGTHS) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """Return each row's documents, each as END, its tokens and END; and the rows, in which neighbours share an END."""
    draw = np.random.default_rng(0)
    document = lambda length: np.array([END, *draw.integers(8, 300, length - 1), END])
    rows = [[document(length) for length in row] for row in lengths]
    return rows, np.array([np.concatenate([*(d[:-1] for d in row), [END]]) for row in rows])


def moved(params: nnx.State) -> nnx.State:
    """Return weights far from their initial values, so that every term of the model matters."""
    draw = np.random.default_rng(0).standard_normal
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + 0.2 * draw(x.shape, np.float32)), params)


@pytest.mark.slow
@pytest.mark.claim("document-mask")
@pytest.mark.parametrize(
    "model", [pytest.param(TINY, id="dense"), pytest.param(EXPERTS, id="experts", marks=pytest.mark.long)]
)
def test_a_packed_document_has_the_loss_and_gradients_that_it_has_alone(model):
    graph, params = nnx.split(Transformer(model, nnx.Rngs(params=jax.random.key(0))))
    params = moved(params)
    rows, tokens = packed()
    policy = Policy({"attn/*": "save"})

    def loss(params, tokens, end):
        size = tokens.shape[1] - 1
        return size * training_loss(nnx.merge(graph, params), tokens, policy, size, end)[0]

    derivative = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    alone = [derivative(params, document[None], None) for row in rows for document in row]
    want = jax.tree.map(lambda *each: sum(each) / len(rows), *alone)
    got = derivative(params, tokens, END)
    assert_close(got, want, roundings=300)  # of sums over documents, whose terms are larger
    assert abs(jax.jit(loss, static_argnums=2)(params, tokens, None) - want[0]) > 0.1  # where attention crosses


@functools.cache
def metrics_of(mesh: Mesh, grad_accumulation: int = 1, end: int = END) -> dict[str, np.ndarray]:
    """Return the metrics of a step on the packed rows."""
    config = Config(
        model=TINY,
        remat=Policy({"fc1": "offload", "attn/*": "save"}, min_offload_bytes=0, resident_layers=0),
        data=Data(document_mask=True),
        mesh=mesh,
        train=Train(
            batch_size=8, seq_len=18, loss_chunk=18, steps=4, warmup_steps=0, grad_accumulation=grad_accumulation
        ),
    )
    config = replace(config, model=replace(config.model, layers=4))
    count = int(np.prod(list(dataclasses.asdict(mesh).values())))
    made = program(config, make_mesh(mesh, jax.devices()[:count]), end)
    state = jax.jit(made.init, out_shardings=shardings_of(made.state))()
    params = jax.device_put(moved(state.params), shardings_of(made.state.params))
    _, tokens = packed(LENGTHS * 2)
    tokens = jax.device_put(jnp.asarray(tokens, jnp.int32), made.tokens.sharding)
    return jax.device_get(jax.jit(made.step)(state._replace(params=params), tokens)[1])


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh, grad_accumulation",
    [
        pytest.param(Mesh(), 2, id="interleaved"),
        pytest.param(Mesh(data=2, fsdp=2, tensor=2), 2, id="interleaved, sharded"),
        pytest.param(Mesh(stage=2, fsdp=2), 2, id="stages"),
    ],
)
def test_the_mask_is_the_same_in_microbatches_on_meshes_and_on_stages(mesh, grad_accumulation):
    want, other = metrics_of(Mesh()), metrics_of(Mesh(), end=299)
    got = metrics_of(mesh, grad_accumulation)
    for key in ("loss", "grad_norm"):
        assert_close(got[key], want[key])
        assert abs(got[key] - other[key]) > 1e-3 * want[key]


def test_the_mask_is_made_anew_in_the_backward_pass_and_not_kept():
    config = Config(model=TINY, data=Data(document_mask=True), train=Train(batch_size=4, seq_len=18, loss_chunk=18))
    made = program(config, abstract_mesh(config.mesh))
    shapes = {row.shape for row in jaxoffload.residuals(made.loss, made.state.params, made.microbatch)}
    assert (4, 18) in shapes  # the number of each token's document
    assert not [shape for shape in shapes if shape.count(18) > 1]


@pytest.mark.claim("document-mask")
def test_training_masks_at_the_ends_of_documents(tmp_path, monkeypatch):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(" ".join(f"{number} {n * n}" for n in range(30)))
    text = f"data: {{path: {tmp_path}/*.txt, document_mask: true, valid_fraction: 0.2}}\nmesh: {{data: 8}}"
    (tmp_path / "test.yaml").write_text(text)
    monkeypatch.setattr(train, "program", lambda config, mesh, end: sys.exit(f"documents end with {end}"))
    with pytest.raises(SystemExit, match="documents end with 256"):  # behind the values of bytes
        train.main([f"{tmp_path}/test.yaml", f"train.out={tmp_path}", "train.seq_len=16", "train.loss_chunk=16"])


def test_what_the_kernels_cannot_mask_is_refused(tmp_path):
    path = tmp_path / "test.yaml"
    odd = ["model.attention=cudnn", "train.seq_len=33", "train.loss_chunk=33"]
    path.write_text("data: {document_mask: true}")
    made = program(load(path, odd), abstract_mesh(Mesh()))
    with pytest.raises(NotImplementedError, match="sequence length"):  # JAX's own words
        jax.eval_shape(jax.grad(made.loss), made.state.params, made.microbatch)
    load(path, ["model.attention=cudnn"])
    load(path, [*odd, "data.document_mask=false"])


@pytest.mark.gpu
def test_cudnn_masks_as_xla_does():
    _, tokens = packed([(40, 1, 17, 6), (64,)])
    model = replace(TINY, d_model=128, heads=4, kv_heads=2, dtype="bfloat16")

    def gradients(attention: str, end: int | None = END):
        graph, params = nnx.split(Transformer(replace(model, attention=attention), nnx.Rngs(params=jax.random.key(0))))
        loss = lambda params: training_loss(nnx.merge(graph, params), jnp.asarray(tokens), Policy(), 64, end)[0]
        return jax.jit(jax.value_and_grad(loss))(moved(params))

    want, got, crossing = gradients("xla"), gradients("cudnn"), gradients("cudnn", None)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-2)
    norm = lambda tree: float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))))
    apart = lambda one: norm(jax.tree.map(jnp.subtract, one[1], want[1])) / norm(want[1])
    assert apart(got) < 0.1 < apart(crossing)
