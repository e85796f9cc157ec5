"""Strict settings: warnings are errors (pyproject), ranks are never promoted; 8 virtual CPU devices, or the machine's
GPUs."""

import contextlib
import gc
import hashlib
import importlib
import os
import platform
import shutil
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest


def pytest_configure(config):
    # A shell's background job (`make test &`) ignores Ctrl-C, and its child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the GPU
    # Before JAX is imported. `-m gpu` is the only way to use a GPU: the other tests rely on CPU's exact sums.
    if config.option.markexpr != "gpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
        compile_once(config)
    else:
        # TransformerEngine wants to be imported before JAX's first computation.
        with contextlib.suppress(ImportError, OSError, RuntimeError, AttributeError):
            importlib.import_module("transformer_engine.jax")

    import jax

    jax.config.update("jax_numpy_rank_promotion", "raise")


def compile_once(config):
    """Keep what is compiled until these tests end, or in the folder COMPILED for later runs."""
    if kept := os.environ.get("COMPILED"):
        flags = [os.environ.get(name) for name in ("XLA_FLAGS", "ONEDNN_MAX_CPU_ISA")]
        key = hashlib.sha256(repr((version("jaxlib"), flags, instruction_set())).encode()).hexdigest()[:16]
        folder = os.path.join(os.path.abspath(kept), key, os.environ.get("PYTEST_XDIST_WORKER", "alone"))
    else:
        folder = tempfile.mkdtemp(prefix="jaxoffload-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # One folder for each pytest-xdist process: JAX does not lock it.
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}


def instruction_set():
    """Return what the CPU can do, on Linux; elsewhere its name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def pytest_collection_modifyitems(items):
    import jax

    if jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU; JAX's backend is {jax.default_backend()}")
        for item in items:
            if "gpu" in item.keywords and "gpu" not in item.fixturenames:
                item.add_marker(skip)


def pytest_collection_finish():
    """Leave what was imported, which stays, out of garbage collections: JAX's tracing causes many."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def shared():
    """Return the global state that a test could leave behind."""
    import jax

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    # pytest writes the current test here, and JAX writes where CUDA and its runtime are when it imports Mosaic.
    others = {"PYTEST_CURRENT_TEST", "MOSAIC_GPU_CUDA_ROOT", "MOSAIC_GPU_RUNTIME_LIB_PATH"}
    others |= {"MOSAIC_GPU_NVSHMEM_BC_PATH", "MOSAIC_GPU_NVSHMEM_SO_PATH"}
    environment = {key: value for key, value in os.environ.items() if key not in others}
    return {
        "environment": environment,
        "folder": os.getcwd(),
        "path": [*sys.path],
        "signals": handlers,
        "jax": dict(jax.config.values),
    }


@pytest.fixture(autouse=True)
def nothing_is_left():
    """End a test's processes with it, and fail if it left other global state behind."""
    from common import end_started

    before = shared()
    try:
        yield
    finally:
        end_started()
    for what, after in shared().items():
        if what == "jax":  # importing a module of JAX can add its settings
            after = {key: after[key] for key in before["jax"]}
        assert after == before[what], what


@pytest.fixture
def compiled_fast():
    """For tests that compare bits under `exact_options`, which do the same, or not at all: the rest is not LLVM's."""
    from common import fast_compiles

    with fast_compiles():
        yield
