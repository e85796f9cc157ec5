"""From what one layer costs to all choices that no other one beats: estimated times, and bytes on device and host.

A choice keeps some names for the backward pass, and moves some of these to the host in the first layers. A step takes

    the time of all that is outside of the layers
    + for each layer its forward and its backward pass, with what runs again
    + the time by which a layer's copies take longer than what runs beside them.

`predict` knows it better from a trace of the step under the policy of a choice; these estimates say which to trace.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._predict.machine import Bus
from .._predict.scans import Stack
from .costs import Costs, Kept, LayerCost, Step, Table, Unit


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


class Outcome(NamedTuple):
    """The step of each candidate by counts of layers: nanoseconds, bytes per device, bytes on the host."""

    ns: Any
    device: Any
    host: Any


def outcome(step: Step, costs: Costs, moved: Any, layers: Any) -> Outcome:
    """Return the time and the bytes of candidates that keep the same names.

    Args:
      costs: of the layers that keep them.
      moved: for each candidate which units it moves, (candidates, units) bool, in the order of `units_of`.
      layers: how many layers offload, (counts,).
    """
    units, each = units_of(costs), list(zip(step.stacks, costs, strict=True))
    sizes = [np.array([cost.movable.get(unit, 0) for unit in units], np.int64) for cost in costs]
    moving = [(moved @ of_units)[:, None] for of_units in sizes]
    counts = [_offloading(step, stack, size, layers) for stack, size in zip(step.stacks, moving, strict=True)]
    beside = np.any([(n > 0) & (s.microbatches > 1) for s, n in zip(step.stacks, counts, strict=True)], axis=0)
    seconds, (residuals, host, working) = np.full(beside.shape, step.seconds), np.zeros((3, *beside.shape), np.int64)
    for (stack, cost), size, n in zip(each, moving, counts, strict=True):
        interleaves = beside & (stack.microbatches > 1)
        sets, copying = np.where(interleaves, 2, stack.sets), n + ((n > 0) & (n < stack.layers))
        exposed = _in_turn(step.bus, stack, cost, size)
        if stack.schedule:
            exposed = _beside(step.bus, stack, cost, size)
        elif stack.microbatches > 1:
            exposed = np.where(interleaves, _beside(step.bus, stack, cost, size), exposed)
        seconds += stack.runs * stack.layers * cost.seconds + copying * exposed
        residuals += sets * (stack.layers * cost.kept - n * size + cost.once)
        working = np.maximum(working, cost.working + (n > 0) * size)
        host += sets * (n + (n > 0)) * size  # and a padding row
    return Outcome(np.maximum(1, np.rint(1e9 * seconds)).astype(np.int64), step.other + residuals + working, host)


def _offloading(step: Step, stack: Stack, moving: Any, layers: Any) -> Any:
    """Return how many layers of a stack, or of a chunk of one, offload."""
    most = stack.may_offload(step.resident) // stack.chunks
    return np.where(moving > 0, np.minimum(layers // stack.chunks, most), 0)


def _in_turn(bus: Bus, stack: Stack, cost: LayerCost, moving: Any) -> Any:
    """Return by how many seconds a layer's copies take longer than its passes, each beside its own."""
    return stack.runs * (_longer(moving, bus.d2h, cost.forward) + _longer(moving, bus.h2d, cost.backward))


def _beside(bus: Bus, stack: Stack, cost: LayerCost, moving: Any) -> Any:
    """Return those seconds where one microbatch's passes run beside another's, except for the first and the last pass;
    on pipeline stages, for the first and the last ticks."""
    passes, alone = (stack.schedule.forward_stop, stack.chunks) if stack.schedule else (stack.microbatches, 1)
    pair = np.maximum(0.0, moving / bus.together / 1e9 - cost.seconds)
    lone = _longer(moving, bus.d2h, cost.forward) + _longer(moving, bus.h2d, cost.backward)
    return stack.runs // passes * ((passes - alone) * pair + alone * lone)


def _longer(size: Any, gb_s: float, seconds: float) -> Any:
    return np.maximum(0.0, size / gb_s / 1e9 - seconds)


def units_of(costs: Costs) -> list[Unit]:
    """Return what may go to the host in some stack, in order."""
    return sorted({unit for cost in costs for unit, size in cost.movable.items() if size})


_MOST_UNITS = 12  # of so many, all sets are tried
_MOST_COUNTS = 33


