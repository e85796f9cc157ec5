"""scan(): lax.scan's behaviour, with our residuals. Only public behaviour is tested, so any engine must pass.

Some tests are JAX's own of lax.scan (tests/lax_control_flow_test.py), with a policy that offloads.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import count, equations, gradient, gradient_jaxpr, in_a_loop, kept_bytes, one_by_one, place, total
from common import assert_close, assert_same_bits, auto_mesh, normal, policy, run_each
from jax import lax

from jaxoffload import accumulate, chain, checkpoint, evaluate, offload, residuals, scan, tag

P = jax.P
N, BATCH, DIM = 5, 4, 8
ONE = BATCH * DIM * 4  # bytes of a float32 (BATCH, DIM)
X, WS = normal(0, (BATCH, DIM)), normal(1, (N, DIM, DIM)) * 0.5
RULES = {"fc1": "offload", "act": "save"}
OFF = policy(RULES)


def body(x, w):
    x = tag(x, "layer_input")
    h = tag(x @ w, "fc1")
    act = tag(jnp.sin(h) * h, "act")
    return jnp.sin(act) @ w, jnp.sum(h, -1)


def plain(f, *names):
    return in_a_loop(f, *(names or ("fc1", "act")))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5])
def test_any_number_of_layers_forwards_and_in_reverse(n):
    ws = WS[:n]
    ours = [lambda x, w, r=r: scan(body, x, w, reverse=r, policy=OFF) for r in (False, True)]
    reference = [lambda x, w, r=r: lax.scan(plain(body), x, w, reverse=r) for r in (False, True)]
    both = lambda f: lambda *args: (f(*args), gradient(f, (0, 1))(*args))
    results = run_each([*map(both, ours), *map(both, reference)], X, ws)
    for got, want in zip(results[:2], results[2:], strict=True):
        assert_same_bits(got, want)
    assert kept_bytes(ours[0], X, ws)[1] == (n * ONE if n > 1 else 0)  # one row is padding


@pytest.mark.parametrize("unroll", [0, 2, True])
def test_unroll(unroll):
    ours = lambda x, w: scan(body, x, w, unroll=unroll, policy=policy(RULES, resident_layers=0))
    reference = lambda x, w: lax.scan(plain(body), x, w, unroll=unroll)
    assert_same_bits(*run_each([gradient(ours, (0, 1)), gradient(reference, (0, 1))], X, WS))


EDGES = jnp.linspace(-1.0, 1.0, 5)
HIGH = {
    "searchsorted": lambda x: x + jnp.searchsorted(EDGES, x).astype(x.dtype),
    "interp": lambda x: jnp.interp(x, EDGES, jnp.sin(EDGES)),
    "nonzero": lambda x: x + x[0][jnp.nonzero(x[0] > 0, size=3)[0]].sum(),
    "ldexp": lambda x: jnp.ldexp(x, 1),
    "custom_root": lambda x: lax.custom_root(
        lambda y: y - jnp.sin(x), x, lambda f, y: y - f(y), lambda g, y: y / g(jnp.ones_like(y))
    ),
}


@pytest.mark.parametrize("which", HIGH)
def test_what_jax_lowers_as_a_high_primitive(which):
    """In the layers and beside them, differentiated and not. From jax 0.12 on these have no lowering of their own."""
    step = lambda x, w: (jnp.tanh(HIGH[which](tag(x @ w, "fc1"))), None)
    of = lambda stack: lambda w, x: total(HIGH[which](stack(step, x, w)))
    rules = policy({"fc1": "offload"})
    ours = of(lambda f, *args: scan(f, *args, policy=rules)[0])
    framework = offload(of(lambda f, *args: lax.scan(jax.checkpoint(f, policy=rules), *args)[0]))
    linked = of(lambda f, x, w: chain([lambda x, w: f(x, w)[0]] * N, x, list(w), policy=rules))
    theirs = of(lambda f, *args: lax.scan(plain(f, "fc1"), *args)[0])
    both = lambda f: lambda w, x: (f(w, x), jax.value_and_grad(f)(w, x))
    *got, linked, want = run_each([*map(both, (ours, framework)), jax.jit(linked), both(theirs)], WS, X)
    for each in got:
        assert_same_bits(each, want)
    assert_close(linked, want[:1])
    microbatches = jnp.stack([X, -X, X / 2])
    results = [accumulate(ours), one_by_one(theirs), lambda *args: evaluate(ours)(*args)]
    *got, value = run_each(results, WS, microbatches)
    assert_same_bits(*got)
    assert_close(value, got[0][:1])


def test_length_without_xs_and_promotion_of_weak_types():
    step = lambda x, _: (tag(jnp.sin(x), "fc1") * jnp.float32(2), None)
    ours = lambda x: scan(step, x, length=3, policy=policy({"fc1": "offload"}))
    reference = lambda x: lax.scan(plain(step, "fc1"), x, length=3)
    for x in (1.0, jnp.float32(1)):
        assert jax.make_jaxpr(ours)(x).out_avals == jax.make_jaxpr(reference)(x).out_avals
        assert_same_bits(*run_each([ours, reference], x))
    assert jax.grad(lambda x: ours(x)[0])(1.0) == jax.grad(lambda x: reference(x)[0])(1.0)


def test_a_scan_that_carries_nothing():
    step = lambda _, x: (None, tag(x[0] @ x[1], "fc1") ** 2)
    ours = lambda *xs: scan(step, None, xs, policy=policy({"fc1": "offload"}))
    reference = lambda *xs: lax.scan(plain(step, "fc1"), None, xs)
    assert_same_bits(*run_each([gradient(ours, (0, 1)), gradient(reference, (0, 1))], WS[:, :BATCH], WS))


@pytest.mark.parametrize("reverse", [False, True])
def test_carry_and_xs_that_come_out_as_they_went_in(reverse):
    """lax.scan returns such results from its operands directly. Two parts of the carry change places."""
    step = lambda c, x: ((c[0], jnp.sin(tag(c[1] @ x, "fc1")) * c[0], c[3], c[2]), (x, c[0], c[1]))
    args = ((jnp.full((1, 1), 0.5), X, X + 1, X + 2), WS)
    ours = lambda c, x: scan(step, c, x, reverse=reverse, policy=policy({"fc1": "offload"}))
    reference = lambda c, x: lax.scan(plain(step, "fc1"), c, x, reverse=reverse)
    *outs, got, want = run_each([ours, reference, *(gradient(f, (0, 1)) for f in (ours, reference))], *args)
    assert_same_bits(*outs)
    assert_same_bits(got[:-1], want[:-1])
    # Directly, because lax.scan sees that x is x; in the reference jax.checkpoint hides it.
    assert_close(got[-1], want[-1])
    nothing = lambda through: lambda c, x: through(lambda c, x: (c, x), c, x)
    ours = nothing(lambda *a: scan(*a, policy=policy()))
    assert_same_bits(*run_each([gradient(ours, (0, 1)), gradient(nothing(lax.scan), (0, 1))], X, WS))


def test_a_value_that_nested_calls_pass_on_is_kept_once_and_where_its_name_says():
    """A nested checkpoint returns an operand that it also needs as its own residual."""

    def twice(x, _):
        y = jnp.sin(jax.checkpoint(lambda x: x + x)(x))
        return jnp.sin(jax.jit(lambda x: tag(x, "fc1") * 3)(x)), y

    def within(x, _):
        inner = checkpoint(lambda x: jnp.sin(tag(x + x, "inner") + tag(x, "fc1")), policy=policy({"inner": "save"}))
        return jax.jit(lambda x: inner(x) * 2)(x), None

    def read_inside_and_outside(x, _):
        return jnp.sin(tag(jax.checkpoint(jnp.exp)(-x), "fc1")), None

    for step in (twice, within, read_inside_and_outside):
        f = lambda x: scan(step, x, length=N, policy=policy({"fc1": "offload"}, resident_layers=0))
        assert kept_bytes(f, X) == (0, (N + 1) * ONE)
        reference = lambda x: lax.scan(plain(step, "fc1"), x, length=N)
        assert_same_bits(*run_each([gradient(f), gradient(reference)], X))


def test_derivatives_that_there_are_not_say_so():
    f = lambda x: jnp.sum(scan(body, x, WS, policy=OFF)[0])
    with pytest.raises(NotImplementedError, match=r"jaxoffload.scan cannot be differentiated twice"):
        jax.eval_shape(jax.hessian(f), X)
    with pytest.raises(NotImplementedError, match=r"jaxoffload.scan cannot be differentiated twice"):
        jax.eval_shape(jax.jacrev(jax.grad(f)), X)
    for forward in (lambda: jax.linearize(f, X)[1](X), lambda: jax.jit(jax.jacfwd(f))(X)):
        with pytest.raises(TypeError, match=r"jaxoffload.scan has no forward-mode derivative"):
            forward()


def test_a_forward_pass_that_an_outer_checkpoint_reruns_moves_nothing():
    jaxpr = gradient_jaxpr(jax.checkpoint(lambda x, w: scan(body, x, w, policy=OFF)[0]), X, WS)
    first, again = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "jaxoffload_forward")
    host = lambda eqn: sum(place(v.aval) == "host" for v in eqn.outvars)
    assert (host(first), host(again)) == (0, 1)


WRAPPED = {
    "checkpoint": jax.checkpoint,
    "checkpoint twice": lambda f: jax.checkpoint(jax.checkpoint(f)),
    "inner checkpoint saves": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
    "lax.scan": lambda f: lambda x, w: lax.scan(lambda c, _: (c + jax.checkpoint(f)(c, w), None), x, length=2)[0],
    "vmap": lambda f: lambda x, w: jax.vmap(jax.checkpoint(f), (0, None))(jnp.stack([x, x + 1]), w)[1],
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_any_result_of_a_scan_inside_a_checkpoint(wrap):
    """Even as the only result used; the forward pass drops unused ones."""

    def step(carry, w):
        a, b = carry
        h = tag(b @ w, "fc1")
        return (jnp.cos(h), jnp.sin(h) + a), jnp.sin(a) * h

    def result(through, pick):
        def f(x, w):
            (a, b), ys = through(step, (x, x), w)
            return [a, b, ys[1]][pick]

        return WRAPPED[wrap](f)

    ours = [result(lambda *a: scan(*a, policy=policy({"fc1": "offload"})), pick) for pick in range(3)]
    plain = [result(lambda f, *a: lax.scan(in_a_loop(f, "fc1"), *a), pick) for pick in range(3)]
    both = lambda f: lambda *args: (f(*args), gradient(f, (0, 1))(*args))
    results = run_each([*map(both, ours), *map(both, plain)], X, WS)
    for got, want in zip(results[:3], results[3:], strict=True):
        assert_close(got, want)


def test_vmap_in_any_order_with_grad():
    many = normal(4, (3, BATCH, DIM))
    weights = jnp.stack([WS, WS + 0.1, WS - 0.1])
    ours = lambda x, w: scan(body, x, w, policy=OFF)
    reference = lambda x, w: lax.scan(plain(body), x, w)
    cases = [((0, None), many, WS), ((None, 0), X, weights)]
    cases += [((2, 3), *(jnp.moveaxis(a, 0, -1) for a in (many, weights)))]
    for axes, *args in cases:
        grad_vmap = [gradient(jax.vmap(f, axes), (0, 1)) for f in (ours, reference)]
        vmap_grad = [jax.vmap(gradient(f, (0, 1)), axes) for f in (ours, reference)]
        for got, want in itertools.batched(run_each([*grad_vmap, *vmap_grad], *args), 2):
            assert_close(got, want)
    f = jax.vmap(ours, (0, None))
    assert kept_bytes(f, many, WS)[1] == 3 * N * ONE


def test_inside_shard_map_and_under_meshes():
    mesh = auto_mesh(a=4, b=2)
    ours = lambda x, w: scan(body, x, w, policy=policy(RULES, resident_layers=0))[0]
    reference = lambda x, w: lax.scan(plain(body), x, w)[0]
    for check_vma in (True, False):
        shard = lambda f, c=check_vma: jax.shard_map(
            f, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), check_vma=c, axis_names={"a", "b"}
        )
        assert_same_bits(*run_each([gradient(shard(ours), (0, 1)), gradient(shard(reference), (0, 1))], X, WS))
    x = jax.device_put(X, jax.NamedSharding(mesh, P("a")))
    w = jax.device_put(WS, jax.NamedSharding(mesh, P(None, None, "b")))
    assert_same_bits(*run_each([gradient(ours, (0, 1)), gradient(reference, (0, 1))], x, w))


def test_under_explicit_axes_the_stacks_are_sharded_as_what_they_hold():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    step = lambda x, w: (jnp.sin(tag(x * w, "fc1")), None)
    with jax.set_mesh(mesh):
        x, w = jax.device_put(X, P("a", "b")), jax.device_put(WS[:, 0, :1], P(None, None))
        ours = lambda x, w: scan(step, x, w, policy=policy({"fc1": "offload"}))[0]
        reference = lambda x, w: lax.scan(plain(step, "fc1"), x, w)[0]
        with jax.numpy_rank_promotion("allow"):
            assert_same_bits(*run_each([gradient(ours, (0, 1)), gradient(reference, (0, 1))], x, w))
            jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(ours, *a)[1]))(x, w)
    held = [v.aval for v in jaxpr.outvars if v.aval.memory_space == jax.memory.Space.Host]
    assert [a.sharding.spec for a in held] == [P(None, "a", "b")]
    # Where only the arguments say the mesh.
    with jax.numpy_rank_promotion("allow"):
        assert_same_bits(*run_each([gradient(ours, (0, 1)), gradient(reference, (0, 1))], x, w))


def test_a_value_of_an_inner_loop_that_two_derivatives_read_is_kept_once():
    """The derivative of tanh itself, and that of what follows the checkpoint."""

    def inner(c, _):
        y = tag(jax.checkpoint(lambda a: jnp.tanh(a * a))(c), "fc1")
        return y + y, None

    iterations = 2
    step = lambda x, w: (lax.scan(inner, x @ w, length=iterations)[0], None)
    f = lambda x, w: scan(step, x, w, policy=policy({"fc1": "offload"}, resident_layers=0))[0]
    assert kept_bytes(f, X, WS)[1] == (N + 1) * iterations * ONE
    plain = lambda x, w: lax.scan(in_a_loop(step, "fc1"), x, w)[0]
    assert_same_bits(*run_each([gradient(f, (0, 1)), gradient(plain, (0, 1))], X, WS))


def test_frozen_weights_need_nothing_kept():
    """LoRA: what only a frozen weight's gradient would read is not kept."""

    def step(x, w):
        frozen, a, b = w
        low = tag(x @ a, "low")
        return x @ frozen + low @ b, None

    frozen, a, b = WS, normal(7, (N, DIM, 2)), normal(8, (N, 2, DIM))
    rules = policy({"low": "offload"}, resident_layers=0)
    f = lambda a, b: scan(step, X, (frozen, a, b), policy=rules)[0]
    last = ONE  # `gradient` reads the result
    assert kept_bytes(f, a, b) == (N * ONE + last, (N + 1) * BATCH * 2 * 4)
    # Forward 3; of low, of a, of b, and of x through both.
    assert count(gradient_jaxpr(f, a, b, argnums=(0, 1)), "dot_general") == 3 + 5
    only_a = lambda a: scan(step, X, (frozen, a, b), policy=rules)[0]
    assert kept_bytes(only_a, a) == (N * ONE + last, 0)  # only b's gradient reads low itself
    assert count(gradient_jaxpr(only_a, a), "dot_general") == 3 + 4
    (row,) = [r for r in residuals(only_a, a) if r.names == ("low",)]
    assert (row.state, row.bytes) == ("not needed", 0)


