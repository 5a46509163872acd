"""Routing: the index maps of one rank, derived from a plan. Integers only; `runtime` puts them on a device and uses
them.

A rank computes its tasks in canonical order: first those that begin their document (all keys are their own rows), then
those whose causal prefix starts elsewhere. For the latter, keys of the whole prefix are gathered once per document in
the store:

    canonical rows   | d4[0:9] d7[0:3] ... | d1[5:8] d2[6:9] | padding
                       keys: the same rows   keys: the store
    store rows       | d1[0:8]           | d2[0:9]          |
                       received | own      received | own      in the order of the document
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.errors import PlanError
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
class Routing:
    """What one rank sends, receives and computes, in every layer.

    Attributes:
        num_rows: rows the rank holds, padding included.
        row_order: `[num_rows]` layout row of each canonical row, or None if both orders are the same.
        send_rows: `[sent]` canonical rows to send, grouped by destination.
        send_counts, receive_counts: `[ranks]` rows sent to and received from each rank.
        received_to_store: `[received]` store row of each received row.
        own_rows, own_to_store: `[own]` canonical rows that are copied into the store, and where to.
        store_rows: rows of the store.
        calls: kernel calls; those on own rows first.
        exchanges: whether any rank sends anything; the same on all ranks, and if false none of them exchanges.
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

    @cached_property
    def shared_rows(self) -> IntArray:
        """Canonical rows whose key gradients have more than one part: those sent elsewhere or copied into the
        store."""
        return np.unique(np.concatenate([self.send_rows, self.own_rows]))


def key_transfers(plan: Plan) -> KeyTransfers:
    """Keys that every server is missing for its tasks, from the ranks that hold them; each token once per server."""
    layout, tasks = plan.layout, plan.tasks
    prefixed = np.flatnonzero(tasks.start > 0)
    server, document, prefix = tasks.server[prefixed], tasks.document[prefixed], tasks.stop[prefixed]
    order = np.lexsort((prefix, document, server))
    server, document, prefix = server[order], document[order], prefix[order]
    longest = np.ones(len(order), dtype=bool)
    longest[:-1] = (server[1:] != server[:-1]) | (document[1:] != document[:-1])
    server, document, prefix = server[longest], document[longest], prefix[longest]

    # Join each need (server, document, prefix) with all segments of the document.
    spanning = np.flatnonzero(np.isin(layout.segment_document, document))
    spanning = spanning[np.argsort(layout.segment_document[spanning], kind="stable")]
    first = np.searchsorted(layout.segment_document[spanning], document, side="left")
    last = np.searchsorted(layout.segment_document[spanning], document, side="right")
    need = np.repeat(np.arange(len(document)), last - first)
    segment = spanning[_ranges(first, last - first)]
    source, destination = layout.segment_rank[segment], server[need]
    start, stop = layout.segment_start[segment], np.minimum(layout.segment_stop[segment], prefix[need])
    travels = (source != destination) & (start < stop)
    source, destination, start, stop = source[travels], destination[travels], start[travels], stop[travels]
    document = document[need][travels]
    order = np.lexsort((start, document, destination, source))
    return KeyTransfers(source[order], destination[order], document[order], start[order], stop[order])


