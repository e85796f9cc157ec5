"""models/data.py: every document on one side, packed into rows that any number of processes reads and resumes."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from common import ROOT

from models import data
from models.config import Config, ConfigError, Data, Model, Train, load

WORDS = ["def", "return", "naïve", "漢字", "🎉", "\r\n", "\t", "  ", "x=1", "\x00", "<|endoftext|>"]
TEXTS = [" ".join(random.Random(number).choices(WORDS, k=60)) + f" {number}" for number in range(80)]
TRAIN = Train(batch_size=8, seq_len=32, eval_batches=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Return a glob that matches one .txt file per text."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_bytes(text.encode())
    return f"{folder}/*.txt"


@pytest.fixture
def config(corpus) -> Config:
    return Config(model=Model(vocab_size=300), data=Data(path=corpus, valid_fraction=0.3), train=TRAIN)


def changed(config: Config, section: str, **values) -> Config:
    return replace(config, **{section: replace(getattr(config, section), **values)})


def take(batches, count: int) -> np.ndarray:
    return np.stack([next(batches) for _ in range(count)])


def texts_in(tokens: np.ndarray) -> list[str]:
    """Return the documents of bytes, each of which ends with 256; of the last one, what there is."""
    pieces = np.split(tokens, np.flatnonzero(tokens == 256) + 1)
    return [bytes(piece[piece != 256].astype(np.uint8)).decode(errors="ignore") for piece in pieces if len(piece)]


def held_out(text: str, fraction: float = 0.3) -> bool:
    return data.side([text], fraction, held_out=True) == [text]


# ---- documents ----


def all_documents(path: str | tuple[str, ...], rows: int = 8, field: str = "text") -> list[str]:
    documents = data.Documents(data.files_of(path), field, rows)
    return [text for index in range(len(documents)) for text in documents[index]]


def test_documents_are_the_same_from_txt_jsonl_and_parquet(corpus, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    lines = [json.dumps({"id": 7, "body": text}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:30], "", *lines[30:]]) + "\n")
    pyarrow.parquet.write_table(pyarrow.table({"body": [*TEXTS, "", None]}), tmp_path / "a.parquet", row_group_size=7)
    assert all_documents(corpus) == TEXTS
    assert all_documents(f"{tmp_path}/*.jsonl", field="body") == TEXTS
    assert all_documents(f"{tmp_path}/*.parquet", field="body") == TEXTS
    assert len(data.Documents([tmp_path / "a.parquet"], "body", 8)) == 12  # of 82 rows
    twice = (corpus, str(Path(corpus).parent / "0*"))
    assert all_documents(twice) == TEXTS


@pytest.mark.parametrize("size", [1, 2, 7, 40, 4000])
def test_each_line_is_in_one_block(size, tmp_path):
    draw = random.Random(size)
    lines = ["x" * draw.randrange(30) + "\n" for _ in range(100)] + ["no end"]
    file = tmp_path / "a.txt"
    file.write_text("".join(lines))
    blocks = [data.lines_that_begin(file, start, start + size) for start in range(0, file.stat().st_size, size)]
    assert [line.decode() for block in blocks for line in block] == lines


def test_what_is_no_utf_8_and_half_of_a_surrogate_pair_are_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.jsonl").write_text('{"text": "a\\ud800b"}')
    assert all_documents(f"{tmp_path}/*") == ["caf\ufffd", "a?b"]


@pytest.mark.claim("make-train")
def test_stdlib_is_the_library_without_tests_and_packages():
    names = [str(file) for file in data.files_of("stdlib")]
    assert len(names) > 300 and any(name.endswith("/argparse.py") for name in names)
    assert not [name for name in names if "/site-packages/" in name or "/test/" in name]


@pytest.mark.claim("configs")
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_data_of_each_config_fills_its_batches(path):
    config = load(path)
    source = data.open_data(config)
    assert next(source.batches).shape == (config.train.batch_size, config.train.seq_len + 1)
    assert {batch.shape for batch in source.held_out} == {(config.train.batch_size, config.train.seq_len + 1)}


@pytest.mark.parametrize(
    "files, path, said",
    [
        ({}, "*.txt", "matches no file; allowed are 'stdlib' and globs of .txt, .jsonl and .parquet files"),
        ({"a.csv": "x"}, "*", "matches no file"),
        ({"a.txt": "short"}, "*", "has 1 blocks of text, fewer than train.batch_size = 8"),
        ({f"{n}.jsonl": "{" for n in range(9)}, "*", "0.jsonl cannot be read as text, or as records with"),
        ({f"{n}.jsonl": '{"body": "x"}' for n in range(9)}, "*", "data.text_field = 'text' (KeyError('text'))"),
        ({f"{n}.jsonl": '{"text": 5}' for n in range(9)}, "*", "0.jsonl cannot be read as text, or as records with"),
        (
            {f"{n}.jsonl": '{"text": ["x"]}' for n in range(9)},
            "*",
            "0.jsonl cannot be read as text, or as records with",
        ),
        ({"a.parquet": "x"}, "*", "a.parquet cannot be read as .parquet"),
        ({f"{n}.txt": f"{n}" for n in range(9)}, "*", "data.valid_fraction = 0.3: holds out 0 rows of train.seq_len"),
    ],
)
def test_what_is_wrong_with_the_data_is_said(files, path, said, config, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        data.open_data(changed(config, "data", path=f"{tmp_path}/{path}"))
    assert said in str(caught.value)
    with pytest.raises(ConfigError, match=r"data.path = \(\): names no file"):
        data.open_data(changed(config, "data", path=()))


# ---- tokens ----


def saved_tokenizer(folder: Path, end: str = "<|endoftext|>") -> str:
    """Write a byte-level tokenizer that truncates and pads, and return its path."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.enable_truncation(5)
    bpe.enable_padding(length=9)
    bpe.save(f"{folder}/tokenizer.json")
    return f"{folder}/tokenizer.json"


