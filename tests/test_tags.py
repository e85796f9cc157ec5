"""tag and scope: names leaf by leaf, scopes as part of every trace cache's key."""

import jax
import jax.numpy as jnp
import pytest
from common import equations, normal

from jaxoffload import scope, tag


def names(f, *args):
    return [e.params["name"] for e in equations(jax.make_jaxpr(f)(*args)) if e.primitive.name == "name"]


def test_one_array_has_the_name_and_its_value():
    x = normal(0, (3,))
    assert names(lambda x: tag(x, "fc1"), x) == ["fc1"]
    assert (tag(x, "fc1") == x).all()


def test_leaves_of_a_composite_have_their_field():
    from typing import NamedTuple

    class Pair(NamedTuple):
        data: jax.Array
        sizes: jax.Array | None

    x = jnp.ones(2)
    tree = {"gate": x, "deep": (x, Pair(x, None))}
    assert sorted(names(lambda t: tag(t, "fc1"), tree)) == ["fc1.deep.0", "fc1.deep.1.data", "fc1.gate"]
    assert jax.tree.structure(tag(tree, "fc1")) == jax.tree.structure(tree)


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


@pytest.mark.parametrize("function", [lambda name: tag(1.0, name), lambda name: scope(name).__enter__()])
@pytest.mark.parametrize("name", ["", "a b", "fc*", "/fc1", "fc1/", "a//b", "fc1#keep", "!fc1", None, 3])
def test_what_is_no_name_is_refused(function, name):
    with pytest.raises(ValueError, match="is not a name; allowed are letters") as error:
        function(name)
    assert repr(name) in str(error.value)
