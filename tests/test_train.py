"""The training program as a user meets it: it learns, is stopped, killed, resumed, and run on two processes."""

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import os
import pty
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import te_stand_in
from common import PATIENCE, ROOT, fast_compiles, finish, inherited_flags, start, wait_for
from test_streams import steps_at, write_trace

from jaxoffload._engine.layers import passes as _loops
from jaxoffload._jax import on_host
from jaxoffload.grouped import te
from models import checkpoints, data, metrics, preflight, processes, signals, train
from models.config import Config, Distributed, Model, flat
from models.integrity import SUMS
from models.loading import load
from models.reading import ConfigError
from models.sharding import abstract_mesh, make_mesh
from models.step import program, shardings_of

CONFIG = """\
model: {{vocab_size: 300, layers: 2, d_model: 64, heads: 4, kv_heads: 2, d_ff: 96, dtype: float32}}
remat: {{residuals: {{fc1: offload, attn/*: save}}, min_offload_bytes: 0}}
data: {{path: {folder}/*.txt, valid_fraction: 0.2, cache_dir: {folder}/cache}}
train:
  {{steps: 24, batch_size: 16, seq_len: 32, loss_chunk: 16, learning_rate: 1e-2, warmup_steps: 3,
    log_every: 1, eval_every: 8, eval_batches: 2, checkpoint_every: 8}}
"""


@pytest.fixture(scope="module", autouse=True)
def compiled_fast():
    """As in common.py, for the whole file, because its runs are compared with each other."""
    with fast_compiles():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config, and a corpus whose text lets each word nearly determine the next."""
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


# ---- one process with eight devices: pytest's own ----

EIGHT = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")


@pytest.fixture(scope="module")
def eight(config, tmp_path_factory) -> Path:
    """The folder of a whole run over eight devices."""
    out = tmp_path_factory.mktemp("eight") / "out"
    assert train.main([str(config), *EIGHT, f"train.out={out}"]) == 0
    return out


@pytest.mark.claim("make-train")
def test_the_loss_falls_from_ln_vocab_and_a_finished_run_is_left_alone(eight, config, capsys):
    loss, valid = losses(eight), losses(eight, "valid_loss")
    assert list(loss) == list(range(1, 25)) and list(valid) == [0, 8, 16, 24]
    assert abs(loss[1] - math.log(300)) < 0.3 and abs(valid[0] - math.log(300)) < 0.3
    # Started again, the finished run says so and leaves everything as it is.
    before = {path: path.stat().st_mtime_ns for path in eight.rglob("*") if path.is_file()}
    assert train.main([str(config), *EIGHT, f"train.out={eight}"]) == 0
    assert f"{eight} is finished, at step 24 of 24" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in eight.rglob("*") if path.is_file()} == before


def test_a_finished_run_goes_on_with_more_steps_interleaved_and_says_that_the_learning_rate_changes(
    eight, config, tmp_path, capsys
):
    out = shutil.copytree(eight, tmp_path / "out")
    # Another model is refused even though nothing is left to do.
    assert train.main([str(config), *EIGHT, f"train.out={out}", "model.d_ff=64"]) == 2
    assert "model.d_ff = 64: the checkpoint in" in capsys.readouterr().err
    assert train.main([str(config), *EIGHT, f"train.out={out}", "train.steps=25", "train.grad_accumulation=2"]) == 0
    said = capsys.readouterr().out
    assert "2 microbatches interleaved; the table is of one" in said
    assert f"continuing {out} from its checkpoint at step 24" in said
    assert "train.steps = 25, and 24 before: the learning rate now falls until step 25" in said
    assert list(losses(out)) == list(range(1, 26)) and losses(out)[25] < losses(out)[16]


@pytest.mark.claim("make-train")
def test_the_run_beats_a_model_without_context(eight, config):
    valid = losses(eight, "valid_loss")
    assert valid[24] < valid[16] < valid[8] < valid[0]
    settings = load(config)
    corpus = data.load(path=settings.data.path, vocab_size=300, valid_fraction=0.2, cache_dir=settings.data.cache_dir)
    unigram = data.unigram_entropy(corpus.train, corpus.valid, vocab_size=corpus.vocab_size)
    assert valid[24] < unigram - 0.5


@pytest.mark.claim("make-train")
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
    assert rates[-1] < 0.11 * 1e-2  # the end of the cosine, a tenth of the peak
    assert (eight / "loss.png").read_bytes().startswith(b"\x89PNG")


# ---- processes ----


def command(config: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "models.train", str(config), *overrides]


def spawn(arguments: list[str], devices: int = 1, **streams: int) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(jax.config.values["jax_disable_most_optimizations"])),
        "XLA_FLAGS": inherited_flags(devices=devices),
    }
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | streams
    return start(arguments, cwd=ROOT, env=environment, text=True, **streams)


# A run that gets a signal at a known moment: before the step compiles, after the loss of a step, or before a checkpoint
# gets its name.
SIGNALLED = """
import os, signal, sys
from models import metrics, train

number, moment = signal.Signals[sys.argv[1]], sys.argv[2]
compile_step, write, rename = train.compile_step, metrics.Journal.write, os.rename

def signal_at(reached):
    if reached == moment:
        os.kill(os.getpid(), number)

def compiling(made):
    signal_at("compiling")
    return compile_step(made)

def writing(journal, record):
    write(journal, record)
    signal_at(f"loss of step {record['step']}" if "loss" in record else None)

