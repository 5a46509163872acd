"""Trace index: where the traces of each step lie in the files of a folder, so that steps are read one after another.

Files are read twice: once to note where steps begin and end, then step by step. Only the traces of one step are in
memory at a time.

    rank-00000.jsonl   | step 100 ... | step 200 ... |        places of step 200:  bytes of lines in every file
    rank-00001.jsonl   | step 100 ... | step 200 ... |
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from distca_hf.errors import ReportError
from distca_hf.traces import LONGEST_LINE_BYTES, RankTrace, is_json, may_begin_line, step_of
from distca_hf.whole_file import lines_of, open_regular


class _Place(NamedTuple):
    """Lines of one step that follow each other in a file: the byte that the first begins with, its number, and how
    many lines and traces there are."""

    file: Path
    begin: int
    num_lines: int
    first_line: int
    num_traces: int


class _Line(NamedTuple):
    """One line of a file, without those that are empty."""

    number: int
    begin: int
    content: bytes


@dataclass(frozen=True)
class TraceIndex:
    """The steps of a folder.

    Attributes:
        steps: numbers of the steps, rising.
        unfinished: files whose last line is cut off; it is left out.
    """

    steps: Sequence[int]
    num_traces: int
    unfinished: Sequence[Path]
    _places: dict[int, list[_Place]]

    @classmethod
    def of(cls, files: Iterable[Path]) -> "TraceIndex":
        """Reads files once, and notes where the traces of each step lie.

        Raises:
            ReportError: a file cannot be read, or a line is not a trace of this version; names both.
        """
        places: defaultdict[int, list[_Place]] = defaultdict(list)
        unfinished: list[Path] = []
        num_traces = 0
        for file in files:
            for step, place in _joined(file, unfinished):
                places[step].append(place)
                num_traces += place.num_traces
        return cls(sorted(places), num_traces, unfinished, dict(places))

    def traces_of(self, step: int) -> Iterator[RankTrace]:
        """Yields the traces of a step, in the order of files and lines.

        Raises:
            ReportError: a line is not a trace; names file and line.
        """
        for place in self._places[step]:
            try:
                with open_regular(place.file) as file:
                    file.seek(place.begin)
                    lines = islice(lines_of(file, LONGEST_LINE_BYTES), place.num_lines)
                    for number, line in enumerate(lines, place.first_line):
                        if line.strip():
                            yield _trace(place.file, number, line)
            except OSError as error:
                raise ReportError(f"{place.file} cannot be read: {error.strerror or error}") from error


def _joined(file: Path, unfinished: list[Path]) -> Iterator[tuple[int, _Place]]:
    """Yields the steps of a file, with the lines of one that follow each other as one place."""
    step, begin, last_line, first_line, num_traces = None, 0, 0, 0, 0
    for line in _whole_lines(file, unfinished):
        of_line = step_of(_text(file, line.content))
        if of_line is None:  # another form; it says itself what it is, or that it is wrong
            of_line = _trace(file, line.number, line.content).step
        if of_line != step:
            if step is not None:
                yield step, _Place(file, begin, last_line - first_line + 1, first_line, num_traces)
            step, begin, first_line, num_traces = of_line, line.begin, line.number, 0
        last_line = line.number
        num_traces += 1
    if step is not None:
        yield step, _Place(file, begin, last_line - first_line + 1, first_line, num_traces)


def _whole_lines(file: Path, unfinished: list[Path]) -> Iterator[_Line]:
    """Yields lines that are not empty. The last one is left out if it begins like a trace and was not written to its
    end; then the file is added to `unfinished`."""
    before, begin = None, 0
    try:
        with open_regular(file) as lines:
            for number, content in enumerate(lines_of(lines, LONGEST_LINE_BYTES), 1):
                if before is not None:
                    yield before
                before = _Line(number, begin, content) if content.strip() else None
                begin += len(content)
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror or error}") from error
    if before is None:
        return
    is_whole = before.content.endswith(b"\n") or is_json(before.content)
    if may_begin_line(_text(file, before.content)) and not is_whole:
        unfinished.append(file)
    else:
        yield before


def _trace(file: Path, number: int, line: bytes) -> RankTrace:
    return RankTrace.read(_text(file, line), f"{file} line {number}")


def _text(file: Path, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ReportError(f"{file} is not text: it is not as distca_hf writes it") from None
