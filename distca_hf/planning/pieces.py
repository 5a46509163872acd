"""Tasks, and pieces of them.

A *task* is (document, query range, heads) computed by one rank. Its keys end with the range. The mask says where they
begin: for the causal mask, with the document. Heads are divided into groups: KV heads with the query heads that share
them. A task has all heads or one group. All tasks of a document are of the same kind.

*Pieces* are segments and tasks cut at each other's borders. So every piece has one owner, the rank that holds it, and
one computing rank.

    segments    | rank 0: d1[0:6]         | rank 1: d1[6:10]  |
    tasks       | rank 0: d1[0:4] | rank 1: d1[4:10]          |
    pieces      | [0:4] 0 on 0    | [4:6] | [6:10] 1 on 1     |    [4:6]: held by 0, computed by 1: queries move

If a plan divides heads, a *row* is one token of one head group, and ranks hold `head_groups` rows per token, token
after token. Otherwise a row is a token. On its owner rank, the rows of a piece of all heads are consecutive, and a
piece of a single group is every `head_groups`-th row. On its computing rank the rows are consecutive either way.

A *line* is a document with all its heads or with one head group.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from distca_hf.arrays import IndexRanges, IntArray, exclusive_cumsum, first_gap, first_outside, ranges, run_starts
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.errors import PlanError
from distca_hf.layout import Layout


# `head` of a task of all heads: less than every group's number, to sort before them.
ALL_HEADS = -1


@dataclass(frozen=True, eq=False)
class Tasks:
    """Tasks as five int64 arrays of one length, sorted by (rank, needs a prefix, document, head, start).

    A task needs no prefix if its queries attend to no keys before its own tokens. These tasks come first on every
    rank.

    Attributes:
        document, start, stop: query range.
        rank: rank that computes it.
        head: head group, or `ALL_HEADS`.
        head_groups: groups into which heads are divided; 1 if every task has all heads.
        mask: keys to which queries attend.
    """

    document: IntArray
    start: IntArray
    stop: IntArray
    rank: IntArray
    head: IntArray
    head_groups: int = 1
    mask: Mask = CAUSAL_MASK

    @classmethod
    def sort(
        cls,
        document: IntArray,
        start: IntArray,
        stop: IntArray,
        rank: IntArray,
        head: IntArray | None = None,
        head_groups: int = 1,
        mask: Mask = CAUSAL_MASK,
    ) -> "Tasks":
        """Sorts tasks: equal sets of tasks become equal arrays. They have all heads unless `head` is given."""
        if head is None or head_groups == 1:  # the only group is all heads
            head = np.full(len(document), ALL_HEADS)
        head_groups = head_groups if np.any(head != ALL_HEADS) else 1
        order = np.lexsort((start, head, document, mask.first_key(start) < start, rank))
        return cls(document[order], start[order], stop[order], rank[order], head[order], head_groups, mask)

    def __len__(self) -> int:
        return len(self.document)

    @property
    def first_key(self) -> IntArray:
        """`[tasks]` first token in each task's document to whose key its queries attend."""
        return self.mask.first_key(self.start)

    @property
    def pairs(self) -> IntArray:
        """`[tasks]` attended pairs of each task, in each of its head groups."""
        return self.mask.pairs_of(self.start, self.stop)

    @property
    def work(self) -> IntArray:
        """`[tasks]` attended pairs x groups of heads."""
        return self.pairs * np.where(self.head == ALL_HEADS, self.head_groups, 1)

    def validate(self, layout: Layout) -> None:
        """Checks that exactly one task, on a rank that exists, computes each query row of each head group.

        Raises:
            PlanError: names the first document or rank that is wrong.
        """
        # 1. Ranks, documents and head groups exist.
        if len(self) and not (0 <= self.rank.min() and self.rank.max() < layout.num_ranks):
            raise PlanError(
                f"tasks on ranks {self.rank.min()} to {self.rank.max()}, ranks are 0 to {layout.num_ranks - 1}"
            )
        unknown = first_outside(self.document, layout.num_documents)
        if unknown is not None:
            number = self.document[unknown]
            raise PlanError(f"task {unknown} is of document {number}; there are {layout.num_documents}")
        if np.any((self.head < ALL_HEADS) | (self.head >= self.head_groups)):
            raise PlanError(
                f"tasks of head groups {self.head.min()} to {self.head.max()}; there are {self.head_groups}"
            )

        # 2. All tasks of a document have all heads, or all have single groups.
        split = np.zeros(layout.num_documents, dtype=bool)
        split[self.document[self.head != ALL_HEADS]] = True
        both = np.flatnonzero(split[self.document] & (self.head == ALL_HEADS))
        if len(both):
            raise PlanError(f"document {self.document[both[0]]} has tasks of all heads and of single groups")

        # 3. Each task begins where the one before it ends.
        order = np.lexsort((self.start, self.head, self.document))
        document, start, stop = self.document[order], self.start[order], self.stop[order]
        own = layout.first_own[document]
        gap = first_gap(start - own, stop - own, run_starts(document, self.head[order]))
        if gap is not None:
            at, expected = gap
            wanted = expected + own[at]
            raise PlanError(f"document {document[at]}: task [{start[at]}, {stop[at]}) where {wanted} is next")

        # 4. The last task of each group ends with the document.
        covered = np.zeros((layout.num_documents, self.head_groups), dtype=np.int64)
        group = self.head[order]
        np.maximum.at(covered, (document, np.maximum(group, 0)), stop)
        covered[~split] = covered[~split, :1]
        short = np.flatnonzero((covered != layout.document_tokens[:, None]).any(axis=1))
        if len(short):
            at, tokens = short[0], layout.document_tokens[short[0]]
            raise PlanError(f"document {at} has {tokens} tokens, its tasks cover {covered[at].min()}")


