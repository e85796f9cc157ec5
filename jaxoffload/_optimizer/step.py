"""Run an update whose state is on the host: large arrays stream, in one loop those of as many blocks."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Var

from .._engine.jaxprs.inline import read
from .._engine.layers.rows import filled
from .._engine.layers.transport import to_device, to_host
from .._jax import nbytes
from .stream import Blocks, Stream, stream
from .update import Input, OfBlocks, Update

LOOP_BYTES = 256 * 2**20  # on the host, of the blocks of an iteration; more only if one leaf has more

Values = dict[Var, Any]


class Output(NamedTuple):
    """A result of an update: the leaf that it has rows of, if any; whether it goes to the host; the number of the input
    that it replaces, if it replaces one."""

    leaf: int | None
    on_host: bool
    into: int | None


class Step(NamedTuple):
    """An update, what its inputs and results are, and the blocks of each leaf that streams."""

    update: Update
    inputs: Sequence[Input]
    outputs: Sequence[Output]
    blocks: dict[int, Blocks]

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Return the results, from operands in the memory that `inputs` says."""
        invars, atoms = self.update.jaxpr.invars, self.update.jaxpr.outvars
        values = {v: x for v, x, it in zip(invars, operands, self.inputs, strict=True) if not it.on_host}
        values |= zip(self.update.jaxpr.constvars, self.update.jaxpr.consts, strict=True)
        on_host = list(dict.fromkeys(x.leaf for x in self.inputs if x.on_host and x.leaf not in self.blocks))
        at_once = [n for n, out in enumerate(self.outputs) if out.leaf not in [*self.blocks, *on_host]]
        parts = {leaf: self.update.of_blocks(leaf, [atoms[n] for n in self._of(leaf)]) for leaf in self.blocks}

        self.update.whole([*(atoms[n] for n in at_once), *(v for part in parts.values() for v in part.whole)], values)
        results = {n: self._placed(n, x) for n, x in zip(at_once, read([atoms[n] for n in at_once], values), strict=True)}
        for leaves in self._loops():
            streams = [self._stream(leaf, parts[leaf], values, operands) for leaf in leaves]
            for leaf, stacks, arrays in zip(leaves, *stream(streams), strict=True):
                to, there = iter(stacks), iter(arrays)
                results |= {n: next(to if self.outputs[n].on_host else there) for n in self._of(leaf)}
        before: list[Any] = []
        for leaf in on_host:  # one after another, so that the device holds one of them
            numbers = [n for n, x in enumerate(self.inputs) if x.leaf == leaf and x.on_host]
            fetched, _ = lax.optimization_barrier(([operands[n] for n in numbers], before))
            there = values | dict(zip([invars[n] for n in numbers], map(to_device, fetched), strict=True))
            self.update.whole([atoms[n] for n in self._of(leaf)], there)
            before = read([atoms[n] for n in self._of(leaf)], there)
            results |= {n: self._placed(n, x) for n, x in zip(self._of(leaf), before, strict=True)}
        return [results[n] for n in range(len(self.outputs))]

    def _placed(self, number: int, x: Any) -> Any:
        """Return a result where it belongs."""
        return to_host(x) if self.outputs[number].on_host else x

    def _of(self, leaf: int | None) -> list[int]:
        """Return the numbers of a leaf's results."""
        return [n for n, out in enumerate(self.outputs) if out.leaf == leaf]

    def _loops(self) -> list[list[int]]:
        """Return the leaves that stream, those of each loop."""
        loops: list[list[int]] = []
        for _, leaves in itertools.groupby(sorted(self.blocks, key=self._count), self._count):
            size = LOOP_BYTES
            for leaf in leaves:
                if size + self._block_bytes(leaf) > LOOP_BYTES:
                    loops.append([])
                    size = 0
                loops[-1].append(leaf)
                size += self._block_bytes(leaf)
        return loops

    def _count(self, leaf: int) -> int:
        return self.blocks[leaf].count

    def _block_bytes(self, leaf: int) -> int:
        on_host = (self.update.jaxpr.outvars[n].aval for n in self._of(leaf) if self.outputs[n].on_host)
        return sum(map(nbytes, on_host)) // self._count(leaf)

    def _stream(self, leaf: int, part: OfBlocks, values: Values, operands: Sequence[Any]) -> Stream:
        blocks, outputs = self.blocks[leaf], [(n, self.outputs[n]) for n in self._of(leaf)]
        avals = self.update.jaxpr.out_avals
        taken = [number for number, v in enumerate(self.update.jaxpr.invars) if v in part.inputs]
        on_host = [out.into for _, out in outputs if out.on_host and out.into is not None]
        given = {v: values[v] for v in part.whole}

        def compute(i: Any, fetched: list[Any]) -> tuple[list[Any], list[Any]]:
            there = dict(zip(on_host, fetched, strict=True))
            block = lambda number: there[number] if number in there else blocks.take(operands[number], i)
            invars = self.update.jaxpr.invars
            rows = part.run(given | {invars[n]: block(n) for n in taken}, lambda x, axis: blocks.take(x, i, axis))
            goes = [x for x, (_, out) in zip(rows, outputs, strict=True) if out.on_host]
            return goes, [x for x, (_, out) in zip(rows, outputs, strict=True) if not out.on_host]

        stacks = [
            to_host(blocks.sharded(filled(avals[n]))) if out.into is None else operands[out.into]
            for n, out in outputs
            if out.on_host
        ]
        arrays = [operands[out.into] for _, out in outputs if not out.on_host]
        return Stream(blocks, bool(on_host), stacks, arrays, compute)
