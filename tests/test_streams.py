"""benchmarks.streams against a trace made by hand."""

import jax
import pytest

from benchmarks.streams import events_of, merged, overlap, read, summary

KERNEL, D2H, H2D, D2D = "gemm", "MemcpyD2H", "MemcpyH2D", "MemcpyD2D"

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


def profile(streams):
    names = sorted({name for events in streams.values() for name, *_ in events})
    lines = []
    for stream, events in streams.items():
        each = "".join(
            f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {start * 10**9} "
            f'duration_ps: {(end - start) * 10**9} stats {{ metadata_id: 1 str_value: "{op}" }} }} '
            for name, op, start, end in events
        )
        lines.append(f'lines {{ name: "{stream}" timestamp_ns: 5000 {each} }}')
    metadata = "".join(
        f'event_metadata {{ key: {k} value {{ id: {k} name: "{name}" }} }} ' for k, name in enumerate(names, 1)
    )
    stat = 'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }'
    host = 'planes { name: "/host:CPU" lines { name: "python" } }'
    text = f'planes {{ name: "/device:GPU:0" {" ".join(lines)} {metadata} {stat} }} {host}'
    return jax.profiler.ProfileData.from_text_proto(text)


def test_what_nothing_hides():
    ((gpu, events),) = events_of(profile(STEP)).items()
    assert gpu == "/device:GPU:0" and len(events) == 7
    found = summary(events)
    assert found["step_ms"] == 33
    assert (found["d2h_ms"], found["d2h_exposed_ms"]) == (15, 5)  # put.1 from 20 to 25
    assert (found["h2d_ms"], found["h2d_exposed_ms"]) == (5, 3)  # get.1 from 30 on
    assert found["waits"][0] == {"ms": 6, "before": "layer.2", "copy": "MemcpyD2D take.2"}


def test_unions_and_overlaps():
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert overlap([(0, 4), (5, 9)], [(1, 2), (3, 6), (8, 20)]) == 1 + 1 + 1 + 1
    assert overlap([], [(0, 1)]) == overlap([(0, 1)], []) == 0


def test_a_folder_without_a_trace_is_named(tmp_path):
    with pytest.raises(SystemExit, match=f"no .*xplane.pb in {tmp_path}"):
        read(tmp_path)
