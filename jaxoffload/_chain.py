"""chain(): layers that differ, one after another, whose residuals a `Policy` chooses; unrolled.

As in `scan`, the copies of one layer run beside the compute of the next. In an unrolled program XLA may fetch residuals
as soon as they are on the host, run ahead of the copies, and leave the weights' gradients for the end; nothing would be
freed. So four ties are made: a layer's copies begin when it has ended (those of two layers at once would wait for each
other); a layer begins when the copies of the layer before the previous one are done; a layer's residuals are fetched
when the backward pass of the next one begins; and that begins when the one before it has ended.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, jaxpr_as_fun
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from ._call import Call
from ._checkpoint import bind, checked, derivative, partial_eval_as_remat
from ._layer import Body, Layer, apart, linearize
from ._linear import linear
from ._memory import DEVICE, HOST, layers_that_fit
from ._plan import Layers
from ._policy import Policy, PolicyError, accept
from ._refs import by_jax, takes_refs
from ._scan import inside_scan
from ._twin import is_twin
from ._xla import refuse_ordered_effects, refuse_remat3, refuse_wrong_offload


def chain(
    fs: Sequence[Callable[[Any, Any], Any]],
    init: Any,
    params: Sequence[Any],
    *,
    policy: Policy,
    strict: bool = True,
) -> Any:
    """Layers that differ, under a `Policy`: `for f, p in zip(fs, params): carry = f(carry, p)`.

    Values and gradients are those of the loop over `jax.checkpoint(f)`. Inside a `scan` a chain is a part of the
    scan's layer, and the scan's policy decides. It can be differentiated again, but a first time only in reverse, not
    in forward mode; `jax.linearize` raises where its result is applied. Where a layer reads or writes a `jax.new_ref`
    from outside, all run under JAX's own checkpoint, as such a body of a `scan` does. What `checkify` makes of a chain
    is one `checkpoint`, if it is differentiated then.

    Args:
      fs: the layers, `(carry, p) -> carry`; a carry has the same structure everywhere, its shapes may change.
      init: the first carry, a pytree of arrays.
      params: a pytree for each layer. Its arrays, and closed-over ones, are never moved or copied.
      policy: decides on the values that the layers name. Layers count in order, as in `scan`.
      strict: a pattern that matches no value in any layer is an error, raised when the chain is differentiated.

    Returns:
      The last carry.

    Raises:
      TypeError: a layer returns a carry of another structure; there are more or fewer params than layers; fs is no
        list, policy no Policy, or strict no bool.
      PolicyError, MemoryError, NotImplementedError (when differentiated): as in `scan`.
    """
    accept("chain", policy, strict)
    if not isinstance(fs, Sequence):
        raise TypeError(f"chain: fs must be a list or tuple of layers, got {fs!r}")
    if len(fs) != len(params):
        raise TypeError(f"chain: {len(fs)} layers have {len(params)} params; each layer needs one, if only None")
    refuse_remat3()
    if not fs:
        return init
    if jax.config.jax_disable_jit or inside_scan():
        return _each(jax.checkpoint, fs, init, params)
    first, (carry, tree) = init, jax.tree.flatten(init)
    jaxprs, own, operands = [], [], []
    for number, (f, p) in enumerate(zip(fs, params, strict=True)):
        jaxpr, init = jax.make_jaxpr(f, return_shape=True)(init, p)
        got: Any = jax.tree.structure(init)
        if got != tree:
            raise TypeError(f"chain: layer {number} returns {got} for a carry of {tree}")
        jaxprs.append(_consts_last(jaxpr))
        operands += [*jax.tree.leaves(p), *jaxpr.consts]
        own.append(len(jaxprs[-1].invars) - len(carry))
    if any(map(takes_refs, jaxprs)):
        return _each(by_jax(jaxprs, policy, strict, True), fs, first, params)
    layers = _Layers(tuple(jaxprs), tuple(own))
    return jax.tree.unflatten(tree, _bind(layers, [*carry, *operands], policy, strict))


def _each(checkpoint: Callable[..., Any], fs: Sequence[Callable[..., Any]], carry: Any, params: Sequence[Any]) -> Any:
    """Plain JAX: one layer after another, each under a checkpoint."""
    for f, p in zip(fs, params, strict=True):
        carry = checkpoint(f)(carry, p)
    return carry


def _consts_last(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr` of the carry, the layer's parameters, and what it closes over."""
    count = len(jaxpr.consts)
    whole = pe.convert_constvars_jaxpr(jaxpr) if count else jaxpr
    invars = [*whole.invars[count:], *whole.invars[:count]]
    return whole.replace(invars=invars, debug_info=whole.debug_info.with_unknown_names())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Layers:
    """The layers apart: the jaxpr of each, and how many operands of its own it has. What walks through an equation's
    jaxprs does not see them; it sees them together, in `call_jaxpr`."""

    jaxprs: tuple[Jaxpr, ...]
    own: tuple[int, ...]

    def __repr__(self) -> str:
        """Short, for it stands in printed jaxprs."""
        return f"{len(self.own)} layers"

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        """The first carry, and the operands of each layer's own."""
        at = len(operands) - sum(self.own)
        carry, each = list(operands[:at]), []
        for count in self.own:
            each.append(list(operands[at : at + count]))
            at += count
        return carry, each

    def __call__(self, *operands: Any) -> list[Any]:
        carry, each = self.split(operands)
        for jaxpr, mine in zip(self.jaxprs, each, strict=True):
            carry = jaxpr_as_fun(jaxpr)(*carry, *mine)
        return carry


