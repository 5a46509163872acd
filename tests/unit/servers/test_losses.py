"""A server that is lost again and again is left out of later memberships; trainers go on with the others, or alone."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from distca_hf.comm.transport import AllToAll, Arrived, LocalTransport
from distca_hf.errors import ConfigError, PeerLostError, ServerLostError, StoreLostError
from distca_hf.planning.plan import PlanFacts
from distca_hf.runtime.posted import AnnouncedCall
from distca_hf.servers import heartbeats, served_transport
from distca_hf.servers.heartbeats import MOST_LOSSES
from distca_hf.servers.job_store import JobStore
from distca_hf.servers.memberships import Member, membership_store
from distca_hf.servers.posted_plans import PostedPlan, Slots
from distca_hf.servers.served_plans import Servers
from distca_hf.servers.served_transport import ServedTransport
from distca_hf.servers.speeds import Reading, ServerSpeeds
from support.parity import SPEC


FACTS = PlanFacts(1, 1, (1,), (1,), (0,))


class Watch(heartbeats.Watch):
    """Heartbeats of servers that a test starts anew."""

    def __init__(self, store: Any, num_servers: int, limit_seconds: float) -> None:
        super().__init__(store, num_servers, limit_seconds)
        self.started, self.has_ended = [0] * num_servers, False
        self.abandoned: dict[int, str] = {}

    def restarts(self, server: int) -> int:
        return self.started[server]

    def begin(self, *calls: object) -> None: ...

    def end(self) -> None:
        self.has_ended = True

    def look_for(self, membership: int) -> None: ...

    def leave(self, membership: int) -> None: ...

    def is_abandoned(self, membership: int) -> bool:
        return False

    def abandon(self, membership: int, words: str) -> None:
        self.abandoned[membership] = words

    def silent_seconds(self, server: int) -> float:
        return 0.0


class Mark:
    """A mark in the stream of a GPU that comes no further once `is_stuck`."""

    is_stuck = False

    def __init__(self) -> None:
        self._is_passed = True

    def record(self, stream: object) -> None:
        self._is_passed = not Mark.is_stuck

    def query(self) -> bool:
        return self._is_passed


class Wires:
    """Connections of a membership without a group."""

    is_at_rest = True

    def exchange(self, asked: AllToAll) -> Arrived:
        return Arrived(asked.rows)

    def abort(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> ServedTransport:
    return transport_with(monkeypatch)


def transport_with(monkeypatch: pytest.MonkeyPatch, count: int = 2, trainers_attend: bool = True) -> ServedTransport:
    def connect(transport: ServedTransport, patience_seconds: float) -> Any:
        names = {server: f"attention server {server} on far" for server, _ in transport.members}
        transport._watch.losses.names |= names
        return Wires()

    monkeypatch.setattr(served_transport, "open_store", lambda seconds: JobStore(HashStore(), "of a test", "servers"))
    monkeypatch.setattr(served_transport, "Watch", Watch)
    monkeypatch.setattr(ServedTransport, "_connect", connect)
    monkeypatch.setattr(ServerSpeeds, "_reports", lambda speeds: [Reading()] * len(speeds._members))
    servers = Servers((1.0,) * count, trainers_attend)
    return ServedTransport(LocalTransport(), torch.device("cpu"), servers, {"server_speed": 1.0}, 1.0, 1.0, 0.0)


def lose(transport: ServedTransport, server: int) -> None:
    """A step in which a server is lost; the next process of it is there already."""
    transport.begin_step()
    transport._watch.started[server] += 1  # type: ignore[attr-defined]
    transport.failure(PeerLostError("connection closed"))
    assert not transport.end_step()


def run_step(transport: ServedTransport) -> None:
    transport.begin_step()
    assert transport.end_step()


def test_a_server_that_no_step_counts_with_is_left_out(
    transport: ServedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "distca_hf"):
        for losses in range(MOST_LOSSES):
            assert transport.members == (Member(0, losses), Member(1, 0))
            lose(transport, 0)
        assert transport.members == (Member(1, 0),)
        assert transport.extra_ranks == Servers((1.0,))
        run_step(transport)
        transport._watch.started[0] += 1  # type: ignore[attr-defined]
        run_step(transport)

    assert transport.members == (Member(1, 0),)
    assert transport.servers_lost == MOST_LOSSES
    excluded = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert len(excluded) == 1
    assert excluded[0].startswith(f"attention server 0 on far was lost {MOST_LOSSES} times in a row")


def test_a_step_that_counts_forgives_earlier_losses(transport: ServedTransport) -> None:
    for _ in range(3):
        for _ in range(MOST_LOSSES - 1):
            lose(transport, 0)
        run_step(transport)

    assert [member.server for member in transport.members] == [0, 1]
    assert transport.servers_lost == 3 * (MOST_LOSSES - 1)


def test_without_the_last_server_trainers_attend_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = transport_with(monkeypatch, count=1)
    for _ in range(MOST_LOSSES):
        lose(transport, 0)
    assert (transport.members, transport.extra_ranks) == ((), None)
    run_step(transport)


def test_without_the_last_server_that_alone_may_attend_training_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = transport_with(monkeypatch, count=1, trainers_attend=False)
    for _ in range(MOST_LOSSES - 1):
        lose(transport, 0)
    with pytest.raises(PeerLostError, match="none of 1 attention servers is left, and trainers_attend=False"):
        lose(transport, 0)


def test_a_server_that_joins_at_the_second_opening_is_named(
    transport: ServedTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect, openings = ServedTransport._connect, list[int]()

    def fail_first(transport: ServedTransport, patience_seconds: float) -> Any:
        openings.append(transport.membership)
        if len(openings) == 1:
            raise PeerLostError("waited in vain")
        return connect(transport, patience_seconds)

    monkeypatch.setattr(ServedTransport, "_connect", fail_first)
    monkeypatch.setattr(Member, "has_answered", lambda *_: True)  # the connection fails, no server hangs
    with caplog.at_level(logging.INFO, "distca_hf"):
        lose(transport, 0)

    assert len(openings) == 2
    joined = [one.getMessage() for one in caplog.records if "takes part from now on" in one.getMessage()]
    assert joined == ["attention server 0 (restart 1) takes part from now on"]


def test_behind_a_step_that_an_error_ended_attention_fails(transport: ServedTransport) -> None:
    """Zeros there would be learnt: nothing runs again outside of a step."""
    transport.begin_step()
    posted, rows = PostedPlan(transport, 0, 1, 5, np.zeros(0, dtype=np.int64)), torch.zeros(1, 1, 1)
    lost = ServerLostError("connection closed")
    transport.failure(PeerLostError("connection closed"))
    assert posted.runs_again(lost)
    transport.leave_step()

    assert not posted.runs_again(lost)
    with pytest.raises(ServerLostError, match="connection closed"):
        posted.forward(AnnouncedCall(rows, rows, rows, SPEC, FACTS), keeps=False)
    transport.begin_step()
    assert posted.runs_again(lost)
    assert not transport.end_step()


def test_a_slot_is_open_for_one_backward_pass() -> None:
    slots = Slots()
    first, second = slots.open(), slots.open()
    assert [slots.close(torch.empty(slot, 0)) for slot in (second, first, first, 0, 9)] == [second, first, 0, 0, 0]


def test_a_membership_that_cannot_be_opened_is_given_up(
    transport: ServedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that met in vain would wait for it, and miss the next one."""

    def fail(transport: ServedTransport, patience_seconds: float) -> Any:
        monkeypatch.undo()
        monkeypatch.setattr(ServedTransport, "_connect", lambda *_: Wires())
        raise PeerLostError("waited in vain")

    monkeypatch.setattr(ServedTransport, "_connect", fail)
    lost = transport.membership
    lose(transport, 0)

    assert transport._watch.abandoned == {lost: "connection closed", lost + 1: "waited in vain"}  # type: ignore[attr-defined]
    assert transport.membership == lost + 2


