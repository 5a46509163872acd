"""Combine: gradients of keys and values travel home and are summed there, in max(fp32, their dtype) and in a fixed
order: own calls, own rows of the store, then leg by leg the servers by rank.

All tensors are `[rows, ...]`, rows as in `planning.ranges`.
"""

import torch

from distca_hf.comm.transport import Exchange, Transport
from distca_hf.kernels.sum_rows import add_rows
from distca_hf.runtime.maps import LegMaps, Maps
from distca_hf.runtime.store import StoreGradients, apart, row_width


class GradientFlight:
    """Gradients of received keys and values on their way home."""

    def __init__(self, gradients: StoreGradients, k: torch.Tensor, v: torch.Tensor, maps: Maps) -> None:
        self._gradients, self._maps = gradients, maps
        self._flights: list[Exchange] = []
        self._returned = k.new_empty((len(maps.send_rows), row_width(k, v)))

    def start(self, leg: LegMaps, transport: Transport, where: str) -> None:
        """Starts one leg, whose gradients are complete."""
        if self._maps.exchanges:
            rows = self._gradients.travelling(leg.keys.receive)
            asked = leg.keys.back(rows, self._returned, f"{where}, key gradients")
            self._flights.append(transport.exchange(asked))

    def land(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Waits for all legs, and adds to the gradients of own rows what the store and other servers contributed."""
        for flight in self._flights:
            flight.wait()
        total = self._gradients.total
        for gradient, own, part in zip((dk, dv), (total.k, total.v), apart(self._returned, dk, dv), strict=True):
            add_rows(gradient.flatten(1), own.flatten(1), part.flatten(1), self._maps.sums)
