"""Exchanges of one layer, in chunks: two dispatches and the two combines that answer them.

                  to the servers                      back to the owner ranks
    keys, values  KVDispatch     remote-KV rows       KVGradCombine   gradients, summed with those of local calls
    queries       QueryDispatch  remote-query rows    ResultCombine   outputs and log-sum-exps; in backward gradients

A dispatch is started chunk by chunk and received chunk by chunk. A combine is started chunk by chunk and finished
once. Gradients of keys are summed in max(fp32, their dtype) and in a fixed order: local calls, local rows of the
remote KV, then chunk by chunk the servers by rank.

Tensors whose rows go the same way are sent side by side, as bytes: outputs are in the dtype of the model, log-sum-exps
in fp32. All tensors are `[rows, ...]`, rows as in `planning.pieces`. Shape legend in `kernels.interface`.
"""

import math
from collections.abc import Sequence

import torch

from distca_hf.comm.transport import Exchange, Transport
from distca_hf.kernels.row_views import some_rows
from distca_hf.kernels.rows import add_rows, copy_rows
from distca_hf.runtime.device_routing import ChunkRouting, DeviceRouting, ExchangeSplits, QueryRouting
from distca_hf.runtime.remote_kv import RemoteKV, RemoteKVGradients, apart, row_width, side_by_side


class KVDispatch:
    """Dispatch of keys and values to the servers that read them.

    Args:
        sends: whether any rank sends keys; otherwise there is nothing to receive.
        received: rows of an earlier dispatch; they are put where they are read, and nothing is sent.

    Attributes:
        sends: whether keys are sent now.
        received: `[received rows, G * H + G * V]`; complete chunk by chunk.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        routing: DeviceRouting,
        *,
        sends: bool,
        received: torch.Tensor | None = None,
    ) -> None:
        self.sends, self._routing = sends and received is None, routing
        self._started: list[Exchange] = []
        self._receives = sends
        if received is None:
            received = k.new_empty((routing.received_to_remote_kv.shape[0] if sends else 0, row_width(k, v)))
        self.received = received
        if self.sends:
            self._sent = side_by_side(k, v, routing.send_rows)

    def start(self, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        """Starts the exchange of a chunk."""
        if self.sends:
            self._started.append(transport.exchange(chunk.keys.dispatch(self._sent, self.received, f"{where}, keys")))

    def receive(self, chunk: ChunkRouting, remote_kv: RemoteKV) -> None:
        """Waits for a chunk, and puts its rows where they are read."""
        if self.sends:
            self._started.pop(0).wait()
        if self._receives:
            remote_kv.put_received(self.received, chunk.keys.receive, self._routing)


class KVGradCombine:
    """Combine of key and value gradients on the owner ranks."""

    def __init__(self, gradients: RemoteKVGradients, k: torch.Tensor, v: torch.Tensor, routing: DeviceRouting) -> None:
        self._gradients, self._routing = gradients, routing
        self._started: list[Exchange] = []
        self._returned = k.new_empty((len(routing.send_rows), row_width(k, v)))

    def start(self, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        """Sends the gradients of a chunk, which are complete."""
        if self._routing.exchanges:
            rows = self._gradients.rows_to_send(chunk.keys.receive)
            asked = chunk.keys.combine(rows, self._returned, f"{where}, key gradients")
            self._started.append(transport.exchange(asked))

    def finish(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Waits for all chunks, and adds gradients of the remote KV and of other servers to those of local rows."""
        for exchange in self._started:
            exchange.wait()
        total = self._gradients.total
        for gradient, local, part in zip((dk, dv), (total.k, total.v), apart(self._returned, dk, dv), strict=True):
            add_rows(gradient.flatten(1), local.flatten(1), part.flatten(1), self._routing.sums)


