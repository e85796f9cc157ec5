"""The two loops of a scan over layers: each copies the residuals of one layer while it computes the next.

    forward   i:   compute layer i                 write the residuals of layer i-1 to row i on the host
    backward  i:   compute layer i's cotangents    fetch the residuals of layer i-1 from row i

So nothing waits for a copy that takes less time than a layer. The last layer's residuals are kept by themselves, on the
host or where they are. Layer 0 has no layer before it, yet a turn like all others: row 0 is written before there is
anything to write, and fetched when nobody wants it any more.

Layers that treat their residuals otherwise are a segment of their own, with two loops of its own; the carry, the ys and
the cotangents pass from segment to segment.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe
from jax.sharding import NamedSharding, PartitionSpec

from .._jax import Call, evaluate
from .derivative import cached, looks_for_nans
from .layer import Layer, apart, in_three, without_paths
from .memory import DEVICE, HOST
from .source import Source


class DifferentiatedTwice(NotImplementedError):
    """The derivative of a derivative of a `scan` or `chain` was asked for."""


@contextlib.contextmanager
def where_twice(caller: str, said: str) -> Iterator[None]:
    """What `who` says where its function differentiates what is in it, and is differentiated for that."""
    try:
        yield
    except DifferentiatedTwice as why:
        raise DifferentiatedTwice(f"{caller}: {said}") from why


class Segment(NamedTuple):
    """Neighbouring layers that one loop computes, in the order in which they run.

    Of their residuals for the host, those of the first `on_host` layers go there: of all layers, of all but the last,
    or of none.
    """

    start: int
    stop: int
    on_host: int
    jaxpr: Jaxpr  # of one layer: its forward pass, or its backward pass
    layer: Layer
    reason: str  # why the others do not offload

    @property
    def layers(self) -> int:
        return self.stop - self.start

    @property
    def copies(self) -> list[Any]:
        """A scope for each stack on the host."""
        return self.layer.copies if self.on_host else []

    def places(self) -> list[str]:
        return ["device" if k.place == "host" and not self.on_host else k.place for k in self.layer.kept]

    def sources(self) -> list[Source]:
        """Of the leaves of this segment's `Saved`."""

        def those(place: str, layers: int, axes: int) -> list[Source]:
            kept = _those(self.layer.kept, self.places(), place)
            why = lambda k: k.source.where or (self.reason if k.place == "host" else "")
            return [k.source._replace(where=why(k), layers=layers, empty=0, axes=axes) for k in kept]

        host = [o._replace(where="", empty=1) for o in those("host", self.layers - 1, 1)]
        last = [o._replace(where="") if self.on_host == self.layers else o for o in those("host", 1, 0)]
        return [*host, *last, *those("device", self.layers, 1), *those("once", 1, 0)]


class Saved[T](NamedTuple):
    """What a segment keeps.

    No row is ever out of range: XLA:GPU does not clamp its DMA copies, and would write into other memory
    (https://github.com/openxla/xla: DynamicSliceFusionV2Thunk).
    """

    host: list[T]  # (layers, ...) each, row 0 empty
    last: list[T]  # the last layer's, on the host or not
    device: list[T]  # (layers, ...) each
    once: list[T]  # the same in every layer


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loops:
    """A pass over all layers.

    Attributes:
      consts, carry: how many constants and carried values it takes; in a backward pass, how many cotangents of such
        it returns.
      reads: of a backward pass: the operands of the scan that are residuals, each with whether it is a constant.
    """

    segments: tuple[Segment, ...]
    length: int
    reverse: bool
    unroll: int
    consts: int
    carry: int
    reads: tuple[tuple[int, bool], ...] = ()

    def __repr__(self) -> str:
        """Short, for it stands in every printed jaxpr."""
        return f"Loops({', '.join(f'{p.start}..{p.stop} offload {p.on_host}: {p.layer.plan}' for p in self.segments)})"

    def row(self, layer: Any) -> Any:
        """Of xs and ys: where `layer` is."""
        return self.length - 1 - layer if self.reverse else layer

    @property
    def seen(self) -> frozenset[str]:
        """The names that count as seen by a policy around the scan."""
        return frozenset().union(*(segment.layer.plan.seen for segment in self.segments))

    @property
    def results(self) -> int:
        """How many results the scan has: carry and ys."""
        return len(self.segments[0].layer.out_perturbed)

    def source_of(self, index: int) -> Source:
        """Of a result of the forward pass."""
        if index < self.results:
            return Source(None, "output of a scan")
        return [source for segment in self.segments for source in segment.sources()][index - self.results]

    @property
    def saved(self) -> list[Saved[bool]]:
        """In the form of what the segments keep: whether it is a stack of layers."""

        def form(segment: Segment) -> Saved[bool]:
            host, device, once = map(segment.places().count, ("host", "device", "once"))
            return Saved([True] * host, [False] * host, [True] * device, [False] * once)

        return list(map(form, self.segments))


