"""What XLA compiles for a GPU: copies are DMA beside the computation, in range, and on separate streams; matmuls run
once; memory falls by what is offloaded.

Nothing runs: see described_gpu.py.
"""

import os
import re
import sys
from collections import Counter, defaultdict
from subprocess import PIPE

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autodiff import gradient, in_a_loop
from common import PATIENCE, ROOT, needs_te
from described_gpu import OPTIONS, begun_after, compiled, gpu, matmuls, module_of, nothing_cached, two_gpus
from flax import nnx
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jax.extend.core import Var
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxoffload import (
    Policy,
    accumulate,
    chain,
    checkpoint,
    compiler_options,
    host_optimizer,
    scan,
    tag,
    write_xla_flags,
)
from jaxoffload._engine.host.need import need_of
from jaxoffload._engine.jaxprs import readers
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._engine.layers import passes, rows
from jaxoffload._engine.microbatches.interleaved import interleaved_p
from jaxoffload._tracing import as_reference
from jaxoffload.grouped import grouped_matmul
from jaxoffload.proof import memory_plan, scheduling_options
from jaxoffload.proof._program import hlo
from jaxoffload.proof._program import kernels as _kernels
from jaxoffload.proof._program import scheduling as _scheduling
from jaxoffload.proof._program.hlo import kernels_on_host_memory
from jaxoffload.proof._program.target import target_of
from jaxoffload.proof._verify import copies as _copies
from jaxoffload.proof._verify.conservation import conservation
from models import config
from models.attention import rotations
from models.config import Model
from models.sharding import RULES, make_mesh, on_mesh, param_shardings
from models.transformer import Layer, stacked

assert nothing_cached and gpu and two_gpus  # fixtures
pytestmark = [pytest.mark.gpu, pytest.mark.claim("what-xla-compiles")]

LAYERS, BATCH, DIM, HIDDEN = 8, 512, 256, 1024
ONE = BATCH * HIDDEN * 2  # bytes of one layer's fc1, bfloat16
STREAM = BATCH * DIM * 2  # bytes of one layer's input


def weights(*layers, dtype=jnp.float32):
    """Stacked, if `layers` says how many."""
    a, b, scale = (DIM, HIDDEN), (HIDDEN, DIM), (DIM,)
    return tuple(jax.ShapeDtypeStruct((*layers, *shape), dtype) for shape in (a, b, scale))


X = jax.ShapeDtypeStruct((BATCH, DIM), jnp.bfloat16)


def layer(x, w):
    a, b, scale = (p.astype(x.dtype) for p in w)
    x = tag(x, "layer_input")
    fc1 = tag((x * scale[None]) @ a, "fc1")
    return x + jnp.tanh(fc1) @ b, None


def twice(rules, **fields):
    """Two scans of equal shapes in one program; several of their stacks have equal shapes."""
    policy = Policy(rules, **{"min_offload_bytes": 0, **fields})

    def f(x, w):
        x, _ = scan(layer, x, w, policy=policy)
        return scan(layer, x * 2, w, policy=policy)[0]

    return gradient(f, (0, 1))


OFFLOADED = {"layer_input": "offload", "fc1": "offload"}


@pytest.fixture(scope="module")
def offloading(gpu):
    return compiled(gpu, twice(OFFLOADED), X, weights(LAYERS))


@pytest.fixture(scope="module")
def lines(offloading):
    return module_of(offloading)


@pytest.mark.claim("one-layer-later")
def test_the_copies_for_the_host_and_nothing_else_are_asynchronous(lines):
    """Two residuals there and back, in two scans, each with two layers per iteration (double buffering). All are DMA,
    and in range."""
    starts = [line for line in lines if line.opcode.endswith("-start")]
    assert len(starts) == 2 * 2 * 2 * 2
    assert all(line.on_host for line in starts)
    assert kernels_on_host_memory(lines) == [] and list(hlo.out_of_range(lines)) == []


@pytest.mark.parametrize(
    "layers, offloaded, fields",
    [
        (7, 4, {"resident_layers": 3}),
        (8, 3, {"offload_layers": 3, "other_layers": "recompute"}),
        (2, 1, {}),
        (1, 1, {"resident_layers": 0}),
    ],
)
def test_however_the_layers_are_divided(gpu, layers, offloaded, fields):
    program = compiled(gpu, twice(OFFLOADED, **fields), X, weights(layers))
    lines = module_of(program)
    assert list(kernels_on_host_memory(lines)) == []
    assert all(line.on_host for line in lines if line.opcode.endswith("-start"))
    assert not any('"byte_offset":"-' in line.text for line in lines)
    on_host = program.memory_analysis().host_temp_size_in_bytes
    assert 2 * offloaded * (ONE + STREAM) <= on_host <= 2 * (offloaded + 1) * (ONE + STREAM)


def at_any_time(aval, length, after=()):
    """Return a stack that XLA may allocate when it likes."""
    return rows.empty_stack(aval, length)


def filled_stacks(lines):
    """What XLA fills of stacks of layers before they are used."""
    return [line.shape for line in lines if line.opcode == "broadcast" and line.shape.startswith(f"bf16[{LAYERS},")]


@pytest.mark.parametrize("decision", ["save", "offload"])
def test_a_new_stack_is_not_written_before_it_is_used(gpu, decision, monkeypatch):
    """On one device. There it lives as long, and as many are copied, as if it were written."""
    of_one = lambda: compiled(gpu, twice({"layer_input": "save", "fc1": decision}), X, weights(LAYERS))
    program = of_one()
    monkeypatch.setattr(rows, "lowers_for_one_device", lambda ctx: False)
    written = of_one()
    assert filled_stacks(module_of(program)) == [] and len(filled_stacks(module_of(written))) >= 2
    count = lambda of: sum(line.opcode == "copy" for line in module_of(of))
    sizes = lambda of: (of.memory_analysis().temp_size_in_bytes, of.memory_analysis().host_temp_size_in_bytes)
    (device, host), (more, host_too) = sizes(program), sizes(written)
    assert count(program) == count(written) and host == host_too
    assert device <= more <= 1.0001 * device  # the numbers that fill stacks have buffers


