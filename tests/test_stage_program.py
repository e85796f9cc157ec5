"""What XLA compiles for GPUs that are pipeline stages: copies by DMA, begun with their layer; slots in their place; the
exchanges of the schedule and no others; device memory that neither stages nor microbatches change.

Nothing runs: see described_gpu.py.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described_gpu import OPTIONS, begun_after, described, gpu, module_of, nothing_cached
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoffload import Policy, accumulate, scan, tag
from jaxoffload._engine.host.need import need_of
from jaxoffload._engine.stages.schedule import Schedule
from jaxoffload.proof._program import hlo
from jaxoffload.proof._verify.placement import EXCHANGE, MOVED

assert nothing_cached and gpu  # fixtures
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.claim("stages")]

LAYERS, ROWS, DIM = 4, 4096, 2048  # of a chunk; of x
ROW = ROWS * DIM * 2  # bytes, bfloat16


def layer(x, w):
    x = tag(x, "x")
    return x + jax.nn.silu(tag(x @ w, "fc1")), None


def layer_of_two(x, w):
    x = tag(x, "x")
    return x + jax.nn.silu(tag(x @ w["a"], "fc1")) @ w["b"], None


def loss(params, x, policy):
    y, _ = scan(layer_of_two if isinstance(params["w"], dict) else layer, x, params["w"], policy=policy)
    return jnp.mean((y @ params["out"]).astype(jnp.float32) ** 2)


def lowered(stages, microbatches, virtual_stages=1, data=1, decision="offload", layers=LAYERS, weights=(), rows=ROWS):
    """Lowered, and what it needs on the host by the jaxpr. `weights`: names of those of a layer, if it has several."""
    policy = Policy({"x": decision, "fc1": decision})
    mesh = Mesh(np.array(described(stages * data)).reshape(stages, data), ("stage", "data"))
    step = accumulate(
        lambda params, x: loss(params, x, policy), stages="stage", virtual_stages=virtual_stages, reduction="sum"
    )

    def shape(spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    of_layers = shape(["stage"], layers * stages * virtual_stages, DIM, DIM)
    params = {"w": dict.fromkeys(weights, of_layers) or of_layers, "out": shape([], DIM, DIM)}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(step, compiler_options=OPTIONS).trace(params, shape([None, "data"], microbatches, rows, DIM))
        return traced.lower(), need_of(traced.jaxpr.jaxpr).bytes()


@functools.cache
def compiled(*args, **kwargs):
    return lowered(*args, **kwargs)[0].compile()


def with_a_loop(*how):
    """Return a schedule that has a loop over ticks, of two rounds or more."""
    schedule = Schedule(*how)
    assert len(schedule.steady) >= 2 * schedule.slots
    return schedule


def test_the_host_needs_what_xla_plans(gpu):
    """A slot has a row for each layer, and as many pieces of a row; 6 does not divide a row, 4 does."""
    layers, pieces = 6, 4
    program, need = lowered(2, 11, layers=layers)
    assert program.compile().memory_analysis().host_temp_size_in_bytes == need
    assert need == 4 * 2 * (layers + layers / pieces) * ROW


@pytest.mark.parametrize(
    "stages, microbatches, virtual_stages", [(2, 11, 1), pytest.param(2, 12, 2, marks=pytest.mark.long)]
)
def test_slots_stay_in_place_and_copies_are_dma_that_begins_with_its_layer(gpu, stages, microbatches, virtual_stages):
    program = compiled(stages, microbatches, virtual_stages)
    module = module_of(program)
    assert hlo.kernels_on_host_memory(module) == []
    assert list(hlo.out_of_range(module)) == []
    assert all(f'"{line.name}"'.encode() in OPTIONS["fdo_profile"] for line in module if line.starts_host_copy)
    slots = with_a_loop(stages, virtual_stages, microbatches).slots
    # A row for each layer, padding that takes the place of the last one, and as much in pieces; for x and for fc1.
    assert program.memory_analysis().host_temp_size_in_bytes == slots * 2 * (LAYERS + 1) * ROW
    # In a tick with both passes an iteration has two layers of each: 6 matmuls, and 16 copies.
    steady = [starts for matmuls, starts in begun_after(module) if matmuls == 6 and len(starts) == 16]
    assert steady and all(starts == [0] * 8 + [3] * 8 for starts in steady)


@pytest.mark.parametrize("more", [(2, 11), pytest.param((4, 8), marks=pytest.mark.long)])
def test_the_device_holds_as_much_whatever_stages_and_microbatches_are(gpu, more):
    """Its rows are twice as large, so that a gap as large as a matmul's workspace, 4 MiB, is less than 1 %."""
    temporary = lambda *how, **more: compiled(*how, rows=2 * ROWS, **more).memory_analysis().temp_size_in_bytes
    few = temporary(2, 8)
    assert temporary(*more) == pytest.approx(few, rel=0.01)
    assert with_a_loop(2, 1, 11)
    assert temporary(2, 8, decision="save") > few + 4 * LAYERS * 2 * ROW


