"""Measures what a device does per second: copies, matmuls by shape, attention, fused work, and the link to others."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ..._compiler_options import compiler_options
from ..._engine.cost.cost import Rates, attention_flops, cost
from ..._text import GIB
from ...grouped import grouped_matmul
from .._rates import NARROW, AttentionRate, Gemms, Link


class Bus(NamedTuple):
    """GB/s (10**9 bytes) of one GPU's copies between its memory and pinned host memory: each way alone, and each way
    while the other goes on too.

    Example:
      >>> from jaxoffload.proof import Bus
      >>> Bus(d2h=53.7, h2d=53.3, together=49.0).d2h
      53.7
    """

    d2h: float
    h2d: float
    together: float


class Attended(NamedTuple):
    """Sequences of causal attention; a key and its value are shared by four heads."""

    batch: int
    length: int
    heads: int
    width: int


class Sizes(NamedTuple):
    """The sizes that are measured: sides of matrices, and bytes. All values are bfloat16 unless told otherwise.

    Attributes:
      copied: bytes of each copy over the bus, and of what is read and written once in the device's memory.
      side: of a large square matmul; `rows`, `wide`, `narrow` and `few`: of others.
      experts, small_experts: groups, rows of all groups together, and the sides of each matrix.
      link: bytes of the arrays in collectives, ascending.
      seconds: how long the device is busy at least for each number, so that its clocks are those of a training step,
        which draws as much power as the device may.
    """

    copied: int = GIB
    side: int = 8192
    rows: int = 16384
    wide: int = 4096
    narrow: int = NARROW
    few: int = 512
    experts: tuple[int, int, int, int] = (8, 32768, 4096, 14336)
    small_experts: tuple[int, int, int, int] = (64, 131072, 2048, 768)
    attention: tuple[Attended, ...] = (
        Attended(8, 2048, 64, 64),
        Attended(2, 8192, 64, 64),
        Attended(8, 2048, 32, 128),
        Attended(2, 8192, 32, 128),
    )
    link: tuple[int, ...] = (2**20, 2**24, 2**28)
    seconds: float = 0.3


SIZES = Sizes()  # of a GPU


def seconds_of(call: Callable[[], Any], least: float, runs: int = 3) -> float:
    """Return the seconds of a call: the median of `runs`, each of so many calls in turn that they take `least`."""
    jax.block_until_ready(call())  # compiles, allocates, and wakes the clocks

    def run(times: int) -> float:
        begin, out = time.perf_counter(), None
        for _ in range(times):
            out = call()  # what the one before made is free again
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / times

    times = math.ceil(max(1.0, least / run(1)))
    return statistics.median(run(times) for _ in range(runs))


def bus(devices: Sequence[Any], sizes: Sizes) -> Bus:
    """Return the rates of each device while all of these copy."""
    size, runs = sizes.copied, []
    for device in devices:
        here = SingleDeviceSharding(device)
        host = here.with_memory_kind("pinned_host")
        d2h, h2d, both = (jax.jit(lambda *xs: xs, out_shardings=to) for to in ((host,), (here,), (host, here)))
        x = jax.device_put(jnp.ones(size, jnp.uint8), here)
        (y,) = d2h(x)
        runs.append(((d2h, (x,)), (h2d, (y,)), (both, (x, y))))
    start = lambda copies: [copy(*arrays) for copy, arrays in copies]
    spent = [seconds_of(functools.partial(start, copies), 0.0, 5) for copies in zip(*runs, strict=True)]
    return Bus(*(size / seconds / 1e9 for seconds in spent))


_PERIOD = 2**20 - 3  # a prime, so that rows do not repeat; XLA takes a second for random numbers of each new shape


def _drawn(*shape: int) -> jax.Array:
    """Return normal numbers, repeated. Zeros would draw less power, and run faster. Factors of this size keep the
    products at the same size."""
    numbers = np.random.default_rng(0).standard_normal(min(_PERIOD, math.prod(shape))) * shape[-2] ** -0.5
    times = -(-math.prod(shape) // numbers.size)
    repeated = jnp.broadcast_to(jnp.asarray(numbers, jnp.bfloat16), (times, numbers.size))
    return repeated.reshape(-1)[: math.prod(shape)].reshape(shape)


def large_gemm(sizes: Sizes) -> float:
    """Measure the TFLOP/s of square matmuls."""
    x, w = _drawn(sizes.side, sizes.side), _drawn(sizes.side, sizes.side)
    return 2 * sizes.side**3 / seconds_of(functools.partial(jax.jit(jnp.dot), x, w), 2 * sizes.seconds) / 1e12


_IN_TURN = 16  # small matmuls or collectives in a program, so that starting it takes no time beside them


def gemms(sizes: Sizes) -> Gemms:
    """Measure the TFLOP/s of other matmuls."""
    rows, wide, narrow, few = sizes.rows, sizes.wide, sizes.narrow, sizes.few
    w, into, out = _drawn(wide, wide), _drawn(wide, narrow), _drawn(narrow, wide)
    in_turn = lambda x, w: functools.reduce(lambda x, _: x @ w, range(_IN_TURN), x)
    both = lambda x, into, out: (x @ into) @ out  # a narrow result, and a narrow side that is contracted
    wider = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    tflops = lambda flops, f, *xs: flops / seconds_of(functools.partial(jax.jit(f), *xs), sizes.seconds) / 1e12
    square = _drawn(sizes.side, sizes.side)
    return Gemms(
        small=tflops(_IN_TURN * 2 * few * wide * wide, in_turn, _drawn(few, wide), w),
        narrow=tflops(2 * 2 * rows * wide * narrow, both, _drawn(rows, wide), into, out),
        float32=tflops(2 * sizes.side**3, wider, square, square),
        grouped=_grouped(*sizes.experts, sizes),
        grouped_narrow=_grouped(*sizes.small_experts, sizes),
    )


_PAIRS = 2  # of grouped GEMMs, to a wide side and back, so that starting a program takes no time beside them


def _grouped(groups: int, rows: int, before: int, after: int, sizes: Sizes) -> float:
    """Measure the TFLOP/s of grouped GEMMs, three for a forward and a backward pass, by the backend chosen here."""
    rows = rows // groups * groups
    x, each = _drawn(rows, before), jnp.full(groups, rows // groups, jnp.int32)
    ws = [_drawn(groups, *sides) for _ in range(_PAIRS) for sides in ((before, after), (after, before))]

    @jax.jit
    def whole(x: jax.Array, ws: list[jax.Array]) -> Any:
        # Without `full` a mask over rows past all groups would be timed too, which a layer fuses with its activation.
        in_turn = lambda x, ws: functools.reduce(lambda x, w: grouped_matmul(x, w, each, full=True), ws, x)
        y, vjp = jax.vjp(in_turn, x, ws)
        return vjp(y)

    flops = len(ws) * 3 * 2 * rows * before * after
    return flops / seconds_of(functools.partial(whole, x, ws), sizes.seconds) / 1e12


def attention(sizes: Sizes) -> tuple[AttentionRate, ...]:
    """Measure the TFLOP/s of cuDNN's attention by shape, without those that it cannot do."""
    return tuple(rate for shape in sizes.attention if (rate := _attention(shape, sizes)))


