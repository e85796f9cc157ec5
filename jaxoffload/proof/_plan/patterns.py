"""Decisions on names as a `Policy`, whose patterns are the names themselves."""

import dataclasses
import re

from ..._policy import Decision, Policy, matches
from .names import Kept


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
