"""The config of a run: dataclasses with a comment per field, read by OmegaConf; all that is wrong is said at once."""

import dataclasses
import difflib
import json
import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jaxoffload import Policy, PolicyError, Problem, UserError


class ConfigError(UserError, ValueError):
    """The config cannot run. Each message is a line with the key, its value and what is allowed."""

    def __init__(self, *messages: str):
        super().__init__([Problem("config", " ".join(message.split())) for message in messages])


@dataclass(frozen=True)
class Experts:
    """The fields of a model that only a mixture of experts has; dense models refuse them."""

    experts: int = 0  # per layer; 0: dense
    experts_per_token: int = 2
    d_expert: int = 512  # width of each expert's gate, up and activation
    shared_experts: int = 0  # experts that all tokens go through, d_expert each
    dense_layers: int = 0  # how many of the first layers have an MLP instead of experts
    renormalize: bool = True  # the chosen experts' scores are divided by their sum
    aux_loss: float = 0.0  # weight of the load-balancing loss
    z_loss: float = 0.0  # weight of the mean of logsumexp(router logits)^2
    grouped: Literal["auto", "te", "mosaic", "ragged"] = "auto"  # backend of jaxoffload.grouped.grouped_matmul
    quantize: Literal["fp8"] | None = None  # the experts' grouped GEMMs, with a scale per expert
    capacity: float | None = None  # most rows sent to a device of the expert axis, in even shares; others are dropped


@dataclass(frozen=True)
class Model(Experts):
    """A Llama-style decoder; with experts, a mixture of them in place of the MLP."""

    vocab_size: int = 320  # more than the greatest token: 257 or more if the tokens are bytes
    layers: int = 4
    d_model: int = 192  # width of the residual stream
    heads: int = 6  # query heads
    kv_heads: int = 2  # key and value heads, each shared by heads / kv_heads query heads
    head_dim: int | None = None  # None: d_model / heads
    qk_norm: bool = False  # RMSNorm of each query and key head, before RoPE
    d_ff: int = 512  # width of the MLP's gate, up and activation
    rope_theta: float = 10000.0  # base of RoPE's wavelengths
    # Llama 3.1's [factor, low_freq_factor, high_freq_factor, original length]: frequencies that turn less often than
    # low_freq_factor in the original length are divided by factor; those that turn more than high_freq_factor stay.
    rope_scaling: tuple[float, float, float, int] | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = True  # the unembedding is the embedding, transposed
    # xla runs everywhere and materialises the scores. cudnn and te (TransformerEngine) are flash attention on NVIDIA
    # GPUs: attn/context is then the output and the softmax statistics. If both are kept, the forward pass of attention
    # is not recomputed.
    attention: Literal["xla", "cudnn", "te"] = "xla"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the computation
    # Of all matrices but routers. bfloat16 ones have float32 masters: the optimizer holds the 16 bits that they lack.
    param_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def d_head(self) -> int:
        return self.head_dim or self.d_model // self.heads


@dataclass(frozen=True)
class Remat(Policy):
    """A jaxoffload.Policy; with a budget, the one that is planned for it (docs/plan.md).

    With a budget the patterns of `residuals` stay; `default`, `offload_layers` and `other_layers` are chosen.
    """

    budget: int | str | None = None  # per device: bytes, 70GiB, or auto: what JAX may use of a GPU, less 5 %
    host_budget: int | str | None = None  # of pinned host memory per device; None: what the pool and the machine have
    machine: str | None = None  # what `python -m jaxoffload machine` printed; needed for a budget

    @property
    def fixed(self) -> Policy:
        """The policy alone."""
        return Policy(**{each.name: getattr(self, each.name) for each in dataclasses.fields(Policy)})


@dataclass(frozen=True)
class Mesh:
    """The number of devices along each mesh axis, the last one fastest; the product is that of all devices."""

    stage: int = 1  # layers, in pipeline stages; vocabulary (docs/stages.md)
    data: int = 1  # batch rows; weights replicated
    fsdp: int = 1  # batch rows; weights and optimizer state sharded
    expert: int = 1  # batch rows; experts; all other weights as on fsdp
    tensor: int = 1  # heads, d_ff and vocabulary


