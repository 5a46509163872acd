"""Guests: queries travel to the servers that compute them, and what becomes of them travels back home, leg by leg.

Tensors whose rows go the same way travel side by side, as bytes: outputs are in the dtype of the model, log-sum-exps
in fp32. Rows that stay are not touched.

Shape legend in `kernels.interface`; all tensors are `[rows, ...]`, rows as in `planning.ranges`.
"""

import math
from collections.abc import Sequence

import torch

from distca_hf.comm.transport import Exchange, Transport
from distca_hf.runtime.maps import QueryMaps, Way


class Outward:
    """Rows of layout tensors on their way to where their queries are computed.

    Attributes:
        guests: `[guest rows, ...]` of every tensor, those of this rank's own tasks among them; a leg's rows are there
            once it has arrived.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], maps: QueryMaps, num_received: int) -> None:
        self._maps = maps
        self._sent = _pack([x.index_select(0, maps.send_rows) for x in tensors])
        self._received = self._sent.new_empty((num_received, *self._sent.shape[1:]))
        self._in_place = maps.come_in_order and len(tensors) == 1
        if self._in_place:
            self.guests = _unpack(self._received, tensors)
            return
        self.guests = [x.new_empty((maps.num_rows, *x.shape[1:])) for x in tensors]
        if len(maps.own_rows):
            for rows, x in zip(self.guests, tensors, strict=True):
                rows.index_copy_(0, maps.own_to_guest, x.index_select(0, maps.own_rows))

    def start(self, way: Way, transport: Transport, where: str) -> Exchange:
        """Starts one leg."""
        into = self._received[way.receive]
        return transport.exchange(self._sent[way.send], way.send_counts, way.receive_counts, where, into)

    def arrive(self, way: Way) -> None:
        """Puts rows of a leg that has arrived where they are computed."""
        if self._in_place:
            return
        parts = _unpack(self._received[way.receive], self.guests)
        for rows, part in zip(self.guests, parts, strict=True):
            rows.index_copy_(0, self._maps.received_to_guest[way.receive], part)


class Homeward:
    """Rows of `guests` on their way back to the layout rows that they belong to."""

    def __init__(self, guests: Sequence[torch.Tensor], maps: QueryMaps) -> None:
        self._guests, self._maps, self._flights = guests, maps, list[Exchange]()
        width = _pack([x[:0] for x in guests])
        self._returned = width.new_empty((len(maps.send_rows), *width.shape[1:]))

    def start(self, way: Way, transport: Transport, where: str) -> None:
        """Starts one leg, whose rows are computed."""
        if self._maps.come_in_order:
            rows = [x[way.receive] for x in self._guests]
        else:
            rows = [x.index_select(0, self._maps.received_to_guest[way.receive]) for x in self._guests]
        into = self._returned[way.send]
        self._flights.append(transport.exchange(_pack(rows), way.receive_counts, way.send_counts, where, into))

    def land(self, homes: Sequence[torch.Tensor]) -> None:
        """Waits for all legs and puts their rows into `homes`."""
        for flight in self._flights:
            flight.wait()
        for part, guest, home in zip(_unpack(self._returned, self._guests), self._guests, homes, strict=True):
            home.index_copy_(0, self._maps.send_rows, part)
            if len(self._maps.own_rows):
                home.index_copy_(0, self._maps.own_rows, guest.index_select(0, self._maps.own_to_guest))


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
