"""Weights of others: python -m models.convert import FOLDER CONFIG, and back: export CONFIG FOLDER.

Hugging Face's matrices are (outputs, inputs), ours (inputs, outputs) with an axis each for heads and head_dim. They
have a tensor per layer and expert, ours are stacked. Both rotate the pairs (i, i + H/2) of a head.
"""

import os

if __name__ == "__main__":  # before JAX is imported: weights stay in the host's memory
    os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import contextlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from models import checkpoints
from models.config import Config, ConfigError, Mesh, Model, load
from models.sharding import make_mesh
from models.step import State, program

USAGE = """\
Converts weights between the safetensors of Hugging Face's Llama, Mistral, Mixtral, Qwen3 and Qwen3-MoE, and checkpoints
of models.train. It needs the extra `convert`.

  python -m models.convert model FOLDER                   prints the config's model section for FOLDER/config.json
  python -m models.convert import FOLDER CONFIG [section.key=value ...]
  python -m models.convert export CONFIG FOLDER [section.key=value ...]

import writes a checkpoint of step 0 to train.out, from which models.train then begins. export writes the last
checkpoint in train.out, as float32 or, with --dtype bfloat16, in half the bytes."""


class Family(NamedTuple):
    """What tells one family of models from Llama."""

    architecture: str
    qk_norm: bool = False
    block: str = ""  # the name of a layer's experts; empty: dense
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    experts: str = "num_experts"  # the keys of config.json
    d_expert: str = "moe_intermediate_size"


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, block="mlp"),
    "mixtral": Family(
        "MixtralForCausalLM",
        block="block_sparse_moe",
        leaves=("w1", "w3", "w2"),
        experts="num_local_experts",
        d_expert="intermediate_size",
    ),
}