@dataclass(frozen=True)
class Data:
    path: str | tuple[str, ...] = "stdlib"  # Python's standard library, or globs of .txt, .jsonl, .parquet files
    tokenizer: str | None = None  # a tokenizer.json; None: tokens are bytes, and 256 the end of a document
    text_field: str = "text"  # the field of .jsonl and .parquet that holds the text
    valid_fraction: float = 0.05  # fraction of the documents held out
    document_mask: bool = False  # attention stays in a document, which begins with the end of the one before


@dataclass(frozen=True)
class Train:
    steps: int = 300
    batch_size: int = 8  # sequences per step, over all devices and microbatches
    seq_len: int = 256  # tokens per sequence
    grad_accumulation: int = 1  # microbatches per step
    # The backward pass of one microbatch and the forward pass of the next run together, layer by layer, so that copies
    # hide behind both (docs/accumulation.md); false: one microbatch after another. The results are the same.
    interleave: bool = True
    virtual_stages: int = 1  # chunks of layers that each pipeline stage has, dealt in turn (docs/stages.md)
    # Positions of each sequence whose logits are in memory at once. None: the largest divisor of seq_len up to 256.
    loss_chunk: int | None = None
    learning_rate: float = 1e-3  # peak, after warm-up
    final_learning_rate_fraction: float = 0.1  # where the cosine ends, as a fraction of the peak
    warmup_steps: int = 0  # linear, from zero
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1  # of matrices; norms are not decayed
    clip_norm: float = 1.0  # greatest global norm of the gradient
    sum_dtype: Literal["float32", "bfloat16"] = "float32"  # in which bfloat16 weights' gradients are summed
    state_dtype: Literal["float32", "bfloat16"] = "float32"  # in which AdamW's moments are stored
    # AdamW's moments, and what masters have beyond bfloat16 weights, live in pinned host memory (docs/optimizer.md).
    # auto: if a GPU cannot hold the step otherwise.
    optimizer_on_host: bool | Literal["auto"] = "auto"
    seed: int = 0  # of the parameters and of the order of the data
    log_every: int = 10  # steps
    eval_every: int = 100  # steps
    eval_batches: int = 8  # held-out batches per evaluation, if there are so many
    checkpoint_every: int = 100  # steps; a killed run loses at most this many
    tensorboard: bool = False  # also write TensorBoard's event files, to the folder tensorboard in `out`
    out: str = ""  # folder of checkpoints and metrics.jsonl; empty: runs/NAME of the config file

    @property
    def chunk(self) -> int:
        return self.loss_chunk or max(n for n in range(1, min(self.seq_len, 256) + 1) if self.seq_len % n == 0)


@dataclass(frozen=True)
class Distributed:
    """A run of several processes. Under Slurm and Open MPI all of it is known from the environment."""

    coordinator: str | None = None  # host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None


@dataclass(frozen=True)
class Config:
    model: Model = field(default_factory=Model)
    remat: Remat = field(default_factory=Remat)
    mesh: Mesh = field(default_factory=Mesh)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    distributed: Distributed = field(default_factory=Distributed)


_SECTIONS: dict[str, Any] = {each.name: each.default_factory for each in dataclasses.fields(Config)}


def flat(config: Config) -> dict[str, Any]:
    """Return {section.key: value}, in the types of JSON; a model.head_dim of None is replaced by the actual one."""
    model = dataclasses.replace(config.model, head_dim=config.model.d_head)
    sections = json.loads(json.dumps(dataclasses.asdict(dataclasses.replace(config, model=model)))).items()
    return {f"{section}.{key}": value for section, values in sections for key, value in values.items()}


