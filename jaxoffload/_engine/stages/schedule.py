"""Pipeline stages: which microbatch passes through which layers, forward and backward, on each stage in each tick.

The layers are dealt in chunks: chunk c runs on stage c mod p, so a stage has v chunks, its virtual stages. A tick is
one chunk's forward pass beside another's backward pass (1F1B). Then activations move to the next stage, and cotangents
to the one before. With two stages and four microbatches:

    stage 0  forward   0 1 2 3 . . .
             backward  . . . 0 1 2 3
    stage 1  forward   . 0 1 2 3 . .
             backward  . . 0 1 2 3 .

The last chunk's backward pass runs in the tick after its forward pass, and chunk c's 2(pv - c) - 1 ticks after it. This
is Megatron-LM's interleaved schedule (https://arxiv.org/abs/2104.04473), in lockstep.
"""

import dataclasses
import string
from typing import Any, NamedTuple

TICK = "jaxoffload.tick"  # the scope of all that runs in one, for those who read a program


class Run(NamedTuple):
    """One microbatch's way through the layers of one chunk; both are numbered from 0."""

    microbatch: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The runs of a step on pipeline stages. `print` draws them.

    Attributes:
      stages: p, how many.
      virtual_stages: v, how many chunks of layers each has.
      microbatches: how many. With several chunks per stage p of them go together; if fewer are left, ticks are idle.

    Raises:
      ValueError: one of these is not a whole number above 0.

    Example:
      >>> from jaxoffload import Schedule
      >>> print(Schedule(stages=2, virtual_stages=1, microbatches=3))
      stage 0  forward   0 1 2 . . .
               backward  . . . 0 1 2
      stage 1  forward   . 0 1 2 . .
               backward  . . 0 1 2 .
    """

    stages: int
    virtual_stages: int
    microbatches: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"Schedule: {name} {value!r} is not allowed; use a whole number above 0")

    @property
    def chunks(self) -> int:
        return self.stages * self.virtual_stages

    @property
    def ticks(self) -> int:
        """How many ticks a step has."""
        return self.backward_tick(Run(self.microbatches - 1, 0)) + 1

    @property
    def forward_stop(self) -> int:
        """The tick after the last forward pass."""
        return self.forward_tick(Run(self.microbatches - 1, self.chunks - 1)) + 1

    def forward_tick(self, run: Run) -> int:
        """The tick of a run's forward pass: the one after that of the chunk before."""
        group, place = divmod(run.microbatch, self.stages)
        return group * self.chunks + place + run.chunk

    def backward_tick(self, run: Run) -> int:
        """The tick of a run's backward pass."""
        return self.forward_tick(run) + self.lag(run.chunk)

    def lag(self, chunk: int) -> int:
        """How many ticks after its forward pass a chunk's backward pass runs."""
        return 2 * (self.chunks - chunk) - 1

    def forward(self, stage: int, tick: int) -> Run | None:
        """Return what a stage runs forward in a tick."""
        return self._real(self.forward_of_many(stage, tick))

    def backward(self, stage: int, tick: int) -> Run | None:
        """Return what a stage runs backward in a tick."""
        first = self.chunks + self.stages - 1 - stage  # the tick of its first
        microbatch, turn = self._nth(tick - first)
        return self._real(Run(microbatch, (self.virtual_stages - 1 - turn) * self.stages + stage))

    def forward_of_many(self, stage: Any, tick: Any) -> Run:
        """Return what it would run forward if there were microbatches without end; the arguments may be traced."""
        microbatch, turn = self._nth(tick - stage)
        return Run(microbatch, turn * self.stages + stage)

    def _nth(self, number: Any) -> tuple[Any, Any]:
        """A stage's run by its number, as the microbatch, and which of the stage's chunks in turn: p microbatches go
        through each, then the next p."""
        group, rest = divmod(number, self.chunks)
        turn, place = divmod(rest, self.stages)
        return group * self.stages + place, turn

    def _real(self, run: Run) -> Run | None:
        return run if 0 <= run.microbatch < self.microbatches else None

    @property
    def steady(self) -> range:
        """The ticks between the first and the last ones: in these every stage runs both passes."""
        start = self.chunks + self.stages - 1
        full = lambda tick: all((*Tick(self, tick).forward, *Tick(self, tick).backward))
        return range(start, next(tick for tick in range(start, self.ticks + 1) if not full(tick)))

    def in_flight(self, stage: int) -> int:
        """How many runs of a stage are between the begin of their forward and the end of their backward pass, at most.

        With one chunk per stage, and microbatches enough, 2(p - s): one of them begins in the tick in which one ends.
        """
        begun = [self.forward(stage, tick) is not None for tick in range(self.ticks)]
        ended = [self.backward(stage, tick) is not None for tick in range(self.ticks)]
        return max(sum(begun[: tick + 1]) - sum(ended[:tick]) for tick in range(self.ticks))

    @property
    def slots(self) -> int:
        """How many runs a ring must hold in which every stage keeps a tick's run at the tick's number modulo this."""
        return self.lag(0) + 1

    @staticmethod
    def layers_in_flight(layers: Any) -> Any:
        """Return how many layers' offloaded residuals a device holds at once, whatever stages and microbatches are.

        One is written and one fetched; a chunk's last layer travels each way, with a piece of it. `layers`: those of a
        chunk, all of which offload.
        """
        return 4 + 2 / layers

    @property
    def bubble(self) -> float:
        """The part of a step that a stage idles. It is (p - 1) / (vM + p - 1) if p divides M or v is 1.

        All stages take a tick together. It lasts as long as its forward or its backward passes, or as both.
        """
        forward = sum(any(self.forward(stage, tick) for stage in range(self.stages)) for tick in range(self.ticks))
        return 1 - self.microbatches * self.virtual_stages / forward  # there are as many ticks with a backward pass

    def __str__(self) -> str:
        """Draw stages against ticks; with several chunks per stage a letter tells the first from the second."""

        def cell(run: Run | None) -> str:
            if run is None:
                return "."
            return f"{run.microbatch}{string.ascii_letters[run.chunk // self.stages % 52] * (self.virtual_stages > 1)}"

        lines = []
        for stage in range(self.stages):
            for name, of in ("forward", self.forward), ("backward", self.backward):
                head = f"stage {stage}" if name == "forward" else ""
                lines.append((head, name, [cell(of(stage, tick)) for tick in range(self.ticks)]))
        width, first = max(len(c) for *_, cells in lines for c in cells), max(len(head) for head, *_ in lines)
        rows = (f"{head:{first}}  {name:8}  {' '.join(f'{c:>{width}}' for c in cells)}" for head, name, cells in lines)
        return "\n".join(rows)


