"""Errors that all ranks have are shown by one of them; the launcher's summary shows the message."""

import errno
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import distca_hf
from distca_hf.comm import rollcall
from distca_hf.comm.rollcall import RollCall, ShownOnce, show_errors_once
from distca_hf.errors import ConfigError, PackingError, PeerLostError, StepTimeoutError
from distca_hf.telemetry import leave_for_launcher
from support.commands import HANG_SECONDS, SCRIPTS
from support.ranks import Outcome, start_ranks


def _raise(kind: str) -> None:
    distca_hf.DistCAPlugin()
    rank = dist.get_rank()
    if kind == "same":
        raise ConfigError(f"rank {rank}, micro-batch 3: tokens_per_rank=5 is too small")
    if kind == "own":
        raise PackingError(f"row {rank} is empty")
    if kind == "lost" and rank == 0:
        raise PeerLostError("rank 0, micro-batch 3: rank 1 left: PackingError: row 5 is empty")
    if kind == "lost":
        raise PackingError("row 5 is empty")
    raise ValueError("of somebody else")


def shown(outcomes: list[Outcome]) -> list[tuple[bool, list[str]]]:
    """Whether the exception hook of a rank shows a traceback, and the lines that point elsewhere. The process itself
    prints one before."""
    return [
        (
            outcome.output.count("Traceback (most recent call last)") == 2,
            [line.partition("distca_hf ")[2] for line in outcome.output.splitlines() if "distca_hf [" in line],
        )
        for outcome in outcomes
    ]


def test_error_of_all_ranks_is_shown_by_one_and_the_others_point_there(tmp_path: Path) -> None:
    outcomes = start_ranks(3, _raise, tmp_path, "same")

    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 1]
    (first,) = (rank for rank, (traced, _) in enumerate(shown(outcomes)) if traced)
    told = f"ends with the same ConfigError as rank {first}, which shows it"
    message = f"[rank {first}] ConfigError: rank {first}, micro-batch 3: tokens_per_rank=5 is too small"
    assert shown(outcomes) == [
        (True, [message]) if rank == first else (False, [f"[rank {rank}] {told}"]) for rank in range(3)
    ]


def test_errors_that_differ_are_all_shown(tmp_path: Path) -> None:
    lines = [[f"[rank {rank}] PackingError: row {rank} is empty"] for rank in range(2)]

    assert shown(start_ranks(2, _raise, tmp_path, "own")) == [(True, line) for line in lines]


def test_rank_that_lost_another_points_to_it_in_one_line(tmp_path: Path) -> None:
    lost = "[rank 0] PeerLostError: rank 0, micro-batch 3: rank 1 left: PackingError: row 5 is empty"
    own = "[rank 1] PackingError: row 5 is empty"

    assert shown(start_ranks(2, _raise, tmp_path, "lost")) == [(False, [lost]), (True, [own])]


def test_errors_of_somebody_else_are_shown_as_ever(tmp_path: Path) -> None:
    assert shown(start_ranks(2, _raise, tmp_path, "foreign")) == [(True, []), (True, [])]


SCRIPT = """
import torch.distributed as dist
import distca_hf

dist.init_process_group("gloo")
distca_hf.DistCAPlugin(tokens_per_rank=-1)
"""


def test_summary_of_the_launcher_shows_the_message(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run(
        [SCRIPTS / "torchrun", "--standalone", "--nproc-per-node", "2", tmp_path / "script.py"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    summary = ended.stderr.partition("Root Cause")[2]

    assert ended.returncode == 1
    assert "ConfigError: tokens_per_rank=-1 must be at least 0" in summary, ended.stderr
    assert "To enable traceback see" not in summary
    of_ranks = ended.stderr.count("Traceback (most recent call last)") - 1  # one is of the launcher itself
    assert of_ranks == 1, ended.stderr
    before = ended.stderr.partition("Traceback (most recent call last)")[0]
    assert "ConfigError: tokens_per_rank=-1 must be at least 0" in before, "the message comes first"


# --- in one process


def test_hook_is_put_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    show_errors_once()
    first = sys.excepthook
    show_errors_once()

    assert isinstance(first, ShownOnce)
    assert sys.excepthook is first


@pytest.mark.parametrize(("shown_by", "traced"), [(0, True), (1, False)])
def test_second_plugin_shows_no_error_twice(
    shown_by: int, traced: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is made after the first one has opened its groups, which announce errors to other ranks."""
    store, seen = HashStore(), list[BaseException]()
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    monkeypatch.setattr(rollcall, "first_rank_with", lambda words, rank: shown_by)
    show_errors_once()
    RollCall(store, 0, range(2)).announce_uncaught_errors()
    show_errors_once()
    error = ConfigError("wrong")
    sys.excepthook(ConfigError, error, None)

    assert len(capsys.readouterr().err.splitlines()) == 1
    assert seen == [error] * traced
    assert RollCall(store, 1, range(2)).missing() == {0: "left: ConfigError: wrong"}


def test_message_for_the_launcher_is_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    leave_for_launcher("first")
    leave_for_launcher("second")

    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "first"


def _late(error: StepTimeoutError) -> StepTimeoutError:
    error.lost_ranks = (1,)
    return error


@pytest.mark.parametrize(
    "follower",
    [
        PeerLostError("rank 0, micro-batch 3: rank 1 left: ValueError: mine"),
        _late(StepTimeoutError("rank 0, micro-batch 3: rank 1 does not answer")),
        RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:23975"),
    ],
)
@pytest.mark.parametrize("cause", [ValueError("mine"), PackingError("row 5 is empty"), StepTimeoutError("all answer")])
def test_launcher_finds_the_rank_that_ended_first(
    cause: Exception, follower: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both end in one second; then the launcher takes the lower rank."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    failures = {}
    for rank, error in enumerate((follower, cause)):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        ShownOnce(lambda *_: None)(type(error), error, None)
        failures[rank] = ProcessFailure(rank, pid=rank, exitcode=1, error_file=str(tmp_path / f"{rank}.json"))

    rank, first = ChildFailedError("script", failures).get_first_failure()
    assert rank == 1
    assert first.message["message"] == f"{type(cause).__name__}: {cause}"


def test_launcher_finds_no_part_of_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_a_part(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:5].encode(encoding))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_a_part)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    leave_for_launcher("words")

    assert list(tmp_path.iterdir()) == []


def test_error_is_shown_where_nothing_can_be_left_for_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "folder" / "error.json"))
    seen: list[BaseException] = []
    error = ConfigError("wrong")
    ShownOnce(lambda kind, error, trace: seen.append(error))(ConfigError, error, None)

    assert seen == [error]
