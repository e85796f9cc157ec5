"""Errors that the user can mend, as data, and warnings that point to the user's line."""

import contextlib
import os
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import jax

# Directories of code that a warning must not point to: it is about the user's line.
NOT_THE_USERS = (os.path.dirname(__file__), os.path.dirname(jax.__file__), contextlib.__file__.removesuffix(".py"))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line."""
    warnings.warn(f"jaxoffload: {text}", category, skip_file_prefixes=NOT_THE_USERS)


def deprecated(old: str, new: str) -> None:
    """Warn that `old`, as the user wrote it, works in this release only; `new` is the line to write."""
    warn(f"{old} is deprecated, and the next release drops it; write: {new}", DeprecationWarning)


class Problem(NamedTuple):
    """One thing that is wrong. `key`: the setting or the function that it is about; `message`: the line that says so,
    which begins with the key.

    Example:
      >>> from jaxoffload import Problem
      >>> Problem("default", "default: 'ofload' is not allowed").under("remat").key
      'remat.default'
    """

    key: str
    message: str

    def under(self, section: str) -> "Problem":
        """Return the problem, with its key as an entry of `section`."""
        return Problem(f"{section}.{self.key}", f"{section}.{self.message}")


class UserError(Exception):
    """Base class of the errors that the user can mend. `problems` has all of them; as text, one line each.

    Example:
      >>> from jaxoffload import Policy, UserError
      >>> try:
      ...     Policy(default="ofload", dots="keep")
      ... except UserError as error:
      ...     print([problem.key for problem in error.problems])
      ['default', 'dots']
    """

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(problem.message for problem in self.problems)