@pytest.mark.parametrize("differentiated", [(0, 1), 1], ids=["weights and input", "weights"])
def test_without_jit_weights_are_kept_where_they_are(differentiated):
    args = X, WS
    of = lambda *moving: scan(body, *(moving if len(moving) > 1 else (X, *moving)), policy=OFF)[0]
    _, vjp = jax.vjp(of, *(args if differentiated == (0, 1) else (WS,)))
    stacks = [leaf for leaf in jax.tree.leaves(vjp) if leaf.shape == WS.shape]
    assert [leaf.unsafe_buffer_pointer() for leaf in stacks] == [WS.unsafe_buffer_pointer()]


def test_undifferentiated_it_is_lax_scan():
    def f(through):
        return jax.jit(lambda x, w: through(body, x, w)).lower(X, WS).as_text()

    assert f(lambda *args: scan(*args, policy=OFF)) == f(lax.scan)
    assert_same_bits(*run_each([lambda: scan(body, X, WS, policy=OFF), lambda: lax.scan(body, X, WS)]))


def test_a_foreign_policy_is_refused():
    with pytest.raises(TypeError, match=r"scan: policy must be a jaxoffload.Policy"):
        scan(body, X, WS, policy="save")


def test_vmap_of_a_number_that_is_the_same_in_every_layer():
    """`cos(s)` is kept once, not in a stack: under vmap it has the batch axis alone."""
    body = lambda s: lambda x, w: (jnp.sin(x @ w) * tag(jnp.cos(s), "cos"), None)
    ours = lambda s, x, w: scan(body(s), x, w, policy=policy({"cos": "save"}))[0].sum()
    reference = lambda s, x, w: lax.scan(body(s), x, w)[0].sum()
    args = normal(0, (3,)), normal(1, (3, 4)), normal(2, (5, 4, 4))
    assert_close(*run_each([jax.vmap(jax.grad(f, (0, 1, 2)), (0, 0, None)) for f in (ours, reference)], *args))