def _forward(loops: Loops, *operands: Any) -> list[Any]:
    """Constants, carry, xs -> carry, ys, and the leaves of a list of `Saved`."""
    consts, carry, xs = in_three(operands, loops.consts, loops.carry)
    y_avals = loops.segments[0].jaxpr.out_avals[loops.carry : loops.results]
    ys, saved = [_stack(a, loops.length) for a in y_avals], []
    for segment in loops.segments:
        carry, ys, kept = _forward_part(loops, segment, consts, carry, ys, xs)
        saved.append(kept)
    return [*carry, *ys, *jax.tree.leaves(saved)]


def _forward_part(
    loops: Loops, segment: Segment, consts: list[Any], carry: list[Any], ys: list[Any], xs: list[Any]
) -> tuple[list[Any], list[Any], Saved[Any]]:
    compute, zero = jaxpr_as_fun(segment.jaxpr), _hidden_zero()
    stored = [place for place in segment.places() if place != "operand"]

    def layer(i: Any, state: Any) -> Any:
        carry, ys, saved = state
        host = []
        for stack, x, copy in zip(saved.host, saved.last, segment.copies, strict=True):
            with copy:
                host.append(_put(stack, jax.device_put(x, HOST), i))
        here = i + zero
        row = loops.row(segment.start + here)
        carry, new_ys, new = in_three(compute(*consts, *carry, *(_take(x, row) for x in xs)), len(carry), len(ys))
        ys = [_put(stack, y, row) for stack, y in zip(ys, new_ys, strict=True)]
        last, stays, once = (_those(new, stored, place) for place in ("host", "device", "once"))
        device = [_put(stack, x, here) for stack, x in zip(saved.device, stays, strict=True)]
        return carry, ys, Saved(host, last, device, once)

    avals = segment.jaxpr.out_avals[len(segment.jaxpr.out_avals) - len(stored) :]
    moved, stays, once = (_those(avals, stored, place) for place in ("host", "device", "once"))
    empty = Saved(
        [jax.device_put(_stack(a, segment.layers), HOST) for a in moved],
        [_filled(a) for a in moved],
        [_stack(a, segment.layers) for a in stays],
        [_filled(a) for a in once],
    )
    alone = (
        segment.layers == 1 < loops.length
    )  # XLA takes the layer out of its loop, and would fuse it with what is near
    carry = lax.optimization_barrier(carry) if alone else carry
    carry, ys, saved = lax.fori_loop(0, segment.layers, layer, (carry, ys, empty), unroll=loops.unroll)
    carry = lax.optimization_barrier(carry) if alone else carry
    if segment.on_host == segment.layers:  # not into row 0: outside of the loop XLA:GPU would write it with a kernel
        saved = saved._replace(last=[jax.device_put(x, HOST) for x in saved.last])
    return carry, ys, saved


def _backward(loops: Loops, *args: Any) -> list[Any]:
    """Operands read, the leaves of a list of `Saved`, cotangents of carry and ys -> those of constants, carry, xs."""
    form, tree = jax.tree.flatten(loops.saved)
    operands, leaves, cotangents = in_three(args, len(loops.reads), len(form))
    saved = jax.tree.unflatten(tree, leaves)
    carry, ys, _ = in_three(cotangents, loops.carry, len(cotangents) - loops.carry)
    consts_avals, _, xs_avals = in_three(loops.segments[0].jaxpr.out_avals, loops.consts, loops.carry)
    state = [_filled(a, 0) for a in consts_avals], carry, [_stack(a, loops.length) for a in xs_avals]
    for segment, kept in reversed(list(zip(loops.segments, saved, strict=True))):
        state = _backward_part(loops, segment, operands, kept, state, ys)
    consts, carry, xs = state
    return [*consts, *carry, *xs]


