"""host_optimizer: state on the host, and the bits of the transformation on the device."""

import ast
import copy
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from optax import contrib
from pages import ROOT, result

from benchmarks import optimizer
from jaxoffload import (
    HostPoolFull,
    Policy,
    PolicyError,
    compiler_options,
    host_optimizer,
    join_masters,
    scan,
    split_masters,
    tag,
    verify,
)
from jaxoffload._engine.host.need import held_by_arguments, need_of, refuse_what_does_not_fit
from jaxoffload._engine.jaxprs.inline import depending, evaluate_equations
from jaxoffload._jax import ELEMENTWISE, on_host
from jaxoffload._optimizer import placement as _placement
from jaxoffload._optimizer import update as _update
from jaxoffload._optimizer.rows import axes_needed, block_of
from jaxoffload.proof import Bus, Machine, exact_options, predict
from jaxoffload.proof._program.exact import repeatable_options

ONE = SingleDeviceSharding(jax.devices()[0])
HOST = jax.memory.Space.Host
ALL = Policy(default="offload", min_offload_bytes=0)
KEY = jax.random.key(0)


def params_in(dtype=jnp.float32):
    """Two stacks of layers of unlike length, a table, and one of a prime number of rows, which comes whole."""
    shapes = {"layers/w": (4, 8, 16), "layers/scale": (4, 8), "dense/w": (3, 8, 8), "table": (60, 8), "odd": (131, 8)}
    drawn = {
        name: jax.random.normal(jax.random.fold_in(KEY, n), s, dtype) for n, (name, s) in enumerate(shapes.items())
    }
    return {
        "layers": {"w": drawn["layers/w"], "scale": drawn["layers/scale"]},
        "dense": {"w": drawn["dense/w"]},
        "table": drawn["table"],
        "odd": drawn["odd"],
    }


def gradients_of(params, step):
    leaves, tree = jax.tree.flatten(params)
    draw = lambda n, x: jax.random.normal(jax.random.fold_in(KEY, 100 * step + n), x.shape, x.dtype)
    return jax.tree.unflatten(tree, [jax.device_put(draw(n, x), x.sharding) for n, x in enumerate(leaves)])


def of_optax(tx):
    """The reference: state and parameters on the device, updated by Optax alone."""

    def step(gradients, params, state):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, compiler_options=exact_options())


def after_steps(step, params, state, steps=3):
    for n in range(steps):
        params, state = step(gradients_of(params, n), params, state)
    return params, state


def assert_equal(ours, reference):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(reference), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path), strict=True)


def assert_bits(tx, params, policy=ALL):
    """Steps with state on the host have the bits of steps with state on the device. Return the optimizer, its first
    state, and what the steps return."""
    ours = host_optimizer(tx, policy=policy, shardings=ONE)
    state = ours.init(params)
    found = after_steps(jax.jit(ours.apply, compiler_options=exact_options()), params, state)
    assert_equal((found[0], found[1].inner), after_steps(of_optax(tx), params, tx.init(params)))
    return ours, state, found


def kinds_of(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


TRANSFORMATIONS = {
    "adamw": lambda: optax.adamw(1e-3),
    "adam, bfloat16 momentum, clipped by the norm of all, with a schedule": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-3, 9), mu_dtype=jnp.bfloat16)
    ),
    "adamw with a mask": lambda: optax.adamw(1e-3, mask=lambda p: jax.tree.map(lambda x: x.shape[0] == 4, p)),
    "adamw, a rate that is interpolated": lambda: optax.adamw(
        lambda step: jnp.interp(step, jnp.array([0.0, 2.0, 9.0]), jnp.array([0.0, 1e-3, 1e-4]))
    ),
    "what JAX lowers as a high primitive": lambda: optax.chain(
        optax.trace(0.9), optax.stateless(lambda u, _: jax.tree.map(lambda x: jnp.ldexp(x, -3), u))
    ),
    "lion": lambda: optax.lion(1e-3),
    "momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "amsgrad": lambda: optax.amsgrad(1e-3),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "schedule-free": lambda: contrib.schedule_free_adamw(1e-3),
    "factored": lambda: optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=4), optax.scale(-1e-2)),
    "adam for some": lambda: optax.partition(
        {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-3)},
        {"layers": "adam", "table": "sgd"},
    ),
}


