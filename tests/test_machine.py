"""machine(): what it measures, by which jaxprs get their seconds, and how a measurement is stored."""

import dataclasses
import json
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ROOT
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxoffload import machine, proof, tag
from jaxoffload._engine.cost.cost import attention_flops, cost
from jaxoffload.proof import AttentionRate, Bus, Gemms, Link, Machine
from jaxoffload.proof._command import main
from jaxoffload.proof._predict import machine as _machine
from jaxoffload.proof._predict import measure, numa

pytestmark = pytest.mark.claim("by-shape")

# Round numbers: a bfloat16 matmul of 10**9 FLOPs takes 1 ms; 10**6 bytes take 1 ms in memory, and 10 ms on the bus.
ONE, TWO = Bus(0.1, 0.05, 0.04), Bus(0.025, 0.05, 0.02)
MACHINE = Machine("a GPU", 2, "0", ONE, TWO, gemm_tflops=1.0, attention_tflops=(0.5, 0.25), hbm_gb_s=1.0)
MS_A_BYTE = 1e-6


def auto(size):
    return AbstractMesh((size,), ("d",), axis_types=(AxisType.Auto,))


def ms(f, *shapes, dtype=jnp.bfloat16, devices=1):
    jaxpr = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    return 1e3 * cost(jaxpr, MACHINE, devices).seconds


def moved(*elements, size=2):
    return pytest.approx(MS_A_BYTE * size * sum(elements))


def test_matmuls_take_their_flops_or_their_bytes():
    big, wide = (1000, 1000), (1000, 10)
    assert ms(jnp.dot, big, big) == pytest.approx(6.0)  # 2 ms of FLOPs, and 6 of bytes
    assert ms(lambda x, w: x @ w, (10_000, 1000), big) == pytest.approx(2 * (10_000_000 * 2 + 1_000_000) / 1e6)
    fast = dataclasses.replace(MACHINE, hbm_gb_s=1e9)
    jaxpr = jax.make_jaxpr(jnp.dot)(jnp.ones(big, jnp.bfloat16), jnp.ones(wide, jnp.bfloat16))
    assert 1e3 * cost(jaxpr, fast).seconds == pytest.approx(2 * 1000 * 1000 * 10 / 1e9, rel=1e-3)
    jaxpr = jax.make_jaxpr(jnp.dot)(jnp.ones(big), jnp.ones(wide))  # float32: half as fast
    assert 1e3 * cost(jaxpr, fast).seconds == pytest.approx(2 * 2 * 1000 * 1000 * 10 / 1e9, rel=1e-3)
    assert 1e3 * cost(jaxpr, fast, devices=4).seconds == pytest.approx(1000 * 1000 * 10 / 1e9, rel=1e-3)


def test_what_is_fused_is_read_once_and_written_once():
    n = (1000,)
    assert ms(lambda x: jnp.sin(x) * jnp.cos(x) + x, n) == moved(1000, 1000)
    assert ms(lambda x, y: x + y, n, n) == moved(3000)
    assert ms(lambda x: jnp.max(jnp.exp(x)), n) == moved(1000, 1)
    assert ms(lambda x: x.reshape(10, 100).T, n) == 0  # nothing is moved for it
    assert ms(lambda x: tag(jnp.sin(x), "a"), n) == moved(1000, 1000)
    assert ms(lambda x: lax.dynamic_slice(x, (3,), (10,)) + 1, n) == moved(10, 10)
    # Between two matmuls it is written for the second; the first wrote its own result.
    square = (100, 100)
    both = lambda x: jnp.sin(x @ x) @ x
    assert ms(both, square) == moved(3 * 10_000, 2 * 10_000, 3 * 10_000)


def test_what_goes_to_the_host_is_read_and_what_comes_back_is_written():
    to_host = lambda x: jax.device_put(x, jax.memory.Space.Host)
    assert ms(to_host, (1000,)) == moved(1000)
    assert ms(lambda x: jax.device_put(to_host(x), jax.memory.Space.Device), (1000,)) == moved(2000)

    def in_a_stack(x):
        stack = lax.dynamic_update_index_in_dim(to_host(jnp.zeros((7, 1000), x.dtype)), to_host(x), 3, 0)
        return jax.device_put(lax.dynamic_index_in_dim(stack, 2, keepdims=False), jax.memory.Space.Device)

    assert ms(in_a_stack, (1000,)) == moved(2000)


