"""offload(): a loss in which each `lax.scan` over layers under `jax.checkpoint(policy=Policy(...))` becomes ours.

Frameworks call `lax.scan` and `jax.checkpoint` by themselves. So the loss is traced as it is, `_replace.py` replaces
equations in its jaxpr, and the result is evaluated.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from ._chain import chain_p
from ._check import names_under
from ._engine.decide.checkpoint_primitive import checkpoint_p
from ._engine.decide.derivative import derivative
from ._engine.decide.mutable_refs import takes_refs
from ._engine.jaxprs.walk import Site, walk
from ._engine.layers.loops import is_ours
from ._engine.layers.scan_primitive import in_our_scan, scan_p, the_scan
from ._errors import Problem, warn
from ._jax import evaluate, has_vjp_rule, without_remat3
from ._policy import Policy, PolicyError, check_functions, check_switches
from ._pure_call import PureCall
from ._refusals import refuse_remat3
from ._replace import Replaced, in_custom_derivatives, our_scan, policy_of, with_ours
from ._tracing import tracing


def offload(f: Callable[..., Any], *, strict: bool = True) -> Callable[..., Any]:
    """`f` with each `lax.scan` over layers under a `Policy` replaced by `scan`, whatever calls it.

    Write what you always wrote: `nn.scan` over `nn.remat(Layer, policy=policy)`, `nnx.scan` over `nnx.remat`,
    `lax.scan(jax.checkpoint(layer, policy=policy), ...)`, with a `Policy`. Under `offload` such a scan does what `scan`
    does, with its residuals, its overlapped copies and its table. Scans inside jitted functions, `shard_map`s, other
    loops and checkpoints are found. A checkpoint under a `Policy` that is in no such scan does what `checkpoint` does.

    What the layers compute outside of their checkpoints is recomputed too, unless the policy says otherwise. An array
    that a scan carries, and that no layer names, is named "layer_input".

    Args:
      f: a loss, or any function that you differentiate; not its gradient.
      strict: raise if a pattern of a policy matches no name in any of the layers under that policy.

    Returns:
      A function with the arguments and results of `f`. Arguments that are not arrays are passed as they are.

    Raises:
      TypeError: f is not a function, or strict not a bool.

    Raises (when called):
      ValueError: nothing in `f` is under a `Policy`.
      PolicyError: a pattern matches nothing.
      NotImplementedError: `f` differentiates what is in it, or changes more of a module of Flax NNX than the values of
        its variables.

    Warns (when called): a scan or a checkpoint stays JAX's, and why; the notes of `residuals` say so too. The
    checkpoints of a scan that stays are ours, if they can be; their copies are not overlapped.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, offload, residuals, tag
      >>> layer = lambda x, w: (jnp.sin(tag(x @ w, "fc1")), None)
      >>> policy = Policy({"fc1": "offload"}, min_offload_bytes=0)
      >>> loss = lambda ws, x: jax.lax.scan(jax.checkpoint(layer, policy=policy), x, ws)[0].sum()
      >>> table = residuals(offload(loss), jnp.ones((3, 8, 8)), jnp.ones((4, 8)))
      >>> [row.layers for row in table if row.names == ("fc1",) and row.state == "offloaded" and row.kind == "value"]
      [2]
    """
    check_functions("offload", f=f)
    check_switches("offload", strict=strict)

    def ours(jaxpr: Jaxpr) -> Jaxpr:
        _refuse_gradients(jaxpr)
        replaced = Replaced([], [], {})
        jaxpr = with_ours(jaxpr, replaced)
        _judge(jaxpr, replaced, strict and not jax.config.jax_disable_jit)
        return jaxpr

    rewritten = _rewritten(f, ours, "offload")

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        refuse_remat3()
        return rewritten(*args, **kwargs)

    return wrapped


def with_its_scan_ours(f: Callable[..., Any], policy: Policy, strict: bool, caller: str) -> Callable[..., Any]:
    """Return `f`, which calls `lax.scan` itself, with that scan replaced by ours, under `policy`."""

    def ours(jaxpr: Jaxpr) -> Jaxpr:
        if jax.config.jax_disable_jit:
            return jaxpr
        at = the_scan(jaxpr)
        eqn = jaxpr.eqns[at]
        if takes_refs(eqn.params["jaxpr"]):
            raise NotImplementedError(
                f"{caller}: the layers read or write a jax.new_ref; put them under nn.remat or nnx.remat with "
                "policy=policy and call Flax's own scan"
            )
        eqns = [*jaxpr.eqns[:at], our_scan(eqn, policy, strict, Replaced([], [], {})), *jaxpr.eqns[at + 1 :]]
        return jaxpr.replace(eqns=eqns)

    return _rewritten(in_our_scan(f), ours, caller)


def _rewritten(f: Callable[..., Any], rewrite: Callable[[Jaxpr], Jaxpr], caller: str) -> Callable[..., Any]:
    """Return `f`, traced, and evaluated as its rewritten jaxpr."""

    @functools.wraps(f)
    @without_remat3
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = PureCall(f, args, kwargs, caller)
        jaxpr, shape = jax.make_jaxpr(call.run, return_shape=True)(*call.arrays)
        outs = evaluate(rewrite(jaxpr), call.arrays)
        return call.result(jax.tree.unflatten(jax.tree.structure(shape), outs))

    return wrapped


def _refuse_gradients(jaxpr: Jaxpr) -> None:
    is_derivative = lambda e: is_ours(e) or (policy_of(e) and e.params["differentiated"])
    if any(is_derivative(site.eqn) for site in walk(jaxpr)):
        raise NotImplementedError(
            "offload: the function differentiates what is under a Policy; wrap the loss: jax.grad(offload(loss)), "
            "accumulate(offload(loss))"
        )


def _judge(jaxpr: Jaxpr, replaced: Replaced, strict: bool) -> None:
    """Raise if nothing is ours, or if a pattern matches no name; warn of what stays."""
    sites = list(walk(jaxpr))
    left = list(dict.fromkeys([*replaced.left, *in_custom_derivatives(jaxpr)]))
    remarks = tracing().remarks
    for why in left:
        if remarks is not None:
            remarks.texts.append(f"offload: {why}")
        warn(f"offload: {why}")
    if not any(site.eqn.primitive in (scan_p, checkpoint_p, chain_p) for site in sites) and not left:
        raise ValueError(
            "offload: the function has nothing under a jaxoffload.Policy; put the layers that its scan runs under one, "
            "as jax.checkpoint(layer, policy=Policy(...)), or nn.remat or nnx.remat with policy="
        )
    if strict and not left and (problems := _unmatched(jaxpr, sites, replaced)):
        raise PolicyError(problems)


def _unmatched(jaxpr: Jaxpr, sites: list[Site], replaced: Replaced) -> list[Problem]:
    names: dict[Policy, set[str]] = {}
    for policy, seen in replaced.under:
        names.setdefault(policy, set()).update(seen)
    problems = [problem for policy, seen in names.items() for problem in policy.unmatched(seen)]
    if problems and any(has_vjp_rule(site.eqn) for site in sites):
        # The forward rule, which only a derivative runs, may give the names.
        if (gradient := _derivative(jaxpr)) is None:
            return []
        of_rules = {policy: seen | (names_under(gradient, policy) or set()) for policy, seen in names.items()}
        problems = [problem for policy, seen in of_rules.items() for problem in policy.unmatched(seen)]
    return problems


def _derivative(jaxpr: Jaxpr) -> Jaxpr | None:
    """Return the JVP of a traced loss; None if it has none. JAX then raises where the program needs it."""
    floating = tuple(bool(jnp.issubdtype(aval.dtype, jnp.inexact)) for aval in jaxpr.in_avals)
    try:
        return derivative(jaxpr, floating, False, False)[0]
    except Exception:  # a rule may raise anything
        return None
