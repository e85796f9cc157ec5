"""The claim `conservation`: every byte that leaves the device appears on the host.

Exactly, in the jaxpr; on a GPU also in XLA's memory plan and, from the command line, in measured peaks, within one
layer and a stated tolerance.
"""

import jax

from ..._compiler_options import compiler_options
from ..._reference import as_reference, with_layers
from ..._residuals import residuals
from ..._table import OFFLOADED, RECOMPUTED, Residual, Residuals
from ..._text import readable
from .._check import FAILS, HOLDS, NOT_CHECKED, Found, Verdict
from .._program.exact import compiled
from .._program.host_transfers import host_transfers
from .._program.target import Target
from .shared import REFERENCE_MOVES_TOO, VISIBLE, no_reference


def conservation(target: Target) -> Found:
    """Compare bytes on the device and on the host with the reference's."""
    if not target.has_reference:
        return NOT_CHECKED, no_reference(target)
    if target.loss is None:
        return NOT_CHECKED, "a step's residuals are internal to it; verify its loss"
    ours, reference = (residuals(loss, *target.args) for loss in (target.loss, as_reference(target.loss)))
    moved = _moved(ours, reference)
    recomputed = [row for row in ours if (row.state, row.decision, row.kind) == (RECOMPUTED, "recompute", "overridden")]
    freed, held = reference.device_bytes - ours.device_bytes, sum(row.bytes for row in [*moved, *recomputed])
    detail = f"by the jaxpr {readable(freed)} less than the reference's on the device, {readable(held)} on the host"
    if freed != held:
        why = _cannot_be_told(target, reference)
        return (NOT_CHECKED, f"{detail}; but {why}") if why else (FAILS, f"{detail}: {freed - held:+,} bytes")
    checks = _by_memory_analysis(target, moved, ours.host_bytes), _by_peaks(target)
    failed = any(verdict == FAILS for verdict, _ in checks)
    return FAILS if failed else HOLDS, "; ".join((detail, *(text for _, text in checks)))


def _cannot_be_told(target: Target, reference: Residuals) -> str:
    """Why bytes may differ although nothing is wrong; empty if they may not."""
    if any(row.kind == "shared" for row in reference):
        return "branches of a cond share a residual in the reference, and not where one moves"
    if target.plans.overlap:
        return "plans are nested, and in the reference the outer one keeps more"
    transfers = list(host_transfers(target.reference_jaxpr))
    return f"{len(transfers)} {REFERENCE_MOVES_TOO}" if transfers else ""


def _moved(ours: Residuals, reference: Residuals) -> list[Residual]:
    """What the device has less of: arguments that are offloaded stay with the caller too."""
    arguments = {row.names for row in reference if row.kind == "argument"}
    return [row for row in ours if row.state == OFFLOADED and row.kind != "padding" and row.names not in arguments]


def _by_memory_analysis(target: Target, moved: list[Residual], on_the_host: int) -> Found:
    """Compare XLA's memory plans. `on_the_host`: bytes of all devices, padding rows included."""
    if jax.default_backend() != "gpu":
        return NOT_CHECKED, "memory plan not compared: this backend has no separate host memory"
    predicted = _freed_on_each(target, moved)
    if predicted < VISIBLE:
        return NOT_CHECKED, f"memory plan not compared: {readable(predicted)} would not show in it"
    reference_program = compiled(as_reference(target.run), target.arrays, compiler_options())
    ours, reference = (program.memory_analysis() for program in (target.fast_program, reference_program))
    freed, held = reference.temp_size_in_bytes - ours.temp_size_in_bytes, ours.host_temp_size_in_bytes
    devices = max(1, len(target.devices))
    wanted = on_the_host // devices
    # Each device has the whole of what is not divided among all of them.
    too_much = devices == 1 and held > 1.015 * wanted
    failed = too_much or FAILS in (_at_least(freed, predicted), _at_least(held, wanted))
    detail = f"XLA planned {readable(freed)} less, {_prediction(predicted)}"
    return FAILS if failed else HOLDS, f"{detail}, and {readable(held)} on the host for {readable(wanted)}"


def _by_peaks(target: Target) -> Found:
    """Compare the peaks that two fresh processes measured."""
    if target.peaks is None:
        return NOT_CHECKED, "peaks not measured: only the command line does that"
    if isinstance(target.peaks, str):
        return NOT_CHECKED, f"peaks not measured: {target.peaks}"
    ours, reference, most = target.peaks
    assert target.loss
    loss = target.loss if most is None else with_layers(target.loss, most)
    moved = _moved(*(residuals(f, *target.args) for f in (loss, as_reference(loss))))
    predicted = _freed_on_each(target, moved)
    if predicted < VISIBLE:
        return NOT_CHECKED, f"peaks not compared: {readable(predicted)} would not show in them"
    freed = reference - ours
    detail = f"at the peak of fresh processes {readable(freed)} less, {_prediction(predicted)}"
    layers = "" if most is None else f", with the first {most} layers of each scan"
    return _at_least(freed, predicted), detail + layers


def _freed_on_each(target: Target, moved: list[Residual]) -> int:
    """Bytes per device: the layer in flight keeps its own there."""
    freed = sum(row.bytes - row.bytes_per_layer * (row.layers > 1) for row in moved)
    return freed // max(1, len(target.devices))


def _at_least(freed: int, predicted: int) -> Verdict:
    return HOLDS if freed > 0.985 * predicted else FAILS


def _prediction(predicted: int) -> str:
    return f"predicted {readable(predicted)} (tolerance 1.5 %)"
