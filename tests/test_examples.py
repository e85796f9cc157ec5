"""The examples run as they stand, print the table of their residuals, and learn."""

import re
import runpy

import pytest
from common import ROOT

pytestmark = pytest.mark.usefixtures("compiled_fast")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_is_one_for_plain_jax_and_one_for_each_of_flaxs_interfaces():
    assert [path.stem for path in EXAMPLES] == ["flax_linen", "flax_nnx", "plain"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_offloads_one_residual_and_learns(path, capsys):
    assert len(path.read_text().splitlines()) < 60
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    # float32[256,256] for each of 4 layers: 3 rows that offload and one for padding.
    assert re.search(r"^fc1 +float32\[256,256\] +256.00 KiB +3 +768.00 KiB +offloaded +fc1$", printed, re.MULTILINE)
    assert "host 1.00 MiB" in printed
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
