"""accumulate(): `jax.value_and_grad` over microbatches, the forward pass of one beside the backward pass of another."""

import contextlib
import dataclasses
import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import AxisType

from ._engine.host.limit import HostPoolFull, auto_axes, host_pool_bytes
from ._engine.host.need import Need, need_of_microbatches, stacks_of
from ._engine.layers.layer import in_three
from ._engine.layers.loops import Loops, filled
from ._engine.layers.scan_primitive import backward_loops, forward_loops, on_a_stage, recomputing, scan_p
from ._engine.layers.segments import joined
from ._engine.microbatches import interleaved
from ._engine.microbatches.ends import ends, spare_of
from ._engine.microbatches.passes import Values, program_of
from ._engine.microbatches.pieces import Pieces, Scan, divide
from ._engine.stages import evaluate as forward_pipeline
from ._engine.stages import pipeline
from ._engine.stages.chunk import Chunks, chunk_loops
from ._engine.stages.loss import StagedLoss
from ._engine.stages.schedule import Schedule
from ._errors import NOT_THE_USERS
from ._jax import as_array, convert_constvars_jaxpr, in_memory_of, nbytes, on_device, without_remat3
from ._lost_changes import warns_of_lost_changes
from ._policy import Policy
from ._refusals import refuse_ordered_effects
from ._same_draws import warn_of_same_draws
from ._text import nearest, readable
from ._tracing import tracing, under

Reduction = Literal["mean", "sum"]