# Bits of a token's position in a sort key: documents are shorter than 2 ** 31 tokens, and 32 bits are left for lines.
POSITION_BITS = 31


@dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges of tokens of documents, as int64 arrays of one length.

    Attributes:
        document, head, start, stop: tokens [start, stop) of a document, and the head group or `ALL_HEADS`.
        head_groups: groups into which the plan divides heads; rows per token on every rank.
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
    def lines(self) -> IntArray:
        """`[ranges]` line of each range, see `line_keys`."""
        return line_keys(self.document, self.head, self.head_groups)

    @property
    def rows(self) -> IntArray:
        """`[ranges]` rows of each range."""
        return self.tokens * rows_per_token(self.head, self.head_groups)

    def select(self, chosen: np.ndarray) -> Self:
        """Selects ranges by a boolean mask or by indices, in their order."""
        columns = {name: values[chosen] for name, values in vars(self).items() if name != "head_groups"}
        return type(self)(head_groups=self.head_groups, **columns)

    def parts_under(self, mask: Mask) -> tuple[IntArray, IntArray, IntArray]:
        """Cuts ranges at queries that attend to no key before them: index of the range, start and stop of each
        part."""
        cut, position = mask.cuts(self.start, self.stop)
        index, start = np.concatenate([np.arange(len(self)), cut]), np.concatenate([self.start, position])
        order = np.lexsort((start, index))
        index, start = index[order], start[order]
        stop = self.stop[index]
        goes_on = np.flatnonzero(index[1:] == index[:-1])
        stop[goes_on] = start[goes_on + 1]
        return index, start, stop

    def overlaps(self, others: "Ranges") -> tuple[IntArray, IntArray]:
        """Finds the pairs of ranges that have tokens in common.

        Args:
            others: disjoint ranges, sorted by (document, head, start).

        Returns:
            Indices of these ranges and of the others, sorted by both.
        """
        begins, ends = (others.lines << POSITION_BITS) + others.start, (others.lines << POSITION_BITS) + others.stop
        first = np.searchsorted(ends, (self.lines << POSITION_BITS) + self.start, side="right")
        last = np.searchsorted(begins, (self.lines << POSITION_BITS) + self.stop, side="left")
        return np.repeat(np.arange(len(self)), last - first), ranges(first, last - first)


def position_keys(documents: IntArray, heads: IntArray, tokens: IntArray, head_groups: int) -> IntArray:
    """Makes one int64 for each (document, head, position), in the same order."""
    return (line_keys(documents, heads, head_groups) << POSITION_BITS) + tokens


def line_keys(documents: IntArray, heads: IntArray, head_groups: int) -> IntArray:
    """Makes one int64 for each line (document, head), in the same order."""
    return documents * (head_groups + 1) + heads - ALL_HEADS


def rows_per_token(heads: IntArray, head_groups: int) -> IntArray:
    """Counts the rows of one token: 1 for a single head group, `head_groups` for all heads."""
    return np.where(heads == ALL_HEADS, head_groups, 1)


@dataclass(frozen=True, eq=False)
class Pieces(Ranges):
    """Ranges sorted by (document, head, start).

    They cover every document once, or once per group if its heads are divided, except for prefixes that other
    documents hold.

    Attributes:
        owner: rank that holds the tokens.
        row: layout row of its first token there.
        task: index of the task that computes these queries.
        computing_rank: rank of that task.
    """

    owner: IntArray
    row: IntArray
    task: IntArray
    computing_rank: IntArray

    @classmethod
    def cut(cls, layout: Layout, tasks: Tasks) -> "Pieces":
        """Cuts a layout and the tasks that cover it at each other's borders."""
        # 1. Borders of both as sort keys.
        groups = tasks.head_groups
        every = np.arange(len(layout.segment_document))
        divided = np.zeros(layout.num_documents, dtype=bool)
        divided[tasks.document[tasks.head != ALL_HEADS]] = True
        copies = np.where(divided[layout.segment_document], groups, 1)  # one of each segment for each of its groups
        segment = np.repeat(every, copies)
        head = np.where(divided[layout.segment_document[segment]], ranges(0, copies), ALL_HEADS)
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
            computing_rank=tasks.rank[task],
            head_groups=groups,
        )

    @property
    def stride(self) -> IntArray:
        """`[pieces]` distance between rows of a piece on its owner rank."""
        return np.where(self.head == ALL_HEADS, 1, self.head_groups)

    @property
    def moved(self) -> np.ndarray:
        """`[pieces]` whether another rank than the owner computes the queries."""
        return self.owner != self.computing_rank


class RowNumbers:
    """Numbers for the rows of held pieces that are consecutive within each piece.

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
        if self._held.head_groups == 1:  # pieces are in the order of rows
            return numbers
        # A range of numbers may span several pieces. In each of them rows are one stride apart.
        parts = numbers.cut_at(self._firsts)
        at = np.searchsorted(self._firsts, parts.starts, side="right") - 1
        piece = self._by_row[at]
        stride = self._held.stride[piece]
        starts: IntArray = self._held.row[piece] + (parts.starts - self._firsts[at]) * stride
        return IndexRanges.of(starts, parts.lengths, stride)
