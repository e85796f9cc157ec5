"""scan(): `jax.lax.scan` whose residuals a `Policy` chooses, layer by layer.

`lax.scan` traces the body, with its checks, promotions and errors. Its equation is then replaced by one of ours
(`_engine/layers/scan_primitive.py`), which does the same until it is differentiated.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from ._engine.decide.mutable_refs import by_jax, takes_refs
from ._engine.layers.scan_primitive import in_our_scan, traced_on_a_stage, with_our_scan
from ._jax import as_array, evaluate, without_remat3
from ._lost_changes import warns_of_lost_changes
from ._policy import Policy, check_arguments
from ._tracing import tracing


@without_remat3
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

    It computes what `lax.scan(jax.checkpoint(f), init, xs, length, reverse, unroll)` does, with the same errors. In
    reverse-mode differentiation the copies of one layer's residuals run beside the computation of the next layer.
    Forward mode and second derivatives are not supported; `jax.linearize` raises where its result is applied. A body
    that reads or writes a `jax.new_ref` from outside runs under JAX's own checkpoint, which asks the policy; `Policy`
    says what that route cannot see.

    Args:
      f: `(carry, x) -> (carry, y)`, all pytrees of arrays; names its residuals with `tag` or `checkpoint_name`.
      init, xs, length, reverse, unroll: as for `lax.scan`; arrays of xs have shape (layers, ...). Layers count in the
        order in which they run.
      policy: decides on the named values of `f`. The carry is never recomputed. xs and closed-over arrays (the weights)
        are never moved or copied. A value that is the same in every layer is kept once, on the device. Of a scan inside
        `f`, `policy` keeps what it names; if it keeps none of that, the scan runs again in the backward pass, under its
        own policy.
      strict: raise, when the scan is differentiated, if a pattern matches no value of `f`. Pass False where several
        scans share one policy, and check them together with `check`.

    Returns:
      The last carry, and the ys, stacked to (layers, ...).

    Raises:
      TypeError: policy is not a Policy, or strict not a bool; and what `lax.scan` raises.

    Raises (when differentiated, before anything is compiled):
      PolicyError: a pattern matches nothing, or two names of one value have different decisions.
      HostPoolFull: this scan needs more than the pinned host pool holds, and the policy says `on_host_full: error`.
        `check` and `residuals` know what a whole step needs.
      NotImplementedError: this derivative is not supported; or offloading here would give wrong gradients.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, scan, tag
      >>> layer = lambda x, w: (jnp.sin(tag(x @ w, "fc1")), None)
      >>> policy = Policy(residuals={"fc1": "offload"}, min_offload_bytes=0)
      >>> loss = lambda ws, x: scan(layer, x, ws, policy=policy)[0].sum()
      >>> jax.jit(jax.grad(loss))(jnp.ones((3, 8, 8)), jnp.ones((4, 8))).shape
      (3, 8, 8)
    """
    check_arguments("scan", policy, strict)
    f = warns_of_lost_changes(f, "scan", init, xs)

    @in_our_scan
    def lax_scan(init: Any, xs: Any) -> tuple[Any, Any]:
        return lax.scan(f, init, xs, length=length, reverse=reverse, unroll=unroll)

    scannable = all(hasattr(x, "shape") for x in jax.tree.leaves(xs)) and all(map(_is_array, jax.tree.leaves(init)))
    if jax.config.jax_disable_jit or not scannable:
        return lax_scan(init, xs)  # a Python loop, which places nothing; or lax.scan's own error
    jaxpr, shape = jax.make_jaxpr(lax_scan, return_shape=True)(init, xs)
    if takes_refs(jaxpr):
        f = by_jax([jaxpr], policy, strict, False)(f)
        return lax_scan(init, xs)
    axis = tracing().stage_axis
    on_stage = traced_on_a_stage(axis, lax_scan, init, xs) if axis else None
    operands = [*jax.tree.leaves(init), *map(as_array, jax.tree.leaves(xs))]
    outs = evaluate(with_our_scan(jaxpr, policy, strict, on_stage), operands)
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def _is_array(x: Any) -> bool:
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True