def accumulate(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduction: Reduction = "mean",
    stages: str | None = None,
    virtual_stages: int = 1,
    forward_only: bool = False,
) -> Callable[..., Any]:
    """`jax.value_and_grad` over microbatches, with the copies of each `scan` behind two passes instead of one.

    While the backward pass of one microbatch runs, layer by layer, so does the forward pass of the next. Each layer's
    residuals travel beside the forward pass of one layer and the backward pass of another, both ways at once, and the
    gradients are added where they are made. The results are those of

        derived = lambda microbatch: jax.value_and_grad(loss)(params, microbatch)
        lax.scan(lambda sums, microbatch: (add(sums, derived(microbatch)), None), zeros, microbatches)

    The `scan`s are found in the traced loss, inside jitted functions too; there may be several, of different lengths. A
    `chain`, or a `scan` inside other control flow, runs as it does without `accumulate`. If no `scan` offloads, the
    microbatches run one after another; gradients are still added where they are made.

    Args:
      loss: as for `jax.value_and_grad`: returns a scalar, or a pair of it and a pytree of arrays.
      argnums: which positional arguments to differentiate. All others, and keyword arguments, are batches: their leaves
        have a leading axis of microbatches.
      has_aux: whether `loss` returns a pair.
      reduction: "mean" or "sum", of the losses and of the gradients over the microbatches.
      stages: a mesh axis, over which the layers of one `scan` are divided: pipeline stages, in lockstep. The scan's xs
        are sharded over it. docs/stages.md has the schedule. None: all devices run all layers.
      virtual_stages: how many chunks of layers each stage has, dealt in turn.
      forward_only: for evaluation: return what `loss` does, without gradients. `argnums` has the parameters.

    Returns:
      A function of the arguments of `loss` that returns what `jax.value_and_grad(loss, argnums, has_aux)` does, in the
      same dtypes; `forward_only`: without the gradients. Other results get a leading axis of microbatches. It cannot be
      differentiated.

    Raises:
      TypeError, ValueError: `argnums` or `reduction` is something else, or `virtual_stages` is not a whole number above
        0.

    Raises (when called, before anything is compiled):
      TypeError, ValueError: an argument has no axis of microbatches, or one of another length; and what
        `jax.value_and_grad` raises.
      PolicyError, NotImplementedError: as in `scan`.
      HostPoolFull: the pinned host pool cannot hold what two microbatches offload, or the stacks of those on a stage.
      ValueError, NotImplementedError: `stages` is not an axis of the mesh, whose axes are Auto, or the
        layers cannot be dealt, or would wait for other stages for ever, which may be known only when XLA has compiled.

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
    numbers = _indices(argnums)
    if reduction not in get_args(Reduction):
        hint = nearest(reduction, get_args(Reduction))
        raise ValueError(f"accumulate: reduction {reduction!r} is not allowed; use 'mean' or 'sum'{hint}")
    if type(virtual_stages) is not int or virtual_stages < 1:
        raise ValueError(f"accumulate: virtual_stages {virtual_stages!r} is not allowed; use a whole number above 0")
    if stages is None and virtual_stages > 1:
        raise ValueError(f"accumulate: virtual_stages {virtual_stages} needs stages, the name of a mesh axis")

    def mean_of(sums: Any, microbatches: int) -> Any:
        return jax.tree.map(lambda x: x / microbatches, sums) if reduction == "mean" else sums

    @without_remat3
    def value_alone(*args: Any, **kwargs: Any) -> Any:
        call, _ = _call(loss, numbers, has_aux, forward_only, args, kwargs)
        values, aux = _values_on_stages(call, _stages(stages, virtual_stages)) or _values(call)
        value = mean_of(_sum(values), call.microbatches)
        return (value, aux) if has_aux else value

    @without_remat3
    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        call, params = _call(loss, numbers, has_aux, forward_only, args, kwargs)
        sums, aux = _on_stages(call, _stages(stages, virtual_stages)) or _by_layers(call) or _one_by_one(call)
        value, grads = mean_of(sums, call.microbatches)
        grads = map(in_memory_of, map(jax.typeof, call.params), grads)
        return ((value, aux) if has_aux else value), jax.tree.unflatten(params, grads)

    return value_alone if forward_only else value_and_grad


def _indices(argnums: Any) -> int | tuple[int, ...]:
    """Return `argnums` in Python's numbers, which NumPy's and others stand for."""
    for convert in (operator.index, lambda each: tuple(map(operator.index, each))):
        with contextlib.suppress(TypeError):
            if (numbers := convert(argnums)) != ():
                return numbers
    raise TypeError(f"accumulate: argnums {argnums!r} is not allowed; use a whole number, or a sequence of them")


class _Call(NamedTuple):
    """A call of `accumulate`'s function. `loss(params, microbatch)` returns a pair. Parameters, of which the loss may
    change its own copy, and microbatches are flat."""

    loss: Callable[[list[Any], list[Any]], tuple[Any, Any]]
    params: list[Any]
    batch: list[Any]
    microbatches: int

    def microbatch(self, number: Any) -> list[Any]:
        return [lax.dynamic_index_in_dim(x, number, keepdims=False) for x in self.batch]


def _call(
    loss: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    forward_only: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[_Call, Any]:
    """Return a call, and the structure of its gradients."""
    numbers = _positions(argnums, len(args))
    others = {n: x for n, x in enumerate(args) if n not in numbers}
    microbatches = _microbatches(others, kwargs)
    batch, of_batch = jax.tree.flatten((others, kwargs))
    params, of_params = jax.tree.flatten([args[n] for n in numbers])
    if not forward_only:
        _refuse_integers({n: args[n] for n in numbers})

    def run(loss: Callable[..., Any], params: Sequence[Any], microbatch: Sequence[Any]) -> Any:
        others, kwargs = jax.tree.unflatten(of_batch, microbatch)
        given = dict(zip(numbers, jax.tree.unflatten(of_params, params), strict=True)) | others
        return loss(*(given[n] for n in range(len(args))), **kwargs)

    flat = functools.partial(run, loss)
    call = _Call(flat, params, list(map(as_array, batch)), microbatches)
    shape = _judged(call, functools.partial(run, warns_of_lost_changes(loss, "accumulate", args, kwargs)))
    # JAX's own errors, about parameters and results that cannot be differentiated.
    zeros = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
    jax.eval_shape(jax.value_and_grad(zeros, has_aux=has_aux), 0.0 if forward_only else params)
    of_grads = jax.tree.structure(args[argnums] if isinstance(argnums, int) else tuple(args[n] for n in numbers))
    return call if has_aux else call._replace(loss=lambda *args: (flat(*args), None)), of_grads


def _judged(call: _Call, loss: Callable[..., Any]) -> Any:
    """Return what a loss returns, in shapes; warn of random numbers that are the same in all microbatches."""
    one = jax.eval_shape(lambda: call.microbatch(0))
    try:
        jaxpr, shape = jax.make_jaxpr(loss, return_shape=True)(call.params, one)
    except TypeError as error:
        if any(map(_is_raw_key, call.batch)):  # whose two or four numbers are as many as the microbatches
            error.add_note(f"jaxoffload: accumulate: a batch may be a PRNG key; {_SPLIT}")
        raise
    warn_of_same_draws(jaxpr, [False] * len(call.params) + [True] * len(one), call.microbatches)
    return shape


def _refuse_integers(params: dict[int, Any]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"accumulate: args{jax.tree_util.keystr(path)} is {leaf.dtype}, which has no gradient; close over it. "
                "In Flax NNX, graph, params, rest = nnx.split(module, nnx.Param, ...) divides a module"
            )


def _positions(argnums: int | tuple[int, ...], count: int) -> list[int]:
    """Return which of so many positional arguments `argnums` means."""
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    if wrong := [n for n in numbers if not -count <= n < count]:
        raise ValueError(f"accumulate: argnums has {wrong[0]}, and there are {count} positional arguments")
    numbers = [n % count for n in numbers]
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"accumulate: argnums {argnums} has one of {count} positional arguments twice")
    return numbers


def _microbatches(others: dict[int, Any], kwargs: dict[str, Any]) -> int:
    """The length of the leading axis that all leaves have."""
    lengths, raw_keys = {}, []
    for name, arguments in ("args", others), ("kwargs", kwargs):
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
            argument = f"{name}{jax.tree_util.keystr(path)}"
            if not (shape := getattr(leaf, "shape", ())):
                raise TypeError(
                    f"accumulate: {argument} has no leading axis of microbatches, which every argument needs that is "
                    f"not in argnums; {_SPLIT if _is_key(leaf) else _CLOSE}"
                )
            lengths[argument] = shape[0]
            raw_keys += [argument] * _is_raw_key(leaf)
    if not lengths:
        raise TypeError("accumulate: argnums has all arguments; at least one must be a batch, split in microbatches")
    (first, length), *rest = lengths.items()
    if differ := [f"{argument} has {n}" for argument, n in rest if n != length]:
        hint = f"{raw_keys[0]} may be a PRNG key: {_SPLIT}" if raw_keys else _CLOSE
        raise ValueError(
            f"accumulate: {first} has {length} microbatches, and {differ[0]}; they must be as many; {hint}"
        )
    if not length:
        raise ValueError(f"accumulate: {first} has no microbatches")
    return length


_CLOSE = "close over what is the same in all microbatches: frozen weights, a step number"
_SPLIT = "split the key, one per microbatch: jax.random.split(key, microbatches)"


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_raw_key(leaf: Any) -> bool:
    """Return if a leaf may be one of `jax.random.PRNGKey`'s."""
    return jnp.result_type(leaf) == jnp.uint32 and jnp.shape(leaf) in ((2,), (4,))


