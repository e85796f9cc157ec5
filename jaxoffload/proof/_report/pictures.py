"""The three pictures as bars, lines and words on a canvas 1000 wide, which the page and `pictures` draw."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..._text import readable
from .._plan.result import Plan
from .._program.trace import Span
from .._residuals.table import OFFLOADED, RECOMPUTED, SAVED, Residuals
from .profile import Move, Profile

WIDTH, LEFT, RIGHT, ROW = 1000, 310, 890, 24
PLACES = {SAVED: "on the device", OFFLOADED: "on the host", RECOMPUTED: "recomputed"}
WAYS = {"d2h": "to the host", "h2d": "back"}
# Kernels have the colour of what is on the device, copies that of what is on the host. On light paper.
COLORS = {SAVED: "#0b6bcb", OFFLOADED: "#d9822b", RECOMPUTED: "#8a94a0", "exposed": "#c0262d"}


class Bar(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    kind: str  # a key of COLORS
    title: str = ""


class Words(NamedTuple):
    """`y` is the baseline; `anchor`: "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    anchor: str = "start"


class Line(NamedTuple):
    kind: str  # "with" or "without" offload
    points: list[tuple[float, float]]


class Picture(NamedTuple):
    """`label` says it in words. `y` grows downwards."""

    label: str
    height: float
    bars: list[Bar]
    words: list[Words]
    lines: list[Line]


def _picture(label: str, height: float, shapes: Sequence[Bar | Words | Line], keys: dict[str, str]) -> Picture:
    """Return a picture with a line above that says what each kind of bar, and its colour, means."""
    shapes, x = [*shapes], float(LEFT)
    for kind, meaning in keys.items():
        shapes += [Bar(x, 6, 12, 12, kind, meaning), Words(x + 18, 16, meaning)]
        x += 50 + 8 * len(meaning)
    of = lambda kind: [shape for shape in shapes if isinstance(shape, kind)]
    return Picture(label, height, of(Bar), of(Words), of(Line))


def _name(y: float, name: str) -> Words:
    """Return the label of a row."""
    return Words(LEFT - 10, y + 14, name if len(name) < 36 else f"{name[:34]}...", "end")


def bytes_by_place(table: Residuals) -> dict[str, dict[str, int]]:
    """Return the bytes of each residual in each place."""
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(PLACES, 0))
    for row in table:
        if row.state in PLACES:
            sizes[", ".join(row.names) or "(untagged)"][row.state] += row.bytes
    return dict(sizes)


def draw_places(sizes: dict[str, dict[str, int]]) -> Picture:
    """Draw a bar per residual, as long as its bytes in each place."""
    shapes: list[Bar | Words | Line] = []
    scale = (RIGHT - LEFT) / (max((sum(of.values()) for of in sizes.values()), default=0) or 1)
    for number, (name, of) in enumerate(sizes.items()):
        x, y = float(LEFT), 26.0 + ROW * number
        for state, size in of.items():
            if size:
                bar = Bar(x, y, max(scale * size, 1), 18, state, f"{name}: {readable(size)} {PLACES[state]}")
                shapes, x = [*shapes, bar], x + scale * size
        shapes += [_name(y, name), Words(x + 6, y + 14, readable(sum(of.values())))]
    return _picture("Bytes of each residual by place", 34 + ROW * len(sizes), shapes, PLACES)


class TaggedBytes(NamedTuple):
    """Bytes of tagged residuals on the device, as the table predicts them: before the first layer, after each layer
    forward, and after each layer backward."""

    held: list[float]
    without: list[float]

    @property
    def most(self) -> dict[str, str]:
        return {"with offload": readable(int(max(self.held))), "without": readable(int(max(self.without)))}


def memory(table: Residuals) -> TaggedBytes | None:
    """Predict the device over a step; None where no layers offload."""
    layers_of: Counter[tuple[str, ...]] = Counter()
    for row in table:  # some layers of one residual may move, and others stay
        layers_of[row.names] += row.layers if row.decision is not None else 0
    layers = max(layers_of.values(), default=0)
    if layers < 2 or not table.host_bytes:
        return None
    moving = [row for row in table if row.state == OFFLOADED and row.kind != "padding"]
    moved, offloaded = sum(row.bytes_per_layer for row in moving), max((row.layers for row in moving), default=0)
    per_layer = (table.device_bytes - table.untagged_bytes + sum(row.bytes for row in moving)) / layers
    up = list(range(layers + 1))
    counts = up + up[::-1]
    # On the device is what the current layer keeps, and the one that is on its way.
    held = [layer * per_layer - max(0, min(layer - 2, offloaded)) * moved for layer in counts]
    return TaggedBytes(held, [layer * per_layer for layer in counts])


def draw_memory(found: TaggedBytes) -> Picture:
    """Draw two lines, with offload and without, from the first layer forward to the first layer backward."""
    top, step = max(found.without) or 1, 900 / (len(found.without) - 1)
    path = lambda sizes: [(60 + i * step, 220 - 190 * size / top) for i, size in enumerate(sizes)]
    ends = ("first layer, forward", "last layer", "first layer, backward")
    words = map(Words, (60, 510, 960), (240,) * 3, ends, ("start", "middle", "end"))
    most = [f"{how}: at most {size}" for how, size in found.most.items()]
    lines = Line("without", path(found.without)), Line("with", path(found.held))
    label = f"Device memory of residuals over a step, {', '.join(most)}"
    return _picture(label, 250, [*lines, *words], dict(zip((OFFLOADED, SAVED), most, strict=True)))


class Lane(NamedTuple):
    """Copies one way and the kernels of that time, in ms since the step began."""

    direction: str
    begin: float
    end: float
    copies: list[tuple[Move, list[Span]]]  # each with the times when no kernel ran beside it
    kernels: list[Span]


