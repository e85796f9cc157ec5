"""The training program's config: frozen dataclasses, a comment per field, and how a file becomes one."""

import functools
import inspect
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from jaxoffload import Policy, PolicyError, Problem
from models.plain import shown
from models.reading import ConfigError, Range, advice, known, override, problem, read, short, typed

# JAX, XLA and optax count in int32. So every count and dimension is below 2**31, and so is the product of two fields
# that make one dimension together (heads * head_dim, shared_experts * d_expert). The layers are walked one by one.
_INT32 = 2**31 - 1
Count = Annotated[int, Range(1, _INT32)]
Natural = Annotated[int, Range(0, _INT32)]
Width = Annotated[int, Range(1, 2**20)]
Heads = Annotated[int, Range(1, 2**15)]
Experts = Annotated[int, Range(0, 2**15)]
Devices = Annotated[int, Range(1, 2**20)]
Positive = Annotated[float, Range(0, above=True)]
Weight = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class Model:
    """A Llama-style decoder; with experts, a mixture of them in place of the MLP."""

    vocab_size: Annotated[int, Range(257, 2**24)] = 2048  # at least the 256 bytes and the end of a document
    layers: Annotated[int, Range(1, 10_000)] = 4
    d_model: Width = 192  # width of the residual stream
    heads: Heads = 6  # query heads
    kv_heads: Heads = 2  # key and value heads, each shared by heads / kv_heads query heads
    head_dim: Annotated[int, Range(2, 2**15)] | None = None  # None: d_model / heads
    qk_norm: bool = False  # RMSNorm of each head's query and key, before RoPE
    d_ff: Width = 512  # width of the MLP's gate, up and activation
    activation: Literal["swiglu", "geglu", "relu2"] = "swiglu"  # of the MLP and of experts; relu2 has no gate
    experts: Experts = 0  # of a layer; 0: dense
    experts_per_token: Count = 2
    d_expert: Width = 512  # width of each expert's gate, up and activation
    shared_experts: Annotated[int, Range(0, 1024)] = 0  # experts that all tokens go through, d_expert each
    dense_layers: Natural = 0  # the first layers have the MLP in place of experts
    router: Literal["softmax", "sigmoid"] = "softmax"  # how logits become scores
    renormalize: bool = True  # the chosen experts' scores are divided by their sum
    route_scale: Positive = 1.0  # then multiplied by this
    aux_loss: Weight = 0.0  # weight of the load-balancing loss
    z_loss: Weight = 0.0  # weight of the mean of logsumexp(router logits)^2
    balance_rate: Weight = 0.0  # a step of each expert's bias, which balances without a loss
    grouped: Literal["auto", "te", "mosaic", "ragged"] = "auto"  # backend of jaxoffload.grouped_matmul
    quantize: Literal["fp8"] | None = None  # the experts' grouped GEMMs, with a scale per expert
    exchange: Literal["padded", "ragged"] = "padded"  # what goes to experts' devices: buffers, or on GPUs rows alone
    capacity: Positive | None = None  # rows to an expert's device, in even shares; more are dropped. None: no limit
    rope_theta: Positive = 10000.0  # base of RoPE's wavelengths
    norm_eps: Positive = 1e-5
    tied_embeddings: bool = True  # the unembedding is the embedding, transposed
    # xla runs everywhere and materialises the scores. cudnn is flash attention on NVIDIA GPUs, te TransformerEngine's;
    # attn/context is then its output and its softmax statistics: with both kept, its forward pass does not run again.
    attention: Literal["xla", "cudnn", "te"] = "xla"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the compute; parameters are float32

    @property
    def d_head(self) -> int:
        return self.head_dim or self.d_model // self.heads


@dataclass(frozen=True)
class Mesh:
    """Devices along each mesh axis; the product is the number of devices."""

    data: Devices = 1  # batch rows; weights replicated
    fsdp: Devices = 1  # batch rows; weights and optimizer state sharded
    tensor: Devices = 1  # heads, d_ff and vocabulary
    expert: Devices = 1  # batch rows; experts, and as fsdp all that is not an expert's


@dataclass(frozen=True)
class Data:
    path: str | tuple[str, ...] = "stdlib"  # Python's own library, or globs of .txt, .jsonl, .parquet files
    tokenizer: str | None = None  # a tokenizer.json; None: a byte-level BPE trained on the text, cached
    text_field: str = "text"  # the field of .jsonl and .parquet that holds the text
    valid_fraction: Annotated[float, Range(1e-4, 0.5)] = 0.05  # of the documents, held out
    cache_dir: str = "~/.cache/jaxoffload"  # tokenizers and token files


