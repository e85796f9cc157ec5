"""accumulate(): `jax.value_and_grad` over microbatches that run beside each other; evaluate(): the loss alone."""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import AxisType

from ._engine.layers.rows import filled, summand
from ._engine.microbatches.by_layers import sums_by_layers
from ._engine.microbatches.call import Call, Sums, microbatch_of, total
from ._engine.stages.on_stages import Stages, sums_on_stages, values_on_stages
from ._errors import UserError, deprecated
from ._jax import as_array, convert_constvars_jaxpr, in_memory_of, is_traceable, without_remat3
from ._lost_changes import warns_of_lost_changes
from ._policy import check_functions
from ._same_draws import warn_of_same_draws
from ._text import nearest, short
from ._tracing import tracing, under

Reduction = Literal["mean", "sum"]


def accumulate(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Any = 0,
    reduction: Reduction = "mean",
    sum_dtype: Any = None,
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
      argnums: which positional arguments to differentiate, the parameters.
      in_axes: as for `jax.vmap`: 0 for a batch, whose leaves have a leading axis of microbatches; None for what is the
        same in all microbatches, such as frozen weights or a step number. Either one for all arguments, or a sequence
        of one for each positional argument, which may be a pytree prefix of it. Parameters are always the same, and
        keyword arguments always batches.
      has_aux: whether `loss` returns a pair.
      reduction: "mean" or "sum", of the losses and of the gradients over the microbatches.
      sum_dtype: a floating dtype, in which narrower floating gradients are summed and returned: jnp.float32 for an
        optimizer that has float32 masters of bfloat16 parameters. None: each in its own dtype.
      stages: a mesh axis, over which the layers of one `scan` are divided: pipeline stages, in lockstep. The scan's xs
        are sharded over it. docs/stages.md has the schedule. None: all devices run all layers.
      virtual_stages: how many chunks of layers each stage has, dealt in turn.
      forward_only: deprecated; use `evaluate`.

    Returns:
      A function of the arguments of `loss` that returns what `jax.value_and_grad(loss, argnums, has_aux)` does, in the
      same dtypes, except by `sum_dtype`. Other results get a leading axis of microbatches. It cannot be differentiated.

    Raises:
      TypeError, ValueError: `loss`, `argnums`, `in_axes`, `reduction` or `sum_dtype` is something else, or
        `virtual_stages` is not a whole number above 0.

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
    if forward_only:
        deprecated("accumulate(loss, ..., forward_only=True)", "evaluate(loss, ...)")
        axes = {"in_axes": in_axes, "stages": stages, "virtual_stages": virtual_stages}
        return evaluate(loss, argnums, has_aux, reduction=reduction, **axes)
    check_functions("accumulate", loss=loss)
    how = _judged(_How("accumulate", argnums, in_axes, has_aux, reduction, stages, virtual_stages, sum_dtype))

    @functools.wraps(loss)
    @without_remat3
    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        params = {n: args[n] for n in _positions(how, len(args))}
        _refuse_without_gradient(params)
        call, on_stages = _call(loss, how, args, kwargs, list(params.values()))
        if on_stages:
            value, grads, aux = sums_on_stages(call, on_stages)
        else:
            value, grads, aux = sums_by_layers(call) or _one_by_one(call)
        value, grads = how.reduced((value, grads), call.microbatches)
        grads = [in_memory_of(jax.typeof(param), grad) for param, grad in zip(call.params, grads, strict=True)]
        of_grads = params[how.argnums % len(args)] if isinstance(how.argnums, int) else tuple(params.values())
        return ((value, aux) if has_aux else value), jax.tree.unflatten(jax.tree.structure(of_grads), grads)

    return value_and_grad


def evaluate(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Any = 0,
    reduction: Reduction = "mean",
    stages: str | None = None,
    virtual_stages: int = 1,
) -> Callable[..., Any]:
    """Return what a loss returns over microbatches, without gradients: what `accumulate` is for training.

    Nothing is kept or copied. On pipeline stages only forward passes run, through the same chunks of layers.

    Args:
      loss, has_aux, in_axes, reduction, stages, virtual_stages: as for `accumulate`.
      argnums: the parameters, of any dtype.

    Returns:
      A function of the arguments of `loss` that returns what that does; the loss is reduced over the microbatches, and
      other results get a leading axis of microbatches. It can be differentiated, except on stages.

    Raises:
      Exception: each of those of `accumulate`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxoffload import evaluate
      >>> loss = lambda w, x: jnp.mean(x @ w)
      >>> float(jax.jit(evaluate(loss))(jnp.ones((8, 8)), jnp.ones((4, 2, 8))))  # 4 microbatches
      8.0
    """
    check_functions("evaluate", loss=loss)
    how = _judged(_How("evaluate", argnums, in_axes, has_aux, reduction, stages, virtual_stages))

    @functools.wraps(loss)
    @without_remat3
    def value(*args: Any, **kwargs: Any) -> Any:
        params = [args[n] for n in _positions(how, len(args))]
        call, on_stages = _call(loss, how, args, kwargs, params)
        one = lambda number: call.loss(call.params, call.microbatch(number))
        in_turn = lambda: lax.map(one, jnp.arange(call.microbatches))
        values, aux = values_on_stages(call, on_stages) if on_stages else in_turn()
        value = how.reduced(total(values), call.microbatches)
        return (value, aux) if has_aux else value

    return value


class _How(NamedTuple):
    """The arguments of `accumulate` or `evaluate`, which is the `caller`."""

    caller: str
    argnums: Any
    in_axes: Any
    has_aux: bool
    reduction: Reduction
    stages: str | None
    virtual_stages: int
    sum_dtype: Any = None

    def reduced(self, sums: Any, microbatches: int) -> Any:
        """Return the sums over microbatches, or the means."""
        return jax.tree.map(lambda x: x / microbatches, sums) if self.reduction == "mean" else sums


def _judged(how: _How) -> _How:
    """Return the arguments with `argnums` in Python's numbers; raise if one is wrong."""
    caller, virtual = how.caller, how.virtual_stages
    if how.reduction not in get_args(Reduction):
        hint = nearest(how.reduction, get_args(Reduction))
        raise ValueError(f"{caller}: reduction {how.reduction!r} is not allowed; use 'mean' or 'sum'{hint}")
    if not (how.sum_dtype is None or _is_floating(how.sum_dtype)):
        raise TypeError(f"{caller}: sum_dtype {how.sum_dtype!r} is not allowed; use a floating dtype, or None")
    if type(virtual) is not int or virtual < 1:
        raise ValueError(f"{caller}: virtual_stages {virtual!r} is not allowed; use a whole number above 0")
    if how.stages is None and virtual > 1:
        raise ValueError(f"{caller}: virtual_stages {virtual} needs stages, the name of a mesh axis")
    axes = jax.tree.leaves(how.in_axes, is_leaf=lambda x: x is None)
    if wrong := [axis for axis in axes if axis is not None and axis != 0]:
        raise ValueError(
            f"{caller}: in_axes has {wrong[0]!r}; use 0 for a batch, whose leading axis is that of microbatches, and "
            "None for what is the same in all of them"
        )
    return how._replace(argnums=_indices(caller, how.argnums))


def _is_floating(dtype: Any) -> bool:
    with contextlib.suppress(TypeError):  # it is not a dtype
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    return False


def _indices(caller: str, argnums: Any) -> int | tuple[int, ...]:
    """Return `argnums` in Python's numbers, which NumPy's and others stand for."""
    for convert in (operator.index, lambda each: tuple(map(operator.index, each))):
        with contextlib.suppress(TypeError):
            if (numbers := convert(argnums)) != ():
                return numbers
    raise TypeError(f"{caller}: argnums {argnums!r} is not allowed; use a whole number, or a sequence of them")


def _call(
    loss: Callable[..., Any], how: _How, args: tuple[Any, ...], kwargs: dict[str, Any], params: list[Any]
) -> tuple[Call, Stages | None]:
    """Return a call, and the stages on which it runs."""
    numbers = _positions(how, len(args))
    others = {n: x for n, x in enumerate(args) if n not in numbers}
    named, of_others = jax.tree_util.tree_flatten_with_path({"args": others, "kwargs": kwargs})
    is_batch = _batches(how, others, kwargs, len(args))
    batches = {_name(path): x for (path, x), batched in zip(named, is_batch, strict=True) if batched}
    microbatches = _microbatches(how.caller, batches)
    flat, of_params = jax.tree.flatten(params)
    batch = list(map(as_array, batches.values()))
    # As under `jax.vmap`, what is no array stays as it is: the loss may branch on it.
    is_shared = [not batched and hasattr(x, "dtype") for (_, x), batched in zip(named, is_batch, strict=True)]
    shared = [as_array(x) for (_, x), traced in zip(named, is_shared, strict=True) if traced]

    def run(loss: Callable[..., Any], shared: Any, params: Any, microbatch: Any) -> Any:
        of_batch, of_all = iter(microbatch), iter(shared)
        each = zip((x for _, x in named), is_batch, is_shared, strict=True)
        leaves = [next(of_batch) if batched else next(of_all) if traced else x for x, batched, traced in each]
        rest = jax.tree.unflatten(of_others, leaves)
        given = dict(zip(numbers, jax.tree.unflatten(of_params, params), strict=True)) | rest["args"]
        return loss(*(given[n] for n in range(len(args))), **rest["kwargs"])

    on_stages = _stages(how)
    with under(stage_axis=on_stages.axis if on_stages else None):
        warning = warns_of_lost_changes(loss, how.caller, args, kwargs)
        jaxpr, shape = _traced(how.caller, functools.partial(run, warning), shared, flat, batch)
    # JAX's own errors, about parameters and results that cannot be differentiated.
    zeros = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
    jax.eval_shape(jax.value_and_grad(zeros, has_aux=how.has_aux), flat if how.caller == "accumulate" else 0.0)

    def pair(params: list[Any], microbatch: list[Any]) -> tuple[Any, Any]:
        out = run(loss, shared, params, microbatch)
        return out if how.has_aux else (out, None)

    of_aux = jax.tree.structure(shape[1] if how.has_aux else None)
    whole = convert_constvars_jaxpr(jaxpr) if jaxpr.consts else jaxpr
    return Call(pair, flat, batch, microbatches, whole, [*jaxpr.consts, *shared], of_aux, how.sum_dtype), on_stages


def _batches(how: _How, others: dict[int, Any], kwargs: dict[str, Any], count: int) -> list[bool]:
    """Return which leaves of the arguments that are no parameters, and of keyword arguments, are batches."""
    axes = how.in_axes
    if isinstance(axes, tuple | list):
        if len(axes) != count:
            raise ValueError(f"{how.caller}: in_axes has {len(axes)} entries for {count} positional arguments")
    else:
        axes = [axes] * count
    is_none = lambda x: x is None
    flags: list[bool] = []
    for number, argument in others.items():
        try:
            each = jax.tree.broadcast(axes[number], argument, is_leaf=is_none)
        except ValueError as error:
            raise ValueError(
                f"{how.caller}: in_axes[{number}], {axes[number]!r}, is no pytree prefix of args[{number}]: {error}"
            ) from None
        pairs = zip(*(jax.tree.leaves(tree, is_leaf=is_none) for tree in (each, argument)), strict=True)
        flags += [axis == 0 for axis, leaf in pairs if leaf is not None]
    return flags + [True] * len(jax.tree.leaves(kwargs))


def _traced(
    caller: str, loss: Callable[..., Any], shared: list[Any], params: list[Any], batch: list[Any]
) -> tuple[Jaxpr, Any]:
    """Trace a loss, and return its results in shapes; warn of random numbers that are the same in all microbatches."""
    one = jax.make_jaxpr(lambda: microbatch_of(batch, 0))().out_avals
    try:
        jaxpr, shape = jax.make_jaxpr(loss, return_shape=True)(shared, params, one)
    except UserError:  # it says what to do
        raise
    except Exception as error:
        shapes = ", ".join(aval.str_short() for aval in one[:4]) + ", ..." * (len(one) > 4)
        error.add_note(f"jaxoffload: {caller}: the loss is called with one of {len(batch[0])} microbatches: {shapes}")
        if any(map(_is_raw_key, batch)):  # whose two or four numbers are as many as the microbatches
            error.add_note(f"jaxoffload: {caller}: a batch may be a PRNG key; {_SPLIT}")
        raise
    differ = [n >= len(shared) + len(params) for n in range(len(jaxpr.invars))]
    warn_of_same_draws(caller, jaxpr, differ, len(batch[0]))
    return jaxpr, shape


def _refuse_without_gradient(params: dict[int, Any]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf) if is_traceable(leaf) else None
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            what = dtype or f"{short(leaf)}, of type {type(leaf).__name__}"
            raise TypeError(
                f"accumulate: args{jax.tree_util.keystr(path)} is {what}, which has no gradient; argnums names the "
                "arguments that are parameters: close over all else. A module is divided in Flax NNX by graph, params, "
                "rest = nnx.split(module, nnx.Param, ...), in Equinox by eqx.partition(module, eqx.is_inexact_array)"
            )


def _positions(how: _How, count: int) -> list[int]:
    """Return which of so many positional arguments `argnums` means."""
    numbers = [how.argnums] if isinstance(how.argnums, int) else list(how.argnums)
    if wrong := [n for n in numbers if not -count <= n < count]:
        raise ValueError(f"{how.caller}: argnums has {wrong[0]}, and there are {count} positional arguments")
    numbers = [n % count for n in numbers]
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{how.caller}: argnums {how.argnums} has one of {count} positional arguments twice")
    return numbers


def _name(path: Any) -> str:
    """Return how an error names a leaf of the arguments, such as args[1]['x']."""
    return f"{path[0].key}{jax.tree_util.keystr(path[1:])}"


def _microbatches(caller: str, batches: dict[str, Any]) -> int:
    """Return the length of the leading axis that all batches have."""
    for name, leaf in batches.items():
        if not getattr(leaf, "shape", ()):
            is_key = jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.prng_key)
            raise TypeError(
                f"{caller}: {name} has no leading axis of microbatches, which every argument needs that is "
                f"not in argnums; {_SPLIT if is_key else _SHARE if name.startswith('args') else _BIND}"
            )
    if not batches:
        raise TypeError(f"{caller}: no argument is a batch; at least one must be, split in microbatches")
    (first, length), *rest = ((name, leaf.shape[0]) for name, leaf in batches.items())
    if differ := [f"{name} has {n}" for name, n in rest if n != length]:
        raw_key = next((name for name, leaf in batches.items() if _is_raw_key(leaf)), None)
        hint = f"{raw_key} may be a PRNG key: {_SPLIT}" if raw_key else _SHARE
        raise ValueError(f"{caller}: {first} has {length} microbatches, and {differ[0]}; they must be as many; {hint}")
    if not length:
        raise ValueError(f"{caller}: {first} has no microbatches")
    return length


