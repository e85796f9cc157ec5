"""Traces, and what profile() makes of them, against a trace made by hand."""

import contextlib
import dataclasses
import gzip
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest
from traces import D2D, D2H, H2D, KERNEL, PROGRAM, profile, profiled, steps_at, write_trace

import jaxoffload
from jaxoffload.proof import _profile, read_profile
from jaxoffload.proof._profile import _steps, profile_of
from jaxoffload.proof._program import hlo
from jaxoffload.proof._program import memory as _memory
from jaxoffload.proof._program.hlo import host_copies, parse
from jaxoffload.proof._program.trace import Event, events_of
from jaxoffload.proof._verify import copies as _copies
from jaxoffload.proof._verify import repeats as _repeats

# Stream -> (name, op, start, end) in ms.
STEP = {
    "Stream #14(Compute)": [
        (KERNEL, "layer.0", 0, 10),
        (KERNEL, "layer.1", 10, 20),
        (KERNEL, "layer.2", 26, 30),  # waited 6 ms for its weights
    ],
    "Stream #70(MemcpyD2H)": [(D2H, "put.0", 8, 16), (D2H, "put.1", 18, 25), (D2D, "take.2", 25, 26)],
    "Stream #71(MemcpyH2D)": [(H2D, "get.1", 28, 33)],
}


@pytest.mark.claim("profile")
def test_what_nothing_hides():
    events = events_of(profile(STEP))
    assert len(events) == 7
    found = profile_of(events, {}, 1, "a GPU")
    # put.1 from 20 to 25, get.1 from 30 on
    assert found.step_ms == 33 and [(m.ms, m.exposed_ms) for m in found.moves] == [(8, 0), (7, 5), (5, 3)]


def test_what_two_copies_share_is_exposed_once():
    streams = {
        "Stream #1(Compute)": [(KERNEL, "a", 0, 10)],
        "Stream #2(MemcpyD2H)": [(D2H, "one", 5, 20)],
        "Stream #3(MemcpyD2H)": [(D2H, "two", 8, 15), (D2H, "three", 18, 24)],
    }
    events = events_of(profile(streams))
    found = profile_of(events, {}, 1, "a GPU")
    assert [m.exposed_ms for m in found.moves] == [10, 0, 4] and found.exposed_ms == 14


def test_kernels_copies_and_computation_that_touch_the_host_are_found():
    text = """
%copying (p: f32[8,4], i: s32[]) -> f32[4] {
  %p = f32[8,4]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %row = f32[4]{0} dynamic-slice(%p, %i), backend_config={"dynamic_slice_config":{}}
}

ENTRY %main (x: f32[8,4], i: s32[]) -> f32[8,4] {
  %x = f32[8,4]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  %start = ((f32[8,4]{1,0:S(5)}, s32[]), f32[4]{0}) fusion-start(%x, %i), calls=%copying
  %done = f32[4]{0} fusion-done(%start)
  %room = f32[8,4]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %reads = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %copies = f32[8,4]{1,0} copy(%x)
  %computes = f32[8,4]{1,0:S(5)} add(%x, %x)
  %within = (f32[8,4]{1,0:S(5)}, f32[8,4]{1,0:S(5)}, u32[]) copy-start(%x)
  ROOT %away = f32[8,4]{1,0:S(5)} fusion(%reads), kind=kLoop, calls=%fused
}
"""
    found = hlo.kernels_on_host_memory(parse(text))
    assert [line.name for line in found] == ["reads", "copies", "computes", "within", "away"]


def test_collectives_are_counted_by_their_results_however_they_are_started():
    text = """
ENTRY %main (x: f32[4,8]) -> f32[8,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %plain = f32[8,8]{1,0} all-gather(%x)
  %gather = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%x)
  %both = ((f32[4,8]{1,0}, f32[2,8]{1,0}), (f32[8,8]{1,0}, f32[4,8]{1,0})) all-gather-start(%x, %y)
  %sum = f32[4,8]{1,0} all-reduce-start(%x)
  %sums = ((f32[4,8]{1,0}), f32[4,8]{1,0}) all-reduce-start(%x)
  %parts = (f32[1,8]{1,0}, f32[1,8]{1,0}) all-to-all(%a, %b)
}
"""
    assert hlo.collectives(parse(text)) == {
        ("all-gather", "f32[8,8]"): 3,
        ("all-gather", "f32[4,8]"): 1,
        ("all-reduce", "f32[4,8]"): 2,
        ("all-to-all", "f32[1,8]"): 1,
    }


