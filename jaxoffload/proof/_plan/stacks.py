"""The scans of a step, and the names in their layers."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import remat_p

from ..._engine.cost.cost import Rates, cost
from ..._engine.cost.lone_pass import Spare
from ..._engine.decide.plan import Override
from ..._engine.jaxprs.flat import straight
from ..._engine.jaxprs.walk import Site, walk
from ..._engine.layers.layer import Body, Layer, linearize
from ..._engine.layers.loops import backward_p, forward_p, is_ours
from ..._engine.layers.passes import Loops
from ..._engine.layers.segments import Segment
from ..._engine.microbatches.interleaved import Interleaved, in_turn_p, is_staged
from ..._engine.stages.schedule import Schedule
from ..._jax import SHARD_MAP, nbytes
from ..._policy import Decision, Policy
from .._predict.room import Divisions, Shape
from .._predict.shard_maps import axes_of, shard_maps_around, within
from .costs import Kept, Stack, Unit

UNTAGGED = ("(matmul)",)  # matmul outputs that `dots` keeps


class Found(NamedTuple):
    """A scan over layers.

    Attributes:
      devices: over how many its values are spread.
      shard_maps: those around it; on pipeline stages also that over these.
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
      NotImplementedError: one is inside another one's layer or a `jax.checkpoint`, or beside one on pipeline stages.
    """
    found = []
    for site in walk(jaxpr):
        if any(is_staged(e) for e in site.enclosing) and _is_differentiated(site.eqn):
            raise NotImplementedError(
                "plan: a scan that belongs to no pipeline stage, beside one that does, is not planned; use chain there"
            )
        if any(e.primitive in (in_turn_p, forward_p, backward_p) for e in site.enclosing):
            continue
        microbatches, spare, each = _loops_at(site.eqn)
        if each and any(e.primitive is remat_p for e in site.enclosing):
            raise NotImplementedError(
                "plan: a scan inside a checkpoint, which runs it again, is not planned; take it out"
            )
        for loops in each:
            layer = loops.segments[0].layer
            if any(is_ours(inner.eqn) for inner in walk(layer.forward)):
                raise NotImplementedError("plan: a scan inside a layer of another scan is not planned; use checkpoint")
            stack, around = Stack(loops.length, site.runs * microbatches, microbatches), shard_maps_around(site)
            if is_staged(site.eqn):
                stack, around = _on_stages(stack, site), (*around, _over_stages(site.eqn))
            body = layer.body()
            assert body is not None  # the trial keeps it
            devices_of = max(1, devices // (site.devices * stack.stages))
            whole = Body(body, layer.consts, layer.carry)
            found.append(Found(stack, whole, layer.perturbed, devices_of, around, spare))
    return found


def _on_stages(stack: Stack, site: Site) -> Stack:
    """Return the stack of a chunk's layers."""
    schedule: Schedule = site.eqn.params["schedule"]
    return stack._replace(runs=site.runs * schedule.forward_stop, schedule=schedule)


def _over_stages(eqn: JaxprEqn) -> JaxprEqn:
    """Return the `shard_map` in which stages run their layers."""
    maps = (e for e in eqn.params["call_jaxpr"].eqns if e.primitive.name == SHARD_MAP)
    return next(e for e in maps if set(e.params["newly_manual_axes"]) == {eqn.params["stage_axis"]})


def _loops_at(eqn: JaxprEqn) -> tuple[int, Spare | None, Sequence[Loops]]:
    """Return of how many microbatches an equation would interleave the passes, what may then stay, and the loops that
    it runs forward and, elsewhere, backward."""
    if is_staged(eqn):
        return 1, None, eqn.params["loops"]
    if eqn.primitive is in_turn_p:
        what: Interleaved = eqn.params["what"]
        return what.microbatches, what.spare, what.loops
    return 1, None, [eqn.params["loops"]] if _is_differentiated(eqn) else []


def _is_differentiated(eqn: JaxprEqn) -> bool:
    """Return if an equation is the forward pass of a scan that has a backward pass elsewhere."""
    return eqn.primitive is forward_p and not eqn.params["loops"].segments[0].layer.only_forward


