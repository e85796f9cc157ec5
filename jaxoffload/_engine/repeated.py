"""A loop that XLA does not double-buffer: it cannot see how often the loop runs. Those who read programs can.

A loop over ticks has the branches of the stages in it. Where XLA:GPU makes one iteration out of two, it copies all that
the branches of the second return, among it the sums of the gradients (docs/upstream.md#branches).
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jax import REPEATED, Call, convert_constvars_jaxpr, dce_jaxpr, define, evaluate
from .copying_loops import hidden_zero

_SCOPE = "jaxoffload.repeated"
_IN_PROGRAM = re.compile(rf"{_SCOPE}\((\d+)\)/while\b")


def repeated[T](times: int, body: Callable[[Any, T], T], state: T) -> T:
    """`lax.fori_loop(0, times, body, state)`; as an equation whose parameter `length` says how often it runs."""
    leaves, tree = jax.tree.flatten(state)
    of_leaves = lambda i, *leaves: jax.tree.leaves(body(i, jax.tree.unflatten(tree, leaves)))
    # JAX finds dead code in the body of a scan, but not in that of a loop whose length it does not know.
    once, _ = dce_jaxpr(jax.make_jaxpr(of_leaves)(jnp.int32(0), *leaves), [True] * len(leaves), True)

    @jax.named_scope(f"{_SCOPE}({times})")
    def run(*leaves: Any) -> Any:
        step = lambda i, leaves: evaluate(once, [i, *leaves])
        return lax.fori_loop(jnp.int32(0), times + hidden_zero(), step, [*leaves])

    jaxpr = jax.make_jaxpr(run)(*leaves)
    operands = [*jaxpr.consts, *leaves]
    outs = repeated_p.bind(*operands, call_jaxpr=convert_constvars_jaxpr(jaxpr), length=times)
    return jax.tree.unflatten(tree, outs)


def iterations_of(op_name: str) -> int | None:
    """How often the loop runs that a compiled program calls so; None if it is not one of ours."""
    found = _IN_PROGRAM.search(op_name)
    return int(found[1]) if found else None


repeated_p = define(Call(REPEATED))
