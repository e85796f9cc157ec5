"""chain(): layers that differ, one after another, whose residuals a `Policy` chooses; unrolled.

As in `scan`, the copies of one layer run beside the compute of the next. In an unrolled program XLA may fetch residuals
as soon as they are on the host, run ahead of the copies, and leave the weights' gradients for the end; then nothing is
freed. Barriers (`_after`) therefore order four things:

- a layer's copies begin when the layer has ended (copies of two layers at once would wait for each other);
- a layer begins when the copies of the layer before the previous one are done;
- a layer's residuals are fetched when the backward pass of the next layer begins;
- the backward pass of a layer begins when the one before it has ended.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, jaxpr_as_fun

from . import _jax
from ._engine.checkpoint_primitive import bind, checked, partial_eval_as_remat
from ._engine.derivative import derivative
from ._engine.host_pool_limit import admitted
from ._engine.layer import Body, Layer, linearize, prevent_cse_barrier
from ._engine.mutable_refs import by_jax, takes_refs
from ._engine.plan import Override
from ._engine.transpose_only import with_tangents
from ._jax import DEVICE, HOST, Results, Values
from ._policy import Policy, PolicyError, check_arguments
from ._reference import is_reference
from ._scan import inside_scan


@_jax.without_remat3
def chain(
    fs: Sequence[Callable[[Any, Any], Any]],
    init: Any,
    params: Sequence[Any],
    *,
    policy: Policy,
    strict: bool = True,
) -> Any:
    """Layers that differ, under a `Policy`: `for f, p in zip(fs, params): carry = f(carry, p)`, unrolled.

    Values and gradients are those of the loop over `jax.checkpoint(f)`. Inside a `scan` a chain is part of the scan's
    layer, and the scan's policy decides. It can be differentiated again, but the first derivative is in reverse mode:
    `jax.linearize` raises where its result is applied. If a layer reads or writes a `jax.new_ref` from outside, all
    layers run under JAX's own checkpoint, as such a body of a `scan` does.
    `checkify` turns a chain into one `checkpoint`, if it is differentiated afterwards.

    Args:
      fs: the layers, `(carry, p) -> carry`; a carry has the same structure everywhere, but its shapes may change.
      init: the first carry, a pytree of arrays.
      params: a pytree per layer. Its arrays, and closed-over ones, are never moved or copied.
      policy: decides on the values that the layers name. Layers count in order, as in `scan`.
      strict: raise, when the chain is differentiated, if a pattern matches no value in any layer.

    Returns:
      The last carry.

    Raises:
      TypeError: a layer returns a carry of another structure; there are more or fewer params than layers; fs is not a
        list or tuple, policy not a Policy, or strict not a bool.
      PolicyError, HostPoolFull, NotImplementedError (when differentiated): as in `scan`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, chain, tag
      >>> fs = [lambda x, w: jnp.sin(tag(x @ w, "a")), lambda x, w: jnp.tanh(tag(x @ w, "b"))]
      >>> policy = Policy(residuals={"a": "offload", "b": "save"}, min_offload_bytes=0)
      >>> loss = lambda ws, x: chain(fs, x, ws, policy=policy).sum()
      >>> [dw.shape for dw in jax.jit(jax.grad(loss))([jnp.ones((8, 16)), jnp.ones((16, 4))], jnp.ones((2, 8)))]
      [(8, 16), (16, 4)]
    """
    check_arguments("chain", policy, strict)
    if not isinstance(fs, Sequence):
        raise TypeError(f"chain: fs must be a list or tuple of layers, got {fs!r}")
    if len(fs) != len(params):
        raise TypeError(f"chain: {len(fs)} layers have {len(params)} params; each layer needs one, if only None")
    if not fs:
        return init
    if jax.config.jax_disable_jit or inside_scan():
        return _each(jax.checkpoint, fs, init, params)
    first, (carry, tree) = init, jax.tree.flatten(init)
    jaxprs, counts, operands = [], [], []
    for number, (f, p) in enumerate(zip(fs, params, strict=True)):
        jaxpr, init = jax.make_jaxpr(f, return_shape=True)(init, p)
        got: Any = jax.tree.structure(init)
        if got != tree:
            raise TypeError(f"chain: layer {number} returns {got} for a carry of {tree}")
        jaxprs.append(_consts_last(jaxpr))
        operands += [*jax.tree.leaves(p), *jaxpr.consts]
        counts.append(len(jaxprs[-1].invars) - len(carry))
    if any(map(takes_refs, jaxprs)):
        return _each(by_jax(jaxprs, policy, strict, True), fs, first, params)
    layers = _Layers(tuple(jaxprs), tuple(counts))
    return jax.tree.unflatten(tree, _bind(layers, [*carry, *operands], policy, strict))


def _each(checkpoint: Callable[..., Any], fs: Sequence[Callable[..., Any]], carry: Any, params: Sequence[Any]) -> Any:
    """Plain JAX: one layer after another, each under a checkpoint."""
    for f, p in zip(fs, params, strict=True):
        carry = checkpoint(f)(carry, p)
    return carry


def _consts_last(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr` as a function of the carry, the layer's parameters, and what it closes over."""
    count = len(jaxpr.consts)
    whole = _jax.convert_constvars_jaxpr(jaxpr) if count else jaxpr
    invars = [*whole.invars[count:], *whole.invars[:count]]
    return whole.replace(invars=invars, debug_info=whole.debug_info.with_unknown_names())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Layers:
    """The layers one by one: the jaxpr of each, and how many operands belong to it alone (`counts`).

    Code that walks through an equation's jaxprs does not see them; it sees them together, in `call_jaxpr`.
    """

    jaxprs: tuple[Jaxpr, ...]
    counts: tuple[int, ...]

    def __repr__(self) -> str:
        """Short: it is printed in jaxprs."""
        return f"{len(self.counts)} layers"

    @property
    def bodies(self) -> list[Body]:
        return [Body(jaxpr, 0, len(jaxpr.outvars)) for jaxpr in self.jaxprs]

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        """The first carry, and the operands of each layer."""
        at = len(operands) - sum(self.counts)
        carry, each = list(operands[:at]), []
        for count in self.counts:
            each.append(list(operands[at : at + count]))
            at += count
        return carry, each

    def __call__(self, *operands: Any) -> list[Any]:
        carry, each = self.split(operands)
        for jaxpr, params in zip(self.jaxprs, each, strict=True):
            carry = jaxpr_as_fun(jaxpr)(*carry, *params)
        return carry


