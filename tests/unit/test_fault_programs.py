"""The programs that look for faults run their smallest case."""

import importlib
import sys

import pytest

from support.commands import REPOSITORY
from support.resuming import resumes_on_cpu_ranks


@pytest.mark.parametrize(
    ("program", "options", "told"),
    [
        (
            "ranks_apart",
            ["--ranks", "2", "--kinds", "raises", "--where", "forward", "--batches", "placed"],
            "1 of 1 were noticed and named",
        ),
        pytest.param(
            "signal_places",
            ["--places", "forward", "--batches", "placed", "--signals", "SIGTERM", "--workers", "0"],
            "1 of 1 trainings left a checkpoint and went on as if undisturbed",
            marks=resumes_on_cpu_ranks,
        ),
    ],
)
def test_program_runs_its_smallest_case(
    program: str,
    options: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "faults")
    monkeypatch.setattr(sys, "argv", [program, *options])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(program).main()

    assert ended.value.code == 0
    assert told in capsys.readouterr().out