class _Stages(NamedTuple):
    """Pipeline stages: over which mesh axis, its size, and how many chunks of layers each has."""

    axis: str
    size: int
    virtual: int


def _stages(axis: str | None, virtual: int) -> _Stages | None:
    """What a call asks for, under the mesh that it is traced under; None if all devices run all layers.

    That is also so for a single stage, in the reference, and without jit.
    """
    if axis is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        axes = f"has the axes {', '.join(mesh.axis_names)}" if mesh.axis_names else "is empty; call it in jax.set_mesh"
        hint = nearest(axis, mesh.axis_names)
        raise ValueError(f"accumulate: stages={axis!r} is not an axis of the mesh, which {axes}{hint}")
    if others := [
        f"{name!r} is {kind.name}"
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is not AxisType.Auto
    ]:
        raise NotImplementedError(
            f"accumulate: stages={axis!r}: the mesh's axis {', '.join(others)}; with stages all must be Auto"
        )
    if mesh.shape[axis] == 1 or tracing().reference or jax.config.jax_disable_jit:
        return None
    return _Stages(axis, mesh.shape[axis], virtual)


def _one_by_one(call: _Call) -> Any:
    """The sums of losses and gradients, and the other results: one microbatch after another."""
    derived = jax.value_and_grad(call.loss, has_aux=True)

    def add(sums: Any, number: Any) -> Any:
        (value, aux), grads = derived(call.params, call.microbatch(number))
        return jax.tree.map(jnp.add, sums, (value, list(map(on_device, grads)))), aux

    value, *grads = [filled(aval, 0) for aval in _derived_avals(call)]
    return lax.scan(add, (value, grads), jnp.arange(call.microbatches))