@dataclass(frozen=True)
class Train:
    steps: Count = 300
    batch_size: Count = 8  # sequences a step, over all devices and microbatches
    seq_len: Count = 256  # tokens of a sequence
    grad_accumulation: Count = 1  # microbatches a step, one after another
    loss_chunk: Count = 256  # positions of each sequence whose logits are in memory at once
    learning_rate: Positive = 1e-3  # the peak, after warm-up
    final_learning_rate_fraction: Fraction = 0.1  # end of the cosine, as a fraction of the peak
    warmup_steps: Natural = 20  # linear, from zero
    beta1: Annotated[float, Range(0, 0.9999)] = 0.9
    beta2: Annotated[float, Range(0, 0.9999)] = 0.95
    weight_decay: Weight = 0.1  # of matrices; norms have none
    clip_norm: Positive = 1.0  # the gradient's global norm
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0  # of the parameters and the data's order; a key has 32 bits of it
    log_every: Count = 10  # steps
    eval_every: Count = 100  # steps
    eval_batches: Count = 8  # held-out batches an evaluation
    checkpoint_every: Count = 100  # steps; a kill loses at most these
    # A checkpoint that is damaged ends the run, or is set aside, and the run goes on from the one before.
    on_bad_checkpoint: Literal["error", "previous"] = "error"
    verify: bool = False  # before the first step: what is claimed of its residuals is checked, or nothing is trained
    # [20, 23]: the three steps after step 20 are profiled, in that run only that takes them all. The numbers are those
    # of Megatron's --profile-step-start and --profile-step-end. On NVIDIA GPUs; profile.html and trace/ are in `out`.
    profile_steps: tuple[Natural, Natural] | None = None
    out: str = ""  # folder of checkpoints, metrics.jsonl and loss.png; empty: runs/NAME of the config file


@dataclass(frozen=True)
class Distributed:
    """Several processes. Slurm and Open MPI tell the first three themselves."""

    coordinator: str | None = None  # host:port of process 0
    num_processes: Count | None = None
    process_id: Natural | None = None
    # With a launcher, too:
    timeout: Positive = 300.0  # seconds that a process waits for all others to come
    silence: Annotated[float, Range(5)] = 45.0  # seconds without a sign of life of a process that is then given up


@dataclass(frozen=True)
class Config:
    model: Model = field(default_factory=Model)
    remat: Policy = field(default_factory=Policy)
    mesh: Mesh = field(default_factory=Mesh)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    distributed: Distributed = field(default_factory=Distributed)


SECTIONS: dict[str, type] = get_type_hints(Config)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a YAML file, with `section.key=value` overrides whose values are YAML.

    `remat.residuals[PATTERN]=save` appends a pattern behind those of the file, so that it wins.
    `remat.offload_modules=[moe_act]` takes the place of the file's list.

    Raises:
      ConfigError: with all problems at once.
    """
    config, problems = parse(path, overrides)
    if problems:
        raise ConfigError(problems)
    return config


def parse(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[Problem]]:
    """As `load`, but returns the problems, so that a caller can add its own.

    Where a value is wrong the config holds the default.

    Raises:
      ConfigError: the file cannot be read.
    """
    if not _is_path(str(path)):
        raise ConfigError([Problem(str(path), f"{str(path)!r}: {_NO_PATH}")])
    path = Path(os.path.expanduser(path))
    tree, problems = read(path)
    for text in overrides:
        problems += override(tree, text)
    config, wrong = _parse(tree)
    out = os.path.expanduser(config.train.out or f"runs/{path.stem}")
    return replace(config, train=replace(config.train, out=out)), problems + wrong


def flat(config: Config) -> dict[str, Any]:
    """{section.key: value} in JSON's types; model.head_dim is what it comes to."""
    tree = asdict(replace(config, model=replace(config.model, head_dim=config.model.d_head)))
    sections = json.loads(json.dumps(tree)).items()
    return {f"{section}.{key}": value for section, values in sections for key, value in values.items()}


