"""Find the residuals of checkpoints that the backward pass runs again.

A scan inside another checkpoint keeps nothing between the program's forward and backward pass. It runs once more in
the backward pass, and keeps and moves its residuals then. To see them, the program is differentiated here up to its
linear part; each checkpoint in that is a function of residuals and tangents, which is split as its transposition does.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var
from jax.extend.core.primitives import remat_p

from ..._engine.decide.derivative import derivative
from ..._engine.jaxprs.walk import bodies, devices_of, walk
from ..._engine.layers.layer import plan_of, transposed
from ..._engine.layers.transpose_only import linear_p
from ..._jax import partial_eval_jaxpr_nounits


class Rerun(NamedTuple):
    """One run of a checkpoint by its backward pass."""

    forward: Jaxpr  # what is not linear -> results, residuals
    residuals: list[Any]  # variables of `forward`
    backward: Jaxpr  # residuals, cotangents -> cotangents
    devices: int  # how many a `shard_map` around it divides it over


def reruns(f: Callable[..., Any], *args: Any) -> Iterator[Rerun]:
    """The reruns of the checkpoints with a plan inside, in the derivative of `f` for all floating-point inputs; a loop
    counts once."""
    jaxpr = jax.make_jaxpr(f)(*args)
    floating = tuple(bool(jnp.issubdtype(aval.dtype, jnp.inexact)) for aval in jaxpr.in_avals)
    jvp, _ = derivative(jaxpr, floating, False, False)
    yield from _of_linear(*_linear_part(jvp, _tangents(jvp, sum(floating)))[1:], devices=1)


def _tangents(jaxpr: Jaxpr, count: int) -> list[bool]:
    """Which inputs are tangents: the last ones."""
    return [i >= len(jaxpr.invars) - count for i in range(len(jaxpr.invars))]


def _linear_part(jaxpr: Jaxpr, is_linear: Sequence[bool]) -> tuple[Jaxpr, Jaxpr, list[bool]]:
    """Split a jaxpr into what needs no tangents, whose last results are residuals, and the rest, which takes residuals
    and tangents; return both, and which inputs of the second are tangents."""
    known, linear, _, residuals = partial_eval_jaxpr_nounits(jaxpr, list(is_linear), False)
    return known, linear, [i >= len(residuals) for i in range(len(linear.invars))]


def _of_linear(jaxpr: Jaxpr, is_linear: Sequence[bool], devices: int) -> Iterator[Rerun]:
    """The reruns in a jaxpr that is linear in some inputs, except for checkpoints and scans of ours in it."""
    tangents = {var for var, linear in zip(jaxpr.invars, is_linear, strict=True) if linear}
    for eqn in jaxpr.eqns:
        flags = [isinstance(v, Var) and v in tangents for v in eqn.invars]
        if not any(flags):
            continue
        tangents.update(eqn.outvars)
        if eqn.primitive is remat_p:
            yield from _of_checkpoint(eqn.params["jaxpr"], flags, devices)
        elif eqn.primitive is linear_p:
            for layer in eqn.params["layers"]:
                inside = layer.tangent_jaxpr
                yield from _of_linear(inside, _tangents(inside, len(inside.invars) - len(layer.layout.kept)), devices)
        else:
            for body in bodies(eqn):  # a cond's index comes first, and is none of its branches' operands
                yield from _of_linear(body, flags[len(flags) - len(body.invars) :], devices * devices_of(eqn))


def _of_checkpoint(jaxpr: Jaxpr, is_linear: Sequence[bool], devices: int) -> Iterator[Rerun]:
    if not _has_plans(jaxpr):
        return
    known, linear, flags = _linear_part(jaxpr, is_linear)
    count = flags.count(False)
    residuals = known.outvars[len(known.outvars) - count :]
    yield Rerun(known, residuals, transposed(linear, count), devices)
    yield from _of_linear(linear, flags, devices)


def _has_plans(jaxpr: Jaxpr) -> bool:
    eqns = (site.eqn for site in walk(jaxpr, bodies))
    return any(eqn.primitive is linear_p or plan_of(eqn.params.get("policy")) is not None for eqn in eqns)
