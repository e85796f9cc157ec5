"""offload(): a loss in which each `lax.scan` over layers under `jax.checkpoint(policy=Policy(...))` becomes ours.

Frameworks call `lax.scan` and `jax.checkpoint` by themselves. So the loss is traced as it is, and in its jaxpr the
equations are replaced: a scan whose body holds checkpoints under one `Policy` by that of `scan`, with those checkpoints
written out; any other checkpoint under a `Policy` by that of `checkpoint`.
"""

import functools
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var, new_jaxpr_eqn
from jax.extend.core.primitives import jit_p, name_p, remat_p, while_p
from jax.ref import AbstractRef

from ._engine.checkpoint_primitive import checkpoint_p
from ._engine.mutable_refs import takes_refs
from ._engine.plan import all_names
from ._engine.walk import bodies, map_bodies, walk, with_eqns
from ._errors import NOT_THE_USERS
from ._jax import evaluate
from ._policy import Policy, PolicyError
from ._reference import most_layers
from ._refusals import refuse_remat3
from ._scan import body_of_scan, our_equation, scan

CARRY = "layer_input"  # the name of a carry that the layers do not name


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
      NotImplementedError: `f` differentiates what is in it.

    Warns (when called): a scan stays `lax.scan`, and why. Its checkpoints are ours; their copies are not overlapped.

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
    if not callable(f):
        raise TypeError(f"offload: f must be a function, got {f!r}")
    if not isinstance(strict, bool):
        raise TypeError(f"offload: strict must be True or False, got {strict!r}")

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        refuse_remat3()
        call = _call(f, args, kwargs)
        jaxpr, shape = jax.make_jaxpr(call.run, return_shape=True)(*call.arrays)
        _refuse_gradients(jaxpr)
        replaced = _Replaced([], [])
        jaxpr = _with_ours(jaxpr, replaced)
        _judge(replaced, strict)
        return call.result(jax.tree.unflatten(jax.tree.structure(shape), evaluate(jaxpr, call.arrays)))

    return wrapped


class _Call(NamedTuple):
    """A call as a pure function of arrays; `result` makes what the call returns of what `run` returns."""

    run: Callable[..., Any]
    arrays: list[Any]
    result: Callable[[Any], Any]


def _call(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """A call of `f`, whose arguments may be modules of Flax NNX, which it may change."""
    nnx = sys.modules.get("flax.nnx")
    is_object = lambda x: nnx is not None and isinstance(x, (nnx.Pytree, nnx.Variable))
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_object)
    kinds = ["object" if is_object(leaf) else "array" if _is_array(leaf) else "static" for leaf in leaves]
    those = lambda kind: [leaf for leaf, k in zip(leaves, kinds, strict=True) if k == kind]
    graph, state = nnx.split(those("object")) if nnx and "object" in kinds else (None, ())
    arrays, of_arrays = jax.tree.flatten((those("array"), state))

    def run(*arrays: Any) -> Any:
        values, state = jax.tree.unflatten(of_arrays, arrays)
        objects = nnx.merge(graph, state) if nnx and graph is not None else []
        given = {"object": iter(objects), "array": iter(values), "static": iter(those("static"))}
        args, kwargs = jax.tree.unflatten(tree, [next(given[kind]) for kind in kinds])
        out = f(*args, **kwargs)
        return out, nnx.state(objects) if nnx and objects else ()

    def result(made: Any) -> Any:
        out, new = made
        if nnx and any(map(operator.is_not, jax.tree.leaves(new), jax.tree.leaves(state))):
            nnx.update(those("object"), new)
        return out

    return _Call(run, arrays, result)


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is traced. Numbers of Python's are not: `f` may branch on them."""
    return hasattr(leaf, "dtype") and not isinstance(jax.typeof(leaf), AbstractRef)


def _refuse_gradients(jaxpr: Jaxpr) -> None:
    if any(_policy_of(site.eqn) and site.eqn.params["differentiated"] for site in walk(jaxpr)):
        raise NotImplementedError(
            "offload: the function differentiates what is under a Policy; wrap the loss that it differentiates, as in "
            "jax.grad(offload(loss))"
        )


class _Replaced(NamedTuple):
    """What is ours now, each policy with the names under it; and why some scans stay as they are."""

    under: list[tuple[Policy, set[str]]]
    left: list[str]


def _judge(replaced: _Replaced, strict: bool) -> None:
    """Raise if nothing is ours, or if a pattern matches no name; warn of what stays."""
    for why in replaced.left:
        warnings.warn(f"jaxoffload: offload: {why}", skip_file_prefixes=NOT_THE_USERS)
    if not replaced.under:
        raise ValueError(
            "offload: the function has nothing under a jaxoffload.Policy; put the layers that its scan runs under one, "
            "as jax.checkpoint(layer, policy=Policy(...)), or nn.remat or nnx.remat with policy="
        )
    names: dict[Policy, set[str]] = {}
    for policy, seen in replaced.under:
        names.setdefault(policy, set()).update(seen)
    if strict and (problems := [problem for policy, seen in names.items() for problem in policy.unmatched(seen)]):
        raise PolicyError(problems)


def _with_ours(jaxpr: Jaxpr, replaced: _Replaced) -> Jaxpr:
    """`jaxpr` with what is under a policy replaced by ours, in its nested jaxprs too."""
    return with_eqns(jaxpr, [_our_equation(eqn, replaced) for eqn in jaxpr.eqns])


