"""verify(): a correct program holds, and each planted fault fails the check that is named for it, and no other."""

import dataclasses
import functools
import importlib
import json
import os
import re
import runpy
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import offloading
from common import ROOT, auto_mesh, finish, free_port, inherited_flags, needs_te, normal, start
from faults import a_host_write_is_skipped, rows_in_wrong_order
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxoffload import Policy, _compiler_options, chain, checkpoint, compiler_options, profile, residuals, scan, tag
from jaxoffload._engine.cost.cost import cost
from jaxoffload._engine.cost.lone_pass import RATES
from jaxoffload._engine.decide import plan as _plan
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._engine.layers import layer as _layer
from jaxoffload._engine.layers import passes as _loops
from jaxoffload._engine.layers import scan_primitive
from jaxoffload._engine.layers.placement import Layout
from jaxoffload._jax import CUDNN_ATTENTION, CUDNN_CONFIG, DEVICE, HOST, causal_window, is_attention, on_host
from jaxoffload._policy import VERDICT
from jaxoffload._text import readable
from jaxoffload._tracing import tracing
from jaxoffload.proof import verify
from jaxoffload.proof._command import main
from jaxoffload.proof._program import exact as _exact
from jaxoffload.proof._program import memory as _memory
from jaxoffload.proof._program.exact import repeatable_options
from jaxoffload.proof._program.target import target_of
from jaxoffload.proof._verify.conservation import conservation
from jaxoffload.proof._verify.gradients import gradients
from jaxoffload.proof._verify.moves import moves, producers
from jaxoffload.proof._verify.placement import placement
from jaxoffload.proof._verify.repeats import repeats
from models.attention import transformer_engine
from models.train import step_for

pytestmark = pytest.mark.usefixtures("compiled_fast")
LAYERS, BATCH, DIM, HIDDEN = 4, 8, 16, 32
RULES = Policy({"fc1": "offload", "act": "save", "norm": "recompute"}, min_offload_bytes=0)


def layer(x, w):
    x = tag(x, "layer_input")
    norm = tag(x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5), "norm")
    fc1 = tag(norm @ w["in"], "fc1")
    top = tag(jnp.argmax(fc1, -1), "routing")
    act = tag(jnp.tanh(fc1) * (1 + top[:, None]).astype(fc1.dtype), "act")
    return x + act @ w["out"]


def weights(*lead):
    shapes = {"in": (DIM, HIDDEN), "out": (HIDDEN, DIM)}
    return {k: 0.1 * normal(0, (*lead, *s)) for k, s in shapes.items()}


def scanned(f, rules=RULES, **how):
    """A loss of layers in a scan of ours."""
    return lambda x, w: jnp.sum(scan(lambda x, w: (f(x, w), None), x, w, policy=rules, **how)[0] ** 2)


def by_jax(f, policy):
    """A loss of layers under JAX's own checkpoint."""
    return lambda x, w: jnp.sum(lax.scan(jax.checkpoint(lambda x, w: (f(x, w), None), policy=policy), x, w)[0] ** 2)


def of_scan(x, w):
    return scanned(layer)(x, w)


def of_chain(x, w):
    each = [jax.tree.map(lambda a, i=i: a[i], w) for i in range(LAYERS)]
    return jnp.sum(chain([layer] * LAYERS, x, each, policy=RULES) ** 2)


def of_checkpoint(x, w):
    return jnp.sum(checkpoint(layer, policy=RULES)(x, jax.tree.map(lambda a: a[0], w)) ** 2)


X, W = normal(1, (BATCH, DIM)), weights(LAYERS)
ON_CPU = {"copies": "not checked", "placement": "not checked"}
ALL = ("gradients", "conservation", "moves", "producers", "copies", "placement", "repeats")


def verdicts(found):
    return {check.claim: check.verdict for check in found}


def one(claim, f, *args):
    """Return what one check says: its verdict, and the detail."""
    return claim(target_of(f, args or (X, W)))


def both(f, *args):
    """Check the gradients, and that bytes are conserved; return the details."""
    found = [one(claim, f, *args) for claim in (gradients, conservation)]
    assert [verdict for verdict, _ in found] == ["holds", "holds"], found
    return [said for _, said in found]


@pytest.mark.claim("verify")
@pytest.mark.parametrize("f", [of_scan, of_chain, of_checkpoint], ids=lambda f: f.__name__)
def test_what_is_right_holds(f):
    found = verify(f, X, W)
    assert found.ok, found
    assert verdicts(found) == dict.fromkeys(ALL, "holds") | ON_CPU, found
    assert str(found).splitlines()[0].startswith("holds        gradients: ")
    with pytest.raises(KeyError, match="'grad' is none of gradients, conservation"):
        found["grad"]