# Every day one of several parts, and one for some arrays alone. Those like Adam are long.
EVERY_DAY = ("adam, bfloat16 momentum, clipped by the norm of all, with a schedule", "adam for some")
LIKE_ADAM = ("adamw", "rmsprop", "amsgrad")
marks_of = lambda name: () if name in EVERY_DAY else pytest.mark.long if name in LIKE_ADAM else pytest.mark.slow


@pytest.mark.claim("host-state-has-the-bits")
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in TRANSFORMATIONS])
def test_state_on_the_host_has_the_bits_of_state_on_the_device(name):
    tx, params = TRANSFORMATIONS[name](), {"layers": params_in()["layers"], "table": params_in()["table"]}
    _, state, found = assert_bits(tx, params)
    assert_equal(state.inner, tx.init(params))
    of_layers = [x for x in jax.tree.leaves(state.inner) if x.shape == (4, 8, 16)]
    assert kinds_of(of_layers) == ({"pinned_host"} if of_layers else set())
    assert kinds_of(found[1].inner) == kinds_of(state.inner)


def test_stacks_of_unlike_length_and_what_comes_whole_are_updated_together():
    ours, *_ = assert_bits(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), params_in())
    blocks = {p.name: p.blocks for p in ours.placements(params_in())}
    assert blocks == {"dense/w": 3, "layers/scale": 4, "layers/w": 4, "odd": 1, "table": 60}


# XLA simplifies what stands in a branch, or beside a matmul, otherwise than in a loop over blocks.
ROUNDED = {
    "clipped by each array's norm": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1e-3)),
    "clipped by the norm of all, and applied if finite": lambda: optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), 3
    ),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "muon, which multiplies the matrices of a layer": lambda: contrib.muon(
        1e-3, muon_weight_dimension_numbers={"layers": {"w": contrib.MuonDimensionNumbers(1, 2), "scale": None}}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDED)
def test_other_transformations_agree_up_to_rounding(name):
    tx, params = ROUNDED[name](), {"layers": params_in()["layers"]}
    ours = host_optimizer(tx, policy=ALL, shardings=ONE)
    found = after_steps(jax.jit(ours.apply), params, ours.init(params))
    assert ours.placements(params)[1][2:4] == ("host", 4)
    close = lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (found[0], found[1].inner), after_steps(of_optax(tx), params, tx.init(params)))


def test_a_transformation_of_ones_own_is_judged_by_what_it_computes():
    scale = lambda g, m: m * 0.9 + jnp.tanh(g) * jnp.max(jnp.abs(g), axis=-1, keepdims=True)
    init = lambda params: {"m": jax.tree.map(jnp.zeros_like, params), "calls": 0}

    def update(gradients, state, params=None):
        m = jax.tree.map(scale, gradients, state["m"])
        return jax.tree.map(jnp.negative, m), {"m": m, "calls": state["calls"] + 1}

    assert_bits(optax.GradientTransformation(init, update), params_in())


