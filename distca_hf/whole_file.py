"""Whole files: writes so that the old file or the new one is there in full; and opens files that others made.

A file name that can be guessed may have been taken: by a link to another file, a device or a pipe. Nothing here writes
through a link or waits for a pipe, unless a user has named that very path.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO, BinaryIO, cast


# Characters of a name that the name of an unfinished file begins with.
NAME_CHARACTERS = 100


@contextmanager
def replaced(path: Path, *, named: bool = False) -> Iterator[Path]:
    """Yields the path of an empty file in the same folder, which replaces `path` when the context ends without an
    error. A file that is replaced hands on its mode; a new one has that of the umask.

    Args:
        named: whether a user gave this path. Then a link stays, and the file that it points to is replaced; a device
            or a pipe is written to as it is.

    Raises:
        OSError: the file cannot be made, written or moved; `path` is as it was.
    """
    if named and path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    path = path.resolve() if named else path
    unfinished = path.with_name(f".{path.stem[:NAME_CHARACTERS]}-{secrets.token_hex(8)}{path.suffix}")
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            if path.is_file() and not path.is_symlink():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file to read.

    Raises:
        OSError: it cannot be opened, or is a device or a pipe.
    """
    return cast(BinaryIO, _checked(os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")))


def open_to_append(path: Path) -> FileIO:
    """Opens a regular file to append to, without a buffer; it is made if it is not there.

    Raises:
        OSError: it cannot be opened, or is a link, a device or a pipe.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return cast(FileIO, _checked(os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)))


def _checked(file: IO[bytes]) -> IO[bytes]:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a device or a pipe")
    return file


def read_at_most(file: BinaryIO, most_bytes: int) -> bytes:
    """Returns all that a file holds.

    Raises:
        OSError: it holds more than `most_bytes`.
    """
    content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes")
    return content


def lines_of(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Yields the lines of a file.

    Raises:
        OSError: one of them is longer than `most_bytes`.
    """
    while line := file.readline(most_bytes + 1):
        if len(line) > most_bytes:
            raise OSError(errno.EFBIG, f"it has a line of more than {most_bytes:,} bytes")
        yield line
