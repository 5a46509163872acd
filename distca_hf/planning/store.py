"""Store: where keys of documents that are held elsewhere, or in several pieces, lie on a server."""

from dataclasses import dataclass

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.planning.pieces import Pieces
from distca_hf.planning.ranges import line_keys, rows_per_token
from distca_hf.planning.task import ALL_HEADS


@dataclass(frozen=True, eq=False)
class Store:
    """Prefixes of lines (a document, all heads or one group of them), once each: leg after leg, in each of them
    documents whose heads are together first, then single groups.

    Attributes:
        lines: `[lines]` ascending, see `line_keys`.
        starts, stops: `[lines, legs]` tokens of each leg.
        offset: `[lines, legs]` first store row of each.
        num_rows: of all legs.
    """

    lines: IntArray
    starts: IntArray
    stops: IntArray
    offset: IntArray
    num_rows: int
    head_groups: int

    @classmethod
    def of(cls, lines: IntArray, prefixes: IntArray, borders: IntArray, head_groups: int) -> "Store":
        """The store for readers of prefixes of some lines, with the borders of their legs."""
        lines, first, reader = np.unique(lines, return_index=True, return_inverse=True)
        prefix = np.zeros(len(lines), dtype=np.int64)
        np.maximum.at(prefix, reader, prefixes)
        starts = np.minimum(borders[first, :-1], prefix[:, None])
        stops = np.minimum(borders[first, 1:], prefix[:, None])
        head = lines % (head_groups + 1) + ALL_HEADS
        rows = (stops - starts) * rows_per_token(head, head_groups)[:, None]
        in_order = np.argsort(head != ALL_HEADS, kind="stable")
        leg_major = rows[in_order].T.ravel()
        offset = np.empty_like(rows)
        offset[in_order] = (np.cumsum(leg_major) - leg_major).reshape(rows.T.shape).T
        return cls(lines, starts, stops, offset, int(rows.sum()), head_groups)

    def row(self, documents: IntArray, heads: IntArray, tokens: IntArray) -> IntArray:
        """Store row of the first row of some tokens that are here."""
        line = self.index_of(line_keys(documents, heads, self.head_groups))
        leg = (tokens[:, None] >= self.stops[line, :-1]).sum(axis=1)
        into_leg = (tokens - self.starts[line, leg]) * rows_per_token(heads, self.head_groups)
        return self.offset[line, leg] + into_leg

    def index_of(self, lines: IntArray) -> IntArray:
        """Index of lines that are here."""
        return np.searchsorted(self.lines, lines)

    def parts_of(self, held: Pieces) -> tuple[IntArray, IntArray, IntArray]:
        """Parts of held pieces that are in the store: index of the piece, start and stop of each part; none goes on
        from one leg to the next."""
        lines = line_keys(held.document, held.head, self.head_groups)
        stored = np.flatnonzero(np.isin(lines, self.lines))
        line = self.index_of(lines[stored])
        starts = np.maximum(held.start[stored][:, None], self.starts[line])
        stops = np.minimum(held.stop[stored][:, None], self.stops[line])
        part, leg = np.nonzero(starts < stops)
        return stored[part], starts[part, leg], stops[part, leg]
