"""models/data.py: documents, tokenizer, token files and batches."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from common import start

from models import data
from models.documents import files_of, read_documents
from models.reading import ConfigError

CORPUS = {"vocab_size": 400, "valid_fraction": 0.3}


def documents(path: str = "stdlib", text_field: str = "text") -> Iterator[str]:
    return read_documents(files_of(path), text_field)


@pytest.fixture
def texts() -> list[str]:
    rng = random.Random(7)
    words = ["def", "return", "naïve", "漢字", "🎉", "\r\n", "\t", "  ", "x=1", "É", "\x00", data.END_OF_TEXT]
    return [" ".join(rng.choices(words, k=60)) + f" {number}" for number in range(40)]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> str:
    """Return a glob that matches one .txt file per text."""
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_bytes(text.encode())
    return f"{tmp_path}/*.txt"


def load(path, tmp_path: Path, **settings) -> data.Dataset:
    return data.load(path=path, cache_dir=tmp_path / "cache", **(CORPUS | settings))


def texts_of(dataset: data.Dataset, tokens: np.ndarray) -> list[str]:
    end = dataset.tokenizer.token_to_id(data.END_OF_TEXT)
    assert tokens[-1] == end
    pieces = np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]
    return [dataset.tokenizer.decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces]


def assert_error(match: str, call, *args, kind: type[Exception] = ValueError, **kwargs) -> None:
    """Assert that the call raises exactly the message `match`, where `...` stands for anything."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    pattern = re.escape(match).replace(re.escape("..."), ".*")
    assert re.fullmatch(pattern, str(caught.value)), str(caught.value)


# Documents


def test_txt(corpus, texts):
    assert list(documents(corpus)) == texts


def test_jsonl_and_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two\\r\\n", "id": 2}\n{"text": ""}\n')
    (tmp_path / "deep" / "er" / "est").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "est" / "b.jsonl").write_text('{"body": "é"}')
    assert list(documents(f"{tmp_path}/*.jsonl")) == ["one", "two\r\n"]
    assert list(documents(f"{tmp_path}/deep/**/*.jsonl", "body")) == ["é"]


def test_stdlib_is_the_library_without_tests_and_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    for name in ("json/decoder.py", "abc.py", "json/data.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for folder in ("site-packages", "dist-packages", "test", "json/tests", "idle_test", "__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(folder)
    (tmp_path / "latin.py").write_bytes("# coding: latin-1 é".encode("latin-1"))
    assert list(documents("stdlib")) == ["abc.py", "json/decoder.py"]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"row {n} é" for n in range(3000)]
    table = pyarrow.table({"id": list(range(3000)), "body": rows})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    assert list(documents(f"{tmp_path}/*.parquet", "body")) == rows
    assert_error(
        f"data.text_field = 'bodies': data.path has none in {tmp_path}/a.parquet; "
        "allowed are ['id', 'body'], the nearest is 'body'",
        list,
        documents(f"{tmp_path}/*.parquet", "bodies"),
    )
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "b.parquet")
    assert_error(
        f"data.text_field = 'text': it is None in {tmp_path}/b.parquet, row 1; allowed is Unicode text",
        list,
        documents(f"{tmp_path}/b.parquet"),
    )


def test_empty_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "no_rows.parquet")
    assert list(documents(f"{tmp_path}/no_rows.parquet")) == []
    (tmp_path / "no_bytes.parquet").touch()
    assert_error(
        f"data.path: {tmp_path}/no_bytes.parquet is not Parquet (...); allowed is a table of rows",
        list,
        documents(f"{tmp_path}/no_bytes.parquet"),
    )


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert_error(
        f"data.path: {tmp_path}/a.parquet needs pyarrow: pip install jaxoffload[parquet]",
        list,
        documents(f"{tmp_path}/a.parquet"),
        kind=ImportError,
    )


