"""A loss whose layers run on pipeline stages: what all devices compute together, before the layers and behind them.

These are two slices of the traced loss, and JAX differentiates each by itself. They are computed where they are needed,
also a second time: nothing of them is kept while a microbatch passes the stages.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import jit_p

from ..._jax import MOVES, RESHAPES, dce_jaxpr, evaluate, jvp_jaxpr, zero_of
from ..jaxprs.inline import variables, with_unknown_names, written_out, zero_results
from ..jaxprs.walk import walk
from ..layers.passes import Loops
from ..layers.rows import filled
from ..layers.scan_primitive import backward_loops, scan_p
from ..microbatches.call import Call
from .chunk import Chunks


class Moved(NamedTuple):
    """How an operand of the layers is a parameter, cast and in another shape: the equations from one to the other, the
    last one first.

    A sum of its cotangents in the parameter's dtype is a sum of the parameter's.
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
    """

    jaxpr: Jaxpr
    scan: JaxprEqn
    consts: int
    fixed: int

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
        varying = set(self.before.invars[self.fixed :])
        for eqn in self.before.eqns:
            if not varying.isdisjoint(variables(eqn.invars)):
                varying.update(eqn.outvars)
        return [isinstance(v, Var) and v in varying for v in self.before.outvars]

    @functools.cached_property
    def perturbed(self) -> list[bool]:
        """Which operands of the scan have tangents."""
        is_param = [self.consts <= number < self.fixed for number in range(len(self.before.invars))]
        _, perturbed = jvp_jaxpr(self.before, is_param, False)
        return list(perturbed)

    def moved(self, operand: int) -> Moved | None:
        """Return how an operand of the scan is a parameter, moved.

        None if it is not, or if casts on the way back would round each cotangent more than the last one does.
        """
        value = self.before.outvars[operand]
        param, eqns = _moved(self.before, value)
        if param not in self.before.invars[self.consts : self.fixed]:
            return None
        avals: list[Any] = [eqn.outvars[0].aval for eqn in eqns]
        casts = {aval.dtype for aval in avals} - {param.aval.dtype}
        wanted: Any = value.aval
        exact = lambda dtype: jnp.issubdtype(dtype, jnp.floating) and jnp.promote_types(dtype, wanted.dtype) == dtype
        number = self.before.invars.index(param) - self.consts
        return Moved(number, param.aval.dtype, eqns) if all(map(exact, casts)) else None


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


def divided_at(call: Call, number: int) -> Divided:
    """Divide a loss at the scan with this number among `scans_of(call)`."""
    jaxpr = _written_out(call)
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive is scan_p]
    return Divided(jaxpr, scans[number], len(call.consts), call.fixed)


def scans_of(call: Call) -> list[JaxprEqn]:
    """Return the scans of a loss with layers, outside of other control flow."""
    return [eqn for eqn in _written_out(call).eqns if eqn.primitive is scan_p]


def _written_out(call: Call) -> Jaxpr:
    varies = [number >= call.fixed for number in range(len(call.jaxpr.invars))]
    has_scan = lambda eqn, _: any(
        site.eqn.primitive is scan_p and all(e.primitive is jit_p for e in site.enclosing)
        for site in walk(eqn.params["jaxpr"])
    )
    return written_out(call.jaxpr, varies, has_scan)


class Behind(NamedTuple):
    """A microbatch that has passed all layers.

    Attributes:
      results: of the loss.
      back: what it takes back to the last layer.
      params: the cotangents of parameters, by their numbers; those that are not zero.
    """

    results: list[Any]
    back: list[Any]
    params: dict[int, Any]


@dataclass(frozen=True, eq=False)
class StagedLoss:
    """A divided loss, on the values of its constants and parameters (`given`), with its layers in chunks."""

    divided: Divided
    chunks: Chunks
    given: Sequence[Any]

    @property
    def scan(self) -> JaxprEqn:
        return self.divided.scan

    @property
    def params(self) -> Sequence[Any]:
        return self.given[self.divided.consts :]

    @property
    def carry(self) -> range:
        """The numbers of the operands that are the carry."""
        return range(self.chunks.loops.consts, self.chunks.loops.consts + self.chunks.loops.carry)

    @property
    def fixed(self) -> dict[int, Any]:
        """The operands of the scan that are the same for all microbatches, by their numbers."""
        those = [i for i, varies in enumerate(self.divided.varies) if not varies and i not in self.carry]
        live, used = dce_jaxpr(self.divided.before, [i in those for i in range(len(self.divided.varies))])
        values = [x for x, is_used in zip(self.given, used, strict=False) if is_used]
        return dict(zip(those, evaluate(live, values), strict=True))

    def operands(self, microbatch: Sequence[Any]) -> list[Any]:
        """Return those of the scan."""
        return evaluate(self.divided.before, [*self.given, *microbatch])

    def before(self, microbatch: Sequence[Any]) -> list[Any]:
        """Return what a microbatch takes along to the first layer: operands that differ, and the carry."""
        operands = self.operands(microbatch)
        return [operands[i] for i in (*self.chunks.along, *self.carry)]

    def results(self, microbatch: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
        """Return those of the loss. `outs`: the carry and the ys."""
        return evaluate(self.divided.behind, [*self.given, *microbatch, *outs])

    def behind(self, microbatch: Sequence[Any], outs: Sequence[Any]) -> Behind:
        """Run what is behind the layers, forward and backward. `outs`: the carry and the ys."""
        operands = self.operands(microbatch)
        results, of_params, of_outs = self._behind(microbatch, outs)
        params, wanted = self._reached
        reads, with_cotangents = self.chunks.back
        of_operands = (jax.typeof(operands[i]).to_ct_aval() for i in with_cotangents)
        zeros = [filled(aval, zero_of(aval.dtype)) for aval in of_operands]
        present = [ct for ct, w in zip(of_outs, wanted, strict=True) if w]
        back = [*(operands[i] for i in reads), *zeros, *present]
        return Behind(results, back, {n: of_params[n] for n in params})

    def _behind(self, microbatch: Sequence[Any], outs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the results of the loss, and the cotangents of the parameters and of the perturbed results."""
        out_perturbed = self.chunks.loops.segments[0].layer.out_perturbed

        def value_of(params: Sequence[Any], perturbed: Sequence[Any]) -> tuple[Any, list[Any]]:
            these = iter(perturbed)
            whole = [next(these) if p else x for x, p in zip(outs, out_perturbed, strict=True)]
            consts = self.given[: self.divided.consts]
            value, *others = evaluate(self.divided.behind, [*consts, *params, *microbatch, *whole])
            return value, others

        perturbed = [x for x, p in zip(outs, out_perturbed, strict=True) if p]
        value, vjp, others = jax.vjp(value_of, [*self.params], perturbed, has_aux=True)
        return [value, *others], *vjp(filled(jax.typeof(value).to_ct_aval(), 1))

    @functools.cached_property
    def _reached(self) -> tuple[list[int], list[bool]]:
        """The parameters that what is behind the layers reads, and which perturbed results have cotangents."""
        jaxpr = jax.make_jaxpr(lambda microbatch, outs: self._behind(microbatch, outs)[1:])(*self._behind_avals)
        zero = zero_results(jaxpr)
        count = len(self.params)
        carry = sum(self.chunks.loops.segments[0].layer.out_perturbed[: self.chunks.loops.carry])
        wanted = [n < carry or not z for n, z in enumerate(zero[count:])]
        return [n for n, z in enumerate(zero[:count]) if not z], wanted

    @property
    def _behind_avals(self) -> tuple[list[Any], list[Any]]:
        avals = self.divided.behind.in_avals
        first = self.divided.fixed
        microbatch = len(self.divided.jaxpr.invars)
        return avals[first:microbatch], avals[microbatch:]

    @property
    def beside(self) -> tuple[Jaxpr, ...]:
        """The jaxprs that a tick may run besides layers: before them, behind them, and at their begin again."""
        microbatch, outs = self._behind_avals
        return (
            self.divided.before,
            jax.make_jaxpr(self._behind)(microbatch, outs),
            jax.make_jaxpr(self._at_begin)(microbatch, self._back_avals),
        )

    @functools.cached_property
    def loops(self) -> Loops:
        """The backward pass of a chunk, which takes what a microbatch takes back."""
        return backward_loops(self.chunks.loops, self._reached[1])

    def at_begin(self, microbatch: Sequence[Any], back: Sequence[Any]) -> dict[int, Any]:
        """Return the cotangents of parameters, by their numbers, from those that a microbatch has brought back from its
        first layer; those that are not zero.

        `back`: of operands, of the carry, and of the ys.
        """
        of_params = self._at_begin(microbatch, back)
        return {number: of_params[number] for number in self._reached_at_begin}

    def _at_begin(self, microbatch: Sequence[Any], back: Sequence[Any]) -> list[Any]:
        cts = [(i, ct) for i, ct in zip(self._returned, back, strict=False) if self.divided.perturbed[i]]

        def operands_of(params: Sequence[Any]) -> list[Any]:
            consts = self.given[: self.divided.consts]
            operands = evaluate(self.divided.before, [*consts, *params, *microbatch])
            return [operands[i] for i, _ in cts]

        _, vjp = jax.vjp(operands_of, [*self.params])
        (of_params,) = vjp([ct for _, ct in cts])
        return of_params

    @property
    def _returned(self) -> list[int]:
        """The numbers of the operands whose cotangents a microbatch brings back."""
        perturbed = self.chunks.loops.segments[0].layer.perturbed
        return [*self.chunks.back[1], *(i for i in self.carry if perturbed[i])]

    @property
    def _back_avals(self) -> list[Any]:
        return [self.divided.before.out_avals[i].to_ct_aval() for i in self._returned]

    @functools.cached_property
    def _reached_at_begin(self) -> list[int]:
        jaxpr = jax.make_jaxpr(self._at_begin)(self._behind_avals[0], self._back_avals)
        return [number for number, zero in enumerate(zero_results(jaxpr)) if not zero]

    def moved(self, operand: int) -> Moved:
        """Return how an operand whose cotangents stages sum is a parameter."""
        found = self.divided.moved(operand)
        assert found is not None
        return found