def route(plan: Plan, rank: int, transfers: KeyTransfers | None = None) -> Routing:
    """The routing of `rank`. `transfers` may be given if it was computed already.

    Raises:
        PlanError: the plan lets a rank compute queries it does not hold.
    """
    layout, tasks = plan.layout, plan.tasks
    transfers = key_transfers(plan) if transfers is None else transfers
    mine = np.flatnonzero(tasks.server == rank)
    document, start, stop = tasks.document[mine], tasks.start[mine], tasks.stop[mine]
    row = np.cumsum(stop - start) - (stop - start)

    row_order = _row_order(plan, rank, document, start, stop)
    sent = transfers.select(transfers.source == rank)
    received = transfers.select(transfers.destination == rank)

    held = np.lexsort((start, document))
    positions = _position_keys(document[held], start[held])

    def canonical_row(documents: IntArray, tokens: IntArray) -> IntArray:
        task = held[np.searchsorted(positions, _position_keys(documents, tokens), side="right") - 1]
        return row[task] + tokens - start[task]

    in_store = np.unique(document[start > 0])
    prefix = np.zeros(len(in_store), dtype=np.int64)
    stored = np.flatnonzero(np.isin(document, in_store))
    np.maximum.at(prefix, np.searchsorted(in_store, document[stored]), stop[stored])
    offset = np.cumsum(prefix) - prefix

    def store_row(documents: IntArray, tokens: IntArray) -> IntArray:
        return offset[np.searchsorted(in_store, documents)] + tokens

    return Routing(
        num_rows=int(layout.rank_rows[rank]),
        row_order=row_order,
        send_rows=_ranges(canonical_row(sent.document, sent.start), sent.tokens),
        send_counts=np.bincount(sent.destination, weights=sent.tokens, minlength=layout.num_ranks).astype(np.int64),
        receive_counts=np.bincount(received.source, weights=received.tokens, minlength=layout.num_ranks).astype(
            np.int64
        ),
        received_to_store=_ranges(store_row(received.document, received.start), received.tokens),
        own_rows=_ranges(row[stored], (stop - start)[stored]),
        own_to_store=_ranges(store_row(document[stored], start[stored]), (stop - start)[stored]),
        store_rows=int(prefix.sum()),
        calls=_kernel_calls(document, start, stop, row, store_row),
        exchanges=len(transfers) > 0,
    )


def _row_order(
    plan: Plan, rank: int, task_document: IntArray, task_start: IntArray, task_stop: IntArray
) -> IntArray | None:
    """Layout row of each canonical row of `rank`; None if they are the same."""
    layout = plan.layout
    held = layout.segments_of(rank)
    document, start, stop = layout.segment_document[held], layout.segment_start[held], layout.segment_stop[held]
    tokens, row = layout.segment_tokens[held], layout.segment_row[held]
    begins = np.lexsort((task_start, task_document))
    positions = _position_keys(task_document[begins], task_start[begins])
    at = np.searchsorted(positions, _position_keys(document, start), side="right") - 1
    task = begins[np.maximum(at, 0)] if len(begins) else np.zeros(0, dtype=np.int64)
    computed_here = len(task) == len(document) and bool(
        np.all((task_document[task] == document) & (task_start[task] <= start) & (stop <= task_stop[task]))
    )
    if not computed_here or tokens.sum() != (task_stop - task_start).sum():
        raise PlanError(
            f"rank {rank} holds {tokens.sum()} tokens in {len(document)} segments, but its {len(task_document)} tasks "
            "are not exactly their queries; this routing is for plans that compute every query where it is held"
        )
    order = np.lexsort((start, task))
    rows = np.concatenate([_ranges(row[order], tokens[order]), np.arange(tokens.sum(), layout.rank_rows[rank])])
    return None if np.array_equal(rows, np.arange(len(rows))) else rows


def _kernel_calls(
    document: IntArray, start: IntArray, stop: IntArray, row: IntArray, store_row: StoreRow
) -> tuple[KernelCall, ...]:
    """Kernel calls of tasks in canonical order.

    A task against the whole stored prefix of its document shares a call with its neighbours; an earlier task of a
    document that has several gets a call of its own, on the beginning of the same stored prefix.
    """
    calls = []
    num_own = int(np.count_nonzero(start == 0))
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


def _position_keys(documents: IntArray, tokens: IntArray) -> IntArray:
    """One sortable integer for each (document, position); documents are shorter than 2 ** 31 tokens."""
    return (documents << 31) + tokens


def _ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """`[start, ..., start + length)` of every pair, concatenated."""
    total = int(lengths.sum())
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(total)
