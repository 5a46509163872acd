"""Memberships: connections between trainers and participating attention servers, opened by both sides.

    trainers                                                server
    write settings and members, post "open" ──────────────▶ read them
    wait for answers            ◀────────────────────────── write version, host and device, or a refusal
    group of N + S ranks        ◀─── all-to-alls of rows ──▶ group of N + S ranks

Trainers are ranks 0 to N - 1 of the exchanges, followed by servers in the order of the members. When a server is lost
or joins, a new membership is opened, with another number and another group.

Groups for rows may lose members. Torch has them in no list, so frameworks see only the trainers. The host waits for
gloo's exchanges, in small steps. NCCL's exchanges run on the GPU: if a member is lost, their kernels wait forever, and
so does everything that is launched later. The group is therefore aborted: its kernels end in a fraction of a second
with invalid rows, and the GPU goes on.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distca_hf.comm.grid import Grid, Scope
from distca_hf.comm.rollcall import RollCall
from distca_hf.comm.torch_transport import TorchExchange, TorchTransport
from distca_hf.comm.transport import AllToAll, Traffic
from distca_hf.errors import ConfigError, DistCAError, PeerLostError, ServerLostError, first_line
from distca_hf.servers.job_store import JobStore
from distca_hf.torch_private import RowGroup, abort_group, all_to_all_of, connect_group, nccl_errors_end_no_process
from distca_hf.version import __version__


# Seconds between two looks at an awaited exchange of gloo, at first and at most. A stopped server ends no exchange, so
# the waiting rank must look for lost members.
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 2e-5, 1e-3
# Part of a server's free memory for rows that it keeps until backward. The rest is for rows under way, and for
# gradients of one layer.
KEPT_SHARE = 0.5
# Longest time that a thread that aborts a group of NCCL waits for another one that starts an exchange. Starting may
# itself wait for a GPU that waits for a lost member.
START_SECONDS = 1.0
# Longest time for ranks that have answered to connect with each other, over gloo, and over NCCL, which prepares more.
MEET_SECONDS, NCCL_MEET_SECONDS = 10.0, 60.0
# Torch's own deadline for NCCL's exchanges: none. Heartbeats reveal a lost member, and `heartbeats.StreamProgress` an
# exchange that does not end.
NO_DEADLINE = timedelta(days=365)


class Member(NamedTuple):
    """An attention server in a membership: its number, and how often it was started before."""

    server: int
    restarts: int

    def has_answered(self, here: JobStore) -> bool:
        """Returns whether it has answered the invitation in the store of a membership."""
        return bool(here.get(f"server/{self.server}"))


def agreed(rows: Sequence[Sequence[int]]) -> tuple[Member, ...]:
    """Returns the servers that all trainers see in the same state. A trainer's row has a flag, then the starts of each
    server."""
    starts = zip(*(row[1:] for row in rows), strict=True)
    return tuple(Member(server, seen[0] - 1) for server, seen in enumerate(starts) if seen[0] and len(set(seen)) == 1)


class MembershipTransport(TorchTransport):
    """Exchanges of one membership. A wait ends when a member is lost."""

    def __init__(
        self,
        group: RowGroup,
        rollcall: RollCall,
        device: torch.device,
        grid: Grid,
        lost: Callable[[], str | None],  # returns a message about a lost member, or None
        # Returns whether a lost server costs a step instead of the job: no roll call is made then.
        may_fail: Callable[[], bool],
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(group, {}, rollcall, device, grid, traffic)
        self._ranks = range(group.size())
        self._lost, self._may_fail = lost, may_fail
        self._polls = device.type == "cpu"  # with NCCL the device waits
        self._starting, self._is_aborted = threading.Lock(), False

    def exchange(self, asked: AllToAll) -> TorchExchange:
        """Starts an uneven all-to-all. Raises ServerLostError if it could not be started, or the group was aborted:
        torch would reopen it, and wait."""
        with self._starting:
            if self._is_aborted:
                raise ServerLostError(
                    f"rank {self.rank}, {asked.where}: {self._lost() or 'the membership was given up'}"
                )
            return super().exchange(asked)

    def abort(self) -> None:
        """Ends all exchanges on the GPU, from any thread; their rows are invalid. Does nothing over gloo."""
        if self._polls or self._is_aborted:
            return
        self._is_aborted = True
        held = self._starting.acquire(timeout=START_SECONDS)
        try:
            for group in self._groups:
                if group.name() == "nccl":
                    abort_group(group)
        finally:
            if held:
                self._starting.release()

    def close(self) -> None:
        """Ends the group. Aborts a group of NCCL: otherwise its memory would not be freed."""
        self.abort()
        super().close()

    def members(self, scope: Scope) -> Sequence[int]:
        """Returns all ranks of the membership, because attention servers exchange rows, too."""
        return self._ranks

    def wait_for(
        self, work: dist.Work, where: str, began: float, scope: Scope = Scope.ROWS, of_rows: bool = True
    ) -> None:
        """Waits for an operation. Raises ServerLostError if it failed, or a member is lost; names the member and the
        place."""
        pause = FIRST_LOOK_SECONDS
        while self._polls and not work.is_completed():
            message = self._lost()
            if message is not None:
                raise ServerLostError(f"rank {self.rank}, {where}: {message}")
            time.sleep(pause)
            pause = min(LONGEST_LOOK_SECONDS, 2 * pause)
        super().wait_for(work, where, began, scope, of_rows)

    def failure(
        self, error: RuntimeError, where: str, began: float | None = None, scope: Scope = Scope.ROWS
    ) -> DistCAError:
        """Returns the error to raise for a failed exchange: a ServerLostError unless only trainers were lost."""
        if self._may_fail():
            return ServerLostError(f"rank {self.rank}, {where}: {self._lost() or first_line(error)}")
        message = self._lost()
        known = super().failure(error, where, began, scope)
        if message is not None:
            return ServerLostError(f"{known} Of attention servers: {message}")
        servers = self._rollcall.names.keys()
        only_trainers = known.lost_ranks and servers.isdisjoint(known.lost_ranks)
        return known if only_trainers else ServerLostError(f"{known}")

    @property
    def is_at_rest(self) -> bool:
        """Whether the group can be ended: no exchange is under way, or it can be aborted."""
        return not self._polls or self._is_at_rest()


def place_of(device: torch.device) -> dict[str, object]:
    """Returns the host of this process, a unique number of its GPU, and the GPU's free bytes."""
    gpu, free_bytes = None, None
    if device.type == "cuda":
        gpu, free_bytes = str(torch.cuda.get_device_properties(device).uuid), torch.cuda.mem_get_info(device)[0]
    return {"host": socket.gethostname(), "gpu": gpu, "free_bytes": free_bytes}


