"""What is more than arithmetic: callbacks, `jax.new_ref`, checkify, exported programs, `jax_debug_nans`, `disable_jit`.

The reference is `lax.scan` of `jax.checkpoint`, which supports all of these.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import count, equations, gradient, gradient_jaxpr, in_a_loop, kept_bytes, one_by_one, place
from common import assert_close, assert_same_bits, auto_mesh, normal, policy, run, run_each
from jax import export, lax
from jax.experimental import checkify

from jaxoffload import PolicyError, accumulate, chain, check, checkpoint, residuals, scan, tag
from jaxoffload._jax import UNINITIALISED

N, BATCH, DIM = 3, 2, 8
X, W = normal(0, (BATCH, DIM)), 0.3 * normal(1, (N, DIM, DIM))
MASK = jnp.asarray(np.arange(BATCH * DIM).reshape(BATCH, DIM) % 3, jnp.float32)
ONE = BATCH * DIM * 4  # bytes of a float32 (BATCH, DIM)

OFFLOAD = {"policy": policy({"u": "offload"}, resident_layers=0)}


def by_scan(body, **how):
    return lambda x, w: scan(body, x, w, **OFFLOAD | how)[0]


def by_chain(body, **how):
    return lambda x, w: chain([lambda x, w: body(x, w)[0]] * N, x, list(w), **OFFLOAD | how)


def by_checkpoint(body, **how):
    return lambda x, w: lax.scan(checkpoint(body, **OFFLOAD | how), x, w)[0]


def by_jax(body):
    return lambda x, w: lax.scan(in_a_loop(body, "u"), x, w)[0]


EACH = pytest.mark.parametrize("ours", [by_scan, by_chain, by_checkpoint])


def layer(x, w):
    return jnp.sin(tag(x @ w, "u")), None


# --------------------------------------------------------------------------------- inputs that have no derivative


def threshold(mask):
    return np.asarray(mask) > 0.5


def by_callback(mask):
    return jax.pure_callback(threshold, jax.ShapeDtypeStruct(mask.shape, bool), mask)


@jax.custom_jvp
def by_rule(mask):
    return mask > 0.5


@by_rule.defjvp
def _(primals, tangents):
    raise RuntimeError("nobody differentiates a mask")


def by_ffi(mask):
    return jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct(mask.shape, bool))(mask)


def masked(read):
    return lambda x, w: (jnp.where(read(MASK), layer(x, w)[0], x), None)


@EACH
@pytest.mark.parametrize("read", [by_callback, by_rule])
def test_an_input_that_is_not_differentiated_needs_no_derivative(ours, read):
    body = masked(read)
    f = ours(body)
    assert kept_bytes(f, X, W)[1] == (N + (ours is by_scan)) * ONE
    assert_close(*run_each([gradient(g, (0, 1)) for g in (f, by_jax(body))], X, W))
    with pytest.raises(PolicyError, match="'v'"):
        gradient_jaxpr(ours(body, policy=policy({"v": "save"})), X, W)


@EACH
@pytest.mark.parametrize("read", [by_callback, by_rule, by_ffi])
def test_one_that_is_differentiated_fails_as_it_does_in_jax(ours, read):
    """The error is the one that the input without a derivative raises in JAX."""
    body = lambda x, w: (jnp.where(read(x), layer(x, w)[0], x), None)
    said = []
    for f in (by_jax(body), ours(body)):
        with pytest.raises((RuntimeError, ValueError)) as error:
            gradient_jaxpr(f, X, W)
        said.append((type(error.value), str(error.value)))
    assert said[0] == said[1]
    check(ours(body), X, W, policy=OFFLOAD["policy"])  # by its forward pass


@EACH
def test_effects_happen_as_often_as_under_jax_checkpoint(ours):
    seen = []

    def loud(x, w):
        jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0])
        return layer(x, w)

    def heard(f):
        seen.clear()
        run(f, X, W)
        jax.effects_barrier()
        return sorted(seen)

    assert heard(ours(loud)) == heard(by_jax(loud)) and len(seen) == N
    assert heard(gradient(ours(loud))) == heard(gradient(by_jax(loud))) and len(seen) == 2 * N


def accumulating(body, **how):
    return lambda x, w: accumulate(lambda w, x: jnp.sum(by_scan(body, **how)(x, w)))(w, jnp.stack([x, x]))[1]


@pytest.mark.parametrize("ours", [by_scan, by_chain, by_checkpoint, accumulating])
def test_ordered_effects_are_refused_where_something_offloads(ours):
    def loud(x, w):
        jax.debug.print("{}", x[0, 0], ordered=True)
        return layer(x, w)

    def lower(decision):
        f = ours(loud, policy=policy({"u": decision}))
        jax.jit(f if ours is accumulating else gradient(f, 1)).lower(X, W)

    with pytest.raises(NotImplementedError, match=r"ordered effects .*ordered=False"):
        lower("offload")
    lower("save")


# ------------------------------------------------------------------------------------------------- references


def counted(body, counter):
    def counting(x, w):
        counter[...] = counter[...] + 1
        return body(x, w)

    return counting


def with_counter(through, derivative):
    """`through` turns a body into a function. Return its results, and how often the body ran."""

    def f(x, w):
        counter = jax.new_ref(0)
        inside = through(counted(layer, counter))
        out = jax.grad(lambda x, w: jnp.sum(inside(x, w) ** 2), (0, 1))(x, w) if derivative else inside(x, w)
        return out, counter[...]

    return f


@EACH
@pytest.mark.parametrize("derivative", [False, True])
def test_a_reference_that_the_body_closes_over(ours, derivative):
    mine, reference = (with_counter(through, derivative) for through in (ours, by_jax))
    got, wanted = (jax.jit(f)(X, W) for f in (mine, reference))
    assert got[1] == wanted[1] >= N
    assert_close(got[0], wanted[0])


@EACH
def test_beside_a_reference_the_policy_holds(ours):
    """JAX's own checkpoint asks the policy: what it offloads is on the host, and a misspelt name is an error."""
    counter = jax.new_ref(0)
    body = counted(layer, counter)
    jaxpr = gradient_jaxpr(ours(body), X, W)
    assert {place(v.aval) for e in equations(jaxpr) for v in e.outvars if hasattr(v.aval, "dtype")} == {
        "device",
        "host",
    }
    misspelt = ours(body, policy=policy({"uu": "offload"}))
    jax.make_jaxpr(misspelt)(X, W)
    with pytest.raises(PolicyError, match=r"'uu'.*the nearest is 'u'"):
        gradient_jaxpr(misspelt, X, W)
    sorts = lambda x, w: layer(x + jnp.searchsorted(jnp.arange(3.0), x).astype(x.dtype), w)  # a rule of JAX's own
    with pytest.raises(PolicyError, match=r"'uu'.*the nearest is 'u'"):
        gradient_jaxpr(ours(counted(sorts, counter), policy=policy({"uu": "offload"})), X, W)
    assert "a jax.checkpoint has a Policy" in str(residuals(ours(body), X, W))
    check(ours(body), X, W, policy=policy({"u": "offload"}, resident_layers=0))


