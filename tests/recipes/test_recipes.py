"""The recipes of docs/recipes: the gradients are the framework's own, `verify` holds, pages show what is printed."""

import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from common import ROOT, finish, inherited_flags, start
from described_gpu import compiled, gpu, matmuls, module_of, nothing_cached
from run_recipe import DIFF, made_by, sides

from jaxoffload.proof import exact_options
from jaxoffload.proof._program import hlo

assert gpu and nothing_cached  # fixtures
pytestmark = pytest.mark.claim("recipes")

PAGES = sorted((ROOT / "docs/recipes").glob("*.md"))
NEEDS = {"flax-linen": "flax", "flax-nnx": "flax"}  # others need the module that they are named after
SCRIPTS = {"maxtext": "maxtext_decoders.py"}
IN_CI = ("equinox", "flax-linen", "flax-nnx", "haliax")  # what the other pages ran with, they say
MAKEFILE = (ROOT / "Makefile").read_text()
TEXT = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def interpreter(module: str) -> str:
    """Return the interpreter that has a framework: that of `make recipes`, or this one."""
    if (own := ROOT / f".recipes/{module}/bin/python").exists():
        return str(own)
    if not importlib.util.find_spec(module):
        how = "pip install '.[test]'" if module in IN_CI else "make recipes"
        pytest.skip(f"needs {module}: `{how}` installs it")
    return sys.executable


def exact_flags() -> str:
    """Return the options under which both programs round alike, for those that a framework compiles."""
    text = lambda value: str(value).lower() if isinstance(value, bool) else str(value)
    return inherited_flags(*(f"--{name}={text(value)}" for name, value in exact_options("cpu").items()), devices=4)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_recipe_trains_as_before_and_prints_what_it_shows(page: Path):
    python = interpreter(NEEDS.get(page.stem, page.stem))
    script = ROOT / "tests/recipes" / SCRIPTS.get(page.stem, "run_recipe.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": exact_flags()}
    command = [python, "-W", "ignore", str(script), str(page)]
    printed = finish(start(command, env=environment, cwd=ROOT, stderr=None))
    ((versions, shown),) = re.findall(r"^versions: (.*?)\n(.*)", printed, re.DOTALL | re.MULTILINE)
    assert shown == "".join(TEXT.findall(page.read_text()))
    if page.stem not in IN_CI:
        assert versions in page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_recipe_is_few_lines(page: Path):
    (diff,) = DIFF.findall(page.read_text())
    before, after = ([line for line in side.splitlines() if line.strip()] for side in sides(diff))
    added = [line for line in diff.splitlines() if line[:1] == "+" and line[1:].strip()]
    assert before != after and len(added) <= (4 if page.stem in ("equinox", "flax-linen", "flax-nnx") else 8)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_recipe_says_how_its_step_gets_the_compiler_options(page: Path):
    """By an argument, or by XLA_FLAGS where the framework's jit takes none."""
    text = page.read_text()
    ((_, after),) = map(sides, DIFF.findall(text))
    assert "slower than recomputing" in " ".join(text.split())
    for jit in re.findall(r"(?:jax|eqx)\.(?:filter_)?jit\(.*", after):
        assert "compiler_options=compiler_options()" in jit
    if page.stem in ("axlearn", "flax-nnx", "levanter", "maxtext"):
        assert "`XLA_FLAGS`" in text and "(../frameworks.md#compiler-options)" in text


@pytest.mark.gpu
@pytest.mark.claim("recipes-overlap")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of frameworks that are imported
@pytest.mark.parametrize("name", IN_CI)
def test_copies_of_a_recipe_overlap_on_a_gpu(name, gpu):
    """Compiled with the options: every copy is asynchronous, and a matmul runs between its start and its end."""
    from flax import nnx

    interpreter(NEEDS.get(name, name))
    ((_, after),) = map(sides, DIFF.findall((ROOT / f"docs/recipes/{name}.md").read_text()))
    made = made_by(after, name)
    graph, state = nnx.split(made["arguments"]) if name == "flax-nnx" else (None, made["arguments"])
    leaves, tree = jax.tree.flatten(state)
    moving = [n for n, x in enumerate(leaves) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(arrays):
        given = dict(zip(moving, arrays, strict=True))
        of = jax.tree.unflatten(tree, [given.get(n, x) for n, x in enumerate(leaves)])
        return made["loss"](*(nnx.merge(graph, of) if graph else of))

    module = module_of(compiled(gpu, jax.value_and_grad(loss), [leaves[n] for n in moving]))
    assert len(hlo.host_copies(module)) >= 2
    beside = []
    for computation in {line.computation for line in module if line.opcode == "fusion-start" and line.on_host}:
        lines = [line for line in module if line.computation == computation]
        at = {line.name: n for n, line in enumerate(lines)}
        beside += [len(matmuls(lines[at[e.operands[0]] : n])) for n, e in enumerate(lines) if e.opcode == "fusion-done"]
    assert len(beside) >= 4 and all(beside)  # there and back, with two layers per iteration


@pytest.mark.claim("who-takes-options")
def test_which_jits_take_compiler_options():
    """An option that XLA does not know is refused where it arrives."""
    from flax import nnx

    x, unknown = jnp.ones(2), {"xla_no_such_option": True}
    for jit in (jax.jit, pytest.importorskip("equinox").filter_jit, pytest.importorskip("haliax").named_jit):
        assert jit(jnp.sin, compiler_options={})(x).shape == (2,)
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_no_such_option'"):
            jit(jnp.sin, compiler_options=unknown)(x)
    assert "compiler_options" not in inspect.signature(nnx.jit).parameters


def test_pages_name_the_versions_that_make_recipes_installs():
    pins = re.findall(
        r"([\w-]+)==([\w.]+)", re.search(r"^levanter = .*?^axlearn", MAKEFILE, re.DOTALL | re.MULTILINE)[0]
    )
    assert len(pins) == 2
    for name, version in pins:
        assert f"{name} {version}" in (ROOT / f"docs/recipes/{name.removeprefix('marin-')}.md").read_text()
