"""The contract of everything that holds residuals: for each assignment of save, offload and recompute, the gradient is
the reference's bit for bit, and the host holds exactly the bytes that were asked for.

The reference is written without this library: `jax.checkpoint` with `save_only_these_names`, in `lax.scan`.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from common import (
    accumulated,
    assert_same_bits,
    gradient,
    in_a_loop,
    kept,
    kept_bytes,
    normal,
    on_cpu_and_gpu,
    policy,
    run,
    run_each,
    saving,
    total,
)
from flax import nnx
from jax import lax

from jaxoffload import HostPoolFull, check, checkpoint, offload, residuals, scan, tag
from jaxoffload._engine.jaxprs.walk import walk
from models.attention import rotations
from models.config import Model
from models.transformer import Layer, stacked

LAYERS = 3


class Case(NamedTuple):
    """A layer, and its residuals written by hand."""

    step: Callable[..., Any]  # (carry, one layer's weights) -> (carry, y)
    inputs: Callable[..., Any]  # dtype -> (carry, stacked weights)
    shapes: dict[str, dict[str, tuple[int, ...]]]  # the name in a policy -> the name of each leaf -> its shape


def mlp(x, w):
    """x (4, 8) -> the same shape. The backward pass reads every named value, fc2 too."""
    norm = tag(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3), "fc1_input")
    fc1 = tag({"gate": norm @ w["gate"], "up": norm @ w["up"]}, "fc1")
    act = tag(jax.nn.silu(fc1["gate"]) * fc1["up"], "act")
    return x + jnp.sin(tag(act @ w["down"], "fc2")), jnp.sum(x, -1)


def mlp_inputs(dtype):
    shapes = {"gate": (8, 16), "up": (8, 16), "down": (16, 8)}
    w = {k: normal(i, (LAYERS, *s), dtype) * 0.5 for i, (k, s) in enumerate(shapes.items())}
    return normal(9, (4, 8), dtype), w


MODEL = Model(layers=LAYERS, d_model=16, heads=2, kv_heads=1, d_ff=24, attention="xla")


def decoder(x, weights):
    """The reference model's layer, x (2, 6, 16)."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Layer(MODEL, nnx.Rngs(params=0))))
    return nnx.merge(graph, weights)(x, rotations(6, MODEL.d_head, MODEL.rope_theta)), None


def decoder_inputs(dtype):
    weights = nnx.state(stacked(LAYERS, lambda rngs: Layer(MODEL, rngs), nnx.Rngs(params=0)))
    return normal(9, (2, 6, 16), dtype), weights


CASES = {
    "mlp": Case(
        mlp,
        mlp_inputs,
        {
            "fc1_input": {"fc1_input": (4, 8)},
            "fc1": {"fc1.gate": (4, 16), "fc1.up": (4, 16)},
            "act": {"act": (4, 16)},
        },
    ),
    "model": Case(
        decoder,
        decoder_inputs,
        {
            "mlp/norm": {"mlp/norm": (2, 6, 16)},
            "fc1": {"mlp/fc1.gate": (2, 6, 24), "mlp/fc1.up": (2, 6, 24)},
            "act": {"mlp/act": (2, 6, 24)},
        },
    ),
}


def assignments(case):
    choices = itertools.product(("save", "offload", "recompute"), repeat=3)
    return [dict(zip(CASES[case].shapes, chosen, strict=True)) for chosen in choices]


def first(weights):
    return jax.tree.map(lambda a: a[0], weights)


def through(case, kind, rules, **fields):
    step, p = CASES[case].step, policy(rules, **{"resident_layers": 0, **fields})
    if kind == "checkpoint":
        return lambda x, w: checkpoint(step, policy=p)(x, first(w))
    if kind == "offload":
        return offload(lambda x, w: lax.scan(jax.checkpoint(step, policy=p), x, w))
    return lambda x, w: scan(step, x, w, policy=p)


