"""What a run reports: lines on the terminal, metrics.jsonl and TensorBoard; memory, and the model FLOP utilisation."""

import json
import math
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from models.config import Config

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


def memory_limit(device: jax.Device) -> float:
    """Return the bytes that JAX may use of a device; infinity if the backend does not say."""
    return (device.memory_stats() or {}).get("bytes_limit", math.inf)


def peak_memory(device: jax.Device) -> dict[str, float | None]:
    """Return the peaks of a device's memory, if the backend measures it, and of this process's, with pinned memory."""
    on_device = (device.memory_stats() or {}).get("peak_bytes_in_use")
    on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
    return {"device_peak_gib": on_device and on_device / 2**30, "host_peak_gib": on_host}


def say(text: str) -> None:
    """Print, in process 0 only, above the progress bar if there is one."""
    if jax.process_index() == 0:
        with tqdm.external_write_mode():
            print(text, flush=True)


class Metrics:
    """A run's metrics.jsonl, TensorBoard's files if `train.tensorboard`, and its lines; process 0 writes them."""

    def __init__(self, config: Config, start: int):
        """Drop what a killed run wrote after the checkpoint at step `start`: this run writes it once more."""
        self.path, self.steps, self.events = Path(config.train.out) / "metrics.jsonl", config.train.steps, None
        if jax.process_index():
            return
        kept = [record for record in read(self.path) if start and record["step"] <= start]
        beside = self.path.with_suffix(".part")
        beside.write_text("".join(map(_line, kept)))
        beside.replace(self.path)
        if config.train.tensorboard:
            import tensorboardX  # of the extra `tensorboard`

            folder = str(self.path.with_name("tensorboard"))
            self.events = tensorboardX.SummaryWriter(folder, purge_step=start + 1 if start else 0)

    def write(self, record: Record) -> None:
        if jax.process_index():
            return
        with self.path.open("a") as file:
            file.write(_line(record))
        say(progress_line(record, self.steps))
        if self.events:
            for key, value in record.items():
                if key != "step" and value is not None:
                    self.events.add_scalar(key, value, record["step"])
            self.events.flush()


def read(path: Path) -> list[Record]:
    """Return the records of a metrics.jsonl; a killed run can leave half a line at the end, which is left out."""
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _line(record: Record) -> str:
    """Return a record as a line of JSON, with null for NaN and infinity, which JSON does not have."""
    finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
    return json.dumps(finite) + "\n"


def progress_line(record: Record, steps: int) -> str:
    """Return one line for the terminal, with the names that are in metrics.jsonl."""
    short = lambda value: f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    shown = [f"{key} {short(value)}" for key, value in record.items() if key != "step" and value is not None]
    return "  ".join([f"step {record['step']}/{steps}", *shown])
