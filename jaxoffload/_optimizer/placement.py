"""Decide where the state of each parameter lives, and in how many blocks it streams."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from .._engine.jaxprs.flat import division
from .._errors import Problem
from .._jax import nbytes
from .._policy import Policy, PolicyError
from .._text import nearest, readable

MOST_BLOCKS = 128  # of an array: more than most stacks have layers. The first and the last have nothing beside


class Placed(NamedTuple):
    """Where the state of one parameter lives.

    Attributes:
      name: of the parameter.
      bytes: of its state, on all devices.
      place: "host" or "device".
      blocks: how many come to the device one after another; 1 if the state comes whole.
      reason: what decided.
    """

    name: str
    bytes: int
    place: str
    blocks: int
    reason: str


class Placements(tuple[Placed, ...]):
    """Where the state of each parameter lives; as text, a table."""

    def __str__(self) -> str:
        rows = [("parameter", "state", "place", "blocks", "reason")]
        rows += [(p.name, readable(p.bytes), p.place, str(p.blocks), p.reason) for p in self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    @property
    def host_bytes(self) -> int:
        """Bytes on the host, of all devices."""
        return sum(p.bytes for p in self if p.place == "host")


def owners(state: Any, params: Any) -> list[int | None]:
    """Return for each array of a state the parameter that it has a row for each row of; None if there is none.

    The path of such an array ends with the parameter's path: `[1].mu['layers']['w']` is of `['layers']['w']`.
    """
    of_params = {tuple(path): (n, x.shape) for n, (path, x) in enumerate(tree_leaves_with_path(params))}

    def owner(path: tuple[Any, ...], shape: tuple[int, ...]) -> int | None:
        for start in range(len(path) + 1):
            if path[start:] in of_params:
                number, of = of_params[path[start:]]
                return number if shape and shape[:1] == of[:1] else None
        return None

    return [owner(tuple(path), x.shape) for path, x in tree_leaves_with_path(state)]


def placed(policy: Policy, params: Any, state: Any, shardings: Sequence[Any]) -> Placements:
    """Return where a policy puts the state of parameters, which may be shapes and dtypes.

    Raises:
      PolicyError: a pattern matches no parameter, or says recompute.
    """
    paths, leaves = zip(*tree_leaves_with_path(params), strict=True)
    names = [keystr(path, simple=True, separator="/") for path in paths]
    _check(policy, names)
    sizes = [0] * len(names)
    for owner, x in zip(owners(state, params), jax.tree.leaves(state), strict=True):
        if owner is not None:
            sizes[owner] += nbytes(x)
    return Placements(map(_placed, [policy] * len(names), names, leaves, sizes, shardings))


def _placed(policy: Policy, name: str, param: Any, size: int, sharding: Any) -> Placed:
    reason, decision = policy.match(name) or ("default", policy.default)
    least = int(policy.min_offload_bytes)
    if decision == "offload" and size < max(1, least):
        reason, decision = f"smaller than min_offload_bytes ({readable(least)})", "save"
    if decision == "save":
        return Placed(name, size, "device", 1, reason)
    rows = param.shape[0] // division(sharding).rows
    return Placed(name, size, "host", max(n for n in range(1, MOST_BLOCKS + 1) if rows % n == 0), reason)


def _check(policy: Policy, names: Sequence[str]) -> None:
    problems = []
    for field in dataclasses.fields(policy):
        given, unset = getattr(policy, field.name), field.default
        if field.name not in ("residuals", "default", "min_offload_bytes") and given != unset:
            text = f"{field.name}: {given!r} is about residuals, not about a state; leave it {unset!r}"
            problems.append(Problem(field.name, text))
    for pattern, decision in [*policy.rules, ("default", policy.default)]:
        source = "default" if pattern == "default" else policy.source(pattern)
        if decision == "recompute":
            problems.append(Problem(source, f"{source}: 'recompute' is not allowed for a state; use save or offload"))
    for problem in policy.unmatched(names):
        pattern = problem.key
        problems.append(
            Problem(pattern, f"{pattern}: matches no parameter; they are {', '.join(names)}{nearest(pattern, names)}")
        )
    if problems:
        raise PolicyError(problems)
