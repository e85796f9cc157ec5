"""The forward and the backward pass of one microbatch, in stretches of layers, which the caller runs.

A pass is a generator: it computes what stands before a stretch, yields the stretch, and goes on behind it with the
state that the stretch was left in.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal, Var

from ..._jax import Zero, add_jaxvals, evaluate, on_device
from ..layers.layer import in_three
from ..layers.passes import Loops, Pass, backward_pass, begin_forward, forward_pass
from ..layers.rows import filled
from ..layers.segments import Segment, SegmentResiduals
from .pieces import Pieces, Scan, Straight

# The forward loops, cotangents of the perturbed results -> the backward loops, the cotangents that they take.
BackwardLoops = Callable[[Loops, Sequence[Any]], tuple[Loops, list[Any]]]
Values = dict[Var, Any]


class Program(NamedTuple):
    """A divided loss, and what is the same for all microbatches.

    Attributes:
      params: the variables of the parameters.
      in_place: those of them that are xs of one scan and nothing else. The backward loop adds to rows of their sums.
      values: of the variables that do not differ between microbatches.
      shared: for each `Straight`, the last one too, its residuals that do not differ, and what its others need.
    """

    pieces: Pieces
    backward_loops: BackwardLoops
    params: list[Var]
    in_place: frozenset[Var]
    values: Values
    shared: dict[int, tuple[list[Any], list[Any]]]

    @property
    def scans(self) -> dict[int, Scan]:
        """The scans, by their numbers among the pieces."""
        return {number: piece for number, piece in enumerate(self.pieces.pieces) if isinstance(piece, Scan)}


def program_of(pieces: Pieces, backward_loops: BackwardLoops, params: list[Var], values: Values) -> Program:
    """Compute what is the same for all microbatches from the `values` of the constants and the parameters."""
    values, shared = dict(values), {}
    for number, piece in enumerate([*pieces.pieces, pieces.last]):
        if isinstance(piece, Straight):
            results = evaluate(piece.once, [values[v] for v in _those(piece.ins, piece.varies, False)])
            outs, residuals = piece.split(False)
            values |= zip(outs, results[: len(outs)], strict=True)
            end = len(outs) + residuals
            shared[number] = results[len(outs) : end], results[end:]
    return Program(pieces, backward_loops, params, _in_place(pieces, params), values, shared)


def _in_place(pieces: Pieces, params: list[Var]) -> frozenset[Var]:
    reads = [piece.ins if isinstance(piece, Straight) else piece.eqn.invars for piece in [*pieces.pieces, pieces.last]]
    uses = [v for atoms in reads for v in atoms if isinstance(v, Var)]
    xs = {
        v for s in pieces.scans for v in in_three(s.eqn.invars, s.loops.consts, s.loops.carry)[2] if isinstance(v, Var)
    }
    return frozenset(v for v in params if v in xs and uses.count(v) == 1)


class Flight(NamedTuple):
    """A microbatch between its forward and its backward pass.

    Attributes:
      residuals: for each piece but the last that is a `Straight`, those that differ between microbatches.
      scans: for each scan, what its segments keep, and the operands that differ and that its backward pass reads.
      cotangents: by the variables' numbers, those that the last piece leaves.
    """

    residuals: dict[int, list[Any]]
    scans: dict[int, tuple[list[SegmentResiduals[Any]], list[Any]]]
    cotangents: dict[int, Any]


# For each scan and segment: its stacks of residuals, those on the host first.
Stacks = dict[int, list[list[Any]]]


def stacks_of(flight: Flight) -> Stacks:
    """The stacks of a microbatch, which are free again after its backward pass."""

    return {n: [[*s.host, *s.device] for s in saved] for n, (saved, _) in flight.scans.items()}


def completed(program: Program, free: Stacks) -> Stacks:
    """Stacks for the forward pass of a program: those that are free, and new ones where none is."""

    def of(segment: Segment, stacks: list[Any]) -> list[Any]:
        empty, left = begin_forward(segment, [], []).saved, list(stacks)
        like = lambda new: next((i for i, stack in enumerate(left) if _kind(stack) == _kind(new)), None)
        return [new if (i := like(new)) is None else left.pop(i) for new in [*empty.host, *empty.device]]

    return {
        number: list(map(of, scan.loops.segments, free.get(number, [[]] * len(scan.loops.segments))))
        for number, scan in program.scans.items()
    }


def _of_segments(piece: Scan, stacks: list[list[Any]]) -> list[tuple[list[Any], list[Any]]]:
    counts = [len(segment.copies) for segment in piece.loops.segments]
    return [(each[:n], each[n:]) for each, n in zip(stacks, counts, strict=True)]


def _kind(stack: Any) -> tuple[Any, ...]:
    """What two stacks have in common of which one can take the place of the other.

    A mesh whose axes XLA handles does not count: what a layer has written to carries it, an empty stack does not.
    """
    aval = jax.typeof(stack)
    sharding = aval.sharding if aval.sharding.mesh.explicit_axes else None
    return aval.shape, aval.dtype, aval.memory_space, aval.manual_axis_type, sharding


def forward(program: Program, arguments: Values, stacks: Stacks) -> Pass:
    """The forward pass of a microbatch: its `Flight`, and the results of the loss.

    `arguments`: the values of the microbatch. `stacks`: to write to.
    """
    pieces, values = program.pieces, program.values | arguments
    read = lambda atoms: [a.val if isinstance(a, Literal) else values[a] for a in atoms]
    flight = Flight({}, {}, {})
    for number, piece in enumerate(pieces.pieces):
        if isinstance(piece, Straight):
            flight.residuals[number] = run_piece(piece, values, program.shared[number])
        else:
            outs, saved = yield from forward_pass(
                piece.loops, read(piece.eqn.invars), _of_segments(piece, stacks[number])
            )
            values |= zip(piece.eqn.outvars, outs, strict=True)
            flight.scans[number] = saved, [values[v] for v in _varying_reads(piece, pieces)]
    residuals = run_piece(pieces.last, values, program.shared[len(pieces.pieces)])
    results = read(pieces.outvars)
    cotangents = {pieces.outvars[0]: filled(jax.typeof(results[0]).to_ct_aval(), 1)}
    transpose_piece(program, len(pieces.pieces), residuals, cotangents)
    numbers = pieces.numbers
    return flight._replace(cotangents={numbers[v]: ct for v, ct in cotangents.items()}), results


def run_piece(piece: Straight, values: Values, shared: tuple[list[Any], list[Any]]) -> list[Any]:
    """Run a piece, and return those of its residuals that differ between microbatches."""
    _, needed = shared
    results = evaluate(piece.each, [*needed, *(values[v] for v in _those(piece.ins, piece.varies, True))])
    outs, _ = piece.split(True)
    values |= zip(outs, results[: len(outs)], strict=True)
    return results[len(outs) :]


def backward(program: Program, flight: Flight, sums: list[Any]) -> Pass:
    """The backward pass of a microbatch: the sums of the gradients, with its own."""
    variables = {n: v for v, n in program.pieces.numbers.items()}
    cotangents = {variables[n]: ct for n, ct in flight.cotangents.items()}
    totals = dict(zip(program.params, sums, strict=True))
    for number, piece in reversed(list(enumerate(program.pieces.pieces))):
        if isinstance(piece, Straight):
            transpose_piece(program, number, flight.residuals[number], cotangents)
        else:
            yield from _backward_scan(program, piece, *flight.scans[number], cotangents, totals)
    made = (cotangents.get(v) for v in program.params)
    both = zip(totals.values(), made, strict=True)
    return [total if ct is None else add_jaxvals(total, on_device(ct)) for total, ct in both]


def _backward_scan(
    program: Program,
    piece: Scan,
    saved: list[SegmentResiduals[Any]],
    varying: list[Any],
    cotangents: Values,
    totals: Values,
) -> Pass:
    """Replace the cotangents of a scan's results by those of its operands; in-place parameters' go to `totals`."""
    layer = piece.loops.segments[0].layer
    given = taken(cotangents, [v for v, p in zip(piece.eqn.outvars, layer.out_perturbed, strict=True) if p])
    if all(type(ct) is Zero for ct in given):
        return
    loops, present = program.backward_loops(piece.loops, given)
    perturbed = [v for v, p in zip(piece.eqn.invars, layer.perturbed, strict=True) if p]
    xs = perturbed[loops.consts + loops.carry :]
    totals_of_xs = {n: totals[v] for n, v in enumerate(xs) if isinstance(v, Var) and v in program.in_place}
    cts = yield from backward_pass(loops, _reads(program, piece, varying), saved, present, totals_of_xs)
    has_tangent = [v for v, p in zip(piece.eqn.invars, piece.perturbed, strict=True) if p]
    for v, ct in zip(perturbed, [*cts.consts, *cts.carry, *cts.xs], strict=True):
        if not isinstance(v, Var) or not any(v is x for x in has_tangent):
            continue  # a carry that only later layers perturb
        if v in program.in_place:
            totals[v] = ct
        else:
            cotangents[v] = add_jaxvals(on_device(cotangents[v]), on_device(ct)) if v in cotangents else ct


def transpose_piece(program: Program, number: int, varying: list[Any], cotangents: Values) -> None:
    """Replace the cotangents of the outs of a `Straight` by those of its ins."""
    piece = [*program.pieces.pieces, program.pieces.last][number]
    assert isinstance(piece, Straight)
    given = taken(cotangents, _those(piece.outs, piece.out_perturbed, True))
    if all(type(ct) is Zero for ct in given):
        return
    fixed, _ = program.shared[number]
    both = {True: iter(varying), False: iter(fixed)}
    residuals = [next(both[varies]) for varies in piece.result_varies[len(piece.outs) :]]
    made = zip(_those(piece.ins, piece.perturbed, True), piece.transpose(residuals, given), strict=True)
    cotangents |= {v: ct for v, ct in made if type(ct) is not Zero}


def taken(cotangents: Values, variables: Sequence[Var]) -> list[Any]:
    return [cotangents.pop(v) if v in cotangents else Zero(v.aval.to_ct_aval()) for v in variables]


def _those(variables: Sequence[Var], flags: Sequence[bool], flag: bool) -> list[Var]:
    return [v for v, is_so in zip(variables, flags, strict=True) if is_so is flag]


def _varying_reads(piece: Scan, pieces: Pieces) -> list[Var]:
    """The operands that a scan's backward pass reads and that differ between microbatches."""
    atoms = (piece.eqn.invars[number] for number, _ in piece.loops.reads)
    return [v for v in atoms if isinstance(v, Var) and v in pieces.varies]


def _reads(program: Program, piece: Scan, varying: list[Any]) -> list[Any]:
    """All operands that a scan's backward pass reads."""
    values = program.values | dict(zip(_varying_reads(piece, program.pieces), varying, strict=True))
    atoms = [piece.eqn.invars[number] for number, _ in piece.loops.reads]
    return [a.val if isinstance(a, Literal) else values[a] for a in atoms]
