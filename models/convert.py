"""Weights of others: python -m models.convert import FOLDER CONFIG, and back: export CONFIG FOLDER."""

import os

if __name__ == "__main__":  # before JAX is imported: weights stay in the host's memory
    os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import contextlib
import importlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxoffload import Problem
from models import checkpoints
from models.config import Config, Mesh, Model
from models.failures import exit_code
from models.files import atomic
from models.huggingface import KEPT, Stacked, family_of, read_model, stack, stacks, window, write_model
from models.loading import load
from models.processes import locked
from models.reading import ConfigError, as_config_error, config_error, one_line, problem
from models.sharding import make_mesh
from models.step import State, program

USAGE = """\
Converts weights between the safetensors of Hugging Face's Llama, Mistral, Mixtral, Qwen3 and Qwen3-MoE, and checkpoints
of models.train.

  python -m models.convert model FOLDER                   prints the config's model section for FOLDER/config.json
  python -m models.convert import FOLDER CONFIG [section.key=value ...]
  python -m models.convert export CONFIG FOLDER [section.key=value ...]

import writes a checkpoint of step 0 to train.out, from which models.train then begins. export writes the last
checkpoint in train.out, as float32 or, with --dtype bfloat16, in half the bytes.
exit codes: 0 done; 2 it cannot be converted; 3 a file cannot be written; 4 out of memory"""

EXTRA = "pip install 'jaxoffload[convert]'"
MAX_FILE = "5GB"  # as transformers writes them
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BUFFER = "rotary_emb.inv_freq"  # old files have it; it follows from config.json


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (None: the command line), and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m models.convert", description=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="model | import | export")
    places = {"model": ["folder"], "import": ["folder", "config"], "export": ["config", "folder"]}
    for name, arguments_of in places.items():
        command = commands.add_parser(name)
        for place in arguments_of:
            command.add_argument(place)
        if name != "model":
            command.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
        if name == "export":
            command.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the files")
    options = parser.parse_args(arguments)
    return exit_code("cannot be converted", lambda: run(options))


def run(options: argparse.Namespace) -> None:
    folder = Path(options.folder)
    if options.command == "model":
        print(model_section(folder))
        return
    config = load(options.config, options.overrides)
    if options.command == "import":
        import_weights(folder, config)
        print(f"{folder} is now {config.train.out}/checkpoints/0; models.train begins with it")
    else:
        step = export_weights(config, folder, options.dtype)
        print(f"{config.train.out}/checkpoints/{step} is now {folder}")


# ---- from their files ----


def model_section(folder: Path) -> str:
    """Return the `model` section, in YAML, for the model in a folder.

    Raises:
      ConfigError: config.json cannot be read, or our model cannot represent it.
    """
    values, wrong = read_model(read_config(folder))
    if wrong:
        raise ConfigError(wrong)
    lines = [f"  {key}: {json.dumps(value)}" for key, value in values.items() if value is not None]
    return "\n".join(["model:", *lines])


def import_weights(folder: Path, config: Config) -> None:
    """Write the weights in a folder as the checkpoint of step 0 in `train.out`.

    Raises:
      ConfigError: the model of the config is another one, a file cannot be read, or `train.out` has a checkpoint.
    """
    theirs, out = read_config(folder), Path(config.train.out)
    check_model(theirs, config, folder)
    config = on_one_device(config)
    rows = stacks(config.model, theirs["model_type"])
    with locked(out):
        if before := checkpoints.steps(out):
            why = f"has a checkpoint of step {before[0]}; give another folder, or delete that checkpoint"
            raise config_error("train.out", f"'{out}'", why)
        with opened(folder) as (names, read):
            check_names(rows, names, folder)
            params = filled(params_of(config), rows, read)
        state = State(jnp.int32(0), params, ())  # the optimizer begins with zeros
        with checkpoints.open_manager(out) as manager:
            write_json(checkpoints.imported(out), {key: theirs[key] for key in KEPT if theirs.get(key) is not None})
            checkpoints.save(manager, 0, state, {"next_index": 0}, config, {})
            manager.wait_until_finished()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json."""
    return read_object(folder / "config.json", "the config.json of a model in Hugging Face's layout")


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file. Errors say `what` the file must be."""
    with as_config_error(str(path), str(path), what):
        text = path.read_bytes()
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError([Problem(str(path), f"{path}: is not JSON ({error})")]) from error
    if not isinstance(config, dict):
        raise ConfigError([Problem(str(path), f"{path}: is not an object")])
    return config


