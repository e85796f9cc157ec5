"""residuals(): the table of what the backward pass of a function finds, where, and why; check(): no pattern is idle.

Nothing is run. The function and its gradient are traced once; the residuals are the leaves of the VJP, each followed
back to the name that a plan gave it. So the table holds what autodiff keeps, not what the policy asked for.
"""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import name_p, remat_p

from ._chain import chain_p
from ._checkpoint import checkpoint, checkpoint_p, judged
from ._layer import Body, plan_of
from ._loops import backward_p, forward_p, where_twice
from ._memory import nbytes, on_host, readable
from ._origin import Origin, origin
from ._plan import ARGUMENT, Plan, Row, make_plan
from ._policy import Policy, PolicyError, accept
from ._scan import scan_p
from ._values import bodies, parts_of

SAVED, OFFLOADED, RECOMPUTED, NOT_NEEDED = "saved", "offloaded", "recomputed", "not needed"
EMPTY = "a row that stays empty"


@dataclasses.dataclass(frozen=True)
class Residual:
    """One line of the table.

    Attributes:
      names: all names of the value; empty for an untagged one, then `reason` says where it comes from.
      shape, dtype: of one layer's value, as traced (global under auto and explicit mesh axes, local in `shard_map`);
        of a scan in a scan, of one turn of both.
      bytes_per_layer, layers, bytes: what is kept (saved, offloaded) or computed again; of `shard_map`'s shards
        together. A row of a stack on the host that stays empty is a line with bytes, and of no layer.
      state: "saved" (device), "offloaded" (pinned host), "recomputed", or "not needed": the backward pass does not
        read it, 0 bytes.
      decision: what the policy asked for; None for an untagged residual.
      reason: the pattern or rule that decided.
      count: how many values of that shape a layer has: one for each shard of a `shard_map`; 1 where none is needed.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes_per_layer: int
    layers: int
    bytes: int
    state: str
    decision: str | None
    reason: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The residuals of one function; iterate over its `Residual`s, print it, or ask for its totals in bytes."""

    rows: tuple[Residual, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def device_bytes(self) -> int:
        """Kept on the device, untagged residuals included."""
        return self._total(SAVED)

    @property
    def host_bytes(self) -> int:
        """Kept in pinned host memory."""
        return self._total(OFFLOADED)

    @property
    def recomputed_bytes(self) -> int:
        """Tagged values that the backward pass computes again."""
        return self._total(RECOMPUTED)

    @property
    def untagged_bytes(self) -> int:
        """Kept on the device though no plan of jaxoffload's names it; part of `device_bytes`."""
        return sum(r.bytes for r in self.rows if r.decision is None and r.state == SAVED)

    def _total(self, state: str) -> int:
        return sum(r.bytes for r in self.rows if r.state == state)

    def to_json(self) -> str:
        """The table as JSON: `residuals` (a list of the rows), totals in bytes, `notes`."""
        totals = ("device_bytes", "host_bytes", "recomputed_bytes", "untagged_bytes")
        return json.dumps(
            {
                "residuals": [dataclasses.asdict(r) for r in self.rows],
                **{total: getattr(self, total) for total in totals},
                "notes": self.notes,
            }
        )

    def __str__(self) -> str:
        head = ("residual", "shape", "bytes/layer", "layers", "bytes", "state", "reason")
        lines = [head, *(_cells(r) for r in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        right = {2, 3, 4}
        pad = lambda i, cell: cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
        text = ["  ".join(pad(i, cell) for i, cell in enumerate(line)).rstrip() for line in lines]
        text.insert(1, "-" * max(map(len, text)))
        text.append(
            f"device {readable(self.device_bytes)} (untagged {readable(self.untagged_bytes)}) · "
            f"host {readable(self.host_bytes)} · recomputed {readable(self.recomputed_bytes)}"
        )
        return "\n".join([*text, *self.notes])


def _cells(r: Residual) -> tuple[str, ...]:
    name = ", ".join(r.names) or "(untagged)"
    shape = f"{r.dtype}[{','.join(map(str, r.shape))}]"
    shape = f"{r.count} x {shape}" if r.count > 1 else shape
    return name, shape, readable(r.bytes_per_layer), str(r.layers), readable(r.bytes), r.state, r.reason


def residuals(f: Callable[..., Any], *args: Any, policy: Policy | None = None) -> Residuals:
    """What the backward pass of `f` finds: every tagged value of every `scan`, `chain` and `checkpoint` in it, and the
    rest.

    Args:
      f: the function that you differentiate (a loss, a layer), with respect to all floating-point inputs.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s. Nothing is allocated or run.
      policy: treat `f` as `checkpoint(f, policy=policy)`.

    Returns:
      The table. Arguments of `f` that the backward pass reads (weights) are there anyway and not part of it.

    Raises:
      PolicyError, MemoryError: as the `scan`s, `chain`s and `checkpoint`s in `f` do.
      NotImplementedError: likewise; or `f` differentiates what is in it, as a training step does: give its loss.
    """
    fun = checkpoint(f, policy=policy) if policy else f
    kept_leaves = 0

    def forward_and_backward(*args: Any) -> Any:
        nonlocal kept_leaves
        out, vjp = jax.vjp(fun, *args)
        kept = jax.tree.leaves(vjp)
        kept_leaves = len(kept)
        return kept, vjp(jax.tree.map(_zero_cotangent, out))

    with where_twice("residuals", _IS_A_STEP):
        jaxpr = jax.make_jaxpr(forward_and_backward)(*args)
    found = Plans(jaxpr)
    kept: dict[str, list[tuple[Var, Origin]]] = defaultdict(list)
    untagged = []
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    for var in dict.fromkeys(v for v in jaxpr.outvars[:kept_leaves] if isinstance(v, Var) and v not in arguments):
        source = origin(jaxpr, var)
        if not source.layers + source.empty:
            continue  # of a scan over no layers
        if (name := str(source.name)) in found.rows:
            kept[name].append((var, source))
        else:
            untagged.append(_untagged(var.aval, source))
    tagged = [r for name, row in found.rows.items() for r in _tagged(row, kept[name], *found.recomputed[name])]
    notes = [note for plan in found.plans for note in plan.notes] + [_OTHERS_KEEP] * found.others
    return Residuals((*_together(tagged), *untagged), tuple(dict.fromkeys(notes)))


_IS_A_STEP = (
    "the function differentiates what is in it, as a training step does, whose residuals are inside of it; give the "
    "loss that it differentiates"
)
_OTHERS_KEEP = "another checkpoint than jaxoffload's is in the function: what it keeps is shown without its names"


def _zero_cotangent(out: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(out), jnp.inexact):
        return jnp.zeros_like(out)
    return np.zeros(jnp.shape(out), jax.dtypes.float0)


def _tagged(row: Row, kept: list[tuple[Var, Origin]], computed_again: int, bytes_again: int) -> Iterator[Residual]:
    """A value of a plan, once for each state that it is found in."""
    names = row.names or ("(matrix product)",)
    line = lambda a_layer, layers, total, state, decision, reason: Residual(
        names, row.shape, row.dtype, a_layer, layers, total, state, decision, reason, _count(a_layer, row.nbytes)
    )
    for var, source in kept:
        a_layer = nbytes(var.aval) // (source.layers + source.empty)
        state = OFFLOADED if on_host(var.aval) else SAVED
        decision, reason = ("save", source.where) if source.where else (row.decision, row.reason)
        if source.layers:
            yield line(a_layer, source.layers, a_layer * source.layers, state, decision, reason)
        if source.empty:
            yield line(a_layer, 0, a_layer * source.empty, state, decision, EMPTY)
    if computed_again:
        yield line(bytes_again // computed_again, computed_again, bytes_again, RECOMPUTED, row.decision, row.reason)
    if not kept and not computed_again:
        yield line(row.nbytes, 0, 0, SAVED if row.reason == ARGUMENT else NOT_NEEDED, row.decision, row.reason)


def _together(lines: Iterable[Residual]) -> list[Residual]:
    """Lines that differ in layers and bytes alone as one; those of the same names side by side."""
    same: dict[tuple[str, ...], dict[Any, Residual]] = defaultdict(dict)
    for r in lines:
        what = dataclasses.replace(r, layers=0, bytes=0)
        before = same[r.names].get(what, what)
        same[r.names][what] = dataclasses.replace(r, layers=before.layers + r.layers, bytes=before.bytes + r.bytes)
    # What the backward pass does not need in one part of a scan it may need in another.
    needed = lambda of_one: [r for r in of_one if r.layers or r.bytes] or of_one[:1]
    return [r for of_one in same.values() for r in needed(list(of_one.values()))]


def _untagged(aval: Any, source: Origin) -> Residual:
    state = OFFLOADED if on_host(aval) else SAVED
    size, rows = nbytes(aval), source.layers + source.empty
    shape = tuple(aval.shape)[source.axes :]
    count = _count(size // rows, math.prod(shape) * aval.dtype.itemsize)
    return Residual((), shape, str(aval.dtype), size // rows, source.layers, size, state, None, source.where, count)


def _count(together: int, each: int) -> int:
    """Of values with bytes `together` and `each`; an empty one has none."""
    return together // each if together > each > 0 else 1


class Plans:
    """The outermost plans of a gradient, in the order of the layers.

    Attributes:
      rows: by the names that the plans wrote.
      recomputed: for each such name, in how many layers the backward pass computes its value again, and bytes in all.
      overlap: whether there are plans inside of others, or of loops of others.
      others: whether other checkpoints than theirs keep something outside of them, or run them again.
    """

    def __init__(self, jaxpr: Jaxpr):
        self._outermost: dict[Plan, None] = {}
        self._nested: set[Plan] = set()  # they decide when the backward pass runs them again, not what it finds
        self.recomputed: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self.overlap = self.others = False
        self._walk(jaxpr, 1, 1, None)
        # The backward pass meets the last part of a function first.
        self.plans = [plan for plan in reversed(self._outermost) if plan not in self._nested]
        self.rows = {row.plan_name: row for plan in self.plans for row in plan.rows}

    def _walk(
        self,
        jaxpr: Jaxpr,
        layers: int,
        devices: int,
        owner: Plan | None,
        loops: frozenset[Plan] = frozenset(),
        again: bool = False,
    ) -> None:
        """`owner`: the plan of the checkpoint around it; `loops`: those of the scan around it; `again`: whether the
        backward pass runs it again for another checkpoint."""
        for eqn in jaxpr.eqns:
            inside, another = owner, again
            if plan := plan_of(eqn.params.get("policy")):
                inside = owner or plan
                self.others |= again
                self._meet(plan, owner, loops)
            elif eqn.primitive is remat_p and eqn.params["differentiated"]:
                self.others |= eqn.params["policy"] is not None and owner is None and not loops
                another = True
            if owner and eqn.primitive is name_p and (name := eqn.params["name"]) in owner.plan_names:
                count, size = self.recomputed[name]
                self.recomputed[name] = count + layers, size + layers * devices * nbytes(eqn.outvars[0].aval)
            here = devices
            if eqn.primitive.name == "shard_map":
                here *= parts_of(eqn)
            for _, body in bodies(eqn):
                self._walk(body, layers * eqn.params.get("length", 1), here, inside, loops, another)
            if eqn.primitive in (forward_p, backward_p):
                self.others |= again
                plans = [part.layer.plan for part in eqn.params["loops"].parts]
                for plan in plans:
                    self._meet(plan, owner, loops)
                self._walk(eqn.params["jaxpr"], layers, here, owner, frozenset(plans), again)

    def _meet(self, plan: Plan, owner: Plan | None, loops: frozenset[Plan]) -> None:
        self.overlap |= (bool(loops) and plan not in loops) or owner not in (None, plan)
        if owner and plan != owner:
            self._nested.add(plan)
        else:
            self._outermost[plan] = None


def check(policy: Policy, f: Callable[..., Any], *args: Any) -> None:
    """Raise if a pattern of `policy` matches no tagged value in any `scan`, `chain` or `checkpoint` under it in `f`.

    For models of several stacks, which pass `strict=False`, and for functions that give the policy to `jax.checkpoint`,
    `nn.remat` or `nnx.remat`. One trace of `f` is judged; nothing is run.

    Args:
      policy: the policy that `f` uses.
      f: a training step, or a loss.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s.

    Raises:
      PolicyError: it names each such pattern, the names seen and the nearest.
      ValueError: nothing in `f` uses `policy`.
      TypeError: policy is no Policy.
    """
    accept("check", policy)
    seen = _names_under(jax.make_jaxpr(f)(*args), policy)
    if seen is None:
        raise ValueError(
            "check: no scan, chain, checkpoint or jax.checkpoint in the function has this policy; pass the same"
        )
    if problems := policy.unmatched(seen):
        raise PolicyError(problems)


def _names_under(jaxpr: Jaxpr, policy: Policy) -> set[str] | None:
    """The names that a policy could match, of all that is under it; None where nothing is."""
    found: list[frozenset[str] | set[str]] = []
    for eqn in jaxpr.eqns:
        used = eqn.params.get("policy")
        if (plan := plan_of(used)) and plan.policy == policy:
            found.append(plan.seen)
        elif eqn.primitive is forward_p:
            found += [p.layer.plan.seen for p in eqn.params["loops"].parts if p.layer.plan.policy == policy]
        elif used == policy and eqn.primitive in (scan_p, chain_p, checkpoint_p):
            plans = [judged(body, roles, policy, False) for body, roles in _undifferentiated(eqn)]
            found += [plan.seen for plan in plans if plan]
        elif used == policy:  # JAX's own checkpoint, with the policy as its callable
            body = eqn.params["jaxpr"]
            found.append(make_plan(body, policy, ["argument"] * len(body.invars), None, False)[0].seen)
        found += [inner for _, body in bodies(eqn) if (inner := _names_under(body, policy)) is not None]
    return set().union(*found) if found else None


def _undifferentiated(eqn: JaxprEqn) -> list[tuple[Jaxpr, tuple[str, ...]]]:
    """The functions of a `scan`, `chain` or `checkpoint`, each with the roles of its inputs."""
    params = eqn.params
    if eqn.primitive is checkpoint_p:
        return [(params["jaxpr"], params["roles"])]
    if eqn.primitive is scan_p:
        layers = [Body(params["jaxpr"], params["consts"], params["carry"])]
    else:
        layers = [Body(jaxpr, 0, len(eqn.outvars)) for jaxpr in params["jaxprs"]]
    return [(layer.jaxpr, layer.roles) for layer in layers]
