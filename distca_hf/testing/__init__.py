"""Testing, here and in projects that build on distca_hf: ranks in one process, exact attention, faults on request.

**Loopback**: N ranks as threads of one process. The same code runs as over a network, without sockets or processes.

`attend_documents` is exact attention over whole documents, to compare results of ranks with. `rows_of_rank` maps its
rows to a rank's.

**Faults**: a transport that raises, stalls, is killed, or lets another exchange overtake a chosen one.

**Notes**: a transport that says when its exchanges start and are waited for.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Generic, Literal, TypeVar

import torch

from distca_hf.comm.grid import Grid, Scope
from distca_hf.comm.transport import AllToAll, Exchange, Gather, Traffic, Transport
from distca_hf.errors import PeerLostError
from distca_hf.layout import Layout


Result = TypeVar("Result")
Value = TypeVar("Value")


class LoopbackWorld:
    """Meeting point of the ranks. Each meeting passes one value from every rank of a scope to every rank of it.

    Args:
        shape: stages, data ranks and tensor ranks.
    """

    def __init__(self, shape: tuple[int, int, int], timeout_seconds: float = 300.0) -> None:
        self.grids = [Grid(tuple(range(prod(shape))), shape, rank) for rank in range(prod(shape))]
        sets = {ranks for scope in Scope for ranks in self.grids[0].sets_of(scope)}
        self._barriers = {ranks: threading.Barrier(len(ranks)) for ranks in sets}
        self._values: dict[tuple[int, ...], dict[int, Any]] = {ranks: {} for ranks in sets}  # of the present meeting
        self._timeout_seconds = timeout_seconds

    def meet(self, rank: int, value: Value, where: str, scope: Scope = Scope.ROWS) -> list[Value]:
        """Returns the values of all ranks of a scope, once all have come.

        Raises:
            PeerLostError: some rank did not come.
        """
        ranks = self.grids[rank].members(scope)
        barrier, present = self._barriers[ranks], self._values[ranks]
        try:
            present[rank] = value
            barrier.wait(self._timeout_seconds)
            values = [present[other] for other in ranks]
            barrier.wait(self._timeout_seconds)
        except threading.BrokenBarrierError as error:
            raise PeerLostError(f"rank {rank}, {where}: another rank failed or did not come") from error
        return values

    def leave(self) -> None:
        """Makes all other ranks fail instead of waiting."""
        for barrier in self._barriers.values():
            barrier.abort()


@dataclass
class _Meeting(Generic[Value]):
    """An exchange or gather that happens when it is waited for: threads have nothing to overlap."""

    hold: Callable[[], Value]
    held: list[Value] = field(default_factory=list)

    def wait(self) -> Value:
        if not self.held:
            self.held.append(self.hold())
        return self.held[0]


class LoopbackTransport:
    """Transport of one rank of a loopback world."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.grid, self.traffic = world.grids[rank], Traffic()
        self.rank, self.world_size = self.grid.data_rank, self.grid.shape[1]
        self._world = world

    def exchange(self, asked: AllToAll) -> _Meeting[torch.Tensor]:
        self.traffic.count(asked, self.rank)

        def hold() -> torch.Tensor:
            parts = asked.rows.split(list(asked.send_counts))
            sent = self._world.meet(self.grid.rank, parts, asked.where, asked.scope)
            here = self.rank if asked.scope is Scope.ROWS else self.grid.tensor_rank
            arrived = [parts[here] for parts in sent]
            counts = [len(part) for part in arrived]
            if counts != list(asked.receive_counts):
                raise AssertionError(
                    f"{self.grid.name}, {asked.where}: received {counts} rows, expected {list(asked.receive_counts)}"
                )
            return asked.arrived(torch.cat(arrived)).wait()

        return _Meeting(hold)

    def gather(self, values: Sequence[int], where: str, scope: Scope = Scope.ROWS) -> _Meeting[list[list[int]]]:
        return _Meeting(lambda: self._world.meet(self.grid.rank, list(values), where, scope))

    def close(self) -> None:
        """Does nothing: the world ends with its threads."""


