"""Linear maps that are known by their transpose alone: the tangents of what is differentiated in reverse only."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from .._jax import Zero, define, is_undefined_primal
from .layer import Layer

# What is kept, and the results' cotangents (some a symbolic `Zero`) -> the tangents' cotangents.
Transpose = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def linear_map(
    tangents: Sequence[Any],
    avals: Sequence[Any],
    *,
    caller: str,
    kept: Sequence[Any],
    transpose: Transpose,
    layers: Sequence[Layer],
) -> Any:
    """The map of `tangents` to values of `avals` whose transpose is `transpose(kept, cotangents)`.

    `caller` names the function in errors: there is no forward mode. `residuals` looks into `layers`.
    """
    size, avals, layers = len(kept), tuple(avals), tuple(layers)
    params = {"caller": caller, "size": size, "avals": avals, "transpose": transpose, "layers": layers}
    return linear_p.bind(*kept, *tangents, **params)


def tangents_of(
    primals_out: Sequence[Any], out_perturbed: Sequence[bool], tangents: Sequence[Any], **how: Any
) -> list[Any]:
    """The tangents of results: a linear map of `tangents` if they are perturbed, else symbolic zeros.

    `how`: `caller`, `kept`, `transpose` and `layers`, as for `linear_map`.
    """
    avals = [jax.typeof(x).to_tangent_aval() for x in primals_out]
    mapped = iter(linear_map(tangents, [a for a, p in zip(avals, out_perturbed, strict=True) if p], **how))
    return [next(mapped) if p else Zero(a) for a, p in zip(avals, out_perturbed, strict=True)]


def _refuse(*_: Any, caller: str, **__: Any) -> Any:
    raise TypeError(
        f"jaxoffload.{caller} has no forward-mode derivative (jvp, jacfwd, linearize): it is differentiated in "
        "reverse; use plain JAX there"
    )


def _transpose(cotangents: Sequence[Any], *args: Any, size: int, transpose: Transpose, **_: Any) -> list[Any]:
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
