"""Heartbeats: who lives, who is silent, which membership is lost; threads that leave a process able to end."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from distca_hf.servers import heartbeats
from distca_hf.servers.heartbeats import Heartbeat, Watch
from distca_hf.servers.job_store import JobStore
from support.commands import HANG_SECONDS, REPOSITORY
from support.waiting import wait_until


@pytest.fixture
def store() -> JobStore:
    return JobStore(dist.HashStore(), "of a test", "servers")


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass for looks."""
    now = [100.0]
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: now[0])

    def by(seconds: float) -> None:
        now[0] += seconds

    return by


class GoneStore:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        def gone(*_: object) -> NoReturn:
            raise dist.DistNetworkError("Broken pipe")

        return gone


def test_a_server_lives_from_its_first_beat_until_it_is_silent_for_too_long(
    store: JobStore, advance: Callable[[float], None]
) -> None:
    watch = Watch(store, 2, 1.0)
    heartbeat = Heartbeat(store, 1, 4, None)
    assert watch.look()
    assert watch.restarts(1) is None

    heartbeat.beat()
    watch.look()
    assert (watch.restarts(0), watch.restarts(1)) == (None, 4)
    for _ in range(4):
        advance(0.25)
        watch.look()
    assert (watch.restarts(1), watch.silent_seconds(1), watch.silent_seconds(0)) == (4, 1.0, 1.0)

    advance(0.25)
    watch.look()
    assert (watch.restarts(1), watch.silent_seconds(1)) == (None, 1.25)
    heartbeat.beat()
    watch.look()
    assert (watch.restarts(1), watch.silent_seconds(1)) == (4, 0.0)


def test_a_copied_beat_keeps_no_server_alive(store: JobStore, advance: Callable[[float], None]) -> None:
    """One that somebody else has written there again, or made up."""
    watch, heartbeat = Watch(store, 1, 1.0), Heartbeat(store, 0, 3, None)
    copies = []
    for _ in range(2):
        heartbeat.beat()
        copies.append(store.plain.get("beat/0"))
    watch.look()
    for value in (*copies, b"4.1", b"x", *copies):
        advance(0.25)
        store.plain.set("beat/0", value)
        watch.look()

    assert watch.restarts(0) is None


def test_a_trainer_that_did_not_look_blames_no_server(store: JobStore, advance: Callable[[float], None]) -> None:
    watch = Watch(store, 1, 3.0)
    Heartbeat(store, 0, 0, None).beat()
    watch.look()
    advance(1000.0)
    watch.look()

    assert watch.restarts(0) == 0
    assert watch.silent_seconds(0) == heartbeats.LONGEST_LOOK_SECONDS


def test_all_learn_that_a_membership_is_lost_and_why(store: JobStore) -> None:
    first, second, server = Watch(store, 0, 1.0), Watch(store, 0, 1.0), Heartbeat(store, 0, 0, None)
    for side in (first, second, server):
        side.look_for(7)
    first.abandon(7, "attention server 0 on host a is silent")
    assert first.is_abandoned(7)
    assert not second.is_abandoned(7)
    assert not server.is_abandoned(7)

    second.look()
    server.beat()
    assert second.is_abandoned(7)
    assert server.is_abandoned(7)
    assert not second.is_abandoned(8)
    second.abandon(7, "my exchange failed")
    assert first._messages == second._messages == {7: "attention server 0 on host a is silent"}


@pytest.mark.parametrize("kind", ["trainer", "server"])
def test_memberships_of_several_plugins_are_looked_for_until_they_are_left(kind: str, store: JobStore) -> None:
    other = Watch(store, 0, 1.0)
    side = Watch(store, 0, 1.0) if kind == "trainer" else Heartbeat(store, 0, 0, None)
    look = side.look if isinstance(side, Watch) else side.beat
    for membership in (1, 2, 3):
        side.look_for(membership)
    side.leave(2)
    for membership in (1, 2, 3):
        other.abandon(membership, "lost")
    look()

    assert [side.is_abandoned(membership) for membership in (1, 2, 3)] == [True, False, True]


def test_every_beat_reaches_the_supervisor(store: JobStore) -> None:
    end, pipe = os.pipe()
    heartbeat = Heartbeat(store, 0, 0, pipe)
    heartbeat.beat()
    heartbeat.beat()
    os.close(pipe)

    assert os.read(end, 10) == b".."
    os.close(end)


def test_a_server_without_a_store_or_a_supervisor_ends(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> NoReturn:
        raise SystemExit(status)

    monkeypatch.setattr(heartbeats.os, "_exit", leave)
    end, pipe = os.pipe()
    os.close(end)

    for lonely in (Heartbeat(GoneStore(), 0, 0, None), Heartbeat(store, 0, 0, pipe)):
        with pytest.raises(SystemExit, match="3"):
            lonely.beat()
    os.close(pipe)


def test_a_trainer_without_a_store_stops_looking() -> None:
    watch = Watch(GoneStore(), 1, 1.0)
    watch.begin()
    wait_until(lambda: not watch._thread.is_alive())

    watch.abandon(1, "lost")
    assert watch.is_abandoned(1)
    assert watch.restarts(0) is None
    watch.end()


def test_threads_beat_and_look_until_they_are_ended(store: JobStore) -> None:
    heartbeat, watch = Heartbeat(store, 0, 2, None), Watch(store, 1, HANG_SECONDS)
    heartbeat.begin()
    watch.begin()
    wait_until(lambda: watch.restarts(0) == 2)
    first = store.get("beat/0")
    wait_until(lambda: store.get("beat/0") != first)

    for side in (heartbeat, watch):
        side.end()
        side.end()  # once more changes nothing
        assert not side._thread.is_alive()


# Without pauses, a thread is inside a call of the store at nearly every moment.
ENDS_WITHOUT_A_WORD = """
import time
import torch.distributed as dist
from distca_hf.servers import heartbeats
from distca_hf.servers.job_store import JobStore
heartbeats.BEAT_SECONDS = heartbeats.LOOK_SECONDS = 0.0
launcher = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
tcp = [dist.TCPStore("127.0.0.1", launcher.port, is_master=False) for _ in range(2)]
own = [JobStore(store, "of a test", "servers") for store in tcp]
heartbeats.Heartbeat(own[0], 0, 0, None).begin()
watch = heartbeats.Watch(own[1], 1, 1.0)
watch.begin()
while watch.restarts(0) is None:
    time.sleep(0.01)
raise SystemExit(5)
"""


def test_a_process_that_ends_meanwhile_keeps_its_status() -> None:
    line = [sys.executable, "-c", ENDS_WITHOUT_A_WORD]
    ended = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)

    assert ended.returncode == 5, ended.stderr


def test_a_stopped_process_has_seen_no_stalled_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mark:
        def query(self) -> bool:
            return False

        def record(self, stream: object) -> None: ...

    seconds = [0.0]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(heartbeats.Repeated, "begin", lambda thread: None)
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: seconds[0])
    progress = heartbeats.StreamProgress(torch.device("cpu"))
    progress._look()
    for now in (0.25, 0.5, 900.0):
        seconds[0] = now
        stalled_seconds = progress.stalled_seconds()
    monkeypatch.undo()

    assert stalled_seconds == 0.5 + heartbeats.LONGEST_LOOK_SECONDS
