"""Names as they stand in a jaxpr: the user's, which `tag` writes, and a plan's, which carry its decisions."""

import re
import urllib.parse
from typing import NamedTuple

KEEP = "#keep"


class Name(NamedTuple):
    """A name as a policy reads it."""

    text: str
    keep: bool = False

    def __str__(self) -> str:
        return self.text + KEEP * self.keep

    @property
    def composite(self) -> str:
        """The name without its last component's fields: `moe/fc1` of `moe/fc1.scale_inv`."""
        head, slash, last = self.text.rpartition("/")
        return head + slash + last.partition(".")[0]


class PlanName(NamedTuple):
    """The one name that a plan writes behind a value's definition.

    `depth`: nesting of plans; `digest`: distinguishes plans of equal depth; `number`: index of the value.
    """

    decision: str
    depth: int
    digest: str
    number: int
    names: tuple[Name, ...]

    def __str__(self) -> str:
        # Quoted, since a foreign name may have any characters.
        names = " | ".join(urllib.parse.quote(n.text, safe="/<>") + KEEP * n.keep for n in self.names)
        return f"jaxoffload:{self.decision}:{self.depth}:{self.digest}:{self.number}:{names}"


_PLAN_NAME = re.compile(r"jaxoffload:(save|offload|recompute):(\d+):([0-9a-f]{32}):(\d+):(.*)")


def read_plan_name(text: str) -> PlanName | None:
    """Return the `PlanName` that `text` writes; None for a user's name."""
    if not (match := _PLAN_NAME.fullmatch(text)):
        return None
    decision, depth, digest, number, quoted = match.groups()
    names = (_read_name(name) for name in quoted.split(" | ") if name)
    unquoted = tuple(name._replace(text=urllib.parse.unquote(name.text)) for name in names)
    return PlanName(decision, int(depth), digest, int(number), unquoted)


def read_names(text: str) -> tuple[Name, ...]:
    """Return the user's names in a `checkpoint_name`: one, or those that an inner plan joined."""
    plan_name = read_plan_name(text)
    return plan_name.names if plan_name else (_read_name(text),)


def _read_name(text: str) -> Name:
    return Name(text.removesuffix(KEEP), text.endswith(KEEP))