def renaming(source, target):  # as orbax does with a folder in which all is written
    signal_at(os.path.relpath(target, os.path.dirname(os.path.dirname(target))))
    rename(source, target)

train.compile_step, metrics.Journal.write, os.rename = compiling, writing, renaming
sys.exit(train.main(sys.argv[3:]))
"""


@pytest.mark.slow
@pytest.mark.claim("goes-on", "trains-anywhere")
def test_stopped_and_killed_and_resumed_the_curve_is_the_uninterrupted_one(config, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    text = finish(spawn(command(config, f"train.out={whole}")))
    assert "mlp/fc1.gate" in text and "the compiled step needs" in text and "unigram" in text

    again = command(config, f"train.out={broken}")
    signalled = lambda *how: spawn([sys.executable, "-c", SIGNALLED, *how, *again[3:]])
    text = finish(signalled("SIGTERM", "loss of step 3"), code=128 + signal.SIGTERM)
    stopped = max(losses(broken))
    assert f"stopped by SIGTERM; step {stopped} of 24 is saved, and the same command continues" in text
    assert 3 <= stopped < 8 and (broken / "checkpoints" / str(stopped)).is_dir()

    text = finish(signalled("SIGKILL", "checkpoints/8"), code=-signal.SIGKILL)
    assert f"from its checkpoint at step {stopped}" in text
    left = {folder.name for folder in (broken / "checkpoints").iterdir()}
    assert str(stopped) in left and "8" not in left
    assert any(name.startswith("8.") for name in left), "the kill left no partial checkpoint"

    assert f"from its checkpoint at step {stopped}" in finish(spawn(again))
    assert (broken / "metrics.jsonl").read_text().count('"loss"') == 24
    for key in ("loss", "grad_norm", "valid_loss"):
        assert losses(broken, key) == losses(whole, key)


@pytest.mark.slow
def test_experts_train_and_go_on_from_a_checkpoint_with_the_same_losses(config, tmp_path, monkeypatch):
    """configs/tiny-moe.yaml, made smaller, on devices that split its experts."""
    monkeypatch.chdir(ROOT)
    settings, whole, again = load(config).data, tmp_path / "whole", tmp_path / "again"
    smaller = ["model.vocab_size=300", "model.layers=2", "model.d_model=48", "train.batch_size=8", "train.seq_len=32"]
    steps = ["train.steps=6", "train.checkpoint_every=3", "train.log_every=1", "train.warmup_steps=1"]
    where = [f"data.path={settings.path}", f"data.cache_dir={settings.cache_dir}", "data.valid_fraction=0.2"]
    asked = [
        "configs/tiny-moe.yaml",
        *smaller,
        *steps,
        *where,
        "train.eval_batches=1",
        "train.loss_chunk=16",
        "mesh.expert=4",
        "mesh.fsdp=2",
    ]
    assert train.main([*asked, f"train.out={whole}"]) == 0
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints/6")
    assert train.main([*asked, f"train.out={again}"]) == 0
    for key in ("loss", "grad_norm", "expert_load", "aux_loss", "valid_loss"):
        assert losses(again, key) == losses(whole, key) and len(losses(whole, key)) >= 2, key
    loss = losses(whole)
    assert list(loss) == [1, 2, 3, 4, 5, 6] and loss[6] < loss[1] < math.log(300) + 0.5


@pytest.mark.slow
@pytest.mark.claim("goes-on")
def test_ctrl_c_saves_and_says_so(config, tmp_path):
    process = spawn(command(config, f"train.out={tmp_path}", "train.steps=100000", "model.layers=1"))
    wait_for(process, lambda: len(losses(tmp_path)) > 2)
    process.send_signal(signal.SIGINT)
    text = finish(process, code=128 + signal.SIGINT)
    saved = max(int(folder.name) for folder in (tmp_path / "checkpoints").iterdir())
    assert f"stopped by SIGINT; step {saved} of 100000 is saved" in text


STOPPED = "stopped by SIGINT; what came after the last checkpoint is not saved"


def test_ctrl_c_while_it_compiles_is_one_line(config, tmp_path):
    given = command(config, f"train.out={tmp_path}/out")[3:]
    process = spawn([sys.executable, "-c", SIGNALLED, "SIGINT", "compiling", *given])
    text = finish(process, code=128 + signal.SIGINT)
    assert text.splitlines()[-1] == STOPPED
    assert "Traceback" not in text and not losses(tmp_path / "out")


def test_ctrl_c_that_jax_converts_into_its_own_error_is_ctrl_c(config, monkeypatch, capsys):
    def interrupted(*_):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("Cache keys should be comparable using __eq__") from None

    monkeypatch.setattr(train, "train", interrupted)
    monkeypatch.setattr(signals, "PATIENCE", 600)  # or it would end pytest
    assert train.main([str(config), *EIGHT]) == 128 + signal.SIGINT
    assert capsys.readouterr().err.startswith("stopped by SIGINT")


def test_a_signal_that_is_told_late_does_not_end_a_process_that_unwinds(monkeypatch, capsys):
    def late(descriptor, count):  # as on a busy machine, where the main thread has left `handled` by now
        byte = os.read(descriptor, count)
        time.sleep(0.5)
        return byte

    ended: list[int] = []
    monkeypatch.setattr(signals, "os", types.SimpleNamespace(**vars(os) | {"read": late}))
    monkeypatch.setattr(signals, "_exit", ended.append)  # or it would end pytest
    with pytest.raises(signals.Stopped), signals.handled():
        signal.raise_signal(signal.SIGINT)
    assert not ended and capsys.readouterr().err.startswith("stopped by SIGINT")


@pytest.mark.slow
def test_ctrl_c_that_is_lost_while_it_compiles_is_ctrl_c(config, tmp_path, monkeypatch, capsys):
    compile_step = train.compile_step

    class Freed:
        def __del__(self):  # like a callback of the garbage collector: Python prints what it raises, and continues
            signal.raise_signal(signal.SIGINT)

    def lost(made):
        Freed()
        return compile_step(made)

    monkeypatch.setattr(train, "compile_step", lost)
    monkeypatch.setattr(signals, "PATIENCE", 600)  # it does not unwind before the first step
    assert train.main([str(config), *EIGHT, f"train.out={tmp_path}/out"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err.splitlines() == [STOPPED] and not losses(tmp_path / "out")


def test_ctrl_c_while_it_reads_the_data_is_one_line(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "load", lambda **settings: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(signals, "PATIENCE", 600)
    assert train.main([str(config), *EIGHT, f"train.out={tmp_path}/out"]) == 130
    assert capsys.readouterr().err == "stopped by SIGINT; what came after the last checkpoint is not saved\n"


def two_processes(config: Path, out: Path, *overrides: str, second: tuple[str, ...] = ()) -> list[subprocess.Popen]:
    """Start process 0 and process 1, with four devices each; `second` has overrides for process 1 only."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    cluster = [f"distributed.coordinator={coordinator}", "distributed.num_processes=2"]
    arguments = command(config, *EIGHT, f"train.out={out}", *cluster, *overrides)
    each = ((), second)
    return [spawn([*arguments, *each[i], f"distributed.process_id={i}"], devices=4) for i in range(2)]


