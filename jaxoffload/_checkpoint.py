"""checkpoint(): `jax.checkpoint` whose residuals a `Policy` chooses.

A primitive holds the function's jaxpr until it is differentiated. Then its JVP rule, like that of `jax.checkpoint`,
differentiates the jaxpr; but before it hands the result to `jax.checkpoint` it makes a plan on it. By then custom rules
are expanded and it is known which inputs are perturbed, so what the plan sees is what the backward pass can use.
"""

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core.primitives import remat_p
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from . import _upstream  # noqa: F401
from ._call import Call
from ._memory import NOT_THE_USERS, host_pool_bytes, layers_that_fit, on_host
from ._plan import Layers, Plan, decide, dots_matched_nothing, make_plan
from ._policy import Policy, accept
from ._refs import by_jax, takes_refs
from ._straight import straight
from ._tags import outside_scopes
from ._twin import REASON, is_twin
from ._values import mark_dots
from ._xla import refuse_ordered_effects, refuse_remat3, refuse_wrong_offload


def checkpoint(
    f: Callable[..., Any],
    *,
    policy: Policy,
    strict: bool = True,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable[..., Any]:
    """`jax.checkpoint` under a `Policy`: `f` with each named residual saved, offloaded or recomputed.

    The result computes what `f` computes; differentiated in reverse, it keeps what the policy says. A function has no
    layers, so `resident_layers`, `offload_layers` and `other_layers` do not apply. It can be differentiated again, in
    both modes. A function that reads or writes a `jax.new_ref` from outside runs under JAX's own checkpoint, which asks
    the policy. A `checkify.check` in `f` is made unless `f` is differentiated, as in `jax.checkpoint`.

    Args:
      f: any function that `jax.checkpoint` takes, with pytrees, keyword and static arguments.
      policy: decides on the values that `f` names with `tag` or `checkpoint_name`.
      strict: a pattern that matches no value of `f` is an error, raised when `f` is differentiated. Pass False where
        several functions share one policy, and judge them together with `check`.
      prevent_cse, static_argnums: as for `jax.checkpoint`, but `prevent_cse` is one for all arguments.

    Raises:
      TypeError: f is no function, policy no Policy, strict or prevent_cse no bool.
      ValueError (when called): static_argnums are not arguments.

    Raises (when differentiated, before anything is compiled):
      PolicyError: a pattern matches nothing, or two names of one value have different decisions.
      MemoryError: what this call offloads does not fit in the pinned host pool. It knows itself alone: what a program
        offloads in all, `check` and `residuals` judge.
      NotImplementedError: offloading here would fail or give wrong gradients; it says what to change.
    """
    accept("checkpoint", policy, strict)
    if not callable(f):
        raise TypeError(f"checkpoint: f must be a function, got {f!r}")
    if not isinstance(prevent_cse, bool):
        raise TypeError(f"checkpoint: prevent_cse must be True or False, for all arguments, got {prevent_cse!r}")

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        refuse_remat3()
        fun, args = _bind_static(f, static_argnums, args)
        jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
        if takes_refs(jaxpr):
            return by_jax([jaxpr], policy, strict, prevent_cse)(fun)(*args, **kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        roles = ("weight",) * len(jaxpr.consts) + ("argument",) * len(leaves)
        out = bind(jaxpr, leaves, roles=roles, policy=policy, strict=strict, prevent_cse=prevent_cse)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return wrapped


def _bind_static(
    f: Callable[..., Any], static_argnums: int | tuple[int, ...], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`f` with its static arguments filled in, and the other arguments."""
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if bad := [i for i in static if not -len(args) <= i < len(args)]:
        raise ValueError(f"checkpoint: static_argnums {bad} must be in [-{len(args)}, {len(args)}), one per argument")
    static = tuple(i % len(args) for i in static)
    if not static:
        return f, args
    dynamic = [i for i in range(len(args)) if i not in static]

    def with_static(*given: Any, **kwargs: Any) -> Any:
        whole = list(args)
        for i, arg in zip(dynamic, given, strict=True):
            whole[i] = arg
        return f(*whole, **kwargs)

    return with_static, tuple(args[i] for i in dynamic)


def bind(
    jaxpr: Jaxpr,
    args: Sequence[Any],
    *,
    roles: tuple[str, ...],
    policy: Policy,
    strict: bool,
    prevent_cse: bool,
) -> list[Any]:
    """Evaluate `jaxpr` under a policy. `roles`, of its constants and then its inputs, are those of `make_plan`."""
    consts = jaxpr.consts
    return checkpoint_p.bind(
        *consts,
        *args,
        call_jaxpr=_without_consts(jaxpr) if consts else jaxpr,
        roles=roles,
        policy=policy,
        strict=strict,
        prevent_cse=prevent_cse,
    )


def looks_for_nans() -> bool:
    """Whether JAX looks for NaNs or infinities in what is computed eagerly; they must not be in what nobody filled."""
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


def cached[T](make: Callable[..., T]) -> Callable[..., T]:
    """`make(of, *key)`, remembered while `of` lives: an eager loop over layers then plans and traces once, and once for
    its twin, and where JAX looks for NaNs.

    `of`: a jaxpr, or something else that is hashed by its identity. The result must not refer to it.
    """
    memory: weakref.WeakKeyDictionary[Any, dict[Any, T]] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def remembered(of: Any, *key: Any) -> T:
        made = memory.setdefault(of, {})
        traced = is_twin(), looks_for_nans(), *key
        if traced not in made:
            made[traced] = make(of, *key)
        return made[traced]

    return remembered


@cached
def _without_consts(jaxpr: Jaxpr) -> Jaxpr:
    return pe.convert_constvars_jaxpr(jaxpr)


class Differentiated(NamedTuple):
    """A function's JVP under a plan."""

    run: Callable[..., list[Any]]  # (*primals, *perturbed tangents) -> (*primals, *perturbed tangents)
    out_perturbed: Sequence[bool]
    plan: Plan
    in_avals: Sequence[Any]
    tangents: int


@cached
def differentiated(
    jaxpr: Jaxpr,
    perturbed: tuple[bool, ...],
    roles: tuple[str, ...],
    policy: Policy,
    strict: bool,
    prevent_cse: bool,
    layers: Layers | None = None,
) -> Differentiated:
    """The JVP of `jaxpr` with respect to the perturbed inputs, under the plan that the policy makes of it."""
    jvp, out_perturbed = derivative(jaxpr, perturbed, False, policy.dots != "recompute")
    plan, planned = plan_of_jvp(jaxpr, roles, jvp, policy, strict, layers)
    plan = dataclasses.replace(plan, notes=(NO_LAYERS, *plan.notes))
    run = jax.checkpoint(lambda *args: jaxpr_as_fun(planned)(*args), policy=plan, prevent_cse=prevent_cse)
    return Differentiated(run, out_perturbed, plan, planned.in_avals, sum(perturbed))


def plan_of_jvp(
    jaxpr: Jaxpr, roles: tuple[str, ...], jvp: Jaxpr, policy: Policy, strict: bool, layers: Layers | None
) -> tuple[Plan, Jaxpr]:
    """As `make_plan` of a derivative, with the names and notes that the function has whatever is perturbed."""
    whole = judged(jaxpr, roles, policy, strict)
    plan, planned = make_plan(jvp, policy, _roles_of(jvp, roles), layers, False)
    return dataclasses.replace(plan, seen=whole.seen, notes=whole.notes), planned


NO_LAYERS = "checkpoint has no layers: resident_layers, offload_layers and other_layers do not apply"


@cached
def derivative(
    jaxpr: Jaxpr, perturbed: tuple[bool, ...], through: bool | tuple[bool, ...], dots: bool
) -> tuple[Jaxpr, tuple[bool, ...]]:
    """The JVP, and which results have tangents: those in `through` always. `dots`: matrix products are marked."""
    with outside_scopes():
        jvp, out_perturbed = ad.jvp_jaxpr(mark_dots(jaxpr) if dots else jaxpr, perturbed, through)
    return jvp, tuple(out_perturbed)


def _roles_of(jvp: Jaxpr, roles: tuple[str, ...]) -> tuple[str | None, ...]:
    return roles + (None,) * (len(jvp.invars) - len(roles))


@cached
def judged(jaxpr: Jaxpr, roles: tuple[str, ...], policy: Policy, strict: bool) -> Plan:
    """What is true of a function whatever is perturbed: the plan where all floating-point inputs are that can be.

    Custom rules are expanded then, so all names are there. With fewer perturbed, as the first steps of `lax.scan`'s
    JVP have it, names could be missing that this program's derivative does have.

    Raises:
      PolicyError: a pattern matches nothing (if `strict`), or two names of one value have different decisions.
    """
    dots = policy.dots != "recompute"
    jvp, _ = derivative(jaxpr, _differentiable(jaxpr, dots), False, dots)
    plan, _ = decide(jvp, policy, _roles_of(jvp, roles), None, strict, jaxpr)
    if (note := dots_matched_nothing(policy)) in plan.notes:
        warnings.warn(f"jaxoffload: {note}", skip_file_prefixes=NOT_THE_USERS)
    return plan


@cached
def _differentiable(jaxpr: Jaxpr, dots: bool) -> tuple[bool, ...]:
    """The floating-point inputs that a program can perturb: all, except those that reach what has no derivative, such
    as a callback.

    What has none raises as soon as one of its operands is perturbed. So the inputs that can be perturbed alone can be
    perturbed together, and what the program does perturb is among them.
    """
    floating = tuple(jnp.issubdtype(a.dtype, jnp.inexact) for a in jaxpr.in_avals)

    def has_derivative(perturbed: tuple[bool, ...]) -> bool:
        try:
            derivative(jaxpr, perturbed, False, dots)
        except Exception:  # a user's rule may raise anything; where the program needs it, it is raised again there
            return False
        return True

    if has_derivative(floating):
        return floating
    inputs = range(len(floating))
    return tuple(floating[i] and has_derivative(tuple(k == i for k in inputs)) for i in inputs)


@cached
def _host_bytes(jaxpr: Jaxpr, perturbed: tuple[bool, ...], *key: Any) -> int:
    """Bytes a device that autodiff keeps on the host between forward and backward."""
    made = differentiated(jaxpr, perturbed, *key)
    jaxpr = jax.make_jaxpr(made.run)(*made.in_avals)
    unknown = [False] * (len(made.in_avals) - made.tangents) + [True] * made.tangents
    known, _, _, residuals = pe.partial_eval_jaxpr_nounits(jaxpr, unknown, False)
    forward = straight(known)
    kept = forward.outputs[len(forward.outputs) - len(residuals) :]
    return sum(forward.share(x) for x in kept if x and on_host(x.aval))


def checked(run: Callable[..., list[Any]], *operands: Any, roles: tuple[str, ...], **params: Any) -> list[Any]:
    """What `checkify` makes of a function under a policy, under it too. The error's values come first."""
    jaxpr = jax.make_jaxpr(run)(*operands)
    more = len(jaxpr.consts) + len(operands) - len(roles)
    return bind(jaxpr, operands, roles=("weight",) * more + roles, **params)


checkpoint_p = Call("jaxoffload_checkpoint", checked)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call_jaxpr: Jaxpr, **params: Any
) -> tuple[list[Any], list[Any]]:
    perturbed = tuple(type(t) is not ad.Zero for t in tangents)
    made = _that_fits(call_jaxpr, perturbed, **params)
    outs = iter(made.run(*primals, *[t for t, p in zip(tangents, perturbed, strict=True) if p]))
    primals_out = [next(outs) for _ in made.out_perturbed]
    zero = lambda primal: ad.Zero(jax.typeof(primal).to_tangent_aval())
    return primals_out, [next(outs) if p else zero(y) for p, y in zip(made.out_perturbed, primals_out, strict=True)]


def _that_fits(
    jaxpr: Jaxpr,
    perturbed: tuple[bool, ...],
    *,
    roles: tuple[str, ...],
    policy: Policy,
    strict: bool,
    prevent_cse: bool,
) -> Differentiated:
    """`differentiated`, or the same with all on the device. Not remembered: it depends on the environment."""
    refuse_remat3()
    key = roles, policy, strict, prevent_cse
    if is_twin():
        return differentiated(jaxpr, perturbed, *key, Layers("save", REASON))
    made = differentiated(jaxpr, perturbed, *key)
    if not made.plan.offloads:
        return made
    refuse_wrong_offload()
    refuse_ordered_effects("checkpoint", jaxpr)
    if host_pool_bytes() is None:
        return made
    fits = layers_that_fit("checkpoint", [_host_bytes(jaxpr, perturbed, *key)], policy.on_host_full)
    return made if fits else differentiated(jaxpr, perturbed, *key, Layers("save", "on_host_full"))


def _batch(
    axis: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    call_jaxpr: Jaxpr,
    roles: tuple[str, ...],
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    wanted = [batching.zero_if_mapped] * len(call_jaxpr.outvars)
    batched, out_batched = batching.batch_jaxpr_axes(call_jaxpr, axis, dims, wanted)
    roles = ("weight",) * len(batched.consts) + roles
    return bind(batched, args, roles=roles, **params), [0 if b else None for b in out_batched]


@cached
def _remat(jaxpr: Jaxpr, prevent_cse: bool) -> JaxprEqn:
    return jax.make_jaxpr(jax.checkpoint(jaxpr_as_fun(jaxpr), prevent_cse=prevent_cse))(*jaxpr.in_avals).eqns[0]


def partial_eval_as_remat(jaxpr: Jaxpr, prevent_cse: bool, *rest: Any) -> Any:
    """Inside another checkpoint, where nothing of `jaxpr` is differentiated: its names are the other's, routing above
    all, as those of an undifferentiated `jax.checkpoint` are."""
    *how, eqn = rest
    rule: Any = pe.partial_eval_jaxpr_custom_rules[remat_p]
    return rule(*how, eqn.replace(primitive=remat_p, params=_remat(jaxpr, prevent_cse).params))


def _partial_eval(*rest: Any) -> Any:
    params = rest[-1].params
    return partial_eval_as_remat(params["call_jaxpr"], params["prevent_cse"], *rest)


ad.primitive_jvps[checkpoint_p] = _jvp
pe.partial_eval_jaxpr_custom_rules[checkpoint_p] = _partial_eval
batching.fancy_primitive_batchers[checkpoint_p] = _batch
