"""Words that errors have in common: the nearest allowed name, and a value that may be too long to show."""

import difflib
from collections.abc import Iterable


def nearest(value: object, allowed: Iterable[str]) -> str:
    """The end of a sentence: the allowed name most like `value`, whatever its case. Empty if none is like it."""
    lower = {other.lower(): other for other in allowed}
    close = difflib.get_close_matches(str(value).lower(), lower, 1, cutoff=0.5)
    return f"; the nearest is {lower[close[0]]!r}" if close else ""


def short(value: object) -> str:
    """Its repr, or the beginning of one that is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
