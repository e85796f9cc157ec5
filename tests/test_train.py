"""The training program as a user meets it: it learns, is stopped, killed, resumed, and run on two processes."""

import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from models import data, metrics, train
from models.config import Distributed, load

ROOT = Path(__file__).parent.parent

CONFIG = """\
model: {{vocab_size: 300, layers: 2, d_model: 64, heads: 4, kv_heads: 2, d_ff: 96, dtype: float32}}
remat: {{residuals: {{fc1: offload, attn/*: save}}, min_offload_bytes: 0}}
data: {{path: {folder}/*.txt, valid_fraction: 0.2, cache_dir: {folder}/cache}}
train:
  {{steps: 24, batch_size: 16, seq_len: 32, loss_chunk: 16, learning_rate: 1e-2, warmup_steps: 3,
    log_every: 1, eval_every: 8, eval_batches: 2, checkpoint_every: 8}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config beside a corpus of sentences in which each word all but determines the next."""
    folder = tmp_path_factory.mktemp("corpus")
    order = random.Random(0)
    words = ["".join(order.choices("abcdefghij", k=5)) for _ in range(40)]
    for number in range(60):
        at, text = order.randrange(40), []
        for _ in range(120):
            at = (7 * at + 3) % 40 if order.random() < 0.95 else order.randrange(40)
            text.append(words[at])
        (folder / f"{number}.txt").write_text(" ".join(text))
    path = folder / "test.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return path


def losses(out: Path, key: str = "loss") -> dict[int, float]:
    return {record["step"]: record[key] for record in metrics.read(out / "metrics.jsonl") if key in record}


# ---- one process of eight devices, in this very process ----

EIGHT = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")


@pytest.fixture(scope="module")
def eight(config, tmp_path_factory) -> Path:
    """The folder of a whole run over eight devices."""
    out = tmp_path_factory.mktemp("eight") / "out"
    assert train.main([str(config), *EIGHT, f"train.out={out}"]) == 0
    return out


def test_the_loss_falls_from_ln_vocab_and_a_finished_run_is_left_alone(eight, config, capsys):
    loss, valid = losses(eight), losses(eight, "valid_loss")
    assert list(loss) == list(range(1, 25)) and list(valid) == [0, 8, 16, 24]
    assert abs(loss[1] - math.log(300)) < 0.3 and abs(valid[0] - math.log(300)) < 0.3
    # Run again, the finished run says so, and leaves everything as it is.
    before = {path: path.stat().st_mtime_ns for path in eight.rglob("*") if path.is_file()}
    assert train.main([str(config), *EIGHT, f"train.out={eight}"]) == 0
    assert f"{eight} is finished, at step 24 of 24" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in eight.rglob("*") if path.is_file()} == before


def test_the_run_beats_a_model_without_context(eight, config):
    valid = losses(eight, "valid_loss")
    assert valid[24] < valid[16] < valid[8] < valid[0]
    settings = load(config)
    corpus = data.load(path=settings.data.path, vocab_size=300, valid_fraction=0.2, cache_dir=settings.data.cache_dir)
    unigram = data.unigram_entropy(corpus.train, corpus.valid, vocab_size=corpus.vocab_size)
    assert valid[24] < unigram - 0.5


def test_records_hold_what_people_look_for(eight):
    record = metrics.read(eight / "metrics.jsonl")[-2]
    assert set(record) == {
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_second",
        "mfu",
        "device_peak_bytes",
        "host_peak_bytes",
    }
    assert record["tokens_per_second"] > 0 and record["host_peak_bytes"] > 2**20
    rates = [r["learning_rate"] for r in metrics.read(eight / "metrics.jsonl") if "loss" in r]
    np.testing.assert_allclose(rates[:4], [0, 1e-2 / 3, 2e-2 / 3, 1e-2], rtol=1e-6)
    assert rates[-1] < 0.11 * 1e-2  # the cosine's end, a tenth of the peak
    assert (eight / "loss.png").read_bytes().startswith(b"\x89PNG")


# ---- processes ----


