"""Guests: queries travel to the servers that compute them, and what becomes of them travels back home, leg by leg.

Tensors whose rows go the same way travel side by side, as bytes: outputs are in the dtype of the model, log-sum-exps
in fp32. Rows that stay are not touched.

Shape legend in `kernels.interface`; all tensors are `[rows, ...]`, rows as in `planning.ranges`.
"""

import math
from collections.abc import Sequence

import torch

from distca_hf.comm.transport import Exchange, Transport
from distca_hf.kernels.copy_rows import copy_rows
from distca_hf.runtime.maps import QueryMaps, Way
from distca_hf.runtime.views import some_rows


class Outward:
    """Rows of layout tensors on their way to where their queries are computed.

    Attributes:
        tensors: `[guest rows, ...]` for each of the tensors, rows of this rank's own tasks among them. Those of a leg
            are there once it has arrived.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], moves: QueryMaps) -> None:
        self._moves = moves
        self._flights: list[Exchange] = []
        self._sent = _pack([x.index_select(0, moves.send_rows) for x in tensors])
        self._received = self._sent.new_empty((len(moves.received_to_guest), *self._sent.shape[1:]))
        self._in_place = moves.come_in_order and len(tensors) == 1
        if self._in_place:
            self.tensors = _unpack(self._received, tensors)
            return
        self.tensors = [x.new_empty((moves.num_rows, *x.shape[1:])) for x in tensors]
        if len(moves.own_rows):
            for x, rows in zip(tensors, self.tensors, strict=True):
                copy_rows((x,), moves.own_rows, (rows,), moves.own_to_guest)

    def start(self, way: Way, transport: Transport, where: str) -> None:
        """Starts one leg."""
        asked = way.out(self._sent, self._received, f"{where}, queries")
        self._flights.append(transport.exchange(asked))

    def arrive(self, way: Way) -> None:
        """Waits for the next leg, and puts its rows where they are computed."""
        self._flights.pop(0).wait()
        if self._in_place:
            return
        parts = _unpack(some_rows(self._received, way.receive), self.tensors)
        places = some_rows(self._moves.received_to_guest, way.receive)
        for part, tensor in zip(parts, self.tensors, strict=True):
            copy_rows((part,), None, (tensor,), places)


class Homeward:
    """Rows of guests on their way back to the layout rows that they belong to."""

    def __init__(self, tensors: Sequence[torch.Tensor], moves: QueryMaps) -> None:
        self._tensors, self._moves = tensors, moves
        self._flights: list[Exchange] = []
        like = _pack([x[:0] for x in tensors])
        self._returned = like.new_empty((len(moves.send_rows), *like.shape[1:]))

    def start(self, way: Way, transport: Transport, where: str) -> None:
        """Starts one leg, whose rows are computed."""
        if self._moves.come_in_order:
            rows = [some_rows(x, way.receive) for x in self._tensors]
        else:
            guests = some_rows(self._moves.received_to_guest, way.receive)
            rows = [x.index_select(0, guests) for x in self._tensors]
        asked = way.back(_pack(rows), self._returned, f"{where}, results")
        self._flights.append(transport.exchange(asked))

    def land(self, homes: Sequence[torch.Tensor]) -> None:
        """Waits for all legs and puts their rows into `homes`."""
        for flight in self._flights:
            flight.wait()
        for part, guest, home in zip(_unpack(self._returned, self._tensors), self._tensors, homes, strict=True):
            copy_rows((part,), None, (home,), self._moves.send_rows)
            if len(self._moves.own_rows):
                copy_rows((guest,), self._moves.own_to_guest, (home,), self._moves.own_rows)


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
