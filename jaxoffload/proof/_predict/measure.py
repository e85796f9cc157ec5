"""Measures what a device does per second: copies, matmuls by shape, attention, fused work, and the link to others."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

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
from .rates import NARROW, AttentionRate, Bus, Gemms, Link

_SECONDS = 0.3  # the device is busy for each number at least: its clocks are then those of a training step


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


def bus(devices: Sequence[Any], scale: int) -> Bus:
    """Return the rates of each device while all of these copy."""
    size, runs = GIB // scale**2, []
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
    return jnp.resize(jnp.asarray(numbers, jnp.bfloat16), shape)


def large_gemm(scale: int) -> float:
    """Measure the TFLOP/s of square matmuls."""
    x, w = (_drawn(8192 // scale, 8192 // scale) for _ in range(2))
    return 2 * len(x) ** 3 / seconds_of(functools.partial(jax.jit(jnp.dot), x, w), 2 * _SECONDS / scale) / 1e12


_IN_TURN = 16  # small matmuls or collectives in a program, so that starting it takes no time beside them


def gemms(scale: int) -> Gemms:
    """Measure the TFLOP/s of other matmuls."""
    side, rows, wide, narrow, few = (size // scale for size in (8192, 16384, 4096, NARROW, 512))
    square, w, into, out = _drawn(side, side), _drawn(wide, wide), _drawn(wide, narrow), _drawn(narrow, wide)
    in_turn = lambda x, w: functools.reduce(lambda x, _: x @ w, range(_IN_TURN), x)
    both = lambda x, into, out: (x @ into) @ out  # a narrow result, and a narrow side that is contracted
    wider = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    tflops = lambda flops, f, *xs: flops / seconds_of(functools.partial(jax.jit(f), *xs), _SECONDS / scale) / 1e12
    return Gemms(
        small=tflops(_IN_TURN * 2 * few * wide * wide, in_turn, _drawn(few, wide), w),
        narrow=tflops(2 * 2 * rows * wide * narrow, both, _drawn(rows, wide), into, out),
        float32=tflops(2 * side**3, wider, square, square),
        grouped=_grouped(8, (32768, 4096, 14336), scale),
        grouped_narrow=_grouped(64, (131072, 2048, 768), scale),
    )


_PAIRS = 2  # of grouped GEMMs, to a wide side and back, so that starting a program takes no time beside them


def _grouped(groups: int, sizes: Sequence[int], scale: int) -> float:
    """Measure the TFLOP/s of grouped GEMMs, three for a forward and a backward pass, by the backend chosen here.

    `sizes`: the rows of all groups together, and the sides of each matrix.
    """
    rows, before, after = (size // scale for size in sizes)
    x, each = _drawn(rows, before), jnp.full(groups, rows // groups, jnp.int32)
    ws = [_drawn(groups, *sides) for _ in range(_PAIRS) for sides in ((before, after), (after, before))]

    @jax.jit
    def whole(x: jax.Array, ws: list[jax.Array]) -> Any:
        # Without `full` a mask over rows past all groups would be timed too, which a layer fuses with its activation.
        in_turn = lambda x, ws: functools.reduce(lambda x, w: grouped_matmul(x, w, each, full=True), ws, x)
        y, vjp = jax.vjp(in_turn, x, ws)
        return vjp(y)

    flops = len(ws) * 3 * 2 * rows * before * after
    return flops / seconds_of(functools.partial(whole, x, ws), _SECONDS / scale) / 1e12


_ATTENDED = (8, 2048, 64), (2, 8192, 64), (8, 2048, 128), (2, 8192, 128)  # batch, length, width of heads


def attention(scale: int) -> tuple[AttentionRate, ...]:
    """Measure the TFLOP/s of cuDNN's causal attention by shape, without those that it cannot do."""
    return tuple(rate for shape in _ATTENDED if (rate := _attention(*shape, scale)))


def _attention(batch: int, length: int, width: int, scale: int) -> AttentionRate | None:
    """Measure heads that are 4096 wide together, four of which share a key and its value."""
    length, heads = length // scale, 4096 // width
    q, k, v = (_drawn(batch, length, n, width) for n in (heads, heads // 4, heads // 4))
    kind = "cudnn" if jax.default_backend() == "gpu" else "xla"
    attend = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=kind))
    try:
        out, vjp = jax.vjp(attend, q, k, v)
        backward = jax.jit(lambda vjp, cotangent: vjp(cotangent))
        calls = (lambda: attend(q, k, v)), (lambda: backward(vjp, out))
        spent = [seconds_of(call, _SECONDS / scale) for call in calls]
    except Exception:  # whatever cuDNN, or its absence, says
        return None
    flops = attention_flops(q.shape, k.shape, causal=True)
    return AttentionRate(width, length, flops / spent[0] / 1e12, 2.5 * flops / spent[1] / 1e12)


