"""What `--report` prints: bytes by hand, on any machine, and what does not fit in the pinned host pool."""

import dataclasses
import json

import jax
import pytest
from common import ROOT
from models.needs import fit_to_host_pool, residuals_at_once
from models.report import backend_lines, report, summary
from models.text import readable

import jaxoffload
from jaxoffload import proof
from jaxoffload.grouped import _backend, te
from jaxoffload.proof import Bus, Machine
from models.config import ConfigError, load
from models.sharding import abstract_mesh
from models.step import program, traceable
from models.train import main

CONFIGS = ROOT / "configs"


@pytest.mark.claim("report-at-full-size")
def test_the_report_needs_no_gpu_for_kernels_of_gpus():
    assert "moe/fc1.gate" in report(load(CONFIGS / "qwen3-30b-a3b.yaml", ["model.grouped=mosaic"]))


def test_a_backend_that_cannot_run_here_is_a_line_about_the_config():
    config = load(CONFIGS / "tiny-moe.yaml", ["model.grouped=te"])
    with pytest.raises(ConfigError, match=r"model\.grouped: grouped_matmul: backend 'te' needs TransformerEngine"):
        summary(config, program(config, abstract_mesh(config.mesh)))


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["model.grouped=auto"], "grouped GEMMs: ragged (auto)"),
        (["model.grouped=auto", "model.quantize=fp8"], "grouped GEMMs: ragged (auto)"),
        ([], "grouped GEMMs: ragged"),
        (["model.grouped=te"], "(model.grouped = 'te' was traced as ragged: no CUDA here.)"),
    ],
)
def test_the_report_names_the_backend(overrides, line):
    assert line in report(load(CONFIGS / "tiny-moe.yaml", overrides)).splitlines()


def test_the_report_of_a_dense_model_has_no_grouped_gemms():
    assert "grouped" not in report(load(CONFIGS / "tiny.yaml"))


@pytest.mark.claim("one-gpu-of-a-process")
@pytest.mark.parametrize(
    "gpus_of_a_process, overrides, sizes_stay, line",
    [
        (8, [], False, "mosaic (auto)"),
        (8, [], True, "te (auto)"),  # of several devices too: a layer runs in shard_map
        (8, ["model.quantize=fp8"], True, "ragged (auto; te with a process for each GPU)"),
        (8, ["model.quantize=fp8", "mesh.fsdp=4"], True, "te (auto)"),  # a mesh of another machine
        (1, ["model.quantize=fp8"], False, "te (auto)"),
        (8, ["model.d_expert=80"], False, "ragged (auto; te with a process for each GPU)"),
        (1, ["model.d_expert=80"], False, "te (auto)"),
        (1, ["model.d_expert=72", "model.quantize=fp8"], False, "ragged (auto)"),
        (8, ["model.grouped=te"], False, "te"),
    ],
)
def test_the_backend_on_a_hopper_gpu(monkeypatch, gpus_of_a_process, overrides, sizes_stay, line):
    monkeypatch.setattr(jax, "local_device_count", lambda: gpus_of_a_process)
    monkeypatch.setattr(_backend, "_gpu_generation", lambda: 9)
    monkeypatch.setattr(te, "importable", lambda: True)
    monkeypatch.setattr(te, "sizes_stay", lambda dtype: sizes_stay)
    monkeypatch.setattr(te, "_cublas", lambda: te.V2_CUBLAS)
    config = load(CONFIGS / "mixtral-8x7b.yaml", ["mesh.fsdp=1", "mesh.expert=8", "mesh.tensor=1", *overrides])
    assert backend_lines(config) == [f"grouped GEMMs: {line}"]


@pytest.mark.claim("report-at-full-size")
def test_the_report_of_8b_tells_bytes_and_allocates_nothing():
    before = len(jax.live_arrays())
    text = report(load(CONFIGS / "llama3-8b.yaml"))
    assert len(jax.live_arrays()) == before
    assert "8,030,261,248 parameters" in text
    lines = {line[:24].strip(): line[24:].split() for line in text.splitlines()}
    # 8,030,261,248 parameters of 4 bytes; an eighth on each device, except the norms' 266,240, which are on each.
    assert lines["parameters"][:4] == ["29.92", "GiB", "3.74", "GiB"]
    assert lines["optimizer"][:4] == ["59.83", "GiB", "7.48", "GiB"]  # two moments
    # One sum, and a microbatch's gradients of the embedding and the unembedding: 2 * 128256 * 4096 * 4 bytes.
    assert lines["gradients"][:4] == ["33.83", "GiB", "4.23", "GiB"]
    # 32 * (5888 + 8) MiB, twice.
    assert lines["residuals on the host"][:4] == ["368.50", "GiB", "46.06", "GiB"]
    assert "8 microbatches interleaved; the table is of one" in text.splitlines()
    assert "the first forward pass runs alone: it copies at most 23.03 GiB per device to the host" in text.splitlines()
    assert "mlp/fc2" in text and "attn/context.1" in text and "was traced as" not in text


