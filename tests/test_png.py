"""The pictures as PNG: they show what the page shows, and one can read them."""

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
from jaxoffload.__main__ import main
from jaxoffload.proof._report import png as _png
from jaxoffload.proof._report.pictures import COLORS


@pytest.fixture(scope="module")
def table():
    return residuals(of_scan, *jax.eval_shape(lambda: (X, weights(LAYERS))))


@pytest.fixture
def figures(table, monkeypatch):
    """File name -> what matplotlib was told."""
    monkeypatch.setattr(_png, "_png", lambda figure: figure)
    return proof.pictures(table, profiled(0, 100))


def bars(axes, kind):
    """Row, begin and end of each bar of a colour."""
    boxes = [p.get_bbox() for p in axes.patches if to_hex(p.get_facecolor()) == COLORS[kind]]
    for several in axes.collections:
        if len(several.get_facecolor()) and to_hex(several.get_facecolor()[0]) == COLORS[kind]:
            boxes += [path.get_extents() for path in several.get_paths()]
    return sorted((round((b.y0 + b.y1) / 2), round(b.x0, 3), round(b.x1, 3)) for b in boxes)


def labels(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_bytes_by_place_are_the_tables(figures, table):
    (axes,) = figures["what.png"].axes
    rows = json.loads(table.to_json())["residuals"]
    for state in ("saved", "offloaded", "recomputed"):
        want = dict.fromkeys(labels(axes), 0)
        for row in rows:
            if row["state"] == state:
                want[", ".join(row["names"]) or "(untagged)"] += row["bytes"]
        found = {labels(axes)[row]: end - begin for row, begin, end in bars(axes, state)}
        assert found == {name: size for name, size in want.items() if size}
    fc1 = labels(axes).index("fc1")  # the host's bytes stand behind the device's
    assert [b for kind in ("saved", "offloaded") for b in bars(axes, kind) if b[0] == fc1] == [
        (fc1, 0, 1024),
        (fc1, 1024, 5120),
    ]
    assert axes.texts[fc1].get_text() == "5.00 KiB"


def test_memory_over_the_step_is_the_tables(figures):
    (axes,) = figures["memory.png"].axes
    a_layer, moved = 8 * 16 * 4 + 2 * 8 * 32 * 4 + 8 * 4, 8 * 32 * 4  # layer_input, fc1 and act, routing; fc1
    held, without = (list(line.get_ydata()) for line in axes.lines)
    assert without == [n * a_layer for n in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0)]
    assert (
        held == [n * a_layer - m * moved for n, m in zip((0, 1, 2, 3, 4), (0, 0, 0, 1, 2), strict=True)] + held[4::-1]
    )
    assert [line.get_label() for line in axes.lines] == ["with offload: at most 8.12 KiB", "without: at most 10.12 KiB"]


def test_the_timeline_is_the_traces(figures):
    there, back = figures["timeline.png"].axes
    assert labels(there) == ["mlp/fc1", "act", "kernels"] and labels(back) == ["mlp/fc1", "(not attributed)", "kernels"]
    assert bars(there, "offloaded") == [(0, 10, 15), (0, 20, 34), (1, 26, 28)] and bars(there, "saved") == [(2, 10, 30)]
    assert bars(back, "offloaded") == [(0, 40, 45), (0, 50, 55), (1, 69, 71)] and bars(back, "saved") == [(2, 40, 70)]
    assert bars(there, "exposed") == [(0, 30, 34)] and bars(back, "exposed") == [(1, 70, 71)]
    assert [t.get_text() for t in there.texts] == ["0", "1", "0"] and [t.get_text() for t in back.texts] == [
        "1",
        "0",
        "0",
    ]


def test_the_page_draws_as_many_bars(figures, table):
    page = proof.page("", {}, table, profile=profiled(0, 100))
    for kind in COLORS:
        drawn = sum(len(bars(axes, kind)) for figure in figures.values() for axes in figure.axes)
        assert drawn == len(re.findall(f'<rect [^>]*class="{kind}"', page)) > 0


def test_words_stand_apart_and_inside(figures, monkeypatch):
    words, draw = [], RendererAgg.draw_text
    monkeypatch.setattr(RendererAgg, "draw_text", lambda *args, **how: words.append(how["mtext"]) or draw(*args, **how))
    for name, figure in figures.items():
        words.clear()
        FigureCanvasAgg(figure).draw()
        boxes = [(text.get_text(), text.get_window_extent()) for text in words]
        assert len(boxes) > 5, name
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
    *_, said = capsys.readouterr().err.splitlines()  # on a busy machine the progress comes first
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