BY_ROWS = {
    "zeros in a branch": lambda g, m, n: lax.cond(n > 1, lambda: 0.9 * m + g, lambda: jnp.zeros_like(m)),
    "what is whole in a branch": lambda g, m, n: lax.cond(n > 1, lambda: m, lambda: jnp.arange(512.0).reshape(m.shape)),
    "a sum that begins with zeros": lambda g, m, n: lax.fori_loop(0, 3, lambda i, c: c + g, jnp.zeros_like(m)) + m,
    "what a loop stacks": lambda g, m, n: lax.scan(lambda c, x: (c + x * g, 2 * c), m, jnp.arange(3.0))[1].sum(0),
    "a loop from the end": lambda g, m, n: jnp.tensordot(
        jnp.arange(3.0), lax.scan(lambda c, x: (c * x + g, c), m, jnp.arange(3.0), reverse=True)[1], 1
    ),
    "a matmul over a batch": lambda g, m, n: (m @ jnp.swapaxes(g, 1, 2)) @ g,
    "a matmul with all of a gradient": lambda g, m, n: jnp.einsum("lij,kij->lj", m, g)[:, None] + m,
    "a norm of each layer": lambda g, m, n: m + g / jnp.linalg.norm((g + m).reshape(4, -1), axis=1).reshape(4, 1, 1),
    "the number of a layer": lambda g, m, n: m + g * jnp.arange(4.0).reshape(4, 1, 1),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_what_treats_layers_by_themselves_streams(name):
    init = lambda params: {"m": jnp.zeros_like(params), "calls": 0}

    def update(gradients, state, params=None):
        m = BY_ROWS[name](gradients, state["m"], state["calls"])
        return -m, {"m": m, "calls": state["calls"] + 1}

    tx, params = optax.GradientTransformation(init, update), params_in()["layers"]["w"]
    ours = host_optimizer(tx, policy=ALL, shardings=ONE)
    assert ours.placements(params)[0].blocks == 4
    found = after_steps(jax.jit(ours.apply), params, ours.init(params))
    close = lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
    jax.tree.map(close, (found[0], found[1].inner), after_steps(of_optax(tx), params, tx.init(params)))


def test_an_effect_of_a_branch_happens_if_it_is_taken():
    seen = []

    def update(gradients, state, params=None):
        first = lambda: jax.debug.callback(lambda n: seen.append(int(n)), state["calls"])
        lax.cond(state["calls"] == 1, first, lambda: None)
        return gradients, {"m": state["m"] + gradients, "calls": state["calls"] + 1}

    init = lambda params: {"m": jnp.zeros_like(params), "calls": 0}
    params = params_in()["layers"]["w"]
    ours = host_optimizer(optax.GradientTransformation(init, update), policy=ALL, shardings=ONE)
    after_steps(jax.jit(ours.apply), params, ours.init(params))
    jax.effects_barrier()
    assert seen == [1]


# Integers: their sums have the same bits in any order, which a matmul of fewer rows may have.
X, Y = (jnp.float32(jax.random.randint(jax.random.key(n), (4, 6, 8), -9, 10)) for n in range(2))
# An equation, and the axes of its result of which rows can be computed from rows of the operands.
EQUATIONS = {
    "elementwise": (lambda: lax.mul(X, Y), {0, 1, 2}),
    "one number for all": (lambda: lax.select_n(X[0, 0, 0] > 0, X, Y), {0, 1, 2}),
    "a matmul": (lambda: lax.dot_general(X, Y, (((1,), (1,)), ((0,), (0,)))), {0, 1, 2}),
    "a matmul without a batch": (lambda: lax.dot_general(X, Y, (((0, 2), (0, 2)), ((), ()))), {0, 1}),
    "repeated": (lambda: lax.broadcast_in_dim(X[:, :1], (2, 4, 6, 8), (1, 2, 3)), {0, 1, 2, 3}),
    "in another shape": (lambda: lax.reshape(X, (4, 2, 3, 8)), {0, 3}),
    "in the shape of others": (lambda: lax.reshape(X, (6, 4, 8)), {2}),
    "turned": (lambda: lax.transpose(X, (2, 0, 1)), {0, 1, 2}),
    "without an axis": (lambda: lax.squeeze(X[:, :1], (1,)), {0, 1}),
    "a sum": (lambda: jnp.sum(X, axis=1), {0, 1}),
    "the largest": (lambda: lax.argmax(X, 1, jnp.int32), {0, 1}),
    "one behind the other": (lambda: lax.concatenate([X, Y], 1), {0, 2}),
    "one after another": (lambda: lax.rev(X, (1,)), set()),
    "sums so far": (lambda: lax.cumsum(X, 1), set()),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_rows_are_computed_from_the_rows_that_they_need(name):
    f, known = EQUATIONS[name]
    jaxpr = jax.make_jaxpr(f)()
    eqn, values = jaxpr.eqns[-1], dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    evaluate_equations(jaxpr, jaxpr.eqns, values)
    axes_of = {axis: axes_needed(eqn, axis) for axis in range(eqn.outvars[0].aval.ndim)}
    assert {axis for axis, axes in axes_of.items() if axes is not None} == known
    half = lambda x, axis, i: x if axis is None else jnp.split(x, 2, axis)[i]
    for axis, i in itertools.product(known, range(2)):
        operands = [half(values[v], of, i) for v, of in zip(eqn.invars, axes_of[axis], strict=True)]
        np.testing.assert_array_equal(block_of(eqn, axis, 2, operands), half(f(), axis, i), strict=True)


def test_an_update_may_read_the_gradient_of_another_array():
    """Which is on the device, whole: of it, too, blocks read the rows that belong to them."""
    init = lambda params: jax.tree.map(jnp.zeros_like, params)

    def update(gradients, state, params=None):
        state = {"a": 0.9 * state["a"] + jnp.tanh(gradients["b"]), "b": 0.9 * state["b"] + gradients["a"]}
        return jax.tree.map(jnp.negative, state), state

    draw = lambda n: jax.random.normal(jax.random.key(n), (384, 8))  # 128 blocks of three rows
    assert_bits(optax.GradientTransformation(init, update), {"a": draw(0), "b": draw(1)})


@pytest.mark.parametrize(
    ("turned", "blocks"), [(lambda g, m: jnp.transpose(g) + m, 4), (lambda g, m: g + jnp.transpose(m), 1)]
)
def test_rows_of_the_state_that_become_columns_are_mixed(turned, blocks):
    """Of a gradient, which is on the device, columns may be read as well as rows."""
    init = lambda params: jax.tree.map(jnp.zeros_like, params)
    update = lambda g, state, params=None: (jax.tree.map(jnp.subtract, g, state), jax.tree.map(turned, g, state))
    ours, *_ = assert_bits(optax.GradientTransformation(init, update), {"w": jax.random.normal(KEY, (4, 4))})
    assert ours.placements({"w": jnp.zeros((4, 4))})[0].blocks == blocks


MIXING = {
    "lamb": (lambda: optax.lamb(1e-3), "mixes the rows of its first axis, which are layers (reduce_sum"),
    "a norm of updates": (
        lambda: optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0)),
        "mixes the rows of its first axis, which are layers (reduce_sum",
    ),
    "a long loop": (
        lambda: optax.chain(
            optax.trace(0.9),
            optax.stateless(lambda u, _: jax.tree.map(lambda x: lax.fori_loop(0, 99, lambda i, x: jnp.sin(x), x), u)),
        ),
        "mixes the rows of its first axis, which are layers (scan",
    ),
    "what is printed": (
        lambda: optax.chain(
            optax.trace(0.9), optax.stateless(lambda u, _: (jax.debug.print("{}", u["layers"]["w"]), u)[1])
        ),
        "something that is of no single parameter",
    ),
    "a scale for all": (contrib.dadapt_adamw, "something that is of no single parameter"),
    "layers that read others": (
        lambda: optax.chain(
            optax.trace(0.9), optax.stateless(lambda u, _: jax.tree.map(lambda x: jnp.roll(x, 1, 0), u))
        ),
        "mixes the rows of its first axis",
    ),
}