@pytest.mark.claim("verify")
def test_a_step_is_taken_as_it_is():
    def step(x, w, rate, nothing):
        gradients = jax.grad(of_scan, argnums=1)(x, w)
        return jax.tree.map(lambda w, g: w - rate * g, w, gradients), {"norm": jnp.sum(x)}

    found = verify(jax.jit(step, donate_argnums=1), np.asarray(X), W, 0.1, None)
    want = dict.fromkeys(ALL, "holds") | ON_CPU | {"conservation": "not checked"}
    assert verdicts(found) == want, found
    assert "verify its loss" in found["conservation"].detail


def test_abstract_arguments_are_filled():
    with_tokens = lambda x, w, tokens: of_scan(x, w) + jnp.sum(tokens)
    args = jax.eval_shape(lambda: (X, W, jnp.zeros(3, jnp.int32)))
    assert one(gradients, with_tokens, *args) == ("holds", "4 results are the reference's, bit for bit")


def test_a_function_that_is_not_differentiated_is_not_checked():
    for claim in (gradients, conservation):  # it only runs forward
        verdict, said = one(claim, lambda x, w: (of_scan(x, w), x))
        assert verdict == "not checked" and "give a loss, which returns one floating-point scalar" in said


def test_bad_arguments_are_messages():
    step, args, *_ = step_for(str(ROOT / "configs/tiny.yaml"), "mesh.fsdp=4")
    with pytest.raises(NotImplementedError, match=r"a mesh of 4 devices \(.*'fsdp': 4.*\) that are not here \(8 are\)"):
        verify(step, *args)
    like_a_loss = lambda x, w: jnp.sum(jax.grad(of_scan)(x, w))
    with pytest.raises(NotImplementedError, match=r"verify: .*one floating-point scalar.* return the"):
        verify(like_a_loss, X, W)
    with pytest.raises(NotImplementedError, match=r"residuals: .*differentiates what is in it.* give"):
        residuals(like_a_loss, X, W)


# --- what is right


def test_layers_without_a_policy_have_no_reference():
    verdict, said = one(gradients, lambda x, w: jnp.sum(layer(x, w) ** 2), X, weights())
    assert verdict == "not checked"
    assert "has no reference; give a loss" in said


def test_a_policy_of_jaxs_own_checkpoint_has_a_reference():
    loss = by_jax(layer, Policy({"fc1": "offload", "routing": "save"}, min_offload_bytes=0))
    both(loss)
    assert (one(moves, loss)[0], one(producers, loss)[0]) == ("holds", "not checked")


def tower(names, **fields):
    """A loss of layers of these names, one after another."""

    def named(x, w):
        for name in names:
            x = jnp.sin(tag(x @ (w["in"] @ w["out"]), name))
        return x

    return scanned(named, Policy(names, min_offload_bytes=0, **fields))


def of_dropout(x, w):
    def dropped(x, w):
        key = tag(jax.random.fold_in(jax.random.key(0), jnp.argmax(x)), "key")
        return layer(x, w) * jax.random.bernoulli(key, 0.9, x.shape)

    return scanned(dropped)(x, w)


OTHERS = dataclasses.replace(RULES, offload_layers=1, other_layers="recompute", resident_layers=2)
RIGHT = {
    "words of the table as names": tower({"other_layers": "recompute", "argument": "offload"}, resident_layers=0),
    "layers that do not offload": scanned(layer, OTHERS),
    "a loop for each of two layers": tower({"a": "offload"}, offload_layers=0.25),  # which XLA unrolls
    "a key": of_dropout,
    "reverse": scanned(layer, reverse=True, unroll=2),
}


@pytest.mark.parametrize("f", RIGHT.values(), ids=RIGHT)
def test_what_else_is_right_holds(f):
    both(f)
    assert one(moves, f)[0] == one(producers, f)[0] == "holds"


def test_an_argument_that_is_offloaded_stays_with_the_caller():
    policy = Policy({"layer_input": "offload", "fc1": "offload"}, min_offload_bytes=0)
    both(lambda x, w: jnp.sum(checkpoint(layer, policy=policy)(x, w) ** 2), X, weights())


@pytest.mark.parametrize("blocks", [False, True])
def test_what_an_outer_policy_keeps_of_a_scan_is_judged(blocks):
    run = lambda x, w: scan(lambda x, w: (layer(x, w), None), x, w, policy=RULES)[0]
    f = scanned(run) if blocks else lambda x, w: jnp.sum(checkpoint(run, policy=RULES)(x, w) ** 2)
    args = X, (jax.tree.map(lambda a: jnp.stack([a, a]), W) if blocks else W)
    assert one(moves, f, *args)[0] == one(producers, f, *args)[0] == one(gradients, f, *args)[0] == "holds"
    verdict, said = one(conservation, f, *args)
    assert verdict == ("holds" if blocks else "not checked")
    # Of a block the reference recomputes the inputs, of a scan in a checkpoint it does not.
    assert ("keeps the carry of a scan in it" in said) != blocks


# --- what is not checked


