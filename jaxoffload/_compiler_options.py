"""XLA's options to compile an offloading step with."""

import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from ._text import nearest, short

# What copies need to run beside the compute (measured on H200). Command buffers put async host copies on the compute
# stream, hence none around dynamic slices. Without double buffering a loop's two copies wait for each other. The
# latency-hiding scheduler switches itself off when a module has a ragged all-to-all. XLA counts stacks on the host as
# device memory: on a full device it would recompute what the policy keeps, and begin copies as late as it can. The
# limit, a percentage of what weights and states leave free, is therefore out of reach: the policy decides alone.
_GPU_OPTIONS: dict[str, str | bool | int] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL",
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_memory_limit_slop_factor": 100_000,
}

# That scheduler assumes 5 ms for any copy, whatever its size, and begins it about that long before its end is awaited:
# half of a copy of 10 ms is hidden, or all of it where chance puts it earlier
# (https://github.com/openxla/xla: GpuLatencyEstimator). Only a profile of instructions, by name, tells it otherwise.
# The copies of a loop get more than any iteration takes, so that they begin with the iteration. Others, such as a
# chain's, get the time of 1 GiB: if they all began at once, what they bring would fill the device.
_COPY_MS = {"dynamic-slice-start": 1000.0, "dynamic-update-slice-start": 1000.0, "copy-start": 20.0}

# The profile takes whole names, not patterns, and must have each name that a copy may get: it costs 4 us per name and
# compilation, and 80 bytes in what JAX's cache keeps of a program. XLA numbers copies from 1. A chain has one per
# residual and layer, both ways: 638 where 30 layers offload 11 residuals. Pipeline stages have one per residual and
# kind of tick: 1540 where 4 stages offload 11 residuals.
_COPIES = {"dynamic-slice-start": 2000, "dynamic-update-slice-start": 2000, "copy-start": 1000}
# Double buffering clones the copies of a loop. Of an odd number of iterations it first takes one out of the loop.
_PEELED = ".peeled_double_buffer"
_CLONES = ("", ".double_buffer_clone", _PEELED)
# It clones a loop with the loop around it, as those of `accumulate`, which have two or three copies per residual and
# scan.
_NESTED_COPIES = 200
_AGAIN = (".1", ".2", ".3")
_NESTED_CLONES = (
    *(f".double_buffer_clone{again}" for again in _AGAIN),
    f"{_PEELED}.double_buffer_clone",
    f"{_PEELED}2",
)
# What was taken out of a loop gets less time than a `copy-start`, which fetches the last layer's residuals and is to
# begin before it.
_PEELED_SHARE = 0.75

_BACKENDS = ("cpu", "gpu", "cuda", "rocm", "tpu")


def compiler_options(
    backend: str | None = None, *, copy_ms: float | None = None
) -> dict[str, str | bool | int | bytes]:
    """Return the options to compile a training step with: `jax.jit(step, compiler_options=compiler_options())`.

    Args:
      backend: "cpu", "gpu", "cuda", "rocm" or "tpu"; JAX's default backend if None.
      copy_ms: how long a copy takes, in milliseconds, as XLA is told: it begins a copy that long before it awaits the
        end. By default the copies of a layer of `scan` begin with the layer's computation, so what is fetched for the
        next layer occupies the device during all of it. A little more than a layer's copies take one way delays them.

    Returns:
      XLA's options, and a profile that holds only how long copies take (not to be combined with JAX's own,
      `jax_enable_pgle`): 2.8 MB, which XLA reads in 0.1 s per compilation. Empty except on NVIDIA GPUs.

    Raises:
      ValueError: backend is not one of these, or copy_ms not a positive number.

    Example:
      >>> from jaxoffload import compiler_options
      >>> compiler_options("gpu")["xla_gpu_enable_latency_hiding_scheduler"], compiler_options("cpu")
      (True, {})
    """
    on_gpu = is_for_gpu("compiler_options", backend)
    is_number = isinstance(copy_ms, (int, float)) and not isinstance(copy_ms, bool)
    if copy_ms is not None and not (is_number and 0 < copy_ms < float("inf")):
        raise ValueError(f"compiler_options: copy_ms must be milliseconds, more than 0, or None; got {copy_ms!r}")
    if not on_gpu:
        return {}
    checker = {"xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF"}  # the profile lacks all other instructions
    return {**_GPU_OPTIONS, **checker, "fdo_profile": _profile(tuple(copy_ms or ms for ms in _COPY_MS.values()))}


