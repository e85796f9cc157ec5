"""Checkpoints: the training state, the position in the data and the config, written in the background by orbax.

They do not depend on the mesh, nor on where the optimizer is. float32 parameters, and the two halves that bfloat16
ones have of their masters, are read as either, all bits.

Orbax names a checkpoint by its step once it is whole, so a run that is killed, or whose disk is full, leaves the one
before. The array formats that it writes (0.12.8) have no checksums of the values: so a checkpoint has one of each
array, which no mesh changes.
"""

import contextlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxoffload
from models.config import Config, ConfigError, flat, nearest
from models.data import Source
from models.sharding import batch_sharding
from models.step import Program, State, program, shardings_of

FORMAT = 2  # 0.1 wrote none

# With another of these, the state would not fit the model, or the position would mean other batches.
_FIXED = {"data.text_field", "data.valid_fraction", "train.batch_size", "train.seq_len", "train.seed"}
_FIXED |= {"train.state_dtype"}
# All others in `model` are fixed, too. The weights mean the same with another of these.
FREE = ("attention", "dtype", "param_dtype", "grouped", "quantize", "capacity", "aux_loss", "z_loss")


@contextlib.contextmanager
def open_manager(out: str | Path) -> Iterator[ocp.CheckpointManager]:
    """Open orbax's manager of the checkpoints in `train.out`, which keeps the last two."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    # The pinned pool is of a size for the step alone. And the host may have no room to read all at once.
    handler = ocp.PyTreeCheckpointHandler(enable_pinned_host_transfer=False, restore_concurrent_gb=8)
    handlers = {"state": handler, "origin": ocp.JsonCheckpointHandler()}
    folder = (Path(out) / "checkpoints").absolute()
    with ocp.CheckpointManager(folder, options=options, item_handlers=handlers) as manager:
        yield manager


def save(manager: ocp.CheckpointManager, step: int, state: State, config: Config, source: Source | None) -> None:
    """Copy the state out of the device and return; the files are written in the background.

    State on the host is not copied, and written before this returns. `source` is None at step 0, where there are
    parameters only.
    """
    tree = _params_of(state)
    about = {"format": FORMAT, "step": step, "config": flat(config), "data": source and source.fingerprint}
    if source is not None:
        sharding = batch_sharding(state.step.sharding.mesh)  # type: ignore[attr-defined]
        position = jax.make_array_from_process_local_data(sharding, source.batches.get_state())
        tree |= {"step": state.step, "optimizer": state.optimizer.inner, "position": position}
    about["sums"] = sums(tree)
    about["crc32"] = _crc32(about)
    manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree), origin=ocp.args.JsonSave(about)))
    if any(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(tree)):
        manager.wait_until_finished()


def resume(manager: ocp.CheckpointManager, config: Config, made: Program, source: Source) -> State:
    """Return the state of the last checkpoint, as `made.state`, and move `source` to where it stood.

    Without a checkpoint the state is initialised; a checkpoint of step 0, from models/convert.py, has parameters only.

    Raises:
      ConfigError: the last checkpoint is damaged, or has another model or other data.
    """
    step, init = manager.latest_step(), jax.jit(made.init, out_shardings=shardings_of(made.state))
    if step is None:
        return init()
    wanted = checked(manager, step, config, made.tokens.sharding.mesh, source if step else None)
    tree = restore(manager, step, wanted)
    params, remainders = converted(tree, made.state)
    if not step:
        state = init()
        return state._replace(params=params, optimizer=state.optimizer._replace(remainders=remainders))
    rows = {shard.index[0].start or 0: np.asarray(shard.data) for shard in tree["position"].addressable_shards}
    source.batches.set_state(np.concatenate([rows[first] for first in sorted(rows)]))
    return State(tree["step"], params, type(made.state.optimizer)(tree["optimizer"], remainders))


def _params_of(state: State) -> dict[str, Any]:
    masters = {"remainders": state.optimizer.remainders}
    return {"params": state.params} | (masters if jax.tree.leaves(masters) else {})


def converted(tree: dict[str, Any], like: State) -> tuple[Any, Any]:
    """Return the parameters and remainders of a checkpoint as those of `like`, bit for bit; `tree` is used up."""

    def convert(to: Any, rest: Any, weight: jax.Array, remainder: jax.Array | None) -> tuple[jax.Array, Any]:
        if weight.dtype == to.dtype:
            return weight, remainder
        if remainder is None:
            found = jax.jit(jaxoffload.split_masters, out_shardings=(to.sharding, rest.sharding))(weight)
        else:
            joined = jax.jit(jaxoffload.join_masters, out_shardings=to.sharding)
            found = joined(weight, jax.device_put(remainder, to.sharding)), None
        jax.block_until_ready(found)
        weight.delete()  # one after another, so that a device never has two sets of them
        return found

    remainders = tree.get("remainders", jax.tree.map(lambda _: None, like.params))
    found = jax.tree.map(convert, like.params, like.optimizer.remainders, tree["params"], remainders)
    part = lambda n: jax.tree.map(lambda _, pair: pair[n], like.params, found)
    return part(0), part(1)


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


def checked(
    manager: ocp.CheckpointManager, step: int, config: Config, mesh: Mesh, source: Source | None = None
) -> dict[str, Any]:
    """Return what `restore` reads, as it was written: parameters and, with a source, the state and the position.

    Raises:
      ConfigError: the checkpoint is of another model, or of other data than `source`; it names arrays that only one of
        both has.
    """
    about = _read_origin(manager, step)
    before = flat(Config()) | about["config"]
    as_before = replace(config, model=replace(config.model, param_dtype=before["model.param_dtype"]))
    made, wrong = program(as_before, mesh), list[str]()
    wanted = _params_of(made.state)
    if source:
        position = jax.ShapeDtypeStruct((config.train.batch_size, 2), jnp.int32, sharding=made.tokens.sharding)
        wanted |= {"step": made.state.step, "optimizer": made.state.optimizer.inner, "position": position}
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
    return wanted


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
    of = jax.jit(_sum, out_shardings=NamedSharding(leaves[0].sharding.mesh, PartitionSpec()))
    # One after another: those on the host come to the device for it.
    found = [int(of(jax.device_put(leaf, jax.memory.Space.Device))) for leaf in leaves]
    return dict(zip(paths_of(tree), found, strict=True))


def paths_of(tree: Any) -> list[str]:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


def _sum(array: jax.Array) -> jax.Array:
    """Return, modulo 2^32, the sum of an array's words, each times an odd number that depends on its place."""
    words = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
    places = [jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) for axis in range(words.ndim)]
    place = sum((place * jnp.uint32(3**axis) for axis, place in enumerate(places)), start=jnp.uint32(0))
    return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)
