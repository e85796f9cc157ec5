"""plan(): estimates by hand, the search and the choice on drawn costs, and its promises on small steps."""

import dataclasses
import functools
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from common import ROOT, SHORT, auto_mesh
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import multihost_utils

from jaxoffload import Policy, PolicyError, Schedule, accumulate, checkpoint, plan, residuals, scan, tag, verify
from jaxoffload._engine.cost.cost import cost
from jaxoffload._text import readable
from jaxoffload._tracing import Trial
from jaxoffload.proof import Bus, Machine, Memory, NothingFits, predict
from jaxoffload.proof._command import main
from jaxoffload.proof._plan import plan as planning
from jaxoffload.proof._plan.choices import Choice, curve_of, estimated, looked_at
from jaxoffload.proof._plan.chosen import chosen
from jaxoffload.proof._plan.costs import LayerCost, Step, priced
from jaxoffload.proof._plan.names import UNTAGGED, pattern_of, policy_of
from jaxoffload.proof._predict.scans import Stack, scans_in, within
from jaxoffload.proof._program.results import trace_of
from models import train as training
from models.train import main as train

pytestmark = pytest.mark.claim("plan")

H200 = Machine.from_json((ROOT / "machines/h200.json").read_text())
# Matmuls of toy layers are worth keeping, as those of real ones are: copying fc1 takes less time than making it again.
TOY = dataclasses.replace(H200, gemm_tflops=1.0, gemms=None)
SLOW = dataclasses.replace(TOY, one=Bus(0.5, 0.4, 0.3))  # GB/s: copies are exposed
ALL = Policy(min_offload_bytes=0)
EVERYTHING = 10 * 2**30


def layer(x, w):
    x = tag(x, "layer_input")
    fc1 = tag(x @ w["in"], "fc1")
    act = tag(jnp.tanh(fc1), "act")
    return x + tag(act @ w["out"], "fc2"), None


def loss(w, x, policy=Policy()):  # noqa: B008
    return jnp.mean(scan(layer, x, w, policy=policy, strict=False)[0] ** 2)


LAYERS, B, D, H = 6, 64, 32, 128
STREAM, WIDE = 4 * B * D, 4 * B * H
KIB = 2**10