def command(config: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "models.train", str(config), *overrides]


def spawn(arguments: list[str], devices: int = 1) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    return subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    text, _ = process.communicate(timeout=300)
    assert process.returncode == code, text
    return text


def wait_for(process: subprocess.Popen, happened) -> None:
    limit = time.monotonic() + 300
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.002)


def test_stopped_and_killed_and_resumed_the_curve_is_the_uninterrupted_one(config, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    # Steps of a tenth of a second: time enough to be stopped in between.
    slow = ("model.layers=12", "train.batch_size=32", "train.seq_len=64")
    text = finish(spawn(command(config, *slow, f"train.out={whole}")))
    assert "mlp/fc1.gate" in text and "the compiled step needs" in text and "unigram" in text

    again = command(config, *slow, f"train.out={broken}")
    process = spawn(again)
    wait_for(process, lambda: 3 in losses(broken))
    process.send_signal(signal.SIGTERM)
    text = finish(process, code=128 + signal.SIGTERM)
    stopped = max(losses(broken))
    assert f"stopped by SIGTERM; step {stopped} of 24 is saved, and the same command continues" in text
    assert 3 <= stopped < 24 and (broken / "checkpoints" / str(stopped)).is_dir()

    process = spawn(again)
    later = 8 if stopped < 8 else 16
    wait_for(process, lambda: (broken / "checkpoints" / str(later)).is_dir() and max(losses(broken)) > later)
    process.kill()
    assert f"from its checkpoint at step {stopped}" in finish(process, code=-signal.SIGKILL)
    assert max(losses(broken)) < 24

    assert "from its checkpoint at step" in finish(spawn(again))
    assert (broken / "metrics.jsonl").read_text().count('"loss"') == 24
    for key in ("loss", "grad_norm", "valid_loss"):
        assert losses(broken, key) == losses(whole, key)


def test_ctrl_c_saves_and_says_so(config, tmp_path):
    process = spawn(command(config, f"train.out={tmp_path}", "train.steps=100000"))
    wait_for(process, lambda: len(losses(tmp_path)) > 2)
    process.send_signal(signal.SIGINT)
    text = finish(process, code=128 + signal.SIGINT)
    saved = max(int(folder.name) for folder in (tmp_path / "checkpoints").iterdir())
    assert f"stopped by SIGINT; step {saved} of 100000 is saved" in text


def two_processes(config: Path, out: Path, *overrides: str) -> list[subprocess.Popen]:
    """Process 0 and process 1, of four devices each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    cluster = [f"distributed.coordinator={coordinator}", "distributed.num_processes=2"]
    arguments = command(config, *EIGHT, f"train.out={out}", *cluster, *overrides)
    return [spawn([*arguments, f"distributed.process_id={i}"], devices=4) for i in range(2)]


def until(step: int, finished: Path, out: Path) -> Path:
    """A copy of a finished run as it was after the checkpoint at `step`."""
    shutil.copytree(finished, out)
    for folder in (out / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)
    return out


def test_two_processes_have_the_losses_of_one_and_resume_each_other(eight, config, tmp_path):
    both = tmp_path / "both"
    first, second = map(finish, two_processes(config, both))
    assert "step 24/24  loss" in first and "step" not in second.replace("train.steps", "")
    assert losses(both).keys() == losses(eight).keys()
    np.testing.assert_allclose([*losses(both).values()], [*losses(eight).values()], rtol=1e-5)

    one_after_two = until(16, both, tmp_path / "one_after_two")
    assert train.main([str(config), *EIGHT, f"train.out={one_after_two}"]) == 0
    two_after_one = until(16, eight, tmp_path / "two_after_one")
    first, _ = map(finish, two_processes(config, two_after_one))
    assert "from its checkpoint at step 16" in first
    for resumed in (one_after_two, two_after_one):
        assert losses(resumed).keys() == losses(eight).keys()
        for key in ("loss", "valid_loss"):
            np.testing.assert_allclose([*losses(resumed, key).values()], [*losses(eight, key).values()], rtol=1e-5)


def test_a_signal_to_one_process_stops_all_at_one_step(config, tmp_path):
    simple = ("mesh.data=8", "mesh.fsdp=1", "mesh.tensor=1")  # compiles fast
    processes = two_processes(config, tmp_path, *simple, "train.steps=100000")
    wait_for(processes[0], lambda: len(losses(tmp_path)) > 2)
    processes[1].send_signal(signal.SIGTERM)
    text, silent = (finish(process, code=128 + signal.SIGTERM) for process in processes)
    saved = max(int(folder.name) for folder in (tmp_path / "checkpoints").iterdir())
    assert f"stopped by SIGTERM; step {saved} of 100000 is saved" in text
    assert "stopped" not in silent


@pytest.mark.parametrize(
    "environment, distributed, expected",
    [
        ({}, {}, []),
        ({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "1"}, {}, []),
        ({"SLURM_STEP_NUM_TASKS": "16"}, {}, [()]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {}, [()]),
        (
            {"SLURM_STEP_NUM_TASKS": "16"},
            {"coordinator": "a:1", "num_processes": 2, "process_id": 1},
            [("a:1", 2, 1)],
        ),
    ],
)
def test_processes_join_when_the_launcher_or_the_config_says_so(monkeypatch, environment, distributed, expected):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments: calls.append(arguments))
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    train.join(Distributed(**distributed))
    assert calls == expected


# ---- what cannot run says why ----


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["train.step=3"], "train.step = 3: no such key; the nearest is train.steps"),
        (["remat.residuals[fc3]=save"], "remat.residuals['fc3']: no tagged value has a name that it matches"),
        (["mesh.data=4"], "mesh.data * mesh.fsdp * mesh.tensor = 16: must be 8, the number of devices here"),
        (["model.attention=cudnn", "model.dtype=bfloat16"], "model.attention = 'cudnn': needs NVIDIA GPUs"),
        (["data.path=/nowhere/*.txt"], "data.path = '/nowhere/*.txt': "),
        (["train.seq_len=16384", "train.loss_chunk=16384"], "train.batch_size = 16: allowed is at most"),
    ],
)
def test_what_cannot_run_is_a_sentence_and_exit_code_2(config, tmp_path, capsys, overrides, said):
    assert train.main([str(config), *EIGHT, f"train.out={tmp_path}/out", *overrides]) == 2
    assert said in capsys.readouterr().err


def test_a_checkpoint_of_another_model_or_other_data_is_named(eight, config, tmp_path, capsys):
    begun = until(16, eight, tmp_path / "begun")
    before = (begun / "metrics.jsonl").read_text()
    changed = ["model.layers=4", "train.seed=1", "train.learning_rate=1e-3", "model.dtype=bfloat16"]
    assert train.main([str(config), *EIGHT, f"train.out={begun}", *changed]) == 2
    said = capsys.readouterr().err
    assert "model.layers = 4: the checkpoint in" in said and "was written with 2; set it back" in said
    assert "train.seed = 1: the checkpoint in" in said
    assert "learning_rate" not in said and "dtype" not in said  # these may change
    assert (begun / "metrics.jsonl").read_text() == before


def test_half_a_line_at_the_end_of_the_metrics_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i, "loss": 0.1 * i}) + "\n" for i in range(1, 6)) + '{"step": 6, "lo')
    assert [record["step"] for record in metrics.read(path)] == [1, 2, 3, 4, 5]
    journal = metrics.Journal(path, None, unigram=1.0)
    journal.begin(start=3)
    assert [record["step"] for record in metrics.read(path)] == [1, 2, 3]
    journal.begin(start=0)
    assert metrics.read(path) == []


def test_the_peak_of_a_chip_is_that_of_its_exact_name():
    assert metrics.PEAK_FLOPS.get("NVIDIA H100 80GB HBM3") == metrics.PEAK_FLOPS.get("NVIDIA H200") == 989e12
    # Slower chips whose names hold a known one have no MFU rather than a wrong one.
    assert not {"NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GB200", "cpu"} & metrics.PEAK_FLOPS.keys()
