"""Heartbeats: attention servers show that they are alive; trainers and servers read which memberships are lost.

    server     beat/<server> = "restarts.count"     ──▶  every trainer: a server silent for too long is lost
               a byte in a pipe                     ──▶  the server's supervisor
    trainer    abandoned/<membership> = message     ──▶  all trainers and servers: they leave its exchanges

Both sides do this in a thread, over a separate connection to the launcher's store. So a hanging training step or
exchange delays no beat, and the thread of the step makes no requests. A server is identified by its number and its
restarts. The process that replaces a lost one has one more restart, and joins the next membership (`Watch.starts`).
Marks in its stream show the progress of a GPU (`StreamProgress`).
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from distca_hf.comm.whereabouts import Repeated
from distca_hf.errors import PeerLostError, first_line
from distca_hf.launched import TRAINERS_GONE
from distca_hf.servers.job_store import JobStore
from distca_hf.servers.memberships import Member
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Seconds between two beats of a server, and between two looks of a trainer.
BEAT_SECONDS, LOOK_SECONDS = 0.5, 0.25
# Seconds between two looks of a trainer that waits for a heartbeat.
WAIT_SECONDS = 0.05
# Times in a row that a server may be lost without a step that counted in between.
MOST_LOSSES = 5
# Seconds between two marks in a stream.
MARK_SECONDS = 1.0
# Longest time between two looks that counts as silence of servers. A trainer that was itself stopped for longer has
# not listened.
LONGEST_LOOK_SECONDS = 1.0


class MembershipWatch(Repeated):
    """A thread that also asks the store which memberships were lost. With several plugins, several are open at once.
    Nothing else uses its connection to the store."""

    def __init__(self, name: str, pause_seconds: float, call: Callable[[], bool], store: JobStore) -> None:
        super().__init__(name, pause_seconds, call)
        self._store = store
        self._open: set[int] = set()
        self._messages: dict[int, str] = {}

    def look_for(self, membership: int) -> None:
        """Makes later looks include this membership."""
        self._open.add(membership)

    def leave(self, membership: int) -> None:
        """Makes later looks ignore a membership."""
        self._open.discard(membership)

    def is_abandoned(self, membership: int) -> bool:
        """Returns whether this process or, as of the last look, a trainer has given up a membership."""
        return membership in self._messages

    def abandon(self, membership: int, message: str) -> None:
        """Gives up a membership, for all trainers and servers. If another trainer was first, its message stays."""
        self._messages.setdefault(membership, message)
        with suppress(RuntimeError):  # the store is gone, and with it the job
            self._messages[membership] = self._store.set_first(_abandoned(membership), message.encode()).decode()

    def _look_for_abandoned(self) -> None:
        """Asks the store. Raises RuntimeError if it is gone."""
        for membership in sorted(self._open):
            if membership not in self._messages and (message := self._store.get(_abandoned(membership))):
                self._messages[membership] = message.decode()


class Heartbeat(MembershipWatch):
    """A server's end: beats, and reads whether trainers have given up a membership.

    Ends the process, with status `TRAINERS_GONE`, if the store or the supervisor is gone. Every beat writes a byte to
    the file descriptor `pipe`; None without a supervisor.
    """

    def __init__(self, store: JobStore, server: int, restarts: int, pipe: int | None) -> None:
        super().__init__("distca-heartbeat", BEAT_SECONDS, self.beat, store)
        self._server, self._restarts, self._pipe = server, restarts, pipe
        self._count = 0

    def beat(self) -> bool:
        self._count += 1
        try:
            self._store.set(_beat(self._server), f"{self._restarts}.{self._count}".encode())
            self._look_for_abandoned()
        except RuntimeError as error:
            self._end_process(f"the launcher's store is gone, and with it the job ({first_line(error)})")
        try:
            if self._pipe is not None:
                os.write(self._pipe, b".")
        except OSError as error:
            self._end_process(f"its supervisor is gone ({error})")
        return True

    def _end_process(self, message: str) -> None:
        """Ends the process, wherever its main thread waits."""
        log.error("attention server %d ends: %s", self._server, message)
        os._exit(TRAINERS_GONE)


@dataclass
class LastBeat:
    """The last beat of a server that a trainer has seen."""

    number: tuple[int, ...] = ()  # restarts and count; empty if there was none
    silent_seconds: float = 0.0  # how long looks have found nothing newer


class Watch(MembershipWatch):
    """A trainer's end: finds out which servers are alive, and which memberships are lost. A server that is silent for
    `limit_seconds` counts as lost."""

    def __init__(self, store: JobStore, num_servers: int, limit_seconds: float) -> None:
        super().__init__("distca-watch", LOOK_SECONDS, self.look, store)
        self._limit_seconds = limit_seconds
        self._keys = [_beat(server) for server in range(num_servers)]
        self._last = [LastBeat() for _ in self._keys]
        self.losses = LostServers()
        self._looked: float | None = None

    def restarts(self, server: int) -> int | None:
        """Returns how often a live server was restarted; None if it was never seen, or is silent for longer than the
        limit."""
        last = self._last[server]
        if not last.number or last.silent_seconds > self._limit_seconds:
            return None
        return last.number[0]

    def silent_seconds(self, server: int) -> float:
        """Returns how long a server has been silent: since its last beat, or since the first look."""
        return self._last[server].silent_seconds

    def look(self) -> bool:
        """Looks once, and returns whether the store is still there. Without it the job ends elsewhere."""
        try:
            if self._looked is None:
                for key in self._keys:  # creates all keys: one request then finds all of them
                    self._store.get(key)
            values = self._store.get_all(self._keys)
            self._look_for_abandoned()
        except RuntimeError:
            return False
        now = time.monotonic()
        passed_seconds = 0.0 if self._looked is None else min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        for server, (value, last) in enumerate(zip(values, self._last, strict=True)):
            number = tuple(map(int, value.split(b"."))) if value else ()
            if number > last.number:  # an older one is a copy that another process has written
                self._last[server] = LastBeat(number)
            else:
                last.silent_seconds += passed_seconds
        return True

    def starts(self, hang: Sequence[int] = ()) -> list[int]:
        """Returns the starts of each server: its restarts plus 1; 0 if it hangs, is lost, or was lost too often."""
        servers = range(len(self._keys))
        out = {*hang, *filter(self.losses.is_excluded, servers)}
        return [
            0 if start is None or server in out else start + 1
            for server, start in enumerate(map(self.restarts, servers))
        ]

    def wait_for_all(self, rank: int, patience_seconds: float) -> None:
        """Waits until all servers have a heartbeat. Raises PeerLostError if some have none at the deadline; names
        them."""
        deadline = time.monotonic() + patience_seconds
        while 0 in (starts := self.starts()) and time.monotonic() < deadline:
            time.sleep(WAIT_SECONDS)
        silent = [str(server) for server, start in enumerate(starts) if not start]
        if silent:
            raise PeerLostError(
                f"rank {rank} waited {patience_seconds:g} s (timeouts.agreement_seconds) for attention server "
                f"{', '.join(silent)} of {len(self._keys)}, and found no heartbeat; look at its own messages"
            )

    def wait_for_a_loss(self, members: Sequence[Member], patience_seconds: float) -> None:
        """Waits until a heartbeat of these members is missed: a broken connection is noticed earlier."""
        deadline = time.monotonic() + patience_seconds
        expected = [(server, restarts + 1) for server, restarts in members]
        while time.monotonic() < deadline:
            if [(server, start) for server, start in enumerate(self.starts()) if start] != expected:
                return
            time.sleep(WAIT_SECONDS)

    def lost_of(self, members: Sequence[Member]) -> str | None:
        """Returns a message about a lost member; None if there is none."""
        for server, restarts in members:
            if self.restarts(server) != restarts:
                name, seconds = self.losses.name_of(server), self.silent_seconds(server)
                return f"{name} is lost: its last heartbeat is {seconds:.1f} s old"
        return None


class LostServers:
    """How often each server was lost in a row, without a counted step in between; the same on all trainers."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # names of servers, with their hosts, by their numbers
        self._in_a_row: Counter[int] = Counter()

    def name_of(self, server: int) -> str:
        return self.names.get(server, f"attention server {server}")

    def note_step(self, servers: Iterable[int]) -> None:
        for server in servers:
            del self._in_a_row[server]

    def note(self, server: int, restarts: int) -> None:
        """Notes a loss, and warns if it is the last of this server."""
        name = self.name_of(server)
        log.warning("%s (restart %d) takes part no more", name, restarts)
        self._in_a_row[server] += 1
        if self._in_a_row[server] == MOST_LOSSES:
            log.warning(
                "%s was lost %d times in a row, and no step counted in between: it is left out for the rest of the "
                "training. Look at its own messages above, and at its GPU",
                name,
                MOST_LOSSES,
            )

    def is_excluded(self, server: int) -> bool:
        """Returns whether a server was lost too often to take part again."""
        return self._in_a_row[server] >= MOST_LOSSES


