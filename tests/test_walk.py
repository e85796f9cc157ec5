"""The walk over jaxprs: which equations it meets, how often each runs, on how many devices, and what is around it."""

import jax
import jax.numpy as jnp
import pytest
from common import auto_mesh

from jaxoffload._engine.jaxprs.walk import bodies, map_bodies, nested, walk


@jax.custom_jvp
def rule(x):
    return jnp.sin(x)


rule.defjvp(lambda primals, tangents: (rule(*primals), tangents[0]))


def loops(x):
    def outer(x, _):
        inner = lambda x, _: (jnp.cos(x), None)
        return jax.lax.scan(inner, jnp.exp(x), None, length=3)[0], None

    return jax.lax.cond(x[0] > 0, rule, jnp.tanh, jax.lax.scan(outer, x, None, length=5)[0])


def met(f, *how):
    jaxpr = jax.make_jaxpr(f)(jnp.ones(4))
    return {site.eqn.primitive.name: site for site in walk(jaxpr, *how)}


def test_an_equation_runs_as_often_as_all_scans_around_it():
    assert {name: met(loops)[name].runs for name in ("exp", "cos", "tanh", "scan")} == {
        "exp": 5,
        "cos": 15,
        "tanh": 1,
        "scan": 5,
    }


def test_what_is_around_an_equation_is_told_outermost_first():
    assert [eqn.primitive.name for eqn in met(loops)["cos"].enclosing] == ["scan", "scan"]
    assert "cond" in [eqn.primitive.name for eqn in met(loops)["tanh"].enclosing]


@pytest.mark.parametrize(("enter", "seen"), [(nested, True), (bodies, False)])
def test_only_the_whole_walk_enters_what_a_custom_rule_replaces(enter, seen):
    assert ("sin" in met(loops, enter)) == seen
    assert "tanh" in met(loops, enter)


def test_a_walk_that_enters_nothing_stays_outside():
    assert "exp" not in met(loops, lambda _: ())


def test_devices_are_those_of_all_shard_maps_around_an_equation():
    mesh = auto_mesh(a=2, b=2)
    inner = jax.shard_map(jnp.sin, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"), axis_names={"a"})
    both = jax.shard_map(jnp.cos, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    found = met(lambda x: inner(x) + both(x))
    assert (found["sin"].devices, found["cos"].devices, found["add"].devices) == (2, 4, 1)


def test_an_unchanged_body_leaves_its_equation_itself():
    (eqn,) = jax.make_jaxpr(jax.jit(jnp.sin))(1.0).eqns
    assert map_bodies(eqn, lambda _, body: body) is eqn
    changed = map_bodies(eqn, lambda place, body: body.replace(eqns=[*body.eqns]))
    assert changed is not eqn and bodies(changed)[0] is not bodies(eqn)[0]
