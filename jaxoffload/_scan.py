"""scan(): `jax.lax.scan` whose residuals a `Policy` chooses, layer by layer.

`lax.scan` traces the body, with its checks, promotions and errors; its equation is then replaced by one of ours, which
is the same until it is differentiated. Its JVP rule linearises the body (`_layer`), decides which layers offload, and
leaves two equations: the forward loop (`_loops`), which also keeps the residuals, and a linear one, of tangents, whose
transpose is the backward loop.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, new_jaxpr_eqn
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from ._call import Call, as_array, evaluate
from ._checkpoint import bind, cached
from ._layer import Body, Layer, linearize, perturbed_carry
from ._linear import linear
from ._loops import Loops, Part, run_backward, run_forward
from ._memory import layers_that_fit
from ._plan import Layers
from ._policy import Policy, accept
from ._refs import by_jax, takes_refs
from ._twin import is_twin, most_layers
from ._xla import refuse_ordered_effects, refuse_remat3, refuse_wrong_offload


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    policy: Policy,
    strict: bool = True,
) -> tuple[Any, Any]:
    """`jax.lax.scan` under a `Policy`: a scan over layers with each named residual saved, offloaded or recomputed.

    It computes what `lax.scan(jax.checkpoint(f), init, xs, length, reverse, unroll)` does, with the same errors.
    Differentiated in reverse, the copies of one layer's residuals run beside the computation of the next. It cannot be
    differentiated twice, nor in forward mode; `jax.linearize` raises where its result is applied. A body that reads or
    writes a `jax.new_ref` from outside runs under JAX's own checkpoint, which asks the policy: see `Policy` for what
    that route cannot see.

    Args:
      f: `(carry, x) -> (carry, y)`; names its residuals with `tag` or `checkpoint_name`.
      init, xs, length, reverse, unroll: as for `lax.scan`. Layers count in the order in which they run.
      policy: decides on the named values of `f`. The carry is never computed again, xs and closed-over arrays (the
        weights) are never moved or copied. A value that is the same in every layer is kept once, on the device. A scan
        inside `f` follows its own policy.
      strict: a pattern that matches no value of `f` is an error, raised when the scan is differentiated. Pass False
        where several scans share one policy, and judge them together with `check`.

    Raises:
      TypeError: policy is no Policy, or strict no bool; and what `lax.scan` raises.

    Raises (when differentiated, before anything is compiled):
      PolicyError: a pattern matches nothing, or two names of one value have different decisions.
      MemoryError: the pinned host pool is smaller than this scan's need, and the policy says `on_host_full: error`.
        `check` and `residuals` judge what a step needs in all.
      NotImplementedError: a derivative that there is not; or offloading here would give wrong gradients.
    """
    accept("scan", policy, strict)
    refuse_remat3()
    if (most := most_layers()) is not None:
        layers = length if length is not None else jax.tree.leaves(xs)[0].shape[0]
        if layers > most:
            short = functools.partial(scan, f, reverse=reverse, unroll=unroll, policy=policy, strict=strict)
            return _first_layers(short, init, xs, layers, most, reverse)

    def lax_scan(init: Any, xs: Any) -> tuple[Any, Any]:
        return lax.scan(f, init, xs, length=length, reverse=reverse, unroll=unroll)

    scannable = all(hasattr(x, "shape") for x in jax.tree.leaves(xs)) and all(map(_is_array, jax.tree.leaves(init)))
    if jax.config.jax_disable_jit or not scannable:
        return lax_scan(init, xs)  # a Python loop, in which nothing is placed; or an error in lax.scan's own words
    with _inside(True):
        jaxpr, shape = jax.make_jaxpr(lax_scan, return_shape=True)(init, xs)
        if takes_refs(jaxpr):
            f = by_jax([jaxpr], policy, strict, False)(f)
            return lax_scan(init, xs)
    operands = [*jax.tree.leaves(init), *map(as_array, jax.tree.leaves(xs))]
    outs = evaluate(_with_our_scan(jaxpr, policy, strict), operands)
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def _first_layers(
    short: Callable[..., Any], init: Any, xs: Any, length: int, most: int, reverse: bool
) -> tuple[Any, Any]:
    """Of a scan the layers that run first; ys of the others are zeros. For `verify`, which says so."""
    there = slice(length - most, None) if reverse else slice(most)
    carry, ys = short(init, jax.tree.map(lambda x: x[there], xs), most)
    pad = (length - most, 0, 0) if reverse else (0, length - most, 0)
    return carry, jax.tree.map(lambda y: lax.pad(y, jnp.zeros((), y.dtype), (pad, *[(0, 0, 0)] * (y.ndim - 1))), ys)


def _is_array(x: Any) -> bool:
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


# Part of every trace cache's key, as is `scope`.
_inside = jax.make_user_context(False)


def inside_scan() -> bool:
    """Whether the body of a `scan` is being traced."""
    return _inside.value


def _with_our_scan(jaxpr: Jaxpr, policy: Policy, strict: bool) -> Jaxpr:
    """A jaxpr with one `lax.scan` in it, and ours in its place."""
    scans = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive is lax.scan_p]
    if not scans:
        raise NotImplementedError("jaxoffload: lax.scan makes no scan here; switch jax_scan3 off")
    at = max(scans)
    eqn = jaxpr.eqns[at]
    alone = jax.make_jaxpr(functools.partial(lax.scan_p.bind, **eqn.params))(*(v.aval for v in eqn.invars))
    params = {"call_jaxpr": alone, "policy": policy, "strict": strict}
    ours = new_jaxpr_eqn(eqn.invars, eqn.outvars, scan_p, params, eqn.effects, eqn.source_info, eqn.ctx)
    return jaxpr.replace(eqns=[*jaxpr.eqns[:at], ours, *jaxpr.eqns[at + 1 :]])


def body_of(call_jaxpr: Jaxpr) -> Body:
    """Of a jaxpr of one `lax.scan`: its body. Of xs and ys the scan has an axis more."""
    (eqn,) = call_jaxpr.eqns
    jaxpr = eqn.params["jaxpr"]
    same = lambda outer, inner: sum(o.aval.ndim == i.aval.ndim for o, i in zip(outer, inner, strict=True))
    carry = same(eqn.outvars, jaxpr.outvars)
    return Body(jaxpr, same(eqn.invars, jaxpr.invars) - carry, carry)


def _checked(run: Callable[..., list[Any]], *operands: Any, policy: Policy, strict: bool) -> list[Any]:
    """What `checkify` makes of a scan, ours too: a scan that carries the error."""
    return evaluate(_with_our_scan(jax.make_jaxpr(run)(*operands), policy, strict), operands)


scan_p = Call("jaxoffload_scan", _checked)
scan_p.def_impl(lambda *operands, call_jaxpr, **_: evaluate(call_jaxpr, operands))


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, call_jaxpr: Jaxpr, policy: Policy, strict: bool
) -> tuple[list[Any], list[Any]]:
    """As `lax.scan` is batched, before it is differentiated: then cotangents of weights are summed layer by layer."""
    wanted = [batching.zero_if_mapped] * len(call_jaxpr.outvars)
    batched, mapped = batching.batch_jaxpr_axes(call_jaxpr, axis, dims, wanted)
    outs = evaluate(_with_our_scan(batched, policy, strict), args)
    return outs, [0 if m else None for m in mapped]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call_jaxpr: Jaxpr, policy: Policy, strict: bool
) -> tuple[list[Any], list[Any]]:
    body, params = body_of(call_jaxpr), dict(call_jaxpr.eqns[0].params)
    jaxpr = params.pop("jaxpr")
    if is_twin():
        # Where layers stand beside each other XLA makes one of what is computed twice; our loops have `apart` there.
        jaxpr = _checkpointed(jaxpr, body.roles, policy, params["unroll"] != 1 or params["length"] == 1)
    if not params["length"] or is_twin():
        return ad.primitive_jvps[lax.scan_p](primals, tangents, jaxpr=jaxpr, **params)
    perturbed = perturbed_carry(body, [type(t) is not ad.Zero for t in tangents], policy)
    offloaded = _layers_that_offload(body, perturbed, policy, strict, params["length"])
    loops = _loops(*body, perturbed, policy, strict, offloaded, params["length"], params["reverse"], params["unroll"])
    outs = run_forward(loops, *primals)
    primals_out, saved = outs[: loops.results], outs[loops.results :]

    reads = [primals[number] for number, _ in loops.reads]
    moving = [ad.instantiate_zeros(t) for t, p in zip(tangents, perturbed, strict=True) if p]
    tangent_avals = [jax.typeof(x).to_tangent_aval() for x in primals_out]
    out_perturbed = loops.parts[0].layer.out_perturbed
    avals = [a for a, p in zip(tangent_avals, out_perturbed, strict=True) if p]
    layers = [part.layer for part in loops.parts]
    found = iter(linear("scan", [*reads, *saved], moving, avals, functools.partial(_transpose, loops), layers))
    return primals_out, [next(found) if p else ad.Zero(a) for a, p in zip(tangent_avals, out_perturbed, strict=True)]


@cached
def _checkpointed(jaxpr: Jaxpr, roles: tuple[str, ...], policy: Policy, prevent_cse: bool) -> Jaxpr:
    """A body under `checkpoint`, as the twin runs it."""
    under = functools.partial(bind, roles=roles, policy=policy, strict=False, prevent_cse=prevent_cse)
    return jax.make_jaxpr(lambda *args: under(jaxpr.replace(), args))(*jaxpr.in_avals)


def _transpose(loops: Loops, kept: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    layer = loops.parts[0].layer
    consts, carry = sum(layer.perturbed[: layer.consts]), sum(layer.out_perturbed[: layer.carry])
    wanted = tuple(i < carry or type(ct) is not ad.Zero for i, ct in enumerate(cotangents))
    parts = tuple(part._replace(jaxpr=part.layer.backward(wanted)) for part in loops.parts)
    loops = dataclasses.replace(loops, parts=parts, consts=consts, carry=carry)
    return run_backward(
        loops, *kept, *(ad.instantiate_zeros(ct) for ct, w in zip(cotangents, wanted, strict=True) if w)
    )


def _partial_eval(saveable: Any, unknown: Any, instantiate: Any, eqn: JaxprEqn) -> Any:
    """Inside a checkpoint, where nothing of it is differentiated: it is a `lax.scan`, and its names are the outer's."""
    rule = pe.partial_eval_jaxpr_custom_rules[lax.scan_p]
    params = eqn.params["call_jaxpr"].eqns[0].params
    return rule(saveable, unknown, instantiate, eqn.replace(primitive=lax.scan_p, params=params))


