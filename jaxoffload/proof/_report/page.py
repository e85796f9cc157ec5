"""page(): what is where, what holds and how the copies went, as one HTML page without scripts or network."""

import html
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from ..._text import readable
from .._check import FAILS, HOLDS, Check
from .._plan.result import Plan
from .._residuals.table import Residuals
from . import pictures
from .pictures import COLORS, PLACES, WAYS, WIDTH, Picture
from .profile import Profile, stream_numbers

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
.exposed { fill: var(--exposed); } .line { fill: none; stroke-width: 2.5; }
.with { stroke: var(--offloaded); } .without { stroke: var(--saved); stroke-dasharray: 6 4; }
.holds { color: var(--good); font-weight: 600; } .fails { color: var(--bad); font-weight: 600; }
"""


def page(
    title: str,
    about: Mapping[str, str],
    table: Residuals | None = None,
    checks: Sequence[tuple[str, Check]] = (),
    profile: Profile | None = None,
    plan: Plan | None = None,
) -> str:
    """Return one self-contained HTML page, with a table beside each picture and the same data as JSON.

    Args:
      title: its heading.
      about: facts to begin with, as `about()` returns them.
      table: what `residuals` returned.
      checks: pairs of what was verified, such as "loss", and a `Check`.
      profile: what `profile` or `read_profile` returned.
      plan: what `plan` returned.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload import residuals
      >>> from jaxoffload.proof import about, page
      >>> text = page("a loss", about(), residuals(lambda w: jnp.sum(jnp.sin(w)), jnp.ones(4)))
      >>> "What is where" in text
      True
    """
    parts = [_facts(about)]
    if checks:
        parts.append(_verdicts(checks))
    if table is not None:
        parts += [_places(table), _memory(table)]
    if profile is not None:
        parts.append(_timeline(profile))
    if plan is not None:
        parts.append(_planned(plan))
    data = {"about": dict(about), "checks": [[what, vars(check)] for what, check in checks]}
    data |= {"residuals": json.loads(table.to_json())} if table is not None else {}
    data |= {"profile": json.loads(profile.to_json())} if profile is not None else {}
    data |= {"plan": json.loads(plan.to_json())} if plan is not None else {}
    embedded = json.dumps(data).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_LIGHT}{_STYLE}</style></head>'
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


def _svg(picture: Picture) -> str:
    shapes = [
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height}" class="{kind}">'
        f"<title>{_text(title)}</title></rect>"
        for x, y, width, height, kind, title in picture.bars
    ]
    for line in picture.lines:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in line.points)
        shapes.append(f'<polyline class="line {line.kind}" points="{points}"/>')
    for x, y, words, anchor in picture.words:
        shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(words)}</text>')
    label, size = _text(picture.label), f'viewBox="0 0 {WIDTH} {picture.height:g}"'
    return f'<svg {size} role="img" aria-label="{label}"><title>{label}</title>{"".join(shapes)}</svg>'


def _facts(about: Mapping[str, str]) -> str:
    return _table("Where and with what", ("", ""), about.items())


def _verdicts(checks: Sequence[tuple[str, Check]]) -> str:
    classes = {HOLDS: "holds", FAILS: "fails"}
    rows = ((what, c.claim, (c.verdict, classes.get(c.verdict, "")), c.detail) for what, c in checks)
    return "<h2>What holds</h2>" + _table("Claims and verdicts", ("of", "claim", "verdict", "because"), rows)


def _places(table: Residuals) -> str:
    sizes = pictures.bytes_by_place(table)
    rows = [(name, *map(readable, of.values())) for name, of in sizes.items()]
    total = lambda sizes: [readable(sum(of[state] for of in sizes.values())) for state in PLACES]
    rows.append(("all", *total(sizes)))
    if table.mesh:
        axes = ", ".join(f"{axis} {size}" for axis, size in table.mesh)
        each = pictures.bytes_by_place(table.per_device)
        rows.append((f"on each of {table.devices} devices ({axes})", *total(each)))
    return (
        "<h2>What is where</h2>"
        + _svg(pictures.draw_places(sizes))
        + _table("Bytes by place", ("residual", *PLACES.values()), rows, (1, 2, 3))
    )


def _memory(table: Residuals) -> str:
    if (memory := pictures.memory(table)) is None:
        return ""
    return (
        "<h2>Memory over the step</h2><p>Tagged residuals on the device, as the table predicts them: solid with "
        "offload, dashed without.</p>"
        + _svg(pictures.draw_memory(memory))
        + _table("At most", ("", "bytes"), memory.most.items(), (1,))
    )


def _timeline(profile: Profile) -> str:
    """Draw two layers in the middle, to the host and back; and the totals of all copies."""
    fastest, slowest = profile.spread_ms
    summary = (
        f"{profile.step_ms} ms per step ({fastest} to {slowest}); kernels ran for {profile.compute_ms} ms, collectives "
        f"among them for {profile.collective_ms} ms; no kernel ran beside {profile.exposed_ms} ms of the copies"
    )
    parts = [f"<h2>Copies</h2><p>{_text(summary)}</p>"]
    if timeline := pictures.timeline(profile):
        shown = [
            (m.residual, m.layer, WAYS[m.direction], m.at_ms, m.ms, m.exposed_ms)
            for lane in timeline.lanes
            for m, _ in lane.copies
        ]
        head = ("residual", "layer", "way", "began at ms", "ms", "exposed ms")
        parts += [
            _svg(pictures.draw_timeline(timeline)),
            _table(f"Copies of {timeline.what}", head, shown, (1, 3, 4, 5)),
        ]
    columns = ("residual", "way", "copies", "bytes", "ms", "exposed ms", "streams")
    rows = [
        (*t[:3], readable(t.bytes), f"{t.ms:.2f}", f"{t.exposed_ms:.2f}", stream_numbers(t.streams))
        for t in profile.totals
    ]
    return "".join(parts) + _table("Copies by residual", columns, rows, (2, 3, 4, 5))


def _planned(plan: Plan) -> str:
    """Return the plan, its policy for a config, and the choices between which a budget decides."""
    memory = [(name, readable(size)) for name, size in plan.parts.items()]
    what = lambda policy: "the plan" if policy == plan.policy else plan.differs(policy)
    rows = [(readable(p.bytes), f"{p.ms:.1f}", what(p.policy)) for p in plan.curve]
    head = ("bytes per device", "ms per step", "what it does that the plan does not")
    return (
        f"<h2>Plan</h2><p>{_text(plan.summary)}</p>"
        + _svg(pictures.draw_curve(plan))
        + _table("Memory", ("", "bytes"), memory, (1,))
        + f"<pre>{_text(plan.to_yaml())}</pre><p>{_text(f'Limit: {plan.limits}')}</p>"
        + "".join(f"<p>{_text(f'Untagged: {line}')}</p>" for line in plan.untagged)
        + _table("Choices that no other one beats", head, rows, (0, 1))
    )
