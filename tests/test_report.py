"""What `--report` prints, on any machine: bytes by hand, and what does not fit in the pinned host pool."""

import jax
import pytest
from common import ROOT

import jaxoffload
from models.budget import report
from models.config import load
from models.sharding import abstract_mesh
from models.step import program, traceable
from models.train import main

CONFIGS = ROOT / "configs"
FOUR = ["train.grad_accumulation=4"]
TWO_STACKS = ["model.layers=5", "model.dense_layers=2", "remat.residuals[fc1]=offload"]
MACHINE = f"remat.machine={ROOT}/machines/h200.json"
POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def per_device(text: str) -> dict[str, float]:
    """Return the MiB per device of each kind."""
    lines = [line for line in text.splitlines() if line.endswith(" MiB per device")]
    return {line[:24].strip(): float(line[24:].split()[0].replace(",", "")) for line in lines}


@pytest.mark.claim("report-at-full-size")
def test_the_report_of_8b_tells_bytes_and_allocates_nothing():
    before = len(jax.live_arrays())
    text = report(load(CONFIGS / "llama3-8b.yaml"))
    assert len(jax.live_arrays()) <= before and "8,030,261,248 parameters" in text
    assert "mlp/fc2" in text and "attn/context.1" in text and "8 microbatches interleaved; the table is of one" in text
    # An eighth on each device, except the norms' 266,240, which are on each; two moments.
    parameters = 4 * ((8030261248 - 266240) / 8 + 266240) / 2**20
    found = per_device(text)
    assert found["parameters"] == pytest.approx(parameters, abs=0.1)
    assert found["optimizer"] == pytest.approx(2 * parameters, abs=0.1)


@pytest.mark.claim("report-at-full-size")
def test_the_report_needs_no_gpu_for_kernels_of_gpus():
    assert "moe/fc1.gate" in report(load(CONFIGS / "qwen3-30b-a3b.yaml", ["model.grouped=mosaic"]))


@pytest.mark.parametrize(
    "overrides, way",
    [
        ([], None),
        (FOUR, "interleaved"),
        ([*FOUR, "train.interleave=false"], "one after another"),
        ([*FOUR, "remat.residuals[fc1]=save"], "one after another"),
    ],
)
def test_the_report_says_how_microbatches_run(overrides, way):
    text = report(load(CONFIGS / "tiny.yaml", overrides))
    said = [line for line in text.splitlines() if "microbatches" in line]
    assert said == ([f"4 microbatches {way}; the table is of one"] if way else [])


@pytest.mark.slow
@pytest.mark.claim("stages")
def test_the_report_says_what_a_device_of_a_stage_keeps():
    keys = ["model.layers=8", "mesh.stage=2", "mesh.fsdp=2", "train.grad_accumulation=4", MACHINE]
    text = report(load(CONFIGS / "tiny.yaml", keys))
    assert "4 microbatches on 2 stages, 2 chunks of layers; 7 ticks, idle for 20.0% of a step; 4 slots" in text
    # In each slot gate and up of 4 layers, 512 float32 for each of 256 tokens, and a row of padding.
    assert "20.00 MiB in pinned host memory" in text
    # Of half of the layers: two of each chunk and a row of padding, in each slot.
    half = report(load(CONFIGS / "tiny.yaml", [*keys, "remat.offload_layers=4"]))
    assert "12.00 MiB in pinned host memory" in half


def test_a_tensor_axis_splits_heads_and_d_ff_but_not_the_residual_stream():
    config = traceable(load(CONFIGS / "llama3-8b.yaml", ["mesh.fsdp=4", "mesh.tensor=2"]))
    made = program(config, abstract_mesh(config.mesh))
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    parts = {row.names: row.bytes / row.bytes_per_device for row in table if row.state == "offloaded" and row.layers}
    # Heads over `tensor`; the statistics of attention, which have no constraint, like the batch.
    assert parts["attn/context.0",] == parts["attn/q",] == 8 and parts["attn/context.1",] == 4
    # layer_input, mlp_input and the statistics over fsdp; the others over both.
    host = sum(row.bytes_per_device for row in table if row.state == "offloaded")
    assert host == 32 * ((2 * 512 + 8) / 4 + 4864 / 8) * 2**20


def test_the_report_predicts_the_step_of_a_machine_that_was_measured():
    text = report(load(CONFIGS / "llama-1b.yaml", [MACHINE]))
    assert " ms per step on 1 NVIDIA H200, predicted" in text


@pytest.mark.claim("host-pool")
@pytest.mark.parametrize(
    "name, overrides, stacks, words",
    [
        ("tiny", ["remat.resident_layers=0"], 1, "offload_layers"),
        pytest.param("tiny", ["remat.resident_layers=0", *FOUR], 2, "two microbatches", marks=pytest.mark.slow),
        # Two dense layers, then three with experts: each stack fits alone.
        pytest.param("tiny-moe", TWO_STACKS, 1, "all together", marks=pytest.mark.slow),
    ],
)
def test_stacks_that_do_not_fit_together_are_refused_before_anything_is_compiled(
    name, overrides, stacks, words, monkeypatch, capsys
):
    config = traceable(load(CONFIGS / f"{name}.yaml", overrides))
    made = program(config, abstract_mesh(config.mesh))
    need = stacks * jaxoffload.residuals(made.loss, made.state.params, made.microbatch).host_bytes
    monkeypatch.setenv(POOL, str(need / 2**30))
    assert main([f"{CONFIGS}/{name}.yaml", *overrides, "--report"]) == 0
    monkeypatch.setenv(POOL, str((need - 8) / 2**30))
    capsys.readouterr()
    assert main([f"{CONFIGS}/{name}.yaml", *overrides, "--report"]) == 2
    assert words in capsys.readouterr().err