def membership_store(store: JobStore, membership: int) -> JobStore:
    """Returns the part of the job's store that belongs to a membership."""
    return store.part(f"membership/{membership}")


def invite(
    here: JobStore, rank: int, members: Sequence[Member], device: torch.device, settings: Mapping[str, object]
) -> None:
    """Writes what servers must know about a membership to its part of the store. Every trainer calls this."""
    here.write(f"trainer/{rank}", {**place_of(device), "pid": os.getpid()})
    if rank == 0:
        opened = {"members": [list(member) for member in members], "device": device.type, "settings": dict(settings)}
        here.write("opened", {"version": __version__, **opened})


def wait_for_answers(
    here: JobStore, rank: int, members: Sequence[Member], device: torch.device, patience_seconds: float
) -> tuple[dict[int, str], float]:
    """Returns names of the servers for messages, by number, and the bytes that rows may take on each of them until
    backward.

    Raises:
        PeerLostError: a server does not answer; names it.
        ConfigError: a server refuses (has its message), or would share the GPU of this trainer.
    """
    mine, names, room_bytes = place_of(device), {}, math.inf
    for server, restarts in members:
        answer = here.read(f"server/{server}", patience_seconds)
        if answer is None:
            raise PeerLostError(
                f"rank {rank}: attention server {server} (restart {restarts}) did not answer in {patience_seconds:g} "
                "s; look at its own messages above, or for a process that is stopped"
            )
        if "refusal" in answer:
            raise ConfigError(f"rank {rank}: attention server {server} refuses: {answer['refusal']}")
        if mine["gpu"] is not None and answer["gpu"] == mine["gpu"]:
            raise ConfigError(
                f"rank {rank}: attention server {server} would share the GPU {mine['gpu']} of {mine['host']} with "
                "this trainer; launch one process for each GPU, and train on cuda:LOCAL_RANK"
            )
        names[server] = f"attention server {server} on {answer['host']}"
        if answer["free_bytes"] is not None:
            room_bytes = min(room_bytes, KEPT_SHARE * cast(int, answer["free_bytes"]))
    return names, room_bytes


