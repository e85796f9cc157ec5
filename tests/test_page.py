"""The HTML page: its numbers are those of the JSON in it, in a browser too, and it uses no network."""

import html.parser
import json
import os
import re
import shutil
import subprocess
from xml.etree import ElementTree

import jax
import pytest
from common import PATIENCE
from test_streams import profiled
from test_verify import LAYERS, X, of_scan, weights

from jaxoffload import Residual, Residuals, proof, residuals
from jaxoffload._text import readable
from jaxoffload.proof import Check
from jaxoffload.proof._command import main
from jaxoffload.proof._report.page import LEFT, RIGHT, ROW

ENDS = "ends here: </script><script>alert(1)</script><!-- <script"  # text that would end the data, or run
CHECKS = [
    ("loss", Check("gradients", "holds", ENDS)),
    ("loss", Check("moves", "fails", "these values go to the host and must not: <fc1> & more")),
    ("step", Check("copies", "not checked", "needs an NVIDIA GPU")),
]


@pytest.fixture(scope="module")
def page():
    table = residuals(of_scan, *jax.eval_shape(lambda: (X, weights(LAYERS))))
    return proof.page(f"a step {ENDS}", {"device": "1 NVIDIA H200", ENDS: ENDS}, table, CHECKS, profiled(0, 100))


class Tables(html.parser.HTMLParser):
    """Collects each table's cells by its caption, and the text of the data."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.data, self._at, self._rows, self._caption = {}, "", [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._at.append(tag)
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag):
        while self._at and self._at.pop() != tag:
            pass
        if tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data):
        if "script" in self._at:
            self.data += data
        elif "caption" in self._at:
            self._caption += data
        elif "td" in self._at or "th" in self._at:
            self._rows[-1][-1] += data


def check_numbers(text):
    found = Tables(text)
    data = json.loads(found.data)
    assert [row[1:] for row in found.tables["Claims and verdicts"][1:]] == [[*c.values()] for _, c in data["checks"]]
    places = {row[0]: row[1:] for row in found.tables["Bytes by place"][1:]}
    for state, column in (("saved", 0), ("offloaded", 1), ("recomputed", 2)):
        rows = [r for r in data["residuals"]["residuals"] if r["state"] == state]
        assert places["all"][column] == readable(sum(r["bytes"] for r in rows))
        assert places["fc1"][column] == readable(sum(r["bytes"] for r in rows if r["names"] == ["fc1"]))
    copies = {tuple(row[:2]): row[2:] for row in found.tables["Copies by residual"][1:]}
    moves = [m for m in data["profile"]["moves"] if (m["residual"], m["direction"]) == ("mlp/fc1", "d2h")]
    want = [len(moves), readable(sum(m["bytes"] for m in moves))]
    want += [f"{sum(m[k] for m in moves):.2f}" for k in ("ms", "exposed_ms")]
    assert copies["mlp/fc1", "d2h"] == [*map(str, want), ", ".join(sorted({m["stream"][7:9] for m in moves}))]
    (shown,) = (rows for caption, rows in found.tables.items() if caption.startswith("Copies of layers"))
    lines = {(m["residual"], str(m["layer"]), str(m["at_ms"]), str(m["exposed_ms"])) for m in data["profile"]["moves"]}
    assert len(shown) > 4 and all((row[0], row[1], row[3], row[5]) in lines for row in shown[1:])


@pytest.mark.claim("html")
def test_its_numbers_are_those_of_the_json(page):
    check_numbers(page)


def test_in_a_browser(page, tmp_path):
    """Headless Chromium builds the page from its text alone and shows the same numbers."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        assert "NEEDS_CHROMIUM" not in os.environ
        pytest.skip("needs chromium: apt install chromium")
    (tmp_path / "page.html").write_text(page)
    how = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    command = [browser, *how, f"file://{tmp_path}/page.html"]
    check_numbers(subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout)


@pytest.mark.claim("per-device")
def test_of_a_mesh_it_says_what_each_device_holds():
    row = Residual(("fc1",), (8, 4), "float32", 128, 12, 1536, "offloaded", "offload", "fc*", parts=4)
    table = Residuals((row,), mesh=(("data", 2), ("model", 2)))
    *_, whole, each = Tables(proof.page("a loss", {}, table)).tables["Bytes by place"]
    assert whole == ["all", "0 B", "1.50 KiB", "0 B"]
    assert each == ["on each of 4 devices (data 2, model 2)", "0 B", "384 B", "0 B"]


