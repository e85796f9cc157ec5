"""The errors that `plan` raises."""

from ..._errors import Problem, UserError


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
