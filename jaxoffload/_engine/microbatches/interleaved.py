"""Run microbatches: the forward pass of one beside the backward pass of the one before it, layer by layer.

    microbatch 0   | F F F F F F | B B B B B B |             |
    microbatch 1   |             | F F F F F F | B B B B B B |
    microbatch 2   |             |             | F F F F F F | B B B B B B

    iteration i between two bars:   compute layer n-1-i's cotangents of m    fetch the residuals of layer n-2-i of m
                                    compute layer i of m+1                   write the residuals of layer i-1 of m+1

A layer's copies have the forward pass of one layer and the backward pass of another to hide behind, and the bus works
both ways all the time. Where scans differ in length, a loop ends where a segment of either pass ends.

The first forward pass and the last backward pass run alone: `ends.py` says what is not copied there.

There are two sets of stacks, which change roles with each microbatch. XLA's double buffering, which `compiler_options`
asks for, makes one iteration of the loop over microbatches out of two. Otherwise stacks that change roles in the state
of a loop are copied, on the host.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from ..._jax import INTERLEAVED, Call, Compilation, Results, dce_jaxpr, define, when_compiled
from ..host.need import Need, need_of, returned_on_host
from ..host.slow_copies import lower_and_note
from ..layers.loops import DifferentiatedTwice
from ..layers.passes import Loops
from ..layers.passes import run as run_passes
from .gradient import BetweenPasses, Gradient, Stacks, backward, completed, forward, program_of, stacks_of


def run(
    gradients: tuple[Gradient, Gradient, Gradient],
    fixed: list[Any],
    microbatches: int,
    arguments: Callable[[Any], list[Any]],
    sums: list[Any],
) -> tuple[list[Any], list[Any]]:
    """The results of the loss for all microbatches, stacked, and the sums of the gradients.

    Args:
      gradients: of the first microbatch, of those between, and of the last one. The first and the last may copy fewer
        residuals; where they do not, all are one object.
      fixed: the constants and the parameters. What follows from them is traced for each microbatch, as without
        interleaving: XLA takes out of the loop what it would take out there.
      microbatches: at least 2.
      arguments: the number of a microbatch -> its values.
      sums: zeros, one for each parameter.
    """
    first, middle, last = gradients
    program = program_of(first, fixed)
    ((between, result),) = run_passes(forward(program, arguments(0), completed(program, [])))
    state, results = _State(sums, between, []), [_stacked(result)]

    def step(number: Any, state: _State, back: Gradient, forth: Gradient) -> tuple[_State, list[Any]]:
        before, program = program_of(back, fixed), program_of(forth, fixed)
        stacks = completed(program, state.stacks)
        forward_pass = forward(program, arguments(number), stacks)
        sums, (between, result) = run_passes(backward(before, state.between, state.sums), forward_pass)
        # XLA then keeps each stack in one place, though the layers may be odd in number, and adds gradients in order.
        state = lax.optimization_barrier(_State(sums, between, stacks_of(state.between)))
        return state, result

    def some_steps(numbers: Sequence[int], state: _State) -> _State:
        for number in numbers:
            back, forth = first if number == 1 else middle, last if number == microbatches - 1 else middle
            state, result = step(number, state, back, forth)
            results.append(_stacked(result))
        return state

    begin, end = 1 + (first is not middle), microbatches - (last is not middle)
    state = some_steps(range(1, begin), state)
    if begin < end:
        state = state._replace(stacks=completed(program_of(middle, fixed), state.stacks))
        middle_step = lambda state, number: step(number, state, middle, middle)
        state, result = lax.scan(middle_step, state, jnp.arange(begin, end))
        results.append(result)
    state = some_steps(range(max(begin, end), microbatches), state)
    (sums,) = run_passes(backward(program_of(last, fixed), state.between, state.sums))
    return [jnp.concatenate(xs) for xs in zip(*results, strict=True)], sums


def run_in_turn(
    gradient: Gradient, fixed: list[Any], microbatches: int, arguments: Callable[[Any], list[Any]], sums: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Run one microbatch after another, with one set of stacks, where nothing is offloaded; see `run`."""

    def step(state: tuple[list[Any], Stacks], number: Any) -> tuple[tuple[list[Any], Stacks], list[Any]]:
        (sums, stacks), program = state, program_of(gradient, fixed)
        ((between, result),) = run_passes(forward(program, arguments(number), completed(program, stacks)))
        (sums,) = run_passes(backward(program, between, sums))
        return lax.optimization_barrier((sums, stacks_of(between))), result

    stacks = completed(program_of(gradient, fixed), [])
    (sums, _), results = lax.scan(step, (sums, stacks), jnp.arange(microbatches))
    return results, sums


