"""Linear maps that are known by their transpose alone: the tangents of what is differentiated in reverse only."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from ..._jax import Results, Values, define, is_undefined_primal, with_zeros
from .layer import Layer

# What is kept, and the results' cotangents (some a symbolic `Zero`) -> the tangents' cotangents.
Transpose = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def with_tangents(
    results: list[Any],
    out_perturbed: Sequence[bool],
    tangents: Values,
    *,
    caller: str,
    kept: Sequence[Any],
    transpose: Transpose,
    layers: Sequence[Layer],
) -> Results:
    """Return results and their tangents: of perturbed ones the map of `tangents` whose transpose is
    `transpose(kept, cotangents)`, else symbolic zeros.

    `caller` names the function in errors: there is no forward mode. `residuals` looks into `layers`.
    """
    avals = tuple(jax.typeof(x).to_tangent_aval() for x, p in zip(results, out_perturbed, strict=True) if p)
    params = {"caller": caller, "size": len(kept), "transpose": transpose, "avals": avals, "layers": tuple(layers)}
    return with_zeros([*results, *linear_p.bind(*kept, *tangents, **params)], out_perturbed)


def _refuse(*_: Any, caller: str, **__: Any) -> Any:
    raise TypeError(
        f"jaxoffload.{caller} has no forward-mode derivative (jvp, jacfwd, linearize): it is differentiated in "
        "reverse; use plain JAX there"
    )


def _transpose(cotangents: Values, *args: Any, size: int, transpose: Transpose, **_: Any) -> list[Any]:
    transposed = transpose(args[:size], cotangents)
    # The tangent of a carry that only later layers perturb is a constant zero.
    wanted = map(is_undefined_primal, args[size:])
    return [None] * size + [ct if w else None for ct, w in zip(transposed, wanted, strict=True)]


linear_p = Primitive("jaxoffload_linear")
linear_p.multiple_results = True
define(
    linear_p,
    eager=_refuse,
    results=lambda *_, avals, **__: list(avals),
    lower=lambda _, *__, **params: _refuse(**params),
    jvp=_refuse,
    batch=lambda *_, **params: _refuse(**params),
    transpose=_transpose,
)
