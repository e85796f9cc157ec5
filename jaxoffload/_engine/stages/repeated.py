"""A loop that XLA does not double-buffer: it cannot see how often the loop runs. Those who read programs can.

A loop over ticks has the branches of the stages in it. Where XLA:GPU makes one iteration out of two, it copies all that
the branches of the second return, among it the sums of the gradients (docs/upstream.md#branches).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from ..._jax import REPEATED, Call, convert_constvars_jaxpr, dce_jaxpr, define, evaluate, lower_call
from ..layers.rows import opaque_zero

REPEATED_SCOPE = "jaxoffload.repeated"  # then the length in brackets, for those who read a program


@dataclass(frozen=True, eq=False, repr=False)
class _ForXla:
    """The loop of `call_jaxpr` as XLA compiles it, without its length; walkers of jaxprs do not find it."""

    jaxpr: Jaxpr


def repeated[T](times: int, body: Callable[[Any, T], T], state: T) -> T:
    """`lax.fori_loop(0, times, body, state)`, as one equation."""
    leaves, tree = jax.tree.flatten(state)
    of_leaves = lambda i, *leaves: jax.tree.leaves(body(i, jax.tree.unflatten(tree, leaves)))
    # JAX finds dead code in the body of a scan, but not in that of a loop whose length it does not know.
    once, _ = dce_jaxpr(jax.make_jaxpr(of_leaves)(jnp.int32(0), *leaves), [True] * len(leaves), True)
    operands, with_consts = [*once.consts, *leaves], convert_constvars_jaxpr(once)

    def loop(length: Callable[[], Any]) -> Jaxpr:
        def run(*operands: Any) -> Any:
            consts, leaves = operands[: len(once.consts)], operands[len(once.consts) :]
            step = lambda i, leaves: evaluate(with_consts, [*consts, jnp.int32(i), *leaves])
            return lax.fori_loop(0, length(), step, [*leaves])

        return convert_constvars_jaxpr(jax.make_jaxpr(jax.named_scope(f"{REPEATED_SCOPE}({times})")(run))(*operands))

    for_xla = _ForXla(loop(lambda: times + opaque_zero()))
    outs = repeated_p.bind(*operands, call_jaxpr=loop(lambda: times), for_xla=for_xla)
    return jax.tree.unflatten(tree, outs)


def _lower(ctx: Any, *operands: Any, call_jaxpr: Jaxpr, for_xla: _ForXla) -> Any:
    return lower_call(ctx, *operands, call_jaxpr=for_xla.jaxpr)


repeated_p = define(Call(REPEATED), lower=_lower)
