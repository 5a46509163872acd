"""Guests: queries travel to the servers that compute them, and what becomes of them travels back home, leg by leg.

Tensors whose rows go the same way travel side by side, as bytes: outputs are in the dtype of the model, log-sum-exps
in fp32. Rows that stay are not touched.

Shape legend in `kernels.interface`; all tensors are `[rows, ...]`, rows as in `planning.ranges`.
"""

import math
from collections.abc import Sequence

import torch

from distca_hf.comm.transport import Exchange, Transport
from distca_hf.kernels.scatter_rows import scatter_rows
from distca_hf.runtime.maps import LegMaps, Maps


class Outward:
    """Rows of layout tensors on their way to where their queries are computed. If no queries move nothing is sent, on
    all ranks alike, and there are no guests.

    Attributes:
        tensors: `[guest rows, ...]` for each of the tensors, rows of this rank's own tasks among them. Those of a leg
            are there once it has arrived.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], maps: Maps) -> None:
        self._maps, self._flights = maps.queries, list[Exchange]()
        self._in_place = False
        if maps.queries is None:
            self.tensors = [x.new_empty((0, *x.shape[1:])) for x in tensors]
            return
        moves = maps.queries
        self._sent = _pack([x.index_select(0, moves.send_rows) for x in tensors])
        self._received = self._sent.new_empty((len(moves.received_to_guest), *self._sent.shape[1:]))
        self._in_place = moves.come_in_order and len(tensors) == 1
        if self._in_place:
            self.tensors = _unpack(self._received, tensors)
            return
        self.tensors = [x.new_empty((moves.num_rows, *x.shape[1:])) for x in tensors]
        if len(moves.own_rows):
            for rows, x in zip(self.tensors, tensors, strict=True):
                rows.index_copy_(0, moves.own_to_guest, x.index_select(0, moves.own_rows))

    def start(self, leg: LegMaps, transport: Transport, where: str) -> None:
        """Starts one leg."""
        if leg.queries is not None:
            asked = leg.queries.out(self._sent, self._received, f"{where}, queries")
            self._flights.append(transport.exchange(asked))

    def arrive(self, leg: LegMaps) -> None:
        """Waits for the next leg, and puts its rows where they are computed."""
        if leg.queries is None or self._maps is None:
            return
        self._flights.pop(0).wait()
        if self._in_place:
            return
        rows = leg.queries.receive
        parts = _unpack(self._received[rows], self.tensors)
        for tensor, part in zip(self.tensors, parts, strict=True):
            scatter_rows(tensor, self._maps.received_to_guest[rows], part)


class Homeward:
    """Rows of guests on their way back to the layout rows that they belong to."""

    def __init__(self, tensors: Sequence[torch.Tensor], maps: Maps) -> None:
        self._tensors, self._maps, self._flights = tensors, maps.queries, list[Exchange]()
        if maps.queries is not None:
            like = _pack([x[:0] for x in tensors])
            self._returned = like.new_empty((len(maps.queries.send_rows), *like.shape[1:]))

    def start(self, leg: LegMaps, transport: Transport, where: str) -> None:
        """Starts one leg, whose rows are computed."""
        if leg.queries is None or self._maps is None:
            return
        rows_here = leg.queries.receive
        if self._maps.come_in_order:
            rows = [x[rows_here] for x in self._tensors]
        else:
            rows = [x.index_select(0, self._maps.received_to_guest[rows_here]) for x in self._tensors]
        asked = leg.queries.back(_pack(rows), self._returned, f"{where}, results")
        self._flights.append(transport.exchange(asked))

    def land(self, homes: Sequence[torch.Tensor]) -> None:
        """Waits for all legs and puts their rows into `homes`."""
        if self._maps is None:
            return
        for flight in self._flights:
            flight.wait()
        for part, guest, home in zip(_unpack(self._returned, self._tensors), self._tensors, homes, strict=True):
            scatter_rows(home, self._maps.send_rows, part)
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
