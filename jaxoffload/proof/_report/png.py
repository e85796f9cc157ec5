"""The page's pictures as PNG, for READMEs, drawn by matplotlib."""

import io
from typing import Any

from .._residuals.table import Residuals
from .pictures import COLORS, WIDTH, Picture, bytes_by_place, draw_memory, draw_places, draw_timeline, memory, timeline
from .profile import Profile

_LINES = {"with": (COLORS["offloaded"], "-"), "without": (COLORS["saved"], "--")}
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def pictures(table: Residuals | None = None, profile: Profile | None = None) -> dict[str, bytes]:
    """Draw a table and a profile as PNGs.

    Args:
      table: what `residuals` returned.
      profile: what `profile` or `read_profile` returned.

    Returns:
      PNGs by file name, of what there is to show: "what.png", the bytes of each residual by place; "memory.png", the
      device over a step, of a table whose layers offload; "timeline.png", the copies and kernels of two layers.

    Raises:
      ImportError: matplotlib cannot be imported.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload import residuals
      >>> from jaxoffload.proof import pictures
      >>> list(pictures(residuals(lambda w: jnp.sum(jnp.sin(w)), jnp.ones(4))))
      ['what.png']
    """
    drawn = {}
    if table is not None and (sizes := bytes_by_place(table)):
        drawn["what.png"] = draw_places(sizes)
    if table is not None and (found := memory(table)):
        drawn["memory.png"] = draw_memory(found)
    if profile is not None and (layers := timeline(profile)):
        drawn["timeline.png"] = draw_timeline(layers)
    return {name: _png(picture) for name, picture in drawn.items()}


def _figure(picture: Picture) -> Any:
    from matplotlib.figure import Figure  # not pyplot, which looks for a display
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(WIDTH / 100, picture.height / 100), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(picture.height, 0))
    axes.axis("off")
    for bar in picture.bars:
        axes.add_patch(Rectangle(bar[:2], bar.width, bar.height, color=COLORS[bar.kind], linewidth=0))
    for line in picture.lines:
        color, style = _LINES[line.kind]
        axes.plot(*zip(*line.points, strict=True), style, color=color, linewidth=2.5)
    for words in picture.words:
        axes.text(words.x, words.y, words.text, ha=_ANCHORS[words.anchor], va="baseline", fontsize=9)
    return figure


def _png(picture: Picture) -> bytes:
    png = io.BytesIO()
    _figure(picture).savefig(png, dpi=120)
    return png.getvalue()
