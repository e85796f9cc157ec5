"""room(): how much device memory a program's loops need while they run, estimated from its jaxpr alone.

A value lives from the op that computes it to the last that reads it, in the order of the jaxpr. A loop's iteration
needs the most that lives at once. As in `cost`, all between kernels is fused: what a kernel computes or reads, what is
reduced and what is returned is stored; what lies between is computed where it is read, and its operands live until
then. Results of fused ops that have an operand of their size in common are computed in one kernel.

XLA orders ops otherwise, keeps some values twice, in two layouts or for two iterations at once, and leaves gaps
between them. So this is an estimate; only the compiler knows.
"""

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.extend.core.primitives import cond_p, device_put_p, remat_p, scan_p, while_p

from ..._engine.jaxprs.flat import Buffer, Division, Op, Straight, division, straight
from ..._engine.jaxprs.walk import nested, operands_of
from ..._engine.layers.loops import backward_p, forward_p
from ..._engine.microbatches.interleaved import interleaved_p
from ..._engine.stages.schedule import TICK
from ..._jax import (
    FORWARD,
    IN_PLACE,
    REDUCTIONS,
    SAME,
    SHARD_MAP,
    UNFUSED,
    is_attention,
    nbytes,
    on_host,
    without_remat3,
)
from ..._text import short
from .joint import Passes

_WITH_LOOPS = (forward_p, backward_p)
_OPENED = (*_WITH_LOOPS, interleaved_p)
# Scopes of what keeps residuals of layers.
_KEEPS = (FORWARD, TICK, interleaved_p.name)

Shape = tuple[tuple[int, ...], Any]  # and the dtype


class Room(NamedTuple):
    """The most bytes per device that an iteration has, besides arguments, residuals and gradients.

    Attributes:
      layer: while a layer of a `scan` runs forward or backward: what is recomputed or in flight, its weights as they
        are cast, the residuals that come from the host for it and for the next layer.
      loop: in any other loop without such layers in it, such as that over chunks of the logits.

    Example:
      >>> from jaxoffload.proof import Room
      >>> max(Room(layer=3 * 2**20, loop=2**20)) // 2**20  # they do not run at the same time
      3
    """

    layer: int
    loop: int


@without_remat3
def room(f: Callable[..., Any], *args: Any, one_kernel: Collection[str] = ()) -> Room:
    """Estimate what the loops of a step need. Nothing runs.

    How auto mesh axes divide values is assumed as in `_engine/jaxprs/flat.py`. A value of an argument's shape is
    divided like the argument, and taken for its gradient where a loop carries it.

    Args:
      f: a training step; a loss is not differentiated here, so that its forward pass counts.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s with shardings.
      one_kernel: names of scopes, such as attention's, that are many equations here but one kernel where the program
        will run: nothing within them is stored.

    Returns:
      A `Room`, in bytes per device.

    Raises:
      TypeError: `one_kernel` is not a collection of names.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload.proof import room
      >>> def chunked(x, table):
      ...     add = lambda total, x: (total + jnp.sum(jnp.exp(x @ table)), None)
      ...     return jax.lax.scan(add, jnp.float32(0), x)[0]
      >>> room(chunked, jnp.ones((4, 64, 32)), jnp.ones((32, 1024))).loop // (4 * 64 * 1024)  # one chunk of logits
      1
    """
    one_kernel = names_of_scopes("room", one_kernel)
    return step_room(jax.jit(f).trace(*args).jaxpr, divisions(args), one_kernel)[0]


def names_of_scopes(caller: str, one_kernel: Any) -> tuple[str, ...]:
    """Return the argument `one_kernel` of `caller`. A string has characters, and some scope's name has each of them.

    Raises:
      TypeError: it is not a collection of names.
    """
    names = None if isinstance(one_kernel, str) or not isinstance(one_kernel, Iterable) else tuple(one_kernel)
    if names is None or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"{caller}: one_kernel must be names of scopes, such as ['attention'], got {short(one_kernel)}")
    return names


