"""Sum gradients over microbatches whose layers run on pipeline stages, or evaluate the loss there."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from ..._policy import Policy
from ..._text import readable
from ..decide.mutable_refs import passes_refs
from ..host.limit import HostPoolFull, auto_axes, host_pool_bytes
from ..host.need import Need
from ..layers.scan_primitive import on_a_stage
from ..microbatches import interleaved
from ..microbatches.call import Call, Sums, microbatch_of
from . import evaluate, pipeline
from .chunk import Chunks, chunk_loops
from .collectives import refuse_compiled
from .last_rows import beyond_a_row
from .loss import Divided, StagedLoss, divided_at, scans_of
from .schedule import Schedule


class Stages(NamedTuple):
    """Pipeline stages: over which mesh axis, its size, and how many chunks of layers each has."""

    axis: str
    size: int
    virtual: int


def sums_on_stages(call: Call, stages: Stages) -> Sums:
    """Return the sums of losses and gradients, and the other results."""
    schedule = Schedule(stages.size, stages.virtual, call.microbatches)
    divided, chunks = _dealt(call, stages, schedule)
    staged = StagedLoss(divided, chunks, call.operands[: call.fixed])
    need = _need(staged, schedule)
    _refuse_what_does_not_fit(need, schedule)

    def run(*operands: Any) -> tuple[list[Any], list[Any]]:
        loss = StagedLoss(divided, chunks, operands[: call.fixed])
        microbatch = lambda number: microbatch_of(operands[call.fixed :], number)
        return pipeline.run(loss, microbatch, schedule, stages.axis)

    loops = (chunks.loops,)
    of_one = interleaved.Loss(call.jaxpr, call.differentiated)
    what = interleaved.Interleaved(
        of_one, loops, loops, loops, call.microbatches, schedule, None, stages.axis, need, refuse_compiled
    )
    return call.sums_of(interleaved.bind(run, what, *call.operands))


def values_on_stages(call: Call, stages: Stages) -> tuple[Any, Any]:
    """Return all losses, and the other results."""
    schedule = Schedule(stages.size, stages.virtual, call.microbatches)
    divided, chunks = _dealt(call, stages, schedule, keep_nothing=True)
    loss = StagedLoss(divided, chunks, call.operands[: call.fixed])
    losses, *others = evaluate.run(loss, call.microbatch, schedule, stages.axis)
    return losses, call.with_others(others)


def _dealt(call: Call, stages: Stages, schedule: Schedule, keep_nothing: bool = False) -> tuple[Divided, Chunks]:
    """Divide the loss at the longest scan whose layers can be dealt and that the gradient reaches.

    `keep_nothing`: nothing is offloaded.

    Raises:
      ValueError, NotImplementedError: there is none, or its layers cannot be dealt.
    """
    if passes_refs(call.jaxpr):
        raise NotImplementedError(
            f"accumulate: stages={stages.axis!r}: the loss has a jax.new_ref outside of other control flow; return "
            "what it would hold, with has_aux=True, or accumulate without stages"
        )
    scans = scans_of(call)
    each = (divided_at(call, number) for number in _to_deal(schedule, scans))
    divided = next((divided for divided in each if any(divided.perturbed)), None)
    if divided is None:
        raise ValueError(_nothing_to_deal(schedule, scans))
    params = divided.scan.params
    if params["call_jaxpr"].eqns[0].params["reverse"]:
        raise NotImplementedError("accumulate: stages: a scan with reverse=True cannot be dealt; reverse its xs")
    if params["on_stage"] is None:
        raise NotImplementedError(
            "accumulate: stages: a scan inside vmap or checkify, or one that offload replaced, cannot be dealt; call "
            "jaxoffload.scan"
        )
    _refuse_effects(call, stages)
    policy, strict = (Policy(), False) if keep_nothing else (params["policy"], params["strict"])
    with on_a_stage(stages.axis):
        loops = chunk_loops(params["on_stage"], divided.perturbed, policy, strict, schedule.chunks, schedule.slots)
    carry = range(loops.consts, loops.consts + loops.carry)
    others = [i for i in range(len(divided.perturbed)) if i not in carry]
    along = tuple(i for i in others if divided.varies[i])
    computed = (i for i in others if divided.perturbed[i] and not divided.varies[i] and not divided.moved(i))
    return divided, Chunks(loops, schedule.stages, schedule.virtual_stages, along, frozenset(computed))


def _to_deal(schedule: Schedule, scans: Sequence[JaxprEqn]) -> list[int]:
    """Return the numbers of the scans whose layers the chunks divide, the longest first."""
    lengths = list(map(_length, scans))
    dealt = [n for n, length in enumerate(lengths) if length and length % schedule.chunks == 0]
    return sorted(dealt, key=lambda n: -lengths[n])


def _length(scan: JaxprEqn) -> int:
    return scan.params["call_jaxpr"].eqns[0].params["length"]


def _nothing_to_deal(schedule: Schedule, scans: Sequence[JaxprEqn]) -> str:
    lengths = [length for scan in scans if (length := _length(scan))]
    has = f"scans of {', '.join(map(str, lengths))} layers" if lengths else "no scan of jaxoffload's"
    chunks = f"{schedule.stages} stages * {schedule.virtual_stages} virtual stages"
    return (
        f"accumulate: the loss has {has}, outside of other control flow; the gradient must reach one whose layers are "
        f"divisible by {chunks}"
    )


def _refuse_effects(call: Call, stages: Stages) -> None:
    if effects := call.jaxpr.effects:
        raise NotImplementedError(
            f"accumulate: stages={stages.axis!r}: the loss has effects ({', '.join(map(str, effects))}), and stages "
            "run its layers for microbatches that do not exist, too; remove them, or accumulate without stages"
        )


def _need(loss: StagedLoss, schedule: Schedule) -> Need:
    need = interleaved.need_of_microbatches([loss.chunks.loops], loss.beside, schedule.slots)
    travels = (s for s in loss.chunks.loops.segments if s.on_host == s.layers > 0)
    return need.plus(Need(other=sum(beyond_a_row(s.layer, s.layers) for s in travels)), schedule.slots)


def _refuse_what_does_not_fit(need: Need, schedule: Schedule) -> None:
    """Raise if the pool cannot hold what a stage offloads, with what stands beside its layers."""
    pool = host_pool_bytes()
    if pool is not None and need.bytes() > pool:
        what = f"{schedule.slots} microbatches per stage, and what stands beside their layers"
        text = f"{what}, offload {readable(need.bytes())} per device; the pinned host pool holds {readable(pool)}"
        raise HostPoolFull("accumulate", text, need.bytes(), pool, None, auto_axes())
