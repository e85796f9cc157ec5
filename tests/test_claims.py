"""The README's claims: the list fits the README and what it names, and a claim holds only if its check said so."""

import ast
import dataclasses
import itertools
import json
import re
import shlex
import sys
import time
import types

import pytest
from claimed import table, verdicts
from test_readme import LINK, README, ROOT, without_links

from benchmarks import choices, claims, dense, fits, grouped, judge, losses, measure, moe, peers, sweep
from benchmarks.claims import Claim, Listed, Measurement
from jaxoffload.__main__ import made_by
from jaxoffload.proof._report.profile import Move, Profile
from models.config import load

LISTED = claims.read()

# --- the list


@pytest.mark.parametrize("name", LISTED.claims)
def test_a_claim_stands_in_the_readme_with_its_link(name):
    says, text = LISTED.claims[name].says, " ".join(README.split())
    before, link, _ = text.partition(next(m[0] for m in LINK.finditer(text) if m[2] == name))
    begin = without_links(text).find(says)
    assert link and begin >= 0 and begin <= len(LINK.sub(r"\1", before)) < begin + len(says)
    assert f"\n[{name}]: benchmarks/CLAIMS.md#{name}\n" in README


def test_no_link_dangles():
    linked = [m[2] for m in LINK.finditer(README)]
    assert sorted(linked) == sorted(re.findall(r"^\[(.*)\]: benchmarks/CLAIMS.md#\1$", README, re.MULTILINE))
    assert set(linked) == set(LISTED.claims) and all(re.fullmatch("[a-z0-9-]+", name) for name in linked)


def test_every_number_that_was_measured_is_in_a_claim():
    """Outside of the first table, which `test_readme.py` makes again."""
    text = without_links(
        README.replace(dense.table(json.loads((ROOT / "benchmarks/results/dense.json").read_text())), "")
    )
    for says in (claim.says for claim in LISTED.claims.values()):
        text = text.replace(says, "")
    assert re.findall(r".{40}\b\d[\d.]* (?:%|(?:ms|GiB|GB|times)\b).{20}", text) == []


def test_the_page_is_up_to_date():
    assert claims.PAGE.read_text() == claims.page(LISTED), "python -m benchmarks.claims --page"
    assert "(results/claims.json)" in claims.page(LISTED) and judge.RESULTS.exists()


def test_nothing_that_was_measured_fails():
    assert [row for row in claims.recorded(LISTED) if row[1] == judge.FAILS] == []


@pytest.mark.parametrize("test", sorted({test for claim in LISTED.claims.values() for test in claim.tests}))
def test_the_tests_exist(test):
    path, _, function = test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert function in names if function else any(name.startswith("test_") for name in names)


def test_each_claim_has_a_check_and_each_measurement_a_claim():
    assert [name for name, claim in LISTED.claims.items() if not (claim.tests or claim.measured)] == []
    assert {claim.measured for claim in LISTED.claims.values()} - {None} == set(LISTED.measurements)
    for claim in LISTED.claims.values():
        assert bool(claim.measured) == bool(claim.requires)
        for requirement in claim.requires:
            path, _, bound = judge.parts(requirement)
            assert path and bound


PARSERS = {
    "benchmarks.dense": lambda: peers.parse(dense.CASE),
    "benchmarks.moe": lambda: peers.parse(moe.CASE),
    "benchmarks.sweep": sweep.parse,
    "benchmarks.fits": fits.parse,
    "benchmarks.grouped": grouped.parse,
    "benchmarks.choices": choices.parse,
    "benchmarks.losses": losses.parse,
}


@pytest.mark.parametrize("name", LISTED.measurements)
def test_the_commands_are_as_their_programs_take_them(name, monkeypatch):
    python, dash, module, *arguments = shlex.split(LISTED.measurements[name].command)
    assert (python, dash) == ("python", "-m")
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    if module in PARSERS:
        options = PARSERS[module]()
        assert str(options.out) == "OUT.json" and getattr(options, "fresh", []) in ([], ["remat", "ours_best"])
        if module == "benchmarks.losses":
            load(options.config, [*options.overrides, f"train.steps={options.steps}"])
        else:
            gpus = getattr(options, "fsdp", 1) * getattr(options, "expert", 1)
            assert LISTED.measurements[name].gpus == gpus
    elif module == "jaxoffload":
        assert arguments[-1] == "--json"
        made_by(arguments[1], arguments[2:-1])
    else:
        assert module == "pytest" and arguments[:2] == ["-m", "gpu"] and arguments[-2:] == ["--junitxml", "OUT.xml"]
        for claim in LISTED.claims.values():
            for path, *_ in map(judge.parts, claim.requires if claim.measured == name else ()):
                assert "mark.gpu" in (ROOT / path[0]).read_text() or "on_cpu_and_gpu" in (ROOT / path[0]).read_text()


