"""How long a jaxpr takes on a device, from FLOPs and bytes alone.

A matmul, or another kernel of its own, takes as long as its FLOPs or as moving its operands and results between it and
the device's memory, whichever is longer. All else is fused: what lies between the kernels is read once and written
once. What XLA does better (a matmul's epilogue) or worse (a reduction that reads twice) is not seen, nor are
collectives.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import cond_p, dot_general_p, scan_p, while_p

from .._jax import ALONE, IN_PLACE, MATMULS, OPAQUE, PARTS, SAME, SHARD_MAP, is_attention, is_causal, nbytes
from .walk import devices_of, nested


class Rates(NamedTuple):
    """What one device does per second.

    Attributes:
      gemm_tflops: 10**12 floating-point operations of large bfloat16 matmuls.
      attention_tflops: those of causal flash attention, forward and backward, without the masked half.
      hbm_gb_s: GB of its memory, reading and writing together.
    """

    gemm_tflops: float
    attention_tflops: tuple[float, float]
    hbm_gb_s: float


class Cost(NamedTuple):
    """`unknown`: how often each kernel runs of which only the bytes are known; a loop's count as if it ran once."""

    seconds: float
    unknown: Counter[str]


def cost(jaxpr: Jaxpr, rates: Rates, devices: int = 1) -> Cost:
    """Return the cost of one run of a jaxpr whose values are spread evenly over so many devices."""
    walk = _Walk(rates, devices)
    results = walk.through(jaxpr, [walk.array(v.aval, written=True) for v in jaxpr.invars])
    walk.write(results)
    return Cost(walk.seconds, walk.unknown)


@dataclasses.dataclass(eq=False)
class _Array:
    """Bytes per device; whether it is in the device's memory, and whether something fused has read it there."""

    bytes: float
    written: bool
    read: bool = False