NONE = '"loop_index":"0","byte_offset":"0","byte_stride":"0"'
OFFSETS = {
    "jaxlib 0.11": '{{"loop_index":"0","byte_offset":"{0}","byte_stride":"16"}}',
    "jaxlib 0.12": f'{{{{{NONE},"linear":{{{{"byte_offset":"{{0}}","byte_stride":"16"}}}}}}}}',
    "a table": f'{{{{{NONE},"table":{{{{"offsets":["{{0}}","{{1}}","{{2}}"]}}}}}}}}',
}


@pytest.mark.parametrize("row", ["f32[4]", "pred[16]", "f4e2m1fn[32]"])
@pytest.mark.parametrize("how", OFFSETS)
@pytest.mark.parametrize("first, right", [(0, True), (80, True), (-16, False), (96, False), (8, False), (None, False)])
def test_the_offset_of_each_iteration_is_read_however_xla_says_it(row, how, first, right):
    """Three iterations, each of which copies one of eight rows of 16 bytes."""
    said = "{}" if first is None else OFFSETS[how].format(first, first + 16, first + 32)
    stack = row.replace("[", "[8,")
    text = f"""
%copying (p: {stack}, i: s32[]) -> {row} {{
  %p = {stack}{{1,0:S(5)}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %row = {row}{{0}} dynamic-slice(%p, %i), backend_config={{"dynamic_slice_config":{said}}}
}}

%iteration (x: {stack}) -> {stack} {{
  %x = {stack}{{1,0:S(5)}} parameter(0)
  ROOT %start = (({stack}{{1,0:S(5)}}, s32[]), {row}{{0}}) fusion-start(%x, %i), calls=%copying
}}

ENTRY %main (x: {stack}) -> {stack} {{
  ROOT %loop = {stack} while(%x), body=%iteration, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""
    found = [line.name for line in hlo.out_of_range(parse(text))]
    assert found == ([] if right else ["row"])


def test_copies_in_a_loop_within_a_loop_run_as_often_as_both():
    text = """