def _attention(shape: Attended, sizes: Sizes) -> AttentionRate | None:
    batch, length, heads, width = shape
    q, k, v = (_drawn(batch, length, n, width) for n in (heads, heads // 4, heads // 4))
    kind = "cudnn" if jax.default_backend() == "gpu" else "xla"
    attend = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=kind))
    try:
        out, vjp = jax.vjp(attend, q, k, v)
        backward = jax.jit(lambda vjp, cotangent: vjp(cotangent))
        spent = [seconds_of(call, sizes.seconds) for call in (lambda: attend(q, k, v), lambda: backward(vjp, out))]
    except Exception:  # whatever cuDNN, or its absence, says
        return None
    flops = attention_flops(q.shape, k.shape, causal=True)
    return AttentionRate(width, length, flops / spent[0] / 1e12, 2.5 * flops / spent[1] / 1e12)


def hbm(sizes: Sizes) -> float:
    """Measure the GB/s of the device's memory, read and written."""
    x = jnp.ones(sizes.copied // 4, jnp.float32)
    return 2 * sizes.copied / seconds_of(functools.partial(jax.jit(lambda x: x * 1.000001), x), sizes.seconds) / 1e9


def fused(sizes: Sizes) -> float:
    """Measure the GB/s of a gated activation and a sum, forward and backward: the bytes that `cost` counts. No norms:
    what XLA reads twice there is little of a layer."""
    gated = lambda x, gate, up: x + jax.nn.silu(gate) * up

    def whole(x: jax.Array, gate: jax.Array, up: jax.Array) -> Any:
        y, vjp = jax.vjp(gated, x, gate, up)
        return y, vjp(x)

    operands = [_drawn(sizes.rows, sizes.side) for _ in range(3)]
    one_gb_s = Rates(gemm_tflops=math.inf, attention_tflops=(math.inf, math.inf), hbm_gb_s=1.0)
    gb = cost(jax.make_jaxpr(whole)(*operands), one_gb_s).seconds
    return gb / seconds_of(functools.partial(jax.jit(whole), *operands), sizes.seconds)


class _Collective(NamedTuple):
    """A collective: `run` maps what a device has to what it receives, `again` both to the operand of the next one."""

    run: Callable[[jax.Array], jax.Array]
    again: Callable[[jax.Array, jax.Array], jax.Array]


_COLLECTIVES = {
    "all_gather": _Collective(lambda x: lax.all_gather(x, "d", tiled=True), lambda x, y: y[: x.shape[0]]),
    "reduce_scatter": _Collective(
        lambda x: lax.psum_scatter(x, "d", tiled=True), lambda x, y: lax.dynamic_update_slice(x, y, (0,))
    ),
    "all_to_all": _Collective(lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True), lambda x, y: y),
}
_LARGE = 2**26  # bytes: beside so many, starting a program takes no time


