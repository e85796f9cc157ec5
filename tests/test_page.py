"""The HTML page: its numbers are those of the JSON in it, in a browser too; it asks nothing of a network."""

import html.parser
import json
import os
import re
import shutil
import subprocess

import jax
import pytest
from test_streams import profiled
from test_verify import LAYERS, X, of_scan, weights

from jaxoffload import proof, residuals
from jaxoffload.__main__ import main
from jaxoffload._memory import readable
from jaxoffload.proof import Check

CHECKS = [
    ("loss", Check("gradients", "holds", "4 results are the twin's")),
    ("loss", Check("moves", "fails", "to the host goes <fc1> & more")),
    ("step", Check("copies", "not checked", "needs an NVIDIA GPU")),
]


@pytest.fixture(scope="module")
def page():
    table = residuals(of_scan, *jax.eval_shape(lambda: (X, weights(LAYERS))))
    return proof.page("a step </script>", {"device": "1 NVIDIA H200"}, table, CHECKS, profiled(0, 100))


class Tables(html.parser.HTMLParser):
    """The cells of each table, by its caption; and the text of the data."""

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
    want = [len(moves), readable(sum(m["bytes"] for m in moves)), *(f"{sum(m[k] for m in moves):.2f}" for k in MS)]
    assert copies["mlp/fc1", "d2h"] == [str(x) for x in want]
    most = dict(map(tuple, found.tables["At most"][1:]))
    a_layer = 8 * 16 * 4 + 2 * 8 * 32 * 4 + 8 * 4  # layer_input, fc1 and act, routing
    assert most == {"without": readable(4 * a_layer), "with offload": readable(4 * a_layer - 2 * 8 * 32 * 4)}


MS = ("ms", "exposed_ms")


def test_its_numbers_are_those_of_the_json(page):
    check_numbers(page)


def test_it_needs_no_network_and_says_its_pictures_in_words(page):
    assert not re.findall(r"(?:src|href)=|@import|url\(|<script(?! type=\"application/json\")", page)
    assert page.count("<svg") == 3 == page.count('role="img" aria-label="') and "prefers-color-scheme: dark" in page
    assert page.count('class="scroll" tabindex="0"') == page.count("<table>") == page.count("<caption>")
    assert page.count("</script>") == 1 and "&lt;fc1&gt; &amp; more" in page


def test_in_a_browser(page, tmp_path):
    """Headless Chromium builds the page from its text alone, and its numbers are the same there."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        assert "NEEDS_CHROMIUM" not in os.environ
        pytest.skip("needs chromium: apt install chromium")
    (tmp_path / "page.html").write_text(page)
    how = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    done = subprocess.run([browser, *how, f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=120)
    check_numbers(done.stdout)


def test_the_command_line_writes_it(tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["report", "test_verify:made", "loss", "--html", str(path)]) == 0
    assert "What is where" in path.read_text() and "What holds" not in path.read_text()
    assert main(["report", "test_verify:made", "loss", "--html", f"{tmp_path}/none/page.html"]) == 2
    assert f"there is no folder {tmp_path}/none" in capsys.readouterr().err


def test_on_a_gpu_what_was_verified_is_drawn_with_its_copies(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    monkeypatch.setattr(proof, "peaks_of", lambda command: None)
    monkeypatch.setattr(proof, "checks", lambda *args, **how: [check for _, check in CHECKS])
    monkeypatch.setattr(proof, "profile", lambda *args: profiled(0, 100))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert main(["verify", "test_verify:made", "loss", "--html", str(path)]) == 1
    assert [heading in path.read_text() for heading in ("What holds", "What is where", "Memory", "Copies")] == [
        True
    ] * 4
