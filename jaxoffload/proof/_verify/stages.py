"""The checks of `conservation` and `placement` for pipeline stages, which have no reference on one device."""

import re

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import ppermute_p

from ..._engine.host.need import need_of
from ..._engine.jaxprs.walk import walk
from ..._engine.stages.last_rows import cut
from ..._engine.stages.schedule import Schedule, Tick
from ..._jax import nbytes
from ..._text import readable
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program.hlo import collectives
from .._program.host_transfers import bytes_put, for_host
from .._program.memory import memory_plan
from .._program.results import without_dead_code
from .._program.target import Target
from .shared import TOLERANCE, first


def bytes_of_stages(target: Target, eqn: JaxprEqn) -> Found:
    """Check that stages put on the host what their microbatches in flight keep there, and nothing more."""
    put, wanted = put_on_host(eqn)
    if put > wanted:
        return FAILS, f"beside what goes to the slots the stages put {readable(put - wanted)} there"
    detail = (
        f"each stage has {eqn.params['schedule'].slots} slots of {readable(_slot_bytes(eqn))}, padding rows included"
    )
    if jax.default_backend() != "gpu":
        return HOLDS, f"{detail}; memory plan not compared: this backend has no separate host memory"
    if (plan := memory_plan(target.fast_program)) is None:
        return HOLDS, f"{detail}; memory plan not compared: XLA does not say what it planned"
    planned, need = plan.host_temp_size_in_bytes, need_of(target.jaxpr).bytes()
    is_right = abs(planned - need) <= TOLERANCE * need
    return (
        HOLDS if is_right else FAILS,
        f"{detail}; XLA planned {readable(planned)} for {readable(need)} on each device",
    )


def put_on_host(eqn: JaxprEqn) -> tuple[int, int]:
    """Return the bytes that the trace of a step on stages puts on the host, and those that go to slots.

    Each slot is made once. Each stage has a branch, which writes to a slot in each tick with a forward pass, unless it
    is idle.
    """
    schedule: Schedule = eqn.params["schedule"]
    ticks = [Tick(schedule, number) for number in range(schedule.ticks)]
    written = sum(tick.idle.count(False) for tick in ticks if tick.passes[0])
    return bytes_put(without_dead_code(eqn.params["call_jaxpr"])), _slot_bytes(eqn) * (schedule.slots + written)


def _slot_bytes(eqn: JaxprEqn) -> int:
    """Return the bytes of a stage's stacks on the host, of one slot."""
    size = 0
    for segment in eqn.params["loops"][0].segments:
        rows = [aval for _, aval in for_host(segment)]
        size += segment.layers * sum(map(nbytes, rows))
        if segment.on_host == segment.layers:  # a piece of the last layer's row travels with each layer
            size += sum(segment.layers * nbytes(a) // cut(a.shape, segment.layers).pieces for a in rows)
    return size


# What XLA inserts for a layer itself cannot cross stages: their axis is manual there.
EXCHANGE = re.compile(r"/jaxoffload\.tick/shard_map/ppermute$")
MOVED = re.compile(r"/jaxoffload\.tick/(\([^()]*\b)?(shard_map|optimization_barrier)(:|\)|$)")


def exchanges(target: Target) -> Found:
    """Check that XLA runs no more exchanges of stages than were traced, and moves nothing else between them."""
    module = target.module
    moved = collectives(module, lambda line: bool(MOVED.search(line.op_name)))
    sent = collectives(module, lambda line: bool(EXCHANGE.search(line.op_name))).total()
    asked = sum(site.runs * len(site.eqn.outvars) for site in walk(target.jaxpr) if site.eqn.primitive is ppermute_p)
    if sent > asked:
        return FAILS, f"{sent} arrays are sent to neighbours; the traced step asks for {asked}"
    if moved:
        listed = first([f"{count} {kind} of {shape}" for (kind, shape), count in moved.items()])
        advice = "shard the xs over the axis; for virtual stages store them in groups: docs/stages.md"
        return FAILS, f"what stages hold moves between them in each step: {listed}; {advice}"
    if not sent:
        return NOT_CHECKED, "the compiled program does not say which collectives are exchanges of stages"
    asks = f"{sent} arrays are sent to neighbours, as the traced step asks"
    return HOLDS, f"{asks}; nothing that stages hold moves between them"