def of(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


ARGS = {"in": of(LAYERS, D, H), "out": of(LAYERS, H, D)}, of(B, D)


def test_a_pattern_of_fixed_that_matches_nothing_is_refused():
    with pytest.raises(PolicyError, match=r"^residuals\['hh'\]: matches no tagged value; the names"):
        planned(fixed=Policy({"hh": "save"}))


def planned(*args, f=loss, machine=TOY, fixed=ALL, **budgets):
    return plan(f, *(args or ARGS), machine=machine, fixed=fixed, **{"budget": EVERYTHING, **budgets})


def least(*args, **how):
    """The plan for as little memory as there can be."""
    with pytest.raises(NothingFits) as caught:
        planned(*args, budget=1, **how)
    return planned(*args, budget=caught.value.least, **how)


def moves(policy):
    return "offload" in dict(policy.residuals).values()


# ---- estimates, by hand ----

FC1, ACT = ("fc1",), ("act",)
NONE, BOTH = frozenset(), frozenset({FC1, ACT})
BUS = Bus(d2h=100e-9, h2d=50e-9, together=25e-9)  # 100, 50 and 25 bytes per second
MOST = LayerCost(forward=2.0, backward=4.0, stacking=0.0, device=10, once=3, movable={FC1: 300, ACT: 100})


def step_of(*stacks, **fields):
    base = {"seconds": 10.0, "other": 1500, "resident": 1, "bus": BUS, "copying": 0.0}
    return Step(**base | {"stacks": stacks} | fields)


def outcome_of(step, costs, moved, layers):
    """Seconds, bytes on the device besides those of the step, and on the host."""
    found = estimated(step, BOTH, costs, frozenset(moved), layers)
    return found.ns / 1e9, found.device - step.other, found.host


def test_what_a_scan_costs_by_hand():
    step = step_of(Stack(4))
    assert outcome_of(step, (MOST,), [], 0) == (10 + 4 * 6, 4 * 410 + 3, 0)
    # fc1 of the first two layers: three iterations copy, the first one a padding row. 3 s to the host, 6 s back.
    waits = (3 - 2) + (6 - 4)
    assert outcome_of(step, (MOST,), [FC1], 2) == (34 + 3 * waits, 2 * 110 + 2 * 410 + 3 + 300, 3 * 300)
    assert outcome_of(step, (MOST,), [FC1], 4) == (34 + 4 * waits, 3 * 110 + 410 + 3 + 300, 4 * 300)  # one is resident
    none_is = dataclasses.replace(step, resident=0)
    assert outcome_of(none_is, (MOST,), [FC1], 4) == (34 + 4 * waits, 4 * 110 + 3 + 300, 5 * 300)
    less = MOST._replace(movable={})  # another scan beside it
    assert outcome_of(step_of(Stack(4), Stack(2)), (MOST, less), [], 0)[1] == 4 * 410 + 2 * 10 + 2 * 3


def test_what_interleaved_microbatches_cost_by_hand():
    step = step_of(Stack(layers=4, runs=3, microbatches=3))
    assert outcome_of(step, (MOST,), [], 0) == (10 + 3 * 24, 4 * 410 + 3, 0)  # one after another
    # Beside each other twice: 300 bytes take 12 s, and two passes 6. Alone: 3 s beside 2, and 6 beside 4.
    found = outcome_of(step, (MOST,), [FC1], 3)
    assert found == (82 + 4 * (2 * 6 + 1 + 2), 2 * (3 * 110 + 410 + 3) + 300, 2 * 4 * 300)


@pytest.mark.claim("plan-stages")
def test_what_stages_cost_by_hand():
    """Two stages with two chunks of four layers: a tick has 4 layers."""
    schedule = Schedule(2, 2, 4)
    assert (schedule.forward_stop, schedule.ticks, schedule.chunks, schedule.slots) == (9, 13, 4, 8)
    step = step_of(Stack(4, 9, schedule=schedule), resident=3)
    assert outcome_of(step, (MOST,), [], 0) == (10 + 9 * 24, 8 * (4 * 410 + 3), 0)
    # fc1 of all 16 layers, although a policy says that 3 are resident.
    lone, beside = (3 - 2) + (6 - 4), 12 - 6
    seconds, device, host = outcome_of(step, (MOST,), [FC1], 16)
    assert seconds == 226 + 4 * (4 * lone + 5 * beside)
    assert (device, host) == (8 * (4 * 110 + 3) + 300, 8 * 5 * 300)
    # Of half of them: three iterations copy.
    seconds, device, host = outcome_of(step, (MOST,), [FC1], 8)
    assert seconds == 226 + 3 * (4 * lone + 5 * beside)
    assert (device, host) == (8 * (4 * 410 - 2 * 300 + 3) + 300, 8 * 3 * 300)


@pytest.mark.claim("plan-stages")
@pytest.mark.parametrize("layers, counts", [(1, {0}), (2, {0, 8}), (5, {0, 8, 12, 16, 20})])
def test_no_chunk_offloads_a_single_layer(layers, counts):
    step = step_of(Stack(layers, 9, schedule=Schedule(2, 2, 3)))
    curve = curve_of(step, {frozenset(MOST.movable): (MOST,)}, 2**40)
    assert {choice.layers for choice in curve} <= counts and (layers == 1 or len(curve) > 2)


@pytest.mark.claim("plan-costs")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_layer_costs_what_it_runs_and_copies_of_what_it_keeps(sharded):
    """Into a stack, and out of it for a kernel: `a` is what a matmul takes in the backward pass, `b` is not."""
    mesh, rows = auto_mesh(data=2), jax.sharding.PartitionSpec("data")
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, jax.sharding.PartitionSpec()), out_specs=rows)

    def layer(x, w):
        a = tag(jnp.sin(x @ w["in"]), "a")
        b = tag(a @ w["out"], "b")
        return x + jnp.tanh(b), None

    run = lambda x, w: scan(layer, x, w, policy=Policy(), strict=False)[0]
    f = lambda w, x: jnp.sum((mapped(run) if sharded else run)(x, w))
    args, rates = ({"in": of(3, 64, 256), "out": of(3, 256, 64)}, of(32, 64)), dataclasses.replace(H200, fused_gb_s=1.0)
    _, names, costs = priced(f, args, ALL, rates)
    everything = names.least | names.free
    (found,) = costs(everything)
    policy = policy_of(everything, frozenset(), names.recomputable, ALL)
    (scan_,) = scans_in(Trial(policy).traced(trace_of)("plan", f, args)[0], 1)
    passes = scan_.layer.forward, within(scan_.shard_maps, scan_.layer.backward)
    forward, backward = (cost(of, rates).seconds for of in passes)
    carry, a, b = (4 * size // (2 if sharded else 1) for size in (32 * 64, 32 * 256, 32 * 64))
    assert (found.forward, found.backward) == (forward, backward)
    assert 1e9 * found.stacking == pytest.approx(2 * (carry + a + b) + 2 * (carry + a))
    assert found.movable == {("a",): a, ("b",): b} and found.device == carry  # which has no name


@pytest.mark.claim("plan-costs")
@pytest.mark.parametrize("dots", ["save", "offload"])
def test_untagged_matmuls_are_kept_as_is_fixed(dots):
    layer = lambda x, w: (jnp.sin(tag(jnp.tanh(x @ w["in"]), "act") @ w["out"]), None)
    f = lambda w, x: jnp.sum(scan(layer, x, w, policy=Policy(), strict=False)[0])
    _, names, costs = priced(f, ARGS, dataclasses.replace(ALL, dots=dots), H200)
    (found,) = costs(names.least | names.free)
    assert found.movable == {("act",): WIDE} | ({UNTAGGED: STREAM} if dots == "offload" else {})
    assert (UNTAGGED in names.moved) == (dots == "offload")


def test_a_byte_that_moves_is_read_once_and_written_once_by_estimates_too():
    there_and_back = lambda x: jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device)
    rates = dataclasses.replace(H200, fused_gb_s=None)
    step, *_ = priced(loss, ARGS, ALL, rates)
    one_mib = jax.ShapeDtypeStruct((2**20,), jnp.uint8)
    assert step.copying * 2**20 == pytest.approx(cost(jax.make_jaxpr(there_and_back)(one_mib), rates).seconds)


