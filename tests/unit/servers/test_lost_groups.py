"""Groups of NCCL that lose a member: nothing is started on one that was aborted, and no call waits for ever."""

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from distca_hf.comm.grid import Grid
from distca_hf.comm.rollcall import RollCall
from distca_hf.comm.transport import AllToAll
from distca_hf.errors import PeerLostError, ServerLostError
from distca_hf.servers import memberships
from distca_hf.servers.memberships import MembershipTransport, in_time


class Work:
    """An operation that has ended."""

    def is_completed(self) -> bool:
        return True


class Group:
    """A group of NCCL with a GPU that takes its time."""

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self.started = self.aborted = 0
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "nccl"

    def alltoall_base(
        self, received: torch.Tensor, rows: torch.Tensor, into: Sequence[int], outof: Sequence[int], opts: object
    ) -> Work:
        self.started += 1
        self.begun.set()
        assert self.goes_on.wait(60.0)
        return Work()

    def abort(self) -> None:
        self.aborted += 1
        self.goes_on.set()


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def transport(group: Group) -> Iterator[MembershipTransport]:
    rollcall = RollCall(torch.distributed.HashStore(), 0, range(2))
    opened = MembershipTransport(
        group, rollcall, torch.device("cuda", 0), Grid.flat([0], 0), lambda: "server 0 is lost", lambda: True
    )
    yield opened
    opened.close()


def _asked() -> AllToAll:
    return AllToAll(torch.zeros(2, 1), [1, 1], [1, 1], "layer 3")


def test_nothing_is_started_on_an_aborted_group(group: Group, transport: MembershipTransport) -> None:
    transport.exchange(_asked())
    transport.abort()
    with pytest.raises(ServerLostError, match="rank 0, layer 3: server 0 is lost"):
        transport.exchange(_asked())
    assert (group.started, group.aborted) == (1, 1)


def test_an_exchange_that_does_not_start_is_aborted(
    group: Group, transport: MembershipTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memberships, "START_SECONDS", 0.01)
    group.goes_on.clear()
    starting = threading.Thread(target=transport.exchange, args=(_asked(),))
    starting.start()
    assert group.begun.wait(60.0)
    transport.abort()
    starting.join(60.0)
    assert not starting.is_alive()
    assert group.aborted == 1


def test_closing_aborts_once(group: Group, transport: MembershipTransport) -> None:
    assert transport.is_at_rest
    transport.close()
    transport.close()
    assert group.aborted == 1


@pytest.mark.parametrize(
    ("left", "followers", "expected"),
    [
        ([], [], ServerLostError),
        ([1], [], PeerLostError),
        ([2], [], ServerLostError),
        ([1, 2], [], ServerLostError),
        ([1, 2], [2], PeerLostError),
        ([1, 2], [1], ServerLostError),
        ([1, 2], [1, 2], PeerLostError),
    ],
    ids=["nobody", "trainer", "server", "both", "trainer, then server", "server, then trainer", "both for this one"],
)
def test_servers_are_blamed_unless_trainers_left_first(
    left: list[int], followers: list[int], expected: type[Exception]
) -> None:
    """Ranks 0 and 1 train, 2 is a server."""
    store = torch.distributed.HashStore()
    calls = [RollCall(store, rank, range(3), 0.0, names={2: "attention server 0"}) for rank in range(3)]
    for rank, call in enumerate(calls[1:], start=1):
        if rank in left:
            call.leave("ValueError: bad row", follows=rank in followers)
        else:
            call.missing()  # it answers
    opened = MembershipTransport(
        Group(3), calls[0], torch.device("cuda", 0), Grid.flat([0, 1], 0), lambda: None, lambda: False
    )

    failed = opened.failure(RuntimeError("Connection closed by peer"), "layer 3")

    assert type(failed) is expected
    named = set(left) - set(followers) or set(left)
    assert {
        rank for rank, name in ((1, "rank 1"), (2, "attention server 0")) if f"{name} left" in str(failed)
    } == named
    opened.close()


def test_a_call_that_never_returns_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(RuntimeError, match=r"waited 0.01 s for ranks"):
        in_time(never.wait, 0.01, "ranks")
    never.set()


def test_errors_of_a_call_in_time_are_raised() -> None:
    def fail() -> None:
        raise RuntimeError("NCCL error 3")

    with pytest.raises(RuntimeError, match="NCCL error 3"):
        in_time(fail, 60.0, "ranks")
    in_time(lambda: None, 60.0, "ranks")
