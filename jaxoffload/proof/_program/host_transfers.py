"""The values that a function puts into host memory, and where each comes from."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import device_put_p

from ..._engine.jaxprs.source import Source, follow, is_a_view, source_of
from ..._engine.jaxprs.walk import nested, operands_of, walk
from ..._engine.layers.loops import forward_p, loops_of
from ..._engine.layers.placement import Kept
from ..._engine.layers.segments import Segment
from ..._engine.microbatches.interleaved import interleaved_p
from ..._jax import nbytes, on_host
from ..._optimizer.update import SCOPE

STATE = Source(None, "the state of a host_optimizer")


def host_transfers(jaxpr: Jaxpr) -> Iterator[tuple[Source, Any]]:
    """Yield the source and the type of each value that is put into host memory, wherever in a function's jaxpr."""
    return _transfers(jaxpr, lambda number: Source(None, "an argument", "argument"))


def _transfers(jaxpr: Jaxpr, source_of_input: Callable[[int], Source | None]) -> Iterator[tuple[Source, Any]]:
    """`source_of_input`: the number of an input -> its source outside; None where that is not known."""

    def source(var: Any) -> Source:
        inside, first = source_of(jaxpr, var), follow(jaxpr, var, is_a_view)
        is_input = isinstance(first, Var) and first in jaxpr.invars
        outside = source_of_input(jaxpr.invars.index(first)) if is_input else None
        return outside._replace(tags=(*inside.tags, *outside.tags)) if outside else inside

    def source_outside(outer: Sequence[Any], number: int) -> Source | None:
        return None if outer[number] is None else source(outer[number])

    for eqn in jaxpr.eqns:
        if is_of_an_optimizer(eqn):
            inside = [eqn, *(site.eqn for body in nested(eqn) for site in walk(body))]
            puts = (v.aval for each in inside if each.primitive is device_put_p for v in each.outvars)
            yield from ((STATE, aval) for aval in puts if on_host(aval))
            continue
        segments = [segment for loops in loops_of(eqn) for segment in loops.segments]
        if eqn.primitive is interleaved_p:  # values between its scans have no names to be judged by
            yield from ((kept.source, aval) for segment in segments for kept, aval in for_host(segment))
            continue
        for result, sharding in enumerate(eqn.params.get("out_shardings", ())):
            if getattr(sharding, "memory_kind", None) == "pinned_host":
                yield Source(None, f"result {result} of a {eqn.primitive.name}"), eqn.outvars[result].aval
        for result, made in enumerate(eqn.outvars):
            if on_host(made.aval) and eqn.primitive is forward_p:
                yield eqn.params["loops"].source_of(result), made.aval
            elif on_host(made.aval) and eqn.primitive is device_put_p and not on_host(eqn.invars[result].aval):
                yield source(eqn.invars[result]), made.aval
        for body in [segment.jaxpr for segment in segments] or nested(eqn):
            yield from _transfers(body, functools.partial(source_outside, operands_of(eqn, body)))


def is_of_an_optimizer(eqn: JaxprEqn) -> bool:
    """Return if a `host_optimizer` computes an equation, or the one around it."""
    return SCOPE in str(eqn.source_info.name_stack)


def for_host(segment: Segment) -> list[tuple[Kept, Any]]:
    """Return the residuals that each layer of a segment puts into host memory, with their types."""
    layout = segment.layout
    return list(zip(layout.select(layout.kept, "host"), layout.split(segment.jaxpr.out_avals).host, strict=True))


def bytes_put(jaxpr: Jaxpr) -> int:
    """Return the bytes of all that a jaxpr puts into host memory, as often as it does."""
    puts = (site for site in walk(jaxpr) if site.eqn.primitive is device_put_p)
    return sum(site.runs * nbytes(v.aval) for site in puts for v in site.eqn.outvars if on_host(v.aval))
