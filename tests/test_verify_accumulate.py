"""verify() of a step that accumulates: what is right holds, and a planted fault fails the claim named for it."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from common import normal, policy
from faults import a_host_write_is_skipped, rows_in_wrong_order
from jax import lax
from jax.sharding import AxisType, NamedSharding

from jaxoffload import accumulate, chain, residuals, scan, tag, verify
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._engine.microbatches import by_layers, gradient, interleaved
from jaxoffload._jax import HOST
from jaxoffload._text import readable
from jaxoffload.proof._program.target import target_of
from jaxoffload.proof._verify.conservation import conservation
from jaxoffload.proof._verify.moves import producers

pytestmark = pytest.mark.usefixtures("compiled_fast")
LAYERS, BATCH, DIM = 3, 16, 16  # a residual is too large to stay on the device in the first microbatch
RULES = policy({"x": "offload", "fc1": "offload", "act": "save"})
WEIGHTS = {"layers": normal(0, (LAYERS, DIM, DIM)) / 4, "head": normal(1, (DIM, 4))}
MICROBATCHES = normal(2, (4, BATCH, DIM))
CLAIMS = ("gradients", "conservation", "moves", "producers", "copies", "placement", "repeats")


def loss_under(rules):
    def layer(x, w):
        x = tag(x, "x")
        return x + tag(jnp.tanh(tag(x @ w, "fc1")), "act"), None

    return lambda w, x: jnp.mean((scan(layer, x, w["layers"], policy=rules)[0] @ w["head"]) ** 2)


def step_under(rules=RULES):
    def step(w, x):
        value, gradients = accumulate(loss_under(rules))(w, x)
        return {"w": jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients), "loss": value}

    return step


def verdicts(checks):
    return {check.claim: check.verdict for check in checks}


# --- planted faults, each through a seam of the engine


def rows_of_the_next_microbatch(monkeypatch):
    """A backward pass reads what the forward pass beside it has written, as if both had one set of stacks."""
    backward, run, written = interleaved.backward, interleaved.run_passes, []

    def reading(made, between, sums):
        theirs = written.pop().saved if written else between.saved
        swap = lambda mine, other: mine._replace(host=other.host)
        saved = [list(map(swap, *both)) for both in zip(between.saved, theirs, strict=True)]
        return (yield from backward(made, between._replace(saved=saved), sums))

    def one_after_the_other(*passes):
        if len(passes) == 1:
            return run(*passes)
        back, forth = passes
        ((after, result),) = run(forth)
        written.append(after)
        return [*run(back), (after, result)]

    monkeypatch.setattr(interleaved, "backward", reading)
    monkeypatch.setattr(interleaved, "run_passes", one_after_the_other)


def the_last_gradient_counts(times):
    def planted(monkeypatch):
        backward, run, before = interleaved.backward, interleaved.run_passes, []

        def remembering(made, between, sums):
            before[:] = sums
            return backward(made, between, sums)

        def changed(*passes):
            made = run(*passes)
            if len(passes) > 1 or isinstance(made[0], tuple):
                return made
            return [[a + times * (b - a) for a, b in zip(before, made[0], strict=True)]]

        monkeypatch.setattr(interleaved, "backward", remembering)
        monkeypatch.setattr(interleaved, "run_passes", changed)

    return planted


def a_third_set_of_stacks(monkeypatch):
    """Kept for each microbatch; something reads it."""
    forward = gradient.forward

    def forth(made, microbatch, stacks):
        between, results = yield from forward(made, microbatch, stacks)
        again = lambda x: jax.device_put(jax.lax.optimization_barrier(x), HOST)
        twice = lambda kept: kept._replace(host=list(map(again, kept.host)))
        return between._replace(saved=[list(map(twice, saved)) for saved in between.saved]), results

    monkeypatch.setattr(interleaved, "forward", forth)


LAYERS_DIFFER = "1 of 3 results differ: ['result']['w']['layers']: 512 of 768 values"
HEAD_DIFFERS = "['result']['w']['head']: 64 of 64 values"
FAULTS = {
    "rows of the next microbatch": (rows_of_the_next_microbatch, "gradients", LAYERS_DIFFER),
    "rows in the wrong order": (rows_in_wrong_order, "gradients", LAYERS_DIFFER),
    "a host write is skipped": (a_host_write_is_skipped, "gradients", LAYERS_DIFFER),
    "a gradient is dropped": (the_last_gradient_counts(0), "gradients", HEAD_DIFFERS),
    "a gradient is added twice": (the_last_gradient_counts(2), "gradients", HEAD_DIFFERS),
    "a third set of stacks": (
        a_third_set_of_stacks,
        "conservation",
        "beside its stacks and their rows the step puts 12.00 KiB on the host",
    ),
}


@pytest.mark.slow
@pytest.mark.claim("planted-faults")
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_planted_fault_fails_its_claim_and_no_other(fault, monkeypatch):
    plant, claim, said = FAULTS.get(fault, (lambda _: None, None, ""))
    plant(monkeypatch)
    found = verify(step_under(), WEIGHTS, MICROBATCHES)
    want = dict.fromkeys(CLAIMS, "holds") | {"copies": "not checked", "placement": "not checked"}
    assert verdicts(found) == want | ({claim: "fails"} if claim else {}), found
    assert not claim or said in found[claim].detail


ROW = BATCH * DIM * 4  # bytes of one layer's x


@pytest.mark.claim("accumulated-bytes")
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    "fields, moved, rows",
    [
        ({}, LAYERS - 1, LAYERS),
        ({"resident_layers": 0}, LAYERS, LAYERS + 1),
        ({"offload_layers": 1}, 1, 2),
        ({"offload_layers": 1, "other_layers": "recompute", "resident_layers": 1}, 1, 2),
    ],
    ids=str,
)
def test_the_bytes_of_one_microbatch_on_the_device_and_of_two_on_the_host(fields, moved, rows, count, monkeypatch):
    """By hand: rows of x that move; all rows of a stack, and the last layer's if that stands alone."""
    monkeypatch.setattr(by_layers, "ends", lambda scans, *_: (scans, scans))  # nothing stays on the device
    rules = policy({"x": "offload", "fc1": "recompute", "act": "save"}, **fields)
    step = step_under(rules)
    verdict, said = conservation(target_of(step, (WEIGHTS, MICROBATCHES[:count])))
    assert verdict == "holds", said
    assert f"; of two at most {readable(2 * rows * ROW)} on the host, padding rows included" in said
    if fields.get("other_layers") != "recompute":  # there, less is on the device too
        assert said.startswith(f"of one microbatch by the jaxpr {readable(moved * ROW)} less than the reference's")


