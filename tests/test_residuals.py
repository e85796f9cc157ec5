"""residuals(): the table equals what autodiff keeps, to the byte; check() is tested with the rules (rule 5)."""

import contextlib
import gc
import math
import tracemalloc

import jax
import jax.numpy as jnp
import pytest
from autodiff import gradient, kept_bytes, saving
from common import assert_same_bits, normal, policy, run_each
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding

from jaxoffload import Policy, Residual, Residuals, accumulate, checkpoint, offload, residuals, scan, scope, tag
from jaxoffload._engine.host.need import need_of
from jaxoffload._engine.layers.layer import Layer
from jaxoffload._text import readable
from jaxoffload.proof._residuals.table import EMPTY

N, BATCH, DIM, HIDDEN = 4, 2, 8, 12
X = normal(0, (BATCH, DIM), jnp.bfloat16)
W = {
    "in": normal(1, (N, DIM, HIDDEN), jnp.bfloat16),
    "out": normal(2, (N, HIDDEN, DIM), jnp.bfloat16),
    "bias": normal(3, (N, 1, DIM)),
}
WIDE = BATCH * HIDDEN * 2  # bytes of a bfloat16 (BATCH, HIDDEN)


def body(x, w):
    x = tag(x, "layer_input")
    with scope("mlp"):
        h = tag({"gate": x @ w["in"], "up": jnp.sin(x) @ w["in"]}, "fc1")
        act = tag(jax.nn.silu(h["gate"]) * h["up"], "act")
        ids = tag(lax.top_k(act, 2)[1], "routing")
        act = act + jnp.take_along_axis(act, ids, 1).sum(-1, keepdims=True)
        return x + tag(act @ w["out"], "fc2") + w["bias"].astype(x.dtype), None


def model(rules, **fields):
    def loss(x, w):
        x, _ = scan(body, x, w, policy=policy(rules, **fields))
        head = jnp.exp(x.astype(jnp.float32))  # untagged: kept by JAX
        return jnp.sum(head * head)

    return loss


decisions = st.sampled_from(["save", "offload", "recompute"])
some_rules = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("layer_input", "fc1", "fc1.gate", "mlp/act", "fc2", "**"), decisions)
)
some_fields = st.fixed_dictionaries(
    {},
    optional={
        "resident_layers": st.integers(0, N + 1),
        "offload_layers": st.integers(0, N),
        "other_layers": st.sampled_from(["save", "recompute"]),
        "default": decisions,
        "dots": decisions,
    },
)


@pytest.mark.slow
@pytest.mark.claim("bytes")
@settings(max_examples=40, derandomize=True, deadline=None)
@given(some_rules, some_fields)
@pytest.mark.filterwarnings("ignore:jaxoffload. dots")
def test_totals_are_what_autodiff_keeps_to_the_byte(rules, fields):
    f = model(rules, **fields)
    table = residuals(f, X, W)
    assert (table.device_bytes, table.host_bytes) == kept_bytes(f, X, W)
    assert need_of(jax.make_jaxpr(gradient(f, (0, 1)))(X, W)).bytes() == table.host_bytes
    assert table.device_bytes == sum(r.bytes for r in table if r.state == "saved")
    rows = lambda r: 1 if r.kind == "padding" else r.layers
    assert all(r.bytes == rows(r) * r.bytes_per_layer for r in table)


def test_loops_that_are_not_ours_are_counted_as_they_are():
    """Only a scan's last carry is kept after it; of nested scans, every iteration of both."""
    w, x = jnp.ones((4, 16, 16)), jnp.ones((8, 32, 16))

    def loss(x, w, o):
        y, _ = lax.scan(lambda c, w: (c @ w + 1, None), x, w)
        return jnp.sum(y @ o)

    def microbatches(x, w, o):
        return lax.scan(lambda total, x: (total + loss(x, w, o), None), 0.0, jnp.stack([x, x]))[0]

    found = lambda f: [(r.shape, r.layers, r.bytes, r.reason) for r in residuals(f, x, w, jnp.ones((16, 3)))]
    one = 8 * 32 * 16 * 4
    assert found(loss) == [
        ((8, 32, 16), 4, 4 * one, "the carry of a scan"),
        ((8, 32, 16), 1, one, "the last carry of a scan"),
    ]
    assert found(microbatches) == [
        ((8, 32, 16), 8, 8 * one, "the carry of a scan, in a scan"),
        ((8, 32, 16), 2, 2 * one, "the last carry of a scan, in a scan"),
    ]


