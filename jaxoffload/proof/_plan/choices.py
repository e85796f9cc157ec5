"""From what one layer costs to all choices that no other one beats: times, and bytes on the device and on the host.

A choice keeps some names for the backward pass, moves some of these to the host in the first layers, and lets the
other layers save or recompute what it moves. A step takes

    the time of all that is outside of the layers
    + for each layer its forward and its backward pass, with what runs again
    + the time by which a layer's copies take longer than what runs beside them.

On each device are the arguments, the gradients and the like, the residuals that stay, and the largest working set. The
choices do not depend on the budget of device memory. So of two budgets the greater one never has the slower plan.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from .._predict.machine import Bus

Unit = tuple[str, ...]  # the names of values that have one decision
Kept = frozenset[Unit]


class LayerCost(NamedTuple):
    """What one layer costs that keeps certain names.

    Attributes:
      forward, backward: seconds, with what runs again.
      device: bytes per device that stay there, whatever is moved; `once`: those of what is the same in all layers.
      movable: bytes per device of each unit that may go to the host.
      working: bytes per device while it runs.
    """

    forward: float
    backward: float
    device: int
    once: int
    movable: Mapping[Unit, int]
    working: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def kept(self) -> int:
        """Bytes per device of all that it keeps."""
        return self.device + sum(self.movable.values())


class Stack(NamedTuple):
    """A scan over layers: how many, how often it runs in a step, and of how many microbatches `accumulate` interleaves
    its passes where something is offloaded (1 without it)."""

    layers: int
    runs: int = 1
    microbatches: int = 1


@dataclasses.dataclass(frozen=True)
class Step:
    """What is the same for all choices.

    Attributes:
      seconds: outside of the layers.
      arguments: bytes per device, as are the others.
      other: gradients, and what else is there while layers run; `less` of it where microbatches interleave.
      elsewhere: the most besides arguments and residuals when no layers run, such as while logits are computed.
      may_stay: what `accumulate` may keep on the device for the passes that run alone.
      resident: how many of the last layers never offload.
      moved: units that go to the host in any case; `movable`: those that may.
      recomputable: units that a layer can do without.
      bus: GB/s.
    """

    seconds: float
    arguments: int
    other: int
    less: int
    elsewhere: int
    may_stay: int
    resident: int
    stacks: tuple[Stack, ...]
    bus: Bus
    movable: Kept
    moved: Kept = frozenset()
    recomputable: Kept = frozenset()


Costs = tuple[LayerCost, ...]  # of each stack
Table = Mapping[Kept, Costs]
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
    """Of candidates by counts of layers: nanoseconds, and the bytes per device of each kind."""

    ns: Any
    residuals: Any
    other: Any
    working: Any
    host: Any
    copied: Any  # in a step, each way

    def device(self, step: Step) -> Any:
        return step.arguments + self.other + self.residuals + self.working


def outcome(step: Step, costs: Costs, rest: Sequence[Costs] | None, moved: Any, layers: Any) -> Outcome:
    """Return what candidates come to that keep the same names.

    Args:
      costs: of the layers that keep them.
      rest: for each candidate what the layers cost that recompute what it moves; None if they save it.
      moved: for each candidate which units it moves, (candidates, units) bool, in the order of `units_of`.
      layers: how many layers offload, (counts,).
    """
    units = units_of(costs)
    sizes = [np.array([cost.movable.get(u, 0) for u in units], np.int64) for cost in costs]
    moves = [_Moves(size, moved, moved @ size[:, None]) for size in sizes]
    counts = [_counts(step, stack, of.sum, layers, rest is None) for stack, of in zip(step.stacks, moves, strict=True)]
    beside = np.any([n.offload & (s.microbatches > 1) for s, n in zip(step.stacks, counts, strict=True)], axis=0)
    seconds = np.full(beside.shape, step.seconds)
    residuals, host, copied, stay, working = (np.zeros(beside.shape, np.int64) for _ in range(5))
    # The last scan's residuals are needed first, so it is served first with what may stay.
    for number, (stack, cost, of, n) in reversed([*enumerate(zip(step.stacks, costs, moves, counts, strict=True))]):
        other = _Rest.of([each[number] for each in rest or ()] or [cost])
        sets = np.where(beside & (stack.microbatches > 1), 2, 1)
        stays, of_ends = _ends(step, stack, cost, of, step.may_stay - stay, n.copying)
        stay += beside * stays
        exposed = np.where(sets == 2, _beside(step, stack, cost, of.sum) + of_ends, _in_turn(step, stack, cost, of.sum))
        seconds += stack.runs * ((stack.layers - n.rest) * cost.seconds + n.rest * other.seconds) + n.copying * exposed
        kept = (stack.layers - n.rest) * cost.kept - n.layers * of.sum + n.rest * other.kept + cost.once
        residuals += sets * kept
        in_flight = cost.working + sets * of.sum * n.offload
        working = np.maximum(working, np.maximum(in_flight, (n.rest > 0) * other.working))
        host += sets * (n.layers + n.offload) * of.sum  # and a padding row
        copied += stack.runs * n.copying * of.sum
    other_bytes = step.other - step.less * beside + stay
    working = np.maximum(working, step.elsewhere - step.other)
    return Outcome(np.rint(1e9 * seconds).astype(np.int64), residuals, other_bytes, working, host, copied)


class _Rest(NamedTuple):
    """Of each candidate what a layer costs that is neither resident nor offloads, (candidates, 1)."""

    seconds: Any
    kept: Any
    working: Any

    @classmethod
    def of(cls, costs: Sequence[LayerCost]) -> "_Rest":
        return cls(*(np.array([getattr(c, name) for c in costs])[:, None] for name in ("seconds", "kept", "working")))


class _Counts(NamedTuple):
    """Of a stack: whether layers offload, how many; how many iterations copy; how many layers are neither those nor
    resident."""

    offload: Any
    layers: Any
    copying: Any
    rest: Any


def _counts(step: Step, stack: Stack, moving: Any, layers: Any, save: bool) -> _Counts:
    """As `layer_ranges` divides the layers of a stack."""
    resident = min(step.resident, stack.layers)
    count = np.minimum(layers, stack.layers - resident)
    offload = (moving > 0) & (count > 0)
    count = np.where(offload, count, 0)
    rest = np.where(moving > 0, stack.layers - resident - count, 0)
    joins = offload & (count < stack.layers) & ((rest == 0) | save)
    return _Counts(offload, count, count + joins, rest)


def _in_turn(step: Step, stack: Stack, cost: LayerCost, moving: Any) -> Any:
    """Seconds by which a layer's copies take longer than its passes, each beside its own."""
    return stack.runs * (_longer(moving, step.bus.d2h, cost.forward) + _longer(moving, step.bus.h2d, cost.backward))


