"""The passes of one microbatch through one chunk of the layers, on the stage that has it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax import lax

from ..._policy import Policy
from ..decide.plan import Override
from ..host.limit import admitted
from ..layers.layer import linearize, perturbed_carry
from ..layers.passes import (
    BackwardState,
    Cotangents,
    ForwardState,
    LayerLoop,
    Loops,
    Pass,
    backward_layer,
    begin_forward,
    empty_cotangents,
    empty_ys,
    forward_layer,
)
from ..layers.placement import split_list
from ..layers.rows import filled
from ..layers.scan_primitive import OnStage, body_of, loops_of_layers
from ..layers.segments import Segment, SegmentResiduals, joined
from ..layers.transport import to_host
from .last_rows import (
    Fetching,
    Writing,
    beyond_a_row,
    empty_pieces,
    fetching,
    in_place_of,
    joined_rows,
    safely_filled,
    writing,
)

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
        raise ValueError(
            f"accumulate: stages: {params['length']} layers in {chunks} chunks, of which one layer each offloads: it "
            "needs two or more; use fewer virtual stages, another offload_layers, or save"
        )
    how = {"length": layers, "reverse": False, "unroll": params["unroll"]}
    loops = loops_of_layers(body, closed, policy, strict, offloaded=offloaded, **how)
    return replace(loops, segments=joined(loops.segments))


class Slot(NamedTuple):
    """A microbatch between its passes through a chunk.

    Attributes:
      residuals: of each segment, without the rows of its last layer if those travel to the host.
      pieces: a stack for each of these.
    """

    residuals: list[SegmentResiduals[Any]]
    pieces: list[Any]

    def map(self, f: Callable[[Any], Any]) -> "Slot":
        """Apply `f` to all but per-layer stacks."""
        of = lambda r: r._replace(last=list(map(f, r.last)), once=list(map(f, r.once)))
        return self._replace(residuals=list(map(of, self.residuals)))


def travels(segment: Segment) -> bool:
    """Return if the residuals of its last layer go to the host too."""
    return bool(segment.copies) and segment.on_host == segment.layers


@dataclass(frozen=True, eq=False)
class Chunks:
    """The layers of a scan, dealt.

    Attributes:
      loops, backward: the forward and the backward pass of the layers of a chunk. The latter is known when the loss
        behind the layers has been traced.
      stages, virtual_stages: how many stages, and how many chunks on each.
      along: which operands a microbatch takes along, because they differ between microbatches.
      apart: which others have cotangents that a microbatch takes back, because the loss computes these operands from
        parameters: each microbatch's cotangents are transposed by themselves.
    """

    loops: Loops
    stages: int
    virtual_stages: int
    along: tuple[int, ...]
    apart: frozenset[int] = frozenset()
    backward: Loops | None = None

    @property
    def layers(self) -> int:
        """How many a chunk has."""
        return self.loops.segments[-1].stop

    @property
    def perturbed(self) -> tuple[list[int], list[int]]:
        """The numbers of the constants and of the xs whose cotangents are wanted."""
        perturbed, first = self.loops.segments[0].layer.perturbed, self.loops.consts + self.loops.carry
        those = lambda numbers: [i for i in numbers if perturbed[i]]
        return those(range(self.loops.consts)), those(range(first, len(perturbed)))

    @property
    def summed(self) -> tuple[list[int], list[int]]:
        """Those of them whose cotangents stages sum over microbatches."""
        consts, xs = self.perturbed
        return [i for i in consts if not self._returns(i)], [i for i in xs if not self._returns(i)]

    @property
    def back(self) -> tuple[list[int], list[int]]:
        """The numbers of the operands that a microbatch takes back, and of those whose cotangents it takes back."""
        consts, xs = self.perturbed
        return [i for i, _ in self.loops.reads if i in self.along], [i for i in (*consts, *xs) if self._returns(i)]

    def _returns(self, number: int) -> bool:
        return number in self.along or number in self.apart

    def no_cotangents(self) -> list[Any]:
        """Return zeros, as the cotangents of the constants that stages sum."""
        loops = self.of_backward
        avals = dict(zip(self.perturbed[0], loops.segments[0].jaxpr.out_avals[: loops.consts], strict=True))
        return [filled(avals[i], 0) for i in self.summed[0]]

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
        first = chunk // self.stages * self.layers
        return replace(loops, first=first, length=self.virtual_stages * self.layers)

    def rows_of(self, stack: Any, stage: Any) -> Any:
        """Return the rows of a stage's layers, of a stack for all layers."""
        shape = stack.shape[1:]
        dealt = stack.reshape(self.virtual_stages, self.stages, self.layers, *shape)
        rows = lax.dynamic_index_in_dim(dealt, stage, 1, keepdims=False)
        return rows.reshape(self.virtual_stages * self.layers, *shape)

    def with_rows(self, stack: Any, rows: Any, chunk: Any) -> Any:
        """Return a stack for all layers with the rows of a chunk out of those of its stage."""
        first = chunk // self.stages * self.layers
        of_chunk = lax.dynamic_slice_in_dim(rows, first, self.layers)
        return lax.dynamic_update_slice_in_dim(stack, of_chunk, chunk * self.layers, 0)

    def empty_slot(self) -> tuple[Slot, list[Any]]:
        """Return a slot, and rows of last layers that travel."""
        residuals, pieces, rows = [], [], []
        for segment in self.loops.segments:
            make = lambda segment=segment: begin_forward(segment, [], []).saved
            jaxpr, tree = jax.make_jaxpr(make, return_shape=True)()
            made = jax.tree.unflatten(jax.tree.structure(tree), map(safely_filled, jaxpr.out_avals))
            host, last, device, once = made
            if travels(segment):
                pieces += empty_pieces(segment, last)
                rows += last
                last = []
            residuals.append(SegmentResiduals(list(map(to_host, host)), last, device, once))
        return Slot(residuals, pieces), rows


