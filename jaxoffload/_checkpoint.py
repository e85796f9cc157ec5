"""checkpoint(): `jax.checkpoint` whose residuals a `Policy` chooses.

A primitive holds the function's jaxpr until it is differentiated. Then its JVP rule, like that of `jax.checkpoint`,
differentiates the jaxpr; but before it hands the result to `jax.checkpoint` it makes a plan on it. By then custom rules
are expanded and it is known which inputs are perturbed, so what the plan sees is what the backward pass can use.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ._engine.checkpointed import bind
from ._engine.refs import by_jax, takes_refs
from ._engine.refusals import refuse_remat3
from ._policy import Policy, check_arguments


def checkpoint(
    f: Callable[..., Any],
    *,
    policy: Policy,
    strict: bool = True,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable[..., Any]:
    """`jax.checkpoint` under a `Policy`: `f` with each named residual saved, offloaded or recomputed.

    The result computes what `f` computes; differentiated in reverse, it keeps what the policy says. A function has no
    layers, so `resident_layers`, `offload_layers` and `other_layers` do not apply. What was saved can be differentiated
    again; what was offloaded only in forward mode, for JAX has no reverse derivative of moving it. A function that
    reads or writes a `jax.new_ref` from outside runs under JAX's own checkpoint, which asks the policy. A
    `checkify.check` in `f` is made unless `f` is differentiated, as in `jax.checkpoint`.

    Args:
      f: any function that `jax.checkpoint` takes, with pytrees, keyword and static arguments.
      policy: decides on the values that `f` names with `tag` or `checkpoint_name`.
      strict: a pattern that matches no value of `f` is an error, raised when `f` is differentiated. Pass False where
        several functions share one policy, and judge them together with `check`.
      prevent_cse, static_argnums: as for `jax.checkpoint`, but `prevent_cse` is one for all arguments.

    Raises:
      TypeError: f is no function, policy no Policy, strict or prevent_cse no bool.
      ValueError (when called): static_argnums are not arguments.

    Raises (when differentiated, before anything is compiled):
      PolicyError: a pattern matches nothing, or two names of one value have different decisions.
      MemoryError: what this call offloads does not fit in the pinned host pool. It knows itself alone: what a program
        offloads in all, `check` and `residuals` judge.
      NotImplementedError: offloading here would fail or give wrong gradients; it says what to change.
    """
    check_arguments("checkpoint", policy, strict)
    if not callable(f):
        raise TypeError(f"checkpoint: f must be a function, got {f!r}")
    if not isinstance(prevent_cse, bool):
        raise TypeError(f"checkpoint: prevent_cse must be True or False, for all arguments, got {prevent_cse!r}")

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        refuse_remat3()
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
    """`f` with its static arguments filled in, and the other arguments."""
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if bad := [i for i in static if not -len(args) <= i < len(args)]:
        raise ValueError(f"checkpoint: static_argnums {bad} must be in [-{len(args)}, {len(args)}), one per argument")
    static = tuple(i % len(args) for i in static)
    if not static:
        return f, args
    dynamic = [i for i in range(len(args)) if i not in static]

    def with_static(*given: Any, **kwargs: Any) -> Any:
        whole = list(args)
        for i, arg in zip(dynamic, given, strict=True):
            whole[i] = arg
        return f(*whole, **kwargs)

    return with_static, tuple(args[i] for i in dynamic)
