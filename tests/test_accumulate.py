"""accumulate(): bit for bit a loop over microbatches, whatever the loss; errors that say what to do."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import bytes_staying, count, equations, in_a_loop, one_by_one, runs
from common import assert_close, assert_same_bits, auto_mesh, normal, on_cpu_and_gpu, policy, run, run_each
from jax import lax
from jax.extend.core.primitives import device_put_p, dot_general_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from microbatches import DIM, RULES, language_model, layer, of_layers, ours, params_of, plain, tokens

from jaxoffload import Policy, PolicyError, accumulate, chain, evaluate, offload, scan, tag
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._engine.microbatches import ends, interleaved
from jaxoffload._jax import nbytes, on_host

LAYERS = 3
PARAMS = params_of(LAYERS)


def of_matmuls(stack, w, x):
    """Layers of one matmul."""
    return jnp.sum(stack(lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None), x, w, {"fc1": "offload"})[0] ** 2)


def masked(stack, params, x, mask):
    """What differs between microbatches and is a constant of the scan, integers, booleans and a key among it."""

    def step(x, w):
        y, size = layer(x, w)
        return jnp.where(mask["keep"], y, x * mask["scale"]), size

    y, _ = stack(step, x, of_layers(params), RULES)
    return jnp.sum(y**2) + jnp.sum(mask["numbers"])


def two_stacks(stack, params, x):
    """Of different lengths, with something between, in opposite directions."""
    y, _ = stack(layer, x, of_layers(params), RULES)
    y = jnp.sin(y) @ params["mixer"]
    more = jax.tree.map(lambda w: jnp.concatenate([w, w[:2] * 0.5]), of_layers(params))
    y, sizes = stack(layer, y, more, RULES, reverse=True)
    y, _ = stack(
        lambda x, w: (jnp.tanh(tag(x * jnp.broadcast_to(w, x.shape), "fc1")), None),
        y,
        params["bias"][:1],
        {"fc1": "offload"},
    )
    return jnp.mean(y**2) + jnp.mean(sizes)


def in_jit(stack, params, x):
    """Two scans inside a jitted function, which is called twice."""

    @jax.jit
    def body(params, x):
        y, _ = stack(layer, x, of_layers(params), RULES)
        return y * jnp.sum(params["mixer"])

    return jnp.sum(body(params, body(params, x)) ** 2)


def half_precision(stack, params, x):
    """Weights are cast outside of the layers."""
    cast = jax.tree.map(lambda w: w.astype(jnp.bfloat16), of_layers(params))
    y, _ = stack(layer, x.astype(jnp.bfloat16), cast, {"fc1": "offload"})
    return jnp.mean(y.astype(jnp.float32) ** 2)


def partly_used(stack, params, x):
    """Results of the scan that nothing differentiates, a parameter that nothing reads, one that only the loss does."""
    (y, _), sizes = stack(lambda c, w: ((layer(c[0], w)[0], c[1] + 1), c[1]), (x, 0), of_layers(params), RULES)
    return jnp.sum(y[0] ** 2) + jnp.sum(params["out"]), sizes


LOSSES = {
    "language model": (language_model, lambda m: [tokens(m)], True),
    "masked": (
        masked,
        lambda m: [
            normal(5, (m, 2, DIM)),
            {"keep": normal(6, (m, 2, DIM)) > 0, "scale": normal(8, (m,)), "numbers": jnp.arange(3 * m).reshape(m, 3)},
        ],
        False,
    ),
    "two stacks": (two_stacks, lambda m: [normal(5, (m, 2, DIM))], False),
    "in jit": (in_jit, lambda m: [normal(5, (m, 2, DIM))], False),
    "half precision": (half_precision, lambda m: [normal(5, (m, 2, DIM))], False),
    "partly used": (partly_used, lambda m: [normal(5, (m, 2, DIM))], True),
}


def assert_equal(loss_of, batch, has_aux=False, params=PARAMS, **how):
    """What `accumulate` returns with our scan is what a loop returns with JAX's."""
    got = accumulate(functools.partial(loss_of, ours), has_aux=has_aux, **how)
    want = one_by_one(functools.partial(loss_of, plain), has_aux=has_aux, **how)
    assert_same_bits(*run_each([got, want], params, *batch))


@on_cpu_and_gpu
@pytest.mark.claim("accumulated-bit-for-bit")
@pytest.mark.parametrize("name, microbatches", [*zip(LOSSES, (5, 2, 3, 5, 2, 3), strict=True)])
def test_a_loss_equals_the_loop_over_microbatches(name, microbatches, device):
    loss_of, batch, has_aux = LOSSES[name]
    assert_equal(loss_of, batch(microbatches), has_aux)


LAYER_RULES = [
    {"offload_layers": 1},
    {"offload_layers": 2, "other_layers": "recompute", "resident_layers": 0},
    {"resident_layers": 2, "default": "save"},
    {"offload_layers": 2, "dots": "save", "resident_layers": 0},
    {"min_offload_bytes": 2 * DIM * 4 + 1, "resident_layers": 0},
]