class Computed(NamedTuple):
    """The results of a forward pass through a chunk.

    Attributes:
      along: what the microbatch takes along.
      residuals: for its slot. `last`: the rows of last layers that travel to it.
      pieces: for the slot of the tick before: of the rows that the pass was given.
    """

    along: list[Any]
    residuals: list[SegmentResiduals[Any]]
    last: list[Any]
    pieces: list[Any]


def forward_pass(
    chunks: Chunks, chunk: Any, fixed: Operands, along: Sequence[Any], slot: Slot, last: list[Any]
) -> Pass:
    """Run the forward pass of a microbatch through a chunk: a `Computed`.

    `along`: what it has with it: operands, the carry, and the ys of all layers. `slot`: the residuals that it may
    overwrite, and the pieces of the tick before, whose rows are `last`.
    """
    loops, stage = chunks.loops_of(chunks.loops, chunk), chunk % chunks.stages
    taken, carry, ys_of_all = split_list(along, [len(chunks.along), loops.carry])
    operands = fixed | chunks.operands_along(chunks.along, taken, stage)
    consts = [operands[i] for i in range(loops.consts)]
    xs = [operands[i] for i in sorted(operands) if i >= loops.consts]
    ys, computed = empty_ys(loops), Computed([], [], [], [])
    rows, pieces = iter(last), iter(slot.pieces)
    for segment, free in zip(loops.segments, slot.residuals, strict=True):
        empty = begin_forward(segment, [], []).saved
        before = [next(rows) for _ in segment.copies] if travels(segment) else []
        run: Any = forward_layer(loops, segment, consts, xs)
        state: Any = ForwardState(carry, ys, SegmentResiduals(free.host, empty.last, free.device, empty.once))
        if travels(segment):
            run, state = writing(run, state, before, [next(pieces) for _ in before], segment)
        loop = LayerLoop(loops, segment, True, run, state)
        yield loop
        carry, ys, saved = loop.state[:3]
        if isinstance(loop.state, Writing):
            computed.last.extend(in_place_of(before, saved.last, segment))
            computed.pieces.extend(loop.state.pieces)
            saved = saved._replace(last=[])
        computed.residuals.append(saved)
    pairs = zip(ys_of_all, ys, strict=True)
    return computed._replace(along=[*taken, *carry, *(chunks.with_rows(x, y, chunk) for x, y in pairs)])


