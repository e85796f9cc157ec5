"""The page's pictures as PNG, for READMEs. matplotlib draws them, which nothing else here needs."""

import io
from typing import Any

from ..._residuals import OFFLOADED, SAVED, Residuals
from ..._text import readable
from .pictures import COLORS, PLACES, TURNS, WAYS, Lane, Memory, Timeline, memory, places, timeline
from .profile import Profile

_NARROW = 0.045  # of a lane's time: the number of a copy's layer does not fit into less


def pictures(table: Residuals | None = None, profile: Profile | None = None) -> dict[str, bytes]:
    """PNGs of what there is to show, by the names of their files: "what.png", the bytes of each residual by place, and
    "memory.png", the device over a step, of a table whose layers offload; "timeline.png", two layers' copies and
    kernels, of a profile.

    Raises:
      ImportError: there is no matplotlib.
    """
    figures = {}
    if table is not None and (sizes := places(table)):
        figures["what.png"] = _places(sizes)
    if table is not None and (found := memory(table)):
        figures["memory.png"] = _memory(found)
    if profile is not None and (lanes := timeline(profile)):
        figures["timeline.png"] = _timeline(lanes)
    return {name: _png(figure) for name, figure in figures.items()}


def _figure(height: float) -> Any:
    """So many inches high."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    return Figure(figsize=(10, height), layout="constrained", facecolor="white")


def _png(figure: Any) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, dpi=120)
    return png.getvalue()


def _places(sizes: dict[str, dict[str, int]]) -> Any:
    figure = _figure(0.6 + 0.3 * len(sizes))
    axes = figure.add_subplot()
    for row, of in enumerate(sizes.values()):
        begin = 0
        for state, size in of.items():
            if size:  # with an edge, which shows however short the bar is
                axes.barh(row, size, 0.7, begin, color=COLORS[state], edgecolor=COLORS[state], linewidth=2)
            begin += size
        axes.annotate(readable(begin), (begin, row), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(sizes)), list(sizes))
    axes.margins(x=0.1, y=0.01)
    axes.invert_yaxis()
    _bare(axes)
    _key(figure, {place: COLORS[state] for state, place in PLACES.items()})
    return figure


def _memory(found: Memory) -> Any:
    figure = _figure(3.2)
    axes = figure.add_subplot()
    lines = {"with offload": (found.held, COLORS[OFFLOADED], "-"), "without": (found.without, COLORS[SAVED], "--")}
    for how, (size, color, style) in lines.items():
        axes.plot(size, style, color=color, linewidth=2.5, label=f"{how}: at most {found.most[how]}")
    last = len(found.held) - 1
    axes.set_xticks([0, last / 2, last], TURNS)
    for tick, side in zip(axes.get_xticklabels(), ("left", "center", "right"), strict=True):
        tick.set_horizontalalignment(side)
    axes.set(ylim=(0, None), xlim=(0, last), ylabel="residuals on the device", yticks=[])
    _bare(axes, "left", "bottom")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def _timeline(found: Timeline) -> Any:
    """Axes for each lane, with a row for each residual, and one for the kernels."""
    rows = [len(lane.residuals) + 1 for lane in found.lanes]
    figure = _figure(0.5 + sum(0.7 + 0.4 * count for count in rows))
    each = figure.subplots(len(rows), squeeze=False, height_ratios=rows).flat
    for axes, lane in zip(each, found.lanes, strict=True):
        _lane(axes, lane)
    shown = {"copy, and its layer": OFFLOADED, "exposed: no kernel ran": "exposed", "kernels": SAVED}
    _key(figure, {what: COLORS[kind] for what, kind in shown.items()})
    return figure


def _lane(axes: Any, lane: Lane) -> None:
    names = lane.residuals
    for m, exposed in lane.copies:
        row = names.index(m.residual)
        axes.broken_barh([(m.at_ms, m.ms)], (row - 0.35, 0.7), color=COLORS[OFFLOADED])
        axes.broken_barh([(a, b - a) for a, b in exposed], (row + 0.15, 0.2), color=COLORS["exposed"], lw=0.5)
        if m.ms > _NARROW * (lane.end - lane.begin):
            axes.text(m.at_ms + m.ms / 2, row - 0.1, m.layer, ha="center", va="center")
    axes.broken_barh([(a, b - a) for a, b in lane.kernels], (len(names) - 0.35, 0.7), color=COLORS[SAVED])
    axes.set_yticks(range(len(names) + 1), [*(name or "(not attributed)" for name in names), "kernels"])
    axes.set(title=WAYS[lane.direction], xlim=(lane.begin, lane.end), xlabel="ms since the step began")
    axes.invert_yaxis()
    _bare(axes, "bottom")


def _key(figure: Any, colors: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    keys = [Patch(color=color, label=what) for what, color in colors.items()]
    figure.legend(handles=keys, loc="outside upper center", ncols=len(keys), frameon=False)


def _bare(axes: Any, *sides: str) -> None:
    """No frame but at these sides."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in sides)
    axes.tick_params(left=False, bottom="bottom" in sides, labelbottom="bottom" in sides)
