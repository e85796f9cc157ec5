"""The training program's config: frozen dataclasses with a comment per field, and how a YAML file becomes one."""

import inspect
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from jaxoffload import Policy, PolicyError, Problem
from models.plain import shown
from models.reading import ConfigError, Range, advice, known_entries, override, problem, read, typed_values
from models.text import short

# JAX, XLA and optax count in int32. So every count and dimension is below 2**31, and so is the product of two fields
# that form one dimension (heads * head_dim, shared_experts * d_expert). `layers` is smaller: reports visit each one.
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
    qk_norm: bool = False  # RMSNorm of each query and key head, before RoPE
    d_ff: Width = 512  # width of the MLP's gate, up and activation
    activation: Literal["swiglu", "geglu", "relu2"] = "swiglu"  # of the MLP and of experts; relu2 has no gate
    experts: Experts = 0  # per layer; 0: dense
    experts_per_token: Count = 2
    d_expert: Width = 512  # width of each expert's gate, up and activation
    shared_experts: Annotated[int, Range(0, 1024)] = 0  # experts that all tokens go through, d_expert each
    dense_layers: Natural = 0  # how many of the first layers have an MLP instead of experts
    router: Literal["softmax", "sigmoid"] = "softmax"  # how logits become scores
    renormalize: bool = True  # the chosen experts' scores are divided by their sum
    route_scale: Positive = 1.0  # then multiplied by this
    aux_loss: Weight = 0.0  # weight of the load-balancing loss
    z_loss: Weight = 0.0  # weight of the mean of logsumexp(router logits)^2
    balance_rate: Weight = 0.0  # step size of each expert's router bias, which balances without a loss
    grouped: Literal["auto", "te", "mosaic", "ragged"] = "auto"  # backend of jaxoffload.grouped_matmul
    quantize: Literal["fp8"] | None = None  # the experts' grouped GEMMs, with a scale per expert
    exchange: Literal["padded", "ragged"] = "padded"  # sent to the experts' devices: buffers, or only rows (GPUs)
    capacity: Positive | None = None  # most rows sent to one device, in even shares; others are dropped
    rope_theta: Positive = 10000.0  # base of RoPE's wavelengths
    norm_eps: Positive = 1e-5
    tied_embeddings: bool = True  # the unembedding is the embedding, transposed
    # xla runs everywhere and materialises the scores. cudnn and te (TransformerEngine) are flash attention on NVIDIA
    # GPUs: attn/context is then the output and the softmax statistics. If both are kept, the forward pass of attention
    # is not recomputed.
    attention: Literal["xla", "cudnn", "te"] = "xla"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the computation; parameters are float32

    @property
    def d_head(self) -> int:
        return self.head_dim or self.d_model // self.heads


@dataclass(frozen=True)
class Mesh:
    """The number of devices along each mesh axis; the product is the number of all devices."""

    data: Devices = 1  # batch rows; weights replicated
    fsdp: Devices = 1  # batch rows; weights and optimizer state sharded
    tensor: Devices = 1  # heads, d_ff and vocabulary
    expert: Devices = 1  # batch rows; experts; all other weights as on fsdp
    stage: Devices = 1  # layers, in pipeline stages; vocabulary (docs/stages.md)


@dataclass(frozen=True)
class Data:
    path: str | tuple[str, ...] = "stdlib"  # Python's standard library, or globs of .txt, .jsonl, .parquet files
    tokenizer: str | None = None  # a tokenizer.json; None: a byte-level BPE trained on the text, cached
    text_field: str = "text"  # the field of .jsonl and .parquet that holds the text
    valid_fraction: Annotated[float, Range(1e-4, 0.5)] = 0.05  # fraction of the documents held out
    cache_dir: str = "~/.cache/jaxoffload"  # tokenizers and token files


