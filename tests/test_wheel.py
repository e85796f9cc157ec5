"""The wheel: it holds only the library, requires only jax and numpy, and works where nothing else is installed."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from email import message_from_string
from pathlib import Path

import jax
import pytest
import yaml
from common import ROOT, inherited_flags

import jaxoffload
from jaxoffload.proof._command import main

PROGRAM = """
import sys

import jax
import jax.numpy as jnp

import jaxoffload
from jaxoffload import Policy, tag

policy = Policy(residuals={"h": "offload"}, min_offload_bytes=0)


def layer(x, w):
    h = tag(x @ w, "h")
    return x + tag(jnp.sin(h), "act"), None


def loss(w, x):
    return jaxoffload.scan(layer, x, w, policy=policy)[0].sum()


w, x = 0.1 * jnp.ones((4, 8, 8)), jnp.ones((2, 8))
table = jaxoffload.residuals(loss, w, x)
print(table)
assert table.host_bytes == 4 * 2 * 8 * 4, table.host_bytes  # 3 layers and a padding row; float32
assert jax.jit(jax.grad(loss))(w, x).any()
print(jaxoffload.__version__, jaxoffload.__file__)
print(sorted({name.partition(".")[0] for name in sys.modules if sys.modules[name]}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built from a copy, because setuptools writes next to its sources."""
    source, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs", "results", "_build")
    shutil.copytree(ROOT, source, ignore=unwanted)
    isolation = [] if importlib.util.find_spec("setuptools") is None else ["--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", *isolation, "--wheel-dir", out, source]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not isolation and re.search("No matching distribution|connection", done.stderr):
        pytest.skip("needs setuptools, which is neither installed nor can be fetched")
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(files.read(name).decode())


def closure(*names):
    """Return the installed distributions that these need, including themselves, without extras."""
    found, todo = {}, list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            todo += [re.match(r"[\w.-]+", r)[0] for r in found[name].requires or () if ";" not in r]
    return found.values()


def test_it_holds_the_library_alone(wheel):
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"jaxoffload"}
    package = ROOT / "jaxoffload"
    sources = {str(path.relative_to(ROOT)) for path in package.rglob("*.py")} | {"jaxoffload/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_requires_jax_and_numpy(metadata):
    needed = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(re.match(r"[\w.-]+", r)[0] for r in needed) == ["jax", "numpy"]
    assert all(">=" in r for r in needed)
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = {"cuda12", "cuda13", "te", "te-cuda13", "train", "test", "docs"}
    extras |= {"convert", "tensorboard", "recipes"}
    assert set(metadata.get_all("Provides-Extra")) == extras


def test_it_works_where_nothing_else_is_installed(wheel, metadata, tmp_path):
    """In an interpreter without site-packages; its path is the wheel and a folder of links to what jax needs."""
    target, needed = tmp_path / "target", tmp_path / "needed"
    with zipfile.ZipFile(wheel) as files:  # what pip does with a pure Python wheel
        files.extractall(target)
    needed.mkdir()
    for distribution in closure("jax", "numpy"):
        for top in {Path(file).parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (needed / top).exists():
                (needed / top).symlink_to(distribution.locate_file(top))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XLA_", "JAX_"))}
    environment |= {"PYTHONPATH": f"{target}:{needed}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": inherited_flags()}
    command = [sys.executable, "-S", "-W", "error", "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *table, version, modules = done.stdout.splitlines()
    assert version == f"{metadata['Version']} {target}/jaxoffload/__init__.py"
    assert any(line.split()[0] == "h" and "offloaded" in line for line in table)
    others = {"flax", "optax", "orbax", "grain", "tokenizers", "yaml", "matplotlib", "models", "transformer_engine"}
    assert "'jaxoffload'" in modules and not [name for name in others if f"'{name}'" in modules]


def test_what_is_released_has_one_version():
    """The release's workflow finds it, and CITATION.cff says it."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    check = next(step["run"] for step in workflow["jobs"]["build"]["steps"] if "tag" in step.get("name", ""))
    run = lambda tag: subprocess.run(check, shell=True, cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag}).returncode
    assert run(f"v{jaxoffload.__version__}") == 0 != run("v9.9.9")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == jaxoffload.__version__


def test_an_issue_asks_for_what_about_prints(capsys, monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "lots")
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    assert "python -m jaxoffload about" in [part["attributes"]["label"] for part in form["body"]]
    assert main(["about"]) == 0
    said = capsys.readouterr().out
    assert f"jaxoffload {jaxoffload.__version__}, jax {jax.__version__}, jaxlib" in said
    assert f"devices: {jax.device_count()} {jax.devices()[0].device_kind}\n" in said
    assert re.search(r"^host memory: [\d.]+ GiB$", said, re.M) and "\nXLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=lots\n" in said
    assert "devices: HostPoolError: " in said  # whatever is wrong
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "2")
    assert main(["about"]) == 0 and "pinned host pool: 2.00 GiB per device\n" in capsys.readouterr().out
