"""Roll call: finds out, after a failed exchange, which ranks are still there, and the last messages of the others.

A broken connection names a port, not a rank. Every rank that notices a failure signs in at the job's store and looks
for the others. A rank that ends with an exception leaves its message there. The store is asked only when a run ends,
so it costs nothing before.

If all ranks have the same error, each would show a traceback. Instead, the first rank that leaves its message at the
job's store shows it, and every other rank points to that rank. Errors of other code are shown as usual.
"""

import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distca_hf.errors import DistCAError, PeerLostError, first_line, printable
from distca_hf.telemetry import NAME, OF_THIS_RANK, get_logger, leave_for_launcher, this_rank
from distca_hf.torch_private import default_store


log = get_logger(__name__)

# More than a rank on a busy machine needs to sign in. A failed exchange costs it once.
PATIENCE_SECONDS = 3.0
# Seconds between two looks at the store, which a single rank serves to all others.
POLL_SECONDS = 0.02
# Key that is there once a rank of the job has ended: one request instead of one for each rank.
SOME_ENDED = "some ended"
# Characters of a message: an error shows several ranks' messages.
LONGEST_MESSAGE = 500

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
# Texts in errors of gloo and NCCL, of collectives of other code.
SIGNS_OF_A_LOST_PEER = ("onnection closed by peer", "onnection reset by peer", "Timed out waiting", "NCCL error")
# Texts in errors that `torch.distributed.pipelining` raises from a stage's error, with the stage's arguments.
SIGNS_OF_A_STAGE = ("failed to run forward", "Failed to run stage backward")


def cause_of(error: BaseException) -> BaseException:
    """Returns the error of a pipeline stage, which torch's own error does not show; any other error itself."""
    while error.__cause__ is not None and any(sign in str(error) for sign in SIGNS_OF_A_STAGE):
        error = error.__cause__
    return error


def tells_of_a_lost_peer(error: BaseException) -> bool:
    """Returns whether an error was caused by another rank that had ended before, or did not come in time."""
    if isinstance(error, DistCAError):
        return isinstance(error, PeerLostError) or len(error.lost_ranks) > 0
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS_OF_A_LOST_PEER)


