"""profile(): of a running step each host copy, by residual and layer, and how much of it nothing hid."""

import dataclasses
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ..._text import readable
from .._program.hlo import Copy, host_copies, instructions
from .._program.target import target_of
from .._program.trace import DIRECTIONS, Event, Span, length, merged, ms_of, overlap, read, traced


@dataclasses.dataclass(frozen=True)
class Move:
    """One copy between device and host.

    Attributes:
      residual: its names; empty where neither trace nor program says whose it is.
      layer: in the order in which layers run, of each scan or chain; None where it is not known, or the row is empty.
      direction: "d2h" or "h2d".
      at_ms: since the step began.
      exposed_ms: in which no kernel ran. What two copies have in common counts for the one that began before.
    """

    residual: str
    layer: int | None
    direction: str
    bytes: int
    at_ms: float
    ms: float
    exposed_ms: float
    stream: str

    @property
    def gb_per_s(self) -> float:
        return round(self.bytes / self.ms / 1e6, 1) if self.ms else 0.0


class Total(NamedTuple):
    """Of one residual's copies one way, or of all."""

    residual: str
    direction: str
    copies: int
    bytes: int
    ms: float
    exposed_ms: float
    streams: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Profile:
    """What one device did in the last of the profiled steps; print it.

    Attributes:
      step_ms: the median of all profiled steps; `spread_ms`: the fastest and the slowest.
      compute_ms: in which a kernel ran; collective_ms: of these, in which one of NCCL's did.
      moves: all copies between device and host.
      kernels: from when to when some kernel ran, in ms since the step began; gaps below 10 us are left out.
    """

    device: str
    step_ms: float
    spread_ms: tuple[float, float]
    compute_ms: float
    collective_ms: float
    moves: tuple[Move, ...]
    kernels: tuple[tuple[float, float], ...]

    @property
    def exposed_ms(self) -> float:
        """Of copies, in which no kernel ran."""
        return round(sum(move.exposed_ms for move in self.moves), 3)

    @property
    def unattributed_ms(self) -> float:
        return round(sum(move.ms for move in self.moves if not move.residual), 3)

    @property
    def totals(self) -> list[Total]:
        """By residual and direction, and then of each direction."""
        groups: dict[tuple[str, str], list[Move]] = defaultdict(list)
        for move in self.moves:
            groups[move.residual or "(not attributed)", move.direction].append(move)
        for direction in DIRECTIONS:
            groups["all", direction] = [move for move in self.moves if move.direction == direction]
        total = lambda moves, what: round(sum(getattr(move, what) for move in moves), 3)
        return [
            Total(
                *key,
                len(moves),
                total(moves, "bytes"),
                total(moves, "ms"),
                total(moves, "exposed_ms"),
                tuple(sorted({move.stream for move in moves})),
            )
            for key, moves in groups.items()
        ]

    def to_json(self) -> str:
        more = {"exposed_ms": self.exposed_ms, "unattributed_ms": self.unattributed_ms}
        return json.dumps({**dataclasses.asdict(self), **more, "totals": [t._asdict() for t in self.totals]})

    def __str__(self) -> str:
        head = f"{'residual':28} {'':4} {'copies':>6} {'bytes':>10} {'ms':>9} {'GB/s':>6} {'exposed ms':>10}  streams"
        lines = [f"{self.device}: {self.step_ms} ms a step ({self.spread_ms[0]} to {self.spread_ms[1]})", head]
        for t in self.totals:
            rate = t.bytes / t.ms / 1e6 if t.ms else 0.0
            numbers = f"{t.copies:6} {readable(t.bytes):>10} {t.ms:9.2f} {rate:6.1f} {t.exposed_ms:10.2f}"
            lines.append(f"{t.residual:28} {t.direction:4} {numbers}  {short(t.streams)}")
        lines.append(f"kernels {self.compute_ms} ms, of these collectives {self.collective_ms} ms")
        return "\n".join(lines)


def short(streams: Sequence[str]) -> str:
    """The numbers of `Stream #14(MemcpyH2D,Compute)` and others."""
    return ", ".join(stream.removeprefix("Stream ").partition("(")[0] for stream in streams)


def profile(f: Callable[..., Any], *args: Any, steps: int = 3) -> Profile:
    """Runs `f`, compiled with `compiler_options()`, and reads where its host copies went from a `jax.profiler` trace.

    Args:
      f: a training step, or a loss, which is differentiated; as for `verify`.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s; as for `verify`. Each step gets the same.
      steps: how many are profiled, after one that is not.

    Raises:
      NotImplementedError: JAX's default backend is no GPU.
      ValueError: `steps` is less than 1.
    """
    if steps < 1:
        raise ValueError(f"profile: steps must be at least 1, got {steps}")
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"profile: needs an NVIDIA GPU; JAX's default backend is {jax.default_backend()}")
    target = target_of(f, args)
    program = target.fast_program
    jax.block_until_ready(program(*target.arrays))

    def run() -> None:
        for _ in range(steps):
            jax.block_until_ready(program(*target.arrays))

    events = next(iter(traced(run).values()), [])  # of the first device; all do the same
    return profile_of(events, host_copies(list(instructions(program.as_text()))), steps, jax.devices()[0].device_kind)