@pytest.mark.claim("host-state-mixing-refused")
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_layers_is_refused_before_anything_is_compiled(name):
    make, why = MIXING[name]
    tx = host_optimizer(make(), policy=ALL, shardings=ONE)
    with pytest.raises(NotImplementedError) as refused:
        tx.placements(params_in())
    assert why in str(refused.value) and "default='offload')" in str(refused.value)
    named = ast.literal_eval(re.search(r"Policy\((\{.*\}),", str(refused.value))[1])
    host_optimizer(make(), policy=Policy(named, default="offload", min_offload_bytes=0), shardings=ONE).placements(
        params_in()
    )


def test_state_of_another_array_is_refused():
    swap = lambda u, _: {"a": u["b"], "b": u["a"]}
    tx = host_optimizer(optax.chain(optax.trace(0.9), optax.stateless(swap)), policy=ALL, shardings=ONE)
    with pytest.raises(
        NotImplementedError,
        match="the state of a, b is on the host, and the update of a reads that of b; keep it on the",
    ):
        tx.init({"a": jnp.ones((4, 8, 8)), "b": jnp.ones((4, 8, 8))})


def test_what_is_saved_may_mix_layers():
    params = {"layers": params_in()["layers"]["w"], "table": params_in()["table"]}
    ours, *_ = assert_bits(optax.lamb(1e-3), params, Policy({"layers": "save"}, default="offload", min_offload_bytes=0))
    assert [(p.name, p.place, p.blocks) for p in ours.placements(params)] == [
        ("layers", "device", 1),
        ("table", "host", 1),  # a matrix, whose rows LAMB mixes, comes to the device whole
    ]


# ------------------------------------------------------------------------------------------------------------ masters


