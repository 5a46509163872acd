"""Whereabouts: finds out, long before a deadline, that ranks wait for each other at different places.

A rank that skips a micro-batch, or has one more, waits at a different place than the others: they wait for its rows,
and it waits for their agreement, or for a collective of other code. None of these waits ends. A rank that is only slow
looks the same from outside, and must be waited for. The difference is in the order of collective calls:

    rank 0   gather 7, exchange 31, exchange 32 ...        waits in exchange 32
    rank 1   gather 7, exchange 31, gather 8 ...           started gather 8 without exchange 32: they can never meet
    rank 2   gather 7, exchange 31                         is slow, and can still come

Every rank counts its collective calls: gathers and exchanges of its transport, and collectives of other code over the
same ranks. A rank without progress for some seconds shows its counts in the job's store, from a thread, and reads the
others'. While a training makes progress, nothing is sent.
"""

import atexit
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distca_hf.comm.agreement import by_value
from distca_hf.errors import printable


# Seconds between two looks; without progress, until a rank shows its place, and until it first reads the others'.
LOOK_SECONDS, SHOW_SECONDS, READ_SECONDS = 1.0, 3.0, 6.0
# Two equal readings, at least this far apart, end the wait. Later readings come after ever longer pauses.
SHORTEST_PAUSE_SECONDS, PAUSE_FRACTION = 3.0, 0.5
# Moments that are kept, two for each of the latest gathers: ranks may differ by gathers that nobody waits for yet.
MOMENTS = 8
# Parts of paths of torch's files; of those whose functions wait for other ranks; and of some that also write files.
OF_TORCH, OF_CHECKPOINTS = "/torch/", "/torch/distributed/checkpoint/"
OF_COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/torch/autograd/graph.py")
# Share of its time that a thread is at work, or ready for it, at most while it waits.
WAITING_LOAD = 0.1
# Characters of a place.
LONGEST_PLACE = 300


class Calls(NamedTuple):
    """Collective calls that a rank had started at some moment: of its transport, and of other code."""

    gathers: int
    exchanges: int
    collectives: int


@dataclass(frozen=True)
class Place:
    """The place that a rank has reached."""

    text: str
    moments: list[list[int]]  # counts of calls around the latest gathers, and now
    # Function of torch in which it seems to wait for a collective of other code; empty if it computes, or waits for a
    # call of the transport.
    waits: str
    on_gpu: bool  # whether the GPU waits for these collectives, while the host goes on
    # Number of the look that found this. If it grows, the process runs.
    look: int

    @property
    def now(self) -> Calls:
        return Calls(*self.moments[-1])

    def may_wait_since(self, moment: Calls) -> bool:
        """Returns whether the rank may still wait for a collective of other code that it had started at a moment.
        Threads may start some out of order, so nothing follows from earlier ones."""
        return self.on_gpu or (bool(self.waits) and moment == self.now)


def cannot_meet(one: Place, other: Place) -> bool:
    """Returns whether two ranks have started collective calls in different orders.

    Ranks that run the same program start the same calls in the same order. So of any two moments, one is earlier and
    has no higher count.
    """
    for here, there in product((Calls(*each) for each in one.moments), (Calls(*each) for each in other.moments)):
        gathers, exchanges = here.gathers - there.gathers, here.exchanges - there.exchanges
        if gathers * exchanges < 0:
            return True
        collectives = here.collectives - there.collectives
        if collectives * gathers < 0 or collectives * exchanges < 0:
            if one.may_wait_since(here) if collectives > 0 else other.may_wait_since(there):
                return True
    # They have started equally many calls, and wait for different ones.
    return one.now == other.now and "" not in (one.waits, other.waits) and one.waits != other.waits


class Repeated:
    """A thread that repeats a call. It is joined before Python ends: if Python cuts a thread off inside a call of the
    store, the process aborts. It ends when the call returns False."""

    def __init__(self, name: str, pause_seconds: float, call: Callable[[], bool]) -> None:
        self._pause_seconds, self._call = pause_seconds, call
        self._is_over = threading.Event()
        # Before it calls `atexit`, Python waits for threads that are not daemons: this one would never end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self, then: Callable[[], object] = lambda: None) -> None:
        """Starts the thread, with a first call at once. Calls `then` after every call, in the thread."""
        self._then = then
        atexit.register(self.end)
        self._thread.start()

    def end(self) -> None:
        """Ends the thread, after its current call."""
        atexit.unregister(self.end)
        self._is_over.set()
        if self._thread.ident is not None:  # it has begun
            self._thread.join()

    def _run(self) -> None:
        while self._call():
            self._then()
            if self._is_over.wait(self._pause_seconds):
                return


