"""The primitive of `checkpoint`: a jaxpr under a policy, until it is differentiated."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core.primitives import remat_p

from ... import _jax
from ..._jax import Results, Values, on_host
from ..._policy import Policy
from ..._tracing import tracing, under
from ..host.limit import admitted
from ..jaxprs.flat import straight
from .derivative import cached, derivative, plan_of_jvp
from .plan import Override, Plan


def bind(jaxpr: Jaxpr, args: Sequence[Any], **params: Any) -> list[Any]:
    """Evaluate `jaxpr` under `policy`. `params`: roles, policy, strict, prevent_cse, as for `differentiated`."""
    call_jaxpr = _without_consts(jaxpr) if jaxpr.consts else jaxpr
    return checkpoint_p.bind(*jaxpr.consts, *args, call_jaxpr=call_jaxpr, **params)


_without_consts = cached(_jax.convert_constvars_jaxpr)


@dataclasses.dataclass(frozen=True, eq=False)
class Differentiated:
    """A function's JVP under a plan."""

    run: Callable[..., list[Any]]  # (*primals, *perturbed tangents) -> (*primals, *perturbed tangents)
    out_perturbed: Sequence[bool]
    plan: Plan
    primals: Sequence[Any]
    tangents: Sequence[Any]

    @functools.cached_property
    def host_bytes(self) -> int:
        """Bytes per device that autodiff keeps on the host between forward and backward."""
        unknown = [False] * len(self.primals) + [True] * len(self.tangents)
        known, _, _, residuals = _jax.partial_eval_jaxpr_nounits(
            jax.make_jaxpr(self.run)(*self.primals, *self.tangents), unknown, False
        )
        forward = straight(known)
        kept = forward.outputs[len(forward.outputs) - len(residuals) :]
        return sum(forward.share(x) for x in kept if x and on_host(x.aval))


@cached
def differentiated(
    jaxpr: Jaxpr,
    perturbed: tuple[bool, ...],
    override: Override | None = None,
    *,
    roles: tuple[str, ...],
    policy: Policy,
    strict: bool,
    prevent_cse: bool,
) -> Differentiated:
    """The JVP of `jaxpr` with respect to the perturbed inputs, under the plan that the policy makes for it.

    `roles`, of its constants and then its inputs, are those of `make_plan`.
    """
    now = tracing()
    with under(around=now.around if now.around_layers else policy):
        jvp, out_perturbed = derivative(jaxpr, perturbed, False, policy.dots != "recompute")
        plan, planned = plan_of_jvp(jaxpr, roles, jvp, policy, strict, override)
    plan = dataclasses.replace(plan, notes=(NO_LAYERS, *plan.notes))
    run = jax.checkpoint(lambda *args: jaxpr_as_fun(planned)(*args), policy=plan, prevent_cse=prevent_cse)
    avals, primals = planned.in_avals, len(perturbed)
    return Differentiated(run, out_perturbed, plan, avals[:primals], avals[primals:])


NO_LAYERS = "checkpoint has no layers: resident_layers, offload_layers and other_layers do not apply"


def checked(run: Callable[..., list[Any]], *operands: Any, roles: tuple[str, ...], **params: Any) -> list[Any]:
    """Bind the checked function, as `checkify` made it, under its policy. The error's values come first."""
    jaxpr = jax.make_jaxpr(run)(*operands)
    more = len(jaxpr.consts) + len(operands) - len(roles)
    return bind(jaxpr, operands, roles=("weight",) * more + roles, **params)


def _jvp(primals: Values, tangents: Values, *, call_jaxpr: Jaxpr, **params: Any) -> Results:
    perturbed = _jax.perturbed(tangents)
    made = _that_fits(call_jaxpr, perturbed, **params)
    outs = made.run(*primals, *(t for t, p in zip(tangents, perturbed, strict=True) if p))
    return _jax.with_zeros(outs, made.out_perturbed)


def _that_fits(jaxpr: Jaxpr, perturbed: tuple[bool, ...], policy: Policy, **params: Any) -> Differentiated:
    """`differentiated`, or the same with all on the device. Not cached: it depends on the environment."""
    make = functools.partial(differentiated, jaxpr, perturbed, policy=policy, **params)
    if tracing().reference:
        return make(Override("save", "the reference keeps it on the device"))
    if policy == tracing().around:
        return make(Override("save", "what is around it has moved it"))
    made = make()
    if not made.plan.offloads:
        return made
    fits = admitted("checkpoint", [jaxpr], 1, lambda _: made.host_bytes, policy.on_host_full)
    return made if fits else make(Override("save", "on_host_full"))


def _batch(
    axis: Any, args: Values, dims: Values, *, call_jaxpr: Jaxpr, roles: tuple[str, ...], **params: Any
) -> Results:
    batched, out_batched = _jax.batch_jaxpr_axes(
        call_jaxpr, axis, dims, [_jax.zero_if_mapped] * len(call_jaxpr.outvars)
    )
    roles = ("weight",) * len(batched.consts) + roles
    return bind(batched, args, roles=roles, **params), [0 if b else None for b in out_batched]


@cached
def _remat(jaxpr: Jaxpr, prevent_cse: bool) -> JaxprEqn:
    return jax.make_jaxpr(jax.checkpoint(jaxpr_as_fun(jaxpr), prevent_cse=prevent_cse))(*jaxpr.in_avals).eqns[0]


def partial_eval_as_remat(jaxpr: Jaxpr, prevent_cse: bool, *rest: Any) -> Any:
    """Partial evaluation inside another checkpoint, where nothing of `jaxpr` is differentiated: its names, routing
    above all, are the other's, as those of an undifferentiated `jax.checkpoint` are."""
    *how, eqn = rest
    rule: Any = _jax.partial_eval_rules[remat_p]
    return rule(*how, eqn.replace(primitive=remat_p, params=_remat(jaxpr, prevent_cse).params))


def _partial_eval(*rest: Any) -> Any:
    params = rest[-1].params
    return partial_eval_as_remat(params["call_jaxpr"], params["prevent_cse"], *rest)


checkpoint_p = _jax.define(
    _jax.Call("jaxoffload_checkpoint", checked), jvp=_jvp, partial_eval=_partial_eval, batch=_batch
)
