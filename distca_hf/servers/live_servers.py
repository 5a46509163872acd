"""Live servers: which attention servers take part in a trainer's rosters, and how often each was lost.

A server lives while its heartbeat is heard. It is named by its number and its start: the process that replaces a lost
one has another start, and joins the next roster.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from distca_hf.errors import PeerLostError
from distca_hf.servers.heartbeats import Watch
from distca_hf.servers.rosters import Member
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Times in a row that a server may be lost before a step counted with it.
MOST_LOSSES = 5
# Seconds between two looks at heartbeats.
LOOK_SECONDS = 0.05


class LiveServers:
    """Servers of the job, as the heartbeats and losses that this trainer has seen show them.

    Args:
        watch: sees their heartbeats.
        count: servers that were launched.

    Attributes:
        losses: how often each was lost.
    """

    def __init__(self, watch: Watch, count: int) -> None:
        self._watch, self._count, self.losses = watch, count, LostServers()

    def starts(self, hang: Sequence[int] = ()) -> list[int]:
        """Returns the start of each server, counted from 1; 0 for one that hangs, is lost, or was lost too often."""
        seen = enumerate(map(self._watch.incarnation, range(self._count)))
        out = {*hang, *filter(self.losses.is_excluded, range(self._count))}
        return [0 if start is None or server in out else start + 1 for server, start in seen]

    def wait_for_all(self, rank: int, patience_seconds: float) -> None:
        """Waits until all servers have a heartbeat.

        Args:
            rank: that waits, for messages.

        Raises:
            PeerLostError: some have none at the deadline; names them.
        """
        deadline = time.monotonic() + patience_seconds
        while 0 in (starts := self.starts()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        silent = [str(server) for server, start in enumerate(starts) if not start]
        if silent:
            raise PeerLostError(
                f"rank {rank} waited {patience_seconds:g} s (timeouts.agreement_seconds) for attention server "
                f"{', '.join(silent)} of {self._count}, and found no heartbeat; look at its own messages"
            )

    def wait_for_a_loss(self, members: Sequence[Member], patience_seconds: float) -> None:
        """Waits until a heartbeat of these members is missed: a broken connection is seen earlier."""
        deadline = time.monotonic() + patience_seconds
        while self._members() == tuple(members) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def lost_of(self, members: Sequence[Member]) -> str | None:
        """Returns words about a member that is lost; None if there is none."""
        for server, incarnation in members:
            if self._watch.incarnation(server) != incarnation:
                name, seconds = self.losses.name_of(server), self._watch.silent_seconds(server)
                return f"{name} is lost: its last heartbeat is {seconds:.1f} s old"
        return None

    def _members(self) -> tuple[Member, ...]:
        return tuple(Member(server, start - 1) for server, start in enumerate(self.starts()) if start)


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
                "training. Look at its own messages above, and at its GPU",
                name,
                MOST_LOSSES,
            )

    def is_excluded(self, server: int) -> bool:
        """Returns whether a server was lost too often to take part again."""
        return self._in_a_row[server] >= MOST_LOSSES
