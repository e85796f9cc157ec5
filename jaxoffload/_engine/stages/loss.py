"""A loss whose layers run on pipeline stages: what all devices compute together, before the layers and behind them.

It is computed where it is needed, also a second time: nothing of it is kept while a microbatch passes the stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from ..._jax import add_jaxvals
from ..layers.passes import Loops
from ..layers.rows import filled
from ..microbatches.passes import Program, Values, run_piece, taken, transpose_piece
from ..microbatches.pieces import Scan, Straight
from .chunk import Chunks


class Behind(NamedTuple):
    """What is known of a microbatch that has passed all layers.

    Attributes:
      results: of the loss.
      back: what it takes back to the last layer; `loops`: the backward pass of a chunk, which takes that.
      params: the cotangents of parameters, by their numbers; those that are not zero.
    """

    results: list[Any]
    back: list[Any]
    loops: Loops
    params: dict[int, Any]


@dataclass(frozen=True, eq=False)
class StagedLoss:
    """A divided loss, with one scan and at most one piece before it."""

    program: Program
    chunks: Chunks

    @property
    def scan(self) -> Scan:
        (scan,) = self.program.pieces.scans
        return scan

    @property
    def perturbed(self) -> tuple[bool, ...]:
        """Which operands of a layer have tangents: also a part of the carry that only later layers perturb."""
        return self.chunks.loops.segments[0].layer.perturbed

    @property
    def carry(self) -> range:
        """The numbers of the operands that are the carry."""
        return range(self.chunks.loops.consts, self.chunks.loops.consts + self.chunks.loops.carry)

    def operands(self, values: Values) -> list[Any]:
        """Those of the scan."""
        return [a.val if isinstance(a, Literal) else values[a] for a in self.scan.eqn.invars]

    def before(self, arguments: Values) -> list[Any]:
        """What a microbatch takes along to the first layer: operands that differ, and the carry.

        `arguments`: its values.
        """
        operands = self.operands(self._known(arguments)[0])
        return [operands[i] for i in (*self.chunks.along, *self.carry)]

    def _known(self, arguments: Values) -> tuple[Values, list[Any]]:
        """What is known of a microbatch before its layers, and the residuals of that."""
        values, first = self.program.values | arguments, self.program.pieces.pieces[0]
        residuals = run_piece(first, values, self.program.shared[0]) if isinstance(first, Straight) else []
        return values, residuals

    def results(self, arguments: Values, outs: Sequence[Any]) -> list[Any]:
        """Of the loss. `outs`: the carry and the ys."""
        return self._end(self._known(arguments)[0], outs)[0]

    def _end(self, values: Values, outs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results of the loss, and the residuals of what is behind the layers."""
        pieces = self.program.pieces
        values |= zip(self.scan.eqn.outvars, outs, strict=True)
        of_last = run_piece(pieces.last, values, self.program.shared[len(pieces.pieces)])
        return [a.val if isinstance(a, Literal) else values[a] for a in pieces.outvars], of_last

    def behind(self, arguments: Values, outs: Sequence[Any]) -> Behind:
        """Run what is behind the layers, forward and backward. `outs`: the carry and the ys."""
        values, residuals = self._known(arguments)
        operands, pieces = self.operands(values), self.program.pieces
        results, of_last = self._end(values, outs)
        cotangents = {pieces.outvars[0]: filled(jax.typeof(results[0]).to_ct_aval(), 1)}
        transpose_piece(self.program, len(pieces.pieces), of_last, cotangents)
        out_perturbed = self.chunks.loops.segments[0].layer.out_perturbed
        perturbed = [v for v, p in zip(self.scan.eqn.outvars, out_perturbed, strict=True) if p]
        given = taken(cotangents, perturbed)
        loops, present = self.program.backward_loops(self.chunks.loops, given)
        reads, with_cotangents = self.chunks.back
        zeros = [filled(jax.typeof(operands[i]).to_ct_aval(), 0) for i in with_cotangents]
        back = [*(operands[i] for i in reads), *zeros, *present]
        return Behind(results, back, loops, self._of_params(residuals, cotangents))

    def at_begin(self, arguments: Values, back: Sequence[Any]) -> dict[int, Any]:
        """The cotangents of parameters, from those that a microbatch has brought back from its first layer.

        `back`: of operands that differ, of the carry, and of the ys.
        """
        numbers = [*self.chunks.back[1], *(i for i in self.carry if self.perturbed[i])]
        cotangents: Values = {}
        for i, ct in zip(numbers, back[: len(numbers)], strict=True):
            if self.scan.perturbed[i]:
                v: Any = self.scan.eqn.invars[i]
                cotangents[v] = add_jaxvals(cotangents[v], ct) if v in cotangents else ct
        return self._of_params(self._known(arguments)[1], cotangents)

    def _of_params(self, residuals: list[Any], cotangents: Values) -> dict[int, Any]:
        """The cotangents of parameters, from those of what stands before the layers."""
        if isinstance(self.program.pieces.pieces[0], Straight):
            transpose_piece(self.program, 0, residuals, cotangents)
        return {number: cotangents[v] for number, v in enumerate(self.program.params) if v in cotangents}
