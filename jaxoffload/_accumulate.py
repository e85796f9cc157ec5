"""accumulate(): `jax.value_and_grad` over microbatches, the forward pass of one beside the backward pass of another."""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import AxisType

from ._engine.layers.rows import filled
from ._engine.microbatches.by_layers import sums_by_layers
from ._engine.microbatches.call import Call, Sums, call_of, microbatch_of, total
from ._engine.stages.on_stages import Stages, sums_on_stages, values_on_stages
from ._jax import as_array, in_memory_of, on_device, without_remat3
from ._lost_changes import warns_of_lost_changes
from ._same_draws import warn_of_same_draws
from ._text import nearest
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
        call, on_stages, _ = _call(loss, numbers, has_aux, True, (stages, virtual_stages), args, kwargs)
        values, aux = values_on_stages(call, on_stages) if on_stages else _values(call)
        value = mean_of(total(values), call.microbatches)
        return (value, aux) if has_aux else value

    @without_remat3
    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        call, on_stages, of_grads = _call(loss, numbers, has_aux, False, (stages, virtual_stages), args, kwargs)
        if on_stages:
            value, grads, aux = sums_on_stages(call, on_stages)
        else:
            value, grads, aux = sums_by_layers(call, _one_by_one) or _one_by_one(call)
        value, grads = mean_of((value, grads), call.microbatches)
        grads = [in_memory_of(jax.typeof(param), grad) for param, grad in zip(call.params, grads, strict=True)]
        return ((value, aux) if has_aux else value), jax.tree.unflatten(of_grads, grads)

    return value_alone if forward_only else value_and_grad


def _indices(argnums: Any) -> int | tuple[int, ...]:
    """Return `argnums` in Python's numbers, which NumPy's and others stand for."""
    for convert in (operator.index, lambda each: tuple(map(operator.index, each))):
        with contextlib.suppress(TypeError):
            if (numbers := convert(argnums)) != ():
                return numbers
    raise TypeError(f"accumulate: argnums {argnums!r} is not allowed; use a whole number, or a sequence of them")


def _call(
    loss: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    forward_only: bool,
    stages: tuple[str | None, int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Call, Stages | None, Any]:
    """Return a call, the stages on which it runs, and the structure of its gradients."""
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

    batch, flat = list(map(as_array, batch)), functools.partial(run, loss)
    with_warnings = functools.partial(run, warns_of_lost_changes(loss, "accumulate", args, kwargs))
    on_stages = _stages(*stages)
    with under(stage_axis=on_stages.axis if on_stages else None):
        jaxpr, shape = _traced(with_warnings, params, batch, microbatches)
    # JAX's own errors, about parameters and results that cannot be differentiated.
    zeros = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
    jax.eval_shape(jax.value_and_grad(zeros, has_aux=has_aux), 0.0 if forward_only else params)
    of_grads = jax.tree.structure(args[argnums] if isinstance(argnums, int) else tuple(args[n] for n in numbers))
    pair = flat if has_aux else lambda *args: (flat(*args), None)
    of_aux = jax.tree.structure(shape[1] if has_aux else None)
    return call_of(pair, params, batch, microbatches, jaxpr, of_aux), on_stages, of_grads


def _traced(loss: Callable[..., Any], params: list[Any], batch: list[Any], microbatches: int) -> tuple[Jaxpr, Any]:
    """Trace a loss, and return its results in shapes; warn of random numbers that are the same in all microbatches."""
    one = jax.make_jaxpr(lambda: microbatch_of(batch, 0))().out_avals
    try:
        jaxpr, shape = jax.make_jaxpr(loss, return_shape=True)(params, one)
    except TypeError as error:
        if any(map(_is_raw_key, batch)):  # whose two or four numbers are as many as the microbatches
            error.add_note(f"jaxoffload: accumulate: a batch may be a PRNG key; {_SPLIT}")
        raise
    warn_of_same_draws(jaxpr, [False] * len(params) + [True] * len(one), microbatches)
    return jaxpr, shape


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


def _stages(axis: str | None, virtual: int) -> Stages | None:
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
    return Stages(axis, mesh.shape[axis], virtual)


def _one_by_one(call: Call) -> Sums:
    """Run one microbatch after another."""
    derived = jax.value_and_grad(call.loss, has_aux=True)

    def add(sums: Any, number: Any) -> Any:
        (value, aux), grads = derived(call.params, call.microbatch(number))
        return jax.tree.map(jnp.add, sums, (value, list(map(on_device, grads)))), aux

    def of_first() -> Any:
        (value, _), grads = derived(call.params, call.microbatch(0))
        return value, *grads

    value, *grads = [filled(aval, 0) for aval in jax.make_jaxpr(of_first)().out_avals]
    (value, grads), aux = lax.scan(add, (value, grads), jnp.arange(call.microbatches))
    return value, grads, aux


def _values(call: Call) -> tuple[Any, Any]:
    """Return all losses and the other results, one microbatch after another."""
    return lax.map(lambda number: call.loss(call.params, call.microbatch(number)), jnp.arange(call.microbatches))
