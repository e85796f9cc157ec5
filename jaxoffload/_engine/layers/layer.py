"""One layer of a scan, differentiated: what its forward pass keeps, and its cotangents from what was kept.

The body of a `lax.scan` is differentiated once, a plan is made for the result, and `jax.checkpoint` splits it under
that plan.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Var, jaxpr_as_fun
from jax.extend.core.primitives import name_p

from ..._jax import SAME, UndefinedPrimal, backward_pass, instantiate_zeros, partial_eval_jaxpr_nounits
from ..._names import Name
from ..._policy import VERDICT, Policy
from ..._tracing import under
from ..decide.branch_slots import is_residual, separate_slots
from ..decide.derivative import cached, derivative, plan_of_jvp
from ..decide.plan import Override, Plan
from ..jaxprs.flat import straight
from ..jaxprs.inline import with_unknown_names
from ..jaxprs.source import follow, is_its_operand
from ..jaxprs.values import DOT
from .placement import Layout, Stored, kept_of, split_list


class Body(NamedTuple):
    """A scan's body: (constants, carry, xs) -> (carry, ys), all flat; `consts` and `carry` count them."""

    jaxpr: Jaxpr
    consts: int
    carry: int

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each operand, for `make_plan`."""
        xs = len(self.jaxpr.invars) - self.consts - self.carry
        return ("weight",) * self.consts + ("carry",) * self.carry + ("weight",) * xs

    def split(self, operands: Sequence[Any]) -> list[list[Any]]:
        """Return constants, carry and xs."""
        return split_list(operands, [self.consts, self.carry])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """A body and its derivative.

    Attributes:
      consts, carry: how many of the operands, and of the results, are constants and carry.
      forward: operands -> carry, ys, and the residuals that are not operands.
      tangent_jaxpr: all residuals, tangents of the perturbed operands -> tangents of the perturbed results.
      layout: where the residuals are.
      perturbed, out_perturbed: which operands and which results have tangents.
      body: the body's jaxpr, if it still lives: layers are cached for as long as it does.
    """

    consts: int
    carry: int
    forward: Jaxpr
    tangent_jaxpr: Jaxpr
    layout: Layout
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
        """True if nothing is kept, because there is no backward pass."""
        return len(self.layout.kept) + sum(self.perturbed) < len(self.tangent_jaxpr.invars)

    @functools.cached_property
    def sizes(self) -> Stored[int]:
        """Bytes per device of each residual, where the layer offloads."""
        return self.layout.sizes(straight(self.forward))

    @property
    def moved_names(self) -> list[str]:
        """The names of each residual for the host."""
        names = {row.plan_name: ", ".join(row.names) or "(matmul)" for row in self.plan.rows}
        return [", ".join(names[name] for name in k.source.names) for k in self.layout.select(self.layout.kept, "host")]

    @property
    def copies(self) -> list[Any]:
        """A scope per residual for the host, to trace its copies in, once: a profile then shows whose they are."""
        return [jax.named_scope(f"jaxoffload({names})") for names in self.moved_names]

    def backward(self, wanted: tuple[bool, ...] = ()) -> Jaxpr:
        """All residuals, cotangents of the perturbed results that are `wanted`, by default all -> of the operands."""
        wanted = wanted or (True,) * sum(self.out_perturbed)
        return _backward(self.tangent_jaxpr, wanted, len(self.layout.kept))

    def __repr__(self) -> str:
        """Short: it is printed in jaxprs."""
        return f"Layer({self.plan})"


@cached
def _backward(linear: Jaxpr, wanted: tuple[bool, ...], residuals: int) -> Jaxpr:
    outs = [v for v, w in zip(linear.outvars, wanted, strict=True) if w]
    return transposed(linear.replace(outvars=outs, debug_info=with_unknown_names(linear)), residuals)


def transposed(linear: Jaxpr, size: int) -> Jaxpr:
    """The transpose of a jaxpr that is linear in what follows `size` residuals: residuals, cotangents -> cotangents."""
    residuals, tangents = linear.in_avals[:size], linear.in_avals[size:]

    def transpose(residuals: list[Any], cotangents: list[Any]) -> Any:
        # Not jax.linear_transpose: it first evaluates what depends on residuals alone, so effects would run twice.
        primals = [*residuals, *map(UndefinedPrimal, tangents)]
        cotangents = backward_pass(linear, False, linear.consts, primals, cotangents)
        return [instantiate_zeros(ct) for ct in cotangents[size:]]

    return jax.make_jaxpr(transpose)(residuals, [aval.to_ct_aval() for aval in linear.out_avals])


def prevent_cse_barrier(residuals: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
    """Fence the values, so that XLA cannot merge what they lead to with what the forward pass computed."""
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
    known, linear = halves(jax.make_jaxpr(run)(*planned.in_avals), len(perturbed), len(out_perturbed))
    forward, linear, layout = laid_out(known, linear, body)
    weakly = weakref.ref(body.jaxpr)
    return Layer(body.consts, body.carry, forward, linear, layout, plan, perturbed, out_perturbed, weakly)


def laid_out(known: Jaxpr, linear: Jaxpr, body: Body) -> tuple[Jaxpr, Jaxpr, Layout]:
    """Return the halves with each residual once, the first without those that are operands; and where each one is."""
    results = len(body.jaxpr.outvars)
    known, linear = each_once(known, linear, results)
    outs, residuals = split_list(known.outvars, [results])
    kept = kept_of(known, body.consts, body.carry, residuals)
    stored = [v for v, k in zip(residuals, kept, strict=True) if k.operand is None]
    return known.replace(outvars=[*outs, *stored], debug_info=with_unknown_names(known)), linear, Layout(kept)


def keeps_some(policy: Any, layer: Layer) -> bool:
    """Return whether a policy around a scan, of a checkpoint, keeps any floating-point value that its layers keep.

    It is asked as JAX asks it about the equations of a nested function: about names, and one of JAX's own about what
    computes a value, too. Integers, which a `Policy` always saves, do not count: a layer's values are kept all or none.
    """
    asked = plan.policy if (plan := plan_of(policy)) else policy
    stored = [k for k in layer.layout.kept if k.operand is None]
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
    renamed = lambda atoms: [rename.get(v, v) if isinstance(v, Var) else v for v in atoms]
    operands = set(known.invars)
    once = [
        source if isinstance(source, Var) and source in operands else residual
        for residual, source, binder in zip(residuals, sources, binders, strict=True)
        if rename[binder] is binder
    ]
    known = known.replace(outvars=[*known.outvars[:results], *once], debug_info=with_unknown_names(known))
    linear = linear.replace(
        invars=[v for v in linear.invars if rename.get(v, v) is v],
        outvars=renamed(linear.outvars),
        eqns=[eqn.replace(invars=renamed(eqn.invars)) for eqn in linear.eqns],
        debug_info=with_unknown_names(linear),
    )
    return known, linear
