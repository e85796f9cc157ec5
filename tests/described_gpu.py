"""Programs compiled for the machine's GPU or, without one, for an H200 that is only described. Nothing runs.

That needs JAX's CUDA plugin, jax-cuda13-plugin and jax-cuda13-pjrt, which `make test-all` installs.
"""

import os

import jax
import numpy as np
import pytest
from common import setting
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoffload import compiler_options
from jaxoffload.proof._program import hlo

# What XLA's compiler asks about a device, as for an H200 (xla/stream_executor/device_description.proto).
H200 = """
platform_name: "CUDA" device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 19 patch: 0 } runtime_version { major: 13 }
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
"""
# Triton's matmuls need a device for autotuning. Where it may fuse a softmax with what is around it, XLA tries all of
# its tilings, which takes as long as all else.
OPTIONS = {
    **compiler_options("gpu"),
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_disable_hlo_passes": "triton-softmax-rewriter",
    "xla_disable_automatic_host_compute_offload": True,  # raise an error rather than compute on the host
}


@pytest.fixture(scope="module", autouse=True)
def nothing_cached():
    """JAX cannot read from its cache what was compiled for a GPU that is not here."""
    with setting("jax_persistent_cache_min_compile_time_secs", float("inf")):
        yield


@pytest.fixture(scope="module")
def gpu():
    """The machine's GPU, or an H200."""
    if jax.default_backend() == "gpu":
        return jax.devices()[0]
    return described(1)[0]


@pytest.fixture(scope="module")
def two_gpus(gpu):
    """The machine's GPUs, or two H200s."""
    return jax.devices()[:2] if gpu in jax.devices() and len(jax.devices()) > 1 else described(2)


def described(count):
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # it queries the driver
            topology = f"{count}x1x1"
            return topologies.get_topology_desc("H200", platform="cuda", topology=topology, target_config=H200).devices
    except Exception as error:
        assert "NEEDS_CUDA_PLUGIN" not in os.environ, error
        pytest.skip(f"needs an NVIDIA GPU, or jax-cuda13-plugin and jax-cuda13-pjrt to compile for one: {error}")


def compiled(gpu, f, *shapes, options=OPTIONS, donate_argnums=()):
    everywhere = NamedSharding(Mesh(np.array([gpu]), "x"), PartitionSpec())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), shapes)
    return jax.jit(f, donate_argnums=donate_argnums, compiler_options=options).lower(*args).compile()


def module_of(program):
    return hlo.parse(program.as_text())


def matmuls(lines):
    return [line for line in lines if "__cublas" in line.text]


def begun_after(lines):
    """Yield, for each loop body, its number of matmuls, and how many of them come before each copy's start."""
    for body in dict.fromkeys(line.computation for line in lines if line.opcode.endswith("-start")):
        inside = [line for line in lines if line.computation == body]
        yield (
            len(matmuls(inside)),
            [len(matmuls(inside[:i])) for i, a in enumerate(inside) if a.opcode.endswith("-start")],
        )
