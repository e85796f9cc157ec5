"""The table that `residuals` returns: its lines, its totals, and its text."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Final, Literal

from ..._policy import Decision
from ..._text import readable

SAVED: Final = "saved"
OFFLOADED: Final = "offloaded"
RECOMPUTED: Final = "recomputed"
NOT_NEEDED: Final = "not needed"
State = Literal["saved", "offloaded", "recomputed", "not needed"]
EMPTY = "padding row"
Kind = Literal["value", "padding", "shared", "argument", "overridden"]


@dataclasses.dataclass(frozen=True)
class Residual:
    """One line of the table of `residuals`.

    Attributes:
      names: all names of the value; empty for an untagged one, whose `reason` says where it comes from.
      shape, dtype: of one layer's value, as traced (global under auto and explicit mesh axes, local in `shard_map`);
        in nested scans, of one iteration of all.
      bytes_per_layer, layers, bytes: what is kept (saved, offloaded) or recomputed, over all shards of a `shard_map`. A
        padding row of a host stack is a line with bytes and 0 layers.
      state: "saved" (device), "offloaded" (pinned host), "recomputed", or "not needed" (the backward pass does not read
        it: 0 bytes).
      decision: what the policy asked for; None where no `scan`, `chain` or `checkpoint` decides.
      reason: the pattern or rule that decided.
      count: how many values of that shape a layer has: one per shard of a `shard_map`; 1 if none is needed.
      parts: over how many devices the bytes are divided, as far as a trace tells; other devices hold copies.
      kind: "value"; "padding" (a row of a host stack that stays empty); "shared" (in the place of a value from another
        branch of a `cond`, whose line has the bytes); "argument" (an argument, which exists anyway); "overridden" (the
        policy marks it offload, and other layers, or no host memory, made it `decision`).

    Example:
      >>> from jaxoffload import Residual
      >>> Residual(("fc1",), (8, 4), "float32", 128, 12, 1536, "offloaded", "offload", "fc*").bytes
      1536
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes_per_layer: int
    layers: int
    bytes: int
    state: State
    decision: Decision | None
    reason: str
    count: int = 1
    kind: Kind = "value"
    parts: int = 1

    @property
    def bytes_per_device(self) -> int:
        """`bytes` on each device, or each device's part of the host's."""
        return -(-self.bytes // self.parts)


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The residuals of one function: iterate over its lines, print it, or ask for its totals in bytes. Printed, the
    smallest untagged values are one line.

    Attributes:
      rows: what is kept between the forward and the backward pass.
      notes: remarks on it.
      mesh: the axes of the mesh that the function is written for, with their sizes; empty for one device.

    Example:
      >>> from jaxoffload import Residual, Residuals
      >>> table = Residuals((Residual(("fc1",), (8, 4), "float32", 128, 12, 1536, "offloaded", "offload", "fc*"),))
      >>> print(table)
      residual  shape         bytes/layer  layers     bytes  state      reason
      ------------------------------------------------------------------------
      fc1       float32[8,4]        128 B      12  1.50 KiB  offloaded  fc*
      device 0 B (untagged 0 B) · host 1.50 KiB · recomputed 0 B of named values
    """

    rows: tuple[Residual, ...]
    notes: tuple[str, ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, untagged residuals included."""
        return self._total(SAVED)

    @property
    def host_bytes(self) -> int:
        """Bytes in pinned host memory."""
        return self._total(OFFLOADED)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes of named values that the backward pass recomputes. What runs again and has no name does not count."""
        return self._total(RECOMPUTED)

    @property
    def untagged_bytes(self) -> int:
        """Bytes on the device that no policy names; part of `device_bytes`."""
        return sum(r.bytes for r in self.rows if r.decision is None and r.state == SAVED)

    @property
    def per_device(self) -> "Residuals":
        """The table of one device, which has the same lines with its part of the bytes.

        Where the compiler divides values (auto mesh axes), a value counts as its `with_sharding_constraint` divides it.
        Others are taken to be divided along their first axis, as values or arguments with as many rows are, and whole
        if there are none.
        """

        def own(r: Residual) -> Residual:
            layer = -(-r.bytes_per_layer // r.parts)
            return dataclasses.replace(r, bytes_per_layer=layer, bytes=r.bytes_per_device, count=1, parts=1)

        return dataclasses.replace(self, rows=tuple(map(own, self.rows)), mesh=())

    def _total(self, state: State) -> int:
        return sum(r.bytes for r in self.rows if r.state == state)

    def __str__(self) -> str:
        head = ("residual", "shape", "bytes/layer", "layers", "bytes", "per device", "state", "reason")
        lines = [head, *self._lines()]
        if not self.mesh:
            lines = [line[:5] + line[6:] for line in lines]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        right = range(2, 6 if self.mesh else 5)
        pad = lambda i, cell: cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
        text = ["  ".join(pad(i, cell) for i, cell in enumerate(line)).rstrip() for line in lines]
        text.insert(1, "-" * max(map(len, text)))
        text.append(self._totals())
        if self.mesh:
            axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh)
            devices = math.prod(size for _, size in self.mesh)
            text.append(f"on each of {devices} devices ({axes}): {self.per_device._totals()}")
        return "\n".join([*text, *self.notes])

    def _lines(self) -> list[tuple[str, ...]]:
        """Return the cells of each row; of untagged values that have less than 1 % of the bytes each, those of all."""
        size = sum(r.bytes for r in self.rows)
        small = [r for r in self.rows if not r.names and r.state == SAVED and 100 * r.bytes < size]
        if len(small) < 2:
            return [_cells(r) for r in self.rows]
        sizes = readable(sum(r.bytes for r in small)), readable(sum(r.bytes_per_device for r in small))
        one = ("(untagged)", f"{len(small)} smaller values", "", "", *sizes, SAVED, "under 1 % each")
        return [*(_cells(r) for r in self.rows if r not in small), one]

    def _totals(self) -> str:
        return (
            f"device {readable(self.device_bytes)} (untagged {readable(self.untagged_bytes)}) · "
            f"host {readable(self.host_bytes)} · recomputed {readable(self.recomputed_bytes)} of named values"
        )


def _cells(r: Residual) -> tuple[str, ...]:
    name = ", ".join(r.names) or "(untagged)"
    shape = f"{r.count} x " * (r.count > 1) + f"{r.dtype}[{','.join(map(str, r.shape))}]"
    sizes = readable(r.bytes_per_layer), str(r.layers), readable(r.bytes), readable(r.bytes_per_device)
    return name, shape, *sizes, r.state, r.reason
