"""plan() of a step on pipeline stages: by hand, and what the traced step then keeps, copies and takes."""

import dataclasses
import itertools
import shlex
import sys

import jax
import jax.numpy as jnp
import pytest
from common import ROOT, auto_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxoffload.proof._plan.collectives import of_layer, weights_of
from pages import result
from test_plan import ACT, BOTH, FC1, LEAST, MOST, NONE, outcome_of, step_of

from benchmarks import stages
from benchmarks.moe import CASES
from jaxoffload import Policy, Schedule, accumulate, plan, scan, tag
from jaxoffload._engine.cost.cost import cost
from jaxoffload._engine.host.need import need_of
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._engine.microbatches.interleaved import is_staged
from jaxoffload._engine.stages.repeated import repeated
from jaxoffload._tracing import Trial
from jaxoffload.proof import Bus, Link, Machine, fits
from jaxoffload.proof._plan.choices import alone, undominated
from jaxoffload.proof._plan.costs import Stack
from jaxoffload.proof._plan.patterns import policy_for
from jaxoffload.proof._plan.plan import _traced
from jaxoffload.proof._plan.stacks import stacks_of
from models.budget import planned as planned_config
from models.budget import report
from models.config import load
from models.sharding import abstract_mesh
from models.train import step_for

pytestmark = pytest.mark.claim("plan-stages")

H200 = Machine.from_json((ROOT / "machines/h200.json").read_text())
SLOW = dataclasses.replace(H200, one=Bus(20.0, 16.0, 12.0), all=Bus(20.0, 16.0, 12.0))  # GB/s
D, H, ROWS = 2048, 8192, 4096
STREAM, WIDE = 2 * ROWS * D, 2 * ROWS * H  # bytes, bfloat16
ALL = Policy(min_offload_bytes=0)
EVERYTHING = 100 * 2**30


def layer(x, w):
    x = tag(x, "layer_input")
    act = tag(jnp.tanh(tag(x @ w["in"], "fc1")), "act")
    return x + act @ w["out"], None


