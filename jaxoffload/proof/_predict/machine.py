"""machine(): the rates of this machine's bus, memory and matrix units, measured once."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from ..._engine.cost import Rates, attention_flops
from ..._text import GIB


class Bus(NamedTuple):
    """GB/s (10**9 bytes) of one GPU's copies between its memory and pinned host memory: each way alone, and each way
    while the other goes on too.

    Example:
      >>> from jaxoffload.proof import Bus
      >>> Bus(d2h=53.7, h2d=53.3, together=49.0).d2h
      53.7
    """

    d2h: float
    h2d: float
    together: float


@dataclasses.dataclass(frozen=True)
class Machine:
    """What `machine()` measured; print it.

    Attributes:
      device: the kind of the `gpus` GPUs.
      one: one GPU's copies while the others rest; `all`: each GPU's while all copy.
      gemm_tflops: 10**12 floating-point operations per second of large bfloat16 matmuls in a long run.
      attention_tflops: those of cuDNN's causal flash attention, forward and backward, without the masked half; those of
        matmuls where cuDNN cannot do it.
      hbm_gb_s: GB/s of the device's memory, reading and writing together.

    Example:
      >>> from jaxoffload.proof import Bus, Machine
      >>> bus = Bus(d2h=53.7, h2d=53.3, together=49.0)
      >>> one = Machine("H200", 1, "0.12", bus, bus, 790.0, (600.0, 450.0), 4300.0)
      >>> Machine.from_json(one.to_json()) == one
      True
    """

    device: str
    gpus: int
    jaxlib: str
    one: Bus
    all: Bus
    gemm_tflops: float
    attention_tflops: tuple[float, float]
    hbm_gb_s: float

    @property
    def rates(self) -> Rates:
        return Rates(self.gemm_tflops, self.attention_tflops, self.hbm_gb_s)

    def bus(self, gpus: int) -> Bus:
        """The rates where so many GPUs copy at once."""
        return self.one if gpus == 1 else self.all

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"one": self.one._asdict(), "all": self.all._asdict()})

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Read what `to_json` wrote, which `python -m jaxoffload machine --json` prints.

        Raises:
          ValueError: the text is something else.
        """
        try:
            read = json.loads(text)
            buses = {which: Bus(**read.pop(which)) for which in ("one", "all")}
            forward, backward = read["attention_tflops"]
            measured = [*buses["one"], *buses["all"], forward, backward, read["gemm_tflops"], read["hbm_gb_s"]]
            if wrong := [number for number in measured if not 0 < number < math.inf]:
                raise ValueError(f"{wrong[0]!r} is not a rate")
            return cls(**read | buses | {"attention_tflops": (forward, backward)})
        except (ValueError, TypeError, KeyError, AttributeError) as why:
            raise ValueError(f"this is not what `python -m jaxoffload machine --json` prints: {why}") from why

    def __str__(self) -> str:
        lines = [f"{self.gpus} {self.device}, jaxlib {self.jaxlib}"]
        lines.append(f"{'pinned copies, GB/s':28} {'to the host':>12} {'back':>8} {'each, at once':>17}")
        rows = {"one GPU": self.one} | ({"each of all GPUs": self.all} if self.gpus > 1 else {})
        for what, bus in rows.items():
            lines.append(f"{what:28} {bus.d2h:12.1f} {bus.h2d:8.1f} {bus.together:17.1f}")
        forward, backward = self.attention_tflops
        lines.append(f"bfloat16 matmuls {self.gemm_tflops:.0f} TFLOP/s, device memory {self.hbm_gb_s:.0f} GB/s")
        lines.append(f"causal attention {forward:.0f} TFLOP/s forward, {backward:.0f} backward")
        return "\n".join(lines)


def machine(again: bool = False) -> Machine:
    """Measure this machine's GPUs, which takes seconds and 8 GiB of each, or read what was measured before.

    Results are kept in `$XDG_CACHE_HOME/jaxoffload`, or `~/.cache/jaxoffload`: a file per kind and number of GPUs and
    version of jaxlib.

    Args:
      again: measure, whatever was measured before.

    Returns:
      A `Machine`: rates in GB/s and TFLOP/s.

    Raises:
      NotImplementedError: JAX's default backend is not a GPU.

    Example:
      >>> from jaxoffload import machine
      >>> print(machine())  # doctest: +SKIP
    """
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"machine: needs an NVIDIA GPU; JAX's default backend is {jax.default_backend()}")
    if not again and (known := known_machine()):
        return known
    measured = _measured()
    with contextlib.suppress(OSError, RuntimeError):  # nowhere to keep it: it is measured again
        (kept := _file()).parent.mkdir(parents=True, exist_ok=True)
        written = kept.with_suffix(f".{os.getpid()}")  # several processes may come here
        written.write_text(measured.to_json() + "\n")
        written.replace(kept)
    return measured


