"""Configs: one error lists everything that is wrong, each with its key, its value and advice."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from common import ROOT

from jaxoffload import Policy
from models import plain
from models.config import Config, flat
from models.loading import SECTIONS, load, parse
from models.needs import check_patterns
from models.reading import ConfigError, read
from models.report import report

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

GOOD = """\
model: {vocab_size: 512, layers: 2, d_model: 64, heads: 4, kv_heads: 2, d_ff: 128}
remat: {residuals: {fc1: offload}, min_offload_bytes: 0}
train: {steps: 10, warmup_steps: 2, batch_size: 8, seq_len: 64, loss_chunk: 32}
"""

# The text, and (key, value, advice) of the error's line: all three must be in one line.
BAD_VALUES = {
    # names
    "train.step=5": ("train.step", "5", "the nearest is train.steps"),
    "train.stepz=5": ("train.stepz", "5", "the nearest is train.steps"),
    "model.n_heads=5": ("model.n_heads", "5", "the nearest is model.heads"),
    "model.xyz=5": ("model.xyz", "5", "allowed: model.vocab_size, model.layers"),
    "mesh.tensors=2": ("mesh.tensors", "2", "the nearest is mesh.tensor"),
    "data.paths=x": ("data.paths", "'x'", "the nearest is data.path"),
    "distributed.coordinater=x": ("distributed.coordinater", "'x'", "the nearest is distributed.coordinator"),
    "remat.residual={}": ("remat.residual", "{}", "the nearest is remat.residuals"),
    "remat.offload_layer=2": ("remat.offload_layer", "2", "the nearest is remat.offload_layers"),
    "modle.layers=5": ("modle", "{'layers': 5}", "the nearest is model"),
    "optimizer.name=sgd": ("optimizer", "{'name': 'sgd'}", "allowed: model, remat, mesh, data, train, distrib"),
    # types
    "train.steps=ten": ("train.steps", "'ten'", "an integer from 1 to 2147483647"),
    "train.steps=1.5": ("train.steps", "1.5", "an integer from 1 to 2147483647"),
    "train.steps=true": ("train.steps", "True", "an integer from 1 to 2147483647"),
    "train.steps=": ("train.steps", "None", "an integer from 1 to 2147483647"),
    "train.steps=0x10": ("train.steps", "'0x10'", "an integer from 1 to 2147483647"),
    "train.steps=1:30": ("train.steps", "'1:30'", "an integer from 1 to 2147483647"),
    "train.steps=1e-1": ("train.steps", "0.1", "an integer from 1 to 2147483647"),
    "train.steps=1e400": ("train.steps", "inf", "an integer from 1 to 2147483647"),
    "train.steps=[1]": ("train.steps", "[1]", "an integer from 1 to 2147483647"),
    "train.learning_rate=fast": ("train.learning_rate", "'fast'", "a number above 0, at most 1e+30"),
    "model.tied_embeddings=1": ("model.tied_embeddings", "1", "true or false"),
    "model.head_dim=wide": ("model.head_dim", "'wide'", "an integer from 2 to 32768 or null"),
    "data.path=3": ("data.path", "3", "a string or a list of strings"),
    "data.path=[a.txt, 3]": ("data.path", "['a.txt', 3]", "a string or a list of strings"),
    "data.tokenizer=7": ("data.tokenizer", "7", "a string or null"),
    "train.profile_steps=20": (
        "train.profile_steps",
        "20",
        "[an integer from 0 to 2147483647, an integer from 0 to 2147483647] or",
    ),
    "train.profile_steps=[2]": ("train.profile_steps", "[2]", "[an integer from 0 to 2147483647, an integer from 0 to"),
    "train.profile_steps=[-1, 2]": ("train.profile_steps", "[-1, 2]", "[an integer from 0 to 2147483647, an integer"),
    "train.profile_steps=[2, x]": ("train.profile_steps", "[2, 'x']", "[an integer from 0 to 2147483647, an integer"),
    "train.out=4": ("train.out", "4", "must be a string"),
    # ranges
    "model.vocab_size=256": ("model.vocab_size", "256", "an integer from 257 to 16777216"),
    "model.layers=0": ("model.layers", "0", "an integer from 1 to 10000"),
    "mesh.fsdp=-1": ("mesh.fsdp", "-1", "an integer from 1 to 1048576"),
    "train.learning_rate=0": ("train.learning_rate", "0", "a number above 0, at most 1e+30"),
    "train.learning_rate=.inf": ("train.learning_rate", "inf", "a number above 0, at most 1e+30"),
    "train.clip_norm=.nan": ("train.clip_norm", "nan", "a number above 0, at most 1e+30"),
    "train.final_learning_rate_fraction=1.5": ("train.final_learning_rate_fraction", "1.5", "a number from 0 to 1"),
    "train.beta2=1": ("train.beta2", "1", "a number from 0 to 0.9999"),
    "train.weight_decay=-0.1": ("train.weight_decay", "-0.1", "a number from 0 to 1e+30"),
    "train.seed=-1": ("train.seed", "-1", "an integer from 0 to 4294967295"),
    "data.valid_fraction=0.9": ("data.valid_fraction", "0.9", "a number from 0.0001 to 0.5"),
    # choices
    "model.attention=cudn": ("model.attention", "'cudn'", "xla or cudnn or te; the nearest is cudnn"),
    "model.attention=null": ("model.attention", "None", "xla or cudnn or te"),
    "model.dtype=bf16": ("model.dtype", "'bf16'", "bfloat16 or float32; the nearest is bfloat16"),
    "model.quantize=FP": ("model.quantize", "'FP'", "fp8 or null; the nearest is fp8"),
    "train.interleave=atuo": ("train.interleave", "'atuo'", "auto or true or false; the nearest is auto"),
    "train.interleave=1": ("train.interleave", "1", "must be auto or true or false"),
    "model.attention=TE": ("model.attention", "'TE'", "the nearest is te"),
    f"modle.layers={'x' * 60}": ("modle", "{'layers': 'xxxx", "xxx...: no such section; the nearest is model"),
    "remat.residuals.fc1=save": ("remat.residuals.fc1", "save", "an entry of a mapping is remat.residuals[fc1]=value"),
    # one field against another
    "train.batch_size=100000000": (
        "train.batch_size / train.grad_accumulation * train.seq_len",
        "",
        "must be below 2**31",
    ),
    "model.experts=4; model.d_expert=64; model.grouped=mosaic; model.quantize=fp8": (
        "model.grouped",
        "'mosaic'",
        "has no FP8; must be auto, te or ragged where model.quantize = 'fp8'",
    ),
    "model.experts=4; model.d_expert=63; mesh.tensor=2": ("mesh.tensor", "2", "must divide model.d_expert = 63"),
    "model.kv_heads=3": ("model.kv_heads", "3", "must divide model.heads = 4"),
    "model.heads=6": ("model.heads", "6", "must divide model.d_model = 64"),
    "model.head_dim=5": ("model.head_dim", "5", "must be even"),
    "mesh.tensor=3": ("mesh.tensor", "3", "must divide model.heads = 4 and model.kv_heads = 2 and model.d_ff = 128"),
    "mesh.fsdp=3; train.batch_size=6": ("mesh.fsdp", "3", "must divide model.d_model = 64"),
    "mesh.expert=2": ("mesh.expert", "2", "must be 1 where model.experts = 0"),
    "model.aux_loss=0.1": ("model.aux_loss", "0.1", "must not be given where model.experts = 0"),
    "model.router=sigmoid": ("model.router", "'sigmoid'", "must not be given where model.experts = 0"),
    "model.experts=1": ("model.experts_per_token", "2", "must be at most model.experts = 1"),
    "model.experts=4; model.capacity=1.5": ("model.capacity", "1.5", "must be null where mesh.expert = 1"),
    "model.experts=4; model.exchange=ragged": ("model.exchange", "'ragged'", "must be padded where mesh.expert = 1"),
    "model.experts=4; model.dense_layers=9": ("model.dense_layers", "9", "must be below model.layers"),
    "model.experts=6; mesh.expert=4": ("mesh.expert", "4", "must divide model.experts = 6"),
    "model.router=softmaxx": ("model.router", "'softmaxx'", "the nearest is softmax"),
    "mesh.data=3": (
        "train.batch_size",
        "8",
        "a multiple of train.grad_accumulation * mesh.data * mesh.fsdp * mesh.expert = 3",
    ),
    "train.grad_accumulation=5": ("train.batch_size", "8", "a multiple of train.grad_accumulation * mesh.data"),
    "train.interleave=true": ("train.interleave", "True", "auto or false where train.grad_accumulation = 1"),
    "train.loss_chunk=48": ("train.loss_chunk", "48", "must divide train.seq_len = 64"),
    "train.profile_steps=[3, 3]": ("train.profile_steps", "[3, 3]", "the first below the second"),
    "train.profile_steps=[3, 11]": ("train.profile_steps", "[3, 11]", "at most train.steps = 10"),
    "train.warmup_steps=10": ("train.warmup_steps", "10", "must be below train.steps = 10"),
    "distributed.coordinator=a:1; distributed.num_processes=2; distributed.process_id=2": (
        "distributed.process_id",
        "2",
        "must be below distributed.num_processes = 2",
    ),
    "train.out=~nobody_here/x": ("train.out", "'~nobody_here/x'", "no such home"),
    "data.cache_dir=~nobody_here/x": ("data.cache_dir", "'~nobody_here/x'", "no such home"),
    "distributed.coordinator=node0; distributed.num_processes=2; distributed.process_id=0": (
        "distributed.coordinator",
        "'node0'",
        "must be host:port of process 0, such as node0:1234",
    ),
    "distributed.num_processes=2": ("distributed", "2", "coordinator, num_processes and process_id, or none"),
    # the policy
    "remat.residuals[fc1]=ofload": ("remat.residuals['fc1']", "'ofload'", "the nearest is 'offload'"),
    "remat.residuals[!fc1]=save": ("remat.residuals['!fc1']", "!", "give the exception a later line"),
    "remat.residuals=offload": ("remat.residuals", "'offload'", "a mapping of patterns"),
    "remat.offload_modules=moe_act": ("remat.offload_modules", "'moe_act'", "is not a list of module names"),
    "remat.offload_modules=[moe_acts]": ("remat.offload_modules", "'moe_acts'", "the nearest is 'moe_act'"),
    "remat.offload_modules=[3]": ("remat.offload_modules", "3", "use attn_norm or qkv_linear or core_attn"),
    "remat.offload_modules=[moe_act, moe_act]": ("remat.offload_modules", "'moe_act'", "more than once"),
    "remat.offload_modules=": ("remat.offload_modules", "None", "is not a list of module names"),
    "remat.offload_modules[moe_act]=offload": ("remat.offload_modules", "'moe_act'", "is not a list"),
    "remat.default=keep": ("remat.default", "'keep'", "save or offload or recompute"),
    "remat.dots=saved": ("remat.dots", "'saved'", "the nearest is 'save'"),
    "remat.min_offload_bytes=1MB per leaf": ("remat.min_offload_bytes", "'1MB per leaf'", "such as '512KiB'"),
    "remat.resident_layers=-1": ("remat.resident_layers", "-1", "a whole number >= 0"),
    "remat.offload_layers=1.5": ("remat.offload_layers", "1.5", "a fraction from 0.0 to 1.0"),
    "remat.other_layers=offload": ("remat.other_layers", "'offload'", "save or recompute"),
    "remat.on_host_full=warn": ("remat.on_host_full", "'warn'", "error or save"),
    # overrides
    "train.steps:10": ("train.steps:10", "train.steps:10", "section.key=value"),
    "steps=10": ("steps", "10", "section.key=value"),
    "train.steps=[1": ("train.steps", "[1", "not YAML"),
    "train.steps[0]=1": ("train.steps[0]", "1", "train.steps = 10 has no entries"),
}

BAD_FILES = {
    "duplicate key": (GOOD + "mesh: {data: 1, fsdp: 1, data: 2}\n", ("mesh.data", "2", "keep one of them")),
    "duplicate section": (GOOD + "train:\n  steps: 40\n", ("train", "lines 3 and 4", "keep one of them")),
    "duplicate pattern": (
        GOOD.replace("{fc1: offload}", "{fc1: offload, act: save, fc1: save}"),
        ("remat.residuals.fc1", "save", "a duplicate key, on lines 2 and 2"),
    ),
    "a list": ("- 1\n- 2\n", ("bad.yaml", "[1, 2]", "must be a mapping of sections")),
    "a scalar section": (GOOD + "mesh: 8\n", ("mesh", "8", "a mapping of keys to values")),
    "a number for a section": (GOOD + "3: {a: 1}\n", ("3", "{'a': 1}", "no such section; allowed: model, remat")),
    "a number for a key": (GOOD + "mesh: {2: 8}\n", ("mesh.2", "8", "no such key; allowed: mesh.data, mesh.fsdp")),
    "nothing for a key": (GOOD + "mesh: {null: 8}\n", ("mesh.None", "8", "no such key; allowed: mesh.data")),
    "a list for a key": (GOOD + "mesh: {[a]: 8}\n", ("bad.yaml", "unhashable", "not YAML")),
    "no YAML": ("model: {layers: 2\ntrain: }", ("bad.yaml", "line 2", "not YAML")),
    "no text": ("model: \0", ("bad.yaml", "#x0000", "not YAML")),
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert str(caught.value) == "\n".join(problem.message for problem in caught.value.problems)
    return tuple(problem.message for problem in caught.value.problems)


def test_there_are_forty_bad_configs():
    assert len(BAD_VALUES) + len(BAD_FILES) >= 40


@pytest.mark.parametrize("override", BAD_VALUES)
def test_a_bad_value_is_one_line_with_key_value_and_advice(good, override):
    (line,) = problems(good, *override.split("; "))
    key, value, advice = BAD_VALUES[override]
    assert line.startswith(key)
    assert value in line.removeprefix(key) or key == value
    assert advice in line


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_file_is_one_line_with_key_value_and_advice(tmp_path, what):
    text, (key, value, advice) = BAD_FILES[what]
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    (line,) = problems(path)
    assert key in line.partition(":")[0]
    assert value in line
    assert advice in line


def test_a_missing_file_names_the_nearest(good):
    (line,) = problems(good.with_name("god.yaml"))
    assert line == f"{good.with_name('god.yaml')}: no such file; the nearest is {good}"


def test_a_missing_file_in_a_missing_folder_says_what_to_give(tmp_path):
    (line,) = problems(tmp_path / "nowhere" / "x.yaml")
    assert line == f"{tmp_path}/nowhere/x.yaml: no such file; give a YAML file, such as configs/tiny.yaml"


def test_a_folder_and_a_binary_are_not_configs(tmp_path):
    (line,) = problems(tmp_path)
    assert str(tmp_path) in line and "must be a YAML file" in line
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    (line,) = problems(tmp_path / "x.yaml")
    assert "x.yaml" in line and "must be a YAML file" in line


@pytest.mark.claim("said-at-once")
def test_all_problems_are_collected(good):
    found = problems(good, "train.steps=ten", "mesh.tensor=3", "modle.layers=1", "remat.default=x", "nonsense")
    keys = ("nonsense", "train.steps", "mesh.tensor", "modle", "remat.default")
    assert all(any(line.startswith(key) for line in found) for key in keys)


def test_a_wrong_value_causes_no_second_problem(good):
    assert len(problems(good, "model.heads=x", "train.loss_chunk=x", "train.warmup_steps=x")) == 3


@pytest.mark.parametrize(
    "override, chunk, warmup",
    [
        ("train.seq_len=64", 64, 20),
        ("train.seq_len=1000", 250, 20),
        ("train.seq_len=1024", 256, 20),
        ("train.seq_len=257", 1, 20),
        ("train.steps=10", 256, 9),
        ("train.warmup_steps=0", 256, 0),
    ],
)
def test_defaults_fit_the_one_key_that_is_written(tmp_path, override, chunk, warmup):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    train = load(path, [override]).train
    assert (train.chunk, train.warmup) == (chunk, warmup)


@pytest.mark.parametrize(
    "override, said",
    [
        ("model.d_model=196", "model.heads = 6, the default: must divide model.d_model = 196"),
        ("model.heads=3", "model.kv_heads = 2, the default: must divide model.heads = 3"),
        ("model.experts=1", "model.experts_per_token = 2, the default: must be at most model.experts = 1"),
        ("mesh.fsdp=16", "train.batch_size = 8, the default: must be a multiple of train.grad_accumulation * "),
        ("model.d_model=18", "model.d_model / model.heads = 3: must be even"),
        ("model.kv_heads=4", "model.kv_heads = 4: must divide model.heads = 6"),
    ],
)
def test_a_value_that_nobody_wrote_is_called_the_default(tmp_path, override, said):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    (line,) = problems(path, override)
    assert line.startswith(said)


def test_overrides_are_yaml_and_a_pattern_goes_last(good):
    config = load(
        good,
        [
            "train.learning_rate=3e-4",
            "model.head_dim=32",
            "data.path=[a.txt, b.txt]",
            "remat.residuals[act]=save",
            "remat.residuals[mlp/*]=offload",
            "remat.residuals[fc1]=save",
            "mesh.data=2",
        ],
    )
    assert config.train.learning_rate == 3e-4
    assert config.model.d_head == 32
    assert config.data.path == ("a.txt", "b.txt")
    assert config.remat.residuals == (("act", "save"), ("mlp/*", "offload"), ("fc1", "save"))
    assert config.remat.match("mlp/fc1.gate") == ("fc1", "save")
    assert config.mesh.data == 2


def test_megatrons_modules_come_from_the_file_or_the_command_line(good):
    assert load(good, ["remat.offload_modules=[moe_act]"]).remat.offload_modules == ("moe_act",)
    good.write_text(GOOD.replace("residuals:", "offload_modules: [attn_norm, core_attn], residuals:"))
    config = load(good, ["remat.residuals[attn/k]=save"])
    assert config.remat.rules[-2:] == (("fc1", "offload"), ("attn/k", "save"))
    said = report(config).splitlines()
    assert "offload_modules: attn_norm -> layer_input" in said
    assert "offload_modules: core_attn -> attn/q, attn/k, attn/v, attn/context" in said
    cells = [line.split() for line in said]
    by_module = [cell[0] for cell in cells if cell[-3:] == ["offloaded", "core_attn", "(offload_modules)"]]
    assert by_module == ["attn/q", "attn/v", "attn/context"]
    assert flat(config)["remat.offload_modules"] == ["attn_norm", "core_attn"]
    config = load(good, ["remat.offload_modules=[mlp_norm]"])
    assert config.remat.rules == (("mlp_input", "offload"), ("fc1", "offload"))
    with pytest.raises(ConfigError) as error:
        check_patterns(load(good, ["remat.offload_modules=[router_fc1, mlp_norm]"]))
    ((_, line),) = error.value.problems
    assert line.startswith("remat.offload_modules['router_fc1'] -> 'moe/fc1_input': matches no tagged value")


@pytest.mark.parametrize(
    "written, number", [("1e3", 1000), ("010", 10), ("1_000", 1000), ("64.0", 64), ("+7", 7), ("2.5e1", 25)]
)
def test_integers_are_decimal_and_may_be_written_as_whole_floats(good, written, number):
    steps = load(good, [f"train.steps={written}"]).train.steps
    assert steps == number and type(steps) is int


@pytest.mark.parametrize("written, number", [("3e-4", 3e-4), (".5", 0.5), ("1", 1.0), ("2.", 2.0), ("1.5E+2", 150.0)])
def test_numbers_are_decimal(good, written, number):
    rate = load(good, [f"train.learning_rate={written}"]).train.learning_rate
    assert rate == number and type(rate) is float


def test_the_users_home_is_found(good, monkeypatch):
    monkeypatch.setenv("HOME", str(good.parent))
    assert load("~/good.yaml", ["train.out=~/runs/x"]).train.out == f"{good.parent}/runs/x"


def test_parse_leaves_its_problems_to_be_added_to(good):
    config, lines = parse(good, ["train.steps=x", "train.batch_size=16"])
    assert [line for _, line in lines] == list(problems(good, "train.steps=x"))
    assert config.train.steps == Config().train.steps and config.train.batch_size == 16


def test_flat_is_json_with_the_width_of_a_head(good):
    values = flat(load(good, ["data.path=[a.txt]"]))
    assert json.loads(json.dumps(values)) == values
    assert values["model.head_dim"] == 16 and values["data.path"] == ["a.txt"]
    assert values["remat.residuals"] == [["fc1", "offload"]] and values["train.steps"] == 10


def test_a_config_is_frozen_and_its_run_is_named_after_the_file(good):
    config = load(good)
    assert config.remat == Policy(residuals={"fc1": "offload"}, min_offload_bytes=0)
    assert config.model.d_head == 64 // 4
    assert config.train.out == "runs/good"
    assert load(good, ["train.out=/tmp/x"]).train.out == "/tmp/x"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3
    assert hash(config) == hash(load(good))


def test_an_empty_file_is_the_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load(path).model == Config().model


@pytest.mark.claim("configs")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_is_valid_and_has_a_comment_on_every_field(path):
    load(path)
    fields = [line for line in path.read_text().splitlines() if line.startswith("  ") and ": " in line]
    assert len(fields) > 10
    assert [line for line in fields if "#" not in line] == []


# ---- what nobody writes on purpose: too large, too deep, or not what its tag says ----


def laughs(levels):
    """Return lists of which each is ten times as long as the one before."""
    lines = ["model: {layers: &x0 [1]}"]
    return "\n".join([*lines, *(f"a{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, levels))])


def merged(levels):
    """Return mappings of which each merges the one before twice, and so doubles the keys to flatten."""
    lines = ["a0: &x0 {k: 1}"]
    return "\n".join([*lines, *(f"a{i}: &x{i} {{<<: [*x{i - 1}, *x{i - 1}], k{i}: 1}}" for i in range(1, levels))])


# The text, and what must be in the error's one line.
NONSENSE_FILES = {
    "laughs, 9 levels": (laughs(9), "more than 10000 values"),
    "laughs, 40 levels": (laughs(40), "more than 10000 values"),
    "laughs of merged keys": (merged(60), "more than 10000 values"),
    "an alias to its own list": ("model: {layers: &a [*a]}", "*a on line 1 stands for what it is in"),
    "an alias to its own section": ("model: &a\n  layers: *a", "*a on line 2 stands for what it is in"),
    "an alias to the file": ("&a\nmodel: *a", "*a on line 2 stands for what it is in"),
    "a mapping that merges itself": ("model: &a {<<: *a}", "*a on line 1 stands for what it is in"),
    "an alias as its own key": ("model: &a {? *a : 1}", "*a on line 1 stands for what it is in"),
    "an alias to nothing": ("model: *a", "not YAML: found undefined alias"),
    "an anchor given twice": ("model: {layers: &a 2, heads: &a 2}", "not YAML: found duplicate anchor"),
    "10,000 lists in each other": ("model: " + "[" * 10_000, "more than 20 levels deep on line 1"),
    "10,000 closed lists in each other": ("a: " + "[" * 10_000 + "]" * 10_000, "more than 20 levels deep on line 1"),
    "10,000 mappings in each other": ("{a: " * 10_000, "more than 20 levels deep on line 1"),
    "10,000 dashes": ("- " * 10_000, "more than 20 levels deep on line 1"),
    "10,000 keys in each other": ("? " * 10_000, "more than 20 levels deep on line 1"),
    "100 indented keys": ("\n".join(" " * i + f"k{i}:" for i in range(100)), "more than 20 levels deep on line 21"),
    "10,001 values": ("data:\n  path: [" + "a, " * 10_001 + "]", "more than 10000 values"),
    "two megabytes": ("train: {out: " + "x" * 2**21 + "}", "more than 1048576 bytes"),
    "two megabytes of é": ("train: {out: " + "é" * 2**20 + "}", "more than 1048576 bytes"),
    "a comment of two megabytes": ("#" * 2**21, "more than 1048576 bytes"),
    "two documents": ("model: {}\n---\nmesh: {}", "not YAML: expected a single document"),
    "a directive": ("%YAML 7.0\n---\nmodel: {}", "not YAML: found incompatible YAML document"),
    "a tab": ("model:\n\tlayers: 2", "not YAML: while scanning for the next token found character '\\t'"),
    "a bell": ("model: {layers: \a}", "not YAML: unacceptable character #x0007"),
    "merging a number": ("model: {<<: 3}", "not YAML: while constructing a mapping"),
    "a surrogate for a key": ('model: {"\\udfff": 1}', "model.\\udfff = 1: no such key"),
    "an integer for a file": ("!!int abc", "= !!int abc: must be a mapping of sections"),
    "a list for an integer": ("model: {layers: !!int [1]}", "not YAML: expected a scalar node, but found sequence"),
    "no base64": ("model: {layers: !!binary ü}", "not YAML: failed to convert base64 data into ascii"),
    "no pairs": ("remat: {residuals: !!omap [1]}", "not YAML: while constructing an ordered map"),
    "a set for a section": ("model: !!set {layers}", "model = {'layers'}: must be a mapping of keys to values"),
    "an integer for a section": ("model: !!int abc", "model = !!int abc: must be a mapping of keys to values"),
    "a tagged section": ("model: !llama {layers: 2}", "model = !llama ...: must be a mapping of keys to values"),
    "a tagged key": ("model: {!!int x: 2}", "model.!!int x = 2: no such key"),
    "a key of two lines": ('model: {"a\\nb": 2}', "model.a\\nb = 2: no such key"),
    "a section of two lines": ('"a\\nb": 2', "a\\nb = 2: no such section"),
    "a long key": (f"model: {{? {'k' * 5000} : 2}}", "kkk... = 2: no such key"),
    "a long section": (f"? {'k' * 5000}\n: 2", "kkk... = 2: no such section"),
    "a pattern of two lines, twice": (
        'remat: {residuals: {"a\\nb": "c\\nd", "a\\nb": save}}',
        "remat.residuals.a\\nb = save: a duplicate key",
    ),
}

BIG, BIGGER = "9" * 4000, "9" * 5000  # Python reads no integer of more than 4300 digits

NONSENSE_VALUES = {
    # what contradicts its tag
    "train.steps=!!int abc": "!!int abc: must be an integer from 1",
    "train.steps=!!int ''": "must be an integer from 1",
    "train.steps=!!int 0x10": "!!int 0x10: must be an integer from 1",
    "train.steps=!!float abc": "!!float abc: must be an integer from 1",
    "train.learning_rate=!!float ''": "must be a number above 0",
    "train.steps=!!null x": "None: must be an integer from 1",
    "train.verify=!!bool maybe": "!!bool maybe: must be true or false",
    "train.steps=!!timestamp 2020-13-45": "!!timestamp 2020-13-45: must be an integer from 1",
    "train.steps=!!timestamp x": "!!timestamp x: must be an integer from 1",
    "train.steps=2020-13-45": "'2020-13-45': must be an integer from 1",
    "train.steps=2020-01-31": "'2020-01-31': must be an integer from 1",
    "train.steps=2020-01-31 25:61:61": "must be an integer from 1",
    "train.steps=!!python/object:os.system [ls]": "!!python/object:os.system ...: must be an integer from 1",
    "train.steps=!local x": "!local x: must be an integer from 1",
    "train.out=!!binary aGk=": "b'hi': must be a string",
    "remat.default=!!int abc": "default: !!int abc is not allowed",
    "remat.residuals=!!int abc": "residuals: !!int abc is not a mapping",
    "remat.residuals[fc1]=!!bool maybe": "residuals['fc1']: !!bool maybe is not allowed",
    "remat.residuals={fc1: save, fc1: offload}": "remat.residuals.fc1 = offload: a duplicate key",
    "remat.min_offload_bytes=!!int abc": "min_offload_bytes: !!int abc is not a size",
    "remat.offload_modules=[!!int abc]": "offload_modules: !!int abc is not allowed",
    # too large or too small
    f"train.steps={BIG}": f"train.steps = {'9' * 57}...: must be an integer from 1 to 2147483647",
    f"train.steps={BIGGER}": f"train.steps = {'9' * 57}...: must be an integer from 1 to 2147483647",
    f"train.steps=-{BIGGER}": "999...: must be an integer from 1 to 2147483647",
    f"train.learning_rate={BIG}": "999...: must be a number above 0, at most 1e+30",
    f"train.learning_rate={BIGGER}": "999...: must be a number above 0, at most 1e+30",
    f"train.weight_decay=-{BIG}": "999...: must be a number from 0 to 1e+30",
    f"train.learning_rate={BIGGER}.0": "inf: must be a number above 0, at most 1e+30",
    "train.learning_rate=1e31": "1e+31: must be a number above 0, at most 1e+30",
    "train.steps=1e300": "must be an integer from 1 to 2147483647",
    "train.steps=2147483648": "2147483648: must be an integer from 1 to 2147483647",
    "train.seed=4294967296": "4294967296: must be an integer from 0 to 4294967295",
    "train.seed=9223372036854775808": "9223372036854775808: must be an integer from 0 to 4294967295",
    "model.d_model=1000000000000": "1000000000000: must be an integer from 1 to 1048576",
    "model.d_model=.inf": "inf: must be an integer from 1 to 1048576",
    "model.vocab_size=1e12": "must be an integer from 257 to 16777216",
    "model.layers=1000000000000": "1000000000000: must be an integer from 1 to 10000",
    "model.heads=1000000000000": "1000000000000: must be an integer from 1 to 32768",
    "model.head_dim=1000000000000": "1000000000000: must be an integer from 2 to 32768 or null",
    "model.experts=1000000000000": "1000000000000: must be an integer from 0 to 32768",
    "mesh.data=1000000000000": "1000000000000: must be an integer from 1 to 1048576",
    "train.seq_len=1000000000000": "1000000000000: must be an integer from 1 to 2147483647",
    "train.profile_steps=[1, 1e12]": "must be [an integer from 0 to 2147483647",
    "train.batch_size=33554432": "train.seq_len = 2147483648: must be below 2**31",
    "train.batch_size=65536; train.seq_len=16384; model.experts=8; model.d_expert=64": (
        "model.experts_per_token = 2147483648: must be below 2**31"
    ),
    "remat.min_offload_bytes=.inf": "min_offload_bytes: inf is not a size",
    f"remat.min_offload_bytes='{BIG}.5KiB'": "is not a size",
    f"remat.min_offload_bytes='{BIGGER}KiB'": "is not a size",
    "remat.resident_layers=.inf": "resident_layers: inf is not allowed",
    "remat.offload_layers=.inf": "offload_layers: inf is not allowed",
    f"remat.offload_layers={BIGGER}": "999... is not allowed",
    # too deep, too many
    "train.steps=" + "[" * 10_000: "train.steps = [[[",
    "train.steps=&a [*a]": "*a on line 1 stands for what it is in",
    "data.path=[" + "a, " * 20_000 + "]": "more than 10000 values on line 1",
    # text that is not a line
    "train.steps=a\nb": "train.steps = 'a b': must be an integer",
    "train.steps='a\n\nb'": "train.steps = 'a\\nb': must be an integer",
    "train\nsteps": "train\\nsteps: an override must be section.key=value",
    "remat.residuals.a\nb=save": "an entry of a mapping is remat.residuals[a\\nb]=value",
    "train.steps[a\nb]=1": "train.steps[a\\nb] = 1: train.steps = 10 has no entries",
    "train.steps=[a\nb": "not YAML",
    "train.steps=\0": "train.steps = \\x00: not YAML: unacceptable character #x0000",
    "train.steps=\udcff": "train.steps = \\udcff: not YAML: unacceptable character #xdcff",
    "x" * 100_000: "xxx...: an override must be section.key=value",
    f"train.{'x' * 100_000}=1": "xxx... = 1: no such key",
    f"train.steps={'x' * 100_000}": "xxx...: must be an integer",
    f"remat.default={'x' * 100_000}": "is not allowed",
    f"remat.residuals={'x' * 100_000}": "is not a mapping",
    f"remat.residuals[{'x' * 100_000}]=save it": "is not allowed",
    f"remat.residuals[{'x y' * 100_000}]=save": "a pattern cannot have ' '",
    f"remat.offload_modules=[{'x' * 100_000}]": "is not allowed",
    f"remat.min_offload_bytes={'x' * 100_000}": "is not a size",
    f"distributed.coordinator={'x' * 100_000}:1": "must have coordinator, num_processes and process_id",
    f"data.cache_dir=~{'x' * 100_000}": "no such home",
}


def test_there_are_eighty_kinds_of_nonsense():
    assert len(NONSENSE_FILES) + len(NONSENSE_VALUES) >= 80


def assert_one_line(found, said):
    line = found[0]
    assert len(found) == 1 or "a duplicate key" in line  # which may itself be wrong
    assert said in line and line.isprintable() and len(line) < 800


@pytest.mark.parametrize("what", NONSENSE_FILES)
def test_nonsense_in_a_file_is_one_line(tmp_path, what):
    text, said = NONSENSE_FILES[what]
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert_one_line(problems(path), said)


@pytest.mark.parametrize("override", NONSENSE_VALUES, ids=lambda text: repr(text[:40]))
def test_a_nonsense_value_is_one_line(good, override):
    assert_one_line(problems(good, *override.split("; ")), NONSENSE_VALUES[override])


def listed(count):
    """Return a list with this many values, itself included."""
    return "[" + ", ".join(["a"] * (count - 1)) + "]"


@pytest.mark.parametrize(
    "text, more",
    [
        (listed(10_000), listed(10_001)),
        (
            f"[&a {listed(99)}{', *a' * 100}]",
            f"[&a {listed(99)}{', *a' * 100}, a]",
        ),  # 101 times 99, and the outer list
        (f"[&a [&b {listed(9)}, *b], *a, *b{', a' * (10_000 - 48)}]", None),
        ("[" * 21 + "]" * 21, "[" * 22 + "]" * 22),
    ],
)
def test_what_is_just_not_too_much_is_read(text, more):
    assert plain.load(text)[1] == []
    if more is not None:
        with pytest.raises(plain.Refused):
            plain.load(more)


def test_a_file_may_have_a_mebibyte(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_text(GOOD + "#" * (2**20 - len(GOOD)))
    assert load(path).train.steps == 10
    path.write_text(GOOD + "#" * (2**20 - len(GOOD) + 1))
    assert_one_line(problems(path), "more than 1048576 bytes")
    assert plain.shown("x" * 60) == "x" * 60 and plain.shown("x" * 61) == "x" * 57 + "..."


def test_anchors_that_mean_something_are_read(tmp_path):
    """A merged key may be overridden; that is not a duplicate."""
    path = tmp_path / "anchors.yaml"
    path.write_text(GOOD + "mesh: {<<: &one {data: &two 2, fsdp: 1}, fsdp: *two}\ndistributed: {<<: {}}\n")
    assert load(path).mesh == dataclasses.replace(Config().mesh, data=2, fsdp=2)


def test_a_name_that_no_file_has(good):
    for name in ("a\0b", "a\ud800b", "x" * 5000):
        with pytest.raises(ConfigError) as error:
            read(good.with_name(name))
        ((_, line),) = error.value.problems
        assert "cannot be read" in line and "must be a YAML file" in line and line.isprintable()


def test_every_integer_has_an_end():
    """An integer without an upper bound could exceed every type."""

    def ended(hint):
        if get_origin(hint) is Annotated:
            kind, allowed = get_args(hint)
            return kind is float or allowed.high < 2**32
        return hint is not int and all(map(ended, get_args(hint)))

    kinds = [kind for kind in SECTIONS.values() if not issubclass(kind, Policy)]  # which looks at its own
    hints = [hint for kind in kinds for hint in get_type_hints(kind, include_extras=True).values()]
    assert len(hints) > 50 and all(map(ended, hints)) and not ended(tuple[int, str]) and not ended(int | None)
