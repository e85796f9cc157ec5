"""The two loops of a scan over layers: each copies the residuals of one layer while it computes the next.

    forward   i:   compute layer i                 write the residuals of layer i-1 to row i on the host
    backward  i:   compute layer i's cotangents    fetch the residuals of layer i-1 from row i

So nothing waits for a copy that takes less time than a layer. The last layer's residuals are kept apart, on the host or
on the device. Layer 0 has no layer before it, but its iteration is like all others: row 0 is written before there is
anything to write, and fetched after its last use.

Layers that treat their residuals in another way are a segment with two loops of its own; the carry, the ys and the
cotangents pass from segment to segment.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from ..._jax import (
    DEVICE,
    FORWARD,
    HOST,
    Call,
    Results,
    Values,
    add_jaxvals,
    batch_jaxpr_axes,
    dce_jaxpr,
    define,
    evaluate,
    has_effects,
    in_memory_of,
    on_device,
    on_host,
    zero_of,
)
from ..decide.derivative import cached, looks_for_nans
from ..host.slow_copies import lower_and_note
from ..jaxprs.source import Source
from .layer import in_three, keeps_some, prevent_cse_barrier, without_paths
from .segments import Segment, SegmentResiduals, reads_of, those


class DifferentiatedTwice(NotImplementedError):
    """The derivative of a derivative of a `scan` or `chain` was asked for."""


@contextlib.contextmanager
def where_twice(caller: str, message: str) -> Iterator[None]:
    """Raise `message` instead, where `caller` differentiates a function that is itself a derivative."""
    try:
        yield
    except DifferentiatedTwice as why:
        raise DifferentiatedTwice(f"{caller}: {message}") from why


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loops:
    """A pass over all layers.

    Attributes:
      consts, carry: how many constants and carried values a forward pass takes, and a backward pass returns the
        cotangents of.
      reads: the operands of the scan that are residuals: their numbers, each with whether it is a constant.
      first: the row of the first layer, where the xs are those of more layers than the pass runs.
    """

    segments: tuple[Segment, ...]
    length: int
    reverse: bool
    unroll: int
    consts: int
    carry: int
    reads: tuple[tuple[int, bool], ...] = ()
    first: Any = 0

    def __repr__(self) -> str:
        """Short: it is printed in every jaxpr."""
        return f"Loops({', '.join(f'{p.start}..{p.stop} offload {p.on_host}: {p.layer.plan}' for p in self.segments)})"

    def row(self, layer: Any) -> Any:
        """The row of xs and ys that belongs to `layer`."""
        return self.length - 1 - layer if self.reverse else self.first + layer

    def with_segments(self, segments: Sequence[Segment]) -> "Loops":
        """A forward pass over the same layers, divided or differentiated in another way."""
        return dataclasses.replace(self, segments=tuple(segments), reads=reads_of(segments, self.consts))

    @property
    def seen(self) -> frozenset[str]:
        """The names that a policy around the scan counts as seen."""
        return frozenset().union(*(segment.layer.plan.seen for segment in self.segments))

    @property
    def results(self) -> int:
        """How many results the scan has: carry and ys."""
        return len(self.segments[0].layer.out_perturbed)

    def source_of(self, index: int) -> Source:
        """The source of a result of the forward pass."""
        if index < self.results:
            return Source(None, "output of a scan")
        return [source for segment in self.segments for source in segment.sources()][index - self.results]

    @property
    def stacked(self) -> list[SegmentResiduals[bool]]:
        """Whether each array that the segments keep is a stack of layers."""

        def of(segment: Segment) -> SegmentResiduals[bool]:
            host, device, once = map(segment.places().count, ("host", "device", "once"))
            return SegmentResiduals([True] * host, [False] * host, [True] * device, [False] * once)

        return list(map(of, self.segments))


def _forward(loops: Loops, *operands: Any) -> list[Any]:
    """Constants, carry, xs -> carry, ys, and the leaves of a list of `SegmentResiduals`."""
    consts, carry, xs = in_three(operands, loops.consts, loops.carry)
    ys, saved = empty_ys(loops), []
    for segment in loops.segments:
        state = begin_forward(segment, carry, ys)
        layer = forward_layer(loops, segment, consts, xs)
        carry, ys, residuals = _run(layer, segment, state, loops.unroll, segment.layers == 1 < loops.length)
        saved.append(end_forward(segment, residuals))
    return [*carry, *ys, *jax.tree.leaves(saved)]


def _run(layer: Callable[..., Any], segment: Segment, state: Any, unroll: int, inlined: bool) -> Any:
    return lax.fori_loop(0, segment.layers, lambda i, state: layer(i, state, inlined), state, unroll=unroll)


def empty_ys(loops: Loops) -> list[Any]:
    """The ys of a pass, to be filled layer by layer."""
    return [_stack(a, loops.length) for a in loops.segments[0].jaxpr.out_avals[loops.carry : loops.results]]


class ForwardState(NamedTuple):
    """What the forward loop of a segment carries from layer to layer."""

    carry: list[Any]
    ys: list[Any]
    saved: SegmentResiduals[Any]


def begin_forward(segment: Segment, carry: list[Any], ys: list[Any]) -> ForwardState:
    """The state before the first layer of a segment: nothing is kept yet."""
    stored = _stored(segment)
    avals = segment.jaxpr.out_avals[len(segment.jaxpr.out_avals) - len(stored) :]
    host, device, once = (those(avals, stored, place) for place in ("host", "device", "once"))
    empty = SegmentResiduals(
        [jax.device_put(_stack(a, segment.layers), HOST) for a in host],
        [filled(a) for a in host],
        [_stack(a, segment.layers) for a in device],
        [filled(a) for a in once],
    )
    return ForwardState(carry, ys, empty)


def _stored(segment: Segment) -> list[str]:
    """The places of those residuals that are not operands."""
    return [place for place in segment.places() if place != "operand"]


def forward_layer(
    loops: Loops, segment: Segment, consts: list[Any], xs: list[Any]
) -> Callable[[Any, ForwardState, bool], ForwardState]:
    """The function that computes layer i of a segment and copies the residuals of layer i-1.

    It writes to row i of stacks on the host, `i_device` of those on the device, `i_xs` of the ys. The first is a DMA
    copy; the others are not to be one, hence the hidden zero. `inlined`: XLA would fuse the layer with its neighbours.
    """
    compute, zero, stored = jaxpr_as_fun(segment.jaxpr), hidden_zero(), _stored(segment)

    def layer(i: Any, state: ForwardState, inlined: bool) -> ForwardState:
        fence = lax.optimization_barrier if inlined else lambda carry: carry
        carry, ys, saved = fence(state.carry), state.ys, state.saved
        host = []
        for stack, x, copy in zip(saved.host, saved.last, segment.copies, strict=True):
            with copy:
                host.append(stack if _is_padding(i) else put_row(stack, jax.device_put(x, HOST), i))
        i_device = i + zero
        i_xs = loops.row(segment.start + i_device)
        outs = compute(*consts, *carry, *(take_row(x, i_xs) for x in xs))
        carry, new_ys, residuals = in_three(outs, len(carry), len(ys))
        ys = [put_row(stack, y, i_xs) for stack, y in zip(ys, new_ys, strict=True)]
        last, stays, once = (those(residuals, stored, place) for place in ("host", "device", "once"))
        device = [put_row(stack, x, i_device) for stack, x in zip(saved.device, stays, strict=True)]
        return ForwardState(fence(carry), ys, SegmentResiduals(host, last, device, once))

    return layer


def end_forward(segment: Segment, saved: SegmentResiduals[Any]) -> SegmentResiduals[Any]:
    """What a segment keeps, once its last layer has run."""
    if segment.on_host < segment.layers:
        return saved
    # Not into row 0: outside the loop XLA:GPU would write it with a kernel.
    return saved._replace(last=[jax.device_put(x, HOST) for x in saved.last])


def _backward(loops: Loops, *args: Any) -> list[Any]:
    """Operands that are read, the leaves of a list of `SegmentResiduals`, cotangents of carry and ys -> those of
    constants, carry, xs."""
    stacked, tree = jax.tree.flatten(loops.stacked)
    operands, leaves, cotangents = in_three(args, len(loops.reads), len(stacked))
    saved = jax.tree.unflatten(tree, leaves)
    carry, ys, _ = in_three(cotangents, loops.carry, len(cotangents) - loops.carry)
    cts = empty_cotangents(loops, carry)
    for segment, residuals in reversed(list(zip(loops.segments, saved, strict=True))):
        state = begin_backward(residuals, cts)
        layer = backward_layer(loops, segment, operands, residuals, ys)
        cts = _run(layer, segment, state, loops.unroll, loops.unroll > 1 or segment.layers == 1).cotangents
    consts_avals = loops.segments[0].jaxpr.out_avals[: loops.consts]
    return [*map(in_memory_of, consts_avals, cts.consts), *cts.carry, *cts.xs]


class Cotangents(NamedTuple):
    """Of the operands of a scan. While the backward loop runs, `carry` is that of the layer that ran last."""

    consts: list[Any]
    carry: list[Any]
    xs: list[Any]


def empty_cotangents(loops: Loops, carry: list[Any]) -> Cotangents:
    """The cotangents before the last layer's backward pass, from those of the last carry."""
    consts_avals, _, xs_avals = in_three(loops.segments[0].jaxpr.out_avals, loops.consts, loops.carry)
    consts = [filled(a, zero_of(a.dtype)) for a in consts_avals]
    return Cotangents(consts, carry, [in_memory_of(a, _stack(a, loops.length)) for a in xs_avals])


