"""How a program's values are divided over devices, through its loops, as far as a trace tells.

As `Straight.parts` says of one straight piece of a program.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr
from jax.extend.core.primitives import cond_p, scan_p
from jax.sharding import NamedSharding, PartitionSpec

from ..._engine.jaxprs.flat import Buffer, division, straight
from ..._engine.jaxprs.walk import nested
from ..._engine.layers.placement import Stored
from ..._engine.layers.segments import Segment
from ..._jax import FORWARD, SAME, nbytes

Rows = Mapping[int, int]  # the length of a first axis -> into how many parts it is divided at least


class Divided(NamedTuple):
    """Into how many parts a program's results are divided, those of a `shard_map` included; and each value with a name,
    in the program or in its loops, in its shard. `rows`: of the program and of what is around it."""

    results: list[int]
    named: dict[str, int]
    rows: Rows


def divided(jaxpr: Jaxpr, rows: Rows) -> Divided:
    """Return how the values of a program are divided; `rows`: what is known from around it."""
    program = straight(jaxpr)
    both = [*program.rows.items(), *rows.items()]
    program = program._replace(rows={length: min(parts for n, parts in both if n == length) for length, _ in both})
    inside: dict[Buffer, int] = {}  # a result of a loop is divided as it is there, where its rows are made
    named: dict[str, int] = {}

    def parts(buffer: Buffer | None) -> int:
        while buffer and buffer.moved and not buffer.constraint:
            buffer = buffer.moved
        if buffer is None:
            return 1
        return program.parts(buffer) if buffer.constraint else inside.get(buffer) or program.parts(buffer)

    for op in program.ops:
        bodies = [divided(body, program.rows) for body in nested(op.eqn)]
        for body in bodies:
            named = body.named | named
        if op.eqn.primitive.name in SAME and op.operands and op.operands[0]:
            inside[op.results[0]] = parts(op.operands[0])
        elif op.eqn.primitive in (scan_p, cond_p):
            inside |= zip(op.results, map(min, zip(*(body.results for body in bodies), strict=True)), strict=True)
        elif op.eqn.primitive.name == FORWARD:
            loops = op.eqn.params["loops"]
            each = [n for segment in loops.segments for n in _of_segment(segment, program.rows)]
            inside |= zip(op.results[loops.results :], each, strict=True)
    named |= {name: parts(buffer) for name, buffer in program.named.items()}
    shards = lambda var, x: max(nbytes(var.aval), 1) // max(nbytes(x.aval), 1) if x else 1
    results = [shards(var, x) * parts(x) for var, x in zip(jaxpr.outvars, program.outputs, strict=True)]
    return Divided(results, named, program.rows)


def _of_segment(segment: Segment, rows: Rows) -> list[int]:
    """The parts of each leaf of a segment's `SegmentResiduals`, in the order of `Segment.sources`."""
    host, device, once = parts_of_stored(segment, rows)
    return [*host, *host, *device, *once]


def parts_of_stored(segment: Segment, rows: Rows) -> Stored[int]:
    """Return into how many parts each residual of a layer is divided."""
    return segment.layout.split(divided(segment.layer.forward, rows).results)


def rows_of(arguments: Iterable[Any], axis: int = 0) -> dict[int, int]:
    """Return how the first axes of arguments, or of their rows (`axis=1`), are divided, by their lengths."""
    rows: dict[int, int] = {}
    for argument in arguments:
        if len(argument.shape) > axis and isinstance(sharding := getattr(argument, "sharding", None), NamedSharding):
            of_axis = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[axis:]))
            length, parts = argument.shape[axis], division(of_axis).rows
            rows[length] = min(rows.get(length, parts), parts)
    return rows