class Whereabouts(Repeated):
    """Shows the place of this rank, and finds out whether it waits in vain."""

    def __init__(
        self,
        store: Store,  # store of the job, over a connection that nothing else uses
        name: str,  # name of the transport; the same on all ranks
        rank: int,
        ranks: Sequence[int],  # ranks that run the same program, this one among them
        labels: Sequence[str],
        # Returns the exchanges of the transport and the collectives of other code that were started so far.
        count: Callable[[], tuple[int, int]],
        place: Callable[[], str],
        on_gpu: bool,
    ) -> None:
        super().__init__("distca-whereabouts", LOOK_SECONDS, self.look)
        # Place of a call that this rank has waited for, for a while; None if there is none.
        self.waits_for: str | None = None
        self.in_vain: str | None = None  # says which ranks wait for each other, once they are found
        self._store = PrefixStore(f"distca_hf/whereabouts/{name}", store)
        self._rank, self._keys, self._labels = rank, {one: f"at/{one}" for one in ranks}, labels
        self._count, self._place, self._on_gpu = count, place, on_gpu
        self._moments: deque[Calls] = deque(maxlen=MOMENTS)
        self._gathers = self._looks = 0
        self._last: Calls | None = None
        self._stalled_seconds, self._looked, self._read_at = 0.0, time.monotonic(), READ_SECONDS
        self._suspects: dict[int, Calls] = {}
        self._suspicion: str | None = None
        self._used, self._load = 0.0, 0.0

    def begin(self, then: Callable[[], object] = lambda: None) -> None:
        """Starts to look; calls `then` after every look, in the same thread."""
        self._store.set(self._keys[self._rank], "")  # once all ranks have one, `shown` is two requests
        super().begin(then)

    def note_gather(self) -> None:
        counts = self._count()
        self._moments += Calls(self._gathers, *counts), Calls(self._gathers + 1, *counts)
        self._gathers += 1

    def look(self) -> bool:
        """Looks once, and returns whether to go on: as long as the store is there, or once ranks wait in vain."""
        if self.in_vain is not None:
            return True
        now, used = time.monotonic(), busy_seconds()
        passed, self._looked = now - self._looked, now
        self._load, self._used = (used - self._used) / max(passed, 1e-3), used
        here = Calls(self._gathers, *self._count())
        self._looks += 1
        if here != self._last:
            self._last, self._stalled_seconds, self._read_at = here, 0.0, READ_SECONDS
            self._suspects, self._suspicion = {}, None
            return True
        self._stalled_seconds += min(passed, 2 * LOOK_SECONDS)  # a process that was stopped has not waited
        if self._stalled_seconds < SHOW_SECONDS:
            return True
        mine = self._here(here)
        try:
            self._store.set(self._keys[self._rank], json.dumps(asdict(mine)))
            if self._stalled_seconds >= self._read_at:
                self._read_at += max(SHORTEST_PAUSE_SECONDS, PAUSE_FRACTION * self._stalled_seconds)
                self._compare(mine, self.shown())
        except RuntimeError:  # the rank that kept the store has left, perhaps because it was the first to know
            self.in_vain = self._suspicion
            return self.in_vain is not None
        return True

    def shown(self) -> dict[int, Place]:
        """Returns the places of the ranks that have shown them. A rank may have gone on since. Raises RuntimeError if
        the store is gone."""
        keys = [*self._keys.values()]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        values = dict(zip(keys, self._store.multi_get(keys), strict=True)) if keys else {}
        places = {rank: _place_of(values[key]) for rank, key in self._keys.items() if values.get(key)}
        return {rank: place for rank, place in places.items() if place is not None}

    def texts(self) -> dict[int, tuple[str, int]]:
        """Returns the text of each place in `shown`, and the number of the look that found it."""
        return {rank: (place.text, place.look) for rank, place in self.shown().items()}

    def _here(self, here: Calls) -> Place:
        waits_for, place, (code, waits) = self.waits_for, self._place(), _code_of(threading.main_thread().ident)
        if waits_for or self._load > WAITING_LOAD:
            waits = ""
        text = waits_for or (f"{code}, after {place}" if place else code)
        moments = [[*each] for each in [*self._moments, here]]
        return Place(text[:LONGEST_PLACE], moments, waits, self._on_gpu, self._looks)

    def _compare(self, mine: Place, shown: Mapping[int, Place]) -> None:
        """Compares places. If the same ranks cannot meet in two readings, they wait in vain."""
        others = {rank: place for rank, place in shown.items() if rank != self._rank}
        apart = {r: place.now for r, place in others.items() if cannot_meet(mine, place)}
        is_known = any(self._suspects.get(rank) == mark for rank, mark in apart.items())
        self._suspects, self._suspicion = apart, None
        if apart:
            places = {**others, self._rank: mine}
            ranks = [rank for rank in self._keys if rank in places]
            labels = dict(zip(self._keys, self._labels, strict=True))
            where = by_value([places[rank].text for rank in ranks], [labels[rank] for rank in ranks])
            self._suspicion = f"ranks wait for each other at different places: {where}"
        if is_known:
            self.in_vain = self._suspicion


def busy_seconds() -> float:
    """Returns how long the main thread has run, or has been ready to run and got no processor. On a busy machine, a
    thread at work may run as little as one that waits for other ranks."""
    ran = time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))
    try:
        _, ready_ns, *_ = Path("/proc/self/schedstat").read_text().split()
    except OSError:  # the system does not count what was ready; others show zeros
        return ran
    return ran + 1e-9 * int(ready_ns)


def _place_of(value: bytes) -> Place | None:
    """Reads a place; None if it is not one, because other code has written it."""
    try:
        read = json.loads(value)
        moments = [[*map(int, each)] for each in map(Calls._make, read["moments"])]
        text, waits = (printable(str(read[name]))[:LONGEST_PLACE] for name in ("text", "waits"))
        return Place(text, moments, waits, bool(read["on_gpu"]), int(read["look"])) if moments else None
    except (ValueError, TypeError, KeyError):
        return None


def _code_of(thread: int | None) -> tuple[str, str]:
    """Returns the innermost line of a thread outside torch, and the function in which the thread may wait for other
    ranks if it uses no CPU time: one that starts collectives, or a backward pass."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    file, function = ("", "") if frame is None else (frame.f_code.co_filename, frame.f_code.co_name)
    may_wait = any(part in file for part in OF_COLLECTIVES) and OF_CHECKPOINTS not in file
    while frame is not None and OF_TORCH in frame.f_code.co_filename:
        frame = frame.f_back
    code = "other code" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
    return code, function if may_wait else ""
