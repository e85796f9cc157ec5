"""Which inputs of a jaxpr only kernels read that can read them where they are."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import AxisType

from ..._jax import CALLS, CUSTOM_RULES, READS_IN_PLACE, SHARD_MAP
from .walk import nested

_CALLS = CALLS | CUSTOM_RULES | {SHARD_MAP, "custom_vmap_call"}


def only_kernels_read(jaxpr: Jaxpr) -> list[bool]:
    """Return of each input whether kernels that can read a row of a stack in place read it, and nothing else does."""
    readers = _Readers()
    results = readers.through(jaxpr, range(len(jaxpr.invars)))
    return [n in readers.kernels - readers.others - {*results} for n in range(len(jaxpr.invars))]


class _Readers:
    """The numbers of the inputs that kernels read, and of those that anything else reads."""

    def __init__(self) -> None:
        self.kernels, self.others = set[int | None](), set[int | None]()

    def through(self, jaxpr: Jaxpr, inputs: Sequence[int | None]) -> list[int | None]:
        """Note who reads the inputs, by their numbers, and return those that the results are."""
        at = dict(zip(jaxpr.invars, inputs, strict=True))
        of = lambda atoms: [at.get(atom) if isinstance(atom, Var) else None for atom in atoms]
        for eqn in jaxpr.eqns:
            at |= zip(eqn.outvars, self.results_of(eqn, of(eqn.invars)), strict=False)
        return of(jaxpr.outvars)

    def results_of(self, eqn: JaxprEqn, operands: list[Any]) -> list[int | None]:
        name, bodies = eqn.primitive.name, nested(eqn)
        if name == "name":
            return operands
        if name == SHARD_MAP:
            specs = zip(operands, eqn.params["in_specs"], strict=True)
            self.others.update(n for n, spec in specs if _may_be_gathered(eqn, spec))
        if name in _CALLS and len(bodies) == 1 and len(bodies[0].invars) == len(operands):
            return self.through(bodies[0], operands)
        (self.kernels if name in READS_IN_PLACE else self.others).update(operands)
        return []


def _may_be_gathered(shard_map: JaxprEqn, spec: Any) -> bool:
    """Return if the compiler may have divided an operand over axes over which a `shard_map` takes it whole."""
    mesh = shard_map.params["mesh"]
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    divided = {axis for names in spec for axis in ((names,) if isinstance(names, str) else names or ())}
    return any(kinds[a] is not AxisType.Manual and size > 1 and a not in divided for a, size in mesh.shape.items())
