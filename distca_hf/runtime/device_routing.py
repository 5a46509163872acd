"""Routing on the device: index tensors and kernel calls of one rank, made once per micro-batch and used by every
layer.

Routing ── gather ──▶ PinnedRouting ── two copies ──▶ DeviceRouting
planning              host, two buffers               index tensors, written out on the device
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from distca_hf.arrays import IndexRanges, IntArray, ceil_div
from distca_hf.comm.transport import ExchangeSplits
from distca_hf.kernels.interface import Spans
from distca_hf.kernels.rows import RowSums
from distca_hf.planning.kernel_calls import CallKind, KernelCall
from distca_hf.planning.routing import RankPlan, Routing


# Offsets of a call begin at multiples of this many entries, 16 bytes: FlashAttention 4 copies unaligned ones in each
# backward call.
ALIGNED_ENTRIES = 4


@dataclass(frozen=True, eq=False)
class DeviceCall:
    """A kernel call with its offsets on the device; names as in `KernelCall`."""

    kind: CallKind
    queries: slice
    keys: slice
    spans: Spans
    heads: tuple[int, int]
    rows_per_token: int  # rows of a token in the remote KV and among remote queries
    pairs: int
    window_tokens: int = 0
    adds: bool = False  # a larger call reads the same remote keys and writes their gradients; this one adds to them


@dataclass(frozen=True, eq=False)
class ChunkRouting:
    """One chunk: rows of keys and of queries that are sent together, and the calls that read them."""

    keys: ExchangeSplits
    queries: ExchangeSplits  # without rows if no queries move on any rank
    prefix: tuple[DeviceCall, ...]
    remote_queries: tuple[DeviceCall, ...]


@dataclass(frozen=True, eq=False)
class QueryRouting:
    """Index tensors (int64) of queries that move; names as in `QueryMoves`."""

    num_rows: int
    come_in_order: bool
    send_rows: torch.Tensor
    received_to_queries: torch.Tensor
    local_rows: torch.Tensor
    local_to_queries: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceRouting:
    """Index tensors (int64) and kernel calls of one rank; names as in `Routing`."""

    num_rows: int
    held: IntArray
    num_tokens: int
    rows_per_token: int
    remote_kv_rows: int
    come_in_order: bool
    kept_in_order: bool
    exchanges: bool
    sums_remote_kv: bool  # whether gradients of remote keys are sums over many calls
    send_rows: torch.Tensor
    received_to_remote_kv: torch.Tensor
    kept_to_remote_kv: torch.Tensor
    local_rows: torch.Tensor
    local_to_remote_kv: torch.Tensor
    sums: RowSums  # rows to which gradients of sent keys, and of local rows of the remote KV, are added
    local: tuple[DeviceCall, ...]  # kernel calls that need no chunk
    chunks: tuple[ChunkRouting, ...]
    late_share: float
    queries: QueryRouting | None  # queries that move; None if none move on any rank

    def name_of(self, row: int) -> str:
        """Returns the document and token that a row of this rank holds; rows here are tokens."""
        segment = int(np.searchsorted(self.held[:, 2], row, side="right")) - 1
        if segment < 0 or row >= self.num_tokens:
            return "padding"
        document, start, first_row = self.held[segment].tolist()
        return f"document {document} of the micro-batch, token {start + row - first_row}"


@dataclass(frozen=True, eq=False)
class PinnedRouting:
    """A routing before it is copied and written out: all its integers in two buffers, pinned on request."""

    routing: Routing
    calls: tuple[tuple[KernelCall, ...], ...]
    totals: tuple[int, ...]
    table: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def prepare(cls, routing: Routing, pin: bool = False) -> "PinnedRouting":
        """Gathers a routing's integers; safe in a background thread."""
        # Two buffers, because each copy costs host time, whatever its size:
        #
        #     table     | lengths | strides | firsts |      of all ranges of all index maps; int64
        #     offsets   | call 0: queries | call 0: keys | call 1: queries | ...   int32, as kernels take them
        moves = routing.queries
        ranges = [
            routing.send_rows,
            routing.received_to_remote_kv,
            routing.kept_to_remote_kv,
            routing.local_rows,
            routing.local_to_remote_kv,
            routing.shared_rows,
            routing.send_in_shared,
            routing.local_in_shared,
        ]
        if moves is not None:
            ranges += [moves.send_rows, moves.received_to_queries, moves.local_rows, moves.local_to_queries]
        calls = routing.local, *routing.prefix_of_chunk, *routing.remote_queries_of_chunk
        offsets = [offset for kind in calls for call in kind for offset in (call.cu_seqlens_q, call.cu_seqlens_k)]
        joined = IndexRanges.join(ranges)
        firsts = joined.starts - joined.before * joined.strides  # the number that each range would have at place 0
        return cls(
            routing=routing,
            calls=calls,
            totals=tuple(part.total for part in ranges),
            table=_pinned(np.stack((joined.lengths, joined.strides, firsts)), pin),
            offsets=_pinned(_aligned(offsets), pin),
        )

    def to(self, device: torch.device) -> DeviceRouting:
        """Returns the routing on the device, with two copies for which the host does not wait."""
        routing, queries = self.routing, self.routing.queries
        index = _written_out(self.table.to(device, non_blocking=True), self.totals)
        send, received, kept, local, local_to, shared, send_in, local_in, *moves = index
        offsets = self.offsets.to(device, non_blocking=True)
        local_calls, *others = _device_calls(self.calls, offsets, routing.adding or ())
        return DeviceRouting(
            num_rows=routing.num_rows,
            held=routing.held,
            num_tokens=routing.num_tokens,
            rows_per_token=routing.rows_per_token,
            remote_kv_rows=routing.remote_kv_rows,
            come_in_order=routing.come_in_order,
            kept_in_order=routing.kept_in_order,
            exchanges=routing.exchanges,
            sums_remote_kv=routing.adding is None,
            send_rows=send,
            received_to_remote_kv=received,
            kept_to_remote_kv=kept,
            local_rows=local,
            local_to_remote_kv=local_to,
            sums=RowSums(shared, local_to, local_in, send_in, _parts(routing.send_counts.ravel())),
            local=local_calls,
            chunks=_chunks(routing, others),
            late_share=routing.late_share,
            queries=None if queries is None else QueryRouting(queries.num_rows, queries.come_in_order, *moves),
        )


