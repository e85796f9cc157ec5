"""A plan: what a policy makes of each named value of one function, written into its jaxpr.

A JAX policy sees one equation at a time. What a value's names, its composite and its other uses are it cannot know, so
the decisions are made here, on the whole function after differentiation: every named value gets one name of the plan's
own, and the plan, as JAX's policy, looks at those names alone.
"""

import dataclasses
import functools
import warnings
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var
from jax.extend.core.primitives import name_p

from ._memory import nbytes
from ._policy import VERDICT, Decision, Policy, PolicyError
from ._tags import Name, PlanName, read_plan_name
from ._values import DOT, Path, Value, named_values, write_names
from ._xla import refuse_wrong_offload


@dataclasses.dataclass(frozen=True)
class Layers:
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

    `seen` are all names that a pattern could have matched; `notes` are sentences for the report.
    """

    policy: Policy
    depth: int
    rows: tuple[Row, ...]
    seen: frozenset[str]
    notes: tuple[str, ...] = ()

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
    jaxpr: Jaxpr, policy: Policy, roles: Sequence[str | None], layers: Layers | None, strict: bool
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
    values, depth = named_values(jaxpr, roles)
    labels = _labels(values)
    composites = _composite_bytes(values)
    digest = f"{zlib.crc32(repr((policy, layers)).encode()):08x}"
    rows: list[Row] = []
    written: dict[tuple[Path, Var], PlanName] = {}
    conflicts: list[str] = []
    for index, value in enumerate(values):
        try:
            decision, reason = _decide(value, labels[value], composites, policy, layers or Layers())
        except PolicyError as conflict:
            conflicts += conflict.problems
            continue
        name = PlanName(decision, depth, digest, index, tuple(value.names))
        size = nbytes(value.aval)
        shape, dtype = tuple(value.aval.shape), str(value.aval.dtype)
        rows.append(Row(labels[value], shape, dtype, size, decision, reason, str(name)))
        if reason != ARGUMENT:
            written[value.path, value.var] = name
    seen = frozenset(label for of_one in labels.values() for label in of_one)
    seen |= {n.text for v in values for n in v.names if n != DOT}
    problems = conflicts + (policy.unmatched(seen) if strict else [])
    if problems:
        raise PolicyError(problems)
    plan = Plan(policy, depth, tuple(rows), seen, _notes(values, policy, layers))
    if plan.offloads:
        refuse_wrong_offload()
    return plan, write_names(jaxpr, written)


ARGUMENT = "argument"


def _decide(
    value: Value, labels: Sequence[str], composites: dict[str, int], policy: Policy, layers: Layers
) -> tuple[Decision, str]:
    """A value's decision and the reason for it, in the order that the rules take precedence."""
    tagged = [n for n in value.names if n != DOT]
    decision, reason = _by_policy(tagged, labels, value, policy)
    if decision == "offload":
        size = max((composites[n.composite] for n in tagged), default=nbytes(value.aval))
        if size < int(policy.min_offload_bytes):
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
        each = " and ".join(f"{t!r} is {d} by residuals[{p!r}]" for t, (p, d) in matched.items())
        raise PolicyError([f"residuals: one value has several names with different decisions: {each}; give them one"])
    if not matched:
        return policy.default, "default"
    pattern, decision = next(iter(matched.values()))
    return decision, pattern


def _labels(values: list[Value]) -> dict[Value, tuple[str, ...]]:
    """The names of each value as the report shows them: `context.0`, `context.1` where one name covers several."""
    having = defaultdict(list)
    for value in values:
        for name in value.names:
            having[name.text].append(value)
    label = lambda value, text: text if len(having[text]) == 1 else f"{text}.{having[text].index(value)}"
    return {v: tuple(label(v, n.text) for n in v.names if n != DOT) for v in values}


def _composite_bytes(values: list[Value]) -> dict[str, int]:
    """Bytes of each composite, all its leaves together."""
    total: dict[str, int] = defaultdict(int)
    for value in values:
        for composite in {n.composite for n in value.names}:
            total[composite] += nbytes(value.aval)
    return total


def _notes(values: list[Value], policy: Policy, layers: Layers | None) -> tuple[str, ...]:
    notes = []
    if layers is None:
        notes.append("checkpoint has no layers: resident_layers, offload_layers and other_layers do not apply")
    if policy.dots != "recompute" and not any(v.names == [DOT] for v in values):
        notes.append(
            f"dots: {policy.dots} matched nothing: the function has no untagged matrix product without batch dimensions"
        )
        warnings.warn(f"jaxoffload: {notes[-1]}", stacklevel=2)
    return tuple(notes)
