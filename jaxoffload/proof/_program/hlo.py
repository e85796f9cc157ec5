"""What XLA compiled: the instructions of a program, how often each runs, and what it does to host memory."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

_CALLS = "calls|body|condition|to_apply|branch_computations|true_computation|false_computation"


class Instruction(NamedTuple):
    """A line of a compiled program."""

    computation: str
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str

    @property
    def on_host(self) -> bool:
        return "S(5)" in self.shape

    @property
    def calls(self) -> list[str]:
        """The computations that it runs."""
        return _called(self.text)


def _called(text: str) -> list[str]:
    found = re.findall(rf"(?:{_CALLS})=(%[\w.\-]+|\{{%[^}}]*\}})", text)
    return [name for called in found for name in re.findall(r"%([\w.\-]+)", called)]


def instructions(text: str) -> Iterator[Instruction]:
    """Of a compiled program's `as_text()`."""
    computation = ""
    for line in text.splitlines():
        if found := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            computation = found[1]
        elif found := re.match(r"\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)", line):
            name, shape, opcode, rest = found.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
            yield Instruction(computation, name, shape, opcode, operands, line)


def turns_of(lines: Sequence[Instruction]) -> dict[str, int]:
    """Body or condition of a loop -> its turns, where XLA knows them."""
    turns: dict[str, int] = {}
    for line in lines:
        if line.opcode == "while" and (known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line.text)):
            turns |= dict.fromkeys(line.calls, int(known[1]))
    return turns


def runs(lines: Sequence[Instruction]) -> dict[str, int]:
    """Computation -> how often it runs, where XLA knows the turns of the loops around it; else once for all turns."""
    callers: dict[str, list[tuple[str, int]]] = {}
    turns = turns_of(lines)
    for line in lines:
        for called in line.calls:
            callers.setdefault(called, []).append((line.computation, turns.get(called, 1)))
    counted: dict[str, int] = {}

    def count(computation: str) -> int:
        if computation not in counted:
            each = callers.get(computation, [])
            counted[computation] = sum(count(caller) * turns for caller, turns in each) if each else 1
        return counted[computation]

    return {line.computation: count(line.computation) for line in lines}


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")


def collectives(lines: Sequence[Instruction]) -> Counter[tuple[str, str]]:
    """How often each kind runs on an array of each shape; XLA puts several arrays into one."""
    often, found = runs(lines), Counter[tuple[str, str]]()
    for line in lines:
        if (kind := line.opcode.removesuffix("-start")) in COLLECTIVES:
            shapes = re.findall(r"\w+\[[\d,]*\]", _results(line))
            for shape in dict.fromkeys(shapes) if kind == "all-to-all" else shapes:  # of one array several parts
                found[kind, shape] += often[line.computation]
    return found


def _results(line: Instruction) -> str:
    """The shapes of a collective's results; an asynchronous one's shape may begin with those of its operands."""
    operands = re.match(r"\(\(.*?\), ", line.shape)
    if operands:
        return line.shape[operands.end() :]
    has_one = line.opcode in ("all-gather-start", "collective-permute-start")
    return line.shape.partition(", ")[2] if has_one else line.shape


_PASSING_ON = {"while", "tuple", "get-tuple-element", "parameter", "bitcast", "optimization-barrier"}
_PASSING_ON |= {"fusion-start", "fusion-done", "copy-start", "copy-done"}


def in_copies(lines: Sequence[Instruction]) -> set[str]:
    """The computations that an asynchronous copy runs."""
    return {called for line in lines if line.opcode.endswith("-start") for called in line.calls}


