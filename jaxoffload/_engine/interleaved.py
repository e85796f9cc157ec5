"""Gradients over microbatches: the forward pass of one beside the backward pass of the one before it, layer by layer.

    microbatch 0     F F F F F F | B B B B B B
    microbatch 1                 | F F F F F F | B B B B B B
    microbatch 2                               | F F F F F F | B B B B B B

    iteration i between two bars:  compute the cotangents of layer n-1-i of microbatch m     fetch layer n-2-i of m
                                   compute layer i of microbatch m+1                         write layer i-1 of m+1

A layer's copies have the forward pass of one layer and the backward pass of another to hide behind, and the bus works
both ways all the time. Gradients are added where they are made.

Two sets of stacks take turns, by name and not by copying: one iteration of the loop over microbatches is two of them.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, Var

from .._jax import Zero, add_jaxvals, evaluate, instantiate_zeros
from .copying_loops import (
    Cotangents,
    Loops,
    backward_layer,
    begin_backward,
    begin_forward,
    empty_cotangents,
    empty_ys,
    end_forward,
    filled,
    forward_layer,
)
from .layer import in_three
from .pieces import Pieces, Scan, Straight
from .segments import SegmentResiduals


class Program(NamedTuple):
    """What is the same for all microbatches.

    Attributes:
      backward: (loops, cotangents of the perturbed results) -> the backward loops, and the cotangents that they take.
      values: of the variables that do not differ between microbatches.
      shared: for each `Straight`, its results that do not differ, and what the others need.
    """

    pieces: Pieces
    backward: Callable[[Loops, Sequence[Any]], tuple[Loops, list[Any]]]
    params: list[Var]
    in_place: frozenset[Var]  # params whose cotangents a backward loop adds row by row
    values: dict[Var, Any]
    shared: list[tuple[list[Any], list[Any]]]


class Flight(NamedTuple):
    """A microbatch between its forward and its backward pass.

    Attributes:
      straight: of each `Straight` but the last, the residuals that differ between microbatches.
      scans: of each scan, what its segments keep.
      reads: of each scan, the operands that its backward pass reads and that differ between microbatches.
      cotangents: by the number of a variable, those that the last piece leaves.
    """

    straight: list[list[Any]]
    scans: list[list[SegmentResiduals[Any]]]
    reads: list[list[Any]]
    cotangents: dict[int, Any]


# Of one segment, on the host and on the device.
Stacks = tuple[list[Any], list[Any]]


class Stretch:
    """Layers that one loop can run: `layer(i, state)` for i from `done` to `layers`."""

    def __init__(self, layer: Callable[[Any, Any], Any], layers: int, state: Any, unroll: int):
        self.layer, self.layers, self.state, self.unroll, self.done = layer, layers, state, unroll, 0


# Yields each stretch of layers, which somebody else runs, and returns what a pass leaves.
Pass = Generator[Stretch, None, Any]


def program(pieces: Pieces, backward: Any, params: list[Var], values: dict[Var, Any]) -> Program:
    """The program of a divided loss. `values`: of its constants, and of its arguments that are not microbatches."""
    values, shared = dict(values), []
    for piece in pieces.pieces:
        if isinstance(piece, Straight):
            fixed = [values[v] for v, varies in zip(piece.ins, piece.varies, strict=True) if not varies]
            results = evaluate(piece.once, fixed)
            known = len(piece.result_varies) - sum(piece.result_varies)
            shared.append((results[:known], results[known:]))
            outs = [v for v, varies in zip(piece.outs, piece.result_varies) if not varies]  # noqa: B905
            values |= zip(outs, results)  # noqa: B905
    return Program(pieces, backward, params, _in_place(pieces, params), values, shared)


def _in_place(pieces: Pieces, params: list[Var]) -> frozenset[Var]:
    """The parameters that are xs of one scan, and nothing else."""
    uses: dict[Var, int] = {}
    for piece in pieces.pieces:
        read = piece.ins if isinstance(piece, Straight) else piece.eqn.invars
        for v in read:
            if isinstance(v, Var):
                uses[v] = uses.get(v, 0) + 1
    xs = [v for s in pieces.scans for v in in_three(s.eqn.invars, s.loops.consts, s.loops.carry)[2]]
    return frozenset(v for v in params if v in xs and uses[v] == 1)


def forward(program: Program, values: dict[Var, Any], spare: list[list[Stacks]] | None) -> Pass:
    """The forward pass of a microbatch, up to the cotangents that its last piece leaves.

    `values`: of its arguments. `spare`: stacks to write to, of a microbatch whose backward pass is done.
    """
    values = program.values | values
    read = lambda atoms: [a.val if isinstance(a, Literal) else values[a] for a in atoms]
    kept: Flight = Flight([], [], [], {})
    shared, number = iter(program.shared), 0
    for piece in program.pieces.pieces:
        if isinstance(piece, Straight):
            residuals = _run_straight(piece, values, *next(shared))
            kept.straight.append(residuals)
            continue
        loops, operands = piece.loops, read(piece.eqn.invars)
        kept.reads.append([operands[i] for i, v in _varying_reads(program, piece)])
        outs, saved = yield from _forward_scan(loops, operands, spare[number] if spare else None)
        values |= zip(piece.eqn.outvars, outs, strict=True)
        kept.scans.append(saved)
        number += 1
    head = program.pieces.pieces[-1]
    loss, *_ = program.pieces.outvars
    cotangents = _transpose_straight(
        head, _residuals_of(program, -1, kept.straight.pop()), {loss: filled(jax.typeof(values[loss]).to_ct_aval(), 1)}
    )
    numbers = _numbers(program.pieces)
    return kept._replace(cotangents={numbers[v]: ct for v, ct in cotangents.items()}), read(program.pieces.outvars)


def _run_straight(piece: Straight, values: dict[Var, Any], known: list[Any], needed: list[Any]) -> list[Any]:
    """Run a piece, and return those of its residuals that differ between microbatches."""
    varying = [values[v] for v, varies in zip(piece.ins, piece.varies, strict=True) if varies]
    results = evaluate(piece.each, [*needed, *varying])
    outs = [v for v, varies in zip(piece.outs, piece.result_varies) if varies]  # noqa: B905
    values |= zip(outs, results)  # noqa: B905
    return results[len(outs) :]


def _forward_scan(loops: Loops, operands: list[Any], spare: list[Stacks] | None) -> Pass:
    consts, carry, xs = in_three(operands, loops.consts, loops.carry)
    ys, saved = empty_ys(loops), []
    for number, segment in enumerate(loops.segments):
        state = begin_forward(segment, carry, ys)
        if spare:
            host, device = spare[number]
            state = state._replace(saved=state.saved._replace(host=host, device=device))
        stretch = Stretch(forward_layer(loops, segment, consts, xs), segment.layers, state, loops.unroll)
        yield stretch
        carry, ys, residuals = stretch.state
        saved.append(end_forward(segment, residuals))
    return [*carry, *ys], saved


def backward(program: Program, flight: Flight, sums: list[Any]) -> Pass:
    """The backward pass of a microbatch, which adds the gradients of the parameters to `sums`."""
    variables = {n: v for v, n in _numbers(program.pieces).items()}
    cotangents = {variables[n]: ct for n, ct in flight.cotangents.items()}
    # A loop that runs once is inlined; without a barrier XLA would then add other pairs of the microbatches' gradients.
    total = dict(zip(program.params, lax.optimization_barrier(sums), strict=True))
    scans, straight = len(flight.scans), len(flight.straight)
    for piece in reversed(program.pieces.pieces[:-1]):
        if isinstance(piece, Straight):
            straight -= 1
            residuals = _residuals_of(program, straight, flight.straight[straight])
            cotangents = _transpose_straight(piece, residuals, cotangents)
        else:
            scans -= 1
            yield from _backward_scan(program, piece, scans, flight, cotangents, total)
    for v in program.params:
        if v in cotangents:
            total[v] = add_jaxvals(total[v], cotangents[v])
    return list(total.values())


def _backward_scan(
    program: Program, piece: Scan, number: int, flight: Flight, cotangents: dict[Var, Any], total: dict[Var, Any]
) -> Pass:
    """Take the cotangents of a scan's results, and leave those of its operands; rows of parameters go to `total`."""
    forward, saved = piece.loops, flight.scans[number]
    layer = forward.segments[0].layer
    outs = [v for v, p in zip(piece.eqn.outvars, layer.out_perturbed, strict=True) if p]
    given = [cotangents.pop(v, None) for v in outs]
    if all(ct is None for ct in given):
        return
    zeros = (Zero(v.aval.to_ct_aval()) for v in outs)
    loops, present = program.backward(
        forward, [zero if ct is None else ct for ct, zero in zip(given, zeros, strict=True)]
    )
    carry, ys, _ = in_three(present, loops.carry, len(present) - loops.carry)
    perturbed = [v for v, p in zip(piece.eqn.invars, layer.perturbed, strict=True) if p]
    consts_of, carry_of, xs_of = in_three(perturbed, loops.consts, loops.carry)
    in_place = [v in program.in_place for v in map(_variable, xs_of)]
    cts = empty_cotangents(loops, carry)
    cts = cts._replace(xs=[total[v] if here else x for v, here, x in zip(xs_of, in_place, cts.xs, strict=True)])
    operands = _reads(program, piece, flight.reads[number])
    for segment, residuals in reversed(list(zip(loops.segments, saved, strict=True))):
        layer_of = backward_layer(loops, segment, operands, residuals, ys, in_place)
        stretch = Stretch(layer_of, segment.layers, begin_backward(residuals, cts), loops.unroll)
        yield stretch
        cts = stretch.state.cotangents
    has_tangent = dict(zip(map(_variable, piece.eqn.invars), piece.perturbed, strict=True))
    for v, ct in zip([*consts_of, *carry_of, *xs_of], [*cts.consts, *cts.carry, *cts.xs], strict=True):
        if v in program.in_place and v in xs_of:
            total[v] = ct
        elif has_tangent.get(_variable(v)):
            cotangents[v] = add_jaxvals(cotangents[v], ct) if v in cotangents else ct