def hbm(scale: int) -> float:
    """Measure the GB/s of the device's memory, read and written."""
    x = jnp.ones(GIB // scale**2 // 4, jnp.float32)
    return 2 * x.nbytes / seconds_of(functools.partial(jax.jit(lambda x: x * 1.000001), x), _SECONDS / scale) / 1e9


def fused(scale: int) -> float:
    """Measure the GB/s of a gated activation and a sum, forward and backward: the bytes that `cost` counts. No norms:
    what XLA reads twice there is little of a layer."""
    gated = lambda x, gate, up: x + jax.nn.silu(gate) * up

    def whole(x: jax.Array, gate: jax.Array, up: jax.Array) -> Any:
        y, vjp = jax.vjp(gated, x, gate, up)
        return y, vjp(x)

    operands = [_drawn(16384 // scale, 8192 // scale) for _ in range(3)]
    one_gb_s = Rates(gemm_tflops=math.inf, attention_tflops=(math.inf, math.inf), hbm_gb_s=1.0)
    gb = cost(jax.make_jaxpr(whole)(*operands), one_gb_s).seconds
    return gb / seconds_of(functools.partial(jax.jit(whole), *operands), _SECONDS / scale)


# Each maps what a device has to what it receives; and both to the operand of the next one.
_COLLECTIVES: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "all_gather": (lambda x: lax.all_gather(x, "d", tiled=True), lambda x, y: y[: x.shape[0]]),
    "reduce_scatter": (
        lambda x: lax.psum_scatter(x, "d", tiled=True),
        lambda x, y: lax.dynamic_update_slice(x, y, (0,)),
    ),
    "all_to_all": (lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True), lambda x, y: y),
}
_SIZES = 2**20, 2**24, 2**28  # bytes of the arrays in collectives
_LARGE = 2**26  # bytes: beside so many, starting a program takes no time


def link(devices: Sequence[Any], scale: int) -> Link | None:
    """Measure the GB/s of collectives between all of these; None if there is one."""
    if len(devices) == 1:
        return None
    mesh, sizes = Mesh(np.asarray(devices), "d"), tuple(size // scale**2 for size in _SIZES)

    def rate(what: str, size: int) -> float:
        call, received = collectives(what, mesh, size)
        return received / seconds_of(call, _SECONDS / scale / 10) / 1e9

    rates = {what: tuple(rate(what, size) for size in sizes) for what in _COLLECTIVES}
    made = Link(mesh.size, sizes, rates["all_gather"], rates["reduce_scatter"], rates["all_to_all"])
    return made._replace(beside=_beside(mesh, made, scale))


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


def _beside(mesh: Mesh, link: Link, scale: int) -> float:
    """Return the share of an all-gather's time by which matmuls beside it take longer; at least 0.01."""
    specs, (gather, _) = (P(), P(), P("d")), _COLLECTIVES["all_gather"]
    rows, wide, shards = 16384 // scale, 4096 // scale, link.sizes[-1] // mesh.size
    x, w = _drawn(rows, wide), _drawn(wide, wide)
    operands = jax.device_put((x, w, _on_each(mesh, shards)), tuple(NamedSharding(mesh, spec) for spec in specs))

    def run(x: jax.Array, w: jax.Array, more: jax.Array, both: bool) -> Any:
        return functools.reduce(lambda x, _: x @ w, range(_MATMULS), x), gather(more) if both else more[:1]

    def seconds(both: bool) -> float:
        mapped = jax.shard_map(
            functools.partial(run, both=both), mesh=mesh, in_specs=specs, out_specs=(P(), P("d")), check_vma=False
        )
        call = jax.jit(mapped, compiler_options=compiler_options())
        return seconds_of(lambda: call(*operands), _SECONDS / scale)

    alone = link.seconds("all_gather", link.sizes[-1], mesh.size)
    return max(0.01, (seconds(True) - seconds(False)) / alone)
