"""The training program's data: a byte-level BPE, cached token files, and resumable batches.

`load` turns documents into two memory-mapped token arrays, once; `batches` and `fixed_batches` read windows
of them through grain.
"""

import contextlib
import hashlib
import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import grain
import numpy as np
import tokenizers

from models.config import Data
from models.documents import files_of, read_documents
from models.files import atomic, blake2b
from models.integrity import is_intact
from models.reading import ConfigError, as_config_error, config_error, problem

END_OF_TEXT = "<|endoftext|>"  # in the tokenizers trained here
# Its name there and in Qwen's, in Llama 3's, in Llama 2's and Mistral's, in Gemma's, and in DeepSeek's.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")

_FORMAT = 1  # part of every cache key: raise it when the same input is to give other files
_SAMPLE_CHARS = 64_000_000  # bounds the time to train a tokenizer, whatever the size of the corpus
_READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # grain's default holds 500 batches


class Dataset(NamedTuple):
    """The tokens of all documents, with END_OF_TEXT after each; equal documents are in the same split."""

    train: np.ndarray  # (tokens,) uint16 or uint32, memory-mapped
    valid: np.ndarray  # (tokens,) of the same dtype as train
    tokenizer: tokenizers.Tokenizer
    vocab_size: int  # above every id; a small corpus gives fewer tokens than were asked for
    fingerprint: dict[str, str]  # hashes of the files behind data.path and data.tokenizer
    end: int  # the token behind each document


def load(
    *,
    path: str | Sequence[str] = "stdlib",
    text_field: str = "text",
    tokenizer: str | None = None,
    vocab_size: int,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
    fingerprint: Mapping[str, str] | None = None,
) -> Dataset:
    """Return the tokens of the documents in `path`, computed once and kept in a cache.

    A cached dataset is filed under a hash of all that it depends on, the bytes of the documents included. Its files are
    compared with their hashes before they are used; a damaged file is rebuilt, and a message says so. Processes that
    fill a cache at the same time write equal files.

    Args:
      path: the documents, as for `files_of`.
      text_field: the field of .jsonl records and the column of .parquet files that has the text.
      tokenizer: a tokenizer.json with at most `vocab_size` tokens; None: train one with at most that many.
      vocab_size: the model's; the tokenizer may have fewer tokens.
      valid_fraction: the fraction of documents to hold out, approximately; a document's hash decides.
      cache_dir: the folder of all cached datasets.
      fingerprint: that of an earlier Dataset, which must be the same; checked before anything is computed.

    Raises:
      ConfigError: with the key, its value and what is allowed.
    """
    if not 0 < valid_fraction < 1:
        raise config_error("data.valid_fraction", valid_fraction, "allowed is a number between 0 and 1")
    if tokenizer is None and vocab_size < 257:
        raise config_error("model.vocab_size", vocab_size, f"allowed is 257 (bytes and {END_OF_TEXT}) or more")
    files = files_of(path)
    given = [] if tokenizer is None else [Path(os.path.expanduser(tokenizer))]
    bpe = _open_tokenizer(given[0]) if given else None
    if bpe is not None and _ids(bpe) > vocab_size:
        raise config_error("model.vocab_size", vocab_size, f"allowed with {given[0]} is {_ids(bpe)}, its own, or more")
    found = {"data.path": _digest(files), "data.tokenizer": _digest(given) if given else tokenizers.__version__}
    _refuse_changes(found, fingerprint, {"data.path": path, "data.tokenizer": tokenizer})
    settings = repr((found, _FORMAT, tokenizers.__version__, text_field, valid_fraction, vocab_size))
    folder = Path(cache_dir).expanduser() / hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()
    train, valid = folder / "train.npy", folder / "valid.npy"
    with as_config_error("data.cache_dir", str(cache_dir), "a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        if bpe is None:
            bpe = _trained_tokenizer(folder / "tokenizer.json", files, text_field, valid_fraction, vocab_size)
        if not all([_usable(train), _usable(valid)]):
            _write_tokens(train, valid, read_documents(files, text_field), bpe, valid_fraction)
    dataset = Dataset(np.load(train, mmap_mode="r"), np.load(valid, mmap_mode="r"), bpe, _ids(bpe), found, end_of(bpe))
    if not (len(dataset.train) and len(dataset.valid)):
        what = "hold out" if len(dataset.train) else "train on"
        why = f"data.path = {path!r} has no document to {what}; allowed is what leaves some for both"
        raise config_error("data.valid_fraction", valid_fraction, why)
    return dataset


def tokenizer_of(section: Data, vocab_size: int, fingerprint: Mapping[str, str] | None) -> tokenizers.Tokenizer:
    """Return the tokenizer of a run, which is trained anew if it was and is not in the cache any more.

    Args:
      section: the section `data` of its config.
      vocab_size: the model's.
      fingerprint: as for `load`; None: nothing was trained on.

    Raises:
      ConfigError: as `load`.
    """
    if section.tokenizer is None:
        return load(
            path=section.path,
            text_field=section.text_field,
            vocab_size=vocab_size,
            valid_fraction=section.valid_fraction,
            cache_dir=section.cache_dir,
            fingerprint=fingerprint,
        ).tokenizer
    path = Path(os.path.expanduser(section.tokenizer))
    key = "data.tokenizer"
    bpe, before = _open_tokenizer(path), {key: fingerprint[key]} if fingerprint else None
    _refuse_changes({key: _digest([path])}, before, {key: section.tokenizer})
    return bpe


# ---- the cache ----


def _held_out(text: str, fraction: float) -> bool:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) < fraction * 2**64


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with as_config_error("data.path", str(file), "a file that can be read"), file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "blake2b").digest() + file.suffix.encode())
    return digest.hexdigest()


