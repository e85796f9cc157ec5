"""Where arrays live: the device mesh, and one set of rules from logical axes to mesh axes."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from models import config
from models.config import ConfigError, nearest

MESH_AXES = tuple(each.name for each in fields(config.Mesh))
_AUTO = (AxisType.Auto,) * len(MESH_AXES)

AnyMesh = jax.sharding.Mesh | AbstractMesh
MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Rules:
    """Logical axis -> the mesh axes that it is split over; None: each device has all of it."""

    batch: tuple[str, ...] = ("data", "fsdp", "expert")
    sequence: MeshAxes = None
    residual: MeshAxes = None  # d_model of activations and norms
    embed: MeshAxes = ("fsdp", "expert")  # d_model of matrices: gathered for each layer, then dropped
    expert_embed: MeshAxes = "fsdp"  # as embed, for experts, which are split over the expert axis already
    heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    head: MeshAxes = None  # head_dim
    mlp: MeshAxes = "tensor"  # d_ff
    vocab: MeshAxes = ("stage", "tensor")  # all stages compute the head
    experts: MeshAxes = "expert"  # the number of experts, in their matrices
    router: MeshAxes = None  # the number of experts, in the router
    layers: MeshAxes = "stage"  # the leading axis of stacked layers; of two, as virtual stages have, the second

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return the PartitionSpec of an array with these logical axes; None: an axis that is not split."""
        return PartitionSpec(*(axis and _look_up(axis, vars(self), "Rules") for axis in axes))


def _look_up[T](name: str, table: Mapping[str, T], where: str) -> T:
    if name not in table:
        allowed = f"must be one of {', '.join(table)}"
        raise ValueError(f"{name!r} is not in models.sharding.{where}: {allowed}{nearest(name, table)}")
    return table[name]


RULES = Rules()

_STREAM = ("batch", "sequence", "residual")
_HEADS, _KV_HEADS = ("batch", "sequence", "heads", "head"), ("batch", "sequence", "kv_heads", "head")
_WIDE = ("batch", "sequence", "mlp")
# The logical axes of the model's values, by the name that `constrain` shards them by.
VALUES = {
    **dict.fromkeys(("layer_input", "attn/norm", "attn/out", "mlp_input", "mlp/norm", "mlp/fc2"), _STREAM),
    **dict.fromkeys(("attn/q", "attn/context"), _HEADS),
    **dict.fromkeys(("attn/k", "attn/v"), _KV_HEADS),
    **dict.fromkeys(("mlp/fc1.gate", "mlp/fc1.up", "mlp/act"), _WIDE),
    **dict.fromkeys(("shared/fc1.gate", "shared/fc1.up", "shared/act"), _WIDE),
    **dict.fromkeys(("moe/norm", "shared/fc2"), _STREAM),
    # In the loss. The leading axis has one entry for each part that the batch is split into.
    "last_norm": ("batch", "residual"),
    "unembedding": ("batch", "vocab", "residual"),
    "logits": ("batch", None, "sequence", "vocab"),
}


def make_mesh(sizes: config.Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Return the mesh over all devices (or those given), in their order, so that each process has consecutive rows.

    Raises:
      ConfigError: the sizes do not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = astuple(sizes)
    product = math.prod(shape)
    if product != len(devices):
        axes = " * ".join(f"mesh.{axis}" for axis in MESH_AXES)
        here = f"{len(devices)}, the number of devices here ({devices[0].device_kind})"
        line = f"{axes} = {product}: must be {here}; for instance mesh.fsdp={len(devices)}, the others 1"
        raise ConfigError(line)
    local = len(devices) // len({device.process_index for device in devices})
    if sizes.tensor % local and local % sizes.tensor:
        must = f"must divide, or be a multiple of, a process's {local} devices"
        raise ConfigError(f"mesh.tensor = {sizes.tensor}: {must}")
    return jax.sharding.Mesh(np.asarray(devices).reshape(shape), MESH_AXES, _AUTO)


def abstract_mesh(sizes: config.Mesh) -> AbstractMesh:
    """Return the mesh without devices, to trace a program for another machine."""
    return AbstractMesh(astuple(sizes), MESH_AXES, _AUTO)


def on_mesh[**P, R](mesh: AnyMesh, f: Callable[P, R]) -> Callable[P, R]:
    """Return f, traced with `constrain` sharding activations over the mesh."""

    @functools.wraps(f)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return f(*args, **kwargs)

    return wrapped


def constrain(x: jax.Array, value: str) -> jax.Array:
    """Return one of the model's VALUES, sharded over the mesh of `on_mesh`; without a mesh, x itself.

    Call `tag` first, right after the value is computed: then the tag is on the output of the matmul. A value that
    nothing constrains is divided as XLA finds best.
    """
    spec = RULES.spec(*_look_up(value, VALUES, "VALUES"))
    return x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, spec)


def on_each_device(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return f mapped over the devices of the mesh in use; in a pipeline stage, over those of the stage."""
    axes = set(jax.sharding.get_abstract_mesh().auto_axes)
    # check_vma: kernels do not say over which axes their results vary.
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def batch_parts() -> int:
    """Return how many parts a batch is split into, over the mesh of `on_mesh`; 1 without a mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in RULES.batch)


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Return the sharding of tokens, (batch, sequence)."""
    return NamedSharding(mesh, RULES.spec("batch", "sequence"))


def param_shardings(params: nnx.State, mesh: AnyMesh) -> nnx.State:
    """Return `params` with a NamedSharding in place of each value, from the logical `axes` in its metadata."""

    def sharding(path: tuple[Any, ...], param: nnx.Param) -> Any:
        # Stacking layers adds leading axes to the value, but not to the metadata, which all layers share.
        stacked: list[str | None] = [None] * (len(param.shape) - len(param.axes))
        if stacked and path[0].key == "layers":  # the few in `first` run on all stages
            stacked[-1] = "layers"
        return param.replace(NamedSharding(mesh, RULES.spec(*stacked, *param.axes)))

    return jax.tree_util.tree_map_with_path(sharding, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param))


def process_block(sharding: NamedSharding, shape: tuple[int, int]) -> tuple[int, int]:
    """Return (index, count): this process has block `index` of `count` equal blocks of a batch's rows."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    bounds = [index[0].indices(shape[0])[:2] for index in indices if index is not None]
    start, stop = min(low for low, _ in bounds), max(high for _, high in bounds)
    return start // (stop - start), shape[0] // (stop - start)
