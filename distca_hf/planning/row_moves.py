"""Row moves: which rows of its batch a rank sends before a model's layers, and at which places it puts those it gets.

    home rows      | d0 d0 d0 d0 d0 d0 | d1 |      rank 0       | d2 | d3 |      rank 1       as batches hold them
    placed rows    | d0[0:4] | d2 |                rank 0       | d1 | d3 | d0[4:6] |         as layers compute them

Both layouts hold the same documents. After the layers the same rows go the other way.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray, ranges, sum_by
from distca_hf.layout import Layout


@dataclass(frozen=True, eq=False)
class RowMoves:
    """The moves of one rank. All arrays are int64.

    Attributes:
        sent: `[rows]` home rows that it sends, those that it keeps among them, by destination.
        sent_counts: `[ranks]` how many of them go to each rank.
        received: `[rows]` placed rows of those that it gets, in the order in which they arrive, by source.
        received_counts: `[ranks]` how many of them come from each rank.
        positions: `[home rows]` position of each row in its document.
        num_placed: rows that its layers compute, padding included.
        crosses: whether any rank gets a row of another one.
    """

    sent: IntArray
    sent_counts: IntArray
    received: IntArray
    received_counts: IntArray
    positions: IntArray
    num_placed: int
    crosses: bool

    @classmethod
    def of(cls, home: Layout, placed: Layout, rank: int) -> Self:
        """Returns the moves of a rank.

        Args:
            home: whole documents, in the order of the batches.
            placed: the same documents where layers compute them.
        """
        tokens, target = placed.segment_tokens, placed.segment_rank
        source = home.segment_rank[placed.segment_document]
        home_row = home.segment_row[placed.segment_document] + placed.segment_start
        # Both sides order the segments between two ranks as the placed layout has them.
        leaves = np.flatnonzero(source == rank)
        comes = np.flatnonzero(target == rank)
        comes = comes[np.argsort(source[comes], kind="stable")]
        held = home.segment_tokens[home.segments_of(rank)]
        return cls(
            sent=ranges(home_row[leaves], tokens[leaves]),
            sent_counts=sum_by(target[leaves], tokens[leaves], home.num_ranks),
            received=ranges(placed.segment_row[comes], tokens[comes]),
            received_counts=sum_by(source[comes], tokens[comes], home.num_ranks),
            positions=ranges(np.zeros_like(held), held),
            num_placed=int(placed.rank_rows[rank]),
            crosses=bool(np.any(source != target)),
        )
