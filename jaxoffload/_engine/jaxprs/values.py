"""The values of a jaxpr that have names: found through nested jaxprs, and named anew at their definitions.

A value is one array, however many variables stand for it: a `name`, a sharding constraint and a `reduce_precision`
that changes nothing return their operand, and the operands of a nested jit or branch are the variables inside it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn
from jax.extend.core.primitives import cond_p, name_p, reduce_precision_p, scan_p, sharding_constraint_p

from ..._jax import CALLS, KERNELS, SHARD_MAP, SORTING
from ..._names import Name, read_names
from .walk import map_bodies, operands_of, placed_bodies, with_eqns

# The equation numbers and parameters that lead to the jaxpr of a variable. One jaxpr object can stand at two places,
# with different values.
Path = tuple[Any, ...]

# The name that `mark_dots` gives to matmuls, so that they are known after differentiation.
DOT = Name("<dot>")


@dataclasses.dataclass(eq=False)
class Value:
    """One array: where it is defined, its names, and its `role` if it is an argument of the function."""

    aval: Any
    path: Path
    var: Var
    role: str | None = None
    names: list[Name] = dataclasses.field(default_factory=list)


class Named(NamedTuple):
    """The values of a jaxpr that have a name, in order of definition."""

    values: list[Value]
    slots: list[list[Value]]  # for each result of a `cond`, the values from its branches and behind it that share it
    kernels: list[list[Value]]  # for each kernel, the values that it computes


def named_values(jaxpr: Jaxpr, roles: Sequence[str]) -> Named:
    """Return the values of `jaxpr` that have a name; `roles` says what the first inputs are ("carry", "argument", ...).

    An unnamed result of a kernel takes the name of the kernel's first named one: flash attention's softmax statistics
    that of its output, which is of no use to the backward pass without them.
    """
    search = _Search()
    for var, role in zip(jaxpr.invars, [*roles, *[None] * (len(jaxpr.invars) - len(roles))], strict=True):
        search.define((), var, role)
    search.visit(jaxpr, ())
    for results in search.kernels:
        first = next((value.names for value in results if value.names), [])
        for value in results:
            value.names = value.names or list(first)
    slots = [[v for v in slot if v is not None and v.names not in ([], [DOT])] for slot in search.slots]
    kernels = [[v for v in results if v.names] for results in search.kernels + search.sortings]
    return Named([v for v in search.values if v.names], slots, kernels)


class _Search:
    """The values met so far, and which of them each variable is."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.at: dict[tuple[Path, Var], Value] = {}
        self.slots: list[list[Value | None]] = []
        self.kernels: list[list[Value]] = []
        self.sortings: list[list[Value]] = []

    def define(self, path: Path, var: Var, role: str | None = None) -> Value:
        self.values.append(Value(var.aval, path, var, role))
        self.at[path, var] = self.values[-1]
        return self.values[-1]

    def alias(self, path: Path, var: Var, of: Value | None) -> None:
        self.at[path, var] = of or self.define(path, var)

    def value(self, path: Path, atom: Any) -> Value | None:
        return None if isinstance(atom, Literal) else self.at.get((path, atom))

    def visit(self, jaxpr: Jaxpr, path: Path) -> None:
        for i, eqn in enumerate(jaxpr.eqns):
            inside = [((*path, i, place), body) for place, body in placed_bodies(eqn)]
            for body_path, body in inside:
                self.visit_body(eqn, path, body, body_path)
            if eqn.primitive in (name_p, sharding_constraint_p) or keeps_all_bits(eqn):
                self.alias(path, eqn.outvars[0], self.value(path, eqn.invars[0]))
            for var in eqn.outvars:
                if (path, var) not in self.at:
                    self.define(path, var)
            results = [self.at[path, var] for var in eqn.outvars]
            if eqn.primitive is name_p:
                names = results[0].names
                names += [n for n in read_names(eqn.params["name"]) if n not in names]
            elif eqn.primitive.name in KERNELS:
                self.kernels.append(results)
            elif eqn.primitive.name in SORTING:
                self.sortings.append(results)
            if eqn.primitive is cond_p:
                for k, result in enumerate(results):
                    self.slots.append([*(self.value(at, body.outvars[k]) for at, body in inside), result])

    def visit_body(self, eqn: JaxprEqn, path: Path, body: Jaxpr, body_path: Path) -> None:
        takes_parts = eqn.primitive is scan_p or eqn.primitive.name == SHARD_MAP
        for var, operand in zip(body.invars, operands_of(eqn, body), strict=True):
            value = self.value(path, operand)
            # A shard or a row of an argument is the argument: that is kept anyway, and must not be kept a second time.
            # A shard or a row of any other value is another value, with a size and a sharding of its own.
            self.alias(body_path, var, None if takes_parts and value and not value.role else value)
        self.visit(body, body_path)
        if eqn.primitive.name in CALLS:
            for var, result in zip(eqn.outvars, body.outvars, strict=True):
                if (value := self.value(body_path, result)) is not None:
                    self.at[path, var] = value


def keeps_all_bits(eqn: JaxprEqn) -> bool:
    """Return if this is a `reduce_precision` that changes nothing (https://github.com/jax-ml/jax/pull/22244)."""
    if eqn.primitive is not reduce_precision_p:
        return False
    aval: Any = eqn.invars[0].aval
    info = jnp.finfo(aval.dtype)
    return eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant


def write_names(jaxpr: Jaxpr, names: Mapping[tuple[Path, Var], str], path: Path = ()) -> Jaxpr:
    """Return `jaxpr` with a `name` right behind the definition of each variable in `names`; all uses read the name.

    The name stands behind the definition and not where the user tagged the value: the derivatives of exp, tanh, rsqrt
    and of custom rules read their own output, which they would otherwise need from before the tag, hence recompute.
    """
    eqns: list[JaxprEqn] = []

    def named(var: Var, like: JaxprEqn | None) -> Var:
        if (path, var) not in names:
            return var
        fresh = Var(var.aval)
        source = (like.source_info, like.ctx) if like else ()
        behind.append(new_jaxpr_eqn([fresh], [var], name_p, {"name": names[path, var]}, set(), *source))
        return fresh

    behind: list[JaxprEqn] = []
    invars = [named(var, None) for var in jaxpr.invars]
    eqns += behind
    for i, eqn in enumerate(jaxpr.eqns):
        behind = []
        eqn = map_bodies(eqn, lambda place, body: write_names(body, names, (*path, i, place)))
        outvars = [named(var, eqn) for var in eqn.outvars]
        eqns += [eqn.replace(outvars=outvars) if behind else eqn, *behind]
    return with_eqns(jaxpr, eqns, invars)


def mark_dots(jaxpr: Jaxpr) -> Jaxpr:
    """Return `jaxpr` with a name behind each matmul without batch dimensions, except inside custom rules.

    This is done before differentiation, so that matmuls of tangents are not marked.
    """
    is_dot = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqn = map_bodies(eqn, lambda _, body: mark_dots(body))
        if not is_dot(eqn.primitive, *[v.aval for v in eqn.invars], **eqn.params):
            eqns.append(eqn)
            continue
        fresh = Var(eqn.outvars[0].aval)
        params = {"name": DOT.text}
        eqns.append(eqn.replace(outvars=[fresh, *eqn.outvars[1:]]))
        eqns.append(new_jaxpr_eqn([fresh], [eqn.outvars[0]], name_p, params, set(), eqn.source_info, eqn.ctx))
    return with_eqns(jaxpr, eqns)
