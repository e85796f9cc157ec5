"""Hashes that are written beside files, and found to be theirs or not before the files are used.

A folder's are in a file named B2SUMS, as coreutils' `b2sum -c B2SUMS` reads them, with a last line that says that it is
whole.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from models.files import atomic, blake2b

SUMS = "B2SUMS"
_END = "# blake2b of the lines above: "


def write_sums(folder: Path, ignored: Iterable[str] = ()) -> None:
    """Hashes the files in a folder, those in its folders too, into its B2SUMS. `ignored`: paths in it."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = [file for file in files if file not in {SUMS, *ignored}]
    with ThreadPoolExecutor(_threads()) as threads:
        hashes = threads.map(lambda file: blake2b(folder / file), files)
        lines = "".join(f"{hash}  {file}\n" for hash, file in zip(hashes, files, strict=True)).encode()
    with atomic(folder / SUMS) as stream:
        stream.write(lines + f"{_END}{hashlib.blake2b(lines).hexdigest()}\n".encode())


def read_sums(folder: Path) -> dict[str, str]:
    """{path in the folder: hash} of a folder's B2SUMS.

    Raises:
      OSError: it cannot be read.
      ValueError: it is damaged.
    """
    content = (folder / SUMS).read_bytes()
    lines, mark, end = content.rpartition(_END.encode())
    if not mark or end != f"{hashlib.blake2b(lines).hexdigest()}\n".encode():
        raise ValueError("not as it was written")
    return {file: hash for hash, _, file in (line.partition("  ") for line in lines.decode().splitlines())}


def first_damaged(folder: Path, sums: Mapping[str, str]) -> str | None:
    """The first of these files that is not what was hashed, or that cannot be read; None if all are."""
    with ThreadPoolExecutor(_threads()) as threads:
        right = threads.map(lambda file: is_intact(folder / file, sums[file]), sums)
        return next((file for file, holds in zip(sums, right, strict=True) if not holds), None)


def is_intact(path: Path, hash: str) -> bool:
    try:
        return blake2b(path) == hash
    except OSError:
        return False


def _threads() -> int:
    return min(8, os.cpu_count() or 1)
