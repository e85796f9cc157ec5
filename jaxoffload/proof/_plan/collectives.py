"""The collectives that the compiler adds to a layer whose weights are divided like the batch (FSDP), in seconds.

No jaxpr shows them. Weights that are divided over an axis which also divides the batch are gathered for the forward
pass, and again for the backward pass; their gradients are reduced and scattered. Over other axes of the batch they
are summed up. What is gathered is what a layer casts its weights to. XLA runs these beside matmuls, which then take
longer by a share of their time.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p, sharding_constraint_p
from jax.sharding import NamedSharding, PartitionSpec

from ..._engine.jaxprs.flat import Buffer, division, straight
from ..._engine.jaxprs.walk import walk
from ..._engine.layers.layer import Body
from ..._jax import nbytes
from .._rates import Link
from .costs import Costs, Kept
from .stacks import Found


class Weight(NamedTuple):
    """Weights of one layer: bytes on each device once they are gathered over `parts` devices, over how many others
    their gradient is summed, and the shape of a layer's row.

    `relaid`: bytes per device of the second copy that XLA makes: it lays out the whole stack anew if the axis that it
    gathers is not the first one in memory (jaxlib 0.11.2, 0.12.0).
    """

    bytes: float
    parts: int
    others: int
    has_gradient: bool
    row: tuple[int, ...]
    relaid: float


Seconds = tuple[float, float]  # of a layer's forward and of its backward pass


def with_collectives(costs: Callable[[Kept], Costs], seconds: Sequence[Seconds]) -> Callable[[Kept], Costs]:
    """Return what layers cost that keep certain names, with the collectives of each stack."""

    def those(kept: Kept) -> Costs:
        both = zip(costs(kept), seconds, strict=True)
        return tuple(c._replace(forward=c.forward + f, backward=c.backward + b) for c, (f, b) in both)

    return those


def of_layer(found: Found, args: Any, devices: int, link: Link | None) -> Seconds:
    """Return the seconds of these collectives; 0 where the link was not measured, and inside of a `shard_map`, which
    has its own."""
    if link is None or found.devices * found.stack.stages < devices:
        return 0.0, 0.0
    forward = backward = 0.0
    for weight in weights_of(found, args):
        gather = link.seconds("all_gather", weight.bytes, weight.parts)
        forward, backward = forward + gather, backward + gather
        if weight.has_gradient:
            own = weight.bytes / weight.parts
            backward += link.seconds("reduce_scatter", weight.bytes, weight.parts)
            backward += sum(link.seconds(what, own, weight.others) for what in ("reduce_scatter", "all_gather"))
    return forward * link.beside, backward * link.beside


def relaid_bytes(found: Sequence[Found], args: Any, devices: int) -> int:
    """Return the bytes per device of the second copies of weights that XLA makes for a step; none inside of a
    `shard_map`, whose weights are whole or parts."""
    copies: dict[tuple[int, ...], float] = {}  # by shape: two scans may read one stack
    for each in found:
        if each.devices * each.stack.stages == devices:
            layers = each.stack.layers * each.stack.chunks // each.stack.stages
            copies |= {(layers, *w.row): layers * w.relaid for w in weights_of(each, args) if w.relaid}
    return round(sum(copies.values()))


def weights_of(found: Found, args: Any) -> Iterator[Weight]:
    """Yield those weights, of the rows of xs that are divided or repeated over the axes of the batch. What divides the
    layers, such as pipeline stages, does not count.

    They are known by their shapes; where the state of an optimizer has the same shape, and is divided more, as in
    ZeRO-1, they are those that are divided less.
    """
    leaves = [(jnp.shape(leaf), getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(args)]
    leaves.sort(key=lambda leaf: division(leaf[1]), reverse=True)
    shardings = {shape: sharding for shape, sharding in leaves if isinstance(sharding, NamedSharding)}
    body, batch = found.body, _batch_axes(found.body, args)
    program = straight(body.jaxpr)
    cast = {op.operands[0]: op.results[0] for op in program.ops if op.eqn.primitive is convert_element_type_p}
    *_, rows = body.split([*zip(program.inputs, found.perturbed, strict=True)])
    for row, is_perturbed in rows if batch else ():
        for layers in found.stack.shapes:
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
    along = [any(axis in batch for axis in _axes([entry])) for entry in sharding.spec]
    return Weight(
        bytes=nbytes(read.aval) * parts / divided,
        parts=parts,
        others=math.prod(batch.values()) // over_batch,
        has_gradient=perturbed,
        row=row.aval.shape,
        relaid=nbytes(row.aval) / divided if not taken and parts > 1 and any(along[1:]) else 0.0,
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
