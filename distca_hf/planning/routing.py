"""Routing: the index maps of one rank, derived from a plan. Runs of integers only; `runtime` writes them out on a
device and uses them.

A rank computes its tasks in canonical order: first those that begin their document and are held here (all keys are
their own rows), then those whose keys are, in part, elsewhere. For the latter, keys of the whole prefix are gathered
once per document in the store:

    canonical rows   | d4[0:9] d7[0:3] ... | d1[5:8] d2[6:9] | padding
                       keys: the same rows   keys: the store
    store rows       | d1[0:8]           | d2[0:9]          |
                       received | own      received | own      in the order of the document

Keys and values of a rank are in canonical order, too: those of the first kind of tasks, then all others. If no query
moves, both orders are the same. Otherwise queries that are computed elsewhere travel there, and their outputs back.

If the plan divides heads, a row is one token of one group of heads (see `ranges`). Tasks of all heads then come before
tasks of one group, so that kernel calls find the groups of a token side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.layout import Layout
from distca_hf.planning.pieces import Pieces
from distca_hf.planning.plan import Plan
from distca_hf.planning.ranges import line_keys, position_keys, rows_per_token
from distca_hf.planning.runs import Runs
from distca_hf.planning.task import ALL_HEADS
from distca_hf.planning.transfers import KeyTransfers, key_transfers


StoreRow = Callable[[IntArray, IntArray, IntArray], IntArray]  # (documents, heads, positions) -> rows of the store


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One varlen attention call: consecutive query rows against consecutive key rows, causal, aligned bottom-right.

    Attributes:
        query_start, query_stop: canonical rows of the queries.
        key_start, key_stop: rows of the keys, canonical or of the store.
        from_store: keys are rows of the store.
        cu_seqlens_q, cu_seqlens_k: `[tasks + 1]` offsets of each task in tokens, relative to the starts above.
        rows_per_token: groups of heads that the call computes at once, side by side.
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    from_store: bool
    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray
    rows_per_token: int = 1

    @property
    def pairs(self) -> int:
        """Attended pairs x groups of heads of the call."""
        queries, keys = np.diff(self.cu_seqlens_q), np.diff(self.cu_seqlens_k)
        return int((queries * (2 * keys - queries + 1) // 2).sum()) * self.rows_per_token


@dataclass(frozen=True, eq=False)
class QueryMoves:
    """Queries that one rank sends, receives and keeps.

    Attributes:
        num_rows: canonical query rows, padding included.
        local_rows, local_to_query: `[local]` layout rows that are computed here (or are padding), and the canonical
            query rows they become.
        send_rows: `[sent]` layout rows computed elsewhere, grouped by server.
        send_counts, receive_counts: `[ranks]` rows sent to and received from each rank.
        received_to_query: `[received]` canonical query row of each received row.
    """

    num_rows: int
    local_rows: Runs
    local_to_query: Runs
    send_rows: Runs
    send_counts: IntArray
    receive_counts: IntArray
    received_to_query: Runs


@dataclass(frozen=True, eq=False)
class Routing:
    """What one rank sends, receives and computes, in every layer.

    Attributes:
        num_rows: rows the rank holds, padding included.
        held: `[segments, 3]` document, first token and first row of each segment, by row; rows here are tokens.
        rows_per_token: groups that the plan divides heads in.
        row_order: `[num_rows]` layout row of each canonical row of keys and values, and of queries unless these move;
            None if both orders are the same.
        send_rows: `[sent]` canonical rows to send, grouped by destination.
        send_counts, receive_counts: `[ranks]` rows sent to and received from each rank.
        received_to_store: `[received]` store row of each received row.
        own_rows, own_to_store: `[own]` canonical rows that are copied into the store, and where to.
        store_rows: rows of the store.
        calls: kernel calls; those on own rows first.
        exchanges: whether any rank sends keys; the same on all ranks, and if false none of them exchanges.
        queries: queries that move; None if no rank moves any, the same on all ranks.
    """

    num_rows: int
    held: IntArray
    rows_per_token: int
    row_order: Runs | None
    send_rows: Runs
    send_counts: IntArray
    receive_counts: IntArray
    received_to_store: Runs
    own_rows: Runs
    own_to_store: Runs
    store_rows: int
    calls: tuple[KernelCall, ...]
    exchanges: bool
    queries: QueryMoves | None = None

    @cached_property
    def shared_rows(self) -> Runs:
        """Canonical rows whose key gradients have more than one part: those sent elsewhere or copied into the
        store."""
        return self.send_rows.union(self.own_rows)


def route(plan: Plan, rank: int, transfers: KeyTransfers | None = None) -> Routing:
    """The routing of `rank`. `transfers` may be given if it was computed already."""
    layout, tasks, groups = plan.layout, plan.tasks, plan.tasks.head_groups
    transfers = key_transfers(plan) if transfers is None else transfers
    mine = np.flatnonzero(tasks.server == rank)
    of_group = tasks.head != ALL_HEADS
    mine = mine[
        np.lexsort((tasks.start[mine], tasks.head[mine], tasks.document[mine], of_group[mine], plan.reads_store[mine]))
    ]
    task_rows = (tasks.stop - tasks.start)[mine] * rows_per_token(tasks.head[mine], groups)
    query_row = np.zeros(len(tasks), dtype=np.int64)
    query_row[mine] = np.cumsum(task_rows) - task_rows

    held = plan.pieces.select(np.flatnonzero(plan.pieces.home == rank))
    held = held.select(np.lexsort((of_group[held.task], plan.reads_store[held.task])))
    key_row = np.cumsum(held.rows) - held.rows
    sent = transfers.select(transfers.source == rank)
    received = transfers.select(transfers.destination == rank)

    keys = position_keys(held.document, held.head, held.start, groups)
    found = np.argsort(keys)

    def canonical_row(documents: IntArray, heads: IntArray, tokens: IntArray) -> IntArray:
        wanted = position_keys(documents, heads, tokens, groups)
        piece = found[np.searchsorted(keys[found], wanted, side="right") - 1]
        return key_row[piece] + (tokens - held.start[piece]) * rows_per_token(heads, groups)

    stored = mine[plan.reads_store[mine]]
    stored_lines, of_task = np.unique(
        line_keys(tasks.document[stored], tasks.head[stored], groups), return_inverse=True
    )
    prefix = np.zeros(len(stored_lines), dtype=np.int64)
    np.maximum.at(prefix, of_task, tasks.stop[stored])
    stored_head = stored_lines % (groups + 1) + ALL_HEADS
    prefix_rows = prefix * rows_per_token(stored_head, groups)
    in_order = np.argsort(stored_head != ALL_HEADS, kind="stable")  # as the tasks
    offset = np.zeros(len(stored_lines), dtype=np.int64)
    offset[in_order] = np.cumsum(prefix_rows[in_order]) - prefix_rows[in_order]

    def store_row(documents: IntArray, heads: IntArray, tokens: IntArray) -> IntArray:
        line = np.searchsorted(stored_lines, line_keys(documents, heads, groups))
        return offset[line] + tokens * rows_per_token(heads, groups)

    held_lines = line_keys(held.document, held.head, groups)
    kept = np.flatnonzero(np.isin(held_lines, stored_lines))
    kept_stop = np.minimum(held.stop[kept], prefix[np.searchsorted(stored_lines, held_lines[kept])])
    kept, kept_stop = kept[held.start[kept] < kept_stop], kept_stop[held.start[kept] < kept_stop]
    kept_rows = (kept_stop - held.start[kept]) * rows_per_token(held.head[kept], groups)

    return Routing(
        num_rows=int(layout.rank_rows[rank]) * groups,
        held=_held(layout, rank),
        rows_per_token=groups,
        row_order=_row_order(plan, rank, held),
        send_rows=Runs.of(canonical_row(sent.document, sent.head, sent.start), sent.rows),
        send_counts=_counts(sent.destination, sent.rows, layout.num_ranks),
        receive_counts=_counts(received.source, received.rows, layout.num_ranks),
        received_to_store=Runs.of(store_row(received.document, received.head, received.start), received.rows),
        own_rows=Runs.of(key_row[kept], kept_rows),
        own_to_store=Runs.of(store_row(held.document[kept], held.head[kept], held.start[kept]), kept_rows),
        store_rows=int(prefix_rows.sum()),
        calls=_kernel_calls(plan, mine, query_row[mine], store_row),
        exchanges=len(transfers) > 0,
        queries=_query_moves(plan, rank, query_row) if plan.moves_queries else None,
    )


def _held(layout: Layout, rank: int) -> IntArray:
    """Document, first token and first row of each segment of a rank."""
    mine = layout.segments_of(rank)
    return np.stack((layout.segment_document[mine], layout.segment_start[mine], layout.segment_row[mine]), axis=1)


def _row_order(plan: Plan, rank: int, held: Pieces) -> Runs | None:
    """Layout row of each canonical row of `rank`, whose pieces are given in canonical order; None if they are the
    same."""
    rows = Runs.join([Runs.of(held.row, held.rows, held.stride), _padding_rows(plan, rank)])
    return None if rows.counts_up else rows


def _padding_rows(plan: Plan, rank: int) -> Runs:
    """Layout rows of `rank` that belong to no document."""
    layout, groups = plan.layout, plan.tasks.head_groups
    return Runs.range(int(layout.rank_tokens[rank]) * groups, int(layout.rank_rows[rank]) * groups)


def _query_moves(plan: Plan, rank: int, query_row: IntArray) -> QueryMoves:
    """Queries of one rank; `query_row` is the first canonical query row of each task it computes."""
    tasks, pieces = plan.tasks, plan.pieces

    def query_rows(chosen: Pieces) -> Runs:
        into_task = (chosen.start - tasks.start[chosen.task]) * rows_per_token(chosen.head, chosen.head_groups)
        return Runs.of(query_row[chosen.task] + into_task, chosen.rows)

    local = pieces.select((pieces.home == rank) & (pieces.server == rank))
    sent = pieces.select((pieces.home == rank) & (pieces.server != rank))
    sent = sent.select(np.argsort(sent.server, kind="stable"))
    received = pieces.select((pieces.home != rank) & (pieces.server == rank))
    received = received.select(np.argsort(received.home, kind="stable"))
    num_queries = int(local.rows.sum() + received.rows.sum())
    padding = _padding_rows(plan, rank)
    return QueryMoves(
        num_rows=num_queries + padding.total,
        local_rows=Runs.join([Runs.of(local.row, local.rows, local.stride), padding]),
        local_to_query=Runs.join([query_rows(local), Runs.range(num_queries, num_queries + padding.total)]),
        send_rows=Runs.of(sent.row, sent.rows, sent.stride),
        send_counts=_counts(sent.server, sent.rows, plan.layout.num_ranks),
        receive_counts=_counts(received.home, received.rows, plan.layout.num_ranks),
        received_to_query=query_rows(received),
    )


def _kernel_calls(plan: Plan, mine: IntArray, row: IntArray, store_row: StoreRow) -> tuple[KernelCall, ...]:
    """Kernel calls of the tasks `mine`, in canonical order, whose first query rows are `row`.

    Neighbours share a call if they compute the same number of heads and read whole stored prefixes, or their own rows.
    An earlier task of a document that has several gets a call of its own, on the beginning of the same stored prefix.
    """
    tasks, groups = plan.tasks, plan.tasks.head_groups
    document, head, start, stop = tasks.document[mine], tasks.head[mine], tasks.start[mine], tasks.stop[mine]
    from_store, per_token = plan.reads_store[mine], rows_per_token(head, groups)
    line = line_keys(document, head, groups)
    alone = np.append(line[1:] == line[:-1], False) & from_store
    opens = np.ones(len(mine), dtype=bool)
    opens[1:] = (from_store[1:] != from_store[:-1]) | (per_token[1:] != per_token[:-1]) | alone[1:] | alone[:-1]
    first_key = row.copy()
    first_key[from_store] = store_row(document[from_store], head[from_store], np.zeros_like(start[from_store]))
    begins = np.flatnonzero(opens)
    calls = []
    for first, last in pairwise([*begins.tolist(), len(mine)]):
        queries, keys = _offsets((stop - start)[first:last]), _offsets(stop[first:last])
        rows, query, key = int(per_token[first]), int(row[first]), int(first_key[first])
        query_stop, key_stop = query + int(queries[-1]) * rows, key + int(keys[-1]) * rows
        calls.append(KernelCall(query, query_stop, key, key_stop, bool(from_store[first]), queries, keys, rows))
    return tuple(calls)


def _offsets(lengths: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _counts(ranks: IntArray, rows: IntArray, num_ranks: int) -> IntArray:
    """`[ranks]` rows of each rank."""
    return np.bincount(ranks, weights=rows, minlength=num_ranks).astype(np.int64)