@dataclass(frozen=True)
class Train:
    steps: Count = 300
    batch_size: Count = 8  # sequences per step, over all devices and microbatches
    seq_len: Count = 256  # tokens per sequence
    grad_accumulation: Count = 1  # microbatches per step
    # Whether the backward pass of one microbatch and the forward pass of the next run together, layer by layer, so that
    # copies hide behind both (docs/accumulation.md). auto: where there are several and the policy offloads something.
    # The results are the same.
    interleave: Literal["auto"] | bool = "auto"
    virtual_stages: Count = 1  # chunks of layers that each pipeline stage has, dealt in turn (docs/stages.md)
    loss_chunk: Count = 256  # positions of each sequence whose logits are in memory at once
    learning_rate: Positive = 1e-3  # peak, after warm-up
    final_learning_rate_fraction: Fraction = 0.1  # where the cosine ends, as a fraction of the peak
    warmup_steps: Natural = 20  # linear, from zero
    beta1: Annotated[float, Range(0, 0.9999)] = 0.9
    beta2: Annotated[float, Range(0, 0.9999)] = 0.95
    weight_decay: Weight = 0.1  # of matrices; norms are not decayed
    clip_norm: Positive = 1.0  # greatest global norm of the gradient
    seed: Annotated[int, Range(0, 2**32 - 1)] = (
        0  # of the parameters and of the order of the data; a JAX key takes 32 bits
    )
    log_every: Count = 10  # steps
    eval_every: Count = 100  # steps
    eval_batches: Count = 8  # held-out batches per evaluation
    checkpoint_every: Count = 100  # steps; a killed run loses at most this many
    # error: a damaged checkpoint ends the run. previous: it is set aside, and the run continues from the one before.
    on_bad_checkpoint: Literal["error", "previous"] = "error"
    verify: bool = False  # before the first step, check what is claimed of its residuals; train only if all holds
    # [20, 23] profiles the three steps after step 20, in a run that takes all three; the numbers are Megatron's
    # --profile-step-start and --profile-step-end. NVIDIA GPUs only; profile.html and trace/ are written to `out`.
    profile_steps: tuple[Natural, Natural] | None = None
    out: str = ""  # folder of checkpoints, metrics.jsonl and loss.png; empty: runs/NAME of the config file


@dataclass(frozen=True)
class Distributed:
    """A run of several processes. Under Slurm and Open MPI the first three are known from the environment."""

    coordinator: str | None = None  # host:port of process 0
    num_processes: Count | None = None
    process_id: Natural | None = None
    # These apply under a launcher, too:
    timeout: Positive = 300.0  # seconds that a process waits for all others to start
    silence: Annotated[float, Range(5)] = 45.0  # seconds without a sign of life after which a process is given up


@dataclass(frozen=True)
class Remat(Policy):
    """A policy; with a budget, the one that is planned for it (docs/plan.md)."""

    # Bytes per device, or a string such as 70GiB; auto: what JAX may use of a GPU, less 5 %. null: nothing is planned.
    # With a budget the patterns of `residuals` stay; `default`, `offload_layers` and `other_layers` are chosen.
    budget: int | str | None = None
    host_budget: int | str = "auto"  # bytes of pinned host memory per device; auto: what the pool and the machine have
    machine: str | None = None  # what `python -m jaxoffload machine --json` printed; null: what was measured here

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        for name in ("budget", "host_budget"):
            value = getattr(self, name)
            if value not in ("auto", None) and not is_size(value):
                why = "is not a size; use auto, a number of bytes, or a string such as '70GiB'"
                problems.append(Problem(name, f"{name}: {short(value)} {why}"))
        if self.machine is not None and not (isinstance(self.machine, str) and _is_path(self.machine)):
            problems.append(Problem("machine", f"machine: {short(self.machine)} {_NOT_A_PATH}"))
        if problems:
            raise PolicyError(problems)

    @property
    def fixed(self) -> Policy:
        """The policy alone."""
        return Policy(**{name: getattr(self, name) for name in asdict(Policy())})


@dataclass(frozen=True)
class Config:
    model: Model = field(default_factory=Model)
    remat: Policy = field(default_factory=Remat)
    mesh: Mesh = field(default_factory=Mesh)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    distributed: Distributed = field(default_factory=Distributed)


