"""Work that runs again in a layer although all its names are kept: kernels whose results nothing names."""

from typing import Any

from jax.extend.core import Jaxpr

from ..._engine.jaxprs.walk import walk
from ..._jax import MATMULS, OPAQUE, is_attention, nbytes, partial_eval_jaxpr_nounits, where_written
from ..._text import array_type, readable


def runs_again(backward: Jaxpr, residuals: int) -> list[str]:
    """Return a line for each matmul, or other kernel, that a layer's backward pass computes from its residuals alone,
    which are its first operands."""
    is_cotangent = [number >= residuals for number in range(len(backward.invars))]
    again, *_ = partial_eval_jaxpr_nounits(backward, is_cotangent, False)
    lines = []
    for eqn, *_ in walk(again):
        if eqn.primitive.name in MATMULS | OPAQUE or is_attention(eqn.primitive.name):
            aval: Any = eqn.outvars[0].aval
            size = readable(sum(nbytes(v.aval) for v in eqn.outvars))
            lines.append(f"{array_type(aval)} of {where_written(eqn)} runs again: a tag would keep {size} per layer")
    return list(dict.fromkeys(lines))
