"""verify(): each claim about a loss or a training step, checked on the program itself."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from ..._policy import Policy
from .._program.target import target_of
from .checks import CHECKS, FAILS, Verdict
from .peaks import Peaks


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

    1. `gradients`: every result equals the reference's bit for bit. Both are compiled under `repeatable_options`, and
       under `exact_options` if they differ. Results that still differ, as where XLA divides a sum among devices in one
       program alone, are judged by the reference's own rounding error: it runs again with arguments moved by one unit
       in the last place, and results further apart than 4 times what that changes fail. The check says which it found.
       If the reference does not fit on the device, both run the first layers of each scan, as many as fit in 90 %.
    2. `conservation`: every byte that leaves the device appears on the host: exactly, in the jaxpr; on a GPU also in
       XLA's memory plan and, from the command line, at the peaks of fresh processes.
    3. `moves`: only values marked offload, or values that lived on the host before, are moved there. Where policies
       other than jaxoffload's decide: only named values that are neither arguments nor weights.
    4. `producers`: saved and offloaded values are not recomputed. Not checked where a value is kept or recomputed by
       other checkpoints than jaxoffload's, or by nested ones of jaxoffload's.
    5. `copies`: no kernel and no host computation touches host memory; all copies are asynchronous, in range and on no
       stream that computes (in the program that `compiler_options()` gives, on a GPU). Group sizes that
       TransformerEngine has the host read, waiting for the copies, are listed.
    6. `placement`: the compiled program runs the same collectives as the reference, plus at most one extra row read per
       host stack, and no device stores a larger shard of any residual.
    7. `repeats`: equal arguments give equal results and no growth in memory: on the devices, and on Linux in the
       process, within 64 MiB.

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
    target = target_of(f, args, policy, has_aux, repeats)
    target = dataclasses.replace(target, peaks=peaks, strict=strict)
    yield from (Check(check.__name__, *check(target)) for check in CHECKS)
