"""The claim `conservation`: every byte that leaves the device appears on the host.

Exactly, in the jaxpr; on a GPU also in XLA's memory plan, within one layer and a stated tolerance.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from ..._engine.jaxprs.walk import walk
from ..._engine.microbatches.interleaved import interleaved_p, is_staged
from ..._jax import SHARD_MAP, evaluate
from ..._text import readable
from ..._tracing import as_reference
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program.host_transfers import bytes_put, host_transfers
from .._program.memory import memory_plan
from .._program.results import without_dead_code
from .._program.target import Target
from .._residuals.residuals import residuals
from .._residuals.table import OFFLOADED, RECOMPUTED, SAVED, Residual, Residuals
from .shared import REFERENCE_MOVES_TOO, TOLERANCE, VISIBLE, no_reference
from .stages import bytes_of_stages


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
    moved = _moved(ours, reference)
    held = sum(row.bytes for row in [*moved, *again])
    detail = "of one microbatch " * (eqn is not None)
    detail += f"by the jaxpr {readable(freed)} less than the reference's on the device, {readable(held)} on the host"
    if freed != held:
        why = _cannot_be_told(target, reference)
        return (NOT_CHECKED, f"{detail}; but {why}") if why else (FAILS, f"{detail}: {freed - held:+,} bytes")
    if eqn is not None and is_staged(eqn):
        verdict, more = bytes_of_stages(target, eqn)
    elif eqn is not None:
        verdict, more = _of_two_microbatches(target, eqn, ours, moved)
    else:
        off_device = [(row.bytes - row.bytes_per_layer * (row.layers > 1), row.parts) for row in moved]  # one in flight
        verdict, more = _by_xlas_plan(target, (ours.host_bytes, ours.host_bytes), off_device)
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
    """Check the interleaved microbatches of a step, of which two are on the host at a time: they have two sets of
    stacks, and each writes its rows once. In the first and in the last one residuals may stay on the device."""
    one, microbatches = ours.host_bytes, eqn.params["microbatches"]
    if (more := bytes_put(without_dead_code(eqn.params["call_jaxpr"])) - (2 + microbatches) * one) > 0:
        return FAILS, f"beside two sets of stacks and their rows the step puts {readable(more)} there"
    # A layer of each is in flight; on the device, too, there are two.
    freed = [(row.bytes - 2 * row.bytes_per_layer, row.parts) for row in moved]
    freed += [(-row.bytes, row.parts) for row in ours if row.state == SAVED]
    verdict, planned = _by_xlas_plan(target, (one if microbatches > 2 else 0, 2 * one), freed)
    return verdict, f"of two at most {readable(2 * one)} on the host, padding rows included; {planned}"


def _by_xlas_plan(target: Target, on_host: tuple[int, int], freed: list[tuple[int, int]]) -> Found:
    """Compare XLA's memory plans.

    Args:
      on_host: the fewest and the most bytes there, of all devices, padding rows included.
      freed: bytes that are not on the device, each with the parts that a mesh divides them into.
    """
    if jax.default_backend() != "gpu":
        return HOLDS, "memory plan not compared: this backend has no separate host memory"
    devices = max(1, len(target.devices))
    predicted = max(0, sum(size // parts for size, parts in freed))
    # The table takes for whole what nothing divides in the trace, and XLA may divide it nevertheless.
    least = min(predicted, max(0, sum(size for size, _ in freed)) // devices)
    if least < VISIBLE:
        return HOLDS, f"memory plan not compared: {readable(least)} would not show in it"
    ours, reference = map(memory_plan, (target.fast_program, target.fast_reference))
    if ours is None or reference is None:
        return HOLDS, "memory plan not compared: XLA does not say what it planned"
    less, held = reference.temp_size_in_bytes - ours.temp_size_in_bytes, ours.host_temp_size_in_bytes
    some, most = on_host[0] // devices, on_host[1]
    host = readable(most) if some == most else f"{readable(some)} to {readable(most)}"
    is_less = less > (1 - TOLERANCE) * least
    is_there = (1 - TOLERANCE) * some <= held <= (1 + TOLERANCE) * most
    return HOLDS if is_less and is_there else FAILS, (
        f"XLA planned {readable(less)} less, predicted {readable(predicted)}"
        + f", or {readable(least)} if all is divided" * (least < predicted)
        + f" (tolerance {TOLERANCE:.1%}), and {readable(held)} on the host for {host}"
    )
