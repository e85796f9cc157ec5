"""Each benchmark at a tiny shape on the CPU, and what is computed from measurements, by hand."""

import argparse
import gzip
import importlib
import itertools
import json
import runpy
import shlex
import sys
from subprocess import PIPE

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import PATIENCE, ROOT

from benchmarks import bench, dense, losses, plans, pytorch, stages, timeline, trainers
from benchmarks.cases import SIZES, layer_of, start
from benchmarks.moe import CASES
from benchmarks.stand_ins import StandIns
from jaxoffload import Policy
from jaxoffload.proof._program import hlo
from jaxoffload.proof._program.trace import Event

pytestmark = pytest.mark.usefixtures("compiled_fast")
GATE, ALL = "gate moved, the rest saved", "all moved"
LAYERS = "--layers 2 --seq 512 --d_model 64 --kv_heads 1 --head_dim 32 --attention xla --steps 1 --rounds 1 "
EXPERTS = "--experts 4 --d_expert 16 --grouped ragged "
RUNS = {
    "dense": f"--modes remat ours --variants overlap {LAYERS}",
    "moe": f"--modes ours --best overlap --fresh ours --expert 2 {EXPERTS} {LAYERS}",
    "accumulate": f"--microbatches 2 --modes remat interleaved --variants defaults '{GATE}' --fsdp 2 {LAYERS}",
    "stages": f"--microbatches 2 --virtual_stages 1 --modes offload --variants '{ALL}' overlap {LAYERS}",
    "frameworks": f"--modes scan {LAYERS}",
    "optimizer": f"--microbatches 2 --modes host {LAYERS}",
    "training": "--config configs/tiny.yaml --variants train.batch_size=8 --steps 1",
    "grouped": "--rows 64 --d_in 16 --d_out 32 --groups 4 --steps 1 --rounds 1",
}


