"""The seven checks of `verify`: each is named as its claim, and a function of its target.

The reference is plain `lax.scan` and `jax.checkpoint`, keeping the same values on the device. What a check cannot know
it calls "not checked", and says why.
"""

import contextlib
import ctypes
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.core import Var

from ..._compiler_options import compiler_options
from ..._engine.memory import DEVICE, on_host
from ..._engine.names import read_names
from ..._engine.plan import ARGUMENT, Row
from ..._engine.reference import as_reference, with_layers
from ..._engine.source import source_of
from ..._policy import Policy
from ..._residuals import residuals
from ..._table import EMPTY, OFFLOADED, RECOMPUTED, SHARES, Residual, Residuals
from ..._text import readable
from .._program import kernels as _kernels
from .._program.hlo import (
    Instruction,
    collective_kernels,
    collectives,
    host_copies,
    instructions,
    kernels_on_host_memory,
    of_unknown_turns,
    out_of_range,
    waited_for,
    with_sizes_on_the_host,
)
from .._program.host_transfers import GIVEN, INPUTS, HostTransfer, host_transfers
from .._program.target import Target, compiled, has_loops, most_layers_of, rows_read_beyond
from .._program.trace import Event, in_the_way, traced
from .bits import differences, numbers, says_nothing
from .rounding import CHAOTIC, LIMIT, Rounding, furthest, rounding

HOLDS: Final = "holds"
FAILS: Final = "fails"
NOT_CHECKED: Final = "not checked"
Verdict = Literal["holds", "fails", "not checked"]

Found = tuple[Verdict, str]  # and what was compared, where it fails and by how much, or why it was not checked


def _no_reference(target: Target) -> str:
    said = "nothing in the function is differentiated by jaxoffload, so it has no reference"
    if target.loss is None:
        return f"{said} (a loss returns one floating-point scalar; has_aux=True: that and other results)"
    return f"{said}; is it jaxoffload's scan, chain or checkpoint that it calls?"


# --- gradients


def gradients(target: Target) -> Found:
    if not target.has_reference:
        return NOT_CHECKED, _no_reference(target)
    if has_loops(target.reference_jaxpr):
        return NOT_CHECKED, "it was differentiated before it came here, and has no reference any more"
    if transfer := list(host_transfers(target.reference_jaxpr)):
        return NOT_CHECKED, f"{len(transfer)} {_OTHERS_MOVE}"
    fitting = reference_that_fits(target)
    if fitting is None:
        fewer = (
            "with fewer layers that fit nothing moves" if most_layers_of(target.jaxpr) else "only scans can have fewer"
        )
        return NOT_CHECKED, f"{need(target.reference_program)}, and {fewer}"
    mine, reference, differ = _compared(fitting.program, fitting.reference_program, target.arrays)
    run = fitting.reference_program
    if _in_any_process(bool(differ)):  # perhaps in what XLA fused or contracted in one of them
        program, run = fitting.exact_programs()
        mine, reference, differ = _compared(program, run, target.arrays)
    results, of = len(jax.tree.leaves(mine)), ""
    if fitting.most is not None:
        of = f", with the first {fitting.most} layers of each scan: {need(target.reference_program)}"
    equal = f"{results} results are the reference's, bit for bit{of}"
    if _in_any_process(bool(differ)):
        if _in_any_process(not has_room_for(run, copies=2)):
            verdict, how = _by_norm(furthest(mine, reference), need(run, copies=2))
        else:
            verdict, how = _by_rounding(rounding(mine, reference, run, target.arrays))
        if verdict != HOLDS:
            return verdict, f"{len(differ)} of {results} results differ: {'; '.join(differ[:3])}{of}; {how}"
        equal = f"{results} results are the reference's, {len(differ)} of them not bit for bit: {how}{of}"
    if (empty := says_nothing(mine, target.arrays)) is not None:
        return NOT_CHECKED, f"the results are equal, but {empty}; give arguments with which they are not"
    zeros = ""
    if zero := [path for path, g in jax.tree_util.tree_leaves_with_path(mine.get("gradient", [])) if not g.any()]:
        zeros = f"; of them zero: the gradient of {_first([f'args{jax.tree_util.keystr(path)}' for path in zero])}"
    return HOLDS, equal + zeros


