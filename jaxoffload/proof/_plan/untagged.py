"""Work that runs again in a layer although all its names are kept: kernels whose results nothing names."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from ..._engine.jaxprs.walk import nested
from ..._engine.layers.layer import Layer
from ..._jax import MATMULS, OPAQUE, is_attention, nbytes, where_written
from ..._text import array_type, readable


def runs_again(layer: Layer, backward: Jaxpr) -> list[str]:
    """Return a line for each matmul, or other kernel, that the backward pass of a layer runs again."""
    size = len(layer.layout.kept)
    again = _again(backward, [i >= size for i in range(len(backward.invars))])
    return list(dict.fromkeys(map(_line, again)))


def _again(jaxpr: Jaxpr, is_cotangent: Sequence[bool]) -> Iterator[JaxprEqn]:
    """Yield the kernels that depend on no cotangent."""
    after = {v for v, is_one in zip(jaxpr.invars, is_cotangent, strict=True) if is_one}
    for eqn in jaxpr.eqns:
        depends = [isinstance(v, Var) and v in after for v in eqn.invars]
        name, bodies = eqn.primitive.name, nested(eqn)
        if name in MATMULS | OPAQUE or is_attention(name):
            if not any(depends):
                yield eqn
        elif len(bodies) == 1 and len(bodies[0].invars) == len(depends):
            yield from _again(bodies[0], depends)
        if any(depends):
            after.update(eqn.outvars)


def _line(eqn: JaxprEqn) -> str:
    aval: Any = eqn.outvars[0].aval
    size = sum(nbytes(v.aval) for v in eqn.outvars)
    return f"{array_type(aval)} of {where_written(eqn)} runs again: a tag would keep {readable(size)} per layer"