def collective_kernels(modules: Iterable[Any]) -> set[str]:
    """What a profile calls the asynchronous collectives that are kernels of XLA's, as small ones between GPUs with
    NVLink. They are dealt out to the same few streams as the host copies, and the program's text does not name them.
    https://github.com/openxla/xla/pull/46463

    Args:
      modules: `runtime_executable().hlo_modules()` of a compiled program.
    """
    found = set()
    for module in modules:
        bodies = {body.name: [line.to_string() for line in body.instructions()] for body in module.computations()}
        collects = {name for name, lines in bodies.items() if any(map(_is_collective, lines))}
        for line in (line for body in module.computations() for line in body.instructions()):
            if line.opcode.name == "kAsyncStart":
                wrapped = line.async_wrapped_root()
                text = wrapped.to_string()
                if _is_collective(text) or collects.intersection(_called(text)):
                    found.add(wrapped.name)
    return found


def _is_collective(text: str) -> bool:
    return re.search(rf" (?:{'|'.join(COLLECTIVES)})(?:-start)?\(", text) is not None


def waited_for(lines: Sequence[Instruction]) -> set[str]:
    """Loops and branches for which the host decides: XLA copies to it, meanwhile, whether to go on."""
    return {line.name for line in lines if line.opcode in ("while", "conditional")}


def with_sizes_on_the_host(lines: Sequence[Instruction]) -> set[str]:
    """TransformerEngine's products of groups, and what quantises for them, that copy the group sizes to the host and
    wait for it each time: not so its kernels of the second kind, which have a target of their own."""
    target = re.compile(r'custom_call_target="te_grouped_(gemm|quantize)_ffi"')
    return {line.name for line in lines if target.search(line.text)}


def kernels_on_host_memory(lines: Sequence[Instruction]) -> Iterator[Instruction]:
    """All that a value on the host meets and that does not pass it on, make room for it or copy it by DMA: kernels
    that read pinned memory, computation on the host, synchronous copies, copies from the host to the host."""
    at = {(line.computation, line.name): line for line in lines}
    copied = in_copies(lines)
    for line in lines:
        reads = [at[line.computation, o] for o in line.operands if (line.computation, o) in at]
        room = line.opcode == "custom-call" and 'custom_call_target="AllocateBuffer"' in line.text
        dma = line.computation in copied and "dynamic_slice_config" in line.text
        within = line.opcode == "copy-start" and line.shape.count("S(5)") > 1  # both ends of it
        passes = line.opcode in _PASSING_ON and not within
        if not (passes or room or dma) and (line.on_host or any(r.on_host for r in reads)):
            yield line


def out_of_range(lines: Sequence[Instruction]) -> Iterator[Instruction]:
    """DMA copies of a row of a stack whose offset, which XLA:GPU does not clamp, is no row's in some turn."""
    named, turns = {(line.computation, line.name): line for line in lines}, turns_of(lines)
    for start in (line for line in lines if line.opcode == "fusion-start"):
        for copy in (c for c in lines if c.computation in start.calls and c.opcode.startswith("dynamic-")):
            is_write = copy.opcode == "dynamic-update-slice"
            stack = copy.shape if is_write else named[copy.computation, copy.operands[0]].shape
            size, rows = _row_bytes(stack)
            at = row_offsets(copy, turns.get(start.computation, 1))
            if any(a not in range(0, size * rows, size) for a in at):
                yield copy


def row_offsets(copy: Instruction, turns: int) -> list[int]:
    """Where in its stack a DMA copy's row begins, in bytes, in each turn; -1 where the program does not say.

    jaxlib 0.12 says it in `linear` or in `table`, and has zeros where earlier ones say it (DynamicSliceConfig in
    xla/service/gpu/backend_configs.proto).
    """
    if table := re.search(r'"table":\{"offsets":\[([^\]]*)\]', copy.text):
        return [int(offset) for offset in re.findall(r"-?\d+", table[1])]
    affine = re.findall(r'"byte_offset":"(-?\d+)","byte_stride":"(-?\d+)"', copy.text)
    offset, stride = map(int, affine[-1]) if affine else (-1, 0)
    return [offset + stride * turn for turn in range(turns)]


