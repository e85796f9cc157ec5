"""What the benchmarks compute from measurements, by hand. The measurements themselves need a GPU."""

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close, count

from benchmarks import (
    accumulate,
    cases,
    choices,
    dense,
    frameworks,
    grouped,
    losses,
    moe,
    peers,
    plans,
    ratios,
    stages,
    steps,
    sweep,
)
from jaxoffload import Policy
from models.config import Model, load
from models.moe import _apply_experts

# 10 tokens. A residual has 20 bytes per column, and each takes 512 FLOPs per byte to recompute.
SHAPE = argparse.Namespace(layers=5, batch=2, seq=5, d_model=512, kv_heads=1, head_dim=128, fsdp=1, expert=1)
SHAPE.attention = "xla"
WIDE, STREAM, KV = 1792, 512, 128
WHOLE = 2 * WIDE + 2 * STREAM + 2 * KV


def timed(spare_gib=0.0, **ms):
    """Modes with these step times, where ours needs `spare_gib` less memory than remat."""
    modes = {mode: {"step_ms": value, "temp_gib": 1.0} for mode, value in ms.items()}
    return modes | {"remat": modes["remat"] | {"temp_gib": 1 + spare_gib}, "ours": {"step_ms": 0.0, "temp_gib": 1.0}}


@pytest.mark.parametrize(
    "rate, won",
    [
        (20 * STREAM, 0.0),  # only layer_input
        (20 * (STREAM + WIDE / 2), WIDE / 2),  # all take equally long per byte; half of the gate
        (20 * (STREAM + WIDE), WIDE),
        (20 * (STREAM + WHOLE), WHOLE),
        (1e9, WHOLE),
    ],
)
def test_the_limit_of_won_back(rate, won):
    """A layer's forward pass takes one of 15 milliseconds, in which `rate` bytes are copied."""
    ms = {"remat": 30.0, "saved": 20.0, "saved_all": 15.0, "ours_saved_all": 16.0}
    modes = timed(**ms, ours_saved=20.0, ours_saved_context=20.0)
    limit = lambda modes, rate: ratios.won_back_limit(dense.CASE, SHAPE, modes, rate)
    assert limit(modes, rate) == pytest.approx(won / WHOLE)
    # Half of it over the bus, and the other half stays on the device.
    modes = timed(**ms, ours_saved=20.0, ours_saved_context=20.0, spare_gib=5 * 20 * won / 2 / 2**30)
    assert limit(modes, 20 * (STREAM + won / 2)) == pytest.approx(won / WHOLE)


def test_the_limit_of_won_back_takes_attention_first_where_it_is_recomputed():
    ms = {"remat": 30.0, "saved": 25.0, "saved_all": 20.0, "ours_saved_all": 15.0}
    modes = timed(**ms, ours_saved=25.0, ours_saved_context=20.0)  # context takes one of 3 ms per layer
    limit = lambda rate: ratios.won_back_limit(dense.CASE, SHAPE, modes, rate)
    context = 10 * (2 * STREAM + 4 * 4)  # 4 heads
    assert limit(20 * STREAM + context) == pytest.approx(1 / 3)
    assert limit(20 * STREAM + context / 2) == pytest.approx(1 / 6)
    assert limit(1e9) == pytest.approx(1.0)
    # Two devices, each with half of the batch.
    two = argparse.Namespace(**vars(SHAPE) | {"fsdp": 2, "batch": 4})
    assert ratios.won_back_limit(dense.CASE, two, modes, 20 * STREAM + context) == pytest.approx(1 / 3)


