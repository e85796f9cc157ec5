"""Damaged checkpoints and token files: training never uses data that differs from what was written."""

import asyncio
import json
import os
import random
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CONSTANT, finish
from test_train import config, losses, spawn, without_hashes  # noqa: F401

from models import checkpoints, data, metrics, train
from models.config import Config
from models.integrity import SUMS, read_sums, write_sums
from models.reading import ConfigError
from models.step import State

# ---- a checkpoint, without training ----


def state_at(step: int) -> State:
    return State(jnp.int32(step), {"w": jnp.arange(4096, dtype=jnp.float32) + step}, ())


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The folder of a run that saved steps 2 and 4."""
    out = tmp_path_factory.mktemp("written")
    with checkpoints.open_manager(out) as manager:
        for step in (2, 4):
            checkpoints.save(manager, step, state_at(step), {"next_index": step}, Config(), {"data.path": "x"})
    return out


@pytest.fixture
def out(written, tmp_path) -> Path:
    return shutil.copytree(written, tmp_path / "out")


def restored(out: Path, on_bad: str = "error") -> State:
    """Restore as the training program does."""
    saved = checkpoints.latest_verified(out, on_bad)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_at(0))
    with checkpoints.open_manager(out) as manager:
        return checkpoints.restore(manager, out, saved.step, abstract)[0]


def refused(out: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        restored(out)
    ((_, line),) = caught.value.problems
    assert "\n" not in line
    return line


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[random.Random(file.name).randrange(len(content))] ^= 1 << random.Random(0).randrange(8)
    file.write_bytes(content)


@pytest.mark.claim("damage")
def test_every_file_with_a_flipped_bit_is_named_with_the_checkpoint_before(written, tmp_path):
    names = [*read_sums(written / "checkpoints/4"), SUMS]
    assert {"origin/metadata", "position/metadata", "state/_METADATA"} < set(names) and len(names) > 8
    for number, name in enumerate(names):
        copy = shutil.copytree(written, tmp_path / str(number))
        flip(copy / "checkpoints/4" / name)
        line = refused(copy)
        assert line.startswith(
            f"train.out = '{copy}': the checkpoint {copy}/checkpoints/4 is damaged: {name} is not what"
        )
        assert line.endswith(
            "; delete that folder to continue from the one before, of step 2, or give "
            "train.on_bad_checkpoint=previous, which continues from there, or another train.out"
        )
        shutil.rmtree(copy / "checkpoints/4")
        assert restored(copy).step == 2  # the advice works


def test_nothing_reads_what_orbax_writes_last(out):
    for name in checkpoints._NOT_HASHED:
        (out / "checkpoints/4" / name).write_bytes(b"\xff" + bytes(20))
    np.testing.assert_array_equal(restored(out).params["w"], state_at(4).params["w"])


@pytest.mark.parametrize("lost", ["state/manifest.ocdbt", "origin/metadata", SUMS])
def test_a_file_that_is_gone_is_named(out, lost):
    (out / "checkpoints/4" / lost).unlink()
    line = refused(out)
    assert f"{lost} is missing" in line or f"has no {SUMS}, the hashes of its files" in line


def test_the_hashes_are_there_before_a_checkpoint_gets_its_name(tmp_path, monkeypatch):
    """So what a kill leaves under a step's name is whole and verified."""
    rename, sealed = os.rename, {}

    def renaming(source, target):
        if Path(target).name.isdecimal():
            sealed[Path(target).name] = read_sums(Path(source)).keys()
        rename(source, target)

    monkeypatch.setattr(os, "rename", renaming)
    with checkpoints.open_manager(tmp_path) as manager:
        checkpoints.save(manager, 2, state_at(2), {"next_index": 2}, Config(), {})
    folder = tmp_path / "checkpoints/2"
    all_files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert sealed == {"2": all_files - {SUMS, *checkpoints._NOT_HASHED}}


def test_a_checkpoint_that_cannot_be_sealed_gets_no_name(written, out, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("no hashes")

    monkeypatch.setattr(checkpoints, "write_sums", failing)
    with pytest.raises(RuntimeError, match="no hashes"), checkpoints.open_manager(out) as manager:
        checkpoints.save(manager, 6, state_at(6), {"next_index": 6}, Config(), {})
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"2", "4"}


