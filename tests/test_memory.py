"""The host pool, the compiler's options, and versions that are refused."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from autodiff import gradient, kept_bytes
from common import auto_mesh, normal, policy

import jaxoffload
from jaxoffload import HostPoolFull, accumulate, chain, check, checkpoint, compiler_options, residuals, scan, tag
from jaxoffload._text import readable
from jaxoffload.proof import exact_options

N, ONE = 6, 4 * 8 * 4  # layers; bytes of a float32 (4, 8)
X, WS = normal(0, (4, 8)), normal(1, (N, 8, 8))


def body(x, w):
    return jnp.sin(tag(x @ w, "fc1")), None


def stack(**fields):
    rules = policy({"fc1": "offload"}, **{"resident_layers": 0, **fields})
    return lambda x, w: scan(body, x, w, policy=rules)[0]


@pytest.fixture
def pool(monkeypatch):
    """Sets the pinned host pool, in bytes per device."""
    return lambda n: monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(n / 2**30))


@pytest.mark.claim("host-pool")
def test_a_pool_that_is_too_small_is_an_error_before_anything_is_compiled(pool):
    pool((N + 1) * ONE - 8)
    with pytest.raises(MemoryError, match=r"scan: 6 layer\(s\).*offload_layers: 5.*on_host_full: save"):
        jax.make_jaxpr(gradient(stack()))(X, WS)
    with pytest.raises(
        HostPoolFull, match=r"checkpoint: would offload 128 B per device.*holds 120 B; offload less, set"
    ) as full:
        pool(ONE - 8)
        jax.make_jaxpr(gradient(one))(X, WS[0])
    assert (full.value.need, full.value.pool, full.value.layers) == (ONE, ONE - 8, None)
    with pytest.raises(HostPoolFull) as full:
        pool(3 * ONE)
        residuals(stack(), X, WS)
    assert (full.value.need, full.value.pool, full.value.layers) == ((N + 1) * ONE, 3 * ONE, 2)


def test_on_host_full_save_offloads_fewer_layers_with_one_warning(pool):
    pool(4 * ONE)
    f = stack(on_host_full="save")
    with pytest.warns(UserWarning, match="enough for 3") as seen:
        table = residuals(f, X, WS)
    assert len(seen) == 1
    assert table.host_bytes == 4 * ONE  # with a padding row
    assert [r.layers for r in table if r.reason == "other_layers"] == [3]


def test_on_host_full_save_keeps_a_checkpoint_on_the_device(pool):
    pool(ONE - 8)
    f = checkpoint(lambda x, w: body(x, w)[0], policy=policy({"fc1": "offload"}, on_host_full="save"))
    with pytest.warns(UserWarning, match="all of it stays on the device"):
        assert kept_bytes(f, X, WS[0]) == (ONE, 0)


def one(x, w):
    return checkpoint(lambda x, w: body(x, w)[0], policy=policy({"fc1": "offload"}))(x, w)


CALLS = pytest.mark.parametrize(
    "f, w, need", [(stack(), WS, (N + 1) * ONE), (one, WS[0], ONE)], ids=["scan", "checkpoint"]
)


@CALLS
def test_the_pool_is_looked_at_whenever_the_function_is_traced(pool, f, w, need):
    """Although plans are cached."""
    for _ in range(2):
        pool(need)
        jax.make_jaxpr(gradient(f))(X, w)
        pool(need - 8)
        with pytest.raises(MemoryError):
            jax.make_jaxpr(gradient(f))(X, w)


@functools.cache
def four_by_two():
    """A mesh, made inside the test: `make test-gpu` imports this file where there are fewer devices."""
    return auto_mesh(a=4, b=2)


@pytest.mark.claim("host-pool")
@CALLS
def test_sizes_are_a_devices_own_inside_shard_map_and_whole_where_nothing_says_what_divides(pool, f, w, need):
    P = jax.P
    local = jax.shard_map(f, mesh=four_by_two(), in_specs=(P("a"), P()), out_specs=P("a"))
    partly = jax.shard_map(f, mesh=four_by_two(), in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"})
    with jax.set_mesh(four_by_two()):
        for g, bytes_a_device, compiler_divides in (
            (f, need, True),
            (local, need // 4, False),
            (partly, need // 4, True),
        ):
            pool(bytes_a_device)
            jax.make_jaxpr(gradient(g))(X, w)
            pool(bytes_a_device - 1)
            with pytest.raises(MemoryError, match=f"would offload {bytes_a_device} B per device") as error:
                jax.make_jaxpr(gradient(g))(X, w)
            assert ("with_sharding_constraint" in str(error.value)) == compiler_divides


def needs(pool, f, *args):
    """Return the bytes per device that the error states."""
    pool(1)
    with pytest.raises(MemoryError) as error:
        jax.make_jaxpr(gradient(f))(*args)
    return int(re.search(r"would offload (\d+) B per device", str(error.value))[1])


@pytest.mark.claim("host-pool")
@pytest.mark.parametrize(
    "specs, divided",
    [
        ({"fc1": ("a",)}, 4),
        ({"fc1": (("a", "b"),)}, 8),
        ({"fc1": (None, "b")}, 2),
        ({"fc1": ()}, 1),  # whole on each device
        ({"fc1": ("a", "b"), "again": (None, "b")}, 2),  # the smaller one, whichever of the two is stored
        ({"out": ("a", "b")}, 4),  # fc1 has no constraint, but another value with as many rows has one
        ({"out": ("a",), "sum": ()}, 1),
        ({"w": ("b",)}, 1),  # a weight's, whose first axis is not the batch
    ],
    ids=repr,
)
def test_constraints_say_how_the_compiler_divides(pool, specs, divided):
    """Under `set_mesh`, or of a mesh that is not set. `X` has 4 rows, a weight 8. Axis `a`, of 4 devices, splits the
    batch; axis `b`, of 2, the features."""

    def constrain(x, name):
        if name not in specs:
            return x
        spec = jax.P(*specs[name])
        return jax.lax.with_sharding_constraint(x, spec if as_specs else jax.NamedSharding(four_by_two(), spec))

    def layer(x, w):
        fc1 = constrain(constrain(tag(x @ constrain(w, "w"), "fc1"), "fc1"), "again")
        return constrain(x + constrain(jnp.sin(fc1), "out"), "sum"), None

    def stack(x, w):
        return scan(layer, x, w, policy=policy({"fc1": "offload"}, resident_layers=0))[0]

    def function(x, w):
        return checkpoint(lambda x, w: layer(x, w)[0], policy=policy({"fc1": "offload"}))(x, w)

    as_specs = divided % 4 == 0
    with jax.set_mesh(four_by_two()) if as_specs else contextlib.nullcontext():
        assert needs(pool, stack, X, WS) == (N + 1) * ONE // divided
        assert needs(pool, function, X, WS[0]) == ONE // divided


def test_explicit_axes_say_how_they_divide_in_the_values_type(pool):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.P("a"))
        assert needs(pool, stack(), x, WS) == (N + 1) * ONE // 4
        with pytest.raises(MemoryError) as error:
            jax.make_jaxpr(gradient(stack()))(x, WS)
        assert "with_sharding_constraint" not in str(error.value)


LENIENT = policy({"fc1": "offload"}, resident_layers=0)


def stacks(x, w, rules=LENIENT):
    """Two scans, one after another."""
    for _ in range(2):
        x, _ = scan(body, x, w, policy=rules, strict=False)
    return jnp.sum(x)


def derived(f):
    """Ways in which a step differentiates `f`, which has two stacks, each with the rows of `ONE` bytes that the host
    then holds."""
    one, both = jax.grad(f, 1), 2 * (N + 1)

    def over(unroll, count=6):
        def step(x, w):
            add = lambda total, x: (total + one(x, w), None)
            return jax.lax.scan(add, w, jnp.stack([x] * count), unroll=unroll)[0]

        return step

    single = over(1, count=1)
    return {
        "jitted": (jax.jit(one), both),
        "microbatches": (over(1), both),  # each frees its residuals before the next
        "unrolled": (over(2), 2 * both),
        # XLA allocates the stacks of both gradients before it computes either.
        "one after another": (lambda x, w: one(x, w - one(x, w)), 2 * both),
        "single ones, which XLA inlines": (lambda x, w: single(x, single(x, w)), 2 * both),
        "a loop and a gradient": (lambda x, w: over(1)(x, one(x, w)), 2 * both),
        "either": (lambda x, w: jax.lax.cond(x[0, 0] > 0, one, lambda x, w: w, x, w), both),
    }


@pytest.mark.claim("host-pool")
@pytest.mark.parametrize("which", derived(stacks))
def test_a_step_is_judged_as_a_whole(pool, which):
    step, rows = derived(stacks)[which]
    pool(rows * ONE)
    check(step, X, WS, policy=LENIENT)
    pool(rows * ONE - 8)
    with pytest.raises(
        MemoryError, match=f"check: all together would offload {readable(rows * ONE)} per device; .* holds"
    ):
        check(step, X, WS, policy=LENIENT)
    jax.make_jaxpr(step)(X, WS)  # each scan alone fits


@pytest.mark.claim("host-pool")
def test_a_loss_is_judged_by_its_gradient_and_the_advice_is_for_all_of_it(pool):
    both = 2 * (N + 1) * ONE
    for judge in (lambda f: check(f, X, WS, policy=LENIENT), lambda f: residuals(f, X, WS)):
        pool(both)
        judge(stacks)
        pool(both - 8)
        jax.make_jaxpr(gradient(stacks))(X, WS)
        with pytest.raises(
            MemoryError, match=rf"would offload {readable(both)} .*offload less \(offload_layers: {N - 1}\)"
        ):
            judge(stacks)
        pool(2 * 2 * ONE)
        with pytest.raises(MemoryError, match=r"scan: .*offload_layers: 3\)"):
            jax.make_jaxpr(gradient(stacks))(X, WS)  # which sees one scan at a time
        with pytest.raises(MemoryError, match=r"all together .*offload_layers: 1\)"):
            judge(stacks)
    pool(2 * 2 * ONE)
    fewer = policy({"fc1": "offload"}, resident_layers=0, offload_layers=1)
    check(lambda x, w: stacks(x, w, fewer), X, WS, policy=fewer)
    jax.make_jaxpr(stacks)(X, WS)  # a forward pass needs nothing


@pytest.mark.claim("host-pool")
def test_scans_chains_and_checkpoints_count_together_and_what_vmap_makes_of_them(pool):
    f = lambda x, w: body(x, w)[0]

    def mixed(x, w):
        x = checkpoint(f, policy=LENIENT, strict=False)(x, w[0])
        x = chain([f, f], x, list(w[:2]), policy=LENIENT, strict=False)
        x = jax.checkpoint(f, policy=LENIENT)(x, w[0])
        return jnp.sum(scan(body, x, w, policy=LENIENT, strict=False)[0])

    rows = 1 + 2 + 1 + N + 1
    table = residuals(mixed, X, WS)
    assert table.host_bytes == rows * ONE
    batched = jax.vmap(jax.grad(mixed, 1), (0, None))
    for g, x, need in ((jax.grad(mixed, 1), X, rows * ONE), (batched, jnp.stack([X] * 3), 3 * rows * ONE)):
        pool(need)
        check(g, x, WS, policy=LENIENT)
        pool(need - 8)
        with pytest.raises(MemoryError, match="check: all together"):
            check(g, x, WS, policy=LENIENT)


@pytest.mark.claim("host-pool")
@pytest.mark.parametrize(
    "kind, scans", [("checkpoint", True), ("chain", True), ("jax.checkpoint", True), ("chain", False)]
)
def test_what_accumulate_runs_beside_its_scans_counts(pool, kind, scans):
    """Before a scan it is on the host for two microbatches, if they interleave; behind all scans for one."""
    f = lambda x, w: body(x, w)[0]
    beside = {
        "checkpoint": checkpoint(f, policy=LENIENT, strict=False),
        "chain": lambda x, w: chain([f], x, [w], policy=LENIENT, strict=False),
        "jax.checkpoint": jax.checkpoint(f, policy=LENIENT),
    }[kind]
    stays = policy({"fc1": "save"})
    stack = lambda x, w: scan(body, x, w, policy=LENIENT if scans else stays)[0]

    def loss(w, x):
        x = stack(beside(x, w[0]), w)
        return jnp.sum(beside(x, w[0]))

    need = (3 + 2 * (N + 1) if scans else 2) * ONE
    step, x = accumulate(loss), jnp.stack([X] * 3)
    pool(need)
    check(step, WS, x, policy=LENIENT)
    pool(need - 8)
    with pytest.raises(MemoryError, match=f"{readable(need)} per device"):
        check(step, WS, x, policy=LENIENT)
    if scans:  # `accumulate` itself, too
        with pytest.raises(MemoryError, match=f"^accumulate: two microbatches offload {readable(need)} per device"):
            jax.make_jaxpr(step)(WS, x)


def test_what_stages_run_beside_their_layers_counts(pool):
    """Eight layers on two stages: 4 slots of 4 layers and a row of padding; and what one microbatch has beside."""
    layers = jnp.ones((8, *WS.shape[1:]))
    beside = checkpoint(lambda x, w: body(x, w)[0], policy=LENIENT, strict=False)
    loss = lambda w, x: jnp.sum(scan(body, beside(x, w[0]), w, policy=LENIENT)[0])
    x = jnp.stack([X] * 3)
    with jax.set_mesh(auto_mesh(stage=2)):
        step = accumulate(loss, stages="stage")
        pool(20 * ONE)
        with pytest.raises(MemoryError, match=r"and what stands beside their layers, offload 2\.62 KiB per device"):
            jax.make_jaxpr(step)(layers, x)
        pool(21 * ONE)
        jax.make_jaxpr(step)(layers, x)


@pytest.mark.claim("host-pool")
@pytest.mark.parametrize("decision", ["offload", "save"])
def test_what_the_layers_of_an_interleaved_scan_run_again_counts(pool, decision):
    """A layer's inner scan offloads where it runs again, perhaps beside that of a layer of another microbatch."""
    outer = policy({"out": decision}, resident_layers=0)

    def layer(x, w):
        x, _ = scan(body, x, jnp.stack([w] * 2), policy=LENIENT, strict=False)
        return jnp.sin(tag(x @ w, "out")), None

    loss = lambda w, x: jnp.sum(scan(layer, x, w, policy=outer)[0])
    need = (2 * (N + 1) + 2 * 3 if decision == "offload" else 3) * ONE
    pool(need)
    check(accumulate(loss), WS, jnp.stack([X] * 3), policy=outer)
    pool(need - 8)
    with pytest.raises(MemoryError, match=f"offload {readable(need)} per device"):
        check(accumulate(loss), WS, jnp.stack([X] * 3), policy=outer)


