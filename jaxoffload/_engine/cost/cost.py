"""Estimate how long a jaxpr takes on a device, from FLOPs and bytes alone.

A matmul, or another kernel of its own, takes as long as its FLOPs or as moving its operands and results between it and
the device's memory, whichever is longer. All else is fused: what lies between the kernels is read once and written
once. What goes to the host is read, and what comes back is written, unless fused work does so anyway. What XLA does
better (a matmul's epilogue) or worse (a reduction that reads twice) is not seen. Collectives that the compiler adds are
not in a jaxpr.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import cond_p, dot_general_p, scan_p, while_p

from ..._jax import (
    ALONE,
    COLLECTIVES,
    IN_PLACE,
    MATMULS,
    OPAQUE,
    PARTS,
    SAME,
    SHARD_MAP,
    UNINITIALISED,
    causal_window,
    is_attention,
    nbytes,
    on_host,
)
from ..jaxprs.walk import devices_of, nested


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of one device, by one number each for all shapes; `proof` has more.

    Attributes:
      gemm_tflops: 10**12 floating-point operations of large bfloat16 matmuls in a long run.
      attention_tflops: those of causal flash attention, forward and backward, without the masked half.
      hbm_gb_s: GB of its memory, reading and writing together.
    """

    gemm_tflops: float
    attention_tflops: tuple[float, float]
    hbm_gb_s: float

    def moving(self, size: float) -> float:
        """Return the seconds in which fused work reads or writes so many bytes."""
        return size / self.hbm_gb_s / 1e9

    def gemm(self, sides: Sequence[int], flops: float, float32: bool = False, grouped: bool = False) -> float:
        """Return the TFLOP/s of a bfloat16 matmul; `flops` are those on one device, `float32` is the result's dtype."""
        return self.gemm_tflops

    def attending(self, width: int, length: int) -> tuple[float, float]:
        """Return the TFLOP/s of attention, forward and backward, for heads of a width and sequences of a length."""
        return self.attention_tflops

    def on_link(
        self, eqn: JaxprEqn, axes: Mapping[str, int], operands: Sequence[float], results: Sequence[float]
    ) -> float | None:
        """Return the seconds of a collective; None where it is taken for copies within the device's memory.

        Args:
          axes: the sizes of the mesh axes of a `shard_map` around it.
          operands, results: the bytes per device of each.
        """
        return None


class Cost(NamedTuple):
    """How long a jaxpr takes.

    Attributes:
      unknown: how often each kernel runs of which only the bytes are known; a loop's count as if it ran once.
      taken: of each operand whether a kernel or a loop takes it as it is.
    """

    seconds: float
    unknown: Counter[str]
    taken: tuple[bool, ...]


def cost(jaxpr: Jaxpr, rates: Rates, devices: int = 1, axes: Mapping[str, int] = MappingProxyType({})) -> Cost:
    """Return the cost of one run of a jaxpr whose values are spread evenly over so many devices.

    `axes`: the sizes of the mesh axes of a `shard_map` around it; a collective over others counts for all GPUs that
    were measured.
    """
    walk = _Walk(rates, devices, axes)
    operands = [walk.array(v.aval, written=True) for v in jaxpr.invars]
    walk.write(walk.through(jaxpr, operands))
    return Cost(walk.seconds, walk.unknown, tuple(array.taken for array in operands))


@dataclasses.dataclass(eq=False)
class _Array:
    """Bytes per device; whether it is in the device's memory, whether something fused has read it there, and whether a
    kernel or a loop takes it."""

    bytes: float
    written: bool
    read: bool = False
    taken: bool = False


_KERNELS = MATMULS | ALONE | OPAQUE