def test_what_a_kill_left_is_removed_and_a_checkpoint_set_aside_stays(out):
    for name in ("5.orbax-checkpoint-tmp", "6.damaged"):
        shutil.copytree(out / "checkpoints/4", out / "checkpoints" / name)
    with checkpoints.open_manager(out) as manager:
        checkpoints.save(manager, 6, state_at(6), {"next_index": 6}, Config(), {})
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"4", "6", "6.damaged"}


@pytest.mark.parametrize("position", [{"next_index": -4}, {"next_index": 3}, {"next_index": 4.0}, {"at": 4}, [4], None])
def test_another_position_in_the_data_is_refused(out, position):
    (out / "checkpoints/4/position/metadata").write_text(json.dumps(position))
    write_sums(out / "checkpoints/4", checkpoints._NOT_HASHED)
    line = refused(out)
    assert f"checkpoints/4 has the position {position!r} in the data, which does not belong to its step; " in line
    without_hashes(out / "checkpoints/4")
    assert f"has the position {position!r} in the data" in refused(out)


def test_a_renamed_checkpoint_is_refused(out, capsys):
    folder = (out / "checkpoints/4").rename(out / "checkpoints/9")
    assert "checkpoints/9 is of step 4 according to its metadata; delete" in refused(out)
    without_hashes(folder)
    assert "checkpoints/9 has the position {'next_index': 4} in the data" in refused(out)
    (folder / "position/metadata").write_text('{"next_index": 9}')
    assert "checkpoints/9 is of step 4 according to its state; delete" in refused(out)


def test_a_checkpoint_of_an_earlier_version_is_restored_and_said_not_to_be_verified(out, capsys):
    without_hashes(out / "checkpoints/4")
    assert restored(out).step == 4
    folder = out / "checkpoints/4"
    said = f"the checkpoint {folder} comes from an earlier version, which wrote no hashes: it is not verified\n"
    assert capsys.readouterr().out == said


def test_previous_passes_by_those_that_are_damaged(out, capsys):
    flip(next((out / "checkpoints/4").glob("state/ocdbt.process_0/d/*")))
    shutil.copytree(out / "checkpoints/4", out / "checkpoints/7")
    assert checkpoints.latest(out, "previous").step == 4  # by its words; nothing is moved for this
    assert restored(out, "previous").step == 2
    said = capsys.readouterr().out.splitlines()
    start = "train.on_bad_checkpoint = 'previous': the checkpoint "
    assert len(said) == 2 and all(line.startswith(start) for line in said)
    assert "/7 is of step 4 according to its metadata; it is skipped, and renamed to " in said[0]
    assert said[0].endswith("/7.damaged")
    assert "/4 is damaged: state/ocdbt.process_0/d/" in said[1] and said[1].endswith("/4.damaged")
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"2", "4.damaged", "7.damaged"}


def test_where_none_is_left_nothing_is_moved(out):
    for step in (2, 4):
        flip(out / f"checkpoints/{step}/origin/metadata")
    for find in (checkpoints.latest, checkpoints.latest_verified):
        with pytest.raises(ConfigError) as caught:
            find(out, "previous")
        ((_, line),) = caught.value.problems
        assert line.startswith("train.on_bad_checkpoint = 'previous': none is left to continue from in ")
        assert "(4 is damaged: origin/metadata is not what was written; 2 is damaged: origin/metadata is" in line
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"2", "4"}


# ---- a run ----


