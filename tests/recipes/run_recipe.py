"""Runs the program of a recipe as a framework's user has it, and as the recipe changes it; prints what the page shows.

    python tests/recipes/run_recipe.py docs/recipes/flax-linen.md

The program is the page's diff: the lines without a plus sign, then those without a minus sign. The two must give the
same bits, and `verify` must hold.
"""

import importlib.metadata
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxoffload import residuals, verify

DIFF = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)

PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RELEASES = {"haliax": "marin-haliax", "levanter": "marin-levanter", "maxtext": "maxtext"}  # on PyPI


class Program(NamedTuple):
    """A loss, its arguments, and the function of them that trains: what it returns must not change."""

    loss: Callable[..., Any]
    step: Callable[..., Any]
    arguments: tuple[Any, ...]


def sides(diff: str) -> tuple[str, str]:
    """Return the program before and after a diff."""
    lines = diff.splitlines()
    before, after = ([line[1:] for line in lines if line[:1] != sign] for sign in "+-")
    return "\n".join(before), "\n".join(after)


def made_by(code: str, name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": name}
    exec(compile(code, name, "exec"), names)
    return names


def trained(program: Program) -> list[np.ndarray]:
    """Return the results of two steps, for the first can change what its arguments hold, such as random numbers."""
    return [np.asarray(x) for _ in range(2) for x in jax.tree.leaves(program.step(*program.arguments))]


def assert_same_bits(theirs: list[np.ndarray], ours: list[np.ndarray]) -> None:
    assert len(theirs) == len(ours) > 2, (len(theirs), len(ours))
    for number, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        assert same, f"result {number} of {len(theirs)} differs by up to {np.abs(a - b).max()}"


def assert_verified(program: Program) -> None:
    found = verify(program.loss, *program.arguments)
    assert found.ok and found["gradients"].verdict == "holds", found


def named_rows(program: Program) -> str:
    """Return the table as printed, without the rows of values that have no name."""
    lines = str(residuals(program.loss, *program.arguments)).splitlines()
    return "\n".join(line for line in lines if not line.startswith("(untagged) "))


def print_versions(page: Path) -> None:
    names = [*([RELEASES[page.stem]] if page.stem in RELEASES else []), "jax"]
    print("versions:", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))


def main(page: Path) -> None:
    text = page.read_text()
    (diff,) = DIFF.findall(text)
    made = [made_by(code, f"{page.stem} {side}") for code, side in zip(sides(diff), ("before", "after"), strict=True)]
    theirs, ours = (Program(*(names[field] for field in Program._fields)) for names in made)
    assert_same_bits(trained(theirs), trained(ours))
    assert_verified(ours)
    print_versions(page)
    print(named_rows(ours))
    for block in PYTHON.findall(text):
        exec(compile(block, page.stem, "exec"), made[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