def _transpose_straight(piece: Straight, residuals: list[Any], cotangents: dict[Var, Any]) -> dict[Var, Any]:
    """The cotangents behind a piece -> those before it."""
    outs = [v for v, p in zip(piece.outs, piece.out_perturbed, strict=True) if p]
    ins = [v for v, p in zip(piece.ins, piece.perturbed, strict=True) if p]
    before = {v: ct for v, ct in cotangents.items() if v not in outs}
    given = [cotangents[v] if v in cotangents else Zero(v.aval.to_ct_aval()) for v in outs]
    if all(type(ct) is Zero for ct in given):
        return before
    made = piece.transpose(residuals, given)
    return before | {v: ct for v, ct in zip(ins, made, strict=True) if type(ct) is not Zero}


def _residuals_of(program: Program, number: int, varying: list[Any]) -> list[Any]:
    """All residuals of a `Straight`: those that differ between microbatches, and the others."""
    piece = [piece for piece in program.pieces.pieces if isinstance(piece, Straight)][number]
    known, _ = program.shared[number]
    fixed_outs = len(piece.outs) - sum(piece.result_varies[: len(piece.outs)])
    fixed, differing = iter(known[fixed_outs:]), iter(varying)
    return [next(differing if varies else fixed) for varies in piece.result_varies[len(piece.outs) :]]


