"""Which residuals of a layer stay on the device, and which are recomputed, where one of its passes runs alone.

The seconds and the bus are an H200's, whatever runs: all processes must compile the same program. Many cases are
decided at once, for `plan` has many: which residuals are moved, and how many bytes may stay.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr

from .cost import Cost, cost
from .rates import Rates

# Measured: benchmarks/results/fits.json.
RATES = Rates(gemm_tflops=670.0, attention_tflops=(580.0, 530.0), hbm_gb_s=3900.0)
_BUS_GB_S = 53.0  # one way

Direction = Literal["forward", "backward"]


class Spare(NamedTuple):
    """Bytes per device that may stay in the first or in the last microbatch, and over how many devices values are
    spread."""

    bytes: int
    devices: int


class Lone(NamedTuple):
    """A layer one of whose passes has no other beside it.

    Attributes:
      direction: of that pass.
      forward, backward: seconds of the layer's passes.
      sizes: bytes per device of its residuals, (residuals,).
      groups: which of them are recomputed together: the number of each one's group, (residuals,).
      again: seconds that recomputing a group adds to the backward pass, (groups,); infinite if it cannot be recomputed.
    """

    direction: Direction
    forward: float
    backward: float
    sizes: Any
    groups: Any
    again: Any


class Decided(NamedTuple):
    """What is recomputed, (groups, cases) bool, and what stays on the device, (residuals, cases) bool."""

    recomputed: Any
    stay: Any


def cost_of(jaxpr: Jaxpr, devices: int) -> Cost:
    """The cost of a pass, by which is decided."""
    return cost(jaxpr, RATES, devices)


def bytes_in(seconds: Any) -> Any:
    """The bytes that are copied one way in this time."""
    return np.int64(seconds * _BUS_GB_S * 1e9)


def decide(
    lone: Lone, moved: Any, budget: Any, accepts: Callable[[Any], Any] = lambda recomputed: np.ones(len(recomputed[0]))
) -> Decided:
    """Decide what stays on the device of what is moved, and what is recomputed if that is faster than the wait.

    Args:
      moved: which residuals would be copied, (residuals, cases) bool.
      budget: bytes that may stay, (cases,) int64.
      accepts: groups, (groups, cases) bool -> for each case whether these can be recomputed together.
    """
    recomputed = np.zeros((len(lone.again), len(budget)), bool)
    seconds, stay = _planned(lone, moved, recomputed, budget)
    left = np.array([np.isfinite(s) & moved[lone.groups == g].any(0) for g, s in enumerate(lone.again)])
    cases = np.arange(len(budget))
    while True:
        # Seconds that the wait still takes; what takes as long is not tried.
        waits = seconds[cases] - lone.forward - _longer(lone, recomputed[:, cases])
        possible = left[:, cases] & (lone.again[:, None] < waits)
        cases, possible = cases[possible.any(0)], possible[:, possible.any(0)]
        if not len(cases):
            return Decided(recomputed, stay)
        tried = np.full((len(left), len(cases)), np.inf)
        group, which = np.nonzero(possible)
        of = cases[which]
        with_it = recomputed[:, of]
        with_it[group, range(len(of))] = True
        tried[group, which], _ = _planned(lone, moved[:, of], with_it, budget[of])
        better = tried.min(0) < seconds[cases]
        cases, best = cases[better], tried.argmin(0)[better]
        left[best, cases] = False
        with_it = recomputed[:, cases]
        with_it[best, range(len(cases))] = True
        can = np.array(accepts(with_it), bool) if len(cases) else np.zeros(0, bool)
        changed = cases[can]
        recomputed[:, changed] = with_it[:, can]
        seconds[changed], stay[:, changed] = _planned(lone, moved[:, changed], recomputed[:, changed], budget[changed])


def _planned(lone: Lone, moved: Any, recomputed: Any, budget: Any) -> tuple[Any, Any]:
    """The seconds that both passes take, and what stays."""
    longer = _longer(lone, recomputed)
    forward = np.full(len(budget), lone.forward)
    alone, other = (forward, longer) if lone.direction == "forward" else (longer, forward)
    copied = moved & ~recomputed[lone.groups]
    stay, size = staying(lone.sizes, copied, bytes_in(alone), budget)
    return other + np.maximum(alone, size / _BUS_GB_S / 1e9), stay


def _longer(lone: Lone, recomputed: Any) -> Any:
    """The seconds of the backward pass."""
    return lone.backward + np.where(np.isfinite(lone.again), lone.again, 0.0) @ recomputed


def staying(sizes: Any, copied: Any, room: Any, budget: Any) -> tuple[Any, Any]:
    """Return which residuals stay, at most `budget` bytes: large ones that do not fit in the `room` of the others; and
    the bytes of the others.

    Shapes are those of `decide`; `room` is that of `budget`.
    """
    stay, left = np.zeros(copied.shape, bool), room
    for number in np.argsort(-sizes, kind="stable"):
        size = sizes[number]
        stay[number] = copied[number] & (size > left) & (size <= budget)
        budget = budget - size * stay[number]
        left = left - size * (copied[number] & ~stay[number])
    return stay, room - left