# The rank plan of the layers with one mask; facts and tasks stay on the host.
DeviceRankPlan = RankPlan[DeviceRouting]


def on_device(plan: RankPlan[Routing], device: torch.device, pin: bool = False) -> DeviceRankPlan:
    """Returns a rank plan on the device; the host does not wait if memory is pinned."""
    return plan.with_routings(lambda routing: PinnedRouting.prepare(routing, pin).to(device))


def _written_out(table: torch.Tensor, totals: Sequence[int]) -> list[torch.Tensor]:
    """Returns the numbers of some ranges on the device, in parts of `totals`; the host does not wait."""
    # lengths 3, 2    strides 1, 8    starts 4, 20    firsts 4, -4: the number that a range would have at place 0
    #
    #     place          0 1 2  3  4
    #     number_range   0 0 0  1  1
    #     numbers        4 5 6 20 28        place * stride + first
    lengths, strides, firsts = table
    number_range = torch.repeat_interleave(lengths, output_size=sum(totals))
    numbers = torch.arange(len(number_range), device=table.device)
    numbers *= strides[number_range]
    numbers += firsts[number_range]
    return [*numbers.split([*totals])]


def _parts(counts: IntArray) -> tuple[slice, ...]:
    """Returns the rows of each group that is not empty."""
    stops = np.cumsum(counts)
    return tuple(slice(int(stop - count), int(stop)) for stop, count in zip(stops, counts, strict=True) if count)


def _chunks(routing: Routing, calls: Sequence[tuple[DeviceCall, ...]]) -> tuple[ChunkRouting, ...]:
    """Returns all chunks; `calls` are the prefix calls of each chunk, then the remote queries of each."""
    # If no queries move, their exchanges have no rows, and none is made: see `runtime.attention`.
    count, moves = len(routing.prefix_of_chunk), routing.queries
    none = np.zeros_like(routing.send_counts)
    keys = _splits(routing.send_counts, routing.receive_counts)
    queries = _splits(none, none) if moves is None else _splits(moves.send_counts, moves.receive_counts)
    return tuple(
        ChunkRouting(keys[chunk], queries[chunk], calls[chunk], calls[count + chunk]) for chunk in range(count)
    )


def _splits(send_counts: IntArray, receive_counts: IntArray) -> list[ExchangeSplits]:
    """Returns the split sizes of each chunk, from `[chunks, ranks]` rows."""
    sends, receives = (
        [slice(*bounds) for bounds in pairwise([0, *np.cumsum(counts.sum(axis=1)).tolist()])]
        for counts in (send_counts, receive_counts)
    )
    of_chunks = zip(sends, receives, send_counts.tolist(), receive_counts.tolist(), strict=True)
    return [ExchangeSplits(*of_chunk) for of_chunk in of_chunks]


def _device_calls(
    kinds: Sequence[Sequence[KernelCall]], offsets: torch.Tensor, adding: Collection[KernelCall]
) -> tuple[tuple[DeviceCall, ...], ...]:
    """Returns the calls of each kind, whose offsets follow each other."""
    made, at = [], 0
    for calls in kinds:
        of_kind = []
        for call in calls:
            entries = len(call.cu_seqlens_q)
            of_keys = at + aligned_entries(entries)
            spans = Spans(
                cu_seqlens_q=offsets[at : at + entries],
                cu_seqlens_k=offsets[of_keys : of_keys + entries],
                max_seqlen_q=_longest(call.cu_seqlens_q),
                max_seqlen_k=_longest(call.cu_seqlens_k),
            )
            at = of_keys + aligned_entries(entries)
            queries, keys = slice(call.query_start, call.query_stop), slice(call.key_start, call.key_stop)
            how = call.heads, call.groups, call.pairs, call.window_tokens
            of_kind.append(DeviceCall(call.kind, queries, keys, spans, *how, adds=call in adding))
        made.append(tuple(of_kind))
    return tuple(made)


def aligned_entries(entries: int) -> int:
    """Returns the entries that offsets of a call take up."""
    return ceil_div(entries, ALIGNED_ENTRIES) * ALIGNED_ENTRIES


def _aligned(offsets: Sequence[IntArray]) -> NDArray[np.int32]:
    """Returns offsets of calls one after the other, with zeros between them."""
    joined, at = np.zeros(sum(aligned_entries(len(each)) for each in offsets), dtype=np.int32), 0
    for each in offsets:
        joined[at : at + len(each)] = each
        at += aligned_entries(len(each))
    return joined


def _longest(offsets: IntArray) -> int:
    return int(np.diff(offsets).max(initial=0))


def _pinned(array: np.ndarray, pin: bool) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pin else tensor
