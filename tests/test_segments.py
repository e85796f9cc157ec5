"""Which loops run a stack of layers: the table of `layer_ranges`."""

import itertools

import pytest

from jaxoffload._engine.layers.segments import layer_ranges


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
    assert [tuple(r) for r in layer_ranges(length, offloaded, resident, other)] == expected


def test_spans_cover_all_layers_once_and_offload_as_many_as_they_are_told():
    for length, resident, other in itertools.product(range(1, 7), range(8), ("save", "recompute")):
        for offloaded in range(max(0, length - resident) + 1):
            found = layer_ranges(length, offloaded, resident, other)
            layers = [layer for r in found for layer in range(r.start, r.stop)]
            assert layers == list(range(length))
            assert sum(r.on_host for r in found) == offloaded
            # A loop keeps the residuals of all its layers, of all except the last, or of none on the host.
            assert all(r.on_host in (0, r.stop - r.start - 1, r.stop - r.start) for r in found)
            recomputed = sum(r.stop - r.start for r in found if r.recompute)
            assert recomputed == (max(0, length - resident) - offloaded if other == "recompute" else 0)
