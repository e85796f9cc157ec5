"""Errors: the base class of what a user can mend, and whose lines a warning must not point to."""

import contextlib
import os

import jax

# Directories of code that a warning must not point to: it is the user's line that it is about.
NOT_THE_USERS = (os.path.dirname(__file__), os.path.dirname(jax.__file__), contextlib.__file__.removesuffix(".py"))
