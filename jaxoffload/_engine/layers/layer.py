"""One layer of a scan, differentiated: what its forward pass keeps, and its cotangents from what was kept.

The body of a `lax.scan` is differentiated once, a plan is made for the result, and `jax.checkpoint` splits it under
that plan. The loops decide where the kept values live between the forward and the backward pass.
"""

import dataclasses
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from typing import Literal as OneOf

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import name_p

from ..._jax import SAME, UndefinedPrimal, backward_pass, instantiate_zeros, partial_eval_jaxpr_nounits
from ..._names import Name, PlanName
from ..._policy import VERDICT, Policy
from ..._tracing import under
from ..decide.branch_slots import is_residual, separate_slots
from ..decide.derivative import cached, derivative, plan_of_jvp
from ..decide.plan import Override, Plan
from ..jaxprs.flat import Straight, straight
from ..jaxprs.source import Source, follow, is_its_operand, source_of
from ..jaxprs.values import DOT

# What happens to a residual between the passes. An "operand" (a constant, or a slice of xs) is read again; one that is
# the same in every layer is kept "once"; any other goes to the "host" or stays on the "device".
Place = OneOf["operand", "once", "host", "device"]


class Kept(NamedTuple):
    """A residual of one layer: where the plan wants it, and what it is."""

    place: Place
    operand: int | None  # the number of the body's operand that it is, if any
    source: Source  # its names lead to its rows in the plan

    @property
    def name(self) -> PlanName | None:
        return self.source.name

    @property
    def rows(self) -> frozenset[int]:
        """The numbers of its rows in the plan: the same under each `Override`."""
        return frozenset(name.number for name in self.source.names)


