"""Evaluate a part of a jaxpr, and write out the jitted functions in it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import broadcast_in_dim_p, jit_p

from ..._jax import evaluate, has_effects

Values = dict[Var, Any]
Opens = Callable[[JaxprEqn, Sequence[bool]], bool]


def variables(atoms: Sequence[Any]) -> list[Var]:
    """Return those that are no literals."""
    return [a for a in atoms if isinstance(a, Var)]


def read(atoms: Sequence[Any], values: Values) -> list[Any]:
    """Return the value of each atom."""
    return [a.val if isinstance(a, Literal) else values[a] for a in atoms]


def with_unknown_names(jaxpr: Jaxpr) -> Any:
    """Return debug info for a jaxpr whose inputs and results are not those that were traced."""
    return jaxpr.debug_info.with_unknown_names()


def evaluate_equations(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], values: Values) -> None:
    """Evaluate some of a jaxpr's equations on `values`, and add their results there."""
    if not eqns:
        return
    made = [v for eqn in eqns for v in eqn.outvars]
    ins = list(dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v in values))
    part = jaxpr.replace(
        constvars=[], consts=[], invars=ins, outvars=made, eqns=[*eqns], debug_info=with_unknown_names(jaxpr)
    )
    values |= zip(made, evaluate(part, read(ins, values)), strict=True)


def depending(jaxpr: Jaxpr, on: Iterable[Var], also: Callable[[JaxprEqn], bool]) -> set[Var]:
    """Return the variables that depend on these, or on results of the equations that are `also`; those too."""
    found = set(on)
    for eqn in jaxpr.eqns:
        if also(eqn) or not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def written_out(jaxpr: Jaxpr, varies: Sequence[bool], opens: Opens) -> Jaxpr:
    """Return `jaxpr` with the jitted functions written out that `opens`, in these again.

    `opens`: a call of one, which of its operands vary where these inputs do -> whether.
    """
    return jax.make_jaxpr(lambda *operands: _written_out(jaxpr, operands, varies, opens)[0])(*jaxpr.in_avals)


def _written_out(
    jaxpr: Jaxpr, operands: Sequence[Any], varies: Sequence[bool], opens: Opens
) -> tuple[list[Any], list[bool]]:
    values = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*operands, *jaxpr.consts], strict=True))
    varying = {v for v, it in zip(jaxpr.invars, varies, strict=True) if it}
    pending: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        vary = [v in varying if isinstance(v, Var) else False for v in eqn.invars]
        outs_vary = [any(vary)] * len(eqn.outvars)
        if eqn.primitive is jit_p and opens(eqn, vary):
            evaluate_equations(jaxpr, pending, values)
            pending = []
            outs, outs_vary = _written_out(eqn.params["jaxpr"], read(eqn.invars, values), vary, opens)
            values |= zip(eqn.outvars, outs, strict=True)
        else:
            pending.append(eqn)
        varying |= {v for v, it in zip(eqn.outvars, outs_vary, strict=True) if it}
    evaluate_equations(jaxpr, pending, values)
    is_varying = [isinstance(v, Var) and v in varying for v in jaxpr.outvars]
    return read(jaxpr.outvars, values), is_varying


def with_needed_equations(jaxpr: Jaxpr) -> Jaxpr:
    """Return `jaxpr` without the equations that no result and no effect needs; the others stay what they are."""
    needed, eqns = set(variables(jaxpr.outvars)), list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        if has_effects(eqn) or not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns[::-1])


def zero_results(jaxpr: Jaxpr) -> list[bool]:
    """Return which results JAX has filled with zeros: cotangents of what a function does not depend on."""
    is_zero = lambda atom: isinstance(atom, Literal) and atom.val == 0
    filled = (eqn for eqn in jaxpr.eqns if eqn.primitive is broadcast_in_dim_p)
    zeros = {eqn.outvars[0] for eqn in filled if is_zero(eqn.invars[0])}
    return [is_zero(v) if isinstance(v, Literal) else v in zeros for v in jaxpr.outvars]
