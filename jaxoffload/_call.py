"""Primitives that compute what a jaxpr among their parameters does, until they are differentiated."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

# Takes the checked function, its operands (the error first) and the primitive's other parameters.
Checked = Callable[..., list[Any]]


class Call(Primitive):
    """A primitive whose parameter `call_jaxpr` is what it computes.

    `checkify` looks into it. Of a primitive that it has no rule for it checks the `call_jaxpr`, and binds the primitive
    to the error, the operands and, instead of that jaxpr, `subfuns`: the checked function
    (`default_checkify_rule`, https://github.com/jax-ml/jax/blob/main/jax/_src/checkify.py).
    """

    multiple_results = True

    def __init__(self, name: str, checked: Checked = lambda run, *operands, **_: run(*operands)):
        """`checked` makes of the checked function what it is to be; by default its equations where it stands."""
        super().__init__(name)
        self._checked = checked
        self.def_impl(_evaluate)
        self.def_effectful_abstract_eval(_results)
        mlir.register_lowering(self, mlir.lower_fun(_evaluate, multiple_results=True))

    def bind(self, *operands: Any, subfuns: Any = (), **params: Any) -> Any:
        if subfuns:
            return self._checked(subfuns[0].call_wrapped, *operands, **params)
        return super().bind(*operands, **params)


def _results(*_: Any, call_jaxpr: Jaxpr, **__: Any) -> tuple[Any, Any]:
    # References that it makes and reads itself are no effect on what is outside. Told of one, JAX would look for a rule
    # that makes values of them; without, the lowering does that.
    effects = {effect for effect in call_jaxpr.effects if type(effect).__name__ != "InternalMutableArrayEffect"}
    return call_jaxpr.out_avals, effects


def evaluate(jaxpr: Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """As `jaxpr_as_fun`, which `jax.checkpoint` is, but JAX looks for NaNs as it is told, as it does in `lax.scan`."""
    return eval_jaxpr(jaxpr, jaxpr.consts, *operands)


def as_array(x: Any) -> jax.Array:
    """`x` as an array; itself if it is one, for `jnp.asarray` copies a tracer's value where nothing is jitted."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _evaluate(*operands: Any, call_jaxpr: Jaxpr, **_: Any) -> list[Any]:
    return jaxpr_as_fun(call_jaxpr)(*operands)
