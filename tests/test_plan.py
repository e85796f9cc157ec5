"""plan(): the choice by hand, its promises on drawn costs and drawn layers, and that it is what then happens."""

import dataclasses
import functools
import json
import os
import random
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml
from common import ROOT, SHORT, auto_mesh
from drawn_layers import draw
from jax.ad_checkpoint import checkpoint_name

from jaxoffload import Policy, accumulate, checkpoint, plan, residuals, scan, tag, verify
from jaxoffload.proof import Bus, Machine, NothingFits, fits
from jaxoffload.proof._command import main
from jaxoffload.proof._plan import plan as planning
from jaxoffload.proof._plan import search
from jaxoffload.proof._plan.choices import Choice, alone, fastest, undominated
from jaxoffload.proof._plan.compiled import refined
from jaxoffload.proof._plan.costs import Alone, LayerCost, Stack, Step
from jaxoffload.proof._plan.ends import wanted
from jaxoffload.proof._plan.patterns import pattern_of, policy_of
from jaxoffload.proof._plan.search import pool, searched
from models.loading import load
from models.planning import plan_of_run
from models.planning import planned as planned_config
from models.reading import ConfigError
from models.report import report
from models.sharding import abstract_mesh, make_mesh
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


def loss(w, x):
    return jnp.mean(scan(layer, x, w, policy=Policy(), strict=False)[0] ** 2)


def under(policy):
    """The same loss under a policy."""
    return lambda w, x: jnp.mean(scan(layer, x, w, policy=policy, strict=False)[0] ** 2)


LAYERS, B, D, H = 6, 64, 32, 128
STREAM, WIDE = 4 * B * D, 4 * B * H


def arrays(layers=LAYERS):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    return {"in": shape(layers, D, H), "out": shape(layers, H, D)}, shape(B, D)


def planned(*args, f=loss, machine=TOY, fixed=ALL, **budgets):
    return plan(f, *args, machine=machine, fixed=fixed, **{"budget": EVERYTHING, **budgets})


# ---- what a choice comes to, by hand ----

FC1, ACT = ("fc1",), ("act",)
NONE, BOTH = frozenset(), frozenset({FC1, ACT})


def step_of(*stacks, movable=BOTH, **fields):
    base = {"seconds": 10.0, "arguments": 1000, "other": 500, "elsewhere": 0, "may_stay": 0}
    bus = Bus(d2h=100e-9, h2d=50e-9, together=25e-9)  # 100, 50 and 25 bytes per second
    return Step(**base | {"resident": 1, "stacks": stacks, "bus": bus, "movable": movable} | fields)


LEAST = LayerCost(forward=2.0, backward=5.0, device=10, once=3, movable={}, working=50, staying=50)
MOST = LayerCost(forward=2.0, backward=4.0, device=10, once=3, movable={FC1: 300, ACT: 100}, working=70, staying=40)


def outcome_of(step, table, moved, layers, others="save", rest=None):
    kept = max(table, key=len)
    choice = Choice(0, 0, 0, kept, frozenset(moved), layers, others, kept if rest is None else rest)
    return alone(step, table, choice)


