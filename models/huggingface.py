"""Hugging Face's layout of Llama, Mistral, Mixtral, Qwen3 and Qwen3-MoE: config.json, and the tensors of safetensors.

Their matrices are (outputs, inputs), ours (inputs, outputs) with an axis each for heads and head_dim. They have a
tensor per layer and expert, ours are stacked. Both rotate the pairs (i, i + H/2) of a head.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from jaxoffload import Problem
from models.config import Model
from models.moe import first_leaves
from models.reading import ConfigError, advice, problem, typed_values
from models.text import short


class Family(NamedTuple):
    """What tells one family of models from Llama."""

    architecture: str
    qk_norm: bool = False
    block: str = ""  # the name of a layer's experts; empty: dense
    leaves: Mapping[str, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}  # of an expert
    d_expert: str = "intermediate_size"  # the key of config.json


_DENSE_LEAVES = Family("").leaves

FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "mixtral": Family("MixtralForCausalLM", block="block_sparse_moe", leaves={"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, block="mlp", d_expert="moe_intermediate_size"),
}

_ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}

# The keys of a config.json that say what a family's model is, with the key of ours. Those of experts come behind.
_KEYS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "layers",
    "hidden_size": "d_model",
    "num_attention_heads": "heads",
    "rms_norm_eps": "norm_eps",
}

# The keys that our model does not depend on, but its users do: an export has what the import had.
KEPT = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


# ---- config.json ----


def read_model(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of the `model` section for a config.json, and a problem for each key that has no counterpart.

    Raises:
      ConfigError: the family is unknown, or a key is missing.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        why = f"is not one of these families{advice(str(kind), list(FAMILIES))}"
        raise ConfigError([problem("model_type", short(kind), why)])
    family = FAMILIES[kind]
    count = "num_local_experts" if "num_local_experts" in config else "num_experts"
    needed = [*_KEYS, *((count, "num_experts_per_tok", family.d_expert) if family.block else ("intermediate_size",))]
    if missing := [key for key in needed if key not in config]:
        raise ConfigError([Problem(key, f"{key}: is missing; {kind} has it") for key in missing])
    values = {ours: config[theirs] for theirs, ours in _KEYS.items()} | {
        "kv_heads": config.get("num_key_value_heads", config["num_attention_heads"]),
        "head_dim": config.get("head_dim"),
        "qk_norm": family.qk_norm,
        "activation": _ACTIVATIONS.get(config.get("hidden_act", "silu")),
        "tied_embeddings": config.get("tie_word_embeddings", False),
        **_read_rope(config),
    }
    if family.block:
        values |= {
            "experts": config[count],
            "experts_per_token": config["num_experts_per_tok"],
            "d_expert": config[family.d_expert],
            "dense_layers": len(config.get("mlp_only_layers") or ()),
            "renormalize": kind == "mixtral" or config.get("norm_topk_prob", False),
        }
    if not family.block or values["dense_layers"]:
        values["d_ff"] = config["intermediate_size"]
    unlike = list(_unlike(config))
    _, misfits = typed_values("model", {k: v for k, v in values.items() if v is not None}, _HINTS)
    return values, unlike or misfits


_HINTS = get_type_hints(Model, include_extras=True)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of RoPE, which transformers 5 writes into a mapping of their own."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or 10000.0
    return {"rope_type": scaling.get("type", "default"), "rope_theta": theta} | scaling


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _rope(config)
    scaling = [rope.get(key) for key in _LLAMA3] if rope["rope_type"] == "llama3" else None
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def _unlike(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each key whose value the model cannot represent."""
    wrong = lambda key, must: problem(key, short(config[key]), f"must be {must}")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            yield wrong(key, "false: these models have no biases")
    if type(config.get("max_position_embeddings") or 1) is not int:
        yield wrong("max_position_embeddings", "an integer")
    if config.get("quantization_config"):
        yield wrong("quantization_config", "absent: quantised weights are not read")
    if config.get("hidden_act", "silu") not in _ACTIVATIONS:
        yield wrong("hidden_act", " or ".join(_ACTIVATIONS))
    rope, key = _rope(config), "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    if rope["rope_type"] not in ("default", "llama3"):
        yield wrong(key, "of rope_type default or llama3")
    elif rope["rope_type"] == "llama3" and None in (rope.get(key) for key in _LLAMA3):
        yield wrong(key, f"one with {', '.join(_LLAMA3)}")
    if (part := rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))) != 1:
        yield problem("partial_rotary_factor", short(part), "must be 1: whole heads are rotated")
    if config.get("decoder_sparse_step", 1) != 1:
        yield wrong("decoder_sparse_step", "1: all layers behind the dense ones have experts")
    dense = config.get("mlp_only_layers") or []
    if sorted(dense) != [*range(len(dense))]:
        yield wrong("mlp_only_layers", "the first layers")