@pytest.mark.claim("tokenizer-json")
@pytest.mark.parametrize("end", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>"])
def test_documents_come_back_from_the_tokens_of_a_tokenizer_and_end_with_its_end(end, config, tmp_path):
    path = saved_tokenizer(tmp_path, end)
    encoder, bpe = data.open_encoder(changed(config, "data", tokenizer=path)), tokenizers.Tokenizer.from_file(path)
    assert encoder.end == bpe.token_to_id(end)
    tokens = encoder.encode(TEXTS)
    # A document in which the end is written does not end there.
    pieces = np.split(tokens, np.flatnonzero(tokens == encoder.end) + 1)[:-1]
    assert [bpe.decode(piece[:-1].tolist()) for piece in pieces] == TEXTS
    source = data.open_data(changed(config, "data", tokenizer=path))
    assert source.end == encoder.end and next(source.batches).max() < 290
    assert source.fingerprint != data.open_data(config).fingerprint


def test_without_a_tokenizer_tokens_are_bytes(config):
    encoder = data.open_encoder(config)
    tokens = encoder.encode(TEXTS)
    assert encoder.end == 256 and tokens.dtype == np.int32 and texts_in(tokens) == TEXTS
    assert len(encoder.encode([])) == 0
    with pytest.raises(ConfigError, match=r"^model.vocab_size = 256: must be 257 or more without data.tokenizer"):
        data.open_encoder(changed(config, "model", vocab_size=256))


def test_tokenizers_that_cannot_be_used_are_refused(config, tmp_path):
    path = saved_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"^model.vocab_size = 270: must be 290 or more with "):
        data.open_encoder(changed(changed(config, "data", tokenizer=path), "model", vocab_size=270))
    for name, content in {
        "none": None,
        "bad": "no",
        "endless": tokenizers.Tokenizer(tokenizers.models.BPE()).to_str(),
    }.items():
        if content:
            (tmp_path / name).write_text(content)
        with pytest.raises(
            ConfigError, match=r"^data.tokenizer = .*(allowed is a tokenizer.json|must have one of the)"
        ):
            data.open_encoder(changed(config, "data", tokenizer=f"{tmp_path}/{name}"))


