"""The scans of a step, and what one of their layers costs that keeps certain names."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr

from ..._engine.copying_loops import backward_p, forward_p
from ..._engine.cost import Rates, cost
from ..._engine.interleaved import OUR_LOOPS, interleaved_p, is_staged, loops_of
from ..._engine.layer import Body, Layer, linearize, shares
from ..._engine.plan import Override, Row
from ..._engine.walk import walk
from ..._jax import nbytes
from ..._policy import Decision, Policy
from .._predict.room import Divisions, Shape, layer_room
from .choices import Kept, LayerCost, Stack, Unit

UNTAGGED = ("(matmul)",)  # matmul outputs that `dots` keeps


class Found(NamedTuple):
    """A scan over layers: `devices` is over how many its values are spread, `mine` the equation that runs it."""

    stack: Stack
    body: Body
    perturbed: tuple[bool, ...]
    devices: int


def stacks_of(jaxpr: Jaxpr, devices: int) -> list[Found]:
    """Return the scans that a traced step differentiates.

    Raises:
      NotImplementedError: one is inside another one's layer, or on pipeline stages.
    """
    found = []
    for site in walk(jaxpr):
        if site.eqn.primitive not in OUR_LOOPS or any(e.primitive in OUR_LOOPS for e in site.enclosing):
            continue
        if is_staged(site.eqn):
            raise NotImplementedError("plan: pipeline stages are not planned; plan the loss of one stage's devices")
        microbatches = site.eqn.params.get("microbatches", 1)
        for loops in loops_of(site.eqn) if site.eqn.primitive is not backward_p else ():
            layer = loops.segments[0].layer
            if any(inner.eqn.primitive in OUR_LOOPS for inner in walk(layer.forward)):
                raise NotImplementedError("plan: a scan inside a layer of another scan is not planned; use checkpoint")
            stack = Stack(loops.length, site.runs * microbatches, microbatches)
            body = layer.body()
            assert body is not None  # the trial keeps it
            devices_of = max(1, devices // site.devices)
            found.append(Found(stack, Body(body, layer.consts, layer.carry), layer.perturbed, devices_of))
    return found


def layers_seconds(jaxpr: Jaxpr, rates: Rates, devices: int) -> float:
    """Return the seconds in which a traced step computes layers, forward and backward."""
    seconds = 0.0
    for site in walk(jaxpr):
        if site.eqn.primitive is forward_p:
            for segment in site.eqn.params["loops"].segments:
                spread = max(1, devices // site.devices)
                each = sum(cost(of, rates, spread).seconds for of in (segment.jaxpr, segment.backward))
                seconds += site.runs * segment.layers * each
    return seconds


def kept_stacks(jaxpr: Jaxpr) -> set[Shape]:
    """Return the shapes and dtypes in which a traced step keeps what its layers keep."""
    found: set[Shape] = set()
    for site in walk(jaxpr):
        if site.eqn.primitive is forward_p:
            for segment in site.eqn.params["loops"].segments:
                stored = [k.place for k in segment.layer.kept if k.place != "operand"]
                avals = segment.jaxpr.out_avals[len(segment.jaxpr.out_avals) - len(stored) :]
                on_device = [a for a, place in zip(avals, stored, strict=True) if place == "device"]
                found |= {((segment.layers, *aval.shape), aval.dtype) for aval in on_device}
    return found


class Gradients(NamedTuple):
    """Bytes per device of the gradients that `accumulate` adds up: of all, and of those stacked by layer."""

    all: int
    stacked: int


def gradients_of(jaxpr: Jaxpr, like: Divisions) -> Gradients:
    """Return the gradients of the microbatches that interleave in a traced step."""
    every = stacked = 0
    for site in walk(jaxpr):
        if site.eqn.primitive is interleaved_p:
            loss, lengths = site.eqn.params["loss"], {loops.length for loops in site.eqn.params["loops"]}
            for aval in itertools.compress(loss.jaxpr.in_avals, loss.differentiated):
                size = nbytes(aval) // (like[aval.shape].parts if aval.shape in like else 1)
                every, stacked = every + size, stacked + size * (aval.shape[:1] in {(n,) for n in lengths})
    return Gradients(every, stacked)


@dataclasses.dataclass(frozen=True)
class Names:
    """The names in all layers.

    Attributes:
      units: those that have one decision; `of`: the unit of each name.
      least: units that layers keep in any case, and may move; `free`: units that may be recomputed.
      movable: units that may go to the host.
      moved: units that go there, as `fixed` says.
    """

    units: tuple[Unit, ...]
    of: dict[str, Unit]
    least: Kept
    free: Kept
    movable: Kept
    moved: Kept


def names_of(found: list[Found], fixed: Policy) -> Names:
    """Return the names of all layers, and which decisions on them are open."""
    everything = dataclasses.replace(fixed, residuals={}, offload_modules=(), default="offload")
    nothing = dataclasses.replace(everything, default="recompute")
    groups: list[set[str]] = []
    in_any_case, host, keepable = set[str](), set[str](), set[str]()
    for each in found:
        full, least = (_linear(each, policy) for policy in (everything, nothing))
        groups += [set(row.names) for row in full.plan.rows if row.kind != "argument" and row.names]
        groups += [{n for row in k.rows for n in full.plan.rows[row].names} for k in full.kept if len(k.rows) > 1]
        named = {row.plan_name: set(row.names) for row in full.plan.rows}  # one kernel makes them, and makes all again
        groups += [set[str]().union(*(named[name] for name in kernel)) for kernel in full.plan.together]
        host |= {n for row in full.plan.rows if row.decision == "offload" for n in row.names}
        # What is too small for the host may be saved.
        keepable |= {
            n for row in full.plan.rows if row.decision != "recompute" and row.kind == "value" for n in row.names
        }
        in_any_case |= {
            n for row in least.plan.rows if row.decision == "save" and row.kind == "value" for n in row.names
        }
    units = sorted(tuple(sorted(group)) for group in _joined(groups))
    decided = {unit: _fixed(unit, fixed) for unit in units}
    is_in = lambda unit, names: any(n in names for n in unit)
    movable = {u for u in units if is_in(u, host) and decided[u] in (None, "offload")}
    least_units = {u for u in movable if is_in(u, in_any_case) or decided[u] == "offload"}
    least_units |= {u for u in units if decided[u] == "save"}
    dots = {UNTAGGED} if fixed.dots == "offload" else set[Unit]()
    return Names(
        units=tuple(units),
        of={name: unit for unit in units for name in unit},
        least=frozenset(least_units),
        free=frozenset(
            u for u in units if u not in least_units and decided[u] is None and is_in(u, keepable - in_any_case)
        ),
        movable=frozenset(movable | dots),
        moved=frozenset({u for u in movable if decided[u] == "offload"} | dots),
    )


def _joined(groups: list[set[str]]) -> list[set[str]]:
    """Return the names in sets that share none."""
    joined: list[set[str]] = []
    for group in groups:
        others = [other for other in joined if other & group]
        joined = [other for other in joined if not other & group] + [group.union(*others)]
    return joined


def _fixed(unit: Unit, fixed: Policy) -> Decision | None:
    """Return what `fixed` decides on a unit; None if no pattern matches."""
    hit = fixed.match(*unit)
    return hit[1] if hit else None


def _linear(found: Found, policy: Policy) -> Layer:
    return linearize(found.body, found.perturbed, policy, False, Override())


@dataclasses.dataclass(frozen=True)
class Oracle:
    """What layers cost that keep certain names: each is differentiated under the policy that says so.

    Attributes:
      policy: names to decisions -> the policy.
      excess: what the walk over a whole step finds of a layer's working set, and the one over the layer alone does not.
    """

    found: list[Found]
    names: Names
    policy: Callable[[dict[Unit, Decision]], Policy]
    rates: Rates
    like: Divisions
    one_kernel: Collection[str]
    excess: int = 0

    def layers(self, kept: Kept) -> Iterator[Layer]:
        where: dict[Unit, Decision] = {
            u: "offload" if u in self.names.movable else "save" for u in kept if u != UNTAGGED
        }
        policy = self.policy(where)
        yield from (_linear(found, policy) for found in self.found)

    def __call__(self, kept: Kept) -> tuple[LayerCost, ...]:
        return tuple(self._cost(found, layer) for found, layer in zip(self.found, self.layers(kept), strict=True))

    def _cost(self, found: Found, layer: Layer) -> LayerCost:
        backward = layer.backward((True,) * sum(layer.out_perturbed))
        forward_s, backward_s = (cost(of, self.rates, found.devices).seconds for of in (layer.forward, backward))
        movable: dict[Unit, int] = {}
        on_host = [k for k in layer.kept if k.place == "host"]
        for kept, size in zip(on_host, shares(layer.forward, layer.kept, "host"), strict=True):
            unit = self._unit(layer.plan.rows[min(kept.rows)])
            movable[unit] = movable.get(unit, 0) + size
        return LayerCost(
            forward=forward_s,
            backward=backward_s,
            device=sum(shares(layer.forward, layer.kept, "device")),
            once=sum(shares(layer.forward, layer.kept, "once")),
            movable=movable,
            working=layer_room(layer, backward, self.like, self.one_kernel) + self.excess,
        )

    def _unit(self, row: Row) -> Unit:
        return self.names.of[row.names[0]] if row.names else UNTAGGED


def spread(args: Any) -> int:
    """Return over how many devices arguments are spread."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    return max((s.num_devices for s in shardings if s is not None), default=1)