def test_several_globs_each_file_once(tmp_path):
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    globs = [f"{tmp_path}/*.txt", f"{tmp_path}/*.jsonl", f"{tmp_path}/b.*"]
    assert list(documents(globs)) == ["a", "b"]
    assert list(documents(tuple(reversed(globs)))) == ["a", "b"]
    assert "b" in set(documents([globs[0], "stdlib"]))


ALLOWED = 'allowed are "stdlib" and globs of .txt, .jsonl, .parquet files'


def test_path_errors(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.csv").write_text("a")
    good, bad, csv = f"{tmp_path}/*.txt", f"{tmp_path}/*.text", f"{tmp_path}/*.csv"
    assert_error(f"data.path = '{bad}': ['{bad}'] matches no file; {ALLOWED}", documents, bad)
    assert_error(f"data.path = ['{good}', '{bad}']: ['{bad}'] matches no file; {ALLOWED}", documents, [good, bad])
    assert_error(f"data.path = (): [] matches no file; {ALLOWED}", documents, ())
    assert_error(f"data.path = '{csv}': {tmp_path}/a.csv has the suffix '.csv'; {ALLOWED}", documents, csv)
    assert_error(f"data.path = '{tmp_path}': ['{tmp_path}'] matches no file; {ALLOWED}", documents, str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text: 1}", "data.path: FILE:2 is not JSON (...line 1 column 2...); allowed is an object"),
        (b"\xff", "data.path: FILE:2 is not JSON (...); allowed is an object"),
        ('["text"]', "data.path: FILE:2 is ['text']; allowed is an object"),
        (
            '{"texts": "a", "id": 1}',
            "data.text_field = 'text': data.path has none in FILE:2; "
            "allowed are ['texts', 'id'], the nearest is 'texts'",
        ),
        ('{"id": 1}', "data.text_field = 'text': data.path has none in FILE:2; allowed are ['id']"),
        ("{}", "data.text_field = 'text': data.path has none in FILE:2; allowed are []"),
        ('{"text": null}', "data.text_field = 'text': it is None in FILE:2; allowed is Unicode text"),
        (
            '{"text": "\\ud800"}',
            "data.text_field = 'text': it is '\\ud800' in FILE:2; allowed is Unicode text",
        ),
    ],
)
def test_jsonl_errors(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    assert_error(message.replace("FILE", str(file)), list, documents(str(file)))


def test_txt_must_be_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1"))
    assert_error(
        f"data.path: {tmp_path}/a.txt is not UTF-8 (...); allowed is UTF-8 text",
        list,
        documents(f"{tmp_path}/a.txt"),
    )


# Tokens


def test_every_document_comes_back_on_one_side(corpus, texts, tmp_path):
    dataset = load(corpus, tmp_path)
    train, valid = texts_of(dataset, dataset.train), texts_of(dataset, dataset.valid)
    assert sorted(train + valid) == sorted(texts)
    assert len(valid) > 3 and len(train) > 3
    assert dataset.train.dtype == dataset.valid.dtype == np.uint16
    assert isinstance(dataset.train, np.memmap)
    assert 257 < dataset.vocab_size == dataset.tokenizer.get_vocab_size() <= 400


def test_equal_documents_are_on_one_side(tmp_path):
    # If the split went by position, both sides would have 30 copies.
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"doc {n % 2}"}) for n in range(60)))
    for fraction in np.linspace(0.05, 0.95, 19):
        try:
            dataset = load(f"{tmp_path}/a.jsonl", tmp_path, valid_fraction=float(fraction))
        except ValueError:
            continue
        assert set(texts_of(dataset, dataset.train)).isdisjoint(texts_of(dataset, dataset.valid))
        break
    else:
        pytest.fail("no fraction separates the two documents: choose others")


