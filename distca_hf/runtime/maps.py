"""Maps: a routing as tensors on the device, made once per micro-batch and used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distca_hf.cost import IntArray
from distca_hf.kernels.interface import Spans
from distca_hf.planning.routing import KernelCall, QueryMoves, Routing
from distca_hf.planning.runs import Runs


@dataclass(frozen=True, eq=False)
class DeviceCall:
    """A kernel call with its offsets on the device; names as in `KernelCall`."""

    queries: slice
    keys: slice
    spans: Spans
    rows_per_token: int


@dataclass(frozen=True, eq=False)
class QueryMaps:
    """Index tensors (int64) of queries that move; names as in `QueryMoves`."""

    num_rows: int
    send_counts: list[int]
    receive_counts: list[int]
    local_rows: torch.Tensor
    local_to_query: torch.Tensor
    send_rows: torch.Tensor
    received_to_query: torch.Tensor


@dataclass(frozen=True, eq=False)
class Maps:
    """Index tensors (int64) and kernel calls of one rank; names as in `Routing`.

    Attributes:
        canonical_of: `[rows]` canonical row of each layout row: the inverse of `row_order`.
        send_in_shared, own_in_shared: where `send_rows` and `own_rows` are in `shared_rows`.
        task_rows: query rows that are in a task; those behind are padding.
        own_calls, store_calls: kernel calls whose keys are own rows, and those whose keys are in the store.
        own_rows_stop: query rows of the former.
        queries: queries that move, or None if on no rank any does.
        returned_parts: rows of each server among those that it returns gradients for.
        store_sums: several calls read the same stored keys, so their gradients must be added.
    """

    num_rows: int
    held: IntArray
    rows_per_token: int
    task_rows: int
    store_rows: int
    exchanges: bool
    store_sums: bool
    returned_parts: tuple[slice, ...]
    send_counts: list[int]
    receive_counts: list[int]
    row_order: torch.Tensor | None
    canonical_of: torch.Tensor | None
    send_rows: torch.Tensor
    received_to_store: torch.Tensor
    own_rows: torch.Tensor
    own_to_store: torch.Tensor
    shared_rows: torch.Tensor
    send_in_shared: torch.Tensor
    own_in_shared: torch.Tensor
    own_calls: tuple[DeviceCall, ...]
    store_calls: tuple[DeviceCall, ...]
    own_rows_stop: int
    queries: QueryMaps | None

    def name_of(self, row: int) -> str:
        """Document and token that a row of this rank holds; rows here are tokens."""
        segment = int(np.searchsorted(self.held[:, 2], row, side="right")) - 1
        if segment < 0:
            return "padding"
        document, start, first_row = self.held[segment].tolist()
        return f"document {document} of the micro-batch, token {start + row - first_row}"


@dataclass(frozen=True, eq=False)
class HostMaps:
    """Maps before they are copied and written out: all integers of a micro-batch in one pinned buffer: one copy."""

    routing: Routing
    runs: tuple[Runs, ...]
    table: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def prepare(cls, routing: Routing, pin: bool = False) -> "HostMaps":
        """Gathers a routing's integers; safe in a background thread."""
        shared, moves = routing.shared_rows, routing.queries
        runs = [
            routing.send_rows,
            routing.received_to_store,
            routing.own_rows,
            routing.own_to_store,
            shared,
            routing.send_rows.places_in(shared),
            routing.own_rows.places_in(shared),
            Runs.range(0, 0) if routing.row_order is None else routing.row_order,
        ]
        if moves is not None:
            runs += [moves.local_rows, moves.local_to_query, moves.send_rows, moves.received_to_query]
        offsets = [offset for call in routing.calls for offset in (call.cu_seqlens_q, call.cu_seqlens_k)]
        return cls(
            routing=routing,
            runs=tuple(runs),
            table=_pinned(_table(Runs.join(runs)), pin),
            offsets=_pinned(np.concatenate([*offsets, np.zeros(0)]).astype(np.int32), pin),
        )

    def to(self, device: torch.device) -> Maps:
        """Maps on the device: two copies that the host does not wait for."""
        routing = self.routing
        table = self.table.to(device, non_blocking=True).split([len(runs.starts) for runs in self.runs], dim=1)
        send, received, own, own_to, shared, send_in, own_in, order, *moves = (
            _written_out(part, runs.total) for part, runs in zip(table, self.runs, strict=True)
        )
        offsets = self.offsets.to(device, non_blocking=True)
        reordered = routing.row_order is not None
        calls = _device_calls(routing.calls, offsets)
        num_own = sum(not call.from_store for call in routing.calls)  # they come first
        return Maps(
            num_rows=routing.num_rows,
            held=routing.held,
            rows_per_token=routing.rows_per_token,
            task_rows=max((call.query_stop for call in routing.calls), default=0),
            store_rows=routing.store_rows,
            exchanges=routing.exchanges,
            store_sums=sum(call.key_stop - call.key_start for call in routing.calls if call.from_store)
            > routing.store_rows,
            returned_parts=_parts(routing.send_counts),
            send_counts=routing.send_counts.tolist(),
            receive_counts=routing.receive_counts.tolist(),
            row_order=order if reordered else None,
            canonical_of=_inverse(order) if reordered else None,
            send_rows=send,
            received_to_store=received,
            own_rows=own,
            own_to_store=own_to,
            shared_rows=shared,
            send_in_shared=send_in,
            own_in_shared=own_in,
            own_calls=calls[:num_own],
            store_calls=calls[num_own:],
            own_rows_stop=max((call.query_stop for call in routing.calls if not call.from_store), default=0),
            queries=_query_maps(routing.queries, moves),
        )


