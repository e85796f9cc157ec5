"""The result of `plan`, a policy and what it is predicted to take, and the errors that it raises."""

import dataclasses
import json
import re

from ..._errors import Problem, UserError
from ..._policy import Policy
from ..._text import readable
from .._predict.memory import ERROR
from .._predict.predict import Memory, Prediction

_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")  # a pattern that YAML takes without quotes


@dataclasses.dataclass(frozen=True)
class Plan:
    """The policy that `plan` chose, and what is predicted of it; print it.

    Attributes:
      policy: the choice.
      prediction: milliseconds per step, and bytes.
      compiled: bytes per device that XLA plans; None if it was not asked, or did not say.
      budget, host_budget: the bytes per device, and of pinned host memory per device, that are allowed.

    Example:
      >>> from jaxoffload import Policy
      >>> from jaxoffload.proof import Bus, Machine, Memory, Plan, Prediction
      >>> bus = Bus(d2h=50.0, h2d=50.0, together=40.0)
      >>> rates = {"gemm_tflops": 700.0, "attention_tflops": (500.0, 400.0), "hbm_gb_s": 4000.0}
      >>> h200 = Machine("H200", 1, "0.12", bus, bus, **rates)
      >>> found = Prediction(h200, 1, computing_ms=12.5, loops=(), memory=Memory(4, 2, 1), host=0)
      >>> plan = Plan(Policy({"fc1": "save"}), found, None, budget=8, host_budget=0)
      >>> print(plan.to_yaml().splitlines()[2].strip())
      fc1: save
    """

    policy: Policy
    prediction: Prediction
    compiled: int | None
    budget: int
    host_budget: int

    @property
    def step_ms(self) -> float:
        """Predicted milliseconds per step."""
        return self.prediction.step_ms

    @property
    def memory(self) -> Memory:
        """Bytes per device by what they are for, from shapes alone."""
        return self.prediction.memory

    @property
    def bytes(self) -> int:
        """How many bytes each device needs, by XLA's plan or else by the estimate."""
        return self.memory.total if self.compiled is None else self.compiled

    @property
    def host(self) -> int:
        """Bytes per device in pinned host memory."""
        return self.prediction.host

    def to_yaml(self) -> str:
        """Return the policy as the `remat:` block of a config."""
        policy = self.policy
        lines = ["remat:", "  residuals:" if policy.rules else "  residuals: {}"]
        for pattern, decision in policy.rules:
            lines.append(f"    {pattern if _PLAIN.fullmatch(pattern) else json.dumps(pattern)}: {decision}")
        fields = ("default", "dots", "min_offload_bytes", "resident_layers", "offload_layers", "other_layers")
        lines += [f"  {field}: {getattr(policy, field)}" for field in (*fields, "on_host_full")]
        return "\n".join(lines) + "\n"

    @property
    def summary(self) -> str:
        how = "as XLA plans it" if self.compiled is not None else f"estimated from shapes, usually within {ERROR:.0%}"
        return f"{self.prediction.summary}; memory is {how}"

    def __str__(self) -> str:
        lines = [
            self.summary,
            f"  {'on each device':24} {readable(self.bytes):>12} of {readable(self.budget)}",
            *(f"    {name:22} {readable(size):>12}, estimated" for name, size in self.memory._asdict().items()),
            f"  {'pinned host memory':24} {readable(self.host):>12} of {readable(self.host_budget)}",
            f"  {self.prediction.exposed_ms:.1f} ms of copies are exposed",
            self.to_yaml().rstrip(),
        ]
        return "\n".join(lines)


class CannotPlan(UserError, ValueError):
    """An argument of `plan` is not what it takes.

    Example:
      >>> from jaxoffload import UserError
      >>> from jaxoffload.proof import CannotPlan
      >>> issubclass(CannotPlan, UserError)
      True
    """

    def __init__(self, why: str):
        super().__init__([Problem("plan", f"plan: {why}")])


class NothingFits(UserError, MemoryError):
    """No policy fits in the budget.

    Attributes:
      least: bytes per device that the smallest one needs.

    Example:
      >>> from jaxoffload.proof import NothingFits
      >>> NothingFits("plan: budget 1.00 GiB", 2**31).least
      2147483648
    """

    def __init__(self, why: str, least: int):
        super().__init__([Problem("plan", why)])
        self.least = least