def test_nested_plans_are_not_judged_by_bytes():
    inner = lambda x, w: scan(lambda x, w: (layer(x, w), None), jnp.cos(tag(x, "outer")), w, policy=RULES)[0]
    f = scanned(inner, Policy({"outer": "save"}, min_offload_bytes=0), strict=False)
    args = X, jax.tree.map(lambda a: jnp.stack([a, a]), W)
    verdict, said = one(conservation, f, *args)
    assert verdict == "not checked" and "plans are nested" in said and one(gradients, f, *args)[0] == "holds"


@pytest.mark.parametrize("by, said", [(jnp.nan, "is not finite"), (0.0, "all gradients are zero")])
def test_results_that_say_nothing_are_not_checked(by, said):
    verdict, detail = one(gradients, lambda x, w: of_scan(x, w) * by)
    assert verdict == "not checked" and said in detail


def test_results_that_do_not_depend_on_the_layers_are_not_evidence():
    nothing = lambda x, w: {"g": jax.grad(of_scan)(0 * x, jax.tree.map(jnp.zeros_like, w)), "w": w, "step": 0}
    verdict, said = one(gradients, nothing)
    assert verdict == "not checked" and "they are zero, or are arguments" in said
    partly = lambda x, w, b: of_scan(0 * x, jax.tree.map(jnp.zeros_like, w)) + jnp.sum(b**2)
    verdict, said = one(gradients, partly, X, W, jnp.ones(3))
    assert verdict == "holds" and said.endswith(
        "; of them zero: the gradient of args[0], args[1]['in'], args[1]['out']"
    )


def test_a_reference_that_does_not_fit_is_not_checked(monkeypatch):
    monkeypatch.setattr(_memory, "device_bytes", lambda: 10)
    verdict, said = one(gradients, of_scan)
    assert verdict == "not checked" and "of a device's 10 B; give it fewer layers" in said
    assert one(repeats, of_scan)[0] == "not checked"


def test_what_was_differentiated_before_has_no_reference():
    jaxpr = jax.make_jaxpr(jax.grad(of_scan, argnums=1))(X, W)
    verdict, said = one(gradients, lambda x, w: jaxpr_as_fun(jaxpr)(x, *jax.tree.leaves(w)))
    assert verdict == "not checked" and "was differentiated before" in said


@pytest.mark.parametrize("again, verdict", [(True, "holds"), (False, "fails")])
def test_runs_that_differ_as_users_compile_them_must_be_equal_where_that_is_asked_for(again, verdict):
    """As of a kernel that adds in the order in which its threads come."""
    runs = iter(range(9))
    target = target_of(lambda x: {"y": x}, (X,))
    changing = lambda x: {"y": np.float32(next(runs))}
    fast = lambda x: jax.tree.map(jnp.asarray, changing(x))
    program = (lambda x: {"y": x}) if again else fast
    target.programs.update({(compiler_options, False): fast, (repeatable_options, False): program})
    found, said = repeats(target)
    assert found == verdict and "run 2 differs from the first" in said
    assert ("4 runs are equal if compiled to be deterministic, not as compiled for speed" in said) == again


# --- what goes to the host


def there_and_back(x):
    """The identity, by way of the host."""
    moved = jax.custom_vjp(lambda x: jax.device_put(jax.device_put(x, HOST), DEVICE) * 1)
    moved.defvjp(lambda x: (moved(x), None), lambda _, ct: (ct,))
    return moved(x)


def named_weight(x, w):
    return layer(x, w | {"in": checkpoint_name(w["in"], "w_in")})


PINNED = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
UNTOLD, OF_X = (f"an input float32<host>[{shape}], which has no name" for shape in ("16,32", "8,16"))
CALLERS = "an argument float32<host>[16,32], which is named 'w_in' and stays with the caller"
ARGUMENT = "an argument float32<host>[4,16,32]"
MISPLACED = {
    "in our layer": (scanned(lambda x, w: layer(x, w | {"in": there_and_back(w["in"])})), UNTOLD),
    "named, by JAX": (by_jax(named_weight, offloading("w_in")), CALLERS),
    "named, under our policy": (by_jax(named_weight, Policy({"w_in": "offload"}, min_offload_bytes=0)), CALLERS),
    "beside ours": (lambda x, w: of_scan(x, w) + there_and_back(jnp.sin(x))[0, 0], OF_X),
    "in a custom rule": (lambda x, w: {"y": there_and_back(x), "g": jax.grad(of_scan)(x, w)}, "[8,16]"),
    "by jit": (
        lambda x, w: {"x": jax.jit(lambda x: x, out_shardings=PINNED)(x), "g": jax.grad(of_scan)(x, w)},
        "result 0 of a jit",
    ),
    "without us": (
        lambda x, w: {"y": by_jax(layer, offloading("fc1"))(x, jax.tree.map(there_and_back, w))},
        "an input float32<host>[4,16,32]",
    ),
}


