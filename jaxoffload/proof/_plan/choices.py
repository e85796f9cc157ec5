"""From what one layer costs to all choices that no other one beats: estimated times, and bytes on device and host.

Some sets of kept names are looked at: up from the least and down from all, by seconds for each byte. A choice keeps
such a set for the backward pass, and moves some of its names to the host in the first layers. A step takes

    the time of all that is outside of the layers
    + for each layer its forward and its backward pass, with what runs again
    + the time by which a layer's copies take longer than what runs beside them.

`predict` knows it better from a trace of the step under the policy of a choice; these estimates say which to trace.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..._policy import Policy
from .._predict.rates import Bus
from .._predict.scans import Stack
from .costs import Costs, LayerCost, Step, Table
from .names import Kept, Names, Unit, policy_of


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


def _first(values: dict[Unit, float], now: Callable[[Unit], float], sign: int) -> Unit:
    """Take out the unit with the least `sign` * value, as it is `now`."""
    fresh: set[Unit] = set()
    while (first := min(values, key=lambda unit: (sign * values[unit], unit))) not in fresh:
        values[first] = now(first)
        fresh.add(first)
    del values[first]
    return first


class Choice(NamedTuple):
    """A choice, with its estimated nanoseconds per step, and its bytes per device and on the host.

    Attributes:
      kept: what the first layers keep; `moved`: of this, what goes to the host.
      layers: how many of the first layers of each stack offload at most.
    """

    ns: int
    device: int
    host: int
    kept: Kept
    moved: Kept
    layers: int


def curve_of(step: Step, table: Table, host_budget: int) -> list[Choice]:
    """Return the choices that no other one beats, and those that move nothing and that no other such one beats.

    They are in the order of bytes per device, and need no more on the host than arguments leave of its budget.
    """
    counts = _layer_counts(step)
    every = [
        estimated(step, kept, costs, moved, layers)
        for kept, costs in table.items()
        for moved in _moved_sets(step, costs)
        for layers in (counts if moved else counts[:1])
    ]
    left = max(0, host_budget - step.on_host)
    fitting = sorted((choice for choice in every if choice.host <= left), key=_order)
    unmoved = [choice for choice in fitting if not choice.host]
    return sorted(dict.fromkeys([*_undominated(fitting), *_undominated(unmoved)]), key=_order)


def _order(choice: Choice) -> tuple[int, int, int]:
    return choice.device, choice.ns, choice.host


def _undominated(choices: Iterable[Choice]) -> Iterator[Choice]:
    """Yield those than which none before it is faster, or as fast with less on the host."""
    best = math.inf, math.inf
    for choice in choices:
        if (choice.ns, choice.host) < best:
            best = choice.ns, choice.host
            yield choice


def estimated(step: Step, kept: Kept, costs: Costs, moved: Kept, layers: int) -> Choice:
    """Return the choice to keep and to move these units in so many layers; `costs`: of layers that keep them."""
    seconds, device, host, row = step.seconds, step.other, 0, 0
    sizes = [sum(cost.movable.get(unit, 0) for unit in moved) for cost in costs]
    most = [stack.may_offload(step.resident) if size else 0 for stack, size in zip(step.stacks, sizes, strict=True)]
    counts = [min(layers, m) // stack.chunks for stack, m in zip(step.stacks, most, strict=True)]
    interleaves = any(n and stack.microbatches > 1 for stack, n in zip(step.stacks, counts, strict=True))
    for stack, cost, size, n in zip(step.stacks, costs, sizes, counts, strict=True):
        sets = 2 if interleaves and stack.microbatches > 1 else stack.sets
        copying = n + (0 < n < stack.layers)  # the iteration after the last one copies, too
        seconds += stack.runs * (stack.layers * cost.seconds + copying * step.copying * size)
        seconds += copying * exposed(step.bus, stack, cost, size)
        device += sets * (stack.layers * cost.kept - n * size + cost.once)
        host += sets * (n + 1) * size if n else 0  # with a padding row
        row = max(row, size if n else 0)
    return Choice(max(1, round(1e9 * seconds)), device + row, host, kept, moved, layers)


def exposed(bus: Bus, stack: Stack, cost: LayerCost, size: int) -> float:
    """Return by how many seconds a layer's copies take longer than its passes, in all runs.

    One microbatch's passes run beside another's, except for the first and the last one, and on pipeline stages, for
    those in the first and the last ticks.
    """
    passes, alone = (stack.schedule.forward_stop, stack.chunks) if stack.schedule else (stack.microbatches, 1)
    longer = lambda gb_s, seconds: max(0.0, size / gb_s / 1e9 - seconds)
    lone = longer(bus.d2h, cost.forward) + longer(bus.h2d, cost.backward)
    return stack.runs // passes * ((passes - alone) * longer(bus.together, cost.forward + cost.backward) + alone * lone)


_MOST_COUNTS = 32
_MOST_SETS = 200


def _layer_counts(step: Step) -> list[int]:
    """Return how many layers may offload. On pipeline stages it is as many in each chunk, and never a single one.

    Elsewhere no two others are left, unless they are resident: XLA unrolls their loop, and may run both at once, in
    twice the memory.
    """
    most = max(stack.may_offload(step.resident) for stack in step.stacks)
    number = max(1, min(most, _MOST_COUNTS))
    counts = {round(most * i / number) for i in range(number + 1)}
    for chunks in {stack.chunks for stack in step.stacks if stack.schedule}:
        counts = {count // chunks * chunks for count in counts} - {chunks}
    two_left = {stack.layers - 2 for stack in step.stacks if not stack.schedule and stack.layers > 2}
    return sorted(counts - two_left if step.resident < 2 else counts)


def _moved_sets(step: Step, costs: Costs) -> list[Kept]:
    """Return what may be moved together, one set of units for each number of bytes; of too many, every second one."""
    units = sorted({unit for cost in costs for unit in cost.movable})
    sets = {(0,) * len(costs): step.moved.intersection(units)}
    for unit in units:
        for sizes, moved in list(sets.items()) if unit not in step.moved else ():
            more = tuple(size + cost.movable.get(unit, 0) for size, cost in zip(sizes, costs, strict=True))
            sets.setdefault(more, moved | {unit})
        if len(sets) > _MOST_SETS:
            *some, most = sorted(sets)
            sets = {sizes: sets[sizes] for sizes in (*some[::2], most)}
    return list(sets.values())


def policy_for(choice: Choice, costs: Costs, step: Step, names: Names, fixed: Policy) -> Policy:
    """Return the policy of a choice; it names what layers keep. `costs`: of its layers."""
    # Where nothing is left of a unit, others lead to it.
    is_kept = lambda unit: unit not in names.movable or any(unit in cost.movable for cost in costs)
    kept = frozenset(filter(is_kept, choice.kept))
    is_all = not choice.moved or choice.layers >= max(stack.may_offload(step.resident) for stack in step.stacks)
    layers = "all" if is_all else choice.layers
    how: dict[str, Any] = {"offload_layers": layers, "other_layers": "save"}
    return policy_of(kept & choice.moved, kept - choice.moved, names.recomputable, dataclasses.replace(fixed, **how))