# ---- batches ----


@pytest.mark.claim("held-out")
def test_an_epoch_has_each_document_once_and_none_that_is_held_out(config):
    # One row reads all blocks. The texts held out are those of the evaluation, and equal ones are on one side.
    source = data.open_data(changed(config, "train", batch_size=1, seq_len=15, eval_batches=10_000))
    training = [text for text in TEXTS if not held_out(text)]
    assert 10 < len(training) < 70
    tokens = take(source.batches, 2 * sum(len(text.encode()) + 1 for text in training) // 16).ravel()
    found = texts_in(tokens)
    first, second = found[: len(training)], found[len(training) : -1]
    assert sorted(first) == sorted(training) and first != training
    assert set(second) <= set(training) and first[: len(second)] != second
    rest = texts_in(np.concatenate(source.held_out).ravel())
    # All but what does not fill the last row.
    assert set(rest[:-1]) <= {text for text in TEXTS if held_out(text)} and len(rest) > 10


@pytest.mark.claim("held-out")
def test_a_held_out_batch_has_all_rows_or_as_many_microbatches_as_there_are(config):
    total = sum(len(text.encode()) + 1 for text in TEXTS if held_out(text))
    sizes = lambda **train: [batch.shape for batch in data.open_data(changed(config, "train", **train)).held_out]
    assert sizes() == [(8, 33)] * 2
    length = total // 7 - 1  # 7 rows are held out
    assert sizes(seq_len=length - 1, grad_accumulation=2) == [(4, length)]
    assert sizes(seq_len=length - 1, grad_accumulation=8) == [(7, length)]
    with pytest.raises(ConfigError, match=r"holds out 7 rows .* fewer than a microbatch of 8; raise it, or add text"):
        sizes(seq_len=length - 1)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_one_batch_and_any_number_of_them_continues(config, count):
    whole = data.open_data(config)
    parts = [data.open_data(config, block, count) for block in range(count)]
    together = lambda number: np.concatenate([take(part.batches, number) for part in parts], axis=1)
    np.testing.assert_array_equal(together(30), take(whole.batches, 30))
    np.testing.assert_array_equal(np.concatenate([part.held_out for part in parts], axis=1), whole.held_out)
    positions = np.concatenate([part.batches.get_state() for part in parts])
    alone = data.open_data(config)
    alone.batches.set_state(positions)
    np.testing.assert_array_equal(take(alone.batches, 30), together(30))


@pytest.mark.claim("goes-on")
def test_it_continues_from_any_batch(config):
    source, states, batches = data.open_data(config), [], []
    for _ in range(60):
        states.append(source.batches.get_state())
        batches.append(next(source.batches))
    again = data.open_data(config).batches
    for step in (59, 0, 30, 31, 7):
        again.set_state(states[step])
        np.testing.assert_array_equal(next(again), batches[step])


def test_the_seed_decides_the_order(config):
    batch = lambda seed: next(data.open_data(changed(config, "train", seed=seed)).batches)
    np.testing.assert_array_equal(batch(1), batch(1))
    assert not np.array_equal(batch(1), batch(2))


@pytest.mark.claim("reads-in-blocks")
def test_a_start_reads_no_more_than_it_evaluates(config, monkeypatch, tmp_path):
    for number in range(2000):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * 40)
    read, real = [], data.Documents.__getitem__
    monkeypatch.setattr(data.Documents, "__getitem__", lambda *args: (read.append(args[1]), real(*args))[1])
    source = data.open_data(changed(config, "data", path=f"{tmp_path}/*.txt"))
    next(source.batches)
    assert len(set(read)) < 100
