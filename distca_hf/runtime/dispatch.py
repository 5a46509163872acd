"""Dispatch: keys and values travel to the servers that need them.

All tensors are `[rows, ...]`, rows as in `planning.ranges`.
"""

import torch

from distca_hf.comm.transport import Exchange, Transport
from distca_hf.runtime.maps import LegMaps, Maps
from distca_hf.runtime.store import Store, row_width, side_by_side


class KeyFlight:
    """Keys and values on their way to the servers.

    Args:
        travels: whether any do, on all ranks alike; otherwise there is nothing to receive.
        received: what they brought before; then they stay, and what came is put where it is read once more.

    Attributes:
        travels: whether keys are sent now.
        received: `[received rows, G * H + G * V]`; a leg's rows are there once it has arrived.
    """

    def __init__(
        self, k: torch.Tensor, v: torch.Tensor, maps: Maps, *, travels: bool, received: torch.Tensor | None = None
    ) -> None:
        self.travels, self._maps = travels and received is None, maps
        self._flights: list[Exchange] = []
        self._brings_rows = travels
        if received is None:
            received = k.new_empty((maps.received_to_store.shape[0] if travels else 0, row_width(k, v)))
        self.received = received
        if self.travels:
            self._sent = side_by_side(k, v, maps.send_rows)

    def start(self, leg: LegMaps, transport: Transport, where: str) -> None:
        """Starts one leg."""
        if self.travels:
            self._flights.append(transport.exchange(leg.keys.out(self._sent, self.received, f"{where}, keys")))

    def arrive(self, leg: LegMaps, store: Store) -> None:
        """Waits for the next leg, and puts its rows where they are read."""
        if self.travels:
            self._flights.pop(0).wait()
        if self._brings_rows:
            store.arrive(self.received, leg.keys.receive, self._maps)