def until(step: int, finished: Path, out: Path) -> Path:
    """Return a copy of a finished run as it was after the checkpoint at `step`."""
    shutil.copytree(finished, out)
    for folder in (out / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)
    return out


@pytest.mark.slow
@pytest.mark.claim("trains-anywhere")
def test_two_processes_have_the_losses_of_one_and_resume_each_other(eight, config, tmp_path):
    both = tmp_path / "both"
    first, second = map(finish, two_processes(config, both, "train.verify=true"))
    assert "step 24/24  loss" in first and "step" not in second.replace("train.steps", "")
    assert "step: holds        gradients" in first and "loss: holds        placement" in first and " fails" not in first
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


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_one_step(config, tmp_path):
    simple = ("mesh.data=8", "mesh.fsdp=1", "mesh.tensor=1", "model.layers=1")  # compiles fast
    processes = two_processes(config, tmp_path, *simple, "train.steps=100000")
    wait_for(processes[0], lambda: len(losses(tmp_path)) > 2)
    processes[1].send_signal(signal.SIGTERM)
    text, silent = (finish(process, code=128 + signal.SIGTERM) for process in processes)
    saved = max(int(folder.name) for folder in (tmp_path / "checkpoints").iterdir())
    assert f"stopped by SIGTERM; step {saved} of 100000 is saved" in text
    assert "stopped" not in silent


@pytest.mark.slow
@pytest.mark.parametrize(
    "second, said",
    [
        (["train.seed=3"], ["train.seed = 0 here: differs between the proc", "train.seed = 3 here: differs between"]),
        (["model.layers=x"], ["distributed: process 1 cannot run; its own output says why", "model.layers = 'x'"]),
    ],
)
def test_processes_that_disagree_end_with_a_message(config, tmp_path, second, said):
    for process, message in zip(two_processes(config, tmp_path, second=second), said, strict=True):
        assert message in finish(process, code=2)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.claim("trains-anywhere")
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
def test_processes_join_when_the_launcher_or_the_config_says_so(
    monkeypatch, tmp_path, environment, distributed, expected
):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments: calls.append(arguments))
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "_meet", lambda place, *_: calls.append((*place,)))
    processes.join(Distributed(**distributed), tmp_path, lambda out: [])
    assert calls == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment, said",
    [
        ({"SLURM_STEP_NUM_TASKS": "two"}, "distributed: the environment's SLURM_STEP_NUM_TASKS = 'two': must be a num"),
        ({"OMPI_COMM_WORLD_SIZE": ""}, "distributed: the environment's OMPI_COMM_WORLD_SIZE = '': must be a number"),
        # Open MPI's count of processes, without the variables that locate them.
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "and {'OMPI_COMM_WORLD_SIZE': '2'}: the processes cannot join (ValueError: "),
    ],
)
def test_a_damaged_launcher_is_one_line(config, tmp_path, environment, said):
    # In a separate process, which has not used JAX yet.
    arguments = ["env", *(f"{name}={value}" for name, value in environment.items()), *command(config)]
    assert said in finish(spawn(arguments), code=2)


