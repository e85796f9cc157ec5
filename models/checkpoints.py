"""Checkpoints: training state, position in the data, and where both come from, written in the background by orbax.

A checkpoint is a folder that gets its step for a name when it is whole. The hashes of its files (`integrity`) are
written before that, and compared before anything is restored.
"""

import asyncio
import contextlib
import functools
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxoffload import Problem
from models.config import Config, flat
from models.integrity import SUMS, first_damaged, read_sums, write_sums
from models.processes import say
from models.reading import ConfigError, as_config_error, config_error, one_line, problem
from models.step import State

# With another value of these, the checkpoint would be of another model, which orbax could not restore, or its
# position would mean other batches.
_FIXED_SECTIONS = ("model.", "data.")
_FIXED = {"train.batch_size", "train.seq_len", "train.seed"}
_MAY_CHANGE = {
    "model.attention",
    "model.dtype",
    "model.grouped",
    "model.quantize",
    "model.exchange",
    "model.capacity",
    "model.aux_loss",
    "model.z_loss",
    "data.cache_dir",
}

# What orbax writes after its last callback; nothing that it restores is in them.
_NOT_HASHED = ("_CHECKPOINT_METADATA", "commit_success.txt")
_TEMPORARY = "*.orbax-checkpoint-tmp*"  # its folders that are not whole


class Saved(NamedTuple):
    """What a checkpoint says of itself."""

    step: int
    config: dict[str, Any]  # as `flat` gives it
    data: dict[str, str]  # the fingerprint of its Dataset


class Damaged(ConfigError):
    """A checkpoint that must not be trained on. `step`: that of its folder; `why`: what is wrong with it."""

    def __init__(self, out: Path, step: int, why: str):
        self.step, self.why = step, why
        before = next((other for other in steps(out) if other < step), None)
        if before is None:
            advice = "none is before it: give another train.out, or delete that folder to begin anew"
        else:
            advice = (
                f"delete that folder to continue from the one before, of step {before}, or give "
                "train.on_bad_checkpoint=previous, which goes on from there, or another train.out"
            )
        super().__init__(
            [problem("train.out", f"'{out}'", f"the checkpoint {_folder(out) / str(step)} {why}; {advice}")]
        )


# ---- which to continue ----


def steps(out: Path) -> list[int]:
    """Of a run's checkpoints, the last first."""
    folder = _folder(out)
    with as_config_error("train.out", str(out), f"a folder in which {folder.name} is one that can be read"):
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    numbers = [int(name) for name in names if name.isdecimal()]
    return sorted((number for number in numbers if str(number) in names), reverse=True)


def latest(out: Path, on_bad: str = "error") -> Saved | None:
    """The last checkpoint of a run's folder; reads its words only. `on_bad`: as `train.on_bad_checkpoint`; where it is
    "previous", the last whose words can be read.

    Raises:
      ConfigError: there are some, but none that can be read, or none of them may be passed by.
    """
    return _last(out, on_bad, functools.partial(_read_metadata, out))[0]


def latest_verified(out: Path, on_bad: str) -> Saved | None:
    """The last checkpoint of a run's folder, all of it compared with its hashes. All processes call it, read a part
    each, and find the same. Those that "previous" passes by are set aside, if there is another to go on from.

    Raises:
      ConfigError: as `latest`.
    """
    saved, passed_by = _last(out, on_bad, functools.partial(_read_verified, out))
    for bad in passed_by:
        set_aside(out, bad)
    return saved


def _last(out: Path, on_bad: str, read: Callable[[int], Saved]) -> tuple[Saved | None, list[Damaged]]:
    bad: list[Damaged] = []
    for step in steps(out):
        try:
            return read(step), bad
        except Damaged as error:
            if on_bad == "error":
                raise
            bad.append(error)
    if bad:
        found = "; ".join(f"{error.step} {error.why}" for error in bad)
        why = f"none is left to go on from in {_folder(out)} ({found})"
        advice = "give another train.out, or delete that folder to begin anew"
        raise config_error("train.on_bad_checkpoint", "'previous'", f"{why}; {advice}")
    return None, []


