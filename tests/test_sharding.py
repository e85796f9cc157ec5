"""Sharding: parameters lie where the rules say, and a mesh computes what one device computes."""

import dataclasses
import math
import re
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import in_a_loop
from common import assert_close
from flax import nnx
from jax.sharding import PartitionSpec as P
from small_models import DENSE, TOKENS, on, start

import jaxoffload
from jaxoffload import Policy
from models.config import ConfigError, Mesh
from models.sharding import VALUES, make_mesh, process_block
from models.step import adamw, shardings_of
from models.transformer import MLP

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_fast")]
EIGHT = Mesh(data=2, fsdp=2, tensor=2)


def test_parameters_and_moments_are_split_by_the_rules():
    made = on(DENSE, EIGHT)
    state = start(made)
    gate = state.params["layers"]["mlp"]["gate_DxF"][...]
    assert gate.sharding.spec == P("stage", ("fsdp", "expert"), "tensor")
    assert {shard.data.shape for shard in gate.addressable_shards} == {(3, 32 // 2, 48 // 2)}
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    params = jax.tree.leaves(state.params)
    assert [m.sharding for m in moments] == [p.sharding for p in params] * 2


def test_the_start_does_not_depend_on_the_mesh():
    one, many = start(on(DENSE, Mesh())), start(on(DENSE, EIGHT))
    jax.tree.map(np.testing.assert_array_equal, one.params, many.params)


@pytest.fixture(scope="module")
def one_device():
    made = on(DENSE, Mesh())
    return jax.jit(jax.value_and_grad(made.loss))(start(made).params, TOKENS)


@pytest.mark.claim("trains-anywhere")
@pytest.mark.parametrize("sizes", [EIGHT, pytest.param(Mesh(fsdp=8), marks=pytest.mark.long)], ids=str)
def test_loss_and_gradients_are_those_of_one_device(one_device, sizes):
    made = on(DENSE, sizes)
    params = start(made).params
    gradient = jax.jit(
        jax.value_and_grad(made.loss), in_shardings=(shardings_of(made.state.params), made.microbatch.sharding)
    )
    compiled = gradient.lower(made.state.params, made.microbatch).compile()
    # Activations are split too: no device holds the whole batch's gate, only its shard.
    rows = 16 // (sizes.data * sizes.fsdp)
    assert "f32[16,12,48]" not in compiled.as_text() and "f32[16,12,32]" not in compiled.as_text()
    assert f"f32[{rows},12,{48 // sizes.tensor}]" in compiled.as_text()
    loss, gradients = compiled(params, jax.device_put(TOKENS, made.microbatch.sharding))
    assert_close((loss, gradients), one_device)


@pytest.mark.claim("per-device")
def test_the_compiled_step_splits_residuals_as_the_table_says():
    made = on(DENSE, EIGHT, remat=Policy(default="save"))

    def kept(params, tokens):
        return jax.tree.leaves(jax.vjp(lambda params: made.loss(params, tokens), params)[1])

    arguments = (made.state.params, made.microbatch)
    compiled = jax.jit(kept, in_shardings=shardings_of(arguments)).lower(*arguments).compile()
    shapes = [leaf.shape for leaf in jax.eval_shape(kept, *arguments)]
    shards = {shape: s.shard_shape(shape) for shape, s in zip(shapes, compiled.output_shardings, strict=True)}
    rows = [row for row in jaxoffload.residuals(made.loss, *arguments) if row.state == "saved" and row.names]
    assert len(rows) == 11
    assert {name for row in rows for name in row.names} < VALUES.keys()
    for row in rows:
        stacked = (row.layers, *row.shape)
        assert row.bytes_per_device == 4 * math.prod(shards[stacked]), row
    parts = {math.prod(shape) // math.prod(shard) for shape, shard in shards.items()}
    assert {4, 8} <= parts  # the residual stream is whole on the tensor axis; heads and d_ff are not


def test_no_collective_touches_a_residual_on_its_way(monkeypatch):
    """The step with offload communicates exactly what it does where lax.scan keeps the residuals."""

    def plain(f, x, w, policy, strict):
        saved = [name for name, axes in VALUES.items() if name.startswith(("attn/", "mlp/fc1"))]
        return jax.lax.scan(in_a_loop(f, *saved), x, w)

    def collectives() -> Counter:
        made = on(DENSE, EIGHT)
        state = shardings_of(made.state)
        step = jax.jit(made.step, in_shardings=(state, made.tokens.sharding), out_shardings=(state, None))
        hlo = step.lower(made.state, made.tokens).compile().as_text()
        kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
        return Counter(re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", hlo))

    ours = collectives()
    monkeypatch.setattr(jaxoffload, "scan", plain)
    assert ours == collectives() and ours.total() > 10


def test_matrices_decay_and_norms_do_not():
    train = dataclasses.replace(DENSE.train, warmup_steps=0, learning_rate=0.5, weight_decay=0.1)
    optimizer, params = adamw(train), nnx.state(MLP(DENSE.model, nnx.Rngs(params=jax.random.key(0))))
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    gate, scale = updates["gate_DxF"][...], updates["norm"]["scale_D"][...]
    np.testing.assert_allclose(gate, -0.5 * 0.1 * params["gate_DxF"][...], rtol=1e-6)
    np.testing.assert_array_equal(scale, 0)


@pytest.mark.parametrize(
    "sizes, problem",
    [
        (
            Mesh(data=2),
            "mesh.data * mesh.fsdp * mesh.expert * mesh.tensor = 2: must be 8, the number of devices here (cpu)",
        ),
        (Mesh(fsdp=16), "= 16: must be 8"),
        (Mesh(), "for instance mesh.fsdp=8"),
    ],
)
def test_a_mesh_that_is_not_the_machine_is_a_config_error(sizes, problem):
    with pytest.raises(ConfigError) as caught:
        make_mesh(sizes, jax.devices()[:8])
    assert problem in caught.value.problems[0].message


def test_a_tensor_axis_that_straddles_processes_is_a_config_error():
    devices = [SimpleNamespace(process_index=i // 4, device_kind="x") for i in range(12)]
    with pytest.raises(ConfigError, match=r"mesh.tensor = 3: must divide, or be a multiple of, a process's 4"):
        make_mesh(Mesh(fsdp=4, tensor=3), devices)


@pytest.mark.parametrize(
    "slices, block",
    [
        ([slice(0, 2), slice(2, 4)], (0, 2)),  # the first of two processes
        ([slice(4, 6), slice(6, 8)], (1, 2)),  # the second
        ([slice(2, 4)] * 4, (1, 4)),  # a tensor axis as large as a process
        ([slice(None)] * 4, (0, 1)),  # a tensor axis over all processes: each has all rows
    ],
)
def test_a_process_loads_the_rows_of_its_devices(slices, block):
    sharding = SimpleNamespace(
        addressable_devices_indices_map=lambda shape: {i: (s, slice(None)) for i, s in enumerate(slices)}
    )
    assert process_block(sharding, (8, 13)) == block