def test_kernels_and_loops_take_operands_as_they_are():
    taken = lambda f, *shapes: cost(jax.make_jaxpr(f)(*map(jnp.ones, shapes)), MACHINE).taken
    n, square = (100,), (100, 100)
    assert taken(lambda x, y, z: x.reshape(100, 10).T @ jnp.sin(y) + z, (1000,), square, (10, 100)) == (
        True,
        False,
        False,
    )
    assert taken(lambda x, y: lax.scan(lambda c, _: (c + 1, None), x + y, length=3)[0], n, n) == (False, False)
    assert taken(lambda x, y: lax.scan(lambda c, z: (c + z, None), x, y)[0], n, square) == (True, True)
    assert taken(jax.jit(lambda x, y: (jnp.cos(x), y @ y)), n, square) == (False, True)


def test_what_is_nested_counts_as_often_as_it_runs():
    x, body = (100,), lambda x: jnp.sin(x) + 1
    once = moved(200)
    assert ms(jax.jit(body), x) == once
    assert ms(lambda x: lax.scan(lambda c, _: (body(c), None), x, length=7)[0], x) == pytest.approx(7 * ms(body, x))
    longer = lambda x: lax.cond(x[0] > 0, body, lambda x: jnp.sort(body(x)), x)
    assert ms(longer, x) >= ms(lambda x: jnp.sort(body(x)), x) > ms(body, x)
    inside = jax.shard_map(body, mesh=auto(4), in_specs=P("d"), out_specs=P("d"))
    assert ms(inside, x, devices=4) == pytest.approx(ms(body, x) / 4)


def test_kernels_of_which_nothing_is_known_are_named():
    kernel = lambda x: jax.ffi.ffi_call("secret", jax.ShapeDtypeStruct((50,), jnp.float32))(x)
    found = cost(jax.make_jaxpr(kernel)(jnp.ones(100)), MACHINE)
    assert found.unknown and 1e3 * found.seconds == moved(150, size=4)
    assert not cost(jax.make_jaxpr(jnp.sort)(jnp.ones(100)), MACHINE).unknown


def test_grouped_gemms_and_attention_by_their_shapes():
    matmul = lambda x, w: jax.ffi.ffi_call("grouped", jax.ShapeDtypeStruct((10, 7), jnp.bfloat16))(x, w)
    jaxpr = jax.make_jaxpr(matmul)(jnp.ones((10, 5), jnp.bfloat16), jnp.ones((3, 5, 7), jnp.bfloat16))
    fast = dataclasses.replace(MACHINE, hbm_gb_s=1e9)
    found = cost(jaxpr, fast)
    assert not found.unknown and found.seconds == pytest.approx(2 * 10 * 5 * 7 / 1e12, rel=1e-3)
    assert attention_flops((2, 8, 3, 4), (2, 6, 1, 4), causal=False) == 2 * (2 * 2 * 3 * 8 * 6 * 4)
    assert attention_flops((2, 8, 3, 4), (2, 8, 1, 4), causal=True) == 2 * 2 * 3 * 8 * 8 * 4
    assert attention_flops((2, 8, 3, 4), (2, 8, 1, 4), causal=True, window=2) == 2 * (2 * 2 * 3 * 8 * 4) * (2 - 1 / 4)


# The same machine, measured by shape; its memory takes no time.
BY_SHAPE = dataclasses.replace(
    MACHINE,
    hbm_gb_s=1e9,
    fused_gb_s=1e9,
    gemms=Gemms(small=0.5, narrow=0.25, float32=0.2, grouped=0.125, grouped_narrow=0.1),
    attention=tuple(
        AttentionRate(width, length, forward, forward / 2)
        for width, length, forward in [(64, 1024, 0.1), (64, 4096, 0.3), (128, 2048, 0.5)]
    ),
    link=Link(4, (1000, 100_000), (1.0, 3.0), (0.5, 1.0), (0.25, 0.25), beside=0.5),
)


def rate(f, *shapes, devices=1):
    """TFLOP/s at which the matmul of two bfloat16 arrays is taken to run."""
    jaxpr = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    *_, (K, N) = shapes
    flops = 2 * shapes[0][0] * K * N
    return flops / devices / cost(jaxpr, BY_SHAPE, devices).seconds / 1e12


