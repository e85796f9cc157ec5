"""How programs are compiled to be compared: options and settings under which equal arithmetic gives equal bits."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ..._compiler_options import is_for_gpu
from ..._engine.host.slow_copies import untold
from ..._jax import CUDNN_CONFIG, cudnn_lowering

_MAY_BE_ATOMIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"  # TransformerEngine's variable

# XLA:CPU makes a kernel of what it fuses, and of a small loop; LLVM contracts a product and a sum in a kernel into one
# rounding, and vectorizes its sums. What is in one kernel depends on the loop around it. Unoptimised code also compiles
# in half the time.
_ONE_KERNEL_EACH = {"xla_disable_hlo_passes": "fusion,small-while-loop-hoisting", "xla_backend_optimization_level": 0}


def exact_options(backend: str | None = None) -> dict[str, Any]:
    """Return compiler options under which two programs of the same arithmetic give the same bits.

    On a GPU, attention kernels must also be lowered to be deterministic, which `verify` sees to.

    Args:
      backend: as for `compiler_options`.

    Returns:
      XLA's options by name, for `jax.jit(f, compiler_options=...)`. Programs compiled so are slower.

    Raises:
      ValueError: as `compiler_options`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload.proof import exact_options
      >>> f = jax.jit(lambda x: x * 3 + 1, compiler_options=exact_options())
      >>> print(f(jnp.float32(2)))
      7.0
    """
    if not is_for_gpu("exact_options", backend):
        # Inside a fusion for YNNPACK a conversion to bfloat16 and back would not round (docs/upstream.md#ynnpack).
        return {
            "xla_allow_excess_precision": False,
            "xla_cpu_experimental_ynn_fusion_type": "",
            **_ONE_KERNEL_EACH,
        }
    return {
        "xla_allow_excess_precision": False,
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_autotune_level": 0,
        # Programs that differ only in what they offload fuse differently around their matmuls, and bfloat16 then
        # differs in the last bits (measured on an H200: with these two options none does).
        "xla_gpu_enable_triton_gemm": False,
        "xla_disable_hlo_passes": "priority-fusion,multi-output-fusion",
        # No cuBLAS: the small matmuls are kernels of XLA's, which are the same in both programs.
        "xla_gpu_gemm_rewrite_size_threshold": 10**9,
        "xla_disable_automatic_host_compute_offload": True,  # an error instead of silent compute on the host
    }


def repeatable_options() -> dict[str, Any]:
    """Return `exact_options` without those that cost time or memory and are rarely needed.

    On a GPU, cuBLAS may then add what follows a matmul before it rounds, in one program and not in the other; but
    compiling a large program without cuBLAS takes minutes. On a CPU, XLA may fuse the two programs differently; but
    without fusion they are slower and larger.
    """
    slow = {"xla_gpu_gemm_rewrite_size_threshold"} if jax.default_backend() == "gpu" else _ONE_KERNEL_EACH
    return {key: value for key, value in exact_options().items() if key not in slow}


def compiled(run: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    attention = deterministic_attention() if options.get("xla_gpu_deterministic_ops") else contextlib.nullcontext()
    # A function of its own: JAX would take the one program for the other otherwise.
    with attention, untold():
        return jax.jit(lambda *args: run(*args), compiler_options=options).lower(*args).compile()


@contextlib.contextmanager
def deterministic_attention() -> Iterator[None]:
    """Ask for attention gradients without atomics in what this thread lowers within the context.

    XLA's deterministic options reach only the first of several equal calls of cuDNN's attention; the program then lacks
    the graph of the others (jaxlib 0.11.2: "IndexError: absl::container_internal::raw_hash_map<>::at"), and JAX has no
    public switch: docs/upstream.md#cudnn-deterministic. So, until the context is left:

    - JAX's function that writes the configuration of each such call adds `force_deterministic`; a JAX without that
      function stays as it is.
    - The environment variable NVTE_ALLOW_NONDETERMINISTIC_ALGO, which TransformerEngine reads as it lowers, is "0".
    """
    (lowering, config_of), before = cudnn_lowering(), os.environ.get(_MAY_BE_ATOMIC)
    this_thread = threading.get_ident()

    def deterministic(*args: Any, **kwargs: Any) -> dict[str, Any]:
        assert config_of
        config: dict[str, Any] = config_of(*args, **kwargs)
        if threading.get_ident() == this_thread:
            config["cudnn_fmha_backend_config"]["force_deterministic"] = True
        return config

    try:
        os.environ[_MAY_BE_ATOMIC] = "0"
        if config_of:
            setattr(lowering, CUDNN_CONFIG, deterministic)
        yield
    finally:
        if config_of:
            setattr(lowering, CUDNN_CONFIG, config_of)
        if before is None:
            del os.environ[_MAY_BE_ATOMIC]
        else:
            os.environ[_MAY_BE_ATOMIC] = before