def _varying_reads(program: Program, piece: Scan) -> list[tuple[int, Any]]:
    """The operands that a scan's backward pass reads and that differ between microbatches: number and variable."""
    read = ((number, piece.eqn.invars[number]) for number, _ in piece.loops.reads)
    return [(number, v) for number, v in read if _variable(v) in program.pieces.varies]


def _reads(program: Program, piece: Scan, varying: list[Any]) -> list[Any]:
    found = {number: x for (number, _), x in zip(_varying_reads(program, piece), varying, strict=True)}
    for number, _ in piece.loops.reads:
        if number not in found:
            atom = piece.eqn.invars[number]
            found[number] = atom.val if isinstance(atom, Literal) else program.values[atom]
    return [found[number] for number, _ in piece.loops.reads]


def _variable(atom: Any) -> Var | None:
    return atom if isinstance(atom, Var) else None


def _numbers(pieces: Pieces) -> dict[Var, int]:
    """A number for each variable: dictionaries of arrays with these keys can be carried by a loop."""
    found: dict[Var, int] = {v: n for n, v in enumerate(pieces.invars)}
    for piece in pieces.pieces:
        for v in piece.outs if isinstance(piece, Straight) else piece.eqn.outvars:
            found.setdefault(v, len(found))
    return found


def alone(steps: Pass) -> Any:
    """Run a pass, and return what it leaves."""
    (result,) = beside(steps)
    return result


