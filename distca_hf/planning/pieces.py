"""Pieces: segments and tasks cut at each other's borders, so that every piece has one owner rank and one server.

    segments    | rank 0: d1[0:6]         | rank 1: d1[6:10]  |
    tasks       | rank 0: d1[0:4] | rank 1: d1[4:10]          |
    pieces      | [0:4] 0 on 0    | [4:6] | [6:10] 1 on 1     |    [4:6]: owner 0, server 1, so its queries move

If a plan divides heads, a *row* is one token of one head group, and ranks hold `head_groups` rows per token, token
after token. Otherwise a row is a token. On its owner rank, a piece of all heads is consecutive rows, and a piece of a
single group is every `head_groups`-th row. On its server the rows are consecutive either way.

A *line* is a document with all its heads, or with one head group.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

from distca_hf.arrays import IndexRanges, IntArray, exclusive_cumsum, ranges
from distca_hf.layout import Layout
from distca_hf.planning.tasks import ALL_HEADS, Tasks


# Bits of a token's position in a sort key: documents are shorter than 2 ** 31 tokens, and 32 bits are left for lines.
POSITION_BITS = 31


@dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges of tokens of documents, as int64 arrays of one length.

    Attributes:
        document, head, start, stop: tokens [start, stop) of a document, and the head group or `ALL_HEADS`.
        head_groups: groups that the plan divides heads into; rows per token on every rank.
    """

    document: IntArray
    head: IntArray
    start: IntArray
    stop: IntArray
    head_groups: int

    def __len__(self) -> int:
        return len(self.document)

    @property
    def tokens(self) -> IntArray:
        return self.stop - self.start

    @property
    def rows(self) -> IntArray:
        """`[ranges]` rows of each range."""
        return self.tokens * rows_per_token(self.head, self.head_groups)

    def select(self, chosen: np.ndarray) -> Self:
        """Selects ranges by a boolean mask or by indices, in their order."""
        columns = {column.name: getattr(self, column.name) for column in fields(self) if column.name != "head_groups"}
        return replace(self, **{name: values[chosen] for name, values in columns.items()})


def position_keys(documents: IntArray, heads: IntArray, tokens: IntArray, head_groups: int) -> IntArray:
    """Makes one int64 for each (document, head, position), which sorts as the three do."""
    return (line_keys(documents, heads, head_groups) << POSITION_BITS) + tokens


def line_keys(documents: IntArray, heads: IntArray, head_groups: int) -> IntArray:
    """Makes one int64 for each line (document, head), which sorts as the two do."""
    return documents * (head_groups + 1) + heads - ALL_HEADS


def rows_per_token(heads: IntArray, head_groups: int) -> IntArray:
    """Counts the rows of one token: 1 for a single head group, `head_groups` for all heads."""
    return np.where(heads == ALL_HEADS, head_groups, 1)


