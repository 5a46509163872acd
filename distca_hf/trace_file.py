"""Trace file: writes and reads the traces of one rank, one line of JSON for each.

Readers accept only numbers that can be computed with. They read dataclasses field by field, by their types.
"""

import enum
import errno
import json
import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from distca_hf.errors import ReportError
from distca_hf.telemetry import OF_THIS_RANK, get_logger
from distca_hf.traces import FOLDER, KIND, VERSION, RankTrace, file_name
from distca_hf.whole_file import lines_of, open_regular, open_to_append, replaced


log = get_logger(__name__)

# Longest line that is read: a line of 100,000 calls is shorter.
LONGEST_LINE_BYTES = 2**26
BEGIN_OF_LINE = f'{{"kind":"{KIND}","version":{VERSION},"step":'
STEP_OF_LINE = re.compile(rf"{re.escape(BEGIN_OF_LINE)}(\d{{1,18}}),")
# Most digits of a number: products and sums of a few numbers of this size are still finite.
MOST_DIGITS = 60
# Largest whole number of a field: a double holds it exactly, and so does JSON elsewhere.
MOST_WHOLE = 2**53
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character beyond 16 bits; JSON writes both halves so
# Converts a JSON value to an object; the second argument is its place, for messages.
Reader = Callable[[Any, str], Any]


class TraceFile:
    """The file of this rank. A run replaces what an earlier run in the same folder wrote about the same steps and
    later ones. A resumed run keeps the steps before.

    If the file cannot be written, training goes on: a warning names it, and nothing more is written. An empty `folder`
    is `distca_report`, in the output folder of a Trainer or in the working directory.
    """

    def __init__(self, folder: str) -> None:
        self._given, self._output_folder = folder, ""
        self._path: Path | None = None
        self._failed = False
        self.step: int | None = None  # optimizer step that a Trainer is in, from 1; None without one

    def follow_trainer(self, output_folder: str | None, step: int) -> None:
        """Notes that a Trainer with this output folder begins an optimizer step."""
        output_folder = output_folder or ""
        if output_folder != self._output_folder:
            self._output_folder, self._path, self._failed = output_folder, None, False
        self.step = step

    def leave_trainer(self) -> None:
        """Notes that the training of a Trainer has ended. Another one begins the file anew."""
        self.step, self._path = None, None

    @property
    def folder(self) -> Path:
        return Path(self._given) if self._given else Path(self._output_folder, FOLDER)

    def write(self, number: int, trace: RankTrace) -> None:
        """Appends a trace. `number` is of this rank in the job, or of this attention server."""
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
            for one in lines_of(old, LONGEST_LINE_BYTES):
                own = step_of(one.decode(errors="replace"))
                if own is not None and own < step and is_json(one):  # a line is cut off if a run is killed
                    new.write(one.removesuffix(b"\n") + b"\n")
            new.write(line)
        return path


def _append(path: Path, line: bytes) -> None:
    """Appends a line, or nothing: a full disk leaves no part of it."""
    with open_to_append(path) as file:
        begin = file.seek(0, os.SEEK_END)
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(begin)
            raise


def step_of(line: str) -> int | None:
    """Reads the optimizer step from the beginning of a line; None if `RankTrace.line` does not begin a line so."""
    found = STEP_OF_LINE.match(line)
    return None if found is None else int(found[1])


def may_begin_line(text: str) -> bool:
    """Returns whether a line of `RankTrace.line` may begin with this text."""
    return text.startswith(BEGIN_OF_LINE) or BEGIN_OF_LINE.startswith(text)


