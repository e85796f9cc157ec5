"""Draw the pictures of the pages from result files: python docs/figures.py"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
OURS, OTHERS = "#1a5fd0", "#6b7280"
WIDTH, HEIGHT, LEFT, TOP = 300, 260, 56, 44  # of a panel, and its margins
GAP = 450  # from one panel to the next
GIB, MS = (0, 100), (680, 1100)


class Point(NamedTuple):
    """A mode of a result file, its label, and by how many pixels the label is moved down."""

    mode: str
    label: str
    down: int = 0


PANELS = {
    "One batch": (
        Point("jax_offload", "JAX's offload, XLA's defaults"),
        Point("remat", "JAX, everything recomputed", -3),
        Point("jax_offload_tuned", "JAX's offload, the best options found", -3),
        Point("ours", "jaxoffload, two residuals offloaded", 2),
        Point("ours_best", "jaxoffload, what fits", -3),
        Point("saved_all", "JAX, saved, attention again", -2),
        Point("ours_saved_all", "jaxoffload, saved", 4),
    ),
    "Each of 8 microbatches": (
        Point("remat", "JAX, everything recomputed"),
        Point("saved_all", "JAX, saved, attention again"),
        Point("ours_saved_all", "jaxoffload, saved", 14),
        Point("interleaved", "jaxoffload, interleaved"),
    ),
}


TIMELINES = {"jax_offload": "JAX's offload, XLA's defaults", "ours": "jaxoffload"}
LANES = {"compute": OTHERS, "to the host": "#d97706", "back": "#059669"}
LANE, PX = 22, 2  # of a lane, its height; of a millisecond, its width


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def modes(panel: str) -> dict[str, Any]:
    return read("dense")["modes"] if panel == "One batch" else read("accumulate")["microbatches"]["8"]["modes"]


def frontier() -> str:
    """Return the step time against the device memory of what was measured on an H200, as SVG."""
    x = lambda gib: round(WIDTH * (gib - GIB[0]) / (GIB[1] - GIB[0]), 1)
    y = lambda ms: round(HEIGHT * (MS[1] - ms) / (MS[1] - MS[0]), 1)

    def drawn(panel: str) -> Iterator[str]:
        yield f'<text x="-40" y="-22"><tspan font-weight="bold">{panel}</tspan>, ms per step</text>'
        yield f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="#9ca3af"/>'
        for ms in range(700, MS[1] + 1, 100):
            yield f'<text x="-8" y="{y(ms) + 4}" text-anchor="end" fill="{OTHERS}">{ms}</text>'
        for gib in range(0, GIB[1] + 1, 25):
            yield f'<text x="{x(gib)}" y="{HEIGHT + 17}" text-anchor="middle" fill="{OTHERS}">{gib}</text>'
        yield f'<text x="{WIDTH // 2}" y="{HEIGHT + 34}" text-anchor="middle">temporary device memory, GiB</text>'
        for point in PANELS[panel]:
            of = modes(panel)[point.mode]
            at, ms = x(of["temp_gib"]), of["ms"] if "ms" in of else of["step_ms"]
            colour = OURS if point.label.startswith("jaxoffload") else OTHERS
            yield f'<circle cx="{at}" cy="{y(ms)}" r="4" fill="{colour}"/>'
            yield f'<text x="{at + 8}" y="{y(ms) + 4 + point.down}" fill="{colour}">{point.label}</text>'

    def panels() -> Iterator[str]:
        for number, panel in enumerate(PANELS):
            yield f'<g transform="translate({LEFT + GAP * number} {TOP})">'
            yield from drawn(panel)
            yield "</g>"

    return svg(GAP * len(PANELS) + LEFT - 20, HEIGHT + TOP + 44, panels())


def timeline() -> str:
    """Return when the GPU computes and when it copies, in a step by JAX and by ours, as SVG."""
    found = read("timeline")["modes"]
    longest = max(of["step_ms"] for of in found.values())
    block = LANE * (len(LANES) + 2)

    def drawn() -> Iterator[str]:
        for number, (mode, label) in enumerate(TIMELINES.items()):
            top, of = 24 + block * number, found[mode]
            yield f'<text x="10" y="{top}"><tspan font-weight="bold">{label}</tspan>: {of["step_ms"]:.0f} ms</text>'
            for row, (lane, colour) in enumerate(LANES.items()):
                y = top + 12 + LANE * row
                yield f'<text x="{LEFT + 32}" y="{y + 12}" text-anchor="end" fill="{colour}">{lane}</text>'
                for start, end in of["lanes"][lane]:
                    x, width = LEFT + 40 + PX * start, max(1, PX * (end - start))
                    yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 6}" fill="{colour}"/>'

    return svg(LEFT + 60 + PX * longest, block * len(TIMELINES) + 16, drawn())


def svg(width: float, height: float, lines: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif"'
    head += ' font-size="12"><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, *lines, "</svg>"]) + "\n"


PICTURES = {"frontier": frontier, "timeline": timeline}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / f"docs/images/{name}.svg").write_text(draw())
