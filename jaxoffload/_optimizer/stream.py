"""Stream arrays from the host through the device and back, block by block, in one loop for leaves of as many blocks.

    iteration i:   fetch block i+1    compute block i    write block i

Both copies run beside the computation, one in each direction. On the device are at most four blocks: one that comes,
one that is computed with, what becomes of it, and one that goes.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._engine.jaxprs.flat import division
from .._engine.layers.rows import opaque_zero
from .._engine.layers.transport import to_device, to_host

Arrays = dict[int, Any]


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

        return self._in_shards(take, axis, x, i) if self.number > 1 else x

    def put(self, x: Any, block: Any, i: Any) -> Any:
        """Return an array with its block i replaced."""

        def put(x: Any, block: Any, i: Any) -> Any:
            return lax.dynamic_update_slice_in_dim(x, block, i * block.shape[0], 0, allow_negative_indices=False)

        return self._in_shards(put, 0, x, block, i) if self.number > 1 else block

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

    def _in_shards(self, f: Callable[..., Any], axis: int, *operands: Any) -> Any:
        """Return `f` of arrays and a number; if their rows are divided, of the part of each device."""
        if division(self.sharding).rows == 1:
            return f(*operands)
        spec = self.sharding_of(operands[0], axis).spec
        specs = (*[spec] * (len(operands) - 1), PartitionSpec())
        return jax.shard_map(f, mesh=self.sharding.mesh, in_specs=specs, out_specs=spec)(*operands)


class Stream(NamedTuple):
    """A leaf whose state streams.

    Attributes:
      blocks: how its arrays are divided.
      arrays: those that are replaced, by numbers that no other leaf has: its state, and the parameter.
      on_host: the numbers of those on the host.
      reads: the numbers of those on the host that the new ones are computed from.
      compute: the number of a block, and that block of the arrays on the device and of those read -> the new ones.
    """

    blocks: Blocks
    arrays: Arrays
    on_host: Collection[int]
    reads: Collection[int]
    compute: Callable[[Any, Arrays], Arrays]


def stream(leaves: Sequence[Stream]) -> Arrays:
    """Return the arrays that replace those of the leaves. All leaves have as many blocks."""
    zero = opaque_zero()

    def fetch(arrays: Arrays, i: Any) -> Arrays:
        return {n: to_device(leaf.blocks.take(arrays[n], i)) for leaf in leaves for n in leaf.reads}

    def visit(i: Any, following: Any, state: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        """Compute and write block i, and fetch the one that follows, if one does."""
        arrays, fetched = dict(state[0]), state[1]
        coming = {} if following is None else fetch(arrays, following)
        i_device = i + zero
        for leaf in leaves:
            # From the array that is replaced: from the one that was given, XLA would copy it before the loop.
            old = {n: leaf.blocks.take(arrays[n], i_device) for n in leaf.arrays if n not in leaf.on_host}
            for n, block in leaf.compute(i_device, fetched | old).items():
                # Each array is read before it is written, so XLA need not copy it. An order of all reads before all
                # writes would have the two directions of the bus wait for each other.
                if n in coming:
                    coming[n], arrays[n], block = lax.optimization_barrier((coming[n], arrays[n], block))
                there = n in leaf.on_host
                arrays[n] = leaf.blocks.put(arrays[n], to_host(block) if there else block, i if there else i_device)
        return arrays, coming

    arrays = {n: x for leaf in leaves for n, x in leaf.arrays.items()}
    state = arrays, fetch(arrays, 0)  # kernels read it: XLA:GPU copies rows by DMA in loops alone
    half, odd = divmod(leaves[0].blocks.number, 2)
    if odd:  # XLA:GPU would not clamp the row that an iteration for the last block would fetch
        if half:
            state = lax.fori_loop(0, 2 * half, lambda i, state: visit(i, i + 1, state), state)
        return visit(2 * half, None, state)[0]
    # Two blocks in each iteration, one of each half: what follows the last of the first half is a block, too.
    return lax.fori_loop(0, half, lambda i, state: visit(half + i, i + 1, visit(i, half + i, state)), state)[0]
