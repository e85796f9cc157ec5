"""What stays on the device in the first and the last of interleaved microbatches, one pass of which runs alone.

The first forward pass (the fill) and the last backward pass (the drain) have no other pass beside them. Where a layer
then takes less time than its copies, some of its residuals stay on the device: as few as make the others fit. What
stays takes less than a second set of gradients, which a plain loop over microbatches holds (an eighth is for what is in
flight), and the less the more microbatches share the time that it saves.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.extend.core import Jaxpr

from .._jax import nbytes
from .copying_loops import Loops
from .cost import Rates, cost
from .pieces import Pieces, Scan, Straight
from .segments import Segment

# An H200's, whatever runs: all processes must compile the same program (measured: benchmarks/results/fits.json).
_RATES = Rates(gemm_tflops=670.0, attention_tflops=(580.0, 530.0), hbm_gb_s=3900.0)
_BUS_GB_S = 53.0  # one way


class Ends(NamedTuple):
    """The pieces of the first and of the last microbatch; those of the others, where nothing stays."""

    first: Pieces
    last: Pieces


def ends(pieces: Pieces, microbatches: int, gradients: int) -> Ends:
    """Return the pieces of the first and the last microbatch. `gradients`: bytes of a set of gradients."""
    first, left = _with_room(pieces, lambda segment: segment.jaxpr, int(min(7 / 8, 2 / microbatches) * gradients))
    last, _ = _with_room(pieces, _backward, left)
    return Ends(first, last)


def _backward(segment: Segment) -> Jaxpr:
    return segment.layer.backward((True,) * sum(segment.layer.out_perturbed))


def _with_room(pieces: Pieces, run: Callable[[Segment], Jaxpr], budget: int) -> tuple[Pieces, int]:
    """The pieces where copies run beside that alone, and what is left of a budget: the bytes that may stay.

    The last layers' residuals are needed first, so the last scan comes first.
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
    """The residuals of a layer that stay, each with its bytes: at most `budget`."""
    stored = [n for n, place in enumerate(segment.places()) if place != "operand"]
    avals = segment.jaxpr.out_avals[len(segment.jaxpr.out_avals) - len(stored) :]
    size = {n: nbytes(aval) for n, aval in zip(stored, avals, strict=True)}
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[axis] for axis in (*mesh.auto_axes, *mesh.explicit_axes))
    room = int(cost(run(segment), _RATES, devices).seconds * devices * _BUS_GB_S * 1e9)
    return staying({n: size[n] for n in segment.numbers("host")}, room, budget)


def staying(sizes: dict[int, int], room: int, budget: int) -> dict[int, int]:
    """Those of some sizes that stay, at most `budget` together, so that the others fit in `room` if they can."""
    stay = {}
    for n, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= room:
            room -= size
        elif size <= budget:
            stay[n], budget = size, budget - size
        else:
            room -= size
    return stay
