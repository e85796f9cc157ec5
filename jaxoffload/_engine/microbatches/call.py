"""A call of `accumulate`'s function: its loss, traced for one microbatch, and its arguments, flat."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from ..layers.placement import split_list
from ..layers.rows import filled

# The losses summed, the gradients summed, and the other results stacked.
Sums = tuple[Any, list[Any], Any]


class Call(NamedTuple):
    """A call, and its traced loss.

    Attributes:
      loss: parameters, a microbatch -> a pair of the loss and the other results. Both arguments are flat.
      params: the parameters; `batch`: all microbatches.
      microbatches: how many.
      jaxpr: constants, parameters, a microbatch -> the loss, other results.
      consts: the constants, and what else is the same in all microbatches.
      others: the structure of the other results.
      sum_dtype: of the sums of floating gradients that are narrower. None: sums have the gradients' dtypes.
    """

    loss: Callable[[list[Any], list[Any]], tuple[Any, Any]]
    params: list[Any]
    batch: list[Any]
    microbatches: int
    jaxpr: Jaxpr
    consts: list[Any]
    others: Any
    sum_dtype: Any = None

    def microbatch(self, number: Any) -> list[Any]:
        """Return the values of a microbatch."""
        return microbatch_of(self.batch, number)

    @property
    def fixed(self) -> int:
        """How many operands are the same for all microbatches."""
        return len(self.consts) + len(self.params)

    @property
    def operands(self) -> list[Any]:
        """The constants, the parameters, and all microbatches."""
        return [*self.consts, *self.params, *self.batch]

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Which operands are parameters."""
        return (*[False] * len(self.consts), *[True] * len(self.params), *[False] * len(self.batch))

    def dtype_of_sum(self, dtype: Any) -> Any:
        """Return the dtype in which gradients of this one are summed."""
        if self.sum_dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        # Where JAX has no float64 it says so in a warning, and gives float32.
        wide = jax.eval_shape(lambda: jnp.zeros((), self.sum_dtype)).dtype
        return wide if jnp.finfo(dtype).bits < jnp.finfo(wide).bits else dtype

    def zero_sum(self, aval: Any) -> Any:
        """Return what a sum of gradients like `aval` begins with."""
        return filled(aval.update(dtype=self.dtype_of_sum(aval.dtype)), 0)

    def sums_of(self, outs: Sequence[Any]) -> Sums:
        """Return the `Sums` of all losses, all other results, and the sums of the gradients."""
        losses, others, gradients = split_list(outs, [1, len(outs) - 1 - len(self.params)])
        gradients = [gradient.reshape(jnp.shape(param)) for gradient, param in zip(gradients, self.params, strict=True)]
        return total(*losses), gradients, self.with_others(others)

    def with_others(self, leaves: Sequence[Any]) -> Any:
        """Return the other results, from their leaves."""
        return jax.tree.unflatten(self.others, leaves)


def microbatch_of(batch: Sequence[Any], number: Any) -> list[Any]:
    """Return the values of a microbatch out of all."""
    return [lax.dynamic_index_in_dim(x, number, keepdims=False) for x in batch]


def total(losses: Any) -> Any:
    """Add losses in their order."""
    summed, _ = lax.scan(lambda total, value: (total + value, None), jnp.zeros_like(losses[0]), losses)
    return summed