class _Walk:
    def __init__(self, rates: Rates, devices: int):
        self.rates, self.devices = rates, devices
        self.seconds = 0.0
        self.unknown = Counter[str]()

    def array(self, aval: Any, written: bool) -> _Array:
        return _Array(nbytes(aval) / self.devices if hasattr(aval, "dtype") else 0, written)

    def move(self, size: float) -> float:
        """Seconds that so many bytes take to or from the device's memory."""
        return size / self.rates.hbm_gb_s / 1e9

    def write(self, arrays: Sequence[_Array]) -> None:
        for array in arrays:
            self.seconds += 0 if array.written else self.move(array.bytes)
            array.written = True

    def through(self, jaxpr: Jaxpr, operands: Sequence[_Array]) -> list[_Array]:
        known: dict[Var, _Array] = dict(zip(jaxpr.invars, operands, strict=True))
        known |= {v: self.array(v.aval, written=True) for v in jaxpr.constvars}
        array = lambda atom: _Array(0, True) if isinstance(atom, Literal) else known[atom]
        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self.equation(eqn, [array(atom) for atom in eqn.invars]), strict=False)
        return [array(atom) for atom in jaxpr.outvars]

    def in_place(self, eqn: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        self.seconds += self.move(2 * operands[IN_PLACE[eqn.primitive.name]].bytes)
        return operands[:1]

    def equation(self, eqn: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        name, bodies = eqn.primitive.name, list(nested(eqn))
        if name in SAME:
            return operands
        if name in IN_PLACE:
            return self.in_place(eqn, operands)
        if name == SHARD_MAP:
            return self.on_each(bodies[0], devices_of(eqn), operands)
        if eqn.primitive in (scan_p, while_p, cond_p):
            return self.loop(eqn, bodies, operands)
        if name not in OPAQUE and len(bodies) == 1 and len(bodies[0].invars) == len(operands):
            return self.through(bodies[0], operands)
        if name in MATMULS | ALONE | OPAQUE or is_attention(name):
            return self.kernel(eqn, operands)
        return self.fused(eqn, operands)

    def on_each(self, body: Jaxpr, parts: int, operands: list[_Array]) -> list[_Array]:
        """The body of a `shard_map`, whose values are one device's shard of so many."""
        self.devices, outside = max(1, self.devices // parts), self.devices
        results = self.through(body, operands)
        self.devices = outside
        return results

    def loop(self, eqn: JaxprEqn, bodies: list[Jaxpr], operands: list[_Array]) -> list[_Array]:
        """A loop, a `while` as one iteration, or a `cond` as its longest branch."""
        self.write(operands)
        costs = [cost(body, self.rates, self.devices) for body in bodies]
        self.seconds += eqn.params.get("length", 1) * max(c.seconds for c in costs)
        self.unknown += sum((c.unknown for c in costs), Counter(["while"] * (eqn.primitive is while_p)))
        return [self.array(v.aval, written=True) for v in eqn.outvars]

    def kernel(self, eqn: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        self.write(operands)
        results = [self.array(v.aval, written=True) for v in eqn.outvars]
        computing = _computing(eqn, self.rates)
        if computing is None and eqn.primitive.name not in ALONE:
            self.unknown.update([str(eqn.params.get("name") or eqn.primitive.name)])
        moving = self.move(sum(array.bytes for array in [*operands, *results]))
        self.seconds += max(moving, (computing or 0.0) / self.devices)
        return results

    def fused(self, eqn: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        results = [self.array(v.aval, written=False) for v in eqn.outvars]
        for array in operands:
            if eqn.primitive.name in PARTS:
                self.seconds += self.move(min(array.bytes, results[0].bytes)) if array.written else 0
            elif array.written and not array.read:
                self.seconds += self.move(array.bytes)
                array.read = True
        return results


def _computing(eqn: JaxprEqn, rates: Rates) -> float | None:
    """Seconds that a kernel's FLOPs take on one device; None where they are not known."""
    arrays: list[Any] = [v.aval for v in [*eqn.invars, *eqn.outvars] if hasattr(v.aval, "dtype")]
    shapes = [array.shape for array in arrays]
    if is_attention(eqn.primitive.name):
        forward, backward = rates.attention_tflops
        flops = attention_flops(shapes[0], shapes[1], is_causal(eqn.params))
        is_backward = any(word in eqn.primitive.name for word in ("bwd", "backward"))
        return 2.5 * flops / backward / 1e12 if is_backward else flops / forward / 1e12
    # The rate depends on the bytes of a number: float8 is twice as fast as bfloat16, float32 (as TF32) half as fast.
    rate = rates.gemm_tflops * 1e12 * 2 / arrays[0].dtype.itemsize
    if eqn.primitive is dot_general_p:
        return matmul_flops(eqn) / rate
    grouped = _grouped_flops(shapes)
    return None if grouped is None else grouped / rate


def matmul_flops(eqn: JaxprEqn) -> float:
    """The FLOPs of a `dot_general`."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    first: Any = eqn.invars[0].aval
    made: Any = eqn.outvars[0].aval
    return 2.0 * math.prod(made.shape) * math.prod(first.shape[d] for d in contracted)


def attention_flops(q: tuple[int, ...], k: tuple[int, ...], causal: bool) -> float:
    """FLOPs of the forward pass, which has two matmuls; the backward pass has five. `q`, `k`: (batch, sequence, heads,
    width)."""
    B, S, N, H = q
    return 2 * 2 * B * N * S * k[1] * H * (0.5 if causal else 1.0)


def _grouped_flops(shapes: list[tuple[int, ...]]) -> float | None:
    """The FLOPs of a grouped GEMM: two of (M, K), (M, N) and (G, K, N) are operands, one is the result."""
    rows, stacks = [s for s in shapes if len(s) == 2], [s for s in shapes if len(s) == 3]
    if len(rows) != 2 or len(stacks) != 1 or rows[0][0] != rows[1][0]:
        return None
    (M, K), (_, N), (_, *matrix) = *rows, stacks[0]
    return 2.0 * M * K * N if sorted(matrix) == sorted((K, N)) else None