FOUR = ["train.grad_accumulation=4"]


@pytest.mark.parametrize(
    "overrides, way, gradients, stacks",
    [
        ([], None, 7.51, 1),  # MiB
        (FOUR, "interleaved", 7.51 + 1.5, 2),  # the sum, and a microbatch's of the embedding: 2048 * 192 * 4 bytes
        ([*FOUR, "train.interleave=false"], "one after another (train.interleave = False)", 2 * 7.51, 1),
        ([*FOUR, "remat.residuals[fc1]=save"], "one after another (nothing is offloaded)", 2 * 7.51, 1),
    ],
)
def test_the_report_says_how_microbatches_run_and_what_exists_at_once(overrides, way, gradients, stacks):
    lines = report(load(CONFIGS / "tiny.yaml", overrides)).splitlines()
    said = [line for line in lines if "microbatches" in line and "per device" not in line]
    assert said == ([f"4 microbatches {way}; the table is of one"] if way else [])
    (total,) = (line.split() for line in lines if line.startswith("device "))  # device A MiB (untagged B MiB) ...
    device, untagged, host = float(total[1]), float(total[4]), float(total[8])
    mib = {line[:24].strip(): float(line[24:].split()[0]) for line in lines if line.endswith(END[stacks])}
    assert mib["residuals on the host"] == stacks * host
    assert mib["residuals on the device"] == pytest.approx(untagged + stacks * (device - untagged), abs=0.02)
    (found,) = (float(line.split()[1]) for line in lines if line.startswith("gradients"))
    assert found == pytest.approx(gradients, abs=0.02)


END = {1: "per device", 2: "per device, of two microbatches"}


def test_interleave_true_where_nothing_moves_is_a_line_about_the_config(capsys):
    asked = [str(CONFIGS / "tiny.yaml"), *FOUR, "train.interleave=true"]
    assert main([*asked, "remat.residuals[fc1]=save", "--report"]) == 2
    _, line = capsys.readouterr().err.splitlines()
    assert line == "train.interleave = True: must be auto or false where remat offloads nothing"
    assert main([*asked, "--report"]) == 0


BUS = Bus(d2h=50.0, h2d=50.0, together=40.0)
H200 = Machine("H200", 1, "0.12", BUS, BUS, gemm_tflops=700.0, attention_tflops=(500.0, 400.0), hbm_gb_s=4000.0)


def test_the_report_says_whether_copies_fit_where_the_gpus_rates_are_known(monkeypatch):
    plain = load(CONFIGS / "llama3-8b.yaml", ["train.interleave=false"])
    assert "copies on" not in report(plain)
    monkeypatch.setattr(proof, "known_machine", lambda: H200)
    text = report(plain)
    assert "copies on 8 H200, predicted" in text and "does not fit" in text


@pytest.mark.claim("report-at-full-size")
def test_the_report_counts_what_a_layer_and_a_chunk_of_logits_need():
    """XLA plans 22.8 GiB for the step on an H200; only the compiler knows all of it."""
    text = report(load(CONFIGS / "llama-1b.yaml")).splitlines()
    lines = {line[:24].strip(": "): line[24:].split() for line in text}
    layer, logits = (float(lines[name][0]) for name in ("working set of a layer", "or of a chunk of logits"))
    # GiB: gate, up, the activation's cotangent and theirs; three residuals for this layer and the next. Never scores.
    assert 4 * 0.5 + 2 * 3 * 0.125 < layer < 5 * 0.5 + 2
    # Logits and their cotangent, bfloat16 and float32, of 4 x 1024 positions and 128256 words.
    assert 1 + 2 < logits < 1 + 2 + 1 + 2
    (said,) = (line for line in text if line.startswith("expected on"))
    assert abs(float(said.split()[4]) / 22.8 - 1) < 0.1


def test_a_kernels_results_are_divided_as_their_name_says():
    """Heads over `tensor`; the statistics, which have no constraint, like the batch."""
    config = traceable(load(CONFIGS / "llama3-8b.yaml", ["mesh.fsdp=4", "mesh.tensor=2"]))
    made = program(config, abstract_mesh(config.mesh))
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    parts = {row.names: row.bytes / row.bytes_per_device for row in table if row.state == "offloaded" and row.layers}
    assert parts["attn/context.0",] == parts["attn/q",] == 8 and parts["attn/context.1",] == 4


