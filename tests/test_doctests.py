"""The examples in the docstrings of the public names: each runs as pasted, with nothing imported before it."""

import doctest
import inspect

import pytest

import jaxoffload
from jaxoffload import grouped, linen, nnx, proof

PUBLIC = {
    f"{module.__name__}.{name}": value
    for module in (jaxoffload, grouped, proof)
    for name, value in vars(module).items()
    if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value))
} | {f"{module.__name__}.scan": module.scan for module in (linen, nnx)}


def examples(name):
    """Return the examples in the docstrings of an object and of its methods."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(inspect.unwrap(PUBLIC[name]), name, module=False, globs={})
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", [name for name in PUBLIC if examples(name)])
def test_examples_print_what_they_say(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples(name):
        said = []
        runner.run(test, out=said.append)
        assert not said, "".join(said)


def test_every_public_name_has_an_example():
    assert [name for name in PUBLIC if not examples(name)] == []
