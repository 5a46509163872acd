"""Guests: queries travel to the servers that compute them, and what becomes of them travels back home.

Tensors whose rows go the same way travel side by side, as bytes: outputs are in the dtype of the model, log-sum-exps
in fp32. Rows that stay are not touched.

Shape legend in `kernels.interface`; all tensors are `[rows, ...]`, rows as in `planning.ranges`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distca_hf.comm.transport import Exchange, Transport
from distca_hf.runtime.maps import QueryMaps


@dataclass(frozen=True, eq=False)
class Flight:
    """Rows under way: to the servers as guests, or back to their homes."""

    exchange: Exchange
    maps: QueryMaps
    tensors: Sequence[torch.Tensor]

    def arrive(self) -> list[torch.Tensor]:
        """`[guest rows, ...]` of every tensor, those of this rank's own tasks among them."""
        parts = _unpack(self.exchange.wait(), self.tensors)
        if self.maps.come_in_order:
            return [part.contiguous() for part in parts]
        guests = []
        for part, x in zip(parts, self.tensors, strict=True):
            rows = x.new_empty((self.maps.num_rows, *x.shape[1:]))
            rows.index_copy_(0, self.maps.received_to_guest, part)
            rows.index_copy_(0, self.maps.own_to_guest, x.index_select(0, self.maps.own_rows))
            guests.append(rows)
        return guests

    def land(self, homes: Sequence[torch.Tensor]) -> None:
        """Puts what came back into the layout rows of `homes`."""
        for part, guest, home in zip(_unpack(self.exchange.wait(), self.tensors), self.tensors, homes, strict=True):
            home.index_copy_(0, self.maps.send_rows, part)
            if len(self.maps.own_rows):
                home.index_copy_(0, self.maps.own_rows, guest.index_select(0, self.maps.own_to_guest))


def send_out(tensors: Sequence[torch.Tensor], maps: QueryMaps, transport: Transport, where: str) -> Flight:
    """Starts rows of layout tensors to where their queries are computed."""
    sent = _pack([x.index_select(0, maps.send_rows) for x in tensors])
    return Flight(transport.exchange(sent, maps.send_counts, maps.receive_counts, where), maps, tensors)


def send_home(tensors: Sequence[torch.Tensor], maps: QueryMaps, transport: Transport, where: str) -> Flight:
    """Starts guest rows back."""
    rows = tensors if maps.come_in_order else [x.index_select(0, maps.received_to_guest) for x in tensors]
    return Flight(transport.exchange(_pack(rows), maps.receive_counts, maps.send_counts, where), maps, tensors)


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of several tensors side by side, as bytes; those with the largest elements first, so that all are aligned
    where sizes permit."""
    if len(tensors) == 1:
        return tensors[0].flatten(1)
    rows = [x.flatten(1).contiguous().view(torch.uint8) for x in _largest_elements_first(tensors)]
    return torch.cat(rows, dim=1)


def _unpack(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that were packed, with the row shapes and dtypes of `like`; views where they are aligned."""
    if len(like) == 1:
        return [rows.unflatten(1, like[0].shape[1:]) if like[0].ndim > 2 else rows]
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
