"""Branches, checkpoints around checkpoints, and the table: a value is where the policy says, and the table says so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import count, gradient, in_a_loop, kept_bytes, kept_values, place
from common import assert_close, assert_same_bits, auto_mesh, normal, on_cpu_and_gpu, policy, run_each
from jax import lax

from jaxoffload import chain, checkpoint, residuals, scan, tag

N, BATCH, DIM = 3, 2, 8
X, W = normal(0, (BATCH, DIM)), 0.3 * normal(1, (N, DIM, DIM))
ONE = BATCH * DIM * 4  # bytes of a float32 (BATCH, DIM)


def states(table):
    """Return name -> its states, with the layers of each."""
    return {
        name: {(r.state, r.layers) for r in table if r.names == (name,) and r.kind != "padding"}
        for name in {r.names[0] for r in table if r.names}
    }


# ------------------------------------------------------------------------------------------------- one slot, two names


def two_branches(x, w, keep=False):
    """Each branch has one residual of the same type: partial evaluation would give both the same output of the
    `cond`."""
    u, v = lambda: jnp.sin(tag(x @ w, "u", keep=keep)), lambda: jnp.cos(tag(x @ w, "v"))
    return lax.cond(x.sum() > 0, u, v), None


def in_scan(body, rules, **fields):
    return lambda x, w: scan(body, x, w, policy=policy(rules, **{"resident_layers": 0, **fields}))[0]


def in_chain(body, rules, **fields):
    layers = [lambda x, w: body(x, w)[0]] * N
    return lambda x, w: chain(layers, x, list(w), policy=policy(rules, **{"resident_layers": 0, **fields}))


def in_checkpoint(body, rules, **fields):
    return lambda x, w: lax.scan(checkpoint(body, policy=policy(rules, **fields)), x, w)[0]


EACH = pytest.mark.parametrize("under", [in_scan, in_chain, in_checkpoint])


@EACH
@pytest.mark.parametrize(
    ("rules", "keep", "where"),
    [
        ({"u": "offload", "v": "save"}, False, {"u": "offloaded", "v": "saved"}),
        ({"u": "offload", "v": "offload"}, True, {"u": "saved", "v": "offloaded"}),
    ],
)
def test_in_two_branches_one_value_goes_to_the_host_and_one_stays(under, rules, keep, where):
    f = under(lambda x, w: two_branches(x, w, keep), rules)
    table = residuals(f, X, W)
    assert {name: {s for s, _ in found} for name, found in states(table).items()} == {
        name: {state} for name, state in where.items()
    }
    assert all(r.bytes == N * ONE for r in table if r.names and r.layers == N)
    assert (table.device_bytes, table.host_bytes) == kept_bytes(f, X, W)
    assert table.host_bytes == (N + (under is in_scan)) * ONE  # a scan's stack has a padding row


@EACH
def test_two_branches_that_agree_share_one_place_and_the_table_names_both(under):
    for decision, state in (("offload", "offloaded"), ("save", "saved")):
        f = under(two_branches, {"u": decision, "v": decision})
        table = residuals(f, X, W)
        assert (table.device_bytes, table.host_bytes) == kept_bytes(f, X, W)
        (first, other) = (r for r in table if r.names and r.kind != "padding" and (r.state == state))
        assert {first.names, other.names} == {("u",), ("v",)}
        assert (first.layers, first.bytes) == (N, N * ONE)
        assert (other.layers, other.bytes) == (0, 0)
        assert f"in the place of {first.names[0]}" in other.reason
        assert (first.kind, other.kind) == ("value", "shared")


@pytest.mark.parametrize("under", [in_scan, in_chain])
@on_cpu_and_gpu
def test_the_host_holds_the_values_of_the_branch_that_was_taken(under, device):
    """Judged by the contents of the arrays, not by their types."""
    f = under(lambda x, w: two_branches(x, w, keep=True), {"v": "offload"})
    named = {"u": [], "v": []}
    x = X
    for w in W:
        taken = x.sum() > 0
        named["u" if taken else "v"].append(np.asarray(x @ w))
        x = two_branches(x, w)[0]
    assert named["u"] and named["v"]
    _, vjp = jax.vjp(f, X, W)
    found = {"host": [], "device": []}
    for leaf in jax.tree.leaves(vjp):
        rows = np.asarray(jax.device_put(leaf, jax.memory.Space.Device)).reshape(-1, *leaf.shape[-2:])
        found[place(jax.typeof(leaf))] += list(rows) if leaf.shape[-2:] == X.shape else []
    holds = lambda where, value: any(np.allclose(value, row, atol=1e-2) for row in found[where])
    assert all(holds("host", v) and not holds("device", v) for v in named["v"])
    assert all(holds("device", u) and not holds("host", u) for u in named["u"])


@on_cpu_and_gpu
def test_gradients_through_branches_are_the_references(device):
    for rules in ({"u": "offload", "v": "save"}, {"u": "offload"}):
        ours = gradient(lambda x, w: scan(two_branches, x, w, policy=policy(rules))[0], (0, 1))
        reference = gradient(lambda x, w: lax.scan(in_a_loop(two_branches, *rules), x, w)[0], (0, 1))
        assert_same_bits(*run_each([ours, reference], X, W))


def test_vmap_and_shard_map_of_branches():
    f = in_scan(two_branches, {"u": "offload", "v": "save"})
    mesh = auto_mesh(d=2)
    sharded = jax.shard_map(f, mesh=mesh, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P("d"))
    assert {place(aval) for aval in kept_values(sharded, X, W)} == {"host", "device"}
    grad = jax.grad(lambda x, w: f(x, w).sum())
    xs = jnp.stack([X, -X])
    mapped, alone = jax.jit(jax.vmap(grad, (0, None)))(xs, W), [jax.jit(grad)(x, W) for x in xs]
    assert_close(mapped, jnp.stack(alone))


def in_a_branch(under, rules):
    f = under(lambda x, w: (jnp.sin(tag(x @ w, "u")), None), rules)
    return lambda p, x: lax.cond(p, lambda x: f(x, W), lambda x: jnp.cos(x), x)


def around_branches(rules):
    branches = lambda p, x: lax.cond(p, lambda: jnp.sin(tag(x @ W[0], "u")), lambda: jnp.cos(x))
    return checkpoint(branches, policy=policy(rules))


BATCHED = {
    **{under.__name__: functools.partial(in_a_branch, under) for under in (in_scan, in_chain, in_checkpoint)},
    "around it": around_branches,
}


@pytest.mark.parametrize("make", BATCHED.values(), ids=BATCHED.keys())
def test_a_batched_predicate_around_what_offloads_is_refused_in_one_message(make):
    """JAX would select among the residuals of all branches. What the message advises works."""
    ps, xs = jnp.array([True, False]), jnp.stack([X, -X])
    one = lambda rules: gradient(make(rules), 1)
    with pytest.raises(NotImplementedError, match=r"scan, chain or checkpoint offloads .* mark it save or recompute"):
        jax.eval_shape(jax.vmap(one({"u": "offload"})), ps, xs)
    each = jnp.stack([jax.jit(one({"u": "offload"}))(p, x) for p, x in zip(ps, xs, strict=True)])
    mapped = jax.jit(lambda ps, xs: lax.map(lambda args: one({"u": "offload"})(*args), (ps, xs)))(ps, xs)
    assert_close(mapped, each)
    assert_close(jax.jit(jax.vmap(one({"u": "save"})))(ps, xs), each)


# ------------------------------------------------------------------------------------------------- what is rerun


def layer(x, w):
    x = tag(x, "layer_input")
    return jnp.sin(tag(x @ w, "u")) @ w, None


RULES = {"layer_input": "offload", "u": "save"}


NOT_SHOWN = "what is kept only while the backward pass runs that again is not shown"


@EACH
def test_what_is_kept_while_another_checkpoint_is_rerun_is_not_in_the_table_which_says_so(under):
    f = under(layer, RULES)
    again = jax.checkpoint(f)
    table = residuals(again, X, W)
    assert (table.device_bytes, table.host_bytes) == kept_bytes(again, X, W) == (0, 0)
    assert not [r for r in table if r.names] and NOT_SHOWN in table.notes[-1]
    assert NOT_SHOWN not in str(residuals(f, X, W)) and residuals(f, X, W).host_bytes == kept_bytes(f, X, W)[1] > 0


def test_inside_a_plan_of_ours():
    """The inner scan follows its own policy while the outer checkpoint, or the outer scan's layer, is rerun."""
    inner = in_scan(layer, RULES)
    out = lambda x, w: jnp.sin(tag(inner(x, w), "out"))
    by_checkpoint = checkpoint(out, policy=policy({"out": "offload"}))
    outer = policy({"out": "offload"})
    stacked = lambda f: lambda x, w: scan(lambda x, _: (f(x, w), None), x, None, 2, policy=outer)[0]
    for g, layers in ((by_checkpoint, 1), (stacked(out), 2), (stacked(jax.jit(out)), 2)):
        table = residuals(g, X, W)
        assert sum(r.layers for r in table if r.names == ("out",)) == layers
        assert (table.device_bytes, table.host_bytes) == kept_bytes(g, X, W)
        assert NOT_SHOWN in table.notes[-1]


def test_another_checkpoint_does_not_rerun_what_only_an_unread_scan_reads():
    """A matmul before the layers, and theirs in a loop: both run once."""
    layer = lambda x, w: (jnp.sin(tag(x @ w, "fc1")), None)
    unread = lambda x, w: scan(layer, x @ x.T, w, policy=policy({"fc1": "offload"}))[0]
    loss = jax.checkpoint(lambda x, w: (jnp.sum(jnp.sin(x)), unread(x, w)))
    jaxpr = jax.make_jaxpr(jax.grad(loss, has_aux=True))(W[0], W)
    assert count(jaxpr, "dot_general") == 2
