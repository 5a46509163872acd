"""Traces: the measurements of one rank in one micro-batch of a reported step, as training writes them and `distca
report` reads them.

Every rank writes a file of its own, `rank-00003.jsonl`, with one JSON object on a line for each micro-batch, and so
does every attention server, `server-00000.jsonl`. Ranks exchange nothing for it.
"""

import enum
import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from typing import Any, NoReturn, Self, Union, cast, get_args, get_origin, get_type_hints

from distca_hf.errors import ReportError


# What a line is, and the version of its fields.
KIND, VERSION = "distca-trace", 2
# Name of a folder of traces, unless a setting names another one; and of the files in it.
FOLDER = "distca_report"
FILES, SERVER_FILES = "rank-*.jsonl", "server-*.jsonl"
BEGIN_OF_LINE = f'{{"kind":"{KIND}","version":{VERSION},"step":'
STEP_OF_LINE = re.compile(rf"{re.escape(BEGIN_OF_LINE)}(\d{{1,18}}),")
# Most digits of a number that is computed with: products and sums of a few such numbers are finite, too.
MOST_DIGITS = 60
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")  # half of one outside of 16 bits; JSON writes both halves so


def file_name(number: int, is_server: bool = False) -> str:
    """Returns the name of the file of a rank, by its number in the job; or of an attention server, by its own."""
    return f"{'server' if is_server else 'rank'}-{number:05d}.jsonl"


def step_of(line: str) -> int | None:
    """Returns the optimizer step of a line, from its beginning; None if that is not as `RankTrace.line` has it."""
    found = STEP_OF_LINE.match(line)
    return None if found is None else int(found[1])


def may_begin_line(text: str) -> bool:
    """Returns whether a text may be the beginning of a line as `RankTrace.line` has it."""
    return text.startswith(BEGIN_OF_LINE) or BEGIN_OF_LINE.startswith(text)


class PassPart(enum.StrEnum):
    """Part of a pass that an attention call belongs to."""

    FORWARD = "forward"
    RECOMPUTED = "recomputed"
    BACKWARD = "backward"


class Spent(enum.StrEnum):
    """The use of a span of time within an attention call."""

    SEND = "send"  # rows are gathered, and their exchange is started
    LOCAL = "local"  # kernels on own keys
    WAIT = "wait"  # for rows of other ranks
    REMOTE = "remote"  # kernels on keys and queries of other ranks
    COMBINE = "combine"  # results and gradients of other ranks are merged


@dataclass(frozen=True)
class CallTrace:
    """One attention call.

    Attributes:
        part: of the pass.
        layer: number of the layer among those that attend.
        window_tokens: of its sliding window; 0 without one.
        begin_us: microseconds from the beginning of the pass.
        spans: uses of time in their order, and microseconds of each. In forward and backward calls every chunk of an
            exchange has a span of waiting.
    """

    part: PassPart
    layer: int
    window_tokens: int
    begin_us: float
    spans: tuple[tuple[Spent, float], ...]

    @property
    def us(self) -> float:
        """Microseconds of the whole call."""
        return sum(us for _, us in self.spans)


@dataclass(frozen=True)
class LayersTrace:
    """The layers that attend with one mask, on one rank.

    Attributes:
        window_tokens: of their sliding window; 0 without one.
        layers: how many there are.
        tasks: of this rank, in each of them: queries, keys before the first of them, and 1 if it computes one group of
            heads alone. None where they were not known when the pass began.
    """

    window_tokens: int
    layers: int
    tasks: tuple[tuple[int, int, int], ...] | None


