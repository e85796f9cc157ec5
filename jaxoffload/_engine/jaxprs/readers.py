"""Which inputs of a jaxpr are read only by kernels that can read a row of a stack in place."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import remat_p
from jax.sharding import AxisType

from ..._jax import CALLS, CUSTOM_RULES, READS_IN_PLACE, SHARD_MAP, nbytes
from .walk import nested

_CALLS = CALLS | CUSTOM_RULES | {SHARD_MAP, "custom_vmap_call"}
_ALIGNED = 256  # bytes: XLA copies a row whose offset may not be a multiple


def only_kernels_read(jaxpr: Jaxpr) -> list[bool]:
    """Return, for each input, whether kernels that can read it in its stack read it, and nothing else does.

    Such a row needs an offset that XLA can compute. If XLA must copy it nevertheless, it does so by DMA, on the streams
    of the copies for the host.
    """
    readers, numbers = _Readers(), range(len(jaxpr.invars))
    results = readers.through(jaxpr, numbers)
    return [n in readers.kernels - readers.others - {*results} for n in numbers]


class _Readers:
    """The numbers of the inputs that kernels read in place, and of those that anything else reads."""

    def __init__(self) -> None:
        self.kernels, self.others = set[int | None](), set[int | None]()
        self.is_local = not _divided(jax.sharding.get_abstract_mesh(), ())

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
        if name in _CALLS and len(bodies) == 1 and len(bodies[0].invars) == len(operands):
            outside = self.is_local
            if eqn.primitive is remat_p and eqn.params["differentiated"] and eqn.params["prevent_cse"]:
                self.others.update(operands)  # JAX puts them behind a barrier, across which XLA fuses nothing
            if name == SHARD_MAP:
                self.is_local = True
                specs = zip(operands, eqn.params["in_specs"], strict=True)
                self.others.update(n for n, spec in specs if _divided(eqn.params["mesh"], spec))
            results = self.through(bodies[0], operands)
            self.is_local = outside
            return results
        reads_in_place = name in READS_IN_PLACE and self.is_local
        for n, v in zip(operands, eqn.invars, strict=True):
            (self.kernels if reads_in_place and nbytes(v.aval) % _ALIGNED == 0 else self.others).add(n)
        return []


def _divided(mesh: Any, spec: Sequence[Any]) -> bool:
    """Return if the compiler may have divided a value over axes of a mesh other than those of its spec: it would gather
    a row of it before a kernel reads it."""
    kinds: Mapping[str, AxisType] = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    over = {axis for names in spec for axis in ((names,) if isinstance(names, str) else names or ())}
    return any(kinds[a] is not AxisType.Manual and size > 1 and a not in over for a, size in mesh.shape.items())