def _compared(program: Any, reference: Any, args: tuple[Any, ...]) -> tuple[Any, Any, list[str]]:
    """The results of both, and how they differ."""
    mine, others = numbers(program(*args)), numbers(reference(*args))
    return mine, others, list(differences(mine, others))


def _by_rounding(found: Rounding) -> Found:
    """Whether results that differ do so by rounding alone, in all processes."""
    own = f"{found.error:.1g} of their norm"
    if _in_any_process(not found.share <= LIMIT):
        return FAILS, f"they are {found.share:.3g} times as far apart as rounding moves the reference's ({own})"
    if _in_any_process(not found.error <= CHAOTIC):
        return NOT_CHECKED, f"rounding alone moves the reference's by {own}"
    return HOLDS, f"they are {found.share:.2g} times as far apart as rounding moves the reference's ({own})"


def _by_norm(apart: float, needed: str) -> Found:
    """As `_by_rounding`, where there is no room to run the reference beside two copies of the arguments."""
    far = _in_any_process(not apart <= CHAOTIC)
    return FAILS if far else NOT_CHECKED, f"they are {apart:.2g} of a norm apart; to measure rounding, {needed}"


def _in_any_process(true: bool) -> bool:
    """What all processes then do together."""
    return bool(np.any(multihost_utils.process_allgather(np.array(true)))) if jax.process_count() > 1 else true


def reference_that_fits(target: Target) -> Target | None:
    """Return the target, truncated to the most layers whose reference program fits on the device.

    None if no truncation fits, or if the truncated program offloads nothing.
    """
    if has_room_for(target.reference_program):
        return target
    fitting, fit, too_many = None, 0, most_layers_of(target.jaxpr)
    while too_many - fit > 1:
        layers = (fit + too_many) // 2
        fewer = target.with_layers(layers)
        if has_room_for(fewer.reference_program, but_for=0.1):
            fitting, fit = fewer, layers
        else:
            too_many = layers
    return None if fitting is None or (target.host_transfers and not fitting.host_transfers) else fitting


_OTHERS_MOVE = "value(s) go to the host in the reference too: not jaxoffload moves them"


def has_room_for(program: Any, but_for: float = 0.0, copies: int = 1) -> bool:
    """Whether the device can hold what a program needs, as far as both tell, but for a share of the device; with so
    many copies of the arguments."""
    limit = device_bytes()
    return limit is None or _bytes_needed(program, copies) <= (1 - but_for) * limit


