"""From what one layer costs to all choices that no other one beats: times, and bytes on the device and on the host.

A choice keeps some names for the backward pass, moves some of these to the host in the first layers, and lets the
other layers save or recompute what it moves. A step takes

    the time of all that is outside of the layers
    + for each layer its forward and its backward pass, with what runs again
    + the time by which a layer's copies take longer than what runs beside them.

On each device are the arguments, the gradients and the like, the residuals that stay, and the largest working set. The
choices do not depend on the budget of device memory. So of two budgets the greater one never has the slower plan.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..._engine.stages.schedule import Schedule
from .._predict.machine import Bus
from .costs import Costs, Kept, LayerCost, Stack, Step, Table, Unit
from .ends import Counts, EachAgain, End, Moves, again_of, ends

Others = Literal["save", "recompute"]


class Choice(NamedTuple):
    """A choice, with its predicted nanoseconds per step, and its bytes per device and on the host.

    Attributes:
      kept: what the first layers keep; `moved`: of this, what goes to the host.
      layers: how many of the first layers of each stack offload at most.
      others: what the rest do with `moved`; `rest`: what they keep.
    """

    ns: int
    device: int
    host: int
    kept: Kept
    moved: Kept
    layers: int
    others: Others
    rest: Kept


class Outcome(NamedTuple):
    """The step of each candidate by counts of layers: nanoseconds, and the bytes per device of each kind."""

    ns: Any
    residuals: Any
    other: Any
    working: Any
    host: Any
    copied: Any  # in a step, each way

    def device(self, step: Step) -> Any:
        return step.arguments + self.other + self.residuals + self.working


def outcome(
    step: Step, costs: Costs, rest: Sequence[Costs] | None, moved: Any, layers: Any, again: EachAgain
) -> Outcome:
    """Return what candidates come to that keep the same names.

    Args:
      costs: of the layers that keep them.
      rest: for each candidate what the layers cost that recompute what it moves; None if they save it.
      moved: for each candidate which units it moves, (candidates, units) bool, in the order of `units_of`.
      layers: how many layers offload, (counts,).
      again: what recomputing a unit adds to a layer of each stack.
    """
    units = units_of(costs)
    moves = [Moves.of(cost, units, moved) for cost in costs]
    counts = [_counts(step, stack, of.sum, layers, rest is None) for stack, of in zip(step.stacks, moves, strict=True)]
    beside = np.any([n.offload & (s.microbatches > 1) for s, n in zip(step.stacks, counts, strict=True)], axis=0)
    seconds = np.full(beside.shape, step.seconds)
    residuals, host, copied, working = (np.zeros(beside.shape, np.int64) for _ in range(4))
    of_ends, stay = ends(step, costs, moves, counts, again)
    stacks = zip(step.stacks, costs, moves, counts, of_ends, strict=True)
    for number, (stack, cost, of, n, (first, last)) in enumerate(stacks):
        other = _Rest.of([each[number] for each in rest or ()] or [cost])
        interleaves = beside & (stack.microbatches > 1)
        sets, pieces = np.where(interleaves, 2, stack.sets), _pieces(stack, cost, of, n)
        if stack.schedule:
            exposed = _in_ticks(step, stack, cost, of.sum + pieces.bytes / np.maximum(1, n.copying))
        else:
            both = _beside(step, stack, cost, of.sum, first, last), _in_turn(step, stack, cost, of.sum)
            exposed = np.where(interleaves, *both)
        seconds += stack.runs * ((stack.layers - n.rest) * cost.seconds + n.rest * other.seconds) + n.copying * exposed
        behind, waits = _behind_a_loop(step, stack, of, n)
        seconds += stack.runs * waits
        offloading = n.layers * (cost.kept - of.sum) + cost.once
        by_others = (stack.layers - n.rest - n.layers) * cost.kept + n.rest * other.kept
        residuals += sets * (offloading + by_others)
        held = _in_flight(pieces, n) if stack.schedule else sets
        moving = of.sum * n.offload
        in_flight = np.minimum(cost.working, cost.staying + moving) + np.int64(held * moving)
        # The layers that do not offload are the last ones: what they keep is free again before a row is fetched. Where
        # microbatches interleave, the next one then keeps its own; XLA's plans have a layer's less.
        free = np.where(interleaves, np.minimum(by_others, cost.kept), by_others)
        in_flight -= 0 if stack.schedule else free
        working = np.maximum(working, np.maximum(in_flight, cost.staying))
        working = np.maximum(working, (n.rest > 0) * other.working)
        host += sets * ((n.layers + n.offload) * of.sum + pieces.beyond)  # and a padding row
        copied += n.copying * (stack.runs * of.sum - stack.runs // stack.microbatches * (first.less + last.less))
        copied += stack.runs * (pieces.bytes + behind)
    other_bytes = step.other + stay
    working = np.maximum(working, step.elsewhere - step.other)
    return Outcome(np.rint(1e9 * seconds).astype(np.int64), residuals, other_bytes, working, host, copied)


def _behind_a_loop(step: Step, stack: Stack, of: Moves, n: Counts) -> tuple[Any, Any]:
    """Return the bytes of a last row that is copied after its loop, and the seconds that nothing hides.

    XLA has two copies on their way at once, so a loop of other layers hides two, here of average size. A single layer
    is no loop: it hides all copies of another single one. Nothing hides the last row of all.
    """
    size = of.sum * (n.behind & (stack.schedule is None))
    waits = np.maximum(0, 1 - 2 / np.maximum(1, of.count)) * ((n.layers > 1) | (n.rest > 1))
    exposed = size * np.where(n.rest > 0, waits, 1)
    return size, (exposed / step.bus.d2h + exposed / step.bus.h2d) / 1e9


class _Rest(NamedTuple):
    """The cost of a layer that is neither resident nor offloads, of each candidate, (candidates, 1)."""

    seconds: Any
    kept: Any
    working: Any

    @classmethod
    def of(cls, costs: Sequence[LayerCost]) -> "_Rest":
        return cls(*(np.array([getattr(c, name) for c in costs])[:, None] for name in ("seconds", "kept", "staying")))


def _counts(step: Step, stack: Stack, moving: Any, layers: Any, save: bool) -> Counts:
    """Count the layers of a stack as `segments_of` divides them."""
    most = stack.may_offload(step.resident) // stack.chunks
    count = np.minimum(layers // stack.chunks, most)
    offload = (moving > 0) & (count > 0)
    count = np.where(offload, count, 0)
    rest = np.where(moving > 0, most - count, 0)
    joins = offload & (count < stack.layers) & ((rest == 0) | save)
    behind = offload & ~joins
    return Counts(offload, count, count + joins - (behind & (count == 1)), behind, rest)


def _in_turn(step: Step, stack: Stack, cost: LayerCost, moving: Any) -> Any:
    """Return by how many seconds a layer's copies take longer than its passes, each beside its own."""
    return stack.runs * (_longer(moving, step.bus.d2h, cost.forward) + _longer(moving, step.bus.h2d, cost.backward))


