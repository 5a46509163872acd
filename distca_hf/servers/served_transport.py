"""Served transport: a trainer's transport whose exchanges reach attention servers, and which survives their loss.

    an optimizer step    begin ── exchanges ── end: vote
                                    │            ├─ all well ───────────── the step counts
    a server is lost ───────────────┘            └─ failed: new membership ── the step runs again

Outside a step, a lost server ends the job. Inside, the step fails: attention gives zeros and exchanges nothing until
the end of the step, which keeps the collectives of FSDP and ZeRO matched. The trainer that notices a loss writes it to
the launcher's store, which the others read.

Over gloo, the thread that waits for an exchange notices the loss. Over NCCL, the GPU waits, and with it any thread
that needs a number from it. The thread that looks at heartbeats then fails the step, and aborts the exchanges.
"""

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from distca_hf.arrays import IntArray
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import AllToAll, Exchange, Gather, Transport
from distca_hf.errors import DistCAError, PeerLostError, ServerLostError, StepTimeoutError
from distca_hf.planning.plan import ExtraRanks
from distca_hf.servers.heartbeats import StreamProgress, Watch
from distca_hf.servers.job_store import open_store
from distca_hf.servers.memberships import (
    Member,
    MembershipTransport,
    agreed,
    invite,
    meet,
    membership_store,
    wait_for_answers,
)
from distca_hf.servers.orders import Kind, Order, Outbox, PlanOrder, shares_of
from distca_hf.servers.served_plans import Servers
from distca_hf.servers.speeds import ServerSpeeds
from distca_hf.telemetry import get_logger, leave_for_launcher


log = get_logger(__name__)

# Remedy in the message about a server that is lost outside a step.
NO_STEP = "No step can run again here: see plugin.attach and plugin.attempts"
# Numbers of an order that consists of its kind.
NO_NUMBERS: IntArray = np.zeros(0, dtype=np.int64)
# Memberships to try, one after the other with fewer members, before the job ends.
OPENINGS = 5