RARE = "moe", "accumulate", "frameworks", "optimizer", "training"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a benchmark as a program with these arguments, and return what it wrote."""

    def run(name, arguments):
        path = tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", [name, *shlex.split(arguments), "--out", str(path)])
        # runpy warns of a module that was imported
        monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
        for variable in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
            monkeypatch.setenv(variable, "1")  # and what the benchmark sets is undone
        with jax.numpy_rank_promotion("allow"):
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        return json.loads(path.read_text())

    return run


def groups_in(result):
    """Yield the path and the modes of each group in a result."""
    if "modes" in result:
        yield (), result["modes"]
    for key, of in result.items():
        if isinstance(of, dict) and key != "modes":
            yield from (((key, *path), modes) for path, modes in groups_in(of))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in RARE)) for n in RUNS])
def test_a_benchmark_runs_and_writes_one_format(name, run, capsys):
    result = run(name, RUNS[name])
    assert list(result)[:5] == ["device", "versions", "command", "commit", "shape"]
    assert result["device"].startswith("2 " if name in ("moe", "accumulate", "stages") else "1 ")
    found = dict(groups_in(result))
    assert list(found) == PATHS[name]
    for modes in found.values():
        ran = {mode: of for mode, of in modes.items() if "step_ms" in of}
        assert ran if name == "grouped" else ran.keys() == modes.keys()
        for of in ran.values():
            assert of["ms"] > 0 and of["spread_ms"][0] <= of["step_ms"] <= of["spread_ms"][1]
            assert of.keys() >= {"options", "compile_s", "temp_gib", "all_gib", "host_temp_gib", "other_options"}
            assert of.get("mfu", None) is None  # no peak of a CPU is known
    rows = [line for line in capsys.readouterr().out.splitlines() if " ms" in line and line.startswith("| ")]
    assert len(rows) == ROWS[name]


# Of the printed table.
ROWS = dict.fromkeys(RUNS, 1) | {"dense": 2, "accumulate": 2, "frameworks": 2, "grouped": 0}
PATHS = {name: [()] for name in RUNS} | {
    "accumulate": [("microbatches", "2")],
    "stages": [("virtual_stages", "1", "microbatches", "2")],
    "frameworks": [("frameworks", "linen"), ("frameworks", "nnx")],
    "grouped": [("groups", division) for division in ("even", "falling", "skewed")],
}


@pytest.mark.long
def test_plans_run_beside_other_policies(run, tmp_path, monkeypatch):
    """And what was predicted before is written beside what was measured."""
    sizes = {"layers": 2, "seq": 512, "d_model": 64, "kv_heads": 1, "head_dim": 32, "attention": "xla"}
    monkeypatch.setattr(plans, "SHAPES", {"tiny": plans.Shape(dense.CASE, sizes, 2)})
    some = {name: plans.policies_of(dense.CASE)[name] for name in ("recompute", "drawn 0")}
    monkeypatch.setattr(plans, "policies_of", lambda case: some)
    budgets = plans.budgets_of
    monkeypatch.setattr(plans, "budgets_of", lambda *of: {"middle": budgets(*of)["middle"]})
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1")
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    how = ["--shapes", "tiny", "--predicted", str(before), "--rounds", "1"]
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # the number of CPU devices, which are in use
    with jax.numpy_rank_promotion("allow"):
        for what, path in (("predict", before), ("measure", after)):
            monkeypatch.setattr(sys, "argv", ["plans", what, *how, "--out", str(path)])
            plans.main()
    found = json.loads(after.read_text())["shapes"]["tiny"]
    lines, predicted = found["policies"], json.loads(before.read_text())["shapes"]["tiny"]["policies"]
    assert predicted.keys() == some.keys()
    assert all(lines[name].items() >= of.items() and of["predicted_ms"] > 0 for name, of in predicted.items())
    plan = lines.get("plan middle", {})
    assert found["budgets"]["middle"]["runs"] == ("step_ms" in plan)
    assert not plan or (plan["seconds"] > 0 and Policy(**plan["policy"]))


@pytest.mark.long
def test_ours_and_pytorch_are_put_together(monkeypatch, tmp_path, capsys):
    """PyTorch's process is a stand-in that prints what `benchmarks.torch_layers` prints."""
    facts = {
        "step_ms": 50.0,
        "spread_ms": [40.0, 60.0],
        "weight_bytes": 2**30,
        "peak_bytes": 5 * 2**30,
        "kernels_ms": {"matmuls": 8.0},
    }
    said = {"device": "cpu", "versions": {"torch": "2.11"}, "modes": {"no checkpoint": facts}}
    ours = [mode for mode in pytorch.OURS if mode != "everything saved"]
    arguments = [*shlex.split(LAYERS), "--microbatches", "2", "--modes", *ours, "no checkpoint", "--out"]
    options = lambda path: monkeypatch.setattr(sys, "argv", ["pytorch", *arguments, str(path)]) or pytorch.parse()

    def child(peer, options, is_last):
        assert is_last  # of one round
        with jax.numpy_rank_promotion("allow"):
            return said if peer == "torch" else pytorch.run_ours(options)

    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1")
    monkeypatch.setattr(pytorch, "run_child", child)
    pytorch.main(options(tmp_path / "both.json"))
    result = json.loads((tmp_path / "both.json").read_text())
    assert result["peers"]["ours"].keys() == set(ours) and result["shape"]["dtype"] == "bfloat16 on bfloat16"
    of = result["peers"]["torch"]["no checkpoint"]
    assert (of["ms"], of["step_ms"], of["beyond_gib"]) == (25.0, 50.0, 3.0)
    ms = result["peers"]["ours"]["interleaved, all moved"]["ms"]
    assert result["ratios"] == {"interleaved, all moved / no checkpoint by ms": pytest.approx(ms / 25.0, abs=1e-3)}
    printed = capsys.readouterr().out
    assert "| PyTorch, no checkpoint | 25 ms | 5.0 GiB | 3.0 GiB | not known |" in printed
    assert "| PyTorch, no checkpoint | 4.0 |" in printed  # a microbatch


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_a_layer_in_pytorch_computes_what_ours_does(name):
    torch, case = pytest.importorskip("torch"), CASES[name]
    torch_layers = importlib.import_module("benchmarks.torch_layers")
    sizes = SIZES | {"layers": 1, "seq": 64, "d_model": 64, "kv_heads": 1, "head_dim": 32, "attention": "xla"}
    sizes |= {"experts": 4, "d_expert": 96, "grouped": "ragged"} | case.fields
    options = argparse.Namespace(**sizes)
    weights, x = jax.tree.map(lambda of: of.astype(jnp.float32), start(case, options)())
    apply = lambda x, weights: layer_of(case, options)(x, jax.tree.map(lambda of: of[0], weights))[0]
    with jax.numpy_rank_promotion("allow"):
        y, (dx, gradients) = apply(x, weights), jax.grad(lambda *of: jnp.sum(jnp.sin(apply(*of))), (0, 1))(x, weights)

    block = torch_layers.Block(sizes)
    theirs = {of.removesuffix(".weight").removeprefix("mlp."): each for of, each in block.named_parameters()}

    def in_torch(tree):
        """Return PyTorch's names and layout: (out, in)."""
        found = {}
        for path, of in jax.tree_util.tree_leaves_with_path(tree):
            part, *_, last = (each.key for each in path if hasattr(each, "key"))
            norm = "attention_norm" if part == "attention" else "mlp_norm"
            like = theirs[key := norm if last == "scale_D" else last.partition("_")[0]]
            found[key] = torch.tensor(np.asarray(of[0] if like.ndim == 1 else of.reshape(like.mT.shape).mT))
        return found

    with torch.no_grad():
        for of, value in in_torch(weights).items():
            theirs[of].copy_(value)
    given = torch.tensor(np.asarray(x), requires_grad=True)
    found = block(given, torch_layers.rotations(sizes["seq"], sizes["head_dim"], sizes["rope_theta"]))
    found.sin().sum().backward()
    expected = {"y": torch.tensor(np.asarray(y)), "x": torch.tensor(np.asarray(dx)), **in_torch(gradients)}
    computed = {"y": found.detach(), "x": given.grad, **{of: each.grad for of, each in theirs.items()}}
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_pytorch_runs_the_same_layers_in_each_mode(name):
    pytest.importorskip("torch")
    of = {"layers": 2, "d_model": 256, "head_dim": 64, "kv_heads": 2, "seq": 256, "microbatches": 2}
    of |= {"d_expert": 448, "param_dtype": "bfloat16"} | CASES[name].fields
    given = {"modes": pytorch.TORCH, "steps": 1, "sizes": SIZES | of}
    command = [sys.executable, "-m", "benchmarks.torch_layers", json.dumps(given)]
    out, err = common.start(command, stderr=PIPE, cwd=ROOT).communicate(timeout=PATIENCE)
    assert out, err
    modes = json.loads(out.splitlines()[-1])["modes"]
    assert modes.keys() == set(pytorch.TORCH)
    assert all(of["kernels_ms"].keys() >= {"matmuls", "attention", "norms", "idle"} for of in modes.values())
    peak = {mode: of["peak_bytes"] for mode, of in modes.items()}
    some, most = (peak[mode] - peak["everything recomputed"] for mode in ("selective checkpointing", "no checkpoint"))
    assert most > 0
    if name == "dense":  # of experts the temporary memory is larger
        assert 0.25 * most < some < most  # attention's results alone would be an eighth
    assert peak["moved by hooks"] < peak["no checkpoint"]


