"""Names of residuals: `tag` and `scope` write them, leaf by leaf; a plan's own names are read and written here too."""

import contextlib
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

# Part of every trace cache's key: one jitted function used under two scopes is traced twice, once a name.
_scope = jax.make_user_context("")

_NAME = re.compile(r"[A-Za-z0-9_\-]+([./][A-Za-z0-9_\-]+)*")
_FIELD = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")
_KEEP = "#keep"


def tag[T](x: T, name: str, *, keep: bool = False) -> T:
    """Name the arrays of a pytree, so that a `Policy` can save, offload or recompute each of them.

    One array is named `name`; the leaves of a composite get their field: `tag({"gate": g, "up": u}, "fc1")` names
    `fc1.gate` and `fc1.up`. Inside `scope("mlp")` the names are `mlp/fc1.gate` and `mlp/fc1.up`. The values are
    those of `x`; outside of `scan`, `chain` and `checkpoint` a tag does nothing. It is JAX's own
    `jax.ad_checkpoint.checkpoint_name`, whose names JAX's policies see too.

    Args:
      x: a pytree of arrays of any shape and dtype. Tagged integers, booleans and PRNG keys are always saved.
      name: components of letters, digits, `_` and `-`, separated by `/` (scopes) or `.` (fields).
      keep: the values stay on the device, whatever the policy says.

    Raises:
      ValueError: `name`, or a key of the pytree, is empty or has another character.
      TypeError: a leaf of `x` is not an array, or `keep` is not True or False.
    """
    _check_name("tag", name)
    if not isinstance(keep, (bool, np.bool_)):
        raise TypeError(f"tag: keep is {keep!r:.60}, a {type(keep).__name__}; it must be True or False")
    full = _scope.value + name

    def named(path: tuple[Any, ...], leaf: Any) -> Any:
        whole = full + _field(name, path)
        try:
            return checkpoint_name(leaf, whole + (_KEEP if keep else ""))
        except TypeError as why:
            raise TypeError(f"tag: {whole!r} is {leaf!r:.60}, a {type(leaf).__name__}; it must be an array") from why

    return jax.tree_util.tree_map_with_path(named, x)


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefix the names of all tags made inside: `with scope("moe"): tag(x, "fc1")` names `moe/fc1`. Scopes nest.

    A `custom_vjp`'s forward rule is traced when `scan`, `chain` or `checkpoint` is differentiated, outside of all
    scopes: write the whole name there, `tag(x, "moe/fc1")`, or open the scope inside the rule.

    Raises:
      ValueError: `name` is empty or has a character that a name cannot have.
    """
    _check_name("scope", name)
    with _scope(f"{_scope.value}{name}/"):
        yield


def outside_scopes() -> contextlib.AbstractContextManager[None]:
    """Where a derivative is made. What scope is open then depends on what was jitted, and names must not."""
    return _scope("")


def _check_name(function: str, name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{function}: {name!r} is not a name; allowed are letters, digits, '_' and '-', "
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


class Name(NamedTuple):
    """A name as a policy reads it."""

    text: str
    keep: bool = False

    @property
    def composite(self) -> str:
        """The name without its last component's fields: `moe/fc1` of `moe/fc1.scale_inv`."""
        head, slash, last = self.text.rpartition("/")
        return head + slash + last.partition(".")[0]


class PlanName(NamedTuple):
    """The one name that a plan writes behind a value's definition; all that a residual must tell of itself.

    `depth` keeps nested plans apart, `plan` (a digest) neighbouring ones, `value` the values of one plan.
    """

    decision: str
    depth: int
    plan: str
    value: int
    names: tuple[Name, ...]

    def __str__(self) -> str:
        # Quoted, for a foreign name may have any characters.
        names = " | ".join(urllib.parse.quote(n.text, safe="/<>") + _KEEP * n.keep for n in self.names)
        return f"jaxoffload:{self.decision}:{self.depth}:{self.plan}:{self.value}:{names}"


_PLAN_NAME = re.compile(r"jaxoffload:(save|offload|recompute):(\d+):([0-9a-f]{8}):(\d+):(.*)")


def read_plan_name(text: str) -> PlanName | None:
    """The `PlanName` that `text` writes; None for a user's name."""
    found = _PLAN_NAME.fullmatch(text)
    if not found:
        return None
    decision, depth, plan, value, quoted = found.groups()
    names = (_read_name(name) for name in quoted.split(" | ") if name)
    unquoted = tuple(name._replace(text=urllib.parse.unquote(name.text)) for name in names)
    return PlanName(decision, int(depth), plan, int(value), unquoted)


def read_names(text: str) -> tuple[Name, ...]:
    """The user's names that a `checkpoint_name` carries: one, or those that an inner plan found for its value."""
    plan_name = read_plan_name(text)
    return plan_name.names if plan_name else (_read_name(text),)


def _read_name(text: str) -> Name:
    return Name(text.removesuffix(_KEEP), text.endswith(_KEEP))