def _bind(layers: _Layers, operands: Sequence[Any], policy: Policy, strict: bool) -> list[Any]:
    whole = jax.make_jaxpr(layers)(*operands)
    return chain_p.bind(*operands, call_jaxpr=whole, layers=layers, policy=policy, strict=strict)


def _checked(run: Callable[..., list[Any]], *operands: Any, layers: _Layers, **params: Any) -> list[Any]:
    """What `checkify` makes of a chain: the error goes from layer to layer, and the whole is one `checkpoint`."""
    roles = ("argument",) * len(layers.jaxprs[0].outvars) + ("weight",) * sum(layers.counts)
    return checked(run, *operands, roles=roles, prevent_cse=True, **params)


def _batch(axis: Any, args: Values, dims: Values, *, call_jaxpr: Jaxpr, layers: _Layers, **params: Any) -> Results:
    carry, each = layers.split(dims)
    batched = []
    for jaxpr, its_dims in zip(layers.jaxprs, each, strict=True):
        layer, mapped = _jax.batch_jaxpr_axes(jaxpr, axis, [*carry, *its_dims], [_jax.zero_if_mapped] * len(carry))
        carry = [0 if m else None for m in mapped]
        batched.append(layer)
    return _bind(_Layers(tuple(batched), layers.counts), args, **params), carry


def _jvp(
    primals: Values, tangents: Values, *, call_jaxpr: Jaxpr, layers: _Layers, policy: Policy, strict: bool
) -> Results:
    if is_reference():
        return _reference_jvp(primals, tangents, layers, policy)
    perturbed = _jax.perturbed(tangents)
    linearized = _linearized(layers.bodies, *layers.split(perturbed), policy)
    if strict and (problems := policy.unmatched(set().union(*(layer.plan.seen for layer in linearized)))):
        raise PolicyError(problems)
    carry, kept = _forward(linearized, *layers.split(primals))
    flat, tree = jax.tree.flatten(kept)
    return with_tangents(
        carry,
        linearized[-1].out_perturbed,
        [_jax.instantiate_zeros(t) for t, p in zip(tangents, perturbed, strict=True) if p],
        caller="chain",
        kept=flat,
        transpose=lambda kept, cotangents: _transpose(linearized, jax.tree.unflatten(tree, kept), cotangents),
        layers=linearized,
    )