def test_a_tensor_axis_splits_heads_and_d_ff_but_not_the_residual_stream():
    lines = report(load(CONFIGS / "llama3-8b.yaml", ["mesh.fsdp=4", "mesh.tensor=2"])).splitlines()
    (host,) = (line for line in lines if line.startswith("residuals on the host"))
    # layer_input, mlp_input and the statistics of attention, which have no constraint, over fsdp; the others over both:
    # 32 * ((2 * 512 + 8) / 4 + 4864 / 8) MiB, twice.
    assert host.split()[6:8] == ["54.12", "GiB"]


POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
EVERYTHING = ["remat.default=offload", "remat.dots=offload", "remat.min_offload_bytes=0"]


@pytest.mark.claim("host-pool")
@pytest.mark.parametrize(
    "name, overrides",
    [
        # the stream is whole on both devices of the tensor axis
        pytest.param("llama3-8b", ["mesh.fsdp=4", "mesh.tensor=2"], marks=pytest.mark.slow),
        ("llama3-8b", ["train.interleave=false"]),
        pytest.param("llama3-8b", ["mesh.fsdp=2", "mesh.tensor=4", *EVERYTHING], marks=pytest.mark.slow),
        pytest.param(
            "tiny-moe", ["mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2", *EVERYTHING], marks=pytest.mark.slow
        ),
    ],
)
def test_the_host_pool_is_judged_by_the_bytes_that_the_report_gives_a_device(monkeypatch, name, overrides):
    config = traceable(load(CONFIGS / f"{name}.yaml", overrides))
    mesh = abstract_mesh(config.mesh)
    made = program(config, mesh)
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    rows = residuals_at_once(config, table)
    need = sum(row.bytes_per_device for row in rows if row.state == "offloaded")
    monkeypatch.setenv(POOL, str(need / 2**30))
    jaxoffload.check(made.step, made.state, made.tokens, policy=config.remat)
    summary(config, made)
    monkeypatch.setenv(POOL, str((need - 8) / 2**30))
    with pytest.raises(MemoryError, match=r"check: all together|accumulate: two microbatches"):
        jaxoffload.check(made.step, made.state, made.tokens, policy=config.remat)
    with pytest.raises(ConfigError, match=r"remat: residuals: all together .* \(offload_layers: "):
        summary(config, made)


# Two dense layers, then three with experts; gate and up of both are offloaded.
TWO_STACKS = ["model.layers=5", "model.dense_layers=2", "remat.residuals[fc1]=offload"]


@pytest.mark.claim("host-pool")
def test_two_stacks_that_fit_one_by_one_are_refused_before_anything_is_compiled(monkeypatch, capsys):
    config = load(CONFIGS / "tiny-moe.yaml", ["remat.resident_layers=0", *TWO_STACKS])
    made = program(config, abstract_mesh(config.mesh))
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    dense = sum(row.bytes for row in table if row.state == "offloaded" and row.names[0].startswith("mlp"))
    experts = table.host_bytes - dense
    monkeypatch.setenv(POOL, str((table.host_bytes - 8) / 2**30))
    assert max(dense, experts) < table.host_bytes - 8
    jax.make_jaxpr(jax.grad(made.loss))(made.state.params, made.microbatch)
    command = [str(CONFIGS / "tiny-moe.yaml"), "remat.resident_layers=0", *TWO_STACKS, "--report"]
    assert main(command) == 2
    _, problem = capsys.readouterr().err.splitlines()
    assert "all together would offload" in problem and "offload_layers: 2" in problem


def test_on_host_full_save_offloads_fewer_layers_of_each_stack(monkeypatch):
    overrides = ["remat.resident_layers=0", "remat.on_host_full=save", *TWO_STACKS]
    config = load(CONFIGS / "tiny-moe.yaml", overrides)
    mesh = abstract_mesh(config.mesh)
    assert fit_to_host_pool(config, mesh) == config
    made = program(config, mesh)
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    monkeypatch.setenv(POOL, str((table.host_bytes - 8) / 2**30))
    with pytest.warns(UserWarning, match="all together .* offload_layers = 2 instead of all") as seen:
        fewer = fit_to_host_pool(config, mesh)
    assert len(seen) == 1 and fewer.remat.offload_layers == 2
    made = program(fewer, mesh)
    rows = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    moved = {row.names[0].partition("/")[0]: row.layers for row in rows if row.state == "offloaded" and row.layers}
    assert moved == {"mlp": 2, "moe": 2, "shared": 2}


