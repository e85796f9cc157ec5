"""check(): errors of a policy, and what does not fit in host memory, before anything is compiled."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.ref import AbstractRef

from ._chain import chain_p
from ._engine.decide.checkpoint_primitive import checkpoint_p
from ._engine.decide.derivative import full_plan
from ._engine.decide.plan import all_names, make_plan
from ._engine.host.limit import host_pool_bytes
from ._engine.host.need import need_of, refuse_what_does_not_fit
from ._engine.jaxprs.walk import walk
from ._engine.layers.layer import Body, plan_of
from ._engine.layers.loops import bodies_of_gradient, forward_p
from ._engine.layers.scan_primitive import body_of, scan_p
from ._engine.microbatches.interleaved import interleaved_p
from ._errors import deprecated
from ._jax import without_remat3
from ._policy import Policy, PolicyError, check_arguments, check_call
from ._tracing import under


def _also_policy_first[F: Callable[..., Any]](check: F) -> F:
    """Return `check`, which also takes the order of release 0.1.0, and warns of it."""

    @functools.wraps(check)
    def either(*args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], Policy) and "policy" not in kwargs:
            deprecated("check(policy, f, *args)", "check(f, *args, policy=policy)")
            args, kwargs = args[1:], {"policy": args[0], **kwargs}
        check(*args, **kwargs)

    return either  # type: ignore[return-value]


@_also_policy_first
@without_remat3
def check(f: Callable[..., Any], *args: Any, policy: Policy) -> None:
    """Raise if a pattern of `policy` matches nothing in `f`, or if the pinned host pool cannot hold what `f` offloads.

    Patterns are matched with the tagged values of all `scan`s, `chain`s and `checkpoint`s under `policy`; bytes count
    under any policy. Use it for models of several stacks, which pass `strict=False`, and for functions that give the
    policy to `jax.checkpoint`, `nn.remat` or `nnx.remat`. `f` is traced once, and not run.

    The bytes per device are those of the whole step: gradients that follow each other count together, since XLA may run
    them side by side; a loop over microbatches counts one iteration. If `f` offloads nothing itself, it is taken for a
    loss, and its gradient with respect to all floating-point arguments is judged. Under auto mesh axes values count as
    their `with_sharding_constraint` divides them; others as the least divided constrained values with as many rows.

    Args:
      f: a training step, or a loss.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s.
      policy: the policy that `f` uses.

    Raises:
      PolicyError: it lists each pattern that matches nothing, the names and the nearest.
      HostPoolFull: with the bytes that are needed, those in the pool, and the `offload_layers` that would fit. Not
        where there is no pinned host pool (CPU), unless `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` says how large it would be.
      ValueError: nothing in `f` uses `policy`.
      TypeError: f is not a function, or policy not a Policy.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload import Policy, PolicyError, check, checkpoint, tag
      >>> policy = Policy({"fcl": "offload"})
      >>> layer = checkpoint(lambda x: jnp.sin(tag(2 * x, "fc1")), policy=policy, strict=False)
      >>> try:
      ...     check(layer, jnp.ones(8), policy=policy)
      ... except PolicyError as error:
      ...     print(error)
      residuals['fcl']: matches no tagged value; the names tagged under the policy are fc1; the nearest is 'fc1'
    """
    check_call("check", f, args)
    check_arguments("check", policy)
    with under(whole_program=True):
        jaxpr = jax.make_jaxpr(f)(*args)
    seen = names_under(jaxpr, policy)
    if seen is None:
        raise ValueError(
            "check: no scan, chain, checkpoint or jax.checkpoint in the function has this policy; pass the one it uses"
        )
    if problems := policy.unmatched(seen):
        raise PolicyError(problems)
    if host_pool_bytes() is not None:
        refuse_what_does_not_fit("check", jaxpr if need_of(jaxpr).bytes() else _gradient(jaxpr))


def _gradient(jaxpr: Jaxpr) -> Jaxpr:
    """Return the forward and backward passes of a traced loss; the trace itself if it has no derivative."""
    try:
        with under(whole_program=True):
            return jax.make_jaxpr(forward_and_backward(jaxpr_as_fun(jaxpr)))(*jaxpr.in_avals)
    except PolicyError:
        raise
    except (NotImplementedError, TypeError, ValueError):  # JAX raises these; ValueError for a callback
        return jaxpr


COTANGENT = "<cotangent>"  # names the cotangents that a backward pass begins with


def forward_and_backward(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function from the arguments of `f` to what its forward pass keeps, and to its cotangents."""

    def run(*args: Any) -> Any:
        out, vjp = jax.vjp(f, *args)
        kept = [leaf for leaf in jax.tree.leaves(vjp) if not isinstance(jax.typeof(leaf), AbstractRef)]
        return kept, vjp(jax.tree.map(_zero_cotangent, out))

    return run


def _zero_cotangent(out: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(out), jnp.inexact):
        return checkpoint_name(jnp.zeros_like(out), COTANGENT)
    return np.zeros(jnp.shape(out), jax.dtypes.float0)


def names_under(jaxpr: Jaxpr, policy: Policy) -> set[str] | None:
    """Return the names that `policy` could match in all that it is given to; None if nothing has it."""
    seen: list[frozenset[str]] = []
    for eqn, *_ in walk(jaxpr, _bodies):
        used = eqn.params.get("policy")
        if (plan := plan_of(used)) and plan.policy == policy:
            seen.append(plan.seen)
        elif eqn.primitive is forward_p:
            plans = [segment.layer.plan for segment in eqn.params["loops"].segments]
            seen += [plan.seen for plan in plans if plan.policy == policy]
        elif used == policy and eqn.primitive in (scan_p, chain_p, checkpoint_p):
            seen += [full_plan(body, roles, policy, False).seen for body, roles in _undifferentiated(eqn)]
        elif used == policy:  # JAX's own checkpoint, with the policy as its callable
            body = eqn.params["jaxpr"]
            seen.append(make_plan(body, policy, ["argument"] * len(body.invars), None, False)[0].seen)
            if eqn.params["differentiated"]:  # what it keeps is named before it
                seen.append(frozenset(all_names(jaxpr)))
    return set().union(*seen) if seen else None


def _bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the nested jaxprs in which policies stand; of what `accumulate` makes, the loss, as it was written."""
    return [eqn.params["loss"].jaxpr] if eqn.primitive is interleaved_p else bodies_of_gradient(eqn)


def _undifferentiated(eqn: JaxprEqn) -> list[tuple[Jaxpr, tuple[str, ...]]]:
    """Return the functions of a `scan`, `chain` or `checkpoint`, each with the roles of its inputs."""
    params = eqn.params
    if eqn.primitive is checkpoint_p:
        return [(params["call_jaxpr"], params["roles"])]
    if eqn.primitive is scan_p:
        layers = [body_of(params["call_jaxpr"])]
    else:
        layers = [Body(jaxpr, 0, len(eqn.outvars)) for jaxpr in params["layers"].jaxprs]
    return [(layer.jaxpr, layer.roles) for layer in layers]