def in_three(xs: Sequence[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The first `first` values, the next `second` ones, and the rest."""
    return list(xs[:first]), list(xs[first : first + second]), list(xs[first + second :])


class Body(NamedTuple):
    """A scan's body: (constants, carry, xs) -> (carry, ys), all flat; `consts` and `carry` count them."""

    jaxpr: Jaxpr
    consts: int
    carry: int

    @property
    def roles(self) -> tuple[str, ...]:
        """What each operand is, for `make_plan`."""
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
      forward: operands -> carry, ys, and the residuals that are not operands.
      tangent_jaxpr: all residuals, tangents of the perturbed operands -> tangents of the perturbed results.
      kept: the residuals, in the order of `tangent_jaxpr`.
      perturbed, out_perturbed: which operands and which results have tangents.
      body: the body's jaxpr, if it still lives: layers are cached for as long as it does.
    """

    consts: int
    carry: int
    forward: Jaxpr
    tangent_jaxpr: Jaxpr
    kept: tuple[Kept, ...]
    plan: Plan
    perturbed: tuple[bool, ...]
    out_perturbed: tuple[bool, ...]
    body: Callable[[], Jaxpr | None]

    @property
    def whole_body(self) -> Body:
        """The body, which must still live."""
        jaxpr = self.body()
        assert jaxpr is not None
        return Body(jaxpr, self.consts, self.carry)

    def recomputing(self, rows: frozenset[int]) -> "Layer":
        """Return the layer if it recomputed these rows of its plan, which are marked offload."""
        override = Override("recompute", "a pass runs alone", rows)
        return linearize(self.whole_body, self.perturbed, self.plan.policy, False, override)

    @property
    def only_forward(self) -> bool:
        """Whether nothing is kept for a backward pass, which there is none of."""
        return len(self.kept) + sum(self.perturbed) < len(self.tangent_jaxpr.invars)

    @property
    def host_bytes(self) -> int:
        """Bytes per device that the layer keeps on the host where it offloads."""
        return sum(shares(self.forward, self.kept, "host"))

    @property
    def for_host(self) -> list[str]:
        """The names of each residual for the host."""
        names = {row.plan_name: ", ".join(row.names) or "(matmul)" for row in self.plan.rows}
        return [", ".join(names[name] for name in k.source.names) for k in self.kept if k.place == "host"]

    @property
    def copies(self) -> list[Any]:
        """A scope per residual for the host, to trace its copies in, once: a profile then shows whose they are."""
        return [jax.named_scope(f"jaxoffload({names})") for names in self.for_host]

    def backward(self, wanted: tuple[bool, ...]) -> Jaxpr:
        """All residuals, cotangents of the perturbed results that are `wanted` -> those of the perturbed operands."""
        return _backward(self.tangent_jaxpr, wanted, len(self.kept))

    def with_on_device(self, residuals: Collection[frozenset[int]]) -> "Layer":
        """The layer, with residuals on the device that the plan wants on the host: those with these `rows`."""
        kept = (k._replace(place="device") if k.place == "host" and k.rows in residuals else k for k in self.kept)
        return dataclasses.replace(self, kept=tuple(kept))

    def __repr__(self) -> str:
        """Short: it is printed in jaxprs."""
        return f"Layer({self.plan})"


@cached
def _backward(linear: Jaxpr, wanted: tuple[bool, ...], residuals: int) -> Jaxpr:
    outs = [v for v, w in zip(linear.outvars, wanted, strict=True) if w]
    return transposed(linear.replace(outvars=outs, debug_info=without_paths(linear)), residuals)


def transposed(linear: Jaxpr, size: int) -> Jaxpr:
    """The transpose of a jaxpr that is linear in what follows `size` residuals: residuals, cotangents -> cotangents."""
    residuals, tangents = linear.in_avals[:size], linear.in_avals[size:]

    def transpose(residuals: list[Any], cotangents: list[Any]) -> Any:
        # Not jax.linear_transpose: it first evaluates what depends on residuals alone, so effects would run twice.
        primals = [*residuals, *map(UndefinedPrimal, tangents)]
        cotangents = backward_pass(linear, False, linear.consts, primals, cotangents)
        return [instantiate_zeros(ct) for ct in cotangents[size:]]

    return jax.make_jaxpr(transpose)(residuals, [aval.to_ct_aval() for aval in linear.out_avals])


@cached
def shares(forward: Jaxpr, kept: tuple[Kept, ...], place: str) -> list[int]:
    """Bytes per device of each residual that a layer's forward pass keeps for a place."""
    return shares_of(straight(forward), kept, place)


def shares_of(forward: Straight, kept: tuple[Kept, ...], place: str) -> list[int]:
    """The same, for a forward pass that is a straight program."""
    stored = [k.place for k in kept if k.place != "operand"]
    residuals = forward.outputs[len(forward.outputs) - len(stored) :]
    return [forward.share(x) if x else 0 for x, p in zip(residuals, stored, strict=True) if p == place]


def avals_of(forward: Jaxpr, kept: tuple[Kept, ...], place: str) -> list[Any]:
    """What they are, in the same order."""
    stored = [k.place for k in kept if k.place != "operand"]
    residuals = forward.out_avals[len(forward.out_avals) - len(stored) :]
    return [aval for aval, p in zip(residuals, stored, strict=True) if p == place]


def prevent_cse_barrier(residuals: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
    """The same values. XLA cannot merge what is computed from them with what the forward pass computed."""
    return lax.optimization_barrier((residuals, cotangents))


class _InPlace(NamedTuple):
    """A plan as the policy of a `jax.checkpoint` that moves nothing: it saves what is marked offload."""

    plan: Plan

    def __call__(self, prim: Any, *args: Any, **params: Any) -> Any:
        if is_residual(prim, params) and params["name"] in self.plan.plan_names:
            return VERDICT["save"]
        verdict = self.plan(prim, *args, **params)
        return verdict if verdict is VERDICT["recompute"] else VERDICT["save"]


def plan_of(policy: Any) -> Plan | None:
    """The plan behind the `policy` of a `jax.checkpoint`, if there is one."""
    policy = policy.plan if isinstance(policy, _InPlace) else policy
    return policy if isinstance(policy, Plan) else None


@cached
def linearize(body: Body, perturbed: tuple[bool, ...], policy: Policy, strict: bool, override: Override) -> Layer:
    """The derivative of a body with respect to its perturbed operands, under the plan that `policy` makes for it.

    `perturbed` must be closed: a carry that comes out perturbed goes in perturbed (`perturbed_carry`).
    """
    jvp, out_perturbed = derivative_of(body, perturbed, policy)
    with under(around=policy, around_layers=True):
        plan, planned = plan_of_jvp(body.jaxpr, body.roles, jvp, policy, strict, override)
    in_place: Any = _InPlace(plan)
    # prevent_cse=False: the passes are two loops, or `prevent_cse_barrier` is between them. A barrier in a loop would
    # only keep slices out of kernels.
    planned = separate_slots(planned, plan)
    run = jax.checkpoint(lambda *args: jaxpr_as_fun(planned)(*args), policy=in_place, prevent_cse=False)
    results = len(out_perturbed)
    known, linear = halves(jax.make_jaxpr(run)(*planned.in_avals), len(perturbed), results)
    known, linear = each_once(known, linear, results)
    kept = kept_of(known, body, known.outvars[results:])
    stored = [v for v, k in zip(known.outvars[results:], kept, strict=True) if k.place != "operand"]
    forward = known.replace(outvars=[*known.outvars[:results], *stored], debug_info=without_paths(known))
    weakly = weakref.ref(body.jaxpr)
    return Layer(body.consts, body.carry, forward, linear, kept, plan, perturbed, out_perturbed, weakly)


def keeps_some(policy: Any, layer: Layer) -> bool:
    """Return whether a policy around a scan, of a checkpoint, keeps any floating-point value that its layers keep.

    It is asked as JAX asks it about the equations of a nested function: about names, and one of JAX's own about what
    computes a value, too. Integers, which a `Policy` always saves, do not count: a layer's values are kept all or none.
    """
    asked = plan.policy if (plan := plan_of(policy)) else policy
    stored = [k for k in layer.kept if k.place != "operand"]
    values: list[Any] = layer.forward.outvars[len(layer.forward.outvars) - len(stored) :]
    made = {v: eqn for eqn in layer.forward.eqns for v in eqn.outvars}
    is_kept = lambda verdict: verdict not in (False, VERDICT["recompute"])

    def keeps(name: Name, aval: Any) -> bool:
        if name == DOT:
            return isinstance(asked, Policy) and asked.dots != "recompute"
        return is_kept(asked(name_p, aval, name=str(name)))

    def keeps_what_computes(v: Any) -> bool:
        while isinstance(v, Var) and v in made and made[v].primitive.name in SAME:
            v = made[v].invars[0]
        eqn = made.get(v) if isinstance(v, Var) else None
        return eqn is not None and is_kept(asked(eqn.primitive, *(x.aval for x in eqn.invars), **eqn.params))

    floating = [(k, v) for k, v in zip(stored, values, strict=True) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    by_name = (keeps(name, v.aval) for k, v in floating for of in k.source.names for name in of.names)
    return any(by_name) or (not isinstance(asked, Policy) and any(keeps_what_computes(v) for _, v in floating))


def derivative_of(body: Body, perturbed: tuple[bool, ...], policy: Policy) -> tuple[Jaxpr, tuple[bool, ...]]:
    """The JVP of a body, and which results have tangents: a carry that goes in with one comes out with one."""
    ys = len(body.jaxpr.outvars) - body.carry
    with under(around=policy, around_layers=True):
        return derivative(body.jaxpr, perturbed, (*body.split(perturbed)[1], *[False] * ys), policy.dots != "recompute")


def perturbed_carry(body: Body, perturbed: Sequence[bool], policy: Policy) -> tuple[bool, ...]:
    """`perturbed`, plus each array of the carry that a perturbed operand reaches in some layer."""
    while True:
        consts, carry, xs = body.split(perturbed)
        reached = derivative_of(body, tuple(perturbed), policy)[1][: body.carry]
        if carry == list(reached):
            return tuple(perturbed)
        perturbed = [*consts, *reached, *xs]


def halves(jaxpr: Jaxpr, primals: int, results: int) -> tuple[Jaxpr, Jaxpr]:
    """A JVP in two halves: (primals -> results, residuals) and (residuals, tangents -> tangents of the results)."""
    unknown = [False] * primals + [True] * (len(jaxpr.invars) - primals)
    instantiate = [False] * results + [True] * (len(jaxpr.outvars) - results)
    known, linear, _, _ = partial_eval_jaxpr_nounits(jaxpr, unknown, instantiate)
    return known, linear


def each_once(known: Jaxpr, linear: Jaxpr, results: int) -> tuple[Jaxpr, Jaxpr]:
    """The halves with each residual once. A nested call may return one twice, or return an operand as one."""
    residuals = known.outvars[results:]
    binders = linear.invars[: len(residuals)]
    sources = [follow(known, v, is_its_operand) for v in residuals]
    first: dict[int, Var] = {}
    rename = {binder: first.setdefault(id(source), binder) for source, binder in zip(sources, binders, strict=True)}
    operands = set(known.invars)
    once = [
        source if isinstance(source, Var) and source in operands else residual
        for residual, source, binder in zip(residuals, sources, binders, strict=True)
        if rename[binder] is binder
    ]
    known = known.replace(outvars=[*known.outvars[:results], *once], debug_info=without_paths(known))
    return known, _substitute(linear, rename)


def _substitute(jaxpr: Jaxpr, rename: dict[Var, Var]) -> Jaxpr:
    """`jaxpr` with its variables renamed where they are read, without the inputs that nothing reads any more."""
    renamed = lambda atoms: [rename.get(v, v) if isinstance(v, Var) else v for v in atoms]
    return jaxpr.replace(
        invars=[v for v in jaxpr.invars if rename.get(v, v) is v],
        outvars=renamed(jaxpr.outvars),
        eqns=[eqn.replace(invars=renamed(eqn.invars)) for eqn in jaxpr.eqns],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def kept_of(known: Jaxpr, body: Body, residuals: Sequence[Any]) -> tuple[Kept, ...]:
    """What becomes of each residual of `known`, whose first operands are the body's."""
    operands = {var: i for i, var in enumerate(known.invars)}
    same = _same_in_every_layer(known, body.consts)
    carry = range(body.consts, body.consts + body.carry)

    def kept(var: Any) -> Kept:
        if isinstance(var, Literal):
            return Kept("once", None, Source(None, "a constant", "constant"))
        if var in operands and operands[var] not in carry:
            return Kept("operand", operands[var], Source(None, "an operand"))
        source = Source(None, "the carry of a scan") if var in operands else source_of(known, var)
        if var in same:
            return Kept("once", None, source._replace(where="the same in every layer", kind="once"))
        return Kept("host" if source.name and source.name.decision == "offload" else "device", None, source)

    return tuple(kept(var) for var in residuals)


def _same_in_every_layer(jaxpr: Jaxpr, consts: int) -> set[Var]:
    same = {*jaxpr.constvars, *jaxpr.invars[:consts]}
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(not isinstance(v, Var) or v in same for v in eqn.invars):
            same.update(eqn.outvars)
    return same


def without_paths(jaxpr: Jaxpr) -> Any:
    """Debug info of a jaxpr whose results are not the ones that were traced."""
    return jaxpr.debug_info._replace(result_paths=None)
