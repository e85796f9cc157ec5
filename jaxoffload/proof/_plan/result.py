"""The result of `plan`: a policy, what it is predicted to take, and what more memory would bring."""

import dataclasses
import json
from typing import NamedTuple

from ..._policy import Policy
from ..._text import readable
from .patterns import as_yaml


class Memory(NamedTuple):
    """Bytes per device while a step runs, by what they are for.

    Attributes:
      arguments: weights, state and batch; results that replace them take no more.
      other: gradients, and what else is there while layers run.
      residuals: what layers keep on the device.
      working: the largest working set: of a layer with what is in flight, or of another loop.

    Example:
      >>> from jaxoffload.proof import Memory
      >>> Memory(arguments=4, other=3, residuals=2, working=1).total
      10
    """

    arguments: int
    other: int
    residuals: int
    working: int

    @property
    def total(self) -> int:
        return sum(self)


class Point(NamedTuple):
    """A choice that no other one beats: bytes per device, predicted milliseconds per step, and its policy.

    Example:
      >>> from jaxoffload import Policy
      >>> from jaxoffload.proof import Point
      >>> Point(bytes=2**30, ms=12.5, policy=Policy({"fc1": "offload"})).ms
      12.5
    """

    bytes: int
    ms: float
    policy: Policy


@dataclasses.dataclass(frozen=True)
class Plan:
    """The policy that `plan` chose, and its predictions; print it.

    Attributes:
      policy: the choice.
      step_ms: predicted milliseconds per step.
      memory: bytes per device; `budget` of them are allowed.
      host: bytes per device in pinned host memory; `host_budget` of them are allowed.
      bus: the share of the step in which copies run to the host, and back.
      curve: all choices that no other one beats, by bytes.
      untagged: matmuls whose outputs nothing names, so that they run again even if all names are saved.
      compiled: bytes per device that XLA plans; None if the step was not compiled.
      machine: the kind of GPU; `devices`: how many.
      caveat: what the summary says in brackets if something moves and fewer GPUs were measured than copy at once.

    Example:
      >>> from jaxoffload import Policy
      >>> from jaxoffload.proof import Memory, Plan, Point
      >>> policy = Policy({"fc1": "save"})
      >>> memory = Memory(arguments=400, other=300, residuals=200, working=100)
      >>> point = Point(memory.total, 12.5, policy)
      >>> plan = Plan(policy, 12.5, memory, 2000, 0, 1000, (0.0, 0.0), (point,), (), None, "H200", 1, "")
      >>> print(plan.to_yaml().splitlines()[2].strip())
      fc1: save
    """

    policy: Policy
    step_ms: float
    memory: Memory
    budget: int
    host: int
    host_budget: int
    bus: tuple[float, float]
    curve: tuple[Point, ...]
    untagged: tuple[str, ...]
    compiled: int | None
    machine: str
    devices: int
    caveat: str

    @property
    def limits(self) -> str:
        """Return what a little more memory would bring, or that no more is needed."""
        here = self.memory.total
        more = [p for p in self.curve if p.bytes > here and p.ms <= (1 - _WORTH) * self.step_ms]
        if not more:
            last = min((p.ms for p in self.curve), default=self.step_ms)
            return f"more memory would save less than {_WORTH:.1%}" if last < self.step_ms else "nothing: all fits"
        point = more[0]
        changes = self.differs(point.policy) or "offload other layers"
        return f"{readable(point.bytes - here)} more would {changes}: {point.ms / self.step_ms - 1:+.1%}"

    def to_yaml(self) -> str:
        """Return the policy as the `remat:` block of a config."""
        return as_yaml(self.policy)

    def to_json(self) -> str:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {"policy": _as_dict(self.policy), "memory": self.memory._asdict(), "limits": self.limits}
        fields["curve"] = [{"bytes": p.bytes, "ms": p.ms, "policy": _as_dict(p.policy)} for p in self.curve]
        return json.dumps(fields)

    @property
    def summary(self) -> str:
        return f"{self.step_ms:.1f} ms per step on {self.devices} {self.machine}, predicted{self.caveat}"

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they are for."""
        memory = self.memory
        return {
            "arguments": memory.arguments,
            "gradients and other": memory.other,
            "residuals": memory.residuals,
            "working set": memory.working,
            "on each device": memory.total,
            "pinned host memory": self.host,
        }

    def differs(self, other: Policy) -> str:
        """Return what another policy does that this plan does not."""
        return ", ".join(_changes(self.policy, other))

    def __str__(self) -> str:
        of = {"on each device": self.budget, "pinned host memory": self.host_budget}
        to_host, back = self.bus
        lines = [
            self.summary,
            *(
                f"  {name:24} {readable(size):>12}" + (f" of {readable(of[name])}" if name in of else "")
                for name, size in self.parts.items()
            ),
            f"  the bus is busy for {to_host:.0%} of the step to the host, {back:.0%} back",
            *([f"  XLA plans {readable(self.compiled)} per device"] if self.compiled is not None else []),
            f"limit: {self.limits}",
            *(f"untagged: {line}" for line in self.untagged),
            self.to_yaml().rstrip(),
        ]
        return "\n".join(lines)


_WORTH = 0.002  # gains below this share of a step are not worth a line


def _as_dict(policy: Policy) -> dict[str, object]:
    return dataclasses.asdict(policy) | {"residuals": dict(policy.residuals)}


def _changes(policy: Policy, other: Policy) -> list[str]:
    """Return what the other policy does else: "save attn/q", "offload 20 layers"."""
    here, there = dict(policy.residuals), dict(other.residuals)
    changed = [
        (there.get(name, other.default), name)
        for name in sorted({*here, *there})
        if here.get(name, policy.default) != there.get(name, other.default)
    ]
    words = [f"{decision} {name}" for decision, name in changed[:3]]
    if len(changed) > 3:
        words.append(f"change {len(changed) - 3} more")
    moves = "offload" in there.values() and not changed
    return words or [f"offload {other.offload_layers} layers"] * moves
