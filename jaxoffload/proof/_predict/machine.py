"""machine(): the rates of this machine's bus, memory and matrix units, measured once."""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import jax

from ..._policy import check_switches
from .._rates import AttentionRate, Gemms, Link, RatesByShape, between
from . import measure
from .measure import Bus as Bus


@dataclasses.dataclass(frozen=True)
class Machine(RatesByShape):
    """The measurements of `machine()`; print them.

    Attributes:
      device: the kind of the `gpus` GPUs.
      one: one GPU's copies while the others rest; `all`: each GPU's while all copy.
      gemm_tflops, attention_tflops, hbm_gb_s, gemms, attention, fused_gb_s, link: what each does, TFLOP/s and GB/s, as
        keywords. Only the first three are needed: `gemms` has matmuls other than large ones, `attention` more shapes,
        `fused_gb_s` activations, `link` collectives. Where cuDNN cannot do attention it has a matmul's rate.

    Example:
      >>> from jaxoffload.proof import Bus, Machine
      >>> bus = Bus(d2h=53.7, h2d=53.3, together=49.0)
      >>> rates = {"gemm_tflops": 790.0, "attention_tflops": (600.0, 450.0), "hbm_gb_s": 4300.0}
      >>> one = Machine("H200", 1, "0.12", bus, bus, **rates)
      >>> Machine.from_json(one.to_json()) == one
      True
    """

    device: str
    gpus: int
    jaxlib: str
    one: Bus
    all: Bus

    def bus(self, gpus: int) -> Bus:
        """Return the rates where so many GPUs copy at once. Those of some lie between those of one and of all, over the
        logarithm of their number."""
        if gpus == 1:
            return self.one
        if gpus >= self.gpus:
            return self.all
        return Bus(*(between(gpus, (1, self.gpus), rates) for rates in zip(self.one, self.all, strict=True)))

    def caveat(self, gpus: int) -> str:
        """Return what a prediction for so many GPUs says in brackets if more of a host may copy at once than were
        measured; otherwise ""."""
        few = self.gpus < min(gpus, _OF_A_HOST)
        return f" (the bus was measured with {self.gpus} GPU(s) copying at once)" if few else ""

    def to_json(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = lambda x: x._asdict() if hasattr(x, "_asdict") else x
        fields |= {"attention": [plain(rate) for rate in self.attention]}
        return json.dumps({name: plain(value) for name, value in fields.items()})

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Read what `to_json` wrote, which `python -m jaxoffload machine --out FILE` writes.

        Files of earlier versions have one number for all shapes.

        Raises:
          ValueError: the text is something else.
        """
        try:
            read = json.loads(text)
            read |= {which: Bus(**read[which]) for which in ("one", "all")}
            forward, backward = read["attention_tflops"]
            read["attention_tflops"] = (forward, backward)
            read["attention"] = tuple(AttentionRate(**each) for each in read.get("attention", ()))
            if gemms := read.get("gemms"):
                read["gemms"] = Gemms(**gemms)
            if link := read.get("link"):
                fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in link.items()}
                read["link"] = Link(**fields)
            made = cls(**read)
            for field in dataclasses.fields(made):
                value = getattr(made, field.name)
                numbers = jax.tree.leaves(value, is_leaf=lambda x: x is None)
                wrong = [x for x in numbers if not (isinstance(x, (int, float)) and 0 < x < math.inf)]
                if wrong and field.type is not str and value is not field.default:
                    raise ValueError(f"{field.name}: {wrong[0]!r} is not a rate")
            if made.link and not _is_complete(made.link):
                raise ValueError("link: needs sizes that ascend, and a rate of each collective for each of them")
            return made
        except (ValueError, TypeError, KeyError, AttributeError) as why:
            raise ValueError(f"this is not what `python -m jaxoffload machine --out FILE` writes: {why}") from why

    def __str__(self) -> str:
        lines = [f"{self.gpus} {self.device}, jaxlib {self.jaxlib}"]
        lines.append(f"{'pinned copies, GB/s':28} {'to the host':>12} {'back':>8} {'each, at once':>17}")
        rows = {"one GPU": self.one} | ({"each of all GPUs": self.all} if self.gpus > 1 else {})
        for what, bus in rows.items():
            lines.append(f"{what:28} {bus.d2h:12.1f} {bus.h2d:8.1f} {bus.together:17.1f}")
        words = lambda x: ", ".join(f"{k} {v}" for k, v in x._asdict().items()) if hasattr(x, "_asdict") else x
        for field in dataclasses.fields(RatesByShape):
            value = getattr(self, field.name)
            each = value if field.name == "attention" else [value] * (value is not None)
            lines += [f"{field.name:17} {words(one)}" for one in each]
        return "\n".join(lines)


_OF_A_HOST = 8  # GPUs, at most


def _is_complete(link: Link) -> bool:
    rates = link.all_gather, link.reduce_scatter, link.all_to_all
    ascend = all(small < large for small, large in itertools.pairwise(link.sizes))
    return ascend and bool(link.sizes) and all(len(each) == len(link.sizes) for each in rates)


def machine(again: bool = False) -> Machine:
    """Measure this machine's GPUs, which takes half a minute and 8 GiB of each, or read what was measured before.

    Results are kept in `$XDG_CACHE_HOME/jaxoffload`, or `~/.cache/jaxoffload`: a file per kind and number of GPUs and
    version of jaxlib.

    Args:
      again: measure, whatever was measured before.

    Returns:
      A `Machine`: rates in GB/s and TFLOP/s.

    Raises:
      NotImplementedError: JAX's default backend is not a GPU.
      TypeError: again is not a bool, but a file, say, which `Machine.from_json` reads.

    Example:
      >>> from jaxoffload import machine
      >>> print(machine())  # doctest: +SKIP
    """
    check_switches("machine", again=again)
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"machine: needs an NVIDIA GPU; JAX's default backend is {jax.default_backend()}")
    if not again and (known := known_machine()):
        return known
    measured = _measured(jax.local_devices())
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
    name = f"{devices[0].device_kind}-{len(devices)}-jaxlib-{importlib.metadata.version('jaxlib')}-by-shape"
    return cache / f"{name.replace(' ', '-').replace('/', '-')}.json"


def _measured(devices: list[Any], scale: int = 1) -> Machine:
    """Measure devices with matrices whose sides are divided by `scale`, and bytes by its square."""
    large = measure.large_gemm(scale)  # first: it warms the device as a training step does
    attention = measure.attention(scale)
    longest = max(attention, key=lambda a: (a.width, a.length), default=None)
    one = measure.bus(devices[:1], scale)
    text = Machine(
        device=devices[0].device_kind,
        gpus=len(devices),
        jaxlib=importlib.metadata.version("jaxlib"),
        one=one,
        all=measure.bus(devices, scale) if len(devices) > 1 else one,
        gemm_tflops=large,
        attention_tflops=(longest.forward, longest.backward) if longest else (large, large),
        hbm_gb_s=measure.hbm(scale),
        gemms=measure.gemms(scale),
        attention=attention,
        fused_gb_s=measure.fused(scale),
        link=measure.link(devices, scale),
    ).to_json()
    four_digits = lambda number: float(f"{float(number):.4g}")  # which are more than is known
    return Machine.from_json(json.dumps(json.loads(text, parse_float=four_digits)))