def is_json(line: bytes) -> bool:
    """Returns whether a line is complete: the last one is cut off if a process is killed."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def read_trace(line: str, where: str) -> RankTrace:
    """Returns the trace of a line. `where` is the file and number of the line, for messages. Raises ReportError if it
    is cut off, of another kind or version, or has other fields."""
    try:
        content = read_json(line)
    except ReportError as error:
        raise ReportError(f"{where} has {error}") from None
    except (ValueError, RecursionError):
        raise ReportError(f"{where} is not JSON: the file is cut off, or of something else") from None
    kind = content.get("kind") if isinstance(content, Mapping) else None
    if kind != KIND:
        raise ReportError(f"{where} is not a trace of a training: its kind is {kind!r}, and {KIND!r} is read here")
    if content.get("version") != VERSION:
        raise ReportError(
            f"{where} is of version {content.get('version')!r}, and version {VERSION} is read here; use the "
            "distca_hf that wrote it"
        )
    trace: RankTrace = reader_of(RankTrace)(content, where)
    wrong = _wrong(trace)
    if wrong is not None:
        raise ReportError(f"{where} has {wrong}: it is not as distca_hf writes it")
    return trace


def _wrong(trace: RankTrace) -> str | None:
    """Describes fields that contradict each other; None if there are none."""
    ranks = f"{trace.num_ranks} ranks" + (f" and {len(trace.servers)} servers" if trace.servers else "")
    if trace.num_ranks < 1 or not 0 <= trace.rank < trace.num_ranks + len(trace.servers):
        return f"rank {trace.rank} of {ranks}"
    if not trace.work_before or len(trace.work) != trace.num_ranks + len(trace.servers):
        return f"work of {len(trace.work_before)} and {len(trace.work)} ranks, of {ranks}"
    for of_step in (trace.step_work_before, trace.step_work, trace.tokens_before, trace.layer_tokens):
        if len(of_step) not in (0, trace.num_ranks):
            return f"work of a step, or tokens, of {len(of_step)} ranks, of {ranks}"
    if trace.speeds and len(trace.speeds) != len(trace.work):
        return f"speeds of {len(trace.speeds)} ranks for work of {len(trace.work)}"
    for rank, (speed, work) in enumerate(zip(trace.speeds, trace.work, strict=False)):
        if speed < 0 or (speed == 0 and work):
            return f"rank {rank} of speed {speed} with the work {work}"
    if trace.ranks_per_node < 1:
        return f"{trace.ranks_per_node} ranks per node"
    model = trace.model
    if model is not None and min(model.layers, model.hidden_size, model.tensor_ranks, len(model.heads)) < 1:
        return f"a model of {model.layers} layers, {model.hidden_size} numbers of a token, and {model.heads} heads"
    if model is not None and min(heads.groups for heads in model.heads) < 1:
        return f"a model whose heads are in groups of {model.heads}"
    others = [other for other, _ in (*trace.sent_bytes, *trace.received_bytes)]
    beyond = [other for other in others if not 0 <= other < len(trace.work)]
    return f"bytes of rank {beyond[0]}, and work of {len(trace.work)} ranks" if beyond else None


def read_json(text: str) -> Any:
    """Returns the content of JSON. Its numbers are finite, and its text can be encoded.

    Raises:
        ReportError: a number is NaN or too large, or text has half a character; says which.
        ValueError, RecursionError: it is not JSON.
    """
    content = json.loads(text, parse_float=_finite, parse_int=_whole, parse_constant=_finite)
    if HALF_CHARACTER.search(text):
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ReportError("half a character (\\ud800 to \\udfff), which cannot be written") from None
    return content


def _finite(number: str) -> float:
    value = float(number)
    if not abs(value) < 10.0**MOST_DIGITS:
        _refuse_number(number)
    return value


def _whole(number: str) -> int:
    if len(number.lstrip("-")) > MOST_DIGITS:
        _refuse_number(number)
    return int(number)


def _refuse_number(number: str) -> NoReturn:
    raise ReportError(f"the number {number[:40]}, which is not finite or too large")


@cache
def reader_of(kind: Any) -> Reader:
    """Returns the reader of a type: a dataclass, an enumeration, a tuple, an optional type, or a plain one. The reader
    raises a ReportError for a value of another type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        given = reader_of(inner[0])
        return lambda value, where: None if value is None else given(value, where)
    if origin is tuple:
        items = [reader_of(one) for one in inner if one is not Ellipsis]
        num_items = None if Ellipsis in inner else len(items)

        def read_items(value: Any, where: str) -> Any:
            if type(value) is not list or num_items not in (None, len(value)):
                _refuse(value, tuple, where)
            readers = items if num_items else repeat(items[0])
            return tuple([read(one, where) for read, one in zip(readers, value, strict=False)])

        return read_items
    if is_dataclass(kind):
        maker: Any = kind
        fields = {name: reader_of(of_field) for name, of_field in get_type_hints(kind).items()}

        def read_fields(value: Any, where: str) -> Any:
            if not isinstance(value, Mapping):
                _refuse(value, maker, where)
            missing = [name for name in fields if name not in value]
            if missing:
                raise ReportError(f"{where} has no {missing[0]!r}: it is not as distca_hf writes it")
            return maker(**{name: read(value[name], where) for name, read in fields.items()})

        return read_fields
    if issubclass(kind, enum.StrEnum):
        members = {member.value: member for member in kind}
        return lambda value, where: (
            members[value] if type(value) is str and value in members else _refuse(value, kind, where)
        )
    if kind is int:

        def whole_number(value: Any, where: str) -> int:
            if type(value) is not int:
                _refuse(value, int, where)
            if abs(value) > MOST_WHOLE:
                raise ReportError(f"{where} has the whole number {value}, larger than any that distca_hf writes")
            return value

        return whole_number
    types_of = (int, float) if kind is float else (kind,)
    return lambda value, where: kind(value) if type(value) in types_of else _refuse(value, kind, where)


def _refuse(value: object, kind: type, where: str) -> NoReturn:
    raise ReportError(f"{where} has {str(value)[:40]!r} where a {kind.__name__} belongs")
