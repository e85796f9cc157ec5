"""The seven checks of `verify`: each is named as its claim, and a function of its subject.

The reference is the function's twin (`_twin`): plain `lax.scan` and `jax.checkpoint` that keep the same values on the
device. What a check cannot know it calls "not checked", and says why.
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

from .._memory import DEVICE, on_host, readable
from .._origin import origin
from .._plan import ARGUMENT, Row
from .._policy import Policy
from .._residuals import residuals
from .._table import EMPTY, OFFLOADED, RECOMPUTED, SAVED, SHARES, Residual, Residuals
from .._tags import read_names
from .._twin import twin, with_layers
from .._xla import compiler_options
from . import _kernels
from ._bits import differences, numbers, says_nothing
from ._crossings import GIVEN, INPUTS, Crossing, crossings
from ._program import (
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
from ._rounding import CHAOTIC, LIMIT, Rounding, furthest, rounding
from ._subject import Subject, compiled, has_loops, most_layers_of, rows_read_beyond
from ._trace import Event, in_the_way, traced

HOLDS: Final = "holds"
FAILS: Final = "fails"
NOT_CHECKED: Final = "not checked"
Verdict = Literal["holds", "fails", "not checked"]

Found = tuple[Verdict, str]  # and what was compared, where it fails and by how much, or why it was not checked


def _no_twin(subject: Subject) -> str:
    said = "nothing in the function is differentiated by jaxoffload, so it has no twin"
    if subject.loss is None:
        return f"{said} (a loss returns one floating-point scalar; has_aux=True: that and other results)"
    return f"{said}; is it jaxoffload's scan, chain or checkpoint that it calls?"


# --- gradients


def gradients(subject: Subject) -> Found:
    if not subject.has_twin:
        return NOT_CHECKED, _no_twin(subject)
    if has_loops(subject.twins_jaxpr):
        return NOT_CHECKED, "it was differentiated before it came here, and has no twin any more"
    if crossing := list(crossings(subject.twins_jaxpr)):
        return NOT_CHECKED, f"{len(crossing)} {_OTHERS_MOVE}"
    fitting = twin_that_fits(subject)
    if fitting is None:
        fewer = (
            "with fewer layers that fit nothing moves" if most_layers_of(subject.jaxpr) else "only scans can have fewer"
        )
        return NOT_CHECKED, f"{need(subject.twins_program)}, and {fewer}"
    mine, reference, differ = _compared(fitting.program, fitting.twins_program, subject.arrays)
    run = fitting.twins_program
    if _in_any_process(bool(differ)):  # perhaps in what XLA fused or contracted in one of them
        program, run = fitting.exact_programs()
        mine, reference, differ = _compared(program, run, subject.arrays)
    results, of = len(jax.tree.leaves(mine)), ""
    if fitting.most is not None:
        of = f", with the first {fitting.most} layers of each scan: {need(subject.twins_program)}"
    equal = f"{results} results are the twin's, bit for bit{of}"
    if _in_any_process(bool(differ)):
        if _in_any_process(not has_room_for(run, copies=2)):
            verdict, how = _by_norm(furthest(mine, reference), need(run, copies=2))
        else:
            verdict, how = _by_rounding(rounding(mine, reference, run, subject.arrays))
        if verdict != HOLDS:
            return verdict, f"{len(differ)} of {results} results differ: {'; '.join(differ[:3])}{of}; {how}"
        equal = f"{results} results are the twin's, {len(differ)} of them not bit for bit: {how}{of}"
    if (empty := says_nothing(mine, subject.arrays)) is not None:
        return NOT_CHECKED, f"the results are equal, but {empty}; give arguments with which they are not"
    zeros = ""
    if zero := [path for path, g in jax.tree_util.tree_leaves_with_path(mine.get("gradient", [])) if not g.any()]:
        zeros = f"; of them zero: the gradient of {_first([f'args{jax.tree_util.keystr(path)}' for path in zero])}"
    return HOLDS, equal + zeros


def _compared(program: Any, twins: Any, args: tuple[Any, ...]) -> tuple[Any, Any, list[str]]:
    """The results of both, and how they differ."""
    mine, others = numbers(program(*args)), numbers(twins(*args))
    return mine, others, list(differences(mine, others))


def _by_rounding(found: Rounding) -> Found:
    """Whether results that differ do so by rounding alone, in all processes."""
    own = f"{found.error:.1g} of their norm"
    if _in_any_process(not found.share <= LIMIT):
        return FAILS, f"they are {found.share:.3g} times as far apart as rounding moves the twin's ({own})"
    if _in_any_process(not found.error <= CHAOTIC):
        return NOT_CHECKED, f"rounding alone moves the twin's by {own}"
    return HOLDS, f"they are {found.share:.2g} times as far apart as rounding moves the twin's ({own})"


def _by_norm(apart: float, needed: str) -> Found:
    """As `_by_rounding`, where there is no room to run the reference beside two copies of the arguments."""
    far = _in_any_process(not apart <= CHAOTIC)
    return FAILS if far else NOT_CHECKED, f"they are {apart:.2g} of a norm apart; to measure rounding, {needed}"


def _in_any_process(true: bool) -> bool:
    """What all processes then do together."""
    return bool(np.any(multihost_utils.process_allgather(np.array(true)))) if jax.process_count() > 1 else true


def twin_that_fits(subject: Subject) -> Subject | None:
    """The subject, or the same of as many layers of its scans as the device can hold of the twin, and of what else is
    there; None where it can hold none, or none of which anything moves that is to move."""
    if has_room_for(subject.twins_program):
        return subject
    fitting, fit, too_many = None, 0, most_layers_of(subject.jaxpr)
    while too_many - fit > 1:
        layers = (fit + too_many) // 2
        fewer = subject.with_layers(layers)
        if has_room_for(fewer.twins_program, but_for=0.1):
            fitting, fit = fewer, layers
        else:
            too_many = layers
    return None if fitting is None or (subject.crossings and not fitting.crossings) else fitting


_OTHERS_MOVE = "value(s) go to the host in the twin too: not jaxoffload moves them"


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


def need(program: Any, what: str = "the twin", copies: int = 1) -> str:
    return f"{what} needs {readable(_bytes_needed(program, copies))} of a device's {readable(device_bytes() or 0)}"


# --- conservation


def conservation(subject: Subject) -> Found:
    if not subject.has_twin:
        return NOT_CHECKED, _no_twin(subject)
    if subject.loss is None:
        return NOT_CHECKED, "a step's residuals are inside of it; verify its loss"
    mine, others = (residuals(loss, *subject.args) for loss in (subject.loss, twin(subject.loss)))
    moved = _moved(mine, others)
    instead = [r for r in mine if r.state == RECOMPUTED and r.reason == "other_layers"]
    freed, held = others.device_bytes - mine.device_bytes, sum(r.bytes for r in [*moved, *instead])
    how = f"by the jaxpr {readable(freed)} less than the twin's on the device, {readable(held)} on the host"
    if freed != held and any(SHARES in r.reason for r in others):
        return NOT_CHECKED, f"{how}; but branches of a cond share a residual in the twin, and not where one moves"
    if freed != held and subject.plans.overlap:
        return NOT_CHECKED, f"{how}; but plans are nested, and in the twin the outer one keeps more"
    if freed != held and (crossing := list(crossings(subject.twins_jaxpr))):
        return NOT_CHECKED, f"{how}; but {len(crossing)} {_OTHERS_MOVE}"
    if freed != held:
        return FAILS, f"{how}: {freed - held:+,} bytes"
    verdicts, said = zip(_planned(subject, moved, mine.host_bytes), _by_peaks(subject), strict=True)
    return FAILS if FAILS in verdicts else HOLDS, "; ".join((how, *said))  # by the jaxpr it does


def _moved(mine: Residuals, others: Residuals) -> list[Residual]:
    """What the device has less of: arguments that are offloaded stay with the caller too."""
    arguments = {row.names for row in others if row.reason == ARGUMENT}
    return [r for r in mine if r.state == OFFLOADED and r.reason != EMPTY and r.names not in arguments]


def _planned(subject: Subject, moved: list[Residual], on_the_host: int) -> Found:
    """As the compiler planned it; `on_the_host`: bytes of all devices, empty rows too."""
    if jax.default_backend() != "gpu":
        return NOT_CHECKED, "not by the compiler's plan, for this backend has no host memory apart"
    predicted = _freed(subject, moved)
    if predicted < _VISIBLE:
        return NOT_CHECKED, f"not by the compiler's plan, in which {readable(predicted)} cannot be seen"
    theirs = compiled(twin(subject.run), subject.arrays, compiler_options())
    ours, twins = (program.memory_analysis() for program in (subject.fast_program, theirs))
    freed, there = twins.temp_size_in_bytes - ours.temp_size_in_bytes, ours.host_temp_size_in_bytes
    parts = max(1, len(subject.devices))
    wanted = on_the_host // parts
    # Of what is not divided among all of them each has the whole.
    too_much = parts == 1 and there > 1.015 * wanted
    verdict: Verdict = FAILS if too_much or FAILS in (_at_least(freed, predicted), _at_least(there, wanted)) else HOLDS
    said = f"planned {readable(freed)} less, {_or(predicted)}"
    return verdict, f"{said}, and {readable(there)} on the host for {readable(wanted)}"


def _by_peaks(subject: Subject) -> Found:
    """As two processes of their own measured it."""
    if subject.peaks is None:
        return NOT_CHECKED, "not by peaks, which the command line measures"
    if isinstance(subject.peaks, str):
        return NOT_CHECKED, f"not by peaks: {subject.peaks}"
    ours, twins, most = subject.peaks
    assert subject.loss
    loss = subject.loss if most is None else with_layers(subject.loss, most)
    predicted = _freed(subject, _moved(*(residuals(f, *subject.args) for f in (loss, twin(loss)))))
    if predicted < _VISIBLE:
        return NOT_CHECKED, f"not by peaks, in which {readable(predicted)} cannot be seen"
    said = f"at the peak of fresh processes {readable(twins - ours)} less, {_or(predicted)}"
    layers = "" if most is None else f", with the first {most} layers of each scan"
    return _at_least(twins - ours, predicted), said + layers


def _freed(subject: Subject, moved: list[Residual]) -> int:
    """Bytes of each device: what the layer in flight holds is there."""
    return sum(r.bytes - r.bytes_per_layer * (r.layers > 1) for r in moved) // max(1, len(subject.devices))


def _at_least(freed: int, predicted: int) -> Verdict:
    return HOLDS if freed > 0.985 * predicted else FAILS


def _or(predicted: int) -> str:
    return f"predicted {readable(predicted)}, or 1.5 % less"


_VISIBLE = 64 * 2**20  # bytes; memory differs by some MiB for other reasons


# --- moves


def moves(subject: Subject) -> Found:
    wrong = [f"{what}, {why}" for crossing in subject.crossings for what, why in _forbidden(crossing, subject)]
    if wrong:
        return FAILS, f"to the host go {'; '.join(dict.fromkeys(wrong))}"
    if stays := dict.fromkeys(_stays(subject)):
        return FAILS, f"on the device stay {'; '.join(stays)}"
    if not (count := len(subject.crossings)):
        return HOLDS, "nothing goes to the host"
    marked = sum(crossing.source.name is not None for crossing in subject.crossings)
    if marked == count:
        return HOLDS, f"the {count} values that go to the host are marked offload"
    others = "have a name that is not a plan's, are results of equations, or lived there before"
    if not marked:
        return HOLDS, f"the {count} values that go to the host {others}"
    return HOLDS, f"of the {count} values that go to the host {marked} are marked offload; {count - marked} {others}"


def _stays(subject: Subject) -> Iterator[str]:
    """What is saved though it is marked offload, and the table has no other reason; a step has no table."""
    table = residuals(subject.loss, *subject.args) if subject.loss and subject.plans.plans else None
    for row in (row for part in (table, *table.reruns) for row in part) if table else ():
        if row.state == SAVED and row.decision == "offload":
            yield f"{', '.join(row.names)}, which is marked offload ({row.reason})"


def _forbidden(crossing: Crossing, subject: Subject) -> Iterator[tuple[str, str]]:
    """What it is, and why it must not go to the host; nothing where it may."""
    source, what = crossing.source, f"{crossing.source.where} {crossing.aval.str_short()}"
    if source.name is not None:
        if source.name.decision != "offload":
            row = subject.plans.rows.get(str(source.name))
            names = ", ".join(row.names) if row else str(source.name)
            yield names or "a matrix product", f"which is marked {source.name.decision}"
    elif source.where == GIVEN:  # a weight may have the shape of a moment that lives there
        yield what, f"which is named {crossing.name!r} and stays with the caller" if crossing.name else _UNNAMED
    elif _lives_there(crossing, subject):
        pass
    elif crossing.name is None:
        if subject.plans.plans or source.where in INPUTS:
            yield what, _UNNAMED
    elif subject.policies and all(isinstance(policy, Policy) for policy in subject.policies):
        name = read_names(crossing.name)[0]
        decided = {"save" if name.keep else policy.decision(name.text) for policy in subject.policies}
        if "offload" not in decided:
            yield name.text, f"which is marked {' or '.join(sorted(decided))}"


_UNNAMED = "which nobody named"


def _lives_there(crossing: Crossing, subject: Subject) -> bool:
    """Whether it may be the new value of an argument on the host, as an optimizer's state may be."""
    like = lambda aval: (aval.shape, aval.dtype)
    return like(crossing.aval) in {like(v.aval) for v in subject.jaxpr.invars if on_host(v.aval)}


