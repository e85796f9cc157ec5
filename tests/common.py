"""Helpers of several tests: exact runs, what autodiff keeps, counts of equations, processes that end with the test."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Var

from jaxoffload import Policy, accumulate
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._engine.microbatches.interleaved import interleaved_p
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
def fast_compiles():
    """On a CPU, switch most of XLA's optimizations off: whole training steps take longer to compile than to run."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


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


def saving(*names):
    """Return JAX's own policy that saves these names."""
    return jax.checkpoint_policies.save_only_these_names(*names)


def in_a_loop(f, *names):
    """The reference for a scan's body: `jax.checkpoint` that saves these names, as JAX recommends inside a scan."""
    return jax.checkpoint(f, policy=saving(*names), prevent_cse=False)


def total(out):
    """Return a scalar that depends on all floating-point leaves of a pytree, each with its own weight."""
    leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum((k + 1) * jnp.sum(x.astype(jnp.float32) ** 2) for k, x in enumerate(leaves))


def gradient(f, argnums=0):
    return jax.grad(lambda *args: total(f(*args)), argnums=argnums)


def one_by_one(loss, argnums=0, has_aux=False, reduction="mean"):
    """The reference of `accumulate`: the loop over microbatches that a user would write."""

    def run(*args):
        numbers = (argnums,) if isinstance(argnums, int) else argnums
        batch = {n: x for n, x in enumerate(args) if n not in numbers}

        def add(sums, microbatch):
            given = dict(enumerate(args)) | microbatch
            value, grads = jax.value_and_grad(loss, argnums, has_aux)(*(given[n] for n in range(len(args))))
            value, aux = value if has_aux else (value, None)
            return jax.tree.map(jnp.add, sums, (value, grads)), aux

        params = args[argnums] if isinstance(argnums, int) else tuple(args[n] for n in argnums)
        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        sums, aux = lax.scan(add, zeros, batch)
        count = len(jax.tree.leaves(batch)[0])
        value, grads = jax.tree.map(lambda x: x / count, sums) if reduction == "mean" else sums
        return ((value, aux) if has_aux else value), grads

    return run


def accumulated(f, interleaved=True):
    """Return (x, w) -> the gradient with respect to w, summed over four microbatches of x; or in a plain loop."""
    run = accumulate if interleaved else one_by_one
    summed = run(lambda w, x: total(f(x, w)), reduction="sum")
    return lambda x, w: summed(w, jnp.stack([x, -x, x / 2, 2 * x]))[1]


def gradient_jaxpr(f, *args, argnums=0):
    return jax.make_jaxpr(gradient(f, argnums))(*args)


def kept_values(f, *args):
    """Return the abstract values that autodiff keeps, except arguments and constants."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(f, *args)[1]))(*args)
    given = {*jaxpr.invars, *jaxpr.constvars}
    kept = dict.fromkeys(v for v in jaxpr.outvars if isinstance(v, Var))
    return [v.aval for v in kept if v not in given]


def place(aval):
    return "host" if aval.memory_space == jax.memory.Space.Host else "device"


def kept(f, *args):
    """Return what autodiff keeps, except arguments and constants: (place, dtype, shape) -> count."""
    return Counter((place(aval), str(aval.dtype), aval.shape) for aval in kept_values(f, *args))


def kept_bytes(f, *args):
    """Return the (device, host) bytes that autodiff keeps, except arguments and constants."""
    sums = Counter()
    for aval in kept_values(f, *args):
        sums[place(aval)] += aval.size * aval.dtype.itemsize
    return sums["device"], sums["host"]


def equations(jaxpr):
    """Yield all equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def count(jaxpr, primitive):
    return sum(eqn.primitive.name == primitive for eqn in equations(jaxpr))


def runs(jaxpr, primitive):
    """Return how often a jaxpr runs a primitive, in its loops too."""
    inside = lambda eqn: (x for x in jax.tree.leaves(tuple(eqn.params.values())) if hasattr(x, "eqns"))
    each = lambda eqn: (eqn.primitive.name == primitive) + sum(runs(x, primitive) for x in inside(eqn))
    return sum(eqn.params.get("length", 1) * each(eqn) for eqn in jaxpr.eqns)


def bytes_staying(f, *args):
    """Return how many bytes per device of residuals marked offload `accumulate` keeps there at once in the first and in
    the last microbatch."""
    on_device = lambda loops: sum(s.layers * sum(s.layer.sizes.device) for each in loops for s in each.segments)
    (eqn,) = (site.eqn for site in walk(jax.make_jaxpr(f)(*args)) if site.eqn.primitive is interleaved_p)
    between, *ends = (on_device(eqn.params[of]) for of in ("loops", "first", "last"))
    more = [here - between for here in ends]
    return sum(more) if eqn.params["microbatches"] == 2 else max(more)


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
    """Start a process in a session of its own; conftest.py ends it, and all that it started, with the test."""
    process = subprocess.Popen(arguments, start_new_session=True, **options)
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
