"""Compare the copies of each residual with the layers that compute beside them, from FLOPs and bytes."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from ..._engine.cost.cost import cost
from ..._engine.jaxprs.walk import nested, walk
from ..._engine.layers.loops import backward_p, forward_p, is_ours, loops_of
from ..._engine.layers.segments import Segment
from ..._engine.microbatches.interleaved import interleaved_p, is_staged
from ..._engine.stages.last_rows import travels
from ..._jax import nbytes
from ..._text import readable
from .._program.host_transfers import for_host
from .._residuals.divided import Rows, divided, parts_of_stored, rows_of
from .machine import Machine
from .measure import Bus
from .shard_maps import axes_of, shard_maps_around


class LayerCopy(NamedTuple):
    """One residual of one layer: its bytes per device, and milliseconds to the host and back; 0 where it is not copied
    that way."""

    residual: str
    bytes: int
    d2h_ms: float
    h2d_ms: float


FREE = 0.01  # copies fit if at most this share of the layers' computing time is exposed


@dataclasses.dataclass(frozen=True)
class Fit:
    """The layers that one loop computes, and their copies, per device.

    With `accumulate`, the first microbatch's forward pass and the last one's backward pass run alone, as the passes of
    any scan. Of the others, one's backward pass runs beside the next one's forward pass.

    Attributes:
      layers: how many; `moved` have their residuals on the host. Each iteration copies, the first a padding row.
      runs: how often the loop runs in a step; more than once inside of another loop.
      forward_ms, backward_ms: how long one layer computes, including what it recomputes.
      unknown: kernels of which only the bytes are known, so that they may take longer.
      microbatches: how many `accumulate` interleaves here; 1 without it.
      beside: whether an iteration is the forward pass of one layer and the backward pass of another.

    Example:
      >>> from jaxoffload.proof import Fit
      >>> Fit(layers=8, moved=7, runs=1, forward_ms=2.0, backward_ms=4.0, copies=()).computing_ms
      48.0
    """

    layers: int
    moved: int
    runs: int
    forward_ms: float
    backward_ms: float
    copies: tuple[LayerCopy, ...]
    unknown: frozenset[str] = frozenset()
    microbatches: int = 1
    beside: bool = False

    @property
    def together(self) -> LayerCopy:
        """The sum of the copies."""
        total = lambda name: sum(getattr(copy, name) for copy in self.copies)
        return LayerCopy("all together", total("bytes"), total("d2h_ms"), total("h2d_ms"))

    @property
    def computing_ms(self) -> float:
        return self.runs * self.layers * (self.forward_ms + self.backward_ms)

    def exposed_ms(self, copy: LayerCopy) -> float:
        """Return how much longer these copies alone take than the layers beside them, both ways, in all layers."""
        if self.beside:
            longer = max(0.0, max(copy.d2h_ms, copy.h2d_ms) - self.forward_ms - self.backward_ms)
        else:
            longer = max(0.0, copy.d2h_ms - self.forward_ms) + max(0.0, copy.h2d_ms - self.backward_ms)
        return self.runs * self.layers * longer

    def fits(self, copy: LayerCopy) -> bool:
        return self.exposed_ms(copy) <= FREE * self.computing_ms

    def __str__(self) -> str:
        often = f"{self.runs} times " if self.runs > 1 else ""
        if self.microbatches > 1:
            together = f"interleaved over {self.microbatches} microbatches"
            often = f"{together if self.beside else 'first forward and last backward pass, alone'}: {often}"
        lines = [
            f"{often}{self.layers} layers, of which {self.moved} offload, each {self.forward_ms:.2f} ms forward, "
            f"{self.backward_ms:.2f} ms backward"
        ]
        for copy in (*self.copies, *([self.together] if len(self.copies) > 1 else [])):
            ways = (copy.d2h_ms, "to the host"), (copy.h2d_ms, "back")
            ms = ", ".join(f"{ms:7.2f} ms {way}" for ms, way in ways if ms)
            verdict = "fits" if self.fits(copy) else "does not fit"
            lines.append(f"  {copy.residual:26} {readable(copy.bytes):>10} {ms}  {verdict}")
        if self.unknown:
            lines.append(f"  ({', '.join(sorted(self.unknown))} may take longer: only the bytes are known)")
        return "\n".join(lines)


def fits_in(jaxpr: Jaxpr, args: Any, devices: int, machine: Machine) -> tuple[Fit, ...]:
    """Return the `Fit` of each loop of a traced function that offloads.

    What is copied is divided over devices as in the table of `residuals`, which counts what is replicated as whole.

    Args:
      args: of the function. `devices`: over how many its values are spread.
    """
    arguments = [leaf for leaf in jax.tree.leaves(args) if getattr(leaf, "sharding", None) is not None]
    rows, of_microbatches = rows_of(arguments), rows_of(arguments, axis=1)  # a microbatch is a row of an argument
    rows = {length: max(rows.get(length, 1), of_microbatches.get(length, 1)) for length in rows | of_microbatches}
    passes = list(_passes(jaxpr, 1, devices, {}, divided(jaxpr, rows).rows))
    return (*_in_turn(passes, machine, devices), *_interleaved(passes, machine, devices))


class _Pass(NamedTuple):
    """An equation that runs loops of ours, how often it runs, and over how many devices it is spread.

    `axes`: the sizes of the mesh axes of a `shard_map` around it. `rows`: as for `divided`.
    """

    eqn: JaxprEqn
    runs: int
    devices: int
    axes: dict[str, int]
    rows: Rows

    @property
    def segments(self) -> list[Segment]:
        return [segment for loops in loops_of(self.eqn) for segment in loops.segments]


def _passes(jaxpr: Jaxpr, runs: int, devices: int, axes: dict[str, int], rows: Rows) -> Iterator[_Pass]:
    """Yield those of a jaxpr, and of the layers in their loops."""
    for site in walk(jaxpr, lambda eqn: () if eqn.primitive in (forward_p, backward_p) else nested(eqn), runs):
        if is_ours(site.eqn):
            inside = axes | axes_of(shard_maps_around(site))
            yield (run := _Pass(site.eqn, site.runs, max(1, devices // site.devices), inside, rows))
            for segment in run.segments if site.eqn.primitive is not interleaved_p else ():
                yield from _passes(segment.jaxpr, site.runs * segment.layers, run.devices, inside, rows)


def _in_turn(passes: list[_Pass], machine: Machine, devices: int) -> Iterator[Fit]:
    """Pair each forward loop that offloads with the backward loop of the same layers."""
    those = lambda primitive: [(s, run) for run in passes if run.eqn.primitive is primitive for s in run.segments]
    backward = {(segment.layer, segment.start): segment.jaxpr for segment, _ in those(backward_p)}
    for segment, run in those(forward_p):
        if segment.on_host and (reverse := backward.get((segment.layer, segment.start))):
            copies = _copies(segment, run, machine.bus(devices))
            yield _fit(segment.layers, segment.on_host, run, (segment.jaxpr, reverse), copies, machine)


def _interleaved(passes: list[_Pass], machine: Machine, devices: int) -> Iterator[Fit]:
    """Yield the loops of each `accumulate`: passes beside each other, and the first and the last one alone."""
    bus = machine.bus(devices)
    both_ways = Bus(bus.together, bus.together, bus.together)
    for run in (run for run in passes if run.eqn.primitive is interleaved_p):
        params, microbatches = run.eqn.params, run.eqn.params["microbatches"]
        segments = {of: [s for loops in params[of] for s in loops.segments] for of in ("first", "loops", "last")}
        of_each = [segments["first"], *[segments["loops"]] * (microbatches - 2), segments["last"]]
        alone_in_turn = 1
        if schedule := params["schedule"]:  # the ticks of a stage, whose layers are on a part of the devices
            alone_in_turn = schedule.chunks
            of_each = [segments["loops"]] * (1 + schedule.forward_stop - schedule.chunks)
            run = run._replace(devices=max(1, run.devices // schedule.stages))
        beside = Counter((tuple(forward), tuple(backward)) for backward, forward in itertools.pairwise(of_each))
        for (forwards, backwards), times in beside.items():
            for forward, backward, layers, moved in _beside(forwards, backwards):
                rates = both_ways if forward.on_host and backward.on_host else bus
                copies = _both(_copies(forward, run, rates), _copies(backward, run, rates))
                if copies:
                    jaxprs = forward.jaxpr, backward.backward
                    fit = _fit(layers, moved, run._replace(runs=run.runs * times), jaxprs, copies, machine)
                    yield dataclasses.replace(fit, microbatches=microbatches, beside=True)
        for segment, first, last in zip(segments["loops"], segments["first"], segments["last"], strict=True):
            copies = _copies(segment, run, bus)
            copied = zip(segment.layout.moved, copies, strict=True)
            if alone := [one for residual, copy in copied if (one := _alone(copy, residual, first, last))]:
                lone = run._replace(runs=run.runs * alone_in_turn)
                fit = _fit(segment.layers, segment.on_host, lone, (first.jaxpr, last.backward), alone, machine)
                yield dataclasses.replace(fit, microbatches=microbatches)


def _both(to_host: list[LayerCopy], back: list[LayerCopy]) -> list[LayerCopy]:
    """Return the copies of a forward and of a backward pass; what is copied both ways is one."""
    only = lambda copies, others, **none: [c._replace(**none) for c in copies if c not in others]
    both = [copy for copy in to_host if copy in back]
    return both + only(to_host, back, h2d_ms=0.0) + only(back, to_host, d2h_ms=0.0)


def _alone(copy: LayerCopy, residual: frozenset[int], first: Segment, last: Segment) -> LayerCopy | None:
    """Return a residual's copies while the first forward and the last backward pass run; None if there are none."""
    d2h_ms, h2d_ms = (ms * (residual in end.layout.moved) for ms, end in ((copy.d2h_ms, first), (copy.h2d_ms, last)))
    return copy._replace(d2h_ms=d2h_ms, h2d_ms=h2d_ms) if d2h_ms or h2d_ms else None