def _beside(step: Step, stack: Stack, cost: LayerCost, moving: Any) -> Any:
    """The same where one pass runs beside another, in all microbatches."""
    times = stack.runs // stack.microbatches * (stack.microbatches - 1)
    return times * _longer(moving, step.bus.together, cost.seconds)


class _Moves(NamedTuple):
    """What candidates move of a stack's layer: bytes of each unit (units,), which (candidates, units), and their sum
    (candidates, 1)."""

    sizes: Any
    moved: Any
    sum: Any


def _ends(step: Step, stack: Stack, cost: LayerCost, moves: _Moves, left: Any, layers: Any) -> tuple[Any, Any]:
    """What stays on the device, of `left` bytes at most, where a pass runs alone beside so many layers; and the seconds
    by which the other copies take longer, per layer."""
    left = left // np.maximum(1, layers)
    first = _staying(moves, cost.forward * step.bus.d2h * 1e9, left)
    # Of two microbatches both ends are there at once.
    last = _staying(moves, cost.backward * step.bus.h2d * 1e9, left - first if stack.microbatches == 2 else left)
    stay = layers * (first + last if stack.microbatches == 2 else np.maximum(first, last))
    to_host = _longer(moves.sum - first, step.bus.d2h, cost.forward)
    back = _longer(moves.sum - last, step.bus.h2d, cost.backward)
    return stay, stack.runs // stack.microbatches * (to_host + back)


