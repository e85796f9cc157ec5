"""How long the instructions of a compiled program take, so that XLA can schedule them by that when it compiles again.

    compiled once:    a2a  a2a  gemm gemm gemm ....  a2a              (alone: what could hide them is used up elsewhere)
    compiled again:   a2a  gemm ....  a2a gemm ....  a2a gemm ....

XLA's latency hiding scheduler takes any collective for 5 ms and any kernel, be it a grouped GEMM of 7 ms or an addition
of 2 us, for 1 ms (https://github.com/openxla/xla: GpuLatencyEstimator). So it puts all there is beside the last
exchange of a layer, and nothing is left for those before it. It knows instructions by their names alone, which it gives
them as it compiles: a first compilation tells the names and the shapes.
"""

import re
from typing import Any

from ..._compiler_options import compiler_options, with_times
from ..._engine.cost.cost import attention_flops, grouped_sides
from ..._engine.cost.lone_pass import RATES
from ..._text import short
from .hlo import Instruction, Module, arrays_of, collective_of, nbytes, parse, results_of
from .kernels import ATTENTION_KERNELS, flops_of_instruction, kind_of_kernel

# All times are an H200's, whatever runs: all processes must compile the same program, and what counts is one time
# against another. Of collectives, between two GPUs:
_LATENCY, _LINK_GB_S = 10e-6, 150.0
_LEAST = 1e-6  # seconds: XLA takes what is known to take 0 for unknown
# What takes no time of its own, or is told by `compiler_options`.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "partition-id", "replica-id"}
_BODIES = {"while", "conditional", "call"}  # what has a schedule of its own
_FREE |= _BODIES | {"after-all", "copy-start"}


def scheduling_options(
    compiled: Any, backend: str | None = None, *, copy_ms: float | None = None
) -> dict[str, str | bool | int | bytes]:
    """Return the options of `compiler_options`, with the times of a program's instructions, to compile it again with.

    For steps with collectives, such as exchanges between experts: with these options XLA puts what hides each beside
    it. The order of execution changes, not what is computed. Times are estimates from shapes.

    Args:
      compiled: the step, `jax.jit(step, compiler_options=compiler_options()).lower(...).compile()`.
      backend: as for `compiler_options`.
      copy_ms: as for `compiler_options`; what `compiled` was compiled with.

    Returns:
      XLA's options; empty except on NVIDIA GPUs.

    Raises:
      TypeError: compiled is not a compiled program.
      ValueError: as `compiler_options`.

    Example:
      >>> import jax
      >>> from jaxoffload import compiler_options
      >>> from jaxoffload.proof import scheduling_options
      >>> lowered = jax.jit(lambda x: x + 1, compiler_options=compiler_options()).lower(1.0)
      >>> scheduling_options(lowered.compile())  # on a CPU
      {}
    """
    if not hasattr(compiled, "memory_analysis"):
        raise TypeError(
            f"scheduling_options: compiled must be what .lower(...).compile() returns, got {short(compiled)}"
        )
    options = compiler_options(backend, copy_ms=copy_ms)
    return with_times(options, times(parse(compiled.as_text()))) if options else {}


def times(module: Module) -> dict[str, float]:
    """Return the seconds of each instruction that XLA schedules, by the name that it has there."""
    inside_kernels = {name for line in module if line.opcode not in _BODIES for name in line.calls}
    known = {
        _scheduled_name(line): seconds_of(line, module) for line in module if line.computation not in inside_kernels
    }
    return {name: max(seconds, _LEAST) for name, seconds in known.items() if seconds is not None}


def _scheduled_name(line: Instruction) -> str:
    """Return the name that XLA schedules; a collective with nothing beside it has another name afterwards."""
    found = re.search(r'scheduling_name="([^"]*)"', line.text)
    return found[1] if found else line.name


def seconds_of(line: Instruction, module: Module) -> float | None:
    """Return the seconds of an instruction; None where it is not for us to say."""
    if line.opcode in _FREE or line.opcode.endswith("-done") or line.starts_host_copy:
        return None
    if collective := collective_of(line, module):
        operands = sum(nbytes(operand.shape) for operand in module.operands(collective))
        one = _LATENCY + max(operands, nbytes(results_of(collective))) / 2 / _LINK_GB_S / 1e9
        is_both = collective.opcode.startswith("all-reduce")  # a reduce-scatter, and an all-gather
        return 2 * one if is_both else one
    if line.opcode.endswith("-start"):
        return None
    moving = _moved(line, module) / RATES.hbm_gb_s / 1e9
    return max([moving, *(_computing(each, module) for each in (line, *module.called(line)))])


def _computing(line: Instruction, module: Module) -> float:
    """Return the seconds of a kernel's FLOPs; 0 where they are not known."""
    if line.opcode in ("dot", "custom-call") and (flops := flops_of_instruction(line, module)) > 0:
        return flops / RATES.gemm_tflops / 1e12
    if line.opcode != "custom-call" or not (operands := module.operands(line)):
        return 0.0
    shapes = [array.sizes for each in (*operands, line) for array in arrays_of(each.shape)[:1]]
    if kind_of_kernel(line) == ATTENTION_KERNELS and len(shapes[0]) == len(shapes[1]) == 4:
        is_backward = re.search("bwd|backward", line.target.lower()) is not None
        batch, *middle, width = shapes[0]
        length, heads = max(middle), min(middle)  # in either order
        flops = attention_flops((batch, length, heads, width), (batch, length), True) * (2.5 if is_backward else 1.0)
        return flops / RATES.attention_tflops[is_backward] / 1e12
    sides = grouped_sides(shapes)
    return 2.0 * sides[0] * sides[1] * sides[2] / RATES.gemm_tflops / 1e12 if sides else 0.0


def _moved(line: Instruction, module: Module) -> int:
    """Return the bytes that an instruction reads and writes; of a stack that it reads or writes by row, a row."""
    if line.opcode != "fusion":
        return nbytes(line.shape) + sum(nbytes(operand.shape) for operand in module.operands(line))
    inner = list(module.called(line))
    read = {each.operands[0]: nbytes(each.shape) for each in inner if each.opcode in ("dynamic-slice", "gather")}
    read |= {each.operands[0]: 0 for each in inner if each.opcode == "dynamic-update-slice"}
    (root,) = (each for each in inner if each.is_root)
    results = module.sources(root) if root.opcode in ("tuple", "bitcast") else [root]
    made = (module.operands(each)[1] if each.opcode == "dynamic-update-slice" else each for each in results)
    taken = (read.get(each.name, nbytes(each.shape)) for each in inner if each.opcode == "parameter")
    return sum(taken) + sum(nbytes(each.shape) for each in made)
