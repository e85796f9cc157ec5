"""Converts weights between Hugging Face's Llama, Mistral, Mixtral, Qwen3 and Qwen3-MoE, and checkpoints.

  python -m models.convert model FOLDER                   prints the config's model section for FOLDER/config.json
  python -m models.convert import FOLDER CONFIG [section.key=value ...]
  python -m models.convert export CONFIG FOLDER [section.key=value ...]

import writes a checkpoint of step 0 to train.out, from which models.train then begins. export writes the last
checkpoint in train.out beside FOLDER/config.json, in the dtype that it states. It needs the extra `convert`.
"""

# Hugging Face's matrices are (outputs, inputs), ours (inputs, outputs) with an axis each for heads and head_dim. They
# have a tensor per layer and expert, ours are stacked. Both rotate the pairs (i, i + H/2) of a head.

import os

if __name__ == "__main__":  # before JAX is imported: weights stay in the host's memory
    os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from models import checkpoints
from models.config import Config, ConfigError, Mesh, Model, load
from models.sharding import make_mesh
from models.step import State, program, regrouped

_ALL = {  # the keys of config.json, and ours
    "vocab_size": "vocab_size",
    "num_hidden_layers": "layers",
    "hidden_size": "d_model",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}
_DENSE = _ALL | {"intermediate_size": "d_ff"}
_EXPERTS = _ALL | {"num_experts_per_tok": "experts_per_token"}


class Family(NamedTuple):
    """A family of models: what its config.json says, and how its tensors name experts."""

    keys: dict[str, str]
    qk_norm: bool = False
    block: str = ""
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