def device_bytes() -> int | None:
    """That a device offers; None where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def _bytes_needed(program: Any, copies: int = 1) -> int:
    plan = program.memory_analysis()
    return copies * plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes if plan else 0


def need(program: Any, what: str = "the reference", copies: int = 1) -> str:
    return f"{what} needs {readable(_bytes_needed(program, copies))} of a device's {readable(device_bytes() or 0)}"


# --- conservation


def conservation(target: Target) -> Found:
    if not target.has_reference:
        return NOT_CHECKED, _no_reference(target)
    if target.loss is None:
        return NOT_CHECKED, "a step's residuals are inside of it; verify its loss"
    mine, others = (residuals(loss, *target.args) for loss in (target.loss, as_reference(target.loss)))
    moved = _moved(mine, others)
    instead = [r for r in mine if r.state == RECOMPUTED and r.reason == "other_layers"]
    freed, held = others.device_bytes - mine.device_bytes, sum(r.bytes for r in [*moved, *instead])
    how = f"by the jaxpr {readable(freed)} less than the reference's on the device, {readable(held)} on the host"
    if freed != held and any(SHARES in r.reason for r in others):
        return NOT_CHECKED, f"{how}; but branches of a cond share a residual in the reference, and not where one moves"
    if freed != held and target.plans.overlap:
        return NOT_CHECKED, f"{how}; but plans are nested, and in the reference the outer one keeps more"
    if freed != held and (transfer := list(host_transfers(target.reference_jaxpr))):
        return NOT_CHECKED, f"{how}; but {len(transfer)} {_OTHERS_MOVE}"
    if freed != held:
        return FAILS, f"{how}: {freed - held:+,} bytes"
    verdicts, said = zip(_planned(target, moved, mine.host_bytes), _by_peaks(target), strict=True)
    return FAILS if FAILS in verdicts else HOLDS, "; ".join((how, *said))  # by the jaxpr it does


def _moved(mine: Residuals, others: Residuals) -> list[Residual]:
    """What the device has less of: arguments that are offloaded stay with the caller too."""
    arguments = {row.names for row in others if row.reason == ARGUMENT}
    return [r for r in mine if r.state == OFFLOADED and r.reason != EMPTY and r.names not in arguments]


def _planned(target: Target, moved: list[Residual], on_the_host: int) -> Found:
    """As the compiler planned it; `on_the_host`: bytes of all devices, empty rows too."""
    if jax.default_backend() != "gpu":
        return NOT_CHECKED, "not by the compiler's plan, for this backend has no host memory apart"
    predicted = _freed(target, moved)
    if predicted < _VISIBLE:
        return NOT_CHECKED, f"not by the compiler's plan, in which {readable(predicted)} cannot be seen"
    theirs = compiled(as_reference(target.run), target.arrays, compiler_options())
    ours, reference = (program.memory_analysis() for program in (target.fast_program, theirs))
    freed, there = reference.temp_size_in_bytes - ours.temp_size_in_bytes, ours.host_temp_size_in_bytes
    parts = max(1, len(target.devices))
    wanted = on_the_host // parts
    # Of what is not divided among all of them each has the whole.
    too_much = parts == 1 and there > 1.015 * wanted
    verdict: Verdict = FAILS if too_much or FAILS in (_at_least(freed, predicted), _at_least(there, wanted)) else HOLDS
    said = f"planned {readable(freed)} less, {_or(predicted)}"
    return verdict, f"{said}, and {readable(there)} on the host for {readable(wanted)}"


def _by_peaks(target: Target) -> Found:
    """As two processes of their own measured it."""
    if target.peaks is None:
        return NOT_CHECKED, "not by peaks, which the command line measures"
    if isinstance(target.peaks, str):
        return NOT_CHECKED, f"not by peaks: {target.peaks}"
    ours, reference, most = target.peaks
    assert target.loss
    loss = target.loss if most is None else with_layers(target.loss, most)
    predicted = _freed(target, _moved(*(residuals(f, *target.args) for f in (loss, as_reference(loss)))))
    if predicted < _VISIBLE:
        return NOT_CHECKED, f"not by peaks, in which {readable(predicted)} cannot be seen"
    said = f"at the peak of fresh processes {readable(reference - ours)} less, {_or(predicted)}"
    layers = "" if most is None else f", with the first {most} layers of each scan"
    return _at_least(reference - ours, predicted), said + layers


def _freed(target: Target, moved: list[Residual]) -> int:
    """Bytes of each device: what the layer in flight holds is there."""
    return sum(r.bytes - r.bytes_per_layer * (r.layers > 1) for r in moved) // max(1, len(target.devices))


def _at_least(freed: int, predicted: int) -> Verdict:
    return HOLDS if freed > 0.985 * predicted else FAILS


def _or(predicted: int) -> str:
    return f"predicted {readable(predicted)}, or 1.5 % less"


_VISIBLE = 64 * 2**20  # bytes; memory differs by some MiB for other reasons


# --- moves


def moves(target: Target) -> Found:
    wrong = [f"{what}, {why}" for transfer in target.host_transfers for what, why in _forbidden(transfer, target)]
    if wrong:
        return FAILS, f"to the host go {'; '.join(dict.fromkeys(wrong))}"
    if not (count := len(target.host_transfers)):
        return HOLDS, "nothing goes to the host"
    marked = sum(transfer.source.name is not None for transfer in target.host_transfers)
    if marked == count:
        return HOLDS, f"the {count} values that go to the host are marked offload"
    others = "have a name that is not a plan's, are results of equations, or lived there before"
    if not marked:
        return HOLDS, f"the {count} values that go to the host {others}"
    return HOLDS, f"of the {count} values that go to the host {marked} are marked offload; {count - marked} {others}"


def _forbidden(transfer: HostTransfer, target: Target) -> Iterator[tuple[str, str]]:
    """What it is, and why it must not go to the host; nothing where it may."""
    source, what = transfer.source, f"{transfer.source.where} {transfer.aval.str_short()}"
    if source.name is not None:
        if source.name.decision != "offload":
            row = target.plans.rows.get(str(source.name))
            names = ", ".join(row.names) if row else str(source.name)
            yield names or "a matrix product", f"which is marked {source.name.decision}"
    elif source.where == GIVEN:  # a weight may have the shape of a moment that lives there
        yield what, f"which is named {transfer.name!r} and stays with the caller" if transfer.name else _UNNAMED
    elif _lives_there(transfer, target):
        pass
    elif transfer.name is None:
        if target.plans.plans or source.where in INPUTS:
            yield what, _UNNAMED
    elif target.policies and all(isinstance(policy, Policy) for policy in target.policies):
        name = read_names(transfer.name)[0]
        decided = {"save" if name.keep else policy.decision(name.text) for policy in target.policies}
        if "offload" not in decided:
            yield name.text, f"which is marked {' or '.join(sorted(decided))}"


_UNNAMED = "which nobody named"


def _lives_there(transfer: HostTransfer, target: Target) -> bool:
    """Whether it may be the new value of an argument on the host, as an optimizer's state may be."""
    like = lambda aval: (aval.shape, aval.dtype)
    return like(transfer.aval) in {like(v.aval) for v in target.jaxpr.invars if on_host(v.aval)}


