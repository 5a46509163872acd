"""Stream wires: messages about what readers read, and exchanges of tokens to the ranks that hold them.

    gather      columns, then for each reader: documents, end, snapshot | lengths | checksums        once per refill
    exchange    one row per token: token, label, shifted label, further inputs                   once per micro-batch

A row is int64 `[3 + inputs]`. Every rank knows the layout and which rank reads a document, so no counts are sent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distca_hf.arrays import IntArray, Integers, as_int_array
from distca_hf.comm.agreement import by_value, integers_of, labels_of, text_of
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import AllToAll, Transport
from distca_hf.data.documents import Tokens
from distca_hf.data.readers import Snapshot, StreamDocument
from distca_hf.data.rows import Draws
from distca_hf.data.stream_buffer import NUMBER_BITS, NewDocuments
from distca_hf.errors import PlanMismatchError
from distca_hf.layout import Layout


# Dtypes of inputs of the model, by name.
Inputs = Mapping[str, "np.dtype[np.generic]"]
# Columns of a row before further inputs.
KNOWN = 3


def reader_rank(reader: Integers, num_ranks: int) -> Integers:
    """Returns the rank of a reader."""
    return reader % num_ranks


class RefillMessage:
    """What the readers of one rank read for a refill, as integers.

    Args:
        inputs: dtypes of further inputs of the model; None if they are not known, on a rank without readers.
        read: what each reader read, by its number.
    """

    def __init__(self, inputs: Inputs | None, read: Mapping[int, NewDocuments]) -> None:
        dtypes = None if inputs is None else {name: str(inputs[name]) for name in sorted(inputs)}
        text = b"" if dtypes is None else json.dumps(dtypes).encode()
        self.integers = [len(text), *integers_of(text, len(text))]
        for _, of_reader in sorted(read.items()):
            snapshot, documents = of_reader.snapshot, len(of_reader.tokens)
            state = b"" if snapshot is None else snapshot.state.encode()
            of_snapshot = [0, 0] if snapshot is None else [snapshot.documents, snapshot.rows]
            self.integers += [documents, of_reader.has_ended, snapshot is not None, *of_snapshot, len(state)]
            self.integers += [*integers_of(state, len(state)), *of_reader.tokens.tolist()]
            self.integers += of_reader.checksums.tolist()

    @staticmethod
    def read(integers: Sequence[int], readers: Sequence[int]) -> tuple[str, dict[int, NewDocuments]]:
        """Decodes the message of a rank with these readers; returns its inputs as text, and what they read."""
        at = 0

        def taken(count: int) -> Sequence[int]:
            nonlocal at
            at += count
            return integers[at - count : at]

        def text() -> str:
            (num_bytes,) = taken(1)
            return text_of(taken(len(integers_of(b"", num_bytes))))

        inputs, read = text(), {}
        for reader in sorted(readers):
            documents, ended, has_snapshot, first, rows = taken(5)
            state = text()
            tokens, checksums = (as_int_array(taken(documents), "documents of a stream") for _ in range(2))
            snapshot = Snapshot(first, rows, state) if has_snapshot else None
            read[reader] = NewDocuments(tokens, checksums, bool(ended), snapshot)
        return inputs, read


def same_inputs(transport: Transport, texts: Sequence[str]) -> Inputs:
    """Returns the further inputs of the model that all readers found.

    Args:
        texts: of each rank; empty without readers.

    Raises:
        PlanMismatchError: readers found others; names ranks.
    """
    labels = labels_of(transport, Scope.ROWS)
    known = [(text, label) for text, label in zip(texts, labels, strict=True) if text]
    if len({text for text, _ in known}) > 1:
        shown = by_value([text for text, _ in known], [label for _, label in known])
        raise PlanMismatchError(
            f"{transport.grid.name}: the stream gives different inputs of the model, other than tokens, on its "
            f"ranks: {shown}. Give every row, on all ranks, the same columns"
        )
    return {name: np.dtype(dtype) for name, dtype in json.loads(known[0][0]).items()} if known else {}


@dataclass(frozen=True, eq=False)
class ReceivedTokens:
    """Segments that one rank holds of a micro-batch, as a source for `collate`.

    Attributes:
        inputs: dtypes of further inputs of the model, by name.
        segments: by key of the document, and first token.
    """

    inputs: Inputs
    segments: Mapping[tuple[int, int], Tokens]

    def read(self, document: int, start: int, stop: int, draws: Draws) -> Tokens:
        """Returns tokens [start, stop) of a document, which are a segment of this rank."""
        return self.segments[document, start]


def send_tokens(
    transport: Transport,
    layout: Layout,
    keys: IntArray,
    read: Mapping[int, StreamDocument],
    inputs: Inputs,
    where: str,
    agree: Callable[[], object] = lambda: None,
) -> ReceivedTokens:
    """Sends the tokens of a micro-batch from the ranks that read them to those that hold them. A collective call.

    Args:
        keys: `[documents]` of the layout.
        read: documents that this rank has read, by key.
        inputs: further inputs of the model.
        where: names the micro-batch, for errors.
        agree: waits for the other ranks; called when this rank's rows are ready.
    """
    num_ranks, rank = transport.world_size, transport.rank
    document, holder = layout.segment_document, layout.segment_rank
    reading = reader_rank(keys[document] >> NUMBER_BITS, num_ranks)
    start, stop = layout.segment_start, layout.segment_stop
    names = sorted(inputs)
    # 1. Rows of this rank's documents, by the rank that holds them.
    sent = np.flatnonzero(reading == rank)
    sent = sent[np.argsort(holder[sent], kind="stable")]
    send_counts = np.bincount(holder[sent], (stop - start)[sent], num_ranks).astype(np.int64).tolist()
    rows = np.empty((sum(send_counts), KNOWN + len(names)), dtype=np.int64)
    at = 0
    for key, begin, end in zip(keys[document[sent]].tolist(), start[sent].tolist(), stop[sent].tolist(), strict=True):
        tokens, part = read[key].segment(begin, end), slice(at, at := at + end - begin)
        rows[part, 0], rows[part, 1], rows[part, 2] = tokens.input_ids, tokens.labels, tokens.shift_labels
        for column, name in enumerate(names, KNOWN):
            values = tokens.inputs[name]
            rows[part, column] = values.view(np.int32) if values.dtype == np.float32 else values
    # 2. Rows that this rank holds, by the rank that read them.
    held = np.flatnonzero(holder == rank)
    held = held[np.argsort(reading[held], kind="stable")]
    receive_counts = np.bincount(reading[held], (stop - start)[held], num_ranks).astype(np.int64).tolist()
    asked = AllToAll(torch.from_numpy(rows), send_counts, receive_counts, where)
    agree()
    received = transport.exchange(asked).wait().numpy()
    segments, at = {}, 0
    for key, begin, end in zip(keys[document[held]].tolist(), start[held].tolist(), stop[held].tolist(), strict=True):
        held_rows = received[at : (at := at + end - begin)]
        of_inputs: dict[str, NDArray[Any]] = {}
        for column, name in enumerate(names, KNOWN):
            values = held_rows[:, column]
            of_inputs[name] = values.astype(np.int32).view(np.float32) if inputs[name] == np.float32 else values
        segments[key, begin] = Tokens(held_rows[:, 0], held_rows[:, 1], held_rows[:, 2], of_inputs)
    return ReceivedTokens(inputs, segments)
