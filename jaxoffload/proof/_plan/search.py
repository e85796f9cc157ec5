"""Which sets of kept names are looked at: up from the least and down from all, by seconds for each byte."""

import functools
from collections.abc import Callable, Iterable

from .choices import Choice, Costs, Curves, Kept, Stack, Step, Table, Unit


def pool(
    least: Kept, free: Iterable[Unit], evaluate: Callable[[Kept], Costs], stacks: tuple[Stack, ...]
) -> dict[Kept, Costs]:
    """Return what layers cost for each set of names that the search looks at; budgets do not change it.

    From `least` upwards, the unit that saves most time for each byte is added, until all are in. From all downwards,
    the one is dropped that costs least time for each byte. Gains are evaluated anew only for the unit that comes first,
    which is nearly always enough: they seldom grow when more is kept.
    """
    table: dict[Kept, Costs] = {}

    def totals(kept: Kept) -> tuple[float, int]:
        if kept not in table:
            table[kept] = evaluate(kept)
        both = list(zip(stacks, table[kept], strict=True))
        return sum(s.runs * s.layers * c.seconds for s, c in both), sum(s.layers * c.kept for s, c in both)

    def worth(kept: Kept, unit: Unit) -> float:
        """The seconds that a byte of a unit saves, beside these others."""
        (without, fewer), (seconds, more) = totals(kept - {unit}), totals(kept | {unit})
        return (without - seconds) / max(1, more - fewer)

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
    """Return a table with the sets that differ by one unit from those of undominated choices, twice over; and its
    undominated choices.

    With no host memory and with any amount, so that budgets do not change the table. For Llama 3 8B's layer the best
    of these sets is within 2.4 % of the best of all.
    """
    wider, curves = dict(table), Curves(step, (0, _WITHOUT_LIMIT, host_budget))
    for _ in range(2):
        without, with_any, _ = curves.of(wider)
        near = {kept ^ {unit} for c in [*without, *with_any] for kept in (c.kept, c.rest) for unit in free}
        for kept in sorted(near - wider.keys(), key=sorted)[: max(0, _MOST_SETS - len(wider))]:
            wider[kept] = evaluate(kept)
    return wider, curves.of(wider)[-1]


def _first(values: dict[Unit, float], now: Callable[[Unit], float], sign: int) -> Unit:
    """Take out the unit with the least `sign` * value, as it is `now`."""
    fresh: set[Unit] = set()
    while (first := min(values, key=lambda unit: (sign * values[unit], unit))) not in fresh:
        values[first] = now(first)
        fresh.add(first)
    del values[first]
    return first
