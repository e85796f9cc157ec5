"""A plan: what a policy makes of each named value of one function, written into its jaxpr.

A JAX policy sees one equation at a time. What a value's names, its composite and its other uses are it cannot know, so
the decisions are made here, on the whole function after differentiation: every named value gets one name of the plan's
own, and the plan, as JAX's policy, looks at those names alone.
"""

import dataclasses
import functools
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import name_p

from .._errors import Problem
from .._megatron import MODULES
from .._policy import VERDICT, Decision, Policy, PolicyError
from .memory import nbytes
from .names import Name, PlanName, read_names, read_plan_name
from .refusals import refuse_wrong_offload
from .values import DOT, Path, Value, every_equation, named_values, write_names


@dataclasses.dataclass(frozen=True)
class Override:
    """What the layers of one part of a scan do with values marked offload, and why."""

    decision: Decision = "offload"
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One value of a plan: its names, its size a layer in bytes, and what becomes of it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    decision: Decision
    reason: str
    plan_name: str


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The decisions for one function, as rows in order of definition; callable as `jax.checkpoint`'s `policy=`.

    `seen` are all names that a pattern could have matched; `notes` are sentences for the report; `together` are the
    plan's names of values that one kernel computes.
    """

    policy: Policy
    depth: int
    rows: tuple[Row, ...]
    seen: frozenset[str]
    notes: tuple[str, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()

    def __call__(self, prim: Any, *_: Any, **params: Any) -> Any:
        name = read_plan_name(params["name"]) if prim is name_p else None
        return VERDICT[name.decision if name and name.depth == self.depth else "recompute"]

    def __repr__(self) -> str:
        """Short, for it stands in every printed jaxpr."""
        return f"Plan({', '.join(f'{"|".join(r.names) or "dot"}: {r.decision}' for r in self.rows)})"

    @functools.cached_property
    def plan_names(self) -> frozenset[str]:
        """The names that the plan wrote."""
        return frozenset(row.plan_name for row in self.rows)

    @property
    def offloads(self) -> bool:
        """Whether anything is marked offload; the backward pass may still not need it."""
        return any(row.decision == "offload" for row in self.rows)


def make_plan(
    jaxpr: Jaxpr,
    policy: Policy,
    roles: Sequence[str | None],
    layers: Override | None,
    strict: bool,
) -> tuple[Plan, Jaxpr]:
    """The plan of a differentiated function, and its jaxpr with the plan's names.

    Args:
      jaxpr: primals and tangents in, primals and tangents out.
      roles: of each input: "carry" (a scan's state: never computed again), "weight" (never moved or copied),
        "argument" (moved only if tagged and marked offload), None (a tangent).
      layers: the part of a scan that runs the function; None outside a scan.
      strict: a pattern that matches nothing is an error.

    Raises:
      PolicyError: a pattern matches no value, or two names of one value have different decisions.
    """
    plan, written = decide(jaxpr, policy, roles, layers, strict)
    if plan.offloads:
        refuse_wrong_offload()
    return plan, write_names(jaxpr, written)


def decide(
    jaxpr: Jaxpr,
    policy: Policy,
    roles: Sequence[str | None],
    layers: Override | None,
    strict: bool,
    primal: Jaxpr | None = None,
) -> tuple[Plan, dict[tuple[Path, Var], PlanName]]:
    """The plan, and the names that it writes behind values' definitions; the arguments are those of `make_plan`.

    `primal` is the function before it was differentiated. Names that only it has, in bodies which a custom rule
    replaces, are no residuals, but a pattern may match them.
    """
    values, slots, kernels, depth = named_values(jaxpr, roles)
    having = _having(values)
    labels = _labels(values, having)
    decided: dict[Value, tuple[Decision, str]] = {}
    problems: list[Problem] = []
    for value in values:
        try:
            whole = _bytes_of_whole(value, having)
            decided[value] = _decide(value, labels[value], whole, policy, layers or Override())
        except PolicyError as conflict:
            problems += conflict.problems
    problems += _slot_conflicts(slots, decided)
    everything = all_names(jaxpr) | (all_names(primal) if primal else set())
    seen = everything.union(*labels.values())
    problems += policy.unmatched(seen) if strict else []
    if problems:
        raise PolicyError(dict.fromkeys(problems))

    rows = [_row(value, labels[value], *decided[value]) for value in values]
    digest = f"{zlib.crc32(repr((policy, layers, rows)).encode()):08x}"
    names = [
        PlanName(row.decision, depth, digest, i, tuple(v.names))
        for i, (row, v) in enumerate(zip(rows, values, strict=True))
    ]
    rows = [dataclasses.replace(row, plan_name=str(name)) for row, name in zip(rows, names, strict=True)]
    name_of = {v: str(name) for v, name in zip(values, names, strict=True)}
    together = tuple(tuple(name_of[v] for v in results) for results in kernels if len(results) > 1)
    written = {
        (v.path, v.var): name for v, row, name in zip(values, rows, names, strict=True) if row.reason != ARGUMENT
    }
    return Plan(policy, depth, tuple(rows), frozenset(seen), _notes(values, policy, primal), together), written


def _row(value: Value, labels: tuple[str, ...], decision: Decision, reason: str) -> Row:
    return Row(labels, tuple(value.aval.shape), str(value.aval.dtype), nbytes(value.aval), decision, reason, "")


def _slot_conflicts(slots: list[list[Value]], decided: dict[Value, tuple[Decision, str]]) -> Iterator[Problem]:
    """A problem for each result of a `cond` that is to be saved from one branch and offloaded from another."""
    for slot in slots:
        found = {}
        for value in slot:
            if value in decided and not value.role:
                decision, reason = decided[value]
                found[decision] = f"{value.names[0].text!r} is {decision} by {reason!r}"
        if found.keys() >= {"save", "offload"}:
            each = f"{found['save']} and {found['offload']}"
            why = f"names that share one result of a cond have different decisions: {each}; give them one"
            yield Problem("residuals", f"residuals: {why}")


ARGUMENT = "argument"


def _decide(value: Value, labels: Sequence[str], whole: int, policy: Policy, layers: Override) -> tuple[Decision, str]:
    """A value's decision and the reason for it, in the order that the rules take precedence. `whole`: bytes of the
    composite that it is part of."""
    tagged = [n for n in value.names if n != DOT]
    decision, reason = _by_policy(tagged, labels, value, policy)
    if decision == "offload":
        if whole < int(policy.min_offload_bytes):
            decision, reason = "save", "smaller than min_offload_bytes"
        elif layers.decision != "offload":
            decision, reason = layers.decision, layers.reason
    if value.role == "carry" and decision == "recompute":
        return "save", "carry"
    if value.role == "weight" or (value.role == "argument" and decision != "offload"):
        return "save", ARGUMENT
    return decision, reason


def _by_policy(tagged: list[Name], labels: Sequence[str], value: Value, policy: Policy) -> tuple[Decision, str]:
    if any(n.keep for n in tagged):
        return "save", "keep=True"
    if not tagged:
        return policy.dots, "dots"
    if not jnp.issubdtype(value.aval.dtype, jnp.inexact):
        return "save", "integers are always saved"
    hits = {n.text: policy.match(label, n.text) for n, label in zip(tagged, labels, strict=True)}
    matched = {text: hit for text, hit in hits.items() if hit}
    if len({decision for _, decision in matched.values()}) > 1:
        each = " and ".join(f"{t!r} is {d} by {policy.source(p)}" for t, (p, d) in matched.items())
        why = f"one value has several names with different decisions: {each}; give them one"
        raise PolicyError([Problem("residuals", f"residuals: {why}")])
    if not matched:
        return policy.default, "default"
    pattern, decision = next(iter(matched.values()))
    return decision, policy.reason(pattern)


def _having(values: list[Value]) -> dict[str, list[Value]]:
    """The values that have each name, in order; several where one name was given more than once."""
    having = defaultdict(list)
    for value in values:
        for text in dict.fromkeys(n.text for n in value.names):
            having[text].append(value)
    return having


def _labels(values: list[Value], having: dict[str, list[Value]]) -> dict[Value, tuple[str, ...]]:
    """The names of each value as the report shows them: `context.0`, `context.1` where one name covers several."""
    label = lambda v, text: text if len(having[text]) == 1 else f"{text}.{having[text].index(v)}"
    return {v: tuple(label(v, n.text) for n in v.names if n != DOT) for v in values}


def _bytes_of_whole(value: Value, having: dict[str, list[Value]]) -> int:
    """Bytes of the composite that a value is a leaf of, all leaves together.

    Where composites of one name follow each other, each is judged alone: the first leaves are one, the second another.
    """
    sizes = [nbytes(value.aval)]
    for name in value.names:
        if name.text != name.composite:
            nth = having[name.text].index(value)
            leaves = [of[nth] for text, of in having.items() if text.startswith(f"{name.composite}.") and nth < len(of)]
            sizes.append(sum(nbytes(leaf.aval) for leaf in dict.fromkeys(leaves)))
    return max(sizes)


def all_names(jaxpr: Jaxpr) -> set[str]:
    """All names in a jaxpr, wherever; and what the plans inside it have seen."""
    found: set[str] = set()
    for eqn, _ in every_equation(jaxpr):
        found |= _names_of(eqn)
        for value in eqn.params.values():
            if isinstance(seen := getattr(value, "seen", None), frozenset):
                found |= seen
    return found


def _names_of(eqn: JaxprEqn) -> set[str]:
    return {n.text for n in read_names(eqn.params["name"]) if n != DOT} if eqn.primitive is name_p else set()


def dots_matched_nothing(policy: Policy) -> str:
    return f"dots: {policy.dots} matched nothing: the function has no untagged matrix product without batch dimensions"


def _notes(values: list[Value], policy: Policy, primal: Jaxpr | None) -> tuple[str, ...]:
    notes = [f"offload_modules: {module} -> {', '.join(MODULES[module])}" for module in policy.offload_modules]
    if policy.dots != "recompute" and not any(v.names == [DOT] for v in values):
        notes.append(dots_matched_nothing(policy))
    have = {n.text for v in values for n in v.names}
    for eqn, replaced in every_equation(primal) if primal else ():
        if replaced:
            notes += [
                f"{name!r} is only named where a custom derivative rule replaces it, and is no residual"
                for name in sorted(_names_of(eqn) - have)
            ]
    return tuple(dict.fromkeys(notes))
