"""predict(): how long a step takes, what its copies add, and its bytes on the device and on the host."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr

from ..._engine.cost.cost import cost
from ..._engine.host.need import held_by_arguments, need_of
from ..._engine.jaxprs.walk import walk
from ..._jax import without_remat3
from ..._policy import Policy, check_call
from ..._text import readable, short
from ..._tracing import Trial, under
from .._program.host_transfers import is_of_an_optimizer
from .._program.results import spread, trace_of
from .collectives import collective_seconds
from .fit import Fit, fits_in
from .machine import Machine
from .memory import argument_bytes, divisions, kept_bytes, step_bytes
from .scans import scans_in

_OF_A_HOST = 8  # GPUs, at most


class Memory(NamedTuple):
    """Bytes per device while a step runs, by what they are for, estimated from shapes.

    Attributes:
      arguments: weights, state and batch; results that replace them take no more.
      residuals: what layers keep on the device.
      other: gradients, and what else is there at the same time.

    Example:
      >>> from jaxoffload.proof import Memory
      >>> Memory(arguments=4, residuals=2, other=1).total
      7
    """

    arguments: int
    residuals: int
    other: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The time and the memory that `predict` says a function takes; print it.

    Attributes:
      machine, devices: of which kind, and how many.
      computing_ms: milliseconds per step without the copies; with what runs again, and with collectives.
      loops: a `Fit` for each loop that offloads.
      memory: bytes per device.
      host: bytes per device in pinned host memory.
      state_ms: milliseconds in which a `host_optimizer` streams its state, with nothing else to compute beside it.

    Example:
      >>> from jaxoffload.proof import Bus, Machine, Memory, Prediction
      >>> bus = Bus(d2h=50.0, h2d=50.0, together=40.0)
      >>> rates = {"gemm_tflops": 700.0, "attention_tflops": (500.0, 400.0), "hbm_gb_s": 4000.0}
      >>> h200 = Machine("H200", 1, "0.12", bus, bus, **rates)
      >>> Prediction(h200, 1, computing_ms=12.5, loops=(), memory=Memory(4, 2, 1), host=0).step_ms
      12.5
    """

    machine: Machine
    devices: int
    computing_ms: float
    loops: tuple[Fit, ...]
    memory: Memory
    host: int
    state_ms: float = 0.0

    @property
    def exposed_ms(self) -> float:
        """Milliseconds of copies per step that nothing hides."""
        return self.state_ms + sum(loop.exposed_ms(loop.together) for loop in self.loops)

    @property
    def step_ms(self) -> float:
        return self.computing_ms + self.exposed_ms

    @property
    def summary(self) -> str:
        few = self.host and self.machine.gpus < min(self.devices, _OF_A_HOST)
        caveat = f" (the bus was measured with {self.machine.gpus} GPU(s) copying at once)" if few else ""
        return f"{self.step_ms:.1f} ms per step on {self.devices} {self.machine.device}, predicted{caveat}"

    def __str__(self) -> str:
        parts = ", ".join(f"{readable(size)} {name}" for name, size in self.memory._asdict().items())
        of_state = f", {self.state_ms:.2f} of them of state" if self.state_ms else ""
        lines = [
            self.summary,
            f"  {self.exposed_ms:.2f} ms of copies are exposed{of_state}",
            f"  {readable(self.memory.total)} on each device, by a rough estimate ({parts})",
            f"  {readable(self.host)} in pinned host memory",
            *map(str, self.loops),
        ]
        return "\n".join(lines)


@without_remat3
def predict(f: Callable[..., Any], *args: Any, machine: Machine, policy: Policy | None = None) -> Prediction:
    """Predict a step from its shapes: FLOPs, bytes, and the rates of a machine. Nothing runs, and no GPU is needed.

    What is computed is taken to be spread evenly over the arguments' devices, except where a `shard_map` divides it
    itself. Copies have the layers beside them to hide behind, two passes of them in `accumulate`; those of `chain` and
    `checkpoint`, which have no loop, are not counted. docs/plan.md says what else is not known, and how far memory is
    off; `memory_plan` has XLA's own figure.

    Args:
      f: a loss, which returns a scalar alone and is differentiated, or a training step. Its state is taken to be
        donated; a loss's arguments not.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s, with shardings if there are several devices.
      machine: what `machine()` measured, here or elsewhere.
      policy: of all `scan`s, in place of their own.

    Returns:
      A `Prediction`: milliseconds, and bytes per device.

    Raises:
      TypeError: `f` is not a function, `machine` not a Machine, or `policy` not a Policy.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, scan, tag
      >>> from jaxoffload.proof import Bus, Machine, predict
      >>> bus = Bus(d2h=50.0, h2d=50.0, together=40.0)
      >>> rates = {"gemm_tflops": 700.0, "attention_tflops": (500.0, 400.0), "hbm_gb_s": 4000.0}
      >>> h200 = Machine("H200", 1, "0.12", bus, bus, **rates)
      >>> policy = Policy({"fc1": "offload"}, min_offload_bytes=0)
      >>> layer = lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None)
      >>> loss = lambda x, w: jnp.sum(scan(layer, x, w, policy=policy)[0])
      >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
      >>> prediction = predict(loss, shape(8192, 4096), shape(8, 4096, 4096), machine=h200)
      >>> prediction.host // 2**20, prediction.loops[0].copies[0].bytes // 2**20  # 7 or 8 layers and a padding row
      (512, 64)
    """
    check_call("predict", f, args)
    if not isinstance(machine, Machine):
        raise TypeError(
            f"predict: machine must be a Machine, got {short(machine)}; machine() returns one, and "
            "Machine.from_json(text) reads what `python -m jaxoffload machine` printed"
        )
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"predict: policy must be a jaxoffload.Policy or None, got {short(policy)}")
    with under(whole_program=True):
        jaxpr, is_loss = (trace_of if policy is None else Trial(policy).traced(trace_of))("predict", f, args)
    devices, most = spread(args), step_bytes(jaxpr, divisions(args), donated=not is_loss)
    kept = min(most, kept_bytes(jaxpr))  # gradients may be computed one after another
    streams = any(is_of_an_optimizer(site.eqn) for site in walk(jaxpr))
    return Prediction(
        machine=machine,
        devices=devices,
        computing_ms=1e3 * computing_seconds(jaxpr, args, machine),
        loops=fits_in(jaxpr, args, devices, machine),
        memory=Memory(argument_bytes(args), kept, most - kept),
        host=need_of(jaxpr).bytes() + held_by_arguments(jaxpr),
        state_ms=streams * argument_bytes(args, in_host_memory=True) / machine.bus(devices).together / 1e6,
    )


def computing_seconds(jaxpr: Jaxpr, args: Any, machine: Machine) -> float:
    """Return the seconds of a traced step if no copy took any, with the collectives that the compiler adds."""
    devices = spread(args)
    each = ((s.stack, collective_seconds(s, args, devices, machine.link)) for s in scans_in(jaxpr, devices))
    collectives = sum(stack.runs * stack.layers * seconds for stack, seconds in each)
    return cost(jaxpr, machine, devices).seconds + collectives