def with_references(stack, counter, w, x):
    """A loss that writes to a reference of its own, beside and behind its layers, and to one that it closes over."""
    own = jax.new_ref(x * w[0, 0, 0])
    y = stack(layer)(x, w)
    own[...] = own[...] + y
    value = jnp.sum(own[...] ** 2)
    counter[...] = counter[...] + lax.stop_gradient(value)
    return value


@pytest.mark.claim("accumulated-takes")
def test_a_loss_with_references_accumulates():
    def microbatches(run, stack, w):
        counter = jax.new_ref(jnp.float32(0))
        return run(functools.partial(with_references, stack, counter))(w, jnp.stack([X, -X, 2 * X])), counter[...]

    ours, plain = (functools.partial(microbatches, *how) for how in ((accumulate, by_scan), (one_by_one, by_jax)))
    assert count(jax.make_jaxpr(ours)(W), "jaxoffload_interleaved") == 1
    ours, plain = (jax.jit(f)(W) for f in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, plain)


def test_on_stages_a_reference_is_refused():
    mesh, w = auto_mesh(stage=2), jnp.concatenate([W, W[:1]])
    loss = functools.partial(with_references, by_scan, jax.new_ref(jnp.float32(0)))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=r"stages='stage': the loss has a jax\.new_ref"):
        jax.make_jaxpr(accumulate(loss, stages="stage"))(w, jnp.stack([X, X]))


