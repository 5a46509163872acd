"""What benchmark programs say of themselves: every mode has a line in `--help`, from the table that builds it."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("program", "table"),
    [
        ("attention_step", "lib.modes"),
        ("server_step", "lib.served"),
        ("model_step", "lib.whole_model.modes"),
        ("training_run", "lib.training.run"),
    ],
)
def test_help_says_what_every_mode_is(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    table: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{program}.py", "--help"])
    with pytest.raises(SystemExit):
        script(program).parse()
    _, _, shown = capsys.readouterr().out.partition("\nmodes:\n")
    named = [line.split()[0] for line in shown.splitlines() if line.startswith("  ") and line[2] != " "]

    assert named == list(script(table).MODES)


def test_a_mode_that_is_not_known_is_named(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["training_run.py", "--modes", "distca,moving"])
    with pytest.raises(SystemExit):
        script("training_run").parse()

    assert "mode 'moving' is none of distca, ulysses, packing, fixed" in capsys.readouterr().err