@pytest.mark.slow
@pytest.mark.claim("host-pool")
def test_the_stacks_of_two_microbatches_must_fit(monkeypatch):
    config = load(CONFIGS / "tiny.yaml", ["remat.resident_layers=0", "remat.on_host_full=save", *FOUR])
    mesh = abstract_mesh(config.mesh)
    made = program(config, mesh)
    stacks = 2 * jaxoffload.residuals(made.loss, made.state.params, made.microbatch).host_bytes
    monkeypatch.setenv(POOL, str(stacks / 2**30))
    assert fit_to_host_pool(config, mesh) == config
    monkeypatch.setenv(POOL, str((stacks - 8) / 2**30))
    with pytest.warns(UserWarning, match="two microbatches would offload .* offload_layers = 3 instead of all"):
        fewer = fit_to_host_pool(config, mesh)
    made = program(fewer, mesh)
    jax.eval_shape(made.step, made.state, made.tokens)  # accumulate itself admits them
    asked = [str(CONFIGS / "tiny.yaml"), "remat.resident_layers=0", *FOUR, "--report"]
    assert main([*asked, "train.interleave=false"]) == 0
    assert main(asked) == 2


def test_a_small_run_is_not_judged_by_the_batch_that_names_are_looked_up_with(monkeypatch):
    monkeypatch.setenv(POOL, str(4 * 4 * 32 * 2 * 512 / 2**30))  # 3 layers and a padding row of gate and up
    small = ["train.batch_size=1", "train.seq_len=32", "train.loss_chunk=32"]
    assert main([str(CONFIGS / "tiny.yaml"), *small, "--report"]) == 0
    assert main([str(CONFIGS / "tiny.yaml"), *small, "train.batch_size=2", "--report"]) == 2


@pytest.mark.claim("report-as-json")
@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.fsdp=4", "model.attention=te", "model.dtype=bfloat16"],
        pytest.param(FOUR, marks=pytest.mark.slow),
        [*FOUR, "mesh.stage=2"],
    ],
)
def test_the_report_as_json_has_the_numbers_of_the_text(overrides, capsys, monkeypatch):
    monkeypatch.setattr(proof, "known_machine", lambda: H200)
    asked = [str(CONFIGS / "tiny.yaml"), *overrides, "--report"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    found, config = json.loads(capsys.readouterr().out), load(CONFIGS / "tiny.yaml", overrides)
    lines = {line[:24].strip(": "): line[24:].split() for line in text.splitlines()}
    for kind, sizes in found["memory"].items():
        shown = " ".join(lines.get(kind.replace("_", " "), ()))
        shown = shown or " ".join(lines.get("or of a chunk of logits", ())) * ("logits" in kind)
        assert not shown or readable(sizes["per_device"]) in shown, kind
        assert "total" not in sizes or shown.startswith(readable(sizes["total"])), kind
    expected = found["memory"]["expected"]
    host = readable(expected["host_per_device"])
    assert f": {readable(expected['per_device'])}, and {host} of host memory" in text
    assert text.startswith(f"{found['parameters']:,} parameters")
    assert found["mesh"] == dataclasses.asdict(config.mesh)
    count = config.train.grad_accumulation
    assert found["microbatches"] == {"count": count, "interleaved": count > 1}
    assert found["traced_as"] == ({"model.attention": "cudnn"} if config.model.attention == "te" else {})
    table = found["residuals"]
    assert f"host {readable(table['host_bytes'])} · recomputed" in text
    one = [row["bytes_per_device"] for row in table["residuals"] if row["state"] == "offloaded"]
    if config.mesh.stage == 1:
        stacks = 2 if found["microbatches"]["interleaved"] else 1
        assert stacks * sum(one) == expected["host_per_device"]
        assert "pipeline" not in found
    else:
        assert [stage["layers"] for stage in found["pipeline"]["stages"]] == [["0-1"], ["2-3"]]
        assert f"{found['pipeline']['ticks']} ticks; each stage is idle for {found['pipeline']['bubble']:.1%}" in text
    assert found["fits"]["machine"]["device"] == "H200"


def test_json_is_a_form_of_the_report(capsys):
    with pytest.raises(SystemExit) as left:
        main([str(CONFIGS / "tiny.yaml"), "--json"])
    assert left.value.code == 2 and "--json is a form of --report; give both" in capsys.readouterr().err
    assert main([str(CONFIGS / "tiny.yaml"), "--report", "--json", "train.step=3"]) == 2
    said = capsys.readouterr()
    assert not said.out and "train.step = 3" in said.err
