"""Orders: messages that name the next attention call to a server, and the queues that they are posted to.

    trainer s mod N ── open · plan · call · call · ... · close ──▶ queue of server s, in the launcher's store
                              a reported pass: begin · call · ... · end of forward · call · ...

    | version | roster | sequence | kind | numbers ... | CRC-32 |     int64, little-endian

A server counts no layers and keeps no script: it makes each call that its trainer makes, in the same order. A message
that is damaged, comes twice or in another order is an error, and nothing is computed for it.

torchrun and accelerate launch keep a store beside their processes (`TORCHELASTIC_USE_AGENT_STORE`). It is there before
the first process and after the last one, and nothing of ours listens on a port. Keys carry the number of the attempt,
because some launchers keep the store when they start all processes again.
"""

import enum
import json
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed import DistStoreError, PrefixStore, QueueEmptyError, Store, TCPStore  # type: ignore[attr-defined]

from distca_hf.arrays import IntArray
from distca_hf.errors import PlanMismatchError, StoreLostError, first_line
from distca_hf.launched import launched_store


# Version of the messages. Trainers and servers run one package, so that it differs in a broken installation alone.
ORDER_VERSION = 4
# Numbers before those of the order: version, roster, sequence, kind.
HEADER = 4
# Dtypes of rows; an order carries a number of this list.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Seconds between two looks into an empty queue: at first, and at most. They grow, because orders of one pass follow
# each other, and between two passes there is time. The store's own waiting writes a warning at every deadline.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2e-5, 2e-3
PAUSE_GROWS = 1.2
# Seconds that a server waits for an order before it looks whether its trainers are still there.
LOOK_SECONDS = 0.5
# How long a trainer looks for the store to say that its script has ended.
END_SECONDS = 10.0


class Kind(enum.IntEnum):
    """The purpose of an order."""

    OPEN = 1  # open the connections of a roster
    PLAN = 2  # route a plan
    CALL = 3  # attend, or derive, with a plan
    CLOSE = 4  # end the connections of a roster
    BEGIN_PASS = 5  # trace the calls of a pass that begins, or do so no longer
    END_FORWARD = 6  # note that all further calls of the traced pass are of backward


class Phase(enum.IntEnum):
    """Direction of an attention call."""

    FORWARD = 0
    BACKWARD = 1


@dataclass(frozen=True, eq=False)
class Order:
    """One message.

    Attributes:
        roster: number of the connection between these trainers and servers.
        numbers: all that the order says, as int64.
    """

    kind: Kind
    roster: int
    numbers: IntArray


class PlanOrder(NamedTuple):
    """The numbers of an order to route a plan.

    Attributes:
        plan: number of the plan, counted for each roster.
        oldest: smallest number of a plan that trainers still hold; earlier ones can be dropped.
        micro_batch: number of the micro-batch, for messages.
        num_chunks: chunks of the exchange in forward.
        fingerprint: of the plan.
        integers: the plan itself.
    """

    plan: int
    oldest: int
    micro_batch: int
    num_chunks: int
    fingerprint: int
    integers: IntArray

    def numbers(self) -> IntArray:
        """Returns one array of all."""
        return np.concatenate([np.array(self[:-1], dtype=np.int64), self.integers])

    @classmethod
    def of(cls, numbers: IntArray) -> "PlanOrder":
        """Returns the order with these numbers."""
        plan, oldest, micro_batch, num_chunks, fingerprint = numbers[:5].tolist()
        return cls(plan, oldest, micro_batch, num_chunks, fingerprint, numbers[5:])


class CallOrder(NamedTuple):
    """The numbers of an order to make an attention call.

    Attributes:
        plan: number of the plan.
        phase: a `Phase`.
        query_heads, kv_heads, query_dim, value_dim: shapes of a layer's tensors, without their rows.
        dtype: number of their dtype in `DTYPES`.
        slot: number under which a server keeps rows that it received in forward until backward; 0: it keeps none.
        has_sinks: whether log-sum-exps with sinks come with the output gradients of queries that are kept.
        spec: numbers of an `AttentionSpec`, as doubles.
    """

    plan: int
    phase: int
    query_heads: int
    kv_heads: int
    query_dim: int
    value_dim: int
    dtype: int
    slot: int
    has_sinks: int
    spec: tuple[float, ...]

    def numbers(self) -> IntArray:
        """Returns one array of all; doubles by their bits."""
        spec = np.array(self.spec, dtype=np.float64).view(np.int64)
        return np.concatenate([np.array(self[:-1], dtype=np.int64), spec])

    @classmethod
    def of(cls, numbers: IntArray) -> "CallOrder":
        """Returns the order with these numbers."""
        plan, phase, query_heads, kv_heads, query_dim, value_dim, dtype, slot, has_sinks = numbers[:9].tolist()
        spec = tuple(numbers[9:].view(np.float64).tolist())
        return cls(plan, phase, query_heads, kv_heads, query_dim, value_dim, dtype, slot, has_sinks, spec)


