"""The costs of a step and its layers, as far as choices depend on them."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from .._predict.machine import Bus
from .._predict.scans import Stack

Unit = tuple[str, ...]  # the names of values that have one decision
Kept = frozenset[Unit]


class LayerCost(NamedTuple):
    """The cost of one layer that keeps certain names.

    Attributes:
      forward, backward: seconds, with what runs again.
      device: bytes per device that stay there, whatever is moved; `once`: those of what is the same in all layers.
      movable: bytes per device of each unit that may go to the host.
      working: bytes per device while it runs, with a row of all that may go to the host.
    """

    forward: float
    backward: float
    device: int
    once: int
    movable: Mapping[Unit, int]
    working: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def kept(self) -> int:
        """Bytes per device of all that it keeps in each layer."""
        return self.device + sum(self.movable.values())


@dataclasses.dataclass(frozen=True)
class Step:
    """The costs that all choices share.

    Attributes:
      seconds: outside of the layers.
      other: bytes per device of all but residuals and a layer's working set.
      resident: how many of the last layers never offload.
      movable: units that may go to the host; `moved`: those that do in any case.
      recomputable: units that a layer can do without.
      bus: GB/s.
    """

    seconds: float
    other: int
    resident: int
    stacks: tuple[Stack, ...]
    bus: Bus
    movable: Kept
    moved: Kept = frozenset()
    recomputable: Kept = frozenset()


Costs = tuple[LayerCost, ...]  # of each stack
Table = Mapping[Kept, Costs]