def _reference_jvp(primals: Values, tangents: Values, layers: _Layers, policy: Policy) -> Results:
    """The JVP of the layers, each under `checkpoint`."""

    def checkpoints(*operands: Any) -> list[Any]:
        carry, each = layers.split(operands)
        for body, params in zip(layers.bodies, each, strict=True):
            args = [*carry, *params]
            carry = bind(body.jaxpr, args, roles=body.roles, policy=policy, strict=False, prevent_cse=True)
        return carry

    perturbed = _jax.perturbed(tangents)
    jvp, out_perturbed = derivative(jax.make_jaxpr(checkpoints)(*primals), perturbed, False, False)
    outs = jaxpr_as_fun(jvp)(*primals, *(t for t, p in zip(tangents, perturbed, strict=True) if p))
    return _jax.with_zeros(outs, out_perturbed)


def _linearized(bodies: Sequence[Body], carry: list[bool], each: list[list[bool]], policy: Policy) -> list[Layer]:
    """Each layer's derivative with respect to the perturbed ones of its operands and of the carry that reaches it."""

    def derived(offloaded: int) -> list[Layer]:
        perturbed, layers = carry, []
        for number, (body, params) in enumerate(zip(bodies, each, strict=True)):
            override = _override(number, len(bodies), offloaded, policy)
            layers.append(linearize(body, (*perturbed, *params), policy, False, override))
            perturbed = list(layers[-1].out_perturbed)
        return layers

    offloaded = policy.offloaded_layers(len(bodies))
    layers = derived(offloaded)
    sizes = [layer.host_bytes for layer in layers[:offloaded]]
    if not any(sizes):
        return layers
    need = lambda count: sum(sizes[:count])
    fit = admitted("chain", [body.jaxpr for body in bodies], offloaded, need, policy.on_host_full)
    return layers if fit == offloaded else derived(fit)


def _override(number: int, layers: int, offloaded: int, policy: Policy) -> Override:
    if number < offloaded:
        return Override()
    if number >= layers - policy.resident_layers:
        return Override("save", "resident")
    return Override(policy.other_layers, "other_layers")


def _forward(
    layers: Sequence[Layer], carry: list[Any], each: Sequence[Sequence[Any]]
) -> tuple[list[Any], list[list[Any]]]:
    """The last carry, and the residuals of each layer, where they are kept."""
    kept: list[list[Any]] = []
    copies: list[Any] = []  # of the previous layer
    for layer, params in zip(layers, each, strict=True):
        operands = [*carry, *params]
        outs = jaxpr_as_fun(layer.forward)(*operands)
        carry, stored = _after(copies, outs[: layer.carry]), iter(outs[layer.carry :])
        residuals = [next(stored) if k.operand is None else operands[k.operand] for k in layer.kept]
        kept.append(_moved(layer, residuals, HOST, carry))
        copies = [x for k, x in zip(layer.kept, kept[-1], strict=True) if k.place == "host"]
    return carry, kept


def _transpose(layers: Sequence[Layer], kept: Sequence[Values], cotangents: Values) -> list[Any]:
    """Cotangents of the perturbed results -> those of the perturbed operands, in order."""
    params: list[Any] = []
    fetched = _moved(layers[-1], kept[-1], DEVICE)
    for number in reversed(range(len(layers))):
        layer, residuals = layers[number], fetched
        wanted = _jax.perturbed(cotangents)
        present = [ct for ct, w in zip(cotangents, wanted, strict=True) if w]
        residuals, present = prevent_cse_barrier(residuals, present)
        if number:
            fetched = _moved(layers[number - 1], kept[number - 1], DEVICE, present)
        outs = lax.optimization_barrier(jaxpr_as_fun(layer.backward(wanted))(*residuals, *present))
        carry = sum(layer.perturbed[: layer.carry])
        cotangents, params = outs[:carry], [*outs[carry:], *params]
    return [*cotangents, *params]


def _moved(layer: Layer, residuals: Sequence[Any], to: Any, after: Sequence[Any] = ()) -> list[Any]:
    """The residuals, with those for the host copied to the memory `to` once the values in `after` are computed."""
    scopes, moved = iter(layer.copies), []
    for k, x in zip(layer.kept, residuals, strict=True):
        if k.place == "host":
            with next(scopes):
                x = jax.device_put(_after(after, [x])[0], to)
        moved.append(x)
    return moved


def _after(first: Sequence[Any], then: Sequence[Any]) -> list[Any]:
    """`then`, not available before `first` is."""
    return list(lax.optimization_barrier((list(then), list(first)))[0]) if first else list(then)


def _partial_eval(*rest: Any) -> Any:
    return partial_eval_as_remat(rest[-1].params["call_jaxpr"], True, *rest)


chain_p = _jax.define(_jax.Call("jaxoffload_chain", _checked), jvp=_jvp, batch=_batch, partial_eval=_partial_eval)
