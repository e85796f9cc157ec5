"""predict(): seconds, exposed copies, and bytes on device and host, by hand at small shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import bytes_staying
from common import ROOT, auto_mesh
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoffload import Policy, accumulate, chain, residuals, scan, tag
from jaxoffload._engine.host.need import need_of
from jaxoffload._engine.microbatches import by_layers
from jaxoffload.proof import Bus, Link, Machine, predict
from jaxoffload.proof._command import main
from jaxoffload.proof._predict.collectives import Weight, collective_seconds, weights_of
from jaxoffload.proof._predict.fit import LayerCopy
from jaxoffload.proof._predict.memory import divisions, step_bytes
from jaxoffload.proof._predict.scans import scans_in
from jaxoffload.proof._program.results import spread
from models.train import step_for

pytestmark = pytest.mark.claim("predict")

# Round numbers: 10**9 FLOPs in bfloat16 take 1 ms, 10**6 bytes 1 ms in memory and 10 ms on the bus.
ONE, TWO = Bus(0.1, 0.05, 0.04), Bus(0.025, 0.05, 0.02)
MACHINE = Machine("a GPU", 2, "0", ONE, TWO, gemm_tflops=1.0, attention_tflops=(0.5, 0.25), hbm_gb_s=1.0)
RULES = Policy({"a": "offload", "b": "offload"}, min_offload_bytes=0)
LAYERS, COPY = 5, 100 * 30 * 4  # bytes of a, and of b


def body(x, w):
    a = tag(jnp.sin(x @ w), "a")
    return tag(jnp.cos(a), "b") @ w.T, None


def loss(x, w, policy=RULES):
    return jnp.sum(scan(body, x, w, policy=policy)[0])


def of(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


ARGS = of(100, 20), of(LAYERS, 20, 30)
predicted = functools.partial(predict, machine=MACHINE)


# ---- seconds ----


@pytest.mark.parametrize("decision, matmuls", [("save", 3), ("recompute", 4)])
def test_a_step_takes_the_flops_of_its_matmuls_and_of_those_that_run_again(decision, matmuls):
    fast = dataclasses.replace(MACHINE, hbm_gb_s=1e9)
    layer = lambda x, w: (jnp.sin(tag(x @ w, "a")), None)
    f = lambda w, x: jnp.sum(scan(layer, x, w, policy=Policy(), strict=False)[0])
    args = of(LAYERS, 64, 64, dtype=jnp.bfloat16), of(128, 64, dtype=jnp.bfloat16)
    found = predict(f, *args, machine=fast, policy=Policy({"a": decision}))
    expected = LAYERS * matmuls * 2 * 128 * 64 * 64 / 1e9
    assert found.computing_ms == pytest.approx(expected, rel=1e-3) and found.exposed_ms == 0


def test_copies_are_exposed_by_as_much_as_they_take_longer_than_their_pass():
    found = predicted(loss, *ARGS)
    forward, backward = found.loops
    assert (forward.passes, backward.passes) == ("forward", "backward")
    for loop, d2h_ms, h2d_ms in ((forward, COPY / 1e5, 0), (backward, 0, COPY / 5e4)):
        assert [(c.residual, c.bytes) for c in loop.copies] == [("a", COPY), ("b", COPY)]
        assert [c[2:] for c in loop.copies] == [pytest.approx((d2h_ms, h2d_ms))] * 2
        assert (loop.layers, loop.moved) == (LAYERS, LAYERS - 1)
    # Forward: x and w, the matmul's result; that is read and a written; b written; b, w and the result.
    reads = [2000 + 600 + 3000, 3000 + 3000 + 3000, 3000 + 600 + 2000]
    assert forward.layer_ms == pytest.approx(4e-6 * sum(reads)) and backward.layer_ms > forward.layer_ms
    longer = forward.together.d2h_ms - forward.layer_ms + backward.together.h2d_ms - backward.layer_ms
    assert found.exposed_ms == pytest.approx(LAYERS * longer)
    assert not forward.fits(forward.together) and not backward.fits(backward.together)
    assert found.step_ms == found.computing_ms + found.exposed_ms
    assert found.computing_ms > forward.computing_ms + backward.computing_ms
    # A single residual: at most 1 % of the loop's computing time may be exposed.
    for longer, fit in ((1.009, True), (1.011, False)):
        assert forward.fits(LayerCopy("a", 1, longer * forward.layer_ms, 0)) == fit
    fast = predict(loss, *ARGS, machine=dataclasses.replace(MACHINE, one=Bus(100, 100, 50)))
    assert fast.exposed_ms == 0 and fast.computing_ms == found.computing_ms
    assert "does not fit" in str(found) and "does not fit" not in str(fast) and str(fast).count("  fits") == 6


def test_a_policy_is_that_of_all_scans():
    """And a step takes what its loss takes; it is traced once."""
    traces = []

    def step(x, w):
        traces.append(x)
        return jax.tree.map(jnp.add, w, jax.grad(loss, argnums=1)(x, w))

    for policy in (Policy({"a": "save"}), Policy({"a": "offload"}, min_offload_bytes=0), None):
        of_step, of_loss = (predicted(f, *ARGS, policy=policy) for f in (step, loss))
        assert of_step.loops == of_loss.loops and of_step.host == of_loss.host
        as_written = functools.partial(loss, policy=policy or RULES)
        assert of_loss == predicted(as_written, *ARGS)
    assert len(traces) == 3 and of_loss.loops


def test_copies_without_a_loop_are_not_predicted():
    two = [of(20, 30)] * 2
    of_chain = lambda x, ws: jnp.sum(chain([lambda x, w: body(x, w)[0]] * 2, x, ws, policy=RULES))
    found = predicted(of_chain, ARGS[0], two)
    assert found.loops == () and found.exposed_ms == 0 and found.computing_ms > 0 and found.host == 2 * COPY


# ---- in microbatches ----

XS = of(8, 100, 20)


def accumulated(w, x):
    return accumulate(lambda w, x: loss(x, w))(w, x)


@pytest.fixture
def ends_copy_all(monkeypatch):
    monkeypatch.setattr(by_layers, "ends", lambda scans, *_: (scans, scans))


@pytest.mark.claim("accumulated-fits")
def test_what_the_first_and_the_last_microbatch_recompute_is_not_copied():
    """Beside them copies go one way, at the rate of that. Where a pass runs alone there are none."""
    found = predicted(accumulated, ARGS[1], XS)
    ways = [(loop.runs, *{(c.d2h_ms, c.h2d_ms) for c in loop.copies}) for loop in found.loops]
    both = (COPY / 1e6 / ONE.together,) * 2
    expected = [(1, (COPY / 1e6 / ONE.d2h, 0)), (5, both), (1, (0, COPY / 1e6 / ONE.h2d))]
    assert [runs for runs, _ in ways] == [runs for runs, _ in expected]
    np.testing.assert_allclose([ms for _, ms in ways], [ms for _, ms in expected])
    assert found.host == 2 * LAYERS * 2 * COPY  # two microbatches, with a padding row each


@pytest.mark.claim("accumulated-fits")
def test_accumulate_has_both_passes_to_hide_the_copies_of_both_behind(ends_copy_all):
    """7 times both passes, and once each alone, as without it."""
    alone = predicted(loss, *ARGS)
    found = predicted(accumulated, ARGS[1], XS)
    beside, *first_and_last = found.loops
    assert first_and_last == [*alone.loops]
    both = beside.together
    assert (beside.runs, beside.layers, beside.moved, beside.passes) == (7, LAYERS, LAYERS - 1, "both")
    assert both.d2h_ms == both.h2d_ms == pytest.approx(2 * COPY / 4e4)  # each way at the rate of both
    window = sum(loop.layer_ms for loop in alone.loops)
    assert beside.exposed_ms(both) == pytest.approx(7 * LAYERS * (both.d2h_ms - window)) and not beside.fits(both)
    assert found.exposed_ms == pytest.approx(beside.exposed_ms(both) + alone.exposed_ms)
    said = [line for line in str(found).splitlines() if " layers, of which " in line]
    assert said[0].startswith("backward beside forward pass: 7 times 5 layers, of which 4 offload, each")
    assert said[1].startswith("forward pass: 5 layers,") and said[2].startswith("backward pass: 5 layers,")
    assert [loop.passes for loop in found.loops] == ["both", "forward", "backward"]


def test_what_stays_on_the_device_at_the_ends_is_in_its_memory():
    """At sizes at which `accumulate` keeps some of it."""
    d, hidden, rows = 8192, 14336, 16384
    layer = lambda x, w: (x + jax.nn.silu(tag(tag(x, "x") @ w[0], "fc1")) @ w[1], None)
    bf16 = functools.partial(of, dtype=jnp.bfloat16)
    args = (bf16(LAYERS, d, hidden), bf16(LAYERS, hidden, d)), bf16(2, rows, d)

    def step(fields):
        rules = Policy({"x": "offload", "fc1": "offload"}, **fields)
        f = accumulate(lambda w, x: jnp.sum(scan(layer, x, w, policy=rules)[0].astype(jnp.float32)))
        return f, predict(f, *args, machine=MACHINE)

    (f, some), (_, none) = step({}), step({"offload_layers": 0})
    stays = bytes_staying(f, *args)
    assert stays > 0 and some.host == need_of(jax.make_jaxpr(f)(*args)).bytes() > 0 == none.host
    assert some.memory.other > stays


@pytest.mark.parametrize("microbatches, together", [(8, [(7, "both")]), (1, [])])
def test_on_stages_a_tick_runs_a_chunk_each_way_and_some_run_one_pass_alone(microbatches, together):
    """Two chunks of four layers: two ticks begin, and two end, without the other pass."""
    rules = Policy({"a": "offload"}, min_offload_bytes=0)
    with jax.set_mesh(auto_mesh(stage=2)):
        step = accumulate(lambda w, x: loss(x, w, rules), stages="stage")
        found = predicted(step, of(8, 20, 30), of(microbatches, 100, 20))
    assert [(loop.runs, loop.passes) for loop in found.loops] == [*together, (2, "forward"), (2, "backward")]
    assert {(loop.layers, loop.moved) for loop in found.loops} == {(4, 4)}


def test_accumulated_layers_that_differ_have_each_other_to_hide_behind(ends_copy_all):
    """On two devices. The first two layers offload, and one loop runs three; the last two offload nothing."""
    rules = dataclasses.replace(RULES, residuals={"a": "offload"}, offload_layers=2, resident_layers=0)
    rows = NamedSharding(auto(2), P(None, "d"))  # of each microbatch
    step = lambda w, x: accumulate(lambda w, x: loss(x, w, rules))(w, x)
    loops = predicted(step, ARGS[1], XS.update(sharding=rows)).loops
    assert [(loop.layers, loop.moved) for loop in loops] == [(2, 1), (1, 1), (2, 1), (3, 2), (3, 2)]
    copies = [(c.d2h_ms, c.h2d_ms) for loop in loops for c in loop.copies]
    rates = [(TWO.d2h, 0), (TWO.together, TWO.together), (0, TWO.h2d), (TWO.d2h, 0), (0, TWO.h2d)]
    assert copies == [pytest.approx([COPY / 2 / rate / 1e6 if rate else 0 for rate in each]) for each in rates]


def test_what_is_empty_is_not_copied():
    nothing = lambda x, w: (body(x, w)[0] + jnp.sum(tag(jnp.sin(x[:0]), "empty")), None)
    policy = Policy({"a": "offload", "empty": "offload"}, min_offload_bytes=0)
    found = predicted(lambda x, w: jnp.sum(scan(nothing, x, w, policy=policy)[0]), *ARGS)
    assert [c.residual for loop in found.loops for c in loop.copies] == ["a", "a"]


# ---- on several devices ----


def auto(size):
    return AbstractMesh((size,), ("d",), axis_types=(AxisType.Auto,))


def on(mesh, *specs):
    return [a.update(sharding=NamedSharding(mesh, spec)) for a, spec in zip(ARGS, specs, strict=True)]


@pytest.mark.parametrize("constrained", [False, True])
def test_what_an_axis_replicates_is_copied_whole_as_the_table_says(constrained):
    """The argument's rows are divided over d alone; a constraint divides the value over both axes."""
    mesh = AbstractMesh((2, 5), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    divided = lambda a: lax.with_sharding_constraint(a, NamedSharding(mesh, P("d", "e"))) if constrained else a
    layer = lambda x, w: (jnp.cos(divided(tag(jnp.sin(x @ w), "a"))) @ w.T, None)
    f = lambda x, w: jnp.sum(scan(layer, x, w, policy=Policy({"a": "offload"}, min_offload_bytes=0))[0])
    args = on(mesh, P("d"), P())
    (copy,) = predicted(f, *args).loops[0].copies
    (row,) = (row for row in residuals(f, *args) if row.state == "offloaded" and row.kind == "value")
    assert copy.bytes == row.bytes_per_device / row.layers == COPY / (10 if constrained else 2)


def test_devices_share_what_moves_and_the_bus():
    rows = NamedSharding(auto(2), P("d"))
    layer = lambda x, w: body(lax.with_sharding_constraint(x, rows), w)
    f = lambda x, w: jnp.sum(scan(layer, x, w, policy=RULES)[0])
    one, two = predicted(loss, *ARGS), predicted(f, *on(auto(2), P("d"), P()))
    assert two.devices == 2 and two.host == one.host / 2 and two.memory.residuals == one.memory.residuals / 2
    assert two.memory.arguments == 8000 / 2 + 12000
    of_one, of_two = one.loops[0], two.loops[0]
    assert of_two.copies[0].bytes * 2 == of_one.copies[0].bytes
    assert of_two.copies[0].d2h_ms == pytest.approx(2 * of_one.copies[0].d2h_ms)  # half of it, at a quarter of the rate
    assert of_two.layer_ms == pytest.approx(of_one.layer_ms / 2)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_scan_inside_of_shard_map_has_a_devices_own_sizes(sharded):
    run = lambda x, w: scan(body, x, w, policy=RULES)[0]
    mapped = jax.shard_map(run, mesh=auto(2), in_specs=(P("d"), P()), out_specs=P("d"))
    args = on(auto(2), P("d"), P()) if sharded else ARGS
    found = predicted(lambda x, w: jnp.sum(mapped(x, w)), *args)
    assert found.loops[0].copies[0].bytes == COPY / 2 and found.host == LAYERS * 2 * COPY / 2


def test_collectives_in_a_scan_inside_of_shard_map_take_those_of_their_axis():
    mesh, size = AbstractMesh((2, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2), 100 * 20 * 4
    machine = dataclasses.replace(MACHINE, link=LINK)

    def forward_ms(between):
        run = lambda x, w: scan(lambda x, w: body(between(x), w), x, w, policy=RULES)[0]
        mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        forward, _ = predict(lambda x, w: jnp.sum(mapped(x, w)), *ARGS, machine=machine).loops
        return forward.layer_ms

    summed = 1 / 2 * size * (1 / 4e9 + 1 / 2e9)
    assert forward_ms(lambda x: lax.psum(x, "d")) - forward_ms(lambda x: x) == pytest.approx(1e3 * summed, rel=1e-3)


def test_a_loop_inside_of_another_runs_as_often():
    inner = lambda x, w: scan(body, x, w, policy=RULES)  # runs again: the outer policy keeps nothing of it
    outer = lambda x, w: jnp.sum(scan(lambda x, w: (inner(x, w)[0], None), x, w, policy=Policy(), strict=False)[0])
    found = {n: predicted(outer, ARGS[0], of(n, *ARGS[1].shape)) for n in (1, 3)}
    assert [loop.runs for loop in found[3].loops] == [3 * loop.runs for loop in found[1].loops] and found[3].loops
    assert found[3].exposed_ms == pytest.approx(3 * found[1].exposed_ms, rel=1e-3)


def test_a_prediction_says_if_more_gpus_copy_than_were_measured():
    spread_over_4 = ARGS[0].update(sharding=NamedSharding(auto(4), P("d")))
    said = "(the bus was measured with 2 GPU(s) copying at once)"
    assert predicted(loss, spread_over_4, ARGS[1]).summary.endswith(said)
    assert said not in predicted(loss, spread_over_4, ARGS[1], policy=Policy()).summary  # copies nothing
    found = predicted(loss, spread_over_4, ARGS[1])
    on = lambda gpus, measured: dataclasses.replace(
        found, devices=gpus, machine=dataclasses.replace(MACHINE, gpus=measured)
    )
    copying = {each: "copying at once" in on(*each).summary for each in ((3, 2), (2, 2), (64, 8), (64, 2))}
    assert copying == {(3, 2): True, (2, 2): False, (64, 8): False, (64, 2): True}


# ---- collectives that the compiler adds ----

LINK = Link(4, (1, 2**40), (4.0, 4.0), (2.0, 2.0), (1.0, 1.0), beside=0.5)  # GB/s
B, D, H = 16, 32, 128
MESH = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
SPECS = {"in": P(None, "fsdp", "tensor"), "out": P(None, "tensor", "fsdp"), "scale": P()}
ROWS = NamedSharding(MESH, P(("data", "fsdp")))


def constrained(x):
    return lax.with_sharding_constraint(x, ROWS)


def sharded_loss(w, x, constrain=constrained):
    def layer(x, w):
        x = constrain(tag(x, "layer_input"))
        fc1 = tag((x * w["scale"].astype(x.dtype)[None]) @ w["in"].astype(x.dtype), "fc1")
        return x + constrain(jnp.tanh(fc1) @ w["out"].astype(x.dtype)), None

    return jnp.mean(scan(layer, x, w, policy=Policy(), strict=False)[0].astype(jnp.float32) ** 2)


def arrays(**specs):
    shapes = {"in": (LAYERS, D, H), "out": (LAYERS, H, D), "scale": (LAYERS, D)}
    w = {name: of(*shape, sharding=NamedSharding(MESH, (SPECS | specs)[name])) for name, shape in shapes.items()}
    return w, of(B, D, dtype=jnp.bfloat16, sharding=ROWS)


def scan_of(f, *args):
    """The scan of a step, or of a loss and its gradient by the first argument."""
    run = f if len(jax.tree.leaves(jax.eval_shape(f, *args))) > 1 else jax.grad(f)
    (found,) = scans_in(jax.make_jaxpr(run)(*args), spread(args))
    return found


@pytest.mark.claim("plan-collectives")
def test_weights_are_gathered_as_they_are_cast():
    args = arrays()
    found = scan_of(sharded_loss, *args)
    # bfloat16, half of it: `tensor` stays.
    matrix = Weight(bytes=2 * D * H / 2, parts=4, others=2, has_gradient=True)
    scale = Weight(bytes=2 * D, parts=1, others=8, has_gradient=True)
    assert list(weights_of(found, args)) == [matrix, matrix, scale]
    gather, scatter = (3 / 4 * D * H / rate for rate in (4e9, 2e9))
    summed = D * H / 4 / 2 * (1 / 2e9 + 1 / 4e9)  # over data
    of_scale = 7 / 8 * 2 * D * (1 / 2e9 + 1 / 4e9)
    expected = LINK.beside * (2 * (2 * gather + scatter + summed) + of_scale)
    assert collective_seconds(found, args, 16, LINK) == pytest.approx(expected)
    assert collective_seconds(found, args, 16, None) == collective_seconds(found, args, 32, LINK) == 0
    linked = predict(sharded_loss, *args, machine=dataclasses.replace(MACHINE, link=LINK))
    assert linked.computing_ms - predicted(sharded_loss, *args).computing_ms == pytest.approx(1e3 * LAYERS * expected)
    # A teacher's are not counted, nor in microbatches.
    xs = of(4, *args[1].shape, dtype=jnp.bfloat16, sharding=NamedSharding(MESH, P(None, ("data", "fsdp"))))
    distilled = lambda w, x: sharded_loss(w, x) + lax.stop_gradient(sharded_loss(w, 2 * x))
    for f in (sharded_loss, distilled):
        step = lambda w, xs, f=f: accumulate(f)(w, xs)
        ms = [
            predict(step, args[0], xs, machine=dataclasses.replace(MACHINE, link=on)).computing_ms
            for on in (LINK, None)
        ]
        assert ms[0] - ms[1] == pytest.approx(4 * 1e3 * LAYERS * expected)
    frozen = lambda x, w: sharded_loss(w, x)  # no gradients to reduce
    assert not any(w.has_gradient for w in weights_of(scan_of(frozen, *args[::-1]), args))


@pytest.mark.claim("plan-collectives")
@pytest.mark.parametrize("first", ["weights", "state"])
def test_nothing_is_gathered_that_does_not_divide_the_batch(first):
    """As in ZeRO-1, whichever of weights and state comes first among the arguments."""
    (state, x), (w, _) = arrays(), arrays(**{"in": P(None, None, "tensor"), "out": P(None, "tensor")})
    names = ("a", "b") if first == "weights" else ("b", "a")
    args = dict(zip(names, (w, state), strict=True)), x

    def step(all_, x):
        w, state = (all_[name] for name in names)
        return jax.tree.map(lambda s, g: s + g, state, jax.grad(sharded_loss)(w, x))

    assert [weight.parts for weight in weights_of(scan_of(step, *args), args)] == [1, 1, 1]
    assert divisions(args)[w["in"].shape] == (2, 1)
    # Where nothing says how the batch is divided, nothing is known.
    assert list(weights_of(scan_of(functools.partial(sharded_loss, constrain=lambda x: x), w, x), (w, x))) == []


@pytest.mark.claim("plan-collectives")
def test_weights_with_as_many_rows_as_the_batch_do_not_say_how_it_is_divided():
    def square(w, x):
        moved = lambda w: w | {"in": lax.with_sharding_constraint(w["in"], NamedSharding(MESH, P(None, "tensor")))}
        return sharded_loss(moved(w), x)

    w, _ = arrays()
    args = w, of(D, D, dtype=jnp.bfloat16, sharding=ROWS)
    assert [(weight.parts, weight.others) for weight in weights_of(scan_of(square, *args), args)] == [
        *[(4, 2)] * 2,
        (1, 8),
    ]


@pytest.mark.claim("plan-collectives")
@pytest.mark.parametrize(
    "name, axes, parts",
    [("tiny", [], {1, 2}), pytest.param("tiny-moe", ["mesh.expert=2"], {1, 2, 4}, marks=pytest.mark.slow)],
)
def test_the_reference_models_are_read(name, axes, parts):
    """Matrices are gathered over fsdp, except that experts stay where the expert axis puts them."""
    step, args, *_ = step_for(str(ROOT / f"configs/{name}.yaml"), "mesh.fsdp=2", *axes)
    *_, found = scans_in(jax.make_jaxpr(step)(*args), spread(args))
    weights = list(weights_of(found, args))
    assert {w.parts for w in weights} == parts and all(w.has_gradient for w in weights), weights


# ---- memory ----


def need(f, *args, donated=False):
    return step_bytes(jax.make_jaxpr(f)(*args).jaxpr, divisions(args), donated)


X, W = of(64, 32), of(32, 256)
STREAM, WIDE, SCALARS = 4 * 64 * 32, 4 * 64 * 256, 8


def test_what_is_fused_is_not_stored_and_what_lives_at_once_is():
    assert need(lambda x: jnp.sin(x) * 2 + 1, X) == STREAM
    assert need(lambda x, w: jnp.sum(jnp.sin(x @ w)), X, W) - WIDE < SCALARS  # the sum is fused with its operand
    assert need(lambda x, w: jnp.sin(x @ w) @ w.T, X, W) == WIDE + STREAM  # its sine is written over the first
    assert need(lambda x, w: jnp.sum((x @ w) * (jnp.sin(x) @ w)), X, W) - (2 * WIDE + STREAM) < SCALARS
    assert need(lambda x: (x.reshape(32, 64), x), X) == 0  # views
    branches = lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: jnp.sin(x @ w) @ w.T @ w, x)
    assert need(branches, X, W) == WIDE + STREAM  # of the larger branch, with its result


def test_values_are_divided_as_constraints_and_shard_maps_say():
    over_a, over_both = NamedSharding(AB, P("a")), NamedSharding(AB, P(("a", "b")))
    assert need(jnp.sin, X.update(sharding=over_a)) == STREAM / 4
    wide = lambda x, w: jnp.sum(lax.with_sharding_constraint(x @ w, over_a))
    assert need(wide, X, W) - WIDE / 4 < SCALARS

    def mapped(x, w):
        run = lambda x, w: (jnp.sin(x) + 1) @ w
        specs = {"in_specs": (P("a"), P()), "out_specs": P("a"), "axis_names": {"a"}}
        return jnp.sum(jax.shard_map(run, mesh=AB, check_vma=False, **specs)(x, w))

    assert need(mapped, X, W) - (STREAM + WIDE) / 4 < SCALARS
    # Over b, which is left to the compiler, rows are divided as the argument is; of the result nothing says it.
    assert need(mapped, X.update(sharding=over_both), W) - (STREAM / 8 + WIDE / 4) < SCALARS


AB = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("fields", [{}, {"resident_layers": 0}, {"offload_layers": 2}], ids=str)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_residuals_are_those_of_the_table_and_the_host_has_what_the_step_needs(fields, microbatches):
    """Two sets of them where microbatches interleave."""
    rules = dataclasses.replace(RULES, residuals={"a": "offload", "b": "save"}, **fields)
    f = functools.partial(loss, policy=rules)
    table = [row for row in residuals(f, *ARGS) if row.names or row.reason == "the carry of a scan"]
    size = lambda state: sum(row.bytes for row in table if row.state == state)
    args = ARGS if microbatches == 1 else (ARGS[1], of(microbatches, 100, 20))
    step = f if microbatches == 1 else accumulate(lambda w, x: f(x, w))
    found, sets = predicted(step, *args), 1 + (microbatches > 1)
    assert (found.memory.residuals, found.host) == (sets * size("saved"), sets * size("offloaded"))
    run = step if microbatches > 1 else jax.grad(step, (0, 1))
    assert found.host == need_of(jax.make_jaxpr(run)(*args)).bytes() > 0
    assert found.memory.arguments == sum(a.size * 4 for a in jax.tree.leaves(args))
    assert found.memory.total == sum(found.memory)


# ---- what is printed and refused ----


def test_what_is_wrong_is_said():
    for wrong in ("machines/h200.json", None):
        with pytest.raises(TypeError, match="predict: machine must be a Machine"):
            predict(jnp.sum, jnp.ones(8), machine=wrong)
    with pytest.raises(TypeError, match="predict: policy must be a"):
        predicted(jnp.sum, jnp.ones(8), policy={"a": "save"})


def test_the_text_has_the_numbers():
    found = predicted(loss, *ARGS)
    first, exposed, device, host, *loops = str(found).splitlines()
    assert first == found.summary == f"{found.step_ms:.1f} ms per step on 1 a GPU, predicted"
    assert exposed.strip() == f"{found.exposed_ms:.2f} ms of copies are exposed" and "by a rough estimate" in device
    assert host.strip() == "117.19 KiB in pinned host memory" and loops == [
        line for loop in found.loops for line in str(loop).splitlines()
    ]


def made(which):
    step = accumulated, (ARGS[1], XS)
    return {"loss": (loss, ARGS), "step": (*step, loss, ARGS), "step alone": step}[which]


def test_the_command_line_predicts_for_the_step(tmp_path, capsys):
    file = tmp_path / "machine.json"
    file.write_text(MACHINE.to_json())
    asked = lambda which, path=file: ["report", "test_predict:made", which, "--machine", str(path)]
    assert main(asked("loss")) == 0 and capsys.readouterr().out.endswith(f"{predicted(loss, *ARGS)}\n")
    assert main(asked("step")) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("residual") and shown.endswith(f"{predicted(accumulated, ARGS[1], XS)}\n")
    assert main(asked("step alone")[:3]) == 2
    assert "give the loss that it differentiates, with the arguments of one microbatch" in capsys.readouterr().err
    file.write_text("{}")
    for path, said in ((file, f"{file}: this is not what"), ("no.json", "No such file")):
        with pytest.raises(SystemExit, match="2"):
            main(asked("loss", path))
        assert said in capsys.readouterr().err