class Timeline(NamedTuple):
    """Two layers in the middle, to the host and back; of several microbatches, of the one in the middle."""

    layers: list[int]
    microbatch: int | None
    lanes: list[Lane]

    @property
    def what(self) -> str:
        of = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        return f"layers {', '.join(map(str, self.layers))}{of}"


def timeline(profile: Profile) -> Timeline | None:
    """Choose what to show of a profile; None where no copy has a layer."""
    microbatches = list(profile.exposed_by_microbatch)
    microbatch = microbatches[len(microbatches) // 2] if microbatches else None
    moves = [m for m in profile.moves if m.microbatch == microbatch]
    layers = sorted({m.layer for m in moves if m.layer is not None})
    middle = layers[len(layers) // 2 - 1 :][:2] if len(layers) > 1 else layers
    shown = {way: [m for m in moves if m.direction == way and m.layer in middle] for way in WAYS}
    lanes = [_lane(direction, those, profile.kernels) for direction, those in shown.items() if those]
    return Timeline(middle, microbatch, lanes) if lanes else None


def _lane(direction: str, moves: Sequence[Move], kernels: Sequence[Span]) -> Lane:
    begin, end = min(m.at_ms for m in moves), max(m.at_ms + m.ms for m in moves)
    near = [(max(a, begin), min(b, end)) for a, b in kernels if a < end and b > begin]
    return Lane(direction, begin, end, [(m, list(_without(near, m))) for m in moves], near)


def _without(kernels: Sequence[Span], move: Move) -> Iterator[Span]:
    """Yield when no kernel ran beside a copy."""
    free, end = move.at_ms, move.at_ms + move.ms
    for a, b in [*kernels, (end, end)]:
        if (until := min(a, end)) > free:
            yield free, until
        free = max(free, b)


def draw_timeline(found: Timeline) -> Picture:
    """Draw a row per residual and way, marked where no kernel ran, above the kernels of the same time."""
    shapes: list[Bar | Words | Line] = []
    y = 30.0
    for lane in found.lanes:
        rows = list(dict.fromkeys(m.residual for m, _ in lane.copies))
        shapes += _draw_lane(y, lane, rows)
        y += ROW * (len(rows) + 2) + 14
    label = f"Copies and kernels of {found.what}"
    keys = {OFFLOADED: "copy, and its layer", "exposed": "exposed: no kernel ran", SAVED: "kernels"}
    return _picture(label, y, shapes, keys)


def _draw_lane(y: float, lane: Lane, rows: list[str]) -> Iterator[Bar | Words]:
    scale = (RIGHT - LEFT) / max(lane.end - lane.begin, 1e-6)

    def bar(span: Span, y: float, height: float, kind: str, title: str) -> Bar:
        start, end = span
        return Bar(LEFT + (start - lane.begin) * scale, y, max((end - start) * scale, 1), height, kind, title)

    for number, name in enumerate([*rows, "kernels"]):
        yield _name(y + ROW * number, f"{WAYS[lane.direction]}: {name or '(not attributed)'}")
    for move, exposed in lane.copies:
        top, what = y + ROW * rows.index(move.residual), f"{move.residual}, layer {move.layer}"
        title = f"{what}: {move.ms} ms, {move.gb_per_s} GB/s, {move.exposed_ms} ms exposed"
        copy = bar((move.at_ms, move.at_ms + move.ms), top, 18, OFFLOADED, title)
        yield copy
        yield from (bar(span, top + 14, 4, "exposed", f"{what}: no kernel") for span in exposed)
        if copy.width > 10 + 8 * len(str(move.layer)):
            yield Words(copy.x + copy.width / 2, top + 13, str(move.layer), "middle")
    yield from (bar(span, y + ROW * len(rows), 18, SAVED, "kernels") for span in lane.kernels)
    below = y + ROW * (len(rows) + 1) + 10
    yield Words(LEFT, below, f"{lane.begin:.1f} ms")
    yield Words(RIGHT, below, f"{lane.end:.1f} ms", "end")


def draw_curve(plan: Plan) -> Picture:
    """Draw the predicted step over the bytes per device: a line down from choice to choice, the plan, the budget."""
    sizes, times = [p.bytes for p in plan.curve], [p.ms for p in plan.curve]
    left, right = min(sizes), max(*sizes, min(plan.budget, 2 * max(sizes)))
    low, high = min(times), max(times)
    x = lambda size: 110 + 780 * (size - left) / max(1, right - left)
    y = lambda ms: 40 + 180 * (high - ms) / max(1e-9, high - low)
    ends = [*zip(sizes[1:], times, strict=False), (right, times[-1])]  # a choice is the fastest until the next one fits
    steps = [(x(size), y(ms)) for p, end in zip(plan.curve, ends, strict=True) for size, ms in ((p.bytes, p.ms), end)]
    at_budget = min(x(plan.budget), 890.0)
    chosen = Bar(x(plan.memory.total) - 5, y(plan.step_ms) - 5, 10, 10, "exposed", "the plan")
    words = [Words(100, y(ms) + 5, f"{ms:.1f} ms", "end") for ms in dict.fromkeys((high, low))]
    words += [Words(x(size), 250, readable(size), "middle") for size in dict.fromkeys((left, right))]
    lines = [Line("with", steps), Line("without", [(at_budget, 30), (at_budget, 230)])]
    keys = {OFFLOADED: "fastest that fits", SAVED: f"budget, {readable(plan.budget)}", "exposed": "the plan"}
    return _picture("Predicted step over bytes per device", 260, [*lines, chosen, *words], keys)