@pytest.fixture(scope="module")
def run(config, tmp_path_factory) -> Path:  # noqa: F811
    """The folder of a run of six steps, which has checkpoints at 4 and 6."""
    folder = tmp_path_factory.mktemp("run") / "out"
    assert train.main([str(config), *CONSTANT, "train.steps=6", f"train.out={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def whole(run, config, tmp_path_factory) -> Path:  # noqa: F811
    """The folder of the run that continues for two steps from its last checkpoint."""
    folder = shutil.copytree(run, tmp_path_factory.mktemp("whole") / "out")
    assert train.main([str(config), *CONSTANT, "train.steps=8", f"train.out={folder}"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.claim("damage")
@pytest.mark.parametrize("version", ["hashes", "no hashes"])
def test_a_run_goes_on_from_the_checkpoint_before_with_the_same_losses(
    run,
    whole,
    config,  # noqa: F811
    tmp_path,
    capsys,
    version,
):
    broken = shutil.copytree(run, tmp_path / "broken")
    longer = [str(config), *CONSTANT, "train.steps=8"]
    last = broken / "checkpoints/6"
    if version == "hashes":
        flip(max(last.glob("state/ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size))
        found = "is damaged: state/ocdbt.process_0/d/"
    else:  # then only what orbax cannot read is known to be damaged
        without_hashes(last)
        shutil.rmtree(last / "state/d")
        found = "cannot be read ("
    before = (broken / "metrics.jsonl").read_text()
    assert train.main([*longer, f"train.out={broken}"]) == 2
    refusal = capsys.readouterr().err.splitlines()
    assert len(refusal) == 2 and f"the checkpoint {last} {found}" in refusal[1]
    assert (broken / "metrics.jsonl").read_text() == before and last.is_dir()

    assert train.main([*longer, f"train.out={broken}", "train.on_bad_checkpoint=previous"]) == 0
    said = capsys.readouterr().out
    assert f"the checkpoint {last} {found}" in said and f"continuing {broken} from its checkpoint at step 4" in said
    assert {path.name for path in (broken / "checkpoints").iterdir()} == {"6", "6.damaged", "8"}
    assert [record["step"] for record in metrics.read(broken / "metrics.jsonl") if "loss" in record] == [*range(1, 9)]
    assert losses(broken) == losses(whole)


# Save two checkpoints; process 0 then flips a bit in a file of process 1. Print what is found.
TOGETHER = """
import contextlib, sys
from pathlib import Path
from types import SimpleNamespace
import jax, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import checkpoints, processes
from models.config import Config, Distributed
from models.step import State

out, coordinator, process = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
processes.join(Distributed(coordinator=coordinator, num_processes=2, process_id=process), out, checkpoints.steps)
together = contextlib.ExitStack()
together.enter_context(processes.announce_exit())
over = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
whole = NamedSharding(over.mesh, PartitionSpec())
shapes = State(jax.ShapeDtypeStruct((), int, sharding=whole), jax.ShapeDtypeStruct((4096,), int, sharding=over), ())
filled = lambda like, step: jax.make_array_from_callback(
    like.shape, like.sharding, lambda at: np.full(like.shape, step)[at]
)
state_at = lambda step: jax.tree.map(lambda like: filled(like, step), shapes)
with checkpoints.open_manager(out) as manager:
    for step in (2, 4):
        checkpoints.save(manager, step, state_at(step), {"next_index": step}, Config(), {})
files = [*(out / "checkpoints/4/state/ocdbt.process_1/d").iterdir()]
multihost_utils.sync_global_devices("saved")
if process == 0:
    file = max(files, key=lambda file: file.stat().st_size)
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
multihost_utils.sync_global_devices("damaged")
try:
    checkpoints.latest_verified(out, "error")
except checkpoints.Damaged as error:
    print("REFUSED", error)
saved = checkpoints.latest_verified(out, "previous")
with checkpoints.open_manager(out) as manager:
    state, position = checkpoints.restore(manager, out, saved.step, shapes)
print("RESTORED", int(state.step), position, {int(x) for shard in state.params.addressable_shards for x in shard.data})
together.close()
"""


@pytest.mark.slow
def test_two_processes_each_read_some_files_and_find_the_same(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    arguments = [sys.executable, "-c", TOGETHER, str(tmp_path), coordinator]
    first, second = map(finish, [spawn([*arguments, str(index)], devices=2) for index in range(2)])
    for text in (first, second):
        (refused,) = [line for line in text.splitlines() if line.startswith("REFUSED")]
        assert "checkpoints/4 is damaged: state/ocdbt.process_1/d/" in refused
        assert "RESTORED 2 {'next_index': 2} {2}" in text
    assert "checkpoints/4.damaged" in first and "skipped" not in second
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "4.damaged"}


# ---- the cache of tokens ----


@pytest.fixture
def corpus(tmp_path) -> str:
    words = random.Random(0)
    for number in range(30):
        text = " ".join("".join(words.choices("abcdefgh", k=4)) for _ in range(50))
        (tmp_path / f"{number}.txt").write_text(text)
    return f"{tmp_path}/*.txt"


def load(corpus: str, cache: Path) -> data.Dataset:
    return data.load(path=corpus, vocab_size=300, valid_fraction=0.3, cache_dir=cache)


def zeroed(content: bytes) -> bytes:
    return content[:-40] + bytes(40)


def swapped(content: bytes) -> bytes:
    return content[:-40] + content[-20:] + content[-40:-20]


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.claim("damage")
@pytest.mark.parametrize("name", ["train.npy", "valid.npy", "tokenizer.json"])
@pytest.mark.parametrize("damage", [zeroed, swapped, truncated])
def test_a_damaged_file_of_the_cache_is_rebuilt_and_named(corpus, tmp_path, capsys, damage, name):
    load(corpus, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert capsys.readouterr().out == ""
    load(corpus, tmp_path / "cache")
    assert capsys.readouterr().out == f"{file} is damaged: it is not what was written, and is rebuilt\n"
    assert file.read_bytes() == content
    load(corpus, tmp_path / "cache")
    assert capsys.readouterr().out == ""


def test_a_hash_that_is_damaged_costs_the_file_it_is_of(corpus, tmp_path, capsys):
    load(corpus, tmp_path / "cache")
    (hash,) = (tmp_path / "cache").glob("*/train.npy.b2sum")
    content = hash.read_bytes()
    flip(hash)
    load(corpus, tmp_path / "cache")
    assert "train.npy is damaged" in capsys.readouterr().out and hash.read_bytes() == content


def test_a_cache_of_an_earlier_version_is_used_and_said_not_to_be_verified(corpus, tmp_path, capsys):
    load(corpus, tmp_path / "cache")
    for hash in (tmp_path / "cache").glob("*/*.b2sum"):
        hash.unlink()
    load(corpus, tmp_path / "cache")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and all("from an earlier version, which wrote no hash: it is not verified" in s for s in said)
    # What numpy cannot open is damaged too.
    (file,) = (tmp_path / "cache").glob("*/train.npy")
    content = file.read_bytes()
    file.write_bytes(truncated(content))
    load(corpus, tmp_path / "cache")
    assert f"{file} is damaged: it is not what was written, and is rebuilt" in capsys.readouterr().out
    assert file.read_bytes() == content


def test_a_damaged_file_that_cannot_be_rebuilt_is_a_message(corpus, tmp_path, monkeypatch):
    load(corpus, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*/train.npy")
    file.write_bytes(zeroed(file.read_bytes()))

    def read_only(*_):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(data, "atomic", read_only)
    with pytest.raises(ConfigError, match=r"data\.cache_dir = .* Permission denied.*; must be a folder that can be"):
        load(corpus, tmp_path / "cache")


def test_a_loop_waits_for_its_tasks_for_a_minute_at_most(monkeypatch):
    now, waits = [1000.0], []

    def wait(tasks, timeout):
        waits.append(timeout)
        now[0] += 50
        assert len(waits) < 9

        async def nothing_done():
            return set(), tasks

        return nothing_done()

    loop = checkpoints._DrainingLoop()
    task = loop.create_task(asyncio.Event().wait())
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now[0]))
        patch.setattr(asyncio, "wait", wait)
        loop.close()
    assert waits == [60, 10] and loop.is_closed()
    task._log_destroy_pending = False


def test_only_a_checkpoint_with_one_before_it_can_be_skipped(out):
    bad = {step: checkpoints.Damaged(out, step, "is bad") for step in (2, 4)}
    assert [checkpoints.can_skip(out, "previous", bad[step]) for step in (4, 2)] == [True, False]
    assert not checkpoints.can_skip(out, "error", bad[4])