def test_shares_by_hand():
    mode = lambda step, temp=0.0, **more: {
        "step_ms": step,
        "temp_gib": temp,
        "peak_gib": temp,
        "compile_s": 2.0,
        **more,
    }
    modes = {
        "remat": mode(120.0, 8.0),
        "saved": mode(110.0),
        "saved_all": mode(104.0),
        "ours_saved_all": mode(100.0),
        "ours": mode(105.0, 6.0, residuals_host_gib=5.0),
        "ours_saved": mode(105.0, 9.0),
        "ours_saved_context": mode(104.0, 9.5),
        "ours_best": mode(104.0, 7.0),
    }
    found = ratios.shares(dense.CASE, modes, SHAPE)
    assert found["won_back"] == 0.8 and found["won_back against JAX's saved_all"] == 1.0
    assert found["freed/predicted by temp_gib"] == 1.0  # 3 GiB for 3 of 5 rows
    assert found["freed/most by peak_gib"] == 0.75
    assert found["ours_best/remat by temp_gib"] == found["ours_best/remat by peak_gib"] == 0.875
    assert found["compile_ours/compile_scan"] == 1.0 and "exposed/step" not in found
    # 5 GiB each way at 2 GiB per 20 ms. A layer's forward pass, 20 / 3 ms, has room for nearly all.
    modes["ours"]["profile"] = {"exposed_ms": 2.0, "copies_ms": 40.0, "step_ms": 100.0}
    found = ratios.shares(dense.CASE, modes, SHAPE)
    assert (found["exposed/copies"], found["exposed/step"]) == (0.05, 0.02)
    assert found["won_back_limit"] == 1.0 and found["won_back/won_back_limit"] == 0.8
    modes["saved_all"] = mode(119.0)
    assert "won_back against JAX's saved_all" not in ratios.won_back(modes)


def device(monkeypatch, kind):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])


@pytest.mark.parametrize("kind, peak", {"NVIDIA H200": 989e12, "NVIDIA B200": 2250e12, "cpu": None}.items())
def test_utilisation_is_a_share_of_the_peak_of_the_gpu_that_ran(kind, peak, monkeypatch, capsys):
    """In each benchmark and its table; without a known peak there is none."""
    device(monkeypatch, kind)
    mfu = peak and round(1e15 / peak, 4)
    facts = {"temp_gib": 1.0, "all_gib": 1.0}
    steps = {("remat", ""): accumulate.Step(None, facts)}
    of_accumulate = accumulate.result_of(("remat", ""), {("remat", ""): [1000.0]}, steps, 1e15)
    of_peers = peers.fastest({("remat", ""): [1000.0]}, [("remat", "")], {("remat", ""): facts}, 1e15)["remat"]
    monkeypatch.setattr(stages, "model_flops", lambda *_: 2e15)
    monkeypatch.setattr(stages.statistics, "median", lambda _: 1000.0)
    step, options = stages.Step(lambda *_: (), lambda: (), facts), argparse.Namespace(steps=2, expert=1)
    of_stages = stages.timed(dense.CASE, options, step, stages.Schedule(2, 1, 2), False)
    assert [found["mfu"] for found in (of_accumulate, of_peers, of_stages)] == [mfu] * 3
    said = f"{100 * mfu:.1f} %" if mfu else "not known"
    assert said in dense.table({"modes": {"remat": of_peers}})
    assert said in accumulate.table({"microbatches": {"2": {"modes": {"remat": of_accumulate}}}})


def test_accumulation_by_hand(monkeypatch):
    """The fastest variant of each mode; without interleaving, of those that need no more memory than remat."""
    device(monkeypatch, "NVIDIA H200")
    step = lambda gib: accumulate.Step(None, {"temp_gib": gib, "compile_s": 1.0})
    steps = {
        ("remat", "slow"): step(8.0),
        ("remat", "fast"): step(9.0),
        ("saved_all", ""): step(30.0),
        ("one_by_one", "large"): step(8.5),
        ("one_by_one", "small"): step(8.0),
        ("interleaved", ""): step(6.0),
    }
    spent = dict(zip(steps, [[130.0], [120.0, 121.0, 119.0], [100.0], [105.0], [110.0], [98.0]], strict=True))
    near = accumulate.contenders(spent, steps)
    assert near == [("remat", "fast"), ("saved_all", ""), ("one_by_one", "small"), ("interleaved", "")]
    modes = {mode: accumulate.result_of((mode, name), spent, steps, 98.9e12) for mode, name in near}
    assert modes["remat"]["other_options"] == {"slow": {"ms": 130.0, "temp_gib": 8.0, "compile_s": 1.0}}
    assert modes["saved_all"]["mfu"] == 1.0 and modes["remat"]["spread_ms"] == [119.0, 121.0]
    modes["interleaved"]["profile"] = {"exposed_ms": 2.0, "step_ms": 400.0}
    found = accumulate.ratios(modes)
    assert found["won_back"] == 1.1 and found["interleaved/remat by temp_gib"] == 0.6667
    assert found["interleaved/saved_all"] == 0.98 and found["exposed/step"] == 0.005
    modes["interleaved"]["profile"]["collectives_exposed_ms"] = 3.0
    modes["one_by_one"]["profile"] = {"collectives_exposed_ms": 6.0}
    assert accumulate.ratios(modes)["interleaved/one_by_one by collectives_exposed_ms"] == 0.5
    compiled_in = lambda seconds: {"modes": {"interleaved": {"compile_s": seconds}}}
    assert accumulate.compile_ratio({"16": compiled_in(3.0), "2": compiled_in(2.0)}) == 1.5
    assert "won_back" not in accumulate.ratios({"remat": modes["remat"]})


