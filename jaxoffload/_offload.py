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
from jax.extend.core.primitives import remat_p, while_p
from jax.ref import AbstractRef

from ._chain import chain_p
from ._engine.checkpoint_primitive import checkpoint_p
from ._engine.mutable_refs import takes_refs
from ._engine.plan import all_names
from ._engine.values import named_values, write_names
from ._engine.walk import bodies, map_bodies, walk, with_eqns
from ._errors import NOT_THE_USERS
from ._jax import evaluate, without_remat3
from ._names import KEEP
from ._policy import Policy, PolicyError
from ._reference import most_layers
from ._refusals import refuse_remat3
from ._scan import body_of_scan, first_layers, our_equation, scan_p, with_our_scan

CARRY = "layer_input"  # the name of a carry that the layers do not name
INPUT = "checkpoint_input"  # and of what one of several checkpoints in a layer reads of another
_LOOPS = (lax.scan_p, while_p)


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

    Warns (when called): a scan or a checkpoint stays JAX's, and why. The checkpoints of a scan that stays are ours, if
    they can be; their copies are not overlapped.

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

    @without_remat3
    def replaced_in(*args: Any, **kwargs: Any) -> Any:
        call = _call(f, args, kwargs)
        jaxpr, shape = jax.make_jaxpr(call.run, return_shape=True)(*call.arrays)
        _refuse_gradients(jaxpr)
        replaced = _Replaced([], [], {})
        jaxpr = _with_ours(jaxpr, replaced)
        _judge(jaxpr, replaced, strict and not jax.config.jax_disable_jit)
        return call.result(jax.tree.unflatten(jax.tree.structure(shape), evaluate(jaxpr, call.arrays)))

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        refuse_remat3()
        return replaced_in(*args, **kwargs)

    return wrapped


class _Call(NamedTuple):
    """A call as a pure function of arrays; `result` makes what the call returns of what `run` returns."""

    run: Callable[..., Any]
    arrays: list[Any]
    result: Callable[[Any], Any]


