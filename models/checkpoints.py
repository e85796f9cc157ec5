"""Checkpoints: the training state, the position in the data, and the config; written in the background by orbax.

A checkpoint is a folder that is renamed to its step once it is whole. The hashes of its files (`integrity`) are written
before that, and compared before anything is restored.
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
from flax import nnx
from jax.experimental import multihost_utils

from jaxoffload import Problem
from models.config import Config, flat
from models.integrity import SUMS, first_damaged, read_sums, write_sums
from models.processes import say
from models.reading import ConfigError, as_config_error, config_error, one_line, problem
from models.step import State

# With another value of these, orbax could not restore the checkpoint into the model, or its position in the data would
# mean other batches.
_FIXED_SECTIONS = ("model.", "data.")
_FIXED = {"train.batch_size", "train.seq_len", "train.seed"}
# The exceptions in those sections.
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

# Files that orbax writes after its last callback; it restores nothing from them.
_NOT_HASHED = ("_CHECKPOINT_METADATA", "commit_success.txt")
_TEMPORARY = "*.orbax-checkpoint-tmp*"  # orbax's folders that are not whole


class Saved(NamedTuple):
    """A checkpoint's step, and where it comes from."""

    step: int
    config: dict[str, Any]  # from `flat`
    data: dict[str, str]  # fingerprint of the Dataset


class Damaged(ConfigError):
    """A checkpoint that training must not continue from. `step`: by its folder's name; `why`: what is wrong with it."""

    def __init__(self, out: Path, step: int, why: str):
        self.step, self.why = step, why
        earlier = next((other for other in steps(out) if other < step), None)
        if earlier is None:
            advice = "there is none before it: give another train.out, or delete that folder to start again"
        else:
            advice = (
                f"delete that folder to continue from the one before, of step {earlier}, or give "
                "train.on_bad_checkpoint=previous, which continues from there, or another train.out"
            )
        super().__init__(
            [problem("train.out", f"'{out}'", f"the checkpoint {_folder(out) / str(step)} {why}; {advice}")]
        )


# ---- which to continue ----


def steps(out: Path) -> list[int]:
    """Return the steps of a run's checkpoints, the last one first.

    Raises:
      ConfigError: the folder cannot be read.
    """
    folder = _folder(out)
    with as_config_error("train.out", str(out), f"a folder in which {folder.name} is one that can be read"):
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    numbers = [int(name) for name in names if name.isdecimal()]
    return sorted((number for number in numbers if str(number) in names), reverse=True)


def latest(out: Path, on_bad: str = "error") -> Saved | None:
    """Return the last checkpoint of a run, of which only the metadata is read; None if there is none.

    Args:
      out: the run's folder.
      on_bad: as `train.on_bad_checkpoint`. With "previous", checkpoints with damaged metadata are skipped.

    Raises:
      ConfigError: the last checkpoint is damaged; with "previous", all of them are.
    """
    return _last(out, on_bad, functools.partial(_read_metadata, out))[0]


def at(out: Path, step: int | None = None) -> Saved:
    """Return the checkpoint of a step, or the last one, all files of which have their hashes.

    Raises:
      ConfigError: it is damaged, or there is none.
    """
    if not (found := steps(out)):
        raise config_error("train.out", f"'{out}'", "has no checkpoint")
    if step is not None and step not in found:
        have = ", ".join(map(str, sorted(found)))
        raise config_error("train.out", f"'{out}'", f"has no checkpoint of step {step}; it has those of {have}")
    return _read_verified(out, found[0] if step is None else step)


def latest_verified(out: Path, on_bad: str) -> Saved | None:
    """Return the last checkpoint of a run, all files of which have their hashes; None if there is none.

    All processes call it. Each reads a part of the files, and all return the same. Checkpoints that "previous" skips
    are set aside, if there is another to continue from.

    Raises:
      ConfigError: as `latest`.
    """
    saved, skipped = _last(out, on_bad, functools.partial(_read_verified, out))
    for bad in skipped:
        set_aside(out, bad)
    return saved


def _last(out: Path, on_bad: str, read: Callable[[int], Saved]) -> tuple[Saved | None, list[Damaged]]:
    """Return the last checkpoint that `read` accepts, and the damaged ones after it."""
    bad: list[Damaged] = []
    for step in steps(out):
        try:
            return read(step), bad
        except Damaged as error:
            if on_bad == "error":
                raise
            bad.append(error)
    if bad:
        reasons = "; ".join(f"{error.step} {error.why}" for error in bad)
        why = f"none is left to continue from in {_folder(out)} ({reasons})"
        advice = "give another train.out, or delete that folder to start again"
        raise config_error("train.on_bad_checkpoint", "'previous'", f"{why}; {advice}")
    return None, []