def rounded(x):
    """float32 to bfloat16, ties to the larger integer, by NumPy."""
    bits = np.asarray(x).view(np.uint32)
    return ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16).view(jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", [None, jnp.bfloat16], ids=str)
def test_masters_have_the_bits_of_float32_parameters(state_dtype):
    tx, params = optax.adamw(1e-1), params_in(jnp.bfloat16)
    ours = host_optimizer(tx, policy=ALL, shardings=ONE, masters=True, state_dtype=state_dtype)
    found, state = after_steps(jax.jit(ours.apply, compiler_options=exact_options()), params, ours.init(params))
    assert kinds_of(state.remainders) == {"pinned_host"}
    in_float32 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    stored = lambda s: jax.tree.map(lambda x: x.astype(state_dtype or x.dtype) if x.ndim else x, s)
    on_device = of_optax(tx)

    def step(gradients, masters, inner):
        masters, inner = on_device(in_float32(gradients), masters, jax.tree.map(jnp.array, in_float32_arrays(inner)))
        return masters, stored(inner)

    in_float32_arrays = lambda s: jax.tree.map(lambda x: x.astype(jnp.float32) if x.ndim else x, s)
    masters, inner = in_float32(params), stored(tx.init(in_float32(params)))
    for n in range(3):
        masters, inner = step(gradients_of(params, n), masters, inner)
    assert_equal(state.inner, inner)
    assert_equal(jax.tree.map(lambda w, r: join_masters(w, jax.device_put(r, ONE)), found, state.remainders), masters)
    assert_equal(found, jax.tree.map(rounded, masters))


@pytest.mark.claim("masters-lose-nothing")
def test_a_weight_and_its_remainder_are_the_master_bit_for_bit():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    edges = np.array([0, 1, 0x8000, 0x7FFF, 0xFFFF8000, 0x00018000, 0x7F7FFFFF, 0x7F800000, 0xFF800000], np.uint32)
    masters = np.concatenate([bits, edges, edges + 1]).view(np.float32)
    weights, remainders = jax.jit(split_masters)(masters)
    again = np.asarray(jax.jit(join_masters)(weights, remainders))
    is_nan = np.isnan(masters)
    assert (again.view(np.uint32) == masters.view(np.uint32))[~is_nan].all()
    assert np.isnan(again[is_nan]).all() and np.isnan(np.asarray(weights, np.float32)[is_nan]).all()
    assert (np.asarray(weights).view(np.uint16) == rounded(masters).view(np.uint16))[~is_nan].all()


# ----------------------------------------------------------------------------------------------------------- sharding


FACTORED = lambda: optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=4), optax.scale(-1e-2))


@pytest.mark.slow
@pytest.mark.claim("host-state-is-sharded")
@pytest.mark.parametrize("tx", [lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), FACTORED])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_state_is_sharded_as_parameters_are_and_blocks_are_parts_of_shards(kind, tx):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)
    specs = {
        "w": (None, "fsdp", "tensor"),
        "scale": (None, "fsdp"),
        "table": ("fsdp", "tensor"),
        "flat": (("fsdp", "tensor"),),
    }
    shardings = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}
    shapes = {"w": (4, 8, 16), "scale": (4, 8), "table": (64, 8), "flat": (64,)}
    with jax.set_mesh(mesh):
        draw = lambda name: jax.random.normal(jax.random.key(len(name)), shapes[name])
        params = {name: jax.device_put(draw(name), sharding) for name, sharding in shardings.items()}
        made = tx()
        ours = host_optimizer(made, policy=ALL, shardings=None if kind is AxisType.Explicit else shardings)
        state = ours.init(params)
        found = after_steps(jax.jit(ours.apply, compiler_options=exact_options()), params, state)
        assert_equal((found[0], found[1].inner), after_steps(of_optax(made), params, made.init(params)))
        wanted = ours.state_shardings(params)
    for leaf, after, sharding in zip(*map(jax.tree.leaves, (state, found[1], wanted)), strict=True):
        assert leaf.sharding.memory_kind == after.sharding.memory_kind == sharding.memory_kind
        if tx is not FACTORED or kind is AxisType.Explicit:  # the compiler decides how factors are divided
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            assert after.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert kinds_of([x for x in jax.tree.leaves(state) if x.shape == (4, 8, 16)]) <= {"pinned_host"}
    blocks = {p.name: p.blocks for p in ours.placements(params)}
    assert blocks | {"scale": 4} == {"w": 4, "scale": 4, "table": 16, "flat": 8}


@pytest.mark.parametrize("size", [0, 2**20], ids=["on the host", "too small for it"])
def test_a_step_is_compiled_once_for_the_state_comes_back_as_it_was_divided(size):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = {"layers": PartitionSpec(None, "fsdp", "tensor"), "table": PartitionSpec("fsdp", "tensor")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    with jax.set_mesh(mesh):
        params = {
            name: jax.device_put(jnp.ones((4, 8, 16)[-len(shardings[name].spec) :]), shardings[name]) for name in specs
        }
        tx = host_optimizer(
            optax.adamw(1e-2), policy=Policy(default="offload", min_offload_bytes=size), shardings=shardings
        )
        step, state = jax.jit(tx.apply, donate_argnums=(1, 2)), tx.init(params)
        for _ in range(3):
            params, state = step(jax.tree.map(jnp.sin, params), params, state)
        wanted = tx.state_shardings(params)
    assert step._cache_size() == 1
    same = lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim)
    assert all(jax.tree.leaves(jax.tree.map(same, state, wanted)))


