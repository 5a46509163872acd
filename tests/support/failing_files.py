"""Operations on files that fail: each of those that a save makes, one after the other, or all from one of them on.

Python tells a hook of every operation before it is made (`sys.addaudithook`), with the place. A hook stays until the
process ends, so there is one, which does nothing outside of a block.
"""

import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


# Operations that change files. Others that open one are told apart by their place.
CHANGES = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.truncate"})


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it and goes on, and no file is changed any more."""


class Operations:
    """Operations in a folder since a block began.

    Args:
        folder: where they are counted. Names without a folder are counted, too: they are within an open one.
        failing: number of the operation that fails; None: none does.
        kills: whether the process is taken to end there.
    """

    def __init__(self, folder: Path, failing: int | None = None, kills: bool = False) -> None:
        self._folder, self._failing, self._kills = str(folder), failing, kills
        self.count = 0

    def note(self, event: str, *arguments: object) -> None:
        """Notes an operation before it is made; one that fails raises an error."""
        place = str(arguments[0]) if arguments else ""
        is_here = place.startswith(self._folder) or (os.sep not in place and not place.isdecimal())
        if event not in CHANGES | {"open", "os.fsync"} or not is_here:
            return
        number, self.count = self.count, self.count + 1
        if self._failing is None or number < self._failing or (number > self._failing and not self._kills):
            return
        if self._kills:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            raise Killed
        raise OSError(errno.EIO, f"{event} {place}: as a test wants it")


_now: list[Operations] = []


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    for operations in _now:
        operations.note(event, *arguments)


sys.addaudithook(_hook)


@contextmanager
def counted(operations: Operations) -> Iterator[None]:
    """Counts, and fails, the operations of a block."""
    fsync, limits = os.fsync, resource.getrlimit(resource.RLIMIT_FSIZE)

    def noted_fsync(file: int) -> None:
        operations.note("os.fsync", operations._folder)
        fsync(file)

    _now.append(operations)
    os.fsync = noted_fsync
    try:
        yield
    finally:
        _now.remove(operations)
        os.fsync = fsync
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def full_disk(bytes_left: int) -> Iterator[None]:
    """Lets no file of a block become larger than this."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def ways_to_fail(prepare: Callable[[], Path], save: Callable[[], object]) -> Iterator[str]:
    """Saves again and again, each time after `prepare`, and yields words for every way in which it failed: at each of
    its operations, once with an error, and once as if the process had ended there; and on disks without room for one
    of the files that it writes.

    Args:
        prepare: makes what was saved before, and returns the folder in which all is.
        save: makes the save.
    """
    everything = Operations(prepare())
    with counted(everything):
        save()
    sizes = {path.stat().st_size for path in Path(everything._folder).rglob("*") if path.is_file()}
    for kills in (False, True):
        for number in range(everything.count):
            operations = Operations(prepare(), number, kills)
            with suppress(Exception, Killed), counted(operations):
                save()
            assert operations.count > number
            yield f"{'the process ends' if kills else 'an error'} at operation {number} of {everything.count}"
    for room in sorted({size // 2 for size in sizes} | {size - 1 for size in sizes}):
        prepare()
        with suppress(Exception), full_disk(room):
            save()
        yield f"no file has more than {room} bytes"