def _our_equation(eqn: JaxprEqn, replaced: _Replaced) -> JaxprEqn:
    if policy := _policy_of(eqn):
        eqn = map_bodies(eqn, lambda _, body: _with_ours(body, replaced))
        replaced.under.append((policy, all_names(eqn.params["jaxpr"])))
        return eqn if takes_refs(eqn.params["jaxpr"]) else _our_checkpoint(eqn, policy)
    if eqn.primitive is lax.scan_p and (policies := set(_policies_in(eqn.params["jaxpr"]))):
        if why := _why_not(eqn, policies):
            replaced.left.append(f"a scan of {eqn.params['length']} layers stays lax.scan: {why}")
        else:
            (policy,) = policies
            consts, carry = body_of_scan(eqn)[1:]
            layer = _named(_opened(eqn.params["jaxpr"], policy), range(consts, consts + carry))
            replaced.under.append((policy, all_names(layer)))
            eqn = eqn.replace(params=eqn.params | {"jaxpr": _with_ours(layer, replaced)})
            most = most_layers()
            with eqn.ctx.manager:
                few = most is not None and eqn.params["length"] > most
                return _first_layers(eqn, policy) if few else our_equation(eqn, policy, strict=False)
    return map_bodies(eqn, lambda _, body: _with_ours(body, replaced))


def _policy_of(eqn: JaxprEqn) -> Policy | None:
    """The policy of a checkpoint; None for another equation, and under another kind of policy."""
    policy = eqn.params["policy"] if eqn.primitive is remat_p else None
    return policy if isinstance(policy, Policy) else None


def _policies_in(jaxpr: Jaxpr) -> Iterator[Policy]:
    """Yield the policies of the checkpoints in a layer, but not of those in loops in it."""
    for eqn in jaxpr.eqns:
        if policy := _policy_of(eqn):
            yield policy
        elif eqn.primitive not in (lax.scan_p, while_p):
            for body in bodies(eqn):
                yield from _policies_in(body)


def _why_not(eqn: JaxprEqn, policies: set[Policy]) -> str:
    """Why a scan cannot be ours; empty if it can."""
    if len(policies) > 1:
        return f"its layers are under {len(policies)} policies; give all one"
    if takes_refs(eqn.params["jaxpr"]):
        return "its layers read or write a jax.new_ref"
    return ""


def _our_checkpoint(eqn: JaxprEqn, policy: Policy) -> JaxprEqn:
    params = {
        "call_jaxpr": eqn.params["jaxpr"],
        "roles": ("argument",) * len(eqn.invars),
        "policy": policy,
        "strict": False,
        "prevent_cse": bool(eqn.params["prevent_cse"]),
    }
    return new_jaxpr_eqn(eqn.invars, eqn.outvars, checkpoint_p, params, eqn.effects, eqn.source_info, eqn.ctx)


def _opened(jaxpr: Jaxpr, policy: Policy) -> Jaxpr:
    """A layer with its checkpoints under a policy written out, and the jitted functions that hold some.

    Nothing is traced again: in a `shard_map`, JAX would not know the axes here.
    """
    eqns: list[JaxprEqn] = []

    def write_out(body: Jaxpr, operands: list[Any]) -> list[Any]:
        values: dict[Var, Any] = dict(zip([*body.constvars, *body.invars], [*body.consts, *operands], strict=True))
        read = lambda a: values.get(a, a) if isinstance(a, Var) else a
        for eqn in body.eqns:
            operands = list(map(read, eqn.invars))
            inner: Any = eqn.params.get("jaxpr")
            if _policy_of(eqn) == policy or (eqn.primitive is jit_p and any(_policies_in(inner))):
                values |= zip(eqn.outvars, write_out(inner, operands), strict=True)
            else:
                new = [v if type(v).__name__ == "DropVar" else Var(v.aval) for v in eqn.outvars]
                values |= zip(eqn.outvars, new, strict=True)
                eqn = map_bodies(eqn, lambda _, body: _opened(body, policy) if any(_policies_in(body)) else body)
                eqns.append(eqn.replace(invars=operands, outvars=new))
        return list(map(read, body.outvars))

    outvars = write_out(jaxpr.replace(constvars=[], consts=[]), list(jaxpr.invars))
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())


def _named(jaxpr: Jaxpr, carry: range) -> Jaxpr:
    """A layer that names the arrays that it is given as its carry, where it did not: CARRY, with numbers if several."""
    read_by = {v: {e.primitive for e in jaxpr.eqns if any(v is a for a in e.invars)} for v in jaxpr.invars}
    is_array = lambda v: v.aval.ndim and jnp.issubdtype(v.aval.dtype, jnp.inexact)
    unnamed = [i for i in carry if is_array(v := jaxpr.invars[i]) and name_p not in read_by[v]]
    invars, eqns = list(jaxpr.invars), []
    for number, i in enumerate(unnamed):
        given = Var(jaxpr.invars[i].aval)
        name = f"{CARRY}.{number}" if len(unnamed) > 1 else CARRY
        eqns.append(new_jaxpr_eqn([given], [invars[i]], name_p, {"name": name}, set()))
        invars[i] = given
    return with_eqns(jaxpr, [*eqns, *jaxpr.eqns], invars) if eqns else jaxpr


def _first_layers(eqn: JaxprEqn, policy: Policy) -> JaxprEqn:
    """As `scan` runs them for `verify`, which asks for fewer."""
    params, body = eqn.params, body_of_scan(eqn)

    def run(*operands: Any) -> list[Any]:
        consts, init, xs = body.split(operands)

        def layer(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = evaluate(body.jaxpr, [*consts, *carry, *x])
            return outs[: body.carry], outs[body.carry :]

        how = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = scan(layer, init, xs, **how, policy=policy, strict=False)
        return [*carry, *ys]

    (call,) = jax.make_jaxpr(jax.jit(run))(*(v.aval for v in eqn.invars)).eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars)
