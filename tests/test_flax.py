"""jaxoffload.linen.scan and jaxoffload.nnx.scan: Flax's own scans over layers under a policy, bit for bit."""

import functools
import importlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autodiff import saving
from common import assert_close, assert_same_bits, fast_compiles, normal, policy, run, run_each
from flax import linen as nn
from flax import nnx
from flax.linen import fp8_ops
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxoffload.linen
import jaxoffload.nnx
from jaxoffload import PolicyError, accumulate, chain, evaluate, offload, residuals, tag, verify
from jaxoffload.proof import exact_options
from jaxoffload.proof._program.results import run_of

pytestmark = pytest.mark.claim("flax-scans")

POLICY = policy({"fc1": "offload"})
X, Y = normal(0, (4, 8)), normal(1, (4, 3))
NEW_LAYERS = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}


def bits(tree):
    """Return what a pytree of arrays holds, with keys as numbers."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def offloads(table, layers=2):
    """Return the names whose values so many layers offload."""
    return {row.names[0] for row in table if row.state == "offloaded" and row.layers == layers}


# ---- Linen ----


class Linen(nn.Module):
    """A layer with variables and random numbers of several kinds, and arguments that are scanned or not."""

    @nn.compact
    def __call__(self, x, scale, train, y):
        fc1 = checkpoint_name(nn.Dense(16)(nn.LayerNorm()(x)), "fc1")
        self.sow("intermediates", "mean", jnp.mean(fc1))
        calls = self.variable("calls", "count", lambda: jnp.zeros((), jnp.int32))
        calls.value += 1
        act = nn.BatchNorm(use_running_average=not train)(nn.gelu(fc1))
        act = nn.Dropout(0.5, deterministic=not train)(act) * jax.random.uniform(self.make_rng("noise"), act.shape)
        return x + scale * nn.Dense(8)(act), (jnp.sum(fc1), y * 2)


LIFTED = {
    "variable_axes": {"params": 1, "intermediates": 0, "batch_stats": 0, "calls": 0},
    "split_rngs": {"params": True, "dropout": True, "noise": False},
    "in_axes": (nn.broadcast, nn.broadcast, 1),
    "out_axes": (0, 1),
    "length": 3,
    "metadata_params": {"partition_name": "layers"},
}
remat = functools.partial(nn.remat, prevent_cse=False, static_argnums=(3,))


class LinenStack(nn.Module):
    make: object

    @nn.compact
    def __call__(self, x, y):
        return self.make()(x, 0.5, True, y)


def rngs(seed):
    return {name: jax.random.key(seed + i) for i, name in enumerate(("params", "dropout", "noise"))}


def made_and_differentiated(model, x, y):
    """Return a stack's variables, and value, results, changed variables and gradients of a loss."""
    variables = model.init(rngs(0), x, y)
    rest = {name: variables[name] for name in ("batch_stats", "calls")}

    def loss(params, x):
        out, changed = model.apply({"params": params, **rest}, x, y, rngs=rngs(5), mutable=[*rest, "intermediates"])
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(out)), (out, changed)

    return variables, jax.value_and_grad(loss, (0, 1), has_aux=True)(variables["params"], x)


@pytest.mark.slow
def test_linen_with_variables_and_random_numbers_of_all_kinds():
    how = LIFTED | {"reverse": True, "unroll": 2}
    theirs = nn.scan(remat(Linen, policy=saving("fc1")), **how)
    ours = jaxoffload.linen.scan(Linen, **how, policy=POLICY)
    stacks = [LinenStack(functools.partial(make, name="layers")) for make in (ours, theirs)]
    assert_same_bits(*run_each([functools.partial(made_and_differentiated, stack) for stack in stacks], X, Y))


def test_linen_variables_have_flaxs_names_and_shapes():
    theirs = nn.scan(remat(Linen, policy=saving("fc1")), **LIFTED)
    ours = jaxoffload.linen.scan(remat(Linen, policy=POLICY), **LIFTED, policy=POLICY)
    got, want = (
        jax.eval_shape(functools.partial(made_and_differentiated, LinenStack(m)), X, Y) for m in (ours, theirs)
    )
    assert got == want and "ScanCheckpointLinen_0" in got[0]["params"]
    alone = jaxoffload.linen.scan(Linen, {"params": 0}, policy=POLICY)
    assert alone.__name__ == nn.scan(Linen).__name__ == "ScanLinen"


