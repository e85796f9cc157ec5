"""The kernels that a jaxpr asks for, and those that its compiled program runs: none of them more often."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import dot_general_p, scan_p, while_p

from ..._engine.values import nested
from ..._jax import ATTENTION, MOSAIC, PRODUCTS, TE_GROUPED_GEMM
from .hlo import Instruction, of_shape, runs

PRODUCT = "matrix products"
# Kind -> the names of its equations, and of its instructions or, of custom calls, their targets.
KINDS = {
    PRODUCT: ("|".join(PRODUCTS), r"dot|ragged-dot|__cublas\$(gemm|lt)\S*"),
    "attention kernels": (ATTENTION, r"__cudnn\$fmha\w*|te_fused_attn_\w+"),
    "grouped products": (TE_GROUPED_GEMM, r"te_grouped_gemm\w*"),
    "Mosaic kernels": (MOSAIC, r"mosaic_gpu\w*"),  # jax's grouped products, and others
}
_PADDING = 1.02  # of a product's sides, to multiples that its kernel needs


class Kernels(NamedTuple):
    """How often those of each kind run; the FLOPs of the matrix products, None where they cannot be told."""

    counts: Counter[str]
    flops: float | None

    def more_than(self, others: "Kernels") -> list[str]:
        """What is more of them than there were to be. XLA makes one product of several: FLOPs tell, where counts do
        not."""
        more = [kind for kind in KINDS if self.counts[kind] > others.counts[kind]]
        found = [f"{self.counts[kind]} {kind} run where {others.counts[kind]} were traced" for kind in more]
        if self.flops and others.flops and self.flops > _PADDING * others.flops:
            found.append(f"{PRODUCT} take {self.flops / others.flops:.3f} of the FLOPs that were traced")
        return found


def traced(jaxpr: Jaxpr) -> Kernels | None:
    """Of all branches; None where a loop decides as it runs how often."""
    counts, flops = Counter[str](), 0.0
    for eqn in jaxpr.eqns:
        if kind := _kind(eqn.primitive.name, of_equations=True):
            counts[kind] += 1
            flops += flops_of(eqn) if kind == PRODUCT else 0.0
            continue
        for body in nested(eqn):
            inside = traced(body)
            if inside is None or (inside.counts and eqn.primitive is while_p):
                return None
            turns = eqn.params["length"] if eqn.primitive is scan_p else 1
            counts += Counter({kind: turns * count for kind, count in inside.counts.items()})
            flops += turns * (math.nan if inside.flops is None else inside.flops)
    return Kernels(counts, None if math.isnan(flops) else flops)


def ran(lines: Sequence[Instruction]) -> Kernels:
    """By a compiled program, fusions too, on each device."""
    often, at = runs(lines), {(line.computation, line.name): line for line in lines}
    counts, flops = Counter[str](), 0.0
    for line, kind in _kernels(lines):
        counts[kind] += often[line.computation]
        flops += often[line.computation] * _flops_of(line, at) if kind == PRODUCT else 0.0
    return Kernels(counts, None if math.isnan(flops) else flops)


def _kernels(lines: Sequence[Instruction]) -> Iterator[tuple[Instruction, str]]:
    for line in lines:
        target = re.search(r'custom_call_target="([^"]*)"', line.text) if line.opcode == "custom-call" else None
        if kind := _kind(target[1] if target else line.opcode, of_equations=False):
            yield line, kind


def _kind(name: str, of_equations: bool) -> str | None:
    return next((kind for kind, names in KINDS.items() if re.fullmatch(names[not of_equations], name)), None)


def flops_of(eqn: JaxprEqn) -> float:
    """Of a matrix product; NaN for products of groups: some kernels multiply every row by every group's matrix."""
    if eqn.primitive is not dot_general_p:
        return math.nan
    (contracted, _), _ = eqn.params["dimension_numbers"]
    first: Any = eqn.invars[0].aval
    made: Any = eqn.outvars[0].aval
    return 2.0 * math.prod(made.shape) * math.prod(first.shape[d] for d in contracted)


def _flops_of(line: Instruction, at: dict[tuple[str, str], Instruction]) -> float:
    """NaN where the text does not say."""
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d",]*)[}\]]', line.text)
    first = at.get((line.computation, line.operands[0])) if line.operands else None
    if line.opcode == "ragged-dot" or not contracted or not first:
        return math.nan
    (_, given), (_, made) = of_shape(first.shape), of_shape(line.shape)
    return 2.0 * math.prod(made) * math.prod(given[int(d)] for d in re.findall(r"\d+", contracted[1]))