@pytest.mark.parametrize("gpus, count", [(1, 4), (2, 2)])
def test_parts_of_eight_minutes_measure_all(gpus, count):
    chosen = {name: m for name, m in LISTED.measurements.items() if m.gpus == gpus}
    parts = [claims.part_of(chosen, number, count) for number in range(1, count + 1)]
    assert sorted(itertools.chain(*parts)) == sorted(chosen)
    assert all(sum(chosen[name].seconds for name in part) < claims.LIMIT for part in parts)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--only", "dense-fsdp"], "argument --only: dense-fsdp needs --gpus 2, and --gpus is 1"),
        (["--only", "grouped", "--part", "1/4"], "not allowed with argument"),
        (["--only", "grouped", "dens"], "invalid choice: 'dens'"),
        (["--part", "5/4"], "'5/4' is not I/N"),
    ],
)
def test_what_would_measure_nothing_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        claims.parse(arguments)
    assert said in capsys.readouterr().err


# --- the judge

RESULT = {
    "ratios": {"ours/saved": 1.002, "won_back": None},
    "modes": {"ours": {"temp_gib": 17.2}, "remat": {"temp_gib": 18.3}},
    "lines": [{"how": "te", "of dense": 0.9}, {"how": "mosaic", "of dense": 0.7}],
    "exit status": 0,
}


@pytest.mark.parametrize(
    "requirement, verdict, found",
    [
        (["ratios", "ours/saved", "<=", 1.003], "holds", [1.002]),
        (["ratios", "ours/saved", "<=", 1.001], "fails", [1.002]),
        (["ratios", "remat/ours", ">=", 1.0], "not run", []),
        (["modes", "ours", "temp_gib", "<", "modes", "remat", "temp_gib"], "holds", [17.2]),
        (["modes", "ours", "temp_gib", ">", "modes", "remat", "temp_gib"], "fails", [17.2]),
        (["modes", "ours", "temp_gib", "<", "modes", "saved", "temp_gib"], "not run", [17.2]),
        (["lines", {"how": "te"}, "of dense", ">=", 0.8], "holds", [0.9]),
        (["lines", {}, "of dense", ">=", 0.8], "fails", [0.9, 0.7]),
        (["lines", {"how": "ragged"}, "of dense", ">=", 0.8], "not run", []),
        (["ratios", "won_back", ">=", 0.5], "not run", []),
        (["exit status", "==", 0], "holds", [0]),
    ],
)
def test_one_requirement(requirement, verdict, found):
    assert judge.judge([requirement], RESULT) == (verdict, [found])
    assert judge.judge([requirement], {}) == ("not run", [[]])


def copies_of_llama_1b():
    """What its profile holds: 15 layers' copies of each residual and those of the empty row, there and back."""
    sizes = {"layer_input": [128], "attn/context": [128, 4], "mlp_input": [128]}
    return [
        Move(name, layer, direction, mib * 2**20, 10.0, 3.0, 0.5, "Stream #14")
        for direction in ("d2h", "h2d")
        for name, parts in sizes.items()
        for mib in parts
        for layer in (None, *range(15))
    ]


@pytest.mark.parametrize(
    "change, verdict",
    [
        (lambda moves: moves, "holds"),
        (lambda moves: moves[:-1], "fails"),
        (lambda moves: [m for m in moves if m.layer != 7], "fails"),
        (lambda moves: [dataclasses.replace(m, layer=None) for m in moves], "not run"),
        (lambda moves: [dataclasses.replace(m, residual="") for m in moves], "fails"),
        (lambda moves: [dataclasses.replace(m, residual="layer_input") for m in moves], "fails"),
        (lambda moves: [dataclasses.replace(m, bytes=1) for m in moves], "fails"),
        (lambda moves: [dataclasses.replace(m, exposed_ms=-1.0) for m in moves], "fails"),
        (lambda moves: [dataclasses.replace(m, exposed_ms=4.0) for m in moves], "fails"),
    ],
    ids=[
        "all",
        "one less",
        "a layer less",
        "no layers",
        "of nobody",
        "all of one",
        "no bytes",
        "less than none",
        "more",
    ],
)
def test_a_profile_must_list_every_residuals_copies_layer_by_layer(change, verdict):
    profile = Profile("a GPU", 100.0, (99.0, 101.0), 90.0, 0.0, tuple(change(copies_of_llama_1b())), ())
    assert judge.judge(LISTED.claims["profile"].requires, json.loads(profile.to_json()))[0] == verdict


