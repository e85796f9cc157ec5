"""Estimate the device memory that a traced step takes, from its jaxpr alone: what lives at once, in its order.

A value lives from the op that computes it to the last that reads it. A loop's iteration needs the most that lives at
once, and what is carried is written in place. As in `cost`, all between kernels is fused: what a kernel computes or
reads, what is reduced and what is returned is stored; what lies between is computed where it is read, and its operands
live until then.

XLA orders ops otherwise, merges some, keeps others twice, and leaves gaps between them. So this is an estimate, and
only the compiler knows: over the policies in benchmarks/results/ it is off by at most ERROR.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import cond_p, device_put_p, scan_p, while_p

from ..._engine.jaxprs.flat import Buffer, Division, Op, Straight, division, straight
from ..._engine.jaxprs.walk import nested, operands_of, walk
from ..._engine.layers.loops import backward_p, forward_p, loops_of
from ..._engine.layers.segments import Segment
from ..._engine.microbatches.interleaved import interleaved_p
from ..._jax import IN_PLACE, REDUCTIONS, SAME, SHARD_MAP, UNFUSED, is_attention, nbytes, on_host

ERROR = 0.2  # of an estimate

_OPENED = (forward_p, backward_p, interleaved_p)

Divisions = dict[tuple[int, ...], Division]


def divisions(args: Any) -> Divisions:
    """Return how values of the arguments' shapes are divided; of several arguments of a shape, the least counts."""
    shapes = [(jnp.shape(leaf), division(getattr(leaf, "sharding", None))) for leaf in jax.tree.leaves(args)]
    return {shape: parts for shape, parts in sorted(shapes, key=lambda each: each[1], reverse=True) if shape}


