"""The values of a jaxpr that have names: found through nested jaxprs, and named anew at their definitions.

A value is one array, however many variables stand for it: a `name`, a sharding constraint and a `reduce_precision`
that changes nothing pass their operand on, and the operands of a nested jit or branch are the variables inside.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn
from jax.extend.core.primitives import (
    cond_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    name_p,
    reduce_precision_p,
    scan_p,
)

from .._jax import CALLS, IDENTITIES, KERNELS, SHARD_MAP, SLICING, SORTING, partial_eval_rules
from .names import Name, PlanName, read_names, read_plan_name

# Where a variable lives: the equation numbers and parameters that lead to its jaxpr. The same jaxpr object can stand
# at two places, with a value each.
Path = tuple[Any, ...]

# The name that `mark_dots` gives to matrix products, so that they are known after differentiation.
DOT = Name("<dot>")


@dataclasses.dataclass(eq=False)
class Value:
    """One array: where it is defined, and its names. `role` is that of the function's argument that it is, if any."""

    aval: Any
    path: Path
    var: Var
    role: str | None = None
    names: list[Name] = dataclasses.field(default_factory=list)


class Named(NamedTuple):
    """The values of a jaxpr that have a name, in order of definition.

    `slots`: those that share a result of a `cond`, from its branches and behind it. `kernels`: those that are results
    of one kernel. `depth`: how deep plans nest inside of the jaxpr.
    """

    values: list[Value]
    slots: list[list[Value]]
    kernels: list[list[Value]]
    depth: int


def named_values(jaxpr: Jaxpr, roles: Sequence[str | None]) -> Named:
    """The values of `jaxpr` that have a name.

    Of one kernel's results, those without a name have that of the first with one: flash attention's softmax statistics
    that of its output, which is of no use to the backward pass without them.

    `roles`: what each input is to the caller ("carry", "argument", ...).
    """
    found = _Search()
    for var, role in zip(jaxpr.invars, roles, strict=True):
        found.define((), var, role)
    found.walk(jaxpr, ())
    for together in found.kernels:
        first = next((value.names for value in together if value.names), [])
        for value in together:
            value.names = value.names or list(first)
    slots = [[v for v in slot if v is not None and v.names not in ([], [DOT])] for slot in found.slots]
    kernels = [[v for v in together if v.names] for together in found.kernels + found.sortings]
    return Named([v for v in found.values if v.names], slots, kernels, found.depth)


class _Search:
    def __init__(self) -> None:
        self.values: list[Value] = []
        self.at: dict[tuple[Path, Var], Value] = {}
        self.slots: list[list[Value | None]] = []
        self.kernels: list[list[Value]] = []
        self.sortings: list[list[Value]] = []
        self.depth = 0

    def define(self, path: Path, var: Var, role: str | None = None) -> None:
        self.values.append(Value(var.aval, path, var, role))
        self.at[path, var] = self.values[-1]

    def alias(self, path: Path, var: Var, of: Value | None) -> None:
        if of is None:
            self.define(path, var)
        else:
            self.at[path, var] = of

    def value(self, path: Path, atom: Any) -> Value | None:
        return None if isinstance(atom, Literal) else self.at.get((path, atom))

    def seen_inside(self, eqn: JaxprEqn, value: Value | None) -> Value | None:
        """The value that an operand is inside an equation; None if it is one of its own there.

        A shard or a row of an argument is the argument: it is there anyway, and not to be kept a second time. Of any
        other value a shard or a row is another value, with a size and a sharding of its own.
        """
        return value if value is None or value.role or eqn.primitive.name not in SLICING else None

    def walk(self, jaxpr: Jaxpr, path: Path) -> None:
        for i, eqn in enumerate(jaxpr.eqns):
            for key, body in bodies(eqn):
                inside = (*path, i, key)
                for var, operand in zip(body.invars, operands_of(eqn, body), strict=True):
                    self.alias(inside, var, self.seen_inside(eqn, self.value(path, operand)))
                self.walk(body, inside)
                if eqn.primitive.name in CALLS:
                    for var, result in zip(eqn.outvars, body.outvars, strict=True):
                        if (value := self.value(inside, result)) is not None:
                            self.at[path, var] = value
            if eqn.primitive.name in IDENTITIES or keeps_all_bits(eqn):
                self.alias(path, eqn.outvars[0], self.value(path, eqn.invars[0]))
            if eqn.primitive is name_p:
                self.add_names(self.at[path, eqn.outvars[0]], eqn.params["name"])
            for var in eqn.outvars:
                if (path, var) not in self.at:
                    self.define(path, var)
            for kinds, found in ((KERNELS, self.kernels), (SORTING, self.sortings)):
                if eqn.primitive.name in kinds:
                    found.append([self.at[path, var] for var in eqn.outvars])
            if eqn.primitive is cond_p:
                branches = [((*path, i, key), body) for key, body in bodies(eqn)]
                for k, var in enumerate(eqn.outvars):
                    results = [self.value(at, body.outvars[k]) for at, body in branches]
                    self.slots.append([*results, self.at[path, var]])

    def add_names(self, value: Value, text: str) -> None:
        value.names += [n for n in read_names(text) if n not in value.names]
        if plan_name := read_plan_name(text):
            self.depth = max(self.depth, plan_name.depth + 1)


def every_equation(jaxpr: Jaxpr, in_custom: bool = False) -> Iterator[tuple[JaxprEqn, bool]]:
    """All equations, those of bodies that autodiff replaces or does not look into too; and whether a custom rule
    replaces it."""
    for eqn in jaxpr.eqns:
        yield eqn, in_custom
        custom = in_custom or eqn.primitive in (custom_jvp_call_p, custom_vjp_call_p)
        for value in jax.tree.leaves(tuple(eqn.params.values())):
            if isinstance(value, Jaxpr):
                yield from every_equation(value, custom)


