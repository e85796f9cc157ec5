"""plan(): the policy whose predicted step is the fastest of those that fit in the device's memory."""

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..._engine.host.limit import POOL, host_pool_bytes
from ..._jax import without_remat3
from ..._policy import Policy, check_call, check_switches, size_in_bytes
from ..._text import GIB, readable, short
from .._predict.machine import Machine
from .._predict.predict import Prediction, predict
from .._program.memory import device_bytes
from .choices import Choice, curve_of, looked_at, policy_for
from .chosen import are_on_gpus, chosen, compiled_bytes, lowering
from .costs import priced
from .result import CannotPlan, NothingFits, Plan

RESERVE = 0.05  # of the device's memory


@without_remat3
def plan(
    f: Callable[..., Any],
    *args: Any,
    machine: Machine | str | os.PathLike[str],
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    fixed: Policy | None = None,
    compile: bool = True,
) -> Plan:
    """Choose the policy of a function's `scan`s: of those that fit in `budget`, the one whose step is the fastest.

    Nothing runs, and no GPU is needed. `plan` traces `f` under policies of its own; those that `f` gives its scans do
    not count. For each name it decides whether to save, offload or recompute it, and how many layers offload. What
    recomputing a name costs is what then runs again in the layer. The time is that of `predict`, for the few choices
    whose estimates are the best. The memory is what XLA plans, if it can be asked, and else a guess.

    Args:
      f: a loss, which is differentiated, or a training step. Its state is taken to be donated; a loss's arguments not.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s, with shardings if there are several devices.
      machine: what `machine()` measured, or a file with what `python -m jaxoffload machine` printed.
      budget: bytes per device, or a string such as "70GiB". By default what JAX may use of this GPU, less 5 %.
      host_budget: bytes of pinned host memory per device; by default what the pinned pool holds, and no more than this
        machine's memory divided by its GPUs.
      fixed: decisions that stay, by its patterns. Its other fields count too, except for `default`, `offload_layers`
        and `other_layers`, which are chosen.
      compile: if the arguments are on GPUs, here or described ones (`jax.experimental.topologies`), compile `f` under
        some choices for these, until what is chosen fits by the memory that XLA plans. A jitted step keeps what it
        donates.

    All processes of a job must call `plan`; budgets and machine are those of the first.

    Returns:
      A `Plan`. Its `policy` goes to the scans of `f`; with several scans pass them `strict=False`.

    Raises:
      NothingFits: it says how many bytes the smallest choice needs, and for what.
      CannotPlan: `machine` is neither a Machine nor its file, `budget` or `host_budget` not a size, or `f` has no
        `scan` to plan.
      PolicyError: a pattern of `fixed` matches nothing.
      TypeError: `f` is not a function, `fixed` not a Policy, or `compile` not a bool.
      NotImplementedError: a scan is inside another one's layer, or beside one on pipeline stages.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, plan, scan, tag
      >>> from jaxoffload.proof import Bus, Machine
      >>> bus = Bus(d2h=53.5, h2d=53.5, together=41.0)
      >>> rates = {"gemm_tflops": 670.0, "attention_tflops": (580.0, 530.0), "hbm_gb_s": 3900.0}
      >>> h200 = Machine("H200", 1, "0.12", bus, bus, **rates)
      >>> layer = lambda x, w: (x + jnp.tanh(tag(tag(x, "layer_input") @ w, "fc1")) @ w.T, None)
      >>> loss = lambda w, x: jnp.mean(scan(layer, x, w, policy=Policy(), strict=False)[0])
      >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
      >>> planned = plan(loss, shape(16, 4096, 16384), shape(8192, 4096), budget="8GiB", machine=h200)
      >>> planned.memory.total <= 8 * 2**30
      True
    """
    check_call("plan", f, args)
    check_switches("plan", compile=compile)
    if fixed is not None and not isinstance(fixed, Policy):
        raise TypeError(f"plan: fixed must be a jaxoffload.Policy or None, got {short(fixed)}")
    fixed = fixed or Policy()
    rates, limit, on_host = _of_first_process(_machine(machine), _budget(budget), _host_budget(host_budget))
    step, names, costs = priced(f, args, fixed, rates)
    table = looked_at(names.least, names.free, costs, step.stacks)
    policy = functools.cache(lambda choice: policy_for(choice, table[choice.kept], step, names, fixed))
    predicted = functools.cache(lambda choice: predict(f, *args, machine=rates, policy=policy(choice)))
    lower = lowering(f, args) if compile and are_on_gpus(args) else None
    xla = functools.cache(lambda choice: compiled_bytes(lower, args, policy(choice)) if lower else None)
    estimate = lambda choice: predicted(choice).memory.total
    size_of = lambda choice: xla(choice) or estimate(choice)
    sizes: dict[Choice, int] = {}
    choices = curve_of(step, table, on_host)
    choice = chosen(choices, limit, on_host, predicted, size_of, sizes)
    if choice:
        larger = [other for other in choices if bool(other.host) is bool(choice.host) and other.device > choice.device]
        near = (of.kept ^ {unit} for of in (choice, *larger[:1]) for unit in sorted(names.free))
        table |= {kept: costs(kept) for kept in dict.fromkeys(near) if kept not in table}
        choice = chosen(curve_of(step, table, on_host), limit, on_host, predicted, size_of, sizes)
    if choice is None:
        least = min(sizes, key=sizes.__getitem__)
        other = chosen(curve_of(step, table, sys.maxsize), limit, sys.maxsize, predicted, estimate, {})
        more = predicted(other).host if other else 0
        raise _nothing_fits(predicted(least), limit, on_host, sizes[least], xla(least) is not None, more)
    return Plan(
        policy=policy(choice),
        prediction=predicted(choice),
        compiled=xla(choice),
        budget=limit,
        host_budget=on_host,
    )


