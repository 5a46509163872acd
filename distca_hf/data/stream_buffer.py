"""Stream buffer: the documents of a stream whose lengths all ranks know. Micro-batches are filled from it.

    readers ──▶ | d d d d d d d d d d d d d d d d d | ──▶ optimizer step: full micro-batches, whole documents
                 oldest                      newest

Readers read until the buffer holds its tokens. A step takes the oldest documents, and others to fill gaps. When all
readers have ended, the rest is divided evenly. Everything follows from lengths and the number of readers, so all ranks
do the same. The order of new documents depends on neither ranks nor `tokens_per_rank`.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from distca_hf.arrays import IntArray, ceil_div, offsets
from distca_hf.data.epochs import Epoch, Fits, choose_full, pack_evenly
from distca_hf.data.positions import MOST_EPOCHS, list_field, refuse_field, whole_number
from distca_hf.data.readers import ReaderPosition, Snapshot
from distca_hf.errors import ConfigError


# A document is known by its reader and its number in this reader's pass, as one integer.
NUMBER_BITS = 40
# Most readers and documents in a saved position.
MOST_READERS, MOST_DOCUMENTS = 1 << 20, 1 << 28
NO_DOCUMENTS: IntArray = np.zeros(0, dtype=np.int64)


def keys_of(reader: int, first: int, count: int) -> IntArray:
    """Returns keys of consecutive documents of a reader."""
    return (reader << NUMBER_BITS) + np.arange(first, first + count)


@dataclass(frozen=True, eq=False)
class NewDocuments:
    """What a reader has read since it was asked last."""

    # `[documents]` length, and checksum of its tokens, of each document.
    tokens: IntArray
    checksums: IntArray
    has_ended: bool
    snapshot: Snapshot | None = None  # taken after them; None if the reader took none


@dataclass(frozen=True, eq=False)
class BufferPosition:
    """All that a buffer depends on, at the end of an optimizer step."""

    pass_number: int
    refills: int  # how often readers were asked for documents in this pass
    readers: tuple[ReaderPosition, ...]
    keys: IntArray  # `[documents]` of the buffer, in order
    checksum: int

    @classmethod
    def beginning(cls, pass_number: int, num_readers: int) -> Self:
        """Returns the position before the first document of a pass."""
        return cls(pass_number, 0, (ReaderPosition(),) * num_readers, NO_DOCUMENTS, 0)

    @property
    def num_readers(self) -> int:
        return len(self.readers)

    @property
    def is_beginning(self) -> bool:
        return self.refills == 0

    def fields(self) -> dict[str, object]:
        """Returns the position as lists of numbers and text."""
        readers = [
            [one.snapshot.documents, one.snapshot.rows, one.snapshot.state, one.documents, int(one.has_ended)]
            for one in self.readers
        ]
        return {
            "pass": self.pass_number,
            "refills": self.refills,
            "positions": readers,
            "documents": self.keys.tolist(),
            "contents": self.checksum,
        }

    @classmethod
    def read(cls, state: Mapping[str, Any], num_readers: int) -> Self:
        """Reads what `fields` returned. Raises ConfigError if a field is missing, has the wrong type or is out of
        range; names it."""
        positions = list_field("positions", state.get("positions"), MOST_READERS)
        readers = []
        for position in positions:
            if not isinstance(position, list | tuple) or len(position) != 5 or not isinstance(position[2], str):
                refuse_field("positions", position, "documents, rows, a state, documents and 0 or 1")
            first, rows, documents, ended = (whole_number("positions", position[at]) for at in (0, 1, 3, 4))
            if documents < first or ended > 1:
                refuse_field("positions", position, "documents, rows, a state, documents after these and 0 or 1")
            readers.append(ReaderPosition(Snapshot(first, rows, position[2]), documents, bool(ended)))
        if len(readers) != num_readers:
            refuse_field("positions", positions, f"a position of each of {num_readers} readers")
        keys = [
            whole_number("documents", key) for key in list_field("documents", state.get("documents"), MOST_DOCUMENTS)
        ]
        for key in keys:
            reader, number = key >> NUMBER_BITS, key & ((1 << NUMBER_BITS) - 1)
            if reader >= num_readers or not readers[reader].snapshot.documents <= number < readers[reader].documents:
                refuse_field("documents", key, f"documents that {num_readers} readers have read since their snapshots")
        if len(set(keys)) < len(keys):
            refuse_field("documents", keys, "each document once")
        return cls(
            whole_number("pass", state.get("pass"), most=MOST_EPOCHS),
            whole_number("refills", state.get("refills")),
            tuple(readers),
            np.array(keys, dtype=np.int64),
            whole_number("contents", state.get("contents")),
        )


@dataclass(frozen=True, eq=False)
class StepDocuments:
    """The documents of one optimizer step, in micro-batches as they were packed."""

    # `[documents]`.
    keys: IntArray
    tokens: IntArray
    checksums: IntArray
    packed: Epoch  # micro-batches, with indices in these arrays


class StreamBuffer:
    """Documents that are known and not yet in a micro-batch."""

    def __init__(
        self,
        position: BufferPosition,
        capacity_tokens: int,  # most tokens of a micro-batch
        buffer_tokens: int,  # readers read until the buffer holds so many tokens
        # Decide the order of new documents; without shuffling, readers alternate.
        seed: int = 0,
        shuffle: bool = True,
        fits: Fits | None = None,  # see `EpochPacker`
    ) -> None:
        self._start = position
        self._capacity_tokens, self._buffer_tokens = capacity_tokens, buffer_tokens
        self._seed, self._shuffle, self._fits = seed, shuffle, fits
        self._pass, self._refills = position.pass_number, position.refills
        self._snapshots = [[reader.snapshot] for reader in position.readers]
        self._read = [reader.documents for reader in position.readers]
        self._ended = [reader.has_ended for reader in position.readers]
        self._keys = self._tokens = self._checksums = NO_DOCUMENTS

    @property
    def document_tokens(self) -> IntArray:
        """`[documents]` lengths, in order."""
        return self._tokens

    @property
    def is_at_end(self) -> bool:
        return all(self._ended) and not len(self._keys)

    def share_tokens(self) -> int:
        """Returns how many tokens each reader that has not ended is to read now; 0 if the buffer is full."""
        missing, going_on = self._buffer_tokens - int(self._tokens.sum()), self._ended.count(False)
        return ceil_div(missing, going_on) if going_on and missing > 0 else 0

    def has_ended(self, reader: int) -> bool:
        return self._ended[reader]

    def next_number(self, reader: int) -> int:
        return self._read[reader]

    def restore(self, read_again: Sequence[NewDocuments]) -> None:
        """Takes the documents that each reader read since its snapshot; keeps those that its position names. Raises
        ConfigError if the stream has other documents now."""
        keys = [
            keys_of(number, position.snapshot.documents, len(read.tokens))
            for number, (position, read) in enumerate(zip(self._start.readers, read_again, strict=True))
        ]
        found, wanted = np.concatenate(keys), self._start.keys
        at = np.searchsorted(found, wanted)  # keys rise with reader and number
        self._keys = wanted
        self._tokens = np.concatenate([read.tokens for read in read_again])[at]
        self._checksums = np.concatenate([read.checksums for read in read_again])[at]
        if self._checksum() != self._start.checksum:
            raise ConfigError(
                f"the {len(wanted)} documents that were read but not trained when the position was saved had the "
                f"checksum {self._start.checksum}, and now have {self._checksum()}: the stream, its tokenizer or its "
                "transforms were changed. Resume with the same stream, or begin it anew"
            )

    def add(self, news: Mapping[int, NewDocuments]) -> None:
        """Adds what each reader has just read."""
        keys, tokens, checksums, before = [self._keys], [self._tokens], [self._checksums], [NO_DOCUMENTS]
        for reader, read in sorted(news.items()):
            keys.append(keys_of(reader, self._read[reader], len(read.tokens)))
            tokens.append(read.tokens)
            checksums.append(read.checksums)
            before.append(offsets(read.tokens)[:-1])
            self._read[reader] += len(read.tokens)
            self._ended[reader] = read.has_ended
            if read.snapshot is not None:
                self._snapshots[reader].append(read.snapshot)
        of_old, tokens_before = len(self._keys), np.concatenate(before)
        order = np.argsort(tokens_before, kind="stable")
        if self._shuffle:
            numbers = [self._seed & 0xFFFFFFFF, self._seed >> 32 & 0xFFFFFFFF, self._pass, self._refills & 0xFFFFFFFF]
            order = np.random.RandomState(numbers).permutation(len(tokens_before))
        order = np.concatenate([np.arange(of_old), of_old + order])
        self._keys = np.concatenate(keys)[order]
        self._tokens = np.concatenate(tokens)[order]
        self._checksums = np.concatenate(checksums)[order]
        self._refills += 1

    def take(self, micro_steps: int) -> StepDocuments | None:
        """Takes the documents of the next optimizer step out of the buffer; None at the end of the pass. The buffer
        must be full."""
        if self.is_at_end:
            return None
        left, chosen = np.arange(len(self._keys)), []
        if all(self._ended):
            packed = pack_evenly(self._tokens, left, self._capacity_tokens, self._fits, in_order=not self._shuffle)
            borders = packed.offsets[: micro_steps + 1].tolist()
            chosen = [packed.documents[start:stop] for start, stop in pairwise(borders)]
        else:
            for _ in range(micro_steps):
                found = choose_full(self._tokens[left], self._capacity_tokens, self._fits, not self._shuffle)
                chosen.append(left[found])
                left = np.delete(left, found)
        taken = np.concatenate(chosen)
        packed = Epoch(np.arange(len(taken)), offsets(np.array([len(one) for one in chosen], dtype=np.int64)))
        step = StepDocuments(self._keys[taken], self._tokens[taken], self._checksums[taken], packed)
        kept = np.ones(len(self._keys), dtype=bool)
        kept[taken] = False
        self._keys, self._tokens = self._keys[kept], self._tokens[kept]
        self._checksums = self._checksums[kept]
        return step

    def position(self) -> BufferPosition:
        """Returns the current position, and drops snapshots that no document needs any more."""
        num_readers = len(self._read)
        oldest = np.array(self._read, dtype=np.int64)
        reader, number = self._keys >> NUMBER_BITS, self._keys & ((1 << NUMBER_BITS) - 1)
        np.minimum.at(oldest, reader, number)
        for one, first in enumerate(oldest.tolist()):
            snapshots = self._snapshots[one]
            del snapshots[: bisect_right(snapshots, first, key=lambda snapshot: snapshot.documents) - 1]
        readers = tuple(
            ReaderPosition(self._snapshots[one][0], self._read[one], self._ended[one]) for one in range(num_readers)
        )
        return BufferPosition(self._pass, self._refills, readers, self._keys, self._checksum())

    def _checksum(self) -> int:
        """Returns a checksum of 62 bits of the documents in this order."""
        odd = 2 * np.arange(len(self._checksums), dtype=np.uint64) + np.uint64(1)
        return int((self._checksums.astype(np.uint64) * odd).sum(dtype=np.uint64)) >> 2
