"""Stream feed: reads a stream, fills the buffer and prepares micro-batches, in a background thread.

    read ──▶ lengths of all ranks ──▶ buffer ──▶ optimizer step ──▶ placement, plan ──▶ tokens travel ──▶ micro-batch
             one gather per refill                                                     one exchange

Before each micro-batch and each refill ranks agree to read on, and on what. So a rank that cannot, or that stops,
tells the others. The loader has compared their settings and positions before.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from zlib import crc32

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.batches.prepare import Cursor, HostPlans, Prepared
from distca_hf.batches.preview import PlacedData
from distca_hf.batches.stream_wires import Inputs, RefillMessage, reader_rank, same_inputs, send_tokens
from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import Transport
from distca_hf.data.collate import collate
from distca_hf.data.readers import StreamDocument, StreamReader
from distca_hf.data.stream_buffer import NO_DOCUMENTS, BufferPosition, NewDocuments, StreamBuffer, keys_of
from distca_hf.data.streams import StreamSource
from distca_hf.errors import DistCAError, PeerLostError, PlanMismatchError, StepTimeoutError
from distca_hf.layout import Layout


@dataclass(frozen=True, eq=False)
class StreamPosition:
    """The next micro-batch of a stream.

    Attributes:
        buffer: position of the buffer before the optimizer step of this micro-batch.
        into_step: micro-batches of that step that come before it.
        micro_batches: number of micro-batches before it, in all passes.
        step_batches: micro-batches of that step in this pass, if the pass before had the others; 0: all of them.
    """

    buffer: BufferPosition
    into_step: int = 0
    micro_batches: int = 0
    step_batches: int = 0

    def in_words(self) -> str:
        """Returns the position as ranks compare it."""
        buffer, within = self.buffer, f", {self.into_step} micro-batches into a step" if self.into_step else ""
        documents = f"{len(buffer.keys)} documents read ahead (checksum {buffer.checksum})"
        return f"pass {buffer.pass_number}, {buffer.refills} refills, {documents}{within}"


@dataclass(frozen=True, eq=False)
class StreamBatch:
    """A micro-batch, and the position after it.

    Attributes:
        contents: checksum of its documents.
        read_seconds: seconds that each rank has spent reading since the last micro-batch.
        truncated: documents that all readers have truncated since then.
        is_last: whether the pass ends with it.
        owed: micro-batches that the last optimizer step of the pass lacks.
    """

    prepared: Prepared
    data: PlacedData
    after: StreamPosition
    contents: int
    read_seconds: Sequence[float]
    truncated: int
    is_last: bool
    owed: int


class StreamFeed:
    """Makes the micro-batches of one pass through a stream, from a position on.

    The constructor opens this rank's readers, in the training thread.

    Args:
        buffer: buffer at that position.
        transport: used only by the background thread.
        plans: plans micro-batches; its planner may be replaced meanwhile.

    Raises:
        PackingError, ConfigError: see `StreamReader`.
    """

    def __init__(
        self,
        source: StreamSource,
        begin: StreamPosition,
        buffer: StreamBuffer,
        transport: Transport,
        plans: HostPlans,
        micro_steps: int,
    ) -> None:
        self._begin, self._buffer, self._transport, self._plans = begin, buffer, transport, plans
        self._micro_steps = micro_steps
        self._inputs: Inputs = {}
        self._documents: dict[int, StreamDocument] = {}  # read by this rank and not yet sent, by key
        self._read_seconds, self._reported_seconds = np.zeros(transport.world_size), 0.0
        self._truncated, self._reported_truncated = 0, 0
        positions, pass_number = begin.buffer.readers, begin.buffer.pass_number
        self._num_readers = len(positions)
        # Readers that are not at their end, or of which a document is left.
        self._open = [
            number
            for number, position in enumerate(positions)
            if not position.has_ended or position.snapshot.documents < position.documents
        ]
        try:
            self._readers = {
                number: StreamReader(source, number, self._num_readers, pass_number, positions[number])
                for number in self._open
                if reader_rank(number, transport.world_size) == transport.rank
            }
        except BaseException as error:
            self._announce_unable(error)
            raise

    def micro_batches(self) -> Generator[StreamBatch, None, None]:
        """Yields micro-batches to the end of the pass. Ranks that close this generator must do so after the same one.

        Raises:
            PackingError, ConfigError: a row cannot be trained on, or the stream is not the one that was saved.
            PeerLostError: another rank could not read on.
        """
        try:
            self._plans.use_device()
            yield from self._micro_batches()
        except (PeerLostError, PlanMismatchError, StepTimeoutError):  # the others know
            raise
        except BaseException as error:  # also if the consumer stops
            self._announce_unable(error)
            raise

    def _micro_batches(self) -> Generator[StreamBatch, None, None]:
        buffer, number = self._buffer, self._begin.micro_batches
        before, into_step, step_batches = self._begin.buffer, self._begin.into_step, self._begin.step_batches
        self._restore(number)
        while True:
            while share_tokens := buffer.share_tokens():
                self._refill(share_tokens, number)
            wanted = step_batches or self._micro_steps
            step = buffer.take(wanted)
            if step is None:
                return
            # 1. The optimizer step, as the other loaders divide it.
            divided = self._plans.planner.regroup(step.packed, step.tokens, self._micro_steps)
            data = PlacedData(
                planner=self._plans.planner,
                document_tokens=np.concatenate([step.tokens, buffer.document_tokens]),
                micro_batches=copy(divided),
                first=0,
                micro_steps=self._micro_steps,
                per_epoch=None,
            )
            after = buffer.position()
            # 2. Its micro-batches.
            for index in range(into_step, divided.num_micro_batches):
                began = perf_counter()
                chosen = divided.micro_batch(index)
                keys, cursor = step.keys[chosen], Cursor(before.pass_number, number)
                prepared = self._plans.plan(cursor, keys, step.tokens[chosen], divided.layout(index))
                plan_seconds = perf_counter() - began
                fed = replace(self._with_rows(prepared, keys), plan_seconds=plan_seconds)
                number += 1
                is_end = index + 1 == divided.num_micro_batches
                within = StreamPosition(before, index + 1, number, step_batches)
                position = StreamPosition(after, 0, number) if is_end else within
                read_seconds, self._read_seconds = self._read_seconds, np.zeros_like(self._read_seconds)
                truncated, self._truncated = self._truncated, 0
                yield StreamBatch(
                    prepared=fed,
                    data=data,
                    after=position,
                    contents=int(np.bitwise_xor.reduce(step.checksums[chosen])),
                    read_seconds=read_seconds.tolist(),
                    truncated=truncated,
                    is_last=is_end and buffer.is_at_end,
                    owed=wanted - divided.num_micro_batches,
                )
            for key in step.keys.tolist():
                self._documents.pop(key, None)
            before, into_step, step_batches = after, 0, 0

    def _with_rows(self, prepared: Prepared, keys: IntArray) -> Prepared:
        """Returns the micro-batch with the rows of this rank."""
        layout, number = prepared.layout, prepared.cursor.micro_batch
        checksums = f"{prepared.documents_checksum:08x} {_checksum(layout):08x}"
        agree = partial(self._agree, 0, number, {"checksums of documents and placement": checksums})
        of_batch = layout, keys, self._documents, self._inputs, f"micro-batch {number}, tokens of the stream"
        received = send_tokens(self._transport, *of_batch, agree)
        return self._plans.with_rows(prepared, collate(layout, self._transport.rank, keys, received), [])

    def _restore(self, number: int) -> None:
        """Reads the documents again that were read and not trained when the position was saved."""
        if self._begin.buffer.is_beginning:
            return
        wanted, read = set(self._begin.buffer.keys.tolist()), {}
        for reader, one in self._readers.items():
            position = self._begin.buffer.readers[reader]
            read[reader] = self._noted(one.read_again(), reader, position.snapshot.documents, position.has_ended)
        of_all = self._gathered(read, number, "what was read ahead")
        nothing = NewDocuments(NO_DOCUMENTS, NO_DOCUMENTS, True)
        self._buffer.restore([of_all.get(reader, nothing) for reader in range(self._num_readers)])
        self._documents = {key: one for key, one in self._documents.items() if key in wanted}

    def _refill(self, share_tokens: int, number: int) -> None:
        """Lets every reader read, and adds the documents of all ranks to the buffer."""
        read = {}
        for reader, one in self._readers.items():
            if self._buffer.has_ended(reader):
                continue
            snapshot, first = one.snapshot, self._buffer.next_number(reader)
            found = self._noted(one.read(share_tokens), reader, first, one.has_ended)
            read[reader] = replace(found, snapshot=None if one.snapshot is snapshot else one.snapshot)
        self._open = [reader for reader in range(self._num_readers) if not self._buffer.has_ended(reader)]
        self._buffer.add(self._gathered(read, number, f"{share_tokens} tokens"))

    def _noted(self, found: Sequence[StreamDocument], reader: int, first: int, has_ended: bool) -> NewDocuments:
        """Keeps documents until they are sent; returns what other ranks must know of them.

        Args:
            first: number of the first one in its reader's pass.
        """
        self._documents |= zip(keys_of(reader, first, len(found)).tolist(), found, strict=True)
        tokens = np.array([len(one) for one in found], dtype=np.int64)
        return NewDocuments(tokens, np.array([one.checksum for one in found], dtype=np.int64), has_ended)

    def _gathered(self, read: Mapping[int, NewDocuments], number: int, asked_for: str) -> dict[int, NewDocuments]:
        """Returns what all readers read.

        Args:
            asked_for: what each reader was to read.
        """
        inputs = next((one.inputs for one in self._readers.values() if one.inputs is not None), None)
        mine = RefillMessage(inputs, read).integers
        most = max(self._agree(len(mine), number, {"each reader reads": asked_for}))
        where = f"micro-batch {number}, documents of the stream"
        rows = self._transport.gather([*mine, *[0] * (most - len(mine))], where).wait()
        texts, of_all = [], dict[int, NewDocuments]()
        for rank, row in enumerate(rows):
            readers = [reader for reader in self._open if reader_rank(reader, len(rows)) == rank]
            text, of_rank = RefillMessage.read(row, readers)
            texts.append(text)
            of_all |= of_rank
        if not self._inputs:
            self._inputs = same_inputs(self._transport, texts)
        return of_all

    def _agree(self, integers: int, number: int, facts: Mapping[str, object]) -> list[int]:
        """Agrees with all ranks to read on; returns how many integers each of them sends next.

        Args:
            facts: of what is read or sent next.

        Raises:
            PlanMismatchError: ranks read or send something else.
        """
        seconds = sum(one.seconds for one in self._readers.values())
        truncated = sum(one.truncated for one in self._readers.values())
        mine = {
            "integers": integers,
            "read_us": round(1e6 * (seconds - self._reported_seconds)),
            "truncated": truncated - self._reported_truncated,
        }
        self._reported_seconds, self._reported_truncated = seconds, truncated
        numbers = Agreement.start(self._transport, Occasion.READ, number, facts, mine).wait(Scope.ROWS)
        self._read_seconds += np.array(numbers["read_us"]) / 1e6
        self._truncated += sum(numbers["truncated"])
        return numbers["integers"]

    def _announce_unable(self, error: BaseException) -> None:
        """Tells the other ranks, without waiting for them, that this one does not read on."""
        with suppress(DistCAError):  # they cannot be reached, and find out by themselves
            Agreement.announce_unable(self._transport, 0, Occasion.READ, error)


def _checksum(layout: Layout) -> int:
    """Returns a checksum of the segments, which decide who sends how many tokens to whom."""
    segments = layout.segment_document, layout.segment_start, layout.segment_stop, layout.segment_rank
    return crc32(np.concatenate(segments).astype("<i8").data)