@pytest.mark.long
@pytest.mark.claim("in-their-trainers")
@pytest.mark.parametrize("name, modes", [("maxtext", 5), ("levanter", 4)])
def test_a_framework_trains_in_each_mode(name, modes, tmp_path):
    """Its own training step, and ours in it, with the bits of its own offload: in the environment of `make recipes`, or
    in this one."""
    own, path = ROOT / f".recipes/{name}/bin/python", tmp_path / "trainers.json"
    python = str(own) if own.exists() else sys.executable
    begin = lambda *arguments, **options: common.start([python, *arguments], cwd=ROOT, stderr=PIPE, **options)
    probe = begin("-c", f"import {name}, benchmarks.bench")
    if (said := probe.communicate(timeout=PATIENCE)[1]) and probe.returncode:
        pytest.skip(f"needs {name}: {said.splitlines()[-1]}")
    sizes = "--layers 2 --seq 256 --d_model 64 --heads 2 --kv_heads 1 --head_dim 32 --d_ff 128 --vocab 128 --steps 1"
    command = f"-m benchmarks.trainers --attention xla {sizes} --frameworks {name} --out {path}"
    printed, said = begin(*command.split()).communicate(timeout=PATIENCE)
    result = json.loads(path.read_text())
    assert list(result)[:5] == ["device", "versions", "command", "commit", "shape"]
    found = result["frameworks"][name]
    assert len(found["modes"]) == modes and all("step_ms" in of for of in found["modes"].values()), said
    assert set(found["stand_ins"]) <= set(trainers.ABSENT[name].split())
    losses = [of["losses"] for of in found["modes"].values()]
    for each in losses:
        assert each == sorted(each, reverse=True)  # the tokens are the same in each step
        assert each == pytest.approx(losses[0], rel=2**-8)  # bfloat16's rounding
    assert found["same_losses"] and len([line for line in printed.splitlines() if " ms" in line]) == modes


