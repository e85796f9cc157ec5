"""Warn where a loss draws the same random numbers in all microbatches, such as the masks of a dropout.

A loop in Python that changes a module of Flax NNX, or splits a key, draws others each time. `accumulate` traces the
loss once: random numbers differ if their key comes with the microbatch.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import cond_p, scan_p
from jax.ref import AbstractRef

from ._engine.jaxprs.walk import nested
from ._engine.layers.scan_primitive import body_of_scan
from ._errors import warn
from ._jax import DRAWS


def warn_of_same_draws(caller: str, jaxpr: Jaxpr, differ: Sequence[bool], microbatches: int) -> None:
    """Warn if what is drawn in a traced loss depends on none of the operands that `differ` between microbatches."""
    same: list[JaxprEqn] = []
    _follow(jaxpr, differ, same)
    if same and microbatches > 1:
        warn(
            f"{caller}: the loss draws the same random numbers in all microbatches, such as the masks of "
            "a dropout: their key does not come with a microbatch. Split a key, one per microbatch, and give "
            f"jax.random.split(key, {microbatches}) as an argument of the loss"
        )


def _follow(jaxpr: Jaxpr, differ: Sequence[bool], same: list[JaxprEqn]) -> list[bool]:
    """Return which results differ where these operands do, and add to `same` what is drawn from those that do not."""
    differing = {v for v, it in zip(jaxpr.invars, differ, strict=True) if it}
    does = lambda v: isinstance(v, Var) and (v in differing or isinstance(v.aval, AbstractRef))
    for eqn in jaxpr.eqns:
        results = _follow_equation(eqn, list(map(does, eqn.invars)), same)
        differing |= {v for v, it in zip(eqn.outvars, results, strict=True) if it}
    return list(map(does, jaxpr.outvars))


def _follow_equation(eqn: JaxprEqn, differ: list[bool], same: list[JaxprEqn]) -> list[bool]:
    if eqn.primitive.name in DRAWS and not any(differ):
        same.append(eqn)
    if eqn.primitive is scan_p:
        return _follow_scan(eqn, differ, same)
    operands = differ[1:] if eqn.primitive is cond_p else differ
    coarse, found = any(differ) or bool(eqn.effects), []
    for body in nested(eqn):
        aligned = len(body.invars) == len(operands)
        found.append(_follow(body, operands if aligned else [coarse] * len(body.invars), same))
    which = eqn.primitive is cond_p and differ[0]
    if which or not found or any(len(results) != len(eqn.outvars) for results in found):
        return [coarse] * len(eqn.outvars)
    return list(map(any, zip(*found, strict=True)))


def _follow_scan(eqn: JaxprEqn, differ: list[bool], same: list[JaxprEqn]) -> list[bool]:
    """Follow the body until the carry differs at no more places: an iteration sees what the last one made differ."""
    body = body_of_scan(eqn)
    while True:
        consts, carry, xs = body.split(differ)
        made: list[JaxprEqn] = []
        results = _follow(body.jaxpr, differ, made)
        after: list[Any] = [a or b for a, b in zip(carry, results[: body.carry], strict=True)]
        if after == carry:
            same += made
            return results
        differ = [*consts, *after, *xs]
