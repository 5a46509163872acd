"""Window routing: the index maps of one rank in layers with a sliding window.

A query sees the last keys of its document alone, W of them with its own. So queries stay where they are held, whatever
a plan divides among ranks for full layers. A rank fetches only the *halo*: the up to W - 1 keys before each part of a
document that it holds.

    document     0 1 2 3 4 5 6 7 8 9          W = 4
    rank 0       | 0 .. 4 |
    rank 1                  | 5 .. 9 |        its halo is [2:5), received from rank 0

                 local call                   prefix call
    keys         5 6 7 8 9                    2 3 4
    query 5      x                            x x x     (W - 1 - n + 1 = 1: the band begins one key later with each
    query 6      x x                            x x      query, and n = 3 queries reach the halo)
    query 7      x x x                            x
    query 8      x x x x
    query 9        x x x x

Both calls together are the window's pairs, each once, and are merged by log-sum-exps as in `routing`. A rank with two
parts of a document may need keys twice, or hold some of them itself: a halo is fetched once, and own keys are copied.

Layouts, transfers and routings are those of full layers, with rows that are tokens.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IndexRanges, IntArray, chained, exclusive_cumsum, ranges, run_starts, run_stops
from distca_hf.cost import Mask
from distca_hf.errors import PlanError
from distca_hf.layout import Layout
from distca_hf.planning.kernel_calls import CallKind, KernelCall, LocalParts, local_calls
from distca_hf.planning.pieces import ALL_HEADS, position_keys
from distca_hf.planning.plan import PlanFacts
from distca_hf.planning.routing import RankPlan, Routing, counts_by_chunk, held_segments, share_to_defer
from distca_hf.planning.transfers import KeyTransfers


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of documents, sorted by (rank, document, start): tokens that follow each other in consecutive rows.

    Attributes:
        rank: that holds them.
        document, start, stop: tokens.
        row: layout row of the first one.
    """

    rank: IntArray
    document: IntArray
    start: IntArray
    stop: IntArray
    row: IntArray

    @classmethod
    def of(cls, layout: Layout) -> "Parts":
        """Joins segments of a rank whose tokens and rows follow each other."""
        order = np.lexsort((layout.segment_start, layout.segment_document, layout.segment_rank))
        rank, document, row = (x[order] for x in (layout.segment_rank, layout.segment_document, layout.segment_row))
        start, stop = layout.segment_start[order], layout.segment_stop[order]
        opens = run_starts(rank, document, chained(start, stop - start), chained(row, stop - start))
        return cls(rank[opens], document[opens], start[opens], stop[run_stops(opens)], row[opens])

    def of_rank(self, rank: int) -> LocalParts:
        """Returns the parts of one rank."""
        mine = slice(*np.searchsorted(self.rank, [rank, rank + 1]).tolist())
        document = self.document[mine]
        all_heads = np.full(len(document), ALL_HEADS)
        return LocalParts(document, all_heads, self.start[mine], self.stop[mine], 1, self.row[mine])


@dataclass(frozen=True, eq=False)
class Halos:
    """Keys before parts that their ranks attend, sorted by (rank, document, start), each of them once.

    Attributes:
        rank: that needs them.
        document, start, stop: tokens.
    """

    rank: IntArray
    document: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def of(cls, parts: Parts, mask: Mask) -> "Halos":
        """Returns the halos of all parts; those that overlap on a rank are joined."""
        first_key = mask.first_key(parts.start)
        some = np.flatnonzero(first_key < parts.start)
        rank, document, start, stop = parts.rank[some], parts.document[some], first_key[some], parts.start[some]
        # Parts of a document rise, and so do both ends of their halos: only neighbours overlap.
        opens = run_starts(rank, document)
        opens[1:] |= start[1:] > stop[:-1]
        return cls(rank[opens], document[opens], start[opens], stop[run_stops(opens)])

    def of_rank(self, rank: int) -> "Halos":
        """Returns the halos of one rank."""
        mine = slice(*np.searchsorted(self.rank, [rank, rank + 1]).tolist())
        return Halos(self.rank[mine], self.document[mine], self.start[mine], self.stop[mine])

    @property
    def tokens(self) -> IntArray:
        return self.stop - self.start

    def rows(self, documents: IntArray, tokens: IntArray) -> IntArray:
        """Returns the remote-KV rows of tokens in the halos of one rank, which lie one behind the other."""
        at = np.searchsorted(_keys(self.document, self.start), _keys(documents, tokens), side="right") - 1
        row: IntArray = exclusive_cumsum(self.tokens)[at] + tokens - self.start[at]
        return row


