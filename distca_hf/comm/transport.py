"""Transport: rows and small integers between ranks. The only interface through which data leaves a rank.

An exchange is an uneven all-to-all of rows. It is started, runs during other work, and is waited for; every rank
starts the same exchanges in the same order.

    LocalTransport       one rank                                        here
    TorchTransport       the ranks of process groups                     comm.torch_transport
    CheckedTransport     another one, with each exchange compared        comm.agreement
    LoopbackTransport, FaultTransport                                    distca_hf.testing
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from distca_hf.comm.grid import Grid, Scope


# Exchanges whose places are remembered for error messages. A transport also notes this many operations under way
# before it looks for ended ones.
REMEMBERED_EXCHANGES = 64


@dataclass(eq=False, slots=True)
class AllToAll:
    """Rows to exchange, unevenly, between all ranks of a scope."""

    rows: torch.Tensor  # `[sum(send_counts), ...]` contiguous, grouped by destination
    # `[ranks]` rows to and from each rank.
    send_counts: list[int]
    receive_counts: list[int]
    where: str  # step, layer and phase, for messages
    into: torch.Tensor | None = None  # `[sum(receive_counts), ...]` contiguous, receives the rows; None for new memory
    scope: Scope = Scope.ROWS  # ranks that share documents, or tensor ranks, whose rows hardly ever leave a node

    @property
    def row_bytes(self) -> int:
        return self.rows.shape[1:].numel() * self.rows.element_size()

    def room(self) -> torch.Tensor:
        """Returns empty room for the received rows."""
        if self.into is not None:
            return self.into
        return self.rows.new_empty((sum(self.receive_counts), *self.rows.shape[1:]))

    def arrived(self, received: torch.Tensor) -> "Arrived":
        """Returns an exchange that needs no waiting, for transports that have the received rows at once."""
        return Arrived(received if self.into is None else self.into.copy_(received))


@dataclass(frozen=True)
class ExchangeSplits:
    """Split sizes of one chunk: its part of all rows that are sent, and of all that are received."""

    send: slice
    receive: slice
    send_counts: list[int]
    receive_counts: list[int]

    def dispatch(self, sent: torch.Tensor, received: torch.Tensor, where: str) -> AllToAll:
        """Returns the all-to-all from the chunk's part of `sent` into its part of `received`."""
        rows, into = _part(sent, self.send), _part(received, self.receive)
        return AllToAll(rows, self.send_counts, self.receive_counts, where, into)

    def combine(self, rows: torch.Tensor, returned: torch.Tensor, where: str) -> AllToAll:
        """Returns the all-to-all that answers `dispatch`: from `rows` into the chunk's part of `returned`."""
        return AllToAll(rows, self.receive_counts, self.send_counts, where, _part(returned, self.send))


def _part(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns `x[rows]`, or `x` itself if these are all rows: views cost the host."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else x[rows]


@dataclass
class Arrived:
    """An exchange that needs no waiting."""

    rows: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.rows


@dataclass
class Traffic:
    """Counts of all that a transport has moved so far, and signals on which ranks leave."""

    exchanges: int = 0
    bytes_sent: int = 0  # bytes that exchanges sent to other ranks that share documents
    passes: int = 0  # forward passes of models that have begun; numbers passes alike on all ranks
    # Places of the last exchanges.
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_EXCHANGES))
    # How long this rank's host waited for rows and integers of other ranks. Does not include waits of the device
    # itself, as with NCCL.
    waited_seconds: float = 0.0
    leave_signal: int = 0  # number of the signal that this rank got, 0 if none; all later agreements carry it
    # The signal of each rank of the job that got one; the same on all ranks after the same agreement.
    leaving: dict[int, int] = field(default_factory=dict)

    def count(self, asked: "AllToAll", rank: int) -> None:
        """Adds one exchange. Rows that a rank sends to itself are not traffic."""
        self.exchanges += 1
        self.recent.append(asked.where)
        if asked.scope is Scope.ROWS:
            self.bytes_sent += asked.rows.nbytes - asked.send_counts[rank] * asked.row_bytes

    def wait_for(self, work: dist.Work) -> None:
        """Waits for other ranks, and counts the time."""
        began = time.perf_counter()
        try:
            work.wait()
        finally:
            self.waited_seconds += time.perf_counter() - began

    def has_ended(self, work: dist.Work, within: timedelta) -> bool:
        """Waits for other ranks for a while, and returns whether an operation of gloo has ended. Raises RuntimeError
        if it has failed."""
        began = time.perf_counter()
        try:
            work.wait(within)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it ended meanwhile, or has failed
        finally:
            self.waited_seconds += time.perf_counter() - began
        return True


class Exchange(Protocol):
    """Rows under way."""

    def wait(self) -> torch.Tensor:
        """Returns the rows received from all ranks, grouped by source. Raises PeerLostError or StepTimeoutError if the
        exchange failed; names the ranks and the place."""
        ...


class Gather(Protocol):
    """Integers under way."""

    def wait(self) -> list[list[int]]:
        """Returns the integers of every rank of the scope, in the order of `Grid.members`."""
        ...


class Transport(Protocol):
    """Moves rows and integers between ranks."""

    # Number of this rank among the ranks that share documents, and their count.
    rank: int
    world_size: int
    grid: Grid
    traffic: Traffic

    def exchange(self, asked: AllToAll) -> Exchange:
        """Starts an uneven all-to-all among the ranks of its scope."""
        ...

    def gather(self, values: Sequence[int], where: str, scope: Scope = Scope.ROWS) -> Gather:
        """Starts sending a few integers (the same number on all ranks) to every rank of a scope."""
        ...

    def close(self) -> None:
        """Ends the connection; exchanges and gathers after it fail."""
        ...


@dataclass
class Gathered:
    """A gather that needs no waiting."""

    values: list[list[int]]

    def wait(self) -> list[list[int]]:
        return self.values


class LocalTransport:
    """Transport of a single rank, which sends everything to itself."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.traffic = 0, 1, Traffic()
        self.grid = Grid.flat(range(1), 0)

    def exchange(self, asked: AllToAll) -> Arrived:
        self.traffic.count(asked, self.rank)
        return asked.arrived(asked.rows)

    def gather(self, values: Sequence[int], where: str, scope: Scope = Scope.ROWS) -> Gathered:
        return Gathered([list(values)])

    def close(self) -> None:
        """Does nothing: no group exists."""
