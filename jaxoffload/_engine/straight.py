"""A jaxpr as one straight list of steps, calls opened; and each value's bytes on a device, as far as a trace tells.

Under explicit mesh axes a value's type says how it is divided; inside `shard_map` values are a device's own. Under auto
axes the compiler decides, later. There a `with_sharding_constraint` on the value tells, or the `shard_map` that takes
it. Any other value is assumed to be divided along its first axis alone, the batch as a rule, into as many parts as the
constrained values with as many rows, and into the fewest where they differ. Where there is none, each device is assumed
to hold the value whole.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core.primitives import device_put_p, sharding_constraint_p
from jax.sharding import AxisType, NamedSharding

from .._jax import OPENED, PASSING, SHARD_MAP
from .memory import nbytes
from .values import keeps_all_bits, nested


class Division(NamedTuple):
    """Into how many parts a value is divided, and into how many its first axis is."""

    parts: int = 1
    rows: int = 1


def division(sharding: Any) -> Division:
    """As a sharding divides an array."""
    if not isinstance(sharding, NamedSharding):
        return Division()
    axes = [(names,) if isinstance(names, str) else names for names in sharding.spec]
    sizes = [
        math.prod(sharding.mesh.shape[name] for name in names) if isinstance(names, tuple) else 1 for names in axes
    ]
    return Division(math.prod(sizes), sizes[0] if sizes else 1)


@dataclasses.dataclass(eq=False)
class Array:
    """A value. `constraint` is the one that divides it least, None without one; `moved` the value that it is a copy of,
    in another memory."""

    aval: Any
    constraint: Division | None = None
    moved: "Array | None" = None

    def constrain(self, sharding: Any) -> None:
        self.constraint = min(filter(None, [self.constraint, division(sharding)]))


class Step(NamedTuple):
    """An equation that computes something. None stands for an operand that is a constant; `scope` are the names of the
    scopes and calls that it is in."""

    eqn: JaxprEqn
    operands: list[Array | None]
    results: list[Array]
    scope: str


class Straight(NamedTuple):
    """`rows`: by the length of a first axis, into how many parts constraints divide it at least."""

    steps: list[Step]
    inputs: list[Array]
    outputs: list[Array | None]
    rows: dict[int, int]

    def share(self, array: Array, assumed: Division | None = None) -> int:
        """Bytes of a value on each device. `assumed`: how it is divided, if nothing says otherwise."""
        parts = self._constraint(array, assumed).parts * division(array.aval.sharding).parts
        return -(-nbytes(array.aval) // parts)

    def _constraint(self, array: Array, assumed: Division | None) -> Division:
        while array.constraint is None and array.moved:
            array = array.moved
        if array.constraint or not array.aval.shape or not _compiler_divides(array.aval):
            return array.constraint or Division()
        return assumed or Division(self.rows.get(array.aval.shape[0], 1))


def _compiler_divides(aval: Any) -> bool:
    mesh = aval.sharding.mesh
    return mesh.empty or AxisType.Auto in mesh.axis_types


def straight(jaxpr: Jaxpr, opened_too: Collection[Primitive] = ()) -> Straight:
    """All that XLA compiles of a jaxpr as one computation. Loops and branches are steps, and other nested jaxprs than
    those of calls; of `opened_too` they are not."""
    arrays: list[Array] = []
    steps: list[Step] = []

    def new(var: Any) -> Array:
        arrays.append(Array(var.aval))
        return arrays[-1]

    def opened(jaxpr: Jaxpr, inputs: Sequence[Array | None], scope: str) -> list[Array | None]:
        at: dict[Var, Array | None] = {v: new(v) for v in jaxpr.constvars}
        at |= zip(jaxpr.invars, inputs, strict=True)
        of = lambda atom: None if isinstance(atom, Literal) else at[atom]
        for eqn in jaxpr.eqns:
            at |= zip(eqn.outvars, results_of(eqn, [of(atom) for atom in eqn.invars], scope), strict=True)
        return [of(atom) for atom in jaxpr.outvars]

    def results_of(eqn: JaxprEqn, operands: list[Array | None], scope: str) -> list[Array | None]:
        name = eqn.primitive.name
        scope = f"{scope}/{eqn.source_info.name_stack}"
        if eqn.primitive is sharding_constraint_p and operands[0]:
            operands[0].constrain(eqn.params["sharding"])
        open_it = name in OPENED or eqn.primitive in opened_too
        if open_it and len(body := list(nested(eqn))) == 1 and len(body[0].invars) == len(operands):
            specs = eqn.params["in_specs"] if name == SHARD_MAP else ()
            for operand, spec in zip(operands, specs, strict=False):
                if operand and not operand.constraint:
                    operand.constrain(NamedSharding(eqn.params["mesh"], spec))
            return opened(body[0], operands, f"{scope}/{name}")
        if (name in PASSING or keeps_all_bits(eqn)) and operands and operands[0]:
            return operands[: len(eqn.outvars)]
        results = [new(v) for v in eqn.outvars]
        if eqn.primitive is device_put_p:
            for result, operand in zip(results, operands, strict=True):
                result.moved = operand
        steps.append(Step(eqn, operands, results, scope))
        return [*results]

    inputs = [new(v) for v in jaxpr.invars]
    outputs = opened(jaxpr, inputs, "")
    rows: dict[int, int] = {}
    for array in arrays:
        if array.constraint and array.aval.shape:
            length, parts = array.aval.shape[0], array.constraint.rows
            rows[length] = min(rows.get(length, parts), parts)
    return Straight(steps, inputs, outputs, rows)
