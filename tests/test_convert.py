"""models/convert.py: weights of Hugging Face's layout, there and back."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from common import ROOT, fast_compiles
from flax import nnx

from models import checkpoints, convert, metrics, train
from models.attention import rotations
from models.config import Config, ConfigError, Model, load

safetensors = pytest.importorskip("safetensors.numpy", reason="needs the extra `convert`")
SHAPES = {
    "vocab_size": 300,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
LLAMA = SHAPES | {"model_type": "llama", "intermediate_size": 48, "tie_word_embeddings": True}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MODELS = {  # config.json
    "llama": LLAMA,
    "llama 3.2": LLAMA | {"rope_theta": 500.0, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
    "qwen3": SHAPES | {"model_type": "qwen3", "intermediate_size": 48, "head_dim": 16},
    "mixtral": SHAPES | EXPERTS | {"model_type": "mixtral", "intermediate_size": 24},
    "qwen3_moe": SHAPES | EXPERTS | {"model_type": "qwen3_moe", "moe_intermediate_size": 24, "head_dim": 16},
}
TRAIN = "train: {batch_size: 4, seq_len: 32, loss_chunk: 32, steps: 4, warmup_steps: 1}"


def described(folder: Path, model: dict) -> Path:
    """Return a folder with the config.json of a model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def written(folder: Path, model: dict, *more: str) -> Path:
    """Return a config whose model section is the one that is printed for a config.json."""
    section = convert.model_section(described(folder / "described", model))
    here = "\n  dtype: float32" + ("\n  grouped: ragged" if "num_local_experts" in model else "")
    path = folder / "test.yaml"
    path.write_text("\n".join((section + here, TRAIN, *more)))
    return path


def with_weights(path: Path, out: Path, step: int = 0) -> nnx.State:
    """Write a checkpoint with random parameters, and return them."""
    config = load(path, [f"train.out={out}"])
    state = convert.on_one_device(config, 1)
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda leaf: jax.device_put(draw(leaf.shape, np.float32) / 4, leaf.sharding), state.params)
    with checkpoints.open_manager(out) as manager:
        checkpoints.save(manager, step, state._replace(params=params), config, None)
    return params


def weights_of(config: Config) -> nnx.State:
    """Return the parameters of the checkpoint of step 0."""
    with checkpoints.open_manager(config.train.out) as manager:
        return checkpoints.restore(manager, 0, {"params": convert.on_one_device(config, 1).params})["params"]


def main(*arguments: object) -> int:
    return convert.main([*map(str, arguments)])