class QueryDispatch:
    """Dispatch of query rows to the servers that compute them.

    Args:
        tensors: `[rows, ...]` of this rank.

    Attributes:
        tensors: `[remote-query rows, ...]` for each of them, with local rows of the same tasks; complete chunk by
            chunk.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], moves: QueryRouting) -> None:
        self._moves = moves
        self._started: list[Exchange] = []
        self._sent = _pack([x.index_select(0, moves.send_rows) for x in tensors])
        self._received = self._sent.new_empty((len(moves.received_to_queries), *self._sent.shape[1:]))
        self._in_place = moves.come_in_order and len(tensors) == 1
        if self._in_place:
            self.tensors = _unpack(self._received, tensors)
            return
        self.tensors = [x.new_empty((moves.num_rows, *x.shape[1:])) for x in tensors]
        if len(moves.local_rows):
            for x, rows in zip(tensors, self.tensors, strict=True):
                copy_rows((x,), moves.local_rows, (rows,), moves.local_to_queries)

    def start(self, splits: ExchangeSplits, transport: Transport, where: str) -> None:
        """Starts the exchange of a chunk."""
        asked = splits.dispatch(self._sent, self._received, f"{where}, queries")
        self._started.append(transport.exchange(asked))

    def receive(self, splits: ExchangeSplits) -> None:
        """Waits for a chunk, and puts its rows where they are computed."""
        self._started.pop(0).wait()
        if self._in_place:
            return
        parts = _unpack(some_rows(self._received, splits.receive), self.tensors)
        places = some_rows(self._moves.received_to_queries, splits.receive)
        for part, tensor in zip(parts, self.tensors, strict=True):
            copy_rows((part,), None, (tensor,), places)


class ResultCombine:
    """Combine of remote-query rows into the layout rows that their owner ranks hold.

    Args:
        tensors: `[remote-query rows, ...]` results.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], moves: QueryRouting) -> None:
        self._tensors, self._moves = tensors, moves
        self._started: list[Exchange] = []
        like = _pack([x[:0] for x in tensors])
        self._returned = like.new_empty((len(moves.send_rows), *like.shape[1:]))

    def start(self, splits: ExchangeSplits, transport: Transport, where: str) -> None:
        """Sends the results of a chunk, which are computed."""
        if self._moves.come_in_order:
            rows = [some_rows(x, splits.receive) for x in self._tensors]
        else:
            places = some_rows(self._moves.received_to_queries, splits.receive)
            rows = [x.index_select(0, places) for x in self._tensors]
        asked = splits.combine(_pack(rows), self._returned, f"{where}, results")
        self._started.append(transport.exchange(asked))

    def finish(self, targets: Sequence[torch.Tensor]) -> None:
        """Waits for all chunks, and puts their rows into `targets`, `[rows, ...]` of this rank."""
        for exchange in self._started:
            exchange.wait()
        for part, computed, target in zip(_unpack(self._returned, self._tensors), self._tensors, targets, strict=True):
            copy_rows((part,), None, (target,), self._moves.send_rows)
            if len(self._moves.local_rows):
                copy_rows((computed,), self._moves.local_to_queries, (target,), self._moves.local_rows)


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns rows of several tensors side by side, as bytes; those with the largest elements first, so that all are
    aligned where sizes permit."""
    if len(tensors) == 1:
        return tensors[0].flatten(1)
    rows = [x.flatten(1).contiguous().view(torch.uint8) for x in _largest_elements_first(tensors)]
    return torch.cat(rows, dim=1)


def _unpack(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that were packed, with the row shapes and dtypes of `like`; views where they are aligned."""
    if len(like) == 1:
        return [rows.view(len(rows), *like[0].shape[1:])]
    order = _largest_elements_first(like)
    widths = [math.prod(x.shape[1:]) * x.element_size() for x in order]
    parts = {
        id(x): _with_dtype(part, x.dtype).unflatten(1, x.shape[1:])
        for part, x in zip(rows.split(widths, dim=1), order, strict=True)
    }
    return [parts[id(x)] for x in like]


def _largest_elements_first(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return sorted(tensors, key=lambda x: -x.element_size())


def _with_dtype(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    aligned = rows.stride(0) % dtype.itemsize == 0 and rows.storage_offset() % dtype.itemsize == 0
    return (rows if aligned else rows.contiguous()).view(dtype)
