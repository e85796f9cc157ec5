"""Two pipeline stages and two microbatches: scans whose forward and backward passes interleave, all alive at once.

A stage is a stack of layers. Each schedule runs the same forward and backward passes in one jit, in another order. The
gradients are the reference's bit for bit, and the host holds what the four passes offload, each until its own backward
pass.
"""

import jax
import jax.numpy as jnp
import pytest
from common import assert_same_bits, equations, in_a_loop, normal, on_cpu_and_gpu, place, policy, run_each
from jax import lax

from jaxoffload import scan, tag

LAYERS, BATCH, DIM = 3, 2, 4
STAGES, MICROBATCHES = 2, 2
ONE = BATCH * DIM * 4  # bytes of one layer's float32 (BATCH, DIM)

# (pass, stage, microbatch), in order.
SCHEDULES = {
    "all forward, then all backward": [
        *[("F", 0, 0), ("F", 1, 0), ("F", 0, 1), ("F", 1, 1)],
        *[("B", 1, 0), ("B", 0, 0), ("B", 1, 1), ("B", 0, 1)],
    ],
    "1F1B": [
        *[("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("F", 0, 1)],
        *[("B", 0, 0), ("F", 1, 1), ("B", 1, 1), ("B", 0, 1)],
    ],
    "last in, first out": [
        *[("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("F", 1, 1)],
        *[("B", 1, 1), ("B", 0, 1), ("B", 1, 0), ("B", 0, 0)],
    ],
}


def layer(x, w):
    x = tag(x, "layer_input")
    return jnp.sin(tag(x @ w, "fc1")) + x, None


def ours(x, ws):
    return scan(layer, x, ws, policy=policy({"layer_input": "offload", "fc1": "offload"}))[0]


def reference(x, ws):
    return lax.scan(in_a_loop(layer, "layer_input", "fc1"), x, ws)[0]


def gradients(stage, schedule, xs, weights):
    """Return the gradients of the squares' sum over all microbatches, for each stage's weights and for the inputs."""
    outs, backward, cotangents = {}, {}, {}
    sums, inputs = [jnp.zeros_like(w) for w in weights], [None] * MICROBATCHES
    for what, s, m in schedule:
        if what == "F":
            given = xs[m] if s == 0 else outs[s - 1, m]
            outs[s, m], backward[s, m] = jax.vjp(stage, given, weights[s])
        else:
            ct = 2 * outs[s, m] if s == STAGES - 1 else cotangents.pop((s + 1, m))
            cotangents[s, m], d_weights = backward.pop((s, m))(ct)
            sums[s] = sums[s] + d_weights
            if s == 0:
                inputs[m] = cotangents.pop((0, m))
    assert not backward and not cotangents
    return sums, inputs


XS = [normal(m, (BATCH, DIM)) for m in range(MICROBATCHES)]
WEIGHTS = [normal(10 + s, (LAYERS, DIM, DIM)) * 0.5 for s in range(STAGES)]


@on_cpu_and_gpu
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_and_bytes_of_a_schedule(name, device):
    through = lambda stage: lambda xs, weights: gradients(stage, SCHEDULES[name], xs, weights)
    assert_same_bits(*run_each([through(ours), through(reference)], XS, WEIGHTS))

    order = [e for e in equations(jax.make_jaxpr(through(ours))(XS, WEIGHTS)) if e.primitive.name.startswith("jaxoff")]
    held, alive, peak = [], 0, 0
    for eqn in order:
        moved = [v for v in eqn.outvars if place(v.aval) == "host"]
        freed = [v for v in eqn.invars if place(v.aval) == "host"]
        assert all(v in held for v in freed)  # by one backward pass, its own
        held = [v for v in held if v not in freed] + moved
        alive = sum(v.aval.size * v.aval.dtype.itemsize for v in held)
        peak = max(peak, alive)
    a_pass = LAYERS * 2 * ONE  # the last layer's rows stay empty
    at_once = {"1F1B": 2}.get(name, 4)
    assert [e.primitive.name.removeprefix("jaxoffload_")[0].upper() for e in order] == [
        w for w, _, _ in SCHEDULES[name]
    ]
    assert peak == at_once * a_pass and alive == 0


@on_cpu_and_gpu
def test_stages_of_unlike_layers_keep_apart(device):
    """Two stages of one policy whose residuals have other shapes, and a stage that runs twice."""

    def wide(x, w):
        return jnp.sin(tag(x @ w, "fc1")) @ w.T + x, None

    both = policy({"fc1": "offload"})
    narrow = lambda x, w: (jnp.cos(tag(x @ w, "fc1")), None)

    def model(through):
        def f(x, v, w):
            x, _ = through(wide, x, v)
            x, _ = through(narrow, x, w)
            x, _ = through(wide, x, v)
            return jnp.sum(x**2)

        return jax.grad(f, (0, 1, 2))

    args = XS[0], normal(7, (LAYERS, DIM, 2 * DIM)) * 0.5, WEIGHTS[0]
    ours = model(lambda f, x, w: scan(f, x, w, policy=both))
    reference = model(lambda f, x, w: lax.scan(in_a_loop(f, "fc1"), x, w))
    assert_same_bits(*run_each([ours, reference], *args))