def check_model(theirs: dict[str, Any], config: Config, folder: Path) -> None:
    """Raise ConfigError unless the config's model is the one in `theirs`, a config.json."""
    values, wrong = read_model(theirs)
    if wrong:
        raise ConfigError(wrong)
    model, seq_len = config.model, config.train.seq_len
    wanted = Model(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if v is not None})
    ours = {key: getattr(model, key) for key in values} | {"head_dim": model.d_head}
    if "dense_layers" not in values:
        ours["experts"] = model.experts
    problems = [
        problem(f"model.{key}", repr(value), f"must be {must!r}, as in {folder / 'config.json'}")
        for key, value in ours.items()
        if value != (must := wanted.d_head if key == "head_dim" else getattr(wanted, key))
    ]
    if (length := window(theirs)) and seq_len > length:
        why = f"must be at most {length}: attention slides over as many tokens ({folder / 'config.json'})"
        problems.append(problem("train.seq_len", seq_len, why))
    if problems:
        raise ConfigError(problems)
    family_of(model)  # for what config.json does not speak of, such as shared experts


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[tuple[set[str], Callable[[str], np.ndarray]]]:
    """Yield the names of all tensors in a folder's safetensors, and a function that reads one.

    Raises:
      ConfigError: a file is missing or damaged, or safetensors is not installed.
    """
    safetensors = needed("safetensors")
    with contextlib.ExitStack() as stack:
        handles = {}
        for file in files_of(folder):
            with as_config_error(str(file), str(file), "a file that can be read"):
                file.open("rb").close()  # safetensors' own errors do not name it
            try:
                handle = stack.enter_context(safetensors.safe_open(file, framework="numpy"))
            except safetensors.SafetensorError as error:
                raise ConfigError([Problem(str(file), f"{file}: is damaged ({one_line(error)})")]) from error
            handles |= dict.fromkeys(handle.keys(), handle)
        yield set(handles), lambda name: handles[name].get_tensor(name)


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors of a model, which may be in several files."""
    index = folder / _INDEX
    if not index.exists():
        return [folder / _SINGLE]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError([Problem(str(index), f"{index}: has no weight_map ({one_line(error)})")]) from error


def needed(name: str) -> Any:
    """Import a package of the extra `convert`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError([Problem(name, f"{name.partition('.')[0]} is not installed: {EXTRA}")]) from error


def check_names(rows: Sequence[Stacked], names: set[str], folder: Path) -> None:
    """Raise ConfigError unless the files hold all tensors of the model, and nothing else."""
    wanted = {name for row in rows for _, name in row.parts()}
    problems = []
    if missing := sorted(wanted - names):
        problems.append(Problem(str(folder), f"{folder}: {len(missing)} tensors are missing, such as {missing[0]}"))
    others = {name for name in names - wanted if not name.endswith(_BUFFER)}
    if ("unembedding_VxD",) not in [row.path for row in rows]:
        others.discard("lm_head.weight")  # a copy of the embedding
    if others := sorted(others):
        why = f"{len(others)} tensors have no place in the model, such as {others[0]}"
        problems.append(Problem(str(folder), f"{folder}: {why}"))
    if problems:
        raise ConfigError(problems)


def filled(params: nnx.State, rows: Sequence[Stacked], read: Callable[[str], np.ndarray]) -> nnx.State:
    """Return parameters with the values of their tensors, one at a time."""
    of_path = {row.path: row for row in rows}

    def value(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(stack(of_path[keys(path)], leaf.shape, read), leaf.sharding)

    return jax.tree_util.tree_map_with_path(value, params)


def keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names in a path to a parameter, without Flax's own for its value."""
    return tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def on_one_device(config: Config) -> Config:
    """Return the config on a mesh of one CPU device. Checkpoints do not depend on the mesh."""
    return replace(config, mesh=Mesh(), train=replace(config.train, virtual_stages=1))


def params_of(config: Config) -> nnx.State:
    """Return the abstract parameters of a config, as checkpoints hold them."""
    return program(config, make_mesh(Mesh(), jax.devices("cpu")[:1])).saved.params


# ---- to their files ----


def export_weights(config: Config, folder: Path, dtype: str) -> int:
    """Write the last checkpoint in `train.out` as safetensors with config.json, and return its step.

    `data.tokenizer` is copied beside them, if there is one.

    Raises:
      ConfigError: there is no checkpoint, it is of another model, no family has such models, or the folder is not
        empty.
    """
    out = Path(config.train.out)
    imported = checkpoints.imported(out)
    kept = read_object(imported, "what models.convert import wrote") if imported.exists() else {}
    described = write_model(config.model, config.train.seq_len, kept) | {"torch_dtype": dtype}
    saved = checkpoints.at(out)
    if unlike := [found for found in checkpoints.differences(config, saved) if found.key.startswith("model.")]:
        raise ConfigError(unlike)
    with as_config_error(str(folder), str(folder), "a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError([Problem(str(folder), f"{folder}: is not empty; give another folder")])
    config = on_one_device(config)
    params = checkpoints.restore_params(out, saved.step, params_of(config))
    write_weights(folder, params, stacks(config.model, described["model_type"]), dtype)
    write_json(folder / "config.json", described)
    if config.data.tokenizer:
        shutil.copy(os.path.expanduser(config.data.tokenizer), folder / "tokenizer.json")
    return saved.step


def write_weights(folder: Path, params: nnx.State, rows: Sequence[Stacked], dtype: str) -> None:
    """Write the tensors of all parameters, in files of at most MAX_FILE."""
    hub, safetensors = needed("huggingface_hub"), needed("safetensors.numpy")
    leaves = {keys(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    tensors = {name: (row, leaves[row.path][at]) for row in rows for at, name in row.parts()}  # views
    width = jnp.dtype(dtype).itemsize
    plan = hub.split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor[1].size * width,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE,
    )
    for file, names in plan.filename_to_tensors.items():
        laid = {name: np.ascontiguousarray(tensors[name][0].outer(tensors[name][1]), dtype) for name in names}
        with atomic(folder / file) as stream:
            stream.write(safetensors.save(laid, metadata={"format": "pt"}))
    if plan.is_sharded:
        size = sum(math.prod(part.shape) * width for _, part in tensors.values())
        write_json(
            folder / _INDEX, {"metadata": {"total_size": size}, "weight_map": dict(plan.tensor_to_filename.items())}
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic(path) as stream:
        stream.write((json.dumps(content, indent=2) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