def _backward_part(
    loops: Loops, segment: Segment, operands: list[Any], saved: Saved[Any], cotangents: Any, ys: list[Any]
) -> Any:
    compute, zero = jaxpr_as_fun(segment.jaxpr), _hidden_zero()
    last = segment.layers - 1

    def layer(j: Any, state: Any) -> Any:
        (consts, carry, xs), fetched = state
        ahead = []
        for stack, copy in zip(saved.host, segment.copies, strict=True):
            with copy:
                ahead.append(jax.device_put(_take(stack, last - j), DEVICE))
        here = last - (j + zero)
        row = loops.row(segment.start + here)
        have = {number: x if whole else _take(x, row) for (number, whole), x in zip(loops.reads, operands, strict=True)}
        residuals = _in_order(segment, have, fetched, [_take(x, here) for x in saved.device], saved.once)
        if loops.unroll > 1 or not last:  # then a layer may stand beside its own forward pass, outside of the loops
            residuals, carry = apart(residuals, carry)
        outs = compute(*residuals, *carry, *(_take(y, row) for y in ys))
        d_consts, carry, d_xs = in_three(outs, loops.consts, loops.carry)
        consts = [ad.add_jaxvals(total, d) for total, d in zip(consts, d_consts, strict=True)]
        return (consts, carry, [_put(stack, d, row) for stack, d in zip(xs, d_xs, strict=True)]), ahead

    # Without the barrier XLA leaves out a copy to the host and back, where no loop is between them.
    fetched = [jax.device_put(x, DEVICE) for x in lax.optimization_barrier(saved.last)]
    return lax.fori_loop(0, segment.layers, layer, (cotangents, fetched), unroll=loops.unroll)[0]


def _hidden_zero() -> Any:
    """0, added to a layer's number where XLA must not see through it: where stacks on the device are read and written.

    XLA:GPU makes a DMA copy of each slice whose offset it can compute, on one of four streams in turn. For the host
    that is what we want. But a slice of the weights waits there for a host copy that happens to be before it, and the
    compute waits for the slice; and a matrix product that goes into a stack at such an offset runs again for its other
    readers. At other offsets, the kernels that use a slice read it from the stack themselves.
    """
    # https://github.com/openxla/xla: DynamicSliceCopyFusionAsyncWrapper, ExecutionStreamAssignment
    return lax.optimization_barrier(jnp.int32(0))


def _in_order(segment: Segment, operands: dict[int, Any], host: Any, device: Any, once: Any) -> list[Any]:
    """A layer's residuals as its backward pass takes them."""
    kept = {"host": iter(host), "device": iter(device), "once": iter(once)}
    places = zip(segment.layer.kept, segment.places(), strict=True)
    return [operands[k.operand] if place == "operand" else next(kept[place]) for k, place in places]


def _those(xs: Sequence[Any], places: Sequence[str], place: str) -> list[Any]:
    return [x for x, p in zip(xs, places, strict=True) if p == place]


def _take(stack: Any, i: Any) -> Any:
    return lax.dynamic_index_in_dim(stack, i, keepdims=False, allow_negative_indices=False)


def _put(stack: Any, x: Any, i: Any) -> Any:
    return lax.dynamic_update_index_in_dim(stack, x, i, 0, allow_negative_indices=False)


def _stack(aval: Any, rows: int) -> Any:
    return _filled(aval, lead=(rows,))


def _filled(aval: Any, fill: int | None = None, lead: tuple[int, ...] = ()) -> Any:
    """An array for values like `aval`, sharded and varying over mesh axes as they are; full of `fill`, if given.

    Else of a number that nobody gave a value: XLA merges equal arrays, and then copies a stack on the host to another
    there. An array that nobody gave values, `lax.empty`, each device would make whole and cut its segment from.
    """
    mesh, spec = aval.sharding.mesh, aval.sharding.spec
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * len(lead), *spec)) if mesh.explicit_axes else None
    shape = (*lead, *aval.shape)
    fill = 0 if fill is None and looks_for_nans() else fill
    one = lax.empty((), aval.dtype) if fill is None else lax.full((), fill, aval.dtype)
    # Explicit axes count where their mesh is set, which the caller's arguments alone may say.
    with jax.sharding.use_abstract_mesh(mesh) if sharding else contextlib.nullcontext():
        array = lax.broadcast(one, shape, out_sharding=sharding)
    varying = tuple(aval.manual_axis_type.varying)
    return lax.pcast(array, varying, to="varying") if varying else array


def _pass(name: str, run: Callable[..., list[Any]], batch: Callable[..., Any]) -> tuple[Primitive, Callable[..., Any]]:
    """A primitive, so that it can be batched layer by layer (a stack in host memory cannot be transposed); and the
    function that binds it, given what `run` takes."""
    primitive = Call(name)

    @cached
    def traced(loops: Loops, *avals: Any) -> Jaxpr:
        return jax.make_jaxpr(functools.partial(run, loops))(*avals)

    def bind(loops: Loops, *args: Any) -> list[Any]:
        return primitive.bind(*args, call_jaxpr=traced(loops, *map(jax.typeof, args)), loops=loops)

    def refuse(*_: Any, **__: Any) -> Any:
        raise DifferentiatedTwice(
            "jaxoffload.scan cannot be differentiated twice: its residuals may live in host memory; "
            "use jax.lax.scan where you need second derivatives"
        )

    primitive.def_impl(lambda *args, call_jaxpr, loops: _jitted(call_jaxpr)(*args))
    batching.fancy_primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = refuse
    return primitive, bind


