"""Configs: what is wrong with one is said all at once, with the key, its value and what to write instead."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxoffload import Policy
from models.config import Config, flat, load, parse
from models.reading import ConfigError
from models.report import check_patterns, report

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))

GOOD = """\
model: {vocab_size: 512, layers: 2, d_model: 64, heads: 4, kv_heads: 2, d_ff: 128}
remat: {residuals: {fc1: offload}, min_offload_bytes: 0}
train: {steps: 10, warmup_steps: 2, batch_size: 8, seq_len: 64, loss_chunk: 32}
"""

# What is written, the line's (key, value, advice): all three must be in the one line of the error.
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
    "train.steps=ten": ("train.steps", "'ten'", "an integer of at least 1"),
    "train.steps=1.5": ("train.steps", "1.5", "an integer of at least 1"),
    "train.steps=true": ("train.steps", "True", "an integer of at least 1"),
    "train.steps=": ("train.steps", "None", "an integer of at least 1"),
    "train.steps=0x10": ("train.steps", "'0x10'", "an integer of at least 1"),
    "train.steps=1:30": ("train.steps", "'1:30'", "an integer of at least 1"),
    "train.steps=1e-1": ("train.steps", "0.1", "an integer of at least 1"),
    "train.steps=1e400": ("train.steps", "inf", "an integer of at least 1"),
    "train.steps=[1]": ("train.steps", "[1]", "an integer of at least 1"),
    "train.learning_rate=fast": ("train.learning_rate", "'fast'", "a number above 0"),
    "model.tied_embeddings=1": ("model.tied_embeddings", "1", "true or false"),
    "model.head_dim=wide": ("model.head_dim", "'wide'", "an integer of at least 2 or null"),
    "data.path=3": ("data.path", "3", "a string or a list of strings"),
    "data.path=[a.txt, 3]": ("data.path", "['a.txt', 3]", "a string or a list of strings"),
    "data.tokenizer=7": ("data.tokenizer", "7", "a string or null"),
    "train.profile_steps=20": ("train.profile_steps", "20", "[an integer of at least 0, an integer of at least 0] or"),
    "train.profile_steps=[2]": ("train.profile_steps", "[2]", "[an integer of at least 0, an integer of at least 0]"),
    "train.profile_steps=[-1, 2]": ("train.profile_steps", "[-1, 2]", "[an integer of at least 0, an integer"),
    "train.profile_steps=[2, x]": ("train.profile_steps", "[2, 'x']", "[an integer of at least 0, an integer"),
    "train.out=4": ("train.out", "4", "must be a string"),
    # ranges
    "model.vocab_size=256": ("model.vocab_size", "256", "an integer of at least 257"),
    "model.layers=0": ("model.layers", "0", "an integer of at least 1"),
    "mesh.fsdp=-1": ("mesh.fsdp", "-1", "an integer of at least 1"),
    "train.learning_rate=0": ("train.learning_rate", "0", "a number above 0"),
    "train.learning_rate=.inf": ("train.learning_rate", "inf", "a number above 0"),
    "train.clip_norm=.nan": ("train.clip_norm", "nan", "a number above 0"),
    "train.final_learning_rate_fraction=1.5": ("train.final_learning_rate_fraction", "1.5", "a number from 0 to 1"),
    "train.beta2=1": ("train.beta2", "1", "a number from 0 to 0.9999"),
    "train.weight_decay=-0.1": ("train.weight_decay", "-0.1", "a number of at least 0"),
    "train.seed=-1": ("train.seed", "-1", "an integer of at least 0"),
    "data.valid_fraction=0.9": ("data.valid_fraction", "0.9", "a number from 0.0001 to 0.5"),
    # choices
    "model.attention=cudn": ("model.attention", "'cudn'", "xla or cudnn or te; the nearest is cudnn"),
    "model.attention=null": ("model.attention", "None", "xla or cudnn or te"),
    "model.dtype=bf16": ("model.dtype", "'bf16'", "bfloat16 or float32; the nearest is bfloat16"),
    "model.quantize=FP": ("model.quantize", "'FP'", "fp8 or null; the nearest is fp8"),
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
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


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


def test_a_missing_file_beside_no_other_says_what_to_give(tmp_path):
    (line,) = problems(tmp_path / "nowhere" / "x.yaml")
    assert line == f"{tmp_path}/nowhere/x.yaml: no such file; give a YAML file, such as configs/tiny.yaml"


def test_a_folder_and_a_binary_are_no_configs(tmp_path):
    (line,) = problems(tmp_path)
    assert str(tmp_path) in line and "must be a YAML file" in line
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    (line,) = problems(tmp_path / "x.yaml")
    assert "x.yaml" in line and "must be a YAML file" in line


def test_all_problems_are_collected(good):
    found = problems(good, "train.steps=ten", "mesh.tensor=3", "modle.layers=1", "remat.default=x", "nonsense")
    keys = ("nonsense", "train.steps", "mesh.tensor", "modle", "remat.default")
    assert all(any(line.startswith(key) for line in found) for key in keys)


def test_a_wrong_value_causes_no_second_problem(good):
    assert len(problems(good, "model.heads=x", "train.loss_chunk=x", "train.warmup_steps=x")) == 3


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
    (line,) = error.value.problems
    assert line.startswith("remat.offload_modules['router_fc1'] -> 'moe/router_logits': no tagged value")


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
    assert lines == list(problems(good, "train.steps=x"))
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


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_is_valid_and_has_a_comment_on_every_field(path):
    load(path)
    fields = [line for line in path.read_text().splitlines() if line.startswith("  ") and ": " in line]
    assert len(fields) > 10
    assert [line for line in fields if "#" not in line] == []
