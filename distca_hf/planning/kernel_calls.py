"""Kernel calls: groups the tasks of one rank into varlen attention calls.

local parts    | d4[0:9] d7[0:3] | d1[5:8] d2[6:9] |    one LOCAL call: squares of neighbours with the same heads
their prefixes |                 | d1[0:5] d2[0:6] |    one PREFIX call per chunk: the squares' queries, no mask
remote tasks   | d9[2:7] against d9[0:7]           |    one REMOTE_QUERIES call
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from distca_hf.arrays import BoolArray, IntArray, chained, exclusive_cumsum, offsets, run_starts, run_stops
from distca_hf.cost import Mask
from distca_hf.layout import Layout
from distca_hf.planning.pieces import ALL_HEADS, Pieces, Ranges, line_keys, rows_per_token
from distca_hf.planning.plan import Plan
from distca_hf.planning.remote_kv import RemoteKV
from distca_hf.planning.transfers import ExchangeChunks, held_keys


# Keys that cost as much as a query if one more rectangle has them, with four query heads to a KV head. In bf16 kernels
# and merges read and write rows as wide as a query about 15 times, forward and backward. A key and its value, half as
# wide together, are read, their gradients written, and added in fp32: about 8 times.
KEYS_OF_QUERY = 4


@dataclass(frozen=True, eq=False)
class LocalParts(Ranges):
    """Ranges of tokens whose queries their owner rank computes, sorted by (document, head, start). A part's rows are
    consecutive. Its queries may also attend to keys before it.

    Attributes:
        token_row: layout row of the first token, counted in tokens even if heads are divided.
    """

    token_row: IntArray

    @classmethod
    def of(cls, pieces: Pieces) -> "LocalParts":
        """Joins pieces of one rank, sorted like `Pieces`, if their tokens and rows follow each other."""
        token_row = pieces.row // pieces.head_groups
        opens = run_starts(pieces.lines, chained(pieces.start, pieces.tokens), chained(token_row, pieces.tokens))
        return cls(
            pieces.document[opens],
            pieces.head[opens],
            pieces.start[opens],
            pieces.stop[run_stops(opens)],
            pieces.head_groups,
            token_row[opens],
        )

    def cut(self, mask: Mask) -> "LocalParts":
        """Cuts parts at queries that attend to no key before them."""
        part, start, stop = self.parts_under(mask)
        row = self.token_row[part] + start - self.start[part]
        return replace(self.select(part), start=start, stop=stop, token_row=row)


@dataclass(frozen=True, eq=False)
class RemoteTasks(Ranges):
    """Tasks of one rank with queries of other ranks, in the order of their remote-query rows: sorted by chunk, and in
    each chunk tasks of all heads before tasks of single groups.

    Attributes:
        task: index of the task in the plan.
        chunk: chunk that brings the keys of the task.
        first_row: first remote-query row of the task.
    """

    task: IntArray
    chunk: IntArray
    first_row: IntArray

    @classmethod
    def of(cls, plan: Plan, rank: int, chunks: ExchangeChunks) -> "RemoteTasks":
        """Sorts the remote tasks of a rank, and counts the rows of their queries."""
        tasks, groups = plan.tasks, plan.tasks.head_groups
        task = np.flatnonzero((tasks.rank == rank) & plan.has_remote_queries)
        document, head, start, stop = (x[task] for x in (tasks.document, tasks.head, tasks.start, tasks.stop))
        chunk = chunks.of_remote_queries(tasks.rank[task], line_keys(document, head, groups))
        order = np.lexsort((start, head, document, head != ALL_HEADS, chunk))
        document, head, start, stop = document[order], head[order], start[order], stop[order]
        rows = (stop - start) * rows_per_token(head, groups)
        return cls(document, head, start, stop, groups, task[order], chunk[order], exclusive_cumsum(rows))

    def cut(self, mask: Mask) -> "RemoteTasks":
        """Cuts tasks at queries that attend to no key before them."""
        part, start, stop = self.parts_under(mask)
        rows = (start - self.start[part]) * rows_per_token(self.head[part], self.head_groups)
        return replace(self.select(part), start=start, stop=stop, first_row=self.first_row[part] + rows)


class CallKind(Enum):
    """Kind of a call: the source of its queries and keys, and its mask.

                    queries            keys            mask
    LOCAL           local tokens       local tokens    causal
    PREFIX          local tokens       remote-KV rows  none, or a window's left end: all keys come before all queries
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
        heads: head groups [first, last) that the call computes, counted among all groups of a local token, or among
            the adjacent groups of a token's remote-query rows. Remote-KV rows hold these groups next to each other,
            token after token.
        window_tokens: 0 without a window. For a causal call, its window. For a prefix call, how many of the last keys
            its last query attends to; each query before attends to one more.
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


