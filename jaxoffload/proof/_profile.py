"""profile(): each host copy of a running step, by residual, and how much of it nothing hid."""

import dataclasses
import itertools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._compiler_options import compiler_options
from .._jax import without_remat3
from .._policy import check_call
from .._text import readable
from ._program.hlo import Copy, host_copies, parse
from ._program.target import target_of
from ._program.trace import DIRECTIONS, Event, Span, length, merged, ms_of, overlap, read


@dataclasses.dataclass(frozen=True)
class Move:
    """One copy between device and host.

    Attributes:
      residual: its names; empty where neither trace nor program says whose it is.
      direction: "d2h" or "h2d".
      at_ms: when it began, in ms since the step began.
      exposed_ms: how long no kernel ran beside it. What two copies share counts for the one that began first.

    Example:
      >>> from jaxoffload.proof import Move
      >>> move = Move("fc1", "d2h", bytes=10**9, at_ms=0.0, ms=20.0, exposed_ms=0.0, stream="Stream #14")
      >>> move.bytes / move.ms / 1e6  # GB/s
      50.0
    """

    residual: str
    direction: str
    bytes: int
    at_ms: float
    ms: float
    exposed_ms: float
    stream: str


class Total(NamedTuple):
    """The sum over one residual's copies one way, or over all."""

    residual: str
    direction: str
    copies: int
    bytes: int
    ms: float
    exposed_ms: float

    def __str__(self) -> str:
        rate = self.bytes / self.ms / 1e6 if self.ms else 0.0
        numbers = f"{self.copies:6} {readable(self.bytes):>10} {self.ms:9.2f} {rate:6.1f} {self.exposed_ms:10.2f}"
        return f"{self.residual:28} {self.direction:4} {numbers}"


@dataclasses.dataclass(frozen=True)
class Profile:
    """The work of one device in the last of the profiled steps; print it.

    Attributes:
      step_ms: the median of all profiled steps; `spread_ms`: the fastest and the slowest.
      compute_ms: how long a kernel ran; `collective_ms`: how long one of NCCL's did.
      moves: all copies between device and host, in the order in which they began.

    Example:
      >>> from jaxoffload.proof import Move, Profile
      >>> move = Move("fc1", "d2h", bytes=10**9, at_ms=0.0, ms=20.0, exposed_ms=5.0, stream="Stream #14")
      >>> Profile("H200", 40.0, (39.0, 41.0), 35.0, 0.0, (move,)).exposed_ms
      5.0
    """

    device: str
    step_ms: float
    spread_ms: tuple[float, float]
    compute_ms: float
    collective_ms: float
    moves: tuple[Move, ...]

    @property
    def exposed_ms(self) -> float:
        """Milliseconds of copies beside which no kernel ran."""
        return _sum(move.exposed_ms for move in self.moves)

    @property
    def totals(self) -> list[Total]:
        """The totals by residual and direction, and then by direction."""
        groups: dict[tuple[str, str], list[Move]] = defaultdict(list)
        for move in self.moves:
            groups[move.residual or "(not attributed)", move.direction].append(move)
        for direction in DIRECTIONS:
            groups["all", direction] = [move for move in self.moves if move.direction == direction]
        return [
            Total(*key, len(of), sum(m.bytes for m in of), _sum(m.ms for m in of), _sum(m.exposed_ms for m in of))
            for key, of in groups.items()
        ]

    def __str__(self) -> str:
        first = f"{self.device}: {self.step_ms} ms per step ({self.spread_ms[0]} to {self.spread_ms[1]})"
        head = f"{'residual':28} {'':4} {'copies':>6} {'bytes':>10} {'ms':>9} {'GB/s':>6} {'exposed ms':>10}"
        last = f"kernels {self.compute_ms} ms, of these collectives {self.collective_ms} ms"
        return "\n".join([first, head, *map(str, self.totals), last])


def _sum(ms: Iterable[float]) -> float:
    return round(sum(ms), 3)


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
      TypeError: f is not a function.
      NotImplementedError: JAX's default backend is not a GPU.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload import Policy, profile, scan, tag
      >>> layer = lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None)
      >>> loss = lambda w, x: jnp.mean(scan(layer, x, w, policy=Policy({"fc1": "offload"}))[0])
      >>> print(profile(loss, jnp.ones((4, 1024, 1024)), jnp.ones((1024, 1024))))  # doctest: +SKIP
    """
    check_call("profile", f, args)
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"profile: needs an NVIDIA GPU; JAX's default backend is {jax.default_backend()}")
    target = target_of(f, args)
    program = target.compiled(compiler_options)
    jax.block_until_ready(program(*target.arrays))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                jax.block_until_ready(program(*target.arrays))
        return read_profile(Path(folder), program, steps)


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
    each = _steps(sorted(events, key=lambda e: e.start), steps)
    lasted = [max(e.end for e in step) - step[0].start for step in each]
    last = each[-1]
    compute = merged((e.start, e.end) for e in last if not e.direction)
    collective = merged((e.start, e.end) for e in last if e.name.startswith("nccl"))
    return Profile(
        device=device,
        step_ms=ms_of(statistics.median(lasted)),
        spread_ms=(ms_of(min(lasted)), ms_of(max(lasted))),
        compute_ms=ms_of(length(compute)),
        collective_ms=ms_of(length(collective)),
        moves=tuple(_moves(last, copies, compute)),
    )


def _steps(events: Sequence[Event], steps: int) -> list[Sequence[Event]]:
    """Split events into steps: all have as many, and none begins before the one before it has ended."""
    count, rest = divmod(len(events), steps)
    if rest:
        raise ValueError(f"profile: the trace has {len(events)} events, which are not {steps} equal steps")
    return list(itertools.batched(events, count))


def _moves(events: Sequence[Event], copies: dict[str, Copy], compute: list[Span]) -> Iterator[Move]:
    seen = events[0].start
    for e in (e for e in events if e.direction):
        copy, rest = copies.get(e.op), [(max(e.start, seen), max(e.end, seen))]
        seen = max(e.end, seen)
        yield Move(
            residual=copy.residual if copy else "",
            direction=str(e.direction),
            bytes=copy.nbytes if copy else 0,
            at_ms=ms_of(e.start - events[0].start),
            ms=ms_of(e.end - e.start),
            exposed_ms=ms_of(length(rest) - overlap(rest, compute)),
            stream=e.stream,
        )