class PassOrder(NamedTuple):
    """The numbers of an order about a pass whose calls are traced.

    Attributes:
        plan: number of the plan.
        backward_calls: that follow, at the end of forward.
        text: what to write about a pass that begins; empty: nothing any more.
    """

    plan: int
    backward_calls: int = 0
    text: str = ""

    def numbers(self) -> IntArray:
        """Returns one array of all; the text by its bytes."""
        text = self.text.encode()
        padded = np.frombuffer(text.ljust(-(-len(text) // 8) * 8, b"\0"), dtype="<i8")
        return np.concatenate([np.array([self.plan, self.backward_calls, len(text)], dtype=np.int64), padded])

    @classmethod
    def of(cls, numbers: IntArray) -> "PassOrder":
        """Returns the order with these numbers."""
        plan, backward_calls, length = numbers[:3].tolist()
        return cls(plan, backward_calls, numbers[3:].astype("<i8").tobytes()[:length].decode())


def encode(order: Order, sequence: int) -> bytes:
    """Returns an order as a message.

    Args:
        sequence: how many orders of its roster the server got before.
    """
    header = np.array([ORDER_VERSION, order.roster, sequence, order.kind], dtype="<i8").tobytes()
    body = header + np.ascontiguousarray(order.numbers, dtype="<i8").tobytes()
    return body + zlib.crc32(body).to_bytes(8, "little")


class Sequences:
    """Numbers of the next order of each roster, on the side that posts and on the side that reads."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._lock = threading.Lock()

    def encode(self, order: Order) -> bytes:
        """Returns the roster's next message."""
        return encode(order, self._take(order.roster))

    def decode(self, message: bytes, where: str) -> Order:
        """Returns the order in a message, if it is the one that comes next.

        Raises:
            PlanMismatchError: the message is damaged, of another version, or not the next one.
        """
        body, checksum = message[:-8], int.from_bytes(message[-8:], "little")
        if len(message) % 8 or len(message) < 8 * (HEADER + 1) or zlib.crc32(body) != checksum:
            raise PlanMismatchError(
                f"{where}: an order of {len(message)} bytes is damaged: its checksum is {zlib.crc32(body)}, not "
                f"{checksum}; nothing was computed for it. Restart the job"
            )
        numbers = np.frombuffer(body, dtype="<i8").astype(np.int64)
        version, roster, sequence, kind = numbers[:HEADER].tolist()
        if version != ORDER_VERSION or kind not in tuple(Kind):
            raise PlanMismatchError(
                f"{where}: an order has version {version} and kind {kind}, this server reads version {ORDER_VERSION} "
                f"and kinds {min(Kind)} to {max(Kind)}; install one version of distca_hf on all nodes"
            )
        expected = self._take(roster)
        if sequence != expected:
            raise PlanMismatchError(
                f"{where}: order {sequence} of roster {roster} came, and {expected} comes next: one was lost, or came "
                "twice; nothing was computed for it. Restart the job"
            )
        return Order(Kind(kind), roster, numbers[HEADER:])

    def _take(self, roster: int) -> int:
        with self._lock:  # autograd posts from threads of its own
            number = self._next.get(roster, 0)
            self._next[roster] = number + 1
        return number


def shares_of(num_servers: int, num_trainers: int, trainer: int) -> Sequence[int]:
    """Returns the servers that a trainer posts to. Server s gets its orders from trainer s mod N alone: all trainers
    make the same calls."""
    return range(trainer, num_servers, num_trainers)


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
            f"the launcher's store at {host}:{port} cannot be reached: {first_line(error)}"
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
                    f"({first_line(error)})"
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
                f"({first_line(error)})"
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
        raise StoreLostError(f"the launcher's store is gone, and with it the job ({first_line(error)})") from error


def _ended(trainer: int) -> str:
    return f"ended/{trainer}"


def _queue(server: int, incarnation: int) -> str:
    return f"orders/{server}.{incarnation}"
