"""verify(): each claim about a loss or a training step, checked on the program itself."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from .._policy import Policy
from ._checks import CHECKS, FAILS, Verdict
from ._peaks import Peaks
from ._subject import subject_of


@dataclasses.dataclass(frozen=True)
class Check:
    """One claim. `said`: what was compared, where it fails and by how much, or why it was not checked."""

    claim: str
    verdict: Verdict
    said: str

    def __str__(self) -> str:
        return f"{self.verdict:11}  {self.claim}: {self.said}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """The checks of one function; print it, or ask whether it is `ok`."""

    checks: tuple[Check, ...]

    def __iter__(self) -> Iterator[Check]:
        return iter(self.checks)

    def __getitem__(self, claim: str) -> Check:
        found = {check.claim: check for check in self.checks}
        if claim not in found:
            raise KeyError(f"{claim!r} is none of {', '.join(found)}")
        return found[claim]

    @property
    def ok(self) -> bool:
        """Whether nothing fails; what was not checked does not."""
        return all(check.verdict != FAILS for check in self.checks)

    def to_json(self) -> str:
        return json.dumps({"ok": self.ok, "checks": [dataclasses.asdict(check) for check in self.checks]})

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


def verify(
    f: Callable[..., Any],
    *args: Any,
    policy: Policy | None = None,
    has_aux: bool = False,
    repeats: int = 3,
    strict: bool = False,
) -> Verification:
    """Checks what is claimed of `f`, a loss or a training step, and of its residuals.

    1. `gradients`: all results are the twin's, bit for bit; both are compiled under `repeatable_options`, and again
       under `exact_options` if they differ. Results that still differ, as where XLA divides a sum among devices in one
       program alone, are judged by the twin's own rounding error: the twin runs again with arguments that are moved by
       one unit in the last place, and results that are further apart than 4 times what that changes fail. It says
       which of the two it found. If the twin does not fit on the device, both run the first layers of each scan, as
       many as fit into nine tenths of it.
    2. `conservation`: the device holds as many bytes less than the twin's as the host holds: by the jaxpr, on a GPU as
       XLA plans it, and from the command line at the peaks of fresh processes.
    3. `moves`: nothing crosses to the host but what is marked offload, or lived there before; where other policies than
       jaxoffload's decide, what somebody named and is no argument or weight. What a loss marks offload stays on the
       device only where the table has a reason.
    4. `producers`: what is saved or offloaded is not computed again. Not checked where other checkpoints than
       jaxoffload's, or jaxoffload's in one another, keep values or compute them again.
    5. `copies`: no kernel and no computation of the host's touches host memory, all copies are asynchronous, in range
       and on no stream that computes (in the program that `compiler_options()` gives, on a GPU). That
       TransformerEngine has the host read group sizes, and so wait for the copies, is listed.
    6. `placement`: the program has the twin's collectives, and no more, but for the row that is read of each stack on
       the host beyond the twin's; of a loss's residuals no device keeps a greater part than in the twin.
    7. `repeats`: the same from the same, and no more memory each time: of the devices, and on Linux of the process, but
       for 64 MiB.

    Args:
      f: a function that returns a floating-point scalar is a loss, which is differentiated with respect to all
        floating-point arguments; any other is a step, and taken as it is. Donated arguments are not given away.
      args: its arguments: pytrees of arrays, or of `jax.ShapeDtypeStruct`s, in whose place arrays are made (the
        magnitudes of normally distributed numbers, of 0.02; integers and booleans 0 or 1).
      policy: treat `f` as `checkpoint(f, policy=policy)`.
      has_aux: `f` is a loss that returns (scalar, other results).
      repeats: how often it is run for 7, at least 3.
      strict: `copies` fails where TransformerEngine has the host read group sizes.

    Returns:
      One `Check` for each claim. Nothing is raised where a claim fails.

    Raises:
      ValueError: `repeats` is less than 3, or `has_aux` and `f` returns something else.
      PolicyError, MemoryError, NotImplementedError: as `scan`, `chain` and `checkpoint` do.
    """
    found = checks(f, *args, policy=policy, has_aux=has_aux, repeats=repeats, strict=strict)
    return Verification(tuple(found))


def checks(
    f: Callable[..., Any],
    *args: Any,
    policy: Policy | None = None,
    has_aux: bool = False,
    repeats: int = 3,
    strict: bool = False,
    peaks: Peaks | str | None = None,
) -> Iterator[Check]:
    """The checks of `verify`, each when it is done. `peaks`: as `peaks_of` found them, for conservation."""
    if repeats < 3:
        raise ValueError(f"verify: repeats must be at least 3, got {repeats}")
    subject = subject_of(f, args, policy, has_aux, repeats)
    subject = dataclasses.replace(subject, peaks=peaks, strict=strict)
    yield from (Check(check.__name__, *check(subject)) for check in CHECKS)