# ---- from YAML and overrides ----


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in a YAML file, with `section.key=value` overrides whose values are YAML.

    A later override of a key wins; `remat.residuals[PATTERN]=save` adds a pattern after all others, so that it wins.

    Raises:
      ConfigError: it lists all problems.
    """
    path = Path(path).expanduser()
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_instead(str(path), map(str, path.parent.glob('*.yaml')))}") from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of sections")
    problems: list[str] = []
    for text in overrides:
        _override(tree, text, problems)
    sections: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in _SECTIONS:
            problems.append(f"{name} = {value!r}: no such section{_instead(name, _SECTIONS)}")
        elif not isinstance(value, dict | None):
            problems.append(f"{name} = {value!r}: must be a mapping of keys to values")
        else:
            sections[name] = (_remat if name == "remat" else _section)(name, value or {}, problems)
    config = Config(**sections)
    misread = {problem.partition(" = ")[0] for problem in problems}  # such keys have their defaults in `config`
    related = [problem for problem in _broken(config) if misread.isdisjoint(re.findall(r"\w+\.\w+", problem))]
    if problems or related:
        raise ConfigError(*problems, *related)
    out = os.path.expanduser(config.train.out or f"runs/{path.stem}")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, out=out))


def _override(tree: dict[str, Any], text: str, problems: list[str]) -> None:
    """Put one section.key=value, or section.key[entry]=value, into the tree."""
    match = re.fullmatch(r"(\w+)\.(\w+)(?:\[(.+)\])?=(.*)", text, re.DOTALL)
    if match is None:
        problems.append(f"{text}: must be section.key=value, or section.key[entry]=value for an entry of a mapping")
        return
    section, key, entry, source = match.groups()
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={source}"]))
    except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        problems.append(f"{section}.{key} = {source}: {error}")
        return
    target, value = tree.get(section) or {}, parsed["value"]
    if not isinstance(target, dict):
        return  # the section itself is reported
    if entry:  # after all others: the last of several matching patterns wins
        entries = target.get(key) or {}
        if not isinstance(entries, dict):
            problems.append(f"{text}: {section}.{key} is not a mapping")
            return
        value = {**{name: each for name, each in entries.items() if name != entry}, entry: value}
    tree[section] = {**target, key: value}


def _section(name: str, tree: dict[str, Any], problems: list[str]) -> Any:
    """Return the dataclass of a section, with the default where a value is wrong."""
    values = {}
    for key, value in tree.items():
        try:
            values[key] = getattr(OmegaConf.to_object(OmegaConf.merge(_SECTIONS[name], {key: value})), key)
            allowed = _allowed(name, key, values[key])
        except OmegaConfBaseException as error:
            allowed = str(error).splitlines()[0]
        if allowed:
            problems.append(f"{name}.{key} = {value!r}: {allowed}")
            values.pop(key, None)
    return _SECTIONS[name](**values)


def _remat(name: str, tree: dict[str, Any], problems: list[str]) -> Remat:
    names = [each.name for each in dataclasses.fields(Remat)]
    for key in tree.keys() - names:
        problems.append(f"{name}.{key} = {tree.pop(key)!r}: no such key{_instead(key, names)}")
    try:
        return Remat(**tree)
    except PolicyError as error:
        problems += [f"{name}.{problem.message}" for problem in error.problems]
        return Remat()


def nearest(name: object, names: Iterable[str]) -> str:
    """Return how a message ends that names the nearest name; nothing if none is near."""
    near = difflib.get_close_matches(str(name), names, 1)
    return f"; the nearest is {near[0]}" if near else ""


def _instead(name: object, names: Iterable[str]) -> str:
    return nearest(name, names := list(names)) or f"; there are {', '.join(names)}"


# ---- ranges, and what must hold between keys ----


# These may be zero, as may those that are by default; every other number is above zero.
_MAY_BE_ZERO = {"beta1", "final_learning_rate_fraction", "weight_decay", "process_id"}
_AT_MOST = {"beta1": 0.9999, "beta2": 0.9999, "valid_fraction": 0.5, "seed": 2**32 - 1}


def _allowed(section: str, key: str, value: object) -> str | None:
    """Return what is allowed if a number is out of range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    may_be_zero = key in _MAY_BE_ZERO or getattr(_SECTIONS[section], key) == 0
    if not 0 <= value < math.inf or (value == 0 and not may_be_zero):
        return "must be at least 0" if may_be_zero else "must be above 0"
    return f"must be at most {_AT_MOST[key]}" if value > _AT_MOST.get(key, math.inf) else None


def _broken(config: Config) -> Iterator[str]:
    """Yield a line for each condition between keys that does not hold; it names every key that it reads."""
    for relations in (_shapes, _experts, _batches, _stages, _budgets):
        yield from relations(config)


