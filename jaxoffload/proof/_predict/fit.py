"""Compare the copies of each residual with the layers that compute beside them, from FLOPs and bytes."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from ..._engine.cost.cost import cost
from ..._engine.jaxprs.walk import nested, walk
from ..._engine.layers.loops import backward_p, forward_p
from ..._engine.layers.segments import Segment
from ..._engine.microbatches.interleaved import interleaved_p
from ..._engine.stages.last_rows import travels
from ..._jax import nbytes
from ..._text import readable
from .._residuals.divided import Rows, divided, parts_of_stored, rows_of
from .machine import Machine
from .rates import Bus
from .scans import axes_of, shard_maps_around


class LayerCopy(NamedTuple):
    """One residual of one layer: its bytes per device, and milliseconds to the host and back; 0 where it is not copied
    that way."""

    residual: str
    bytes: int
    d2h_ms: float
    h2d_ms: float


Passes = Literal["forward", "backward", "both"]
FREE = 0.01  # copies fit if at most this share of the loop's computing time is exposed


@dataclasses.dataclass(frozen=True)
class Fit:
    """A loop over layers that copies, per device.

    A scan has two: its forward and its backward pass. In `accumulate`, the first microbatch's forward pass and the last
    one's backward pass run alone. Of the others, one's backward pass runs beside the next one's forward pass.

    Attributes:
      passes: "forward", "backward" or, of two microbatches, "both".
      layers: how many; `moved` have their residuals on the host. Each iteration copies, the first a padding row.
      runs: how often the loop runs in a step.
      layer_ms: how long an iteration computes, including what it recomputes.
      unknown: kernels of which only the bytes are known, so that they may take longer.

    Example:
      >>> from jaxoffload.proof import Fit
      >>> Fit("forward", layers=8, moved=7, runs=1, layer_ms=2.0, copies=()).computing_ms
      16.0
    """

    passes: Passes
    layers: int
    moved: int
    runs: int
    layer_ms: float
    copies: tuple[LayerCopy, ...]
    unknown: frozenset[str] = frozenset()

    @property
    def together(self) -> LayerCopy:
        """The sum of the copies."""
        total = lambda name: sum(getattr(copy, name) for copy in self.copies)
        return LayerCopy("all together", total("bytes"), total("d2h_ms"), total("h2d_ms"))

    @property
    def computing_ms(self) -> float:
        return self.runs * self.layers * self.layer_ms

    def exposed_ms(self, copy: LayerCopy) -> float:
        """Return how much longer these copies alone take than the layers beside them, in all layers."""
        return self.runs * self.layers * max(0.0, copy.d2h_ms - self.layer_ms, copy.h2d_ms - self.layer_ms)

    def fits(self, copy: LayerCopy) -> bool:
        return self.exposed_ms(copy) <= FREE * self.computing_ms

    def __str__(self) -> str:
        how = "backward beside forward pass" if self.passes == "both" else f"{self.passes} pass"
        often = f"{self.runs} times " if self.runs > 1 else ""
        lines = [f"{how}: {often}{self.layers} layers, of which {self.moved} offload, each {self.layer_ms:.2f} ms"]
        for copy in (*self.copies, *([self.together] if len(self.copies) > 1 else [])):
            ways = (copy.d2h_ms, "to the host"), (copy.h2d_ms, "back")
            ms = ", ".join(f"{ms:7.2f} ms {way}" for ms, way in ways if ms)
            verdict = "fits" if self.fits(copy) else "does not fit"
            lines.append(f"  {copy.residual:26} {readable(copy.bytes):>10} {ms}  {verdict}")
        if self.unknown:
            lines.append(f"  ({', '.join(sorted(self.unknown))} may take longer: only the bytes are known)")
        return "\n".join(lines)


def fits_in(jaxpr: Jaxpr, args: Any, devices: int, machine: Machine) -> tuple[Fit, ...]:
    """Return the `Fit` of each loop of a traced function that copies.

    What is copied is divided over devices as in the table of `residuals`, which counts what is replicated as whole.

    Args:
      args: of the function. `devices`: over how many its values are spread.
    """
    arguments = [leaf for leaf in jax.tree.leaves(args) if getattr(leaf, "sharding", None) is not None]
    rows, of_microbatches = rows_of(arguments), rows_of(arguments, axis=1)  # a microbatch is a row of an argument
    rows = {length: max(rows.get(length, 1), of_microbatches.get(length, 1)) for length in rows | of_microbatches}
    return tuple(_fits(jaxpr, _Around(1, devices, {}, divided(jaxpr, rows).rows, machine, machine.bus(devices))))


class _Around(NamedTuple):
    """The surroundings of a loop.

    How often it runs, over how many devices its values are spread, the sizes of the mesh axes of a `shard_map`, `rows`
    as for `divided`, the machine, and whether it is on a pipeline stage.
    """

    runs: int
    devices: int
    axes: dict[str, int]
    rows: Rows
    machine: Machine
    bus: Bus
    staged: bool = False


def _fits(jaxpr: Jaxpr, around: _Around) -> Iterator[Fit]:
    """Yield those of a jaxpr, and of the layers in its loops."""
    for site in walk(jaxpr, lambda eqn: () if eqn.primitive in (forward_p, backward_p) else nested(eqn)):
        runs, devices = around.runs * site.runs, max(1, around.devices // site.devices)
        axes = around.axes | axes_of(shard_maps_around(site))
        inside = around._replace(runs=runs, devices=devices, axes=axes)
        if site.eqn.primitive is interleaved_p:
            yield from _interleaved(site.eqn, inside)
        elif site.eqn.primitive in (forward_p, backward_p):
            for segment in site.eqn.params["loops"].segments:
                passes: Passes = "forward" if site.eqn.primitive is forward_p else "backward"
                yield from _alone(passes, segment, segment.jaxpr, inside)
                yield from _fits(segment.jaxpr, inside._replace(runs=runs * segment.layers))


def _interleaved(eqn: JaxprEqn, around: _Around) -> Iterator[Fit]:
    """Yield the loops of an `accumulate`: passes beside each other, and the first and the last one alone."""
    microbatches, schedule = eqn.params["microbatches"], eqn.params["schedule"]
    of = lambda which: tuple(segment for loops in eqn.params[which] for segment in loops.segments)
    first, between, last = map(of, ("first", "loops", "last"))
    in_order, lone = [first, *[between] * (microbatches - 2), last], 1
    if schedule:  # the ticks of a stage, whose layers are on a part of the devices
        around = around._replace(devices=max(1, around.devices // schedule.stages), staged=True)
        in_order, lone = [between] * (1 + schedule.forward_stop - schedule.chunks), schedule.chunks
    for (forwards, backwards), times in Counter((forth, back) for back, forth in itertools.pairwise(in_order)).items():
        yield from _beside(forwards, backwards, around._replace(runs=around.runs * times))
    for segment in first:
        yield from _alone("forward", segment, segment.jaxpr, around._replace(runs=around.runs * lone))
    for segment in last:
        yield from _alone("backward", segment, segment.backward, around._replace(runs=around.runs * lone))


def _beside(forwards: Sequence[Segment], backwards: Sequence[Segment], around: _Around) -> Iterator[Fit]:
    """Yield the loops in which layers of a forward pass run beside those of a backward pass, which are in reverse."""
    both_ways = Bus(*[around.bus.together] * 3)
    # An iteration copies the residuals of the layer before.
    moves = lambda segment, layer: segment.layers - layer <= segment.on_host
    layers = lambda segments: [(s, moves(s, layer)) for s in segments for layer in range(s.layers)]
    pairs = zip(layers(forwards), reversed(layers(backwards)), strict=True)
    for _, those in itertools.groupby(pairs, key=lambda pair: (id(pair[0][0]), id(pair[1][0]))):
        ways = list(zip(*those, strict=True))
        forward, backward = (segment for (segment, _), *_ in ways)
        rates = both_ways if forward.on_host and backward.on_host else around.bus
        here = around._replace(bus=rates)
        if copies := _both(_copies(forward, here), _copies(backward, here)):
            moved = max(sum(is_row for _, is_row in way) for way in ways)
            yield _fit("both", len(ways[0]), moved, [forward.jaxpr, backward.backward], copies, around)


def _both(to_host: list[LayerCopy], back: list[LayerCopy]) -> list[LayerCopy]:
    """Return the copies of a forward and of a backward pass; what is copied both ways is one."""
    only = lambda copies, others, **none: [c._replace(**none) for c in copies if c not in others]
    both = [copy for copy in to_host if copy in back]
    return both + only(to_host, back, h2d_ms=0.0) + only(back, to_host, d2h_ms=0.0)


def _alone(passes: Passes, segment: Segment, jaxpr: Jaxpr, around: _Around) -> Iterator[Fit]:
    """Yield the loop of one pass through the layers of a segment, if it copies."""
    one_way = lambda copy: copy._replace(h2d_ms=0.0) if passes == "forward" else copy._replace(d2h_ms=0.0)
    if copies := list(map(one_way, _copies(segment, around))):
        yield _fit(passes, segment.layers, segment.on_host, [jaxpr], copies, around)


def _copies(segment: Segment, around: _Around) -> list[LayerCopy]:
    """Return what each iteration over the layers of a segment copies; on stages, a piece of the last row, too."""
    moved = segment.layout.split(segment.layer.forward.out_avals).host
    rows = 1 + 1 / segment.layers if around.staged and travels(segment) else 1
    ms = lambda size, rate: rows * size / rate / 1e6
    sizes = [-(-nbytes(x) // n) for x, n in zip(moved, parts_of_stored(segment, around.rows).host, strict=True)]
    named = zip(segment.layer.moved_names, sizes, strict=False)  # no size where none is copied
    d2h, h2d, _ = around.bus
    return [LayerCopy(names, size, ms(size, d2h), ms(size, h2d)) for names, size in named if size]


def _fit(
    passes: Passes, layers: int, moved: int, jaxprs: Sequence[Jaxpr], copies: list[LayerCopy], around: _Around
) -> Fit:
    """Compare the copies of an iteration with what it computes."""
    costs = [cost(jaxpr, around.machine, around.devices, around.axes) for jaxpr in jaxprs]
    ms, unknown = 1e3 * sum(of.seconds for of in costs), frozenset(name for of in costs for name in of.unknown)
    return Fit(passes, layers, moved, around.runs, ms, tuple(copies), unknown)
