"""A traced loss in pieces: its scans, and what stands before, between and behind them.

Each piece is differentiated by itself, so that the pieces of one microbatch's backward pass can run beside those of
another's forward pass. Cotangents are added in the order in which JAX adds them when it differentiates the whole: a
variable that a piece reads is among its results too, so that the cotangent that comes from behind is the first.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core.primitives import jit_p, reshape_p

from ..._jax import (
    MOVES,
    RESHAPES,
    UndefinedPrimal,
    backward_pass,
    convert_constvars_jaxpr,
    evaluate,
    partial_eval_jaxpr_nounits,
)
from ..decide.derivative import derivative
from ..decide.mutable_refs import passes_refs
from ..jaxprs.walk import walk
from ..layers.layer import each_once, halves
from ..layers.passes import Loops


class Moved(NamedTuple):
    """How a value is an argument, cast and in another shape: the equations from one to the other, the last one first.

    A sum of its cotangents in the argument's dtype is a sum of the argument's.
    """

    argument: Var
    eqns: list[JaxprEqn]

    def back(self, total: Any) -> Any:
        """The sum of the argument's cotangents."""
        for eqn in self.eqns:
            if eqn.primitive.name in RESHAPES:
                move = functools.partial(eqn.primitive.bind, **eqn.params)
                aval: Any = eqn.invars[0].aval
                shape = jax.ShapeDtypeStruct(aval.shape, total.dtype)
                (total,) = jax.linear_transpose(move, shape)(total)
        return total