def _bind(layers: _Layers, operands: Sequence[Any], policy: Policy, strict: bool) -> list[Any]:
    whole = jax.make_jaxpr(layers)(*operands)
    return chain_p.bind(*operands, call_jaxpr=whole, layers=layers, policy=policy, strict=strict)


def _checked(run: Callable[..., list[Any]], *operands: Any, layers: _Layers, **params: Any) -> list[Any]:
    """What `checkify` makes of a chain: the error goes from layer to layer, and the whole is one `checkpoint`."""
    roles = ("argument",) * len(layers.jaxprs[0].outvars) + ("weight",) * sum(layers.own)
    return checked(run, *operands, roles=roles, prevent_cse=True, **params)


chain_p = Call("jaxoffload_chain", _checked)


def _batch(
    axis: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    call_jaxpr: Jaxpr,
    layers: _Layers,
    policy: Policy,
    strict: bool,
) -> tuple[list[Any], list[Any]]:
    carry, each = layers.split(dims)
    batched = []
    for jaxpr, mine in zip(layers.jaxprs, each, strict=True):
        wanted = [batching.zero_if_mapped] * len(carry)
        layer, mapped = batching.batch_jaxpr_axes(jaxpr, axis, [*carry, *mine], wanted)
        carry = [0 if m else None for m in mapped]
        batched.append(layer)
    return _bind(_Layers(tuple(batched), layers.own), args, policy, strict), carry


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    call_jaxpr: Jaxpr,
    layers: _Layers,
    policy: Policy,
    strict: bool,
) -> tuple[list[Any], list[Any]]:
    carry, each = layers.split(primals)
    bodies = [Body(jaxpr, 0, len(carry)) for jaxpr in layers.jaxprs]
    moving = [type(t) is not ad.Zero for t in tangents]
    if is_twin():
        return _twin_jvp(primals, tangents, bodies, layers, policy)
    made = _linearized(bodies, *layers.split(moving), policy)
    if strict and (problems := policy.unmatched(set().union(*(layer.plan.seen for layer in made)))):
        raise PolicyError(problems)
    kept: list[list[Any]] = []
    copies: list[Any] = []  # of the previous layer
    for layer, mine in zip(made, each, strict=True):
        operands = [*carry, *mine]
        outs = jaxpr_as_fun(layer.forward)(*operands)
        carry, stored = _after(copies, outs[: layer.carry]), iter(outs[layer.carry :])
        residuals = [operands[k.operand] if k.place == "operand" else next(stored) for k in layer.kept]
        kept.append(_moved(layer, residuals, HOST, carry))
        copies = [x for k, x in zip(layer.kept, kept[-1], strict=True) if k.place == "host"]
    flat, tree = jax.tree.flatten(kept)
    avals = [jax.typeof(x).to_tangent_aval() for x in carry]
    perturbed = made[-1].out_perturbed
    found = iter(
        linear(
            "chain",
            flat,
            [ad.instantiate_zeros(t) for t, m in zip(tangents, moving, strict=True) if m],
            [a for a, p in zip(avals, perturbed, strict=True) if p],
            lambda kept, cotangents: _transpose(made, jax.tree.unflatten(tree, kept), cotangents),
            made,
        )
    )
    return carry, [next(found) if p else ad.Zero(a) for a, p in zip(avals, perturbed, strict=True)]