@pytest.mark.slow
@pytest.mark.claim("make-train")
def test_stdlib(tmp_path):
    dataset = load("stdlib", tmp_path, vocab_size=4096, valid_fraction=0.05)
    texts = list(documents("stdlib"))
    train, valid = set(texts_of(dataset, dataset.train)), set(texts_of(dataset, dataset.valid))
    assert train.isdisjoint(valid)
    assert train | valid == set(texts)
    assert Path(json.__file__).read_text() in texts
    assert dataset.vocab_size == 4096
    assert len(dataset.train) > 1_000_000
    # The tokenizer must have learned something: single bytes would be one token each.
    characters = sum(map(len, texts))
    assert len(dataset.train) + len(dataset.valid) < characters / 2.5
    entropy = data.unigram_entropy(dataset.train, dataset.valid, vocab_size=4096)
    assert 3 < entropy < math.log(4096)


def test_tokenizer_sees_no_held_out_document(tmp_path):
    texts = [f"{n} " + chr(0x4E00 + n) * 300 for n in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    dataset = load(f"{tmp_path}/a.jsonl", tmp_path, vocab_size=4096)
    merged = {
        text: text[-2:] in dataset.tokenizer.decode_batch([[n] for n in range(dataset.vocab_size)]) for text in texts
    }
    assert {text for text, seen in merged.items() if seen} == set(texts_of(dataset, dataset.train))


def test_tokenizer_sees_every_source_within_its_bound(tmp_path, monkeypatch):
    for number in range(20):
        (tmp_path / f"a{number:02}.txt").write_text(f"{number} {'a' * 500}")
        (tmp_path / f"b{number:02}.txt").write_text(f"{number} {'b' * 500}")
    monkeypatch.setattr(data, "_SAMPLE_CHARS", 3000)
    merges = load(f"{tmp_path}/*.txt", tmp_path).tokenizer.get_vocab()
    assert "aaaa" in merges and "bbbb" in merges
    monkeypatch.setattr(data, "_SAMPLE_CHARS", 10)
    merges = load(f"{tmp_path}/*.txt", tmp_path / "short").tokenizer.get_vocab()
    assert "a" * 16 not in merges and "b" * 16 not in merges


def test_sample_is_bounded():
    assert list(data._first(5, ["abc", "def", "ghi"])) == ["abc", "de"]
    assert list(data._first(6, ["abc", "def", "ghi"])) == ["abc", "def"]


# The cache


@pytest.fixture
def work(monkeypatch) -> list[str]:
    """What was computed, in order."""
    done: list[str] = []

    def spy(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: (done.append(name), real(*args, **kwargs))[1])

    spy(tokenizers.trainers, "BpeTrainer")
    spy(data, "_write_tokens")
    return done


def test_second_load_computes_nothing(corpus, tmp_path, work):
    first = load(corpus, tmp_path)
    assert work == ["BpeTrainer", "_write_tokens"]
    second = load(corpus, tmp_path)
    assert work == ["BpeTrainer", "_write_tokens"]
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.valid, second.valid)
    assert first.tokenizer.to_str() == second.tokenizer.to_str()


def test_every_change_computes_anew(corpus, tmp_path, work, monkeypatch):
    changes = [{}, {"vocab_size": 399}, {"valid_fraction": 0.4}, {"text_field": "body"}]
    for change in changes:
        load(corpus, tmp_path, **change)
    assert len(work) == 2 * len(changes)
    monkeypatch.setattr(data, "_FORMAT", data._FORMAT + 1)
    load(corpus, tmp_path)
    assert len(work) == 2 * len(changes) + 2


