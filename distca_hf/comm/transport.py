"""Transport: rows and small integers between ranks. The only interface through which data leaves a rank.

An exchange is an uneven all-to-all of rows. It is started, runs beside other work, and is waited for; every rank
starts the same exchanges in the same order. Implementations: `LocalTransport` (one rank), `TorchTransport` (NCCL or
gloo), and for tests `distca_hf.testing.loopback` and `distca_hf.testing.faults`.
"""

import atexit
import ctypes
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from distca_hf.comm import gloo_threads
from distca_hf.comm.rollcall import RollCall
from distca_hf.errors import ConfigError, DistCAError, PeerLostError, StepTimeoutError
from distca_hf.telemetry import get_logger
from distca_hf.torch_private import AllToAllFunction, all_to_all_of


log = get_logger(__name__)

# Exchanges remembered for the error message of the one that fails.
REMEMBERED_EXCHANGES = 64


@dataclass(eq=False, slots=True)
class AllToAll:
    """Rows to exchange, unevenly, between all ranks.

    Attributes:
        rows: `[sum(send_counts), ...]` contiguous, grouped by destination.
        send_counts, receive_counts: `[ranks]` rows to and from each rank.
        where: step, layer and phase, for messages.
        into: `[sum(receive_counts), ...]` contiguous, where received rows are put; new memory if it is not given.
    """

    rows: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]
    where: str
    into: torch.Tensor | None = None

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


@dataclass
class Arrived:
    """An exchange that needs no waiting."""

    rows: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.rows


@dataclass
class Traffic:
    """Counts of all that a transport has moved so far, and signals on which ranks leave.

    Attributes:
        exchanges, bytes_sent, recent: how many exchanges, their bytes to other ranks, and the places of the last ones.
        waited_seconds: how long this rank's host waited for rows and integers of the others. A device that waits
            for rows by itself, as with NCCL, is not seen here.
        leave_signal: number of the signal that this rank got, 0 if none. All later agreements carry it.
        leaving: ranks that got a signal, and which; the same on all ranks after the same agreement.
    """

    exchanges: int = 0
    bytes_sent: int = 0
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_EXCHANGES))
    waited_seconds: float = 0.0
    leave_signal: int = 0
    leaving: dict[int, int] = field(default_factory=dict)

    def count(self, asked: "AllToAll", rank: int) -> None:
        """Adds one exchange. Rows a rank sends to itself are not traffic."""
        self.exchanges += 1
        self.bytes_sent += asked.rows.nbytes
        if stays := asked.send_counts[rank]:
            self.bytes_sent -= stays * asked.row_bytes
        self.recent.append(asked.where)

    def wait_for(self, work: dist.Work) -> None:
        """Waits for other ranks, and counts the time."""
        began = time.perf_counter()
        try:
            work.wait()
        finally:
            self.waited_seconds += time.perf_counter() - began


class Exchange(Protocol):
    """Rows on their way."""

    def wait(self) -> torch.Tensor:
        """Rows received from all ranks, grouped by source.

        Raises:
            PeerLostError, StepTimeoutError: the exchange failed; names the ranks and the place.
        """
        ...


class Gather(Protocol):
    """Integers on their way."""

    def wait(self) -> list[list[int]]:
        """Returns the integers of every rank."""
        ...


