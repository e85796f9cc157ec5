"""plan() and predict() of a step on pipeline stages: what the traced step keeps and takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ROOT, auto_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoffload import Policy, Schedule, accumulate, plan, scan, tag
from jaxoffload._engine.cost.cost import cost
from jaxoffload._engine.host.need import need_of
from jaxoffload._engine.stages.repeated import repeated
from jaxoffload._tracing import Trial
from jaxoffload.proof import Bus, Link, Machine, NothingFits, predict
from jaxoffload.proof._predict.collectives import weights_of
from jaxoffload.proof._predict.scans import scans_in

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


def staged(schedule, layers=4, layer=layer, mesh=None, spec=()):
    """A loss and its gradient, on stages that have so many layers in each chunk, and its arguments; `spec`: of the
    weights of a layer."""
    mesh = mesh or auto_mesh(stage=schedule.stages)

    def loss(w, x):
        rows = jax.tree.map(lambda w: w.reshape(-1, *w.shape[-2:]), w)  # of virtual stages
        return jnp.mean(scan(layer, x, rows, policy=ALL, strict=False)[0].astype(jnp.float32) ** 2)

    def step(w, xs):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return accumulate(loss, stages="stage", virtual_stages=schedule.virtual_stages)(w, xs)

    def of(spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    virtual = (schedule.virtual_stages,) if schedule.virtual_stages > 1 else ()
    chunks, spec = (*virtual, schedule.stages * layers), (*(None for _ in virtual), "stage", *spec)
    w = {"in": of(spec, *chunks, D, H), "out": of(spec, *chunks, H, D)}
    return step, (w, of((), schedule.microbatches, ROWS, D))


def planned(schedule, machine=H200, layers=4, **budgets):
    step, args = staged(schedule, layers)
    return plan(step, *args, machine=machine, fixed=ALL, **{"budget": EVERYTHING, **budgets})


@pytest.mark.slow
def test_promises_hold_on_stages():
    """And what is predicted of a plan is what the step then keeps, on the device and on the host."""
    schedule = Schedule(2, 2, 4)
    everything = planned(schedule, SLOW)
    kept = 8 * 4 * (STREAM + WIDE)  # fc1 is not needed
    assert everything.host == 0 and everything.memory.residuals == kept
    with pytest.raises(NothingFits) as caught:
        planned(schedule, SLOW, budget="1MiB")
    budgets = [caught.value.least, (caught.value.least + everything.bytes) // 2]
    before = np.inf
    step, args = staged(schedule)
    for found in (*(planned(schedule, SLOW, budget=budget) for budget in budgets), everything):
        assert found.bytes <= found.budget and found.step_ms <= 1.01 * before
        before = found.step_ms
        jaxpr = Trial(found.policy).traced(jax.make_jaxpr(step))(*args)
        assert found.host == need_of(jaxpr).bytes()
        assert found.prediction == predict(step, *args, machine=SLOW, policy=found.policy)
    least = planned(schedule, SLOW, budget=budgets[0])
    assert least.host > 0 and least.step_ms > everything.step_ms


def test_a_step_takes_the_ticks_of_its_schedule():
    """Its bubble is the schedule's."""
    useful = []
    for microbatches in (4, 8):
        schedule = Schedule(2, 1, microbatches)
        step, args = staged(schedule)
        ms = predict(step, *args, machine=H200, policy=Policy({"*": "save"})).computing_ms
        useful.append(ms * (1 - schedule.bubble) / microbatches)
    assert useful[0] == pytest.approx(useful[1], rel=0.02)


def test_weights_are_gathered_within_a_stage_as_without_stages():
    """Pipeline stages do not divide a layer's weights, FSDP does."""
    constrained = lambda x, w: layer(lax.with_sharding_constraint(x, P("fsdp")), w)

    def found(stages, **sizes):
        step, args = staged(Schedule(stages, 1, 4), 8 // stages, constrained, mesh=auto_mesh(**sizes), spec=("fsdp",))
        (scan,) = scans_in(jax.make_jaxpr(step)(*args), 4 * stages)
        saved = predict(step, *args, machine=H200, policy=Policy({"*": "save"}))
        return list(weights_of(scan, args)), scan.devices, saved.memory

    (on_stages, devices, memory), (without, same, _) = found(2, stage=2, fsdp=4), found(1, stage=1, fsdp=4)
    assert on_stages == without and devices == same == 4 and [w.parts for w in on_stages] == [4, 4]
    # A slot of 4 layers, and the sums of gradients, are each device's part.
    assert memory.residuals == 4 * 4 * (STREAM + WIDE) // 4
    of_stage = 2 * 4 * 2 * D * H // 4
    assert memory.arguments == of_stage + 2 * 4 * ROWS * D and memory.other >= of_stage


@pytest.mark.parametrize("schedule", [Schedule(2, 1, 4), Schedule(2, 2, 3)])
def test_neighbours_exchange_on_the_link(schedule):
    """After each tick, the stream of the one that computed it, and its cotangents."""
    step, args = staged(schedule)

    def ms(gb_s):
        link = Link(2, (1, 2**40), (1e12, 1e12), (1e12, 1e12), (gb_s, gb_s))
        return predict(step, *args, machine=dataclasses.replace(H200, link=link), policy=Policy()).computing_ms

    assert ms(1.0) - ms(1e12) == pytest.approx(1e3 * 2 * schedule.forward_stop * STREAM / 1e9, rel=1e-6)


def test_a_scan_beside_the_stages_is_not_planned():
    mesh = auto_mesh(stage=2)

    def loss(w, x):
        x = scan(layer, x, jax.tree.map(lambda w: w[:3], w), policy=ALL, strict=False)[0]
        return jnp.mean(scan(layer, x, w, policy=ALL, strict=False)[0].astype(jnp.float32))

    def step(w, xs):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return accumulate(loss, stages="stage")(w, xs)

    of = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="belongs to no pipeline stage beside one"):
        plan(step, {"in": of(4, D, H), "out": of(4, H, D)}, of(2, ROWS, D), budget=EVERYTHING, machine=H200)


def test_a_loop_over_ticks_costs_what_a_scan_does():
    """XLA does not know how often it runs; those who read the trace do."""
    x, w = jnp.zeros((ROWS, D)), jnp.zeros((D, D))
    tick = lambda i, x: jnp.tanh(x @ w) * i
    of = lambda f: cost(jax.make_jaxpr(f)(x).jaxpr, H200)
    looped = of(lambda x: repeated(3, tick, x))
    assert looped == of(lambda x: lax.fori_loop(0, 3, tick, x)) and not looped.unknown
    assert looped.seconds > 2.9 * of(lambda x: tick(1, x)).seconds
