"""A trace of `jax.profiler`: what each stream of a GPU did, which host copies there were, and what hid them.

A copy is hidden while a kernel, of whatever stream, runs beside it. Copies within the device count as kernels.
"""

import itertools
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

DIRECTIONS = {"d2h": "MemcpyD2H", "h2d": "MemcpyH2D"}

Span = tuple[float, float]  # start and end, nanoseconds


class Event(NamedTuple):
    """What one stream did from `start` to `end`, in nanoseconds; `op` is the HLO instruction, `module` the program."""

    stream: str
    name: str
    op: str
    start: float
    end: float
    module: str = ""

    @property
    def is_host_copy(self) -> bool:
        return self.name.startswith(tuple(DIRECTIONS.values()))


def traced(run: Callable[[], Any]) -> dict[str, list[Event]]:
    """GPU -> what its streams did while `run` ran."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        return read(Path(folder))


def read(folder: Path) -> dict[str, list[Event]]:
    """GPU -> events of its streams, of the latest trace in a folder of `jax.profiler.trace`."""
    path = max(folder.glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime, default=None)
    if path is None:
        raise FileNotFoundError(f"no *.xplane.pb in {folder}")
    return events_of(jax.profiler.ProfileData.from_file(str(path)))


def events_of(profile: Any) -> dict[str, list[Event]]:
    gpus = {}
    for plane in profile.planes:
        lines = [line for line in plane.lines if line.name.startswith("Stream")]
        if "GPU" in plane.name and lines:
            gpus[plane.name] = [_event(line.name, e) for line in lines for e in line.events]
    return gpus


def _event(stream: str, e: Any) -> Event:
    stats = dict(e.stats)
    op, module = (str(stats.get(key, "")) for key in ("hlo_op", "hlo_module"))
    return Event(stream, e.name, op, e.start_ns, e.end_ns, module)


def summary(events: list[Event]) -> dict[str, Any]:
    """Milliseconds: of the step; for each direction `busy` and `exposed`; `waits`, where a kernel follows a gap on its
    own stream, the longest first, each with the device copy that ended there."""
    compute = merged((e.start, e.end) for e in events if not e.is_host_copy)
    copies = {
        direction: merged((e.start, e.end) for e in events if e.name.startswith(kind))
        for direction, kind in DIRECTIONS.items()
    }
    exposed = {direction: length(spans) - overlap(spans, compute) for direction, spans in copies.items()}
    return {
        "step_ms": ms_of(max(e.end for e in events) - min(e.start for e in events)),
        **{f"{d}_ms": ms_of(length(spans)) for d, spans in copies.items()},
        **{f"{d}_exposed_ms": ms_of(spent) for d, spent in exposed.items()},
        "copies_ms": ms_of(sum(map(length, copies.values()))),
        "exposed_ms": ms_of(sum(exposed.values())),
        "waits": waits(events),
    }


def in_the_way(events: list[Event], spared: Collection[str] = ()) -> dict[str, str]:
    """Streams that both compute and copy to or from the host -> how many copies, by which instructions, beside which
    kernels; what the instructions do that are spared does not count."""
    kernels: dict[str, set[str]] = {}
    counted = [e for e in events if e.op not in spared]
    for e in counted:
        if not e.name.startswith(("Memcpy", "Memset")):
            kernels.setdefault(e.stream, set()).add(e.name)
    copies: dict[str, list[str]] = {}
    for e in counted:
        if e.is_host_copy and e.stream in kernels:
            copies.setdefault(e.stream, []).append(e.op)
    first = lambda names: ", ".join(sorted(set(names))[:3])
    return {stream: f"{len(by)} copies by {first(by)} beside {first(kernels[stream])}" for stream, by in copies.items()}


def by_kernel(events: list[Event], count: int = 12) -> dict[str, float]:
    """Milliseconds of the kernels that take the longest, each in all its runs."""
    spent: dict[str, float] = {}
    for e in events:
        spent[e.name] = spent.get(e.name, 0.0) + e.end - e.start
    return {name: ms_of(spent[name]) for name in sorted(spent, key=spent.__getitem__, reverse=True)[:count]}


def waits(events: list[Event], count: int = 5) -> list[dict[str, Any]]:
    """The longest gaps of the busiest stream, and the copy on another stream whose end is nearest to each gap's."""
    kernels = sorted((e for e in events if not e.name.startswith("Memcpy")), key=lambda e: e.start)
    busy = dict.fromkeys((e.stream for e in kernels), 0.0)
    for e in kernels:
        busy[e.stream] += e.end - e.start
    busiest = max(busy, key=busy.__getitem__)
    main = [e for e in kernels if e.stream == busiest]
    others = [e for e in events if e.name.startswith("Memcpy")]
    gaps = sorted(itertools.pairwise(main), key=lambda pair: pair[0].end - pair[1].start)[:count]
    found = []
    for before, after in gaps:
        last = min(others, key=lambda e: abs(e.end - after.start), default=None)
        copy = f"{last.name} {last.op}".strip() if last else None
        found.append({"ms": ms_of(after.start - before.end), "before": after.op or after.name, "copy": copy})
    return found


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, in order, none touching another."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def overlap(a: list[Span], b: list[Span]) -> float:
    """How long both of two unions last."""
    total, i = 0.0, 0
    for start, end in a:
        while i and b[i - 1][1] > start:
            i -= 1
        while i < len(b) and b[i][0] < end:
            total += max(0.0, min(end, b[i][1]) - max(start, b[i][0]))
            i += 1
    return total


def length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)


def ms_of(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 3)
