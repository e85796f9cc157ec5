"""The values that a function puts into host memory, and where each comes from."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import device_put_p, name_p

from ..._engine.jaxprs.source import Source, follow, is_a_view, source_of
from ..._engine.jaxprs.walk import nested, operands_of, walk
from ..._engine.layers.loops import backward_p, forward_p, loops_of
from ..._engine.layers.placement import Kept
from ..._engine.layers.segments import Segment
from ..._engine.microbatches.interleaved import interleaved_p
from ..._jax import nbytes, on_host


class HostTransfer(NamedTuple):
    """A value that is put into host memory.

    `name`: what something other than a plan named it, as where JAX's own policies decide; None where nothing did.
    """

    source: Source
    aval: Any
    name: str | None = None


def host_transfers(jaxpr: Jaxpr) -> Iterator[HostTransfer]:
    """Find what is put into host memory, wherever in a function's jaxpr."""
    return _transfers(Scope(jaxpr))


@dataclasses.dataclass(frozen=True)
class Scope:
    """A jaxpr, and the values outside of it that its inputs are.

    `inputs`: for each input the variable of `around`, or None where it is not known. Without `around`, the inputs are
    the function's arguments.
    """

    jaxpr: Jaxpr
    inputs: Sequence[Any] = ()
    around: "Scope | None" = None

    def source(self, var: Any) -> tuple[Source, str | None]:
        """Return where a value comes from, and its name."""
        first = follow(self.jaxpr, var, is_a_view)
        is_input = isinstance(first, Var) and first in self.jaxpr.invars
        source, name = self._input(self.jaxpr.invars.index(first)) if is_input else (source_of(self.jaxpr, var), None)
        names = {eqn.outvars[0]: eqn.params["name"] for eqn in self.jaxpr.eqns if eqn.primitive is name_p}
        return source, names.get(var, name) if isinstance(var, Var) else name

    def _input(self, index: int) -> tuple[Source, str | None]:
        if self.around is None:
            return Source(None, "an argument", "argument"), None
        outside = self.inputs[index]
        return (Source(None, "an input", "input"), None) if outside is None else self.around.source(outside)


def _transfers(scope: Scope) -> Iterator[HostTransfer]:
    for eqn in scope.jaxpr.eqns:
        if eqn.primitive is interleaved_p:
            yield from _interleaved(eqn)
            continue
        for index, sharding in enumerate(eqn.params.get("out_shardings", ())):
            if getattr(sharding, "memory_kind", None) == "pinned_host":
                yield HostTransfer(Source(None, f"result {index} of a {eqn.primitive.name}"), eqn.outvars[index].aval)
        for index, made in enumerate(eqn.outvars):
            if on_host(made.aval) and (transfer := _made(scope, eqn, index)):
                yield transfer
        for body, operands in _bodies(eqn):
            yield from _transfers(Scope(body, operands, scope))


def bytes_put(jaxpr: Jaxpr) -> int:
    """Return the bytes of all that a jaxpr puts into host memory, as often as it does."""
    puts = (site for site in walk(jaxpr) if site.eqn.primitive is device_put_p)
    return sum(site.runs * nbytes(v.aval) for site in puts for v in site.eqn.outvars if on_host(v.aval))


def _interleaved(eqn: JaxprEqn) -> Iterator[HostTransfer]:
    """Return what the layers of interleaved scans put there. Values between the scans have no names to be judged by."""
    segments = (segment for loops in loops_of(eqn) for segment in loops.segments)
    return (HostTransfer(kept.source, aval) for segment in segments for kept, aval in for_host(segment))


def for_host(segment: Segment) -> list[tuple[Kept, Any]]:
    """Return the residuals that each layer of a segment puts into host memory, with their types."""
    layout = segment.layout
    return list(zip(layout.select(layout.kept, "host"), layout.split(segment.jaxpr.out_avals).host, strict=True))


def _made(scope: Scope, eqn: JaxprEqn, index: int) -> HostTransfer | None:
    """Return a result that lives on the host, if it is this equation that puts it there."""
    aval = eqn.outvars[index].aval
    if eqn.primitive is forward_p:
        return HostTransfer(eqn.params["loops"].source_of(index), aval)
    if eqn.primitive is device_put_p:
        taken = eqn.invars[index]
        source, name = scope.source(taken)
        return None if on_host(taken.aval) else HostTransfer(source, aval, name)
    bodies = () if eqn.primitive is backward_p else nested(eqn)
    made_inside = any(len(body.outvars) > index and on_host(body.outvars[index].aval) for body in bodies)
    # Without operands: what a branch that is not taken fills up with.
    if made_inside or not eqn.invars or any(on_host(v.aval) for v in eqn.invars):
        return None
    return HostTransfer(Source(None, f"output of {eqn.primitive.name}"), aval)


def _bodies(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    """Yield an equation's nested jaxprs, with the operand that each input is, or is a row of; None if not known."""
    if eqn.primitive not in (forward_p, backward_p):
        yield from ((body, operands_of(eqn, body)) for body in nested(eqn))
        return
    loops = eqn.params["loops"]
    carried = range(loops.consts, loops.consts + loops.carry)
    operands = [None if i in carried else var for i, var in enumerate(eqn.invars)]
    for layer in (segment.jaxpr for segment in loops.segments):
        yield layer, operands if eqn.primitive is forward_p else [None] * len(layer.invars)