def local_calls(local: LocalParts, mask: Mask) -> tuple[KernelCall, ...]:
    """Returns calls of the squares of local parts: one for all neighbours with the same heads."""
    # 1. Parts of the same tokens with consecutive groups are joined, to groups [first, last). Along these the head
    # rises with the index, so their difference is constant.
    order = np.lexsort((local.head, local.token_row, local.tokens))
    row, tokens, head = local.token_row[order], local.tokens[order], local.head[order]
    opens = run_starts(row, tokens, head - np.arange(len(head)))
    row, tokens, whole = row[opens], tokens[opens], head[opens] == ALL_HEADS
    first = np.where(whole, 0, head[opens])
    last = np.where(whole, local.head_groups, head[run_stops(opens)] + 1)
    # 2. Adjacent parts with the same heads are one range of rows: d4[0:9] d7[0:3] | d1[5:8] ...
    order = np.lexsort((row, last, first))
    row, tokens, first, last = row[order], tokens[order], first[order], last[order]
    opens = run_starts(first, last, chained(row, tokens))
    calls = []
    for begin, end in pairwise([*np.flatnonzero(opens).tolist(), len(row)]):
        cu_seqlens, at = offsets(tokens[begin:end]), int(row[begin])
        stop = at + int(cu_seqlens[-1])
        heads = int(first[begin]), int(last[begin])
        window_tokens = 0 if mask.chunked else mask.window_tokens or 0
        calls.append(KernelCall(CallKind.LOCAL, at, stop, at, stop, cu_seqlens, cu_seqlens, heads, window_tokens))
    return tuple(calls)


class PrefixKeys(NamedTuple):
    """Keys before local parts, in ranges of the remote KV. Parts of all heads come first, as there. All arrays are
    int64, of one length.

    Attributes:
        part: local part whose queries attend to them.
        read: range of the remote KV.
        first, stop: tokens [first, stop) of the document that holds them.
    """

    part: IntArray
    read: IntArray
    first: IntArray
    stop: IntArray

    @classmethod
    def of(cls, layout: Layout, local: LocalParts, mask: Mask, remote_kv: RemoteKV) -> "PrefixKeys":
        """Finds the keys before the first query of each part."""
        first_key = mask.first_key(local.start)
        part = np.flatnonzero(first_key < local.start)
        part = part[np.argsort(local.head[part] != ALL_HEADS, kind="stable")]
        of, document, first, stop = held_keys(layout, local.document[part], first_key[part], local.start[part])
        part = part[of]
        if layout.shared is None:
            return cls(part, remote_kv.index_of(document, local.head[part], first), first, stop)
        of, read = Ranges(document, local.head[part], first, stop, local.head_groups).overlaps(remote_kv.reads)
        return cls(part[of], read, first[of], stop[of])


