"""Which sets of kept names are looked at: up from the least and down from all, by seconds for each byte; then sets
that are near the best choices."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from .._predict.scans import Stack
from .choices import Choice, Curves
from .costs import Costs, Kept, Step, Table, Unit


def pool(
    least: Kept, free: Iterable[Unit], evaluate: Callable[[Kept], Costs], stacks: Sequence[Stack]
) -> dict[Kept, Costs]:
    """Return what layers cost for some sets of names.

    From `least` upwards, the unit that saves most time for each byte is added, until all are in. From all downwards,
    the one is dropped that costs least time for each byte. Gains are evaluated anew only for the unit that comes first,
    which is nearly always enough: they seldom grow when more is kept.
    """
    table: dict[Kept, Costs] = {}

    def totals(kept: Kept) -> Any:
        if kept not in table:
            table[kept] = evaluate(kept)
        return _totals(table[kept], stacks)

    def worth(kept: Kept, unit: Unit) -> float:
        """Return the seconds that a byte of a unit saves, beside these others."""
        seconds, size = totals(kept | {unit}) - totals(kept - {unit})
        return -seconds / max(1, size)

    units = sorted(free)
    kept = least
    totals(least)
    gains = {unit: worth(kept, unit) for unit in units}
    while gains:
        kept = kept | {_first(gains, functools.partial(worth, kept), -1)}
    kept = least.union(units)
    losses = {unit: worth(kept, unit) for unit in units}
    while losses:
        kept = kept - {_first(losses, functools.partial(worth, kept), 1)}
    return dict(sorted(table.items(), key=lambda item: (len(item[0]), sorted(item[0]))))


_MOST_SETS = 170
_WITHOUT_LIMIT = 2**62  # bytes of host memory


def searched(
    step: Step, table: Table, free: Kept, evaluate: Callable[[Kept], Costs], host_budget: int
) -> tuple[dict[Kept, Costs], list[Choice]]:
    """Return a table with sets that differ by one unit from those of undominated choices, and its undominated choices;
    those that move nothing, too, if others are estimated to be faster.

    Twice, the most promising half of what may still be looked at is. It is chosen with no host memory and with any
    amount, so that budgets do not change the table. For Llama 3 8B's layer no choice of all sets is better.
    """
    wider, curves = dict(table), Curves(step, (0, _WITHOUT_LIMIT, host_budget))
    for rounds in (2, 1):
        without, with_any, _ = curves.of(wider)
        best = {choice.kept for choice in [*without, *with_any]}
        more = _promising(wider, best, free, step.stacks)[: max(0, _MOST_SETS - len(wider)) // rounds]
        wider |= {kept: evaluate(kept) for kept in more}
    without, _, curve = curves.of(wider)
    return wider, list(dict.fromkeys([*curve, *without]))


def _promising(table: Table, best: Collection[Kept], free: Kept, stacks: Sequence[Stack]) -> list[Kept]:
    """Return the sets that differ by one unit from the best ones, and are not in the table, the most promising first.

    What a unit adds is estimated by what it adds elsewhere in the table, on average. The fewer seconds the sum is above
    those that the table's sets and mixtures of them take with as many bytes, the more promising is a set.
    """
    sums = {kept: _totals(costs, stacks) for kept, costs in table.items()}
    adds = {u: np.mean([sums[k | {u}] - sums[k] for k in sums if u not in k and k | {u} in sums], 0) for u in free}
    seconds, sizes = _hull(sums.values())
    above: dict[Kept, float] = {}
    for kept, unit in itertools.product(best, free):
        if (near := kept ^ {unit}) not in table:
            estimate, size = sums[kept] + (-adds[unit] if unit in kept else adds[unit])
            above[near] = min(above.get(near, np.inf), estimate - np.interp(size, sizes, seconds))
    return sorted(above, key=lambda kept: (round(above[kept], 9), sorted(kept)))


def _hull(points: Iterable[Any]) -> Any:
    """Return the seconds and the bytes of the points that no mixture of others with as many bytes beats, by bytes."""
    hull: list[Any] = []
    for point in sorted(points, key=lambda point: (point[1], point[0])):
        while len(hull) > 1 and np.linalg.det([hull[-1] - hull[-2], point - hull[-2]]) >= 0:
            hull.pop()
        hull.append(point)
    return np.array(hull).T


def _totals(costs: Costs, stacks: Sequence[Stack]) -> Any:
    """Return the seconds and the bytes of all layers in a step."""
    both = list(zip(stacks, costs, strict=True))
    seconds = sum(s.runs * s.layers * c.seconds for s, c in both)
    return np.array([seconds, sum(s.sets * s.layers * c.kept for s, c in both)])


def _first(values: dict[Unit, float], now: Callable[[Unit], float], sign: int) -> Unit:
    """Take out the unit with the least `sign` * value, as it is `now`."""
    fresh: set[Unit] = set()
    while (first := min(values, key=lambda unit: (sign * values[unit], unit))) not in fresh:
        values[first] = now(first)
        fresh.add(first)
    del values[first]
    return first