@dataclasses.dataclass(frozen=True)
class Tick:
    """The passes that the stages run in a tick.

    In `Schedule.steady` they do the same as `slots` ticks before, with microbatches whose numbers are 2p greater.

    Attributes:
      number: of the tick.
    """

    schedule: Schedule
    number: int

    @property
    def forward(self) -> list[Run | None]:
        """The run of each stage forward."""
        return [self.schedule.forward(stage, self.number) for stage in range(self.schedule.stages)]

    @property
    def backward(self) -> list[Run | None]:
        """The run of each stage backward."""
        return [self.schedule.backward(stage, self.number) for stage in range(self.schedule.stages)]

    @property
    def passes(self) -> tuple[bool, bool]:
        """If a forward and if a backward pass runs in it."""
        forward, backward = zip(*self._needed(), strict=True)
        return any(forward), any(backward)

    @property
    def idle(self) -> list[bool]:
        """If each stage needs neither pass."""
        return [not any(needed) for needed in self._needed()]

    def _needed(self) -> list[tuple[bool, bool]]:
        """Return if each stage needs a forward and a backward pass.

        A forward pass also writes the last rows of the one before, and a backward pass fetches those of the next.
        """
        last = self.schedule.chunks - 1  # what turns stays on the device
        needed = lambda run, other: run is not None or (other is not None and other.chunk != last)
        forward = map(needed, self.forward, self.before.forward)
        backward = map(needed, self.backward, self.next.backward)
        return list(zip(forward, backward, strict=True))

    @property
    def enters(self) -> int | None:
        """The microbatch that begins its forward pass."""
        return self._microbatch(self.forward[0], 0)

    @property
    def leaves(self) -> int | None:
        """The microbatch that ends its forward pass."""
        return self._microbatch(self.forward[-1], self.schedule.chunks - 1)

    @property
    def turns(self) -> int | None:
        """The microbatch that begins its backward pass: the one that left in the tick before."""
        return self.before.leaves

    @property
    def returns(self) -> int | None:
        """The microbatch that ends its backward pass."""
        return self._microbatch(self.backward[0], 0)

    def _microbatch(self, run: Run | None, chunk: int) -> int | None:
        return run.microbatch if run and run.chunk == chunk else None

    @property
    def slot(self) -> int:
        """The slot that all stages write to: residuals, and the pieces of the last rows of the tick before."""
        return self.number % self.schedule.slots

    @property
    def read_slots(self) -> list[int]:
        """The slot with the residuals of what each stage runs backward; any, if it runs nothing."""
        lags = [self.schedule.lag(run.chunk if run else 0) for run in self.backward]
        return [(self.number - lag) % self.schedule.slots for lag in lags]

    @property
    def read_pieces(self) -> list[int]:
        """The slot with the pieces of the last rows that each stage begins the next tick with.

        The tick after that of their forward pass has written them.
        """
        return [(slot + 1) % self.schedule.slots for slot in self.next.read_slots]

    @property
    def next(self) -> "Tick":
        return dataclasses.replace(self, number=self.number + 1)

    @property
    def before(self) -> "Tick":
        return dataclasses.replace(self, number=self.number - 1)