class BackwardState(NamedTuple):
    """What the backward loop of a segment carries from layer to layer: `fetched` is what the next layer reads."""

    cotangents: Cotangents
    fetched: list[Any]


def begin_backward(saved: SegmentResiduals[Any], cotangents: Cotangents) -> BackwardState:
    """The state before the last layer of a segment, whose residuals are fetched."""
    # Without the barrier XLA removes a copy to the host and back that has no loop between the two.
    return BackwardState(cotangents, [jax.device_put(x, DEVICE) for x in lax.optimization_barrier(saved.last)])


def backward_layer(
    loops: Loops,
    segment: Segment,
    operands: list[Any],
    saved: SegmentResiduals[Any],
    ys: list[Any],
    sums: Sequence[bool] = (),
    counts: Any = None,
) -> Callable[[Any, BackwardState, bool], BackwardState]:
    """The function that computes the cotangents of a layer, and fetches the residuals of the layer before it.

    Rows are numbered as in `forward_layer`; iterations count from the last layer. `ys`: the cotangents of the ys.
    `sums`: for each of the xs, whether its cotangents are added to those that are there; by default none. `counts`: a
    boolean, whether they are; by default they are.
    """
    compute, zero, i_last = jaxpr_as_fun(segment.jaxpr), hidden_zero(), segment.layers - 1

    def layer(iteration: Any, state: BackwardState, inlined: bool) -> BackwardState:
        (consts, carry, xs), fetched = state
        fetched_next = []
        for stack, x, copy in zip(saved.host, fetched, segment.copies, strict=True):
            with copy:
                row = i_last - iteration
                fetched_next.append(x if _is_padding(row) else jax.device_put(take_row(stack, row), DEVICE))
        i_device = i_last - (iteration + zero)
        i_xs = loops.row(segment.start + i_device)
        reads = zip(loops.reads, operands, strict=True)
        read = {number: x if is_const else take_row(x, i_xs) for (number, is_const), x in reads}
        residuals = _in_order(segment, read, fetched, [take_row(x, i_device) for x in saved.device], saved.once)
        if inlined:  # the layer may stand beside its own forward pass
            residuals, carry = prevent_cse_barrier(residuals, carry)
        outs = compute(*residuals, *carry, *(take_row(y, i_xs) for y in ys))
        d_consts, carry, d_xs = in_three(outs, loops.consts, loops.carry)
        consts = [add_jaxvals(total, on_device(d)) for total, d in zip(consts, d_consts, strict=True)]
        if counts is not None:
            d_xs = [lax.select(counts, d, jnp.zeros_like(d)) for d in d_xs]
        put = [add_to_row if s else put_row for s in sums or [False] * len(xs)]
        xs = [put_one(stack, d, i_xs) for put_one, stack, d in zip(put, xs, d_xs, strict=True)]
        return BackwardState(Cotangents(consts, carry, xs), fetched_next)

    return layer


