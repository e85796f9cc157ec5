"""Configs: one error lists everything that is wrong, each with its key, its value and what is allowed."""

import dataclasses
import json
from pathlib import Path

import pytest
from common import ROOT

from jaxoffload import residuals
from models.config import Config, ConfigError, Remat, flat, load
from models.sharding import abstract_mesh
from models.step import program

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

GOOD = """\
model: {vocab_size: 512, layers: 2, d_model: 64, heads: 4, kv_heads: 2, d_ff: 128}
remat: {residuals: {fc1: offload}, min_offload_bytes: 0}
train: {steps: 10, warmup_steps: 2, batch_size: 8, seq_len: 64, loss_chunk: 32}
"""

# Overrides, and how the line of the error begins and ends.
BAD_VALUES = {
    # names
    "train.step=5": ("train.step = 5: ", "Did you mean: 'steps'?"),
    "model.n_heads=5": ("model.n_heads = 5: ", "Did you mean one of: 'heads', 'kv_heads'?"),
    "modle.layers=5": ("modle = {'layers': 5}: ", "no such section; the nearest is model"),
    "optimizer.name=sgd": ("optimizer = {'name': 'sgd'}: ", "there are model, remat, mesh, data, train, distributed"),
    "remat.offload_layer=2": ("remat.offload_layer = 2: ", "no such key; the nearest is offload_layers"),
    # types and choices
    "train.steps=ten": ("train.steps = 'ten': ", "could not be converted to Integer"),
    "train.steps=": ("train.steps = None: ", "for field of type 'int'"),
    "data.path=[a.txt, 3]": ("data.path = ['a.txt', 3]: ", "incompatible with type hint 'Union[str, tuple[str, ...]]'"),
    "model.attention=cudn": ("model.attention = 'cudn': ", "expected one of ['xla', 'cudnn', 'te']"),
    "train.out=${data.nothing}": ("train.out = '${data.nothing}': ", "not found"),
    # ranges
    "model.layers=0": ("model.layers = 0: ", "must be above 0"),
    "model.aux_loss=-1; model.experts=4": ("model.aux_loss = -1: ", "must be at least 0"),
    "train.learning_rate=.inf": ("train.learning_rate = inf: ", "must be above 0"),
    "train.beta2=1": ("train.beta2 = 1: ", "must be at most 0.9999"),
    "data.valid_fraction=0.9": ("data.valid_fraction = 0.9: ", "must be at most 0.5"),
    # one key against another
    "model.kv_heads=3": ("model.kv_heads = 3: ", "must divide model.heads = 4"),
    "model.head_dim=5": ("model.d_model / model.heads or model.head_dim = 5: ", "must be even; RoPE rotates pairs"),
    "model.rope_scaling=[0, 0, 0, 0]": ("model.rope_scaling = [0", "must be above 0, the second below the third"),
    "model.rope_scaling=[8, 4, 4, 8192]": ("model.rope_scaling = [8", "the second below the third"),
    "remat.host_budget=1GiB": ("remat.host_budget = '1GiB': ", "needs remat.budget, for which a policy is planned"),
    "mesh.tensor=3": ("mesh.tensor = 3: ", "must divide model.heads = 4 and model.kv_heads = 2 and model.d_ff = 128 "),
    "mesh.fsdp=3; train.batch_size=6": ("mesh.fsdp * mesh.expert = 3: ", "must divide model.d_model = 64"),
    "model.aux_loss=0.1": ("model.aux_loss = 0.1: ", "must not be given where model.experts = 0; the layers are dense"),
    "model.experts=1": ("model.experts_per_token = 2: ", "must be at most model.experts = 1"),
    "model.experts=4; model.dense_layers=9": ("model.dense_layers = 9: ", "must be below model.layers = 2"),
    "model.experts=6; mesh.expert=4; train.batch_size=4": ("mesh.expert = 4: ", "must divide model.experts = 6"),
    "mesh.data=3": ("train.batch_size = 8: ", "train.grad_accumulation * mesh.data * mesh.fsdp * mesh.expert = 3"),
    "train.loss_chunk=48": ("train.loss_chunk = 48: ", "must divide train.seq_len = 64"),
    "train.warmup_steps=10": ("train.warmup_steps = 10: ", "must be below train.steps = 10"),
    "mesh.stage=3; model.vocab_size=513": ("mesh.stage * train.virtual_stages = 3: ", "model.dense_layers = 2"),
    "mesh.stage=2; train.interleave=false": ("train.interleave = False: ", "must be true where mesh.stage = 2"),
    "mesh.stage=2; model.vocab_size=513": ("mesh.stage * mesh.tensor = 2: ", "must divide model.vocab_size = 513"),
    "train.virtual_stages=2": ("train.virtual_stages = 2: ", "must be 1 where mesh.stage = 1"),
    "model.layers=4; mesh.stage=2; train.virtual_stages=2; train.optimizer_on_host=true": (
        "train.optimizer_on_host = True: ",
        "must be false",
    ),
    "model.attention=te; data.document_mask=true": ("data.document_mask = True: ", "whose kernels limit documents"),
    # the policy
    "remat.residuals[fc1]=ofload": ("remat.residuals['fc1']: ", "the nearest is 'offload'"),
    "remat.offload_modules=[moe_acts]": ("remat.offload_modules: ", "the nearest is 'moe_act'"),
    "remat.min_offload_bytes=1MB per leaf": ("remat.min_offload_bytes: ", "such as '512KiB'"),
    # overrides
    "steps=10": ("steps=10: ", "section.key[entry]=value for an entry of a mapping"),
    "remat.residuals.fc1=save": ("remat.residuals.fc1=save: ", "section.key[entry]=value for an entry of a mapping"),
    "train.steps=[1": ("train.steps = [1: ", ""),
    "train.steps[0]=1": ("train.steps[0]=1: ", "train.steps is not a mapping"),
}