def _derived_avals(call: _Call) -> list[Any]:
    """The types of the loss and of the gradients of a microbatch."""

    def of_first() -> Any:
        (value, _), grads = jax.value_and_grad(call.loss, has_aux=True)(call.params, call.microbatch(0))
        return value, *grads

    return jax.make_jaxpr(of_first)().out_avals


def _values(call: _Call) -> Any:
    """The losses and the other results, stacked: one microbatch after another."""
    return lax.map(lambda number: call.loss(call.params, call.microbatch(number)), jnp.arange(call.microbatches))


def _sum(values: Any) -> Any:
    """Of the losses, in their order."""
    total, _ = lax.scan(lambda total, value: (total + value, None), jnp.zeros_like(values[0]), values)
    return total


class _Divided(NamedTuple):
    """A call's loss in pieces.

    Attributes:
      loss: for readers of the equation.
      fixed, varying: the variables of what is the same for all microbatches (constants, parameters), and of the values
        of one. `params`: those of the parameters.
      operands: all values: `fixed`, then those of all microbatches.
      others: the structure of the other results.
    """

    loss: interleaved.Loss
    pieces: Pieces
    fixed: list[Var]
    params: list[Var]
    varying: list[Var]
    operands: list[Any]
    others: Any

    def microbatch(self, call: _Call, batch: Sequence[Any], number: Any) -> dict[Var, Any]:
        """The values of a microbatch, by their variables."""
        return dict(zip(self.varying, call._replace(batch=list(batch)).microbatch(number), strict=True))

    def unflatten(self, call: _Call, outs: Sequence[Any]) -> Any:
        """What `_one_by_one` returns, from the losses, the other results and the gradients."""
        losses, aux, grads = in_three(outs, 1, len(outs) - 1 - len(self.params))
        grads = [grad.reshape(jnp.shape(param)) for grad, param in zip(grads, call.params, strict=True)]
        return (_sum(*losses), grads), jax.tree.unflatten(self.others, aux)


def _divided(
    call: _Call,
    loops_of: Callable[[JaxprEqn, tuple[bool, ...]], Loops],
    chosen: Callable[[list[JaxprEqn]], list[JaxprEqn]] = list,
    axis: str | None = None,
) -> _Divided | None:
    """Trace the loss of one microbatch, and divide it at its scans: for `divide`, and `axis` for its scans."""
    avals = jax.make_jaxpr(lambda: call.microbatch(0))().out_avals
    trace = jax.make_jaxpr(call.loss, return_shape=True)
    with under(stage_axis=axis):
        jaxpr, (_, of_aux) = trace(call.params, list(avals))
    is_param = [True] * len(call.params) + [False] * len(avals)
    pieces = divide(jaxpr, is_param, [not p for p in is_param], scan_p, loops_of, chosen)
    if pieces is None:
        return None
    fixed, varying = pieces.invars[: -len(avals)], pieces.invars[-len(avals) :]
    differentiated = (*[False] * len(jaxpr.consts), *is_param)
    of_one = interleaved.Loss(convert_constvars_jaxpr(jaxpr), differentiated, pieces.beside)
    params: list[Any] = fixed[len(pieces.consts) :]
    views = [jnp.reshape(leaf, v.aval.shape) for leaf, v in zip(call.params, params, strict=True)]
    operands = [*pieces.consts, *views, *call.batch]
    return _Divided(of_one, pieces, fixed, params, varying, operands, jax.tree.structure(of_aux))