# config.json -> the section `model`
_KEYS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "layers",
    "hidden_size": "d_model",
    "num_attention_heads": "heads",
    "rms_norm_eps": "norm_eps",
}
_ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ONLY = {  # what the model cannot represent otherwise
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "hidden_act": (*_ACTIVATIONS, None),
    "partial_rotary_factor": (1, None),
    "decoder_sparse_step": (1, None),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (None: the command line). Return 0, or 2 if it cannot be converted."""
    parser = argparse.ArgumentParser(
        prog="python -m models.convert", description=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["model", "import", "export"])
    parser.add_argument("arguments", nargs="+", help="as above")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of an export's files")
    options = parser.parse_args(arguments)
    try:
        match options.command, *options.arguments:
            case "model", folder:
                print(model_section(Path(folder)))
            case "import", folder, path, *overrides:
                import_weights(Path(folder), load(path, overrides))
            case "export", path, folder, *overrides:
                export_weights(load(path, overrides), Path(folder), options.dtype)
            case _:
                parser.error("the wrong number of arguments")
    except ConfigError as error:
        print(f"cannot be converted:\n{error}", file=sys.stderr)
        return 2
    return 0


def model_section(folder: Path) -> str:
    """Return the section `model`, in YAML, for the model in a folder."""
    values = read_model(read_json(folder / "config.json"))
    return "\n  ".join(["model:", *(f"{key}: {json.dumps(value)}" for key, value in values.items())])


def import_weights(folder: Path, config: Config) -> None:
    """Write the weights in a folder as the checkpoint of step 0 in `train.out`.

    Raises:
      ConfigError: the model of the config is another one, a tensor is missing, or `train.out` has a checkpoint.
    """
    theirs, out = read_json(folder / "config.json"), Path(config.train.out)
    check_model(theirs, config)
    config, abstract = on_one_device(config)
    tensors = tensors_of(abstract, config.model, theirs["model_type"])
    with opened(folder) as (names, read), checkpoints.open_manager(out) as manager:
        if manager.latest_step() is not None:
            raise ConfigError(f"train.out = {str(out)!r}: has a checkpoint; give another folder, or delete it")
        check_names(tensors, names)
        leaf = lambda path, like: jax.device_put(stack(tensors[path_of(path)], like.shape, read), like.sharding)
        params = jax.tree_util.tree_map_with_path(leaf, abstract)
        checkpoints.save(manager, 0, State(jnp.int32(0), params, ()), config, None)
        manager.wait_until_finished()
        shutil.copy(folder / "config.json", imported(out))
    print(f"{folder} is now {out}/checkpoints/0; models.train begins with it")


def export_weights(config: Config, folder: Path, dtype: str) -> None:
    """Write the last checkpoint in `train.out` as safetensors, with config.json and `data.tokenizer`.

    Raises:
      ConfigError: there is no checkpoint or one of another model, no family has such models, or the folder has files.
    """
    out = Path(config.train.out)
    theirs = read_json(imported(out)) if imported(out).exists() else write_model(config.model)
    check_model(theirs, config)
    theirs["max_position_embeddings"] = max(config.train.seq_len, theirs.get("max_position_embeddings") or 0)
    theirs["dtype" if "dtype" in theirs else "torch_dtype"] = dtype
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: is not empty; give another folder")
    config, abstract = on_one_device(config)
    with checkpoints.open_manager(out) as manager:
        if (step := manager.latest_step()) is None:
            raise ConfigError(f"train.out = {str(out)!r}: has no checkpoint")
        checkpoints.refuse_changes(manager, step, config)
        params = checkpoints.restore(manager, step, {"params": abstract})["params"]
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, params, tensors_of(abstract, config.model, theirs["model_type"]), dtype)
    write_json(folder / "config.json", theirs)
    if config.data.tokenizer:
        shutil.copy(os.path.expanduser(config.data.tokenizer), folder / "tokenizer.json")
    print(f"{out}/checkpoints/{step} is now {folder}")


def imported(out: Path) -> Path:
    """Return the copy of an import's config.json, whose context and special tokens an export states."""
    return out / "checkpoints" / "imported.json"


def on_one_device(config: Config) -> tuple[Config, nnx.State]:
    """Return the config for one CPU device, and its abstract parameters. Checkpoints do not depend on the mesh."""
    config = replace(config, mesh=Mesh(), train=replace(config.train, virtual_stages=1))
    return config, program(config, make_mesh(Mesh(), jax.devices("cpu")[:1])).saved.params


# ---- config.json ----


def read_model(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the section `model` must say for a config.json.

    Raises:
      ConfigError: the family is unknown, or the model cannot represent a value.
    """
    if (kind := theirs.get("model_type")) not in FAMILIES:
        raise ConfigError(f"model_type = {kind!r}: must be one of {', '.join(FAMILIES)}")
    family, dense = FAMILIES[kind], theirs.get("mlp_only_layers") or []
    # transformers 5 writes RoPE's settings into a mapping of their own.
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    stretched = rope.get("rope_type", rope.get("type", "default"))
    wrong = {key: theirs[key] for key, allowed in _ONLY.items() if theirs.get(key) not in allowed}
    wrong |= {} if stretched in ("default", "llama3") else {"rope_type": stretched}
    wrong |= {} if dense == [*range(len(dense))] else {"mlp_only_layers": dense}
    if wrong:
        raise ConfigError(*(f"{key} = {value!r}: the model cannot represent it" for key, value in wrong.items()))
    try:
        values = {ours: theirs[key] for key, ours in _KEYS.items()} | {
            "kv_heads": theirs.get("num_key_value_heads", theirs["num_attention_heads"]),
            "head_dim": theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"],
            "qk_norm": family.qk_norm,
            "activation": _ACTIVATIONS[theirs.get("hidden_act") or "silu"],
            "tied_embeddings": theirs.get("tie_word_embeddings", False),
            "rope_theta": rope.get("rope_theta") or theirs.get("rope_theta") or 10000.0,
            "rope_scaling": [rope[key] for key in _LLAMA3] if stretched == "llama3" else None,
            "experts": theirs[family.experts] if family.block else 0,
        }
        if family.block:
            values |= {"router": "softmax", "shared_experts": 0, "route_scale": 1.0, "balance_rate": 0.0}
            values |= {"experts_per_token": theirs["num_experts_per_tok"], "d_expert": theirs[family.d_expert]}
            values |= {"dense_layers": len(dense), "renormalize": kind == "mixtral" or theirs["norm_topk_prob"]}
        if not family.block or dense:
            values["d_ff"] = theirs["intermediate_size"]
    except KeyError as error:
        raise ConfigError(f"{error.args[0]}: is missing; {kind} has it") from error
    return values


def check_model(theirs: Mapping[str, Any], config: Config) -> None:
    """Raise ConfigError unless the config's model is the one in `theirs`, a config.json."""
    ours = vars(config.model) | {
        "head_dim": config.model.d_head,
        "rope_scaling": config.model.rope_scaling and [*config.model.rope_scaling],
    }
    wrong = [
        f"model.{key} = {ours[key]!r}: must be {must!r} in {theirs['model_type']}'s config.json"
        for key, must in read_model(theirs).items()
        if ours[key] != must
    ]
    window = theirs.get("use_sliding_window", True) and theirs.get("sliding_window")
    if window and config.train.seq_len > window:
        wrong.append(f"train.seq_len = {config.train.seq_len}: must be at most {window}, over which attention slides")
    if wrong:
        raise ConfigError(*wrong)


def write_model(model: Model) -> dict[str, Any]:
    """Return the config.json of a model, as far as its family can represent it; `check_model` tells."""
    kind = ("qwen3_moe" if model.qk_norm else "mixtral") if model.experts else ("qwen3" if model.qk_norm else "llama")
    family = FAMILIES[kind]
    theirs = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{key: getattr(model, ours) for key, ours in _KEYS.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.d_head,
        "hidden_act": next((key for key, ours in _ACTIVATIONS.items() if ours == model.activation), model.activation),
        "tie_word_embeddings": model.tied_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "intermediate_size": model.d_ff,
        "sliding_window": None,
    }
    if model.rope_scaling:
        theirs["rope_scaling"] = {"rope_type": "llama3", **dict(zip(_LLAMA3, model.rope_scaling, strict=True))}
    if family.block:
        theirs |= {family.experts: model.experts, "num_experts_per_tok": model.experts_per_token}
        theirs |= {family.d_expert: model.d_expert, "norm_topk_prob": model.renormalize}
        theirs |= {"mlp_only_layers": [*range(model.dense_layers)], "router_aux_loss_coef": model.aux_loss}
    return theirs


# ---- tensors ----


class Tensors(NamedTuple):
    """The tensors of theirs that are stacked in a parameter of ours."""

    names: dict[tuple[int, ...], str]  # by the index of the part of the parameter
    inputs: int  # how many axes of a part are a matmul's inputs; 0: it is not transposed


_ONCE = {"embedding_VxD": "model.embed_tokens", "norm/scale_D": "model.norm", "unembedding_VxD": "lm_head"}
_IN_LAYER = {  # the name in each layer, and Tensors.inputs
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


def tensors_of(params: nnx.State, model: Model, kind: str) -> dict[str, Tensors]:
    """Return the tensors of each parameter of a model, by its path."""
    found = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        group, _, rest = (path := path_of(keys)).partition("/")
        if path in _ONCE:
            found[path] = Tensors({(): f"{_ONCE[path]}.weight"}, 0)
            continue
        name, inputs = _IN_LAYER[rest]
        first = model.dense_layers if model.experts and group == "layers" else 0
        full = lambda at, name=name, first=first: name.format(expert=at[-1], **FAMILIES[kind]._asdict())
        parts = np.ndindex(leaf.shape[: 2 if "{expert}" in name else 1])
        found[path] = Tensors({at: f"model.layers.{first + at[0]}.{full(at)}.weight" for at in parts}, inputs)
    return found


def path_of(keys: tuple[Any, ...]) -> str:
    """Return a path to a parameter, without Flax's own key for its value."""
    return "/".join(str(key.key) for key in keys if isinstance(key, jax.tree_util.DictKey))


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[tuple[set[str], Callable[[str], np.ndarray]]]:
    """Yield the names of all tensors in a folder's safetensors, and a function that reads one."""
    with contextlib.ExitStack() as stack:
        handles = {}
        for file in sorted(folder.glob("*.safetensors")):
            handle = stack.enter_context(safetensors.safe_open(file, framework="numpy"))
            handles |= dict.fromkeys(handle.keys(), handle)
        yield set(handles), lambda name: handles[name].get_tensor(name)


def check_names(tensors: Mapping[str, Tensors], names: set[str]) -> None:
    """Raise ConfigError unless the files hold all tensors of the model, and nothing else."""
    wanted = {name for each in tensors.values() for name in each.names.values()}
    # A tied unembedding is a copy of the embedding, and the buffer of old files follows from config.json.
    others = {name for name in names - wanted if name != "lm_head.weight" and not name.endswith("inv_freq")}
    for found, why in ((wanted - names, "are missing"), (others, "have no place in the model")):
        if found:
            raise ConfigError(f"{len(found)} tensors {why}, such as {min(found)}")


def stack(tensors: Tensors, shape: tuple[int, ...], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return a parameter of this shape, float32, from the tensors that `read` returns."""
    out = np.empty(shape, np.float32)
    for at, name in tensors.names.items():
        tensor, must = read(name), to_theirs(out[at], tensors.inputs).shape
        if tensor.shape != must:
            raise ConfigError(f"{name}: is {tensor.shape}; must be {must}")
        out[at] = tensor.T.reshape(out[at].shape) if tensors.inputs else tensor
    return out


def to_theirs(part: np.ndarray, inputs: int) -> np.ndarray:
    """Return a part of a parameter in their layout."""
    return part.reshape(math.prod(part.shape[:inputs]), -1).T if inputs else part


def write_weights(folder: Path, params: nnx.State, tensors: Mapping[str, Tensors], dtype: str) -> None:
    """Write the tensors of all parameters, those of one parameter in one file: memory has a copy of one at a time."""
    leaves, files = jax.tree_util.tree_leaves_with_path(params), {}
    for number, (keys, leaf) in enumerate(leaves, start=1):
        file, (names, inputs) = f"model-{number:05}-of-{len(leaves):05}.safetensors", tensors[path_of(keys)]
        parts = {name: to_theirs(np.asarray(leaf[at]), inputs) for at, name in names.items()}
        laid = {name: np.ascontiguousarray(part, dtype) for name, part in parts.items()}
        safetensors.numpy.save_file(laid, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names.values(), file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