@on_cpu_and_gpu
@pytest.mark.parametrize("rules", LAYER_RULES, ids=str)
def test_layers_that_treat_their_residuals_otherwise(rules, device):
    more = jax.tree.map(lambda w: jnp.concatenate([w, w * 0.5]), of_layers(PARAMS))
    fields = {"min_offload_bytes": 0, **rules}

    def loss(params, x, through=lambda f, x, w: scan(f, x, w, policy=Policy(RULES, **fields))):
        y, sizes = through(layer, x, params)
        return jnp.sum(y**2) + jnp.sum(sizes)

    in_a_loop_of_jax = functools.partial(loss, through=lambda f, x, w: lax.scan(in_a_loop(f, "x", "fc1"), x, w))
    x = normal(5, (3, 2, DIM))
    assert_same_bits(*run_each([accumulate(loss), one_by_one(in_a_loop_of_jax)], more, x))


def test_resident_layers_recompute_nothing_beside_layers_that_do():
    """Six layers: two offload, two recompute fc1, two keep it on the device."""
    rules = policy({"fc1": "offload"}, offload_layers=2, other_layers="recompute", resident_layers=2)
    step = lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None)
    loss = lambda w, x: jnp.sum(scan(step, x, w, policy=rules)[0])
    jaxpr = jax.make_jaxpr(accumulate(loss))(jnp.ones((6, DIM, DIM)), jnp.ones((3, 2, DIM)))
    assert runs(jaxpr, "dot_general") == 3 * (6 + 2 + 2 * 6)


def test_sums_and_several_arguments():
    def loss_of(stack, mixer, weights, x, bias):
        y, _ = stack(layer, x, {"w": weights, "bias": bias}, RULES)
        return jnp.sum(y @ mixer) ** 2

    # What is not differentiated is a batch: a matrix for each microbatch.
    args = normal(3, (3, DIM, DIM)), PARAMS["w"], normal(5, (3, 2, DIM)), PARAMS["bias"]
    for how in {"argnums": (1, 3)}, {"argnums": (3, 1), "reduction": "sum"}:
        got, want = (of(functools.partial(loss_of, f), **how) for of, f in ((accumulate, ours), (one_by_one, plain)))
        assert_same_bits(*run_each([got, want], *args))


def test_the_forward_passes_alone():
    args = params_of(3), tokens(3)
    loss = functools.partial(language_model, ours)
    how = {"has_aux": True, "reduction": "sum"}
    with_gradients = lambda *args: accumulate(loss, **how)(*args)[0]
    means = evaluate(lambda *args: loss(*args)[0])
    got, expected, mean = run_each([evaluate(loss, **how), with_gradients, means], *args)
    assert_same_bits(got, expected)
    assert_close(mean[0], expected[0] / 3)


# ---- what `jax.value_and_grad` takes ----


def test_what_is_the_same_in_all_microbatches_needs_no_closure():
    def loss(stack, params, x, shared, *, mask):
        x = x + params["bias"][0, 0] * shared["step"] + mask[:, None] * shared["frozen"][0, 0]
        return jnp.mean(stack(layer, x, of_layers(params), RULES)[0] * shared["frozen"][0, 1])

    shared = {"step": jnp.int32(3), "frozen": PARAMS["w"][0], "of each": jnp.arange(3)}
    mask, x = jnp.ones((3, 2)), normal(5, (3, 2, DIM))
    axes = (None, 0, {"step": None, "frozen": None, "of each": 0})
    ours_of = accumulate(functools.partial(loss, ours), in_axes=axes)
    closed = lambda params, x, shared, mask: one_by_one(
        lambda params, x, mask: loss(plain, params, x, shared, mask=mask)
    )(params, x, mask)
    by_name = lambda params, x, shared, mask: ours_of(params, x, shared, mask=mask)
    assert_same_bits(*run_each([by_name, closed], PARAMS, x, shared, mask))
    value = evaluate(functools.partial(loss, ours), in_axes=axes)(PARAMS, x, shared, mask=mask)
    assert_close(value, ours_of(PARAMS, x, shared, mask=mask)[0])


@pytest.mark.parametrize("nested", [False, True], ids=["an argument", "in an argument"])
def test_none_and_what_is_no_array_are_passed_as_under_vmap(nested):
    """The loss may branch on them."""

    def loss(stack, params, x, how):
        mask, name, act, times = how["these"] if nested else how
        assert mask is None and name == "twice"
        y = stack(layer, act(x), of_layers(params), RULES)[0]
        return jnp.sum(y**2) * (2 if times else 1)

    how = (None, "twice", jnp.tanh, True)
    given, axes = ({"these": how}, (None, 0, None)) if nested else (how, (None, 0, (None, None, None, None)))
    x = normal(5, (3, 2, DIM))
    ours_of = lambda params, x: accumulate(functools.partial(loss, ours), in_axes=axes)(params, x, given)
    plain_of = one_by_one(lambda params, x: loss(plain, params, x, given))
    assert_same_bits(*run_each([ours_of, plain_of], PARAMS, x))
    value = evaluate(functools.partial(loss, ours), in_axes=axes)(PARAMS, x, given)
    assert_close(value, ours_of(PARAMS, x)[0])