def run_ranks(
    num_ranks: int,
    body: Callable[[LoopbackTransport], Result],
    timeout_seconds: float = 300.0,
    tensor_ranks: int = 1,
    stages: int = 1,
) -> list[Result]:
    """Runs `body` once per rank, each in a thread, and returns the results by rank.

    Args:
        num_ranks: data ranks of a stage.
        tensor_ranks: ranks that hold the tokens of one data rank; they are next to each other.
        stages: of a pipeline, one after the other.

    Raises:
        Exception: the first error by rank that is not only a consequence of another rank's.
    """
    world = LoopbackWorld((stages, num_ranks, tensor_ranks), timeout_seconds)

    def run(rank: int) -> Result:
        try:
            return body(LoopbackTransport(world, rank))
        except BaseException:
            world.leave()
            raise

    with ThreadPoolExecutor(len(world.grids)) as pool:
        futures = [pool.submit(run, rank) for rank in range(len(world.grids))]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, PeerLostError))  # the first of equals
    return [future.result() for future in futures]


def attend_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    document_tokens: Sequence[int],
    scale: float,
    window_tokens: int | None = None,
    softcap: float = 0.0,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns causal attention of each document by itself, by definition, with gradients from autograd.

    Args:
        q, k, v: `[tokens, N, H]`, `[tokens, G, H]`, `[tokens, G, V]`; documents one after the other.
        window_tokens: keys that a token attends to, including its own; None for all before it.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them unchanged.
        sinks_N: one more score for each head, without a value; None without sinks.
    """
    shared = q.shape[1] // k.shape[1]
    outputs = []
    start = 0
    for tokens in document_tokens:
        rows = slice(start, start + tokens)
        keys, values = k[rows].repeat_interleave(shared, dim=1), v[rows].repeat_interleave(shared, dim=1)
        scores = torch.einsum("tnh,snh->nts", q[rows], keys) * scale
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
        if window_tokens is not None:
            seen = seen.triu(1 - window_tokens)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks_N is not None:
            scores = torch.cat([scores, sinks_N[:, None, None].expand(-1, tokens, 1)], dim=2)
        outputs.append(torch.einsum("nts,snv->tnv", scores.softmax(-1)[:, :, :tokens], values))
        start += tokens
    return torch.cat(outputs)


def rows_of_rank(layout: Layout, rank: int) -> torch.Tensor:
    """Returns `[rank's tokens]` indices of the rank's tokens in a row of all documents, one after the other without
    padding."""
    first = [0, *torch.from_numpy(layout.document_tokens).cumsum(0).tolist()]
    parts = [
        torch.arange(first[document] + start, first[document] + stop) for document, start, stop in layout.held_by(rank)
    ]
    return torch.cat([*parts, torch.zeros(0, dtype=torch.int64)]).to(torch.int64)


@dataclass(frozen=True)
class Fault:
    """A fault, and the exchange or gather at which it happens (each counted from 0 per transport).

    Attributes:
        at: number of the exchange or gather.
        action: called before it starts; may raise, sleep or kill, or return to go on. `swap` lets the next exchange
            start first.
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

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

    def gather(self, values: Sequence[int], where: str, scope: Scope = Scope.ROWS) -> Gather:
        self._run_planned("gather")
        return self._inner.gather(values, where, scope)

    def _run_planned(self, of: Literal["exchange", "gather"]) -> bool:
        """Runs the faults that are planned for this one; returns whether the next one may overtake it."""
        number, self._started[of] = self._started[of], self._started[of] + 1
        actions = [fault.action for fault in self._faults if (fault.of, fault.at) == (of, number)]
        for action in actions:
            action()
        return swap in actions


class NotedTransport:
    """Reports when exchanges of another transport start and are waited for.

    Args:
        inner: the other transport.
        started, waited: called with the arguments of an exchange, before it starts and before it is waited for.
    """

    def __init__(
        self, inner: Transport, started: Callable[[AllToAll], None], waited: Callable[[AllToAll], None]
    ) -> None:
        self._inner, self._started, self._waited = inner, started, waited

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exchange(self, asked: AllToAll) -> "NotedExchange":
        """Starts an exchange."""
        self._started(asked)
        return NotedExchange(self._inner.exchange(asked), partial(self._waited, asked))


@dataclass
class NotedExchange:
    """An exchange of a `NotedTransport`."""

    inner: Exchange
    waited: Callable[[], None]

    def wait(self) -> torch.Tensor:
        """Returns the rows received from all ranks, after reporting that they are waited for."""
        self.waited()
        return self.inner.wait()
