"""What the first and the last of interleaved microbatches do not copy, because one of their passes runs alone.

The first forward pass (the fill) and the last backward pass (the drain) have no other pass beside them. Where a layer
then takes less time than its copies, some of its residuals stay on the device, and others are recomputed if that takes
less time than the wait for their copies. What stays takes less than a second set of gradients, which a plain loop over
microbatches holds (three tenths are for what is in flight), and the less the more microbatches share the time saved.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr

from ..._jax import COLLECTIVES
from ..cost.cost import Cost
from ..cost.lone_pass import Direction, Lone, Spare, bytes_in, cost_of, decide
from ..jaxprs.walk import walk
from ..layers.layer import Layer, shares
from ..layers.passes import Loops
from ..layers.per_device import mesh_of
from .gradient import Scan

Rows = frozenset[int]  # those of a residual in its layer's plan
Scans = tuple[Scan, ...]


class _Alone(NamedTuple):
    """A pass that has no other beside it, and over how many devices its values are spread."""

    direction: Direction
    devices: int

    def seconds(self, jaxpr: Jaxpr) -> float:
        return cost_of(jaxpr, self.devices).seconds


class Ends(NamedTuple):
    """The scans of the first and of the last microbatch. An end that copies everything is what the others use."""

    first: Scans
    last: Scans


def ends(scans: Scans, microbatches: int, gradients: int) -> Ends:
    """Return the scans of the first and of the last microbatch; `gradients`: bytes of a set of them, on all devices."""
    spare, devices = spare_of(scans, microbatches, gradients)
    first, left = _fitted(scans, _Alone("forward", devices), spare)
    # Of more than two microbatches the first is gone when the last begins.
    last, _ = _fitted(scans, _Alone("backward", devices), left if microbatches == 2 else spare)
    return Ends(first, last)


def spare_of(scans: Scans, microbatches: int, gradients: int) -> Spare:
    """Return what may stay; `gradients` as for `ends`."""
    devices = _devices(scans)
    return Spare(int(min(0.7, 2 / microbatches) * gradients) // devices, devices)


def _devices(scans: Scans) -> int:
    """Return over how many devices values are spread; inside `shard_map` they are one device's."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return math.prod(mesh.shape[axis] for axis in (*mesh.auto_axes, *mesh.explicit_axes))
    forward = [segment.layer.forward for scan in scans for segment in scan.loops.segments]
    return max((math.prod(mesh_of(jaxpr, ()).values()) for jaxpr in forward), default=1)


def _fitted(scans: Scans, alone: _Alone, budget: int) -> tuple[Scans, int]:
    """Return the scans if the pass `alone` has no other beside it, and what is left of the `budget`.

    `budget`: the bytes per device that may stay. The last layers' residuals are needed first, so the last scan is
    served first.
    """
    made: list[Scan] = []
    for scan in reversed(scans):
        loops, budget = _fitted_loops(scan.loops, alone, budget)
        made.insert(0, scan if loops is scan.loops else scan._replace(loops=loops))
    same = all(new is old for new, old in zip(made, scans, strict=True))
    return (scans if same else tuple(made)), budget


