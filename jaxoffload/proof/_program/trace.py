"""A trace of `jax.profiler`: what each stream of a GPU did, which host copies there were, and what hid them.

A copy is hidden while a kernel, of whatever stream, runs beside it. Copies within the device count as kernels.
"""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

DIRECTIONS = {"d2h": "MemcpyD2H", "h2d": "MemcpyH2D"}

Span = tuple[float, float]  # start and end, nanoseconds


class Event(NamedTuple):
    """Work of one stream from `start` to `end`, in nanoseconds; `op` is the HLO instruction, `module` the program."""

    stream: str
    name: str
    op: str
    start: float
    end: float
    module: str = ""

    @property
    def direction(self) -> str | None:
        """Which way it copies between device and host, "d2h" or "h2d"; None for all else."""
        return next((direction for direction, kind in DIRECTIONS.items() if self.name.startswith(kind)), None)


def traced(run: Callable[[], Any]) -> list[Event]:
    """Run, and return what the streams of the first GPU did meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        return read(Path(folder))


def read(folder: Path) -> list[Event]:
    """Return the events of the first GPU, from the latest trace in a folder of `jax.profiler.trace`.

    Raises:
      FileNotFoundError: there is no trace.
    """
    path = max(folder.glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime, default=None)
    if path is None:
        raise FileNotFoundError(f"no *.xplane.pb in {folder}")
    return events_of(jax.profiler.ProfileData.from_file(str(path)))


def events_of(profile: Any) -> list[Event]:
    """Return the events of the first GPU's streams, for all do the same; empty if there is none."""
    gpu = next((plane for plane in profile.planes if "GPU" in plane.name), None)
    events = []
    for line in (line for line in gpu.lines if line.name.startswith("Stream")) if gpu else ():
        for e in line.events:
            stats = dict(e.stats)
            op, module = (str(stats.get(key, "")) for key in ("hlo_op", "hlo_module"))
            events.append(Event(line.name, e.name, op, e.start_ns, e.end_ns, module))
    return events


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, in order, none touching another."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def overlap(a: list[Span], b: list[Span]) -> float:
    """Return how long both of two unions last."""
    return length(a) + length(b) - length(merged([*a, *b]))


def length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)


def ms_of(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 3)
