"""The claim `placement`: the reference's collectives and no more, and no larger shard of a residual on any device."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Var

from ..._engine.host.slow_copies import untold
from ..._engine.jaxprs.source import source_of
from ..._jax import DEVICE, nbytes, on_host
from ..._text import readable
from ..._tracing import as_reference
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program.hlo import collectives, parse
from .._program.target import Target, rows_read_beyond
from .shared import first, no_reference
from .stages import exchanges, runs_on_stages


def placement(target: Target) -> Found:
    """Compare collectives and shards with the reference's."""
    if len(target.devices) < 2:
        return NOT_CHECKED, "all arguments are on one device"
    if not target.has_reference:
        return NOT_CHECKED, no_reference(target)
    if runs_on_stages(target):
        return exchanges(target)
    more, more_than = _by_collectives(target)
    larger, shards = _by_shards(target)
    wrong = [*more, *larger]
    return (FAILS, first(wrong, "; ")) if wrong else (HOLDS, "; ".join(filter(None, (more_than, shards))))


def _by_collectives(target: Target) -> tuple[list[str], str]:
    """Return what is wrong with the collectives, and what was compared."""
    ours, reference = collectives(target.module), collectives(parse(target.fast_reference.as_text()))
    more, padding = ours - reference, rows_read_beyond(target.jaxpr)
    if more.total() > padding or more.keys() - reference.keys():
        listed = ", ".join(f"{count} {kind} of {shape}" for (kind, shape), count in more.items())
        return [f"more collectives than the reference has: {listed}"], ""
    compared = f"arrays are in {ours.total()} collectives, the reference's in {reference.total()}"
    return [], f"{compared}; stacks on the host read {padding} extra row(s)" if more else compared


def _by_shards(target: Target) -> tuple[list[str], str]:
    """Return residuals whose shards are larger than in the reference, and what was compared."""
    if target.loss is None:
        return [], ""
    ours, reference = (_shard_bytes(loss, target.args) for loss in (target.loss, as_reference(target.loss)))
    larger = [
        f"each device keeps {readable(size)} of a layer's {name}, the reference's {readable(reference.get(name, 0))}"
        for name, size in sorted(ours.items())
        if size > reference.get(name, 0)
    ]
    return larger, f"no device keeps a larger shard of any of {len(ours)} residuals"


def _shard_bytes(loss: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, int]:
    """Return, for each named residual, the bytes that a device keeps of one layer, where XLA divides it."""
    leaves = lambda *args: jax.tree.leaves(jax.vjp(loss, *args)[1])
    jaxpr = jax.make_jaxpr(leaves)(*args)
    sources = {i: source_of(jaxpr, var) for i, var in enumerate(jaxpr.outvars) if isinstance(var, Var)}
    named = {i: source for i, source in sources.items() if source.name and source.layers + source.empty}

    def kept(*args: Any) -> list[jax.Array]:
        residuals = leaves(*args)
        to_device = lambda x: jax.device_put(x, DEVICE) if on_host(jax.typeof(x)) else x
        return [to_device(residuals[i]) for i in named]

    with untold():
        shardings = jax.jit(kept).lower(*args).compile().output_shardings
    sizes: dict[str, int] = {}
    for source, sharding, x in zip(named.values(), shardings, jax.eval_shape(kept, *args), strict=True):
        assert source.name
        name = ", ".join(n.text for n in source.name.names) or "matmuls"
        shard = nbytes(jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)) // (source.layers + source.empty)
        sizes[name] = max(shard, sizes.get(name, 0))
    return sizes
