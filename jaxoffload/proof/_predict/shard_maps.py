"""The `shard_map`s around an equation: the sizes of their axes, and traces of what stands in them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from ..._engine.jaxprs.walk import Site
from ..._jax import SHARD_MAP


def shard_maps_around(site: Site) -> tuple[JaxprEqn, ...]:
    """Return the `shard_map`s around an equation, outermost first."""
    return tuple(eqn for eqn in site.enclosing if eqn.primitive.name == SHARD_MAP)


def axes_of(shard_maps: Sequence[JaxprEqn]) -> dict[str, int]:
    """Return the sizes of the mesh axes of these, one in the other."""
    return {axis: size for eqn in shard_maps for axis, size in eqn.params["mesh"].shape.items()}


def within[T](shard_maps: Sequence[JaxprEqn], f: Callable[[], T]) -> T:
    """Return what `f` returns, which traces what stands in these, and so may be about their axes."""
    if not shard_maps:
        return f()
    found: list[T] = []
    run: Callable[[], Any] = lambda: found.append(f())
    for eqn in reversed(shard_maps):
        how = {"axis_names": set(eqn.params["newly_manual_axes"]), "check_vma": eqn.params["check_vma"]}
        run = jax.shard_map(run, mesh=eqn.params["mesh"], in_specs=(), out_specs=None, **how)
    jax.eval_shape(run)
    return found[0]
