"""What `plan` says of the passes that run alone in `accumulate` is what the traced step does there."""

import contextlib
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ONE_RATE, ROOT, auto_mesh
from jax.sharding import PartitionSpec as P
from jaxoffload.proof._plan.ends import Counts, Moves, again_of, ends
from jaxoffload.proof._plan.lone_passes import LonePasses

from jaxoffload import Policy, accumulate, proof, scan, tag
from jaxoffload._engine.cost import lone_pass
from jaxoffload._engine.cost.cost import cost
from jaxoffload._engine.cost.lone_pass import Lone
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._engine.microbatches.interleaved import interleaved_p
from jaxoffload._tracing import Trial
from jaxoffload.proof import Bus, fits
from jaxoffload.proof._plan import lone_passes
from jaxoffload.proof._plan.choices import alone, units_of
from jaxoffload.proof._plan.patterns import policy_for
from jaxoffload.proof._plan.plan import _traced
from models.train import step_for

pytestmark = pytest.mark.claim("plan-ends")

SLOW = dataclasses.replace(ONE_RATE, one=Bus(20.0, 16.0, 12.0))  # GB/s
LAYERS, D, H, ROWS = 12, 4096, 14336, 16384
shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def gated(x, w):
    x, (gate, up, down) = tag(x, "x"), w
    fc1, up = tag(x @ gate, "fc1"), tag(x @ up, "up")
    return x + tag(jax.nn.silu(fc1) * up, "act") @ down, None


def narrow(x, w):
    """Recomputing one of these values needs others, one name has two values, and one is a weight."""
    x = tag(x, "x")
    a = tag(jnp.tanh(x @ tag(w[0], "w")), "a")
    b, c = tag(jnp.sin(a), "b"), tag({"p": jnp.cos(a), "q": a[:, :D] * 2}, "c")
    return x + jnp.tanh(c["q"]) + tag((b * c["p"]), "a") @ w[1], None


def with_effects(x, w):
    """Nothing of it runs again."""
    jax.debug.callback(lambda: None)
    return gated(x, w)


def loss_of(*layers):
    def of(policy):
        def loss(weights, x):
            for layer, w in zip(layers, weights, strict=True):
                x = scan(layer, x, w, policy=policy, strict=False)[0]
            return jnp.sum(x.astype(jnp.float32))

        return lambda weights, xs: accumulate(loss)(weights, xs)

    return of


GATED = shape(LAYERS, D, H), shape(LAYERS, D, H), shape(LAYERS, H, D)
NARROW = shape(LAYERS, D, 2 * D), shape(LAYERS, 2 * D, D)


def interleaved(f, args):
    """What interleaves in a step."""
    sites = walk(jax.make_jaxpr(f)(*args))
    return [site.eqn.params for site in sites if site.eqn.primitive is interleaved_p]


def on_device_and_host(segments):
    """Of the first layers, in bytes per device: what one keeps on the device, and on the host."""
    segment = segments[0]
    return np.array([sum(segment.layer.sizes.device), sum(segment.layer.sizes.host)])


def of_the_step(f, args):
    """Of each scan and each end: bytes of a layer that stay, bytes that are not copied, and how many seconds longer its
    backward pass takes on an H200."""
    (params,) = interleaved(f, args)
    seconds = lambda loops: cost(loops.segments[0].backward, ONE_RATE).seconds
    found = []
    for between, *of_ends in zip(params["loops"], params["first"], params["last"], strict=True):
        for end in of_ends:
            stay, less = (on_device_and_host(end.segments) - on_device_and_host(between.segments)) * (1, -1)
            found.append((stay, less, seconds(end) - seconds(between)))
    return found


