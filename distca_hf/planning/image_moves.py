"""Image moves: which rows of pixels and of features one rank sends, receives and computes.

    rank 0   batch [i0 i1]  ── pixels ──▶  computes [i0 i2]  ── features ──▶  [i0 i1]
    rank 1   batch [i2]                    computes [i1]                      [i2]

Units are images, or frames of videos. The order of a batch is its images, then the frames of its videos. Ranks compute
units in the order in which they arrive: by rank, then in that rank's order. So features leave in the order in which
they were computed.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray, offsets, ranges, sum_by


@dataclass(frozen=True, eq=False)
class ImageMoves:
    """Moves of one rank.

    Attributes:
        sent: numbers, within its batch, of the units that it sends, by destination.
        sent_to: `[sent]` their destinations.
        computed: numbers, among units of all ranks, of those that it computes, in order. A dummy is the only one.
        computed_of: `[computed]` the ranks whose batches hold them.
        is_dummy: whether it computes a unit whose features nobody needs.
        computed_on: `[units of the batch]` the rank that computes each unit.
        of_ranks: `[ranks]` number of units that each rank computes, with dummies.
    """

    sent: IntArray
    sent_to: IntArray
    computed: IntArray
    computed_of: IntArray
    is_dummy: bool
    computed_on: IntArray
    of_ranks: IntArray

    @classmethod
    def of(cls, rank_of: IntArray, dummies: IntArray, held: IntArray, rank: int) -> Self:
        """Returns the moves of a rank.

        Args:
            rank_of, dummies: where units of all ranks are computed (`PlacedImages`); they are numbered by rank, in the
                order of batches.
            held: `[units]` rank whose batch holds each.
        """
        with_dummy = np.flatnonzero(dummies >= 0)
        unit = np.concatenate([np.arange(len(held)), dummies[with_dummy]])
        target = np.concatenate([rank_of, with_dummy])
        leaves = np.flatnonzero(held[unit] == rank)
        leaves = leaves[np.lexsort((unit[leaves], target[leaves]))]
        comes = np.sort(unit[target == rank])  # by home rank, because units are numbered by rank
        first = int(np.searchsorted(held, rank))
        return cls(
            sent=unit[leaves] - first,
            sent_to=target[leaves],
            computed=comes,
            computed_of=held[comes],
            is_dummy=bool(dummies[rank] >= 0),
            computed_on=rank_of[held == rank],
            of_ranks=np.bincount(target, minlength=len(dummies)),
        )

    def pixel_rows(self, rows: IntArray, all_rows: IntArray) -> tuple[IntArray, list[int], list[int]]:
        """Returns rows of the batch's pixels in the order in which they leave, and numbers of rows to and from each
        rank.

        Args:
            rows: `[units of the batch]` number of rows of each unit.
            all_rows: `[units]` the same for all ranks.
        """
        sent = sum_by(self.sent_to, rows[self.sent], len(self.of_ranks))
        return _rows_of(self.sent, rows), sent.tolist(), self._computed_rows(all_rows)

    def feature_rows(self, rows: IntArray, all_rows: IntArray) -> tuple[IntArray, list[int], list[int]]:
        """Returns the places of features, in the order in which they come home, and numbers of rows to and from each
        rank.

        Args:
            rows: `[units of the batch]` number of features of each unit.
            all_rows: `[units]` the same for all ranks.
        """
        num_ranks = len(self.of_ranks)
        places = _rows_of(np.argsort(self.computed_on, kind="stable"), rows)
        sent = [0] * num_ranks if self.is_dummy else self._computed_rows(all_rows)
        return places, sent, sum_by(self.computed_on, rows, num_ranks).tolist()

    def _computed_rows(self, all_rows: IntArray) -> list[int]:
        """Returns the number of rows of the units that this rank computes, by the rank that holds them."""
        return sum_by(self.computed_of, all_rows[self.computed], len(self.of_ranks)).tolist()


def _rows_of(units: IntArray, rows: IntArray) -> IntArray:
    """Returns the rows of some units of a batch, one unit after the other."""
    return ranges(offsets(rows)[:-1][units], rows[units])