@dataclass(frozen=True)
class Invitation:
    """A membership that trainers have opened, as a server sees it."""

    store: JobStore
    members: Sequence[Member]
    device_type: str  # device type of the rows to exchange
    settings: Mapping[str, object]
    version: str

    @classmethod
    def read(cls, store: JobStore, membership: int, patience_seconds: float) -> "Invitation":
        """Reads the invitation to a membership. Raises PeerLostError if trainer 0 did not write it in time."""
        here = membership_store(store, membership)
        content = here.read("opened", patience_seconds)
        if content is None:
            raise PeerLostError(
                f"trainer 0 did not write the settings of membership {membership} in {patience_seconds:g} s; look at "
                "its own messages"
            )
        members = [Member(*member) for member in cast(list[list[int]], content["members"])]
        settings = cast(dict[str, object], content["settings"])
        return cls(here, members, str(content["device"]), settings, str(content["version"]))

    def accept(
        self,
        member: Member,
        num_trainers: int,
        device: torch.device,
        timeout_seconds: float,
        lost: Callable[[], str | None],
    ) -> MembershipTransport:
        """Answers the trainers, and returns the server's end of the exchanges once all ranks have come."""
        self.store.write(f"server/{member.server}", {"version": __version__, **place_of(device)})
        names = {one.server: f"attention server {one.server}" for one in self.members}
        rank = num_trainers + list(self.members).index(member)
        return meet(self.store, rank, num_trainers, self.members, device, timeout_seconds, names, lost, lambda: False)

    def refuse(self, server: int, message: str) -> None:
        """Answers that this server cannot take part, with the reason."""
        self.store.write(f"server/{server}", {"refusal": message})

    def trainers_here(self, num_trainers: int) -> list[int]:
        """Returns the process numbers of the trainers on this host, which they wrote before the group opened."""
        found = filter(None, (self.store.read(f"trainer/{rank}", 1.0) for rank in range(num_trainers)))
        return [cast(int, place["pid"]) for place in found if place["host"] == socket.gethostname()]


def meet(
    here: JobStore,
    rank: int,
    num_trainers: int,
    members: Sequence[Member],
    device: torch.device,
    timeout_seconds: float,
    names: Mapping[int, str],
    lost: Callable[[], str | None],
    may_fail: Callable[[], bool],
    traffic: Traffic | None = None,
) -> MembershipTransport:
    """Opens the group of all trainers and members. Raises PeerLostError if some did not come; names them.

    Args:
        here: part of the store that belongs to the membership.
        rank: of this process in the exchanges.
    """
    num_ranks = num_trainers + len(members)
    by_rank = {num_trainers + place: names[member.server] for place, member in enumerate(members)}
    rollcall = RollCall(here.plain, rank, range(num_ranks), names=by_rank)
    try:
        group = open_row_group(PrefixStore("group", here.plain), rank, num_ranks, device, timeout_seconds)
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {rank} waited in vain for all {num_trainers} trainers and {len(members)} attention "
            f"servers to open their group. Cause: {first_line(error)}"
        ) from error
    rollcall.announce_uncaught_errors(names_lost=False)  # servers are in no collective of other code
    grid = Grid.flat(range(num_trainers), rank)
    return MembershipTransport(group, rollcall, device, grid, lost, may_fail, traffic)


def open_row_group(store: Store, rank: int, num_ranks: int, device: torch.device, timeout_seconds: float) -> RowGroup:
    """Opens a group for rows. A collective call of all its ranks. Raises RuntimeError if some ranks did not come.

    Args:
        store: in which they meet; not used by anything else.
        device: where the rows live; decides between gloo and NCCL, whose group outlives its members.
        timeout_seconds: deadline of an exchange over gloo.
    """
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # as `comm.groups` opens its own
        options._timeout = NO_DEADLINE
        options.config.blocking = 1  # a group that is still connecting refuses its first exchange
        with nccl_errors_end_no_process():
            of_nccl = dist.ProcessGroupNCCL(store, rank, num_ranks, options)
        in_time(lambda: _connect(of_nccl, num_ranks, device), NCCL_MEET_SECONDS, "ranks to connect over NCCL")
        return of_nccl
    timeout = timedelta(seconds=timeout_seconds)
    # All have just answered. With the full timeout, one that is lost meanwhile would be waited for that long.
    group = dist.ProcessGroupGloo(store, rank, num_ranks, min(timeout, timedelta(seconds=MEET_SECONDS)))
    group.set_timeout(timeout)
    return group


def _connect(group: RowGroup, num_ranks: int, device: torch.device) -> None:
    """Connects all ranks, and exchanges one element between any two: NCCL connects a pair in its first exchange."""
    with torch.cuda.device(device):
        connect_group(group, device)
        rows, each = torch.zeros(num_ranks, device=device), [1] * num_ranks
        all_to_all_of(group, device)(torch.empty_like(rows), rows, each, each).wait()
        torch.cuda.current_stream(device).synchronize()


def in_time(call: Callable[[], None], seconds: float, of: str) -> None:
    """Makes a call that may never return, in a thread that is then abandoned. Raises the call's own errors. Raises
    RuntimeError if it did not return in time."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="distca-connect", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise RuntimeError(f"waited {seconds:g} s for {of}")
    if errors:
        raise errors[0]
