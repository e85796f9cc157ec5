"""Linear maps that are known by their transpose alone: the tangents of what is differentiated in reverse only."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .layer import Layer

# What is kept, and the results' cotangents (some a symbolic `ad.Zero`) -> the tangents' cotangents.
Transpose = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def linear(
    caller: str,
    kept: Sequence[Any],
    tangents: Sequence[Any],
    avals: Sequence[Any],
    transpose: Transpose,
    layers: Sequence[Layer],
) -> Any:
    """The map of `tangents` to values of `avals` whose transpose is `transpose(kept, cotangents)`.

    `caller` names the function that errors speak of: there is no forward mode. `residuals` looks into `layers`.
    """
    size, avals, layers = len(kept), tuple(avals), tuple(layers)
    params = {"caller": caller, "size": size, "avals": avals, "transpose": transpose, "layers": layers}
    return linear_p.bind(*kept, *tangents, **params)


linear_p = Primitive("jaxoffload_linear")
linear_p.multiple_results = True


def _forward_mode(*_: Any, caller: str, **__: Any) -> Any:
    raise TypeError(
        f"jaxoffload.{caller} has no forward-mode derivative (jvp, jacfwd, linearize): it is differentiated in "
        "reverse; use plain JAX there"
    )


def _transpose(cotangents: Sequence[Any], *args: Any, size: int, transpose: Transpose, **_: Any) -> list[Any]:
    found = transpose(args[:size], cotangents)
    # The tangent of a carry that only later layers perturb is a constant zero.
    wanted = map(ad.is_undefined_primal, args[size:])
    return [None] * size + [ct if w else None for ct, w in zip(found, wanted, strict=True)]


linear_p.def_impl(_forward_mode)
linear_p.def_abstract_eval(lambda *_, avals, **__: list(avals))
mlir.register_lowering(linear_p, lambda _, *__, **params: _forward_mode(**params))
ad.primitive_jvps[linear_p] = _forward_mode
batching.fancy_primitive_batchers[linear_p] = lambda *_, **params: _forward_mode(**params)
ad.primitive_transposes[linear_p] = _transpose
