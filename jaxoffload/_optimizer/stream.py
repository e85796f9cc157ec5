"""Stream arrays from the host through the device and back, block by block, in one loop for leaves of as many blocks.

    iteration i:   fetch block i+1    compute block i    write block i

Both copies run beside the computation, one in each direction of the bus. On the device are at most four blocks: one
that comes, one that is computed with, what becomes of it, and one that goes.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._engine.jaxprs.flat import division
from .._engine.layers.rows import opaque_zero
from .._engine.layers.transport import to_device, to_host
from .._jax import nbytes

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
    zero, turns = opaque_zero(), _turns(leaves)
    blocks = {n: leaf.blocks for leaf in leaves for n in leaf.arrays}
    here = {n: x for leaf in leaves for n, x in leaf.arrays.items() if n not in leaf.on_host}
    there = {n: leaf.arrays[n] for leaf in leaves for n in leaf.on_host}
    # Kernels read it: XLA:GPU copies rows by DMA in loops alone.
    fetched = {n: to_device(blocks[n].take(there[n], 0)) for leaf in leaves for n in leaf.reads}

    def visit(i: Any, following: Any, state: tuple[Arrays, Arrays, Arrays]) -> tuple[Arrays, Arrays, Arrays]:
        """Compute and write block i, and fetch the one that follows, if one does."""
        here, there, fetched = state
        new, coming, i_device = dict[int, Any](), dict[int, Any](), i + zero
        for leaf in leaves:
            # From the array that is replaced: from the one that was given, XLA would copy it before the loop.
            old = {n: blocks[n].take(here[n], i_device) for n in leaf.arrays if n in here}
            new |= leaf.compute(i_device, fetched | old)
        for reads, writes in turns:
            there, coming, going = lax.optimization_barrier((there, coming, {n: new[n] for n in writes}))
            if following is not None:
                coming |= {n: to_device(blocks[n].take(there[n], following)) for n in reads if n in fetched}
            there |= {n: blocks[n].put(there[n], to_host(x), i) for n, x in going.items()}
        there, coming = lax.optimization_barrier((there, coming))  # as each turn waits for the one before
        return {n: blocks[n].put(x, new[n], i_device) for n, x in here.items()}, there, coming

    state = here, there, fetched
    half, odd = divmod(leaves[0].blocks.number, 2)
    if odd and half:  # XLA:GPU would not clamp the row that an iteration for the last block would fetch
        state = lax.fori_loop(0, 2 * half, lambda i, state: visit(i, i + 1, state), state)
    if odd:
        state = visit(2 * half, None, state)
    else:  # two blocks in each iteration, one of each half: what follows the last of the first half is a block, too
        state = lax.fori_loop(0, half, lambda i, state: visit(half + i, i + 1, visit(i, half + i, state)), state)
    return state[0] | state[1]


def _turns(leaves: Sequence[Stream]) -> list[tuple[list[int], list[int]]]:
    """Return which array is read, and which is written, in each turn: none or one.

    Arrays of one size take turns: while a block of one comes, a block of the one that was read before goes. So both
    directions of the bus are always busy; no copy waits for another on a stream, which XLA deals out in turn (see
    docs/upstream.md); and as an array is not read and written in one turn, XLA copies none.
    """
    size = dict[int, int]()
    for leaf in leaves:
        parts = division(leaf.blocks.sharding).parts
        # An array that is about to be made, in a single block, is None.
        size |= {n: 0 if leaf.arrays[n] is None else nbytes(leaf.arrays[n]) // parts for n in leaf.on_host}
    # The smallest first: the first turn waits for what is computed of it.
    on_host = sorted(size, key=lambda n: size[n])
    turns = list[tuple[list[int], list[int]]]()
    for _, group in itertools.groupby(on_host, key=lambda n: size[n]):
        first, *others = group
        after = [[n] for n in (*others, first)] if others else [[], [first]]
        turns += zip([[first], *after], after, strict=False)
    return turns