# --- producers


def producers(target: Target) -> Found:
    if not target.plans.plans:
        return NOT_CHECKED, "nothing in the function is jaxoffload's: what it means to keep is not known"
    rows, recomputed = target.plans.rows, target.plans.recomputed
    what = lambda row: f"{', '.join(row.names) or 'a matrix product'} ({row.decision})"
    again = [
        f"{what(row)} in {recomputed[name][0]} layer(s)"
        for name, row in rows.items()
        if recomputed[name][0] and (row.decision != "recompute" or _is_routing(row))
    ]
    for results in (results for plan in target.plans.plans for results in plan.together):
        kept = [what(rows[name]) for name in results if rows[name].decision != "recompute"]
        again += [
            f"{', '.join(kept)} with {what(rows[name])}, of one kernel"
            for name in results
            if recomputed[name][0] and kept
        ]
    computed_again = f"computed again: {'; '.join(dict.fromkeys(again))}"
    said = "by the jaxpr none is computed again"
    if again and not target.plans.rerun:  # else JAX says of some first runs, too, that they are differentiated
        return FAILS, computed_again
    if target.plans.others or target.plans.overlap:
        seen = computed_again if again else f"{said} for jaxoffload"
        return NOT_CHECKED, f"{seen}; but what other checkpoints keep, or run again, is not known"
    if jax.default_backend() != "gpu":
        return HOLDS, f"{said}; not by the compiled program, which is a GPU's"
    expected = _kernels.traced(target.jaxpr)
    if expected is None:
        return HOLDS, f"{said}; not by the compiled program, for a loop's turns are not known"
    if len(target.devices) > 1:  # what is not divided each of them does
        expected = expected._replace(flops=None)
    ran = _kernels.ran(list(instructions(target.fast_program.as_text())))
    if more := ran.more_than(expected):
        return FAILS, f"{said}, but by the compiled program {'; '.join(more)}"
    counts = ", ".join(f"{ran.counts[kind]} {kind}" for kind in expected.counts)
    return HOLDS, f"{said}; by the compiled program {counts or 'none'}, no more than were traced"


