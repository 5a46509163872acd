"""Orders: they arrive as they were posted, or not at all; queues in a store: an empty one, a store that is gone."""

import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.errors import ConfigError, PeerLostError, PlanMismatchError
from distca_hf.servers import orders
from distca_hf.servers.job_store import JobStore, has_ended, note_end, open_store
from distca_hf.servers.orders import (
    CallOrder,
    Inbox,
    Kind,
    Order,
    Outbox,
    PassOrder,
    Phase,
    PlanOrder,
    Sequences,
    encode,
    shares_of,
)
from support.commands import HANG_SECONDS


INTEGERS = st.integers(-(2**63), 2**63 - 1)
SECRET = "of a test"


def _order(kind: Kind = Kind.CALL, membership: int = 3, numbers: tuple[int, ...] = (7, -1)) -> Order:
    return Order(kind, membership, np.array(numbers, dtype=np.int64))


@given(st.sampled_from(Kind), st.integers(0, 2**62), st.lists(INTEGERS, max_size=30))
def test_orders_arrive_as_they_were_posted(kind: Kind, membership: int, numbers: list[int]) -> None:
    order = Sequences().decode(encode(_order(kind, membership, tuple(numbers)), 0), "server 0")

    assert (order.kind, order.membership, order.numbers.tolist()) == (kind, membership, numbers)


@given(st.lists(INTEGERS, min_size=5, max_size=5), st.lists(INTEGERS, max_size=20))
def test_plans_are_their_numbers(scalars: list[int], integers: list[int]) -> None:
    order = PlanOrder(*scalars, integers=np.array(integers, dtype=np.int64))
    found = PlanOrder.of(order.numbers())

    assert (*found[:-1], found.integers.tolist()) == (*scalars, integers)


@given(st.lists(st.floats(allow_nan=False), max_size=6))
def test_calls_are_their_numbers(spec: list[float]) -> None:
    order = CallOrder(1, Phase.BACKWARD, 8, 2, 64, 128, 2, 7, True, tuple(spec))

    assert CallOrder.of(order.numbers()) == order


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.text("aé0", max_size=20))
def test_traced_passes_are_their_numbers(plan: int, calls: int, text: str) -> None:
    assert PassOrder.of(PassOrder(plan, calls, text).numbers()) == PassOrder(plan, calls, text)


def test_a_lost_order_is_an_error() -> None:
    reader = Sequences()
    reader.decode(encode(_order(), 0), "server 0")

    with pytest.raises(PlanMismatchError, match="expected order 1 of membership 3, received 2: one was lost"):
        reader.decode(encode(_order(), 2), "server 0")


def test_memberships_are_counted_apart() -> None:
    writer, reader = Sequences(), Sequences()
    messages = [writer.encode(_order(membership=membership)) for membership in (1, 2, 1)]

    assert [reader.decode(message, "server 0").membership for message in messages] == [1, 2, 1]


@given(st.integers(1, 9), st.integers(1, 9))
def test_every_server_gets_its_orders_from_one_trainer(trainers: int, servers: int) -> None:
    shares = [server for trainer in range(trainers) for server in shares_of(servers, trainers, trainer)]

    assert sorted(shares) == list(range(servers))


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of a launcher, and the variables that name it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"USE_AGENT_STORE": "True", "RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("DISTCA_JOB_SECRET", SECRET)
    return store


def test_orders_come_in_turn_to_the_server_they_are_for(launcher: dist.TCPStore) -> None:
    outbox = Outbox(open_store(HANG_SECONDS), ((0, 0), (2, 0)))
    for number in (4, 5):
        outbox.post(_order(numbers=(number,)))

    for server in (0, 2):
        inbox = Inbox(open_store(HANG_SECONDS), server, 0)
        assert [inbox.next().numbers.tolist() for _ in range(2)] == [[4], [5]]


def test_an_empty_mailbox_has_no_order(launcher: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "LOOK_SECONDS", 0.0)
    Outbox(open_store(HANG_SECONDS), ((1, 0),)).post(_order())

    assert Inbox(open_store(HANG_SECONDS), 0, 0).next() is None


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda signed: b"attend, please",
    "nothing": lambda signed: b"",
    "an order of another version, with its checksum": lambda signed: _with_checksum(signed[:-16]),
    "a changed order": lambda signed: signed[:24] + bytes([Kind.CLOSE]) + signed[25:],
    "a cut order": lambda signed: signed[:-8],
    "a changed MAC": lambda signed: signed[:-1] + bytes([signed[-1] ^ 1]),
    "one of another secret": lambda signed: _signed("guessed", "distca_hf/servers/2", "orders/0.0", signed[:-16]),
    "one to another server": lambda signed: _signed(SECRET, "distca_hf/servers/2", "orders/1.0", signed[:-16]),
    "one of an earlier attempt": lambda signed: _signed(SECRET, "distca_hf/servers/1", "orders/0.0", signed[:-16]),
}