def test_changed_documents_compute_anew(tmp_path, work):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(40)))
    load(str(file), tmp_path)
    stat = file.stat()
    file.write_text(file.read_text().replace("document 7", "document x"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    load(str(file), tmp_path)
    assert len(work) == 4
    # The same bytes under another suffix are other documents: here a single one.
    file.rename(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="has no document to"):
        load(f"{tmp_path}/a.txt", tmp_path)


def test_equal_from_scratch(corpus, tmp_path):
    one, two = load(corpus, tmp_path / "one"), load(corpus, tmp_path / "two")
    np.testing.assert_array_equal(one.train, two.train)
    np.testing.assert_array_equal(one.valid, two.valid)
    assert one.tokenizer.to_str() == two.tokenizer.to_str()


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


LOADER = """
import os, signal, sys
from models import data

path, cache, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
replace, calls = os.replace, []

def counted(*args):
    if len(calls) == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    calls.append(args)
    replace(*args)

os.replace = counted
data.load(path=path, cache_dir=cache, vocab_size=400, valid_fraction=0.3)
"""


def loading(corpus: str, cache: Path, kill_at: int = -1) -> subprocess.Popen:
    root = Path(data.__file__).parents[1]
    return start([sys.executable, "-c", LOADER, corpus, str(cache), str(kill_at)], cwd=root)


@pytest.mark.slow
def test_killed_anywhere_then_loaded(corpus, tmp_path):
    load(corpus, tmp_path)
    whole = files(tmp_path / "cache")
    hashed = ("tokenizer.json", "train.npy", "valid.npy")
    assert {Path(name).name for name in whole} == {*hashed, *(f"{name}.b2sum" for name in hashed)}
    for kill_at in range(len(whole)):
        killed = tmp_path / f"killed{kill_at}" / "cache"
        assert loading(corpus, killed, kill_at).wait() == -signal.SIGKILL
        left = files(killed)
        named = {name: content for name, content in left.items() if not name.endswith(".tmp")}
        assert len(named) == kill_at and named.items() <= whole.items()
        assert len(left) > kill_at, "the kill came too late to leave a partial file"
        load(corpus, killed.parent)
        assert {name: c for name, c in files(killed).items() if not name.endswith(".tmp")} == whole


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_that_race(corpus, tmp_path, count):
    load(corpus, tmp_path)
    racers = [loading(corpus, tmp_path / "raced") for _ in range(count)]
    assert [racer.wait() for racer in racers] == [0] * count
    assert files(tmp_path / "raced") == files(tmp_path / "cache")


def test_failure_leaves_no_file(corpus, tmp_path):
    given = load(corpus, tmp_path / "other")
    given.tokenizer.save(f"{tmp_path}/given.json")
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' * 100 + "{}")
    for tokenizer in (None, f"{tmp_path}/given.json"):  # fails while training the tokenizer, and while writing tokens
        with pytest.raises(ValueError, match=r"a\.jsonl:101"):
            load(f"{tmp_path}/a.jsonl", tmp_path, tokenizer=tokenizer, vocab_size=given.vocab_size)
        assert files(tmp_path / "cache") == {}


# Settings of load


@pytest.mark.claim("tokenizer-json")
def test_given_tokenizer(corpus, tmp_path, work):
    trained = load(corpus, tmp_path)
    bpe = tokenizers.Tokenizer.from_str(trained.tokenizer.to_str())
    # As many published files do; neither may affect the tokens.
    bpe.enable_truncation(2000)
    bpe.enable_padding(length=1000)
    bpe.save(f"{tmp_path}/given.json")
    del work[:]
    given = load(corpus, tmp_path, tokenizer=f"{tmp_path}/given.json", vocab_size=trained.vocab_size)
    assert work == ["_write_tokens"]
    np.testing.assert_array_equal(given.train, trained.train)


def test_given_tokenizer_that_truncates(corpus, texts, tmp_path):
    bpe = load(corpus, tmp_path).tokenizer
    bpe.enable_truncation(8)
    bpe.save(f"{tmp_path}/given.json")
    given = load(corpus, tmp_path, tokenizer=f"{tmp_path}/given.json", vocab_size=bpe.get_vocab_size())
    assert sorted(texts_of(given, given.train) + texts_of(given, given.valid)) == sorted(texts)


def test_changed_tokenizer_file_computes_anew(corpus, tmp_path):
    trained = load(corpus, tmp_path).tokenizer.to_str()
    tokens = []
    for word in ("漢字", "naïve"):
        bpe = tokenizers.Tokenizer.from_str(trained)
        bpe.add_tokens([word])
        bpe.save(f"{tmp_path}/given.json")
        settings = {"tokenizer": f"{tmp_path}/given.json", "vocab_size": bpe.get_vocab_size()}
        tokens.append(load(corpus, tmp_path, **settings).train)
    assert not np.array_equal(*tokens)


def test_a_fingerprint_that_changed_is_refused_before_anything_is_computed(corpus, tmp_path, work):
    dataset = load(corpus, tmp_path)
    dataset.tokenizer.save(f"{tmp_path}/given.json")
    with_given = {"tokenizer": f"{tmp_path}/given.json", "vocab_size": dataset.vocab_size}
    given = load(corpus, tmp_path, **with_given)
    del work[:]
    assert load(corpus, tmp_path, fingerprint=dataset.fingerprint).fingerprint == dataset.fingerprint
    assert load(corpus, tmp_path, fingerprint=given.fingerprint, **with_given).fingerprint == given.fingerprint
    Path(corpus).with_name("00.txt").write_text("another text")
    load(corpus, tmp_path / "no fingerprint")
    changed = (
        "is not what it was when the run's checkpoint was written; put that back, or set train.out to another folder"
    )
    del work[:]
    assert_error(f"data.path = '{corpus}': {changed}", load, corpus, tmp_path, fingerprint=dataset.fingerprint)
    dataset.tokenizer.add_tokens(["new"])
    dataset.tokenizer.save(f"{tmp_path}/given.json")
    with_given["vocab_size"] += 1
    assert_error(
        f"data.path = '{corpus}': {changed}\ndata.tokenizer = '{tmp_path}/given.json': {changed}",
        load,
        corpus,
        tmp_path,
        fingerprint=given.fingerprint,
        **with_given,
    )
    assert work == []


def test_files_that_cannot_be_opened(corpus, tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    folder = f"{tmp_path}/a file/cache"
    with pytest.raises(ConfigError) as caught:
        data.load(path=corpus, cache_dir=folder, **CORPUS)
    assert re.fullmatch(
        f"data.cache_dir = '{folder}': .*Not a directory.*; must be a folder that can be written", str(caught.value)
    )
    monkeypatch.setattr(data, "files_of", lambda path: [tmp_path / "gone.txt"])
    gone = f"data.path = '{tmp_path}/gone.txt': ...No such file...; must be a file that can be read"
    assert_error(gone, load, corpus, tmp_path)  # while it is being hashed
    assert_error(gone, list, read_documents([tmp_path / "gone.txt"], "text"))


def test_the_users_home_is_found(corpus, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    load(corpus, tmp_path).tokenizer.save(f"{tmp_path}/given.json")
    settings = CORPUS | {"tokenizer": "~/given.json", "vocab_size": 4096}
    dataset = data.load(path="~/*.txt", cache_dir="~/of_home", **settings)
    assert sorted(texts_of(dataset, dataset.train) + texts_of(dataset, dataset.valid)) == sorted(texts)
    assert files(tmp_path / "of_home")


def test_large_vocabulary_is_uint32(corpus, tmp_path):
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: letter == "d")
    for size, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32)):
        unused = [f"<{number}>" for number in range(size - 257)]
        vocab = {token: number for number, token in enumerate([data.END_OF_TEXT, *unused, *letters])}
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.save(f"{tmp_path}/given.json")
        dataset = load(corpus, tmp_path, tokenizer=f"{tmp_path}/given.json", vocab_size=size)
        assert dataset.train.dtype == dtype
        assert dataset.train.max() == size - 1  # the d of "def"


def test_setting_errors(corpus, tmp_path):
    for fraction in (0, 1, -0.1):
        assert_error(
            f"data.valid_fraction = {fraction}: allowed is a number between 0 and 1",
            load,
            corpus,
            tmp_path,
            valid_fraction=fraction,
        )
    assert_error(
        "model.vocab_size = 256: allowed is 257 (bytes and <|endoftext|>) or more",
        load,
        corpus,
        tmp_path,
        vocab_size=256,
    )
    for fraction, verb in ((1e-9, "hold out"), (1 - 1e-9, "train on")):
        for _ in range(2):  # the cache of the first load must not hide it
            assert_error(
                f"data.valid_fraction = {fraction}: data.path = '{corpus}' has no document to {verb}; "
                "allowed is what leaves some for both",
                load,
                corpus,
                tmp_path,
                valid_fraction=fraction,
            )


def test_tokenizer_errors(corpus, tmp_path):
    file = tmp_path / "given.json"
    missing = f"data.tokenizer = {file}: No such file...; allowed is a tokenizer.json"
    assert_error(missing, load, corpus, tmp_path, tokenizer=str(file))
    file.write_text("no")
    assert_error(
        f"data.tokenizer = {file}: ...; allowed is a tokenizer.json",
        load,
        corpus,
        tmp_path,
        tokenizer=str(file),
    )
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(file))
    assert_error(
        f"data.tokenizer = {file}: allowed is a tokenizer with one of the tokens "
        "<|endoftext|>, <|end_of_text|>, </s>, <eos>, <｜end▁of▁sentence｜>",
        load,
        corpus,
        tmp_path,
        tokenizer=str(file),
    )
    trained = load(corpus, tmp_path)
    trained.tokenizer.save(str(file))
    size = trained.vocab_size - 1
    assert_error(
        f"model.vocab_size = {size}: allowed with {file} is {trained.vocab_size}, its own, or more",
        load,
        corpus,
        tmp_path,
        tokenizer=str(file),
        vocab_size=size,
    )


