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

from models.config import Config, ConfigError, flat
from models.data import Source
from models.sharding import batch_sharding
from models.step import Program, State, shardings_of

FORMAT = 2  # 0.1 wrote none

# With other values of these, orbax could not restore the state, or the position would mean other batches. Of data.path
# and data.tokenizer, the fingerprint tells whether their contents are the same.
_FIXED = ("model.", "data.", "train.batch_size", "train.seq_len", "train.seed")
_FREE = {
    "model.attention",
    "model.dtype",
    "model.grouped",
    "model.quantize",
    "model.exchange",
    "model.capacity",
    "model.aux_loss",
    "model.z_loss",
    "data.path",
    "data.tokenizer",
}


@contextlib.contextmanager
def open_manager(out: str | Path) -> Iterator[ocp.CheckpointManager]:
    """Open orbax's manager of the checkpoints in `train.out`, which keeps the last two."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True, cleanup_tmp_directories=True)
    with ocp.CheckpointManager((Path(out) / "checkpoints").absolute(), options=options) as manager:
        yield manager


def save(manager: ocp.CheckpointManager, step: int, state: State, config: Config, source: Source | None) -> None:
    """Copy the state, as `Program.saved`, out of the device and return; the files are written in the background.

    `source` is None at step 0, where there are parameters only.
    """
    tree: dict[str, Any] = {"params": state.params}
    if source is not None:
        sharding = batch_sharding(state.step.sharding.mesh)
        position = jax.make_array_from_process_local_data(sharding, source.batches.get_state())
        tree |= {"step": state.step, "optimizer": state.optimizer, "position": position}
    about = {"format": FORMAT, "step": step, "config": flat(config), "sums": sums(tree)}
    about["data"] = source and source.fingerprint
    items = ocp.args.Composite(
        state=ocp.args.PyTreeSave(tree), origin=ocp.args.JsonSave(about | {"crc32": _crc32(about)})
    )
    manager.save(step, args=items)


def resume(manager: ocp.CheckpointManager, config: Config, made: Program, source: Source) -> State:
    """Return the state to continue with, as `made.saved`, and move `source` to where it stood.

    It is that of the last checkpoint. Without one it is initialised; with one of step 0, which models/convert.py wrote,
    its parameters are those.

    Raises:
      ConfigError: the last checkpoint is damaged, or has another model or other data.
    """
    step = manager.latest_step()
    if step:
        refuse_changes(manager, step, config, source)
        batches = batch_sharding(made.saved.step.sharding.mesh)
        position = jax.ShapeDtypeStruct((config.train.batch_size, 2), jnp.int32, sharding=batches)
        tree = restore(manager, step, made.saved._asdict() | {"position": position})
        rows = {shard.index[0].start or 0: np.asarray(shard.data) for shard in tree.pop("position").addressable_shards}
        source.batches.set_state(np.concatenate([rows[first] for first in sorted(rows)]))
        return State(**tree)
    state = jax.jit(made.init, out_shardings=shardings_of(made.saved))()
    if step is None:
        return state
    refuse_changes(manager, step, config)
    return state._replace(**restore(manager, step, {"params": made.saved.params}))


def restore(manager: ocp.CheckpointManager, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return these parts of a checkpoint, sharded as the ShapeDtypeStructs in `wanted`, whatever mesh wrote them.

    Raises:
      ConfigError: the checkpoint is damaged.
    """
    written = origin(manager, step)["sums"]
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=how, partial_restore=True)
    try:
        tree = manager.restore(step, args=ocp.args.Composite(state=args)).state
    except Exception as error:  # orbax and tensorstore raise many classes
        raise _damaged(manager, step, f"cannot be read ({error})") from error
    if changed := [path for path, found in sums(tree).items() if found != written.get(path)]:
        raise _damaged(manager, step, f"is damaged: {changed[0]} is not what was written")
    return tree


def origin(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """Return what a checkpoint says of itself: its step, config, data and sums.

    Raises:
      ConfigError: it is damaged, or of another format.
    """
    try:
        about = dict(manager.restore(step, args=ocp.args.Composite(origin=ocp.args.JsonRestore())).origin)
    except Exception as error:
        raise _damaged(manager, step, f"cannot be read ({error})") from error
    if "crc32" not in about and "format" not in about:
        raise _damaged(manager, step, "was written by version 0.1, which alone can continue it")
    if about.pop("crc32", None) != _crc32(about) or about["step"] != step:
        raise _damaged(manager, step, "is damaged: its origin is not what was written")
    if about["format"] != FORMAT:
        raise _damaged(manager, step, f"has the format {about['format']}; this version reads {FORMAT}")
    return about


def saved_config(out: str | Path) -> dict[str, Any] | None:
    """Return the config of the last checkpoint in `train.out`, as `flat`; None if there is none."""
    with open_manager(out) as manager:
        step = manager.latest_step()
        return None if step is None else origin(manager, step)["config"]


def refuse_changes(manager: ocp.CheckpointManager, step: int, config: Config, source: Source | None = None) -> None:
    """Raise ConfigError if a checkpoint is of another model, or, unless `source` is None, of other data."""
    about = origin(manager, step)
    before, fixed = flat(Config()) | about["config"], _FIXED if source else ("model.",)
    wrong = [
        f"{key} = {value!r}: it was {before[key]!r}"
        for key, value in flat(config).items()
        if key.startswith(fixed) and key not in _FREE and value != before[key]
    ]
    if source and source.fingerprint != about["data"]:
        wrong.append("data.path or data.tokenizer: the files were others")
    if wrong:
        written = (
            f"when the checkpoint {manager.directory / str(step)} was written; set it back, or give another train.out"
        )
        raise ConfigError("\n".join((*wrong, written)))


def sums(tree: Any) -> dict[str, int]:
    """Return a checksum of each array, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    everywhere = NamedSharding(leaves[0][1].sharding.mesh, PartitionSpec())
    found = jax.jit(_sums, out_shardings=everywhere)([leaf for _, leaf in leaves])
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return dict(zip(paths, np.asarray(found).tolist(), strict=True))


def _sums(arrays: list[jax.Array]) -> jax.Array:
    """Return, modulo 2^32, the sum of each array's words, each times an odd number that depends on its place."""

    def sum_of(array: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
        places = [jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) for axis in range(words.ndim)]
        weight = sum((place << 1) * jnp.uint32(3**axis) for axis, place in enumerate(places))
        return jnp.sum(words * (weight + jnp.uint32(1)), dtype=jnp.uint32)

    return jnp.stack([sum_of(array) for array in arrays])


def _crc32(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _damaged(manager: ocp.CheckpointManager, step: int, why: str) -> ConfigError:
    before = max((other for other in manager.all_steps() if other < step), default=None)
    then = "to start again" if before is None else f"to continue from step {before}"
    return ConfigError(f"train.out: the checkpoint {manager.directory / str(step)} {why}; delete it {then}")
