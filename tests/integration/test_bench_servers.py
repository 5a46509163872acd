"""The benchmark of steps beside attention servers runs on CPU processes: all modes, their numbers and bytes."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.commands import REPOSITORY
from support.scripts import run_script


MODES = ("ideal", "served", "alone")


def measure(folder: Path, trainers: int, documents: str, *more: str) -> tuple[str, dict[str, Any]]:
    """What trainers beside one server print, and their figures."""
    out, model = folder / "out.json", ["--device", "cpu", "--preset", "tiny", "--layers", "2"]
    options = [*model, "--documents", documents, "--rounds", "1", "--warmup", "0"]
    command = ["scripts/benchmarks/attention_step.py", *options, *more, "--out", out]
    printed = run_script(trainers, folder, command, servers=1)
    return printed, json.loads(out.read_text())


@pytest.mark.parametrize(
    ("trainers", "documents", "checkpointing"), [(1, "256,4x64", "saved"), (2, "192,8x24", "full")]
)
def test_a_step_is_timed_beside_a_server_and_without(
    tmp_path: Path, trainers: int, documents: str, checkpointing: str
) -> None:
    printed, facts = measure(tmp_path, trainers, documents, "--checkpointing", checkpointing)
    modes, load = facts["modes"], facts["load"]

    assert f"{trainers} trainers + 1 servers" in printed
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("| ")] == ["mode", *MODES]
    assert set(facts["errors"]) == set(modes) == set(MODES)
    assert all(error <= 1 for errors in facts["errors"].values() for error in errors.values())
    assert modes["served"]["loss"] == pytest.approx(modes["alone"]["loss"], rel=1e-5)
    assert modes["ideal"]["exchanged_bytes"] == 0
    assert modes["served"]["exchanged_bytes"] > 0
    assert (modes["alone"]["exchanged_bytes"] > 0) == (trainers > 1)
    assert re.search(r"^alone ÷ served \d\.\d{3}; parts of attention", printed, re.MULTILINE)
    # Of all GPUs: a server computes a part of the flops, and has no tokens.
    lengths = [256] + [64] * 4 if trainers == 1 else [192] + [24] * 8
    assert load["tokens"] * trainers == sum(lengths)
    served = modes["served"]
    per_second = served["tokens_per_second"] * served["step_seconds"]
    assert per_second == pytest.approx(sum(lengths) / (trainers + 1))
    found = re.search(r"those of servers last: ([\d., ]+); speeds", facts["plan"])
    assert found is not None
    assert [float(part) for part in found[1].split(", ")] == pytest.approx(
        [1 / (trainers + 1)] * (trainers + 1), rel=0.1
    )


def test_servers_have_to_be_launched(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no attention server was launched"):
        run_script(2, tmp_path, ["scripts/benchmarks/attention_step.py", "--device", "cpu", "--modes", "served"])


@pytest.mark.parametrize("option", ["--tp-size 2", "--dp-replicate-size 2", "--share-tokens 64", "--cluster h100"])
def test_options_of_other_steps_are_refused(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
) -> None:
    monkeypatch.setenv("DISTCA_LAUNCHED_SERVERS", "1")
    monkeypatch.setattr(sys, "argv", ["attention_step.py", "--device", "cpu", *option.split()])
    with pytest.raises(SystemExit):
        script("attention_step").parse()

    assert f"{option.split()[0]} is for steps without attention servers" in capsys.readouterr().err


def test_trainers_share_the_rows_of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    share_of = importlib.import_module("lib.documents").share_of
    segments = [(0, 10, 20), (3, 0, 6), (4, 2, 4)]

    assert [share_of(segments, rank, 2) for rank in range(2)] == [[(0, 10, 19)], [(0, 19, 20), (3, 0, 6), (4, 2, 4)]]
    assert [share_of(segments, rank, 3) for rank in range(3)] == [
        [(0, 10, 16)],
        [(0, 16, 20), (3, 0, 2)],
        [(3, 2, 6), (4, 2, 4)],
    ]
    assert share_of([], 0, 2) == []