class Most(NamedTuple):
    """The most bytes at once, while layers run and at any other time."""

    layers: int
    elsewhere: int


Divisions = dict[tuple[int, ...], Division]


def divisions(args: Any) -> Divisions:
    """Return how values of the arguments' shapes are divided; of several arguments of a shape, the least counts."""
    shapes = [(jnp.shape(leaf), division(getattr(leaf, "sharding", None))) for leaf in jax.tree.leaves(args)]
    return {shape: parts for shape, parts in sorted(shapes, key=lambda each: each[1], reverse=True) if shape}


def step_room(
    jaxpr: Jaxpr,
    like: Divisions,
    one_kernel: Collection[str],
    *,
    stacks: Collection[Shape] = (),
    written_over: bool = False,
    held: Mapping[tuple[int, ...], int] = MappingProxyType({}),
    in_place: Collection[Shape] = (),
) -> tuple[Room, Most]:
    """Return what the loops of a step need, and the most bytes per device that it has at once besides its arguments.

    Args:
      stacks: shapes and dtypes that are not counted, such as those of what layers keep.
      written_over: whether a result takes the place of an argument of its shape and dtype (which is donated).
      held: into how many parts pipeline stages divide what they hold, by its shape, if they are known.
      in_place: shapes and dtypes of gradients that backward passes of layers add to sums where these are.
    """
    program = straight(jaxpr, _OPENED)
    free = Counter((x.aval.shape, x.aval.dtype) for x in program.inputs if x.aval.shape) if written_over else Counter()
    nothing = set()
    for out in program.outputs:
        if out and free[key := (out.aval.shape, getattr(out.aval, "dtype", None))] > 0:
            free[key] -= 1
            nothing.add(out)
    most = {}
    for phase in ("layers", "elsewhere"):
        shapes = {"stacks": frozenset(stacks), "in_place": frozenset(in_place)}
        walk = _Walk(like, one_kernel, nothing, phase=phase, held=held, **shapes)
        most[phase] = walk.peak(program, ())
    return Room(walk.layer, walk.loop), Most(**most)


def layer_room(
    layer: Passes, forward: Straight, taken: Sequence[bool], like: Divisions, one_kernel: Collection[str]
) -> tuple[int, int]:
    """Return the most bytes per device that a layer of a scan has at once, in either pass: with a row of all that it
    keeps, and if all of that stays in stacks on the device, where what is fused reads it.

    Args:
      forward: its forward pass.
      taken: of each operand of its backward pass whether a kernel takes it, which needs a copy of the row.
    """
    walk, reverse = _Walk(like, one_kernel), straight(layer.backward)
    rows = [x for x, k in zip(reverse.inputs, layer.layout.kept, strict=False) if k.place in ("host", "device")]
    given = [*rows, *reverse.inputs[len(layer.layout.kept) :]]
    begin = walk.peak(forward, forward.inputs[layer.consts : layer.consts + layer.carry])
    lives = walk.lives(reverse)
    with_rows = walk.peak(reverse, given, lives)
    walk.nothing |= set(rows).difference(itertools.compress(reverse.inputs, taken))
    return max(begin, with_rows), max(begin, walk.peak(reverse, given, lives))


class _Lives(NamedTuple):
    """When the values of a program live.

    Attributes:
      same: a view -> the value that it is a view of.
      stores: for each op the values that are in memory from then on: its results, and those that XLA computes in the
        same kernel.
      reads: for each op the stored values that it reads; none if it stores nothing itself.
      last: a stored value -> the op that reads it last.
    """

    same: dict[Buffer, Buffer]
    stores: list[list[Buffer]]
    reads: list[set[Buffer]]
    last: dict[Buffer, int]


