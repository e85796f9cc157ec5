"""residuals(): the table of what the backward pass of a function finds, where, and why; check(): no pattern is idle.

Nothing is run. The function and its gradient are traced once; the residuals are the leaves of the VJP, each followed
back to the name that a plan gave it. So the table holds what autodiff keeps, not what the policy asked for.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import name_p

from ._checkpoint import checkpoint, checkpoint_p, for_all_inputs, plan_key
from ._memory import nbytes, on_host
from ._plan import ARGUMENT, Plan, Row, make_plan
from ._policy import Policy, PolicyError
from ._tags import read_plan_name
from ._values import bodies

SAVED, OFFLOADED, RECOMPUTED, NOT_NEEDED = "saved", "offloaded", "recomputed", "not needed"


@dataclasses.dataclass(frozen=True)
class Residual:
    """One line of the table.

    Attributes:
      names: all names of the value; empty for an untagged one, then `reason` says where it comes from.
      shape, dtype: of one layer's value, as traced (global under auto and explicit mesh axes, local in `shard_map`).
      bytes_per_layer, layers, bytes: `bytes` is what is kept (saved, offloaded) or what is computed again.
      state: "saved" (device), "offloaded" (pinned host), "recomputed", or "not needed": the backward pass does not
        read it, 0 bytes.
      decision: what the policy asked for; None for an untagged residual.
      reason: the pattern or rule that decided.
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
        """Kept on the device though nobody tagged it; part of `device_bytes`."""
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
            f"device {_size(self.device_bytes)} (untagged {_size(self.untagged_bytes)}) · "
            f"host {_size(self.host_bytes)} · recomputed {_size(self.recomputed_bytes)}"
        )
        return "\n".join([*text, *self.notes])


def _cells(r: Residual) -> tuple[str, ...]:
    name = ", ".join(r.names) or "(untagged)"
    shape = f"{r.dtype}[{','.join(map(str, r.shape))}]"
    return name, shape, _size(r.bytes_per_layer), str(r.layers), _size(r.bytes), r.state, r.reason


def _size(n: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n} B"


def residuals(f: Callable[..., Any], *args: Any, policy: Policy | None = None) -> Residuals:
    """What the backward pass of `f` finds: every tagged value of every `scan` and `checkpoint` in it, and the rest.

    Args:
      f: the function that you differentiate (a loss, a layer), with respect to all floating-point inputs.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s. Nothing is allocated or run.
      policy: treat `f` as `checkpoint(f, policy=policy)`.

    Returns:
      The table. Arguments of `f` that the backward pass reads (weights) are there anyway and not part of it.

    Raises:
      PolicyError: as the `scan`s and `checkpoint`s in `f` do.
    """
    fun = checkpoint(f, policy=policy) if policy else f
    kept_leaves = 0

    def forward_and_backward(*args: Any) -> Any:
        nonlocal kept_leaves
        out, vjp = jax.vjp(fun, *args)
        kept = jax.tree.leaves(vjp)
        kept_leaves = len(kept)
        return kept, vjp(jax.tree.map(_zero_cotangent, out))

    jaxpr = jax.make_jaxpr(forward_and_backward)(*args)
    plans, recomputed = _plans(jaxpr)
    rows = _side_by_side(row for plan in plans for row in plan.rows)
    kept: dict[str, list[Var]] = {name: [] for name in rows}
    untagged = []
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    for var in dict.fromkeys(v for v in jaxpr.outvars[:kept_leaves] if isinstance(v, Var) and v not in arguments):
        plan_name, where = _origin(jaxpr, var)
        if plan_name in kept:
            kept[plan_name].append(var)
        else:
            untagged.append(_untagged(var.aval, where))
    tagged = [_tagged(row, kept[name], recomputed[name]) for name, row in rows.items()]
    notes = dict.fromkeys(note for plan in plans for note in plan.notes)
    return Residuals((*tagged, *untagged), tuple(notes))


def _side_by_side(rows: Iterable[Row]) -> dict[str, Row]:
    """Plan name -> row; in order, but the parts of a scan, which have rows of the same names, side by side."""
    groups: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        groups[row.names][row.plan_name] = row
    return {name: row for group in groups.values() for name, row in group.items()}


def _zero_cotangent(out: Any) -> Any:
    if jnp.issubdtype(out.dtype, jnp.inexact):
        return jnp.zeros_like(out)
    return np.zeros(out.shape, jax.dtypes.float0)