def _beside(step: Step, stack: Stack, cost: LayerCost, moving: Any, first: End, last: End) -> Any:
    """Return those seconds where passes run beside each other, and the first and the last one alone, with what these
    recompute."""
    bus, of_first, of_last = step.bus, moving - first.less, moving - last.less
    if stack.microbatches == 2:
        pairs = _of_pair(bus, cost, of_last, of_first, first.again)
    else:
        pairs = _of_pair(bus, cost, moving, of_first, first.again) + _of_pair(bus, cost, of_last, moving)
        pairs += (stack.microbatches - 3) * _of_pair(bus, cost, moving, moving)
    fill, drain = _longer(of_first, bus.d2h, cost.forward), _longer(of_last, bus.h2d, cost.backward)
    return stack.runs // stack.microbatches * (fill + pairs + np.maximum(drain, last.again))


class _Pieces(NamedTuple):
    """The pieces in which the rows of a chunk's last layer travel on pipeline stages, if no layer behind it is in its
    loop: whether they do, their bytes, and how many of these are beyond a row; (candidates, counts) each."""

    travel: Any
    bytes: Any
    beyond: Any


def _pieces(stack: Stack, cost: LayerCost, of: Moves, n: Counts) -> _Pieces:
    travel = n.behind & (stack.schedule is not None)
    none = (0,) * (stack.layers + 1)
    each = np.array([cost.beyond.get(unit, none) for unit in of.units], np.int64).reshape(-1, len(none))
    beyond = of.moved @ each
    beyond = np.take_along_axis(beyond, np.broadcast_to(n.layers, travel.shape), 1) * travel
    return _Pieces(travel, (of.sum + beyond) * travel, beyond)