@cached
def _jitted(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    copy = jaxpr.replace()  # the result must not refer to the key
    return jax.jit(lambda *operands: evaluate(copy, operands))


def _batch_forward(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, call_jaxpr: Jaxpr, loops: Loops
) -> tuple[list[Any], list[int]]:
    """The carry, and so all that is computed, is batched; constants and xs as they are."""
    first, last = loops.consts, loops.consts + loops.carry
    stacked = [False] * last + [True] * (len(args) - last)
    sizes = [axis.size if first <= i < last else None for i in range(len(args))]
    args = list(map(_axis_to, stacked, args, dims, sizes))
    layer_dims = [None if d is None and size is None else 0 for d, size in zip(dims, sizes, strict=True)]
    batched = _batched(loops, axis, [layer_dims] * len(loops.segments))
    stacks = [False] * loops.carry + [True] * (loops.results - loops.carry) + jax.tree.leaves(loops.saved)
    return run_forward(batched, *args), list(map(int, stacks))


def _batch_backward(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, call_jaxpr: Jaxpr, loops: Loops
) -> tuple[list[Any], list[int]]:
    """The cotangents are batched; what was kept as it is."""
    form, tree = jax.tree.flatten(loops.saved)
    kept = len(loops.reads) + len(form)
    stacked = [not whole for _, whole in loops.reads] + form + [False] * loops.carry
    stacked += [True] * (len(args) - len(stacked))
    sizes = [None if i < kept else axis.size for i in range(len(args))]
    args = list(map(_axis_to, stacked, args, dims, sizes))
    layer_dims = [None if d is None else 0 for d in dims]
    read = {number: d for (number, _), d in zip(loops.reads, layer_dims[: len(loops.reads)], strict=True)}
    in_dims = []
    for segment, saved in zip(
        loops.segments, jax.tree.unflatten(tree, layer_dims[len(loops.reads) : kept]), strict=True
    ):
        residuals = _in_order(segment, read, saved.host, saved.device, saved.once)
        in_dims.append(residuals + [0] * (len(args) - kept))
    outs = run_backward(_batched(loops, axis, in_dims), *args)
    return outs, [0] * (loops.consts + loops.carry) + [1] * (len(outs) - loops.consts - loops.carry)


def _axis_to(at: bool, x: Any, dim: int | None, size: int | None) -> Any:
    """`x` with its batch axis behind the axis of layers, if it has one, or else in front; made, if `size` says so."""
    if dim is None:
        return x if size is None else jnp.moveaxis(lax.broadcast(x, (size,)), 0, int(at))
    return jnp.moveaxis(x, dim, int(at))


def _batched(loops: Loops, axis: Any, in_dims: Sequence[Sequence[int | None]]) -> Loops:
    """The same loops over batched layers, all results batched in front."""

    def batched(segment: Segment, dims: Sequence[int | None]) -> Segment:
        jaxpr, _ = batching.batch_jaxpr_axes(segment.jaxpr, axis, dims, [0] * len(segment.jaxpr.outvars))
        return segment._replace(jaxpr=jaxpr)

    return dataclasses.replace(loops, segments=tuple(map(batched, loops.segments, in_dims)))


def _without_what_is_kept(used: Sequence[bool], *rest: Any) -> tuple[list[bool], JaxprEqn | None]:
    """A forward pass whose residuals nobody reads, as the first one inside an outer `jax.checkpoint`, keeps none.

    The results stay, all of them: their number says what they are.
    """
    eqn: JaxprEqn = rest[-1]  # jax 0.12 says before it which inputs are live
    loops, inputs = eqn.params["loops"], [True] * len(eqn.invars)
    if not any(used) and not eqn.effects:
        return [not i for i in inputs], None
    if any(used[loops.results :]) or len(used) == loops.results:
        return inputs, eqn
    jaxpr = loops.segments[0].jaxpr
    jaxpr = jaxpr.replace(outvars=jaxpr.outvars[: loops.results], debug_info=without_paths(jaxpr))
    layer = dataclasses.replace(loops.segments[0].layer, kept=())
    loops = dataclasses.replace(loops, segments=(Segment(0, loops.length, 0, jaxpr, layer, ""),))
    traced = jax.make_jaxpr(functools.partial(_forward, loops))(*(v.aval for v in eqn.invars))
    return inputs, eqn.replace(outvars=eqn.outvars[: loops.results], params={"call_jaxpr": traced, "loops": loops})


forward_p, run_forward = _pass("jaxoffload_forward", _forward, _batch_forward)
backward_p, run_backward = _pass("jaxoffload_backward", _backward, _batch_backward)
pe.dce_rules[forward_p] = _without_what_is_kept