def _tower(x, w):
    x = tag(x, "layer_input")
    h = jnp.sin(tag(x @ w, "fc1"))
    return jnp.tanh(tag(jax.jit(lambda h: tag(h @ w, "fc2"))(h), "out")), jnp.sum(h)


def test_tags_in_a_scan_of_jaxs_are_noted():
    args = normal(0, (4, 8)), normal(1, (N, 8, 8))
    (note,) = residuals(lambda x, w: jnp.sum(lax.scan(_tower, x, w)[0] ** 2), *args).notes
    assert "no jaxoffload.Policy decides about layer_input: tags count in jaxoffload.scan" in note
    assert residuals(lambda x, w: jnp.sum(scan(_tower, x, w, policy=policy({}))[0] ** 2), *args).notes == ()


@pytest.mark.parametrize("kind", ["scan", "checkpoint", "jitted"])
def test_what_jaxs_checkpoint_keeps_under_a_policy_has_its_names(kind):
    """And the totals stay those of autodiff."""
    rules = policy({"fc1": "offload", "fc2": "save", "layer_input": "offload"}, default="recompute")
    step = jax.checkpoint(_tower, policy=rules)
    if kind == "scan":
        f, layers = (lambda x, w: jnp.sum(lax.scan(step, x, w)[0] ** 2)), N
    else:
        f, layers = (lambda x, w: jnp.sum(step(jnp.cos(x), w[0])[0] ** 2)), 1
    f = jax.jit(f) if kind == "jitted" else f
    args = normal(0, (4, 8)), normal(1, (N, 8, 8))
    table = residuals(f, *args)
    assert (table.device_bytes, table.host_bytes) == kept_bytes(f, *args)
    rows = {r.names: (r.state, r.layers, r.bytes, r.decision) for r in table if r.names}
    assert rows == {
        ("layer_input",): ("offloaded", layers, layers * 128, None),
        ("fc1",): ("offloaded", layers, layers * 128, None),
        ("fc2",): ("saved", layers, layers * 128, None),
    }
    assert "Wrap the loss, jaxoffload.offload(loss), and it is ours" in table.notes[-1] and len(table.notes) == 1
    assert "a jax.checkpoint has a Policy" not in str(residuals(offload(f), *args))
    named = jax.checkpoint(_tower, policy=saving("fc1"))  # a policy of JAX's
    assert ("fc1",) in {r.names for r in residuals(lambda x, w: named(x, w[0])[0], *args)}


def test_what_offload_leaves_is_in_the_notes():
    a, b = policy({"fc1": "save"}), policy({"fc1": "offload"})
    step = lambda x, w: (jax.checkpoint(_tower, policy=b)(jax.checkpoint(_tower, policy=a)(x, w)[0], w)[0], None)
    f = jax.jit(lambda x, w: jnp.sum(lax.scan(step, x, w)[0] ** 2))
    args = normal(0, (4, 8)), normal(1, (N, 8, 8))
    ours = jax.jit(offload(f))
    for _ in range(2):  # the second time, JAX remembers what it traced
        with pytest.warns(UserWarning, match="stays lax.scan"):
            table = residuals(ours, *args)
        first, *others = table.notes
        assert first.startswith(f"offload: a scan of {N} layers stays lax.scan: its layers are under 2 policies")
        assert not any("stays" in note for note in others)


# ---- per device ----


