"""What a function puts into host memory, and where each such value comes from."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import device_put_p, name_p

from ..._engine.loops import backward_p, forward_p
from ..._engine.memory import on_host
from ..._engine.source import Source, follow, is_a_view, source_of
from ..._engine.values import nested, operands_of

GIVEN = "an argument"
INPUTS = (GIVEN, "an input", "a constant")  # "an input": of something that is not looked into


class HostTransfer(NamedTuple):
    """A value that is put into host memory.

    `name`: what somebody else than a plan named it, as where JAX's own policies decide; None where nobody did.
    """

    source: Source
    aval: Any
    name: str | None = None


def host_transfers(jaxpr: Jaxpr) -> Iterator[HostTransfer]:
    """What is put into host memory, wherever in a function's jaxpr."""
    return _crossings(jaxpr, lambda _: (Source(None, GIVEN), None))


_Known = tuple[Source, str | None]  # where a value comes from, and a name


def _crossings(jaxpr: Jaxpr, of_input: Callable[[int], _Known]) -> Iterator[HostTransfer]:
    """`of_input`: what is known of an input, by its number."""
    names = {eqn.outvars[0]: eqn.params["name"] for eqn in jaxpr.eqns if eqn.primitive is name_p}

    def known(var: Any) -> _Known:
        first = follow(jaxpr, var, is_a_view)
        source, name = of_input(jaxpr.invars.index(first)) if first in jaxpr.invars else (source_of(jaxpr, var), None)
        return source, names.get(var, name) if isinstance(var, Var) else name

    for eqn in jaxpr.eqns:
        engines = eqn.primitive in (forward_p, backward_p)
        inside = [] if engines else list(nested(eqn))
        for index, sharding in enumerate(eqn.params.get("out_shardings", ())):
            if getattr(sharding, "memory_kind", None) == "pinned_host":
                yield HostTransfer(Source(None, f"result {index} of a {eqn.primitive.name}"), eqn.outvars[index].aval)
        for index, made in enumerate(eqn.outvars):
            if not on_host(made.aval) or any(len(b.outvars) > index and on_host(b.outvars[index].aval) for b in inside):
                continue
            if eqn.primitive is forward_p:
                yield HostTransfer(eqn.params["loops"].source_of(index), made.aval)
            elif eqn.primitive is device_put_p and not on_host((taken := eqn.invars[index]).aval):
                source, name = known(taken)
                yield HostTransfer(source, made.aval, name)
            elif eqn.invars and not any(on_host(v.aval) for v in eqn.invars):  # of nothing: a branch not taken fills up
                yield HostTransfer(Source(None, f"output of {eqn.primitive.name}"), made.aval)
        for body, operands in _inside(eqn) if engines else [(body, operands_of(eqn, body)) for body in inside]:
            outside = lambda i, operands=operands: known(operands[i]) if operands[i] is not None else _INSIDE
            yield from _crossings(body, outside)


_INSIDE: _Known = (Source(None, "an input"), None)


def _inside(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    """A layer of each part of a loop of ours, with the operands that its inputs, or what they are rows of, are."""
    loops = eqn.params["loops"]
    carried = range(loops.consts, loops.consts + loops.carry)
    operands = [None if i in carried else var for i, var in enumerate(eqn.invars)]
    for segment in loops.segments:
        layer = segment.jaxpr
        yield layer, operands if eqn.primitive is forward_p else [None] * len(layer.invars)
