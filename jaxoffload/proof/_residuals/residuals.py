"""residuals(): a table of a function's residuals, where each is kept and why.

Nothing is run. The function and its gradient are traced once; the residuals are the leaves of the VJP, each followed
back to the name that a plan gave it. So the table holds what autodiff keeps, not what the policy asked for.
"""

import contextlib
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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
from ..._policy import Policy, check_arguments, check_call
from ..._tracing import Remarks, under
from .divided import divided, rows_of
from .plans import Plans, Recomputed
from .table import EMPTY, NOT_NEEDED, OFFLOADED, RECOMPUTED, SAVED, Residual, Residuals, State


@without_remat3
def residuals(f: Callable[..., Any], *args: Any, policy: Policy | None = None) -> Residuals:
    """Return the residuals of `f`: each tagged value of its `scan`s, `chain`s and `checkpoint`s, and untagged ones.

    Args:
      f: the function that you differentiate (a loss, a layer), with respect to all floating-point inputs.
      args: its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`s. Nothing is allocated or run.
      policy: treat `f` as `checkpoint(f, policy=policy)`.

    Returns:
      The table, in bytes. Arguments of `f` that the backward pass reads (weights) exist anyway and are not in it. Nor
      is what is kept only while another checkpoint runs again: ask for the residuals of the function inside that.

    Raises:
      PolicyError, HostPoolFull: as the `scan`s, `chain`s and `checkpoint`s in `f` do; HostPoolFull also if the pinned
        host pool holds each of them, but not all together.
      NotImplementedError: likewise; or `f` differentiates what is in it, as a training step does: give its loss.
      TypeError: f is not a function, or policy not a Policy.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, residuals, tag
      >>> layer = lambda x: jnp.sin(tag(2 * x, "fc1"))
      >>> table = residuals(layer, jax.ShapeDtypeStruct((256, 1024), jnp.float32), policy=Policy({"fc1": "offload"}))
      >>> [(r.names, r.state, r.bytes) for r in table], table.host_bytes
      ([(('fc1',), 'offloaded', 1048576)], 1048576)
    """
    check_call("residuals", f, args)
    if policy is not None:
        check_arguments("residuals", policy)
    fun = f if policy is None else checkpoint(f, policy=policy)
    remarks = Remarks()
    with where_twice("residuals", _IS_A_STEP), under(whole_program=True, remarks=remarks):
        jaxpr, (kept, _) = jax.make_jaxpr(forward_and_backward(fun), return_shape=True)(*args)
    refuse_what_does_not_fit("residuals", jaxpr)
    arguments = [leaf for leaf in jax.tree.leaves(args) if hasattr(leaf, "sharding")]
    table = _table(jaxpr, jaxpr.outvars[: len(kept)], rows_of(arguments))
    mesh = tuple(mesh_of(jaxpr, arguments).items())
    return dataclasses.replace(table, notes=(*remarks.texts, *table.notes), mesh=mesh)


@contextlib.contextmanager
def where_twice(caller: str, message: str) -> Iterator[None]:
    """Raise `message` instead, where `caller` differentiates a function that is itself a derivative."""
    try:
        yield
    except DifferentiatedTwice as why:
        raise DifferentiatedTwice(f"{caller}: {message}") from why


