"""Count what a program's scans, chains and checkpoints keep in the pinned host pool together, and refuse too much."""

import itertools
from typing import NamedTuple

from jax.extend.core import Jaxpr
from jax.extend.core.primitives import dynamic_slice_p, scan_p

from ..._jax import BACKWARD, FORWARD, on_host
from ..._text import readable
from ..jaxprs.flat import Buffer, Op, Straight, straight
from ..jaxprs.walk import nested, operands_of
from .limit import HostPoolFull, auto_axes, host_pool_bytes


class Stack(NamedTuple):
    """The rows of one segment of a scan on the host, besides padding: `layers` of `each` bytes per device."""

    layers: int
    each: int


class Need(NamedTuple):
    """The most that a program has on the host at once: `stacks`, `other` bytes per device, and the largest of `loops`.

    Everything in one straight piece of a program counts together, though one gradient may end before the next begins:
    XLA may run them side by side, and allocates the stacks of both before either runs. A loop counts as one iteration
    (an unrolled one as those that stand side by side): what an iteration keeps is freed before the next. Loops and
    branches run one after another. XLA's plans for an H200 are not larger, except for unrolled loops around gradients.
    """

    stacks: tuple[Stack, ...] = ()
    other: int = 0
    loops: "tuple[tuple[int, Need], ...]" = ()  # how many iterations stand side by side, and what each needs

    def plus(self, other: "Need", times: int = 1) -> "Need":
        """Both in one piece of a program, the other so many times."""
        stacks = self.stacks + other.stacks * times
        return Need(stacks, self.other + times * other.other, self.loops + other.loops)

    def bytes(self, layers: int | None = None) -> int:
        """Bytes per device, if at most `layers` layers of each scan offload."""
        rows = [s if layers is None else s._replace(layers=min(s.layers, layers)) for s in self.stacks]
        stacks = sum((s.layers + 1) * s.each for s in rows if s.layers)
        return stacks + self.other + max((times * loop.bytes(layers) for times, loop in self.loops), default=0)

    def most_layers(self) -> int:
        """The largest number of layers that a scan offloads."""
        return max([*(s.layers for s in self.stacks), *(loop.most_layers() for _, loop in self.loops)], default=0)


def need_of(jaxpr: Jaxpr, results_too: bool = True) -> Need:
    """Return what a program offloads, except its inputs in host memory. `results_too`: its results count."""
    program = straight(jaxpr)
    returned = set() if results_too else set(program.outputs)
    rows = program.written | {x.moved for op in program.ops for x in op.results if x.moved}
    need = Need()
    for op in program.ops:
        need = need.plus(_of_op(op, program, returned, rows))
    return need


def _of_op(op: Op, program: Straight, returned: set[Buffer | None], rows: set[Buffer]) -> Need:
    eqn = op.eqn
    if isinstance(need := eqn.params.get("need"), Need):  # microbatches'
        return need
    if eqn.primitive.name in (FORWARD, BACKWARD):
        loops = eqn.params["loops"]
        need = Need(loops.stacks if eqn.primitive.name == FORWARD else ())
        inside = [(segment.layers, 1, need_of(segment.jaxpr, False)) for segment in loops.segments]
    else:
        need = Need(other=sum(map(program.share, _stored_on_host(op, program, rows) - returned)))
        length, unroll = eqn.params.get("length", 2), eqn.params.get("unroll", 1)  # 2: more than one
        inside = [(length, min(unroll, length), need_of(body, False)) for body in nested(eqn)]
    for length, times, one in inside:  # XLA inlines a loop of one iteration
        need = need.plus(Need(loops=((times, one),)) if length > 1 else one)
    return need


def _stored_on_host(op: Op, program: Straight, rows: set[Buffer]) -> set[Buffer]:
    """Return the results of an op that need room on the host: not what a scan carries there, which it updates in place,
    nor `rows` that a copy takes from a stack or writes into one."""
    results = {x for x in op.results if on_host(x.aval)} - program.written
    if op.eqn.primitive is scan_p:
        is_carried = [operand is None for operand in operands_of(op.eqn, op.eqn.params["jaxpr"])]
        carried = zip(op.results, itertools.compress(op.operands, is_carried), strict=False)
        return results - {result for result, operand in carried if operand and on_host(operand.aval)}
    return results - rows if op.eqn.primitive is dynamic_slice_p else results


def held_by_arguments(jaxpr: Jaxpr) -> int:
    """Return the bytes per device that a program's arguments have in host memory."""
    program = straight(jaxpr)
    return sum(program.share(x) for x in program.inputs if on_host(x.aval))


def returned_on_host(jaxpr: Jaxpr) -> int:
    """Return the bytes per device that a program returns in host memory."""
    program = straight(jaxpr)
    return sum(program.share(x) for x in set(program.outputs) if x and on_host(x.aval))


def refuse_what_does_not_fit(caller: str, jaxpr: Jaxpr) -> None:
    """Raise if a differentiated program does not fit, whatever `on_host_full` says.

    Raises:
      HostPoolFull: it offloads more than the pinned host pool holds.
    """
    pool, held = host_pool_bytes(), held_by_arguments(jaxpr)
    if pool is None or (total := (need := need_of(jaxpr)).bytes() + held) <= pool:
        return
    fits = (layers for layers in reversed(range(need.most_layers())) if need.bytes(layers) + held <= pool)
    of_arguments = f", and {readable(held)} are its arguments' there" if held else ""
    message = f"all together would offload {readable(total - held)} per device{of_arguments}"
    message += f"; the pinned host pool holds {readable(pool)}"
    raise HostPoolFull(caller, message, total, pool, next(fits, None), auto_axes())
