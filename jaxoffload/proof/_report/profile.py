"""profile(): each host copy of a running step, by residual and layer, and how much of it nothing hid."""

import dataclasses
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ..._jax import without_remat3
from ..._text import readable
from .._program.hlo import Copy, host_copies, parse
from .._program.target import target_of
from .._program.trace import DIRECTIONS, Event, Span, length, merged, ms_of, overlap, read, traced

WAY = {"d2h": 1, "h2d": -1}  # layers come back in reverse
GAP = 10_000  # ns: shorter gaps between kernels are left out


@dataclasses.dataclass(frozen=True)
class Move:
    """One copy between device and host.

    Attributes:
      residual: its names; empty where neither trace nor program says whose it is.
      layer: its number within its scan or chain, in the order in which layers run; None where it is not known, or the
        row is empty.
      direction: "d2h" or "h2d".
      at_ms: when it began, in ms since the step began.
      exposed_ms: how long no kernel ran beside it. What two copies share counts for the one that began first.
      microbatch: of those that `accumulate` interleaves, that with this residual; None elsewhere, and as for `layer`.

    Example:
      >>> from jaxoffload.proof import Move
      >>> Move("fc1", 3, "d2h", bytes=10**9, at_ms=0.0, ms=20.0, exposed_ms=0.0, stream="Stream #14").gb_per_s
      50.0
    """

    residual: str
    layer: int | None
    direction: str
    bytes: int
    at_ms: float
    ms: float
    exposed_ms: float
    stream: str
    microbatch: int | None = None

    @property
    def gb_per_s(self) -> float:
        return round(self.bytes / self.ms / 1e6, 1) if self.ms else 0.0


class Total(NamedTuple):
    """The sum over one residual's copies one way, or over all."""

    residual: str
    direction: str
    copies: int
    bytes: int
    ms: float
    exposed_ms: float
    streams: tuple[str, ...]

    @classmethod
    def of(cls, residual: str, direction: str, moves: Sequence[Move]) -> "Total":
        ms, exposed = (round(sum(each), 3) for each in ((m.ms for m in moves), (m.exposed_ms for m in moves)))
        streams = tuple(sorted({m.stream for m in moves}))
        return cls(residual, direction, len(moves), sum(m.bytes for m in moves), ms, exposed, streams)

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.ms / 1e6 if self.ms else 0.0

    @property
    def stream_numbers(self) -> str:
        """The numbers of `Stream #14(MemcpyH2D,Compute)` and others."""
        return ", ".join(stream.removeprefix("Stream ").partition("(")[0] for stream in self.streams)


