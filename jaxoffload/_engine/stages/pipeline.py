"""Run the ticks of a step on pipeline stages: each device has a part of the layers, as `schedule.py` draws it.

    tick t on a stage:   compute the cotangents of one microbatch      fetch its residuals
                         compute the layers of another                 write the residuals of that one
    then:                activations to the next stage, cotangents to the one before

Between its passes a microbatch is on the host, in a slot of a ring; the device holds the residuals of two layers. How
long it stays differs from stage to stage, and XLA copies by DMA only at offsets that are affine in one loop's counter.
So a slot is an array of its own and not an index, the loop over ticks is unrolled by the ring, and each stage has a
branch. From a branch nothing leaves for the host but rows that a loop writes: hence `last_rows.py`.

What stands before and behind the layers does not belong to a stage: all devices run it between the ticks. In the first
and the last ticks some stages have nothing to do, and leave the bus to the others. One that has but one of two passes
to run computes the other one too. Of that one only the last rows that it copies may be read.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax import add_jaxvals
from ..layers.rows import filled, summand
from .chunk import Chunks, Held, Slot
from .collectives import refuse_traced
from .loss import StagedLoss
from .repeated import repeated
from .schedule import TICK, Tick
from .tick import Given, mapped, run_tick, specs


class _State(NamedTuple):
    """Between two ticks.

    Attributes:
      results: of the loss, for each microbatch.
      sums: of the cotangents of parameters, by their numbers, except what the stages hold.
      turned: what the microbatch that has left the layers takes back; nothing before the first.
      held: by the stages, in arrays with an axis for them.
    """

    results: list[Any]
    sums: dict[int, Any]
    turned: list[Any]
    held: Held


def run(loss: StagedLoss) -> tuple[list[Any], list[Any]]:
    """Return the results of the loss for all microbatches, stacked, and the sums of the gradients."""
    chunks, schedule = replace(loss.chunks, backward=loss.backward), loss.chunks.schedule
    passes = chunks.loops, chunks.of_backward
    refuse_traced(chunks.axis, (segment.jaxpr for loops in passes for segment in loops.segments))
    step = jax.named_scope(TICK)(functools.partial(_step, loss, chunks))
    steady, period = schedule.steady, schedule.slots
    rounds = len(steady) // period

    def some_ticks(numbers: range, state: _State, later: Any = 0) -> _State:
        for number in numbers:
            state = step(Tick(schedule, number), state, later)
        return state

    def one_round(number: Any, state: _State) -> _State:
        return some_ticks(steady[:period], state, number * 2 * schedule.stages)

    state = some_ticks(range(steady.start), _begin(loss))
    begin = steady.start
    if rounds > 1:
        state, begin = repeated(rounds, one_round, state), begin + rounds * period
    state = some_ticks(range(begin, schedule.ticks), state)
    return state.results, _gradients(loss, state)


def _begin(loss: StagedLoss) -> _State:
    """The state in which nothing has run."""
    chunks, schedule = loss.chunks, loss.chunks.schedule
    consts, xs = chunks.summed
    zeros = lambda avals, *lead: [jnp.zeros((*lead, *aval.shape), aval.dtype) for aval in avals]

    def held() -> Held:
        slots, (last, ahead, *_) = zip(*(chunks.empty_slot() for _ in range(schedule.slots)), strict=True)
        along, back = zeros([*loss.along, *chunks.ys]), zeros(loss.back)
        return Held([], _zero_sums(loss, consts), along, back, last, ahead, list(slots)).map(lambda x: x[None])

    _, on_stages, _ = specs(chunks.axis)
    of_stages = mapped(chunks.axis, held, (), on_stages)()
    sums_of_xs = list(map(chunks.dealt, _zero_sums(loss, xs)))
    sums = {number: loss.zero_sum(number) for number in loss.reached}
    results = zeros(loss.divided.behind.out_avals, schedule.microbatches)
    return _State(results, sums, [], of_stages._replace(xs=sums_of_xs))


def _zero_sums(loss: StagedLoss, operands: Sequence[int]) -> list[Any]:
    """Return zeros for the sums of their cotangents, in the dtype of the sum of the parameter that each is moved from.

    Each is full of a zero of its own. XLA would merge equal ones, and a branch that adds to them in place would hold
    and copy one more.
    """
    zeros = lax.optimization_barrier([jnp.int32(0) for _ in operands])
    avals, moved = loss.divided.before.out_avals, loss.divided.moved
    return [filled(avals[i], zero).astype(moved[i].dtype) for i, zero in zip(operands, zeros, strict=True)]


def _step(loss: StagedLoss, chunks: Chunks, tick: Tick, state: _State, later: Any) -> _State:
    """Run a tick, and what of the loss stands before and behind the layers of the microbatches that enter or leave.

    `later`: to add to the microbatches' numbers.
    """
    fresh = [] if tick.enters is None else loss.before(tick.enters + later)
    given = Given(*loss.fixed, fresh, [] if tick.turns is None else state.turned)
    slots = list(state.held.slots)
    free, slots[tick.slot] = slots[tick.slot], Slot([], [])
    everywhere, on_stages, dealt = specs(chunks.axis)
    of_given, of_held = Given(everywhere, dealt, everywhere, everywhere), Held(dealt, *[on_stages] * 6)
    in_specs, run = (of_given, of_held, on_stages), functools.partial(run_tick, tick, chunks)
    of_stage = mapped(chunks.axis, run, in_specs, (of_held, everywhere))
    held, outside = of_stage(given, state.held._replace(slots=slots), free)
    (slots[tick.slot],) = held.slots or [free]
    state = state._replace(held=held._replace(slots=slots))
    if tick.leaves is not None:
        number = tick.leaves + later
        made, turned, of_params = loss.behind(number, outside.left)
        put = lambda rows, row: lax.dynamic_update_index_in_dim(rows, row, number, 0)
        results = list(map(put, state.results, made))
        state = state._replace(results=results, sums=_added(state.sums, of_params), turned=turned)
    if tick.returns is not None:
        of_params = loss.at_begin(tick.returns + later, outside.returned)
        state = state._replace(sums=_added(state.sums, of_params))
    return lax.optimization_barrier(state)


def _added(sums: dict[int, Any], cotangents: dict[int, Any]) -> dict[int, Any]:
    """The sums, with the cotangents of a microbatch."""
    return sums | {number: add_jaxvals(sums[number], summand(ct, sums[number])) for number, ct in cotangents.items()}


def _gradients(loss: StagedLoss, state: _State) -> list[Any]:
    """Return the sums, for each parameter."""
    divided, sums = loss.divided, dict(state.sums)
    consts, xs = loss.chunks.summed
    of_consts = zip(consts, (jnp.sum(x, 0) for x in state.held.consts), strict=True)
    shape = lambda i: divided.before.out_avals[i].shape
    of_xs = ((i, x.reshape(shape(i))) for i, x in zip(xs, state.held.xs, strict=True))
    for operand, total in (*of_consts, *of_xs):
        moved = divided.moved[operand]
        total = moved.back(total)
        sums[moved.param] = sums[moved.param] + total if moved.param in sums else total
    return [sums[n] if n in sums else loss.zero_sum(n) for n in range(len(loss.params))]
