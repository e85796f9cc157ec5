"""The gradient of a loss for one microbatch, as JAX traces it, in two passes that stop at the layers.

`jax.vjp` of a loss traces to one jaxpr, in which a scan of ours is a forward and a backward equation. The pass that
evaluates it is a generator which yields the loops of these, so that they can run beside those of another microbatch.
The jaxpr is cut before the first backward equation: what is computed behind the last layer, forward and backward,
belongs to the forward pass. What passes the cut is kept until the backward pass runs.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import broadcast_in_dim_p, convert_element_type_p, jit_p, reshape_p
from jax.ref import AbstractRef

from ..._jax import add_jaxvals, evaluate, has_effects, in_memory_of, nbytes
from ..jaxprs.inline import (
    Values,
    depending,
    evaluate_equations,
    read,
    variables,
    with_needed_equations,
    with_unknown_names,
    written_out,
    zero_results,
)
from ..jaxprs.walk import map_bodies, walk, with_eqns
from ..layers.loops import backward_p, forward_p, operands_of_backward
from ..layers.passes import Loops, Pass, backward_pass, begin_forward, forward_pass
from ..layers.rows import summand
from ..layers.scan_primitive import backward_loops, scan_p
from ..layers.segments import Segment, SegmentResiduals

_LARGE = 2**20  # bytes; less is not worth a barrier


class Scan(NamedTuple):
    """A scan whose two passes are loops to run beside others.

    Attributes:
      forward, backward: its equations.
      loops: its forward loops: those of the equation, or others over the same layers.
    """

    forward: JaxprEqn
    backward: JaxprEqn
    loops: Loops

    @property
    def reads(self) -> list[Any]:
        """The operands that the backward pass reads again."""
        return [self.forward.invars[number] for number, _ in self.loops.reads]

    @property
    def cotangents(self) -> list[Any]:
        """The cotangents that the backward pass takes."""
        return operands_of_backward(self.backward.params["loops"], self.backward.invars)[2]


@dataclass(frozen=True, eq=False)
class Gradient:
    """The value and the gradient of a loss for one microbatch.

    Attributes:
      jaxpr: constants, parameters, the values of a microbatch -> the loss, other results, gradients.
      fixed: how many inputs are the same for all microbatches: the constants and the parameters, which come first.
      results: how many results it has besides the gradients.
      varies: the variables that differ between microbatches. All others are computed once.
      scans: those whose passes can run beside others. Their loops may be others than those that were traced.
      cut: the number of the equation with which the backward pass begins.
    """

    jaxpr: Jaxpr
    fixed: int
    results: int
    varies: frozenset[Var]
    scans: tuple[Scan, ...]
    cut: int

    @property
    def gradients(self) -> list[Any]:
        """The results that are gradients."""
        return self.jaxpr.outvars[self.results :]

    @functools.cached_property
    def in_place(self) -> dict[Var, int]:
        """The cotangents of xs of scans that are a gradient, at most reshaped, and nothing else, with its number.

        The backward pass adds to the rows of their sums, which have the shape of the xs.
        """
        reads = _reads(self.jaxpr)
        numbers = {v: number for number, v in enumerate(self.gradients) if isinstance(v, Var) and reads[v] == 1}
        for eqn in reversed(self.jaxpr.eqns):
            if eqn.primitive is reshape_p and eqn.params["dimensions"] is None and eqn.outvars[0] in numbers:
                (before,) = variables(eqn.invars)
                if reads[before] == 1:
                    numbers[before] = numbers.pop(eqn.outvars[0])
        backward = [(scan.backward.params["loops"], scan.backward.outvars) for scan in self.scans]
        return {v: numbers[v] for loops, outs in backward for v in outs[loops.consts + loops.carry :] if v in numbers}

    @functools.cached_property
    def fills(self) -> list[JaxprEqn]:
        """The equations that fill the large arrays of zeros to which the gradients of gathers are added.

        Of gradients that are then rounded: others XLA adds to their sum without zeros. Inside `shard_map` and on a mesh
        with explicit axes others stand between, and none is found.
        """
        later = self.jaxpr.eqns[self.cut :]
        rounded = {v for eqn in later if eqn.primitive is convert_element_type_p for v in variables(eqn.invars)}
        reads = {v for eqn in later if not rounded.isdisjoint(eqn.outvars) for v in variables(eqn.invars)}
        made = [eqn for eqn in self.jaxpr.eqns if eqn.primitive is broadcast_in_dim_p and not variables(eqn.invars)]
        return [eqn for eqn in made if eqn.outvars[0] in reads and nbytes(eqn.outvars[0].aval) >= _LARGE]

    @property
    def sums(self) -> list[Any]:
        """The types of the gradients, in the shapes of their sums."""
        of_xs = {number: v.aval for v, number in self.in_place.items()}
        return [of_xs.get(number, aval) for number, aval in enumerate(self.jaxpr.out_avals[self.results :])]

    @property
    def reads_refs_late(self) -> bool:
        """Return if the backward pass reads or writes references from outside: the next forward pass has, too."""
        outside = {v for v in self.jaxpr.invars if isinstance(v.aval, AbstractRef)}
        return any(not outside.isdisjoint(variables(eqn.invars)) for eqn in self.jaxpr.eqns[self.cut :])

    @property
    def beside_scans(self) -> Jaxpr:
        """All but the passes of the scans: their results are inputs. What passes the cut are the results."""
        ours = [eqn for scan in self.scans for eqn in (scan.forward, scan.backward)]
        given = [v for eqn in ours for v in eqn.outvars]
        eqns = [eqn for eqn in self.jaxpr.eqns if not any(eqn is one for one in ours)]
        return self.jaxpr.replace(
            invars=[*self.jaxpr.invars, *given],
            outvars=self.kept,
            eqns=eqns,
            debug_info=with_unknown_names(self.jaxpr),
        )

    def is_of_each(self, eqn: JaxprEqn) -> bool:
        """Return if an equation is evaluated for each microbatch."""
        return any(v in self.varies for v in eqn.outvars) or has_effects(eqn)

    @functools.cached_property
    def kept(self) -> list[Var]:
        """The variables that pass the cut, besides what the scans keep."""
        forward, backward = self.jaxpr.eqns[: self.cut], self.jaxpr.eqns[self.cut :]
        operands = {id(scan.backward): [*scan.reads, *scan.cotangents] for scan in self.scans}
        later = dict.fromkeys(v for eqn in backward for v in variables(operands.get(id(eqn), eqn.invars)))
        later |= dict.fromkeys(variables(self.gradients))
        before = {*self.jaxpr.invars, *(v for eqn in forward for v in eqn.outvars)}
        return [v for v in later if v in before and v in self.varies]


def gradient_of(loss: Jaxpr, consts: int, params: int) -> Gradient:
    """Return the gradient of a loss: constants, parameters, the values of a microbatch -> the loss, other results.

    Each scan in it is one of two microbatches that share the host.
    """
    fixed = consts + params
    loss = _of_two_microbatches(loss)

    def value_and_gradient(*inputs: Any) -> list[Any]:
        def value_of(params: Sequence[Any]) -> tuple[Any, list[Any]]:
            value, *others = evaluate(loss, [*inputs[:consts], *params, *inputs[fixed:]])
            return value, others

        (value, others), gradients = jax.value_and_grad(value_of, has_aux=True)([*inputs[consts:fixed]])
        return [value, *others, *gradients]

    varies = [number >= fixed for number in range(len(loss.invars))]
    jaxpr = jax.make_jaxpr(value_and_gradient)(*loss.in_avals)
    jaxpr = with_needed_equations(written_out(jaxpr, varies, _opens))
    varying = depending(jaxpr, jaxpr.invars[fixed:], lambda eqn: eqn.primitive is forward_p or _acts(eqn))
    scans, cut = _scans_of(jaxpr)
    return Gradient(jaxpr, fixed, len(loss.outvars), frozenset(varying), scans, cut)


def _of_two_microbatches(jaxpr: Jaxpr) -> Jaxpr:
    """Return a loss with its scans, those in jitted functions too, marked as those of two microbatches."""

    def marked(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive is scan_p:
            return eqn.replace(params=eqn.params | {"microbatches": 2})
        return map_bodies(eqn, lambda _, body: _of_two_microbatches(body)) if eqn.primitive is jit_p else eqn

    return with_eqns(jaxpr, list(map(marked, jaxpr.eqns)))


def _opens(eqn: JaxprEqn, varies: Sequence[bool]) -> bool:
    """Return if a jitted function is written out: for the scans in it, or because some of it is computed once."""
    has_shardings = any(
        isinstance(s, jax.sharding.Sharding) for name in ("in_shardings", "out_shardings") for s in eqn.params[name]
    )
    mixed = any(varies) and not all(v or not isinstance(x, Var) for v, x in zip(varies, eqn.invars, strict=True))
    if mixed and not has_shardings:
        return True
    loops = (site for site in walk(eqn.params["jaxpr"]) if site.eqn.primitive in (forward_p, backward_p))
    return any(all(e.primitive is jit_p for e in site.enclosing) for site in loops)


def _acts(eqn: JaxprEqn) -> bool:
    """Return if an equation has effects, or touches references."""
    return has_effects(eqn) or any(isinstance(v.aval, AbstractRef) for v in [*eqn.invars, *eqn.outvars])


def _reads(jaxpr: Jaxpr) -> Counter[Var]:
    """Return how often each variable is read."""
    return Counter(variables([v for eqn in jaxpr.eqns for v in eqn.invars] + jaxpr.outvars))


def _scans_of(jaxpr: Jaxpr) -> tuple[tuple[Scan, ...], int]:
    """Return the scans that run before the loss is known and have their backward pass behind that, in the order of
    their forward passes, and the number of the equation with which the first backward pass begins.

    What the forward equation keeps must go to the backward equation, and nowhere else.
    """
    at = {v: number for number, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    reads, value = _reads(jaxpr), jaxpr.outvars[0]
    known = at.get(value, -1) if isinstance(value, Var) else -1
    before = [eqn for eqn in jaxpr.eqns[: known + 1] if eqn.primitive is forward_p]
    found: dict[int, tuple[int, JaxprEqn]] = {}
    for number, eqn in enumerate(jaxpr.eqns[known + 1 :], known + 1):
        if eqn.primitive is backward_p:
            matches = (n for n, forward in enumerate(before) if n not in found and _belong(forward, eqn, reads))
            if (match := next(matches, None)) is not None:
                found[match] = number, eqn
    scans = tuple(Scan(before[n], eqn, before[n].params["loops"]) for n, (_, eqn) in sorted(found.items()))
    return scans, min((number for number, _ in found.values()), default=len(jaxpr.eqns))


def _belong(forward: JaxprEqn, backward: JaxprEqn, reads: Counter[Var]) -> bool:
    loops = forward.params["loops"]
    operands, saved, _ = operands_of_backward(backward.params["loops"], backward.invars)
    kept, again = forward.outvars[loops.results :], [forward.invars[number] for number, _ in loops.reads]
    same = lambda xs, ys: len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))
    return same(kept, jax.tree.leaves(saved)) and same(again, operands) and all(reads[v] == 1 for v in kept)


class Program(NamedTuple):
    """A gradient, and what is computed once for all microbatches.

    Attributes:
      values: of the constants, the parameters, and all that does not differ between microbatches.
    """

    gradient: Gradient
    values: Values


def program_of(gradient: Gradient, fixed: Sequence[Any]) -> Program:
    """Compute what does not differ between microbatches; `fixed`: the constants and the parameters."""
    values = dict(zip(gradient.jaxpr.invars[: gradient.fixed], fixed, strict=True))
    values |= zip(gradient.jaxpr.constvars, gradient.jaxpr.consts, strict=True)
    once = [eqn for eqn in gradient.jaxpr.eqns if not gradient.is_of_each(eqn)]
    evaluate_equations(gradient.jaxpr, once, values)
    return Program(gradient, values)


class BetweenPasses(NamedTuple):
    """A microbatch between its forward and its backward pass.

    Attributes:
      values: of the variables that pass the cut; of references, what they hold.
      saved: what the segments of each scan keep.
    """

    values: list[Any]
    saved: list[list[SegmentResiduals[Any]]]


# For each scan and segment, its stacks of residuals on the host, and those on the device.
Stacks = list[list[list[Any]]]


def stacks_of(between: BetweenPasses) -> Stacks:
    """Return the stacks of a microbatch, which are free again after its backward pass."""
    return [[[*kept.host, *kept.device] for kept in saved] for saved in between.saved]


def completed(program: Program, free: Stacks) -> Stacks:
    """Return stacks for the forward pass of a program: those that are free, and new ones where none is."""

    def of(segment: Segment, free: list[Any]) -> list[Any]:
        empty, left = begin_forward(segment, [], []).saved, list(free)
        like = lambda new: next((i for i, stack in enumerate(left) if _can_replace(stack, new)), None)
        return [new if (i := like(new)) is None else left.pop(i) for new in [*empty.host, *empty.device]]

    scans = program.gradient.scans
    free = free or [[[]] * len(scan.loops.segments) for scan in scans]
    return [list(map(of, scan.loops.segments, each)) for scan, each in zip(scans, free, strict=True)]


def _can_replace(stack: Any, new: Any) -> bool:
    """Return if two stacks are alike but for a mesh whose axes XLA handles: what a layer has written to carries it, an
    empty stack does not."""

    def kind(x: Any) -> tuple[Any, ...]:
        aval = jax.typeof(x)
        sharding = aval.sharding if aval.sharding.mesh.explicit_axes else None
        return aval.shape, aval.dtype, aval.memory_space, aval.manual_axis_type, sharding

    return kind(stack) == kind(new)


def forward(program: Program, microbatch: Sequence[Any], stacks: Stacks) -> Pass:
    """Run the forward pass of a microbatch: what is kept until the backward pass, and the results of the loss.

    `stacks`: to write to.
    """
    gradient, saved = program.gradient, list[Any]()
    values = program.values | dict(zip(gradient.jaxpr.invars[gradient.fixed :], microbatch, strict=True))
    loops = {id(scan.forward): number for number, scan in enumerate(gradient.scans)}
    for eqns, number in _up_to_loops(gradient, gradient.jaxpr.eqns[: gradient.cut], loops):
        evaluate_equations(gradient.jaxpr, eqns, values)
        if number is not None:
            scan = gradient.scans[number]
            operands = read(scan.forward.invars, values)
            outs, kept = yield from forward_pass(scan.loops, operands, stacks[number])
            values |= zip(scan.forward.outvars, outs, strict=False)
            saved.append(kept)
    passing = [values[v][...] if isinstance(v.aval, AbstractRef) else values[v] for v in gradient.kept]
    return BetweenPasses(passing, saved), read(gradient.jaxpr.outvars[: gradient.results], values)


def backward(program: Program, between: BetweenPasses, sums: Sequence[Any]) -> Pass:
    """Run the backward pass of a microbatch: the sums of the gradients, in their dtypes, with its own."""
    gradient = program.gradient
    kept = zip(gradient.kept, between.values, strict=True)
    values = program.values | {v: jax.new_ref(x) if isinstance(v.aval, AbstractRef) else x for v, x in kept}
    numbers = {id(scan.backward): number for number, scan in enumerate(gradient.scans)}
    sums, in_place = list(sums), gradient.in_place
    for eqn in gradient.fills:
        # Of this microbatch: XLA would make those of several at once, and keep them until the last one needs its own.
        one, _ = lax.optimization_barrier((read(eqn.invars, values)[0], between.values))
        values[eqn.outvars[0]] = eqn.primitive.bind(one, **eqn.params)
    for eqns, number in _up_to_loops(gradient, gradient.jaxpr.eqns[gradient.cut :], numbers):
        evaluate_equations(gradient.jaxpr, eqns, values)
        if number is not None:
            scan = gradient.scans[number]
            loops = backward_loops(scan.loops, scan.backward.params["loops"].wanted)
            of_xs = scan.backward.outvars[loops.consts + loops.carry :]
            into = {n: sums[in_place[v]] for n, v in enumerate(of_xs) if v in in_place}
            operands = read(scan.reads, values), between.saved[number], read(scan.cotangents, values)
            consts, carry, xs = yield from backward_pass(loops, *operands, into)
            consts = map(in_memory_of, loops.segments[0].jaxpr.out_avals[: loops.consts], consts)
            values |= zip(scan.backward.outvars, [*consts, *carry, *xs], strict=True)
            for n in into:
                sums[in_place[of_xs[n]]] = xs[n]
    is_zero = zero_results(gradient.jaxpr)[gradient.results :]
    for number, v in enumerate(gradient.gradients):
        if not is_zero[number] and number not in in_place.values():
            (ct,) = read([v], values)
            sums[number] = add_jaxvals(sums[number], summand(ct, sums[number]))
    return sums


def _up_to_loops(
    gradient: Gradient, eqns: Sequence[JaxprEqn], loops: Mapping[int, int]
) -> Iterator[tuple[list[JaxprEqn], int | None]]:
    """Yield the equations for each microbatch up to each loop, with its scan's number, and those behind the last one.

    `loops`: the scans' numbers, by the `id`s of their loops' equations.
    """
    pending: list[JaxprEqn] = []
    for eqn in filter(gradient.is_of_each, eqns):
        if id(eqn) in loops:
            yield pending, loops[id(eqn)]
            pending = []
        else:
            pending.append(eqn)
    yield pending, None
