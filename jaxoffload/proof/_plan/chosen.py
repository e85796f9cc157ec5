"""Choose from a curve: the fastest by `predict` of those that fit, by XLA's memory where XLA can be asked."""

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

_NEAR = 0.03  # estimates of choices are right to this share of a step
_MOST_TRACED = 12  # of those that are so near to the fastest
_MOST_SIZED = 8
WORTH = 0.002  # of a step: gains below it are worth no copy, and no line


def chosen(
    curve: Sequence[Choice],
    limit: int,
    host_limit: int,
    predicted: Callable[[Choice], Prediction],
    size_of: Callable[[Choice], int],
) -> tuple[Choice | None, dict[Choice, int]]:
    """Return the fastest choice found that fits in `limit` bytes per device, or None; and the size of each looked at.

    What a choice takes more or less than estimated corrects the budget for the next one, until the choice is one whose
    size is known.

    Args:
      curve: by bytes, the fewest first.
      predicted, size_of: are asked of few choices.
    """
    left, sizes, more = list(curve), dict[Choice, int](), 0
    fits = lambda: [choice for choice, size in sizes.items() if size <= limit]
    while left and not (fits() and len(sizes) >= _MOST_SIZED):
        choice = _fastest(left, limit - more, host_limit, predicted)
        if choice in sizes:
            break
        sizes[choice] = size_of(choice)
        more = sizes[choice] - choice.device
        if sizes[choice] > limit:
            left = [c for c in left if c.device < choice.device]
    return min(fits(), key=lambda choice: predicted(choice).step_ms, default=None), sizes


def _fastest(curve: Sequence[Choice], limit: int, host_limit: int, predicted: Callable[[Choice], Prediction]) -> Choice:
    """Return the fastest of the choices that are estimated to fit, or else the smallest one."""
    fitting = [choice for choice in curve if choice.device <= limit]
    if not fitting:
        return curve[0]
    most = (1 + _NEAR) * min(choice.ns for choice in fitting)
    near = sorted((choice for choice in fitting if choice.ns <= most), key=lambda choice: choice.ns)[:_MOST_TRACED]
    each = {choice: predicted(choice) for choice in dict.fromkeys([*near, fitting[0]])}
    each = {choice: of for choice, of in each.items() if of.host <= host_limit} or each
    best = (1 + WORTH) * min(of.step_ms for of in each.values())
    return min((choice for choice, of in each.items() if of.step_ms <= best), key=lambda choice: each[choice].host)


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
