"""How a program's values are divided over devices, through its loops, as far as a trace tells.

As in `device_bytes`, for the values that a forward pass keeps, and for all that have a plan's name.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import cond_p, scan_p
from jax.sharding import NamedSharding, PartitionSpec

from ..._engine.jaxprs.flat import Buffer, Straight, division, straight
from ..._engine.jaxprs.walk import nested
from ..._engine.layers.placement import Stored
from ..._engine.layers.segments import Segment
from ..._jax import FORWARD, SAME, nbytes

Rows = Mapping[int, int]  # the length of a first axis -> into how many parts it is divided at least


class Divided:
    """A program, and into how many parts its values are divided.

    Attributes:
      rows: what is known from around the program.
    """

    def __init__(self, jaxpr: Jaxpr, rows: Rows):
        self._jaxpr = jaxpr
        self._program = _with_rows(straight(jaxpr), rows)
        self._made_by = {x: (op, k) for op in self._program.ops for k, x in enumerate(op.results)}

    @property
    def rows(self) -> Rows:
        return self._program.rows

    def of_result(self, number: int) -> int:
        """Return into how many parts a result is divided; those of a `shard_map` count."""
        buffer = self._program.outputs[number]
        if buffer is None:
            return 1
        of_shards = max(nbytes(self._jaxpr.outvars[number].aval), 1) // max(nbytes(buffer.aval), 1)
        return of_shards * self._of(buffer)

    def named(self) -> Iterator[tuple[str, int]]:
        """Yield each name in the program and in its loops, with the parts of its value; of a shard, if it is one."""
        for name, buffer in self._program.named.items():
            yield name, self._of(buffer)
        for op in self._program.ops:
            for body in nested(op.eqn):
                yield from Divided(body, self.rows).named()

    def _of(self, buffer: Buffer) -> int:
        while buffer.moved and not buffer.constraint:
            buffer = buffer.moved
        op, number = self._made_by.get(buffer, (None, 0))
        if op is None or buffer.constraint:
            return self._program.parts(buffer)
        if op.eqn.primitive.name in SAME and (operand := op.operands[0]):
            return self._of(operand)
        return self._of_loop(op.eqn, number) or self._program.parts(buffer)

    def _of_loop(self, eqn: JaxprEqn, number: int) -> int | None:
        """A result of a loop is divided as it is inside, where its rows are made."""
        if eqn.primitive is scan_p:
            return Divided(eqn.params["jaxpr"], self.rows).of_result(number)
        if eqn.primitive is cond_p:
            return min(Divided(body, self.rows).of_result(number) for body in eqn.params["branches"])
        if eqn.primitive.name == FORWARD and number >= (loops := eqn.params["loops"]).results:
            each = [parts for segment in loops.segments for parts in self._of_segment(segment)]
            return each[number - loops.results]
        return None

    def _of_segment(self, segment: Segment) -> list[int]:
        """The parts of each leaf of a segment's `SegmentResiduals`, in the order of `Segment.sources`."""
        host, device, once = parts_of_stored(segment, self.rows)
        return [*host, *host, *device, *once]


def parts_of_stored(segment: Segment, rows: Rows) -> Stored[int]:
    """Return into how many parts each residual of a layer is divided."""
    forward = segment.layer.forward
    return segment.layout.split(list(map(Divided(forward, rows).of_result, range(len(forward.outvars)))))


def _with_rows(program: Straight, rows: Rows) -> Straight:
    both = [known for known in (program.rows, rows) if known]
    lengths = {length for known in both for length in known}
    return program._replace(rows={n: min(known[n] for known in both if n in known) for n in lengths})


def rows_of(arguments: Iterable[Any], axis: int = 0) -> dict[int, int]:
    """Return how the first axes of arguments, or of their rows (`axis=1`), are divided, by their lengths."""
    rows: dict[int, int] = {}
    for argument in arguments:
        if len(argument.shape) > axis and isinstance(sharding := getattr(argument, "sharding", None), NamedSharding):
            of_axis = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[axis:]))
            length, parts = argument.shape[axis], division(of_axis).rows
            rows[length] = min(rows.get(length, parts), parts)
    return rows
