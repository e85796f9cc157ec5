"""One layer of a scan, differentiated: what its forward pass keeps, and its cotangents from what was kept.

The body of a `lax.scan` is differentiated once, a plan is made on the result, and `jax.checkpoint` splits it under that
plan. Where the kept values live between forward and backward is not its business: the loops see to that.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple
from typing import Literal as OneOf

import jax
from jax import lax
from jax.extend.core import Jaxpr, Literal, Var, jaxpr_as_fun
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from .._policy import VERDICT, Policy
from .derivative import cached, derivative, plan_of_jvp
from .names import PlanName
from .plan import Override, Plan
from .slots import is_residual_of, separate_slots
from .source import Source, follow, is_its_operand, source_of
from .straight import straight

# Between forward and backward a residual is: an "operand" (a constant or a slice of xs), which is read again; the same
# in every layer, and kept "once"; or a layer's own, which goes to the "host" or stays on the "device".
Place = OneOf["operand", "once", "host", "device"]


class Kept(NamedTuple):
    """A residual of one layer: where the plan wants it, and what it is."""

    place: Place
    operand: int  # the number of the body's operand that it is; -1 for all others
    source: Source  # its names lead to its rows in the plan

    @property
    def name(self) -> PlanName | None:
        return self.source.name


def in_three(xs: Sequence[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The first, the second so many, and the rest."""
    return list(xs[:first]), list(xs[first : first + second]), list(xs[first + second :])


class Body(NamedTuple):
    """A scan's body: (constants, carry, xs) -> (carry, ys), all flat; how many of each."""

    jaxpr: Jaxpr
    consts: int
    carry: int

    @property
    def roles(self) -> tuple[str, ...]:
        """Of the operands, for `make_plan`."""
        xs = len(self.jaxpr.invars) - self.consts - self.carry
        return ("weight",) * self.consts + ("carry",) * self.carry + ("weight",) * xs

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, carry and xs."""
        return in_three(operands, self.consts, self.carry)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """A body and its derivative.

    Attributes:
      consts, carry: how many of the operands, and of the results, are constants and carry.
      forward: operands -> carry, ys, and those residuals that are no operands.
      linear: all residuals, tangents of the perturbed operands -> tangents of the perturbed results.
      kept: the residuals, in the order of `linear`.
      perturbed, out_perturbed: which operands and which results have tangents.
    """

    consts: int
    carry: int
    forward: Jaxpr
    linear: Jaxpr
    kept: tuple[Kept, ...]
    plan: Plan
    perturbed: tuple[bool, ...]
    out_perturbed: tuple[bool, ...]

    @property
    def host_bytes(self) -> int:
        """Bytes a device that the layer keeps on the host, where it offloads."""
        return host_share(self.forward, self.kept)

    @property
    def for_host(self) -> list[str]:
        """The names of each residual for the host."""
        names = {row.plan_name: ", ".join(row.names) or "(matrix product)" for row in self.plan.rows}
        return [", ".join(names[str(name)] for name in k.source.names) for k in self.kept if k.place == "host"]

    @property
    def copies(self) -> list[Any]:
        """For each residual for the host a scope to trace its copies in, once: a profile then knows whose they are."""
        return [jax.named_scope(f"jaxoffload({names})") for names in self.for_host]

    @cached
    def backward(self, wanted: tuple[bool, ...]) -> Jaxpr:
        """All residuals, cotangents of the wanted among the perturbed results -> those of the perturbed operands."""
        outs = [v for v, w in zip(self.linear.outvars, wanted, strict=True) if w]
        return transposed(self.linear.replace(outvars=outs, debug_info=without_paths(self.linear)), len(self.kept))

    def __repr__(self) -> str:
        """Short, for it stands in printed jaxprs."""
        return f"Layer({self.plan})"


def transposed(linear: Jaxpr, size: int) -> Jaxpr:
    """`size` residuals, cotangents of all results -> those of the tangents, of a jaxpr that is linear in these."""
    residuals, tangents = linear.in_avals[:size], linear.in_avals[size:]

    def transpose(residuals: list[Any], cotangents: list[Any]) -> Any:
        # Not jax.linear_transpose: it evaluates what depends on residuals alone first, effects twice then.
        primals = [*residuals, *map(ad.UndefinedPrimal, tangents)]
        found = ad.backward_pass(linear, False, linear.consts, primals, cotangents)
        return [ad.instantiate_zeros(ct) for ct in found[size:]]

    return jax.make_jaxpr(transpose)(residuals, [aval.to_ct_aval() for aval in linear.out_avals])


@cached
def host_share(forward: Jaxpr, kept: tuple[Kept, ...]) -> int:
    """Bytes a device of what a layer's forward pass keeps for the host."""
    stored = [k.place for k in kept if k.place != "operand"]
    made = straight(forward)
    residuals = made.outputs[len(made.outputs) - len(stored) :]
    return sum(made.share(x) for x, place in zip(residuals, stored, strict=True) if x and place == "host")


