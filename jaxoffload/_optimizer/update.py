"""Run an update of arrays some of which are on the host: divide what runs once from what runs block by block.

The update of all leaves is traced once. What is computed from arrays on the device alone may mix rows and leaves, as
the global norm of the gradients does: it runs first, on whole arrays. What is computed from a leaf's state on the host
must treat the rows of the leaf's first axis by themselves (`rows.py`): it streams (`stream.py`). The state of a matrix
whose rows are mixed streams as one block.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from .._engine.jaxprs.inline import (
    Values,
    depending,
    evaluate_equations,
    read,
    variables,
    with_needed_equations,
    with_unknown_names,
)
from .._engine.layers.rows import filled
from .._engine.layers.transport import to_host
from .._jax import ELEMENTWISE, has_effects, where_written
from .._text import first
from .opened import opened
from .placement import Placements
from .rows import Axis, axes_needed, block_of
from .stream import Arrays, Stream, stream

SCOPE = "host_optimizer"  # of what an update computes, in a trace
STACK = 3  # the state of an array of so many axes, one of layers or experts, never comes to the device whole
# Per device, of the blocks of an iteration; more only if one leaf has more. The bus waits in each iteration for what is
# computed of the smallest array: a loop of few large arrays would lose a tenth of its time.
LOOP_BYTES = 2 * 2**30

# Equations, with the axes along which result and operands are rows; and values that they take from outside, with the
# axes along which rows of these are taken.
Part = tuple[list[tuple[JaxprEqn, Axis, Sequence[Axis]]], list[tuple[Var, Axis]]]


class _Mixes(Exception):
    """A part needs what must be apart; it says what."""


class Update:
    """An update, whose results replace the last of its inputs.

    Attributes:
      jaxpr: it, for whole arrays on the device.
      leaves: of each input, the leaf that it has a row for each row of, if any.
      placements: of the leaves.
      outputs: the results, by the numbers of the inputs that they replace.
      on_host: the inputs that are there, each with its leaf.
      from_host: the values that depend on them.
      parts: what computes a block of the results of each leaf with state there.
    """

    def __init__(self, jaxpr: Jaxpr, leaves: Sequence[int | None], state: int, placements: Placements):
        """Find what runs block by block. Inputs from number `state` on are the state.

        Raises:
          NotImplementedError: the update mixes what must be apart.
        """
        self.jaxpr, self.leaves, self.state, self.placements = opened(jaxpr), leaves, state, list(placements)
        self.outputs: dict[int, Any] = dict(enumerate(self.jaxpr.outvars, len(leaves) - len(self.jaxpr.outvars)))
        streams = lambda leaf: leaf is not None and placements[leaf].place == "host"
        given = enumerate(zip(self.jaxpr.invars, leaves, strict=True))
        self.on_host: dict[Var, Any] = {v: leaf for n, (v, leaf) in given if n >= state and streams(leaf)}
        self.from_host = self._depending(self.on_host)
        self.parts, refused = dict[int, Part](), dict[int, str]()
        for leaf in filter(streams, range(len(placements))):
            try:
                self.parts[leaf] = self._part(leaf)
            except _Mixes as why:
                refused[leaf] = str(why)
        if refused:
            raise self._refusal(refused, next(iter(refused.values())))
        once = [v for n, v in self.outputs.items() if leaves[n] not in self.parts]
        effects = [v for eqn in self.jaxpr.eqns if has_effects(eqn) for v in eqn.invars]
        if shared := self.from_host.intersection(variables([*once, *effects])):
            read = {leaf for v, leaf in self.on_host.items() if not shared.isdisjoint(self._depending([v]))}
            raise self._refusal(read, "from it the transformation computes something that is of no single parameter")

    def _depending(self, on: Iterable[Var]) -> set[Var]:
        return depending(self.jaxpr, on, lambda eqn: False)

    def _part(self, leaf: int) -> Part:
        """Return the part of a leaf, found from its last equation to its first."""
        rows, steps, taken = self.placements[leaf].rows, list[Any](), list[tuple[Var, Axis]]()
        wanted: dict[Var, dict[Axis, None]] = {v: {rows: None} for v in self._results(leaf).values()}
        for eqn in reversed(self.jaxpr.eqns):
            for out, axis in [(v, axis) for v in eqn.outvars for axis in wanted.pop(v, ())]:
                axes = [None] * len(eqn.invars) if axis is None else axes_needed(eqn, axis)
                if out not in self.from_host and (axis is None or axes is None):
                    taken.append((out, axis))  # it is computed once, whole
                    continue
                # Where the whole state is needed, what is elementwise is not to blame: something before mixes the rows.
                to_blame = axis is None and rows is not None and eqn.primitive.name not in ELEMENTWISE
                if axes is None or to_blame:
                    return self._as_one_block(leaf, eqn)
                if steps[-1:] != [(eqn, axis, axes)]:  # it has several results
                    steps.append((eqn, axis, axes))
                for v, needed in zip(eqn.invars, axes, strict=True):
                    if isinstance(v, Var):
                        wanted.setdefault(v, {})[needed] = None
        for v, found in wanted.items():
            if (other := self.on_host.get(v, leaf)) != leaf:
                raise _Mixes(f"the update of {self.placements[leaf].name} reads that of {self.placements[other].name}")
            if v in self.on_host and found.keys() != {rows}:
                return self._as_one_block(leaf, None)
            taken += [(v, axis) for axis in found]
        return steps[::-1], taken

    def _as_one_block(self, leaf: int, eqn: JaxprEqn | None) -> Part:
        """Return the part of a leaf whose rows are mixed, by this equation if it is known."""
        if self.placements[leaf].ndim >= STACK:
            how = f" ({' at '.join(filter(None, (eqn.primitive.name, where_written(eqn))))})" if eqn else ""
            name = self.placements[leaf].name
            raise _Mixes(f"the update of {name} mixes the rows of its first axis, which are layers{how}")
        self.placements[leaf] = self.placements[leaf]._replace(blocks=1)
        return self._part(leaf)

    def _results(self, leaf: int) -> dict[int, Any]:
        return {n: v for n, v in self.outputs.items() if self.leaves[n] == leaf}

    def _refusal(self, leaves: Collection[int], why: str) -> NotImplementedError:
        names = [self.placements[leaf].name for leaf in sorted(leaves)]
        return NotImplementedError(
            f"host_optimizer: the state of {first(names)} is on the host, and {why}; keep it on the device, "
            f"Policy({dict.fromkeys(names, 'save')}, default='offload'), or use another transformation"
        )

    @jax.named_scope(SCOPE)
    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Return the results, from operands in the memory that `on_host` says. One that is not read may be None."""
        jaxpr = self.jaxpr
        values = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*operands, *jaxpr.consts], strict=True))
        once = {n: v for n, v in self.outputs.items() if self.leaves[n] not in self.parts}
        taken = dict.fromkeys(v for _, taken in self.parts.values() for v, _ in taken)
        on_device = [eqn for eqn in jaxpr.eqns if self.from_host.isdisjoint(variables(eqn.invars))]
        apart = jaxpr.replace(eqns=on_device, outvars=[*once.values(), *taken], debug_info=with_unknown_names(jaxpr))
        evaluate_equations(jaxpr, with_needed_equations(apart).eqns, values)
        new = dict(zip(once, read([*once.values()], values), strict=True))
        # Else XLA chooses, and a step whose state comes back divided otherwise is compiled again.
        of = {n: leaf for n in once if n >= self.state and (leaf := self.leaves[n]) is not None}
        new |= {n: self.placements[leaf].sharded(new[n]) for n, leaf in of.items()}
        before = read([v for v in taken if v not in self.on_host], values)
        for leaves in self._loops():
            streams = [self._stream(leaf, values) for leaf in leaves]
            # Else XLA fetches the first blocks at once, and the device holds them while gradients are computed.
            arrays, _ = lax.optimization_barrier(([leaf.arrays for leaf in streams], before))
            streams = [leaf._replace(arrays=of) for leaf, of in zip(streams, arrays, strict=True)]
            new |= stream(streams)
            before = [new[n] for leaf in streams for n in leaf.arrays if jaxpr.invars[n] not in self.on_host]
        return [new[n] for n in self.outputs]

    def _loops(self) -> list[list[int]]:
        """Return the leaves of each loop, those of few blocks first, and of these the largest."""
        loops: list[list[int]] = []
        number = lambda leaf: self.placements[leaf].blocks
        size = lambda leaf: self.placements[leaf].bytes_per_device // number(leaf)
        for leaf in sorted(self.parts, key=lambda leaf: (number(leaf), -size(leaf))):
            last = loops[-1] if loops else []
            if last and 1 < number(leaf) == number(last[0]) and sum(map(size, [*last, leaf])) <= LOOP_BYTES:
                last.append(leaf)
            else:
                loops.append([leaf])
        return loops

    def _stream(self, leaf: int, values: Values) -> Stream:
        placed, (steps, taken), results = self.placements[leaf], self.parts[leaf], self._results(leaf)
        inputs = {n: self.jaxpr.invars[n] for n in results}
        empty = lambda v: to_host(placed.sharded(filled(v.aval)))
        at = lambda v, axis: v if axis is None else (v, axis)  # of whole values, and of blocks

        def compute(i: Any, there: Arrays) -> Arrays:
            found: dict[Any, Any] = {at(inputs[n], placed.rows): x for n, x in there.items()}
            for v, axis in taken:
                if at(v, axis) not in found:
                    found[at(v, axis)] = values[v] if axis is None else placed.take(values[v], i, axis)
            for eqn, axis, axes in steps:
                if axis is None:
                    evaluate_equations(self.jaxpr, [eqn], found)
                else:
                    given = zip(eqn.invars, axes, strict=True)
                    operands = [found[at(v, of)] if isinstance(v, Var) else v.val for v, of in given]
                    found[eqn.outvars[0], axis] = block_of(eqn, axis, placed.blocks, operands)
            return {n: found[at(v, placed.rows)] for n, v in results.items()}

        arrays = {n: empty(v) if values[v] is None else values[v] for n, v in inputs.items()}
        reads = {n for n, v in inputs.items() if v in self.on_host and (v, placed.rows) in taken}
        return Stream(placed, arrays, reads, compute)