def test_matmuls_take_the_rate_of_their_shape():
    about = lambda rate: pytest.approx(rate, rel=1e-3)
    large, wider = (4096, 4096), lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32)
    assert rate(jnp.dot, large, large) == about(1.0)
    assert rate(jnp.dot, (16384, 4096), (4096, 1024)) == about(0.25)  # k and v
    assert rate(jnp.dot, (16384, 1024), (1024, 4096)) == about(0.25)  # and what their backward pass contracts
    assert rate(jnp.dot, (512, 4096), large) == about(0.5)  # few rows
    assert rate(jnp.dot, large, large, devices=4) == about(0.5)  # few on each device
    assert rate(wider, large, large) == about(0.2)
    matmul = lambda x, w: jax.ffi.ffi_call("grouped", jax.ShapeDtypeStruct((2048, w.shape[2]), jnp.bfloat16))(x, w)
    for columns, tflops in ((2048, 0.125), (1024, 0.1)):
        operands = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 4096), (3, 4096, columns)))
        found = cost(jax.make_jaxpr(matmul)(*operands), BY_SHAPE).seconds
        assert 2 * 2048 * 4096 * columns / found / 1e12 == about(tflops)


def test_attention_takes_the_rate_of_its_width_and_length():
    attending = BY_SHAPE.attending
    assert attending(128, 2048) == attending(256, 10**6) == (0.5, 0.25)
    assert attending(64, 100) == (0.1, 0.05) and attending(64, 10**6) == (0.3, 0.15)
    assert attending(64, 2048) == pytest.approx((0.2, 0.1))  # half-way, as lengths double
    assert MACHINE.attending(64, 2048) == MACHINE.attention_tflops


def test_fused_work_has_a_rate_of_its_own():
    fused = dataclasses.replace(MACHINE, fused_gb_s=0.5)
    both = jax.make_jaxpr(lambda x: jnp.sin(x @ x))(jnp.ones((100, 100), jnp.bfloat16))
    assert 1e3 * cost(both, fused).seconds == moved(3 * 10_000, 2 * 2 * 10_000)


def test_collectives_take_their_time_on_the_link():
    # Each device receives three quarters.
    link = BY_SHAPE.link
    assert link.seconds("all_gather", 1e6, 4) == pytest.approx(0.75 * 1e6 / 3e9)
    assert link.seconds("all_gather", 1e4, 4) == pytest.approx(0.75 * 1e4 / 2e9)  # half-way, as sizes double
    assert link.seconds("all_to_all", 1, 4) == link.seconds("all_to_all", 1000, 4) and link.seconds("x", 1e6, 1) == 0
    mesh = AbstractMesh((4, 1), ("d", "one"), axis_types=(AxisType.Auto,) * 2)

    def seconds(run, size=1_000_000, rates=BY_SHAPE):
        mapped = jax.shard_map(run, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
        jaxpr = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((4 * size,), jnp.bfloat16))
        return cost(jaxpr, rates, 4).seconds

    near = lambda seconds: pytest.approx(seconds, rel=1e-3)
    assert seconds(lambda x: lax.all_gather(x, "d", tiled=True)) == near(0.75 * 8e6 / 3e9)
    assert seconds(lambda x: lax.psum_scatter(x, "d", tiled=True)) == near(0.75 * 2e6 / 1e9)
    assert seconds(lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True)) == near(0.75 * 2e6 / 0.25e9)
    summed = near(0.75 * 2e6 * (1 / 3e9 + 1 / 1e9))
    assert seconds(lambda x: lax.psum(x, "d")) == summed and seconds(lambda x: lax.psum(x, "one")) < 1e-9
    assert seconds(lambda x: lax.pmax(x, "d")) == seconds(lambda x: lax.pmin(x, "d")) == summed
    received = near(2e6 / 0.25e9)  # a permutation leaves no part where it was
    assert seconds(lambda x: lax.ppermute(x, "d", [(k, (k + 1) % 4) for k in range(4)])) == received
    rows = jnp.zeros(4, jnp.int32)
    ragged = lambda x: lax.ragged_all_to_all(x, jnp.zeros_like(x), rows, rows, rows, rows, axis_name="d")
    assert seconds(ragged) == near(0.75 * 2e6 / 0.25e9)
    pairs = {"axis_name": "d", "axis_index_groups": [[0, 1], [2, 3]]}
    assert seconds(lambda x: lax.psum(x, **pairs)) == near(0.5 * 2e6 * (1 / 3e9 + 1 / 1e9))
    assert seconds(lambda x: lax.all_gather(x, tiled=True, **pairs)) == near(0.5 * 4e6 / 3e9)
    repeated = lambda x: lax.fori_loop(0, 5, lambda _, x: lax.psum(x, ("d", "one")), x)
    assert seconds(repeated) == near(5 * 0.75 * 2e6 * (1 / 3e9 + 1 / 1e9))
    # Without one they are copies in memory.
    assert seconds(lambda x: lax.psum(x, "d"), 1000, rates=MACHINE) == pytest.approx(1e-3 * moved(2000).expected)