def _machine(machine: Any) -> Machine:
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, (str, os.PathLike)):
        raise CannotPlan(
            f"machine {short(machine)} is neither a Machine nor a file of one, such as 'machines/h200.json', which "
            "`python -m jaxoffload machine` prints: machine=, --machine, or remat.machine in a config"
        )
    try:
        return Machine.from_json(Path(machine).read_text())
    except (OSError, ValueError) as why:
        raise CannotPlan(f"machine {os.fspath(machine)!r}: {why}") from why


def _bytes(what: str, size: Any) -> int:
    if (read := size_in_bytes(size)) is None:
        raise CannotPlan(f"{what} {short(size)} is not a size; use bytes >= 0 or a string such as '70GiB'")
    return read


def _budget(budget: Any) -> int:
    if budget is not None:
        return _bytes("budget", budget)
    if (limit := device_bytes()) is None:
        raise CannotPlan("budget: no GPU here says how much memory it has; give bytes, or a string such as '70GiB'")
    return int((1 - RESERVE) * limit)


_XLA_POOL = 64 * GIB  # XLA's own limit of the pinned host pool
_DRIVER = Path("/proc/driver/nvidia/gpus")  # has a folder for each GPU of the machine


def _host_budget(budget: Any) -> int:
    """Return the bytes per device that may be pinned."""
    if budget is not None:
        return _bytes("host_budget", budget)
    pool_size = host_pool_bytes() or _XLA_POOL
    if jax.default_backend() != "gpu":
        return pool_size
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = len([*_DRIVER.glob("*")])  # JAX knows those of this process alone, which may be one of several
    return min(pool_size, memory // max(gpus, jax.local_device_count()))


def _of_first_process(machine: Machine, limit: int, on_host: int) -> tuple[Machine, int, int]:
    """Return these as the first process of the job has them, so that all choose alike."""
    if jax.process_count() == 1:
        return machine, limit, on_host
    text = np.frombuffer(json.dumps([machine.to_json(), limit, on_host]).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    sent = multihost_utils.broadcast_one_to_all(np.resize(text, size))
    rates, limit, on_host = json.loads(bytes(np.asarray(sent)).decode())
    return Machine.from_json(rates), limit, on_host


def _nothing_fits(least: Prediction, limit: int, on_host: int, need: int, by_xla: bool, more: int) -> NothingFits:
    """Return the error that nothing fits; the smallest choice needs so many bytes.

    `more`: bytes on the host with which another choice fits the device, as predicted; 0 if none does.
    """
    parts = {"arguments": "of arguments", "residuals": "of residuals", "other": "of gradients and what else is there"}
    sizes = sorted(least.memory._asdict().items(), key=lambda part: -part[1])
    largest = ", ".join(f"{readable(size)} {parts[name]}" for name, size in sizes)
    how = ", by XLA's plan" if by_xla else ""
    why = f"the smallest choice needs {readable(need)}{how}; estimated are {largest}"
    budgets = f"budget {readable(limit)} per device"
    if least.host > on_host:
        budgets += f" and host_budget {readable(on_host)}"
        why += f", and {readable(least.host)} of pinned host memory"
    elif more > on_host:
        why += (
            f"; another choice is predicted to fit with host_budget {readable(int(1.01 * more))} instead of "
            f"{readable(on_host)}, for which {POOL} must be large enough"
        )
    return NothingFits(f"plan: {budgets}: {why}", need)
