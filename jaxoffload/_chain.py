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
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, jaxpr_as_fun

from . import _jax
from ._engine.decide.checkpoint_primitive import bind, checked, partial_eval_as_remat
from ._engine.decide.derivative import derivative
from ._engine.decide.mutable_refs import by_jax, takes_refs
from ._engine.decide.plan import Override
from ._engine.host.limit import admitted
from ._engine.layers.layer import Body, Layer, linearize, prevent_cse_barrier
from ._engine.layers.placement import split_list
from ._engine.layers.transport import to_device, to_host
from ._engine.layers.transpose_only import with_tangents
from ._jax import Results, Values
from ._lost_changes import warns_of_lost_changes
from ._policy import Policy, PolicyError, check_arguments, check_switches
from ._tracing import tracing


@_jax.without_remat3
def chain(
    fs: Sequence[Callable[[Any, Any], Any]],
    init: Any,
    params: Sequence[Any],
    *,
    policy: Policy,
    strict: bool = True,
    has_aux: bool = False,
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
      has_aux: each layer returns a pair: the carry, and other results, as a layer of `scan` returns its y.

    Returns:
      The last carry; with `has_aux` also a list of the other results of each layer.

    Raises:
      TypeError: a layer returns a carry of another structure, or no pair though `has_aux`; there are more or fewer
        params than layers; fs is not a list or tuple, policy not a Policy, or strict or has_aux not a bool.
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
    check_switches("chain", has_aux=has_aux)
    if not fs or jax.config.jax_disable_jit or tracing().in_scan:
        carry, aux = _each(jax.checkpoint, fs, init, params, has_aux)
    else:
        carry, aux = _run(fs, init, params, policy, strict, has_aux)
    return (carry, aux) if has_aux else carry


def _each(
    checkpoint: Callable[..., Any], fs: Sequence[Callable[..., Any]], carry: Any, params: Sequence[Any], has_aux: bool
) -> tuple[Any, list[Any]]:
    """Run one layer after another in plain JAX, each under a checkpoint."""
    others = []
    for number, (f, p) in enumerate(zip(fs, params, strict=True)):
        carry, other = _pair(checkpoint(f)(carry, p), number, has_aux)
        others.append(other)
    return carry, others


def _pair(out: Any, number: int, has_aux: bool) -> tuple[Any, Any]:
    """Return the carry and the other results of a layer."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        got: Any = jax.tree.structure(out)
        raise TypeError(f"chain: has_aux: layer {number} must return (carry, other results), but it returns {got}")
    return out if has_aux else (out, None)


def _run(
    fs: Sequence[Callable[..., Any]], init: Any, params: Sequence[Any], policy: Policy, strict: bool, has_aux: bool
) -> tuple[Any, list[Any]]:
    first, (carry, tree) = init, jax.tree.flatten(init)
    # One function stays one, because JAX traces it once.
    traced = {id(f): warns_of_lost_changes(f, "chain", *params) for f in fs}
    jaxprs, counts, others = [], [], []
    operands: list[Any] = []
    for number, (f, p) in enumerate(zip(fs, params, strict=True)):
        jaxpr, out = jax.make_jaxpr(traced[id(f)], return_shape=True)(init, p)
        init, other = _pair(out, number, has_aux)
        got: Any = jax.tree.structure(init)
        if got != tree:
            raise TypeError(f"chain: layer {number} returns {got} for a carry of {tree}")
        jaxprs.append(_consts_last(jaxpr))
        operands = [*jax.tree.leaves(p), *jaxpr.consts, *operands]
        counts.append(len(jaxprs[-1].invars) - len(carry))
        others.append(other)
    if any(map(takes_refs, jaxprs)):
        return _each(by_jax(jaxprs, policy, strict, True), fs, first, params, has_aux)
    outs = _bind(_Layers(tuple(jaxprs), tuple(counts), len(carry)), [*carry, *operands], policy, strict)
    return jax.tree.unflatten(jax.tree.structure((init, others)), outs)


def _consts_last(jaxpr: Jaxpr) -> Jaxpr:
    """Return `jaxpr` as a function of the carry, the layer's parameters, and the values that it closes over."""
    count = len(jaxpr.consts)
    whole = _jax.convert_constvars_jaxpr(jaxpr) if count else jaxpr
    invars = [*whole.invars[count:], *whole.invars[:count]]
    return whole.replace(invars=invars, debug_info=whole.debug_info.with_unknown_names())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Layers:
    """The layers one by one: the jaxpr of each, and how many operands belong to it alone (`counts`).

    Operands are the carry, and then those of the last layer first: JAX adds the cotangents of a value that several
    layers take in the order of the operands, and plain JAX adds those of the last layer first.

    A layer's first results, as many as `carry` says, are the carry. The results of all are the last carry, and then
    the other results of each layer.

    Code that walks through an equation's jaxprs does not see them; it sees them together, in `call_jaxpr`.
    """

    jaxprs: tuple[Jaxpr, ...]
    counts: tuple[int, ...]
    carry: int

    def __repr__(self) -> str:
        """Return a short text, since it is printed in jaxprs."""
        return f"{len(self.counts)} layers"

    @property
    def bodies(self) -> list[Body]:
        return [Body(jaxpr, 0, self.carry) for jaxpr in self.jaxprs]

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        """Return the first carry, and the operands of each layer."""
        at = len(operands) - sum(self.counts)
        carry, each = list(operands[:at]), []
        for count in reversed(self.counts):
            each.append(list(operands[at : at + count]))
            at += count
        return carry, each[::-1]

    def run(self, each_layer: Iterable[Callable[..., list[Any]]], operands: Sequence[Any]) -> list[Any]:
        """Run the layers by these functions, and return all results."""
        carry, each = self.split(operands)
        aux: list[Any] = []
        for run, params in zip(each_layer, each, strict=True):
            outs = run(*carry, *params)
            carry, aux = outs[: self.carry], [*aux, *outs[self.carry :]]
        return [*carry, *aux]

    def __call__(self, *operands: Any) -> list[Any]:
        return self.run(map(jaxpr_as_fun, self.jaxprs), operands)


def _bind(layers: _Layers, operands: Sequence[Any], policy: Policy, strict: bool) -> list[Any]:
    whole = jax.make_jaxpr(layers)(*operands)
    return chain_p.bind(*operands, call_jaxpr=whole, layers=layers, policy=policy, strict=strict)


def _checked(run: Callable[..., list[Any]], *operands: Any, layers: _Layers, **params: Any) -> list[Any]:
    """Bind a chain that `checkify` checks: the error goes from layer to layer, and the whole is one `checkpoint`."""
    roles = ("argument",) * layers.carry + ("weight",) * sum(layers.counts)
    return checked(run, *operands, roles=roles, prevent_cse=True, **params)


def _batch(axis: Any, args: Values, dims: Values, *, call_jaxpr: Jaxpr, layers: _Layers, **params: Any) -> Results:
    batched = []

    def of_layer(jaxpr: Jaxpr, *dims: Any) -> list[Any]:
        layer, mapped = _jax.batch_jaxpr_axes(jaxpr, axis, dims, [_jax.zero_if_mapped] * len(jaxpr.outvars))
        batched.append(layer)
        return [0 if m else None for m in mapped]

    out_dims = layers.run([functools.partial(of_layer, jaxpr) for jaxpr in layers.jaxprs], dims)
    return _bind(_Layers(tuple(batched), layers.counts, layers.carry), args, **params), out_dims


def _jvp(
    primals: Values, tangents: Values, *, call_jaxpr: Jaxpr, layers: _Layers, policy: Policy, strict: bool
) -> Results:
    if tracing().reference:
        return _reference_jvp(primals, tangents, layers, policy)
    perturbed = _jax.perturbed(tangents)
    linearized = _linearized(layers.bodies, *layers.split(perturbed), policy)
    if strict and (problems := policy.unmatched(set().union(*(layer.plan.seen for layer in linearized)))):
        raise PolicyError(problems)
    outs, kept = _forward(linearized, *layers.split(primals))
    flat, tree = jax.tree.flatten(kept)
    return with_tangents(
        outs,
        _out_perturbed(linearized),
        [_jax.instantiate_zeros(t) for t, p in zip(tangents, perturbed, strict=True) if p],
        caller="chain",
        kept=flat,
        transpose=lambda kept, cotangents: _transpose(linearized, jax.tree.unflatten(tree, kept), cotangents),
        layers=linearized,
    )


def _reference_jvp(primals: Values, tangents: Values, layers: _Layers, policy: Policy) -> Results:
    """Compute the JVP of the layers, each under `checkpoint`."""

    def of_layer(body: Body, *operands: Any) -> list[Any]:
        return bind(body.jaxpr, operands, roles=body.roles, policy=policy, strict=False, prevent_cse=True)

    def checkpoints(*operands: Any) -> list[Any]:
        return layers.run([functools.partial(of_layer, body) for body in layers.bodies], operands)

    perturbed = _jax.perturbed(tangents)
    jvp, out_perturbed = derivative(jax.make_jaxpr(checkpoints)(*primals), perturbed, False, False)
    outs = jaxpr_as_fun(jvp)(*primals, *(t for t, p in zip(tangents, perturbed, strict=True) if p))
    return _jax.with_zeros(outs, out_perturbed)


def _linearized(bodies: Sequence[Body], carry: list[bool], each: list[list[bool]], policy: Policy) -> list[Layer]:
    """Linearize each layer with respect to those of its operands, the carry among them, that are perturbed."""

    def derived(offloaded: int) -> list[Layer]:
        perturbed, layers = carry, []
        for number, (body, params) in enumerate(zip(bodies, each, strict=True)):
            override = _override(number, len(bodies), offloaded, policy)
            layers.append(linearize(body, (*perturbed, *params), policy, False, override))
            perturbed = list(layers[-1].out_perturbed[: layers[-1].carry])
        return layers

    offloaded = policy.offloaded_layers(len(bodies))
    layers = derived(offloaded)
    sizes = [sum(layer.sizes.host) for layer in layers[:offloaded]]
    if not any(sizes):
        return layers
    need = lambda count: sum(sizes[:count])
    fit = admitted("chain", [body.jaxpr for body in bodies], offloaded, need, policy.on_host_full)
    return layers if fit == offloaded else derived(fit)


def _out_perturbed(layers: Sequence[Layer]) -> tuple[bool, ...]:
    """Return which results have tangents: the last carry, and then the other results of each layer."""
    aux = (p for layer in layers for p in layer.out_perturbed[layer.carry :])
    return (*layers[-1].out_perturbed[: layers[-1].carry], *aux)


def _override(number: int, layers: int, offloaded: int, policy: Policy) -> Override:
    if number < offloaded:
        return Override()
    if number >= layers - policy.resident_layers:
        return Override("save", "resident")
    return Override(policy.other_layers, "other_layers")


def _forward(
    layers: Sequence[Layer], carry: list[Any], each: Sequence[Sequence[Any]]
) -> tuple[list[Any], list[list[Any]]]:
    """Run the layers; return the last carry with the other results, and each layer's residuals where they are kept."""
    kept: list[list[Any]] = []
    aux: list[Any] = []
    copies: list[Any] = []  # of the previous layer
    for layer, params in zip(layers, each, strict=True):
        operands = [*carry, *params]
        outs = jaxpr_as_fun(layer.forward)(*operands)
        carry, other, _ = split_list(outs, [layer.carry, len(layer.out_perturbed) - layer.carry])
        carry = _after(copies, carry)
        aux += other
        residuals = layer.layout.merge(dict(enumerate(operands)), *layer.layout.split(outs))
        kept.append(_moved(layer, residuals, to_host, carry))
        copies = layer.layout.select(kept[-1], "host")
    return [*carry, *aux], kept


def _transpose(layers: Sequence[Layer], kept: Sequence[Values], cotangents: Values) -> list[Any]:
    """Transpose the layers: from cotangents of the perturbed results to those of the perturbed operands, in order."""
    params: list[Any] = []
    fetched = _moved(layers[-1], kept[-1], to_device)
    last = sum(layers[-1].out_perturbed[: layers[-1].carry])
    carry, others = list(cotangents[:last]), list(cotangents[last:])
    for number in reversed(range(len(layers))):
        layer, residuals = layers[number], fetched
        before = len(others) - sum(layer.out_perturbed[layer.carry :])
        cotangents, others = [*carry, *others[before:]], others[:before]
        wanted = _jax.perturbed(cotangents)
        present = [ct for ct, w in zip(cotangents, wanted, strict=True) if w]
        residuals, present = prevent_cse_barrier(residuals, present)
        if number:
            fetched = _moved(layers[number - 1], kept[number - 1], to_device, present)
        outs = lax.optimization_barrier(jaxpr_as_fun(layer.backward(wanted))(*residuals, *present))
        count = sum(layer.perturbed[: layer.carry])
        carry, params = outs[:count], [*params, *outs[count:]]
    return [*carry, *params]


def _moved(layer: Layer, residuals: Sequence[Any], copy: Callable[[Any], Any], after: Sequence[Any] = ()) -> list[Any]:
    """Return the residuals, those for the host copied once the values in `after` are computed."""
    scopes, moved = iter(layer.copies), []
    for k, x in zip(layer.layout.kept, residuals, strict=True):
        if k.place == "host":
            with next(scopes):
                x = copy(_after(after, [x])[0])
        moved.append(x)
    return moved


def _after(first: Sequence[Any], then: Sequence[Any]) -> list[Any]:
    """Return `then`, which is not available before `first` is."""
    return list(lax.optimization_barrier((list(then), list(first)))[0]) if first else list(then)


def _partial_eval(*rest: Any) -> Any:
    return partial_eval_as_remat(rest[-1].params["call_jaxpr"], True, *rest)


chain_p = _jax.define(_jax.Call("jaxoffload_chain", _checked), jvp=_jvp, batch=_batch, partial_eval=_partial_eval)
