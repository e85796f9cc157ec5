"""The pages that users read, and the result files."""

import json
import re
from typing import Any

from common import ROOT

RESULTS = ROOT / "benchmarks/results"
README = (ROOT / "README.md").read_text()
PAGES = "\n\n".join([README, *(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))])
COMMENT = re.compile(r"\s*<!--.*?-->", re.DOTALL)
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TEXT = " ".join(COMMENT.sub("", PAGES).split())  # as one line


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def verified(name: str) -> dict[tuple[str, str], str]:
    """Return (loss or step, check) -> verdict, as `jaxoffload verify` printed them on GPUs."""
    _, _, printed = (RESULTS / f"verify-{name}.txt").read_text().partition("\n\n")
    return {
        (of, check): verdict for of, verdict, check in re.findall(r"^(\w+): (\w+(?: \w+)?) +(\w+): ", printed, re.M)
    }


def sections_naming(*names: str) -> str:
    """Return the sections of the pages that name one of these result files, without code and comments, as one line."""
    sections = re.split(r"^#+ .*$", CODE.sub("", COMMENT.sub("", PAGES)), flags=re.MULTILINE)
    named = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, names))})\.(?:json|txt)")
    return " ".join(" ".join(section.split()) for section in sections if named.search(section))
