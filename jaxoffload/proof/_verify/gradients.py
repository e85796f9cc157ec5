"""The claim `gradients`: every result equals the reference's, bit for bit or as far as rounding allows.

The reference is plain `lax.scan` and `jax.checkpoint`, keeping the same values on the device.
"""

from typing import Any

import jax

from ..._engine.jaxprs.walk import walk
from ..._engine.layers.loops import loops_of
from ..._text import first
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program.memory import too_large
from .._program.target import Target
from .differences import CHAOTIC, LIMIT, differences, furthest, in_any_process, no_evidence, numbers, rounding


def gradients(target: Target) -> Found:
    """Compare all results with the reference's."""
    if why := _no_other_program(target):
        return NOT_CHECKED, why
    if why := too_large(target.reference_program):
        return NOT_CHECKED, f"the reference {why}; give it fewer layers, or a smaller batch"
    programs, args = (target.program, target.reference_program), target.arrays
    ours, reference, differ = compare(*programs, args)
    if in_any_process(bool(differ)):  # perhaps in what XLA fused or contracted in one of them
        programs = target.exact_programs()
        ours, reference, differ = compare(*programs, args)
    count = len(jax.tree.leaves(ours))
    equal = f"{count} results are the reference's, bit for bit"
    if in_any_process(bool(differ)):
        verdict, how = _by_rounding(ours, reference, programs[1], args)
        if verdict != HOLDS:
            return verdict, f"{len(differ)} of {count} results differ: {'; '.join(differ[:3])}; {how}"
        equal = f"{count} results are the reference's, {len(differ)} of them not bit for bit: {how}"
    if nothing := no_evidence(ours, args):
        return NOT_CHECKED, f"the results are equal, but {nothing}; give arguments with which they are not"
    gradient = jax.tree_util.tree_leaves_with_path(ours.get("gradient", []))
    zero = [f"args{jax.tree_util.keystr(path)}" for path, leaf in gradient if not leaf.any()]
    return HOLDS, equal + (f"; of them zero: the gradient of {first(zero)}" if zero else "")


def _no_other_program(target: Target) -> str:
    """Return why there is no other program to compare with; empty if there is one."""
    if target.no_reference:
        return target.no_reference
    if any(loops_of(site.eqn) for site in walk(target.reference_jaxpr)):
        return "it was differentiated before verify saw it, so no reference can be built"
    return target.moved_by_others


def compare(program: Any, reference_program: Any, args: tuple[Any, ...]) -> tuple[Any, Any, list[str]]:
    """Return the results of both programs as numpy arrays, and how they differ."""
    ours, reference = numbers(program(*args)), numbers(reference_program(*args))
    return ours, reference, list(differences(ours, reference))


def _by_rounding(ours: Any, reference: Any, reference_program: Any, args: tuple[Any, ...]) -> Found:
    """Check that results which differ do so by rounding alone, in all processes."""
    if in_any_process(bool(why := too_large(reference_program, copies=2))):
        apart = furthest(ours, reference)
        said = f"they are {apart:.2g} of a norm apart; to measure rounding, the reference {why}"
        return FAILS if in_any_process(not apart <= CHAOTIC) else NOT_CHECKED, said
    share, error = rounding(ours, reference, reference_program, args)
    moved = f"{error:.1g} of their norm"
    if in_any_process(not share <= LIMIT):
        return FAILS, f"they differ by {share:.3g} times the reference's own rounding error ({moved})"
    if in_any_process(not error <= CHAOTIC):
        return NOT_CHECKED, f"rounding alone moves the reference's by {moved}"
    return HOLDS, f"they differ by {share:.2g} times the reference's own rounding error ({moved})"