def _divides(config: Config, key: str, *others: str) -> Iterator[str]:
    value = lambda name: operator.attrgetter(name)(config)
    if bad := [f"{other} = {value(other)}" for other in others if value(other) % value(key)]:
        yield f"{key} = {value(key)}: must divide {' and '.join(bad)}"


def _shapes(config: Config) -> Iterator[str]:
    model, mesh = config.model, config.mesh
    yield from _divides(config, "model.kv_heads", "model.heads")
    if model.head_dim is None:
        yield from _divides(config, "model.heads", "model.d_model")
    if model.attention == "te" and config.data.document_mask:
        yield "data.document_mask = True: must be false where model.attention = 'te', whose kernels limit documents"
    if model.d_head % 2:
        yield f"model.d_model / model.heads or model.head_dim = {model.d_head}: must be even; RoPE rotates pairs"
    if scaling := model.rope_scaling:
        _, low, high, _ = scaling
        if min(scaling) <= 0 or low >= high:
            must = "must be above 0, the second below the third: factor, low and high frequency factor, original length"
            yield f"model.rope_scaling = {list(scaling)}: {must}"
    dense = ["model.d_ff"] if model.dense_layers or not model.experts else []
    yield from _divides(config, "mesh.tensor", "model.heads", "model.kv_heads", *dense, "model.vocab_size")
    parts = mesh.stage * mesh.tensor
    if mesh.stage > 1 and model.vocab_size % parts:
        yield f"mesh.stage * mesh.tensor = {parts}: must divide model.vocab_size = {model.vocab_size}"
    if model.d_model % (parts := mesh.fsdp * mesh.expert):
        yield f"mesh.fsdp * mesh.expert = {parts}: must divide model.d_model = {model.d_model}"


def _budgets(config: Config) -> Iterator[str]:
    remat = config.remat
    if remat.host_budget is not None and remat.budget is None:
        yield f"remat.host_budget = {remat.host_budget!r}: needs remat.budget, for which a policy is planned"


def _experts(config: Config) -> Iterator[str]:
    model = config.model
    if not model.experts:
        for each in dataclasses.fields(Experts):
            if (value := getattr(model, each.name)) != each.default:
                yield f"model.{each.name} = {value!r}: must not be given where model.experts = 0; the layers are dense"
        return
    yield from _divides(config, "mesh.expert", "model.experts")
    yield from _divides(config, "mesh.tensor", "model.d_expert")
    if model.experts_per_token > model.experts:
        yield f"model.experts_per_token = {model.experts_per_token}: must be at most model.experts = {model.experts}"
    if model.dense_layers >= model.layers:
        yield f"model.dense_layers = {model.dense_layers}: must be below model.layers = {model.layers}"


def _batches(config: Config) -> Iterator[str]:
    mesh, train = config.mesh, config.train
    if train.loss_chunk is not None:
        yield from _divides(config, "train.loss_chunk", "train.seq_len")
    parts = train.grad_accumulation * mesh.data * mesh.fsdp * mesh.expert
    if train.batch_size % parts:
        factors = "train.grad_accumulation * mesh.data * mesh.fsdp * mesh.expert"
        yield f"train.batch_size = {train.batch_size}: must be a multiple of {factors} = {parts}"
    if train.warmup_steps >= train.steps:
        yield f"train.warmup_steps = {train.warmup_steps}: must be below train.steps = {train.steps}"


def _stages(config: Config) -> Iterator[str]:
    mesh, train, model = config.mesh, config.train, config.model
    layers, chunks = model.layers - model.dense_layers, mesh.stage * train.virtual_stages
    if mesh.stage == 1 and chunks > 1:
        yield f"train.virtual_stages = {chunks}: must be 1 where mesh.stage = 1"
    elif layers % chunks:
        product = f"mesh.stage * train.virtual_stages = {chunks}"
        yield f"{product}: must divide model.layers - model.dense_layers = {layers}"
    if train.optimizer_on_host is True and train.virtual_stages > 1:
        yield "train.optimizer_on_host = True: must be false where train.virtual_stages > 1; it streams layer by layer"
    if not train.interleave and mesh.stage > 1:
        yield f"train.interleave = False: must be true where mesh.stage = {mesh.stage}; stages interleave"