@dataclass(frozen=True)
class PredictedCosts:
    """Seconds of a token and of an attended pair, all layers together, by the rates of a GPU.

    Attributes:
        rates: the GPU.
        token_seconds: of a token without attention, forward and backward.
        pair_forward_seconds, pair_backward_seconds: of a pair of a query and a key, with all that is recomputed in
            backward.
    """

    rates: str
    token_seconds: float
    pair_forward_seconds: float
    pair_backward_seconds: float


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank.

    Attributes:
        kind: "GPU", as torch has it; or "process", the resident set of a process on CPUs.
        peak_bytes: most that was in use at once since the process began.
        reserved_bytes: that torch holds of the GPU; of a process as `peak_bytes`.
        device_bytes: of the GPU, or of the host.
    """

    kind: str
    peak_bytes: int
    reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class RankTrace:
    """One rank in one micro-batch.

    Attributes:
        step: optimizer step, from 1.
        micro_batch: number of the micro-batch, counted by the loader.
        written: seconds since 1970, when the pass began.
        rank: number of the rank among those that share documents, or of an attention server behind them.
        num_ranks: how many share documents.
        servers: numbers of the attention servers that take part, in the order of their ranks.
        stage, chunk, tensor_rank: place among stages of a pipeline, part of the model on this stage, and place among
            tensor ranks; 0 without them.
        device: name of the GPU, or "cpu".
        ranks_per_node: ranks that share a node.
        placed: whether documents were placed; else packs were kept.
        fingerprint: of the plan, in hexadecimal digits. Equal on all ranks that share documents.
        documents, num_tokens, longest_document_tokens: of all ranks together.
        tokens: that this rank holds.
        kinds: of the layers that attend.
        work_before, work: `[ranks]` attended pairs in one layer, mean over layers: of documents in the order of the
            data, or as packs came, and as planned. The first has no servers, the second has them behind all others.
        speeds: `[ranks]` relative speeds of the ranks of `work`, 0 for one that attends to nothing; empty where all
            are equal.
        sent_bytes, received_bytes: (rank, bytes) of one layer's forward pass, mean over layers.
        calls: in the order in which they were made.
        pass_seconds: from the beginning of the forward pass to the end of its last attention call, backward included.
        step_seconds: from the beginning of this pass to that of the next one, on the host; None if none followed.
        is_complete: whether all calls of backward were made and had ended.
        costs: None on CPUs, and where operations of the model are not known.
    """

    step: int
    micro_batch: int
    written: float
    rank: int
    num_ranks: int
    servers: tuple[int, ...]
    stage: int
    chunk: int
    tensor_rank: int
    device: str
    ranks_per_node: int
    placed: bool
    fingerprint: str
    documents: int
    num_tokens: int
    longest_document_tokens: int
    tokens: int
    kinds: tuple[LayersTrace, ...]
    work_before: tuple[float, ...]
    work: tuple[float, ...]
    speeds: tuple[float, ...]
    sent_bytes: tuple[tuple[int, int], ...]
    received_bytes: tuple[tuple[int, int], ...]
    calls: tuple[CallTrace, ...]
    pass_seconds: float
    step_seconds: float | None
    is_complete: bool
    memory: MemoryUse
    costs: PredictedCosts | None

    @property
    def layers(self) -> int:
        """Layers that attend."""
        return sum(kind.layers for kind in self.kinds)

    @property
    def is_server(self) -> bool:
        """Whether it is that of an attention server."""
        return self.rank >= self.num_ranks

    def name_of(self, rank: int) -> str:
        """Returns words for a rank, or for an attention server behind the ranks."""
        return f"rank {rank}" if rank < self.num_ranks else f"server {self.servers[rank - self.num_ranks]}"

    def line(self) -> str:
        """Returns the trace as one line of JSON."""
        return json.dumps({"kind": KIND, "version": VERSION, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def read(cls, line: str, where: str) -> Self:
        """Returns the trace of a line.

        Args:
            where: file and number of the line, for messages.

        Raises:
            ReportError: it is cut off, of another kind or version, or has other fields.
        """
        try:
            content = read_json(line)
        except ReportError as error:
            raise ReportError(f"{where} has {error}") from None
        except (ValueError, RecursionError):
            raise ReportError(f"{where} is no JSON: the file is cut off, or of something else") from None
        kind = content.get("kind") if isinstance(content, Mapping) else None
        if kind != KIND:
            raise ReportError(f"{where} is no trace of a training: its kind is {kind!r}, and {KIND!r} is read here")
        if content.get("version") != VERSION:
            raise ReportError(
                f"{where} is of version {content.get('version')!r}, and version {VERSION} is read here; use the "
                "distca_hf that wrote it"
            )
        trace: Self = _reader(cast(Any, cls))(content, where)
        wrong = trace._wrong()
        if wrong is not None:
            raise ReportError(f"{where} has {wrong}: it is not as distca_hf writes it")
        return trace

    def _wrong(self) -> str | None:
        """Returns words for fields that do not go together; None if all do."""
        ranks = f"{self.num_ranks} ranks" + (f" and {len(self.servers)} servers" if self.servers else "")
        if self.num_ranks < 1 or not 0 <= self.rank < self.num_ranks + len(self.servers):
            return f"rank {self.rank} of {ranks}"
        if not self.work_before or len(self.work) != self.num_ranks + len(self.servers):
            return f"work of {len(self.work_before)} and {len(self.work)} ranks, of {ranks}"
        if self.speeds and len(self.speeds) != len(self.work):
            return f"speeds of {len(self.speeds)} ranks for work of {len(self.work)}"
        for rank, (speed, work) in enumerate(zip(self.speeds, self.work, strict=False)):
            if speed < 0 or (speed == 0 and work):
                return f"rank {rank} of speed {speed} with the work {work}"
        if self.ranks_per_node < 1:
            return f"{self.ranks_per_node} ranks per node"
        others = [other for other, _ in (*self.sent_bytes, *self.received_bytes)]
        beyond = [other for other in others if not 0 <= other < len(self.work)]
        return f"bytes of rank {beyond[0]}, and work of {len(self.work)} ranks" if beyond else None


def read_json(text: str) -> Any:
    """Returns the content of JSON, with whose numbers one can compute, and whose words can be written.

    Raises:
        ReportError: a number is none (NaN), or too large; or a word has half a character. Says which.
        ValueError, RecursionError: it is no JSON.
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
    raise ReportError(f"the number {number[:40]}, with which nothing can be computed")


