"""page(): a profile as one HTML page, with a picture of how kernels hide the copies of two layers."""

import html
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .._program.trace import Span
from .profile import Move, Profile

WAYS = {"d2h": "to the host", "h2d": "back"}
_STYLE = """
:root { color-scheme: light dark; } pre { overflow-x: auto; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
.row { display: flex; margin: .3rem 0; } .row b { width: 18rem; font-weight: normal; overflow-wrap: anywhere; }
.bars { position: relative; flex: 1; } .bars span { position: absolute; height: 100%; text-align: center; }
.kernel { background: #2f81d6; } .copy { background: #d9822b; } .exposed { background: #d1343c; }
"""
_LEGEND = """
<p><span class="copy">a copy, and its layer</span> <span class="exposed">exposed: no kernel ran</span>
<span class="kernel">kernels</span></p>
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
        f'<body><h1>{_text(title)}</h1><pre tabindex="0">{_text(profile)}</pre>{_picture(profile)}</body></html>\n'
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
    lanes = {way: [of[len(of) // 2] for key, of in runs.items() if key[0] == way] for way in WAYS}
    label = f"Copies of layers {', '.join(map(str, middle))}, and the kernels beside them"
    drawn = "".join(_lane(WAYS[way], moves, profile.kernels) for way, moves in lanes.items() if moves)
    return f'<h2>{label}</h2>{_LEGEND}<div role="img" aria-label="{label}">{drawn}</div>' if drawn else ""


def _lane(way: str, moves: Sequence[Move], kernels: Sequence[Span]) -> str:
    """Draw a row for each residual, marked where no kernel ran, above the kernels of the same time."""
    begin, end = min(m.at_ms for m in moves), max(m.at_ms + m.ms for m in moves)
    percent = lambda ms: 100 * ms / max(end - begin, 1e-6)
    within = lambda begin, end: [(max(a, begin), min(b, end)) for a, b in kernels if a < end and b > begin]

    def bar(span: Span, kind: str, title: str, label: object = "") -> str:
        style = f"left: {percent(span[0] - begin):.2f}%; width: {percent(span[1] - span[0]):.2f}%"
        return f'<span class="{kind}" style="{style}" title="{_text(title)}">{label}</span>'

    rows: dict[str, list[str]] = defaultdict(list)
    for m in moves:
        row, span = m.residual or "(not attributed)", (m.at_ms, m.at_ms + m.ms)
        title = f"{row}, layer {m.layer}: {m.ms} ms, {m.gb_per_s} GB/s, {m.exposed_ms} ms exposed"
        hidden = [bar(beside, "copy", title) for beside in within(*span)]
        rows[row] += [bar(span, "exposed", title), *hidden, bar(span, "label", title, m.layer)]
    rows["kernels"] = [bar(beside, "kernel", "kernels") for beside in within(begin, end)]
    drawn = (
        f'<div class="row"><b>{_text(row)}</b><div class="bars">{"".join(of)}</div></div>' for row, of in rows.items()
    )
    return f"<h3>{way}, {begin:.1f} to {end:.1f} ms</h3>{''.join(drawn)}"
