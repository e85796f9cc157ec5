"""The training program on pipeline stages trains as on one device."""

import functools

import jax
import numpy as np
import pytest
from common import assert_close, fast_compiles

from models.config import load
from models.sharding import make_mesh
from models.step import program, shardings_of

SMALL = (
    *("model.vocab_size=512", "model.d_model=32", "model.heads=4", "model.kv_heads=2", "train.seq_len=32"),
    *("train.loss_chunk=16", "train.batch_size=32", "train.grad_accumulation=2", "train.warmup_steps=0"),
)
DENSE = ("configs/tiny.yaml", *SMALL, "model.layers=8", "model.d_ff=64")
MOE = ("configs/tiny-moe.yaml", *SMALL, "model.layers=4", "model.dense_layers=0", "model.d_expert=32")
MESHES = {
    "virtual stages, data, fsdp": (DENSE, "mesh.stage=2 mesh.data=2 mesh.fsdp=2 train.virtual_stages=2"),
    "experts, tensor": (MOE, "mesh.stage=2 mesh.expert=2 mesh.tensor=2"),
}
RARE = ("virtual stages, data, fsdp",)  # test_stages.py has them without the training program


@functools.cache
def steps_of(config, *mesh):
    """Two training steps' metrics, and the loss of the last batch evaluated."""
    settings = load(config[0], [*config[1:], *mesh])
    devices = jax.devices()[: int(np.prod(list(vars(settings.mesh).values())))]
    made = program(settings, make_mesh(settings.mesh, devices))
    state = shardings_of(made.state)
    step = jax.jit(made.step, in_shardings=(state, made.tokens.sharding), out_shardings=(state, None))
    now, found = jax.jit(made.init, out_shardings=state)(), []
    for number in range(2):
        batch = jax.random.randint(jax.random.key(number), made.tokens.shape, 0, 512)
        batch = jax.device_put(batch, made.tokens.sharding)
        now, metrics = step(now, batch)
        found.append(jax.device_get(metrics))
    return found, jax.device_get(jax.jit(made.evaluate)(now.params, batch))


@pytest.mark.slow
@pytest.mark.claim("stages")
@pytest.mark.parametrize(
    "config, mesh", [pytest.param(*MESHES[name], id=name, marks=[pytest.mark.long] * (name in RARE)) for name in MESHES]
)
def test_training_on_stages_is_training_on_one_device(config, mesh):
    """Auxiliary losses, what experts drop, the norm that clips, and evaluation too."""
    with fast_compiles():
        got = steps_of(config, *mesh.split())
        expected = steps_of(config, "mesh.data=1", "mesh.fsdp=1", "mesh.expert=1", "train.interleave=false")
    (first, *got), (expected_first, *expected) = ((steps[0], steps[1], loss) for steps, loss in (got, expected))
    assert_close(first, expected_first)
    # Adam divides a gradient by its size: where it is almost zero, rounding moves the weight. In the second step a
    # token of two experts' scores that are almost equal may then go to the other: it is one of 1,024.
    assert_close(got, expected, roundings=1000 if config is DENSE else 2 / 1024 / np.finfo(np.float32).eps)
