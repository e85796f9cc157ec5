"""A plan: what a policy decides on each named value of one function, written into its jaxpr.

A JAX policy sees one equation at a time, and cannot know a value's other names, its composite and its other uses. So
the decisions are made here, on the whole function after differentiation: every named value gets one name that the plan
writes, and the plan, as JAX's policy, reads those names alone.
"""

import dataclasses
import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import name_p

from ..._errors import Problem
from ..._jax import CUSTOM_RULES, nbytes
from ..._megatron import MODULES
from ..._names import PlanName, read_names
from ..._policy import VERDICT, Decision, Policy, PolicyError
from ..._refusals import refuse_wrong_offload
from ..jaxprs.values import DOT, Path, Value, named_values, write_names
from ..jaxprs.walk import walk
from .jax_patches import let_residuals_be_on_the_host


@dataclasses.dataclass(frozen=True)
class Override:
    """The decision of one segment of a scan on values marked offload, and its reason.

    `rows`: the numbers, in the plan, of the values that it is about; None for all.
    """

    decision: Decision = "offload"
    reason: str = ""
    rows: frozenset[int] | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a plan: a value's names, its bytes per layer, the decision on it, and the plan's name for it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    decision: Decision
    reason: str
    plan_name: PlanName
    kind: "Kind" = "value"


Kind = Literal[
    "value",
    "argument",  # saved as it exists anyway, or a weight, which is never moved
    "overridden",  # the policy says offload, but an `Override` says what is done
]


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The decisions for one function; callable as `jax.checkpoint`'s `policy=`."""

    policy: Policy
    rows: tuple[Row, ...]  # one for each value, in order of definition
    seen: frozenset[str]  # all names that a pattern could have matched
    notes: tuple[str, ...] = ()  # remarks for the table
    together: tuple[tuple[PlanName, ...], ...] = ()  # for each kernel with several results, the plan's names of these

    def __call__(self, prim: Any, *_: Any, **params: Any) -> Any:
        name = params["name"] if prim is name_p else None
        return VERDICT[name.decision if name in self.plan_names else "recompute"]

    def __repr__(self) -> str:
        """Return a short text, for it stands in every printed jaxpr."""
        return f"Plan({', '.join(f'{"|".join(r.names) or "dot"}: {r.decision}' for r in self.rows)})"

    @functools.cached_property
    def plan_names(self) -> frozenset[PlanName]:
        """The names that the plan wrote."""
        return frozenset(row.plan_name for row in self.rows)

    @property
    def offloads(self) -> bool:
        """True if any value is marked offload, even one that the backward pass does not need."""
        return any(row.decision == "offload" for row in self.rows)


def make_plan(
    jaxpr: Jaxpr, policy: Policy, roles: Sequence[str], override: Override | None, strict: bool
) -> tuple[Plan, Jaxpr]:
    """Return the plan of a differentiated function, and its jaxpr with the plan's names.

    Args:
      jaxpr: (primals, tangents) -> (primals, tangents).
      roles: what each input before the tangents is: "carry" (a scan's state: never recomputed), "weight" (never moved
        or copied), "argument" (moved only if tagged and marked offload).
      override: of the segment of a scan that runs the function; None outside a scan.
      strict: whether a pattern that matches nothing is an error.

    Raises:
      PolicyError: a pattern matches no value, or two names of one value have different decisions.
    """
    plan, writes = decide(jaxpr, policy, roles, override, strict)
    if plan.offloads:
        refuse_wrong_offload()
        let_residuals_be_on_the_host()
    return plan, write_names(jaxpr, writes)


def decide(
    jaxpr: Jaxpr,
    policy: Policy,
    roles: Sequence[str],
    override: Override | None,
    strict: bool,
    primal: Jaxpr | None = None,
) -> tuple[Plan, dict[tuple[Path, Var], PlanName]]:
    """Return the plan, and the names that it writes behind values' definitions; arguments are those of `make_plan`.

    `primal` is the function before it was differentiated. Names that only it has, in bodies that a custom rule
    replaces, are not residuals, but a pattern may match them.
    """
    values, slots, kernels = named_values(jaxpr, roles)
    by_name = _by_name(values)
    labels = _labels(values, by_name)
    decided, problems = _decide_each(labels, by_name, policy, override or Override())
    problems += _slot_conflicts(slots, decided)
    seen = all_names(jaxpr).union(all_names(primal) if primal else (), *labels.values())
    problems += policy.unmatched(seen) if strict else []
    if problems:
        raise PolicyError(dict.fromkeys(problems))
    inner = [name for site in walk(jaxpr) if isinstance(name := site.eqn.params.get("name"), PlanName)]
    names = _plan_names(decided, (policy, override, inner))
    together = tuple(tuple(names[v] for v in results) for results in kernels if len(results) > 1)
    writes = {(d.value.path, d.value.var): names[d.value] for d in decided if d.kind != "argument"}
    notes = _notes(values, policy, primal)
    return Plan(policy, _rows(decided, names), frozenset(seen), notes, together), writes


class _Decided(NamedTuple):
    """The decision on one value; `labels` are its names as the table shows them."""

    value: Value
    labels: tuple[str, ...]
    decision: Decision
    reason: str
    kind: Kind


def _plan_names(decided: list[_Decided], key: Any) -> dict[Value, PlanName]:
    """Return the name that the plan writes for each value; `key` and the decisions tell plans apart."""
    whole = key, [(d.value.names, d.value.aval.shape, str(d.value.aval.dtype), d.decision, d.reason) for d in decided]
    digest = hashlib.blake2b(repr(whole).encode(), digest_size=8).hexdigest()
    return {d.value: PlanName(d.decision, digest, i, tuple(d.value.names)) for i, d in enumerate(decided)}


