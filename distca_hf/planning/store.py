"""Store: where keys of documents that are held elsewhere, or in several pieces, lie in document order on a server."""

from dataclasses import dataclass

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.planning.pieces import Pieces
from distca_hf.planning.ranges import line_keys, rows_per_token
from distca_hf.planning.task import ALL_HEADS


@dataclass(frozen=True, eq=False)
class Store:
    """Prefixes of lines (a document, all heads or one group of them), once each: documents whose heads are together
    first, then single groups.

    Attributes:
        lines: `[lines]` ascending, see `line_keys`.
        prefix: `[lines]` tokens stored of each: the longest that anybody reads.
        offset: `[lines]` first store row of each.
        num_rows: of all.
    """

    lines: IntArray
    prefix: IntArray
    offset: IntArray
    num_rows: int
    head_groups: int

    @classmethod
    def of(cls, lines: IntArray, prefixes: IntArray, head_groups: int) -> "Store":
        """The store for readers of prefixes of some lines."""
        lines, reader = np.unique(lines, return_inverse=True)
        prefix = np.zeros(len(lines), dtype=np.int64)
        np.maximum.at(prefix, reader, prefixes)
        head = lines % (head_groups + 1) + ALL_HEADS
        rows = prefix * rows_per_token(head, head_groups)
        in_order = np.argsort(head != ALL_HEADS, kind="stable")
        offset = np.zeros(len(lines), dtype=np.int64)
        offset[in_order] = np.cumsum(rows[in_order]) - rows[in_order]
        return cls(lines, prefix, offset, int(rows.sum()), head_groups)

    def row(self, documents: IntArray, heads: IntArray, tokens: IntArray) -> IntArray:
        """Store row of the first row of some tokens."""
        line = np.searchsorted(self.lines, line_keys(documents, heads, self.head_groups))
        return self.offset[line] + tokens * rows_per_token(heads, self.head_groups)

    def prefix_of(self, lines: IntArray) -> IntArray:
        """Tokens stored of lines that are here."""
        return self.prefix[np.searchsorted(self.lines, lines)]

    def kept(self, held: Pieces) -> tuple[IntArray, IntArray]:
        """Held pieces of which the store has a part, and where that part ends."""
        lines = line_keys(held.document, held.head, self.head_groups)
        stored = np.flatnonzero(np.isin(lines, self.lines))
        stop = np.minimum(held.stop[stored], self.prefix_of(lines[stored]))
        some = held.start[stored] < stop
        return stored[some], stop[some]
