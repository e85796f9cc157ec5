"""The cost of one layer that keeps certain names."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..._engine.cost.cost import Rates, cost
from ..._engine.decide.plan import Row
from ..._engine.jaxprs.flat import straight
from ..._engine.layers.layer import Layer
from ..._engine.layers.placement import Stored
from ..._policy import Decision, Policy
from .._predict.joint import Joint, Passes, joint
from .._predict.memory import Divisions, layer_bytes
from .._predict.shard_maps import axes_of, within
from .costs import Costs, Kept, LayerCost, Unit
from .stacks import UNTAGGED, Found, Names, linear, without_decisions


class Divided(NamedTuple):
    """A scan whose layer is divided for any set of names.

    Attributes:
      joint: both of its passes; None if they have to be linearised for each set.
      least: what a layer does in any case with each value of the plan.
    """

    found: Found
    joint: Joint | None
    least: tuple[Decision, ...]


def divided(found: Found, fixed: Policy) -> Divided:
    """Return a scan, with its layer differentiated once for all sets of names."""
    least = linear(found, without_decisions(fixed, "recompute")).plan.rows
    both = within(found.shard_maps, lambda: joint(found.body, found.perturbed, without_decisions(fixed, "offload")))
    return Divided(found, both, tuple(row.decision for row in least))


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The costs of layers that keep certain names.

    Attributes:
      policy: names to decisions -> the policy that says so.
    """

    scans: Sequence[Divided]
    names: Names
    policy: Callable[[dict[Unit, Decision]], Policy]
    rates: Rates
    like: Divisions

    def __call__(self, kept: Kept) -> Costs:
        return tuple(self.cost(scan.found, self.passes(scan, kept)) for scan in self.scans)

    def passes(self, scan: Divided, kept: Kept) -> Passes:
        """Return what a layer runs that keeps these names."""
        if scan.joint is None:
            layer = self.linearized(scan.found, kept)
            return within(scan.found.shard_maps, lambda: Passes.of(layer))
        rows = scan.joint.plan.rows
        where = [self._decision(row, least, kept) for row, least in zip(rows, scan.least, strict=True)]
        names = frozenset(row.plan_name for row, there in zip(rows, where, strict=True) if there != "recompute")
        return scan.joint.passes(names, {number for number, there in enumerate(where) if there == "offload"})

    def _decision(self, row: Row, least: Decision, kept: Kept) -> Decision:
        """Return what a layer that keeps these names does with a value; `row` is of the plan that offloads all."""
        if not row.names or (unit := self.names.of.get(row.names[0])) not in kept:
            return least
        return row.decision if unit in self.names.movable else "save"

    def linearized(self, found: Found, kept: Kept) -> Layer:
        """Return a layer under the policy that keeps these names."""
        names = kept - {UNTAGGED}
        return linear(found, self.policy({u: "offload" if u in self.names.movable else "save" for u in names}))

    def cost(self, found: Found, layer: Passes) -> LayerCost:
        """Return what a layer costs that runs this."""
        passes, axes = (layer.forward, layer.backward), axes_of(found.shard_maps)
        known, again = (cost(of, self.rates, found.devices, axes) for of in passes)
        sizes, movable = layer.layout.sizes(straight(layer.forward)), dict[Unit, int]()
        for rows, size in zip(layer.layout.moved, sizes.host, strict=True):
            unit = self._unit(layer.plan.rows[min(rows)])
            movable[unit] = movable.get(unit, 0) + size
        written, read = self._copied(layer, sizes, again.taken)
        return LayerCost(
            forward=known.seconds + self.rates.moving(2 * written),
            backward=again.seconds + self.rates.moving(2 * read),
            device=sum(sizes.device),
            once=sum(sizes.once),
            movable=movable,
            working=layer_bytes(layer, self.like),
        )

    def _copied(self, layer: Passes, sizes: Stored[int], taken: Sequence[bool]) -> tuple[int, int]:
        """Return the bytes that are copied into a stack, and those that are copied out of it because a kernel takes
        them: XLA fuses a kernel with neither."""
        taken = taken[: len(layer.layout.kept)]
        on_device, on_host = (layer.layout.select(taken, place) for place in ("device", "host"))
        rows = [*sizes.device, *sizes.host]
        return sum(rows), sum(itertools.compress(rows, [*on_device, *on_host]))

    def _unit(self, row: Row) -> Unit:
        return self.names.of[row.names[0]] if row.names else UNTAGGED
