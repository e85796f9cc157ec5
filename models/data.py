"""The text that a model trains on: files read in blocks, tokens packed into rows, batches that resume exactly.

Nothing is read as a whole: a start costs the sizes of the files and the held-out batches, however large the corpus.
"""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np
import tokenizers
from pyarrow import parquet

from models.config import Config, ConfigError

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# The token behind each document: of Qwen, Llama 3, Llama 2 and Mistral, Gemma, DeepSeek.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
_LARGEST, _SMALLEST = 2**20, 2**12  # bytes of a block
_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)  # a thread reads and tokenises a row's next block
_NO_TOKENS = np.empty(0, np.int32)


class Source(NamedTuple):
    """The data of a config: of each batch, the rows of this process, (rows, seq_len + 1) int32."""

    batches: "Batches"  # endless
    held_out: list[np.ndarray]  # the batches of each evaluation
    end: int  # the token behind each document
    fingerprint: str  # of the files' names and sizes, and of the tokenizer


def open_data(config: Config, block: int = 0, blocks: int = 1) -> Source:
    """Open the data of a config. Of `blocks` equal blocks of a batch's rows, this process has number `block`.

    Raises:
      ConfigError: there are no such files, they cannot be read, or they are too few.
    """
    train, fraction, encoder = config.train, config.data.valid_fraction, open_encoder(config)
    documents = Documents(files_of(config.data.path), config.data.text_field, train.batch_size)
    if len(documents) < train.batch_size:  # rows of a batch would read the same
        few = f"has {len(documents)} blocks of text, fewer than train.batch_size = {train.batch_size}"
        raise ConfigError(f"data.path = {config.data.path!r}: {few}; add text")
    source = grain.MapDataset.source(documents)
    held_out = held_out_batches(config, source.map(lambda texts: encoder.encode(side(texts, fraction, held_out=True))))
    training = source.map(lambda texts: encoder.encode(side(texts, fraction, held_out=False)))
    if not any(len(training[index]) for index in range(len(training))):
        raise ConfigError(f"data.valid_fraction = {fraction}: holds out every document of {config.data.path!r}")
    # grain shuffles epoch e with seed + e: without hashing, neighbouring seeds would share epochs.
    seed = int(np.random.SeedSequence(train.seed).generate_state(1)[0])
    endless = training.shuffle(seed=seed).repeat().filter(len)
    mine = lambda rows: np.split(rows, blocks)[block]
    names = [file.name for file in documents.files]
    fingerprint = hashlib.blake2b(repr((names, documents.sizes, encoder.digest)).encode(), digest_size=16)
    return Source(
        Batches([endless[row :: train.batch_size] for row in mine(np.arange(train.batch_size))], train.seq_len + 1),
        [mine(batch) for batch in held_out],
        encoder.end,
        fingerprint.hexdigest(),
    )


def files_of(path: str | Sequence[str]) -> list[Path]:
    """Return the files of `data.path`, sorted."""
    found: set[Path] = set()
    for pattern in [path] if isinstance(path, str) else path:
        root = Path(sysconfig.get_paths()["stdlib"])
        if pattern == "stdlib":
            files = [file for file in root.rglob("*.py") if _NOT_LIBRARY.isdisjoint(file.relative_to(root).parts)]
        else:
            files = [Path(file) for file in glob.glob(os.path.expanduser(pattern), recursive=True)]
            files = [file for file in files if file.suffix in (".txt", ".jsonl", ".parquet")]
        if not files:
            allowed = "allowed are 'stdlib' and globs of .txt, .jsonl and .parquet files"
            raise ConfigError(f"data.path = {path!r}: {pattern!r} matches no file; {allowed}")
        found.update(files)
    if not found:
        raise ConfigError(f"data.path = {path!r}: names no file; give globs of .txt, .jsonl and .parquet, or 'stdlib'")
    return sorted(found)


