"""One tick on one stage: a backward and a forward pass, each through a chunk, and the exchange with the neighbours."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..layers.passes import run
from ..layers.rows import opaque_zero
from .chunk import NOTHING, Chunks, Held, Operands, Slot, backward_pass, forward_pass, joined_chunks
from .collectives import BRANCHES
from .schedule import Schedule, Tick


class Given(NamedTuple):
    """The inputs of a tick that are not of a stage alone.

    Attributes:
      consts: operands of the scan that are the same for all microbatches; `xs`: those that are stacks, as in `Held`.
      fresh: what the microbatch that enters takes along; nothing if none enters.
      turned: what the one that turns takes back; nothing if none turns.
    """

    consts: Operands
    xs: Operands
    fresh: list[Any]
    turned: list[Any]

    @property
    def fixed(self) -> Operands:
        """The operands that are the same for all microbatches, as a stage needs them."""
        return self.consts | {i: joined_chunks(x) for i, x in self.xs.items()}


class Outside(NamedTuple):
    """Outputs broadcast to all stages; nothing if there is none.

    Attributes:
      left: the carry and the ys of the microbatch that leaves.
      returned: the cotangents that the one that returns has brought back.
    """

    left: list[Any]
    returned: list[Any]


class _Now(NamedTuple):
    """Scalars of a tick on a stage: the chunks that it runs forward and backward, whether the latter's cotangents
    count, and whether that microbatch turns."""

    forward: Any
    backward: Any
    counts: Any
    turns: Any


def run_tick(tick: Tick, chunks: Chunks, given: Given, held: Held, free: Slot) -> tuple[Held, Outside]:
    """Run a tick inside a `shard_map` over the stages: what the stage then holds, and what leaves it.

    `held` is without what is in `free`, the slot to write. It comes back as the only one, if anything is written.
    """
    stage = lax.axis_index(chunks.axis)
    held, free = held.map(lambda x: x[0]), free.map(lambda x: x[0])
    held, turns = _with_arrivals(tick, stage, given, held)
    fixed = given.fixed
    chunk_now = lambda runs: jnp.array([run.chunk if run else 0 for run in runs], jnp.int32)[stage]
    counts = jnp.array([run is not None for run in tick.backward])[stage]
    now = _Now(chunk_now(tick.forward), chunk_now(tick.backward), counts, turns)
    branches = [functools.partial(_run_stage, tick, chunks, number) for number in range(tick.schedule.stages)]
    without_slots = held._replace(xs=list(map(joined_chunks, held.xs)), slots=[])
    with jax.named_scope(BRANCHES):
        done = lax.switch(stage, branches, held.slots, (without_slots, free, fixed, now))
    return _exchanged(tick, chunks, held, done, counts)


def _with_arrivals(tick: Tick, stage: Any, given: Given, held: Held) -> tuple[Held, Any]:
    """Return what a stage holds with the microbatches that enter and turn, and whether one turns here."""
    turns = opaque_zero() != 0
    if tick.enters is not None:
        held = held._replace(along=with_entering(stage == 0, given.fresh, held.along))
    if tick.turns is not None:
        turns = stage == tick.schedule.stages - 1
        held = held._replace(back=_where(turns, given.turned, held.back))
    return held, turns


def with_entering(enters: Any, fresh: list[Any], along: list[Any]) -> list[Any]:
    """Return what a microbatch takes along on a stage: what it enters with, if it does, and zeros for the ys."""
    return _where(enters, [*fresh, *map(jnp.zeros_like, along[len(fresh) :])], along)


def _where(this: Any, xs: Sequence[Any], ys: Sequence[Any]) -> list[Any]:
    return [jnp.where(this, x, y) for x, y in zip(xs, ys, strict=True)]


def _run_stage(
    tick: Tick, chunks: Chunks, stage: int, slots: list[Slot], operands: tuple[Held, Slot, Operands, _Now]
) -> list[Held]:
    """Run the passes of a stage, a backward one, a forward one, or both: what each leaves.

    A stage that is idle leaves what it holds as it is. One that needs only one pass runs both: XLA copies slots where
    some branches have one and some two.
    """
    (held, free, fixed, now), (runs_forward, runs_backward) = operands, tick.passes
    if tick.idle[stage]:
        derived = NOTHING._replace(back=held.back, consts=chunks.no_cotangents(), xs=held.xs, ahead=held.ahead)
        computed = NOTHING._replace(along=held.along, last=held.last, slots=[free])
        return [derived] * runs_backward + [computed] * runs_forward
    passes = []
    if runs_backward:
        kept = Slot(slots[tick.read_slots[stage]].residuals, slots[tick.read_pieces[stage]].pieces)
        # What turns has rows of last layers that have not been on the host. That others choose too, and the barrier,
        # let XLA overwrite `ahead` in place.
        begin, ahead = lax.optimization_barrier((_where(now.turns, held.last, held.ahead), held.ahead))
        returning = held._replace(last=begin, ahead=ahead)
        passes.append(backward_pass(chunks, now.backward, fixed, returning, kept, now.counts))
    if runs_forward:
        passes.append(forward_pass(chunks, now.forward, fixed, held, free))
    return run(*passes)


def _exchanged(tick: Tick, chunks: Chunks, held: Held, done: list[Held], counts: Any) -> tuple[Held, Outside]:
    """Return what a stage holds once its neighbours have sent, and what leaves the stages. `done`: by `_run_stage`."""
    schedule, axis, (runs_forward, runs_backward) = tick.schedule, chunks.axis, tick.passes
    held, outside = held._replace(slots=[]), Outside([], [])
    if runs_forward:
        computed = done[-1]
        if tick.leaves is not None:
            left = from_stage(schedule.stages - 1, computed.along[len(chunks.along) :], axis)
            outside = outside._replace(left=left)
        along = sent(schedule, computed.along, 1, axis)
        held = held._replace(along=along, last=computed.last, slots=computed.slots)
    if runs_backward:
        derived = done[0]
        if tick.returns is not None:
            reads, _ = chunks.back
            outside = outside._replace(returned=from_stage(0, derived.back[len(reads) :], axis))
        add = lambda total, ct: total + lax.select(counts, ct, jnp.zeros_like(ct)).astype(total.dtype)
        held = held._replace(
            xs=[x.reshape(old.shape) for x, old in zip(derived.xs, held.xs, strict=True)],
            consts=list(map(add, held.consts, derived.consts)),
            back=sent(schedule, derived.back, -1, axis),
            ahead=derived.ahead,
        )
    return held.map(lambda x: x[None]), outside


def mapped(axis: str, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return `f`, run by each stage."""
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names={axis}, check_vma=False)


