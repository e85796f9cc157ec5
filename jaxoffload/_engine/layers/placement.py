"""Decide where each residual of a layer lives between the passes: on the host, the device, kept once, or an operand."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from typing import Literal as OneOf

from jax.extend.core import Jaxpr, Literal

from ..jaxprs.flat import Straight
from ..jaxprs.inline import depending
from ..jaxprs.source import Source, follow, is_its_operand, source_of

# What happens to a residual between the passes. An "operand" (a constant, or a slice of xs) is read again; one that is
# the same in every layer is kept "once"; any other goes to the "host" or stays on the "device".
Place = OneOf["operand", "once", "host", "device"]
Rows = frozenset[int]  # numbers of rows of a plan: the same under each `Override`


class Kept(NamedTuple):
    """A residual of one layer: where it is, and what it is."""

    place: Place
    operand: int | None  # the number of the body's operand that it is, if any
    source: Source  # its names lead to its rows in the plan

    @property
    def rows(self) -> Rows:
        return frozenset(name.number for name in self.source.names)


class Stored[T](NamedTuple):
    """A value for each residual that is not an operand, by its place."""

    host: list[T]
    device: list[T]
    once: list[T]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each residual of a layer is between its passes.

    `kept`: in the order of the backward jaxpr. The last results of the forward jaxpr are those that are not operands.
    """

    kept: tuple[Kept, ...]

    def select[T](self, residuals: Iterable[T], place: Place) -> list[T]:
        """Return those of all residuals that are at a place."""
        return [x for x, k in zip(residuals, self.kept, strict=True) if k.place == place]

    @property
    def moved(self) -> list[Rows]:
        """The rows, in the plan, of each residual on the host."""
        return [k.rows for k in self.select(self.kept, "host")]

    def split[T](self, results: Sequence[T]) -> Stored[T]:
        """Return the residuals among the results of the forward pass, by their places."""
        places = [k.place for k in self.kept if k.operand is None]
        stored = list(zip(results[len(results) - len(places) :], places, strict=True))
        return Stored(*([x for x, p in stored if p == place] for place in Stored._fields))

    def merge(self, operands: Mapping[int, Any], *stored: list[Any]) -> list[Any]:
        """Return the residuals as the backward pass takes them, from operands, by their numbers, and `split`."""
        rest = {place: iter(xs) for place, xs in zip(Stored._fields, stored, strict=True)}
        return [next(rest[k.place]) if k.operand is None else operands[k.operand] for k in self.kept]

    def sizes(self, forward: Straight) -> Stored[int]:
        """Return the bytes per device of each residual of a forward pass."""
        return self.split([forward.share(x) if x else 0 for x in forward.outputs])

    def staying(self, stays: Callable[[Rows], bool]) -> "Layout":
        """Return the layout with those residuals for the host on the device whose rows say so."""
        kept = (k._replace(place="device") if k.place == "host" and stays(k.rows) else k for k in self.kept)
        return Layout(tuple(kept))

    @functools.cached_property
    def on_device(self) -> "Layout":
        """The layout of layers that do not offload."""
        return self.staying(lambda rows: True)


def kept_of(known: Jaxpr, consts: int, carry: int, residuals: Sequence[Any]) -> tuple[Kept, ...]:
    """Return what becomes of each residual of `known`, whose first operands are a body's: so many constants, carry."""
    operands = {var: i for i, var in enumerate(known.invars)}
    differs = depending(known, known.invars[consts:], lambda eqn: bool(eqn.effects))

    def kept(var: Any) -> Kept:
        if isinstance(var, Literal):
            return Kept("once", None, Source(None, "a constant", "constant"))
        if var in operands and operands[var] not in range(consts, consts + carry):
            return Kept("operand", operands[var], Source(None, "an operand"))
        source = Source(None, "the carry of a scan") if var in operands else source_of(known, var)
        if follow(known, var, is_its_operand) not in differs:  # a nested call may return what it is given
            return Kept("once", None, source._replace(where="the same in every layer", kind="once"))
        return Kept("host" if source.name and source.name.decision == "offload" else "device", None, source)

    return tuple(map(kept, residuals))


def split_list[T](xs: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Return the first values, the next ones, and so on, of these sizes, and the rest."""
    ends = [0, *itertools.accumulate(sizes), len(xs)]
    return [list(xs[begin:end]) for begin, end in itertools.pairwise(ends)]