def test_what_a_scan_costs_by_hand():
    step, table = step_of(Stack(layers=4)), {NONE: (LEAST,), BOTH: (MOST,)}
    # All saved.
    out = outcome_of(step, table, [], 0)
    assert (out.ns, out.residuals, out.host, out.copied) == ((10 + 4 * 6) * 10**9, 4 * 410 + 3, 0, 0)
    assert out.device(step) == 1000 + 500 + 4 * 410 + 3 + 40
    # fc1 of the first two layers: three iterations copy, the first one a padding row. 3 s to the host, 6 s back.
    out = outcome_of(step, table, [FC1], 2)
    assert out.ns == (34 + 3 * ((3 - 2) + (6 - 4))) * 10**9
    assert (out.residuals, out.host, out.copied) == (4 * 410 + 3 - 2 * 300, 3 * 300, 3 * 300)
    assert out.working == 40  # the last two layers' 2 * 410 bytes are free when rows come back
    out = outcome_of(dataclasses.replace(step, resident=0), table, [FC1], 4)
    assert out.residuals == 4 * 110 + 3 and out.working == 70 + 300  # and what is in flight
    # Four iterations copy, and then nothing hides the last row.
    assert out.ns == (10 + 4 * 6 + 4 * ((3 - 2) + (6 - 4)) + 3 + 6) * 10**9 and out.copied == 5 * 300
    out = outcome_of(step_of(Stack(layers=1), resident=0), table, [FC1], 1)
    assert out.ns == (10 + 6 + 3 + 6) * 10**9 and out.copied == 300
    # The last layer keeps both; the one before it neither. The two copies of the last row are beside the next loop.
    out = outcome_of(step, table, [FC1, ACT], 2, "recompute", NONE)
    assert out.ns == (10 + 3 * 6 + 7 + 2 * ((4 - 2) + (8 - 4))) * 10**9
    assert out.residuals == 4 * 10 + 3 + 400 and out.host == out.copied == 3 * 400
    # Of four copies the loop waits for two.
    more = MOST._replace(movable={FC1: 200, ACT: 100, ("q",): 60, ("k",): 40})
    table = {NONE: (LEAST,), frozenset(more.movable): (more,)}
    step = step_of(Stack(layers=4), movable=frozenset(more.movable))
    out = outcome_of(step, table, more.movable, 2, "recompute", NONE)
    assert out.ns == (10 + 3 * 6 + 7 + 2 * ((4 - 2) + (8 - 4)) + (4 + 8) // 2) * 10**9
    out = outcome_of(step, table, more.movable, 1, "recompute", NONE)
    assert out.ns == (10 + 2 * 6 + 2 * 7 + (4 + 8) // 2) * 10**9 and out.copied == 400
    # A layer alone before another is no loop.
    out = outcome_of(dataclasses.replace(step, stacks=(Stack(layers=3),)), table, more.movable, 1, "recompute", NONE)
    assert out.ns == (10 + 2 * 6 + 7) * 10**9


def test_what_stays_on_the_device_is_read_in_its_stack_unless_a_kernel_takes_it():
    """If two rows go to the host, two more are in flight, in the places of the last layer's; and those that are read
    where they were have places."""
    ways = {
        "fused": lambda gate, up, down: (jax.nn.silu(gate) * up) @ down,
        "taken": lambda gate, up, down: (gate * up) @ down + gate @ down + up @ down,
    }
    of = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    weights = {"gate": of(8, 256, 1024), "up": of(8, 256, 1024), "down": of(8, 1024, 256)}
    fixed, grown = Policy({"gate": "offload", "up": "offload"}, min_offload_bytes=0), {}
    for way, mlp in ways.items():

        def layer(x, w, mlp=mlp):
            return x + mlp(tag(x @ w["gate"], "gate"), tag(x @ w["up"], "up"), w["down"]), None

        loss = lambda w, x, layer=layer: jnp.mean(scan(layer, x, w, policy=Policy(), strict=False)[0])
        make = lambda budget, loss=loss: planned(
            weights, of(4096, 256), f=jax.grad(loss), machine=H200, fixed=fixed, budget=budget
        )
        saves = make(EVERYTHING)
        moves = make(saves.curve[0].bytes)
        grown[way] = (moves.memory.working - saves.memory.working) / (2 * 4096 * 1024)
    assert grown["taken"] == 0 and 1 < grown["fused"] <= 2


def test_what_interleaved_microbatches_cost_by_hand():
    step = step_of(Stack(layers=4, runs=3, microbatches=3), may_stay=200)
    table = {NONE: (LEAST,), BOTH: (MOST,)}
    # Nothing moves: one after another.
    out = outcome_of(step, table, [], 0)
    assert (out.ns, out.residuals, out.other) == ((10 + 3 * 24) * 10**9, 4 * 410 + 3, 500)
    # Beside each other twice: 300 bytes take 12 s, and two passes 6. Alone: 3 s beside 2, and 6 beside 4. A layer may
    # keep 50 bytes, which is not enough.
    out = outcome_of(step, table, [FC1], 3)
    assert out.ns == int((82 + 4 * (2 * 6 + (3 - 2) + (6 - 4))) * 1e9)
    assert out.residuals == 2 * (4 * 410 + 3 - 3 * 300) and out.host == 2 * 4 * 300
    assert out.other == 500 and out.working == 70 + 2 * 300 - 410  # the last layer's are free again
    out = outcome_of(dataclasses.replace(step, resident=0), table, [FC1], 4)
    assert out.residuals == 2 * (4 * 110 + 3) and out.working == 70 + 2 * 300
    # Alone, `accumulate` takes a forward pass for 2 ns and a backward pass for 4, in which it copies 106 and 212 bytes.
    # With room for fc1 it stays, in the first and in the last microbatch, and the 100 bytes of act are copied.
    residuals = (FC1, 300), (ACT, 100)
    known = lambda cost, more=0.0: cost._replace(alone=Alone(2e-9, 4e-9 + more, residuals, BOTH, Counter()))
    table = {NONE: (known(LEAST),), BOTH: (known(MOST),)}
    out = outcome_of(dataclasses.replace(step, may_stay=4 * 300), table, [FC1, ACT], 3)
    assert out.ns == int((82 + 4 * 2 * (16 - 6)) * 1e9) and out.other == 500 + 4 * 300
    assert out.copied == 4 * (3 * 400 - 2 * 300)
    # Of two microbatches the first and the last are there at once, and a pair is beside each other: it copies nothing.
    two = step_of(Stack(layers=4, runs=2, microbatches=2), may_stay=4 * 600)
    out = outcome_of(two, table, [FC1], 3)
    assert out.other == 500 + 4 * 600 and (out.ns, out.copied) == ((10 + 2 * 24) * 10**9, 0)
    # Without room it is recomputed, if that takes less time than the wait: 2 s here, and 1 ns as `accumulate` counts.
    # The first backward pass has 2 s more than its 6 for its 12 s of copies; the last one ends 2 s later.
    again = LEAST._replace(backward=6.0, movable={ACT: 100})
    table[frozenset({ACT})] = (known(again, 1e-9),)
    out = outcome_of(step, table, [FC1, ACT], 3)
    assert out.other == 500 and out.copied == 4 * (3 * 400 - 2 * 300)
    assert out.ns == int((82 + 4 * (2 * (16 - 6) + 2)) * 1e9)
    # But not if the layer keeps something else for that, or runs what has no known time.
    for cost in (
        known(again._replace(device=11), 1e-9),
        known(again, 1e-9)._replace(movable={ACT: 101}),
        again._replace(alone=known(again, 1e-9).alone._replace(untimed=Counter(["kernel"]))),
        known(again, 9e-9),
    ):
        table[frozenset({ACT})] = (cost,)
        assert outcome_of(step, table, [FC1, ACT], 3).copied == 4 * 3 * 400


def test_other_loops_and_what_stands_around_the_layers_count_once():
    table = {BOTH: (MOST,)}
    out = outcome_of(step_of(Stack(4), elsewhere=5000), table, [], 0)
    assert out.device(step_of(Stack(4))) == 1000 + 5000 + 4 * 410 + 3


# ---- promises, on drawn costs ----


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
        # `accumulate` counts in nanoseconds: 53 bytes are copied in each.
        known = Alone(1e-9 * 3, 1e-9 * (5 + again), (*sorted(movable.items()),), kept - least, Counter())
        return (LayerCost(3.0, 5.0 + again, 20, 1, movable, 40 + sum(movable.values()), 40, known),) * len(stacks)

    step = step_of(*stacks, movable=frozenset(units), may_stay=dice.randint(0, 500), resident=dice.randint(0, 2))
    return step, least, frozenset(units) - least, evaluate, dice


def drawn_step(seed):
    step, least, free, evaluate, dice = drawn_search(seed)
    return step, pool(least, free, evaluate, step.stacks), dice


@pytest.mark.claim("plan-promises")
@pytest.mark.parametrize("seed", range(30))
def test_promises_hold_for_drawn_costs(seed):
    step, table, dice = drawn_step(seed)
    host_budget = dice.choice([0, 2000, 10**9])
    curve = undominated(step, table, host_budget)
    assert curve == undominated(step, table, host_budget)
    assert all(choice.host <= host_budget for choice in curve)
    # More budget is never slower, and what does not fit is not chosen.
    budgets = sorted({c.device for c in curve} | {dice.randint(0, 20_000) for _ in range(20)})
    chosen = [fastest(curve, budget) for budget in budgets]
    assert all(c is None or c.device <= budget for c, budget in zip(chosen, budgets, strict=True))
    found = [c for c in chosen if c]
    assert [c.ns for c in found] == sorted((c.ns for c in found), reverse=True)
    assert (chosen[0] is None) == (budgets[0] < curve[0].device)
    # Predicted again alone, a choice is the same.
    for choice in curve:
        out = alone(step, table, choice)
        assert (out.ns, out.device(step), out.host) == (choice.ns, choice.device, choice.host)
    # What fits moves nothing: saving what a choice moves is as fast, and would have been chosen.
    for choice in found:
        if choice.moved:
            saved = alone(step, table, choice._replace(moved=NONE, layers=0, others="save"))
            assert saved.ns <= choice.ns
            at_once = [b for b, c in zip(budgets, chosen, strict=True) if c is choice]
            assert all(saved.device(step) > b for b in at_once) or saved.ns < choice.ns
    assert not fastest(curve, 10**12).moved
    # Never slower than recomputing everything, where that fits.
    nothing = alone(step, table, curve[0]._replace(kept=min(table, key=len), moved=NONE, layers=0, others="save"))
    if best := fastest(curve, nothing.device(step)):
        assert best.ns <= nothing.ns


@pytest.mark.parametrize("seed", range(10))
def test_no_choice_that_is_looked_at_beats_the_curve(seed):
    """By brute force, one at a time."""
    step, table, dice = drawn_step(seed)
    curve = undominated(step, table, 3000)
    most = max(stack.layers for stack in step.stacks)
    for _ in range(200):
        kept = dice.choice(list(table))
        moved = frozenset(u for u in kept if dice.random() < 0.5)
        choice = curve[0]._replace(kept=kept, moved=moved, layers=dice.randint(0, most), others="save", rest=kept)
        rest = kept - moved
        if rest in table and choice.layers and most > step.resident and dice.random() < 0.5:
            choice = choice._replace(others="recompute", rest=rest)
        out = alone(step, table, choice)
        if out.host <= 3000:
            best = fastest(curve, out.device(step))
            assert best and (best.ns, best.host) <= (out.ns, out.host)


@pytest.mark.parametrize("most, seed", [*((170, seed) for seed in range(10)), (0, 11), (0, 17), (0, 30)])
def test_the_search_does_not_depend_on_budgets_and_loses_no_choice(most, seed, monkeypatch):
    monkeypatch.setattr(search, "_MOST_SETS", most)  # if it looks at none, more are looked at for recomputing's sake
    step, least, free, evaluate, dice = drawn_search(seed)
    table = pool(least, free, evaluate, step.stacks)
    budgets = [0, dice.randint(0, 4000), 10**9]
    # Sets that only say what recomputing costs have no working sets; a choice that kept one would seem to take less.
    times = lambda kept: tuple(cost._replace(working=-1, staying=-1) for cost in evaluate(kept))
    found = [searched(step, table, free, evaluate, times, budget) for budget in budgets]
    values = lambda curve: [(c.ns, c.device, c.host) for c in curve]
    for budget, (wider, curve, unmoved) in zip(budgets, found, strict=True):
        assert unmoved == found[0][1] and wider == found[0][0] and wider.items() >= table.items()
        assert all(costs in (evaluate(kept), times(kept)) for kept, costs in wider.items())
        # What grew has the choices of what was always there.
        sized = {kept: costs for kept, costs in wider.items() if costs == evaluate(kept)}
        assert (len(sized) < len(wider)) == (most == 0)
        assert values(curve) == values(undominated(step, sized, budget))
        for choice in undominated(step, table, budget):
            best = fastest(curve, choice.device)
            assert (best.ns, best.host) <= (choice.ns, choice.host)


def test_the_search_knows_what_recomputing_costs_where_a_pass_runs_alone(monkeypatch):
    monkeypatch.setattr(search, "_MOST_SETS", 0)  # it looks at few others
    looked_at = 0
    for seed in range(60):
        step, least, free, evaluate, _ = drawn_search(seed)
        table, curve, _ = searched(step, pool(least, free, evaluate, step.stacks), free, evaluate, evaluate, 2**62)
        sets = {near for c in curve if c.layers for near in wanted(step, table, c.kept, c.moved)}
        assert sets <= table.keys()
        looked_at += len(sets)
    assert looked_at > 20


def test_the_search_finds_better_choices_than_the_first_sets_have():
    better = 0
    for seed in range(20):
        step, least, free, evaluate, _ = drawn_search(seed)
        table = pool(least, free, evaluate, step.stacks)
        _, curve, _ = searched(step, table, free, evaluate, evaluate, 0)
        first = undominated(step, table, 0)
        better += any(fastest(first, choice.device).ns > choice.ns for choice in curve)
    assert better > 2


# ---- what is planned is what happens ----


def kept_by(f, *args):
    """The bytes that the layers of a loss keep on the device and on the host, from its table."""
    rows = [row for row in residuals(f, *args) if row.names or row.reason == "the carry of a scan"]
    size = lambda *states: sum(row.bytes for row in rows if row.state in states)
    return size("saved"), size("offloaded")


def budgets_of(found):
    """Some on the curve, and some between."""
    points = [p.bytes for p in found.curve]
    return sorted({points[0], points[len(points) // 3], points[-1], (points[0] + points[-1]) // 2})


@pytest.mark.parametrize("machine", [H200, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("host_budget", [0, EVERYTHING])
def test_the_table_has_the_bytes_that_are_predicted(machine, host_budget):
    args = arrays()
    everything = planned(*args, machine=machine, host_budget=host_budget)
    assert everything.host == 0 and "offload" not in dict(everything.policy.residuals).values()
    for budget in budgets_of(everything):
        found = planned(*args, machine=machine, budget=budget, host_budget=host_budget)
        assert found.memory.total <= budget and found.host <= host_budget
        assert kept_by(under(found.policy), *args) == (found.memory.residuals, found.host)
        again = planned(*args, machine=machine, budget=budget, host_budget=host_budget)
        assert str(again) == str(found)


def test_copies_are_exposed_as_fits_says():
    args, names = arrays(), {"layer_input": "save", "fc1": "offload", "act": "offload"}
    offload = planned(*args, machine=SLOW, fixed=dataclasses.replace(ALL, residuals=names))
    save = planned(*args, machine=SLOW, fixed=dataclasses.replace(ALL, residuals=dict.fromkeys(names, "save")))
    exposed = fits(under(offload.policy), *args, machine=SLOW).exposed_ms
    assert offload.policy.offload_layers == "all" or offload.host < 2 * LAYERS * WIDE
    longest = max(offload.curve, key=lambda p: p.ms)
    exposed = fits(under(longest.policy), *args, machine=SLOW).exposed_ms
    assert exposed > 0 and longest.ms - save.step_ms == pytest.approx(exposed, rel=1e-3)


def test_microbatches_have_two_sets_of_stacks():
    w, x = arrays()
    xs = jax.ShapeDtypeStruct((4, *x.shape), x.dtype)
    step = lambda of: lambda w, xs: accumulate(of)(w, xs)
    everything = planned(w, xs, f=step(loss))
    assert everything.host == 0
    fixed = dataclasses.replace(ALL, residuals={"fc1": "offload"})
    least = planned(w, xs, f=step(loss), fixed=fixed, budget=planned(w, xs, f=step(loss), fixed=fixed).curve[0].bytes)
    assert least.policy.offload_layers == "all"
    _, host = kept_by(under(least.policy), w, x)
    assert least.host == 2 * host > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@jax.numpy_rank_promotion("allow")
def test_drawn_layers_get_the_plan_that_was_predicted(seed):
    drawn = draw(seed)

    def of(policy):
        def f(xs, x):
            return jnp.sum(scan(lambda x, xs: (drawn.layer(x, xs, tag), None), x, xs, policy=policy, strict=False)[0])

        return lambda weights, x: f((weights, drawn.xs[1]), x)

    args = drawn.xs[0], drawn.x
    everything = planned(*args, f=of(Policy()))
    slower = 0.0
    for budget in reversed(budgets_of(everything)):
        found = planned(*args, f=of(Policy()), budget=budget)
        assert found.step_ms >= slower
        slower = found.step_ms
        saved, offloaded = kept_by(of(found.policy), *args)
        assert offloaded == found.host and saved <= found.memory.residuals


def test_the_claims_hold_for_what_is_planned():
    w, x = jax.tree.map(lambda a: 0.1 * jnp.ones(a.shape, a.dtype), arrays(3))
    curve = planned(w, x).curve
    found = planned(w, x, budget=curve[0].bytes)
    assert found.host > 0
    verification = verify(under(found.policy), w, x)
    assert verification.ok, verification


# ---- names ----


def test_names_are_patterns_that_reproduce_the_plan():
    """Foreign names may have any character, one name may end as another one does, and a value may have two."""

    def layer(x, w):
        a = checkpoint_name(x @ w, "a[0]* b?")
        b = tag(jnp.tanh(a), "b")
        c = tag(tag(jnp.sin(b @ w.T) @ w, "moe/b"), "second")
        gate, up = tag({"gate": c * 2, "up": jnp.cos(c)}, "fc1").values()
        return (jnp.tanh(gate) * up) @ w.T, None

    of = lambda policy: lambda w, x: jnp.sum(scan(layer, x, w, policy=policy, strict=False)[0])
    args = jax.ShapeDtypeStruct((LAYERS, D, H), jnp.float32), jax.ShapeDtypeStruct((B, D), jnp.float32)
    everything = planned(*args, f=of(Policy()))
    for point in everything.curve:
        found = planned(*args, f=of(Policy()), budget=point.bytes)
        table = residuals(of(found.policy), *args)
        rows = [row for row in table if row.names or row.reason == "the carry of a scan"]
        assert sum(row.bytes for row in rows if row.state == "saved") == found.memory.residuals
        assert not found.policy.unmatched([name for row in table for name in row.names])
    assert pattern_of("a[0]* b?") == "a[[]0][*]?b[?]"
    spaced = policy_of(
        {("a b",): "offload"}, [("a-b",), ("a_b",)], Policy()
    )  # names of `checkpoint_name` may have them
    assert [spaced.match(name)[1] for name in ("a b", "a-b", "a_b")] == ["offload", "recompute", "recompute"]


def test_fixed_decisions_stay():
    args = arrays()
    fixed = dataclasses.replace(ALL, residuals={"fc1": "recompute", "act": "offload"}, resident_layers=2)
    found = planned(*args, fixed=fixed)
    kept = {row.names[0] for row in residuals(under(found.policy), *args) if row.names and row.layers}
    assert "fc1" not in kept and dict(found.policy.residuals)["act"] == "offload"
    assert found.policy.resident_layers == 2 and found.policy.min_offload_bytes == 0
    saved = planned(*args, fixed=dataclasses.replace(ALL, residuals={"fc1": "save"}), budget=EVERYTHING)
    for point in saved.curve:
        assert dict(point.policy.residuals)["fc1"] == "save"


def test_small_values_are_not_offered_to_the_host():
    found = planned(*arrays(), fixed=Policy())  # 1 MiB
    assert all("offload" not in dict(point.policy.residuals).values() for point in found.curve)


def test_a_matmul_that_nobody_named_is_pointed_to():
    def layer(x, w):
        return x + jnp.tanh(tag(x, "x") @ w) @ w.T, None

    f = lambda w, x: jnp.sum(scan(layer, x, w, policy=Policy(), strict=False)[0])
    args = jax.ShapeDtypeStruct((LAYERS, D, H), jnp.float32), jax.ShapeDtypeStruct((B, D), jnp.float32)
    (line,) = planned(*args, f=f).untagged
    assert "test_plan.py:" in line and "float32[64, 128]" in line and "32.00 KiB" in line
    assert planned(*arrays()).untagged == ()


# ---- text and errors ----


def test_the_yaml_is_the_policy():
    found = planned(*arrays(), budget=planned(*arrays()).curve[0].bytes)
    fields = yaml.safe_load(found.to_yaml())["remat"]
    assert Policy(**fields) == found.policy
    read = json.loads(found.to_json())
    assert read["memory"]["residuals"] == found.memory.residuals and len(read["curve"]) == len(found.curve)
    text = str(found)
    assert found.to_yaml().rstrip() in text and f"limit: {found.limits}" in text


def test_the_limit_says_what_more_memory_brings():
    everything = planned(*arrays(), host_budget=0)
    assert everything.limits == "nothing: all fits"
    least = planned(*arrays(), host_budget=0, budget=everything.curve[0].bytes)
    assert "more would" in least.limits and "%" in least.limits


def test_a_budget_that_nothing_fits_is_one_error():
    with pytest.raises(
        NothingFits, match=r"budget 1.00 KiB per device: the smallest choice needs .*KiB; .*KiB of"
    ) as found:
        planned(*arrays(), budget="1KiB")
    assert found.value.least == planned(*arrays()).curve[0].bytes
    planned(*arrays(), budget=found.value.least)


@pytest.mark.parametrize("gpus, says", [(1, True), (2, True), (4, False), (8, False)])
def test_a_plan_says_if_more_gpus_copy_than_were_measured(gpus, says):
    weights, x = arrays()
    rows = jax.sharding.NamedSharding(auto_mesh(data=4), jax.sharding.PartitionSpec("data"))
    args = weights, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
    make = functools.partial(planned, *args, machine=dataclasses.replace(TOY, gpus=gpus))
    moves = make(budget=make().curve[0].bytes)
    said = f" (the bus was measured with {gpus} GPU(s) copying at once)"
    assert moves.host and moves.summary.endswith(f"H200, predicted{said if says else ''}")
    assert make().host == 0 and make().summary.endswith("H200, predicted")  # what copies nothing depends on none of it


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"budget": "70Gib/s"}, ValueError, "plan: budget '70Gib/s' is not a size"),
        ({"host_budget": -1}, ValueError, "plan: host_budget -1 is not a size"),
        ({"machine": "no/such.json"}, ValueError, "plan: machine 'no/such.json'"),
        ({"machine": 3}, TypeError, "plan: machine must be"),
        ({"machine": None}, ValueError, "machines/h200.json"),
        ({"fixed": {"fc1": "save"}}, TypeError, "plan: fixed must be"),
        ({"one_kernel": "attention"}, TypeError, "plan: one_kernel must be names of scopes, .* got 'attention'"),
        ({"compile": "no"}, TypeError, "plan: compile must be True or False, got 'no'"),
        ({"budget": None}, ValueError, "plan: budget: no GPU here"),
    ],
)
def test_what_is_wrong_is_said(wrong, error, says):
    with pytest.raises(error, match=says):
        planned(*arrays(), **wrong)


def test_what_has_no_backward_pass_keeps_nothing():
    """A teacher under `stop_gradient`, and a step that needs a loss without its gradient."""
    w, x = arrays()
    student = lambda w, x: loss(w, x) ** 2
    distilled = lambda w, x: student(w, x) + jax.lax.stop_gradient(loss(w, 2 * x))

    def step(w, x):
        before, _ = jax.vjp(loss, w, 2 * x)
        return before, jax.tree.map(jnp.subtract, w, jax.grad(student)(w, x))

    kept = planned(w, x, f=student, budget=EVERYTHING).memory.residuals
    assert kept > 0
    for f in (distilled, step):
        assert planned(w, x, f=f, budget=EVERYTHING).memory.residuals == kept


def test_what_is_not_planned_is_said():
    with pytest.raises(ValueError, match=r"no jaxoffload\.scan"):
        planned(jnp.ones(3), f=jnp.sum)

    def outer(x, w):
        return scan(layer, x, w, policy=Policy(), strict=False)[0], None

    w, x = arrays()
    stacked = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), w)
    nested = lambda w, x: jnp.sum(scan(outer, x, w, policy=Policy(), strict=False)[0])
    with pytest.raises(NotImplementedError, match="inside a layer"):
        planned(stacked, x, f=nested)
    for how in (jax.checkpoint, functools.partial(checkpoint, policy=Policy(), strict=False)):
        again = lambda w, x, how=how: jnp.sum(how(lambda w, x: outer(x, w)[0])(w, x))
        with pytest.raises(NotImplementedError, match="inside a checkpoint"):
            planned(w, x, f=again)


def test_the_pinned_pool_is_the_default_of_the_host(monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0.0001")
    found = planned(*arrays())
    assert found.host_budget == int(0.0001 * 2**30)
    assert planned(*arrays(), budget=found.curve[0].bytes).host <= found.host_budget


@pytest.mark.parametrize("here, gpus, share", [(1, 8, 8), (8, 8, 8), (2, 8, 8), (4, 0, 4)])
def test_a_process_has_its_gpus_share_of_the_machines_memory(here, gpus, share, monkeypatch):
    """However many of the machine's GPUs it sees; the driver may not list them."""
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1000000")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_device_count", lambda: here)
    driver, glob = Path("/proc/driver/nvidia/gpus"), Path.glob
    listed = lambda path, pattern: iter([path] * gpus) if path == driver else glob(path, pattern)
    monkeypatch.setattr(Path, "glob", listed)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert planned(*arrays(), budget="1GiB").host_budget == memory // share


@pytest.mark.claim("plan-compiled")
@pytest.mark.parametrize("seed", range(20))
def test_a_compiled_choice_fits(seed):
    """With an XLA whose plans differ from the predictions by up to 20 %."""
    step, table, dice = drawn_step(seed)
    curve = undominated(step, table, 10**9)
    limit = dice.randint(curve[0].device, curve[-1].device + 200)
    error = {choice: dice.uniform(0.8, 1.2) for choice in curve}
    measured = lambda choice: int(choice.device * error[choice])
    choice, taken = refined(curve, limit, measured)
    assert taken == {c: measured(c) for c in taken}
    if choice is None:
        assert curve[0] in taken and min(taken.values()) > limit
    else:
        assert taken[choice] <= limit and choice.ns == min(c.ns for c, size in taken.items() if size <= limit)
    # One that is always as wrong is corrected at once.
    choice, taken = refined(curve, limit, lambda choice: choice.device + 100)
    assert choice == fastest(curve, limit - 100)
    assert len(taken) <= 3
    # One of which XLA does not say what it takes is not chosen.
    silent = dice.choice(curve)
    choice, taken = refined(curve, 2 * curve[-1].device, lambda choice: None if choice is silent else choice.device)
    assert silent not in taken and choice == fastest([c for c in curve if c is not silent], 2 * curve[-1].device)
    # What was learned before it holds for the next one.
    silent = fastest(curve, limit + 100)
    choice, taken = refined(curve, limit, lambda choice: None if choice is silent else choice.device - 100)
    assert choice == fastest([c for c in curve if c is not silent], limit + 100)


@pytest.mark.claim("plan-compiled")
def test_what_moves_nothing_is_compiled_where_all_else_takes_more_than_predicted(monkeypatch):
    """As interleaved microbatches do by XLA's plan, while recomputing everything fits."""
    args = arrays()
    least = planned(*args).curve[0]
    moves = lambda policy: "offload" in dict(policy.residuals).values()
    assert moves(least.policy)
    size = lambda f, args, policy: 2 * least.bytes if moves(policy) else least.bytes - 1
    monkeypatch.setattr(planning, "refuse_without_gpus", lambda args: None)
    monkeypatch.setattr(planning, "compiled_bytes", size)
    found = planned(*args, budget=least.bytes, compile=True)
    assert found.compiled == least.bytes - 1 and not moves(found.policy) and found.host == 0
    assert not any(moves(point.policy) for point in found.curve)  # they do not fit
    with pytest.raises(NothingFits, match="by XLA's plan") as caught:
        planned(*args, budget=least.bytes // 2, compile=True)
    assert caught.value.least == least.bytes - 1


def test_without_gpus_nothing_is_compiled():
    with pytest.raises(NotImplementedError, match=r"compile=True needs arguments on GPUs.*cpu"):
        planned(*arrays(), compile=True)
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), arrays())
    with pytest.raises(NotImplementedError, match="an abstract mesh"):
        planned(*args, compile=True)


