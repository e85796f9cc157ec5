"""Checkpoints: the training state, the position in the data and the config, written in the background by orbax.

Orbax names a checkpoint by its step once it is whole, so a run that is killed, or whose disk is full, leaves the one
before. The array formats that it writes (0.12.8) have no checksums of the values: so a checkpoint has one of each
array, which no mesh changes.
"""

import contextlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from models.config import Config, ConfigError, flat, nearest
from models.data import Source
from models.sharding import batch_sharding
from models.step import Program, State, shardings_of

FORMAT = 2  # 0.1 wrote none

# With another of these, the state would not fit the model, or the position would mean other batches.
_FIXED = ("data.text_field", "data.valid_fraction", "train.batch_size", "train.seq_len", "train.seed")
# All others in `model` are fixed, too. The weights mean the same with another of these.
FREE = ("attention", "dtype", "grouped", "quantize", "capacity", "aux_loss", "z_loss")


@contextlib.contextmanager
def open_manager(out: str | Path) -> Iterator[ocp.CheckpointManager]:
    """Open orbax's manager of the checkpoints in `train.out`, which keeps the last two."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    with ocp.CheckpointManager((Path(out) / "checkpoints").absolute(), options=options) as manager:
        yield manager


def save(manager: ocp.CheckpointManager, step: int, state: State, config: Config, source: Source | None) -> None:
    """Copy the state out of the device and return; the files are written in the background.

    `source` is None at step 0, where there are parameters only.
    """
    tree: dict[str, Any] = {"params": state.params}
    about = {"format": FORMAT, "step": step, "config": flat(config), "data": source and source.fingerprint}
    if source is not None:
        sharding = batch_sharding(state.step.sharding.mesh)  # type: ignore[attr-defined]
        position = jax.make_array_from_process_local_data(sharding, source.batches.get_state())
        tree |= {"step": state.step, "optimizer": state.optimizer, "position": position}
    about["sums"] = sums(tree)
    about["crc32"] = _crc32(about)
    manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree), origin=ocp.args.JsonSave(about)))


def resume(manager: ocp.CheckpointManager, config: Config, made: Program, source: Source) -> State:
    """Return the state of the last checkpoint, as `made.state`, and move `source` to where it stood.

    Without a checkpoint the state is initialised; a checkpoint of step 0, from models/convert.py, has parameters only.

    Raises:
      ConfigError: the last checkpoint is damaged, or has another model or other data.
    """
    step = manager.latest_step()
    if not step:
        state = jax.jit(made.init, out_shardings=shardings_of(made.state))()
        if step is None:
            return state
        params = {"params": made.state.params}
        refuse_changes(manager, step, params, config)
        return state._replace(**restore(manager, step, params))
    refuse_changes(manager, step, made.state._asdict(), config, source)
    position = jax.ShapeDtypeStruct((config.train.batch_size, 2), jnp.int32, sharding=made.tokens.sharding)
    tree = restore(manager, step, made.state._asdict() | {"position": position})
    rows = {shard.index[0].start or 0: np.asarray(shard.data) for shard in tree.pop("position").addressable_shards}
    source.batches.set_state(np.concatenate([rows[first] for first in sorted(rows)]))
    return State(**tree)


def restore(manager: ocp.CheckpointManager, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return these parts of a checkpoint, sharded as in `wanted`. Raise ConfigError if they are damaged."""
    written = _read_origin(manager, step)["sums"]
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=how, partial_restore=True)
    try:
        tree = manager.restore(step, args=ocp.args.Composite(state=args)).state
    except Exception as error:  # orbax and tensorstore raise many classes
        raise _unusable(manager, step, f"cannot be read by this program ({error})") from error
    if changed := [path for path, found in sums(tree).items() if found != written.get(path)]:
        raise _unusable(manager, step, f"is damaged: {changed[0]} is not what was written")
    return tree


def refuse_changes(
    manager: ocp.CheckpointManager, step: int, wanted: dict[str, Any], config: Config, source: Source | None = None
) -> None:
    """Raise ConfigError if a checkpoint is of another model, or of other data than `source` unless that is None.

    `wanted`: the parts of it that will be restored; arrays that only one of both has are named.
    """
    about = _read_origin(manager, step)
    before = flat(Config()) | about["config"]
    wrong = []
    for key, value in flat(config).items():
        section, _, name = key.partition(".")
        is_fixed = name not in FREE if section == "model" else source is not None and key in _FIXED
        is_fixed |= key == "train.virtual_stages"  # whose groups of layers are stored
        if is_fixed and value != before[key]:
            wrong.append(f"{key} = {value!r}: it was {before[key]!r}")
    if source and source.fingerprint != about["data"]:
        wrong.append("data.path or data.tokenizer: the files were others")
    if wrong:
        last = f"in the checkpoint {manager.directory / str(step)}; set it back, or give another train.out"
        raise ConfigError(*wrong, last)
    there, here = {path for path in about["sums"] if path.split("/")[0] in wanted}, set(paths_of(wanted))
    lost, new = sorted(there - here), sorted(here - there)
    lines = [f"{path}: the checkpoint has it, the program does not{nearest(path, new)}" for path in lost]
    lines += [f"{path}: the program has it, the checkpoint does not{nearest(path, lost)}" for path in new]
    if lines:
        lines = [line for line in lines if line.startswith("params/")] or lines  # the optimizer's follow from these
        last = f"{manager.directory / str(step)} is of another program; name all as there, or give another train.out"
        raise ConfigError(*lines, last)


def _read_origin(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """Return what a checkpoint says of itself. Raise ConfigError if it is damaged, or another version wrote it."""
    try:
        about = dict(manager.restore(step, args=ocp.args.Composite(origin=ocp.args.JsonRestore())).origin)
    except Exception as error:
        raise _unusable(manager, step, f"cannot be read by this program ({error})") from error
    if about.get("format") != FORMAT:
        raise _unusable(manager, step, "was written by another version, which can continue it")
    if about.pop("crc32", None) != _crc32(about) or about["step"] != step:
        raise _unusable(manager, step, "is damaged: its origin is not what was written")
    return about


def _unusable(manager: ocp.CheckpointManager, step: int, why: str) -> ConfigError:
    before = max((other for other in manager.all_steps() if other < step), default=None)
    then = "to start again" if before is None else f"to continue from step {before}"
    return ConfigError(f"train.out: the checkpoint {manager.directory / str(step)} {why}; delete it {then}")


def _crc32(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def sums(tree: Any) -> dict[str, int]:
    """Return a checksum of each array, by its path."""
    leaves = jax.tree.leaves(tree)
    everywhere = NamedSharding(leaves[0].sharding.mesh, PartitionSpec())
    found = jax.jit(_sums, out_shardings=everywhere)(leaves)
    return dict(zip(paths_of(tree), np.asarray(found).tolist(), strict=True))


def paths_of(tree: Any) -> list[str]:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


def _sums(arrays: list[jax.Array]) -> jax.Array:
    """Return, modulo 2^32, the sum of each array's words, each times an odd number that depends on its place."""

    def sum_of(array: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
        places = [jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) for axis in range(words.ndim)]
        place = sum((place * jnp.uint32(3**axis) for axis, place in enumerate(places)), start=jnp.uint32(0))
        return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)

    return jnp.stack([sum_of(array) for array in arrays])
