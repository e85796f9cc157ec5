"""Warn where a layer, or a loss, changes a module of Flax NNX, and nothing keeps the change.

A module that is an argument of a layer, or that `nnx.merge` makes of one, is there for that layer alone. What the layer
changes in it, such as the counts of its random numbers, is gone unless the layer returns it: each step then draws the
same dropout masks, in silence.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from ._errors import warn
from ._jax import dce_jaxpr

Function = Callable[..., Any]
_OF_MICROBATCHES = "microbatches", "With has_aux=True, return nnx.state(module, nnx.Not(nnx.Param)) too"
_KEEP = {  # what the changes are in, and how they come back
    "scan": ("layers", "Use jaxoffload.nnx.scan, or return nnx.state(layer) too"),
    "chain": ("layers", "With has_aux=True, return nnx.state(layer) too"),
    "accumulate": _OF_MICROBATCHES,
    "evaluate": _OF_MICROBATCHES,
}


def warns_of_lost_changes(f: Function, caller: str, *args: Any) -> Function:
    """Return `f`, which warns when it is traced; `f` itself, if there are no variables of Flax NNX in its `args`."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or jax.config.jax_disable_jit or not _states(nnx, args):
        return f

    @functools.wraps(f)
    def warned(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        out, changed = _changes(nnx, f, args, kwargs)
        if changed and (lost := _lost(nnx, f, leaves, tree)):
            changing, keep = _KEEP[caller]
            warn(
                f"{caller}: the {changing} change variables of a Flax NNX module ({', '.join(lost)}), and "
                f"the new values are lost, because nothing that the {changing} return depends on them: the next step "
                f"finds the old ones. {keep}, and nnx.update the module with it"
            )
        return out

    return warned


def _states(nnx: Any, args: Any) -> list[Any]:
    """Return the variables of modules that a layer should not change in vain.

    Parameters are not among them, since a layer may cast or normalise its own. Random numbers that come by themselves
    may have been made for this step.
    """
    is_variable = lambda x: isinstance(x, nnx.Variable)
    roots = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, (nnx.State, nnx.Pytree, nnx.Variable)))
    found = []
    for root in roots:
        variables = list(filter(is_variable, jax.tree.leaves(root, is_leaf=is_variable)))
        if not all(isinstance(variable, nnx.RngState) for variable in variables):
            found += [variable for variable in variables if not isinstance(variable, nnx.Param)]
    return found


def _changes(nnx: Any, f: Function, args: Any, kwargs: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """Call `f`; return its result, and the type and the new value of each variable of its arguments that it changes."""
    states = _states(nnx, (args, kwargs))
    before = [state.get_raw_value() for state in states]
    out = f(*args, **kwargs)
    pairs = [(type(state).__name__, old, state.get_raw_value()) for state, old in zip(states, before, strict=True)]
    are_arrays = lambda *values: all(isinstance(value, jax.Array) for value in values)
    return out, [(kind, new) for kind, old, new in pairs if new is not old and are_arrays(old, new)]


def _lost(nnx: Any, f: Function, leaves: list[Any], tree: Any) -> list[str]:
    """Return the types of the variables whose new values are dead code in `f`."""
    kinds: list[str] = []

    def traced(*leaves: Any) -> Any:
        out, changed = _changes(nnx, f, *jax.tree.unflatten(tree, leaves))
        kinds[:] = [kind for kind, _ in changed]
        return [new for _, new in changed], out

    jaxpr = jax.make_jaxpr(traced)(*leaves)
    live, _ = dce_jaxpr(jaxpr, [number >= len(kinds) for number in range(len(jaxpr.outvars))])
    read = {id(v) for v in (*live.outvars, *(v for eqn in live.eqns for v in eqn.invars))}
    return sorted({kind for kind, var in zip(kinds, jaxpr.outvars, strict=False) if id(var) not in read})
