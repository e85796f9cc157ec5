"""plan(): the policy whose predicted step is the fastest of those that fit in the device's memory."""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ..._engine.host.limit import host_pool_bytes
from ..._jax import without_remat3
from ..._policy import Policy, check_switches, size_in_bytes
from ..._text import GIB, readable, short
from .._predict.machine import Machine, known_machine
from .._predict.room import names_of_scopes
from .choices import Choice, Outcome, alone, fastest
from .compiled import compiled_bytes, refined, refuse_without_gpus
from .costs import Step, Table
from .errors import CannotPlan, NothingFits
from .patterns import policy_for
from .priced import priced
from .result import Memory, Plan, Point
from .search import pool, searched

RESERVE = 0.05  # of the device's memory: predictions from shapes alone are wrong by as much


@without_remat3
def plan(
    f: Callable[..., Any],
    *args: Any,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    fixed: Policy | None = None,
    one_kernel: Collection[str] = (),
    compile: bool = False,
) -> Plan:
    """Choose the policy of a function's `scan`s: of those that fit in `budget`, the one whose step is the fastest.

    Nothing runs, and no GPU is needed. `plan` traces `f` under policies of its own; those that `f` gives its scans do
    not count. For each name it decides whether to save, offload or recompute it, and how many layers offload. What
    recomputing a name costs is what then runs again in the layer. Copies have the layers beside them to hide behind,
    two passes of them with `accumulate`, on pipeline stages too. docs/plan.md says what the prediction knows and what
    not.

    Args:
      f: a loss, which is differentiated, or a training step. Its state is taken to be donated; a loss's arguments not.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s, with shardings if there are several devices.
      budget: bytes per device, or a string such as "70GiB". By default what JAX may use of this GPU, less 5 %.
      host_budget: bytes of pinned host memory per device; by default what the pinned pool holds, and no more than this
        machine's memory divided by its GPUs.
      machine: what `machine()` measured, or a file that `python -m jaxoffload machine --out FILE` wrote. By default
        what was measured here.
      fixed: decisions that stay, by its patterns. Its other fields count too, except for `default`, `offload_layers`
        and `other_layers`, which are chosen.
      one_kernel: names of scopes, as for `room`.
      compile: also compile `f` under the choice, for the GPUs of its arguments, and correct the budget by the memory
        that XLA plans, until what is chosen fits by that. If nothing does, what moves nothing is compiled, too. A
        jitted step keeps what it donates.

    Returns:
      A `Plan`. Its `policy` goes to the scans of `f`; with several scans pass them `strict=False`.

    Raises:
      NothingFits: it says how many bytes the smallest choice needs, and for what.
      CannotPlan: `budget` or `host_budget` is not a size, no machine is known, or `f` has no `scan` to plan.
      TypeError: `fixed` is not a Policy, `machine` neither a Machine nor a path, `one_kernel` not a collection of
        names, or `compile` not a bool.
      NotImplementedError: a scan is inside another one's layer, or beside one on pipeline stages; or `compile`, and the
        arguments are on no GPUs, neither here nor described ones.

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
      >>> chosen = plan(loss, shape(16, 4096, 16384), shape(8192, 4096), budget="8GiB", machine=h200)
      >>> chosen.memory.total <= 8 * 2**30
      True
    """
    check_switches("plan", compile=compile)
    fixed, one_kernel = _checked_policy(fixed), names_of_scopes("plan", one_kernel)
    rates = _machine(machine)
    limit, on_host = _budget(budget), _host_budget(host_budget)
    if compile:
        refuse_without_gpus(args)
    traced = _traced(f, args, fixed, rates, one_kernel, on_host)
    curve = traced.curve
    choice, taken = fastest(curve, limit), dict[Choice, int]()
    if compile:
        policy = lambda choice: policy_for(choice, traced.step, traced.table, fixed)
        measured = lambda choice: compiled_bytes(f, args, policy(choice))
        choice, taken = refined(curve, limit, measured)
        if not taken:
            raise NotImplementedError("plan: compile=True: this backend says nothing of the memory that it plans")
        if choice is None:  # what moves nothing may take less by XLA's plan, even if it was predicted to take more
            curve = traced.unmoved
            choice, of_unmoved = refined([c for c in curve if c not in taken], limit, measured)
            taken |= of_unmoved
    if choice is None:
        least = min(taken, key=taken.__getitem__, default=curve[0])
        raise _nothing_fits(traced, least, limit, taken.get(least))
    return _result(traced, curve, choice, limit, on_host, taken.get(choice))