# ---- what cannot run says why ----


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["train.step=3"], "train.step = 3: no such key; the nearest is train.steps"),
        (["remat.residuals[fc3]=save"], "remat.residuals['fc3']: matches no tagged value"),
        (
            ["mesh.data=4"],
            "mesh.stage * mesh.data * mesh.fsdp * mesh.expert * mesh.tensor = 16: must be 8, the number of devices",
        ),
        (["model.attention=cudnn", "model.dtype=bfloat16"], "model.attention = 'cudnn': needs NVIDIA GPUs"),
        (["model.attention=te", "model.dtype=bfloat16"], "model.attention = 'te': needs NVIDIA GPUs"),
        (
            ["train.profile_steps=[20, 23]"],
            "train.profile_steps = [20, 23]: needs NVIDIA GPUs, and this is a cpu; must",
        ),
        (
            ["model.experts=4", "model.experts_per_token=2", "model.d_expert=100", "model.grouped=mosaic"],
            "model.grouped = 'mosaic': grouped_matmul: backend 'mosaic' cannot do this: ",
        ),
        (
            ["model.experts=4", "model.experts_per_token=2", "model.d_expert=64", "model.grouped=te"],
            "model.grouped = 'te': grouped_matmul: backend 'te' needs TransformerEngine",
        ),
        (
            ["model.experts=4", "model.d_expert=64", "model.exchange=ragged", "mesh.expert=2", "mesh.tensor=1"],
            "model.exchange = 'ragged': XLA supports it on NVIDIA GPUs only; must be padded here",
        ),
        (["data.path=/nowhere/*.txt"], "data.path = '/nowhere/*.txt': "),
        (["data.path=[/nowhere/*.txt, stdlib]"], "data.path = ('/nowhere/*.txt', 'stdlib'): "),
        (["data.tokenizer=/nowhere.json"], "data.tokenizer = /nowhere.json: "),
        (["data.tokenizer=~nobody_here/x.json"], "data.tokenizer = ~nobody_here/x.json: "),
        (["data.cache_dir=/proc/x"], "data.cache_dir = '/proc/x': "),
        (["train.out=/proc/x"], "train.out = '/proc/x': "),
        (["train.seq_len=16384", "train.loss_chunk=16384"], "train.batch_size = 16: allowed is at most"),
        (
            ["train.seq_len=1024", "data.valid_fraction=0.05"],
            "data.valid_fraction = 0.05: holds out 1 windows of train.",
        ),
    ],
)
def test_what_cannot_run_is_a_message_and_exit_code_2(config, tmp_path, capsys, overrides, said):
    assert train.main([str(config), *EIGHT, f"train.out={tmp_path}/out", *overrides]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 2


EXPERTS = ("model.experts=4", "model.d_expert=64")


@pytest.mark.claim("one-gpu-of-a-process")
def test_kernels_that_serve_one_gpu_of_a_process_do_not_train_on_several(config, tmp_path, monkeypatch, capsys):
    te_stand_in.install(monkeypatch)
    overrides = [*EIGHT, *EXPERTS, "model.grouped=te", f"train.out={tmp_path}/out"]
    assert train.main([str(config), *overrides]) == 2
    assert "model.grouped = 'te': grouped_matmul: backend 'te' cannot do this: its kernels" in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides, imported",
    [
        ([], False),
        (EXPERTS, True),
        ([*EXPERTS, "model.quantize=fp8"], True),
        ([*EXPERTS, "model.grouped=ragged"], False),
        ([*EXPERTS, "model.grouped=te"], True),
        (["model.attention=te", "model.dtype=bfloat16"], True),
    ],
)
def test_where_transformer_engine_may_be_picked_it_is_imported_before_jax_starts(
    config, tmp_path, monkeypatch, overrides, imported
):
    (tmp_path / "transformer_engine/jax").mkdir(parents=True)
    for package in ("transformer_engine", "transformer_engine/jax"):
        (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    seen = []
    for check in ("check_names", "make_mesh"):  # what initialises JAX
        monkeypatch.setattr(preflight, check, lambda *_: seen.append("transformer_engine.jax" in sys.modules) or "mesh")
    monkeypatch.setattr(preflight, "_check_attention", lambda config: None)
    monkeypatch.setattr(preflight, "_check_grouped", lambda config: None)
    try:
        with preflight.checked_run(load(config, [f"train.out={tmp_path}/out", *overrides]), []):
            pass
    finally:  # before monkeypatch restores the original modules
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
    assert seen == [imported, imported]


def test_attention_of_a_transformer_engine_that_is_too_old_is_one_line(config, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(te, "too_old", lambda: "TransformerEngine 2.14.1 is too old; must be at least 2.15")
    wanted = load(config, ["model.attention=te", "model.dtype=bfloat16"])
    with pytest.raises(ConfigError, match=r"model\.attention = 'te': TransformerEngine 2\.14\.1 is too old; must be"):
        preflight._check_attention(wanted)


@pytest.mark.claim("said-at-once")
def test_all_that_is_wrong_is_said_at_once(eight, config, capsys):
    wrong = {
        "train.step=3": "train.step = 3: no such key",
        "remat.residuals[fc3]=save": "remat.residuals['fc3']: matches no tagged value",
        "mesh.data=4": "mesh.stage * mesh.data * mesh.fsdp * mesh.expert * mesh.tensor = 16: must be 8",
        "model.attention=cudnn": "model.attention = 'cudnn': needs NVIDIA GPUs",
        "train.seed=x": "train.seed = 'x': must be an integer",  # and no line about the checkpoint's seed
        "data.valid_fraction=0.1": "data.valid_fraction = 0.1: the checkpoint in",
    }
    assert train.main([str(config), *EIGHT, f"train.out={eight}", "model.dtype=bfloat16", *wrong]) == 2
    lines = capsys.readouterr().err.splitlines()[1:]
    assert len(lines) == len(wrong)
    assert all(any(line.startswith(said) for line in lines) for said in wrong.values())


def test_two_runs_cannot_share_a_folder(config, tmp_path, capsys):
    with processes.locked(tmp_path):
        assert train.main([str(config), *EIGHT, f"train.out={tmp_path}"]) == 2
    assert f"train.out = '{tmp_path}': another run writes there now" in capsys.readouterr().err
    with processes.locked(tmp_path):
        pass  # the lock was released


@pytest.mark.claim("refuses-to")
def test_a_checkpoint_of_another_model_or_other_data_is_named():
    then = Config(model=Model(d_model=64, heads=4, kv_heads=2))
    saved = checkpoints.Saved(16, flat(then), {})

    def changed(section: str, **values) -> set[str]:
        now = dataclasses.replace(then, **{section: dataclasses.replace(getattr(then, section), **values)})
        found = checkpoints.differences(now, saved)
        assert all(line.startswith(f"{key} = {flat(now)[key]!r}: the checkpoint in") for key, line in found)
        return {key for key, _ in found}

    assert changed("model", layers=7, d_ff=7) == {"model.layers", "model.d_ff"}
    assert changed("model", heads=2) == {"model.heads", "model.head_dim"}  # of d_model / heads
    assert changed("model", head_dim=32) == {"model.head_dim"}
    assert changed("model", rope_theta=1.0, tied_embeddings=False) == {"model.rope_theta", "model.tied_embeddings"}
    assert changed("train", seed=1, seq_len=7, batch_size=7) == {"train.seed", "train.seq_len", "train.batch_size"}
    assert changed("data", text_field="body", tokenizer="a.json") == {"data.text_field", "data.tokenizer"}
    # The same heads in other words, and what may change.
    assert changed("model", head_dim=16, dtype="float32", attention="cudnn") == set()
    assert changed("train", learning_rate=1.0, steps=7, grad_accumulation=2, interleave=False, loss_chunk=2) == set()
    assert changed("data", cache_dir="/tmp/elsewhere") == set()
    assert changed("mesh", fsdp=2) == set()
    assert changed("model", grouped="te", capacity=2.0, aux_loss=0.1, z_loss=0.1) == set()
    # What a checkpoint does not state was absent when it was written.
    before = {key: value for key, value in flat(then).items() if "expert" not in key}
    assert checkpoints.differences(then, checkpoints.Saved(16, before, {})) == []


@pytest.mark.claim("refuses-to")
def test_a_changed_corpus_is_not_continued(eight, config, capsys):
    before = (eight / "metrics.jsonl").read_text()
    added = config.with_name("added.txt")
    added.write_text("one more document")
    try:
        assert train.main([str(config), *EIGHT, f"train.out={eight}", "train.steps=30"]) == 2
    finally:
        added.unlink()
    error = capsys.readouterr().err
    assert "/*.txt': is not what it was when the run's checkpoint was written" in error
    assert (eight / "metrics.jsonl").read_text() == before


def without_hashes(checkpoint: Path) -> None:
    """Turn a checkpoint into one of an earlier version."""
    (checkpoint / SUMS).unlink()
    origin = checkpoint / "origin/metadata"
    said = json.loads(origin.read_text())
    del said["step"]
    origin.write_text(json.dumps(said))


@pytest.mark.parametrize("damaged", ["origin/metadata", "position/metadata", "state/_METADATA", "state/d/*"])
def test_a_damaged_checkpoint_is_one_line(eight, config, tmp_path, monkeypatch, caplog, damaged):
    out = until(16, eight, tmp_path / "out")
    without_hashes(out / "checkpoints" / "16")
    files = [*(out / "checkpoints" / "16").glob(damaged)]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:9])
    settings = load(config, EIGHT)
    made = program(settings, make_mesh(settings.mesh))
    printed: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: printed.append(str(what.exc_value)))
    with pytest.raises(ConfigError) as caught, checkpoints.open_manager(out) as manager:
        checkpoints.latest(out)
        checkpoints.restore(manager, out, 16, made.state)
    ((_, line),) = caught.value.problems
    assert line.startswith(f"train.out = '{out}': the checkpoint {out}/checkpoints/16 cannot be read (")
    assert line.endswith("; there is none before it: give another train.out, or delete that folder to start again")
    time.sleep(0.5)  # one of many reads fails first; the test is about the others
    gc.collect()
    assert not printed and not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.slow