class ServedTransport:
    """Transport of a trainer with attention servers; agreements are only among the trainers.

    Attributes:
        among_trainers: see above; for batches in which no server takes part.
        extra_ranks: their part in plans; None if no server takes part.
        failed: a message about the server that was lost in this step; None if none was lost.
        in_step: whether an optimizer step that can run again has begun.
        room_bytes: bytes that rows may take on each member until backward.
    """

    def __init__(
        self,
        among_trainers: Transport,  # transport of the trainers only
        device: torch.device,
        all_servers: Servers,  # servers that were launched, whether they are alive or not
        settings: Mapping[str, object],  # the plugin's settings, for the servers
        # Deadlines of an exchange, and for all servers to come at the beginning.
        timeout_seconds: float,
        patience_seconds: float,
        limit_seconds: float,  # a server without a heartbeat for this long is lost
    ) -> None:
        self.among_trainers, self.traffic = among_trainers, among_trainers.traffic
        self.rank, self.world_size, self.grid = among_trainers.rank, among_trainers.world_size, among_trainers.grid
        self.membership, self.servers_lost, self.room_bytes = 0, 0, math.inf
        self.members: tuple[Member, ...] = ()
        self.extra_ranks: ExtraRanks | None = None
        self.failed: str | None = None
        self._device, self._all, self._settings = device, all_servers, settings
        self._timeout_seconds, self._limit_seconds = timeout_seconds, limit_seconds
        self._store = open_store(patience_seconds)
        self._store.check_secret()
        self._watch = Watch(open_store(patience_seconds), all_servers.count, limit_seconds)
        self._wires: MembershipTransport | None = None
        self._retired: list[MembershipTransport] = []
        self._outbox = Outbox(self._store, ())
        self.in_step = self._closed = False
        self.speeds = ServerSpeeds(all_servers, settings.get("server_speed") == 0, device)
        self._plans, self._alive = 0, set[int]()
        self._progress = StreamProgress(device) if device.type == "cuda" else None
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self._end_here)
            self._watch.begin(self._look_at_exchanges)
            self._watch.wait_for_all(self.rank, patience_seconds)
            rows = self.gather(self._watch.starts(), "attention servers").wait()
            self._open(agreed([[1, *row] for row in rows]), patience_seconds)
            if_it_fails.pop_all()

    def exchange(self, asked: AllToAll) -> Exchange:
        """Starts an uneven all-to-all among trainers and members. Raises ServerLostError if a server was lost; inside
        a step that can run again, the step fails."""
        if self._wires is None:
            return self.among_trainers.exchange(asked)
        outside = None if self.in_step else self._progress
        if outside is not None:  # over NCCL, and in no step: the GPU would wait for a lost server forever
            if (lost := self._lost()) is not None:
                raise ServerLostError(f"rank {self.rank}, {asked.where}: {lost}. {NO_STEP}")
            outside.note_start()
        try:
            return ServedExchange(self, self._wires.exchange(asked), outside)
        except (PeerLostError, StepTimeoutError) as error:
            raise self.failure(error) from error

    def gather(self, values: Sequence[int], where: str, scope: Scope = Scope.ROWS) -> Gather:
        return self.among_trainers.gather(values, where, scope)

    def failure(self, error: DistCAError) -> DistCAError:
        """Returns the error to raise for a failed exchange; inside a step that can run again, the step fails."""
        if not self.in_step:
            return error
        self._fail(str(error))
        return ServerLostError(self.failed)

    def _fail(self, message: str) -> None:
        """Fails the step, here and for all trainers."""
        if self.failed is None:
            self.failed = message  # before the abort: rows of an aborted exchange look valid
            self._watch.abandon(self.membership, message)
            log.warning("the step has failed, and runs again: %s", message)
        if (wires := self._wires) is not None:  # read once: another thread may retire them
            wires.abort()

    def _look_at_exchanges(self) -> None:
        """Ends exchanges on the GPU that wait for a lost server. Runs in the thread that looks at heartbeats, and
        calls nothing that may wait for the GPU."""
        if self._progress is None or self._wires is None:
            return
        message, stalled_seconds = self._lost(), self._progress.stalled_seconds()
        if message is None and stalled_seconds > self._timeout_seconds:
            message = (
                f"the GPU has come no further for {stalled_seconds:.0f} s (timeouts.exchange_seconds: "
                f"{self._timeout_seconds:g}), and all attention servers have a heartbeat"
            )
        if message is None:
            return
        place = "".join(list(self.traffic.recent)[-1:])
        message = f"rank {self.rank}, after the start of {place or 'no exchange'}: {message}"
        if self.in_step:
            self._fail(message)
        elif not self._progress.is_at_rest:  # otherwise the next exchange fails, after a checkpoint may be saved
            self._end_process(message)

    def _end_process(self, message: str) -> None:
        """Ends this process: the GPU waits for a lost server. If the wait were aborted instead, invalid numbers could
        get into a checkpoint."""
        message = f"ServerLostError: {message}. {NO_STEP}"
        log.error(message)
        leave_for_launcher(message)
        os._exit(1)

    def begin_step(self) -> None:
        """Begins an optimizer step that can run again: a lost server makes it fail, and does not end the job."""
        self.in_step = True

    def leave_step(self) -> None:
        """Leaves a step that an error ended. If it had failed, attention raises until the next step begins."""
        self.in_step = False

    def end_step(self) -> bool:
        """Ends a step, and returns whether it counts: on all trainers, or on none. A collective call of the trainers.

        Lost servers are left out from now on, and new ones take part.

        Raises:
            PeerLostError: a trainer was lost, or no membership could be opened.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # then all exchanges have ended, or were aborted by a failed step
        if self._progress is not None:
            self._progress.note_rest()
        if self.failed is not None:
            self._watch.wait_for_a_loss(self.members, 2 * self._limit_seconds)
        shown = [int(self.failed is None), *self._watch.starts()]
        rows = self.gather([*shown, *self.speeds.numbers()], "vote on a step").wait()
        counts, members = all(row[0] for row in rows), agreed([row[: len(shown)] for row in rows])
        self.in_step = False
        if counts:
            self._watch.losses.note_step(server for server, _ in self.members)
            self.extra_ranks = self.speeds.note([row[len(shown) :] for row in rows])
        if not counts or members != self.members:
            self._open(members, 4 * self._limit_seconds)
        return counts

    def order_plan(
        self, holder: object, micro_batch: int, num_chunks: int, fingerprint: int, integers: IntArray
    ) -> int:
        """Posts a plan to the members, and returns its number. Members may drop it when `holder` is gone on the
        trainers."""
        self._plans += 1
        self.speeds.note_plan()
        self._alive.add(self._plans)
        weakref.finalize(holder, self._alive.discard, self._plans)
        plan = PlanOrder(self._plans, min(self._alive.copy()), micro_batch, num_chunks, fingerprint, integers)
        self.order(Kind.PLAN, plan.numbers())
        return self._plans

    def order(self, kind: Kind, numbers: IntArray = NO_NUMBERS) -> None:
        self._outbox.post(Order(kind, self.membership, numbers))

    def close(self) -> None:
        """Ends the membership on the servers and here. If the launcher's store is gone, ends it here and raises."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as ends:
            ends.callback(self._end_here)
            self.order(Kind.CLOSE)

    def _end_here(self) -> None:
        """Ends connections and threads of this process."""
        with ExitStack() as ends:
            for wires in (*self._retired, *([] if self._wires is None else [self._wires])):
                ends.callback(wires.close)
            if self._progress is not None:
                ends.callback(self._progress.end)
            ends.callback(self._watch.end)

    def _lost(self) -> str | None:
        """Returns a message about a lost member; None if there is none."""
        if self._watch.is_abandoned(self.membership):
            return "another trainer lost an attention server"
        return self._watch.lost_of(self.members)

    def _open(self, members: tuple[Member, ...], patience_seconds: float) -> None:
        """Opens a membership, with fewer members if some do not come. A collective call of the trainers."""
        problem, earlier = "", self.members if self.membership else members
        for _ in range(OPENINGS):
            self._retire(members)
            members = tuple(member for member in members if not self._watch.losses.is_excluded(member.server))
            if not members and not self._all.trainers_attend:
                raise PeerLostError(
                    f"rank {self.rank}: none of {self._all.count} attention servers is left, and "
                    "trainers_attend=False leaves all attention to them; the last checkpoint is whole: resume with "
                    "servers, or with trainers_attend=True"
                )
            asked = self._store.plain.add("memberships", 1) if self.rank == 0 else 0
            self.membership = self.gather([asked], "number of the membership").wait()[0][0]
            self.members, self.failed = members, None
            self._watch.look_for(self.membership)
            try:
                self._wires, good = (self._connect(patience_seconds) if members else None), 1
            except PeerLostError as error:
                good, problem = 0, str(error)
                self._watch.abandon(self.membership, problem)  # servers that opened it in vain wait for this message
            here = membership_store(self._store, self.membership)
            hang = [] if good else [one.server for one in members if not one.has_answered(here)]
            rows = self.gather([good, *self._watch.starts(hang)], f"membership {self.membership}").wait()
            if all(row[0] for row in rows):
                self.extra_ranks = self.speeds.begin_membership(members, here if self.rank == 0 else None)
                for server, restarts in (member for member in members if member not in earlier):
                    log.info("attention server %d (restart %d) takes part from now on", server, restarts)
                return
            members = agreed(rows)
        raise PeerLostError(
            f"rank {self.rank}: {OPENINGS} memberships of attention servers could not be opened, one after the other; "
            f"the last one with {len(members)} of {self._all.count}: {problem or 'other trainers could not open it'}"
        )

    def _connect(self, patience_seconds: float) -> MembershipTransport:
        """Opens the connections of the present membership."""
        here = membership_store(self._store, self.membership)
        invite(here, self.rank, self.members, self._device, self._settings)
        mine = [self.members[place] for place in shares_of(len(self.members), self.world_size, self.rank)]
        self._outbox = Outbox(self._store, mine)
        self.order(Kind.OPEN)
        names, self.room_bytes = wait_for_answers(here, self.rank, self.members, self._device, patience_seconds)
        self._watch.losses.names |= names
        return meet(
            here,
            self.rank,
            self.world_size,
            self.members,
            self._device,
            self._timeout_seconds,
            names,
            self._lost,
            lambda: self.in_step,
            self.traffic,
        )

    def _retire(self, members: tuple[Member, ...]) -> None:
        """Leaves the present membership. Its group ends once none of its exchanges is under way."""
        for server, restarts in (member for member in self.members if member not in members):
            self.servers_lost += 1
            self._watch.losses.note(server, restarts)
        self._watch.leave(self.membership)
        if self._wires is not None:
            self.order(Kind.CLOSE)
            self._retired.append(self._wires)
            self._wires = None
        for wires in [one for one in self._retired if one.is_at_rest]:
            self._retired.remove(wires)
            wires.close()


class ServedExchange:
    """Rows under way; a lost server may make the step fail. `progress`: progress of the GPU, if the exchange belongs
    to no step."""

    def __init__(self, transport: ServedTransport, exchange: Exchange, progress: StreamProgress | None) -> None:
        self._transport, self._exchange, self._progress = transport, exchange, progress

    def wait(self) -> torch.Tensor:
        try:
            rows = self._exchange.wait()
        except (PeerLostError, StepTimeoutError) as error:
            raise self._transport.failure(error) from error
        if self._progress is not None:
            self._progress.note_wait()
        return rows
