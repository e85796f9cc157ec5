"""The loss of microbatches on pipeline stages, by forward passes alone: for evaluation. Nothing is kept or offloaded.

A tick is a forward pass through a chunk of the layers, in the order in which `schedule.py` draws them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..._jax import evaluate
from ..layers.placement import split_list
from ..layers.rows import take_row
from .chunk import Operands
from .collectives import refuse_traced
from .loss import StagedLoss
from .pipeline import Pipeline, mapped, ys_of_all
from .schedule import TICK, Schedule
from .tick import from_stage, rows, sent


class _State(NamedTuple):
    """Between two ticks: the results of all microbatches, and what the next one takes along to each stage."""

    results: list[Any]
    along: list[Any]


def run(loss: StagedLoss, arguments: Callable[[Any], list[Any]], schedule: Schedule, axis: str) -> list[Any]:
    """The results of the loss for all microbatches, stacked. The arguments are those of `pipeline.run`."""
    refuse_traced(axis, (segment.jaxpr for segment in loss.chunks.loops.segments), branches=False)
    pipeline = Pipeline(loss, schedule, axis, arguments)
    before = jax.make_jaxpr(lambda: loss.before(arguments(0)))().out_avals
    ys = ys_of_all(pipeline)
    ended = jax.make_jaxpr(lambda *outs: loss.results(arguments(0), outs))
    results = ended(*before[len(loss.chunks.along) :], *ys).out_avals
    zeros = lambda avals, lead: [jnp.zeros((lead, *aval.shape), aval.dtype) for aval in avals]
    state = _State(zeros(results, schedule.microbatches), zeros([*before, *ys], schedule.stages))
    step = jax.named_scope(TICK)(functools.partial(_step, pipeline, len(before)))
    state, _ = lax.scan(step, state, jnp.arange(schedule.forward_stop))
    return state.results


def _step(pipeline: Pipeline, entering: int, state: _State, tick: Any) -> tuple[_State, None]:
    """Run a tick. `entering`: how many arrays a microbatch takes along to the first layer."""
    loss, schedule = pipeline.loss, pipeline.schedule
    first, last = (schedule.forward_of_many(stage, tick) for stage in (0, schedule.stages - 1))
    values = lambda run: pipeline.arguments(jnp.clip(run.microbatch, 0, schedule.microbatches - 1))
    nothing = [jnp.zeros(x.shape[1:], x.dtype) for x in state.along[:entering]]
    fresh = lax.cond(first.chunk == 0, lambda: loss.before(values(first)), lambda: nothing)
    on_stages, dealt = PartitionSpec(pipeline.axis), PartitionSpec(None, pipeline.axis)
    specs = (PartitionSpec(), PartitionSpec(), dealt, PartitionSpec(), on_stages)
    tick_of_stage = mapped(pipeline, functools.partial(_run_tick, pipeline), specs, (on_stages, PartitionSpec()))
    along, left = tick_of_stage(tick, *pipeline.fixed, fresh, state.along)

    def with_results() -> list[Any]:
        made = zip(state.results, loss.results(values(last), left), strict=True)
        return [_with_row(*both, last.microbatch, schedule.microbatches) for both in made]

    leaves = last.chunk == schedule.chunks - 1
    return _State(lax.cond(leaves, with_results, lambda: state.results), along), None


def _with_row(rows: Any, row: Any, number: Any, microbatches: int) -> Any:
    """The results of all microbatches, with those of one if there is one of this number."""
    at = jnp.clip(number, 0, microbatches - 1)
    old = lax.dynamic_index_in_dim(rows, at, keepdims=False)
    return lax.dynamic_update_index_in_dim(rows, jnp.where(at == number, row, old), at, 0)


def _run_tick(
    pipeline: Pipeline, tick: Any, consts: Operands, xs: Operands, fresh: list[Any], along: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Run a tick: what each stage has for the next one, and what leaves the last."""
    chunks, schedule, axis = pipeline.loss.chunks, pipeline.schedule, pipeline.axis
    stage = lax.axis_index(axis)
    chunk = schedule.forward_of_many(stage, tick).chunk
    along = [x[0] for x in along]
    entering = [*fresh, *map(jnp.zeros_like, along[len(fresh) :])]
    along = [jnp.where(chunk == 0, new, old) for new, old in zip(entering, along, strict=True)]
    loops, (segment,) = chunks.loops, chunks.loops.segments
    fixed = consts | {i: rows(x) for i, x in xs.items()}
    taken, operands, ys_of_all = chunks.operands(fixed, along, stage)
    of_consts, carry, of_layers = split_list(operands, [loops.consts, loops.carry])

    def layer(carry: list[Any], number: Any) -> tuple[list[Any], list[Any]]:
        row = [take_row(x, chunk // schedule.stages * chunks.layers + number) for x in of_layers]
        outs = evaluate(segment.layer.forward, [*of_consts, *carry, *row])
        carry, ys, _ = split_list(outs, [loops.carry, len(ys_of_all)])
        return carry, ys

    carry, ys = lax.scan(layer, carry, jnp.arange(chunks.layers))
    put = lambda y, all_ys: lax.dynamic_update_slice_in_dim(all_ys, y, chunk * chunks.layers, 0)
    along = [*taken, *carry, *map(put, ys, ys_of_all)]
    left = from_stage(schedule.stages - 1, along[len(chunks.along) :], axis)
    return [x[None] for x in sent(schedule, along, 1, axis)], left
