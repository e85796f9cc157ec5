"""The training step: interleaved microbatches leave the parameters and metrics of a plain loop over them."""

import jax
import pytest
from common import assert_same_bits
from small_models import DENSE, EXPERTS, TOKENS, on, start

from jaxoffload import Policy
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._engine.layers.loops import loops_of
from jaxoffload._engine.microbatches.interleaved import interleaved_p
from jaxoffload.proof import exact_options
from models.config import Mesh
from models.step import Program, shardings_of


def compiled(made: Program) -> jax.stages.Compiled:
    state, options = shardings_of(made.state), exact_options()
    shardings = {"in_shardings": (state, made.tokens.sharding), "out_shardings": (state, None)}
    return jax.jit(made.step, **shardings, compiler_options=options).lower(made.state, made.tokens).compile()


def after_steps(made: Program, step: jax.stages.Compiled, state, steps: int = 3):
    """Return the state after some steps, and the metrics of each."""
    found = []
    for _ in range(steps):
        state, metrics = step(state, jax.device_put(TOKENS, made.tokens.sharding))
        found.append(metrics)
    return jax.device_get(jax.tree.leaves((state, found)))


def assert_alike(config, sizes, microbatches) -> jax.stages.Compiled:
    """Train both ways, compare state and metrics bit by bit, and return the interleaved step."""
    ways = [{"grad_accumulation": microbatches, "interleave": way} for way in (True, False)]
    made = [on(config, sizes, train=way) for way in ways]
    steps, begin = [compiled(each) for each in made], start(made[0])
    assert_same_bits(*(after_steps(*each, begin) for each in zip(made, steps, strict=True)))
    return steps[0]


@pytest.mark.slow
@pytest.mark.claim("trained-interleaved")
@pytest.mark.usefixtures("compiled_fast")
def test_interleaved_microbatches_train_as_one_after_another_and_each_device_sums_its_share_of_the_gradients():
    step = assert_alike(DENSE, Mesh(data=2, fsdp=2, tensor=2), 4).as_text()
    layers, D, F = 3, 32, 48  # of gate, up and down, over fsdp and tensor
    assert f"f32[{layers},{D // 2},{F // 2}]" in step
    assert f"f32[{layers},{D},{F}]" not in step and f"f32[{layers},{F},{D}]" not in step


@pytest.mark.slow
@pytest.mark.claim("trained-interleaved")
@pytest.mark.parametrize("sizes", [Mesh(fsdp=2, expert=2), pytest.param(Mesh(), marks=pytest.mark.long)], ids=str)
@pytest.mark.usefixtures("compiled_fast")
def test_so_they_do_with_experts(sizes):
    assert_alike(EXPERTS, sizes, 4)


@pytest.mark.slow
@pytest.mark.claim("optimizer-elsewhere")
@pytest.mark.parametrize(
    "config, sizes, dtype, interleave",
    [
        (DENSE, Mesh(fsdp=2, tensor=2), "bfloat16", True),
        (DENSE, Mesh(fsdp=2), "float32", False),
        (EXPERTS, Mesh(fsdp=2, expert=2), "bfloat16", True),
        (DENSE, Mesh(stage=2), "bfloat16", True),
    ],
    ids=["fsdp and tensor", "one after another", "experts", "stages"],
)
@pytest.mark.usefixtures("compiled_fast")
def test_state_on_the_host_trains_as_on_the_device_on_any_mesh(config, sizes, dtype, interleave):
    model = {"param_dtype": dtype, "layers": 4}
    train = {"grad_accumulation": 2, "interleave": interleave}
    made = [on(config, sizes, train=train | {"optimizer_on_host": where}, **model) for where in (True, False)]
    for each, kinds in zip(made, ({"device", "pinned_host"}, {"device"}), strict=True):
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(each.state)} == kinds
    begin = jax.device_get(start(made[0]))
    placed = [jax.device_put(begin, shardings_of(each.state)) for each in made]
    assert_same_bits(*(after_steps(each, compiled(each), state) for each, state in zip(made, placed, strict=True)))


@pytest.mark.parametrize(
    "interleave, microbatches, moved, interleaved",
    [
        (True, 2, "offload", 1),
        (True, 2, "save", 0),
        (True, 1, "offload", 0),
        (False, 2, "offload", 0),
    ],
)
def test_microbatches_interleave_where_there_are_several_and_something_moves(
    interleave, microbatches, moved, interleaved
):
    policy = Policy({"fc1": moved}, min_offload_bytes=0)
    made = on(DENSE, Mesh(), policy, train={"grad_accumulation": microbatches, "interleave": interleave})
    jaxpr = jax.make_jaxpr(made.step)(made.state, made.tokens)
    accumulated = [site.eqn for site in walk(jaxpr.jaxpr) if site.eqn.primitive is interleaved_p]
    assert len(accumulated) == (interleave and microbatches > 1)
    segments = [segment for eqn in accumulated for loops in loops_of(eqn) for segment in loops.segments]
    assert any(segment.on_host for segment in segments) == interleaved
