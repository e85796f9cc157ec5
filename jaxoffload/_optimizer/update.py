"""Run an update of arrays some of which are on the host: divide what runs once from what runs block by block.

The update of all leaves is traced once. What is computed from arrays on the device alone may mix rows and leaves, as
the global norm of the gradients does: it runs first, on whole arrays. What is computed from a leaf's state on the host
must treat the rows of the leaf's first axis by themselves (`rows.py`): it streams (`stream.py`). The state of a matrix
whose rows are mixed streams as one block.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import broadcast_in_dim_p

from .._engine.jaxprs.inline import (
    Values,
    evaluate_equations,
    read,
    variables,
    with_needed_equations,
    with_unknown_names,
)
from .._engine.layers.rows import filled
from .._engine.layers.transport import to_host
from .._jax import ELEMENTWISE, where_written
from .opened import opened
from .placement import Placements
from .rows import Mixed, Rows
from .stream import Arrays, Stream, stream

SCOPE = "host_optimizer"  # of what an update computes, in a trace
STACK = 3  # the state of an array of so many axes, one of layers or experts, never comes to the device whole
# Per device, of the blocks of an iteration; more only if one leaf has more. In each iteration the last array that is
# written, and the first that is read, have nothing beside them: a loop should have many arrays, the smallest at its end
# (H100, three arrays of equal size: 35 GB/s each way rather than 45).
LOOP_BYTES = 2 * 2**30


class Update:
    """An update, whose results replace the last of its inputs.

    Attributes:
      jaxpr: it, for whole arrays on the device.
      leaves: of each input, the leaf that it has a row for each row of, if any.
      placements: of the leaves.
      streamed: the leaves with state on the host.
      on_host: the numbers of the inputs that are there.
      outputs: the results, by the numbers of the inputs that they replace.
      leaf_of: the leaf with whose blocks a value is computed, if it is.
      from_host: the values that depend on state there.
      repeated: the values that repeat one number, as zeros do; blocks make their own, so that they are never whole.
    """

    def __init__(self, jaxpr: Jaxpr, leaves: Sequence[int | None], state: int, placements: Placements):
        """Find what runs block by block. Inputs from number `state` on are the state.

        Raises:
          NotImplementedError: the update mixes what must be apart.
        """
        self.jaxpr, self.leaves, self.placements = opened(jaxpr), leaves, list(placements)
        self.streamed = {leaf for leaf, placed in enumerate(placements) if placed.place == "host"}
        self.on_host = {n for n, leaf in enumerate(leaves) if n >= state and leaf in self.streamed}
        self.outputs: dict[int, Any] = dict(enumerate(self.jaxpr.outvars, len(leaves) - len(self.jaxpr.outvars)))
        given = zip(self.jaxpr.invars, leaves, strict=True)
        self.leaf_of = {v: leaf for v, leaf in given if leaf is not None and leaf in self.streamed}
        self.from_host = {self.jaxpr.invars[n] for n in self.on_host}
        self.repeated: set[Var] = set()
        made = [v for eqn in self.jaxpr.eqns for v in eqn.outvars]
        every = [*self.jaxpr.invars, *self.jaxpr.constvars, *made]
        jax.eval_shape(lambda *values: self._divide(dict(zip(every, values, strict=True))), *(v.aval for v in every))

    def _divide(self, whole: Values) -> None:
        """Fill the last attributes. `whole` has each variable, so nothing is computed but blocks."""
        number = lambda leaf: self.placements[leaf].blocks
        take = lambda leaf: lambda x, axis: lax.slice_in_dim(x, 0, x.shape[axis] // number(leaf), axis=axis)
        rows: Values = {v: take(leaf)(whole[v], 0) for v, leaf in self.leaf_of.items()}
        for eqn in self.jaxpr.eqns:
            operands = variables(eqn.invars)
            of_repeated = eqn.primitive.name in ELEMENTWISE and self.repeated.issuperset(operands)
            if of_repeated or eqn.primitive is broadcast_in_dim_p:
                self.repeated.update(eqn.outvars)
            of_state = list(dict.fromkeys(self.leaf_of[v] for v in operands if v in self.from_host))
            if len(of_state) > 1:
                raise self._refusal(of_state[0], eqn, of_state[1])
            leaves = of_state or list({self.leaf_of[v] for v in operands if v in self.leaf_of})
            if len(leaves) != 1:
                continue  # computed from whole arrays on the device
            (leaf,) = leaves
            values: Values = {v: rows[v] if self.leaf_of.get(v) == leaf else whole[v] for v in operands}
            try:
                if number(leaf) > 1:
                    Rows(self.jaxpr, values, take(leaf)).evaluate(eqn)
            except Mixed:
                if not of_state:
                    continue
                self._mixes(leaf, eqn)
            rows |= {v: values.get(v, whole[v]) for v in eqn.outvars}
            self.leaf_of |= dict.fromkeys(eqn.outvars, leaf)
            self.from_host.update(eqn.outvars if of_state else [])
        for n, v in self.outputs.items():
            into, of = self.leaves[n], self.leaf_of.get(v) if isinstance(v, Var) else None
            if of is not None and of == into and rows[v].shape[1:] != whole[v].shape[1:]:
                self._mixes(of, None)  # its rows lie along another axis
            elif of is not None and of != into and v in self.from_host:
                raise self._refusal(of, None) if into is None else self._refusal(into, None, of)

    def _mixes(self, leaf: int, eqn: JaxprEqn | None) -> None:
        """Let the state of a leaf whose rows are mixed come as one block."""
        if self.placements[leaf].ndim >= STACK:
            raise self._refusal(leaf, eqn) from None
        self.placements[leaf] = self.placements[leaf]._replace(blocks=1)

    def _refusal(self, leaf: int, eqn: JaxprEqn | None, other: int | None = None) -> NotImplementedError:
        name = self.placements[leaf].name
        how = " at ".join(filter(None, (eqn.primitive.name, where_written(eqn)))) if eqn else "a result"
        why = "mixes the rows of its first axis, which are layers"
        if other is not None:
            why = f"reads the state of another, such as {self.placements[other].name}"
        return NotImplementedError(
            f"host_optimizer: the state of {name} is on the host, and its update {why} ({how}); keep it on "
            f"the device, Policy({{{name!r}: 'save'}}, default='offload'), or use another transformation"
        )

    @jax.named_scope(SCOPE)
    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Return the results, from operands in the memory that `on_host` says. One that is not read may be None."""
        jaxpr, parts = self.jaxpr, {leaf: self._part(leaf) for leaf in self.streamed}
        values = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*operands, *jaxpr.consts], strict=True))
        once = {n: v for n, v in self.outputs.items() if self.leaves[n] not in self.streamed}
        on_device = [eqn for eqn in jaxpr.eqns if self.from_host.isdisjoint(variables(eqn.invars))]
        read_whole = (v for _, taken in parts.values() for v in taken)
        evaluate_equations(jaxpr, _needed(jaxpr, on_device, [*once.values(), *read_whole])[0], values)
        new = dict(zip(once, read([*once.values()], values), strict=True))
        before: list[Any] = []
        for leaves in self._loops():
            streams = [self._stream(leaf, *parts[leaf], values) for leaf in leaves]
            if streams[0].placed.blocks == 1:  # one after another, so that the device holds the state of one
                arrays, _ = lax.optimization_barrier((streams[0].arrays, before))
                streams = [streams[0]._replace(arrays=arrays)]
            new |= stream(streams)
            before = [new[n] for n in streams[0].arrays if n not in self.on_host]
        return [new[n] for n in self.outputs]

    def _part(self, leaf: int) -> tuple[list[JaxprEqn], list[Var]]:
        """Return the equations that compute blocks of a leaf's results, and what they take: blocks or whole values."""
        is_inside = lambda v: v in self.repeated or self.leaf_of.get(v) == leaf
        eqns = [eqn for eqn in self.jaxpr.eqns if any(map(is_inside, eqn.outvars))]
        return _needed(self.jaxpr, eqns, [v for n, v in self.outputs.items() if self.leaves[n] == leaf])

    def _loops(self) -> list[list[int]]:
        """Return the leaves of each loop, those of few blocks first, and of these the largest."""
        loops: list[list[int]] = []
        number = lambda leaf: self.placements[leaf].blocks
        size = lambda leaf: self.placements[leaf].bytes_per_device // number(leaf)
        for leaf in sorted(self.streamed, key=lambda leaf: (number(leaf), -size(leaf))):
            last = loops[-1] if loops else []
            if last and 1 < number(leaf) == number(last[0]) and sum(map(size, [*last, leaf])) <= LOOP_BYTES:
                last.append(leaf)
            else:
                loops.append([leaf])
        return loops

    def _stream(self, leaf: int, eqns: Sequence[JaxprEqn], taken: Sequence[Var], values: Values) -> Stream:
        placed, invars = self.placements[leaf], self.jaxpr.invars
        results = {n: v for n, v in self.outputs.items() if self.leaves[n] == leaf}
        arrays = {n: values[invars[n]] for n in results}
        for n, x in arrays.items():
            if x is None:
                arrays[n] = to_host(placed.sharded(filled(invars[n].aval)))

        def compute(i: Any, there: Arrays) -> Arrays:
            take = lambda x, axis: placed.take(x, i, axis)
            given = {invars[n]: x for n, x in there.items()}
            others = (v for v in taken if v not in given)
            given |= {v: take(values[v], 0) if self.leaf_of.get(v) == leaf else values[v] for v in others}
            rows = Rows(self.jaxpr, given, take)
            for eqn in eqns:
                rows.evaluate(eqn)
            shape = lambda v: (v.aval.shape[0] // placed.blocks, *v.aval.shape[1:])
            return {n: rows.in_shape(v, shape(v)) for n, v in results.items()}

        return Stream(placed, arrays, {n for n in arrays.keys() & self.on_host if invars[n] in taken}, compute)


def _needed(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], results: Iterable[Any]) -> tuple[list[JaxprEqn], list[Var]]:
    """Return those of some equations that results need, and what they take from others."""
    part = jaxpr.replace(eqns=[*eqns], outvars=[*results], debug_info=with_unknown_names(jaxpr))
    needed = with_needed_equations(part).eqns
    made = {v for eqn in needed for v in eqn.outvars}
    reads = variables([*(v for eqn in needed for v in eqn.invars), *part.outvars])
    return needed, [v for v in dict.fromkeys(reads) if v not in made]