@pytest.mark.claim("refuses-to")
def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(config, tmp_path, capsys):
    out = tmp_path / "out"
    simple = ("mesh.data=8", "model.layers=1")  # compiles fast
    rare = ("train.learning_rate=1e30", "train.log_every=100", "train.checkpoint_every=1")
    assert train.main([str(config), *simple, *rare, f"train.out={out}"]) == 1
    said = capsys.readouterr()
    last = metrics.read(out / "metrics.jsonl")[-1]
    assert last["loss"] is None or last["grad_norm"] is None
    assert f"stopped: at step {last['step']} the loss is" in said.err and "nan" in said.err + said.out
    assert "NaN" not in (out / "metrics.jsonl").read_text()
    assert checkpoints.latest(out).step == last["step"] - 1


@pytest.mark.slow
@pytest.mark.claim("exit-status")
def test_a_step_that_is_not_what_is_claimed_is_not_trained(config, tmp_path, capsys, monkeypatch):
    simple = ("mesh.data=8", "train.steps=1", "train.warmup_steps=0", "train.eval_every=9")
    simple = (*simple, "train.verify=true", "train.grad_accumulation=4", "train.batch_size=32")
    assert train.main([str(config), *simple, f"train.out={tmp_path}/out"]) == 0
    said = capsys.readouterr().out
    assert said.count(": holds ") == 12 and "step: holds        placement:" in said and " fails" not in said
    real = _loops.put_row
    monkeypatch.setattr(_loops, "put_row", lambda s, x, i: s if on_host(jax.typeof(s)) else real(s, x, i))
    jax.clear_caches()
    assert train.main([str(config), *simple, f"train.out={tmp_path}/wrong"]) == 1
    said = capsys.readouterr().err
    assert "nothing is trained" in said and "loss: fails        gradients: " in said and "step: fails" in said
    assert not (tmp_path / "wrong" / "metrics.jsonl").exists()


