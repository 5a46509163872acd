"""Trace file: the file into which one rank writes its traces, and which optimizer step a Trainer is in."""

import errno
import os
from pathlib import Path

from distca_hf.telemetry import OF_THIS_RANK, get_logger
from distca_hf.traces import FOLDER, LONGEST_LINE_BYTES, RankTrace, file_name, is_json, step_of
from distca_hf.whole_file import lines_of, open_regular, open_to_append, replaced


log = get_logger(__name__)


class TraceFile:
    """The file of this rank. What a run writes takes the place of what an earlier run in the same folder wrote about
    the same steps and later ones; a run that is resumed keeps the steps before.

    A file that cannot be written ends no training: a warning names it, and nothing is written any more.

    Args:
        folder: of the traces of all ranks; empty: `distca_report`, in the output folder of a Trainer, or in the
            working directory.

    Attributes:
        step: optimizer step that a Trainer is in, from 1; None without one.
    """

    def __init__(self, folder: str) -> None:
        self._given, self._output_folder = folder, Path()
        self._path: Path | None = None
        self._failed = False
        self.step: int | None = None

    def follow_trainer(self, output_folder: str | None, step: int) -> None:
        """Notes that a Trainer with this output folder begins an optimizer step."""
        output = Path(output_folder or "")
        if output != self._output_folder:
            self._output_folder, self._path, self._failed = output, None, False
        self.step = step

    def leave_trainer(self) -> None:
        """Notes that the training of a Trainer has ended. Another one begins the file anew."""
        self.step, self._path = None, None

    @property
    def folder(self) -> Path:
        """Folder of the traces of all ranks."""
        return Path(self._given) if self._given else self._output_folder / FOLDER

    def write(self, number: int, trace: RankTrace) -> None:
        """Appends a trace.

        Args:
            number: of this rank in the job, or of this attention server.
        """
        if self._failed:
            return
        line = f"{trace.line()}\n".encode()
        try:
            if self._path is None:
                self._path = self._begun(file_name(number, trace.is_server), trace.step, line)
            else:
                _append(self._path, line)
        except OSError as error:
            self._failed = True
            log.warning(
                "the trace of step %d cannot be written to %s (%s): nothing more is written for distca report; "
                "set report_folder",
                *(trace.step, self.folder, error.strerror or error),
                extra=OF_THIS_RANK,
            )

    def _begun(self, name: str, step: int, line: bytes) -> Path:
        """Returns the path of the file, which holds the lines of earlier steps and then this one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        if not path.exists():
            _append(path, line)
            return path
        with replaced(path) as unfinished, unfinished.open("wb") as new, open_regular(path) as old:
            lines = (one.removesuffix(b"\n") for one in lines_of(old, LONGEST_LINE_BYTES))
            new.writelines(one + b"\n" for one in lines if _is_before(one, step))
            new.write(line)
        return path


def _is_before(line: bytes, step: int) -> bool:
    """Returns whether a line is a whole trace of an earlier step; one is cut off when a run is killed."""
    own = step_of(line.decode(errors="replace"))
    return own is not None and own < step and is_json(line)


def _append(path: Path, line: bytes) -> None:
    """Appends a line, or nothing of it: a full disk leaves no part behind."""
    with open_to_append(path) as file:
        begin = file.seek(0, os.SEEK_END)
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(begin)
            raise