@pytest.mark.parametrize("alone", [True, False], ids=["one device", "several"])
@pytest.mark.parametrize("scans", [1, 2])
def test_stacks_of_gradients_are_allocated_after_the_loss(gpu, scans, alone, monkeypatch):
    """And not beside its logits. Those of one shape, in one scan or in two, are not one stack and its copies."""
    if not alone:
        monkeypatch.setattr(rows, "lowers_for_one_device", lambda ctx: False)
    of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    tokens, layers, d, hidden, vocabulary = 8192, 32, 2048, 8192, 2**17
    up, down = of(layers, d, hidden), of(layers, hidden, d)

    def size_and_copies():
        def layer(carry, w):
            total, x = carry  # whose gradient is known before that of x
            gate, up, down = (p.astype(x.dtype) for p in w)
            x += (jnp.tanh(x @ gate) * (x @ up)) @ down
            return (total + jnp.mean(x.astype(jnp.float32)), x), None

        def loss(params, x):
            *stacks, head = params
            each = [scan(layer, (jnp.float32(0), x), stack, policy=Policy())[0] for stack in stacks]
            total, y = jax.tree.map(lambda *of: sum(of), *each)
            return jnp.mean(jax.nn.logsumexp((y @ head.astype(y.dtype)).astype(jnp.float32), -1)) + 0.01 * total

        def step(params, x):
            grads = jax.grad(loss)(params, x)
            norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
            return jax.tree.map(lambda w, g: w - g / norm, params, grads)

        x, params = of(tokens, d, dtype=jnp.bfloat16), (*[(up, up, down)] * scans, of(d, vocabulary))
        program = compiled(gpu, step, params, x, donate_argnums=0)
        copies = sum(line.opcode == "copy" for line in module_of(program))
        return program.memory_analysis().temp_size_in_bytes, copies

    size, copies = size_and_copies()
    monkeypatch.setattr(passes, "empty_stack", at_any_time)
    larger, as_many = size_and_copies()
    assert copies == as_many and size < (0.9 if scans == 1 else 1.0001) * larger