def leaves(case, saved):
    return [leaf for name in saved for leaf in CASES[case].shapes[name]]


def reference(case, alone, saved):
    """Plain JAX that saves these names; `alone`: of one layer."""
    step, names = CASES[case].step, leaves(case, saved)
    if alone:
        return lambda x, w: jax.checkpoint(step, policy=saving(*names))(x, first(w))
    return lambda x, w: lax.scan(in_a_loop(step, *names), x, w)


def saved_names(rules):
    return tuple(name for name, decision in rules.items() if decision != "recompute")


@functools.cache
def references(case, alone, dtype):
    """The gradients of all distinct references, compiled together."""
    subsets = sorted({saved_names(rules) for rules in assignments(case)})
    grads = run_each([gradient(reference(case, alone, s), (0, 1)) for s in subsets], *CASES[case].inputs(dtype))
    return dict(zip(subsets, grads, strict=True))


def held(case, names, lead=()):
    return Counter((*lead, *shape) for name in names for shape in CASES[case].shapes[name].values())


def at(place, shapes):
    return Counter({(place, "bfloat16", shape): n for shape, n in shapes.items()})


@pytest.mark.claim("what-is-where", "bit-for-bit")
@on_cpu_and_gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", ["checkpoint", "scan", "offload"])
@pytest.mark.parametrize("case", ["mlp", pytest.param("model", marks=pytest.mark.slow)])
def test_gradients_of_all_27_assignments_equal_the_reference(case, kind, dtype, device):
    every = assignments(case)
    grads = run_each([gradient(through(case, kind, rules), (0, 1)) for rules in every], *CASES[case].inputs(dtype))
    wrong = {}
    for rules, grad in zip(every, grads, strict=True):
        try:
            assert_same_bits(grad, references(case, kind == "checkpoint", dtype)[saved_names(rules)])
        except AssertionError as differs:
            wrong[tuple(rules.values())] = str(differs).partition("\n")[0]
    assert not wrong, f"{len(wrong)} of {len(every)}: {wrong}"


@pytest.mark.slow
@pytest.mark.claim("accumulated-bit-for-bit")
@on_cpu_and_gpu
@pytest.mark.parametrize(
    "case, dtype, every", [("mlp", jnp.float32, 1), ("mlp", jnp.bfloat16, 1), ("model", jnp.bfloat16, 4)]
)
def test_accumulated_gradients_equal_a_plain_loops(case, dtype, every, device):
    """All 27 assignments; of the model's layer, `every` fourth."""
    every, args = assignments(case)[::every], CASES[case].inputs(dtype)
    subsets = sorted({saved_names(rules) for rules in every})
    plain = run_each([accumulated(reference(case, False, names), interleaved=False) for names in subsets], *args)
    want = dict(zip(subsets, plain, strict=True))
    grads = run_each([accumulated(through(case, "scan", rules)) for rules in every], *args)
    for rules, got in zip(every, grads, strict=True):
        assert_same_bits(got, want[saved_names(rules)])


@functools.cache
def abstract_inputs(case, alone):
    """The carry and all layers' weights; `alone`: one layer's."""
    x, w = jax.eval_shape(lambda: CASES[case].inputs(jnp.bfloat16))
    return x, jax.eval_shape(first, w) if alone else w


@functools.cache
def kept_by_the_reference(case, alone, saved):
    if alone:
        f = jax.checkpoint(CASES[case].step, policy=saving(*leaves(case, saved)))
    else:
        f = reference(case, False, saved)
    return kept(f, *abstract_inputs(case, alone))