# ---- from JAX's tests of lax.scan ----

C, AS = normal(0, (4,)), normal(1, (N, 3))
offloading = functools.partial(scan, policy=policy({"h": "offload"}))


def cell(c, a):
    b = tag(jnp.cos(jnp.sum(a) + jnp.sum(c)), "h")
    return jnp.sin(c * b), b


def of_both(f, *args):
    """Return the results of `f`, a function of the scan to use, with ours and with JAX's."""
    return run_each([f(offloading), f(lambda step, *args, **how: lax.scan(in_a_loop(step, "h"), *args, **how))], *args)


@pytest.mark.parametrize(
    "call",
    [
        lambda scan: scan(42, 0, 1),
        lambda scan: scan(lambda c, x: np.float32(0.0), 0, jnp.arange(5.0)),
        lambda scan: scan(lambda c, x: ((0, 0, 0), x), (1, (2, 3)), jnp.arange(5.0)),
        lambda scan: scan(lambda x, _: ({"a": x["a"], "b": x["a"]}, None), {"a": 1}, length=1),
        lambda scan: scan(lambda x, _: (x.astype("float32"), None), jnp.int32(0), length=1),
        lambda scan: scan(lambda x, _: ((x[0] * 1.0, x[1].reshape(1, 1) * 1.0, x[2]), None), (0, 0, 0), length=1),
        lambda scan: scan(lambda *args: args, 0, jnp.arange(10), length=5),
        lambda scan: scan(lambda c, x: (c, None), 0, (jnp.ones(2), jnp.ones(3))),
        lambda scan: scan(lambda *args: args, 0),
        lambda scan: jax.jit(lambda n, x: scan(lambda *args: args, x, (), n))(3, 1.0),
        lambda scan: jax.jit(lambda n, x: scan(lambda *args: args, x, (), 10, unroll=n))(3, 1.0),
        lambda scan: scan(lambda x, _: (x, x), 0, jnp.arange(5), unroll=-1),
    ],
)
def test_errors_are_those_of_lax_scan(call):
    with pytest.raises((TypeError, ValueError)) as want:
        call(lax.scan)
    with pytest.raises(type(want.value)) as got:
        call(offloading)
    assert str(got.value) == str(want.value)


