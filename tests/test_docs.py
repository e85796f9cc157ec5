"""The documentation: its code runs and prints what the pages show, links lead somewhere, tables match their files."""

import contextlib
import io
import re

import pytest
from pages import ROOT, result

from benchmarks.dense import table

PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *ROOT.glob("docs/*.md")]
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


@pytest.mark.parametrize("name, blocks", [("README.md", 1), ("docs/tutorial.md", 7), ("docs/policy.md", 1)])
def test_the_code_of_a_page_prints_what_the_page_shows(name, blocks):
    found = list(printed_by((ROOT / name).read_text()))
    assert [printed for printed, _ in found] == [shown for _, shown in found]
    assert len(found) >= blocks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_headings_that_a_page_links_to_exist(page):
    anchor = lambda heading: re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if fragment:
            text = there.read_text()
            headings = {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
            assert fragment in headings | set(re.findall(r"^\((.*)\)=$", text, re.MULTILINE)), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_begins_with_a_mark(page):
    """In Markdown, a mark at the start of a line ends the paragraph."""
    assert not re.findall(r"^\s*<!--.*", page.read_text(), re.MULTILINE)


def test_the_table_of_contents_has_every_page():
    listed = re.findall(r"^([a-z-]+)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in ROOT.glob("docs/*.md") if page.stem != "index")


def test_the_architecture_has_every_module_of_the_library_and_its_engine():
    named = set(re.findall(r"`([\w/]+)`", (ROOT / "docs/architecture.md").read_text()))
    library = ROOT / "jaxoffload"
    modules = {path.stem for folder in (library, library / "_engine") for path in folder.glob("*.py")} - {"__init__"}
    packages = {f"{path.parent.name}/" for path in library.glob("*/__init__.py")} - {"_engine/"}
    assert sorted((modules | packages) - named) == []


def test_the_readme_and_the_glossary_stay_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    _, _, *terms = re.findall(r"^\|.*\|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert len(terms) <= 20


def tables(page):
    """Yield the result files, the head and the rows of each table that names its source."""
    source = re.compile(r"^.*?From\s+((?:\[[\w.-]+\.json\]\([^)]*\)[\s,and]*)+)[^|]*?\n\n((?:\|.*\n)+)", re.M | re.S)
    for part in re.split(r"(?<=\|\n)\n", page):
        if found := source.match(part):
            head, _, *rows = ([cell.strip() for cell in row.strip("|\n").split("|")] for row in found[2].splitlines())
            yield re.findall(r"\[([\w.-]+)\.json\]", found[1]), head, rows


def test_tables_of_step_times_are_their_files():
    """A row whose name is code is a mode, or a line, of the file above."""
    form = {"step": ("step_ms", "{:.0f} ms"), "temporary device memory": ("temp_gib", "{:.1f} GiB")}
    compared = 0
    for (name, *_), head, rows in tables((ROOT / "docs/performance.md").read_text()):
        measured = result(name)
        for label, *cells in rows:
            if not (mode := re.search(r"\(`(.+)`\)", label)):
                continue
            for column, cell in zip(head[1:], cells, strict=True):
                if column in form:
                    key, text = form[column]
                    assert cell == text.format(measured["modes"][mode[1]][key]), (name, label)
                else:
                    (line,) = (x for x in measured["lines"] if (x["backend"], x["groups"]) == (mode[1], "even"))
                    assert column == "speed of a dense matmul" and cell == f"{100 * line['of dense']:.0f} %"
                compared += 1
    assert compared == 27


def test_the_readmes_table_is_a_subset_of_the_whole():
    whole = table(result("dense"))
    rows = [row for row in (ROOT / "README.md").read_text().splitlines() if " ms |" in row]
    assert len(rows) == 4 and all(row in whole for row in rows)