_SHARE = "give in_axes None for what is the same in all microbatches: frozen weights, a step number"
_BIND = "bind what is the same in all microbatches with functools.partial, or pass it by position with in_axes None"
_SPLIT = "split the key, one per microbatch: jax.random.split(key, microbatches)"


def _is_raw_key(leaf: Any) -> bool:
    """Return if a leaf may be one of `jax.random.PRNGKey`'s."""
    return jnp.result_type(leaf) == jnp.uint32 and jnp.shape(leaf) in ((2,), (4,))


def _stages(how: _How) -> Stages | None:
    """Return the stages under the mesh that a call is traced under; None if all devices run all layers.

    That is also so for a single stage, in the reference, and without jit.
    """
    axis = how.stages
    if axis is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        axes = f"has the axes {', '.join(mesh.axis_names)}" if mesh.axis_names else "is empty; call it in jax.set_mesh"
        hint = nearest(axis, mesh.axis_names)
        raise ValueError(f"{how.caller}: stages={axis!r} is not an axis of the mesh, which {axes}{hint}")
    if others := [
        f"{name!r} is {kind.name}"
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is not AxisType.Auto
    ]:
        raise NotImplementedError(
            f"{how.caller}: stages={axis!r}: the mesh's axis {', '.join(others)}; with stages all must be Auto"
        )
    if mesh.shape[axis] == 1 or tracing().reference or jax.config.jax_disable_jit:
        return None
    return Stages(how.caller, axis, mesh.shape[axis], how.virtual_stages)


def _one_by_one(call: Call) -> Sums:
    """Run one microbatch after another."""
    derived = jax.value_and_grad(call.loss, has_aux=True)

    def add(sums: Any, number: Any) -> Any:
        (value, aux), grads = derived(call.params, call.microbatch(number))
        grads = list(map(summand, grads, sums[1]))
        return jax.tree.map(jnp.add, sums, (value, grads)), aux

    def of_first() -> Any:
        (value, _), grads = derived(call.params, call.microbatch(0))
        return value, *grads

    value, *grads = jax.make_jaxpr(of_first)().out_avals
    zeros = filled(value, 0), list(map(call.zero_sum, grads))
    (value, grads), aux = lax.scan(add, zeros, jnp.arange(call.microbatches))
    return value, grads, aux