@pytest.mark.parametrize("f, said", MISPLACED.values(), ids=MISPLACED)
def test_what_must_not_go_to_the_host_fails(f, said):
    verdict, detail = one(moves, f)
    assert verdict == "fails" and said in detail, detail


@pytest.mark.claim("verify")
def test_a_function_that_is_not_ours_has_no_reference():
    """Names and policies are JAX's."""
    found = verify(by_jax(layer, offloading("fc1")), X, W)
    assert {c.claim for c in found if c.verdict == "holds"} == {"moves", "repeats"}, found


@jax.jit
def off(x):
    return jax.device_put(jax.device_put(x, HOST), DEVICE)


def test_what_may_go_to_the_host_holds():
    """A name also counts inside jit; an optimizer's state that lives on the host returns there."""
    assert (
        one(moves, lambda x, w: {"y": off(checkpoint_name(jnp.sin(x), "y")), "g": jax.grad(of_scan)(x, w)})[0]
        == "holds"
    )

    def step(x, w, moment):
        moment = jax.tree.map(lambda m, g: jax.device_put(m, DEVICE) + g, moment, jax.grad(of_scan, 1)(x, w))
        return {"moment": jax.tree.map(lambda m: jax.device_put(m, HOST), moment)}

    args = X, W, jax.device_put(W, HOST)
    verdict, said = one(moves, step, *args)
    assert verdict == "holds" and "3 value(s) that go to the host 1 are marked offload" in said
    weights_too = lambda x, w, moment: step(x, w, moment) | {"w": jax.device_put(w, HOST)}  # with the moments' shapes
    verdict, said = one(moves, weights_too, *args)
    assert verdict == "fails" and f"{ARGUMENT}, which has no name" in said


def test_a_policy_of_ours_is_asked_what_jaxs_checkpoint_moves(monkeypatch):
    """Planted: the policy says offload for what is to be saved, except to the reference."""
    mine = by_jax(layer, Policy({"fc1": "save"}, min_offload_bytes=0))
    with monkeypatch.context() as planted:
        decision = lambda self, name: "save" if tracing().reference or name != "fc1" else "offload"
        planted.setattr(Policy, "decision", decision)
        jax.make_jaxpr(jax.grad(mine))(X, W)
        target = target_of(mine, (X, W))
    assert moves(target) == ("fails", "these values go to the host and must not: fc1, which is marked save")


def test_what_others_move_beside_ours_is_not_judged_by_bytes():
    beside = lambda x, w, v: of_scan(x, w) + by_jax(layer, offloading("fc1"))(x, v)
    args = X, W, weights(2)
    verdict, said = one(conservation, beside, *args)
    assert verdict == one(gradients, beside, *args)[0] == "not checked"
    assert "1 value(s) also go to the host in the reference" in said


BRANCHES = Policy({"u": "offload", "v": "save"}, min_offload_bytes=0)


def branches(x, w):
    """Two values of one type in two branches, of which one is offloaded."""
    one, other = lambda: jnp.sin(tag(x @ w["in"], "u")), lambda: jnp.cos(tag(x @ w["in"], "v"))
    return x + lax.cond(x.sum() > 0, one, other) @ w["out"]


def chain_of_branches(x, w):
    each = [jax.tree.map(lambda a, i=i: a[i], w) for i in range(LAYERS)]
    return jnp.sum(chain([branches] * LAYERS, x, each, policy=BRANCHES) ** 2)


def checkpoint_of_branches(x, w):
    return jnp.sum(checkpoint(branches, policy=BRANCHES)(x, jax.tree.map(lambda a: a[0], w)) ** 2)


def test_values_without_elements_need_not_move():
    layer = lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None)
    loss = lambda x, w: jnp.sum(scan(layer, x, w, policy=Policy({"fc1": "offload"}, min_offload_bytes=0))[0])
    assert verify(loss, jnp.ones((0, 8)), jnp.ones((3, 8, 8)))["moves"].verdict == "holds"


@pytest.mark.parametrize("loss", [lambda *args: scanned(branches, BRANCHES)(*args), chain_of_branches])
def test_a_branchs_value_that_takes_the_place_of_a_saved_one_is_a_fault(loss, monkeypatch):
    """As if partial evaluation gave both one slot: offload then becomes save."""
    monkeypatch.setattr(_layer, "separate_slots", lambda jaxpr, plan: jaxpr)
    found = verify(lambda x, w: loss(x, w), X, W)
    assert [c.claim for c in found if c.verdict == "fails"] == ["moves"], found
    assert "these values stay on the device: u, which is marked offload (u; in the place of v)" in found["moves"].detail


@pytest.mark.parametrize("loss", [scanned(branches, BRANCHES), chain_of_branches, checkpoint_of_branches])
def test_branches_that_move_and_keep_values_of_one_type_fail_nothing(loss):
    assert one(gradients, loss)[0] == one(moves, loss)[0] == "holds"
    verdict, said = one(conservation, loss)
    assert verdict == "not checked" and "branches of a cond share a residual in the reference" in said


