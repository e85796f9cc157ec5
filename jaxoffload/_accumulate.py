"""accumulate(): `jax.value_and_grad` over microbatches, the forward pass of one beside the backward pass of another."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from ._engine import interleaved, pipeline
from ._engine.chunk import Chunks
from ._engine.copying_loops import Loops, filled
from ._engine.fill_and_drain import ends
from ._engine.host_pool_limit import HostPoolFull, auto_axes, host_pool_bytes
from ._engine.passes import program_of
from ._engine.pieces import Pieces, divide
from ._engine.pipeline import on_a_stage
from ._engine.schedule import Schedule
from ._engine.segments import joined
from ._engine.staged_loss import StagedLoss
from ._errors import NOT_THE_USERS
from ._jax import as_array, convert_constvars_jaxpr, nbytes
from ._reference import is_reference
from ._scan import backward_loops, forward_loops, chunk_loops, recomputing, scan_p, with_stages
from ._text import nearest, readable

Reduction = Literal["mean", "sum"]


def accumulate(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduction: Reduction = "mean",
    stages: str | None = None,
    virtual_stages: int = 1,
) -> Callable[..., Any]:
    """`jax.value_and_grad` over microbatches, with the copies of each `scan` behind two passes instead of one.

    While the backward pass of one microbatch runs, layer by layer, so does the forward pass of the next. Each layer's
    residuals travel beside the forward pass of one layer and the backward pass of another, both ways at once, and the
    gradients are added where they are made. The results are those of

        derived = lambda microbatch: jax.value_and_grad(loss)(params, microbatch)
        lax.scan(lambda sums, microbatch: (add(sums, derived(microbatch)), None), zeros, microbatches)

    The `scan`s are found in the traced loss, inside jitted functions too; there may be several, of different lengths. A
    `chain`, or a `scan` inside other control flow, runs as it does without `accumulate`. If no `scan` offloads, the
    microbatches run one after another.

    Args:
      loss: as for `jax.value_and_grad`: returns a scalar, or a pair of it and a pytree of arrays.
      argnums: which positional arguments to differentiate. All others are batches: their leaves have a leading axis of
        microbatches.
      has_aux: whether `loss` returns a pair.
      reduction: "mean" or "sum", of the losses and of the gradients over the microbatches.

    Returns:
      A function of the arguments of `loss` that returns what `jax.value_and_grad(loss, argnums, has_aux)` does, in the
      same dtypes. Other results get a leading axis of microbatches. It cannot be differentiated.

    Raises:
      ValueError: `reduction` is something else.

    Raises (when called, before anything is compiled):
      TypeError, ValueError: an argument has no axis of microbatches, or one of another length; and what
        `jax.value_and_grad` raises.
      PolicyError, NotImplementedError: as in `scan`.
      HostPoolFull: the pinned host pool cannot hold the stacks of two microbatches.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import Policy, accumulate, scan, tag
      >>> layer = lambda x, w: (jnp.sin(tag(x @ w, "fc1")), None)
      >>> policy = Policy(residuals={"fc1": "offload"}, min_offload_bytes=0)
      >>> loss = lambda ws, x: jnp.mean(scan(layer, x, ws, policy=policy)[0])
      >>> value, dws = jax.jit(accumulate(loss))(jnp.ones((3, 8, 8)), jnp.ones((4, 2, 8)))  # 4 microbatches
      >>> dws.shape
      (3, 8, 8)
    """
    if reduction not in get_args(Reduction):
        hint = nearest(reduction, get_args(Reduction))
        raise ValueError(f"accumulate: reduction {reduction!r} is not allowed; use 'mean' or 'sum'{hint}")

    def value_and_grad(*args: Any) -> Any:
        call = _call(loss, argnums, has_aux, args)
        sums, aux = _staged(call, stages, virtual_stages) or _interleaved(call) or _one_by_one(call)
        value, grads = jax.tree.map(lambda x: x / call.microbatches, sums) if reduction == "mean" else sums
        grads = grads[0] if isinstance(argnums, int) else tuple(grads)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad


class _Call(NamedTuple):
    """A call of `accumulate`'s function. `loss(params, microbatch)` returns a pair; microbatches are flat."""

    loss: Callable[[list[Any], list[Any]], tuple[Any, Any]]
    params: list[Any]
    batch: list[Any]
    microbatches: int

    def microbatch(self, number: Any) -> list[Any]:
        return [lax.dynamic_index_in_dim(x, number, keepdims=False) for x in self.batch]


