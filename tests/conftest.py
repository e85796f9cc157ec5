"""Strict: warnings are errors (pyproject), ranks are never promoted; 8 virtual CPU devices, or the machine's GPUs."""

import contextlib
import importlib
import os
import signal


def pytest_configure(config):
    # A shell's background job (`make test &`) ignores Ctrl-C, and all that it starts inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Before JAX is imported. `-m gpu` is the only way onto a GPU: the other tests count on CPU's exact sums.
    if config.option.markexpr != "gpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    else:
        if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the GPU
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        # TransformerEngine wants to be imported before JAX's first computation.
        with contextlib.suppress(ImportError, OSError, RuntimeError, AttributeError):
            importlib.import_module("transformer_engine.jax")

    import jax

    jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    import jax
    import pytest

    if jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU; JAX's backend is {jax.default_backend()}")
        for item in items:
            if "gpu" in item.keywords and "gpu" not in item.fixturenames:
                item.add_marker(skip)