def _is_padding(row: Any) -> bool:
    """Whether this is row 0, as far as is known where the program is traced: in a loop it is not known.

    Outside of loops XLA:GPU would copy it with a kernel.
    """
    return isinstance(row, int) and row == 0


def hidden_zero() -> Any:
    """0, added to a layer's number so that XLA cannot compute the offsets in stacks on the device.

    XLA:GPU makes a DMA copy of each slice whose offset it can compute, on four streams in turn. For the host that is
    what we want. But a slice of the weights may wait in its stream behind a host copy, and the compute waits for the
    slice; and a matmul whose result goes into a stack at such an offset runs again for its other readers. At an offset
    that XLA cannot compute, the kernels that use a slice read it from the stack themselves.
    """
    # https://github.com/openxla/xla: DynamicSliceCopyFusionAsyncWrapper, ExecutionStreamAssignment
    return lax.optimization_barrier(jnp.int32(0))


def _in_order(segment: Segment, operands: dict[int, Any], host: Any, device: Any, once: Any) -> list[Any]:
    """A layer's residuals as its backward pass takes them."""
    kept = {"host": iter(host), "device": iter(device), "once": iter(once)}
    places = zip(segment.layer.kept, segment.places(), strict=True)
    return [next(kept[place]) if k.operand is None else operands[k.operand] for k, place in places]