# --- what runs twice


def in_a_checkpoint(f):
    return checkpoint(f, policy=Policy(min_offload_bytes=0), strict=False)


def in_a_scan_of_ours(f):
    step = lambda w: lambda x, v: (x + f(x, w) * v, None)
    return lambda x, w: jnp.sum(scan(step(w), x, jnp.ones(2), policy=Policy(min_offload_bytes=0), strict=False)[0])


RERUN = [jax.checkpoint(of_scan), jax.checkpoint(of_chain), in_a_checkpoint(of_scan), in_a_checkpoint(of_chain)]
RERUN += [in_a_scan_of_ours(of_scan)]


@pytest.mark.parametrize("f", RERUN)
def test_what_a_checkpoint_around_or_beside_it_reruns_is_not_said_to_run_once(f):
    verdict, said = one(producers, f)
    assert verdict == "not checked" and "what other checkpoints keep, or run again, is not known" in said


def test_a_kernel_rerun_for_one_of_its_results_is_rerun_for_all():
    def routed(x, w):
        gates, experts = lax.top_k(x @ w["in"], 2)
        return x + (tag(gates, "gates") * tag(experts, "routing")) @ w["out"][:2]

    loss = lambda gates: scanned(routed, Policy({"gates": gates, "routing": "save"}, min_offload_bytes=0))
    assert one(producers, loss("save"))[0] == "holds"
    said = "recomputed: routing (save) with gates (recompute), of one kernel"
    assert one(producers, loss("recompute")) == ("fails", said)


# --- on several devices


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, jax.P(*spec)))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [(None, "d"), pytest.param((None, None, "d"), marks=pytest.mark.long)])
def test_weights_that_are_sharded_and_gathered_are_not_a_fault(spec):
    """A stack on the host has one row more than there are layers; that row too is read and given to the devices."""
    mesh = auto_mesh(d=8)
    target = target_of(of_scan, (on(mesh, X, "d"), jax.tree.map(lambda a: on(mesh, a, *spec), W)))
    verdict, said = placement(target)
    assert verdict == "holds" and "stacks on the host have rows that are empty, and read" in said
    assert gradients(target)[0] == "holds"  # within rounding, if this XLA splits its sums differently


def test_a_chain_on_a_mesh_has_its_references_collectives():
    """XLA combines different collectives in the two programs."""
    mesh = auto_mesh(d=4, t=2)
    w = {"in": on(mesh, W["in"], None, None, "t"), "out": on(mesh, W["out"], None, "t")}
    assert one(placement, of_chain, on(mesh, X, "d"), w)[0] == "holds"


@pytest.mark.slow
def test_more_collectives_than_the_reference_has_fail(monkeypatch):
    """Planted: what comes back from the host goes to all devices, and is sharded again."""
    mesh, real = auto_mesh(d=8), Layout.merge
    moved = lambda a, *spec: lax.with_sharding_constraint(a, NamedSharding(mesh, jax.P(*spec)))
    planted = lambda *args: [moved(moved(a), "d") if a.ndim == 2 and len(a) == BATCH else a for a in real(*args)]
    monkeypatch.setattr(Layout, "merge", planted)
    found = verify(of_scan, on(mesh, X, "d"), W)
    assert [c.claim for c in found if c.verdict == "fails"] == ["placement"], found
    assert found["placement"].detail.startswith("collectives give devices more than the reference's do: ")


