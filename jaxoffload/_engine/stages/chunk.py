"""The passes of one microbatch through one chunk of the layers, on the stage that has it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax import lax

from ..._errors import Problem
from ..._policy import Policy, PolicyError
from ..decide.plan import Override
from ..host.limit import admitted
from ..layers import passes
from ..layers.layer import linearize, perturbed_carry
from ..layers.passes import Loops, Pass
from ..layers.placement import split_list
from ..layers.rows import filled
from ..layers.scan_primitive import OnStage, body_of, loops_of_layers
from ..layers.segments import SegmentResiduals, joined
from ..layers.transport import to_host
from .last_rows import beyond_a_row, empty_pieces, fetching, safely_filled, travels, writing
from .schedule import Schedule

Operands = dict[int, Any]  # of a scan, by their numbers


def chunk_loops(
    on_stage: OnStage, perturbed: Sequence[bool], policy: Policy, strict: bool, chunks: int, slots: int
) -> Loops:
    """Return the forward pass of the layers of a chunk, of so many in a scan, with so many microbatches on the host.

    All chunks are alike: each offloads as many layers, and none is resident, because microbatches wait behind all.
    """
    policy = replace(policy, resident_layers=0)
    body, params = body_of(on_stage.call_jaxpr), on_stage.call_jaxpr.eqns[0].params
    closed = perturbed_carry(body, perturbed, policy)
    layers = params["length"] // chunks
    layer = linearize(body, closed, policy, strict, Override())
    wanted = policy.offloaded_layers(params["length"]) // chunks if any(layer.sizes.host) else 0
    offloaded = 0
    if wanted:  # the caller counts all layers

        def need(count: int) -> int:
            each = count // chunks
            travels = each == layers or policy.other_layers == "recompute"  # the last one's row, in pieces
            more = beyond_a_row(layer, each) if each and travels else 0
            return slots * (sum(layer.sizes.host) * (each + 1) + more) if each else 0

        of = f" of {slots} microbatches per stage"
        offloaded = admitted("accumulate", [body.jaxpr], wanted * chunks, need, policy.on_host_full, of) // chunks
    if wanted > 1 and offloaded == 1:  # for want of room
        offloaded = 0
    if offloaded == 1:
        why = (
            f"stages: {params['length']} layers in {chunks} chunks, of which one layer each offloads: it needs two or "
            "more; use fewer virtual stages, another offload_layers, or save"
        )
        raise PolicyError([Problem("accumulate", f"accumulate: {why}")])
    how = {"length": layers, "reverse": False, "unroll": params["unroll"]}
    loops = loops_of_layers(body, closed, policy, strict, offloaded=offloaded, **how)
    return replace(loops, segments=joined(loops.segments))


class Slot(NamedTuple):
    """The arrays that a tick writes to, in a ring of them.

    Attributes:
      residuals: of each segment, without the rows of its last layer if those travel to the host.
      pieces: a stack for each of these rows, of the tick before.
    """

    residuals: list[SegmentResiduals[Any]]
    pieces: list[Any]

    def map(self, f: Callable[[Any], Any]) -> "Slot":
        """Apply `f` to all but per-layer stacks."""
        of = lambda r: r._replace(last=list(map(f, r.last)), once=list(map(f, r.once)))
        return self._replace(residuals=list(map(of, self.residuals)))


class Held(NamedTuple):
    """The state of a stage between two ticks.

    Attributes:
      xs, consts: the sums of the cotangents of xs, (virtual stages, layers of a chunk, ...), and of constants.
      along: what the microbatch that comes next takes along: operands, the carry, and the ys of all layers.
      back: what the one that comes next takes back: operands, cotangents of operands, of the carry, of the ys.
      last: rows of last layers that the tick before left. `ahead`: those that the next backward pass begins with.
      slots: the ring.
    """

    xs: list[Any]
    consts: list[Any]
    along: list[Any]
    back: list[Any]
    last: list[Any]
    ahead: list[Any]
    slots: list[Slot]

    def map(self, f: Callable[[Any], Any]) -> "Held":
        """Apply `f` to all but per-layer stacks."""
        consts, along, back, last, ahead = (list(map(f, xs)) for xs in self[1:-1])
        return Held(self.xs, consts, along, back, last, ahead, [slot.map(f) for slot in self.slots])


NOTHING = Held([], [], [], [], [], [], [])


@dataclass(frozen=True, eq=False)
class Chunks:
    """The layers of a scan, dealt.

    Attributes:
      loops, backward: the forward and the backward pass of the layers of a chunk. The latter is known when the loss
        behind the layers has been traced.
      schedule: of the stages. `axis`: of the mesh, over which they are.
      along: which operands a microbatch takes along, because they differ between microbatches.
      apart: those, and others that the loss computes from parameters: a microbatch takes the cotangents of these back,
        if there are any, and they are transposed for it alone.
    """

    loops: Loops
    schedule: Schedule
    axis: str
    along: tuple[int, ...]
    apart: frozenset[int]
    backward: Loops | None = None

    @property
    def layers(self) -> int:
        """How many a chunk has."""
        return self.loops.length

    @property
    def carry(self) -> range:
        """The numbers of the operands that are the carry."""
        return range(self.loops.consts, self.loops.consts + self.loops.carry)

    @property
    def ys(self) -> list[Any]:
        """Abstract values of the ys of all layers."""
        of_layer = self.loops.segments[0].jaxpr.out_avals[self.loops.carry : self.loops.results]
        layers = self.layers * self.schedule.chunks
        return [jax.ShapeDtypeStruct((layers, *aval.shape), aval.dtype) for aval in of_layer]

    @property
    def perturbed(self) -> tuple[list[int], list[int]]:
        """The numbers of the constants and of the xs whose cotangents are wanted."""
        perturbed = self.loops.segments[0].layer.perturbed
        those = lambda numbers: [i for i in numbers if perturbed[i]]
        return those(range(self.carry.start)), those(range(self.carry.stop, len(perturbed)))

    @property
    def summed(self) -> tuple[list[int], list[int]]:
        """Those of them whose cotangents stages sum over microbatches."""
        consts, xs = self.perturbed
        return [i for i in consts if i not in self.apart], [i for i in xs if i not in self.apart]

    @property
    def back(self) -> tuple[list[int], list[int]]:
        """The numbers of the operands that a microbatch takes back, and of those whose cotangents it takes back."""
        consts, xs = self.perturbed
        return [i for i, _ in self.loops.reads if i in self.along], [i for i in (*consts, *xs) if i in self.apart]

    def no_cotangents(self) -> list[Any]:
        """Return zeros, as the cotangents of the constants that stages sum."""
        loops = self.of_backward
        avals = dict(zip(self.perturbed[0], loops.segments[0].jaxpr.out_avals[: loops.consts], strict=True))
        return [filled(avals[i], 0) for i in self.summed[0]]

    def operands(self, fixed: Operands, along: Sequence[Any], stage: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the operands that a microbatch takes along, all of a forward pass, and the ys of all layers."""
        taken, carry, ys = split_list(along, [len(self.along), self.loops.carry])
        operands = fixed | self.operands_along(self.along, taken, stage)
        consts, xs = split_list([operands[i] for i in sorted(operands)], [self.loops.consts])
        return taken, [*consts, *carry, *xs], ys

    def operands_along(self, numbers: Sequence[int], values: Sequence[Any], stage: Any) -> Operands:
        """Return the operands that a microbatch has with it, as the stage needs them: its rows of xs."""
        pairs = zip(numbers, values, strict=True)
        return {i: x if i < self.loops.consts else self.rows_of(x, stage) for i, x in pairs}

    @property
    def of_backward(self) -> Loops:
        """The backward pass, once it is known."""
        assert self.backward is not None
        return self.backward

    def loops_of(self, loops: Loops, chunk: Any) -> Loops:
        """Return a pass over the layers of a chunk, among those of its stage."""
        first = chunk // self.schedule.stages * self.layers
        return replace(loops, first=first, length=self.schedule.virtual_stages * self.layers)

    def dealt(self, stack: Any) -> Any:
        """Return a stack of layers as (virtual stages, layers, ...): each stage has a part of each row."""
        layers, *shape = stack.shape
        return stack.reshape(self.schedule.virtual_stages, layers // self.schedule.virtual_stages, *shape)

    def rows_of(self, stack: Any, stage: Any) -> Any:
        """Return the rows of a stage's layers, of a stack for all layers."""
        virtual_stages, stages = self.schedule.virtual_stages, self.schedule.stages
        dealt = stack.reshape(virtual_stages, stages, self.layers, *stack.shape[1:])
        return joined_chunks(lax.dynamic_index_in_dim(dealt, stage, 1, keepdims=False))

    def with_rows(self, stack: Any, rows: Any, chunk: Any) -> Any:
        """Return a stack for all layers with the rows of a chunk out of those of its stage."""
        first = chunk // self.schedule.stages * self.layers
        of_chunk = lax.dynamic_slice_in_dim(rows, first, self.layers)
        return lax.dynamic_update_slice_in_dim(stack, of_chunk, chunk * self.layers, 0)

    def empty_slot(self) -> tuple[Slot, list[Any]]:
        """Return a slot, and rows of last layers that travel."""
        residuals, pieces, rows = [], [], []
        for segment in self.loops.segments:
            make = lambda segment=segment: passes.begin_forward(segment, [], []).saved
            jaxpr, tree = jax.make_jaxpr(make, return_shape=True)()
            made = jax.tree.unflatten(jax.tree.structure(tree), map(safely_filled, jaxpr.out_avals))
            host, last, device, once = made
            if travels(segment):
                pieces, rows, last = empty_pieces(segment, last), last, []
            residuals.append(SegmentResiduals(list(map(to_host, host)), last, device, once))
        return Slot(residuals, pieces), rows


def joined_chunks(stack: Any) -> Any:
    """Return a stack of a stage's chunks as one of its layers."""
    chunks, layers, *shape = stack.shape
    return stack.reshape(chunks * layers, *shape)


def forward_pass(chunks: Chunks, chunk: Any, fixed: Operands, held: Held, free: Slot) -> Pass:
    """Run the forward pass of a microbatch through a chunk: what the stage then holds of it, and nothing else.

    `free`: the slot to overwrite.
    """
    loops, stage = chunks.loops_of(chunks.loops, chunk), chunk % chunks.schedule.stages
    taken, operands, ys_of_all = chunks.operands(fixed, held.along, stage)
    steps = passes.forward_pass(loops, operands, [[*kept.host, *kept.device] for kept in free.residuals])
    (outs, residuals), last, pieces = yield from writing(steps, loops.segments[0], held.last, free.pieces)
    carry, ys = split_list(outs, [loops.carry])
    ys = [chunks.with_rows(x, y, chunk) for x, y in zip(ys_of_all, ys, strict=True)]
    return NOTHING._replace(along=[*taken, *carry, *ys], last=last, slots=[Slot(residuals, pieces)])


def backward_pass(chunks: Chunks, chunk: Any, fixed: Operands, held: Held, slot: Slot, counts: Any) -> Pass:
    """Run the backward pass of a microbatch through a chunk: what the stage then holds of it, and nothing else.

    It begins with the rows `held.last`, and those that the next tick begins with take the place of `held.ahead`.

    Args:
      slot: its residuals, and the pieces that the next tick begins with.
      counts: a boolean, whether the cotangents of xs are added to `held.xs`.
    """
    loops, stage = chunks.loops_of(chunks.of_backward, chunk), chunk % chunks.schedule.stages
    reads, with_cotangents = chunks.back
    taken, of_taken, cotangents = split_list(held.back, [len(reads), len(with_cotangents)])
    carry, ys_of_all = split_list(cotangents, [loops.carry])
    operands = fixed | chunks.operands_along(reads, taken, stage)
    cotangents = [*carry, *(chunks.rows_of(ct, stage) for ct in ys_of_all)]
    consts, xs = chunks.perturbed
    sums = dict(zip(chunks.summed[1], held.xs, strict=True)) | chunks.operands_along(with_cotangents, of_taken, stage)
    numbered = lambda those: {n: sums[i] for n, i in enumerate(those) if i in sums}
    first, saved = loops.segments[0], [kept._replace(last=[]) for kept in slot.residuals]
    steps = passes.backward_pass(
        loops,
        [operands[i] for i, _ in loops.reads],
        saved,
        cotangents,
        numbered(xs),
        of_consts=numbered(consts),
        counts=counts,
    )
    last = held.last if travels(first) else slot.residuals[0].last
    cts, ahead = yield from fetching(steps, loops.segments, last, held.ahead, slot.pieces)
    made = dict(zip((*consts, *xs), (*cts.consts, *cts.xs), strict=True))
    with_rows = lambda i, before: made[i] if i in consts else chunks.with_rows(before, made[i], chunk)
    back = [*taken, *map(with_rows, with_cotangents, of_taken), *cts.carry, *ys_of_all]
    of_consts, of_xs = ([made[i] for i in those] for those in chunks.summed)
    return NOTHING._replace(back=back, consts=of_consts, xs=of_xs, ahead=ahead)
