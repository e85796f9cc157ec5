"""The memory that XLA plans for a choice, and the choice that fits by that."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._compiler_options import compiler_options
from ..._policy import Policy
from ..._tracing import Trial
from .._program.memory import memory_plan
from .._program.results import run_of
from .choices import Choice, fastest


def refined(
    curve: Sequence[Choice], limit: int, measured: Callable[[Choice], int | None]
) -> tuple[Choice | None, dict[Choice, int]]:
    """Return the fastest choice of those compiled that fits in `limit` bytes per device, and what each took.

    What a compiled choice takes more or less than predicted corrects the budget for the next one, until the choice is
    one that was compiled. If that does not fit, smaller ones are compiled, until one fits; None if none does. Choices
    of which XLA does not say what they take are left out.
    """
    left, taken = list(curve), dict[Choice, int]()
    more = 0  # than predicted, as the last choice took of which XLA says it

    def look(choice: Choice) -> None:
        nonlocal more
        size = measured(choice)
        if size is None:
            left.remove(choice)
        else:
            taken[choice], more = size, size - choice.device

    choice = fastest(left, limit) or (left[0] if left else None)
    while choice is not None and choice not in taken:
        look(choice)
        choice = fastest(left, limit - more)
    while all(size > limit for size in taken.values()):
        smallest = min((c.device for c in taken), default=math.inf)
        smaller = [c for c in left if c.device < smallest]
        if not smaller:
            break
        excess = min(taken.values()) - limit if taken else 0
        look(fastest(smaller, int(smallest - excess)) or smaller[0] if taken else smaller[0])
    fitting = [c for c, size in taken.items() if size <= limit]
    return min(fitting, key=lambda c: (c.ns, c.host), default=None), taken


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


def refuse_without_gpus(args: Any) -> None:
    """Raise if the arguments are on no GPUs, here or described ones.

    Raises:
      NotImplementedError: they are on CPUs, or on an abstract mesh.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    abstract = any(isinstance(getattr(s, "mesh", None), jax.sharding.AbstractMesh) for s in shardings)
    devices = [d for s in shardings if s is not None and not abstract for d in s.device_set]
    platforms = {device.platform for device in devices} or {jax.default_backend()}
    if abstract or not platforms <= {"gpu", "cuda"}:
        where = "an abstract mesh" if abstract else ", ".join(sorted(platforms))
        raise NotImplementedError(
            f"plan: compile=True needs arguments on GPUs, here or described (jax.experimental.topologies); they are on "
            f"{where}"
        )