def _join(stores: list[list[Buffer]], reads: list[set[Buffer]], places: Sequence[str | None]) -> None:
    """Let each op store what XLA computes in one kernel: results of fused ops that have an operand of their size in
    common, such as the gradients of a gate and of what it multiplies. The kernel runs when it has all that it reads.

    `places`: of each fused op, where it stands; XLA fuses nothing across what bounds it. None: it is not fused.
    """
    size = lambda buffer: math.prod(getattr(buffer.aval, "shape", ()))
    ancestors: dict[Buffer, int] = {}  # the ops that a value comes from, as bits
    begins: dict[Buffer, int] = {}
    kernels: list[list[int]] = []  # the ops of each
    masks: list[int] = []  # these as bits
    readers: dict[tuple[str, Buffer], list[int]] = {}  # the kernels of a place that have an operand in common
    for number, (results, read) in enumerate(zip(stores, reads, strict=True)):
        before = functools.reduce(operator.or_, (ancestors.get(r, 0) for r in read), 0)
        ancestors |= dict.fromkeys(results, before | 1 << number)
        begins |= dict.fromkeys(results, number)
        place = places[number]
        if place is not None and results:
            common = [(place, r) for r in read if size(r) == size(results[0]) > 1]
            others = sorted(k for key in common for k in readers.get(key, ()) if not before & masks[k])
            kernel = others[0] if others else len(kernels)
            if not others:
                kernels.append([])
                masks.append(0)
            kernels[kernel].append(number)
            masks[kernel] |= 1 << number
            for key in common:
                readers.setdefault(key, []).append(kernel)
    placed = set[int]()
    for ops in kernels:
        ready = max((begins.get(r, -1) for n in ops for r in reads[n]), default=-1)
        at = min((n for n in ops if n > ready), default=None)
        early = {r for n in ops for r in stores[n] if at is not None and n < at}
        # Kernels that need each other's results are none.
        if len(ops) > 1 and at is not None and not any(early & reads[n] for n in placed if n <= at):
            _store_at(at, ops, stores, reads)
            begins |= dict.fromkeys(stores[at], at)
            placed.add(at)


def _store_at(at: int, ops: Sequence[int], stores: list[list[Buffer]], reads: list[set[Buffer]]) -> None:
    """Move to one op what these store and read. What was read of that before is read right after it instead, so that it
    lives until then; at a program's end nothing does."""
    results, read = [r for n in ops for r in stores[n]], set[Buffer]().union(*(reads[n] for n in ops))
    for n in ops:
        stores[n], reads[n] = [], set()
    stores[at], reads[at] = results, read
    for n in range(at):
        if early := reads[n].intersection(results):
            reads[n] -= early
            if at + 1 < len(reads):
                reads[at + 1] |= early


