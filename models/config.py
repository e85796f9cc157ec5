"""The training program's config: frozen dataclasses with a comment per field."""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from jaxoffload import Policy, PolicyError, Problem
from models.reading import Range
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


class ConfigError(ValueError):
    """A config that cannot run; the message names the key, its value and what is allowed."""


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
    grouped: Literal["auto", "te", "mosaic", "ragged"] = "auto"  # backend of jaxoffload.grouped.grouped_matmul
    quantize: Literal["fp8"] | None = None  # the experts' grouped GEMMs, with a scale per expert
    exchange: Literal["padded", "ragged"] = "padded"  # sent to the experts' devices: buffers, or only rows (GPUs)
    capacity: Positive | None = None  # most rows sent to one device, in even shares; others are dropped
    rope_theta: Positive = 10000.0  # base of RoPE's wavelengths
    # Llama 3.1's [factor, low_freq_factor, high_freq_factor, original length]: frequencies that turn less often than
    # low_freq_factor in the original length are divided by factor; those that turn more than high_freq_factor stay.
    rope_scaling: tuple[Positive, Positive, Positive, Count] | None = None
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
    tokenizer: str | None = None  # a tokenizer.json; None: tokens are bytes, and 256 the end of a document
    text_field: str = "text"  # the field of .jsonl and .parquet that holds the text
    valid_fraction: Annotated[float, Range(1e-4, 0.5)] = 0.05  # fraction of the documents held out
    document_mask: bool = False  # attention stays in a document, which begins with the end of the one before


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
    # Positions of each sequence whose logits are in memory at once. None: the largest divisor of seq_len up to 256.
    loss_chunk: Count | None = None
    learning_rate: Positive = 1e-3  # peak, after warm-up
    final_learning_rate_fraction: Fraction = 0.1  # where the cosine ends, as a fraction of the peak
    warmup_steps: Natural | None = None  # linear, from zero. None: 20, or all but the last of fewer steps
    beta1: Annotated[float, Range(0, 0.9999)] = 0.9
    beta2: Annotated[float, Range(0, 0.9999)] = 0.95
    weight_decay: Weight = 0.1  # of matrices; norms are not decayed
    clip_norm: Positive = 1.0  # greatest global norm of the gradient
    seed: Annotated[int, Range(0, 2**32 - 1)] = (
        0  # of the parameters and of the order of the data; a JAX key takes 32 bits
    )
    log_every: Count = 10  # steps
    eval_every: Count = 100  # steps
    eval_batches: Count = 8  # held-out batches per evaluation, if there are so many
    checkpoint_every: Count = 100  # steps; a killed run loses at most this many
    # error: a damaged checkpoint ends the run. previous: it is set aside, and the run continues from the one before.
    on_bad_checkpoint: Literal["error", "previous"] = "error"
    tensorboard: bool = False  # also write TensorBoard's event files, to the folder tensorboard in `out`
    verify: bool = False  # before the first step, check what is claimed of its residuals; train only if all holds
    # [20, 23] profiles the three steps after step 20, in a run that takes all three; the numbers are Megatron's
    # --profile-step-start and --profile-step-end. NVIDIA GPUs only; profile.html and trace/ are written to `out`.
    profile_steps: tuple[Natural, Natural] | None = None
    out: str = ""  # folder of checkpoints, metrics.jsonl and loss.png; empty: runs/NAME of the config file

    @property
    def chunk(self) -> int:
        return self.loss_chunk or max(n for n in range(1, min(self.seq_len, 256) + 1) if self.seq_len % n == 0)

    @property
    def warmup(self) -> int:
        return min(20, self.steps - 1) if self.warmup_steps is None else self.warmup_steps


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
    machine: str | None = None  # what `python -m jaxoffload machine --out` wrote; null: what was measured here

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        for name in ("budget", "host_budget"):
            value = getattr(self, name)
            if value not in ("auto", None) and not is_size(value):
                why = "is not a size; use auto, a number of bytes, or a string such as '70GiB'"
                problems.append(Problem(name, f"{name}: {short(value)} {why}"))
        if self.machine is not None and not (isinstance(self.machine, str) and is_path(self.machine)):
            problems.append(Problem("machine", f"machine: {short(self.machine)} {NOT_A_PATH}"))
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


NOT_A_PATH = "must be a path, which has no NUL and no lone surrogates"


def is_path(text: str) -> bool:
    return not re.search("[\0\ud800-\udfff]", text)