class _State(NamedTuple):
    """Between two bars: the gradients so far, the microbatch between its passes, and stacks that are free."""

    sums: list[Any]
    between: BetweenPasses
    stacks: Stacks


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loss:
    """The loss of one microbatch, for readers of the equation.

    Attributes:
      jaxpr: constants, parameters, the values of a microbatch -> the loss, other results.
      differentiated: which of its operands are parameters.
    """

    jaxpr: Jaxpr
    differentiated: tuple[bool, ...]

    def __repr__(self) -> str:
        """Short: it is printed in jaxprs."""
        return f"Loss({len(self.jaxpr.eqns)} equations)"


class Interleaved(NamedTuple):
    """The microbatches that interleave, or run in turn if nothing is offloaded, for readers of the equation.

    Attributes:
      loss: of one microbatch.
      loops: the loops of each scan; `first` and `last`: those of the first and of the last microbatch.
      microbatches: how many.
      schedule: a `Schedule` of pipeline stages, if there are any; the loops are then those of the layers of one chunk.
      stage_axis: of the mesh, over which the stages are.
      need: of the host's memory.
      judges: is shown the compiled program, and may raise.
    """

    loss: Loss
    loops: tuple[Loops, ...]
    first: tuple[Loops, ...]
    last: tuple[Loops, ...]
    microbatches: int
    schedule: Any = None
    stage_axis: str | None = None
    need: Need = Need()
    judges: Callable[[Compilation], None] | None = None


def need_of_microbatches(scans: Sequence[Loops], beside: Sequence[Jaxpr], sets: int = 2) -> Need:
    """Return what microbatches need of the host's memory, so many of whose residuals are there at once.

    `beside`: what else of a gradient there is; of what these return, two microbatches' are on the host.
    """
    stacks = tuple(stack for loops in scans for stack in loops.stacks)
    in_turn = sets == 2 and not stacks
    need = Need().plus(Need(stacks), sets)
    for jaxpr in beside:
        need = need.plus(need_of(jaxpr)).plus(Need(other=0 if in_turn else returned_on_host(jaxpr)))
    # A layer's forward pass stands beside the backward pass of another.
    segments = [segment for loops in scans for segment in loops.segments]
    passes = [need_of(jaxpr, False) for segment in segments for jaxpr in (segment.jaxpr, segment.backward)]
    return need.plus(Need(loops=tuple((1 if in_turn else 2, one) for one in passes)))


def bind(f: Callable[..., Any], what: Interleaved, *operands: Any) -> list[Any]:
    """Evaluate a function that calls `run`, `run_in_turn` or, on stages, `pipeline.run`, as one equation that says what
    is in it."""
    scope = jax.named_scope(f"jaxoffload.accumulate({what.microbatches})")  # for profiles
    return interleaved_p.bind(*operands, call_jaxpr=jax.make_jaxpr(scope(f))(*operands), **what._asdict())


def _refuse(*_: Any, **__: Any) -> Any:
    raise DifferentiatedTwice(
        "jaxoffload.accumulate cannot be differentiated: it returns gradients; differentiate loss"
    )


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Results:
    """One after another: the stacks on the host cannot get an axis before that of their rows."""
    batched = {i: jnp.moveaxis(x, d, 0) for i, (x, d) in enumerate(zip(args, dims, strict=True)) if d is not None}
    one = lambda these: interleaved_p.bind(*(these.get(i, x) for i, x in enumerate(args)), **params)
    outs = lax.map(one, batched)
    return outs, [0] * len(outs)


def _without_dead_code(used: Sequence[bool], *rest: Any) -> tuple[list[bool], JaxprEqn | None]:
    """Drop what no result needs in there, such as the residuals of a scan under `stop_gradient`.

    Not on stages: steps that were measured there take as long as with all that ticks compute.
    """
    eqn: JaxprEqn = rest[-1]  # jax 0.12 passes before it which inputs are live
    if not any(used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    if is_staged(eqn):
        return [True] * len(eqn.invars), eqn
    live, _ = dce_jaxpr(eqn.params["call_jaxpr"], [True] * len(eqn.outvars), True)
    return [True] * len(eqn.invars), eqn.replace(params=eqn.params | {"call_jaxpr": live})


_noting = lower_and_note(lambda *, loops, **_: any(of_scan.offloads for of_scan in loops))


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    if params["judges"] is not None:
        when_compiled(ctx, params["judges"])
    return _noting(ctx, *operands, **params)


interleaved_p = Call(INTERLEAVED)
define(
    interleaved_p,
    eager=lambda *args, **params: jax.jit(functools.partial(interleaved_p.bind, **params))(*args),
    jvp=_refuse,
    batch=_batch,
    lower=_lower,
    dce=_without_dead_code,
)


def is_staged(eqn: JaxprEqn) -> bool:
    """Return if an equation accumulates gradients on pipeline stages."""
    return eqn.primitive is interleaved_p and eqn.params["schedule"] is not None


def _stacked(result: list[Any]) -> list[Any]:
    return [jnp.stack([x]) for x in result]
