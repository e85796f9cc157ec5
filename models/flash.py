"""cuDNN's causal flash attention where there is no cuDNN: its kernels' names, operands and residuals, computed by XLA.

So a program can be traced on any machine as a GPU will run it: with the softmax statistics among the residuals, and as
two kernels whose FLOPs the predictions know. On CPUs it runs too, as slowly as attention that materialises its scores.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir


def _scores(q_BxSxNxH: jax.Array, k_BxSxKxH: jax.Array) -> jax.Array:
    """Return the scaled float32 scores, (batch, heads, queries, keys), -inf for keys behind the query."""
    S, N, H = q_BxSxNxH.shape[1:]
    k_BxSxNxH = jnp.repeat(k_BxSxKxH, N // k_BxSxKxH.shape[2], axis=2)
    scores = jnp.einsum("BQNH,BKNH->BNQK", q_BxSxNxH, k_BxSxNxH, preferred_element_type=jnp.float32)
    return jnp.where(jnp.tri(S, dtype=bool)[None, None], scores * H**-0.5, -jnp.inf)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """Return the context, and the statistics: the logarithm of the sum of exponentials, (batch, heads, queries)."""
    scores = _scores(q, k)
    statistics = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - statistics[..., None]).astype(q.dtype)
    return [jnp.einsum("BNQK,BKNH->BQNH", weights, jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)), statistics]


def _backward(
    q: jax.Array, k: jax.Array, v: jax.Array, statistics: jax.Array, context: jax.Array, cotangent: jax.Array
) -> list[jax.Array]:
    """Return the cotangents of q, k and v (Dao et al., 2022)."""
    groups = q.shape[2] // k.shape[2]
    shared = lambda x: jnp.sum(x.reshape(*k.shape[:3], groups, k.shape[3]), axis=3)
    weights = jnp.exp(_scores(q, k) - statistics[..., None])
    wide = cotangent.astype(jnp.float32)
    of_weights = jnp.einsum("BQNH,BKNH->BNQK", wide, jnp.repeat(v, groups, axis=2).astype(jnp.float32))
    rows = jnp.einsum("BQNH,BQNH->BNQ", wide, context.astype(jnp.float32))
    of_scores = weights * (of_weights - rows[..., None]) * q.shape[-1] ** -0.5
    of_q = jnp.einsum("BNQK,BKNH->BQNH", of_scores, jnp.repeat(k, groups, axis=2).astype(jnp.float32))
    of_k = shared(jnp.einsum("BNQK,BQNH->BKNH", of_scores, q.astype(jnp.float32)))
    of_v = shared(jnp.einsum("BNQK,BQNH->BKNH", weights, wide))
    return [of_q.astype(q.dtype), of_k.astype(k.dtype), of_v.astype(v.dtype)]


def _kernel(name: str, compute: Callable[..., list[jax.Array]]) -> Callable[..., Sequence[jax.Array]]:
    """Return a primitive of this name, as a function."""
    kernel = Primitive(name)
    kernel.multiple_results = True

    def results(*avals: Any, **_: Any) -> list[ShapedArray]:
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return [ShapedArray(out.shape, out.dtype) for out in jax.eval_shape(compute, *shapes)]

    def run(*args: Any, **_: Any) -> list[jax.Array]:
        return compute(*args)

    kernel.def_abstract_eval(results)
    kernel.def_impl(jax.jit(run, static_argnames="use_causal_mask"))
    # Not for GPUs: what is compiled there for cuDNN must be cuDNN's.
    mlir.register_lowering(kernel, mlir.lower_fun(run, multiple_results=True), platform="cpu")
    return lambda *args: kernel.bind(*args, use_causal_mask=True)


# JAX's names.
_forward_kernel = _kernel("dot_product_attention_fwd_wrapper", _forward)
_backward_kernel = _kernel("dot_product_attention_bwd_wrapper", _backward)


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return the context of causal attention, (batch, sequence, heads, head_dim); k and v may have fewer heads."""
    return _forward_kernel(q, k, v)[0]


def _attention_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    context, statistics = _forward_kernel(q, k, v)
    return context, (q, k, v, statistics, context)


def _attention_backward(kept: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_backward_kernel(*kept, cotangent))


attention.defvjp(_attention_forward, _attention_backward)
