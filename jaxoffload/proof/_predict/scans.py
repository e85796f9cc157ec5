"""The scans that a traced step differentiates, and how often their layers run."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from ..._engine.jaxprs.walk import Site, nested, walk
from ..._engine.layers.loops import backward_p, forward_p
from ..._engine.layers.passes import Loops
from ..._engine.microbatches.interleaved import interleaved_p
from ..._engine.stages.schedule import Schedule
from ..._jax import SHARD_MAP
from .shard_maps import shard_maps_around


class Stack(NamedTuple):
    """A scan over layers: how many, how often it runs in a step, and of how many microbatches `accumulate` interleaves
    its passes where something is offloaded (1 without it).

    `schedule`: if it is on pipeline stages. Then the layers are those of a chunk, which run in each tick that has a
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
      loops: of its forward pass.
      devices: over how many its values are spread.
      shard_maps: those around it; on pipeline stages also that over these.
      site: where it stands.
    """

    stack: Stack
    loops: Loops
    devices: int
    shard_maps: tuple[JaxprEqn, ...]
    site: Site


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
        elif is_differentiated(site.eqn):
            each = [site.eqn.params["loops"]]
        around = shard_maps_around(site)
        if schedule:
            around = (*around, _over_stages(site.eqn))
        for loops in each:
            runs = site.runs * (schedule.forward_stop if schedule else microbatches)
            stack = Stack(loops.length, runs, microbatches, schedule)
            yield Scan(stack, loops, max(1, devices // (site.devices * stack.stages)), around, site)


def is_differentiated(eqn: JaxprEqn) -> bool:
    """Return if an equation is the forward pass of a scan that has a backward pass elsewhere."""
    return eqn.primitive is forward_p and not eqn.params["loops"].segments[0].layer.only_forward


def _over_stages(eqn: JaxprEqn) -> JaxprEqn:
    """Return the `shard_map` in which stages run their layers."""
    maps = (e for e in eqn.params["call_jaxpr"].eqns if e.primitive.name == SHARD_MAP)
    return next(e for e in maps if set(e.params["newly_manual_axes"]) == {eqn.params["stage_axis"]})
