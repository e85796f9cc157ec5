"""Gradients over microbatches on pipeline stages: each device runs a part of the layers, as `schedule.py` draws it.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..._jax import add_jaxvals, on_device
from ..layers.passes import empty_ys
from ..layers.rows import filled
from .chunk import Chunks, Held, Operands, Slot
from .collectives import refuse_traced
from .loss import StagedLoss
from .repeated import repeated
from .schedule import TICK, Schedule, Tick
from .tick import Given, run_tick


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


def run(
    loss: StagedLoss, arguments: Callable[[Any], list[Any]], schedule: Schedule, axis: str
) -> tuple[list[Any], list[Any]]:
    """The results of the loss for all microbatches, stacked, and the sums of the gradients.

    `arguments`: the number of a microbatch -> its values. `axis`: of the mesh.
    """
    pipeline = Pipeline(loss, schedule, axis, arguments)
    shapes = _shapes(pipeline)
    chunks = replace(loss.chunks, backward=loss.loops)
    passes = chunks.loops, chunks.of_backward
    refuse_traced(axis, (segment.jaxpr for loops in passes for segment in loops.segments))
    step = jax.named_scope(TICK)(functools.partial(_step, pipeline, chunks))
    steady, period = schedule.steady, schedule.slots
    rounds = len(steady) // period

    def some_ticks(numbers: range, state: _State, later: Any = 0) -> _State:
        for number in numbers:
            state = step(Tick(schedule, number), state, later)
        return state

    def one_round(number: Any, state: _State) -> _State:
        return some_ticks(steady[:period], state, number * 2 * schedule.stages)

    state = some_ticks(range(steady.start), _begin(pipeline, shapes))
    begin = steady.start
    if rounds > 1:
        state, begin = repeated(rounds, one_round, state), begin + rounds * period
    state = some_ticks(range(begin, schedule.ticks), state)
    return state.results, _gradients(pipeline, state)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The loss, the schedule and the microbatches, the same in all ticks."""

    loss: StagedLoss
    schedule: Schedule
    axis: str
    arguments: Callable[[Any], list[Any]]

    @functools.cached_property
    def fixed(self) -> tuple[Operands, Operands]:
        """The operands of the scan that are the same for all microbatches: constants, and xs with a chunk per row."""
        fixed, carry = self.loss.fixed, self.loss.carry
        xs = {i: self.dealt(x) for i, x in fixed.items() if i >= carry.stop}
        return {i: x for i, x in fixed.items() if i < carry.start}, xs

    def dealt(self, stack: Any) -> Any:
        """A stack of layers, (virtual stages, layers, ...): each stage has a part of each row."""
        layers, *shape = stack.shape
        return stack.reshape(self.schedule.virtual_stages, layers // self.schedule.virtual_stages, *shape)


class _Shapes(NamedTuple):
    """Abstract values: what a microbatch takes along and back, the results of the loss; and the numbers of the
    parameters that have cotangents outside of the layers."""

    along: list[Any]
    back: list[Any]
    results: list[Any]
    params: list[int]


def _shapes(pipeline: Pipeline) -> _Shapes:
    loss, arguments = pipeline.loss, pipeline.arguments(0)
    of_all = ys_of_all(pipeline)
    before = jax.make_jaxpr(lambda: loss.before(arguments))().out_avals
    found: list[int] = []

    def behind(*outs: Any) -> Any:
        made = loss.behind(arguments, outs)
        returned = made.back[len(loss.chunks.back[0]) :]
        found.extend([*made.params, *loss.at_begin(arguments, returned)])
        return made.results, made.back

    jaxpr, (results, _) = jax.make_jaxpr(behind, return_shape=True)(*before[len(loss.chunks.along) :], *of_all)
    results, back = jaxpr.out_avals[: len(results)], jaxpr.out_avals[len(results) :]
    return _Shapes([*before, *of_all], back, results, sorted(set(found)))


def ys_of_all(pipeline: Pipeline) -> list[Any]:
    """Abstract: the ys of all layers."""
    chunks = pipeline.loss.chunks
    ys = jax.make_jaxpr(lambda: [y[:1] for y in empty_ys(chunks.loops)])().out_avals
    layers = chunks.layers * pipeline.schedule.chunks
    return [jax.ShapeDtypeStruct((layers, *y.shape[1:]), y.dtype) for y in ys]


def _begin(pipeline: Pipeline, shapes: _Shapes) -> _State:
    """The state in which nothing has run."""
    loss, schedule = pipeline.loss, pipeline.schedule
    consts, xs = loss.chunks.summed
    zeros = lambda avals, *lead: [jnp.zeros((*lead, *aval.shape), aval.dtype) for aval in avals]

    def held() -> Held:
        slots, (last, ahead, *_) = zip(*(loss.chunks.empty_slot() for _ in range(schedule.slots)), strict=True)
        rest = zeros(shapes.along), zeros(shapes.back), last, ahead, list(slots)
        return Held([], _zero_sums(pipeline, consts), *rest).map(lambda x: x[None])

    of_stages = mapped(pipeline, held, (), PartitionSpec(pipeline.axis))()
    sums_of_xs = list(map(pipeline.dealt, _zero_sums(pipeline, xs)))
    sums = {number: filled(jax.typeof(loss.params[number]), 0) for number in shapes.params}
    results = zeros(shapes.results, schedule.microbatches)
    return _State(results, sums, [], of_stages._replace(xs=sums_of_xs))


def _zero_sums(pipeline: Pipeline, operands: Sequence[int]) -> list[Any]:
    """Return zeros for the sums of their cotangents, in the dtype of the parameter that each is moved from.

    Each is full of a zero of its own. XLA would merge equal ones, and a branch that adds to them in place would hold
    and copy one more.
    """
    zeros = lax.optimization_barrier([jnp.int32(0) for _ in operands])
    avals, loss = pipeline.loss.divided.before.out_avals, pipeline.loss
    pairs = zip(operands, zeros, strict=True)
    return [filled(avals[i], zero).astype(loss.moved(i).dtype) for i, zero in pairs]


def mapped(pipeline: Pipeline, f: Callable[..., Any], specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`f`, run by each stage."""
    return jax.shard_map(f, in_specs=specs, out_specs=out_specs, axis_names={pipeline.axis}, check_vma=False)


def _step(pipeline: Pipeline, chunks: Chunks, tick: Tick, state: _State, later: Any) -> _State:
    """Run a tick, and what of the loss stands before and behind the layers of the microbatches that enter or leave.

    `later`: to add to the microbatches' numbers.
    """
    loss, held = pipeline.loss, state.held
    values = lambda microbatch: pipeline.arguments(microbatch + later)
    fresh = [] if tick.enters is None else loss.before(values(tick.enters))
    turned = [] if tick.turns is None else state.turned
    given = Given(*pipeline.fixed, fresh, turned)
    slots = list(held.slots)
    free, slots[tick.slot] = slots[tick.slot], Slot([], [])
    run = functools.partial(run_tick, tick, chunks, pipeline.axis)
    everywhere, on_stages, dealt = PartitionSpec(), PartitionSpec(pipeline.axis), PartitionSpec(None, pipeline.axis)
    of_given, of_held = _specs(Given, everywhere, dealt), _specs(Held, on_stages, dealt)
    of_stage = mapped(pipeline, run, (of_given, of_held, on_stages), (of_held, everywhere))
    new, outside = of_stage(given, held._replace(slots=slots), free)
    (slots[tick.slot],) = new.slots or [free]
    state = state._replace(held=new._replace(slots=slots))
    if tick.leaves is not None:
        number = tick.leaves + later
        behind = loss.behind(values(tick.leaves), outside.left)
        put = lambda rows, row: lax.dynamic_update_index_in_dim(rows, row, number, 0)
        results = list(map(put, state.results, behind.results))
        state = state._replace(results=results, sums=_added(state.sums, behind.params), turned=behind.back)
    if tick.returns is not None:
        made = loss.at_begin(values(tick.returns), outside.returned)
        state = state._replace(sums=_added(state.sums, made))
    return lax.optimization_barrier(state)


def _specs(of: Any, spec: PartitionSpec, xs: PartitionSpec) -> Any:
    """The partition of each field of a tuple: `spec`, except for its `xs`."""
    return of(*(xs if field == "xs" else spec for field in of._fields))


def _added(sums: dict[int, Any], cotangents: dict[int, Any]) -> dict[int, Any]:
    """The sums, with the cotangents of a microbatch."""
    return sums | {number: add_jaxvals(sums[number], on_device(ct)) for number, ct in cotangents.items()}


def _gradients(pipeline: Pipeline, state: _State) -> list[Any]:
    """Return the sums, for each parameter."""
    loss, sums = pipeline.loss, dict(state.sums)
    consts, xs = loss.chunks.summed
    of_consts = zip(consts, (jnp.sum(x, 0) for x in state.held.consts), strict=True)
    shape = lambda i: loss.divided.before.out_avals[i].shape
    of_xs = ((i, x.reshape(shape(i))) for i, x in zip(xs, state.held.xs, strict=True))
    for operand, total in (*of_consts, *of_xs):
        moved = loss.moved(operand)
        total = moved.back(total)
        sums[moved.param] = sums[moved.param] + total if moved.param in sums else total
    avals = map(jax.typeof, loss.params)
    return [sums[n] if n in sums else filled(aval, 0) for n, aval in enumerate(avals)]
