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

Store and guest rows come in legs (see `legs`) and lie in their order. Own queries, keys and values are read where they
lie; only what is sent is copied. If the plan divides heads, a row is one token of one group of heads (see `ranges`).
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.layout import Layout
from distca_hf.planning.calls import KernelCall, far_calls, guest_calls, own_calls
from distca_hf.planning.legs import Legs
from distca_hf.planning.overlaps import adding_calls
from distca_hf.planning.own import OwnParts
from distca_hf.planning.pieces import Pieces
from distca_hf.planning.plan import Plan
from distca_hf.planning.ranges import line_keys, position_keys, rows_per_token
from distca_hf.planning.runs import Runs
from distca_hf.planning.store import Store
from distca_hf.planning.task import ALL_HEADS
from distca_hf.planning.transfers import KeyTransfers, key_transfers


# What of its work a rank computes beside results that return, if its own calls are as much.
LATE_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class RowsInLegs:
    """How many rows one rank sends and receives.

    Attributes:
        leg_send_counts, leg_receive_counts: `[legs, ranks]` rows sent to and received from each rank.
    """

    leg_send_counts: IntArray
    leg_receive_counts: IntArray

    @property
    def send_counts(self) -> IntArray:
        """`[ranks]` of all legs."""
        return self.leg_send_counts.sum(axis=0)

    @property
    def receive_counts(self) -> IntArray:
        """`[ranks]` of all legs."""
        return self.leg_receive_counts.sum(axis=0)


@dataclass(frozen=True, eq=False)
class QueryMoves(RowsInLegs):
    """Queries that one rank sends, and the guest rows that it computes.

    Attributes:
        num_rows: guest rows.
        send_rows: `[sent]` layout rows computed elsewhere, grouped by leg and server.
        received_to_guest: `[received]` guest row of each received row.
        own_rows, own_to_guest: `[own]` layout rows of this rank in tasks whose other queries are guests, and the guest
            rows they become.
    """

    num_rows: int
    send_rows: Runs
    received_to_guest: Runs
    own_rows: Runs
    own_to_guest: Runs

    @property
    def come_in_order(self) -> bool:
        """Whether received rows, as they are, are the guest rows."""
        return self.own_rows.total == 0 and self.received_to_guest.counts_up


@dataclass(frozen=True, eq=False)
class Routing(RowsInLegs):
    """What one rank sends, receives and computes, in every layer.

    Attributes:
        num_rows: rows the rank holds, padding included.
        held: `[segments, 3]` document, first token and first row of each segment, by row; rows here are tokens.
        num_tokens: tokens the rank holds; rows behind theirs are padding.
        rows_per_token: groups that the plan divides heads in.
        send_rows: `[sent]` layout rows of keys to send, grouped by leg and destination.
        received_to_store: `[received]` store row of each received row.
        kept_to_store: the same of rows that were received before, perhaps in other legs, and kept.
        own_rows, own_to_store: `[own]` layout rows that are copied into the store, and where to.
        shared_rows: layout rows whose key gradients have parts from elsewhere or from the store.
        send_in_shared, own_in_shared: where `send_rows` and `own_rows` are in `shared_rows`.
        store_rows: rows of the store.
        own: kernel calls (see above).
        far_of_leg, guests_of_leg: kernel calls that need what a leg brings.
        late_share: what part of the own calls to compute beside results that return: then ranks start these at about
            the same time.
        exchanges: whether any rank sends keys; the same on all ranks, and if false none of them exchanges.
        queries: queries that move; None if no rank moves any, the same on all ranks.
    """

    num_rows: int
    held: IntArray
    num_tokens: int
    rows_per_token: int
    send_rows: Runs
    received_to_store: Runs
    kept_to_store: Runs
    own_rows: Runs
    own_to_store: Runs
    shared_rows: Runs
    send_in_shared: Runs
    own_in_shared: Runs
    store_rows: int
    own: tuple[KernelCall, ...]
    far_of_leg: tuple[tuple[KernelCall, ...], ...]
    guests_of_leg: tuple[tuple[KernelCall, ...], ...]
    late_share: float
    exchanges: bool
    queries: QueryMoves | None = None

    @property
    def far(self) -> tuple[KernelCall, ...]:
        """Of all legs."""
        return tuple(chain.from_iterable(self.far_of_leg))

    @property
    def guests(self) -> tuple[KernelCall, ...]:
        """Of all legs."""
        return tuple(chain.from_iterable(self.guests_of_leg))

    @cached_property
    def adding(self) -> frozenset[KernelCall] | None:
        """Calls on stored keys that add to gradients which larger ones write; None if all do."""
        calls = (*self.far, *self.guests)
        indices = adding_calls([(call.key_start, call.key_stop) for call in calls])
        return None if indices is None else frozenset(calls[index] for index in indices)

    @property
    def come_in_order(self) -> bool:
        """Whether received keys, as they are, are the store."""
        return self.own_rows.total == 0 and self.received_to_store.counts_up

    @property
    def kept_in_order(self) -> bool:
        """Whether kept keys, as they are, are the store."""
        return self.own_rows.total == 0 and self.kept_to_store.counts_up

    @property
    def pairs(self) -> int:
        """Attended pairs x groups of heads that the rank computes."""
        return sum(call.pairs for call in (*self.own, *self.far, *self.guests))


