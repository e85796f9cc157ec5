"""Weights of others: python -m models.convert import FOLDER CONFIG, and back: export CONFIG FOLDER.

Hugging Face's matrices are (outputs, inputs), ours (inputs, outputs) with an axis each for heads and head_dim. They have
a tensor per layer and expert, ours are stacked. Both rotate the pairs (i, i + H/2) of a head.
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
from huggingface_hub import split_state_dict_into_shards_factory

from models import checkpoints
from models.config import Config, ConfigError, Mesh, Model
from models.loading import load
from models.sharding import make_mesh
from models.step import State, program

USAGE = """\
Converts weights between the safetensors of Hugging Face's Llama, Mistral, Mixtral, Qwen3 and Qwen3-MoE, and checkpoints
of models.train. Needs the extra `convert`.

  python -m models.convert model FOLDER                   prints the config's model section for FOLDER/config.json
  python -m models.convert import FOLDER CONFIG [section.key=value ...]
  python -m models.convert export CONFIG FOLDER [section.key=value ...]

import writes a checkpoint of step 0 to train.out, from which models.train then begins. export writes the last
checkpoint in train.out, as float32 or, with --dtype bfloat16, in half the bytes."""

MAX_FILE = "5GB"  # as transformers writes them


class Family(NamedTuple):
    """What tells one family of models from Llama."""

    architecture: str
    qk_norm: bool = False
    block: str = ""  # the name of a layer's experts; empty: dense
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    experts: str = ""  # the key of config.json with their number
    d_expert: str = "intermediate_size"


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "mixtral": Family("MixtralForCausalLM", False, "block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", True, "mlp", experts="num_experts", d_expert="moe_intermediate_size"),
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
# What the model cannot represent otherwise.
_ONLY = {
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
    commands = parser.add_subparsers(required=True, dest="command", metavar="model | import | export")
    for name, places in {"model": ["folder"], "import": ["folder", "config"], "export": ["config", "folder"]}.items():
        command = commands.add_parser(name)
        for place in places:
            command.add_argument(place)
        if name != "model":
            command.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
        if name == "export":
            command.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the files")
    options = parser.parse_args(arguments)
    folder = Path(options.folder)
    try:
        if options.command == "model":
            values = read_model(read_json(folder / "config.json"))
            print("\n  ".join(["model:", *(f"{key}: {json.dumps(v)}" for key, v in values.items() if v is not None)]))
        elif options.command == "import":
            import_weights(folder, load(options.config, options.overrides))
        else:
            export_weights(load(options.config, options.overrides), folder, options.dtype)
    except ConfigError as error:
        print(f"cannot be converted:\n{error}", file=sys.stderr)
        return 2
    return 0


def import_weights(folder: Path, config: Config) -> None:
    """Write the weights in a folder as the checkpoint of step 0 in `train.out`.

    Raises:
      ConfigError: the model of the config is another one, a tensor is missing, or `train.out` has a checkpoint.
    """
    theirs, out = read_json(folder / "config.json"), Path(config.train.out)
    check_model(theirs, config)
    config, abstract = on_one_device(config)
    with opened(folder) as (names, read), checkpoints.open_manager(out) as manager:
        if manager.latest_step() is not None:
            raise ConfigError(f"train.out = {str(out)!r}: has a checkpoint; give another folder, or delete it")
        tensors = tensors_of(abstract, config.model, theirs["model_type"])
        check_names(tensors, names, config.model.tied_embeddings)
        leaf = lambda path, like: jax.device_put(stack(tensors[path_of(path)], like.shape, read), like.sharding)
        params = jax.tree_util.tree_map_with_path(leaf, abstract)
        checkpoints.save(manager, 0, State(jnp.int32(0), params, ()), config, None)
        manager.wait_until_finished()
        # An export states what it says beside the model: its context, its special tokens.
        shutil.copy(folder / "config.json", imported(out))
    print(f"{folder} is now {out}/checkpoints/0; models.train begins with it")


def export_weights(config: Config, folder: Path, dtype: str) -> None:
    """Write the last checkpoint in `train.out` as safetensors, with config.json and `data.tokenizer`.

    Raises:
      ConfigError: there is no checkpoint, it is of another model, no family has such models, or the folder is not
        empty.
    """
    out, seq_len = Path(config.train.out), config.train.seq_len
    theirs = read_json(imported(out)) if imported(out).exists() else write_model(config.model)
    check_model(theirs, config)
    theirs["max_position_embeddings"] = max(seq_len, theirs.get("max_position_embeddings") or 0)
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
    """Return the copy of an import's config.json. It is deleted with the checkpoints that began there."""
    return out / "checkpoints" / "imported.json"