def _rows(decided: list[_Decided], names: dict[Value, PlanName]) -> tuple[Row, ...]:
    """Return the plan's table."""
    parts = [(d, d.value.aval, names[d.value]) for d in decided]
    return tuple(
        Row(d.labels, tuple(x.shape), str(x.dtype), nbytes(x), d.decision, d.reason, n, d.kind) for d, x, n in parts
    )


def _slot_conflicts(slots: list[list[Value]], decided: list[_Decided]) -> Iterator[Problem]:
    """Yield a problem for each result of a `cond` that is to be saved from one branch and offloaded from another."""
    at = {d.value: d for d in decided if not d.value.role}
    for slot in slots:
        by = {at[v].decision: f"{v.names[0].text!r} is {at[v].decision} by {at[v].reason!r}" for v in slot if v in at}
        if by.keys() >= {"save", "offload"}:
            each = f"{by['save']} and {by['offload']}"
            why = f"names that share one result of a cond have different decisions: {each}; give them one"
            yield Problem("residuals", f"residuals: {why}")


def _decide_each(
    labels: dict[Value, tuple[str, ...]], by_name: dict[str, list[Value]], policy: Policy, override: Override
) -> tuple[list[_Decided], list[Problem]]:
    """Return the decision on each value, and what is wrong with the policy for the others."""
    decided: list[_Decided] = []
    problems: list[Problem] = []
    for value, names in labels.items():
        try:
            decision, reason = _by_policy(value, names, policy)
        except PolicyError as conflict:
            problems += conflict.problems
            continue
        kind: Kind = "value"
        if decision == "offload":
            if _composite_bytes(value, by_name) < int(policy.min_offload_bytes):
                decision, reason = "save", "smaller than min_offload_bytes"
            elif override.decision != "offload" and (override.rows is None or len(decided) in override.rows):
                decision, reason, kind = override.decision, override.reason, "overridden"
        if value.role == "carry" and decision == "recompute":
            decision, reason, kind = "save", "carry", "value"
        elif value.role == "weight" or (value.role == "argument" and decision != "offload"):
            decision, reason, kind = "save", "argument", "argument"
        decided.append(_Decided(value, names, decision, reason, kind))
    return decided, problems


def _by_policy(value: Value, labels: Sequence[str], policy: Policy) -> tuple[Decision, str]:
    """Return the policy's decision on a value and the reason, by the rules in their order of precedence."""
    tagged = [n for n in value.names if n != DOT]
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


def _by_name(values: list[Value]) -> dict[str, list[Value]]:
    """Return the values of each name, in order; several where one name was given more than once."""
    by_name = defaultdict(list)
    for value in values:
        for text in dict.fromkeys(n.text for n in value.names):
            by_name[text].append(value)
    return by_name


def _labels(values: list[Value], by_name: dict[str, list[Value]]) -> dict[Value, tuple[str, ...]]:
    """Return each value's names as the table shows them: `context.0`, `context.1` where one name covers several."""
    label = lambda v, text: text if len(by_name[text]) == 1 else f"{text}.{by_name[text].index(v)}"
    return {v: tuple(label(v, n.text) for n in v.names if n != DOT) for v in values}


def _composite_bytes(value: Value, by_name: dict[str, list[Value]]) -> int:
    """Return the bytes of the composite that a value is a leaf of, all leaves together.

    Composites that share a name are judged one by one: the first value of each leaf's name belongs to the first.
    """
    sizes = [nbytes(value.aval)]
    for name in value.names:
        if name.text != name.composite:
            nth = by_name[name.text].index(value)
            leaves = [
                of[nth] for text, of in by_name.items() if text.startswith(f"{name.composite}.") and nth < len(of)
            ]
            sizes.append(sum(nbytes(leaf.aval) for leaf in dict.fromkeys(leaves)))
    return max(sizes)


def all_names(jaxpr: Jaxpr) -> set[str]:
    """Return all names in a jaxpr and its nested ones, and those that the plans in it have seen."""
    names: set[str] = set()
    for site in walk(jaxpr):
        names |= _names_of(site.eqn)
        for value in site.eqn.params.values():
            if isinstance(seen := getattr(value, "seen", None), frozenset):
                names |= seen
    return names


def _names_of(eqn: JaxprEqn) -> set[str]:
    return {n.text for n in read_names(eqn.params["name"]) if n != DOT} if eqn.primitive is name_p else set()


def matched_nothing(policy: Policy) -> dict[str, str]:
    """Return the note on each field that decides about values of a kind, if the function has none of that kind."""
    kinds = {"dots": "untagged matmul without batch dimensions", "default": "tagged value"}
    given = {field: getattr(policy, field) for field in kinds}
    return {
        field: f"{field}: {decision} matched nothing: the function has no {kinds[field]}"
        for field, decision in given.items()
        if decision != "recompute"
    }


def _notes(values: list[Value], policy: Policy, primal: Jaxpr | None) -> tuple[str, ...]:
    notes = [f"offload_modules: {module} -> {', '.join(MODULES[module])}" for module in policy.offload_modules]
    have = {"dots" if v.names == [DOT] else "default" for v in values if v.names}
    notes += [note for field, note in matched_nothing(policy).items() if field not in have]
    kept = {n.text for v in values for n in v.names}
    for site in walk(primal) if primal else ():
        if any(eqn.primitive.name in CUSTOM_RULES for eqn in site.enclosing):
            notes += [
                f"{name!r} is only named where a custom derivative rule replaces it, and is not a residual"
                for name in sorted(_names_of(site.eqn) - kept)
            ]
    return tuple(dict.fromkeys(notes))