def link(devices: Sequence[Any], sizes: Sizes) -> Link | None:
    """Measure the GB/s of collectives between all of these; None if there is one."""
    if len(devices) == 1:
        return None
    mesh = Mesh(np.asarray(devices), "d")

    def rate(what: str, size: int) -> float:
        call, received = collectives(what, mesh, size)
        return received / seconds_of(call, sizes.seconds / 10) / 1e9

    rates = {what: tuple(rate(what, size) for size in sizes.link) for what in _COLLECTIVES}
    made = Link(mesh.size, sizes.link, rates["all_gather"], rates["reduce_scatter"], rates["all_to_all"])
    return made._replace(beside=_beside(mesh, made, sizes))


def collectives(what: str, mesh: Mesh, size: int) -> tuple[Callable[[], Any], int]:
    """Return a program of collectives on arrays of about `size` bytes, and the bytes that a device receives in it.
    Small ones follow each other in it: starting a program on several devices takes longer than one of them."""
    times, parts = max(1, min(_IN_TURN, _LARGE // size)), mesh.size
    x = _on_each(mesh, size // parts if what == "all_gather" else size)
    run, again = _COLLECTIVES[what]
    in_turn = lambda x: run(functools.reduce(lambda x, _: again(x, run(x)), range(times - 1), x))
    call = jax.jit(jax.shard_map(in_turn, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
    whole = x.nbytes if what == "all_gather" else x.nbytes // parts
    return functools.partial(call, x), times * whole * (parts - 1) // parts


def _on_each(mesh: Mesh, size: int) -> jax.Array:
    """Return an array of which each device has about `size` bytes, whose rows can be divided once more."""
    parts = mesh.size
    each = max(parts, size // 2 // parts * parts)
    make = functools.partial(jnp.ones, parts * each, jnp.bfloat16)
    return jax.jit(make, out_shardings=NamedSharding(mesh, P("d")))()


_MATMULS = 4  # which together take longer than the collective beside them


def _beside(mesh: Mesh, link: Link, sizes: Sizes) -> float:
    """Return the share of an all-gather's time by which matmuls beside it take longer; at least 0.01."""
    specs, gather = (P(), P(), P("d")), _COLLECTIVES["all_gather"].run
    x, w, shards = _drawn(sizes.rows, sizes.wide), _drawn(sizes.wide, sizes.wide), sizes.link[-1] // mesh.size
    operands = jax.device_put((x, w, _on_each(mesh, shards)), tuple(NamedSharding(mesh, spec) for spec in specs))

    def run(x: jax.Array, w: jax.Array, more: jax.Array, both: bool) -> Any:
        return functools.reduce(lambda x, _: x @ w, range(_MATMULS), x), gather(more) if both else more[:1]

    def seconds(both: bool) -> float:
        mapped = jax.shard_map(
            functools.partial(run, both=both), mesh=mesh, in_specs=specs, out_specs=(P(), P("d")), check_vma=False
        )
        call = jax.jit(mapped, compiler_options=compiler_options())
        return seconds_of(lambda: call(*operands), sizes.seconds)

    alone = link.seconds("all_gather", sizes.link[-1], mesh.size)
    return max(0.01, (seconds(True) - seconds(False)) / alone)
