"""Write a jaxpr out as straight code: calls, branches and short loops opened."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import cond_p, scan_p

from .._engine.jaxprs.inline import evaluate_equations, read
from .._engine.jaxprs.walk import nested, operands_of
from .._jax import CALLS, CUSTOM_RULES, has_effects, lower_jaxpr

UNROLLED = 32  # iterations of a loop; Muon has five


def opened(jaxpr: Jaxpr) -> Jaxpr:
    """Return `jaxpr` without calls, short loops, and branches: all of them are computed, as under `jax.vmap`."""
    return jax.make_jaxpr(lambda *operands: _straight(lower_jaxpr(jaxpr), operands))(*jaxpr.in_avals)


def _straight(jaxpr: Jaxpr, operands: Sequence[Any]) -> list[Any]:
    values = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*operands, *jaxpr.consts], strict=True))
    for opens, eqns in itertools.groupby(jaxpr.eqns, _opens):
        if not opens:
            evaluate_equations(jaxpr, list(eqns), values)
            continue
        for eqn in eqns:
            values |= zip(eqn.outvars, _results(eqn, read(eqn.invars, values)), strict=True)
    return read(jaxpr.outvars, values)


def _opens(eqn: JaxprEqn) -> bool:
    if eqn.primitive is cond_p:
        return not has_effects(eqn)  # those of both branches would happen
    if eqn.primitive is scan_p:
        return 0 < eqn.params["length"] <= UNROLLED
    return eqn.primitive.name in CALLS | CUSTOM_RULES


def _results(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    if eqn.primitive is scan_p:
        return _unrolled(eqn, operands)
    if eqn.primitive is cond_p:
        branch, *operands = operands
        results = [_straight(jaxpr, operands) for jaxpr in eqn.params["branches"]]
        return list(map(functools.partial(lax.select_n, branch), *results))
    return _straight(nested(eqn)[0], operands)


def _unrolled(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Return the results of a scan."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    carried = [n for n, v in enumerate(operands_of(eqn, body)) if v is None]
    ys: list[list[Any]] = [[]] * length
    for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
        row = lambda x, v, i=i: lax.index_in_dim(x, i, keepdims=False) if np.ndim(x) > v.aval.ndim else x
        outs = _straight(body, list(map(row, operands, body.invars)))
        for n, x in zip(carried, outs, strict=False):
            operands[n] = x
        ys[i] = [lax.expand_dims(y, (0,)) for y in outs[len(carried) :]]
    return [*(operands[n] for n in carried), *(lax.concatenate(rows, 0) for rows in zip(*ys, strict=True))]