def _is_routing(row: Row) -> bool:
    return bool(row.names) and (row.dtype.startswith("key<") or not jnp.issubdtype(row.dtype, jnp.inexact))


# --- copies, placement


def copies(target: Target) -> Found:
    if jax.default_backend() != "gpu":
        return NOT_CHECKED, "needs an NVIDIA GPU: it is what XLA compiles for one"
    program = target.fast_program
    lines = list(instructions(program.as_text()))
    wrong = [f"{line.opcode} {line.name} touches host memory" for line in kernels_on_host_memory(lines)]
    wrong += [f"{line.name} copies out of range" for line in out_of_range(lines)]
    count = sum(line.opcode.endswith("-start") and line.on_host for line in lines)
    unseen = None
    if loops := of_unknown_turns(lines):
        unseen = f"but how often {_first([loop.name for loop in loops])} turns is not known"
    elif count and has_room_for(program):
        jax.block_until_ready(program(*target.arrays))
        events = next(iter(traced(lambda: jax.block_until_ready(program(*target.arrays))).values()), [])
        unseen = None if events else "not known on which streams: the profiler saw nothing of the GPU"
        wrong += _as_it_ran(events, lines, program.runtime_executable().hlo_modules()) if events else []
    elif count:
        unseen = f"not known on which streams: it did not run: {need(program, 'it')}"
    known = []
    if count and (waits := sorted(with_sizes_on_the_host(lines))):
        known = [f"TransformerEngine has the host read group sizes, and wait for the copies, in {_first(waits)}"]
        wrong += known if target.strict else []
    if wrong:
        return FAILS, _first(wrong, "; ")
    said = f"{count} asynchronous copies, all in range" if count else "no copies"
    if unseen:
        return NOT_CHECKED, "; ".join((said, unseen, *known))
    said += " and on no stream that computes" if count else ""
    return HOLDS, "; ".join((f"{said}, and nothing else touches host memory", *known))


def _first(what: list[str], between: str = ", ") -> str:
    """Three of them, and how many more there are."""
    return between.join(what[:3] + [f"and {len(what) - 3} more"] * (len(what) > 3))


def _as_it_ran(events: list[Event], lines: list[Instruction], modules: Iterable[Any]) -> list[str]:
    """What is wrong with the copies in a trace of one run, of one device."""
    spared, asking = collective_kernels(modules) | waited_for(lines), with_sizes_on_the_host(lines)
    events = [e for e in events if not (e.is_host_copy and e.op in asking)]
    shared = in_the_way(events, spared).items()
    wrong = [f"copies run on a stream that computes, {stream}: {what}" for stream, what in shared]
    ran = sum(e.is_host_copy and e.op not in spared for e in events)
    branches = any(line.opcode == "conditional" for line in lines)  # of which one is taken
    fewest = 1 if branches else sum(copy.turns for copy in host_copies(lines).values())
    return wrong if ran >= fewest else [*wrong, f"{ran} of {fewest} copies ran as copies"]


def placement(target: Target) -> Found:
    if len(target.devices) < 2:
        return NOT_CHECKED, "all arguments are on one device"
    if not target.has_reference:
        return NOT_CHECKED, _no_reference(target)
    mine, others = _collectives(target)
    more, further, wrong = mine - others, rows_read_beyond(target.jaxpr), []
    held = f"arrays are in {mine.total()} collectives, the reference's in {others.total()}"
    if more.total() > further or more.keys() - others.keys():
        said = ", ".join(f"{count} {kind} of {shape}" for (kind, shape), count in more.items())
        wrong.append(f"more collectives than the reference has: {said}")
    elif more:
        held += f", where {further} rows of the stacks on the host are read beyond the reference's"
    if target.loss is not None:
        here, there = (_of_each_device(loss, target.args) for loss in (target.loss, as_reference(target.loss)))
        larger = sorted(name for name in here if here[name] > there.get(name, 0))
        wrong += [
            f"of a layer's {name} each device keeps {readable(here[name])}, "
            f"the reference's {readable(there.get(name, 0))}"
            for name in larger
        ]
        held += f"; of {len(here)} residuals no device keeps a greater part"
    return (FAILS, _first(wrong, "; ")) if wrong else (HOLDS, held)