def test_compiler_options_are_xlas_on_gpu_and_empty_on_cpu():
    assert compiler_options() == compiler_options("cpu") == {}
    options = compiler_options("gpu")
    assert "DYNAMIC" not in options["xla_gpu_enable_command_buffer"]
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert b'costs { name: "dynamic-slice-start.2.double_buffer_clone" cost_us: 1e+06 }' in options["fdo_profile"]
    for copy in ("dynamic-slice-start", "dynamic-update-slice-start"):  # four stages have 1540 of the latter
        for clone, us in ("", "1e+06"), (".0.double_buffer_clone", "1e+06"), (".0.peeled_double_buffer", "15000"):
            assert f'costs {{ name: "{copy}.2000{clone}" cost_us: {us} }}'.encode() in options["fdo_profile"]
    assert len({*options["fdo_profile"].splitlines()}) == options["fdo_profile"].count(b"\n") < 40_000  # 4 us each
    assert b'"copy-start.1.0" cost_us: 12500 }' in compiler_options("gpu", copy_ms=12.5)["fdo_profile"]
    for wrong in (0, -1.0, float("inf"), float("nan"), True):
        with pytest.raises(ValueError, match=rf"copy_ms must be milliseconds, .*; got {wrong}"):
            compiler_options("gpu", copy_ms=wrong)
    assert compiler_options("gpu") is not compiler_options("gpu")  # a caller may modify its copy
    assert compiler_options("cuda") == options and compiler_options("tpu") == compiler_options("rocm") == {}
    with pytest.raises(ValueError, match=r"compiler_options: backend 'GPUU' is not one of cpu, gpu.*nearest is 'gpu'"):
        compiler_options("GPUU")
    with pytest.raises(ValueError, match=r"exact_options: backend '' is not one of cpu, gpu"):
        exact_options("")