def _by_layers(call: _Call) -> Any:
    """The same, interleaved if something is offloaded; the gradients of layers are added where they are made. None
    where there are no layers, or one microbatch."""
    if call.microbatches == 1 or tracing().reference or jax.config.jax_disable_jit:
        return None

    def loops_of(eqn: JaxprEqn, perturbed: tuple[bool, ...], offloaded: int | None = None) -> Loops:
        loops = forward_loops(perturbed=perturbed, microbatches=2, offloaded=offloaded, **eqn.params)
        return dataclasses.replace(loops, segments=joined(loops.segments))  # fewer loops beside each other

    if (divided := _divided(call, loops_of)) is None:
        return _warn_of(f"the loss has a jax.new_ref {_OUTSIDE}")
    divided = divided._replace(pieces=_that_fit(divided.pieces, loops_of))
    pieces, fixed = divided.pieces, divided.fixed
    loops_in = lambda pieces: tuple(scan.loops for scan in pieces.scans)
    gradients = sum(nbytes(v.aval) for v in divided.params)
    if not pieces.scans:
        return _warn_of(f"the loss has no scan of jaxoffload's that the gradient reaches, {_OUTSIDE}")
    offloads = any(segment.on_host for scan in pieces.scans for segment in scan.loops.segments)
    if not offloads and (trial := tracing().trial) and trial.says_what_interleaves:
        return _tried(call, divided, loops_in(pieces), gradients)
    first = last = pieces
    if offloads:
        refuse_ordered_effects("accumulate", divided.loss.jaxpr)
        first, last = ends(pieces, call.microbatches, gradients, lambda eqn, *args: recomputing(*args, **eqn.params))

    of_sums = _gradient_avals(call, divided)

    def run(*operands: Any) -> Any:
        values = dict(zip(fixed, operands, strict=False))
        made_of = lambda pieces: lambda: program_of(pieces, backward_loops, divided.params, values)
        between = made_of(pieces)
        of_first, of_last = (between if end is pieces else made_of(end) for end in (first, last))
        microbatch = functools.partial(divided.microbatch, call, operands[len(fixed) :])
        shapes = [jnp.shape(values[v]) for v in divided.params]
        sums = [jnp.reshape(filled(aval, 0), shape) for aval, shape in zip(of_sums, shapes, strict=True)]
        if not offloads:
            return interleaved.run_in_turn(between, call.microbatches, microbatch, sums)
        return interleaved.run(of_first, between, of_last, call.microbatches, microbatch, sums)

    ends_and_between = loops_in(pieces), loops_in(first), loops_in(last)
    what = interleaved.Interleaved(divided.loss, *ends_and_between, call.microbatches)
    return divided.unflatten(call, interleaved.bind(run, what, *divided.operands))


def _gradient_avals(call: _Call, divided: _Divided) -> list[Any]:
    """The types of the gradients: those of the parameters, except that Explicit axes may come from the microbatches."""
    is_explicit = lambda aval: bool(aval.sharding.mesh.explicit_axes)
    avals: list[Any] = [v.aval for v in divided.params]
    if any(map(is_explicit, map(jax.typeof, divided.operands))) and not all(map(is_explicit, avals)):
        return _derived_avals(call)[1:]
    return avals


def _tried(call: _Call, divided: _Divided, loops: tuple[Loops, ...], gradients: int) -> Any:
    """The same, one microbatch after another; `plan` sees what would interleave if something were offloaded."""
    spare = spare_of(divided.pieces, call.microbatches, gradients)
    what = interleaved.Interleaved(divided.loss, loops, loops, loops, call.microbatches, spare=spare)
    in_turn = lambda params, batch: _one_by_one(call._replace(params=params, batch=batch))
    return interleaved.bind_in_turn(in_turn, what, call.params, call.batch)


