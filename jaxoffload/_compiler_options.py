"""XLA: the options an offloading step is compiled with, and the versions that must not run one."""

import jax

from ._text import nearest, short

# What it takes for copies to run beside the compute (measured on H200). Command buffers put async host copies on the
# compute stream, hence none around dynamic slices; without double buffering a loop's two copies wait for each other;
# the latency-hiding scheduler goes off by itself when a module holds a ragged all-to-all. XLA counts stacks on the host
# as device memory: on a full device it would recompute what the policy keeps, and begin copies as late as it can.
# Hence a limit out of reach, a percentage of what weights and states leave free: the policy says what is recomputed.
_GPU_OPTIONS: dict[str, str | bool | int] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL",
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_memory_limit_slop_factor": 100_000,
}

# That scheduler takes 5 ms for any copy, whatever its size, and begins it about that long before its end is awaited:
# of a copy of 10 ms the half is hidden, or all of it where chance puts it earlier
# (https://github.com/openxla/xla: GpuLatencyEstimator). The one way to tell it is a profile of instructions, by their
# names. Copies of a loop get longer than any turn, so that they begin where the turn does. Others, as those of a chain,
# get 1 GiB's time: were they all to begin at once, what they bring would fill the device.
_COPY_MS = {"dynamic-slice-start": 1000.0, "dynamic-update-slice-start": 1000.0, "copy-start": 20.0}
# How many of each a program may have; XLA numbers them. A chain has one for each residual of each layer, both ways.
_COPIES = {"dynamic-slice-start": 100, "dynamic-update-slice-start": 100, "copy-start": 500}
_CLONES = ("", ".double_buffer_clone")

_BACKENDS = ("cpu", "gpu", "cuda", "rocm", "tpu")


def compiler_options(
    backend: str | None = None, *, copy_ms: float | None = None
) -> dict[str, str | bool | int | bytes]:
    """The options to compile a training step with: `jax.jit(step, compiler_options=compiler_options())`.

    Args:
      backend: "cpu", "gpu", "cuda", "rocm" or "tpu"; JAX's default backend if None.
      copy_ms: how long XLA is told that a copy takes, in ms: it begins that long before its end is awaited. By default
        the copies of a layer of `scan` begin where the layer's computation does, and what comes back for the next layer
        is on the device beside all that this one computes. A little more than a layer's copies take one way keeps it
        out of the way for longer.

    Returns:
      XLA's names and values, and a profile that holds nothing but how long copies take (not to be combined with JAX's
      own, `jax_enable_pgle`); empty on anything but an NVIDIA GPU.

    Raises:
      ValueError: there is no such backend, or no such time.
    """
    if backend is not None and backend not in _BACKENDS:
        allowed = f"{', '.join(_BACKENDS)}{nearest(backend, _BACKENDS)}"
        raise ValueError(f"compiler_options: backend {short(backend)} is none of {allowed}")
    if copy_ms is not None and not (isinstance(copy_ms, (int, float)) and 0 < copy_ms < float("inf")):
        raise ValueError(f"compiler_options: copy_ms {copy_ms!r} is no time; give milliseconds, more than 0, or None")
    if (backend or jax.default_backend()) not in ("gpu", "cuda"):
        return {}
    times = {copy: copy_ms or ms for copy, ms in _COPY_MS.items()}
    checker = {"xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF"}  # it misses all other instructions
    return {**_GPU_OPTIONS, **checker, "fdo_profile": _profile(times)}


class _Profile(bytes):
    """Short where JAX prints the options in its errors."""

    def __repr__(self) -> str:
        return f"<how long copies take, {len(self)} bytes>"


def _profile(copies: dict[str, float]) -> _Profile:
    """A `ProfiledInstructionsProto` as text, of copies as XLA numbers and, for double buffering, clones them; in ms."""
    numbers = lambda copy: ["", *(f".{i}{more}" for i in range(1, _COPIES[copy]) for more in ("", ".0", ".1"))]
    names = [(copy + n + clone, ms) for copy, ms in copies.items() for n in numbers(copy) for clone in _CLONES]
    return _Profile("".join(f'costs {{ name: "{name}" cost_us: {1000 * ms:g} }}\n' for name, ms in names).encode())
