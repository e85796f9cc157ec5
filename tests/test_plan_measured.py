"""What plan() predicts for policies that were measured on an H200: results/plans.json."""

import statistics

import jax
import pytest
from common import ROOT
from pages import result

from benchmarks import plans
from benchmarks.cases import OVERLAP
from jaxoffload import Policy
from jaxoffload.proof import Machine
from jaxoffload.proof._plan.choices import Choice, alone
from jaxoffload.proof._plan.plan import _traced

H200 = Machine.from_json((ROOT / "machines/h200.json").read_text())
GIB = 2**30


def predicted(shape, residuals):
    """A step's milliseconds, and GiB on the device, if all layers offload that may."""
    options = plans.options_of(shape, {})
    fixed = Policy({"*": "recompute"} | residuals)
    with jax.numpy_rank_promotion("allow"):
        step = plans.step_of(shape, options, plans.variant_of(Policy()))
        traced = _traced(step, plans.arguments(shape, options), fixed, H200, (), 2**62)
    kept, layers = max(traced.table, key=len), max(stack.layers for stack in traced.step.stacks)
    choice = Choice(0, 0, 0, kept, traced.step.moved & kept, layers, "save", kept)
    out = alone(traced.step, traced.table, choice)
    return out.ns / 1e6, out.device(traced.step) / GIB


def policies(shape):
    """The hand-made ones, whose copies begin at once and of which one layer is resident; and those that move nothing.
    In microbatches these have had one set of gradients less since."""
    case = shape.case
    moving = {name: v.residuals for name, v in case.best.items() if v.options == OVERLAP and not v.fields}
    others = {"recompute": {}, "save": dict.fromkeys(case.all_names, "save")}
    return moving if shape.microbatches > 1 else moving | others


@pytest.mark.slow
@pytest.mark.claim("plan-measured")
def test_dense_layers_take_the_time_and_the_memory_that_is_predicted():
    times, memory = [], []
    for name, of in result("plans")["shapes"].items():
        if (shape := plans.SHAPES[name]).case is plans.dense.CASE:
            for policy, residuals in policies(shape).items():
                measured, (ms, gib) = of["policies"][policy], predicted(shape, residuals)
                times.append(abs(ms / measured["step_ms"] - 1))
                memory.append(gib / measured["device_gib"] - 1)
    times, memory = sorted(times), sorted(memory)
    assert len(times) == 51
    assert statistics.median(times) < 0.012 and times[-3] < 0.04 and times[-1] < 0.1
    assert memory[0] > -0.03 and memory[-5] < 0.05 and memory[-1] < 0.09
