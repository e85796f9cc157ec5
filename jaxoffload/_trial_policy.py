"""The policy that `plan` tries: while a function is traced under it, its `scan`s have it."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ._policy import Policy

# Part of every trace cache's key: a function jitted under one policy is traced again under another.
_trial: Any = jax.make_user_context(None)


def with_policy(f: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """`f`, in which each `scan` is under this policy. Patterns that match nothing are no errors there."""

    @functools.wraps(f)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with _trial(policy):
            return f(*args, **kwargs)

    return traced


def in_force(policy: Policy, strict: bool) -> tuple[Policy, bool]:
    """The policy that counts where a function gives this one, and whether its patterns are checked."""
    return (policy, strict) if _trial.value is None else (_trial.value, False)