class RollCall:
    """Signs in and out at the store of the process group."""

    def __init__(
        self,
        store: Store,  # reachable as long as possible; the launcher's own, if there is one
        rank: int,
        ranks: Sequence[int],  # ranks of the group, as they are numbered in the job
        # How long to wait for ranks that neither sign in nor left a message.
        patience_seconds: float = PATIENCE_SECONDS,
        names: Mapping[int, str] | None = None,  # names of ranks in messages; by default their numbers
    ) -> None:
        self._store = PrefixStore("distca_hf/rollcall", store)
        self._rank = rank
        self._ranks = ranks
        self._patience_seconds = patience_seconds
        self.names = names or {}
        self._hook: Announcement | None = None
        self._has_left = False
        # Returns texts for the places of ranks that have come no further for some seconds, with a number that grows as
        # long as the process runs; raises RuntimeError if the store is gone.
        self.places: Callable[[], Mapping[int, tuple[str, int]]] = dict
        # Says which ranks wait for each other at different places, once they were found.
        self.in_vain: str | None = None

    def leave(self, message: str, follows: bool = False) -> None:
        """Leaves the message of an error for the others, who cannot read it if the store is gone.

        Args:
            follows: whether the error was caused by another rank that had ended before.
        """
        self._has_left = True
        try:
            if follows:
                self._store.set(f"follows/{self._rank}", "")  # before the message, which others wait for
            self._store.set(f"left/{self._rank}", f"left: {message[:LONGEST_MESSAGE]}")
            self._store.set(SOME_ENDED, "")
        except RuntimeError as error:
            log.warning("rank %d: its error did not reach the other ranks: %s", self._rank, error, extra=OF_THIS_RANK)

    def leave_in_order(self, place: str) -> None:
        """Leaves the place at which this process ends without an error, for ranks that still wait for it."""
        if self._has_left:
            return
        where = f"in {place.partition(',')[0]}" if place else "before its first micro-batch"
        with suppress(RuntimeError):  # the store is gone, and with it all who would ask
            self._store.set(f"left/{self._rank}", f"left {where} with exit status 0, or the one it gave to sys.exit")
            self._store.set(SOME_ENDED, "")

    def ended(self) -> list[int]:
        """Returns the ranks of the group that have ended, as far as they left a message. Raises RuntimeError if the
        store is gone."""
        if not self._store.check([SOME_ENDED]):
            return []
        return [rank for rank in self._ranks if self._store.check([f"left/{rank}"])]

    def missing(self, waited_seconds: float = 0.0, among: Sequence[int] | None = None) -> dict[int, str]:
        """Returns the ranks of the group that left, do not answer or came late, and all that is known about each.

        Args:
            waited_seconds: how long this rank has waited for the others. One that waited much less kept them waiting.
            among: ranks that take part in what has failed; all of the group if they are not given.
        """
        waiting = set(self._ranks if among is None else among) - {self._rank}
        found: dict[int, str] = {}
        at_first: Mapping[int, tuple[str, int]] = {}
        try:
            at_first = self.places()
            self._store.set(f"here/{self._rank}", f"{waited_seconds:.1f}")
            deadline = time.monotonic() + self._patience_seconds
            while True:  # looks once at least: a busy machine may have slept through all its patience
                for rank in sorted(waiting):
                    if self._store.check([f"left/{rank}"]):
                        found[rank] = printable(self._store.get(f"left/{rank}").decode(errors="replace"))
                        waiting.discard(rank)
                    elif self._store.check([f"here/{rank}"]):
                        waiting.discard(rank)
                        with suppress(ValueError):  # an entry of somebody else, who reaches the store
                            late_seconds = waited_seconds - float(self._store.get(f"here/{rank}"))
                            if late_seconds > self._patience_seconds:
                                found[rank] = f"came {late_seconds:.0f} s late"
                if not waiting or time.monotonic() >= deadline:
                    break
                time.sleep(POLL_SECONDS)
            for rank, (place, look) in self.places().items():
                if rank in waiting and rank in at_first and look > at_first[rank][1]:
                    found[rank] = f"runs, and has not come: its place is {place}"
                    waiting.discard(rank)
        except RuntimeError as error:
            return {0: f"cannot be asked, and with it the job's store is gone ({first_line(error)})", **found}
        return found | {
            rank: f"does not answer after {self._patience_seconds:g} s (killed, stopped, or at work elsewhere)"
            for rank in sorted(waiting)
        }

    def causes(self, missing: Mapping[int, str]) -> tuple[int, ...]:
        """Returns the ranks that `missing` found, without those that ended because of another rank. If all of them
        did, returns this rank: most likely it kept them waiting."""
        try:
            causes = tuple(rank for rank in missing if not self._store.check([f"follows/{rank}"]))
        except RuntimeError:  # the store is gone
            return tuple(missing)
        return causes or (self._rank,) * bool(missing)

    def in_words(self, missing: Mapping[int, str]) -> Iterator[str]:
        """Yields a phrase for each of the `causes` among the ranks that `missing` found, or for all if none of them is
        a cause, with its number in the group and, if different, in the job."""
        in_group = {rank: number for number, rank in enumerate(self._ranks)}
        causes = self.causes(missing)
        for rank in [rank for rank in missing if rank in causes] or missing:
            number = in_group.get(rank)
            of_job = "" if number == rank else f" (rank {rank} of the job)"
            known = f"rank {rank} of the job" if number is None else f"rank {number}{of_job}"
            yield f"{self.names.get(rank, known)} {missing[rank]}"

    def announce_uncaught_errors(self, names_lost: bool = True) -> None:
        """Leaves a message, from now on, before an exception ends this process. If another rank's end caused it in a
        collective of other code, the exception gets a note that names that rank. Our own errors name it already.

        Args:
            names_lost: whether these ranks take part in collectives of other code.
        """
        self._hook = sys.excepthook = Announcement(self, sys.excepthook, names_lost)

    def be_silent(self) -> None:
        """Stops announcing exceptions. Removes hooks unless other code has put its own before them: memberships of
        attention servers come and go, and their hooks must not pile up."""
        if self._hook is not None:
            self._hook.is_silent = True
        while isinstance(sys.excepthook, Announcement) and sys.excepthook.is_silent:
            sys.excepthook = sys.excepthook.earlier
        hook: ExceptHook = sys.excepthook
        while isinstance(hook, Announcement):
            while isinstance(hook.earlier, Announcement) and hook.earlier.is_silent:
                hook.earlier = hook.earlier.earlier
            hook = hook.earlier