# --- producers


def producers(subject: Subject) -> Found:
    if not subject.plans.plans:
        return NOT_CHECKED, "nothing in the function is jaxoffload's: what it means to keep is not known"
    rows, recomputed = subject.plans.rows, subject.plans.recomputed
    what = lambda row: f"{', '.join(row.names) or 'a matrix product'} ({row.decision})"
    again = [
        f"{what(row)} in {recomputed[name][0]} layer(s)"
        for name, row in rows.items()
        if recomputed[name][0] and (row.decision != "recompute" or _is_routing(row))
    ]
    for results in (results for plan in subject.plans.plans for results in plan.together):
        kept = [what(rows[name]) for name in results if rows[name].decision != "recompute"]
        again += [
            f"{', '.join(kept)} with {what(rows[name])}, of one kernel"
            for name in results
            if recomputed[name][0] and kept
        ]
    computed_again = f"computed again: {'; '.join(dict.fromkeys(again))}"
    said = "by the jaxpr none is computed again"
    if again and not subject.plans.rerun:  # else JAX says of some first runs, too, that they are differentiated
        return FAILS, computed_again
    if subject.plans.others or subject.plans.overlap:
        seen = computed_again if again else f"{said} for jaxoffload"
        return NOT_CHECKED, f"{seen}; but what other checkpoints keep, or run again, is not known"
    if jax.default_backend() != "gpu":
        return HOLDS, f"{said}; not by the compiled program, which is a GPU's"
    expected = _kernels.traced(subject.jaxpr)
    if expected is None:
        return HOLDS, f"{said}; not by the compiled program, for a loop's turns are not known"
    if len(subject.devices) > 1:  # what is not divided each of them does
        expected = expected._replace(flops=None)
    ran = _kernels.ran(list(instructions(subject.fast_program.as_text())))
    if more := ran.more_than(expected):
        return FAILS, f"{said}, but by the compiled program {'; '.join(more)}"
    counts = ", ".join(f"{ran.counts[kind]} {kind}" for kind in expected.counts)
    return HOLDS, f"{said}; by the compiled program {counts or 'none'}, no more than were traced"


