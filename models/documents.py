"""Documents: text from Python's standard library, or from .txt, .jsonl and .parquet files."""

import contextlib
import glob
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxoffload import Problem
from models.reading import ConfigError, as_config_error, config_error
from models.text import closest

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can have half of a pair, which no tokenizer takes


def files_of(path: str | Sequence[str]) -> list[Path]:
    """Return the files that `path` names, sorted.

    Args:
      path: "stdlib", which is the running Python's standard library without its tests, or a glob (`**` too) of .txt
        files (each is a document), .jsonl files (each line is one) and .parquet files (each row is one); or several.

    Raises:
      ConfigError: a glob matches no file, or a file with another suffix.
    """
    found = {pattern: _match(pattern) for pattern in ([path] if isinstance(path, str) else path)}
    allowed = f'allowed are "stdlib" and globs of {", ".join(_READERS)} files'
    if not (found and all(found.values())):
        empty = [pattern for pattern, files in found.items() if not files]
        raise config_error("data.path", repr(path), f"{empty} matches no file; {allowed}")
    for file in itertools.chain(*(files for pattern, files in found.items() if pattern != "stdlib")):
        if file.suffix not in _READERS:
            raise config_error("data.path", repr(path), f"{file} has the suffix {file.suffix!r}; {allowed}")
    return sorted(set(itertools.chain(*found.values())))


def _match(pattern: str) -> list[Path]:
    if pattern != "stdlib":
        matches = map(Path, glob.glob(os.path.expanduser(pattern), recursive=True))
        return [file for file in matches if file.is_file()]
    root = Path(sysconfig.get_paths()["stdlib"])
    return [file for file in root.rglob("*.py") if _NOT_LIBRARY.isdisjoint(file.relative_to(root).parts)]


def read_documents(files: Iterable[Path], text_field: str) -> Iterator[str]:
    """Yield the documents in these files that are not empty, in the order of the files.

    Raises:
      ConfigError: a file cannot be read, or has another format; raised when it is reached.
      ImportError: there is a .parquet file, and pyarrow is missing.
    """
    for file in files:
        with as_config_error("data.path", str(file), "a file that can be read"):
            yield from filter(None, _READERS.get(file.suffix, _read_source)(file, text_field))


def _read_source(file: Path, text_field: str) -> Iterator[str]:
    with contextlib.suppress(UnicodeDecodeError):
        yield file.read_bytes().decode()


def _read_txt(file: Path, text_field: str) -> Iterator[str]:
    try:
        yield file.read_bytes().decode()  # text mode would replace \r\n by \n
    except UnicodeDecodeError as error:
        raise _faulty(f"{file} is not UTF-8 ({error}); allowed is UTF-8 text") from error


def _read_jsonl(file: Path, text_field: str) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise _faulty(f"{where} is not JSON ({error}); allowed is an object") from error
            yield _text(record, text_field, where)


def _read_parquet(file: Path, text_field: str) -> Iterator[str]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"data.path: {file} needs pyarrow: pip install jaxoffload[parquet]") from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise _faulty(f"{file} is not Parquet ({error}); allowed is a table of rows") from error
    with table:
        _text(dict.fromkeys(table.schema_arrow.names, ""), text_field, str(file))
        batches = table.iter_batches(1024, columns=[text_field])
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield _text(row, text_field, f"{file}, row {number}")


def _faulty(why: str) -> ConfigError:
    return ConfigError([Problem("data.path", f"data.path: {why}")])


_READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _text(record: Any, field: str, where: str) -> str:
    """Return the text in a field of a record. Errors say `where` the record is."""
    if not isinstance(record, dict):
        raise _faulty(f"{where} is {record!r:.40}; allowed is an object")
    if field not in record:
        close = closest(field, record)
        near = f", the nearest is {close!r}" if close else ""
        raise config_error(
            "data.text_field", repr(field), f"data.path has none in {where}; allowed are {list(record)}{near}"
        )
    text = record[field]
    if not isinstance(text, str) or _SURROGATE.search(text):
        raise config_error("data.text_field", repr(field), f"it is {text!r:.40} in {where}; allowed is Unicode text")
    return text
