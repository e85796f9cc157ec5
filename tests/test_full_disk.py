"""A full disk, exhausted memory and paths that name no file: one line, an exit status of its own, and nothing lost."""

import contextlib
import gc
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from common import CONSTANT, PATIENCE, ROOT, SHORT, finish
from test_train import command, compiled_fast, config, losses, spawn  # noqa: F401

from models import checkpoints, metrics, train
from models.config import Config
from models.failures import machine_failure
from models.files import Unwritable, append, atomic
from models.loading import parse
from models.step import State


@contextlib.contextmanager
def files_of_at_most(count: int):
    """Simulate a full disk for a process: a write beyond this file size fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- a run ----


@pytest.fixture(scope="module")
def run(config, tmp_path_factory) -> Path:  # noqa: F811
    """The folder of a run of four steps, with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("run") / "out"
    assert train.main([str(config), *CONSTANT, "train.steps=4", f"train.out={folder}"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.claim("full-disk")
def test_a_disk_that_is_full_ends_the_run_in_one_line_and_it_goes_on_later(run, config, tmp_path):  # noqa: F811
    """In a separate process, whose whole output counts, including that of orbax's threads and of Python's exit."""
    out = shutil.copytree(run, tmp_path / "out")
    before = {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()}
    longer = [*CONSTANT, "train.steps=8"]
    no_cache = "JAX_ENABLE_COMPILATION_CACHE=0"  # a compiled step is larger than that, too
    limited = [
        "bash",
        "-c",
        f'ulimit -f 100 && {no_cache} exec "$@"',
        "bash",
        *command(config, *longer, f"train.out={out}"),
    ]
    said = finish(spawn(limited, devices=8), code=3)
    assert said.splitlines()[-1].startswith(f"stopped: {out}/checkpoints/6.orbax-checkpoint-tmp/")
    assert said.endswith(
        " cannot be written (File too large); free some space there, or raise the quota or limit; "
        "the same command continues from step 4\n"
    )
    assert "Traceback" not in said and "Error" not in said and "absl" not in said
    assert {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()} == before

    until_then = losses(out)
    assert list(until_then)[:6] == [*range(1, 7)]
    assert train.main([str(config), *longer, f"train.out={out}"]) == 0
    assert until_then.items() <= losses(out).items() and list(losses(out)) == [*range(1, 9)]


@pytest.mark.slow
def test_a_curve_that_cannot_be_written_ends_the_run_in_one_line(config, tmp_path, monkeypatch, capsys):  # noqa: F811
    real = os.fsync

    def full(file: int) -> None:
        if "loss.png" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / "out"
    assert train.main([str(config), *CONSTANT, "train.steps=2", f"train.out={out}"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    # The checkpoint that is being written meanwhile is completed.
    assert line == (
        f"stopped: {out}/loss.png cannot be written (No space left on device); free some space there, "
        "or raise the quota or limit; the same command continues from step 2"
    )
    assert not [path for path in out.rglob("*") if "tmp" in path.name]


def test_metrics_that_cannot_be_written_are_named(tmp_path):
    journal = metrics.Journal(tmp_path / "metrics.jsonl", Config(), unigram=1.0)
    journal.path.symlink_to("/dev/full")
    with pytest.raises(Unwritable) as caught:
        journal.write({"step": 1, "valid_loss": 1.0})
    assert machine_failure(caught.value, tmp_path).line.startswith(
        f"stopped: {journal.path} cannot be written (No space left on"
    )


def test_a_cache_of_tokens_that_cannot_be_written_is_one_line(config, tmp_path, capsys):  # noqa: F811
    cache = tmp_path / "cache"
    with files_of_at_most(100):
        assert train.main([str(config), *SHORT, f"train.out={tmp_path}/out", f"data.cache_dir={cache}"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stopped: {cache}/") and " cannot be written (File too large); free some space" in line
    assert not [path for path in cache.rglob("*") if path.is_file()]


def save(manager, step: int, params) -> None:
    checkpoints.save(manager, step, State(jax.numpy.int32(step), params, ()), {"next_index": step}, Config(), {})


def test_a_save_that_failed_is_known_before_the_next_one_in_one_error(tmp_path, monkeypatch, capfd):
    printed, known = [], False
    monkeypatch.setattr(sys, "unraisablehook", lambda what: printed.append(str(what.exc_value)))
    noise = [jax.random.normal(jax.random.key(i), (2**14,)) for i in range(40)]  # which compression cannot shrink
    with pytest.raises(ValueError) as caught, checkpoints.open_manager(tmp_path) as manager:
        with files_of_at_most(2**14):
            save(manager, 2, noise)
            while manager.is_saving_in_progress():
                time.sleep(0.01)
        try:
            checkpoints.raise_failed(manager)
        except ValueError:
            known = True
            raise
    assert known and machine_failure(caught.value, tmp_path).status == 3
    assert [*(tmp_path / "checkpoints").iterdir()] == []
    gc.collect()
    assert not printed and capfd.readouterr().err == ""


def test_a_folder_is_not_removed_under_a_thread_that_writes_into_it(tmp_path, monkeypatch):
    """orbax raises the first of several errors at once, while its other threads continue."""
    write_sums = checkpoints.write_sums

    def slow(*args, **kwargs):
        time.sleep(0.5)
        write_sums(*args, **kwargs)

    def failing():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_sums", slow)
    with pytest.raises(OSError, match="No space"), checkpoints.open_manager(tmp_path) as manager:
        save(manager, 2, jax.numpy.ones(9))
        monkeypatch.setattr(manager, "wait_until_finished", failing)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    assert checkpoints.latest_verified(tmp_path, "error").step == 2


# ---- out of memory ----


@pytest.mark.slow
@pytest.mark.claim("full-disk")
def test_out_of_memory_is_one_line(run, config, tmp_path, monkeypatch, capsys):  # noqa: F811
    """With jaxlib's message, for an array larger than any machine's memory."""
    monkeypatch.setattr(train, "compile_step", lambda made: jax.numpy.zeros(2**55, jax.numpy.int8).block_until_ready())
    for folder, again in (run, "the same command continues from step 4"), (tmp_path / "out", "nothing is saved yet"):
        assert train.main([str(config), *CONSTANT, "train.steps=8", f"train.out={folder}"]) == 4
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("stopped: out of memory (RESOURCE_EXHAUSTED: ")
        assert line.endswith(f" need less, and --report says how much; {again}")


def test_what_is_told_and_what_is_not(tmp_path):
    """Any other error keeps its traceback."""
    assert machine_failure(ValueError("RESOURCE_EXHAUSTED"), None) is None
    assert machine_failure(FileNotFoundError(2, "No such file or directory", "/elsewhere"), tmp_path) is None
    assert machine_failure(MemoryError(), None).status == 4
    of_tensorstore = (
        "RESOURCE_EXHAUSTED: Failed writing: \"/x/y\": Failed to write 9 bytes: No space [os_error_code='28']"
    )
    group = ExceptionGroup("several", [RuntimeError("other"), ValueError(of_tensorstore)])
    try:
        raise RuntimeError("closing") from group
    except RuntimeError as error:
        assert machine_failure(error, None).line.startswith(
            "stopped: /x/y cannot be written (No space left on device); free "
        )
    gone = OSError(30, "Read-only file system", f"{tmp_path}/checkpoints/8")
    assert machine_failure(gone, tmp_path) == (
        3,
        f"stopped: {tmp_path}/checkpoints/8 cannot be written (Read-only file system); nothing is saved yet",
    )


# ---- paths ----


@pytest.mark.parametrize("name", ["data.path", "data.tokenizer", "data.cache_dir", "train.out"])
@pytest.mark.parametrize("value", ['"/tmp/a\\0b"', '"/tmp/\\ud800"'])
def test_a_path_with_a_nul_or_a_lone_surrogate_is_refused(config, name, value):  # noqa: F811
    _, problems = parse(config, [f"{name}={value}"])
    ((_, line),) = problems
    assert line.startswith(f"{name} = '/tmp/") and line.endswith(
        ": must be a path, which has no NUL and no lone surrogates"
    )
    assert line.isprintable()


@pytest.mark.parametrize("path", ["a\0b.yaml", "a\udcffb.yaml"])
def test_so_is_that_of_the_config(path, capsys):
    assert train.main([path]) == 2
    assert f"{path!r}: must be a path, which has no NUL and no lone surrogates\n" in capsys.readouterr().err


def test_an_empty_cache_dir_is_refused(config):  # noqa: F811
    assert [problem.message for problem in parse(config, ["data.cache_dir="])[1]] == [
        "data.cache_dir = None: must be a string",
    ]
    ((_, line),) = parse(config, ["data.cache_dir=''"])[1]
    assert line.startswith("data.cache_dir = '': must be a folder; it is ~/.cache/jaxoffload by default, and . is the")


@pytest.mark.parametrize("name, said", [("checkpoints", "Not a directory"), ("metrics.jsonl", "Is a directory")])
def test_a_file_for_a_folder_and_a_folder_for_a_file_are_one_line(  # before anything is compiled
    config,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
    name,
    said,
):
    monkeypatch.delattr(train, "compile_step")
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("") if name == "checkpoints" else (out / name).mkdir()
    assert train.main([str(config), *SHORT, f"train.out={out}"]) == 2
    _, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train.out = '{out}': ") and said in line


# ---- files ----


def test_temporary_files_follow_no_links(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("metrics.jsonl.tmp", "loss.png.tmp"):
        (tmp_path / name).symlink_to(victim)
    journal = metrics.Journal(tmp_path / "metrics.jsonl", Config(), unigram=1.0)
    journal.begin(start=0)
    journal.draw()
    assert victim.read_text() == "precious" and (tmp_path / "loss.png").is_file()


def test_a_file_is_written_whole_or_not_at_all_even_where_its_temporary_name_is_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr("models.files.uuid.uuid4", lambda: type("Known", (), {"hex": "known"}))
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("precious")
    path.write_text("before")
    (tmp_path / "file.known.tmp").symlink_to(victim)
    with pytest.raises(Unwritable, match="File exists"), atomic(path) as stream:
        stream.write(b"after")
    assert victim.read_text() == "precious" and path.read_text() == "before"


def test_what_cannot_be_written_is_named(tmp_path):
    for write in (lambda: append(tmp_path / "a/b", b""), lambda: atomic(tmp_path / "a/b").__enter__()):
        with pytest.raises(Unwritable) as caught:
            write()
        assert caught.value.filename == f"{tmp_path}/a/b" and caught.value.errno == 2


# ---- the environment ----


def test_a_terminal_that_lacks_letters_gets_escapes(config):  # noqa: F811
    process = subprocess.run(
        command(config, "--report"),
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        timeout=PATIENCE,
    )
    assert process.returncode == 0, process.stderr
    assert rb" \xb7 host" in process.stdout and process.stdout.isascii() and not process.stderr


@pytest.mark.parametrize("arguments", [[], ["--report"]])
def test_without_jit_nothing_is_trained(config, tmp_path, capsys, arguments):  # noqa: F811
    with jax.disable_jit():
        assert train.main([str(config), *SHORT, f"train.out={tmp_path}/out", *arguments]) == 2
    _, line = capsys.readouterr().err.splitlines()
    assert line == "JAX_DISABLE_JIT = True: only compiled programs offload residuals; must be unset"
    assert not (tmp_path / "out").exists()


def test_orbax_logs_no_traceback_of_an_error_that_is_raised(tmp_path, caplog):
    noise = [jax.random.normal(jax.random.key(i), (2**14,)) for i in range(40)]
    with pytest.raises(ValueError), checkpoints.open_manager(tmp_path) as manager, files_of_at_most(2**14):
        save(manager, 2, noise)
        manager.wait_until_finished()
    assert not [record for record in caplog.records if record.exc_info]
