"""The costs of a step: outside of its layers, and in a layer of each scan for each set of kept names."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr
from jax.extend.core.primitives import remat_p

from ..._engine.cost.cost import Rates, cost
from ..._engine.host.need import held_by_arguments
from ..._engine.jaxprs.walk import walk
from ..._engine.layers.layer import Layer
from ..._engine.layers.loops import is_ours
from ..._engine.microbatches.interleaved import is_staged
from ..._policy import Policy, PolicyError
from ..._tracing import Trial, under
from .._predict.machine import Machine
from .._predict.memory import argument_bytes, divisions, step_bytes
from .._predict.predict import computing_seconds
from .._predict.rates import Bus
from .._predict.scans import Scan, Stack, axes_of, scans_in, within
from .._program.results import spread, trace_of
from .names import UNTAGGED, Kept, Names, Unit, linear, names_of, policy_of
from .result import CannotPlan


class LayerCost(NamedTuple):
    """The cost of one layer that keeps certain names.

    Attributes:
      forward, backward: seconds, with what runs again; `stacking`: those of copies into stacks, and out of them.
      device: bytes per device that stay there, whatever is moved; `once`: those of what is the same in all layers.
      movable: bytes per device of each unit that may go to the host.
    """

    forward: float
    backward: float
    stacking: float
    device: int
    once: int
    movable: Mapping[Unit, int]

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.stacking

    @property
    def kept(self) -> int:
        """Bytes per device of all that it keeps in each layer."""
        return self.device + sum(self.movable.values())


Costs = tuple[LayerCost, ...]  # of each scan
Table = Mapping[Kept, Costs]


@dataclasses.dataclass(frozen=True)
class Step:
    """The costs that all choices share.

    Attributes:
      seconds: outside of the layers.
      other: bytes per device of all but residuals; `on_host`: those of arguments in host memory.
      resident: how many of the last layers never offload.
      moved: units that go to the host in any case.
      bus: GB/s; `copying`: seconds of the device's memory for each byte that goes to the host and back.
    """

    seconds: float
    other: int
    resident: int
    stacks: tuple[Stack, ...]
    bus: Bus
    copying: float
    moved: Kept = frozenset()
    on_host: int = 0


def priced(
    f: Callable[..., Any], args: tuple[Any, ...], fixed: Policy, machine: Machine
) -> tuple[Step, Names, Callable[[Kept], Costs]]:
    """Return what a step, or a loss and its gradient, costs outside of its layers, the names in these, and what a layer
    of each scan costs that keeps certain names."""
    dots = "recompute" if fixed.dots == "offload" else fixed.dots
    trial = Trial(dataclasses.replace(fixed, residuals={}, offload_modules=(), default="recompute", dots=dots))
    with under(whole_program=True):
        plain, is_loss = trial.traced(trace_of)("plan", f, args)
    devices = spread(args)
    scans = planned_scans(plain, devices)
    names = names_of(scans, fixed)
    if unmatched := fixed.unmatched(names.seen):
        raise PolicyError(unmatched)

    def costs(kept: Kept) -> Costs:
        policy = policy_of(kept & names.movable, kept - names.movable, names.recomputable, fixed)
        return tuple(cost_of(scan, linear(scan, policy), names, machine) for scan in scans)

    of_least = list(zip((scan.stack for scan in scans), costs(frozenset()), strict=True))
    in_layers = sum(stack.runs * stack.layers * cost.seconds for stack, cost in of_least)
    kept = sum(stack.sets * (stack.layers * cost.kept + cost.once) for stack, cost in of_least)
    step = Step(
        seconds=max(0.0, computing_seconds(plain, args, machine) - in_layers),
        other=argument_bytes(args) + max(0, step_bytes(plain, divisions(args), not is_loss) - kept),
        resident=fixed.resident_layers,
        stacks=tuple(scan.stack for scan in scans),
        bus=machine.bus(devices),
        copying=2 / machine.hbm_gb_s / 1e9,  # it is read, and written when it comes back
        moved=names.moved,
        on_host=held_by_arguments(plain),
    )
    return step, names, costs


def planned_scans(jaxpr: Jaxpr, devices: int) -> list[Scan]:
    """Return the scans that a step differentiates.

    Raises:
      CannotPlan: there are none.
      NotImplementedError: one is inside another one's layer or a `jax.checkpoint`, or beside one on pipeline stages.
    """
    found = list(scans_in(jaxpr, devices))
    for scan in found:
        is_around = any(eqn.primitive is remat_p or is_staged(eqn) for eqn in scan.enclosing)
        if is_around or any(is_ours(inner.eqn) for inner in walk(scan.layer.forward)):
            raise NotImplementedError(
                "plan: a scan inside a checkpoint or inside a layer of another scan, or one that belongs to no "
                "pipeline stage beside one that does, is not planned; use checkpoint in layers, and chain beside stages"
            )
    if not found:
        raise CannotPlan(
            "the function differentiates no jaxoffload.scan, so there is nothing to choose; a loss must return a "
            "scalar alone, or else pass the step that differentiates it"
        )
    return found


def cost_of(scan: Scan, layer: Layer, names: Names, rates: Rates) -> LayerCost:
    """Return what one layer of a scan costs."""
    axes, layout, sizes = axes_of(scan.shard_maps), layer.layout, layer.sizes
    backward = within(scan.shard_maps, layer.backward)
    known, again = (cost(of, rates, scan.devices, axes) for of in (layer.forward, backward))
    movable = dict[Unit, int]()
    for numbers, size in zip(layout.moved, sizes.host, strict=True):
        named = layer.plan.rows[min(numbers)].names
        unit = names.of[named[0]] if named else UNTAGGED
        movable[unit] = movable.get(unit, 0) + size
    # What is kept is copied into a stack, and out of it where a kernel takes it: XLA fuses a kernel with neither.
    rows = [*sizes.device, *sizes.host]
    taken = again.taken[: len(layout.kept)]
    read = sum(itertools.compress(rows, [*layout.select(taken, "device"), *layout.select(taken, "host")]))
    return LayerCost(
        forward=known.seconds,
        backward=again.seconds,
        stacking=rates.moving(2 * sum(rows) + 2 * read),
        device=sum(sizes.device),
        once=sum(sizes.once),
        movable=movable,
    )
