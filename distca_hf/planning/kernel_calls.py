"""Kernel calls of one rank: tasks that one varlen attention call computes together.

local parts    | d4[0:9] d7[0:3] | d1[5:8] d2[6:9] |    one LOCAL call: squares of neighbours with the same heads
their prefixes |                 | d1[0:5] d2[0:6] |    one PREFIX call per chunk: the squares' queries, no mask
remote tasks   | d9[2:7] against d9[0:7]           |    one REMOTE_QUERIES call
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

import numpy as np

from distca_hf.arrays import IntArray, chained, exclusive_cumsum, offsets, run_starts, run_stops
from distca_hf.cost import Mask
from distca_hf.planning.pieces import ALL_HEADS, Pieces, Ranges, line_keys, rows_per_token
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import ExchangeChunks, RemoteKVLayout


@dataclass(frozen=True, eq=False)
class LocalParts(Ranges):
    """Ranges of tokens that their owner rank computes, as consecutive rows, sorted by (document, head, start). A part
    that does not begin its document attends to a prefix, too.

    Attributes:
        token_row: layout row of the first token; rows here are tokens.
    """

    token_row: IntArray

    @classmethod
    def of(cls, pieces: Pieces) -> "LocalParts":
        """Joins pieces of one rank, sorted as `Pieces` are, whose tokens and rows follow each other."""
        groups = pieces.head_groups
        line = line_keys(pieces.document, pieces.head, groups)
        token_row = pieces.row // groups
        opens = run_starts(line, chained(pieces.start, pieces.tokens), chained(token_row, pieces.tokens))
        return cls(
            pieces.document[opens],
            pieces.head[opens],
            pieces.start[opens],
            pieces.stop[run_stops(opens)],
            groups,
            token_row[opens],
        )

    @property
    def continued(self) -> IntArray:
        """Indices of the parts that attend to a prefix."""
        return np.flatnonzero(self.start > 0)

    @property
    def prefix_lines(self) -> IntArray:
        """Lines of the prefixes, see `line_keys`."""
        chosen = self.continued
        return line_keys(self.document[chosen], self.head[chosen], self.head_groups)

    @property
    def prefixes(self) -> IntArray:
        """Tokens of the prefixes."""
        return self.start[self.continued]


@dataclass(frozen=True, eq=False)
class RemoteTasks(Ranges):
    """Tasks of one rank with queries of other ranks, in the order of their remote-query rows: by chunk, tasks of all
    heads before those of single groups.

    Attributes:
        task: index of the task in the plan.
        chunk: chunk that brings its keys.
        first_row: first remote-query row.
    """

    task: IntArray
    chunk: IntArray
    first_row: IntArray

    @classmethod
    def of(cls, plan: Plan, rank: int, chunks: ExchangeChunks) -> "RemoteTasks":
        """Sorts the remote tasks of a rank, and counts the rows of their queries."""
        tasks, groups = plan.tasks, plan.tasks.head_groups
        task = np.flatnonzero((tasks.server == rank) & plan.has_remote_queries)
        document, head, start, stop = (x[task] for x in (tasks.document, tasks.head, tasks.start, tasks.stop))
        chunk = chunks.of_remote_queries(tasks.server[task], line_keys(document, head, groups))
        order = np.lexsort((start, head, document, head != ALL_HEADS, chunk))
        document, head, start, stop = document[order], head[order], start[order], stop[order]
        rows = (stop - start) * rows_per_token(head, groups)
        return cls(document, head, start, stop, groups, task[order], chunk[order], exclusive_cumsum(rows))

    @property
    def lines(self) -> IntArray:
        """Lines of the prefixes that they read, see `line_keys`. A prefix ends with its task."""
        return line_keys(self.document, self.head, self.head_groups)


class CallKind(Enum):
    """Kind of a call: where its queries and its keys are read, and how they are masked.

                    queries            keys            mask
    LOCAL           local tokens       local tokens    causal
    PREFIX          local tokens       remote-KV rows  none: all keys come before all queries; or a window's left end
    REMOTE_QUERIES  remote-query rows  remote-KV rows  causal
    """

    LOCAL = auto()
    PREFIX = auto()
    REMOTE_QUERIES = auto()

    @property
    def is_causal(self) -> bool:
        """Whether masks are causal, aligned bottom-right. Otherwise every query attends to all keys of its task."""
        return self is not CallKind.PREFIX


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One varlen attention call: consecutive query rows against consecutive key rows.

    Attributes:
        query_start, query_stop, key_start, key_stop: tokens or rows, see `CallKind`.
        cu_seqlens_q, cu_seqlens_k: `[tasks + 1]` int64 offsets of each task in tokens, relative to the starts above.
        heads: head groups [first, last) that the call computes. They count all groups of a local token, or the groups
            side by side in a token's remote-query rows. Remote-KV rows hold these groups side by side, token after
            token.
        window_tokens: 0, or the window of a local call. Of a prefix call: the last query sees so many of the last
            keys, and each query before it one more.
    """

    kind: CallKind
    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray
    heads: tuple[int, int]
    window_tokens: int = 0

    @property
    def groups(self) -> int:
        """Head groups that the call computes: rows of a token in the remote KV and among remote queries."""
        return self.heads[1] - self.heads[0]

    @property
    def pairs_of_tasks(self) -> IntArray:
        """`[tasks]` attended pairs x groups of heads."""
        queries, keys = np.diff(self.cu_seqlens_q), np.diff(self.cu_seqlens_k)
        if self.kind.is_causal:
            pairs = Mask(self.window_tokens or None).pairs_of(keys - queries, keys)
        elif self.window_tokens:
            # Queries from the last on see window_tokens keys, one more, ... until they see all.
            rising = np.clip(keys - self.window_tokens, 0, queries)
            pairs = rising * self.window_tokens + rising * (rising - 1) // 2 + (queries - rising) * keys
        else:
            pairs = queries * keys
        return pairs * self.groups

    @property
    def pairs(self) -> int:
        """Attended pairs x groups of heads of the call."""
        return int(self.pairs_of_tasks.sum())