def _is_routing(row: Row) -> bool:
    return bool(row.names) and (row.dtype.startswith("key<") or not jnp.issubdtype(row.dtype, jnp.inexact))


# --- copies, placement


def copies(subject: Subject) -> Found:
    if jax.default_backend() != "gpu":
        return NOT_CHECKED, "needs an NVIDIA GPU: it is what XLA compiles for one"
    program = subject.fast_program
    lines = list(instructions(program.as_text()))
    wrong = [f"{line.opcode} {line.name} touches host memory" for line in kernels_on_host_memory(lines)]
    wrong += [f"{line.name} copies out of range" for line in out_of_range(lines)]
    count = sum(line.opcode.endswith("-start") and line.on_host for line in lines)
    unseen = None
    if loops := of_unknown_turns(lines):
        unseen = f"but how often {_first([loop.name for loop in loops])} turns is not known"
    elif count and has_room_for(program):
        jax.block_until_ready(program(*subject.arrays))
        events = next(iter(traced(lambda: jax.block_until_ready(program(*subject.arrays))).values()), [])
        unseen = None if events else "not known on which streams: the profiler saw nothing of the GPU"
        wrong += _as_it_ran(events, lines, program.runtime_executable().hlo_modules()) if events else []
    elif count:
        unseen = f"not known on which streams: it did not run: {need(program, 'it')}"
    known = []
    if count and (waits := sorted(with_sizes_on_the_host(lines))):
        known = [f"TransformerEngine has the host read group sizes, and wait for the copies, in {_first(waits)}"]
        wrong += known if subject.strict else []
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