@pytest.mark.claim("nested-policies")
def test_blocks_of_layers_are_copied_as_a_whole_and_not_within_host_memory(gpu):
    policy = Policy({"fc1": "offload"})
    block = lambda x, w: scan(layer, x, w, policy=policy)
    plain = lambda x, w: lax.scan(in_a_loop(layer, "fc1"), x, w)
    ours = lambda x, w: scan(block, x, w, policy=policy)[0]
    reference = lambda x, w: lax.scan(in_a_loop(plain, "fc1"), x, w)[0]
    program, saved = (compiled(gpu, gradient(f, (0, 1)), X, weights(LAYERS // 2, 2)) for f in (ours, reference))
    lines = module_of(program)
    assert list(kernels_on_host_memory(lines)) == []
    assert program.memory_analysis().host_temp_size_in_bytes == LAYERS * ONE
    # Of the last block all is resident, and of two others one each is on its way; they are a fraction of the layers.
    freed = saved.memory_analysis().temp_size_in_bytes - program.memory_analysis().temp_size_in_bytes
    assert freed >= (LAYERS - 2 * 3) * ONE
    copies = [line for line in lines if line.opcode == "fusion-start" and line.on_host]
    assert len(copies) == 4  # there and back, with two blocks per iteration
    assert len(matmuls(lines)) == len(matmuls(module_of(saved)))


def large(gpu, layers, options):
    """Return `begun_after` of a scan whose matmuls take milliseconds."""
    d, hidden = 4096, 16384
    w = tuple(jax.ShapeDtypeStruct((layers, *a), jnp.bfloat16) for a in ((d, hidden), (hidden, d), (d,)))
    f = gradient(lambda x, w: scan(layer, x, w, policy=Policy(OFFLOADED))[0], (0, 1))
    program = compiled(gpu, f, jax.ShapeDtypeStruct((16384, d), jnp.bfloat16), w, options=options)
    return list(begun_after(module_of(program)))


AT_ONCE = [(4, [0, 0, 2, 2]), (8, [0, 0, 4, 4])]  # two layers per iteration; all matmuls follow the copies' start


CHILD = """
import sys
sys.path[:0] = sys.argv[2:]
import test_program
from described_gpu import described
print(getattr(test_program, sys.argv[1])(described(1)[0]))
"""


def said_by(function, **environment):
    """Return what a process with this environment prints, and what XLA logs, when it calls a function of this file."""
    command = [sys.executable, "-c", CHILD, function.__name__, os.path.dirname(__file__), str(ROOT)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    child = common.start(command, env=environment, stderr=PIPE)
    out, err = child.communicate(timeout=PATIENCE)
    assert out, err
    return out.splitlines()[-1], err


def large_without_options(gpu):
    return large(gpu, 8, {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False})


@pytest.mark.slow
@pytest.mark.claim("xla-flags")
def test_flags_of_the_environment_do_what_options_do(gpu, tmp_path):
    expected = large(gpu, 8, OPTIONS)
    assert str(AT_ONCE[1][1]) in str(expected)
    flags = [write_xla_flags(tmp_path / "copies.pbtxt"), ""]
    said = [said_by(large_without_options, XLA_FLAGS=common.inherited_flags(given))[0] for given in flags]
    assert said[0] == str(expected) != said[1]


LOGS_STREAMS = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "execution_stream_assignment=3"}


def three_residuals_in_microbatches(gpu):
    def step(x, w):
        x, down = tag(x, "layer_input"), w[1].astype(x.dtype)
        hidden = tag(jax.nn.silu(tag(x @ w[0].astype(x.dtype), "fc1")), "act")
        return x + hidden @ down, None

    policy = Policy(OFFLOADED | {"act": "offload"}, min_offload_bytes=0)
    loss = lambda w, x: jnp.mean(scan(step, x, w, policy=policy)[0].astype(jnp.float32) ** 2)
    xs = jax.ShapeDtypeStruct((8, *X.shape), X.dtype)
    return compiled(gpu, lambda w, xs: accumulate(loss)(w, xs)[1], weights(LAYERS), xs).memory_analysis()


@pytest.mark.slow
@pytest.mark.claim("copies-both-ways")
def test_copies_that_go_one_way_share_no_stream_with_those_that_go_the_other_way(gpu):
    """XLA says in its log which stream it deals a copy to. It makes one iteration out of two."""
    log = said_by(three_residuals_in_microbatches, **LOGS_STREAMS)[1]
    streams, loop = defaultdict(lambda: ([], [])), None
    for line in log.splitlines():
        if "streams to computation: " in line:
            loop = line.rpartition(" ")[2]
        elif "execution scope: instr=" in line:
            name, stream = re.search(r"instr=(\S+) stream=(\S+)", line).groups()
            streams[loop, "double_buffer_clone" in name]["update" in name].append(stream)
    both = [(reads, writes) for reads, writes in streams.values() if len(reads) == len(writes) == 3]
    assert len(both) >= 4  # both halves of the two loops that are the halves of the loop over microbatches
    assert [reads for reads, writes in both if set(reads) & set(writes)] == []


@pytest.mark.claim("copies-begin")
def test_copies_begin_with_their_iteration_or_as_late_as_copy_ms_says(gpu):
    """By default XLA would begin copies to the device about 5 ms before the end of their iteration, here in its
    middle."""
    assert large(gpu, LAYERS, OPTIONS) == AT_ONCE
    _, (_, late) = large(gpu, LAYERS, OPTIONS | compiler_options("gpu", copy_ms=2))
    assert min(late) > 0 and sum(late) > 8


@pytest.mark.parametrize("layers", [4, 1])
@pytest.mark.claim("plan-measured")
def test_two_copies_of_a_row_behind_its_layers_are_beside_the_next_loop(gpu, layers):
    """As `plan` takes it: where the other layers recompute, the last row that travels has no layer of its loop behind
    it, and XLA has two copies at once on their way."""
    names = ("a", "b", "c", "d")

    def layer(x, w):
        x = tag(x, "layer_input")
        for name in names:
            x = jnp.tanh(tag(x @ w[name], name))
        return x, None

    how = {"min_offload_bytes": 0, "offload_layers": layers, "other_layers": "recompute"}
    policy = Policy(dict.fromkeys(names, "offload"), **how)
    f = gradient(lambda x, w: scan(layer, x, w, policy=policy)[0], (0, 1))
    w = dict.fromkeys(names, jax.ShapeDtypeStruct((LAYERS, 1024, 1024), jnp.bfloat16))
    program = module_of(compiled(gpu, f, jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), w))
    (entry,) = (
        list(lines.values())
        for lines in program.computations.values()
        if any(line.opcode == "while" for line in lines.values())
    )
    under_way, beside = set(), []
    for line in entry:
        if line.opcode == "copy-start":
            under_way.add(line.name)
        elif line.opcode == "copy-done":
            under_way -= set(line.operands)
        elif line.opcode == "while":
            beside.append(len(under_way))
        assert len(under_way) <= 2
    # Forward, those that offload, which are no loop if it is one, and the others; and backward.
    assert beside == ([0, 2, 2, 0] if layers > 1 else [2, 2])


@pytest.mark.claim("xlas-rematerialization")
def test_on_a_full_device_xla_recomputes_nothing_and_copies_begin_no_later(gpu, monkeypatch):
    """An H200's 150 layers keep 100 GB on the host, which XLA counts as device memory."""
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "120")
    here = gpu in jax.devices()
    as_full = gpu.memory_stats()["bytes_limit"] / 112_500_000_000 if here else 1  # JAX may use so much of an H200
    layers = 2 * round(75 * as_full)
    assert large(gpu, layers, OPTIONS) == AT_ONCE
    if not here:  # with XLA's default; a real device's memory decides how full it is
        assert large(gpu, layers, OPTIONS | {"xla_gpu_memory_limit_slop_factor": 95}) != AT_ONCE


def test_a_chains_copies_have_a_layer_to_hide_behind(gpu):
    """Beside both of a layer's matmuls, or beside nearly all of the six of its backward pass."""
    d, hidden = 4096, 16384
    w = tuple(jax.ShapeDtypeStruct(a, jnp.bfloat16) for a in ((d, hidden), (hidden, d), (d,)))
    policy, x = Policy(OFFLOADED), jax.ShapeDtypeStruct((16384, d), jnp.bfloat16)
    f = gradient(lambda x, w: chain([lambda x, w: layer(x, w)[0]] * 6, x, w, policy=policy), (0, 1))
    done, begun, spans = 0, {}, {"to": [], "from": []}
    for line in module_of(compiled(gpu, f, x, [w] * 6)):
        done += len(matmuls([line]))
        if line.opcode == "copy-start":
            begun[line.name] = done
        elif line.opcode == "copy-done":
            spans["to" if line.on_host else "from"].append(done - begun[line.operands[0]])
    assert spans["to"] == [2] * 2 * 5 and len(spans["from"]) == 2 * 5 and min(spans["from"]) >= 3


@pytest.mark.claim("accumulated-in-less-memory")
def test_interleaved_microbatches_copy_both_ways_in_less_memory_than_recomputing_everything(gpu, monkeypatch):
    """By DMA alone, in range, each copy begun with its layer, and nothing from host to host: two sets of stacks take
    turns."""
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64")
    layers, d, hidden, rows = 16, 4096, 14336, 16384

    def step(x, w):
        x, (gate, up, down) = tag(x, "layer_input"), (a.astype(jnp.bfloat16) for a in w)
        fc1 = tag({"gate": x @ gate, "up": x @ up}, "fc1")
        return x + tag(jax.nn.silu(fc1["gate"]) * fc1["up"], "act") @ down, None

    def loss(w, x, rules):
        y, _ = scan(step, x, w, policy=Policy(rules))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def one_by_one(w, xs):
        add = lambda sums, x: (jax.tree.map(jnp.add, sums, jax.grad(loss)(w, x, {"layer_input": "save"})), None)
        return lax.scan(add, jax.tree.map(jnp.zeros_like, w), xs)[0]

    moving = lambda w, x: loss(w, x, {"layer_input": "offload", "fc1": "offload"})
    interleaved = lambda w, xs: accumulate(moving)(w, xs)[1]
    w = tuple(jax.ShapeDtypeStruct((layers, *a), jnp.float32) for a in ((d, hidden), (d, hidden), (hidden, d)))
    xs = lambda count: jax.ShapeDtypeStruct((count, rows, d), jnp.bfloat16)
    recomputing = compiled(gpu, one_by_one, w, xs(8)).memory_analysis()
    temporary = {}
    for count in (2, 8):
        program = compiled(gpu, interleaved, w, xs(count))
        module, memory = module_of(program), program.memory_analysis()
        assert kernels_on_host_memory(module) == [] and list(hlo.out_of_range(module)) == []
        both = 2 * layers * rows * (d + 2 * hidden) * 2  # stacks; of two microbatches, parts stay on the device
        assert memory.host_temp_size_in_bytes == both if count > 2 else memory.host_temp_size_in_bytes < both
        begins = [(matmuls, set(begun)) for matmuls, begun in begun_after(module)]
        assert begins and all(begun <= {0, matmuls // 2} for matmuls, begun in begins)  # two layers per iteration
        temporary[count] = memory.temp_size_in_bytes
    # Of two microbatches, more of the first one's residuals stay on the device.
    assert temporary[2] <= recomputing.temp_size_in_bytes
    assert temporary[8] <= 0.7 * recomputing.temp_size_in_bytes
    loops = defaultdict(set)
    for name, copy in hlo.host_copies(module).items():
        loops[copy.loop].add("update" in name)
    assert sum(both == {True, False} for both in loops.values()) >= 2  # the two halves of the loop over microbatches


def exposed(module):
    """Seconds of large exchanges that what XLA puts beside them does not last for, by our own estimates."""
    total = 0.0
    for computation, lines in module.computations.items():
        left = {}  # of the exchanges that are under way
        for line in lines.values():
            seconds = _scheduling.seconds_of(line, module) or 0.0
            large = line.opcode.startswith("all-to-all") and hlo.nbytes(line.shape) > 2**20
            if line.opcode == "all-to-all-start" and large:
                left[line.name] = seconds
            elif line.opcode == "all-to-all" and large:  # nothing is beside it
                total += module.runs[computation] * seconds
            elif line.opcode == "all-to-all-done" and line.operands[0] in left:
                total += module.runs[computation] * max(0.0, left.pop(line.operands[0]))
            elif "-start" not in line.opcode and line.opcode != "all-to-all":
                left = {name: each - seconds for name, each in left.items()}
    return total


@pytest.mark.long
@pytest.mark.claim("scheduled-by-times")
def test_a_step_compiled_again_with_its_times_hides_exchanges_between_experts(two_gpus, monkeypatch):
    """Mixtral's layers on two GPUs, two microbatches: same kernels, same memory, another order."""
    devices = jax.devices  # whose cores a kernel of JAX's counts
    monkeypatch.setattr(jax, "devices", lambda *which: devices(*which) if which else two_gpus)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    attention = {"layers": 4, "d_model": 4096, "heads": 32, "kv_heads": 8, "attention": "xla"}
    shape = Model(experts=8, experts_per_token=2, d_expert=14336, capacity=1.25, grouped="mosaic", **attention)
    mesh, make = make_mesh(config.Mesh(expert=2), two_gpus), lambda rngs: Layer(shape, rngs)
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    layer = lambda x, w: (nnx.merge(graph, w)(x, rotations(8192, shape.d_head, 1e6))[0], None)
    moved = ("layer_input", "attn/q", "attn/k", "attn/v", "mlp_input", "moe/fc1.gate", "moe/fc1.up")
    policy = Policy(dict.fromkeys(moved, "offload"))

    def loss(w, x):
        return jnp.mean(jnp.square(scan(layer, x, w, policy=policy)[0].astype(jnp.float32)))

    w = jax.eval_shape(lambda: nnx.state(stacked(shape.layers, make, nnx.Rngs(params=0))))
    x = jax.ShapeDtypeStruct((2, 4, 8192, 4096), jnp.bfloat16)
    where = param_shardings(w, mesh), NamedSharding(mesh, PartitionSpec(None, *RULES.spec("batch")))

    def program(options):
        step = lambda w, x: accumulate(on_mesh(mesh, loss))(w, x)[1]
        return jax.jit(step, in_shardings=where, out_shardings=where[0], compiler_options=options).lower(w, x).compile()

    first = program(OPTIONS)
    again = program(OPTIONS | scheduling_options(first, "gpu"))
    before, after = map(module_of, (first, again))
    assert exposed(after) <= 0.5 * exposed(before)
    assert hlo.collectives(after) == hlo.collectives(before) and _kernels.ran(after) == _kernels.ran(before)
    temporary = [p.memory_analysis().temp_size_in_bytes for p in (first, again)]
    assert temporary[1] <= 1.05 * temporary[0]


def test_verify_finds_two_microbatches_in_the_plan(gpu, monkeypatch):
    """The plain loop keeps one microbatch's residuals on the device; ours is to hold no more than it says."""
    loss = lambda w, x: jnp.mean(scan(layer, x, w, policy=Policy(OFFLOADED))[0].astype(jnp.float32) ** 2)
    shapes = weights(LAYERS), jax.ShapeDtypeStruct((4, 32 * BATCH, DIM), jnp.bfloat16)
    target = target_of(lambda w, xs: accumulate(loss)(w, xs)[1], shapes)
    program, reference = (compiled(gpu, run, *shapes) for run in (target.run, as_reference(target.run)))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for ours, verdict, expected in ((program, "holds", "640.00 MiB"), (reference, "fails", "0 B")):
        target.programs.update({(compiler_options, False): ours, (compiler_options, True): reference})
        found, said = conservation(target)
        assert found == verdict and f"planned {expected} on the host for 320.00 MiB to 640.00 MiB" in said, said


def copies_in_order(module):
    """The copies that a program starts, by the names that a profile gives them, as often as its loops do."""
    names = iter(hlo.host_copies(module))
    name_of = {(line.computation, line.name): next(names) for line in module if line.starts_host_copy}

    def of(computation):
        for line in module.computations[computation].values():
            if name := name_of.get((computation, line.name)):
                yield name
            for body in line.calls if line.opcode == "while" else ():
                for _ in range(module.trip_counts[body]):
                    yield from of(body)

    return of(next(name for name in module.computations if name.startswith("main")))


IN_MICROBATCHES = [(7, 6, {}), (8, 5, {"resident_layers": 0})]


# What jaxlib 0.11 says of the last layer's copy, which stands alone, does not suffice to name it where a loop has it.
@pytest.mark.parametrize(
    "layers, microbatches, fields", IN_MICROBATCHES[: 1 + (jax.__version_info__ >= (0, 12))], ids=str
)
def test_each_copy_of_interleaved_microbatches_has_its_residual(gpu, layers, microbatches, fields):
    """However XLA unrolls the loops."""
    policy = Policy(OFFLOADED, min_offload_bytes=0, **fields)
    loss = lambda w, x: jnp.mean(scan(layer, x, w, policy=policy)[0].astype(jnp.float32) ** 2)
    xs = jax.ShapeDtypeStruct((microbatches, *X.shape), X.dtype)
    step = lambda w, xs: accumulate(loss)(w, xs)[1]
    (params,) = (
        s.eqn.params for s in walk(jax.make_jaxpr(step)(weights(layers), xs)) if s.eqn.primitive is interleaved_p
    )
    program = compiled(gpu, step, weights(layers), xs)
    module = module_of(program)
    assert kernels_on_host_memory(module) == [] and list(hlo.out_of_range(module)) == []
    need = need_of(jax.make_jaxpr(step)(weights(layers), xs)).bytes()
    assert 0 < program.memory_analysis().host_temp_size_in_bytes <= need
    assert all(f'"{line.name}"'.encode() in OPTIONS["fdo_profile"] for line in module if line.starts_host_copy)
    copies = hlo.host_copies(module)
    ran = Counter(copies[op].residual for op in copies_in_order(module))
    assert ran.keys() == set(OFFLOADED)
    stays = lambda name, end: int(name not in params[end][0].segments[0].layer.moved_names)
    assert [stays(name, "first") for name in OFFLOADED] != [0, 0]
    for name in OFFLOADED:
        moving = microbatches - stays(name, "first") - stays(name, "last")
        rows = layers - (not fields)
        assert 2 * moving * rows <= ran[name] <= 2 * moving * (rows + 1), name  # and padding rows


@pytest.mark.claim("accumulated-in-place")
def test_a_gathers_gradient_is_in_memory_once(gpu):
    """And its sum: jaxlib 0.11.2 would fill zeros for several microbatches at once."""
    policy, rows = Policy(OFFLOADED, min_offload_bytes=0), 2**18

    def loss(w, tokens):
        table, layers = w
        y, _ = scan(layer, table.astype(jnp.float32)[tokens].astype(jnp.bfloat16), layers, policy=policy)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def step(w, batch):
        _, sums = accumulate(loss, sum_dtype=jnp.float32)(w, batch)
        return jax.tree.map(lambda w, g: (w - g).astype(w.dtype), w, sums)

    w = jax.ShapeDtypeStruct((rows, DIM), jnp.bfloat16), weights(LAYERS)
    batch = jax.ShapeDtypeStruct((5, BATCH), jnp.int32)
    eqns = [site.eqn for site in walk(jax.make_jaxpr(step)(w, batch))]
    of_table = [eqn for eqn in eqns if [v.aval.shape for v in eqn.outvars] == [(rows, DIM)]]
    fills = [eqn for eqn in of_table if eqn.primitive is lax.broadcast_in_dim_p and isinstance(eqn.invars[0], Var)]
    assert len(fills) == len([eqn for eqn in of_table if eqn.primitive is lax.scatter_add_p]) >= 3
    program = compiled(gpu, step, w, batch, donate_argnums=0)
    assert program.memory_analysis().temp_size_in_bytes < 3.5 * rows * DIM * 4


@pytest.mark.claim("accumulated-in-place")
@pytest.mark.parametrize("decision", ["offload", "recompute"])
def test_gradients_are_added_to_their_sums_by_one_kernel(gpu, decision):
    """It would take three times the memory traffic to copy a row of the sum first. There is one set of gradients, and
    in a loop over microbatches two."""
    d, hidden = 512, 1024
    policy = Policy(dict.fromkeys(["x", "h"], decision), min_offload_bytes=0)

    def layer(x, w):
        x, (up, down) = tag(x, "x"), (a.astype(jnp.bfloat16) for a in w)
        return x + jax.nn.silu(tag(x @ up, "h")) @ down, None

    loss = lambda w, x: jnp.mean(scan(layer, x, w, policy=policy)[0].astype(jnp.float32) ** 2)
    w = tuple(jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for shape in ((d, hidden), (hidden, d)))
    xs = jax.ShapeDtypeStruct((4, BATCH, d), jnp.bfloat16)
    program = compiled(gpu, lambda w, xs: accumulate(loss)(w, xs)[1], w, xs)
    add = lambda w: lambda sums, x: (jax.tree.map(jnp.add, sums, jax.grad(loss)(w, x)), None)
    zeros = lambda w: jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), w)
    plain = compiled(gpu, lambda w, xs: jax.lax.scan(add(w), zeros(w), xs)[0], w, xs)
    here, there = (p.memory_analysis().temp_size_in_bytes for p in (program, plain))
    gradients = 2 * LAYERS * d * hidden * 4
    assert decision == "offload" or here < there - 0.9 * gradients
    text = program.as_text()
    sums = re.compile(rf"= f32\[{LAYERS},({d},{hidden}|{hidden},{d})\]\S* fusion\(")
    rows = re.compile(rf"= f32\[(1,)?({d},{hidden}|{hidden},{d})\]\S* fusion\(")
    assert len(sums.findall(text)) >= 2 and not rows.findall(text)


def test_emulated_fp8_multiplies_what_was_rounded(gpu):
    """Rounded values must be results of kernels: XLA may skip the rounding of what stays in a kernel's registers."""

    def f(x, w, sizes, dy):
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, backend="ragged", quantize="fp8"), x, w)
        return y, *pull(dy)

    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    options = {"xla_gpu_autotune_level": 0}
    program = compiled(gpu, f, of(192, 64), of(4, 64, 128), of(4, dtype=jnp.int32), of(192, 128), options=options)
    entry = program.as_text().partition("\nENTRY ")[2]
    results = {
        found for line in re.findall(r"= (.*?) fusion\(", entry) for found in re.findall(r"f8e\w+\[[\d,]+\]", line)
    }
    assert results >= {"f8e4m3fn[192,64]", "f8e4m3fn[4,64,128]", "f8e5m2[192,128]"}


