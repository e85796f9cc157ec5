"""The claim `conservation`: every byte that leaves the device appears on the host.

Exactly, in the jaxpr; on a GPU also in XLA's memory plan, within one layer and a stated tolerance.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from ..._compiler_options import compiler_options
from ..._engine.host.need import need_of
from ..._engine.jaxprs.walk import walk
from ..._engine.microbatches.interleaved import interleaved_p, is_staged
from ..._engine.stages.last_rows import cut
from ..._engine.stages.schedule import Schedule, Tick
from ..._jax import SHARD_MAP, evaluate, nbytes
from ..._text import readable
from ..._tracing import as_reference
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program.host_transfers import bytes_put, for_host
from .._program.memory import VISIBLE, memory_plan
from .._program.results import without_dead_code
from .._program.target import Target
from .._residuals.residuals import residuals
from .._residuals.table import OFFLOADED, RECOMPUTED, SAVED, Residual, Residuals

TOLERANCE = 0.015  # of what XLA planned


def conservation(target: Target) -> Found:
    """Compare bytes on the device and on the host with the reference's."""
    if target.no_reference:
        return NOT_CHECKED, target.no_reference
    eqn, loss, args = None, target.loss, target.args
    if loss is None:
        if (eqn := _interleaved(target)) is None:
            return NOT_CHECKED, "a step's residuals are internal to it; verify its loss"
        loss, args = _loss_of(eqn), tuple(eqn.params["loss"].jaxpr.in_avals)
    ours, reference = residuals(loss, *args), residuals(as_reference(loss), *args)
    # What is recomputed because the host has no room is not on the device either.
    again = [r for r in ours if (r.state, r.decision, r.kind) == (RECOMPUTED, "recompute", "overridden")]
    freed = reference.device_bytes - ours.device_bytes
    moved = _moved(ours, reference)
    held = sum(row.bytes for row in [*moved, *again])
    detail = "of one microbatch " * (eqn is not None)
    detail += f"by the jaxpr {readable(freed)} less than the reference's on the device, {readable(held)} on the host"
    if freed != held:
        why = _cannot_be_told(target, reference)
        return (NOT_CHECKED, f"{detail}; but {why}") if why else (FAILS, f"{detail}: {freed - held:+,} bytes")
    if eqn is not None:
        verdict, more = _of_step(target, eqn, ours, moved)
    else:
        off_device = [(row.bytes - row.bytes_per_layer * (row.layers > 1), row.parts) for row in moved]  # one in flight
        verdict, more = _by_xlas_plan(target, ours.host_bytes // target.device_count, ours.host_bytes, off_device)
    return verdict, f"{detail}; {more}"


def _interleaved(target: Target) -> JaxprEqn | None:
    """Return the one call of `accumulate` in a step; None if there is another number."""
    sites = [site for site in walk(target.jaxpr) if site.eqn.primitive is interleaved_p]
    if len(sites) != 1 or any(eqn.primitive.name == SHARD_MAP for eqn in sites[0].enclosing):
        return None
    return sites[0].eqn


def _loss_of(eqn: JaxprEqn) -> Callable[..., Any]:
    """Return the loss of one microbatch, differentiated with respect to its parameters."""
    loss = eqn.params["loss"]

    def of_operands(*operands: Any) -> Any:
        fixed = zip(operands, loss.differentiated, strict=True)
        value, *_ = evaluate(loss.jaxpr, [x if moves else lax.stop_gradient(x) for x, moves in fixed])
        return value

    return of_operands


def _moved(ours: Residuals, reference: Residuals) -> list[Residual]:
    """Return the residuals that leave the device. Offloaded arguments do not: the caller keeps them there."""
    arguments = {row.names for row in reference if row.kind == "argument"}
    return [r for r in ours if r.state == OFFLOADED and r.kind != "padding" and r.names not in arguments]


def _cannot_be_told(target: Target, reference: Residuals) -> str:
    """Return why bytes may differ although nothing is wrong; empty if they may not."""
    if any(row.kind == "shared" for row in reference):
        return "branches of a cond share a residual in the reference, and not where one moves"
    if target.plans.overlap:
        return "plans are nested, and in the reference the outer one keeps more"
    if target.plans.kept:
        return "a checkpoint keeps the carry of a scan in it, which the reference recomputes"
    return target.moved_by_others


def _of_step(target: Target, eqn: JaxprEqn, ours: Residuals, moved: list[Residual]) -> Found:
    """Check what the microbatches of a step put on the host, and how much is there at a time.

    If two interleave, they have two sets of stacks, and each writes its rows once. In the first and in the last one
    residuals may stay on the device.
    """
    one, microbatches = ours.host_bytes, eqn.params["microbatches"]
    most = put_into_slots(eqn) if is_staged(eqn) else (2 + microbatches) * one
    if (more := bytes_put(without_dead_code(eqn.params["call_jaxpr"])) - most) > 0:
        return FAILS, f"beside its stacks and their rows the step puts {readable(more)} on the host"
    if is_staged(eqn):
        need, slots = need_of(target.jaxpr).bytes(), eqn.params["schedule"].slots
        verdict, planned = _by_xlas_plan(target, need, need, [])
        return (
            verdict,
            f"each stage has {slots} slots of {readable(_slot_bytes(eqn))}, padding rows included; {planned}",
        )
    # A layer of each is in flight; on the device, too, there are two.
    freed = [(row.bytes - 2 * row.bytes_per_layer, row.parts) for row in moved]
    freed += [(-row.bytes, row.parts) for row in ours if row.state == SAVED]
    fewest = one // target.device_count if microbatches > 2 else 0
    verdict, planned = _by_xlas_plan(target, fewest, 2 * one, freed)
    return verdict, f"of two at most {readable(2 * one)} on the host, padding rows included; {planned}"


def put_into_slots(eqn: JaxprEqn) -> int:
    """Return the bytes that a step on stages puts into its slots on the host.

    Each slot is made once. Each stage has a branch, which writes to a slot in each tick with a forward pass, unless it
    is idle.
    """
    schedule: Schedule = eqn.params["schedule"]
    ticks = [Tick(schedule, number) for number in range(schedule.ticks)]
    written = sum(tick.idle.count(False) for tick in ticks if tick.passes[0])
    return _slot_bytes(eqn) * (schedule.slots + written)


def _slot_bytes(eqn: JaxprEqn) -> int:
    """Return the bytes of a stage's stacks on the host, of one slot."""
    size = 0
    for segment in eqn.params["loops"][0].segments:
        rows = [aval for _, aval in for_host(segment)]
        size += segment.layers * sum(map(nbytes, rows))
        if segment.on_host == segment.layers:  # a piece of the last layer's row travels with each layer
            size += sum(segment.layers * nbytes(a) // cut(a.shape, segment.layers).pieces for a in rows)
    return size


def _by_xlas_plan(target: Target, fewest: int, most: int, freed: list[tuple[int, int]]) -> Found:
    """Compare XLA's memory plans.

    Args:
      fewest, most: bytes that a device has on the host, padding rows included.
      freed: bytes that are not on the device, each with the parts that a mesh divides them into.
    """
    if jax.default_backend() != "gpu":
        return HOLDS, "memory plan not compared: this backend has no separate host memory"
    if most < VISIBLE:
        return HOLDS, f"memory plan not compared: {readable(most)} would not show in it"
    predicted = max(0, sum(size // parts for size, parts in freed))
    # The table takes for whole what nothing divides in the trace, and XLA may divide it nevertheless.
    least = min(predicted, max(0, sum(size for size, _ in freed)) // target.device_count)
    programs = (False, True) if least >= VISIBLE else (False,)
    plans = [memory_plan(target.compiled(compiler_options, reference)) for reference in programs]
    if None in plans:
        return HOLDS, "memory plan not compared: XLA does not say what it planned"
    held = plans[0].host_temp_size_in_bytes
    is_right = (1 - TOLERANCE) * fewest <= held <= (1 + TOLERANCE) * most
    wanted = readable(most) if fewest == most else f"{readable(fewest)} to {readable(most)}"
    detail = f"XLA planned {readable(held)} on the host for {wanted} (tolerance {TOLERANCE:.1%})"
    if least >= VISIBLE:
        less = plans[1].temp_size_in_bytes - plans[0].temp_size_in_bytes
        is_right = is_right and less > (1 - TOLERANCE) * least
        detail += f", and {readable(less)} less on the device, predicted {readable(predicted)}"
        detail += f", or {readable(least)} if all is divided" * (least < predicted)
    return HOLDS if is_right else FAILS, detail