def test_a_transport_without_a_store_ends_here(transport: ServedTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def fail(order: object) -> None:
        raise StoreLostError("the store is gone")

    monkeypatch.setattr(transport._outbox, "post", fail)
    monkeypatch.setattr(transport._watch, "end", lambda: ended.append("heartbeats"), raising=False)
    monkeypatch.setattr(transport._wires, "close", lambda: ended.append("membership"))
    with pytest.raises(StoreLostError):
        transport.close()
    assert ended == ["heartbeats", "membership"]


@pytest.fixture
def ended(transport: ServedTransport, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts the transport on a GPU; returns the words with which it ends the process."""
    words: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(Mark, "is_stuck", False)
    monkeypatch.setattr(heartbeats.Repeated, "begin", lambda thread: None)
    monkeypatch.setattr(transport, "_end_process", words.append)
    transport._progress = heartbeats.StreamProgress(torch.device("cpu"))
    return words


ASKED = AllToAll(torch.zeros(2, 1), [1, 1], [1, 1], "layer 3")


def lose_outside_of_a_step(transport: ServedTransport) -> None:
    """A server is lost; the threads that look at the stream and at heartbeats look once."""
    assert transport._progress is not None
    transport._progress._look()
    transport._watch.started[0] += 1  # type: ignore[attr-defined]
    transport._look_at_exchanges()


def test_a_server_that_is_lost_while_a_checkpoint_is_saved_is_named_at_the_next_exchange(
    transport: ServedTransport, ended: list[str]
) -> None:
    """In a loop whose steps cannot run again. The GPU waits for nothing meanwhile."""
    transport.exchange(ASKED).wait()
    lose_outside_of_a_step(transport)

    assert not ended
    with pytest.raises(ServerLostError, match=r"layer 3: attention server 0 on far is lost: .* No step can run again"):
        transport.exchange(ASKED)


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_server_that_the_gpu_waits_for_ends_the_process(
    is_waited_for: bool, transport: ServedTransport, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport.exchange(ASKED).wait()
    monkeypatch.setattr(Mark, "is_stuck", True)
    exchange = transport.exchange(ASKED)
    if is_waited_for:
        exchange.wait()
    lose_outside_of_a_step(transport)

    assert len(ended) == 1
    assert "attention server 0 on far is lost" in ended[0]


def test_exchanges_of_a_step_that_ended_end_no_process(transport: ServedTransport, ended: list[str]) -> None:
    """Exchanges before the first step have ended with it, also those that nobody waited for."""
    transport.exchange(ASKED)
    run_step(transport)
    lose_outside_of_a_step(transport)
    assert not ended


@pytest.mark.parametrize("why", ["no heartbeat", "no membership"])
def test_a_transport_that_cannot_be_opened_leaves_no_thread(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watches: list[Watch] = []

    def watch(*arguments: Any) -> Watch:
        watches.append(Watch(*arguments))
        if why == "no heartbeat":
            monkeypatch.setattr(watches[0], "restarts", lambda server: None)
        return watches[0]

    def refuse(transport: ServedTransport, patience_seconds: float) -> Any:
        raise ConfigError("attention server 0 refuses")

    monkeypatch.setattr(served_transport, "open_store", lambda seconds: JobStore(HashStore(), "of a test", "servers"))
    monkeypatch.setattr(served_transport, "Watch", watch)
    monkeypatch.setattr(ServedTransport, "_connect", refuse)
    with pytest.raises((PeerLostError, ConfigError), match=r"found no heartbeat|server 0 refuses"):
        ServedTransport(LocalTransport(), torch.device("cpu"), Servers((1.0,)), {}, 1.0, 0.0, 0.0)
    assert watches[0].has_ended


def test_a_server_that_has_a_heartbeat_and_does_not_answer_is_left_out(
    transport: ServedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(transport: ServedTransport, patience_seconds: float) -> Any:
        for server, _ in transport.members:
            if server == 0:
                raise PeerLostError("attention server 0 did not answer")
            membership_store(transport._store, transport.membership).write(f"server/{server}", {})
        return Wires()

    monkeypatch.setattr(ServedTransport, "_connect", connect)
    membership_store(transport._store, transport.membership + 1).write("server/1", {})  # the other one has answered
    lose(transport, 1)

    assert transport.members == (Member(1, 1),)
    for _ in range(MOST_LOSSES):
        run_step(transport)
    assert transport.members == (Member(1, 1),)