def test_the_device_holds_four_layers_and_two_pieces_in_place_of_the_slots(gpu):
    """One layer is written, one fetched, and a chunk's last layer travels each way, with a piece of it on its way.

    XLA holds a result of one branch while it plans the next, except where branches update an operand in place.
    """
    layers, slots = 8, Schedule(2, 1, 4).slots
    needs = lambda decision: compiled(2, 4, decision=decision, layers=layers).memory_analysis().temp_size_in_bytes
    freed = (needs("save") - needs("offload")) / (2 * ROW)
    assert freed == pytest.approx(slots * layers - (4 + 2 / layers), abs=0.25)


@pytest.mark.parametrize("microbatches", [11, pytest.param(3, marks=pytest.mark.long)])
def test_no_sum_of_gradients_is_copied(gpu, microbatches):
    """XLA would merge zeros of one shape, and copy a whole sum where a branch first adds to it."""
    module = compiled(2, microbatches, weights=("a", "b"))
    sums = re.compile(rf"= bf16\[(1,)?{LAYERS},{DIM},{DIM}\]\S* copy\(")
    assert not sums.findall(module.as_text())


@pytest.mark.long
def test_a_round_more_makes_the_program_no_larger(gpu):
    """A loop over ticks has those of one round of slots. XLA does not double-buffer it: it would copy what the branches
    of the second half return."""
    ticks = lambda count: sum(line.opcode == "conditional" for line in module_of(compiled(2, count, 1)))
    few, schedule = 11, with_a_loop(2, 1, 11)
    rounds = len(schedule.steady) // schedule.slots
    assert ticks(few) == ticks(few + schedule.slots) == schedule.ticks - (rounds - 1) * schedule.slots


def test_stages_send_to_their_neighbours_and_data_is_divided_within_them(gpu):
    """All other collectives are those of the loss: its mean over `data`, and gradients."""
    alone, divided = compiled(2, 11, 1), compiled(2, 11, 1, data=2)
    for module in map(module_of, (alone, divided)):
        sent = hlo.collectives(module, lambda line: EXCHANGE.search(line.op_name))
        assert 0 < sent.total() <= 2 * with_a_loop(2, 1, 11).ticks
        assert {kind for kind, _ in hlo.collectives(module) - sent} == {"all-reduce"}
        assert not hlo.collectives(module, lambda line: MOVED.search(line.op_name))
    halves = divided.memory_analysis().host_temp_size_in_bytes, alone.memory_analysis().host_temp_size_in_bytes
    assert 2 * halves[0] == halves[1]
    assert hlo.kernels_on_host_memory(module_of(divided)) == []


def rolling(x, w):
    x = tag(x, "x")
    return x + jnp.roll(jax.nn.silu(tag(x @ w, "fc1")), 1, 0), None


def test_layers_that_would_wait_for_other_stages_are_refused(gpu, monkeypatch):
    monkeypatch.setitem(globals(), "layer", rolling)
    program, _ = lowered(2, 1, data=2)
    with pytest.raises(
        NotImplementedError, match=r"\(collective-permute for jit\(_roll_static\)/.* XLA has all devices"
    ):
        program.compile()
