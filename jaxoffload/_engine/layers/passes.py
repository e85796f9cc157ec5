"""Run the layers of a scan, forward or backward: copy the residuals of one while the next one computes.

    forward   i:   compute layer i                 write the residuals of layer i-1 to row i on the host
    backward  i:   compute layer i's cotangents    fetch the residuals of layer i-1 from row i

So nothing waits for a copy that takes less time than a layer. The last layer's residuals are kept apart, on the host or
on the device. Layer 0 has no layer before it, but its iteration is like all others: row 0 is written before there is
anything to write, and fetched after its last use.

Layers that treat their residuals in another way are a segment with two loops of its own; the carry, the ys and the
cotangents pass from segment to segment. So a pass is a generator: it yields the loop over each segment, and goes on
with the state that its caller has run it to. A scan runs one pass alone, `accumulate` two beside each other.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, jaxpr_as_fun

from ..._jax import add_jaxvals, in_memory_of, on_device, zero_of
from ..host.need import Stack
from ..jaxprs.flat import straight
from ..jaxprs.readers import only_kernels_read
from ..jaxprs.source import Source
from .layer import prevent_cse_barrier
from .placement import split_list
from .rows import add_to_row, empty_stack, filled, opaque_zero, put_row, take_row
from .segments import Segment, SegmentResiduals
from .transport import to_device, to_host


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loops:
    """A pass over all layers.

    Attributes:
      consts, carry: how many constants and carried values a forward pass takes, and a backward pass returns the
        cotangents of.
      reads: the operands of the scan that are residuals: their numbers, each with whether it is a constant.
      first: the row of the first layer, where the xs are those of more layers than the pass runs.
      wanted: of a backward pass, which perturbed results of the scan have cotangents.
    """

    segments: tuple[Segment, ...]
    length: int
    reverse: bool
    unroll: int
    consts: int
    carry: int
    reads: tuple[tuple[int, bool], ...] = ()
    first: Any = 0
    wanted: tuple[bool, ...] = ()

    def __repr__(self) -> str:
        """Short: it is printed in every jaxpr."""
        return f"Loops({', '.join(f'{p.start}..{p.stop} offload {p.on_host}: {p.layer.plan}' for p in self.segments)})"

    def row(self, layer: Any) -> Any:
        """The row of xs and ys that belongs to `layer`."""
        return self.length - 1 - layer if self.reverse else self.first + layer

    @property
    def offloads(self) -> bool:
        """Return if any layer offloads."""
        return any(segment.on_host for segment in self.segments)

    @property
    def seen(self) -> frozenset[str]:
        """The names that a policy around the scan counts as seen."""
        return frozenset().union(*(segment.layer.plan.seen for segment in self.segments))

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks on the host that a forward pass writes."""
        of = lambda segment: sum(segment.layout.sizes(straight(segment.jaxpr)).host)
        return tuple(Stack(segment.on_host, of(segment)) for segment in self.segments if segment.on_host)

    @property
    def results(self) -> int:
        """How many results the scan has: carry and ys."""
        return len(self.segments[0].layer.out_perturbed)

    def source_of(self, index: int) -> Source:
        """The source of a result of the forward pass."""
        if index < self.results:
            return Source(None, "output of a scan")
        return [source for segment in self.segments for source in segment.sources()][index - self.results]

    @property
    def stacked(self) -> list[SegmentResiduals[bool]]:
        """For each array that the segments keep, if it is a stack of layers."""

        def of(segment: Segment) -> SegmentResiduals[bool]:
            host, device, once = segment.layout.split([True] * len(segment.layout.kept))
            return SegmentResiduals(host, [False] * len(host), device, [False] * len(once))

        return list(map(of, self.segments))


class LayerLoop:
    """Layers that one loop can run: `state = layer(i, state, inlined)` for each i from `done` to `layers`.

    `inlined`: whether the layer stands in the program without a loop of its own around it. `forward`: whether it is of
    a forward pass; `of`: how many layers that has.
    """

    def __init__(
        self, loops: Loops, segment: Segment, forward: bool, layer: Callable[[Any, Any, bool], Any], state: Any
    ):
        self.layer, self.layers, self.state, self.done = layer, segment.layers, state, 0
        self.unroll, self.of, self.forward = loops.unroll, loops.length, forward


Pass = Generator[LayerLoop, None, Any]