def test_every_matmul_runs_once(gpu, lines):
    """A layer has two matmuls, and its backward pass four. This holds for saved ones too, which XLA would clone when it
    writes them into a stack."""
    in_loops = lambda lines: len(matmuls(lines))
    assert in_loops(lines) == 2 * 2 * (2 + 4)
    saving = module_of(compiled(gpu, twice(dict.fromkeys(OFFLOADED, "save")), X, weights(LAYERS)))
    assert in_loops(saving) == 2 * 2 * (2 + 4)
    recomputing = module_of(compiled(gpu, twice({"fc1": "recompute"}), X, weights(LAYERS)))
    assert in_loops(recomputing) == 2 * 2 * (2 + 5)


def test_verify_counts_matmuls_as_often_as_they_run(gpu):
    f, args = twice(dict.fromkeys(OFFLOADED, "save")), (X, weights(LAYERS))
    ran, traced = _kernels.ran(module_of(compiled(gpu, f, *args))), _kernels.traced(jax.make_jaxpr(f)(*args).jaxpr)
    assert ran == traced and ran["matmuls"] == 2 * LAYERS * (2 + 4) and ran[_kernels.FLOPS] > 0
    assert _kernels.more_than_traced(ran, traced) == []
    again = ran | {_kernels.FLOPS: 4 / 3 * ran[_kernels.FLOPS]}
    (said,) = _kernels.more_than_traced(again, traced)
    assert "FLOPs of matmuls run where" in said


