"""The claims `moves` and `producers`: what goes to the host was marked so, and what is kept is not recomputed."""

import math
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import device_put_p

from ..._engine.decide.plan import Row
from ..._engine.jaxprs.source import Source
from ..._engine.jaxprs.walk import walk
from ..._jax import on_host
from ..._optimizer.update import STACK
from ..._policy import Policy
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program import kernels
from .._program.host_transfers import STATE, host_transfers, is_of_an_optimizer
from .._program.target import Target
from .._residuals.plans import Plans
from .._residuals.residuals import residuals
from .._residuals.table import SAVED


def moves(target: Target) -> Found:
    """Find values that go to the host and must not, and values that must and do not."""
    transfers = list(host_transfers(target.jaxpr))
    given: list[Any] = [v.aval for v in target.jaxpr.invars]
    on_host_before = {(aval.shape, aval.dtype) for aval in given if on_host(aval)}
    if wrong := dict.fromkeys(filter(None, (_forbidden(*each, target.plans, on_host_before) for each in transfers))):
        return FAILS, f"these values go to the host and must not: {'; '.join(wrong)}"
    if whole := list(_come_whole(target)):
        return FAILS, f"these states of parameters come to the device whole, not in blocks: {'; '.join(whole)}"
    if stays := dict.fromkeys(_stays(target)):
        return FAILS, f"these values stay on the device: {'; '.join(stays)}"
    if not transfers:
        return HOLDS, "nothing goes to the host"
    states = [source is STATE for source, _ in transfers].count(True)
    others = sum(source.name is None for source, _ in transfers) - states
    detail = f"of {len(transfers)} value(s) that go to the host {len(transfers) - others - states} are marked offload"
    detail += f"; {states} are blocks of an optimizer's state" * (states > 0)
    return HOLDS, detail + f"; {others} {_OTHERS}" * (others > 0)


_OTHERS = "have no plan's name, are results of equations, or were on the host before"


def _stays(target: Target) -> Iterator[str]:
    """Yield what is saved though it is marked offload, and the table gives no other reason; a step has no table."""
    for row in residuals(target.loss, *target.args) if target.loss and target.plans.plans else ():
        if row.state == SAVED and row.decision == "offload" and 0 not in row.shape:
            yield f"{', '.join(row.names)}, which is marked offload ({row.reason})"


def _come_whole(target: Target) -> Iterator[str]:
    """Yield the stacks of layers, or of experts, on the host that an optimizer fetches at once."""
    results: list[Any] = [v.aval for v in target.jaxpr.outvars]
    stacks = {aval.shape for aval in results if on_host(aval) and len(aval.shape) >= STACK and aval.shape[0] > 1}
    for site in walk(target.jaxpr):
        if site.eqn.primitive is device_put_p and any(map(is_of_an_optimizer, (*site.enclosing, site.eqn))):
            given: Any = site.eqn.invars[0].aval
            made = site.eqn.outvars[0].aval
            if on_host(given) and not on_host(made) and given.shape in stacks:
                yield given.str_short()


def _forbidden(source: Source, aval: Any, plans: Plans, on_host_before: Collection[Any]) -> str:
    """Return what goes to the host and why it must not; empty where it may."""
    if source is STATE:
        return ""
    what = f"{source.where} {aval.str_short()}"
    if source.name is not None and source.name.decision == "offload":
        return ""
    if source.name is not None:
        row = plans.rows.get(source.name)
        names = ", ".join(row.names) if row else source.name
        return f"{names or 'a matmul'}, which is marked {source.name.decision}"
    if source.kind == "argument":  # a weight may have the shape of a moment on the host
        stays = f"which is named {source.tags[0]!r} and stays with the caller" if source.tags else "which has no name"
        return f"{what}, {stays}"
    if (aval.shape, aval.dtype) in on_host_before:  # the update of an argument, as of an optimizer's state
        return ""
    if not source.tags:
        must_have_a_name = plans.plans or source.kind in ("input", "constant")
        return f"{what}, which has no name" if must_have_a_name else ""
    if not all(isinstance(policy, Policy) for policy in plans.policies):
        return ""
    decided = {policy.decision(tag) for policy in plans.policies for tag in source.tags} or {"offload"}
    return "" if "offload" in decided else f"{source.tags[0]}, which is marked {' or '.join(sorted(decided))}"


def producers(target: Target) -> Found:
    """Find saved and offloaded values that are recomputed."""
    if not target.plans.plans:
        return NOT_CHECKED, "nothing in the function is jaxoffload's: what it means to keep is not known"
    again = list(dict.fromkeys(_recomputed(target)))
    detail = f"recomputed: {'; '.join(again)}" if again else "by the jaxpr none is recomputed"
    if again and not target.plans.rerun:  # else JAX says of some first runs, too, that they are differentiated
        return FAILS, detail
    if target.plans.rerun or target.plans.policies or target.plans.overlap:
        detail += "" if again else " for jaxoffload"
        return NOT_CHECKED, f"{detail}; but what other checkpoints keep, or run again, is not known"
    verdict, compiled = _by_kernels(target)
    return verdict, f"{detail}{compiled}"


def _recomputed(target: Target) -> Iterator[str]:
    """Yield what the backward pass recomputes although it is kept, by the jaxpr."""
    rows = target.plans.rows
    layers = {name: target.plans.recomputed[name][0] for name in rows}
    what = lambda name: f"{', '.join(rows[name].names) or 'a matmul'} ({rows[name].decision})"
    for name, row in rows.items():
        if layers[name] and (row.decision != "recompute" or _is_routing(row)):
            yield f"{what(name)} in {layers[name]} layer(s)"
    for results in (results for plan in target.plans.plans for results in plan.together):
        kept = [what(name) for name in results if rows[name].decision != "recompute"]
        for name in results if kept else ():
            if layers[name]:
                yield f"{', '.join(kept)} with {what(name)}, of one kernel"


def _is_routing(row: Row) -> bool:
    return bool(row.names) and (row.dtype.startswith("key<") or not jnp.issubdtype(row.dtype, jnp.inexact))


def _by_kernels(target: Target) -> Found:
    """Check that the compiled program runs no more kernels than the jaxpr asks for."""
    if jax.default_backend() != "gpu":
        return HOLDS, "; kernels not counted: this needs an NVIDIA GPU"
    expected = kernels.traced(target.jaxpr)
    if expected is None:
        return HOLDS, "; kernels not counted: the trip count of a loop is unknown"
    if target.device_count > 1:  # each of them does what is not divided
        expected |= {kernels.FLOPS: math.nan}
    ran = kernels.ran(target.module)
    if more := kernels.more_than_traced(ran, expected):
        return FAILS, f", but by the compiled program {'; '.join(more)}"
    counts = ", ".join(f"{ran.get(kind, 0):.0f} {kind}" for kind in expected if kind != kernels.FLOPS)
    return HOLDS, f"; by the compiled program {counts or 'none'}, no more than were traced"