@pytest.mark.claim("xla-flags")
def test_the_options_as_flags_and_a_file(tmp_path):
    options, path = compiler_options("gpu", copy_ms=7), tmp_path / "copies.pbtxt"
    flags = dict(flag.removeprefix("--").split("=") for flag in jaxoffload.write_xla_flags(path, copy_ms=7).split())
    assert path.read_bytes() == options.pop("fdo_profile")
    assert flags.pop("xla_gpu_pgle_profile_file_or_directory_path") == str(path)
    assert flags == {name: {"True": "true"}.get(str(value), str(value)) for name, value in options.items()}
    for wrong in "copies.txt", "my copies.pbtxt":
        with pytest.raises(ValueError, match=r"use a name that ends in .pbtxt, no spaces"):
            jaxoffload.write_xla_flags(tmp_path / wrong)


@pytest.mark.gpu
def test_compiler_options_are_accepted_and_the_plan_frees_what_it_moves():
    """By XLA's own accounts: device temporaries shrink by the residuals, which become host temporaries."""
    x, w = normal(0, (4096, 1024)), normal(1, (N, 1024, 1024))
    size = 4096 * 1024 * 4

    def memory(decision):
        rules = policy({"fc1": decision}, resident_layers=0)
        f = gradient(lambda x, w: scan(body, x, w, policy=rules)[0], (0, 1))
        return jax.jit(f, compiler_options=compiler_options()).lower(x, w).compile().memory_analysis()

    saved, offloaded = memory("save"), memory("offload")
    assert saved.host_temp_size_in_bytes == 0
    assert offloaded.host_temp_size_in_bytes == (N + 1) * size  # one row is padding
    freed = saved.temp_size_in_bytes - offloaded.temp_size_in_bytes
    # Less one or two buffers in flight, because of double buffering and the copies.
    assert (N - 3) * size <= freed <= N * size + 2**16  # buffers are aligned


@pytest.mark.claim("wrong-gradients")
def test_the_gate_is_asked_though_plans_are_remembered(monkeypatch):
    f = checkpoint(lambda x, w: jnp.sin(tag(x @ w, "fc1")), policy=policy({"fc1": "offload"}))
    jax.make_jaxpr(gradient(f))(X, WS[0])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jaxlib, "__version__", "0.11.1")
    with pytest.raises(NotImplementedError, match=r"install jaxlib >= 0.11.2"):
        jax.make_jaxpr(gradient(f))(X, WS[0])
