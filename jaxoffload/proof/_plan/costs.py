"""The costs of a step and its layers, as far as choices depend on them."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..._engine.stages.schedule import Schedule
from .._predict.machine import Bus

Unit = tuple[str, ...]  # the names of values that have one decision
Kept = frozenset[Unit]


class Alone(NamedTuple):
    """A layer, as `accumulate` knows it where it decides on the passes that run alone.

    Attributes:
      forward, backward: seconds, as it counts them.
      residuals: the unit and the bytes per device of each that may go to the host.
      recomputable: units that may be recomputed there.
      untimed: how often the backward pass runs what has no known time.
    """

    forward: float
    backward: float
    residuals: tuple[tuple[Unit, int], ...]
    recomputable: Kept
    untimed: Counter[str]


class LayerCost(NamedTuple):
    """The cost of one layer that keeps certain names.

    Attributes:
      forward, backward: seconds, with what runs again.
      device: bytes per device that stay there, whatever is moved; `once`: those of what is the same in all layers.
      movable: bytes per device of each unit that may go to the host.
      working: bytes per device while it runs, with a row of all that may go to the host; `staying`: if all stays on the
        device, where what is fused reads it in its stack.
      alone: where `accumulate` interleaves its passes.
      beyond: on pipeline stages, by the number of layers of a chunk that offload: bytes per device of each unit that
        the pieces of the last one's row take beyond a row.
    """

    forward: float
    backward: float
    device: int
    once: int
    movable: Mapping[Unit, int]
    working: int
    staying: int
    alone: Alone | None = None
    beyond: Mapping[Unit, Sequence[int]] = MappingProxyType({})

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def kept(self) -> int:
        """Bytes per device of all that it keeps."""
        return self.device + sum(self.movable.values())


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


@dataclasses.dataclass(frozen=True)
class Step:
    """The costs that all choices share.

    Attributes:
      seconds: outside of the layers.
      arguments: bytes per device, as are the others.
      other: gradients, and what else is there while layers run.
      elsewhere: the most besides arguments and residuals when no layers run, such as while logits are computed.
      may_stay: what `accumulate` may keep on the device where a pass runs alone.
      resident: how many of the last layers never offload.
      moved: units that go to the host in any case; `movable`: those that may.
      recomputable: units that a layer can do without.
      bus: GB/s.
    """

    seconds: float
    arguments: int
    other: int
    elsewhere: int
    may_stay: int
    resident: int
    stacks: tuple[Stack, ...]
    bus: Bus
    movable: Kept
    moved: Kept = frozenset()
    recomputable: Kept = frozenset()


Costs = tuple[LayerCost, ...]  # of each stack
Table = Mapping[Kept, Costs]
