"""The training program on pipeline stages: it trains as on one device, and moves its layers one array at a time."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close, fast_compiles, normal
from jax.sharding import NamedSharding, PartitionSpec

from models.config import Mesh
from models.loading import load
from models.sharding import exchanges, make_mesh, regroup
from models.step import program, shardings_of

SMALL = (
    *("model.vocab_size=512", "model.d_model=32", "model.heads=4", "model.kv_heads=2", "train.seq_len=32"),
    *("train.loss_chunk=16", "train.batch_size=32", "train.grad_accumulation=4", "train.warmup_steps=0"),
)
DENSE = ("configs/tiny.yaml", *SMALL, "model.layers=8", "model.d_ff=64")
MOE = ("configs/tiny-moe.yaml", *SMALL, "model.layers=5", "model.d_expert=32", "train.grad_accumulation=2")
MESHES = {
    "virtual stages, data, fsdp": (DENSE, "mesh.stage=2 mesh.data=2 mesh.fsdp=2 train.virtual_stages=2"),
    "experts, tensor": (MOE, "mesh.stage=2 mesh.expert=2 mesh.tensor=2"),
}


@functools.cache
def steps_of(config, *mesh):
    """Two training steps' metrics, and the loss of the last batch evaluated."""
    settings = load(config[0], [*config[1:], *mesh])
    devices = jax.devices()[: int(np.prod(list(vars(settings.mesh).values())))]
    made = program(settings, make_mesh(settings.mesh, devices))
    state = shardings_of(made.state)
    step = jax.jit(made.step, in_shardings=(state, made.tokens.sharding), out_shardings=(state, None))
    begin = jax.jit(made.init, out_shardings=shardings_of(made.saved))()
    now, found = regroup(begin, made.state), []
    for number in range(2):
        batch = jax.random.randint(jax.random.key(number), made.tokens.shape, 0, 512)
        batch = jax.device_put(batch, made.tokens.sharding)
        now, metrics = step(now, batch)
        found.append(jax.device_get(metrics))
    return found, jax.device_get(jax.jit(made.evaluate)(now.params, batch))


@pytest.mark.slow
@pytest.mark.claim("stages")
@pytest.mark.parametrize("config, mesh", MESHES.values(), ids=MESHES)
def test_training_on_stages_is_training_on_one_device(config, mesh):
    """Auxiliary losses, what experts drop, the norm that clips, and evaluation too."""
    with fast_compiles():
        got = steps_of(config, *mesh.split())
        expected = steps_of(config, "mesh.data=1", "mesh.fsdp=1", "mesh.expert=1")
    (first, *got), (expected_first, *expected) = ((steps[0], steps[1], loss) for steps, loss in (got, expected))
    assert_close(first, expected_first)
    # Adam divides a gradient by its size: where it is almost zero, rounding moves the weight. In the second step a
    # token of two experts' scores that are almost equal may then go to the other: it is one of 1,024.
    assert_close(got, expected, roundings=1000 if config is DENSE else 2 / 1024 / np.finfo(np.float32).eps)


def test_each_stage_sends_and_receives_a_chunk_at_a_time():
    for stages, groups in itertools.product(range(1, 9), repeat=2):
        rounds = exchanges(stages, groups)
        for moves in rounds:
            sources, targets = ({stage for stage, _ in places} for places in zip(*moves, strict=True))
            assert sources == targets == {*range(stages)} and len(moves) == stages
        chunk_in_groups = lambda place: place[1] * stages + place[0]
        chunk_in_order = lambda place: place[0] * groups + place[1]
        moves = [move for moves in rounds for move in moves]
        assert all(chunk_in_groups(move[0]) == chunk_in_order(move[1]) for move in moves)
        assert {chunk_in_groups(move[0]) for move in moves} == {*range(stages * groups)}


@pytest.mark.parametrize("stages, groups", [(2, 2), (4, 6)])
def test_layers_change_groups_one_array_after_another(stages, groups, monkeypatch, capfd):
    """As before each checkpoint and after it; XLA says on stderr if it gathers an array on all devices."""
    mesh, layers = make_mesh(Mesh(stage=stages, fsdp=8 // stages)), 2 * stages * groups
    shapes = {"matrix": (8, 3), "norm": (5,)}
    values = {name: normal(k, (layers, *shape)) for k, (name, shape) in enumerate(shapes.items())}
    spec = lambda name, *axes: NamedSharding(mesh, PartitionSpec(*axes, *(["fsdp"] if name == "matrix" else [])))
    struct = lambda shape, sharding: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    in_order = {name: struct(x.shape, spec(name, "stage")) for name, x in values.items()}
    in_groups = {
        name: struct((groups, layers // groups, *shape), spec(name, None, "stage")) for name, shape in shapes.items()
    }
    embedding = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("fsdp")))
    everything = {name: jax.device_put(x, in_order[name].sharding) for name, x in values.items()}
    everything["embedding"] = embedding
    memory = lambda: sum(x.nbytes for x in jax.live_arrays())
    at_once, delete = [], type(embedding).delete
    monkeypatch.setattr(type(embedding), "delete", lambda x: (at_once.append(memory()), delete(x)))
    for like in (in_groups, in_order):
        before = memory()
        given, everything = everything, regroup(everything, like | {"embedding": embedding})
        assert len(at_once) == len(like) and max(at_once) <= before + values["matrix"].nbytes
        at_once.clear()
        assert all(given[name].is_deleted() for name in like) and everything["embedding"] is embedding
        for name, want in like.items():
            assert everything[name].sharding == want.sharding
            np.testing.assert_array_equal(everything[name], values[name].reshape(want.shape))
    assert "rematerialization" not in capfd.readouterr().err


def test_the_beginning_of_a_run_on_virtual_stages_is_made_as_of_one_on_stages():
    """In order: XLA would make all layers on each device to divide them into groups."""

    def text(virtual_stages):
        config = load("configs/tiny.yaml", ["model.layers=8", "mesh.stage=2", "train.grad_accumulation=4"])
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, virtual_stages=virtual_stages))
        made = program(config, make_mesh(config.mesh, jax.devices()[:2]))
        return jax.jit(made.init, out_shardings=shardings_of(made.saved)).lower().as_text()

    assert text(2) == text(1)
