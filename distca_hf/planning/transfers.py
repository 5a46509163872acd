"""Transfers: finds the keys and values that each rank lacks for its tasks, the ranks that send them, and the chunks
that bring them.

needs of a rank      | d1, all heads: tokens [0:9) |
pieces of d1         | rank 0 [0:4) | rank 2 [4:7) | the rank itself [7:9) |
borders of chunks    | chunk 0 [0:5)       | chunk 1 [5:...)                 |
transfers            | 0: [0:4)     | 2: [4:5) | 2: [5:7) |

Remote prefixes are sent in several chunks: ranks attend to one while the next is in flight.

    chunk                         0          1          2          3
    prefixes of a busy rank    | d1 ....  | ... d1 d2 | .. d2 ..  | .. d2 d5 |    parts of about equal work
    of a rank with little      |          |           |           | d3 d4 d6 |    fewer kernel calls, the last chunks
    read by remote queries     | d7 whole |           | d8 whole  |          |    never cut

Prefixes that only local queries read are cut to bring a rank about equal work in every chunk. With four chunks, a rank
uses one for each quarter of the ranks' mean work. A rank with little remote work uses only the last chunks: busier
ranks get theirs first. A prefix that remote queries read arrives whole, in one chunk. A rank's remote queries are
divided among the chunks.
"""

from dataclasses import dataclass, replace

import numpy as np

from distca_hf.arrays import IntArray, exclusive_cumsum, ranges, run_starts, run_stops, sum_by
from distca_hf.cost import TokenBytes
from distca_hf.layout import Layout
from distca_hf.planning.pieces import (
    ALL_HEADS,
    POSITION_BITS,
    Ranges,
    line_keys,
    rows_per_token,
)
from distca_hf.planning.plan import Plan


# Border after the last token of any prefix: the largest int64, whose `minimum` with a prefix gives its length.
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class ExchangeChunks:
    """Borders at which the prefixes that ranks read are cut.

    Attributes:
        count: chunks.
        num_lines: largest possible number of lines, see `line_keys`.
        keys: `[prefixes]` ascending, one for each (reader, line) that may arrive in another chunk than the first.
        borders: `[prefixes, count + 1]` chunk i brings tokens [borders[i], borders[i + 1]).
    """

    count: int
    num_lines: int
    keys: IntArray
    borders: IntArray

    @classmethod
    def cut(cls, plan: Plan, count: int) -> "ExchangeChunks":
        """Cuts all prefixes of a plan into at most `count` chunks."""
        if count == 1:
            none = np.zeros(0, dtype=np.int64)
            return cls(count, 0, none, none.reshape(0, 2))
        # 1. One key for each prefix that a rank reads.
        tasks, reads = plan.tasks, np.flatnonzero(plan.reads_others)
        groups, num_lines = tasks.head_groups, plan.layout.num_documents * (tasks.head_groups + 1)
        first_key, start = tasks.first_key[reads], tasks.start[reads]
        part, document, first, last = held_keys(plan.layout, tasks.document[reads], first_key, start)
        reads = reads[part]
        keys, prefix = np.unique(
            tasks.rank[reads] * num_lines + line_keys(document, tasks.head[reads], groups), return_inverse=True
        )

        # 2. Tokens and work of each prefix that local queries read; prefixes of remote queries are not cut.
        is_remote = plan.has_remote_queries[reads]
        shortest, longest, work = np.zeros((3, len(keys)), dtype=np.int64)
        np.maximum.at(longest, prefix[~is_remote], last[~is_remote])
        shortest[:] = longest
        np.minimum.at(shortest, prefix[~is_remote], first[~is_remote])
        start, stop = tasks.start[reads], tasks.stop[reads]
        pairs_of_prefix = tasks.mask.pairs_of(start, stop) - tasks.mask.pairs_inside(start, stop)
        if plan.layout.shared is not None:  # each document that holds a part of the prefix has a part of the work
            pairs_of_prefix = pairs_of_prefix * (last - first) // np.maximum(start - tasks.first_key[reads], 1)
        rectangles = pairs_of_prefix * rows_per_token(tasks.head[reads], groups)
        np.add.at(work, prefix[~is_remote], rectangles[~is_remote])
        of_remote_queries = np.zeros(len(keys), dtype=bool)
        of_remote_queries[prefix[is_remote]] = True
        local = ~of_remote_queries

        # 3. The chunks that bring each prefix, and its borders in them.
        first_chunk, stop_chunk = np.zeros((2, len(keys)), dtype=np.int64)
        first_chunk[of_remote_queries] = _chunks_of_remote_queries(keys[of_remote_queries], num_lines, groups, count)
        stop_chunk[of_remote_queries] = first_chunk[of_remote_queries] + 1
        first_chunk[local], stop_chunk[local] = _chunks_of_local_queries(
            keys[local] // num_lines, work[local], plan.work.mean(), count
        )
        return cls(count, num_lines, keys, _borders(shortest, longest, first_chunk, stop_chunk, count))

    def borders_of(self, readers: IntArray | int, lines: IntArray) -> IntArray:
        """Returns `[prefixes, count + 1]` borders. A prefix without an entry is not cut: the first chunk brings it."""
        borders = np.full((len(lines), self.count + 1), NEVER)
        borders[:, 0] = 0
        if len(self.keys):
            wanted = readers * self.num_lines + lines
            at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
            found = self.keys[at] == wanted
            borders[found] = self.borders[at[found]]
        return borders

    def of_remote_queries(self, readers: IntArray, lines: IntArray) -> IntArray:
        """Returns the chunk that brings each prefix that remote queries read."""
        return (self.borders_of(readers, lines)[:, 1:] == 0).sum(axis=1)


