"""Queries that move: to the servers that compute them, and what becomes of them back home.

Tensors whose rows go the same way travel side by side, as bytes: outputs are in the dtype of the model, log-sum-exps
in fp32.

Shape legend in `kernels.interface`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distca_hf.comm.transport import Exchange, Transport
from distca_hf.runtime.maps import QueryMaps


@dataclass
class QueryFlight:
    """Rows of queries under way to their servers; rows that stay are there already."""

    at_server: list[torch.Tensor]
    maps: QueryMaps
    exchange: Exchange

    def land(self) -> None:
        """Waits for the other ranks' rows and puts them where they are computed."""
        received = _unpack(self.exchange.wait(), self.at_server)
        for rows, part in zip(self.at_server, received, strict=True):
            rows.index_copy_(0, self.maps.received_to_query, part)


def send_queries(tensors: Sequence[torch.Tensor], maps: QueryMaps, transport: Transport, where: str) -> QueryFlight:
    """Starts the rows of some `[T, ...]` tensors to where their queries are computed."""
    sent = _pack([x.index_select(0, maps.send_rows) for x in tensors])
    exchange = transport.exchange(sent, maps.send_counts, maps.receive_counts, where)
    at_server = [x.new_empty((maps.num_rows, *x.shape[1:])) for x in tensors]
    for rows, x in zip(at_server, tensors, strict=True):
        rows.index_copy_(0, maps.local_to_query, x.index_select(0, maps.local_rows))
    return QueryFlight(at_server, maps, exchange)


def bring_home(
    tensors: Sequence[torch.Tensor], num_rows: int, maps: QueryMaps, transport: Transport, where: str
) -> list[torch.Tensor]:
    """The way back: rows of `[canonical query rows, ...]` tensors, each as `[num_rows, ...]` in layout order."""
    sent = _pack([x.index_select(0, maps.received_to_query) for x in tensors])
    exchange = transport.exchange(sent, maps.receive_counts, maps.send_counts, where)
    at_home = [x.new_empty((num_rows, *x.shape[1:])) for x in tensors]
    for rows, x in zip(at_home, tensors, strict=True):
        rows.index_copy_(0, maps.local_rows, x.index_select(0, maps.local_to_query))
    for rows, part in zip(at_home, _unpack(exchange.wait(), at_home), strict=True):
        rows.index_copy_(0, maps.send_rows, part)
    return at_home


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of several tensors side by side, as bytes."""
    return torch.cat([x.flatten(1).contiguous().view(torch.uint8) for x in tensors], dim=1)


def _unpack(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that were packed, with the row shapes and dtypes of `like`."""
    widths = [math.prod(x.shape[1:]) * x.element_size() for x in like]
    return [
        part.contiguous().view(x.dtype).unflatten(1, x.shape[1:])
        for part, x in zip(rows.split(widths, dim=1), like, strict=True)
    ]
