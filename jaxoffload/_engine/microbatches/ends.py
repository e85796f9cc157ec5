"""Choose what the first and the last of interleaved microbatches do not copy: one of their passes runs alone.

The first forward pass (the fill) and the last backward pass (the drain) have no other pass beside them. Where a layer
then takes less time than its copies, some of its residuals stay on the device, and others are recomputed if that takes
less time than the wait for their copies. What stays takes less than a second set of gradients, which a plain loop over
microbatches holds (three tenths are for what is in flight), and the less the more microbatches share the time saved.
Nothing stays if that makes the passes of all layers less than 0.3 % shorter.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import jax

from ..._jax import COLLECTIVES
from ..cost.lone_pass import Direction, Lone, Rows, bytes_in, cost_of, decide
from ..jaxprs.flat import mesh_of
from ..jaxprs.walk import walk
from ..layers.layer import Layer
from ..layers.passes import Loops
from ..layers.segments import reads_of
from .gradient import Scan

Scans = tuple[Scan, ...]
Fit = Callable[[Layer, int], Layer]  # of a layer, by the bytes of it that may stay
LEAST_GAIN = 0.003  # of the time that the layers' passes of all microbatches take


def ends(scans: Scans, microbatches: int, gradients: int) -> tuple[Scans, Scans]:
    """Return the scans of the first and of the last microbatch; `scans` itself for one that copies everything.

    `gradients`: bytes of a set of them, on all devices.
    """
    devices = _devices(scans)
    spare = int(min(0.7, 2 / microbatches) * gradients) // devices
    fit: Callable[[Direction], Fit] = lambda direction: functools.partial(
        _fitted_layer, direction, microbatches, devices
    )
    first, left = _fitted(scans, fit("forward"), spare)
    # Of more than two microbatches the first is gone when the last begins.
    last, _ = _fitted(scans, fit("backward"), left if microbatches == 2 else spare)
    return first, last


def _devices(scans: Scans) -> int:
    """Return over how many devices values are spread; inside `shard_map` they are one device's."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return math.prod(mesh.shape[axis] for axis in (*mesh.auto_axes, *mesh.explicit_axes))
    forward = [segment.layer.forward for scan in scans for segment in scan.loops.segments]
    return max((math.prod(mesh_of(jaxpr, ()).values()) for jaxpr in forward), default=1)


def _fitted(scans: Scans, fit: Fit, budget: int) -> tuple[Scans, int]:
    """Return the scans for a microbatch one of whose passes runs alone, and what is left of the `budget`.

    `budget`: the bytes per device that may stay. The last layers' residuals are needed first, so the last scan is
    served first.
    """
    made: list[Scan] = []
    for scan in reversed(scans):
        loops, budget = _fitted_loops(scan.loops, fit, budget)
        made.insert(0, scan._replace(loops=loops))
    return (scans if tuple(made) == scans else tuple(made)), budget


def _fitted_loops(loops: Loops, fit: Fit, budget: int) -> tuple[Loops, int]:
    segments = list(loops.segments)
    for number, segment in enumerate(segments):
        if not segment.on_host:
            continue
        layer = fit(segment.layer, budget // segment.layers)
        if layer is not segment.layer:
            budget -= segment.layers * (_on_device(layer) - _on_device(segment.layer))
            on_host = segment.on_host if layer.layout.moved else 0
            segments[number] = segment._replace(jaxpr=layer.forward, layer=layer, on_host=on_host)
    if tuple(segments) == loops.segments:
        return loops, budget
    reads = reads_of(segments, loops.consts)
    return dataclasses.replace(loops, segments=tuple(segments), reads=reads), budget


def _on_device(layer: Layer) -> int:
    """Return the bytes per device of what a layer keeps on it."""
    return sum([*layer.sizes.device, *layer.sizes.once])


def _moved(layer: Layer) -> Counter[Rows]:
    """Return the bytes per device of each residual for the host."""
    sizes: Counter[Rows] = Counter()
    for these, size in zip(layer.layout.moved, layer.sizes.host, strict=True):
        sizes[these] += size
    return sizes


def _fitted_layer(direction: Direction, microbatches: int, devices: int, layer: Layer, budget: int) -> Layer:
    """Return a layer whose pass in this direction runs alone, and which may keep `budget` bytes on the device of what
    it would copy."""
    seconds = lambda jaxpr: cost_of(jaxpr, devices).seconds
    sizes, forward, backward = _moved(layer), seconds(layer.forward), seconds(layer.backward())
    if sizes.total() <= bytes_in(forward if direction == "forward" else backward):
        return layer
    again = {rows: max(0.0, seconds(other.backward()) - backward) for rows, other in _candidates(layer)}
    accepts = lambda rows: _only_moves_less(layer.recomputing(rows), layer, rows)
    lone = Lone(direction, forward, backward, sizes, again)
    decided = decide(lone, budget, accepts)
    least = LEAST_GAIN * microbatches * (forward + backward)
    if decided.stay and (none := decide(lone, 0, accepts)).seconds - decided.seconds < least:
        decided = none
    if not decided.recomputed and not decided.stay:
        return layer
    layer = layer.recomputing(decided.recomputed) if decided.recomputed else layer
    return dataclasses.replace(layer, layout=layer.layout.staying(lambda rows: rows in decided.stay))


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
    """Return the rows of the residuals for the host, in groups: those that one kernel makes, or that share a `cond`'s
    result."""
    numbers = {row.plan_name: number for number, row in enumerate(layer.plan.rows)}
    kept = {number for number, row in enumerate(layer.plan.rows) if row.decision != "recompute"}
    kernels = [kept & {numbers[name] for name in names} for names in layer.plan.together]
    moved = list(_moved(layer))

    def closed(rows: Rows) -> Rows:
        more = rows.union(*(these for these in [*kernels, *moved] if these & rows))
        return rows if more == rows else closed(more)

    return list(dict.fromkeys(map(closed, moved)))


def _only_moves_less(other: Layer, layer: Layer, rows: Rows) -> bool:
    """Return whether a layer that recomputes these rows keeps nothing else for that, in either place."""
    moved = {these: size for these, size in _moved(layer).items() if not these & rows}
    return _moved(other) == moved and _on_device(other) <= _on_device(layer)


def _untimed(layer: Layer) -> Counter[str]:
    """Count what has no known time in the backward pass."""
    backward = layer.backward()
    names = (site.eqn.primitive.name for site in walk(backward))
    return cost_of(backward, 1).unknown + Counter(name for name in names if name in COLLECTIVES)
