"""Orders: they arrive as they were posted, or not at all; queues in a store: an empty one, a store that is gone."""

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.comm import orders
from distca_hf.comm.orders import (
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
    has_ended,
    note_end,
    open_store,
    read,
    shares_of,
    write,
)
from distca_hf.errors import ConfigError, PeerLostError, PlanMismatchError


INTEGERS = st.integers(-(2**63), 2**63 - 1)


def _order(kind: Kind = Kind.CALL, roster: int = 3, numbers: tuple[int, ...] = (7, -1)) -> Order:
    return Order(kind, roster, np.array(numbers, dtype=np.int64))


@given(st.sampled_from(Kind), st.integers(0, 2**62), st.lists(INTEGERS, max_size=30))
def test_orders_arrive_as_they_were_posted(kind: Kind, roster: int, numbers: list[int]) -> None:
    order = Sequences().decode(encode(_order(kind, roster, tuple(numbers)), 0), "server 0")

    assert (order.kind, order.roster, order.numbers.tolist()) == (kind, roster, numbers)


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


@given(st.data())
def test_damaged_orders_are_refused(data: st.DataObject) -> None:
    message = bytearray(encode(_order(), 0))
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))

    with pytest.raises(PlanMismatchError, match=r"server 1: an order of .* bytes is damaged"):
        Sequences().decode(bytes(message), "server 1")


@given(st.integers(0, 55))
def test_cut_orders_are_refused(length: int) -> None:
    with pytest.raises(PlanMismatchError, match="damaged"):
        Sequences().decode(encode(_order(), 0)[:length], "server 1")


@pytest.mark.parametrize(
    ("sequences", "words"), [((0, 0), "order 0 .* and 1 comes next"), ((0, 2), "order 2 .* and 1")]
)
def test_repeated_and_lost_orders_are_refused(sequences: tuple[int, int], words: str) -> None:
    reader = Sequences()
    reader.decode(encode(_order(), sequences[0]), "server 0")

    with pytest.raises(PlanMismatchError, match=words):
        reader.decode(encode(_order(), sequences[1]), "server 0")


def test_rosters_are_counted_apart() -> None:
    writer, reader = Sequences(), Sequences()
    messages = [writer.encode(_order(roster=roster)) for roster in (1, 2, 1)]

    assert [reader.decode(message, "server 0").roster for message in messages] == [1, 2, 1]


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
    return store


def test_orders_come_in_turn_to_the_server_they_are_for(launcher: dist.TCPStore) -> None:
    outbox = Outbox(open_store(5), ((0, 0), (2, 0)))
    for number in (4, 5):
        outbox.post(_order(numbers=(number,)))

    for server in (0, 2):
        inbox = Inbox(open_store(5), server, 0)
        assert [inbox.next().numbers.tolist() for _ in range(2)] == [[4], [5]]


def test_an_empty_mailbox_has_no_order(launcher: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "LOOK_SECONDS", 0.0)
    Outbox(open_store(5), ((1, 0),)).post(_order())

    assert Inbox(open_store(5), 0, 0).next() is None


def test_a_foreign_message_is_refused(launcher: dist.TCPStore) -> None:
    dist.PrefixStore("distca_hf/servers/2", launcher).queue_push("orders/0.0", b"attend, please")

    with pytest.raises(PlanMismatchError, match="attention server 0: an order of 14 bytes is damaged"):
        Inbox(open_store(5), 0, 0).next()


def test_attempts_have_mailboxes_of_their_own(launcher: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "LOOK_SECONDS", 0.0)
    Outbox(open_store(5), ((0, 0),)).post(_order())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")

    assert Inbox(open_store(5), 0, 0).next() is None


def test_the_end_of_a_trainer_is_noted(launcher: dist.TCPStore) -> None:
    store = open_store(5)
    note_end(1)

    assert [has_ended(store, trainer) for trainer in (0, 1)] == [False, True]


def test_mappings_are_read_as_they_were_written(launcher: dist.TCPStore) -> None:
    store = open_store(5)
    write(store, "opened", {"version": "1", "numbers": [1, 2], "none": None})

    assert read(store, "opened", 5) == {"version": "1", "numbers": [1, 2], "none": None}
    assert read(store, "missing", 0.01) is None


def test_no_launcher_has_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    with pytest.raises(ConfigError, match="start it with torchrun or accelerate launch"):
        open_store(1)


def test_a_store_that_cannot_be_reached_is_named(launcher: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")

    with pytest.raises(PeerLostError, match=r"the launcher's store at 127.0.0.1:1 cannot be reached"):
        open_store(0.1)
