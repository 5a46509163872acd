"""Routing: derives from a plan the rows that one rank sends, receives and computes. Index maps are index ranges, which
`runtime` expands on the device.

A rank computes three kinds of attention (`kernel_calls.CallKind`):

    local           queries that stay, against keys of the same tokens: whole documents, and the last square of a
                    document that began on another rank. Needs no rows of other ranks.
    prefix          the queries of such a square once more, against the keys before it, without a mask. The results of
                    both parts are merged by their log-sum-exps.
    remote queries  tasks with queries of other ranks, against all keys that they attend

The plan's `Mask` says to which keys before a part its queries attend, and how. Under the causal mask they are the
whole prefix. Under a window of W tokens they are the *halo*, up to W - 1 keys (docs/design.md shows an example).

    local rows         | d4[0:9] d7[0:3] | d1[5:8] d2[6:9] | padding    in the order of the layout
    remote-KV rows     | d1[0:5] d2[0:6] | d9[0:7] |                    keys of both other kinds, received or copied
    remote-query rows  | d9[2:7] |                                      queries of the last kind

Remote-KV and remote-query rows arrive in chunks (see `transfers`), and are stored in that order. Local queries, keys
and values are read in place; only rows to send are copied. If the plan divides heads, a row is one token of one head
group (see `pieces`).

    plan ── transfers ─┬─ facts                                    the same on all ranks
                       ├─ routing of forward     in several chunks   of this rank
                       └─ routing of backward    in one chunk        of this rank
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Generic, TypeVar

import numpy as np

from distca_hf.arrays import IndexRanges, IntArray
from distca_hf.cost import Mask
from distca_hf.errors import PlanError
from distca_hf.planning.kernel_calls import (
    KernelCall,
    LocalParts,
    PrefixKeys,
    RemoteTasks,
    adding_calls,
    local_calls,
    prefix_calls,
    remote_query_calls,
)
from distca_hf.planning.pieces import ALL_HEADS, Pieces, RowNumbers, rows_per_token
from distca_hf.planning.plan import Plan, PlanFacts
from distca_hf.planning.remote_kv import RemoteKV, along_paths
from distca_hf.planning.transfers import ExchangeChunks, KeyRanges, KeyTransfers, held_keys, key_transfers


# Most work that a rank defers until it sends results back, as a share of the ranks' mean work. More would delay the
# results.
LATE_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class QueryMoves:
    """Queries that one rank sends, and the remote-query rows that it computes.

    Attributes:
        send_counts, receive_counts: `[chunks, ranks]` rows sent to and received from each rank.
        num_rows: remote-query rows.
        send_rows: `[sent]` layout rows of queries that other ranks compute, grouped by chunk and computing rank.
        received_to_queries: `[received]` remote query row of each received row.
        local_rows, local_to_queries: `[local]` layout rows of this rank in tasks with remote queries, and their
            remote-query rows.
    """

    send_counts: IntArray
    receive_counts: IntArray
    num_rows: int
    send_rows: IndexRanges
    received_to_queries: IndexRanges
    local_rows: IndexRanges
    local_to_queries: IndexRanges

    @property
    def come_in_order(self) -> bool:
        """Whether received rows already are the remote-query rows, in order."""
        return self.local_rows.total == 0 and self.received_to_queries.counts_up


@dataclass(frozen=True, eq=False)
class Routing:
    """Index maps, split sizes and kernel calls of one rank, the same in every layer.

    Attributes:
        send_counts, receive_counts: `[chunks, ranks]` rows of keys sent to and received from each rank.
        num_rows: rows the rank holds, padding included.
        held: `[segments, 3]` document, first token and first row of each segment, by row; rows here are tokens.
        num_tokens: tokens the rank holds; all later rows are padding.
        rows_per_token: groups into which the plan divides heads.
        send_rows: `[sent]` layout rows of keys to send, grouped by chunk and destination.
        received_to_remote_kv: `[received]` remote-KV row of each received row.
        kept_to_remote_kv: `[kept]` the same for rows received in forward, perhaps in other chunks, and kept.
        local_rows, local_to_remote_kv: `[local]` layout rows copied into the remote KV, and their rows there.
        shared_rows: layout rows whose key gradients have parts from other ranks or from the remote KV.
        send_in_shared, local_in_shared: indices of `send_rows` and `local_rows` in `shared_rows`.
        remote_kv_rows: rows of the remote KV.
        local: kernel calls (see above).
        prefix_of_chunk, remote_queries_of_chunk: kernel calls that need the keys of a chunk.
        late_share: fraction of the local calls to compute while results are sent back. So all ranks send results at
            about the same time.
        exchanges: whether any rank sends keys; the same on all ranks. If false, none of them exchanges.
        queries: queries that move; None on all ranks if no rank moves any.
    """

    send_counts: IntArray
    receive_counts: IntArray
    num_rows: int
    held: IntArray
    num_tokens: int
    rows_per_token: int
    send_rows: IndexRanges
    received_to_remote_kv: IndexRanges
    kept_to_remote_kv: IndexRanges
    local_rows: IndexRanges
    local_to_remote_kv: IndexRanges
    shared_rows: IndexRanges
    send_in_shared: IndexRanges
    local_in_shared: IndexRanges
    remote_kv_rows: int
    local: tuple[KernelCall, ...]
    prefix_of_chunk: tuple[tuple[KernelCall, ...], ...]
    remote_queries_of_chunk: tuple[tuple[KernelCall, ...], ...]
    late_share: float
    exchanges: bool
    queries: QueryMoves | None = None

    @property
    def prefix(self) -> tuple[KernelCall, ...]:
        """Prefix calls of all chunks."""
        return tuple(chain.from_iterable(self.prefix_of_chunk))

    @property
    def remote_queries(self) -> tuple[KernelCall, ...]:
        """Remote-query calls of all chunks."""
        return tuple(chain.from_iterable(self.remote_queries_of_chunk))

    @cached_property
    def adding(self) -> frozenset[KernelCall] | None:
        """Calls on the remote KV that add their key gradients to the ones that larger calls write; None if all add."""
        calls = (*self.prefix, *self.remote_queries)
        indices = adding_calls([(call.key_start, call.key_stop) for call in calls])
        return None if indices is None else frozenset(calls[index] for index in indices)

    @property
    def come_in_order(self) -> bool:
        """Whether received keys already are the remote KV, in order."""
        return self.local_rows.total == 0 and self.received_to_remote_kv.counts_up

    @property
    def kept_in_order(self) -> bool:
        """Whether kept keys already are the remote KV, in order."""
        return self.local_rows.total == 0 and self.kept_to_remote_kv.counts_up

    @property
    def pairs(self) -> int:
        """Attended pairs x groups of heads that the rank computes."""
        return sum(call.pairs for call in (*self.local, *self.prefix, *self.remote_queries))


def route(
    plan: Plan,
    rank: int,
    transfers: KeyTransfers | None = None,
    chunks: ExchangeChunks | None = None,
    kept: KeyTransfers | None = None,
    exchanges: bool | None = None,
) -> Routing:
    """Returns the routing of `rank`.

    Args:
        plan: the same on all ranks.
        transfers: key transfers in these chunks, at least all that concern this rank; computed by default.
        chunks: chunks of the exchange; by default one.
        kept: transfers that brought kept keys; by default `transfers`.
        exchanges: whether any rank sends keys; by default whether there are `transfers`.

    Raises:
        PlanError: kernel calls cannot compute the plan's mask.
    """
    layout, groups, mask = plan.layout, plan.tasks.head_groups, plan.tasks.mask
    of_mask = type(mask)
    if of_mask is not Mask and of_mask.cuts is Mask.cuts and of_mask.before is Mask.before:
        raise PlanError(
            f"a plan for {mask} cannot be routed on rank {rank}: {of_mask.__name__} does not say how queries "
            "attend to keys before them. Override `cuts` or `before`, or plan with a mask that can be routed"
        )
    chunks = ExchangeChunks.cut(plan, 1) if chunks is None else chunks
    transfers = key_transfers(plan, chunks) if transfers is None else transfers

    # 1. Computed here: pieces that this rank holds outside tasks with remote queries, and these tasks.
    held = plan.pieces.select(np.flatnonzero(plan.pieces.owner == rank))
    local = LocalParts.of(held.select((held.computing_rank == rank) & ~plan.has_remote_queries[held.task])).cut(mask)
    remote = RemoteTasks.of(plan, rank, chunks)

    # 2. The remote KV: keys to which prefix calls and remote queries attend. It holds each key once.
    document, head = (np.concatenate([getattr(x, name) for x in (local, remote)]) for name in ("document", "head"))
    first_key = mask.first_key(np.concatenate([local.start, remote.start]))
    part, document, start, stop = held_keys(layout, document, first_key, np.concatenate([local.start, remote.stop]))
    if layout.shared is None:
        reads, in_order = KeyRanges.join(np.full(len(part), rank), document, head, start, stop, groups), None
    else:
        parts = KeyRanges(document, head[part], start, stop, groups, np.full(len(part), rank))
        tokens, row = np.append(local.tokens, remote.tokens), np.append(local.token_row, remote.first_row)
        reads, in_order = along_paths(parts, part, tokens, row)
    remote_kv = RemoteKV.lay_out(reads, chunks, in_order)
    before = PrefixKeys.of(layout, local, mask, remote_kv)

    # 3. Rows that are sent, received, and copied from this rank's own keys.
    numbered = RowNumbers(held)
    sent = transfers.select(transfers.source == rank)
    received = _received(transfers, rank)
    received_to_remote_kv = _in_remote_kv(received, remote_kv)
    send = IndexRanges.of(numbered.of(sent.document, sent.head, sent.start), sent.rows)
    part, start, stop = remote_kv.parts_of(held)
    document, head = held.document[part], held.head[part]
    copied = IndexRanges.of(numbered.of(document, head, start), (stop - start) * rows_per_token(head, groups))
    shared = send.union(copied)
    mine = layout.segments_of(rank)
    return Routing(
        num_rows=int(layout.rank_rows[rank]) * groups,
        held=np.stack((layout.segment_document, layout.segment_start, layout.segment_row), axis=1)[mine],
        num_tokens=int(layout.rank_tokens[rank]),
        rows_per_token=groups,
        send_rows=numbered.layout_rows(send),
        send_counts=counts_by_chunk(sent.chunk, sent.destination, sent.rows, chunks.count, layout.num_ranks),
        receive_counts=counts_by_chunk(received.chunk, received.source, received.rows, chunks.count, layout.num_ranks),
        received_to_remote_kv=received_to_remote_kv,
        kept_to_remote_kv=received_to_remote_kv if kept is None else _in_remote_kv(_received(kept, rank), remote_kv),
        local_rows=numbered.layout_rows(copied),
        local_to_remote_kv=IndexRanges.of(remote_kv.row(document, head, start), copied.lengths),
        shared_rows=numbered.layout_rows(shared),
        send_in_shared=send.places_in(shared),
        local_in_shared=copied.places_in(shared),
        remote_kv_rows=remote_kv.num_rows,
        local=local_calls(local, mask),
        prefix_of_chunk=tuple(
            prefix_calls(layout, local, mask, before, remote_kv, chunk) for chunk in range(chunks.count)
        ),
        remote_queries_of_chunk=tuple(
            remote_query_calls(remote, mask, remote_kv, chunk) for chunk in range(chunks.count)
        ),
        late_share=_late_share(plan, rank),
        exchanges=len(transfers) > 0 if exchanges is None else exchanges,
        queries=_query_moves(plan, rank, remote, chunks) if plan.moves_queries else None,
    )


def _in_remote_kv(received: KeyTransfers, remote_kv: RemoteKV) -> IndexRanges:
    """Returns the remote-KV rows of received keys. Keys that are sent together may be of several paths."""
    last = remote_kv.index_of(received.document, received.head, received.start)
    if np.any(received.stop > remote_kv.reads.stop[last]):
        part, read = received.overlaps(remote_kv.reads)
        received, reads = received.select(part), remote_kv.reads.select(read)
        start, stop = np.maximum(received.start, reads.start), np.minimum(received.stop, reads.stop)
        received = replace(received, start=start, stop=stop)
    return IndexRanges.of(remote_kv.row(received.document, received.head, received.start), received.rows)


def _received(transfers: KeyTransfers, rank: int) -> KeyTransfers:
    """Returns the transfers to a rank in the order of arrival."""
    received = transfers.select(transfers.destination == rank)
    return received.select(np.argsort(received.chunk, kind="stable"))  # by source in each chunk


def _late_share(plan: Plan, rank: int) -> float:
    """Returns the fraction of a rank's local work to defer, for all ranks to send results at the same time.

    Without speeds, all ranks defer equal work: `LATE_SHARE` of the mean work, capped by the rank with the least local
    work. With speeds, all ranks compute for equal times before results leave. Results leave once every rank has done
    its remote work and has at most `LATE_SHARE` of the mean time left. So ranks without local work defer nothing, and
    others defer what they would compute after that.
    """
    # A task's square (its queries against keys of the same tokens) is local work unless other ranks hold its queries.
    tasks = plan.tasks
    squares = tasks.mask.pairs_inside(tasks.start, tasks.stop)
    squares = squares * np.where(tasks.head == ALL_HEADS, tasks.head_groups, 1) * ~plan.has_remote_queries
    local = np.bincount(tasks.rank, weights=squares, minlength=plan.layout.num_ranks)
    working = plan.work > 0
    if not local[rank] or not working.any():
        return 0.0
    if plan.speeds:
        local_time = local / np.maximum(plan.work, 1) * plan.time
        leaves = max((plan.time - local_time).max(), plan.time.max() - LATE_SHARE * plan.time[working].mean())
        return float(np.clip(plan.time[rank] - leaves, 0, local_time[rank]) / local_time[rank])
    return float(min(LATE_SHARE * plan.work[working].mean(), local[working].min()) / local[rank])


def _query_moves(plan: Plan, rank: int, remote: RemoteTasks, chunks: ExchangeChunks) -> QueryMoves:
    """Returns the queries that one rank sends, and the queries that it computes in `remote` tasks."""
    tasks, pieces, num_ranks = plan.tasks, plan.pieces, plan.layout.num_ranks
    first_query_row = np.zeros(len(tasks), dtype=np.int64)
    first_query_row[remote.task] = remote.first_row

    # 1. Rows and chunks of pieces of tasks with remote queries.
    def query_rows_of(chosen: Pieces) -> IndexRanges:
        into_task = (chosen.start - tasks.start[chosen.task]) * rows_per_token(chosen.head, chosen.head_groups)
        return IndexRanges.of(first_query_row[chosen.task] + into_task, chosen.rows)

    def by_chunk(chosen: Pieces, ranks: IntArray) -> tuple[Pieces, IntArray]:
        """Sorts by chunk and rank, then in the order of remote-query rows; counts rows of each chunk and rank."""
        chunk = chunks.of_remote_queries(chosen.computing_rank, chosen.lines)
        counts = counts_by_chunk(chunk, ranks, chosen.rows, chunks.count, num_ranks)
        # lexsort keeps the order of equals: within a chunk and rank, pieces stay sorted by document and start.
        return chosen.select(np.lexsort((chosen.head != ALL_HEADS, ranks, chunk))), counts

    # 2. Pieces that leave this rank, come from others, and stay.
    held, computed = pieces.owner == rank, pieces.computing_rank == rank
    sent, received = pieces.select(held & ~computed), pieces.select(computed & ~held)
    local = pieces.select(held & computed & plan.has_remote_queries[pieces.task])
    sent, send_counts = by_chunk(sent, sent.computing_rank)
    received, receive_counts = by_chunk(received, received.owner)
    return QueryMoves(
        num_rows=int(local.rows.sum() + received.rows.sum()),
        send_rows=IndexRanges.of(sent.row, sent.rows, sent.stride),
        send_counts=send_counts,
        receive_counts=receive_counts,
        received_to_queries=query_rows_of(received),
        local_rows=IndexRanges.of(local.row, local.rows, local.stride),
        local_to_queries=query_rows_of(local),
    )


def counts_by_chunk(chunk: IntArray, ranks: IntArray, rows: IntArray, num_chunks: int, num_ranks: int) -> IntArray:
    """Counts `[chunks, ranks]` rows of each chunk and rank."""
    counts = np.zeros((num_chunks, num_ranks), dtype=np.int64)
    np.add.at(counts, (chunk, ranks), rows)
    return counts


Routed = TypeVar("Routed")
Other = TypeVar("Other")


@dataclass(frozen=True, eq=False)
class RankPlan(Generic[Routed]):
    """Routings of one rank for one mask, and facts that all ranks share. `runtime` copies routings to the device.

    Attributes:
        mask: keys to which queries attend.
        forward: routing in which rows may arrive in several chunks.
        backward: routing in one chunk, because kept rows are available at once; `forward` itself if it has one chunk.
        facts: numbers about the micro-batch.
        tasks: tasks of this rank, as `Plan.tasks_of` returns them.
    """

    mask: Mask
    forward: Routed
    backward: Routed
    facts: PlanFacts
    tasks: IntArray

    def with_routings(self, make: Callable[[Routed], Other]) -> "RankPlan[Other]":
        """Returns the same plan with each routing replaced by the result of `make`."""
        forward = make(self.forward)
        backward = forward if self.backward is self.forward else make(self.backward)
        return RankPlan(self.mask, forward, backward, self.facts, self.tasks)


def rank_plan(plan: Plan, rank: int, num_chunks: int = 1, work_before: IntArray | None = None) -> RankPlan[Routing]:
    """Returns the routings of one rank, and the facts of a plan.

    Args:
        num_chunks: chunks of the exchange in forward.
        work_before: `[ranks with tokens]` attended pairs that the facts compare the plan with; by default the work of
            the queries that each rank holds, including ranks without tokens.
    """
    transfers = key_transfers(plan)
    before = plan.layout.rank_work_of(plan.tasks.mask) if work_before is None else work_before
    facts = PlanFacts.of(plan, transfers.rows_between(plan.layout.num_ranks), before)
    exchanges = len(transfers) > 0
    mine = transfers.select((transfers.source == rank) | (transfers.destination == rank))
    if num_chunks == 1:
        forward = backward = route(plan, rank, mine, exchanges=exchanges)
    else:
        chunks = ExchangeChunks.cut(plan, num_chunks)
        in_chunks = mine.in_chunks(chunks)
        forward = route(plan, rank, in_chunks, chunks, exchanges=exchanges)
        backward = route(plan, rank, mine, kept=in_chunks, exchanges=exchanges)
    return RankPlan(plan.tasks.mask, forward, backward, facts, plan.tasks_of(rank))
