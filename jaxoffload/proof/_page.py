"""One HTML page of what is where, what holds and how the copies went: no script, no network, a table beside each
picture."""

import html
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._memory import readable
from .._residuals import EMPTY, OFFLOADED, RECOMPUTED, SAVED, Residuals
from ._profile import Move, Profile
from ._verify import Check

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --rule: #c8ced6; --saved: #0b6bcb;
  --offloaded: #d9822b; --recomputed: #8a94a0; --bad: #c0262d; --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171b; --rule: #3a424c; --saved: #5aa9ff;
  --offloaded: #f0a860; --recomputed: #7d8893; --bad: #ff7b7b; --good: #56d364; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; } caption { text-align: left; font-weight: 600; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 13px; }
.saved { fill: var(--saved); } .offloaded { fill: var(--offloaded); } .recomputed { fill: var(--recomputed); }
.exposed { fill: var(--bad); } .line { fill: none; stroke-width: 2.5; } .axis { stroke: var(--rule); }
.with { stroke: var(--offloaded); } .without { stroke: var(--saved); stroke-dasharray: 6 4; }
.holds { color: var(--good); font-weight: 600; } .fails { color: var(--bad); font-weight: 600; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 1em; }
"""
_PLACES = {SAVED: "on the device", OFFLOADED: "on the host", RECOMPUTED: "computed again"}


def page(
    title: str,
    about: Mapping[str, str],
    table: Residuals | None = None,
    checks: Sequence[tuple[str, Check]] = (),
    profile: Profile | None = None,
) -> str:
    """The page: `about` the machine and versions; the residuals; of what each check is, and the check; the profile."""
    parts = [_facts(about)]
    if checks:
        parts.append(_verdicts(checks))
    if table is not None:
        parts += [_places(table), _memory(table)]
    if profile is not None:
        parts.append(_timeline(profile))
    data = {"about": dict(about), "checks": [[what, vars(check)] for what, check in checks]}
    data |= {"residuals": json.loads(table.to_json())} if table is not None else {}
    data |= {"profile": json.loads(profile.to_json())} if profile is not None else {}
    embedded = json.dumps(data).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><main><h1>{_text(title)}</h1>{''.join(parts)}</main>"
        f'<script type="application/json" id="data">{embedded}</script></body></html>\n'
    )


def _text(x: Any) -> str:
    return html.escape(str(x))


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int] = ()) -> str:
    """`numbers`: the columns that are set as such. A cell that is a tuple is (text, class)."""
    kind = lambda i: ' class="number"' if i in numbers else ""

    def cell(i: int, x: Any) -> str:
        text, of = x if isinstance(x, tuple) else (x, "")
        return f"<td{kind(i)}>" + (f'<span class="{of}">{_text(text)}</span>' if of else _text(text)) + "</td>"

    body = "".join("<tr>" + "".join(cell(i, x) for i, x in enumerate(row)) + "</tr>" for row in rows)
    heads = "".join(f'<th scope="col"{kind(i)}>{_text(x)}</th>' for i, x in enumerate(head))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption)}"><table><caption>{_text(caption)}'
        f"</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _picture(label: str, width: int, height: int, inside: str) -> str:
    size = f'viewBox="0 0 {width} {height}"'
    return f'<svg {size} role="img" aria-label="{_text(label)}"><title>{_text(label)}</title>{inside}</svg>'


def _rectangle(x: float, y: float, width: float, height: float, kind: str, said: str) -> str:
    at = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.5):.2f}" height="{height}"'
    return f'<rect {at} class="{kind}"><title>{_text(said)}</title></rect>'


def _words(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(words)}</text>'


def _facts(about: Mapping[str, str]) -> str:
    return _table("Where and with what", ("", ""), about.items())


def _verdicts(checks: Sequence[tuple[str, Check]]) -> str:
    of = {"holds": "holds", "fails": "fails"}
    rows = ((what, c.claim, (c.verdict, of.get(c.verdict, "")), c.said) for what, c in checks)
    return "<h2>What holds</h2>" + _table("Claims and verdicts", ("of", "claim", "verdict", "because"), rows)


def _places(table: Residuals) -> str:
    """A bar a residual, of the bytes in each place; the table has the same numbers."""
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_PLACES, 0))
    for row in table:
        if row.state in _PLACES:
            sizes[", ".join(row.names) or "(untagged)"][row.state] += row.bytes
    largest, bars = max((sum(of.values()) for of in sizes.values()), default=0) or 1, ""
    for number, (name, of) in enumerate(sizes.items()):
        x, y = 260.0, 8 + 24 * number
        bars += _words(250, y + 14, name, "end")
        for state, size in of.items():
            wide = 700 * size / largest
            if size:
                bars += _rectangle(x, y, wide, 18, state, f"{name}: {readable(size)} {_PLACES[state]}")
            x += wide
    keys = "".join(
        f'<span class="key" style="background: var(--{state})"></span>{place}' for state, place in _PLACES.items()
    )
    rows = [(name, *map(readable, of.values())) for name, of in sizes.items()]
    totals = [readable(sum(of[state] for of in sizes.values())) for state in _PLACES]
    return (
        f"<h2>What is where</h2><p>{keys}</p>"
        + _picture("Bytes of each residual by place", 1000, 16 + 24 * len(sizes), bars)
        + _table("Bytes by place", ("residual", *_PLACES.values()), [*rows, ("all", *totals)], (1, 2, 3))
    )


def _memory(table: Residuals) -> str:
    """What residuals take of the device, from the first layer forward to the first backward."""
    layers = max((row.layers for row in table if row.decision is not None), default=0)
    if layers < 2 or not table.host_bytes:
        return ""
    moving = [row for row in table if row.state == OFFLOADED and row.reason != EMPTY]
    moved, offloaded = sum(row.bytes_per_layer for row in moving), max((row.layers for row in moving), default=0)
    a_layer = (table.device_bytes - table.untagged_bytes + sum(row.bytes for row in moving)) / layers
    up = list(range(layers + 1))
    counts = up + up[::-1]
    without = [layer * a_layer for layer in counts]
    # On the device is what the current layer keeps, and the one that is on its way.
    held = [layer * a_layer - max(0, min(layer - 2, offloaded)) * moved for layer in counts]
    top, step = max(without) or 1, 900 / (len(counts) - 1)
    path = lambda ys: " ".join(f"{60 + i * step:.1f},{220 - 190 * y / top:.1f}" for i, y in enumerate(ys))
    inside = (
        '<line class="axis" x1="60" y1="220" x2="960" y2="220"/><line class="axis" x1="60" y1="20" x2="60" y2="220"/>'
        + f'<polyline class="line without" points="{path(without)}"/>'
        + f'<polyline class="line with" points="{path(held)}"/>'
        + _words(60, 240, "first layer, forward")
        + _words(510, 240, "last layer", "middle")
        + _words(960, 240, "first layer, backward", "end")
        + _words(64, 16, readable(int(top)))
    )
    most = f"at most {readable(int(max(held)))} with offload, {readable(int(top))} without"
    label = f"Device memory of residuals over a step: {most}"
    rows = [("with offload", readable(int(max(held)))), ("without", readable(int(top)))]
    return (
        "<h2>Memory over the step</h2><p>Of tagged residuals on the device, as the table predicts it: solid with "
        "offload, dashed without.</p>"
        + _picture(label, 1000, 250, inside)
        + _table("At most", ("", "bytes"), rows, (1,))
    )


def _timeline(profile: Profile) -> str:
    """Two layers in the middle, there and back; and the totals of all copies."""
    layers = sorted({m.layer for m in profile.moves if m.layer is not None})
    middle = layers[len(layers) // 2 - 1 :][:2] if len(layers) > 1 else layers
    lanes = ""
    for number, direction in enumerate(("d2h", "h2d")):
        shown = [m for m in profile.moves if m.direction == direction and m.layer in middle]
        lanes += _lanes(20 + 110 * number, "to the host" if direction == "d2h" else "back", shown, profile.kernels)
    rows = [
        (t.residual, t.direction, t.copies, readable(t.bytes), f"{t.ms:.2f}", f"{t.exposed_ms:.2f}")
        for t in profile.totals
    ]
    spread = f"{profile.spread_ms[0]} to {profile.spread_ms[1]}"
    said = f"{profile.step_ms} ms a step ({spread}); {profile.exposed_ms} ms of copies beside which no kernel ran"
    return (
        f'<h2>Copies</h2><p>{_text(said)}<span class="key" style="background: var(--offloaded)"></span>copies'
        '<span class="key" style="background: var(--bad)"></span>exposed'
        '<span class="key" style="background: var(--saved)"></span>kernels</p>'
        + (_picture(f"Copies and kernels of layers {middle}", 1000, 240, lanes) if lanes else "")
        + _table("Copies by residual", ("residual", "way", "copies", "bytes", "ms", "exposed ms"), rows, (2, 3, 4, 5))
    )


def _lanes(y: float, way: str, moves: Sequence[Move], kernels: Sequence[tuple[float, float]]) -> str:
    """Copies, marked where no kernel ran, above the kernels of the same time."""
    if not moves:
        return ""
    begin, end = min(m.at_ms for m in moves), max(m.at_ms + m.ms for m in moves)
    scale = 780 / max(end - begin, 1e-6)
    bar = lambda at, span, start, stop, kind, said: _rectangle(
        190 + (start - begin) * scale, at, (stop - start) * scale, span, kind, said
    )
    drawn = _words(180, y + 24, way, "end") + _words(180, y + 54, "kernels", "end")
    near = [(max(a, begin), min(b, end)) for a, b in kernels if a < end and b > begin]
    for m in moves:
        took = f"{m.ms} ms, {m.gb_per_s} GB/s, {m.exposed_ms} ms exposed"
        drawn += bar(y + 8, 22, m.at_ms, m.at_ms + m.ms, "offloaded", f"{m.residual}, layer {m.layer}: {took}")
        free = m.at_ms
        for a, b in [*near, (m.at_ms + m.ms, m.at_ms + m.ms)]:
            if (until := min(a, m.at_ms + m.ms)) > free:
                drawn += bar(y + 24, 6, free, until, "exposed", f"{m.residual}, layer {m.layer}: no kernel")
            free = max(free, b)
    drawn += "".join(bar(y + 38, 22, a, b, "saved", "kernels") for a, b in near)
    return drawn + _words(190, y + 80, f"{begin:.1f} ms") + _words(970, y + 80, f"{end:.1f} ms", "end")