def test_stages_by_hand():
    """20 ms for a microbatch, and 20 more for the tick in which the other stage idles."""
    plans = {"offload": 5.0, "saved": 8.0, "recomputed": 4.0, "all_forward": 10.0}
    ms = {"offload": 22.5, "saved": 22.0, "recomputed": 30.5, "all_forward": 45.0}
    modes = {mode: {"ms": ms[mode], "temp_gib": gib} for mode, gib in plans.items()} | {"fsdp": {}}
    modes["offload"] |= {"freed": {"all moved": {"freed/predicted": 0.75}}}
    found = stages.ratios(modes)
    assert found["offload/all_forward"] == found["offload/all_forward by temp_gib"] == 0.5
    assert found["won_back"] == 0.9412 and found["freed/predicted"] == 0.75 and "offload/fsdp" not in found
    at = lambda ms, gib: {"modes": {"offload": {"ms": ms, "temp_gib": gib}}}
    found = stages.over_microbatches({"8": at(22.5, 5.0), "16": at(21.25, 5.5), "4": {"modes": {}}}, 1)
    assert found["bubble"]["8"] == {"measured": 0.1111, "by the formula": 0.1111}
    assert found["temp_gib with 16 / with 8 microbatches"] == 1.1
    assert stages.over_microbatches({"8": at(22.5, 5.0)}, 1) == {}


def test_every_offload_of_a_config_becomes_save():
    policy = Policy({"fc1": "offload", "act": "recompute", "attn/q": "offload"}, dots="offload")
    patterns = ["remat.residuals[fc1]=save", "remat.residuals[act]=recompute", "remat.residuals[attn/q]=save"]
    assert losses.overrides_to_save(policy) == ["remat.offload_modules=[]", *patterns, "remat.dots=save"]
    assert losses.overrides_to_save(Policy({"fc1": "save"})) == []
    # A later pattern that takes an offload back stays as it is.
    policy = Policy({"attn/*": "recompute"}, offload_modules=["core_attn"])
    assert losses.overrides_to_save(policy)[-1] == "remat.residuals[attn/*]=recompute"


def test_which_runs_have_their_losses_compared():
    options = argparse.Namespace(config="configs/llama-1b.yaml", overrides=[], interleaved=False)
    runs = losses.compared(options, ["train.batch_size=4"])
    assert list(runs) == ["offload", "save"] and all("train.batch_size=4" in run for run in runs.values())
    of_run = lambda run: load("configs/llama-1b.yaml", run)
    assert "offload" in dict(of_run(runs["offload"]).remat.rules).values()
    assert "offload" not in dict(of_run(runs["save"]).remat.rules).values()
    options.interleaved = True
    runs = losses.compared(options, ["train.batch_size=4", "train.grad_accumulation=4"])
    assert [of_run(run).train.interleave for run in runs.values()] == [True, False]


@pytest.mark.parametrize("case", [dense.CASE, moe.CASE], ids=lambda case: case.program)
def test_each_peer_has_variants_of_its_own(case):
    modes = cases.modes_of(case)
    assert modes.keys() == set(cases.MODES)
    assert all(
        (v.peer == "ours") == mode.startswith("ours") for mode, variants in modes.items() for v in variants.values()
    )


def test_costs_of_a_layer_with_experts():
    experts = {"experts": 4, "experts_per_token": 2, "d_expert": 64, "grouped": "ragged", "heads": None}
    shape = argparse.Namespace(**vars(SHAPE), **experts, qk_norm=False, capacity=None, exchange="padded")
    costs = moe.costs(shape)
    assert costs["moe/fc1.gate"] == (2 * 20 * 512 * 64, 2 * 20 * 64)  # 20 rows of 10 tokens
    assert costs["moe/fc1_input"] == (0, 2 * 20 * 512) and costs["attn/k"] == (2 * 10 * 512 * 128, 2 * 10 * 128)


