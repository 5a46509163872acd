"""Readers: each reads its part of a stream in order, and knows its exact position.

A *snapshot* is the `state_dict` of the stream between two rows. To resume at a position, a reader loads a snapshot
before it and reads some rows again. If a stream loses rows when its state is loaded (a shuffle buffer), its only
snapshot is the beginning.

    snapshot        snapshot     snapshot
    | d0 d1 d2 d3   | d4 d5 d6   | d7 d8 d9     d5 and d8 are not trained yet: the position is the second snapshot, and
                                                six documents read after it
"""

import hashlib
import json
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from distca_hf.arrays import IntArray, exclusive_cumsum
from distca_hf.data.documents import Tokens, check_values, fit_documents, follows_masks, tokens_of
from distca_hf.data.drawn_rows import generators_left_alone, in_words, inputs_of, random_states, values_of
from distca_hf.data.rows import MASK_COLUMNS, Values, row_of
from distca_hf.data.streams import StreamSource
from distca_hf.errors import ConfigError, PackingError
from distca_hf.telemetry import OF_THIS_RANK, get_logger


log = get_logger(__name__)

# Most consecutive bad rows to leave out: more mean that all rows are wrong.
MOST_BAD_ROWS = 100


@dataclass(frozen=True, eq=False)
class StreamDocument:
    """A document, with a checksum (63 bits) of its columns."""

    tokens: Tokens
    checksum: int

    def __len__(self) -> int:
        return len(self.tokens.input_ids)

    def segment(self, start: int, stop: int) -> Tokens:
        """Returns tokens [start, stop)."""
        whole, at = self.tokens, slice(start, stop)
        inputs = {name: values[at] for name, values in whole.inputs.items()}
        return Tokens(whole.input_ids[at], whole.labels[at], whole.shift_labels[at], inputs)


@dataclass(frozen=True)
class Snapshot:
    """State of a part of the stream."""

    # Documents and rows that were read before, in this pass.
    documents: int = 0
    rows: int = 0
    state: str = ""  # JSON; empty at the beginning


@dataclass(frozen=True)
class ReaderPosition:
    """The position of a reader: a snapshot, and what it has read."""

    snapshot: Snapshot = Snapshot()  # the latest one before all documents that are still needed
    documents: int = 0  # read in this pass; those since the snapshot are read again
    has_ended: bool = False  # whether there are no more


