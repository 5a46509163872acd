"""Faults on request: a transport that raises, stalls, is killed, or lets another exchange overtake a chosen one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from distca_hf.comm.transport import AllToAll, Exchange, Gather, Traffic, Transport


@dataclass(frozen=True)
class Fault:
    """A fault, and the exchange or gather at which it happens (each counted from 0 per transport).

    Attributes:
        at: number of the exchange or gather.
        action: called before it starts; it may raise, sleep or kill, and returns normally to go on. `swap` lets the
            next exchange start first.
        of: whether exchanges or gathers are counted.
    """

    at: int
    action: Callable[[], None]
    of: Literal["exchange", "gather"] = "exchange"


def stall(seconds: float) -> Callable[[], None]:
    """Returns an action that sleeps."""
    return lambda: time.sleep(seconds)


def fail(error: Exception) -> Callable[[], None]:
    """Returns an action that raises."""

    def action() -> None:
        raise error

    return action


def swap() -> None:
    """Returns the action of reordered messages: an exchange starts after the next one, or when it is waited for."""


@dataclass
class Overtaken:
    """An exchange that has not started yet."""

    begin: Callable[[], Exchange]
    begun: list[Exchange] = field(default_factory=list)

    def start(self) -> None:
        """Starts it, once."""
        if not self.begun:
            self.begun.append(self.begin())

    def wait(self) -> torch.Tensor:
        self.start()
        return self.begun[0].wait()


class FaultTransport:
    """Passes everything on to another transport, after the faults planned for it."""

    def __init__(self, inner: Transport, faults: Sequence[Fault]) -> None:
        self._inner = inner
        self._faults = list(faults)
        self._started = {"exchange": 0, "gather": 0}
        self._overtaken: Overtaken | None = None

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    @property
    def traffic(self) -> Traffic:
        return self._inner.traffic

    def exchange(self, asked: AllToAll) -> Exchange:
        begin = partial(self._inner.exchange, asked)
        if self._run_planned("exchange"):
            self._overtaken = Overtaken(begin)
            return self._overtaken
        exchange = begin()
        if self._overtaken is not None:
            self._overtaken.start()
            self._overtaken = None
        return exchange

    def gather(self, values: Sequence[int], where: str) -> Gather:
        self._run_planned("gather")
        return self._inner.gather(values, where)

    def close(self) -> None:
        """Closes the inner transport."""
        self._inner.close()

    def _run_planned(self, of: Literal["exchange", "gather"]) -> bool:
        """Lets the faults happen that are planned for this one; whether the next one may overtake it."""
        number, self._started[of] = self._started[of], self._started[of] + 1
        actions = [fault.action for fault in self._faults if (fault.of, fault.at) == (of, number)]
        for action in actions:
            action()
        return swap in actions