def known_machine() -> Machine | None:
    """Return what `machine()` measured here before, or None; measure nothing.

    Example:
      >>> from jaxoffload.proof import known_machine
      >>> known_machine() is None  # on a CPU
      True
    """
    if jax.default_backend() != "gpu":
        return None
    try:
        return Machine.from_json(_file().read_text())
    except (OSError, RuntimeError, ValueError):  # never measured, nowhere to keep it, or by another version of this
        return None


def _file() -> Path:
    devices = jax.local_devices()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxoffload"
    name = f"{devices[0].device_kind}-{len(devices)}-jaxlib-{importlib.metadata.version('jaxlib')}"
    return cache / f"{name.replace(' ', '-').replace('/', '-')}.json"


def _measured() -> Machine:
    devices = jax.local_devices()
    return Machine(
        device=devices[0].device_kind,
        gpus=len(devices),
        jaxlib=importlib.metadata.version("jaxlib"),
        one=(one := _bus(devices[:1])),
        all=_bus(devices) if len(devices) > 1 else one,
        gemm_tflops=(gemm := _gemm_tflops()),
        attention_tflops=_attention_tflops() or (gemm, gemm),
        hbm_gb_s=_hbm_gb_s(),
    )


def _seconds(run: Callable[[], Any], times: int = 5) -> float:
    """Return the median of so many runs, after two that are not counted: they allocate, and wake the clocks."""
    spent = []
    for _ in range(2 + times):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent[2:])


def _bus(devices: list[Any]) -> Bus:
    """The rates of each device while all of these copy."""
    size, runs = GIB, []
    for device in devices:
        here = SingleDeviceSharding(device)
        host = here.with_memory_kind("pinned_host")
        d2h, h2d, both = (jax.jit(lambda *xs: xs, out_shardings=to) for to in ((host,), (here,), (host, here)))
        x = jax.device_put(jnp.ones(size, jnp.uint8), here)
        (y,) = d2h(x)
        runs.append(((d2h, (x,)), (h2d, (y,)), (both, (x, y))))
    start = lambda copies: [copy(*arrays) for copy, arrays in copies]
    spent = [_seconds(functools.partial(start, copies)) for copies in zip(*runs, strict=True)]
    return Bus(*(round(size / seconds / 1e9, 1) for seconds in spent))


def _gemm_tflops() -> float:
    """The rate of square matmuls, one after another, long enough that the clocks are those of a training step."""
    size, times = 8192, 200

    @jax.jit
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: x @ w, x)

    # Zeros would draw less power, and run faster. Factors of this size keep the products at the same size.
    x, w = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) * size**-0.5 for i in range(2))
    return round(times * 2 * size**3 / _seconds(functools.partial(run, x, w), 3) / 1e12, 1)


def _attention_tflops() -> tuple[float, float] | None:
    """Forward and backward; None where cuDNN cannot."""
    batch, sequence, heads, width, times = 2, 8192, 32, 128, 8
    shapes = [(batch, sequence, n, width) for n in (heads, heads // 4, heads // 4)]
    q, k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    @jax.jit
    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, q: attend(q, k, v), q)

    @jax.jit
    def whole(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        loss = lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum()

        def iteration(_: Any, q: jax.Array) -> jax.Array:
            dq, dk, dv = jax.grad(loss, (0, 1, 2))(q, k, v)
            return dq + dk.mean() + dv.mean()

        return jax.lax.fori_loop(0, times, iteration, q)

    try:
        spent = _seconds(lambda: forward(q, k, v), 3), _seconds(lambda: whole(q, k, v), 3)
    except Exception:  # whatever cuDNN, or its absence, says
        return None
    flops = times * attention_flops(q.shape, k.shape, causal=True)
    return round(flops / spent[0] / 1e12, 1), round(2.5 * flops / (spent[1] - spent[0]) / 1e12, 1)


def _hbm_gb_s() -> float:
    size, times = GIB, 20

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: x * 1.000001, x)

    seconds = _seconds(functools.partial(run, jnp.ones(size // 4, jnp.float32)))
    return round(times * 2 * size / seconds / 1e9, 1)