def route(
    plan: Plan,
    rank: int,
    transfers: KeyTransfers | None = None,
    legs: Legs | None = None,
    kept: KeyTransfers | None = None,
) -> Routing:
    """The routing of `rank`.

    Args:
        transfers: if they were computed already, with the same legs.
        legs: by default one.
        kept: transfers by which kept keys came, if these were others.
    """
    layout, tasks, groups = plan.layout, plan.tasks, plan.tasks.head_groups
    legs = Legs.cut(plan, 1) if legs is None else legs
    transfers = key_transfers(plan, legs) if transfers is None else transfers
    held = plan.pieces.select(np.flatnonzero(plan.pieces.home == rank))
    own = OwnParts.of(held.select((held.server == rank) & ~plan.is_guest[held.task]))

    guests = np.flatnonzero((tasks.server == rank) & plan.is_guest)
    guest_lines = line_keys(tasks.document[guests], tasks.head[guests], groups)
    guest_leg = legs.of_guests(tasks.server[guests], guest_lines)
    of_group = tasks.head[guests] != ALL_HEADS
    order = np.lexsort((tasks.start[guests], tasks.head[guests], tasks.document[guests], of_group, guest_leg))
    guests, guest_leg, guest_lines = guests[order], guest_leg[order], guest_lines[order]
    guest_rows = (tasks.stop - tasks.start)[guests] * rows_per_token(tasks.head[guests], groups)
    guest_row = np.zeros(len(tasks), dtype=np.int64)
    guest_row[guests] = np.cumsum(guest_rows) - guest_rows
    lines = np.concatenate([own.prefix_lines, guest_lines])
    prefixes = np.concatenate([own.prefixes, tasks.stop[guests]])
    store = Store.of(lines, prefixes, legs.borders_of(rank, lines), groups)

    numbered = _Numbered(held)
    sent = transfers.select(transfers.source == rank)
    received = _received(transfers, rank)
    kept_before = received if kept is None else _received(kept, rank)
    send = Runs.of(numbered.of(sent.document, sent.head, sent.start), sent.rows)
    part, start, stop = store.parts_of(held)
    document, head = held.document[part], held.head[part]
    copied = Runs.of(numbered.of(document, head, start), (stop - start) * rows_per_token(head, groups))
    shared = send.union(copied)
    return Routing(
        num_rows=int(layout.rank_rows[rank]) * groups,
        held=_held(layout, rank),
        num_tokens=int(layout.rank_tokens[rank]),
        rows_per_token=groups,
        send_rows=numbered.layout_rows(send),
        leg_send_counts=_counts(sent.leg, sent.destination, sent.rows, legs.count, layout.num_ranks),
        leg_receive_counts=_counts(received.leg, received.source, received.rows, legs.count, layout.num_ranks),
        received_to_store=Runs.of(store.row(received.document, received.head, received.start), received.rows),
        kept_to_store=Runs.of(store.row(kept_before.document, kept_before.head, kept_before.start), kept_before.rows),
        own_rows=numbered.layout_rows(copied),
        own_to_store=Runs.of(store.row(document, head, start), copied.lengths),
        shared_rows=numbered.layout_rows(shared),
        send_in_shared=send.places_in(shared),
        own_in_shared=copied.places_in(shared),
        store_rows=store.num_rows,
        own=own_calls(own),
        far_of_leg=tuple(far_calls(own, store, leg) for leg in range(legs.count)),
        guests_of_leg=tuple(
            guest_calls(tasks, guests[guest_leg == leg], guest_row[guests[guest_leg == leg]], store, leg)
            for leg in range(legs.count)
        ),
        late_share=_late_share(plan, rank),
        exchanges=len(transfers) > 0,
        queries=_query_moves(plan, rank, guest_row, legs) if plan.moves_queries else None,
    )


