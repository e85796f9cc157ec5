"""Run an update of arrays some of which are on the host: divide what runs once from what runs block by block.

The update of all leaves is traced once. What is computed from arrays on the device alone may mix rows and leaves, as
the global norm of the gradients does: it runs first, on whole arrays. What is computed from a leaf's state on the host
must treat the rows of the leaf's first axis by themselves (`rows.py`): it streams (`stream.py`). The state of a matrix
whose rows are mixed streams as one block.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import broadcast_in_dim_p, cond_p

from .._engine.jaxprs.flat import division
from .._engine.jaxprs.inline import Values, read, variables, with_needed_equations, with_unknown_names, written_out
from .._engine.layers.rows import filled
from .._engine.layers.transport import to_host
from .._jax import ELEMENTWISE, dce_jaxpr, evaluate, where_written
from .placement import Placements
from .rows import Mixed, Rows, on_rows
from .stream import Arrays, Blocks, Stream, stream

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
      on_host: the numbers of the inputs that are there.
      placements: of the leaves.
      blocks: of each leaf with state on the host.
      outputs: the results, by the numbers of the inputs that they replace.
      leaf_of: the leaf with whose blocks a value is computed, if it is.
      from_host: the values that depend on state there.
    """

    def __init__(
        self, jaxpr: Jaxpr, leaves: Sequence[int | None], state: int, placements: Placements, blocks: dict[int, Blocks]
    ):
        """Find what runs block by block. Inputs from number `state` on are the state.

        Raises:
          NotImplementedError: the update mixes what must be apart.
        """
        self.jaxpr = _with_single_conds(written_out(jaxpr, [True] * len(leaves), lambda *_: True))
        self.leaves, self.placements, self.blocks = leaves, list(placements), dict(blocks)
        self.on_host = {n for n, leaf in enumerate(leaves) if n >= state and leaf in blocks}
        self.outputs: dict[int, Any] = dict(enumerate(self.jaxpr.outvars, len(leaves) - len(self.jaxpr.outvars)))
        self.leaf_of = {v: leaf for v, leaf in zip(self.jaxpr.invars, leaves, strict=True) if leaf in blocks}
        self.from_host = {self.jaxpr.invars[n] for n in self.on_host}
        made = [v for eqn in self.jaxpr.eqns for v in eqn.outvars]
        every = [*self.jaxpr.invars, *self.jaxpr.constvars, *made]
        jax.eval_shape(lambda *values: self._divide(dict(zip(every, values, strict=True))), *(v.aval for v in every))

    def _divide(self, whole: Values) -> None:
        """Fill `leaf_of` and `from_host`. `whole` has each variable, so nothing is computed but blocks."""
        take = lambda leaf: lambda x, axis: lax.slice_in_dim(x, 0, x.shape[axis] // self.blocks[leaf].number, axis=axis)
        rows: Values = {v: take(leaf)(whole[v], 0) for v, leaf in self.leaf_of.items()}
        for eqn in self.jaxpr.eqns:
            operands = variables(eqn.invars)
            of_state = list(dict.fromkeys(self.leaf_of[v] for v in operands if v in self.from_host))
            if len(of_state) > 1:
                raise self._refusal(of_state[0], eqn, of_state[1])
            leaves = of_state or list({self.leaf_of[v] for v in operands if v in self.leaf_of})
            if len(leaves) != 1:
                continue  # computed from whole arrays on the device
            (leaf,) = leaves
            values: Values = {v: rows[v] if self.leaf_of.get(v) == leaf else whole[v] for v in operands}
            try:
                if self.blocks[leaf].number > 1:
                    Rows(self.jaxpr, values, take(leaf)).evaluate([eqn])
            except Mixed as mixed:
                if not of_state:
                    continue
                self._mixes(leaf, mixed.eqn)
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
        if self.blocks[leaf].ndim >= STACK:
            raise self._refusal(leaf, eqn) from None
        self.blocks[leaf] = self.blocks[leaf]._replace(number=1)
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

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Return the results, from operands in the memory that `on_host` says. One that is not read may be None."""
        jaxpr, parts = self.jaxpr, {leaf: self._part(leaf) for leaf in self.blocks}
        values = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*operands, *jaxpr.consts], strict=True))
        once = {n: v for n, v in self.outputs.items() if self.leaves[n] not in self.blocks}
        read_whole = [v for leaf, (_, taken) in parts.items() for v in taken if self.leaf_of.get(v) != leaf]
        first = [eqn for eqn in jaxpr.eqns if self.from_host.isdisjoint(variables(eqn.invars))]
        whole, taken = _part_of(jaxpr, first, [*once.values(), *read_whole])
        found = evaluate(whole, read(taken, values))
        new = dict(zip(once, found, strict=False))
        values |= zip(read_whole, found[len(once) :], strict=True)
        before: list[Any] = []
        for leaves in self._loops():
            streams = [self._stream(leaf, *parts[leaf], values) for leaf in leaves]
            if self.blocks[leaves[0]].number == 1:  # one after another, so that the device holds the state of one
                arrays, _ = lax.optimization_barrier((streams[0].arrays, before))
                streams = [streams[0]._replace(arrays=arrays)]
            new |= stream(streams)
            before = [new[n] for n in streams[0].arrays if n not in self.on_host]
        return [new[n] for n in self.outputs]

    def _part(self, leaf: int) -> tuple[Jaxpr, list[Var]]:
        """Return what computes blocks of the results of a leaf, and from blocks or whole values of what."""

        repeated: set[Var] = set()  # one number each, as zeros are: XLA makes only the rows that are read

        def is_inside(eqn: JaxprEqn) -> bool:
            """Return if blocks compute this: what repeats a number too, so that it is never whole."""
            of_repeated = repeated.issuperset(variables(eqn.invars)) and eqn.primitive.name in ELEMENTWISE
            if eqn.primitive is broadcast_in_dim_p or of_repeated:
                repeated.update(eqn.outvars)
            return not repeated.isdisjoint(eqn.outvars) or any(self.leaf_of.get(v) == leaf for v in eqn.outvars)

        results = [v for n, v in self.outputs.items() if self.leaves[n] == leaf]
        return _part_of(self.jaxpr, list(filter(is_inside, self.jaxpr.eqns)), results)

    def _loops(self) -> list[list[int]]:
        """Return the leaves of each loop, those of few blocks first, and of these the largest."""
        loops: list[list[int]] = []
        number = lambda leaf: self.blocks[leaf].number
        size = lambda leaf: self.placements[leaf].bytes // (number(leaf) * division(self.blocks[leaf].sharding).parts)
        loop_bytes = 0
        for leaf in sorted(self.blocks, key=lambda leaf: (number(leaf), -size(leaf))):
            loop_bytes += size(leaf)
            if number(leaf) == 1 or loop_bytes > LOOP_BYTES or not loops or number(leaf) != number(loops[-1][0]):
                loops.append([])
                loop_bytes = size(leaf)
            loops[-1].append(leaf)
        return loops

    def _stream(self, leaf: int, part: Jaxpr, taken: list[Var], values: Values) -> Stream:
        blocks, invars = self.blocks[leaf], self.jaxpr.invars
        shapes = {n: v.aval.shape for n, v in self.outputs.items() if self.leaves[n] == leaf}
        arrays = {n: values[invars[n]] for n in shapes}
        for n, x in arrays.items():
            if x is None and blocks.number > 1:
                arrays[n] = to_host(blocks.sharded(filled(invars[n].aval)))

        def compute(i: Any, there: Arrays) -> Arrays:
            take = lambda x, axis: blocks.take(x, i, axis)
            rows = {invars[n]: x for n, x in there.items()}
            rows |= {
                v: take(values[v], 0) if self.leaf_of.get(v) == leaf else values[v] for v in taken if v not in rows
            }
            wanted = [(rows // blocks.number, *rest) for rows, *rest in shapes.values()]
            return dict(zip(shapes, on_rows(part, read(taken, rows), take, wanted), strict=True))

        on_host = arrays.keys() & self.on_host
        return Stream(blocks, arrays, on_host, {n for n in on_host if invars[n] in taken}, compute)


def _part_of(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], results: Sequence[Any]) -> tuple[Jaxpr, list[Var]]:
    """Return some equations of a jaxpr as one of their own, as far as these results need them, and what it takes."""
    made = {v for eqn in eqns for v in eqn.outvars}
    read_there = variables([*(v for eqn in eqns for v in eqn.invars), *results])
    taken = [v for v in dict.fromkeys(read_there) if v not in made]
    part = jaxpr.replace(
        constvars=[], consts=[], invars=taken, outvars=[*results], eqns=[*eqns], debug_info=with_unknown_names(jaxpr)
    )
    live, used = dce_jaxpr(part, [True] * len(results))
    return live, list(itertools.compress(taken, used))


def _with_single_conds(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr in which each `cond` has one result, and the operands that this needs: those of one leaf."""
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is cond_p and not eqn.effects:
            eqns += [_part_of(jaxpr, [eqn], [out])[0].eqns[0] for out in eqn.outvars]
        else:
            eqns.append(eqn)
    return with_needed_equations(jaxpr.replace(eqns=eqns))
