"""Routing: the index maps of one rank, derived from a plan. Integers only; `runtime` puts them on a device and uses
them.

A rank computes its tasks in canonical order: first those that begin their document and are held here (all keys are
their own rows), then those whose keys are, in part, elsewhere. For the latter, keys of the whole prefix are gathered
once per document in the store:

    canonical rows   | d4[0:9] d7[0:3] ... | d1[5:8] d2[6:9] | padding
                       keys: the same rows   keys: the store
    store rows       | d1[0:8]           | d2[0:9]          |
                       received | own      received | own      in the order of the document

Keys and values of a rank are in canonical order, too: those of the first kind of tasks, then all others. If no query
moves, both orders are the same. Otherwise queries that are computed elsewhere travel there, and their outputs back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.planning.pieces import Pieces, position_keys
from distca_hf.planning.plan import Plan


StoreRow = Callable[[IntArray, IntArray], IntArray]  # (documents, positions) -> rows of the store


@dataclass(frozen=True, eq=False)
class KeyTransfers:
    """Keys and values that travel: five int64 arrays, sorted by (source, destination, document, start)."""

    source: IntArray
    destination: IntArray
    document: IntArray
    start: IntArray
    stop: IntArray

    def __len__(self) -> int:
        return len(self.source)

    @property
    def tokens(self) -> IntArray:
        return self.stop - self.start

    def select(self, chosen: np.ndarray) -> "KeyTransfers":
        """The transfers where `chosen` is true, in the same order."""
        return KeyTransfers(
            self.source[chosen], self.destination[chosen], self.document[chosen], self.start[chosen], self.stop[chosen]
        )

    def tokens_between(self, num_ranks: int) -> IntArray:
        """`[source, destination]` tokens whose keys and values travel."""
        tokens = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        np.add.at(tokens, (self.source, self.destination), self.tokens)
        return tokens


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One varlen attention call: consecutive query rows against consecutive key rows, causal, aligned bottom-right.

    Attributes:
        query_start, query_stop: canonical rows of the queries.
        key_start, key_stop: rows of the keys, canonical or of the store.
        from_store: keys are rows of the store.
        cu_seqlens_q, cu_seqlens_k: `[tasks + 1]` offsets of each task, relative to the starts above.
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    from_store: bool
    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray

    @property
    def pairs(self) -> int:
        """Attended pairs of the call."""
        queries, keys = np.diff(self.cu_seqlens_q), np.diff(self.cu_seqlens_k)
        return int((queries * (2 * keys - queries + 1) // 2).sum())


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
    local_rows: IntArray
    local_to_query: IntArray
    send_rows: IntArray
    send_counts: IntArray
    receive_counts: IntArray
    received_to_query: IntArray


@dataclass(frozen=True, eq=False)
class Routing:
    """What one rank sends, receives and computes, in every layer.

    Attributes:
        num_rows: rows the rank holds, padding included.
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
    row_order: IntArray | None
    send_rows: IntArray
    send_counts: IntArray
    receive_counts: IntArray
    received_to_store: IntArray
    own_rows: IntArray
    own_to_store: IntArray
    store_rows: int
    calls: tuple[KernelCall, ...]
    exchanges: bool
    queries: QueryMoves | None = None

    @cached_property
    def shared_rows(self) -> IntArray:
        """Canonical rows whose key gradients have more than one part: those sent elsewhere or copied into the
        store."""
        return np.unique(np.concatenate([self.send_rows, self.own_rows]))


