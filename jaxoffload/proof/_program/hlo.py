"""A compiled program, parsed once: its instructions, how often each runs, and what it does to host memory."""

import dataclasses
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ..._engine.stages.repeated import REPEATED_SCOPE

_COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(")  # instructions are indented
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_CALLS = re.compile(
    r"(?:calls|body|condition|to_apply|branch_computations|true_computation|false_computation)"
    r"=(%[\w.\-]+|\{%[^}]*\})"
)
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"(([a-z]+(\d*))\w*\[([\d,]*)\])")


class Instruction(NamedTuple):
    """A line of a compiled program: `operands` and `calls` are names, of instructions and of computations."""

    computation: str
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    calls: tuple[str, ...]
    text: str

    @property
    def on_host(self) -> bool:
        """True if any of its results lives in host memory."""
        return "S(5)" in self.shape

    @property
    def is_root(self) -> bool:
        """True if its results are those of its computation."""
        return self.text.lstrip().startswith("ROOT ")

    @property
    def target(self) -> str:
        """The name that a custom call calls; empty for other instructions."""
        return _first(r'custom_call_target="([^"]*)"', self.text)

    @property
    def element(self) -> str:
        """Which element of a tuple a get-tuple-element takes."""
        return _first(r"\bindex=(\d+)", self.text)

    @property
    def op_name(self) -> str:
        """The path of JAX's operation that it computes, or was inserted for; empty if none."""
        return _first(r'\bop_name="([^"]*)"', self.text)

    @property
    def scope(self) -> str:
        """The residual whose scope, opened by `scan` or `chain`, the metadata names; empty if none."""
        return _first(r"jaxoffload\((\(matmul\)|[^()]*)\)", self.text)

    @property
    def starts_host_copy(self) -> bool:
        return self.opcode.endswith("-start") and self.on_host


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program: its instructions by computation and name. `name` is the one that a profile gives it."""

    name: str
    computations: dict[str, dict[str, Instruction]]

    def __iter__(self) -> Iterator[Instruction]:
        return (line for lines in self.computations.values() for line in lines.values())

    @functools.cached_property
    def trip_counts(self) -> dict[str, int]:
        """Body or condition of a loop -> its iterations, where XLA knows them or its name says them."""
        counts: dict[str, int] = {}
        for line in (line for line in self if line.opcode == "while"):
            known = _first(r'"known_trip_count":\{"n":"(\d+)"', line.text)
            named = _first(rf"{REPEATED_SCOPE}\((\d+)\)/while\b", line.op_name)
            if count := int(known or named or 0):
                counts |= dict.fromkeys(line.calls, count)
        return counts

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """Computation -> how often it runs. A loop whose iterations XLA does not know counts as one of them."""
        callers = defaultdict(list)
        for line in self:
            for called in line.calls:
                callers[called].append(line.computation)

        @functools.cache
        def count(computation: str) -> int:
            each = self.trip_counts.get(computation, 1)
            return each * sum(map(count, callers[computation])) if computation in callers else 1

        return {computation: count(computation) for computation in self.computations}

    def operands(self, line: Instruction) -> list[Instruction]:
        inside = self.computations[line.computation]
        return [inside[name] for name in line.operands if name in inside]

    def sources(self, line: Instruction) -> list[Instruction]:
        """Return the operands of an instruction, looked for behind bitcasts and tuples."""
        return [self._behind(operand) for operand in self.operands(line)]

    def _behind(self, line: Instruction) -> Instruction:
        before = self.operands(line)[:1]
        if before and line.opcode == "bitcast":
            return self._behind(before[0])
        if before and line.opcode == "get-tuple-element" and before[0].opcode == "tuple":
            return self._behind(self.operands(before[0])[int(line.element)])
        return line

    def called(self, line: Instruction) -> Iterator[Instruction]:
        """Return the instructions of the computations that it runs."""
        return (inner for name in line.calls for inner in self.computations.get(name, {}).values())


def parse(text: str) -> Module:
    """Read a compiled program's `as_text()`."""
    computations, computation = defaultdict[str, dict[str, Instruction]](dict), ""
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            computation = begins[1]
        elif match := _INSTRUCTION.match(line):
            name, shape, opcode, rest = match.groups()
            operands = tuple(_NAME.findall(rest.partition(")")[0]))
            calls = tuple(_NAME.findall(" ".join(_CALLS.findall(line))))
            computations[computation][name] = Instruction(computation, name, shape, opcode, operands, calls, line)
    return Module(text.removeprefix("HloModule ").partition(",")[0], dict(computations))


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")


