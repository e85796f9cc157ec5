"""The result of verify(), which pages show: a verdict for each claim."""

import dataclasses
from collections.abc import Iterator
from typing import Final, Literal

HOLDS: Final = "holds"
FAILS: Final = "fails"
NOT_CHECKED: Final = "not checked"
Verdict = Literal["holds", "fails", "not checked"]

Found = tuple[Verdict, str]  # a check's verdict and its detail


@dataclasses.dataclass(frozen=True)
class Check:
    """One claim. `detail`: what was compared, where it fails and by how much, or why it was not checked.

    Example:
      >>> from jaxoffload.proof import Check
      >>> print(Check("repeats", "holds", "3 runs are equal"))
      holds        repeats: 3 runs are equal
    """

    claim: str
    verdict: Verdict
    detail: str

    def __str__(self) -> str:
        return f"{self.verdict:11}  {self.claim}: {self.detail}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """The checks of one function: print it, index it by claim, or ask whether it is `ok`.

    Example:
      >>> from jaxoffload.proof import Check, Verification
      >>> verification = Verification((Check("repeats", "fails", "run 2 differs"),))
      >>> verification.ok, verification["repeats"].detail
      (False, 'run 2 differs')
    """

    checks: tuple[Check, ...]

    def __iter__(self) -> Iterator[Check]:
        return iter(self.checks)

    def __getitem__(self, claim: str) -> Check:
        by_claim = {check.claim: check for check in self.checks}
        if claim not in by_claim:
            raise KeyError(f"{claim!r} is none of {', '.join(by_claim)}")
        return by_claim[claim]

    @property
    def ok(self) -> bool:
        """True if nothing fails. A claim that was not checked does not fail."""
        return all(check.verdict != FAILS for check in self.checks)

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))