def key_transfers(plan: Plan) -> KeyTransfers:
    """Keys that every server is missing for its tasks, from the ranks that hold them; each token once per server."""
    tasks = plan.tasks
    reads = plan.reads_store
    server, document, prefix = tasks.server[reads], tasks.document[reads], tasks.stop[reads]
    order = np.lexsort((prefix, document, server))
    server, document, prefix = server[order], document[order], prefix[order]
    longest = np.ones(len(order), dtype=bool)
    longest[:-1] = (server[1:] != server[:-1]) | (document[1:] != document[:-1])
    server, document, prefix = server[longest], document[longest], prefix[longest]

    # Join each need (server, document, prefix) with all pieces of the document.
    pieces = plan.pieces
    first = np.searchsorted(pieces.document, document, side="left")
    last = np.searchsorted(pieces.document, document, side="right")
    need = np.repeat(np.arange(len(document)), last - first)
    piece = _ranges(first, last - first)
    source, destination = pieces.home[piece], server[need]
    start, stop = pieces.start[piece], np.minimum(pieces.stop[piece], prefix[need])
    travels = (source != destination) & (start < stop)
    source, destination, start, stop = source[travels], destination[travels], start[travels], stop[travels]
    document = document[need][travels]
    order = np.lexsort((start, document, destination, source))
    return KeyTransfers(source[order], destination[order], document[order], start[order], stop[order])


def route(plan: Plan, rank: int, transfers: KeyTransfers | None = None) -> Routing:
    """The routing of `rank`. `transfers` may be given if it was computed already."""
    layout, tasks = plan.layout, plan.tasks
    transfers = key_transfers(plan) if transfers is None else transfers
    mine = np.flatnonzero(tasks.server == rank)
    mine = mine[np.lexsort((tasks.start[mine], tasks.document[mine], plan.reads_store[mine]))]
    document, start, stop = tasks.document[mine], tasks.start[mine], tasks.stop[mine]
    reads_store = plan.reads_store[mine]
    query_row = np.zeros(len(tasks), dtype=np.int64)
    query_row[mine] = np.cumsum(stop - start) - (stop - start)

    held = plan.pieces.select(np.flatnonzero(plan.pieces.home == rank))
    own_keys = ~plan.reads_store[held.task]
    held = held.select(np.argsort(~own_keys, kind="stable"))
    key_row = np.cumsum(held.tokens) - held.tokens
    sent = transfers.select(transfers.source == rank)
    received = transfers.select(transfers.destination == rank)

    found = np.lexsort((held.start, held.document))
    positions = position_keys(held.document[found], held.start[found])

    def canonical_row(documents: IntArray, tokens: IntArray) -> IntArray:
        piece = found[np.searchsorted(positions, position_keys(documents, tokens), side="right") - 1]
        return key_row[piece] + tokens - held.start[piece]

    in_store, of_task = np.unique(document[reads_store], return_inverse=True)
    prefix = np.zeros(len(in_store), dtype=np.int64)
    np.maximum.at(prefix, of_task, stop[reads_store])
    offset = np.cumsum(prefix) - prefix

    def store_row(documents: IntArray, tokens: IntArray) -> IntArray:
        return offset[np.searchsorted(in_store, documents)] + tokens

    kept = np.flatnonzero(np.isin(held.document, in_store))
    kept = kept[held.start[kept] < prefix[np.searchsorted(in_store, held.document[kept])]]
    kept_tokens = (
        np.minimum(held.stop[kept], prefix[np.searchsorted(in_store, held.document[kept])]) - held.start[kept]
    )

    return Routing(
        num_rows=int(layout.rank_rows[rank]),
        row_order=_row_order(plan, rank, held),
        send_rows=_ranges(canonical_row(sent.document, sent.start), sent.tokens),
        send_counts=_counts(sent.destination, sent.tokens, layout.num_ranks),
        receive_counts=_counts(received.source, received.tokens, layout.num_ranks),
        received_to_store=_ranges(store_row(received.document, received.start), received.tokens),
        own_rows=_ranges(key_row[kept], kept_tokens),
        own_to_store=_ranges(store_row(held.document[kept], held.start[kept]), kept_tokens),
        store_rows=int(prefix.sum()),
        calls=_kernel_calls(document, start, stop, query_row[mine], int(np.count_nonzero(~reads_store)), store_row),
        exchanges=len(transfers) > 0,
        queries=_query_moves(plan, rank, query_row) if plan.moves_queries else None,
    )


