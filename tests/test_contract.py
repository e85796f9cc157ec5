"""The contract of everything that holds residuals: for each assignment of save, offload and recompute, the gradient is
the reference's bit for bit, and the host holds exactly the bytes that were asked for.

The reference is written without this library: `jax.checkpoint` with `save_only_these_names`, in `lax.scan`.
"""

import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from autodiff import accumulated, gradient, in_a_loop, kept, kept_bytes, runs, saving, total
from common import assert_same_bits, normal, on_cpu_and_gpu, policy, run, run_each
from jax import lax

from jaxoffload import HostPoolFull, check, checkpoint, offload, residuals, scan, tag
from jaxoffload._engine.host.need import need_of

LAYERS = 3
# The name in a policy -> the name of each leaf -> its shape; written by hand.
SHAPES = {
    "fc1_input": {"fc1_input": (4, 8)},
    "fc1": {"fc1.gate": (4, 16), "fc1.up": (4, 16)},
    "act": {"act": (4, 16)},
}
EVERY = [
    dict(zip(SHAPES, chosen, strict=True)) for chosen in itertools.product(("save", "offload", "recompute"), repeat=3)
]
NINE = [rules for number, rules in enumerate(EVERY) if (number // 9 + number // 3 + number) % 3 == 0]


def test_nine_assignments_have_each_pair_of_decisions():
    for one, other in itertools.combinations(SHAPES, 2):
        assert len({(rules[one], rules[other]) for rules in NINE}) == 9 == len(NINE)


def step(x, w):
    """x (4, 8) -> the same shape. The backward pass reads every named value, fc2 too."""
    norm = tag(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3), "fc1_input")
    fc1 = tag({"gate": norm @ w["gate"], "up": norm @ w["up"]}, "fc1")
    act = tag(jax.nn.silu(fc1["gate"]) * fc1["up"], "act")
    return x + jnp.sin(tag(act @ w["down"], "fc2")), jnp.sum(x, -1)


def inputs(dtype):
    shapes = {"gate": (8, 16), "up": (8, 16), "down": (16, 8)}
    w = {k: normal(i, (LAYERS, *s), dtype) * 0.5 for i, (k, s) in enumerate(shapes.items())}
    return normal(9, (4, 8), dtype), w


def first(weights):
    return jax.tree.map(lambda a: a[0], weights)


def through(kind, rules, **fields):
    p = policy(rules, **{"resident_layers": 0, **fields})
    if kind == "checkpoint":
        return lambda x, w: checkpoint(step, policy=p)(x, first(w))
    if kind == "offload":
        return offload(lambda x, w: lax.scan(jax.checkpoint(step, policy=p), x, w))
    return lambda x, w: scan(step, x, w, policy=p)


def saved_names(rules):
    return tuple(name for name, decision in rules.items() if decision != "recompute")


def reference(alone, saved):
    """Plain JAX that saves these names; `alone`: of one layer."""
    names = [leaf for name in saved for leaf in SHAPES[name]]
    if alone:
        return lambda x, w: jax.checkpoint(step, policy=saving(*names))(x, first(w))
    return lambda x, w: lax.scan(in_a_loop(step, *names), x, w)


@functools.cache
def references(alone, dtype):
    """The gradients of all distinct references, compiled together."""
    subsets = sorted({saved_names(rules) for rules in EVERY})
    grads = run_each([gradient(reference(alone, saved), (0, 1)) for saved in subsets], *inputs(dtype))
    return dict(zip(subsets, grads, strict=True))


def held(names, *lead):
    return Counter((*lead, *shape) for name in names for shape in SHAPES[name].values())


def at(place, shapes):
    return Counter({(place, "bfloat16", shape): n for shape, n in shapes.items()})


@pytest.mark.claim("what-is-where", "bit-for-bit")
@on_cpu_and_gpu
@pytest.mark.parametrize(
    "kind, dtype, every",
    [
        pytest.param("scan", jnp.float32, EVERY, marks=pytest.mark.slow),
        ("scan", jnp.bfloat16, NINE),
        ("checkpoint", jnp.bfloat16, NINE),
        pytest.param("offload", jnp.bfloat16, NINE, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_assignments_equal_the_reference(kind, dtype, every, device):
    grads = run_each([gradient(through(kind, rules), (0, 1)) for rules in every], *inputs(dtype))
    wrong = {}
    for rules, grad in zip(every, grads, strict=True):
        try:
            assert_same_bits(grad, references(kind == "checkpoint", dtype)[saved_names(rules)])
        except AssertionError as differs:
            wrong[tuple(rules.values())] = str(differs).partition("\n")[0]
    assert not wrong, f"{len(wrong)} of {len(every)}: {wrong}"


@pytest.mark.slow
@pytest.mark.claim("accumulated-bit-for-bit")
@on_cpu_and_gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.long)])
def test_accumulated_gradients_equal_a_plain_loops(dtype, device):
    subsets = sorted({saved_names(rules) for rules in NINE})
    plain = run_each([accumulated(reference(False, names), interleaved=False) for names in subsets], *inputs(dtype))
    want = dict(zip(subsets, plain, strict=True))
    grads = run_each([accumulated(through("scan", rules)) for rules in NINE], *inputs(dtype))
    for rules, got in zip(NINE, grads, strict=True):
        assert_same_bits(got, want[saved_names(rules)])


@pytest.mark.claim("empty-row")
@pytest.mark.parametrize("number", range(27))
@pytest.mark.parametrize("kind", ["checkpoint", "scan", "offload"])
def test_the_host_holds_exactly_what_is_offloaded(kind, number):
    """The device holds what the reference, which saves the same names, holds, less that."""
    rules, alone = EVERY[number], kind == "checkpoint"
    x, w = jax.eval_shape(lambda: inputs(jnp.bfloat16))
    offloaded = [name for name, decision in rules.items() if decision == "offload"]
    moved = held(offloaded) if alone else held(offloaded, LAYERS)
    host = moved if alone else moved + held(offloaded)  # the last layer's are separate, and one row is padding
    plain = kept(reference(alone, saved_names(rules)), x, w)
    assert kept(through(kind, rules), x, w) == plain - at("device", moved) + at("host", host)


@pytest.mark.parametrize("kind", ["checkpoint", "scan", "offload"])
def test_by_default_nothing_is_kept_that_the_reference_does_not_keep(kind):
    args = jax.eval_shape(lambda: inputs(jnp.bfloat16))
    ours = kept(through(kind, {}), *args)
    assert ours == kept(reference(kind == "checkpoint", ()), *args)
    if kind != "checkpoint":  # only the carry
        assert ours == at("device", Counter([(LAYERS, *args[0].shape)]))


@on_cpu_and_gpu
@pytest.mark.parametrize("resident", [1, 2, 3])
def test_resident_layers_stay_on_the_device(resident, device):
    args, f = inputs(jnp.bfloat16), through("scan", {"fc1": "offload", "act": "save"}, resident_layers=resident)
    assert_same_bits(run(gradient(f, (0, 1)), *args), references(False, jnp.bfloat16)["fc1", "act"])
    moved = {shape: n for (place, _, shape), n in kept(f, *args).items() if place == "host"}
    assert moved == (held(["fc1"], LAYERS - resident + 1) if resident < LAYERS else {})  # one row is empty


# ---- one policy inside another: what JAX's nested checkpoints keep is kept, and where the names say ----

BLOCKS, IN_A_BLOCK = 2, 3
ROW = 4 * 8 * 4  # bytes of a layer's fc1 in float32


def one_matmul(x, w):
    return x + jnp.tanh(tag(x @ w, "fc1")), None


# under(f): a checkpoint; over(f, x, w): a scan over layers
NESTED = {
    "a scan in a checkpoint": lambda under, over: under(lambda x, w: over(one_matmul, x, w)[0]),
    "blocks of layers": lambda under, over: lambda x, w: over(lambda x, w: over(one_matmul, x, w), x, w)[0],
    "a layer and a scan in a block": lambda under, over: (
        lambda x, w: over(lambda x, w: over(one_matmul, one_matmul(x, w[0])[0], w[1:]), x, w)[0]
    ),
    "a scan in a checkpoint in a block": lambda under, over: (
        lambda x, w: over(lambda x, w: (under(lambda x, w: over(one_matmul, x, w)[0])(x, w), None), x, w)[0]
    ),
}
OFFLOADED = policy({"fc1": "offload"}, resident_layers=0)
with_our_policy = functools.partial(jax.checkpoint, policy=OFFLOADED, prevent_cse=False)


def our_scan(f, x, w):
    return scan(f, x, w, policy=OFFLOADED)


NESTING = {
    "by hand": lambda shape: shape(functools.partial(checkpoint, policy=OFFLOADED), our_scan),
    "offload": lambda shape: offload(shape(with_our_policy, lambda f, x, w: lax.scan(with_our_policy(f), x, w))),
    "in jax.checkpoint": lambda shape: shape(with_our_policy, our_scan),
    "in jax.checkpoint under JAX's policy": lambda shape: shape(lambda f: in_a_loop(f, "fc1"), our_scan),
}


def nested_reference(shape):
    return shape(lambda f: in_a_loop(f, "fc1"), lambda f, x, w: lax.scan(in_a_loop(f, "fc1"), x, w))


def value_and_gradient(f):
    return jax.value_and_grad(lambda *args: total(f(*args)), (0, 1))


def nested_inputs(shape):
    x, w = normal(0, (4, 8)), normal(1, (BLOCKS, IN_A_BLOCK, 8, 8)) / 3
    return (x, w.reshape(-1, 8, 8)) if shape == "a scan in a checkpoint" else (x, w)


def matmuls(f, *args):
    """How many run, in all iterations."""
    return runs(jax.make_jaxpr(value_and_gradient(f))(*args), "dot_general")


@pytest.mark.claim("nested-policies", "bit-for-bit")
@pytest.mark.parametrize("shape", NESTED)
def test_nested_policies_keep_what_jaxs_do_and_the_bits(shape):
    args, plain = nested_inputs(shape), nested_reference(NESTED[shape])
    ours = [way(NESTED[shape]) for way in NESTING.values()]
    *each, want = run_each([value_and_gradient(f) for f in (*ours, plain)], *args)
    for way, f, got in zip(NESTING, ours, each, strict=True):
        assert matmuls(f, *args) == matmuls(plain, *args) == 3 * BLOCKS * IN_A_BLOCK, way
        assert_same_bits(got, want)


@pytest.mark.claim("nested-policies", "what-is-where")
@pytest.mark.parametrize("way", NESTING)
@pytest.mark.parametrize("shape", NESTED)
def test_what_nested_policies_offload_is_on_the_host_once_and_counted_once(shape, way, monkeypatch):
    f, args = NESTING[way](NESTED[shape]), nested_inputs(shape)
    # With a padding row of a layer, or of a block; and the inputs of layers, or of blocks.
    layers = BLOCKS * IN_A_BLOCK
    host, device = (layers + 1, layers) if shape == "a scan in a checkpoint" else (layers + IN_A_BLOCK, BLOCKS)
    table = residuals(f, *args)
    assert (table.device_bytes, table.host_bytes) == (device * ROW, host * ROW)
    moved = [row for row in table if row.state == "offloaded"]
    assert sum(row.bytes for row in moved if row.kind == "value") == layers * ROW
    assert not any(name.startswith("fc1") for row in table if row not in moved for name in row.names)
    if way in ("by hand", "offload"):  # JAX's own checkpoint in a layer copies once more, in the backward pass
        pool = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
        monkeypatch.setenv(pool, repr(host * ROW / 2**30))
        check(f, *args, policy=OFFLOADED)
        monkeypatch.setenv(pool, repr((host * ROW - 1) / 2**30))
        with pytest.raises(HostPoolFull):
            check(f, *args, policy=OFFLOADED)


@pytest.mark.claim("nested-policies")
def test_a_policy_of_jaxs_is_asked_about_what_computes_a_value():
    args = nested_inputs("a scan in a checkpoint")
    under = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    assert matmuls(under(lambda x, w: our_scan(one_matmul, x, w)[0]), *args) == 3 * BLOCKS * IN_A_BLOCK


@pytest.mark.claim("nested-policies")
@pytest.mark.parametrize("way", ["by hand", "in jax.checkpoint"])
def test_what_the_outer_policy_does_not_keep_runs_again_and_is_moved_then(way):
    outer, args = policy({"first": "save"}), nested_inputs("a scan in a checkpoint")
    under = functools.partial(checkpoint if way == "by hand" else jax.checkpoint, policy=outer)
    f = under(lambda x, w: our_scan(one_matmul, jnp.sin(tag(jnp.cos(x), "first")), w)[0])
    layers = BLOCKS * IN_A_BLOCK
    assert matmuls(f, *args) == 4 * layers
    assert kept_bytes(f, *args) == (ROW, 0)
    table, jaxpr = residuals(f, *args), jax.make_jaxpr(value_and_gradient(f))(*args)
    assert table.host_bytes == 0 and "runs that again is not shown" in table.notes[-1]
    assert need_of(jaxpr).bytes() == (layers + 1) * ROW
