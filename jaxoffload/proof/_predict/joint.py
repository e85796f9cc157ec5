"""One layer's passes under any set of kept names, from a single derivative.

`linearize` makes them for one policy: it splits the JVP under that policy, and transposes what is linear. Here the JVP
is split and transposed first, with all that the backward pass reads kept. Both passes then are one jaxpr: (operands,
cotangents) -> (results, cotangents of the operands). As a `jax.checkpoint` of that would, JAX's partial evaluation
divides it for any set of names: the values with these names are kept, and what else the backward pass reads runs again
in it. No set of names needs a trace of its own.
"""

import dataclasses
import itertools
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core.primitives import name_p, remat_p

from ..._engine.decide.branch_slots import is_residual, separate_slots
from ..._engine.decide.derivative import plan_of_jvp
from ..._engine.decide.plan import Override, Plan
from ..._engine.jaxprs.walk import walk
from ..._engine.layers.layer import Body, Layer, derivative_of, each_once, halves, laid_out, transposed
from ..._engine.layers.placement import Layout, split_list
from ..._jax import convert_constvars_jaxpr, dce_jaxpr, partial_eval_rules
from ..._policy import VERDICT, Policy


class Passes(NamedTuple):
    """The passes of a layer; the attributes are those of `Layer`, and `backward` has all cotangents."""

    consts: int
    carry: int
    forward: Jaxpr
    backward: Jaxpr
    layout: Layout
    plan: Plan

    @classmethod
    def of(cls, layer: Layer) -> "Passes":
        return cls(layer.consts, layer.carry, layer.forward, layer.backward(), layer.layout, layer.plan)


@dataclasses.dataclass(frozen=True, eq=False)
class Joint:
    """Both passes of a layer as one equation, a `jax.checkpoint` of them, and the plan that names its values.

    Its operands are the constants of the backward pass (`values` has those of both), then those of the forward pass,
    then the body's operands, then cotangents.
    """

    body: Body
    plan: Plan
    eqn: JaxprEqn
    values: tuple[list[Any], list[Any]]

    def passes(self, kept: Collection[str], for_host: Collection[int]) -> Passes:
        """Return the passes that keep the values with these names of the plan.

        `for_host`: the numbers of the rows that may go to the host; the plan would move others too.
        """
        forward, backward, layout = laid_out(*self._halves(kept), self.body)
        layout = layout.staying(lambda rows: rows.isdisjoint(for_host))
        return Passes(self.body.consts, self.body.carry, forward, backward, layout, self.plan)

    def _halves(self, kept: Collection[str]) -> tuple[Jaxpr, Jaxpr]:
        """Return operands -> results, residuals; and residuals, cotangents -> cotangents, with what runs again."""
        of_backward, of_forward = self.values
        results, behind = len(self.body.jaxpr.outvars), len(of_backward)
        primals = range(behind, behind + len(of_forward) + len(self.body.jaxpr.invars))
        unknown = [number not in primals for number in range(len(self.eqn.invars))]
        rule: Any = partial_eval_rules[remat_p]
        everywhere = [True] * len(unknown)
        known_eqn, linear_eqn, is_unknown, is_there, _ = rule(_Keeps(kept), unknown, everywhere, self.eqn)
        known, linear = known_eqn.params["jaxpr"], linear_eqn.params["jaxpr"]

        residuals = known.outvars[len(is_unknown) - sum(is_unknown) :]
        wanted = [number >= results for number, there in enumerate(is_there) if there]
        linear, used = dce_jaxpr(linear, wanted, [*[False] * len(residuals), *unknown])
        is_read, _, reads_operand = split_list(used, [len(residuals), behind])
        read = [*itertools.compress(residuals, is_read), *itertools.compress(known.invars, reads_operand)]
        known = known.replace(outvars=[*known.outvars[:results], *read])
        known, _ = dce_jaxpr(known, [True] * len(known.outvars), True)
        # Constants come first, and those of the backward pass stand behind the residuals here.
        first, constants, rest = split_list(linear.invars, [sum(is_read), behind])
        linear = linear.replace(invars=[*constants, *first, *rest])
        return known.with_consts(of_forward), linear.with_consts(of_backward)


class _Keeps(NamedTuple):
    """A policy for `jax.checkpoint` that saves the values with these names of a plan."""

    names: Collection[str]

    def __call__(self, prim: Any, *_: Any, **params: Any) -> Any:
        saves = (prim is name_p or is_residual(prim, params)) and params["name"] in self.names
        return VERDICT["save" if saves else "recompute"]


def joint(body: Body, perturbed: tuple[bool, ...], policy: Policy) -> Joint | None:
    """Return both passes of a body under a policy that keeps all that any set may keep.

    None if the backward pass by itself computes a value with a name again, as that of a `jax.checkpoint` in the layer
    does: which of the two a set keeps is then not to be seen here.
    """
    jvp, out_perturbed = derivative_of(body, perturbed, policy)
    plan, planned = plan_of_jvp(body.jaxpr, body.roles, jvp, policy, False, Override())
    results = len(out_perturbed)
    known, linear = each_once(*halves(separate_slots(planned, plan), len(perturbed), results), results)
    size = len(known.outvars) - results
    backward = transposed(linear, size)
    if any(site.eqn.primitive is name_p and site.eqn.params["name"] in plan.plan_names for site in walk(backward)):
        return None
    values = backward.consts, known.consts
    before, after = (convert_constvars_jaxpr(half) for half in (known, backward))

    def both(of_backward: list[Any], primals: list[Any], cotangents: list[Any]) -> list[Any]:
        outs = jaxpr_as_fun(before)(*primals)
        return [*outs[:results], *jaxpr_as_fun(after)(*of_backward, *outs[results:], *cotangents)]

    operands = split_list(after.in_avals, [len(values[0]), size])
    trace = jax.make_jaxpr(jax.checkpoint(both, prevent_cse=False))(operands[0], before.in_avals, operands[2])
    # Constants from outside of a `shard_map` are resharded first.
    (eqn,) = (eqn for eqn in trace.eqns if eqn.primitive is remat_p)
    return Joint(body, plan, eqn, values)
