"""Row moves: the rows of its batch that a rank sends before a model's layers, and the places of the rows it receives.

    home rows      | d0 d0 d0 d0 d0 d0 | d1 |      rank 0       | d2 | d3 |      rank 1       as batches hold them
    placed rows    | d0[0:4] | d2 |                rank 0       | d1 | d3 | d0[4:6] |         as layers compute them

Both layouts hold the same documents. After the layers the same rows go the other way. In a padded batch, home rows
have padding between them. Then places that count the padding say what is sent, and where results go.

If documents share a prefix, only its rows in the document that holds it move in. Their results go home to all these
documents: once to each rank, which copies them. Gradients of the copies are summed on the way back.

    placed rows    | prompt | d0 | d1 |            rank 0       | d2 | d3 |      rank 1
    home rows      | prompt | d0 | prompt | d1 |   rank 0       | prompt | d2 | prompt | d3 |      rank 1
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray, exclusive_cumsum, offsets, ranges, sum_by
from distca_hf.layout import Layout
from distca_hf.planning.pieces import ALL_HEADS, Ranges
from distca_hf.planning.transfers import KeyRanges, held_keys


@dataclass(frozen=True, eq=False)
class RowCopies:
    """Copies of rows, some of them of the same row. All arrays are int64.

    Attributes:
        rows: `[copies]` row of each copy.
        first: `[distinct rows]` first copy of each row.
        more: `[other copies]` the second copies of rows, then the third ones, and so on.
        repeated: rows with several copies, ascending.
        more_in_repeated: `[other copies]` place of its row in `repeated`.
        parts: slices of `more`: the second copies, the third ones, and so on.
    """

    rows: IntArray
    first: IntArray
    more: IntArray
    repeated: IntArray
    more_in_repeated: IntArray
    parts: tuple[slice, ...]

    @classmethod
    def of(cls, rows: IntArray) -> Self:
        """Numbers the copies of each row."""
        _, first, row, counts = np.unique(rows, return_index=True, return_inverse=True, return_counts=True)
        by_row = np.argsort(row, kind="stable")
        number = np.empty_like(rows)
        number[by_row] = ranges(0, counts)
        more = np.flatnonzero(number)
        more = more[np.argsort(number[more], kind="stable")]
        repeated = np.unique(rows[more])
        borders = offsets(np.bincount(number[more], minlength=2)[1:])
        parts = tuple(slice(*bounds) for bounds in pairwise(borders.tolist()))
        return cls(rows, first, more, repeated, np.searchsorted(repeated, rows[more]), parts if len(more) else ())

    @property
    def indices(self) -> tuple[IntArray, ...]:
        """All arrays."""
        return self.rows, self.first, self.more, self.repeated, self.more_in_repeated


@dataclass(frozen=True, eq=False)
class SharedHome:
    """The way home of the results of one rank, if documents share prefixes.

    Attributes:
        sent: placed rows that it sends, by destination; a row may go to several ranks, and is a copy for each.
        sent_counts, received_counts: `[ranks]` number of rows to and from each rank.
        copied: received rows, in the order of the home rows that get them.
        places: `[home rows]` their places in the batch.
    """

    sent: RowCopies
    sent_counts: list[int]
    received_counts: list[int]
    copied: RowCopies
    places: IntArray

    @classmethod
    def of(cls, home: Layout, placed: Layout, rank: int, places: IntArray | None) -> tuple[Self, bool]:
        """Returns the way home of a rank, and whether any rank sends rows to another one. Arguments: see
        `RowMoves.of`."""
        num_ranks = home.num_ranks
        # 1. Ranges of rows that home ranks need, by source and destination.
        of_document, holder, start, stop = held = _held(home, placed)
        source, destination, document, begin, end, row = _results(home, placed, held)
        tokens = end - begin

        # 2. Home rows of this rank, and the rows in order of arrival that they are copies of.
        leaves, comes = np.flatnonzero(source == rank), np.flatnonzero(destination == rank)
        arrives = exclusive_cumsum(tokens[comes])
        by_document = np.lexsort((begin[comes], document[comes]))
        came = comes[by_document]
        mine = np.flatnonzero(home.segment_rank[of_document] == rank)
        spans = _ranges(holder[mine], start[mine], stop[mine])
        span, part = spans.overlaps(_ranges(document[came], begin[came], end[came]))
        first, last = np.maximum(spans.start[span], begin[came][part]), np.minimum(spans.stop[span], end[came][part])
        copied = ranges(arrives[by_document][part] + first - begin[came][part], last - first)
        home_rows = ranges(home.segment_row[of_document[mine][span]] + first, last - first)
        of_rank = cls(
            sent=RowCopies.of(ranges(row[leaves], tokens[leaves])),
            sent_counts=sum_by(destination[leaves], tokens[leaves], num_ranks).tolist(),
            received_counts=sum_by(source[comes], tokens[comes], num_ranks).tolist(),
            copied=RowCopies.of(copied),
            places=home_rows if places is None else places[home_rows],
        )
        return of_rank, bool(np.any(source != destination))


def results_between(home: Layout, placed: Layout) -> IntArray:
    """Counts `[home rank, placed rank]` rows whose results the second rank sends to the first, or keeps as its own.
    Arguments: see `RowMoves.of`."""
    source, destination, _, begin, end, _ = _results(home, placed, _held(home, placed))
    num_ranks = home.num_ranks
    return sum_by(destination * num_ranks + source, end - begin, num_ranks**2).reshape(num_ranks, num_ranks)


def _held(home: Layout, placed: Layout) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Returns the ranges of every whole document: its number, the document that holds the rows, start and stop."""
    whole = home.document_tokens
    return held_keys(placed, np.arange(home.num_documents), np.zeros_like(whole), whole)


