"""Decide which residuals a layer does not copy where one of its passes runs alone.

Such a pass has no other beside it to hide its copies, and a layer waits for what it does not hide. To wait less:

1. Go through the residuals, the largest first. Copy one if the pass has time left for it. Otherwise let it stay on the
   device, or copy it late if the budget has no room.
2. Try to recompute each group of residuals that can be, with the first step done anew for the others. Take the group
   with which both passes together are shortest, if they are shorter than without it.
3. Repeat the second step until no group helps.

The seconds and the bus are an H200's, whatever runs: all processes must compile the same program.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from jax.extend.core import Jaxpr

from .cost import Cost, Rates, cost

# Measured: benchmarks/results/fits.json.
RATES = Rates(gemm_tflops=670.0, attention_tflops=(580.0, 530.0), hbm_gb_s=3900.0)
BUS_GB_S = 53.0  # one way

Direction = Literal["forward", "backward"]
Rows = frozenset[int]  # those of a residual in its layer's plan


class Lone(NamedTuple):
    """A layer one of whose passes runs alone.

    Attributes:
      direction: of that pass.
      forward, backward: seconds of the layer's passes.
      sizes: bytes per device of each residual for the host.
      again: seconds that recomputing a group of residuals adds to the backward pass, by the rows of all of them.
    """

    direction: Direction
    forward: float
    backward: float
    sizes: Mapping[Rows, int]
    again: Mapping[Rows, float]


class Decided(NamedTuple):
    """The rows that are recomputed, the residuals that stay, and the seconds that both passes then take."""

    recomputed: Rows
    stay: frozenset[Rows]
    seconds: float


def cost_of(jaxpr: Jaxpr, devices: int) -> Cost:
    """Return the cost of a pass, as decisions count it."""
    return cost(jaxpr, RATES, devices)


def bytes_in(seconds: float) -> int:
    """Return the bytes that are copied one way in this time."""
    return int(seconds * BUS_GB_S * 1e9)


def decide(lone: Lone, budget: int, accepts: Callable[[Rows], bool] = lambda recomputed: True) -> Decided:
    """Decide what is recomputed, and what stays on the device.

    Args:
      budget: bytes that may stay.
      accepts: whether these rows can be recomputed together.
    """
    decided, left = _recomputing(lone, frozenset(), budget), list(lone.again)
    while left:
        tried = {group: _recomputing(lone, decided.recomputed | group, budget) for group in left}
        best = min(left, key=lambda group: tried[group].seconds)
        if tried[best].seconds >= decided.seconds:
            break
        left.remove(best)
        if accepts(tried[best].recomputed):
            decided = tried[best]
    return decided


def _recomputing(lone: Lone, recomputed: Rows, budget: int) -> Decided:
    """Return what stays, and how long both passes take, if these rows are recomputed."""
    backward = lone.backward + sum(seconds for group, seconds in lone.again.items() if group <= recomputed)
    alone, other = (lone.forward, backward) if lone.direction == "forward" else (backward, lone.forward)
    copied = {rows: size for rows, size in lone.sizes.items() if not rows & recomputed}
    stay = staying(copied, bytes_in(alone), budget)
    size = sum(copied.values()) - sum(copied[rows] for rows in stay)
    return Decided(recomputed, stay, other + max(alone, size / BUS_GB_S / 1e9))


def staying(sizes: Mapping[Rows, int], room: int, budget: int) -> frozenset[Rows]:
    """Return the residuals that stay, at most `budget` bytes. The pass has time to copy `room` bytes of the others."""
    stay = set[Rows]()
    for rows, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if room < size <= budget:
            stay.add(rows)
            budget -= size
        else:
            room -= size  # it is copied, in time or late
    return frozenset(stay)
