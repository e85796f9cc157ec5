"""The examples run as they stand, print the table of their residuals, and learn."""

import re
import runpy
import shutil
import sys

import jax
import orbax.checkpoint as ocp
import pytest
from common import ROOT, assert_same_bits

pytestmark = pytest.mark.usefixtures("compiled_fast")
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", ["flax_linen", "plain"])
def test_it_offloads_one_residual_and_learns(name, capsys):
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) < 60
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    # float32[256,256] for each of 4 layers: 3 rows that offload and one for padding.
    assert re.search(r"^fc1 +float32\[256,256\] +256.00 KiB +3 +768.00 KiB +offloaded +fc1$", printed, re.MULTILINE)
    assert "host 1.00 MiB" in printed
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_the_llama_learns_and_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(monkeypatch, capsys, tmp_path):
    def train(steps):
        monkeypatch.setattr(sys, "argv", ["train_llama.py", f"{tmp_path}/out", f"--steps={steps}", "--save-every=5"])
        runpy.run_path(str(EXAMPLES / "train_llama.py"), run_name="__main__")
        return capsys.readouterr().out

    def state():
        with ocp.CheckpointManager(tmp_path / "out") as manager:
            return jax.device_get(jax.tree.leaves(manager.restore(10, args=ocp.args.Composite(state=restore))["state"]))

    restore = ocp.args.StandardRestore()
    printed = train(10)
    assert re.search(r"^mlp/fc1.up .* offloaded +mlp/fc1$", printed, re.MULTILINE)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 1 and losses[0] < 5.4  # ln(256) is 5.5
    whole = state()
    shutil.rmtree(tmp_path / "out/10")
    assert "continuing from step 5" in train(10)
    assert_same_bits(state(), whole)