def _tagged(row: Row, kept: list[Var], computed_again: int) -> Residual:
    """`computed_again`: in how many layers the backward pass computes the value."""
    total = sum(nbytes(v.aval) for v in kept)
    if kept:
        state = OFFLOADED if on_host(kept[0].aval) else SAVED
        layers = total // row.nbytes if row.nbytes else len(kept)
    elif row.reason == ARGUMENT:
        state, layers = SAVED, 0
    elif computed_again:
        state, layers, total = RECOMPUTED, computed_again, computed_again * row.nbytes
    else:
        state, layers = NOT_NEEDED, 0
    name = row.names or ("(matrix product)",)
    return Residual(name, row.shape, row.dtype, row.nbytes, layers, total, state, row.decision, row.reason)


def _untagged(aval: Any, where: str) -> Residual:
    state = OFFLOADED if on_host(aval) else SAVED
    size = nbytes(aval)
    return Residual((), tuple(aval.shape), str(aval.dtype), size, 1, size, state, None, where)


def _plans(jaxpr: Jaxpr) -> tuple[list[Plan], dict[str, int]]:
    """The outermost plans of a gradient, in the order of the layers; and for each plan name, in how many layers the
    backward pass computes its value again."""
    outermost: dict[Plan, None] = {}
    nested: set[Plan] = set()  # they decide when the backward pass runs them again, not what it finds
    recomputed: dict[str, int] = defaultdict(int)

    def walk(jaxpr: Jaxpr, times: int, owner: Plan | None) -> None:
        for eqn in jaxpr.eqns:
            inside = owner
            if isinstance(plan := eqn.params.get("policy"), Plan):
                inside = owner or plan
                if owner:
                    nested.add(plan)
                else:
                    outermost[plan] = None
            if owner and eqn.primitive is name_p and eqn.params["name"] in owner.plan_names:
                recomputed[eqn.params["name"]] += times
            for _, body in bodies(eqn):
                walk(body, times * eqn.params.get("length", 1), inside)

    walk(jaxpr, 1, None)
    # The backward pass meets the last part of a function first.
    return [plan for plan in reversed(outermost) if plan not in nested], recomputed


def _origin(jaxpr: Jaxpr, var: Var) -> tuple[str | None, str]:
    """The plan name behind a residual, or None; and in words where it comes from."""
    producer: dict[Var, JaxprEqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    while var in producer:
        eqn = producer[var]
        prim = eqn.primitive.name
        if prim == "name" and read_plan_name(eqn.params["name"]):
            return eqn.params["name"], "an inner plan"
        if prim not in ("name", "reduce_precision", "device_put"):
            return _inner_origin(eqn, eqn.outvars.index(var))
        if isinstance(eqn.invars[0], Literal):
            return None, "a constant"
        var = eqn.invars[0]
    return None, "an input"


def _inner_origin(eqn: JaxprEqn, index: int) -> tuple[str | None, str]:
    prim = eqn.primitive.name
    for _, body in bodies(eqn):
        inner = body.outvars[index]
        if isinstance(inner, Var):
            name, where = _origin(body, inner)
            if name:
                return name, where
            if prim == "scan":
                return None, "the carry of a scan" if where == "an input" else f"{where}, in a scan"
            if prim != "cond":
                return None, where
    return None, f"output of {prim}"


def check(policy: Policy, f: Callable[..., Any], *args: Any) -> None:
    """Raise if a pattern of `policy` matches no tagged value in any `scan` or `checkpoint` under it in `f`.

    For models of several stacks, whose `scan`s and `checkpoint`s pass `strict=False`, and for functions that give the
    policy to `jax.checkpoint`, `nn.remat` or `nnx.remat`. One trace of `f` is judged; nothing is run.

    Args:
      policy: the policy that `f` uses.
      f: a training step, or a loss.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s.

    Raises:
      PolicyError: it names each such pattern, the names seen and the nearest.
      ValueError: nothing in `f` uses `policy`.
    """
    seen = _names_under(jax.make_jaxpr(f)(*args), policy)
    if seen is None:
        raise ValueError("check: no scan, checkpoint or jax.checkpoint in the function has this policy; pass the same")
    if problems := policy.unmatched(seen):
        raise PolicyError(problems)


def _names_under(jaxpr: Jaxpr, policy: Policy) -> set[str] | None:
    """The names that a policy could match, of all that is under it; None where nothing is."""
    found: list[frozenset[str] | set[str]] = []
    for eqn in jaxpr.eqns:
        used = eqn.params.get("policy")
        if isinstance(used, Plan) and used.policy == policy:
            found.append(used.seen)
        elif used == policy and eqn.primitive is checkpoint_p:
            params = {**eqn.params, "strict": False}
            found.append(for_all_inputs(params.pop("jaxpr"), *plan_key(**params)).plan.seen)
        elif used == policy:  # JAX's own checkpoint, with the policy as its callable
            body = eqn.params["jaxpr"]
            found.append(make_plan(body, policy, ["argument"] * len(body.invars), None, False)[0].seen)
        found += [inner for _, body in bodies(eqn) if (inner := _names_under(body, policy)) is not None]
    return set().union(*found) if found else None