def of_unknown_turns(lines: Sequence[Instruction]) -> list[Instruction]:
    """Loops that copy rows of stacks, and of which XLA does not know how often they turn."""
    known = turns_of(lines)
    copying = {line.computation for line in lines if line.opcode == "fusion-start" and line.on_host}
    return [line for line in lines if line.opcode == "while" and {*line.calls} & copying - known.keys()]


_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}


def _row_bytes(shape: str) -> tuple[int, int]:
    """Of `bf16[9,512,256]{...}`: bytes of a row, and how many rows; a scalar is one."""
    dtype, sizes = of_shape(shape)
    rows, *row = sizes or [1]
    return _BYTES.get("f8" if dtype.startswith("f8") else dtype, 8) * math.prod(row), rows


def of_shape(shape: str) -> tuple[str, list[int]]:
    """The dtype and the sizes of `bf16[9,512,256]{...}`, or of the first of several."""
    found = re.search(r"(\w+)\[([\d,]*)\]", shape)
    assert found, shape
    return found[1], [int(size) for size in found[2].split(",") if size]


class Copy(NamedTuple):
    """A copy between device and host that a program makes each time it runs there.

    Attributes:
      residual: its names; empty where the program does not say.
      loop: the computation that makes it: a loop's body, or the program itself.
      turns: of that loop.
      is_row: whether a row of a stack is copied.
      to_host: or from there.
    """

    residual: str
    nbytes: int
    loop: str
    turns: int
    is_row: bool
    to_host: bool


def host_copies(lines: Sequence[Instruction]) -> dict[str, Copy]:
    """Asynchronous copies, by the name that a profile calls them."""
    at, turns = {(line.computation, line.name): line for line in lines}, turns_of(lines)
    found = {}
    for line in lines:
        if not (line.opcode.endswith("-start") and line.on_host):
            continue
        size, rows = _row_bytes(line.shape)
        # A row of a stack is copied by a computation that is called as the instruction in it is.
        is_row = line.opcode == "fusion-start"
        name = line.calls[0].replace("_computation", "") if is_row and line.calls else line.name
        whole = size if is_row else size * rows
        loop = line.computation
        # The first of a copy's shapes is what it makes.
        to_host = "update" in name if is_row else "S(5)" in line.shape.partition("}")[0]
        found[name] = Copy(_residual(line, lines, at), whole, loop, turns.get(loop, 1), is_row, to_host)
    return found


def _residual(line: Instruction, lines: Sequence[Instruction], at: dict[tuple[str, str], Instruction]) -> str:
    """Of a copy. `scan` and `chain` trace each in a scope of its own, which is in the metadata of the copy, of its end
    (since jaxlib 0.12), or of what it waits for. What is copied behind a loop, the last layer's, the loop copies of the
    layers before."""

    def read_by(line: Instruction) -> list[Instruction]:
        """Its operands, behind bitcasts."""
        found = [at[line.computation, o] for o in line.operands if (line.computation, o) in at]
        return [read_by(source)[0] if source.opcode == "bitcast" else source for source in found]

    reads = read_by(line)
    ends = [end for end in lines if end.opcode == "copy-done" and read_by(end) == [line]]
    for text in (source.text for source in (line, *ends, *reads[:1])):
        if scope := re.search(r"jaxoffload\((\(matrix product\)|[^()]*)\)", text):
            return scope[1]
    if not reads or not (before := read_by(reads[0])):
        return ""
    if reads[0].opcode == "copy-done":
        return _residual(before[0], lines, at)
    if before[0].opcode == "while":
        number = re.search(r"index=\d+\b", reads[0].text)
        for copy in (c for c in lines if c.computation in before[0].calls and c.opcode == "fusion-start" and c.on_host):
            if number and any(re.search(rf"{number[0]}\b", source.text) for source in read_by(copy)):
                return _residual(copy, lines, at)
    return ""