def test_numpy_arrays():
    for f in (functools.partial(offloading, cell), gradient(functools.partial(offloading, cell), (0, 1))):
        got = jax.tree.leaves(f(*(np.asarray(a, np.float64) for a in (C, AS))))
        assert all(isinstance(x, jax.Array) for x in got)
        assert_same_bits([*map(np.asarray, got)], [np.asarray(x) for x in jax.tree.leaves(f(C, AS))])


def test_vmap_reaches_the_carry_layer_by_layer_and_nothing_else():
    """The carry shifts by one place per layer, and only its last component starts batched."""
    step = lambda c, _: ((*c[1:], 0.0), None)
    shifted = jax.vmap(lambda last: offloading(step, (0.0, 1.0, 2.0, last), jnp.zeros(2))[0])
    assert [x.tolist() for x in shifted(jnp.array([3.0, 4.0, 5.0]))] == [
        [2.0] * 3,
        [3.0, 4.0, 5.0],
        [0.0] * 3,
        [0.0] * 3,
    ]
    step = lambda c, x: ((jnp.sin(c[0]), tag(c[0] * c[1], "h") * c[1] * x), c[0])
    f = lambda scan: jax.vmap(lambda c: scan(step, (0.5, c), AS[:, 0]), out_axes=((None, 0), None))
    assert_same_bits(*of_both(f, C))
    assert_close(*of_both(lambda scan: gradient(f(scan)), C))


