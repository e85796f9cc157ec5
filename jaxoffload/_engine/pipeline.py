"""Gradients over microbatches on pipeline stages: each device runs a part of the layers, as `schedule.py` draws it.

    tick t on a stage:   compute the cotangents of one microbatch      fetch its residuals
                         compute the layers of another                 write the residuals of that one
    then:                activations to the next stage, cotangents to the one before

Between its passes a microbatch is on the host, in a slot of a ring; the device holds the residuals of two layers. How
long it stays differs from stage to stage, and XLA copies by DMA only at offsets that are affine in one loop's counter.
So a slot is an array of its own and not an index, the loop over ticks is unrolled by the ring, and each stage has a
branch. From a branch nothing leaves for the host but rows that a loop writes: hence `last_rows.py`.

A stage with nothing to do, in the first and the last ticks, computes what nobody reads.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from .._jax import Zero
from .chunk import Computed, Derived, Slot, backward_pass, forward_pass
from .copying_loops import Loops, empty_ys, filled
from .interleaved import alone, beside
from .passes import Values
from .schedule import Run, Schedule
from .segments import SegmentResiduals
from .staged_loss import StagedLoss


def on_a_stage(axis: str) -> AbstractContextManager[Any]:
    """A context in which code is traced as for one device along a mesh axis, as in a `shard_map` over it."""
    mesh = jax.sharding.get_abstract_mesh().update_axis_types({axis: AxisType.Manual})
    return jax.sharding.use_abstract_mesh(mesh)


class _State(NamedTuple):
    """Between two ticks. What stages hold is one array for all of them.

    Attributes:
      results: of the loss, for each microbatch.
      sums: the gradients of `StagedLoss.others`. `xs`: those of the layers' xs, on their stages; `consts`: those of
        constants, from each stage.
      along, back: what microbatches have with them, to the stage that they are at. `turned`: what the one that is
        behind the layers takes back.
      last: the rows of last layers that the tick before left. `ahead`: those that the next tick begins with.
    """

    results: list[Any]
    sums: list[Any]
    xs: list[Any]
    consts: list[Any]
    along: list[Any]
    back: list[Any]
    turned: list[Any]
    last: list[Any]
    ahead: list[Any]
    slots: list[Slot]


def run(
    loss: StagedLoss, schedule: Schedule, axis: str, arguments: Callable[[Any], Values]
) -> tuple[list[Any], list[Any]]:
    """The results of the loss for all microbatches, stacked, and the sums of the gradients.

    `axis`: of the mesh. `arguments`: the number of a microbatch -> its values.
    """
    ticks = _Ticks(loss, schedule, axis, arguments)
    state = ticks.begin()
    first, stop, period = schedule.chunks, schedule.forward_stop, schedule.slots
    for tick in range(first):
        state = ticks.run(tick, 0, state, forward=True, backward=False)
    # XLA's double buffering would take an iteration out of an odd loop, and copy slots in it.
    blocks = (stop - first) // period // 2 * 2

    def block(number: Any, state: _State) -> _State:
        for tick in range(first, first + period):
            state = ticks.run(tick, number * 2 * schedule.stages, state, forward=True, backward=True)
        return state

    if blocks:
        state = lax.fori_loop(0, blocks, block, state)
    for tick in range(first + blocks * period, stop):
        state = ticks.run(tick, 0, state, forward=True, backward=True)
    for tick in range(stop, schedule.ticks):
        state = ticks.run(tick, 0, state, forward=False, backward=True)
    return state.results, ticks.gradients(state)


class _Ticks:
    """What is the same in all ticks."""

    def __init__(self, loss: StagedLoss, schedule: Schedule, axis: str, arguments: Callable[[Any], Values]):
        self.loss, self.schedule, self.axis, self.arguments = loss, schedule, axis, arguments
        self.of_stage, self.of_layers = PartitionSpec(axis), PartitionSpec(None, axis)
        operands = loss.operands(loss.program.values | _Unknown(loss))
        fixed = [i for i in range(len(operands)) if i not in loss.chunks.along and i not in loss.carry]
        self.consts = {i: operands[i] for i in fixed if i < loss.carry.start}
        self.xs = {i: self.dealt(operands[i]) for i in fixed if i >= loss.carry.stop}
        self.ys = jax.make_jaxpr(lambda: empty_ys(loss.chunks.loops))().out_avals
        before = jax.make_jaxpr(lambda: loss.before(arguments(0)))()
        self.along = [*before.out_avals, *(self.of_all(y) for y in self.ys)]
        self.loops: Loops

        def behind(*outs: Any) -> Any:
            made = loss.behind(arguments(0), outs)
            self.loops = made.loops
            return made.results, made.back

        carry = before.out_avals[len(loss.chunks.along) :]
        jaxpr, shape = jax.make_jaxpr(behind, return_shape=True)(*carry, *self.along[len(before.out_avals) :])
        results, _ = shape
        self.results, self.back = jaxpr.out_avals[: len(results)], jaxpr.out_avals[len(results) :]

    def of_all(self, y: Any) -> Any:
        layers = self.loss.chunks.layers * self.schedule.chunks
        return jax.ShapeDtypeStruct((layers, *y.shape[1:]), y.dtype)

    def dealt(self, stack: Any) -> Any:
        """A stack for all layers, with the chunks of each stage side by side on it."""
        return stack.reshape(self.schedule.virtual_stages, -1, *stack.shape[1:])

    def begin(self) -> _State:
        """Nothing has run."""
        loss, stages = self.loss, self.schedule.stages
        one = lambda avals: [jnp.zeros((stages, *a.shape), a.dtype) for a in avals]
        zeros = lambda avals: [filled(a, 0) for a in avals]

        def empty() -> tuple[list[Slot], list[Any]]:
            slots, rows = zip(*(loss.chunks.empty_slot() for _ in range(self.schedule.slots)), strict=True)
            return list(map(_out, slots)), [x[None] for x in rows[0]]

        slots, rows = self.on_stages(empty, (), self.of_stage)()
        return _State(
            [jnp.zeros((self.schedule.microbatches, *a.shape), a.dtype) for a in self.results],
            zeros(v.aval for v in loss.others),
            [self.dealt(x) for x in zeros(loss.scan.eqn.invars[i].aval for i in loss.xs)],
            one(loss.scan.eqn.invars[i].aval for i in loss.chunks.consts if i not in loss.chunks.along),
            one(self.along),
            one(self.back),
            [jnp.zeros(a.shape, a.dtype) for a in self.back],
            rows,
            rows,
            slots,
        )

    def on_stages(self, f: Callable[..., Any], specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(f, in_specs=specs, out_specs=out_specs, axis_names={self.axis}, check_vma=False)

    def run(self, tick: int, later: Any, state: _State, *, forward: bool, backward: bool) -> _State:
        """One tick. Its microbatches are those of tick number `tick`, and so many `later`."""
        schedule, loss = self.schedule, self.loss
        written, before = tick % schedule.slots, (tick - 1) % schedule.slots
        last_stage = schedule.stages - 1
        enters = schedule.forward_of_many(0, tick)
        leaves = schedule.forward_of_many(last_stage, tick)
        turns = schedule.backward_of_many(last_stage, tick)
        returns = schedule.backward_of_many(0, tick)
        enter = forward and enters.chunk == 0
        turn = backward and turns.chunk == schedule.chunks - 1
        leave = forward and leaves.chunk == schedule.chunks - 1
        ret = backward and returns.chunk == 0
        along, back, ahead = state.along, state.back, state.ahead
        fresh = loss.before(self.arguments(enters.microbatch + later)) if enter else []
        back_all = state.turned if turn else []

        def on_stage(
            later: Any,
            consts: dict[int, Any],
            xs: dict[int, Any],
            fresh: list[Any],
            turned: list[Any],
            state: _State,
            free: list[SegmentResiduals[Any]],
            pieces: list[Any],
        ) -> Any:
            stage = lax.axis_index(self.axis)
            fixed = consts | {i: _flat(x) for i, x in xs.items()}
            along, back, last, ahead, of_consts = (
                [x[0] for x in xs] for xs in (state.along, state.back, state.last, state.ahead, state.consts)
            )
            sums = list(map(_flat, state.xs))
            slots, free = list(map(_in, state.slots)), list(map(_in_residuals, free))
            if fresh:
                ys = [jnp.zeros_like(x) for x in along[len(fresh) :]]
                along = _where(stage == 0, [*fresh, *ys], along)
            if turned:
                back = _where(stage == last_stage, turned, back)
                ahead = _where(stage == last_stage, last, ahead)  # they have not been on the host

            def branch(number: int) -> Any:
                def of_stage(f_chunk, b_chunk, counts, fixed, along, back, last, ahead, of_consts, sums, slots, free, pieces):
                    b = schedule.backward_of_many(number, tick)
                    next_b = schedule.backward_of_many(number, tick + 1)
                    passes = []
                    if backward:
                        slot = slots[(tick - schedule.lag(b.chunk)) % schedule.slots]
                        next_slot = (tick + 1 - schedule.lag(next_b.chunk)) % schedule.slots
                        slot = Slot(slot.residuals, slots[next_slot].pieces)
                        passes.append(
                            backward_pass(
                                loss.chunks, self.loops, b_chunk, fixed, back, slot, ahead, sums, counts
                            )
                        )
                    if forward:
                        passes.append(
                            forward_pass(loss.chunks, f_chunk, fixed, along, Slot(free, pieces), last)
                        )
                    done = beside(*passes) if len(passes) == 2 else [alone(*passes)]
                    derived = done[0] if backward else None
                    computed = done[-1] if forward else None
                    if derived:
                        of = zip(of_consts, derived.consts, strict=True)
                        of_consts = [t + lax.select(counts, ct, jnp.zeros_like(ct)) for t, ct in of]
                        derived = derived._replace(consts=of_consts)
                    return computed, derived

                return of_stage

            # Nothing but the slots differs between branches: XLA would copy slots.
            table = lambda of: jnp.array([of(n) for n in range(schedule.stages)], jnp.int32)[stage]
            f_chunk = table(lambda n: schedule.forward_of_many(n, tick).chunk)
            b_chunk = table(lambda n: schedule.backward_of_many(n, tick).chunk)
            counts = self.counts(table(lambda n: schedule.backward_of_many(n, tick).microbatch) + later)
            args = (f_chunk, b_chunk, counts, fixed, along, back, last, ahead, of_consts, sums, slots, free, pieces)
            computed, derived = lax.switch(stage, [branch(n) for n in range(schedule.stages)], *args)
            top = self.from_stage(last_stage, stage, computed.along) if leave else []
            bottom = self.from_stage(0, stage, derived.back) if ret else []
            if computed:
                computed = Computed(
                    self.sent(computed.along, 1),
                    [_out_residuals(r) for r in computed.residuals],
                    [x[None] for x in computed.last],
                    computed.pieces,
                )
            if derived:
                derived = Derived(
                    self.sent(derived.back, -1),
                    [x[None] for x in derived.consts],
                    [x.reshape(schedule.virtual_stages, -1, *x.shape[1:]) for x in derived.xs],
                    [x[None] for x in derived.ahead],
                )
            return computed, derived, top, bottom

        slots = [
            Slot([] if n == written else s.residuals, [] if n == before else s.pieces)
            for n, s in enumerate(state.slots)
        ] if True else None
        S, L, R = self.of_stage, self.of_layers, PartitionSpec()
        given = state._replace(results=[], sums=[], turned=[], slots=slots)
        specs = given._replace(
            results=R, sums=R, turned=R, xs=L, consts=S, along=S, back=S, last=S, ahead=S, slots=S
        )
        out = (
            Computed(S, S, S, S) if forward else None,
            Derived(S, S, L, S) if backward else None,
            R,
            R,
        )
        mapped = self.on_stages(on_stage, (R, R, L, R, R, specs, S, S), out)
        computed, derived, top, bottom = mapped(
            jnp.int32(later), self.consts, self.xs, fresh, back_all, given, state.slots[written].residuals,
            state.slots[before].pieces,
        )
        if computed:
            new = list(state.slots)
            new[written] = new[written]._replace(residuals=computed.residuals)
            new[before] = new[before]._replace(pieces=computed.pieces)
            state = state._replace(along=computed.along, last=computed.last, slots=new)
        if derived:
            state = state._replace(back=derived.back, consts=derived.consts, xs=derived.xs, ahead=derived.ahead)
        if leave:
            number = leaves.microbatch + later
            made = loss.behind(self.arguments(number), top[len(loss.chunks.along) :])
            state = state._replace(
                turned=made.back,
                results=[self.with_row(xs, x, number) for xs, x in zip(state.results, made.results, strict=True)],
                sums=self.added(state.sums, made.params, number),
            )
        if ret:
            number = returns.microbatch + later
            state = state._replace(
                sums=self.added(state.sums, loss.at_begin(self.arguments(number), bottom), number)
            )
        return lax.optimization_barrier(state)

    def counts(self, microbatch: Any) -> Any:
        """Whether there is such a microbatch."""
        return (microbatch >= 0) & (microbatch < self.schedule.microbatches)

    def with_row(self, rows: Any, row: Any, number: Any) -> Any:
        at = jnp.clip(number, 0, self.schedule.microbatches - 1)
        old = lax.dynamic_index_in_dim(rows, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(rows, jnp.where(self.counts(number), row, old), at, 0)

    def added(self, sums: list[Any], cotangents: list[Any], number: Any) -> list[Any]:
        counts = self.counts(number)
        add = lambda total, ct: total if type(ct) is Zero else total + jnp.where(counts, ct, jnp.zeros_like(ct))
        return [add(total, ct) for total, ct in zip(sums, cotangents, strict=True)]

    def from_stage(self, number: int, stage: Any, values: list[Any]) -> list[Any]:
        """What one stage has, on all."""
        return [lax.psum(jnp.where(stage == number, x, jnp.zeros_like(x)), self.axis) for x in values]

    def sent(self, values: list[Any], by: int) -> list[Any]:
        """What the neighbour had."""
        stages = self.schedule.stages
        pairs = [(n, (n + by) % stages) for n in range(stages)]
        if self.schedule.virtual_stages == 1:  # nobody reads what the last sends to the first
            pairs = [(n, m) for n, m in pairs if m == n + by]
        return [lax.ppermute(x, self.axis, pairs)[None] for x in values]

    def gradients(self, state: _State) -> list[Any]:
        """The sums, for each parameter."""
        loss, params = self.loss, self.loss.program.params
        sums = dict(zip(loss.others, state.sums, strict=True))
        operands = loss.scan.eqn.invars
        add = lambda v, x: sums.__setitem__(v, sums[v] + x if v in sums else x)
        for i, x in zip((i for i in loss.chunks.consts if i not in loss.chunks.along), state.consts, strict=True):
            add(operands[i], jnp.sum(x, 0))
        for i, x in zip(loss.xs, state.xs, strict=True):
            add(operands[i], x.reshape(operands[i].aval.shape))
        return [sums[v] for v in params]


class _Unknown(dict):
    """Values of variables, None where they differ between microbatches."""

    def __init__(self, loss: StagedLoss):
        super().__init__({v: None for v in loss.program.pieces.varies})


def _where(this: Any, xs: Sequence[Any], ys: Sequence[Any]) -> list[Any]:
    return [jnp.where(this, x, y) for x, y in zip(xs, ys, strict=True)]


def _flat(x: Any) -> Any:
    """A stage's rows of a dealt stack."""
    return x.reshape(-1, *x.shape[2:])


def _out_residuals(r: SegmentResiduals[Any]) -> SegmentResiduals[Any]:
    return r._replace(last=[x[None] for x in r.last], once=[x[None] for x in r.once])


def _in_residuals(r: SegmentResiduals[Any]) -> SegmentResiduals[Any]:
    return r._replace(last=[x[0] for x in r.last], once=[x[0] for x in r.once])


def _out(slot: Slot) -> Slot:
    return slot._replace(residuals=list(map(_out_residuals, slot.residuals)))


def _in(slot: Slot) -> Slot:
    return slot._replace(residuals=list(map(_in_residuals, slot.residuals)))
