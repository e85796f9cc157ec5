"""residuals(): a table of a function's residuals, where each is kept and why; check(): errors of a policy, early.

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
from ._engine.checkpoint_primitive import checkpoint_p
from ._engine.copying_loops import forward_p, where_twice
from ._engine.derivative import full_plan
from ._engine.host_pool_limit import host_pool_bytes, whole_program
from ._engine.host_pool_need import need_of, refuse_what_does_not_fit
from ._engine.interleaved import OUR_LOOPS, interleaved_p, loops_of
from ._engine.layer import Body, plan_of
from ._engine.plan import Plan, Row, make_plan
from ._engine.reruns import reruns
from ._engine.source import Source, source_of
from ._engine.walk import Site, bodies, walk
from ._jax import nbytes, on_host, without_remat3
from ._policy import Policy, PolicyError, check_arguments
from ._scan import body_of, scan_p
from ._table import EMPTY, NOT_NEEDED, OFFLOADED, RECOMPUTED, SAVED, Kind, Residual, Residuals


@without_remat3
def residuals(f: Callable[..., Any], *args: Any, policy: Policy | None = None) -> Residuals:
    """Return the residuals of `f`: each tagged value of its `scan`s, `chain`s and `checkpoint`s, and untagged ones.

    Args:
      f: the function that you differentiate (a loss, a layer), with respect to all floating-point inputs.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s. Nothing is allocated or run.
      policy: treat `f` as `checkpoint(f, policy=policy)`.

    Returns:
      The table, in bytes. Arguments of `f` that the backward pass reads (weights) exist anyway and are not in it. What
      is kept only while another checkpoint runs again has a table of its own, in `reruns`.

    Raises:
      PolicyError, HostPoolFull: as the `scan`s, `chain`s and `checkpoint`s in `f` do; HostPoolFull also if the pinned
        host pool holds each of them, but not all together.
      NotImplementedError: likewise; or `f` differentiates what is in it, as a training step does: give its loss.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, residuals, tag
      >>> layer = lambda x: jnp.sin(tag(2 * x, "fc1"))
      >>> table = residuals(layer, jax.ShapeDtypeStruct((256, 1024), jnp.float32), policy=Policy({"fc1": "offload"}))
      >>> [(r.names, r.state, r.bytes) for r in table], table.host_bytes
      ([(('fc1',), 'offloaded', 1048576)], 1048576)
    """
    fun = checkpoint(f, policy=policy) if policy else f
    with where_twice("residuals", _IS_A_STEP), whole_program(True):
        jaxpr, (kept, _) = jax.make_jaxpr(_forward_and_backward(fun), return_shape=True)(*args)
    refuse_what_does_not_fit("residuals", jaxpr)
    plans = Plans(_backward_pass(jaxpr), reruns_too=False)
    table = _table(plans, jaxpr, jaxpr.outvars[: len(kept)], 1)
    if not plans.inside:
        return table
    inside = (
        _table(Plans(rerun.backward, reruns_too=False), rerun.forward, rerun.residuals, rerun.devices)
        for rerun in reruns(fun, *args)
    )
    return dataclasses.replace(table, reruns=tuple(dict.fromkeys(inner for inner in inside if inner.rows)))


def _table(plans: "Plans", jaxpr: Jaxpr, forward_results: Sequence[Any], devices: int) -> Residuals:
    """Return the table of those results of a forward pass that the backward pass, with `plans`, reads."""
    kept: dict[str, list[_Stored]] = defaultdict(list)
    untagged = []
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    for var in dict.fromkeys(v for v in forward_results if isinstance(v, Var) and v not in arguments):
        source = source_of(jaxpr, var)
        if not source.layers + source.empty:
            continue  # of a scan over no layers
        size = devices * nbytes(var.aval)
        names = [str(name) for name in source.names if str(name) in plans.rows]
        for name in names:
            first = plans.rows[names[0]] if name != names[0] else None
            kept[name].append(_Stored(size, on_host(var.aval), source, first))
        if not names:
            untagged.append(_untagged(var.aval, size, source))
    tagged = [r for name, row in plans.rows.items() for r in _tagged(row, kept[name], *plans.recomputed[name])]
    notes = [note for plan in plans.plans for note in plan.notes] + [_OTHERS_KEEP] * plans.others
    return Residuals((*_merged(tagged), *untagged), tuple(dict.fromkeys(notes)))


class _Stored(NamedTuple):
    """Where a plan's value is kept; `counted` is the value of another branch of a `cond` that shares its bytes."""

    nbytes: int
    on_host: bool
    source: Source
    counted: Row | None


