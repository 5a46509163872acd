"""Job store: signed values that trainers and attention servers write for each other in the launcher's store.

    key, value ── MAC with the secret of the job ──▶ store ──▶ compared before the value is used

torchrun and accelerate launch keep a store next to their processes (`TORCHELASTIC_USE_AGENT_STORE`), from before the
first process until after the last one, so this package opens no port. The store listens on all interfaces, and anyone
who reaches it can write to it. So every value carries a MAC (keyed BLAKE2b) of the value, its key and the number of
the attempt, because some launchers keep the store when they restart all processes. A value without the right MAC is
ignored.
"""

import hashlib
import hmac
import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Self

from torch.distributed import DistStoreError, PrefixStore, QueueEmptyError, Store, TCPStore  # type: ignore[attr-defined]

from distca_hf.errors import ConfigError, StoreLostError, first_line
from distca_hf.launched import JOB_SECRET, job_secret, launched_store
from distca_hf.telemetry import OF_THIS_RANK, get_logger


log = get_logger(__name__)

MAC_BYTES = 16
# Seconds between two looks for an awaited value that had a wrong MAC.
LOOK_SECONDS = 0.05
# How long a trainer tries to reach the store to report that its script has ended.
END_SECONDS = 10.0


class JobStore:
    """Values that processes of this job have signed."""

    def __init__(self, store: Store, secret: str, path: str) -> None:
        # This part without signatures, for libraries that write to it themselves.
        self.plain: Store = PrefixStore(path, store)
        self._store, self._secret, self._path = store, secret, path
        self._macs: dict[str, hashlib.blake2b] = {}
        self._has_warned = False

    def part(self, name: str) -> Self:
        return type(self)(self._store, self._secret, f"{self._path}/{name}")

    def check_secret(self) -> None:
        """Checks that this process has the same secret as the first one. Raises ConfigError if it has another
        secret."""
        if not self._opened("secret", self.plain.compare_set("secret", "", self._signed("secret", b"same"))):  # type: ignore[arg-type]
            raise ConfigError(
                f"this process and the first one of the job have different values of {JOB_SECRET}, or somebody else "
                f"reaches MASTER_PORT: give one random text to all processes, on every node"
            )

    def set(self, key: str, value: bytes) -> None:
        self.plain.set(key, self._signed(key, value))  # type: ignore[arg-type]  # it takes bytes, too

    def get(self, key: str) -> bytes:
        """Returns a value without waiting; empty if there is none."""
        return self._opened(key, self.plain.compare_set(key, "", ""))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Returns values in one request. Waits for missing keys: call `get` for each before, or write it."""
        return [self._opened(key, found) for key, found in zip(keys, self.plain.multi_get(list(keys)), strict=True)]

    def set_first(self, key: str, value: bytes) -> bytes:
        """Writes a value unless there is one, and returns the present value."""
        there = self.plain.compare_set(key, "", self._signed(key, value))  # type: ignore[arg-type]  # as above
        found = self._opened(key, there)
        if not found:  # another process, without the secret, has written it
            self.set(key, value)
        return found or value

    def write(self, key: str, values: Mapping[str, object]) -> None:
        """Writes a mapping of names to values, as JSON."""
        self.set(key, json.dumps(values).encode())

    def read(self, key: str, timeout_seconds: float) -> dict[str, object] | None:
        """Returns the mapping at a key; None if nothing was written before the deadline."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                self.plain.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except DistStoreError:  # the deadline has passed
                return None
            if found := self.get(key):
                return dict(json.loads(found))
            if time.monotonic() > deadline:
                return None
            time.sleep(LOOK_SECONDS)

    def push(self, key: str, message: bytes) -> None:
        self.plain.queue_push(key, self._signed(key, message))

    def pop(self, key: str) -> bytes | None:
        """Returns the next message of a queue; None if there is none."""
        while True:
            try:
                found = self._opened(key, self.plain.queue_pop(key, False))
            except QueueEmptyError:
                return None
            if found:
                return found

    def _signed(self, key: str, value: bytes) -> bytes:
        return value + self._mac(key, value)

    def _opened(self, key: str, found: bytes) -> bytes:
        """Returns a value without its MAC; if the MAC is wrong, warns and returns an empty value."""
        value = found[:-MAC_BYTES]
        if hmac.compare_digest(found[-MAC_BYTES:], self._mac(key, value)):
            return value
        if found and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s/%s in the launcher's store: %d bytes are not signed with the secret of this job, and are left "
                "out, as all others like them will be. Somebody else reaches MASTER_PORT, or nodes have other "
                "values of %s",
                *(self._path, key, len(found), JOB_SECRET),
                extra=OF_THIS_RANK,
            )
        return b""

    def _mac(self, key: str, value: bytes) -> bytes:
        begun = self._macs.get(key)
        if begun is None:
            secret = hashlib.sha256(self._secret.encode()).digest()
            whole_key = f"{self._path}/{key}\0".encode()
            begun = self._macs[key] = hashlib.blake2b(whole_key, digest_size=MAC_BYTES, key=secret)
        mac = begun.copy()
        mac.update(value)
        return mac.digest()


def open_store(timeout_seconds: float) -> JobStore:
    """Opens another connection to the launcher's store: a waiting call then delays no other user. Raises ConfigError
    if no launcher keeps a store, or the processes of the job share no secret; StoreLostError if it cannot be
    reached."""
    host, port, attempt = launched_store()
    secret = job_secret()
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise StoreLostError(
            f"the launcher's store at {host}:{port} cannot be reached: {first_line(error)}"
        ) from error
    return JobStore(store, secret, f"distca_hf/servers/{attempt}")


def note_end(trainer: int) -> None:
    """Notes that a trainer's script has ended, with or without an error: its servers get no more orders."""
    open_store(END_SECONDS).set(_ended(trainer), b"1")


def has_ended(store: JobStore, trainer: int) -> bool:
    """Returns whether a trainer's script has ended. Raises StoreLostError if the store is gone."""
    try:
        return bool(store.get(_ended(trainer)))
    except RuntimeError as error:
        raise StoreLostError(f"the launcher's store is gone, and with it the job ({first_line(error)})") from error


def _ended(trainer: int) -> str:
    return f"ended/{trainer}"
