"""Which sets of kept names are looked at: up from the least and down from all, by seconds for each byte."""

import functools
from collections.abc import Callable, Iterable, Sequence

from .._predict.scans import Stack
from .costs import Costs
from .names import Kept, Unit


def looked_at(
    least: Kept, free: Iterable[Unit], costs: Callable[[Kept], Costs], stacks: Sequence[Stack]
) -> dict[Kept, Costs]:
    """Return what layers cost for some sets of names.

    From `least` upwards, the unit that saves most time for each byte is added, until all are in. From all downwards,
    the one is dropped that costs least time for each byte. Gains are evaluated anew only for the unit that comes first,
    which is nearly always enough: they seldom grow when more is kept.
    """
    table, units = dict[Kept, Costs](), sorted(free)

    def totals(kept: Kept) -> tuple[float, int]:
        """Return the seconds and the bytes of all layers in a step."""
        if kept not in table:
            table[kept] = costs(kept)
        both = list(zip(stacks, table[kept], strict=True))
        seconds = sum(s.runs * s.layers * c.seconds for s, c in both)
        return seconds, sum(s.sets * s.layers * c.kept for s, c in both)

    def worth(kept: Kept, unit: Unit) -> float:
        """Return the seconds that a byte of a unit saves, beside these others."""
        (after, more), (before, less) = totals(kept | {unit}), totals(kept - {unit})
        return (before - after) / max(1, more - less)

    totals(least)
    for kept, sign in ((least, -1), (least.union(units), 1)):
        values = {unit: worth(kept, unit) for unit in units}
        while values:
            kept ^= {_first(values, functools.partial(worth, kept), sign)}
    return table


def beside(sets: Iterable[Kept], free: Iterable[Unit]) -> list[Kept]:
    """Return the sets that have one unit more or less than one of these."""
    return list(dict.fromkeys(kept ^ {unit} for kept in sets for unit in sorted(free)))


def _first(values: dict[Unit, float], now: Callable[[Unit], float], sign: int) -> Unit:
    """Take out the unit with the least `sign` * value, as it is `now`."""
    fresh: set[Unit] = set()
    while (first := min(values, key=lambda unit: (sign * values[unit], unit))) not in fresh:
        values[first] = now(first)
        fresh.add(first)
    del values[first]
    return first
