"""run_of(): a loss with its gradient, or a step, as one function that returns all its results by name.

What a function changes in modules of Flax NNX among its arguments is a result too.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from ..._jax import dce_jaxpr
from .._residuals.residuals import where_twice


def run_of(f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], bool]:
    """Return what is verified of a function, as a function of its arguments that returns all results by name; and
    whether `f` is a loss, which that function differentiates."""
    is_loss = _is_of_a_loss(jax.eval_shape(f, *args), args)
    return (_differentiated(f) if is_loss else _all_of(f)), is_loss


LIKE_A_LOSS = (
    "the function returns one floating-point scalar, as a loss does, but differentiates what is in it; give its loss, "
    "or return the new state too, as a training step does"
)


def trace_of(caller: str, f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Jaxpr, bool]:
    """Return the trace of the function that `run_of` returns, without dead code, and whether `f` is a loss.

    A step is traced once. Dead code is such as the residuals of what is differentiated under a `stop_gradient`.
    """
    jaxpr, out = jax.make_jaxpr(_all_of(f), return_shape=True)(*args)
    if not _is_of_a_loss(out["result"], args):
        return without_dead_code(jaxpr), False
    with where_twice(caller, LIKE_A_LOSS):
        return without_dead_code(jax.make_jaxpr(_differentiated(f))(*args)), True


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr without the equations that no result and no effect needs, in its loops too."""
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return live


def _all_of(step: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return all results of a step, by name."""
    return lambda *args: {"result": step(*args), **_modules(args)}


def _is_of_a_loss(out: Any, args: tuple[Any, ...]) -> bool:
    """Return if a function that returns `out` is a loss. One that takes an `nnx.Optimizer` can only be a step."""
    is_scalar = isinstance(out, jax.ShapeDtypeStruct) and not out.shape and jnp.issubdtype(out.dtype, jnp.floating)
    nnx = sys.modules.get("flax.nnx")
    return is_scalar and not (nnx and any(isinstance(node, nnx.Optimizer) for node in _nodes(nnx, args)))


def _differentiated(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return the value and the gradient with respect to all floating-point leaves, by name."""

    def run(*args: Any) -> dict[str, Any]:
        leaves, tree = jax.tree.flatten(args)
        floating = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]

        def of_floating(xs: list[Any]) -> Any:
            whole = dict(enumerate(leaves)) | dict(zip(floating, xs, strict=True))
            args = jax.tree.unflatten(tree, whole.values())
            return loss(*args), _modules(args, but_parameters=True)

        (value, modules), cotangents = jax.value_and_grad(of_floating, has_aux=True)([leaves[i] for i in floating])
        gradient = dict(zip(floating, cotangents, strict=True))
        by_leaf = [gradient.get(i) for i in range(len(leaves))]
        return {"value": value, **modules, "gradient": jax.tree.unflatten(tree, by_leaf)}

    return run


def _nodes(nnx: Any, args: Any) -> list[Any]:
    is_node = lambda x: isinstance(x, nnx.Pytree)
    return list(filter(is_node, jax.tree.leaves(args, is_leaf=is_node)))


def _modules(args: Any, but_parameters: bool = False) -> dict[str, Any]:
    """Return the state of the modules of Flax NNX among these arguments, by the result's name; empty without any."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not (nodes := _nodes(nnx, args)):
        return {}
    state = nnx.state(nodes, nnx.Not(nnx.Param)) if but_parameters else nnx.state(nodes)
    return {"modules": state} if jax.tree.leaves(state) else {}


def spread(args: Any) -> int:
    """Return over how many devices arguments are spread."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    return max((s.num_devices for s in shardings if s is not None), default=1)
