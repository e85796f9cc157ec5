"""What autodiff computes and keeps, of ours and of plain references, and counts of equations."""

from collections import Counter

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var

from jaxoffload import accumulate
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._engine.microbatches.interleaved import interleaved_p


def saving(*names):
    """Return JAX's own policy that saves these names."""
    return jax.checkpoint_policies.save_only_these_names(*names)


def offloading(*names, saved=()):
    """Return JAX's own policy that offloads these names, and saves others."""
    where = {"offload_src": "device", "offload_dst": "pinned_host"}
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*saved], names_which_can_be_offloaded=[*names], **where
    )


def in_a_loop(f, *names):
    """The reference for a scan's body: `jax.checkpoint` that saves these names, as JAX recommends inside a scan."""
    return jax.checkpoint(f, policy=saving(*names), prevent_cse=False)


def total(out):
    """Return a scalar that depends on all floating-point leaves of a pytree, each with its own weight."""
    leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum((k + 1) * jnp.sum(x.astype(jnp.float32) ** 2) for k, x in enumerate(leaves))


def gradient(f, argnums=0):
    return jax.grad(lambda *args: total(f(*args)), argnums=argnums)


def one_by_one(loss, argnums=0, has_aux=False, reduction="mean", sum_dtype=None):
    """The reference of `accumulate`: the loop over microbatches that a user would write."""

    def run(*args):
        numbers = (argnums,) if isinstance(argnums, int) else argnums
        batch = {n: x for n, x in enumerate(args) if n not in numbers}

        def add(sums, microbatch):
            given = dict(enumerate(args)) | microbatch
            value, grads = jax.value_and_grad(loss, argnums, has_aux)(*(given[n] for n in range(len(args))))
            value, aux = value if has_aux else (value, None)
            return jax.tree.map(jnp.add, sums, (value, grads)), aux

        params = args[argnums] if isinstance(argnums, int) else tuple(args[n] for n in argnums)
        zeros = jnp.float32(0), jax.tree.map(lambda x: jnp.zeros_like(x, sum_dtype), params)
        sums, aux = lax.scan(add, zeros, batch)
        count = len(jax.tree.leaves(batch)[0])
        value, grads = jax.tree.map(lambda x: x / count, sums) if reduction == "mean" else sums
        return ((value, aux) if has_aux else value), grads

    return run


def accumulated(f, interleaved=True):
    """Return (x, w) -> the gradient with respect to w, summed over four microbatches of x; or in a plain loop."""
    run = accumulate if interleaved else one_by_one
    summed = run(lambda w, x: total(f(x, w)), reduction="sum")
    return lambda x, w: summed(w, jnp.stack([x, -x, x / 2, 2 * x]))[1]


def gradient_jaxpr(f, *args, argnums=0):
    return jax.make_jaxpr(gradient(f, argnums))(*args)


def kept_values(f, *args):
    """Return the abstract values that autodiff keeps, except arguments and constants."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(f, *args)[1]))(*args)
    given = {*jaxpr.invars, *jaxpr.constvars}
    kept = dict.fromkeys(v for v in jaxpr.outvars if isinstance(v, Var))
    return [v.aval for v in kept if v not in given]


def place(aval):
    return "host" if aval.memory_space == jax.memory.Space.Host else "device"


def kept(f, *args):
    """Return what autodiff keeps, except arguments and constants: (place, dtype, shape) -> count."""
    return Counter((place(aval), str(aval.dtype), aval.shape) for aval in kept_values(f, *args))


def kept_bytes(f, *args):
    """Return the (device, host) bytes that autodiff keeps, except arguments and constants."""
    sums = Counter()
    for aval in kept_values(f, *args):
        sums[place(aval)] += aval.size * aval.dtype.itemsize
    return sums["device"], sums["host"]


def inside(eqn):
    """Return the jaxprs in the parameters of an equation."""
    return [x for x in jax.tree.leaves(tuple(eqn.params.values())) if hasattr(x, "eqns")]


def equations(jaxpr):
    """Yield all equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inside(eqn):
            yield from equations(inner)


def count(jaxpr, primitive):
    return sum(eqn.primitive.name == primitive for eqn in equations(jaxpr))


def runs(jaxpr, primitive):
    """Return how often a jaxpr runs a primitive, in its loops too."""
    each = lambda eqn: (eqn.primitive.name == primitive) + sum(runs(x, primitive) for x in inside(eqn))
    return sum(eqn.params.get("length", 1) * each(eqn) for eqn in jaxpr.eqns)


def bytes_staying(f, *args):
    """Return how many bytes per device of residuals marked offload `accumulate` keeps there at once in the first and in
    the last microbatch."""
    on_device = lambda loops: sum(s.layers * sum(s.layer.sizes.device) for each in loops for s in each.segments)
    (eqn,) = (site.eqn for site in walk(jax.make_jaxpr(f)(*args)) if site.eqn.primitive is interleaved_p)
    between, *ends = (on_device(eqn.params[of]) for of in ("loops", "first", "last"))
    more = [here - between for here in ends]
    return sum(more) if eqn.params["microbatches"] == 2 else max(more)