@pytest.mark.claim("converts")
@pytest.mark.parametrize(
    "model",
    [pytest.param(of, id=name, marks=[pytest.mark.slow] * name.startswith("qwen")) for name, of in MODELS.items()],
)
def test_there_and_back_every_bit_is_the_same(model, tmp_path):
    path = written(tmp_path, model)
    params = with_weights(path, tmp_path / "a")
    theirs = described(tmp_path / "theirs", model)
    assert main("export", path, theirs, f"train.out={tmp_path / 'a'}") == 0
    assert main("import", theirs, path, f"train.out={tmp_path / 'b'}") == 0
    back = weights_of(load(path, [f"train.out={tmp_path / 'b'}"]))
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.slow
@pytest.mark.claim("converts")
def test_masters_of_bfloat16_weights_are_imported_and_exported_bit_for_bit(tmp_path):
    path, out = written(tmp_path, MODELS["mixtral"]), f"train.out={tmp_path / 'a'}"
    params = with_weights(path, tmp_path / "a")
    config = load(path, [out, "model.param_dtype=bfloat16"])
    like = convert.on_one_device(config, 1)
    with checkpoints.open_manager(tmp_path / "a") as manager:
        wanted = checkpoints.checked(manager, 0, config, like.step.sharding.mesh)
        weights, remainders = checkpoints.converted(checkpoints.restore(manager, 0, wanted), like)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(weights)} == {"bfloat16", "float32"}
        state = like._replace(params=weights, optimizer=like.optimizer._replace(remainders=remainders))
        checkpoints.save(manager, 1, state, config, None)
    theirs = described(tmp_path / "theirs", MODELS["mixtral"])
    assert main("export", path, theirs, out, "model.param_dtype=bfloat16") == 0
    assert main("import", theirs, path, f"train.out={tmp_path / 'b'}", "model.param_dtype=bfloat16") == 0
    back = weights_of(load(path, [f"train.out={tmp_path / 'b'}"]))
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.claim("converts")
def test_files_have_the_names_and_shapes_of_mixtral(tmp_path):
    """As in the published files, scaled down: (outputs, inputs), a tensor per layer and expert. config.json stays."""
    path = written(tmp_path, MODELS["mixtral"])
    params = with_weights(path, tmp_path / "a")
    published = MODELS["mixtral"] | {"torch_dtype": "bfloat16", "max_position_embeddings": 131072, "eos_token_id": 2}
    described(tmp_path / "b", published)
    assert main("export", path, tmp_path / "b", f"train.out={tmp_path / 'a'}") == 0
    assert json.loads((tmp_path / "b/config.json").read_text()) == published
    index = json.loads((tmp_path / "b/model.safetensors.index.json").read_text())["weight_map"]
    files = {file: safetensors.load_file(tmp_path / "b" / file) for file in set(index.values())}
    got = {name: files[file][name] for name, file in index.items()}
    want = {"model.embed_tokens.weight": (300, 32), "model.norm.weight": (32,), "lm_head.weight": (300, 32)}
    for layer in range(3):
        of_layer = {
            "input_layernorm": (32,),
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
            "self_attn.o_proj": (32, 32),
            "post_attention_layernorm": (32,),
            "block_sparse_moe.gate": (4, 32),
        }
        for expert in range(4):
            each = {"w1": (24, 32), "w2": (32, 24), "w3": (24, 32)}
            of_layer |= {f"block_sparse_moe.experts.{expert}.{w}": shape for w, shape in each.items()}
        want |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    assert {name: tensor.shape for name, tensor in got.items()} == want
    assert {str(tensor.dtype) for tensor in got.values()} == {"bfloat16"}
    # Head 2's row 5 of the queries, and an expert's gate.
    ours = nnx.to_pure_dict(params)["layers"]
    row = got["model.layers.1.self_attn.q_proj.weight"][2 * 8 + 5]
    np.testing.assert_array_equal(row, ours["attention"]["q_DxNxH"][1, :, 2, 5].astype(jnp.bfloat16))
    gate = got["model.layers.2.block_sparse_moe.experts.3.w1.weight"]
    np.testing.assert_array_equal(gate.T, ours["moe"]["gate_ExDxF"][2, 3].astype(jnp.bfloat16))


def test_stretched_rotations_keep_fast_pairs_and_slow_down_slow_ones():
    """At position 1, pair i has turned by 1e6^(-i / 4)."""

    def angles(scaling):
        cos, sin = (np.asarray(part[1], np.float64) for part in rotations(2, 8, 1e6, scaling))
        return np.arctan2(sin, cos)

    plain, scaled = angles(None), angles((8, 1, 4, 64))
    np.testing.assert_allclose(plain, [1e6 ** (-i / 4) for i in range(4)], rtol=1e-5)
    turns = 64 * plain / (2 * np.pi)
    assert turns[0] > 4 and turns[1] < 1  # in a sequence of 64
    np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(scaled[1:], plain[1:] / 8, rtol=1e-5)