class Straight(NamedTuple):
    """Equations before, between or behind scans, differentiated.

    Attributes:
      ins: the variables that they read.
      outs: those that they define and something behind them reads, and those of `ins` that something else reads too.
      once: the fixed ins -> results that are the same for all microbatches, and what `each` needs of them.
      each: these, the varying ins -> the other results.
      varies, result_varies: which ins, and which results (the outs, then the residuals), differ between microbatches.
      linear: residuals, tangents of the perturbed ins -> tangents of the perturbed outs.
      perturbed, out_perturbed: which ins and outs have tangents.
    """

    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    once: Jaxpr
    each: Jaxpr
    varies: tuple[bool, ...]
    result_varies: tuple[bool, ...]
    linear: Jaxpr
    perturbed: tuple[bool, ...]
    out_perturbed: tuple[bool, ...]

    def split(self, varies: bool) -> tuple[list[Var], int]:
        """The outs that differ between microbatches, or those that do not, and how many such residuals there are."""
        of_outs, of_residuals = self.result_varies[: len(self.outs)], self.result_varies[len(self.outs) :]
        return [v for v, it in zip(self.outs, of_outs, strict=True) if it is varies], of_residuals.count(varies)

    def moved(self, out: Var) -> Moved | None:
        """How one of the perturbed outs is one of the ins, moved.

        None if it is not, or if casts on the way back would round each cotangent more than the last one does.
        """
        those: Any = lambda values, flags: [v for v, flag in zip(values, flags, strict=True) if flag]
        ins, outs = those(self.ins, self.perturbed), those(self.outs, self.out_perturbed)
        tangents = self.linear.invars[len(self.linear.invars) - len(ins) :]
        tangent, eqns = _moved(self.linear, self.linear.outvars[outs.index(out)])
        if tangent not in tangents:
            return None
        argument, wanted = ins[tangents.index(tangent)], outs[outs.index(out)].aval.dtype
        avals: list[Any] = [eqn.outvars[0].aval for eqn in eqns]
        casts = {aval.dtype for aval in avals} - {argument.aval.dtype}
        exact = lambda dtype: jnp.issubdtype(dtype, jnp.floating) and jnp.promote_types(dtype, wanted) == dtype
        return Moved(argument, eqns) if all(map(exact, casts)) else None

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The cotangents of the perturbed ins, from those of the perturbed outs; some are a symbolic `Zero`."""
        primals = [*residuals, *map(UndefinedPrimal, self.linear.in_avals[len(residuals) :])]
        return backward_pass(self.linear, False, self.linear.consts, primals, cotangents)[len(residuals) :]


class Scan(NamedTuple):
    """A scan of ours that something perturbs."""

    eqn: JaxprEqn
    perturbed: tuple[bool, ...]  # its operands
    loops: Loops


class Pieces(NamedTuple):
    """A loss, divided.

    Attributes:
      invars: of the constants that it closes over, and of its arguments; `outvars`: the loss, and other results.
      pieces: in the order in which they run; `last` comes behind them.
      varies: the variables before the last piece that differ between microbatches.
    """

    consts: list[Any]
    invars: list[Var]
    outvars: list[Any]
    pieces: list[Straight | Scan]
    last: Straight
    varies: frozenset[Var]

    @property
    def numbers(self) -> dict[Var, int]:
        """A number for each variable that passes from piece to piece; a loop can carry values by these."""
        made = [piece.outs if isinstance(piece, Straight) else piece.eqn.outvars for piece in [*self.pieces, self.last]]
        variables = dict.fromkeys(itertools.chain(self.invars, *made))
        return {v: number for number, v in enumerate(variables)}

    def moved(self, v: Any) -> Moved | None:
        """How a perturbed value before the scans is an argument, moved; None if it is not."""
        if v in self.invars:
            return Moved(v, [])
        first = self.pieces[0]
        assert isinstance(first, Straight)
        return first.moved(v)

    @property
    def scans(self) -> list[Scan]:
        return [piece for piece in self.pieces if isinstance(piece, Scan)]

    @property
    def beside(self) -> tuple[Straight, ...]:
        """The pieces beside the scans."""
        return (*(piece for piece in self.pieces if isinstance(piece, Straight)), self.last)


def divide(
    jaxpr: Jaxpr,
    perturbed: Sequence[bool],
    varies: Sequence[bool],
    scan_p: Primitive,
    loops_of: Callable[[JaxprEqn, tuple[bool, ...]], Loops],
    chosen: Callable[[list[JaxprEqn]], list[JaxprEqn]] = list,
) -> Pieces | None:
    """Divide a loss at its scans; None if a `jax.new_ref` would pass from piece to piece.

    `perturbed`, `varies`: which arguments have tangents, and which differ between microbatches. `loops_of`: an equation
    of `scan_p`, which of its operands have tangents -> its forward loops. `chosen`: all scans -> those to divide at.

    A perturbed argument that the loss only reshapes is taken in the shape that it has then, so that layers which are
    stored in groups are the xs of a scan themselves. Scans inside jitted functions count, but not those inside other
    control flow. A scan that nothing perturbs, or that has no layers, is part of what stands around it.
    """
    jaxpr = _with_shapes_read(_opened(jaxpr, scan_p), perturbed)
    if passes_refs(jaxpr):
        return None
    consts = jaxpr.consts
    if consts:
        jaxpr = convert_constvars_jaxpr(jaxpr)
    fixed = [False] * len(consts)
    state = _State(jaxpr, _select(jaxpr.invars, [*fixed, *perturbed]), _select(jaxpr.invars, [*fixed, *varies]))
    pieces: list[Straight | Scan] = []
    pending: list[JaxprEqn] = []
    scans = [e for e in jaxpr.eqns if e.primitive is scan_p and e.params["call_jaxpr"].eqns[0].params["length"]]
    scans = chosen(scans)
    for number, eqn in enumerate(jaxpr.eqns):
        if any(eqn is scan for scan in scans):
            before = state.straight(pending, number)
            has_tangents = state.perturbed | _select(before.outs, before.out_perturbed)
            if has_tangents.intersection(_variables(eqn.invars)):
                of_operands = tuple(v in has_tangents for v in map(_hashable, eqn.invars))
                scan = Scan(eqn, of_operands, loops_of(eqn, of_operands))
                pieces += [before, scan] if pending else [scan]
                state.add(before, scan, has_tangents)
                pending = []
                continue
        pending.append(eqn)
    last = state.straight(pending, len(jaxpr.eqns))
    return Pieces(list(consts), jaxpr.invars, jaxpr.outvars, pieces, last, frozenset(state.varies))


class _State:
    """What is known of the variables, up to some equation."""

    def __init__(self, jaxpr: Jaxpr, perturbed: set[Var], varies: set[Var]):
        self.jaxpr, self.perturbed, self.varies = jaxpr, perturbed, varies

    def straight(self, eqns: list[JaxprEqn], stop: int) -> Straight:
        """The piece of these equations, behind which equation `stop` comes."""
        later = {v for eqn in self.jaxpr.eqns[stop:] for v in _variables(eqn.invars)}
        later |= set(_variables(self.jaxpr.outvars))
        defined = {v for eqn in eqns for v in eqn.outvars}
        read = dict.fromkeys(v for eqn in eqns for v in _variables(eqn.invars) if v not in defined)
        if stop == len(self.jaxpr.eqns):  # a result may be an argument
            read |= dict.fromkeys(v for v in _variables(self.jaxpr.outvars) if v not in defined)
        ins = tuple(read)
        made = [v for eqn in eqns for v in eqn.outvars if v in later]
        return self._differentiated(eqns, ins, (*made, *(v for v in ins if v in later)))

    def _differentiated(self, eqns: list[JaxprEqn], ins: tuple[Var, ...], outs: tuple[Var, ...]) -> Straight:
        part = self.jaxpr.replace(
            constvars=[], invars=list(ins), outvars=list(outs), eqns=eqns, debug_info=_unnamed(self.jaxpr)
        )
        part = jax.make_jaxpr(lambda *values: evaluate(part, values))(*(v.aval for v in ins))
        perturbed, varies = (tuple(v in those for v in ins) for those in (self.perturbed, self.varies))
        jvp, out_perturbed = derivative(part, perturbed, False, False)
        forward, linear = each_once(*halves(jvp, len(ins), len(outs)), len(outs))
        if part.effects:  # they happen for each microbatch
            varies, result_varies = (True,) * len(ins), [True] * len(forward.outvars)
            once, each = jax.make_jaxpr(list)(), forward
        else:
            once, each, result_varies, _ = partial_eval_jaxpr_nounits(forward, varies, False)
        return Straight(ins, outs, once, each, varies, tuple(result_varies), linear, perturbed, out_perturbed)

    def add(self, piece: Straight, scan: Scan, has_tangents: set[Var]) -> None:
        """Go on behind a piece and the scan that follows it."""
        self.perturbed = has_tangents | _select(scan.eqn.outvars, scan.loops.segments[0].layer.out_perturbed)
        self.varies |= _select(piece.outs, piece.result_varies[: len(piece.outs)])
        self.varies |= set(scan.eqn.outvars)


def _moved(jaxpr: Jaxpr, value: Any) -> tuple[Any, list[JaxprEqn]]:
    """The value of a jaxpr that is moved to another one, and the equations that do so, in jitted functions too."""
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


def _with_shapes_read(jaxpr: Jaxpr, arguments: Sequence[bool]) -> Jaxpr:
    """`jaxpr`, in which these arguments have the shape that they are reshaped to, if that is all that reads them."""
    read = Counter(v for eqn in jaxpr.eqns for v in _variables(eqn.invars)) + Counter(_variables(jaxpr.outvars))
    may = {v for v in _select(jaxpr.invars, arguments) if read[v] == 1}
    plain = {"new_sizes": None, "dimensions": None, "sharding": None}
    is_view = lambda e: e.primitive is reshape_p and e.params | {"new_sizes": None} == plain
    views = {e.invars[0]: e for e in jaxpr.eqns if is_view(e) and _hashable(e.invars[0]) in may}
    invars = [views[v].outvars[0] if v in views else v for v in jaxpr.invars]
    eqns = [eqn for eqn in jaxpr.eqns if not any(eqn is view for view in views.values())]
    return jaxpr.replace(invars=invars, eqns=eqns, debug_info=_unnamed(jaxpr))


def _opened(jaxpr: Jaxpr, scan_p: Primitive) -> Jaxpr:
    """`jaxpr` with the jitted functions that contain such scans written out."""

    def opens(eqn: JaxprEqn) -> bool:
        return eqn.primitive is jit_p and any(
            site.eqn.primitive is scan_p and all(e.primitive is jit_p for e in site.enclosing)
            for site in walk(eqn.params["jaxpr"])
        )

    def run(*operands: Any) -> list[Any]:
        values = dict(zip(jaxpr.invars, operands, strict=True)) | dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        read = lambda atoms: [a.val if isinstance(a, Literal) else values[a] for a in atoms]
        for eqn in jaxpr.eqns:
            if opens(eqn):
                outs = evaluate(_opened(eqn.params["jaxpr"], scan_p), read(eqn.invars))
            else:
                ins = list(dict.fromkeys(_variables(eqn.invars)))
                alone = jaxpr.replace(
                    constvars=[], consts=[], invars=ins, outvars=eqn.outvars, eqns=[eqn], debug_info=_unnamed(jaxpr)
                )
                outs = evaluate(alone, read(ins))
            values |= zip(eqn.outvars, outs, strict=True)
        return read(jaxpr.outvars)

    return jax.make_jaxpr(run)(*jaxpr.in_avals) if any(map(opens, jaxpr.eqns)) else jaxpr


def _variables(atoms: Sequence[Any]) -> list[Var]:
    return [a for a in atoms if isinstance(a, Var)]


def _hashable(atom: Any) -> Var | None:
    return atom if isinstance(atom, Var) else None


def _select(variables: Sequence[Var], flags: Sequence[bool]) -> set[Var]:
    return {v for v, flag in zip(variables, flags, strict=True) if flag}


def _unnamed(jaxpr: Jaxpr) -> Any:
    return jaxpr.debug_info.with_unknown_names()
