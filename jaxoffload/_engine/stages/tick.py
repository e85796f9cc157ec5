"""One tick on one stage: a backward and a forward pass, each through a chunk, and the exchange with the neighbours."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..layers.passes import Loops, run
from ..layers.rows import opaque_zero
from .chunk import Chunks, Computed, Derived, Operands, Slot, backward_pass, forward_pass
from .collectives import BRANCHES
from .schedule import Schedule, Tick


class Held(NamedTuple):
    """What a stage holds between two ticks.

    Attributes:
      xs, consts: the sums of the cotangents of xs, (virtual stages, layers of a chunk, ...), and of constants.
      along, back: what the microbatch that comes next takes along, or back.
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
        """With `f` of all arrays but stacks of layers."""
        consts, along, back, last, ahead = (list(map(f, xs)) for xs in self[1:-1])
        return Held(self.xs, consts, along, back, last, ahead, [slot.map(f) for slot in self.slots])


class Given(NamedTuple):
    """What a tick needs that is not of a stage alone.

    Attributes:
      consts: operands of the scan that are the same for all microbatches; `xs`: those that are stacks, as in `Held`.
      fresh: what the microbatch that enters takes along; nothing if none enters.
      turned: what the one that turns takes back; nothing if none turns.
    """

    consts: Operands
    xs: Operands
    fresh: list[Any]
    turned: list[Any]


class Outside(NamedTuple):
    """What all devices need of a tick: of the microbatch that leaves, the carry and the ys, and of the one that
    returns, the cotangents that it has brought back; nothing if there is none."""

    left: list[Any]
    returned: list[Any]


def run_tick(
    tick: Tick, chunks: Chunks, loops: Loops, axis: str, given: Given, held: Held, free: Slot
) -> tuple[Held, Outside]:
    """Run a tick inside a `shard_map` over the mesh axis `axis`: what the stage then holds, and what leaves it.

    Args:
      loops: the backward pass of a chunk.
      held: without what `free` has, which is written: the residuals of a slot, and the pieces for the one before.

    Returns:
      What is held, with what is written as the only slot, if anything is; and what leaves.
    """
    stage, last_stage = lax.axis_index(axis), tick.schedule.stages - 1
    chosen = lambda this, xs, ys: [jnp.where(this, x, y) for x, y in zip(xs, ys, strict=True)]
    held, free = held.map(lambda x: x[0]), free.map(lambda x: x[0])
    if tick.enters is not None:
        entering = [*given.fresh, *map(jnp.zeros_like, held.along[len(given.fresh) :])]
        held = held._replace(along=chosen(stage == 0, entering, held.along))
    turns = opaque_zero() != 0
    if tick.turns is not None:
        turns = stage == last_stage
        held = held._replace(back=chosen(turns, given.turned, held.back))
    fixed = given.consts | {i: rows(x) for i, x in given.xs.items()}
    chunk_now = lambda runs: jnp.array([run.chunk if run else 0 for run in runs], jnp.int32)[stage]
    counts = jnp.array([run is not None for run in tick.backward])[stage]
    runs_forward, runs_backward = tick.passes

    def branch(idle: bool, read: int, next_read: int) -> Callable[..., list[Any]]:
        """The passes of a stage; one that is idle leaves what it holds as it is.

        One that needs but one of two passes runs both: XLA copies slots where some branches have one and some two.
        """

        def run_stage(
            slots: list[Slot], held: Held, free: Slot, fixed: Operands, forward: Any, backward: Any, counts: Any
        ) -> list[Any]:
            if idle:
                derived = Derived(held.back, chunks.no_cotangents(loops), held.xs, held.ahead)
                computed = Computed(held.along, free.residuals, held.last, free.pieces)
                return [derived] * runs_backward + [computed] * runs_forward
            passes = []
            if runs_backward:
                kept = Slot(slots[read].residuals, slots[next_read].pieces)
                # What turns has rows of last layers that have not been on the host. That others choose too, and the
                # barrier, let XLA overwrite `ahead` in place.
                begin = chosen(turns, held.last, held.ahead)
                begin, ahead = lax.optimization_barrier((begin, held.ahead))
                back = held.back, kept, begin, ahead, held.xs
                passes.append(backward_pass(chunks, loops, backward, fixed, *back, counts))
            if runs_forward:
                passes.append(forward_pass(chunks, forward, fixed, held.along, free, held.last))
            return run(*passes)

        return run_stage

    branches = [branch(*of) for of in zip(tick.idle, tick.read_slots, tick.next.read_slots, strict=True)]
    operands = held._replace(xs=list(map(rows, held.xs)), slots=[]), free, fixed
    now = chunk_now(tick.forward), chunk_now(tick.backward), counts
    with jax.named_scope(BRANCHES):
        done = lax.switch(stage, branches, held.slots, *operands, *now)
    written, outside = [], Outside([], [])
    if runs_forward:
        computed: Computed = done[-1]
        if tick.leaves is not None:
            outside = outside._replace(left=from_stage(last_stage, computed.along[len(chunks.along) :], axis))
        held = held._replace(along=sent(tick.schedule, computed.along, 1, axis), last=computed.last)
        written = [Slot(computed.residuals, computed.pieces)]
    if runs_backward:
        derived: Derived = done[0]
        if tick.returns is not None:
            reads, _ = chunks.back
            outside = outside._replace(returned=from_stage(0, derived.back[len(reads) :], axis))
        add = lambda total, ct: total + lax.select(counts, ct, jnp.zeros_like(ct)).astype(total.dtype)
        held = held._replace(
            xs=[x.reshape(old.shape) for x, old in zip(derived.xs, held.xs, strict=True)],
            consts=list(map(add, held.consts, derived.consts)),
            back=sent(tick.schedule, derived.back, -1, axis),
            ahead=derived.ahead,
        )
    return held._replace(slots=written).map(lambda x: x[None]), outside


def rows(x: Any) -> Any:
    """A stack of a stage's chunks as one of its layers."""
    chunks, layers, *shape = x.shape
    return x.reshape(chunks * layers, *shape)


def from_stage(number: int, values: Sequence[Any], axis: str) -> list[Any]:
    """What one stage has, on all."""
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
    """What the neighbour had."""
    stages = schedule.stages
    pairs = [(n, (n + by) % stages) for n in range(stages)]
    if schedule.virtual_stages == 1:  # what leaves the last stage does not come back to the first
        pairs = [(sender, to) for sender, to in pairs if to == sender + by]
    return [lax.ppermute(x, axis, pairs) for x in values]