def staged(schedule, layers=4, policy=ALL, layer=layer, mesh=None, spec=(), of_weights=lambda w: w):
    """A loss and its gradient, on stages that have so many layers in each chunk, and its arguments; `spec`: of the
    weights of a layer, which it computes by `of_weights`."""
    mesh = mesh or auto_mesh(stage=schedule.stages)

    def loss(w, x):
        rows = jax.tree.map(lambda w: of_weights(w.reshape(-1, *w.shape[-2:])), w)  # of virtual stages
        return jnp.mean(scan(layer, x, rows, policy=policy, strict=False)[0].astype(jnp.float32) ** 2)

    def step(w, xs):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return accumulate(loss, stages="stage", virtual_stages=schedule.virtual_stages)(w, xs)

    def of(spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    virtual = (schedule.virtual_stages,) if schedule.virtual_stages > 1 else ()
    chunks, spec = (*virtual, schedule.stages * layers), (*(None for _ in virtual), "stage", *spec)
    w = {"in": of(spec, *chunks, D, H), "out": of(spec, *chunks, H, D)}
    return step, (w, of((), schedule.microbatches, ROWS, D))


def planned(schedule, machine=H200, layers=4, fixed=ALL, of_weights=lambda w: w, **budgets):
    step, args = staged(schedule, layers, of_weights=of_weights)
    return plan(step, *args, machine=machine, fixed=fixed, **{"budget": EVERYTHING, **budgets})


def traced_under(policy, step, args):
    """The traced step under a policy, and its equation of stages."""
    jaxpr = Trial(policy).traced(jax.make_jaxpr(step))(*args)
    (eqn,) = [site.eqn for site in walk(jaxpr) if is_staged(site.eqn)]
    return jaxpr, eqn


# ---- by hand ----


def test_cotangents_that_travel_with_a_microbatch_are_counted():
    """Those of weights that the loss computes, of all layers on each device; not those of weights that it casts."""
    cast, scaled = lambda w: w.astype(jnp.float32).astype(w.dtype), lambda w: w * 1.5
    moved, computed = (planned(Schedule(2, 1, 6), of_weights=f).memory for f in (cast, scaled))
    assert computed.other - moved.other == 8 * 2 * (2 * D * H) and computed.residuals == moved.residuals


def test_what_stages_cost_by_hand():
    """Two stages with two chunks of four layers: a tick has 4 layers, and the last layer's row travels in pieces."""
    schedule = Schedule(2, 2, 4)
    assert (schedule.forward_stop, schedule.ticks, schedule.chunks, schedule.slots) == (9, 13, 4, 8)
    step = step_of(Stack(4, 9, schedule=schedule), resident=3)
    cut = MOST._replace(beyond={FC1: (0, 0, 0, 0, 20), ACT: (0, 0, 0, 0, 0)})
    table = {NONE: (LEAST,), BOTH: (cut,)}
    out = outcome_of(step, table, [], 0)
    assert (out.ns, out.residuals, out.host) == ((10 + 9 * 24) * 10**9, 8 * (4 * 410 + 3), 0)
    # fc1 of all 16 layers, although a policy says that 3 are resident. A row of 300 bytes, and a piece of 75 and 5.
    out = outcome_of(step, table, [FC1], 16)
    assert out.residuals == 8 * (4 * 110 + 3) and out.host == 8 * (5 * 300 + 20) and out.copied == 9 * (5 * 300 + 20)
    lone, beside = (3.8 - 2) + (7.6 - 4), 380 / 25 - 6
    assert out.ns == int((226 + 4 * (4 * lone + 5 * beside)) * 1e9)
    assert out.working == 70 + 4 * 300 + 2 * 75
    # Of half of them: the third layer of a chunk runs in the same loop, its residuals stay, and no row is in pieces.
    out = outcome_of(step, table, [FC1], 8)
    assert out.host == 8 * 3 * 300 and out.copied == 9 * 3 * 300 and out.working == 70 + 2 * 300
    assert out.ns == int((226 + 3 * (4 * ((3 - 2) + (6 - 4)) + 5 * (12 - 6))) * 1e9)
    # The others recompute: then the second layer is the last one of its loop.
    out = outcome_of(step, table, [FC1, ACT], 8, "recompute", NONE)
    assert out.host == out.copied * 8 // 9 == 8 * 3 * 400 and out.residuals == 8 * (4 * 10 + 3)


@pytest.mark.parametrize("layers, counts", [(1, {0}), (2, {0, 8}), (5, {0, 8, 12, 16, 20})])
def test_no_chunk_offloads_a_single_layer(layers, counts):
    step = step_of(Stack(layers, 9, schedule=Schedule(2, 2, 3)))
    curve = undominated(step, {NONE: (LEAST,), BOTH: (MOST,)}, 2**40)
    assert {choice.layers for choice in curve} <= counts and (layers == 1 or len(curve) > 2)


# ---- what is planned is what the step then does ----


SCHEDULES = [
    Schedule(2, 2, 4),
    *(pytest.param(s, marks=pytest.mark.slow) for s in (Schedule(2, 1, 5), Schedule(4, 1, 3))),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["2 with 2 each", "2", "4"])
def test_the_step_keeps_and_copies_what_is_planned(schedule):
    step, args = staged(schedule)
    traced = _traced(step, args, ALL, SLOW, (), 2**40)
    chosen = traced.curve[:: max(1, len(traced.curve) // 2)]
    assert chosen[0].moved
    for choice in chosen:
        out, policy = alone(traced.step, traced.table, choice), policy_for(choice, traced.step, traced.table, ALL)
        jaxpr, eqn = traced_under(policy, step, args)
        assert choice.host == need_of(jaxpr).bytes()
        (loops,) = eqn.params["loops"]
        sizes = [(s, sum(s.layer.sizes.device), sum(s.layer.sizes.host)) for s in loops.segments]
        stays = sum(s.layers * device + (s.layers - s.on_host) * host for s, device, host in sizes)
        assert out.residuals == schedule.slots * stays
        assert out.copied == schedule.forward_stop * choice.host // schedule.slots


def test_promises_hold_on_stages():
    schedule = Schedule(2, 2, 4)
    everything = planned(schedule)
    kept = 8 * 4 * (STREAM + WIDE)  # fc1 is not needed
    assert everything.host == 0 and everything.memory.residuals == kept and everything.limits == "nothing: all fits"
    budgets = [everything.curve[0].bytes, (everything.curve[0].bytes + everything.curve[-1].bytes) // 2, EVERYTHING]
    found = [planned(schedule, SLOW, budget=budget) for budget in budgets]
    assert [f.step_ms for f in found] == sorted((f.step_ms for f in found), reverse=True)
    assert all(f.memory.total <= budget for f, budget in zip(found, budgets, strict=True))
    assert found[0].host > 0 and found[-1].host == 0 and found[0].step_ms > found[-1].step_ms
    assert str(planned(schedule, SLOW, budget=budgets[1])) == str(found[1])
    assert any("offload" not in dict(p.policy.residuals).values() for p in found[0].curve)


def test_a_step_takes_the_ticks_of_its_schedule():
    """Its bubble is the schedule's, and what is traced for it costs as much, but for writing residuals."""
    before = 0.0
    for schedule in (Schedule(2, 1, 2), Schedule(2, 1, 4), Schedule(2, 2, 7)):
        step, args = staged(schedule)
        traced = _traced(step, args, ALL, H200, (), 0)
        choice = traced.curve[-1]
        (each,) = traced.table[choice.kept]
        layers_ns = choice.ns - 1e9 * traced.step.seconds
        useful = schedule.microbatches * schedule.virtual_stages * 4 * each.seconds
        assert 1 - 1e9 * useful / layers_ns == pytest.approx(schedule.bubble, abs=1e-6)
        jaxpr, _ = traced_under(policy_for(choice, traced.step, traced.table, ALL), step, args)
        assert choice.ns == pytest.approx(1e9 * cost(jaxpr, H200, 2).seconds, rel=0.1)
        assert choice.ns > before
        before = choice.ns


def test_a_step_takes_as_long_as_fits_says():
    """Where copies take longer than layers, and the last layer's row does not travel in pieces, which `fits` does not
    know; nor does it count what layers copy into stacks."""
    schedule, names = Schedule(2, 2, 5), {"layer_input": "offload", "act": "offload", "fc1": "recompute"}
    step, args = staged(schedule, 6)
    traced = _traced(step, args, dataclasses.replace(ALL, residuals=names), SLOW, (), 2**40)
    some = max((c for c in traced.curve if c.layers < 24), key=lambda c: c.layers)
    assert some.layers and some.others == "save"
    loops = fits(step_under(traced, some, schedule), *args, machine=SLOW).loops
    exposed = sum(loop.exposed_ms(loop.together) for loop in loops)
    expected = exposed + sum(loop.computing_ms for loop in loops)
    assert 1e-6 * some.ns - 1e3 * traced.step.seconds == pytest.approx(expected, rel=0.01)
    assert exposed > 0.5 * expected


def step_under(traced, choice, schedule):
    return staged(schedule, 6, policy_for(choice, traced.step, traced.table, traced.fixed))[0]


# ---- meshes ----


def test_weights_are_gathered_within_a_stage_as_without_stages():
    """Pipeline stages do not divide a layer's weights, FSDP does."""
    link = Link(4, (1, 2**40), (4.0, 4.0), (2.0, 2.0), (1.0, 1.0))

    def constrained(x, w):
        return layer(lax.with_sharding_constraint(x, P("fsdp")), w)

    def found(stages, **sizes):
        schedule = Schedule(stages, 1, 4)
        step, args = staged(schedule, 8 // stages, layer=constrained, mesh=auto_mesh(**sizes), spec=("fsdp",))
        trial = Trial(Policy(), says_what_interleaves=True)  # layers live as long
        (scan,) = stacks_of(trial.traced(jax.make_jaxpr(step))(*args), 4 * stages)
        weights = list(weights_of(scan, args)), of_layer(scan, args, 4 * stages, link)
        return weights, scan.devices, plan(step, *args, budget=EVERYTHING, machine=H200, fixed=ALL).memory

    on_stages, devices, memory = found(2, stage=2, fsdp=4)
    without, same, _ = found(1, stage=1, fsdp=4)
    assert on_stages == without and devices == same == 4 and [w.parts for w in on_stages[0]] == [4, 4]
    # A slot of 4 layers, and the sums of gradients, are each device's part.
    assert memory.residuals == 4 * 4 * (STREAM + WIDE) // 4
    of_stage = 2 * 4 * 2 * D * H // 4
    assert memory.arguments == of_stage + 2 * 4 * ROWS * D
    assert of_stage <= memory.other <= of_stage + 8 * STREAM // 4


@pytest.mark.parametrize("schedule", [Schedule(2, 1, 4), Schedule(2, 2, 3)])
def test_neighbours_exchange_on_the_link(schedule):
    """After each tick, the stream of the one that computed it, and its cotangents."""
    step, args = staged(schedule)

    def seconds(gb_s):
        link = Link(2, (1, 2**40), (1e12, 1e12), (1e12, 1e12), (gb_s, gb_s))
        return _traced(step, args, ALL, dataclasses.replace(H200, link=link), (), 0).step.seconds

    assert seconds(1.0) - seconds(1e12) == pytest.approx(2 * schedule.forward_stop * STREAM / 1e9, rel=1e-6)


def test_a_scan_beside_the_stages_is_not_planned():
    mesh = auto_mesh(stage=2)

    def loss(w, x):
        x = scan(layer, x, jax.tree.map(lambda w: w[:3], w), policy=ALL, strict=False)[0]
        return jnp.mean(scan(layer, x, w, policy=ALL, strict=False)[0].astype(jnp.float32))

    def step(w, xs):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return accumulate(loss, stages="stage")(w, xs)

    of = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="belongs to no pipeline stage"):
        plan(step, {"in": of(4, D, H), "out": of(4, H, D)}, of(2, ROWS, D), budget=EVERYTHING, machine=H200)


def test_a_loop_over_ticks_costs_what_a_scan_does():
    """XLA does not know how often it runs; those who read the trace do."""
    x, w = jnp.zeros((ROWS, D)), jnp.zeros((D, D))
    tick = lambda i, x: jnp.tanh(x @ w) * i
    of = lambda f: cost(jax.make_jaxpr(f)(x).jaxpr, H200)
    looped = of(lambda x: repeated(3, tick, x))
    assert looped == of(lambda x: lax.fori_loop(0, 3, tick, x)) and not looped.unknown
    assert looped.seconds > 2.9 * of(lambda x: tick(1, x)).seconds


# ---- what was measured ----


@pytest.mark.slow
def test_steps_on_two_gpus_take_the_time_and_the_memory_that_is_predicted(monkeypatch):
    """Of results/stages.json, with what `machine` measured on such GPUs on another day."""
    measured = result("stages")
    _, _, *command = shlex.split(measured["command"])
    monkeypatch.setattr(sys, "argv", command)
    options, variants = stages.parse(), stages.variants_of(CASES["dense"])
    machine, compared = ROOT / "machines/h100.json", 0
    ran = [
        (int(virtual), int(count), found)
        for virtual, of in measured["virtual_stages"].items()
        for count, found in of["microbatches"].items()
    ]
    for (virtual, count, found), mode in itertools.product(ran, stages.OURS):
        of_mode = found["modes"].get(mode, {"other_options": {}})
        for name, facts in {of_mode.get("options"): of_mode, **of_mode["other_options"]}.items():
            if "ms" not in facts:
                continue
            variant = variants[mode][name]
            step, args, _ = stages.step_of(CASES["dense"], options, mode, variant, Schedule(2, virtual, count))
            fixed = Policy(variant.residuals or {"*": "recompute"})
            least = plan(step, *args, budget="1TiB", machine=machine, fixed=fixed).curve[0]
            ratio, case = facts["ms"] / (least.ms / count), (virtual, count, name)
            assert (1 < ratio < 1.13) if name == "all moved" else (0.9845 < ratio < 1.0245), (case, ratio)
            assert least.bytes / 2**30 == pytest.approx(facts["all_gib"], rel=0.04), case
            compared += 1
    assert compared == 28


# ---- the training program ----


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["90MiB", "1GiB"], ids=["offloads", "saves all"])
def test_the_report_of_a_budget_says_what_the_plan_says(budget):
    overrides = ["mesh.stage=2", "train.virtual_stages=2", "train.grad_accumulation=4", "model.layers=8"]
    overrides += [f"remat.budget={budget}", f"remat.machine={ROOT / 'machines/h200.json'}"]
    config = load(ROOT / "configs/tiny.yaml", [*overrides, "remat.residuals[layer_input]=offload"])
    _, found = planned_config(config, abstract_mesh(config.mesh))
    assert (found.host > 0) == (budget == "90MiB") and found.memory.total <= found.budget
    lines = report(config).splitlines()
    (host,) = (line for line in lines if line.startswith("residuals on the host"))
    assert float(host.split()[4]) == pytest.approx(found.host / 2**20, abs=0.1)


@pytest.mark.slow
def test_qwen_on_stages_keeps_on_the_host_what_is_planned():
    """Attention and experts are in a `shard_map` of their own there, within that of the stages."""
    step, args, *_ = step_for(str(ROOT / "configs/qwen3-30b-a3b-pp2.yaml"))
    traced = _traced(step, args, Policy(), H200, (), 2**40)
    choice = next(choice for choice in traced.curve if choice.moved)
    jaxpr, _ = traced_under(policy_for(choice, traced.step, traced.table, Policy()), step, args)
    assert choice.host == need_of(jaxpr).bytes() > 2**30
    assert traced.step.arguments == pytest.approx(3 * 4 * 30.5e9 / 8, rel=0.01)  # parameters and two moments
