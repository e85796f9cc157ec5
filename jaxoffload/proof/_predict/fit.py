"""fits(): whether each residual's copies fit behind the layer that computes beside them, from FLOPs and bytes."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr

from ..._engine.copying_loops import Loops, Segment, backward_p, forward_p
from ..._engine.cost import cost
from ..._engine.walk import nested, walk
from ..._jax import nbytes
from ..._text import readable
from .._program.results import run_of
from .machine import Bus, Machine


class LayerCopy(NamedTuple):
    """One residual of one layer: its bytes per device, and milliseconds to the host and back."""

    residual: str
    bytes: int
    d2h_ms: float
    h2d_ms: float


FREE = 0.01  # copies fit if at most this share of the layers' computing time is exposed


@dataclasses.dataclass(frozen=True)
class Fit:
    """The layers that one loop computes, and their copies, per device.

    Attributes:
      layers: how many; `moved` have their residuals on the host. Each iteration copies, the first a padding row.
      runs: how often the loop runs in a step; more than once inside of another loop.
      forward_ms, backward_ms: how long one layer computes, including what it recomputes.
      unknown: kernels of which only the bytes are known, so that they may take longer.

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

    @property
    def together(self) -> LayerCopy:
        """The sum of the copies."""
        _, *columns = zip(*self.copies, strict=True)
        return LayerCopy("all together", *map(sum, columns))

    @property
    def computing_ms(self) -> float:
        return self.runs * self.layers * (self.forward_ms + self.backward_ms)

    def exposed_ms(self, copy: LayerCopy) -> float:
        """How much longer these copies alone take than the layers beside them, both ways, in all layers."""
        to_host, to_device = copy.d2h_ms - self.forward_ms, copy.h2d_ms - self.backward_ms
        return self.runs * self.layers * (max(0.0, to_host) + max(0.0, to_device))

    def fits(self, copy: LayerCopy) -> bool:
        return self.exposed_ms(copy) <= FREE * self.computing_ms


@dataclasses.dataclass(frozen=True)
class Fits:
    """The `Fit` of each loop of a function that offloads; print it.

    Example:
      >>> from jaxoffload.proof import Bus, Fits, Machine
      >>> bus = Bus(d2h=50.0, h2d=50.0, together=40.0)
      >>> h200 = Machine("H200", 1, "0.12", bus, bus, 700.0, (500.0, 400.0), 4000.0)
      >>> Fits(h200, devices=1, loops=()).exposed_ms is None  # no loop offloads
      True
    """

    machine: Machine
    devices: int
    loops: tuple[Fit, ...]

    @property
    def exposed_ms(self) -> float | None:
        """Milliseconds of copies per step that are exposed; None where no loop offloads."""
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
            return "no prediction: no scan offloads; chain and checkpoint are not covered"
        lines = [f"copies on {self.devices} {self.machine.device}, predicted from FLOPs and bytes"]
        if self.devices > self.machine.gpus:
            lines[0] += f" (the bus was measured with {self.machine.gpus} GPU(s) copying at once)"
        for loop in self.loops:
            often = f"{loop.runs} times " if loop.runs > 1 else ""
            lines.append(
                f"{often}{loop.layers} layers, of which {loop.moved} offload, each {loop.forward_ms:.2f} ms forward, "
                f"{loop.backward_ms:.2f} ms backward"
            )
            for copy in (*loop.copies, *([loop.together] if len(loop.copies) > 1 else [])):
                verdict = "fits" if loop.fits(copy) else "does not fit"
                ms = f"{copy.d2h_ms:7.2f} ms to the host, {copy.h2d_ms:7.2f} ms back"
                lines.append(f"  {copy.residual:26} {readable(copy.bytes):>10} {ms}  {verdict}")
            if loop.unknown:
                lines.append(f"  ({', '.join(sorted(loop.unknown))} may take longer: only the bytes are known)")
        lines.append(f"{self.exposed_ms:.2f} ms of copies per step are exposed")
        return "\n".join(lines)


