"""The HTML page: it shows a profile's text, draws its copies to scale, and uses no network."""

import html
import re

import jax
import pytest
from traces import profiled

from jaxoffload import proof
from jaxoffload.proof._command import main

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
    assert page.count('role="img" aria-label="Copies of layers 0, 1, and the kernels') == 1


def bars_of(page):
    """Return, for each direction and row, the kind, label, begin and end in ms of each bar."""
    found = {}
    for way, begin, end, lane in re.findall(r"<h3>([\w ]+), ([\d.]+) to ([\d.]+) ms</h3>(.*?)(?=<h3>|</body>)", page):
        at = lambda percent, begin=float(begin), end=float(end): begin + float(percent) / 100 * (end - begin)
        for row, bars in re.findall(r'<div class="row"><b>(.*?)</b><div class="bars">(.*?)</div>', lane):
            each = re.findall(r'class="(\w+)" style="left: ([\d.]+)%; width: ([\d.]+)%" title="[^"]*">(\w*)<', bars)
            spans = [(kind, label, round(at(a), 1), round(at(float(a) + float(b)), 1)) for kind, a, b, label in each]
            assert len(each) == bars.count("<span") and all(float(a) + float(b) <= 100.01 for _, a, b, _ in each)
            found[way, row] = spans
    return found


@pytest.mark.claim("html")
def test_the_timeline_is_the_traces(page):
    """Each copy, and over it the time that kernels hide: those of 4 ms and of 1 ms are seen beneath."""
    copy = lambda layer, *spans: [*spans, ("label", layer, *spans[0][2:])]
    hidden = lambda layer, a, b: copy(layer, ("exposed", "", a, b), ("copy", "", a, b))
    assert bars_of(page) == {
        ("to the host", "mlp/fc1"): [
            *hidden("0", 10, 15),
            *copy("1", ("exposed", "", 20, 34), ("copy", "", 20, 30)),
        ],
        ("to the host", "act"): hidden("0", 26, 28),
        ("to the host", "kernels"): [("kernel", "", 10, 30)],
        ("back", "mlp/fc1"): [*hidden("1", 40, 45), *hidden("0", 50, 55)],
        ("back", "(not attributed)"): copy("0", ("exposed", "", 69, 71), ("copy", "", 69, 70)),
        ("back", "kernels"): [("kernel", "", 40, 70)],
    }


def test_of_layers_that_run_several_times_it_draws_the_run_in_the_middle():
    one = proof.Move("fc1", 0, "d2h", bytes=10**9, at_ms=0.0, ms=5.0, exposed_ms=5.0, stream="Stream #14")
    moves = tuple(proof.Move(**vars(one) | {"at_ms": 10.0 * k}) for k in range(5))
    found = proof.Profile("H200", 50.0, (50.0, 50.0), 0.0, 0.0, moves, ())
    assert bars_of(proof.page("a step", found))["to the host", "fc1"][0] == ("exposed", "", 20, 25)


@pytest.mark.claim("html")
def test_the_command_line_writes_it(tmp_path, capsys, monkeypatch):
    path, asked = tmp_path / "page.html", ["profile", "test_verify:made", "loss", "--html"]
    monkeypatch.setattr(proof, "profile", lambda *args: profiled(0, 100))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert main([*asked, str(path)]) == 0
    assert path.read_text() == proof.page("test_verify:made loss", profiled(0, 100))
    assert capsys.readouterr().out == f"{profiled(0, 100)}\n"