def can_skip(out: Path, on_bad: str, bad: Damaged) -> bool:
    """Whether a checkpoint that could not be restored leaves another to go on from."""
    return on_bad == "previous" and any(step < bad.step for step in steps(out))


def set_aside(out: Path, bad: Damaged) -> None:
    """Renames a checkpoint, so that the run can save that step again, and says so. All processes call it."""
    folder = _folder(out) / str(bad.step)
    aside = folder.with_name(f"{folder.name}.damaged")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}.damaged")
    say(f"train.on_bad_checkpoint = 'previous': the checkpoint {folder} {bad.why}; it is now {aside}, and passed by")
    if jax.process_index() == 0:
        with as_config_error("train.out", str(out), "a folder that can be written"):
            folder.rename(aside)
    multihost_utils.sync_global_devices(f"set aside {folder}")


def _read_metadata(out: Path, step: int) -> Saved:
    """Reads and compares what is small: what a checkpoint says of itself, and its position in the data."""
    with _readable(out, step) as folder:
        # First, because the error of a parser would not name the file.
        sums = _recorded_hashes(out, step)
        words = {file: hash for file, hash in sums.items() if file.startswith(("origin/", "position/"))}
        _raise_damaged(out, step, first_damaged(folder, words))
        origin = ocp.JsonCheckpointHandler().restore(folder / "origin")
        position = ocp.JsonCheckpointHandler().restore(folder / "position")
        saved = Saved(step, dict(origin["config"]), dict(origin["data"]))
    if "step" in origin and not sums:
        raise Damaged(out, step, f"has no {SUMS}, the hashes of its files")
    if origin.get("step", step) != step:
        raise Damaged(out, step, f"is of step {origin['step']!r}, as it says itself")
    # A step takes one batch. The types too: JSON's 8.0 and true are no numbers of batches.
    if repr(position) != repr({"next_index": step}):
        raise Damaged(out, step, f"has {position!r:.60} for its position in the data, which is not that after its step")
    return saved


def _read_verified(out: Path, step: int) -> Saved:
    """Of several processes each reads every n-th file, by size, and all raise if one of them does."""
    saved, error, sums = None, None, {}
    try:
        saved = _read_metadata(out, step)
        sums = _recorded_hashes(out, step)
    except Damaged as bad:
        error = bad
    folder, files = _folder(out) / str(step), list(sums)
    by_size = sorted(files, key=lambda file: _size(folder / file))
    mine = by_size[jax.process_index() :: jax.process_count()]
    file = first_damaged(folder, {file: sums[file] for file in mine})
    number = 1 if error else 2 + files.index(file) if file else 0
    worst = int(np.max(multihost_utils.process_allgather(np.int32(number))))
    if error:
        raise error
    if worst == 1:
        raise Damaged(out, step, "cannot be read by another process, whose own output says why")
    if worst:
        _raise_damaged(out, step, files[worst - 2])
    if not sums:
        say(f"the checkpoint {folder} is of an earlier version, which wrote no hashes: it is not verified")
    assert saved is not None
    return saved


def _recorded_hashes(out: Path, step: int) -> dict[str, str]:
    """Of a checkpoint; empty if it has none."""
    folder = _folder(out) / str(step)
    try:
        return read_sums(folder)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        _raise_damaged(out, step, SUMS)
        raise


