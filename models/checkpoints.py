"""Checkpoints: training state, position in the data, and config, written in the background by orbax."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from models.config import Config
from models.reading import ConfigError
from models.step import State

# With another value of these, the checkpoint would be of another model, which orbax could not restore, or its
# position would mean other batches.
_FIXED_SECTIONS = ("model.", "data.")
_FIXED = {"train.batch_size", "train.seq_len", "train.seed"}
_FREE = {"model.attention", "model.dtype", "data.cache_dir"}


def open_manager(out: Path) -> ocp.CheckpointManager:
    """Keeps the last two; a checkpoint gets its name when it is whole, so a kill leaves the one before."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    return ocp.CheckpointManager((out / "checkpoints").absolute(), options=options)


def save(manager: ocp.CheckpointManager, step: int, state: State, position: dict[str, Any], config: Config) -> None:
    """Copies the state out of the device and returns; the files are written meanwhile."""
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        position=ocp.args.JsonSave(position),
        config=ocp.args.JsonSave(_plain(config)),
    )
    manager.save(step, args=items)


def restore(manager: ocp.CheckpointManager, step: int, abstract: State, config: Config) -> tuple[State, dict[str, Any]]:
    """The state of a step, placed as `abstract` says whatever mesh wrote it, and the position in the data.

    Raises:
      ConfigError: the checkpoint is of another model or of other data.
    """
    saved = manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config
    now, then = _fixed(_plain(config)), _fixed(saved)
    if problems := [
        f"{key} = {now[key]!r}: the checkpoint in {manager.directory} was written with {then.get(key)!r}; "
        "set it back, or train.out to another folder"
        for key in now
        if now[key] != then.get(key)
    ]:
        raise ConfigError(problems)
    items = manager.restore(
        step,
        args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), position=ocp.args.JsonRestore()),
    )
    return items.state, items.position


def _plain(config: Config) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _fixed(config: dict[str, Any]) -> dict[str, Any]:
    """{key: value} of what must stay as it is."""
    values = {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
    fixed = lambda key: key in _FIXED or (key.startswith(_FIXED_SECTIONS) and key not in _FREE)
    return {key: value for key, value in values.items() if fixed(key)}
