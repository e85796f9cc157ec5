"""Choose from a curve: the fastest by `predict` of those that fit, by XLA's memory where XLA can be asked."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..._compiler_options import compiler_options
from ..._policy import Policy
from ..._tracing import Trial, under
from .._predict.predict import Prediction
from .._program.memory import memory_plan
from .._program.results import run_of
from .choices import Choice

_ERROR = 0.01  # of a step: what estimates of choices that are nearly as fast may be apart, beside what `predict` says
_BEYOND = 1.1  # of the budget: choices that are estimated to need so much may fit
_MOST_FITTING, _MOST_TRACED, _MOST_SIZED = 8, 16, 8
_MOVES = 0.01  # of a step: for less nothing is moved where moving nothing fits


def chosen(
    curve: Sequence[Choice],
    limit: int,
    host_limit: int,
    predicted: Callable[[Choice], Prediction],
    size_of: Callable[[Choice], int],
) -> tuple[Choice | None, dict[Choice, int]]:
    """Return the fastest choice found that fits in `limit` bytes per device, or None; and the size of each looked at.

    What a choice takes more or less than predicted corrects the budget for those that move something, too, or nothing,
    until the choice is one whose size is known.
    """
    left, sizes, more = list(curve), dict[Choice, int](), {True: 0, False: 0}
    fits = lambda: [c for c, size in sizes.items() if size <= limit and predicted(c).host <= host_limit]
    while left and not (fits() and len(sizes) >= _MOST_SIZED):
        choice = _fastest(left, limit, more, host_limit, predicted)
        if choice in sizes:
            break
        sizes[choice] = size_of(choice)
        more[bool(predicted(choice).host)] = sizes[choice] - predicted(choice).memory.total
        if choice not in fits():
            left.remove(choice)
            if len(sizes) >= _MOST_SIZED:  # only smaller ones may still fit
                left = [c for c in left if c.device < min(of.device for of in sizes)]
    return _best({choice: predicted(choice) for choice in fits()}), sizes


def _fastest(
    curve: Sequence[Choice],
    limit: int,
    more: Mapping[bool, int],
    host_limit: int,
    predicted: Callable[[Choice], Prediction],
) -> Choice:
    """Return the fastest of the choices that are predicted to fit, or else the smallest one.

    `more`: bytes that those which move something, or nothing, take beside what is predicted.
    """
    smallest = min(curve, key=lambda choice: choice.device)
    size = lambda of: of.memory.total + more[bool(of.host)]
    traced, fitting = {smallest: predicted(smallest)}, dict[Choice, Prediction]()
    less, before = 0, 1
    while less < before:  # the fastest are skipped until it is known how much less they take than was estimated
        before, low, best = less, math.inf, math.inf
        for choice in sorted(curve, key=lambda choice: (choice.ns, choice.host)):
            if len(fitting) == _MOST_FITTING or (1 - _ERROR) * low * choice.ns > best:
                break
            nearly = choice.device <= max(_BEYOND * limit, limit - less)
            if choice in traced or (nearly and len(traced) <= _MOST_TRACED):
                traced[choice] = of = predicted(choice)
                low, less = min(low, of.step_ms / choice.ns), min(less, size(of) - choice.device)
                if size(of) <= limit and of.host <= host_limit:
                    fitting[choice] = of
                    best = min(best, of.step_ms)
    return _best(fitting) or min(traced, key=lambda choice: (traced[choice].host > host_limit, size(traced[choice])))


def _best(fitting: Mapping[Choice, Prediction]) -> Choice | None:
    """Return the fastest of these, or of those that move nothing if that is nearly as fast; None if there are none."""
    best = min((of.step_ms for of in fitting.values()), default=0.0)
    unmoved = [choice for choice, of in fitting.items() if not of.host and of.step_ms <= (1 + _MOVES) * best]
    return min(unmoved or fitting, key=lambda choice: fitting[choice].step_ms, default=None)


def compiled_bytes(f: Callable[..., Any], args: tuple[Any, ...], policy: Policy) -> int | None:
    """Return the bytes per device that XLA plans for a step under a policy, or for a loss and its gradient; None if it
    does not say.

    A jitted step keeps what it donates; the arguments of any other step are donated.
    """
    lower = getattr(f, "lower", None)
    run, is_loss = run_of(Trial(policy).traced(f), args)
    if is_loss or lower is None:
        lower = jax.jit(run, donate_argnums=() if is_loss else range(len(args))).lower
    with under(whole_program=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        program = Trial(policy).traced(lower)(*args).compile(compiler_options("gpu"))
    found = memory_plan(program)
    if found is None:
        return None
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + new + found.temp_size_in_bytes)


def where_not_on_gpus(args: Any) -> str | None:
    """Return where arguments are if they are on no GPUs, here or described ones, and so cannot be compiled for them."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    if any(isinstance(getattr(s, "mesh", None), jax.sharding.AbstractMesh) for s in shardings):
        return "an abstract mesh"
    platforms = {device.platform for s in shardings if s is not None for device in s.device_set}
    platforms = platforms or {jax.default_backend()}
    return None if platforms <= {"gpu", "cuda"} else ", ".join(sorted(platforms))