def _raise_damaged(out: Path, step: int, file: str | None) -> None:
    if file is not None:
        there = (_folder(out) / str(step) / file).exists()
        raise Damaged(out, step, f"is damaged: {file} {'is not what was written' if there else 'is missing'}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def differences(config: Config, saved: Saved) -> list[Problem]:
    """A problem for each value that must be what it was when the checkpoint was written, and is not."""
    fixed = lambda key: key in _FIXED or (key.startswith(_FIXED_SECTIONS) and key not in _MAY_CHANGE)
    before = flat(Config()) | saved.config  # what it does not say did not exist, and is as it is by default
    written = f"the checkpoint in {config.train.out}, of step {saved.step}, was written with"
    return [
        problem(key, repr(value), f"{written} {before[key]!r}; set it back, or train.out to another folder")
        for key, value in flat(config).items()
        if fixed(key) and value != before[key]
    ]


# ---- what is written ----


@contextlib.contextmanager
def open_manager(out: Path) -> Iterator[ocp.CheckpointManager]:
    """Keeps the last two; a checkpoint gets its name when it is whole, so a kill leaves the one before. One that is
    half written when the run fails is removed then; one that a kill left, now."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
        # In orbax's own thread, of process 0, when all processes have written all, and before it gets its name.
        async_options=ocp.AsyncOptions(post_finalization_callback=functools.partial(_seal, out)),
    )
    with _draining_event_loops(), _no_logged_tracebacks():
        with as_config_error("train.out", str(out), "a folder that can be written"):
            manager = ocp.CheckpointManager(_folder(out), options=options)
        try:
            with manager:
                yield manager
        except Exception:
            for thread in threading.enumerate():
                if thread.name == "async_save":  # orbax raises one error and leaves the thread to its writing
                    thread.join(timeout=60)
            if jax.process_index() == 0:
                for half in _folder(out).glob(_TEMPORARY):
                    shutil.rmtree(half, ignore_errors=True)
            raise


def _seal(out: Path) -> None:
    for folder in _folder(out).glob(_TEMPORARY):  # the one that is being written
        write_sums(folder, ignored=_NOT_HASHED)


def save(
    manager: ocp.CheckpointManager,
    step: int,
    state: State,
    position: Mapping[str, Any],
    config: Config,
    data: Mapping[str, str],
) -> None:
    """Copies the state out of the device and returns; the files are written meanwhile."""
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        position=ocp.args.JsonSave(dict(position)),
        origin=ocp.args.JsonSave({"step": step, "config": flat(config), "data": dict(data)}),
    )
    manager.save(step, args=items)


def raise_failed(manager: ocp.CheckpointManager) -> None:
    """Raises the error of a save that failed meanwhile; does not wait for one that is under way."""
    if not manager.is_saving_in_progress():
        manager.wait_until_finished()


def restore(manager: ocp.CheckpointManager, out: Path, step: int, abstract: State) -> tuple[State, dict[str, Any]]:
    """The state of a step, placed as `abstract` says whatever mesh wrote it, and the position in the data.

    Raises:
      Damaged: the checkpoint cannot be read, or is of another step.
    """
    with _readable(out, step):
        items = manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), position=ocp.args.JsonRestore()),
        )
        state, position = items.state, items.position
    if int(state.step) != step:
        raise Damaged(out, step, f"is of step {int(state.step)}, as its state says")
    return state, position


def _folder(out: Path) -> Path:
    return (out / "checkpoints").absolute()


@contextlib.contextmanager
def _readable(out: Path, step: int) -> Iterator[Path]:
    try:
        yield _folder(out) / str(step)
    except Damaged:
        raise
    except Exception as error:  # orbax and tensorstore raise whatever they meet
        raise Damaged(out, step, f"cannot be read ({one_line(error)[:200]})") from error


class _DrainingLoop(asyncio.SelectorEventLoop):
    """Waits for what runs in it before it closes. A cancelled read goes on, and tensorstore tells the loop."""

    def close(self) -> None:
        until = time.monotonic() + 60
        while (tasks := asyncio.all_tasks(self)) and (seconds := until - time.monotonic()) > 0:
            done, _ = self.run_until_complete(asyncio.wait(tasks, timeout=seconds))
            for task in done:
                task.cancelled() or task.exception()  # or asyncio says that nobody asked
        super().close()


@contextlib.contextmanager
def _draining_event_loops() -> Iterator[None]:
    """Of many reads or writes one fails first. Orbax (0.12.8, `asyncio_utils.run_sync`) then closes their event loop
    under the others, each of which prints a traceback when it ends: here they end before."""
    new_event_loop = asyncio.new_event_loop
    asyncio.new_event_loop = _DrainingLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = new_event_loop


@contextlib.contextmanager
def _no_logged_tracebacks() -> Iterator[None]:
    """Orbax's threads log the traceback of each error, which `save`, `wait_until_finished` or `close` then raises."""
    logger, raised_too = logging.getLogger("absl"), lambda record: not record.exc_info
    logger.addFilter(raised_too)
    try:
        yield
    finally:
        logger.removeFilter(raised_too)