def _layers_that_offload(body: Body, perturbed: tuple[bool, ...], policy: Policy, strict: bool, length: int) -> int:
    """How many do, by the policy, by what there is to offload, and by what the host has room for."""
    each = linearize(*body, perturbed, policy, strict, Layers()).host_bytes
    wanted = policy.offloaded_layers(length) if each else 0
    if not wanted:
        return 0
    refuse_wrong_offload()
    refuse_ordered_effects("scan", body.jaxpr)
    needs = [each * (layers + 1) for layers in range(1, wanted + 1)]  # and an empty row
    return layers_that_fit("scan", needs, policy.on_host_full)


@cached
def _loops(
    jaxpr: Jaxpr,
    consts: int,
    carry: int,
    perturbed: tuple[bool, ...],
    policy: Policy,
    strict: bool,
    offloaded: int,
    length: int,
    reverse: bool,
    unroll: int,
) -> Loops:
    """The forward pass: the layers that offload, those that do what `other_layers` says, those that are resident."""
    layer = linearize(jaxpr, consts, carry, perturbed, policy, strict, Layers())
    resident = length - min(policy.resident_layers, length)
    if not layer.host_bytes:
        return _loops_of([_part(0, length, 0, layer, "")], length, reverse, unroll)
    other = layer
    if policy.other_layers == "recompute" and offloaded < resident:
        other = linearize(jaxpr, consts, carry, perturbed, policy, strict, Layers("recompute", "other_layers"))
    # The layer behind those that offload can run in their loop; its residuals stay where they are.
    rides = 0 < offloaded < length and (offloaded == resident or other is layer)
    reason = "resident" if offloaded == resident else "other_layers"
    start = offloaded + rides
    parts = [
        _part(0, start, offloaded, layer, reason),
        _part(start, resident, 0, other, "other_layers"),
        _part(max(start, resident), length, 0, layer, "resident"),
    ]
    return _loops_of([part for part in parts if part.layers > 0], length, reverse, unroll)


def _loops_of(parts: list[Part], length: int, reverse: bool, unroll: int) -> Loops:
    """The forward pass over these parts; of their residuals it reads those that are operands anyway where they are."""
    layer = parts[0].layer
    numbers = sorted({k.operand for part in parts for k in part.layer.kept if k.place == "operand"})
    reads = tuple((number, number < layer.consts) for number in numbers)
    return Loops(tuple(parts), length, reverse, unroll, layer.consts, layer.carry, reads)


def _part(start: int, stop: int, on_host: int, layer: Layer, reason: str) -> Part:
    return Part(start, stop, on_host, layer.forward, layer, reason)


ad.primitive_jvps[scan_p] = _jvp
batching.fancy_primitive_batchers[scan_p] = _batch
pe.partial_eval_jaxpr_custom_rules[scan_p] = _partial_eval