@dataclass(frozen=True, eq=False)
class Pieces(Ranges):
    """Ranges sorted by (document, head, start).

    They cover every document once, and once per group if its heads are divided.

    Attributes:
        owner: rank that holds the tokens.
        row: layout row of the first one there.
        task: index of the task that computes these queries.
        server: rank of that task.
    """

    owner: IntArray
    row: IntArray
    task: IntArray
    server: IntArray

    @classmethod
    def cut(cls, layout: Layout, tasks: Tasks) -> "Pieces":
        """Cuts a layout and the tasks that cover it at each other's borders."""
        # 1. Borders of both as sort keys.
        groups = tasks.head_groups
        segment, head = _segments_of_each_group(layout, tasks)
        segment_keys = position_keys(layout.segment_document[segment], head, layout.segment_start[segment], groups)
        task_keys = position_keys(tasks.document, tasks.head, tasks.start, groups)
        segments, by_task = np.argsort(segment_keys), np.argsort(task_keys)

        # 2. A piece goes from one border to the next one of its line, or to the end of its document.
        cuts = np.union1d(segment_keys, task_keys)
        #     key   | document * (groups + 1) + head + 1 | position, 31 bits |
        line, start = cuts >> POSITION_BITS, cuts & ((1 << POSITION_BITS) - 1)
        document, head = line // (groups + 1), line % (groups + 1) + ALL_HEADS
        stop = layout.document_tokens[document]
        goes_on = np.flatnonzero(line[1:] == line[:-1])
        stop[goes_on] = start[goes_on + 1]

        # 3. The segment and the task that each piece lies in.
        held = segment[segments[np.searchsorted(segment_keys[segments], cuts, side="right") - 1]]
        task = by_task[np.searchsorted(task_keys[by_task], cuts, side="right") - 1]
        token_row = layout.segment_row[held] + start - layout.segment_start[held]
        return cls(
            document=document,
            head=head,
            start=start,
            stop=stop,
            owner=layout.segment_rank[held],
            row=token_row * groups + np.maximum(head, 0),
            task=task,
            server=tasks.server[task],
            head_groups=groups,
        )

    @property
    def stride(self) -> IntArray:
        """`[pieces]` distance between rows of a piece on its owner rank."""
        return np.where(self.head == ALL_HEADS, 1, self.head_groups)

    @property
    def moved(self) -> np.ndarray:
        """`[pieces]` whether queries are computed on another rank than their owner."""
        return self.owner != self.server


def _segments_of_each_group(layout: Layout, tasks: Tasks) -> tuple[IntArray, IntArray]:
    """Returns segment and head of ranges that cover all rows: of all heads, or once per group of divided documents."""
    every = np.arange(len(layout.segment_document))
    if tasks.head_groups == 1:
        return every, np.full(len(every), ALL_HEADS)
    divided = np.zeros(layout.num_documents, dtype=bool)
    divided[tasks.document[tasks.head != ALL_HEADS]] = True
    copies = np.where(divided[layout.segment_document], tasks.head_groups, 1)
    segment = np.repeat(every, copies)
    return segment, np.where(divided[layout.segment_document[segment]], ranges(0, copies), ALL_HEADS)


class RowNumbers:
    """Numbers for the rows of held pieces, in which rows of every piece are consecutive.

    layout rows of two groups    | t0g0 t0g1 t1g0 t1g1 t2g0 t2g1 |    rows of one group: every second one
    numbers                      | t0g0 t1g0 t2g0 | t0g1 t1g1 t2g1 |  rows of one piece follow each other
    """

    def __init__(self, held: Pieces) -> None:
        self._held = held
        self._by_row = np.argsort(held.row, kind="stable")
        rows = held.rows[self._by_row]
        self._firsts = exclusive_cumsum(rows)
        self.first = np.empty_like(self._firsts)
        self.first[self._by_row] = self._firsts
        self._keys = position_keys(held.document, held.head, held.start, held.head_groups)
        self._by_key = np.argsort(self._keys)

    def of(self, documents: IntArray, heads: IntArray, tokens: IntArray) -> IntArray:
        """Returns the number of the first row of some tokens."""
        held = self._held
        wanted = position_keys(documents, heads, tokens, held.head_groups)
        piece = self._by_key[np.searchsorted(self._keys[self._by_key], wanted, side="right") - 1]
        return self.first[piece] + (tokens - held.start[piece]) * rows_per_token(heads, held.head_groups)

    def layout_rows(self, numbers: IndexRanges) -> IndexRanges:
        """Returns the layout rows of some numbers."""
        if self._held.head_groups == 1:  # the order of the pieces is that of the rows
            return numbers
        # A range of numbers may run over several pieces. In each of them rows are one stride apart.
        parts = numbers.cut_at(self._firsts)
        at = np.searchsorted(self._firsts, parts.starts, side="right") - 1
        piece = self._by_row[at]
        stride = self._held.stride[piece]
        starts: IntArray = self._held.row[piece] + (parts.starts - self._firsts[at]) * stride
        return IndexRanges.of(starts, parts.lengths, stride)
