"""scan() against what JAX's own tests check of lax.scan, with a policy that offloads: tests/lax_control_flow_test.py of
jax-ml/jax at cec06d116c05. Left out are other functions (map, associative_scan, while_loop), what this library refuses,
and what test_scan.py and test_random_scans.py have. A NumPy x that comes out as it went in is a `jax.Array` here, and
float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close, assert_same_bits, count, gradient, in_a_loop, normal, policy, run, run_each, total
from jax import lax

from jaxoffload import scan, tag

pytestmark = [pytest.mark.slow, pytest.mark.claim("three-steps")]

N = 5
C, AS, D = normal(0, (4,)), normal(1, (N, 3)), normal(2, (2,))

ours = partial(scan, policy=policy({"h": "offload"}))


def reference(f, *args, **kwargs):
    return lax.scan(in_a_loop(f, "h"), *args, **kwargs)


def cell(c, a):
    # Where two products of vectors are added, XLA:CPU fuses one of them with the sum, and not the same one in every
    # program; so c has a single product for its cotangent.
    b = tag(jnp.cos(jnp.sum(a) + jnp.sum(c) + jnp.sum(D)), "h")
    return jnp.sin(c * b), b


def assert_same_as_reference(program, *args):
    """`program` is a function of the scan to use."""
    assert_same_bits(*run_each([program(ours), program(reference)], *args))


def test_numpy_arrays():
    args = C, AS
    for f in (partial(ours, cell), gradient(partial(ours, cell), (0, 1))):
        got = jax.tree.leaves(f(*(np.asarray(a, np.float64) for a in args)))
        assert all(isinstance(x, jax.Array) for x in got)
        assert_same_bits([*map(np.asarray, got)], [np.asarray(x) for x in jax.tree.leaves(f(*args))])


# ------------------------------------------------------------------------------------------------- errors


ERRORS = {
    "not callable": lambda scan: scan(42, 0, 1),
    "no pair": lambda scan: scan(lambda c, x: np.float32(0.0), 0, jnp.arange(5.0)),
    "tuple for pair": lambda scan: scan(lambda c, x: ((0, 0, 0), x), (1, (2, 3)), jnp.arange(5.0)),
    "one key more": lambda scan: scan(lambda x, _: ({"a": x["a"], "b": x["a"]}, None), {"a": 1}, length=1),
    "dtype": lambda scan: scan(lambda x, _: (x.astype("float32"), None), jnp.int32(0), length=1),
    "dtypes and shape": lambda scan: scan(
        lambda x, _: ((x[0].astype("float32"), x[1].astype("float32").reshape(1, 1), x[2]), None),
        (jnp.int32(0),) * 3,
        length=1,
    ),
    "length": lambda scan: scan(lambda *args: args, 0, jnp.arange(10), length=5),
    "lengths": lambda scan: scan(lambda c, x: (c, None), 0, (jnp.ones(2), jnp.ones(3))),
    "no length": lambda scan: scan(lambda *args: args, 0),
    "traced length": lambda scan: jax.jit(lambda n, x: scan(lambda *args: args, x, (), n))(3, 1.0),
    "traced unroll": lambda scan: jax.jit(lambda n, x: scan(lambda *args: args, x, (), 10, unroll=n))(3, 1.0),
    "unroll": lambda scan: scan(lambda x, _: (x, x), 0, jnp.arange(5), unroll=-1),
}


@pytest.mark.parametrize("call", ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_those_of_lax_scan(call):
    with pytest.raises((TypeError, ValueError)) as want:
        call(lax.scan)
    with pytest.raises(type(want.value)) as got:
        call(ours)
    assert str(got.value) == str(want.value)


# ------------------------------------------------------------------------------------------------- derivatives


def _random_key(key):
    def program(scan, c):
        def step(carry, _):
            key = jax.random.split(carry[1])[0]
            return (tag(jnp.sin(carry[0]), "h") * jax.random.uniform(key), key), ()

        return scan(step, (c, key), np.ones(3))[0][0]

    return program


def _cond_on_the_carry(scan, x):
    def step(carry, _):
        return lax.cond(carry[1], lambda c: (tag(c * x, "h") * c, c < 2), lambda c: (c, False), carry[0]), None

    return scan(step, (x, x > 0), length=4)[0][0]


SPECIAL = {
    "typed key": _random_key(jax.random.key(0)),
    "raw key": _random_key(jax.random.PRNGKey(0)),
    "constant carry": lambda scan, x: jax.jit(
        lambda x: scan(lambda c, _: ((tag(jnp.sin(c[0]), "h") * 2, 0.0), None), (x, 0.0), jnp.arange(3))[0][0]
    )(x),
    "tangents that grow": lambda scan, x: scan(
        lambda c, _: ((c[0], jnp.sin(c[0]), tag(c[1] * c[1], "h"), jnp.sin(c[2])), None), (x, 0.5, 0.6, 0.7), length=4
    )[0][1:],
    "carry without tangent": lambda scan, x: scan(
        lambda c, _: ((tag(0.0 * c[0] * c[1], "h"), 0.0), ()), (x, 0.0), (), length=5
    )[0],
    "cond on the carry": _cond_on_the_carry,
}


def test_gradients_of_special_bodies():
    every = lambda f: lambda x: [(f(program)(x), gradient(f(program))(x)) for program in SPECIAL.values()]
    assert_same_as_reference(lambda scan: every(lambda program: partial(program, scan)), jnp.float32(0.25))


# ------------------------------------------------------------------------------------------------- vmap


AXES = [(None, 1), (0, None), (0, 2), (1, 0)]


def _with_axis(x, axis, seed):
    if axis is None:
        return x
    return normal(seed, (*x.shape[:axis], 7, *x.shape[axis:]))


def test_vmap_over_any_axes():
    args = [(_with_axis(C, c, 9), _with_axis(AS, a, 10)) for c, a in AXES]
    of = lambda scan: [jax.vmap(partial(scan, cell), axes) for axes in AXES]
    assert_same_as_reference(lambda scan: lambda args: [f(*a) for f, a in zip(of(scan), args, strict=True)], args)


def test_vmap_reaches_the_carry_layer_by_layer():
    """The carry shifts by one place per layer, and only its last component starts batched."""
    step = lambda c, _: ((*c[1:], 0.0), None)
    shifted = jax.vmap(lambda last: ours(step, (0.0, 1.0, 2.0, last), jnp.zeros(2))[0])
    got = run(shifted, jnp.array([3.0, 4.0, 5.0]))
    assert [list(x) for x in got] == [[2.0] * 3, [3.0, 4.0, 5.0], [0.0] * 3, [0.0] * 3]


def test_what_nothing_batched_reaches_is_not_batched():
    step = lambda c, x: ((jnp.sin(c[0]), tag(c[0] * c[1], "h") * c[1] * x), c[0])
    f = lambda scan: jax.vmap(lambda c: scan(step, (0.5, c), AS[:, 0]), out_axes=((None, 0), None))
    assert_same_as_reference(f, C)
    assert_close(*run_each([gradient(f(s)) for s in (ours, reference)], C))


def test_collectives_under_vmap():
    step = lambda c, x: (c, tag(lax.psum(c, "i"), "h") * x * c)
    f = lambda scan: jax.vmap(partial(scan, step), axis_name="i")
    c, xs = jnp.array([1.0, 2.0]), jnp.arange(10.0).reshape(2, 5)
    assert_close(run(f(ours), c, xs), [c, 3 * xs * c[:, None]])
    assert_close(*run_each([gradient(f(s), (0, 1)) for s in (ours, reference)], c, xs))


def test_pmap():
    def f(scan):
        step = lambda c, x: (c + jnp.sin(tag(lax.psum(x, "i") * c, "h")), c)
        g = lambda x: scan(step, 0.5, x)
        return jax.pmap(lambda x: (g(x), gradient(g)(x)), axis_name="i")

    xs = normal(15, (jax.device_count(), 4))
    assert_same_bits(*([np.asarray(x) for x in jax.tree.leaves(f(scan)(xs))] for scan in (ours, reference)))


# ------------------------------------------------------------------------------------------------- programs


def test_a_body_is_traced_once():
    def f(c, a):
        traced.append(1)
        return cell(c, a)

    traced = []
    for _ in range(3):
        ours(f, C, AS)
        jax.grad(lambda c: total(ours(f, c, AS)))(C)
    assert len(traced) == 1


@pytest.mark.parametrize("differentiated", [False, True])
def test_caches_depend_on_the_axis_size(differentiated):
    f = lambda x: ours(lambda c, _: (tag(c * 1.5, "h") * c * lax.axis_size("i"), None), x, length=1)[0]
    f, factor = (jax.grad(f), 6.0) if differentiated else (f, 6.0)
    for size in (2, 3):
        got = jax.vmap(f, axis_name="i", axis_size=size)(jnp.full(size, 2.0))
        assert list(got) == [factor * size] * size


def test_jaxprs_pass_the_checks():
    with jax.enable_checks(True):
        f = gradient(lambda *args: jax.vmap(partial(ours, cell), (0, None))(*args), (0, 1))
        assert count(jax.make_jaxpr(f)(C[None], AS), "jaxoffload_backward") == 1


def test_a_closed_over_matrix_is_not_stacked():
    f = lambda a: ours(lambda x, _: (tag(a @ x, "h"), None), jnp.ones(3), jnp.arange(10))[0]
    text = jax.jit(gradient(f)).lower(normal(16, (3, 3))).as_text()
    assert "tensor<3x3xf32>" in text and "10x3x3" not in text


def test_platform_dependent_body():
    """Only the branch of the platform is lowered."""
    branches = {"cpu": lambda c: jnp.sin(tag(c, "h")), "tpu": jnp.tanh}
    step = lambda c, x: (lax.platform_dependent(c, **branches) * x, None)
    f = lambda scan: gradient(partial(scan, step), (0, 1))
    text = jax.jit(f(ours)).lower(0.5, AS[:, 0]).as_text()
    assert "stablehlo.cosine" in text and "tanh" not in text
    assert_same_as_reference(f, jnp.float32(0.5), AS[:, 0])


# ------------------------------------------------------------------------------------------------- forwarding


def _drawn(seed):
    """Draw a body whose operands and results, in random order, pass through, move or are computed."""
    rng = np.random.RandomState(seed)
    consts = [jnp.asarray(rng.randn(3), jnp.float32) for _ in range(rng.randint(3))]
    size, layers = rng.randint(4, 8), 3
    rule = rng.choice(["stays", "moves", "computed"], size)
    rule[rng.randint(size)] = "computed"
    source = rng.permutation(size)
    y_rule = rng.choice(["x", "of x", "carry", "constant"], 4)

    def step(c, xs):
        scale = sum(jnp.sum(k) for k in consts) if consts else 1.0
        new = {
            "stays": lambda i: c[i],
            "moves": lambda i: c[source[i]],
            "computed": lambda i: tag(jnp.sin(c[i]), "h") * scale,
        }
        out = {"x": lambda x: x, "of x": lambda x: jnp.cos(x) * scale, "carry": lambda _: c[0], "constant": lambda _: 0}
        return [new[r](i) for i, r in enumerate(rule)], [out[r](x) for r, x in zip(y_rule, xs, strict=True)]

    inits = [jnp.float32(x) for x in rng.uniform(size=size)]
    xs = [jnp.asarray(rng.uniform(size=layers), jnp.float32) for _ in y_rule]
    return step, inits, xs


@pytest.mark.parametrize("seed", range(4))
def test_what_stays_moves_or_comes_out_as_it_went_in(seed):
    """Gradients are not compared bit for bit: an operand that bypasses the loop adds its cotangent in another order."""
    step, inits, xs = _drawn(seed)
    f = lambda scan: gradient(partial(scan, step), (0, 1))
    *results, got, want = run_each([*(partial(s, step) for s in (ours, reference)), f(ours), f(lax.scan)], inits, xs)
    assert_same_bits(*results)
    assert_close(got, want)
    jaxpr = jax.make_jaxpr(lambda c, xs: ours(step, c, xs)[1])(inits, xs)
    past = [x in jaxpr.invars for x in jaxpr.outvars]
    want = jax.make_jaxpr(lambda c, xs: lax.scan(step, c, xs)[1])(inits, xs)
    assert past == [x in want.invars for x in want.outvars]
