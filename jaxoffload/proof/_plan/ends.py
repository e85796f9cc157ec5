"""Predict what the first and the last of interleaved microbatches do otherwise: one of their passes runs alone.

It is decided as the engine decides it, in seconds that are the same on all machines. What recomputing a unit takes is
what a layer takes that does not keep it, if that is among those that were looked at.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._engine.cost.lone_pass import Direction, bytes_in
from .costs import Alone, Costs, Kept, LayerCost, Step, Table, Unit
from .lone_passes import LonePasses, decide


class Counts(NamedTuple):
    """The layers of a stack.

    Attributes:
      offload: whether any do; `layers`: how many.
      copying: how many iterations copy.
      behind: whether the last row is copied after the loop.
      rest: how many layers neither offload nor are resident.
    """

    offload: Any
    layers: Any
    copying: Any
    behind: Any
    rest: Any


class Moves(NamedTuple):
    """The residuals of a stack's layer that candidates move: which of the `units`, (candidates, units) bool; how many,
    and their bytes, (candidates, 1)."""

    units: list[Unit]
    moved: Any
    count: Any
    sum: Any

    @classmethod
    def of(cls, cost: LayerCost, units: list[Unit], moved: Any) -> "Moves":
        sizes = np.array([cost.movable.get(unit, 0) for unit in units], np.int64)
        return cls(units, moved, moved @ (sizes > 0)[:, None].astype(np.int64), moved @ sizes[:, None])


class Again(NamedTuple):
    """Seconds that recomputing a unit adds to a layer's backward pass: as `accumulate` counts, and as planned here."""

    decided: float
    planned: float


EachAgain = tuple[Mapping[Unit, Again], ...]  # of each stack


def again_of(step: Step, table: Table, kept: Kept) -> EachAgain:
    """Return what recomputing a unit adds, as far as the table says it; nothing for what cannot be recomputed."""

    def of(number: int, cost: LayerCost) -> Iterable[tuple[Unit, Again]]:
        for unit in cost.alone.recomputable if cost.alone else ():
            others = table.get(without(step, table[kept], kept, unit))
            if others and (seconds := _again(cost, others[number], unit)):
                yield unit, seconds

    return tuple(dict(of(number, cost)) for number, cost in enumerate(table[kept]))


def without(step: Step, costs: Costs, kept: Kept, unit: Unit) -> Kept:
    """Return what a layer keeps that recomputes this unit, too; a policy does not name what it does not need."""
    needed = {needed for cost in costs for needed in cost.movable} | (kept - step.movable)
    return (kept & needed) - {unit}


def _again(cost: LayerCost, other: LayerCost, unit: Unit) -> Again | None:
    """Return what the `other` layer's backward pass takes longer; None if it keeps anything else for that, or runs
    what has no known time."""
    here, there = cost.alone, other.alone
    if here is None or there is None or other.movable != {u: n for u, n in cost.movable.items() if u != unit}:
        return None
    if other.device + other.once > cost.device + cost.once or not there.untimed <= here.untimed:
        return None
    return Again(max(0.0, there.backward - here.backward), max(0.0, other.backward - cost.backward))


def wanted(step: Step, table: Table, kept: Kept, moved: Kept) -> list[Kept]:
    """Return the sets that say what recomputing a unit costs, if these units are moved and a pass waits for them."""
    found = []
    for stack, cost in zip(step.stacks, table[kept], strict=True):
        if cost.alone and stack.microbatches > 1 and _waits(cost.alone, moved):
            found += [without(step, table[kept], kept, u) for u in sorted(cost.alone.recomputable & moved)]
    return found


def _waits(alone: Alone, moved: Kept) -> bool:
    size = sum(size for unit, size in alone.residuals if unit in moved)
    return size > bytes_in(min(alone.forward, alone.backward))


class End(NamedTuple):
    """The difference that a lone pass makes to a layer: bytes that stay, bytes that are not copied, seconds that its
    backward pass takes longer; (candidates, counts) each, or 0."""

    stay: Any = 0
    less: Any = 0
    again: Any = 0.0


def ends(
    step: Step, costs: Costs, moves: Sequence[Moves], counts: Sequence[Counts], again: EachAgain
) -> tuple[list[tuple[End, End]], Any]:
    """Return the first and the last end of each stack, and the bytes that stay at once, in all layers."""
    each = list(zip(step.stacks, costs, moves, counts, again, strict=True))

    def at(direction: Direction, left: Any) -> tuple[list[End], Any]:
        """Return the ends of the stacks, and what is left. The last stack's residuals are needed first."""
        found = []
        for stack, cost, of, n, more in reversed(each):
            end = _end(direction, cost.alone, of, n, left, more) if cost.alone and stack.microbatches > 1 else End()
            found.append(end)
            left = left - n.copying * end.stay
        return found[::-1], left

    all_ = np.full(np.broadcast_shapes(*(n.copying.shape for n in counts)), step.may_stay)
    two = any(stack.microbatches == 2 for stack in step.stacks)
    first, left = at("forward", all_)
    # Of more than two microbatches the first is gone when the last begins.
    last, left_then = at("backward", left if two else all_)
    return list(zip(first, last, strict=True)), all_ - (left_then if two else np.minimum(left, left_then))


def _end(direction: Direction, alone: Alone, of: Moves, n: Counts, left: Any, again: Mapping[Unit, Again]) -> End:
    """Return what layers do at one end, if so many bytes are left for those that copy."""
    units = list(dict.fromkeys(unit for unit, _ in alone.residuals))
    decided, planned = (np.array([again.get(u, (math.inf, 0.0))[i] for u in units]) for i in range(2))
    groups, sizes = (
        np.array(x, np.int64) for x in ([units.index(u) for u, _ in alone.residuals], [s for _, s in alone.residuals])
    )
    lone = LonePasses(direction, alone.forward, alone.backward, sizes, groups, decided)
    moved = of.moved[:, [of.units.index(unit) for unit, _ in alone.residuals]].T
    wait = sizes @ moved > bytes_in(alone.forward if direction == "forward" else alone.backward)
    where = (n.copying > 0) & wait[:, None]
    if not where.any():
        return End()
    each = left // np.maximum(1, n.copying)
    budgets = _levels(sizes, each)
    level = np.searchsorted(budgets, each, "right") - 1
    case, which = np.unique((np.arange(len(where))[:, None] * len(budgets) + level)[where], return_inverse=True)
    row, budget = case // len(budgets), budgets[case % len(budgets)]
    recomputed, stay = decide(lone, moved[:, row], budget)
    less = stay | recomputed[groups] & moved[:, row]
    end = End(*(np.zeros(where.shape, x.dtype) for x in (sizes, sizes, planned)))
    for whole, found in zip(end, (sizes @ stay, sizes @ less, planned @ recomputed), strict=True):
        whole[where] = found[which]
    return end


_MOST_SIZES = 14  # of so many, all sums are looked at


def _levels(sizes: Any, budgets: Any) -> Any:
    """Return the budgets, ascending, that differ in what may stay: those between two sums of sizes do not."""
    if len(sizes) > _MOST_SIZES:
        return np.unique(budgets)
    sums = np.zeros(1, np.int64)
    for size in sizes:
        sums = np.unique([sums, sums + size])
    return sums
