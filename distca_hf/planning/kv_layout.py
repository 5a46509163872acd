"""Layout of the remote KV: where a rank keeps the keys of documents held elsewhere, or held in several pieces."""

from dataclasses import dataclass

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.planning.pieces import Pieces, line_keys, rows_per_token
from distca_hf.planning.tasks import ALL_HEADS


@dataclass(frozen=True, eq=False)
class RemoteKVLayout:
    """Prefixes of lines (a document, all heads or one group of them), once each: chunk after chunk, in each of them
    documents whose heads are together first, then single groups.

    Attributes:
        lines: `[lines]` ascending, see `line_keys`.
        starts, stops: `[lines, chunks]` tokens of each chunk.
        offset: `[lines, chunks]` first remote-KV row of each.
        num_rows: of all chunks.
    """

    lines: IntArray
    starts: IntArray
    stops: IntArray
    offset: IntArray
    num_rows: int
    head_groups: int

    @classmethod
    def of(cls, lines: IntArray, prefixes: IntArray, borders: IntArray, head_groups: int) -> "RemoteKVLayout":
        """Lays out the prefixes of some lines for their readers, with the borders of their chunks."""
        lines, first, reader = np.unique(lines, return_index=True, return_inverse=True)
        prefix = np.zeros(len(lines), dtype=np.int64)
        np.maximum.at(prefix, reader, prefixes)
        starts = np.minimum(borders[first, :-1], prefix[:, None])
        stops = np.minimum(borders[first, 1:], prefix[:, None])
        head = lines % (head_groups + 1) + ALL_HEADS
        rows = (stops - starts) * rows_per_token(head, head_groups)[:, None]
        in_order = np.argsort(head != ALL_HEADS, kind="stable")
        chunk_major = rows[in_order].T.ravel()
        offset = np.empty_like(rows)
        offset[in_order] = (np.cumsum(chunk_major) - chunk_major).reshape(rows.T.shape).T
        return cls(lines, starts, stops, offset, int(rows.sum()), head_groups)

    def row(self, documents: IntArray, heads: IntArray, tokens: IntArray) -> IntArray:
        """Returns the remote-KV row of the first row of some tokens that are here."""
        line = self.index_of(line_keys(documents, heads, self.head_groups))
        chunk = (tokens[:, None] >= self.stops[line, :-1]).sum(axis=1)
        into_chunk = (tokens - self.starts[line, chunk]) * rows_per_token(heads, self.head_groups)
        return self.offset[line, chunk] + into_chunk

    def index_of(self, lines: IntArray) -> IntArray:
        """Returns the index of lines that are here."""
        return np.searchsorted(self.lines, lines)

    def parts_of(self, held: Pieces) -> tuple[IntArray, IntArray, IntArray]:
        """Returns parts of held pieces that are in the remote KV: index of the piece, start and stop of each part. No
        part goes on from one chunk to the next."""
        lines = line_keys(held.document, held.head, self.head_groups)
        stored = np.flatnonzero(np.isin(lines, self.lines))
        line = self.index_of(lines[stored])
        starts = np.maximum(held.start[stored][:, None], self.starts[line])
        stops = np.minimum(held.stop[stored][:, None], self.stops[line])
        part, chunk = np.nonzero(starts < stops)
        return stored[part], starts[part, chunk], stops[part, chunk]