def layers_seconds(jaxpr: Jaxpr, rates: Rates, devices: int) -> float:
    """Return the seconds in which a traced step computes layers, forward and backward."""
    seconds = 0.0
    for site in walk(jaxpr):
        runs, around, stages = site.runs, shard_maps_around(site), 1
        if is_staged(site.eqn):
            schedule: Schedule = site.eqn.params["schedule"]
            runs, stages = runs * schedule.forward_stop, schedule.stages
            around = (*around, _over_stages(site.eqn))
        for segment in _differentiated(site.eqn):
            passes = segment.jaxpr, within(around, lambda: segment.backward)
            spread = max(1, devices // (site.devices * stages))
            each = sum(cost(of, rates, spread, axes_of(around)).seconds for of in passes)
            seconds += runs * segment.layers * each
    return seconds


def _differentiated(eqn: JaxprEqn) -> list[Segment]:
    """Return the segments of the scans that an equation runs forward, and itself or another one backward."""
    each = eqn.params["loops"] if is_staged(eqn) else [eqn.params["loops"]] if _is_differentiated(eqn) else []
    return [segment for loops in each for segment in loops.segments]


def kept_stacks(jaxpr: Jaxpr) -> set[Shape]:
    """Return the shapes and dtypes in which a traced step keeps what its layers keep; on stages, of one and of all."""
    found: set[Shape] = set()
    for site in walk(jaxpr):
        sizes = {1, site.eqn.params["schedule"].stages} if is_staged(site.eqn) else {1}
        for segment in _differentiated(site.eqn):
            avals = segment.layer.layout.split(segment.jaxpr.out_avals).device
            found |= {((size * segment.layers, *aval.shape), aval.dtype) for aval in avals for size in sizes}
    return found


def held_by_stages(found: list[Found], like: Divisions) -> dict[tuple[int, ...], int]:
    """Return into how many parts pipeline stages divide the stream and the sums of gradients, by their shapes.

    A stage's `shard_map` is over the stages alone, so within it no type says how the batch or the weights are divided.
    """
    held: dict[tuple[int, ...], int] = {}
    for each in found:
        if schedule := each.stack.schedule:
            program, stages = straight(each.body.jaxpr), schedule.stages
            _, carry, xs = each.body.split(program.inputs)
            for buffer in carry:
                shape, parts = buffer.aval.shape, program.parts(buffer)
                held |= {shape: parts, (1, *shape): parts, (stages, *shape): stages * parts}
            for row in (buffer.aval.shape for buffer in xs):
                of_all = [(*layers, *row) for layers in each.stack.shapes]
                of_stage = [(*more, layers // stages, *row) for *more, layers in each.stack.shapes]
                if parts := max((like[shape].parts for shape in of_all if shape in like), default=0):
                    held |= dict.fromkeys(of_stage, max(1, parts // stages)) | dict.fromkeys(of_all, parts)
    return held


class Accumulated(NamedTuple):
    """The gradients that `accumulate` adds up, and the residuals that it may keep.

    Attributes:
      gradients: shapes and dtypes of those of layers, which are added up in place.
      added: their bytes per device, of all microbatches together.
      may_stay: bytes per device that may stay there where a pass of what interleaves runs alone.
    """

    gradients: frozenset[Shape]
    added: int
    may_stay: int


def accumulated(jaxpr: Jaxpr, like: Divisions) -> Accumulated:
    """Return what the microbatches of a traced step hold."""
    gradients, added, may_stay = set[Shape](), 0, 0
    for site in walk(jaxpr):
        if site.eqn.primitive is in_turn_p:
            what: Interleaved = site.eqn.params["what"]
            may_stay += what.spare.bytes if what.spare else 0
            lengths = {loops.length for loops in what.loops}
            for aval in itertools.compress(what.loss.jaxpr.in_avals, what.loss.differentiated):
                if aval.shape[:1] in {(n,) for n in lengths}:
                    size = nbytes(aval) // (like[aval.shape].parts if aval.shape in like else 1)
                    added += size * what.microbatches * site.runs
                    gradients.add((aval.shape, aval.dtype))
    return Accumulated(frozenset(gradients), added, may_stay)


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
        shared = (k.rows for k in full.layout.kept if len(k.rows) > 1)
        groups += [{n for row in rows for n in full.plan.rows[row].names} for rows in shared]
        kernels = full.plan.together  # each makes its results, and makes all again
        groups += [{n for name in results for n in full.plan.rows[name.number].names} for results in kernels]
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