def _in_explicit_axes(mesh, x, w):
    def step(x, w):
        h = tag(jnp.einsum("bd,df->bf", x, w, out_sharding=jax.P("data", "model")), "fc1")
        return jnp.einsum("bf,fd->bd", jnp.sin(h), w.T, out_sharding=jax.P("data", None)), None

    x, w = jax.device_put((x, w), (jax.P("data", None), jax.P(None, None, "model")))
    return (lambda x, w: jnp.sum(scan(step, x, w, policy=RULES)[0] ** 2)), x, w


def _constrained(h, mesh):
    return lax.with_sharding_constraint(h, NamedSharding(mesh, jax.P("data", "model")))


def _in_auto_axes(mesh, x, w):
    step = lambda x, w: (jnp.sin(_constrained(tag(x @ w, "fc1"), mesh)) @ w.T, None)
    on_mesh = lambda a, *spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, jax.P(*spec)))
    x, w = on_mesh(x, "data"), on_mesh(w, None, None, "model")
    return (lambda x, w: jnp.sum(scan(step, x, w, policy=RULES)[0] ** 2)), x, w


def _by_jaxs_checkpoint(mesh, x, w):
    step = lambda x, w: (jnp.sin(_constrained(tag(x @ w, "fc1"), mesh)) @ w.T, None)
    x = jax.device_put(x, NamedSharding(mesh, jax.P("data")))
    return (lambda x, w: jnp.sum(lax.scan(jax.checkpoint(step, policy=RULES), x, w)[0] ** 2)), x, w


def _in_shard_map(mesh, x, w):
    def own(x, w):
        step = lambda x, w: (lax.psum(jnp.sin(tag(x @ w, "fc1")) @ w.T, "model"), None)
        return scan(step, x, w, policy=RULES)[0]

    specs = jax.P("data"), jax.P(None, None, "model")
    mapped = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=jax.P("data"))
    return (lambda x, w: jnp.sum(mapped(x, w) ** 2)), x, w


RULES = policy({"fc1": "offload"}, resident_layers=0)


