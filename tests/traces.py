"""Traces and a program that are made by hand, and the profile of them."""

import jax

from jaxoffload.proof._profile import profile_of
from jaxoffload.proof._program.hlo import host_copies, parse
from jaxoffload.proof._program.trace import events_of

KERNEL, D2H, H2D, D2D = "gemm", "MemcpyD2H", "MemcpyH2D", "MemcpyD2D"


def text_of(streams, module="jit_f"):
    """Return a trace as text. An event belongs to `module`, unless it names its own."""
    names = sorted({name for events in streams.values() for name, *_ in events})
    stat = lambda number, value: f'stats {{ metadata_id: {number} str_value: "{value}" }}'
    lines = []
    for stream, events in streams.items():
        each = "".join(
            f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {start * 10**9} "
            f"duration_ps: {(end - start) * 10**9} {stat(1, op)} {stat(2, *own or [module])} }} "
            for name, op, start, end, *own in events
        )
        lines.append(f'lines {{ name: "{stream}" timestamp_ns: 5000 {each} }}')
    metadata = "".join(
        f'event_metadata {{ key: {k} value {{ id: {k} name: "{name}" }} }} ' for k, name in enumerate(names, 1)
    )
    for number, name in enumerate(("hlo_op", "hlo_module"), 1):
        metadata += f'stat_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }} '
    host = 'planes { name: "/host:CPU" lines { name: "python" } }'
    return f'planes {{ name: "/device:GPU:0" {" ".join(lines)} {metadata} }} {host}'


def profile(streams):
    return jax.profiler.ProfileData.from_text_proto(text_of(streams))


def write_trace(folder, streams, module):
    made = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text_of(streams, module))
    folder.mkdir(exist_ok=True)
    (folder / "host.xplane.pb").write_bytes(made)


AT = '{"dynamic_slice_config":{"linear":{"byte_offset":"%d","byte_stride":"%d"}}}'
PROGRAM = f"""
%wrapped_dynamic-update-slice_computation (s: bf16[3,10], x: bf16[1,10], i: s32[]) -> bf16[3,10] {{
  ROOT %put = bf16[3,10]{{1,0:S(5)}} dynamic-update-slice(%s, %x, %i), backend_config={AT % (0, 20)}
}}
%wrapped_dynamic-slice_computation.1 (s: bf16[3,10], i: s32[]) -> bf16[1,10] {{
  %s = bf16[3,10]{{1,0:S(5)}} parameter(0)
  ROOT %get = bf16[1,10]{{1,0}} dynamic-slice(%s, %i), backend_config={AT % (40, -20)}
}}
"""
PROGRAM += """
%forward (p: bf16[]) -> bf16[] {
  %dynamic-update-slice-start.1 = ((bf16[3,10]{1,0:S(5)}, bf16[1,10]{1,0}), bf16[3,10]{1,0:S(5)}, u32[]) \
fusion-start(%a), calls=%wrapped_dynamic-update-slice_computation, \
metadata={op_name="jit(f)/while/body/jaxoffload(mlp/fc1)/dynamic_update_slice"}
}
%backward (p: bf16[]) -> bf16[] {
  %dynamic-slice-start.1 = ((bf16[3,10]{1,0:S(5)}, s32[]), bf16[1,10]{1,0}, u32[]) \
fusion-start(%a), calls=%wrapped_dynamic-slice_computation.1, \
metadata={op_name="jit(f)/while/body/jaxoffload(mlp/fc1)/dynamic_slice"}
}
ENTRY %main (p: bf16[]) -> bf16[] {
  %barrier.1 = bf16[4,5]{1,0} get-tuple-element(%b), metadata={op_name="jit(f)/jaxoffload(act)/optimization_barrier"}
  %copy-start.2 = (bf16[4,5]{1,0:S(5)}, bf16[4,5]{1,0}, u32[]) copy-start(%barrier.1)
  %copy-start.4 = (f32[], f32[]{:S(5)}, u32[]) copy-start(%unknown)
  %copy-start.3 = (bf16[4,5]{1,0}, bf16[4,5]{1,0:S(5)}, u32[]) copy-start(%unknown)
  %while.1 = bf16[] while(%x), body=%forward, backend_config={"known_trip_count":{"n":"3"}}
  %while.2 = bf16[] while(%x), body=%backward, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def one_step(begin):
    """Three layers, forward and backward, of 10 ms each; beside each runs a copy of 5 ms, except one of 14."""
    there, back = "wrapped_dynamic-update-slice", "wrapped_dynamic-slice.1"
    at = lambda events: [(name, op, begin + start, begin + end) for name, op, start, end in events]
    return {
        "Stream #1(Compute)": at([(KERNEL, "a", 0, 30), ("ncclAllReduce", "b", 34, 40), (KERNEL, "c", 40, 70)]),
        "Stream #2(MemcpyD2H)": at([(D2H, there, 0, 5), (D2H, there, 10, 15), (D2H, there, 20, 34)]),
        "Stream #3(MemcpyD2H)": at([(D2H, "copy-start.2", 26, 28)]),
        "Stream #4(MemcpyH2D)": at(
            [(H2D, back, 40, 45), (H2D, back, 50, 55), (H2D, back, 60, 65), (H2D, "copy-start.3", 69, 71)]
        ),
    }


def steps_at(*begins):
    steps = list(map(one_step, begins))
    return {stream: [e for step in steps for e in step[stream]] for stream in steps[0]}


def profiled(*begins):
    events = events_of(profile(steps_at(*begins)))
    copies = host_copies(parse(PROGRAM))
    return profile_of(events, copies, len(begins), "a GPU")