@pytest.mark.slow
def test_residuals_that_are_whole_on_each_device_fail(monkeypatch):
    """Planted: what is written to a stack is gathered first."""
    mesh, real = auto_mesh(d=8), _loops.put_row
    verdict, said = one(placement, of_scan, on(mesh, X, "d"), W)
    assert verdict == "holds" and "no device keeps a larger shard of any of" in said
    whole = lambda a: lax.with_sharding_constraint(a, NamedSharding(mesh, jax.P()))
    monkeypatch.setattr(_loops, "put_row", lambda s, a, i: real(s, a if on_host(jax.typeof(a)) else whole(a), i))
    verdict, said = one(placement, of_scan, on(mesh, X, "d"), W)
    sizes = [readable(BATCH * HIDDEN * 4 // share) for share in (1, 8)]
    assert verdict == "fails" and "each device keeps {} of a layer's act, the reference's {}".format(*sizes) in said


# --- planted faults, each through a seam of the engine


def extra(monkeypatch, copied):
    """Keep one more value between the passes, which `copied` makes of what is kept."""
    real = scan_primitive.with_tangents

    def with_tangents(*args, kept, transpose, **rest):
        more = copied(kept)
        return real(*args, kept=[*kept, more], transpose=lambda kept, cts: transpose(kept[:-1], cts), **rest)

    monkeypatch.setattr(scan_primitive, "with_tangents", with_tangents)


def a_host_stack(kept):
    return next(x for x in kept if on_host(jax.typeof(x)))


def kept_on_the_device_as_well(monkeypatch):
    extra(monkeypatch, lambda kept: jax.device_put(a_host_stack(kept), DEVICE))


def stored_twice(monkeypatch):
    extra(monkeypatch, lambda kept: jax.device_put(lax.optimization_barrier(a_host_stack(kept)), HOST))


def routing_is_recomputed(monkeypatch):
    real = _plan._by_policy

    def by_policy(value, *rest):
        is_routing = any(name.text == "routing" for name in value.names)
        return ("recompute", "planted") if is_routing else real(value, *rest)

    monkeypatch.setattr(_plan, "_by_policy", by_policy)


def a_saved_value_is_moved(monkeypatch):
    real = _layer.kept_of
    moved = lambda k: k._replace(place="host")
    is_saved = lambda k: k.place == "device" and any(n.decision == "save" and "act" in n for n in k.source.names)
    monkeypatch.setattr(_layer, "kept_of", lambda *args: tuple(moved(k) if is_saved(k) else k for k in real(*args)))


def what_is_marked_offload_stays(monkeypatch):
    real = _layer.kept_of
    stays = lambda k: k._replace(place="device") if k.place == "host" else k
    monkeypatch.setattr(_layer, "kept_of", lambda *args: tuple(stays(k) for k in real(*args)))


def a_producer_runs_twice(monkeypatch):
    real = _plan.Plan.__call__

    def call(self, prim, *avals, **params):
        name = params["name"] if prim is _plan.name_p else None
        is_act = any(row.plan_name == name and "act" in row.names for row in self.rows)
        return VERDICT["recompute"] if is_act else real(self, prim, *avals, **params)

    monkeypatch.setattr(_plan.Plan, "__call__", call)


def called_at_each_write(monkeypatch, leak):
    """Call `leak(array)` whenever a row is written to a stack on the device."""
    real = _loops.put_row

    def put(stack, x, i):
        seen = x if on_host(jax.typeof(x)) else jax.pure_callback(lambda x: (leak(x), x)[1], jax.typeof(x), x)
        return real(stack, seen, i)

    monkeypatch.setattr(_loops, "put_row", put)


def the_hosts_memory_grows(monkeypatch):
    leaked = []
    called_at_each_write(monkeypatch, lambda _: leaked.append(np.ones(20 * 2**20, np.int8)))


def memory_grows(monkeypatch):
    called_at_each_write(monkeypatch, [].append)


FAULTS = {
    kept_on_the_device_as_well: "conservation, moves",
    stored_twice: "conservation",
    rows_in_wrong_order: "gradients",
    a_host_write_is_skipped: "gradients",
    routing_is_recomputed: "producers",
    a_saved_value_is_moved: "moves",
    what_is_marked_offload_stays: "moves",
    a_producer_runs_twice: "producers",
    memory_grows: "repeats",
    the_hosts_memory_grows: "repeats",
}


@pytest.mark.slow
@pytest.mark.claim("planted-faults")
@pytest.mark.parametrize("fault, claims", FAULTS.items(), ids=lambda x: getattr(x, "__name__", x))
def test_a_planted_fault_fails_its_check_and_no_other(fault, claims, monkeypatch):
    fault(monkeypatch)
    found = verify(of_scan, X, W)
    assert not found.ok and ", ".join(c.claim for c in found if c.verdict == "fails") == claims, found


CUDNN = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")


def attending(x, w, attention=CUDNN):
    """Two stacks of one layer with equal attention."""

    def one(x, w):
        heads = tag(jnp.einsum("bsd,dnh->bsnh", x, w), "heads")
        return x + tag(attention(heads, heads, heads), "out").reshape(x.shape), None

    rules = Policy({"out": "offload", "heads": "save"}, min_offload_bytes=0)
    for stack in (w[:2], w[2:]):
        x, _ = scan(one, x, stack, policy=rules)
    return jnp.sum(x.astype(jnp.float32) ** 2)


ATTENDING = (jax.ShapeDtypeStruct((2, 512, 512), jnp.bfloat16), jax.ShapeDtypeStruct((4, 512, 8, 64), jnp.bfloat16))


@pytest.fixture
def fused(monkeypatch):
    """JAX's lowering of cuDNN's attention, which takes this machine for a GPU."""
    fused = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 90000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    return fused


def test_what_a_mask_hides_of_attention_takes_no_time(fused):
    called = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    heads = jax.ShapeDtypeStruct((2, 512, 8, 64), jnp.bfloat16)
    of_te = lambda mask, *window: {
        "config": SimpleNamespace(attn_mask_type=SimpleNamespace(name=mask), window_size=window)
    }
    for of, found in (
        (of_te("CAUSAL_MASK", -1, -1), (True, 0)),
        (of_te("PADDING_CAUSAL_MASK", 127, 0), (True, 128)),
        (of_te("NO_MASK", 64, 64), (False, 0)),
    ):
        assert causal_window(of) == found
    seconds = []
    for masked, found in (
        ({}, (False, 0)),
        ({"is_causal": True}, (True, 0)),
        ({"is_causal": True, "local_window_size": (127, 0)}, (True, 128)),
        ({"local_window_size": (127, 0)}, (True, 128)),
    ):
        traced = jax.make_jaxpr(functools.partial(called, **masked))(heads, heads, heads)
        (kernel,) = [s.eqn for s in walk(traced) if re.fullmatch(CUDNN_ATTENTION, s.eqn.primitive.name)]
        assert is_attention(kernel.primitive.name) and causal_window(kernel.params) == found
        seconds.append(cost(traced, dataclasses.replace(RATES, hbm_gb_s=1e9)).seconds)
    assert seconds[0] > seconds[1] > seconds[2] == seconds[3]


def test_a_jax_that_cannot_be_asked_is_left_as_it_is(fused, monkeypatch):
    monkeypatch.delattr(fused, CUDNN_CONFIG)
    before = dict(vars(fused)), dict(os.environ)
    with pytest.raises(ZeroDivisionError), _exact.deterministic_attention():
        assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0" and vars(fused) == before[0]
        1 / 0  # noqa: B018
    assert (dict(vars(fused)), dict(os.environ)) == before


# --- on a GPU

WIDE = {"in": (512, 2048), "out": (2048, 512)}
STACKS = {k: jax.ShapeDtypeStruct((8, *shape), jnp.bfloat16) for k, shape in WIDE.items()}
ROWS = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16)


@pytest.mark.gpu
def test_on_a_gpu_what_xla_made_of_it_is_checked_too():
    found = verify(of_scan, ROWS, STACKS)
    assert (
        found.ok
        and "planned" in found["conservation"].detail
        and "no more than were traced" in found["producers"].detail
    ), found
    assert found["copies"].verdict == "holds" and "on no stream that computes" in found["copies"].detail, found


@pytest.mark.gpu
def test_copies_on_the_computes_stream_fail(monkeypatch):
    monkeypatch.delitem(_compiler_options._GPU_OPTIONS, "xla_gpu_enable_command_buffer")  # so that all are on
    print(found := verify(of_scan, ROWS, STACKS))
    assert [c.claim for c in found if c.verdict == "fails"] == ["copies"], found


@pytest.mark.gpu
def test_attention_of_two_stacks_is_verified():
    found = verify(attending, *ATTENDING)
    assert found.ok and found["gradients"].verdict == "holds", found


@pytest.mark.gpu
def test_attention_of_transformer_engine_is_verified():
    needs_te()
    found = verify(lambda x, w: attending(x, w, transformer_engine), *ATTENDING)
    assert found.ok and found["gradients"].verdict == "holds", found


@pytest.mark.gpu
def test_a_profile_has_each_residuals_copies():
    found = profile(of_scan, ROWS, STACKS)
    assert found.moves, found
    for direction in ("d2h", "h2d"):
        moves = [m for m in found.moves if m.direction == direction]
        assert 7 <= len(moves) <= 8, found  # and a padding row
        assert {m.residual for m in moves} == {"fc1"} and {m.bytes for m in moves} == {4096 * 2048 * 2}


# --- processes

ONE_OF_TWO = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxoffload import Policy, scan, tag, verify

jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
shape = lambda spec, *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, spec))
layer = lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None)
loss = lambda w, x: jnp.sum(scan(layer, x, w, policy=Policy({"fc1": "offload"}, min_offload_bytes=0))[0] ** 2)
for f in (loss, lambda w, x: w - jax.grad(loss)(w, x)):
    print(verify(f, shape(P(), 3, 8, 8), shape(P("data"), 4, 8)))
