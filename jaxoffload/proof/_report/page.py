"""page(): what is where, what holds and how the copies went, as one HTML page without scripts or network."""

import html
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ..._text import readable
from .._check import FAILS, HOLDS, Check
from .._program.trace import Span
from .._residuals.table import OFFLOADED, RECOMPUTED, SAVED, Residuals
from .profile import Move, Profile

WIDTH, LEFT, RIGHT, ROW = 1000, 310, 890, 24  # of a picture: the canvas, the ends of its bars, and a row's height
PLACES = {SAVED: "on the device", OFFLOADED: "on the host", RECOMPUTED: "recomputed"}
WAYS = {"d2h": "to the host", "h2d": "back"}
# Kernels have the colour of what is on the device, copies that of what is on the host.
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --rule: #c8ced6; --bad: #c0262d; --good: #1a7f37;
  --saved: #0b6bcb; --offloaded: #d9822b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171b; --rule: #3a424c; --saved: #5aa9ff;
  --offloaded: #f0a860; --bad: #ff7b7b; --good: #56d364; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; } caption { text-align: left; font-weight: 600; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 13px; }
.saved { fill: var(--saved); } .offloaded { fill: var(--offloaded); } .exposed { fill: var(--bad); }
.holds { color: var(--good); font-weight: 600; } .fails { color: var(--bad); font-weight: 600; }
"""


def page(
    title: str,
    about: Mapping[str, str],
    table: Residuals | None = None,
    checks: Sequence[tuple[str, Check]] = (),
    profile: Profile | None = None,
) -> str:
    """Return one self-contained HTML page, with a table beside the picture and the same data as JSON.

    Args:
      title: its heading.
      about: facts to begin with, as `about()` returns them.
      table: what `residuals` returned.
      checks: pairs of what was verified, such as "loss", and a `Check`.
      profile: what `profile` or `read_profile` returned.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload import residuals
      >>> from jaxoffload.proof import about, page
      >>> text = page("a loss", about(), residuals(lambda w: jnp.sum(jnp.sin(w)), jnp.ones(4)))
      >>> "What is where" in text
      True
    """
    parts = [_table("Where and with what", ("", ""), about.items())]
    data: dict[str, Any] = {"about": dict(about), "checks": [[what, vars(check)] for what, check in checks]}
    if checks:
        parts.append(_verdicts(checks))
    if table is not None:
        parts.append(_places(table))
        data["residuals"] = json.loads(table.to_json())
    if profile is not None:
        parts.append(_copies(profile))
        data["profile"] = json.loads(profile.to_json())
    embedded = json.dumps(data).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><main><h1>{_text(title)}</h1>{''.join(parts)}</main>"
        f'<script type="application/json" id="data">{embedded}</script></body></html>\n'
    )


def about() -> dict[str, str]:
    """Return the machine and the versions of what runs here, by name.

    Example:
      >>> import jax
      >>> from jaxoffload.proof import about
      >>> about()["jax"] == jax.__version__
      True
    """
    devices = jax.devices()
    kept = {"jax", "jaxlib", "jaxoffload", "jax-cuda12-plugin", "jax-cuda13-plugin", "transformer_engine"}
    versions = {p.name: p.version for p in importlib.metadata.distributions() if p.name in kept}
    device = f"{len(devices)} {devices[0].device_kind}"
    return {"device": device, **dict(sorted(versions.items())), "python": platform.python_version()}


def _text(x: Any) -> str:
    return html.escape(str(x))


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int] = ()) -> str:
    """Write a table, whose columns in `numbers` are set as such. A cell that is a tuple is (text, class)."""
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


def _verdicts(checks: Sequence[tuple[str, Check]]) -> str:
    classes = {HOLDS: "holds", FAILS: "fails"}
    rows = ((what, c.claim, (c.verdict, classes.get(c.verdict, "")), c.detail) for what, c in checks)
    return "<h2>What holds</h2>" + _table("Claims and verdicts", ("of", "claim", "verdict", "because"), rows)


def _bytes_by_place(table: Residuals) -> dict[str, dict[str, int]]:
    sizes: dict[str, dict[str, int]] = {}
    for row in (row for row in table if row.state in PLACES):
        sizes.setdefault(", ".join(row.names) or "(untagged)", dict.fromkeys(PLACES, 0))[row.state] += row.bytes
    return sizes


def _places(table: Residuals) -> str:
    sizes = _bytes_by_place(table)
    rows = [(name, *map(readable, of.values())) for name, of in sizes.items()]
    total = lambda sizes: [readable(sum(of[state] for of in sizes.values())) for state in PLACES]
    rows.append(("all", *total(sizes)))
    if table.mesh:
        axes = ", ".join(f"{axis} {size}" for axis, size in table.mesh)
        rows.append((f"on each of {table.devices} devices ({axes})", *total(_bytes_by_place(table.per_device))))
    return "<h2>What is where</h2>" + _table("Bytes by place", ("residual", *PLACES.values()), rows, (1, 2, 3))


def _copies(profile: Profile) -> str:
    """Draw two layers in the middle, of the microbatch in the middle if there are several; list the totals of all."""
    fastest, slowest = profile.spread_ms
    summary = (
        f"{profile.step_ms} ms per step ({fastest} to {slowest}); kernels ran for {profile.compute_ms} ms, collectives "
        f"among them for {profile.collective_ms} ms; no kernel ran beside {profile.exposed_ms} ms of the copies"
    )
    microbatches = list(profile.exposed_by_microbatch)
    microbatch = microbatches[len(microbatches) // 2] if microbatches else None
    moves = [m for m in profile.moves if m.microbatch == microbatch and m.layer is not None]
    layers = sorted({m.layer for m in moves if m.layer is not None})
    middle = layers[max(0, len(layers) // 2 - 1) :][:2]
    what = f"layers {', '.join(map(str, middle))}" + ("" if microbatch is None else f" of microbatch {microbatch}")
    timeline = _timeline(what, [m for m in moves if m.layer in middle], profile) if middle else ""
    columns = ("residual", "way", "copies", "bytes", "ms", "exposed ms", "streams")
    rows = [(*t[:3], readable(t.bytes), f"{t.ms:.2f}", f"{t.exposed_ms:.2f}", t.stream_numbers) for t in profile.totals]
    totals = _table("Copies by residual", columns, rows, (2, 3, 4, 5))
    return f"<h2>Copies</h2><p>{_text(summary)}</p>{timeline}{totals}"


def _timeline(what: str, moves: Sequence[Move], profile: Profile) -> str:
    """Draw a row per residual and way, marked where no kernel ran, above the kernels of the same time."""
    shapes: list[str] = []
    y, shown = 30.0, []
    for direction, way in WAYS.items():
        if lane := [m for m in moves if m.direction == direction]:
            shapes += _lane(y, way, lane, profile.kernels)
            shown += [(m.residual, m.layer, way, m.at_ms, m.ms, m.exposed_ms) for m in lane]
            y += ROW * (len({m.residual for m in lane}) + 2) + 14
    keys = {OFFLOADED: "copy, and its layer", "exposed": "exposed: no kernel ran", SAVED: "kernels"}
    head = ("residual", "layer", "way", "began at ms", "ms", "exposed ms")
    picture = _svg(f"Copies and kernels of {what}", y, keys, shapes)
    return picture + _table(f"Copies of {what}", head, shown, (1, 3, 4, 5))


def _lane(y: float, way: str, moves: Sequence[Move], kernels: Sequence[Span]) -> Iterator[str]:
    rows = list(dict.fromkeys(m.residual for m in moves))
    begin, end = min(m.at_ms for m in moves), max(m.at_ms + m.ms for m in moves)
    x = lambda ms: LEFT + (ms - begin) * (RIGHT - LEFT) / max(end - begin, 1e-6)
    bar = lambda span, y, height, *what: _bar(x(span[0]), y, x(span[1]) - x(span[0]), height, *what)
    for number, name in enumerate([*rows, "kernels"]):
        yield _words(LEFT - 10, y + ROW * number + 14, f"{way}: {name or '(not attributed)'}"[-36:], "end")
    for m in moves:
        top, span, copy = y + ROW * rows.index(m.residual), (m.at_ms, m.at_ms + m.ms), f"{m.residual}, layer {m.layer}"
        title = f"{copy}: {m.ms} ms, {m.gb_per_s} GB/s, {m.exposed_ms} ms exposed"
        yield bar(span, top, 18, "exposed", f"{copy}: no kernel")
        yield bar(span, top, 14, OFFLOADED, title)
        yield from (bar(beside, top, 18, OFFLOADED, title) for beside in _within(kernels, *span))
        if x(span[1]) - x(span[0]) > 10 + 8 * len(str(m.layer)):
            yield _words((x(span[0]) + x(span[1])) / 2, top + 13, str(m.layer), "middle")
    yield from (bar(span, y + ROW * len(rows), 18, SAVED, "kernels") for span in _within(kernels, begin, end))
    below = y + ROW * (len(rows) + 1) + 10
    yield _words(LEFT, below, f"{begin:.1f} ms")
    yield _words(RIGHT, below, f"{end:.1f} ms", "end")


def _within(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    return [(max(a, begin), min(b, end)) for a, b in spans if a < end and b > begin]


def _svg(label: str, height: float, keys: Mapping[str, str], shapes: Iterable[str]) -> str:
    """Write a picture with a line above that says what each colour means; `label` says the picture in words."""
    legend, x = [], LEFT
    for kind, meaning in keys.items():
        legend += [_bar(x, 6, 12, 12, kind, meaning), _words(x + 18, 16, meaning)]
        x += 50 + 8 * len(meaning)
    drawn = f"<title>{_text(label)}</title>{''.join([*legend, *shapes])}"
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{_text(label)}">{drawn}</svg>'


def _bar(x: float, y: float, width: float, height: float, kind: str, title: str) -> str:
    at = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 1):.2f}" height="{height}"'
    return f'<rect {at} class="{kind}"><title>{_text(title)}</title></rect>'


def _words(x: float, y: float, text: str, anchor: str = "start") -> str:
    """`y` is the baseline; `anchor`: "start", "middle" or "end"."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text)}</text>'