class Derived(NamedTuple):
    """The results of a backward pass through a chunk.

    Attributes:
      back: what the microbatch takes back.
      consts: the cotangents of constants that it does not take back; `xs`: the sums of those of xs.
      ahead: the rows of last layers that the next tick begins with.
    """

    back: list[Any]
    consts: list[Any]
    xs: list[Any]
    ahead: list[Any]


class Returning(NamedTuple):
    """The operands of a backward pass through a chunk.

    Attributes:
      back: what the microbatch has with it: operands, cotangents of operands, of the carry, of the ys of all layers.
      slot: its residuals, and the pieces that the next tick begins with. `last`: the rows of its last layers.
      ahead: rows that may be overwritten with those that the next tick begins with.
      sums: for the xs; the cotangents are added to them if the boolean `counts` says so.
    """

    back: Sequence[Any]
    slot: Slot
    last: list[Any]
    ahead: list[Any]
    sums: list[Any]
    counts: Any


def backward_pass(chunks: Chunks, chunk: Any, fixed: Operands, given: Returning) -> Pass:
    """Run the backward pass of a microbatch through a chunk: a `Derived`."""
    loops, stage = chunks.loops_of(chunks.of_backward, chunk), chunk % chunks.stages
    back, slot, last, ahead, sums, counts = given
    reads, with_cotangents = chunks.back
    taken, of_taken, carry, ys_of_all = split_list(back, [len(reads), len(with_cotangents), loops.carry])
    operands = fixed | chunks.operands_along(reads, taken, stage)
    ys = [chunks.rows_of(ct, stage) for ct in ys_of_all]
    consts, xs = chunks.perturbed
    totals = dict(zip(consts, empty_cotangents(loops, carry).consts, strict=True))
    totals |= zip(chunks.summed[1], sums, strict=True)
    totals |= chunks.operands_along(with_cotangents, of_taken, stage)
    cts = Cotangents([totals[i] for i in consts], carry, [totals[i] for i in xs])
    rows = list(zip(last, ahead, slot.pieces, strict=True))
    fetched: list[Any] = []
    for segment, kept in reversed(list(zip(loops.segments, slot.residuals, strict=True))):
        of_segment = [rows.pop() for _ in segment.copies][::-1] if travels(segment) else []
        state: Any = BackwardState(cts, [row for row, _, _ in of_segment] or kept.last)
        reads_of_layers = [operands[i] for i, _ in loops.reads]
        run: Any = backward_layer(loops, segment, reads_of_layers, kept, ys, [True] * len(xs), counts=counts)
        if of_segment:
            _, into, pieces = zip(*of_segment, strict=True)
            run, state = fetching(run, state, [*into], [*pieces], segment)
        loop = LayerLoop(loops, segment, False, run, state)
        yield loop
        cts = loop.state.cotangents
        if isinstance(loop.state, Fetching):
            fetched = joined_rows(loop.state.ahead, [row for row, _, _ in of_segment]) + fetched
    made = dict(zip((*consts, *xs), (*cts.consts, *cts.xs), strict=True))
    with_rows = lambda i, before: made[i] if i in consts else chunks.with_rows(before, made[i], chunk)
    of_back = list(map(with_rows, with_cotangents, of_taken))
    of_consts, of_xs = ([made[i] for i in those] for those in chunks.summed)
    return Derived([*taken, *of_back, *cts.carry, *ys_of_all], of_consts, of_xs, fetched)