# ---- the search and the choice, on drawn costs ----


def drawn_search(seed):
    """A step with up to five units and two stacks, in which costs are closures: a unit saves what it needs, too; the
    least set of names, the others, what a set costs, and the dice."""
    dice = random.Random(seed)
    units = [(f"u{i}",) for i in range(dice.randint(1, 5))]
    stacks = []
    for _ in range(dice.randint(1, 2)):
        microbatches = dice.choice([1, 1, 2, 4])
        stacks.append(Stack(dice.randint(1, 6), microbatches * dice.randint(1, 2), microbatches))
    least = frozenset(units[:1]) if dice.random() < 0.5 else frozenset()
    size = {u: dice.randint(0, 400) for u in units}
    seconds = {u: dice.uniform(0, 2) for u in units}
    needs = {u: dice.sample(units[:i], dice.randint(0, i)) for i, u in enumerate(units)}

    def closure(units, kept):
        again = set()
        for u in units:
            if u not in kept | again:
                again |= {u} | closure(needs[u], kept)
        return again

    def evaluate(kept):
        again = sum(seconds[u] for u in closure(units, kept))
        movable = {u: size[u] for u in kept}
        return (LayerCost(3.0, 5.0 + again, 0.0, 20, 1, movable),) * len(stacks)

    step = step_of(*stacks, resident=dice.randint(0, 2))
    return step, least, frozenset(units) - least, evaluate, dice


def drawn_curve(seed, host_budget=10**9, on_host=0):
    step, least, free, evaluate, dice = drawn_search(seed)
    step = dataclasses.replace(step, on_host=on_host)
    table = looked_at(least, free, evaluate, step.stacks)
    return curve_of(step, table, host_budget), step, table, dice


def fastest(curve, limit):
    return min((c for c in curve if c.device <= limit), key=lambda c: (c.ns, c.host), default=None)


@pytest.mark.parametrize("seed", range(10))
def test_no_choice_that_is_looked_at_beats_the_curve(seed):
    """By brute force, one at a time."""
    curve, step, table, dice = drawn_curve(seed, host_budget=4000, on_host=1000)
    most = max(stack.layers for stack in step.stacks)
    leaves_two = lambda n: step.resident < 2 and any(stack.layers - n == 2 for stack in step.stacks)
    counts = [n for n in range(most + 1) if n == 0 or not leaves_two(n)]
    for _ in range(100):
        kept = dice.choice(list(table))
        moved = [u for u in kept if dice.random() < 0.5]
        seconds, device, host = outcome_of(step, table[kept], moved, dice.choice(counts))
        if host <= 3000:
            best = fastest(curve, step.other + device)
            assert best and best.ns <= round(1e9 * seconds) + 1
    assert all(c.host <= 3000 for c in curve)


def guessed(choice, error=0, slower=1.0):
    """What `predict` would say of a choice."""
    return SimpleNamespace(
        memory=Memory(0, 0, choice.device + error), host=choice.host, step_ms=slower * choice.ns / 1e6
    )


