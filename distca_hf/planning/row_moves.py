"""Row moves: the rows of its batch that a rank sends before a model's layers, and the places of the rows it receives.

    home rows      | d0 d0 d0 d0 d0 d0 | d1 |      rank 0       | d2 | d3 |      rank 1       as batches hold them
    placed rows    | d0[0:4] | d2 |                rank 0       | d1 | d3 | d0[4:6] |         as layers compute them

Both layouts hold the same documents. After the layers the same rows go the other way. In a padded batch, home rows
have padding between them. Then places that count the padding say what is sent, and where results go.
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
        sent: `[rows]` places of the home rows that it sends, including rows that it keeps, by destination.
        sent_counts: `[ranks]` number of rows for each rank.
        received: `[rows]` placed rows of the rows that it receives, in the order of arrival, by source.
        received_counts: `[ranks]` number of rows from each rank.
        positions: `[places]` position of each row in its document, 0 in padding; one place for a rank without rows.
        num_placed: rows that its layers compute, padding included.
        crosses: whether any rank receives a row from another one.
        is_padded: whether its batch has padding.
    """

    sent: IntArray
    sent_counts: list[int]
    received: IntArray
    received_counts: list[int]
    positions: IntArray
    num_placed: int
    crosses: bool
    is_padded: bool

    @classmethod
    def of(cls, home: Layout, placed: Layout, rank: int, places: IntArray | None = None, num_places: int = 1) -> Self:
        """Returns the moves of a rank.

        Args:
            home: whole documents, in the order of the batches.
            placed: the same documents where layers compute them.
            places: `[home rows]` their places in a padded batch; None if they fill the batch.
            num_places: places of a padded batch.
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
        return cls(
            sent=sent if places is None else places[sent],
            sent_counts=sum_by(target[leaves], tokens[leaves], home.num_ranks).tolist(),
            received=ranges(placed.segment_row[comes], tokens[comes]),
            received_counts=sum_by(source[comes], tokens[comes], home.num_ranks).tolist(),
            positions=positions,
            num_placed=int(placed.rank_rows[rank]),
            crosses=bool(np.any(source != target)),
            is_padded=places is not None,
        )