def _results(home: Layout, placed: Layout, held: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
    """Returns the ranges of rows that home ranks need, each once, cut where placed segments end: source, destination,
    document, start, stop, and first placed row. They are sorted in this order.

    Args:
        held: see `_held`.
    """
    of_document, holder, start, stop = held
    needs = KeyRanges.join(home.segment_rank[of_document], holder, np.full(len(holder), ALL_HEADS), start, stop, 1)
    order = np.lexsort((placed.segment_start, placed.segment_document))
    segments = placed.segment_document[order], placed.segment_start[order], placed.segment_stop[order]
    need, at = needs.overlaps(_ranges(*segments))
    document, first, last = (x[at] for x in segments)
    destination, source = needs.reader[need], placed.segment_rank[order][at]
    begin, end = np.maximum(needs.start[need], first), np.minimum(needs.stop[need], last)
    row = placed.segment_row[order][at] + begin - first
    by_rank = np.lexsort((begin, document, destination, source))
    return tuple(x[by_rank] for x in (source, destination, document, begin, end, row))


def _ranges(document: IntArray, start: IntArray, stop: IntArray) -> Ranges:
    return Ranges(document, np.full(len(document), ALL_HEADS), start, stop, 1)


@dataclass(frozen=True, eq=False)
class RowMoves:
    """The moves of one rank. All arrays are int64.

    Attributes:
        sent: `[rows]` places of the home rows that it sends, including rows that it keeps, by destination.
        sent_counts: `[ranks]` number of rows for each rank.
        received: `[rows]` placed rows of the rows that it receives, in the order of arrival, by source.
        received_counts: `[ranks]` number of rows from each rank.
        positions: `[places]` position of each row in its document, 0 in padding; one place for a rank without rows.
        num_placed: rows that its layers compute, padding included.
        crosses: whether any rank receives a row from another one.
        is_padded: whether its batch has padding.
        shared_home: the way of results home if documents share prefixes; otherwise None: they go where rows came from.
        images: moves in of the rows of images only, numbered in their order on this rank; `positions` are the placed
            rows. None if it is not known which these are.
    """

    sent: IntArray
    sent_counts: list[int]
    received: IntArray
    received_counts: list[int]
    positions: IntArray
    num_placed: int
    crosses: bool
    is_padded: bool
    shared_home: SharedHome | None = None
    images: "RowMoves | None" = None

    @property
    def changes_rows(self) -> bool:
        """Whether layers compute other rows than this rank's batch has, in whatever order."""
        return self.is_padded or self.crosses or self.shared_home is not None

    @classmethod
    def of(
        cls,
        home: Layout,
        placed: Layout,
        rank: int,
        places: IntArray | None = None,
        num_places: int = 1,
        image_runs: Sequence[IntArray] = (),
    ) -> Self:
        """Returns the moves of a rank.

        Args:
            home: whole documents, in the order of the batches.
            placed: the same documents where layers compute them, perhaps with shared prefixes.
            places: `[home rows]` their places in a padded batch; None if they fill the batch.
            num_places: places of a padded batch.
            image_runs: of each rank, home rows where rows of images begin and end, in turn; empty if not known.
        """
        tokens, target = placed.segment_tokens, placed.segment_rank
        source = home.segment_rank[placed.segment_document]
        home_row = home.segment_row[placed.segment_document] + placed.segment_start
        # Both sides order the segments between two ranks as in the placed layout.
        leaves = np.flatnonzero(source == rank)
        comes = np.flatnonzero(target == rank)
        comes = comes[np.argsort(source[comes], kind="stable")]
        held = home.segment_tokens[home.segments_of(rank)]
        counted, sent = ranges(np.zeros_like(held), held), ranges(home_row[leaves], tokens[leaves])
        positions = np.zeros(max(num_places, len(counted)), dtype=np.int64)
        positions[slice(len(counted)) if places is None else places] = counted
        shared_home, results_cross = None, False
        if placed.shared is not None:
            shared_home, results_cross = SharedHome.of(home, placed, rank, places)
        moves = cls(
            sent=sent if places is None else places[sent],
            sent_counts=sum_by(target[leaves], tokens[leaves], home.num_ranks).tolist(),
            received=ranges(placed.segment_row[comes], tokens[comes]),
            received_counts=sum_by(source[comes], tokens[comes], home.num_ranks).tolist(),
            positions=positions,
            num_placed=int(placed.rank_rows[rank]),
            crosses=results_cross or bool(np.any(source != target)),
            is_padded=places is not None,
            shared_home=shared_home,
        )
        if not image_runs:
            return moves
        first = offsets(home.rank_tokens)[:-1]  # numbers home rows over all ranks
        borders = np.concatenate([runs + of_rank for runs, of_rank in zip(image_runs, first, strict=True)])
        came = ranges((first[source] + home_row)[comes], tokens[comes])
        return replace(moves, images=moves._of_images(borders, first[rank] + sent, came))

    def _of_images(self, borders: IntArray, sent: IntArray, came: IntArray) -> "RowMoves":
        """Returns the moves in of the rows of images only. All home rows are numbered over all ranks.

        Args:
            borders: home rows where rows of images begin and end, in turn.
            sent, came: `[rows]` home rows that this rank sends, and that it receives.
        """
        leave, come = (np.searchsorted(borders, rows, side="right") % 2 == 1 for rows in (sent, came))
        rows, number = np.unique(self.received[come], return_inverse=True)
        ranks = np.arange(len(self.sent_counts))
        destination, source = (np.repeat(ranks, counts) for counts in (self.sent_counts, self.received_counts))
        return replace(
            self,
            sent=self.sent[leave],
            sent_counts=sum_by(destination, leave, len(ranks)).tolist(),
            received=number,
            received_counts=sum_by(source, come, len(ranks)).tolist(),
            positions=rows,
            num_placed=len(rows),
            shared_home=None,
        )