_IS_A_STEP = (
    "the function differentiates what is in it, as a training step does, and keeps its residuals to itself; give the "
    "loss that it differentiates, with the arguments of one microbatch"
)
_OTHERS_KEEP = "a checkpoint that is not jaxoffload's is in the function: what it keeps is shown without its names"


def _forward_and_backward(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function from the arguments of `f` to what its forward pass keeps, and to its cotangents."""

    def run(*args: Any) -> Any:
        out, vjp = jax.vjp(f, *args)
        kept = [leaf for leaf in jax.tree.leaves(vjp) if not isinstance(jax.typeof(leaf), AbstractRef)]
        return kept, vjp(jax.tree.map(_zero_cotangent, out))

    return run


def _zero_cotangent(out: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(out), jnp.inexact):
        return checkpoint_name(jnp.zeros_like(out), _COTANGENT)
    return np.zeros(jnp.shape(out), jax.dtypes.float0)


_COTANGENT = "<cotangent>"
_MATMUL = ("(matmul)",)


def _backward_pass(jaxpr: Jaxpr) -> Jaxpr:
    """Return the equations that depend on the cotangents.

    JAX marks some others as differentiated too: a checkpoint in a loop, in the forward pass of one around it.
    """
    after: set[Var] = set()
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == _COTANGENT or any(isinstance(v, Var) and v in after for v in eqn.invars):
            after.update(eqn.outvars)
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _tagged(row: Row, kept: list[_Stored], recomputed: int, recomputed_bytes: int) -> Iterator[Residual]:
    """Yield a line for each state that a plan's value is found in; `recomputed` counts layers."""
    names = row.names or _MATMUL
    line = lambda each, layers, total, state, decision, reason, kind: Residual(
        names, row.shape, row.dtype, each, layers, total, state, decision, reason, _count(each, row.nbytes), kind
    )
    planned = row.decision, row.reason, row.kind
    for size, is_on_host, source, counted in kept:
        each = size // (source.layers + source.empty)
        state = OFFLOADED if is_on_host else SAVED
        stays: Kind = "overridden" if source.kind == "overridden" else "value"
        decision, reason, kind = planned if source.by_plan else ("save", source.where, stays)
        if counted:
            place = ", ".join(counted.names or _MATMUL)
            yield line(each, 0, 0, state, decision, f"{reason}; in the place of {place}", "shared")
            continue
        if source.layers:
            yield line(each, source.layers, each * source.layers, state, decision, reason, kind)
        if source.empty:
            yield line(each, 0, each * source.empty, state, decision, EMPTY, "padding")
    if recomputed:
        each = recomputed_bytes // recomputed
        yield line(each, recomputed, recomputed_bytes, RECOMPUTED, *planned)
    if not kept and not recomputed:
        yield line(row.nbytes, 0, 0, SAVED if row.kind == "argument" else NOT_NEEDED, *planned)


def _merged(lines: Iterable[Residual]) -> list[Residual]:
    """Merge lines that differ in layers and bytes alone, and put those of the same names side by side."""
    by_names: dict[tuple[str, ...], dict[Residual, Residual]] = defaultdict(dict)
    for r in lines:
        key = dataclasses.replace(r, layers=0, bytes=0)
        before = by_names[r.names].get(key, key)
        by_names[r.names][key] = dataclasses.replace(r, layers=before.layers + r.layers, bytes=before.bytes + r.bytes)
    # What the backward pass does not need in one segment of a scan it may need in another.
    needed = lambda group: [r for r in group if r.state != NOT_NEEDED] or group[:1]
    return [r for group in by_names.values() for r in needed(list(group.values()))]


def _untagged(aval: Any, size: int, source: Source) -> Residual:
    state = OFFLOADED if on_host(aval) else SAVED
    rows = source.layers + source.empty
    shape = tuple(aval.shape)[source.axes :]
    count = _count(size // rows, math.prod(shape) * aval.dtype.itemsize)
    return Residual((), shape, str(aval.dtype), size // rows, source.layers, size, state, None, source.where, count)


def _count(together: int, each: int) -> int:
    """Return how many values of `each` bytes make up `together`; 1 for empty ones."""
    return together // each if together > each > 0 else 1


class Plans:
    """The outermost plans of a gradient.

    Attributes:
      plans: in the order of the layers.
      rows: their rows, by the name that the plan wrote.
      recomputed: for each such name, in how many layers the backward pass recomputes its value, and bytes in all.
      overlap: a plan is nested in another, or in another's loop.
      rerun: a foreign checkpoint reruns a plan.
      others: a foreign checkpoint keeps or reruns something.
      inside: any checkpoint reruns a plan.
    """

    def __init__(self, jaxpr: Jaxpr, reruns_too: bool = True):
        """`reruns_too`: with the plans that the backward pass runs again for checkpoints other than theirs."""
        every = [_met(site) for site in walk(jaxpr, _bodies_of_gradient)]
        met = [m for m in every if reruns_too or not m.first_foreign]
        plans = [(plan, m.owner, m.loops) for m in met for plan in m.plans]
        # A nested plan decides when the backward pass runs it again, not what that finds.
        nested = {plan for plan, owner, _ in plans if owner and plan != owner}
        outermost = dict.fromkeys(plan for plan, owner, _ in plans if owner in (None, plan))
        # The backward pass meets the last segment of a function first.
        self.plans = [plan for plan in reversed(outermost) if plan not in nested]
        self.rows = {row.plan_name: row for plan in self.plans for row in plan.rows}
        self.recomputed = _recomputed(met)
        self.overlap = bool(nested) or any(loops and plan not in loops for plan, _, loops in plans)
        self.rerun = reruns_too and any(m.plans and m.foreign for m in met)
        keeps = (m for m in met if _is_foreign(m.site.eqn) and m.site.eqn.params["policy"] is not None)
        self.others = self.rerun or any(m.owner is None and not m.loops for m in keeps)
        self.inside = self.overlap or (not reruns_too and any(m.plans and m.first_foreign for m in every))


class _Met(NamedTuple):
    """An equation of a gradient: the plans that it runs, and what is around it."""

    site: Site
    plans: list[Plan]
    owner: Plan | None  # of the outermost checkpoint that has a plan
    loops: list[Plan]  # of the innermost loop of ours
    foreign: bool  # whether some checkpoint has no plan
    first_foreign: bool  # whether the outermost checkpoint has none


def _met(site: Site) -> _Met:
    checkpoints = [_checkpoint_plan(e) for e in site.enclosing if _is_foreign(e) or _checkpoint_plan(e)]
    loops = [e for e in site.enclosing if e.primitive in OUR_LOOPS]
    owner, around = next(filter(None, checkpoints), None), _plans_of(loops[-1]) if loops else []
    return _Met(site, _plans_of(site.eqn), owner, around, None in checkpoints, checkpoints[:1] == [None])


def _bodies_of_gradient(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the nested jaxprs of an equation of a gradient; those of our loops too, which autodiff has made."""
    return [eqn.params["call_jaxpr"]] if eqn.primitive in OUR_LOOPS else bodies(eqn)


def _plans_of(eqn: JaxprEqn) -> list[Plan]:
    """Return the plans that an equation runs: that of a checkpoint, or those of a loop's layers."""
    if loops := loops_of(eqn):
        ends = [*eqn.params["first"], *eqn.params["last"]] if eqn.primitive is interleaved_p else []
        return list(dict.fromkeys(segment.layer.plan for each in [*loops, *ends] for segment in each.segments))
    return [plan] if (plan := _checkpoint_plan(eqn)) else []


def _checkpoint_plan(eqn: JaxprEqn) -> Plan | None:
    """Return the plan of a checkpoint that the backward pass runs; None for a first run, or without a plan."""
    first_run = eqn.primitive is remat_p and not eqn.params["differentiated"]
    return None if first_run else plan_of(eqn.params.get("policy"))


def _is_foreign(eqn: JaxprEqn) -> bool:
    """Whether an equation is a checkpoint without a plan that the backward pass runs."""
    return eqn.primitive is remat_p and eqn.params["differentiated"] and plan_of(eqn.params["policy"]) is None


def _recomputed(met: Iterable[_Met]) -> dict[str, tuple[int, int]]:
    recomputed: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for site, _, owner, *_ in met:
        if owner and site.eqn.primitive is name_p and (name := site.eqn.params["name"]) in owner.plan_names:
            layers, size = recomputed[name]
            each = site.devices * nbytes(site.eqn.outvars[0].aval)
            recomputed[name] = layers + site.runs, size + site.runs * each
    return recomputed


@without_remat3
def check(policy: Policy, f: Callable[..., Any], *args: Any) -> None:
    """Raise if a pattern of `policy` matches nothing in `f`, or if the pinned host pool cannot hold what `f` offloads.

    Patterns are matched with the tagged values of all `scan`s, `chain`s and `checkpoint`s under `policy`; bytes count
    under any policy. Use it for models of several stacks, which pass `strict=False`, and for functions that give the
    policy to `jax.checkpoint`, `nn.remat` or `nnx.remat`. `f` is traced once, and not run.

    The bytes per device are those of the whole step: gradients that follow each other count together, since XLA may run
    them side by side; a loop over microbatches counts one iteration. If `f` offloads nothing itself, it is taken for a
    loss, and its gradient with respect to all floating-point arguments is judged. Under auto mesh axes values count as
    their `with_sharding_constraint` divides them; others as the least divided constrained values with as many rows.

    Args:
      policy: the policy that `f` uses.
      f: a training step, or a loss.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s.

    Raises:
      PolicyError: it lists each pattern that matches nothing, the names and the nearest.
      HostPoolFull: with the bytes that are needed, those in the pool, and the `offload_layers` that would fit. Not
        where there is no pinned host pool (CPU), unless `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` says how large it would be.
      ValueError: nothing in `f` uses `policy`.
      TypeError: policy is not a Policy.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload import Policy, PolicyError, check, checkpoint, tag
      >>> policy = Policy({"fcl": "offload"})
      >>> layer = checkpoint(lambda x: jnp.sin(tag(2 * x, "fc1")), policy=policy, strict=False)
      >>> try:
      ...     check(policy, layer, jnp.ones(8))
      ... except PolicyError as error:
      ...     print(error)
      residuals['fcl']: matches no tagged value; the tagged names are fc1; the nearest is 'fc1'
    """
    check_arguments("check", policy)
    with whole_program(True):
        jaxpr = jax.make_jaxpr(f)(*args)
    seen = _names_under(jaxpr, policy)
    if seen is None:
        raise ValueError(
            "check: no scan, chain, checkpoint or jax.checkpoint in the function has this policy; pass the one it uses"
        )
    if problems := policy.unmatched(seen):
        raise PolicyError(problems)
    if host_pool_bytes() is not None:
        refuse_what_does_not_fit("check", jaxpr if need_of(jaxpr).bytes() else _gradient(jaxpr))


def _gradient(jaxpr: Jaxpr) -> Jaxpr:
    """Return the forward and backward passes of a traced loss; the trace itself if it has no derivative."""
    try:
        with whole_program(True):
            return jax.make_jaxpr(_forward_and_backward(jaxpr_as_fun(jaxpr)))(*jaxpr.in_avals)
    except PolicyError:
        raise
    except (NotImplementedError, TypeError, ValueError):  # JAX raises these; ValueError for a callback
        return jaxpr


def _names_under(jaxpr: Jaxpr, policy: Policy) -> set[str] | None:
    """Return the names that `policy` could match in all that it is given to; None if nothing has it."""
    seen: list[frozenset[str]] = []
    for eqn, *_ in walk(jaxpr, bodies):
        used = eqn.params.get("policy")
        if (plan := plan_of(used)) and plan.policy == policy:
            seen.append(plan.seen)
        elif eqn.primitive in (forward_p, interleaved_p):
            plans = _plans_of(eqn)
            seen += [plan.seen for plan in plans if plan.policy == policy]
        elif used == policy and eqn.primitive in (scan_p, chain_p, checkpoint_p):
            seen += [full_plan(body, roles, policy, False).seen for body, roles in _undifferentiated(eqn)]
        elif used == policy:  # JAX's own checkpoint, with the policy as its callable
            body = eqn.params["jaxpr"]
            seen.append(make_plan(body, policy, ["argument"] * len(body.invars), None, False)[0].seen)
    return set().union(*seen) if seen else None


def _undifferentiated(eqn: JaxprEqn) -> list[tuple[Jaxpr, tuple[str, ...]]]:
    """Return the functions of a `scan`, `chain` or `checkpoint`, each with the roles of its inputs."""
    params = eqn.params
    if eqn.primitive is checkpoint_p:
        return [(params["call_jaxpr"], params["roles"])]
    if eqn.primitive is scan_p:
        layers = [body_of(params["call_jaxpr"])]
    else:
        layers = [Body(jaxpr, 0, len(eqn.outvars)) for jaxpr in params["layers"].jaxprs]
    return [(layer.jaxpr, layer.roles) for layer in layers]
