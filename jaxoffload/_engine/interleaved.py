"""Gradients over microbatches: the forward pass of one beside the backward pass of the one before it, layer by layer.

    microbatch 0   | F F F F F F | B B B B B B |             |
    microbatch 1   |             | F F F F F F | B B B B B B |
    microbatch 2   |             |             | F F F F F F | B B B B B B

    iteration i between two bars:   compute layer n-1-i's cotangents of m    fetch the residuals of layer n-2-i of m
                                    compute layer i of m+1                   write the residuals of layer i-1 of m+1

A layer's copies have the forward pass of one layer and the backward pass of another to hide behind, and the bus works
both ways all the time. Where scans differ in length, a loop ends where a segment of either pass ends.

There are two sets of stacks. An iteration of the loop over microbatches is two of them, the first from one set to the
other and the second back: stacks that swapped roles in the state of a loop would be copied, on the host.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from .._jax import Call, Results, define
from .copying_loops import DifferentiatedTwice, Loops, backward_p, forward_p, jitted
from .passes import Flight, Pass, Program, Stacks, Stretch, Values, backward, empty_stacks, forward


def run(
    program: Callable[[], Program], microbatches: int, arguments: Callable[[Any], Values], sums: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of the loss for all microbatches, stacked, and the sums of the gradients.

    Args:
      program: traces what is the same for all microbatches. It is traced for each, as without interleaving: XLA takes
        out of the loop what it would take out there.
      microbatches: at least 2.
      arguments: the number of a microbatch -> its values.
      sums: zeros, a gradient for each parameter.
    """
    flight, first = alone(forward(program(), arguments(0), empty_stacks(program())))
    results = [_stacked(first)]

    def step(state: _State, number: Any) -> tuple[_State, list[Any]]:
        made, (sums, flight, stacks) = program(), state
        sums, (after, result) = beside(backward(made, flight, sums), forward(made, arguments(number), stacks))
        return _State(sums, after, flight.stacks()), result

    def two_steps(state: _State, number: Any) -> tuple[_State, list[Any]]:
        state, one = step(state, number)
        state, two = step(state, number + 1)
        return state, _stacked(one, two)

    state = _State(sums, flight, empty_stacks(program()))
    if microbatches % 2 == 0:
        state, result = step(state, 1)
        results.append(_stacked(result))
    if rest := range(2 - microbatches % 2, microbatches, 2):
        state, pairs = lax.scan(two_steps, state, jnp.arange(rest.start, rest.stop, rest.step))
        results.append([x.reshape(-1, *x.shape[2:]) for x in pairs])
    sums = alone(backward(program(), state.flight, state.sums))
    return [jnp.concatenate(xs) for xs in zip(*results, strict=True)], sums


class _State(NamedTuple):
    """Between two bars: the gradients so far, the microbatch between its passes, and stacks for the next one."""

    sums: list[Any]
    flight: Flight
    stacks: Stacks


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loss:
    """The loss of one microbatch, for those who read the equation.

    Attributes:
      jaxpr: constants, parameters, the values of a microbatch -> the loss, other results.
      differentiated: which of its operands are parameters.
    """

    jaxpr: Jaxpr
    differentiated: tuple[bool, ...]

    def __repr__(self) -> str:
        """Short: it is printed in jaxprs."""
        return f"Loss({len(self.jaxpr.eqns)} equations)"


def bind(f: Callable[..., Any], loss: Loss, loops: Sequence[Loops], microbatches: int, *operands: Any) -> list[Any]:
    """Evaluate a function that calls `run`, as one equation that says what interleaves in it."""
    jaxpr = jax.make_jaxpr(jax.named_scope(f"jaxoffload.accumulate({microbatches})")(f))(*operands)  # for profiles
    return interleaved_p.bind(*operands, call_jaxpr=jaxpr, loss=loss, loops=tuple(loops), microbatches=microbatches)


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


interleaved_p = define(
    Call("jaxoffload_interleaved"),
    eager=lambda *args, call_jaxpr, **_: jitted(call_jaxpr)(*args),
    jvp=_refuse,
    batch=_batch,
)


def loops_of(eqn: JaxprEqn) -> list[Loops]:
    """The loops of an equation of ours: of the passes of a scan, or of all scans whose passes interleave."""
    loops = eqn.params["loops"] if eqn.primitive in OUR_LOOPS else ()
    return [loops] if isinstance(loops, Loops) else list(loops)


OUR_LOOPS = (forward_p, backward_p, interleaved_p)


def _stacked(*results: list[Any]) -> list[Any]:
    return [jnp.stack(xs) for xs in zip(*results, strict=True)]


def alone(steps: Pass) -> Any:
    """Run a pass, and return its result."""
    (result,) = _run_each([steps])
    return result


def beside(back: Pass, forth: Pass) -> list[Any]:
    """Run a backward and a forward pass, a layer of each in turn, and return their results."""
    return _run_each([back, forth])


class _Done(NamedTuple):
    result: Any


def _next(steps: Pass) -> Stretch | _Done:
    try:
        return next(steps)
    except StopIteration as end:
        return _Done(end.value)


def _run_each(passes: list[Pass]) -> list[Any]:
    at = list(map(_next, passes))
    while stretches := [stretch for stretch in at if isinstance(stretch, Stretch)]:
        _advance(stretches, min(stretch.layers - stretch.done for stretch in stretches))
        ended = [isinstance(stretch, Stretch) and stretch.done == stretch.layers for stretch in at]
        at = [_next(steps) if end else stretch for steps, stretch, end in zip(passes, at, ended, strict=True)]
    return [done.result for done in at if isinstance(done, _Done)]


def _advance(stretches: list[Stretch], layers: int) -> None:
    """Run so many layers of one stretch, or of a backward and a forward one."""
    unroll = min(stretch.unroll for stretch in stretches)
    inlined = layers == 1 or unroll > 1

    def iteration(i: Any, states: list[Any]) -> list[Any]:
        if len(stretches) == 1:
            (only,), (state,) = stretches, states
            return [only.layer(only.done + i, state, inlined)]
        (back, forth), (derived, computed) = stretches, states
        derived = back.layer(back.done + i, derived, inlined)
        # In this order: XLA would otherwise have both layers, and what they hold, under way at once.
        cotangents, carry = lax.optimization_barrier((derived.cotangents.carry, computed.carry))
        computed = forth.layer(forth.done + i, computed._replace(carry=carry), inlined)
        return [derived._replace(cotangents=derived.cotangents._replace(carry=cotangents)), computed]

    states = lax.fori_loop(0, layers, iteration, [stretch.state for stretch in stretches], unroll=unroll)
    for stretch, state in zip(stretches, states, strict=True):
        stretch.state, stretch.done = state, stretch.done + layers
