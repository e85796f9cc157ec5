"""Run an update of arrays some of which are on the host: divide what runs once from what runs block by block.

The update of all leaves is traced once. What is computed from arrays on the device alone may mix rows and leaves, as
the global norm of the gradients does: it runs first, on whole arrays. What is computed from a leaf's state on the host
must treat the rows of the leaf's first axis by themselves (`rows.py`): it streams (`stream.py`).
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import broadcast_in_dim_p, cond_p

from .._engine.jaxprs.flat import division
from .._engine.jaxprs.inline import (
    depending,
    evaluate_equations,
    read,
    variables,
    with_needed_equations,
    with_unknown_names,
    written_out,
)
from .._engine.layers.rows import filled
from .._engine.layers.transport import to_device, to_host
from .._jax import dce_jaxpr, nbytes, where_written
from .rows import Mixed, Part, Size, rule_of, through
from .stream import Blocks, Stream, stream

# Per device, of the blocks of an iteration; more only if one leaf has more. In each iteration the last array that is
# written, and the first that is read, have nothing beside them: a loop should have many arrays, the smallest at its end
# (H100, three arrays of equal size: 35 GB/s each way rather than 45).
LOOP_BYTES = 2 * 2**30


class Input(NamedTuple):
    """An input of an update: the leaf that it has rows of, if any, and whether it is on the host."""

    leaf: int | None
    on_host: bool = False


class Output(NamedTuple):
    """A result of an update: as an input, with the number of the input that it replaces, if it replaces one."""

    leaf: int | None
    on_host: bool
    into: int | None


class MixesRows(Exception):
    """The update of a leaf with state on the host mixes the rows of its first axis, or reads those of `other`."""

    def __init__(self, leaf: int, eqn: JaxprEqn | None, other: int | None = None):
        super().__init__(leaf)
        self.leaf, self.other = leaf, other
        self.how = " at ".join(filter(None, (eqn.primitive.name, where_written(eqn)))) if eqn else "a result"


class _Kind(NamedTuple):
    """What a value belongs to: a leaf, of which it has rows along `axis`; `on_host`: it depends on state there."""

    leaf: int
    axis: int | None
    on_host: bool


class Update(NamedTuple):
    """A jaxpr, what its inputs and results are, the blocks of each leaf that streams, and what values belong to."""

    jaxpr: Jaxpr
    inputs: Sequence[Input]
    outputs: Sequence[Output]
    blocks: dict[int, Blocks]
    kinds: dict[Var, _Kind]

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Return the results, from operands in the memory that `inputs` says."""
        invars, jaxpr = self.jaxpr.invars, self.jaxpr
        values = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        values |= {v: x for v, x, it in zip(invars, operands, self.inputs, strict=True) if not it.on_host}
        parts = {leaf: self._part(leaf) for leaf in self.blocks}
        come_whole = list(dict.fromkeys(x.leaf for x in self.inputs if x.on_host and x.leaf not in self.blocks))

        on_device = [n for n, out in enumerate(self.outputs) if out.leaf not in [*self.blocks, *come_whole]]
        of_blocks = [v for leaf, (_, taken) in parts.items() for v in taken if not self._is_of(leaf, v)]
        results = self._whole(on_device, values, of_blocks)
        for leaves in self._loops():
            streams = [self._stream(leaf, *parts[leaf], values, operands) for leaf in leaves]
            for leaf, stacks, arrays in zip(leaves, *stream(streams), strict=True):
                new, replaced = iter(stacks), iter(arrays)
                results |= {n: next(new if self.outputs[n].on_host else replaced) for n in self._of(leaf)}
        before: list[Any] = []
        for each in come_whole:  # one after another, so that the device holds the state of one of them
            numbers = [n for n, x in enumerate(self.inputs) if x.leaf == each and x.on_host]
            fetched, _ = lax.optimization_barrier(([operands[n] for n in numbers], before))
            of_leaf = values | dict(zip([invars[n] for n in numbers], map(to_device, fetched), strict=True))
            results |= self._whole(self._of(each), of_leaf)
            before = read([jaxpr.outvars[n] for n in self._of(each)], of_leaf)
        return [results[n] for n in range(len(self.outputs))]

    def _of(self, leaf: int | None) -> list[int]:
        """Return the numbers of a leaf's results."""
        return [n for n, out in enumerate(self.outputs) if out.leaf == leaf]

    def _is_of(self, leaf: int, v: Var) -> bool:
        """Return if a variable belongs to a leaf; another leaf's is whole where this one reads it."""
        return v in self.kinds and self.kinds[v].leaf == leaf

    def _whole(self, numbers: Sequence[int], values: dict[Var, Any], also: Iterable[Var] = ()) -> dict[int, Any]:
        """Return results by their numbers, computed on whole arrays; add what they need, and `also`, to `values`."""
        atoms = [self.jaxpr.outvars[n] for n in numbers]
        evaluate_equations(self.jaxpr, needed(self.jaxpr, [*atoms, *also], values), values)
        on_host = (self.outputs[n].on_host for n in numbers)
        found = zip(read(atoms, values), on_host, strict=True)
        return dict(zip(numbers, (to_host(x) if moves else x for x, moves in found), strict=True))

    def _part(self, leaf: int) -> tuple[Part, list[Var]]:
        """Return how blocks of the results of a leaf are computed, and from blocks or whole values of what."""
        results = [self.jaxpr.outvars[n] for n in self._of(leaf)]
        is_of = lambda v: self._is_of(leaf, v)
        varying = depending(self.jaxpr, self.jaxpr.invars, lambda _: False)

        def is_inside(eqn: JaxprEqn) -> bool:
            """Return if blocks compute this: scalar constants too, which XLA folds into what reads them."""
            constant = varying.isdisjoint(eqn.outvars) and not any(getattr(v.aval, "shape", ()) for v in eqn.outvars)
            return constant or eqn.primitive is broadcast_in_dim_p or any(map(is_of, eqn.outvars))

        eqns = list(filter(is_inside, needed(self.jaxpr, results, ())))
        made = {v for eqn in eqns for v in eqn.outvars}
        read_there = variables([v for eqn in eqns for v in eqn.invars] + results)
        taken = [v for v in dict.fromkeys(read_there) if v not in made]
        part = self.jaxpr.replace(
            constvars=[], consts=[], invars=taken, outvars=results, eqns=eqns,
            debug_info=with_unknown_names(self.jaxpr),
        )  # fmt: skip
        axes = [self.kinds[v].axis if is_of(v) else None for v in taken]
        return through(part, axes, self._size(leaf)), taken

    def _size(self, leaf: int) -> Size:
        aval: Any = next(v.aval for v, x in zip(self.jaxpr.invars, self.inputs, strict=True) if x.leaf == leaf)
        return Size(aval.shape[0], aval.shape[0] // self.blocks[leaf].number)

    def _loops(self) -> list[list[int]]:
        """Return the leaves that stream, those of each loop, the largest first."""
        loops: list[list[int]] = []
        number = lambda leaf: self.blocks[leaf].number
        for _, leaves in itertools.groupby(sorted(self.blocks, key=number), number):
            loop_bytes = LOOP_BYTES
            for leaf in sorted(leaves, key=self._block_bytes, reverse=True):
                loop_bytes += self._block_bytes(leaf)
                if loop_bytes > LOOP_BYTES:
                    loops.append([])
                    loop_bytes = self._block_bytes(leaf)
                loops[-1].append(leaf)
        return loops

    def _block_bytes(self, leaf: int) -> int:
        """Return the bytes of a block of a leaf's state, per device."""
        of_leaf = sum(nbytes(self.jaxpr.outvars[n].aval) for n in self._of(leaf) if self.outputs[n].on_host)
        return of_leaf // (self.blocks[leaf].number * division(self.blocks[leaf].sharding).parts)

    def _stream(
        self, leaf: int, part: Part, taken: list[Var], values: dict[Var, Any], operands: Sequence[Any]
    ) -> Stream:
        blocks, outputs = self.blocks[leaf], [self.outputs[n] for n in self._of(leaf)]
        number = {v: n for n, v in enumerate(self.jaxpr.invars)}
        replaced = [out.into for out in outputs if out.into is not None]
        on_host, on_device = ([n for n in replaced if self.inputs[n].on_host is there] for there in (True, False))

        def compute(i: Any, fetched: list[Any], old: list[Any]) -> tuple[list[Any], list[Any]]:
            there = dict(zip([*on_host, *on_device], [*fetched, *old], strict=True))
            block = lambda n: there[n] if n in there else blocks.take(operands[n], i)
            rows = [block(number[v]) if self._is_of(leaf, v) else values[v] for v in taken]
            new = part.run(lambda x, axis: blocks.take(x, i, axis), rows, [0] * len(outputs))
            pairs = list(zip(new, outputs, strict=True))
            return [x for x, out in pairs if out.on_host], [x for x, out in pairs if not out.on_host]

        empty = lambda n: to_host(blocks.sharded(filled(self.jaxpr.outvars[n].aval)))
        stacks = [operands[n] for n in on_host] or [empty(n) for n in self._of(leaf) if self.outputs[n].on_host]
        return Stream(blocks, bool(on_host), stacks, [operands[n] for n in on_device], compute)


def needed(jaxpr: Jaxpr, atoms: Iterable[Any], values: Iterable[Var]) -> list[JaxprEqn]:
    """Return the equations that compute these atoms from `values` and the inputs, in order."""
    have, found = set(values), list[JaxprEqn]()
    wanted = set(variables(list(atoms))) - have
    for eqn in reversed(jaxpr.eqns):
        if not wanted.isdisjoint(eqn.outvars):
            found.append(eqn)
            wanted |= set(variables(eqn.invars)) - have
    return found[::-1]


def divided(jaxpr: Jaxpr, inputs: Sequence[Input], outputs: Sequence[Output], blocks: dict[int, Blocks]) -> Update:
    """Return an update, divided.

    Args:
      inputs, outputs: what those of the jaxpr are.
      blocks: of each leaf that is to stream.

    Raises:
      MixesRows: the state of a leaf does not stream, or depends on that of another.
    """
    jaxpr = _with_single_conds(written_out(jaxpr, [True] * len(inputs), lambda *_: True))
    kinds = {
        v: _Kind(x.leaf, 0 if x.leaf in blocks else None, x.on_host)
        for v, x in zip(jaxpr.invars, inputs, strict=True)
        if x.leaf is not None and (x.leaf in blocks or x.on_host)
    }
    update = Update(jaxpr, inputs, outputs, blocks, kinds)
    for eqn in jaxpr.eqns:
        taken = [kinds.get(v) if isinstance(v, Var) else None for v in eqn.invars]
        on_host = list(dict.fromkeys(kind.leaf for kind in taken if kind and kind.on_host))
        if len(on_host) > 1:
            raise MixesRows(on_host[0], eqn, on_host[1])
        of = on_host or list(dict.fromkeys(kind.leaf for kind in taken if kind))
        if len(of) != 1:
            continue  # computed from whole arrays on the device
        axes = [kind.axis if kind and kind.leaf == of[0] else None for kind in taken]
        results: Sequence[int | None] = [None] * len(eqn.outvars)
        if any(axis is not None for axis in axes):
            try:
                results = rule_of(eqn, axes, update._size(of[0])).results
            except Mixed as mixed:
                if on_host:
                    raise MixesRows(of[0], mixed.eqn) from None
                continue
        kinds |= {v: _Kind(of[0], axis, bool(on_host)) for v, axis in zip(eqn.outvars, results, strict=True)}
    for atom, out in zip(jaxpr.outvars, outputs, strict=True):
        kind = kinds.get(atom) if isinstance(atom, Var) else None
        if kind and kind.on_host and kind.leaf != out.leaf:
            raise MixesRows(kind.leaf, None) if out.leaf is None else MixesRows(out.leaf, None, kind.leaf)
        if kind and kind.on_host and kind.leaf in blocks and kind.axis != 0:
            raise MixesRows(kind.leaf, None)
    return update


def _with_single_conds(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr in which each `cond` has one result, and the operands that this needs: those of one leaf."""
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
            taken = itertools.compress(eqn.invars[1:], operands)
            params = {**eqn.params, "branches": branches}
            eqns.append(eqn.replace(invars=[eqn.invars[0], *taken], outvars=[out], params=params))
    return with_needed_equations(jaxpr.replace(eqns=eqns))
