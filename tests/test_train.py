"""The training program as a user meets it: it learns, is stopped, killed, resumed, and run on two processes."""

import inspect
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import PATIENCE, ROOT, SHORT, fast_compiles, finish, free_port, inherited_flags, start, wait_for
from jax.sharding import NamedSharding, PartitionSpec

import jaxoffload
from jaxoffload.grouped import te
from jaxoffload.proof import exact_options
from models import metrics, train
from models.config import Config, ConfigError, Distributed, Mesh, load
from models.sharding import abstract_mesh, make_mesh

CONFIG = """\
model: {{vocab_size: 300, layers: 2, d_model: 64, heads: 4, kv_heads: 2, d_ff: 96, dtype: float32}}
remat: {{residuals: {{fc1: offload, attn/*: save}}, min_offload_bytes: 0}}
data: {{path: {folder}/*.txt, valid_fraction: 0.2}}
train:
  {{steps: 24, batch_size: 16, seq_len: 32, loss_chunk: 16, learning_rate: 1e-2, warmup_steps: 3,
    log_every: 1, eval_every: 8, eval_batches: 2, checkpoint_every: 8}}
"""
EIGHT = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
SIMPLE = ("mesh.data=8", "model.layers=1")  # compiles fast


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


@pytest.fixture(scope="module")
def eight(config, tmp_path_factory) -> Path:
    """The folder of a whole run over pytest's own eight devices."""
    out = tmp_path_factory.mktemp("eight") / "out"
    assert train.main([str(config), *EIGHT, f"train.out={out}"]) == 0
    return out


def losses(out: Path, key: str = "loss") -> dict[int, float]:
    return {record["step"]: record[key] for record in metrics.read(out / "metrics.jsonl") if key in record}


def steps(out: Path) -> list[int]:
    return sorted(int(folder.name) for folder in (out / "checkpoints").iterdir() if folder.name.isdecimal())


# ---- one process ----


@pytest.mark.claim("make-train")
def test_the_loss_falls_from_ln_vocab_and_a_finished_run_is_left_alone(eight, config, capsys):
    loss, valid = losses(eight), losses(eight, "valid_loss")
    assert list(loss) == list(range(1, 25)) and list(valid) == [0, 8, 16, 24]
    assert abs(loss[1] - math.log(300)) < 0.3 and abs(valid[0] - math.log(300)) < 0.3
    assert valid[24] < valid[8] < valid[0] - 1
    before = {path: path.stat().st_mtime_ns for path in eight.rglob("*") if path.is_file()}
    assert train.main([str(config), *EIGHT, f"train.out={eight}"]) == 0
    assert f"{eight} is finished, at step 24 of 24" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in eight.rglob("*") if path.is_file()} == before


@pytest.mark.claim("make-train")
def test_records_hold_what_people_look_for(eight):
    records = [record for record in metrics.read(eight / "metrics.jsonl") if "loss" in record]
    always = {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu"}
    assert set(records[-1]) == always | {"device_peak_gib", "host_peak_gib"}
    assert records[-1]["tokens_per_second"] > 0 and records[-1]["host_peak_gib"] > 0.01
    rates = [record["learning_rate"] for record in records]
    np.testing.assert_allclose(rates[:4], [0, 1e-2 / 3, 2e-2 / 3, 1e-2], rtol=1e-6)
    assert rates[-1] < 0.11 * 1e-2  # the end of the cosine, a tenth of the peak


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps_and_interleaved_microbatches(eight, config, tmp_path, capsys):
    out = shutil.copytree(eight, tmp_path / "out")
    assert train.main([str(config), *EIGHT, f"train.out={out}", "train.steps=25", "train.grad_accumulation=2"]) == 0
    said = capsys.readouterr().out
    assert "2 microbatches interleaved; the table is of one" in said
    assert f"continuing {out} from its checkpoint at step 24" in said
    assert list(losses(out)) == list(range(1, 26)) and losses(out)[25] < losses(out)[4]


@pytest.mark.long
@pytest.mark.claim("stages")
def test_a_run_goes_on_with_other_stages_as_if_undisturbed(config, tmp_path, capfd):
    run = ("model.layers=4", "train.steps=6", "train.checkpoint_every=2", "train.eval_every=6", f"train.out={tmp_path}")
    stages = [
        ("mesh.stage=2", "mesh.data=2", "mesh.fsdp=2", "train.grad_accumulation=2"),
        ("mesh.data=4", "mesh.fsdp=2", "train.grad_accumulation=2", "train.interleave=false"),
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
    for undisturbed, resumed in zip(*curves, strict=True):
        np.testing.assert_allclose([*resumed.values()], [*undisturbed.values()], rtol=1e-5)


# ---- processes ----


def command(config: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "models.train", str(config), *overrides]


def spawn(arguments: list[str], devices: int = 1) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(jax.config.values["jax_disable_most_optimizations"])),
        "XLA_FLAGS": inherited_flags(devices=devices),
    }
    return start(arguments, cwd=ROOT, env=environment)


