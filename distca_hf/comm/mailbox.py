"""Mailboxes: queues of orders in the launcher's store, where trainers and attention servers meet.

torchrun and accelerate launch keep a store beside their processes (`TORCHELASTIC_USE_AGENT_STORE`). It is there before
the first process and after the last one, and nothing of ours listens on a port. Keys carry the number of the attempt,
because some launchers keep the store when they start all processes again.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, QueueEmptyError, Store, TCPStore  # type: ignore[attr-defined]

from distca_hf.comm.orders import Order, Sequences
from distca_hf.errors import StoreLostError
from distca_hf.launched import launched_store


# Seconds between two looks into an empty queue: at first, and at most. They grow, because orders of one pass follow
# each other, and between two passes there is time. The store's own waiting writes a warning at every deadline.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2e-5, 2e-3
PAUSE_GROWS = 1.2
# Seconds that a server waits for an order before it looks whether its trainers are still there.
LOOK_SECONDS = 0.5
# How long a trainer looks for the store to say that its script has ended.
END_SECONDS = 10.0


def open_store(timeout_seconds: float) -> Store:
    """Returns a connection of its own to the launcher's store: a call that waits in it delays no other user.

    Raises:
        ConfigError: no launcher keeps one.
        StoreLostError: it cannot be reached.
    """
    host, port, attempt = launched_store()
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise StoreLostError(
            f"the launcher's store at {host}:{port} cannot be reached: {str(error).partition(chr(10))[0][:300]}"
        ) from error
    return PrefixStore(f"distca_hf/servers/{attempt}", store)


class Outbox:
    """The trainers' end of all mailboxes of a roster: orders for the servers that this trainer posts to.

    Args:
        servers: number and start of each.
    """

    def __init__(self, store: Store, servers: Sequence[tuple[int, int]]) -> None:
        self._store = store
        self._sequences = {server: Sequences() for server in servers}

    def post(self, order: Order) -> None:
        """Posts an order to each server.

        Raises:
            StoreLostError: the store is gone.
        """
        for server, sequences in self._sequences.items():
            try:
                self._store.queue_push(_queue(*server), sequences.encode(order))
            except RuntimeError as error:
                raise StoreLostError(
                    f"attention server {server[0]} cannot be reached: the launcher's store is gone "
                    f"({str(error).partition(chr(10))[0][:300]})"
                ) from error


class Inbox:
    """A server's end of its mailbox.

    Args:
        server: number of the server.
        incarnation: how often it was started before; an earlier one's orders are not its own.
    """

    def __init__(self, store: Store, server: int, incarnation: int = 0) -> None:
        self._store, self._server, self._sequences = store, server, Sequences()
        self._queue = _queue(server, incarnation)

    def next(self) -> Order | None:
        """Returns the next order; None if none came for a while.

        Raises:
            PlanMismatchError: a message is damaged, or not the next one.
            StoreLostError: the store is gone, and with it the job.
        """
        pause, deadline = FIRST_PAUSE_SECONDS, time.monotonic() + LOOK_SECONDS
        while (message := self._pop()) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, PAUSE_GROWS * pause)
        return self._sequences.decode(message, f"attention server {self._server}")

    def _pop(self) -> bytes | None:
        """Returns the next message; None if there is none."""
        try:
            message: bytes = self._store.queue_pop(self._queue, False)
        except QueueEmptyError:
            return None
        except RuntimeError as error:
            raise StoreLostError(
                f"attention server {self._server}: the launcher's store is gone, and with it the job "
                f"({str(error).partition(chr(10))[0][:300]})"
            ) from error
        return message


def write(store: Store, key: str, values: Mapping[str, object]) -> None:
    """Writes a mapping of names to values at a key, as JSON."""
    store.set(key, json.dumps(values))


def read(store: Store, key: str, timeout_seconds: float) -> dict[str, object] | None:
    """Returns the mapping at a key; None if nothing was written before the deadline."""
    try:
        store.wait([key], timedelta(seconds=timeout_seconds))
    except DistStoreError:  # the deadline has passed
        return None
    return dict(json.loads(store.get(key)))


def note_end(trainer: int) -> None:
    """Notes that a trainer's script has ended, well or with an error: its servers get no more orders."""
    open_store(END_SECONDS).set(_ended(trainer), "1")


def has_ended(store: Store, trainer: int) -> bool:
    """Returns whether a trainer's script has ended.

    Raises:
        StoreLostError: the store is gone.
    """
    try:
        return bool(store.check([_ended(trainer)]))
    except RuntimeError as error:
        raise StoreLostError(
            f"the launcher's store is gone, and with it the job ({str(error).partition(chr(10))[0][:300]})"
        ) from error


def _ended(trainer: int) -> str:
    return f"ended/{trainer}"


def _queue(server: int, incarnation: int) -> str:
    return f"orders/{server}.{incarnation}"