def test_it_needs_no_network_and_says_its_picture_in_words(page):
    assert not re.findall(r"(?:src|href)=|@import|url\(|<script(?! type=\"application/json\")", page)
    assert page.count("<svg") == 1 == page.count('role="img" aria-label="') and "prefers-color-scheme: dark" in page
    assert page.count('class="scroll" tabindex="0"') == page.count("<table>") == page.count("<caption>")
    assert page.count("</script>") == page.count("<script") == 1 and "&lt;fc1&gt; &amp; more" in page
    assert "<!--" not in page and "<" not in Tables(page).data and json.loads(Tables(page).data)["about"][ENDS] == ENDS


def test_columns_of_numbers_are_set_as_such(page):
    found = {}
    for table in re.findall(r"<table>.*?</table>", page):
        for row in re.findall(r"<tr>(.*?)</tr>", table):
            kinds = re.findall(r"<t[hd][^>]*?(class=\"number\")?>", row)
            caption = re.search(r"<caption>(.*?)</caption>", table)[1].partition(" of layers")[0]
            found.setdefault(caption, set()).add(tuple(i for i, kind in enumerate(kinds) if kind))
    numbers = {"Bytes by place": (1, 2, 3), "Copies by residual": (2, 3, 4, 5), "Copies": (1, 3, 4, 5)}
    assert found == {caption: {numbers.get(caption, ())} for caption in found} and numbers.keys() < found.keys()


def test_the_timeline_is_the_traces(page):
    svg = ElementTree.fromstring(re.search(r"<svg.*?</svg>", page)[0])
    of = lambda element, *names: [float(element.attrib[name]) for name in names]
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    bars = [(*of(one, "x", "y", "width", "height"), one.attrib["class"]) for one in svg.iter("rect")]
    assert all(0 <= x <= x + wide <= width and 0 <= y <= y + high <= height for x, y, wide, high, _ in bars)
    words = [(*of(one, "x", "y"), one.attrib["text-anchor"], one.text) for one in svg.iter("text")]
    assert all(0 <= x <= width and 0 < y <= height for x, y, *_ in words)
    there = ["to the host: mlp/fc1", "to the host: act", "to the host: kernels"]
    labels = [text for x, *_, text in words if x < LEFT]
    assert labels == [*there, "back: mlp/fc1", "back: (not attributed)", "back: kernels"]
    assert [text for _, _, anchor, text in words if anchor == "middle"] == ["0", "1", "0", "1", "0", "0"]

    def spans(kind, first_y, begin, end):
        """Return row, begin and end in ms of each bar of full height."""
        ms = lambda x: round(begin + (x - LEFT) / (RIGHT - LEFT) * (end - begin), 1)
        rows = [
            ((y - first_y) // ROW, ms(x), ms(x + wide)) for x, y, wide, high, of in bars if (high, of) == (18, kind)
        ]
        return sorted({row for row in rows if 0 <= row[0] < 3})

    to_host, back = (30, 10, 34), (30 + 4 * ROW + 14, 40, 71)  # by hand: its first y, and its first and last ms
    assert spans("saved", *to_host) == [(2, 10, 30)] and spans("saved", *back) == [(2, 40, 70)]
    # Each copy, and over it the time that kernels hide: those of 4 ms and of 1 ms are seen beneath.
    assert spans("exposed", *to_host) == [(0, 10, 15), (0, 20, 34), (1, 26, 28)]
    assert spans("offloaded", *to_host) == [(0, 10, 15), (0, 20, 30), (1, 26, 28)]
    assert spans("exposed", *back) == [(0, 40, 45), (0, 50, 55), (1, 69, 71)]
    assert spans("offloaded", *back) == [(0, 40, 45), (0, 50, 55), (1, 69, 70)]


@pytest.mark.claim("html")
def test_the_command_line_writes_it(tmp_path, capsys, monkeypatch):
    path = tmp_path / "page.html"
    assert main(["report", "test_verify:made", "loss", "--html", str(path)]) == 0
    assert "What is where" in path.read_text() and "What holds" not in path.read_text()
    assert main(["report", "test_verify:made", "loss", "--html", f"{tmp_path}/none/page.html"]) == 2
    assert f"{tmp_path}/none/page.html: No such file or directory" in capsys.readouterr().err
    # On a GPU, what was verified is drawn with its copies.
    monkeypatch.setattr(proof, "checks", lambda *args, **how: [check for _, check in CHECKS])
    monkeypatch.setattr(proof, "profile", lambda *args: profiled(0, 100))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert main(["verify", "test_verify:made", "loss", "--html", str(path)]) == 1
    assert all(heading in path.read_text() for heading in ("What holds", "What is where", "Copies of layers"))