@pytest.mark.claim("plan-promises")
@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_that_fits_is_chosen(seed):
    """By predictions that are the estimates: then more budget is never slower, and what fits moves nothing."""
    curve, _, _, dice = drawn_curve(seed)
    predicted = functools.cache(guessed)
    before = float("inf")
    for limit in sorted({c.device for c in curve} | {dice.randint(1500, 20_000) for _ in range(10)}):
        sizes = {}
        choice = chosen(curve, limit, 10**9, predicted, lambda choice: choice.device, sizes)
        if limit < curve[0].device:
            assert choice is None and curve[0] in sizes and all(size > limit for size in sizes.values())
            continue
        unmoved = [c for c in curve if not c.moved and c.device <= limit and c.ns <= 1.01 * fastest(curve, limit).ns]
        assert choice.ns == min(unmoved or [fastest(curve, limit)], key=lambda c: c.ns).ns
        assert choice.device <= limit and choice.ns <= 1.01 * before
        before = min(before, choice.ns)
    assert not choice.moved


@pytest.mark.claim("plan-compiled")
@pytest.mark.parametrize("gain, compiled", [(0.0029, 1), (0.0031, 2)])
def test_no_further_choice_is_compiled_for_a_small_gain(gain, compiled):
    """XLA plans less than is predicted, so that a faster one fits, too."""
    unit = frozenset({("a",)})
    slower = Choice(10**9, 1000, 10, unit, unit, 2)
    faster = Choice(round((1 - gain) * 10**9), 1050, 10, unit, unit, 2)
    sizes = {}
    choice = chosen([slower, faster], 1000, 10**9, functools.cache(guessed), lambda c: c.device - 100, sizes)
    assert len(sizes) == compiled and choice is [slower, faster][compiled - 1]


@pytest.mark.claim("plan-promises")
@pytest.mark.parametrize("seed", range(20))
def test_no_budget_is_left_unused_where_all_but_the_smallest_take_less_than_estimated(seed):
    curve, _, _, dice = drawn_curve(seed)
    less, limit = dice.randint(100, 1000), dice.randint(curve[0].device, curve[-1].device)
    predicted = functools.cache(lambda choice: guessed(choice, 0 if choice is curve[0] else -less))
    choice = chosen(curve, limit, 10**9, predicted, lambda choice: predicted(choice).memory.total, {})
    if any(c.device <= limit for c in curve[1:]):
        assert choice.ns <= 1.01 * fastest(curve, limit + less).ns


@pytest.mark.claim("plan-compiled")
@pytest.mark.parametrize("seed", range(20))
def test_what_is_chosen_fits_by_xlas_plan(seed):
    """With an XLA whose plans differ from predictions by up to 20 %, and predictions of times by up to 3 %."""
    curve, _, _, dice = drawn_curve(seed)
    limit = dice.randint(curve[0].device, curve[-1].device + 200)
    error = {choice: dice.uniform(0.8, 1.2) for choice in curve}
    slower = {choice: dice.uniform(1, 1.03) for choice in curve}
    predicted = functools.cache(lambda choice: guessed(choice, slower=slower[choice]))
    xla = lambda choice: int(choice.device * error[choice])
    sizes = {}
    choice = chosen(curve, limit, 10**9, predicted, xla, sizes)
    assert sizes == {c: xla(c) for c in sizes}
    if choice is None:
        assert min(sizes.values()) > limit
    else:
        fastest_sized = min(predicted(c).step_ms for c, size in sizes.items() if size <= limit)
        assert sizes[choice] <= limit and predicted(choice).step_ms <= 1.01 * fastest_sized
    # One that is always as wrong is corrected at once.
    sizes = {}
    choice = chosen(curve, limit, 10**9, functools.cache(guessed), lambda choice: choice.device + 100, sizes)
    best = fastest(curve, limit - 100)
    assert (choice is None) == (best is None) and (choice is None or choice.ns <= 1.01 * best.ns)
    assert choice is None or len(sizes) <= 4


@pytest.mark.parametrize("seed", [30, 173, 218, 229, 240, 332, 360])  # in which many choices lie in between
def test_what_predict_says_of_memory_counts_where_estimates_are_far_off(seed):
    """Without XLA: the more bytes, the further off."""
    curve, _, _, dice = drawn_curve(seed)
    slope, offset = dice.uniform(-0.25, 0.25), dice.randint(-800, 800)
    guess = lambda choice: guessed(choice, int(slope * (choice.device - curve[0].device)) + offset)
    predicted, limit = functools.cache(guess), dice.randint(curve[0].device, curve[-1].device)
    bytes_of = lambda choice: predicted(choice).memory.total
    choice = chosen(curve, limit, 10**9, predicted, bytes_of, {})
    best = min((c for c in curve if bytes_of(c) <= limit), key=lambda c: c.ns, default=None)
    assert (choice is None) == (best is None) and (choice is None or choice.ns <= 1.01 * best.ns)


