"""residuals(): a table of a function's residuals, where each is kept and why.

Nothing is run. The function and its gradient are traced once; the residuals are the leaves of the VJP, each followed
back to the name that a plan gave it. So the table holds what autodiff keeps, not what the policy asked for.
"""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, Var

from ..._check import COTANGENT, forward_and_backward
from ..._checkpoint import checkpoint
from ..._engine.decide.plan import Row
from ..._engine.host.need import refuse_what_does_not_fit
from ..._engine.jaxprs.flat import mesh_of
from ..._engine.jaxprs.source import Source, source_of
from ..._engine.layers.loops import DifferentiatedTwice
from ..._jax import nbytes, on_host, without_remat3
from ..._policy import Decision, Policy, check_arguments
from ..._tracing import Remarks, under
from .divided import Divided, rows_of
from .plans import Plans, policies_that_kept
from .reruns import reruns
from .table import EMPTY, NOT_NEEDED, OFFLOADED, RECOMPUTED, SAVED, Kind, Residual, Residuals, State


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
      TypeError: policy is not a Policy.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, residuals, tag
      >>> layer = lambda x: jnp.sin(tag(2 * x, "fc1"))
      >>> table = residuals(layer, jax.ShapeDtypeStruct((256, 1024), jnp.float32), policy=Policy({"fc1": "offload"}))
      >>> [(r.names, r.state, r.bytes) for r in table], table.host_bytes
      ([(('fc1',), 'offloaded', 1048576)], 1048576)
    """
    if policy is not None:
        check_arguments("residuals", policy)
    fun = f if policy is None else checkpoint(f, policy=policy)
    remarks = Remarks()
    with where_twice("residuals", _IS_A_STEP), under(whole_program=True, remarks=remarks):
        jaxpr, (kept, _) = jax.make_jaxpr(forward_and_backward(fun), return_shape=True)(*args)
    refuse_what_does_not_fit("residuals", jaxpr)
    arguments = [leaf for leaf in jax.tree.leaves(args) if hasattr(leaf, "sharding")]
    mesh = mesh_of(jaxpr, arguments)
    divisions = rows_of(arguments) if mesh else None
    table, run_again = _table(jaxpr, jaxpr.outvars[: len(kept)], _backward_pass(jaxpr), 1, divisions)
    table = dataclasses.replace(table, notes=(*remarks.texts, *table.notes), mesh=tuple(mesh.items()))
    inside = (_table(*rerun, divisions)[0] for rerun in reruns(fun, *args)) if run_again else ()
    return dataclasses.replace(table, reruns=tuple(dict.fromkeys(inner for inner in inside if inner.rows)))


@contextlib.contextmanager
def where_twice(caller: str, message: str) -> Iterator[None]:
    """Raise `message` instead, where `caller` differentiates a function that is itself a derivative."""
    try:
        yield
    except DifferentiatedTwice as why:
        raise DifferentiatedTwice(f"{caller}: {message}") from why


def _table(
    forward: Jaxpr, passed: Sequence[Any], backward: Jaxpr, devices: int, divisions: Mapping[int, int] | None
) -> tuple[Residuals, bool]:
    """Return the table of what a forward pass keeps, and if a checkpoint in it runs a plan again.

    `forward` computes the variables `passed` to `backward`, and may do more; a `shard_map` around them divides them
    over `devices`. `divisions`: into how many parts a mesh divides arrays, by their length; None without a mesh.
    """
    plans, by_jax = Plans(backward, reruns_too=False), policies_that_kept(backward)
    kept: dict[str, list[_Stored]] = defaultdict(list)
    others = []
    arguments = {*forward.invars, *forward.constvars}
    results = [*dict.fromkeys(v for v in passed if isinstance(v, Var) and v not in arguments)]
    whole = forward.replace(outvars=results, debug_info=forward.debug_info.with_unknown_names())
    divided = None if divisions is None else Divided(whole, divisions)
    for number, var in enumerate(results):
        source = source_of(forward, var)
        if not source.layers + source.empty:
            continue  # of a scan over no layers
        size = devices * nbytes(var.aval)
        names = [name for name in source.names if name in plans.rows]
        for name in names:
            first = plans.rows[names[0]] if name != names[0] else None
            kept[name].append(_Stored(size, on_host(var.aval), source, first))
        if not names:
            parts = devices * (divided.of_result(number) if divided else 1)
            others.append(_without_plan(var.aval, size, source, by_jax.get(var), parts))
    parts_of = dict(reversed(list(divided.named()))) if divided else {}  # the first that has a name counts
    tagged = [
        line
        for name, row in plans.rows.items()
        for line in _tagged(row, kept[name], plans.recomputed[name], parts_of.get(name, 1) if divided else None)
    ]
    notes = [note for plan in plans.plans for note in plan.notes]
    notes += [_BY_JAX] * any(isinstance(policy, Policy) for policy in plans.policies)
    notes += [_OTHERS_KEEP] * any(not isinstance(policy, Policy) for policy in plans.policies)
    return Residuals((*_merged(tagged), *others), tuple(dict.fromkeys(notes))), plans.inside


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
_BY_JAX = (
    "by jax.checkpoint: JAX itself runs that under a Policy, so its copies do not overlap, it has no layers, and what "
    "it recomputes is not shown; in jaxoffload.offload(loss) it is ours, unless it reads or writes a jax.new_ref"
)
_OTHERS_KEEP = "a checkpoint that is not jaxoffload's is in the function: what it keeps is shown without its names"


_MATMUL = ("(matmul)",)


def _backward_pass(jaxpr: Jaxpr) -> Jaxpr:
    """Return the equations that depend on the cotangents.

    JAX marks some others as differentiated too: a checkpoint in a loop, in the forward pass of one around it.
    """
    after: set[Var] = set()
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == COTANGENT or any(isinstance(v, Var) and v in after for v in eqn.invars):
            after.update(eqn.outvars)
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _tagged(row: Row, kept: list[_Stored], recomputed: tuple[int, int], parts: int | None) -> Iterator[Residual]:
    """Yield a line for each state that a plan's value is found in.

    `recomputed`: layers, and bytes in all. `parts`: into how many the value is divided, in each shard; None without a
    mesh.
    """
    names = row.names or _MATMUL

    def line(each: int, layers: int, total: int, state: State, why: tuple[Decision, str], kind: Kind) -> Residual:
        count = _count(each, row.nbytes)
        shown = names, row.shape, row.dtype, each, layers, total, state, *why
        return Residual(*shown, count, kind, count * parts if parts else 1)

    planned = row.decision, row.reason, row.kind
    for size, is_on_host, source, counted in kept:
        each = size // (source.layers + source.empty)
        state: State = OFFLOADED if is_on_host else SAVED
        stays: Kind = "overridden" if source.kind == "overridden" else "value"
        saved: tuple[Decision, str, Kind] = ("save", source.where, stays)
        decision, reason, kind = planned if source.by_plan else saved
        if counted:
            place = ", ".join(counted.names or _MATMUL)
            yield line(each, 0, 0, state, (decision, f"{reason}; in the place of {place}"), "shared")
            continue
        if source.layers:
            yield line(each, source.layers, each * source.layers, state, (decision, reason), kind)
        if source.empty:
            yield line(each, 0, each * source.empty, state, (decision, EMPTY), "padding")
    layers, size = recomputed
    if layers:
        yield line(size // layers, layers, size, RECOMPUTED, planned[:2], row.kind)
    if not kept and not layers:
        yield line(row.nbytes, 0, 0, SAVED if row.kind == "argument" else NOT_NEEDED, planned[:2], row.kind)


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


def _without_plan(aval: Any, size: int, source: Source, policy: Policy | None, parts: int) -> Residual:
    """Return the line of a value that no plan of ours knows. `policy`: that of a checkpoint of JAX's that kept it."""
    state: State = OFFLOADED if on_host(aval) else SAVED
    stacked = source.layers + source.empty
    shape = tuple(aval.shape)[source.axes :]
    count = _count(size // stacked, nbytes(jax.ShapeDtypeStruct(shape, aval.dtype)))
    shown = shape, str(aval.dtype), size // stacked, source.layers, size, state
    line = Residual((), *shown, None, source.where, count, parts=parts)
    if not policy or not source.tags:
        return line
    pattern, decision = policy.match(*source.tags) or (None, policy.default)
    if decision == "recompute":  # an input of the checkpoint, which JAX keeps anyway
        return line
    reason = policy.reason(pattern) if pattern else "default"
    return dataclasses.replace(line, names=source.tags, decision=decision, reason=f"{reason}, by jax.checkpoint")


def _count(together: int, each: int) -> int:
    """Return how many values of `each` bytes make up `together`; 1 for empty ones."""
    return together // each if together > each > 0 else 1