def _call(loss: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool, args: tuple[Any, ...]) -> _Call:
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    if wrong := [n for n in numbers if not -len(args) <= n < len(args)]:
        raise ValueError(f"accumulate: argnums has {wrong[0]}, and there are {len(args)} positional arguments")
    numbers = [n % len(args) for n in numbers]
    others = {n: x for n, x in enumerate(args) if n not in numbers}
    leaves, tree = jax.tree.flatten(others)

    def of_params(params: Sequence[Any], microbatch: list[Any]) -> Any:
        given = dict(zip(numbers, params, strict=True)) | jax.tree.unflatten(tree, microbatch)
        return loss(*(given[n] for n in range(len(args))))

    params = [args[n] for n in numbers]
    call = _Call(of_params, params, list(map(as_array, leaves)), _microbatches(others))
    # JAX's own errors, about parameters and results that cannot be differentiated.
    shape = jax.eval_shape(lambda: of_params(params, call.microbatch(0)))
    zeros = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
    jax.eval_shape(jax.value_and_grad(zeros, has_aux=has_aux), params)
    return call if has_aux else call._replace(loss=lambda *args: (of_params(*args), None))


def _microbatches(others: dict[int, Any]) -> int:
    """The length of the leading axis that all leaves have."""
    lengths = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(others):
        argument = f"args{jax.tree_util.keystr(path)}"
        if not (shape := jnp.shape(leaf)):
            raise TypeError(
                f"accumulate: {argument} is a scalar; every argument that is not in argnums needs a leading axis of "
                "microbatches"
            )
        lengths[argument] = shape[0]
    if not lengths:
        raise TypeError("accumulate: argnums has all arguments; at least one must be a batch, split in microbatches")
    (first, length), *rest = lengths.items()
    if differ := [f"{argument} has {n}" for argument, n in rest if n != length]:
        raise ValueError(f"accumulate: {first} has {length} microbatches, and {differ[0]}; they must be as many")
    if not length:
        raise ValueError(f"accumulate: {first} has no microbatches")
    return length


def _one_by_one(call: _Call) -> Any:
    """The sums of losses and gradients, and the other results: one microbatch after another."""
    derived = jax.value_and_grad(call.loss, has_aux=True)

    def add(sums: Any, number: Any) -> Any:
        (value, aux), grads = derived(call.params, call.microbatch(number))
        return jax.tree.map(jnp.add, sums, (value, grads)), aux

    def of_first() -> Any:
        (value, _), grads = derived(call.params, call.microbatch(0))
        return value, grads

    jaxpr, shape = jax.make_jaxpr(of_first, return_shape=True)()
    zeros = [filled(aval, 0) for aval in jaxpr.out_avals]
    return lax.scan(add, jax.tree.unflatten(jax.tree.structure(shape), zeros), jnp.arange(call.microbatches))


def _interleaved(call: _Call) -> Any:
    """The same, interleaved; None where nothing is to be gained by that."""
    if call.microbatches == 1 or is_reference() or jax.config.jax_disable_jit:
        return None
    leaves, tree = jax.tree.flatten(call.params)
    loss = lambda leaves, microbatch: call.loss(jax.tree.unflatten(tree, leaves), microbatch)
    avals = jax.make_jaxpr(lambda: call.microbatch(0))().out_avals
    jaxpr, shape = jax.make_jaxpr(loss, return_shape=True)(leaves, list(avals))
    is_param = [True] * len(leaves) + [False] * len(avals)

    def loops_of(eqn: JaxprEqn, perturbed: tuple[bool, ...]) -> Loops:
        loops = forward_loops(perturbed=perturbed, microbatches=2, **eqn.params)
        return dataclasses.replace(loops, segments=joined(loops.segments))  # fewer loops beside each other

    pieces = divide(jaxpr, is_param, [not p for p in is_param], scan_p, loops_of)
    if not _offloads(pieces):
        return None
    _refuse_what_does_not_fit(pieces)
    gradients = sum(map(nbytes, map(jax.typeof, leaves)))
    first, last = ends(pieces, call.microbatches, gradients, lambda eqn, *args: recomputing(*args, **eqn.params))
    fixed, varying = pieces.invars[: -len(avals)], pieces.invars[-len(avals) :]
    of_params = fixed[len(pieces.consts) :]

    def run(*operands: Any) -> tuple[Any, list[Any], list[Any]]:
        values, batch = dict(zip(fixed, operands, strict=False)), list(operands[len(fixed) :])
        made_of = lambda pieces: lambda: program_of(pieces, backward_loops, of_params, values)
        between = made_of(pieces)
        of_first, of_last = (between if end is pieces else made_of(end) for end in (first, last))
        microbatch = lambda number: dict(zip(varying, call._replace(batch=batch).microbatch(number), strict=True))
        sums = [filled(jax.typeof(values[v]), 0) for v in of_params]
        (losses, *aux), grads = interleaved.run(of_first, between, of_last, call.microbatches, microbatch, sums)
        value, _ = lax.scan(lambda total, loss: (total + loss, None), filled(jaxpr.out_avals[0], 0), losses)
        return value, aux, grads

    operands = [*pieces.consts, *leaves, *call.batch]
    of_one = interleaved.Loss(convert_constvars_jaxpr(jaxpr), (*[False] * len(jaxpr.consts), *is_param))
    loops_in = lambda pieces: tuple(scan.loops for scan in pieces.scans)
    what = interleaved.Interleaved(of_one, loops_in(pieces), loops_in(first), loops_in(last), call.microbatches)
    outs = interleaved.bind(run, what, *operands)
    value, aux, grads = outs[0], outs[1 : -len(leaves)], outs[-len(leaves) :]
    _, of_aux = shape
    return (value, jax.tree.unflatten(tree, grads)), jax.tree.unflatten(jax.tree.structure(of_aux), aux)


