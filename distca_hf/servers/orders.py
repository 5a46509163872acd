"""Orders: messages that tell a server the next attention call, and their queues.

    trainer s mod N ── open · plan · call · call · ... · close ──▶ queue of server s, in the launcher's store
                              a reported pass: begin · call · ... · end of forward · call · ...

    | version | membership | sequence | kind | numbers ... |     int64, little-endian, signed (see `job_store`)

A server counts no layers and runs no script: it makes each call that its trainer makes, in the same order. It ignores
messages that this job did not sign, or that came before. A missing message is an error.
"""

import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from distca_hf.arrays import IntArray
from distca_hf.errors import PlanMismatchError, StoreLostError, first_line
from distca_hf.servers.job_store import JobStore
from distca_hf.telemetry import OF_THIS_RANK, get_logger


log = get_logger(__name__)

# Version of the messages. Trainers and servers run the same package, so it differs only in a broken installation.
ORDER_VERSION = 5
# Numbers before the order's: version, membership, sequence, kind.
HEADER = 4
# Dtypes of rows; an order carries a number of this list.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Seconds between two looks into an empty queue: at first, and at most. They grow, because orders of one pass follow
# each other quickly, and between passes there is time. The store's own wait would log a warning at every deadline.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2e-5, 2e-3
PAUSE_GROWS = 1.2
# Seconds that a server waits for an order before it checks whether its trainers are still there.
LOOK_SECONDS = 0.5


class Kind(enum.IntEnum):
    """The purpose of an order."""

    OPEN = 1  # open the connections of a membership
    PLAN = 2  # route a plan
    CALL = 3  # attend, or derive, with a plan
    CLOSE = 4  # end the connections of a membership
    BEGIN_PASS = 5  # trace the calls of a pass that begins
    END_FORWARD = 6  # note that all further calls of the traced pass are backward calls


class Phase(enum.IntEnum):
    """Direction of an attention call."""

    FORWARD = 0
    BACKWARD = 1


@dataclass(frozen=True, eq=False)
class Order:
    """One message."""

    kind: Kind
    membership: int
    numbers: IntArray


class PlanOrder(NamedTuple):
    """The numbers of an order to route a plan."""

    plan: int
    oldest: int  # smallest number of a plan that trainers still hold; earlier ones can be dropped
    micro_batch: int
    num_chunks: int  # chunks of the exchange in forward
    fingerprint: int
    integers: IntArray

    def numbers(self) -> IntArray:
        """Returns all fields as one array."""
        return np.concatenate([np.array(self[:-1], dtype=np.int64), self.integers])

    @classmethod
    def of(cls, numbers: IntArray) -> "PlanOrder":
        plan, oldest, micro_batch, num_chunks, fingerprint = numbers[:5].tolist()
        return cls(plan, oldest, micro_batch, num_chunks, fingerprint, numbers[5:])


class CallOrder(NamedTuple):
    """The numbers of an order to make an attention call."""

    plan: int
    phase: int
    # Shapes of a layer's tensors, without their rows.
    query_heads: int
    kv_heads: int
    query_dim: int
    value_dim: int
    dtype: int  # index of their dtype in `DTYPES`
    slot: int  # number under which a server keeps rows received in forward until backward; 0: it keeps none
    has_sinks: int  # whether log-sum-exps with sinks come with the output gradients of kept queries
    spec: tuple[float, ...]  # numbers of an `AttentionSpec`, as doubles

    def numbers(self) -> IntArray:
        """Returns all fields as one array; doubles as their bits."""
        spec = np.array(self.spec, dtype=np.float64).view(np.int64)
        return np.concatenate([np.array(self[:-1], dtype=np.int64), spec])

    @classmethod
    def of(cls, numbers: IntArray) -> "CallOrder":
        plan, phase, query_heads, kv_heads, query_dim, value_dim, dtype, slot, has_sinks = numbers[:9].tolist()
        spec = tuple(numbers[9:].view(np.float64).tolist())
        return cls(plan, phase, query_heads, kv_heads, query_dim, value_dim, dtype, slot, has_sinks, spec)


