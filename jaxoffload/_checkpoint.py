"""checkpoint(): `jax.checkpoint` whose residuals a `Policy` chooses.

A primitive holds the function's jaxpr until it is differentiated. Its JVP rule then differentiates the jaxpr, as that
of `jax.checkpoint` does, but makes a plan for the result before it hands it to `jax.checkpoint`. By then custom rules
are expanded and the perturbed inputs are known, so the plan sees what the backward pass can use.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ._engine.decide.checkpoint_primitive import bind
from ._engine.decide.mutable_refs import by_jax, takes_refs
from ._jax import without_remat3
from ._policy import Policy, check_arguments, check_functions


def checkpoint(
    f: Callable[..., Any],
    *,
    policy: Policy,
    strict: bool = True,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable[..., Any]:
    """`jax.checkpoint` under a `Policy`: `f` with each named residual saved, offloaded or recomputed.

    The result computes what `f` computes, and keeps what the policy says when it is differentiated in reverse. A
    function has no layers, so `resident_layers`, `offload_layers` and `other_layers` do not apply. It can be
    differentiated again, in both modes. A `scan` in `f` keeps what its own policy says if `policy` keeps some of what
    it names; otherwise it runs again in the backward pass. A function that reads or writes a `jax.new_ref` from outside
    runs under JAX's own checkpoint, which asks the policy. As in `jax.checkpoint`, a `checkify.check` in `f` does not
    run where `f` is differentiated.

    Args:
      f: any function that `jax.checkpoint` takes, with pytrees, keyword and static arguments.
      policy: decides on the values that `f` names with `tag` or `checkpoint_name`.
      strict: raise, when `f` is differentiated, if a pattern matches no value of `f`. Pass False where several
        functions share one policy, and check them together with `check`.
      prevent_cse, static_argnums: as for `jax.checkpoint`, but `prevent_cse` is one bool for all arguments.

    Returns:
      A function with the arguments and results of `f`.

    Raises:
      TypeError: f is not a function, policy not a Policy, strict or prevent_cse not a bool.
      ValueError (when called): static_argnums are not arguments.
      PolicyError, HostPoolFull, NotImplementedError (when differentiated): as in `scan`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, checkpoint, tag
      >>> mlp = lambda x, w: jnp.sin(tag(x @ w, "fc1")).sum()
      >>> f = checkpoint(mlp, policy=Policy(residuals={"fc1": "save"}))
      >>> jax.grad(f)(jnp.ones((4, 8)), jnp.ones((8, 16))).shape
      (4, 8)
    """
    check_arguments("checkpoint", policy, strict)
    check_functions("checkpoint", f=f)
    if not isinstance(prevent_cse, bool):
        raise TypeError(f"checkpoint: prevent_cse must be True or False, for all arguments, got {prevent_cse!r}")

    @functools.wraps(f)
    @without_remat3
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        fun, args = _bind_static(f, static_argnums, args)
        jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
        if takes_refs(jaxpr):
            return by_jax([jaxpr], policy, strict, prevent_cse)(fun)(*args, **kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        roles = ("weight",) * len(jaxpr.consts) + ("argument",) * len(leaves)
        out = bind(jaxpr, leaves, roles=roles, policy=policy, strict=strict, prevent_cse=prevent_cse)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return wrapped


def _bind_static(
    f: Callable[..., Any], static_argnums: int | tuple[int, ...], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return `f` with its static arguments filled in, and the other arguments."""
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if bad := [i for i in static if not -len(args) <= i < len(args)]:
        raise ValueError(f"checkpoint: static_argnums {bad} must be in [-{len(args)}, {len(args)}), one per argument")
    if not static:
        return f, args
    is_static = [i in static or i - len(args) in static for i in range(len(args))]

    def with_static(*given: Any, **kwargs: Any) -> Any:
        dynamic = iter(given)
        return f(*(arg if s else next(dynamic) for arg, s in zip(args, is_static, strict=True)), **kwargs)

    return with_static, tuple(arg for arg, s in zip(args, is_static, strict=True) if not s)
