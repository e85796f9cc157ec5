"""The claim `conservation`: every byte that leaves the device appears on the host.

Exactly, in the jaxpr; on a GPU also in XLA's memory plan, within one layer and a stated tolerance.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from ..._engine.jaxprs.walk import walk
from ..._engine.microbatches.interleaved import interleaved_p, is_staged
from ..._jax import SHARD_MAP, evaluate, nbytes
from ..._text import readable
from ..._tracing import as_reference
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program.host_transfers import bytes_put, for_host, host_transfers
from .._program.memory import memory_plan
from .._program.results import without_dead_code
from .._program.target import Target
from .._residuals.residuals import residuals
from .._residuals.table import OFFLOADED, RECOMPUTED, SAVED, Residual, Residuals
from .shared import REFERENCE_MOVES_TOO, VISIBLE, no_reference
from .stages import bytes_of_stages

TOLERANCE = 0.015  # of what XLA planned


def conservation(target: Target) -> Found:
    """Compare bytes on the device and on the host with the reference's."""
    if not target.has_reference:
        return NOT_CHECKED, no_reference(target)
    eqn, loss, args = None, target.loss, target.args
    if loss is None:
        if (eqn := _interleaved(target)) is None:
            return NOT_CHECKED, "a step's residuals are internal to it; verify its loss"
        loss, args = _loss_of(eqn), tuple(eqn.params["loss"].jaxpr.in_avals)
    ours, reference = residuals(loss, *args), residuals(as_reference(loss), *args)
    # What is recomputed because the host has no room is not on the device either.
    again = [r for r in ours if (r.state, r.decision, r.kind) == (RECOMPUTED, "recompute", "overridden")]
    freed = reference.device_bytes - ours.device_bytes
    held = sum(row.bytes for row in [*_moved(ours, reference), *again])
    detail = "of one microbatch " * (eqn is not None)
    detail += f"by the jaxpr {readable(freed)} less than the reference's on the device, {readable(held)} on the host"
    if freed != held:
        why = _cannot_be_told(target, reference)
        return (NOT_CHECKED, f"{detail}; but {why}") if why else (FAILS, f"{detail}: {freed - held:+,} bytes")
    if eqn is None:
        verdict, more = _by_xlas_plan(target, ours, _moved(ours, reference), ours.host_bytes)
    elif is_staged(eqn):
        verdict, more = bytes_of_stages(target, eqn)
    else:
        verdict, more = _of_two_microbatches(target, eqn, ours, _moved(ours, reference))
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
    transfers = list(host_transfers(target.reference_jaxpr))
    return f"{len(transfers)} {REFERENCE_MOVES_TOO}" if transfers else ""


def _of_two_microbatches(target: Target, eqn: JaxprEqn, ours: Residuals, moved: list[Residual]) -> Found:
    """Check the interleaved microbatches of a step, of which two are on the host at a time."""
    of_one = at_once = put = 0
    segments = [[s for loops in eqn.params[which] for s in loops.segments] for which in ("loops", "first", "last")]
    for segment, first, last in zip(*segments, strict=True):
        for residual, (_, aval) in zip(segment.layout.moved, for_host(segment), strict=True):
            # In the first and in the last microbatch it may stay on the device, or be recomputed.
            ends = [residual in end.layout.moved for end in (first, last)]
            there = [ends[0], *[True] * (eqn.params["microbatches"] - 2), ends[1]]
            stack = segment.layers * nbytes(aval)
            last_row = nbytes(aval) * (segment.on_host == segment.layers)  # which is on its own
            # A forward pass writes to the stack of the microbatch before the one before it, if there is one.
            made = sum(is_there and not (m > 1 and there[m - 2]) for m, is_there in enumerate(there))
            of_one += stack + last_row
            # The last layer's row is read before the next one is written.
            at_once += stack * max(map(sum, itertools.pairwise(there))) + last_row
            put += stack * made + (stack + last_row) * sum(there)
    if of_one != ours.host_bytes:
        return NOT_CHECKED, "of two it is not known: the loss offloads beside its scans too"
    if (more := bytes_put(without_dead_code(eqn.params["call_jaxpr"])) - put) > 0:
        return FAILS, f"beside two sets of stacks and their rows the step puts {readable(more)} there"
    verdict, planned = _by_xlas_plan(target, ours, moved, at_once, sets=2)
    return verdict, f"of two {readable(at_once)} on the host, padding rows included; {planned}"


def _by_xlas_plan(target: Target, ours: Residuals, moved: list[Residual], on_the_host: int, sets: int = 1) -> Found:
    """Compare XLA's memory plans.

    `on_the_host`: bytes of all devices, padding rows included. `sets`: how many microbatches are there at a time; of
    what stays on the device there are as many, and a layer of each is in flight.
    """
    if jax.default_backend() != "gpu":
        return HOLDS, "memory plan not compared: this backend has no separate host memory"
    freed = [(row.bytes - row.bytes_per_layer * (sets if sets > 1 else row.layers > 1), row.parts) for row in moved]
    freed += [(-row.bytes, row.parts) for row in ours if sets > 1 and row.state == SAVED]
    devices = max(1, len(target.devices))
    predicted = max(0, sum(size // parts for size, parts in freed))
    # The table takes for whole what nothing divides in the trace, and XLA may divide it nevertheless.
    least = min(predicted, max(0, sum(size for size, _ in freed)) // devices)
    if least < VISIBLE:
        return HOLDS, f"memory plan not compared: {readable(least)} would not show in it"
    ours_plan, reference_plan = map(memory_plan, (target.fast_program, target.fast_reference))
    if ours_plan is None or reference_plan is None:
        return HOLDS, "memory plan not compared: XLA does not say what it planned"
    less, held = reference_plan.temp_size_in_bytes - ours_plan.temp_size_in_bytes, ours_plan.host_temp_size_in_bytes
    host = f"{readable(on_the_host // devices)}" + f" to {readable(on_the_host)}" * (devices > 1)
    is_less = less > (1 - TOLERANCE) * least
    is_there = (1 - TOLERANCE) * (on_the_host // devices) < held < (1 + TOLERANCE) * on_the_host
    return HOLDS if is_less and is_there else FAILS, (
        f"XLA planned {readable(less)} less, predicted {readable(predicted)}"
        + f", or {readable(least)} if all is divided" * (least < predicted)
        + f" (tolerance {TOLERANCE:.1%}), and {readable(held)} on the host for {host}"
    )
