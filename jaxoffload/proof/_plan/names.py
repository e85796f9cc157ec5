"""The names in the layers of a step, which decisions on them are open, and decisions as a policy."""

import dataclasses
import re
from collections.abc import Sequence

from ..._engine.decide.plan import Override, Row
from ..._engine.layers.layer import Layer, linearize
from ..._policy import Decision, Policy, matches
from .._predict.scans import Scan, within

Unit = tuple[str, ...]  # the names of values that have one decision
Kept = frozenset[Unit]
UNTAGGED = ("(matmul)",)  # matmul outputs that `dots` keeps


@dataclasses.dataclass(frozen=True)
class Names:
    """The names in all layers.

    Attributes:
      of: the unit of each name.
      least: units that layers keep in any case, and may move; `free`: units that may be recomputed.
      recomputable: units of which a layer can do without; what `fixed` says of them does not matter here.
      movable: units that may go to the host.
      moved: units that go there, as `fixed` says.
      seen: all names, those of values that are no residuals included.
    """

    of: dict[str, Unit]
    least: Kept
    free: Kept
    recomputable: Kept
    movable: Kept
    moved: Kept
    seen: frozenset[str]


def names_of(scans: Sequence[Scan], fixed: Policy) -> Names:
    """Return the names of all layers, and which decisions on them are open."""
    groups: list[set[str]] = []
    host, keepable, in_any_case, seen = set[str](), set[str](), set[str](), set[str]()
    for scan in scans:
        without = lambda default: dataclasses.replace(fixed, residuals={}, offload_modules=(), default=default)
        full, least = (linear(scan, without(default)) for default in ("offload", "recompute"))
        rows = full.plan.rows
        seen |= full.plan.seen
        together = [k.rows for k in full.layout.kept if len(k.rows) > 1]
        together += [frozenset(name.number for name in results) for results in full.plan.together]  # of one kernel
        groups += [set(row.names) for row in rows if row.kind != "argument"]
        groups += [{name for number in numbers for name in rows[number].names} for numbers in together]
        host |= _names(rows, "offload")
        keepable |= _names(rows, "offload", "save")  # what is too small for the host may be saved
        in_any_case |= _names(least.plan.rows, "save")
    units = sorted(tuple(sorted(group)) for group in _joined(groups))
    hits = {unit: fixed.match(*unit) for unit in units}
    decided = {unit: hit[1] if hit else None for unit, hit in hits.items()}
    of_any = lambda names: {unit for unit in units if not names.isdisjoint(unit)}
    movable = {unit for unit in of_any(host) if decided[unit] in (None, "offload")}
    moved = {unit for unit in movable if decided[unit] == "offload"}
    least_units = (movable & of_any(in_any_case)) | moved | {unit for unit in units if decided[unit] == "save"}
    recomputable = of_any(keepable - in_any_case)
    dots = {UNTAGGED} if fixed.dots == "offload" else set[Unit]()
    return Names(
        of={name: unit for unit in units for name in unit},
        least=frozenset(least_units),
        free=frozenset(unit for unit in recomputable - least_units if decided[unit] is None),
        recomputable=frozenset(recomputable),
        movable=frozenset(movable | dots),
        moved=frozenset(moved | dots),
        seen=frozenset(seen),
    )


def _names(rows: Sequence[Row], *decisions: Decision) -> set[str]:
    """Return the names of values on which the decision is one of these."""
    return {name for row in rows if row.kind == "value" and row.decision in decisions for name in row.names}


def _joined(groups: list[set[str]]) -> list[set[str]]:
    """Return the names in sets that share none."""
    joined: list[set[str]] = []
    for group in filter(None, groups):
        others = [other for other in joined if other & group]
        joined = [other for other in joined if not other & group] + [group.union(*others)]
    return joined


def linear(scan: Scan, policy: Policy) -> Layer:
    """Return a layer under a policy."""
    layer = scan.layer
    return within(scan.shard_maps, lambda: linearize(layer.whole_body, layer.perturbed, policy, False, Override()))


def pattern_of(name: str) -> str:
    """Return the pattern that matches a name; a character that a pattern cannot have is matched by '?'."""
    escaped = re.sub(r"[*?[]", r"[\g<0>]", name)
    return re.sub(r"\s|^!", "?", escaped)


def policy_of(moved: Kept, saved: Kept, others: Kept, fixed: Policy) -> Policy:
    """Return the policy that moves and saves these units, and recomputes all others; other fields are those of `fixed`.

    A pattern without a slash matches in every scope, one without a dot all leaves of a composite, and a '?' any
    character. The last one counts, so these come first, and those of the `others` that one of them matches have a line
    of their own.
    """
    names = lambda units: [name for unit in units for name in unit]
    patterns: dict[str, Decision] = {pattern_of(name): "offload" for name in names(moved)}
    patterns |= {pattern_of(name): "save" for name in names(saved)}
    without = [name for name in names(others - moved - saved) if any(matches(pattern, name) for pattern in patterns)]
    patterns |= {pattern_of(name): "recompute" for name in without}
    order = sorted(patterns, key=lambda p: ("/" in p, "." in p.rpartition("/")[2], "?" not in p, p))
    residuals = {pattern: patterns[pattern] for pattern in order}
    return dataclasses.replace(fixed, residuals=residuals, offload_modules=(), default="recompute")