def _staying(moves: _Moves, room: float, budget: Any) -> Any:
    """Return the bytes that stay of a layer, as `fill_and_drain.staying` chooses them: large values that do not fit in
    the `room` of the others."""
    rooms, stay = np.full(budget.shape, room), np.zeros(budget.shape, np.int64)
    for unit in np.argsort(-moves.sizes, kind="stable"):
        size, moved = int(moves.sizes[unit]), moves.moved[:, unit : unit + 1]
        stays = moved & (size > rooms) & (size <= budget - stay)
        rooms = rooms - size * (moved & ~stays)
        stay = stay + size * stays
    return stay


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
    """What `undominated` returns for some host budgets, of a table that grows: only what is new is computed."""

    def __init__(self, step: Step, host_budgets: Sequence[int]):
        self.step, self.host_budgets, self.counts = step, host_budgets, _layer_counts(step)
        self.known = set[tuple[Kept, Kept | None]]()
        self.curves: list[list[Choice]] = [[] for _ in host_budgets]

    def of(self, table: Table) -> list[list[Choice]]:
        """Return the curve of each budget; `table` has all sets of earlier calls."""
        new = [candidates for kept in table for candidates in self._new(table, kept)]
        found = [[_columns(curve)] for curve in self.curves]
        for number, candidates in enumerate(new):
            for columns, more in zip(found, self._best(table, candidates, number), strict=True):
                columns.append(more)
        self.curves = [_made(curve, new, np.hstack(columns)) for curve, columns in zip(self.curves, found, strict=True)]
        return self.curves

    def _new(self, table: Table, kept: Kept) -> "Iterator[_Candidates]":
        """Yield choices that keep these names, and were not there in an earlier call."""
        units = units_of(table[kept])
        if (kept, None) not in self.known:
            movable = self.step.movable - self.step.moved
            free, always = [u in movable for u in units], [u in self.step.moved for u in units]
            yield _Candidates(kept, units, _subsets(units, free, table[kept], always), None)
        pairs = _smaller(self.step, table, kept, units) if not self.step.moved else []
        if new := [(rest, moved) for rest, moved in pairs if (kept, rest) not in self.known]:
            yield _Candidates(kept, units, np.array([moved for _, moved in new]), [rest for rest, _ in new])
        self.known |= {(kept, None), *((kept, rest) for rest, _ in new)}

    def _best(self, table: Table, these: "_Candidates", number: int) -> list[Any]:
        """Return the undominated ones for each budget, as `_columns`."""
        rest = [table[kept] for kept in these.rest] if these.rest else None
        counts = self.counts[1:] if these.rest else self.counts  # where none offloads, all layers keep the same
        out = outcome(self.step, table[these.kept], rest, these.sets, counts)
        device, found = out.device(self.step), []
        for host_budget in self.host_budgets:
            rows, columns = np.nonzero(out.host <= host_budget)
            sizes = [of[rows, columns] for of in (out.ns, device, out.host)]
            all_ = np.array([*sizes, np.full(len(rows), number), rows, counts[columns]])
            found.append(all_[:, _undominated(*sizes)])
        return found


def _columns(curve: Sequence[Choice]) -> Any:
    """Return choices as columns of integers: ns, device, host; the number of their candidates, which of these, and how
    many layers. Those of a curve have the number -1, and count for themselves."""
    return np.array([(c.ns, c.device, c.host, -1, i, 0) for i, c in enumerate(curve)], np.int64).reshape(-1, 6).T


def _made(curve: Sequence[Choice], new: Sequence["_Candidates"], columns: Any) -> list[Choice]:
    """Return the undominated ones of these columns."""
    best = columns[:, _undominated(*columns[:3])].T.tolist()
    return [curve[row] if n < 0 else new[n].choice(row, layers, *sizes) for *sizes, n, row, layers in best]


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
    most = max(max(0, stack.layers - step.resident) for stack in step.stacks)
    return np.unique(np.linspace(0, most, min(most + 1, _MOST_COUNTS)).round().astype(np.int64))


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
    return Outcome(*(of.item() for of in outcome(step, costs, rest, moved, np.array([choice.layers]))))
