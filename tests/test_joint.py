"""A layer's passes from one derivative are those that differentiating it for each set of names gives."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ROOT, auto_mesh
from jax.sharding import PartitionSpec

from jaxoffload import Policy, checkpoint, scan, tag
from jaxoffload._engine.cost.cost import cost
from jaxoffload._tracing import Trial
from jaxoffload.proof import Machine
from jaxoffload.proof._plan.oracle import Oracle, divided
from jaxoffload.proof._plan.patterns import policy_of
from jaxoffload.proof._plan.stacks import UNTAGGED, names_of, stacks_of
from jaxoffload.proof._predict.joint import Passes
from jaxoffload.proof._predict.memory import divisions
from jaxoffload.proof._predict.predict import spread
from jaxoffload.proof._program.results import trace_of
from models.train import step_for

pytestmark = pytest.mark.claim("plan-costs")

RATES = Machine.from_json((ROOT / "machines/h200.json").read_text())
LAYERS, B, D, H = 3, 8, 16, 32
ANY_SIZE = Policy(min_offload_bytes=0)


def oracle_of(f, args, fixed):
    trial = Trial(dataclasses.replace(fixed, default="recompute", residuals={}))
    found = stacks_of(trial.traced(trace_of)(f, args)[0], spread(args))
    names = names_of(found, fixed)
    policy = lambda decisions: policy_of(decisions, names.recomputable, fixed)
    return trial, Oracle([divided(each, fixed) for each in found], names, policy, RATES, divisions(args))


def drawn_sets(names, count, seed=0):
    """Some that the search may look at, nothing and everything among them."""
    dice = random.Random(seed)
    shares = [0.0, 1.0, *(dice.choice([0.2, 0.5, 0.8]) for _ in range(count - 2))]
    free = sorted(names.free)
    return [names.least | {unit for unit in free if dice.random() < share} for share in shares]


def assert_exact(f, args, fixed=ANY_SIZE, sets=6, from_one=True):
    """Compare times, bytes and what is moved, for drawn sets; `from_one`: that none was differentiated by itself."""
    trial, oracle = oracle_of(f, args, fixed)
    assert trial.scans and oracle.scans
    for scan_ in oracle.scans:
        assert (scan_.joint is not None) == from_one
        for kept in drawn_sets(oracle.names, sets):
            ours = oracle.cost(scan_.found, oracle.passes(scan_, kept))
            alone = oracle.cost(scan_.found, Passes.of(oracle.linearized(scan_.found, kept)))
            zero = {"forward": 0, "backward": 0}
            assert ours._replace(**zero) == alone._replace(**zero), kept
            assert (ours.forward, ours.backward) == pytest.approx((alone.forward, alone.backward), rel=1e-9), kept
            assert set(ours.movable) <= kept | {UNTAGGED}


def test_what_is_kept_is_copied_into_a_stack_and_for_kernels_out_of_it():
    """`a` is what a matmul takes in the backward pass, `b` is not."""

    def layer(x, w):
        a = tag(jnp.sin(x @ w["in"]), "a")
        b = tag(a @ w["out"], "b")
        return x + jnp.tanh(b), None

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    args = {"in": shape(3, 64, 256), "out": shape(3, 256, 64)}, shape(32, 64)
    loss = lambda w, x: jnp.sum(scan(layer, x, w, policy=Policy(), strict=False)[0])
    _, oracle = oracle_of(loss, args, ANY_SIZE)
    (scan_,), rates = oracle.scans, dataclasses.replace(RATES, fused_gb_s=1.0)
    passes = oracle.passes(scan_, frozenset(oracle.names.units))
    found = dataclasses.replace(oracle, rates=rates).cost(scan_.found, passes)
    without = [cost(of, rates).seconds for of in (passes.forward, passes.backward)]
    carry, a, b = 4 * 32 * 64, 4 * 32 * 256, 4 * 32 * 64
    assert 1e9 * (found.forward - without[0]) == pytest.approx(2 * (carry + a + b))
    assert 1e9 * (found.backward - without[1]) == pytest.approx(2 * (carry + a))


@pytest.mark.parametrize("config", ["tiny", pytest.param("mixtral-8x7b", marks=pytest.mark.slow)])
def test_the_models_layers(config):
    step, args, *_ = step_for(str(ROOT / f"configs/{config}.yaml"))
    assert_exact(step, args, sets=12)


def of_layers(layer, weights=None):
    """A loss of scanned layers, and its arguments."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    weights = {"in": shape(LAYERS, D, H), "out": shape(LAYERS, H, D)} if weights is None else weights
    return lambda w, x: jnp.sum(scan(layer, x, w, policy=Policy(), strict=False)[0]), (weights, shape(B, D))


