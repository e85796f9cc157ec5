"""The table that `residuals` returns: its lines, its totals, and how it is written."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from ._text import readable

SAVED, OFFLOADED, RECOMPUTED, NOT_NEEDED = "saved", "offloaded", "recomputed", "not needed"
EMPTY = "a row that stays empty"
SHARES = "; in the place of "  # another branch's value


@dataclasses.dataclass(frozen=True)
class Residual:
    """One line of the table.

    Attributes:
      names: all names of the value; empty for an untagged one, then `reason` says where it comes from.
      shape, dtype: of one layer's value, as traced (global under auto and explicit mesh axes, local in `shard_map`);
        of a scan in a scan, of one turn of both.
      bytes_per_layer, layers, bytes: what is kept (saved, offloaded) or computed again; of `shard_map`'s shards
        together. A row of a stack on the host that stays empty is a line with bytes, and of no layer.
      state: "saved" (device), "offloaded" (pinned host), "recomputed", or "not needed": the backward pass does not
        read it, 0 bytes.
      decision: what the policy asked for; None for an untagged residual.
      reason: the pattern or rule that decided.
      count: how many values of that shape a layer has: one for each shard of a `shard_map`; 1 where none is needed.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes_per_layer: int
    layers: int
    bytes: int
    state: str
    decision: str | None
    reason: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The residuals of one function; iterate over its `Residual`s, print it, or ask for its totals in bytes.

    Attributes:
      rows: what is kept between the forward and the backward pass.
      notes: sentences about it.
      reruns: for each checkpoint (JAX's or ours) around a `scan`, `chain` or `checkpoint`, a table of what is kept
        while its backward pass runs it again. That is neither in `rows` nor in the totals: it is there for that long,
        and where such a checkpoint is in a loop or there are several, that of one run at a time. Equal tables are one.
    """

    rows: tuple[Residual, ...]
    notes: tuple[str, ...] = ()
    reruns: tuple["Residuals", ...] = ()

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def device_bytes(self) -> int:
        """Kept on the device, untagged residuals included."""
        return self._total(SAVED)

    @property
    def host_bytes(self) -> int:
        """Kept in pinned host memory."""
        return self._total(OFFLOADED)

    @property
    def recomputed_bytes(self) -> int:
        """Tagged values that the backward pass computes again."""
        return self._total(RECOMPUTED)

    @property
    def untagged_bytes(self) -> int:
        """Kept on the device though no plan of jaxoffload's names it; part of `device_bytes`."""
        return sum(r.bytes for r in self.rows if r.decision is None and r.state == SAVED)

    def _total(self, state: str) -> int:
        return sum(r.bytes for r in self.rows if r.state == state)

    def to_json(self) -> str:
        """The table as JSON: `residuals` (a list of the rows), totals in bytes, `notes`, `reruns` (tables again)."""
        return json.dumps(self._as_dict())

    def _as_dict(self) -> dict[str, Any]:
        totals = ("device_bytes", "host_bytes", "recomputed_bytes", "untagged_bytes")
        return {
            "residuals": [dataclasses.asdict(r) for r in self.rows],
            **{total: getattr(self, total) for total in totals},
            "notes": self.notes,
            "reruns": [table._as_dict() for table in self.reruns],
        }

    def __str__(self) -> str:
        head = ("residual", "shape", "bytes/layer", "layers", "bytes", "state", "reason")
        lines = [head, *(_cells(r) for r in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        right = {2, 3, 4}
        pad = lambda i, cell: cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
        text = ["  ".join(pad(i, cell) for i, cell in enumerate(line)).rstrip() for line in lines]
        text.insert(1, "-" * max(map(len, text)))
        text.append(
            f"device {readable(self.device_bytes)} (untagged {readable(self.untagged_bytes)}) · "
            f"host {readable(self.host_bytes)} · recomputed {readable(self.recomputed_bytes)}"
        )
        return "\n".join([*text, *self.notes, *(f"\n{_RERUN}\n{table}" for table in self.reruns)])


_RERUN = "kept only while another checkpoint around it runs again in the backward pass:"


def _cells(r: Residual) -> tuple[str, ...]:
    name = ", ".join(r.names) or "(untagged)"
    shape = f"{r.dtype}[{','.join(map(str, r.shape))}]"
    shape = f"{r.count} x {shape}" if r.count > 1 else shape
    return name, shape, readable(r.bytes_per_layer), str(r.layers), readable(r.bytes), r.state, r.reason