def test_an_absent_package_has_a_stand_in(monkeypatch):
    stand_ins = StandIns("absent", "email.absent", "argparse")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, stand_ins])
    try:
        from email.absent import Base

        import absent.part

        class Derived(Base, absent.part.Other): ...

        assert isinstance(Derived(1, two=2), absent.part.Other | None) and isinstance(Base.Inner, type)
        assert stand_ins.used == {"absent", "email.absent"}
        with pytest.raises(AttributeError):
            _ = absent.__version__
        with pytest.raises(ModuleNotFoundError):
            import absent_as_well  # noqa: F401
    finally:
        for name in ("absent", "absent.part", "email.absent"):
            sys.modules.pop(name, None)


# -------------------------------------------------------------------------------------------------- compiled and timed


def test_steps_are_timed_in_turn_and_a_failure_costs_no_other_step():
    ran = []

    def run(name):
        def step(x):
            ran.append((name, int(x)))
            if name == "fails":
                raise jax.errors.JaxRuntimeError("NCCL")
            return (x + 1,)

        return step

    steps = {(mode, ""): bench.Step(run(mode), {"temp_gib": 1.0, "all_gib": 1.0}) for mode in ("a", "fails", "b")}
    steps["c", ""] = bench.Step(None, {"cannot": "too large"})
    options, wrote = argparse.Namespace(steps=2, rounds=1, profile=["a"]), []
    bench.measure(bench.Group((), steps, lambda: (jnp.zeros(()),), microbatches=4), options, lambda: wrote.append(1))
    turn = lambda name, first: [(name, first), (name, first + 1), (name, first + 2)]
    # After the failure the state is made anew.
    assert ran == [*turn("a", 0), ("fails", 3), *turn("b", 0), *turn("a", 3), *turn("b", 6)] and len(wrote) == 4
    facts = steps["a", ""].facts
    assert facts["ms"] == pytest.approx(facts["step_ms"] / 4, abs=2e-3) and steps["fails", ""].facts["cannot"] == "NCCL"
    assert bench.by_mode(steps)["c"] == {"other_options": {"": {"cannot": "too large"}}}


# ------------------------------------------------------------------------------------------------------------- by hand


def steps_of(**modes):
    """Steps with these (name, milliseconds, GiB)."""
    facts = lambda ms, gib: {"step_ms": ms, "temp_gib": gib, "all_gib": gib}
    return {(mode, name): bench.Step(None, facts(*of)) for mode, each in modes.items() for name, *of in each}


