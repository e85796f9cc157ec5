"""Choose from a curve: the fastest by `predict` of those that fit, by XLA's memory where XLA can be asked."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._compiler_options import compiler_options
from ..._policy import Policy
from ..._tracing import Trial
from .._predict.predict import Prediction
from .._program.memory import memory_plan
from .._program.results import run_of
from .choices import Choice

_ERROR = 0.01  # to this share of a step, estimates of choices are all alike too high or too low
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

    What a choice takes more or less than predicted corrects the budget for the next one, until the choice is one whose
    size is known.

    Args:
      predicted, size_of: are asked of few choices.
    """
    left, sizes, more = list(curve), dict[Choice, int](), 0
    fits = lambda: [choice for choice, size in sizes.items() if size <= limit]
    while left and not (fits() and len(sizes) >= _MOST_SIZED):
        choice = _fastest(left, limit - more, host_limit, predicted)
        if choice in sizes:
            break
        sizes[choice] = size_of(choice)
        more = sizes[choice] - predicted(choice).memory.total
        if sizes[choice] > limit:
            left.remove(choice)
    return min(fits(), key=lambda choice: predicted(choice).step_ms, default=None), sizes


def _fastest(curve: Sequence[Choice], limit: int, host_limit: int, predicted: Callable[[Choice], Prediction]) -> Choice:
    """Return the fastest of the choices that are predicted to fit, or else the smallest one."""
    smallest = min(curve, key=lambda choice: choice.device)
    each, fitting = {smallest: predicted(smallest)}, list[Choice]()
    more, before = each[smallest].memory.total - smallest.device, math.inf
    while more < before:  # the fastest are skipped until it is known how much less they take than was estimated
        before, low, best, fitting = more, math.inf, math.inf, []
        for choice in sorted(curve, key=lambda choice: (choice.ns, choice.host)):
            if len(fitting) == _MOST_FITTING or (1 - _ERROR) * low * choice.ns > best:
                break
            if choice.device + more <= limit and (choice in each or len(each) <= _MOST_TRACED):
                each[choice] = of = predicted(choice)
                low, more = min(low, of.step_ms / choice.ns), min(more, of.memory.total - choice.device)
                if of.memory.total <= limit and of.host <= host_limit:
                    fitting.append(choice)
                    best = min(best, of.step_ms)
    if not fitting:
        return min(each, key=lambda choice: each[choice].memory.total)
    unmoved = [choice for choice in fitting if not each[choice].host and each[choice].step_ms <= (1 + _MOVES) * best]
    return min(unmoved or fitting, key=lambda choice: each[choice].step_ms)


def compiled_bytes(f: Callable[..., Any], args: tuple[Any, ...], policy: Policy) -> int | None:
    """Return the bytes per device that XLA plans for a step under a policy, or for a loss and its gradient; None if it
    does not say.

    A jitted step keeps what it donates; the arguments of any other step are donated.
    """
    lower = getattr(f, "lower", None)
    run, is_loss = run_of(Trial(policy).traced(f), args)
    if is_loss or lower is None:
        lower = jax.jit(run, donate_argnums=() if is_loss else range(len(args))).lower
    with warnings.catch_warnings():
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