def test_what_is_written_in_place_is_not_read_whole():
    cache, row = (1000, 100), (1, 100)
    into = lambda f: lambda c, *args: lax.dynamic_update_slice(c, f(*args), (3, 0))
    for f in (lambda x: x, jnp.tanh):  # the row is read, and written there
        assert ms(into(f), cache, row) == moved(200)
    assert ms(into(jnp.dot), cache, row, (100, 100)) == moved(100 + 10_000 + 100, 200)  # a kernel writes elsewhere
    assert ms(lambda c, x: c.at[jnp.array([3])].add(x), cache, row) < moved(1000).expected


def test_some_gpus_of_a_host_copy_at_rates_between_those_of_one_and_of_all():
    two, four = (Machine.from_json((ROOT / f"machines/{name}.json").read_text()) for name in ("h200", "four-h200"))
    assert (four.bus(1), four.bus(4), four.bus(8)) == (four.one, four.all, four.all)
    assert four.bus(2) == pytest.approx([(a + b) / 2 for a, b in zip(four.one, four.all, strict=True)])
    assert four.bus(2) == pytest.approx(two.all, rel=0.12)  # measured on other H200s
    assert two.bus(1) == two.one and two.bus(2) == two.bus(4) == two.all


def test_a_machine_comes_back_whole():
    for each in (MACHINE, BY_SHAPE):
        assert Machine.from_json(each.to_json()) == each
    wrong = BY_SHAPE.to_json().replace('"narrow": 0.25', '"narrow": -0.25')
    with pytest.raises(ValueError, match=r"-0\.25 is not a rate"):
        Machine.from_json(wrong)
    fields = json.loads(BY_SHAPE.to_json())
    short = fields["link"] | {"all_gather": [1.0]}, fields["link"] | {"sizes": [2000, 1000]}
    text = [
        {"gpus": "2"},
        {"hbm_gb_s": None},
        {"gemms": fields["gemms"] | {"small": "1"}},
        {"attention_tflops": [0.5, None]},
        *({name: []} for name in ("gpus", "hbm_gb_s", "gemm_tflops", "one", "gemms", "link", "attention_tflops")),
        {"gpus": [8]},
    ]
    for wrong in (*text, *({"link": each} for each in short)):
        with pytest.raises(
            ValueError, match=rf"prints: {next(iter(wrong))}: (.* is not a rate|needs sizes that ascend)"
        ):
            Machine.from_json(json.dumps(fields | wrong))
    for wrong in ("{}", "no json", "[]", json.dumps(json.loads(MACHINE.to_json()) | {"more": 1})):
        with pytest.raises(ValueError, match="not what `python -m jaxoffload machine` prints"):
            Machine.from_json(wrong)


def test_a_file_of_earlier_versions_has_one_number_for_all_shapes():
    bus = {"d2h": 53.5, "h2d": 53.5, "together": 41.0}
    fields = {"device": "NVIDIA H200", "gpus": 1, "jaxlib": "0.11.2", "one": bus, "all": bus, "gemm_tflops": 672.3}
    old = Machine.from_json(json.dumps(fields | {"attention_tflops": [581.9, 529.2], "hbm_gb_s": 3887.3}))
    assert (old.gemms, old.attention, old.fused_gb_s, old.link) == (None, (), None, None)
    assert old.gemm((1, 1, 1), 2.0) == old.gemm((10**4,) * 3, 1e15) == 672.3
    assert Machine.from_json((ROOT / "machines/h200.json").read_text()).device == "NVIDIA H200"


@pytest.mark.slow
def test_everything_is_measured_on_any_devices():
    """With tiny sizes: the numbers mean nothing."""
    found = _machine._measured(jax.local_devices()[:2], scale=128)
    assert Machine.from_json(found.to_json()) == found and found.gpus == min(2, jax.local_device_count())
    assert [attention[:2] for attention in found.attention] == [(64, 16), (64, 64), (128, 16), (128, 64)]
    assert found.attention_tflops == found.attention[-1][2:]
    assert (
        found.gemms.narrow > 0
        and found.fused_gb_s > 0
        and (found.gpus == 1 or (found.link.gpus == 2 and found.link.beside >= 0.01))
    )


