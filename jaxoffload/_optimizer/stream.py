"""Stream arrays from the host through the device and back, block by block, in one loop for leaves of as many blocks.

    iteration i:   fetch block i+1    compute block i    write block i

Both copies run beside the computation, one in each direction. On the device are at most four blocks: one that comes,
one that is computed with, what becomes of it, and one that goes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._engine.jaxprs.flat import division
from .._engine.layers.rows import opaque_zero
from .._engine.layers.transport import to_device, to_host


class Blocks(NamedTuple):
    """The rows of a parameter, and of the arrays that belong to it, in so many blocks, alike on every device.

    `sharding` and `ndim`: the parameter's. If the sharding divides the rows, a block is a part of each device's rows:
    they do not lie side by side in the array, which does not matter to what treats each row by itself.
    """

    number: int
    sharding: Any
    ndim: int

    def take(self, x: Any, i: Any, axis: int = 0) -> Any:
        """Return block i of an array, whose rows are along `axis`."""

        def take(x: Any, i: Any) -> Any:
            rows = x.shape[axis] // self.number
            return lax.dynamic_slice_in_dim(x, i * rows, rows, axis, allow_negative_indices=False)

        return self._in_shards(take, x, axis)(x, i)

    def put(self, x: Any, block: Any, i: Any) -> Any:
        """Return an array with its block i replaced."""

        def put(x: Any, block: Any, i: Any) -> Any:
            at = i * (x.shape[0] // self.number)
            return lax.dynamic_update_slice_in_dim(x, block, at, 0, allow_negative_indices=False)

        return self._in_shards(put, x)(x, block, i)

    def sharding_of(self, x: Any, axis: int = 0) -> Any:
        """Return how an array is sharded: as the parameter, or its rows alone if its shape is another."""
        if not isinstance(self.sharding, NamedSharding) or (len(x.shape) == self.ndim and not axis):
            return self.sharding
        rows = self.sharding.spec[0] if self.sharding.spec else None
        return NamedSharding(self.sharding.mesh, PartitionSpec(*[None] * axis, rows))

    def sharded(self, x: Any) -> Any:
        """Return an array that is sharded so, if its type does not say how it is."""
        sharding = self.sharding_of(x)
        unknown = isinstance(sharding, NamedSharding) and not jax.typeof(x).sharding.mesh.explicit_axes
        return lax.with_sharding_constraint(x, sharding) if unknown else x

    def _in_shards(self, f: Callable[..., Any], x: Any, axis: int = 0) -> Callable[..., Any]:
        """Return `f` of arrays like `x` and a number, for the part of each device if the rows are divided."""
        if division(self.sharding).rows == 1:
            return f
        mesh, spec = self.sharding.mesh, self.sharding_of(x, axis).spec

        def in_shards(*operands: Any) -> Any:
            specs = (*[spec] * (len(operands) - 1), PartitionSpec())
            return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=spec)(*operands)

        return in_shards


class Stream(NamedTuple):
    """A leaf whose state streams.

    Attributes:
      blocks: how its arrays are divided.
      reads: whether the new state is computed from the one that is there.
      on_host: its state.
      on_device: what is replaced there, in place: the parameter.
      compute: the number of a block, and the blocks of `on_host` and of `on_device` -> the new ones.
    """

    blocks: Blocks
    reads: bool
    on_host: Sequence[Any]
    on_device: Sequence[Any]
    compute: Callable[[Any, list[Any], list[Any]], tuple[list[Any], list[Any]]]


Arrays = list[list[Any]]


def stream(leaves: Sequence[Stream]) -> tuple[Arrays, Arrays]:
    """Return the new state of each leaf, and its new arrays on the device. All leaves have as many blocks."""
    zero = opaque_zero()

    def fetch(stacks: Arrays, i: Any) -> Arrays:
        of_leaf = lambda leaf, stacks: [to_device(leaf.blocks.take(x, i)) for x in stacks] if leaf.reads else []
        return list(map(of_leaf, leaves, stacks))

    def visit(i: Any, following: Any, state: tuple[Arrays, Arrays, Arrays]) -> tuple[Arrays, Arrays, Arrays]:
        """Compute and write block i, and fetch the one that follows, if one does."""
        stacks, arrays, fetched = state
        coming = fetched if following is None else fetch(stacks, following)
        i_device = i + zero
        for n, leaf in enumerate(leaves):
            # From the array that is replaced: from the one that was given, XLA would copy it before the loop.
            old = [leaf.blocks.take(x, i_device) for x in arrays[n]]
            new, replaced = leaf.compute(i_device, fetched[n], old)
            for k, block in enumerate(new):
                # Each array is read before it is written, so XLA need not copy it. An order of all reads before all
                # writes would have the two directions of the bus wait for each other.
                stack = stacks[n][k]
                if leaf.reads and following is not None:
                    coming[n][k], stack, block = lax.optimization_barrier((coming[n][k], stack, block))
                stacks[n][k] = leaf.blocks.put(stack, to_host(block), i)
            arrays[n] = [leaf.blocks.put(x, block, i_device) for x, block in zip(arrays[n], replaced, strict=True)]
        return stacks, arrays, coming

    stacks, arrays = [list(leaf.on_host) for leaf in leaves], [list(leaf.on_device) for leaf in leaves]
    half, odd = divmod(leaves[0].blocks.number, 2)
    state = stacks, arrays, fetch(stacks, 0)  # kernels read it: XLA:GPU copies rows by DMA in loops alone
    if odd:  # XLA:GPU would not clamp the row that an iteration for the last block would fetch
        state = lax.fori_loop(0, 2 * half, lambda i, state: visit(i, i + 1, state), state)
        return visit(2 * half, None, state)[:2]
    # Two blocks in each iteration, one of each half: what follows the last of the first half is a block, too.
    return lax.fori_loop(0, half, lambda i, state: visit(half + i, i + 1, visit(i, half + i, state)), state)[:2]