def collective_of(line: Instruction, module: Module) -> Instruction | None:
    """Return the collective that an instruction is or runs, as a kernel of its own does; None without one."""
    each = (line, *module.called(line))
    return next((inner for inner in each if inner.opcode.removesuffix("-start") in COLLECTIVES), None)


def collectives(module: Module, which: Callable[[Instruction], bool] = lambda _: True) -> Counter[tuple[str, str]]:
    """Return how often each kind runs on an array of each shape; XLA puts several arrays into one collective."""
    counts = Counter[tuple[str, str]]()
    for line in filter(which, module):
        if (kind := line.opcode.removesuffix("-start")) in COLLECTIVES:
            shapes = [array.text for array in arrays_of(results_of(line))]
            # An all-to-all lists one array as several segments.
            for shape in dict.fromkeys(shapes) if kind == "all-to-all" else shapes:
                counts[kind, shape] += module.runs[line.computation]
    return counts


def results_of(line: Instruction) -> str:
    """Return the shapes of a collective's results; an asynchronous one's shape may begin with those of its operands."""
    operands = re.match(r"\(\(.*?\), ", line.shape)
    if operands:
        return line.shape[operands.end() :]
    has_one = line.opcode in ("all-gather-start", "collective-permute-start")
    return line.shape.partition(", ")[2] if has_one else line.shape


def collective_kernels(module: Module, modules: Iterable[Any]) -> set[str]:
    """Return the names that a profile gives to asynchronous collectives that XLA runs as kernels of its own.

    It does so with small ones between GPUs with NVLink. They are dealt out to the same few streams as the host copies,
    and the program's text does not name them. https://github.com/openxla/xla/pull/46463

    Args:
      modules: `runtime_executable().hlo_modules()` of the compiled program.
    """
    starts = {line.name for line in module if line.opcode.endswith("-start") and collective_of(line, module)}
    lines = (line for each in modules for body in each.computations() for line in body.instructions())
    return {
        line.async_wrapped_root().name for line in lines if line.opcode.name == "kAsyncStart" and line.name in starts
    }


def with_sizes_on_the_host(module: Module) -> set[str]:
    """Return TransformerEngine's grouped GEMMs, and their quantization, that copy the group sizes to the host and wait
    for them at each call. Its kernels of the second kind do not, and have other targets."""
    targets = ("te_grouped_gemm_ffi", "te_grouped_quantize_ffi")
    return {line.name for line in module if line.target in targets}


_PASSING_ON = {"while", "tuple", "get-tuple-element", "parameter", "bitcast", "optimization-barrier"}
_PASSING_ON |= {"conditional", "fusion-start", "fusion-done", "copy-start", "copy-done"}


def kernels_on_host_memory(module: Module) -> list[Instruction]:
    """Return the instructions that meet a value on the host and neither pass it on, nor make room for it, nor copy it
    by DMA: kernels that read pinned memory, computation on the host, synchronous copies, copies from host to host."""
    copying = {name for line in module if line.opcode.endswith("-start") for name in line.calls}

    def is_right(line: Instruction) -> bool:
        within_host = line.opcode == "copy-start" and line.shape.count("S(5)") > 1  # both ends of it
        makes_room = line.opcode == "custom-call" and line.target == "AllocateBuffer"
        is_dma = line.computation in copying and "dynamic_slice_config" in line.text
        return (line.opcode in _PASSING_ON and not within_host) or makes_room or is_dma

    meets_host = lambda line: line.on_host or any(operand.on_host for operand in module.operands(line))
    return [line for line in module if meets_host(line) and not is_right(line)]


def out_of_range(module: Module) -> Iterator[Instruction]:
    """Yield DMA copies of a stack's row whose offset, which XLA:GPU does not clamp, is wrong in some iteration."""
    for start in (line for line in module if line.opcode == "fusion-start"):
        iterations = module.trip_counts.get(start.computation, 1)
        for copy in (line for line in module.called(start) if line.opcode.startswith("dynamic-")):
            stack = arrays_of((copy if "update" in copy.opcode else module.operands(copy)[0]).shape)[0]
            if not set(row_offsets(copy, iterations)) <= set(range(0, stack.nbytes, stack.row_bytes)):
                yield copy


