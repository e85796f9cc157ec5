"""What stays on the device in the first and the last of interleaved microbatches, one pass of which runs alone.

The first forward pass (the fill) and the last backward pass (the drain) have no other pass beside them. Where a layer
then takes less time than its copies, some of its residuals stay on the device, so that the others fit. What stays takes
less than a second set of gradients, which a plain loop over microbatches holds (an eighth is for what is in
flight), and the less the more microbatches share the time that it saves.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.extend.core import Jaxpr

from .copying_loops import Loops
from .cost import Rates, cost
from .device_bytes import straight
from .pieces import Pieces, Scan, Straight
from .segments import Segment

# An H200's, whatever runs: all processes must compile the same program (measured: benchmarks/results/fits.json).
_RATES = Rates(gemm_tflops=670.0, attention_tflops=(580.0, 530.0), hbm_gb_s=3900.0)
_BUS_GB_S = 53.0  # one way


class Ends(NamedTuple):
    """The pieces of the first and of the last microbatch. If nothing stays, they are the object that all others use."""

    first: Pieces
    last: Pieces


def ends(pieces: Pieces, microbatches: int, gradients: int) -> Ends:
    """Return the pieces of the first and the last microbatch. `gradients`: bytes of a set of them, on all devices."""
    budget = int(min(7 / 8, 2 / microbatches) * gradients) // _devices()
    first, left = _with_room(pieces, lambda segment: segment.jaxpr, budget)
    last, _ = _with_room(pieces, lambda segment: segment.backward, left)
    return Ends(first, last)


def _devices() -> int:
    """Over how many devices values are spread that are traced here; inside `shard_map` they are one device's."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in (*mesh.auto_axes, *mesh.explicit_axes))


def _with_room(pieces: Pieces, run: Callable[[Segment], Jaxpr], budget: int) -> tuple[Pieces, int]:
    """The pieces if a layer's copies run only beside what `run` returns, and what is left of the `budget`.

    `budget`: the bytes per device that may stay. The last layers' residuals are needed first, so the last scan is
    served first.
    """
    made: list[Straight | Scan] = []
    for piece in reversed(pieces.pieces):
        if isinstance(piece, Scan):
            loops, budget = _limited(piece.loops, run, budget)
            piece = piece if loops is piece.loops else piece._replace(loops=loops)
        made.append(piece)
    same = all(new is old for new, old in zip(reversed(made), pieces.pieces, strict=True))
    return (pieces if same else pieces._replace(pieces=made[::-1])), budget


def _limited(loops: Loops, run: Callable[[Segment], Jaxpr], budget: int) -> tuple[Loops, int]:
    segments = []
    for segment in loops.segments:
        stay = _staying(segment, run, budget // segment.layers) if segment.on_host else {}
        budget -= segment.layers * sum(stay.values())
        if stay:
            layer = segment.layer.with_on_device(stay)
            segment = segment._replace(layer=layer, on_host=segment.on_host if layer.for_host else 0)
        segments.append(segment)
    same = all(new is old for new, old in zip(segments, loops.segments, strict=True))
    return (loops if same else dataclasses.replace(loops, segments=tuple(segments))), budget


def _staying(segment: Segment, run: Callable[[Segment], Jaxpr], budget: int) -> dict[int, int]:
    """The residuals of each layer that stay, with their bytes per device: at most `budget` per layer."""
    stored = [n for n, place in enumerate(segment.places()) if place != "operand"]
    program = straight(segment.jaxpr)
    values = dict(zip(stored, program.outputs[len(program.outputs) - len(stored) :], strict=True))
    sizes = {n: program.share(value) for n in segment.numbers("host") if (value := values[n])}
    room = int(cost(run(segment), _RATES, _devices()).seconds * _BUS_GB_S * 1e9)
    return staying(sizes, room, budget)


def staying(sizes: dict[int, int], room: int, budget: int) -> dict[int, int]:
    """Return which sizes stay, at most `budget` together: large ones that do not fit in the `room` of the others."""
    stay = {}
    for n, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= room:
            room -= size
        elif size <= budget:
            stay[n], budget = size, budget - size
        else:
            room -= size
    return stay