def plain(x, w):
    x = tag(x, "layer_input")
    fc1 = tag(x @ w["in"], "fc1")
    return x + tag(tag(jnp.tanh(fc1), "act") @ w["out"], "fc2"), None


def with_leaves(x, w):
    """One name that ends as another one does, and a composite of which one leaf may be kept."""
    h = tag({"gate": jnp.sin(x @ w["in"]), "up": jnp.cos(x @ w["in"])}, "fc1")
    more = tag(jnp.tanh(h["gate"]) * h["up"], "moe/fc1")
    return tag(jnp.sin(tag(more, "deep/moe/fc1.gate")), "gate") @ w["out"], None


def with_branches(x, w):
    fc1 = tag(x @ w["in"], "fc1")
    act = jax.lax.cond(jnp.sum(x) > 0, lambda y: tag(jnp.tanh(y), "a"), lambda y: tag(jnp.sin(y) * 2, "b"), fc1)
    return jnp.cos(tag(act, "act")) @ w["out"], None


RISING, FALLING = np.arange(B * H, dtype=np.float32).reshape(B, H), np.arange(H, dtype=np.float32)[::-1]


def with_a_rule(x, w):
    """Each of its passes has an array of its own, which is not the layer's operand."""

    @jax.custom_vjp
    def act(x):
        return jnp.tanh(x)

    def forward(x):
        y = tag(jnp.tanh(x), "y")
        return y, (tag(x * RISING, "product"), y)

    act.defvjp(forward, lambda kept, ct: ((1 - kept[1] ** 2) * ct * jnp.cos(kept[0]) * FALLING[None],))
    return tag(act(tag(x @ w["in"], "fc1")), "act") @ w["out"], None


@pytest.mark.parametrize("layer", [plain, with_leaves, with_branches, with_a_rule])
def test_small_layers(layer):
    assert_exact(*of_layers(layer))


@pytest.mark.parametrize("dots", ["save", "offload"])
def test_untagged_matmuls(dots):
    def layer(x, w):
        return jnp.sin(tag(jnp.tanh(x @ w["in"]), "act") @ w["out"]), None

    assert_exact(*of_layers(layer), Policy(min_offload_bytes=0, dots=dots))


def test_small_values_are_saved():
    assert_exact(*of_layers(plain), Policy(min_offload_bytes=4 * B * D + 1))
    assert_exact(*of_layers(with_leaves), Policy(min_offload_bytes=4 * B * H + 1))


def test_fixed_decisions():
    assert_exact(*of_layers(plain), Policy({"fc1": "save", "act": "offload"}, min_offload_bytes=0))
    assert_exact(*of_layers(with_leaves), Policy({"fc1": "save", "fc1.gate": "recompute"}, min_offload_bytes=0))


def test_frozen_weights():
    """Only what is perturbed is differentiated."""
    loss, (w, x) = of_layers(lambda x, w: plain(x, w | {"out": jax.lax.stop_gradient(w["out"])}))
    assert_exact(loss, (w, x))


@pytest.mark.parametrize("how", [jax.checkpoint, functools.partial(checkpoint, policy=Policy(), strict=False)])
def test_a_layer_with_a_checkpoint_is_differentiated_for_each_set(how):
    """Its backward pass computes named values by itself."""

    def layer(x, w):
        inside = how(lambda x: jnp.sin(tag(jnp.tanh(x @ w["in"]), "inside")) @ w["out"])
        return tag(jnp.cos(inside(tag(x, "layer_input"))), "out"), None

    assert_exact(*of_layers(layer), from_one=False)


def test_shards():
    """A value inside of `shard_map` is kept there; one that is a result too does not say how others are divided."""
    mesh = auto_mesh(data=4, model=2)
    rows, whole, wide = PartitionSpec("data"), PartitionSpec(), PartitionSpec("model")

    def layer(x, w):
        def inside(x, w_in, w_out):
            fc1 = tag(x @ w_in, "fc1")
            mean = jax.lax.pmean(jnp.mean(fc1, 0, keepdims=True), "data")
            half = jax.lax.all_gather(w_out, "model", tiled=True)
            return jnp.tanh(tag(fc1 * mean, "act")) @ half, mean[0]

        specs = (rows, whole, wide)
        run = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=(rows, whole), check_vma=False)
        y, mean = run(tag(x, "layer_input"), w["in"], jnp.tanh(w["out"]))
        return tag(jnp.sin(y) * jnp.mean(mean), "out"), None

    loss, (w, x) = of_layers(layer)
    where = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
    assert_exact(loss, (jax.tree.map(lambda a: where(a, whole), w), where(x, rows)))