def _with_checksum(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(8, "little")


def _signed(secret: str, path: str, key: str, message: bytes) -> bytes:
    store = dist.HashStore()
    JobStore(store, secret, path).set(key, message)
    return dist.PrefixStore(path, store).get(key)


def _push(queue: dist.Store, message: bytes) -> None:
    queue.queue_push("orders/0.0", message)
    queue.queue_len("orders/0.0")  # the store does not answer a push: what another connection sends could overtake it


def test_orders_of_strangers_are_left_out(launcher: dist.TCPStore, caplog: pytest.LogCaptureFixture) -> None:
    """The server goes on with those of its trainer, and warns once."""
    queue, outbox = dist.PrefixStore("distca_hf/servers/2", launcher), Outbox(open_store(HANG_SECONDS), ((0, 0),))
    signed = _signed(SECRET, "distca_hf/servers/2", "orders/0.0", encode(_order(numbers=(4,)), 0))
    for number, forge in enumerate(FORGERIES.values()):
        _push(queue, forge(signed))
        outbox.post(_order(numbers=(number,)))
    inbox = Inbox(open_store(HANG_SECONDS), 0, 0)

    assert [inbox.next().numbers.tolist() for _ in FORGERIES] == [[number] for number, _ in enumerate(FORGERIES)]
    assert [
        "orders/0.0 in the launcher's store: 14 bytes are not signed" in one.message for one in caplog.records
    ] == [True]


def test_an_order_that_is_posted_again_is_left_out(launcher: dist.TCPStore, caplog: pytest.LogCaptureFixture) -> None:
    outbox, queue = Outbox(open_store(HANG_SECONDS), ((0, 0),)), dist.PrefixStore("distca_hf/servers/2", launcher)
    inbox = Inbox(open_store(HANG_SECONDS), 0, 0)
    outbox.post(_order(numbers=(4,)))
    copy = queue.queue_pop("orders/0.0")
    for _ in range(2):
        _push(queue, copy)
    outbox.post(_order(numbers=(5,)))

    assert [None if order is None else order.numbers.tolist() for order in (inbox.next() for _ in range(3))] == [
        [4],
        None,
        [5],
    ]
    assert "order 0 of membership 3 came again, after order 0" in caplog.text


def test_values_of_strangers_count_as_not_there(launcher: dist.TCPStore) -> None:
    store, strangers = open_store(HANG_SECONDS), dist.PrefixStore("distca_hf/servers/2", launcher)
    for key in ("ended/0", "abandoned/1", "opened", "beat/0"):
        strangers.set(key, "1")

    assert not has_ended(store, 0)
    assert store.read("opened", 0.01) is None
    assert store.get_all(["beat/0"]) == [b""]
    assert store.set_first("abandoned/1", b"ours") == store.set_first("abandoned/1", b"later") == b"ours"


def test_another_secret_is_named_where_a_process_begins(
    launcher: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        open_store(HANG_SECONDS).check_secret()
    monkeypatch.setenv("DISTCA_JOB_SECRET", "another")

    with pytest.raises(ConfigError, match="this process and the first one of the job have different values of DISTCA"):
        open_store(HANG_SECONDS).check_secret()


def test_the_end_of_a_trainer_is_noted(launcher: dist.TCPStore) -> None:
    store = open_store(HANG_SECONDS)
    note_end(1)

    assert [has_ended(store, trainer) for trainer in (0, 1)] == [False, True]


def test_mappings_are_read_as_they_were_written(launcher: dist.TCPStore) -> None:
    store = open_store(HANG_SECONDS)
    store.write("opened", {"version": "1", "numbers": [1, 2], "none": None})

    assert store.read("opened", 5) == {"version": "1", "numbers": [1, 2], "none": None}
    assert store.read("missing", 0.01) is None


def test_no_launcher_has_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    with pytest.raises(ConfigError, match="start it with torchrun or accelerate launch"):
        open_store(1)


def test_a_store_that_cannot_be_reached_is_named(launcher: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")

    with pytest.raises(PeerLostError, match=r"the launcher's store at 127.0.0.1:1 cannot be reached"):
        open_store(0.1)
