"""A choice as a `Policy`, whose patterns are the names themselves, and as the YAML of a config."""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..._policy import Decision, Policy, matches
from .choices import Choice
from .costs import Costs, Kept, Step, Table, Unit


def pattern_of(name: str) -> str:
    """Return the pattern that matches a name; a character that a pattern cannot have is matched by '?'."""
    escaped = re.sub(r"[*?[]", r"[\g<0>]", name)
    return re.sub(r"\s|^!", "?", escaped)


def policy_of(decisions: Mapping[Unit, Decision], others: Collection[Unit], fixed: Policy, **fields: Any) -> Policy:
    """Return the policy that decides so on these units, and recomputes all others; other fields are those of `fixed`.

    A pattern without a slash matches in every scope, one without a dot all leaves of a composite, and a '?' any
    character. The last one counts, so these come first, and those of the `others` that one of them matches have a line
    of their own.
    """
    patterns = {pattern_of(name): decision for unit, decision in decisions.items() for name in unit}
    names = {name for unit in others if unit not in decisions for name in unit}
    patterns |= {pattern_of(n): "recompute" for n in names if any(matches(pattern, n) for pattern in patterns)}
    order = sorted(patterns, key=lambda p: ("/" in p, "." in p.rpartition("/")[2], "?" not in p, p))
    residuals = {pattern: patterns[pattern] for pattern in order}
    how: dict[str, Any] = {"residuals": residuals, "offload_modules": (), "default": "recompute", **fields}
    return dataclasses.replace(fixed, **how)


def policy_for(choice: Choice, step: Step, table: Table, fixed: Policy) -> Policy:
    """Return the policy of a choice; it names what layers keep."""
    # Others are saved, because `fixed` says so or they are too small to move.
    named = needed(table[choice.kept]) | (choice.kept - step.movable)
    decisions = {unit: decision_on(unit, choice) for unit in sorted(named & choice.kept)}
    if not choice.moved:
        return policy_of(decisions, step.recomputable, fixed, offload_layers="all", other_layers="save")
    most = max(stack.may_offload(step.resident) for stack in step.stacks)
    layers = "all" if choice.layers >= most else choice.layers
    return policy_of(decisions, step.recomputable, fixed, offload_layers=layers, other_layers="save")


def decision_on(unit: Unit, choice: Choice) -> Decision:
    return "offload" if unit in choice.moved else "save" if unit in choice.kept else "recompute"


def needed(costs: Costs) -> Kept:
    """Return the units of which a layer keeps anything that could move."""
    return frozenset(unit for cost in costs for unit in cost.movable)


_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")


def as_yaml(policy: Policy) -> str:
    """Return the `remat:` block of a config."""
    lines = ["remat:", "  residuals:" if policy.rules else "  residuals: {}"]
    for pattern, decision in policy.rules:
        lines.append(f"    {pattern if _PLAIN.fullmatch(pattern) else json.dumps(pattern)}: {decision}")
    fields = ("default", "dots", "min_offload_bytes", "resident_layers", "offload_layers", "other_layers")
    lines += [f"  {field}: {getattr(policy, field)}" for field in (*fields, "on_host_full")]
    return "\n".join(lines) + "\n"
