"""Hashes that are written beside files, and compared with them before the files are used.

The hashes of a folder's files are in its B2SUMS, which `b2sum -c B2SUMS` of coreutils can read. The last line of B2SUMS
is a hash of the others.
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
    """Write the B2SUMS of a folder: the hashes of all files in it and below, except the paths in `ignored`."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = [file for file in files if file not in {SUMS, *ignored}]
    with ThreadPoolExecutor(_threads()) as threads:
        hashes = threads.map(lambda file: blake2b(folder / file), files)
        lines = "".join(f"{hash}  {file}\n" for hash, file in zip(hashes, files, strict=True)).encode()
    with atomic(folder / SUMS) as stream:
        stream.write(lines + f"{_END}{hashlib.blake2b(lines).hexdigest()}\n".encode())


def read_sums(folder: Path) -> dict[str, str]:
    """Return {path in the folder: hash}, from the B2SUMS of a folder.

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
    """Return the first file that cannot be read, or does not have its hash in `sums`; None if all do."""
    with ThreadPoolExecutor(_threads()) as threads:
        intact = threads.map(lambda file: is_intact(folder / file, sums[file]), sums)
        return next((file for file, same in zip(sums, intact, strict=True) if not same), None)


def is_intact(path: Path, hash: str) -> bool:
    """Return whether a file can be read and has this hash."""
    try:
        return blake2b(path) == hash
    except OSError:
        return False


def _threads() -> int:
    return min(8, os.cpu_count() or 1)
