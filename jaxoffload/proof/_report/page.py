"""One HTML page of what is where, what holds and how the copies went: no script, no network, a table beside each
picture."""

import html
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from ..._residuals import Residuals
from ..._text import readable
from .._check import Check
from .pictures import COLORS, PLACES, TURNS, WAYS, Lane, memory, places, timeline
from .profile import Profile, short

_LIGHT = f":root {{ color-scheme: light dark; {' '.join(f'--{kind}: {color};' for kind, color in COLORS.items())} }}"
_STYLE = """
:root { --ink: #1b1f24; --paper: #fff; --rule: #c8ced6; --bad: #c0262d; --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171b; --rule: #3a424c; --saved: #5aa9ff;
  --offloaded: #f0a860; --recomputed: #7d8893; --exposed: #ff7b7b; --bad: #ff7b7b; --good: #56d364; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; } caption { text-align: left; font-weight: 600; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 13px; }
.saved { fill: var(--saved); } .offloaded { fill: var(--offloaded); } .recomputed { fill: var(--recomputed); }
.exposed { fill: var(--exposed); } .line { fill: none; stroke-width: 2.5; } .axis { stroke: var(--rule); }
.with { stroke: var(--offloaded); } .without { stroke: var(--saved); stroke-dasharray: 6 4; }
.holds { color: var(--good); font-weight: 600; } .fails { color: var(--bad); font-weight: 600; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 1em; }
"""


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
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_LIGHT}{_STYLE}</style></head>'
        f"<body><main><h1>{_text(title)}</h1>{''.join(parts)}</main>"
        f'<script type="application/json" id="data">{embedded}</script></body></html>\n'
    )


def about() -> dict[str, str]:
    """Machine and versions."""
    devices = jax.devices()
    kept = {"jax", "jaxlib", "jaxoffload", "jax-cuda12-plugin", "jax-cuda13-plugin", "transformer_engine"}
    versions = {p.name: p.version for p in importlib.metadata.distributions() if p.name in kept}
    device = f"{len(devices)} {devices[0].device_kind}"
    return {"device": device, **dict(sorted(versions.items())), "python": platform.python_version()}


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
    rows = ((what, c.claim, (c.verdict, of.get(c.verdict, "")), c.detail) for what, c in checks)
    return "<h2>What holds</h2>" + _table("Claims and verdicts", ("of", "claim", "verdict", "because"), rows)


def _places(table: Residuals) -> str:
    """A bar a residual, of the bytes in each place; the table has the same numbers."""
    sizes = places(table)
    largest, bars = max((sum(of.values()) for of in sizes.values()), default=0) or 1, ""
    for number, (name, of) in enumerate(sizes.items()):
        x, y = 260.0, 8 + 24 * number
        bars += _words(250, y + 14, name, "end")
        for state, size in of.items():
            wide = 700 * size / largest
            if size:
                bars += _rectangle(x, y, wide, 18, state, f"{name}: {readable(size)} {PLACES[state]}")
            x += wide
    keys = "".join(
        f'<span class="key" style="background: var(--{state})"></span>{place}' for state, place in PLACES.items()
    )
    rows = [(name, *map(readable, of.values())) for name, of in sizes.items()]
    totals = [readable(sum(of[state] for of in sizes.values())) for state in PLACES]
    return (
        f"<h2>What is where</h2><p>{keys}</p>"
        + _picture("Bytes of each residual by place", 1000, 16 + 24 * len(sizes), bars)
        + _table("Bytes by place", ("residual", *PLACES.values()), [*rows, ("all", *totals)], (1, 2, 3))
    )


