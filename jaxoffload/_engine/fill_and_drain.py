"""What the first and the last of interleaved microbatches do not copy, because one of their passes runs alone.

The first forward pass (the fill) and the last backward pass (the drain) have no other pass beside them. Where a layer
then takes less time than its copies, some of its residuals stay on the device, and others are recomputed if that takes
less time than the wait for their copies. What stays takes less than a second set of gradients, which a plain loop over
microbatches holds (a quarter is for what is in flight), and the less the more microbatches share the time saved.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
from jax.extend.core import Jaxpr

from .copying_loops import Loops
from .cost import Rates, cost
from .layer import Layer, shares
from .pieces import Pieces, Scan, Straight
from .segments import Segment

# An H200's, whatever runs: all processes must compile the same program (measured: benchmarks/results/fits.json).
_RATES = Rates(gemm_tflops=670.0, attention_tflops=(580.0, 530.0), hbm_gb_s=3900.0)
_BUS_GB_S = 53.0  # one way

Direction = Literal["forward", "backward"]
Rows = frozenset[int]  # those of a residual in its layer's plan


class Ends(NamedTuple):
    """The pieces of the first and of the last microbatch. If they copy all, they are the object that all others use."""

    first: Pieces
    last: Pieces


def ends(pieces: Pieces, microbatches: int, gradients: int) -> Ends:
    """Return the pieces of the first and the last microbatch. `gradients`: bytes of a set of them, on all devices."""
    budget = int(min(3 / 4, 2 / microbatches) * gradients) // _devices()
    first, left = _with_room(pieces, "forward", budget)
    # Of more than two microbatches the first is gone when the last begins.
    last, _ = _with_room(pieces, "backward", left if microbatches == 2 else budget)
    return Ends(first, last)


def _devices() -> int:
    """Over how many devices values are spread that are traced here; inside `shard_map` they are one device's."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in (*mesh.auto_axes, *mesh.explicit_axes))


def _with_room(pieces: Pieces, alone: Direction, budget: int) -> tuple[Pieces, int]:
    """The pieces if the pass `alone` has no other beside it, and what is left of the `budget`.

    `budget`: the bytes per device that may stay. The last layers' residuals are needed first, so the last scan is
    served first.
    """
    made: list[Straight | Scan] = []
    for piece in reversed(pieces.pieces):
        if isinstance(piece, Scan):
            loops, budget = _limited(piece.loops, alone, budget)
            piece = piece if loops is piece.loops else piece._replace(loops=loops)
        made.append(piece)
    same = all(new is old for new, old in zip(reversed(made), pieces.pieces, strict=True))
    return (pieces if same else pieces._replace(pieces=made[::-1])), budget


def _limited(loops: Loops, alone: Direction, budget: int) -> tuple[Loops, int]:
    segments = []
    for segment in loops.segments:
        fitted = _fitted(segment, alone, budget // segment.layers) if segment.on_host else segment
        budget -= segment.layers * (_bytes(fitted, "device") - _bytes(segment, "device"))
        segments.append(fitted)
    same = all(new is old for new, old in zip(segments, loops.segments, strict=True))
    return (loops if same else loops.with_segments(segments)), budget


def _bytes(segment: Segment, place: str) -> int:
    """Bytes per device and layer of the residuals at a place."""
    return sum(shares(segment.jaxpr, segment.layer.kept, place))


def _fitted(segment: Segment, alone: Direction, budget: int) -> Segment:
    """A segment of layers, each of which may keep `budget` bytes on the device of what it would copy."""
    sizes: Counter[Rows] = Counter()
    for rows, size in zip(segment.moved, shares(segment.jaxpr, segment.layer.kept, "host"), strict=True):
        sizes[rows] += size
    forward, backward = (_seconds(jaxpr) for jaxpr in (segment.jaxpr, segment.backward))
    if sizes.total() <= _room(forward if alone == "forward" else backward):
        return segment
    to_recompute = dict(_to_recompute(segment, backward))

    def planned(again: Rows) -> tuple[float, set[Rows]]:
        """The seconds that both passes take if these rows are recomputed, and which others stay."""
        more = sum(seconds for rows, seconds in to_recompute.items() if rows <= again)
        lone, other = (forward, backward + more) if alone == "forward" else (backward + more, forward)
        copied = {rows: size for rows, size in sizes.items() if not rows & again}
        stay = staying(copied, _room(lone), budget)
        waited = (sum(copied.values()) - sum(stay.values())) / _BUS_GB_S / 1e9
        return other + max(lone, waited), set(stay)

    again: Rows = frozenset()
    while better := [again | rows for rows in to_recompute if planned(again | rows)[0] < planned(again)[0]]:
        again = min(better, key=lambda these: planned(these)[0])
    _, stay = planned(again)
    if not again and not stay:
        return segment
    layer = (segment.layer.recomputing(again, _REASON) if again else segment.layer).with_on_device(stay)
    return segment._replace(jaxpr=layer.forward, layer=layer, on_host=segment.on_host if layer.for_host else 0)


_REASON = "a pass runs alone"


def _seconds(jaxpr: Jaxpr) -> float:
    return cost(jaxpr, _RATES, _devices()).seconds


def _room(seconds: float) -> int:
    """The bytes that are copied one way in this time."""
    return int(seconds * _BUS_GB_S * 1e9)


def _to_recompute(segment: Segment, backward: float) -> Iterator[tuple[Rows, float]]:
    """Which rows a layer could recompute, those of one kernel together, and the seconds that it would take."""
    layer = segment.layer
    if segment.jaxpr.effects:  # they would occur once more
        return
    on_device = _bytes(segment, "device")
    for rows in dict.fromkeys(_of_one_kernel(layer, rows) for rows in segment.moved):
        if all(layer.plan.rows[row].decision == "offload" for row in rows):
            other = layer.recomputing(rows, _REASON)
            if sum(shares(other.forward, other.kept, "device")) <= on_device:
                yield rows, max(0.0, _seconds(segment._replace(layer=other).backward) - backward)


def _of_one_kernel(layer: Layer, rows: Rows) -> Rows:
    """These rows, and those of other results of their kernels that are kept."""
    numbers = {row.plan_name: number for number, row in enumerate(layer.plan.rows)}
    kernels = [{numbers[name] for name in names} for names in layer.plan.together]
    kept = {number for number, row in enumerate(layer.plan.rows) if row.decision != "recompute"}
    return rows.union(*(kernel & kept for kernel in kernels if kernel & rows))


def staying[T](sizes: dict[T, int], room: int, budget: int) -> dict[T, int]:
    """Return which sizes stay, at most `budget` together: large ones that do not fit in the `room` of the others."""
    stay = {}
    for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= room:
            room -= size
        elif size <= budget:
            stay[key], budget = size, budget - size
        else:
            room -= size
    return stay
