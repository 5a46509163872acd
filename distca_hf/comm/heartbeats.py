"""Heartbeats: attention servers show that they live; trainers and servers read which rosters are lost.

    server     beat/<server> = "incarnation.count"   ──▶  every trainer: silent for too long is lost
               a byte in a pipe                      ──▶  the server's supervisor
    trainer    spoiled/<roster> = words              ──▶  all trainers and servers: its exchanges are left

Both sides do this in a thread, over a connection of its own to the launcher's store. So a training step or an exchange
that hangs delays no beat, and nothing is asked where a step runs. An incarnation is one process of a server: the next
one has the next number. A GPU shows that it goes on by marks in its stream (`StreamProgress`).
"""

import atexit
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from distca_hf.errors import first_line
from distca_hf.launched import TRAINERS_GONE
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Seconds between two beats of a server, and between two looks of a trainer.
BEAT_SECONDS, LOOK_SECONDS = 0.5, 0.25
# Times in a row that a server may be lost before a step counted with it.
MOST_LOSSES = 5
# Seconds between two marks that are left in a stream.
MARK_SECONDS = 1.0
# Longest time between two looks that counts as silence of servers. A trainer that was itself stopped or kept from
# running for longer has not listened.
LONGEST_LOOK_SECONDS = 1.0


def _do_nothing() -> None:
    """Does nothing."""


class Repeated:
    """A thread that repeats a call. It is joined before Python ends: a process aborts if that cuts a thread off inside
    a call of the store.

    Args:
        name: of the thread.
        pause_seconds: between two calls.
        call: returns whether to go on.
    """

    def __init__(self, name: str, pause_seconds: float, call: Callable[[], bool]) -> None:
        self._pause_seconds, self._call = pause_seconds, call
        self._then: Callable[[], None] = _do_nothing
        self._is_over = threading.Event()
        # Python waits for threads that are no daemons before it calls `atexit`, and nobody would have ended this one.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self, then: Callable[[], None] = _do_nothing) -> None:
        """Starts the thread, with a first call at once.

        Args:
            then: called behind every call, in the thread.
        """
        self._then = then
        atexit.register(self.end)
        self._thread.start()

    def end(self) -> None:
        """Ends the thread, and waits for a call that it is in."""
        atexit.unregister(self.end)
        self._is_over.set()
        if self._thread.ident is not None:  # it has begun
            self._thread.join()

    def _run(self) -> None:
        while self._call():
            self._then()
            if self._is_over.wait(self._pause_seconds):
                return


