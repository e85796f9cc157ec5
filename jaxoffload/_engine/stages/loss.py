"""A loss whose layers run on pipeline stages: what all devices compute together, before the layers and behind them.

These are two slices of the traced loss, and JAX differentiates each by itself. They are computed where they are needed,
also a second time: nothing of them is kept while a microbatch passes the stages.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import jit_p

from ..._jax import MOVES, RESHAPES, dce_jaxpr, evaluate, jvp_jaxpr, zero_of
from ..jaxprs.inline import depending, with_unknown_names, written_out, zero_results
from ..jaxprs.walk import walk
from ..layers.passes import Loops
from ..layers.placement import split_list
from ..layers.rows import filled
from ..layers.scan_primitive import backward_loops, scan_p
from ..microbatches.call import Call
from .chunk import Chunks, Operands


class Moved(NamedTuple):
    """How an operand of the layers is a parameter, cast and in another shape: the equations from one to the other, the
    last one first.

    A sum of its cotangents in `dtype`, that of the parameter's sum, is a sum of the parameter's.
    """

    param: int
    dtype: Any
    eqns: list[JaxprEqn]

    def back(self, total: Any) -> Any:
        """Return the sum of the parameter's cotangents."""
        for eqn in self.eqns:
            if eqn.primitive.name in RESHAPES:
                move = functools.partial(eqn.primitive.bind, **eqn.params)
                aval: Any = eqn.invars[0].aval
                shape = jax.ShapeDtypeStruct(aval.shape, total.dtype)
                (total,) = jax.linear_transpose(move, shape)(total)
        return total


@dataclass(frozen=True, eq=False)
class Divided:
    """A traced loss, divided at one scan.

    Attributes:
      jaxpr: as that of a `Call`, with jitted functions written out.
      scan: its equation.
      consts, fixed: how many inputs are constants, and how many are constants or parameters.
      dtype_of_sum: as that of a `Call`.
    """

    jaxpr: Jaxpr
    scan: JaxprEqn
    consts: int
    fixed: int
    dtype_of_sum: Callable[[Any], Any]

    @property
    def length(self) -> int:
        """How many layers the scan has."""
        return self.scan.params["call_jaxpr"].eqns[0].params["length"]

    @functools.cached_property
    def before(self) -> Jaxpr:
        """The inputs -> the operands of the scan."""
        return self._slice([], self.scan.invars)

    @functools.cached_property
    def behind(self) -> Jaxpr:
        """The inputs, the results of the scan -> those of the loss."""
        return self._slice(self.scan.outvars, self.jaxpr.outvars)

    def _slice(self, more: Sequence[Any], outs: Sequence[Any]) -> Jaxpr:
        names = with_unknown_names(self.jaxpr)
        eqns = [eqn for eqn in self.jaxpr.eqns if eqn is not self.scan]
        invars: list[Any] = [*self.jaxpr.invars, *more]
        whole = self.jaxpr.replace(invars=invars, outvars=[*outs], eqns=eqns, debug_info=names)
        live, _ = dce_jaxpr(whole, [True] * len(outs), True)
        return live

    @functools.cached_property
    def varies(self) -> list[bool]:
        """Which operands of the scan differ between microbatches."""
        varying = depending(self.before, self.before.invars[self.fixed :], lambda _: False)
        return [isinstance(v, Var) and v in varying for v in self.before.outvars]

    @functools.cached_property
    def perturbed(self) -> list[bool]:
        """Which operands of the scan have tangents."""
        is_param = [self.consts <= number < self.fixed for number in range(len(self.before.invars))]
        _, perturbed = jvp_jaxpr(self.before, is_param, False)
        return list(perturbed)

    @functools.cached_property
    def moved(self) -> dict[int, Moved]:
        """The perturbed operands of the scan that are parameters, moved.

        Without those whose cotangents casts on the way back would round, except to the dtype of the sum.
        """
        perturbed = itertools.compress(enumerate(self.before.outvars), self.perturbed)
        return {number: moved for number, value in perturbed if (moved := self._moved(value))}

    def _moved(self, value: Any) -> Moved | None:
        param, eqns = _moved(self.before, value)
        if param not in self.before.invars[self.consts : self.fixed]:
            return None
        avals: list[Any] = [param.aval, *(eqn.outvars[0].aval for eqn in eqns)]
        dtype = self.dtype_of_sum(param.aval.dtype)
        casts = {aval.dtype for aval in avals} - {dtype}
        exact = lambda dtype: (
            jnp.issubdtype(dtype, jnp.floating) and jnp.promote_types(dtype, value.aval.dtype) == dtype
        )
        number = self.before.invars.index(param) - self.consts
        return Moved(number, dtype, eqns) if all(map(exact, casts)) else None