# A run that gets a signal at a known moment: behind the loss of a step, or before a checkpoint gets its name, as orbax
# does with a folder in which all is written.
SIGNALLED = """
import os, signal, sys
from models import metrics, train

number, moment = signal.Signals[sys.argv[1]], sys.argv[2]
write, rename = metrics.Metrics.write, os.rename

def signal_at(reached):
    if reached == moment:
        os.kill(os.getpid(), number)

def writing(log, record):
    write(log, record)
    signal_at(f"step {record['step']}")

def renaming(source, target):
    signal_at(f"checkpoint {os.path.basename(target)}")
    rename(source, target)

metrics.Metrics.write, os.rename = writing, renaming
sys.exit(train.main(sys.argv[3:]))
"""


# A run that takes another process for lost after ten seconds rather than 100.
SOON_LOST = """
import functools, sys
import jax
from models import train

jax.distributed.initialize = functools.partial(jax.distributed.initialize, heartbeat_timeout_seconds=10)
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.claim("goes-on", "trains-anywhere")
def test_stopped_and_killed_and_resumed_the_curve_is_the_uninterrupted_one(eight, config, tmp_path):
    broken = tmp_path / "broken"
    again = command(config, *EIGHT, f"train.out={broken}", "train.tensorboard=true")
    signalled = lambda *how: spawn([sys.executable, "-c", SIGNALLED, *how, *again[3:]], devices=8)

    text = finish(signalled("SIGTERM", "step 3"), code=128 + signal.SIGTERM)
    assert "mlp/fc1.gate" in text and "the compiled step needs" in text
    assert "stopped by SIGTERM; step 4 of 24 is saved, and the same command continues" in text and steps(broken) == [4]
    finish(signalled("SIGKILL", "checkpoint 8"), code=-signal.SIGKILL)
    assert steps(broken) == [4] and max(losses(broken)) >= 8
    assert "from its checkpoint at step 4" in finish(spawn(again, devices=8))
    for key in ("loss", "grad_norm", "valid_loss"):
        assert losses(broken, key) == losses(eight, key)
    assert len([*(broken / "tensorboard").iterdir()]) == 3


def two_processes(
    config: Path,
    out: Path,
    *overrides: str,
    second: tuple[str, ...] = (),
    devices: int = 4,
    program: tuple[str, ...] = ("-c", SOON_LOST),
) -> list[subprocess.Popen]:
    """Start process 0 and process 1, with so many devices each; `second` has overrides for process 1 only."""
    cluster = [f"distributed.coordinator=localhost:{free_port()}", "distributed.num_processes=2"]
    arguments = [sys.executable, *program, str(config), *EIGHT, f"train.out={out}", *cluster, *overrides]
    each = ((), second)
    return [spawn([*arguments, *each[i], f"distributed.process_id={i}"], devices) for i in range(2)]


def until(step: int, finished: Path, out: Path) -> Path:
    """Return a copy of a finished run as it was after the checkpoint at `step`."""
    shutil.copytree(finished, out)
    for late in (late for late in steps(out) if late > step):
        shutil.rmtree(out / f"checkpoints/{late}")
    return out


@pytest.mark.slow
@pytest.mark.claim("trains-anywhere")
def test_two_processes_have_the_losses_of_one_which_resumes_them(eight, config, tmp_path):
    both = tmp_path / "both"
    first, second = map(finish, two_processes(config, both))
    assert "step 24/24  loss" in first and "step" not in second
    assert losses(both).keys() == losses(eight).keys()
    np.testing.assert_allclose([*losses(both).values()], [*losses(eight).values()], rtol=1e-5)

    one_after_two = until(16, both, tmp_path / "one_after_two")
    assert train.main([str(config), *EIGHT, f"train.out={one_after_two}"]) == 0
    for key in ("loss", "valid_loss"):
        assert losses(one_after_two, key).keys() == losses(eight, key).keys()
        np.testing.assert_allclose([*losses(one_after_two, key).values()], [*losses(eight, key).values()], rtol=1e-5)


@pytest.mark.long
def test_two_processes_verify_a_step_together(config, tmp_path):
    verify = ("-m", "jaxoffload", "verify", "models.train:step_for")
    for text in map(finish, two_processes(config, tmp_path, program=verify)):
        assert text.count("holds        gradients") == text.count("holds        placement") == 2, text
        assert "fails " not in text


@pytest.mark.slow
@pytest.mark.claim("lost-processes")
def test_a_signal_to_one_process_stops_all_at_one_step_and_a_lost_one_ends_the_other(config, tmp_path):
    simple = ("mesh.data=2", "mesh.fsdp=1", "mesh.tensor=1", "model.layers=1")
    simple = (*simple, "train.steps=100000", "train.checkpoint_every=1000")
    both = two_processes(config, tmp_path, *simple, devices=1)
    wait_for(both[0], lambda: len(losses(tmp_path)) > 2)
    both[1].send_signal(signal.SIGTERM)
    text, silent = (finish(process, code=128 + signal.SIGTERM) for process in both)
    (saved,) = steps(tmp_path)
    assert f"stopped by SIGTERM; step {saved} of 100000 is saved" in text and "stopped" not in silent

    left, lost = two_processes(config, tmp_path, *simple, devices=1)
    wait_for(left, lambda: max(losses(tmp_path)) > saved)
    lost.kill()
    text, _ = left.communicate(timeout=PATIENCE)
    assert left.returncode
    assert inspect.signature(jax.distributed.initialize).parameters["heartbeat_timeout_seconds"].default == 100
    assert f"from its checkpoint at step {saved}" in text and steps(tmp_path) == [saved]


@pytest.mark.slow
def test_processes_with_different_configs_end(config, tmp_path):
    for process in two_processes(config, tmp_path, second=("train.seed=3",)):
        text, _ = process.communicate(timeout=600)
        assert process.returncode == 1 and "the config differs between the processes" in text
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.claim("trains-anywhere")
@pytest.mark.parametrize(
    "environment, distributed, expected",
    [
        ({}, Distributed(), []),
        ({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "1"}, Distributed(), []),
        ({"SLURM_STEP_NUM_TASKS": "16"}, Distributed(), [(None, None, None)]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, Distributed(), [(None, None, None)]),
        ({"SLURM_STEP_NUM_TASKS": "16"}, Distributed("a:1", 2, 1), [("a:1", 2, 1)]),
        ({}, Distributed("a:1", 2, 1), [("a:1", 2, 1)]),
    ],
)
def test_processes_join_when_the_launcher_or_the_config_says_so(monkeypatch, environment, distributed, expected):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **_: calls.append(arguments))
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    train.join(distributed)
    assert calls == expected


@pytest.mark.parametrize(
    "distributed, said",
    [
        (Distributed(num_processes=2, process_id=0), "give all three, or none and a launcher"),
        (Distributed("a:1"), "give all three, or none and a launcher"),
        (Distributed("a:1", 2, 2), "distributed.process_id = 2: must be less than num_processes = 2"),
    ],
)
def test_a_part_of_what_joins_processes_is_refused(monkeypatch, distributed, said):
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", None)
    with pytest.raises(ConfigError, match=said):
        train.join(distributed)


# ---- what cannot run says why ----


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["train.step=3"], "train.step = 3: Key 'step' not in 'Train'. Did you mean: 'steps'?"),
        (["remat.residuals[fc3]=save"], "residuals['fc3']: matches no tagged value"),
        (["mesh.data=4"], "mesh.stage * mesh.data * mesh.fsdp * mesh.expert * mesh.tensor = 16: must be 8"),
        (["model.attention=cudnn", "model.dtype=bfloat16"], "model.attention = 'cudnn': needs NVIDIA GPUs"),
        (["model.experts=4", "model.d_expert=64", "model.grouped=te"], "backend 'te' needs TransformerEngine"),
        (["data.path=/nowhere/*.txt"], "data.path = '/nowhere/*.txt': "),
        (
            ["model.layers=2", "mesh.stage=2", "mesh.data=1", "train.grad_accumulation=2"],
            "2 layers in 2 chunks, of which one layer each offloads",
        ),
    ],
)
def test_what_cannot_run_is_a_message_and_exit_code_2(config, tmp_path, capsys, overrides, said):
    assert train.main([str(config), *EIGHT, f"train.out={tmp_path}/out", *overrides]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out/checkpoints").exists()


@pytest.mark.slow
@pytest.mark.claim("refuses-to")
def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(config, tmp_path):
    rare = ("train.learning_rate=1e30", "train.log_every=100", "train.checkpoint_every=1")
    with pytest.raises(SystemExit, match=r"stopped: step .* is not finite, and not saved"):
        train.main([str(config), *SIMPLE, *rare, f"train.out={tmp_path}/out"])
    last = metrics.read(tmp_path / "out/metrics.jsonl")[-1]
    assert last["loss"] is None or last["grad_norm"] is None
    assert "NaN" not in (tmp_path / "out/metrics.jsonl").read_text()
    assert steps(tmp_path / "out")[-1] == last["step"] - 1


def test_the_optimizer_goes_to_the_host_if_the_step_does_not_fit(config, tmp_path, capsys, monkeypatch):
    def compile_step(made):
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(made.state.optimizer)}
        if "pinned_host" in kinds:
            sys.exit("on the host")
        return None, False

    monkeypatch.setattr(train, "compile_step", compile_step)
    with pytest.raises(SystemExit, match="on the host"):
        train.main([str(config), *SIMPLE, f"train.out={tmp_path}"])
    assert "so the optimizer's state goes to the host" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.claim("optimizer-elsewhere")
def test_a_run_goes_on_with_its_optimizer_elsewhere_and_ends_with_the_same_bits(config, tmp_path, capsys, monkeypatch):
    """`auto` finds that the step does not fit: on these devices nothing would."""
    chosen = (*SHORT, "train.steps=4", "model.param_dtype=bfloat16")
    run = lambda out, where: train.main([str(config), *chosen, f"train.optimizer_on_host={where}", f"train.out={out}"])
    monkeypatch.setattr(metrics, "memory_limit", lambda device: 1)
    monkeypatch.setattr(jaxoffload, "compiler_options", exact_options)
    assert run(tmp_path / "auto", "auto") == 0
    said = capsys.readouterr().out
    assert "a device has 0.0 MiB\nso the optimizer's state goes to the host" in said
    shutil.copytree(tmp_path / "auto", tmp_path / "false", ignore=shutil.ignore_patterns("4"))
    assert run(tmp_path / "false", "false") == 0
    assert "its checkpoint at step 2" in capsys.readouterr().out
    sums = lambda out: json.loads((tmp_path / out / "checkpoints/4/origin/metadata").read_text())["sums"]
    assert sums("auto") == sums("false")
    assert losses(tmp_path / "auto") == losses(tmp_path / "false")


def test_the_pinned_pool_may_take_three_quarters_of_the_machine(tmp_path, monkeypatch):
    pool = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    monkeypatch.setattr(train, "_DRIVER", tmp_path)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 128 * 2**18}.get)
    monkeypatch.setenv(pool, "")
    monkeypatch.delenv(pool)
    train.limit_pinned_memory()
    assert pool not in os.environ  # no GPUs
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    train.limit_pinned_memory()
    assert os.environ[pool] == "48"
    monkeypatch.setenv(pool, "7")
    train.limit_pinned_memory()
    assert os.environ[pool] == "7"


# ---- the configs that are shipped, and the command line ----


@pytest.mark.slow
@pytest.mark.claim("configs")
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_config_runs_on_its_own_data_up_to_its_compilation(path, tmp_path, monkeypatch):
    """On a mesh without devices, of which no machine here has as many."""
    monkeypatch.setattr(train, "make_mesh", abstract_mesh)
    monkeypatch.setattr(train, "process_block", lambda *_: (0, 1))
    monkeypatch.setattr(train, "compile_step", lambda made: sys.exit("it compiles"))
    with pytest.raises(SystemExit, match="it compiles"):
        train.main([str(path), "model.attention=xla", f"train.out={tmp_path}"])


@pytest.mark.slow
def test_the_command_line_reports_and_explains(config, capsys):
    assert train.main([str(config), "--report", "train.batch_size=32", "mesh.fsdp=4"]) == 0
    said = capsys.readouterr().out
    assert "mlp/fc1.gate" in said and "float32[32,32,96]" in said and "per device" in said.splitlines()[-1]
    assert train.main([f"{ROOT}/configs/llama3-8b-one-gpu.yaml", "--report"]) == 0
    said = capsys.readouterr().out
    assert "8,030,261,248 parameters" in said and "optimizer on the host 45,948.0 MiB" in " ".join(said.split())
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


def test_half_a_line_at_the_end_of_the_metrics_is_dropped_and_what_comes_after_the_checkpoint(tmp_path):
    path, config = tmp_path / "metrics.jsonl", config_of(tmp_path)
    path.write_text("".join(json.dumps({"step": i, "loss": 0.1 * i}) + "\n" for i in range(1, 6)) + '{"step": 6, "lo')
    assert [record["step"] for record in metrics.read(path)] == [1, 2, 3, 4, 5]
    metrics.Metrics(config, start=3)
    assert [record["step"] for record in metrics.read(path)] == [1, 2, 3]
    metrics.Metrics(config, start=0).write({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    assert metrics.read(path) == [{"step": 1, "loss": None, "grad_norm": None}]


def config_of(out: Path, *overrides: str) -> Config:
    return Config(train=load(ROOT / "configs/tiny.yaml", [f"train.out={out}", *overrides]).train)


@pytest.mark.claim("tensorboard")
def test_tensorboard_shows_the_records_and_drops_what_came_after_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # tensorboardX sets it
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="needs the extra `tensorboard`")
    log = metrics.Metrics(config_of(tmp_path, "train.tensorboard=true"), start=3)
    log.write({"step": 4, "loss": 2.5, "mfu": None})
    log.events.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, events = file.read_bytes(), []
    while data:  # a length of 8 bytes and its checksum of 4, the event, and its checksum
        size = int.from_bytes(data[:8], "little")
        events.append(event_pb2.Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert any(event.step == 4 and event.session_log.status == event.session_log.START for event in events)
    assert [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value] == [(4, "loss", 2.5)]


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
def test_llama_scaled_down_trains_with_offload_and_flash_attention_has_the_losses_of_xla(
    config, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64")  # or else the program sets it
    here = [*SCALED.split(), f"data.path={load(config).data.path}", f"mesh.fsdp={jax.device_count()}"]
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


def test_a_run_says_how_long_pinning_takes(capsys, monkeypatch):
    """Which takes a second per GiB."""
    sizes = ("argument", "output", "alias", "temp", "host_argument", "host_temp")
    plan = SimpleNamespace(**{f"{name}_size_in_bytes": 2 * 2**30 for name in sizes})
    monkeypatch.setattr(train, "lowered_step", lambda *_: SimpleNamespace(compile=lambda: None))
    monkeypatch.setattr(train.proof, "memory_plan", lambda _: plan)
    mesh = make_mesh(Mesh(), jax.devices()[:1])
    train.compile_step(SimpleNamespace(tokens=jax.device_put(jnp.zeros(1), NamedSharding(mesh, PartitionSpec()))))
    said = capsys.readouterr()
    assert "4,096.0 MiB of host memory for it; starting takes about 4 s longer" in said.out + said.err
