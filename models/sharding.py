"""Where arrays live: the device mesh, and one set of rules from logical axes to mesh axes."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxoffload import Problem
from models import config
from models.reading import ConfigError, config_error

MESH_AXES = ("data", "fsdp", "expert", "tensor")
_AUTO = (AxisType.Auto,) * len(MESH_AXES)

AnyMesh = jax.sharding.Mesh | AbstractMesh
MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Rules:
    """Logical axis -> the mesh axes that it is split over; None: whole on each device."""

    batch: tuple[str, ...] = ("data", "fsdp", "expert")
    sequence: MeshAxes = None
    residual: MeshAxes = None  # d_model of activations and norms
    embed: MeshAxes = ("fsdp", "expert")  # d_model of matrices: gathered for a layer's use, then dropped
    expert_embed: MeshAxes = "fsdp"  # the same of experts, which the expert axis splits already
    heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    head: MeshAxes = None  # head_dim
    mlp: MeshAxes = "tensor"  # d_ff
    vocab: MeshAxes = "tensor"
    experts: MeshAxes = "expert"  # of a layer's experts, the matrices
    router: MeshAxes = None  # of a layer's experts, what the router has one of for each
    layers: MeshAxes = None  # the leading axis of stacked layers

    def spec(self, *axes: str | None) -> PartitionSpec:
        return PartitionSpec(*(axis and getattr(self, axis) for axis in axes))


RULES = Rules()

_STREAM = ("batch", "sequence", "residual")
_HEADS, _KV_HEADS = ("batch", "sequence", "heads", "head"), ("batch", "sequence", "kv_heads", "head")
_WIDE = ("batch", "sequence", "mlp")
# The logical axes of the model's values, by the names of its residuals: `constrain` splits by them, a report divides.
VALUES = {
    **dict.fromkeys(("layer_input", "attn/norm", "attn/out", "mlp_input", "mlp/norm", "mlp/fc2"), _STREAM),
    **dict.fromkeys(("attn/q", "attn/context"), _HEADS),
    **dict.fromkeys(("attn/k", "attn/v"), _KV_HEADS),
    **dict.fromkeys(("mlp/fc1.gate", "mlp/fc1.up", "mlp/act"), _WIDE),
    **dict.fromkeys(("shared/fc1.gate", "shared/fc1.up", "shared/act"), _WIDE),
    **dict.fromkeys(("moe/norm", "shared/fc2"), _STREAM),
    "(matrix product)": _HEADS,  # without a name of their own: q and k before RoPE
    # Of the loss. The leading axis is of parts of the batch, as many as the batch is split into.
    "last_norm": ("batch", "residual"),
    "unembedding": ("batch", "vocab", "residual"),
    "logits": ("batch", None, "sequence", "vocab"),
}


def make_mesh(sizes: config.Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The mesh over all devices (or those given), in their order, so that a process holds consecutive rows.

    Raises:
      ConfigError: the sizes do not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = _shape(sizes)
    product = int(np.prod(shape))
    if product != len(devices):
        axes = " * ".join(f"mesh.{axis}" for axis in MESH_AXES)
        here = f"{len(devices)}, the number of devices here ({devices[0].device_kind})"
        line = f"{axes} = {product}: must be {here}; for instance mesh.fsdp={len(devices)}, the others 1"
        raise ConfigError([Problem("mesh", line)])
    local = len(devices) // len({device.process_index for device in devices})
    if sizes.tensor % local and local % sizes.tensor:
        raise config_error(
            "mesh.tensor", sizes.tensor, f"must divide, or be a multiple of, a process's {local} devices"
        )
    return jax.sharding.Mesh(np.asarray(devices).reshape(shape), MESH_AXES, _AUTO)


def abstract_mesh(sizes: config.Mesh) -> AbstractMesh:
    """The same mesh without devices: for tracing a program whose machine is elsewhere."""
    return AbstractMesh(_shape(sizes), MESH_AXES, _AUTO)


def inside_shard_map(sizes: config.Mesh) -> contextlib.AbstractContextManager[Any]:
    """What is traced there is one device's of this mesh, as in a layer's `shard_map`."""
    manual = (AxisType.Manual,) * len(MESH_AXES)
    return jax.sharding.use_abstract_mesh(AbstractMesh(_shape(sizes), MESH_AXES, axis_types=manual))


def _shape(sizes: config.Mesh) -> tuple[int, ...]:
    return tuple(getattr(sizes, axis) for axis in MESH_AXES)


def on_mesh[**P, R](mesh: AnyMesh, f: Callable[P, R]) -> Callable[P, R]:
    """f, with `constrain` splitting activations over the mesh while it is traced."""

    @functools.wraps(f)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return f(*args, **kwargs)

    return wrapped


def constrain(x: jax.Array, value: str) -> jax.Array:
    """One of the model's VALUES, split over the mesh of `on_mesh`; outside of one, x itself.

    A name goes before it, next to the value's definition: a policy then finds a matrix product under the name.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, RULES.spec(*VALUES[value]))


def batch_parts(mesh: AnyMesh | None = None) -> int:
    """Into how many parts a batch is split; without a mesh given, over that of `on_mesh`: 1 outside of one."""
    sizes = (mesh or jax.sharding.get_abstract_mesh()).shape
    return math.prod(sizes.get(axis, 1) for axis in RULES.batch)


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Of tokens (batch, sequence)."""
    return NamedSharding(mesh, RULES.spec("batch", "sequence"))


def param_shardings(params: nnx.State, mesh: AnyMesh) -> nnx.State:
    """A NamedSharding in place of each parameter's value, from the logical `axes` in its metadata."""

    def sharding(param: nnx.Param) -> Any:
        # Stacking layers adds an axis in front of the value, not to the metadata that each layer shares.
        stacked = ("layers",) * (len(param.shape) - len(param.axes))
        return param.replace(NamedSharding(mesh, RULES.spec(*stacked, *param.axes)))

    return jax.tree.map(sharding, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param))


def optimizer_shardings(
    optimizer: optax.GradientTransformation,
    state: Any,
    shardings: nnx.State,
    mesh: AnyMesh,
) -> Any:
    """A NamedSharding for each leaf of an optimizer state: its parameter's, or whole on each device."""
    return optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        state,
        shardings,
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
    )


def process_block(sharding: NamedSharding, shape: tuple[int, int]) -> tuple[int, int]:
    """(index, count): of `count` equal blocks of a batch's rows, this process holds number `index`."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    bounds = [index[0].indices(shape[0])[:2] for index in indices if index is not None]
    start, stop = min(low for low, _ in bounds), max(high for _, high in bounds)
    return start // (stop - start), shape[0] // (stop - start)
