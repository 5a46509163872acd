"""Mailboxes in a store: order, damage, an empty queue, a store that is gone."""

import numpy as np
import pytest
import torch.distributed as dist

from distca_hf.comm import mailbox
from distca_hf.comm.mailbox import Inbox, Outbox, has_ended, note_end, open_store, read, write
from distca_hf.comm.orders import Kind, Order
from distca_hf.errors import ConfigError, PeerLostError, PlanMismatchError


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of a launcher, and the variables that name it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"USE_AGENT_STORE": "True", "RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def _order(*numbers: int) -> Order:
    return Order(Kind.CALL, 1, np.array(numbers, dtype=np.int64))


def test_orders_come_in_turn_to_the_server_they_are_for(launcher: dist.TCPStore) -> None:
    outbox = Outbox(open_store(5), ((0, 0), (2, 0)))
    for number in (4, 5):
        outbox.post(_order(number))

    for server in (0, 2):
        inbox = Inbox(open_store(5), server, 0)
        assert [inbox.next().numbers.tolist() for _ in range(2)] == [[4], [5]]


def test_an_empty_mailbox_has_no_order(launcher: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "LOOK_SECONDS", 0.0)
    Outbox(open_store(5), ((1, 0),)).post(_order())

    assert Inbox(open_store(5), 0, 0).next() is None


def test_a_foreign_message_is_refused(launcher: dist.TCPStore) -> None:
    dist.PrefixStore("distca_hf/servers/2", launcher).queue_push("orders/0.0", b"attend, please")

    with pytest.raises(PlanMismatchError, match="attention server 0: an order of 14 bytes is damaged"):
        Inbox(open_store(5), 0, 0).next()


def test_attempts_have_mailboxes_of_their_own(launcher: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "LOOK_SECONDS", 0.0)
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