def test_shardings_that_a_trace_does_not_show_are_asked_for():
    tx = host_optimizer(optax.adam(1e-3), policy=ALL)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"a mesh may divide the parameters.*give their shardings"):
        jax.eval_shape(tx.init, params_in())


# ---------------------------------------------------------------------------------------------- places, and their types


def test_the_table_says_where_state_lives_and_why():
    policy = Policy({"table": "save", "layers/*": "offload"}, default="save", min_offload_bytes=1000)
    tx = host_optimizer(optax.adam(1e-3), policy=policy, shardings=ONE)
    expected = """\
parameter     state     place   blocks  reason
dense/w       1.50 KiB  device  1       default
layers/scale  256 B     device  1       smaller than min_offload_bytes (1000 B)
layers/w      4.00 KiB  host    4       layers/*
odd           8.19 KiB  device  1       default
table         3.75 KiB  device  1       table"""
    placements = tx.placements(jax.eval_shape(params_in))
    assert str(placements) == expected and placements.host_bytes == 2 * 4 * 8 * 16 * 4
    state = tx.init(params_in())
    assert {x.shape for x in jax.tree.leaves(state) if x.sharding.memory_kind == "pinned_host"} == {(4, 8, 16)}


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (
            Policy({"layer/w": "offload"}, default="save"),
            r"residuals\['layer/w'\]: matches no parameter.*nearest is 'layers/w'",
        ),
        (
            Policy({"table": "recompute"}, default="save"),
            r"residuals\['table'\]: 'recompute' is not allowed for a state",
        ),
        (Policy(), "default: 'recompute' is not allowed for a state; use 'save' or 'offload'"),
        (
            Policy(default="offload", resident_layers=2),
            "resident_layers: 2 is about residuals, not about a state; leave it 1",
        ),
    ],
)
def test_a_policy_that_means_nothing_here_is_refused(policy, why):
    with pytest.raises(PolicyError, match=why):
        host_optimizer(optax.adam(1e-3), policy=policy, shardings=ONE).init(params_in())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"tx": optax.adam}, "tx must be an optax.GradientTransformation"),
        ({"policy": "offload"}, "policy must be a jaxoffload.Policy"),
        ({"masters": "float32"}, "masters must be True or False"),
        ({"state_dtype": jnp.int8}, "state_dtype must be a floating dtype, such as bfloat16, got int8"),
        ({"shardings": {"w": PartitionSpec("d")}}, r"shardings has .*'d'.*; use a jax.sharding.Sharding for each"),
    ],
)
def test_arguments_are_judged_at_once(arguments, why):
    with pytest.raises(TypeError, match=why):
        host_optimizer(**{"tx": optax.adam(1e-3), **arguments})


def test_trees_of_other_parameters_are_refused():
    params, tx = params_in(), host_optimizer(optax.adam(1e-3), policy=ALL, shardings=ONE)
    state = tx.init(params)
    with pytest.raises(TypeError, match="gradients must be as params, got fewer arrays"):
        tx.apply({"table": params["table"]}, params, state)
    with pytest.raises(TypeError, match="state must be as what init returns for params, got "):
        tx.apply(params, params, params)  # in the wrong order, perhaps
    with pytest.raises(TypeError, match=r"params is the state; the order is not that of tx\.update"):
        tx.apply(params, state, params)
    with pytest.raises(TypeError, match="got a tuple; the transformation's own init makes another"):
        tx.apply(params, params, optax.adam(1e-3).init(params))


def test_callers_of_update_learn_what_stands_for_it():
    tx = host_optimizer(optax.adam(1e-3))
    with pytest.raises(
        AttributeError, match=r"no 'update'; write params, state = optimizer\.apply\(gradients, params,"
    ):
        tx.update(params_in(), None)
    assert not hasattr(tx, "other") and copy.deepcopy(tx).policy == tx.policy


@pytest.mark.parametrize("method", ["init", "placements", "state_shardings"])
def test_what_is_no_array_is_named(method):
    tx = host_optimizer(optax.adam(1e-3), shardings=ONE)
    with pytest.raises(TypeError, match=r"params\['rate'\] must be an array, got 0.5; leave out what is no array"):
        getattr(tx, method)(params_in() | {"rate": 0.5})