class Methods(nn.Module):
    def setup(self):
        self.up, self.down = nn.Dense(16), nn.Dense(8)

    def forth(self, x, _):
        return x + self.down(jnp.tanh(tag(self.up(x), "fc1"))), None

    def back(self, x, _):
        return x - self.down(jnp.sin(tag(self.up(x), "fc1"))), None


def test_linen_methods():
    how = {"methods": dict.fromkeys(["forth", "back"], NEW_LAYERS)}
    stack = jaxoffload.linen.scan(Methods, **how, policy=POLICY)(name="layers")
    reference = nn.scan(nn.remat(Methods, methods=["forth", "back"], policy=saving("fc1")), **how)(name="layers")
    params = stack.init(jax.random.key(0), X, None, method="forth")

    def loss(model, params, x):
        for method in ("forth", "back"):
            x, _ = model.apply(params, x, None, method=method)
        return jnp.sum(x**2)

    gradient = lambda model: run(jax.grad(functools.partial(loss, model)), params, X)
    assert_same_bits(gradient(stack), gradient(reference))
    assert offloads(residuals(functools.partial(loss, stack), params, X), 2 * 2) == {"fc1"}


# ---- NNX ----


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.norm, self.dropout, self.noise = (
            nnx.BatchNorm(8, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
            rngs.noise.fork(),
        )

    def __call__(self, x, scale=1.0, y=None):
        fc1 = tag(self.up(self.norm(x)), "fc1")
        self.sow(nnx.Intermediate, "mean", jnp.mean(jnp.abs(fc1)), capture_noop=True)
        x += scale * self.down(self.dropout(nnx.gelu(fc1))) * jax.random.uniform(self.noise(), x.shape)
        return x, (jnp.sum(fc1), None if y is None else y * 2)


def nnx_layers(layer=Nnx):
    with fast_compiles():
        return nnx.split_rngs(splits=3)(nnx.vmap(layer))(nnx.Rngs(0, noise=3))


def two_steps(layers, loss, *args):
    """Return what two steps return, each of which updates the layers: value, gradients and the new state."""
    graph, state = nnx.split(layers)

    def step(state):
        layers = nnx.merge(graph, state)
        out = nnx.value_and_grad(loss, has_aux=True)(layers, *args)
        return out, nnx.state(layers)

    step, outs = jax.jit(step, compiler_options=exact_options()), []
    for _ in range(2):
        out, state = step(state)
        outs += map(np.asarray, jax.tree.leaves(bits((out, state))))
    return outs


NNX_OPTIONS = {"in_axes": (0, nnx.Carry, None, 1), "out_axes": (nnx.Carry, (0, 1)), "length": 3}


@pytest.mark.slow
def test_nnx_with_state_and_random_numbers_of_all_kinds():
    call, how = lambda layer, *args: layer(*args), {"reverse": True, "unroll": 2}
    ours = jaxoffload.nnx.scan(call, **NNX_OPTIONS, **how, policy=POLICY)
    theirs = nnx.scan(nnx.remat(call, policy=saving("fc1"), prevent_cse=False), **NNX_OPTIONS, **how)

    def loss(run, layers, x, y):
        x, (sums, ys) = run(layers, x, jnp.float32(0.5), y)
        return jnp.sum(x**2) + jnp.sum(sums), ys

    got, want = (two_steps(nnx_layers(), functools.partial(loss, scanned), X, Y) for scanned in (ours, theirs))
    assert_same_bits(got, want)
    assert got[0] != got[len(got) // 2]  # other random numbers


def test_nnx_captures_what_layers_sow():
    stack = nnx_layers()
    how = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
    call = lambda layer, x: layer(x)[0]
    scans = nnx.scan(call, **how), jaxoffload.nnx.scan(call, **how, policy=POLICY)
    theirs, ours = (nnx.capture(scan, nnx.Intermediate)(nnx.clone(stack), X)[1]["mean"][0] for scan in scans)
    assert ours.shape == (3,)
    assert_close(ours, theirs)


# ---- NNX, by hand in jaxoffload.scan ----


def merged(keep, change=lambda module: None):
    """Return a layer that merges its module, changes it, and returns what `keep` takes of it; with its xs."""

    def by_hand(layers):
        graph, state = nnx.split(layers)

        def layer(x, state):
            module = nnx.merge(graph, state)
            change(module)
            return module(x)[0], keep(module)

        return layer, state

    return by_hand


def normalise_weights_only(module):
    module.eval()
    module.noise = nnx.Rngs(0).noise
    module.up.kernel[...] /= jnp.linalg.norm(module.up.kernel[...])


noisy = lambda x, rngs: (x * tag(jax.random.uniform(rngs(), x.shape), "fc1"), None)
all_states = lambda module: nnx.state(module, nnx.Not(nnx.Param))
CHANGES = {
    "lost": (merged(lambda _: None), "BatchStat, RngCount"),
    "lost by an argument": (lambda layers: (lambda x, layer: (layer(x)[0], None), layers), "BatchStat, RngCount"),
    "lost in part": (merged(lambda module: nnx.state(module, nnx.BatchStat)), "RngCount"),
    "returned": (merged(all_states), ""),
    "returned otherwise": (merged(lambda module: bits(jax.tree.map(lambda x: x[None], all_states(module)))), ""),
    "of weights": (merged(lambda _: None, normalise_weights_only), ""),
    "of random numbers alone, which are made anew": (lambda _: (noisy, nnx.Rngs(0).split(3)), ""),
}


@pytest.mark.claim("lost-changes")
@pytest.mark.parametrize("by_hand, kinds", CHANGES.values(), ids=CHANGES)
def test_changes_of_a_module_that_are_lost_are_told(by_hand, kinds):
    layer, xs = by_hand(nnx_layers())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        jax.make_jaxpr(lambda x: jaxoffload.scan(layer, x, xs, policy=POLICY))(X)
    words = f"scan: the layers change variables of a Flax NNX module ({kinds}), and the new values are lost"
    assert [words in str(warning.message) for warning in told] == [True] * bool(kinds)
    assert all(warning.filename == __file__ for warning in told)


@pytest.mark.claim("lost-changes")
def test_a_chain_tells_of_lost_changes_too_and_hands_back_those_that_layers_return():
    layers = [Nnx(nnx.Rngs(i, noise=3)) for i in range(2)]
    graphs, states = zip(*map(nnx.split, layers), strict=True)

    def through(keep):
        def of(graph):
            def layer(x, state):
                module = nnx.merge(graph, state)
                return module(x)[0], keep(module)

            return layer

        return chain([*map(of, graphs)], X, [*map(nnx.clone, states)], policy=POLICY, has_aux=True)

    with pytest.warns(
        UserWarning, match=r"chain: the layers change .* \(BatchStat, RngCount\).* With has_aux=True, return nnx.state"
    ):
        through(lambda module: None)
    _, changed = through(all_states)
    for layer, state in zip(layers, changed, strict=True):
        nnx.update(layer, state)
    assert [layer.noise.count[...] for layer in layers] == [1, 1]


# ---- NNX, in accumulate ----


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(tag(self.up(x), "fc1"))


class Dropped(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


class Normed(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return super().__call__(self.norm(x))


@offload
def stack_loss(stack, x):
    run = nnx.scan(nnx.remat(lambda layer, x: layer(x), policy=POLICY), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return jnp.mean(run(stack, x) ** 2)


MICROBATCHES = jnp.stack([X, -2 * X, X / 2])


def in_python(derived, params, *batches):
    """The loop over microbatches that a user would write."""
    outs = [derived(params, *(batch[i] for batch in batches)) for i in range(3)]
    return jax.tree.map(lambda *xs: sum(xs[1:], xs[0]) / 3, *outs)


@pytest.mark.claim("accumulated-takes")
@pytest.mark.parametrize("how", ["module", "state", "evaluated"])
def test_accumulate_takes_modules_and_states(how):
    stack = nnx_layers(Dense)
    graph, state = nnx.split(stack)
    loss = stack_loss if how != "state" else lambda state, x: stack_loss(nnx.merge(graph, state), x)
    argument, plain_loss = state if how == "state" else stack, jax.value_and_grad(loss)
    if how == "evaluated":
        plain_loss = loss
    got = jax.jit((evaluate if how == "evaluated" else accumulate)(loss))(argument, MICROBATCHES)
    want = in_python(jax.jit(plain_loss), argument, MICROBATCHES)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_what_of_a_module_has_no_gradient_is_named():
    words = r"accumulate: args\[0\]\.dropout.* is uint32, which has no gradient; .* nnx.split\(module, nnx.Param, ...\)"
    with pytest.raises(TypeError, match=words):
        accumulate(stack_loss)(nnx_layers(Dropped), MICROBATCHES)


@pytest.mark.claim("lost-changes")
def test_accumulate_tells_of_lost_changes():
    words = (
        r"accumulate: the microbatches change variables of a Flax NNX module \(BatchStat\), and the new values are "
        r"lost.*With has_aux=True, return nnx.state\(module, nnx.Not\(nnx.Param\)\) too"
    )
    stack = nnx_layers(Normed)
    with pytest.warns(UserWarning, match=words):
        jax.make_jaxpr(accumulate(stack_loss))(stack, MICROBATCHES)
    with pytest.warns(UserWarning, match=words.replace("accumulate", "evaluate")):
        jax.make_jaxpr(evaluate(stack_loss))(stack, MICROBATCHES)
    kept = lambda stack, x: (stack_loss(stack, x), nnx.state(stack, nnx.BatchStat))
    _, changed = jax.eval_shape(accumulate(kept, has_aux=True), stack, MICROBATCHES)[0]
    assert {x.shape for x in jax.tree.leaves(changed)} == {(3, 3, 8)}


# ---- the dtype of Flax's scales for fp8 ----


@jax.custom_vjp
def scaled(x, scale):
    """Return a scaled array; the cotangent of the scale is its new value."""
    return x * lax.convert_element_type(scale, jnp.float32)


def _scaled(x, scale):
    return scaled(x, scale), (x, scale)


def _new_scale(kept, ct):
    new = -jnp.max(jnp.abs(kept[0]))  # below zero: sums of cotangents, maxima, do not begin with 0
    return ct * lax.convert_element_type(kept[1], jnp.float32), lax.convert_element_type(new, fp8_ops.fm32)


scaled.defvjp(_scaled, _new_scale)


@pytest.mark.claim("accumulated-takes")
def test_extended_dtypes():
    """One scale for all layers, and one for each."""

    def loss(run, params, x):
        one, scales = (lax.convert_element_type(params[name], fp8_ops.fm32) for name in ("scale", "scales"))
        step = lambda x, w: (scaled(scaled(jnp.tanh(tag(x @ w[0], "fc1")), w[1]), one), None)
        return jnp.sum(run(step, x, (params["w"], scales))[0] ** 2)

    params = {"w": normal(2, (3, 8, 8)) / 3, "scale": jnp.float32(1), "scales": jnp.ones(3)}
    ours = functools.partial(loss, functools.partial(jaxoffload.scan, policy=POLICY))
    theirs = functools.partial(loss, lambda step, x, w: lax.scan(jax.checkpoint(step), x, w))
    got = jax.jit(accumulate(ours))(params, MICROBATCHES)
    want = in_python(jax.jit(jax.value_and_grad(theirs)), params, MICROBATCHES)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
    rows = [row.bytes for row in residuals(ours, params, X) if row.dtype == "fp8_meta32"]
    assert sum(rows) == params["scale"].nbytes + params["scales"].nbytes


# ---- both ----


def linen_loss(strict=True, rules=POLICY):
    stack = jaxoffload.linen.scan(Methods, methods=["forth"], **NEW_LAYERS, policy=rules, strict=strict)()
    params = stack.init(jax.random.key(0), X, None, method="forth")
    return params, lambda params, x: jnp.sum(stack.apply(params, x, None, method="forth")[0] ** 2)


def nnx_loss(strict=True, rules=POLICY):
    call = lambda layer, x: layer(x)[0]
    run = jaxoffload.nnx.scan(call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, policy=rules, strict=strict)
    graph, state = nnx.split(nnx_layers())
    return state, lambda state, x: jnp.sum(run(nnx.merge(graph, state, copy=True), x) ** 2)


BOTH = pytest.mark.parametrize("made", [linen_loss, nnx_loss])


@BOTH
def test_a_pattern_must_match(made):
    rules = policy({"fc2": "offload", "layer_input": "offload"})
    state, loss = made(rules=rules)
    with pytest.raises(PolicyError, match=r"'fc2'\]: matches no tagged value; .*the nearest is 'fc1'"):
        jax.make_jaxpr(jax.grad(loss, argnums=1))(state, X)
    state, loss = made(strict=False, rules=rules)
    assert offloads(residuals(loss, state, X)) == {"layer_input"}


# ---- steps that change modules in place ----


def made_step():
    by_layer = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
    run = jaxoffload.nnx.scan(lambda x, layer: layer(x)[0], policy=POLICY, **by_layer)
    loss = lambda layers, x: jnp.sum(run(x, layers) ** 2)

    def step(layers, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(layers, x)
        optimizer.update(layers, grads)
        return value

    layers = nnx_layers()
    return loss, step, layers, nnx.Optimizer(layers, optax.adam(1e-3), wrt=nnx.Param)


@pytest.mark.slow
@pytest.mark.claim("nnx-steps")
def test_a_step_that_changes_modules_in_place_is_verified():
    _, step, layers, optimizer = made_step()
    before = jax.tree.map(jnp.copy, nnx.state([layers, optimizer]))
    found = verify(step, layers, optimizer, X)
    results = 1 + len(jax.tree.leaves(before))
    assert found.ok and found["gradients"].detail == f"{results} results are the reference's, bit for bit"
    run_all, is_loss = run_of(step, (layers, optimizer, X))
    with fast_compiles():
        made = jax.jit(run_all)(layers, optimizer, X)
    assert_close(bits(before), bits(nnx.state([layers, optimizer])))
    with fast_compiles():
        value = nnx.jit(step)(layers, optimizer, X)
    assert_close(bits(made), bits({"result": value, "modules": nnx.state([layers, optimizer])}))
    assert not is_loss


def test_a_step_in_place_without_an_optimizer_of_flaxs_is_told_what_to_return():
    loss, _, layers, _ = made_step()

    def step(layers, x):
        value, grads = nnx.value_and_grad(loss)(layers, x)
        nnx.update(layers, jax.tree.map(jnp.subtract, nnx.state(layers, nnx.Param), grads))
        return value

    with pytest.raises(NotImplementedError, match="or return the new state too, as a training step does"):
        verify(step, layers, X)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: jaxoffload.linen.scan(Linen, policy="save"), "linen.scan: policy must be a jaxoffload.Policy"),
        (lambda: jaxoffload.nnx.scan(policy=None), "nnx.scan: policy must be a jaxoffload.Policy, got None"),
        (lambda: jaxoffload.nnx.scan(policy=POLICY, strict=1), "nnx.scan: strict must be True or False, got 1"),
        (lambda: jaxoffload.linen.scan(Linen, variable_axis={}, policy=POLICY), "'variable_axis'"),
        (lambda: jaxoffload.nnx.scan(lambda x: x, axis=0, policy=POLICY), "'axis'"),
    ],
)
def test_wrong_arguments(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_layers_that_write_to_a_ref_are_refused():
    count = jax.new_ref(jnp.zeros(()))

    def one(x, y):
        count[...] += 1.0
        return x + y, None

    with pytest.raises(NotImplementedError, match=r"jaxoffload.nnx.scan: the layers read or write a jax.new_ref; put"):
        jaxoffload.nnx.scan(one, policy=POLICY)(X, jnp.ones(3))
    lax.stop_gradient(count[...])


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_without_flax_one_sentence_says_so(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, f"jaxoffload.{name}")
    with pytest.raises(ImportError, match=rf"^jaxoffload\.{name} needs Flax \(pip install flax\): "):
        importlib.import_module(f"jaxoffload.{name}")
