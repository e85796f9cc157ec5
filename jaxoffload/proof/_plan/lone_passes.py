"""The decisions of the engine's `lone_pass.py`, for many cases at once.

A case is which residuals would be copied, and how many bytes may stay. A search for Llama 3 8B has half a million, and
one after another they would take several times as long as the rest of it.
"""

from typing import Any, NamedTuple

import numpy as np

from ..._engine.cost.lone_pass import BUS_GB_S, Direction


class LonePasses(NamedTuple):
    """The engine's `Lone`, as arrays.

    Attributes:
      sizes: bytes of the residuals; `groups`: the number of each one's group, (residuals,).
      again: seconds that recomputing a group adds, (groups,); infinite if it cannot be recomputed.
    """

    direction: Direction
    forward: float
    backward: float
    sizes: Any
    groups: Any
    again: Any


def decide(lone: LonePasses, moved: Any, budget: Any) -> tuple[Any, Any]:
    """Return what is recomputed, (groups, cases) bool, and what stays on the device, (residuals, cases) bool.

    Args:
      moved: which residuals would be copied, (residuals, cases) bool.
      budget: bytes that may stay, (cases,) int64.
    """
    left = (lone.groups == np.arange(len(lone.again))[:, None]) @ moved  # groups of which something is moved
    recomputed = np.zeros(left.shape, bool)
    stay, seconds, backward = _recomputing(lone, moved, recomputed, budget)
    cases = np.arange(len(budget))  # that a further group may help
    while len(cases):
        waits = seconds[cases] - lone.forward - backward[cases]
        group, column = np.nonzero(left[:, cases] & (lone.again[:, None] < waits))
        these = cases[column]
        with_it = recomputed[:, these]
        with_it[group, np.arange(len(these))] = True
        tried = np.full((len(left), len(cases)), np.inf)
        tried[group, column] = _recomputing(lone, moved[:, these], with_it, budget[these])[1]
        better = tried.min(0) < seconds[cases]
        cases, best = cases[better], tried.argmin(0)[better]
        left[best, cases], recomputed[best, cases] = False, True
        found = _recomputing(lone, moved[:, cases], recomputed[:, cases], budget[cases])
        stay[:, cases], seconds[cases], backward[cases] = found
    return recomputed, stay


def _recomputing(lone: LonePasses, moved: Any, recomputed: Any, budget: Any) -> tuple[Any, Any, Any]:
    """Return what stays, the seconds of both passes, and those of the backward pass."""
    backward = lone.backward + np.where(np.isfinite(lone.again), lone.again, 0.0) @ recomputed
    forward = np.full(len(budget), lone.forward)
    alone, other = (forward, backward) if lone.direction == "forward" else (backward, forward)
    copied = moved & ~recomputed[lone.groups]
    stay, room = np.zeros(copied.shape, bool), np.int64(alone * BUS_GB_S * 1e9)
    left = room
    for number in np.argsort(-lone.sizes, kind="stable"):
        size = lone.sizes[number]
        stay[number] = copied[number] & (left < size) & (size <= budget)
        budget = budget - size * stay[number]
        left = left - size * (copied[number] & ~stay[number])
    return stay, other + np.maximum(alone, (room - left) / BUS_GB_S / 1e9), backward