@pytest.mark.parametrize("seed", [5, 9, 11, 58, 118])  # in which another one moves something, too
def test_what_xla_plans_for_some_layers_says_little_of_others(seed):
    """XLA plans far more for those that move in as many layers as the fastest does."""
    curve, _, _, dice = drawn_curve(seed)
    limit = dice.randint(curve[0].device, curve[-1].device)
    of = fastest(curve, limit).layers
    xla = lambda choice: choice.device + 10_000 * (bool(choice.host) and choice.layers == of)
    choice = chosen(curve, limit, 10**9, functools.cache(guessed), xla, {})
    best = fastest([c for c in curve if xla(c) <= limit], limit)
    assert (choice is None) == (best is None) and (choice is None or choice.ns <= 1.01 * best.ns)


# ---- small steps ----


@functools.cache
def toy(kib, machine=TOY, host_budget=EVERYTHING):
    return planned(machine=machine, budget=kib * KIB, host_budget=host_budget)


def kept_by(policy):
    """The bytes that layers keep on the device and on the host under a policy, from the table."""
    table = residuals(functools.partial(loss, policy=policy), *ARGS)
    rows = [row for row in table if row.names or row.reason == "the carry of a scan"]
    return [sum(row.bytes for row in rows if row.state == state) for state in ("saved", "offloaded")]


@pytest.mark.claim("plan-promises")
@pytest.mark.parametrize(
    "machine, host_budget", [pytest.param(TOY, EVERYTHING, marks=pytest.mark.slow), (SLOW, EVERYTHING), (TOY, 0)]
)
def test_promises_hold(machine, host_budget):
    recomputed = predict(loss, *ARGS, machine=machine, policy=dataclasses.replace(ALL, residuals={}))
    before = float("inf")
    for kib in (520, 560, 600, 700, 800):
        if kib == 520 and not host_budget:
            continue
        found = toy(kib, machine, host_budget)
        assert found.bytes == found.memory.total <= found.budget == kib * KIB and found.host <= host_budget
        assert kept_by(found.policy) == [found.memory.residuals, found.host]
        assert found.prediction == predict(loss, *ARGS, machine=machine, policy=found.policy)
        assert found.step_ms <= 1.01 * before
        before = found.step_ms
        if found.budget >= recomputed.memory.total:
            assert found.step_ms <= 1.01 * recomputed.step_ms
        assert moves(found.policy) == (found.host > 0)
    assert not found.host and kept_by(found.policy)[0] == LAYERS * (STREAM + WIDE)  # all fits: fc1 is not needed
    assert str(planned(machine=machine, budget=kib * KIB, host_budget=host_budget)) == str(found)


