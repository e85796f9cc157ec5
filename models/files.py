"""Files that are written whole or not at all, their hashes, and the error of a full disk."""

import contextlib
import errno
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# No space left, the quota is used up, or a file reaches the limit on its size (`ulimit -f`).
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Unwritable(OSError):
    """A file cannot be written. `filename` is its path, which the error of a `write` does not have."""


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that is renamed to `path` once it is whole and on the disk, and removed on an error.

    Raises:
      Unwritable: it cannot be created, written or renamed.
    """
    # An unpredictable name and "x" (O_EXCL): a file or symbolic link that is there already is not written through.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    with as_unwritable(path):
        try:
            with temporary.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def append(path: Path, content: bytes) -> None:
    """Append to a file.

    Raises:
      Unwritable: it cannot be written; a part of `content` may have been.
    """
    with as_unwritable(path), path.open("ab") as stream:
        stream.write(content)


@contextlib.contextmanager
def as_unwritable(path: Path) -> Iterator[None]:
    """Raise an OSError as Unwritable, with this path."""
    try:
        yield
    except Unwritable:
        raise
    except OSError as error:
        raise Unwritable(error.errno, error.strerror, str(path)) from error


def blake2b(path: Path) -> str:
    """Return the hash of a file that coreutils' `b2sum` prints. The file is read in blocks, without the GIL."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()