@pytest.mark.claim("empty-row")
@pytest.mark.parametrize("number", range(27))
@pytest.mark.parametrize("kind", ["checkpoint", "scan", "offload"])
@pytest.mark.parametrize("case", CASES)
def test_the_host_holds_exactly_what_is_offloaded(case, kind, number):
    """The device holds what the reference, which saves the same names, holds, less that."""
    rules = assignments(case)[number]
    (x, w), lead = abstract_inputs(case, kind == "checkpoint"), () if kind == "checkpoint" else (LAYERS,)
    ours = checkpoint(CASES[case].step, policy=policy(rules)) if kind == "checkpoint" else through(case, kind, rules)
    moved = held(case, [name for name, decision in rules.items() if decision == "offload"], lead)
    host = moved
    if kind != "checkpoint":  # the last layer's are separate, and one row of the stack is padding
        host = moved + held(case, [name for name, decision in rules.items() if decision == "offload"])
    plain = kept_by_the_reference(case, kind == "checkpoint", saved_names(rules))
    assert kept(ours, x, w) == plain - at("device", moved) + at("host", host)


@pytest.mark.parametrize("kind", ["checkpoint", "scan", "offload"])
@pytest.mark.parametrize("case", CASES)
def test_by_default_nothing_is_kept_that_the_reference_does_not_keep(case, kind):
    args = abstract_inputs(case, False)
    ours = kept(through(case, kind, {}), *args)
    assert ours == kept(reference(case, kind == "checkpoint", ()), *args)
    if kind != "checkpoint":  # only the carry
        assert ours == at("device", Counter([(LAYERS, *args[0].shape)]))


@on_cpu_and_gpu
@pytest.mark.parametrize("resident", [1, 2, 3])
def test_resident_layers_stay_on_the_device(resident, device):
    rules = {"fc1": "offload", "act": "save"}
    args = mlp_inputs(jnp.bfloat16)
    f = through("mlp", "scan", rules, resident_layers=resident)
    assert_same_bits(run(gradient(f, (0, 1)), *args), references("mlp", False, jnp.bfloat16)["fc1", "act"])
    moved = {shape: n for (place, _, shape), n in kept(f, *args).items() if place == "host"}
    rows = LAYERS - resident + 1  # one is empty
    assert moved == (held("mlp", ["fc1"], (rows,)) if resident < LAYERS else {})


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
    sites = walk(jax.make_jaxpr(value_and_gradient(f))(*args))
    return sum(site.runs for site in sites if site.eqn.primitive.name == "dot_general")


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
    assert not any(again.host_bytes for again in table.reruns)
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
@pytest.mark.parametrize("outer", [None, ["fc1"]], ids=["no policy", "the scan's names"])
def test_effects_of_a_scan_in_a_checkpoint_happen_once_each_pass(outer):
    """As without the checkpoint, which would have to keep them from happening again."""
    happened = []

    def layer(x, w):
        jax.debug.callback(lambda: happened.append(1))
        return one_matmul(x, w)

    args = nested_inputs("a scan in a checkpoint")
    run = lambda x, w: our_scan(layer, x, w)[0]
    under = jax.checkpoint(run, policy=None if outer is None else saving(*outer))
    counts = []
    for f in (run, under):
        happened.clear()
        jax.block_until_ready(jax.jit(value_and_gradient(f))(*args))
        jax.effects_barrier()
        counts.append(len(happened))
    assert counts[0] == counts[1] > 0


@pytest.mark.claim("nested-policies")
@pytest.mark.parametrize("way", ["by hand", "in jax.checkpoint"])
def test_what_the_outer_policy_does_not_keep_runs_again_and_is_moved_then(way):
    outer, args = policy({"first": "save"}), nested_inputs("a scan in a checkpoint")
    under = functools.partial(checkpoint if way == "by hand" else jax.checkpoint, policy=outer)
    f = under(lambda x, w: our_scan(one_matmul, jnp.sin(tag(jnp.cos(x), "first")), w)[0])
    layers = BLOCKS * IN_A_BLOCK
    assert matmuls(f, *args) == 4 * layers
    assert kept_bytes(f, *args) == (ROW, 0)
    assert [again.host_bytes for again in residuals(f, *args).reruns] == [(layers + 1) * ROW]