def _staged(call: _Call, axis: str | None, virtual_stages: int) -> Any:
    """The same, on pipeline stages; None where there are none."""
    if axis is None or is_reference() or jax.config.jax_disable_jit:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape[axis] == 1:
        return None
    schedule = Schedule(mesh.shape[axis], virtual_stages, call.microbatches)
    leaves, tree = jax.tree.flatten(call.params)
    loss = lambda leaves, microbatch: call.loss(jax.tree.unflatten(tree, leaves), microbatch)
    avals = jax.make_jaxpr(lambda: call.microbatch(0))().out_avals
    trace = lambda: jax.make_jaxpr(loss, return_shape=True)(leaves, list(avals))
    jaxpr, shape = with_stages(axis, trace)
    is_param = [True] * len(leaves) + [False] * len(avals)

    def chosen(scans: list[JaxprEqn]) -> list[JaxprEqn]:
        length = lambda eqn: eqn.params["call_jaxpr"].eqns[0].params["length"]
        return sorted((s for s in scans if length(s) % schedule.chunks == 0), key=length)[-1:]

    def loops_of(eqn: JaxprEqn, perturbed: tuple[bool, ...]) -> Loops:
        params = {name: eqn.params[name] for name in ("on_stage", "policy", "strict")}
        with on_a_stage(axis):
            loops = chunk_loops(perturbed=perturbed, chunks=schedule.chunks, slots=schedule.slots, **params)
        return dataclasses.replace(loops, segments=joined(loops.segments))

    pieces = divide(jaxpr, is_param, [not p for p in is_param], scan_p, loops_of, chosen)
    (scan,) = pieces.scans
    fixed, varying = pieces.invars[: -len(avals)], pieces.invars[-len(avals) :]
    of_params = fixed[len(pieces.consts) :]
    inner = range(scan.loops.consts, scan.loops.consts + scan.loops.carry)
    differs = lambda v: isinstance(v, Var) and v in pieces.varies
    along = tuple(i for i, v in enumerate(scan.eqn.invars) if differs(v) and i not in inner)

    def run(*operands: Any) -> tuple[Any, list[Any], list[Any]]:
        values, batch = dict(zip(fixed, operands, strict=False)), list(operands[len(fixed) :])
        program = program_of(pieces, backward_loops, of_params, values)
        staged = StagedLoss(program, Chunks(scan.loops, schedule.stages, virtual_stages, along))
        microbatch = lambda number: dict(zip(varying, call._replace(batch=batch).microbatch(number), strict=True))
        (losses, *aux), grads = pipeline.run(staged, schedule, axis, microbatch)
        value, _ = lax.scan(lambda total, loss: (total + loss, None), filled(jaxpr.out_avals[0], 0), losses)
        return value, aux, grads

    value, aux, grads = run(*pieces.consts, *leaves, *call.batch)
    _, of_aux = shape
    return (value, jax.tree.unflatten(tree, grads)), jax.tree.unflatten(jax.tree.structure(of_aux), aux)


def _refuse_what_does_not_fit(pieces: Pieces) -> None:
    """Raise if the pinned host pool cannot hold the stacks of two microbatches of all scans."""
    segments = [segment for scan in pieces.scans for segment in scan.loops.segments if segment.on_host]
    one = sum((segment.on_host + 1) * segment.layer.host_bytes for segment in segments)  # and a padding row
    need, pool = 2 * one, host_pool_bytes()
    if pool is not None and need > pool:
        text = f"two microbatches offload {readable(need)} per device; the pinned host pool holds {readable(pool)}"
        raise HostPoolFull("accumulate", text, need, pool, None, auto_axes())


def _offloads(pieces: Pieces) -> bool:
    """Whether a scan of a loss offloads. Warn if there is none."""
    if not pieces.scans:
        warnings.warn(
            "jaxoffload: accumulate: the loss has no scan of jaxoffload's that the gradient reaches, outside of other "
            "control flow; the microbatches run one after another",
            skip_file_prefixes=NOT_THE_USERS,
        )
    return any(segment.on_host for scan in pieces.scans for segment in scan.loops.segments)
