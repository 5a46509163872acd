"""Traces: lines are read as they were written, others are refused in words; what stays in the file of a rank."""

import json
import logging
import re
import resource
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distca_hf.comm.transport import LocalTransport
from distca_hf.cost import TokenBytes
from distca_hf.errors import ReportError
from distca_hf.servers.posted_plans import ReportedPass, ServedTraces
from distca_hf.trace_file import TraceFile, read_trace, step_of
from distca_hf.traces import RankTrace, file_name
from support.made_traces import made_trace


TRACE = made_trace(1, ranks=4, slow_rank=2)


def steps_of(folder: Path, number: int = 0) -> list[int]:
    lines = (folder / file_name(number)).read_text().splitlines()
    return [read_trace(line, "here").step for line in lines]


@pytest.mark.parametrize("trace", [TRACE, replace(TRACE, costs=None, step_seconds=None, calls=(), sent_bytes=())])
def test_line_is_read_as_it_was_written(trace: RankTrace) -> None:
    assert read_trace(trace.line(), "here") == trace


CONTENT = json.loads(TRACE.line())
WRONG = {
    "cut off": (TRACE.line()[:-40], "is not JSON: the file is cut off"),
    "a list": ("[1, 2]", "is not a trace of a training: its kind is None"),
    "another kind": ('{"kind": "trace"}', "its kind is 'trace', and 'distca-trace' is read here"),
    "another version": (json.dumps(CONTENT | {"version": 2}), "is of version 2, and version 3 is read here"),
    "a field less": (json.dumps({name: CONTENT[name] for name in CONTENT if name != "work"}), "has no 'work'"),
    "a text for a number": (json.dumps(CONTENT | {"step": "2"}), "has '2' where a int belongs"),
    "a truth for a number": (json.dumps(CONTENT | {"tokens": True}), "has 'True' where a int belongs"),
    "three for a pair": (json.dumps(CONTENT | {"sent_bytes": [[1, 2, 3]]}), "has '[1, 2, 3]' where a tuple belongs"),
    "another use": (json.dumps(CONTENT | {"calls": [CONTENT["calls"][0] | {"spans": [["sleep", 1.0]]}]}), "'sleep'"),
    "no object": (json.dumps(CONTENT | {"memory": 5}), "has '5' where a MemoryUse belongs"),
    "a very large number": (json.dumps(CONTENT | {"tokens": 2**63}), "whole number 9223372036854775808, larger than"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_lines_are_refused_in_words(name: str) -> None:
    line, words = WRONG[name]
    with pytest.raises(ReportError) as refused:
        read_trace(line, "rank-00000.jsonl line 3")

    assert str(refused.value).startswith("rank-00000.jsonl line 3 ")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 7}, "rank 7 of 4 ranks"),
        ({"num_ranks": 10**12}, "of 1000000000000 ranks"),
        ({"work_before": []}, "work of 0 and"),
        ({"speeds": [0.0, 1.0]}, "speeds of 2 ranks"),
        ({"speeds": [1.0, 0.0, 1.0, 1.0]}, "rank 1 of speed 0.0 with the work 4"),
        ({"ranks_per_node": 0}, "0 ranks per node"),
        ({"sent_bytes": [[-1, 5]]}, "bytes of rank -1"),
        ({"pass_seconds": float("nan")}, "the number NaN"),
        ({"pass_seconds": float("inf")}, "the number Infinity"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ReportError, match=re.escape(words)):
        read_trace(json.dumps({**json.loads(TRACE.line()), **changes}), "here")


def test_lines_that_python_cannot_read_are_refused() -> None:
    for line, words in (
        ("[" * 100_000, "is not JSON"),
        ('{"kind":"distca-trace","version":2,"step":' + "9" * 5000 + "}", "has the number 9999"),
    ):
        assert step_of(line) is None
        with pytest.raises(ReportError, match=words):
            read_trace(line, "here")


def test_full_disk_leaves_no_part_of_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TraceFile(str(tmp_path))
    file.write(0, replace(TRACE, step=2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(TRACE.line()) + 100, limits[1]))
    try:
        with caplog.at_level(logging.WARNING, "distca_hf"):
            file.write(0, replace(TRACE, step=4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)

    assert "the trace of step 4 cannot be written" in caplog.text
    assert (tmp_path / file_name(0)).read_text() == replace(TRACE, step=2).line() + "\n"


def test_file_of_something_else_is_replaced_and_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / file_name(0)).write_bytes(b"\xff\xfe\x00" * 10)
    TraceFile(str(tmp_path)).write(0, replace(TRACE, step=4))

    assert steps_of(tmp_path) == [4]


def test_another_run_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    for steps in ((2, 4, 6), (2, 4)):
        file = TraceFile(str(tmp_path / "traces"))
        for step in steps:
            file.write(0, replace(TRACE, step=step))

    assert steps_of(tmp_path / "traces") == [2, 4]


def test_run_that_is_resumed_keeps_the_steps_before(tmp_path: Path) -> None:
    first = TraceFile("")
    for step in (2, 4, 6):
        first.follow_trainer(str(tmp_path), step)
        first.write(3, replace(TRACE, step=step))
    with (tmp_path / "distca_report" / file_name(3)).open("a") as file:
        file.write(TRACE.line()[:100])  # killed
    resumed = TraceFile("")
    resumed.follow_trainer(str(tmp_path), 4)
    resumed.write(3, replace(TRACE, step=4))

    assert steps_of(tmp_path / "distca_report", 3) == [2, 4]


def test_server_that_rejoins_writes_on(tmp_path: Path) -> None:
    """What its earlier process wrote about a step that ran again is taken back."""
    served = replace(TRACE, rank=4, servers=(7,), work=(*TRACE.work, 1.0e8))
    for steps in ((2, 4), (4, 6)):
        file = TraceFile(str(tmp_path))
        for step in steps:
            file.write(7, replace(served, step=step))

    lines = (tmp_path / "server-00007.jsonl").read_text().splitlines()
    assert [read_trace(line, "here").step for line in lines] == [2, 4, 6]


def test_file_that_cannot_be_written_is_a_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    file = TraceFile(str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "distca_hf"):
        for step in (2, 4):
            file.write(0, replace(TRACE, step=step))

    (record,) = caplog.records
    assert "the trace of step 2 cannot be written" in record.getMessage()
    assert "report_folder" in record.getMessage()


def test_server_writes_no_trace_outside_of_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An order names the folder; links do not lead out of the root."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "root")
    outside = (tmp_path / "other", tmp_path / "root" / "link" / "traces", tmp_path / "root" / ".." / "rooted")
    inside = (tmp_path / "root", tmp_path / "root" / "run" / "distca_report")
    for root in (Path(), tmp_path / "root"):
        traces = ServedTraces(3, torch.device("cpu"), root)
        plan: Any = SimpleNamespace(transport=LocalTransport(), micro_batch=7, forward_pass=None)
        for folder in outside:
            for _ in range(2):
                traces.begin(plan, ReportedPass(str(folder), TokenBytes(1, 1, 1), TRACE).text())
            assert plan.forward_pass is None  # as it was
            assert f"attention server 3 writes no traces to {folder}, which is not below" in caplog.messages.pop()
            caplog.clear()
        for folder in inside:
            with pytest.raises(AttributeError, match="kinds"):  # of a plan, which there is none of here
                traces.begin(plan, ReportedPass(str(folder), TokenBytes(1, 1, 1), TRACE).text())