def test_more_than_the_pool_holds_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1")
    tx = host_optimizer(optax.adam(1e-3), shardings=ONE)
    params = {"w": jax.ShapeDtypeStruct((4, 2**14, 2**12), jnp.float32)}
    with pytest.raises(
        HostPoolFull, match=r"the state needs 2.00 GiB per device, and the pinned host pool holds 1.00 GiB"
    ):
        jax.eval_shape(tx.init, params)


def test_state_whose_type_forgot_the_host_is_taken_for_what_it_is():
    """As a checkpoint's arrays do, and what jit makes for `out_shardings`. Ahead of time there are only shapes."""
    params, tx = params_in(), host_optimizer(optax.adamw(1e-3), policy=ALL, shardings=ONE)
    state, step = tx.init(params), jax.jit(tx.apply, compiler_options=exact_options())
    read = lambda x: jax.make_array_from_callback(x.shape, x.sharding, lambda index: np.asarray(x)[index])
    forgot = jax.tree.map(read, state)
    pinned = [x for x in jax.tree.leaves(forgot) if x.sharding.memory_kind == "pinned_host"]
    assert pinned and all(jax.typeof(x).memory_space != HOST for x in pinned)
    gradients = gradients_of(params, 0)
    assert_equal(step(gradients, params, forgot), step(gradients, params, state))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (gradients, params, state)
    )
    ahead = step.lower(*shapes).compile()
    assert_equal(ahead(gradients, params, state), step(gradients, params, state))


def test_elementwise_primitives_are_those_that_jax_batches_so():
    """What JAX batches without a change of its parameters is elementwise; these have rules of their own."""
    from jax.interpreters import batching

    rules = {p.name: rule for p, rule in batching.fancy_primitive_batchers.items()}
    own = {
        "clamp",
        "convert_element_type",
        "select_n",
        "reduce_precision",
        "nextafter",
        "copy",
        "copy_p",
        "stop_gradient",
    }
    kinds = {"vectorized_batcher", "broadcast_batcher"}
    for name in (ELEMENTWISE - own) & rules.keys():
        assert getattr(rules[name], "func", rules[name]).__name__ in kinds, name


@pytest.mark.parametrize("typed", [True, False])
def test_the_pool_holds_the_state_besides_what_layers_offload(typed, monkeypatch):
    """Each array counts once, in whatever loops it is updated; gradients are computed in the same program."""
    layer = lambda x, w: (jnp.tanh(tag(x @ w, "h")), None)
    loss = lambda p, x: jnp.sum(scan(layer, x, p["layers"], policy=Policy({"h": "offload"}, min_offload_bytes=0))[0])
    params, x = {"layers": jnp.ones((4, 16, 16))}, jnp.ones((8, 16))
    tx = host_optimizer(optax.adam(1e-3), policy=ALL, shardings=ONE)

    def step(params, state, x):
        return tx.apply(jax.grad(loss)(params, x), params, state)

    state = tx.init(params) if typed else jax.eval_shape(tx.first_state, params)
    jaxpr = jax.make_jaxpr(step)(params, state, x)
    rows, stacks = 4 * 8 * 16 * 4, 2 * 4 * 16 * 16 * 4
    assert need_of(jaxpr).bytes() + held_by_arguments(jaxpr) == rows + stacks
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str((rows + stacks - 1) / 2**30))
    with pytest.raises(
        HostPoolFull, match="2.00 KiB per device, and 8.00 KiB are its arguments' there" if typed else "KiB"
    ):
        refuse_what_does_not_fit("check", jaxpr)