def run(*passes: Pass) -> list[Any]:
    """Run one pass, or a backward and a forward pass beside each other, and return what they return.

    Of two passes, a layer of each runs in turn. A loop ends where a segment of either pass ends.
    """
    at: list[LayerLoop | None] = [None] * len(passes)
    results: list[Any] = [None] * len(passes)
    go_on = list(range(len(passes)))
    while True:
        for number in go_on:
            try:
                at[number] = next(passes[number])
            except StopIteration as end:
                at[number], results[number] = None, end.value
        if not (loops := [loop for loop in at if loop]):
            return results
        _advance(loops, min(loop.layers - loop.done for loop in loops))
        go_on = [number for number, loop in enumerate(at) if loop and loop.done == loop.layers]


def _advance(loops: list[LayerLoop], layers: int) -> None:
    """Run so many layers of one loop, or of a backward and a forward one."""
    unroll = min(loop.unroll for loop in loops)
    inlined = _is_inlined(loops, layers, unroll)
    number = lambda loop, i: loop.done + i if loop.done else i

    def iteration(i: Any, states: list[Any]) -> list[Any]:
        if len(loops) == 1:
            (only,), (state,) = loops, states
            return [only.layer(number(only, i), state, inlined)]
        (back, forth), (derived, computed) = loops, states
        derived = back.layer(number(back, i), derived, inlined)
        # In this order: XLA would otherwise have both layers, and what they hold, under way at once.
        cotangents, carry = lax.optimization_barrier((derived.cotangents.carry, computed.carry))
        computed = forth.layer(number(forth, i), computed._replace(carry=carry), inlined)
        return [derived._replace(cotangents=derived.cotangents._replace(carry=cotangents)), computed]

    states = [loop.state for loop in loops]
    if layers == 1:
        states = iteration(0, states)
    else:
        body = lambda i, carry: _carry_of(iteration(i, _states_of(carry)))
        states = _states_of(lax.fori_loop(0, layers, body, _carry_of(states), unroll=unroll))
    for loop, state in zip(loops, states, strict=True):
        loop.state, loop.done = state, loop.done + layers


class _Carry(NamedTuple):
    """The states of one or two passes. Of two, `pairs` has each stack on the host that one writes beside a residual
    that the other fetches, and `states` the rest.

    XLA deals the copies of a loop out to four streams in the order of its carry. In pairs, those to the host and those
    from it get streams of their own, and none waits for one that goes the other way (docs/upstream.md).
    """

    pairs: list[tuple[Any, Any]]
    states: list[Any]


def _carry_of(states: list[Any]) -> _Carry:
    if len(states) == 1:
        return _Carry([], states)
    back, forth = states
    pairs = list(zip(forth.saved.host, back.fetched, strict=False))  # one pass may copy more than the other
    saved = forth.saved._replace(host=forth.saved.host[len(pairs) :])
    return _Carry(pairs, [back._replace(fetched=back.fetched[len(pairs) :]), forth._replace(saved=saved)])


def _states_of(carry: _Carry) -> list[Any]:
    if not carry.pairs:
        return carry.states
    back, forth = carry.states
    written, fetched = map(list, zip(*carry.pairs, strict=True))
    saved = forth.saved._replace(host=written + forth.saved.host)
    return [back._replace(fetched=fetched + back.fetched), forth._replace(saved=saved)]


def _is_inlined(loops: list[LayerLoop], layers: int, unroll: int) -> bool:
    """Return if other computation stands beside a layer, with which XLA would fuse or merge it.

    A lone forward pass is unrolled as `lax.scan` unrolls it.
    """
    if len(loops) == 1 and loops[0].forward:
        return layers == 1 < loops[0].of
    return layers == 1 or unroll > 1


def forward_pass(loops: Loops, operands: Sequence[Any], stacks: Sequence[list[Any]] | None = None) -> Pass:
    """Run a scan forward: constants, carry, xs -> carry and ys, and what each segment keeps.

    `stacks`: for each segment, those on the host, and those on the device, to write to; by default new ones.
    """
    consts, carry, xs = split_list(operands, [loops.consts, loops.carry])
    ys, saved = empty_ys(loops), []
    for number, segment in enumerate(loops.segments):
        state = begin_forward(segment, carry, ys)
        if stacks is not None:
            host, device = split_list(stacks[number], [len(state.saved.host)])
            state = state._replace(saved=state.saved._replace(host=host, device=device))
        loop = LayerLoop(loops, segment, True, forward_layer(loops, segment, consts, xs), state)
        yield loop
        carry, ys, residuals, _ = loop.state
        if segment.on_host == segment.layers:
            # Not into row 0: outside the loop XLA:GPU would write it with a kernel.
            residuals = residuals._replace(last=list(map(to_host, residuals.last)))
        saved.append(residuals)
    return [*carry, *ys], saved