def _on_stages(call: _Call, stages: _Stages | None) -> Any:
    """The same, on pipeline stages; None where there are none."""
    if stages is None:
        return None
    schedule = Schedule(stages.size, stages.virtual, call.microbatches)
    divided, chunks = _dealt(call, stages, schedule)
    _refuse_what_does_not_fit(divided.pieces, chunks, schedule)

    def run(*operands: Any) -> tuple[list[Any], list[Any]]:
        return pipeline.run(*_staged(call, divided, chunks, operands), schedule, stages.axis)

    loops = (chunks.loops,)
    what = interleaved.Interleaved(
        divided.loss, loops, loops, loops, call.microbatches, schedule, stage_axis=stages.axis
    )
    return divided.unflatten(call, interleaved.bind(run, what, *divided.operands))


def _values_on_stages(call: _Call, stages: _Stages | None) -> Any:
    """The losses and the other results, stacked, on pipeline stages; None where there are none."""
    if stages is None:
        return None
    schedule = Schedule(stages.size, stages.virtual, call.microbatches)
    divided, chunks = _dealt(call, stages, schedule, keep_nothing=True)
    losses, *others = forward_pipeline.run(*_staged(call, divided, chunks, divided.operands), schedule, stages.axis)
    return losses, jax.tree.unflatten(divided.others, others)


def _dealt(call: _Call, stages: _Stages, schedule: Schedule, keep_nothing: bool = False) -> tuple[_Divided, Chunks]:
    """The loss, divided at the scan whose layers are dealt, and these. `keep_nothing`: nothing is offloaded."""

    def loops_of(eqn: JaxprEqn, perturbed: tuple[bool, ...]) -> Loops:
        params = {name: eqn.params[name] for name in ("on_stage", "policy", "strict")}
        if keep_nothing:
            params |= {"policy": Policy(), "strict": False}
        with on_a_stage(stages.axis):
            return chunk_loops(perturbed=perturbed, chunks=schedule.chunks, slots=schedule.slots, **params)

    # The longest scan that the gradient reaches.
    each = (_divided(call, loops_of, functools.partial(_to_deal, schedule, n), stages.axis) for n in itertools.count())
    divided = next(divided for divided in each if divided is None or divided.pieces.scans)
    if divided is None:
        raise NotImplementedError(
            f"accumulate: stages={stages.axis!r}: the loss has a jax.new_ref {_OUTSIDE}; return what it would hold, "
            "with has_aux=True, or accumulate without stages"
        )
    _refuse_effects(divided, stages)
    (scan,) = divided.pieces.scans
    carry = range(scan.loops.consts, scan.loops.consts + scan.loops.carry)
    differs = lambda v: isinstance(v, Var) and v in divided.pieces.varies
    along = tuple(i for i, v in enumerate(scan.eqn.invars) if differs(v) and i not in carry)
    operands = enumerate(zip(scan.eqn.invars, scan.perturbed, strict=True))
    computed = (i for i, (v, p) in operands if p and not (differs(v) or i in carry) and not divided.pieces.moved(v))
    return divided, Chunks(scan.loops, schedule.stages, schedule.virtual_stages, along, frozenset(computed))


def _staged(
    call: _Call, divided: _Divided, chunks: Chunks, operands: Sequence[Any]
) -> tuple[StagedLoss, Callable[[Any], Values]]:
    """The loss on these operands, and what returns the values of a microbatch."""
    values = dict(zip(divided.fixed, operands, strict=False))
    program = program_of(divided.pieces, backward_loops, divided.params, values)
    microbatch = functools.partial(divided.microbatch, call, operands[len(divided.fixed) :])
    return StagedLoss(program, chunks), microbatch