@dataclass(frozen=True, eq=False)
class HaloTransfers(KeyTransfers):
    """Keys of halos with the rank that holds them, which may be the one that needs them.

    Attributes:
        row: layout row of the first one on the rank that holds it.
    """

    row: IntArray

    @classmethod
    def of(cls, layout: Layout, halos: Halos) -> "HaloTransfers":
        """Cuts halos at the borders of segments."""
        # 1. The segments, in the order of documents, that each halo begins in, goes through and ends in.
        segments = np.lexsort((layout.segment_start, layout.segment_document))
        keys = _keys(layout.segment_document[segments], layout.segment_start[segments])
        first = np.searchsorted(keys, _keys(halos.document, halos.start), side="right") - 1
        last = np.searchsorted(keys, _keys(halos.document, halos.stop), side="left")
        halo, segment = np.repeat(np.arange(len(first)), last - first), segments[ranges(first, last - first)]

        # 2. The part of the halo in each of them.
        start = np.maximum(halos.start[halo], layout.segment_start[segment])
        stop = np.minimum(halos.stop[halo], layout.segment_stop[segment])
        source, destination, document = layout.segment_rank[segment], halos.rank[halo], halos.document[halo]
        row = layout.segment_row[segment] + start - layout.segment_start[segment]
        order = np.lexsort((start, document, destination, source))
        return cls(
            document=document[order],
            head=np.full(len(order), ALL_HEADS),
            start=start[order],
            stop=stop[order],
            head_groups=1,
            source=source[order],
            destination=destination[order],
            chunk=np.zeros(len(order), dtype=np.int64),
            row=row[order],
        )


def _keys(documents: IntArray, tokens: IntArray) -> IntArray:
    return position_keys(documents, np.full(len(documents), ALL_HEADS), tokens, 1)


def halo_rows_between(layout: Layout, mask: Mask) -> IntArray:
    """Counts `[source, destination]` tokens whose keys and values are sent for halos."""
    transfers = HaloTransfers.of(layout, Halos.of(Parts.of(layout), mask))
    return transfers.select(transfers.source != transfers.destination).rows_between(layout.num_ranks)


def window_plan(
    layout: Layout, rank: int, mask: Mask, work_before: IntArray | None = None, num_servers: int = 0
) -> RankPlan:
    """Returns the routing of one rank in layers with a window, and facts that all ranks share.

    Args:
        layout: ranks, and the tokens that each of them holds.
        rank: the rank.
        mask: with a window.
        work_before: `[ranks but servers]` attended pairs to compare with, in facts; by default those of the layout.
        num_servers: the last ranks of the layout that are attention servers; they compute nothing in such layers.

    Raises:
        PlanError: the mask has no window.
    """
    if mask.window_tokens is None:
        raise PlanError(f"rank {rank}: a mask without a window is routed by `rank_plan`, from a plan")
    parts = Parts.of(layout)
    halos = Halos.of(parts, mask)
    transfers = HaloTransfers.of(layout, halos)
    travels = transfers.select(transfers.source != transfers.destination)
    routing = _route(layout, rank, mask, parts, halos.of_rank(rank), transfers, exchanges=len(travels) > 0)
    facts, held = _facts(layout, mask, travels, work_before, num_servers), layout.segments_of(rank)
    queries, before = layout.segment_tokens[held], layout.segment_start[held]
    return RankPlan(mask, routing, routing, facts, np.column_stack((queries, before, np.zeros_like(queries))))