def row_offsets(copy: Instruction, iterations: int) -> list[int]:
    """Return the byte of the stack where a DMA copy's row begins, per iteration; -1 where the program does not say.

    jaxlib 0.12 says it in `linear` or in `table`, and has zeros where earlier ones say it (DynamicSliceConfig in
    xla/service/gpu/backend_configs.proto).
    """
    if table := _first(r'"table":\{"offsets":\[([^\]]*)\]', copy.text):
        return [int(offset) for offset in re.findall(r"-?\d+", table)]
    affine = re.findall(r'"byte_offset":"(-?\d+)","byte_stride":"(-?\d+)"', copy.text)
    offset, stride = map(int, affine[-1]) if affine else (-1, 0)
    return [offset + stride * i for i in range(iterations)]


def of_unknown_length(module: Module) -> list[Instruction]:
    """Return the loops that copy rows of stacks and whose iterations XLA does not know."""
    copying = {line.computation for line in module if line.opcode == "fusion-start" and line.on_host}
    unknown = copying - module.trip_counts.keys()
    return [line for line in module if line.opcode == "while" and unknown.intersection(line.calls)]


class Array(NamedTuple):
    """An array in a shape such as `(bf16[9,512,256]{2,1,0}, u32[])`, as it is written there."""

    text: str
    sizes: tuple[int, ...]
    nbytes: int

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.sizes[0]


def arrays_of(shape: str) -> list[Array]:
    """Return the arrays in a shape. XLA packs `s4`, `f4e2m1fn` and the like; a `token` has no bytes."""
    arrays = []
    for text, dtype, bits, written in _ARRAY.findall(shape):
        sizes = tuple(int(size) for size in written.split(",") if size)
        arrays.append(Array(text, sizes, -(-math.prod(sizes) * (8 if dtype == "pred" else int(bits or 0)) // 8)))
    return arrays


def nbytes(shape: str) -> int:
    """Return the bytes of all arrays in a shape."""
    return sum(array.nbytes for array in arrays_of(shape))


class Copy(NamedTuple):
    """A copy between device and host that a program makes each time it runs there.

    Attributes:
      residual: its names; empty where the program does not say.
      loop: the computation that makes it: a loop's body, or the program itself.
    """

    residual: str
    nbytes: int
    loop: str


def host_copies(module: Module) -> dict[str, Copy]:
    """Return the asynchronous copies by the names that a profile gives them."""
    copies = {}
    for line in (line for line in module if line.starts_host_copy):
        name, array = line.name, arrays_of(line.shape)[0]
        size = array.nbytes
        if line.opcode == "fusion-start":
            name, size = name_in_a_profile(line.calls[0]), array.row_bytes
        copies[name] = Copy(_residual_of(line, module), size, line.computation)
    return copies


def name_in_a_profile(computation: str) -> str:
    """Return how a profile names what runs a computation: after the instruction in it, after which that is named."""
    return computation.replace("_computation", "")


def _residual_of(copy: Instruction, module: Module) -> str:
    """Return the names of the residual that a copy copies; empty where nothing says.

    `scan` and `chain` trace each in a scope of its own, which is in the metadata of the copy, of its end (since
    jaxlib 0.12), or of what it waits for: its operand, or what that is an element of. What a copy put on the host is
    what that copy names. A copy behind a loop, the last layer's, is of an element of the loop's results, of which the
    loop's body copies the rows of the layers before. Where a loop over microbatches carries it, an iteration copied it
    to the host.
    """
    in_its_place = module.computations[copy.computation].values()
    ends = (line for line in in_its_place if line.opcode == "copy-done" and module.sources(line) == [copy])
    source = next(iter(module.sources(copy)), copy)
    if scope := next((x.scope for x in (copy, *ends, *module.operands(copy)[:1], source) if x.scope), ""):
        return scope
    before, element = next(iter(module.sources(source)), copy), source.element
    if source.opcode == "copy-done" and before is not copy:
        return _residual_of(before, module)
    starts = []
    if element and before.opcode in ("while", "parameter"):
        called = list(module.called(before)) if before.opcode == "while" else []
        inside = called or list(in_its_place)
        rows = (line for line in called if line.opcode == "fusion-start" and line.on_host)
        starts += [row for row in rows if element in [x.element for x in module.sources(row)]]
        carried = (module.operands(line)[int(element)] for line in inside if line.is_root and line.opcode == "tuple")
        starts += [module.sources(end)[0] for end in carried if end.opcode == "copy-done"]
    return _residual_of(starts[0], module) if starts else ""