class StreamProgress(Repeated):
    """How long a GPU's stream has made no progress, and whether it waits for exchanges.

    A thread records a mark in the stream, and the next one once the stream has passed it. It is a separate thread,
    because its calls may block: the driver lets none through while another thread waits to launch on a full stream. It
    watches the stream that is current in the thread that makes this object.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__("distca-progress", MARK_SECONDS, self._look)
        self._device, self._stream, self._mark = device, torch.cuda.current_stream(device), torch.cuda.Event()
        self._last_wait = torch.cuda.Event()
        self._started = self._waited = self._passed = self._rested = 0
        self._stalled_seconds, self._asked, self._is_left = 0.0, time.monotonic(), False
        self.begin()

    def stalled_seconds(self) -> float:
        """Returns how long no mark was passed; up to `MARK_SECONDS` on a stream that is not stalled. Never blocks.
        Must be called repeatedly: time in which this process itself was stopped does not count."""
        now = time.monotonic()
        self._stalled_seconds += min(now - self._asked, LONGEST_LOOK_SECONDS)
        self._asked = now
        return self._stalled_seconds

    def note_start(self) -> None:
        self._started += 1

    def note_wait(self) -> None:
        """Notes that the current stream of this thread waits for a noted exchange."""
        self._last_wait.record(torch.cuda.current_stream(self._device))
        self._waited += 1

    def note_rest(self) -> None:
        """Notes that the GPU has come to its end, and no exchange is under way."""
        self._waited = self._rested = self._started

    @property
    def is_at_rest(self) -> bool:
        """Whether all noted exchanges are known to be over, which takes up to `MARK_SECONDS`."""
        return max(self._passed, self._rested) >= self._started

    def _look(self) -> bool:
        """Records a mark if the last one was passed, and returns True."""
        waited = self._waited  # read before the query: a wait that is noted meanwhile may not be over
        if self._last_wait.query():
            self._passed = waited
        if self._is_left and not self._mark.query():
            return True
        self._stalled_seconds = 0.0
        self._mark.record(self._stream)
        self._is_left = True
        return True


def _beat(server: int) -> str:
    return f"beat/{server}"


def _abandoned(membership: int) -> str:
    return f"abandoned/{membership}"