@pytest.mark.claim("plan-promises")
def test_state_on_the_host_leaves_less_of_its_budget():
    w, x = ARGS
    on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = jax.device_put(jnp.zeros(256 * KIB, jnp.uint8), on_host)
    step = lambda w, state, x: (jax.tree.map(jnp.subtract, w, jax.grad(loss)(w, x)), state)
    of = lambda host_kib: planned(w, state, x, f=step, budget=550 * KIB, host_budget=host_kib * KIB)
    assert [of(256 + more).host // KIB - 256 for more in (240, 239, 32)] == [240, 32, 32]  # fc1 moves, too, or not
    with pytest.raises(NothingFits, match=r"the smallest choice needs 552\.01 KiB"):  # of those that move nothing
        of(256 + 15)
    with pytest.raises(NothingFits, match=r"and host_budget 200\.00 KiB: .* 256\.00 KiB of pinned host memory"):
        of(200)


@pytest.mark.claim("plan-promises")
def test_a_budget_that_nothing_fits_is_one_error():
    says = r"budget 1.00 KiB per device: the smallest choice needs .*KiB; estimated are .*KiB of gradients and .* argum"
    with pytest.raises(NothingFits, match=says) as found:
        planned(budget="1KiB")
    assert planned(budget=found.value.least).bytes == found.value.least
    with pytest.raises(NothingFits):
        planned(budget=found.value.least - 1)


@pytest.mark.parametrize("kib", [*range(500, 552, 4)])
def test_the_error_says_which_host_budget_would_do(kib):
    """If one would, of those that are too small."""
    for host_kib in (0, 8, 32):
        try:
            toy(kib, host_budget=host_kib * KIB)
        except NothingFits as why:
            _, _, said = str(why).partition("; another choice is predicted to fit with host_budget ")
            budget, _, instead = said.partition(" instead of ")
            if said:
                assert instead.startswith(readable(host_kib * KIB)) and planned(budget=kib * KIB, host_budget=budget)
            else:
                with pytest.raises(NothingFits):
                    toy(kib)


def test_microbatches_have_two_sets_of_stacks():
    xs = of(4, *ARGS[1].shape)
    fixed = dataclasses.replace(ALL, residuals={"fc1": "offload"})
    f = lambda w, xs: accumulate(loss)(w, xs)
    found = least(ARGS[0], xs, f=f, fixed=fixed)
    assert found.host == 2 * LAYERS * (STREAM + WIDE) and found.policy.offload_layers == "all"
    assert planned(ARGS[0], xs, f=f).host == 0


def test_a_jitted_step_is_traced_under_the_policies_that_are_tried():
    """And writes its state over the old one."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        gradient = jax.grad(loss)(w, x)
        return jax.tree.map(lambda w, g: w - g, w, gradient), gradient["in"].sum()

    of_step, of_loss = planned(f=step), toy(EVERYTHING // KIB)
    assert of_step.policy == of_loss.policy and of_step.memory.residuals == of_loss.memory.residuals
    assert of_step.memory.other <= of_loss.memory.other + 4 * LAYERS * D * H


def test_what_has_no_backward_pass_keeps_nothing():
    """A teacher under `stop_gradient`, and a step that needs a loss without its gradient."""
    student = lambda w, x: loss(w, x) ** 2
    distilled = lambda w, x: student(w, x) + jax.lax.stop_gradient(loss(w, 2 * x))
    in_microbatches = lambda w, x: accumulate(distilled)(w, jnp.stack([x, x]))

    def step(w, x):
        before, _ = jax.vjp(loss, w, 2 * x)
        return before, jax.tree.map(jnp.subtract, w, jax.grad(student)(w, x))

    every = student, distilled, step, in_microbatches
    assert {planned(f=f).memory.residuals for f in every} == {LAYERS * (STREAM + WIDE)}


def test_the_claims_hold_for_what_is_planned():
    w, x = jax.tree.map(lambda a: 0.1 * jnp.ones((3, *a.shape[1:]) if a.ndim > 2 else a.shape, a.dtype), ARGS)
    fixed = dataclasses.replace(ALL, residuals={"fc1": "offload"})
    found = least(w, x, fixed=fixed)
    assert found.host > 0
    verification = verify(functools.partial(loss, policy=found.policy), w, x)
    assert verification.ok, verification


# ---- names ----


@pytest.mark.slow
def test_names_are_patterns_that_reproduce_the_plan():
    """Foreign names may have any character, one name may end as another one does, and a value may have two."""

    def layer(x, w):
        a = checkpoint_name(x @ w, "a[0]* b?")
        b = tag(jnp.tanh(a), "b")
        c = tag(tag(jnp.sin(b @ w.T) @ w, "moe/b"), "second")
        gate, up = tag({"gate": c * 2, "up": jnp.cos(c)}, "fc1").values()
        return (jnp.tanh(gate) * up) @ w.T, None

    f = lambda w, x, policy=ALL: jnp.sum(scan(layer, x, w, policy=policy, strict=False)[0])
    args = of(LAYERS, D, H), of(B, D)
    smallest = least(*args, f=f).budget
    for budget in (smallest, smallest + LAYERS * WIDE, EVERYTHING):
        found = planned(*args, f=f, budget=budget)
        table = residuals(functools.partial(f, policy=found.policy), *args)
        rows = [row for row in table if row.names or row.reason == "the carry of a scan"]
        assert sum(row.bytes for row in rows if row.state == "saved") == found.memory.residuals
        assert not found.policy.unmatched([name for row in table for name in row.names])
    assert pattern_of("a[0]* b?") == "a[[]0][*]?b[?]"
    spaced = policy_of(frozenset({("a b",)}), frozenset(), frozenset({("a-b",), ("a_b",)}), Policy())
    assert [spaced.match(name)[1] for name in ("a b", "a-b", "a_b")] == ["offload", "recompute", "recompute"]


def test_fixed_decisions_stay():
    fixed = dataclasses.replace(ALL, residuals={"fc1": "recompute", "act": "offload"}, resident_layers=2)
    found = least(fixed=fixed)
    table = residuals(functools.partial(loss, policy=found.policy), *ARGS)
    assert "fc1" not in {row.names[0] for row in table if row.names and row.state != "recomputed" and row.layers}
    assert dict(found.policy.residuals)["act"] == "offload" and found.host > 0
    assert found.policy.resident_layers == 2 and found.policy.min_offload_bytes == 0
    saved = planned(fixed=dataclasses.replace(ALL, residuals={"fc1": "save"}), budget=700 * KIB + LAYERS * WIDE // 2)
    assert dict(saved.policy.residuals)["fc1"] == "save"
    # Small values are not offered to the host.
    assert not moves(least(fixed=Policy()).policy)  # 1 MiB


# ---- text and errors ----


def test_the_text_and_the_yaml_are_the_plan():
    found = toy(600)
    fields = yaml.safe_load(found.to_yaml())["remat"]
    assert Policy(**fields) == found.policy
    first, *_ = str(found).splitlines()
    assert first == found.summary == f"{found.prediction.summary}; memory is estimated from shapes, usually within 20%"
    assert found.to_yaml().rstrip() in str(found)
    asked = dataclasses.replace(found, compiled=12345)
    assert asked.bytes == 12345 and asked.summary.endswith("; memory is as XLA plans it")


@pytest.mark.parametrize("gpus, says", [(1, True), (8, False)])
def test_a_plan_says_if_more_gpus_copy_than_were_measured(gpus, says):
    weights, x = ARGS
    rows = jax.sharding.NamedSharding(auto_mesh(data=4), jax.sharding.PartitionSpec("data"))
    fixed = dataclasses.replace(ALL, residuals={"fc1": "offload"})
    found = least(weights, x.update(sharding=rows), machine=dataclasses.replace(TOY, gpus=gpus), fixed=fixed)
    said = f" (the bus was measured with {gpus} GPU(s) copying at once)"
    assert found.host and found.prediction.summary.endswith(f"H200, predicted{said if says else ''}")


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"budget": "70Gib/s"}, ValueError, "plan: budget '70Gib/s' is not a size"),
        ({"host_budget": -1}, ValueError, "plan: host_budget -1 is not a size"),
        ({"machine": "no/such.json"}, ValueError, "plan: machine 'no/such.json'"),
        ({"machine": None}, ValueError, "plan: machine None is neither a Machine nor a file of one"),
        ({"fixed": {"fc1": "save"}}, TypeError, "plan: fixed must be"),
        ({"compile": "no"}, TypeError, "plan: compile must be True or False, got 'no'"),
        ({"budget": None}, ValueError, "plan: budget: no GPU here"),
    ],
)
def test_what_is_wrong_is_said(wrong, error, says):
    with pytest.raises(error, match=says):
        planned(**wrong)


def test_what_is_not_planned_is_said():
    with pytest.raises(ValueError, match=r"no jaxoffload\.scan"):
        planned(jnp.ones(3), f=jnp.sum)

    def outer(x, w):
        return scan(layer, x, w, policy=Policy(), strict=False)[0], None

    w, x = ARGS
    stacked = jax.tree.map(lambda a: of(2, *a.shape), w)
    nested = lambda w, x: jnp.sum(scan(outer, x, w, policy=Policy(), strict=False)[0])
    with pytest.raises(NotImplementedError, match="inside a layer of another scan"):
        planned(stacked, x, f=nested)
    for how in (jax.checkpoint, functools.partial(checkpoint, policy=Policy(), strict=False)):
        again = lambda w, x, how=how: jnp.sum(how(lambda w, x: outer(x, w)[0])(w, x))
        with pytest.raises(NotImplementedError, match="inside a checkpoint or inside a layer"):
            planned(w, x, f=again)


# ---- memory by XLA, the host's, and other processes ----


@pytest.mark.claim("plan-compiled")
def test_xla_is_asked_by_default_where_arguments_are_on_gpus():
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    somewhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda a: a.update(sharding=somewhere), ARGS)
    assert planned(*args).compiled is None and toy(600).compiled is None


@pytest.mark.claim("plan-compiled")
def test_what_xla_plans_decides(monkeypatch):
    """What moves nothing is compiled, too, where all else takes more than was estimated."""
    guess = lambda policy: predict(loss, *ARGS, machine=TOY, policy=policy).memory.total
    asked = []

    def size(f, args, policy):
        asked.append(policy)
        return 2 * guess(policy) if moves(policy) else guess(policy) - 1

    monkeypatch.setattr(planning, "are_on_gpus", lambda args: True)
    monkeypatch.setattr(planning, "compiled_bytes", size)
    found = planned(budget=600 * KIB)
    assert found.compiled == found.bytes == found.memory.total - 1 and found.host == 0
    assert any(map(moves, asked)) and len(asked) == len(set(map(str, asked))) <= 8
    with pytest.raises(NothingFits, match=r"needs .* by XLA's plan; estimated are"):
        planned(budget=300 * KIB)
    count = len(asked)
    assert planned(budget=600 * KIB, compile=False).policy == toy(600).policy and len(asked) == count
    # Where it does not say, a guess stands.
    monkeypatch.setattr(planning, "compiled_bytes", lambda *_: None)
    found = planned(budget=600 * KIB)
    assert found.compiled is None and found.policy == toy(600).policy


def test_the_pinned_pool_is_the_default_of_the_host(monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0.0001")
    found = planned(budget=560 * KIB)
    assert found.host <= found.host_budget == int(0.0001 * 2**30)


@pytest.mark.parametrize("here, gpus, share", [(1, 8, 8), (8, 8, 8), (4, 0, 4)])
def test_a_process_has_its_gpus_share_of_the_machines_memory(here, gpus, share, monkeypatch):
    """However many of the machine's GPUs it sees; the driver may not list them."""
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1000000")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_device_count", lambda: here)
    driver, glob = Path("/proc/driver/nvidia/gpus"), Path.glob
    listed = lambda path, pattern: iter([path] * gpus) if path == driver else glob(path, pattern)
    monkeypatch.setattr(Path, "glob", listed)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert planning._host_budget(None) == memory // share