# Makes an object of a value of JSON; the second argument is where it is.
_Reader = Callable[[Any, str], Any]


@cache
def _reader(kind: Any) -> _Reader:
    """Returns the reader of a type: of a dataclass, an enumeration, a tuple, an optional type, or a plain one. It
    raises a ReportError for a value of another type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        given = _reader(inner[0])
        return lambda value, where: None if value is None else given(value, where)
    if origin is tuple:
        return _reader_of_equal(inner[0]) if inner[1] is Ellipsis else _reader_of_some(inner)
    if is_dataclass(kind):
        return _reader_of_fields(kind)
    if issubclass(kind, enum.StrEnum):
        members = {member.value: member for member in kind}
        return lambda value, where: (
            members[value] if type(value) is str and value in members else _refuse(value, kind, where)
        )
    types_of = (int, float) if kind is float else (kind,)
    return lambda value, where: kind(value) if type(value) in types_of else _refuse(value, kind, where)


def _reader_of_equal(kind: Any) -> _Reader:
    item = _reader(kind)

    def read(value: Any, where: str) -> Any:
        return tuple([item(one, where) for one in value]) if type(value) is list else _refuse(value, tuple, where)

    return read


def _reader_of_some(kinds: tuple[Any, ...]) -> _Reader:
    items = [_reader(kind) for kind in kinds]

    def read(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(items):
            _refuse(value, tuple, where)
        return tuple([item(one, where) for item, one in zip(items, value, strict=True)])

    return read


def _reader_of_fields(kind: Any) -> _Reader:
    readers = {name: _reader(of_field) for name, of_field in get_type_hints(kind).items()}

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            _refuse(value, kind, where)
        missing = [name for name in readers if name not in value]
        if missing:
            raise ReportError(f"{where} has no {missing[0]!r}: it is not as distca_hf writes it")
        return kind(**{name: reader(value[name], where) for name, reader in readers.items()})

    return read


def _refuse(value: object, kind: type, where: str) -> NoReturn:
    raise ReportError(f"{where} has {str(value)[:40]!r} where a {kind.__name__} belongs")
