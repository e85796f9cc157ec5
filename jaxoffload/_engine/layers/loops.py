"""The two primitives of a differentiated scan: one runs its forward pass and keeps residuals, one its backward pass."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var

from ..._jax import (
    BACKWARD,
    FORWARD,
    INTERLEAVED,
    Call,
    Results,
    Values,
    batch_jaxpr_axes,
    dce_jaxpr,
    define,
    evaluate,
    has_effects,
    in_memory_of,
    on_host,
)
from ..decide.derivative import cached
from ..host.slow_copies import lower_and_note
from ..jaxprs.inline import with_unknown_names
from ..jaxprs.walk import bodies
from .layer import keeps_some
from .passes import Loops, backward_pass, forward_pass, run
from .placement import Layout, split_list
from .rows import filled
from .segments import Segment


class DifferentiatedTwice(NotImplementedError):
    """The derivative of a derivative of a `scan` or `chain` was asked for."""


def _forward(loops: Loops, *operands: Any) -> list[Any]:
    """Constants, carry, xs -> carry, ys, and the leaves of a list of `SegmentResiduals`."""
    ((results, saved),) = run(forward_pass(loops, operands))
    return [*results, *jax.tree.leaves(saved)]


def _backward(loops: Loops, *args: Any) -> list[Any]:
    """Operands that are read, the leaves of a list of `SegmentResiduals`, cotangents of carry and ys -> those of
    constants, carry, xs."""
    reads, saved, cotangents = operands_of_backward(loops, args)
    (cts,) = run(backward_pass(loops, reads, saved, cotangents))
    consts_avals = loops.segments[0].jaxpr.out_avals[: loops.consts]
    return [*map(in_memory_of, consts_avals, cts.consts), *cts.carry, *cts.xs]


def operands_of_backward(loops: Loops, args: Sequence[Any]) -> tuple[list[Any], Any, list[Any]]:
    """Split the operands of backward loops: operands of the scan, what each segment keeps, cotangents."""
    stacked, tree = jax.tree.flatten(loops.stacked)
    reads, leaves, cotangents = split_list(args, [len(loops.reads), len(stacked)])
    return reads, jax.tree.unflatten(tree, leaves), cotangents


def _pass(name: str, run: Callable[..., Any], batch: Any, **rules: Any) -> tuple[Primitive, Callable[..., list[Any]]]:
    """A primitive, which can be batched layer by layer (a stack in host memory cannot be transposed), and the function
    that binds it, which takes what `run` takes."""

    @cached
    def traced(loops: Loops, *avals: Any) -> Jaxpr:
        return jax.make_jaxpr(functools.partial(run, loops))(*avals)

    def bind(loops: Loops, *args: Any) -> list[Any]:
        return primitive.bind(*args, call_jaxpr=traced(loops, *map(jax.typeof, args)), loops=loops)

    def refuse(*_: Any, **__: Any) -> Any:
        raise DifferentiatedTwice(
            "jaxoffload.scan cannot be differentiated twice: its residuals may live in host memory; "
            "use jax.lax.scan where you need second derivatives"
        )

    eager = lambda *args, call_jaxpr, loops: jitted(call_jaxpr)(*args)
    lower = lower_and_note(lambda *, loops, **_: loops.offloads)
    primitive = define(Call(name), eager=eager, batch=batch, jvp=refuse, lower=lower, **rules)
    return primitive, bind


@cached
def jitted(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """The jitted function of a jaxpr, for a primitive outside of a trace."""
    copy = jaxpr.replace()  # the result must not refer to the key
    return jax.jit(lambda *operands: evaluate(copy, operands))


def _batch_forward(axis: Any, args: Values, dims: Values, *, call_jaxpr: Jaxpr, loops: Loops) -> Results:
    """The carry, and so all that is computed, gets a batch axis; constants and xs only if they come with one."""
    first, last = loops.consts, loops.consts + loops.carry
    stacked = [False] * last + [True] * (len(args) - last)
    sizes = [axis.size if first <= i < last else None for i in range(len(args))]
    args = list(map(_axis_to, stacked, args, dims, sizes))
    layer_dims = [None if d is None and size is None else 0 for d, size in zip(dims, sizes, strict=True)]
    batched = _batched(loops, axis, [layer_dims] * len(loops.segments))
    stacks = [False] * loops.carry + [True] * (loops.results - loops.carry) + jax.tree.leaves(loops.stacked)
    return run_forward(batched, *args), list(map(int, stacks))


def _batch_backward(axis: Any, args: Values, dims: Values, *, call_jaxpr: Jaxpr, loops: Loops) -> Results:
    """The cotangents get a batch axis; what was kept only if it comes with one."""
    stacked = [not is_const for _, is_const in loops.reads] + jax.tree.leaves(loops.stacked)
    sizes = [None] * len(stacked) + [axis.size] * (len(args) - len(stacked))
    stacked += [number >= loops.carry for number in range(len(args) - len(stacked))]
    args = list(map(_axis_to, stacked, args, dims, sizes))
    layer_dims = [None if d is None and size is None else 0 for d, size in zip(dims, sizes, strict=True)]
    reads, saved, cotangents = operands_of_backward(loops, layer_dims)
    read = {number: d for (number, _), d in zip(loops.reads, reads, strict=True)}
    kept = (p.layout.merge(read, s.host, s.device, s.once) for p, s in zip(loops.segments, saved, strict=True))
    outs = run_backward(_batched(loops, axis, [[*of_layer, *cotangents] for of_layer in kept]), *args)
    return outs, [0] * (loops.consts + loops.carry) + [1] * (len(outs) - loops.consts - loops.carry)


def _axis_to(at: bool, x: Any, dim: int | None, size: int | None) -> Any:
    """`x` with its batch axis at 1, behind the axis of layers, or at 0. If it has none, one of `size` is made."""
    if dim is None:
        return x if size is None else jnp.moveaxis(lax.broadcast(x, (size,)), 0, int(at))
    return jnp.moveaxis(x, dim, int(at))


def _batched(loops: Loops, axis: Any, in_dims: Sequence[Sequence[int | None]]) -> Loops:
    """Return the loops over batched layers; the batch axis of all results is 0."""

    def batched(segment: Segment, dims: Sequence[int | None]) -> Segment:
        jaxpr, _ = batch_jaxpr_axes(segment.jaxpr, axis, dims, [0] * len(segment.jaxpr.outvars))
        return segment._replace(jaxpr=jaxpr)

    return dataclasses.replace(loops, segments=tuple(map(batched, loops.segments, in_dims)))


def _without_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], JaxprEqn | None]:
    """Drop residuals that nothing reads, as in the first forward pass inside an outer `jax.checkpoint`; and where that
    runs again for its residuals, operands that they do not need: the checkpoint would keep them.

    All results of the scan stay: their number says what they are.
    """
    eqn: JaxprEqn = rest[-1]  # jax 0.12 passes before it which inputs are live
    loops, inputs = eqn.params["loops"], [True] * len(eqn.invars)
    if not any(used) and not eqn.effects:
        return [not i for i in inputs], None
    if any(used[loops.results :]):
        needed = _needed(loops, eqn, used)
        return needed, eqn if all(needed) else _with_operands(eqn, needed, used)
    if len(used) == loops.results:
        return inputs, eqn
    jaxpr = loops.segments[0].jaxpr
    jaxpr = jaxpr.replace(outvars=jaxpr.outvars[: loops.results], debug_info=with_unknown_names(jaxpr))
    layer = dataclasses.replace(loops.segments[0].layer, layout=Layout(()))
    loops = dataclasses.replace(loops, segments=(Segment(0, loops.length, 0, jaxpr, layer),))
    traced = jax.make_jaxpr(functools.partial(_forward, loops))(*(v.aval for v in eqn.invars))
    return inputs, eqn.replace(outvars=eqn.outvars[: loops.results], params={"call_jaxpr": traced, "loops": loops})


def _needed(loops: Loops, eqn: JaxprEqn, used: Sequence[bool]) -> list[bool]:
    """Return which operands of a forward pass its used results, and its residuals, need in some layer."""
    carry, ys, _ = split_list(used, [loops.carry, loops.results - loops.carry])
    while True:
        live = lambda layer: [*carry, *ys, *[True] * (len(layer.outvars) - loops.results)]
        read = (dce_jaxpr(segment.jaxpr, live(segment.jaxpr))[1] for segment in loops.segments)
        needed = list(map(any, zip(*read, strict=True)))
        grown = [a or b for a, b in zip(carry, needed[loops.consts :], strict=False)]
        if grown == carry:
            avals: list[Any] = [v.aval for v in eqn.invars]
            no_zeros = [on_host(a) or jnp.issubdtype(a.dtype, jax.dtypes.extended) for a in avals]
            return list(map(operator.or_, needed, no_zeros))
        carry = grown


def _with_operands(eqn: JaxprEqn, needed: Sequence[bool], used: Sequence[bool]) -> JaxprEqn:
    """A forward pass of these operands, with zeros for the others, as the one equation of its used results."""
    select = lambda xs, flags: [x for x, flag in zip(xs, flags, strict=True) if flag]

    def forward(*operands: Any) -> list[Any]:
        given = iter(operands)
        whole = [next(given) if n else filled(v.aval, 0) for v, n in zip(eqn.invars, needed, strict=True)]
        return select(eqn.primitive.bind(*whole, **eqn.params), used)

    invars = select(eqn.invars, needed)
    (call,) = jax.make_jaxpr(jax.jit(forward))(*(v.aval for v in invars)).eqns
    return call.replace(invars=invars, outvars=select(eqn.outvars, used), source_info=eqn.source_info, ctx=eqn.ctx)


def _in_a_checkpoint(saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: JaxprEqn) -> Any:
    """Keep what the loop keeps if `saveable`, the policy of a checkpoint around it, keeps some of it; else run the loop
    again in the backward pass. JAX keeps the results of what has effects.

    The layers of another scan would copy its stacks from the host to the host: `scan` has no such loop there.
    """
    results = len(eqn.outvars)
    layers = [segment.layer for segment in eqn.params["loops"].segments]
    if not any(unknown) and (has_effects(eqn) or any(keeps_some(saveable, layer) for layer in layers)):
        return eqn, None, [False] * results, [False] * results, []
    residuals = [v for v, there in zip(eqn.invars, instantiated, strict=True) if isinstance(v, Var) and not there]
    return None if any(unknown) else eqn, eqn, [any(unknown)] * results, [True] * results, residuals


forward_p, run_forward = _pass(FORWARD, _forward, _batch_forward, dce=_without_unused, partial_eval=_in_a_checkpoint)
backward_p, run_backward = _pass(BACKWARD, _backward, _batch_backward)


def is_ours(eqn: JaxprEqn) -> bool:
    """Return if an equation runs layers: those of a pass of a scan, or of microbatches."""
    return eqn.primitive.name in (FORWARD, BACKWARD, INTERLEAVED)


def loops_of(eqn: JaxprEqn) -> list[Loops]:
    """Return the loops of such an equation; none of any other."""
    loops = eqn.params["loops"] if is_ours(eqn) else ()
    return [loops] if isinstance(loops, Loops) else list(loops)


def bodies_of_gradient(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the nested jaxprs of an equation of a gradient; those of our loops too, which autodiff has made."""
    return [eqn.params["call_jaxpr"]] if is_ours(eqn) else bodies(eqn)
