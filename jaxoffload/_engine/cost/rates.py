"""What one device does per second, by the shape of the work: measured points, and what lies between them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

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
        """How long a collective over so many devices takes. A smaller one than measured takes as long as the smallest.

        Args:
          what: the name of a field.
        """
        if parts < 2:
            return 0.0
        size = max(size, self.sizes[0])
        return size * (parts - 1) / parts / between(size, self.sizes, getattr(self, what)) / 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device does per second. Where only one number is known, it counts for all shapes.

    Attributes:
      gemm_tflops: 10**12 floating-point operations of large bfloat16 matmuls in a long run.
      attention_tflops: those of causal flash attention, forward and backward, without the masked half.
      hbm_gb_s: GB of its memory, reading and writing together.
      gemms: other matmuls, by shape; None where that was not measured.
      attention: causal attention by the width of a head and the length of a sequence; () where that was not measured.
      fused_gb_s: GB of its memory that fused work moves, such as activations.
      link: collectives; None where they are taken for copies within the device's memory.
    """

    gemm_tflops: float
    attention_tflops: tuple[float, float]
    hbm_gb_s: float
    gemms: Gemms | None = None
    attention: tuple[AttentionRate, ...] = ()
    fused_gb_s: float | None = None
    link: Link | None = None

    def moving(self, size: float) -> float:
        """Seconds in which fused work reads or writes so many bytes."""
        return size / (self.fused_gb_s or self.hbm_gb_s) / 1e9

    def gemm(self, sides: Sequence[int], flops: float, float32: bool = False, grouped: bool = False) -> float:
        """TFLOP/s of a bfloat16 matmul; `flops` are those on one device, `float32` is the result's dtype."""
        if self.gemms is None:
            return self.gemm_tflops
        narrow = min(sides) <= NARROW
        if grouped:
            return self.gemms.grouped_narrow if narrow else self.gemms.grouped
        if flops < SMALL:
            return self.gemms.small
        return self.gemms.narrow if narrow else self.gemms.float32 if float32 else self.gemm_tflops

    def attending(self, width: int, length: int) -> tuple[float, float]:
        """TFLOP/s of attention, forward and backward: of the width that is nearest, between its lengths."""
        if not self.attention:
            return self.attention_tflops
        nearest = min({a.width for a in self.attention}, key=lambda w: (abs(math.log(w / width)), w))
        points = sorted(a for a in self.attention if a.width == nearest)
        lengths = [a.length for a in points]
        forward, backward = ([getattr(a, way) for a in points] for way in ("forward", "backward"))
        return between(length, lengths, forward), between(length, lengths, backward)


def between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate over the logarithm of ascending `xs`; beyond them the first or the last of `ys` counts."""
    if x <= xs[0]:
        return ys[0]
    for (low, first), (high, last) in zip(zip(xs, ys, strict=True), zip(xs[1:], ys[1:], strict=True), strict=False):
        if x <= high:
            return first + (last - first) * math.log(x / low) / math.log(high / low)
    return ys[-1]