def test_a_profile_knows_of_each_copy_which_residual_it_is(gpu, lines):
    found = hlo.host_copies(lines)
    assert Counter(copy[:2] for copy in found.values()) == {("layer_input", STREAM): 8, ("fc1", ONE): 8}
    assert {name.rstrip("0123456789.") for name in found} == {"wrapped_dynamic-slice", "wrapped_dynamic-update-slice"}
    everywhere = Policy({"fc1": "offload"}, min_offload_bytes=0, resident_layers=0)
    f = gradient(lambda x, w: scan(layer, x, w, policy=everywhere)[0], (0, 1))
    found = hlo.host_copies(module_of(compiled(gpu, f, X, weights(4))))
    assert Counter(copy[:2] for name, copy in found.items() if "copy" in name) == {("fc1", ONE): 2}  # of the last layer
    assert {copy.residual for copy in found.values()} == {"fc1"}
    policy = Policy(OFFLOADED, min_offload_bytes=0)
    f = gradient(lambda x, w: chain([lambda x, w: layer(x, w)[0]] * 3, x, w, policy=policy), (0, 1))
    found = hlo.host_copies(module_of(compiled(gpu, f, X, [weights()] * 3)))
    assert Counter(copy[:2] for copy in found.values()) == {("layer_input", STREAM): 4, ("fc1", ONE): 4}