def read_profile(folder: Path, program: jax.stages.Compiled, steps: int = 1) -> Profile:
    """The profile of a program that ran, among others, while your own `jax.profiler.trace` was on.

    Args:
      folder: that the trace was written to; the latest one counts.
      program: `jax.jit(step, compiler_options=compiler_options()).lower(...).compile()`.
      steps: how often it ran.

    Raises:
      FileNotFoundError: there is no trace.
      ValueError: the program did not run on a GPU meanwhile.
    """
    text = str(program.as_text())
    name = text.removeprefix("HloModule ").partition(",")[0]
    events = next(iter(read(folder).values()), [])  # of the first device; all do the same
    if not (own := [e for e in events if e.module == name]):
        raise ValueError(f"read_profile: in the trace in {folder} {name} did not run on a GPU")
    return profile_of(own, host_copies(list(instructions(text))), steps, jax.devices()[0].device_kind)


def profile_of(events: Sequence[Event], copies: dict[str, Copy], steps: int, device: str) -> Profile:
    """The profile that a trace of so many equal steps, one after another, holds."""
    if not events:
        raise ValueError("profile: nothing ran on the GPU")
    each = _steps(sorted(events, key=lambda e: e.start), steps)
    lasted = [max(e.end for e in step) - step[0].start for step in each]
    last = each[-1]
    compute = merged((e.start, e.end) for e in last if not e.is_host_copy)
    return Profile(
        device,
        ms_of(statistics.median(lasted)),
        (ms_of(min(lasted)), ms_of(max(lasted))),
        ms_of(length(compute)),
        ms_of(length(merged((e.start, e.end) for e in last if e.name.startswith("nccl")))),
        tuple(_moves(last, copies, compute)),
        tuple((ms_of(a - last[0].start), ms_of(b - last[0].start)) for a, b in _without_gaps(compute, 10_000)),
    )


def _without_gaps(spans: Sequence[Span], gap: float) -> list[Span]:
    """Spans in order, those together that are less than `gap` ns apart."""
    return [(a, b - gap) for a, b in merged((a, b + gap) for a, b in spans)]


def _steps(events: Sequence[Event], steps: int) -> list[Sequence[Event]]:
    """Each step's events: all steps have as many, and none begins before the one before it has ended."""
    count, rest = divmod(len(events), steps)
    if rest:
        raise ValueError(f"profile: the trace has {len(events)} events, which are not {steps} equal steps")
    return [events[i * count : (i + 1) * count] for i in range(steps)]


def _moves(events: Sequence[Event], copies: dict[str, Copy], compute: Any) -> list[Move]:
    layers, begin, moves, seen = _layers(events, copies), events[0].start, [], events[0].start
    for e in events:
        if e.is_host_copy:
            copy, rest = copies.get(e.op), [(max(e.start, seen), max(e.end, seen))]
            seen = max(e.end, seen)
            moves.append(
                Move(
                    residual=copy.residual if copy else "",
                    layer=layers.get(e),
                    direction=_direction(e),
                    bytes=copy.nbytes if copy else 0,
                    at_ms=ms_of(e.start - begin),
                    ms=ms_of(e.end - e.start),
                    exposed_ms=ms_of(length(rest) - overlap(rest, compute)),
                    stream=e.stream,
                )
            )
    return moves


def _direction(e: Event) -> str:
    return next(direction for direction, kind in DIRECTIONS.items() if e.name.startswith(kind))


def _layers(events: Sequence[Event], copies: dict[str, Copy]) -> dict[Event, int]:
    """The layer of each copy, where it has one. A scan's loops have one turn with an empty row, the first there and the
    last back; behind it, or before it, the last layer's may be copied alone. The layers come back in reverse."""
    groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for e in events:
        if e.is_host_copy and e.op in copies:
            groups[copies[e.op].residual, _direction(e)].append(e)
    found = {}
    for (_, direction), those in groups.items():
        for run in _runs(those, copies):
            empty = any(copies[e.op].is_row for e in run)
            for number, e in enumerate(run if direction == "d2h" else reversed(run)):
                if number >= empty:
                    found[e] = number - empty
    return found


def _runs(events: Sequence[Event], copies: dict[str, Copy]) -> Iterator[list[Event]]:
    """Of one residual's copies one way: those of each scan or chain, each time it ran."""
    sizes = Counter((copy.residual, copy.to_host, copy.loop) for copy in copies.values())
    in_loops = any(copies[e.op].is_row for e in events)
    run: list[Event] = []
    loop, left = None, 0
    for e in events:
        copy = copies[e.op]
        if in_loops and not copy.is_row:  # the last layer's
            if copy.to_host:
                yield [*run, e]
                run, loop = [], None
            else:
                yield from [run] if run else []
                run, loop = [e], None
            continue
        # XLA takes the first turn of an odd number out of the loop: that one belongs to the loop behind it.
        inside = None if copy.is_row and copy.turns == 1 else copy.loop
        if run and loop is not None and (inside != loop or not left):
            yield run
            run, loop = [], None
        if inside is not None and loop is None:
            loop, left = inside, sizes[copy.residual, copy.to_host, copy.loop] * copy.turns
        left -= inside is not None
        run.append(e)
    if run:
        yield run