def _parse(tree: dict[str, Any]) -> tuple[Config, list[Problem]]:
    sections: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in tree.items():
        if name not in SECTIONS:
            why = f"no such section{advice(str(name), list(SECTIONS))}"
            problems.append(problem(shown(str(name)), short(value), why))
        elif not isinstance(value, dict | None):
            problems.append(problem(name, short(value), "must be a mapping of keys to values"))
        else:
            sections[name], wrong = _section(name, value or {})
            problems += wrong
    config = Config(**sections)
    wrong_keys = {problem.key for problem in problems}
    broken = [
        Problem(keys[0], line) for keys, holds, line in _relations(config) if not holds and wrong_keys.isdisjoint(keys)
    ]
    return config, problems + broken


def _section(name: str, tree: dict[str, Any]) -> tuple[Any, list[Problem]]:
    """One section's dataclass, and what is wrong with it."""
    kind = SECTIONS[name]
    given, problems = known(name, tree, list(inspect.signature(kind).parameters))
    if kind is Policy:
        try:
            return Policy(**given), problems
        except PolicyError as error:
            return Policy(), problems + [problem.under(name) for problem in error.problems]
    values, wrong = typed(name, given, get_type_hints(kind, include_extras=True))
    return kind(**values), problems + wrong


# ---- what one field says about another ----


_OF_EXPERTS = (
    *("experts_per_token", "d_expert", "shared_experts", "dense_layers", "router", "renormalize", "route_scale"),
    *("aux_loss", "z_loss", "balance_rate", "grouped", "quantize", "exchange", "capacity"),
)

# The keys that it reads, the one to blame first; whether it holds; what to say if not.
Relation = tuple[tuple[str, ...], bool, str]


def _relations(config: Config) -> Iterator[Relation]:
    model, mesh, train, distributed = config.model, config.mesh, config.train, config.distributed

    divides = functools.partial(_divides, config)
    yield divides("model.kv_heads", "model.heads")
    if model.head_dim is None:
        yield divides("model.heads", "model.d_model")
    dense = ["model.d_ff"] if model.dense_layers or not model.experts else []
    yield divides("mesh.tensor", "model.heads", "model.kv_heads", *dense, "model.vocab_size")
    yield (
        ("mesh.fsdp", "mesh.expert", "model.d_model"),
        model.d_model % (mesh.fsdp * mesh.expert) == 0,
        f"mesh.fsdp * mesh.expert = {mesh.fsdp * mesh.expert}: must divide model.d_model = {model.d_model}",
    )
    yield from _relations_of_experts(config)
    yield divides("train.loss_chunk", "train.seq_len")
    rows = train.grad_accumulation * mesh.data * mesh.fsdp * mesh.expert
    yield (
        ("train.batch_size", "train.grad_accumulation", "mesh.data", "mesh.fsdp", "mesh.expert"),
        train.batch_size % rows == 0,
        f"train.batch_size = {train.batch_size}: must be a multiple of "
        f"train.grad_accumulation * mesh.data * mesh.fsdp * mesh.expert = {rows}",
    )
    tokens = train.batch_size // train.grad_accumulation * train.seq_len
    yield (
        ("train.batch_size", "train.grad_accumulation", "train.seq_len"),
        tokens < 2**31,
        f"train.batch_size / train.grad_accumulation * train.seq_len = {tokens}: must be below 2**31 = {2**31}",
    )
    yield (
        ("train.warmup_steps", "train.steps"),
        train.warmup_steps < train.steps,
        f"train.warmup_steps = {train.warmup_steps}: must be below train.steps = {train.steps}",
    )
    begin, end = train.profile_steps or (0, 1)
    yield (
        ("train.profile_steps", "train.steps"),
        begin < end <= train.steps,
        f"train.profile_steps = [{begin}, {end}]: must be the steps after which a profile begins and ends, the first "
        f"below the second, and this at most train.steps = {train.steps}",
    )
    yield (
        ("model.head_dim", "model.d_model", "model.heads"),
        model.d_head % 2 == 0,
        f"model.head_dim = {model.d_head}: must be even, because RoPE turns pairs",
    )
    yield (
        ("model.grouped", "model.quantize"),
        (model.grouped, model.quantize) != ("mosaic", "fp8"),
        "model.grouped = 'mosaic': has no FP8; must be auto, te or ragged where model.quantize = 'fp8'",
    )
    yield (
        ("model.attention", "model.dtype"),
        model.attention == "xla" or model.dtype == "bfloat16",
        f"model.attention = {model.attention!r}: must be xla where model.dtype = 'float32'; cuDNN takes bfloat16",
    )
    yield (
        ("model.head_dim", "model.attention", "model.d_model", "model.heads"),
        model.attention == "xla" or model.d_head % 8 == 0,
        f"model.head_dim = {model.d_head}: must be a multiple of 8 with model.attention = {model.attention!r}",
    )
    for key in ("data.path", "data.tokenizer", "data.cache_dir", "train.out"):
        value = _get(config, key)
        paths = [value] if isinstance(value, str) else value or ()
        yield (key,), all(map(_is_path, paths)), f"{key} = {short(value)}: {_NO_PATH}"
    for key in ("data.cache_dir", "train.out"):
        folder = _get(config, key)
        yield (
            (key,),
            not os.path.expanduser(folder).startswith("~"),
            f"{key} = {short(folder)}: must be a folder; no such home",
        )
    yield (
        ("data.cache_dir",),
        config.data.cache_dir != "",
        f"data.cache_dir = '': must be a folder; it is {Data.cache_dir} by default, and . is the working directory",
    )
    yield from _relations_of_processes(distributed)