def _row_order(plan: Plan, rank: int, held: Pieces) -> IntArray | None:
    """Layout row of each canonical row of `rank`, whose pieces are given in canonical order; None if they are the
    same."""
    padding = np.arange(plan.layout.rank_tokens[rank], plan.layout.rank_rows[rank])
    rows = np.concatenate([_ranges(held.row, held.tokens), padding])
    return None if np.array_equal(rows, np.arange(len(rows))) else rows


def _query_moves(plan: Plan, rank: int, query_row: IntArray) -> QueryMoves:
    """Queries of one rank; `query_row` is the first canonical query row of each task it computes."""
    layout, tasks, pieces = plan.layout, plan.tasks, plan.pieces

    def query_rows(chosen: Pieces) -> IntArray:
        return _ranges(query_row[chosen.task] + chosen.start - tasks.start[chosen.task], chosen.tokens)

    local = pieces.select((pieces.home == rank) & (pieces.server == rank))
    sent = pieces.select((pieces.home == rank) & (pieces.server != rank))
    sent = sent.select(np.argsort(sent.server, kind="stable"))
    received = pieces.select((pieces.home != rank) & (pieces.server == rank))
    received = received.select(np.argsort(received.home, kind="stable"))
    num_queries = int(local.tokens.sum() + received.tokens.sum())
    padding = np.arange(layout.rank_rows[rank] - layout.rank_tokens[rank])
    return QueryMoves(
        num_rows=num_queries + len(padding),
        local_rows=np.concatenate([_ranges(local.row, local.tokens), layout.rank_tokens[rank] + padding]),
        local_to_query=np.concatenate([query_rows(local), num_queries + padding]),
        send_rows=_ranges(sent.row, sent.tokens),
        send_counts=_counts(sent.server, sent.tokens, layout.num_ranks),
        receive_counts=_counts(received.home, received.tokens, layout.num_ranks),
        received_to_query=query_rows(received),
    )


def _kernel_calls(
    document: IntArray, start: IntArray, stop: IntArray, row: IntArray, num_own: int, store_row: StoreRow
) -> tuple[KernelCall, ...]:
    """Kernel calls of tasks in canonical order, of which the first `num_own` read their own rows.

    A task against the whole stored prefix of its document shares a call with its neighbours; an earlier task of a
    document that has several gets a call of its own, on the beginning of the same stored prefix.
    """
    calls = []
    if num_own:
        offsets = np.concatenate([row[:num_own], [row[num_own - 1] + stop[num_own - 1]]])
        calls.append(KernelCall(0, int(offsets[-1]), 0, int(offsets[-1]), False, offsets, offsets))
    if num_own == len(document):
        return tuple(calls)
    document, start, stop, row = document[num_own:], start[num_own:], stop[num_own:], row[num_own:]
    whole_prefix = np.append(document[1:] != document[:-1], True)
    first_of_call = np.flatnonzero(~whole_prefix | ~np.append(False, whole_prefix[:-1]))
    for first, last in zip(first_of_call, np.append(first_of_call[1:], len(document)), strict=True):
        queries = _offsets((stop - start)[first:last])
        keys = _offsets(stop[first:last])
        query, key = int(row[first]), int(store_row(document[first:last], np.zeros(1, dtype=np.int64))[0])
        calls.append(KernelCall(query, query + int(queries[-1]), key, key + int(keys[-1]), True, queries, keys))
    return tuple(calls)


def _offsets(lengths: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _counts(ranks: IntArray, tokens: IntArray, num_ranks: int) -> IntArray:
    """`[ranks]` tokens of each rank."""
    return np.bincount(ranks, weights=tokens, minlength=num_ranks).astype(np.int64)


def _ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """`[start, ..., start + length)` of every pair, concatenated."""
    total = int(lengths.sum())
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(total)