def test_all_rows_are_divided_among_the_groups():
    for sizes in grouped.divisions(1000, 8).values():
        assert sizes.sum() == 1000 and sizes.min() >= 0
    assert grouped.divisions(1000, 8)["skewed"][1] == 0


@pytest.mark.claim("choices")
def test_the_choices_of_the_layer_compute_the_same():
    options = argparse.Namespace(rows=40, d_model=16, d_expert=24, experts=4)
    found, gemms = {}, {}
    for choice in choices.CHOICES:
        run, given = choices.forward_and_backward(choices.experts(choice, "ragged")), choices.operands(options, choice)
        given = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, given)
        gemms[choice] = count(jax.make_jaxpr(run)(*given), "ragged_dot_general")
        y, (dx, dweight, dw) = jax.jit(run)(*given)
        merged = dw.pop("gate and up", None)
        dw |= {} if merged is None else dict(zip(("gate", "up"), jnp.split(merged, 2, axis=2), strict=True))
        found[choice] = {"y": y, "dx": dx, "dweight": dweight, "dw": dw}
        if choice == choices.CHOICES[0]:  # the layer's own
            rows, weight, w, sizes, _ = given
            layers = _apply_experts(Model(grouped="ragged"), rows, weight, sizes, w, full=True)
            np.testing.assert_array_equal(y, jax.jit(lambda: layers)())
    assert [*gemms.values()] == [9, 9, 10, 6]
    for one in found.values():
        assert_close(one, found["weights on act"])


LINES = [
    {"seq": 8, "how": how, "moved": ["fc1"], "host_gib": gib, "step_ms": 40.0 - gib, "temp_gib": 2.0, "d2h_ms": ms}
    for how, gib, ms in [
        (sweep.RECOMPUTED, 0.0, None),
        ("jaxoffload", 2.5, 20.0),
        ("jaxoffload", 5.0, 40.0),
        ("JAX", 2.5, None),
        (sweep.SHARE, 1.0, 8.0),
    ]
]


def test_what_is_free_by_hand():
    """0.125 GiB per ms, and a forward pass of 10 ms."""
    assert sweep.free_gib(LINES) == pytest.approx(1.25)
    assert sweep.free_gib(LINES[:1]) is None


def test_the_picture_is_drawn(tmp_path):
    result = {"device": "a GPU", "shape": {"layers": 5, "batch": 2, "d_model": 512}, "lines": LINES}
    read = json.loads(json.dumps(result))
    assert sweep.plot(read, tmp_path / "sweep.png") and (tmp_path / "sweep.png").stat().st_size > 10_000


def test_a_plan_is_judged_by_the_fastest_policy_that_fits():
    of_plan = {"device_gib": 9.0, "step_ms": 110.0, "predicted_ms": 99.0, "predicted_gib": 9.9, "peak_gib": 8.0}
    lines = {
        "plan least": of_plan,
        "hand-made": {"device_gib": 10.0, "step_ms": 100.0},
        "save": {"device_gib": 30.0, "step_ms": 80.0},
        "too large": {"device_gib": 200.0},
    }
    least = plans.judged(10.0, of_plan, lines)
    assert least["best"] == "hand-made" and least["plan / best"] == 1.1 and least["runs"]
    assert least["predicted / measured ms"] == 0.9 and least["predicted / planned by XLA"] == 1.1
    for plan in (None, {"error": "out of memory"}):
        everything = plans.judged(30.0, plan, lines)
        assert not everything["runs"] and everything["best"] == "save" and "plan / best" not in everything
    measures = plans.summary({"a shape": {"budgets": {"least": least, "all": everything}}})
    assert (measures["plans"], measures["ran"]) == (2, 1)
    assert measures["plan / best, at most"] == 1.1 and measures["plan / best <= 1.01, share"] == 0
    assert measures["error of the time: median, most"] == measures["error of the memory: median, most"] == [0.1, 0.1]
    assert measures["error of XLA's plan: median, most"] == [0.125, 0.125]
    del of_plan["peak_gib"]
    measures = plans.summary({"a shape": {"budgets": {"least": plans.judged(10.0, of_plan, lines)}}})
    assert measures["error of XLA's plan: median, most"] is None