def _table(runs: Runs) -> np.ndarray:
    """`[4, runs]` length, stride and start of each run, and the numbers before it."""
    before = np.cumsum(runs.lengths) - runs.lengths
    return np.stack((runs.lengths, runs.strides, runs.starts, before))


def _written_out(table: torch.Tensor, total: int) -> torch.Tensor:
    """`[total]` the numbers of some runs, on the device; the host does not wait."""
    lengths, strides, starts, before = table
    run = torch.repeat_interleave(lengths, output_size=total)
    within = torch.arange(total, device=table.device) - (before - before[:1])[run]
    return starts[run] + within * strides[run]


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order`."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _parts(counts: IntArray) -> tuple[slice, ...]:
    """Rows of each group that is not empty."""
    stops = np.cumsum(counts)
    return tuple(slice(int(stop - count), int(stop)) for stop, count in zip(stops, counts, strict=True) if count)


def _query_maps(moves: QueryMoves | None, index: Sequence[torch.Tensor]) -> QueryMaps | None:
    if moves is None:
        return None
    return QueryMaps(moves.num_rows, moves.send_counts.tolist(), moves.receive_counts.tolist(), *index)


def _device_calls(calls: tuple[KernelCall, ...], offsets: torch.Tensor) -> tuple[DeviceCall, ...]:
    made, at = [], 0
    for call in calls:
        entries = len(call.cu_seqlens_q)
        spans = Spans(
            cu_seqlens_q=offsets[at : at + entries],
            cu_seqlens_k=offsets[at + entries : at + 2 * entries],
            max_seqlen_q=_longest(call.cu_seqlens_q),
            max_seqlen_k=_longest(call.cu_seqlens_k),
        )
        at += 2 * entries
        made.append(
            DeviceCall(
                queries=slice(call.query_start, call.query_stop),
                keys=slice(call.key_start, call.key_stop),
                spans=spans,
                rows_per_token=call.rows_per_token,
            )
        )
    return tuple(made)


def _longest(offsets: IntArray) -> int:
    return int(np.diff(offsets).max(initial=0))


def _pinned(array: np.ndarray, pin: bool) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pin else tensor