def _twin_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], bodies: Sequence[Body], layers: _Layers, policy: Policy
) -> tuple[list[Any], list[Any]]:
    """Each layer under `checkpoint`."""

    def checkpoints(*operands: Any) -> list[Any]:
        carry, each = layers.split(operands)
        for body, mine in zip(bodies, each, strict=True):
            args = [*carry, *mine]
            carry = bind(body.jaxpr, args, roles=body.roles, policy=policy, strict=False, prevent_cse=True)
        return carry

    moving = tuple(type(t) is not ad.Zero for t in tangents)
    jvp, perturbed = derivative(jax.make_jaxpr(checkpoints)(*primals), moving, False, False)
    outs = jaxpr_as_fun(jvp)(*primals, *(t for t, m in zip(tangents, moving, strict=True) if m))
    carry, found = outs[: len(perturbed)], iter(outs[len(perturbed) :])
    zero = lambda x: ad.Zero(jax.typeof(x).to_tangent_aval())
    return carry, [next(found) if p else zero(x) for x, p in zip(carry, perturbed, strict=True)]


def _linearized(bodies: Sequence[Body], carry: list[bool], each: list[list[bool]], policy: Policy) -> list[Layer]:
    """Each layer's derivative, with respect to its own perturbed operands and the carry that comes perturbed."""

    def derived(offloaded: int) -> list[Layer]:
        perturbed, layers = carry, []
        for number, (body, mine) in enumerate(zip(bodies, each, strict=True)):
            which = _treatment(number, len(bodies), offloaded, policy)
            layers.append(linearize(*body, (*perturbed, *mine), policy, False, which))
            perturbed = list(layers[-1].out_perturbed)
        return layers

    offloaded = policy.offloaded_layers(len(bodies))
    layers = derived(offloaded)
    sizes = [layer.host_bytes for layer in layers[:offloaded]]
    if not any(sizes):
        return layers
    refuse_wrong_offload()
    for body in bodies:
        refuse_ordered_effects("chain", body.jaxpr)
    fit = layers_that_fit("chain", list(itertools.accumulate(sizes)), policy.on_host_full)
    return layers if fit == offloaded else derived(fit)


def _treatment(number: int, layers: int, offloaded: int, policy: Policy) -> Layers:
    if number < offloaded:
        return Layers()
    if number >= layers - policy.resident_layers:
        return Layers("save", "resident")
    return Layers(policy.other_layers, "other_layers")


def _transpose(layers: Sequence[Layer], kept: Sequence[Sequence[Any]], cotangents: Sequence[Any]) -> list[Any]:
    """Cotangents of the perturbed results -> those of the perturbed operands, in order."""
    own: list[Any] = []
    fetched = _moved(layers[-1], kept[-1], DEVICE)
    for number in reversed(range(len(layers))):
        layer, residuals = layers[number], fetched
        present = [ct for ct in cotangents if type(ct) is not ad.Zero]
        wanted = tuple(type(ct) is not ad.Zero for ct in cotangents)
        residuals, present = apart(residuals, present)
        if number:
            fetched = _moved(layers[number - 1], kept[number - 1], DEVICE, present)
        found = lax.optimization_barrier(jaxpr_as_fun(layer.backward(wanted))(*residuals, *present))
        through = sum(layer.perturbed[: layer.carry])
        cotangents, own = found[:through], [*found[through:], *own]
    return [*cotangents, *own]


def _moved(layer: Layer, residuals: Sequence[Any], where: Any, behind: Sequence[Any] = ()) -> list[Any]:
    """The residuals, those for the host copied to `where`, once the values in `behind` are there."""
    copies, moved = iter(layer.copies), []
    for k, x in zip(layer.kept, residuals, strict=True):
        if k.place == "host":
            with next(copies):
                x = jax.device_put(_after(behind, [x])[0], where)
        moved.append(x)
    return moved


def _after(first: Sequence[Any], then: Sequence[Any]) -> list[Any]:
    """`then`, but not before `first` is there."""
    return list(lax.optimization_barrier((list(then), list(first)))[0]) if first else list(then)


def _partial_eval(*rest: Any) -> Any:
    return partial_eval_as_remat(rest[-1].params["call_jaxpr"], True, *rest)


ad.primitive_jvps[chain_p] = _jvp
batching.fancy_primitive_batchers[chain_p] = _batch
pe.partial_eval_jaxpr_custom_rules[chain_p] = _partial_eval
