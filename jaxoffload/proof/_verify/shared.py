"""Sentences that several checks share, and how processes agree on what to do next."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._program.host_transfers import host_transfers
from .._program.target import Target

VISIBLE = 64 * 2**20  # bytes; memory differs by some MiB for other reasons


def moved_by_others(target: Target) -> str:
    """Return what goes to the host in the reference too; empty if nothing does."""
    count = len(list(host_transfers(target.reference_jaxpr)))
    others = "value(s) also go to the host in the reference, so jaxoffload is not what moves them"
    return f"{count} {others}" if count else ""


def first(items: Sequence[str], between: str = ", ") -> str:
    """Return the first three, and how many more there are."""
    return between.join([*items[:3], *[f"and {len(items) - 3} more"] * (len(items) > 3)])


def in_any_process(true: bool) -> bool:
    """Return if `true` is so in any process, so that all take the same branch."""
    return bool(np.any(multihost_utils.process_allgather(np.array(true)))) if jax.process_count() > 1 else true