"""


@pytest.mark.slow
def test_processes_with_one_device_each_verify_together():
    port, environment = str(free_port()), os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": inherited_flags()}
    run = lambda n: start([sys.executable, "-c", ONE_OF_TWO, port, str(n)], cwd=ROOT, env=environment)
    for said in map(finish, [run(0), run(1)]):
        assert (
            said.count("holds        gradients") == said.count("holds        placement") == 2 and "fails " not in said
        )


# --- the command line


def made(*arguments):
    """What a user's MODULE:FUNCTION returns."""
    x, w = jax.eval_shape(lambda: (X, W))
    step = lambda x, w: jax.tree.map(lambda w, g: w - g, w, jax.grad(of_scan, argnums=1)(x, w))
    return {"loss": (of_scan, (x, w)), "step": (step, (x, w)), "both": (step, (x, w), of_scan, (x, w)), "odd": of_scan}[
        "".join(arguments)
    ]


def test_the_command_line_reports(capsys):
    assert main(["report", "test_verify:made", "loss"]) == 0
    assert f"host {readable(LAYERS * BATCH * HIDDEN * 4)}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.claim("exit-status")
def test_the_command_line_verifies(capsys, monkeypatch):
    assert main(["verify", "test_verify:made", "both"]) == 0
    checked = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in checked] == [*["loss"] * len(ALL), *["step"] * len(ALL)]
    rows_in_wrong_order(monkeypatch)
    jax.clear_caches()
    assert main(["verify", "test_verify:made", "loss"]) == 1
    assert "loss: fails        gradients: " in capsys.readouterr().out
    jax.clear_caches()


