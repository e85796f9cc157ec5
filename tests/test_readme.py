"""The README: its example runs as printed, its numbers come from files, its config block is a policy."""

import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml
from common import count, kept
from jax.ad_checkpoint import checkpoint_name
from test_rules import kernels, softmax

from benchmarks import sweep
from benchmarks.dense import table
from jaxoffload import Policy, residuals
from jaxoffload.grouped import te
from models.config import parse
from models.preflight import check_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\[([^][]+)\]\[([a-z0-9-]+)\]")  # of words to a claim


def without_links(text):
    """In one line."""
    return LINK.sub(r"\1", " ".join(text.split()))


def block(language):
    (code,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return code


@pytest.mark.parametrize("naming", ["tag", "checkpoint_name"])
def test_the_three_steps(naming, capsys):
    code = block("python")
    if naming == "checkpoint_name":
        code = code.replace("import Policy, tag", "import Policy\nfrom jax.ad_checkpoint import checkpoint_name")
        code = re.sub(r"\btag\(", "checkpoint_name(", code)
        assert "tag" not in code
    made = {}
    exec(compile(code, "README.md", "exec"), made)
    table = residuals(made["loss"], made["weights"], made["x"])
    assert capsys.readouterr().out == f"{table}\n"
    # Bytes by hand: float32, a row for each of 8 layers; the last one's stays empty, for it is resident.
    assert table.host_bytes == 8 * 4 * 128 * 1024 * 4
    assert made["gradients"]["in"].shape == (8, 256, 1024)
    assert float(made["value"]) > 0 and all(g.any() for g in jax.tree.leaves(made["gradients"]))


def test_the_config_block_is_a_policy_and_names_every_field():
    fields = yaml.safe_load(block("yaml"))["remat"]
    assert set(fields) == {*Policy.__dataclass_fields__}
    assert Policy(**fields).residuals[0] == ("fc1", "offload")


def test_the_config_block_runs_where_there_are_experts(tmp_path):
    tree = yaml.safe_load((ROOT / "configs/tiny-moe.yaml").read_text()) | yaml.safe_load(block("yaml"))
    (tmp_path / "moe.yaml").write_text(yaml.safe_dump(tree))
    config, problems = parse(tmp_path / "moe.yaml")
    check_names(config, problems)
    assert not problems


def result(name):
    measured = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    assert measured.keys() >= {"device", "versions", "command", "commit"} and "H200" in measured["device"]
    return measured


def steps(name, *modes):
    return [f"{result(name)['modes'][mode]['step_ms']:.0f}" for mode in modes]


TEXT = without_links(README)


def test_the_table_of_step_times():
    measured = result("dense")
    assert table(measured) in README
    assert {"shape", "modes", "ratios"} <= set(measured)


def test_the_steps_at_70bs_width():
    wide = result("dense-70b")["modes"]
    assert wide["ours_best"]["temp_gib"] <= wide["remat"]["temp_gib"]
    ours, remat, nothing = steps("dense-70b", "ours_best", "remat", "ours_saved_all")
    assert (
        f"takes {ours} ms, where recomputing everything takes {remat} ms and recomputing nothing {nothing} ms" in TEXT
    )


def test_the_time_of_a_layer_in_deeper_stacks():
    files = {16: "dense", 32: "dense-32", 64: "dense-64"}
    a_layer = [result(name)["modes"]["ours"]["step_ms"] / layers for layers, name in files.items()]
    assert "{:.1f} ms for 16 layers, {:.1f} for 32, {:.1f} for 64".format(*a_layer) in TEXT


def test_the_steps_on_two_gpus():
    ours, saved = steps("dense-fsdp", "ours", "saved")
    assert f"takes {ours} ms a step, saving them with JAX {saved} ms" in TEXT and int(ours) < int(saved)
    assert result("moe-expert-parallel")["shape"]["capacity"] == 1.25 and "room for a quarter more rows" in TEXT
    ours, saved, remat = steps("moe-expert-parallel", "ours", "saved", "remat")
    assert f"takes {ours} ms a step, saving them with JAX {saved} ms, recomputing everything {remat} ms" in TEXT
    modes = result("moe-expert-parallel")["modes"]
    ours, saved, remat = (f"{modes[mode]['temp_gib']:.1f}" for mode in ("ours", "saved", "remat"))
    assert f"ms, in {ours}, {saved} and {remat} GiB of a device's temporary memory" in TEXT


def test_which_transformer_engine_was_measured():
    assert f"TransformerEngine {'.'.join(map(str, te.NEEDED))} or later" in TEXT
    measured = {
        path.stem: versions
        for path in (ROOT / "benchmarks/results").glob("*.json")
        if "transformer_engine" in (versions := json.loads(path.read_text()).get("versions", {}))
    }
    assert {versions["transformer_engine"] for versions in measured.values()} == {"2.20.2"}
    assert "What was measured here is 2.20.2, built" in TEXT and "with cuBLAS 13.1 unless another is named" in TEXT
    newer = {name for name, versions in measured.items() if not versions["nvidia-cublas"].startswith("13.1.")}
    assert newer == {"grouped-cublas-13.8", "moe-te"}
    assert all(measured[name]["nvidia-cublas"].startswith("13.8.2.") for name in newer)


def test_the_products_of_transformer_engine():
    lines = result("grouped-cublas-13.8")["lines"]
    speed = {(line["backend"], line["groups"]): line["of dense"] for line in lines}
    least, most = (f(speed["te, full", groups] for groups in ("even", "falling", "skewed")) for f in (min, max))
    assert f"run at {100 * least:.0f} to {100 * most:.0f} % of one" in TEXT
    for name, cublas in (("moe-te", "13.8.2"), ("moe-te-cublas-13.1", "13.1")):
        measured = result(name)
        assert measured["shape"]["grouped"] == measured["shape"]["attention"] == "te"
        assert measured["versions"]["nvidia-cublas"].startswith(cublas)
        assert (
            f"| the four, TransformerEngine's products and attention, cuBLAS {cublas} | {in_remats_memory(name)} |"
            in TEXT
        )
    ours, remat = steps("moe-te-cublas-13.1", "ours_best", "remat")
    assert "slower than recomputing everything, as in the last line" in TEXT and int(ours) > int(remat)


def in_remats_memory(name):
    """Steps with offload, recomputing everything, and nothing."""
    modes = result(name)["modes"]
    assert modes["ours_best"]["temp_gib"] <= modes["remat"]["temp_gib"]
    return " | ".join(f"{step} ms" for step in steps(name, "ours_best", "remat", "ours_saved_all"))


def test_the_speed_of_grouped_products():
    lines = result("grouped")["lines"]
    speed = {line["backend"]: line["of dense"] for line in lines if line["groups"] == "even"}
    assert f"at {speed['te, full']:.0%} of".replace("%", " %") in TEXT
    assert f"at {speed['mosaic, full']:.0%} with".replace("%", " %") in TEXT
    ms = {(line["backend"], line["groups"]): line["ms"] for line in lines}
    for kind, groups in itertools.product(("te", "mosaic"), ("even", "falling", "skewed")):
        of_stock = lambda ours, k=kind, g=groups: ms[ours, g] / ms[f"{k}, stock", g]
        assert of_stock(f"{kind}, full") < 1.01 and 1.03 < of_stock(kind) < 1.07, (kind, groups)


def test_the_choices_of_the_layer():
    longer = set()
    for name in ("choices", "choices-te"):
        on_act, kept, again, merged = result(name)["lines"]
        assert 1024 * (kept["kept_gib"] - on_act["kept_gib"]) == 256 and again["kept_gib"] == on_act["kept_gib"]
        assert merged["temp_gib"] - on_act["temp_gib"] == 1.75 and merged["kept_gib"] == on_act["kept_gib"]
        assert on_act["ms"] <= min(kept["ms"], merged["ms"])
        longer.add(round(100 * (again["ms"] / on_act["ms"] - 1)))
    assert f"takes {min(longer)} to {max(longer)} % longer" in TEXT


def test_the_steps_of_experts_on_one_gpu():
    measured = result("moe")["modes"]
    ours, remat, nothing = steps("moe", "ours_best", "remat", "ours_saved_all")
    assert measured["ours_best"]["temp_gib"] <= measured["remat"]["temp_gib"]
    assert f"takes {ours} ms, in the memory in which recomputing everything takes {remat} ms" in TEXT
    assert f"recomputing nothing takes {nothing} ms" in TEXT
    small = result("moe-small-experts")["shape"]
    assert (small["layers"], small["experts"], small["experts_per_token"]) == (12, 64, 8)
    assert f"| 12 of 64 small experts, eight a token | {in_remats_memory('moe-small-experts')} |" in TEXT


def test_the_losses_of_experts():
    lines = [line for more in ("", "-te", "-fp8") for line in result(f"losses-moe{more}")["lines"]]
    assert [line["overrides"].removeprefix("model.grouped=") for line in lines] == [
        "ragged",
        "mosaic",
        "te",
        "te model.quantize=fp8",
    ]
    assert {line["losses that differ"] for line in lines} == {0}
    assert all(
        f"remat.residuals[moe/{of}]=offload" in result("losses-moe-fp8")["command"] for of in ("act", "fc1_input")
    )
    last = [line.get("losses", line.get("first and last loss"))[-1] for line in lines]
    assert max(last) < 1.02 * min(last)


def test_the_steps_with_the_attention_of_transformer_engine():
    measured = result("dense-te-best")["modes"]
    ours, remat = steps("dense-te-best", "ours_best", "remat")
    assert measured["ours_best"]["temp_gib"] <= measured["remat"]["temp_gib"]
    assert f"takes {ours} ms in the memory of recomputing everything, which takes {remat} ms" in TEXT


def verified(name):
    """(of, claim) -> verdict, of a file of what verify printed on an H200."""
    about, _, found = (ROOT / f"benchmarks/results/verify-{name}.txt").read_text().partition("\n\n")
    assert re.match(
        r"device: [12] NVIDIA H200 .*\nversions: jax .*\ncommit: \w+\ncommand: python -m jaxoffload verify", about
    )
    return {(of, claim): verdict for of, verdict, claim in re.findall(r"^(\w+): (\w+(?: \w+)?) +(\w+): ", found, re.M)}


def test_what_verify_found():
    of_experts = verified("moe")
    assert len(of_experts) == 14 and set(of_experts.values()) == {"holds", "not checked"}
    # Of one device there is no placement; a step's residuals are those of its loss.
    missing = {key for key, verdict in of_experts.items() if verdict == "not checked"}
    assert missing == {("loss", "placement"), ("step", "placement"), ("step", "conservation")}
    assert verified("llama-1b") == of_experts
    planted = (ROOT / "benchmarks/results/planted-fault.txt").read_text()
    assert re.findall(r"^fails +(\w+): (.*), Stream", planted, re.M) == [
        ("copies", "copies run on a stream that computes")
    ]
    assert verified("moe-2") == dict.fromkeys(of_experts, "holds") | {("step", "conservation"): "not checked"}


def test_what_fits_is_what_was_measured_to():
    lines = result("fits")["lines"]
    assert len(lines) == 10 and {line["fits"] for line in lines} == {True, False}
    assert [line["fits"] for line in lines] == [line["measured to fit"] for line in lines]


def test_what_moves_makes_it_faster_until_copies_take_as_long_as_the_forward_pass():
    swept = result("sweep")["lines"]
    fastest = min((line for line in swept if line["how"] == "jaxoffload"), key=lambda line: line["step_ms"])
    assert fastest["host_gib"] == pytest.approx(sweep.free_gib(swept), rel=0.05)


def test_the_losses_that_differ():
    losses = result("losses")
    (line,) = losses["lines"]
    assert line["losses that differ"] == 0 and f"of {losses['steps']} steps of `llama-1b` none differs" in TEXT


def dots(policy, f, *args):
    jaxpr = jax.make_jaxpr(jax.grad(lambda *args: jax.checkpoint(f, policy=policy)(*args).sum()))(*args)
    return count(jaxpr, "dot_general")


def test_what_it_says_of_jaxs_own_policies():
    policies, x = jax.checkpoint_policies, jnp.ones((4, 4))
    once = lambda x: jnp.sin(checkpoint_name(x @ x, "fc1"))
    named, dots_saved = policies.save_only_these_names, policies.dots_with_no_batch_dims_saveable
    # A misspelt name: the product runs once more, and nobody says so.
    assert dots(named("fc3"), once, x) == dots(named("fc1"), once, x) + 1
    # With products saved, no name can keep one from being saved.
    both = policies.save_from_both_policies(dots_saved, named("another"))
    assert dots(both, once, x) == dots(dots_saved, once, x) == dots(named("fc1"), once, x)
    # Two names of one value, side by side.
    siblings = lambda x: jnp.sin(checkpoint_name(h := x @ x, "p")) * jnp.sin(checkpoint_name(h, "q"))
    assert kept(jax.checkpoint(siblings, policy=named("p", "q")), x) == {("device", "float32", (4, 4)): 2}
    # The output of exp, saved.
    f = jax.checkpoint(lambda x: checkpoint_name(jnp.exp(x), "e"), policy=named("e"))
    assert count(jax.make_jaxpr(jax.grad(lambda x: f(x).sum()))(x), "exp") == 2
    # The output of a kernel, saved; its other result, which the backward pass reads too, has no name.
    f = jax.checkpoint(lambda x: checkpoint_name(softmax(x), "context"), policy=named("context"))
    assert kernels(jax.make_jaxpr(jax.grad(lambda x: (f(x) ** 2).sum()))(x)) == 2


def test_the_tests_that_the_table_of_requirements_names_exist():
    table = (ROOT / "tests/README.md").read_text()
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", table)
    assert len(named) > 20
    assert [pair for pair in named if f"def {pair[1]}(" not in (ROOT / "tests" / pair[0]).read_text()] == []


def test_files_that_it_names_exist():
    for name in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"configs/([a-z0-9-]+\.yaml)", README):
        assert (ROOT / "configs" / name).exists(), name