def test_collectives_under_vmap():
    step = lambda c, x: (c, tag(lax.psum(c, "i"), "h") * x * c)
    f = lambda scan: jax.vmap(functools.partial(scan, step), axis_name="i")
    assert_close(*of_both(lambda scan: gradient(f(scan), (0, 1)), C[:2], AS[:2]))


def test_a_body_is_traced_once_and_again_for_another_axis_size():
    traced = []

    def f(c, a):
        traced.append(1)
        return cell(c, a)

    for _ in range(3):
        offloading(f, C, AS)
        jax.grad(lambda c: total(offloading(f, c, AS)))(C)
    assert len(traced) == 1
    f = lambda x: offloading(lambda c, _: (tag(c * 1.5, "h") * c * lax.axis_size("i"), None), x, length=1)[0]
    for size in (2, 3):
        for g in (f, jax.grad(f)):
            assert jax.vmap(g, axis_name="i", axis_size=size)(jnp.full(size, 2.0)).tolist() == [6.0 * size] * size


def test_jaxprs_pass_the_checks_and_a_closed_over_matrix_is_not_stacked():
    with jax.enable_checks(True):
        f = gradient(lambda *args: jax.vmap(functools.partial(offloading, cell), (0, None))(*args), (0, 1))
        assert count(jax.make_jaxpr(f)(C[None], AS), "jaxoffload_backward") == 1
    f = lambda a: offloading(lambda x, _: (tag(a @ x, "h"), None), jnp.ones(3), jnp.arange(10))[0]
    text = jax.jit(gradient(f)).lower(jnp.eye(3)).as_text()
    assert "tensor<3x3xf32>" in text and "10x3x3" not in text


def test_of_a_platform_dependent_body_only_the_platforms_branch_is_lowered():
    branches = {"cpu": lambda c: jnp.sin(tag(c, "h")), "tpu": jnp.tanh}
    step = lambda c, x: (lax.platform_dependent(c, **branches) * x, None)
    f = lambda scan: gradient(functools.partial(scan, step), (0, 1))
    text = jax.jit(f(offloading)).lower(0.5, AS[:, 0]).as_text()
    assert "stablehlo.cosine" in text and "tanh" not in text
    assert_same_bits(*of_both(f, jnp.float32(0.5), AS[:, 0]))
