"""Whether the pinned host pool holds what a program's scans, chains and checkpoints offload together.

Apart from `host_pool_limit`, because it reads the loops, which `scan` and `chain` make after they asked for the limit.
"""

from typing import NamedTuple

from jax.extend.core import Jaxpr

from .._jax import on_host
from .._text import readable
from .copying_loops import Segment, backward_p, forward_p
from .device_bytes import Buffer, Op, Straight, straight
from .host_pool_limit import HostPoolFull, auto_axes, host_pool_bytes
from .interleaved import interleaved_p
from .last_rows import beyond_a_row
from .layer import shares
from .walk import nested


class Stack(NamedTuple):
    """What one segment of a scan keeps on the host, besides a padding row: `layers` of `each` bytes per device."""

    layers: int
    each: int


class Need(NamedTuple):
    """The most that a program has on the host at once: `stacks`, `other` bytes per device, and the largest of `loops`.

    Everything in one straight piece of a program counts together, though one gradient may end before the next begins:
    XLA may run them side by side, and allocates the stacks of both before either runs. A loop counts as one iteration
    (an unrolled one as those that stand side by side): what an iteration keeps is freed before the next. Loops and
    branches run one after another. XLA's plans for an H200 are not larger, except for unrolled loops around gradients.
    """

    stacks: list[Stack]
    other: int
    loops: "list[tuple[int, Need]]"  # how many iterations stand side by side, and what each needs

    def bytes(self, layers: int | None = None) -> int:
        """Bytes per device, if at most `layers` layers of each scan offload."""
        rows = [s if layers is None else s._replace(layers=min(s.layers, layers)) for s in self.stacks]
        stacks = sum((s.layers + 1) * s.each for s in rows if s.layers)
        return stacks + self.other + max((times * loop.bytes(layers) for times, loop in self.loops), default=0)

    def most_layers(self) -> int:
        """The largest number of layers that a scan offloads."""
        return max([s.layers for s in self.stacks] + [loop.most_layers() for _, loop in self.loops], default=0)


def need_of(jaxpr: Jaxpr, results_too: bool = True) -> Need:
    """What a program offloads, without what it is given in host memory. `results_too`: what it returns there counts."""
    program = straight(jaxpr)
    returned = set() if results_too else set(program.outputs)
    need = Need([], 0, [])
    for op in program.ops:
        need = _with(need, op, program, returned)
    return need


def _with(need: Need, op: Op, program: Straight, returned: set[Buffer | None]) -> Need:
    eqn, (stacks, other, loops) = op.eqn, need
    if eqn.primitive in (forward_p, backward_p):
        segments: list[Segment] = eqn.params["loops"].segments
        offloads = [segment for segment in segments if segment.on_host and eqn.primitive is forward_p]
        stacks = stacks + [
            Stack(segment.on_host, sum(shares(segment.jaxpr, segment.layer.kept, "host"))) for segment in offloads
        ]
        inside = [(segment.layers, 1, need_of(segment.jaxpr, False)) for segment in segments]
    elif eqn.primitive is interleaved_p:
        offloads = [segment for loops in eqn.params["loops"] for segment in loops.segments if segment.on_host]
        each = [Stack(segment.on_host, sum(shares(segment.jaxpr, segment.layer.kept, "host"))) for segment in offloads]
        schedule = eqn.params["schedule"]
        sets = schedule.slots if schedule else 2  # of microbatches
        stacks, inside = [*stacks, *each * sets], []
        if schedule:
            other += sets * sum(beyond_a_row(s.layer, s.layers) for s in offloads if s.on_host == s.layers)
    else:
        other += sum(program.share(x) for x in op.results if on_host(x.aval) and x not in returned)
        length, unroll = eqn.params.get("length", 2), eqn.params.get("unroll", 1)  # 2: more than one
        inside = [(length, min(unroll, length), need_of(body, False)) for body in nested(eqn)]
    for length, times, one in inside:
        if length > 1:
            loops = [*loops, (times, one)]
        else:  # XLA inlines a loop of one iteration
            stacks, other, loops = stacks + one.stacks, other + one.other, loops + one.loops
    return Need(stacks, other, loops)


def refuse_what_does_not_fit(caller: str, jaxpr: Jaxpr) -> None:
    """Raise if a differentiated program does not fit, whatever `on_host_full` says.

    Raises:
      HostPoolFull: it offloads more than the pinned host pool holds.
    """
    pool = host_pool_bytes()
    if pool is None or (total := (need := need_of(jaxpr)).bytes()) <= pool:
        return
    fits = (layers for layers in reversed(range(need.most_layers())) if need.bytes(layers) <= pool)
    message = f"all together would offload {readable(total)} per device; the pinned host pool holds {readable(pool)}"
    raise HostPoolFull(caller, message, total, pool, next(fits, None), auto_axes())