def _collectives(target: Target) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Those of the program and of its reference's."""
    mine, others = (
        collectives(list(instructions(program.as_text()))) for program in (target.program, target.reference_program)
    )
    return mine, others


def _of_each_device(loss: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, int]:
    """Of each named residual, the bytes of a layer that a device keeps, where XLA divides it."""
    leaves = lambda *args: jax.tree.leaves(jax.vjp(loss, *args)[1])
    jaxpr = jax.make_jaxpr(leaves)(*args)
    sources = {i: source_of(jaxpr, var) for i, var in enumerate(jaxpr.outvars) if isinstance(var, Var)}
    named = {i: source for i, source in sources.items() if source.name and source.layers + source.empty}

    def kept(*args: Any) -> list[jax.Array]:
        found = leaves(*args)
        return [jax.device_put(found[i], DEVICE) if on_host(jax.typeof(found[i])) else found[i] for i in named]

    compiled = jax.jit(kept).lower(*args).compile()
    sizes: dict[str, int] = {}
    for source, sharding, x in zip(named.values(), compiled.output_shardings, jax.eval_shape(kept, *args), strict=True):
        assert source.name
        name = ", ".join(n.text for n in source.name.names) or "matrix products"
        part = math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize // (source.layers + source.empty)
        sizes[name] = max(part, sizes.get(name, 0))
    return sizes


# --- repeats


def repeats(target: Target) -> Found:
    if not has_room_for(target.program):
        return NOT_CHECKED, f"arguments are not given away here, and so {need(target.program, 'it')}"
    first: Any = None
    wrong: list[str] = []
    held: list[int] = []
    resident: list[int] = []

    def run(times: int) -> None:
        nonlocal first
        for _ in range(times):
            again = numbers(target.program(*target.arrays))
            first = again if first is None else first
            number = len(held) + 1
            wrong.extend(f"run {number} differs from the first: {differ}" for differ in differences(again, first))
            del again
            held.append(_bytes_in_use())
            resident.append(_bytes_of_the_process())

    run(target.repeats)
    more = resident[-1] - resident[1]  # the first may still allocate
    if _in_any_process(more > _VISIBLE):  # a pool grows now and then, what nobody frees each time
        run(target.repeats - 2)
        more = min(more, resident[-1] - resident[target.repeats - 1])
    if wrong:
        return FAILS, "; ".join(wrong[:3])
    later = f"after {target.repeats - 2} more run(s)"
    if held[-1] > held[1]:
        return FAILS, f"{readable(held[-1] - held[1])} more are in use {later}"
    if more > _VISIBLE:
        return FAILS, f"the process takes {readable(more)} more of the host's memory {later}"
    but = f"; the process takes no more, but for {readable(_VISIBLE)}"
    return HOLDS, f"{target.repeats} runs are equal, and {readable(held[-1])} are in use after each{but}"


def _bytes_in_use() -> int:
    """On the devices, where they tell, and of arrays that somebody holds on the host; else of all such arrays."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_in_use" in s for s in stats):
        on_the_host = sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind == "pinned_host")
        return on_the_host + sum(s["bytes_in_use"] for s in stats)
    return sum(array.nbytes for array in jax.live_arrays())


def _bytes_of_the_process() -> int:
    """Of the host's memory, but for what malloc keeps for later; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


CHECKS: tuple[Callable[..., Found], ...] = (gradients, conservation, moves, producers, copies, placement, repeats)