def _refuse_changes(found: Mapping[str, str], before: Mapping[str, str] | None, config: Mapping[str, object]) -> None:
    changed = [] if before is None else [key for key in found if found[key] != before.get(key)]
    if changed:
        why = "is not what it was when the run's checkpoint was written"
        why += "; put that back, or set train.out to another folder"
        raise ConfigError([problem(key, repr(config[key]), why) for key in changed])


def _open_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        bpe = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise config_error("data.tokenizer", path, f"{error}; allowed is a tokenizer.json") from error
    if end_of(bpe) is None:
        raise config_error("data.tokenizer", path, f"allowed is a tokenizer with one of the tokens {', '.join(_ENDS)}")
    # A tokenizer.json may ask for both, which would truncate and pad documents.
    bpe.no_truncation()
    bpe.no_padding()
    # A document that contains the text <|endoftext|> does not end there.
    bpe.encode_special_tokens = True
    return bpe


def end_of(bpe: tokenizers.Tokenizer) -> int | None:
    """Return the id of the token that ends a document; None if there is none."""
    return next((id for token in _ENDS if (id := bpe.token_to_id(token)) is not None), None)


def _ids(bpe: tokenizers.Tokenizer) -> int:
    # Not the number of tokens: ids may have gaps, and an embedding needs a row for the greatest id.
    return max(bpe.get_vocab().values()) + 1


def _trained_tokenizer(
    path: Path, files: list[Path], text_field: str, valid_fraction: float, vocab_size: int
) -> tokenizers.Tokenizer:
    """Return the tokenizer in `path`; if the file is missing or damaged, train it first."""
    if not _usable(path):
        # Shuffled, or the tokenizer could see only the first of several sources.
        texts = read_documents(random.Random(0).sample(files, len(files)), text_field)
        sample = _first(_SAMPLE_CHARS, (text for text in texts if not _held_out(text, valid_fraction)))
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(sample, trainer)
        with _hashed(path) as stream:
            stream.write(bpe.to_str().encode())
    return _open_tokenizer(path)


def _first(chars: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text[:chars]
        chars -= len(text)
        if chars <= 0:
            return


def _write_tokens(
    train: Path, valid: Path, texts: Iterable[str], bpe: tokenizers.Tokenizer, valid_fraction: float
) -> None:
    dtype = np.dtype(np.uint16 if _ids(bpe) <= 2**16 else np.uint32)
    end = end_of(bpe)
    with _npy(train, dtype) as to_train, _npy(valid, dtype) as to_valid:
        for some in itertools.batched(texts, 64):
            for text, encoded in zip(some, bpe.encode_batch_fast(some, add_special_tokens=False), strict=True):
                stream = to_valid if _held_out(text, valid_fraction) else to_train
                stream.write(np.array([*encoded.ids, end], dtype).tobytes())


@contextlib.contextmanager
def _npy(path: Path, dtype: np.dtype) -> Iterator[BinaryIO]:
    """Open `path` to write a one-dimensional array whose length is known only at the end."""
    with _hashed(path) as stream:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (0,)}
        np.lib.format.write_array_header_1_0(stream, header)
        start = stream.tell()
        yield stream
        length = (stream.tell() - start) // dtype.itemsize
        stream.seek(0)
        # numpy pads the header, so that a greater length fits into the same number of bytes.
        np.lib.format.write_array_header_1_0(stream, header | {"shape": (length,)})