SECTIONS: dict[str, type] = get_type_hints(Config) | {"remat": Remat}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in a YAML file, with `section.key=value` overrides whose values are YAML.

    `remat.residuals[PATTERN]=save` adds a pattern after those of the file, so that it wins.
    `remat.offload_modules=[moe_act]` replaces the list of the file.

    Raises:
      ConfigError: it lists all problems.
    """
    config, problems = parse(path, overrides)
    if problems:
        raise ConfigError(problems)
    return config


def parse(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[Problem]]:
    """Return the config, as `load` does, and its problems, to which a caller can add others.

    Where a value is wrong, the config holds the default.

    Raises:
      ConfigError: the file cannot be read.
    """
    if not _is_path(str(path)):
        raise ConfigError([Problem(str(path), f"{str(path)!r}: {_NOT_A_PATH}")])
    path = Path(os.path.expanduser(path))
    tree, problems = read(path)
    for text in overrides:
        problems += override(tree, text)
    config, wrong_values = _parse(tree)
    out = os.path.expanduser(config.train.out or f"runs/{path.stem}")
    return replace(config, train=replace(config.train, out=out)), problems + wrong_values


def flat(config: Config) -> dict[str, Any]:
    """Return {section.key: value}, in the types of JSON; a model.head_dim of None is replaced by the actual one."""
    tree = asdict(replace(config, model=replace(config.model, head_dim=config.model.d_head)))
    sections = json.loads(json.dumps(tree)).items()
    return {f"{section}.{key}": value for section, values in sections for key, value in values.items()}


def is_size(value: object) -> bool:
    """Return whether a policy takes this for a number of bytes."""
    try:
        Policy(min_offload_bytes=value)  # type: ignore[arg-type]
    except PolicyError:
        return False
    return True


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
            sections[name], in_section = _section(name, value or {})
            problems += in_section
    config = Config(**sections)
    wrong_keys = {problem.key for problem in problems}
    relations = itertools.chain.from_iterable(relations_in(config) for relations_in in _RELATIONS)
    broken = [r for r in relations if not r.holds and wrong_keys.isdisjoint(r.keys)]
    return config, problems + [Problem(relation.keys[0], relation.message) for relation in broken]


def _section(name: str, tree: dict[str, Any]) -> tuple[Any, list[Problem]]:
    """Return the dataclass of one section, and what is wrong with the section."""
    kind = SECTIONS[name]
    given, problems = known_entries(name, tree, list(inspect.signature(kind).parameters))
    if kind is Remat:
        try:
            return Remat(**given), problems
        except PolicyError as error:
            return Remat(), problems + [problem.under(name) for problem in error.problems]
    values, misfits = typed_values(name, given, get_type_hints(kind, include_extras=True))
    return kind(**values), problems + misfits


# ---- relations between fields ----


class Relation(NamedTuple):
    """A condition on one or several fields."""

    keys: tuple[str, ...]  # the fields that it reads; the problem is reported under the first
    holds: bool
    message: str  # what to say if it does not hold


def _shapes(config: Config) -> Iterator[Relation]:
    model, mesh = config.model, config.mesh
    yield _divides(config, "model.kv_heads", "model.heads")
    if model.head_dim is None:
        yield _divides(config, "model.heads", "model.d_model")
    yield Relation(
        ("model.head_dim", "model.d_model", "model.heads"),
        model.d_head % 2 == 0,
        f"model.head_dim = {model.d_head}: must be even, because RoPE rotates pairs",
    )
    dense = ["model.d_ff"] if model.dense_layers or not model.experts else []
    yield _divides(config, "mesh.tensor", "model.heads", "model.kv_heads", *dense, "model.vocab_size")
    parts = mesh.stage * mesh.tensor
    yield Relation(
        ("mesh.stage", "mesh.tensor", "model.vocab_size"),
        mesh.stage == 1 or model.vocab_size % parts == 0,
        f"mesh.stage * mesh.tensor = {parts}: must divide model.vocab_size = {model.vocab_size}",
    )
    shards = mesh.fsdp * mesh.expert
    yield Relation(
        ("mesh.fsdp", "mesh.expert", "model.d_model"),
        model.d_model % shards == 0,
        f"mesh.fsdp * mesh.expert = {shards}: must divide model.d_model = {model.d_model}",
    )


_EXPERT_FIELDS = (
    *("experts_per_token", "d_expert", "shared_experts", "dense_layers", "router", "renormalize", "route_scale"),
    *("aux_loss", "z_loss", "balance_rate", "grouped", "quantize", "exchange", "capacity"),
)


def _without_experts(config: Config) -> Iterator[Relation]:
    model, mesh = config.model, config.mesh
    if model.experts:
        return
    yield Relation(
        ("mesh.expert", "model.experts"),
        mesh.expert == 1,
        f"mesh.expert = {mesh.expert}: must be 1 where model.experts = 0; the layers are dense",
    )
    for name in _EXPERT_FIELDS:
        value = getattr(model, name)
        yield Relation(
            (f"model.{name}", "model.experts"),
            value == getattr(Model, name),
            f"model.{name} = {value!r}: must not be given where model.experts = 0; the layers are dense",
        )


def _with_experts(config: Config) -> Iterator[Relation]:
    model, mesh = config.model, config.mesh
    if not model.experts:
        return
    yield _divides(config, "mesh.expert", "model.experts")
    yield _divides(config, "mesh.tensor", "model.d_expert")
    yield Relation(
        ("model.experts_per_token", "model.experts"),
        model.experts_per_token <= model.experts,
        f"model.experts_per_token = {model.experts_per_token}: must be at most model.experts = {model.experts}",
    )
    yield Relation(
        ("model.dense_layers", "model.layers"),
        model.dense_layers < model.layers,
        f"model.dense_layers = {model.dense_layers}: must be below model.layers = {model.layers}",
    )
    yield Relation(
        ("model.capacity", "mesh.expert"),
        model.capacity is None or mesh.expert > 1,
        f"model.capacity = {model.capacity}: must be null where mesh.expert = 1; no rows are sent",
    )
    yield Relation(
        ("model.exchange", "mesh.expert"),
        model.exchange == Model.exchange or mesh.expert > 1,
        f"model.exchange = {model.exchange!r}: must be {Model.exchange} where mesh.expert = 1; no rows are sent",
    )


def _batches(config: Config) -> Iterator[Relation]:
    model, mesh, train = config.model, config.mesh, config.train
    yield _divides(config, "train.loss_chunk", "train.seq_len")
    parts = train.grad_accumulation * mesh.data * mesh.fsdp * mesh.expert
    yield Relation(
        ("train.batch_size", "train.grad_accumulation", "mesh.data", "mesh.fsdp", "mesh.expert"),
        train.batch_size % parts == 0,
        f"train.batch_size = {train.batch_size}: must be a multiple of "
        f"train.grad_accumulation * mesh.data * mesh.fsdp * mesh.expert = {parts}",
    )
    microbatch = ("train.batch_size", "train.grad_accumulation", "train.seq_len")
    tokens = train.batch_size // train.grad_accumulation * train.seq_len
    yield Relation(
        microbatch,
        tokens < 2**31,
        f"train.batch_size / train.grad_accumulation * train.seq_len = {tokens}: must be below 2**31 = {2**31}",
    )
    yield Relation(
        ("train.interleave", "train.grad_accumulation"),
        train.interleave is not True or train.grad_accumulation > 1,
        "train.interleave = True: must be auto or false where train.grad_accumulation = 1; there is no next microbatch",
    )
    if model.experts:
        rows, groups = tokens * model.experts_per_token, mesh.data * mesh.fsdp
        yield Relation(
            (*microbatch, "model.experts_per_token", "mesh.data", "mesh.fsdp"),
            rows // groups < 2**31,
            f"train.batch_size / train.grad_accumulation * train.seq_len * model.experts_per_token = {rows}: must be "
            f"below 2**31 = {2**31}, divided by mesh.data * mesh.fsdp = {groups}",
        )


def _stages(config: Config) -> Iterator[Relation]:
    """A chunk of the layers is what runs on a stage in one tick."""
    mesh, train, layers = config.mesh, config.train, config.model.layers - config.model.dense_layers
    chunks = mesh.stage * train.virtual_stages
    yield Relation(
        ("train.virtual_stages", "mesh.stage"),
        train.virtual_stages == 1 or mesh.stage > 1,
        f"train.virtual_stages = {train.virtual_stages}: must be 1 where mesh.stage = 1",
    )
    yield Relation(
        ("mesh.stage", "train.virtual_stages", "model.layers", "model.dense_layers"),
        layers % chunks == 0,
        f"mesh.stage * train.virtual_stages = {chunks}: must divide model.layers - model.dense_layers = {layers}",
    )
    yield Relation(
        ("train.interleave", "mesh.stage"),
        train.interleave is not False or mesh.stage == 1,
        f"train.interleave = False: must be auto where mesh.stage = {mesh.stage}; stages interleave",
    )
    remat = replace(config.remat, resident_layers=0)
    offloads = "offload" in (*(decision for _, decision in remat.rules), remat.default, remat.dots)
    each = remat.offloaded_layers(layers) // chunks if offloads and mesh.stage > 1 and layers % chunks == 0 else 0
    yield Relation(
        ("mesh.stage", "train.virtual_stages", "model.layers", "model.dense_layers", "remat.residuals"),
        each != 1,
        f"mesh.stage * train.virtual_stages = {chunks}: must be at most half of the layers that offload, out of "
        f"{layers}: a stage copies the residuals of one while it computes another",
    )


def _schedule(config: Config) -> Iterator[Relation]:
    train = config.train
    yield Relation(
        ("train.warmup_steps", "train.steps"),
        train.warmup_steps < train.steps,
        f"train.warmup_steps = {train.warmup_steps}: must be below train.steps = {train.steps}",
    )
    begin, end = train.profile_steps or (0, 1)
    yield Relation(
        ("train.profile_steps", "train.steps"),
        begin < end <= train.steps,
        f"train.profile_steps = [{begin}, {end}]: must be the steps after which a profile begins and ends, the first "
        f"below the second, and the second at most train.steps = {train.steps}",
    )


def _kernels(config: Config) -> Iterator[Relation]:
    model = config.model
    yield Relation(
        ("model.grouped", "model.quantize"),
        (model.grouped, model.quantize) != ("mosaic", "fp8"),
        "model.grouped = 'mosaic': has no FP8; must be auto, te or ragged where model.quantize = 'fp8'",
    )
    yield Relation(
        ("model.attention", "model.dtype"),
        model.attention == "xla" or model.dtype == "bfloat16",
        f"model.attention = {model.attention!r}: must be xla where model.dtype = 'float32'; cuDNN takes bfloat16",
    )
    yield Relation(
        ("model.head_dim", "model.attention", "model.d_model", "model.heads"),
        model.attention == "xla" or model.d_head % 8 == 0,
        f"model.head_dim = {model.d_head}: must be a multiple of 8 with model.attention = {model.attention!r}",
    )


_NOT_A_PATH = "must be a path, which has no NUL and no lone surrogates"


def _is_path(text: str) -> bool:
    return not re.search("[\0\ud800-\udfff]", text)


def _paths(config: Config) -> Iterator[Relation]:
    for key in ("data.path", "data.tokenizer", "data.cache_dir", "train.out"):
        value = _get(config, key)
        paths = [value] if isinstance(value, str) else value or ()
        yield Relation((key,), all(map(_is_path, paths)), f"{key} = {short(value)}: {_NOT_A_PATH}")
    for key in ("data.cache_dir", "train.out"):
        folder = _get(config, key)
        yield Relation(
            (key,),
            not os.path.expanduser(folder).startswith("~"),
            f"{key} = {short(folder)}: must be a folder; no such home",
        )
    yield Relation(
        ("data.cache_dir",),
        config.data.cache_dir != "",
        f"data.cache_dir = '': must be a folder; it is {Data.cache_dir} by default, and . is the working directory",
    )


def _processes(config: Config) -> Iterator[Relation]:
    distributed = config.distributed
    coordinator, count, index = distributed.coordinator, distributed.num_processes, distributed.process_id
    yield Relation(
        ("distributed.coordinator",),
        coordinator is None or re.fullmatch(r"\S+:\d+", coordinator) is not None,
        f"distributed.coordinator = {short(coordinator)}: must be host:port of process 0, such as node0:1234",
    )
    explicit = (coordinator, count, index)
    yield Relation(
        ("distributed.coordinator", "distributed.num_processes", "distributed.process_id"),
        explicit.count(None) in (0, 3),
        f"distributed = {short(explicit)}: must have coordinator, num_processes and process_id, or none of them",
    )
    yield Relation(
        ("distributed.process_id", "distributed.num_processes"),
        count is None or index is None or index < count,
        f"distributed.process_id = {index}: must be below distributed.num_processes = {count}",
    )


_RELATIONS = (_shapes, _without_experts, _with_experts, _batches, _stages, _schedule, _kernels, _paths, _processes)


def _divides(config: Config, key: str, *others: str) -> Relation:
    number = _get(config, key)
    broken = [f"{other} = {_get(config, other)}" for other in others if _get(config, other) % number]
    return Relation((key, *others), not broken, f"{key} = {number}: must divide {' and '.join(broken)}")


def _get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
