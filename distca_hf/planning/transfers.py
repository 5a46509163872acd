"""Transfers: the keys and values that each server lacks, the rank that sends them, the chunk that brings them,
and their rows in the remote KV.

needs of a server    | d1, all heads: tokens [0:9) |
pieces of d1         | rank 0 [0:4) | rank 2 [4:7) | the server itself [7:9) |
borders of chunks    | chunk 0 [0:5)       | chunk 1 [5:...)                 |
transfers            | 0: [0:4)     | 2: [4:5) | 2: [5:7) |

Remote prefixes are sent in several chunks, so that one is attended while the next is in flight:

    chunk                         0          1          2          3
    prefixes of a busy server  | d1 ....  | ... d1 d2 | .. d2 ..  | .. d2 d5 |    parts of about equal work
    of a server with little    |          |           |           | d3 d4 d6 |    fewer kernel calls, the last chunks
    read by remote queries     | d7 whole |           | d8 whole  |          |    never cut

Prefixes that only local queries read are cut so that every chunk brings a server about as much work. With four chunks
a server uses one for each quarter of a rank's mean work. A server with little remote work uses the last chunks only,
so that busier ranks are served first. A prefix that remote queries read comes whole, in one chunk. The remote queries
of a server are divided among the chunks.

The remote KV of a rank holds every key that its prefix calls and remote queries read, the prefix of every line once:

    chunk 0                                   | chunk 1
    | d1[0:5] all heads | d4[0:3] group 2 |   | d1[5:9] all heads | d2[0:6] all heads | d4[3:7] group 2 |
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IntArray, exclusive_cumsum, ranges, run_starts, run_stops, sum_by
from distca_hf.cost import TokenBytes
from distca_hf.planning.pieces import ALL_HEADS, Pieces, Ranges, line_keys, rows_per_token
from distca_hf.planning.plan import Plan


# Border behind the last token of any prefix: the largest int64, so that `minimum` with a prefix gives its length.
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class ExchangeChunks:
    """Where the prefixes that servers read are cut.

    Attributes:
        count: chunks.
        num_lines: lines that there may be, see `line_keys`.
        keys: `[prefixes]` ascending, one for each (server, line) that may come in another chunk than the first.
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
        # 1. One key for each prefix that a server reads.
        tasks, reads = plan.tasks, plan.reads_others
        groups, num_lines = tasks.head_groups, plan.layout.num_documents * (tasks.head_groups + 1)
        lines = line_keys(tasks.document[reads], tasks.head[reads], groups)
        keys, prefix = np.unique(tasks.server[reads] * num_lines + lines, return_inverse=True)

        # 2. Length and work of each prefix that local queries read; remote queries do not cut theirs.
        is_remote, start, stop = plan.has_remote_queries[reads], tasks.start[reads], tasks.stop[reads]
        longest, work = np.zeros((2, len(keys)), dtype=np.int64)
        np.maximum.at(longest, prefix[~is_remote], start[~is_remote])
        pairs_of_prefix = tasks.mask.pairs_of(start, stop) - tasks.mask.pairs_inside(stop - start)
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
        return cls(count, num_lines, keys, _borders(longest, first_chunk, stop_chunk, count))

    def borders_of(self, servers: IntArray | int, lines: IntArray) -> IntArray:
        """Returns `[prefixes, count + 1]` borders. A prefix without a key is not cut: the first chunk brings it."""
        borders = np.full((len(lines), self.count + 1), NEVER)
        borders[:, 0] = 0
        if len(self.keys):
            wanted = servers * self.num_lines + lines
            at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
            found = self.keys[at] == wanted
            borders[found] = self.borders[at[found]]
        return borders

    def of_remote_queries(self, servers: IntArray, lines: IntArray) -> IntArray:
        """Returns the chunk that brings each prefix that remote queries read."""
        return (self.borders_of(servers, lines)[:, 1:] == 0).sum(axis=1)


def _borders(longest: IntArray, first: IntArray, stop: IntArray, count: int) -> IntArray:
    """Returns `[prefixes, count + 1]` borders of prefixes cut into equal parts for chunks [first, stop)."""
    # chunks [1, 3) of four, 10 tokens:   borders 0 0 5 never never
    part = np.arange(count + 1) - first[:, None]
    borders: IntArray = longest[:, None] * np.maximum(part, 0) // (stop - first)[:, None]
    borders[part >= (stop - first)[:, None]] = NEVER  # no row is read beyond the prefix
    return borders