def window(config: Mapping[str, Any]) -> int | None:
    """Return over how many tokens attention slides; None: over all."""
    return config.get("sliding_window") if config.get("use_sliding_window", True) else None


def write_model(model: Model, seq_len: int, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model.

    Args:
      model: the model.
      seq_len: what it was trained with. It is the context that the file states, unless a longer one was imported.
      kept: those of KEPT that were imported.

    Raises:
      ConfigError: no family has such models.
    """
    kind = family_of(model)
    family = FAMILIES[kind]
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling:
        rope = {"rope_type": "llama3", **dict(zip(_LLAMA3, model.rope_scaling, strict=True))}
    experts = {
        "num_local_experts" if kind == "mixtral" else "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        family.d_expert: model.d_expert,
        "router_aux_loss_coef": model.aux_loss,
    }
    if kind == "qwen3_moe":
        experts |= {"norm_topk_prob": model.renormalize, "decoder_sparse_step": 1}
        experts |= {"mlp_only_layers": [*range(model.dense_layers)], "intermediate_size": model.d_ff}
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        **{theirs: getattr(model, ours) for theirs, ours in _KEYS.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.d_head,
        "hidden_act": {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[model.activation],
        "tie_word_embeddings": model.tied_embeddings,
        **kept,
        "max_position_embeddings": max(seq_len, kept.get("max_position_embeddings", 0)),
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if model.rope_scaling else None,
        "attention_bias": False,
        **({"intermediate_size": model.d_ff} | (experts if family.block else {})),
        **({"sliding_window": None} if kind == "mixtral" else {}),
    }


def family_of(model: Model) -> str:
    """Return the family that a model belongs to; a dense one without qk_norm is a Llama.

    Raises:
      ConfigError: none has such models.
    """
    kind = ("qwen3_moe" if model.qk_norm else "mixtral") if model.experts else ("qwen3" if model.qk_norm else "llama")
    only = {"activation": tuple(_ACTIVATIONS.values())}
    if model.experts:
        only |= {"router": ("softmax",), "shared_experts": (0,), "route_scale": (1.0,), "balance_rate": (0.0,)}
    if kind == "mixtral":
        only |= {"renormalize": (True,), "dense_layers": (0,)}
    problems = [
        problem(f"model.{key}", repr(getattr(model, key)), f"must be {' or '.join(map(str, allowed))} in {kind}")
        for key, allowed in only.items()
        if getattr(model, key) not in allowed
    ]
    if problems:
        raise ConfigError(problems)
    return kind


# ---- tensors ----


class Stacked(NamedTuple):
    """A parameter of ours, and the tensors of theirs that are stacked in it."""

    path: tuple[str, ...]
    name: str  # of their tensors, with {layer} and {expert}
    inputs: int = 0  # how many axes behind the stacked ones are a matmul's inputs; 0: it is not transposed
    layers: range | None = None  # None: it belongs to no layer
    experts: int | None = None

    def parts(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield the index of each part of the parameter, and the name of its tensor."""
        layers = [((), None)] if self.layers is None else [((at,), layer) for at, layer in enumerate(self.layers)]
        for at, layer in layers:
            for expert in [None] if self.experts is None else range(self.experts):
                yield at if expert is None else (*at, expert), self.name.format(layer=layer, expert=expert)

    def outer(self, part: np.ndarray) -> np.ndarray:
        """Return a part in their layout."""
        return part.reshape(math.prod(part.shape[: self.inputs]), -1).T if self.inputs else part

    def outer_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a part in their layout."""
        return (math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])) if self.inputs else shape

    def inner(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return a part of this shape from their tensor."""
        return tensor.T.reshape(shape) if self.inputs else tensor


def stacks(model: Model, kind: str) -> list[Stacked]:
    """Return all parameters of a model, with their tensors in a family."""
    ends = [Stacked(("embedding_VxD",), "model.embed_tokens.weight"), Stacked(("norm", "scale_D"), "model.norm.weight")]
    if not model.tied_embeddings:
        ends.append(Stacked(("unembedding_VxD",), "lm_head.weight"))
    if not model.experts:
        return [*ends, *_dense(model, "layers", range(model.layers))]
    first, others = range(model.dense_layers), range(model.dense_layers, model.layers)
    return [*ends, *(_dense(model, "first", first) if first else ()), *_mixed(model, FAMILIES[kind], others)]


def _attention(model: Model, group: str, layers: range) -> Iterator[Stacked]:
    row = lambda leaf, name, inputs=0: Stacked(
        (group, "attention", *leaf.split("/")), f"model.layers.{{layer}}.{name}.weight", inputs, layers
    )
    yield row("norm/scale_D", "input_layernorm")
    yield row("q_DxNxH", "self_attn.q_proj", 1)
    yield row("k_DxKxH", "self_attn.k_proj", 1)
    yield row("v_DxKxH", "self_attn.v_proj", 1)
    yield row("out_NxHxD", "self_attn.o_proj", 2)
    if model.qk_norm:
        yield row("q_norm_H", "self_attn.q_norm")
        yield row("k_norm_H", "self_attn.k_norm")


def _dense(model: Model, group: str, layers: range) -> Iterator[Stacked]:
    yield from _attention(model, group, layers)
    prefix = "model.layers.{layer}"
    yield Stacked((group, "mlp", "norm", "scale_D"), f"{prefix}.post_attention_layernorm.weight", 0, layers)
    for leaf in (*first_leaves(model.activation), "down"):
        ours = "down_FxD" if leaf == "down" else f"{leaf}_DxF"
        yield Stacked((group, "mlp", ours), f"{prefix}.mlp.{_DENSE_LEAVES[leaf]}.weight", 1, layers)


def _mixed(model: Model, family: Family, layers: range) -> Iterator[Stacked]:
    yield from _attention(model, "layers", layers)
    prefix = "model.layers.{layer}"
    yield Stacked(("layers", "moe", "norm", "scale_D"), f"{prefix}.post_attention_layernorm.weight", 0, layers)
    yield Stacked(("layers", "moe", "router_DxE"), f"{prefix}.{family.block}.gate.weight", 1, layers)
    for leaf in (*first_leaves(model.activation), "down"):
        ours = "down_ExFxD" if leaf == "down" else f"{leaf}_ExDxF"
        name = f"{prefix}.{family.block}.experts.{{expert}}.{family.leaves[leaf]}.weight"
        yield Stacked(("layers", "moe", ours), name, 1, layers, model.experts)


def stack(row: Stacked, shape: tuple[int, ...], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return a parameter of this shape, float32, from the tensors that `read` returns.

    Raises:
      ConfigError: a tensor has another shape.
    """
    out = np.empty(shape, np.float32)
    for at, name in row.parts():
        tensor, part = read(name), out[at].shape
        if tensor.shape != (want := row.outer_shape(part)):
            raise ConfigError([Problem(name, f"{name}: is {tensor.shape}; must be {want}")])
        out[at] = row.inner(tensor, part)
    return out
