"""residuals(): the table of what the backward pass of a function finds, where, and why; check(): no pattern is idle,
and the host holds what is offloaded.

Nothing is run. The function and its gradient are traced once; the residuals are the leaves of the VJP, each followed
back to the name that a plan gave it. So the table holds what autodiff keeps, not what the policy asked for.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.extend.core.primitives import name_p, remat_p
from jax.ref import AbstractRef

from ._chain import chain_p
from ._checkpoint import checkpoint
from ._engine.checkpointed import checkpoint_p
from ._engine.derivative import full_plan
from ._engine.host_pool import host_pool_bytes, whole_program
from ._engine.layer import Body, plan_of
from ._engine.loops import backward_p, forward_p, where_twice
from ._engine.memory import nbytes, on_host
from ._engine.plan import ARGUMENT, Plan, Row, make_plan
from ._engine.pool_need import need_of, refuse_what_does_not_fit
from ._engine.reruns import reruns
from ._engine.source import Source, source_of
from ._engine.values import bodies, devices_of
from ._jax import SHARD_MAP
from ._policy import Policy, PolicyError, check_arguments
from ._scan import body_of, scan_p
from ._table import EMPTY, NOT_NEEDED, OFFLOADED, RECOMPUTED, SAVED, SHARES, Residual, Residuals


def residuals(f: Callable[..., Any], *args: Any, policy: Policy | None = None) -> Residuals:
    """What the backward pass of `f` finds: every tagged value of every `scan`, `chain` and `checkpoint` in it, and the
    rest.

    Args:
      f: the function that you differentiate (a loss, a layer), with respect to all floating-point inputs.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s. Nothing is allocated or run.
      policy: treat `f` as `checkpoint(f, policy=policy)`.

    Returns:
      The table. Arguments of `f` that the backward pass reads (weights) are there anyway and not part of it. What is
      kept only while another checkpoint runs again is a table of its own, in `reruns`.

    Raises:
      PolicyError, MemoryError: as the `scan`s, `chain`s and `checkpoint`s in `f` do; MemoryError also where the pinned
        host pool holds each of them, but not all together.
      NotImplementedError: likewise; or `f` differentiates what is in it, as a training step does: give its loss.
    """
    fun = checkpoint(f, policy=policy) if policy else f
    kept_leaves = 0

    def forward_and_backward(*args: Any) -> Any:
        nonlocal kept_leaves
        out, vjp = jax.vjp(fun, *args)
        kept = [leaf for leaf in jax.tree.leaves(vjp) if not isinstance(jax.typeof(leaf), AbstractRef)]
        kept_leaves = len(kept)
        return kept, vjp(jax.tree.map(_zero_cotangent, out))

    with where_twice("residuals", _IS_A_STEP), whole_program(True):
        jaxpr = jax.make_jaxpr(forward_and_backward)(*args)
    refuse_what_does_not_fit("residuals", jaxpr)
    found = Plans(_backward_pass(jaxpr), again=False)
    table = _table(found, jaxpr, jaxpr.outvars[:kept_leaves], 1)
    if not found.inside:
        return table
    inside = (
        _table(Plans(rerun.backward, again=False), rerun.forward, rerun.residuals, rerun.devices)
        for rerun in reruns(fun, *args)
    )
    return dataclasses.replace(table, reruns=tuple(dict.fromkeys(inner for inner in inside if inner.rows)))


def _table(found: "Plans", jaxpr: Jaxpr, residuals: Sequence[Any], devices: int) -> Residuals:
    """Of those variables of a forward pass's jaxpr that the backward pass reads."""
    kept: dict[str, list[_Kept]] = defaultdict(list)
    untagged = []
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    for var in dict.fromkeys(v for v in residuals if isinstance(v, Var) and v not in arguments):
        source = source_of(jaxpr, var)
        if not source.layers + source.empty:
            continue  # of a scan over no layers
        size = devices * nbytes(var.aval)
        names = [str(name) for name in source.names if str(name) in found.rows]
        for name in names:
            first = found.rows[names[0]] if name != names[0] else None
            kept[name].append(_Kept(size, on_host(var.aval), source, first))
        if not names:
            untagged.append(_untagged(var.aval, size, source))
    tagged = [r for name, row in found.rows.items() for r in _tagged(row, kept[name], *found.recomputed[name])]
    notes = [note for plan in found.plans for note in plan.notes] + [_OTHERS_KEEP] * found.others
    return Residuals((*_together(tagged), *untagged), tuple(dict.fromkeys(notes)))


class _Kept(NamedTuple):
    """Where a value of a plan is kept. `counted`: the value of another branch of a `cond` that takes the same place,
    and has its bytes."""

    nbytes: int
    on_host: bool
    source: Source
    counted: Row | None


_IS_A_STEP = (
    "the function differentiates what is in it, as a training step does, whose residuals are inside of it; give the "
    "loss that it differentiates"
)
_OTHERS_KEEP = "another checkpoint than jaxoffload's is in the function: what it keeps is shown without its names"