def bodies(eqn: JaxprEqn) -> Iterator[tuple[Any, Jaxpr]]:
    """The nested jaxprs that autodiff looks into, each with its place among the equation's parameters."""
    if eqn.primitive not in partial_eval_rules and eqn.primitive.name not in CALLS:
        return
    for key, value in eqn.params.items():
        for k, body in enumerate(value if isinstance(value, (tuple, list)) else [value]):
            if isinstance(body, Jaxpr):
                yield (key, k), body


def nested(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """All jaxprs among an equation's parameters."""
    for value in eqn.params.values():
        for body in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(body, Jaxpr):
                yield body


def devices_of(eqn: JaxprEqn) -> int:
    """Over how many devices a `shard_map` divides what it takes."""
    return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])


def map_bodies(eqn: JaxprEqn, change: Callable[[Any, Jaxpr], Jaxpr]) -> JaxprEqn:
    """The equation with each nested jaxpr replaced by what `change(place, jaxpr)` makes of it; itself if none changes.

    JAX's caches and the functions of an HLO module go by a jaxpr's identity, hence what is as before must stay itself.
    """
    params = dict(eqn.params)
    changed = False
    for (key, k), body in bodies(eqn):
        new = change((key, k), body)
        old = params[key]
        params[key] = type(old)([*old[:k], new, *old[k + 1 :]]) if isinstance(old, (tuple, list)) else new
        changed |= new is not body
    return eqn.replace(params=params) if changed else eqn


def operands_of(eqn: JaxprEqn, body: Jaxpr) -> Sequence[Any]:
    """For each input of a nested jaxpr, the outer variable that is the same value; None where there is none."""
    if eqn.primitive.name in CALLS:
        return eqn.invars
    if eqn.primitive is cond_p:
        return eqn.invars[1:]
    if eqn.primitive.name == SHARD_MAP:
        return eqn.invars
    if eqn.primitive is scan_p:
        return [None if carried else v for v, carried in zip(eqn.invars, _carried(eqn, body), strict=True)]
    return [None] * len(body.invars)


def _carried(eqn: JaxprEqn, body: Jaxpr) -> list[bool]:
    """Which inputs of a scan's body are its carry: neither constants, which come first, nor xs, which are rows."""
    is_part = lambda inside, whole: inside.aval.ndim < whole.aval.ndim
    is_row = list(map(is_part, body.invars, eqn.invars))
    carry = len(body.outvars) - sum(map(is_part, body.outvars, eqn.outvars))
    first_row = len(is_row) - sum(is_row)
    return [first_row - carry <= i < first_row for i in range(len(is_row))]


def keeps_all_bits(eqn: JaxprEqn) -> bool:
    """JAX puts such a `reduce_precision` behind residuals (https://github.com/jax-ml/jax/pull/22244)."""
    if eqn.primitive is not reduce_precision_p:
        return False
    aval: Any = eqn.invars[0].aval
    info = jnp.finfo(aval.dtype)
    return eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant


def write_names(jaxpr: Jaxpr, names: dict[tuple[Path, Var], PlanName], path: Path = ()) -> Jaxpr:
    """`jaxpr` with a `name` right behind the definition of each variable in `names`; all its uses read the name.

    Behind the definition, not where the user tagged it: the derivatives of exp, tanh, rsqrt and of custom rules read
    their own output, and would otherwise need it from before the tag, hence compute it again.
    """
    eqns: list[JaxprEqn] = []

    def named(var: Var, like: JaxprEqn | None) -> Var:
        if (path, var) not in names:
            return var
        fresh = Var(var.aval)
        source = (like.source_info, like.ctx) if like else ()
        behind.append(new_jaxpr_eqn([fresh], [var], name_p, {"name": str(names[path, var])}, set(), *source))
        return fresh

    behind: list[JaxprEqn] = []
    invars = [named(var, None) for var in jaxpr.invars]
    eqns += behind
    for i, eqn in enumerate(jaxpr.eqns):
        behind = []
        eqn = map_bodies(eqn, lambda key, body: write_names(body, names, (*path, i, key)))
        outvars = [named(var, eqn) for var in eqn.outvars]
        eqns += [eqn.replace(outvars=outvars) if behind else eqn, *behind]
    return with_eqns(jaxpr, eqns, invars)


def with_eqns(jaxpr: Jaxpr, eqns: list[JaxprEqn], invars: Sequence[Var] | None = None) -> Jaxpr:
    """`jaxpr` with these equations; itself where they are its own."""
    if len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns)):
        return jaxpr
    return jaxpr.replace(invars=invars or jaxpr.invars, eqns=eqns)


def mark_dots(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr` with a name behind each matrix product without batch dimensions.

    Done before differentiation, so that the products of tangents are none of them; and not inside custom rules.
    """
    is_dot = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqn = map_bodies(eqn, lambda _, body: mark_dots(body))
        if not is_dot(eqn.primitive, *[v.aval for v in eqn.invars], **eqn.params):
            eqns.append(eqn)
            continue
        fresh = Var(eqn.outvars[0].aval)
        eqns.append(eqn.replace(outvars=[fresh, *eqn.outvars[1:]]))
        eqns.append(
            new_jaxpr_eqn([fresh], [eqn.outvars[0]], name_p, {"name": DOT.text}, set(), eqn.source_info, eqn.ctx)
        )
    return with_eqns(jaxpr, eqns)