def is_for_gpu(caller: str, backend: str | None) -> bool:
    """Return if `backend`, JAX's default backend if None, takes the options for NVIDIA GPUs.

    Raises:
      ValueError: backend is not one of those that `compiler_options` takes.
    """
    if backend is not None and backend not in _BACKENDS:
        allowed = f"{', '.join(_BACKENDS)}{nearest(backend, _BACKENDS)}"
        raise ValueError(f"{caller}: backend {short(backend)} is not one of {allowed}")
    return (backend or jax.default_backend()) in ("gpu", "cuda")


def write_xla_flags(profile: str | os.PathLike[str], *, copy_ms: float | None = None) -> str:
    """Write how long copies take to a file, and return the flags for `XLA_FLAGS`: the options of `compiler_options`.

    For programs on NVIDIA GPUs whose framework calls `jax.jit`. XLA reads the variable when JAX first uses a device.

    Args:
      profile: the file to write, whose name ends in .pbtxt: how long copies take. XLA reads it when it compiles.
      copy_ms: as for `compiler_options`.

    Returns:
      Flags, separated by spaces; one names the file.

    Raises:
      ValueError: profile is named otherwise, or has a space; copy_ms is not a positive number.
      OSError: the file cannot be written.

    Example:
      >>> from jaxoffload import write_xla_flags
      >>> flags = write_xla_flags("copies.pbtxt")
      >>> flags.split()[1]
      '--xla_gpu_enable_while_loop_double_buffering=true'
    """
    path = os.path.abspath(profile)
    if not path.endswith(".pbtxt") or any(map(str.isspace, path)):
        raise ValueError(
            f"write_xla_flags: profile {short(path)} is not allowed; use a name that ends in .pbtxt, no spaces"
        )
    options = compiler_options("gpu", copy_ms=copy_ms)
    text = options.pop("fdo_profile")
    assert isinstance(text, bytes)
    with open(path, "wb") as file:
        file.write(text)
    written = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    written["xla_gpu_pgle_profile_file_or_directory_path"] = path
    return " ".join(f"--{name}={value}" for name, value in written.items())


class _Profile(bytes):
    """Bytes with a short repr, because JAX prints the options in its errors."""

    def __repr__(self) -> str:
        return f"<how long instructions take, {len(self)} bytes>"


def with_times(options: dict[str, str | bool | int | bytes], seconds: dict[str, float]) -> dict[str, Any]:
    """Return the options, with a profile that also holds how long these instructions take."""
    profile = options["fdo_profile"]
    assert isinstance(profile, bytes)
    return {**options, "fdo_profile": _Profile(profile + _costs((name, 1e3 * s) for name, s in seconds.items()))}


@functools.cache
def _profile(ms: tuple[float, ...]) -> _Profile:
    """Return a `ProfiledInstructionsProto` as text: `ms` of each of `_COPY_MS`, under all names that it may have."""
    copies = dict(zip(_COPY_MS, ms, strict=True))
    peeled = _PEELED_SHARE * copies["copy-start"]
    names = ((copy, name) for copy in copies for number in range(1, _COPIES[copy] + 1) for name in _names(copy, number))
    return _Profile(_costs((name, peeled if _PEELED in name else copies[copy]) for copy, name in names))


def _names(copy: str, number: int) -> Iterator[str]:
    """Yield the names of a copy and its clones. All copies except a program's last have a ".0" behind the number."""
    nested = number <= _NESTED_COPIES
    for last in ("", ".0"):
        for clone in (*_CLONES, *_NESTED_CLONES) if nested else _CLONES:
            yield f"{copy}.{number}{last}{clone}"
    if nested:
        yield from (f"{copy}.{number}{again}" for again in _AGAIN)


def _costs(ms: Iterable[tuple[str, float]]) -> bytes:
    return "".join(f'costs {{ name: "{name}" cost_us: {1000 * each:g} }}\n' for name, each in ms).encode()
