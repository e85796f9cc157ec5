"""What must hold between the fields of a config, such as that the number of KV heads divides the number of heads."""

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from jaxoffload import Problem
from models.config import NOT_A_PATH, Config, Model, is_path
from models.text import short


class Relation(NamedTuple):
    """A condition on one or several fields."""

    keys: tuple[str, ...]  # the fields that it reads; the problem is reported under the first
    holds: bool
    message: str  # what to say if it does not hold


def broken_relations(config: Config, given: set[str], wrong_keys: set[str]) -> list[Problem]:
    """Return a problem for each relation that is broken, unless it reads one of `wrong_keys`: they hold defaults.

    The message of a key that is not `given` says that the value is the default.
    """
    relations = itertools.chain.from_iterable(relations_in(config) for relations_in in _RELATIONS)
    broken = [r for r in relations if not r.holds and wrong_keys.isdisjoint(r.keys)]
    return [Problem(relation.keys[0], _said(relation, given)) for relation in broken]


def _said(relation: Relation, given: set[str]) -> str:
    value, _, must = relation.message.partition(": ")
    unwritten = relation.keys[0] not in given and value.startswith(f"{relation.keys[0]} = ")
    return f"{value}, the default: {must}" if unwritten else relation.message


def _shapes(config: Config) -> Iterator[Relation]:
    model, mesh = config.model, config.mesh
    yield _divides(config, "model.kv_heads", "model.heads")
    if model.head_dim is None:
        yield _divides(config, "model.heads", "model.d_model")
    yield Relation(
        ("model.head_dim", "model.d_model", "model.heads"),
        model.d_head % 2 == 0,
        f"{_head_dim(model)}: must be even, because RoPE rotates pairs",
    )
    scaling = model.rope_scaling or (1.0, 0.0, 1.0, 1)
    yield Relation(
        ("model.rope_scaling",),
        scaling[1] < scaling[2],
        f"model.rope_scaling = {model.rope_scaling}: the second, low_freq_factor, must be below the third",
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
    if train.loss_chunk is not None:
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
        train.warmup < train.steps,
        f"train.warmup_steps = {train.warmup}: must be below train.steps = {train.steps}",
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
        ("data.document_mask", "model.attention"),
        not config.data.document_mask or model.attention != "te",
        "data.document_mask = True: must be false where model.attention = 'te', whose kernels need a limit on the "
        "documents in a sequence; xla and cudnn have it",
    )
    yield Relation(
        ("train.seq_len", "data.document_mask", "model.attention"),
        not config.data.document_mask or model.attention != "cudnn" or config.train.seq_len % 2 == 0,
        f"train.seq_len = {config.train.seq_len}: must be even where data.document_mask = True and model.attention = "
        "'cudnn'",
    )
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
        f"{_head_dim(model)}: must be a multiple of 8 with model.attention = {model.attention!r}",
    )


def _paths(config: Config) -> Iterator[Relation]:
    for key in ("data.path", "data.tokenizer", "train.out"):
        value = _get(config, key)
        paths = [value] if isinstance(value, str) else value or ()
        yield Relation((key,), all(map(is_path, paths)), f"{key} = {short(value)}: {NOT_A_PATH}")
    for key in ("train.out",):
        folder = _get(config, key)
        yield Relation(
            (key,),
            not os.path.expanduser(folder).startswith("~"),
            f"{key} = {short(folder)}: must be a folder; no such home",
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


def _head_dim(model: Model) -> str:
    return f"{'model.d_model / model.heads' if model.head_dim is None else 'model.head_dim'} = {model.d_head}"


def _get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