def test_the_worst_of_several_counts():
    right, wrong, missing = (
        ["ratios", "ours/saved", "<=", 2],
        ["ratios", "ours/saved", "<", 1],
        ["ratios", "x", "<", 1],
    )
    verdict = lambda *requires: judge.judge(requires, RESULT)[0]
    assert verdict(right, right) == "holds" and verdict(right, missing) == "not run"
    assert verdict(missing, wrong, right) == "fails" and verdict() == "not run"


def test_what_another_part_measured_stays(tmp_path):
    path = tmp_path / "claims.json"
    judge.merge({"b": {"verdict": "holds"}, "c": {"verdict": "fails"}}, path)
    judge.merge({"a": {"verdict": "fails"}, "c": {"verdict": "holds"}}, path)
    assert [(name, one["verdict"]) for name, one in judge.records(path).items()] == [
        ("a", "fails"),
        ("b", "holds"),
        ("c", "holds"),
    ]
    assert judge.records(tmp_path / "none.json") == {}


SMALL = Listed(
    {"m": Measurement("python -m m", 10)},
    {
        "one": Claim("One.", tests=["t.py::test_a", "t.py::test_b"]),
        "two": Claim("Two.", tests=["u.py"]),
        "three": Claim("Three.", measured="m", requires=[["ratios", "ours/saved", "<=", 1.003]]),
    },
)


def test_a_record_is_of_this_sentence_command_and_requirement():
    before = SMALL.judged("m", RESULT)["three"]
    assert before["verdict"] == "holds" and before["measured"] == [[1.002]]
    assert judge.still(before, SMALL.judged("m", {})["three"]) == "holds" and judge.still({}, before) == "not run"
    for key in ("says", "command", "required"):
        assert judge.still(before, SMALL.judged("m", {})["three"] | {key: "other"}) == "not run"


# --- measuring


PRINTS = "import json, sys; print(json.dumps({'ratios': {'ours/saved': 1.0}})); sys.exit(3)"
WRITES = "import sys; open(sys.argv[1], 'w').write('{\"a\": 1}'); print('not this')"
TESTED = """<testsuites><testsuite tests="5" failures="1" errors="0" skipped="2" time="1.0">
<testcase classname="tests.test_a" name="test_one[x]"/><testcase classname="tests.test_a" name="test_one[y]"><skipped/>
</testcase><testcase classname="tests.test_b" name="test_two"><failure/><system-out/></testcase>
<testcase classname="tests.test_a" name="test_one[z[0]]"><error/></testcase></testsuite></testsuites>"""


@pytest.mark.parametrize(
    "program, said",
    [
        (f"-c {shlex.quote(PRINTS)}", {"ratios": {"ours/saved": 1.0}, "exit status": 3}),
        (f"-c {shlex.quote(WRITES)} OUT.json", {"a": 1, "exit status": 0}),
        (
            f"-c {shlex.quote(f'import sys; open(sys.argv[1], "w").write({TESTED!r})')} OUT.xml",
            {
                "tests/test_a.py": {"passed": 1, "failed": 1, "skipped": 1},
                "tests/test_b.py": {"passed": 0, "failed": 1, "skipped": 0},
                "exit status": 0,
            },
        ),
        (f"-c {shlex.quote(WRITES + '; sys.exit(3)')} OUT.json", {"exit status": 3}),
        ("-c 'raise SystemExit(1)' OUT.json", {"exit status": 1}),
        ("-c 'print(12345, file=None)'", {"exit status": 0}),
    ],
    ids=["printed", "written", "pytest's", "written before it failed", "nothing written", "no JSON"],
)
def test_what_a_command_says(program, said):
    assert measure.result_of(f"python {program}", 60) == said