def test_the_peak_of_a_step_is_known_if_no_step_before_took_as_much(monkeypatch):
    gib = {"save": 5.0, "plan all": 5.0, "recompute": 2.0, "gate moved": 1.0}
    used = {"so far": 1.5}  # what initializing took

    def step(name):
        def run(weights, x):
            used["so far"] = max(used["so far"], gib[name] + 0.1)
            return weights, x

        return run

    monkeypatch.setattr(plans, "initial", lambda case, options: (jnp.zeros(1), jnp.zeros(1)))
    monkeypatch.setattr(peers, "peak_gib", lambda: used["so far"])
    lines = {name: {"device_gib": size} for name, size in gib.items()}
    plans.timed(plans.SHAPES["1b"], argparse.Namespace(), {name: step(name) for name in gib}, lines, 2)
    assert {name: of.get("peak_gib") for name, of in lines.items()} == {
        "save": None,
        "plan all": 5.1,
        "recompute": 2.1,
        "gate moved": None,
    }
    assert all(of["step_ms"] >= 0 for of in lines.values())


def test_budgets_are_what_recomputing_takes_and_a_little_what_the_fastest_takes_and_the_middle():
    assert plans.budgets_of(10.0, 20.0) == {"least": 10.2, "middle": 15.1, "all": 20.0}
    assert plans.budgets_of(10.0, 9.0) == dict.fromkeys(("least", "middle", "all"), 10.2)  # moving is the fastest


def test_a_choice_is_compiled_once_and_one_that_does_not_fit_corrects_the_budget(monkeypatch):
    gib = {"small": 9.0, "middle": 16.0, "large": 20.0, "nothing": 8.0}  # by XLA's plan
    curve = [
        {"bytes": size * 2**30, "ms": ms, "policy": {"residuals": {name: "save"}}}
        for name, size, ms in (("small", 9, 30.0), ("middle", 13, 20.0), ("large", 19, 10.0))
    ]
    made = []
    monkeypatch.setattr(plans, "lowered", lambda shape, sizes, variant: [*variant.residuals])
    monkeypatch.setattr(plans, "compiled", lambda names: (made.append(*names), {"device_gib": gib[names[0]]}))
    unmoved = [{"bytes": 15 * 2**30, "ms": 40.0, "policy": {"residuals": {"nothing": "save"}}}, curve[2]]
    found = plans.Curve(plans.SHAPES["1b"], argparse.Namespace(), curve, unmoved)
    names = [found.points.index(found.chosen(budget)) for budget in (20.0, 14.0, 9.0)]
    assert names == [2, 0, 0] and sorted(made) == ["large", "middle", "small"]
    # What moves nothing is looked at if nothing else fits.
    assert found.points.index(found.chosen(8.0)) == 3 and made[3:] == ["nothing"] and found.chosen(7.0) is None
    line = found.compiled[found.points[2]][1]
    assert (line["predicted_ms"], line["predicted_gib"], line["device_gib"]) == (10.0, 19.0, 20.0)


def test_policies_that_are_nearly_the_fastest_in_their_memory_are_timed_again():
    line = lambda gib, ms: {"device_gib": gib, "step_ms": ms}
    lines = {"least": line(9.0, 110.0), "slow": line(10.0, 115.0), "all": line(30.0, 80.0), "close": line(31.0, 83.0)}
    lines |= {"plan least": line(10.0, 140.0), "large": {"device_gib": 200.0}}
    assert plans.contenders(lines) == ["least", "all", "close", "plan least"]


def test_a_variant_of_which_xla_tells_no_memory_is_left_out(monkeypatch, capsys):
    def run(*state):
        time.sleep(0.01)
        return state

    step = accumulate.Step(run, {"all_gib": 1.0, "temp_gib": 1.0, "compile_s": 1.0})
    made = iter([None, step, step])
    monkeypatch.setattr(accumulate, "compiled", lambda *_, **__: next(made))
    monkeypatch.setattr(accumulate, "initial", lambda *_: (jnp.zeros(1), jnp.zeros(1)))
    monkeypatch.setattr(accumulate, "placed", lambda *_: (None, None))
    monkeypatch.setattr(accumulate, "model_flops", lambda *_: 1.0)
    variants = ["gate moved, the rest saved", "all moved", "k and v kept, the rest moved"]
    how = {"modes": ["interleaved"], "variants": variants, "case": "dense", "rounds": 0, "steps": 1}
    options = argparse.Namespace(**how, fsdp=1, expert=1)
    *_, modes = accumulate.measured(dense.CASE, options, 2)
    of = modes["interleaved"]
    assert {of["options"], *of["other_options"]} == set(variants) - {"all moved"}
    assert "interleaved, all moved: left out; XLA does not say what memory it planned" in capsys.readouterr().err


