"""Text that messages share: allowed names and the nearest, a value or list cut short, bytes, an array's type."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

GIB = 2**30


def nearest(value: object, allowed: Iterable[str]) -> str:
    """Return the end of an error message that names the allowed name most like `value`; empty if none is like it."""
    lower = {name.lower(): name for name in allowed}
    found = difflib.get_close_matches(str(value).lower(), lower, 1, cutoff=0.5)
    return f"; the nearest is {lower[found[0]]!r}" if found else ""


def one_of(allowed: Iterable[str]) -> str:
    """Return "'a', 'b' or 'c'"."""
    *others, last = map(repr, allowed)
    return f"{', '.join(others)} or {last}" if others else last


def short(value: object) -> str:
    """Return the repr of `value`, cut to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def first(items: Sequence[str], between: str = ", ") -> str:
    """Return the first three, and how many more there are."""
    return between.join([*items[:3], *[f"and {len(items) - 3} more"] * (len(items) > 3)])


def readable(size: float) -> str:
    """Return bytes in the largest unit that they reach: "1.50 GiB", "96 B"."""
    for unit, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{int(size)} B"


def array_type(x: Any) -> str:
    """Return an array's dtype and shape, as in "float32[8, 4]"; "None" for None."""
    return "None" if x is None else f"{np.dtype(x.dtype).name}{list(x.shape)}"