def test_none_in_a_batch_is_no_batch():
    loss = lambda stack, params, batch: jnp.sum(stack(layer, batch["x"], of_layers(params), RULES)[0] ** 2)
    x = normal(5, (3, 2, DIM))
    for batch, axes in (({"x": x, "mask": None}, 0), ({"x": x, "mask": None}, (None, {"x": 0, "mask": None}))):
        ours_of = lambda p, x, b=batch, a=axes: accumulate(functools.partial(loss, ours), in_axes=a)(p, b | {"x": x})
        plain_of = one_by_one(lambda p, x: loss(plain, p, {"x": x}))
        assert_same_bits(*run_each([ours_of, plain_of], PARAMS, x))


def test_forward_only_is_evaluate_and_warns():
    with pytest.warns(DeprecationWarning, match=r"write: evaluate\(loss, \.\.\.\)"):
        old = accumulate(jnp.vdot, forward_only=True)
    assert_close(old(X[0], X), evaluate(jnp.vdot)(X[0], X))


@pytest.mark.claim("accumulated-takes")
@pytest.mark.parametrize("each", [False, True], ids=["before the scan", "in the layers"])
def test_weights_in_host_memory(each):
    """JAX returns gradients where the weights are. A matrix is shared by all layers."""
    fetched = lambda tree: jax.tree.map(lambda w: jax.device_put(w, jax.memory.Space.Device), tree)
    kept = lambda tree: tree

    def loss(before, inside, params, x):
        weights, mixer = before((params["w"], params["mixer"]))
        step = lambda x, w: (jnp.tanh(tag(x @ inside(w), "fc1")) @ inside(mixer), None)
        return jnp.sum(ours(step, x, weights, {"fc1": "offload"})[0] ** 2)

    host = NamedSharding(auto_mesh(one=1), PartitionSpec(), memory_kind="pinned_host")
    params = {name: PARAMS[name] for name in ("w", "mixer")}
    here = functools.partial(loss, *((kept, fetched) if each else (fetched, kept)))
    for how in (accumulate, lambda f: lambda params, xs: jax.value_and_grad(f)(params, xs[0])):
        value, grads = jax.jit(how(here))(jax.device_put(params, host), X)
        wanted = jax.jit(how(functools.partial(loss, kept, kept)))(params, X)
        assert {grad.sharding.memory_kind for grad in grads.values()} == {"pinned_host"}
        for a, b in zip(jax.tree.leaves((value, grads)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_parameters_on_no_mesh_under_microbatches_on_one_with_explicit_axes():
    """Only the arguments say the mesh."""
    step = lambda x, w: (jnp.tanh(tag(x * jnp.broadcast_to(w, x.shape), "fc1")), None)
    loss_of = lambda stack, w, x: jnp.sum(stack(step, x, w, {"fc1": "offload"})[0] ** 2)
    mesh, x = jax.make_mesh((4,), ("data",), (AxisType.Explicit,)), normal(5, (3, 4, DIM))
    want = run(one_by_one(functools.partial(loss_of, plain)), PARAMS["bias"], x)
    for spec in ((None, "data"), (None, None, "data")):
        xs = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for a, b in zip(run(accumulate(functools.partial(loss_of, ours)), PARAMS["bias"], xs), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_microbatches_without_tokens():
    """All masked, or no rows at all: a loss that makes no NaN in `jax.value_and_grad` makes none here."""

    def loss_of(stack, w, x, keep):
        y, _ = stack(layer, x, w, RULES)
        count = jnp.sum(keep)
        total = jnp.sum(jnp.where(keep[:, None], y, 0) ** 2)
        return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0.0)

    f = accumulate(functools.partial(loss_of, ours))
    none, some = jnp.zeros((3, 2), bool), jnp.asarray([[False] * 2, [True] * 2, [False] * 2])
    with jax.debug_nans(True):
        for rows, keep in ((2, some), (0, none[:, :0])):
            args = of_layers(PARAMS), X[:, :rows], keep
            both = jax.jit(f)(*args), jax.jit(one_by_one(functools.partial(loss_of, plain)))(*args)
            for a, b in zip(*map(jax.tree.leaves, both), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def drawing(key_of):
    """Return a loss whose layers drop values; `key_of`: what differs between microbatches -> a key."""

    def loss(w, x, *given):
        def step(x, layer):
            w, key = layer
            y = jnp.tanh(tag(x @ w, "fc1"))
            return jnp.where(jax.random.bernoulli(key, 0.5, y.shape), y, 0), None

        keys = jax.random.split(key_of(*given), LAYERS)
        return jnp.sum(ours(step, x, (w, keys), {"fc1": "offload"})[0] ** 2)

    return loss


def carried(key_of):
    """Return one whose layers split the key that they pass on."""

    def loss(w, x, *given):
        def step(carry, w):
            x, key = carry
            key, here = jax.random.split(key)
            return (jnp.tanh(tag(x @ w, "fc1")) * jax.random.uniform(here, x.shape), key), None

        return jnp.sum(ours(step, (x, key_of(*given)), w, {"fc1": "offload"})[0][0] ** 2)

    return loss


KEY = jax.random.key(0)


@pytest.mark.claim("masks-differ")
@pytest.mark.parametrize(
    "of, made, key_of, given, warns",
    [
        (accumulate, drawing, lambda: KEY, (), True),
        (evaluate, carried, lambda: KEY, (), True),
        (accumulate, carried, lambda: jax.random.PRNGKey(0), (), True),
        (evaluate, drawing, lambda step: jax.random.fold_in(KEY, step), (jnp.arange(3),), False),
        (accumulate, carried, lambda key: key, (jax.random.split(KEY, 3),), False),
        (accumulate, drawing, lambda key: key, (jax.random.split(jax.random.PRNGKey(0), 3),), False),
    ],
    ids=["closed over", "carried", "raw", "folded", "given", "given, raw"],
)
def test_the_same_random_numbers_in_all_microbatches_are_told(of, made, key_of, given, warns):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        jax.make_jaxpr(of(made(key_of)))(PARAMS["w"], X, *given)
        jax.make_jaxpr(of(made(key_of)))(PARAMS["w"], X[:1], *(x[:1] for x in given))  # one microbatch
    words = f"{of.__name__}: the loss draws the same random numbers in all microbatches"
    assert [words in str(warning.message) for warning in told] == [True] * warns
    assert all(warning.filename == __file__ for warning in told)


def test_a_raw_key_for_as_many_microbatches_as_it_has_numbers():
    with pytest.raises(TypeError, match="invalid PRNG key data") as error:
        accumulate(drawing(lambda key: key))(PARAMS["w"], X[:2], jax.random.PRNGKey(0))
    assert "split the key, one per microbatch" in error.value.__notes__[-1]


def test_an_error_of_the_loss_says_what_a_microbatch_is():
    tokens = jnp.zeros((4, 65), jnp.int32)  # without an axis of microbatches
    with pytest.raises(IndexError) as error:
        accumulate(lambda w, tokens: jnp.mean(w[tokens[:, :-1]]))(jnp.ones((10, 3)), tokens)
    assert error.value.__notes__[-1].endswith("the loss is called with one of 4 microbatches: int32[65]")


@pytest.mark.claim("accumulated-in-a-loop")
def test_the_backward_pass_of_one_runs_beside_the_forward_pass_of_the_next():
    """In one loop over the layers, which holds the matmuls of both; the program does not grow with the microbatches."""
    loss = functools.partial(of_matmuls, ours)
    matmuls = lambda jaxpr: sum(site.eqn.primitive is dot_general_p for site in walk(jaxpr))
    loops, sizes = {}, {}
    for microbatches in (2, 9, 16, 17):
        jaxpr = jax.make_jaxpr(accumulate(loss))(PARAMS["w"], normal(5, (microbatches, 2, DIM)))
        scans = [site.eqn.params for site in walk(jaxpr) if site.eqn.primitive is lax.scan_p]
        bodies = [scan["jaxpr"] for scan in scans if scan["length"] == LAYERS]  # not the loop over microbatches
        loops[microbatches] = set(map(matmuls, bodies))
        sizes[microbatches] = sum(1 for _ in walk(jaxpr))
    assert 1 + 2 in loops[2]  # one forward, two backward
    assert sizes[9] == sizes[16] == sizes[17]


@pytest.mark.claim("fill-and-drain")
def test_what_would_not_fit_behind_a_pass_that_runs_alone_stays_on_the_device_or_is_recomputed():
    """In an H200's milliseconds: a layer of 2 x 8192 tokens of Llama-3-8B's MLP takes 9 forward, its copies 20; its
    matmuls take 3 each, and the copies of what these make 9."""
    layers, d, hidden, rows = 4, 4096, 14336, 16384
    rules = policy({"x": "offload", "up": "offload", "fc1": "offload", "act": "recompute"})

    def layer(x, w):
        x, (gate, up, down) = tag(x, "x"), (a.astype(jnp.bfloat16) for a in w)
        fc1, up = tag(x @ gate, "fc1"), tag(x @ up, "up")
        return x + tag(jax.nn.silu(fc1) * up, "act") @ down, None

    loss = lambda w, x: jnp.sum(scan(layer, x, w, policy=rules)[0].astype(jnp.float32))
    w = tuple(jax.ShapeDtypeStruct((layers, *a), jnp.float32) for a in ((d, hidden), (d, hidden), (hidden, d)))

    def loops(microbatches):
        """MiB per layer to the host and back, and matmuls, in each loop over the layers."""
        jaxpr = jax.make_jaxpr(accumulate(loss))(w, xs(microbatches))
        bodies = [s.eqn.params["jaxpr"] for s in walk(jaxpr) if is_layers(s.eqn)]
        eqns = lambda body, primitive: [s.eqn for s in walk(body) if s.eqn.primitive is primitive]
        made = lambda body, host: [v for e in eqns(body, device_put_p) for v in e.outvars if on_host(v.aval) is host]
        mib = lambda body, host: sum(nbytes(v.aval) for v in made(body, host)) // 2**20
        return [(mib(body, True), mib(body, False), len(eqns(body, dot_general_p))) for body in bodies]

    is_layers = lambda eqn: eqn.primitive is lax.scan_p and eqn.params["length"] == layers
    wide, narrow = rows * hidden * 2 // 2**20, rows * d * 2 // 2**20
    every = 2 * wide + narrow
    # A set of gradients has 672 MiB per layer, of which with two microbatches 470 may stay: a wide residual. With eight
    # 168 may, a narrow one in the first and in the last, and with 64 none: then a wide one is recomputed in the first.
    xs = lambda count: jax.ShapeDtypeStruct((count, rows, d), jnp.bfloat16)
    assert [bytes_staying(accumulate(loss), w, xs(m)) >> 20 for m in (2, 8, 64)] == [layers * wide, layers * narrow, 0]
    middle, drain = (every, every, 9), (0, every, 6)
    assert loops(2) == [(wide + narrow, 0, 3), (every, wide + narrow, 9), drain]
    assert loops(8) == [(wide, 0, 3), (every, wide, 9 + 1), middle, (2 * wide, every, 9), (0, 2 * wide, 6)]
    assert loops(64) == [(wide + narrow, 0, 3), (every, wide + narrow, 9 + 1), middle, drain]


@pytest.mark.claim("fill-and-drain")
def test_nothing_stays_on_the_device_for_less_than_a_part_of_the_step(monkeypatch):
    """In an H200's milliseconds: a layer takes 7 forward, 17 backward, its copies 9. To recompute `k` takes 0.2, more
    than 0.3 % of what a layer of two microbatches takes, and less than that of four."""
    d, hidden, rows = 4096, 14336, 16384
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    rules = policy({"fc1": "offload", "k": "offload"})

    def layer(x, w):
        wide, narrow, *others = w
        k = tag(x @ narrow, "k")
        x = x + jnp.tanh(tag(x @ wide, "fc1")) @ others[0] + jnp.tile(jnp.tanh(k), (1, 4))
        return x + x @ others[1], None

    loss = lambda w, x: jnp.sum(scan(layer, x, w, policy=rules)[0].astype(jnp.float32))
    w = shape(LAYERS, d, hidden), shape(LAYERS, d, d // 4), shape(LAYERS, hidden, d), shape(LAYERS, d, d)
    stays = lambda count: bytes_staying(accumulate(loss), w, shape(count, rows, d))
    k = LAYERS * rows * d // 4 * 2
    assert (stays(2), stays(4)) == (k, 0)
    monkeypatch.setattr(ends, "LEAST_GAIN", 0.0)
    assert (stays(2), stays(4)) == (k, k)


@pytest.mark.claim("fill-and-drain")
def test_a_collective_is_not_repeated_where_a_pass_runs_alone():
    """How long it takes is not known. A matmul, which takes a quarter of the wait, runs again for the first and for
    the last."""
    d, hidden, rows = 2048, 14336, 16384
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    def each_loop(primitive, made=lambda y: y):
        layer = lambda x, w: (x + jnp.tanh(tag(made(x @ w[0]), "fc1")) @ w[1], None)
        loss = lambda w, x: jnp.sum(scan(layer, x, w, policy=policy({"fc1": "offload"}))[0].astype(jnp.float32))
        jaxpr = jax.make_jaxpr(accumulate(loss))((shape(4, d, hidden), shape(4, hidden, d)), shape(64, rows, d))
        of_layers = (eqn for eqn in equations(jaxpr) if eqn.primitive is lax.scan_p and eqn.params["length"] == 4)
        return [count(eqn.params["jaxpr"], primitive) for eqn in of_layers]

    on_all = functools.partial(
        jax.shard_map, mesh=auto_mesh(data=2), in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )
    assert each_loop("dot_general") == [2, 2 + 4 + 1, 2 + 4, 2 + 4, 4 + 1]
    assert each_loop("psum", on_all(lambda y: lax.psum(y, "data"), check_vma=False)) == [1, 2 + 1, 2]


def test_one_microbatch_and_a_policy_that_moves_nothing_run_one_by_one(monkeypatch):
    monkeypatch.setattr(interleaved, "run", None)
    assert_equal(language_model, [tokens(1)], True)
    saved = dict.fromkeys(RULES, "save")
    loss_of = lambda stack, params, x: jnp.sum(stack(layer, x, of_layers(params), saved)[0] ** 2)
    assert_equal(loss_of, [normal(5, (3, 2, DIM))])


def test_a_loss_without_a_scan_says_so_and_runs_one_by_one():
    loss_of = lambda _, params, x: jnp.sum(jnp.tanh(x @ params["mixer"]) ** 2)
    with pytest.warns(UserWarning, match=r"no scan of jaxoffload's.*accumulate\(offload\(loss\)\)"):
        assert_equal(loss_of, [normal(5, (3, 2, DIM))])


def test_what_is_in_other_control_flow_runs_in_its_place():
    """Beside a scan that is interleaved: a chain, a checkpoint, a scan in a branch of a cond, a scan of scans."""
    rules = policy({"fc1": "offload"})
    step = lambda x, w: jnp.tanh(tag(x @ w, "fc1"))
    chained = {True: lambda x, w: chain([step] * 2, x, [w[0], w[1]], policy=rules)}
    chained[False] = lambda x, w: functools.reduce(lambda x, w: in_a_loop(step, "fc1")(x, w), [w[0], w[1]], x)

    def loss_of(stack, params, x):
        y = chained[stack is ours](x, params["w"])
        y, _ = stack(layer, y, of_layers(params), RULES)
        run = lambda y: stack(lambda x, w: (step(x, w), None), y, params["w"], {"fc1": "offload"})[0]
        y = lax.cond(y[0, 0] > 0, run, lambda y: y, y)
        y, _ = lax.scan(lambda y, _: (run(y), None), y, None, length=2)
        return jnp.sum(y**2)

    assert_equal(loss_of, [normal(5, (3, 2, DIM))])


@on_cpu_and_gpu
def test_effects_happen_as_often_as_in_the_loop(device):
    counted = []

    def loss_of(stack, params, x):
        def step(x, w):
            jax.debug.callback(lambda: counted.append("layer"))
            return jnp.tanh(tag(x @ w, "fc1")), None

        jax.debug.callback(lambda: counted.append("before"))
        y, _ = stack(step, x, params["w"], {"fc1": "offload"})
        jax.debug.callback(lambda: counted.append("behind"))
        return jnp.sum(y**2)

    def effects_of(f):
        counted.clear()
        jax.block_until_ready(jax.jit(f)(PARAMS, normal(5, (4, 2, DIM))))
        jax.effects_barrier()
        return {kind: counted.count(kind) for kind in ("before", "layer", "behind")}

    found = effects_of(accumulate(functools.partial(loss_of, ours)))
    assert found == effects_of(one_by_one(functools.partial(loss_of, ours)))
    assert found["before"] == found["behind"] == 4


def test_on_meshes():
    """Data over devices: in a shard_map, with explicit axes, and with auto axes."""
    our_loss, plain_loss = (functools.partial(of_matmuls, stack) for stack in (ours, plain))
    x = normal(5, (4, 4, DIM))
    want = run(accumulate(our_loss), PARAMS["w"], x)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec(None, "data")))
        got, in_a_loop_of_jax = run_each([accumulate(our_loss), one_by_one(plain_loss)], PARAMS["w"], rows)
    assert_same_bits(got, in_a_loop_of_jax)
    assert_close(got[1], want[1])
    auto = auto_mesh(data=4)
    rows = jax.device_put(x, jax.NamedSharding(auto, PartitionSpec(None, "data")))
    assert_close(run(accumulate(our_loss), PARAMS["w"], rows)[1], want[1])

    def local(derived):
        specs = (PartitionSpec(), PartitionSpec(None, "data")), (PartitionSpec("data"), PartitionSpec("data"))
        f = lambda w, x: jax.tree.map(lambda y: y[None], derived(w, x))
        return jax.shard_map(f, mesh=auto, in_specs=specs[0], out_specs=specs[1], check_vma=False)

    assert_same_bits(*run_each([local(accumulate(our_loss)), local(one_by_one(plain_loss))], PARAMS["w"], x))


def test_without_jit_at_all():
    loss = lambda w, x: jnp.sum(ours(layer, x, w, RULES)[0] ** 2)
    args = {name: w[:2] for name, w in of_layers(PARAMS).items()}, normal(5, (2, 1, DIM))
    with jax.disable_jit():
        got = accumulate(loss)(*args)
    assert_close(got, jax.jit(accumulate(loss))(*args))


def test_two_microbatches_must_fit_into_the_host_pool(monkeypatch):
    """A row of a layer's x and fc1, 2 x 64 bytes: three rows each of two stacks, in a pool of 1 KiB or less."""

    def stacks_in(pool, step):
        monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", repr(pool / 2**30))
        jax.clear_caches()
        jaxpr = jax.make_jaxpr(accumulate(step))(PARAMS, normal(5, (3, 2, DIM)))
        (loops,) = (site.eqn.params["loops"] for site in walk(jaxpr) if site.eqn.primitive is interleaved.interleaved_p)
        return [[segment.on_host for segment in one.segments] for one in loops]

    once = lambda params, x, **fields: scan(layer, x, of_layers(params), policy=policy(RULES, **fields))[0]
    saving = functools.partial(once, on_host_full="save")
    loss_of = lambda *stacks: lambda params, x: jnp.sum(functools.reduce(lambda x, f: f(params, x), stacks, x) ** 2)
    two = LAYERS * 2 * 2 * 64
    assert stacks_in(two, loss_of(once)) == stacks_in(two, loss_of(saving)) == [[LAYERS - 1]]
    with pytest.raises(MemoryError, match=r"accumulate: 2 layer\(s\) of 2 microbatches would offload 768 B per device"):
        stacks_in(two - 1, loss_of(once))
    with pytest.warns(UserWarning, match=r"holds 767 B, enough for 1, which offload \(on_host_full: save\)"):
        assert stacks_in(two - 1, loss_of(saving)) == [[1, 0]]
    assert stacks_in(2 * two, loss_of(once, once)) == [[LAYERS - 1]] * 2
    for both in (once, once), (saving, once):
        with pytest.raises(MemoryError, match=r"two microbatches offload 1.50 KiB per device; .*\(offload_layers: 1\)"):
            stacks_in(2 * two - 1, loss_of(*both))


def test_it_is_not_differentiated_and_can_be_batched():
    f, x = accumulate(functools.partial(of_matmuls, ours)), normal(5, (3, 2, DIM))
    with pytest.raises(NotImplementedError, match="accumulate cannot be differentiated"):
        jax.grad(lambda w: f(w, x)[0])(PARAMS["w"])
    many = jnp.stack([x, 2 * x])
    each = [functools.partial(lambda n, w, many: f(w, many[n]), n) for n in range(len(many))]
    got, *want = run_each([jax.vmap(f, (None, 0)), *each], PARAMS["w"], many)
    assert_close(got, [np.stack(rows) for rows in zip(*want, strict=True)])


good = functools.partial(masked, ours)
X = normal(5, (3, 2, DIM))
misspelt = lambda x, w: ours(lambda x, w: (tag(x * w, "fc1"), None), x, w, {"fcl": "offload"})[0]
SPLIT = "split the key, one per microbatch: jax.random.split(key, microbatches)"
SAME = "give in_axes None for what is the same in all microbatches"
NO_AXIS = "has no leading axis of microbatches, which every argument needs that is not in argnums; "
ERRORS = [
    (lambda: accumulate(good, reduction="avg"), ValueError, "reduction 'avg' is not allowed; use 'mean' or 'sum'"),
    (lambda: accumulate(jnp.sum)(X), TypeError, "accumulate: no argument is a batch"),
    (
        lambda: accumulate(lambda w, x, train=True: good(w, x))(X[0], X, train=True),
        TypeError,
        "kwargs['train'] has no leading axis of microbatches, which every argument needs that is not in argnums; bind",
    ),
    (lambda: accumulate(good, in_axes=1), ValueError, "accumulate: in_axes has 1; use 0 for a batch"),
    (lambda: evaluate(good, in_axes=(None, 0, 0))(X, X), ValueError, "in_axes has 3 entries for 2 positional"),
    (
        lambda: accumulate(good, in_axes=(None, {"a": 0}))(X, {"b": X}),
        ValueError,
        "accumulate: in_axes[1], {'a': 0}, is no pytree prefix of args[1]",
    ),
    (lambda: accumulate(good, argnums=1.0), TypeError, "accumulate: argnums 1.0 is not allowed; use a whole number"),
    (lambda: accumulate(good, argnums=()), TypeError, "accumulate: argnums () is not allowed"),
    (lambda: accumulate(jnp.vdot, argnums=(0, -2))(X, X), ValueError, "argnums (0, -2) has one of 2 positional arg"),
    (lambda: accumulate(jnp.vdot)(X, 1.0), TypeError, f"args[1] {NO_AXIS}{SAME}: frozen weights, a step number"),
    (lambda: accumulate(good)(X, X, act=jnp.tanh), TypeError, "accumulate: kwargs['act'] has no leading axis"),
    (lambda: accumulate(good)(X, X, jax.random.key(0)), TypeError, f"accumulate: args[2] {NO_AXIS}{SPLIT}"),
    (
        lambda: accumulate(good)(X, jax.random.PRNGKey(0), x=X),
        ValueError,
        "accumulate: args[1] has 2 microbatches, and kwargs['x'] has 3; they must be as many; args[1] may be a PRNG "
        f"key: {SPLIT}",
    ),
    (
        lambda: offload(accumulate(lambda w, x: jnp.sum(ours(layer, x, w, RULES)[0])))(of_layers(PARAMS), X),
        NotImplementedError,
        "wrap the loss: jax.grad(offload(loss)), accumulate(offload(loss))",
    ),
    (
        lambda: accumulate(lambda w, x, y: 0.0)(X, {"a": X}, X[:2]),
        ValueError,
        f"accumulate: args[1]['a'] has 3 microbatches, and args[2] has 2; they must be as many; {SAME}",
    ),
    (lambda: accumulate(jnp.vdot)(X, X[:0]), ValueError, "args[1] has no microbatches"),
    (lambda: accumulate(jnp.vdot, argnums=2)(X, X), ValueError, "argnums has 2, and there are 2 positional arguments"),
    (lambda: accumulate(lambda w, x: w * x)(X[0], X), TypeError, "scalar"),
    (
        lambda: accumulate(lambda w, x: jnp.sum(w["n"]) * jnp.sum(x))({"n": jnp.arange(3)}, X),
        TypeError,
        "accumulate: args[0]['n'] is int32, which has no gradient; argnums names the arguments that are",
    ),
    (
        lambda: accumulate(lambda w, x: jnp.sum(w["w"] * x))({"w": X[0], "of": {"name": "gpt"}}, X),
        TypeError,
        "accumulate: args[0]['of']['name'] is 'gpt', of type str, which has no gradient; argnums names",
    ),
    (lambda: accumulate(lambda w, x: jnp.sum(w * x), has_aux=True)(X[0], X), TypeError, "two-element tuple"),
    (lambda: accumulate(lambda w, x: jnp.sum(misspelt(x, w)))(jnp.ones((2, 2, DIM)), X), PolicyError, "fcl"),
]


@pytest.mark.parametrize("call, kind, message", ERRORS, ids=range(len(ERRORS)))
def test_errors_before_anything_is_compiled(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)


# ---- sums in a wider dtype ----


def in_two_dtypes(stack, params, x):
    """Weights of bfloat16, of the layers, shared by them, and read at both ends; a bias of float32 beside them."""

    def step(x, w):
        y, size = layer(x, {"w": w["w"], "bias": w["bias"].astype(x.dtype)})
        return y @ params["mixer"], size

    y, sizes = stack(step, x @ params["tied"], of_layers(params), RULES)
    return jnp.mean((y @ params["tied"].T).astype(jnp.float32) ** 2), sizes


HALVES = {name: PARAMS[name].astype(jnp.bfloat16) for name in ("w", "mixer")}
HALVES |= {"tied": normal(8, (DIM, DIM), jnp.bfloat16), "bias": PARAMS["bias"]}


@on_cpu_and_gpu
@pytest.mark.claim("sums-in-a-wider-dtype")
@pytest.mark.parametrize(
    "decision, microbatches, reduction", [("offload", 4, "mean"), ("save", 3, "sum"), ("offload", 1, "sum")]
)
def test_sums_in_a_wider_dtype(decision, microbatches, reduction, device):
    """Interleaved, in turn, and of one microbatch."""
    decisions = dict.fromkeys(("x", "fc1"), decision)
    decided = lambda stack: lambda step, init, xs, rules: stack(step, init, xs, rules | decisions)
    loss_of = lambda stack, params, x: in_two_dtypes(decided(stack), params, x)
    how = {"reduction": reduction, "sum_dtype": jnp.float32}
    assert_equal(loss_of, [normal(5, (microbatches, 2, DIM), jnp.bfloat16)], True, HALVES, **how)


def test_a_dtype_that_is_not_wider_changes_nothing():
    loss, x = functools.partial(in_two_dtypes, ours), normal(5, (3, 2, DIM), jnp.bfloat16)
    of = lambda dtype: jax.make_jaxpr(accumulate(loss, has_aux=True, sum_dtype=dtype))(HALVES, x).out_avals
    assert of(jnp.bfloat16) == of("float16") == of(None) != of("float32")


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, "fp32", jnp.floating])
def test_sums_are_floating(dtype):
    with pytest.raises(TypeError, match=r"accumulate: sum_dtype .* is not allowed; use a floating dtype, or None"):
        accumulate(good, sum_dtype=dtype)


@pytest.mark.parametrize("decision", ["save", "offload"])
def test_nothing_is_computed_from_what_is_uninitialised(decision, monkeypatch):
    """New stacks are full of NaNs, or of 99s."""
    policy = Policy({"h": decision}, min_offload_bytes=0)
    layer = lambda x, w: (jnp.sin(tag(x @ w, "h")) + x, x[0])
    loss = lambda w, x: (lambda y, xs: jnp.sum(y) + jnp.sum(xs))(*scan(layer, x, w, policy=policy))
    w, xs = 0.3 * normal(0, (5, 8, 8)), normal(1, (3, 4, 8))
    both = lambda: jax.tree.leaves((jax.jit(jax.grad(loss))(w, xs[0]), jax.jit(accumulate(loss))(w, xs)))
    expected = jax.device_get(both())
    jax.clear_caches()
    anything = lambda shape, dtype, **_: jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 99, dtype)
    monkeypatch.setattr(lax, "empty", anything)
    assert_close(jax.device_get(both()), expected)