def _moved(jaxpr: Jaxpr, value: Any) -> tuple[Any, list[JaxprEqn]]:
    """Return the value that is moved to this one, and the equations that do so, in jitted functions too."""
    size = lambda atom: math.prod(atom.aval.shape)
    made: dict[Any, Any] = {v: (eqn, number) for eqn in jaxpr.eqns for number, v in enumerate(eqn.outvars)}
    eqns: list[Any] = []
    while isinstance(value, Var) and value in made:
        eqn, number = made[value]
        if eqn.primitive is jit_p:
            inside = eqn.params["jaxpr"]
            before, moves = _moved(inside, inside.outvars[number])
            if before not in inside.invars:
                break
            eqns += moves
            value = eqn.invars[inside.invars.index(before)]
        elif eqn.primitive.name in MOVES and size(eqn.invars[number]) == size(value):
            eqns.append(eqn)
            value = eqn.invars[number]
        else:
            break
    return value, eqns


def divisions(call: Call) -> list[Divided]:
    """Divide a loss at each of its scans with layers, outside of other control flow."""
    varies = [number >= call.fixed for number in range(len(call.jaxpr.invars))]
    has_scan = lambda eqn, _: any(
        site.eqn.primitive is scan_p and all(e.primitive is jit_p for e in site.enclosing)
        for site in walk(eqn.params["jaxpr"])
    )
    jaxpr = written_out(call.jaxpr, varies, has_scan)
    scans = (eqn for eqn in jaxpr.eqns if eqn.primitive is scan_p)
    return [Divided(jaxpr, scan, len(call.consts), call.fixed, call.dtype_of_sum) for scan in scans]


