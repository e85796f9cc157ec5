"""The loss of microbatches on pipeline stages, by forward passes alone: for evaluation. Nothing is kept or offloaded.

A tick is a forward pass through a chunk of the layers, in the order in which `schedule.py` draws them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax import evaluate
from ..layers.placement import split_list
from ..layers.rows import take_row
from .chunk import Chunks
from .collectives import refuse_traced
from .loss import StagedLoss
from .schedule import TICK
from .tick import Given, from_stage, mapped, sent, specs, with_entering

# Between two ticks: the results of all microbatches, and what the next one takes along to each stage.
_State = tuple[list[Any], list[Any]]


def run(loss: StagedLoss) -> list[Any]:
    """Return the results of the loss for all microbatches, stacked."""
    chunks, schedule = loss.chunks, loss.chunks.schedule
    refuse_traced(chunks.axis, (segment.jaxpr for segment in chunks.loops.segments), branches=False)
    zeros = lambda avals, lead: [jnp.zeros((lead, *aval.shape), aval.dtype) for aval in avals]
    results = zeros(loss.divided.behind.out_avals, schedule.microbatches)
    along = zeros([*loss.along, *chunks.ys], schedule.stages)
    step = jax.named_scope(TICK)(functools.partial(_step, loss))
    (results, _), _ = lax.scan(step, (results, along), jnp.arange(schedule.forward_stop))
    return results


def _step(loss: StagedLoss, state: _State, tick: Any) -> tuple[_State, None]:
    """Run a tick."""
    (results, along), chunks, schedule = state, loss.chunks, loss.chunks.schedule
    first, last = (schedule.forward_of_many(stage, tick) for stage in (0, schedule.stages - 1))
    number = lambda run: jnp.clip(run.microbatch, 0, schedule.microbatches - 1)
    nothing = [jnp.zeros(aval.shape, aval.dtype) for aval in loss.along]
    fresh = lax.cond(first.chunk == 0, lambda: loss.before(number(first)), lambda: nothing)
    everywhere, on_stages, dealt = specs(chunks.axis)
    in_specs = everywhere, Given(everywhere, dealt, everywhere, everywhere), on_stages
    tick_of_stage = mapped(chunks.axis, functools.partial(_run_tick, chunks), in_specs, (on_stages, everywhere))
    along, left = tick_of_stage(tick, Given(*loss.fixed, fresh, []), along)

    def with_results() -> list[Any]:
        made = zip(results, loss.results(number(last), left), strict=True)
        return [_with_row(*both, last.microbatch, schedule.microbatches) for both in made]

    leaves = last.chunk == schedule.chunks - 1
    return (lax.cond(leaves, with_results, lambda: results), along), None


def _with_row(rows: Any, row: Any, number: Any, microbatches: int) -> Any:
    """The results of all microbatches, with those of one if there is one of this number."""
    at = jnp.clip(number, 0, microbatches - 1)
    old = lax.dynamic_index_in_dim(rows, at, keepdims=False)
    return lax.dynamic_update_index_in_dim(rows, jnp.where(at == number, row, old), at, 0)


def _run_tick(chunks: Chunks, tick: Any, given: Given, along: list[Any]) -> tuple[list[Any], list[Any]]:
    """Run a tick: what each stage has for the next one, and what leaves the last."""
    schedule, axis, loops = chunks.schedule, chunks.axis, chunks.loops
    stage, (segment,) = lax.axis_index(axis), loops.segments
    chunk = schedule.forward_of_many(stage, tick).chunk
    along = with_entering(chunk == 0, given.fresh, [x[0] for x in along])
    taken, operands, ys_of_all = chunks.operands(given.fixed, along, stage)
    consts, carry, xs = split_list(operands, [loops.consts, loops.carry])

    def layer(carry: list[Any], number: Any) -> tuple[list[Any], list[Any]]:
        row = [take_row(x, chunk // schedule.stages * chunks.layers + number) for x in xs]
        outs = evaluate(segment.layer.forward, [*consts, *carry, *row])
        carry, ys, _ = split_list(outs, [loops.carry, len(ys_of_all)])
        return carry, ys

    carry, ys = lax.scan(layer, carry, jnp.arange(chunks.layers))
    put = lambda y, all_ys: lax.dynamic_update_slice_in_dim(all_ys, y, chunk * chunks.layers, 0)
    along = [*taken, *carry, *map(put, ys, ys_of_all)]
    left = from_stage(schedule.stages - 1, along[len(chunks.along) :], axis)
    return [x[None] for x in sent(schedule, along, 1, axis)], left