_NO_PATH = "must be a path, which has no NUL and no lone surrogates"


def _is_path(text: str) -> bool:
    return not re.search("[\0\ud800-\udfff]", text)


def _relations_of_processes(distributed: Distributed) -> Iterator[Relation]:
    coordinator = distributed.coordinator
    yield (
        ("distributed.coordinator",),
        coordinator is None or re.fullmatch(r"\S+:\d+", coordinator) is not None,
        f"distributed.coordinator = {short(coordinator)}: must be host:port of process 0, such as node0:1234",
    )
    explicit = (coordinator, distributed.num_processes, distributed.process_id)
    yield (
        ("distributed.coordinator", "distributed.num_processes", "distributed.process_id"),
        explicit.count(None) in (0, 3),
        f"distributed = {short(explicit)}: must have coordinator, num_processes and process_id, or none of them",
    )
    count, index = distributed.num_processes, distributed.process_id
    yield (
        ("distributed.process_id", "distributed.num_processes"),
        count is None or index is None or index < count,
        f"distributed.process_id = {index}: must be below distributed.num_processes = {count}",
    )


def _relations_of_experts(config: Config) -> Iterator[Relation]:
    model, mesh = config.model, config.mesh
    if not model.experts:
        yield (
            ("mesh.expert", "model.experts"),
            mesh.expert == 1,
            f"mesh.expert = {mesh.expert}: must be 1 where model.experts = 0; the layers are dense",
        )
        for name in _OF_EXPERTS:
            value = getattr(model, name)
            yield (
                (f"model.{name}", "model.experts"),
                value == getattr(Model, name),
                f"model.{name} = {value!r}: must not be given where model.experts = 0; the layers are dense",
            )
    else:
        yield _divides(config, "mesh.expert", "model.experts")
        yield _divides(config, "mesh.tensor", "model.d_expert")
        yield (
            ("model.capacity", "mesh.expert"),
            model.capacity is None or mesh.expert > 1,
            f"model.capacity = {model.capacity}: must be null where mesh.expert = 1; no rows are sent",
        )
        yield (
            ("model.exchange", "mesh.expert"),
            model.exchange == Model.exchange or mesh.expert > 1,
            f"model.exchange = {model.exchange!r}: must be {Model.exchange} where mesh.expert = 1; no rows are sent",
        )
        yield (
            ("model.experts_per_token", "model.experts"),
            model.experts_per_token <= model.experts,
            f"model.experts_per_token = {model.experts_per_token}: must be at most model.experts = {model.experts}",
        )
        train = config.train
        rows = train.batch_size // train.grad_accumulation * train.seq_len * model.experts_per_token
        yield (
            (
                "train.batch_size",
                "train.grad_accumulation",
                "train.seq_len",
                "model.experts_per_token",
                "mesh.data",
                "mesh.fsdp",
            ),
            rows // (mesh.data * mesh.fsdp) < 2**31,
            f"train.batch_size / train.grad_accumulation * train.seq_len * model.experts_per_token = {rows}: must be "
            f"below 2**31 = {2**31}, divided by mesh.data * mesh.fsdp = {mesh.data * mesh.fsdp}",
        )
        yield (
            ("model.dense_layers", "model.layers"),
            model.dense_layers < model.layers,
            f"model.dense_layers = {model.dense_layers}: must be below model.layers = {model.layers}",
        )


def _divides(config: Config, key: str, *others: str) -> Relation:
    number = _get(config, key)
    broken = [f"{other} = {_get(config, other)}" for other in others if _get(config, other) % number]
    return (key, *others), not broken, f"{key} = {number}: must divide {' and '.join(broken)}"


def _get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