def apart(residuals: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
    """The same values. What is computed of them cannot become one with what the forward pass computed."""
    return lax.optimization_barrier((residuals, cotangents))


class _InPlace(NamedTuple):
    """A plan as the policy of a `jax.checkpoint` that moves nothing: what is to be offloaded is saved."""

    plan: Plan

    def __call__(self, prim: Any, *args: Any, **params: Any) -> Any:
        if is_residual_of(self.plan, prim, params):
            return VERDICT["save"]
        verdict = self.plan(prim, *args, **params)
        return verdict if verdict is VERDICT["recompute"] else VERDICT["save"]


def plan_of(policy: Any) -> Plan | None:
    """The plan behind the `policy` of a `jax.checkpoint`, if there is one."""
    return policy.plan if isinstance(policy, _InPlace) else policy if isinstance(policy, Plan) else None


@cached
def linearize(
    jaxpr: Jaxpr, consts: int, carry: int, perturbed: tuple[bool, ...], policy: Policy, strict: bool, layers: Override
) -> Layer:
    """The derivative of a body with respect to its perturbed operands, under the plan that `policy` makes of it.

    `perturbed` must be closed: a carry that comes out perturbed goes in perturbed (`perturbed_carry`).
    """
    body = Body(jaxpr, consts, carry)
    jvp, out_perturbed = _derivative(body, perturbed, policy)
    plan, planned = plan_of_jvp(jaxpr, body.roles, jvp, policy, strict, layers)
    in_place: Any = _InPlace(plan)
    # The two passes are apart: in two loops, or by `apart`. Barriers in a loop would only keep slices out of kernels.
    planned = separate_slots(planned, plan)
    run = jax.checkpoint(lambda *args: jaxpr_as_fun(planned)(*args), policy=in_place, prevent_cse=False)
    known, linear = _halves(jax.make_jaxpr(run)(*planned.in_avals), len(perturbed), len(out_perturbed))
    known, linear = _each_once(known, linear, len(out_perturbed))
    kept = tuple(_kept(known, body, known.outvars[len(out_perturbed) :]))
    stored = [v for v, k in zip(known.outvars[len(out_perturbed) :], kept, strict=True) if k.place != "operand"]
    outs = [*known.outvars[: len(out_perturbed)], *stored]
    forward = known.replace(outvars=outs, debug_info=without_paths(known))
    return Layer(consts, carry, forward, linear, kept, plan, perturbed, out_perturbed)


def _derivative(body: Body, perturbed: tuple[bool, ...], policy: Policy) -> tuple[Jaxpr, tuple[bool, ...]]:
    """The JVP of a body, and which results have tangents. The carry has one wherever it went in with one."""
    ys = len(body.jaxpr.outvars) - body.carry
    return derivative(body.jaxpr, perturbed, (*body.split(perturbed)[1], *[False] * ys), policy.dots != "recompute")


def perturbed_carry(body: Body, perturbed: Sequence[bool], policy: Policy) -> tuple[bool, ...]:
    """`perturbed`, and also each part of the carry that a perturbed operand reaches in some layer."""
    while True:
        consts, carry, xs = body.split(perturbed)
        reached = _derivative(body, tuple(perturbed), policy)[1][: body.carry]
        if carry == list(reached):
            return tuple(perturbed)
        perturbed = [*consts, *reached, *xs]


def _halves(jaxpr: Jaxpr, primals: int, results: int) -> tuple[Jaxpr, Jaxpr]:
    """A JVP in two: (primals -> results, residuals) and (residuals, tangents -> tangents of the results)."""
    unknown = [False] * primals + [True] * (len(jaxpr.invars) - primals)
    instantiate = [False] * results + [True] * (len(jaxpr.outvars) - results)
    known, linear, _, _ = pe.partial_eval_jaxpr_nounits(jaxpr, unknown, instantiate)
    return known, linear


def _each_once(known: Jaxpr, linear: Jaxpr, results: int) -> tuple[Jaxpr, Jaxpr]:
    """The halves without second copies: a nested call may return as a residual what it took, or returns anyway."""
    residuals, operands = known.outvars[results:], set(known.invars)
    sources = [follow(known, v, is_its_operand) for v in residuals]
    binders, tangents = linear.invars[: len(residuals)], linear.invars[len(residuals) :]
    first: dict[int, tuple[Any, Var]] = {}
    for residual, source, binder in zip(residuals, sources, binders, strict=True):
        is_operand = isinstance(source, Var) and source in operands
        first.setdefault(id(source), (source if is_operand else residual, binder))
    same = {binder: first[id(source)][1] for source, binder in zip(sources, binders, strict=True)}
    renamed = lambda atoms: [same.get(v, v) if isinstance(v, Var) else v for v in atoms]
    known = known.replace(
        outvars=[*known.outvars[:results], *(r for r, _ in first.values())], debug_info=without_paths(known)
    )
    linear = linear.replace(
        invars=[*(binder for _, binder in first.values()), *tangents],
        outvars=renamed(linear.outvars),
        eqns=[eqn.replace(invars=renamed(eqn.invars)) for eqn in linear.eqns],
        debug_info=linear.debug_info.with_unknown_names(),
    )
    return known, linear


def _kept(known: Jaxpr, body: Body, residuals: Sequence[Any]) -> list[Kept]:
    operands = {var: i for i, var in enumerate(known.invars)}
    same = _same_in_every_layer(known, body.consts)
    carry = range(body.consts, body.consts + body.carry)

    def kept(var: Any) -> Kept:
        if isinstance(var, Literal):
            return Kept("once", -1, Source(None, "a constant"))
        if var in operands and operands[var] not in carry:
            return Kept("operand", operands[var], Source(None, "an operand"))
        found = Source(None, "the carry of a scan") if var in operands else source_of(known, var)
        if var in same:
            return Kept("once", -1, found._replace(where="the same in every layer"))
        return Kept("host" if found.name and found.name.decision == "offload" else "device", -1, found)

    return [kept(var) for var in residuals]


def _same_in_every_layer(jaxpr: Jaxpr, consts: int) -> set[Var]:
    same = {*jaxpr.constvars, *jaxpr.invars[:consts]}
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(not isinstance(v, Var) or v in same for v in eqn.invars):
            same.update(eqn.outvars)
    return same


def without_paths(jaxpr: Jaxpr) -> Any:
    """Debug info for other results than those that were traced."""
    return jaxpr.debug_info._replace(result_paths=None)