# A file, and what its one line says.
BAD_FILES = {
    "duplicate key": (GOOD + "mesh: {data: 1, fsdp: 1, data: 2}\n", "found duplicate key data"),
    "duplicate section": (GOOD + "train:\n  steps: 40\n", "found duplicate key train"),
    "duplicate pattern": (GOOD.replace("{fc1: offload}", "{fc1: offload, fc1: save}"), "found duplicate key fc1"),
    "a list": ("- 1\n- 2\n", "must be a mapping of sections"),
    "a scalar section": (GOOD + "mesh: 8\n", "mesh = 8: must be a mapping of keys to values"),
    "a number for a section": (GOOD + "3: {a: 1}\n", "3 = {'a': 1}: no such section; there are model, remat"),
    "a number for a key": (GOOD + "mesh: {2: 8}\n", "mesh.2 = 8: Key '2'"),
    "no YAML": ("model: {layers: 2\ntrain: }", "line 2"),
    "no text": ("model: \0", "#x0000"),
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("override", BAD_VALUES)
def test_a_bad_value_is_one_line_with_key_value_and_what_is_allowed(good, override):
    (line,) = problems(good, *override.split("; "))
    begins, ends = BAD_VALUES[override]
    assert line.startswith(begins) and ends in line


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_file_is_one_line(tmp_path, what):
    text, said = BAD_FILES[what]
    (tmp_path / "bad.yaml").write_text(text)
    (line,) = problems(tmp_path / "bad.yaml")
    assert said in line


def test_a_missing_file_names_the_nearest_and_a_folder_is_no_config(good, tmp_path):
    assert problems(good.with_name("god.yaml")) == [f"{tmp_path}/god.yaml: no such file; the nearest is {good}"]
    (line,) = problems(tmp_path)
    assert line.startswith(f"{tmp_path}: ") and "directory" in line


@pytest.mark.claim("said-at-once")
def test_all_problems_are_collected_and_a_wrong_value_causes_no_second_one(good):
    wrong = [
        "train.steps=ten",
        "mesh.tensor=3",
        "modle.layers=1",
        "remat.default=x",
        "nonsense",
        "train.warmup_steps=x",
    ]
    found = problems(good, *wrong, "model.d_ff=x", "train.loss_chunk=x")
    keys = ("train.steps", "modle", "remat.default", "nonsense", "train.warmup_steps", "model.d_ff", "train.loss_chunk")
    assert len(found) == len(keys) and all(any(line.startswith(key) for line in found) for key in keys)
    (line,) = problems(good, "mesh.tensor=3", "train.seed=1")
    assert line.startswith("mesh.tensor = 3: ")


def test_overrides_are_yaml_the_last_of_a_key_wins_and_a_pattern_goes_last(good):
    overrides = ["train.learning_rate=1", "train.learning_rate=3e-4", "model.head_dim=32", "data.path=[a.txt, b.txt]"]
    overrides += ["remat.residuals[act]=save", "remat.residuals[mlp/*]=offload", "remat.residuals[fc1]=save"]
    config = load(good, [*overrides, "remat.residuals[moe/fc1.scale_inv]=offload", "mesh.data=2"])
    assert config.train.learning_rate == 3e-4 and config.model.d_head == 32 and config.mesh.data == 2
    assert config.data.path == ("a.txt", "b.txt")
    last = (("fc1", "save"), ("moe/fc1.scale_inv", "offload"))
    assert config.remat.residuals == (("act", "save"), ("mlp/*", "offload"), *last)
    assert load(good, ["remat.residuals={}"]).remat.residuals == ()
    good.write_text(GOOD.replace("{fc1: offload}", "{moe/fc1.scale_inv: save}"))
    assert load(good).remat.residuals == (("moe/fc1.scale_inv", "save"),)


def test_megatrons_modules_come_from_the_file_or_the_command_line(good):
    good.write_text(GOOD.replace("residuals:", "offload_modules: [attn_norm, core_attn], residuals:"))
    config = load(good, ["remat.residuals[attn/k]=save"])
    assert config.remat.rules[-2:] == (("fc1", "offload"), ("attn/k", "save"))
    made = program(config, abstract_mesh(config.mesh))
    table = residuals(made.loss, made.state.params, made.microbatch)
    rows = [row for row in table if "core_attn" in row.reason and row.state == "offloaded"]
    assert [row.names for row in rows] == [("attn/q",), ("attn/v",), ("attn/context",)]
    assert flat(config)["remat.offload_modules"] == ["attn_norm", "core_attn"]
    assert load(good, ["remat.offload_modules=[mlp_norm]"]).remat.rules == (
        ("mlp_input", "offload"),
        ("fc1", "offload"),
    )


@pytest.mark.parametrize("key, chunk", [("64", 64), ("1000", 250), ("1024", 256), ("257", 1)])
def test_a_chunk_of_logits_divides_the_sequence(tmp_path, key, chunk):
    (tmp_path / "empty.yaml").write_text("")
    assert load(tmp_path / "empty.yaml", [f"train.seq_len={key}"]).train.chunk == chunk


def test_a_config_is_frozen_hashable_and_its_run_is_named_after_the_file(good, monkeypatch):
    config = load(good)
    assert config.remat == Remat(residuals={"fc1": "offload"}, min_offload_bytes=0) and config.train.out == "runs/good"
    assert hash(config) == hash(load(good)) and config.model.d_head == 16
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3
    monkeypatch.setenv("HOME", str(good.parent))
    assert load("~/good.yaml", ["train.out=~/runs/x"]).train.out == f"{good.parent}/runs/x"
    good.write_text("")
    assert load(good).model == Config().model


def test_flat_is_json_with_the_width_of_a_head(good):
    values = flat(load(good, ["data.path=[a.txt]"]))
    assert json.loads(json.dumps(values)) == values
    assert values["model.head_dim"] == 16 and values["data.path"] == ["a.txt"]
    assert values["remat.residuals"] == [["fc1", "offload"]] and values["train.steps"] == 10


@pytest.mark.claim("configs")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_is_valid_and_has_a_comment_on_every_field(path):
    load(path)
    fields = [line for line in path.read_text().splitlines() if line.startswith("  ") and ": " in line]
    assert len(fields) > 10
    assert [line for line in fields if "#" not in line] == []
