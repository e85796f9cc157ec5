"""run_of(): a loss with its gradient, or a step, as one function that returns all its results by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def run_of(f: Callable[..., Any], args: tuple[Any, ...], has_aux: bool = False) -> tuple[Callable[..., Any], bool]:
    """Return what is verified of a function, as a function of its arguments that returns all results by name; and
    whether `f` is a loss, which that function differentiates.

    Raises:
      ValueError: `has_aux`, and `f` returns something else than a pair.
    """
    out = jax.eval_shape(f, *args)
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(f"has_aux: the function must return (loss, other results), not {type(out).__name__}")
    if has_aux or _is_scalar(out):
        return _differentiated(f, has_aux), True
    return lambda *args: {"result": f(*args)}, False


def _is_scalar(out: Any) -> bool:
    return isinstance(out, jax.ShapeDtypeStruct) and not out.shape and jnp.issubdtype(out.dtype, jnp.floating)


def _differentiated(f: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The value and the gradient with respect to all floating-point leaves, by name."""

    def run(*args: Any) -> dict[str, Any]:
        leaves, tree = jax.tree.flatten(args)
        floating = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]

        def of_floating(xs: list[Any]) -> Any:
            whole = dict(enumerate(leaves)) | dict(zip(floating, xs, strict=True))
            return f(*jax.tree.unflatten(tree, whole.values()))

        value, cotangents = jax.value_and_grad(of_floating, has_aux=has_aux)([leaves[i] for i in floating])
        gradient = dict(zip(floating, cotangents, strict=True))
        return {"value": value, "gradient": jax.tree.unflatten(tree, [gradient.get(i) for i in range(len(leaves))])}

    return run
