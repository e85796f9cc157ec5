"""`GroupedTensor`: the buffers of a grouped GEMM's operand, one leaf each, so that a policy decides about each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._engine.decide.jax_patches import is_float8, keep_float8_bits
from .._text import array_type


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedTensor:
    """Rows in groups, one group after another; quantised or not.

    A pytree whose leaves have the key paths `.data`, `.group_sizes`, ...; a field that is None has no leaf. `tag(x,
    "moe/fc1")` names the leaves `moe/fc1.data`, ..., so that a `Policy` can decide about each. `jax.tree.unflatten`
    checks nothing, because a transformation may put anything in the leaves' place.

    Attributes:
      data: (M, K), of any dtype. Rows past `sum(group_sizes)` belong to no group.
      group_sizes: (G,) int32, the number of rows in each group.
      scale_inv: (G,) float32 if `data` is a float8, else None: a group's values are `data * scale_inv`.
      columnwise_data: (K, M) of the same float8, or None: the copy that a GEMM over the rows reads, in
        TransformerEngine's layout. The groups follow one another, each transposed to (K, size); the rows past all
        groups form one more. With a single group it is `data.T`.
      columnwise_scale_inv: (G,) float32; present if and only if `columnwise_data` is.
      amax: (G,) float32 or None: the largest magnitude of each group before it was quantised, 0 for an empty group.

    Raises:
      ValueError: on construction, if a field has the wrong shape or dtype, is missing, or must not be there.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload.grouped import GroupedTensor
      >>> rows = GroupedTensor(jnp.ones((5, 2)), jnp.array([2, 3], jnp.int32))
      >>> [(jax.tree_util.keystr(path), leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(rows)]
      [('.data', (5, 2)), ('.group_sizes', (2,))]
    """

    data: jax.Array
    group_sizes: jax.Array
    scale_inv: jax.Array | None = None
    columnwise_data: jax.Array | None = None
    columnwise_scale_inv: jax.Array | None = None
    amax: jax.Array | None = None

    def __post_init__(self) -> None:
        if wrong := _wrong(self):
            raise ValueError(f"GroupedTensor: {'; '.join(wrong)}")
        if is_float8(self.data.dtype):
            keep_float8_bits()


FIELDS = tuple(field.name for field in dataclasses.fields(GroupedTensor))
_KEYS = tuple(jax.tree_util.GetAttrKey(name) for name in FIELDS)


def _leaves(tensor: GroupedTensor) -> tuple[tuple[Any, ...], None]:
    return tuple(getattr(tensor, name) for name in FIELDS), None


def _whole(_: None, leaves: Any) -> GroupedTensor:
    # Not through the constructor: leaves may have other shapes (vmap), or not be arrays at all.
    tensor = object.__new__(GroupedTensor)
    for name, leaf in zip(FIELDS, leaves, strict=True):
        object.__setattr__(tensor, name, leaf)
    return tensor


jax.tree_util.register_pytree_with_keys(
    GroupedTensor, lambda t: (tuple(zip(_KEYS, _leaves(t)[0], strict=True)), None), _whole, _leaves
)


def _wrong(t: GroupedTensor) -> list[str]:
    fields = {name: getattr(t, name) for name in FIELDS}
    needed = ("data", "group_sizes")
    is_array = lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
    if wrong := [
        f"{k}: {x!r} is not an array" for k, x in fields.items() if not is_array(x) and (k in needed or x is not None)
    ]:
        return wrong
    if wrong := [
        f"{name}: {array_type(fields[name])}, but it must be {allowed}"
        for name, ok, allowed in (
            ("data", len(t.data.shape) == 2, "(M, K)"),
            ("group_sizes", len(t.group_sizes.shape) == 1 and t.group_sizes.dtype == jnp.int32, "int32 of shape (G,)"),
        )
        if not ok
    ]:
        return wrong
    return [*_wrongly_there(t), *_misshapen(t, fields)]


def _wrongly_there(t: GroupedTensor) -> list[str]:
    quantised, dtype = is_float8(t.data.dtype), t.data.dtype
    wrong = []
    if quantised != (t.scale_inv is not None):
        wrong.append(
            f"scale_inv: {array_type(t.scale_inv)}, but {dtype} data {'need one' if quantised else 'have none'}"
        )
    if t.columnwise_data is not None and not quantised:
        wrong.append(f"columnwise_data: {array_type(t.columnwise_data)}, but {dtype} data have none")
    if (t.columnwise_data is None) != (t.columnwise_scale_inv is None):
        other = f"columnwise_data is {array_type(t.columnwise_data)}: both must be there, or neither"
        wrong.append(f"columnwise_scale_inv: {array_type(t.columnwise_scale_inv)}, but {other}")
    return wrong


def _misshapen(t: GroupedTensor, fields: dict[str, Any]) -> list[str]:
    per_group = (t.group_sizes.shape, jnp.dtype(jnp.float32))
    allowed = dict.fromkeys(("scale_inv", "columnwise_scale_inv", "amax"), per_group)
    allowed["columnwise_data"] = (t.data.shape[::-1], t.data.dtype)
    return [
        f"{name}: {array_type(fields[name])}, but it must be {jnp.dtype(dtype).name}{list(shape)}"
        for name, (shape, dtype) in allowed.items()
        if fields[name] is not None and (tuple(fields[name].shape) != tuple(shape) or fields[name].dtype != dtype)
    ]
