"""Runs MaxText's decoders, and its training program, as they are and as docs/recipes/maxtext.md changes them."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # before MaxText is imported: without Google Cloud's packages

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils
from run_recipe import (
    DIFF,
    Program,
    assert_same_bits,
    assert_verified,
    made_by,
    named_rows,
    print_versions,
    sides,
    trained,
)

SIZES = {
    "run_name": "recipe",
    "enable_checkpointing": False,
    "dataset_type": "synthetic",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "attention": "dot_product",
    "dtype": "float32",
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 32,
    "base_num_decoder_layers": 4,
    "vocab_size": 64,
    "max_target_length": 16,
    "per_device_batch_size": 2,
    "steps": 3,
    "enable_goodput_recording": False,
    "log_config": False,
}
POLICY = {"remat_policy": "custom", "decoder_layer_input": "offload", "query_proj": "device"}
DENSE = POLICY | {"mlpwi_0": "offload"}
EXPERTS = POLICY | {
    "moe_mlpwi_0": "offload",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 32,
    "megablox": False,  # its kernel is for TPUs
}
MLA = {
    "attention_type": "mla",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
DECODERS = {
    "Llama": DENSE | {"decoder_block": "llama2"},
    "Mixtral": EXPERTS | {"decoder_block": "mixtral", "sparse_matmul": True},
    "Mixtral, dense matmuls": EXPERTS | {"decoder_block": "mixtral", "sparse_matmul": False},
    "DeepSeek": EXPERTS | MLA | {"decoder_block": "deepseek", "first_num_dense_layers": 2, "shared_experts": 1},
    "gpt-oss": EXPERTS
    | {"decoder_block": "gpt_oss", "sliding_window_size": 8, "inhomogeneous_layer_cycle_interval": 2},
    "dropout": DENSE | {"decoder_block": "llama2", "dropout_rate": 0.5, "enable_dropout": True},
}
SHARDED = DENSE | {"decoder_block": "llama2", "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
SHOWN = ("Llama", "Mixtral")  # whose tables are on the page
BASE = str(Path(maxtext.__file__).parent / "configs/base.yml")


def program(fields: dict[str, Any], folder: str) -> Program:
    """Return the loss of MaxText's training program as a function of parameters, other state and tokens."""
    config = pyconfig.initialize(["", BASE], base_output_directory=folder, **SIZES | fields)
    mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])
    with mesh:
        model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(params=0, dropout=1))
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, others: Any, tokens: jax.Array) -> jax.Array:
        ones, (batch, length) = jnp.ones_like(tokens[:, 1:]), tokens[:, 1:].shape
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        for side in ("inputs", "targets"):
            batch |= {f"{side}_segmentation": ones, f"{side}_position": ones * jnp.arange(length)[None]}
        with mesh:
            return train.loss_fn(nnx.merge(graph, params, others, copy=True), config, batch, None, None)[0]

    tokens = jax.random.randint(jax.random.key(2), (2, SIZES["max_target_length"] + 1), 0, SIZES["vocab_size"])
    return Program(loss, jax.jit(jax.value_and_grad(loss)), (params, others, tokens))


def metrics(fields: dict[str, Any], folder: str) -> list[np.ndarray]:
    """Return what MaxText's `train.py` measures of each step on four devices, except times."""
    file = Path(folder) / "metrics.jsonl"
    file.unlink(missing_ok=True)
    given = SIZES | fields | {"base_output_directory": folder, "metrics_file": str(file)}
    train.main(["", BASE, *(f"{name}={value}" for name, value in given.items())])
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(steps) == SIZES["steps"]
    return [np.asarray(x) for step in steps for name, x in sorted(step.items()) if name.startswith("learning/")]


def main(page: Path) -> None:
    (diff,) = DIFF.findall(page.read_text())
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for code in sides(diff):
            made_by(code, "launcher")
            results.append({"train.py": metrics(SHARDED, folder)})  # first: it chooses JAX's random numbers
            programs = {name: program(fields, folder) for name, fields in DECODERS.items()}
            results[-1] |= {name: trained(program) for name, program in programs.items()}
        theirs, ours = results
        for name in ours:
            assert_same_bits(theirs[name], ours[name])
        for name in ("Llama", "Mixtral", "DeepSeek"):
            assert_verified(programs[name])
        print_versions(page)
        for name in SHOWN:
            print(named_rows(programs[name]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