@pytest.mark.claim("per-device")
@pytest.mark.parametrize("program", [_in_auto_axes, _in_explicit_axes, _by_jaxs_checkpoint, _in_shard_map])
def test_bytes_per_device_are_what_each_device_holds(program):
    """fc1 is divided by both axes, what the scan carries by one: (8, 16) and (8, 8), in N layers."""
    types = (AxisType.Explicit if program is _in_explicit_axes else AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), types, devices=jax.devices()[:4])
    x, w = normal(0, (8, 8)), normal(1, (N, 8, 16))
    with jax.set_mesh(mesh) if program is _in_explicit_axes else contextlib.nullcontext():
        f, *args = program(mesh, x, w)
        table = residuals(f, *args)
    each = {r.names: r.bytes_per_device for r in table if r.kind == "value" and r.layers == N}
    assert each == {("fc1",): N * 8 * 16 * 4 // 4, (): N * 8 * 8 * 4 // 2}
    assert dict(table.mesh) == {"data": 2, "model": 2}
    device = table.per_device
    assert device.host_bytes == sum(r.bytes_per_device for r in table if r.state == "offloaded")
    assert f"on each of 4 devices (data 2, model 2): device {readable(device.device_bytes)}" in str(table)


@pytest.mark.claim("what-is-where")
def test_a_row_says_what_where_why_and_how_much():
    table = residuals(model({"fc1": "offload", "mlp/fc1.up": "save", "act": "recompute"}), X, W)
    rows = {(r.names, r.state): r for r in table if r.kind != "padding"}
    gate = rows[("mlp/fc1.gate",), "offloaded"]
    assert (gate.shape, gate.dtype) == ((BATCH, HIDDEN), "bfloat16")
    assert (gate.bytes_per_layer, gate.layers, gate.bytes) == (WIDE, N - 1, (N - 1) * WIDE)
    assert (gate.decision, gate.reason, gate.kind) == ("offload", "fc1", "value")
    (empty,) = [r for r in table if r.kind == "padding"]
    assert (empty.names, empty.state, empty.layers, empty.bytes) == (("mlp/fc1.gate",), "offloaded", 0, WIDE)
    resident = rows[("mlp/fc1.gate",), "saved"]
    assert (resident.layers, resident.decision, resident.reason) == (1, "save", "resident")
    assert resident.kind == "overridden"
    assert {r.kind for r in table} == {"value", "padding", "overridden"}
    routing = rows[("mlp/routing",), "saved"]
    assert (routing.dtype, routing.bytes_per_layer) == ("int32", BATCH * 2 * 4)
    assert rows[("mlp/act",), "recomputed"].reason == "act"
    assert rows[("mlp/fc2",), "not needed"].bytes == 0


def test_untagged_residuals_are_shown_with_their_producer():
    table = residuals(model({}, resident_layers=0), X, W)
    untagged = {(r.shape, r.dtype): r.reason for r in table if r.decision is None}
    assert untagged[(BATCH, DIM), "float32"] == "output of exp"
    assert table.untagged_bytes == sum(r.bytes for r in table if r.decision is None) > 0


@pytest.mark.parametrize("given", [{}, "", {"fc1": "save"}])
def test_what_is_not_a_policy_is_refused_even_if_it_is_empty(given):
    with pytest.raises(TypeError, match=r"^residuals: policy must be a jaxoffload\.Policy, got"):
        residuals(lambda x: jnp.sum(x), X, policy=given)


@pytest.mark.parametrize("dtype, bits", [("uint2", 2), ("float4_e2m1fn", 4), ("float8_e8m0fnu", 8), ("bool", 8)])
def test_elements_of_less_than_a_byte_share_one_as_in_xlas_memory(dtype, bits):
    f = lambda x: jnp.sum(x * tag(lax.stop_gradient(x).astype(dtype), "h").astype(x.dtype))
    table = residuals(f, jax.ShapeDtypeStruct((3, 5), jnp.float32), policy=policy({"h": "save"}))
    assert [(row.bytes, row.count) for row in table] == [(math.ceil(15 * bits / 8), 1)]


@pytest.mark.parametrize(
    "inside",
    [jax.jit, jax.checkpoint, lambda f: checkpoint(f, policy=policy({}))],
    ids=["jit", "jax.checkpoint", "checkpoint"],
)
def test_a_value_that_no_layer_varies_is_kept_once_though_a_nested_call_reads_it(inside):
    """The call takes it beside what varies, and returns it as a residual of its own."""
    x, ws, scale = normal(0, (8, 8)), normal(1, (N, 8, 8)), jnp.ones((1, 8))

    def layer(x, w):
        y = jnp.sin(scale)
        return inside(jnp.multiply)(w, y) + x, tag(y, "scale")

    table = residuals(lambda x, ws: scan(layer, x, ws, policy=policy({"scale": "offload"}))[0], x, ws)
    (row,) = [r for r in table if r.names == ("scale",)]
    assert (row.layers, row.bytes, table.host_bytes) == (1, 8 * 4, 0)


@pytest.mark.parametrize("place, decision", [("xs", "offload"), ("constant", "save"), ("carry", "offload")])
def test_a_checkpoint_around_a_scan_keeps_nothing_that_the_forward_pass_alone_reads(place, decision):
    """As around `lax.scan`. A `more` that is computed is no argument, which would exist anyway."""

    def loss(run):
        def f(w, x, given):
            more = lax.stop_gradient(jnp.cos(given))

            def scanned(w, x, more):
                def layer(carry, row):
                    x, passed = carry
                    value = {"xs": row["more"], "constant": more, "carry": passed}[place]
                    return (x + jnp.sin(tag(x @ row["w"], "h")), 2 * passed), 2 * value

                rows = jnp.stack([more] * N)
                return run(layer, (x, more), {"w": w, "more": rows})

            (x, last), ys = jax.checkpoint(scanned)(w, x, more)
            return jnp.sum(x) + jnp.sum(last) + jnp.sum(ys)

        return f

    args = normal(0, (N, 8, 8)), normal(1, (2, 8)), normal(2, (2, 8))
    ours = loss(lambda f, *args: scan(f, *args, policy=policy({"h": decision})))
    plain = loss(lambda f, *args: lax.scan(jax.checkpoint(f, policy=saving("h")), *args))
    assert residuals(ours, *args).device_bytes == kept_bytes(plain, *args)[0] == 0
    assert_same_bits(*run_each([gradient(ours), gradient(plain)], *args))


@pytest.mark.claim("empty-row")
def test_printed():
    text = str(residuals(model({"fc1.gate": "offload"}), X, W))
    lines = text.splitlines()
    assert lines[0].split() == ["residual", "shape", "bytes/layer", "layers", "bytes", "state", "reason"]
    gate, empty = [line for line in lines if line.startswith("mlp/fc1.gate") and "offloaded" in line]
    assert gate.split() == f"mlp/fc1.gate bfloat16[2,12] {WIDE} B 3 {3 * WIDE} B offloaded fc1.gate".split()
    assert empty.split() == f"mlp/fc1.gate bfloat16[2,12] {WIDE} B 0 {WIDE} B offloaded {EMPTY}".split()
    assert lines[-1].startswith("device ") and f"host {4 * WIDE} B" in lines[-1]


def test_the_smallest_untagged_values_are_one_line():
    """Also on a mesh; the rows stay."""

    def row(name, size, parts):
        return Residual((name,) * bool(name), (size,), "int8", size, 1, size, "saved", None, "x", parts=parts)

    table = Residuals((row("fc1", 1000, 2), row("", 9, 2), row("", 200, 2), row("", 6, 1)), mesh=(("data", 2),))
    words = lambda line: " ".join(line.split())
    *_, kept, small, total, _ = str(table).splitlines()
    assert words(kept) == "(untagged) int8[200] 200 B 1 200 B 100 B saved x"
    assert words(small) == "(untagged) 2 smaller values 15 B 11 B saved under 1 % each"
    assert total.startswith("device 1.19 KiB") and len(list(table)) == 4
    assert "smaller values" not in str(Residuals(table.rows[:3]))


def test_the_total_says_that_what_runs_again_without_a_name_is_not_in_it():
    """A matmul is recomputed for the sine's derivative."""
    f = checkpoint(lambda x, w: jnp.sin(tag(x, "h") @ w), policy=policy({"h": "save"}))
    table = residuals(f, normal(0, (2, 8)), normal(1, (8, 8)))
    assert "recomputed 0 B of named values" in str(table)


@pytest.mark.claim("report-at-full-size")
def test_nothing_is_allocated_or_run():
    """A model of 70 billion parameters."""

    def big(x, w):
        step = lambda x, w: (jnp.sin(tag(x @ w["in"], "fc1")) @ w["out"], None)
        return jnp.sum(scan(step, x, w, policy=Policy({"fc1": "offload"}))[0].astype(jnp.float32))

    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    args = struct(8, 8192, 8192), {"in": struct(80, 8192, 53248), "out": struct(80, 53248, 8192)}
    tracemalloc.start()
    table = residuals(big, *args)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.host_bytes == 80 * 8 * 8192 * 53248 * 2  # one row is empty
    assert peak < 100 * 2**20


def test_a_plan_is_freed_with_its_function():
    """A program that traces a new function each time must not grow."""

    def layers_after(number):
        step = lambda x, w: (x + number * jnp.sin(tag(x @ w, "a")), None)
        loss = lambda x, w: jnp.sum(scan(step, x, w, policy=policy({"a": "offload"}))[0])
        jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 4)), jnp.ones((3, 4, 4)))
        jax.make_jaxpr(accumulate(loss))(jnp.ones((2, 4)), jnp.ones((5, 3, 4, 4)))
        jax.clear_caches()
        gc.collect()
        return sum(isinstance(thing, Layer) for thing in gc.get_objects())

    first, *_, last = map(layers_after, range(1, 5))
    assert first == last