class PassOrder(NamedTuple):
    """The numbers of an order about a pass whose calls are traced."""

    plan: int
    backward_calls: int = 0  # number of backward calls that follow, at the end of forward
    text: str = ""  # a `ReportedPass`, at the beginning of a pass

    def numbers(self) -> IntArray:
        """Returns all fields as one array; the text as its bytes."""
        text = self.text.encode()
        padded = np.frombuffer(text.ljust(-(-len(text) // 8) * 8, b"\0"), dtype="<i8")
        return np.concatenate([np.array([self.plan, self.backward_calls, len(text)], dtype=np.int64), padded])

    @classmethod
    def of(cls, numbers: IntArray) -> "PassOrder":
        plan, backward_calls, length = numbers[:3].tolist()
        return cls(plan, backward_calls, numbers[3:].astype("<i8").tobytes()[:length].decode())


def encode(order: Order, sequence: int) -> bytes:
    """Returns an order as a message. `sequence` is the number of earlier orders of this membership to the server."""
    header = np.array([ORDER_VERSION, order.membership, sequence, order.kind], dtype="<i8").tobytes()
    return header + np.ascontiguousarray(order.numbers, dtype="<i8").tobytes()


class Sequences:
    """Numbers of the next order of each membership, on the posting and on the reading side."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._lock = threading.Lock()

    def encode(self, order: Order) -> bytes:
        """Returns the membership's next message."""
        with self._lock:  # autograd posts from its own threads
            sequence = self._next.get(order.membership, 0)
            self._next[order.membership] = sequence + 1
        return encode(order, sequence)

    def decode(self, message: bytes, where: str) -> Order | None:
        """Returns the order in a signed message; if it came before, warns and returns None. Raises PlanMismatchError
        if the message is of another version, or one before it is missing."""
        numbers = np.frombuffer(message, dtype="<i8").astype(np.int64)
        version, membership, sequence, kind = numbers[:HEADER].tolist()
        if version != ORDER_VERSION or kind not in tuple(Kind):
            raise PlanMismatchError(
                f"{where}: an order has version {version} and kind {kind}, this server reads version {ORDER_VERSION} "
                f"and kinds {min(Kind)} to {max(Kind)}; install one version of distca_hf on all nodes"
            )
        expected = self._next.get(membership, 0)
        if sequence > expected:
            raise PlanMismatchError(
                f"{where}: expected order {expected} of membership {membership}, received {sequence}: one was lost; "
                "nothing was computed for it. Restart the job"
            )
        if sequence < expected:
            log.warning(
                "%s: order %d of membership %d came again, after order %d, and is left out: somebody else writes to "
                "the launcher's store (MASTER_PORT)",
                *(where, sequence, membership, expected - 1),
                extra=OF_THIS_RANK,
            )
            return None
        self._next[membership] = expected + 1
        return Order(Kind(kind), membership, numbers[HEADER:])


def shares_of(num_servers: int, num_trainers: int, trainer: int) -> Sequence[int]:
    """Returns the servers that a trainer posts to. Server s gets its orders only from trainer s mod N, because all
    trainers make the same calls."""
    return range(trainer, num_servers, num_trainers)


class Outbox:
    """A trainer's end of the mailboxes of a membership: posts orders to the servers that this trainer posts to."""

    def __init__(self, store: JobStore, servers: Sequence[tuple[int, int]]) -> None:
        self._store = store
        self._sequences = {server: Sequences() for server in servers}

    def post(self, order: Order) -> None:
        """Posts an order to each server. Raises StoreLostError if the store is gone."""
        for server, sequences in self._sequences.items():
            try:
                self._store.push(_queue(*server), sequences.encode(order))
            except RuntimeError as error:
                raise StoreLostError(
                    f"attention server {server[0]} cannot be reached: the launcher's store is gone "
                    f"({first_line(error)})"
                ) from error


class Inbox:
    """A server's end of its mailbox. Orders for earlier processes of the server are not read."""

    def __init__(self, store: JobStore, server: int, restarts: int = 0) -> None:
        self._store, self._server, self._sequences = store, server, Sequences()
        self._queue = _queue(server, restarts)

    def next(self) -> Order | None:
        """Returns the next order; None if none came for a while. Raises PlanMismatchError if an order is of another
        version, or one before it is missing; StoreLostError if the store is gone, and with it the job."""
        pause, deadline = FIRST_PAUSE_SECONDS, time.monotonic() + LOOK_SECONDS
        where = f"attention server {self._server}"
        try:
            while (message := self._store.pop(self._queue)) is None:
                if time.monotonic() > deadline:
                    return None
                time.sleep(pause)
                pause = min(LONGEST_PAUSE_SECONDS, PAUSE_GROWS * pause)
        except RuntimeError as error:
            raise StoreLostError(
                f"{where}: the launcher's store is gone, and with it the job ({first_line(error)})"
            ) from error
        return self._sequences.decode(message, where)


def _queue(server: int, restarts: int) -> str:
    return f"orders/{server}.{restarts}"