def _route(
    layout: Layout,
    rank: int,
    mask: Mask,
    parts: Parts,
    halos: Halos,
    transfers: HaloTransfers,
    exchanges: bool,
) -> Routing:
    """Returns the routing of one rank.

    Args:
        layout, rank, mask: see `window_plan`.
        parts: of all ranks.
        halos: of this rank.
        transfers: of all ranks.
        exchanges: whether any rank sends keys.
    """
    # 1. Rows that are sent, received, and copied from this rank's own keys.
    to_others, is_mine = transfers.source != transfers.destination, transfers.source == rank
    sent, copied = transfers.select(is_mine & to_others), transfers.select(is_mine & ~to_others)
    received = transfers.select((transfers.destination == rank) & to_others)
    send_rows, local_rows = (IndexRanges.of(rows.row, rows.tokens) for rows in (sent, copied))
    into, local_to = (
        IndexRanges.of(halos.rows(rows.document, rows.start), rows.tokens) for rows in (received, copied)
    )
    shared = send_rows.union(local_rows)

    # 2. Calls: squares of all parts, and the queries of each part that reach its halo.
    mine, window_tokens = parts.of_rank(rank), mask.window_tokens or 0
    squares = np.bincount(parts.rank, weights=mask.pairs_inside(parts.stop - parts.start), minlength=layout.num_ranks)
    return Routing(
        num_rows=int(layout.rank_rows[rank]),
        held=held_segments(layout, rank),
        num_tokens=int(layout.rank_tokens[rank]),
        rows_per_token=1,
        send_rows=send_rows,
        chunk_send_counts=counts_by_chunk(sent.chunk, sent.destination, sent.tokens, 1, layout.num_ranks),
        chunk_receive_counts=counts_by_chunk(received.chunk, received.source, received.tokens, 1, layout.num_ranks),
        received_to_remote_kv=into,
        kept_to_remote_kv=into,
        local_rows=local_rows,
        local_to_remote_kv=local_to,
        shared_rows=shared,
        send_in_shared=send_rows.places_in(shared),
        local_in_shared=local_rows.places_in(shared),
        remote_kv_rows=int(halos.tokens.sum()),
        local=local_calls(mine, window_tokens),
        prefix_of_chunk=(_halo_calls(mine, mask, halos),),
        remote_queries_of_chunk=((),),
        late_share=share_to_defer(squares, layout.rank_work_of(mask), rank),
        exchanges=exchanges,
    )


def _halo_calls(mine: LocalParts, mask: Mask, halos: Halos) -> tuple[KernelCall, ...]:
    """Returns one call for each part that has a halo: its first queries against the keys before them."""
    window_tokens = mask.window_tokens or 0
    first_key = mask.first_key(mine.start)
    some = np.flatnonzero(first_key < mine.start)
    keys, queries = (mine.start - first_key)[some], np.minimum(mine.tokens, window_tokens - 1)[some]
    key_rows = halos.rows(mine.document[some], first_key[some])
    calls = []
    for row, count, key, key_count in zip(
        *(column.tolist() for column in (mine.token_row[some], queries, key_rows, keys)), strict=True
    ):
        offsets_q, offsets_k = np.array([0, count]), np.array([0, key_count])
        bounds = row, row + count, key, key + key_count
        # The last of these queries sees as many keys of the halo as the window has left behind `count` own ones.
        left = window_tokens - count
        calls.append(KernelCall(CallKind.PREFIX, *bounds, offsets_q, offsets_k, heads=(0, 1), window_tokens=left))
    return tuple(calls)


def _facts(
    layout: Layout, mask: Mask, travels: KeyTransfers, work_before: IntArray | None, num_servers: int
) -> PlanFacts:
    """Returns the facts of layers with a window."""
    num_trainers = layout.num_ranks - num_servers
    work, key_rows = layout.rank_work_of(mask), travels.rows_between(layout.num_ranks)
    none = (0,) * layout.num_ranks
    return PlanFacts(
        num_documents=layout.num_documents,
        longest_document_tokens=layout.longest_document_tokens,
        work=tuple(work.tolist()),
        work_before=tuple((work[:num_trainers] if work_before is None else work_before).tolist()),
        key_rows_sent=tuple(key_rows.sum(axis=1).tolist()),
        query_rows_sent=none,
        key_rows_received=tuple(key_rows.sum(axis=0).tolist()),
        remote_query_rows=none,
        num_tokens=int(layout.document_tokens.sum()),
        cut_documents=layout.cut_documents,
        speeds=(1.0,) * num_trainers + (0.0,) * num_servers if num_servers else (),
        window_tokens=mask.window_tokens,
    )
