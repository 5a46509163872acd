"""Faults on request: a transport that raises, stalls or is killed at a chosen exchange."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from distca_hf.comm.transport import Exchange, Gather, Traffic, Transport


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and at which exchange or gather (each counted from 0 per transport).

    Attributes:
        at: number of the exchange or gather.
        action: called before it starts; it may raise, sleep or kill, and returns normally to go on.
        of: what is counted.
    """

    at: int
    action: Callable[[], None]
    of: Literal["exchange", "gather"] = "exchange"


def stall(seconds: float) -> Callable[[], None]:
    """An action that sleeps."""
    return lambda: time.sleep(seconds)


def fail(error: Exception) -> Callable[[], None]:
    """An action that raises."""

    def action() -> None:
        raise error

    return action


class FaultTransport:
    """Passes everything on to another transport, after the faults planned for it."""

    def __init__(self, inner: Transport, faults: Sequence[Fault]) -> None:
        self._inner = inner
        self._faults = list(faults)
        self._started = {"exchange": 0, "gather": 0}

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    @property
    def traffic(self) -> Traffic:
        return self._inner.traffic

    def exchange(
        self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], where: str
    ) -> Exchange:
        self._fail_if_planned("exchange")
        return self._inner.exchange(rows, send_counts, receive_counts, where)

    def gather(self, values: Sequence[int], where: str) -> Gather:
        self._fail_if_planned("gather")
        return self._inner.gather(values, where)

    def _fail_if_planned(self, of: Literal["exchange", "gather"]) -> None:
        number, self._started[of] = self._started[of], self._started[of] + 1
        for fault in self._faults:
            if (fault.of, fault.at) == (of, number):
                fault.action()