class Curves:
    """The undominated choices for some budgets of host memory, as a table grows: only new rows are computed.

    They are ordered by bytes per device: each is faster than those before it, or as fast with fewer bytes on the host.
    """

    def __init__(self, step: Step, host_budgets: Sequence[int]):
        self.step, self.host_budgets, self.counts = step, host_budgets, _layer_counts(step)
        self.known: dict[Kept, tuple[list[Unit], Any, list[Any]]] = {}

    def of(self, table: Table) -> list[list[Choice]]:
        """Return the curve of each budget; `table` has all sets of earlier calls."""
        # Where `fixed` moves a unit, sets without it only say what recomputing it costs.
        in_any_case = self.step.moved & self.step.recomputable
        for kept in table:
            if in_any_case <= kept and kept not in self.known:
                self.known[kept] = self._best(table[kept])
        return [self._curve(budget) for budget in range(len(self.host_budgets))]

    def _best(self, costs: Costs) -> tuple[list[Unit], Any, list[Any]]:
        """Return the units of those that keep these names, which sets of them may be moved, (sets, units), and for each
        budget the undominated ones as columns: ns, device, host, the number of the set, how many layers."""
        units, movable = units_of(costs), self.step.movable - self.step.moved
        free, always = [u in movable for u in units], [u in self.step.moved for u in units]
        sets, found = _subsets(units, free, costs, always), []
        out = outcome(self.step, costs, sets, self.counts)
        for host_budget in self.host_budgets:
            rows, columns = np.nonzero(out.host <= host_budget)
            sizes = [of[rows, columns] for of in out]
            all_ = np.array([*sizes, rows, self.counts[columns]])
            found.append(all_[:, _undominated(*sizes)])
        return units, sets, found

    def _curve(self, budget: int) -> list[Choice]:
        each = list(self.known.items())
        number = [np.full((1, found[budget].shape[1]), n) for n, (_, (_, _, found)) in enumerate(each)]
        columns = np.vstack([np.hstack([found[budget] for _, (_, _, found) in each]), np.hstack(number)])
        best = columns[:, _undominated(*columns[:3])].T.tolist()

        def choice(ns: int, device: int, host: int, row: int, layers: int, number: int) -> Choice:
            kept, (units, sets, _) = each[number]
            return Choice(ns, device, host, kept, frozenset(itertools.compress(units, sets[row])), layers)

        return list(itertools.starmap(choice, best))


def _layer_counts(step: Step) -> Any:
    """Return how many layers may offload. On pipeline stages it is as many in each chunk, and never a single one."""
    most = max(stack.may_offload(step.resident) for stack in step.stacks)
    counts = np.unique(np.linspace(0, most, min(most + 1, _MOST_COUNTS)).round().astype(np.int64))
    for chunks in {stack.chunks for stack in step.stacks if stack.schedule}:
        counts = np.unique(counts // chunks * chunks)
        counts = counts[counts != chunks]
    return counts


def _subsets(units: list[Unit], free: list[bool], costs: Costs, always: list[bool]) -> Any:
    """Return what may be moved together, (sets, units) bool: all sets, or those of the largest and the smallest."""
    numbers = [i for i, f in enumerate(free) if f]
    if len(numbers) <= _MOST_UNITS:
        bits = np.arange(2 ** len(numbers))[:, None] >> np.arange(len(numbers))[::-1] & 1 == 1
    else:
        size = lambda i: sum(cost.movable.get(units[i], 0) for cost in costs)
        order = np.argsort([size(i) for i in numbers], kind="stable")
        rank = np.argsort(order)
        bits = np.array([rank < n for n in range(len(numbers) + 1)] + [rank >= n for n in range(1, len(numbers))])
    sets = np.tile(np.array(always, bool), (len(bits), 1))
    sets[:, numbers] = bits.reshape(len(bits), len(numbers))
    return sets


def _undominated(ns: Any, device: Any, host: Any) -> Any:
    """Return the numbers of those that no other one with as few bytes on the device beats in (ns, host)."""
    if not len(ns):
        return np.zeros(0, np.int64)
    order = np.lexsort((host, ns))
    differs = (np.diff(ns[order]) != 0) | (np.diff(host[order]) != 0)
    rank = np.empty(len(ns), np.int64)
    rank[order] = np.concatenate([[0], np.cumsum(differs)])
    by_device = np.lexsort((rank, device))
    lowest = np.minimum.accumulate(rank[by_device])
    before = np.concatenate([[lowest[0] + 1], lowest[:-1]])
    return by_device[rank[by_device] < before]