@pytest.mark.claim("two-layers-share")
@pytest.mark.parametrize("through", ["scan", "chain"])
def test_a_further_layer_costs_the_device_what_it_costs_where_its_residuals_are_recomputed(gpu, through):
    """The host needs one row more for each. Against `save`, the device saves exactly that.

    The weights are bfloat16: the gradients of float32 weights are so large that XLA finds room for residuals in them.
    """

    def memory(decision, layers):
        policy = Policy({"fc1": decision}, min_offload_bytes=0)
        if through == "scan":
            w, f = weights(layers, dtype=jnp.bfloat16), lambda x, w: scan(layer, x, w, policy=policy)[0]
        else:
            step = lambda x, w: layer(x, w)[0]
            w, f = [weights(dtype=jnp.bfloat16)] * layers, lambda x, w: chain([step] * layers, x, w, policy=policy)
        found = compiled(gpu, gradient(f, (0, 1)), X, w).memory_analysis()
        return np.array([found.temp_size_in_bytes, found.host_temp_size_in_bytes])

    saved, offloaded, recomputed = ((memory(how, 20) - memory(how, 12)) / 8 for how in ("save", "offload", "recompute"))
    assert (offloaded[1], saved[1], recomputed[1]) == (ONE, 0, 0)
    assert saved[0] - offloaded[0] == pytest.approx(ONE, abs=ONE / 333)
    assert offloaded[0] == pytest.approx(recomputed[0], abs=ONE / 333)


def test_stacks_are_split_over_devices_as_what_they_hold_is(two_gpus):
    """Two devices split the batch, which only XLA knows. Each host stack is halved, and saving needs no more device
    memory than lax.scan."""
    mesh = Mesh(np.array(two_gpus), "x")
    place = lambda shape, *spec: jax.ShapeDtypeStruct(
        shape.shape, shape.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    args = place(X, "x"), tuple(map(place, weights(LAYERS, dtype=jnp.bfloat16)))

    def memory(f):
        found = jax.jit(gradient(f, (0, 1)), compiler_options=OPTIONS).lower(*args).compile().memory_analysis()
        return found.temp_size_in_bytes, found.host_temp_size_in_bytes

    under = lambda how: (
        lambda x, w: scan(layer, x, w, policy=Policy(dict.fromkeys(OFFLOADED, how), min_offload_bytes=0))[0]
    )
    saved, offloaded = memory(under("save")), memory(under("offload"))
    assert offloaded[1] == LAYERS * (ONE + STREAM) // 2 and saved[1] == 0
    plain = memory(lambda x, w: lax.scan(in_a_loop(layer, *OFFLOADED), x, w)[0])
    assert saved[0] <= 1.01 * plain[0]
    assert offloaded[0] <= saved[0] - (LAYERS - 3) * (ONE + STREAM) // 2


@pytest.mark.parametrize("backend", ["mosaic", "te"])
def test_grouped_gemms_run_nine_times_per_layer_and_their_outputs_go_to_the_host_by_dma(gpu, monkeypatch, backend):
    """Two layers per iteration. This includes saved outputs: if XLA could compute the offset at which a kernel's output
    is written into a stack, it would recompute the output for its other readers, as in `lax.scan`."""
    kind, kernel = {"mosaic": ("Mosaic kernels", "mosaic_gpu"), "te": ("grouped GEMMs", "te_grouped_gemm")}[backend]
    if backend == "te":
        needs_te()
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda *which: devices(*which) if which else [gpu])
    shape = Model(
        layers=LAYERS, d_model=DIM, heads=2, kv_heads=2, experts=8, experts_per_token=2, d_expert=512, grouped=backend
    )
    make = lambda rngs: Layer(shape, rngs)
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    w = jax.eval_shape(lambda: nnx.state(stacked(LAYERS, make, nnx.Rngs(params=0))))
    x = jax.ShapeDtypeStruct((1, BATCH, DIM), jnp.bfloat16)
    layer = lambda x, w: nnx.merge(graph, w)(x, rotations(BATCH, shape.d_head, 1e4))

    def lines(rules, **fields):
        policy = Policy(rules, min_offload_bytes=0, **fields)
        f = gradient(lambda x, w: scan(layer, x, w, policy=policy)[0], (0, 1))
        found = module_of(compiled(gpu, f, x, w))
        ran, traced = _kernels.ran(found), _kernels.traced(jax.make_jaxpr(f)(x, w).jaxpr)
        assert _kernels.more_than_traced(ran, traced) == []
        assert ran[_kernels.FLOPS] == pytest.approx(traced[_kernels.FLOPS], rel=0.01)
        assert ran[kind] == traced[kind] > 0
        return found

    def kernels(lines):
        return Counter(line.computation for line in lines if kernel in line.text and line.opcode == "custom-call")

    names = ("moe/fc1_input", "moe/fc1", "moe/act")
    saved, moved = (lines(dict.fromkeys(names, decision)) for decision in ("save", "offload"))
    for found in (saved, moved):
        assert sorted(kernels(found).values()) == [2 * 3, 2 * 6]
    assert list(kernels_on_host_memory(moved)) == []
    assert all(line.on_host for line in moved if line.opcode.endswith("-start"))


