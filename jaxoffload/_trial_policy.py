"""The policy that `plan` tries: while a function is traced under it, its `scan`s have it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr

from ._policy import Policy


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A policy that is tried, and the scans that were traced under it, which live as long: a `Layer` keeps none.

    `says_what_interleaves`: whether `accumulate` does where nothing is offloaded, so that nothing interleaves.
    """

    policy: Policy
    says_what_interleaves: bool = False
    scans: list[Jaxpr] = dataclasses.field(default_factory=list)

    def traced[**P, T](self, f: Callable[P, T]) -> Callable[P, T]:
        """`f`, in which each `scan` is under this policy. Patterns that match nothing are no errors there."""

        @functools.wraps(f)
        def under(*args: P.args, **kwargs: P.kwargs) -> T:
            with _trial(self):
                return f(*args, **kwargs)

        return under


# Part of every trace cache's key: a function jitted under one policy is traced again under another.
_trial: Any = jax.make_user_context(None)


def in_force(policy: Policy, strict: bool, scan: Jaxpr) -> tuple[Policy, bool]:
    """The policy that counts for a scan where a function gives this one, and whether its patterns are checked."""
    trial: Trial | None = _trial.value
    if trial is None:
        return policy, strict
    trial.scans.append(scan)
    return trial.policy, False


def says_what_interleaves() -> bool:
    """Whether `accumulate` says what would interleave if something were offloaded."""
    trial: Trial | None = _trial.value
    return trial is not None and trial.says_what_interleaves