def on_one_device(config: Config) -> tuple[Config, nnx.State]:
    """Return the config for one CPU device, and its abstract parameters. Checkpoints do not depend on the mesh."""
    config = replace(config, mesh=Mesh(), train=replace(config.train, virtual_stages=1))
    return config, program(config, make_mesh(Mesh(), jax.devices("cpu")[:1])).saved.params


# ---- config.json ----


def read_model(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the section `model` for a config.json.

    Raises:
      ConfigError: the family is unknown, or the model cannot represent a value.
    """
    if (kind := theirs.get("model_type")) not in FAMILIES:
        raise ConfigError(f"model_type = {kind!r}: must be one of {', '.join(FAMILIES)}")
    family, rope = FAMILIES[kind], rope_of(theirs)
    wrong = [
        f"{key} = {theirs[key]!r}: must be {allowed[0]}"
        for key, allowed in _ONLY.items()
        if theirs.get(key) not in allowed
    ]
    if rope["rope_type"] not in ("default", "llama3"):
        wrong.append(f"rope_type = {rope['rope_type']!r}: must be default or llama3")
    dense = list(theirs.get("mlp_only_layers") or ())
    if sorted(dense) != list(range(len(dense))):
        wrong.append(f"mlp_only_layers = {dense}: must be the first layers")
    if wrong:
        raise ConfigError("\n".join(wrong))
    try:
        values = {ours: theirs[key] for key, ours in _KEYS.items()} | {
            "kv_heads": theirs.get("num_key_value_heads", theirs["num_attention_heads"]),
            "head_dim": theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"],
            "qk_norm": family.qk_norm,
            "activation": _ACTIVATIONS[theirs.get("hidden_act") or "silu"],
            "tied_embeddings": theirs.get("tie_word_embeddings", False),
            "rope_theta": rope["rope_theta"],
            "rope_scaling": [rope[key] for key in _LLAMA3] if rope["rope_type"] == "llama3" else None,
            "experts": theirs[family.experts] if family.block else 0,
        }
        if family.block:
            values["experts_per_token"] = theirs["num_experts_per_tok"]
            values["d_expert"] = theirs[family.d_expert]
            values["dense_layers"] = len(dense)
            values["renormalize"] = kind == "mixtral" or theirs.get("norm_topk_prob", False)
        if not family.block or dense:
            values["d_ff"] = theirs["intermediate_size"]
    except KeyError as error:
        raise ConfigError(f"{error.args[0]}: is missing; {kind} has it") from error
    return values


def rope_of(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of RoPE, which transformers 5 writes into a mapping of their own."""
    scaling = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    theta = theirs.get("rope_theta") or 10000.0
    return {"rope_type": scaling.get("type", "default"), "rope_theta": theta} | scaling


def check_model(theirs: Mapping[str, Any], config: Config) -> None:
    """Raise ConfigError unless the config's model is the one in `theirs`, a config.json."""
    ours = json.loads(json.dumps(vars(config.model) | {"head_dim": config.model.d_head}))
    wrong = [
        f"model.{key} = {ours[key]!r}: must be {must!r}, as in config.json"
        for key, must in read_model(theirs).items()
        if ours[key] != must
    ]
    window = theirs.get("sliding_window") if theirs.get("use_sliding_window", True) else None
    if window and config.train.seq_len > window:
        wrong.append(f"train.seq_len = {config.train.seq_len}: must be at most {window}, over which attention slides")
    if wrong:
        raise ConfigError("\n".join(wrong))


def write_model(model: Model) -> dict[str, Any]:
    """Return the config.json of a model.

    Raises:
      ConfigError: no family has such models.
    """
    kind = ("qwen3_moe" if model.qk_norm else "mixtral") if model.experts else ("qwen3" if model.qk_norm else "llama")
    family = FAMILIES[kind]
    only: dict[str, tuple[Any, ...]] = {"activation": tuple(_ACTIVATIONS.values())}
    if family.block:
        only |= {"router": ("softmax",), "shared_experts": (0,), "route_scale": (1.0,), "balance_rate": (0.0,)}
    if kind == "mixtral":
        only |= {"renormalize": (True,), "dense_layers": (0,)}
    wrong = [
        f"model.{key} = {getattr(model, key)!r}: must be {' or '.join(map(str, allowed))} in {kind}"
        for key, allowed in only.items()
        if getattr(model, key) not in allowed
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    rope = (
        {"rope_type": "llama3", **dict(zip(_LLAMA3, model.rope_scaling, strict=True))} if model.rope_scaling else None
    )
    theirs = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{key: getattr(model, ours) for key, ours in _KEYS.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.d_head,
        "hidden_act": {ours: key for key, ours in _ACTIVATIONS.items()}[model.activation],
        "tie_word_embeddings": model.tied_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": rope,
        "intermediate_size": model.d_ff,
    }
    if family.block:
        theirs |= {family.experts: model.experts, "num_experts_per_tok": model.experts_per_token}
        theirs |= {family.d_expert: model.d_expert, "router_aux_loss_coef": model.aux_loss}
    if kind == "qwen3_moe":
        theirs |= {"norm_topk_prob": model.renormalize, "mlp_only_layers": list(range(model.dense_layers))}
    return theirs | ({"sliding_window": None} if kind == "mixtral" else {})


# ---- tensors ----


class Tensors(NamedTuple):
    """The tensors of theirs that are stacked in a parameter of ours."""

    names: dict[tuple[int, ...], str]  # by the index of the part of the parameter
    inputs: int  # how many axes of a part are a matmul's inputs; 0: it is not transposed


def tensors_of(params: nnx.State, model: Model, kind: str) -> dict[str, Tensors]:
    """Return the tensors of each parameter of a model, by its path."""
    family = FAMILIES[kind]
    first, second, last = family.leaves
    once = {"embedding_VxD": "model.embed_tokens", "norm/scale_D": "model.norm", "unembedding_VxD": "lm_head"}
    in_layer = {
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
        "moe/router_DxE": (f"{family.block}.gate", 1),
        "moe/gate_ExDxF": (f"{family.block}.experts.{{expert}}.{first}", 1),
        "moe/up_ExDxF": (f"{family.block}.experts.{{expert}}.{second}", 1),
        "moe/down_ExFxD": (f"{family.block}.experts.{{expert}}.{last}", 1),
    }
    tensors = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = path_of(keys)
        if path in once:
            tensors[path] = Tensors({(): f"{once[path]}.weight"}, 0)
            continue
        group, _, rest = path.partition("/")
        name, inputs = in_layer[rest]
        begin = model.dense_layers if group == "layers" and model.experts else 0
        name = f"model.layers.{{layer}}.{name}.weight"
        parts = np.ndindex(leaf.shape[: 2 if "{expert}" in name else 1])
        named = {at: name.format(layer=begin + at[0], expert=at[-1]) for at in parts}
        tensors[path] = Tensors(named, inputs)
    return tensors


def path_of(keys: tuple[Any, ...]) -> str:
    """Return a path to a parameter, without Flax's own key for its value."""
    return "/".join(str(key.key) for key in keys if isinstance(key, jax.tree_util.DictKey))


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[tuple[set[str], Callable[[str], np.ndarray]]]:
    """Yield the names of all tensors in a folder's safetensors, and a function that reads one."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: has no .safetensors files")
    with contextlib.ExitStack() as stack:
        try:
            handles = [stack.enter_context(safetensors.safe_open(file, framework="numpy")) for file in files]
        except safetensors.SafetensorError as error:
            raise ConfigError(f"{folder}: a file is damaged ({error})") from error
        of_name = {name: handle for handle in handles for name in handle.keys()}
        yield set(of_name), lambda name: of_name[name].get_tensor(name)


def check_names(tensors: Mapping[str, Tensors], names: set[str], tied: bool) -> None:
    """Raise ConfigError unless the files hold all tensors of the model, and nothing else."""
    wanted = {name for each in tensors.values() for name in each.names.values()}
    # Old files have the buffer, which follows from config.json. A tied unembedding is a copy of the embedding.
    copies = {name for name in names if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")}
    if missing := sorted(wanted - names):
        raise ConfigError(f"{len(missing)} tensors are missing, such as {missing[0]}")
    if others := sorted(names - wanted - copies):
        raise ConfigError(f"{len(others)} tensors have no place in the model, such as {others[0]}")


def stack(tensors: Tensors, shape: tuple[int, ...], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return a parameter of this shape, float32, from the tensors that `read` returns."""
    out = np.empty(shape, np.float32)
    for at, name in tensors.names.items():
        tensor, want = read(name), to_theirs(out[at], tensors.inputs).shape
        if tensor.shape != want:
            raise ConfigError(f"{name}: is {tensor.shape}; must be {want}")
        out[at] = tensor.T.reshape(out[at].shape) if tensors.inputs else tensor
    return out


def to_theirs(part: np.ndarray, inputs: int) -> np.ndarray:
    return part.reshape(math.prod(part.shape[:inputs]), -1).T if inputs else part


def write_weights(folder: Path, params: nnx.State, tensors: Mapping[str, Tensors], dtype: str) -> None:
    """Write the tensors of all parameters, in files of at most MAX_FILE."""
    leaves = {path_of(keys): np.asarray(leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(params)}
    views = {
        name: to_theirs(leaves[path][at], each.inputs)
        for path, each in tensors.items()
        for at, name in each.names.items()
    }
    width = jnp.dtype(dtype).itemsize
    plan = split_state_dict_into_shards_factory(
        views,
        get_storage_size=lambda view: view.size * width,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE,
    )
    for file, names in plan.filename_to_tensors.items():
        laid = {name: np.ascontiguousarray(views[name], dtype) for name in names}
        safetensors.numpy.save_file(laid, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); must be the config.json of a model") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