@contextlib.contextmanager
def _hashed(path: Path) -> Iterator[BinaryIO]:
    """As `atomic`, with the file's hash in a second file, which is written before `path` appears."""
    with atomic(path) as stream:
        yield stream
        stream.flush()
        with atomic(_hash_of(path)) as beside:
            beside.write(f"{blake2b(Path(stream.name))}  {path.name}\n".encode())  # as `b2sum -c` reads it


def _hash_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.b2sum")


def _usable(path: Path) -> bool:
    """Return whether a file of the cache exists and is whole; print a line if it is not, or if it has no hash."""
    if not path.exists():
        return False
    hash = _hash_of(path)
    if hash.exists():
        whole = is_intact(path, hash.read_bytes()[:128].decode(errors="replace"))
    else:
        whole = _can_be_opened(path)
    if not whole:
        print(f"{path} is damaged: it is not what was written, and is rebuilt", flush=True)
    elif not hash.exists():
        print(f"{path} comes from an earlier version, which wrote no hash: it is not verified", flush=True)
    return whole


def _can_be_opened(path: Path) -> bool:
    """Return whether a file can be opened: all that can be checked of one without a hash."""
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r")
            return tokens.ndim == 1 and tokens.dtype in (np.uint16, np.uint32)
        tokenizers.Tokenizer.from_file(str(path))
    except Exception:  # numpy and tokenizers raise many classes
        return False
    return True


# ---- batches ----


def windows(tokens: np.ndarray, seq_len: int) -> int:
    """Return the number of windows of `seq_len` + 1 tokens in `tokens`; neighbours share a token."""
    return (len(tokens) - 1) // seq_len


def batches(
    tokens: np.ndarray,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[np.ndarray]:
    """Return an endless iterator of int32 arrays, (batch_size / process_count, seq_len + 1).

    Window w is tokens[w * seq_len :][: seq_len + 1], so no token is a target twice per epoch. Each epoch is shuffled
    anew, by `seed`, and batches run on across epochs. `batch_size` is global: the rows of processes 0, 1, ..., one
    below the other, are the batch of a single process. `get_state()` is {"next_index": batches consumed}, whatever the
    number of processes, and `set_state` continues from there.

    Raises:
      ConfigError: `batch_size` is not a multiple of `process_count`, or exceeds the number of windows.
    """
    # grain shuffles epoch e with seed + e: without hashing, neighbouring seeds would share epochs.
    hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    order = lambda windows: windows.shuffle(seed=hashed).repeat()
    return iter(_rows(tokens, order, batch_size, seq_len, process_index, process_count))


def fixed_batches(
    tokens: np.ndarray, *, batch_size: int, seq_len: int, process_index: int = 0, process_count: int = 1
) -> grain.IterDataset[np.ndarray]:
    """Return the full batches of `tokens`, once and in order; each iteration over them yields the same.

    Windows, rows and errors are those of `batches`. The last windows are left out if they do not fill a batch.
    """
    return _rows(tokens, lambda windows: windows, batch_size, seq_len, process_index, process_count)


def _rows(
    tokens: np.ndarray,
    order: Callable[[grain.MapDataset], grain.MapDataset],
    batch_size: int,
    seq_len: int,
    process_index: int,
    process_count: int,
) -> grain.IterDataset[np.ndarray]:
    """Order and batch the numbers of the windows, and read this process's windows of each batch."""
    if batch_size % process_count:
        raise config_error("train.batch_size", batch_size, f"allowed are multiples of {process_count} processes")
    count = windows(tokens, seq_len)
    if count < batch_size:
        why = f"allowed is at most {count}, the windows of train.seq_len = {seq_len} in {len(tokens)} tokens"
        raise config_error("train.batch_size", batch_size, why)

    def read(numbers: np.ndarray) -> np.ndarray:
        mine = np.split(numbers, process_count)[process_index]
        return np.stack([tokens[w * seq_len :][: seq_len + 1] for w in mine]).astype(np.int32)

    ordered = order(grain.MapDataset.range(count))
    return ordered.batch(batch_size, drop_remainder=True).map(read).to_iter_dataset(_READ)


# ---- the baseline ----


def unigram_entropy(train: np.ndarray, valid: np.ndarray, *, vocab_size: int) -> float:
    """Return the cross-entropy on `valid`, in nats per token, of the token frequencies of `train`.

    It is the loss of a model that sees no context. The frequencies are smoothed: one is added to each count.
    """
    counts, targets = _counts(train, vocab_size), _counts(valid, vocab_size)
    return float(-targets @ np.log((counts + 1) / (counts.sum() + vocab_size)) / targets.sum())


def _counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    # In pieces, because bincount makes an int64 copy of its argument.
    pieces = np.array_split(tokens, math.ceil(len(tokens) / 2**24))
    return np.sum([np.bincount(piece, minlength=vocab_size) for piece in pieces], axis=0)