@dataclass(frozen=True, eq=False)
class StagedLoss:
    """A divided loss, with its layers in chunks.

    Attributes:
      given: the values of its constants and parameters.
      microbatch: the number of a microbatch -> its values.
    """

    divided: Divided
    chunks: Chunks
    given: Sequence[Any]
    microbatch: Callable[[Any], list[Any]]

    @property
    def params(self) -> Sequence[Any]:
        return self.given[self.divided.consts :]

    @functools.cached_property
    def fixed(self) -> tuple[Operands, Operands]:
        """The operands of the scan that are the same for all microbatches: constants, and xs with a chunk per row."""
        varies, carry = self.divided.varies, self.chunks.carry
        those = [i for i, differs in enumerate(varies) if not differs and i not in carry]
        live, used = dce_jaxpr(self.divided.before, [i in those for i in range(len(varies))])
        values = [x for x, is_used in zip(self.given, used, strict=False) if is_used]
        fixed = dict(zip(those, evaluate(live, values), strict=True))
        xs = {i: self.chunks.dealt(x) for i, x in fixed.items() if i >= carry.stop}
        return {i: x for i, x in fixed.items() if i < carry.start}, xs

    @property
    def _along(self) -> list[int]:
        """The numbers of the operands that a microbatch takes along to the first layer: some that differ, the carry."""
        return [*self.chunks.along, *self.chunks.carry]

    @property
    def _returned(self) -> list[int]:
        """The numbers of the operands whose cotangents a microbatch brings back."""
        perturbed = self.chunks.loops.segments[0].layer.perturbed
        return [*self.chunks.back[1], *(i for i in self.chunks.carry if perturbed[i])]

    @property
    def along(self) -> list[Any]:
        """Abstract values of what a microbatch takes along to the first layer."""
        return [self.divided.before.out_avals[i] for i in self._along]

    @property
    def back(self) -> list[Any]:
        """Abstract values of what a microbatch takes back to the last layer."""
        operands, (reads, with_cotangents) = self.divided.before.out_avals, self.chunks.back
        of_outs = self._behind.out_avals[len(self.divided.jaxpr.outvars) + len(self.params) :]
        cotangents = (operands[i].to_ct_aval() for i in with_cotangents)
        return [*(operands[i] for i in reads), *cotangents, *itertools.compress(of_outs, self._reached[1])]

    def before(self, number: Any) -> list[Any]:
        """Return what a microbatch takes along to the first layer."""
        operands = evaluate(self.divided.before, self._inputs(number))
        return [operands[i] for i in self._along]

    def results(self, number: Any, outs: Sequence[Any]) -> list[Any]:
        """Return those of the loss for a microbatch. `outs`: the carry and the ys."""
        return evaluate(self.divided.behind, [*self._inputs(number), *outs])

    def behind(self, number: Any, outs: Sequence[Any]) -> tuple[list[Any], list[Any], dict[int, Any]]:
        """Run what is behind the layers for a microbatch, forward and backward.

        Return the results of the loss, what the microbatch takes back to the last layer, and the cotangents of those
        parameters, by their numbers, that have some. `outs`: the carry and the ys.
        """
        inputs, (reads, with_cotangents) = self._inputs(number), self.chunks.back
        operands = evaluate(self.divided.before, inputs)
        made = evaluate(self._behind, [*inputs, *outs])
        results, of_params, of_outs = split_list(made, [len(self.divided.jaxpr.outvars), len(self.params)])
        of_operands = (jax.typeof(operands[i]).to_ct_aval() for i in with_cotangents)
        zeros = [filled(aval, zero_of(aval.dtype)) for aval in of_operands]
        back = [*(operands[i] for i in reads), *zeros, *itertools.compress(of_outs, self._reached[1])]
        return results, back, {n: of_params[n] for n in self._reached[0]}

    def at_begin(self, number: Any, back: Sequence[Any]) -> dict[int, Any]:
        """Return the cotangents of parameters, by their numbers, from those that a microbatch has brought back from its
        first layer; those that are not zero.

        `back`: of operands, of the carry, and of the ys.
        """
        of_params = evaluate(self._at_begin, [*self._inputs(number), *back[: len(self._returned)]])
        return {n: of_params[n] for n in self._reached_at_begin}

    def _inputs(self, number: Any) -> list[Any]:
        return [*self.given, *self.microbatch(number)]

    @functools.cached_property
    def _behind(self) -> Jaxpr:
        """The inputs, the results of the scan -> those of the loss, the cotangents of the parameters and of the
        perturbed results."""
        out_perturbed = self.chunks.loops.segments[0].layer.out_perturbed

        def run(consts: Any, params: Any, microbatch: Any, outs: Any) -> Any:
            def value_of(params: Any, perturbed: Any) -> tuple[Any, list[Any]]:
                these = iter(perturbed)
                whole = [next(these) if p else x for x, p in zip(outs, out_perturbed, strict=True)]
                value, *others = evaluate(self.divided.behind, [*consts, *params, *microbatch, *whole])
                return value, others

            perturbed = list(itertools.compress(outs, out_perturbed))
            value, vjp, others = jax.vjp(value_of, params, perturbed, has_aux=True)
            return [value, *others], *vjp(filled(jax.typeof(value).to_ct_aval(), 1))

        return self._traced(run, self.divided.behind.in_avals[len(self.divided.jaxpr.invars) :])

    @functools.cached_property
    def _at_begin(self) -> Jaxpr:
        """The inputs, the cotangents that a microbatch has brought back -> those of the parameters."""
        before, perturbed = self.divided.before, self.divided.perturbed

        def run(consts: Any, params: Any, microbatch: Any, back: Any) -> Any:
            cts = [(i, ct) for i, ct in zip(self._returned, back, strict=True) if perturbed[i]]

            def operands_of(params: Any) -> list[Any]:
                operands = evaluate(before, [*consts, *params, *microbatch])
                return [operands[i] for i, _ in cts]

            _, vjp = jax.vjp(operands_of, params)
            return vjp([ct for _, ct in cts])

        return self._traced(run, [before.out_avals[i].to_ct_aval() for i in self._returned])

    def _traced(self, run: Callable[..., Any], more: list[Any]) -> Jaxpr:
        """Trace a function of the constants, the parameters, a microbatch, and more."""
        consts = list(self.given[: self.divided.consts])
        return jax.make_jaxpr(run)(consts, list(self.params), self.divided.before.in_avals[self.divided.fixed :], more)

    def zero_sum(self, param: int) -> Any:
        """Return what the sum of the gradients of a parameter begins with."""
        aval = jax.typeof(self.params[param])
        return filled(aval.update(dtype=self.divided.dtype_of_sum(aval.dtype)), 0)

    @property
    def beside(self) -> tuple[Jaxpr, ...]:
        """The jaxprs that a tick may run besides layers: before them, behind them, and at their begin again."""
        return self.divided.before, self._behind, self._at_begin

    @functools.cached_property
    def _reached(self) -> tuple[list[int], list[bool]]:
        """The parameters that what is behind the layers reads, and which perturbed results have cotangents."""
        first, loops = len(self.divided.jaxpr.outvars), self.chunks.loops
        zero = zero_results(self._behind)[first:]
        carry = sum(loops.segments[0].layer.out_perturbed[: loops.carry])
        wanted = [n < carry or not z for n, z in enumerate(zero[len(self.params) :])]
        return [n for n, z in enumerate(zero[: len(self.params)]) if not z], wanted

    @functools.cached_property
    def _reached_at_begin(self) -> list[int]:
        """The parameters that the operands of the scan are computed from."""
        return [n for n, zero in enumerate(zero_results(self._at_begin)) if not zero]

    @property
    def reached(self) -> list[int]:
        """The numbers of the parameters that have cotangents outside of the layers."""
        return sorted({*self._reached[0], *self._reached_at_begin})

    @property
    def backward(self) -> Loops:
        """The backward pass of a chunk, which takes what a microbatch takes back."""
        return backward_loops(self.chunks.loops, self._reached[1])