def test_which_variant_counts_and_which_are_timed_again():
    """The fastest; of `ours_best` and `one_by_one`, of those that need no more memory than remat. Those are timed again
    that are nearly the fastest in their memory."""
    steps = steps_of(
        remat=[("slow", 130.0, 8.0), ("fast", 120.0, 9.0), ("near", 121.0, 9.0)],
        ours_best=[("large", 100.0, 8.5), ("small", 110.0, 8.0), ("smaller", 113.0, 7.0)],
    )
    found = bench.by_mode(steps)
    assert [of["options"] for of in found.values()] == ["fast", "small"]
    assert found["remat"]["other_options"].keys() == {"slow", "near"} and found["remat"]["step_ms"] == 120.0
    again = [("remat", "slow"), ("remat", "fast"), ("remat", "near"), ("ours_best", "small"), ("ours_best", "smaller")]
    assert bench.contenders(steps) == again
    steps["remat", "near"].facts["step_ms"] = 124.0
    assert ("remat", "near") not in bench.contenders(steps)


def test_ratios_by_hand():
    mode = lambda ms, gib, **more: {"step_ms": ms, "temp_gib": gib, **more}
    profile = {"profile": {"exposed_ms": 2.0, "step_ms": 100.0}}
    modes = {
        "remat": mode(120.0, 8.0),
        "saved": mode(100.0, 9.0),
        "more": mode(104.0, 0.0),
        "ours": mode(104.0, 6.0, **profile),
    }
    pairs = [("ours", "remat"), ("ours", "more"), ("ours", "missing")]
    found = bench.ratios(modes | {"missing": {}}, pairs, "ours", "remat", ("more", "saved", "missing"))
    assert found == {
        "ours/remat": 0.8667,
        "ours/remat by temp_gib": 0.75,
        "ours/more": 1.0,
        "won_back": 0.8,
        "exposed/step": 0.02,
    }
    assert "won_back" not in bench.ratios(modes, [], "ours", "missing", ["saved"])


def test_what_offload_frees_by_hand():
    mode = lambda temp, **more: {"step_ms": 1.0, "temp_gib": temp, **more}
    options = argparse.Namespace(layers=5)
    found = dense.ratios({"ours": mode(6.0, host_gib=5.0), "ours_saved": mode(9.0)}, options)
    assert found["freed/predicted by temp_gib"] == 1.0  # 3 GiB for 3 of 5 rows
    best = mode(5.0, options=ALL, freed_gib=4.0, **{"from": "all saved"})
    moved = best | {"other_options": {GATE: mode(7.0, freed_gib=2.0, **{"from": "missing"})}}
    found = stages.ratios({"offload": moved, "saved": mode(8.0, options="all saved", other_options={})}, None)
    assert found["freed/predicted, all moved"] == 0.75 and f"freed/predicted, {GATE}" not in found


def test_a_plan_is_judged_by_the_fastest_policy_that_fits():
    plan = {"device_gib": 9.0, "step_ms": 110.0}
    lines = {
        "plan least": plan,
        "hand-made": {"device_gib": 10.0, "step_ms": 100.0},
        "save": {"device_gib": 30.0, "step_ms": 80.0},
    }
    lines["too large"] = {"device_gib": 200.0}
    expected = {"budget_gib": 10.0, "best": "hand-made", "runs": True, "plan / best": 1.1}
    assert plans.judged(10.0, plan, lines) == expected
    assert plans.judged(30.0, {}, lines) == {"budget_gib": 30.0, "best": "save", "runs": False}
    assert plans.budgets_of(10.0, 20.0) == {"least": 10.2, "middle": 15.1, "all": 20.0}
    assert plans.budgets_of(10.0, 9.0) == dict.fromkeys(("least", "middle", "all"), 10.2)


