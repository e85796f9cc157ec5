"""Segments of a stack of layers: which layers run in one loop, which of them offload, and what the loop keeps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr

from ..jaxprs.source import Source
from .layer import Layer
from .placement import Kept, Layout, Place


class Segment(NamedTuple):
    """Neighbouring layers that one loop computes, `start` to `stop` in the order in which they run.

    The residuals of the first `on_host` ones go to the host: of all layers, of all but the last, or of none.
    """

    start: int
    stop: int
    on_host: int
    jaxpr: Jaxpr  # of one layer: its forward pass, or its backward pass
    layer: Layer
    reason: str = ""  # why layers here do not offload

    @property
    def layers(self) -> int:
        return self.stop - self.start

    @property
    def copies(self) -> list[Any]:
        """A scope per stack on the host."""
        return self.layer.copies if self.on_host else []

    @property
    def backward(self) -> Jaxpr:
        """The backward pass of a layer, if all results have cotangents."""
        return self.layer.backward()

    @property
    def layout(self) -> Layout:
        """Where each residual of a layer is."""
        return self.layer.layout if self.on_host else self.layer.layout.on_device

    def sources(self) -> list[Source]:
        """The source of each leaf of this segment's `SegmentResiduals`."""

        def at(place: Place, layers: int, axes: int) -> list[Source]:
            sources = self.layout.select(map(self.source_of, self.layer.layout.kept), place)
            return [source._replace(layers=layers, empty=0, axes=axes) for source in sources]

        host = [source._replace(where="", kind="value", empty=1) for source in at("host", self.layers - 1, 1)]
        last = at("host", 1, 0)
        if self.on_host == self.layers:
            last = [source._replace(where="", kind="value") for source in last]
        return [*host, *last, *at("device", self.layers, 1), *at("once", 1, 0)]

    def source_of(self, kept: Kept) -> Source:
        """The source of a value in layers of this segment that do not offload."""
        overrides = kept.place == "host" and kept.source.by_plan and self.reason
        return kept.source._replace(where=self.reason, kind="overridden") if overrides else kept.source


def segments_of(
    layer: Layer, recomputing: Callable[[], Layer] | None, length: int, offloaded: int, resident: int
) -> list[Segment]:
    """Divide the forward pass of `length` layers into as few loops as they need.

    The first `offloaded` layers offload, the last `resident` ones keep their residuals on the device, and so do those
    between, or they are `recomputing()` what is marked offload.
    """
    first_resident = length - min(resident, length)
    # The layer after the last that offloads can run in the same loop if it differs only in where its residuals stay.
    joins = 0 < offloaded < length and (offloaded == first_resident or not recomputing)
    stop = offloaded + joins
    before = "resident" if offloaded == first_resident else "other_layers"
    between = recomputing() if recomputing and stop < first_resident else layer
    segments = [
        Segment(0, stop, offloaded, layer.forward, layer, before),
        Segment(stop, first_resident, 0, between.forward, between, "other_layers"),
        Segment(max(stop, first_resident), length, 0, layer.forward, layer, "resident"),
    ]
    return [segment for segment in segments if segment.start < segment.stop]


def reads_of(segments: Sequence[Segment], consts: int) -> tuple[tuple[int, bool], ...]:
    """The operands of a scan that are residuals of its layers: their numbers, each with whether it is a constant."""
    numbers = {k.operand for segment in segments for k in segment.layer.layout.kept if k.operand is not None}
    return tuple((number, number < consts) for number in sorted(numbers))


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Segments in which neighbours that keep all on the device, for whatever reason, are one."""
    merged: list[Segment] = []
    for segment in segments:
        before = merged[-1] if merged else None
        if before and before.layer is segment.layer and not before.on_host and not segment.on_host:
            merged[-1] = before._replace(stop=segment.stop)
        else:
            merged.append(segment)
    return tuple(merged)


class SegmentResiduals[T](NamedTuple):
    """The residuals that a segment keeps between the passes.

    No row is ever out of range: XLA:GPU does not clamp its DMA copies, and would write into other memory
    (https://github.com/openxla/xla: DynamicSliceFusionV2Thunk).
    """

    host: list[T]  # (layers, ...) each, row 0 is padding
    last: list[T]  # the last layer's, on the host or not
    device: list[T]  # (layers, ...) each
    once: list[T]  # the same in every layer