def _to_deal(schedule: Schedule, number: int, scans: list[JaxprEqn]) -> list[JaxprEqn]:
    """The scan whose layers are dealt: by length, one of those that the chunks divide.

    Raises:
      ValueError, NotImplementedError: there is none, or its layers cannot be dealt.
    """
    params = lambda eqn: eqn.params["call_jaxpr"].eqns[0].params
    lengths = [params(eqn)["length"] for eqn in scans]
    dealt = [eqn for eqn in scans if params(eqn)["length"] % schedule.chunks == 0]
    if number >= len(dealt):
        has = f"scans of {', '.join(map(str, lengths))} layers" if scans else "no scan of jaxoffload's"
        chunks = f"{schedule.stages} stages * {schedule.virtual_stages} virtual stages"
        raise ValueError(
            f"accumulate: the loss has {has}, outside of other control flow; the gradient must reach one whose layers "
            f"are divisible by {chunks}"
        )
    scan = sorted(dealt, key=lambda eqn: -params(eqn)["length"])[number]
    if params(scan)["reverse"]:
        raise NotImplementedError("accumulate: stages: a scan with reverse=True cannot be dealt; reverse its xs")
    if scan.params["on_stage"] is None:
        raise NotImplementedError(
            "accumulate: stages: a scan inside vmap or checkify, or one that offload replaced, cannot be dealt; call "
            "jaxoffload.scan"
        )
    return [scan]


def _refuse_effects(divided: _Divided, stages: _Stages) -> None:
    if effects := divided.loss.jaxpr.effects:
        raise NotImplementedError(
            f"accumulate: stages={stages.axis!r}: the loss has effects ({', '.join(map(str, effects))}), and stages "
            "run its layers for microbatches that do not exist, too; remove them, or accumulate without stages"
        )


def _that_fit(pieces: Pieces, loops_of: Callable[[JaxprEqn, tuple[bool, ...], int], Loops]) -> Pieces:
    """The pieces, with fewer layers that offload where the policies say so and all scans together have no room.

    Raises:
      HostPoolFull: the pool cannot hold what two microbatches offload, and a policy says `on_host_full: error`.
    """
    offloading = [scan for scan in pieces.scans if stacks_of(scan.loops.segments)]
    if (pool := host_pool_bytes()) is None or not offloading:
        return pieces
    need = need_of_microbatches([scan.loops for scan in pieces.scans], pieces.beside).bytes()
    if need <= pool:
        return pieces
    scans = Need([stack for scan in offloading for stack in stacks_of(scan.loops.segments)], 0, [])
    others = need - 2 * scans.bytes()
    fit = next((n for n in reversed(range(scans.most_layers())) if others + 2 * scans.bytes(n) <= pool), None)
    text = f"two microbatches offload {readable(need)} per device; the pinned host pool holds {readable(pool)}"
    if fit is None or any(scan.eqn.params["policy"].on_host_full == "error" for scan in offloading):
        raise HostPoolFull("accumulate", text, need, pool, fit, auto_axes())
    instead = f"enough for {fit} layer(s) of each scan, which offload (on_host_full: save)"
    warnings.warn(f"jaxoffload: accumulate: {text}, {instead}", skip_file_prefixes=NOT_THE_USERS)
    offloaded = lambda scan: min(fit, sum(segment.on_host for segment in scan.loops.segments))
    fewer = lambda scan: scan._replace(loops=loops_of(scan.eqn, scan.perturbed, offloaded(scan)))
    return pieces._replace(pieces=[fewer(piece) if isinstance(piece, Scan) else piece for piece in pieces.pieces])


def _refuse_what_does_not_fit(pieces: Pieces, chunks: Chunks, schedule: Schedule) -> None:
    """Raise if the pool cannot hold what a stage offloads, with what stands beside its layers."""
    need, pool = need_of_microbatches([chunks.loops], pieces.beside, schedule).bytes(), host_pool_bytes()
    if pool is not None and need > pool:
        what = f"{schedule.slots} microbatches per stage, and what stands beside their layers"
        text = f"{what}, offload {readable(need)} per device; the pinned host pool holds {readable(pool)}"
        raise HostPoolFull("accumulate", text, need, pool, None, auto_axes())


def _warn_of(why: str) -> None:
    warnings.warn(
        f"jaxoffload: accumulate: {why}; the microbatches run one after another", skip_file_prefixes=NOT_THE_USERS
    )


_OUTSIDE = "outside of other control flow"