@pytest.mark.claim("read-in-place")
@pytest.mark.parametrize("microbatches", [(), (4,)])
def test_grouped_gemms_read_bfloat16_weights_in_their_stacks(gpu, monkeypatch, microbatches):
    """No row of these is copied first; the results are those of kernels that read copies. A row that something else
    reads, too, or a barrier in the backward pass, is copied, and not by DMA among the copies for the host."""
    groups, rows, d, hidden = 4, 512, 256, 512
    sizes = jnp.full((groups,), rows // groups, jnp.int32)
    multiply = lambda x, w: grouped_matmul(x, w, sizes, backend="mosaic")

    def layer(x, w):
        up, down, both, again = w
        fc1 = tag(multiply(tag(x, "layer_input"), up), "fc1")
        gate = jax.checkpoint(lambda x, w: jnp.tanh(multiply(jnp.tanh(x), w)))(x, again)
        return x + multiply(jnp.tanh(fc1), down) + multiply(x, both) * jnp.max(both) * jnp.sum(gate), None

    def step(w, x):
        policy = Policy(OFFLOADED, min_offload_bytes=0)
        loss = lambda w, x: jnp.mean(scan(layer, x, w, policy=policy)[0].astype(jnp.float32) ** 2)
        return accumulate(loss)(w, x)[1] if microbatches else jax.grad(loss)(w, x)

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    stacks = tuple(shape(LAYERS, groups, *each) for each in ((d, hidden), (hidden, d), (d, d), (d, 128)))
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda *which: devices(*which) if which else [gpu])

    def program_and_copies():
        """The stacks' rows that are copied by kernels, and by DMA."""
        program = compiled(gpu, lambda *args: step(*args), stacks, shape(*microbatches, rows, d))
        found = module_of(program)
        fused = {name for line in found if "fusion" in line.opcode for name in line.calls}
        outside = [line for line in found if line.computation not in fused]
        computes = lambda line: any(each.opcode == "custom-call" for each in (line, *found.called(line)))
        made = lambda line: {array.sizes[1:] for array in hlo.arrays_of(line.shape) if array.sizes[:1] == (1,)}
        copied = lambda opcode: {
            row for line in outside if line.opcode == opcode and not computes(line) for row in made(line)
        }
        return program, *(copied(opcode) & {x.shape[1:] for x in stacks} for opcode in ("fusion", "fusion-start"))

    program, *copied = program_and_copies()
    assert copied == [{x.shape[1:] for x in stacks[2:]}, set()]
    monkeypatch.setattr(readers, "READS_IN_PLACE", set())
    copying, *copied = program_and_copies()
    assert copied == [{x.shape[1:] for x in stacks}, set()]
    if gpu in devices():
        shapes = [*stacks, shape(*microbatches, rows, d)]
        keys = jax.random.split(jax.random.key(0), len(shapes))
        *w, x = (jax.random.normal(key, of.shape, of.dtype) / 16 for key, of in zip(keys, shapes, strict=True))
        args = jax.device_put((tuple(w), x), program.input_shardings[0])
        jax.tree.map(np.testing.assert_array_equal, program(*args), copying(*args))


