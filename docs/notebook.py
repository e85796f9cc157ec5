"""Write the tutorial as a notebook, docs/tutorial.ipynb: python docs/notebook.py"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "tutorial.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
COMMENT = re.compile(r" *<!--.*?-->", re.DOTALL)
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
INSTALL = "# In a clone of the repository, whose docs/ has this notebook.\n%pip install --quiet .."


def notebook() -> str:
    """Return the page's text and code as cells, and what the page says that code prints as its output."""
    first, *rest = BLOCK.split(COMMENT.sub("", PAGE.read_text()))
    cells = [cell("markdown", first), cell("code", INSTALL)]
    for language, block, after in itertools.batched(rest, 3):
        if language == "python":
            cells.append(cell("code", block))
        else:
            cells[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": block}]
        cells += [cell("markdown", after)] if after.strip() else []
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 4}, indent=1) + "\n"


def cell(kind: str, source: str) -> dict[str, Any]:
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": source.strip("\n"), **more}


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook())