@dataclasses.dataclass(frozen=True)
class Profile:
    """The work of one device in the last of the profiled steps; print it.

    Attributes:
      step_ms: the median of all profiled steps; `spread_ms`: the fastest and the slowest.
      compute_ms: how long a kernel ran; `collective_ms`: how long one of NCCL's did.
      moves: all copies between device and host.
      kernels: when some kernel ran, as (start, end) in ms since the step began; gaps below 10 us are left out.

    Example:
      >>> from jaxoffload.proof import Move, Profile
      >>> move = Move("fc1", 3, "d2h", bytes=10**9, at_ms=0.0, ms=20.0, exposed_ms=5.0, stream="Stream #14")
      >>> Profile("H200", 40.0, (39.0, 41.0), 35.0, 0.0, (move,), ((5.0, 40.0),)).exposed_ms
      5.0
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
        """Milliseconds of copies beside which no kernel ran."""
        return round(sum(move.exposed_ms for move in self.moves), 3)

    @property
    def unattributed_ms(self) -> float:
        return round(sum(move.ms for move in self.moves if not move.residual), 3)

    @property
    def exposed_by_microbatch(self) -> dict[int, float]:
        """Milliseconds of each microbatch's copies, where `accumulate` interleaves some; its first and its last have
        one pass alone to hide behind."""
        sums: dict[int, float] = defaultdict(float)
        for move in self.moves:
            if move.microbatch is not None:
                sums[move.microbatch] += move.exposed_ms
        return dict(sorted(sums.items()))

    @property
    def totals(self) -> list[Total]:
        """The totals by residual and direction, and then by direction."""
        groups: dict[tuple[str, str], list[Move]] = defaultdict(list)
        for move in self.moves:
            groups[move.residual or "(not attributed)", move.direction].append(move)
        for direction in DIRECTIONS:
            groups["all", direction] = [move for move in self.moves if move.direction == direction]
        return [Total.of(*key, moves) for key, moves in groups.items()]

    def to_json(self) -> str:
        more = {"exposed_ms": self.exposed_ms, "unattributed_ms": self.unattributed_ms}
        return json.dumps({**dataclasses.asdict(self), **more, "totals": [t._asdict() for t in self.totals]})

    def __str__(self) -> str:
        head = f"{'residual':28} {'':4} {'copies':>6} {'bytes':>10} {'ms':>9} {'GB/s':>6} {'exposed ms':>10}  streams"
        lines = [f"{self.device}: {self.step_ms} ms per step ({self.spread_ms[0]} to {self.spread_ms[1]})", head]
        for t in self.totals:
            numbers = f"{t.copies:6} {readable(t.bytes):>10} {t.ms:9.2f} {t.gb_per_s:6.1f} {t.exposed_ms:10.2f}"
            lines.append(f"{t.residual:28} {t.direction:4} {numbers}  {t.stream_numbers}")
        if exposed := list(self.exposed_by_microbatch.items()):
            of_ends = ", ".join(
                f"of microbatch {number} {ms:.2f}" for number, ms in dict((exposed[0], exposed[-1])).items()
            )
            between = [ms for _, ms in exposed[1:-1]]
            lines.append(f"exposed ms {of_ends}" + (f", of each between at most {max(between):.2f}" if between else ""))
        lines.append(f"kernels {self.compute_ms} ms, of these collectives {self.collective_ms} ms")
        return "\n".join(lines)


@without_remat3
def profile(f: Callable[..., Any], *args: Any, steps: int = 3) -> Profile:
    """Run `f`, compiled with `compiler_options()`, under `jax.profiler` and read where its host copies went.

    Args:
      f: a training step, or a loss, which is differentiated; as for `verify`.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s; as for `verify`. Each step gets the same.
      steps: how many are profiled, after one that is not; at least 1.

    Returns:
      A `Profile`: times in ms, sizes in bytes, of the first GPU.

    Raises:
      NotImplementedError: JAX's default backend is not a GPU.
      ValueError: `steps` is less than 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload import Policy, profile, scan, tag
      >>> layer = lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None)
      >>> loss = lambda w, x: jnp.mean(scan(layer, x, w, policy=Policy({"fc1": "offload"}))[0])
      >>> print(profile(loss, jnp.ones((4, 1024, 1024)), jnp.ones((1024, 1024))))  # doctest: +SKIP
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

    return profile_of(traced(run), host_copies(target.module), steps, jax.devices()[0].device_kind)


def read_profile(folder: Path, program: jax.stages.Compiled, steps: int = 1) -> Profile:
    """Return the profile of a program that ran, perhaps among others, under your own `jax.profiler.trace`.

    Args:
      folder: that the trace was written to; the latest one counts.
      program: `jax.jit(step, compiler_options=compiler_options()).lower(...).compile()`.
      steps: how often it ran meanwhile.

    Returns:
      A `Profile`: times in ms, sizes in bytes, of the first GPU.

    Raises:
      FileNotFoundError: there is no trace.
      ValueError: the program did not run on a GPU meanwhile, or `steps` is less than 1.

    Example:
      >>> from pathlib import Path
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import compiler_options
      >>> from jaxoffload.proof import read_profile
      >>> step = jax.jit(jnp.sin, compiler_options=compiler_options()).lower(jnp.ones(8)).compile()  # or yours
      >>> with jax.profiler.trace("trace"):  # doctest: +SKIP
      ...     jax.block_until_ready(step(jnp.ones(8)))
      >>> print(read_profile(Path("trace"), step))  # doctest: +SKIP
    """
    if steps < 1:
        raise ValueError(f"read_profile: steps must be at least 1, got {steps}")
    module = parse(str(program.as_text()))
    events = [e for e in read(folder) if e.module == module.name]
    if not events:
        raise ValueError(f"read_profile: in the trace in {folder} {module.name} did not run on a GPU")
    return profile_of(events, host_copies(module), steps, jax.devices()[0].device_kind)


def profile_of(events: Sequence[Event], copies: dict[str, Copy], steps: int, device: str) -> Profile:
    """Return the profile of so many equal steps, one after another, from their events."""
    if not events:
        raise ValueError("profile: nothing ran on the GPU")
    each = _steps(sorted(events, key=lambda e: e.start), steps)
    lasted = [max(e.end for e in step) - step[0].start for step in each]
    last = each[-1]
    compute = merged((e.start, e.end) for e in last if not e.direction)
    collective = merged((e.start, e.end) for e in last if e.name.startswith("nccl"))
    since = lambda ns: ms_of(ns - last[0].start)
    return Profile(
        device=device,
        step_ms=ms_of(statistics.median(lasted)),
        spread_ms=(ms_of(min(lasted)), ms_of(max(lasted))),
        compute_ms=ms_of(length(compute)),
        collective_ms=ms_of(length(collective)),
        moves=tuple(_moves(last, copies, compute)),
        kernels=tuple((since(a), since(b - GAP)) for a, b in merged((a, b + GAP) for a, b in compute)),
    )


