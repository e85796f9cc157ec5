"""The README: its example runs as printed, its picture is that of the files; the config block is a policy."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import pytest
import yaml
from autodiff import count, kept
from common import PATIENCE, start
from jax.ad_checkpoint import checkpoint_name
from pages import PAGES, README, ROOT
from softmax_kernel import kernels, softmax

import jaxoffload
from docs import figures, notebook
from jaxoffload import Policy, residuals
from jaxoffload._policy import size_in_bytes
from jaxoffload.proof import _command as commands
from models.budget import summary
from models.config import load
from models.sharding import abstract_mesh
from models.step import program

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


POLICY = (ROOT / "docs/policy.md").read_text()


def block(language, page=README):
    (code,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return code


def three_lines():
    """No GPU is measured here, so another machine's file stands in for its."""
    _, _, after = README.partition("<!-- claim: three-lines -->")
    lines = block("", after.partition("## ")[0]).splitlines()
    return [line.replace("gpu.json", str(ROOT / "machines/h200.json")) for line in lines]


@pytest.mark.claim("three-lines")
def test_the_three_lines():
    """The commands take what they say, and the last one has the budget and the names of the one before."""
    first, second, third = (shlex.split(line, comments=True) for line in three_lines())
    (*python, measure, into, measured), (*_, program, file, every, sized, machine) = first, third
    assert python == ["python", "-m", "jaxoffload"] and callable(getattr(commands, measure)) and into == ">"
    options = commands.parse(second[3:])
    assert options.run is commands.plan and options.arguments == [file] and options.machine.device == "NVIDIA H200"
    assert importlib.util.find_spec(program)
    config = load(ROOT / file, [every, sized, machine])
    assert config.remat.budget == options.budget and config.remat.machine == measured and not config.remat.residuals


@pytest.mark.claim("three-lines")
@pytest.mark.parametrize("line", [2, 3])
def test_without_the_extra_the_lines_name_it_and_print_no_traceback(line, tmp_path):
    named = [re.match(r"[\w-]+", needed)[0] for needed in EXTRAS["train"]]
    modules = [name.removesuffix("-checkpoint") for name in named]
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules |= dict.fromkeys({modules})")
    _, *arguments = shlex.split(three_lines()[line - 1], comments=True)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    process = start([sys.executable, *arguments], cwd=ROOT, env=environment)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode and "Traceback" not in said
    assert f"models needs {', '.join(sorted(modules))}: pip install '.[train,cuda13]'" in said.splitlines()[-1]


def test_pictures_are_those_of_the_result_files():
    """`python docs/figures.py` draws them."""
    for name, draw in figures.PICTURES.items():
        assert draw() == (ROOT / f"docs/images/{name}.svg").read_text()
        assert f"(docs/images/{name}.svg)" in README


def test_the_notebook_is_the_tutorial():
    """`python docs/notebook.py` writes it."""
    assert notebook.notebook() == notebook.NOTEBOOK.read_text()
    cells = json.loads(notebook.notebook())["cells"]
    code = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "code" and "%pip" not in cell["source"])
    printed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert printed == "".join(output["text"] for cell in cells for output in cell.get("outputs", []))


def test_extras_that_pages_and_messages_install_exist():
    texts = [
        PAGES,
        *(path.read_text() for folder in ("jaxoffload", "models") for path in (ROOT / folder).rglob("*.py")),
    ]
    named = re.findall(r"(?<=[' ])(?:\.|jaxoffload)\[([\w,-]+)\]", "\n".join([*texts, (ROOT / "Makefile").read_text()]))
    assert len(named) > 5 and {extra for extras in named for extra in extras.split(",")} <= EXTRAS.keys()
    assert "'.[train,cuda13]'" in README


@pytest.mark.slow
@pytest.mark.claim("three-lines")
def test_something_fits_in_the_budget_of_the_three_lines():
    """No GPU is measured here, so a file stands in for it."""
    function, file, budget = re.search(r"plan (\S+) (\S+) --budget (\S+)", README).groups()
    module, _, name = function.partition(":")
    step, args, *_ = getattr(importlib.import_module(module), name)(str(ROOT / file))
    found = jaxoffload.plan(step, *args, budget=budget, machine=ROOT / "machines/h200.json")
    assert found.memory.total <= size_in_bytes(budget) and dict(found.policy.residuals)