def _in_flight(pieces: _Pieces, n: Counts) -> Any:
    """Return how many layers' offloaded residuals the device holds at once."""
    return np.where(pieces.travel, Schedule.layers_in_flight(np.maximum(1, n.layers)), 2)


def _in_ticks(step: Step, stack: Stack, cost: LayerCost, size: Any) -> Any:
    """Return those seconds on pipeline stages, where each iteration copies `size` bytes: in the first ticks no stage
    runs backward, and in as many at the end none runs forward."""
    assert stack.schedule
    ticks, alone, bus = stack.schedule.forward_stop, stack.chunks, step.bus
    lone = _longer(size, bus.d2h, cost.forward) + _longer(size, bus.h2d, cost.backward)
    return stack.runs // ticks * (alone * lone + (ticks - alone) * _of_pair(bus, cost, size, size))


def _of_pair(bus: Bus, cost: LayerCost, to_host: Any, back: Any, again: Any = 0.0) -> Any:
    """Return by how many seconds copies of so many bytes, or recomputing, outlast a forward beside a backward pass."""
    both = (to_host > 0) & (back > 0)
    copies = np.where(both, np.maximum(to_host, back) / bus.together, to_host / bus.d2h + back / bus.h2d)
    return np.maximum(again, copies / 1e9 - cost.seconds)


def _longer(size: Any, gb_s: float, seconds: float) -> Any:
    return np.maximum(0.0, size / gb_s / 1e9 - seconds)


def units_of(costs: Costs) -> list[Unit]:
    """Return what may go to the host in some stack, in order."""
    return sorted({unit for cost in costs for unit, size in cost.movable.items() if size})


_MOST_UNITS = 12  # of so many, all sets are tried
_MOST_COUNTS = 33


def undominated(step: Step, table: Table, host_budget: int) -> list[Choice]:
    """Return the choices for each budget of device memory, by bytes: each is faster than those before it, or as fast
    with fewer bytes on the host."""
    (curve,) = Curves(step, (host_budget,)).of(table)
    return curve