def held_keys(
    layout: Layout, document: IntArray, start: IntArray, stop: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Finds the documents that hold the keys of some ranges; see `SharedPrefixes.held`."""
    if layout.shared is None:
        return np.arange(len(document)), document, start, stop
    return layout.shared.held(document, start, stop)


def _borders(begin: IntArray, end: IntArray, first: IntArray, stop: IntArray, count: int) -> IntArray:
    """Returns `[prefixes, count + 1]` borders of keys [begin, end) cut into equal parts for chunks [first, stop)."""
    # chunks [1, 3) of four, 10 tokens:   borders 0 0 5 never never
    part = np.arange(count + 1) - first[:, None]
    into = (end - begin)[:, None] * np.maximum(part, 0) // (stop - first)[:, None]
    borders = np.where(part > 0, begin[:, None] + into, 0)
    borders[part >= (stop - first)[:, None]] = NEVER  # no row beyond the prefix is read
    return borders


def _chunks_of_local_queries(
    readers: IntArray, work: IntArray, mean_work: float, count: int
) -> tuple[IntArray, IntArray]:
    """Returns the chunks [first, stop) of each prefix.

    Lays a reader's prefixes end to end, and cuts them into parts of equal work, one for each `mean_work / count`. Cuts
    move to the nearest border of prefixes, or of equal parts of one.
    """
    #     work of a reader's prefixes    | d1 ......... | d2 | d3 |     begin of d2 is 9 of 12
    #     its chunks, two of four                | c2     | c3    |     so d1 comes in both, d2 and d3 in the last
    _, first_of, reader = np.unique(readers, return_index=True, return_inverse=True)
    before = exclusive_cumsum(work)
    begin, total = before - before[first_of][reader], np.bincount(reader, weights=work)
    chunks = np.clip(np.ceil(count * total / mean_work), 1, count).astype(np.int64)[reader]
    chunks_of_work = chunks / np.maximum(total, 1)[reader]
    first = np.minimum(np.rint(begin * chunks_of_work).astype(np.int64), chunks - 1)
    stop = np.maximum(np.rint((begin + work) * chunks_of_work).astype(np.int64), first + 1)
    return first + count - chunks, stop + count - chunks


def _chunks_of_remote_queries(keys: IntArray, num_lines: int, head_groups: int, count: int) -> IntArray:
    """Returns the chunk of each (reader, line). A reader's lines are dealt to chunks in the order of its remote KV."""
    reader, head = keys // num_lines, keys % num_lines % (head_groups + 1) + ALL_HEADS
    order = np.lexsort((keys, head != ALL_HEADS, reader))
    _, number = np.unique(reader[order], return_counts=True)
    chunk = np.empty(len(keys), dtype=np.int64)
    chunk[order] = ranges(0, number) * count // np.repeat(number, number)
    return chunk


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

    def in_chunks(self, chunks: ExchangeChunks) -> "KeyTransfers":
        """Cuts transfers, which so far are all in one chunk, at the borders of these chunks."""
        if chunks.count == 1:
            return self
        borders = chunks.borders_of(self.destination, self.lines)
        # [ranges, chunks]: the part of each range in each chunk, most of them empty.
        starts = np.maximum(self.start[:, None], borders[:, :-1])
        stops = np.minimum(self.stop[:, None], borders[:, 1:])
        part, chunk = np.nonzero(starts < stops)
        order = np.lexsort((chunk, self.source[part]))
        part, chunk = part[order], chunk[order]
        return replace(self.select(part), chunk=chunk, start=starts[part, chunk], stop=stops[part, chunk])

    def rows_between(self, num_ranks: int) -> IntArray:
        """Counts `[source, destination]` rows of keys and values that are sent."""
        rows = np.zeros(num_ranks * num_ranks, dtype=np.int64)
        np.add.at(rows, self.source * num_ranks + self.destination, self.rows)
        return rows.reshape(num_ranks, num_ranks)


@dataclass(frozen=True, eq=False)
class KeyRanges(Ranges):
    """Disjoint ranges of keys that ranks read, sorted by (reader, document, head, start).

    Attributes:
        reader: rank.
    """

    reader: IntArray

    @classmethod
    def join(
        cls, reader: IntArray, document: IntArray, head: IntArray, start: IntArray, stop: IntArray, head_groups: int
    ) -> "KeyRanges":
        """Joins ranges of a reader that overlap or touch; leaves out empty ones."""
        order = np.lexsort((start, head, document, reader))
        order = order[start[order] < stop[order]]
        all_ranges = cls(document[order], head[order], start[order], stop[order], head_groups, reader[order])
        opens = run_starts(all_ranges.reader, all_ranges.lines)
        # The farthest stop of a line so far. Positions are below 2 ** POSITION_BITS, so lines do not mix.
        line_number = np.cumsum(opens) << POSITION_BITS
        reach = np.maximum.accumulate(all_ranges.stop + line_number) - line_number
        opens[1:] |= all_ranges.start[1:] > reach[:-1]
        return replace(all_ranges.select(opens), stop=reach[run_stops(opens)])

    @classmethod
    def of(cls, plan: Plan) -> "KeyRanges":
        """Returns the keys of all tasks that may need keys of other ranks."""
        tasks, reads = plan.tasks, np.flatnonzero(plan.reads_others)
        part, *keys = held_keys(plan.layout, *(x[reads] for x in (tasks.document, tasks.first_key, tasks.stop)))
        document, start, stop = keys
        reads = reads[part]
        return cls.join(tasks.rank[reads], document, tasks.head[reads], start, stop, tasks.head_groups)


def key_transfers(plan: Plan, chunks: ExchangeChunks | None = None) -> KeyTransfers:
    """Returns the transfers of the keys that ranks lack for their tasks. A rank receives each row at most once.

    Args:
        chunks: chunks of the exchange; by default there is one.
    """
    # Pieces of other ranks with keys that a rank reads, sorted by the rank that sends them.
    reads, pieces = KeyRanges.of(plan), plan.pieces
    read, piece = reads.overlaps(pieces)
    travels = pieces.owner[piece] != reads.reader[read]
    read, piece = read[travels], piece[travels]
    # NumPy sorts 16-bit integers in linear time.
    order = np.argsort(pieces.owner[piece].astype(np.min_scalar_type(plan.layout.num_ranks)), kind="stable")
    read, piece = read[order], piece[order]
    transfers = KeyTransfers(
        source=pieces.owner[piece],
        destination=reads.reader[read],
        chunk=np.zeros(len(piece), dtype=np.int64),
        document=pieces.document[piece],
        head=pieces.head[piece],
        start=np.maximum(pieces.start[piece], reads.start[read]),
        stop=np.minimum(pieces.stop[piece], reads.stop[read]),
        head_groups=pieces.head_groups,
    )
    return transfers if chunks is None else transfers.in_chunks(chunks)


def bytes_between(plan: Plan, token_bytes: TokenBytes) -> IntArray:
    """Sums `[source, destination]` bytes of one layer, forward: keys and values, queries that move, their outputs."""
    keys, queries = keys_between(plan), queries_between(plan)
    num_bytes = keys * token_bytes.key_value + queries * token_bytes.query + queries.T * token_bytes.output
    return num_bytes // plan.tasks.head_groups


def keys_between(plan: Plan) -> IntArray:
    """Counts `[source, destination]` rows of keys and values that are sent, each of one head group."""
    return key_transfers(plan).rows_between(plan.layout.num_ranks)


def queries_between(plan: Plan) -> IntArray:
    """Counts `[owner, computing rank]` rows of queries that move, each of one head group."""
    moved, num_ranks = plan.pieces.select(plan.pieces.moved), plan.layout.num_ranks
    queries = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    np.add.at(queries, (moved.owner, moved.computing_rank), moved.rows)
    return queries


def received_bytes(plan: Plan, token_bytes: TokenBytes) -> IntArray:
    """Sums `[ranks]` bytes that each rank receives in one layer, forward: the columns of `bytes_between`.

    Does not tell senders apart, so time and memory grow with tasks and ranks, not with pairs of ranks.
    """
    num_ranks, groups, pieces = plan.layout.num_ranks, plan.tasks.head_groups, plan.pieces
    moved = pieces.select(pieces.moved)
    queries, outputs = (sum_by(rank, moved.rows, num_ranks) for rank in (moved.computing_rank, moved.owner))
    # Keys: all that are read, except the reader's own. Numbers pairs (reader, document) to find these in pieces.
    reads, documents = KeyRanges.of(plan), plan.layout.num_documents
    wanted, held = reads.reader * documents + reads.document, pieces.owner * documents + pieces.document
    number, is_read = np.unique(wanted), np.isin(held, wanted)
    own = replace(pieces.select(is_read), document=np.searchsorted(number, held[is_read]))
    piece, read = own.overlaps(replace(reads, document=np.searchsorted(number, wanted)))
    known = np.minimum(own.stop[piece], reads.stop[read]) - np.maximum(own.start[piece], reads.start[read])
    rows = sum_by(reads.reader, reads.rows, num_ranks)
    rows -= sum_by(reads.reader[read], known * rows_per_token(reads.head[read], groups), num_ranks)
    return (rows * token_bytes.key_value + queries * token_bytes.query + outputs * token_bytes.output) // groups
