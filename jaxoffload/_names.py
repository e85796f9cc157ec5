"""Names as they stand in a jaxpr: the user's, which `tag` writes, and a plan's, which carry its decisions."""

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


class PlanName(str):
    """The one name that a plan writes behind a value's definition: a text for JAX, which carries what it stands for.

    JAX and jaxprs know the text alone: names are equal if their texts are, and a text that a user writes is no plan's.

    Attributes:
      decision: the plan's on the value.
      number: of the value's row in the plan.
      names: the value's, of which there is at least one.
    """

    decision: str
    number: int
    names: tuple[Name, ...]

    def __new__(cls, decision: str, digest: str, number: int, names: tuple[Name, ...]) -> "PlanName":
        """Make the name; `digest` tells the plan from others."""
        self = super().__new__(cls, f"jaxoffload:{decision}:{'|'.join(map(str, names))}:{digest}:{number}")
        self.decision, self.number, self.names = decision, number, names
        return self


def read_names(name: str) -> tuple[Name, ...]:
    """Return the user's names in a `checkpoint_name`: one, or those that a plan joined."""
    return name.names if isinstance(name, PlanName) else (Name(name.removesuffix(KEEP), name.endswith(KEEP)),)
