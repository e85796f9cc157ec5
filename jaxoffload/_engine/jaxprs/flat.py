"""A jaxpr as one straight list of ops, calls opened; and the bytes of each value per device, as far as a trace tells.

Under explicit mesh axes a value's type says how it is divided; inside `shard_map` values are local. Under auto axes the
compiler decides later, so there a `with_sharding_constraint` on the value counts, or the `shard_map` that takes it. Any
other value is assumed to be divided along its first axis (usually the batch), into the smallest number of parts among
constrained values with as many rows; and to be whole on each device if there is none.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core.primitives import device_put_p, dynamic_update_slice_p, name_p, remat_p, sharding_constraint_p
from jax.sharding import AxisType, NamedSharding

from ..._jax import BARRIER, IDENTITIES, OPENED, SHARD_MAP, nbytes
from .values import keeps_all_bits
from .walk import nested, walk


class Division(NamedTuple):
    """Into how many parts a value is divided, and its first axis alone (`rows`)."""

    parts: int = 1
    rows: int = 1


def division(sharding: Any) -> Division:
    """Return how a sharding divides an array."""
    if not isinstance(sharding, NamedSharding):
        return Division()
    axes = [(names,) if isinstance(names, str) else names for names in sharding.spec]
    sizes = [math.prod(sharding.mesh.shape[n] for n in names) if isinstance(names, tuple) else 1 for names in axes]
    return Division(math.prod(sizes), sizes[0] if sizes else 1)


def mesh_of(jaxpr: Jaxpr, arguments: Iterable[Any]) -> dict[str, int]:
    """Return the axes of the largest mesh that a program is written for, with their sizes; empty for one device."""
    shardings = [getattr(argument, "sharding", None) for argument in arguments]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    meshes.append(jax.sharding.get_abstract_mesh())
    for eqn, *_ in walk(jaxpr):
        meshes += [v.aval.sharding.mesh for v in eqn.outvars if hasattr(v.aval, "sharding")]
        if eqn.primitive is sharding_constraint_p and isinstance(eqn.params["sharding"], NamedSharding):
            meshes.append(eqn.params["sharding"].mesh)
        if eqn.primitive.name == SHARD_MAP:
            meshes.append(eqn.params["mesh"])
    largest = max(meshes, key=lambda mesh: 0 if mesh.empty else mesh.size)
    return {} if largest.empty or largest.size == 1 else {axis: n for axis, n in largest.shape.items() if n > 1}


@dataclasses.dataclass(eq=False)
class Buffer:
    """A value; `constraint` is the one that divides it least, `moved` the value in another memory that it copies.

    `depth`: how many `shard_map`s are around its definition.
    """

    aval: Any
    depth: int
    constraint: Division | None = None
    moved: "Buffer | None" = None

    def constrain(self, found: Division) -> None:
        self.constraint = min(filter(None, [self.constraint, found]))


class Op(NamedTuple):
    """An equation that computes something; `scope` joins the names of the scopes and calls around it.

    An operand that is a constant is None.
    """

    eqn: JaxprEqn
    operands: list[Buffer | None]
    results: list[Buffer]
    scope: str


class Straight(NamedTuple):
    """A straight program.

    Attributes:
      rows: the least division that constraints give a first axis, by the axis' length.
      named: the values that have a name, by it.
      stored: those that are in memory in any case: that go through an optimization barrier, across which nothing is
        fused, or that are updated in place.
      written: those that are written into another in place.
    """

    ops: list[Op]
    inputs: list[Buffer]
    outputs: list[Buffer | None]
    rows: dict[int, int]
    named: dict[str, Buffer]
    stored: set[Buffer]
    written: set[Buffer]

    def share(self, buffer: Buffer, assumed: Division | None = None) -> int:
        """Return the bytes of a value per device; `assumed` is its division if nothing else is known."""
        return -(-nbytes(buffer.aval) // self.parts(buffer, assumed))

    def parts(self, buffer: Buffer, assumed: Division | None = None) -> int:
        """Return into how many parts a value is divided."""
        return self._constraint(buffer, assumed).parts * division(buffer.aval.sharding).parts

    def _constraint(self, buffer: Buffer, assumed: Division | None) -> Division:
        while buffer.constraint is None and buffer.moved:
            buffer = buffer.moved
        mesh = buffer.aval.sharding.mesh
        compiler_divides = mesh.empty or AxisType.Auto in mesh.axis_types
        if buffer.constraint or not buffer.aval.shape or not compiler_divides:
            return buffer.constraint or Division()
        return assumed or Division(self.rows.get(buffer.aval.shape[0], 1))


def _leaves_axes(shard_map: JaxprEqn) -> bool:
    """Return if the compiler divides values over other axes than those of a `shard_map`."""
    mesh, its = shard_map.params["mesh"], shard_map.params["newly_manual_axes"]
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(kind is AxisType.Auto and name not in its for name, kind in axes)


def straight(jaxpr: Jaxpr, opened_too: Collection[Primitive] = ()) -> Straight:
    """Return all that XLA compiles of a jaxpr as one computation.

    Calls are opened, and the equations of `opened_too`; loops, branches and other nested jaxprs are ops.
    """
    opening = _Opening(opened_too)
    inputs = [opening.new(v) for v in jaxpr.invars]
    outputs = opening.through(jaxpr, inputs, "")
    rows: dict[int, int] = {}
    for buffer in opening.buffers:
        if buffer.constraint and buffer.aval.shape:
            length, parts = buffer.aval.shape[0], buffer.constraint.rows
            rows[length] = min(rows.get(length, parts), parts)
    return Straight(opening.ops, inputs, outputs, rows, opening.named, opening.stored, opening.written)


class _Opening:
    """The values, the ops and the names met so far."""

    def __init__(self, opened_too: Collection[Primitive]):
        self.opened_too = opened_too
        self.buffers: list[Buffer] = []
        self.ops: list[Op] = []
        self.named: dict[str, Buffer] = {}
        self.stored: set[Buffer] = set()
        self.written: set[Buffer] = set()
        self.depth = 0

    def new(self, var: Any) -> Buffer:
        self.buffers.append(Buffer(var.aval, self.depth))
        return self.buffers[-1]

    def through(self, jaxpr: Jaxpr, inputs: Sequence[Buffer | None], scope: str) -> list[Buffer | None]:
        at: dict[Var, Buffer | None] = {v: self.new(v) for v in jaxpr.constvars}
        at |= zip(jaxpr.invars, inputs, strict=True)
        of = lambda atom: None if isinstance(atom, Literal) else at[atom]
        for eqn in jaxpr.eqns:
            results = self.results_of(eqn, [of(atom) for atom in eqn.invars], f"{scope}/{eqn.source_info.name_stack}")
            at |= zip(eqn.outvars, results, strict=True)
        return [of(atom) for atom in jaxpr.outvars]

    def results_of(self, eqn: JaxprEqn, operands: list[Buffer | None], scope: str) -> list[Buffer | None]:
        name = eqn.primitive.name
        if eqn.primitive is sharding_constraint_p and operands[0]:
            # What a `shard_map` made is here as one shard, and divided already.
            into = max(1, nbytes(eqn.invars[0].aval) // max(1, nbytes(operands[0].aval)))
            operands[0].constrain(Division(*(max(1, parts // into) for parts in division(eqn.params["sharding"]))))
        open_it = name in OPENED or eqn.primitive in self.opened_too
        if open_it and len(body := nested(eqn)) == 1 and len(body[0].invars) == len(operands):
            specs = eqn.params["in_specs"] if name == SHARD_MAP else ()
            for operand, spec in zip(operands, specs, strict=False):
                if operand and not operand.constraint and operand.depth <= self.depth:
                    found = division(NamedSharding(eqn.params["mesh"], spec))
                    if found.parts > 1 or not _leaves_axes(eqn):
                        operand.constrain(found)
            self.depth += name == SHARD_MAP
            which = len(self.ops) if eqn.primitive is remat_p else ""  # tells checkpoints apart
            inside = self.through(body[0], operands, f"{scope}/{name}{which}")
            self.depth -= name == SHARD_MAP
            return inside
        if eqn.primitive is name_p and operands[0]:
            self.named[eqn.params["name"]] = operands[0]
        if name == BARRIER or eqn.primitive is dynamic_update_slice_p:
            self.stored.update(filter(None, operands if name == BARRIER else operands[:1]))
        if eqn.primitive is dynamic_update_slice_p:
            self.written.update(filter(None, operands[1:2]))
        passes_on = name in IDENTITIES or eqn.primitive is dynamic_update_slice_p or keeps_all_bits(eqn)
        if passes_on and operands and operands[0]:
            return operands[: len(eqn.outvars)]
        results = [self.new(v) for v in eqn.outvars]
        if eqn.primitive is device_put_p:
            for result, operand in zip(results, operands, strict=True):
                result.moved = operand
        self.ops.append(Op(eqn, operands, results, scope))
        return [*results]