class SpoiledRosters:
    """Rosters that were lost, as the store has them.

    Args:
        store: of the thread that looks.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._wanted: int | None = None
        self._words: dict[int, str] = {}

    def look_for(self, roster: int) -> None:
        """Makes later looks ask for this roster, and for no earlier one."""
        self._wanted = roster

    def look(self) -> None:
        """Asks the store. Raises RuntimeError if it is gone."""
        roster = self._wanted
        if roster is not None and roster not in self._words and (words := _peek(self._store, _spoiled(roster))):
            self._words[roster] = words.decode(errors="replace")

    def spoil(self, roster: int, words: str) -> None:
        """Notes that a roster is lost, here and then in the store; the first words stay."""
        self._words.setdefault(roster, words)
        with suppress(RuntimeError):  # the store is gone, and with it the job
            self._words[roster] = self._store.compare_set(_spoiled(roster), "", words).decode(errors="replace")

    def words_of(self, roster: int) -> str | None:
        """Returns why a roster is lost; None if nothing is known against it."""
        return self._words.get(roster)


class Heartbeat:
    """A server's end: it beats, and reads whether trainers have given up a roster.

    The process ends, with status `TRAINERS_GONE`, if the store or the supervisor is gone.

    Args:
        store: a connection that nothing else uses.
        server: number of this server.
        incarnation: number of this process among those that were this server.
        pipe: file descriptor to which every beat writes a byte; None: there is no supervisor.
    """

    def __init__(self, store: Store, server: int, incarnation: int, pipe: int | None) -> None:
        self._store, self._server, self._incarnation, self._pipe = store, server, incarnation, pipe
        self._spoiled = SpoiledRosters(store)
        self._count = 0
        self._thread = Repeated("distca-heartbeat", BEAT_SECONDS, self.beat)

    def begin(self, then: Callable[[], None] = _do_nothing) -> None:
        """Starts to beat; calls `then` behind every beat, in the same thread."""
        self._thread.begin(then)

    def end(self) -> None:
        """Ends beating."""
        self._thread.end()

    def look_for(self, roster: int) -> None:
        """Makes `is_spoiled` look at this roster; only the last one is looked for."""
        self._spoiled.look_for(roster)

    def is_spoiled(self, roster: int) -> bool:
        """Returns whether trainers have given up a roster, as of the last beat."""
        return self._spoiled.words_of(roster) is not None

    def beat(self) -> bool:
        """Beats once, and returns True."""
        self._count += 1
        try:
            self._store.set(_beat(self._server), f"{self._incarnation}.{self._count}")
            self._spoiled.look()
        except RuntimeError as error:
            self._leave(f"the launcher's store is gone, and with it the job ({first_line(error)})")
        try:
            if self._pipe is not None:
                os.write(self._pipe, b".")
        except OSError as error:
            self._leave(f"its supervisor is gone ({error})")
        return True

    def _leave(self, words: str) -> None:
        """Ends the process, wherever its main thread waits."""
        log.error("attention server %d ends: %s", self._server, words)
        os._exit(TRAINERS_GONE)


@dataclass
class LastBeat:
    """The last beat of a server that a trainer has seen.

    Attributes:
        value: as in the store; empty if there was none.
        silent_seconds: for how long looks have found nothing newer.
    """

    value: bytes = b""
    silent_seconds: float = 0.0


class Watch:
    """A trainer's end: it sees which servers live, and which rosters are lost.

    Args:
        store: a connection that nothing else uses.
        num_servers: of the job.
        limit_seconds: silence after which a server counts as lost.
    """

    def __init__(self, store: Store, num_servers: int, limit_seconds: float) -> None:
        self._store, self._limit_seconds = store, limit_seconds
        self._keys = [_beat(server) for server in range(num_servers)]
        self._last = [LastBeat() for _ in self._keys]
        self._spoiled = SpoiledRosters(store)
        self._looked: float | None = None
        self._thread = Repeated("distca-watch", LOOK_SECONDS, self.look)

    def begin(self, then: Callable[[], None] = _do_nothing) -> None:
        """Starts to look; calls `then` behind every look, in the same thread."""
        self._thread.begin(then)

    def end(self) -> None:
        """Ends looking."""
        self._thread.end()

    def incarnation(self, server: int) -> int | None:
        """Returns the incarnation of a server that lives; None for one that was never seen, or is silent for longer
        than the limit."""
        last = self._last[server]
        if not last.value or last.silent_seconds > self._limit_seconds:
            return None
        return int(last.value.partition(b".")[0])

    def silent_seconds(self, server: int) -> float:
        """Returns for how long a server has been silent: since its last beat, or since looking began."""
        return self._last[server].silent_seconds

    def look_for(self, roster: int) -> None:
        """Makes `is_spoiled` look at this roster; only the last one is looked for."""
        self._spoiled.look_for(roster)

    def is_spoiled(self, roster: int) -> bool:
        """Returns whether this trainer or, as of the last look, another one has given up a roster."""
        return self._spoiled.words_of(roster) is not None

    def words_of(self, roster: int) -> str | None:
        """Returns the words with which a roster was given up; None if it was not."""
        return self._spoiled.words_of(roster)

    def spoil(self, roster: int, words: str) -> None:
        """Gives up a roster, for all trainers and servers.

        Args:
            words: why. If another trainer was first, its words stay.
        """
        self._spoiled.spoil(roster, words)

    def look(self) -> bool:
        """Looks once, and returns whether the store is still there. Without it the job ends elsewhere."""
        try:
            if self._looked is None:
                for key in self._keys:  # so that all are there, and one request finds all of them
                    _peek(self._store, key)
            values = self._store.multi_get(self._keys)
            self._spoiled.look()
        except RuntimeError:
            return False
        now = time.monotonic()
        passed_seconds = 0.0 if self._looked is None else min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        for server, (value, last) in enumerate(zip(values, self._last, strict=True)):
            if value != last.value:
                self._last[server] = LastBeat(value)
            else:
                last.silent_seconds += passed_seconds
        return True


class StreamProgress:
    """For how long a GPU's stream has come no further.

    A thread leaves a mark in the stream, and the next one once the stream has passed it. It is a thread of its own,
    because its calls may wait: the driver lets none through while another thread waits to launch on a full stream.

    Args:
        device: its current stream, in the thread that makes this object.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream, self._mark = torch.cuda.current_stream(device), torch.cuda.Event()
        self._stalled_seconds, self._asked, self._is_left = 0.0, time.monotonic(), False
        self._thread = Repeated("distca-progress", MARK_SECONDS, self._look)
        self._thread.begin()

    def stalled_seconds(self) -> float:
        """Returns for how long no mark was passed; up to `MARK_SECONDS` on a stream that is not stalled. Waits for
        nothing. Asked again and again: a process that was itself stopped meanwhile has seen no stall."""
        now = time.monotonic()
        self._stalled_seconds += min(now - self._asked, LONGEST_LOOK_SECONDS)
        self._asked = now
        return self._stalled_seconds

    def end(self) -> None:
        """Ends looking."""
        self._thread.end()

    def _look(self) -> bool:
        """Leaves a mark unless the last one was not passed yet, and returns True."""
        if self._is_left and not self._mark.query():
            return True
        self._stalled_seconds = 0.0
        self._mark.record(self._stream)
        self._is_left = True
        return True


class LostServers:
    """How often each server was lost in a row, without a step in between that counted; the same on all trainers."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._in_a_row: Counter[int] = Counter()

    def note_names(self, names: Mapping[int, str]) -> None:
        """Notes names of servers, with their hosts, by their numbers."""
        self._names |= names

    def name_of(self, server: int) -> str:
        """Returns the name of a server, with its host as far as that is known."""
        return self._names.get(server, f"attention server {server}")

    def note_step(self, servers: Iterable[int]) -> None:
        """Notes a step that counted with these servers."""
        for server in servers:
            del self._in_a_row[server]

    def note(self, server: int, incarnation: int) -> None:
        """Notes a loss, and warns if it is the last of this server."""
        name = self.name_of(server)
        log.warning("%s (start %d) takes part no more", name, incarnation)
        self._in_a_row[server] += 1
        if self._in_a_row[server] == MOST_LOSSES:
            log.warning(
                "%s was lost %d times in a row, and no step counted in between: it is left out for the rest of the "
                "training. Look at its own words above, and at its GPU",
                name,
                MOST_LOSSES,
            )

    def is_excluded(self, server: int) -> bool:
        """Returns whether a server was lost too often to take part again."""
        return self._in_a_row[server] >= MOST_LOSSES


def _peek(store: Store, key: str) -> bytes:
    """Returns the value of a key without waiting for one; a key that is not there gets an empty one."""
    value: bytes = store.compare_set(key, "", "")
    return value


def _beat(server: int) -> str:
    return f"beat/{server}"


def _spoiled(roster: int) -> str:
    return f"spoiled/{roster}"
