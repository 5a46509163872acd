"""Rosters: connections between trainers and attention servers, opened by both sides for each device that trains.

    trainers                                                server
    write settings, post "open" ──────────────────────────▶ read them
    wait for answers            ◀────────────────────────── write version, host and device, or a refusal
    group of N + S ranks        ◀─── all-to-alls of rows ──▶ group of N + S ranks

Trainers are ranks 0 to N - 1 of the exchanges, servers N to N + S - 1. Integers are gathered among trainers alone.
"""

import os
import socket
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distca_hf.arrays import IntArray
from distca_hf.comm.mailbox import Outbox, open_store, read, write
from distca_hf.comm.orders import CallOrder, Kind, Order, Phase, PlanOrder, shares_of
from distca_hf.comm.rollcall import RollCall
from distca_hf.comm.torch_transport import TorchTransport
from distca_hf.comm.transport import Gather, Transport
from distca_hf.errors import ConfigError, PeerLostError
from distca_hf.torch_private import RowGroup
from distca_hf.version import __version__


# Dtypes of rows; an order carries a number of this list.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RosterSize:
    """Numbers of processes of a roster."""

    trainers: int
    servers: int

    @property
    def ranks(self) -> int:
        """Ranks of the exchanges."""
        return self.trainers + self.servers


class ServedTransport(TorchTransport):
    """Transport of a trainer whose exchanges reach attention servers, too; agreements are those of the trainers.

    Args:
        among_trainers: transport of the trainers alone.
        group: group for rows, over trainers and servers.
        outbox: mailboxes of the servers that this trainer posts to.
        roster: number of the connection.

    Attributes:
        among_trainers: see above; for batches that no server takes part in.
        num_servers: servers behind the trainers.
    """

    def __init__(
        self,
        among_trainers: Transport,
        group: RowGroup,
        rollcall: RollCall,
        device: torch.device,
        outbox: Outbox,
        roster: int,
    ) -> None:
        super().__init__(group, None, rollcall, device, among_trainers.world_size)
        self.among_trainers, self.traffic = among_trainers, among_trainers.traffic
        self.num_servers = group.size() - among_trainers.world_size
        self._outbox, self._roster = outbox, roster
        self._plans = 0
        self._alive: set[int] = set()

    def gather(self, values: Sequence[int], where: str) -> Gather:  # type: ignore[override]
        return self.among_trainers.gather(values, where)

    def order_plan(self, micro_batch: int, num_chunks: int, fingerprint: int, integers: IntArray) -> "PlanOrders":
        """Posts a plan to the servers.

        Args:
            integers: the plan.
        """
        self._plans += 1
        orders = PlanOrders(self, self._plans)
        self._alive.add(self._plans)
        weakref.finalize(orders, self._alive.discard, self._plans)
        plan = PlanOrder(self._plans, min(self._alive.copy()), micro_batch, num_chunks, fingerprint, integers)
        self._outbox.post(Order(Kind.PLAN, self._roster, plan.numbers()))
        return orders

    def order_call(self, call: CallOrder) -> None:
        """Posts an attention call to the servers."""
        self._outbox.post(Order(Kind.CALL, self._roster, call.numbers()))

    def close(self) -> None:
        """Ends the group here and on the servers."""
        if self._groups:
            self._outbox.post(Order(Kind.CLOSE, self._roster, np.zeros(0, dtype=np.int64)))
        super().close()


class PlanOrders:
    """Orders for one plan: its number, and the calls that are made with it. Servers may drop the plan when this object
    is gone on the trainers."""

    def __init__(self, transport: ServedTransport, number: int) -> None:
        self._transport, self._number = transport, number

    def call(
        self, phase: Phase, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor, spec: Sequence[float]
    ) -> None:
        """Posts an attention call on tensors like these.

        Args:
            spec: numbers of an `AttentionSpec`.
        """
        shapes = q_TNH.shape[1], k_TGH.shape[1], q_TNH.shape[2], v_TGV.shape[2]
        self._transport.order_call(CallOrder(self._number, phase, *shapes, DTYPES.index(q_TNH.dtype), tuple(spec)))


