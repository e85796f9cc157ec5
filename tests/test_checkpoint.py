"""checkpoint(): jax.checkpoint's behaviour under every transformation, with our residuals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import count, gradient, gradient_jaxpr, kept, saving
from common import assert_close, assert_same_bits, auto_mesh, normal, policy, run_each
from jax import lax

from jaxoffload import chain, checkpoint, residuals, scan, tag

P = jax.P
X, W = normal(0, (8, 4)), normal(1, (4, 4)) * 0.5
HOST = ("host", "float32", (8, 4))
OFF = policy({"fc1": "offload"})


def layer(x, w):
    h = tag(jnp.sin(x @ w), "fc1")
    return jnp.sin(tag(jnp.exp(h), "act")) @ w


def save_fc1(f):
    return jax.checkpoint(f, policy=saving("fc1"))


def shard(f, check_vma, axes):
    mesh = auto_mesh(a=4, b=2)
    return jax.shard_map(f, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), check_vma=check_vma, axis_names=axes)


ALL_AXES, ONE_AXIS = {"a", "b"}, {"a"}
MANY = normal(3, (3, 8, 4))
VMAPPED = (("host", "float32", (3, 8, 4)),)

# name -> (what to do with a checkpoint, a function from a function; its arguments; what goes to the host)
TRANSFORMATIONS = {
    "plain": (lambda under: under(layer), (X, W), (HOST,)),
    "jit inside": (lambda under: under(jax.jit(layer)), (X, W), (HOST,)),
    "vmap over x": (lambda under: jax.vmap(under(layer), (0, None)), (MANY, W), VMAPPED),
    "nested vmap": (
        lambda under: jax.vmap(jax.vmap(under(layer), (0, None)), (None, 0)),
        (MANY, jnp.stack([W, W + 1])),
        (("host", "float32", (3, 8, 2, 4)),),  # as the batched matmul lays it out
    ),
    "shard_map": (lambda under: shard(under(layer), True, ALL_AXES), (X, W), (HOST,)),
    "shard_map unchecked": (
        lambda under: shard(under(layer), False, ALL_AXES),
        (X, W),
        (("host", "float32", (16, 4)),),  # with check_vma=False, JAX assumes that a residual also differs along b
    ),
    "shard_map over one axis": (lambda under: jax.jit(shard(under(layer), True, ONE_AXIS)), (X, W), (HOST,)),
    "in lax.scan": (
        lambda under: lambda x, w: lax.scan(lambda x, _: (under(layer)(x, w), None), x, length=3)[0],
        (X, W),
        VMAPPED,
    ),
    "in checkpoint": (lambda under: under(lambda x, w: jnp.cos(under(layer)(x, w))), (X, W), (HOST,)),
    "in jax.checkpoint": (lambda under: jax.checkpoint(lambda x, w: jnp.cos(under(layer)(x, w))), (X, W), ()),
}


@pytest.mark.claim("other-ways")
@pytest.mark.parametrize("transformed, args, on_host", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_under_every_transformation(transformed, args, on_host):
    ours, reference = transformed(functools.partial(checkpoint, policy=OFF)), transformed(save_fc1)
    assert_same_bits(*run_each([gradient(ours, (0, 1)), gradient(reference, (0, 1))], *args))
    assert [k for k in kept(ours, *args).elements() if k[0] == "host"] == list(on_host)


def test_pytrees_keyword_and_static_arguments():
    @functools.partial(checkpoint, policy=OFF, static_argnums=(1, -1))
    def f(inputs, how, scale, last):
        assert how == {"not": "hashable"} and last == "static"
        h = tag(jnp.sin(inputs["x"] @ inputs["w"][0]), "fc1")
        return {"out": jnp.exp(h) * scale, "none": None, "pair": (h, 3)}

    inputs = {"x": X, "w": (W, None)}
    out = f(inputs, {"not": "hashable"}, 2.0, "static")
    assert jax.tree.structure(out) == jax.tree.structure({"out": 0, "none": None, "pair": (0, 0)})
    np.testing.assert_array_equal(out["out"], jnp.exp(jnp.sin(X @ W)) * 2.0)
    g = checkpoint(lambda x, *, w, flag: tag(jnp.sin(x @ w), "fc1") * flag, policy=OFF)
    grad = jax.grad(lambda x: g(x, w=W, flag=2.0).sum())(X)
    np.testing.assert_array_equal(grad, jax.grad(lambda x: (jnp.sin(x @ W) * 2.0).sum())(X))


@pytest.mark.parametrize("static", [5, (0, -5)])
def test_static_argnums_out_of_range_are_refused(static):
    with pytest.raises(ValueError, match=r"checkpoint: static_argnums \[-?5\] must be in \[-2, 2\)"):
        checkpoint(layer, policy=OFF, static_argnums=static)(X, W)


def test_closed_over_tracers_get_their_gradients():
    def f(x, w):
        return checkpoint(lambda x: layer(x, w), policy=OFF)(x)

    jitted = lambda x, w: jax.jit(lambda x: checkpoint(lambda x: layer(x, w), policy=OFF)(x))(x)
    got, in_jit, want = run_each([gradient(g, (0, 1)) for g in (f, jitted, save_fc1(layer))], X, W)
    assert_same_bits(got, want)
    assert_same_bits(in_jit, want)


@pytest.mark.claim("saved-exp")
@pytest.mark.parametrize("producer", [jnp.exp, jax.nn.sigmoid, lax.rsqrt])
def test_a_kept_output_that_its_own_derivative_reads_is_not_recomputed(producer):
    f = lambda x: jnp.sin(tag(producer(jnp.abs(x) + 1.0), "out"))
    primitive = jax.make_jaxpr(producer)(X).eqns[-1].primitive.name
    for decision in ("save", "offload"):
        jaxpr = gradient_jaxpr(checkpoint(f, policy=policy({"out": decision})), X)
        assert count(jaxpr, primitive) == 1
    plain = jax.checkpoint(f, policy=saving("out"))
    assert count(gradient_jaxpr(plain, X), primitive) == 2  # this is why the library names a value where it is defined


def test_an_eager_call_and_forward_mode():
    f = checkpoint(layer, policy=OFF)
    np.testing.assert_array_equal(f(X, W), layer(X, W))
    tangents = (jnp.ones_like(X), jnp.ones_like(W))
    plain = jax.checkpoint(layer)
    assert_same_bits(*run_each([lambda g=g: jax.jvp(g, (X, W), tangents) for g in (f, plain)]))


def test_second_derivatives_of_what_is_offloaded():
    f = lambda x: jnp.exp(tag(jnp.sin(x @ W), "fc1")).sum()
    ours = checkpoint(f, policy=OFF)
    assert kept(ours, X)[HOST] == 1
    forward_over_reverse = lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.ones_like(x),))[1]
    reverse_over_reverse = lambda f: jax.jacrev(jax.jacrev(f))
    for twice in (forward_over_reverse, reverse_over_reverse):
        for jit in (jax.jit, lambda f: f):
            assert_close(jit(twice(ours))(X), jit(twice(f))(X))


@pytest.mark.parametrize("prevent_cse", [(True, False), [True], None])
def test_prevent_cse_is_one_boolean(prevent_cse):
    with pytest.raises(TypeError, match="checkpoint: prevent_cse must be True or False"):
        checkpoint(layer, policy=OFF, prevent_cse=prevent_cse)


def test_an_eager_loop_traces_once_a_function():
    traced = []

    def f(x, w):
        traced.append(0)
        return layer(x, w)

    g = checkpoint(f, policy=OFF)
    jax.make_jaxpr(gradient(lambda x, w: g(g(g(x, w), w), w)))(X, W)
    assert len(traced) == 1


INNER = {
    "checkpoint": lambda f: checkpoint(f, policy=policy(), strict=False),
    "chain": lambda f: lambda x: chain([lambda x, _: f(x)], x, [None], policy=policy(), strict=False),
    "scan": lambda f: lambda x: scan(lambda _, x: (None, f(x)), None, x[None], policy=policy(), strict=False)[1][0],
}


@pytest.mark.parametrize(
    "outer", [functools.partial(checkpoint, policy=policy({"fc1": "recompute"})), save_fc1], ids=["ours", "jax's"]
)
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_names_in_what_is_not_differentiated_are_those_of_the_checkpoint_around_it(inner, outer):
    """This matters most for routing: it is saved, whether or not a derivative passes through what computes it."""

    def f(x, w):
        ids = inner(lambda scores: tag(lax.top_k(scores, 2)[1], "fc1"))(lax.stop_gradient(x @ w))
        return jnp.take_along_axis(jnp.sin(x), ids, 1)

    ((place, dtype, _),) = kept(outer(f), X, W).elements()
    assert (place, dtype) == ("device", "int32") and count(gradient_jaxpr(outer(f), X, W), "top_k") == 1
    assert_same_bits(*run_each([gradient(outer(f)), gradient(jax.checkpoint(f))], X, W))


def test_functions_that_differ_have_rows_of_their_own():
    """Equal policy and names, other sizes, other decisions: a plan belongs to its function's contents."""

    def f(x, w):
        for rows in (8, 4):
            x = checkpoint(lambda x: jnp.sin(tag(jnp.sin(x @ w), "fc1")), policy=OFF)(x[:rows])
        return checkpoint(lambda x: jnp.sin(tag(jnp.sin(x @ w), "fc1", keep=True)), policy=OFF)(x)

    rows = [(r.shape, r.state, r.layers) for r in residuals(f, X, W) if r.names == ("fc1",)]
    assert sorted(rows) == [((4, 4), "offloaded", 1), ((4, 4), "saved", 1), ((8, 4), "offloaded", 1)]