def _call(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """A call of `f`, whose arguments may be modules of Flax NNX; it may change the values of their variables."""
    nnx = sys.modules.get("flax.nnx")
    is_object = lambda x: nnx is not None and isinstance(x, (nnx.Pytree, nnx.Variable))
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_object)
    kinds = ["object" if is_object(leaf) else "array" if _is_array(leaf) else "static" for leaf in leaves]
    those = lambda kind: [leaf for leaf, k in zip(leaves, kinds, strict=True) if k == kind]
    graph, state = nnx.split(those("object")) if nnx and "object" in kinds else (None, ())
    arrays, of_arrays = jax.tree.flatten((those("array"), state))
    others: list[tuple[Any, list[Any]]] = []  # the structure of the result, and its leaves that are not arrays

    def run(*arrays: Any) -> Any:
        values, state = jax.tree.unflatten(of_arrays, arrays)
        objects = nnx.merge(graph, state) if nnx and graph is not None else []
        given = {"object": iter(objects), "array": iter(values), "static": iter(those("static"))}
        args, kwargs = jax.tree.unflatten(tree, [next(given[kind]) for kind in kinds])
        outs, structure = jax.tree.flatten(f(*args, **kwargs))
        others.append((structure, [None if isinstance(out, jax.Array) else (out,) for out in outs]))
        after = nnx.state(objects) if nnx and objects else ()
        added = len(jax.tree.leaves(after)) > len(jax.tree.leaves(state))
        if nnx and objects and not added and nnx.graphdef(objects) != graph:
            raise NotImplementedError(_OTHER_CHANGES)
        return [out for out in outs if isinstance(out, jax.Array)], after

    def result(made: Any) -> Any:
        arrays, new = made
        if nnx and any(map(operator.is_not, jax.tree.leaves(new), jax.tree.leaves(state))):
            nnx.update(those("object"), new)
        structure, statics = others[-1]
        each = iter(arrays)
        return jax.tree.unflatten(structure, [next(each) if static is None else static[0] for static in statics])

    return _Call(run, arrays, result)


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is traced. Numbers of Python's and arrays of NumPy's are not: `f` may branch on them."""
    return isinstance(leaf, jax.Array) and not isinstance(jax.typeof(leaf), AbstractRef)


_OTHER_CHANGES = (
    "offload: the function changes more of a module of Flax NNX than the values of its variables, such as an "
    "attribute, or by eval(); do that outside"
)


def _refuse_gradients(jaxpr: Jaxpr) -> None:
    if any(_policy_of(site.eqn) and site.eqn.params["differentiated"] for site in walk(jaxpr)):
        raise NotImplementedError(
            "offload: the function differentiates what is under a Policy; wrap the loss that it differentiates, as in "
            "jax.grad(offload(loss))"
        )


class _Replaced(NamedTuple):
    """What is ours now.

    Attributes:
      under: each policy with the names under it.
      left: why some scans and checkpoints stay as they are.
      done: by the identity of each jaxpr, itself, what stands for it, and what was replaced in it. JAX compiles a
        function that is called twice once, if both calls have the same jaxpr.
    """

    under: list[tuple[Policy, set[str]]]
    left: list[str]
    done: dict[int, tuple[Jaxpr, Jaxpr, "_Replaced"]]


def _judge(jaxpr: Jaxpr, replaced: _Replaced, strict: bool) -> None:
    """Raise if nothing is ours, or if a pattern matches no name; warn of what stays."""
    sites = list(walk(jaxpr))
    left = list(dict.fromkeys(replaced.left))
    if not left and any(_policy_of(site.eqn) for site in sites):
        left = ["a jax.checkpoint under a Policy stays as it is: it stands in a custom derivative"]
    for why in left:
        warnings.warn(f"jaxoffload: offload: {why}", skip_file_prefixes=NOT_THE_USERS)
    if not any(site.eqn.primitive in (scan_p, checkpoint_p, chain_p) for site in sites) and not left:
        raise ValueError(
            "offload: the function has nothing under a jaxoffload.Policy; put the layers that its scan runs under one, "
            "as jax.checkpoint(layer, policy=Policy(...)), or nn.remat or nnx.remat with policy="
        )
    names: dict[Policy, set[str]] = {}
    for policy, seen in replaced.under:
        names.setdefault(policy, set()).update(seen)
    problems = [problem for policy, seen in names.items() for problem in policy.unmatched(seen)]
    if strict and problems and not left:
        raise PolicyError(problems)


def _with_ours(jaxpr: Jaxpr, replaced: _Replaced) -> Jaxpr:
    """`jaxpr` with what is under a policy replaced by ours, in its nested jaxprs too."""
    if id(jaxpr) not in replaced.done:
        inside = _Replaced([], [], replaced.done)
        replaced.done[id(jaxpr)] = jaxpr, with_eqns(jaxpr, [_our_equation(eqn, inside) for eqn in jaxpr.eqns]), inside
    _, ours, inside = replaced.done[id(jaxpr)]
    replaced.under.extend(inside.under)
    replaced.left.extend(inside.left)
    return ours


def _our_equation(eqn: JaxprEqn, replaced: _Replaced) -> JaxprEqn:
    if policy := _policy_of(eqn):
        eqn = map_bodies(eqn, lambda _, body: _with_ours(body, replaced))
        replaced.under.append((policy, all_names(eqn.params["jaxpr"])))
        if takes_refs(eqn.params["jaxpr"]):
            replaced.left.append("a jax.checkpoint stays as it is: it reads or writes a jax.new_ref")
            return eqn
        return _our_checkpoint(eqn, policy)
    if eqn.primitive is lax.scan_p and (policies := set(_policies_in(eqn.params["jaxpr"]))):
        if len(policies) > 1:
            several = f"its layers are under {len(policies)} policies; give all one"
            replaced.left.append(f"a scan of {eqn.params['length']} layers stays lax.scan: {several}")
        elif not takes_refs(eqn.params["jaxpr"]):  # of which checkpoints warn
            (policy,) = policies
            layer = _layer(eqn, policy)
            replaced.under.append((policy, all_names(layer)))
            eqn = eqn.replace(params=eqn.params | {"jaxpr": _with_ours(layer, replaced)})
            with eqn.ctx.manager:
                if (most := most_layers()) is not None and eqn.params["length"] > most:
                    return _first_layers(eqn, policy, most)
                return our_equation(eqn, policy, strict=False)
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
    """The body of a scan, as a layer of ours.

    If it has one checkpoint, that is written out. Several stay, so that the backward pass has only one of them at work
    at a time; what they read of each other is saved then, as by JAX.
    """
    body = body_of_scan(eqn)
    several = len(list(_policies_in(body.jaxpr))) > 1
    layer = _with_kept_inputs(body.jaxpr, policy) if several else _opened(body.jaxpr, policy)
    carried = zip(range(body.consts, body.consts + body.carry), layer.outvars, strict=False)
    changed = [i for i, out in carried if out is not layer.invars[i]]
    named = {value.var for value in named_values(layer, [None] * len(layer.invars)).values if value.path == ()}
    unnamed = [v for v in (layer.invars[i] for i in changed) if _is_float(v) and v not in named]
    names = [f"{CARRY}.{n}" if len(unnamed) > 1 else CARRY for n in range(len(unnamed))]
    return write_names(layer, {((), v): name for v, name in zip(unnamed, names, strict=True)})


def _is_float(v: Any) -> bool:
    return bool(v.aval.ndim) and jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _with_kept_inputs(jaxpr: Jaxpr, policy: Policy) -> Jaxpr:
    """A layer in which the arrays that its checkpoints read, and that it computes, have a name; kept by default."""
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    read = (v for eqn in jaxpr.eqns if _policy_of(eqn) for v in eqn.invars if isinstance(v, Var))
    keep = "" if policy.match(f"{INPUT}.0") else KEEP
    inputs = [v for v in dict.fromkeys(read) if v in made and _is_float(v)]
    return write_names(jaxpr, {((), v): f"{INPUT}.{number}{keep}" for number, v in enumerate(inputs)})


def _opened(jaxpr: Jaxpr, policy: Policy) -> Jaxpr:
    """A layer with its checkpoint under a policy written out, but not those of the loops in it.

    Nothing is traced again: in a `shard_map`, JAX would not know the axes here.
    """
    eqns: list[JaxprEqn] = []
    opened = lambda _, body: _opened(body, policy) if any(_policies_in(body)) else body

    def write_out(body: Jaxpr, operands: list[Any]) -> list[Any]:
        values: dict[Var, Any] = dict(zip([*body.constvars, *body.invars], [*body.consts, *operands], strict=True))
        read = lambda a: values.get(a, a) if isinstance(a, Var) else a
        for eqn in body.eqns:
            operands = list(map(read, eqn.invars))
            if _policy_of(eqn) == policy:
                values |= zip(eqn.outvars, write_out(eqn.params["jaxpr"], operands), strict=True)
            else:
                new = [v if type(v).__name__ == "DropVar" else Var(v.aval) for v in eqn.outvars]
                values |= zip(eqn.outvars, new, strict=True)
                eqn = eqn if eqn.primitive in _LOOPS else map_bodies(eqn, opened)
                eqns.append(eqn.replace(invars=operands, outvars=new))
        return list(map(read, body.outvars))

    outvars = write_out(jaxpr.replace(constvars=[], consts=[]), list(jaxpr.invars))
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())


def _first_layers(eqn: JaxprEqn, policy: Policy, most: int) -> JaxprEqn:
    """As `scan` runs them for `verify`, which asks for fewer."""
    body, length, reverse = body_of_scan(eqn), eqn.params["length"], eqn.params["reverse"]

    def run(*operands: Any) -> list[Any]:
        consts, init, xs = body.split(operands)

        def short(init: list[Any], xs: list[Any], most: int) -> tuple[list[Any], list[Any]]:
            outs = lax.scan_p.bind(*consts, *init, *xs, **eqn.params | {"length": most, "unroll": 1})
            return outs[: body.carry], outs[body.carry :]

        carry, ys = first_layers(short, init, xs, length, most, reverse)
        return [*carry, *ys]

    def ours(*operands: Any) -> list[Any]:
        return evaluate(with_our_scan(jax.make_jaxpr(run)(*operands), policy, strict=False), operands)

    (call,) = jax.make_jaxpr(jax.jit(ours))(*(v.aval for v in eqn.invars)).eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars)