def local_calls(local: LocalParts, window_tokens: int = 0) -> tuple[KernelCall, ...]:
    """Returns calls of the squares of local parts: one for all neighbours with the same heads.

    Args:
        window_tokens: keys that a query sees, its own among them; 0 for all before it.
    """
    # Parts that lie beside each other, with the same heads, are one range of rows: d4[0:9] d7[0:3] | d1[5:8] ...
    row, tokens, first, last = _heads_joined(local)
    order = np.lexsort((row, last, first))
    row, tokens, first, last = row[order], tokens[order], first[order], last[order]
    opens = run_starts(first, last, chained(row, tokens))
    calls = []
    for begin, end in pairwise([*np.flatnonzero(opens).tolist(), len(row)]):
        cu_seqlens, at = offsets(tokens[begin:end]), int(row[begin])
        stop = at + int(cu_seqlens[-1])
        heads = int(first[begin]), int(last[begin])
        calls.append(KernelCall(CallKind.LOCAL, at, stop, at, stop, cu_seqlens, cu_seqlens, heads, window_tokens))
    return tuple(calls)


def prefix_calls(local: LocalParts, remote_kv: RemoteKVLayout, chunk: int) -> tuple[KernelCall, ...]:
    """Returns calls of local parts against the part of their prefixes that a chunk brings, without a mask.

        queries    | row of part 0 | row of part 1 |    consecutive local tokens
        keys       | its prefix    | its prefix    |    consecutive remote-KV rows

    A call ends where either are not consecutive, or where the heads change.
    """
    # 1. Parts whose prefix has tokens in this chunk; parts of all heads come first, as in the remote KV.
    groups, chosen = local.head_groups, local.continued
    line = remote_kv.index_of(local.prefix_lines)
    first, stop = remote_kv.starts[line, chunk], np.minimum(remote_kv.stops[line, chunk], local.prefixes)
    some = np.flatnonzero(first < stop)
    some = some[np.argsort(local.head[chosen[some]] != ALL_HEADS, kind="stable")]
    chosen, line, first, stop = chosen[some], line[some], first[some], stop[some]
    head, row, tokens = local.head[chosen], local.token_row[chosen], local.tokens[chosen]

    # 2. Neighbours whose queries and keys follow each other share a call.
    per_token, first_key = rows_per_token(head, groups), remote_kv.offset[line, chunk]
    opens = _opens(line, per_token, stop, remote_kv, chunk) | run_starts(head, chained(row, tokens))
    calls = []
    for begin, end in pairwise([*np.flatnonzero(opens).tolist(), len(chosen)]):
        queries, keys = offsets(tokens[begin:end]), offsets((stop - first)[begin:end])
        query, key, rows, group = (int(x[begin]) for x in (row, first_key, per_token, head))
        calls.append(
            KernelCall(
                CallKind.PREFIX,
                query,
                query + int(queries[-1]),
                key,
                key + int(keys[-1]) * rows,
                queries,
                keys,
                heads=(0, groups) if group == ALL_HEADS else (group, group + 1),
            )
        )
    return tuple(calls)


