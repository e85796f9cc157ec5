"""The contract of everything that holds residuals: for each assignment of save, offload and recompute, the gradient is
the reference's bit for bit, and the host holds what was asked, to the byte.

The reference is written with nothing of ours: `jax.checkpoint` with `save_only_these_names`, in `lax.scan`.
"""

import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from common import assert_same_bits, gradient, kept, normal, policy, run, run_each
from jax import lax

from jaxoffload import checkpoint, scan, tag

BATCH, DIM, HIDDEN, LAYERS = 4, 8, 16, 3
NAMES = ("fc1_input", "fc1", "act")
# Values of one layer, shapes written by hand.
SHAPES = {
    "fc1_input": [(BATCH, DIM)],
    "fc1": [(BATCH, HIDDEN), (BATCH, HIDDEN)],  # gate and up
    "act": [(BATCH, HIDDEN)],
    "fc2": [(BATCH, DIM)],
}
LEAVES = {"fc1_input": ["fc1_input"], "fc1": ["fc1.gate", "fc1.up"], "act": ["act"], "fc2": ["fc2"]}


def layer(x, w):
    """x (BATCH, DIM) -> the same shape. Every named value is read by its own backward pass, fc2 too."""
    norm = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)
    norm = tag(norm, "fc1_input")
    fc1 = tag({"gate": norm @ w["gate"], "up": norm @ w["up"]}, "fc1")
    act = tag(jax.nn.silu(fc1["gate"]) * fc1["up"], "act")
    return x + jnp.sin(tag(act @ w["down"], "fc2"))


def inputs(dtype):
    shapes = {"gate": (DIM, HIDDEN), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM)}
    w = {k: normal(i, (LAYERS, *s), dtype) * 0.5 for i, (k, s) in enumerate(shapes.items())}
    return normal(9, (BATCH, DIM), dtype), w


def step(carry, w):
    return layer(carry, w), jnp.sum(carry, -1)


def through_checkpoint(rules):
    return lambda x, w: checkpoint(layer, policy=policy(rules))(x, jax.tree.map(lambda a: a[0], w))


def through_scan(rules, **fields):
    return lambda x, w: scan(step, x, w, policy=policy(rules, **fields))


def reference(kind, saved):
    """Plain JAX that saves these names."""
    names = jax.checkpoint_policies.save_only_these_names(*[leaf for n in saved for leaf in LEAVES[n]])
    if kind == "checkpoint":
        return lambda x, w: jax.checkpoint(layer, policy=names)(x, jax.tree.map(lambda a: a[0], w))
    return lambda x, w: lax.scan(jax.checkpoint(step, policy=names), x, w)


def assignments():
    return [dict(zip(NAMES, d, strict=True)) for d in itertools.product(("save", "offload", "recompute"), repeat=3)]


def saved_names(rules):
    return tuple(n for n, d in rules.items() if d != "recompute")


@functools.cache
def references(kind, dtype):
    """The gradients of all distinct references, compiled together."""
    subsets = sorted({saved_names(rules) for rules in assignments()})
    grads = run_each([gradient(reference(kind, s), (0, 1)) for s in subsets], *inputs(dtype))
    return dict(zip(subsets, grads, strict=True))


def stacks(names, lead=()):
    return Counter((*lead, *shape) for n in names for shape in SHAPES[n])


ON_GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", ["checkpoint", "scan"])
def test_gradients_of_all_27_assignments_equal_the_reference(kind, dtype, device):
    through = through_checkpoint if kind == "checkpoint" else functools.partial(through_scan, resident_layers=0)
    grads = run_each([gradient(through(rules), (0, 1)) for rules in assignments()], *inputs(dtype))
    for rules, grad in zip(assignments(), grads, strict=True):
        assert_same_bits(grad, references(kind, dtype)[saved_names(rules)])


@pytest.mark.parametrize("kind", ["checkpoint", "scan"])
@pytest.mark.parametrize("rules", assignments(), ids=lambda r: "-".join(r.values()))
def test_the_host_holds_exactly_what_is_offloaded(kind, rules):
    f = through_checkpoint(rules) if kind == "checkpoint" else through_scan(rules, resident_layers=0)
    lead = () if kind == "checkpoint" else (LAYERS,)
    held = kept(f, *inputs(jnp.bfloat16))
    by_place = {p: Counter() for p in ("host", "device")}
    for (place, dtype, shape), n in held.items():
        assert dtype == "bfloat16"
        by_place[place][shape] += n
    chosen = lambda decision: [n for n, d in rules.items() if d == decision]
    assert by_place["host"] == stacks(chosen("offload"), lead)
    saved = stacks(chosen("save"), lead)
    # The carry is kept beside: the layer's input is read by the norm's and the residual branch's recomputation. In
    # checkpoint it is an argument, and the sliced weights are no residuals of the layer.
    beside = Counter({(LAYERS, BATCH, DIM): 1}) if kind == "scan" else Counter({(DIM, HIDDEN): 2, (HIDDEN, DIM): 1})
    assert by_place["device"] == saved + beside


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("resident", [1, 2, 3])
def test_resident_layers_stay_on_the_device(resident, device):
    rules = {"fc1": "offload", "act": "save"}
    args = inputs(jnp.bfloat16)
    f = through_scan(rules, resident_layers=resident)
    assert_same_bits(run(gradient(f, (0, 1)), *args), references("scan", jnp.bfloat16)["fc1", "act"])
    moved = {shape: n for (place, _, shape), n in kept(f, *args).items() if place == "host"}
    assert moved == (stacks(["fc1"], (LAYERS - resident,)) if resident < LAYERS else {})
