"""The claim `conservation`: every byte that leaves the device appears on the host.

Exactly, in the jaxpr; on a GPU also in XLA's memory plan and, from the command line, in measured peaks, within one
layer and a stated tolerance.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from ..._compiler_options import compiler_options
from ..._engine.jaxprs.walk import walk
from ..._engine.microbatches.interleaved import interleaved_p, is_staged
from ..._jax import SHARD_MAP, evaluate, nbytes
from ..._text import readable
from ..._tracing import as_reference, with_layers
from .._check import FAILS, HOLDS, NOT_CHECKED, Found, Verdict
from .._program.exact import compiled
from .._program.host_transfers import bytes_put, for_host, host_transfers
from .._program.memory import memory_plan
from .._program.results import without_dead_code
from .._program.target import Target
from .._residuals.residuals import residuals
from .._residuals.table import OFFLOADED, RECOMPUTED, Residual, Residuals
from .shared import REFERENCE_MOVES_TOO, VISIBLE, no_reference
from .stages import bytes_of_stages


def conservation(target: Target) -> Found:
    """Compare bytes on the device and on the host with the reference's."""
    if not target.has_reference:
        return NOT_CHECKED, no_reference(target)
    if target.loss is None:
        return _of_a_step(target)
    both = _residuals(target.loss, target.args)
    if both.freed != both.held:
        return _unequal(target, both)
    freed_on_each = _freed_on_each(target, both.moved)
    checks = _by_memory_analysis(target, freed_on_each, both.ours.host_bytes), _by_peaks(target)
    return _joined(both.detail, *checks)


class _Residuals(NamedTuple):
    """A loss's residuals, and its reference's."""

    ours: Residuals
    reference: Residuals

    @property
    def moved(self) -> list[Residual]:
        """The residuals that leave the device. Offloaded arguments do not: the caller keeps them there."""
        arguments = {row.names for row in self.reference if row.kind == "argument"}
        return [r for r in self.ours if r.state == OFFLOADED and r.kind != "padding" and r.names not in arguments]

    @property
    def freed(self) -> int:
        return self.reference.device_bytes - self.ours.device_bytes

    @property
    def held(self) -> int:
        """On the host, or recomputed because the host has no room."""
        again = [r for r in self.ours if (r.state, r.decision, r.kind) == (RECOMPUTED, "recompute", "overridden")]
        return sum(row.bytes for row in [*self.moved, *again])

    @property
    def detail(self) -> str:
        return (
            f"by the jaxpr {readable(self.freed)} less than the reference's on the device, {readable(self.held)} on "
            "the host"
        )


def _residuals(loss: Callable[..., Any], args: Any) -> _Residuals:
    return _Residuals(residuals(loss, *args), residuals(as_reference(loss), *args))


def _unequal(target: Target, both: _Residuals) -> Found:
    why = _cannot_be_told(target, both.reference)
    if why:
        return NOT_CHECKED, f"{both.detail}; but {why}"
    return FAILS, f"{both.detail}: {both.freed - both.held:+,} bytes"


def _joined(detail: str, *checks: Found) -> Found:
    """Return the verdict on bytes that agree exactly, with further checks of them."""
    failed = any(verdict == FAILS for verdict, _ in checks)
    return FAILS if failed else HOLDS, "; ".join((detail, *(text for _, text in checks)))


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


def _of_a_step(target: Target) -> Found:
    """Check the loss that `accumulate` interleaves in a step; two of its microbatches are on the host."""
    sites = [site for site in walk(target.jaxpr) if site.eqn.primitive is interleaved_p]
    if len(sites) != 1 or any(eqn.primitive.name == SHARD_MAP for eqn in sites[0].enclosing):
        return NOT_CHECKED, "a step's residuals are internal to it; verify its loss"
    eqn = sites[0].eqn
    both = _residuals(_loss_of(eqn), eqn.params["loss"].jaxpr.in_avals)
    if both.freed != both.held:
        return _unequal(target, both)
    detail = f"of one microbatch {both.detail}"
    if is_staged(eqn):
        return _joined(detail, bytes_of_stages(target, eqn))
    kept = list(_kept(eqn))
    if sum(k.stack + k.last for k in kept) != both.ours.host_bytes:
        return NOT_CHECKED, f"{detail}; of two it is not known: the loss offloads beside its scans too"
    put = sum(k.stack * k.stacks_made + (k.stack + k.last) * sum(k.on_host) for k in kept)
    if (more := bytes_put(without_dead_code(eqn.params["call_jaxpr"])) - put) > 0:
        return FAILS, f"{detail}; beside two sets of stacks and their rows the step puts {readable(more)} there"
    # The last layer's row is read before the next one is written.
    on_the_host = sum(k.stack * k.stacks_at_once + k.last for k in kept)
    detail += f"; of two {readable(on_the_host)} on the host, padding rows included"
    # Of what stays on the device there are two too, and a layer of each is in flight.
    stays = both.ours.device_bytes + 2 * sum(row.bytes_per_layer for row in both.moved)
    freed_on_each = max(0, both.freed - stays) // max(1, len(target.devices))
    return _joined(detail, _by_memory_analysis(target, freed_on_each, on_the_host))