def _received(transfers: KeyTransfers, rank: int) -> KeyTransfers:
    """What comes to a rank, in the order in which it comes."""
    received = transfers.select(transfers.destination == rank)
    return received.select(np.argsort(received.leg, kind="stable"))  # by source in each leg


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


def _late_share(plan: Plan, rank: int) -> float:
    """As much work on all ranks, at most a share of it, and no more than any of them has own calls for."""
    tasks = plan.tasks
    squares = (tasks.stop - tasks.start) * (tasks.stop - tasks.start + 1) / 2
    squares = squares * np.where(tasks.head == ALL_HEADS, tasks.head_groups, 1) * ~plan.is_guest
    own = np.bincount(tasks.server, weights=squares, minlength=plan.layout.num_ranks)
    working = plan.work > 0
    if not own[rank] or not working.any():
        return 0.0
    return float(min(LATE_SHARE * plan.work[working].mean(), own[working].min()) / own[rank])


def _query_moves(plan: Plan, rank: int, guest_row: IntArray, legs: Legs) -> QueryMoves:
    """Queries that one rank sends and computes for others; `guest_row` is the first guest row of each task it
    computes."""
    tasks, pieces, num_ranks = plan.tasks, plan.pieces, plan.layout.num_ranks

    def guest_rows(chosen: Pieces) -> Runs:
        into_task = (chosen.start - tasks.start[chosen.task]) * rows_per_token(chosen.head, chosen.head_groups)
        return Runs.of(guest_row[chosen.task] + into_task, chosen.rows)

    def by_leg(chosen: Pieces, ranks: IntArray) -> tuple[Pieces, IntArray]:
        """Grouped by leg and rank, in a group in the order of guest rows; and rows of each leg and rank."""
        leg = legs.of_guests(chosen.server, line_keys(chosen.document, chosen.head, chosen.head_groups))
        counts = _counts(leg, ranks, chosen.rows, legs.count, num_ranks)
        return chosen.select(np.lexsort((chosen.head != ALL_HEADS, ranks, leg))), counts

    sent = pieces.select((pieces.home == rank) & (pieces.server != rank))
    received = pieces.select((pieces.home != rank) & (pieces.server == rank))
    own = pieces.select((pieces.home == rank) & (pieces.server == rank) & plan.is_guest[pieces.task])
    sent, send_counts = by_leg(sent, sent.server)
    received, receive_counts = by_leg(received, received.home)
    return QueryMoves(
        num_rows=int(own.rows.sum() + received.rows.sum()),
        send_rows=Runs.of(sent.row, sent.rows, sent.stride),
        leg_send_counts=send_counts,
        leg_receive_counts=receive_counts,
        received_to_guest=guest_rows(received),
        own_rows=Runs.of(own.row, own.rows, own.stride),
        own_to_guest=guest_rows(own),
    )


def _counts(leg: IntArray, ranks: IntArray, rows: IntArray, num_legs: int, num_ranks: int) -> IntArray:
    """`[legs, ranks]` rows of each leg and rank."""
    counts = np.zeros((num_legs, num_ranks), dtype=np.int64)
    np.add.at(counts, (leg, ranks), rows)
    return counts