def of_the_plan(f, args, fixed):
    traced = _traced(f, args, fixed, ONE_RATE, (), 2**62)
    step, kept = traced.step, max(traced.table, key=len)
    units, moved = units_of(traced.table[kept]), [[True] * len(units_of(traced.table[kept]))]
    layers = np.array([[LAYERS]])  # that copy, and resident ones with them
    counts = [Counts(True, layers - step.resident, layers, False, 0) for _ in step.stacks]
    moves = [Moves.of(cost, units, np.array(moved)) for cost in traced.table[kept]]
    of_ends, stay = ends(step, traced.table[kept], moves, counts, again_of(step, traced.table, kept))
    return [tuple(np.asarray(x).item() for x in end) for both in of_ends for end in both], stay.item()


CASES = {
    "gated": (loss_of(gated), (GATED,), {"x": "offload", "up": "offload", "fc1": "offload", "act": "recompute"}),
    "act": (loss_of(gated), (GATED,), {"x": "save", "up": "save", "fc1": "offload", "act": "offload"}),
    "all of it": (loss_of(gated), (GATED,), {"*": "offload"}),
    "narrow": (loss_of(narrow), (NARROW,), {"*": "offload"}),
    "some of it": (loss_of(narrow), (NARROW,), {"*": "offload", "b": "recompute", "x": "save"}),
    "effects": (loss_of(with_effects), (GATED,), {"*": "offload"}),
    "two stacks": (loss_of(gated, narrow), (GATED, NARROW), {"*": "offload"}),
}


@pytest.mark.parametrize("microbatches, resident", [(2, 0), (3, 1), (8, 0), (64, 1)])
@pytest.mark.parametrize("case", CASES)
def test_the_plan_decides_as_the_step_does(case, microbatches, resident):
    f, weights, rules = CASES[case]
    fixed = Policy(rules, resident_layers=resident)
    args = weights, shape(microbatches, ROWS, D)
    step = of_the_step(f(fixed), args)
    found, stay = of_the_plan(f(Policy()), args, fixed)
    assert [end[:2] for end in found] == [end[:2] for end in step]
    both = zip(found, step, strict=True)
    assert all(planned[2] == pytest.approx(real[2], abs=2e-4) for planned, real in both)
    assert stay == proof.staying(f(fixed), *args)


@pytest.mark.parametrize("sharded", ["auto", "shard_map"])
def test_it_does_on_meshes(sharded):
    mesh, rules = auto_mesh(data=4), {"*": "offload"}

    def f(policy):
        step = loss_of(gated)(policy)
        if sharded == "auto":
            return step
        specs = P(), P(None, "data")
        local = lambda *args: jax.tree.map(lambda x: x[None], step(*args))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)

    on = lambda array, spec: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=jax.NamedSharding(mesh, spec))
    weights = jax.tree.map(lambda w: on(w, P(None, "data")), (GATED,))
    args = weights, on(shape(3, 4 * ROWS, D), P(None, "data"))
    with jax.set_mesh(mesh) if sharded == "auto" else contextlib.nullcontext():
        step = of_the_step(f(Policy(rules)), args)
        found, stay = of_the_plan(f(Policy()), args, Policy(rules))
        assert [end[:2] for end in found] == [end[:2] for end in step]
        assert stay == proof.staying(f(Policy(rules)), *args)
    assert any(less for _, less, _ in found)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_many_cases_are_decided_as_one_is(direction):
    """Sizes and seconds are drawn from few, so that some are equal."""
    draw, each = np.random.default_rng(0), 50
    for _ in range(60):
        groups = np.sort(draw.integers(0, 6, draw.integers(1, 9)))  # as residuals
        numbers, groups = np.unique(groups, return_inverse=True)
        sizes = draw.choice(draw.integers(1, 10**9, 4), len(groups))
        in_bus = sizes.sum() / 53e9
        again = draw.choice([*draw.random(3) * in_bus / 3, 0.0, math.inf], len(numbers))
        passes = direction, *(draw.random(2) * in_bus).tolist()
        moved, budget = draw.random((len(sizes), each)) < 0.8, draw.integers(0, sizes.sum(), each)
        recomputed, stay = lone_passes.decide(LonePasses(*passes, sizes, groups, again), moved, budget)
        for case in range(each):
            residuals = {frozenset([n]): int(sizes[n]) for n in np.flatnonzero(moved[:, case])}
            rows = [frozenset(np.flatnonzero(moved[:, case] & (groups == g)).tolist()) for g in range(len(numbers))]
            can = {these: float(s) for these, s in zip(rows, again, strict=True) if these and s < math.inf}
            one = lone_pass.decide(Lone(*passes, residuals, can), int(budget[case]))
            assert one.recomputed == frozenset().union(*itertools.compress(rows, recomputed[:, case]))
            assert one.stay == {frozenset([n]) for n in np.flatnonzero(stay[:, case])}


