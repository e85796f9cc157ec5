"""Decide where the state of each parameter lives, and in how many blocks it streams."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from .._engine.jaxprs.flat import division
from .._errors import Problem
from .._jax import nbytes
from .._policy import Policy, PolicyError
from .._text import readable

MOST_BLOCKS = 128  # of an array: more than most stacks have layers. The first and the last have nothing beside


class Placed(NamedTuple):
    """Where the state of one parameter lives, and how its arrays are divided into blocks, alike on every device.

    If the sharding divides the rows, a block is a part of each device's rows: they do not lie side by side in the
    array, which does not matter to what treats each row by itself.

    Attributes:
      name: of the parameter.
      bytes: of its state, on all devices.
      place: "host" or "device".
      blocks: how many come to the device one after another; 1 if the state comes whole.
      reason: what decided.
      sharding: the parameter's; None on one device.
      ndim: the parameter's.
    """

    name: str
    bytes: int
    place: str
    blocks: int
    reason: str
    sharding: Any
    ndim: int

    @property
    def bytes_per_device(self) -> int:
        return -(-self.bytes // division(self.sharding).parts)

    @property
    def rows(self) -> int | None:
        """The axis along which the arrays are divided; None if they come whole."""
        return 0 if self.blocks > 1 else None

    def take(self, x: Any, i: Any, axis: int = 0) -> Any:
        """Return block i of an array, whose rows are along `axis`."""
        if self.blocks == 1:
            return x
        rows = lambda x: x.shape[axis] // self.blocks
        part = lambda x, i: lax.dynamic_slice_in_dim(x, i * rows(x), rows(x), axis, allow_negative_indices=False)
        return self._in_shards(part, axis, x, i)

    def put(self, x: Any, block: Any, i: Any) -> Any:
        """Return an array with its block i replaced."""

        def put(x: Any, block: Any, i: Any) -> Any:
            return lax.dynamic_update_slice_in_dim(x, block, i * block.shape[0], 0, allow_negative_indices=False)

        return self._in_shards(put, 0, x, block, i) if self.blocks > 1 else block

    def sharding_of(self, x: Any, axis: int = 0) -> Any:
        """Return how an array is sharded: as the parameter, or its rows alone if its shape is another."""
        if not isinstance(self.sharding, NamedSharding) or (len(x.shape) == self.ndim and not axis):
            return self.sharding
        rows = self.sharding.spec[0] if self.sharding.spec else None
        return NamedSharding(self.sharding.mesh, PartitionSpec(*[None] * axis, rows))

    def sharded(self, x: Any) -> Any:
        """Return an array that is sharded so, if its type does not say how it is."""
        sharding = self.sharding_of(x)
        unknown = isinstance(sharding, NamedSharding) and not jax.typeof(x).sharding.mesh.explicit_axes
        return lax.with_sharding_constraint(x, sharding) if unknown else x

    def _in_shards(self, f: Callable[..., Any], axis: int, *operands: Any) -> Any:
        """Return `f` of arrays and a number; if their rows are divided, of the part of each device."""
        if division(self.sharding).rows == 1:
            return f(*operands)
        spec = self.sharding_of(operands[0], axis).spec
        specs = (*[spec] * (len(operands) - 1), PartitionSpec())
        return jax.shard_map(f, mesh=self.sharding.mesh, in_specs=specs, out_specs=spec)(*operands)


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
        ends = (path[start:] for start in range(len(path) + 1))
        number, of = next((of_params[end] for end in ends if end in of_params), (None, ()))
        return number if shape and shape[:1] == of[:1] else None

    return [owner(tuple(path), x.shape) for path, x in tree_leaves_with_path(state)]


def placed(policy: Policy, params: Any, state: Any, shardings: Sequence[Any]) -> Placements:
    """Return where a policy puts the state of parameters, which may be shapes and dtypes.

    Raises:
      PolicyError: a pattern matches no parameter, or says recompute.
    """
    names = [keystr(path, simple=True, separator="/") for path, _ in tree_leaves_with_path(params)]
    _check(policy, names)
    sizes = [0] * len(names)
    for owner, x in zip(owners(state, params), jax.tree.leaves(state), strict=True):
        if owner is not None:
            sizes[owner] += nbytes(x)
    least, placements = int(policy.min_offload_bytes), []
    for name, size, x, sharding in zip(names, sizes, jax.tree.leaves(params), shardings, strict=True):
        reason, decision = policy.match(name) or ("default", policy.default)
        if decision == "offload" and size < max(1, least):
            reason, decision = f"smaller than min_offload_bytes ({readable(least)})", "save"
        place, blocks = "device", 1
        if decision == "offload":
            rows = x.shape[0] // division(sharding).rows
            place, blocks = "host", max(n for n in range(1, MOST_BLOCKS + 1) if rows % n == 0)
        placements.append(Placed(name, size, place, blocks, reason, sharding, len(x.shape)))
    return Placements(placements)


def _check(policy: Policy, names: Sequence[str]) -> None:
    problems = policy.unmatched(names, "parameter", "parameters")
    for field in dataclasses.fields(policy):
        given, unset = getattr(policy, field.name), field.default
        if field.name not in ("residuals", "default", "min_offload_bytes") and given != unset:
            text = f"{field.name}: {given!r} is about residuals, not about a state; leave it {unset!r}"
            problems.append(Problem(field.name, text))
    for pattern, decision in [*policy.rules, ("default", policy.default)]:
        source = "default" if pattern == "default" else policy.source(pattern)
        if decision == "recompute":
            text = f"{source}: 'recompute' is not allowed for a state; use 'save' or 'offload'"
            text += " (a Policy's default is 'recompute' unless you give one)" if source == "default" else ""
            problems.append(Problem(source, text))
    if problems:
        raise PolicyError(problems)