PROFILED = ("mesh.data=8", "model.layers=1", "train.steps=5", "train.profile_steps=[2, 4]")


@pytest.mark.slow
def test_steps_of_a_run_are_profiled_on_a_page_beside_its_metrics(config, tmp_path, capsys, monkeypatch):
    """With a trace made by hand, in which the step takes 71 ms, twice."""
    out, recorded = tmp_path / "out", []

    @contextlib.contextmanager
    def trace(folder):
        recorded.append(max(losses(out)))
        yield
        recorded.append(max(losses(out)))
        write_trace(folder, steps_at(0, 100), "jit_step")

    monkeypatch.setattr(jax.profiler, "trace", trace)
    monkeypatch.setattr(preflight, "_check_profile", lambda config: None)
    assert train.main([str(config), *PROFILED, f"train.out={out}"]) == 0
    assert recorded == [2, 3] and max(losses(out)) == 5  # a step is recorded when it is over
    said = capsys.readouterr().out
    assert "steps 3 to 4: 71.0 ms each, of which 5.0 ms are exposed copies; by residual" in said
    found = embedded(out / "profile.html")
    assert found["profile"]["step_ms"] == 71 and len(found["profile"]["moves"]) == 8
    assert "mlp/fc1.gate" in [name for row in found["residuals"]["residuals"] for name in row["names"]]
    assert found["about"]["device"] == "8 cpu" and "<h1>out: steps 3 to 4</h1>" in (out / "profile.html").read_text()


@pytest.mark.slow
def test_a_profile_without_a_gpu_does_not_end_the_run(config, tmp_path, capsys, monkeypatch):
    """With JAX's own tracer, which here sees only the CPU's threads."""
    out = tmp_path / "out"
    monkeypatch.setattr(preflight, "_check_profile", lambda config: None)
    assert train.main([str(config), *PROFILED, f"train.out={out}"]) == 0
    said = capsys.readouterr().out
    assert f"train.profile_steps = [2, 4]: no profile.html, because read_profile: in the trace in {out}/trace" in said
    assert max(losses(out)) == 5 and [*out.glob("trace/**/*.xplane.pb")] and not (out / "profile.html").exists()


def embedded(page: Path) -> dict:
    """Return the data in a page."""
    return json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])


@pytest.mark.slow
def test_the_validation_set_does_not_depend_on_grad_accumulation(config):
    seen = []
    for microbatches in (1, 2):
        settings = load(config, ["mesh.data=8", "model.layers=1", f"train.grad_accumulation={microbatches}"])
        made = program(settings, make_mesh(settings.mesh))
        params = jax.jit(made.init, out_shardings=shardings_of(made.state))().params
        evaluate = jax.jit(made.evaluate)
        batches = [*train.open_source(settings, made, None).validation()]
        seen.append(
            (batches, [float(evaluate(params, train.global_batch(rows, made.tokens.sharding))) for rows in batches])
        )
    assert len(seen[0][0]) == 2 and seen[0][0][0].shape == (16, 33)
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    np.testing.assert_allclose(seen[0][1], seen[1][1], rtol=1e-6)


@pytest.mark.claim("held-out")
def test_where_less_than_a_batch_is_held_out_its_whole_microbatches_are_evaluated(config):
    few = ["model.layers=1", "train.batch_size=40", "train.grad_accumulation=4", "data.valid_fraction=0.02"]
    settings = load(config, few)
    made = program(settings, make_mesh(settings.mesh, jax.devices()[:1]))
    params = jax.jit(made.init, out_shardings=shardings_of(made.state))().params
    (rows,) = train.open_source(settings, made, None).validation()
    assert rows.shape == (20, 33)  # of 24; a batch is 40, a microbatch 10
    found, *each = (
        float(jax.jit(made.evaluate)(params, train.global_batch(some, made.tokens.sharding)))
        for some in (rows, *np.split(rows, 2))
    )
    np.testing.assert_allclose(found, np.mean(each), rtol=1e-6)


# ---- the configs that are shipped ----


class Reached(Exception):
    """The compilation, which takes what the config asks for."""


@pytest.fixture(scope="module")
def token_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.mark.slow
@pytest.mark.claim("configs")
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_config_runs_up_to_its_compilation(path, token_cache, tmp_path, monkeypatch):
    """On a mesh without devices, of which no machine here has as many. Tokenizers above 32,000 tokens, which differ
    little on this text, are one tokenizer."""

    def compile_step(made):
        raise Reached

    monkeypatch.setattr(preflight, "make_mesh", abstract_mesh)
    monkeypatch.setattr(train, "process_block", lambda *_: (0, 1))
    monkeypatch.setattr(train, "compile_step", compile_step)
    vocabulary = min(load(path).model.vocab_size, 32_000)
    here = [f"model.vocab_size={vocabulary}", f"train.out={tmp_path}", f"data.cache_dir={token_cache}"]
    with pytest.raises(Reached):
        train.main([str(path), "model.attention=xla", *here])


