"""The scans of a step, and the names in their layers."""

import dataclasses
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import remat_p

from ..._engine.decide.plan import Override
from ..._engine.jaxprs.walk import walk
from ..._engine.layers.layer import Body, Layer, linearize
from ..._engine.layers.loops import is_ours
from ..._engine.microbatches.interleaved import interleaved_p, is_staged
from ..._policy import Decision, Policy
from .._predict.scans import Stack, scans_in
from .._predict.shard_maps import within
from .costs import Kept, Unit

UNTAGGED = ("(matmul)",)  # matmul outputs that `dots` keeps


class Found(NamedTuple):
    """A scan over layers.

    Attributes:
      devices: over how many its values are spread.
      shard_maps: those around it; on pipeline stages also that over these.
    """

    stack: Stack
    body: Body
    perturbed: tuple[bool, ...]
    devices: int
    shard_maps: tuple[JaxprEqn, ...]


def stacks_of(jaxpr: Jaxpr, devices: int) -> list[Found]:
    """Return the scans that a step differentiates, which was traced with nothing offloaded.

    Raises:
      NotImplementedError: one is inside another one's layer or a `jax.checkpoint`, or beside one on pipeline stages.
    """
    found = []
    for scan in scans_in(jaxpr, devices):
        around = scan.site.enclosing
        if any(e.primitive is interleaved_p for e in around):
            if any(is_staged(e) for e in around):
                raise NotImplementedError(
                    "plan: a scan that belongs to no pipeline stage, beside one that does, is not planned; use chain "
                    "there"
                )
            continue
        if any(e.primitive is remat_p for e in around):
            raise NotImplementedError(
                "plan: a scan inside a checkpoint, which runs it again, is not planned; take it out"
            )
        layer = scan.loops.segments[0].layer
        if any(is_ours(inner.eqn) for inner in walk(layer.forward)):
            raise NotImplementedError("plan: a scan inside a layer of another scan is not planned; use checkpoint")
        found.append(Found(scan.stack, layer.whole_body, layer.perturbed, scan.devices, scan.shard_maps))
    return found


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
