"""Small configs of models/, dense and with experts, their programs on meshes of the first devices, and some steps."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jaxoffload import Policy
from models.config import Config, Mesh, Model, Train
from models.sharding import make_mesh
from models.step import Program, program, shardings_of

TRAIN = Train(steps=4, warmup_steps=1, batch_size=16, seq_len=12, loss_chunk=4, learning_rate=1e-2)
TOKENS = np.random.default_rng(7).integers(0, 300, (16, 13), np.int32)
DENSE = Config(
    model=Model(vocab_size=320, layers=3, d_model=32, heads=4, kv_heads=2, d_ff=48, dtype="float32"),
    remat=Policy({"fc1": "offload", "attn/*": "save"}, min_offload_bytes=0),
    train=TRAIN,
)
EXPERTS = Config(
    model=Model(
        vocab_size=300,
        layers=3,
        d_model=16,
        heads=2,
        kv_heads=2,
        d_ff=24,
        dtype="float32",
        experts=8,
        experts_per_token=2,
        d_expert=12,
        grouped="ragged",
        dense_layers=1,
        shared_experts=1,
        aux_loss=0.01,
        z_loss=0.001,
    ),
    remat=Policy({"moe/fc1": "offload", "moe/act": "save"}, min_offload_bytes=0),
    train=TRAIN,
)


def on(config: Config, sizes: Mesh, remat: Policy | None = None, train: Any = (), **model: Any) -> Program:
    """Return the program of a config on the first devices, with another policy and other fields of train and model."""
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        remat=remat or config.remat,
        mesh=sizes,
        train=dataclasses.replace(config.train, **dict(train)),
    )
    return program(config, make_mesh(sizes, jax.devices()[: math.prod(dataclasses.astuple(sizes))]))


def start(made: Program) -> Any:
    return jax.jit(made.init, out_shardings=shardings_of(made.state))()