@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("what", ["all_gather", "reduce_scatter", "all_to_all"])
def test_the_compiler_leaves_each_collective_that_is_measured(what):
    mesh = Mesh(np.asarray(jax.local_devices()[:2]), "d")
    for size, times in ((2**10, 16), (2**24, 4), (2**26, 1)):
        call, received = measure.collectives(what, mesh, size)
        assert received == times * size // 2
        compiled = call.func.lower(*call.args).compile().as_text()
        assert len(re.findall(rf" {what.replace('_', '-')}(?:-start)?\(", compiled)) == times


def test_the_command_line_measures(monkeypatch, capsys):
    assert main(["machine"]) == 2 and "machine: needs an NVIDIA GPU" in capsys.readouterr().err
    monkeypatch.setattr(proof, "machine", lambda: MACHINE)
    monkeypatch.setattr(numa, "places", lambda devices: places_of((None, {})))
    assert main(["machine"]) == 0
    said = capsys.readouterr()
    assert Machine.from_json(said.out) == MACHINE and "NUMA node" in said.err


def places_of(*nodes):
    """GPUs at these nodes, with memory on those."""
    return [numa.Place(gpu, node, Counter(pinned)) for gpu, (node, pinned) in enumerate(nodes)]


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """A machine with two NUMA nodes, a GPU at the second one, and a GPU of which no node is known."""
    for name in ("node0", "node1", "possible"):
        (tmp_path / name).mkdir()
    for bus_id, node in (("0000:1b:00.0", "1\n"), ("0000:2c:00.0", "-1\n")):
        (tmp_path / bus_id).mkdir()
        (tmp_path / bus_id / "numa_node").write_text(node)
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    monkeypatch.setattr(numa, "_PCI", tmp_path)
    return tmp_path


@pytest.mark.claim("numa")
def test_a_gpu_whose_memory_is_on_another_node_is_named_with_what_to_do(nodes):
    assert [numa.node_of(bus_id) for bus_id in ("0000:1b:00.0", "0000:2c:00.0", "0000:3d:00.0", "")] == [1, *[None] * 3]
    right = numa.summary(places_of((0, {0: 256}), (1, {1: 256})))
    assert (
        right.splitlines()[1] == "GPU 1: node 1; memory that is pinned for it: on node 1"
        and len(right.split("\n")) == 2
    )
    wrong = numa.summary(places_of((0, {0: 256}), (1, {0: 200, 1: 56}), (1, {0: 256})))
    assert "GPU 1: node 1; memory that is pinned for it: on node 0 and node 1" in wrong
    assert "Copies of GPU 1, 2 cross to another node" in wrong and "numactl --cpunodebind=NODE" in wrong
    silent = numa.summary(places_of((None, {}), (1, {1: 256})))
    assert "GPU 0: sysfs names no node; memory that is pinned for it: on a node that the kernel does not tell" in silent
    assert "XLA cannot pin memory near a GPU of which sysfs names no node. Start one process for each GPU" in silent
    (nodes / "node1").rmdir()
    assert numa.summary(places_of((None, {}))) == "This machine names no second NUMA node."


@pytest.mark.claim("numa")
def test_pages_are_on_nodes_of_this_machine():
    array = np.ones(2**20, np.uint8)
    found = numa.pages(array.ctypes.data, array.nbytes)
    if not found:
        pytest.skip("this machine's kernel does not tell")
    nodes = {int(node.name[4:]) for node in numa._NODES.glob("node[0-9]*")} or {0}
    assert found.keys() <= nodes and sum(found.values()) == 16
    assert numa.places(jax.local_devices()[:1])[0].node is None  # a CPU is at no PCI bus


@pytest.mark.gpu
def test_a_gpu_is_measured():
    found = machine()
    assert found.gpus == jax.local_device_count() and found.device == jax.devices()[0].device_kind
    rates = [*found.one, *found.all, found.gemm_tflops, *found.attention_tflops, found.hbm_gb_s]
    assert all(rate > 0 for rate in rates), found
    assert found.gemms and found.attention and found.fused_gb_s and (found.link is None) == (found.gpus == 1)
    places = numa.places(jax.local_devices())
    assert [place.gpu for place in places] == [*range(found.gpus)] and all(place.pinned for place in places)
    assert all(
        re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.0", numa._bus_id(gpu)) for gpu in jax.local_devices()
    )
