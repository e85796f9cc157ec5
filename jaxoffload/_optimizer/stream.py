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

from .._engine.jaxprs.flat import division
from .._engine.layers.rows import opaque_zero
from .._engine.layers.transport import to_device, to_host
from .._jax import nbytes, on_host
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
    placed = {n: leaf.placed for leaf in leaves for n in leaf.arrays}
    given = {n: x for leaf in leaves for n, x in leaf.arrays.items()}
    there = {n: x for n, x in given.items() if on_host(jax.typeof(x))}
    here = {n: x for n, x in given.items() if n not in there}
    turns = _turns({n: nbytes(x) // division(placed[n].sharding).parts for n, x in there.items()})
    # Kernels read it: XLA:GPU copies rows by DMA in loops alone.
    fetched = {n: to_device(placed[n].take(there[n], 0)) for leaf in leaves for n in leaf.reads}

    def visit(i: Any, following: Any, state: tuple[Arrays, Arrays, Arrays]) -> tuple[Arrays, Arrays, Arrays]:
        """Compute and write block i, and fetch the one that follows, if one does."""
        here, there, fetched = state
        new, coming, i_device = dict[int, Any](), dict[int, Any](), i + zero
        for leaf in leaves:
            # From the array that is replaced: from the one that was given, XLA would copy it before the loop.
            old = {n: leaf.placed.take(here[n], i_device) for n in leaf.arrays if n in here}
            new |= leaf.compute(i_device, old | {n: fetched[n] for n in leaf.reads})
        for reads, writes in turns:
            there, coming, going = lax.optimization_barrier((there, coming, {n: new[n] for n in writes}))
            if following is not None:
                coming |= {n: to_device(placed[n].take(there[n], following)) for n in reads if n in fetched}
            there |= {n: placed[n].put(there[n], to_host(x), i) for n, x in going.items()}
        there, coming = lax.optimization_barrier((there, coming))  # as each turn waits for the one before
        return {n: placed[n].put(x, new[n], i_device) for n, x in here.items()}, there, coming

    state = here, there, fetched
    half, odd = divmod(leaves[0].placed.blocks, 2)
    if odd and half:  # XLA:GPU would not clamp the row that an iteration for the last block would fetch
        state = lax.fori_loop(0, 2 * half, lambda i, state: visit(i, i + 1, state), state)
    if odd:
        state = visit(2 * half, None, state)
    else:  # two blocks in each iteration, one of each half: what follows the last of the first half is a block, too
        state = lax.fori_loop(0, half, lambda i, state: visit(half + i, i + 1, visit(i, half + i, state)), state)
    return state[0] | state[1]


def _turns(size: dict[int, int]) -> list[tuple[list[int], list[int]]]:
    """Return which array is read, and which is written, in each turn: none or one. `size`: of each, on a device.

    Arrays of one size take turns: while a block of one comes, a block of the one that was read before goes. So both
    directions of the bus are always busy; no copy waits for another on a stream, which XLA deals out in turn (see
    docs/upstream.md); and as an array is not read and written in one turn, XLA copies none.
    """
    turns = list[tuple[list[int], list[int]]]()
    # The smallest first: the first turn waits for what is computed of it.
    for _, group in itertools.groupby(sorted(size, key=lambda n: size[n]), key=lambda n: size[n]):
        first, *others = group
        after = [[n] for n in (*others, first)] if others else [[], [first]]
        turns += zip([[first], *after], after, strict=False)
    return turns
