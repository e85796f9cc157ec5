r"""Mixture-of-experts layers: saving, recomputing and offloading the same residuals, with plain JAX and with ours.

    python -m benchmarks.moe [--out benchmarks/results/moe.json]              # Mixtral's shapes: 8 experts, 2 per token
    python -m benchmarks.moe --experts 64 --experts_per_token 8 --d_model 2048 --d_expert 768 --layers 12 \
        --out benchmarks/results/moe-small-experts.json                       # Qwen3's, with 64 of its 128 experts
    python -m benchmarks.moe --expert 2 --batch 4 --layers 4 --capacity 1.25 --modes remat saved ours ours_saved \
        --rounds 6 --out benchmarks/results/moe-expert-parallel.json          # Mixtral's, on two GPUs
"""

import argparse
from typing import Any

import jax

from benchmarks.cases import Case, attention_costs, best, layers_of
from benchmarks.peers import main
from jaxoffload.grouped import chosen_backend
from models.config import Mesh, Model
from models.moe import Exchange, Routing
from models.sharding import abstract_mesh

GATE, UP, INPUT, CONTEXT, KV = "moe/fc1.gate ", "moe/fc1.up ", "moe/fc1_input ", "attn/context ", "attn/k attn/v "


def model(options: argparse.Namespace) -> Model:
    return Model(
        layers=options.layers,
        d_model=options.d_model,
        heads=options.heads or options.d_model // options.head_dim,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        qk_norm=options.qk_norm,
        experts=options.experts,
        experts_per_token=options.experts_per_token,
        d_expert=options.d_expert,
        grouped=options.grouped,
        capacity=options.capacity,
        exchange=options.exchange,
        rope_theta=1e6,
        attention=options.attention,
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(layers=4)
    parser.add_argument("--heads", type=int, help="of queries; default: d_model / head_dim")
    parser.add_argument("--qk_norm", action="store_true", help="a norm of each head's query and key")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--experts_per_token", type=int, default=2)
    parser.add_argument("--d_expert", type=int, default=14336)
    parser.add_argument("--capacity", type=float, help="rows per expert device, as a multiple of an even share")
    parser.add_argument("--exchange", default="padded", choices=("padded", "ragged"))
    parser.add_argument("--grouped", default="mosaic", choices=("auto", "te", "mosaic", "ragged"))


def costs(options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    shape, tokens = model(options), options.batch * options.seq
    rows = tokens * shape.experts_per_token
    half = (2 * rows * shape.d_model * shape.d_expert, 2 * rows * shape.d_expert)
    gathered = (0, 2 * rows * shape.d_model)  # no FLOPs
    experts = {"moe/fc1_input": gathered, "moe/fc1.gate": half, "moe/fc1.up": half}
    return attention_costs(shape, tokens) | experts


def shape(options: argparse.Namespace) -> dict[str, Any]:
    keys = ("experts", "experts_per_token", "d_expert", "grouped", "capacity", "exchange")
    recorded = {key: getattr(options, key) for key in ("heads", "head_dim", "qk_norm", *keys)}
    if options.grouped == "auto":
        recorded["grouped"] = f"auto: {_auto_backend(options)}"
    return layers_of(options) | recorded


def _auto_backend(options: argparse.Namespace) -> str:
    rows, D, F = options.batch * options.seq * options.experts_per_token, options.d_model, options.d_expert
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((rows, D), (options.experts, D, F)))
    if options.fsdp * options.expert == 1:
        return chosen_backend(x, w)
    mesh = abstract_mesh(Mesh(fsdp=options.fsdp, expert=options.expert))
    manual = mesh.update(axis_types=(jax.sharding.AxisType.Manual,) * len(mesh.axis_names))  # as in a layer's shard_map
    with jax.sharding.use_abstract_mesh(manual):
        return chosen_backend(x, w)


CASE = Case(
    program="moe",
    description=__doc__,
    names=("layer_input", "moe/fc1.gate"),
    all_names=(
        *("layer_input", "attn/norm", "attn/q", "attn/k", "attn/v", "attn/context", "attn/out"),
        *("mlp_input", "moe/norm", "moe/router_logits", "moe/fc1_input", "moe/fc1.gate", "moe/fc1.up", "moe/act"),
    ),
    always=tuple(f"moe/routing.{field}" for field in (*Routing._fields, *Exchange._fields)),
    best={
        "gate moved": best(GATE),
        "gate and context moved": best(GATE + CONTEXT),
        "gate and context moved, k and v kept": best(GATE + CONTEXT, KV),
        "gate, context, q and mlp_input moved, k and v kept": best(GATE + CONTEXT + "attn/q mlp_input", KV),
        "fc1 and context moved": best(GATE + UP + CONTEXT),
        "fc1, fc1_input and context moved": best(GATE + UP + INPUT + CONTEXT),
        "fc1, context, q and mlp_input moved, k and v kept": best(GATE + UP + CONTEXT + "attn/q mlp_input", KV),
    },
    model=model,
    costs=costs,
    shape=shape,
    arguments=arguments,
)

if __name__ == "__main__":
    main(CASE)