@pytest.mark.parametrize(
    "asked, said",
    [
        (["report", "test_verify"], "'test_verify' is not MODULE:FUNCTION, such as models.train:step_for"),
        (["report", "no_such:made"], "No module named 'no_such'"),
        (["verify", "test_verify:MAID", "loss"], "has no function 'MAID'; the nearest is 'made'"),
        (["profile", "test_verify:made", "step"], "profile: needs an NVIDIA GPU; JAX's default backend is cpu"),
        (["report", ".usr:f"], "'.usr:f' is not MODULE:FUNCTION"),
        (
            ["verify", "models.train:step_for", "configs/tiny.yaml", "mesh.fsdp=4"],
            "'tensor': 1}) that are not here (8 are); give it a mesh of these",
        ),
        (["verify", "test_verify:made", "odd"], "must return (f, args) or (step, args, loss, loss_args)"),
        (["report", "test_verify:made", "step"], "give the loss that it differentiates, with the arguments of one"),
        (["report", "models.train:step_for", "configs/tiny.yaml", "train.step=1"], "Did you mean: 'steps'?"),
        (
            ["report", "models.train:step_for", "configs/tiny.yaml", "remat.residuals[mlp/fcl]=offload"],
            "residuals['mlp/fcl']: matches no tagged value",
        ),
        (["report", "mine:number"], "mine has no function 'number'"),
        (["report", "mine:nothing"], "must return (f, args) or (step, args, loss, loss_args)"),
    ],
)
def test_what_cannot_be_done_is_a_message(asked, said, capsys, mine):
    assert main([text.format(mine=mine) for text in asked]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


@pytest.mark.parametrize(
    "asked, said",
    [
        (["verify", "mine:nothing", "--jsn", "2"], "unrecognized arguments: --jsn"),
        (["report", "mine:nothing", "--machine", "{mine}/slow.json"], "prints: one: 0.0 is not a rate"),
    ],
)
def test_options_are_refused_before_anything_runs(asked, said, capsys, mine):
    with pytest.raises(SystemExit, match="2"):
        main([text.format(mine=mine) for text in asked])
    assert said in capsys.readouterr().err


def test_options_may_stand_anywhere(capsys, mine):
    assert main(["report", "mine:few", "--machine", str(ROOT / "machines/h200.json"), "2"]) == 0
    assert "ms per step on 1 NVIDIA H200, predicted" in capsys.readouterr().out


@pytest.mark.parametrize(
    "asked, said",
    [
        ("mine:raises", "NotImplementedError\n"),
        ("mine:divides", "ZeroDivisionError: division by zero"),
        ("imports_torchy:f", "No module named 'torchy'"),
    ],
)
def test_what_the_function_itself_raises_is_shown_as_such(asked, said, capsys, mine):
    assert main(["report", asked]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and said in err and "must be importable from this folder" not in err


def test_a_report_leaves_gpu_memory_to_others_and_in_process_the_environment_alone(monkeypatch, mine, capsys):
    asked, variable = ["report", "mine:nothing"], "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)  # and what is set here is undone
    assert main(asked) == 2 and variable not in os.environ
    monkeypatch.setattr(sys, "argv", ["jaxoffload", *asked])
    for command, value in (("verify", None), ("report", "false")):
        sys.argv[1] = command
        with pytest.raises(SystemExit), pytest.warns(RuntimeWarning, match="found in sys.modules"):
            runpy.run_module("jaxoffload", run_name="__main__")
        assert os.environ.get(variable) == value


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user's modules."""
    (tmp_path / "mine.py").write_text(
        "def raises():\n  raise NotImplementedError\n\ndef divides():\n  1 / 0\n\ndef nothing():\n  return None, ()\n"
        "number = 1\n\n"
        "def few(_):\n  import test_verify\n  return test_verify.of_scan, (test_verify.X, test_verify.weights(4))\n"
    )
    rates = {"d2h": 1.0, "h2d": 1.0, "together": 0.0}
    both = {"one": rates, "all": rates, "attention_tflops": [1, 1], "gemm_tflops": 1, "hbm_gb_s": 1}
    (tmp_path / "slow.json").write_text(json.dumps({"device": "x", "gpus": 1, "jaxlib": "0", **both}))
    (tmp_path / "imports_torchy.py").write_text("import torchy\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    return tmp_path