def _memory(table: Residuals) -> str:
    """What residuals take of the device, from the first layer forward to the first backward."""
    if (found := memory(table)) is None:
        return ""
    top, step = max(found.without) or 1, 900 / (len(found.without) - 1)
    path = lambda ys: " ".join(f"{60 + i * step:.1f},{220 - 190 * y / top:.1f}" for i, y in enumerate(ys))
    inside = (
        '<line class="axis" x1="60" y1="220" x2="960" y2="220"/><line class="axis" x1="60" y1="20" x2="60" y2="220"/>'
        + f'<polyline class="line without" points="{path(found.without)}"/>'
        + f'<polyline class="line with" points="{path(found.held)}"/>'
        + "".join(map(_words, (60, 510, 960), (240,) * 3, TURNS, ("start", "middle", "end")))
        + _words(64, 16, found.most["without"])
    )
    most = ", ".join(f"{size} {how}" for how, size in found.most.items())
    return (
        "<h2>Memory over the step</h2><p>Of tagged residuals on the device, as the table predicts it: solid with "
        "offload, dashed without.</p>"
        + _picture(f"Device memory of residuals over a step: at most {most}", 1000, 250, inside)
        + _table("At most", ("", "bytes"), found.most.items(), (1,))
    )


def _timeline(profile: Profile) -> str:
    """Two layers in the middle, there and back; and the totals of all copies."""
    rows = [
        (t.residual, t.direction, t.copies, readable(t.bytes), f"{t.ms:.2f}", f"{t.exposed_ms:.2f}", short(t.streams))
        for t in profile.totals
    ]
    spread = f"{profile.spread_ms[0]} to {profile.spread_ms[1]}"
    said = (
        f"{profile.step_ms} ms a step ({spread}), kernels in {profile.compute_ms} ms, of these collectives in "
        f"{profile.collective_ms} ms; {profile.exposed_ms} ms of copies beside which no kernel ran"
    )
    picture = ""
    if found := timeline(profile):
        lanes = "".join(_lane(20 + 110 * number, lane) for number, lane in enumerate(found.lanes))
        shown = [
            (m.residual, m.layer, WAYS[m.direction], m.at_ms, m.ms, m.exposed_ms)
            for lane in found.lanes
            for m, _ in lane.copies
        ]
        head = ("residual", "layer", "way", "began at ms", "ms", "exposed ms")
        picture = _picture(f"Copies and kernels of layers {found.layers}", 1000, 240, lanes)
        picture += _table(f"Copies of layers {found.layers}", head, shown, (1, 3, 4, 5))
    return (
        f'<h2>Copies</h2><p>{_text(said)}<span class="key" style="background: var(--offloaded)"></span>copies'
        '<span class="key" style="background: var(--exposed)"></span>exposed'
        '<span class="key" style="background: var(--saved)"></span>kernels</p>'
        + picture
        + _table(
            "Copies by residual",
            ("residual", "way", "copies", "bytes", "ms", "exposed ms", "streams"),
            rows,
            (2, 3, 4, 5),
        )
    )


def _lane(y: float, lane: Lane) -> str:
    """Copies, marked where no kernel ran, above the kernels of the same time."""
    scale = 780 / max(lane.end - lane.begin, 1e-6)
    bar = lambda at, span, start, stop, kind, said: _rectangle(
        190 + (start - lane.begin) * scale, at, (stop - start) * scale, span, kind, said
    )
    drawn = _words(180, y + 24, WAYS[lane.direction], "end") + _words(180, y + 54, "kernels", "end")
    for m, exposed in lane.copies:
        what = f"{m.residual}, layer {m.layer}"
        took = f"{m.ms} ms, {m.gb_per_s} GB/s, {m.exposed_ms} ms exposed"
        drawn += bar(y + 8, 22, m.at_ms, m.at_ms + m.ms, "offloaded", f"{what}: {took}")
        drawn += "".join(bar(y + 24, 6, a, b, "exposed", f"{what}: no kernel") for a, b in exposed)
    drawn += "".join(bar(y + 38, 22, a, b, "saved", "kernels") for a, b in lane.kernels)
    return drawn + _words(190, y + 80, f"{lane.begin:.1f} ms") + _words(970, y + 80, f"{lane.end:.1f} ms", "end")
