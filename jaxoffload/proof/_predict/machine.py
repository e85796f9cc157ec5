"""machine(): the rates of this machine's bus, memory and matrix units."""

import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from ..._engine.cost.cost import Rates
from . import measure
from .rates import NARROW, SMALL, AttentionRate, Bus, Gemms, Link, between


@dataclasses.dataclass(frozen=True)
class Machine(Rates):
    """The measurements of `machine()`, in TFLOP/s and GB/s.

    Attributes:
      device: the kind of the `gpus` GPUs.
      one: one GPU's copies while the others rest; `all`: each GPU's while all copy.
      gemm_tflops, attention_tflops, hbm_gb_s: large matmuls; attention, forward and backward; the device's memory.
        Where others were not measured, these count for all shapes. Where cuDNN cannot do attention it has a matmul's
        rate.
      gemms: matmuls other than large ones.
      attention: causal attention by the width of a head and the length of a sequence.
      fused_gb_s: what fused work moves of the device's memory, such as activations.
      link: collectives, which without it are taken for copies within the device's memory.

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
    _: dataclasses.KW_ONLY
    gemms: Gemms | None = None
    attention: tuple[AttentionRate, ...] = ()
    fused_gb_s: float | None = None
    link: Link | None = None

    def moving(self, size: float) -> float:
        return size / (self.fused_gb_s or self.hbm_gb_s) / 1e9

    def gemm(self, sides: Sequence[int], flops: float, float32: bool = False, grouped: bool = False) -> float:
        if self.gemms is None:
            return self.gemm_tflops
        narrow = min(sides) <= NARROW
        if grouped:
            return self.gemms.grouped_narrow if narrow else self.gemms.grouped
        if flops < SMALL:
            return self.gemms.small
        return self.gemms.narrow if narrow else self.gemms.float32 if float32 else self.gemm_tflops

    def attending(self, width: int, length: int) -> tuple[float, float]:
        """Return the rates of the width that is nearest, between its lengths."""
        if not self.attention:
            return self.attention_tflops
        nearest = min({a.width for a in self.attention}, key=lambda w: (abs(math.log(w / width)), w))
        points = sorted(a for a in self.attention if a.width == nearest)
        lengths = [a.length for a in points]
        forward, backward = ([getattr(a, way) for a in points] for way in ("forward", "backward"))
        return between(length, lengths, forward), between(length, lengths, backward)

    def on_link(
        self, eqn: JaxprEqn, axes: Mapping[str, int], operands: Sequence[float], results: Sequence[float]
    ) -> float | None:
        """Return the seconds of a collective. A sum over devices, or the largest or smallest value, is a reduce-scatter
        and an all-gather. Axes that are not known have all GPUs that were measured."""
        if self.link is None:
            return None
        name, params = eqn.primitive.name, eqn.params
        names = params.get("axis_name", params.get("axes", ()))
        counts = [axes.get(axis, self.link.gpus) for axis in ((names,) if isinstance(names, str) else names)]
        groups = params.get("axis_index_groups")
        parts = params.get("axis_size") or (len(groups[0]) if groups else math.prod(counts))
        operands = operands[:1] if name == "ragged_all_to_all" else operands  # then where it goes, and which rows
        size = max(sum(operands), sum(results))
        size *= parts / max(1, parts - 1) if name == "ppermute" else 1  # a device keeps no part of it
        return sum(self.link.seconds(what, size, parts) for what in _ON_LINK.get(name, ["all_to_all"]))

    def bus(self, gpus: int) -> Bus:
        """Return the rates where so many GPUs copy at once. Those of some lie between those of one and of all, over the
        logarithm of their number."""
        return Bus(*(between(gpus, (1, self.gpus), rates) for rates in zip(self.one, self.all, strict=True)))

    def to_json(self) -> str:
        plain = lambda x: x._asdict() if hasattr(x, "_asdict") else x
        fields = vars(self) | {"attention": list(map(plain, self.attention))}
        return json.dumps({name: plain(value) for name, value in fields.items()})

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Read what `to_json` wrote, which `python -m jaxoffload machine` prints.

        Files of earlier versions have one number for all shapes.

        Raises:
          ValueError: the text is something else.
        """
        try:
            tuples = lambda of: {name: tuple(x) if isinstance(x, list) else x for name, x in of.items()}
            read = json.loads(text, object_hook=tuples)
            types = {"one": Bus, "all": Bus, "gemms": Gemms, "link": Link}
            read |= {name: kind(**read[name]) for name, kind in types.items() if read.get(name)}
            read["attention"] = tuple(AttentionRate(**each) for each in read.get("attention", ()))
            made = cls(**read)
            for field in dataclasses.fields(made):
                value = getattr(made, field.name)
                numbers = jax.tree.leaves(value, is_leaf=lambda x: x is None)
                wrong = [x for x in numbers if not (isinstance(x, (int, float)) and 0 < x < math.inf)]
                kind: Any = types.get(field.name, (int, float) if field.type in (int, float) else object)
                wrong += [] if numbers and isinstance(value, kind) else [value]
                if wrong and field.type is not str and value != field.default:
                    raise ValueError(f"{field.name}: {wrong[0]!r} is not a rate")
            if link := made.link:
                rates = link.all_gather, link.reduce_scatter, link.all_to_all
                ascend = link.sizes == tuple(sorted({*link.sizes}))
                if not (link.sizes and ascend and all(len(each) == len(link.sizes) for each in rates)):
                    raise ValueError("link: needs sizes that ascend, and a rate of each collective for each of them")
            return made
        except (ValueError, TypeError, KeyError, AttributeError) as why:
            raise ValueError(f"this is not what `python -m jaxoffload machine` prints: {why}") from why


_SUM = ["reduce_scatter", "all_gather"]
_ON_LINK = {"all_gather": _SUM[1:], "reduce_scatter": _SUM[:1]}
_ON_LINK |= dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), _SUM)


def machine() -> Machine:
    """Measure this machine's GPUs, which takes half a minute and 8 GiB of each.

    Returns:
      A `Machine`: rates in GB/s and TFLOP/s. Write its `to_json()` to a file, which `plan` reads.

    Raises:
      NotImplementedError: JAX's default backend is not a GPU.

    Example:
      >>> from jaxoffload import machine
      >>> print(machine().to_json())  # doctest: +SKIP
    """
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"machine: needs an NVIDIA GPU; JAX's default backend is {jax.default_backend()}")
    return _measured(jax.local_devices())


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
