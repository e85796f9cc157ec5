"""Divide an optimizer's update into what runs once, for whole arrays, and what runs block by block.

The update of all leaves is traced once. What depends on gradients and on other arrays on the device alone may mix rows,
as the global norm does: it is computed first. What depends on a leaf's state on the host must treat the rows of the
leaf's first axis by themselves (`rows.py`), or the whole leaf comes to the device.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import cond_p

from .._engine.jaxprs.inline import evaluate_equations, variables, with_needed_equations, written_out
from .._jax import dce_jaxpr, where_written
from .rows import Mixed, Rows, Rule, Size, Take, broadcast_along, rule_of


class Input(NamedTuple):
    """An input of an update: the leaf that it belongs to, if it has rows; whether it is on the host."""

    leaf: int | None = None
    on_host: bool = False


class Kind(NamedTuple):
    """What a value belongs to: a leaf, of which it has rows along `axis`; `on_host`: it depends on state there."""

    leaf: int
    axis: int | None
    on_host: bool


class MixesRows(Exception):
    """The update of a leaf with state on the host mixes the rows of its first axis, or reads those of `other`."""

    def __init__(self, leaf: int, eqn: JaxprEqn | None, other: int | None = None):
        super().__init__(leaf)
        self.leaf, self.other = leaf, other
        self.how = f"{eqn.primitive.name} at {where_written(eqn)}" if eqn else "a result"


class Update(NamedTuple):
    """A traced update, and how its equations are evaluated.

    Attributes:
      kinds: of each variable that has rows, or depends on state on the host.
      rules: for the number of an equation, how to evaluate it on rows.
      sizes: for each leaf that streams, its rows and those of a block.
    """

    jaxpr: Jaxpr
    kinds: dict[Var, Kind]
    rules: dict[int, Rule]
    sizes: dict[int, Size]

    def whole(self, atoms: Sequence[Any], values: dict[Var, Any]) -> None:
        """Add to `values` these atoms, computed from those that are there, on whole arrays."""
        eqns = needed(self.jaxpr, atoms, values)
        evaluate_equations(self.jaxpr, [self.jaxpr.eqns[n] for n in eqns], values)

    def of_blocks(self, leaf: int, results: Sequence[Any]) -> "OfBlocks":
        """Return how blocks of results of `leaf` are computed."""
        known = {v: kind.axis for v, kind in self.kinds.items() if kind.leaf == leaf}
        eqns = [
            n
            for n in needed(self.jaxpr, results, ())
            if n in self.rules and not known.keys().isdisjoint(self.jaxpr.eqns[n].outvars)
        ]
        taken = [pair for n in eqns for pair in zip(self.jaxpr.eqns[n].invars, self.rules[n].operands, strict=True)]
        taken += [(atom, 0) for atom in results]
        whole = []
        for atom, axis in taken:
            if isinstance(atom, Var) and atom not in known:
                eqn = None if axis is None else broadcast_along(atom, axis, self.jaxpr)
                whole += variables(eqn.invars) if eqn else [atom]
        inputs = [v for v in self.jaxpr.invars if v in known and v in set(variables([a for a, _ in taken]))]
        return OfBlocks(self, known, eqns, inputs, list(dict.fromkeys(whole)), list(results), self.sizes[leaf])


class OfBlocks(NamedTuple):
    """How blocks of the results of a leaf are computed: by these equations, from blocks of these inputs, and from whole
    values."""

    update: Update
    known: dict[Var, int | None]
    eqns: list[int]
    inputs: list[Var]
    whole: list[Var]
    results: list[Any]
    size: Size

    def run(self, values: dict[Var, Any], take: Take) -> list[Any]:
        """Return the blocks of the results. `values`: blocks of the inputs, and the whole values."""
        rows = Rows(self.update.jaxpr, self.known, self.size, values, take)
        for number in self.eqns:
            rows.evaluate(self.update.jaxpr.eqns[number], self.update.rules[number])
        return [rows.of(atom, 0) for atom in self.results]


def needed(jaxpr: Jaxpr, atoms: Iterable[Any], values: Iterable[Var]) -> list[int]:
    """Return the numbers of the equations that these atoms need, besides `values`, in order."""
    have, found = set(values), list[int]()
    wanted = set(variables(list(atoms))) - have
    for number, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if not wanted.isdisjoint(eqn.outvars):
            found.append(number)
            wanted |= set(variables(eqn.invars)) - have
    return found[::-1]


def divided(jaxpr: Jaxpr, inputs: Sequence[Input], owners: Sequence[int | None], sizes: dict[int, Size]) -> Update:
    """Divide the update of a jaxpr.

    Args:
      inputs: of the jaxpr.
      owners: for each result the leaf that it is of; None for what is on the device and of no leaf.
      sizes: for each leaf whose state streams, its rows, and those of a block.

    Raises:
      MixesRows: it cannot be divided.
    """
    jaxpr = with_single_conds(written_out(jaxpr, [True] * len(inputs), lambda *_: True))
    streams = lambda x: x.leaf in sizes
    kinds = {
        v: Kind(x.leaf, 0 if streams(x) else None, x.on_host)
        for v, x in zip(jaxpr.invars, inputs, strict=True)
        if x.leaf is not None and (streams(x) or x.on_host)
    }
    rules: dict[int, Rule] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        taken = [kinds.get(v) if isinstance(v, Var) else None for v in eqn.invars]
        on_host = list(dict.fromkeys(kind.leaf for kind in taken if kind and kind.on_host))
        if len(on_host) > 1:
            raise MixesRows(on_host[0], eqn, on_host[1])
        of = on_host or list(dict.fromkeys(kind.leaf for kind in taken if kind))
        if len(of) != 1:
            continue  # whole values, on the device
        axes = [kind.axis if kind and kind.leaf == of[0] else None for kind in taken]
        if all(axis is None for axis in axes):
            kinds |= {v: Kind(of[0], None, True) for v in eqn.outvars}
            continue
        try:
            rule = rule_of(eqn, axes, sizes[of[0]])
        except Mixed as mixed:
            if on_host:
                raise MixesRows(of[0], mixed.eqn) from None
            continue
        rules[number] = rule
        kinds |= {v: Kind(of[0], axis, bool(on_host)) for v, axis in zip(eqn.outvars, rule.results, strict=True)}
    for atom, owner in zip(jaxpr.outvars, owners, strict=True):
        kind = kinds.get(atom) if isinstance(atom, Var) else None
        if kind and kind.on_host and kind.leaf != owner:
            raise MixesRows(kind.leaf, None, owner)
        if kind and owner in sizes and kind.axis != 0 and kind.on_host:
            raise MixesRows(kind.leaf, None)
    return Update(jaxpr, kinds, rules, sizes)


def with_single_conds(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr in which each `cond` has one result, and the operands that this needs: that of one leaf's state is
    apart from that of the others'."""
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is not cond_p or len(eqn.outvars) == 1 or eqn.effects:
            eqns.append(eqn)
            continue
        for number, out in enumerate(eqn.outvars):
            only = [n == number for n in range(len(eqn.outvars))]
            used = [dce_jaxpr(branch, only)[1] for branch in eqn.params["branches"]]
            operands = [any(each) for each in zip(*used, strict=True)]
            branches = tuple(dce_jaxpr(branch, only, operands)[0] for branch in eqn.params["branches"])
            taken = [v for v, it in zip(eqn.invars[1:], operands, strict=True) if it]
            eqns.append(
                eqn.replace(invars=[eqn.invars[0], *taken], outvars=[out], params={**eqn.params, "branches": branches})
            )
    return with_needed_equations(jaxpr.replace(eqns=eqns))
