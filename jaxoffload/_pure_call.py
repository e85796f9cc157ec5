"""A call as a pure function of arrays: the values of Flax NNX variables in its arguments go in and come out."""

import dataclasses
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.ref import AbstractRef


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
    """A result that is not an array; to JAX, a part of the structure of the results."""

    value: Any


class PureCall:
    """`f(*args, **kwargs)`, where arguments may be modules of Flax NNX, whose variables `f` may give new values.

    Attributes:
      arrays: the operands of `run`: the arrays among the arguments, and the variables' values.
    """

    def __init__(self, f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], caller: str):
        self.f, self.caller, self.nnx = f, caller, sys.modules.get("flax.nnx")
        self.leaves, self.tree = jax.tree.flatten((args, kwargs), is_leaf=self._is_module)
        self.modules = list(filter(self._is_module, self.leaves))
        both: tuple[Any, Any] = self.nnx.split(self.modules) if self.nnx and self.modules else (None, ())
        self.graph, self.state = both
        arguments = [leaf if _is_traced(leaf) else None for leaf in self.leaves]
        self.arrays, self.structure = jax.tree.flatten((arguments, self.state))

    def run(self, *arrays: Any) -> Any:
        """Call `f`; return the leaves of its result, their structure, and the variables' new values."""
        arguments, state = jax.tree.unflatten(self.structure, arrays)
        modules = self.nnx.merge(self.graph, state) if self.nnx and self.modules else []
        outer, inner = {id(new): old for new, old in zip(modules, self.modules, strict=True)}, iter(modules)
        leaves = [next(inner) if self._is_module(x) else x for x in self.leaves]
        leaves = [x if array is None else array for x, array in zip(leaves, arguments, strict=True)]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        outs, tree = jax.tree.flatten(self.f(*args, **kwargs), is_leaf=lambda x: id(x) in outer)
        outs = [x if isinstance(x, jax.Array) else _Static(outer.get(id(x), x)) for x in outs]
        return outs, _Static(tree), self._new_values(modules, state)

    def result(self, returned: Any) -> Any:
        """Return what `f` returns, from what `run` returns, and update the modules."""
        outs, tree, new = returned
        if self.nnx and any(map(operator.is_not, jax.tree.leaves(new), jax.tree.leaves(self.state))):
            self.nnx.update(self.modules, new)
        return jax.tree.unflatten(tree.value, [x.value if isinstance(x, _Static) else x for x in outs])

    def _is_module(self, x: Any) -> bool:
        return self.nnx is not None and isinstance(x, (self.nnx.Pytree, self.nnx.Variable))

    def _new_values(self, modules: list[Any], before: Any) -> Any:
        if self.nnx is None or not modules:
            return ()
        after = self.nnx.state(modules)
        there = {path for path, _ in self.nnx.to_flat_state(before)}
        if len(self.nnx.to_flat_state(after)) > len(there):  # such as what it sows
            self.nnx.pop(modules, lambda path, _: path not in there)
        if self.nnx.graphdef(modules) != self.graph:
            raise NotImplementedError(
                f"{self.caller}: the function changes more of a module of Flax NNX than the values of its variables, "
                "such as an attribute, or by eval(); do that outside"
            )
        return after


def _is_traced(leaf: Any) -> bool:
    """Return if a leaf is an operand. Python's numbers and NumPy's arrays are not: `f` may branch on them."""
    return isinstance(leaf, jax.Array) and not isinstance(jax.typeof(leaf), AbstractRef)