def test_what_a_kernel_computes_is_read_from_its_fusion():
    bodies = {
        "norms": ["multiply", "reduce", "add"],
        "RoPE": ["multiply", "concatenate"],
        "activation": ["logistic", "multiply"],
        "routing": ["concatenate", "gather", "reduce"],
        "sums of gradients": ["dynamic-slice", "add", "dynamic-update-slice"],
        "copies into stacks": ["add", "dynamic-update-slice"],
        "casts": ["convert"],
        "copies": ["transpose"],
        "zeros": ["broadcast"],
        "other": ["add", "convert"],
    }
    text = "HloModule step, is_scheduled=true\n"
    for number, opcodes in enumerate(bodies.values()):
        ops = "".join(f"  %op.{i} = f32[4]{{0}} {opcode}(%p)\n" for i, opcode in enumerate(opcodes))
        text += f"\n%body.{number} (p: f32[4]) -> f32[4] {{\n  %p = f32[4]{{0}} parameter(0)\n{ops}}}\n"
    fusion = "  %fusion.{0} = f32[4]{{0}} fusion(%x), kind=kLoop, calls=%body.{0}\n"
    gemm = '  %gemm = f32[4]{0} custom-call(%x), custom_call_target="__cublas$lt$matmul"\n'
    fusions = "".join(fusion.format(i) for i in range(len(bodies)))
    text += f"\nENTRY %main (x: f32[4]) -> f32[4] {{\n  %x = f32[4]{{0}} parameter(0)\n{fusions}{gemm}}}\n"
    module = hlo.parse(text)
    kinds = lambda *names: pytorch.kinds_of([Event("", name, op, 0, 1) for name, op in names], module)
    fused = range(len(bodies))
    assert kinds(*(("a kernel", f"fusion.{i}") for i in fused)) == list(bodies)
    in_buffer = "command_buffer_7"
    assert kinds(*((f"fusion_{i}", in_buffer) for i in fused)) == list(bodies)
    assert kinds(("nvjet_tst_128x256", "gemm"), ("nvjet_tst_128x256", in_buffer)) == ["matmuls", "matmuls"]
    assert kinds(("cudnn_sdpa_fprop", in_buffer), ("Memset 0", "gemm")) == ["attention", "zeros"]
    assert kinds(("a kernel", "unknown"), ("body_mosaic_gpu_kernel", in_buffer)) == ["other", "grouped GEMMs"]


def test_every_offload_of_a_config_becomes_save():
    policy = Policy({"fc1": "offload", "act": "recompute", "attn/q": "offload"}, dots="offload")
    patterns = ["remat.residuals[fc1]=save", "remat.residuals[act]=recompute", "remat.residuals[attn/q]=save"]
    assert losses.overrides_to_save(policy) == ["remat.offload_modules=[]", *patterns, "remat.dots=save"]
    assert losses.overrides_to_save(Policy({"fc1": "save"})) == []
    # A later pattern that takes an offload back stays as it is.
    policy = Policy({"attn/*": "recompute"}, offload_modules=["core_attn"])
    assert losses.overrides_to_save(policy)[-1] == "remat.residuals[attn/*]=recompute"


def test_lanes_of_a_recorded_step():
    """Of two steps that offload. `benchmarks.timeline` itself needs a GPU."""
    with gzip.open(ROOT / "tests/data/dense.json.gz") as file:
        events = [Event(*event) for event in json.load(file)["events"]]
    lanes = timeline.lanes_of(events)
    assert min(start for spans in lanes.values() for start, _ in spans) == 0
    for name, spans in lanes.items():
        assert spans and all(start < end for start, end in spans), name
        assert all(b - a > 0.09 for (_, a), (b, _) in itertools.pairwise(spans)), name
    for lane, direction in (("to the host", "d2h"), ("back", "h2d")):
        copied = sum(e.end - e.start for e in events if e.direction == direction) / 1e6
        assert 0 < copied <= sum(end - start for start, end in lanes[lane]) + 0.2
