"""The work that one device does per second, by its shape: measured points, interpolated between."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from .._engine.cost.cost import Rates

SMALL = 2.0**36  # FLOPs: 0.1 ms at 670 TFLOP/s, of which a kernel's beginning and end are a part
NARROW = 1024  # of a matmul's shortest side


class Gemms(NamedTuple):
    """TFLOP/s of bfloat16 matmuls other than large ones, by what makes them slower.

    Attributes:
      small: fewer than 2**36 FLOPs on a device, such as those of few rows.
      narrow: a side, also the contracted one, of 1024 or less, such as projections to k and v.
      float32: a float32 result, such as logits or gradients that are added up.
      grouped: grouped GEMMs of experts, forward and backward together; `grouped_narrow`: with a narrow side.

    Example:
      >>> from jaxoffload.proof import Gemms
      >>> Gemms(small=450.0, narrow=590.0, float32=640.0, grouped=560.0, grouped_narrow=400.0).narrow
      590.0
    """

    small: float
    narrow: float
    float32: float
    grouped: float
    grouped_narrow: float


class AttentionRate(NamedTuple):
    """TFLOP/s of causal flash attention, without the masked half, for heads of a `width` and sequences of a `length`.

    Example:
      >>> from jaxoffload.proof import AttentionRate
      >>> AttentionRate(width=128, length=8192, forward=580.0, backward=530.0).backward
      530.0
    """

    width: int
    length: int
    forward: float
    backward: float


class Link(NamedTuple):
    """GB/s of collectives between `gpus` GPUs, one for each of the `sizes`.

    A size is the bytes of the whole array: what an all-gather makes, what a reduce-scatter or an all-to-all takes, on
    each device. A rate is the share of them that a device receives, (gpus - 1) / gpus, per second.

    Attributes:
      beside: the share of an all-gather's time by which matmuls that run beside it take longer: it needs some of the
        device's multiprocessors.

    Example:
      >>> from jaxoffload.proof import Link
      >>> link = Link(2, (2**20, 2**28), (50.0, 300.0), (50.0, 300.0), (40.0, 250.0))
      >>> round(1e3 * link.seconds("all_gather", 2**28, 2), 3)
      0.447
    """

    gpus: int
    sizes: tuple[int, ...]
    all_gather: tuple[float, ...]
    reduce_scatter: tuple[float, ...]
    all_to_all: tuple[float, ...]
    beside: float = 1.0

    def seconds(self, what: str, size: float, parts: int) -> float:
        """Return the seconds of a collective over so many devices. Smaller sizes than measured count as the smallest.

        Args:
          what: the name of a field.
        """
        if parts < 2:
            return 0.0
        size = max(size, self.sizes[0])
        return size * (parts - 1) / parts / between(size, self.sizes, getattr(self, what)) / 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatesByShape(Rates):
    """Rates of more shapes. Where they were not measured, one number counts for all.

    Attributes:
      gemms: matmuls other than large ones; None where that was not measured.
      attention: causal attention by the width of a head and the length of a sequence; () where that was not measured.
      fused_gb_s: GB of its memory that fused work moves, such as activations.
      link: collectives; None where they are taken for copies within the device's memory.
    """

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


_SUM = ["reduce_scatter", "all_gather"]
_ON_LINK = {"all_gather": _SUM[1:], "reduce_scatter": _SUM[:1]}
_ON_LINK |= dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), _SUM)


def between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate over the logarithm of ascending `xs`; beyond them the first or the last of `ys` counts."""
    return float(np.interp(np.log(x), np.log(xs), ys))