def _steps(events: Sequence[Event], steps: int) -> list[Sequence[Event]]:
    """Split events into steps: all have as many, and none begins before the one before it has ended."""
    count, rest = divmod(len(events), steps)
    if rest:
        raise ValueError(f"profile: the trace has {len(events)} events, which are not {steps} equal steps")
    return list(itertools.batched(events, count))


def _moves(events: Sequence[Event], copies: dict[str, Copy], compute: list[Span]) -> Iterator[Move]:
    places, seen = _places(events, copies), events[0].start
    for e in (e for e in events if e.direction):
        copy, rest = copies.get(e.op), [(max(e.start, seen), max(e.end, seen))]
        seen = max(e.end, seen)
        layer, microbatch = places.get(e, (None, None))
        yield Move(
            residual=copy.residual if copy else "",
            layer=layer,
            direction=str(e.direction),
            bytes=copy.nbytes if copy else 0,
            at_ms=ms_of(e.start - events[0].start),
            ms=ms_of(e.end - e.start),
            exposed_ms=ms_of(length(rest) - overlap(rest, compute)),
            stream=e.stream,
            microbatch=microbatch,
        )


_Taken = tuple[Event, int | None]  # a copy of a row of a stack, or of a whole array


def _places(events: Sequence[Event], copies: dict[str, Copy]) -> dict[Event, tuple[int, int | None]]:
    """Return the layer and the microbatch of each copy, except of padding rows."""
    groups: dict[tuple[str, str, int], list[_Taken]] = defaultdict(list)
    rows = {op: itertools.cycle(copy.rows or [None]) for op, copy in copies.items()}
    for e in (e for e in events if e.direction and e.op in copies):
        row = next(rows[e.op])
        if row is None or row > 0:
            groups[copies[e.op].residual, str(e.direction), copies[e.op].microbatches].append((e, row))
    starts = lambda way: [e.start for (_, w, n), taken in groups.items() if w == way and n > 1 for e, _ in taken]
    first_back, last_put = min(starts("h2d"), default=math.inf), max(starts("d2h"), default=0)
    places: dict[Event, tuple[int, int | None]] = {}
    for (residual, direction, microbatches), taken in groups.items():
        runs = list(_runs(taken, direction))
        put, back = (groups.get((residual, way, microbatches), []) for way in ("d2h", "h2d"))
        in_first = not put or put[0][0].start < first_back
        in_last = not back or back[-1][0].start > last_put
        numbers = _microbatches(len(runs), microbatches, in_first, in_last)
        for number, run in zip(numbers, runs, strict=True):
            places |= {e: (layer, number) for (e, _), layer in zip(run, _layers(run, direction), strict=True)}
    return places


def _microbatches(runs: int, microbatches: int, in_first: bool, in_last: bool) -> list[int | None]:
    """Return the microbatch of each run of a residual's copies one way.

    `in_first`, `in_last`: whether copies run where only the first forward and the last backward pass do. A residual
    that is not copied there is not copied in that microbatch. If none is in the first one, nothing tells.
    """
    for first in (int(not in_first), 1):
        others = microbatches - first - (not in_last)
        if microbatches > 1 and others > 0 and runs % others == 0 and (others > 1 or runs == 1):
            return [first + number * others // runs for number in range(runs)]
    return [None] * runs


def _runs(taken: Sequence[_Taken], direction: str) -> Iterator[Sequence[_Taken]]:
    """Split one residual's copies one way by the scan or chain that makes them, each time it runs.

    The rows of a scan's stack are in order to the host, and in reverse back. Its last layer's copy may stand alone,
    behind them to the host and before them back. A chain has no stack, and each of its copies a name of its own.
    """
    if any(row is not None for _, row in taken):
        places = [WAY[direction] * (math.inf if row is None else row) for _, row in taken]
    else:
        names = list(dict.fromkeys(e.op for e, _ in taken))
        places = [names.index(e.op) for e, _ in taken]
    begins = [i for i in range(len(taken)) if i == 0 or places[i] <= places[i - 1]]
    return (taken[a:b] for a, b in itertools.pairwise([*begins, len(taken)]))


def _layers(run: Sequence[_Taken], direction: str) -> list[int]:
    """Return the layer of each row; row 0 of a stack is padding."""
    if last := max((row or 0 for _, row in run), default=0):
        return [last if row is None else row - 1 for _, row in run]
    return list(range(len(run)))[:: WAY[direction]]
