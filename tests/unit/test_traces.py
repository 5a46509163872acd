"""Traces: lines are read as they were written, others are refused in words; what stays in the file of a rank."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from distca_hf.errors import ReportError
from distca_hf.trace_file import TraceFile
from distca_hf.traces import RankTrace, file_name
from support.made_traces import made_trace


TRACE = made_trace(1, ranks=4, slow_rank=2)


def steps_of(folder: Path, number: int = 0) -> list[int]:
    lines = (folder / file_name(number)).read_text().splitlines()
    return [RankTrace.read(line, "here").step for line in lines]


@pytest.mark.parametrize("trace", [TRACE, replace(TRACE, costs=None, step_seconds=None, calls=(), sent_bytes=())])
def test_line_is_read_as_it_was_written(trace: RankTrace) -> None:
    assert RankTrace.read(trace.line(), "here") == trace


CONTENT = json.loads(TRACE.line())
WRONG = {
    "cut off": (TRACE.line()[:-40], "is no JSON: the file is cut off"),
    "a list": ("[1, 2]", "is no trace of a training: its kind is None"),
    "another kind": ('{"kind": "trace"}', "its kind is 'trace', and 'distca-trace' is read here"),
    "another version": (json.dumps(CONTENT | {"version": 2}), "is of version 2, and version 1 is read here"),
    "a field less": (json.dumps({name: CONTENT[name] for name in CONTENT if name != "work"}), "has no 'work'"),
    "a text for a number": (json.dumps(CONTENT | {"step": "2"}), "has '2' where a int belongs"),
    "a truth for a number": (json.dumps(CONTENT | {"tokens": True}), "has 'True' where a int belongs"),
    "three for a pair": (json.dumps(CONTENT | {"sent_bytes": [[1, 2, 3]]}), "has '[1, 2, 3]' where a tuple belongs"),
    "another use": (json.dumps(CONTENT | {"calls": [CONTENT["calls"][0] | {"spans": [["sleep", 1.0]]}]}), "'sleep'"),
    "no object": (json.dumps(CONTENT | {"memory": 5}), "has '5' where a MemoryUse belongs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_lines_are_refused_in_words(name: str) -> None:
    line, words = WRONG[name]
    with pytest.raises(ReportError) as refused:
        RankTrace.read(line, "rank-00000.jsonl line 3")

    assert str(refused.value).startswith("rank-00000.jsonl line 3 ")
    assert words in str(refused.value)


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
