"""Transfers: the keys and values that each server lacks, the rank that sends them, and the chunk that brings them.

needs of a server    | d1, all heads: tokens [0:9) |
pieces of d1         | rank 0 [0:4) | rank 2 [4:7) | the server itself [7:9) |
borders of chunks    | chunk 0 [0:5)       | chunk 1 [5:...)                 |
transfers            | 0: [0:4)     | 2: [4:5) | 2: [5:7) |
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IntArray, ranges, run_starts, run_stops
from distca_hf.cost import TokenBytes
from distca_hf.planning.chunks import ExchangeChunks
from distca_hf.planning.pieces import Ranges, line_keys
from distca_hf.planning.plan import Plan


@dataclass(frozen=True, eq=False)
class KeyTransfers(Ranges):
    """Keys and values that are sent, sorted by (source, chunk, destination, document, head, start).

    Attributes:
        source, destination: ranks.
        chunk: see `ExchangeChunks`.
    """

    source: IntArray
    destination: IntArray
    chunk: IntArray

    def rows_between(self, num_ranks: int) -> IntArray:
        """Counts `[source, destination]` rows of keys and values that are sent."""
        rows = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        np.add.at(rows, (self.source, self.destination), self.rows)
        return rows


def key_transfers(plan: Plan, chunks: ExchangeChunks | None = None) -> KeyTransfers:
    """Returns the keys that servers lack for their tasks. Each row is sent at most once to a server.

    Args:
        chunks: chunks of the exchange; by default there is one.
    """
    # 1. Needs: the longest prefix of each line that each server reads.
    tasks, groups = plan.tasks, plan.tasks.head_groups
    reads = plan.reads_others
    server, prefix = tasks.server[reads], tasks.stop[reads]
    line = line_keys(tasks.document[reads], tasks.head[reads], groups)
    order = np.lexsort((prefix, line, server))
    server, line, prefix = server[order], line[order], prefix[order]
    longest = run_stops(run_starts(server, line))
    server, line, prefix = server[longest], line[longest], prefix[longest]

    # 2. Join each need (server, document, head, prefix) with all pieces of that document and head.
    pieces = plan.pieces
    lines = line_keys(pieces.document, pieces.head, groups)
    first = np.searchsorted(lines, line, side="left")
    last = np.searchsorted(lines, line, side="right")
    need = np.repeat(np.arange(len(line)), last - first)
    piece = ranges(first, last - first)
    source, destination = pieces.owner[piece], server[need]
    start, stop = pieces.start[piece], np.minimum(pieces.stop[piece], prefix[need])

    # 3. Pieces of other ranks travel, cut at the borders of chunks.
    travels = np.flatnonzero((source != destination) & (start < stop))
    source, destination, need, piece = source[travels], destination[travels], need[travels], piece[travels]
    part, chunk, start, stop = _cut(start[travels], stop[travels], destination, line[need], chunks)
    source, destination, need, piece = source[part], destination[part], need[part], piece[part]
    order = np.lexsort((start, line[need], destination, chunk, source))
    return KeyTransfers(
        source=source[order],
        destination=destination[order],
        chunk=chunk[order],
        document=pieces.document[piece[order]],
        head=pieces.head[piece[order]],
        start=start[order],
        stop=stop[order],
        head_groups=groups,
    )


def _cut(
    start: IntArray, stop: IntArray, server: IntArray, line: IntArray, chunks: ExchangeChunks | None
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cuts ranges at the borders of chunks: index of the range, chunk, start and stop of each part."""
    if chunks is None or chunks.count == 1:
        return np.arange(len(start)), np.zeros(len(start), dtype=np.int64), start, stop
    borders = chunks.borders_of(server, line)
    starts, stops = np.maximum(start[:, None], borders[:, :-1]), np.minimum(stop[:, None], borders[:, 1:])
    part, chunk = np.nonzero(starts < stops)
    return part, chunk, starts[part, chunk], stops[part, chunk]


def bytes_between(plan: Plan, token_bytes: TokenBytes) -> IntArray:
    """Sums `[source, destination]` bytes of one layer, forward: keys and values, queries that move, their outputs."""
    num_ranks, groups = plan.layout.num_ranks, plan.tasks.head_groups
    moved = plan.pieces.select(plan.pieces.moved)
    queries = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    np.add.at(queries, (moved.owner, moved.server), moved.rows)
    keys = key_transfers(plan).rows_between(num_ranks)
    return (keys * token_bytes.key_value + queries * token_bytes.query + queries.T * token_bytes.output) // groups
