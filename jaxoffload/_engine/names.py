"""Names as they stand in a jaxpr: the user's, as `tag` wrote them, and a plan's own, which say what was decided."""

import contextlib
import re
import urllib.parse
from typing import NamedTuple

import jax

# Part of every trace cache's key: one jitted function used under two scopes is traced twice, once a name.
scope_prefix = jax.make_user_context("")
KEEP = "#keep"


def outside_scopes() -> contextlib.AbstractContextManager[None]:
    """Where a derivative is made. What scope is open then depends on what was jitted, and names must not."""
    return scope_prefix("")


class Name(NamedTuple):
    """A name as a policy reads it."""

    text: str
    keep: bool = False

    @property
    def composite(self) -> str:
        """The name without its last component's fields: `moe/fc1` of `moe/fc1.scale_inv`."""
        head, slash, last = self.text.rpartition("/")
        return head + slash + last.partition(".")[0]


class PlanName(NamedTuple):
    """The one name that a plan writes behind a value's definition; all that a residual must tell of itself.

    `depth` keeps nested plans apart, `plan` (a digest) neighbouring ones, `value` the values of one plan.
    """

    decision: str
    depth: int
    plan: str
    value: int
    names: tuple[Name, ...]

    def __str__(self) -> str:
        # Quoted, for a foreign name may have any characters.
        names = " | ".join(urllib.parse.quote(n.text, safe="/<>") + KEEP * n.keep for n in self.names)
        return f"jaxoffload:{self.decision}:{self.depth}:{self.plan}:{self.value}:{names}"


_PLAN_NAME = re.compile(r"jaxoffload:(save|offload|recompute):(\d+):([0-9a-f]{8}):(\d+):(.*)")


def read_plan_name(text: str) -> PlanName | None:
    """The `PlanName` that `text` writes; None for a user's name."""
    found = _PLAN_NAME.fullmatch(text)
    if not found:
        return None
    decision, depth, plan, value, quoted = found.groups()
    names = (_read_name(name) for name in quoted.split(" | ") if name)
    unquoted = tuple(name._replace(text=urllib.parse.unquote(name.text)) for name in names)
    return PlanName(decision, int(depth), plan, int(value), unquoted)


def read_names(text: str) -> tuple[Name, ...]:
    """The user's names that a `checkpoint_name` carries: one, or those that an inner plan found for its value."""
    plan_name = read_plan_name(text)
    return plan_name.names if plan_name else (_read_name(text),)


def _read_name(text: str) -> Name:
    return Name(text.removesuffix(KEEP), text.endswith(KEEP))
