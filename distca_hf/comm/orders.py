"""Orders: messages that name the next attention call to a server, as integers with a checksum.

    trainer s mod N ── open · plan · call · call · ... · close ──▶ queue of server s, in the launcher's store

    | version | roster | sequence | kind | numbers ... | CRC-32 |     int64, little-endian

A server counts no layers and keeps no script: it makes each call that its trainer makes, in the same order. A message
that is damaged, comes twice or in another order is an error, and nothing is computed for it.
"""

import enum
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.errors import PlanMismatchError


# Version of the messages. Trainers and servers run one package, so that it differs in a broken installation alone.
ORDER_VERSION = 1
# Numbers before those of the order: version, roster, sequence, kind.
HEADER = 4


class Kind(enum.IntEnum):
    """The purpose of an order."""

    OPEN = 1  # open the connections of a roster
    PLAN = 2  # route a plan
    CALL = 3  # attend, or derive, with a plan
    CLOSE = 4  # end the connections of a roster


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
        dtype: number of their dtype in `comm.rosters.DTYPES`.
        spec: numbers of an `AttentionSpec`, as doubles.
    """

    plan: int
    phase: int
    query_heads: int
    kv_heads: int
    query_dim: int
    value_dim: int
    dtype: int
    spec: tuple[float, ...]

    def numbers(self) -> IntArray:
        """Returns one array of all; doubles by their bits."""
        spec = np.array(self.spec, dtype=np.float64).view(np.int64)
        return np.concatenate([np.array(self[:-1], dtype=np.int64), spec])

    @classmethod
    def of(cls, numbers: IntArray) -> "CallOrder":
        """Returns the order with these numbers."""
        plan, phase, query_heads, kv_heads, query_dim, value_dim, dtype = numbers[:7].tolist()
        spec = tuple(numbers[7:].view(np.float64).tolist())
        return cls(plan, phase, query_heads, kv_heads, query_dim, value_dim, dtype, spec)


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
