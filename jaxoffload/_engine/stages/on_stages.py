"""Enter pipeline stages: deal the layers of a loss in chunks, then sum its gradients there, or evaluate it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ..._policy import Policy
from ..._text import readable
from ..._tracing import tracing
from ..decide.mutable_refs import passes_refs
from ..host.limit import HostPoolFull, auto_axes, host_pool_bytes
from ..host.need import Need
from ..layers.scan_primitive import on_a_stage
from ..microbatches import interleaved
from ..microbatches.call import Call, Sums, microbatch_of
from . import evaluate, pipeline
from .chunk import Chunks, chunk_loops
from .collectives import refuse_compiled
from .last_rows import beyond_a_row, travels
from .loss import StagedLoss, divisions
from .schedule import Schedule


class Stages(NamedTuple):
    """Pipeline stages: for which caller, over which mesh axis, its size, and how many chunks of layers each has."""

    caller: str
    axis: str
    size: int
    virtual: int


def sums_on_stages(call: Call, stages: Stages) -> Sums:
    """Return the sums of losses and gradients, and the other results."""
    staged = _staged(call, stages)
    schedule, loops = staged.chunks.schedule, (staged.chunks.loops,)
    need = _need(staged)

    def run(*operands: Any) -> tuple[list[Any], list[Any]]:
        given, batch = operands[: call.fixed], operands[call.fixed :]
        microbatch = lambda number: microbatch_of(batch, number)
        return pipeline.run(dataclasses.replace(staged, given=given, microbatch=microbatch))

    of_one = interleaved.Loss(call.jaxpr, call.differentiated)
    what = interleaved.Interleaved(
        of_one, loops, loops, loops, call.microbatches, schedule, stages.axis, need, refuse_compiled
    )
    return call.sums_of(interleaved.bind(run, what, *call.operands))


def values_on_stages(call: Call, stages: Stages) -> tuple[Any, Any]:
    """Return all losses, and the other results."""
    of = lambda operands: list(map(_without_derivative, operands))
    call = call._replace(consts=of(call.consts), params=of(call.params), batch=of(call.batch))
    losses, *others = evaluate.run(_staged(call, stages, keep_nothing=True))
    return losses, call.with_others(others)


@jax.custom_jvp
def _without_derivative(x: Any) -> Any:
    """Return an operand, whose derivative raises: what stages exchange as bits has none."""
    return x


@_without_derivative.defjvp
def _refuse_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "evaluate: on pipeline stages it cannot be differentiated; accumulate(loss, stages=...) returns gradients"
    )


def _staged(call: Call, stages: Stages, keep_nothing: bool = False) -> StagedLoss:
    """Divide the loss at the longest scan whose layers can be dealt and that the gradient reaches.

    `keep_nothing`: nothing is offloaded, and no gradient asked for.

    Raises:
      ValueError, NotImplementedError: there is none, or its layers cannot be dealt.
    """
    if passes_refs(call.jaxpr):
        raise NotImplementedError(
            f"{stages.caller}: stages={stages.axis!r}: the loss has a jax.new_ref outside of other control flow; "
            "return what it would hold, with has_aux=True, or do without stages"
        )
    schedule, each = Schedule(stages.size, stages.virtual, call.microbatches), divisions(call)
    longest_first = sorted(each, key=lambda divided: -divided.length)
    to_deal = (divided for divided in longest_first if divided.length and divided.length % schedule.chunks == 0)
    divided = next((divided for divided in to_deal if keep_nothing or any(divided.perturbed)), None)
    if divided is None:
        lengths = [divided.length for divided in each if divided.length]
        which = "one" if keep_nothing else "one that the gradient reaches"
        raise ValueError(f"{stages.caller}: {_nothing_to_deal(schedule, lengths, which)}")
    params = divided.scan.params
    if params["call_jaxpr"].eqns[0].params["reverse"]:
        raise NotImplementedError(f"{stages.caller}: stages: a scan with reverse=True cannot be dealt; reverse its xs")
    if params["on_stage"] is None:
        raise NotImplementedError(
            f"{stages.caller}: stages: a scan inside vmap or checkify, or one that offload replaced, cannot be dealt; "
            "call jaxoffload.scan outside of these"
        )
    if effects := call.jaxpr.effects:
        raise NotImplementedError(
            f"{stages.caller}: stages={stages.axis!r}: the loss has effects ({', '.join(map(str, effects))}), and "
            "stages run its layers for microbatches that do not exist, too; remove them, or do without stages"
        )
    policy, strict = (Policy(), False) if keep_nothing else (params["policy"], params["strict"])
    with on_a_stage(stages.axis):
        loops = chunk_loops(params["on_stage"], divided.perturbed, policy, strict, schedule.chunks, schedule.slots)
    carry = range(loops.consts, loops.consts + loops.carry)
    others = [i for i in range(len(divided.perturbed)) if i not in carry]
    along = tuple(i for i in others if divided.varies[i])
    apart = frozenset(i for i in others if divided.varies[i] or i not in divided.moved)
    chunks = Chunks(loops, schedule, stages.axis, along, apart)
    return StagedLoss(divided, chunks, call.operands[: call.fixed], call.microbatch)


def _nothing_to_deal(schedule: Schedule, lengths: Sequence[int], which: str) -> str:
    has = f"scans of {', '.join(map(str, lengths))} layers" if lengths else "no scan of jaxoffload's"
    chunks = f"{schedule.stages} stages * {schedule.virtual_stages} virtual stages"
    return f"the loss has {has}, outside of other control flow; the layers of {which} must be divisible by {chunks}"


def _need(loss: StagedLoss) -> Need:
    """Return what stages need of the host's memory, with what stands beside their layers.

    Raises:
      HostPoolFull: the pool does not hold that.
    """
    loops, slots = loss.chunks.loops, loss.chunks.schedule.slots
    need = interleaved.need_of_microbatches([loops], loss.beside, slots)
    pieces = sum(beyond_a_row(s.layer, s.layers) for s in filter(travels, loops.segments))
    need, pool = need.plus(Need(other=pieces), slots), host_pool_bytes()
    if pool is not None and tracing().trial is None and need.bytes() > pool:
        what = f"{slots} microbatches per stage, and what stands beside their layers"
        text = f"{what}, offload {readable(need.bytes())} per device; the pinned host pool holds {readable(pool)}"
        raise HostPoolFull("accumulate", text, need.bytes(), pool, None, auto_axes())
    return need
