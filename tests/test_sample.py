"""models/sample.py: the tokens that a plain loop over a growing text gives, and text from a checkpoint."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import fast_compiles
from flax import nnx

from jaxoffload import Policy
from models import sample, train
from models.config import Model
from models.sample import generate
from models.transformer import Transformer, logits

TINY = Model(vocab_size=300, layers=2, d_model=32, heads=4, kv_heads=2, d_ff=48, dtype="float32")
EXPERTS = replace(TINY, layers=2, dense_layers=1, experts=4, d_expert=24, grouped="ragged")
PROMPT = [0, 17, 250, 3]


@pytest.fixture(autouse=True)
def compiled_fast():
    with fast_compiles():
        yield


def random_model(config: Model) -> Transformer:
    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda x: x + 0.2 * draw(x.shape, np.float32), nnx.state(model))
    nnx.update(model, params)
    return model


def next_logits(model: Transformer, tokens: list[int]) -> np.ndarray:
    return np.asarray(logits(model, model(jnp.array([tokens]), Policy())[0])[0, -1])


def generated(model: Transformer, length: int, temperature: float, end: int, key: jax.Array) -> tuple[list[int], int]:
    tokens = jnp.zeros(length, jnp.int32).at[: len(PROMPT)].set(jnp.array(PROMPT))
    graph, params = nnx.split(model)
    run = jax.jit(lambda params: generate(nnx.merge(graph, params), tokens, len(PROMPT), (temperature, end), key))
    found, count = run(params)
    return found.tolist(), int(count)


@pytest.mark.claim("samples")
@pytest.mark.parametrize("config", [TINY, pytest.param(EXPERTS, marks=pytest.mark.slow)], ids=["dense", "experts"])
def test_without_temperature_it_is_the_likeliest_token_of_a_growing_text(config):
    model, want = random_model(config), [*PROMPT]
    for _ in range(2):
        want.append(int(np.argmax(next_logits(model, want))))
    assert generated(model, len(want), 0.0, 299, jax.random.key(0)) == (want, len(want))
    # It stops behind the token that ends a document, which a prompt may have at its end, too.
    assert generated(model, len(want), 0.0, want[4], jax.random.key(0)) == ([*want[:5], 0], 5)
    assert generated(model, 5, 0.0, PROMPT[-1], jax.random.key(0)) == (want[:5], 5)


@pytest.mark.claim("samples")
def test_with_a_temperature_tokens_are_as_frequent_as_likely():
    model = random_model(TINY)
    graph, params = nnx.split(model)
    tokens = jnp.array([*PROMPT, 0])
    draw = lambda key: generate(nnx.merge(graph, params), tokens, len(PROMPT), (0.5, 299), key)[0][-1]
    drawn = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), 4000))
    frequency = np.bincount(np.asarray(drawn), minlength=300) / 4000
    likely = np.asarray(jax.nn.softmax(next_logits(model, PROMPT) / 0.5))
    distance = lambda p: np.abs(frequency - p).sum() / 2
    assert distance(likely) < 0.1 < distance(np.asarray(jax.nn.softmax(next_logits(model, PROMPT))))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Path]:
    """A config and its corpus, in which each document is the alphabet, over and over."""
    folder = tmp_path_factory.mktemp("run")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} " + "abcdefghijklmnopqrstuvwxyz" * 12)
    path = folder / "test.yaml"
    path.write_text(
        "model: {vocab_size: 257, layers: 1, d_model: 64, heads: 4, kv_heads: 2, d_ff: 96, dtype: float32}\n"
        f"data: {{path: {folder}/*.txt, valid_fraction: 0.2, cache_dir: {folder}/cache}}\n"
        "train: {batch_size: 16, seq_len: 64, loss_chunk: 64, steps: 80, warmup_steps: 5, learning_rate: 1e-2,\n"
        f"  eval_batches: 1, checkpoint_every: 60, out: {folder}/out}}\n"
    )
    with fast_compiles():
        assert train.main([str(path), "mesh.data=8"]) == 0
    return path, folder / "out"


def said(capsys, *arguments: object, code: int = 0) -> str:
    capsys.readouterr()
    assert sample.main([*map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.mark.slow
@pytest.mark.claim("samples")
def test_a_trained_model_continues_the_alphabet(run, capsys):
    path, _ = run
    continued = ["--prompt", "cdefgh", "--tokens", "12"]
    assert said(capsys, path, *continued, "--temperature", "0") == "cdefghijklmnopqrst\n"
    # Trained on 8 devices; of the checkpoint before; hot.
    assert said(capsys, path, *continued, "--checkpoint", "60", "--temperature", "0").startswith("cdefgh")
    hot = lambda seed: said(capsys, path, *continued, "--temperature", "3", "--seed", seed)
    assert hot(1) == hot(1) != hot(2)
    assert said(capsys, path, "--tokens", "3", "--begin", "c", "--temperature", "0") == "def\n"


@pytest.mark.slow
def test_what_cannot_be_sampled_is_one_line(run, capsys):
    path, out = run
    line = lambda *arguments: said(capsys, path, *arguments, code=2).splitlines()[1]
    assert line("--tokens", "64") == "--tokens = 64: must be at most train.seq_len = 64 with the 1 tokens of the prompt"
    assert line("--checkpoint", "7") == f"train.out = '{out}': has no checkpoint of step 7; it has those of 60, 80"
    assert line("train.out=/nowhere") == "train.out = '/nowhere': has no checkpoint"
    assert line("--begin", "<s>") == "--begin = '<s>': must be a token of data.tokenizer"
    assert line("model.d_ff=64").startswith("model.d_ff = 64: the checkpoint in")
    assert line(f"data.path={out.parent}/1.txt").startswith("data.path = ")  # a tokenizer of other text
    for wrong in (["--tokens", "0"], ["--temperature", "-1"], ["--temperature", "nan"]):
        with pytest.raises(SystemExit) as left:
            sample.main([str(path), *wrong])
        assert left.value.code == 2


@pytest.mark.slow
def test_a_given_tokenizer_is_read_without_the_text_and_must_be_the_same(run, capsys, tmp_path):
    path, _ = run
    (given,) = (path.parent / "cache").glob("*/tokenizer.json")
    (tmp_path / "tokenizer.json").write_bytes(given.read_bytes())
    asked = [path, f"data.tokenizer={tmp_path}/tokenizer.json", f"train.out={tmp_path}/out"]
    short = ["train.steps=2", "train.warmup_steps=1", "mesh.data=8"]
    assert train.main([*map(str, asked), *short]) == 0
    nowhere = ["data.path=/nowhere/*.txt", "--tokens", "4", "--temperature", "0"]
    assert len(said(capsys, *asked, *nowhere)) > 1
    (tmp_path / "tokenizer.json").write_bytes(given.read_bytes() + b" ")
    assert "is not what it was when the run's checkpoint was written" in said(capsys, *asked, *nowhere, code=2)