def verification():
    """Of a step whose layers' residuals, and whose state, go to the host."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tx = host_optimizer(clipped, policy=ALL, shardings=ONE, masters=True)
    layer = lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None)
    policy = Policy({"fc1": "offload"}, min_offload_bytes=0)
    loss = lambda w, x: jnp.sum(scan(layer, x, w["w"], policy=policy)[0].astype(jnp.float32))
    step = lambda w, state, x: tx.apply(jax.grad(loss)(w, x), w, state)
    weights = {"w": jax.random.normal(KEY, (4, 8, 8), jnp.bfloat16)}
    return verify(step, weights, tx.init(weights), jnp.ones((2, 8), jnp.bfloat16))


@pytest.mark.claim("host-state-in-blocks")
def test_no_block_comes_before_the_gradients_are_there():
    """Else the device holds the first blocks of a step while it computes its gradients."""
    params = params_in()
    tx = host_optimizer(optax.adamw(1e-3), policy=ALL, shardings=ONE)
    jaxpr = jax.make_jaxpr(tx.apply)(params, params, tx.init(params)).jaxpr
    comes = lambda eqn: eqn.primitive.name == "device_put" and on_host(eqn.invars[0].aval)
    after = depending(jaxpr, jaxpr.invars[: len(jax.tree.leaves(params))], lambda eqn: False)
    fetches = [eqn for eqn in jaxpr.eqns if comes(eqn)]
    assert len(fetches) == 2 * len(jax.tree.leaves(params)) and after.issuperset(eqn.invars[0] for eqn in fetches)


@pytest.mark.claim("host-state-is-verified")
def test_a_step_with_its_update_is_verified():
    found = verification()
    assert found.ok and found["gradients"].detail == "5 results are the reference's, bit for bit"
    assert found["moves"].detail.endswith("1 are marked offload; 6 are blocks of an optimizer's state")


def test_its_state_is_predicted_on_the_host_and_takes_the_time_of_its_copies():
    """One way takes as long as the other: all of it comes and goes once."""
    tx = host_optimizer(optax.adamw(1e-3), policy=ALL, shardings=ONE)
    weights = {"w": jnp.ones((4, 8, 8))}
    state, tree = tx.init(weights), 4 * 4 * 8 * 8
    bus = Bus(d2h=50.0, h2d=50.0, together=40.0)
    rates = {"gemm_tflops": 700.0, "attention_tflops": (500.0, 400.0), "hbm_gb_s": 4000.0}
    machine = Machine("H200", 1, "0.12", bus, bus, **rates)
    found = predict(lambda w, state: tx.apply(w, w, state), weights, state, machine=machine)
    assert found.host == 2 * tree and tree <= found.memory.arguments <= tree + 8  # and a count of steps
    assert found.exposed_ms == found.state_ms == pytest.approx(2 * tree / 40e6)
    assert ", 0.00 of them of state" in str(found)


@pytest.mark.slow
@pytest.mark.claim("host-state-predicted")
def test_steps_take_the_time_that_is_predicted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["optimizer"])
    options = optimizer.parse()
    machine = Machine.from_json((ROOT / "machines/h200.json").read_text())
    for mode, measured in (result("optimizer-update")["modes"] | result("optimizer")["modes"]).items():
        step, args = optimizer.step_of(options, mode), optimizer.abstract(options, mode)
        assert predict(step, *args, machine=machine).step_ms == pytest.approx(measured["step_ms"], rel=0.04), mode


@pytest.mark.gpu
@pytest.mark.parametrize("masters", [False, True])
def test_blocks_that_take_turns_on_the_bus_have_the_bits_of_state_on_the_device(masters):
    """In place, by DMA: stacks of even and odd numbers of layers, some of one size, and a table."""
    shapes = {"a": (8, 512, 1024), "b": (8, 1024, 512), "c": (8, 256, 512), "odd": (5, 512, 512), "table": (1024, 512)}
    dtype = jnp.bfloat16 if masters else jnp.float32

    def after(policy):
        params = {name: jnp.full(shape, 0.02, dtype) for name, shape in shapes.items()}
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        ours = host_optimizer(tx, policy=policy, shardings=ONE, masters=masters)
        where = jax.tree.map(lambda _: ONE, params), ours.state_shardings(params)
        how = {"out_shardings": where, "compiler_options": compiler_options() | repeatable_options()}
        return after_steps(jax.jit(ours.apply, donate_argnums=(1, 2), **how), params, ours.init(params), steps=5)

    assert_equal(after(ALL), after(Policy(default="save")))


def another_row(monkeypatch):
    take = _placement.Placed.take
    another = lambda self, x, i, axis=0: take(self, x, (i + 1) % self.blocks, axis)
    monkeypatch.setattr(_placement.Placed, "take", another)


def all_at_once(monkeypatch):
    monkeypatch.setattr(_placement, "MOST_BLOCKS", 1)
    monkeypatch.setattr(_update, "STACK", 4)


@pytest.mark.slow
@pytest.mark.claim("host-state-is-verified")
@pytest.mark.parametrize("fault, claim", [(another_row, "gradients"), (all_at_once, "moves")])
def test_a_fault_of_the_update_fails_its_claim(fault, claim, monkeypatch):
    fault(monkeypatch)
    assert [check.claim for check in verification() if check.verdict == "fails"] == [claim]
