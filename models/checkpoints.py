"""Checkpoints: training state, position in the data, and where both come from, written in the background by orbax."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from models.config import Config, flat
from models.reading import ConfigError, blaming, one_line
from models.step import State

# With another value of these, the checkpoint would be of another model, which orbax could not restore, or its
# position would mean other batches.
_FIXED_SECTIONS = ("model.", "data.")
_FIXED = {"train.batch_size", "train.seq_len", "train.seed"}
_FREE = {
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


class Saved(NamedTuple):
    """What a checkpoint says of itself."""

    step: int
    config: dict[str, Any]  # as `flat` gives it
    data: dict[str, str]  # `origin` of its Dataset


def latest(out: Path) -> Saved | None:
    """The last checkpoint of a run's folder; reads its words only.

    Raises:
      ConfigError: it cannot be read.
    """
    # Orbax renames a folder to its bare number when it is whole.
    steps = [int(path.name) for path in _folder(out).glob("*") if path.name.isdecimal()]
    if not steps:
        return None
    with _readable(out, max(steps)) as folder:
        saved = ocp.JsonCheckpointHandler().restore(folder / "origin")
        return Saved(max(steps), dict(saved["config"]), dict(saved["data"]))


def differences(config: Config, saved: Saved) -> dict[str, str]:
    """{key: problem} of what must be as it was when the checkpoint was written."""
    fixed = lambda key: key in _FIXED or (key.startswith(_FIXED_SECTIONS) and key not in _FREE)
    before = flat(Config()) | saved.config  # what it does not say did not exist, and is as it is by default
    return {
        key: f"{key} = {value!r}: the checkpoint in {config.train.out}, of step {saved.step}, was written with "
        f"{before[key]!r}; set it back, or train.out to another folder"
        for key, value in flat(config).items()
        if fixed(key) and value != before[key]
    }


def open_manager(out: Path) -> ocp.CheckpointManager:
    """Keeps the last two; a checkpoint gets its name when it is whole, so a kill leaves the one before."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    with blaming("train.out", str(out), "a folder that can be written"):
        return ocp.CheckpointManager(_folder(out), options=options)


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
        origin=ocp.args.JsonSave({"config": flat(config), "data": dict(data)}),
    )
    manager.save(step, args=items)


def restore(manager: ocp.CheckpointManager, out: Path, step: int, abstract: State) -> tuple[State, dict[str, Any]]:
    """The state of a step, placed as `abstract` says whatever mesh wrote it, and the position in the data.

    Raises:
      ConfigError: the checkpoint cannot be read.
    """
    with _readable(out, step), _reads_are_ended():
        items = manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), position=ocp.args.JsonRestore()),
        )
        return items.state, items.position


def _folder(out: Path) -> Path:
    return (out / "checkpoints").absolute()


@contextlib.contextmanager
def _readable(out: Path, step: int) -> Iterator[Path]:
    folder = _folder(out) / str(step)
    try:
        yield folder
    except Exception as error:  # orbax and tensorstore raise whatever they meet
        raise ConfigError(
            [
                f"train.out = '{out}': the checkpoint {folder} cannot be read ({one_line(error)[:200]}); delete that "
                "folder to continue from the one before, or give another train.out"
            ]
        ) from error


class _Loop(asyncio.SelectorEventLoop):
    """Waits for what runs in it before it closes. A cancelled read goes on, and tensorstore tells the loop."""

    def close(self) -> None:
        until = time.monotonic() + 60
        while (tasks := asyncio.all_tasks(self)) and (seconds := until - time.monotonic()) > 0:
            done, _ = self.run_until_complete(asyncio.wait(tasks, timeout=seconds))
            for task in done:
                task.cancelled() or task.exception()  # or asyncio says that nobody asked
        super().close()


@contextlib.contextmanager
def _reads_are_ended() -> Iterator[None]:
    """Of many reads one fails first. Orbax (0.12.8, `asyncio_utils.run_sync`) then closes their event loop under the
    others, each of which prints a traceback when it ends: here they end before."""
    new_event_loop = asyncio.new_event_loop
    asyncio.new_event_loop = _Loop
    try:
        yield
    finally:
        asyncio.new_event_loop = new_event_loop
