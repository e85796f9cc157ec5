"""The Makefile's targets: `make train` trains, and both versions of jax are tested."""

import math
import os
import re
import shutil
import sys
import tomllib

import pytest
from common import finish, inherited_flags, start
from pages import ROOT, TEXT

from jaxoffload import _refusals
from models import metrics
from models.config import load

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*arguments: str) -> str:
    """Return what make prints, without the variables of an outer make, and on one device."""
    others = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHON", "CONFIG", "ARGS", "EXTRAS")
    environment = {key: value for key, value in os.environ.items() if key not in others}
    environment |= {"XLA_FLAGS": inherited_flags(), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # it compiles for a while
    return finish(start(["make", *arguments], cwd=ROOT, env=environment))


@pytest.mark.slow
@pytest.mark.claim("make-train")
def test_make_train_trains_tiny_on_the_standard_library(tmp_path):
    """Eight steps of it, in a separate folder."""
    out, fewer = tmp_path / "out", "train.steps=8 train.warmup_steps=2 train.log_every=1 train.eval_every=8"
    said = make(
        "train", f"PYTHON={sys.executable}", f"ARGS={fewer} model.layers=2 train.eval_batches=1 train.out={out}"
    )
    assert f"{sys.executable} -m models.train configs/tiny.yaml {fewer}" in said
    assert re.search(r"^mlp/fc1.gate +float32\[8,256,512\] .* offloaded +fc1$", said, re.MULTILINE)
    losses = [record["loss"] for record in metrics.read(out / "metrics.jsonl") if "loss" in record]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5 and "\nfinished" in said
    tiny = load(ROOT / "configs/tiny.yaml")
    assert abs(losses[0] - math.log(tiny.model.vocab_size)) < 0.2 and (out / "checkpoints/8").is_dir()
    assert (tiny.data.path, tiny.train.out) == ("stdlib", "runs/tiny")


def test_make_train_makes_its_own_environment_unless_python_is_given():
    *_, last = make("-n", "train").splitlines()
    assert last.strip() == ".venv/bin/python -m models.train configs/tiny.yaml"
    assert make("-n", "train", "PYTHON=python3").strip() == "python3 -m models.train configs/tiny.yaml"


def test_make_train_installs_the_extras_that_it_is_given():
    """`train,cuda13` brings a jax for NVIDIA GPUs."""
    anew = ("-n", "-W", "pyproject.toml", "train")  # as if it had changed since
    assert ".venv/bin/python -m pip install -q -e '.[train]'" in make(*anew)
    assert ".venv/bin/python -m pip install -q -e '.[train,cuda13]'" in make(*anew, "EXTRAS=train,cuda13")


@pytest.mark.claim("versions")
def test_the_tests_for_a_gpu_are_found_on_a_machine_of_one_device():
    """Nothing may need two devices before a test runs."""
    said = make("test-gpu", f"PYTHON={sys.executable}", "ARGS=--collect-only -q -p no:cacheprovider")
    assert re.search(r"^tests/test_program\.py: \d+$", said, re.MULTILINE)


def test_the_oldest_jax_is_the_one_that_everything_names():
    """It is pip's lower bound, the version below which the library refuses, README's, and the one that `make test-all`
    tests."""
    extras = PYPROJECT["optional-dependencies"]
    needed = [*PYPROJECT["dependencies"], *extras["cuda12"], *extras["cuda13"]]
    bounds = [found[1] for one in needed if (found := re.fullmatch(r"jax(?:\[\w+\])?>=([\d.]+)", one))]
    (oldest,) = set(bounds)
    assert len(bounds) == 3
    assert oldest == ".".join(map(str, _refusals._FIRST_RIGHT_JAXLIB))
    assert f"{oldest} or later" in TEXT
    said = make("-n", "-W", "pyproject.toml", "test-all", "PYTHON=python3")  # as if it had changed since
    assert f"pip install -q --no-deps --target .oldest jax=={oldest} jaxlib=={oldest}" in said
    assert "PYTHONPATH=.oldest python3 -m pytest" in said and "tests/test_contract.py" in said


def test_ci_runs_what_contributing_says_and_the_tests_as_on_another_cpu():
    ran = re.findall(
        r"^(?:\w+=\S+ |if .*; then )?make ([\w-]+)(?:; fi)?$", (ROOT / ".ci/run").read_text(), re.MULTILINE
    )
    (said,) = re.findall(
        r"which `\.github/workflows/ci\.yml` runs, is ([^.]*)\.\s", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert re.findall(r"`make (\S+)`", said) == ran == ["docs", "test-all", "test-avx2"]
    assert "- run: .ci/run\n" in (ROOT / ".github/workflows/ci.yml").read_text()
    (line,) = make("-n", "test-avx2", "PYTHON=python3").replace("\\\n", "").splitlines()
    assert "--xla_cpu_max_isa=AVX2" in line and "ONEDNN_MAX_CPU_ISA=AVX2" in line and "pytest -n auto " in line
