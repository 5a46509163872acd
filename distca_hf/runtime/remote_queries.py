"""Remote queries of a layer: queries that other ranks hold and this one computes, from dispatch to combine.

    owner ranks   rows of q ── QueryDispatch ──▶ remote queries                                  computing ranks
                  outputs, log-sum-exps ◀── ResultCombine ── results; in backward gradients

They exist only if queries move. Exchanges follow the keys', chunk by chunk. Tensors whose rows go the same way are
sent side by side, as bytes: outputs are in the dtype of the model, log-sum-exps in fp32.

All tensors are `[rows, ...]`, rows as in `planning.pieces`. Shape legend in `kernels.interface`.
"""

import math
from collections.abc import Sequence

import torch

from distca_hf.comm.transport import Exchange, ExchangeSplits, Transport
from distca_hf.kernels.interface import AttentionSpec, empty_layer_outputs, some_rows
from distca_hf.kernels.rows import copy_rows, scale_rows
from distca_hf.runtime.alike_layers import AlikeLayers
from distca_hf.runtime.device_routing import ChunkRouting, QueryRouting
from distca_hf.runtime.kernel_calls import BackwardCalls, ForwardCalls, QueryRows
from distca_hf.runtime.remote_kv import RemoteKV, RemoteKVGradients
from distca_hf.runtime.retention import Kept


