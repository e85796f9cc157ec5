"""Nested jaxprs: one walk that reads all equations, one map that rewrites them, and how operands enter a body."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import cond_p, scan_p

from ..._jax import CALLS, CUSTOM_RULES, FORWARD, KERNELS, SHARD_MAP, partial_eval_rules, traced_function


def nested(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return all jaxprs among an equation's parameters, those that autodiff replaces or ignores included.

    Kernels are not entered: their jaxprs are long and hold nothing of ours.
    """
    if eqn.primitive.name in KERNELS:
        return []
    trees = [value for value in eqn.params.values() if type(value) not in _LEAVES and not _is_shape(value)]
    trees += [traced_function(eqn)] if eqn.primitive.name in CUSTOM_RULES else []
    return [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, Jaxpr)] if trees else []


_LEAVES = {type(None), bool, int, float, str, jax.sharding.NamedSharding}  # most parameters, and those in tuples


def _is_shape(value: Any) -> bool:
    """Return if a value is a tuple of leaves, such as a shape."""
    return type(value) is tuple and _LEAVES.issuperset(map(type, value))


def bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the nested jaxprs that autodiff differentiates in place."""
    return [body for _, body in placed_bodies(eqn)]


def placed_bodies(eqn: JaxprEqn) -> Iterator[tuple[tuple[str, int], Jaxpr]]:
    """Yield `bodies`, each with its place among the equation's parameters."""
    if eqn.primitive.name == FORWARD or (eqn.primitive not in partial_eval_rules and eqn.primitive.name not in CALLS):
        return
    for key, value in eqn.params.items():
        for k, body in enumerate(value if isinstance(value, (tuple, list)) else [value]):
            if isinstance(body, Jaxpr):
                yield (key, k), body


class Site(NamedTuple):
    """An equation, and where it stands in the jaxpr that is walked."""

    eqn: JaxprEqn
    runs: int  # the lengths of the scans around it, multiplied
    devices: int  # how many devices the `shard_map`s around it divide values over
    enclosing: tuple[JaxprEqn, ...]  # the equations around it, outermost first


def walk(
    jaxpr: Jaxpr,
    enter: Callable[[JaxprEqn], Iterable[Jaxpr]] = nested,
    runs: int = 1,
    devices: int = 1,
    enclosing: tuple[JaxprEqn, ...] = (),
) -> Iterator[Site]:
    """Yield each equation of `jaxpr` in order, followed by those of the nested jaxprs that `enter` returns for it."""
    for eqn in jaxpr.eqns:
        yield Site(eqn, runs, devices, enclosing)
        for body in enter(eqn):
            inside = runs * eqn.params.get("length", 1), devices * devices_of(eqn), (*enclosing, eqn)
            yield from walk(body, enter, *inside)


def map_bodies(eqn: JaxprEqn, change: Callable[[Any, Jaxpr], Jaxpr]) -> JaxprEqn:
    """Return the equation with each of its `bodies` replaced by `change(place, body)`; itself if none changes.

    JAX's caches and the functions of an HLO module go by a jaxpr's identity, so an unchanged one must stay itself.
    """
    params = dict(eqn.params)
    changed = False
    for (key, k), body in placed_bodies(eqn):
        new = change((key, k), body)
        old = params[key]
        params[key] = type(old)([*old[:k], new, *old[k + 1 :]]) if isinstance(old, (tuple, list)) else new
        changed |= new is not body
    return eqn.replace(params=params) if changed else eqn


def with_eqns(jaxpr: Jaxpr, eqns: list[JaxprEqn], invars: Sequence[Var] | None = None) -> Jaxpr:
    """Return `jaxpr` with these equations; itself if they are the ones that it has."""
    if len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns)):
        return jaxpr
    return jaxpr.replace(invars=invars or jaxpr.invars, eqns=eqns)


def devices_of(eqn: JaxprEqn) -> int:
    """Return how many devices a `shard_map` divides its operands over; 1 for any other equation."""
    if eqn.primitive.name != SHARD_MAP:
        return 1
    return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])


def operands_of(eqn: JaxprEqn, body: Jaxpr) -> Sequence[Any]:
    """Return the outer variable that each input of `body` is, or is a row of; None for an input without one."""
    if eqn.primitive.name in CALLS or eqn.primitive.name == SHARD_MAP:
        return eqn.invars
    if eqn.primitive is cond_p:
        return eqn.invars[1:]
    if eqn.primitive is scan_p:
        return [None if carried else v for v, carried in zip(eqn.invars, _carried(eqn, body), strict=True)]
    return [None] * len(body.invars)


def _carried(eqn: JaxprEqn, body: Jaxpr) -> list[bool]:
    """Which inputs of a scan's body are its carry: they stand between the constants and the xs, which are rows."""
    is_part = lambda inside, whole: inside.aval.ndim < whole.aval.ndim
    is_row = list(map(is_part, body.invars, eqn.invars))
    carry = len(body.outvars) - sum(map(is_part, body.outvars, eqn.outvars))
    first_row = len(is_row) - sum(is_row)
    return [first_row - carry <= i < first_row for i in range(len(is_row))]
