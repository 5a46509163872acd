"""Routing: the index maps of one rank, derived from a plan. Runs of integers only; `runtime` writes them out on a
device and uses them.

A rank computes three kinds of attention:

    own      queries that stay, against keys that lie beside them: whole documents, and the square at the end of a
             document that began elsewhere. Needs nothing from anybody.
    far      the queries of such a square, once more, against what comes before it: the prefix, without a mask. Both
             parts are merged by their log-sum-exps.
    guests   tasks with queries of other ranks, against their whole causal prefix

    own rows    | d4[0:9] d7[0:3] | d1[5:8] d2[6:9] | padding         in the order of the layout
    store rows  | d1[0:5] d2[0:6] | d9[0:7] |                         keys of far and guests, received or copied
    guest rows  | d9[2:7] |                                           queries of guests

Own queries, keys and values are read where they lie; only what is sent is copied. If the plan divides heads, a row is
one token of one group of heads (see `ranges`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.layout import Layout
from distca_hf.planning.calls import KernelCall, far_calls, guest_calls, halves, own_calls
from distca_hf.planning.own import OwnParts
from distca_hf.planning.pieces import Pieces
from distca_hf.planning.plan import Plan
from distca_hf.planning.ranges import line_keys, position_keys, rows_per_token
from distca_hf.planning.runs import Runs
from distca_hf.planning.store import Store
from distca_hf.planning.task import ALL_HEADS
from distca_hf.planning.transfers import KeyTransfers, key_transfers


@dataclass(frozen=True, eq=False)
class QueryMoves:
    """Queries that one rank sends, and the guest rows that it computes.

    Attributes:
        num_rows: guest rows.
        send_rows: `[sent]` layout rows computed elsewhere, grouped by server.
        send_counts, receive_counts: `[ranks]` rows sent to and received from each rank.
        received_to_guest: `[received]` guest row of each received row.
        own_rows, own_to_guest: `[own]` layout rows of this rank in tasks whose other queries are guests, and the guest
            rows they become.
    """

    num_rows: int
    send_rows: Runs
    send_counts: IntArray
    receive_counts: IntArray
    received_to_guest: Runs
    own_rows: Runs
    own_to_guest: Runs

    @property
    def come_in_order(self) -> bool:
        """Whether received rows, as they are, are the guest rows."""
        return self.own_rows.total == 0 and self.received_to_guest.counts_up


@dataclass(frozen=True, eq=False)
class Routing:
    """What one rank sends, receives and computes, in every layer.

    Attributes:
        num_rows: rows the rank holds, padding included.
        held: `[segments, 3]` document, first token and first row of each segment, by row; rows here are tokens.
        num_tokens: tokens the rank holds; rows behind theirs are padding.
        rows_per_token: groups that the plan divides heads in.
        send_rows: `[sent]` layout rows of keys to send, grouped by destination.
        send_counts, receive_counts: `[ranks]` rows sent to and received from each rank.
        received_to_store: `[received]` store row of each received row.
        own_rows, own_to_store: `[own]` layout rows that are copied into the store, and where to.
        shared_rows: layout rows whose key gradients have parts from elsewhere or from the store.
        send_in_shared, own_in_shared: where `send_rows` and `own_rows` are in `shared_rows`.
        store_rows: rows of the store.
        own, far, guests: kernel calls (see above).
        exchanges: whether any rank sends keys; the same on all ranks, and if false none of them exchanges.
        queries: queries that move; None if no rank moves any, the same on all ranks.
    """

    num_rows: int
    held: IntArray
    num_tokens: int
    rows_per_token: int
    send_rows: Runs
    send_counts: IntArray
    receive_counts: IntArray
    received_to_store: Runs
    own_rows: Runs
    own_to_store: Runs
    shared_rows: Runs
    send_in_shared: Runs
    own_in_shared: Runs
    store_rows: int
    own: tuple[KernelCall, ...]
    far: tuple[KernelCall, ...]
    guests: tuple[KernelCall, ...]
    exchanges: bool
    queries: QueryMoves | None = None

    @property
    def come_in_order(self) -> bool:
        """Whether received keys, as they are, are the store."""
        return self.own_rows.total == 0 and self.received_to_store.counts_up

    @cached_property
    def own_halves(self) -> tuple[tuple[KernelCall, ...], tuple[KernelCall, ...]]:
        """Own calls in two parts of about equal work: one to compute while rows come, one while results leave."""
        return halves(self.own)

    @property
    def pairs(self) -> int:
        """Attended pairs x groups of heads that the rank computes."""
        return sum(call.pairs for call in (*self.own, *self.far, *self.guests))


def route(plan: Plan, rank: int, transfers: KeyTransfers | None = None) -> Routing:
    """The routing of `rank`. `transfers` may be given if it was computed already."""
    layout, tasks, groups = plan.layout, plan.tasks, plan.tasks.head_groups
    transfers = key_transfers(plan) if transfers is None else transfers
    held = plan.pieces.select(np.flatnonzero(plan.pieces.home == rank))
    own = OwnParts.of(held.select((held.server == rank) & ~plan.is_guest[held.task]))
    guests = np.flatnonzero((tasks.server == rank) & plan.is_guest)
    of_group = tasks.head[guests] != ALL_HEADS
    guests = guests[np.lexsort((tasks.start[guests], tasks.head[guests], tasks.document[guests], of_group))]
    guest_rows = (tasks.stop - tasks.start)[guests] * rows_per_token(tasks.head[guests], groups)
    guest_row = np.zeros(len(tasks), dtype=np.int64)
    guest_row[guests] = np.cumsum(guest_rows) - guest_rows
    store = Store.of(
        np.concatenate([own.prefix_lines, line_keys(tasks.document[guests], tasks.head[guests], groups)]),
        np.concatenate([own.prefixes, tasks.stop[guests]]),
        groups,
    )

    numbered = _Numbered(held)
    sent = transfers.select(transfers.source == rank)
    received = transfers.select(transfers.destination == rank)
    send = Runs.of(numbered.of(sent.document, sent.head, sent.start), sent.rows)
    kept, kept_stop = store.kept(held)
    copied = Runs.of(numbered.first[kept], (kept_stop - held.start[kept]) * rows_per_token(held.head[kept], groups))
    shared = send.union(copied)
    return Routing(
        num_rows=int(layout.rank_rows[rank]) * groups,
        held=_held(layout, rank),
        num_tokens=int(layout.rank_tokens[rank]),
        rows_per_token=groups,
        send_rows=numbered.layout_rows(send),
        send_counts=_counts(sent.destination, sent.rows, layout.num_ranks),
        receive_counts=_counts(received.source, received.rows, layout.num_ranks),
        received_to_store=Runs.of(store.row(received.document, received.head, received.start), received.rows),
        own_rows=numbered.layout_rows(copied),
        own_to_store=Runs.of(store.row(held.document[kept], held.head[kept], held.start[kept]), copied.lengths),
        shared_rows=numbered.layout_rows(shared),
        send_in_shared=send.places_in(shared),
        own_in_shared=copied.places_in(shared),
        store_rows=store.num_rows,
        own=own_calls(own),
        far=far_calls(own, store),
        guests=guest_calls(tasks, guests, guest_row[guests], store),
        exchanges=len(transfers) > 0,
        queries=_query_moves(plan, rank, guest_row) if plan.moves_queries else None,
    )


class _Numbered:
    """Rows of held pieces numbered one piece after the other, so that rows of every piece follow each other. In the
    layout those of a single group of heads do not."""

    def __init__(self, held: Pieces) -> None:
        self._held = held
        self._by_row = np.argsort(held.row, kind="stable")
        rows = held.rows[self._by_row]
        self._firsts: IntArray = np.cumsum(rows) - rows
        self.first = np.empty_like(self._firsts)
        self.first[self._by_row] = self._firsts
        self._keys = position_keys(held.document, held.head, held.start, held.head_groups)
        self._by_key = np.argsort(self._keys)

    def of(self, documents: IntArray, heads: IntArray, tokens: IntArray) -> IntArray:
        """Number of the first row of some tokens."""
        held = self._held
        wanted = position_keys(documents, heads, tokens, held.head_groups)
        piece = self._by_key[np.searchsorted(self._keys[self._by_key], wanted, side="right") - 1]
        return self.first[piece] + (tokens - held.start[piece]) * rows_per_token(heads, held.head_groups)

    def layout_rows(self, numbers: Runs) -> Runs:
        """Where numbered rows are in the layout."""
        if self._held.head_groups == 1:  # the order of the pieces is that of the rows
            return numbers
        parts = numbers.cut_at(self._firsts)
        at = np.searchsorted(self._firsts, parts.starts, side="right") - 1
        piece = self._by_row[at]
        stride = self._held.stride[piece]
        starts: IntArray = self._held.row[piece] + (parts.starts - self._firsts[at]) * stride
        return Runs.of(starts, parts.lengths, stride)


def _held(layout: Layout, rank: int) -> IntArray:
    """Document, first token and first row of each segment of a rank."""
    mine = layout.segments_of(rank)
    return np.stack((layout.segment_document[mine], layout.segment_start[mine], layout.segment_row[mine]), axis=1)


def _query_moves(plan: Plan, rank: int, guest_row: IntArray) -> QueryMoves:
    """Queries that one rank sends and computes for others; `guest_row` is the first guest row of each task it
    computes."""
    tasks, pieces, num_ranks = plan.tasks, plan.pieces, plan.layout.num_ranks

    def guest_rows(chosen: Pieces) -> Runs:
        into_task = (chosen.start - tasks.start[chosen.task]) * rows_per_token(chosen.head, chosen.head_groups)
        return Runs.of(guest_row[chosen.task] + into_task, chosen.rows)

    def by(chosen: Pieces, ranks: Callable[[Pieces], IntArray]) -> Pieces:
        """Grouped by rank, and within a group in the order of guest rows."""
        return chosen.select(np.lexsort((chosen.head != ALL_HEADS, ranks(chosen))))

    sent = by(pieces.select((pieces.home == rank) & (pieces.server != rank)), lambda chosen: chosen.server)
    received = by(pieces.select((pieces.home != rank) & (pieces.server == rank)), lambda chosen: chosen.home)
    own = pieces.select((pieces.home == rank) & (pieces.server == rank) & plan.is_guest[pieces.task])
    return QueryMoves(
        num_rows=int(own.rows.sum() + received.rows.sum()),
        send_rows=Runs.of(sent.row, sent.rows, sent.stride),
        send_counts=_counts(sent.server, sent.rows, num_ranks),
        receive_counts=_counts(received.home, received.rows, num_ranks),
        received_to_guest=guest_rows(received),
        own_rows=Runs.of(own.row, own.rows, own.stride),
        own_to_guest=guest_rows(own),
    )


def _counts(ranks: IntArray, rows: IntArray, num_ranks: int) -> IntArray:
    """`[ranks]` rows of each rank."""
    return np.bincount(ranks, weights=rows, minlength=num_ranks).astype(np.int64)
