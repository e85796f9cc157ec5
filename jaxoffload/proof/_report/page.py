"""page(): a profile as one HTML page, with a picture of how kernels hide the copies of two layers."""

import html
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from .._program.trace import Span
from .profile import Move, Profile

WIDTH, LEFT, RIGHT = 1000, 310, 890  # of a picture: the canvas, and the ends of its bars
ROW, HEIGHT = 24, 16  # of rows, and of bars
WAYS = {"d2h": "to the host", "h2d": "back"}
KEYS = {"copy": "copy, and its layer", "exposed": "exposed: no kernel ran", "kernel": "kernels"}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
pre { overflow-x: auto; } svg { width: 100%; height: auto; } svg text { fill: currentColor; font-size: 13px; }
.kernel { fill: #2f81d6; } .copy { fill: #d9822b; } .exposed { fill: #d1343c; }
"""


def page(title: str, profile: Profile) -> str:
    """Return one self-contained HTML page, without scripts: the profile's text, and a picture of two layers' copies.

    Args:
      title: its heading.
      profile: what `profile` or `read_profile` returned.

    Example:
      >>> from jaxoffload.proof import Move, Profile, page
      >>> move = Move("fc1", 3, "d2h", bytes=10**9, at_ms=0.0, ms=20.0, exposed_ms=5.0, stream="Stream #14")
      >>> profile = Profile("H200", 40.0, (39.0, 41.0), 35.0, 0.0, (move,), ((5.0, 40.0),))
      >>> "Copies of layers 3" in page("a step", profile)
      True
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f'<body><main><h1>{_text(title)}</h1><pre tabindex="0">{_text(profile)}</pre>{_picture(profile)}</main>'
        "</body></html>\n"
    )


def _text(x: Any) -> str:
    return html.escape(str(x))


def _picture(profile: Profile) -> str:
    """Draw two layers in the middle, and the run in the middle of those that run several times."""
    layers = sorted({m.layer for m in profile.moves if m.layer is not None})
    middle = layers[max(0, len(layers) // 2 - 1) :][:2]
    runs: dict[Any, list[Move]] = defaultdict(list)
    for move in (m for m in profile.moves if m.layer in middle):
        runs[move.direction, move.residual, move.layer].append(move)
    if not runs:
        return ""
    x, y = float(LEFT), 30.0
    shapes: list[str] = []
    for kind, meaning in KEYS.items():
        shapes += [_bar(x, 6, 12, kind, meaning), _words(x + 18, 16, meaning)]
        x += 50 + 8 * len(meaning)
    for direction, way in WAYS.items():
        if lane := [moves[len(moves) // 2] for key, moves in runs.items() if key[0] == direction]:
            shapes += _lane(y, way, lane, profile.kernels)
            y += ROW * (len({m.residual for m in lane}) + 2) + 14
    label = f"Copies of layers {', '.join(map(str, middle))}, and the kernels beside them"
    svg = f'<svg viewBox="0 0 {WIDTH} {y:g}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'
    return f"<h2>{label}</h2>{svg}"


def _lane(y: float, way: str, moves: Sequence[Move], kernels: Sequence[Span]) -> Iterator[str]:
    """Draw a row for each residual, marked where no kernel ran, above the kernels of the same time."""
    rows = list(dict.fromkeys(m.residual for m in moves))
    begin, end = min(m.at_ms for m in moves), max(m.at_ms + m.ms for m in moves)
    x = lambda ms: LEFT + (ms - begin) * (RIGHT - LEFT) / max(end - begin, 1e-6)
    bar = lambda a, b, row, *what: _bar(x(a), y + ROW * row, x(b) - x(a), *what)
    within = lambda begin, end: [(max(a, begin), min(b, end)) for a, b in kernels if a < end and b > begin]
    for number, name in enumerate([*rows, "kernels"]):
        yield _words(LEFT - 10, y + ROW * number + 14, f"{way}: {name or '(not attributed)'}"[-36:], "end")
    for m in moves:
        row, until = rows.index(m.residual), m.at_ms + m.ms
        title = f"{m.residual}, layer {m.layer}: {m.ms} ms, {m.gb_per_s} GB/s, {m.exposed_ms} ms exposed"
        yield bar(m.at_ms, until, row, "exposed", title)
        yield from (bar(*beside, row, "copy", title) for beside in within(m.at_ms, until))
        yield _words(x((m.at_ms + until) / 2), y + ROW * row + 13, str(m.layer), "middle")
    yield from (bar(*span, len(rows), "kernel", "kernels") for span in within(begin, end))
    below = y + ROW * (len(rows) + 1) + 10
    yield _words(LEFT, below, f"{begin:.1f} ms")
    yield _words(RIGHT, below, f"{end:.1f} ms", "end")


def _bar(x: float, y: float, width: float, kind: str, title: str) -> str:
    at = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 1):.2f}" height="{HEIGHT}"'
    return f'<rect {at} class="{kind}"><title>{_text(title)}</title></rect>'


def _words(x: float, y: float, text: str, anchor: str = "start") -> str:
    """`y` is the baseline; `anchor`: "start", "middle" or "end"."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text)}</text>'