def remote_query_calls(remote: RemoteTasks, remote_kv: RemoteKVLayout, chunk: int) -> tuple[KernelCall, ...]:
    """Returns calls of the remote tasks whose keys a chunk brings, against their whole causal prefixes."""
    tasks = remote.select(remote.chunk == chunk)
    line, per_token = remote_kv.index_of(tasks.lines), rows_per_token(tasks.head, tasks.head_groups)
    first_key = remote_kv.offset[line, chunk]
    opens = _opens(line, per_token, tasks.stop, remote_kv, chunk)
    calls = []
    for begin, end in pairwise([*np.flatnonzero(opens).tolist(), len(tasks)]):
        queries, keys = offsets(tasks.tokens[begin:end]), offsets(tasks.stop[begin:end])
        query, key, rows = (int(x[begin]) for x in (tasks.first_row, first_key, per_token))
        query_stop, key_stop = query + int(queries[-1]) * rows, key + int(keys[-1]) * rows
        bounds = query, query_stop, key, key_stop
        calls.append(KernelCall(CallKind.REMOTE_QUERIES, *bounds, queries, keys, heads=(0, rows)))
    return tuple(calls)


def _heads_joined(local: LocalParts) -> tuple[IntArray, ...]:
    """Joins parts of the same tokens with consecutive groups: row, tokens, and groups [first, last) of each."""
    # Along consecutive groups the head rises as the index does, so their difference stays as it is.
    groups = local.head_groups
    order = np.lexsort((local.head, local.token_row, local.tokens))
    row, tokens, head = local.token_row[order], local.tokens[order], local.head[order]
    opens = run_starts(row, tokens, head - np.arange(len(head)))
    whole = head[opens] == ALL_HEADS
    first = np.where(whole, 0, head[opens])
    last = np.where(whole, groups, head[run_stops(opens)] + 1)
    return row[opens], tokens[opens], first, last


def _opens(line: IntArray, per_token: IntArray, stop: IntArray, remote_kv: RemoteKVLayout, chunk: int) -> np.ndarray:
    """Returns `[readers]` whether a reader of a chunk needs a new call.

    Keys of a call are consecutive, so all but its last task read all of their line's rows of the chunk, each of
    another line. If a line has several readers, each but the last gets its own call on the beginning of the same keys.
    """
    #     reader 0    | d1[0:5] |               one call for 0 and 1: their keys follow each other
    #     reader 1              | d2[0:2] |     2 reads the rows of 1 once more, and opens a call
    #     reader 2              | d2[0:3] |
    reads_all = stop == remote_kv.stops[line, chunk]
    after = remote_kv.offset[line, chunk] + (remote_kv.stops - remote_kv.starts)[line, chunk] * per_token
    follows = remote_kv.offset[line, chunk][1:] == after[:-1]
    opens = run_starts(per_token)
    opens[1:] |= ~reads_all[:-1] | (line[1:] == line[:-1]) | ~follows
    return opens


Span = tuple[int, int]


def adding_calls(spans: Sequence[Span]) -> frozenset[int] | None:
    """Finds calls whose keys are a subset of a larger call's keys: they add to gradients that the larger one writes.

    Args:
        spans: [start, stop) rows of each call, none of them empty.

    Returns:
        Indices of these calls. None if calls overlap in another way: more than two read a row, or neither of two
        contains the other.
    """
    writing: list[Span] = []
    adding: list[Span] = []
    indices = set[int]()
    for index in sorted(range(len(spans)), key=lambda index: spans[index][0] - spans[index][1]):
        span = spans[index]
        written = _overlapping(writing, span)
        if written is None:
            insort(writing, span)
        elif written[0] <= span[0] and span[1] <= written[1] and _overlapping(adding, span) is None:
            insort(adding, span)
            indices.add(index)
        else:
            return None
    return frozenset(indices)


def _overlapping(apart: Sequence[Span], span: Span) -> Span | None:
    """Finds the last span that overlaps `span`. Spans are ascending and disjoint."""
    before = bisect_left(apart, (span[1],)) - 1
    return apart[before] if before >= 0 and apart[before][1] > span[0] else None