def prefix_calls(
    layout: Layout, local: LocalParts, mask: Mask, before: PrefixKeys, remote_kv: RemoteKV, chunk: int
) -> tuple[KernelCall, ...]:
    """Returns calls of local parts against the keys before them that a chunk brings.

        queries    | row of part 0 | row of part 1 | rows of parts 2 and 3        |    consecutive local tokens
        keys       | its prefix    | its prefix    | the prefix that these share  |    consecutive remote-KV rows

    A call ends where queries or keys are not consecutive, or heads change. With a window each part has its own call.
    Keys before a part are several rectangles if other paths run between their rows.
    """
    # 1. Keys of each part in this chunk.
    part, read, first, stop = before
    groups, brought = local.head_groups, remote_kv.starts[read, chunk]
    first, stop = np.maximum(brought, first), np.minimum(remote_kv.stops[read, chunk], stop)
    some = np.flatnonzero(first < stop)
    part, read, brought, first, stop = part[some], read[some], brought[some], first[some], stop[some]
    per_token, keys = rows_per_token(local.head[part], groups), stop - first
    first_row = remote_kv.offset[read, chunk] + (first - brought) * per_token
    if layout.shared is not None:  # rows that follow each other are one rectangle; in a window, positions as well
        order = np.lexsort((first_row, part, local.head[part] != ALL_HEADS))
        part, first, stop, first_row = part[order], first[order], stop[order], first_row[order]
        per_token, keys = per_token[order], keys[order]
        position = np.zeros_like(stop) if mask.window_tokens is None else chained(first, keys)
        opens = run_starts(part, chained(first_row, keys * per_token), position)
        if mask.window_tokens is None:
            opens[1:] |= _read_together(local.select(part), first_row, keys)[:-1]
        keys = np.add.reduceat(keys, np.flatnonzero(opens)) if len(opens) else keys
        part, stop, first_row, per_token = part[opens], stop[run_stops(opens)], first_row[opens], per_token[opens]
    local = local.select(part)

    # 2. Parts that read the same keys are one, if their queries follow each other.
    queries, window_tokens = mask.before(local.tokens, local.start - stop)
    if layout.shared is not None:
        order = np.lexsort((local.token_row, keys, first_row, local.head != ALL_HEADS))
        local, queries, window_tokens = local.select(order), queries[order], window_tokens[order]
        per_token, keys, first_row = per_token[order], keys[order], first_row[order]
        opens = run_starts(local.head, first_row, keys, chained(local.token_row, queries)) | (window_tokens > 0)
        local, first_row, keys = local.select(opens), first_row[opens], keys[opens]
        queries = np.add.reduceat(queries, np.flatnonzero(opens)) if len(opens) else queries
        per_token, window_tokens = per_token[opens], window_tokens[opens]

    # 3. Neighbours whose queries and keys follow each other share a call.
    opens = run_starts(local.head, chained(local.token_row, queries), chained(first_row, keys * per_token))
    opens |= window_tokens > 0
    calls = []
    for begin, end in pairwise([*np.flatnonzero(opens).tolist(), len(local)]):
        cu_q, cu_k = offsets(queries[begin:end]), offsets(keys[begin:end])
        query, key, rows, group = (int(x[begin]) for x in (local.token_row, first_row, per_token, local.head))
        bounds = query, query + int(cu_q[-1]), key, key + int(cu_k[-1]) * rows
        heads = (0, groups) if group == ALL_HEADS else (group, group + 1)
        calls.append(KernelCall(CallKind.PREFIX, *bounds, cu_q, cu_k, heads, int(window_tokens[begin])))
    return tuple(calls)


def _read_together(local: LocalParts, first_row: IntArray, keys: IntArray) -> BoolArray:
    """Returns `[rectangles]` whether a rectangle is not joined with the next one of its path: it has few queries, and
    is joined with rectangles of neighbours that read the same keys instead.

    Args:
        local: part of each rectangle; rectangles of a part follow each other.
        first_row, keys: remote-KV rows of each rectangle.
    """
    is_last = run_stops(run_starts(local.lines, local.start))
    at = np.flatnonzero(is_last | (KEYS_OF_QUERY * local.tokens < keys))
    at = at[np.lexsort((local.token_row[at], keys[at], first_row[at], local.head[at]))]
    opens = run_starts(local.head[at], first_row[at], keys[at], chained(local.token_row[at], local.tokens[at]))
    together = np.zeros(len(local), dtype=bool)
    together[at[~(opens & run_stops(opens))]] = True
    return together


def remote_query_calls(remote: RemoteTasks, mask: Mask, remote_kv: RemoteKV, chunk: int) -> tuple[KernelCall, ...]:
    """Returns calls of the remote tasks whose keys a chunk brings, against all keys to which they attend.

    Neighbours whose keys follow each other share a call. If several tasks read the same keys, each gets its own.
    """
    #     task 0    | d1[0:5] |               one call for 0 and 1: their keys follow each other
    #     task 1              | d2[0:2] |     2 reads the rows of 1 once more, and opens a call
    #     task 2              | d2[0:3] |
    tasks = remote.select(remote.chunk == chunk).cut(mask)
    per_token, first = rows_per_token(tasks.head, tasks.head_groups), mask.first_key(tasks.start)
    read = remote_kv.index_of(tasks.document, tasks.head, first)
    first_row = remote_kv.offset[read, chunk] + (first - remote_kv.starts[read, chunk]) * per_token
    opens = run_starts(per_token, chained(first_row, (tasks.stop - first) * per_token))
    calls = []
    for begin, end in pairwise([*np.flatnonzero(opens).tolist(), len(tasks)]):
        queries, keys = offsets(tasks.tokens[begin:end]), offsets((tasks.stop - first)[begin:end])
        query, key, rows = (int(x[begin]) for x in (tasks.first_row, first_row, per_token))
        bounds = query, query + int(queries[-1]) * rows, key, key + int(keys[-1]) * rows
        window_tokens = 0 if mask.chunked else mask.window_tokens or 0
        calls.append(KernelCall(CallKind.REMOTE_QUERIES, *bounds, queries, keys, (0, rows), window_tokens))
    return tuple(calls)


Span = tuple[int, int]


def adding_calls(spans: Sequence[Span]) -> frozenset[int] | None:
    """Finds calls whose keys are a subset of a larger call's keys: they add to the gradients that this one writes.

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