FAMILIES = {
    "llama": Family(_DENSE),
    "mistral": Family(_DENSE),
    "qwen3": Family(_DENSE, qk_norm=True),
    "mixtral": Family(
        _EXPERTS | {"num_local_experts": "experts", "intermediate_size": "d_expert"},
        block="block_sparse_moe",
        leaves=("w1", "w3", "w2"),
    ),
    "qwen3_moe": Family(
        _EXPERTS | {"num_experts": "experts", "moe_intermediate_size": "d_expert", "norm_topk_prob": "renormalize"},
        qk_norm=True,
        block="mlp",
    ),
}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# What the model cannot represent otherwise, and what holds where a config.json, of an older transformers, says nothing.
_ONLY = dict[str, Any](attention_bias=False, mlp_bias=False, partial_rotary_factor=1, decoder_sparse_step=1)
_ONLY |= {"hidden_act": "silu", "mlp_only_layers": [], "quantization_config": None}
_DTYPES = ("bfloat16", "float16", "float32")  # of what is written
_DEFAULTS = dict[str, Any](tie_word_embeddings=False, norm_topk_prob=False, rope_theta=10000.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (None: the command line). Return 0, or 2 if it cannot be converted."""
    parser = argparse.ArgumentParser(
        prog="python -m models.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["model", "import", "export"])
    parser.add_argument("arguments", nargs="+", help="as above")
    options = parser.parse_args(arguments)
    try:
        match options.command, *options.arguments:
            case "model", folder:
                print(model_section(Path(folder)))
            case "import", folder, path, *overrides:
                import_weights(Path(folder), load(path, overrides))
            case "export", path, folder, *overrides:
                export_weights(load(path, overrides), Path(folder))
            case _:
                parser.error("the wrong number of arguments")
    except (ConfigError, OSError) as error:
        print(f"cannot be converted:\n{error}", file=sys.stderr)
        return 2
    return 0


def model_section(folder: Path) -> str:
    """Return the section `model`, in YAML, for the model in a folder."""
    values = read_model(read_config(folder))
    return "\n  ".join(["model:", *(f"{key}: {json.dumps(value)}" for key, value in values.items())])


def import_weights(folder: Path, config: Config) -> None:
    """Write the weights in a folder as the checkpoint of step 0 in `train.out`.

    Raises:
      ConfigError: the model of the config is another one, a tensor is missing, or `train.out` has a checkpoint.
    """
    theirs, out = read_config(folder), Path(config.train.out)
    check_model(theirs, config)
    config = replace(config, model=replace(config.model, param_dtype="float32"))
    abstract, stored = on_one_device(config, 1).params, on_one_device(config, config.train.virtual_stages)
    tensors, files = tensors_of(abstract, theirs["model_type"]), dict[str, Any]()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = safetensors.safe_open(path, framework="numpy")
        except safetensors.SafetensorError as error:
            raise ConfigError(f"{path}: {error}") from error
        files |= dict.fromkeys(file.keys(), file)
    check_names(tensors, set(files))
    with checkpoints.open_manager(out) as manager:
        if manager.latest_step() is not None:
            raise ConfigError(f"train.out = {str(out)!r}: has a checkpoint; give another folder, or delete it")
        read = lambda name: files[name].get_tensor(name)
        leaf = lambda path, like: jax.device_put(stack(*tensors[path_of(path)], like.shape, read), like.sharding)
        params = jax.tree_util.tree_map_with_path(leaf, abstract)
        checkpoints.save(manager, 0, stored._replace(params=regrouped(params, stored.params)), config, None)
        manager.wait_until_finished()
    print(f"{folder} is now {out}/checkpoints/0; models.train begins with it")


def export_weights(config: Config, folder: Path) -> None:
    """Write the last checkpoint in `train.out` as safetensors, to a folder that has the config.json of the model.

    Raises:
      ConfigError: there is no checkpoint, config.json is of another model, or the folder has weights.
    """
    theirs, out = read_config(folder), Path(config.train.out)
    check_model(theirs, config)
    dtype = theirs.get("dtype") or theirs.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise ConfigError(f"{folder}/config.json: dtype {dtype!r}: must be one of {', '.join(_DTYPES)}")
    if not (out / "checkpoints").is_dir():
        raise ConfigError(f"train.out = {str(out)!r}: has no checkpoint")
    if any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder}: has weights; give another folder, with config.json")
    config = replace(config, model=replace(config.model, param_dtype="float32"))
    abstract, stored = on_one_device(config, 1).params, on_one_device(config, config.train.virtual_stages)
    with checkpoints.open_manager(out) as manager:
        if (step := manager.latest_step()) is None:
            raise ConfigError(f"train.out = {str(out)!r}: has no checkpoint")
        mesh = stored.step.sharding.mesh  # type: ignore[attr-defined]
        wanted = checkpoints.checked(manager, step, config, mesh)
        masters, _ = checkpoints.converted(checkpoints.restore(manager, step, wanted), stored)
        params = regrouped(masters, abstract)
    write_weights(folder, params, tensors_of(abstract, theirs["model_type"]), dtype)
    print(f"{out}/checkpoints/{step} is now {folder}")


def on_one_device(config: Config, virtual_stages: int) -> State:
    """Return the abstract state on one CPU device. Checkpoints do not depend on the mesh."""
    config = replace(config, mesh=Mesh(), train=replace(config.train, virtual_stages=virtual_stages))
    return program(config, make_mesh(Mesh(), jax.devices("cpu")[:1])).state


# ---- config.json ----


def read_config(folder: Path) -> dict[str, Any]:
    """Return what a folder's config.json says.

    Raises:
      ConfigError: it is no JSON, or no mapping.
    """
    path = folder / "config.json"
    try:
        theirs = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(theirs, dict):
        raise ConfigError(f"{path}: must be a mapping")
    return theirs


def read_model(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the section `model` must say for a config.json.

    Raises:
      ConfigError: the family is unknown, or the model cannot represent a value.
    """
    if (kind := theirs.get("model_type")) not in FAMILIES:
        raise ConfigError(f"model_type = {kind!r}: must be one of {', '.join(FAMILIES)}")
    given = {key: value for key, value in theirs.items() if value is not None}
    if "num_local_experts" in given:  # what transformers 5 writes for all families
        given.setdefault("num_experts", given["num_local_experts"])
    theirs = _DEFAULTS | {"num_key_value_heads": given.get("num_attention_heads")} | given
    # transformers 5 writes RoPE's settings into a mapping of their own.
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    stretched = rope.get("rope_type", rope.get("type", "default"))
    wrong = [f"{key} = {theirs[key]!r}" for key, only in _ONLY.items() if theirs.get(key, only) != only]
    wrong += [] if stretched in ("default", "llama3") else [f"rope_scaling = {rope!r}"]
    if wrong:
        raise ConfigError(*(f"{problem}: the model cannot represent it" for problem in wrong))
    family = FAMILIES[kind]
    try:
        values = {ours: theirs[key] for key, ours in family.keys.items()}
        scaling = [rope[key] for key in _LLAMA3] if stretched == "llama3" else None
    except KeyError as error:
        raise ConfigError(f"{error.args[0]}: is missing; {kind} has it") from error
    return values | {
        "head_dim": theirs.get("head_dim") or values["d_model"] // values["heads"],
        "qk_norm": family.qk_norm,
        "rope_theta": rope.get("rope_theta", theirs["rope_theta"]),
        "rope_scaling": scaling,
    }


def check_model(theirs: Mapping[str, Any], config: Config) -> None:
    """Raise ConfigError unless the config's model is the one in `theirs`, a config.json."""
    model, scaling = config.model, config.model.rope_scaling
    ours = vars(model) | {"head_dim": model.d_head, "rope_scaling": scaling and [*scaling]}
    # What a config.json does not say has its default. With experts d_ff means nothing.
    others = {each.name: each.default for each in fields(Model) if each.name not in {*checkpoints.FREE, "d_ff"}}
    wrong = [
        f"model.{key} = {ours[key]!r}: must be {must!r} in {theirs['model_type']}'s config.json"
        for key, must in (others | read_model(theirs)).items()
        if ours[key] != must
    ]
    window = theirs.get("use_sliding_window", True) and theirs.get("sliding_window")
    if window and config.train.seq_len > window:
        wrong.append(f"train.seq_len = {config.train.seq_len}: must be at most {window}, over which attention slides")
    if wrong:
        raise ConfigError(*wrong)


# ---- tensors ----


# The tensors that are stacked in a parameter, by the index of the part that each is. And how many axes of a part are a
# matmul's inputs; 0: it is not transposed.
Tensors = tuple[dict[tuple[int, ...], str], int]

_ONCE = {"embedding_VxD": "model.embed_tokens", "norm/scale_D": "model.norm", "unembedding_VxD": "lm_head"}
_IN_LAYER = {
    "attention/norm/scale_D": ("input_layernorm", 0),
    "attention/q_DxNxH": ("self_attn.q_proj", 1),
    "attention/k_DxKxH": ("self_attn.k_proj", 1),
    "attention/v_DxKxH": ("self_attn.v_proj", 1),
    "attention/out_NxHxD": ("self_attn.o_proj", 2),
    "attention/q_norm_H": ("self_attn.q_norm", 0),
    "attention/k_norm_H": ("self_attn.k_norm", 0),
    "mlp/norm/scale_D": ("post_attention_layernorm", 0),
    "mlp/gate_DxF": ("mlp.gate_proj", 1),
    "mlp/up_DxF": ("mlp.up_proj", 1),
    "mlp/down_FxD": ("mlp.down_proj", 1),
    "moe/norm/scale_D": ("post_attention_layernorm", 0),
    "moe/router_DxE": ("{block}.gate", 1),
    "moe/gate_ExDxF": ("{block}.experts.{expert}.{leaves[0]}", 1),
    "moe/up_ExDxF": ("{block}.experts.{expert}.{leaves[1]}", 1),
    "moe/down_ExFxD": ("{block}.experts.{expert}.{leaves[2]}", 1),
}


def tensors_of(params: nnx.State, kind: str) -> dict[str, Tensors]:
    """Return the tensors of each parameter of a model, by its path."""
    found: dict[str, Tensors] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        rest = (path := path_of(keys)).partition("/")[2]
        if path in _ONCE:
            found[path] = {(): f"{_ONCE[path]}.weight"}, 0
            continue
        if rest not in _IN_LAYER:
            raise ConfigError(f"params/{path}: none of {kind}'s tensors is known for it; must be in convert._IN_LAYER")
        name, inputs = _IN_LAYER[rest]
        full = lambda at, name=name: name.format(expert=at[-1], **FAMILIES[kind]._asdict())
        parts = np.ndindex(leaf.shape[: 2 if "{expert}" in name else 1])
        found[path] = {at: f"model.layers.{at[0]}.{full(at)}.weight" for at in parts}, inputs
    return found


def path_of(keys: tuple[Any, ...]) -> str:
    """Return a path to a parameter, without Flax's own key for its value."""
    return "/".join(str(key.key) for key in keys if isinstance(key, jax.tree_util.DictKey))


def check_names(tensors: Mapping[str, Tensors], names: set[str]) -> None:
    """Raise ConfigError unless the files hold all tensors of the model, and nothing else."""
    wanted = {name for parts, _ in tensors.values() for name in parts.values()}
    # A tied unembedding is a copy of the embedding, and the buffer of old files follows from config.json.
    others = {name for name in names - wanted if name != "lm_head.weight" and not name.endswith("inv_freq")}
    for found, why in ((wanted - names, "are missing"), (others, "have no place in the model")):
        if found:
            raise ConfigError(f"{len(found)} tensors {why}, such as {min(found)}")


def stack(
    names: Mapping[tuple[int, ...], str], inputs: int, shape: tuple[int, ...], read: Callable[[str], np.ndarray]
) -> np.ndarray:
    """Return a parameter of this shape, float32, from the tensors that `read` returns."""
    out = np.empty(shape, np.float32)
    for at, name in names.items():
        tensor, must = read(name), to_theirs(out[at], inputs).shape
        if tensor.shape != must:
            raise ConfigError(f"{name}: is {tensor.shape}; must be {must}")
        out[at] = tensor.T.reshape(out[at].shape) if inputs else tensor
    return out


def to_theirs(part: np.ndarray, inputs: int) -> np.ndarray:
    """Return a part of a parameter in their layout."""
    return part.reshape(math.prod(part.shape[:inputs]), -1).T if inputs else part


def write_weights(folder: Path, params: nnx.State, tensors: Mapping[str, Tensors], dtype: str) -> None:
    """Write the tensors of all parameters, those of one parameter in one file: memory has a copy of one at a time."""
    leaves, files = jax.tree_util.tree_leaves_with_path(params), dict[str, str]()
    for number, (keys, leaf) in enumerate(leaves, start=1):
        file, (names, inputs) = f"model-{number:05}-of-{len(leaves):05}.safetensors", tensors[path_of(keys)]
        parts = {name: to_theirs(np.asarray(leaf[at]), inputs) for at, name in names.items()}
        laid = {name: np.ascontiguousarray(part, dtype) for name, part in parts.items()}
        safetensors.numpy.save_file(laid, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names.values(), file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


if __name__ == "__main__":
    sys.exit(main())