@pytest.mark.claim("tokenizer-json")
@pytest.mark.parametrize("end", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>"])
def test_a_given_tokenizer_may_name_its_end_otherwise_and_the_vocabulary_be_padded(corpus, tmp_path, end):
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {token: number for number, token in enumerate([*letters, end])}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.save(f"{tmp_path}/given.json")
    dataset = load(corpus, tmp_path, tokenizer=f"{tmp_path}/given.json", vocab_size=1024)
    assert dataset.vocab_size == 257 and dataset.train[-1] == 256
    assert (dataset.train == 256).sum() > 1


# Batches

TOKENS = np.arange(1 + 5 * 23 + 3, dtype=np.uint16)  # 23 windows of 5 + 1 tokens, and 3 tokens over


def take(iterator, count: int) -> np.ndarray:
    return np.stack([next(iterator) for _ in range(count)])


def test_fixed_batches_cover_the_tokens_in_order():
    fixed = data.fixed_batches(TOKENS, batch_size=4, seq_len=5)
    rows = np.concatenate(list(fixed))
    assert rows.dtype == np.int32 and rows.shape == (20, 6)  # 23 windows, 5 full batches
    np.testing.assert_array_equal(rows[:, 1:].ravel(), TOKENS[1:101])
    np.testing.assert_array_equal(rows[:, 0], TOKENS[:100:5])
    np.testing.assert_array_equal(np.concatenate(list(fixed)), rows)


def test_each_epoch_sees_each_window_once_in_another_order():
    iterator = data.batches(TOKENS, batch_size=4, seq_len=5, seed=1)
    rows = take(iterator, 23).reshape(4, 23, 6)  # four epochs, none ends with a batch
    windows = np.lib.stride_tricks.sliding_window_view(TOKENS, 6)[::5]
    assert len(windows) == 23
    orders = {tuple(epoch[:, 0].tolist()) for epoch in rows}
    assert len(orders) == 4 and tuple(windows[:, 0].tolist()) not in orders
    for epoch in rows:
        np.testing.assert_array_equal(epoch[np.argsort(epoch[:, 0])], windows)


def test_the_seed_decides_the_order():
    def firsts(seed):
        return take(data.batches(TOKENS, batch_size=23, seq_len=5, seed=seed), 3)[:, :, 0]

    np.testing.assert_array_equal(firsts(1), firsts(1))
    epochs = [tuple(epoch.tolist()) for seed in (0, 1, 2) for epoch in firsts(seed)]
    assert len(set(epochs)) == 9, "neighbouring seeds share epochs"


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_share_one_global_batch(process_count):
    settings = {"batch_size": 8, "seq_len": 5}
    whole = take(data.batches(TOKENS, seed=3, **settings), 12)  # more than four epochs
    split = {"process_count": process_count, **settings}
    parts = [take(data.batches(TOKENS, seed=3, process_index=p, **split), 12) for p in range(process_count)]
    assert parts[0].shape == (12, 8 // process_count, 6)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    fixed = [np.stack(list(data.fixed_batches(TOKENS, process_index=p, **split))) for p in range(process_count)]
    np.testing.assert_array_equal(np.concatenate(fixed, axis=1), np.stack(list(data.fixed_batches(TOKENS, **settings))))


def test_resume_on_any_number_of_processes():
    settings = {"batch_size": 8, "seq_len": 5, "seed": 3}
    iterator = data.batches(TOKENS, **settings)
    take(iterator, 4)
    state = json.loads(json.dumps(iterator.get_state()))
    assert state == {"next_index": 4}
    expected = take(iterator, 9)
    take(iterator, 2)
    iterator.set_state(state)
    np.testing.assert_array_equal(take(iterator, 9), expected)
    parts = []
    for process in range(2):
        resumed = data.batches(TOKENS, process_index=process, process_count=2, **settings)
        next(resumed)  # what was prefetched must be discarded
        resumed.set_state(state)
        parts.append(take(resumed, 9))
        assert resumed.get_state() == {"next_index": 13}
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)


@pytest.mark.parametrize("make", [data.fixed_batches, lambda *a, **k: data.batches(*a, seed=0, **k)])
def test_batch_size_errors(make):
    assert_error(
        "train.batch_size = 7: allowed are multiples of 2 processes",
        make,
        TOKENS,
        batch_size=7,
        seq_len=5,
        process_count=2,
    )
    assert_error(
        "train.batch_size = 24: allowed is at most 23, the windows of train.seq_len = 5 in 119 tokens",
        make,
        TOKENS,
        batch_size=24,
        seq_len=5,
    )
    assert next(iter(make(TOKENS, batch_size=23, seq_len=5))).shape == (23, 6)


# The baseline


def test_unigram_entropy_by_hand():
    train = np.array([0, 0, 0, 1], np.uint16)  # add-one over three tokens: 4/7, 2/7, 1/7
    valid = np.array([2, 1], np.uint16)
    by_hand = -(math.log(1 / 7) + math.log(2 / 7)) / 2
    assert data.unigram_entropy(train, valid, vocab_size=3) == pytest.approx(by_hand, rel=1e-12)
    on_train = -(3 * math.log(4 / 7) + math.log(2 / 7)) / 4
    assert data.unigram_entropy(train, train, vocab_size=3) == pytest.approx(on_train, rel=1e-12)


def test_unigram_entropy_counts_in_pieces():
    tokens = np.zeros(2**24 + 2, np.uint16)
    tokens[-2:] = 1  # past the first 2**24
    count = len(tokens)
    by_hand = -((count - 2) * math.log((count - 1) / (count + 2)) + 2 * math.log(3 / (count + 2))) / count
    assert data.unigram_entropy(tokens, tokens, vocab_size=2) == pytest.approx(by_hand, rel=1e-9)
