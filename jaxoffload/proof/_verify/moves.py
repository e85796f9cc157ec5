"""The claims `moves` and `producers`: what goes to the host was marked so, and what is kept is not recomputed."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from ..._engine.decide.plan import Row
from ..._jax import on_host
from ..._names import read_names
from ..._policy import Policy
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program import kernels
from .._program.host_transfers import HostTransfer
from .._program.target import Target
from .._residuals.residuals import residuals
from .._residuals.table import SAVED


def moves(target: Target) -> Found:
    """Find values that go to the host and must not, and values that must and do not."""
    wrong = [f"{what}, {why}" for transfer in target.host_transfers for what, why in _forbidden(transfer, target)]
    if wrong:
        return FAILS, f"these values go to the host and must not: {'; '.join(dict.fromkeys(wrong))}"
    if stays := dict.fromkeys(_stays(target)):
        return FAILS, f"these values stay on the device: {'; '.join(stays)}"
    if not (count := len(target.host_transfers)):
        return HOLDS, "nothing goes to the host"
    marked = sum(transfer.source.name is not None for transfer in target.host_transfers)
    if marked == count:
        values = f"{count} values that go to the host are" if count > 1 else "value that goes to the host is"
        return HOLDS, f"the {values} marked offload"
    others = "have no plan's name, are results of equations, or were on the host before"
    if not marked:
        return HOLDS, f"the {count} value(s) that go to the host {others}"
    return HOLDS, f"of the {count} values that go to the host {marked} are marked offload; {count - marked} {others}"


def _stays(target: Target) -> Iterator[str]:
    """Yield what is saved though it is marked offload, and the table gives no other reason; a step has no table."""
    for row in residuals(target.loss, *target.args) if target.loss and target.plans.plans else ():
        if row.state == SAVED and row.decision == "offload":
            yield f"{', '.join(row.names)}, which is marked offload ({row.reason})"


def _forbidden(transfer: HostTransfer, target: Target) -> Iterator[tuple[str, str]]:
    """Yield what a transfer is, and why it must not go to the host; nothing where it may."""
    source, what = transfer.source, f"{transfer.source.where} {transfer.aval.str_short()}"
    if source.name is not None:
        if source.name.decision != "offload":
            row = target.plans.rows.get(source.name)
            names = ", ".join(row.names) if row else source.name
            yield names or "a matmul", f"which is marked {source.name.decision}"
    elif source.kind == "argument":  # a weight may have the shape of a moment on the host
        yield what, f"which is named {transfer.name!r} and stays with the caller" if transfer.name else _UNNAMED
    elif _may_update_host_argument(transfer, target):
        pass
    elif transfer.name is None:
        if target.plans.plans or source.kind in ("input", "constant"):
            yield what, _UNNAMED
    elif target.policies and all(isinstance(policy, Policy) for policy in target.policies):
        name = read_names(transfer.name)[0]
        decided = {"save" if name.keep else policy.decision(name.text) for policy in target.policies}
        if "offload" not in decided:
            yield name.text, f"which is marked {' or '.join(sorted(decided))}"


_UNNAMED = "which has no name"


def _may_update_host_argument(transfer: HostTransfer, target: Target) -> bool:
    """Return if a transfer may be the new value of an argument on the host, as an optimizer's state may be."""
    like = lambda aval: (aval.shape, aval.dtype)
    return like(transfer.aval) in {like(v.aval) for v in target.jaxpr.invars if on_host(v.aval)}


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
    if len(target.devices) > 1:  # each of them does what is not divided
        expected = expected._replace(flops=None)
    ran = kernels.ran(target.module)
    if more := ran.more_than(expected):
        return FAILS, f", but by the compiled program {'; '.join(more)}"
    counts = ", ".join(f"{ran.counts[kind]} {kind}" for kind in expected.counts)
    return HOLDS, f"; by the compiled program {counts or 'none'}, no more than were traced"
