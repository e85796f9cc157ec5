"""The cost of a step outside of its layers, and of its layers for each set of kept names."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._policy import Policy
from ..._tracing import Trial, under
from .._predict.machine import Machine
from .._predict.memory import argument_bytes, divisions, step_bytes
from .._predict.predict import computing_seconds, spread
from .._program.results import trace_of
from . import stacks
from .costs import Costs, Kept, Step
from .errors import CannotPlan
from .oracle import Oracle, divided
from .patterns import policy_of
from .untagged import runs_again


class Priced(NamedTuple):
    """The result of `priced`.

    Attributes:
      costs: of a layer of each stack that keeps certain names.
      untagged: lines for the matmuls that run again even if all names are kept.
    """

    step: Step
    names: stacks.Names
    costs: Callable[[Kept], Costs]
    untagged: tuple[str, ...]


def priced(f: Callable[..., Any], args: tuple[Any, ...], fixed: Policy, machine: Machine) -> Priced:
    """Return what a step, or a loss and its gradient, costs. It is traced, and each layer is differentiated once."""
    dots = "recompute" if fixed.dots == "offload" else fixed.dots
    trial = Trial(dataclasses.replace(fixed, residuals={}, offload_modules=(), default="recompute", dots=dots))
    with under(whole_program=True):
        plain, is_loss = trial.traced(trace_of)(f, args)
    devices, like = spread(args), divisions(args)
    found = stacks.stacks_of(plain, devices)
    if not found:
        raise CannotPlan(
            "the function differentiates no jaxoffload.scan, so there is nothing to choose; a loss must return a "
            "scalar alone, or else pass the step that differentiates it"
        )
    names = stacks.names_of(found, fixed)
    policy = lambda decisions: policy_of(decisions, names.recomputable, fixed)
    layers = [divided(each, fixed) for each in found]
    oracle = Oracle(layers, names, policy, machine, like)
    of_least = list(zip((each.stack for each in found), oracle(frozenset()), strict=True))
    in_layers = sum(stack.runs * stack.layers * cost.seconds for stack, cost in of_least)
    kept = sum(stack.sets * (stack.layers * cost.kept + cost.once) for stack, cost in of_least)
    of_layers = kept + max(cost.working for _, cost in of_least)
    step = Step(
        seconds=max(0.0, computing_seconds(plain, args, machine) - in_layers),
        other=argument_bytes(args) + max(0, step_bytes(plain, like, not is_loss) - of_layers),
        resident=fixed.resident_layers,
        stacks=tuple(each.stack for each in found),
        bus=machine.bus(devices),
        movable=names.movable,
        moved=names.moved,
        recomputable=names.recomputable,
    )
    everything = [oracle.passes(layer, names.least | names.free) for layer in layers]
    untagged = tuple(line for layer in everything for line in runs_again(layer))
    return Priced(step, names, oracle, untagged)
