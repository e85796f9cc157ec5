"""A Pallas kernel with two results, of which callers see one, and a count of the kernels that run."""

import jax
import jax.numpy as jnp
from autodiff import inside
from jax.experimental import pallas


@jax.custom_vjp
def softmax(x):
    return softmax_kernel(x)[0]


def softmax_kernel(x):
    def kernel(x, out, total):
        exp = jnp.exp(x[...])
        total[...] = jnp.sum(exp, axis=1, keepdims=True)
        out[...] = exp / total[...]

    results = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in (x.shape, (len(x), 1))]
    return pallas.pallas_call(kernel, out_shape=results, interpret=True)(x)


def softmax_forward(x):
    out, total = softmax_kernel(x)
    return out, (x, out, total)


def softmax_backward(residuals, dy):
    x, out, total = residuals
    return (dy * out - jnp.exp(x) / total * jnp.sum(dy * out, axis=1, keepdims=True),)


softmax.defvjp(softmax_forward, softmax_backward)


def kernels(jaxpr):
    """Return how many kernels run: those with a result that is read. jax 0.11 leaves the others to XLA."""
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | set(map(id, jaxpr.outvars))
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            total += any(id(v) in read for v in eqn.outvars)
            continue
        total += sum(kernels(getattr(x, "jaxpr", x)) for x in inside(eqn))
    return total