def backward_pass(
    loops: Loops,
    reads: Sequence[Any],
    saved: Sequence[SegmentResiduals[Any]],
    cotangents: Sequence[Any],
    sums: Mapping[int, Any] | None = None,
    *,
    of_consts: Mapping[int, Any] | None = None,
    counts: Any = None,
) -> Pass:
    """Run a scan backward: its `Cotangents`, from those of the carry and the ys.

    `reads`: the operands that are residuals. `saved`: of each segment. `sums`: by their numbers among the xs, stacks to
    which the cotangents are added. `of_consts`: as `sums`, for constants. `counts`: as for `backward_layer`.
    """
    carry, ys = split_list(cotangents, [loops.carry])
    sums, of_consts, cts = sums or {}, of_consts or {}, empty_cotangents(loops, carry)
    put = lambda sums, zeros: [sums.get(number, x) for number, x in enumerate(zeros)]
    cts = cts._replace(consts=put(of_consts, cts.consts), xs=put(sums, cts.xs))
    adds = [number in sums for number in range(len(cts.xs))]
    for segment, residuals in reversed(list(zip(loops.segments, saved, strict=True))):
        # Without the barrier XLA removes a copy to the host and back that has no loop between the two.
        state = BackwardState(cts, list(map(to_device, lax.optimization_barrier(residuals.last))))
        layer = backward_layer(loops, segment, [*reads], residuals, ys, adds, counts=counts)
        loop = LayerLoop(loops, segment, False, layer, state)
        yield loop
        cts = loop.state.cotangents
    return cts


def empty_ys(loops: Loops) -> list[Any]:
    """The ys of a pass, to be filled layer by layer."""
    return [empty_stack(a, loops.length) for a in loops.segments[0].jaxpr.out_avals[loops.carry : loops.results]]


class ForwardState(NamedTuple):
    """The carried state of a segment's forward loop. `beside`: the arrays of a caller whose layers do more."""

    carry: list[Any]
    ys: list[Any]
    saved: SegmentResiduals[Any]
    beside: Sequence[Any] = ()


def begin_forward(segment: Segment, carry: list[Any], ys: list[Any]) -> ForwardState:
    """The state before the first layer of a segment: nothing is kept yet."""
    host, device, once = segment.layout.split(segment.jaxpr.out_avals)
    empty = SegmentResiduals(
        [to_host(empty_stack(a, segment.layers)) for a in host],
        [filled(a) for a in host],
        [empty_stack(a, segment.layers) for a in device],
        [filled(a) for a in once],
    )
    return ForwardState(carry, ys, empty)


def forward_layer(
    loops: Loops, segment: Segment, consts: list[Any], xs: list[Any]
) -> Callable[[Any, ForwardState, bool], ForwardState]:
    """The function that computes layer i of a segment and copies the residuals of layer i-1.

    It writes to row i of stacks on the host, `i_device` of those on the device, `i_xs` of the ys. The first is a DMA
    copy; the others are not to be one, hence the opaque zero. `inlined`: XLA would fuse the layer with its neighbours.
    """
    compute, zero = jaxpr_as_fun(segment.jaxpr), opaque_zero()
    in_place = read_in_place(loops, segment.jaxpr)[loops.consts + loops.carry :]

    def layer(i: Any, state: ForwardState, inlined: bool) -> ForwardState:
        fence = lax.optimization_barrier if inlined else lambda carry: carry
        carry, ys, saved = fence(state.carry), state.ys, state.saved
        row = lax.convert_element_type(i, jnp.uint32)  # XLA deals first to what reads the counter of the loop itself
        host = []
        for stack, x, copy in zip(saved.host, saved.last, segment.copies, strict=True):
            with copy:
                host.append(stack if _is_padding(i) else put_row(stack, to_host(x), row))
        i_device = i + zero
        i_xs = loops.row(segment.start + i_device)
        row_of = lambda known: loops.row(segment.start + row) if known and not inlined else i_xs
        outs = compute(*consts, *carry, *(take_row(x, row_of(known)) for x, known in zip(xs, in_place, strict=True)))
        carry, new_ys, _ = split_list(outs, [len(carry), len(ys)])
        ys = [put_row(stack, y, i_xs) for stack, y in zip(ys, new_ys, strict=True)]
        last, stays, once = segment.layout.split(outs)
        device = [put_row(stack, x, i_device) for stack, x in zip(saved.device, stays, strict=True)]
        return ForwardState(fence(carry), ys, SegmentResiduals(host, last, device, once))

    return layer