class Transport(Protocol):
    """Moves rows and integers between ranks."""

    rank: int
    world_size: int
    traffic: Traffic

    def exchange(self, asked: AllToAll) -> Exchange:
        """Starts an uneven all-to-all."""
        ...

    def gather(self, values: Sequence[int], where: str) -> Gather:
        """Starts sending a few integers (equally many on all ranks) to every rank."""
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
    """One rank: all that it sends, it sends to itself."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.traffic = 0, 1, Traffic()

    def exchange(self, asked: AllToAll) -> Arrived:
        self.traffic.count(asked, self.rank)
        return asked.arrived(asked.rows)

    def gather(self, values: Sequence[int], where: str) -> Gathered:
        return Gathered([list(values)])

    def close(self) -> None:
        """Does nothing: there is no group."""


class TorchTransport:
    """Exchanges over a `torch.distributed` group (NCCL or gloo), integers over a gloo group beside it.

    Args:
        data_group: group for rows.
        control_group: gloo group for integers.
        rollcall: finds out who was lost when one of the groups fails.
        device: where the rows live.
    """

    def __init__(
        self,
        data_group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
        rollcall: RollCall,
        device: torch.device,
    ) -> None:
        self.rank = dist.get_rank(data_group)
        self.world_size = dist.get_world_size(data_group)
        self.traffic = Traffic()
        self._all_to_all: AllToAllFunction | None = all_to_all_of(data_group, device)
        self._control_group: dist.ProcessGroup | None = control_group
        self._rollcall = rollcall
        self._groups = [data_group, control_group]
        self._under_way: set[dist.Work] = set()
        atexit.register(self.at_exit)

    def exchange(self, asked: AllToAll) -> "TorchExchange":
        self._check_open(asked.where)
        assert self._all_to_all is not None
        received = asked.room()
        self.traffic.count(asked, self.rank)
        try:
            work = self._all_to_all(received, asked.rows, asked.receive_counts, asked.send_counts)
        except RuntimeError as error:
            raise self.failure(error, asked.where) from error
        self._note(work)
        return TorchExchange(self, work, asked.where, time.monotonic(), asked.rows, received)

    def gather(self, values: Sequence[int], where: str) -> "TorchGather":
        self._check_open(where)
        mine = torch.tensor(values, dtype=torch.int64)
        theirs = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            work = dist.all_gather(theirs, mine, group=self._control_group, async_op=True)
        except RuntimeError as error:
            raise self.failure(error, where) from error
        self._note(work)
        return TorchGather(self, work, where, time.monotonic(), theirs)

    def _check_open(self, where: str) -> None:
        if not self._groups:
            raise ConfigError(
                f"rank {self.rank}, {where}: the plugin was closed; make another one, and enable the model with it"
            )

    def _note(self, work: dist.Work) -> None:
        """Notes an operation that is under way. Nobody waits for some: agreements of passes without backward."""
        if len(self._under_way) >= REMEMBERED_EXCHANGES:
            self._under_way = {earlier for earlier in self._under_way if not earlier.is_completed()}
        self._under_way.add(work)

    def wait_for(self, work: dist.Work, where: str, began: float) -> None:
        """Waits for an operation.

        Raises:
            PeerLostError, StepTimeoutError: it failed; names the ranks and the place.
        """
        try:
            self.traffic.wait_for(work)
        except RuntimeError as error:
            raise self.failure(error, where, began) from error
        finally:
            self._under_way.discard(work)

    def close(self) -> None:
        """Ends both groups, and joins their threads unless an operation is still under way."""
        atexit.unregister(self.at_exit)
        self._end(self._groups)
        self._rollcall.be_silent()

    def at_exit(self) -> None:
        """Ends groups of gloo before the interpreter ends, which their threads need to the last.

        NCCL's group stays: to end it may wait for a GPU.
        """
        groups = [group for group in self._groups if group.name() == "gloo"]
        if not self._is_at_rest():
            for group in groups:  # one reference more: no destructor shall join threads that wait for other ranks
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._end(groups)
        gloo_threads.let_rest()

    def _is_at_rest(self) -> bool:
        return all(work.is_completed() for work in self._under_way)

    def _end(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Takes groups from torch's list and drops them. The last reference to a group joins its threads."""
        for group in groups:
            with suppress(ValueError):  # all groups were ended before
                dist.destroy_process_group(group)
        self._groups = []
        if self._is_at_rest():
            self._all_to_all = self._control_group = None

    def failure(self, error: RuntimeError, where: str, began: float | None = None) -> DistCAError:
        """Returns the error to raise for a failed group operation: who is gone, as far as can be found out."""
        missing = self._rollcall.missing(0.0 if began is None else time.monotonic() - began)
        recent = "; ".join(list(self.traffic.recent)[-3:]) or "none"
        told = "; ".join(f"rank {rank} {words}" for rank, words in missing.items()) or "all ranks still answer"
        cause = str(error).partition("\n")[0][:300] or type(error).__name__
        message = f"rank {self.rank}, {where}: {told}. Last exchanges: {recent}. Cause: {cause}"
        if "timed out" in str(error).lower():
            return StepTimeoutError(
                f"{message}. Deadlines are exchange_timeout_seconds and agreement_timeout_seconds."
            )
        return PeerLostError(message)


@dataclass(eq=False, slots=True)
class TorchExchange:
    """An all-to-all under way. Keeps the sent rows alive until they have left."""

    transport: TorchTransport
    work: dist.Work
    where: str
    began: float
    sent: torch.Tensor
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.transport.wait_for(self.work, self.where, self.began)
        return self.received


@dataclass
class TorchGather:
    """An all-gather of integers under way."""

    transport: TorchTransport
    work: dist.Work
    where: str
    began: float
    received: list[torch.Tensor]

    def wait(self) -> list[list[int]]:
        self.transport.wait_for(self.work, self.where, self.began)
        return [values.tolist() for values in self.received]