def test_all_processes_plan_with_what_the_first_has(monkeypatch):
    sent = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda x: sent.append(np.asarray(x)) or sent[-1])
    first = planned(machine=SLOW, budget=560 * KIB, host_budget=EVERYTHING)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda x: sent.pop(0))
    second = planned(machine=TOY, budget=EVERYTHING, host_budget=0)
    assert str(second) == str(first) and not sent and first.budget == 560 * KIB


# ---- the command line and the training program ----

MACHINE = str(ROOT / "machines/h200.json")
TINY = str(ROOT / "configs/tiny.yaml")


def made():
    """What a user's MODULE:FUNCTION returns."""
    return loss, ARGS


def test_the_command_line_prints(capsys):
    command = ["plan", "test_plan:made", "--machine", MACHINE]
    assert main([*command, "--budget", "1GiB", "--host-budget", "0"]) == 0
    said = capsys.readouterr().out
    assert " of 1.00 GiB" in said and "0 B of 0 B" in said and "remat:" in said
    for budget, says in (("1GB/s", "budget '1GB/s' is not a size"), ("1KiB", "smallest choice needs")):
        assert main([*command, "--budget", budget]) == 2
        error = capsys.readouterr().err
        assert says in error and "Traceback" not in error


@pytest.mark.slow
def test_a_config_has_a_budget_instead_of_decisions(capsys):
    """The file's own patterns stay."""
    assert train([TINY, "--report", "remat.budget=1GiB", f"remat.machine={MACHINE}", "remat.min_offload_bytes=0"]) == 0
    said = capsys.readouterr().out
    assert "ms per step" in said and "mlp/fc1.gate: offload" in said and "attn/q: save" in said
    assert "optimizer on the host" not in said
    less = [f"remat.machine={MACHINE}", "remat.min_offload_bytes=0", "remat.budget=105MiB"]
    assert train([TINY, "--report", *less]) == 0 and "optimizer on the host" in capsys.readouterr().out
    assert train([TINY, "--report", *less, "train.optimizer_on_host=false"]) == 2
    assert "the smallest choice needs 11" in capsys.readouterr().err
    assert train([TINY, "--report", "remat.budget=much", f"remat.machine={MACHINE}"]) == 2
    assert "'much' is not a size" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.claim("plan-of-a-run")
def test_a_run_prints_its_plan_which_is_the_same_each_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = [TINY, *SHORT, f"remat.machine={MACHINE}", f"train.out={tmp_path}", "model.vocab_size=300"]
    run += ["remat.budget=1GiB", "remat.residuals[attn/q]=recompute"]
    monkeypatch.setattr(training, "compile_step", lambda made: sys.exit("it begins"))
    said = []
    for _ in range(2):
        with pytest.raises(SystemExit, match="it begins"):
            train(run)
        said.append(capsys.readouterr().out)
    planned = [text[: text.index(" parameters, ")].rpartition("\n")[0] for text in said]
    assert planned[0] == planned[1] and "ms per step" in planned[0]
    for text in said:
        assert [line for line in text.splitlines() if line.startswith("attn/q ") and "recomputed" in line]