class Documents:
    """The documents of files, as a sequence of blocks that are read when they are asked for.

    A document is a line of .jsonl, a row of .parquet, or another file. A block has the lines that begin in so many
    bytes, or a row group. So a text file longer than a block, as in a corpus of one file, is several documents.
    """

    def __init__(self, files: list[Path], text_field: str, rows: int):
        self.files, self.text_field = files, text_field
        self.sizes = [file.stat().st_size for file in files]
        # Small where there is little text, so that each row of a batch has blocks of its own.
        self.block_bytes = min(_LARGEST, max(_SMALLEST, sum(self.sizes) // (16 * rows)))
        blocks = map(self._blocks, files, self.sizes)
        self.ends = np.cumsum([*blocks])  # the number of blocks in each file and those before it

    def _blocks(self, file: Path, size: int) -> int:
        if file.suffix != ".parquet":
            return -(-size // self.block_bytes)
        try:
            return int(parquet.ParquetFile(file).num_row_groups)
        except (OSError, ValueError) as error:
            raise ConfigError(f"data.path: {file} cannot be read as .parquet ({error})") from error

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> list[str]:
        """Return the documents of a block, without those that are empty."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        file, block = self.files[number], index - int(self.ends[number - 1] if number else 0)
        try:
            # JSON can have half of a surrogate pair, which no tokenizer takes.
            return [text.encode(errors="replace").decode() for text in self._read(file, block) if text]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"cannot be read as text, or as records with data.text_field = {self.text_field!r} ({error!r})"
            raise ConfigError(f"data.path: {file} {why}") from error

    def _read(self, file: Path, block: int) -> list[str]:
        if file.suffix == ".parquet":
            return parquet.ParquetFile(file).read_row_group(block, [self.text_field])[self.text_field].to_pylist()
        lines = lines_that_begin(file, block * self.block_bytes, (block + 1) * self.block_bytes)
        if file.suffix == ".jsonl":
            return [json.loads(line)[self.text_field] for line in lines if line.strip()]
        return [b"".join(lines).decode(errors="replace")]


def lines_that_begin(file: Path, start: int, stop: int) -> list[bytes]:
    """Return the lines of a file whose first byte is in this range."""
    lines = []
    with file.open("rb") as stream:
        if start:
            stream.seek(start - 1)
            stream.readline()  # of the block before
        while stream.tell() < stop and (line := stream.readline()):
            lines.append(line)
    return lines


def side(texts: list[str], fraction: float, held_out: bool) -> list[str]:
    """Return the documents that are held out, or the others. Their hashes decide, so equal ones are on one side."""
    hash = lambda text: int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    return [text for text in texts if (hash(text) < fraction * 2**64) == held_out]


class Encoder(NamedTuple):
    encode: Callable[[list[str]], np.ndarray]  # documents -> their tokens, int32, each followed by `end`
    end: int
    digest: str  # of tokenizer.json


def open_encoder(config: Config) -> Encoder:
    """Return the tokenizer of a config; without one, tokens are the bytes of UTF-8, and 256 is the end."""
    path = config.data.tokenizer
    if path is None:
        if (size := config.model.vocab_size) < 257:
            raise ConfigError(f"model.vocab_size = {size}: must be 257 or more without data.tokenizer")
        to_bytes = lambda text: np.append(np.frombuffer(text.encode(), np.uint8).astype(np.int32), np.int32(256))
        return Encoder(lambda texts: np.concatenate([_NO_TOKENS, *map(to_bytes, texts)]), 256, "")
    try:
        content = Path(path).expanduser().read_bytes()
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises Exception itself
        raise ConfigError(f"data.tokenizer = {path!r}: {error}; allowed is a tokenizer.json") from error
    end = next((id for token in _ENDS if (id := tokenizer.token_to_id(token)) is not None), None)
    if end is None:
        raise ConfigError(f"data.tokenizer = {path!r}: must have one of the tokens {', '.join(_ENDS)}")
    # Ids may have gaps: an embedding needs a row for the greatest.
    if (least := max(tokenizer.get_vocab().values()) + 1) > config.model.vocab_size:
        raise ConfigError(f"model.vocab_size = {config.model.vocab_size}: must be {least} or more with {path}")
    # A tokenizer.json may ask for both, which would change documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # a document in which <|endoftext|> is written does not end there

    def encode(texts: list[str]) -> np.ndarray:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return np.concatenate([_NO_TOKENS, *(np.array([*encoding.ids, end], np.int32) for encoding in encodings)])

    return Encoder(encode, end, hashlib.blake2b(content, digest_size=16).hexdigest())


class Batches:
    """An endless iterator of (rows, length) int32. A row is the tokens of its blocks, one behind the other.

    The state is (rows, 2) int32: a block, and how many of its tokens are read. It does not depend on which process has
    the row. grain's ConcatThenSplitIterDataset packs alike, but its state (0.2.18) does not survive JSON.
    """

    def __init__(self, rows: Sequence[grain.MapDataset], length: int):
        self.blocks, self.length = [iter(row.to_iter_dataset(_AHEAD)) for row in rows], length
        self.tokens = [_NO_TOKENS for _ in rows]  # of the block that the row is in
        self.position = np.zeros((len(rows), 2), np.int32)

    def __next__(self) -> np.ndarray:
        return np.stack([self._read(row) for row in range(len(self.blocks))])

    def _read(self, row: int) -> np.ndarray:
        parts, missing = [], self.length
        while missing:
            if self.position[row, 1] >= len(self.tokens[row]):
                self.position[row] = self.blocks[row].get_state()["next_index"], 0
                self.tokens[row] = next(self.blocks[row])
            parts.append(self.tokens[row][self.position[row, 1] :][:missing])
            self.position[row, 1] += len(parts[-1])
            missing -= len(parts[-1])
        return np.concatenate(parts)

    def get_state(self) -> np.ndarray:
        return self.position.copy()

    def set_state(self, position: np.ndarray) -> None:
        self.position = position.copy()
        for row, (block, read) in enumerate(position.tolist()):
            self.blocks[row].set_state({"next_index": block})
            self.tokens[row] = next(self.blocks[row]) if read else _NO_TOKENS


def held_out_batches(config: Config, blocks: grain.MapDataset) -> list[np.ndarray]:
    """Return the batches of an evaluation, with all rows: train.batch_size, or as many whole microbatches as fit."""
    train, length = config.train, config.train.seq_len + 1
    parts, missing = [_NO_TOKENS], train.eval_batches * train.batch_size * length
    for tokens in blocks.shuffle(seed=0).to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)):
        parts.append(tokens[:missing])
        missing -= len(parts[-1])
        if not missing:
            break
    tokens, microbatch = np.concatenate(parts), train.batch_size // train.grad_accumulation
    rows = len(tokens) // length
    if rows < microbatch:
        why = f"holds out {rows} rows of train.seq_len = {train.seq_len}, fewer than a microbatch of {microbatch}"
        raise ConfigError(f"data.valid_fraction = {config.data.valid_fraction}: {why}; raise it, or add text")
    size = min(train.batch_size, rows // microbatch * microbatch)
    return list(tokens[: rows // size * size * length].reshape(-1, size, length))