@pytest.mark.claim("three-steps")
@pytest.mark.parametrize("naming", ["tag", "checkpoint_name"])
def test_the_three_steps(naming, capsys):
    code = block("python")
    if naming == "checkpoint_name":
        code = code.replace("import Policy, tag", "import Policy\nfrom jax.ad_checkpoint import checkpoint_name")
        code = re.sub(r"\btag\(", "checkpoint_name(", code)
        assert "tag" not in code
    made = {}
    exec(compile(code, "README.md", "exec"), made)
    table = residuals(made["loss"], made["weights"], made["x"])
    assert capsys.readouterr().out == f"{table}\n"
    # Bytes by hand: float32, one row for each of 8 layers; the last layer's stays empty, because that layer is
    # resident.
    assert table.host_bytes == 8 * 4 * 128 * 1024 * 4
    assert made["gradients"]["in"].shape == (8, 256, 1024)
    assert float(made["value"]) > 0 and all(g.any() for g in jax.tree.leaves(made["gradients"]))


@pytest.mark.claim("ten-rules")
def test_the_config_block_is_a_policy_and_names_every_field():
    fields = yaml.safe_load(block("yaml", POLICY))["remat"]
    assert set(fields) == {*Policy.__dataclass_fields__}
    assert Policy(**fields).residuals[0] == ("fc1", "offload")


def test_the_config_block_runs_where_there_are_experts(tmp_path):
    tree = yaml.safe_load((ROOT / "configs/tiny-moe.yaml").read_text()) | yaml.safe_load(block("yaml", POLICY))
    (tmp_path / "moe.yaml").write_text(yaml.safe_dump(tree))
    config = load(tmp_path / "moe.yaml")
    assert "offloaded" in summary(config, program(config, abstract_mesh(config.mesh)))


def dots(policy, f, *args):
    jaxpr = jax.make_jaxpr(jax.grad(lambda *args: jax.checkpoint(f, policy=policy)(*args).sum()))(*args)
    return count(jaxpr, "dot_general")


@pytest.mark.claim("misspelt", "recompute-wins", "two-names", "saved-exp", "saved-attention")
def test_what_it_says_of_jaxs_own_policies():
    policies, x = jax.checkpoint_policies, jnp.ones((4, 4))
    once = lambda x: jnp.sin(checkpoint_name(x @ x, "fc1"))
    named, dots_saved = policies.save_only_these_names, policies.dots_with_no_batch_dims_saveable
    # With a misspelt name the matmul silently runs once more.
    assert dots(named("fc3"), once, x) == dots(named("fc1"), once, x) + 1
    # With matmuls saved, no name can keep one from being saved.
    both = policies.save_from_both_policies(dots_saved, named("another"))
    assert dots(both, once, x) == dots(dots_saved, once, x) == dots(named("fc1"), once, x)
    # Two names of one value, side by side.
    siblings = lambda x: jnp.sin(checkpoint_name(h := x @ x, "p")) * jnp.sin(checkpoint_name(h, "q"))
    assert kept(jax.checkpoint(siblings, policy=named("p", "q")), x) == {("device", "float32", (4, 4)): 2}
    # The output of exp, saved.
    f = jax.checkpoint(lambda x: checkpoint_name(jnp.exp(x), "e"), policy=named("e"))
    assert count(jax.make_jaxpr(jax.grad(lambda x: f(x).sum()))(x), "exp") == 2
    # The output of a kernel, saved. Its other result, which the backward pass also reads, has no name.
    f = jax.checkpoint(lambda x: checkpoint_name(softmax(x), "context"), policy=named("context"))
    assert kernels(jax.make_jaxpr(jax.grad(lambda x: (f(x) ** 2).sum()))(x)) == 2


def test_the_tests_that_the_table_of_requirements_names_exist():
    table = (ROOT / "tests/README.md").read_text()
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", table)
    assert len(named) > 20
    assert [pair for pair in named if f"def {pair[1]}(" not in (ROOT / "tests" / pair[0]).read_text()] == []