def test_a_step_writes_its_state_over_the_old_one():
    """And jitted functions, steps and losses alike, are traced anew under the policies that are tried."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        gradient = jax.grad(loss)(w, x)
        return jax.tree.map(lambda w, g: w - g, w, gradient), gradient["in"].sum()

    args = arrays()
    of_step, of_loss = planned(*args, f=step), planned(*args)
    assert of_step.memory.residuals == of_loss.memory.residuals
    weights = 2 * 4 * LAYERS * D * H
    assert of_step.memory.other <= of_loss.memory.other + weights // 2


# ---- the command line and the training program ----


TINY = ("models.train:step_for", str(ROOT / "configs/tiny.yaml"), "--machine", str(ROOT / "machines/h200.json"))


def test_the_command_line_prints(capsys):
    assert main(["plan", *TINY, "--budget", "1GiB", "--host-budget", "0", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["budget"] == 2**30 and said["host_budget"] == said["host"] == 0


@pytest.mark.parametrize("given, says", [("1GB/s", "budget '1GB/s' is not a size"), ("1MiB", "smallest choice needs")])
def test_the_command_line_says_what_is_wrong(capsys, given, says):
    assert main(["plan", *TINY, "--budget", given]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


@pytest.mark.slow
def test_a_config_has_a_budget_instead_of_decisions():
    overrides = ["remat.budget=1GiB", f"remat.machine={ROOT / 'machines/h200.json'}", "remat.min_offload_bytes=0"]
    config = load(ROOT / "configs/tiny.yaml", overrides)
    mesh = abstract_mesh(config.mesh)
    chosen, found = planned_config(config, mesh)
    assert dict(chosen.remat.residuals) == dict(found.policy.residuals) and chosen.remat.budget == "1GiB"
    # The file's own patterns stay.
    assert dict(chosen.remat.residuals)["mlp/fc1.gate"] == "offload"
    assert dict(chosen.remat.residuals)["attn/q"] == "save"
    assert str(found) in report(config)
    without = load(ROOT / "configs/tiny.yaml")
    assert planned_config(without, mesh) == (without, None)


@pytest.mark.parametrize(
    "override, says",
    [
        ("remat.budget=much", "remat.budget: 'much' is not a size; use auto"),
        ("remat.host_budget=-1", "remat.host_budget: -1 is not a size"),
        ("remat.machine=[]", "remat.machine: "),
        ("remat.budgt=auto", "the nearest is remat.budget"),
    ],
)
def test_a_wrong_budget_is_a_line_about_the_config(override, says):
    with pytest.raises(ConfigError, match=says):
        load(ROOT / "configs/tiny.yaml", [override])


def test_what_cannot_be_planned_is_a_line_about_the_config():
    for budget in ("auto", "1KiB"):
        config = load(ROOT / "configs/tiny.yaml", [f"remat.budget={budget}"])
        with pytest.raises(ConfigError, match=rf"remat\.budget = '{budget}': plan: "):
            planned_config(config, abstract_mesh(config.mesh))


@pytest.mark.slow
@pytest.mark.claim("plan-of-a-run")
def test_a_run_writes_its_plan_and_keeps_it(tmp_path, capsys):
    def config(*overrides):
        machine = f"remat.machine={ROOT / 'machines/h200.json'}"
        return load(ROOT / "configs/tiny.yaml", ["remat.budget=1GiB", machine, f"train.out={tmp_path}", *overrides])

    mesh = make_mesh(dataclasses.replace(config().mesh, data=jax.device_count()))
    first = plan_of_run(config(), mesh, continues=False)
    assert "ms per step" in capsys.readouterr().out
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["plan"]["budget"] == 2**30
    # What is there stays, whatever would be planned now.
    written["policy"]["offload_layers"] = 1
    (tmp_path / "plan.json").write_text(json.dumps(written))
    again = plan_of_run(config(), mesh, continues=True)
    assert again.remat == dataclasses.replace(first.remat, offload_layers=1)
    assert "stays" in capsys.readouterr().out
    # Another budget is another plan.
    other = plan_of_run(config("remat.budget=2GiB"), mesh, continues=True)
    assert other.remat.budget == "2GiB" and "ms per step" in capsys.readouterr().out
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match=r"plan\.json.* is not a plan"):
        plan_of_run(config(), mesh, continues=True)


@pytest.mark.slow
def test_a_run_trains_under_its_plan(tmp_path, capsys):
    run = [str(ROOT / "configs/tiny.yaml"), *SHORT, "remat.budget=1GiB", f"remat.machine={ROOT / 'machines/h200.json'}"]
    run += [f"train.out={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}", "model.vocab_size=300"]
    assert train([*run, "train.steps=2"]) == 0
    said = capsys.readouterr().out
    assert "ms per step" in said and (tmp_path / "plan.json").exists()
    assert train([*run, "train.steps=4"]) == 0
    assert "plan.json stays" in capsys.readouterr().out