def beside(*passes: Pass) -> list[Any]:
    """Run a backward and a forward pass beside each other, or one pass alone, and return what each leaves."""
    results: list[Any] = [None] * len(passes)
    current: dict[int, Stretch] = {}

    def go_on(number: int) -> None:
        try:
            current[number] = next(passes[number])
        except StopIteration as end:
            results[number] = end.value
            current.pop(number, None)

    for number in range(len(passes)):
        go_on(number)
    while current:
        stretches = list(current.values())
        count = min(s.layers - s.done for s in stretches)
        for stretch, state in zip(stretches, _run(stretches, count), strict=True):
            stretch.state = state
            stretch.done += count
        for number, stretch in list(current.items()):
            if stretch.done == stretch.layers:
                go_on(number)
    return results


def _run(stretches: list[Stretch], count: int) -> list[Any]:
    """The states after so many layers of each."""

    def iteration(i: Any, states: list[Any]) -> list[Any]:
        if len(stretches) == 1:
            return [stretches[0].layer(stretches[0].done + i, states[0])]
        (back, forth), (derived, computed) = stretches, states
        derived = back.layer(back.done + i, derived)
        # One layer and then the other: XLA would have both in flight, and the memory of both.
        cotangents, carry = lax.optimization_barrier((derived.cotangents.carry, computed.carry))
        computed = forth.layer(forth.done + i, computed._replace(carry=carry))
        return [derived._replace(cotangents=derived.cotangents._replace(carry=cotangents)), computed]

    unroll = min(s.unroll for s in stretches)
    return lax.fori_loop(0, count, iteration, [s.state for s in stretches], unroll=unroll)


def run(
    program_of: Callable[[], Program], microbatches: int, arguments: Callable[[Any], dict[Var, Any]], sums: list[Any]
) -> Any:
    """The results of all microbatches, stacked, and the sums of the gradients.

    `program_of`: what is the same for all microbatches is computed for each, as without us; XLA takes out of the loop
    what it would take there. `arguments(m)`: the values of microbatch m. `sums`: zeros.
    """
    flight, first = alone(forward(program_of(), arguments(0), None))
    results = [jax.tree.map(lambda x: x[None], first)]

    def transition(sums: list[Any], flight: Flight, spare: Any, m: Any) -> Any:
        program = program_of()
        sums, (flown, result) = beside(backward(program, flight, sums), forward(program, arguments(m), spare))
        return sums, flown, _stacks(flight.scans), result

    spare, begin = None, 1
    if microbatches % 2 == 0:
        sums, flight, spare, result = transition(sums, flight, None, 1)
        results.append(jax.tree.map(lambda x: x[None], result))
        begin = 2
    if begin < microbatches:

        def pair(state: Any, m: Any) -> Any:
            sums, flight, spare = state
            sums, flight, spare, one = transition(sums, flight, spare, m)
            sums, flight, spare, two = transition(sums, flight, spare, m + 1)
            return (sums, flight, spare), jax.tree.map(lambda *xs: jnp.stack(xs), one, two)

        spare = spare or _stacks(
            [[begin_forward(s, [], []).saved for s in scan.loops.segments] for scan in program_of().pieces.scans]
        )
        (sums, flight, _), pairs = lax.scan(pair, (sums, flight, spare), jnp.arange(begin, microbatches, 2))
        results.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pairs))
    sums = alone(backward(program_of(), flight, sums))
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *results), sums


def _stacks(scans: list[list[SegmentResiduals[Any]]]) -> list[list[Stacks]]:
    return [[(saved.host, saved.device) for saved in segments] for segments in scans]