def test_the_command_line_reports_and_explains(config, capsys):
    assert train.main([str(config), "--report", "train.batch_size=32"]) == 0
    said = capsys.readouterr().out
    assert "mlp/fc1.gate" in said and "float32[32,32,96]" in said
    assert "expected on the device: " in said.splitlines()[-1]
    assert train.main([str(config), "--report", "mesh.fsdp=4"]) == 0
    assert "expected on each of 4 devices: " in capsys.readouterr().out
    assert train.main([str(config), "remat.residuals[fc3]=save", "--report", "train.step=3"]) == 2
    assert capsys.readouterr().err.count("\n") == 3
    with pytest.raises(SystemExit) as left:
        train.main(["--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0
    assert all(
        word in said for word in ("configs/tiny.yaml", "--report", "section.key=value", "exit codes", "train.out")
    )


def test_the_peak_of_a_chip_is_that_of_its_exact_name():
    assert metrics.mfu(989e12, "NVIDIA H100 80GB HBM3") == metrics.mfu(989e12, "NVIDIA H200") == 1.0
    assert metrics.mfu(2250e12, "NVIDIA B200") == 1.0 and metrics.mfu(2250e12, "NVIDIA GB200") == 0.9
    # Slower chips whose names contain a known one have no MFU rather than a wrong one.
    assert [metrics.mfu(1.0, kind) for kind in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "cpu")] == [None] * 3


# ---- the journal ----


def test_half_a_line_at_the_end_of_the_metrics_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i, "loss": 0.1 * i}) + "\n" for i in range(1, 6)) + '{"step": 6, "lo')
    assert [record["step"] for record in metrics.read(path)] == [1, 2, 3, 4, 5]
    journal = metrics.Journal(path, None, unigram=1.0)
    journal.begin(start=3)
    assert [record["step"] for record in metrics.read(path)] == [1, 2, 3]
    journal.begin(start=0)
    assert metrics.read(path) == []


