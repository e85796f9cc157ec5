"""What plan() predicts for policies that were measured on H200s."""

import json
import shlex
import statistics
import sys

import jax
import pytest
from common import ROOT
from pages import result

from benchmarks import accumulate, plans, stages
from benchmarks.cases import OVERLAP
from jaxoffload import Policy, Schedule, plan
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
def test_layers_take_the_time_and_the_memory_that_is_predicted():
    dense, experts = [], []  # measured / predicted, step time and memory
    for name, of in result("plans")["shapes"].items():
        shape = plans.SHAPES[name]
        for policy, residuals in policies(shape).items():
            measured, (ms, gib) = of["policies"][policy], predicted(shape, residuals)
            ratios = measured["step_ms"] / ms, measured["device_gib"] / gib
            (dense if shape.case is plans.dense.CASE else experts).append(ratios)
    assert (len(dense), len(experts)) == (51, 16)
    times, memory = (sorted(each) for each in zip(*dense, strict=True))
    assert statistics.median(abs(ratio - 1) for ratio in times) < 0.01
    assert times[0] > 0.98 and times[-4] < 1.04 and times[-1] < 1.1
    assert memory[0] > 0.92 and memory[3] > 0.95 and memory[-1] < 1.03
    times, memory = (sorted(each) for each in zip(*experts, strict=True))
    assert times[0] > 0.97 and times[-1] < 1.02 and memory[0] > 0.93 and memory[-1] < 1.054


@pytest.mark.claim("plan-fsdp")
def test_plans_on_two_gpus_that_were_written_down_before_are_as_fast_as_predicted_and_among_the_fastest():
    found = result("plans-fsdp")
    (of,) = found["shapes"].values()
    before = json.loads((ROOT / found["predicted"]).read_text())["shapes"]["8b, fsdp"]["curve"]
    for which, budget in of["budgets"].items():
        made = of["policies"][f"plan {which}"]
        (point,) = (point for point in before if point["policy"] == made["policy"])
        assert (made["predicted_ms"], made["predicted_gib"]) == (round(point["ms"], 2), round(point["bytes"] / GIB, 4))
        assert abs(budget["predicted / measured ms"] - 1) < 0.02
        assert abs(budget["predicted / planned by XLA"] - 1) < 0.03
    assert [budget["plan / best"] == 1 for budget in of["budgets"].values()] == [False, True, True]


def least(step, args, residuals):
    """The choice of `plan` that takes least memory under these decisions, on four H200s."""
    fixed = Policy({"*": "recompute"} | residuals)
    with jax.numpy_rank_promotion("allow"):
        curve = plan(
            step, *args, budget="1TiB", host_budget="1TiB", machine=ROOT / "machines/four-h200.json", fixed=fixed
        ).curve
    return curve[0]


@pytest.mark.slow
@pytest.mark.claim("plan-four")
def test_steps_on_four_gpus_take_the_time_and_the_memory_that_is_predicted(monkeypatch):
    """One moves everything, whose copies four GPUs make at once; the others are stages with experts."""
    sizes = result("accumulate-fsdp-4")["shape"]
    shape = plans.Shape(plans.dense.CASE, {key: sizes[key] for key in ("layers", "batch", "fsdp")}, 8)
    options = plans.options_of(shape, {})
    step, args = plans.step_of(shape, options, plans.variant_of(Policy())), plans.arguments(shape, options)
    moved = accumulate.variants_of(shape.case, "dense")["interleaved"]["all moved"].residuals
    measured = result("accumulate-fsdp-4")["microbatches"]["8"]["modes"]["interleaved"]
    compared = [(measured, least(step, args, moved))]
    measured = result("stages-experts")
    monkeypatch.setattr(sys, "argv", shlex.split(measured["command"])[2:])
    options, case = stages.parse(), plans.moe.CASE
    options.grouped = "ragged"  # as `plans.options_of` has it without a GPU
    for mode, of in measured["virtual_stages"]["2"]["microbatches"]["8"]["modes"].items():
        for name, facts in {of["options"]: of, **of["other_options"]}.items():
            variant = stages.variants_of(case, "moe")[mode][name]
            step, args, _ = stages.step_of(case, options, mode, variant, Schedule(2, 2, 8))
            compared.append((facts, least(step, args, variant.residuals)))
    less, *on_stages = [1 - facts["ms"] / (point.ms / 8) for facts, point in compared]
    assert 0.035 < less < 0.045 and len(on_stages) == 4 and min(on_stages) > 0.045 and max(on_stages) < 0.085
    assert all(abs(facts["all_gib"] / (point.bytes / GIB) - 1) < 0.041 for facts, point in compared)