def _fitted_loops(loops: Loops, alone: _Alone, budget: int) -> tuple[Loops, int]:
    segments = []
    for segment in loops.segments:
        layer = segment.layer
        if segment.on_host:
            layer = _fitted_layer(layer, alone, budget // segment.layers)
        budget -= segment.layers * (_on_device(layer) - _on_device(segment.layer))
        if layer is not segment.layer:
            on_host = segment.on_host if layer.for_host else 0
            segment = segment._replace(jaxpr=layer.forward, layer=layer, on_host=on_host)
        segments.append(segment)
    same = all(new is old for new, old in zip(segments, loops.segments, strict=True))
    return (loops if same else loops.with_segments(segments)), budget


def _on_device(layer: Layer) -> int:
    """Bytes per device of what a layer keeps on it."""
    return sum(sum(shares(layer.forward, layer.kept, place)) for place in ("device", "once"))


def _moved(layer: Layer) -> Counter[Rows]:
    """Bytes per device of each residual for the host."""
    rows = (k.rows for k in layer.kept if k.place == "host")
    sizes: Counter[Rows] = Counter()
    for these, size in zip(rows, shares(layer.forward, layer.kept, "host"), strict=True):
        sizes[these] += size
    return sizes


def _fitted_layer(layer: Layer, alone: _Alone, budget: int) -> Layer:
    """A layer that may keep `budget` bytes on the device of what it would copy."""
    sizes = _moved(layer)
    forward, backward = alone.seconds(layer.forward), alone.seconds(_backward(layer))
    if sizes.total() <= bytes_in(forward if alone.direction == "forward" else backward):
        return layer
    again = {rows: max(0.0, alone.seconds(_backward(other)) - backward) for rows, other in _candidates(layer)}
    groups = [next((n for n, rows in enumerate(again) if these <= rows), len(again)) for these in sizes]
    of_all = np.array([*again.values(), math.inf])  # the last group cannot be recomputed
    lone = Lone(alone.direction, forward, backward, np.array([*sizes.values()]), np.array(groups), of_all)

    def rows_of(groups: Any) -> Rows:
        return frozenset[int]().union(*itertools.compress(again, groups))

    def accepts(recomputed: Any) -> list[bool]:
        rows = rows_of(recomputed[:, 0])
        return [_only_moves_less(layer.recomputing(rows), layer, rows)]

    decided = decide(lone, np.ones((len(sizes), 1), bool), np.array([budget]), accepts)
    recomputed, stay = rows_of(decided.recomputed[:, 0]), [*itertools.compress(sizes, decided.stay[:, 0])]
    if not recomputed and not stay:
        return layer
    return (layer.recomputing(recomputed) if recomputed else layer).with_on_device(stay)


def _backward(layer: Layer) -> Jaxpr:
    return layer.backward((True,) * sum(layer.out_perturbed))


def _candidates(layer: Layer) -> Iterator[tuple[Rows, Layer]]:
    """Yield rows that a layer could recompute, those that go together at once, and the layer if it did.

    Not where equations with effects would run again, or kernels and collectives whose time is not known.
    """
    if layer.forward.effects:
        return
    for rows in _together(layer):
        if all(layer.plan.rows[row].decision == "offload" for row in rows):
            other = layer.recomputing(rows)
            if _only_moves_less(other, layer, rows) and _untimed(other) <= _untimed(layer):
                yield rows, other


def _together(layer: Layer) -> list[Rows]:
    """The rows of the residuals for the host: together if one kernel makes them, or if they share a `cond`'s result."""
    numbers = {row.plan_name: number for number, row in enumerate(layer.plan.rows)}
    kept = {number for number, row in enumerate(layer.plan.rows) if row.decision != "recompute"}
    kernels = [kept & {numbers[name] for name in names} for names in layer.plan.together]
    moved = list(_moved(layer))

    def closed(rows: Rows) -> Rows:
        more = rows.union(*(these for these in [*kernels, *moved] if these & rows))
        return rows if more == rows else closed(more)

    return list(dict.fromkeys(map(closed, moved)))


def _only_moves_less(other: Layer, layer: Layer, rows: Rows) -> bool:
    """Whether a layer that recomputes these rows keeps nothing else for that, in neither place."""
    moved = {these: size for these, size in _moved(layer).items() if not these & rows}
    return _moved(other) == moved and _on_device(other) <= _on_device(layer)


def _untimed(layer: Layer) -> Counter[str]:
    backward = _backward(layer)
    return untimed(backward, cost_of(backward, 1))


def untimed(backward: Jaxpr, known: Cost) -> Counter[str]:
    """How often a backward pass of a known cost runs what has no known time."""
    names = (site.eqn.primitive.name for site in walk(backward))
    return known.unknown + Counter(name for name in names if name in COLLECTIVES)
