"""The cost of a step outside of its layers, and of its layers for each set of kept names."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax

from ..._engine.cost.cost import cost
from ..._engine.jaxprs.flat import division
from ..._jax import nbytes
from ..._policy import Policy
from ..._tracing import Trial, under
from .._predict.machine import Machine
from .._predict.room import divisions, step_room
from .._program.results import trace_of
from . import stacks
from .collectives import of_layer, relaid_bytes, with_collectives
from .costs import Costs, Kept, Step
from .errors import CannotPlan
from .oracle import Oracle, divided
from .patterns import policy_of
from .untagged import runs_again


class Priced(NamedTuple):
    """The result of `priced`.

    Attributes:
      costs, times: of a layer of each stack that keeps certain names; `times` are without working sets.
      untagged: lines for the matmuls that run again even if all names are kept.
    """

    step: Step
    names: stacks.Names
    costs: Callable[[Kept], Costs]
    times: Callable[[Kept], Costs]
    devices: int
    untagged: Callable[[], tuple[str, ...]]


def priced(
    f: Callable[..., Any], args: tuple[Any, ...], fixed: Policy, machine: Machine, one_kernel: Collection[str]
) -> Priced:
    """Return what a step, or a loss and its gradient, costs. It is traced, and each layer is differentiated once."""
    dots = "recompute" if fixed.dots == "offload" else fixed.dots
    nothing = dataclasses.replace(fixed, residuals={}, offload_modules=(), default="recompute", dots=dots)
    trial = Trial(nothing, says_what_interleaves=True)
    with under(whole_program=True):
        plain, is_loss = trial.traced(trace_of)(f, args)
    devices, like = stacks.spread(args), divisions(args)
    found = stacks.stacks_of(plain, devices)
    if not found:
        raise CannotPlan("the function differentiates no jaxoffload.scan; there is nothing to choose")
    names = stacks.names_of(found, fixed)
    policy = lambda decisions: policy_of(decisions, names.recomputable, fixed)
    layers = [divided(each, fixed) for each in found]
    oracle = Oracle(layers, names, policy, machine, like, one_kernel)
    held = stacks.held_by_stages(found, like)
    sums = stacks.accumulated(plain, like)
    kept = stacks.kept_stacks(plain)
    room, most = step_room(
        plain, like, one_kernel, stacks=kept, written_over=not is_loss, held=held, in_place=sums.gradients
    )
    of_least = max(cost.working for cost in oracle(names.least))
    # The walk over a step finds nothing of a layer that runs on a stage.
    oracle = dataclasses.replace(oracle, excess=room.layer - of_least if room.layer else 0)
    of_layers = stacks.layers_seconds(plain, machine, devices)
    # The trial's microbatches write their gradients, and read them again to add them up.
    added = machine.moving(2 * sums.added)
    relaid = relaid_bytes(found, args, devices)
    step = Step(
        seconds=max(0.0, cost(plain, machine, devices).seconds - of_layers - added),
        arguments=sum(_share(leaf) for leaf in jax.tree.leaves(args)),
        other=max(0, most.layers - room.layer) + relaid,
        elsewhere=most.elsewhere + relaid,
        may_stay=sums.may_stay,
        resident=fixed.resident_layers,
        stacks=tuple(each.stack for each in found),
        bus=machine.bus(devices),
        movable=names.movable,
        moved=names.moved,
        recomputable=names.recomputable,
    )
    on_link = [of_layer(each, args, devices, machine.link) for each in found]
    costs, times = (with_collectives(o, on_link) for o in (oracle, dataclasses.replace(oracle, sized=False)))
    everything = lambda: [oracle.passes(layer, names.least | names.free) for layer in layers]
    untagged = lambda: tuple(line for layer in everything() for line in runs_again(layer))
    return Priced(step, names, costs, times, devices, untagged)


def _share(leaf: Any) -> int:
    """Return the bytes per device of an argument."""
    return -(-nbytes(jax.typeof(leaf)) // division(getattr(leaf, "sharding", None)).parts)