def _zero_cotangent(out: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(out), jnp.inexact):
        return checkpoint_name(jnp.zeros_like(out), _COTANGENT)
    return np.zeros(jnp.shape(out), jax.dtypes.float0)


_COTANGENT = "<cotangent>"


def _backward_pass(jaxpr: Jaxpr) -> Jaxpr:
    """The equations that depend on the cotangents. Others can say that they are differentiated too: in the forward pass
    of a checkpoint around it, JAX says so of a checkpoint in a loop."""
    after: set[Var] = set()
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == _COTANGENT or any(isinstance(v, Var) and v in after for v in eqn.invars):
            after.update(eqn.outvars)
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _tagged(row: Row, kept: list[_Kept], computed_again: int, bytes_again: int) -> Iterator[Residual]:
    """A value of a plan, once for each state that it is found in."""
    names = _names(row)
    line = lambda a_layer, layers, total, state, decision, reason: Residual(
        names, row.shape, row.dtype, a_layer, layers, total, state, decision, reason, _count(a_layer, row.nbytes)
    )
    for size, is_on_host, source, counted in kept:
        a_layer = size // (source.layers + source.empty)
        state = OFFLOADED if is_on_host else SAVED
        decision, reason = ("save", source.where) if source.where else (row.decision, row.reason)
        if counted:
            yield line(a_layer, 0, 0, state, decision, f"{reason}{SHARES}{', '.join(_names(counted))}")
            continue
        if source.layers:
            yield line(a_layer, source.layers, a_layer * source.layers, state, decision, reason)
        if source.empty:
            yield line(a_layer, 0, a_layer * source.empty, state, decision, EMPTY)
    if computed_again:
        yield line(bytes_again // computed_again, computed_again, bytes_again, RECOMPUTED, row.decision, row.reason)
    if not kept and not computed_again:
        yield line(row.nbytes, 0, 0, SAVED if row.reason == ARGUMENT else NOT_NEEDED, row.decision, row.reason)


def _names(row: Row) -> tuple[str, ...]:
    return row.names or ("(matrix product)",)


def _together(lines: Iterable[Residual]) -> list[Residual]:
    """Lines that differ in layers and bytes alone as one; those of the same names side by side."""
    same: dict[tuple[str, ...], dict[Any, Residual]] = defaultdict(dict)
    for r in lines:
        what = dataclasses.replace(r, layers=0, bytes=0)
        before = same[r.names].get(what, what)
        same[r.names][what] = dataclasses.replace(r, layers=before.layers + r.layers, bytes=before.bytes + r.bytes)
    # What the backward pass does not need in one part of a scan it may need in another.
    needed = lambda of_one: [r for r in of_one if r.state != NOT_NEEDED] or of_one[:1]
    return [r for of_one in same.values() for r in needed(list(of_one.values()))]


def _untagged(aval: Any, size: int, source: Source) -> Residual:
    state = OFFLOADED if on_host(aval) else SAVED
    rows = source.layers + source.empty
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
      rerun: whether other checkpoints than theirs run them again.
      others: whether other checkpoints than theirs keep something outside of them, or run them again.
      inside: whether any checkpoint runs them again, another plan's too.

    `again`: with those that the backward pass runs again for other checkpoints than theirs.
    """

    def __init__(self, *jaxprs: Jaxpr, again: bool = True):
        self._outermost: dict[Plan, None] = {}
        self._nested: set[Plan] = set()  # they decide when the backward pass runs them again, not what it finds
        self.recomputed: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self.overlap = self.rerun = self.others = self.inside = False
        self._again = again
        for jaxpr in jaxprs:
            self._walk(jaxpr, 1, 1, None)
        self.others |= self.rerun
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
            first_run = eqn.primitive is remat_p and not eqn.params["differentiated"]
            if (plan := plan_of(eqn.params.get("policy"))) and not first_run:
                inside = owner or plan
                self.rerun |= again
                self._meet(plan, owner, loops)
            elif eqn.primitive is remat_p and eqn.params["differentiated"]:
                self.others |= eqn.params["policy"] is not None and owner is None and not loops
                if not self._again and owner is None:
                    self.inside |= bool(Plans(eqn.params["jaxpr"])._outermost)
                    continue
                another = self._again
            if owner and eqn.primitive is name_p and (name := eqn.params["name"]) in owner.plan_names:
                count, size = self.recomputed[name]
                self.recomputed[name] = count + layers, size + layers * devices * nbytes(eqn.outvars[0].aval)
            here = devices
            if eqn.primitive.name == SHARD_MAP:
                here *= devices_of(eqn)
            for _, body in bodies(eqn):
                self._walk(body, layers * eqn.params.get("length", 1), here, inside, loops, another)
            if eqn.primitive in (forward_p, backward_p):
                self.rerun |= again
                plans = [segment.layer.plan for segment in eqn.params["loops"].segments]
                for plan in plans:
                    self._meet(plan, owner, loops)
                self._walk(eqn.params["call_jaxpr"], layers, here, owner, frozenset(plans), again)

    def _meet(self, plan: Plan, owner: Plan | None, loops: frozenset[Plan]) -> None:
        self.overlap |= (bool(loops) and plan not in loops) or owner not in (None, plan)
        self.inside |= self.overlap
        if owner and plan != owner:
            self._nested.add(plan)
        else:
            self._outermost[plan] = None


def check(policy: Policy, f: Callable[..., Any], *args: Any) -> None:
    """Raise if a pattern of `policy` matches no tagged value in any `scan`, `chain` or `checkpoint` under it in `f`, or
    if all that `f` offloads, under any policy, does not fit in the pinned host pool.

    For models of several stacks, which pass `strict=False`, and for functions that give the policy to `jax.checkpoint`,
    `nn.remat` or `nnx.remat`. One trace of `f` is judged; nothing is run.

    A single `scan` or `chain` knows what itself needs; here all are known together. The bytes a device are those of
    the whole step: gradients one after another count together, for XLA may run them side by side; a loop over
    microbatches counts one of its iterations. A function that moves nothing itself is taken for a loss, and its
    gradient with respect to all floating-point arguments is judged. Under auto mesh axes the compiler divides values
    later: here they are divided as a `with_sharding_constraint` on them says; others along their first axis, as little
    as constrained values of the same layer with as many rows; and not at all where there is none.

    Args:
      policy: the policy that `f` uses.
      f: a training step, or a loss.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s.

    Raises:
      PolicyError: it names each such pattern, the names seen and the nearest.
      MemoryError: the bytes that are needed, what the pool holds, and the `offload_layers` that would fit. Not where
        there is no pinned host pool (CPU), unless `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` says how large it would be.
      ValueError: nothing in `f` uses `policy`.
      TypeError: policy is no Policy.
    """
    check_arguments("check", policy)
    with whole_program(True):
        jaxpr = jax.make_jaxpr(f)(*args)
    seen = _names_under(jaxpr, policy)
    if seen is None:
        raise ValueError(
            "check: no scan, chain, checkpoint or jax.checkpoint in the function has this policy; pass the same"
        )
    if problems := policy.unmatched(seen):
        raise PolicyError(problems)
    if host_pool_bytes() is not None:
        refuse_what_does_not_fit("check", jaxpr if need_of(jaxpr).bytes() else _gradient(jaxpr))


def _gradient(jaxpr: Jaxpr) -> Jaxpr:
    """The forward and backward passes of a traced loss; the trace itself where it has no derivative."""

    def forward_and_backward(*args: Any) -> Any:
        out, vjp = jax.vjp(jaxpr_as_fun(jaxpr), *args)
        return vjp(jax.tree.map(_zero_cotangent, out))

    try:
        with whole_program(True):
            return jax.make_jaxpr(forward_and_backward)(*jaxpr.in_avals)
    except PolicyError:
        raise
    except (NotImplementedError, TypeError, ValueError):  # as JAX says that there is none; ValueError of a callback
        return jaxpr


def _names_under(jaxpr: Jaxpr, policy: Policy) -> set[str] | None:
    """The names that a policy could match, of all that is under it; None where nothing is."""
    found: list[frozenset[str] | set[str]] = []
    for eqn in jaxpr.eqns:
        used = eqn.params.get("policy")
        if (plan := plan_of(used)) and plan.policy == policy:
            found.append(plan.seen)
        elif eqn.primitive is forward_p:
            found += [p.layer.plan.seen for p in eqn.params["loops"].segments if p.layer.plan.policy == policy]
        elif used == policy and eqn.primitive in (scan_p, chain_p, checkpoint_p):
            found += [full_plan(body, roles, policy, False).seen for body, roles in _undifferentiated(eqn)]
        elif used == policy:  # JAX's own checkpoint, with the policy as its callable
            body = eqn.params["jaxpr"]
            found.append(make_plan(body, policy, ["argument"] * len(body.invars), None, False)[0].seen)
        found += [inner for _, body in bodies(eqn) if (inner := _names_under(body, policy)) is not None]
    return set().union(*found) if found else None


def _undifferentiated(eqn: JaxprEqn) -> list[tuple[Jaxpr, tuple[str, ...]]]:
    """The functions of a `scan`, `chain` or `checkpoint`, each with the roles of its inputs."""
    params = eqn.params
    if eqn.primitive is checkpoint_p:
        return [(params["call_jaxpr"], params["roles"])]
    if eqn.primitive is scan_p:
        layers = [body_of(params["call_jaxpr"])]
    else:
        layers = [Body(jaxpr, 0, len(eqn.outvars)) for jaxpr in params["layers"].jaxprs]
    return [(layer.jaxpr, layer.roles) for layer in layers]