def read_in_place(loops: Loops, layer: Jaxpr) -> list[bool]:
    """Return, for each input of a layer, whether only kernels that can read it in its stack read it. Its row's offset
    then has no opaque zero. On stages XLA cannot compute offsets in any case."""
    return [isinstance(loops.first, int) and only for only in only_kernels_read(layer)]


class Cotangents(NamedTuple):
    """The cotangents of a scan's operands. While the backward loop runs, `carry` is that of the layer that ran last."""

    consts: list[Any]
    carry: list[Any]
    xs: list[Any]


def empty_cotangents(loops: Loops, carry: list[Any]) -> Cotangents:
    """The cotangents before the last layer's backward pass, from those of the last carry."""
    consts_avals, _, xs_avals = split_list(loops.segments[0].jaxpr.out_avals, [loops.consts, loops.carry])
    consts = [filled(a, zero_of(a.dtype)) for a in consts_avals]
    return Cotangents(consts, carry, [in_memory_of(a, empty_stack(a, loops.length, carry)) for a in xs_avals])


class BackwardState(NamedTuple):
    """The carried state of a segment's backward loop: `fetched` is what the next layer reads; `beside` as above."""

    cotangents: Cotangents
    fetched: list[Any]
    beside: Sequence[Any] = ()


def backward_layer(
    loops: Loops,
    segment: Segment,
    operands: list[Any],
    saved: SegmentResiduals[Any],
    ys: list[Any],
    sums: Sequence[bool] = (),
    *,
    counts: Any = None,
) -> Callable[[Any, BackwardState, bool], BackwardState]:
    """The function that computes the cotangents of a layer, and fetches the residuals of the layer before it.

    Rows are numbered as in `forward_layer`; iterations count from the last layer. `ys`: the cotangents of the ys.
    `sums`: for each of the xs, whether its cotangents are added to those that are there; by default none. `counts`: a
    boolean, whether they are; by default they are.
    """
    compute, zero, i_last = jaxpr_as_fun(segment.jaxpr), opaque_zero(), segment.layers - 1
    kept = zip(segment.layout.kept, read_in_place(loops, segment.jaxpr), strict=False)
    in_place = {k.operand for k, known in kept if known}

    def layer(iteration: Any, state: BackwardState, inlined: bool) -> BackwardState:
        (consts, carry, xs), fetched, _ = state
        fetched_next = []
        for stack, x, copy in zip(saved.host, fetched, segment.copies, strict=True):
            with copy:
                row = i_last - iteration
                fetched_next.append(x if _is_padding(row) else to_device(take_row(stack, row)))
        i_device = i_last - (iteration + zero)
        i_xs = loops.row(segment.start + i_device)
        i_known = i_last - lax.convert_element_type(iteration, jnp.uint32)  # as in the forward pass
        row_of = lambda known: loops.row(segment.start + i_known) if known and not inlined else i_xs
        reads = zip(loops.reads, operands, strict=True)
        read = {n: x if is_const else take_row(x, row_of(n in in_place)) for (n, is_const), x in reads}
        stays = [take_row(x, i_device) for x in saved.device]
        residuals = segment.layout.merge(read, fetched, stays, saved.once)
        if inlined:  # the layer may stand beside its own forward pass
            residuals, carry = prevent_cse_barrier(residuals, carry)
        outs = compute(*residuals, *carry, *(take_row(y, i_xs) for y in ys))
        d_consts, carry, d_xs = split_list(outs, [loops.consts, loops.carry])
        consts = [add_jaxvals(total, on_device(d)) for total, d in zip(consts, d_consts, strict=True)]
        if counts is not None:
            d_xs = [lax.select(counts, d, jnp.zeros_like(d)) for d in d_xs]
        put = [add_to_row if s else put_row for s in sums or [False] * len(xs)]
        xs = [put_one(stack, d, i_xs) for put_one, stack, d in zip(put, xs, d_xs, strict=True)]
        return BackwardState(Cotangents(consts, carry, xs), fetched_next)

    return layer


def _is_padding(row: Any) -> bool:
    """Return if this is known to be row 0 while the program is traced; in a loop it is not known.

    Outside of loops XLA:GPU would copy it with a kernel.
    """
    return isinstance(row, int) and row == 0