def test_what_takes_too_long_is_ended_and_says_nothing(tmp_path):
    child = f"import time; time.sleep(3); open({str(tmp_path / 'alive')!r}, 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert measure.result_of(f"python -c {shlex.quote(parent)}", 1.0) == {}
    time.sleep(3)
    assert not (tmp_path / "alive").exists()


def test_a_part_is_judged_and_recorded(tmp_path, monkeypatch, capsys):
    path = tmp_path / "claims.json"
    monkeypatch.setattr(claims, "read", lambda: SMALL)
    monkeypatch.setattr(claims, "merge", lambda measured: judge.merge(measured, path))
    monkeypatch.setattr(measure, "devices", lambda: ["A GPU"])
    for ratio, status in ((1.0, 0), (1.5, 1)):
        monkeypatch.setattr(measure, "result_of", lambda *_, ratio=ratio: {"ratios": {"ours/saved": ratio}})
        assert claims.main(["--part", "1/1", "--commit", "abc"]) == status
    assert re.search(r"three +fails +ratios ours/saved <= 1.003 \(1.5\)", capsys.readouterr().out)
    holds_but_fails = {"ratios": {"ours/saved": 1.0}, "exit status": 1}
    monkeypatch.setattr(measure, "result_of", lambda *_: holds_but_fails)
    assert claims.main(["--commit", "abc"]) == 1
    table_of_two = capsys.readouterr().out
    assert re.search(r"^three +holds ", table_of_two, re.M) and "exit status == 0 (1)" in table_of_two
    (one,) = judge.records(path).values()
    assert one["device"] == "1 A GPU" and one["commit"] == "abc" and "jax" in one["versions"]
    monkeypatch.setattr(measure, "result_of", lambda *_: {})
    assert claims.main([]) == 1 and judge.records(path) == {"three": one}  # what was found stays
    with pytest.raises(SystemExit, match="needs 2 H200s; GPUs that are here: A GPU"):
        claims.main(["--gpus", "2"])
    with pytest.raises(SystemExit):
        claims.main(["--part", "5/4"])
    assert "'5/4' is not I/N, such as 1/4" in capsys.readouterr().err


# --- the table after a run of pytest


def stats(**outcomes):
    """What pytest's reporter has: outcome -> reports; a node ends in '*' if only a GPU runs it."""
    report = lambda node: types.SimpleNamespace(nodeid=node.rstrip("*"), keywords={"gpu": 1} if "*" in node else {})
    return {outcome: [report(node) for node in nodes] for outcome, nodes in outcomes.items()}


def shown(whole=True, **outcomes):
    text = table(SMALL, verdicts(stats(**outcomes)), whole)
    return {line.split("  ")[0]: re.split(" {2,}", line)[1] for line in text.splitlines() if "  " in line}


B, U = "t.py::test_b", "u.py::test_c"


def test_a_claim_holds_if_all_its_tests_passed():
    found = shown(passed=["t.py::test_a[1]", "t.py::test_a[2]", B, U, "t.py::test_ab"])
    assert (found["one"], found["two"], found["three"]) == ("holds", "holds", "not run")
    assert shown(passed=["t.py::test_a[cpu]", B], skipped=["t.py::test_a[gpu]*"])["one"] == "holds"


@pytest.mark.parametrize(
    "outcomes, verdict",
    [
        ({"passed": ["t.py::test_a"]}, "not run"),
        ({"passed": ["t.py::test_ab", B]}, "not run"),
        ({"passed": ["t.py::test_a[1]", B], "failed": ["t.py::test_a[2]"]}, "fails"),
        ({"passed": ["t.py::test_a", B], "error": ["t.py::test_a"]}, "fails"),
        ({"failed": ["t.py::test_a"]}, "fails"),
        ({"passed": ["t.py::test_a[1]", B], "skipped": ["t.py::test_a[2]"]}, "not run"),
        ({"passed": [B], "skipped": ["t.py::test_a*"]}, "not run"),
        ({"passed": [B], "xfailed": ["t.py::test_a"]}, "not run"),
        ({"passed": ["t.py::test_a", B], "whole": False}, "not run"),
        ({}, "not run"),
    ],
)
def test_a_claim_does_not_hold(outcomes, verdict):
    assert shown(**outcomes)["one"] == verdict
