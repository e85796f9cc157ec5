"""The collectives that the compiler adds to a layer whose weights are divided like the batch (FSDP), in seconds.

No jaxpr shows them. Weights that are divided over an axis which also divides the batch are gathered for the forward
pass, and again for the backward pass; their gradients are reduced and scattered. Over other axes of the batch they
are summed up. What is gathered is what a layer casts its weights to. XLA runs these beside matmuls, which then take
longer by a share of their time.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p, sharding_constraint_p
from jax.sharding import NamedSharding, PartitionSpec

from ..._engine.jaxprs.flat import Buffer, division, straight
from ..._engine.jaxprs.walk import walk
from ..._engine.layers.layer import Body
from ..._jax import nbytes
from .rates import Link
from .scans import Scan


class Weight(NamedTuple):
    """Weights of one layer: bytes on each device once they are gathered over `parts` devices, and over how many others
    their gradient is summed."""

    bytes: float
    parts: int
    others: int
    has_gradient: bool


def collective_seconds(scan: Scan, args: Any, devices: int, link: Link | None) -> float:
    """Return the seconds of these collectives in a layer, in both passes; 0 where the link was not measured, and inside
    of a `shard_map`, which has its own."""
    if link is None or scan.devices * scan.stack.stages < devices:
        return 0.0
    seconds = 0.0
    for weight in weights_of(scan, args):
        seconds += 2 * link.seconds("all_gather", weight.bytes, weight.parts)
        if weight.has_gradient:
            own = weight.bytes / weight.parts
            seconds += link.seconds("reduce_scatter", weight.bytes, weight.parts)
            seconds += sum(link.seconds(what, own, weight.others) for what in ("reduce_scatter", "all_gather"))
    return seconds * link.beside


def weights_of(scan: Scan, args: Any) -> Iterator[Weight]:
    """Yield those weights, of the rows of xs that are divided or repeated over the axes of the batch. What divides the
    layers, such as pipeline stages, does not count.

    They are known by their shapes; where the state of an optimizer has the same shape, and is divided more, as in
    ZeRO-1, they are those that are divided less.
    """
    leaves = [(jnp.shape(leaf), getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(args)]
    leaves.sort(key=lambda leaf: division(leaf[1]), reverse=True)
    shardings = {shape: sharding for shape, sharding in leaves if isinstance(sharding, NamedSharding)}
    layer = scan.layer
    body = Body(layer.forward, layer.consts, layer.carry)
    batch, program = _batch_axes(body, args), straight(body.jaxpr)
    cast = {op.operands[0]: op.results[0] for op in program.ops if op.eqn.primitive is convert_element_type_p}
    *_, rows = body.split([*zip(program.inputs, layer.perturbed, strict=True)])
    for row, is_perturbed in rows if batch else ():
        for layers in scan.stack.shapes:
            if whole := shardings.get((*layers, *row.aval.shape)):
                sharding = NamedSharding(whole.mesh, PartitionSpec(*whole.spec[len(layers) :]))
                yield _weight(row, cast.get(row, row), sharding, batch, is_perturbed)
                break


def _weight(row: Buffer, read: Buffer, sharding: NamedSharding, batch: Mapping[str, int], perturbed: bool) -> Weight:
    """Return a gathered weight; `read` is its row as it is cast.

    What a `shard_map` takes in parts is not gathered over its axes.
    """
    divided = division(sharding).parts
    over_batch = math.prod(batch[axis] for axis in _axes(sharding.spec) if axis in batch)
    taken = read.constraint or row.constraint
    parts = max(1, divided // taken.parts) if taken else over_batch
    return Weight(
        bytes=nbytes(read.aval) * parts / divided,
        parts=parts,
        others=math.prod(batch.values()) // over_batch,
        has_gradient=perturbed,
    )


def _batch_axes(body: Body, args: Any) -> dict[str, int]:
    """Return the mesh axes, with their sizes, that divide the rows of the carry, or if nothing says that, tokens."""
    carry: list[Any] = [v.aval for v in body.split(body.jaxpr.invars)[1]]
    shapes = {aval.shape for aval in carry if aval.ndim > 1}
    rows = {shape[0] for shape in shapes}
    eqns = [site.eqn for site in walk(body.jaxpr) if site.eqn.primitive is sharding_constraint_p]
    constrained = [(eqn.outvars[0].aval.shape, eqn.params["sharding"]) for eqn in eqns]  # type: ignore[attr-defined]
    # Weights, or what experts are sent, may have as many rows as the carry: what has its shape counts first.
    alike = [s for shape, s in constrained if shape in shapes]
    found = [aval.sharding for aval in carry]  # explicit axes
    found += alike or [s for shape, s in constrained if len(shape) > 1 and shape[0] in rows]
    axes = {axis: s.mesh.shape[axis] for s in found if isinstance(s, NamedSharding) for axis in _axes(s.spec[:1])}
    if axes:
        return axes
    tokens = [leaf for leaf in jax.tree.leaves(args) if jnp.issubdtype(jax.typeof(leaf).dtype, jnp.integer)]
    shardings = [getattr(leaf, "sharding", None) for leaf in tokens]
    return {a: s.mesh.shape[a] for s in shardings if isinstance(s, NamedSharding) for a in _axes(s.spec)}


def _axes(spec: Any) -> list[str]:
    """Return the mesh axes in a PartitionSpec, or in a part of it."""
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec]
    return [axis for entry in entries if isinstance(entry, tuple) for axis in entry]