def fits(f: Callable[..., Any], *args: Any, machine: Machine) -> Fits:
    """Predict whether the copies of `f`'s residuals fit behind its layers on a machine. Nothing runs.

    The prediction covers each `scan` under a policy that offloads; `chain` and `checkpoint` have no loop. Values are
    taken to be spread evenly over the arguments' devices, except where a `shard_map` divides them itself.

    Args:
      f: a loss, which is differentiated, or a step; as for `verify`.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      machine: what `machine()` measured, here or elsewhere.

    Returns:
      A `Fits`, with a `Fit` per loop: times in ms, sizes in bytes per device.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, scan, tag
      >>> from jaxoffload.proof import Bus, Machine, fits
      >>> bus = Bus(d2h=50.0, h2d=50.0, together=40.0)
      >>> h200 = Machine("H200", 1, "0.12", bus, bus, 700.0, (500.0, 400.0), 4000.0)
      >>> policy = Policy({"fc1": "offload"}, min_offload_bytes=0)
      >>> layer = lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None)
      >>> loss = lambda x, w: jnp.sum(scan(layer, x, w, policy=policy)[0])
      >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
      >>> prediction = fits(loss, shape(8192, 4096), shape(8, 4096, 4096), machine=h200)
      >>> prediction.loops[0].copies[0].bytes
      67108864
    """
    run, _ = run_of(f, args)
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    devices = max((s.num_devices for s in shardings if s is not None), default=1)
    passes: dict[Any, list[_Pass]] = {forward_p: [], backward_p: []}
    _collect(jax.make_jaxpr(run)(*args), passes, 1, devices)
    return Fits(machine, devices, tuple(_fits(passes, machine, devices)))


class _Pass(NamedTuple):
    """The loops of one forward or backward pass, how often they run, and over how many devices they are spread."""

    loops: Loops
    runs: int
    devices: int


def _collect(jaxpr: Jaxpr, passes: dict[Any, list[_Pass]], runs: int, devices: int) -> None:
    for site in walk(jaxpr, lambda eqn: () if eqn.primitive in passes else nested(eqn), runs):
        if site.eqn.primitive in passes:
            loops, of_each = site.eqn.params["loops"], max(1, devices // site.devices)
            passes[site.eqn.primitive].append(_Pass(loops, site.runs, of_each))
            for segment in loops.segments:
                _collect(segment.jaxpr, passes, site.runs * segment.layers, of_each)


def _fits(passes: dict[Any, list[_Pass]], machine: Machine, devices: int) -> Iterator[Fit]:
    """Pair each forward loop that offloads with the backward loop of the same layers."""
    backward = {
        (segment.layer, segment.start): segment for back in passes[backward_p] for segment in back.loops.segments
    }
    for forward in passes[forward_p]:
        for segment in forward.loops.segments:
            if segment.on_host and (reverse := backward.get((segment.layer, segment.start))):
                yield _fit(segment, reverse, forward, machine, machine.bus(devices))


def _fit(forward: Segment, backward: Segment, run: _Pass, machine: Machine, bus: Bus) -> Fit:
    forward_cost, backward_cost = (cost(segment.jaxpr, machine.rates, run.devices) for segment in (forward, backward))
    stored = [place for place in forward.places() if place != "operand"]
    results = forward.jaxpr.out_avals[len(forward.jaxpr.out_avals) - len(stored) :]
    sizes = [nbytes(aval) // run.devices for aval, place in zip(results, stored, strict=True) if place == "host"]
    ms = lambda size, rate: size / rate / 1e6
    named = zip(forward.layer.for_host, sizes, strict=True)
    return Fit(
        layers=forward.layers,
        moved=forward.on_host,
        runs=run.runs,
        forward_ms=1e3 * forward_cost.seconds,
        backward_ms=1e3 * backward_cost.seconds,
        copies=tuple(LayerCopy(names, size, ms(size, bus.d2h), ms(size, bus.h2d)) for names, size in named),
        unknown=forward_cost.unknown | backward_cost.unknown,
    )