def first_and_others(step, *args):
    """Return the plans of the layers of the first microbatch, and of those between."""
    (params,) = (s.eqn.params for s in walk(jax.make_jaxpr(step)(*args)) if "first" in s.eqn.params)
    return ([repr(s.layer.plan) for loops in params[of] for s in loops.segments] for of in ("first", "loops"))


@pytest.mark.claim("fill-and-drain")
def test_a_step_that_recomputes_in_the_first_microbatch_is_what_is_claimed():
    microbatches = normal(2, (4, 64 * BATCH, DIM))  # too large to stay on the device
    step = step_under(policy({"x": "offload", "fc1": "offload", "act": "recompute"}))
    first, others = first_and_others(step, WEIGHTS, microbatches)
    assert "fc1: recompute" in first[0] and "fc1: offload" in others[0]
    found = verdicts(verify(step, WEIGHTS, microbatches))
    assert found == dict.fromkeys(CLAIMS, "holds") | dict.fromkeys(("copies", "placement"), "not checked")


def needs_another(x, w):
    """To recompute `mid` is to keep `proj`, which the backward pass does not read otherwise."""
    x = tag(x, "x")
    mid = tag(x + tag(jnp.sin(x) @ w, "proj"), "mid")
    return mid + jnp.sin(mid)


def takes_who_knows_how_long(x, w):
    slow = lambda x, w: lax.while_loop(lambda s: s[0] < 999, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1]
    opaque = jax.custom_vjp(slow)
    opaque.defvjp(lambda x, w: (slow(x, w), w), lambda w, dy: (dy, jnp.zeros_like(w)))
    return x + jnp.sin(tag(opaque(x, w), "h"))


def has_an_effect(x, w):
    y = x @ w
    jax.debug.callback(lambda y: None, y[0, 0])
    return x + jnp.sin(tag(y, "h"))


@pytest.mark.claim("fill-and-drain")
@pytest.mark.parametrize("layer", [needs_another, takes_who_knows_how_long, has_an_effect])
def test_what_is_not_recomputed_in_the_first_microbatch(layer):
    rules = policy(dict.fromkeys(("x", "mid", "proj", "h"), "offload"))
    loss = lambda w, x: jnp.mean(scan(lambda x, w: (layer(x, w), None), x, w, policy=rules, strict=False)[0] ** 2)
    step = lambda w, x: jax.tree.map(lambda w, g: w - 0.1 * g, w, accumulate(loss)(w, x)[1])
    args = WEIGHTS["layers"], normal(2, (4, 64 * BATCH, DIM))
    first, others = first_and_others(step, *args)
    assert first == others
    verdict, said = conservation(target_of(step, args))
    assert verdict == "holds", said


def test_what_cannot_be_told_by_the_bytes_of_a_step():
    def beside(w, x):
        chained = lambda x, w: jnp.cos(tag(x @ w, "fc1"))
        in_chain = jax.jit(lambda x, w: chain([chained] * 2, x, [w[0], w[1]], policy=policy({"fc1": "offload"})))
        return loss_under(RULES)(w, in_chain(x, w["layers"]))

    target = target_of(lambda w, x: accumulate(beside)(w, x), (WEIGHTS, MICROBATCHES))
    verdict, said = conservation(target)
    assert verdict == "holds", said  # what moves beside the scans counts, too
    verdict, said = producers(target)
    assert verdict == "not checked" and said.endswith("what other checkpoints keep, or run again, is not known"), said
    twice = lambda w, x: (step_under()(w, x), accumulate(loss_under(policy({"x": "offload"})))(w, x))
    verdict, said = conservation(target_of(twice, (WEIGHTS, MICROBATCHES)))
    assert (verdict, said) == ("not checked", "a step's residuals are internal to it; verify its loss")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_step_on_a_mesh_runs_the_references_collectives(kind):
    mesh = jax.make_mesh((4,), ("d",), (kind,), devices=jax.devices()[:4])
    on = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, jax.P(*spec)))
    with jax.set_mesh(mesh) if kind is AxisType.Explicit else nullcontext():
        found = verify(step_under(), on(WEIGHTS), on(MICROBATCHES, None, "d"))
    assert verdicts(found) == dict.fromkeys(CLAIMS, "holds") | {"copies": "not checked"}, found


def test_a_step_has_no_table_and_says_whose_it_is():
    with pytest.raises(NotImplementedError, match=r"residuals: .* give the loss that it differentiates"):
        residuals(lambda w, x: accumulate(loss_under(RULES))(w, x), WEIGHTS, MICROBATCHES)
