"""Stream arrays from the host through the device and back, block by block, in one loop for leaves of as many blocks.

    iteration i:   fetch block i+1    compute block i    write block i

Both copies run beside the computation, one in each direction. On the device are at most four blocks: one that comes,
one that is computed with, what becomes of it, and one that goes.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from .._engine.layers.rows import opaque_zero
from .._engine.layers.transport import to_device, to_host
from .._jax import on_host
from .placement import Placed

Arrays = dict[int, Any]


class Stream(NamedTuple):
    """A leaf whose state streams.

    Attributes:
      placed: how its arrays are divided.
      arrays: those that are replaced, by numbers that no other leaf has: its state, and the parameter.
      reads: the numbers of those on the host that the new ones are computed from.
      compute: the number of a block, and that block of the arrays on the device and of those read -> the new ones.
    """

    placed: Placed
    arrays: Arrays
    reads: Collection[int]
    compute: Callable[[Any, Arrays], Arrays]


def stream(leaves: Sequence[Stream]) -> Arrays:
    """Return the arrays that replace those of leaves with as many blocks."""
    zero = opaque_zero()
    given = {n: x for leaf in leaves for n, x in leaf.arrays.items()}
    there = {n for n, x in given.items() if on_host(jax.typeof(x))}

    def fetch(arrays: Arrays, i: Any) -> Arrays:
        return {n: to_device(leaf.placed.take(arrays[n], i)) for leaf in leaves for n in leaf.reads}

    def visit(i: Any, following: Any, state: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        """Compute and write block i, and fetch the one that follows, if one does."""
        arrays, fetched = dict(state[0]), state[1]
        coming = {} if following is None else fetch(arrays, following)
        i_device = i + zero
        for leaf in leaves:
            # From the array that is replaced: from the one that was given, XLA would copy it before the loop.
            old = {n: leaf.placed.take(arrays[n], i_device) for n in leaf.arrays if n not in there}
            for n, block in leaf.compute(i_device, old | {n: fetched[n] for n in leaf.reads}).items():
                # Each array is read before it is written, so XLA need not copy it. An order of all reads before all
                # writes would have the two directions of the bus wait for each other.
                if n in coming:
                    coming[n], arrays[n], block = lax.optimization_barrier((coming[n], arrays[n], block))
                new, at = (to_host(block), i) if n in there else (block, i_device)
                arrays[n] = leaf.placed.put(arrays[n], new, at)
        return arrays, coming

    state = given, fetch(given, 0)  # kernels read it: XLA:GPU copies rows by DMA in loops alone
    half, odd = divmod(leaves[0].placed.blocks, 2)
    if odd:  # XLA:GPU would not clamp the row that an iteration for the last block would fetch
        if half:
            state = lax.fori_loop(0, 2 * half, lambda i, state: visit(i, i + 1, state), state)
        return visit(2 * half, None, state)[0]
    # Two blocks in each iteration, one of each half: what follows the last of the first half is a block, too.
    return lax.fori_loop(0, half, lambda i, state: visit(half + i, i + 1, visit(i, half + i, state)), state)[0]
