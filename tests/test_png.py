"""The pictures as PNG: they show what the page shows, and are legible."""

import itertools
import json
import re
import sys

import jax
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.colors import to_hex
from test_streams import profiled
from test_verify import LAYERS, X, of_scan, weights

from jaxoffload import proof, residuals
from jaxoffload.proof._command import main
from jaxoffload.proof._report import png as _png
from jaxoffload.proof._report.pictures import COLORS, LEFT, RIGHT, ROW


@pytest.fixture(scope="module")
def table():
    return residuals(of_scan, *jax.eval_shape(lambda: (X, weights(LAYERS))))


@pytest.fixture
def drawn(table, monkeypatch):
    """Return file name -> what is drawn in it."""
    monkeypatch.setattr(_png, "_png", lambda picture: picture)
    return proof.pictures(table, profiled(0, 100))


def bars(picture, kind, first_y=26):
    """Return row, begin and end of each bar of one kind, from 0 to 1, without the legend's."""
    place = lambda bar: (int((bar.y - first_y) // ROW), *(round((x - LEFT) / (RIGHT - LEFT), 4) for x in ends(bar)))
    ends = lambda bar: (bar.x, bar.x + bar.width)
    return sorted(place(bar) for bar in picture.bars if bar.kind == kind and bar.y >= first_y)


def labels(picture):
    return [words.text for words in picture.words if words.anchor == "end" and words.x < LEFT]


def test_bytes_by_place_are_the_tables(drawn, table):
    picture = drawn["what.png"]
    rows = json.loads(table.to_json())["residuals"]
    sizes = {label: {} for label in labels(picture)}
    for row in rows:
        of = sizes.get(", ".join(row["names"]) or "(untagged)", {})
        of[row["state"]] = of.get(row["state"], 0) + row["bytes"]
    largest = max(sum(of.values()) for of in sizes.values())
    for state in ("saved", "offloaded", "recomputed"):
        found = {labels(picture)[row]: (end - begin) * largest for row, begin, end in bars(picture, state)}
        want = {name: of[state] for name, of in sizes.items() if of.get(state)}
        assert found.keys() == want.keys()
        assert all(found[name] == pytest.approx(want[name], abs=0.002 * largest) for name in want)
    fc1 = labels(picture).index("fc1")  # the host's bytes stand after the device's
    ((_, begin, end),) = [bar for bar in bars(picture, "saved") if bar[0] == fc1]
    assert begin == 0 and end * largest == pytest.approx(1024, rel=1e-3)
    assert [bar for bar in bars(picture, "offloaded") if bar[0] == fc1] == [(fc1, end, pytest.approx(5 * end))]
    assert "5.00 KiB" in [words.text for words in picture.words if int((words.y - 26) // ROW) == fc1]


def test_memory_over_the_step_is_the_tables(drawn):
    picture = drawn["memory.png"]
    a_layer, moved = 8 * 16 * 4 + 2 * 8 * 32 * 4 + 8 * 4, 8 * 32 * 4  # layer_input, fc1 and act, routing; fc1
    lines = {line.kind: [(220 - y) / 190 * 4 * a_layer for _, y in line.points] for line in picture.lines}
    assert lines["without"] == pytest.approx([n * a_layer for n in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0)])
    held = [n * a_layer - m * moved for n, m in zip((0, 1, 2, 3, 4), (0, 0, 0, 1, 2), strict=True)]
    assert lines["with"] == pytest.approx(held + held[::-1])
    words = [words.text for words in picture.words]
    assert {"with offload: at most 8.12 KiB", "without: at most 10.12 KiB"} < {*words}


def test_the_timeline_is_the_traces(drawn):
    picture = drawn["timeline.png"]
    there = ["to the host: mlp/fc1", "to the host: act", "to the host: kernels"]
    assert labels(picture) == [*there, "back: mlp/fc1", "back: (not attributed)", "back: kernels"]
    ms = lambda kind, first_y, begin, end: [
        (row, round(begin + a * (end - begin), 1), round(begin + b * (end - begin), 1))
        for row, a, b in bars(picture, kind, first_y)
        if 0 <= row < 3
    ]
    to_host, back = (30, 10, 34), (30 + 4 * ROW + 14, 40, 71)  # by hand: its first y, and its first and last ms
    assert ms("offloaded", *to_host) == [(0, 10, 15), (0, 20, 34), (1, 26, 28)]
    assert ms("offloaded", *back) == [(0, 40, 45), (0, 50, 55), (1, 69, 71)]
    assert ms("saved", *to_host) == [(2, 10, 30)] and ms("saved", *back) == [(2, 40, 70)]
    assert ms("exposed", *to_host) == [(0, 30, 34)] and ms("exposed", *back) == [(1, 70, 71)]
    numbers = [words.text for words in picture.words if words.anchor == "middle"]
    assert numbers == ["0", "1", "0", "1", "0", "0"]


def test_the_page_and_the_figure_draw_what_the_picture_says(drawn, table):
    page = proof.page("", {}, table, profile=profiled(0, 100))
    for kind, color in COLORS.items():
        count = sum(bar.kind == kind for picture in drawn.values() for bar in picture.bars)
        assert count == len(re.findall(f'<rect [^>]*class="{kind}"', page)) > 0
        boxes = [p for picture in drawn.values() for p in _png._figure(picture).axes[0].patches]
        assert count == sum(to_hex(box.get_facecolor()) == color for box in boxes)
    for picture in drawn.values():
        assert [box.get_bbox().bounds for box in _png._figure(picture).axes[0].patches] == [
            pytest.approx(bar[:4]) for bar in picture.bars
        ]


def test_words_stand_apart_and_inside(drawn, monkeypatch):
    words, draw = [], RendererAgg.draw_text
    monkeypatch.setattr(RendererAgg, "draw_text", lambda *args, **how: words.append(how["mtext"]) or draw(*args, **how))
    for name, picture in drawn.items():
        words.clear()
        figure = _png._figure(picture)
        FigureCanvasAgg(figure).draw()
        boxes = [(text.get_text(), text.get_window_extent()) for text in words]
        assert len(boxes) >= 5, name
        for text, box in boxes:
            assert figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1), (name, text)
            assert figure.bbox.containsy(box.y0) and figure.bbox.containsy(box.y1), (name, text)
        for (one, a), (other, b) in itertools.combinations(boxes, 2):
            assert not a.overlaps(b), (name, one, other)


def test_what_there_is_no_data_for_is_not_drawn(table):
    assert not proof.pictures()
    assert list(proof.pictures(profile=profiled(0, 100))) == ["timeline.png"]
    nothing_moves = residuals(lambda w: jax.numpy.sum(jax.numpy.sin(w)), jax.ShapeDtypeStruct((4,), "float32"))
    assert list(proof.pictures(nothing_moves)) == ["what.png"]


def test_the_command_line_writes_them(tmp_path, capsys):
    folder = tmp_path / "new"
    assert main(["report", "test_verify:made", "loss", "--png", str(folder)]) == 0
    *_, said = capsys.readouterr().err.splitlines()  # on a busy machine the progress is printed first
    assert said == f"{folder}: what.png, memory.png"
    assert sorted(path.name for path in folder.iterdir()) == ["memory.png", "what.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_what_cannot_be_drawn_is_said_before_anything_runs(tmp_path, capsys, monkeypatch):
    assert main(["report", "no_such:module", "--png", f"{tmp_path}/none/x"]) == 2
    assert f"--png {tmp_path}/none/x: No such file or directory; must be a folder" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", "no_such:module", "--png", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"--png {tmp_path}: matplotlib cannot be imported" in said and "pip install matplotlib" in said
