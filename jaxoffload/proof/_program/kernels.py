"""The kernels that a jaxpr asks for, and those that its compiled program runs, which must not be more."""

import math
import re
from collections import defaultdict

from jax.extend.core import Jaxpr
from jax.extend.core.primitives import dot_general_p, while_p

from ..._engine.cost.cost import matmul_flops
from ..._engine.jaxprs.walk import nested, walk
from ..._jax import ATTENTION, MATMULS, MOSAIC_KERNELS, TE_GROUPED_GEMM
from .hlo import Instruction, Module, arrays_of

MATMUL, ATTENTION_KERNELS = "matmuls", "attention kernels"
# Kind -> the names of its equations, and of its instructions or, of custom calls, their targets.
KINDS = {
    MATMUL: ("|".join(MATMULS), r"dot|ragged-dot|__cublas\$(gemm|lt)\S*"),
    ATTENTION_KERNELS: (ATTENTION, r"__cudnn\$fmha\w*|te_fused_attn_\w+"),
    "grouped GEMMs": (TE_GROUPED_GEMM, r"te_grouped_gemm\w*"),
    "Mosaic kernels": (MOSAIC_KERNELS, r"mosaic_gpu\w*"),  # jax's grouped GEMMs, and others
}
FLOPS = "FLOPs of matmuls"  # XLA merges matmuls: FLOPs tell what counts do not
_PADDING = 1.02  # of a matmul's sides, to multiples that its kernel needs


def traced(jaxpr: Jaxpr) -> dict[str, float] | None:
    """Count the kernels of all branches, and `FLOPS`, NaN where they cannot be told; None if a `while`, whose
    iterations are not known, has any."""
    kind_of = lambda eqn: _kind(eqn.primitive.name, 0)
    counts = defaultdict[str, float](float)
    for site in walk(jaxpr, lambda eqn: () if kind_of(eqn) else nested(eqn)):
        if kind := kind_of(site.eqn):
            if any(eqn.primitive is while_p for eqn in site.enclosing):
                return None
            counts[kind] += site.runs
            if kind == MATMUL:  # some kernels of grouped GEMMs multiply every row by every group's matrix
                each = matmul_flops(site.eqn) if site.eqn.primitive is dot_general_p else math.nan
                counts[FLOPS] += site.runs * each
    return counts


def ran(module: Module) -> dict[str, float]:
    """Count the kernels that a compiled program runs per device, those within fusions included, and `FLOPS`."""
    counts = defaultdict[str, float](float)
    for line in module:
        if kind := kind_of_kernel(line):
            runs = module.runs[line.computation]
            counts[kind] += runs
            if kind == MATMUL:
                counts[FLOPS] += runs * flops_of_instruction(line, module)
    return counts


def more_than_traced(ran: dict[str, float], traced: dict[str, float]) -> list[str]:
    """Return which kernels run more often, or take more FLOPs, than were traced."""
    padded = lambda kind: traced.get(kind, 0) * (_PADDING if kind == FLOPS else 1)
    more = (kind for kind, count in ran.items() if count > padded(kind))
    return [f"{ran[kind]:.9g} {kind} run where {traced.get(kind, 0):.9g} were traced" for kind in more]


def kind_of_kernel(line: Instruction) -> str | None:
    return _kind(line.target if line.opcode == "custom-call" else line.opcode, 1)


def _kind(name: str, of: int) -> str | None:
    return next((kind for kind, names in KINDS.items() if re.fullmatch(names[of], name)), None)


def flops_of_instruction(line: Instruction, module: Module) -> float:
    """Return the FLOPs of a matmul; NaN where the text does not say."""
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d",]*)[}\]]', line.text)
    operands = module.operands(line)
    if line.opcode == "ragged-dot" or not contracted or not operands:
        return math.nan
    given, made = (arrays_of(each.shape)[0].sizes for each in (operands[0], line))
    return 2.0 * math.prod(made) * math.prod(given[int(d)] for d in re.findall(r"\d+", contracted[1]))
