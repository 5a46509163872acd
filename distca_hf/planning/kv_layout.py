"""Layout of the remote KV: the row of every key that prefix calls and remote queries read on one rank.

    chunk 0                                   | chunk 1
    | d1[0:5] all heads | d4[0:3] group 2 |   | d1[5:9] all heads | d2[0:6] all heads | d4[3:7] group 2 |

A *line* is a document with all its heads, or with one head group. The remote KV holds the prefix of every line once.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IntArray, exclusive_cumsum
from distca_hf.planning.pieces import Pieces, line_keys, rows_per_token
from distca_hf.planning.tasks import ALL_HEADS


@dataclass(frozen=True, eq=False)
class RemoteKVLayout:
    """Prefixes of lines, once each, chunk after chunk. In a chunk, lines of all heads come before single groups.

    Attributes:
        lines: `[lines]` ascending, see `line_keys`.
        starts, stops: `[lines, chunks]` tokens [start, stop) that each chunk brings.
        offset: `[lines, chunks]` remote-KV row of the first of these tokens.
        num_rows: rows of all chunks.
        head_groups: groups that the plan divides heads into.
    """

    lines: IntArray
    starts: IntArray
    stops: IntArray
    offset: IntArray
    num_rows: int
    head_groups: int

    @classmethod
    def of(cls, lines: IntArray, prefixes: IntArray, borders: IntArray, head_groups: int) -> "RemoteKVLayout":
        """Lays out the longest prefix of each line.

        Args:
            lines: `[readers]` see `line_keys`; several readers may share a line.
            prefixes: `[readers]` tokens of the prefix that each of them reads.
            borders: `[readers, chunks + 1]` see `ExchangeChunks`.
            head_groups: groups that the plan divides heads into.
        """
        # 1. The longest prefix of each line, cut at the borders of chunks.
        lines, first, reader = np.unique(lines, return_index=True, return_inverse=True)
        prefix = np.zeros(len(lines), dtype=np.int64)
        np.maximum.at(prefix, reader, prefixes)
        starts = np.minimum(borders[first, :-1], prefix[:, None])
        stops = np.minimum(borders[first, 1:], prefix[:, None])
        # 2. Rows are numbered chunk after chunk, and in a chunk line after line, all heads first:
        #
        #     rows        chunk 0   chunk 1              offset      chunk 0   chunk 1
        #     line 0      5         4                    line 0      0         8
        #     line 1      3         0                    line 1      5         12
        head = lines % (head_groups + 1) + ALL_HEADS
        rows = (stops - starts) * rows_per_token(head, head_groups)[:, None]
        in_order = np.argsort(head != ALL_HEADS, kind="stable")
        chunk_major = rows[in_order].T.ravel()
        offset = np.empty_like(rows)
        offset[in_order] = exclusive_cumsum(chunk_major).reshape(rows.T.shape).T
        return cls(lines, starts, stops, offset, int(rows.sum()), head_groups)

    def row(self, documents: IntArray, heads: IntArray, tokens: IntArray) -> IntArray:
        """Returns the first remote-KV row of tokens that are in the remote KV."""
        line = self.index_of(line_keys(documents, heads, self.head_groups))
        chunk = (tokens[:, None] >= self.stops[line, :-1]).sum(axis=1)
        into_chunk = (tokens - self.starts[line, chunk]) * rows_per_token(heads, self.head_groups)
        return self.offset[line, chunk] + into_chunk

    def index_of(self, lines: IntArray) -> IntArray:
        """Returns the index of lines that are in the remote KV."""
        return np.searchsorted(self.lines, lines)

    def parts_of(self, held: Pieces) -> tuple[IntArray, IntArray, IntArray]:
        """Finds the parts of held pieces that are in the remote KV, cut at the borders of chunks.

        Returns:
            Index of the piece, start and stop of each part.
        """
        lines = line_keys(held.document, held.head, self.head_groups)
        stored = np.flatnonzero(np.isin(lines, self.lines))
        line = self.index_of(lines[stored])
        starts = np.maximum(held.start[stored][:, None], self.starts[line])
        stops = np.minimum(held.stop[stored][:, None], self.stops[line])
        part, chunk = np.nonzero(starts < stops)
        return stored[part], starts[part, chunk], stops[part, chunk]
