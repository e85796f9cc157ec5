"""The HTML page: it shows a profile's text, draws its copies to scale, and uses no network."""

import html
import re
from xml.etree import ElementTree

import jax
import pytest
from traces import profiled

from jaxoffload import proof
from jaxoffload.proof._command import main
from jaxoffload.proof._report.page import HEIGHT, LEFT, RIGHT, ROW

ENDS = "ends here: </h1><script>alert(1)</script><!-- <script"  # text that would run


@pytest.fixture(scope="module")
def page():
    return proof.page(f"a step {ENDS}", profiled(0, 100))


@pytest.mark.claim("html")
def test_it_shows_the_profiles_text(page):
    (text,) = re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)
    assert html.unescape(text) == str(profiled(0, 100)) and "mlp/fc1" in text
    assert f"<h1>a step {html.escape(ENDS)}</h1>" in page


def test_it_needs_no_network_and_says_its_picture_in_words(page):
    assert not re.findall(r"(?:src|href)=|@import|url\(|<script|<!--", page)
    assert page.count("<svg") == 1 == page.count('role="img" aria-label="Copies of layers 0, 1, and the kernels')


def bars_and_words(page):
    svg = ElementTree.fromstring(re.search(r"<svg.*?</svg>", page)[0])
    of = lambda element, *names: [float(element.attrib[name]) for name in names]
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    bars = [(*of(one, "x", "y", "width", "height"), one.attrib["class"]) for one in svg.iter("rect")]
    assert all(0 <= x <= x + wide <= width and 0 <= y <= y + high <= height for x, y, wide, high, _ in bars)
    words = [(*of(one, "x", "y"), one.attrib["text-anchor"], one.text) for one in svg.iter("text")]
    assert all(0 <= x <= width and 0 < y <= height for x, y, *_ in words)
    return [bar for bar in bars if bar[1] >= 30], words  # without the legend's


@pytest.mark.claim("html")
def test_the_timeline_is_the_traces(page):
    bars, words = bars_and_words(page)
    there = ["to the host: mlp/fc1", "to the host: act", "to the host: kernels"]
    labels = [text for x, *_, text in words if x < LEFT]
    assert labels == [*there, "back: mlp/fc1", "back: (not attributed)", "back: kernels"]
    assert [text for _, _, anchor, text in words if anchor == "middle"] == ["0", "1", "0", "1", "0", "0"]
    assert {high for *_, high, _ in bars} == {HEIGHT}

    def spans(kind, first_y, begin, end):
        """Return row, begin and end in ms of each bar."""
        ms = lambda x: round(begin + (x - LEFT) / (RIGHT - LEFT) * (end - begin), 1)
        rows = [((y - first_y) // ROW, ms(x), ms(x + wide)) for x, y, wide, _, of in bars if of == kind]
        return sorted({row for row in rows if 0 <= row[0] < 3})

    to_host, back = (30, 10, 34), (30 + 4 * ROW + 14, 40, 71)  # by hand: its first y, and its first and last ms
    assert spans("kernel", *to_host) == [(2, 10, 30)] and spans("kernel", *back) == [(2, 40, 70)]
    # Each copy, and over it the time that kernels hide: those of 4 ms and of 1 ms are seen beneath.
    assert spans("exposed", *to_host) == [(0, 10, 15), (0, 20, 34), (1, 26, 28)]
    assert spans("copy", *to_host) == [(0, 10, 15), (0, 20, 30), (1, 26, 28)]
    assert spans("exposed", *back) == [(0, 40, 45), (0, 50, 55), (1, 69, 71)]
    assert spans("copy", *back) == [(0, 40, 45), (0, 50, 55), (1, 69, 70)]


def test_of_layers_that_run_several_times_it_draws_the_run_in_the_middle():
    one = proof.Move("fc1", 0, "d2h", bytes=10**9, at_ms=0.0, ms=5.0, exposed_ms=5.0, stream="Stream #14")
    moves = tuple(proof.Move(**vars(one) | {"at_ms": 10.0 * k}) for k in range(5))
    found = proof.Profile("H200", 50.0, (50.0, 50.0), 0.0, 0.0, moves, ())
    _, words = bars_and_words(proof.page("a step", found))
    assert [text for *_, text in words][-2:] == ["20.0 ms", "25.0 ms"]


@pytest.mark.claim("html")
def test_the_command_line_writes_it(tmp_path, capsys, monkeypatch):
    path, asked = tmp_path / "page.html", ["profile", "test_verify:made", "loss", "--html"]
    with pytest.raises(SystemExit, match="2"):
        main([*asked, f"{tmp_path}/none/page.html"])
    assert f"{tmp_path}/none/page.html: No such file or directory; must be a file that" in capsys.readouterr().err
    monkeypatch.setattr(proof, "profile", lambda *args: profiled(0, 100))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert main([*asked, str(path)]) == 0
    assert path.read_text() == proof.page("test_verify:made loss", profiled(0, 100))
    assert capsys.readouterr().out == f"{profiled(0, 100)}\n"