class RemoteQueries:
    """What forward and backward share: queries arrive chunk by chunk, and their results go back."""

    _dispatch: "QueryDispatch | None"
    _combine: "ResultCombine"

    def start(self, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        """Sends the rows of a chunk to the ranks that compute them."""
        if self._dispatch is not None:
            self._dispatch.start(chunk.queries, transport, where)

    def receive(self, chunk: ChunkRouting) -> None:
        """Waits for the remote queries of a chunk."""
        if self._dispatch is not None:
            self._dispatch.receive(chunk.queries)

    def send_results(self, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        """Sends the results of a chunk's queries to their owner ranks."""
        self._combine.start(chunk.queries, transport, where)

    def receive_results(self) -> None:
        """Waits for the results of local queries."""
        self._combine.receive()

    def finish(self, *targets: torch.Tensor) -> None:
        """Puts the results of local queries into tensors of this rank."""
        self._combine.finish(targets)


class ForwardRemoteQueries(RemoteQueries):
    """Remote queries in forward; results are outputs and log-sum-exps."""

    def __init__(
        self,
        layers: AlikeLayers,
        # `[rows, ...]` queries and values of this rank.
        q: torch.Tensor,
        v: torch.Tensor,
        moves: QueryRouting,
        received: torch.Tensor | None,  # `[remote-query rows, ...]` queries of an earlier dispatch; then none are sent
    ) -> None:
        self._dispatch = None
        if received is None:
            self._dispatch = QueryDispatch([q], moves)
            [received] = self._dispatch.tensors
        remote_q = received
        out, lse = empty_layer_outputs(remote_q, v)
        self._calls = ForwardCalls(layers.forward_calls, remote_q, out, lse)
        self._combine = ResultCombine([out, lse], moves)
        # Queries, outputs and log-sum-exps, `[remote-query rows, ...]`; complete after the last chunk.
        self.kept = remote_q, out, lse

    def attend(self, chunk: ChunkRouting, remote_kv: RemoteKV, transport: Transport, where: str) -> None:
        """Attends from the remote queries of a chunk, and sends the results to their owner ranks."""
        self._calls.attend(chunk.remote_queries, remote_kv.k, remote_kv.v)
        self.send_results(chunk, transport, where)


class BackwardRemoteQueries(RemoteQueries):
    """Remote queries in backward; results are gradients of queries. Forward's rows are sent again if they were not
    kept.

    Owner ranks add sinks. Kept results lack them, so log-sum-exps with sinks are sent with output gradients.
    """

    def __init__(
        self,
        layers: AlikeLayers,
        rows: QueryRows,
        kept: Kept | None,  # rows of forward; None to send them again
        moves: QueryRouting,
        spec: AttentionSpec,
        has_sinks: bool,  # whether log-sum-exps include sinks
    ) -> None:
        self._without_sinks: tuple[torch.Tensor, torch.Tensor] | None = None
        if kept is None:
            self._dispatch = QueryDispatch(rows, moves)
            dout, q, out, lse = self._dispatch.tensors
        else:
            # Restores strides, which hooks of saved tensors may change.
            q, out, lse = (x.contiguous() for x in (kept.remote_q, kept.remote_out, kept.remote_lse))
            if has_sinks:
                self._dispatch = QueryDispatch([rows.dout, rows.lse], moves)
                self._without_sinks = out, lse
                (dout, lse), out = self._dispatch.tensors, torch.empty_like(out)
            else:
                self._dispatch = QueryDispatch([rows.dout], moves)
                [dout] = self._dispatch.tensors
        self._out, self._lse, dq = out, lse, torch.empty_like(q)
        remote = QueryRows(dout, q, out, lse)
        self._calls = BackwardCalls(layers.prepared_backward(remote, spec), remote, dq)
        self._combine = ResultCombine([dq], moves)

    def derive(self, chunk: ChunkRouting, remote_kv: RemoteKV, gradients: RemoteKVGradients) -> None:
        """Derives gradients of the remote queries of a chunk, and of the keys they read."""
        if self._without_sinks is not None:  # all rows: backward has one chunk
            scale_rows(*self._without_sinks, self._lse, self._out)
        self._calls.derive_on_remote_kv(chunk.remote_queries, remote_kv, gradients)
        del self._calls, self._dispatch, self._out, self._lse, self._without_sinks  # rows that nothing reads any more


class QueryDispatch:
    """Dispatch of query rows to the ranks that compute them."""

    def __init__(self, tensors: Sequence[torch.Tensor], moves: QueryRouting) -> None:
        self._moves = moves
        self._started: list[Exchange] = []
        self._sent = _pack([x.index_select(0, moves.send_rows) for x in tensors])
        self._received = self._sent.new_empty((len(moves.received_to_queries), *self._sent.shape[1:]))
        self._in_place = moves.come_in_order and len(tensors) == 1
        if self._in_place:
            self.tensors = _unpack(self._received, tensors)
            return
        # `[remote-query rows, ...]` for each tensor, with local rows of the same tasks; complete chunk by chunk.
        self.tensors = [x.new_empty((moves.num_rows, *x.shape[1:])) for x in tensors]
        if len(moves.local_rows):
            for x, rows in zip(tensors, self.tensors, strict=True):
                copy_rows((x,), moves.local_rows, (rows,), moves.local_to_queries)

    def start(self, splits: ExchangeSplits, transport: Transport, where: str) -> None:
        asked = splits.dispatch(self._sent, self._received, f"{where}, queries")
        self._started.append(transport.exchange(asked))

    def receive(self, splits: ExchangeSplits) -> None:
        """Waits for a chunk, and puts its rows where calls read them."""
        self._started.pop(0).wait()
        if not self._in_place:
            parts = _unpack(some_rows(self._received, splits.receive), self.tensors)
            places = some_rows(self._moves.received_to_queries, splits.receive)
            for part, tensor in zip(parts, self.tensors, strict=True):
                copy_rows((part,), None, (tensor,), places)
        if not self._started:  # rows in flight keep the tensor that holds them
            del self._sent, self._received


class ResultCombine:
    """Combine of remote-query rows into the layout rows that their owner ranks hold. Results are `[remote-query rows,
    ...]`."""

    def __init__(self, tensors: Sequence[torch.Tensor], moves: QueryRouting) -> None:
        self._tensors, self._moves = tensors, moves
        self._started: list[Exchange] = []
        self._like = _pack([x[:0] for x in tensors])

    def start(self, splits: ExchangeSplits, transport: Transport, where: str) -> None:
        """Sends the computed results of a chunk."""
        if self._moves.come_in_order:
            rows = [some_rows(x, splits.receive) for x in self._tensors]
        else:
            places = some_rows(self._moves.received_to_queries, splits.receive)
            rows = [x.index_select(0, places) for x in self._tensors]
        if not self._started:
            self._returned = self._like.new_empty((len(self._moves.send_rows), *self._like.shape[1:]))
        asked = splits.combine(_pack(rows), self._returned, f"{where}, results")
        self._started.append(transport.exchange(asked))

    def receive(self) -> None:
        while self._started:
            self._started.pop(0).wait()

    def finish(self, targets: Sequence[torch.Tensor]) -> None:
        """Puts the rows of all chunks into `targets`, `[rows, ...]` of this rank."""
        for part, computed, target in zip(_unpack(self._returned, self._tensors), self._tensors, targets, strict=True):
            copy_rows((part,), None, (target,), self._moves.send_rows)
            if len(self._moves.local_rows):
                copy_rows((computed,), self._moves.local_to_queries, (target,), self._moves.local_rows)


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns rows of several tensors side by side, as bytes; largest elements first, to align all if sizes permit."""
    if len(tensors) == 1:
        return tensors[0].flatten(1)
    rows = [x.flatten(1).contiguous().view(torch.uint8) for x in _largest_elements_first(tensors)]
    return torch.cat(rows, dim=1)


def _unpack(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the packed tensors, with the row shapes and dtypes of `like`; views if they are aligned."""
    if len(like) == 1:
        return [rows.view(len(rows), *like[0].shape[1:])]
    # row of bytes   | lse, fp32 | dout, bf16 | q, bf16 | out, bf16 |     largest elements first, as in `_pack`
    order = _largest_elements_first(like)
    widths = [math.prod(x.shape[1:]) * x.element_size() for x in order]
    parts = {}
    for part, x in zip(rows.split(widths, dim=1), order, strict=True):
        size = x.element_size()
        aligned = part.stride(0) % size == 0 and part.storage_offset() % size == 0
        parts[id(x)] = (part if aligned else part.contiguous()).view(x.dtype).unflatten(1, x.shape[1:])
    return [parts[id(x)] for x in like]


def _largest_elements_first(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return sorted(tensors, key=lambda x: -x.element_size())