class StreamReader:
    """Reads one part of a stream. The constructor reads a row, in the calling thread. Raises PackingError if the first
    row cannot be trained on, or draws at random."""

    def __init__(
        self,
        source: StreamSource,
        number: int,
        num_readers: int,
        pass_number: int,  # number of the pass through the stream, counted from 0
        position: ReaderPosition = ReaderPosition(),
    ) -> None:
        self._source, self._name = source, f"reader {number} of {num_readers}"
        self._position = position
        self.documents, self._rows = position.snapshot.documents, position.snapshot.rows
        self.snapshot, self.has_ended = position.snapshot, False
        # Dtypes of further inputs of the model, by name; None until a row is read.
        self.inputs: Mapping[str, np.dtype[Any]] | None = None
        self.seconds, self.truncated = 0.0, 0
        self._learnt: list[str] | None = None  # columns that say which tokens are learnt
        self._bad_rows = 0  # since the last good one
        with generators_left_alone():  # loaders with workers draw a seed for them
            self._part = source.part(number, num_readers, pass_number)
            if position.snapshot.state:
                self._part.load_state_dict(json.loads(position.snapshot.state))
            self._iterator = iter(self._part)
            before = _digest(random_states())
            self._first = self._next()
            if _digest(random_states()) != before:
                raise PackingError(
                    f"{self._name}: the stream draws at random from the generators of random, numpy.random or torch, "
                    "which training uses at the same time: neither could be resumed. Draw from a separate "
                    "generator, seeded by the row (stream.map(..., with_indices=True)), or in worker processes (a "
                    "StatefulDataLoader of torchdata)"
                )
        if self.has_ended and position == ReaderPosition() and source.has_given_rows:
            log.warning(
                "%s gives no row in pass %d, and gave some before, which are not trained again. Iterating over the "
                "stream again must begin it anew",
                *(self._name, pass_number),
                extra=OF_THIS_RANK,
            )
        source.has_given_rows |= not self.has_ended

    def read_again(self) -> list[StreamDocument]:
        """Reads the documents between the snapshot and the position. Raises ConfigError if the stream was changed, and
        has others."""
        found: list[StreamDocument] = []
        while self.documents < self._position.documents and not self.has_ended:
            found += self._read_row()
        if self.documents != self._position.documents:
            ends = "ends at" if self.has_ended else "has a row that ends at"
            raise ConfigError(
                f"{self._name} had read {self._position.documents} documents when the position was saved, and its "
                f"part of the stream now {ends} {self.documents}: the stream was changed. Give it the shards that "
                "it had"
            )
        return found

    def read(self, tokens: int) -> list[StreamDocument]:
        """Reads documents of at least this many tokens together, or to the end; then takes a snapshot."""
        found: list[StreamDocument] = []
        while tokens > 0 and not self.has_ended:
            of_row = self._read_row()
            found += of_row
            tokens -= sum(map(len, of_row))
        if not self.has_ended and self._rows > self.snapshot.rows and self._source.saves_position:
            self.snapshot = Snapshot(self.documents, self._rows, self._state())
        return found

    def _state(self) -> str:
        state = self._part.state_dict()
        try:
            text = json.dumps(state, default=lambda value: value.item())
            if json.loads(text) == state:
                return text
            wrong = "has a value that JSON changes"
        except (TypeError, ValueError, AttributeError) as error:
            wrong = str(error)
        raise ConfigError(
            f"{self._name}: the state of {type(self._part).__name__} cannot be saved as JSON ({wrong}): its "
            "state_dict may hold only numbers, text, lists, and dicts with text as keys"
        )

    def _next(self) -> Mapping[str, Any] | None:
        began = time.perf_counter()
        try:
            row = next(self._iterator, None)
        except Exception as error:
            error.add_note(f"distca_hf: {self._name} got this instead of row {self._rows} of its part of the stream")
            raise
        self.seconds += time.perf_counter() - began
        self.has_ended = row is None
        if isinstance(row, pa.Table):
            row = row_of(row)
        if row is not None and not isinstance(row, Mapping):
            raise PackingError(
                f"{self._name}, row {self._rows}: the stream gives a {type(row).__name__}, and a row is a mapping "
                "with 'input_ids'"
            )
        return row

    def _read_row(self) -> list[StreamDocument]:
        """Returns the documents of the next row; none of a bad row that is left out."""
        row, self._first = (self._next() if self._first is None else self._first), None
        if row is None:
            return []
        where = f"{self._name}, row {self._rows}: "
        self._rows += 1
        try:
            found = self._documents_of(row, where)
        except PackingError as error:
            self._bad_rows += 1
            if not self._source.skips_bad_rows or self._bad_rows > MOST_BAD_ROWS:
                raise
            log.warning("left out: %s", error)
            return []
        self._bad_rows = 0
        self.documents += len(found)
        return found

    def _documents_of(self, row: Mapping[str, Any], where: str) -> list[StreamDocument]:
        # 1. The columns that count, and the documents of the row.
        reading = self._source.reading
        ids = row.get("input_ids")
        if ids is None and "input_ids" in row:
            raise PackingError(f"{where}input_ids is None; leave such rows out (stream.filter)")
        if ids is None:
            raise PackingError(f"{where}the stream gives no 'input_ids', only {list(row)}; tokenise it (stream.map)")
        if not hasattr(ids, "__len__"):
            raise PackingError(f"{where}input_ids is {ids!r}, and must be a list of the tokens of a document")
        tokens = len(ids)
        if tokens == 0:
            raise PackingError(f"{where}it has no tokens; leave such rows out (stream.filter)")
        shown = {name: value for name, value in row.items() if reading.looks_at(name, where)}
        because = f"input_ids has {tokens} tokens, so they must be as many"
        values = values_of(shown, reading, where, "the stream", tokens, because)
        inputs = inputs_of(values)
        if self.inputs is None:
            self.inputs = inputs
        elif inputs != self.inputs:
            raise PackingError(
                f"{where}the stream gives {in_words(inputs)} in addition to tokens, and {in_words(self.inputs)} "
                "before; give every row the same inputs of the model"
            )
        followed = ("labels", *MASK_COLUMNS) if follows_masks(reading, values) else ("labels",)
        learnt = [name for name in followed if name in values]
        if self._learnt is None:
            self._learnt = learnt
        elif learnt != self._learnt:
            raise PackingError(
                f"{where}the columns of what is learnt are {learnt}, and {self._learnt} before: give every row the "
                "same. All tokens of a row are learnt if its labels are its input_ids"
            )
        # 2. Whole documents, or parts of those that are too long.
        found = []
        for begin, start, stop in self._parts(shown.get("seq_lengths"), tokens, where):
            segment = {name: column[start:stop] for name, column in values.items()}
            check_values(segment, where, start, begin, reading.vocabulary_tokens)
            whole = tokens_of(segment, stop - start, True, reading, inputs)
            found.append(StreamDocument(whole, _checksum(segment)))
        return found

    def _parts(self, packed: Any, tokens: int, where: str) -> Iterable[tuple[int, int, int]]:
        """Returns, for each part of the documents of a row, where its document begins in the row, its first token, and
        its end. `packed` are lengths of the documents; None if the row is one."""
        if packed is None and tokens <= self._source.longest_tokens:
            return [(0, 0, tokens)]
        lengths = np.atleast_1d(np.array(tokens if packed is None else packed))
        if lengths.dtype.kind not in "iu" or lengths.ndim != 1:
            raise PackingError(f"{where}seq_lengths are {packed!r}, and must be a list of lengths of documents")
        lengths = lengths.astype(np.int64)
        if lengths.sum() != tokens or (lengths < 1).any():
            raise PackingError(f"{where}seq_lengths are {lengths.tolist()}, and the row has {tokens} tokens")
        document, first, kept = self._fit(lengths, where)
        begins = exclusive_cumsum(lengths)[document]
        starts = begins + first
        return zip(begins.tolist(), starts.tolist(), (starts + kept).tolist(), strict=True)

    def _fit(self, lengths: IntArray, where: str) -> tuple[IntArray, IntArray, IntArray]:
        """Returns document, first token and length of each part of a row's documents."""
        most, longest = self._source.longest_tokens, int(lengths.max())
        if longest > most and self._source.overlong == "error":
            setting = "tokens_per_rank" if self._source.stay_whole else "ranks x tokens_per_rank"
            raise PackingError(
                f"{where}a document has {longest} tokens, and {setting} is {most}. Raise it, or choose "
                "overlong='split' or 'truncate'"
            )
        if longest > most and self._source.overlong == "truncate":
            if not self.truncated:
                log.warning(
                    "%sa document of %d tokens is truncated to %d; later ones of this reader are only counted",
                    *(where, longest, most),
                )
            self.truncated += int((lengths > most).sum())
        return fit_documents(lengths, most, self._source.overlong)


def _checksum(values: Values) -> int:
    """Returns a checksum (63 bits) of all columns of a document. What is learnt follows from them."""
    of_tokens = of_others = zlib.crc32(values["input_ids"].astype("<i4").data)
    for name, column in sorted(values.items()):
        if name != "input_ids":
            of_others = zlib.crc32(np.ascontiguousarray(column).data, of_others)
    return (of_tokens << 32 | of_others) >> 1


def _digest(states: Mapping[str, Any]) -> str:
    numpy_state = states["numpy"]
    of_torch = states.get("torch")
    digest = hashlib.blake2b(repr(states["python"]).encode())
    digest.update(numpy_state[1].tobytes() + repr(numpy_state[2:]).encode())
    if of_torch is not None:
        digest.update(of_torch.numpy().tobytes())
    return digest.hexdigest()