class _Beside(NamedTuple):
    """Layers of a forward pass with those of a backward pass beside them; `moved` iterations copy more than padding."""

    forward: Segment
    backward: Segment
    layers: int
    moved: int


def _beside(forwards: Sequence[Segment], backwards: Sequence[Segment]) -> Iterator[_Beside]:
    """Pair the layers of a forward pass with those of a backward pass, which are in reverse."""
    # An iteration copies the residuals of the layer before.
    copies = lambda segment, layer: segment.layers - layer <= segment.on_host
    layers = lambda segments: [(s, copies(s, layer)) for s in segments for layer in range(s.layers)]
    pairs = zip(layers(forwards), reversed(layers(backwards)), strict=True)
    for _, those in itertools.groupby(pairs, key=lambda pair: (id(pair[0][0]), id(pair[1][0]))):
        forward, backward = zip(*those, strict=True)
        moved = max(sum(is_row for _, is_row in way) for way in (forward, backward))
        yield _Beside(forward[0][0], backward[0][0], len(forward), moved)


def _copies(segment: Segment, run: _Pass, bus: Bus) -> list[LayerCopy]:
    """Return what each iteration over the layers of a segment copies; on stages, a piece of the last row, too."""
    rows = 1 + 1 / segment.layers if is_staged(run.eqn) and travels(segment) else 1
    ms = lambda size, rate: rows * size / rate / 1e6
    parts = parts_of_stored(segment, run.rows).host
    sizes = [-(-nbytes(aval) // parts) for (_, aval), parts in zip(for_host(segment), parts, strict=True)]
    named = zip(segment.layer.moved_names, sizes, strict=False)  # no size where none is copied
    return [LayerCopy(names, size, ms(size, bus.d2h), ms(size, bus.h2d)) for names, size in named]


def _fit(
    layers: int, moved: int, run: _Pass, passes: tuple[Jaxpr, Jaxpr], copies: list[LayerCopy], machine: Machine
) -> Fit:
    """Compare a layer's copies with its `passes`, forward and backward."""
    forward, backward = (cost(jaxpr, machine, run.devices, run.axes) for jaxpr in passes)
    return Fit(
        layers=layers,
        moved=moved,
        runs=run.runs,
        forward_ms=1e3 * forward.seconds,
        backward_ms=1e3 * backward.seconds,
        copies=tuple(copies),
        unknown=frozenset(forward.unknown | backward.unknown),
    )
