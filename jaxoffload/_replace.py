"""The replacement of others' scans and checkpoints, in a traced program, by ours: for `offload`.

A scan whose body holds checkpoints under one `Policy` becomes that of `scan`, with those checkpoints written out; any
other checkpoint under a `Policy` becomes that of `checkpoint`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var, new_jaxpr_eqn
from jax.extend.core.primitives import remat_p, while_p

from ._engine.decide.checkpoint_primitive import checkpoint_p
from ._engine.decide.mutable_refs import takes_refs
from ._engine.decide.plan import all_names
from ._engine.jaxprs.values import named_values, write_names
from ._engine.jaxprs.walk import bodies, map_bodies, walk, with_eqns
from ._engine.layers.scan_primitive import body_of_scan, our_equation
from ._errors import Problem
from ._jax import CUSTOM_RULES
from ._names import KEEP
from ._policy import Policy, PolicyError
from ._text import nearest

CARRY = "layer_input"  # the name of a carry that the layers do not name
INPUT = "checkpoint_input"  # and of what one of several checkpoints in a layer reads of another
_LOOPS = (lax.scan_p, while_p)


class Replaced(NamedTuple):
    """A record of what is ours now.

    Attributes:
      under: each policy with the names under it.
      left: why some scans and checkpoints stay as they are.
      done: by the identity of each jaxpr, itself, what stands for it, and what was replaced in it. JAX compiles a
        function that is called twice once, if both calls have the same jaxpr.
    """

    under: list[tuple[Policy, set[str]]]
    left: list[str]
    done: dict[int, tuple[Jaxpr, Jaxpr, "Replaced"]]


def with_ours(jaxpr: Jaxpr, replaced: Replaced) -> Jaxpr:
    """Return `jaxpr` with what is under a policy replaced by ours, in its nested jaxprs too."""
    if id(jaxpr) not in replaced.done:
        inside = Replaced([], [], replaced.done)
        replaced.done[id(jaxpr)] = jaxpr, with_eqns(jaxpr, [_our_equation(eqn, inside) for eqn in jaxpr.eqns]), inside
    _, ours, inside = replaced.done[id(jaxpr)]
    replaced.under.extend(inside.under)
    replaced.left.extend(inside.left)
    return ours


def _our_equation(eqn: JaxprEqn, replaced: Replaced) -> JaxprEqn:
    if policy := policy_of(eqn):
        eqn = map_bodies(eqn, lambda _, body: with_ours(body, replaced))
        replaced.under.append((policy, all_names(eqn.params["jaxpr"])))
        if takes_refs(eqn.params["jaxpr"]):
            replaced.left.append("a jax.checkpoint stays as it is: it reads or writes a jax.new_ref")
            return eqn.replace(params=eqn.params | {"policy": policy})
        return _our_checkpoint(eqn, policy)
    if eqn.primitive is lax.scan_p and (policies := set(_policies_in(eqn.params["jaxpr"]))):
        if len(policies) > 1:
            several = f"its layers are under {len(policies)} policies; give all one"
            replaced.left.append(f"a scan of {eqn.params['length']} layers stays lax.scan: {several}")
        elif not takes_refs(eqn.params["jaxpr"]):  # of which checkpoints warn
            (policy,) = policies
            return our_scan(eqn, policy, False, replaced)
    return map_bodies(eqn, lambda _, body: with_ours(body, replaced))


def our_scan(eqn: JaxprEqn, policy: Policy, strict: bool, replaced: Replaced) -> JaxprEqn:
    """Return the equation that stands for a `lax.scan` over layers under `policy`."""
    layer = _layer(eqn, policy)
    replaced.under.append((policy, all_names(layer)))
    eqn = eqn.replace(params=eqn.params | {"jaxpr": with_ours(layer, replaced)})
    with eqn.ctx.manager:
        return our_equation(eqn, policy, strict)


def policy_of(eqn: JaxprEqn) -> Policy | None:
    """Return the policy of a checkpoint; None for another equation, and under another kind of policy.

    `dataclasses.asdict` of a framework's config makes a dict of a policy in it.
    """
    policy = eqn.params["policy"] if eqn.primitive is remat_p else None
    if isinstance(policy, Mapping):  # which JAX refuses
        if unknown := policy.keys() - _FIELDS:
            why = lambda key: f"offload: {key!r} is not a field of a Policy{nearest(key, _FIELDS)}"
            raise PolicyError(Problem(str(key), why(key)) for key in sorted(unknown, key=str))
        return Policy(**policy)
    return policy if isinstance(policy, Policy) else None


_FIELDS = {field.name for field in dataclasses.fields(Policy)}


def in_custom_derivatives(jaxpr: Jaxpr) -> list[str]:
    """Return why checkpoints under a policy, of scans too, stay that stand in a function with a custom derivative.

    JAX runs the rule in place of the function, and in a rule there is nothing to replace: JAX differentiates neither
    rule of a `custom_vjp`, and what a rule differentiates by itself is already a derivative when it is traced.
    `offload` inside of the rule, around what it differentiates, sees that.
    """
    those = [site.eqn for site in walk(jaxpr) if any(e.primitive.name in CUSTOM_RULES for e in site.enclosing)]
    return [_IN_A_RULE] * any(map(policy_of, those))


_IN_A_RULE = (
    "a jax.checkpoint under a Policy stays as it is: it is in a function with a custom derivative, and JAX runs that "
    "instead; if the custom derivative differentiates something by itself, wrap that in jaxoffload.offload"
)


def _policies_in(jaxpr: Jaxpr) -> Iterator[Policy]:
    """Yield the policies of the checkpoints in a layer, but not of those in loops in it."""
    for eqn in jaxpr.eqns:
        if policy := policy_of(eqn):
            yield policy
        elif eqn.primitive not in _LOOPS:
            for body in bodies(eqn):
                yield from _policies_in(body)


def _our_checkpoint(eqn: JaxprEqn, policy: Policy) -> JaxprEqn:
    separate = eqn.params["prevent_cse"]
    params = {
        "call_jaxpr": eqn.params["jaxpr"],
        "roles": ("argument",) * len(eqn.invars),
        "policy": policy,
        "strict": False,
        "prevent_cse": any(separate) if isinstance(separate, tuple) else bool(separate),
    }
    return new_jaxpr_eqn(eqn.invars, eqn.outvars, checkpoint_p, params, eqn.effects, eqn.source_info, eqn.ctx)


def _layer(eqn: JaxprEqn, policy: Policy) -> Jaxpr:
    """Return the body of a scan, as a layer of ours.

    If it has one checkpoint, that is written out. Several stay, so that the backward pass has only one of them at work
    at a time; what they read of each other is saved then, as by JAX.
    """
    body = body_of_scan(eqn)
    several = len(list(_policies_in(body.jaxpr))) > 1
    layer = _with_kept_inputs(body.jaxpr, policy) if several else _opened(body.jaxpr, policy)
    carried = zip(range(body.consts, body.consts + body.carry), layer.outvars, strict=False)
    changed = [i for i, out in carried if out is not layer.invars[i]]
    named = {value.var for value in named_values(layer, ()).values if value.path == ()}
    unnamed = [v for v in (layer.invars[i] for i in changed) if _is_float(v) and v not in named]
    names = [f"{CARRY}.{n}" if len(unnamed) > 1 else CARRY for n in range(len(unnamed))]
    return write_names(layer, {((), v): name for v, name in zip(unnamed, names, strict=True)})


def _is_float(v: Any) -> bool:
    return bool(v.aval.ndim) and jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _with_kept_inputs(jaxpr: Jaxpr, policy: Policy) -> Jaxpr:
    """Name the arrays that a layer computes and that its checkpoints read. By default they are kept."""
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    read = (v for eqn in jaxpr.eqns if policy_of(eqn) for v in eqn.invars if isinstance(v, Var))
    keep = "" if policy.match(f"{INPUT}.0") else KEEP
    inputs = [v for v in dict.fromkeys(read) if v in made and _is_float(v)]
    return write_names(jaxpr, {((), v): f"{INPUT}.{number}{keep}" for number, v in enumerate(inputs)})


def _opened(jaxpr: Jaxpr, policy: Policy) -> Jaxpr:
    """Return a layer with its checkpoint under a policy written out, but not those of the loops in it.

    Nothing is traced again: in a `shard_map`, JAX would not know the axes here.
    """
    eqns: list[JaxprEqn] = []
    opened = lambda _, body: _opened(body, policy) if any(_policies_in(body)) else body

    def write_out(body: Jaxpr, operands: list[Any]) -> list[Any]:
        values: dict[Var, Any] = dict(zip([*body.constvars, *body.invars], [*body.consts, *operands], strict=True))
        read = lambda a: values.get(a, a) if isinstance(a, Var) else a
        for eqn in body.eqns:
            operands = list(map(read, eqn.invars))
            if policy_of(eqn) == policy:
                values |= zip(eqn.outvars, write_out(eqn.params["jaxpr"], operands), strict=True)
            else:
                new = [v if type(v).__name__ == "DropVar" else Var(v.aval) for v in eqn.outvars]
                values |= zip(eqn.outvars, new, strict=True)
                eqn = eqn if eqn.primitive in _LOOPS else map_bodies(eqn, opened)
                eqns.append(eqn.replace(invars=operands, outvars=new))
        return list(map(read, body.outvars))

    outvars = write_out(jaxpr.replace(constvars=[], consts=[]), list(jaxpr.invars))
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())