# ------------------------------------------------------------------------------------------------- checkify


def checked(x, w):
    u = tag(x @ w, "u")
    checkify.check(jnp.all(u < 100), "u is {u}, too large", u=u.max())
    return jnp.sin(u), None


def logarithm(x, w):
    return jnp.log(tag(x @ w, "u") + 1), None


def found(f, *args):
    """Return what `checkify` finds, and the results."""
    error, out = jax.jit(checkify.checkify(f, errors=checkify.all_checks))(*args)
    return (error.get() or "").partition(" (")[0], out


def with_gradient(f):
    return lambda x, w: jax.value_and_grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))(x, w)


@EACH
@pytest.mark.parametrize("derivative", [False, True])
def test_checks_in_the_body_are_made(ours, derivative):
    """When differentiated, `jax.checkpoint` drops them, and so does `checkpoint`; `lax.scan` keeps them."""
    how = with_gradient if derivative else lambda f: f
    dropped = derivative and ours is by_checkpoint
    for x in (X, 1e4 * jnp.abs(X)):
        said, out = found(how(ours(checked)), x, jnp.abs(W))
        wanted, reference = found(how(by_jax(checked)), x, jnp.abs(W))
        assert derivative or said == wanted
        assert ("too large" in said) == (x is not X and not dropped)
        assert not (derivative and wanted)
        assert_close(out, reference)


# ------------------------------------------------------------------------------------------------- exported


@EACH
def test_a_step_is_exported(ours):
    pytest.importorskip("flatbuffers")  # with which jax.export writes
    step = jax.jit(lambda x, w: w - 0.1 * gradient(ours(layer), 1)(x, w))
    exported = export.deserialize(export.export(step)(X, W).serialize())
    assert_same_bits([np.asarray(exported.call(X, W))], [np.asarray(step(X, W))])


# ------------------------------------------------------------------------------------------------- debugging


def in_log(*args):
    """Return the primitive in whose result `jax_debug_nans` finds a NaN."""
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        args[0](*args[1:])
    return str(error.value)


def test_debug_nans_finds_in_a_scan_what_it_finds_in_laxs():
    """Even if nothing uses the results."""
    for how in (lambda f: f, jax.jit, gradient, lambda f: jax.jit(gradient(f)), lambda f: lambda *a: jax.vjp(f, *a)[0]):
        for f in (by_jax(logarithm), by_scan(logarithm)):
            assert "(nan) encountered in scan" in in_log(how(f), -9 * X, W)


@EACH
def test_debug_nans_finds_nothing_where_nothing_is(ours):
    with jax.debug_nans(True):
        for f in (gradient(ours(layer), (0, 1)), jax.jit(gradient(ours(layer), (0, 1)))):
            got = jax.tree.leaves(f(X, W))
        jaxpr = gradient_jaxpr(ours(layer), X, W)
    # On a GPU a padding row holds uninitialised memory, and JAX checks it too.
    assert count(jaxpr, UNINITIALISED) == 0
    assert ours is not by_scan or count(gradient_jaxpr(ours(layer), X, W), UNINITIALISED)
    assert_close(got, jax.tree.leaves(gradient(by_jax(layer), (0, 1))(X, W)))


@EACH
def test_without_jit_all_is_computed(ours):
    with jax.disable_jit():
        value, got = ours(layer)(X, W), gradient(ours(layer), (0, 1))(X, W)
        assert_close(value, by_jax(layer)(X, W))
    assert_close(got, gradient(by_jax(layer), (0, 1))(X, W))