def take_row(stack: Any, i: Any) -> Any:
    return lax.dynamic_index_in_dim(stack, i, keepdims=False, allow_negative_indices=False)


def put_row(stack: Any, x: Any, i: Any) -> Any:
    return lax.dynamic_update_index_in_dim(stack, x, i, 0, allow_negative_indices=False)


def add_to_row(stack: Any, x: Any, i: Any) -> Any:
    """The stack with `x` added to row i, which keeps its leading axis: XLA:GPU would not fuse a reshaped row with the
    sum, but copy it first."""
    # https://github.com/openxla/xla: InstructionFusion::ShouldFuseInPlaceOp
    row = lax.dynamic_slice_in_dim(stack, i, 1, allow_negative_indices=False)
    total = row + jnp.expand_dims(on_device(x).astype(stack.dtype), 0)
    return lax.dynamic_update_slice_in_dim(stack, total, i, 0, allow_negative_indices=False)


def _stack(aval: Any, rows: int) -> Any:
    return filled(aval, lead=(rows,))


def filled(aval: Any, fill: int | jax.Array | None = None, lead: tuple[int, ...] = ()) -> Any:
    """An array for values like `aval`, sharded and varying over mesh axes as they are, and full of `fill` if given.

    Otherwise it is full of one uninitialised number. XLA would merge arrays that are full of the same constant, and
    then copy one stack on the host to another. Each device would make a whole `lax.empty` and cut out its part.
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


def _pass(name: str, run: Callable[..., Any], batch: Any, **rules: Any) -> tuple[Primitive, Callable[..., list[Any]]]:
    """A primitive, which can be batched layer by layer (a stack in host memory cannot be transposed), and the function
    that binds it, which takes what `run` takes."""

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

    eager = lambda *args, call_jaxpr, loops: jitted(call_jaxpr)(*args)
    primitive = define(Call(name), eager=eager, batch=batch, jvp=refuse, lower=lower_and_note(_offloads), **rules)
    return primitive, bind


def _offloads(*, loops: Loops, **_: Any) -> bool:
    return any(segment.on_host for segment in loops.segments)


@cached
def jitted(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """The jitted function of a jaxpr, for a primitive outside of a trace."""
    copy = jaxpr.replace()  # the result must not refer to the key
    return jax.jit(lambda *operands: evaluate(copy, operands))


def _batch_forward(axis: Any, args: Values, dims: Values, *, call_jaxpr: Jaxpr, loops: Loops) -> Results:
    """The carry, and so all that is computed, gets a batch axis; constants and xs only if they come with one."""
    first, last = loops.consts, loops.consts + loops.carry
    stacked = [False] * last + [True] * (len(args) - last)
    sizes = [axis.size if first <= i < last else None for i in range(len(args))]
    args = list(map(_axis_to, stacked, args, dims, sizes))
    layer_dims = [None if d is None and size is None else 0 for d, size in zip(dims, sizes, strict=True)]
    batched = _batched(loops, axis, [layer_dims] * len(loops.segments))
    stacks = [False] * loops.carry + [True] * (loops.results - loops.carry) + jax.tree.leaves(loops.stacked)
    return run_forward(batched, *args), list(map(int, stacks))


def _batch_backward(axis: Any, args: Values, dims: Values, *, call_jaxpr: Jaxpr, loops: Loops) -> Results:
    """The cotangents get a batch axis; what was kept only if it comes with one."""
    saved_stacked, tree = jax.tree.flatten(loops.stacked)
    kept = len(loops.reads) + len(saved_stacked)
    stacked = [not is_const for _, is_const in loops.reads] + saved_stacked + [False] * loops.carry
    stacked += [True] * (len(args) - len(stacked))
    sizes = [None if i < kept else axis.size for i in range(len(args))]
    args = list(map(_axis_to, stacked, args, dims, sizes))
    layer_dims = [None if d is None else 0 for d in dims]
    read = {number: d for (number, _), d in zip(loops.reads, layer_dims[: len(loops.reads)], strict=True)}
    saved_dims = jax.tree.unflatten(tree, layer_dims[len(loops.reads) : kept])
    in_dims = []
    for segment, saved in zip(loops.segments, saved_dims, strict=True):
        residuals = _in_order(segment, read, saved.host, saved.device, saved.once)
        in_dims.append(residuals + [0] * (len(args) - kept))
    outs = run_backward(_batched(loops, axis, in_dims), *args)
    return outs, [0] * (loops.consts + loops.carry) + [1] * (len(outs) - loops.consts - loops.carry)


def _axis_to(at: bool, x: Any, dim: int | None, size: int | None) -> Any:
    """`x` with its batch axis at 1, behind the axis of layers, or at 0. If it has none, one of `size` is made."""
    if dim is None:
        return x if size is None else jnp.moveaxis(lax.broadcast(x, (size,)), 0, int(at))
    return jnp.moveaxis(x, dim, int(at))


def _batched(loops: Loops, axis: Any, in_dims: Sequence[Sequence[int | None]]) -> Loops:
    """The same loops over batched layers; the batch axis of all results is 0."""

    def batched(segment: Segment, dims: Sequence[int | None]) -> Segment:
        jaxpr, _ = batch_jaxpr_axes(segment.jaxpr, axis, dims, [0] * len(segment.jaxpr.outvars))
        return segment._replace(jaxpr=jaxpr)

    return dataclasses.replace(loops, segments=tuple(map(batched, loops.segments, in_dims)))


def _without_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], JaxprEqn | None]:
    """Drop residuals that nothing reads, as in the first forward pass inside an outer `jax.checkpoint`; and where that
    runs again for its residuals, operands that they do not need: the checkpoint would keep them.

    All results of the scan stay: their number says what they are.
    """
    eqn: JaxprEqn = rest[-1]  # jax 0.12 passes before it which inputs are live
    loops, inputs = eqn.params["loops"], [True] * len(eqn.invars)
    if not any(used) and not eqn.effects:
        return [not i for i in inputs], None
    if any(used[loops.results :]):
        needed = _needed(loops, eqn, used)
        return needed, eqn if all(needed) else _with_operands(eqn, needed, used)
    if len(used) == loops.results:
        return inputs, eqn
    jaxpr = loops.segments[0].jaxpr
    jaxpr = jaxpr.replace(outvars=jaxpr.outvars[: loops.results], debug_info=without_paths(jaxpr))
    layer = dataclasses.replace(loops.segments[0].layer, kept=())
    loops = dataclasses.replace(loops, segments=(Segment(0, loops.length, 0, jaxpr, layer, ""),))
    traced = jax.make_jaxpr(functools.partial(_forward, loops))(*(v.aval for v in eqn.invars))
    return inputs, eqn.replace(outvars=eqn.outvars[: loops.results], params={"call_jaxpr": traced, "loops": loops})


def _needed(loops: Loops, eqn: JaxprEqn, used: Sequence[bool]) -> list[bool]:
    """Return which operands of a forward pass its used results, and its residuals, need in some layer."""
    carry, ys, _ = in_three(used, loops.carry, loops.results - loops.carry)
    while True:
        live = lambda layer: [*carry, *ys, *[True] * (len(layer.outvars) - loops.results)]
        read = (dce_jaxpr(segment.jaxpr, live(segment.jaxpr))[1] for segment in loops.segments)
        needed = list(map(any, zip(*read, strict=True)))
        grown = [a or b for a, b in zip(carry, needed[loops.consts :], strict=False)]
        if grown == carry:
            return [n or not _can_be_filled(v.aval) for n, v in zip(needed, eqn.invars, strict=True)]
        carry = grown


def _can_be_filled(aval: Any) -> bool:
    return not on_host(aval) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _with_operands(eqn: JaxprEqn, needed: Sequence[bool], used: Sequence[bool]) -> JaxprEqn:
    """A forward pass of these operands, with zeros for the others, as the one equation of its used results."""
    select = lambda xs, flags: [x for x, flag in zip(xs, flags, strict=True) if flag]

    def forward(*operands: Any) -> list[Any]:
        given = iter(operands)
        whole = [next(given) if n else filled(v.aval, 0) for v, n in zip(eqn.invars, needed, strict=True)]
        return select(eqn.primitive.bind(*whole, **eqn.params), used)

    invars = select(eqn.invars, needed)
    (call,) = jax.make_jaxpr(jax.jit(forward))(*(v.aval for v in invars)).eqns
    return call.replace(invars=invars, outvars=select(eqn.outvars, used), source_info=eqn.source_info, ctx=eqn.ctx)


def _in_a_checkpoint(saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: JaxprEqn) -> Any:
    """Keep what the loop keeps if `saveable`, the policy of a checkpoint around it, keeps some of it; else run the loop
    again in the backward pass. JAX keeps the results of what has effects.

    The layers of another scan would copy its stacks from the host to the host: `scan` has no such loop there.
    """
    results = len(eqn.outvars)
    layers = [segment.layer for segment in eqn.params["loops"].segments]
    if not any(unknown) and (has_effects(eqn) or any(keeps_some(saveable, layer) for layer in layers)):
        return eqn, None, [False] * results, [False] * results, []
    residuals = [v for v, there in zip(eqn.invars, instantiated, strict=True) if isinstance(v, Var) and not there]
    return None if any(unknown) else eqn, eqn, [any(unknown)] * results, [True] * results, residuals


forward_p, run_forward = _pass(FORWARD, _forward, _batch_forward, dce=_without_unused, partial_eval=_in_a_checkpoint)
backward_p, run_backward = _pass("jaxoffload_backward", _backward, _batch_backward)
