"""Text that messages share: the nearest allowed name, a value cut short, a size in bytes."""

import difflib
from collections.abc import Iterable


def closest(value: object, allowed: Iterable[str]) -> str | None:
    """Return the allowed name most like `value`, ignoring case; None if none is like it."""
    lower = {name.lower(): name for name in allowed}
    return next((lower[name] for name in difflib.get_close_matches(str(value).lower(), lower, 1, cutoff=0.5)), None)


def short(value: object) -> str:
    """Return the repr of a value, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def readable(size: float) -> str:
    """Return bytes in the largest unit that they reach: "1.50 GiB", "96 B"."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{int(size)} B"
