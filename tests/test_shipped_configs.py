"""Each config in configs/ is compiled for the GPUs that it names, within their memory.

Those of tiny models are not: they train on CPUs, as other tests do with them. test_train.py traces all at their own
sizes.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from common import ROOT
from described_gpu import OPTIONS, described, nothing_cached  # noqa: F401

from jaxoffload._engine.layers.rows import filled
from jaxoffload._engine.layers.transport import to_host
from models.config import Config, load
from models.sharding import abstract_mesh, make_mesh
from models.step import State, program, shardings_of
from models.train import lowered_step

CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
LIKE_MIXTRAL = ("deepseek-moe-16b", "qwen3-30b-a3b")
ON_GPUS = [name for name in CONFIGS if not name.startswith("tiny") and name != "qwen3-30b-a3b-pp2"]
# XLA takes more than ten minutes for the 48 layers, virtual stages and 16 microbatches of qwen3-30b-a3b-pp2.yaml on two
# cores: what each stage does in each tick is compiled anew. With two layers and two microbatches on each stage: one.
FEWER = ("model.layers=4", "train.virtual_stages=1", "train.grad_accumulation=2", "train.batch_size=8")
GIB = {"H100": 79.6, "H200": 139.8}
MAY_USE = 0.75  # of a GPU, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise


def lowered(config: Config, monkeypatch) -> jax.stages.Lowered:
    """Return the step of a config, lowered for GPUs that are described, on its own mesh."""
    gpus, devices = described(math.prod(dataclasses.astuple(config.mesh))), jax.devices
    monkeypatch.setattr(jax, "devices", lambda *which: devices(*which) if which else gpus)  # a kernel counts its cores
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    made = program(config, make_mesh(config.mesh, gpus))
    if config.train.optimizer_on_host is not True:
        return lowered_step(made, OPTIONS)
    # Described GPUs have no host memory for arguments: the state is made there.
    places = program(config, abstract_mesh(config.mesh)).state.optimizer
    on_host = lambda x: to_host(filled(jax.core.ShapedArray(x.shape, x.dtype)))
    there = lambda x: on_host(x) if x.sharding.memory_kind == "pinned_host" else jnp.zeros(x.shape, x.dtype)

    def step(params, tokens):
        return made.step(State(jnp.int32(0), params, jax.tree.map(there, places)), tokens)

    where = shardings_of((made.state.params, made.tokens))
    run = jax.jit(step, in_shardings=where, donate_argnums=0, compiler_options=OPTIONS)
    return run.lower(made.state.params, made.tokens)


def for_gpus(name: str, *overrides: str) -> Config:
    """Return a config; on GPUs `auto` takes JAX's kernel for experts."""
    config = load(CONFIGS[name], overrides)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, grouped="mosaic"))


@pytest.mark.slow
@pytest.mark.claim("configs")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in LIKE_MIXTRAL)) for n in ON_GPUS])
def test_each_step_fits_in_the_gpus_that_its_config_names(name, monkeypatch):
    config = for_gpus(name)
    plan = lowered(config, monkeypatch).compile().memory_analysis()
    gpu = "H200" if "H200" in CONFIGS[name].read_text().partition("\n")[0] else "H100"
    assert plan.argument_size_in_bytes + plan.temp_size_in_bytes < MAY_USE * GIB[gpu] * 2**30
    offloads = "offload" in (config.remat.default, *dict(config.remat.rules).values())
    assert offloads == (plan.host_temp_size_in_bytes + plan.host_output_size_in_bytes > 0)


@pytest.mark.long
@pytest.mark.claim("configs")
def test_the_step_on_stages_is_compiled_with_fewer_layers(monkeypatch):
    plan = lowered(for_gpus("qwen3-30b-a3b-pp2", *FEWER), monkeypatch).compile().memory_analysis()
    assert plan.host_temp_size_in_bytes > 0
