"""Text that messages share: the nearest allowed name, a value cut short, a size in bytes."""

import difflib
from collections.abc import Iterable

GIB = 2**30


def nearest(value: object, allowed: Iterable[str]) -> str:
    """The end of a sentence: the allowed name most like `value`, whatever its case. Empty if none is like it."""
    lower = {other.lower(): other for other in allowed}
    close = difflib.get_close_matches(str(value).lower(), lower, 1, cutoff=0.5)
    return f"; the nearest is {lower[close[0]]!r}" if close else ""


def short(value: object) -> str:
    """Its repr, or the beginning of one that is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def readable(size: int) -> str:
    """Bytes in the largest unit that they reach: "1.50 GiB", "96 B"."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"