def can_skip(out: Path, on_bad: str, bad: Damaged) -> bool:
    """Return whether the run may continue from a checkpoint before one that could not be restored."""
    return on_bad == "previous" and any(step < bad.step for step in steps(out))


def set_aside(out: Path, bad: Damaged) -> None:
    """Rename a checkpoint, so that the run can save its step once more, and say so. All processes call it."""
    folder = _folder(out) / str(bad.step)
    aside = folder.with_name(f"{folder.name}.damaged")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}.damaged")
    renamed = f"it is skipped, and renamed to {aside}"
    say(f"train.on_bad_checkpoint = 'previous': the checkpoint {folder} {bad.why}; {renamed}")
    if jax.process_index() == 0:
        with as_config_error("train.out", str(out), "a folder that can be written"):
            folder.rename(aside)
    multihost_utils.sync_global_devices(f"set aside {folder}")


def _read_metadata(out: Path, step: int) -> Saved:
    """Read and check the small files of a checkpoint: its origin, and its position in the data."""
    with _readable(out, step) as folder:
        # Checked first, because the error of a parser would not name the file.
        sums = _recorded_hashes(out, step)
        small = {file: hash for file, hash in sums.items() if file.startswith(("origin/", "position/"))}
        _raise_damaged(out, step, first_damaged(folder, small))
        origin = ocp.JsonCheckpointHandler().restore(folder / "origin")
        position = ocp.JsonCheckpointHandler().restore(folder / "position")
        saved = Saved(step, dict(origin["config"]), dict(origin["data"]))
    if "step" in origin and not sums:
        raise Damaged(out, step, f"has no {SUMS}, the hashes of its files")
    if origin.get("step", step) != step:
        raise Damaged(out, step, f"is of step {origin['step']!r} according to its metadata")
    # One batch per step. repr, because 8.0 == 8 and True == 1.
    if repr(position) != repr({"next_index": step}):
        raise Damaged(out, step, f"has the position {position!r:.60} in the data, which does not belong to its step")
    return saved


def _read_verified(out: Path, step: int) -> Saved:
    """Read a checkpoint and check its files. Each of n processes checks every n-th by size; all raise if one does."""
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
    number = 1 if error else 2 + files.index(file) if file else 0  # what is wrong, for the others
    worst = int(np.max(multihost_utils.process_allgather(np.int32(number))))
    if error:
        raise error
    if worst == 1:
        raise Damaged(out, step, "cannot be read by another process, whose output says why")
    if worst:
        _raise_damaged(out, step, files[worst - 2])
    if not sums:
        say(f"the checkpoint {folder} comes from an earlier version, which wrote no hashes: it is not verified")
    assert saved is not None
    return saved


def _recorded_hashes(out: Path, step: int) -> dict[str, str]:
    """Return {file: hash} of a checkpoint; empty if hashes were never written."""
    folder = _folder(out) / str(step)
    try:
        return read_sums(folder)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        _raise_damaged(out, step, SUMS)
        raise


def _raise_damaged(out: Path, step: int, file: str | None) -> None:
    """Raise `Damaged` about a file, unless it is None."""
    if file is not None:
        exists = (_folder(out) / str(step) / file).exists()
        raise Damaged(out, step, f"is damaged: {file} {'is not what was written' if exists else 'is missing'}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def differences(config: Config, saved: Saved) -> list[Problem]:
    """Return a problem for each value that differs from the checkpoint's, and must not."""
    # Converted weights, which are of step 0, have not seen any data.
    names, sections = (_FIXED, _FIXED_SECTIONS) if saved.step else ((), ("model.",))
    fixed = lambda key: key in names or (key.startswith(sections) and key not in _MAY_CHANGE)
    before = flat(Config()) | saved.config  # a key that is missing there did not exist; its default changes nothing
    written = f"the checkpoint in {config.train.out}, of step {saved.step}, was written with"
    return [
        problem(key, repr(value), f"{written} {before[key]!r}; set it back, or train.out to another folder")
        for key, value in flat(config).items()
        if fixed(key) and value != before[key]
    ]


# ---- writing and restoring ----


@contextlib.contextmanager
def open_manager(out: Path) -> Iterator[ocp.CheckpointManager]:
    """Open orbax's manager of a run's checkpoints, which keeps the last two.

    Orbax names a checkpoint once it is whole, so a killed run leaves the one before. A partial checkpoint that a killed
    run left is removed here; one of this run, when the run fails.

    Raises:
      ConfigError: the folder cannot be written.
    """
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
        # Runs on a thread of orbax in process 0, once all processes have written, and before the folder is renamed.
        async_options=ocp.AsyncOptions(post_finalization_callback=functools.partial(_write_hashes, out)),
    )
    with _draining_event_loops(), _no_logged_tracebacks():
        with as_config_error("train.out", str(out), "a folder that can be written"):
            manager = ocp.CheckpointManager(_folder(out), options=options)
        try:
            with manager:
                yield manager
        except Exception:
            for thread in threading.enumerate():
                if thread.name == "async_save":  # orbax raises an error, and the thread still writes
                    thread.join(timeout=60)
            if jax.process_index() == 0:
                for partial in _folder(out).glob(_TEMPORARY):
                    shutil.rmtree(partial, ignore_errors=True)
            raise


