"""What a run reports: memory, peak FLOP/s, progress lines, metrics.jsonl and the loss curve."""

import io
import json
import math
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxoffload import Problem
from models.config import Config
from models.files import append, atomic
from models.progress import show
from models.reading import ConfigError, as_config_error
from models.text import readable

Record = Mapping[str, Any]  # step, and loss, learning_rate, ... or valid_loss

# Dense bf16 FLOP/s by device_kind. Whole names: an H100 PCIe, an H100 NVL and a GB200 have other peaks than their kin.
_PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA GB300": 2500e12,
}


def mfu(flops_per_second: float, device_kind: str) -> float | None:
    """Return the model FLOP utilisation of a device; None where its peak is not known.

    `flops_per_second`: the model's, on one device; recomputation does not count.
    """
    peak = _PEAK_FLOPS.get(device_kind)
    return None if peak is None else flops_per_second / peak


def device_peak_bytes(device: jax.Device) -> int | None:
    """Return the peak of a device's memory in use, in bytes; None if the backend does not measure it."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def host_peak_bytes() -> int:
    """Return the peak of this process's resident memory, in bytes, pinned memory included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def progress_line(record: Record, steps: int) -> str:
    """Return one line for the terminal; memory is the peak so far."""
    parts = [f"step {record['step']}/{steps}"]
    if "valid_loss" in record:
        return "  ".join([*parts, f"valid loss {record['valid_loss']:.4f}"])
    parts += [
        f"loss {record['loss']:.4f}",
        f"lr {record['learning_rate']:.2e}",
        f"grad {record['grad_norm']:.2f}",
        f"{record['tokens_per_second']:,.0f} tokens/s",
    ]
    if "expert_load" in record:
        parts.append(f"load {record['expert_load']:.2f}")
    if record.get("dropped"):
        parts.append(f"dropped {record['dropped']:.1%}")
    if record["mfu"] is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if record["device_peak_bytes"] is not None:
        parts.append(f"device {readable(record['device_peak_bytes'])}")
    return "  ".join([*parts, f"host {readable(record['host_peak_bytes'])}"])


class Journal(NamedTuple):
    """A run's metrics.jsonl, loss.png beside it, and the lines on the terminal; process 0 writes them."""

    path: Path
    config: Config
    unigram: float  # the loss of a model that sees no context
    events: Callable[[Record], None] = lambda record: None  # of models/tensorboard.py

    def begin(self, start: int) -> None:
        """Drop what a killed run wrote after the checkpoint at step `start`: this run writes it once more."""
        if jax.process_index() == 0:
            kept = [record for record in read(self.path) if start and record["step"] <= start]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic(self.path) as file:
                file.write("".join(map(_line, kept)).encode())

    def write(self, record: Record) -> None:
        """Append a record to metrics.jsonl, and print it."""
        if jax.process_index() == 0:
            show(progress_line(record, self.config.train.steps))
            append(self.path, _line(record).encode())
            self.events(record)

    def draw(self) -> None:
        """Write loss.png."""
        if jax.process_index() == 0:
            title = f"{self.path.parent.name}: {self.config.model.layers} layers of {self.config.model.d_model}"
            curve = loss_curve(read(self.path), title, self.unigram, self.config.model.vocab_size)
            with atomic(self.path.with_name("loss.png")) as file:
                file.write(curve)


def read(path: Path) -> list[Record]:
    """Return the records of a metrics.jsonl, without a damaged last one: a killed run can leave half a line.

    Raises:
      ConfigError: another line is damaged, or the file cannot be read.
    """
    with as_config_error("train.out", str(path.parent), f"a folder whose {path.name} is a file that can be read"):
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line))
        except ValueError as error:
            if number < len(lines):
                message = f"{path}:{number} is not a record ({error}); delete that line to continue"
                raise ConfigError([Problem("train.out", message)]) from error
    return records


def _record(line: bytes) -> Record:
    record = json.loads(line)
    if not (line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int)):
        raise ValueError("not an object with a step")
    return record


def loss_curve(records: Sequence[Record], title: str, unigram: float, vocab_size: int) -> bytes:
    """Return a PNG of training and validation loss by step, with the baselines of models without context."""
    # Imported here, because that takes as long as the first steps of a small run.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for key, label, style in (("loss", "training", "-"), ("valid_loss", "validation", "o-")):
        points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
        if points:  # matplotlib would make a categorical axis of an empty curve
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.axhline(unigram, color="grey", linestyle="--", label=f"unigram baseline {unigram:.2f}")
    axes.axhline(math.log(vocab_size), color="lightgrey", linestyle=":", label=f"ln({vocab_size})")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    png = io.BytesIO()
    figure.savefig(png, dpi=120)
    return png.getvalue()


def _line(record: Record) -> str:
    """Return a record as a line of JSON, with null for NaN and infinity, which JSON does not have."""
    finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