class _Walk:
    """`nothing`, what forward passes of layers keep in the shapes of `stacks`, and what backward passes make in the
    shapes of `in_place`, count for nothing.

    `phase`: whether only what happens while layers run, or only what happens elsewhere, counts for `peak`; None: both.
    """

    def __init__(
        self,
        like: Divisions,
        one_kernel: Collection[str],
        nothing: Collection[Buffer] = (),
        *,
        stacks: Collection[Shape] = (),
        phase: str | None = None,
        held: Mapping[tuple[int, ...], int] = MappingProxyType({}),
        in_place: Collection[Shape] = (),
    ):
        self.like, self.one_kernel, self.phase = like, one_kernel, phase
        self.nothing, self.stacks, self.held, self.in_place = set(nothing), stacks, held, in_place
        self.layer = self.loop = self.layers_seen = 0

    def kind(self, op: Op) -> str:
        name = op.eqn.primitive.name
        if name in SAME:
            return "view"
        if any(scope in op.scope for scope in self.one_kernel):
            return "fused"
        if name in UNFUSED or is_attention(name):
            return "kernel"
        return "reduction" if name in REDUCTIONS else "fused"

    def lives(self, program: Straight) -> _Lives:
        same: dict[Buffer, Buffer] = {}
        values = lambda buffers: [same.get(a, a) for a in buffers if a]
        stored, constant = set(program.inputs), set[Buffer]()
        kinds = [self.kind(op) for op in program.ops]
        for op, kind in zip(program.ops, kinds, strict=True):
            operands = values(op.operands)
            if kind == "view" and operands:
                same[op.results[0]] = operands[0]
            elif kind == "fused":
                constant.update(op.results if constant.issuperset(operands) else ())
            else:
                stored.update(op.results, operands if kind == "kernel" else ())
            if op.eqn.primitive is device_put_p:  # a constant is made where it goes
                stored.difference_update(constant.intersection(operands))
        stored.update(values(program.outputs), values(program.fenced))

        behind: dict[Buffer, set[Buffer]] = {}  # what a value that is not stored is computed from

        def roots(buffers: Iterable[Buffer]) -> set[Buffer]:
            found = set[Buffer]()
            for buffer in buffers:
                if buffer in stored:
                    found.add(buffer)
                elif buffer in behind:
                    found |= behind[buffer]
            return found

        reads: list[set[Buffer]] = []
        stores = [[r for r in op.results if r in stored] for op in program.ops]
        for op, of_op in zip(program.ops, stores, strict=True):
            read = roots(values(op.operands))
            behind |= dict.fromkeys([r for r in op.results if r not in stored], read)
            reads.append(read if of_op else set())
        fused = zip(program.ops, kinds, strict=True)
        _join(stores, reads, [_inside_checkpoint(op) if kind == "fused" else None for op, kind in fused])
        last: dict[Buffer, int] = {}
        for number, read in enumerate(reads):
            last |= dict.fromkeys(read, number)
        last |= dict.fromkeys(roots(values(program.outputs)), len(program.ops))
        return _Lives(same, stores, reads, last)

    def size(self, program: Straight, buffer: Buffer) -> int:
        if on_host(buffer.aval) or not hasattr(buffer.aval, "dtype") or buffer in self.nothing:
            return 0
        if parts := self.held.get(buffer.aval.shape):
            return -(-nbytes(buffer.aval) // parts)
        return program.share(buffer, self.like.get(buffer.aval.shape))

    def leave_out(self, op: Op, buffers: Iterable[Buffer]) -> None:
        """Count those of an op's values for nothing that are `stacks` or added up `in_place`."""
        if not self.stacks and not self.in_place:
            return
        shapes = self.stacks if _keeps(op) else self.in_place if backward_p.name in op.scope else ()
        self.nothing |= {x for x in buffers if (x.aval.shape, getattr(x.aval, "dtype", None)) in shapes}

    def peak(self, program: Straight, state: Collection[Buffer], lives: _Lives | None = None) -> int:
        """Return the most bytes at once of what a program computes and of its `state`, the inputs that it frees."""
        lives = lives or self.lives(program)
        for op in program.ops:
            self.leave_out(op, op.results)
        alive = {a: self.size(program, a) for a in state}
        most = sum(alive.values())
        for number, op in enumerate(program.ops):
            results = {r: self.size(program, r) for r in lives.stores[number]}
            ends = {a for a in lives.reads[number] if lives.last[a] == number and a in alive}
            before = self.layers_seen
            if results:
                more = self.of_op(op, results, {a: alive[a] for a in ends}, lives.same)
                inside = not _runs_layers(op) and self.layers_seen > before  # a loop with layers in it
                if self.phase in (None, "layers" if _runs_layers(op) else "elsewhere") or inside:
                    most = max(most, sum(alive.values()) + more)
            alive |= {r: size for r, size in results.items() if r in lives.last}
            for a in ends:
                del alive[a]
        return most

    def of_op(self, op: Op, results: dict[Buffer, int], ends: dict[Buffer, int], same: dict[Buffer, Buffer]) -> int:
        """Return the bytes of an op besides all that lives before it. `ends`: what nothing reads after it."""
        name = op.eqn.primitive.name
        if _is_tick(op):  # It writes over what it is given, and its layers are counted by themselves.
            self.layers_seen += 1
            return max(0, sum(results.values()) - sum(ends.values()))
        if op.eqn.primitive in (scan_p, while_p):
            first, carry = _carry_of(op)
            handed_over = {same.get(x, x) for x in op.operands[first : first + carry] if x}
            rows = sum(size for r, size in results.items() if r in op.results[carry:])
            return self.iteration(op, first, carry) + rows - sum(s for a, s in ends.items() if a in handed_over)
        branches = nested(op.eqn) if op.eqn.primitive is cond_p else ()
        inside = max((self.peak(straight(b, _OPENED), ()) for b in branches), default=0)
        in_place = (name in IN_PLACE or name not in UNFUSED) and results.keys() <= set(op.results)
        overwritten = [size for size in ends.values() if size in results.values() and in_place]
        return inside + sum(results.values()) - max(overwritten, default=0)

    def iteration(self, op: Op, first: int, carry: int) -> int:
        """Return the most that an iteration of a loop has, with its carry. What it has without the stacks that it
        writes becomes `layer` or `loop`."""
        params = op.eqn.params
        body = straight(params["body_jaxpr"] if "body_jaxpr" in params else params["jaxpr"], _OPENED)
        state = body.inputs[len(body.inputs) - len(op.operands) + first :][:carry]
        _divide_alike(state, body.outputs)
        self.leave_out(op, state)
        before, phase = self.layers_seen, self.phase
        self.phase = None if _runs_layers(op) else phase
        most = self.peak(body, state)
        self.phase = phase
        stacks = {a for a in state if a in body.outputs or a.aval.shape in self.like}  # residuals, and gradients
        working = most - sum(self.size(body, a) for a in stacks)
        if _runs_layers(op):
            self.layer, self.layers_seen = max(self.layer, working), self.layers_seen + 1
        elif self.layers_seen == before:
            self.loop = max(self.loop, working)
        return most


def _runs_layers(op: Op) -> bool:
    """Return if an op is a part of a pass of a `scan`, or all that runs of it in a tick on pipeline stages."""
    return any(primitive.name in op.scope for primitive in _WITH_LOOPS) or _is_tick(op)


def _is_tick(op: Op) -> bool:
    """Return if an op is the passes of a tick, with a branch for each stage."""
    return op.eqn.primitive is cond_p and TICK in op.scope and SHARD_MAP in op.scope


def _inside_checkpoint(op: Op) -> str:
    """Return the scope of the checkpoint that an op is in, around which there is a barrier; "" if it is in none."""
    outside, checkpoint, inside = op.scope.rpartition(remat_p.name)
    return outside + checkpoint + inside.partition("/")[0] if checkpoint else ""


def _keeps(op: Op) -> bool:
    return any(scope in op.scope for scope in _KEEPS)


def _divide_alike(given: Collection[Buffer], left: Collection[Buffer | None]) -> None:
    """Divide what an iteration is given like what it leaves for the next one, where the trace says so of only one."""
    for start, end in zip(given, left, strict=False):
        if end and end.aval.shape != start.aval.shape:  # it leaves a `shard_map`, within which its shape is local
            start.constraint = start.constraint or Division(nbytes(start.aval) // max(1, nbytes(end.aval)))
        elif end:
            end.constraint = end.constraint or start.constraint


def _carry_of(op: Op) -> tuple[int, int]:
    """Return where among a loop's operands its carry begins, and how long it is."""
    params = op.eqn.params
    if op.eqn.primitive is while_p:
        first = params["cond_nconsts"] + params["body_nconsts"]
        return first, len(op.operands) - first
    carried = [operand is None for operand in operands_of(op.eqn, params["jaxpr"])]
    return carried.index(True) if any(carried) else 0, sum(carried)