def _chunks_of_local_queries(
    servers: IntArray, work: IntArray, mean_work: float, count: int
) -> tuple[IntArray, IntArray]:
    """Returns the chunks [first, stop) of each prefix.

    The prefixes of a server, laid end to end, are cut into parts of equal work, one for each `mean_work / count`. Cuts
    move to the nearest border of prefixes, or of equal parts of one.
    """
    #     work of a server's prefixes    | d1 ......... | d2 | d3 |     begin of d2 is 9 of 12
    #     its chunks, two of four                | c2     | c3    |     so d1 comes in both, d2 and d3 in the last
    _, first_of, server = np.unique(servers, return_index=True, return_inverse=True)
    before = exclusive_cumsum(work)
    begin, total = before - before[first_of][server], np.bincount(server, weights=work)
    chunks = np.clip(np.ceil(count * total / mean_work), 1, count).astype(np.int64)[server]
    chunks_of_work = chunks / np.maximum(total, 1)[server]
    first = np.minimum(np.rint(begin * chunks_of_work).astype(np.int64), chunks - 1)
    stop = np.maximum(np.rint((begin + work) * chunks_of_work).astype(np.int64), first + 1)
    return first + count - chunks, stop + count - chunks


def _chunks_of_remote_queries(keys: IntArray, num_lines: int, head_groups: int, count: int) -> IntArray:
    """Returns the chunk of each (server, line). A server's lines are dealt to chunks in the order of its remote KV."""
    server, head = keys // num_lines, keys % num_lines % (head_groups + 1) + ALL_HEADS
    order = np.lexsort((keys, head != ALL_HEADS, server))
    _, number = np.unique(server[order], return_counts=True)
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
    # 1. Needs.
    groups = plan.tasks.head_groups
    server, line, prefix = _needs(plan)

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


def _needs(plan: Plan) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the longest prefix of each line that each server reads: server, line and tokens, in this order."""
    tasks, reads = plan.tasks, plan.reads_others
    server, prefix = tasks.server[reads], tasks.stop[reads]
    line = line_keys(tasks.document[reads], tasks.head[reads], tasks.head_groups)
    order = np.lexsort((prefix, line, server))
    server, line, prefix = server[order], line[order], prefix[order]
    longest = run_stops(run_starts(server, line))
    return server[longest], line[longest], prefix[longest]


def _cut(
    start: IntArray, stop: IntArray, server: IntArray, line: IntArray, chunks: ExchangeChunks | None
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cuts ranges at the borders of chunks: index of the range, chunk, start and stop of each part."""
    if chunks is None or chunks.count == 1:
        return np.arange(len(start)), np.zeros(len(start), dtype=np.int64), start, stop
    borders = chunks.borders_of(server, line)
    # [ranges, chunks]: the part of each range in each chunk, most of them empty.
    starts, stops = np.maximum(start[:, None], borders[:, :-1]), np.minimum(stop[:, None], borders[:, 1:])
    part, chunk = np.nonzero(starts < stops)
    return part, chunk, starts[part, chunk], stops[part, chunk]


def bytes_between(plan: Plan, token_bytes: TokenBytes) -> IntArray:
    """Sums `[source, destination]` bytes of one layer, forward: keys and values, queries that move, their outputs."""
    keys, queries = keys_between(plan), queries_between(plan)
    num_bytes = keys * token_bytes.key_value + queries * token_bytes.query + queries.T * token_bytes.output
    return num_bytes // plan.tasks.head_groups


def keys_between(plan: Plan) -> IntArray:
    """Counts `[source, destination]` rows of keys and values that are sent, each of one head group."""
    return key_transfers(plan).rows_between(plan.layout.num_ranks)


def queries_between(plan: Plan) -> IntArray:
    """Counts `[owner, server]` rows of queries that move, each of one head group."""
    moved, num_ranks = plan.pieces.select(plan.pieces.moved), plan.layout.num_ranks
    queries = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    np.add.at(queries, (moved.owner, moved.server), moved.rows)
    return queries


def received_bytes(plan: Plan, token_bytes: TokenBytes) -> IntArray:
    """Sums `[ranks]` bytes that each receives in one layer, forward: the columns of `bytes_between`.

    Senders are not told apart, so that it takes time and memory by tasks and ranks, and not by pairs of ranks.
    """
    num_ranks, groups, pieces = plan.layout.num_ranks, plan.tasks.head_groups, plan.pieces
    moved = pieces.select(pieces.moved)
    queries, outputs = (sum_by(rank, moved.rows, num_ranks) for rank in (moved.server, moved.owner))
    # Keys: of every prefix that is read, all rows but the reader's own.
    server, line, prefix = _needs(plan)
    lines = line_keys(pieces.document, pieces.head, groups)
    num_lines = int(max(lines.max(initial=0), line.max(initial=0))) + 1
    wanted, held = server * num_lines + line, pieces.owner * num_lines + lines
    at = np.searchsorted(wanted, held)
    own = np.flatnonzero(np.append(wanted, -1)[at] == held)
    known = np.minimum(pieces.stop[own], prefix[at[own]]) - pieces.start[own]
    rows = sum_by(server, prefix * rows_per_token(line % (groups + 1) + ALL_HEADS, groups), num_ranks)
    rows -= sum_by(pieces.owner[own], np.maximum(known, 0) * rows_per_token(pieces.head[own], groups), num_ranks)
    return (rows * token_bytes.key_value + queries * token_bytes.query + outputs * token_bytes.output) // groups


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