def layers_ms(f, args, machine):
    """By `fits`: what all layers of a step take that all copy something."""
    loops = fits(f, *args, machine=machine).loops
    return sum(loop.computing_ms + loop.exposed_ms(loop.together) for loop in loops)


# The bytes of a layer that kernels take from what it keeps: x, and what the second matmul of `narrow` takes.
READ = {"gated": 2 * ROWS * D, "narrow": 2 * ROWS * 3 * D, "some of it": 2 * ROWS * 3 * D}


@pytest.mark.parametrize("machine", [ONE_RATE, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("microbatches", [2, 3])
@pytest.mark.parametrize("case", READ)
def test_the_step_takes_as_long_as_fits_says(case, microbatches, machine):
    """And what `fits` leaves out: copies into stacks and out of them, which may hide others."""
    f, weights, rules = CASES[case]
    fixed = Policy(rules, resident_layers=0)
    args = weights, shape(microbatches, ROWS, D)
    for fused_gb_s in (1e9, machine.hbm_gb_s):  # with the first those copies take no time
        here = dataclasses.replace(machine, fused_gb_s=fused_gb_s)
        traced = _traced(f(Policy()), args, fixed, here, (), 2**62)
        choice = max(traced.curve, key=lambda choice: choice.layers)
        assert choice.layers == LAYERS and choice.moved
        (cost_of_layer,) = traced.table[choice.kept]
        copied_ms = 1e3 * microbatches * LAYERS * here.moving(2 * (cost_of_layer.kept + READ[case]))
        ms = 1e-6 * choice.ns - 1e3 * traced.step.seconds
        expected = layers_ms(f(fixed), args, here)
        moved = sum(cost_of_layer.movable[unit] for unit in choice.moved)
        expected += microbatches * (moved / here.one.d2h + moved / here.one.h2d) / 1e6  # nothing hides the last row
        # What two residuals need both is planned to run again for each.
        assert expected - 1e-3 < ms <= 1.04 * expected + copied_ms


@pytest.mark.slow
@pytest.mark.parametrize(
    "microbatches, smallest", [(8, 2**20), (2, 2**20), (8, 2**21)], ids=["8", "2", "a kernel's small result is saved"]
)
def test_llama_copies_and_keeps_what_is_planned(microbatches, smallest):
    """In choices on the curve, and all of a step's bytes."""
    override = f"train.grad_accumulation={microbatches}", f"train.batch_size={8 * microbatches}"
    step, args, *_ = step_for(str(ROOT / "configs/llama3-8b.yaml"), *override)
    fixed = Policy(min_offload_bytes=smallest)
    traced = _traced(step, args, fixed, ONE_RATE, (), 2**40)
    chosen = [choice for choice in traced.curve if choice.moved]
    for choice in chosen[:: len(chosen) // 4]:
        out, policy = alone(traced.step, traced.table, choice), policy_for(choice, traced.step, traced.table, fixed)
        (params,) = Trial(policy).traced(interleaved)(step, args)
        copied = lambda loops: sum(s.layers * on_device_and_host([s])[1] for s in loops[0].segments if s.on_host)
        between, *of_ends = (copied(params[which]) for which in ("loops", "first", "last"))
        assert out.copied == (microbatches - 2) * between + sum(of_ends)
        stays = Trial(policy).traced(proof.staying)(step, *args)
        assert out.other == traced.step.other + stays
