"""Which loops run a stack of layers: the table of `segments_of`."""

import itertools
from types import SimpleNamespace

import pytest

from jaxoffload._engine.layers.segments import segments_of

SAVES, RECOMPUTES = SimpleNamespace(forward="saves"), SimpleNamespace(forward="recomputes")


def ranges(length, offloaded, resident, other):
    """Return each segment's start, stop and offloading layers, whether it recomputes, and why it does not offload."""
    recomputing = (lambda: RECOMPUTES) if other == "recompute" else None
    found = segments_of(SAVES, recomputing, length, offloaded, resident)
    assert all(segment.jaxpr is segment.layer.forward for segment in found)
    return [(s.start, s.stop, s.on_host, s.layer is RECOMPUTES, s.reason) for s in found]


@pytest.mark.parametrize(
    "length, offloaded, resident, other, expected",
    [
        # All offload; the last layer's residuals are written after the loop.
        (4, 4, 0, "save", [(0, 4, 4, False, "resident")]),
        # A single resident layer runs in the loop of those that offload.
        (4, 3, 1, "save", [(0, 4, 3, False, "resident")]),
        (4, 3, 1, "recompute", [(0, 4, 3, False, "resident")]),
        # With two, the second has its own loop.
        (4, 2, 2, "save", [(0, 3, 2, False, "resident"), (3, 4, 0, False, "resident")]),
        # Layers between save, as resident ones do, so the first of them joins.
        (
            6,
            2,
            1,
            "save",
            [(0, 3, 2, False, "other_layers"), (3, 5, 0, False, "other_layers"), (5, 6, 0, False, "resident")],
        ),
        (4, 2, 1, "save", [(0, 3, 2, False, "other_layers"), (3, 4, 0, False, "resident")]),
        # Layers between that recompute are another program, so none joins.
        (
            6,
            2,
            1,
            "recompute",
            [(0, 2, 2, False, "other_layers"), (2, 5, 0, True, "other_layers"), (5, 6, 0, False, "resident")],
        ),
        (6, 2, 0, "recompute", [(0, 2, 2, False, "other_layers"), (2, 6, 0, True, "other_layers")]),
        # None offloads.
        (3, 0, 1, "save", [(0, 2, 0, False, "other_layers"), (2, 3, 0, False, "resident")]),
        (3, 0, 1, "recompute", [(0, 2, 0, True, "other_layers"), (2, 3, 0, False, "resident")]),
        (3, 0, 9, "recompute", [(0, 3, 0, False, "resident")]),
        (1, 1, 0, "save", [(0, 1, 1, False, "resident")]),
        (1, 0, 1, "save", [(0, 1, 0, False, "resident")]),
    ],
)
def test_spans(length, offloaded, resident, other, expected):
    assert ranges(length, offloaded, resident, other) == expected


def test_spans_cover_all_layers_once_and_offload_as_many_as_they_are_told():
    for length, resident, other in itertools.product(range(1, 7), range(8), ("save", "recompute")):
        for offloaded in range(max(0, length - resident) + 1):
            found = ranges(length, offloaded, resident, other)
            layers = [layer for start, stop, *_ in found for layer in range(start, stop)]
            assert layers == list(range(length))
            assert sum(on_host for _, _, on_host, *_ in found) == offloaded
            # A loop keeps the residuals of all its layers, of all except the last, or of none on the host.
            assert all(on_host in (0, stop - start - 1, stop - start) for start, stop, on_host, *_ in found)
            recomputed = sum(stop - start for start, stop, _, recomputes, _ in found if recomputes)
            assert recomputed == (max(0, length - resident) - offloaded if other == "recompute" else 0)