def _write_hashes(out: Path) -> None:
    for folder in _folder(out).glob(_TEMPORARY):  # there is one, which is being written
        write_sums(folder, ignored=_NOT_HASHED)


def save(
    manager: ocp.CheckpointManager,
    step: int,
    state: State,
    position: Mapping[str, Any],
    config: Config,
    data: Mapping[str, str],
) -> None:
    """Copy the state out of the device and return; the files are written in the background.

    `position` is the iterator's `get_state()`; `data` is the fingerprint of the Dataset. At step 0, where there are
    parameters only, `data` is empty.
    """
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        position=ocp.args.JsonSave(dict(position)),
        origin=ocp.args.JsonSave({"step": step, "config": flat(config), "data": dict(data)}),
    )
    manager.save(step, args=items)


def raise_failed(manager: ocp.CheckpointManager) -> None:
    """Raise the error of a save that failed in the background, without waiting for one in progress."""
    if not manager.is_saving_in_progress():
        manager.wait_until_finished()


def restore(manager: ocp.CheckpointManager, out: Path, step: int, abstract: State) -> tuple[State, dict[str, Any]]:
    """Return the state of a step, sharded as `abstract` whatever mesh wrote it, and the position in the data.

    Raises:
      Damaged: the checkpoint cannot be read, or has the state of another step.
    """
    with _readable(out, step):
        items = manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), position=ocp.args.JsonRestore()),
        )
        state, position = items.state, items.position
    if int(state.step) != step:
        raise Damaged(out, step, f"is of step {int(state.step)} according to its state")
    return state, position


def restore_params(out: Path, step: int, abstract: nnx.State) -> nnx.State:
    """Return the parameters of a step alone, sharded as `abstract`.

    Raises:
      Damaged: the checkpoint cannot be read.
    """
    wanted = {"params": abstract}
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=how, partial_restore=True)
    with _readable(out, step) as folder, _draining_event_loops(), _no_logged_tracebacks():
        checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        with contextlib.closing(checkpointer):
            return checkpointer.restore(folder / "state", args=args)["params"]


def imported(out: Path) -> Path:
    """Return the file of what an export has from an import. It is deleted with the checkpoints that began there."""
    return _folder(out) / "imported.json"


def _folder(out: Path) -> Path:
    return (out / "checkpoints").absolute()


@contextlib.contextmanager
def _readable(out: Path, step: int) -> Iterator[Path]:
    """Yield the folder of a checkpoint; make each error of reading it a `Damaged`."""
    try:
        yield _folder(out) / str(step)
    except Damaged:
        raise
    except Exception as error:  # orbax and tensorstore raise many classes
        raise Damaged(out, step, f"cannot be read ({one_line(error)[:200]})") from error


class _DrainingLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for its tasks before it closes.

    A cancelled read or write continues in tensorstore, which calls the loop when it ends.
    """

    def close(self) -> None:
        until = time.monotonic() + 60
        while (tasks := asyncio.all_tasks(self)) and (seconds := until - time.monotonic()) > 0:
            done, _ = self.run_until_complete(asyncio.wait(tasks, timeout=seconds))
            for task in done:
                task.cancelled() or task.exception()  # or asyncio prints that the exception was never retrieved
        super().close()


@contextlib.contextmanager
def _draining_event_loops() -> Iterator[None]:
    """Let orbax's event loops wait for all reads and writes when one of them fails.

    Orbax (0.12.8, `asyncio_utils.run_sync`) otherwise closes the loop under the others, and each of them prints a
    traceback when it ends. Orbax has no argument for its loops, and makes them on threads of its own: so
    `asyncio.new_event_loop` is replaced while a manager is open. Nothing else in the program uses asyncio.
    """
    new_event_loop = asyncio.new_event_loop
    asyncio.new_event_loop = _DrainingLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = new_event_loop


@contextlib.contextmanager
def _no_logged_tracebacks() -> Iterator[None]:
    """Keep orbax's threads from logging tracebacks: `save`, `wait_until_finished` or `close` raises the same error."""
    logger, has_no_traceback = logging.getLogger("absl"), lambda record: not record.exc_info
    logger.addFilter(has_no_traceback)
    try:
        yield
    finally:
        logger.removeFilter(has_no_traceback)
