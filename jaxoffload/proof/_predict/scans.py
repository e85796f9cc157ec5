"""The scans that a traced step differentiates, how often their layers run, and the `shard_map`s around them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from ..._engine.jaxprs.walk import Site, nested, walk
from ..._engine.layers.layer import Layer
from ..._engine.layers.loops import backward_p, forward_p
from ..._engine.layers.passes import Loops
from ..._engine.microbatches.interleaved import interleaved_p
from ..._engine.stages.schedule import Schedule
from ..._jax import SHARD_MAP


class Stack(NamedTuple):
    """The layers of a scan: how many, how often they run in a step, and of how many microbatches `accumulate`
    interleaves their passes where something is offloaded (1 without it).

    `schedule`: if they are on pipeline stages. Then the layers are those of a chunk, which run in each tick that has a
    forward pass, and in as many that have a backward pass.
    """

    layers: int
    runs: int = 1
    microbatches: int = 1
    schedule: Schedule | None = None

    @property
    def chunks(self) -> int:
        return self.schedule.chunks if self.schedule else 1

    @property
    def stages(self) -> int:
        return self.schedule.stages if self.schedule else 1

    @property
    def sets(self) -> int:
        """How many microbatches keep residuals at once, whatever is moved."""
        return self.schedule.slots if self.schedule else 1

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The leading axes that xs of all its layers may have: on stages those of their chunks, too."""
        layers, virtual = self.layers * self.chunks, self.schedule.virtual_stages if self.schedule else 1
        return [(layers,), *([(virtual, layers // virtual)] if self.schedule else [])]

    def may_offload(self, resident: int) -> int:
        """Return how many layers may offload: not `resident` ones, except on stages, where all chunks are alike."""
        return self.layers * self.chunks if self.schedule else self.layers - min(resident, self.layers)


class Scan(NamedTuple):
    """A scan over layers.

    Attributes:
      layer: one of them, differentiated; `body`: its jaxpr before, to which it refers weakly, if that still lives.
      devices: over how many its values are spread.
      shard_maps: those around it; on pipeline stages also that over these.
      enclosing: the equations around it.
    """

    stack: Stack
    layer: Layer
    body: Jaxpr | None
    devices: int
    shard_maps: tuple[JaxprEqn, ...]
    enclosing: tuple[JaxprEqn, ...]


def scans_in(jaxpr: Jaxpr, devices: int) -> Iterator[Scan]:
    """Yield the scans that a traced step differentiates, except those in layers of others.

    `devices`: over how many the step's values are spread.
    """
    for site in walk(jaxpr, lambda eqn: () if eqn.primitive in (forward_p, backward_p) else nested(eqn)):
        microbatches, schedule = 1, None
        each: Sequence[Loops] = ()
        if site.eqn.primitive is interleaved_p:
            each, schedule = site.eqn.params["loops"], site.eqn.params["schedule"]
            microbatches = 1 if schedule else site.eqn.params["microbatches"]
        elif site.eqn.primitive is forward_p:
            each = (site.eqn.params["loops"],)
        around = (*shard_maps_around(site), *([_over_stages(site.eqn)] if schedule else []))
        for loops in each:
            layer, runs = loops.segments[0].layer, site.runs * (schedule.forward_stop if schedule else microbatches)
            stack = Stack(loops.length, runs, microbatches, schedule)
            if not layer.only_forward:
                on_devices = max(1, devices // (site.devices * stack.stages))
                yield Scan(stack, layer, layer.body(), on_devices, around, site.enclosing)


def _over_stages(eqn: JaxprEqn) -> JaxprEqn:
    """Return the `shard_map` in which stages run their layers."""
    maps = (e for e in eqn.params["call_jaxpr"].eqns if e.primitive.name == SHARD_MAP)
    return next(e for e in maps if set(e.params["newly_manual_axes"]) == {eqn.params["stage_axis"]})


def shard_maps_around(site: Site) -> tuple[JaxprEqn, ...]:
    """Return the `shard_map`s around an equation, outermost first."""
    return tuple(eqn for eqn in site.enclosing if eqn.primitive.name == SHARD_MAP)


def axes_of(shard_maps: Sequence[JaxprEqn]) -> dict[str, int]:
    """Return the sizes of the mesh axes of these, one in the other."""
    return {axis: size for eqn in shard_maps for axis, size in eqn.params["mesh"].shape.items()}


def within[T](shard_maps: Sequence[JaxprEqn], f: Callable[[], T]) -> T:
    """Return what `f` returns, which traces what stands in these, and so may be about their axes."""
    if not shard_maps:
        return f()
    found: list[T] = []
    run: Callable[[], Any] = lambda: found.append(f())
    for eqn in reversed(shard_maps):
        how = {"axis_names": set(eqn.params["newly_manual_axes"]), "check_vma": eqn.params["check_vma"]}
        run = jax.shard_map(run, mesh=eqn.params["mesh"], in_specs=(), out_specs=None, **how)
    jax.eval_shape(run)
    return found[0]