# ---- what cannot be converted ----


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2': must be one of llama, mistral, qwen3"),
        ({"attention_bias": True}, "attention_bias = True: the model cannot represent it"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu': the model cannot represent it"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling = {'type': 'linear', 'factor': 2.0}: the model cannot represent it",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: is missing; llama has it"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: the model cannot represent it"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}: the model cannot represent it"),
        ({"model_type": "qwen3_moe"}, "num_experts_per_tok: is missing; qwen3_moe has it"),
        ({"sliding_window": 16}, "train.seq_len = 32: must be at most 16, over which attention slides"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers = [0]: the model cannot represent it"),
        ({"hidden_size": 64, "head_dim": 8}, "model.d_model = 32: must be 64 in llama's config.json"),
        ({"rope_theta": 1e6}, "model.rope_theta = 10000.0: must be 1000000.0"),
        ({"tie_word_embeddings": False}, "model.tied_embeddings = True: must be False"),
        ({}, "29 tensors are missing, such as model.embed_tokens.weight"),
    ],
)
def test_what_cannot_be_imported_is_said(change, said, tmp_path, capsys):
    path = written(tmp_path, MODELS["llama"])
    assert main("import", described(tmp_path / "theirs", LLAMA | change), path, f"train.out={tmp_path / 'out'}") == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "cannot be converted:" and any(said in line for line in lines)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text, said", [("{", "config.json: Expecting"), ("[]", "config.json: must be a mapping")])
def test_a_config_that_is_none_is_named(text, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    for command in (("model", tmp_path), ("import", tmp_path, written(tmp_path, MODELS["llama"]))):
        assert main(*command) == 2 and said in capsys.readouterr().err


def test_a_file_of_weights_that_ends_early_is_named(tmp_path, capsys):
    folder = described(tmp_path / "theirs", LLAMA)
    (tmp_path / "theirs/model.safetensors").write_bytes(b"x")
    assert main("import", folder, written(tmp_path, MODELS["llama"]), f"train.out={tmp_path / 'out'}") == 2
    assert "theirs/model.safetensors: " in capsys.readouterr().err


def test_tensors_that_are_missing_or_unknown_or_of_another_shape_are_named(tmp_path, capsys):
    path = written(tmp_path, MODELS["llama"])
    with_weights(path, tmp_path / "a")
    assert main("export", path, described(tmp_path / "b", LLAMA), f"train.out={tmp_path / 'a'}") == 0
    name = "model.layers.1.self_attn.q_proj.weight"
    files = [*(tmp_path / "b").glob("*.safetensors")]
    file = next(file for file in files if name in safetensors.load_file(file))
    tensors = safetensors.load_file(file)

    def said(tensors: dict, code: int = 2) -> str:
        safetensors.save_file(tensors, file)
        capsys.readouterr()
        assert main("import", tmp_path / "b", path, f"train.out={tmp_path / 'c'}") == code
        return capsys.readouterr().err

    less = {key: value for key, value in tensors.items() if key != name}
    assert f"1 tensors are missing, such as {name}" in said(less)
    assert "1 tensors have no place in the model, such as x.bias" in said(tensors | {"x.bias": tensors[name]})
    assert f"{name}: is (8, 32); must be (32, 32)" in said(tensors | {name: tensors[name][:8].copy()})
    # What transformers leaves out, or writes although it follows from something else.
    extra = {"model.rotary_emb.inv_freq": np.ones(4), "lm_head.weight": tensors[name]}
    said(tensors | extra, code=0)
    assert "has a checkpoint; give another folder" in said(tensors)


@pytest.mark.parametrize(
    "override, said",
    [
        ("shared_experts=1", "model.shared_experts = 1: must be 0 in mixtral"),
        ("renormalize=false", "model.renormalize = False: must be True in mixtral"),
        ("dense_layers=1", "model.dense_layers = 1: must be 0 in mixtral"),
        ("qk_norm=true", "model.qk_norm = True: must be False in mixtral"),
        ("grouped=ragged", "has no checkpoint"),
    ],
)
def test_what_cannot_be_exported_is_said(override, said, tmp_path, capsys):
    path, theirs = written(tmp_path, MODELS["mixtral"]), described(tmp_path / "b", MODELS["mixtral"])
    assert main("export", path, theirs, f"train.out={tmp_path / 'out'}", f"model.{override}") == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
    described(tmp_path / "b", MODELS["mixtral"] | {"dtype": "float99"})
    assert main("export", path, theirs, f"train.out={tmp_path / 'out'}") == 2
    assert "dtype 'float99': must be one of bfloat16, float16, float32" in capsys.readouterr().err
    assert main("export", path, tmp_path / "nowhere") == 2
    assert f"No such file or directory: '{tmp_path}/nowhere/config.json'" in capsys.readouterr().err


@pytest.mark.claim("new-fields")
def test_what_a_fork_adds_is_refused_by_its_name(monkeypatch):
    fields = [(name, int | None, None) for name in ("window", "sinks")]
    fork = dataclasses.make_dataclass("Model", fields, bases=(Model,), frozen=True)
    model = fork(**convert.read_model(LLAMA), window=4)
    monkeypatch.setattr(convert, "Model", fork)
    with pytest.raises(ConfigError) as caught:
        convert.check_model(LLAMA, Config(model=model))
    assert str(caught.value) == "model.window = 4: must be None in llama's config.json"
    added = {"layers": {"attention": {"sinks_N": nnx.Param(jnp.ones((1, 4)))}}}
    with pytest.raises(ConfigError, match=r"^params/layers/attention/sinks_N: none of llama's tensors is known for it"):
        convert.tensors_of(nnx.State(added), "llama")


def test_neither_files_nor_another_model_are_mixed_up(tmp_path, capsys):
    path = written(tmp_path, MODELS["llama"])
    with_weights(path, tmp_path / "a")
    out, theirs = f"train.out={tmp_path / 'a'}", described(tmp_path / "b", LLAMA | {"intermediate_size": 64})
    assert main("export", path, theirs, out, "model.d_ff=64") == 2
    assert "model.d_ff = 64: it was 48" in capsys.readouterr().err
    (theirs / "model.safetensors").write_text("")
    assert main("export", path, described(theirs, LLAMA), out) == 2
    assert f"{theirs}: has weights; give another folder" in capsys.readouterr().err


# ---- training begins with them ----


@pytest.mark.long
@pytest.mark.claim("converts")
def test_training_begins_with_imported_weights(tmp_path, monkeypatch):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(" ".join(f"{number} {n * n}" for n in range(200)))
    path = written(tmp_path, MODELS["llama"], f"data: {{path: {tmp_path}/*.txt, valid_fraction: 0.2}}")
    first, second = f"train.out={tmp_path / 'a'}", f"train.out={tmp_path / 'b'}"
    run = [str(path), "train.batch_size=8", "train.learning_rate=3e-2"]
    with fast_compiles():
        assert train.main([*run, first, "mesh.data=4", "mesh.fsdp=2"]) == 0
        theirs = described(tmp_path / "theirs", LLAMA)
        assert main("export", path, theirs, first) == 0
        assert main("import", theirs, path, second) == 0
        monkeypatch.setattr(train, "compile_step", lambda made: (lambda *_: sys.exit("it begins"), True))
        with pytest.raises(SystemExit, match="it begins"):
            # Another batch size than in the config that they were imported with.
            train.main([*run, second, "mesh.fsdp=8", "train.steps=2"])
    valid = lambda out: {r["step"]: r["valid_loss"] for r in metrics.read(out / "metrics.jsonl") if "valid_loss" in r}
    np.testing.assert_allclose(valid(tmp_path / "b")[0], valid(tmp_path / "a")[4], rtol=1e-5)
    assert valid(tmp_path / "a")[4] < valid(tmp_path / "a")[0] - 0.1


@pytest.mark.slow
@pytest.mark.claim("fine-tune")
def test_fine_tuning_from_start_to_end(tmp_path, monkeypatch, capsys):
    """The page's commands, with smaller sizes: import, train, export."""
    _, _, after = (ROOT / "docs/training.md").read_text().partition("<!-- claim: fine-tune -->")
    _, *commands = after.partition("```\n")[2].partition("```")[0].replace("\\\n", " ").strip().splitlines()
    sizes = {"vocab_size": 300, "layers": 3, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 48, "attention": "xla"}
    small = [f"model.{key}={value}" for key, value in sizes.items()]
    small += [
        "mesh.fsdp=8",
        "train.batch_size=16",
        "train.grad_accumulation=2",
        "train.seq_len=32",
        "train.loss_chunk=32",
    ]
    small += ["train.warmup_steps=1", "remat.min_offload_bytes=0", "train.steps=3"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.jsonl").write_text("\n".join(json.dumps({"text": f"the {n}th line " * 99}) for n in range(99)))
    llama = LLAMA | {"rope_theta": 500000.0, "tie_word_embeddings": False}
    with_weights(written(tmp_path, llama), tmp_path / "a")
    theirs = described(tmp_path / "llama3", llama)
    assert main("export", tmp_path / "test.yaml", theirs, f"train.out={tmp_path / 'a'}") == 0
    bpe = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|end_of_text|>": 0, "<unk>": 1, "the": 2}, "<unk>"))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    bpe.add_special_tokens(["<|end_of_text|>"])
    bpe.save(str(theirs / "tokenizer.json"))
    with fast_compiles():
        for command in commands:
            program, *arguments = shlex.split(command)
            if program == "python":
                run = {"models.train": train.main, "models.convert": convert.main}[arguments[1]]
                assert run([*arguments[2:], *small]) == 0, capsys.readouterr().err
            else:
                subprocess.run(command, shell=True, check=True)
    read = lambda of: {
        k: x for path in (tmp_path / of).glob("*.safetensors") for k, x in safetensors.load_file(path).items()
    }
    tuned, before = read("llama3-mine"), read("llama3")
    assert tuned.keys() == before.keys() and any((tuned[name] != before[name]).any() for name in tuned)
