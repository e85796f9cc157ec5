"""Helpers of several tests: exact runs, how results are compared, processes that end with the test."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoffload import Policy
from jaxoffload.grouped import te
from jaxoffload.proof import exact_options

ROOT = Path(__file__).parents[1]
PATIENCE = 300  # seconds that a test waits for a process, because the machine may be busy
# Overrides for short runs.
SHORT = ("mesh.data=8", "model.layers=1", "train.checkpoint_every=2", "train.eval_every=100", "train.warmup_steps=0")
_started: list[subprocess.Popen] = []

# `make test-gpu` selects the second.
on_cpu_and_gpu = pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])


def needs_te():
    """Skip the test if TransformerEngine cannot be imported."""
    try:
        te.load("cpp_extensions")
    except ImportError as why:
        pytest.skip(str(why))


def run(f, *args, **options):
    """Return the flat outputs of jitted `f` as numpy arrays, compiled under `exact_options` and these options."""
    out = jax.jit(f, compiler_options=exact_options() | options)(*args)
    return [np.asarray(x) for x in jax.tree.leaves(out)]


@contextlib.contextmanager
def setting(name, value):
    """Give one of JAX's settings another value for a while."""
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def fast_compiles():
    """On a CPU, switch most of XLA's optimizations off: whole training steps take longer to compile than to run."""
    return setting("jax_disable_most_optimizations", jax.default_backend() == "cpu")


def run_each(fs, *args):
    """Run several functions as `run` does. A CPU compiles them together, which takes less time. On a GPU XLA's host
    offloader fails on one program with several loops that differ only in what they offload."""
    if jax.default_backend() == "gpu":
        return [run(f, *args) for f in fs]
    outs = jax.jit(lambda *args: [f(*args) for f in fs], compiler_options=exact_options())(*args)
    return [[np.asarray(x) for x in jax.tree.leaves(out)] for out in outs]


def assert_same_bits(got, want):
    assert len(got) == len(want) and want
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, (k, a.dtype, b.dtype, a.shape, b.shape)
        differ = sum(x != y for x, y in zip(a.tobytes(), b.tobytes(), strict=True))
        assert not differ, f"output {k}: {differ} bytes differ, by up to {np.abs(a - b).max()}"


def assert_close(got, want, roundings=100, size=None):
    """Assert that two pytrees differ by rounding alone: another CPU or another program adds in another order.

    Each leaf may differ by so many roundings of its largest value, because a small value may be what is left of large
    terms. `size` is that of the terms, where all values are what is left. `want` may have more precision.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, b), a in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and b.dtype in (a.dtype, np.float64), (a.dtype, b.dtype, a.shape, b.shape)
        of = np.float32 if a.dtype == np.float64 else a.dtype
        rounding = jnp.finfo(of).eps if jnp.issubdtype(of, jnp.inexact) else 0
        a, b = a.astype(np.float64), b.astype(np.float64)
        terms = np.max(np.abs(b), where=np.isfinite(b), initial=0) if size is None else float(size)
        atol = float(roundings * rounding * terms)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def policy(residuals=(), **fields):
    """Return a policy that offloads values of any size."""
    return Policy(residuals=residuals, **{"min_offload_bytes": 0, **fields})


def normal(seed, shape, dtype=jnp.float32):
    """Return numpy's draws: XLA compiles those of jax.random again for each shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def auto_mesh(**sizes: int) -> jax.sharding.Mesh:
    """Return a mesh with these axes, such as `auto_mesh(a=4, b=2)`, whose axes XLA handles."""
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def inherited_flags(*flags: str, devices: int = 1) -> str:
    """Return this process's `XLA_FLAGS` and these, for a process of so many devices: the last of a name counts."""
    return " ".join([os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={devices}", *flags])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen:
    """Start a process in a session of its own, with its output in a pipe; conftest.py ends it, and all that it started,
    with the test."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(arguments, start_new_session=True, **piped | options)
    _started.append(process)
    return process


def end_started() -> None:
    while _started:
        with _started.pop() as process, contextlib.suppress(ProcessLookupError):  # closes its pipes, and waits
            os.killpg(process.pid, signal.SIGKILL)


def finish(process: subprocess.Popen, code: int = 0) -> str:
    """Return what the process printed, once it has ended with this exit status."""
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, text
    return text


def wait_for(process: subprocess.Popen, happened: Callable[[], Any]) -> None:
    """Return once it has happened; fail if the process ends first."""
    limit = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None and time.monotonic() < limit, process.stdout and process.communicate()[0]
        time.sleep(0.002)