def specs(axis: str) -> tuple[Any, Any, Any]:
    """Return how arrays are on the stages: all of each everywhere, a row on each, a part of each row on each."""
    return PartitionSpec(), PartitionSpec(axis), PartitionSpec(None, axis)


def from_stage(number: int, values: Sequence[Any], axis: str) -> list[Any]:
    """Broadcast what one stage has to all."""
    here = lax.axis_index(axis) == number

    def of(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(of(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.complex(of(x.real), of(x.imag))
        if jnp.issubdtype(x.dtype, jnp.floating):
            return lax.platform_dependent(x, cpu=of_bits, default=of_number)
        return lax.psum(jnp.where(here, x, jnp.zeros_like(x)), axis).astype(x.dtype)

    def of_number(x: Any) -> Any:
        return lax.psum(jnp.where(here, x, -jnp.zeros_like(x)), axis)  # -0.0 + 0.0 would be 0.0

    def of_bits(x: Any) -> Any:
        """XLA:CPU adds to 0.0, and cannot compile a sum of bfloat16 (docs/upstream.md#sums-over-devices)."""
        dtype = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = lax.bitcast_convert_type(x, dtype).astype(jnp.promote_types(dtype, jnp.uint32))
        return lax.bitcast_convert_type(of(bits).astype(dtype), x.dtype)

    return list(map(of, values))


def sent(schedule: Schedule, values: Sequence[Any], by: int, axis: str) -> list[Any]:
    """Send values to the stage that is so many further."""
    stages = schedule.stages
    pairs = [(n, (n + by) % stages) for n in range(stages)]
    if schedule.virtual_stages == 1:  # what leaves the last stage does not come back to the first
        pairs = [(sender, to) for sender, to in pairs if to == sender + by]
    return [lax.ppermute(x, axis, pairs) for x in values]
