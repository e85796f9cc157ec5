"""`GroupedTensor`: the buffers that a grouped GEMM packs, one leaf each, so that each can be offloaded or stay."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._text import array_type


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedTensor:
    """Rows in groups, one group after another; quantised or not.

    A pytree whose leaves have the key paths `.data`, `.group_sizes`, ...; a field that is None is no leaf. `tag(x,
    "moe/fc1")` names them `moe/fc1.data`, ..., so that a `Policy` can steer each. Whatever becomes of them, and
    whatever else a transformation puts in their place, a tensor that was taken apart comes back whole, unchecked.

    Attributes:
      data: (M, K), of any dtype. Rows past `sum(group_sizes)` belong to no group.
      group_sizes: (G,) int32, the rows of each group.
      scale_inv: (G,) float32 if `data` is a float8, else None: a group's values are `data * scale_inv`.
      columnwise_data: (K, M) of the same float8, or None: the copy that a GEMM over the rows reads. A buffer of groups
        one after another, each transposed, (K, size); the rows past all groups are one more. With one group it is
        `data.T`. This is TransformerEngine's layout.
      columnwise_scale_inv: (G,) float32, there if and only if `columnwise_data` is.
      amax: (G,) float32 or None: the largest magnitude of each group before it was quantised, 0 for an empty one.

    Raises:
      ValueError: where it is constructed, a field has another shape or dtype, is missing, or must not be there.
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

    def to_te(self, dtype: Any = jnp.bfloat16, columnwise: bool = False) -> Any:
        """TransformerEngine's tensor of the same buffers.

        Args:
          dtype: what it is dequantised to.
          columnwise: the column-wise copy instead of the row-wise one.

        Returns:
          A `GroupedNoScaleTensor`, or a `GroupedScaledTensor1x` where the data are quantised.

        Raises:
          ImportError: TransformerEngine cannot be imported, or is too old.
          ValueError: there is no column-wise copy.
        """
        from . import te

        if not columnwise:
            return te.tensor(self.data, self.group_sizes, self.scale_inv, self.amax, dtype)
        if self.columnwise_data is None:
            raise ValueError("GroupedTensor.to_te: columnwise: True, but columnwise_data is None")
        return te.columns(self.columnwise_data, self.group_sizes, self.columnwise_scale_inv, self.amax, dtype)

    @classmethod
    def from_te(cls, rowwise: Any, columnwise: Any = None) -> "GroupedTensor":
        """The same buffers as `to_te`: of a `GroupedNoScaleTensor` or row-wise `GroupedScaledTensor1x`, and the
        column-wise one that belongs to it, if there is one.

        Raises:
          ValueError: they are no such tensors, or have no group sizes, or not the same ones. In a trace, which has no
            values, of the sizes only how many there are is compared.
        """
        from . import te

        return cls(**te.fields(rowwise, columnwise))


FIELDS = tuple(field.name for field in dataclasses.fields(GroupedTensor))
_KEYS = tuple(jax.tree_util.GetAttrKey(name) for name in FIELDS)


def _leaves(tensor: GroupedTensor) -> tuple[tuple[Any, ...], None]:
    return tuple(getattr(tensor, name) for name in FIELDS), None


def _whole(_: None, leaves: Any) -> GroupedTensor:
    # Not by the constructor: leaves may be of other shapes (vmap), or no arrays at all.
    tensor = object.__new__(GroupedTensor)
    for name, leaf in zip(FIELDS, leaves, strict=True):
        object.__setattr__(tensor, name, leaf)
    return tensor


jax.tree_util.register_pytree_with_keys(
    GroupedTensor, lambda t: (tuple(zip(_KEYS, _leaves(t)[0], strict=True)), None), _whole, _leaves
)


def is_float8(dtype: Any) -> bool:
    return jnp.dtype(dtype).name.startswith("float8")


def _wrong(t: GroupedTensor) -> list[str]:
    fields = {name: getattr(t, name) for name in FIELDS}
    needed = ("data", "group_sizes")
    is_array = lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
    if wrong := [
        f"{k}: {x!r} is no array" for k, x in fields.items() if not is_array(x) and (k in needed or x is not None)
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
        there = f"columnwise_data is {array_type(t.columnwise_data)}: both must be there, or neither"
        wrong.append(f"columnwise_scale_inv: {array_type(t.columnwise_scale_inv)}, but {there}")
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
