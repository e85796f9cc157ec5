"""What the three pictures show, whoever draws them: the page as SVG, `pictures` as PNG."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ..._residuals import EMPTY, OFFLOADED, RECOMPUTED, SAVED, Residuals
from ..._text import readable
from .._program.trace import Span
from .profile import Move, Profile

PLACES = {SAVED: "on the device", OFFLOADED: "on the host", RECOMPUTED: "computed again"}
WAYS = {"d2h": "to the host", "h2d": "back"}
# Kernels have the colour of what is on the device, copies that of what is on the host. On light paper.
COLORS = {SAVED: "#0b6bcb", OFFLOADED: "#d9822b", RECOMPUTED: "#8a94a0", "exposed": "#c0262d"}


def places(table: Residuals) -> dict[str, dict[str, int]]:
    """Residual -> its bytes in each place."""
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(PLACES, 0))
    for row in table:
        if row.state in PLACES:
            sizes[", ".join(row.names) or "(untagged)"][row.state] += row.bytes
    return dict(sizes)


class Memory(NamedTuple):
    """Bytes of tagged residuals on the device, as the table predicts them: before the first layer, after each layer
    forward, and after each layer backward."""

    held: list[float]
    without: list[float]

    @property
    def most(self) -> dict[str, str]:
        return {"with offload": readable(int(max(self.held))), "without": readable(int(max(self.without)))}


TURNS = ("first layer, forward", "last layer", "first layer, backward")  # where a memory's lists begin, turn and end


def memory(table: Residuals) -> Memory | None:
    """None where no layers offload."""
    layers_of: Counter[tuple[str, ...]] = Counter()
    for row in table:  # of one residual some layers may move, and others stay
        layers_of[row.names] += row.layers if row.decision is not None else 0
    layers = max(layers_of.values(), default=0)
    if layers < 2 or not table.host_bytes:
        return None
    moving = [row for row in table if row.state == OFFLOADED and row.reason != EMPTY]
    moved, offloaded = sum(row.bytes_per_layer for row in moving), max((row.layers for row in moving), default=0)
    a_layer = (table.device_bytes - table.untagged_bytes + sum(row.bytes for row in moving)) / layers
    up = list(range(layers + 1))
    counts = up + up[::-1]
    # On the device is what the current layer keeps, and the one that is on its way.
    held = [layer * a_layer - max(0, min(layer - 2, offloaded)) * moved for layer in counts]
    return Memory(held, [layer * a_layer for layer in counts])


class Lane(NamedTuple):
    """Copies one way and the kernels of that time, in ms since the step began."""

    direction: str
    begin: float
    end: float
    copies: list[tuple[Move, list[Span]]]  # each with when no kernel ran beside it
    kernels: list[Span]

    @property
    def residuals(self) -> list[str]:
        return list(dict.fromkeys(m.residual for m, _ in self.copies))


class Timeline(NamedTuple):
    """Two layers in the middle, there and back."""

    layers: list[int]
    lanes: list[Lane]


def timeline(profile: Profile) -> Timeline | None:
    """None where no copy has a layer."""
    layers = sorted({m.layer for m in profile.moves if m.layer is not None})
    middle = layers[len(layers) // 2 - 1 :][:2] if len(layers) > 1 else layers
    shown = {way: [m for m in profile.moves if m.direction == way and m.layer in middle] for way in WAYS}
    lanes = [_lane(direction, moves, profile.kernels) for direction, moves in shown.items() if moves]
    return Timeline(middle, lanes) if lanes else None


def _lane(direction: str, moves: Sequence[Move], kernels: Sequence[Span]) -> Lane:
    begin, end = min(m.at_ms for m in moves), max(m.at_ms + m.ms for m in moves)
    near = [(max(a, begin), min(b, end)) for a, b in kernels if a < end and b > begin]
    return Lane(direction, begin, end, [(m, _without(near, m)) for m in moves], near)


def _without(kernels: Sequence[Span], move: Move) -> list[Span]:
    """The parts of a copy in which no kernel ran."""
    free, end, parts = move.at_ms, move.at_ms + move.ms, []
    for a, b in [*kernels, (end, end)]:
        if (until := min(a, end)) > free:
            parts.append((free, until))
        free = max(free, b)
    return parts