class Announcement:
    """An exception hook that leaves the message of an error for other ranks."""

    def __init__(self, call: RollCall, earlier: ExceptHook, names_lost: bool) -> None:
        self._call, self._names_lost = call, names_lost
        self.earlier = earlier
        self.is_silent = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Leaves a message, unless the roll call is over, and passes the error on."""
        if not self.is_silent:
            self._leave(error)
        self.earlier(kind, error, trace)

    def _leave(self, error: BaseException) -> None:
        cause = cause_of(error)
        if self._names_lost and tells_of_a_lost_peer(cause) and not isinstance(cause, DistCAError):
            for message in filter(None, (self._call.in_vain, *self._call.in_words(self._call.missing()))):
                error.add_note(f"distca_hf: {message}")
        self._call.leave(f"{type(cause).__name__}: {cause}", follows=tells_of_a_lost_peer(cause))


def show_errors_once() -> None:
    """From now on, shows our uncaught errors once per job. Calling it again changes nothing."""
    hook: ExceptHook = sys.excepthook
    while isinstance(hook, Announcement):  # hooks of plugins that have opened their groups
        hook = hook.earlier
    if not isinstance(hook, ShownOnce):
        sys.excepthook = ShownOnce(sys.excepthook)


class ShownOnce:
    """An exception hook that shows an error of several ranks only on the first of them."""

    def __init__(self, earlier: ExceptHook) -> None:
        self._earlier = earlier

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Shows the error, or points to the rank that does."""
        cause = cause_of(error)
        message, rank = f"{type(cause).__name__}: {cause}", this_rank()
        if isinstance(error, Exception):  # not Ctrl-C
            leave_for_launcher(message, follows=tells_of_a_lost_peer(cause))
        if not isinstance(sys.excepthook, Announcement) and dist.is_initialized():
            # The others may still wait for this rank to open groups with them.
            RollCall(default_store(), rank, ()).leave(message, follows=tells_of_a_lost_peer(cause))
        if not isinstance(cause, DistCAError):
            self._earlier(kind, error, trace)
            return
        shown_by = first_rank_with(message, rank)
        if shown_by != rank:
            self._point(f"ends with the same {type(cause).__name__} as rank {shown_by}, which shows it")
            return
        self._point(message)  # before a traceback of many lines
        # If another rank was lost, the message names it; the place at which this rank waited says nothing.
        if not isinstance(cause, PeerLostError):
            self._earlier(kind, error, trace)

    def _point(self, message: str) -> None:
        sys.stderr.write(printable(f"{NAME} [rank {this_rank()}] {message}\n"))
        sys.stderr.flush()


def first_rank_with(message: str, rank: int) -> int:
    """Returns the first rank that ended with this message; this rank if the job's store cannot be asked.

    Ignores differences in the name by which a rank calls itself.
    """
    alike = re.sub(rf"\brank {rank}\b", "rank", message)
    key = hashlib.blake2b(alike.encode(), digest_size=8).hexdigest()
    try:
        if not dist.is_initialized():
            return rank
        store = PrefixStore(f"{NAME}/uncaught", default_store())
        return int(store.compare_set(key, "", str(rank)))
    except (RuntimeError, ValueError):  # the store went with the rank that kept it
        return rank
