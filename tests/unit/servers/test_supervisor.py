"""Supervisor of an attention server: children that end in every way, signals, and no child that outlives it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import HANG_SECONDS, REPOSITORY
from support.waiting import is_running, wait_until


# A server that does nothing but end. The ways in which its processes end come first, the supervisor's numbers last.
# One that serves sends no byte, so that it may be silent for long.
CHILD = """
import os, signal, sys
*ends, number, trainers, servers, restarts, pipe = sys.argv[1:]
end = ends[int(restarts)]
if end == "stopped":
    os.write(int(pipe), b".")
    os.kill(os.getpid(), signal.SIGSTOP)
if end.startswith("serves"):
    def leave(*_):
        status = end.removeprefix("serves, then ")
        os.kill(os.getpid(), signal.SIGKILL) if status == "killed" else os._exit(int(status))
    signal.signal(signal.SIGTERM, leave)
with open("lives", "a") as file:
    print(number, trainers, servers, restarts, os.getpid(), file=file, flush=True)
while end.startswith("serves"):
    signal.pause()
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""
SUPERVISOR = """
import sys
from distca_hf.servers import supervisor
supervisor.SHORT_LIVES = 4
assert "torch" not in sys.modules
sys.exit(supervisor.supervise(2, 5, 3, [sys.executable, "-S", "-c", *sys.argv[1:]]))
"""


class Supervisor:
    """A supervisor in a process of its own, with children that end in these ways."""

    def __init__(self, folder: Path, *ends: str) -> None:
        self._lives = folder / "lives"
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, CHILD, *ends],
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "DISTCA_TIMEOUTS_HEARTBEAT_LIMIT_SECONDS": "1"},
        )

    def lives(self) -> list[list[int]]:
        """Numbers that every process was given, and its process."""
        lines = self._lives.read_text().splitlines() if self._lives.exists() else []
        return [[int(word) for word in line.split()] for line in lines]

    def end(self) -> tuple[int, str]:
        """Exit status, and all words."""
        _, words = self.process.communicate(timeout=HANG_SECONDS)
        return self.process.returncode, words


@pytest.fixture
def supervisors(tmp_path: Path) -> Iterator[list[Supervisor]]:
    """Those that a test has started; what is left of them is killed."""
    started: list[Supervisor] = []
    yield started
    for one in started:
        one.process.kill()
        one.end()


def run_to_end(folder: Path, supervisors: list[Supervisor], *ends: str) -> tuple[int, str, int]:
    """Exit status, words, and how many children there were."""
    supervisors.append(Supervisor(folder, *ends))
    status, words = supervisors[-1].end()
    lives = supervisors[-1].lives()
    assert [life[:4] for life in lives] == [[2, 5, 3, restarts] for restarts in range(len(lives))]
    assert not any(map(is_running, (life[4] for life in lives)))
    return status, words, len(lives)


def test_a_server_that_ends_well_ends_its_supervisor(tmp_path: Path, supervisors: list[Supervisor]) -> None:
    assert run_to_end(tmp_path, supervisors, "0", "1") == (0, "", 1)


def test_a_killed_server_is_replaced(tmp_path: Path, supervisors: list[Supervisor]) -> None:
    status, words, lives = run_to_end(tmp_path, supervisors, "killed", "killed", "0")

    assert (status, lives) == (0, 3)
    assert "attention server 2 (restart 1) was killed by signal 9; another process takes its place" in words


def test_a_server_that_is_silent_is_killed_and_replaced(tmp_path: Path, supervisors: list[Supervisor]) -> None:
    """The stopped one has noted nothing: the first life is the second child."""
    supervisors.append(Supervisor(tmp_path, "stopped", "0"))
    status, words = supervisors[-1].end()

    assert status == 0
    assert "attention server 2 (restart 0) was silent for too long, and was killed" in words
    assert [life[3] for life in supervisors[-1].lives()] == [1]


def test_an_error_may_happen_once(tmp_path: Path, supervisors: list[Supervisor]) -> None:
    status, words, lives = run_to_end(tmp_path, supervisors, "1", "killed", "7", "0")

    assert (status, lives) == (7, 3)
    assert "attention server 2 (restart 2) ended with status 7, as an earlier process of it; the job ends" in words


def test_a_server_that_is_alone_is_not_replaced(tmp_path: Path, supervisors: list[Supervisor]) -> None:
    assert run_to_end(tmp_path, supervisors, "3", "0") == (3, "", 1)


def test_a_server_that_cannot_live_is_left_out(tmp_path: Path, supervisors: list[Supervisor]) -> None:
    status, words, lives = run_to_end(tmp_path, supervisors, *["killed"] * 4, "1")

    assert (status, lives) == (0, 4)
    assert "as 4 processes of it in a row; no other is started" in words


@pytest.mark.parametrize(("then", "status"), [("0", 0), ("1", 143)])
def test_a_signal_reaches_the_server_which_is_not_replaced_then(
    tmp_path: Path, supervisors: list[Supervisor], then: str, status: int
) -> None:
    one = Supervisor(tmp_path, "killed", f"serves, then {then}", "1")
    supervisors.append(one)
    wait_until(lambda: len(one.lives()) == 2)
    one.process.send_signal(signal.SIGTERM)

    assert one.end()[0] == status
    assert len(one.lives()) == 2


def test_a_server_that_alone_gets_a_signal_is_replaced(tmp_path: Path, supervisors: list[Supervisor]) -> None:
    one = Supervisor(tmp_path, "1", "serves, then 143", "0")
    supervisors.append(one)
    wait_until(lambda: len(one.lives()) == 2)
    os.kill(one.lives()[1][4], signal.SIGTERM)

    status, words = one.end()
    assert (status, len(one.lives())) == (0, 3)
    assert "(restart 1) was killed by signal" in words


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels kill no child; it ends at its next heartbeat")
def test_a_server_dies_with_its_supervisor(tmp_path: Path, supervisors: list[Supervisor]) -> None:
    one = Supervisor(tmp_path, "serves, then 0")
    supervisors.append(one)
    wait_until(one.lives)
    server = one.lives()[0][4]
    os.kill(server, signal.SIGSTOP)  # so that no broken pipe can end it
    one.process.kill()

    wait_until(lambda: not is_running(server))
