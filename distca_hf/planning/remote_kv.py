"""Remote KV: the rows of keys and values that one rank reads.

The remote KV of a rank holds the keys that its prefix calls and remote queries read, each once. Under the causal mask
they are prefixes of lines:

    chunk 0                                   | chunk 1
    | d1[0:5] all heads | d4[0:3] group 2 |   | d1[5:9] all heads | d2[0:6] all heads | d4[3:7] group 2 |

Keys of a shared prefix are read from the document that holds them, once for all documents of a rank that continue it.
The keys before a query are then a *path*, from the root of a tree on. Rows follow paths, beginning with the path that
most queries read:

    documents    d0[0:9] | d1 continues d0[0:4] | d2 continues d1[0:7], whose first 4 tokens d0 holds
    paths        d0[0:9], few queries of d0 | d0[0:4] d1[4:7], many queries of d2
    rows         | d0[0:4] d1[4:7] | d0[4:9] |

So the path of d2 is one rectangle. That of d0 has two: every further one reads all queries, and merges all results,
once more.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IntArray, chained, exclusive_cumsum, ranges, run_starts, run_stops, sum_by
from distca_hf.planning.pieces import ALL_HEADS, POSITION_BITS, Pieces, position_keys, rows_per_token
from distca_hf.planning.transfers import ExchangeChunks, KeyRanges


@dataclass(frozen=True, eq=False)
class RemoteKV:
    """Row numbers of the keys that one rank reads, chunk after chunk. In each chunk, lines of all heads come before
    lines of single groups.

    Attributes:
        reads: ranges of keys that the rank reads.
        starts, stops: `[ranges, chunks]` tokens [start, stop) of each range that a chunk brings.
        offset: `[ranges, chunks]` remote-KV row of the first of these tokens.
        num_rows: rows of all chunks.
    """

    reads: KeyRanges
    starts: IntArray
    stops: IntArray
    offset: IntArray
    num_rows: int

    @classmethod
    def lay_out(cls, reads: KeyRanges, chunks: ExchangeChunks, in_order: IntArray | None = None) -> "RemoteKV":
        """Numbers the rows chunk after chunk, and in a chunk range after range, all heads first.

        Args:
            in_order: `[ranges]` ranges in the order of their rows; by default the order of `reads`.
        """
        #     rows        chunk 0   chunk 1              offset      chunk 0   chunk 1
        #     range 0     5         4                    range 0     0         8
        #     range 1     3         0                    range 1     5         12
        borders = chunks.borders_of(reads.reader, reads.lines)
        starts = np.clip(borders[:, :-1], reads.start[:, None], reads.stop[:, None])
        stops = np.clip(borders[:, 1:], starts, reads.stop[:, None])
        rows = (stops - starts) * rows_per_token(reads.head, reads.head_groups)[:, None]
        if in_order is None:
            in_order = np.argsort(reads.head != ALL_HEADS, kind="stable")
        offset = np.empty_like(rows)
        offset[in_order] = exclusive_cumsum(rows[in_order].T.ravel()).reshape(rows.T.shape).T
        return cls(reads, starts, stops, offset, int(rows.sum()))

    def index_of(self, documents: IntArray, heads: IntArray, tokens: IntArray) -> IntArray:
        """Returns the indices of the ranges that hold these tokens."""
        reads, groups = self.reads, self.reads.head_groups
        begins = position_keys(reads.document, reads.head, reads.start, groups)
        index: IntArray = np.searchsorted(begins, position_keys(documents, heads, tokens, groups), side="right") - 1
        return index

    def row(self, documents: IntArray, heads: IntArray, tokens: IntArray) -> IntArray:
        """Returns the first row of each of these tokens in the remote KV."""
        index = self.index_of(documents, heads, tokens)
        chunk = (tokens[:, None] >= self.stops[index, :-1]).sum(axis=1)
        into_chunk = (tokens - self.starts[index, chunk]) * rows_per_token(heads, self.reads.head_groups)
        return self.offset[index, chunk] + into_chunk

    def parts_of(self, held: Pieces) -> tuple[IntArray, IntArray, IntArray]:
        """Finds the parts of held pieces that are in the remote KV, cut at the borders of chunks.

        Returns:
            Index of the piece, start and stop of each part.
        """
        piece, read = held.overlaps(self.reads)
        starts = np.maximum(held.start[piece][:, None], self.starts[read])
        stops = np.minimum(held.stop[piece][:, None], self.stops[read])
        part, chunk = np.nonzero(starts < stops)
        return piece[part], starts[part, chunk], stops[part, chunk]


def along_paths(parts: KeyRanges, path: IntArray, queries: IntArray, row: IntArray) -> tuple[KeyRanges, IntArray]:
    """Joins the keys that paths have in common, and puts them in the order of rows.

    Args:
        parts: ranges of keys of one reader that a document holds, of all paths.
        path: `[parts]` path of each of them.
        queries, row: `[paths]` queries that attend to the keys of each path, and row of the first of them.

    Returns:
        Disjoint ranges, sorted like `KeyRanges`; and `[ranges]` these in the order of their rows.
    """
    # 1. Edges: keys between two neighbouring borders, and the edge before each on its path.
    groups, positions = parts.head_groups, (1 << POSITION_BITS) - 1
    begins, ends = (position_keys(parts.document, parts.head, at, groups) for at in (parts.start, parts.stop))
    cuts = np.unique(np.concatenate([begins, ends]))
    first = np.searchsorted(cuts, begins)
    counts = np.searchsorted(cuts, ends) - first
    edge, path = ranges(first, counts), np.repeat(path, counts)
    order = np.lexsort((cuts[edge] & positions, path))
    edge, path = edge[order], path[order]
    follows = np.flatnonzero(path[1:] == path[:-1])
    before, after = edge[follows], edge[follows + 1]

    # 2. Every edge is followed by the one of most queries. So edges form chains.
    weight, first_row = sum_by(edge, queries[path], len(cuts)), np.full(len(cuts), np.iinfo(np.int64).max)
    np.minimum.at(first_row, edge, row[path])
    by_weight = np.argsort(weight[after], kind="stable")
    heaviest = np.full(len(cuts), -1)
    heaviest[before[by_weight]] = after[by_weight]  # the last one remains
    goes_on, chain = np.flatnonzero(heaviest >= 0), np.arange(len(cuts))
    chain[heaviest[goes_on]] = goes_on
    while np.any(chain[chain] != chain):  # until all edges point to the first one of their chain
        chain = chain[chain]

    # 3. Chain after chain, in the order of their queries. Neighbours of one line are joined.
    read = np.flatnonzero(weight)
    line, start, stop = cuts[read] >> POSITION_BITS, cuts[read] & positions, cuts[read + 1] & positions
    head, chain = line % (groups + 1) + ALL_HEADS, chain[read]
    order = np.lexsort((start, chain, first_row[chain], head != ALL_HEADS))
    line, start, stop, head = line[order], start[order], stop[order], head[order]
    opens = run_starts(line, chained(start, stop - start))
    line, start, stop, head = line[opens], start[opens], stop[run_stops(opens)], head[opens]
    by_position = np.lexsort((start, line))
    in_order = np.empty_like(by_position)
    in_order[by_position] = np.arange(len(by_position))
    reader = np.repeat(parts.reader[:1], len(line))  # the same for all
    reads = KeyRanges(line // (groups + 1), head, start, stop, groups, reader)
    return reads.select(by_position), in_order
