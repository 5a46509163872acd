"""Heartbeats: attention servers show that they live; trainers and servers read which rosters are lost.

    server     beat/<server> = "incarnation.count"   ──▶  every trainer: silent for too long is lost
               a byte in a pipe                      ──▶  the server's supervisor
    trainer    spoiled/<roster> = words              ──▶  all trainers and servers: its exchanges are left

Both sides do this in a thread, over a separate connection to the launcher's store. So a training step or an exchange
that hangs delays no beat, and nothing is asked where a step runs. An incarnation is one process of a server: the next
one has the next number. A GPU shows that it goes on by marks in its stream (`StreamProgress`).
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from distca_hf.comm.whereabouts import Repeated
from distca_hf.errors import first_line
from distca_hf.launched import TRAINERS_GONE
from distca_hf.servers.job_store import JobStore
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Seconds between two beats of a server, and between two looks of a trainer.
BEAT_SECONDS, LOOK_SECONDS = 0.5, 0.25
# Seconds between two marks that are left in a stream.
MARK_SECONDS = 1.0
# Longest time between two looks that counts as silence of servers. A trainer that was itself stopped or kept from
# running for longer has not listened.
LONGEST_LOOK_SECONDS = 1.0


class RosterWatch(Repeated):
    """A thread that also asks the store which rosters were lost. Several are open at once with several plugins.

    Args:
        name, pause_seconds, call: of the thread.
        store: a connection that nothing else uses.
    """

    def __init__(self, name: str, pause_seconds: float, call: Callable[[], bool], store: JobStore) -> None:
        super().__init__(name, pause_seconds, call)
        self._store = store
        self._open: set[int] = set()
        self._words: dict[int, str] = {}

    def look_for(self, roster: int) -> None:
        """Makes later looks ask for this roster, too."""
        self._open.add(roster)

    def leave(self, roster: int) -> None:
        """Ends looking for a roster."""
        self._open.discard(roster)

    def is_spoiled(self, roster: int) -> bool:
        """Returns whether this process or, as of the last look, a trainer has given up a roster."""
        return roster in self._words

    def spoil(self, roster: int, words: str) -> None:
        """Gives up a roster, for all trainers and servers.

        Args:
            words: why. If another trainer was first, its words stay.
        """
        self._words.setdefault(roster, words)
        with suppress(RuntimeError):  # the store is gone, and with it the job
            self._words[roster] = self._store.set_first(_spoiled(roster), words.encode()).decode()

    def _look_for_spoiled(self) -> None:
        """Asks the store. Raises RuntimeError if it is gone."""
        for roster in sorted(self._open):
            if roster not in self._words and (words := self._store.get(_spoiled(roster))):
                self._words[roster] = words.decode()


class Heartbeat(RosterWatch):
    """A server's end: it beats, and reads whether trainers have given up a roster.

    The process ends, with status `TRAINERS_GONE`, if the store or the supervisor is gone.

    Args:
        store: a connection that nothing else uses.
        server: number of this server.
        incarnation: number of this process among those that were this server.
        pipe: file descriptor to which every beat writes a byte; None: there is no supervisor.
    """

    def __init__(self, store: JobStore, server: int, incarnation: int, pipe: int | None) -> None:
        super().__init__("distca-heartbeat", BEAT_SECONDS, self.beat, store)
        self._server, self._incarnation, self._pipe = server, incarnation, pipe
        self._count = 0

    def beat(self) -> bool:
        """Beats once, and returns True."""
        self._count += 1
        try:
            self._store.set(_beat(self._server), f"{self._incarnation}.{self._count}".encode())
            self._look_for_spoiled()
        except RuntimeError as error:
            self._end_process(f"the launcher's store is gone, and with it the job ({first_line(error)})")
        try:
            if self._pipe is not None:
                os.write(self._pipe, b".")
        except OSError as error:
            self._end_process(f"its supervisor is gone ({error})")
        return True

    def _end_process(self, words: str) -> None:
        """Ends the process, wherever its main thread waits."""
        log.error("attention server %d ends: %s", self._server, words)
        os._exit(TRAINERS_GONE)


@dataclass
class LastBeat:
    """The last beat of a server that a trainer has seen.

    Attributes:
        number: incarnation and count; empty if there was none.
        silent_seconds: for how long looks have found nothing newer.
    """

    number: tuple[int, ...] = ()
    silent_seconds: float = 0.0


class Watch(RosterWatch):
    """A trainer's end: it sees which servers live, and which rosters are lost.

    Args:
        store: a connection that nothing else uses.
        num_servers: of the job.
        limit_seconds: silence after which a server counts as lost.
    """

    def __init__(self, store: JobStore, num_servers: int, limit_seconds: float) -> None:
        super().__init__("distca-watch", LOOK_SECONDS, self.look, store)
        self._limit_seconds = limit_seconds
        self._keys = [_beat(server) for server in range(num_servers)]
        self._last = [LastBeat() for _ in self._keys]
        self._looked: float | None = None

    def incarnation(self, server: int) -> int | None:
        """Returns the incarnation of a server that lives; None for one that was never seen, or is silent for longer
        than the limit."""
        last = self._last[server]
        if not last.number or last.silent_seconds > self._limit_seconds:
            return None
        return last.number[0]

    def silent_seconds(self, server: int) -> float:
        """Returns for how long a server has been silent: since its last beat, or since looking began."""
        return self._last[server].silent_seconds

    def look(self) -> bool:
        """Looks once, and returns whether the store is still there. Without it the job ends elsewhere."""
        try:
            if self._looked is None:
                for key in self._keys:  # so that all are there, and one request finds all of them
                    self._store.get(key)
            values = self._store.get_all(self._keys)
            self._look_for_spoiled()
        except RuntimeError:
            return False
        now = time.monotonic()
        passed_seconds = 0.0 if self._looked is None else min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        for server, (value, last) in enumerate(zip(values, self._last, strict=True)):
            number = tuple(map(int, value.split(b"."))) if value else ()
            if number > last.number:  # an older one is a copy that somebody else has written
                self._last[server] = LastBeat(number)
            else:
                last.silent_seconds += passed_seconds
        return True


class StreamProgress(Repeated):
    """For how long a GPU's stream has come no further, and whether it waits for exchanges.

    A thread leaves a mark in the stream, and the next one once the stream has passed it. It is a separate thread,
    because its calls may wait: the driver lets none through while another thread waits to launch on a full stream.

    Args:
        device: its current stream, in the thread that makes this object.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__("distca-progress", MARK_SECONDS, self._look)
        self._device, self._stream, self._mark = device, torch.cuda.current_stream(device), torch.cuda.Event()
        self._last_wait = torch.cuda.Event()
        self._started = self._waited = self._passed = self._rested = 0
        self._stalled_seconds, self._asked, self._is_left = 0.0, time.monotonic(), False
        self.begin()

    def stalled_seconds(self) -> float:
        """Returns for how long no mark was passed; up to `MARK_SECONDS` on a stream that is not stalled. Waits for
        nothing. Asked again and again: a process that was itself stopped meanwhile has seen no stall."""
        now = time.monotonic()
        self._stalled_seconds += min(now - self._asked, LONGEST_LOOK_SECONDS)
        self._asked = now
        return self._stalled_seconds

    def note_start(self) -> None:
        """Notes that an exchange has started."""
        self._started += 1

    def note_wait(self) -> None:
        """Notes that the current stream of this thread waits for an exchange that was noted."""
        self._last_wait.record(torch.cuda.current_stream(self._device))
        self._waited += 1

    def note_rest(self) -> None:
        """Notes that the GPU has come to its end, and no exchange is under way."""
        self._waited = self._rested = self._started

    @property
    def is_at_rest(self) -> bool:
        """Whether all noted exchanges are known to be over. They are known up to `MARK_SECONDS` later."""
        return max(self._passed, self._rested) >= self._started

    def _look(self) -> bool:
        """Leaves a mark unless the last one was not passed yet, and returns True."""
        waited = self._waited  # read before: a wait that is noted meanwhile may not be over
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


def _spoiled(roster: int) -> str:
    return f"spoiled/{roster}"