class Traced(NamedTuple):
    """The costs of a function's scans, whatever the budget of device memory; `unmoved`: choices that move nothing."""

    step: Step
    table: Table
    curve: list[Choice]
    unmoved: list[Choice]
    fixed: Policy
    machine: Machine
    devices: int
    untagged: tuple[str, ...]


def _traced(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    fixed: Policy,
    machine: Machine,
    one_kernel: Collection[str],
    host_budget: int,
) -> Traced:
    step, names, costs, times, devices, untagged = priced(f, args, fixed, machine, one_kernel)
    table = pool(names.least, names.free, costs, step.stacks)
    table, curve, unmoved = searched(step, table, names.free, costs, times, host_budget)
    return Traced(step, table, curve, unmoved, fixed, machine, devices, untagged())


def _checked_policy(fixed: Any) -> Policy:
    if fixed is not None and not isinstance(fixed, Policy):
        raise TypeError(f"plan: fixed must be a jaxoffload.Policy or None, got {short(fixed)}")
    return fixed or Policy()


def _machine(machine: Any) -> Machine:
    if isinstance(machine, Machine):
        return machine
    if isinstance(machine, (str, os.PathLike)):
        try:
            return Machine.from_json(Path(machine).read_text())
        except (OSError, ValueError) as why:
            raise CannotPlan(f"machine {os.fspath(machine)!r}: {why}") from why
    if machine is not None:
        raise TypeError(f"plan: machine must be a Machine, a path or None, got {short(machine)}")
    if (known := known_machine()) is None:
        raise CannotPlan(
            "no machine was measured here; run `python -m jaxoffload machine` on the GPU, or name a machine's file, "
            "such as 'machines/h200.json' or what its --out FILE wrote: machine=, --machine, or remat.machine in a "
            "config"
        )
    return known


def _bytes(what: str, size: Any) -> int:
    if (read := size_in_bytes(size)) is None:
        raise CannotPlan(f"{what} {short(size)} is not a size; use bytes >= 0 or a string such as '70GiB'")
    return read


def _budget(budget: Any) -> int:
    if budget is not None:
        return _bytes("budget", budget)
    stats = [device.memory_stats() for device in jax.local_devices()] if jax.default_backend() == "gpu" else []
    limits = [stat["bytes_limit"] for stat in stats if stat and "bytes_limit" in stat]
    if not limits:
        raise CannotPlan("budget: no GPU here says how much memory it has; give bytes, or a string as '70GiB'")
    return int((1 - RESERVE) * min(limits))


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


def _nothing_fits(traced: Traced, least: Choice, limit: int, compiled: int | None) -> NothingFits:
    """Return the error that nothing fits; `compiled` is what XLA plans for this choice."""
    memory = _memory(traced.step, alone(traced.step, traced.table, least))
    parts = sorted(memory._asdict().items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{readable(size)} {_PARTS[name]}" for name, size in parts)
    need = least.device if compiled is None else compiled
    how = "" if compiled is None else ", by XLA's plan"
    why = (
        f"budget {readable(limit)} per device: the smallest choice needs {readable(need)}{how}; predicted are {largest}"
    )
    return NothingFits(f"plan: {why}", need)


_PARTS = {
    "arguments": "of arguments",
    "other": "of gradients and what else is there",
    "residuals": "of residuals",
    "working": "of a working set",
}


def _memory(step: Step, out: Outcome) -> Memory:
    return Memory(step.arguments, out.other, out.residuals, out.working)


def _result(
    traced: Traced, curve: Sequence[Choice], choice: Choice, limit: int, on_host: int, compiled: int | None
) -> Plan:
    step, out = traced.step, alone(traced.step, traced.table, choice)
    policy = lambda of: policy_for(of, step, traced.table, traced.fixed)
    seconds = choice.ns / 1e9
    ways = (step.bus.d2h, step.bus.h2d)
    return Plan(
        policy=policy(choice),
        step_ms=choice.ns / 1e6,
        memory=_memory(step, out),
        budget=limit,
        host=choice.host,
        host_budget=on_host,
        bus=(*(out.copied / rate / 1e9 / seconds if seconds else 0.0 for rate in ways),),  # type: ignore[arg-type]
        curve=tuple(Point(c.device, c.ns / 1e6, policy(c)) for c in _faster(curve)),
        untagged=traced.untagged,
        compiled=compiled,
        machine=traced.machine.device,
        devices=traced.devices,
        caveat=traced.machine.caveat(traced.devices) if choice.host else "",
    )


def _faster(curve: Sequence[Choice]) -> list[Choice]:
    """Return those that are faster than all smaller ones."""
    faster: list[Choice] = []
    for choice in curve:
        if not faster or choice.ns < faster[-1].ns:
            faster.append(choice)
    return faster
