"""tag() and scope(): names for residuals, leaf by leaf."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ._engine.decide.jax_patches import is_float8, keep_float8_bits
from ._names import KEEP
from ._tracing import tracing, under

_NAME = re.compile(r"[A-Za-z0-9_\-]+([./][A-Za-z0-9_\-]+)*")
_FIELD = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")


def tag[T](x: T, name: str, *, keep: bool = False) -> T:
    """Name the arrays of a pytree, so that a `Policy` can save, offload or recompute each of them.

    An array is named `name`; the leaves of a composite also get their field: `tag({"gate": g, "up": u}, "fc1")` names
    `fc1.gate` and `fc1.up`, and inside `scope("mlp")` `mlp/fc1.gate` and `mlp/fc1.up`. Outside `scan`, `chain` and
    `checkpoint` a tag does nothing. It is `jax.ad_checkpoint.checkpoint_name`, whose names JAX's own policies see too.

    Args:
      x: a pytree of arrays of any shape and dtype. Tagged integers, booleans and PRNG keys are always saved.
      name: components of letters, digits, `_` and `-`, separated by `/` (scopes) or `.` (fields).
      keep: the values stay on the device, whatever the policy says.

    Returns:
      The same values as `x`.

    Raises:
      ValueError: `name`, or a key of the pytree, is empty or has another character.
      TypeError: a leaf of `x` is not an array, or `keep` is not True or False.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload import Policy, residuals, tag
      >>> f = lambda x: jnp.sin(tag({"up": 2 * x}, "fc1")["up"])
      >>> [r.names for r in residuals(f, jnp.ones(8), policy=Policy({"fc1": "save"}))]
      [('fc1.up',)]
    """
    _check_name("tag", name)
    if not isinstance(keep, (bool, np.bool_)):
        raise TypeError(f"tag: keep is {keep!r:.60}, a {type(keep).__name__}; it must be True or False")
    full = tracing().scope + name

    def named(path: tuple[Any, ...], leaf: Any) -> Any:
        whole = full + _field(name, path)
        if is_float8(getattr(leaf, "dtype", np.float32)):
            keep_float8_bits()
        try:
            return checkpoint_name(leaf, whole + (KEEP if keep else ""))
        except TypeError as why:
            raise TypeError(f"tag: {whole!r} is {leaf!r:.60}, a {type(leaf).__name__}; it must be an array") from why

    return jax.tree_util.tree_map_with_path(named, x)


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefix the names of all tags made inside: `with scope("moe"): tag(x, "fc1")` names `moe/fc1`. Scopes nest.

    The forward rule of a `custom_vjp` is traced when `scan`, `chain` or `checkpoint` is differentiated, outside all
    scopes: write the whole name there, `tag(x, "moe/fc1")`, or open the scope inside the rule.

    Raises:
      ValueError: `name` is empty or has a character that is not allowed in a name.

    Example:
      >>> import jax
      >>> from jaxoffload import scope, tag
      >>> with scope("moe"), scope("shared"):
      ...     jaxpr = jax.make_jaxpr(lambda x: tag(x, "fc1"))(1.0)
      >>> jaxpr.eqns[0].params["name"]
      'moe/shared/fc1'
    """
    _check_name("scope", name)
    with under(scope=f"{tracing().scope}{name}/"):
        yield


def _check_name(function: str, name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{function}: {name!r:.60} is not a name; allowed are letters, digits, '_' and '-', "
            "in components separated by '/' or '.', such as 'mlp/fc1'"
        )


def _field(name: str, path: tuple[Any, ...]) -> str:
    key = lambda k: str(next((getattr(k, a) for a in ("name", "key", "idx") if hasattr(k, a)), k))
    fields = [key(k) for k in path]
    for field in fields:
        if not _FIELD.fullmatch(field):
            raise ValueError(
                f"tag: {name!r} has a leaf under the key {field!r}, which cannot be part of a name; "
                "allowed are letters, digits, '_' and '-'"
            )
    return "".join(f".{field}" for field in fields)
