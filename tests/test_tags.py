"""tag and scope: names leaf by leaf, scopes as part of every trace cache's key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import equations, kept
from common import normal, policy
from jax.ad_checkpoint import checkpoint_name

from jaxoffload import checkpoint, residuals, scope, tag
from jaxoffload._names import KEEP, Name, read_names


def names(f, *args):
    return [e.params["name"] for e in equations(jax.make_jaxpr(f)(*args)) if e.primitive.name == "name"]


@pytest.mark.claim("tags")
def test_leaves_of_a_composite_have_their_field():
    from typing import NamedTuple

    class Pair(NamedTuple):
        data: jax.Array
        sizes: jax.Array | None

    x = jnp.ones(2)
    tree = {"gate": x, "deep": (x, Pair(x, None))}
    assert sorted(names(lambda t: tag(t, "fc1"), tree)) == ["fc1.deep.0", "fc1.deep.1.data", "fc1.gate"]
    assert jax.tree.structure(tag(tree, "fc1")) == jax.tree.structure(tree)


@pytest.mark.claim("tags")
def test_scopes_nest_and_end():
    def f(x):
        with scope("moe"):
            with scope("shared"):
                x = tag(x, "fc1")
            x = tag({"gate": x}, "act")["gate"]
        return tag(x, "out")

    assert names(f, 1.0) == ["moe/shared/fc1", "moe/act.gate", "out"]


def test_a_scope_ends_when_its_body_raises():
    with pytest.raises(KeyError), scope("moe"):
        raise KeyError
    assert names(lambda x: tag(x, "fc1"), 1.0) == ["fc1"]


def test_one_jitted_function_under_two_scopes_has_two_names():
    inner = jax.jit(lambda x: tag(x, "fc1"))

    def f(x):
        with scope("a"):
            x = inner(x)
        with scope("b"):
            return inner(x)

    assert names(f, 1.0) == ["a/fc1", "b/fc1"]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_custom_vjps_forward_rule_writes_the_whole_name(wrap):
    """Whatever scope is open where the function is differentiated."""

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    def forward(x):
        with scope("moe"):
            return jnp.sin(x), (tag(jnp.cos(x), "inside"), tag(2 * x, "shared/fc1"))

    f.defvjp(forward, lambda kept, ct: (ct * kept[0] * kept[1],))

    def loss(x):
        with scope("outer"):
            return wrap(checkpoint(f, policy=policy(default="offload")))(x).sum()

    assert {r.names for r in residuals(loss, normal(0, (3,)))} == {("moe/inside",), ("moe/shared/fc1",)}


@pytest.mark.parametrize("function", [lambda name: tag(1.0, name), lambda name: scope(name).__enter__()])
@pytest.mark.parametrize("name", ["", "a b", "fc*", "/fc1", "fc1/", "a//b", "fc1#keep", "!fc1", None, 3])
def test_what_is_not_a_name_is_refused(function, name):
    with pytest.raises(ValueError, match="is not a name; allowed are letters") as error:
        function(name)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("tree, bad", [({"a b": 1.0}, "a b"), ({"x#keep": 1.0}, "x#keep"), ({"a/b": 1.0}, "a/b")])
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t]])
def test_a_key_that_no_name_can_have_is_refused(tree, bad, wrap):
    with pytest.raises(ValueError, match=r"tag: 'fc1' has a leaf under the key") as error:
        tag(wrap(tree), "fc1")
    assert repr(bad) in str(error.value)


@pytest.mark.parametrize("leaf", ["hello", object, jnp.sin], ids=["text", "class", "function"])
def test_what_is_not_an_array_is_refused(leaf):
    with pytest.raises(TypeError, match=r"tag: 'mlp/fc1.gate' is .*; it must be an array"), scope("mlp"):
        tag({"gate": leaf}, "fc1")


@pytest.mark.parametrize("keep", [True, np.True_, False, np.False_], ids=repr)
def test_keep_may_be_numpys(keep):
    assert names(lambda x: tag(x, "fc1", keep=keep), 1.0) == ["fc1#keep" if keep else "fc1"]


@pytest.mark.parametrize("keep", [1, 0, None, "yes", np.int64(1), jnp.bool_(True)], ids=lambda x: type(x).__name__)
def test_what_is_neither_true_nor_false_does_not_keep(keep):
    with pytest.raises(TypeError, match=r"tag: keep is .*; it must be True or False"):
        tag(1.0, "fc1", keep=keep)


@pytest.mark.parametrize("text", ["a | b: 50%", "jaxoffload:save:fc1:0123abcd:0", ""])
@pytest.mark.parametrize("keep", [False, True])
def test_foreign_names_of_any_characters_are_names(text, keep):
    assert read_names(text + KEEP * keep) == (Name(text, keep),)
    f = lambda x: jnp.sin(checkpoint_name(jnp.sin(x), text + KEEP * keep))
    for _ in range(2):
        f = checkpoint(f, policy=policy(default="offload"))
        assert kept(f, normal(0, (3,))) == {("device" if keep else "host", "float32", (3,)): 1}
        assert residuals(f, normal(0, (3,))).rows[0].names == (text,)
