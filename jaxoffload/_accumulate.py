"""accumulate(): gradients over microbatches, with one's forward pass beside another's backward pass."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ._engine.copying_loops import filled
from ._engine.interleaved import program, run
from ._engine.pieces import divide
from ._reference import is_reference
from ._scan import backward_loops, forward_loops, scan_p


def accumulate(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduction: Literal["mean", "sum"] = "mean",
) -> Callable[..., Any]:
    """`jax.value_and_grad` over microbatches, with the forward pass of one beside the backward pass of another.

    Args:
      loss: as for `jax.value_and_grad`: arguments -> a scalar, or a pair of it and other results.
      argnums: which positional arguments to differentiate. All others have a leading axis of microbatches.
      has_aux: whether `loss` returns a pair.
      reduction: of the losses and gradients.

    Returns:
      A function of the arguments of `loss` that returns what `jax.value_and_grad(loss, argnums, has_aux)` does; other
      results have a leading axis of microbatches.
    """

    def value_and_grads(*args: Any) -> Any:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        params = [args[i] for i in numbers]
        batch = [x for i, x in enumerate(args) if i not in numbers]
        flat, tree = jax.tree.flatten(batch)
        microbatches = flat[0].shape[0]

        def one(params: Any, flat: Any) -> Any:
            rest = iter(jax.tree.unflatten(tree, flat))
            given = dict(zip(numbers, params, strict=True))
            return loss(*(given[i] if i in given else next(rest) for i in range(len(args))))

        derived = jax.value_and_grad(one, has_aux=has_aux)
        found = (
            None
            if is_reference() or jax.config.jax_disable_jit or microbatches == 1
            else _beside(one, has_aux, params, flat, microbatches)
        )
        value, grads = found or _plain(derived, has_aux, params, flat)
        total, aux = value if has_aux else (value, None)
        if reduction == "mean":
            total, grads = jax.tree.map(lambda x: x / microbatches, (total, grads))
        grads = grads[0] if isinstance(argnums, int) else tuple(grads)
        return ((total, aux) if has_aux else total), grads

    return value_and_grads


def _take(flat: Sequence[Any], m: Any) -> list[Any]:
    return [lax.dynamic_index_in_dim(x, m, keepdims=False) for x in flat]


def _plain(derived: Callable[..., Any], has_aux: bool, params: Any, flat: list[Any]) -> Any:
    """One microbatch after the other."""

    def add(sums: Any, flat: Any) -> Any:
        value, grads = derived(params, flat)
        value, aux = value if has_aux else (value, None)
        return jax.tree.map(jnp.add, sums, (value, grads)), aux

    like = jax.make_jaxpr(
        lambda: add((jnp.float32(0), params), _take(flat, 0)) if False else derived(params, _take(flat, 0)),
        return_shape=True,
    )()[1]
    value = like[0][0] if has_aux else like[0]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (value, like[1]))
    sums, aux = lax.scan(add, zeros, flat)
    return ((sums[0], aux) if has_aux else sums[0]), sums[1]


def _beside(one: Callable[..., Any], has_aux: bool, params: Any, flat: list[Any], microbatches: int) -> Any:
    leaves, params_tree = jax.tree.flatten(params)

    def flat_loss(*operands: Any) -> Any:
        out = one(jax.tree.unflatten(params_tree, operands[: len(leaves)]), list(operands[len(leaves) :]))
        return out

    micro = jax.make_jaxpr(lambda: _take(flat, 0))().out_avals
    jaxpr, shape = jax.make_jaxpr(flat_loss, return_shape=True)(*leaves, *micro)
    perturbed, varies = (
        [i < len(leaves) for i in range(len(jaxpr.invars))],
        [i >= len(leaves) for i in range(len(jaxpr.invars))],
    )
    loops_of = lambda eqn, perturbed: forward_loops(perturbed=perturbed, **eqn.params)
    pieces = divide(jaxpr, perturbed, varies, scan_p, loops_of)
    if not any(segment.on_host for scan in pieces.scans for segment in scan.loops.segments):
        return None
    consts = len(pieces.consts)
    of_params = pieces.invars[consts : consts + len(leaves)]
    of_batch = pieces.invars[consts + len(leaves) :]
    values = dict(zip(pieces.invars, [*pieces.consts, *leaves]))
    made = lambda: program(pieces, backward_loops, of_params, values)
    zeros = [filled(jax.typeof(x).to_ct_aval(), 0) for x in leaves]
    results, grads = run(made, microbatches, lambda m: dict(zip(of_batch, _take(flat, m), strict=True)), zeros)
    structure = jax.tree.structure(shape)
    results = jax.tree.unflatten(structure, results)
    value, aux = results if has_aux else (results, None)
    total, _ = lax.scan(lambda total, x: (total + x, None), jnp.zeros((), value.dtype), value)
    return ((total, aux) if has_aux else total), jax.tree.unflatten(params_tree, grads)
