"""Whether each residual's copies fit behind the layer that computes beside them, told from FLOPs and bytes alone."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr

from ..._engine.loops import Loops, Segment, backward_p, forward_p
from ..._engine.memory import nbytes
from ..._engine.values import devices_of, nested
from ..._jax import SHARD_MAP
from ..._text import readable
from .._program.target import run_of
from .cost import cost
from .machine import Bus, Machine


class LayerCopy(NamedTuple):
    """Of one residual in one layer: milliseconds to the host and back."""

    residual: str
    bytes: int
    d2h_ms: float
    h2d_ms: float


# Copies fit where what nothing hides of them is no more of the time that the layers compute.
FREE = 0.01


@dataclasses.dataclass(frozen=True)
class Fit:
    """Layers that one loop computes, and their copies, on each device.

    Attributes:
      layers: of these `moved` have their residuals on the host; each turn of the loop copies, the first an empty row.
      runs: how often the loop runs in a step; more than once inside of another.
      forward_ms, backward_ms: of one layer, what it recomputes included.
      unknown: kernels that count as long as their bytes take, for no more is known of them.
    """

    layers: int
    moved: int
    runs: int
    forward_ms: float
    backward_ms: float
    copies: tuple[LayerCopy, ...]
    unknown: frozenset[str] = frozenset()

    @property
    def together(self) -> LayerCopy:
        return LayerCopy(
            "all together", *(sum(getattr(c, field) for c in self.copies) for field in LayerCopy._fields[1:])
        )

    @property
    def computing_ms(self) -> float:
        return self.runs * self.layers * (self.forward_ms + self.backward_ms)

    def exposed_ms(self, copy: LayerCopy) -> float:
        """Of all layers, both ways: what lasts longer than the layer beside it, of these copies alone."""
        there, back = copy.d2h_ms - self.forward_ms, copy.h2d_ms - self.backward_ms
        return self.runs * self.layers * (max(0.0, there) + max(0.0, back))

    def fits(self, copy: LayerCopy) -> bool:
        return self.exposed_ms(copy) <= FREE * self.computing_ms


@dataclasses.dataclass(frozen=True)
class Fits:
    """The `Fit` of each loop of a function that moves something; print it."""

    machine: Machine
    devices: int
    loops: tuple[Fit, ...]

    @property
    def exposed_ms(self) -> float | None:
        """Of a step; None where there is no loop to tell it of."""
        return round(sum(loop.exposed_ms(loop.together) for loop in self.loops), 3) if self.loops else None

    def to_json(self) -> str:
        loops = [
            {
                **{field.name: getattr(loop, field.name) for field in dataclasses.fields(loop)},
                "unknown": sorted(loop.unknown),
                "copies": [c._asdict() | {"fits": loop.fits(c)} for c in (*loop.copies, loop.together)],
            }
            for loop in self.loops
        ]
        more = {"devices": self.devices, "exposed_ms": self.exposed_ms}
        return json.dumps({"machine": json.loads(self.machine.to_json()), **more, "loops": loops})

    def __str__(self) -> str:
        if not self.loops:
            return "copies: not predicted, for no scan here moves anything; chain and checkpoint have no loop"
        lines = [f"copies on {self.devices} {self.machine.device}, as FLOPs and bytes predict them"]
        if self.devices > self.machine.gpus:
            lines[0] += f" (the bus was measured with {self.machine.gpus} that copied at once)"
        for loop in self.loops:
            often = f"{loop.runs} times " if loop.runs > 1 else ""
            lines.append(
                f"{often}{loop.layers} layers, of which {loop.moved} move, each {loop.forward_ms:.2f} ms forward, "
                f"{loop.backward_ms:.2f} ms backward"
            )
            for copy in (*loop.copies, *([loop.together] if len(loop.copies) > 1 else [])):
                verdict = "fits" if loop.fits(copy) else "does not fit"
                ms = f"{copy.d2h_ms:7.2f} ms to the host, {copy.h2d_ms:7.2f} ms back"
                lines.append(f"  {copy.residual:26} {readable(copy.bytes):>10} {ms}  {verdict}")
            if loop.unknown:
                lines.append(f"  (of {', '.join(sorted(loop.unknown))} nothing is known but bytes: it may take longer)")
        lines.append(f"nothing hides {self.exposed_ms:.2f} ms of a step's copies")
        return "\n".join(lines)


def fits(f: Callable[..., Any], *args: Any, machine: Machine) -> Fits:
    """Whether the copies of `f`'s residuals fit behind its layers on such a machine; nothing is run.

    It is told of each `scan` under a policy that offloads; `chain` and `checkpoint` have no loop to tell it of. What
    the arguments' devices hold, but for what a `shard_map` divides itself, is taken to be spread evenly over them.

    Args:
      f: a loss, which is differentiated, or a step; as for `verify`.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      machine: as `machine()` measured it, here or elsewhere.
    """
    run, _ = run_of(f, args)
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    devices = max((s.num_devices for s in shardings if s is not None), default=1)
    passes: dict[Any, list[_Pass]] = {forward_p: [], backward_p: []}
    _collect(jax.make_jaxpr(run)(*args), passes, 1, devices)
    return Fits(machine, devices, tuple(_fits(passes, machine, devices)))


class _Pass(NamedTuple):
    loops: Loops
    runs: int
    devices: int  # over which what it takes is spread


def _collect(jaxpr: Jaxpr, passes: dict[Any, list[_Pass]], runs: int, devices: int) -> None:
    for eqn in jaxpr.eqns:
        if eqn.primitive in passes:
            loops = eqn.params["loops"]
            passes[eqn.primitive].append(_Pass(loops, runs, devices))
            for segment in loops.segments:
                _collect(segment.jaxpr, passes, runs * segment.layers, devices)
            continue
        inside = max(1, devices // devices_of(eqn)) if eqn.primitive.name == SHARD_MAP else devices
        for body in nested(eqn):
            _collect(body, passes, runs * eqn.params.get("length", 1), inside)


def _fits(passes: dict[Any, list[_Pass]], machine: Machine, devices: int) -> Iterator[Fit]:
    """Of each forward loop that moves something, and the backward loop of the same layers."""
    backward = {
        (segment.layer, segment.start): segment for back in passes[backward_p] for segment in back.loops.segments
    }
    for one in passes[forward_p]:
        for segment in one.loops.segments:
            if segment.on_host and (back := backward.get((segment.layer, segment.start))):
                yield _fit(segment, back, one, machine, machine.bus(devices))


def _fit(forward: Segment, backward: Segment, of: _Pass, machine: Machine, bus: Bus) -> Fit:
    there, back = (cost(segment.jaxpr, machine, of.devices) for segment in (forward, backward))
    stored = [place for place in forward.places() if place != "operand"]
    results = forward.jaxpr.out_avals[len(forward.jaxpr.out_avals) - len(stored) :]
    sizes = [nbytes(aval) // of.devices for aval, place in zip(results, stored, strict=True) if place == "host"]
    ms = lambda size, rate: size / rate / 1e6
    return Fit(
        forward.layers,
        forward.on_host,
        of.runs,
        1e3 * there.seconds,
        1e3 * back.seconds,
        tuple(
            LayerCopy(names, size, ms(size, bus.d2h), ms(size, bus.h2d))
            for names, size in zip(forward.layer.for_host, sizes, strict=True)
        ),
        there.unknown | back.unknown,
    )