def _table(jaxpr: Jaxpr, passed: Sequence[Any], rows: Mapping[int, int]) -> Residuals:
    """Return the table of what a forward pass keeps.

    `jaxpr` has both passes, and computes the variables `passed` from one to the other. `rows`: as for `divided`.
    """
    plans = Plans(_backward_pass(jaxpr), reruns_too=False)
    lines: dict[str, list[Residual]] = {name: [] for name in plans.rows}
    others = []
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    results = [*dict.fromkeys(v for v in passed if isinstance(v, Var) and v not in arguments)]
    whole = jaxpr.replace(outvars=results, debug_info=jaxpr.debug_info.with_unknown_names())
    of_results, of_named, _ = divided(whole, rows)
    for var, parts in zip(results, of_results, strict=True):
        aval: Any = var.aval
        source = source_of(jaxpr, var)
        if not (stacked := source.layers + source.empty):
            continue  # of a scan over no layers
        state: State = OFFLOADED if on_host(aval) else SAVED
        sizes = nbytes(aval) // stacked, source.layers, nbytes(aval)
        shape, dtype = tuple(aval.shape)[source.axes :], str(aval.dtype)
        line = Residual(source.tags, shape, dtype, *sizes, state, None, source.where, parts=parts)
        names = [name for name in source.names if name in lines]
        if not names:
            others.append(line)
        for name in names:
            lines[name] += _kept(line, source, plans.rows[name], plans.rows[names[0]])
    for name, row in plans.rows.items():
        lines[name] += _not_kept(row, plans.recomputed[name], of_named.get(name, 1), bool(lines[name]))
    notes = [note for plan in plans.plans for note in plan.notes]
    by_jax = any(isinstance(policy, Policy) for policy in plans.policies)
    undecided = dict.fromkeys(name for line in others for name in line.names)
    notes += [_BY_JAX] * by_jax
    notes += [_UNDECIDED.format(", ".join(undecided))] * (bool(undecided) and not plans.rows and not by_jax)
    notes += [_RUNS_AGAIN] * (plans.overlap or plans.rerun)
    return Residuals((*_merged(itertools.chain(*lines.values())), *others), tuple(dict.fromkeys(notes)))


_IS_A_STEP = (
    "the function differentiates what is in it, as a training step does, and keeps its residuals to itself; give the "
    "loss that it differentiates, with the arguments of one microbatch"
)
_UNDECIDED = (
    "no jaxoffload.Policy decides about {}: tags count in jaxoffload.scan, chain and checkpoint, or in "
    "jaxoffload.offload(loss), under a jax.checkpoint with a Policy"
)
_BY_JAX = (
    "a jax.checkpoint has a Policy, and JAX itself runs it: copies do not overlap, a misspelt name is no error, and "
    "what is recomputed is not shown. Wrap the loss, jaxoffload.offload(loss), and it is ours, unless it reads or "
    "writes a jax.new_ref"
)
_RUNS_AGAIN = (
    "a checkpoint stands around a scan, chain or checkpoint; what is kept only while the backward pass runs that again "
    "is not shown: ask for the residuals of the function inside"
)
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


def _kept(line: Residual, source: Source, row: Row, first: Row) -> Iterator[Residual]:
    """Yield the lines of a plan's value that is kept as `line` says. `first`: the value whose bytes these are, which
    values of other branches of a `cond` share."""
    line = dataclasses.replace(line, names=row.names or _MATMUL, shape=row.shape, dtype=row.dtype, decision="save")
    line = dataclasses.replace(line, count=_count(line.bytes_per_layer, row))
    if source.by_plan:
        line = dataclasses.replace(line, decision=row.decision, reason=row.reason, kind=row.kind)
    elif source.kind == "overridden":
        line = dataclasses.replace(line, kind="overridden")
    if row is not first:
        reason = f"{line.reason}; in the place of {', '.join(first.names or _MATMUL)}"
        yield dataclasses.replace(line, layers=0, bytes=0, reason=reason, kind="shared")
        return
    if source.layers:
        yield dataclasses.replace(line, bytes=source.layers * line.bytes_per_layer)
    if source.empty:
        empty = source.empty * line.bytes_per_layer
        yield dataclasses.replace(line, layers=0, bytes=empty, reason=EMPTY, kind="padding")


def _not_kept(row: Row, again: Recomputed, parts: int, is_kept: bool) -> Iterator[Residual]:
    """Yield the line of a plan's value in the layers that recompute it, or, if no layer keeps it, that do not need it.

    `parts`: into how many it is divided in a shard.
    """
    shown, planned = (row.names or _MATMUL, row.shape, row.dtype), (row.decision, row.reason)
    if again.layers:
        each = again.bytes // again.layers
        line = Residual(*shown, each, again.layers, again.bytes, RECOMPUTED, *planned, _count(each, row), row.kind)
        yield dataclasses.replace(line, parts=parts * again.devices)
    elif not is_kept:
        state: State = SAVED if row.kind == "argument" else NOT_NEEDED
        yield Residual(*shown, row.nbytes, 0, 0, state, *planned, kind=row.kind)


def _count(each: int, row: Row) -> int:
    """Return how many values make up so many bytes; 1 for empty ones."""
    return each // row.nbytes if each > row.nbytes > 0 else 1


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