def open_served_transport(
    device: torch.device,
    timeout_seconds: float,
    patience_seconds: float,
    among_trainers: Transport,
    num_servers: int,
    settings: Mapping[str, object],
) -> ServedTransport:
    """Opens a transport over all trainers and servers; a collective call of the trainers.

    Args:
        device: where the rows to exchange live.
        timeout_seconds: deadline of every exchange.
        patience_seconds: deadline for all servers to answer.
        among_trainers: transport of the trainers alone.
        settings: of the plugin, for the servers.

    Raises:
        PeerLostError: a server does not answer; names it.
        ConfigError: a server refuses, in its words, or would share the GPU of this trainer.
    """
    # 1. Trainers agree on a number, and write all that servers must know.
    rank, size = among_trainers.rank, RosterSize(among_trainers.world_size, num_servers)
    store = open_store(patience_seconds)
    asked = store.add("rosters", 1) if rank == 0 else 0
    roster = among_trainers.gather([asked], "number of the roster").wait()[0][0]
    here = PrefixStore(f"roster/{roster}", store)
    mine = _place_of(device)
    write(here, f"trainer/{rank}", {**mine, "pid": os.getpid()})
    if rank == 0:
        write(here, "opened", {"version": __version__, "device": device.type, "settings": dict(settings)})
    outbox = Outbox(store, roster, shares_of(num_servers, size.trainers, rank))
    outbox.post(Order(Kind.OPEN, roster, np.zeros(0, dtype=np.int64)))
    # 2. Servers answer before any group is opened: one that refuses does not come to it.
    names = {}
    for server in range(num_servers):
        answer = read(here, f"server/{server}", patience_seconds)
        if answer is None:
            raise PeerLostError(
                f"rank {rank}: attention server {server} did not answer in {patience_seconds:g} s "
                "(timeouts.agreement_seconds); look at its own words above, or for a process that is stopped"
            )
        if "refusal" in answer:
            raise ConfigError(f"rank {rank}: attention server {server} refuses: {answer['refusal']}")
        if mine["gpu"] is not None and answer["gpu"] == mine["gpu"]:
            raise ConfigError(
                f"rank {rank}: attention server {server} would share the GPU {mine['gpu']} of {mine['host']} with "
                "this trainer; launch one process for each GPU, and train on cuda:LOCAL_RANK"
            )
        names[size.trainers + server] = f"attention server {server} on {answer['host']}"
    group, rollcall = _meet(here, rank, size, device, timeout_seconds, names)
    return ServedTransport(among_trainers, group, rollcall, device, outbox, roster)


@dataclass(frozen=True)
class Invitation:
    """A roster that trainers have opened, as a server sees it.

    Attributes:
        device_type: of the rows to exchange.
        settings: of the trainers' plugin.
    """

    store: Store
    device_type: str
    settings: Mapping[str, object]
    version: str

    @classmethod
    def read(cls, store: Store, roster: int, patience_seconds: float) -> "Invitation":
        """Reads the invitation to a roster.

        Raises:
            PeerLostError: trainer 0 did not write it in time.
        """
        here = PrefixStore(f"roster/{roster}", store)
        content = read(here, "opened", patience_seconds)
        if content is None:
            raise PeerLostError(f"trainer 0 did not write the settings of roster {roster} in {patience_seconds:g} s")
        return cls(here, str(content["device"]), cast(dict[str, object], content["settings"]), str(content["version"]))

    def accept(self, server: int, size: RosterSize, device: torch.device, timeout_seconds: float) -> TorchTransport:
        """Answers the trainers, and returns the server's end of the exchanges once all have come."""
        write(self.store, f"server/{server}", {"version": __version__, **_place_of(device)})
        names = {size.trainers + other: f"attention server {other}" for other in range(size.servers)}
        rank = size.trainers + server
        group, rollcall = _meet(self.store, rank, size, device, timeout_seconds, names)
        return TorchTransport(group, None, rollcall, device, size.trainers)

    def refuse(self, server: int, words: str) -> None:
        """Answers that this server cannot take part, and why."""
        write(self.store, f"server/{server}", {"refusal": words})

    def trainers_here(self, size: RosterSize) -> list[int]:
        """Returns the process numbers of the trainers on this host."""
        found = [read(self.store, f"trainer/{rank}", 1.0) for rank in range(size.trainers)]  # written before they met
        return [
            cast(int, place["pid"]) for place in found if place is not None and place["host"] == socket.gethostname()
        ]


def _place_of(device: torch.device) -> dict[str, object]:
    """Returns the host of this process, and a number of its GPU that no other has."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return {"host": socket.gethostname(), "gpu": gpu}


def _meet(
    store: Store,
    rank: int,
    size: RosterSize,
    device: torch.device,
    timeout_seconds: float,
    names: Mapping[int, str],
) -> tuple[RowGroup, RollCall]:
    """Opens the group of all trainers and servers, which torch has in no list: trainers' frameworks see themselves
    alone."""
    timeout = timedelta(seconds=timeout_seconds)
    rollcall = RollCall(store, rank, range(size.ranks), names=names)
    met = PrefixStore("group", store)
    group: RowGroup
    try:
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # see `comm.groups`
            options._timeout = timeout
            group = dist.ProcessGroupNCCL(met, rank, size.ranks, options)
        else:
            group = dist.ProcessGroupGloo(met, rank, size.ranks, timeout)
    except RuntimeError as error:
        missing = "; ".join(rollcall.missing_in_words())
        raise PeerLostError(
            f"rank {rank} waited {timeout_seconds:g} s for all {size.trainers} trainers and {size.servers} attention "
            f"servers to open their group: {missing or 'all still answer'}. Cause: "
            f"{str(error).partition(chr(10))[0][:300]}"
        ) from error
    rollcall.announce_uncaught_errors()
    return group, rollcall