def test_a_line_cut_in_a_letter_is_dropped_and_a_damaged_one_before_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 0.5}\n' + '{"step": 2, "note": "é'.encode()[:-1])
    assert metrics.read(path) == [{"step": 1, "loss": 0.5}]
    path.write_text('{"step": 1, "loss": 0.5}\n{"ste\n{"step": 3, "loss": 0.5}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl:2 is not a record .*; delete that line to continue"):
        metrics.read(path)


def test_a_curve_without_a_finite_loss_is_drawn(tmp_path):
    journal = metrics.Journal(tmp_path / "metrics.jsonl", Config(), unigram=1.0)
    record = dict.fromkeys(("mfu", "device_peak_bytes")) | {"learning_rate": 0.1, "host_peak_bytes": 1}
    journal.write(record | {"step": 1, "loss": math.nan, "grad_norm": math.inf, "tokens_per_second": 1.0})
    (read,) = metrics.read(journal.path)
    assert read["loss"] is None and read["grad_norm"] is None and read["tokens_per_second"] == 1.0
    journal.draw()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


# ---- on a GPU ----

# configs/llama3-8b.yaml with its residuals, an eighth as wide, with 4 layers and short sequences.
SCALED = """
model.vocab_size=300 model.layers=4 model.d_model=512 model.heads=4 model.kv_heads=1 model.d_ff=1792
train.steps=8 train.batch_size=16 train.seq_len=512 train.loss_chunk=256 train.warmup_steps=2 train.learning_rate=1e-3
train.grad_accumulation=2
train.log_every=1 train.eval_every=4 train.eval_batches=1 train.checkpoint_every=4 remat.min_offload_bytes=0
data.valid_fraction=0.5
"""


@pytest.mark.gpu
def test_llama_scaled_down_trains_with_offload_and_flash_attention_has_the_losses_of_xla(config, tmp_path, capsys):
    path, cache = load(config).data.path, load(config).data.cache_dir
    here = [*SCALED.split(), f"data.path={path}", f"data.cache_dir={cache}", f"mesh.fsdp={jax.device_count()}"]
    with_te = ["te"] if te.importable() else []
    for attention in ("cudnn", *with_te, "xla"):
        chosen = [f"model.attention={attention}", f"train.out={tmp_path}/{attention}"]
        assert train.main([f"{ROOT}/configs/llama3-8b.yaml", *here, *chosen]) == 0
        said = capsys.readouterr().out
        assert "2 microbatches interleaved; the table is of one" in said
        rows = [line.split() for line in said.splitlines() if " offloaded " in line and "not offloaded" not in line]
        # With flash attention, its softmax statistics too.
        context = {"attn/context"} if attention == "xla" else {"attn/context.0", "attn/context.1"}
        others = {"layer_input", "attn/q", "attn/k", "attn/v", "mlp_input", "mlp/fc1.gate", "mlp/fc1.up"}
        assert {row[0] for row in rows} == others | context
    for key, flash in itertools.product(("loss", "valid_loss"), ("cudnn", *with_te)):
        got, xla = (losses(tmp_path / attention, key) for attention in (flash, "xla"))
        assert got.keys() == xla.keys() and got[8] < max(got.values()) - 0.3
        # Nats per token. Both round to bfloat16, 8 bits, at different places; a wrong mask or scale differs by more.
        np.testing.assert_allclose([*got.values()], [*xla.values()], atol=0.02, rtol=0)


@pytest.mark.gpu
def test_real_steps_are_profiled_and_what_runs_between_them_is_left_out(config, tmp_path):
    path, cache = load(config).data.path, load(config).data.cache_dir
    here = [*SCALED.split(), f"data.path={path}", f"data.cache_dir={cache}", f"mesh.fsdp={jax.device_count()}"]
    # At step 4 it evaluates and saves. Without microbatches: each layer's copies have one place in a step.
    chosen = ["train.profile_steps=[3, 7]", f"train.out={tmp_path}/out", "train.grad_accumulation=1"]
    assert train.main([f"{ROOT}/configs/llama3-8b.yaml", *here, *chosen]) == 0
    found = embedded(tmp_path / "out/profile.html")
    offloaded = {", ".join(r["names"]) for r in found["residuals"]["residuals"] if r["state"] == "offloaded"}
    moves = found["profile"]["moves"]
    assert {m["residual"] for m in moves} == offloaded and found["profile"]["unattributed_ms"] == 0, moves
    for residual, direction in itertools.product(offloaded, ("d2h", "h2d")):
        layers = [m["layer"] for m in moves if (m["residual"], m["direction"]) == (residual, direction)]
        assert sorted(layer for layer in layers if layer is not None) == [0, 1, 2], (residual, layers)
    fastest, slowest = found["profile"]["spread_ms"]
    assert 0 < fastest <= found["profile"]["step_ms"] <= slowest < 1000


def test_each_exception_may_change_and_exists():
    saved = checkpoints.Saved(16, flat(Config()) | dict.fromkeys(checkpoints._MAY_CHANGE, "another"), {})
    assert set(flat(Config())) >= checkpoints._MAY_CHANGE
    assert checkpoints.differences(Config(), saved) == []


@pytest.mark.slow
@pytest.mark.claim("stages")
def test_a_run_goes_on_with_other_stages_as_if_undisturbed(config, tmp_path, capfd):
    """Checkpoints hold the layers in their order, whichever stages have them."""
    run = ("model.layers=8", "train.steps=6", "train.checkpoint_every=2", "train.eval_every=6", f"train.out={tmp_path}")
    stages = [
        ("mesh.stage=2", "train.virtual_stages=2", "mesh.data=2", "mesh.fsdp=2", "train.grad_accumulation=4"),
        ("mesh.data=4", "mesh.fsdp=2", "train.grad_accumulation=2"),
        ("mesh.stage=4", "mesh.fsdp=2", "train.grad_accumulation=4"),
    ]
    curves = []
    for how in stages:
        assert train.main([str(config), *run, *how]) == 0
        said = capfd.readouterr()
        assert ("from its checkpoint at step 4" in said.out) == bool(curves)
        # No array of layers is gathered on all devices to go to a checkpoint.
        assert "rematerialization" not in said.err or how is not stages[0]
        curves.append([losses(tmp_path), losses(tmp_path, "valid_loss"), losses(tmp_path, "grad_norm")])
        shutil.rmtree(tmp_path / "checkpoints" / "6")
    for values in zip(*curves, strict=True):
        undisturbed, *others = ([*at_step.values()] for at_step in values)
        for resumed in others:
            np.testing.assert_allclose(resumed, undisturbed, rtol=1e-5)


# ---- the progress bar ----


def on_a_terminal(arguments: list[str]) -> str:
    """Return what a process prints whose output is a terminal of 100 columns."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 100))
    process = spawn(arguments, stdout=its, stderr=its)
    os.close(its)
    text = b""
    with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as output:  # Linux: EIO once it has ended
        while part := output.read(4096):
            text += part
    assert process.wait(timeout=PATIENCE) == 0, text
    return text.decode()


@pytest.mark.slow
@pytest.mark.claim("progress-bar")
def test_a_terminal_has_a_bar_below_the_lines_and_a_file_has_the_lines(config, tmp_path):
    overrides = ("model.layers=1", "train.steps=12", "train.log_every=3", "train.warmup_steps=0")
    text = on_a_terminal(command(config, f"train.out={tmp_path / 'a'}", *overrides))
    bars = re.findall(r"(\d+)%\|[^|]*\| *(\d+)/12 \[(\d\d:\d\d)<(\S+), ", text)
    assert bars and all(int(percent) == round(100 * int(step) / 12) for percent, step, *_ in bars)
    assert any(re.fullmatch(r"\d\d:\d\d", left) for *_, left in bars), bars  # it knows how long the rest takes
    # Every line is whole: what is behind the last carriage return of each is what remains on the terminal.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    steps = [line.partition("/")[0] for line in lines if line.startswith("step ") and "valid" not in line]
    assert steps == ["step 1", "step 3", "step 6", "step 9", "step 12"]
    assert any(line.startswith("finished; the loss curve is") for line in lines)

    plain = finish(spawn(command(config, f"train.out={tmp_path / 'b'}", *overrides)))
    assert "\r" not in plain and "%|" not in plain
    assert plain.count("\nstep ") == text.count("step 1/12") + 4 + plain.count("valid loss")