def argument_bytes(args: Any, in_host_memory: bool = False) -> int:
    """Return the bytes per device of arguments in its memory, or of those in host memory."""
    sharding_of = lambda leaf: getattr(leaf, "sharding", None)
    is_there = lambda leaf: on_host(jax.typeof(leaf)) or getattr(sharding_of(leaf), "memory_kind", "") == "pinned_host"
    share = lambda leaf: -(-nbytes(jax.typeof(leaf)) // division(sharding_of(leaf)).parts)
    return sum(share(leaf) for leaf in jax.tree.leaves(args) if is_there(leaf) == in_host_memory)


def step_bytes(jaxpr: Jaxpr, like: Divisions, donated: bool) -> int:
    """Return the most bytes per device that a step has at once, besides its arguments.

    Args:
      like: how values of a shape are divided, where the trace does not say it.
      donated: whether a result takes the place of an argument of its shape and dtype.
    """
    program = straight(jaxpr, _OPENED)
    free = Counter((x.aval.shape, x.aval.dtype) for x in program.inputs if x.aval.shape) if donated else Counter()
    in_place = set()
    for out in program.outputs:
        if out and free[key := (out.aval.shape, getattr(out.aval, "dtype", None))] > 0:
            free[key] -= 1
            in_place.add(out)
    like = _of_stacks(jaxpr) | like | _in_shard_maps(jaxpr, like)
    of_all_stages = {(shape[0] * shape[1], *shape[2:]): parts for shape, parts in like.items() if len(shape) > 2}
    return _Walk(of_all_stages | like, in_place).peak(program, ())  # layers of virtual stages, as the loss has them


def kept_bytes(jaxpr: Jaxpr) -> int:
    """Return the bytes per device of the residuals that layers keep there, in all gradients of a step together."""
    kept = 0
    for eqn, segments in _segments_in(jaxpr):
        schedule, beside = eqn.params.get("schedule"), eqn.primitive is interleaved_p
        sets = schedule.slots if schedule else 1 + (beside and any(s.on_host for s in segments))
        kept += sets * sum(map(_stay, segments))
    return kept


def _stay(segment: Segment) -> int:
    """Return the bytes per device that the layers of a segment keep there; the last may be resident."""
    sizes = segment.layout.sizes(straight(segment.layer.forward))
    return segment.layers * sum(sizes.device) + (segment.layers - segment.on_host) * sum(sizes.host) + sum(sizes.once)


def _segments_in(jaxpr: Jaxpr) -> Iterator[tuple[JaxprEqn, list[Segment]]]:
    """Yield the equations that keep residuals of layers, with the segments of their scans."""
    for site in walk(jaxpr):
        if site.eqn.primitive in (forward_p, interleaved_p):
            yield site.eqn, [segment for loops in loops_of(site.eqn) for segment in loops.segments]


def _of_stacks(jaxpr: Jaxpr) -> Divisions:
    """Return how the stacks of residuals are divided: as their rows are, behind the axis of layers."""
    found: Divisions = {}
    for _, segments in _segments_in(jaxpr):
        for segment in segments:
            program = straight(segment.layer.forward)
            for row in segment.layout.split(program.outputs).device:
                if row:
                    found[(segment.layers, *row.aval.shape)] = Division(program.parts(row))
    return found


def _in_shard_maps(jaxpr: Jaxpr, like: Divisions) -> Divisions:
    """Return how values are divided in the `shard_map`s of a step that leave mesh axes to the compiler: as arguments
    that they take are, in the axes that are left."""
    found: Divisions = {}
    for site in walk(jaxpr):
        if site.eqn.primitive.name == SHARD_MAP:
            for taken, inside in zip(site.eqn.invars, site.eqn.params["jaxpr"].invars, strict=True):
                shape = getattr(taken.aval, "shape", ())
                if shape in like and (parts := nbytes(taken.aval) // max(1, nbytes(inside.aval))) > 1:
                    found[inside.aval.shape] = Division(max(1, like[shape].parts // parts))
    return found


class _Lives(NamedTuple):
    """When the values of a program live.

    Attributes:
      same: a view -> the value that it is a view of.
      stores: for each op the results that are in memory from then on.
      reads: for each op the stored values that it reads; none if it stores nothing itself.
      last: a stored value -> the op that reads it last.
    """

    same: dict[Buffer, Buffer]
    stores: list[list[Buffer]]
    reads: list[set[Buffer]]
    last: dict[Buffer, int]


class _Walk:
    """`in_place`: results that are written over arguments."""

    def __init__(self, like: Divisions, in_place: Collection[Buffer] = ()):
        self.like, self.in_place = like, in_place
        self.bodies: dict[int, tuple[Straight, list[Buffer]]] = {}

    def size(self, program: Straight, buffer: Buffer) -> int:
        if on_host(buffer.aval) or not hasattr(buffer.aval, "dtype") or buffer in self.in_place:
            return 0
        return program.share(buffer, self.like.get(buffer.aval.shape))

    def peak(self, program: Straight, state: Collection[Buffer]) -> int:
        """Return the most bytes at once of what a program computes and of its `state`, the inputs that it frees."""
        lives = _lives(program)
        for op in program.ops:
            if op.eqn.primitive in (scan_p, while_p):
                self.open(op)
        alive = {a: self.size(program, a) for a in state}
        most = sum(alive.values())
        for number, op in enumerate(program.ops):
            results = {r: self.size(program, r) for r in lives.stores[number]}
            ends = {a for a in lives.reads[number] if lives.last[a] == number and a in alive}
            if results:
                most = max(most, sum(alive.values()) + self.of_op(op, results, {a: alive[a] for a in ends}, lives.same))
            alive |= {r: size for r, size in results.items() if r in lives.last}
            for a in ends:
                del alive[a]
        return most

    def of_op(self, op: Op, results: dict[Buffer, int], ends: dict[Buffer, int], same: dict[Buffer, Buffer]) -> int:
        """Return the bytes of an op besides all that lives before it. `ends`: what nothing reads after it."""
        name = op.eqn.primitive.name
        if op.eqn.primitive in (scan_p, while_p):
            first, carry = _carry_of(op)
            handed_over = {same.get(x, x) for x in op.operands[first : first + carry] if x}
            rows = sum(size for r, size in results.items() if r in op.results[carry:])
            return self.iteration(op) + rows - sum(s for a, s in ends.items() if a in handed_over)
        if op.eqn.primitive is cond_p:
            given = [same.get(x, x) in ends if x else False for x in op.operands[1:]]  # a branch frees it
            return max(self.branch(body, given) for body in nested(op.eqn)) - sum(ends.values())
        in_place = (name in IN_PLACE or name not in UNFUSED) and results.keys() <= set(op.results)
        overwritten = [size for size in ends.values() if size in results.values() and in_place]
        return sum(results.values()) - max(overwritten, default=0)

    def branch(self, body: Jaxpr, given: Sequence[bool]) -> int:
        """Return the most that a branch has, with its results and the operands that it is `given`."""
        program = straight(body, _OPENED)
        return self.peak(program, list(itertools.compress(program.inputs, given)))

    def open(self, op: Op) -> None:
        """Open the body of a loop. What is carried is divided alike before and after it, and in each iteration, where
        the trace says it of one."""
        (first, carry), params = _carry_of(op), op.eqn.params
        body = straight(params["body_jaxpr"] if "body_jaxpr" in params else params["jaxpr"], _OPENED)
        state = body.inputs[len(body.inputs) - len(op.operands) + first :][:carry]
        for start, end, result in zip(state, body.outputs, op.results, strict=False):
            if end and end.aval.shape != start.aval.shape:  # it leaves a `shard_map`, within which its shape is local
                shards = nbytes(start.aval) // max(1, nbytes(end.aval))
                start.constraint = Division(shards * body.parts(end, self.like.get(end.aval.shape)))
            elif end:
                end.constraint = end.constraint or start.constraint
            result.constraint = start.constraint or result.constraint
        self.bodies[id(op.eqn)] = body, state

    def iteration(self, op: Op) -> int:
        """Return the most that an iteration of a loop has, with its carry."""
        body, state = self.bodies[id(op.eqn)]
        return self.peak(body, [x for x, r in zip(state, op.results, strict=False) if r not in self.in_place])


def _lives(program: Straight) -> _Lives:
    same: dict[Buffer, Buffer] = {}
    values = lambda buffers: [same.get(a, a) for a in buffers if a]
    stored, constant = set(program.inputs), set[Buffer]()
    for op in program.ops:
        operands, kind = values(op.operands), _kind(op)
        if kind == "view" and operands:
            same[op.results[0]] = operands[0]
        elif kind == "fused":
            constant.update(op.results if constant.issuperset(operands) else ())
        else:
            stored.update(op.results, operands if kind == "kernel" else ())
        if op.eqn.primitive is device_put_p:  # a constant is made where it goes
            stored.difference_update(constant.intersection(operands))
    stored.update(values(program.outputs), values(program.stored))

    behind: dict[Buffer, set[Buffer]] = {}  # what a value that is not stored is computed from

    def roots(buffers: Iterable[Buffer]) -> set[Buffer]:
        each = ({buffer} if buffer in stored else behind.get(buffer, set()) for buffer in buffers)
        return set[Buffer]().union(*each)

    reads: list[set[Buffer]] = []
    stores = [[r for r in op.results if r in stored] for op in program.ops]
    for op, of_op in zip(program.ops, stores, strict=True):
        read = roots(values(op.operands))
        behind |= dict.fromkeys([r for r in op.results if r not in stored], read)
        reads.append(read if of_op else set())
    last: dict[Buffer, int] = {}
    for number, read in enumerate(reads):
        last |= dict.fromkeys(read, number)
    last |= dict.fromkeys(roots(values(program.outputs)), len(program.ops))
    return _Lives(same, stores, reads, last)


def _kind(op: Op) -> str:
    name = op.eqn.primitive.name
    if name in SAME:
        return "view"
    if name in UNFUSED or is_attention(name):
        return "kernel"
    return "reduction" if name in REDUCTIONS else "fused"


def _carry_of(op: Op) -> tuple[int, int]:
    """Return where among a loop's operands its carry begins, and how long it is."""
    params = op.eqn.params
    if op.eqn.primitive is while_p:
        first = params["cond_nconsts"] + params["body_nconsts"]
        return first, len(op.operands) - first
    carried = [operand is None for operand in operands_of(op.eqn, params["jaxpr"])]
    return carried.index(True) if any(carried) else 0, sum(carried)