class _Walk:
    def __init__(self, rates: Rates, devices: int, axes: Mapping[str, int]):
        self.rates, self.devices, self.axes = rates, devices, axes
        self.seconds = 0.0
        self.unknown = Counter[str]()

    def array(self, aval: Any, written: bool) -> _Array:
        in_device_memory = hasattr(aval, "dtype") and not on_host(aval)
        return _Array(nbytes(aval) / self.devices if in_device_memory else 0, written)

    def write(self, arrays: Sequence[_Array]) -> None:
        for array in arrays:
            self.seconds += 0 if array.written else self.rates.moving(array.bytes)
            array.written = True

    def take(self, arrays: Sequence[_Array]) -> None:
        """Write the operands of a kernel or a loop to the device's memory first."""
        self.write(arrays)
        for array in arrays:
            array.taken = True

    def through(self, jaxpr: Jaxpr, operands: Sequence[_Array]) -> list[_Array]:
        known: dict[Var, _Array] = dict(zip(jaxpr.invars, operands, strict=True))
        known |= {v: self.array(v.aval, written=True) for v in jaxpr.constvars}
        array = lambda atom: _Array(0, True) if isinstance(atom, Literal) else known[atom]
        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self.equation(eqn, [array(atom) for atom in eqn.invars]), strict=False)
        return [array(atom) for atom in jaxpr.outvars]

    def in_place(self, eqn: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        """Let the kernel that computes an update write it in place; a scatter reads it first."""
        update, name = operands[IN_PLACE[eqn.primitive.name]], eqn.primitive.name
        is_read = update.written or name != "dynamic_update_slice"
        self.seconds += self.rates.moving((1 + is_read) * update.bytes)
        return operands[:1]

    def equation(self, eqn: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        name, bodies = eqn.primitive.name, list(nested(eqn))
        if name in SAME:
            return operands
        if name == UNINITIALISED:
            only_allocated = [_Array(nbytes(v.aval), written=True, read=True) for v in eqn.outvars]
            return only_allocated if self.devices == 1 else self.fused(eqn, [])
        if name in IN_PLACE:
            return self.in_place(eqn, operands)
        if name == SHARD_MAP:
            return self.on_each(bodies[0], eqn, operands)
        if eqn.primitive in (scan_p, while_p, cond_p):
            return self.loop(eqn, bodies, operands)
        if name not in OPAQUE and len(bodies) == 1 and len(bodies[0].invars) == len(operands):
            return self.through(bodies[0], operands)
        if name in _KERNELS or is_attention(name):
            return self.kernel(eqn, operands)
        return self.fused(eqn, operands)

    def on_each(self, body: Jaxpr, eqn: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        """The body of a `shard_map`, whose values are one device's shard of so many."""
        outside = self.devices, self.axes
        self.devices, self.axes = max(1, self.devices // devices_of(eqn)), eqn.params["mesh"].shape
        results = self.through(body, operands)
        self.devices, self.axes = outside
        return results

    def loop(self, eqn: JaxprEqn, bodies: list[Jaxpr], operands: list[_Array]) -> list[_Array]:
        """A loop, a `while` as one iteration, or a `cond` as its longest branch."""
        self.take(operands)
        costs = [cost(body, self.rates, self.devices, self.axes) for body in bodies]
        self.seconds += eqn.params.get("length", 1) * max(c.seconds for c in costs)
        self.unknown += sum((c.unknown for c in costs), Counter(["while"] * (eqn.primitive is while_p)))
        return [self.array(v.aval, written=True) for v in eqn.outvars]

    def kernel(self, eqn: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        self.take(operands)
        results = [self.array(v.aval, written=True) for v in eqn.outvars]
        taken, made = ([array.bytes for array in arrays] for arrays in (operands, results))
        if eqn.primitive.name in COLLECTIVES:
            on_link = self.rates.on_link(eqn, self.axes, taken, made)
            if on_link is not None:
                self.seconds += on_link
                return results
        computing = _computing(eqn, self.rates, self.devices)
        if computing is None and eqn.primitive.name not in ALONE:
            self.unknown.update([str(eqn.params.get("name") or eqn.primitive.name)])
        moving = sum([*taken, *made]) / self.rates.hbm_gb_s / 1e9
        self.seconds += max(moving, computing or 0.0)
        return results

    def fused(self, eqn: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        results = [self.array(v.aval, written=False) for v in eqn.outvars]
        for array in operands:
            if eqn.primitive.name in PARTS:
                self.seconds += self.rates.moving(min(array.bytes, results[0].bytes)) if array.written else 0
            elif array.written and not array.read:
                self.seconds += self.rates.moving(array.bytes)
                array.read = True
        return results


def _computing(eqn: JaxprEqn, rates: Rates, devices: int) -> float | None:
    """Seconds that a kernel's FLOPs take if so many devices share them; None where they are not known."""
    arrays: list[Any] = [v.aval for v in [*eqn.invars, *eqn.outvars] if hasattr(v.aval, "dtype")]
    shapes = [array.shape for array in arrays]
    if is_attention(eqn.primitive.name):
        (_, length, _, width), is_backward = shapes[0], any(w in eqn.primitive.name for w in ("bwd", "backward"))
        flops = attention_flops(shapes[0], shapes[1], *causal_window(eqn.params)) * (2.5 if is_backward else 1.0)
        return flops / devices / rates.attending(width, length)[is_backward] / 1e12
    is_dot = eqn.primitive is dot_general_p
    if (sides := _sides(eqn) if is_dot else grouped_sides(shapes)) is None:
        return None
    flops = matmul_flops(eqn) if is_dot else 2.0 * math.prod(sides)
    bytes_each = arrays[0].dtype.itemsize
    wider = arrays[-1].dtype.itemsize == 4 > bytes_each
    rate = rates.gemm(sides, flops / devices, float32=wider, grouped=not is_dot)
    # The rate depends on the bytes of a number: float8 is twice as fast as bfloat16, float32 (as TF32) half as fast.
    return flops / devices / (rate * 1e12 * 2 / bytes_each)


def _sides(eqn: JaxprEqn) -> tuple[int, int, int]:
    """The rows, the columns and the contracted side of a `dot_general`, without its batch."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    first, second = (v.aval.shape for v in eqn.invars)  # type: ignore[attr-defined]
    K, B = (math.prod(first[d] for d in of) for of in (contracted, batch))
    return math.prod(first) // max(1, K * B), math.prod(second) // max(1, K * B), K


def matmul_flops(eqn: JaxprEqn) -> float:
    """The FLOPs of a `dot_general`."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    first: Any = eqn.invars[0].aval
    made: Any = eqn.outvars[0].aval
    return 2.0 * math.prod(made.shape) * math.prod(first.shape[d] for d in contracted)


def attention_flops(q: tuple[int, ...], k: tuple[int, ...], causal: bool, window: int = 0) -> float:
    """FLOPs of the forward pass, which has two matmuls; the backward pass has five. `q`, `k`: (batch, sequence, heads,
    width). `window`: the keys up to its own that a query sees; 0: all."""
    (B, S, N, H), K = q, k[1]
    seen = min(window or K, K)
    return 2 * 2 * B * N * S * H * (seen - seen * seen / (2 * K) if causal else K)


def grouped_sides(shapes: Sequence[tuple[int, ...]]) -> tuple[int, int, int] | None:
    """M, K and N of a grouped GEMM: two of (M, K), (M, N) and (G, K, N) are operands, one is the result."""
    rows, stacks = [s for s in shapes if len(s) == 2], [s for s in shapes if len(s) == 3]
    if len(rows) != 2 or len(stacks) != 1 or rows[0][0] != rows[1][0]:
        return None
    (M, K), (_, N), (_, *matrix) = *rows, stacks[0]
    return (M, K, N) if sorted(matrix) == sorted((K, N)) else None
