"""The documentation: its code runs and prints what the pages show, and its links and names lead somewhere."""

import contextlib
import functools
import io
import os
import re
import subprocess
import sys

import jax
import pytest
from common import PATIENCE, inherited_flags, start
from pages import ROOT

import jaxoffload.linen
import jaxoffload.nnx

PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *ROOT.glob("docs/**/*.md")]
CODE = re.compile(r"^```(python|text|)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def printed_by(page):
    """Yield what each Python block prints, run in order in one namespace, and the output that the page shows after
    it."""
    made = {}
    blocks = CODE.findall(page)
    for (language, code), (after, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, "page", "exec"), made)
            yield out.getvalue(), shown if after != "python" and out.getvalue() else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, blocks",
    [
        ("README.md", 1),
        ("docs/tutorial.md", 7),
        ("docs/policy.md", 1),
        ("docs/does-it-pay.md", 1),
        ("docs/training-loop.md", 5),
        ("docs/plan.md", 1),
        ("docs/accumulation.md", 3),
        ("docs/stages.md", 2),
    ],
)
def test_the_code_of_a_page_prints_what_the_page_shows(name, blocks):
    found = list(printed_by((ROOT / name).read_text()))
    assert [printed for printed, _ in found] == [shown for _, shown in found]
    assert len(found) >= blocks


def test_steps_on_pages_are_compiled_with_the_options():
    """Readers copy them; without the options offload is slower than recomputing."""
    pages = {page: page.read_text() for page in PAGES if page.name != "upstream.md"}
    code = {
        page: re.findall(r"^```(?:python|diff)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for page, text in pages.items()
    }
    lines = [
        (page, line) for page, blocks in code.items() for line in "\n".join(blocks).splitlines() if line[:1] != "-"
    ]
    steps = [(page, line) for page, line in lines if re.search(r"(?:jax\.|filter_)jit\(", line)]
    assert len(steps) > 8
    assert [(page, line) for page, line in steps if "compiler_options=" not in line] == []


UPSTREAM = (ROOT / "docs/upstream.md").read_text()
ENTRIES = re.split(r"^### ", UPSTREAM, flags=re.MULTILINE)[1:]
SEEN = ("0.11.2", "0.12.")  # versions of jax with which the programs on docs/upstream.md ran
REPRODUCTION = re.compile(
    r"<!-- reproduction -->\n\n```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
REPRODUCTIONS = [
    pytest.param(*found, id=entry.partition("\n")[0]) for entry in ENTRIES for found in REPRODUCTION.findall(entry)
]


def anchor(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.long
@pytest.mark.skipif(not jax.__version__.startswith(SEEN), reason="the page was not written for this jax")
@pytest.mark.parametrize("program, shown", REPRODUCTIONS)
def test_upstream_has_the_fault(program, shown):
    """Each program runs in a process of its own, because jaxoffload replaces rules of JAX in ours."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": inherited_flags()}
    process = start([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=PATIENCE)
    assert out == shown, err


def test_every_python_block_of_upstream_is_a_reproduction():
    """Programs for a GPU are in blocks of `py`, which no test runs."""
    marked = UPSTREAM.count("<!-- reproduction -->")
    assert UPSTREAM.count("\n```python\n") == marked == len(REPRODUCTIONS) >= 12


def test_every_fault_names_versions_report_and_workaround_and_its_files_exist():
    """And the places that refer to one find it."""
    for entry in ENTRIES:
        if not entry.startswith("Streams and slices"):  # a list of several
            assert re.findall(r"^- ([^:]+):", entry, re.MULTILINE) == ["Seen with", "Upstream", "Here"], entry
    for path in re.findall(r"`((?:jaxoffload|models|tests)/[\w/]+\.py)`", UPSTREAM):
        assert (ROOT / path).exists(), path
    anchors = {anchor(entry.partition("\n")[0]) for entry in ENTRIES}
    sources = [path for folder in ("jaxoffload", "models", "tests") for path in ROOT.glob(f"{folder}/**/*.py")]
    named = {anchor for path in sources for anchor in re.findall(r"upstream\.md#([\w-]+)", path.read_text())}
    assert named and named <= anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_headings_that_a_page_links_to_exist(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("https://"):
            continue
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if fragment:
            text = there.read_text()
            headings = {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
            assert fragment in headings | set(re.findall(r"^\((.*)\)=$", text, re.MULTILINE)), target


def test_names_of_code_exist():
    """In the file that a page names beside them; a private name in some file; a public one in the library."""
    text = "\n".join(page.read_text() for page in PAGES)
    beside = re.findall(r"`(\w+)`\s+in\s+`((?:jaxoffload|models|tests|benchmarks)/[\w/]+\.py)`", text)
    assert len(beside) >= 9
    assert [(name, path) for name, path in beside if not re.search(rf"\b{name}\b", (ROOT / path).read_text())] == []
    sources = [path for folder in ("jaxoffload", "models") for path in ROOT.glob(f"{folder}/**/*.py")]
    modules = {part for path in sources for part in (path.stem, path.parent.name)}
    defined = {
        name
        for path in sources
        for name in re.findall(r"^(?: *(?:def|class) )?(\w+)(?: =|[(:])", path.read_text(), re.M)
    }
    assert set(re.findall(r"`(_\w+)[`(]", text)) - modules - defined == set()
    public = set(re.findall(r"`jaxoffload\.([\w.]+)[`(]", text))
    assert {"proof.exact_options", "scan"} <= public
    for name in public:
        functools.reduce(getattr, name.split("."), jaxoffload)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_begins_with_a_mark(page):
    """In Markdown, a mark at the start of a line ends the paragraph."""
    assert not re.findall(r"^\s*<!--.*", page.read_text(), re.MULTILINE)


def test_the_table_of_contents_has_every_page():
    listed = re.findall(r"^([a-z/-]+)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in ROOT.glob("docs/**/*.md")]
    assert sorted(listed) == sorted(str(page) for page in pages if page.name != "index")


def test_the_architecture_has_every_module_of_the_library_and_its_engine():
    named = set(re.findall(r"`([\w/]+)`", (ROOT / "docs/architecture.md").read_text()))
    library = ROOT / "jaxoffload"
    modules = {path.stem for pattern in ("*.py", "_engine/**/*.py") for path in library.glob(pattern)} - {"__init__"}
    packages = {f"{path.parent.name}/" for path in library.glob("*/__init__.py")} - {"_engine/"}
    assert sorted((modules | packages) - named) == []


def test_the_readme_and_the_glossary_stay_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    _, _, *terms = re.findall(r"^\|.*\|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert len(terms) <= 20
