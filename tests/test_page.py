"""The HTML page: its numbers are those of the JSON in it, in a browser too, and it uses no network."""

import dataclasses
import html.parser
import json
import os
import re
import shutil
import subprocess
from html import escape as html_escape
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from common import PATIENCE, ROOT
from jax.ad_checkpoint import checkpoint_name
from test_streams import profiled
from test_verify import LAYERS, X, of_scan, weights

from jaxoffload import Policy, Residual, Residuals, plan, proof, residuals, scan, tag
from jaxoffload._text import readable
from jaxoffload.proof import Check
from jaxoffload.proof._command import main
from jaxoffload.proof._report.pictures import memory

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


def made_to_plan():
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    return loss_to_plan, ({"in": shape(LAYERS, 1024, 4096), "out": shape(LAYERS, 4096, 1024)}, shape(4096, 1024))


def loss_to_plan(w, x):
    def layer(x, w):
        x = tag(x, "layer_input")
        return x + tag(jnp.tanh(checkpoint_name(x @ w["in"], "<fc1>")), "act") @ w["out"], None

    return jnp.mean(scan(layer, x, w, policy=Policy(), strict=False)[0] ** 2)


@pytest.fixture(scope="module")
def planned():
    f, args = made_to_plan()
    within = lambda budget: plan(f, *args, budget=budget, machine=ROOT / "machines/h200.json")
    curve = within("1TiB").curve
    return within(curve[len(curve) // 2].bytes + 2**20)


@pytest.fixture(scope="module")
def page_of_plan(planned):
    return proof.page("a plan", {}, plan=planned)


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
    want = [len(moves), readable(sum(m["bytes"] for m in moves)), *(f"{sum(m[k] for m in moves):.2f}" for k in MS)]
    assert copies["mlp/fc1", "d2h"][:-1] == [str(x) for x in want]
    assert copies["mlp/fc1", "d2h"][-1] == ", ".join(sorted({m["stream"][7:9] for m in moves}))
    (shown,) = (rows for caption, rows in found.tables.items() if caption.startswith("Copies of layers"))
    lines = {(m["residual"], str(m["layer"]), str(m["at_ms"]), str(m["exposed_ms"])) for m in data["profile"]["moves"]}
    assert len(shown) > 4 and all((row[0], row[1], row[3], row[5]) in lines for row in shown[1:])
    most = dict(map(tuple, found.tables["At most"][1:]))
    a_layer = 8 * 16 * 4 + 2 * 8 * 32 * 4 + 8 * 4  # layer_input, fc1 and act, routing
    assert most == {"without": readable(4 * a_layer), "with offload": readable(4 * a_layer - 2 * 8 * 32 * 4)}


MS = ("ms", "exposed_ms")


def test_memory_where_each_name_moves_and_where_stacks_differ():
    """Four layers of 16 KiB, of which all but the last offload; and six, of which two have one residual more."""
    policy = Policy({"fc1": "offload"}, min_offload_bytes=0)
    body = lambda x, w: (jnp.sin(tag(x @ w, "fc1")), None)
    loss = lambda x, w: jnp.sum(scan(body, x, w, policy=policy)[0])
    x, w = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    table = residuals(loss, x, w)
    found = memory(dataclasses.replace(table, rows=tuple(row for row in table if row.names)))
    assert [*found.without] == [2**14 * layers for layers in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0)]
    assert [*found.held] == [2**14 * layers for layers in (0, 1, 2, 2, 2, 2, 2, 2, 1, 0)]
    row = lambda name, layers, state: Residual((name,), (64,), "float32", 256, layers, 256 * layers, state, "save", "")
    rows = row("both", 2, "saved"), row("both", 3, "offloaded"), row("both", 1, "saved"), row("one", 2, "saved")
    assert len(memory(Residuals(rows)).held) == 2 * (6 + 1)


@pytest.mark.claim("html")
def test_its_numbers_are_those_of_the_json(page):
    check_numbers(page)


@pytest.mark.claim("html")
def test_of_a_plan_it_says_what_the_plan_says(planned, page_of_plan):
    found = Tables(page_of_plan)
    assert json.loads(found.data)["plan"] == json.loads(planned.to_json())
    memory = dict(map(tuple, found.tables["Memory"][1:]))
    assert memory["on each device"] == readable(planned.memory.total) and len(memory) == 6
    rows = found.tables["Choices that no other one beats"][1:]
    assert [row[0] for row in rows] == [readable(p.bytes) for p in planned.curve] and len(rows) > 3
    assert [row[1] for row in rows if row[2] == "the plan"] == [f"{planned.step_ms:.1f}"]
    assert f"<pre>{html_escape(planned.to_yaml())}</pre>" in page_of_plan and "&lt;fc1&gt;" in page_of_plan
    # The square stands on the line, left of the budget.
    svg = re.search(r"<svg.*?</svg>", page_of_plan)[0]
    line, budget = ([tuple(map(float, p.split(","))) for p in t.split()] for t in re.findall(r'points="([^"]+)"', svg))
    ((x, y),) = re.findall(r'x="([\d.]+)" y="([\d.]+)" width="10.00" height="10"', svg)
    at = float(x) + 5, float(y) + 5
    assert min(abs(at[0] - x) + abs(at[1] - y) for x, y in line) < 0.2 and at[0] <= budget[0][0] == budget[1][0]
    assert [x for x, _ in line] == sorted(x for x, _ in line) and [y for _, y in line] == sorted(y for _, y in line)


@pytest.mark.claim("per-device")
def test_of_a_mesh_it_says_what_each_device_holds():
    row = Residual(("fc1",), (8, 4), "float32", 128, 12, 1536, "offloaded", "offload", "fc*", parts=4)
    table = Residuals((row,), mesh=(("data", 2), ("model", 2)))
    *_, whole, each = Tables(proof.page("a loss", {}, table)).tables["Bytes by place"]
    assert whole == ["all", "0 B", "1.50 KiB", "0 B"]
    assert each == ["on each of 4 devices (data 2, model 2)", "0 B", "384 B", "0 B"]


def test_it_needs_no_network_and_says_its_pictures_in_words(page):
    assert not re.findall(r"(?:src|href)=|@import|url\(|<script(?! type=\"application/json\")", page)
    assert page.count("<svg") == 3 == page.count('role="img" aria-label="') and "prefers-color-scheme: dark" in page
    assert page.count('class="scroll" tabindex="0"') == page.count("<table>") == page.count("<caption>")
    assert page.count("</script>") == page.count("<script") == 1 and "&lt;fc1&gt; &amp; more" in page
    assert "<!--" not in page and "<" not in Tables(page).data and json.loads(Tables(page).data)["about"][ENDS] == ENDS


def test_its_pictures_are_drawn_inside_their_frames_and_to_scale(page, page_of_plan):
    numbers = lambda element, *names: [float(element.attrib[name]) for name in names]
    for picture in re.findall(r"<svg.*?</svg>", page + page_of_plan):
        svg = ElementTree.fromstring(picture)
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        for one in svg.iter("rect"):
            x, y, wide, high = numbers(one, "x", "y", "width", "height")
            assert 0 <= x <= x + wide <= width and 0 <= y <= y + high <= height
        points = [numbers(one, "x", "y") for one in svg.iter("text")]
        points += [map(float, p.split(",")) for one in svg.iter("polyline") for p in one.attrib["points"].split()]
        assert all(0 <= x <= width and 0 < y <= height for x, y in points)
    # Both memory lines begin and end at zero, and the higher one fills the frame.
    lines = dict(re.findall(r'<polyline class="line (\w+)" points="([^"]+)"', page))
    heights = {kind: [float(point.split(",")[1]) for point in points.split()] for kind, points in lines.items()}
    assert {h[0] for h in heights.values()} == {h[-1] for h in heights.values()} == {220.0}
    assert min(heights["without"]) == 30.0 < min(heights["with"]) and max(map(max, heights.values())) == 220.0


def test_in_a_browser(page, tmp_path):
    """Headless Chromium builds the page from its text alone and shows the same numbers."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        assert "NEEDS_CHROMIUM" not in os.environ
        pytest.skip("needs chromium: apt install chromium")
    (tmp_path / "page.html").write_text(page)
    how = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    command = [browser, *how, f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    check_numbers(done.stdout)


@pytest.mark.claim("html")
def test_the_command_line_writes_it(tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["report", "test_verify:made", "loss", "--html", str(path)]) == 0
    assert "What is where" in path.read_text() and "What holds" not in path.read_text()
    assert main(["report", "test_verify:made", "loss", "--html", f"{tmp_path}/none/page.html"]) == 2
    assert f"there is no folder {tmp_path}/none" in capsys.readouterr().err
    of_plan = ["plan", "test_page:made_to_plan", "--machine", str(ROOT / "machines/h200.json"), "--budget", "1GiB"]
    assert main([*of_plan, "--html", str(path)]) == 0
    assert "Choices that no other one beats" in path.read_text() and "What is where" not in path.read_text()


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


def test_columns_of_numbers_are_set_as_such(page):
    found = {}
    for table in re.findall(r"<table>.*?</table>", page):
        for row in re.findall(r"<tr>(.*?)</tr>", table):
            kinds = re.findall(r"<t[hd][^>]*?(class=\"number\")?>", row)
            caption = re.search(r"<caption>(.*?)</caption>", table)[1]
            found.setdefault(caption, set()).add(tuple(i for i, kind in enumerate(kinds) if kind))
    (copies,) = (caption for caption in found if caption.startswith("Copies of layers"))
    assert found.pop(copies) == {(1, 3, 4, 5)}
    assert found == {
        "Where and with what": {()},
        "Claims and verdicts": {()},
        "Bytes by place": {(1, 2, 3)},
        "At most": {(1,)},
        "Copies by residual": {(2, 3, 4, 5)},
    }


def test_each_column_has_a_heading(page):
    heads = {caption: tuple(rows[0]) for caption, rows in Tables(page).tables.items()}
    (copies,) = (caption for caption in heads if caption.startswith("Copies of layers"))
    assert heads.pop(copies) == ("residual", "layer", "way", "began at ms", "ms", "exposed ms")
    assert heads["Copies by residual"] == ("residual", "way", "copies", "bytes", "ms", "exposed ms", "streams")
    assert heads["Claims and verdicts"] == ("of", "claim", "verdict", "because")
    assert heads["At most"] == ("", "bytes")
    assert heads["Bytes by place"] == ("residual", "on the device", "on the host", "recomputed")