def placement(subject: Subject) -> Found:
    if len(subject.devices) < 2:
        return NOT_CHECKED, "all arguments are on one device"
    if not subject.has_twin:
        return NOT_CHECKED, _no_twin(subject)
    mine, others = _collectives(subject)
    more, further, wrong = mine - others, rows_read_beyond(subject.jaxpr), []
    held = f"arrays are in {mine.total()} collectives, the twin's in {others.total()}"
    if more.total() > further or more.keys() - others.keys():
        said = ", ".join(f"{count} {kind} of {shape}" for (kind, shape), count in more.items())
        wrong.append(f"more collectives than the twin has: {said}")
    elif more:
        held += f", where {further} rows of the stacks on the host are read beyond the twin's"
    if subject.loss is not None:
        here, there = (_of_each_device(loss, subject.args) for loss in (subject.loss, twin(subject.loss)))
        larger = sorted(name for name in here if here[name] > there.get(name, 0))
        wrong += [
            f"of a layer's {name} each device keeps {readable(here[name])}, the twin's {readable(there.get(name, 0))}"
            for name in larger
        ]
        held += f"; of {len(here)} residuals no device keeps a greater part"
    return (FAILS, _first(wrong, "; ")) if wrong else (HOLDS, held)


def _collectives(subject: Subject) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Those of the program and of its twin's."""
    mine, others = (
        collectives(list(instructions(program.as_text()))) for program in (subject.program, subject.twins_program)
    )
    return mine, others


