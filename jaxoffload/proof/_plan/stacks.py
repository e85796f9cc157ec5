"""The scans of a step, and the names in their layers."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import remat_p

from ..._engine.copying_loops import Loops, backward_p, forward_p
from ..._engine.cost import cost
from ..._engine.interleaved import OUR_LOOPS, Interleaved, in_turn_p, is_staged
from ..._engine.layer import Body, Layer, linearize
from ..._engine.lone_pass import Spare
from ..._engine.plan import Override
from ..._engine.rates import Rates
from ..._engine.walk import axes_of, walk, within
from ..._jax import nbytes
from ..._policy import Decision, Policy
from .._predict.room import Divisions, Shape
from .costs import Kept, Stack, Unit

UNTAGGED = ("(matmul)",)  # matmul outputs that `dots` keeps


class Found(NamedTuple):
    """A scan over layers.

    Attributes:
      devices: over how many its values are spread.
      shard_maps: those around it.
      spare: what `accumulate` may keep on the device where a pass runs alone; None where it interleaves nothing.
    """

    stack: Stack
    body: Body
    perturbed: tuple[bool, ...]
    devices: int
    shard_maps: tuple[JaxprEqn, ...]
    spare: Spare | None


def stacks_of(jaxpr: Jaxpr, devices: int) -> list[Found]:
    """Return the scans that a traced step differentiates.

    Raises:
      NotImplementedError: one is inside another one's layer or a `jax.checkpoint`, or on pipeline stages.
    """
    found = []
    for site in walk(jaxpr):
        if is_staged(site.eqn):
            raise NotImplementedError("plan: pipeline stages are not planned; plan the loss of one stage's devices")
        if any(e.primitive in (in_turn_p, forward_p, backward_p) for e in site.enclosing):
            continue
        microbatches, spare, each = _loops_at(site.eqn)
        if each and any(e.primitive is remat_p for e in site.enclosing):
            raise NotImplementedError(
                "plan: a scan inside a checkpoint, which runs it again, is not planned; take it out"
            )
        for loops in each:
            layer = loops.segments[0].layer
            if any(inner.eqn.primitive in OUR_LOOPS for inner in walk(layer.forward)):
                raise NotImplementedError("plan: a scan inside a layer of another scan is not planned; use checkpoint")
            stack = Stack(loops.length, site.runs * microbatches, microbatches)
            body = layer.body()
            assert body is not None  # the trial keeps it
            devices_of = max(1, devices // site.devices)
            whole = Body(body, layer.consts, layer.carry)
            found.append(Found(stack, whole, layer.perturbed, devices_of, site.shard_maps, spare))
    return found


def _loops_at(eqn: JaxprEqn) -> tuple[int, Spare | None, Sequence[Loops]]:
    """Return of how many microbatches an equation would interleave the passes, what may then stay, and the loops that
    it runs forward and, elsewhere, backward."""
    if eqn.primitive is in_turn_p:
        what: Interleaved = eqn.params["what"]
        return what.microbatches, what.spare, what.loops
    return 1, None, [eqn.params["loops"]] if _is_differentiated(eqn) else []


def _is_differentiated(eqn: JaxprEqn) -> bool:
    """Whether an equation is the forward pass of a scan that has a backward pass elsewhere."""
    return eqn.primitive is forward_p and not eqn.params["loops"].segments[0].layer.only_forward


def layers_seconds(jaxpr: Jaxpr, rates: Rates, devices: int) -> float:
    """Return the seconds in which a traced step computes layers, forward and backward."""
    seconds = 0.0
    for site in walk(jaxpr):
        if _is_differentiated(site.eqn):
            for segment in site.eqn.params["loops"].segments:
                passes = segment.jaxpr, within(site.shard_maps, lambda: segment.backward)
                spread = max(1, devices // site.devices)
                each = sum(cost(of, rates, spread, axes_of(site.shard_maps)).seconds for of in passes)
                seconds += site.runs * segment.layers * each
    return seconds


def kept_stacks(jaxpr: Jaxpr) -> set[Shape]:
    """Return the shapes and dtypes in which a traced step keeps what its layers keep."""
    found: set[Shape] = set()
    for site in walk(jaxpr):
        if _is_differentiated(site.eqn):
            for segment in site.eqn.params["loops"].segments:
                stored = [k.place for k in segment.layer.kept if k.place != "operand"]
                avals = segment.jaxpr.out_avals[len(segment.jaxpr.out_avals) - len(stored) :]
                on_device = [a for a, place in zip(avals, stored, strict=True) if place == "device"]
                found |= {((segment.layers, *aval.shape), aval.dtype) for aval in on_device}
    return found


class Interleaves(NamedTuple):
    """Bytes per device where `accumulate` interleaves: `gradients` of layers that it adds up in place; `may_stay` where
    a pass runs alone."""

    gradients: int
    may_stay: int


def interleaves(jaxpr: Jaxpr, like: Divisions) -> Interleaves:
    """Return what the microbatches hold that interleave in a traced step."""
    gradients = may_stay = 0
    for site in walk(jaxpr):
        if site.eqn.primitive is in_turn_p:
            what: Interleaved = site.eqn.params["what"]
            may_stay += what.spare.bytes if what.spare else 0
            lengths = {loops.length for loops in what.loops}
            for aval in itertools.compress(what.loss.jaxpr.in_avals, what.loss.differentiated):
                size = nbytes(aval) // (like[aval.shape].parts if aval.shape in like else 1)
                gradients += size * (aval.shape[:1] in {(n,) for n in lengths})
    return Interleaves(gradients, may_stay)


@dataclasses.dataclass(frozen=True)
class Names:
    """The names in all layers.

    Attributes:
      units: those that have one decision; `of`: the unit of each name.
      least: units that layers keep in any case, and may move; `free`: units that may be recomputed.
      recomputable: units of which a layer can do without; what `fixed` says of them does not matter here.
      movable: units that may go to the host.
      moved: units that go there, as `fixed` says.
    """

    units: tuple[Unit, ...]
    of: dict[str, Unit]
    least: Kept
    free: Kept
    recomputable: Kept
    movable: Kept
    moved: Kept


def names_of(found: list[Found], fixed: Policy) -> Names:
    """Return the names of all layers, and which decisions on them are open."""
    everything, nothing = without_decisions(fixed, "offload"), without_decisions(fixed, "recompute")
    groups: list[set[str]] = []
    in_any_case, host, keepable = set[str](), set[str](), set[str]()
    for each in found:
        full, least = (linear(each, policy) for policy in (everything, nothing))
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
    recomputable = {u for u in units if is_in(u, keepable - in_any_case)}
    dots = {UNTAGGED} if fixed.dots == "offload" else set[Unit]()
    return Names(
        units=tuple(units),
        of={name: unit for unit in units for name in unit},
        least=frozenset(least_units),
        free=frozenset(u for u in recomputable if u not in least_units and decided[u] is None),
        recomputable=frozenset(recomputable),
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


def without_decisions(fixed: Policy, default: Decision) -> Policy:
    """Return `fixed` without its decisions on names."""
    return dataclasses.replace(fixed, residuals={}, offload_modules=(), default=default)


def linear(found: Found, policy: Policy) -> Layer:
    """Return a layer under a policy."""
    return within(found.shard_maps, lambda: linearize(found.body, found.perturbed, policy, False, Override()))


def spread(args: Any) -> int:
    """Return over how many devices arguments are spread."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    return max((s.num_devices for s in shardings if s is not None), default=1)