@pytest.mark.parametrize("values", [32, 64, 96, 128])
def test_xla_reads_a_row_in_place_if_its_offset_is_aligned(gpu, values):
    """Otherwise it copies the row by DMA: why `only_kernels_read` leaves such rows out."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    kernel = mosaic_gpu.kernel(lambda x, w, out: None, out_type=of(64))
    f = lambda x, w: lax.fori_loop(0, LAYERS, lambda i, x: kernel(x, rows.take_row(w, i)), x)
    copies = [line for line in module_of(compiled(gpu, f, of(64), of(LAYERS, values))) if line.opcode == "fusion-start"]
    (_, known) = readers.only_kernels_read(jax.make_jaxpr(kernel)(of(64), of(values)))
    assert known == (not copies) == (values in (64, 128))


def test_the_hosts_need_of_a_whole_program_is_no_less_than_xla_plans(gpu):
    """Two stacks; two gradients side by side, and in sequence; microbatches in a loop, twice; checkpoints and a chain.
    `need_of` adds up all of a straight-line program, and takes the maximum over loops."""
    rules = Policy({"fc1": "offload"}, min_offload_bytes=0, resident_layers=0)
    f = lambda x, w: x + jnp.sin(tag(x @ w, "fc1")) @ w.T
    body = lambda x, w: (f(x, w), None)
    total = lambda x: jnp.sum(x.astype(jnp.float32))
    stack = lambda w, x: scan(body, x, w, policy=rules)[0]
    one = jax.grad(lambda w, x: total(stack(w, x)))

    def chained(w, x):
        x = chain([f] * LAYERS, x, list(w), policy=rules)
        for i in range(LAYERS):
            x = checkpoint(f, policy=rules)(x, w[i])
        return total(x)

    def microbatches(w, x):
        return lax.scan(lambda sum, x: (sum + one(w, x), None), w, jnp.stack([x, x + 1, x + 2, x + 3]))[0]

    rows = {
        "one": (one, LAYERS + 1),
        "two stacks": (jax.grad(lambda w, x: total(stack(w, stack(w, x)))), 2 * (LAYERS + 1)),
        "side by side": (lambda w, x: one(w, x) + one(w, 2 * x), 2 * (LAYERS + 1)),
        "one after another": (lambda w, x: one(w - one(w, x), x), 2 * (LAYERS + 1)),
        "microbatches, twice": (lambda w, x: microbatches(microbatches(w, x), x), LAYERS + 1),
        "a chain and checkpoints": (jax.grad(chained), 2 * LAYERS),
    }
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((LAYERS, DIM, DIM), (BATCH, DIM))]
    for which, (g, need) in rows.items():
        assert need_of(jax.make_jaxpr(g)(*shapes)).bytes() == need * STREAM, which
        planned = compiled(gpu, g, *shapes).memory_analysis().host_temp_size_in_bytes
        assert planned <= need * STREAM, which
    assert planned > 0


TABLE, STACK = (8192, 512), (8, 512, 2048)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def directions_in_loops(module):
    """Return, for each loop, whether each of its copies goes to the host; all rows are in range."""
    loops = defaultdict(list)
    for name, copy in hlo.host_copies(module).items():
        if copy.loop in module.trip_counts:
            loops[copy.loop].append("update" in name)
    starts = [line for line in module if line.opcode == "fusion-start" and line.computation in module.trip_counts]
    called = {name for line in starts for name in line.calls}
    assert not [line for line in hlo.out_of_range(module) if line.computation in called]
    by_kernels = hlo.kernels_on_host_memory(module)
    assert by_kernels and all(_copies.copies_one_block(line, module) for line in by_kernels)
    assert {line.opcode for line in by_kernels} == {"dynamic-slice"}
    return loops.values()


@pytest.mark.claim("host-state-streams")
def test_an_optimizers_state_comes_and_goes_at_once(gpu):
    """In each loop, blocks come and go by DMA, in range. Nothing is copied from the host to the host, or computed
    there; kernels read the first block that comes, which is outside of the loop."""
    tx = host_optimizer(CLIPPED, shardings=SingleDeviceSharding(jax.devices("cpu")[0]), masters=True)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in (("table", TABLE), ("stack", STACK))}
    module = module_of(compiled(gpu, lambda g, p: tx.apply(g, p, tx.init(p)), params, params))
    both = [directions for directions in directions_in_loops(module) if False in directions]  # others are of init
    assert len(both) == 2 and all(directions.count(True) == directions.count(False) for directions in both)


@pytest.mark.claim("host-state-in-blocks")
def test_the_device_holds_four_blocks_of_an_optimizers_state(gpu):
    """However many layers there are; no set of updates, and no copy of the weights, also while the state is made."""
    where = SingleDeviceSharding(jax.devices("cpu")[0])
    tx = host_optimizer(CLIPPED, shardings=where, masters=True, state_dtype=jnp.bfloat16)
    step = lambda g, p: tx.apply(g, p, tx.init(p))
    stacks = [jax.ShapeDtypeStruct((layers, *STACK[1:]), jnp.bfloat16) for layers in (8, 32)]
    programs = (compiled(gpu, step, stack, stack, donate_argnums=1) for stack in stacks)
    few, many = (memory_plan(program).temp_size_in_bytes for program in programs)
    block = STACK[1] * STACK[2] * (2 + 2 + 2)  # two moments and a remainder
    assert few == many < 4 * block


@pytest.mark.claim("host-state-in-blocks")
def test_an_optimizers_state_on_the_host_leaves_the_device(gpu):
    """All of it: a step of layers needs so much less device memory, although blocks of it come and go."""
    where = SingleDeviceSharding(jax.devices("cpu")[0])
    params = tuple(w.update(dtype=jnp.bfloat16) for w in weights(32)[:2])
    x = jax.ShapeDtypeStruct((16 * BATCH, DIM), jnp.bfloat16)

    def small(x, w):
        return x + jnp.tanh(tag(x @ w[0], "fc1")) @ w[1], None

    def bytes_with(default):
        policy = Policy(default=default, min_offload_bytes=0)
        tx = host_optimizer(CLIPPED, policy=policy, shardings=where, masters=True, state_dtype=jnp.bfloat16)
        loss = lambda w, x: jnp.sum(scan(small, x, w, policy=Policy())[0].astype(jnp.float32))
        gradients = lambda w, x: jax.grad(loss)(w, x)
        if default == "offload":  # described GPUs have no arguments on the host
            program = compiled(gpu, lambda w, x: tx.apply(gradients(w, x), w, tx.init(w)), params, x, donate_argnums=0)
        else:
            step = lambda w, state, x: tx.apply(gradients(w, x), w, state)
            program = compiled(gpu, step, params, jax.eval_shape(tx.init, params), x, donate_argnums=(0, 1))
        memory = memory_plan(program)
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes, tx.placements(params).host_bytes

    (on_device, _), (on_host, state) = bytes_with("save"), bytes_with("offload")
    assert abs((on_device - on_host) / state - 1) <= 0.001


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_each_gpu_streams_its_own_part_of_an_optimizers_state(two_gpus, kind):
    """The GPUs exchange the norm of the gradients, and nothing else."""
    mesh = Mesh(np.array(two_gpus), ("fsdp",), axis_types=(kind,))
    place = {"table": NamedSharding(mesh, PartitionSpec("fsdp", None))}
    place["stack"] = NamedSharding(mesh, PartitionSpec(None, "fsdp", None))
    shapes = {"table": TABLE, "stack": STACK}
    params = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=place[name]) for name, s in shapes.items()}
    tx = host_optimizer(CLIPPED, shardings=place, masters=True)
    with jax.set_mesh(mesh):
        step = jax.jit(lambda g, p: tx.apply(g, p, tx.init(p)), compiler_options=OPTIONS)
        module = module_of(step.lower(params, params).compile())
    both = [directions for directions in directions_in_loops(module) if False in directions]
    assert len(both) == 2 and all(directions.count(True) == directions.count(False) for directions in both)
    exchanges = [line.opcode for line in module if re.match("all-|collective|reduce-scatter", line.opcode)]
    assert exchanges in (["all-reduce"], ["all-reduce-start", "all-reduce-done"])