%layers (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %away = (f32[4]{0:S(5)}, f32[4]{0}, u32[]) copy-start(%x)
}
%microbatches (x: f32[4]) -> f32[4] {
  %inner = f32[4] while(%x), body=%layers, backend_config={"known_trip_count":{"n":"2"}}
}
ENTRY %main (x: f32[4]) -> f32[4] {
  ROOT %outer = f32[4] while(%x), body=%microbatches, backend_config={"known_trip_count":{"n":"3"}}
}
"""
    ran = [Event("s", D2H, "away", i, i + 1) for i in range(6)]
    assert _copies.wrong_as_it_ran(ran, parse(text), ()) == []
    assert _copies.wrong_as_it_ran(ran[1:], parse(text), ()) == ["5 of 6 copies ran as copies"]


# --- profile(), of a trace and a program made by hand


@pytest.mark.claim("profile")
def test_each_copy_has_its_residual():
    found = profiled(0, 100)
    assert [(m.residual, m.direction, m.bytes, m.ms, m.exposed_ms) for m in found.moves] == [
        ("mlp/fc1", "d2h", 20, 5, 0),  # the padding row
        ("mlp/fc1", "d2h", 20, 5, 0),
        ("mlp/fc1", "d2h", 20, 14, 4),
        ("act", "d2h", 40, 2, 0),
        ("mlp/fc1", "h2d", 20, 5, 0),
        ("mlp/fc1", "h2d", 20, 5, 0),
        ("mlp/fc1", "h2d", 20, 5, 0),
        ("", "h2d", 40, 2, 1),
    ]
    assert (found.step_ms, found.spread_ms) == (71, (71, 71))
    assert (found.compute_ms, found.collective_ms) == (66, 6)
    assert found.exposed_ms == 5
    totals = {total[:2]: total[2:] for total in found.totals}
    assert totals["mlp/fc1", "d2h"] == (3, 60, 24, 4) and totals["all", "h2d"] == (4, 100, 17, 1)
    assert totals["(not attributed)", "h2d"] == (1, 40, 2, 1) and "(not attributed)" in str(found)


COMPILED = Mock(as_text=lambda: f"HloModule jit_step, is_scheduled=true\n{PROGRAM}")


def test_of_a_trace_that_holds_other_programs_the_profile_is_of_one(tmp_path):
    streams = steps_at(0, 100)
    streams["Stream #1(Compute)"] += [(KERNEL, "a", 75, 95, "jit_evaluate")]
    streams["Stream #3(MemcpyD2H)"] += [(D2H, "copy-start.2", 80, 90, "jit_evaluate")]
    streams["Stream #4(MemcpyH2D)"] += [(H2D, "", 96, 97, "")]  # the next batch, which no program transfers
    write_trace(tmp_path, streams, "jit_step")
    found = read_profile(tmp_path, COMPILED, steps=2)
    assert found == dataclasses.replace(profiled(0, 100), device="cpu")
    write_trace(tmp_path, streams, "jit_other_step")
    with pytest.raises(ValueError, match=f"in the trace in {tmp_path} jit_step did not run on a GPU"):
        read_profile(tmp_path, COMPILED, steps=2)
    with pytest.raises(ValueError, match=r"^read_profile: steps must be at least 1, got 0"):
        read_profile(tmp_path, COMPILED, steps=0)


@pytest.mark.claim("profile")
def test_a_profile_is_that_of_the_trace_of_its_steps(monkeypatch):
    """Here the trace is made by hand; the first run is not in it."""
    program = Mock(as_text=COMPILED.as_text)
    monkeypatch.setattr(_profile, "target_of", lambda f, args: SimpleNamespace(compiled=lambda _: program, arrays=args))
    trace = lambda folder: contextlib.nullcontext(write_trace(Path(folder), steps_at(0, 100), "jit_step"))
    monkeypatch.setattr(jax.profiler, "trace", trace)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = jaxoffload.profile(lambda x: x, 1.0, steps=2)
    assert found == dataclasses.replace(profiled(0, 100), device="cpu")
    assert program.call_count == 3 and program.call_args.args == (1.0,)


def test_a_profile_needs_a_gpu():
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU; JAX's default backend is cpu"):
        jaxoffload.profile(lambda x: x, 1.0)


# ---- real traces; record_traces.py made them


@pytest.fixture(scope="module", params=["dense", "moe"])
def recorded(request):
    with gzip.open(Path(__file__).parent / f"data/{request.param}.json.gz", "rt") as file:
        made = json.load(file)
    assert "H200" in made["device"] and made.keys() > {"versions", "command", "commit", "of"}
    module = parse(made["program"])
    made["events"] = [Event(*e) for e in made["events"]]
    return request.param, made, profile_of(made["events"], host_copies(module), made["steps"], "a GPU"), module


def first_step(made):
    return _steps(sorted(made["events"], key=lambda e: e.start), made["steps"])[0]


# Of the recorded configs, by hand: residual -> bytes per layer, in bfloat16 and float32.
TOKENS = 2 * 2048
MOVED = {
    "dense": dict.fromkeys(("layer_input", "mlp_input", "attn/context.0"), TOKENS * 2048 * 2)
    | {"attn/context.1": TOKENS * 32 * 4},  # softmax statistics of 32 heads
    "moe": {f"moe/fc1.{leaf}": 2 * TOKENS * 1024 * 2 for leaf in ("gate", "up")},
}
LAYERS = {"dense": 6, "moe": 4}  # in one loop, whose last layer is resident, and a padding row


def test_each_copy_of_a_real_step_has_its_residual(recorded):
    which, made, found, _ = recorded
    assert found.collective_ms == 0
    assert {m.residual: m.bytes for m in found.moves} == MOVED[which]
    rows = Counter((m.residual, m.direction) for m in found.moves)
    assert rows == {(residual, way): LAYERS[which] for residual in MOVED[which] for way in ("d2h", "h2d")}
    assert [total._asdict() for total in found.totals] == made["profile"]["totals"]


def test_copies_of_a_real_step_are_on_no_stream_that_computes(recorded):
    _, made, found, module = recorded
    assert {m.stream for m in found.moves} <= {e.stream for e in made["events"] if e.direction}
    assert not hlo.kernels_on_host_memory(module) and not list(hlo.out_of_range(module))
    step = first_step(made)
    wrong = lambda change: _copies.wrong_as_it_ran([e for event in step for e in change(event)], module, ())
    assert wrong(lambda e: [e]) == []
    copies = [e for e in step if e.direction]
    few = f"{len(copies) - 1} of {len(copies)} copies ran as copies"
    assert wrong(lambda e: [] if e is copies[0] else [e]) == [few]
    by_kernel = wrong(lambda e: [e._replace(name="slice") if e is copies[0] else e])
    beside = f"copies run on a stream that computes, {copies[0].stream}: "
    assert by_kernel[0].startswith(beside) and " copies by wrapped_dynamic-" in by_kernel[0]
    assert by_kernel[0].endswith(" beside slice") and by_kernel[1:] == [few]
    compute = next(e for e in step if not e.name.startswith("Mem"))
    (between,) = wrong(lambda e: [e._replace(stream=compute.stream) if e is copies[0] else e])
    assert between.startswith(
        f"copies run on a stream that computes, {compute.stream}: 1 copies by {copies[0].op} beside "
    )
    # A loop whose condition the host reads.
    (loop, *_) = (line.name for line in module if line.opcode == "while")
    assert wrong(lambda e: [e, e._replace(name="MemcpyD2H", op=loop)] if e is compute else [e]) == []
    assert all(20 < m.bytes / m.ms / 1e6 < 64 for m in found.moves if m.bytes > 2**20)  # the range of a PCIe 5 x16 bus


@pytest.mark.parametrize(
    "target, verdict",
    [
        ("te_grouped_quantize_ffi", "holds"),
        ("te_grouped_gemm_ffi", "holds"),
        ("te_grouped_gemm_v2_ffi", "fails"),  # which has no reason to copy
    ],
)
def test_grouped_gemms_with_group_sizes_on_the_host_are_listed(recorded, monkeypatch, target, verdict):
    _, made, _, module = recorded
    step = first_step(made)
    compute = next(e for e in step if not e.name.startswith("Mem"))
    called = f'%also () -> f32[] {{\n  ROOT %it.1 = f32[] custom-call(), custom_call_target="{target}"\n}}\n'
    program = Mock(as_text=lambda: called + made["program"])
    program.runtime_executable.return_value.hlo_modules.return_value = ()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_copies, "too_large", lambda program: "")
    monkeypatch.setattr(_copies, "traced", lambda run: [*step, compute._replace(name="MemcpyD2H", op="it.1")])
    checked = SimpleNamespace(compiled=lambda _: program, module=parse(program.as_text()), arrays=())
    found, said = _copies.copies(checked)
    listed = "TransformerEngine has the host read group sizes, and wait for the copies, in it.1"
    count = len(host_copies(module))
    right = f"{count} asynchronous copies, all in range and on no stream that computes, and nothing else "
    assert found == verdict
    if "v2" in target:
        assert ": 1 copies by it.1 beside " in said
    else:
        assert said == f"{right}touches host memory; {listed}"
    # Its kernels count as computation, like all others.
    behind = [e._replace(stream=compute.stream) if e.direction else e for e in [compute._replace(op="it.1"), *step]]
    only = [e for e in behind if e.direction or e.op == "it.1"]
    monkeypatch.setattr(_copies, "traced", lambda run: only)
    found, said = _copies.copies(checked)
    assert found == "fails" and f"beside {compute.name}" in said
    monkeypatch.setattr(_copies, "traced", lambda run: [])
    found, said = _copies.copies(checked)
    assert found == "not checked" and (listed in said) == ("v2" not in target)


def test_copies_in_a_loop_whose_iterations_xla_does_not_know_are_not_checked(recorded, monkeypatch):
    _, made, _, module = recorded
    unknown = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", made["program"])
    assert hlo.of_unknown_length(module) == [] and unknown != made["program"]
    program = Mock(as_text=lambda: unknown)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    verdict, said = _copies.copies(SimpleNamespace(compiled=lambda _: program, module=parse(unknown)))
    assert verdict == "not checked" and re.search(r"the trip count of while[\w.]*(, while[\w.]*)* is unknown$", said)


def test_copies_that_the_profiler_missed_are_not_checked(recorded, monkeypatch):
    _, made, _, module = recorded
    many = 2**30
    plan = SimpleNamespace(argument_size_in_bytes=many, output_size_in_bytes=many, temp_size_in_bytes=many)
    program = Mock(as_text=lambda: made["program"], memory_analysis=lambda: plan)
    checked = SimpleNamespace(compiled=lambda _: program, module=module, arrays=())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_copies, "traced", lambda run: run() and [])
    count = len(host_copies(module))
    said = f"{count} asynchronous copies, all in range; streams unknown, because "
    assert _copies.copies(checked) == ("not checked", f"{said}the profiler saw nothing of the GPU")
    assert program.call_count == 2
    monkeypatch.setattr(_memory, "device_bytes", lambda: many)
    needed = "it needs 3.00 GiB of a device's 1.00 GiB"
    assert _copies.copies(checked) == ("not checked", f"{said}the program was not run: {needed}")
    assert _repeats.repeats(checked) == ("not checked", f"arguments are not given away here, and so {needed}")
    assert program.call_count == 2