class Curves:
    """The results of `undominated` for some host budgets, as a table grows: only new rows are computed."""

    def __init__(self, step: Step, host_budgets: Sequence[int]):
        self.step, self.host_budgets, self.counts = step, host_budgets, _layer_counts(step)
        self.again: dict[Kept, EachAgain] = {}
        self.known: dict[Kept, set[Kept | None]] = {}
        self.sets: Table = {}
        self.candidates: list[_Candidates] = []
        self.columns: dict[Kept, list[list[Any]]] = {}  # for each budget

    def of(self, table: Table, sets: Collection[Kept] | None = None) -> list[list[Choice]]:
        """Return the curve of each budget; `table` has all sets of earlier calls.

        `sets`: those that choices may keep, all by default; the others only say what recomputing a unit costs.
        """
        # Where `fixed` moves a unit, sets without it only say that too.
        in_any_case = self.step.moved & self.step.recomputable
        self.sets = {kept: table[kept] for kept in (table if sets is None else sets)}
        for kept in self.sets:
            if in_any_case <= kept:
                self._look(table, kept)
        return [self._curve(budget) for budget in range(len(self.host_budgets))]

    def _look(self, table: Table, kept: Kept) -> None:
        """Find the undominated ones of those that keep these names."""
        again = again_of(self.step, table, kept)
        if self.again.get(kept) != again:
            self.again[kept], self.known[kept], self.columns[kept] = again, set(), [[] for _ in self.host_budgets]
        for candidates in self._new(table, kept):
            self.candidates.append(candidates)
            found = self._best(table, candidates, len(self.candidates) - 1)
            for columns, more in zip(self.columns[kept], found, strict=True):
                columns.append(more)

    def _new(self, table: Table, kept: Kept) -> "Iterator[_Candidates]":
        """Yield choices that keep these names, and were not there in an earlier call."""
        units, known = units_of(table[kept]), self.known[kept]
        if None not in known:
            movable = self.step.movable - self.step.moved
            free, always = [u in movable for u in units], [u in self.step.moved for u in units]
            yield _Candidates(kept, units, _subsets(units, free, table[kept], always), None)
        some = not self.step.moved and len(self.counts) > 1
        pairs = _smaller(self.step, self.sets, kept, units) if some else []
        if new := [(rest, moved) for rest, moved in pairs if rest not in known]:
            yield _Candidates(kept, units, np.array([moved for _, moved in new]), [rest for rest, _ in new])
        known |= {None, *(rest for rest, _ in new)}

    def _best(self, table: Table, these: "_Candidates", number: int) -> list[Any]:
        """Return the undominated ones for each budget as columns of integers: ns, device, host; `number`, which of
        these, and how many layers."""
        rest = [table[kept] for kept in these.rest] if these.rest else None
        counts = self.counts[1:] if these.rest else self.counts  # where none offloads, all layers keep the same
        out = outcome(self.step, table[these.kept], rest, these.sets, counts, self.again[these.kept])
        device, found = out.device(self.step), []
        for host_budget in self.host_budgets:
            rows, columns = np.nonzero(out.host <= host_budget)
            sizes = [of[rows, columns] for of in (out.ns, device, out.host)]
            all_ = np.array([*sizes, np.full(len(rows), number), rows, counts[columns]])
            found.append(all_[:, _undominated(*sizes)])
        return found

    def _curve(self, budget: int) -> list[Choice]:
        columns = np.hstack([found for of in self.columns.values() for found in of[budget]])
        best = columns[:, _undominated(*columns[:3])].T.tolist()
        return [self.candidates[n].choice(row, layers, *sizes) for *sizes, n, row, layers in best]


class _Candidates(NamedTuple):
    """Choices that keep the same names: which of the `units` each moves, and what the other layers keep instead (None:
    the same)."""

    kept: Kept
    units: list[Unit]
    sets: Any  # (candidates, units) bool
    rest: list[Kept] | None

    def choice(self, row: int, layers: int, ns: int, device: int, host: int) -> Choice:
        moved = frozenset(itertools.compress(self.units, self.sets[row]))
        others: Others = "recompute" if self.rest else "save"
        rest = self.rest[row] if self.rest else self.kept
        return Choice(ns, device, host, self.kept, moved, layers, others, rest)


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


def _smaller(step: Step, table: Table, kept: Kept, units: list[Unit]) -> list[tuple[Kept, list[bool]]]:
    """Return the sets of names that the other layers may keep, each with what the first ones then move. Where all keep
    a name in any case, the first layers move it or not."""
    pairs = []
    in_any_case = frozenset.intersection(*table) & step.movable
    for rest in table:
        difference = kept - rest
        if rest < kept and difference <= step.movable and difference.intersection(units):
            for more in dict.fromkeys([frozenset(), in_any_case]):
                pairs.append((rest, [u in difference or u in more for u in units]))
    return pairs


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


def fastest(curve: Iterable[Choice], budget: float) -> Choice | None:
    """Return the last choice of a curve that fits in a budget of bytes per device; None if none does."""
    return max((c for c in curve if c.device <= budget), key=lambda c: c.device, default=None)


def alone(step: Step, table: Table, choice: Choice) -> Outcome:
    """Return what one choice comes to."""
    costs = table[choice.kept]
    moved = np.array([[u in choice.moved for u in units_of(costs)]], bool)
    rest = [table[choice.rest]] if choice.others == "recompute" else None
    again = again_of(step, table, choice.kept)
    return Outcome(*(of.item() for of in outcome(step, costs, rest, moved, np.array([choice.layers]), again)))
