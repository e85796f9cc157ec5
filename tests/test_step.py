"""The training step: interleaved microbatches leave the parameters and metrics of a plain loop over them."""

import jax
import jax.numpy as jnp
import pytest
from common import assert_same_bits
from jax.extend.core import JaxprEqn
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


def after_steps(made: Program, begin, steps: int = 3) -> tuple[jax.stages.Compiled, list]:
    """Return the compiled step, and the state after some steps with the metrics of each."""
    step, found = compiled(made), []
    state = jax.device_put(begin, shardings_of(made.state))
    for _ in range(steps):
        state, metrics = step(state, jax.device_put(TOKENS, made.tokens.sharding))
        found.append(metrics)
    return step, jax.device_get(jax.tree.leaves((state, found)))


def interleavings(made: Program) -> list[JaxprEqn]:
    """Return the equations of a step that run microbatches beside each other."""
    jaxpr = jax.make_jaxpr(made.step)(made.state, made.tokens)
    return [site.eqn for site in walk(jaxpr.jaxpr) if site.eqn.primitive is interleaved_p]


@pytest.mark.slow
@pytest.mark.claim("trained-interleaved", "optimizer-elsewhere")
@pytest.mark.parametrize(
    "config, sizes, microbatches, dtype, sums",
    [
        pytest.param(DENSE, Mesh(data=2, fsdp=2, tensor=2), 4, "float32", "bfloat16", id="dense"),
        pytest.param(EXPERTS, Mesh(fsdp=2, expert=2), 2, "bfloat16", "float32", id="experts"),
        pytest.param(DENSE, Mesh(stage=2), 2, "bfloat16", "float32", id="stages", marks=pytest.mark.long),
        pytest.param(DENSE, Mesh(), 2, "bfloat16", "bfloat16", id="sums in bfloat16"),
    ],
)
@pytest.mark.usefixtures("compiled_fast")
def test_interleaved_with_state_on_the_host_trains_as_one_after_another_on_the_device(
    config, sizes, microbatches, dtype, sums
):
    """On stages microbatches are always interleaved. Each device sums its share of the gradients, in the wider dtype of
    the weights and `sum_dtype`."""
    model = {"param_dtype": dtype, "layers": 4, "dense_layers": 0, "shared_experts": 0}
    ways = [{"optimizer_on_host": True}, {"optimizer_on_host": False, "interleave": sizes.stage > 1}]
    train = {"grad_accumulation": microbatches, "sum_dtype": sums}
    made = [on(config, sizes, train=train | way, **model) for way in ways]
    for each, kinds in zip(made, ({"device", "pinned_host"}, {"device"}), strict=True):
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(each.state)} == kinds
    begin = jax.device_get(start(made[0]))
    (step, got), (_, want) = (after_steps(each, begin) for each in made)
    assert_same_bits(got, want)
    avals = [v.aval for eqn in interleavings(made[0]) for v in eqn.outvars]
    assert sizes.stage > 1 or {aval.dtype for aval in avals if aval.ndim > 2} == {jnp.promote_types(dtype, sums)}
    if sizes == Mesh(data=2, fsdp=2, tensor=2):
        text, (layers, D, F) = step.as_text(), (4, 32, 48)  # of gate, up and down, over fsdp and tensor
        assert f"f32[{layers},{D // 2},{F // 2}]" in text
        assert f"f32[{layers},{D},{F}]" not in text and f"f32[{layers},{F},{D}]" not in text


@pytest.mark.parametrize(
    "interleave, microbatches, moved, interleaved",
    [(True, 2, "offload", 1), (True, 2, "save", 0), (True, 1, "offload", 0), (False, 2, "offload", 0)],
)
def test_microbatches_interleave_where_there_are_several_and_something_moves(
    interleave, microbatches, moved, interleaved
):
    policy = Policy({"fc1": moved}, min_offload_bytes=0)
    made = on(DENSE, Mesh(), policy, train={"grad_accumulation": microbatches, "interleave": interleave})
    accumulated = interleavings(made)
    assert len(accumulated) == (interleave and microbatches > 1)
    segments = [segment for eqn in accumulated for loops in loops_of(eqn) for segment in loops.segments]
    assert any(segment.on_host for segment in segments) == interleaved
