"""The claim `gradients`: every result equals the reference's, bit for bit or as far as rounding allows.

The reference is plain `lax.scan` and `jax.checkpoint`, keeping the same values on the device.
"""

from typing import Any, NamedTuple

import jax

from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program.exact import not_exact
from .._program.host_transfers import host_transfers
from .._program.target import Target, has_loops, most_layers_of
from .bits import differences, no_evidence, numbers
from .capacity import has_room_for, need, reference_that_fits
from .rounding import CHAOTIC, LIMIT, Rounding, furthest, rounding
from .shared import REFERENCE_MOVES_TOO, first, in_any_process, no_reference


def gradients(target: Target) -> Found:
    """Compare all results with the reference's."""
    if why := _no_other_program(target):
        return NOT_CHECKED, why
    fitting = reference_that_fits(target)
    if fitting is None:
        scans = most_layers_of(target.jaxpr)
        fewer = (
            "truncated to the layers that fit, the target offloads nothing" if scans else "only scans can be truncated"
        )
        return NOT_CHECKED, f"{need(target.reference_program)}; {fewer}"
    layers = ""
    if fitting.max_layers is not None:
        layers = f", with the first {fitting.max_layers} layers of each scan: {need(target.reference_program)}"
    results = _compare(fitting.program, fitting.reference_program, target.arrays)
    if in_any_process(bool(results.differ)):  # perhaps in what XLA fused or contracted in one of them
        results = _compare(*fitting.exact_programs(), target.arrays)
    return _judge(results, target, layers)


def _no_other_program(target: Target) -> str:
    """Return why there is no other program to compare with; empty if there is one."""
    if not target.has_reference:
        return no_reference(target)
    if has_loops(target.reference_jaxpr):
        return "it was differentiated before verify saw it, so no reference can be built"
    transfers = list(host_transfers(target.reference_jaxpr))
    return f"{len(transfers)} {REFERENCE_MOVES_TOO}" if transfers else ""


class Results(NamedTuple):
    """The results of both programs as numpy arrays, how they differ, and the reference's program."""

    ours: Any
    reference: Any
    differ: list[str]
    reference_program: Any


def _compare(program: Any, reference_program: Any, args: tuple[Any, ...]) -> Results:
    ours, reference = numbers(program(*args)), numbers(reference_program(*args))
    return Results(ours, reference, list(differences(ours, reference)), reference_program)


def _judge(results: Results, target: Target, layers: str) -> Found:
    count, differ = len(jax.tree.leaves(results.ours)), results.differ
    equal = f"{count} results are the reference's, bit for bit{layers}"
    if in_any_process(bool(differ)):
        verdict, how = _by_rounding(results, target.arrays)
        how = "; ".join(filter(None, (how, not_exact(target.jaxpr))))
        if verdict != HOLDS:
            return verdict, f"{len(differ)} of {count} results differ: {'; '.join(differ[:3])}{layers}; {how}"
        equal = f"{count} results are the reference's, {len(differ)} of them not bit for bit: {how}{layers}"
    if why := no_evidence(results.ours, target.arrays):
        return NOT_CHECKED, f"the results are equal, but {why}; give arguments with which they are not"
    gradient = jax.tree_util.tree_leaves_with_path(results.ours.get("gradient", []))
    zero = [f"args{jax.tree_util.keystr(path)}" for path, leaf in gradient if not leaf.any()]
    return HOLDS, equal + (f"; of them zero: the gradient of {first(zero)}" if zero else "")


def _by_rounding(results: Results, args: tuple[Any, ...]) -> Found:
    """Check that results which differ do so by rounding alone, in all processes."""
    if in_any_process(not has_room_for(results.reference_program, copies=2)):
        return _by_norm(results)
    apart: Rounding = rounding(results.ours, results.reference, results.reference_program, args)
    error = f"{apart.error:.1g} of their norm"
    if in_any_process(not apart.share <= LIMIT):
        return FAILS, f"they differ by {apart.share:.3g} times the reference's own rounding error ({error})"
    if in_any_process(not apart.error <= CHAOTIC):
        return NOT_CHECKED, f"rounding alone moves the reference's by {error}"
    return HOLDS, f"they differ by {apart.share:.2g} times the reference's own rounding error ({error})"


def _by_norm(results: Results) -> Found:
    """Judge by the norm where the reference does not fit beside two copies of the arguments."""
    distance = furthest(results.ours, results.reference)
    is_far = in_any_process(not distance <= CHAOTIC)
    missing = need(results.reference_program, copies=2)
    return FAILS if is_far else NOT_CHECKED, f"they are {distance:.2g} of a norm apart; to measure rounding, {missing}"