class _Kept(NamedTuple):
    """A residual of a segment: bytes of its stack on the host, and of the last layer's row if that is on its own there.

    `on_host`: for each microbatch, whether it is kept there. In the first and in the last it may stay on the device,
    or be recomputed.
    """

    stack: int
    last: int
    on_host: list[bool]

    @property
    def stacks_made(self) -> int:
        """A forward pass writes to the stack of the microbatch before the one before it, if there is one."""
        return sum(there and not (m > 1 and self.on_host[m - 2]) for m, there in enumerate(self.on_host))

    @property
    def stacks_at_once(self) -> int:
        return max(map(sum, itertools.pairwise(self.on_host)))


def _kept(eqn: JaxprEqn) -> Iterator[_Kept]:
    """Yield what the scans of an interleaved loss keep on the host."""
    of = lambda which: [segment for loops in eqn.params[which] for segment in loops.segments]
    for segment, first, last in zip(of("loops"), of("first"), of("last"), strict=True):
        for residual, (_, aval) in zip(segment.layout.moved, for_host(segment), strict=True):
            in_first, in_last = (residual in end.layout.moved for end in (first, last))
            row = nbytes(aval)
            on_host = [in_first, *[True] * (eqn.params["microbatches"] - 2), in_last]
            yield _Kept(segment.layers * row, row * (segment.on_host == segment.layers), on_host)


def _loss_of(eqn: JaxprEqn) -> Callable[..., Any]:
    """Return the loss of one microbatch, differentiated with respect to its parameters."""
    loss = eqn.params["loss"]

    def of_operands(*operands: Any) -> Any:
        fixed = zip(operands, loss.differentiated, strict=True)
        value, *_ = evaluate(loss.jaxpr, [x if moves else lax.stop_gradient(x) for x, moves in fixed])
        return value

    return of_operands


def _by_memory_analysis(target: Target, predicted: int, on_the_host: int) -> Found:
    """Compare XLA's memory plans.

    `predicted`: what each device has less of. `on_the_host`: bytes of all devices, padding rows included.
    """
    if jax.default_backend() != "gpu":
        return NOT_CHECKED, "memory plan not compared: this backend has no separate host memory"
    if predicted < VISIBLE:
        return NOT_CHECKED, f"memory plan not compared: {readable(predicted)} would not show in it"
    reference_program = compiled(as_reference(target.run), target.arrays, compiler_options())
    ours, reference = (memory_plan(program) for program in (target.fast_program, reference_program))
    if ours is None or reference is None:
        return NOT_CHECKED, "memory plan not compared: XLA does not say what it planned"
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
    predicted = _freed_on_each(target, _residuals(loss, target.args).moved)
    if predicted < VISIBLE:
        return NOT_CHECKED, f"peaks not compared: {readable(predicted)} would not show in them"
    freed = reference - ours
    detail = f"at the peak of fresh processes {readable(freed)} less, {_prediction(predicted)}"
    layers = "" if most is None else f", with the first {most} layers of each scan"
    return _at_least(freed, predicted), detail + layers


def _freed_on_each(target: Target, moved: list[Residual]) -> int:
    """Return the bytes per device: the layer in flight keeps its own there."""
    freed = sum(row.bytes - row.bytes_per_layer * (row.layers > 1) for row in moved)
    return freed // max(1, len(target.devices))


def _at_least(freed: int, predicted: int) -> Verdict:
    return HOLDS if freed > 0.985 * predicted else FAILS


def _prediction(predicted: int) -> str:
    return f"predicted {readable(predicted)} (tolerance 1.5 %)"