class Silent:
    """A compiled program of which jaxlib 0.11.2 does not tell the memory."""

    def memory_analysis(self):
        raise RuntimeError("the schedule")


def test_no_benchmark_fails_where_xla_tells_no_memory(monkeypatch, capsys):
    traced = stages.Lowered(SimpleNamespace(compile=Silent), None)
    assert stages.compiled(traced) == steps.NO_PLAN
    monkeypatch.setattr(peers, "chosen", lambda *_: {("ours", "best"): None})
    monkeypatch.setattr(peers, "compile_step", lambda *_: (Silent(), 0, 1.0))
    assert peers.compile_all(dense.CASE, None) == ({}, {})
    monkeypatch.setattr(sweep, "compile_step", lambda *_: (Silent(), 0, 1.0))
    variant = cases.Variant("ours", {"gate": "offload"}, {})
    assert sweep.measure_one(argparse.Namespace(seq=1), "jaxoffload", variant, "state") == (None, "state")
    monkeypatch.setattr(frameworks, "lowered", lambda *_: SimpleNamespace(compile=Silent))
    assert frameworks.compiled(None, None, None) is None
    said = capsys.readouterr().err
    assert said.count(f"left out; {steps.NO_PLAN}") == 2
    one = {"step_ms": 2.0, "temp_gib": 3.0, "trace_s": 1.0, "compile_s": 1.0}
    variants = {"offload": one, "scan": one}
    assert frameworks.ratios(variants) == {"offload/scan": 1.0, "offload/scan by temp_gib": 1.0}
    assert frameworks.table({"frameworks": {"nnx": {"variants": variants}}}).count("\n") == 3


def test_plans_of_several_runs_are_joined_if_nothing_but_the_shapes_differ():
    run = {"device": "1 GPU", "versions": {"jax": "1"}, "commit": "c", "predicted": "p"}
    of = lambda *names, **other: (
        run | {"command": names[0], "shapes": {name: {"budgets": {}} for name in names}} | other
    )
    joined = lambda *results: plans.joined(results, Path("all.json"))
    found = joined(of("1b"), of("8b", "70b", commit="later"))
    assert list(found["shapes"]) == ["8b", "70b", "1b"] and found["device"] == "1 GPU" and found["commit"] == "later"
    assert joined(of("1b"), of("8b", versions={"te": "2"}))["versions"] == {"jax": "1", "te": "2"}
    assert len(joined(found, of("70b, accumulated"))["runs"]) == 3
    assert found["runs"] == [{"command": "1b", "commit": "c"}, {"command": "8b", "commit": "later"}]
    assert joined(of("1b"), of("8b, fsdp", device="2 GPU"))["device"] == "2 GPU"
    assert found["command"] == "python -m benchmarks.plans measure --predicted p --out all.json --shapes 8b 70b 1b"
    for files, said in (
        ([of("1b"), of("8b", device="1 TPU")], "the files differ in 'device': 'GPU', 'TPU'"),
        ([of("1b"), of("8b", versions={"jax": "2"})], "the files differ in 'jax': '1', '2'"),
        ([of("1b", "8b"), of("8b")], "measured more than once: 8b"),
    ):
        with pytest.raises(SystemExit, match=said):
            joined(*files)


def test_policies_are_drawn_alike_each_time_and_half_the_shapes_accumulate():
    assert plans.drawn(dense.CASE, 5) == plans.drawn(dense.CASE, 5)
    assert len(set(plans.drawn(dense.CASE, 20).values())) == 20
    assert len(plans.SHAPES) >= 12
    assert 2 * sum(shape.microbatches > 1 for shape in plans.SHAPES.values()) == len(plans.SHAPES)