def _of_each_device(loss: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, int]:
    """Of each named residual, the bytes of a layer that a device keeps, where XLA divides it."""
    leaves = lambda *args: jax.tree.leaves(jax.vjp(loss, *args)[1])
    jaxpr = jax.make_jaxpr(leaves)(*args)
    sources = {i: origin(jaxpr, var) for i, var in enumerate(jaxpr.outvars) if isinstance(var, Var)}
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


def repeats(subject: Subject) -> Found:
    if not has_room_for(subject.program):
        return NOT_CHECKED, f"arguments are not given away here, and so {need(subject.program, 'it')}"
    first: Any = None
    wrong: list[str] = []
    held: list[int] = []
    resident: list[int] = []

    def run(times: int) -> None:
        nonlocal first
        for _ in range(times):
            again = numbers(subject.program(*subject.arrays))
            first = again if first is None else first
            number = len(held) + 1
            wrong.extend(f"run {number} differs from the first: {differ}" for differ in differences(again, first))
            del again
            held.append(_bytes_in_use())
            resident.append(_bytes_of_the_process())

    run(subject.repeats)
    more = resident[-1] - resident[1]  # the first may still allocate
    if _in_any_process(more > _VISIBLE):  # a pool grows now and then, what nobody frees each time
        run(subject.repeats - 2)
        more = min(more, resident[-1] - resident[subject.repeats - 1])
    if wrong:
        return FAILS, "; ".join(wrong[:3])
    later = f"after {subject.repeats - 2} more run(s)"
    if held[-1] > held[1]:
        return FAILS, f"{readable(held[-1] - held[1])} more are in use {later}"
    if more > _VISIBLE:
        return FAILS, f"the process takes {readable(more)} more of the host's memory {later}"
    but = f"; the process takes no more, but for {readable(_VISIBLE)}"
    return HOLDS, f"{subject.repeats} runs are equal, and {readable(held[-1])} are in use after each{but}"


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
