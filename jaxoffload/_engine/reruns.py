"""What is kept inside a checkpoint, while its backward pass runs it again.

A scan under another checkpoint keeps nothing between the forward and the backward pass of the whole: it runs once
more there, and keeps and moves its residuals then. The whole is differentiated here once more, up to its linear part;
each checkpoint in that is a function of residuals and tangents, which is split as its own transposition would do.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var
from jax.extend.core.primitives import remat_p
from jax.interpreters import partial_eval as pe

from .derivative import derivative
from .layer import plan_of, transposed
from .transpose_only import linear_p
from .walk import bodies, devices_of, walk


class Rerun(NamedTuple):
    """One run of a checkpoint by its backward pass."""

    forward: Jaxpr  # what is not linear: to results, and last to residuals
    residuals: list[Any]  # of its variables
    backward: Jaxpr  # residuals, cotangents -> cotangents
    devices: int  # over how many a `shard_map` around it divides it


def reruns(f: Callable[..., Any], *args: Any) -> Iterator[Rerun]:
    """Of each checkpoint in `f`, differentiated by all floating-point inputs, that has a plan inside; once a loop."""
    jaxpr = jax.make_jaxpr(f)(*args)
    floating = tuple(bool(jnp.issubdtype(aval.dtype, jnp.inexact)) for aval in jaxpr.in_avals)
    jvp, _ = derivative(jaxpr, floating, False, False)
    yield from _of_linear(*_linear_part(jvp, _tangents(jvp, sum(floating)))[1:], devices=1)


def _tangents(jaxpr: Jaxpr, count: int) -> list[bool]:
    """Which inputs are tangents: the last ones."""
    return [i >= len(jaxpr.invars) - count for i in range(len(jaxpr.invars))]


def _linear_part(jaxpr: Jaxpr, is_linear: Sequence[bool]) -> tuple[Jaxpr, Jaxpr, list[bool]]:
    """What can be computed without tangents, to residuals last; the rest, of these and the tangents; which is which."""
    known, linear, _, residuals = pe.partial_eval_jaxpr_nounits(jaxpr, list(is_linear), False)
    return known, linear, [i >= len(residuals) for i in range(len(linear.invars))]


def _of_linear(jaxpr: Jaxpr, is_linear: Sequence[bool], devices: int) -> Iterator[Rerun]:
    """Of a jaxpr whose equations are linear in the inputs that are said to be, checkpoints and ours apart."""
    moving = {var for var, linear in zip(jaxpr.invars, is_linear, strict=True) if linear}
    for eqn in jaxpr.eqns:
        flags = [isinstance(v, Var) and v in moving for v in eqn.invars]
        if not any(flags):
            continue
        moving.update(eqn.outvars)
        if eqn.primitive is remat_p:
            yield from _of_checkpoint(eqn.params["jaxpr"], flags, devices)
        elif eqn.primitive is linear_p:
            for layer in eqn.params["layers"]:
                inside = layer.linear
                yield from _of_linear(inside, _tangents(inside, len(inside.invars) - len(layer.kept)), devices)
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
