"""Whole files: replaces a file as a whole, leaving the old or the new one complete; and opens files of other programs.

A guessable file name may have been taken: by a link to another file, a device or a pipe. Nothing here writes through a
link or waits for a pipe, unless a user has named that very path.
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


# Characters of a file's name with which the name of its unfinished version begins.
NAME_CHARACTERS = 100


@contextmanager
def replaced(path: Path, *, named: bool = False) -> Iterator[Path]:
    """Yields the path of an empty file in the same folder, which replaces `path` when the context ends without an
    error. Keeps the mode of a replaced file; a new one gets the umask's. Raises OSError if the file cannot be created,
    written or moved; `path` is unchanged.

    Args:
        named: whether a user gave this path. Then a link stays and its target is replaced, and a device or a pipe is
            written to directly.
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
    """Opens a regular file to read. Raises OSError if it cannot be opened, or is a device or a pipe."""
    return cast(BinaryIO, _checked(os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")))


def open_to_append(path: Path) -> FileIO:
    """Opens a regular file to append to, without a buffer; creates it if necessary. Raises OSError if it cannot be
    opened, or is a link, a device or a pipe."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return cast(FileIO, _checked(os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)))


def _checked(file: IO[bytes]) -> IO[bytes]:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a device or a pipe")
    return file


def read_at_most(file: BinaryIO, most_bytes: int) -> bytes:
    """Returns the content of a file. Raises OSError if it holds more than `most_bytes`."""
    content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes")
    return content


def lines_of(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Yields the lines of a file. Raises OSError if one of them is longer than `most_bytes`."""
    while line := file.readline(most_bytes + 1):
        if len(line) > most_bytes:
            raise OSError(errno.EFBIG, f"it has a line of more than {most_bytes:,} bytes")
        yield line
