"""What a device does per second, by shape: copies, matmuls, attention and collectives."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SMALL = 2.0**36  # FLOPs: 0.1 ms at 670 TFLOP/s, of which a kernel's beginning and end are a part
NARROW = 1024  # of a matmul's shortest side


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


def between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate over the logarithm of ascending `xs`; beyond them the first or the last of `ys` counts."""
    return float(np.interp(np.log(x), np.log(xs), ys))
